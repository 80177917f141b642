"""Parameters, which know their place in the global model before they have memory, their gradients' work, their packed copies."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.base import Comm
from .shared import is_frozen


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """What a parameter is in the whole model; `parameter.spec`.

    name: global name. shape: global shape. offset: where this rank's slice begins, in elements of each dimension. partition_dim:
    the dimension that tensor-parallel ranks share, None for a replica. init_std: of normal initial values; None: all `init_fill`.
    init_name: the name whose random stream it starts with (the tied head starts like the embedding). owned: this rank saves it.
    counted: this rank's copy counts in norms. sequence_parallel: every tensor-parallel rank holds it and computes its gradient from
    a part of the sequence, or from its own heads, so that the gradient is the sum over those ranks (Megatron's attribute of that
    name). expert: of divided experts, whose gradients the ranks with the same experts reduce. balances: it is added to scores of
    experts when these are chosen; its gradient is the tokens of each expert beyond the mean, of which the optimizer takes the sign
    alone. frozen: it is not trained, as where the run trains adapters.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    partition_dim: int | None
    init_std: float | None
    init_fill: float
    init_name: str
    owned: bool
    counted: bool
    sequence_parallel: bool = False
    expert: bool = False
    balances: bool = False
    frozen: bool = False

    @property
    def decayed(self) -> bool:
        """Whether weight decay applies to it: to matrices, not to biases and norms."""
        return len(self.shape) > 1 and not self.name.endswith(".bias")

    @property
    def orthogonal(self) -> bool:
        """Whether Muon makes its updates orthogonal: those of all matrices but the embeddings' and the logits' weight."""
        return self.decayed and not self.name.startswith(("embedding.", "output_layer."))

    @property
    def decoupled(self) -> bool:
        """Whether --decoupled-lr applies to it: the word embedding and the logits' weight."""
        return self.name in ("embedding.word_embeddings.weight", "output_layer.weight")


def make_parameter(
    name: str,
    shape: tuple[int, ...],
    tp: Comm | None = None,
    partition_dim: int | None = None,
    std: float | None = None,
    fill: float = 0.0,
    init_name: str | None = None,
    sequence_parallel: bool = False,
    experts: Comm | None = None,
    balances: bool = False,
    frozen: bool = False,
) -> nn.Parameter:
    """This rank's slice of the global tensor `name`, on the meta device, with its `spec`.

    `shape` is the global shape in parentheses, such as (f, h); `partition_dim` is split evenly over `tp`. Initial values:
    normal(0, std), or `fill` where std is None. sequence_parallel: layers between the matmuls work on parts of the sequence.
    experts: ranks among which the first dimension, that of experts, is divided.
    balances, frozen: see `ParameterSpec`.
    """
    local, offset = list(shape), [0] * len(shape)
    if partition_dim is not None:
        assert tp is not None and shape[partition_dim] % tp.size == 0, (name, shape, tp)
        local[partition_dim] //= tp.size
        offset[partition_dim] = tp.rank * local[partition_dim]
    if experts is not None:
        assert shape[0] % experts.size == 0, (name, shape, experts)
        local[0] //= experts.size
        offset[0] = experts.rank * local[0]
    # What every tensor-parallel rank holds belongs to the first one: it saves it. Norms count that once, and no tied copy.
    owned = partition_dim is not None or tp is None or tp.rank == 0
    parameter = nn.Parameter(torch.empty(local, device="meta"))
    parameter.spec = ParameterSpec(  # type: ignore[attr-defined]  # torch's class does not know it
        name=name,
        shape=tuple(shape),
        offset=tuple(offset),
        partition_dim=partition_dim,
        init_std=std,
        init_fill=fill,
        init_name=init_name or name,
        owned=owned,
        counted=owned and init_name is None and not balances,
        sequence_parallel=sequence_parallel and partition_dim is None,
        expert=experts is not None,
        balances=balances,
        frozen=frozen,
    )
    return parameter


def spec_of(parameter: torch.Tensor) -> ParameterSpec:
    """What a parameter of `make_parameter` is in the whole model."""
    return parameter.spec  # type: ignore[attr-defined]


PARAMETER_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}  # by PrecisionConfig.name


# Weight gradients, computed at once or put off: what splits a backward into its two halves (Qi et al. 2023, "Zero Bubble Pipeline
# Parallelism", arXiv:2401.10241, section 2). A backward computes gradients of inputs, for which another stage waits, and gradients
# of weights, for which nobody waits before the optimizer. Operations hand the second kind over as work:
#
#     gradients.add(work)                    at once, or
#     with gradients.put_off() as waiting:   the gradients of inputs alone
#         backward(y, dy)
#     waiting.run()                          later: the same calls in the same order, so the same bits

Work = Callable[[], object]


class Waiting:
    """What one backward has put off. It keeps the tensors that it needs alive."""

    def __init__(self) -> None:
        self._work: deque[Work] = deque()

    def append(self, work: Work) -> None:
        """Put `work` at the end."""
        self._work.append(work)

    @torch.no_grad()  # as autograd calls a backward
    def run(self) -> None:
        """Do all of it in the order of `append`, freeing each one's tensors."""
        while self._work:
            self._work.popleft()()


class WeightGradients:
    """Where a rank's operations bring their weight-gradient work. Used by one thread."""

    def __init__(self) -> None:
        self._waiting: Waiting | None = None

    @property
    def waits(self) -> bool:
        """Whether work that is added now will be done later, so that its operands must stay as they are."""
        return self._waiting is not None

    def add(self, work: Work) -> None:
        """Do `work`, or put it off."""
        if self._waiting is None:
            work()
        else:
            self._waiting.append(work)

    @contextmanager
    def put_off(self) -> Iterator[Waiting]:
        """Inside, what is added waits in the result."""
        assert self._waiting is None, "the work of another backward is being put off"
        self._waiting = waiting = Waiting()
        try:
            yield waiting
        finally:
            self._waiting = None


# Weights packed for the GEMM kernels once per optimizer step instead of in every matmul: --cache-packed-weights. A matmul reads a
# packed weight 3 to 5 per cent faster than it packs one (head: 15), and pays with a copy of the weights for forward and one for the
# data gradient. Results have the same bits.


@dataclass
class _Entry:
    """A packed copy. weight: kept, so that nobody else gets its memory. target: the kernels that it was packed for."""

    weight: Tensor
    buffer: Tensor
    target: str = ""
    valid: bool = False


class WeightCache:
    """The packed copies of one rank's weights; `Optimizer` calls `weights_changed` after every change of a weight.

    kernels: the kernel library (`host.kernels`, or what a profiler put around it).
    """

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self._entries: dict[tuple[int, tuple[int, ...], bool], _Entry] = {}

    def weights_changed(self, frozen: bool = False) -> None:
        """What is packed is packed again, into the same memory, at its next use; frozen weights only where they have changed."""
        for entry in self._entries.values():
            entry.valid = entry.valid and is_frozen(entry.weight) and not frozen

    def packed(self, weight: Tensor, transposed: bool) -> Tensor:
        """weight (out, in) packed for the target in use: bytes (n,), for linear_forward, or transposed for linear_data_gradient."""
        key, target = (weight.data_ptr(), tuple(weight.shape), transposed), self._kernels.active()
        size = self._kernels.packed_weight_size(*weight.shape, weight.dtype, transposed)
        entry = self._entries.get(key)
        if entry is None or entry.buffer.numel() != size:
            entry = self._entries[key] = _Entry(weight, torch.empty(size, dtype=torch.uint8))
        if not entry.valid or entry.target != target:
            self._kernels.pack_weight(weight, entry.buffer, transposed)
            entry.valid, entry.target = True, target
        return entry.buffer
