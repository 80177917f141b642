"""--check-layout: no alarm for layouts that train as one rank, and the first wrong tensor of injected mistakes."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fugaku_megatron.checkpoint.tensor_files import write_tensors
from fugaku_megatron.comm.base import Comm, SoloComm
from fugaku_megatron.config.run_config import RunConfig
from fugaku_megatron.costs.plan import Plan
from fugaku_megatron.layout_check import check as check_module
from fugaku_megatron.layout_check.check import NO_FILES, Files, Report, check_layout
from fugaku_megatron.layout_check.compare import Comparison, Tolerance
from fugaku_megatron.layout_check.points import (
    BACKWARD,
    CHECKPOINT,
    FORWARD,
    KINDS,
    LOADED,
    MOMENT,
    REDUCED,
    SCALE,
    STATE,
    UPDATE,
    USED,
    Point,
)
from fugaku_megatron.layout_check.recorder import Piece
from fugaku_megatron.layout_check.shrink import shrink
from fugaku_megatron.nn import blocks, layers, model, router
from fugaku_megatron.nn.attention import context_parallel
from fugaku_megatron.nn.dropout_key import Dropout, DropoutKey
from fugaku_megatron.nn.ops import loss
from fugaku_megatron.optim import buckets, loss_scaler, muon, optimizer
from fugaku_megatron.run import check_layout as check_layout_module
from fugaku_megatron.run.assemble import build_trainer
from fugaku_megatron.run.check_layout import differing_libraries
from fugaku_megatron.training import checkpoints, step, trainer
from fugaku_megatron.training.micro_batches import MicroBatch, MicroBatchWindow
from tests.checks.moments import EIGHT as MOMENTS_IN_INT8
from tests.helpers import DROPOUT, lay_out
from tests.llama_models import DELTA_LAYERS, LATENT
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel

ROOT = Path(__file__).resolve().parents[2]
EXPERTS = {
    "num_experts": 4,
    "moe_layer_freq": "([0]+[1]*3)",
    "moe_aux_loss_coeff": (0.01,),
    "disable_bias_linear": True,
    "swiglu": True,
}
LLAMA = {
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "disable_bias_linear": True,
    "swiglu": True,
}
LORA = {**LLAMA, "lora_rank": 4, "lora_dropout": 0.25}
UNTIED = {"untie_embeddings_and_output_weights": True}
ROW = re.compile(r"  (?P<kind>\S.*?)  +\d+  +(?P<error>\S+)  +(?P<allowed>\S+)  .*")
MARGIN = 3  # between the tolerance and the errors of right layouts
EIGHT = {"global_batch_size": 8}
CLEAN = {
    "tp2 pp2 dp2 sequence zero": EIGHT,
    "tp2 pp2 dp2 overlap full": EIGHT,
    "tp2 dp2 ep2 sequence": EXPERTS,
    "cp2 p2p": {},
    "cp2 tp2 sequence": UNTIED,
    "pp2 interleaved": {},
    "pp2 tp2 sequence": {"layer_types": "-,*,*-,*"},
    "tp2 cp2": {
        **UNTIED,
        **DELTA_LAYERS,
        "linear_num_key_heads": 4,
    },
    "tp2 cp2 sequence": LATENT,
    "pp2 zbv": {"norm_placement": "post", "disable_bias_linear": True},
    "tp2 pp2": LORA,
    "tp2 bf16": EIGHT,
    "pp2 tp2 bf16 int8": EIGHT,
    "dp2 ep2 bf16": EXPERTS,
    "tp2 dp2 zero": {**EIGHT, "optimizer": "muon", "muon_tp_mode": "blockwise"},
    "tp2 muon_no_split_qkv": {
        **LLAMA,
        "optimizer": "muon",
        "muon_tp_mode": "blockwise",
        "num_experts": 4,
    },
    "dp2 zero fp16": EIGHT,
    "tp2 pp2 sequence full": {**LLAMA, "mtp_num_layers": 2},
    "pp2 dp2 zero": {**LLAMA, **UNTIED, "mtp_num_layers": 1},
    "tp2 dp2 zero bf16": {**EIGHT, **MOMENTS_IN_INT8},
}
FORMATS = {
    "bf16": ["in FP32:", "in BF16:"],
    "fp16": ["in FP32:", "in FP16:"],
    "bf16 int8": ["in FP32:", "in INT8:"],
    "exp_avg_dtype": ["in FP32:", "in INT8 MOMENTS:", "in BF16:"],
}


def check(world: Comm, run: RunConfig, files: Files) -> Report:
    torch.set_num_threads(1)
    return check_layout(Plan.of(run, world.size), world, build_trainer, files)


def checked(layout: str, flags: dict[str, Any] | None = None, files: Files = NO_FILES) -> Report:
    run, ranks = lay_out(layout, {**DROPOUT, **(flags or {})})
    reports = ThreadWorld(ranks).run(check, run, files)
    assert all(report.lines == reports[0].lines for report in reports)
    return reports[0]


@pytest.mark.parametrize("layout", CLEAN)
def test_a_layout_that_trains_as_one_rank_raises_no_alarm(layout):
    report = checked(layout, CLEAN[layout])
    assert report.agrees, report.lines
    assert report.lines[-1].startswith("the layout trains as one rank")
    formats = [line for line in report.lines if line.startswith("in ")]
    words = " ".join([layout, *CLEAN[layout]])
    expected = [names for key, names in FORMATS.items() if key in words]
    assert formats == (expected or [["in FP32:"]])[-1]
    assert not any(line.startswith("not checked") for line in report.lines)
    kinds = {**dict.fromkeys(KINDS, len(formats)), SCALE: sum("MOMENTS" in f for f in formats)}
    if kinds[SCALE]:
        kinds[SCALE] += 1
    rows = [row for line in report.lines if (row := ROW.fullmatch(line))]
    assert Counter(row["kind"] for row in rows) == Counter(kinds)
    for row in rows:
        if row["kind"] == UPDATE:  # both weights' roundings alone are half of the tolerance
            continue
        assert float(row["error"]) < float(row["allowed"]) / MARGIN, report.lines


def no_partial_sum(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(buckets.BucketComm, "_sum_partial_gradients", lambda self, bucket: None)


def no_sum_of_shared_keys(patch: pytest.MonkeyPatch) -> None:
    summed = layers.Context.whole_sequence

    def not_summed(self, x):
        return x if x.shape[-1] == self.model.qk_pos_emb_head_dim else summed(self, x)

    patch.setattr(layers.Context, "whole_sequence", not_summed)


def _without_sums_over(patch: pytest.MonkeyPatch, group: str) -> None:
    reduce = buckets.BucketComm._all_reduce

    def some(self, comm, grads, overlap):
        if comm is getattr(self.groups, group):
            return buckets._Sum(buckets.DONE, grads, grads)
        return reduce(self, comm, grads, overlap)

    patch.setattr(buckets.BucketComm, "_all_reduce", some)


def no_tied_sum(patch: pytest.MonkeyPatch) -> None:
    _without_sums_over(patch, "embedding")


def no_data_parallel_sum(patch: pytest.MonkeyPatch) -> None:
    _without_sums_over(patch, "dp")


def no_weight_gather(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(buckets.BucketComm, "gather", lambda self, index: None)


def dropout_by_rank(patch: pytest.MonkeyPatch) -> None:
    original = layers.hidden_dropout

    def of_own_rows(context, layer, site, x, forward_pass):
        dropped = original(context, layer, site, x, forward_pass)
        stream = layers.dropout_stream(layer, site)
        rows = [range(len(x))]
        key = DropoutKey.of_segments(rows, context.seed, stream, forward_pass.first_sample)
        return Dropout(dropped.p, key)

    patch.setattr(blocks, "hidden_dropout", of_own_rows)


def wrong_element(patch: pytest.MonkeyPatch) -> None:
    original = layers.reduce_from_tensor_parallel

    def reduced(x, comm):
        y = original(x, comm)
        if comm.rank == 1 and x.requires_grad:
            y = y.clone()
            y.data[0, 0, 0] += 1.0
        return y

    patch.setattr(layers, "reduce_from_tensor_parallel", reduced)


class _Swapped:
    """Micro-batches of which the first two are swapped."""

    def __init__(self, window: MicroBatchWindow) -> None:
        self.window = window

    def fetch(self, index: int) -> MicroBatch:
        return self.window.fetch({0: 1, 1: 0}.get(index, index))


def swapped_micro_batches(patch: pytest.MonkeyPatch) -> None:
    original = step.StepExecutor.forward

    def forward(self, instruction):
        if self.pp.rank == 1 and isinstance(self.batches, MicroBatchWindow):
            self.batches = _Swapped(self.batches)
        original(self, instruction)

    patch.setattr(step.StepExecutor, "forward", forward)


def balancing_loss_twice(patch: pytest.MonkeyPatch) -> None:
    original = router.Router._with_losses

    def with_losses(self, scores, logits, chosen, samples, forward_pass, load):
        factor = forward_pass.balance_factor * self.context.tp.size
        changed = replace(forward_pass, balance_factor=factor)
        return original(self, scores, logits, chosen, samples, changed, load)

    patch.setattr(router.Router, "_with_losses", with_losses)


def unordered_segments(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(context_parallel, "_order", lambda ranks: list(range(2 * ranks)))


def altered_checkpoint(patch: pytest.MonkeyPatch) -> None:
    write = checkpoints.write_shards

    def altered(rank, shards, *args):
        changed = [replace(shard, tensor=shard.tensor + 1.0) for shard in shards]
        return write(rank, changed, *args)

    patch.setattr(checkpoints, "write_shards", altered)


def other_momentum_of_matrices(patch: pytest.MonkeyPatch) -> None:
    step = muon.Muon.step

    def stepped(self, index, shard, grads, factors):
        step(self, index, shard, grads * (1 + self.groups.dp.rank), factors)

    patch.setattr(muon.Muon, "step", stepped)


def other_shards_of_matrices(patch: pytest.MonkeyPatch) -> None:
    """Halve the update of the second tensor-parallel rank's shards."""
    orthogonal = muon.Muon._orthogonal

    def halved(self, spec, own):
        return orthogonal(self, spec, own) * (0.5 if spec.offset[0] else 1.0)

    patch.setattr(muon.Muon, "_orthogonal", halved)


def scales_of_own_shards(patch: pytest.MonkeyPatch) -> None:
    share = optimizer.share_scales

    def alone(shards, moments_of):
        return share([(SoloComm(), count, blocks) for _, count, blocks in shards], moments_of)

    patch.setattr(optimizer, "share_scales", alone)


def moments_lost_on_load(patch: pytest.MonkeyPatch) -> None:
    after_load = optimizer.Optimizer.after_load

    def without_moments(self):
        if self.groups.dp.rank == 1:
            for shard in self.shards:
                shard.exp_avg.zero_()
        after_load(self)

    patch.setattr(optimizer.Optimizer, "after_load", without_moments)


def wrong_weights_after_load(patch: pytest.MonkeyPatch) -> None:
    after_load = optimizer.Optimizer.after_load

    def altered(self):
        after_load(self)
        if self.run.masters and self.groups.dp.rank == 1:
            self.flat.values.add_(1.0)

    patch.setattr(optimizer.Optimizer, "after_load", altered)


def steps_lost_on_load(patch: pytest.MonkeyPatch) -> None:
    load = trainer.Trainer.load

    def loaded(self, *args, **kwargs):
        state = load(self, *args, **kwargs)
        if self.world.rank:
            self.optimizer.steps = 0
        return state

    patch.setattr(trainer.Trainer, "load", loaded)


def loss_scale_lost_on_load(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loss_scaler.LossScaler, "load", lambda self, state: None)


def skipped_by_own_norm(patch: pytest.MonkeyPatch) -> None:
    """Skip an update only on the ranks whose own gradients overflow."""
    grad_norm = optimizer.Optimizer.grad_norm

    def own(self):
        norm = grad_norm(self)
        finite = all(bool(grads.isfinite().all()) for grads in self.reduce_gradients())
        return 1.0 if finite and math.isinf(norm) else norm

    patch.setattr(optimizer.Optimizer, "grad_norm", own)


def loss_scale_of_own_rank(patch: pytest.MonkeyPatch) -> None:
    step = optimizer.Optimizer.step

    def stepped(self, *args, **kwargs):
        result = step(self, *args, **kwargs)
        if result.skipped and self.groups.pp.rank == 1:
            self.scaler.scale *= 2
        return result

    patch.setattr(optimizer.Optimizer, "step", stepped)


def counted_skipped_update(patch: pytest.MonkeyPatch) -> None:
    step = optimizer.Optimizer.step

    def stepped(self, *args, **kwargs):
        result = step(self, *args, **kwargs)
        self.steps += result.skipped and self.groups.world.size > 1
        return result

    patch.setattr(optimizer.Optimizer, "step", stepped)


def native_loss_twice(patch: pytest.MonkeyPatch) -> None:
    """Double the gradient of the C++ kernels' loss on every rank."""
    original = loss._block_loss

    def block_loss(kernels, logits, labels, call, factor, dlogits):
        return original(kernels, logits, labels, call, 2 * factor, dlogits)

    patch.setattr(loss, "_block_loss", block_loss)


def left_out_layer(patch: pytest.MonkeyPatch) -> None:
    original = model.Chunk.run_layers

    def run_layers(self, x, forward_pass, first, last):
        if self.is_last and not self.is_first:
            return x
        return original(self, x, forward_pass, first, last)

    patch.setattr(model.Chunk, "run_layers", run_layers)


class Mistake(NamedTuple):
    """A mistake of the program, a layout that has it, and the report's words for the first wrong tensor."""

    inject: Callable[[pytest.MonkeyPatch], None]
    layout: str
    words: tuple[str, ...]
    flags: dict[str, Any] = EIGHT


MISTAKES = (
    Mistake(
        no_partial_sum,
        "tp2 sequence",
        (REDUCED, "decoder.final_layernorm", "all-reduce over the tensor-parallel ranks 0 1"),
    ),
    Mistake(
        no_sum_of_shared_keys,
        "tp2",
        (
            BACKWARD,
            "self_attention.linear_kv_down_proj",
            "all-reduce over the tensor-parallel ranks 0 1",
        ),
        LATENT,
    ),
    Mistake(
        no_tied_sum,
        "pp2",
        (REDUCED, "output_layer.weight", "all-reduce of the tied embedding's gradient"),
    ),
    Mistake(
        no_data_parallel_sum,
        "dp2",
        (REDUCED, "final_layernorm", "all-reduce over the data-parallel ranks 0 1"),
        UNTIED,
    ),
    Mistake(
        no_weight_gather,
        "dp2 zero",
        (USED, "iteration 2", "all-gather of updated weights over the data-parallel ranks 0 1"),
    ),
    Mistake(
        dropout_by_rank,
        "tp2 sequence",
        (FORWARD, "decoder.layers.0.pre_mlp_layernorm", "on rank 1:", "no communication"),
    ),
    Mistake(
        wrong_element,
        "tp2",
        (FORWARD, "embedding", "on rank 1:", "all-reduce over the tensor-parallel ranks 0 1"),
        UNTIED,
    ),
    Mistake(
        swapped_micro_batches,
        "pp2",
        (FORWARD, "decoder.layers.1.input_layernorm", "message from rank 0 (stage 0) to rank 1"),
    ),
    Mistake(
        swapped_micro_batches,
        "pp2",
        (FORWARD, "linear_qkv", "message from rank 0 (stage 0)", "the output of decoder.layers.0,"),
        {**EIGHT, "norm_placement": "post", "disable_bias_linear": True},
    ),
    Mistake(
        balancing_loss_twice,
        "tp2 dp2 ep2 sequence",
        (BACKWARD, "decoder.layers.1.pre_mlp_layernorm", "all-to-all of tokens over the expert"),
        EXPERTS,
    ),
    Mistake(
        unordered_segments,
        "cp2 a2a",
        (FORWARD, "decoder.layers.0.self_attention.core_attention", "all-to-all of heads"),
    ),
    Mistake(
        left_out_layer,
        "pp2",
        (USED, "decoder.layers.1.input_layernorm", "on no rank: 32 of its 32 elements"),
    ),
    Mistake(
        native_loss_twice,
        "tp2",
        (BACKWARD, "decoder.final_layernorm", "the loss, which agrees", "all-reduce over the"),
    ),
    Mistake(altered_checkpoint, "dp2", (CHECKPOINT, "exp_avg/", "on rank 0:")),
    Mistake(
        other_momentum_of_matrices,
        "dp2 zero",
        (MOMENT, "exp_avg decoder.layers.", "on rank 1:"),
        {**EIGHT, "optimizer": "muon", "muon_nesterov": False},
    ),
    Mistake(
        other_shards_of_matrices,
        "tp2",
        (UPDATE, "linear_qkv.weight", "on rank 1:"),
        {**EIGHT, "optimizer": "muon", "muon_tp_mode": "blockwise"},
    ),
    Mistake(
        scales_of_own_shards,
        "dp2 zero",
        (SCALE, "iteration 1", "all-reduce of largest elements over the data-parallel ranks 0 1"),
        {**EIGHT, **MOMENTS_IN_INT8},
    ),
    Mistake(moments_lost_on_load, "dp2 zero", (LOADED, "exp_avg/", "loading of the checkpoint")),
    Mistake(
        wrong_weights_after_load,
        "dp2 bf16",
        (USED, "iteration 4, on rank 1:", "between the loaded checkpoint", "loading of the"),
    ),
    Mistake(steps_lost_on_load, "tp2", (LOADED, "updates, iteration 3, on rank 1:")),
    Mistake(loss_scale_lost_on_load, "dp2 zero fp16", (LOADED, "the loss scale, iteration 3")),
    Mistake(
        skipped_by_own_norm,
        "pp2",
        (STATE, "skipped updates, iteration 2, on rank 0:", "all-reduces of the squared norm"),
        UNTIED,
    ),
    Mistake(loss_scale_of_own_rank, "pp2 fp16", (STATE, "the loss scale, iteration 2, on rank 1:")),
    Mistake(counted_skipped_update, "tp2", (STATE, "updates, iteration 2, on ranks 0 1:")),
)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.inject.__name__)
def test_a_mistake_is_found_and_named(mistake, monkeypatch):
    mistake.inject(monkeypatch)
    report = checked(mistake.layout, mistake.flags)
    line = report.lines[-1]
    assert line.startswith(f"first difference: {mistake.words[0]} of "), line
    assert all(words in line for words in mistake.words), line
    assert report.lines.count("in FP32:") == 1 and len(report.lines) < 40


def test_wrong_positions_are_named():
    """Both ranks have the first half of a tensor, and none has the second half."""
    point = Point(1, FORWARD, "embedding", 0)
    whole = torch.arange(8.0).view(4, 2)
    halves = [(whole[:2], slice(0, 2)), (whole[2:], slice(0, 2))]
    ranks = [[Piece(point, (4, 2), (rows,), values)] for values, rows in halves]
    comparison = Comparison(Tolerance(1e-5, by_norm=False, computed=1e-5))
    comparison.add(ranks, {point: whole})
    comparison.check_complete({point: whole})
    line = comparison.first.line()
    assert "on rank 1: error 0.57, tolerance 1e-05, and 4 of its 8 elements are on no rank;" in line
    comparison = Comparison(Tolerance(1e-5, by_norm=False, computed=1e-5))
    comparison.add(ranks[:1], {point: whole})
    comparison.check_complete({point: whole})
    assert ", on no rank: 4 of its 8 elements; between the tokens" in comparison.first.line()


def unchecked(layout: str, flags: dict[str, Any]) -> list[str]:
    report = checked(layout, flags)
    assert report.agrees
    start = "not checked, because the copy has none: "
    return [line.removeprefix(start) for line in report.lines if line.startswith(start)]


def test_what_the_copy_has_not_is_said(monkeypatch):
    """The narrowest copy has all matrices on the first rank."""
    flags = {**EIGHT, "optimizer": "muon"}
    assert unchecked("dp2 zero", flags) == []
    assert unchecked("pp2 pipeline_split='1,3'", EIGHT) == ["--pipeline-split"]
    monkeypatch.setattr(check_module, "TRIES", 1)
    assert unchecked("dp2 zero", flags) == ["updates of matrices by Muon, on rank 1"]


@pytest.mark.parametrize("chosen, kept", [(2, 4), (3, 8), (5, 16)])
def test_a_small_router_still_chooses(chosen, kept):
    """With two experts of which each token has two, a balancing loss has no gradient but rounding errors."""
    run, ranks = lay_out("tp2", {**EXPERTS, "num_experts": 16, "moe_router_topk": chosen})
    assert shrink(Plan.of(run, ranks)).config.model.num_experts == kept


def test_a_rank_with_another_library_is_named(monkeypatch):
    def versions(world: Comm) -> dict[str, str]:
        return {"torch": "2.9.1", "MPI": "MPICH 4.2" if world.rank == 2 else "MPICH 4.3"}

    assert ThreadWorld(2).run(differing_libraries) == [[], []]
    monkeypatch.setattr(check_layout_module, "library_versions", versions)
    line = "the ranks have different libraries: MPI MPICH 4.3 on rank 0 1; MPICH 4.2 on rank 2"
    assert ThreadWorld(3).run(differing_libraries) == [[line]] * 3


@pytest.fixture(scope="module")
def record(tmp_path_factory) -> Path:
    """Return the directory of a record of the torch kernels."""
    directory = tmp_path_factory.mktemp("record") / "new"
    assert checked("tp2", {**EIGHT, "kernels": "torch"}, Files(record=directory)).agrees
    return directory


def test_other_kernels_agree_with_a_record(record):
    report = checked("tp2", EIGHT, Files(against=record))
    assert report.agrees, report.lines
    assert f"against {record}" in report.lines[0] and f"trains as {record}" in report.lines[-1]


def test_a_mistake_differs_from_a_record(record, monkeypatch):
    wrong_element(monkeypatch)
    line = checked("tp2", EIGHT, Files(against=record)).lines[-1]
    assert line.startswith(f"first difference: {FORWARD} of embedding")


def test_another_model_differs_from_a_record(record):
    line = checked("tp2", {**EIGHT, "hidden_size": 64}, Files(against=record)).lines[-1]
    assert re.search(r"on ranks 0 1: shape \(16, 64\) in place of \(16, 32\);", line), line


def test_records_are_not_replaced_and_must_be_records(record, tmp_path):
    with pytest.raises(ValueError, match=r"--record .* holds fp32.safetensors: pass another"):
        checked("", EIGHT, Files(record=record))
    with pytest.raises(ValueError, match=r"--against .* holds no record: pass the directory"):
        checked("", EIGHT, Files(against=tmp_path))
    write_tensors(tmp_path / "fp32.safetensors", {"weight": torch.zeros(1)})
    with pytest.raises(ValueError, match="weight is not ITERATION/KIND/NAME/SAMPLE with a kind"):
        checked("", EIGHT, Files(against=tmp_path))


def test_the_hook_of_the_documentation_writes_the_format():
    """The names and shapes are those of a record."""
    text = (ROOT / "docs" / "reliability.md").read_text()
    code = text.split("```py\n")[1].split("```")[0]
    space: dict[str, Any] = {"re": re}
    exec(code, space)
    layer = torch.nn.ModuleDict({"mlp": torch.nn.Linear(4, 4), "other": torch.nn.Linear(4, 4)})
    toy = torch.nn.ModuleDict(
        {"decoder": torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])})}
    )
    tensors: dict[str, torch.Tensor] = {}
    space["record"](toy, tensors, iteration=1, sample=2)
    layer["other"](layer["mlp"](torch.ones(3, 2, 4))).sum().backward()
    points = {Point.of(key) for key in tensors}
    names = {(FORWARD, "decoder.layers.0.mlp"), (BACKWARD, "decoder.layers.0.mlp")}
    assert points == {Point(1, kind, name, 2) for kind, name in names}
    assert all(x.shape == (3, 2, 4) for x in tensors.values())
