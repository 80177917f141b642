"""LoRA: adapters of frozen weights in every layout, their checkpoints, and what they cost."""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.profiler import ProfilerActivity, profile

import fugaku_megatron as fm
from fugaku_megatron.checkpoint.manifest import read_manifest
from fugaku_megatron.cli import program
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.run_config import saved_run
from fugaku_megatron.convert.convert_command import open_weights
from fugaku_megatron.convert.peft import open_peft
from fugaku_megatron.inference.loading import load_model, through_stages
from fugaku_megatron.inference.scoring import EVALUATION
from fugaku_megatron.nn.forward_context import Pass
from fugaku_megatron.nn.ops import Ops
from fugaku_megatron.run.resume import resume_training
from tests.checks.adapters import (
    LORA,
    QWEN,
    curve,
)
from tests.checks.allocations import allocated
from tests.checks.experts import EXPERTS, layer_of, plain_experts
from tests.helpers import (
    CP2,
    DROPOUT,
    OVERLAP,
    TP2,
    TP2PP2,
    find_checkpoint,
    make_trainer,
    one_error,
    small_run,
    whole_tensors,
)
from tests.llama_models import FAMILIES
from tests.threads import ThreadWorld

SP = {"sequence_parallel": True}
LAYOUTS = {
    "tp": (2, TP2),
    "sp": (2, {**TP2, **SP}),
    "tp pp": (4, TP2PP2),
    "sp pp zb-h1": (4, {**TP2PP2, **SP, "pipeline_schedule": "zb-h1"}),
    "zbv": (2, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zbv"}),
    "interleaved": (
        2,
        {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
    ),
    "zero": (2, {**OVERLAP, "ddp_bucket_size": 500}),
    "full recompute": (1, {"recompute_granularity": "full"}),
    "selective recompute": (1, {"recompute_granularity": "selective"}),
    "packed": (1, {"cache_packed_weights": True}),
    "cp": (4, {**CP2, **OVERLAP}),
    "cp tp sp": (4, {**CP2, **TP2, **SP}),
}


@pytest.fixture(scope="module")
def alone():
    made = {}

    def of(**flags):
        key = str(sorted(flags.items()))
        if key not in made:
            made[key] = curve(SoloComm(), small_run(**flags))
        return made[key]

    return of


WITH_DROPOUT = {"lora_dropout": 0.25, **DROPOUT}
WITHOUT_DROPOUT = ("tp", "zbv", "zero", "full recompute", "cp tp sp")  # the others only in full


@pytest.mark.parametrize(
    ("layout", "dropout"),
    [
        *((layout, WITH_DROPOUT) for layout in LAYOUTS),
        *(
            pytest.param(layout, {}, marks=() if layout in WITHOUT_DROPOUT else pytest.mark.full)
            for layout in LAYOUTS
        ),
    ],
)
def test_every_layout_trains_the_same_adapters(layout, dropout, alone):
    ranks, flags = LAYOUTS[layout]
    losses, norms, adapters = alone(**QWEN, **dropout)
    for own in ThreadWorld(ranks).run(curve, small_run(**QWEN, **dropout, **flags)):
        assert own[0] == pytest.approx(losses, rel=2e-6)
        assert own[1] == pytest.approx(norms, rel=2e-5)
        assert own[2].keys() == adapters.keys()
        for name, tensor in adapters.items():
            assert torch.allclose(own[2][name], tensor, atol=2e-5), name


MOE = {
    **LORA,
    "num_layers": 2,
    "num_experts": 4,
    "swiglu": True,
    "disable_bias_linear": True,
    "normalization": "RMSNorm",
    "moe_ffn_hidden_size": 24,
    "moe_aux_loss_coeff": (0.01,),
    "moe_shared_expert_intermediate_size": 16,
    "zero_stage": 1,
    "moe_layer_freq": "[0,1]",
}
EP, ETP1 = {"expert_model_parallel_size": 2}, {"expert_tensor_parallel_size": 1}
ATTENTION, LATE = (
    "q_proj,k_proj,v_proj,o_proj",
    {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1", **OVERLAP},
)
TORCH, BF16 = {"kernels": "torch"}, {"bf16": True}
BESIDE = [
    *(
        (ATTENTION, *each)
        for each in ((2, EP), (2, TP2), (4, {**EP, **TP2, **SP}), (4, {**EP, **TP2, **SP, **BF16}))
    ),
    *(
        ("all-linear", *each)
        for each in (
            (2, {**EP, "ddp_bucket_size": 500}),
            (2, {**TP2, **SP}),
            (2, {**TP2, **TORCH}),
            (4, {**EP, **TP2, **SP}),
            (4, {**EP, **ETP1, **TP2, **SP}),
            (4, {**EP, **LATE}),
            (4, {**EP, **TP2, **SP, **BF16}),
            (1, {"cache_packed_weights": True}),
            (2, {**EP, "recompute_granularity": "full"}),
        )
    ),
    ("gate_proj,up_proj,down_proj", 2, {**EP, **TORCH}),
    ("linear_fc1", 2, TP2),
    ("up_proj,down_proj", 4, {**EP, **TP2, **SP}),
]


def unadapted(flags):
    """The flags of the model alone."""
    return {name: value for name, value in flags.items() if not name.startswith("lora")}


def next_to_experts(world, base: str, steps: int = 2, **flags):
    """Losses and gradient norms of a run, and the number of its model; no frozen weight changes."""
    trainer, _ = started(world, **{**MOE, **flags}, pretrained_checkpoint=base)
    with contextlib.closing(trainer):
        flat = trainer.optimizer.flat
        divided = trainer.run.parallel.divides_experts and any(
            ".experts." in p.spec.name for p in flat.frozen
        )
        before = [memory.values.clone() for memory in flat.frozen_memory]
        results = [trainer.train_step() for _ in range(steps)]
        assert all(map(torch.equal, before, (memory.values for memory in flat.frozen_memory)))
        assert (before[1].numel() > 0) == divided
        return (
            [r.loss for r in results],
            [r.grad_norm for r in results],
            trainer.base["fingerprint"],
        )


@pytest.fixture(scope="module")
def with_experts(tmp_path_factory):
    """The directory of a model with experts, and the figures of runs of one rank on it."""
    base, made = str(tmp_path_factory.mktemp("experts")), {}
    whole_model(SoloComm(), base, **unadapted(MOE))

    def of(**flags):
        key = str(sorted(flags.items()))
        made[key] = made.get(key) or next_to_experts(SoloComm(), base, **flags)
        return base, made[key]

    return of


@pytest.mark.parametrize(("target", "ranks", "layout"), BESIDE)
def test_adapters_train_next_to_frozen_experts(target, ranks, layout, with_experts):
    """Adapters of attention alone, and of experts, train in every layout from one model, which has the same number everywhere."""
    own = {
        "lora_target": target,
        **{name: layout[name] for name in layout.keys() & (BF16 | TORCH).keys()},
    }
    base, (losses, norms, number) = with_experts(**own)
    assert min(norms) > 0
    low = "bf16" in layout
    for found in ThreadWorld(ranks).run(
        lambda world: next_to_experts(world, base, **layout, lora_target=target)
    ):
        assert found[0] == pytest.approx(losses, rel=5e-3 if low else 5e-6) and found[2] == number
        assert found[1] == pytest.approx(norms, rel=5e-2 if low else 5e-5)


@pytest.mark.full
@pytest.mark.parametrize("capacity", [None, 1.0])
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, EP),
        (4, {**EP, **TP2, **SP}),
        (4, {**EP, **ETP1, **TP2, **SP}),
        (4, {**EP, **LATE}),
        (8, {**EP, **TP2PP2, **SP}),
        (4, {**EP, "pipeline_model_parallel_size": 2, "pipeline_schedule": "zbv", "num_layers": 4}),
    ],
)
def test_ten_losses_of_adapters_of_experts(ranks, layout, capacity, with_experts, tmp_path):
    flags = {
        "moe_expert_capacity_factor": capacity,
        "lr": 1e-3,
        "moe_layer_freq": "1",
        "hidden_dropout": 0.1,
        "num_layers": layout.get("num_layers", 2),
    }
    whole_model(SoloComm(), str(tmp_path), **unadapted({**MOE, **flags}))
    losses, norms, _ = next_to_experts(SoloComm(), str(tmp_path), 10, **flags)
    for found in ThreadWorld(ranks).run(
        lambda world: next_to_experts(world, str(tmp_path), 10, **{**flags, **layout})
    ):
        assert found[0] == pytest.approx(losses, rel=1e-6) and found[1] == pytest.approx(
            norms, rel=1e-5
        )


def low_rank(a, b, gates_alone: bool):
    """B A of each matrix: a (..., p, r, in), b (..., p or one more, out, r) or, where one A is for all rows, (..., out, r)."""
    if gates_alone:  # (e, 1, r, h), (e, 2, f, r)
        return torch.stack((b[:, 0] @ a[:, 0], torch.zeros_like(b[:, 1]) @ a[:, 0]), 1)
    if b.dim() == a.dim():  # a gate and what it multiplies
        return b @ (a if a.shape[-3] == 2 else a.expand(*b.shape[:-2], *a.shape[-2:]))
    return b @ a.squeeze(-3)


KINDS = {
    "gates": {},
    "no gates": {"swiglu": False, "squared_relu": True},
    "shared": {"moe_shared_expert_intermediate_size": 20, "moe_shared_expert_gate": True},
    "capacity": {"moe_expert_capacity_factor": 0.75},
}
TARGETS = {
    "gates": "all-linear",
    "no gates": "up_proj,down_proj",
    "shared": "linear_fc1,linear_fc2",
    "capacity": "gate_proj",
}


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_adapters_of_experts_are_torchs(kind, backend):
    """The layer is compared with one whose weights are put together by plain torch, with torch's own gradients."""
    flags = {
        **EXPERTS,
        **KINDS[kind],
        "lora_rank": 4,
        "lora_alpha": 6.0,
        "lora_use_rslora": kind == "gates",
        "lora_target": TARGETS[kind],
        "seed": 3,
    }
    mlp, ours, theirs = layer_of(small_run(**flags), Ops.build(backend))
    x, dy = (torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    y = mlp(x, Pass(first_sample=0))
    y.backward(dy)
    scale, weights = (
        6.0 / (2.0 if kind == "gates" else 4.0),
        {name: weight.detach() for name, weight in theirs.items()},
    )
    for name in (name for name in theirs if name.endswith("lora_A.weight")):
        weight, a, b = (
            name.replace("lora_A.", ""),
            theirs[name],
            theirs[name.replace("lora_A", "lora_B")],
        )
        weights[weight] = weights[weight] + scale * low_rank(a, b, gates_alone=kind == "capacity")
    expected = plain_experts(weights, x.view(32, 32), small_run(**flags).model)
    expected.backward(dy.view(32, 32))
    torch.testing.assert_close(y.view(32, 32), expected, rtol=1e-5, atol=1e-5)
    adapters = [name for name in ours if "lora_" in name]
    assert len(adapters) == 2 * len(TARGETS[kind].split(",")) or kind in ("gates", "shared")
    for name in adapters:
        expected = theirs[name].grad
        assert expected.abs().max() > 0.01
        torch.testing.assert_close(
            ours[name].main_grad,
            expected,
            rtol=0,
            atol=1e-5 * expected.abs().max().item(),
            msg=lambda m, n=name: f"{n}: {m}",
        )


def whole_model(world, directory, **flags) -> None:
    """Save a checkpoint of the model that adapters belong to."""
    with contextlib.closing(make_trainer(world, small_run(**flags))) as trainer:
        trainer.train_step()
        trainer.save(str(directory))


BASE = unadapted(QWEN)


def started(world, **flags):
    """A trainer of adapters that has loaded what its flags name, and the lines of its log."""
    trainer = make_trainer(world, small_run(**flags))
    return trainer, resume_training(trainer, find_checkpoint(trainer.run, world))


@pytest.mark.parametrize(
    ("ranks", "layout"), [(1, {}), (2, {"zero_stage": 1}), (4, {**TP2PP2, **SP, "zero_stage": 1})]
)
@pytest.mark.parametrize("precision", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_resuming_is_bit_exact_and_saves_adapters_alone(ranks, layout, precision, tmp_path):
    whole_model(SoloComm(), tmp_path / "base", **BASE)
    flags = {**QWEN, **precision, **layout, "lora_dropout": 0.2}

    def run(world):
        first, lines = started(world, **flags, pretrained_checkpoint=str(tmp_path / "base"))
        assert lines[0].startswith("new adapters of")
        frozen = first.optimizer.flat.frozen_memory[0].values.clone()
        first.train_step()
        first.save(str(tmp_path / "run"))
        expected = [first.train_step().loss for _ in range(2)]
        assert torch.equal(frozen, first.optimizer.flat.frozen_memory[0].values)
        first.close()
        again, lines = started(world, **flags, load=str(tmp_path / "run"))
        assert "adapters of" in lines[0]
        assert torch.equal(frozen, again.optimizer.flat.frozen_memory[0].values)
        assert [again.train_step().loss for _ in range(2)] == expected
        again.close()

    ThreadWorld(ranks).run(run)
    keys = {
        record["key"]
        for file in read_manifest(tmp_path / "run", 1)["files"].values()
        for record in file["shards"]
    }
    assert keys and all("lora_" in key for key in keys)


@pytest.mark.parametrize("precision", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_nothing_of_a_tensors_size_is_made_while_weights_are_read(precision, tmp_path):
    """Initial weights, the file and the number of the model pass in pieces: the frozen weights themselves are the peak."""
    flags = {
        "vocab_size": 32768,
        "hidden_size": 128,
        "num_layers": 1,
        **precision,
    }  # an embedding of 16 MiB in FP32
    whole_model(SoloComm(), tmp_path, **flags)
    kept = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        kept.append(started(SoloComm(), **flags, lora_rank=4, pretrained_checkpoint=str(tmp_path)))
    ends, peak = allocated(recorded)
    assert peak - ends < 12 << 20 and ends > 16 << 20 >> bool(precision)
    kept[0][0].close()


def test_a_checkpoint_of_adapters_loads_in_another_layout(tmp_path):
    whole_model(SoloComm(), tmp_path / "base", **BASE)

    def save(world):
        trainer, _ = started(world, **QWEN, **TP2PP2, pretrained_checkpoint=str(tmp_path / "base"))
        trainer.train_step()
        trainer.save(str(tmp_path / "run"))
        trainer.optimizer.buckets.await_weights()
        values = whole_tensors(trainer, "weight"), trainer.train_step().loss
        trainer.close()
        return values

    values, loss = ThreadWorld(4).run(save)[0]

    def load(world):
        trainer, _ = started(world, **QWEN, **TP2, **SP, load=str(tmp_path / "run"))
        loaded = whole_tensors(trainer, "weight")
        assert all(torch.equal(values[name], loaded[name]) for name in values)
        assert trainer.train_step().loss == pytest.approx(loss, rel=2e-6)
        trainer.close()

    ThreadWorld(2).run(load)


MIXTURE = {**FAMILIES["qwen3"], **MOE, "moe_shared_expert_intermediate_size": None}
TO_OTHERS = [
    ({**EP, **TP2, **SP}, {**EP, **ETP1, **TP2, **SP}, "all-linear"),
    ({**EP, **LATE}, {**TP2, **SP, "pipeline_model_parallel_size": 2}, "linear_fc1,down_proj"),
    ({"zero_stage": 0}, {**EP, "zero_stage": 1}, "up_proj"),
]


@pytest.mark.parametrize(("layout", "other", "target"), TO_OTHERS)
def test_adapters_of_experts_resume_move_merge_and_go_to_peft(layout, other, target, tmp_path):
    """Bit-exact in the layout that saved them, in any other one, in the weights that programs read, and from peft's files."""
    base, run, flags = (
        str(tmp_path / "base"),
        str(tmp_path / "run"),
        {**MIXTURE, "lora_target": target},
    )
    whole_model(SoloComm(), base, **unadapted(flags))

    def save(world):
        trainer, _ = started(world, **{**flags, **layout}, pretrained_checkpoint=base)
        with contextlib.closing(trainer):
            trainer.train_step()
            trainer.save(run)
            return [trainer.train_step().loss for _ in range(2)]

    def resume(world, **changes):
        trainer, _ = started(world, **{**flags, **changes}, load=run)
        with contextlib.closing(trainer):
            return [trainer.train_step().loss for _ in range(2)]

    losses = ThreadWorld(4).run(save)[0]
    assert ThreadWorld(4).run(lambda world: resume(world, **layout))[0] == losses
    assert ThreadWorld(4).run(lambda world: resume(world, **other))[0] == pytest.approx(
        losses, rel=1e-6
    )
    tokens, peft, back, merged = (
        torch.arange(12),
        *(str(tmp_path / name) for name in ("peft", "back", "merged")),
    )
    logits, plain = fm.load(run).logits(tokens), fm.load(base).logits(tokens)
    trainer, _ = started(SoloComm(), **flags, load=run)
    chunk, forward_pass = trainer.stage.chunks[0], Pass(first_sample=0, training=False)
    with torch.no_grad(), contextlib.closing(trainer):
        trained = chunk.logits(
            chunk.decode(chunk.embedding(tokens[:, None], forward_pass), forward_pass)
        )[:, 0, :96]
    assert torch.allclose(logits, trained, atol=1e-5) and not torch.allclose(
        plain, trained, atol=1e-3
    )
    assert program.main(["convert", "--load", run, "--merge", "--save", merged]) == 0
    assert program.main(["convert", "--load", run, "--to-peft", peft]) == 0
    assert program.main(["convert", "--load", base, "--from-peft", peft, "--save", back]) == 0
    assert torch.equal(fm.load(merged).logits(tokens), logits) and torch.equal(
        fm.load(back).logits(tokens), logits
    )


@pytest.fixture
def mixture(tmp_path):
    """Directories of a model with experts, of adapters of all its matrices that have been trained, and of these for peft."""
    base, run, peft = (str(tmp_path / name) for name in ("base", "run", "peft"))
    whole_model(SoloComm(), base, **unadapted(MIXTURE))
    trainer, _ = started(SoloComm(), **MIXTURE, pretrained_checkpoint=base)
    with contextlib.closing(trainer):
        trainer.train_step()
        trainer.train_step()
        trainer.save(run)
    assert program.main(["convert", "--load", run, "--to-peft", peft]) == 0
    return base, run, Path(peft)


def test_what_peft_has_of_experts(mixture):
    """Its layout, restated: a parameter's adapter of rank R is A (e R, in) and B (out, R e), the rank first in the columns."""
    base, run, peft = mixture
    config, theirs = (
        json.loads((peft / "adapter_config.json").read_text()),
        load_file(peft / "adapter_model.safetensors"),
    )
    assert config["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"] and config["r"] == 4
    assert config["target_parameters"] == [
        "mlp.down_proj.weight",
        "mlp.experts.down_proj",
        "mlp.experts.gate_up_proj",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
    ]
    assert config["rank_pattern"] == {r".*\.gate_up_proj": 8} and config["alpha_pattern"] == {
        r".*\.gate_up_proj": 32
    }
    for module, linear, rank in (
        ("experts.base_layer", "linear_fc1", 8),
        ("experts", "linear_fc2", 4),
    ):
        a, b = (
            theirs[f"base_model.model.model.layers.1.mlp.{module}.lora_{kind}.weight"]
            for kind in "AB"
        )
        delta = torch.einsum("ore,eri->eoi", b.view(len(b), rank, 4), a.view(4, rank, -1)) * 16 / 4
        name = f"decoder.layers.1.mlp.experts.{linear}.weight"
        ours = open_weights(run).read(name) - open_weights(base).read(name)
        assert torch.allclose(ours.view(delta.shape), delta, atol=1e-6) and ours.abs().max() > 1e-3
    one_rank = {"rank_pattern": {}, "alpha_pattern": {}}
    for change, message in (
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is {'q_proj': 2}"),
        ({**one_rank, "r": 8}, "lora_A.weight has shape [16, 24], and this model needs [32, 24]"),
        (one_rank, "the gate reads the adapter of what it multiplies"),
    ):
        b = theirs["base_model.model.model.layers.1.mlp.experts.base_layer.lora_B.weight"]
        save_file(
            theirs
            | {
                "base_model.model.model.layers.1.mlp.experts.base_layer.lora_B.weight": torch.ones_like(
                    b
                )
            },
            peft / "adapter_model.safetensors",
        )
        (peft / "adapter_config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ValueError) as caught:
            open_peft(str(peft), open_weights(base), {})
        assert message in str(caught.value) and "\n" not in str(caught.value)


def test_adapters_of_transformers_4_are_read(mixture, tmp_path):
    """A linear layer for each matrix of each expert."""
    base, run, peft = mixture
    file, settings, made = peft / "adapter_model.safetensors", peft / "adapter_config.json", {}
    for name, tensor in load_file(file).items():
        module, _, rest = name.partition(".experts.")
        if not rest:
            made[name] = tensor
            continue
        names, (a, b) = (
            ("gate_proj", "up_proj") if "base_layer" in name else ("down_proj",),
            (".lora_A.weight", ".lora_B.weight"),
        )
        for e, (number, part) in itertools.product(range(4), enumerate(names)):
            if name.endswith(a):
                made[f"{module}.experts.{e}.{part}{a}"] = tensor.view(4, len(names), 4, -1)[
                    e, number
                ]
            else:
                made[f"{module}.experts.{e}.{part}{b}"] = tensor.view(
                    len(names), -1, len(names), 4, 4
                )[number, :, number, :, e]
    save_file({name: tensor.contiguous() for name, tensor in made.items()}, file)
    every = {
        "target_modules": "all-linear",
        "target_parameters": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **every}))
    assert (
        program.main(
            ["convert", "--load", base, "--from-peft", str(peft), "--save", str(tmp_path / "back")]
        )
        == 0
    )
    assert torch.equal(
        fm.load(tmp_path / "back").logits(torch.arange(12)), fm.load(run).logits(torch.arange(12))
    )


def test_what_does_not_fit_is_refused_in_one_line(tmp_path):
    base, other, run = (str(tmp_path / name) for name in ("base", "other", "run"))
    whole_model(SoloComm(), base, **BASE)
    whole_model(SoloComm(), other, **{**BASE, "seed": 7})
    trainer, _ = started(SoloComm(), **QWEN, pretrained_checkpoint=base)
    trainer.save(run)
    trainer.close()

    def refusal(**flags) -> str:
        return one_error(2, lambda world: started(world, **{**QWEN, **TP2, **flags}))

    assert "has other weights than the one that the adapters were trained for" in refusal(
        load=run, pretrained_checkpoint=other
    )
    assert "--lora-rank 4 (this run: 2)" in refusal(load=run, lora_rank=2)
    assert "holds a whole model" in refusal(load=base)
    assert "--lora-rank 4 needs the weights of a model" in refusal()
    assert "holds adapters of rank 4 and not a model" in refusal(load=run, lora_rank=None)
    assert "holds adapters and not the weights of a model" in refusal(pretrained_checkpoint=run)
    assert "holds another model, with --hidden-size 32 (this run: 48)" in refusal(
        pretrained_checkpoint=base, hidden_size=48
    )
    Path(base).rename(tmp_path / "elsewhere")
    assert "which is not there: pass its place as --pretrained-checkpoint" in refusal(load=run)
    trainer, _ = started(
        SoloComm(), **QWEN, load=run, pretrained_checkpoint=str(tmp_path / "elsewhere")
    )
    trainer.close()


@pytest.fixture
def trained(tmp_path):
    """Directories of a base and of adapters of it that have been trained, and their weights' logits of some tokens."""
    base, run = str(tmp_path / "base"), str(tmp_path / "run")
    whole_model(SoloComm(), base, **BASE)
    trainer, _ = started(SoloComm(), **QWEN, pretrained_checkpoint=base)
    trainer.train_step()
    trainer.train_step()
    trainer.save(run)
    chunk, tokens = trainer.stage.chunks[0], torch.arange(12)
    forward_pass = Pass(first_sample=0, training=False)
    with torch.no_grad():
        logits = chunk.logits(
            chunk.decode(chunk.embedding(tokens[:, None], forward_pass), forward_pass)
        )[:, 0, :96]
    trainer.close()
    return base, run, tokens, logits


def test_adapters_load_and_merge_as_the_model_that_was_trained(trained, tmp_path):
    base, run, tokens, logits = trained
    assert not torch.allclose(fm.load(base).logits(tokens), logits, atol=1e-3)
    assert torch.allclose(fm.load(run).logits(tokens), logits, atol=1e-5)
    assert (
        program.main(["convert", "--load", run, "--merge", "--save", str(tmp_path / "merged")]) == 0
    )
    assert torch.equal(fm.load(tmp_path / "merged").logits(tokens), fm.load(run).logits(tokens))

    def split(world):
        manifest = read_manifest(run, 2)
        loaded = load_model(saved_run(manifest, (2, 1)), world, run, 2, manifest)
        return loaded.logits(through_stages(loaded, tokens[:, None], EVALUATION))[:, 0]

    assert torch.allclose(torch.cat(ThreadWorld(2).run(split), -1)[:, :96], logits, atol=1e-5)


def test_adapters_go_to_peft_and_back(trained, tmp_path):
    base, run, tokens, _ = trained
    peft, back = str(tmp_path / "peft"), str(tmp_path / "back")
    assert program.main(["convert", "--load", run, "--to-peft", peft]) == 0
    theirs = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], len(theirs), len(config["target_modules"])) == (
        4,
        16,
        4 * 7 * 2,
        7,
    )
    name = "model.layers.1.self_attn.k_proj"
    a, b = (theirs[f"base_model.model.{name}.lora_{kind}.weight"] for kind in "AB")
    ours, plain = (
        open_weights(path).read("decoder.layers.1.self_attention.linear_qkv.weight")
        for path in (run, base)
    )
    keys = (ours - plain).view(2, 4, 8, 32)[:, 2].flatten(0, 1)
    assert torch.allclose(keys, 4.0 * b @ a, atol=1e-6) and keys.abs().max() > 1e-3
    assert program.main(["convert", "--load", base, "--from-peft", peft, "--save", back]) == 0
    assert torch.equal(fm.load(back).logits(tokens), fm.load(run).logits(tokens))
    trainer, lines = started(
        SoloComm(),
        **{**QWEN, "lora_target": read_manifest(back, 0)["config"]["lora"]["lora_target"]},
        load=back,
        finetune=True,
    )
    assert "starting from the weights" in lines[0]
    trainer.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"r": "four"}, "r is 'four', not a number"),
        ({"r": 2}, "has shape [4, 32]"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    ],
)
def test_adapters_of_peft_that_are_not_built_are_refused(
    change, message, trained, tmp_path, capsys
):
    base, run, *_ = trained
    assert program.main(["convert", "--load", run, "--to-peft", str(tmp_path / "peft")]) == 0
    file = tmp_path / "peft" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ValueError) as caught:
        open_peft(str(tmp_path / "peft"), open_weights(base), {})
    assert message in str(caught.value) and "\n" not in str(caught.value)
