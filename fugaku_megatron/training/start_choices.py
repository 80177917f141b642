"""What a run leaves to the program, settled before the model is built: the vocabulary, the schedule, recompute, and the kernels.

--kernels auto times native against torch kernels once, on this run's own shapes, and takes the faster of each family: every rank
times alone, and rank 0's choice holds for all.

Left out: how the performance model ranks schedules (`perf.search`); threads and instruction sets (`host.kernels`).
Legend: s sequence, b micro-batch, h hidden.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..checkpoint.manifest import CARRIED, existing_iteration, own_checkpoint, read_head
from ..comm.agreement import Nodes, agree, differing, everywhere, find_nodes, on_root
from ..comm.base import Comm, SoloComm
from ..config import batches
from ..config.checks import check, flag
from ..config.groups import EITHER, P2P, DataConfig
from ..config.layout import Layout
from ..config.model_config import ModelConfig
from ..config.recipes import GPT2_VOCABULARY
from ..config.run_config import GROUPS, OWN_OF_A_RANK, RECOMPUTE, RunConfig
from ..costs import accounting, memory, run_schedule
from ..data.build import parse_data_path
from ..data.tokenizer import (
    TokenizerFlags,
    build_tokenizer,
    identity,
    mismatch,
    model_tokenizer,
    read_identity,
)
from ..host import kernels
from ..host.allocator import node_bytes
from ..nn.ops import BACKENDS, FAMILIES, DropoutKey, Ops
from ..nn.parameter import PARAMETER_DTYPES
from ..pipeline.parts import AUTO
from .machine_faults import ALL
from .rank_watch import PROCESS_BYTES

if TYPE_CHECKING:
    from ..perf.model import System


def read_tokenizer(run: RunConfig, world: Comm) -> dict[str, Any] | None:
    """Return the identity of the run's tokenizer (`data.tokenizer.identity`).

    None if no flag names a tokenizer, and the run needs none or the model that it starts from has
    none. Collective: one rank reads the files. ValueError on every rank if that fails.
    """

    def read() -> dict[str, Any] | None:
        flags = TokenizerFlags.of(run.data, run.model.vocab_size)
        needed = run.model.vocab_size is None or bool(run.data.marks_documents)
        if flags.named or (needed and not run.data.mock_data):
            found = find_tokenizer(run)
            return identity(build_tokenizer(*found)) if found else None
        return None

    return on_root(world, read)


def find_tokenizer(run: RunConfig) -> TokenizerFlags | None:
    """Return the tokenizer that the flags name, or else that of the model which the run starts from.

    None if there is none. ValueError for a checkpoint that cannot be read.
    """
    flags = TokenizerFlags.of(run.data, run.model.vocab_size)
    if flags.named:
        return flags
    output = run.output
    starts = ((output.load, output.ckpt_step), (output.pretrained_checkpoint, None))
    for directory, iteration in starts:
        if directory and (found := _tokenizer_in(directory, iteration, run.model.vocab_size)):
            return found
    return None


def _tokenizer_in(directory: str, iteration: int | None, size: int | None) -> TokenizerFlags | None:
    """Return the tokenizer of a model, which may be another program's."""
    own = own_checkpoint(directory, iteration)
    if own is None:
        places = (Path(directory) / CARRIED, Path(directory))
        return next(filter(None, (model_tokenizer({}, place, size) for place in places)), None)
    step = existing_iteration(own[0]) if own[1] is None else own[1]
    config = {} if step is None else read_head(own[0], step)["config"]
    size = size or config.get("model", {}).get("vocab_size")
    return model_tokenizer(config.get("data", {}), Path(own[0]) / CARRIED, size)


def with_vocabulary(run: RunConfig, tokenizer: dict[str, Any] | None) -> RunConfig:
    """The run with its vocabulary size known: --vocab-size, the tokenizer's (`read_tokenizer`), or with --mock-data GPT-2's.

    Raises ValueError when none of them is known or the tokenizer has more tokens than --vocab-size, and where flags need a token
    that ends a document and none is known.
    """
    if run.data.marks_documents:
        end_of_document(run.data, tokenizer)
    data, vocab_size = run.data, run.model.vocab_size
    if tokenizer:
        size = tokenizer["vocab_size"]
        named = "the tokenizer of the model that the run starts from"
        if data.tokenizer_model:
            named = f"--tokenizer-model {data.tokenizer_model}"
        elif data.vocab_file:
            named = f"--vocab-file {data.vocab_file}"
        check(
            vocab_size is None or vocab_size >= size,
            f"--vocab-size {vocab_size} is below the {size} tokens of {named}: pass at "
            f"least {size}, or leave it out",
        )
    else:
        check(
            vocab_size is not None or data.mock_data,
            "the vocabulary size is unknown: pass --vocab-file and --merge-file, "
            "--tokenizer-type and --tokenizer-model, --vocab-size, or a model with a tokenizer as "
            "--pretrained-checkpoint",
        )
        size = GPT2_VOCABULARY
    return replace(run, model=replace(run.model, vocab_size=vocab_size or size))


def end_of_document(data: DataConfig, tokenizer: dict[str, Any] | None) -> int:
    """The token that ends a document, which flags need. ValueError where it is not known, or the tokenizer has none."""
    check(
        bool(tokenizer),
        f"{data.marks_documents}: the token that ends a document is not known: name the tokenizer of the data, "
        "with --vocab-file and --merge-file or with --tokenizer-type and --tokenizer-model",
    )
    eod = (tokenizer or {}).get("eod")
    if eod is None:
        raise ValueError(
            f"{data.marks_documents}: --tokenizer-type {data.tokenizer_type} has no token that ends a document: leave "
            "it out, or pass another tokenizer"
        )
    return int(eod)


def tokenizer_notes(
    run: RunConfig, tokenizer: dict[str, Any] | None, saved: dict[str, Any] | None, world: Comm
) -> list[str]:
    """Lines about data, or a checkpoint whose state has `saved`, that come from another tokenizer. Collective."""
    notes = on_root(world, lambda: [*_data_notes(run, tokenizer)])
    other = mismatch(tokenizer, saved)
    return notes + [
        f"note: the checkpoint in --load was trained with {other}: their tokens mean different texts"
    ] * bool(other)


def _data_notes(run: RunConfig, tokenizer: dict[str, Any] | None) -> Iterable[str]:
    for prefix in dict.fromkeys(
        prefix for path in run.data.paths.values() for prefix in parse_data_path(path)[0]
    ):
        if other := mismatch(tokenizer, read_identity(prefix)):
            yield f"note: {prefix} was tokenized with {other}: pass the tokenizer that preprocess has used"


MIB = 1 << 20
FIT = 0.9  # of a node's memory may be used by what is chosen; the system and the error of the model need the rest
MACHINE = "a64fx"  # whose costs rank the schedules everywhere, so that a dry run on another machine chooses the same


def tensor_bytes(
    run: RunConfig, layout: Layout, world: Comm | None = None, nodes: Nodes | None = None
) -> int:
    """Bytes that the tensors of a rank may have, the same on every rank. Collective over `world`.

    From --memory-per-rank, or where it is not given from the smallest share of any node of which the ranks share nine tenths.
    Without a world from this node's memory, for one rank.
    """
    fixed = PROCESS_BYTES + memory.attention_bytes(run, layout.tp, torch.get_num_threads())
    if own := run.training.memory_per_rank:
        return own * MIB - fixed
    samples = batches.run_length(run, layout.global_batch_size(run))[1]
    share = int(FIT * node_bytes()) - memory.data_index_bytes(run, samples)
    if world is not None:
        share = int(
            world.all_reduce(torch.tensor(share // (nodes or find_nodes(world)).ranks.size), "min")
        )
    return share - fixed


def modelled_system(layout: Layout) -> System:
    """The nodes, of one rank each, whose costs stand for those of any machine."""
    from ..perf.model import System
    from ..perf.software import THIS_PROJECT

    return System.from_names(MACHINE, THIS_PROJECT, layout.world_size, 1)


def settle(
    run: RunConfig, layout: Layout, world: Comm | None = None, nodes: Nodes | None = None
) -> tuple[RunConfig, list[str]]:
    """The run with nothing left to choose, and the log's lines about it. Collective over `world`.

    Rank 0 chooses for all. Only --pipeline-schedule auto needs times, those of `modelled_system`: a run without it does not load
    the performance model.
    """
    ranks_schedules = run.parallel.pipeline_schedule == AUTO and layout.pp > 1
    if world is not None and nodes is not None and layout.cp > 1 and not run.data.masks_attention:
        run = between_nodes(run, layout, world, nodes)
    if not run.training.recompute_auto and not ranks_schedules:
        return run, []
    space = tensor_bytes(run, layout, world, nodes)
    if not ranks_schedules:
        return on_root(world, lambda: run_schedule.settled(run, layout, space))
    from ..perf import search

    system = modelled_system(layout)
    return on_root(world, lambda: search.settled(run, layout, system, space))


def between_nodes(run: RunConfig, layout: Layout, world: Comm, nodes: Nodes) -> RunConfig:
    """The run whose layers pass keys and values, which attention hides, where ranks of a sequence are on several nodes.

    Not those layers for which --cp-comm-type says otherwise. For sequences that are not cut into documents, so that ranks have the
    same work. Collective.
    """
    sharing = layout.tp * layout.cp  # ranks, which follow one another
    own = torch.tensor([world.rank // sharing])
    near = nodes.ranks.all_gather(own.new_empty(nodes.ranks.size), own)
    together = int((near == own).sum()) == sharing
    if world.all_reduce(torch.tensor(together, dtype=torch.int64), "min"):
        return run
    ways = tuple(P2P if way == EITHER else way for way in run.parallel.cp_comm_type or (EITHER,))
    return replace(run, parallel=replace(run.parallel, cp_comm_type=ways))


@dataclass(frozen=True)
class Choice:
    """A backend for each family of operations, and what the log says of it."""

    backends: dict[str, str]
    lines: list[str]


def check_same_run(run: RunConfig, world: Comm) -> list[str]:
    """The log's lines about flags that ranks were given differently. Collective.

    Raises ValueError on every rank, with the flag, its values and the ranks, where the run cannot be that of all of them.
    """
    values = {
        flag(name): value
        for group in GROUPS
        for name, value in vars(getattr(run, group)).items()
        if name[0] != "_"
    }
    own = {flag(name) for name in OWN_OF_A_RANK}
    text = differing(world, {name: value for name, value in values.items() if name not in own})
    recompute = {flag(name): values[flag(name)] for name in RECOMPUTE}
    among = differing(world, recompute)
    tp = run.parallel.tensor_model_parallel_size
    if text is None and among is not None and world.size % tp == 0:
        inside = world.split(
            world.rank // tp, world.rank
        )  # tensor parallelism is innermost, and recomputes together
        problem = differing(inside, recompute)
        remedy = f"{problem} of the tensor-parallel group that begins with rank {world.rank // tp * tp}: pass these ranks the same"
        agree(world, lambda: check(problem is None, remedy), name_rank=False)
    with everywhere():
        check(
            text is None,
            f"{text}: pass every rank the same command line, apart from what may differ between pipeline stages "
            "(recompute) and between nodes (places of their own, threads)",
        )
    return [f"ranks recompute differently: {among}"] * (among is not None)


def build_ops(run: RunConfig, backends: Mapping[str, str], library: Any = kernels) -> Ops:
    """The run's operations on these backends. library: the C++ kernels, or what a profiler put around them."""
    return Ops.build(
        backends,
        fp16_chunk=run.system.fp16_accumulation_chunk or 0,
        bf16x3=run.system.splits_fp32,
        keep_packed_weights=run.system.cache_packed_weights,
        kernels=library,
    )


def choose_kernels(
    run: RunConfig, layout: Layout, world: Comm, saved: dict[str, str] | None = None
) -> Choice:
    """The backend of every family, the same on all ranks, with the log's lines. Collective.

    A resumed run keeps the automatic choice that it was `saved` with: other kernels have other last bits.
    """
    return _with_checksums(run, _with_other_sums(run, _backends(run, layout, world, saved)))


def _with_checksums(run: RunConfig, choice: Choice) -> Choice:
    """The choice with matmuls on the C++ kernels where checksums check them: only they can."""
    if not run.numbers.abft:
        return choice
    line = f"kernels: gemm native, {checked_matmuls(run)}"
    return Choice({**choice.backends, "gemm": "native"}, [*choice.lines, line])


def checked_matmuls(run: RunConfig) -> str:
    """Return which matmuls --abft checks, and which it does not."""
    model = run.model
    layers = run.numbers.abft or ()
    whole = ALL in layers
    checked = ["of all layers" if whole else f"of layers {' '.join(layers)}"]
    if model.num_experts:
        checked.append("with their experts")
    if whole:
        checked.append("and of the logits")
        if run.optimizer.muon:
            checked.append("and of Muon")
    left_out = ["attention's own (scores and values)"]
    dense = model.activation in model.mlps or model.moe_shared_expert_intermediate_size
    if dense and not model.gated:
        left_out.append(
            "the gradient of an MLP's inner tensor, which the kernel multiplies by the "
            "activation's derivative"
        )
    if model.num_experts:
        left_out.append("routers")
    if not whole:
        left_out.append("other layers and the logits")
    return f"matmuls {' '.join(checked)} checked by checksums; not checked: {', '.join(left_out)}"


def _backends(run: RunConfig, layout: Layout, world: Comm, saved: dict[str, str] | None) -> Choice:
    requested = run.system.kernels
    if requested == "auto" and saved:
        return Choice(
            saved,
            [
                f"kernels: as saved, {', '.join(f'{family} {name}' for family, name in saved.items())}"
            ],
        )
    if requested != "auto":
        return Choice(
            dict.fromkeys(FAMILIES, requested),
            [f"kernels: {requested} (instruction set {kernels.instruction_set()})"],
        )
    timings = measure_kernels(run, layout.tp, PARAMETER_DTYPES[run.precision.name])
    title = f"kernels: auto, forward and backward on this run's shapes, rank 0 (instruction set {kernels.instruction_set()})"
    return Choice(
        world.broadcast_object({t.family: t.faster for t in timings}),
        [title, *kernel_table(timings)],
    )


def _with_other_sums(run: RunConfig, choice: Choice) -> Choice:
    """The choice with matmuls on the C++ kernels where they sum in FP16 or multiply FP32 in BF16 parts: only they can."""
    chunk = run.system.fp16_accumulation_chunk
    if not chunk and not run.system.splits_fp32:
        return choice
    line = f"kernels: gemm native, partial sums of {chunk} terms in FP16, added up in FP32"
    if run.system.splits_fp32:
        line = (
            "kernels: gemm native, each FP32 operand as three BF16 numbers, six BF16 matmuls added up in FP32 "
            "(faster than FP32 units on AMX only)"
        )
    return Choice({**choice.backends, "gemm": "native"}, [*choice.lines, line])


# Which kernels are faster ---------------------------------------------------------------------------------------------------------

REPEATS = 3
MARGIN = 1.1
LAYER_TOKENS = (
    4096  # rows that are timed at most: attention of longer sequences takes as long as iterations
)


@dataclass(frozen=True)
class Timing:
    """Seconds of forward and backward of one family."""

    family: str
    native: float
    torch: float

    @property
    def faster(self) -> str:
        """torch only where it is clearly faster, so that noise does not change a run's last bits."""
        return "native" if self.native <= MARGIN * self.torch else "torch"


def _weight(*shape: int, dtype: torch.dtype) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.randn(shape).mul_(0.02).to(dtype))
    weight.main_grad = torch.zeros(shape)  # type: ignore[attr-defined]  # see shared.gradient_of
    return weight


def kernel_cases(run: RunConfig, tp: int, dtype: torch.dtype) -> dict[str, Callable[[Ops], Tensor]]:
    """One call per family on this run's shapes; each returns a scalar () to differentiate."""
    model = run.model
    s, h = min(model.seq_length, LAYER_TOKENS), model.hidden_size
    b = min(run.batch.micro_batch_size, LAYER_TOKENS // s)
    x = torch.randn(s, b, h).to(dtype).requires_grad_()
    residual = x.detach()[: s // accounting.sequence_parts(run, tp)].requires_grad_()
    qkv = torch.randn(s, b, model.qkv_width // tp).to(dtype).requires_grad_()
    rows = min(accounting.padded_vocab_size(model, tp) // tp, 2048)
    table, tokens = _weight(rows, h, dtype=dtype), torch.randint(0, rows, (s, b))
    scores = DropoutKey(1, 1, 0, sample_dim=0)
    return {
        "gemm": _mlp(model, x, tp),
        "attention": lambda ops: ops.attention(
            qkv,
            model.kv_channels,
            model.attention_dropout,
            scores,
            model.query_groups // tp,
            model.window,
        ).sum(),
        "rowwise": _add_and_normalize(model, residual),
        "loss": lambda ops: ops.head_loss(
            x, table, tokens, SoloComm(), 0, 1.0, z_loss=model.z_loss
        ),
        "embedding": lambda ops: ops.embedding(tokens, table).sum(),
    }


def _mlp(model: ModelConfig, x: Tensor, tp: int) -> Callable[[Ops], Tensor]:
    """The model's MLP of x (s, b, h)."""
    f, h, dtype, gates = model.ffn_hidden_size // tp, model.hidden_size, x.dtype, [2] * model.gated
    fc1, bias, fc2 = (
        _weight(*gates, f, h, dtype=dtype),
        _weight(*gates, f, dtype=dtype),
        _weight(h, f, dtype=dtype),
    )
    if model.gated:
        return lambda ops: ops.gated_mlp(x, fc1, bias, fc2, activation=model.activation).sum()
    return lambda ops: ops.mlp(x, fc1, bias, fc2, activation=model.activation).sum()


def _add_and_normalize(model: ModelConfig, x: Tensor) -> Callable[[Ops], Tensor]:
    """The model's norm of x + dropout(x + bias), x (s, b, h)."""
    add, norm, norm_bias = (_weight(model.hidden_size, dtype=x.dtype) for _ in range(3))
    more = (model.hidden_dropout, DropoutKey(1, 0, 0, sample_dim=1), norm)
    if model.normalization.endswith("RMSNorm"):
        return lambda ops: ops.bias_dropout_add_rms_norm(x, add, x, *more, model.layernorm_epsilon)[
            1
        ].sum()
    return lambda ops: ops.bias_dropout_add_layer_norm(
        x, add, x, *more, norm_bias, model.layernorm_epsilon
    )[1].sum()


def _seconds(case: Callable[[Ops], Tensor], ops: Ops) -> float:
    seconds = []
    for _ in range(REPEATS + 1):  # the first warms up
        started = time.perf_counter()
        case(ops).backward()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def measure_kernels(run: RunConfig, tp: int, dtype: torch.dtype) -> list[Timing]:
    """Time every family on both backends, in turn."""
    backends = {name: Ops.build(name) for name in BACKENDS}
    return [
        Timing(family, **{name: _seconds(case, ops) for name, ops in backends.items()})
        for family, case in kernel_cases(run, tp, dtype).items()
    ]


def kernel_table(timings: list[Timing]) -> list[str]:
    """The log's lines."""
    head = f"  {'kernels':<10} {'native ms':>10} {'torch ms':>10}  used"
    return [
        head,
        *(
            f"  {t.family:<10} {t.native * 1e3:>10.2f} {t.torch * 1e3:>10.2f}  {t.faster}"
            for t in timings
        ),
    ]
