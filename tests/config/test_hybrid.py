"""--hybrid-layer-pattern: the layers of Megatron-LM's HybridModel, spelled as a GPT's."""

import dataclasses
import re

import pytest
import torch

from fugaku_megatron.api.config import Config
from fugaku_megatron.cli import program
from fugaku_megatron.cli.arguments import make_run, model_flags, parse
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.hybrid import parse_pattern
from fugaku_megatron.config.pipeline_layout import parse_layout
from fugaku_megatron.data.sampler import fetch
from tests.checks.plain_model import plain_losses
from tests.helpers import assert_near, lay_out, make_trainer, run_layout, train, whole_tensors
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel

SPEC = "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec".split()
BASE = (
    "--hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 --global-batch-size 4 --mock-data "
    "--vocab-size 64 --train-iters 2 --swiglu --disable-bias-linear"
).split()
SIZES = "--linear-num-key-heads 2 --linear-num-value-heads 2 --linear-key-head-dim 8 --linear-value-head-dim 8"
MOE = "--num-experts 4 --moe-router-topk 2"
# Patterns of docs/user-guide/hybrid-model-migration.md and of the tests of Megatron-LM's HybridModel, and the GPT of each.
EXAMPLES = {
    "*-*-": ("", "--num-layers 2"),
    "*-*-*-*-": ("", "--num-layers 4"),
    "*E*E": (MOE, f"--num-layers 2 {MOE}"),
    "*-*-|*-*-": (
        "--pipeline-model-parallel-size 2",
        "--num-layers 4 --pipeline-model-parallel-size 2 --pipeline-split 2,2",
    ),
    "G-*-": (
        SIZES,
        f"--num-layers 2 --experimental-attention-variant gdn --linear-attention-freq [1,0] {SIZES}",
    ),
    "*E*-*E": (MOE, f"--num-layers 3 {MOE} --moe-layer-freq ([1,0,1])"),
    "*-|*E*E": (
        f"{MOE} --pipeline-model-parallel-size 2",
        f"--num-layers 3 {MOE} --moe-layer-freq [0,1,1] --pipeline-model-parallel-size 2 --pipeline-split 1,2",
    ),
    "*-|*-|*-|*-": (
        "--pipeline-model-parallel-size 2",
        "--num-layers 4 --pipeline-model-parallel-size 2 --pipeline-split 1,1,1,1 --num-virtual-stages-per-pipeline-rank 2",
    ),
}


@pytest.mark.parametrize("pattern", EXAMPLES)
def test_a_pattern_is_another_spelling_of_a_gpt(pattern):
    hybrid, gpt = EXAMPLES[pattern]
    arguments = parse([*BASE, *SPEC, "--hybrid-layer-pattern", pattern, *hybrid.split()])
    plain = parse([*BASE, *gpt.split()]).run
    layers = dataclasses.replace(arguments.run.model, moe_layer_freq=plain.model.moe_layer_freq)
    assert layers == plain.model and layers.mlps == arguments.run.model.mlps
    assert dataclasses.replace(arguments.run, model=plain.model) == plain
    assert arguments.notes == ("--spec: the value passed is what this program does",)


@pytest.mark.parametrize("pattern", ["G-*-", "*E*-*E", "*E*E", "*-*-"])
def test_a_checkpoint_of_the_gpt_loads_in_either_spelling(pattern, tmp_path):
    hybrid, gpt = EXAMPLES[pattern]
    plain = parse([*BASE, *gpt.split()]).run
    trainer = make_trainer(SoloComm(), plain)
    trainer.save(str(tmp_path / "gpt"))
    trainer.close()
    run = parse([*BASE, "--hybrid-layer-pattern", pattern, *hybrid.split()]).run
    other = make_trainer(SoloComm(), run)
    other.load(str(tmp_path / "gpt"), weights_only=True)
    other.save(str(tmp_path / "hybrid"))
    other.close()
    again = make_trainer(SoloComm(), plain)
    again.load(str(tmp_path / "hybrid"))
    again.close()
    found, expected = whole_tensors(again, "weight"), whole_tensors(trainer, "weight")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("pattern", "words", "named"),
    [
        ("*-G-", SIZES, "--linear-attention-freq [1,0] (this run: [0,1])"),
        ("G-*-G-", SIZES, "--num-layers 2 (this run: 3)"),
    ],
)
def test_a_pattern_of_other_layers_is_refused(pattern, words, named, tmp_path):
    trainer = make_trainer(SoloComm(), parse([*BASE, *EXAMPLES["G-*-"][1].split()]).run)
    trainer.save(str(tmp_path))
    trainer.close()
    other = parse([*BASE, "--hybrid-layer-pattern", pattern, *words.split()]).run
    with pytest.raises(ValueError, match=re.escape(named)):
        make_trainer(SoloComm(), other).load(str(tmp_path), weights_only=True)


def test_a_recipe_with_gated_delta_nets_is_planned(capsys):
    words = (
        "--recipe qwen3.6-35b-a3b --mock-data --bf16 --recompute-granularity selective --dry-run"
    )
    assert program.main(["train", *words.split()]) == 0
    assert "parameters 34660.6 M, of which a token meets 3455.0 M" in capsys.readouterr().out


def test_flags_over_which_the_pattern_has_precedence_are_accepted_beside_it():
    words = "--is-hybrid-model --hybrid-attention-ratio 0.5 --hybrid-mlp-ratio 0.5".split()
    arguments = parse([*BASE, "--hybrid-override-pattern", "*-", *words])
    assert arguments.run == parse([*BASE, "--num-layers", "1"]).run
    assert arguments.notes == tuple(
        f"{name}: --hybrid-layer-pattern has precedence" for name in words if name.startswith("-")
    )


def test_values_of_each_layer_count_symbols():
    words = [
        *BASE,
        *"--position-embedding-type rope --window-size 3,0 --hybrid-layer-pattern *-*-*-".split(),
    ]
    two = "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers".split()
    assert parse([*words, *two, "2"]).run.parallel.decoder_first_pipeline_num_layers == 1
    last = "--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 3".split()
    parallel = parse([*words[:-1], "*-**--", *last]).run.parallel
    assert parallel.decoder_last_pipeline_num_layers == 2
    for given, kept in {"[1,0,0,0,1,0]": (3, None, 3), "3": (3, None, 3), "2": (3, 3, 3)}.items():
        model = parse([*words, "--window-attn-skip-freq", given]).run.model
        assert [kind.window for kind in model.layer_kinds] == [each and each + 1 for each in kept]
    model = parse([*words, "--no-rope-freq", "3"]).run.model
    assert [kind.rope is None for kind in model.layer_kinds] == [False, True, False]
    model = parse(
        [*words[:-2], "--hybrid-layer-pattern=-**", "--window-attn-skip-freq", "[1,0,1]"]
    ).run.model
    assert [kind.window for kind in model.layer_kinds] == [None, None, 4]
    ways = "--context-parallel-size 2 --cp-comm-type a2a a2a p2p p2p a2a a2a".split()
    assert parse([*words, *ways]).run.parallel.cp_comm_type == ("a2a", "p2p", "a2a")


def test_values_that_a_pattern_replaces_are_noted():
    words = ["--hybrid-layer-pattern", "*-*-"]
    plain = parse([*BASE, *words])
    assert parse([*BASE, *words, "--num-layers", "2"]).notes == plain.notes == ()
    four = parse([*BASE, *words, "--num-layers", "4", *MOE.split()])
    assert four.run == plain.run
    assert four.notes[0].startswith(
        "--num-layers 4 has no effect: --hybrid-layer-pattern '*-*-' has 2 layers"
    )
    assert four.notes[1] == "--num-experts has no effect: --hybrid-layer-pattern '*-*-' has no E"


def test_a_pattern_replaces_the_layers_of_a_recipe_and_is_a_keyword_of_the_library():
    words = ["--recipe", "qwen3-30b-a3b", "--mock-data", "--hybrid-layer-pattern"]
    assert parse([*words, "*E*E"]).run.model.num_layers == 2
    assert (
        make_run("demo", {"hybrid_layer_pattern": "*-"}).model.num_layers == 1
    )  # of `fugaku-megatron log`
    mixed = Config.recipe("qwen3-30b-a3b", mock_data=True, hybrid_layer_pattern="*-*E")
    assert mixed.run.model.moe_layer_freq == "[0, 1]"
    assert mixed.replace(hybrid_layer_pattern="*-").run.model.num_experts is None
    assert parse_pattern("*-*E|*-") == (("*-", "*E", "*-"), (2, 1))


ALONE = {
    "**-": "--layer-types *,*-",
    "*--": "--layer-types *-,-",
    "-*E": f"--layer-types=-,*E {MOE}",
}


def first_iteration(world, run):
    """Return (loss, whole gradients, weights before, samples) of a run's first iteration."""
    trainer = make_trainer(world, run)
    weights = whole_tensors(trainer, "weight")
    loss = trainer.train_step().loss
    trainer.close()
    samples = fetch(trainer.train, range(4)) if world.rank == 0 else None
    return loss, whole_tensors(trainer, "grad"), weights, samples


@pytest.mark.parametrize("pattern", ALONE)
@pytest.mark.parametrize(
    "layout", ["dp1", "tp2 sequence_parallel", "pp2", "pp2 zb-h1", "full", "cp2"]
)
def test_layers_of_one_part_are_those_of_plain_torch(pattern, layout):
    own = {"layer_types": ",".join(parse_pattern(pattern).layers), "num_layers": 2}
    experts = dict(num_experts=4, moe_router_topk=2, disable_bias_linear=True, swiglu=True)
    flags = {**own, **(experts if "E" in pattern else {})}
    flags |= {
        "global_batch_size": 4,
        "init_method_std": 0.2,
        "clip_grad": 0.0,
        "untie_embeddings_and_output_weights": True,
    }
    loss, grads, weights, samples = run_layout(layout, first_iteration, flags)[0]
    plain = {name: value.clone().requires_grad_() for name, value in weights.items()}
    tokens, labels = torch.from_numpy(samples[:-1]), torch.from_numpy(samples[1:])
    model = lay_out(layout, flags)[0].model
    expected = plain_losses(plain, tokens.t(), labels.t(), model).mean()
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert grads.keys() == plain.keys()
    assert_near(grads, {name: value.grad for name, value in plain.items()}, 2e-5)


@pytest.mark.parametrize("pattern", ALONE)
def test_a_pattern_of_layers_of_one_part_sets_their_types(pattern):
    words = [*BASE, f"--hybrid-layer-pattern={pattern}", *(MOE.split() if "E" in pattern else [])]
    model = parse(words).run.model
    assert model == parse([*BASE, "--num-layers", "2", *ALONE[pattern].split()]).run.model
    assert model.residual_parts == 3
    assert parse([*BASE, *model_flags(model)]).run.model == model


LAYOUT = "--num-layers 7 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout".split()


def test_a_layout_in_letters_is_the_layers_of_virtual_stages():
    split = "--pipeline-split 3,1,2,1 --num-virtual-stages-per-pipeline-rank 2".split()
    plain = parse([*BASE, *LAYOUT[:-1], *split]).run
    for letters in ("Ettt|t|tt|tL", "Et*3|t|,t*2|tL", "E(tt)*1t|(t|)*1tt|tL"):
        assert parse([*BASE, *LAYOUT, letters]).run == plain
    assert parse_layout("Et*3|(tt|)*6tL") == (3, 2, 2, 2, 2, 2, 2, 1)
    assert parse_layout("E|tt|t|L") == (0, 2, 1, 0) and parse_layout("(E|)*1t*2L") == (0, 2)
    two = ["--num-layers", "2", "--pipeline-model-parallel-layout", "Et|tL"]
    assert parse([*BASE, *two]).run == parse([*BASE, *two[:2]]).run
    losses = []
    for words in ([*LAYOUT, "Ettt|t|tt|tL"], LAYOUT[:2]):
        run = parse([*BASE, *words]).run
        world = ThreadWorld(run.parallel.pipeline_model_parallel_size)
        losses.append(world.run(lambda world, run=run: train(world, run, 2))[0][1].loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
