"""The command line: Megatron-LM's flags, flags of its CPU forks, recipes, and what is said about mistakes."""

from dataclasses import fields

import pytest

from fugaku_megatron.cli.arguments import Arguments, build_parser, make_run, model_flags, parse
from fugaku_megatron.config.megatron_flags import OTHER_FLAGS
from fugaku_megatron.config.recipes import RECIPES
from fugaku_megatron.config.run_config import GROUPS, RunConfig
from fugaku_megatron.config.sample_rules import Skips
from fugaku_megatron.costs.stages import model_parameters

pytestmark = pytest.mark.unit

BASE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --vocab-size 96"


def parsed(flags: str) -> Arguments:
    return parse(f"{BASE} {flags}".split())


def value(run: RunConfig, name: str) -> object:
    """Return the value of a field in any group."""
    return next(
        getattr(getattr(run, group), name)
        for group, config in GROUPS.items()
        if name in {f.name for f in fields(config)}
    )


def test_help_names_and_explains_every_flag():
    text = build_parser().format_help()
    for action in build_parser()._actions:
        assert all(option in text or option in OTHER_FLAGS for option in action.option_strings)
    assert "(default: 0.999)" in text and "docs/megatron.md lists them all" in text


VALUES = """
--num-layers 6 | --hidden-size 64 | --ffn-hidden-size 96 | --num-attention-heads 8 | --seq-length 32 | --max-position-embeddings 64
--make-vocab-size-divisible-by 16 | --init-method-std 0.01 | --layernorm-epsilon 1e-6 | --hidden-dropout .2 | --attention-dropout .3
--micro-batch-size 4 | --global-batch-size 64 | --exit-interval 7 | --exit-duration-in-mins 1.5 | --lr 3e-4 | --lr-decay-iters 50
--lr-decay-style cosine | --lr-warmup-iters 5 | --lr-warmup-fraction 0.25 | --weight-decay 0.05 | --clip-grad 0.5 | --adam-beta1 0.8
--adam-beta2 0.9 | --adam-eps 1e-7 | --loss-scale 128.0 | --initial-loss-scale 1024.0 | --min-loss-scale 2.0 | --loss-scale-window 9
--tensor-model-parallel-size 2 | --pipeline-model-parallel-size 2 | --zero-stage 1 | --recompute-granularity selective
--recompute-num-layers 2 | --split 8,1,1 | --tokenizer-type GPT2BPETokenizer | --seed 3 | --save s | --load l | --save-interval 9
--log-interval 3 | --eval-interval 4 | --eval-iters 0 | --tensorboard-dir t | --train-iters 12 | --train-samples 13 | --hysteresis 3
--save-interval-in-mins 2.5 | --keep-last 3
"""


@pytest.mark.parametrize(
    "pair", [v.strip() for line in VALUES.strip().splitlines() for v in line.split("|")]
)
def test_a_value_arrives_in_its_field_and_takes_the_place_of_a_recipes(pair):
    flag, text = pair.split()
    name = flag[2:].replace("-", "_")
    found = value(parsed(f"--save d {flag} {text}").run, name)
    assert type(found)(text) == found and not isinstance(found, bool)
    if name not in (
        "num_attention_heads",
        "hidden_size",
        "seq_length",
        "max_position_embeddings",
        "hysteresis",
    ):
        more = "--max-position-embeddings 2048 --save d --min-lr 0".split()
        assert value(parse(["--recipe", "124m", *more, flag, text]).run, name) == found


def test_several_values_switches_and_old_names():
    plain = parsed("--dry-run --world-size 512")
    assert (
        plain.dry_run
        and plain.world_size == 512
        and plain.recipe is None
        and plain.notes == ()
        and not parsed("").dry_run
    )
    assert [
        parsed(flag).run.training.use_flush_denormal
        for flag in ("", "--use-flush-denormal", "--no-use-flush-denormal")
    ] == [True, True, False]
    assert [
        parsed(f"--fp16 {flag}").run.system.fp16_accumulation_chunk
        for flag in ("", "--fp16-accumulation", "--fp16-accumulation-chunk 128")
    ] == [None, 64, 128]
    run = parsed(
        "--rampup-batch-size 4 4 100 --global-batch-size 16 --data-path 0.3 a 0.7 b --vocab-file v --merge-file m --bf16 "
        "--use-distributed-optimizer --checkpoint-activations --log-params-norm --log-num-zeros-in-grad"
    ).run
    assert run.batch.rampup_batch_size == (4, 4, 100) and run.data.data_path == (
        "0.3",
        "a",
        "0.7",
        "b",
    )
    assert (run.data.vocab_file, run.data.merge_file) == ("v", "m") and run.precision.bf16
    assert run.parallel.zero_stage == 1 and run.training.recompute_granularity == "full"
    assert run.output.log_params_norm and run.output.log_num_zeros_in_grad
    old = parsed(
        "--batch-size 8 --model-parallel-size 2 --pipe-parallel-size 2 --warmup-iters 3 --fp16 "
        "--checkpoint-num-layers 2 --recompute-activations"
    ).run
    assert (old.batch.micro_batch_size, old.parallel.tensor_model_parallel_size) == (8, 2)
    assert (old.parallel.pipeline_model_parallel_size, old.optimizer.lr_warmup_iters) == (2, 3)
    assert (
        old.training.recompute_num_layers,
        old.training.recompute_granularity,
        old.precision.name,
    ) == (2, "selective", "fp16")


@pytest.mark.parametrize(
    ("given", "more", "needed"),
    [
        ("--sequence-parallel", "", "--tensor-model-parallel-size above 1"),
        ("--loss-scale 128", "--bf16", "--fp16"),
        ("--hysteresis 2", "", "--fp16"),
        ("--initial-loss-scale 65536", "", "--fp16"),
        ("--recompute-num-layers 2", "--recompute-activations", "--recompute-granularity full"),
        ("--profile-ranks 1", "", "--profile"),
        ("--tokenizer-type x", "--mock-data", "--vocab-file or --tokenizer-model"),
        ("--save-interval 9", "", "--save"),
        ("--finetune", "", "--load"),
    ],
)
def test_a_flag_without_effect_gets_a_note(given, more, needed):
    assert parsed(f"{given} {more}").notes == (
        f"{given.split()[0]} has no effect without {needed}",
    )
    full = (
        "--fp16 --checkpoint-activations --profile --vocab-file v --merge-file m --save s --load l "
        "--tensor-model-parallel-size 2"
    )
    assert parsed(f"{given} {full}").notes == ()


def test_missing_flags_and_misspelled_fields_are_named():
    with pytest.raises(
        ValueError,
        match="^--num-layers, --num-attention-heads, --seq-length, --micro-batch-size must be ",
    ):
        parse(["--hidden-size", "32"])
    with pytest.raises(AssertionError, match="num_layer"):
        make_run("demo", {"num_layer": 3})


def test_ranges_of_samples_are_joined():
    run = parse("--recipe demo --skip-samples 10:20,15:30 2:3".split()).run
    assert str(Skips.parse(run.data.skip_samples)) == "2:3,10:30"


# Recipes -----------------------------------------------------------------------------------------------------------------------


def test_recipes_have_their_published_sizes():
    millions = {
        name: model_parameters(make_run(name, {"vocab_size": 50257})) / 1e6 for name in RECIPES
    }
    assert millions["124m"] == pytest.approx(124.5, abs=0.2)
    assert millions["1.3b"] == pytest.approx(1315, abs=5)
    assert millions["13b"] == pytest.approx(13180, abs=100)
    assert millions["30b"] == pytest.approx(29970, abs=100)
    assert model_parameters(make_run("demo", {"vocab_size": 320})) / 1e6 == pytest.approx(
        0.85, abs=0.02
    )


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_alone_is_the_recipe_and_its_flags_make_the_model_again(name):
    recipe = RECIPES[name]()
    assert make_run(name, {}) == recipe == parse(["--recipe", name.upper()]).run
    sizes = f"--seq-length {recipe.model.seq_length} --micro-batch-size 1 --train-iters 1"
    assert parse([*model_flags(recipe.model), *sizes.split()]).run.model == recipe.model


def test_a_flag_drops_what_the_recipe_derived_from_the_old_value():
    run = make_run("124m", {"hidden_size": 96, "seq_length": 2048, "lr": 1e-5})
    assert (run.model.ffn_hidden_size, run.model.max_position_embeddings, run.optimizer.min_lr) == (
        384,
        2048,
        0.0,
    )
    assert (
        make_run("124m", {"hidden_size": 96, "ffn_hidden_size": 100}).model.ffn_hidden_size == 100
    )
    for recipe in RECIPES:
        run = make_run(recipe, {"train_samples": 10000})
        assert run.training.train_iters is None and run.training.train_samples == 10000
        assert run.optimizer.lr_warmup_fraction or run.optimizer.lr_warmup_samples, (
            "the warm-up of the recipe stays"
        )
    run = make_run("124m", {"lr_warmup_iters": 3})
    assert run.optimizer.lr_warmup_iters == 3 and run.optimizer.lr_warmup_fraction is None
