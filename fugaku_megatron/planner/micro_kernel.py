"""Cycles of an INT8 matmul on an SVE core, from the instructions of its micro-kernel.

kernels_sve/gemm/gemm_micro.h: a tile of ROWS x VECTORS sums stays in registers over all k. A step
multiplies four k: a broadcast for each row, a load for each vector, a dot product for each sum.
Both operands are packed and in L2. Left out: quantization and packing.
"""

from __future__ import annotations

from typing import NamedTuple

from ..config.fields import check
from .machine import Machine

ROWS = 12  # kernels_sve/tuning.h, sve512: GEMM_MR
VECTORS = 2  # GEMM_NR_VECTORS
LANE_BYTES = 4  # of a sum, and of a step's four INT8 numbers
PACK_COST = 16  # kernels_sve/tuning.h: multiply-adds that take as long as packing an element
STREAM_COST = 3  # and as reading an element of a packed weight
LOOP_INSTRUCTIONS = 3  # two addresses, and a compare that is fused with its branch

# Of a tile's sums after the last step, each a vector: the micro-kernel stores them, scale_tile loads,
# converts, multiplies by both scales and stores them, finish_tile copies them to C.
SCALING_OPERATIONS = 3
SCALING_STORES = 3
SCALING_CHAIN = 3  # dependent operations of a sum, each with the dot product's latency


class Core(NamedTuple):
    """Rates of a core with fixed-length vectors, from a machine's `core`.

    pipes: multiply-add instructions a cycle; loads, decoded: instructions a cycle
    dot_latency, load_latency: cycles
    l2_read, l2_write: bytes a cycle, if all cores of a unit use L2
    barrier_us, least_barrier_us, most_barrier_us: begin and end of a parallel region in microseconds
    """

    vector_bytes: float
    pipes: float
    loads: float
    decoded: float
    dot_latency: float
    load_latency: float
    l2_read: float
    l2_write: float
    barrier_us: float
    least_barrier_us: float
    most_barrier_us: float


class MatmulShare(NamedTuple):
    """Share of the peak of INT8 dot products. low, high: by what may overlap with the k-loop."""

    seconds: float
    share: float
    low: float
    high: float


def k_loop_cycles(core: Core) -> float:
    """Return the cycles of a step, the largest of multiply, load, decode and latency limits."""
    dots = ROWS * VECTORS
    loads = ROWS + VECTORS
    return max(
        dots / core.pipes,
        loads / core.loads,
        (dots + loads + LOOP_INSTRUCTIONS) / core.decoded,
        core.dot_latency,
    )


def busiest_tiles(m: int, n: int, columns: int, threads: int) -> int:
    """Return the tiles of the thread with the most, in the grid that gemm_grid chooses."""
    found = []
    for parts in range(1, threads + 1):
        if threads % parts:
            continue
        rows = -(-m // (ROWS * parts))
        panels = -(-n // (columns * (threads // parts)))
        read = PACK_COST * rows * ROWS + STREAM_COST * panels * columns
        found.append((rows * ROWS * panels * columns + read, rows * panels))
    return min(found)[1]


def int8_matmul(machine: Machine, shape: tuple[int, int, int], threads: int) -> MatmulShare:
    """Return the time of an (m, k) x (k, n) matmul in INT8 on `threads` cores of a unit.

    shape: (m, n, k)
    """
    check(
        bool(machine.core),
        f"--matmul needs the rates of a core, which the description of machine {machine.name} lacks: "
        "pass --machine a64fx",
    )
    core = Core(**machine.core)
    m, n, k = shape
    columns = VECTORS * int(core.vector_bytes) // LANE_BYTES
    steps = -(-k // LANE_BYTES)
    sums = ROWS * VECTORS
    loop = steps * k_loop_cycles(core) + core.load_latency + core.dot_latency
    scaling = sums * (SCALING_OPERATIONS + SCALING_STORES) / core.pipes
    scaling += SCALING_CHAIN * core.dot_latency + core.load_latency
    tile_bytes = ROWS * columns * LANE_BYTES
    written = tile_bytes / core.l2_read + tile_bytes / core.l2_write
    panel_bytes = ROWS * steps * LANE_BYTES
    read = panel_bytes / core.l2_read
    tiles = busiest_tiles(m, n, columns, threads)
    hertz = machine.ghz * 1e9
    peak = 2.0 * core.pipes * core.vector_bytes * hertz * threads

    def seconds(cycles_of_tile: float, barrier_us: float) -> float:
        return tiles * cycles_of_tile / hertz + barrier_us * 1e-6

    def share(time: float) -> float:
        return 2.0 * m * n * k / time / peak

    middle = seconds(loop + scaling + written, core.barrier_us)
    return MatmulShare(
        seconds=middle,
        share=share(middle),
        low=share(seconds(loop + scaling + written + read, core.most_barrier_us)),
        high=share(seconds(loop, core.least_barrier_us)),
    )
