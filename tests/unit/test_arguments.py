"""The command line: Megatron-LM's flags, flags of its CPU forks, recipes, and what is said about mistakes."""

from __future__ import annotations

import shlex
from dataclasses import fields

import pytest

from fugaku_megatron.config.arguments import build_parser, make_run, model_flags, parse
from fugaku_megatron.config.compatibility import COMPATIBILITY_FLAGS
from fugaku_megatron.config.model_config import NORMS
from fugaku_megatron.config.recipes import RECIPES
from fugaku_megatron.config.run_config import GROUPS, RunConfig
from fugaku_megatron.costs.accounting import parameters

BASE = shlex.split("--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --vocab-size 96")

MEGATRON_FLAGS = """
--num-layers --hidden-size --ffn-hidden-size --num-attention-heads --seq-length --max-position-embeddings
--make-vocab-size-divisible-by --init-method-std --layernorm-epsilon --hidden-dropout --attention-dropout --micro-batch-size
--global-batch-size --rampup-batch-size --train-iters --train-samples --exit-interval --exit-duration-in-mins --lr --min-lr
--lr-decay-style --lr-decay-iters --lr-warmup-iters --lr-warmup-fraction --lr-warmup-samples --weight-decay --clip-grad
--adam-beta1 --adam-beta2 --adam-eps --bf16 --fp16 --loss-scale --initial-loss-scale --min-loss-scale --loss-scale-window
--tensor-model-parallel-size --pipeline-model-parallel-size --use-distributed-optimizer --checkpoint-activations
--recompute-granularity --recompute-num-layers --data-path --split --vocab-file --merge-file --tokenizer-type --seed --save --load
--save-interval --log-interval --eval-interval --eval-iters --tensorboard-dir --log-params-norm --log-num-zeros-in-grad
--zero-stage --recipe --dry-run --world-size
""".split()


def value(run: RunConfig, name: str) -> object:
    """The value of a field, whichever group holds it."""
    return next(getattr(getattr(run, group), name) for group, config in GROUPS.items() if name in {f.name for f in fields(config)})


@pytest.mark.parametrize("name", MEGATRON_FLAGS)
def test_flag_exists_with_help(name):
    action = build_parser()._option_string_actions[name]
    assert action.help


def test_help_names_every_flag():
    text = build_parser().format_help()
    for action in build_parser()._actions:
        assert all(option in text for option in action.option_strings)
    assert "(default: 0.999)" in text and "COMPATIBILITY" not in text


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


@pytest.mark.parametrize("pair", [v.strip() for line in VALUES.strip().splitlines() for v in line.split("|")])
def test_a_value_arrives_in_its_field(pair):
    name, text = pair.split()
    parsed = value(parse([*BASE, "--save", "d", name, text]).run, name[2:].replace("-", "_"))
    assert type(parsed)(text) == parsed and not isinstance(parsed, bool)


def test_several_values_switches_and_old_names():
    run = parse([*BASE, *shlex.split(
        "--rampup-batch-size 4 4 100 --global-batch-size 16 --data-path 0.3 a 0.7 b --vocab-file v --merge-file m --bf16 "
        "--use-distributed-optimizer --checkpoint-activations --log-params-norm --log-num-zeros-in-grad")]).run
    assert run.batch.rampup_batch_size == (4, 4, 100) and run.data.data_path == ("0.3", "a", "0.7", "b")
    assert (run.data.vocab_file, run.data.merge_file) == ("v", "m") and run.precision.bf16
    assert run.parallel.zero_stage == 1 and run.training.recompute_granularity == "full"
    assert run.output.log_params_norm and run.output.log_num_zeros_in_grad
    old = parse([*BASE, *shlex.split("--batch-size 8 --model-parallel-size 2 --pipe-parallel-size 2 --warmup-iters 3 --fp16 "
                                     "--checkpoint-num-layers 2 --recompute-activations")]).run
    assert (old.batch.micro_batch_size, old.parallel.tensor_model_parallel_size) == (8, 2)
    assert (old.parallel.pipeline_model_parallel_size, old.optimizer.lr_warmup_iters) == (2, 3)
    assert (old.training.recompute_num_layers, old.training.recompute_granularity, old.precision.name) == (2, "selective", "fp16")


def test_denormals_are_flushed_unless_switched_off():
    assert parse(BASE).run.training.use_flush_denormal and parse([*BASE, "--use-flush-denormal"]).run.training.use_flush_denormal
    assert not parse([*BASE, "--no-use-flush-denormal"]).run.training.use_flush_denormal


@pytest.mark.parametrize("given", ["--no-cuda", "--distributed-backend mpi", "--DDP-impl local", "--cpu-optimizer",
                                   "--cpu-torch-adam", "--use-cpu-initialization", "--optimizer adam",
                                   "--use-flash-attn"])
def test_flags_of_cpu_forks_get_one_note(given):
    arguments = parse([*BASE, *given.split()])
    name = given.split()[0]
    assert arguments.notes == (f"{name}: {COMPATIBILITY_FLAGS[name][1]}",) and "\n" not in arguments.notes[0]
    assert arguments.run == parse(BASE).run


@pytest.mark.parametrize(("given", "more", "needed"), [
    ("--sequence-parallel", "", "--tensor-model-parallel-size above 1"),
    ("--loss-scale 128", "--bf16", "--fp16"), ("--hysteresis 2", "", "--fp16"), ("--initial-loss-scale 65536", "", "--fp16"),
    ("--recompute-num-layers 2", "--recompute-activations", "--recompute-granularity full"),
    ("--profile-ranks 1", "", "--profile"), ("--tokenizer-type x", "--mock-data", "--vocab-file or --tokenizer-model"),
    ("--save-interval 9", "", "--save"),
])
def test_a_flag_without_effect_gets_a_note(given, more, needed):
    assert parse([*BASE, *given.split(), *more.split()]).notes == (f"{given.split()[0]} has no effect without {needed}",)
    full = ("--fp16 --checkpoint-activations --profile --vocab-file v --merge-file m --save s "
            "--tensor-model-parallel-size 2").split()
    assert parse([*BASE, *given.split(), *full]).notes == ()


def test_the_launch_line_of_a_cpu_fork_parses():
    arguments = parse(shlex.split("""
        --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --num-layers 12 --hidden-size 768 --num-attention-heads 12
        --micro-batch-size 1 --global-batch-size 1024 --seq-length 1024 --max-position-embeddings 1024 --train-iters 500000
        --lr-decay-iters 320000 --lr 0.00015 --min-lr 1.0e-5 --lr-decay-style cosine --lr-warmup-fraction .01 --weight-decay 1e-2
        --clip-grad 1.0 --save checkpoints --load checkpoints --data-path data/codeparrot_content_document --vocab-file vocab.json
        --merge-file merges.txt --data-impl mmap --split 949,50,1 --distributed-backend mpi --DDP-impl local --local_rank 0
        --log-interval 1 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --no-cuda --checkpoint-activations
        --use-cpu-initialization --num-workers 0 --cpu-optimizer --cpu-torch-adam --use-flush-denormal
        --tensorboard-dir tensorboard --log-params-norm
    """))
    run = arguments.run
    assert (run.model.num_layers, run.batch.global_batch_size, run.optimizer.lr) == (12, 1024, 1.5e-4)
    assert (run.training.recompute_granularity, run.optimizer.lr_warmup_fraction) == ("full", 0.01)
    assert {note.split(":")[0] for note in arguments.notes} == {
        "--data-impl", "--distributed-backend", "--DDP-impl", "--local_rank", "--no-cuda", "--use-cpu-initialization",
        "--num-workers", "--cpu-optimizer", "--cpu-torch-adam"}


@pytest.mark.parametrize(("flags", "message"), [
    ("--num-layer 3", "unknown flag --num-layer: did you mean --num-layers?"),
    ("--tensor-model-paralell-size=2", "unknown flag --tensor-model-paralell-size=2: did you mean --tensor-model-parallel-size?"),
    ("--quux 3", "unknown flag --quux: see --help"),
    ("stray", "--vocab-size takes one value, and 2 words follow it, 96 stray: leave out stray"),
    ("--step-batch-size-schedule 0:1 2.4B:320", "--step-batch-size-schedule takes one value, and 2 words follow it, 0:1 2.4B:320: "
     "put them in quotes, --step-batch-size-schedule '0:1 2.4B:320'"),
    ("--step-batch-size-schedule=0:1 2.4B:320 9B:4 --bf16", ".* 3 words follow it, 0:1 2.4B:320 9B:4: put them in quotes"),
    ("--bf16 yes", "--bf16 takes no value: leave out yes"),
    ("--rampup-batch-size 1 2 3 4", "--rampup-batch-size takes 3 values, and 4 words follow it, 1 2 3 4: leave out 4"),
    ("--num-layers x", "argument --num-layers: invalid int value: 'x'"),
    ("--num-layers", "argument --num-layers: expected one argument"),
    ("--lr-decay-style stepwise", "argument --lr-decay-style: invalid choice: 'stepwise'"),
    ("--num-attention-heads 5", "--hidden-size 32 is not divisible by --num-attention-heads 5"),
    ("--kv-channels 6", "--kv-channels is 6, .* kernels take multiples of 4: pass one, or --kernels torch"),
    ("--hidden-size 24", "--kv-channels is 6, by default hidden size / attention heads"),
    ("--sequence-paralel", "unknown flag --sequence-paralel: did you mean --sequence-parallel?"),
    ("--deepspeed-config x", "unknown flag --deepspeed-config: see --help"),
    ("--position-embedding-type alibi", "argument --position-embedding-type: invalid choice: 'alibi'"),
    ("--optimizer sgd", "argument --optimizer: invalid choice: 'sgd'"),
    ("--world-size 4", "--world-size 4 goes with --dry-run"),
    ("--dry-run --world-size 0", "--world-size is 0"),
    ("--recipe 124n", "--recipe 124n is unknown: pass one of demo, 124m, .*did you mean 124m"),
    ("--recipe zzz", "--recipe zzz is unknown: pass one of demo, 124m"),
])
def test_mistakes_are_one_line(flags, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")) as caught:
        parse([*BASE, *shlex.split(flags)])
    assert "\n" not in str(caught.value)


def test_missing_flags_are_named_all_at_once():
    with pytest.raises(ValueError, match="must be given .or start from a --recipe") as caught:
        parse(["--hidden-size", "32"])
    assert str(caught.value).startswith("--num-layers, --num-attention-heads, --seq-length, --micro-batch-size must be given")


def test_misspelled_fields_of_a_program_are_found():
    with pytest.raises(AssertionError, match="num_layer"):
        make_run("demo", {"num_layer": 3})


def test_dry_run_and_world_size():
    arguments = parse([*BASE, "--dry-run", "--world-size", "512"])
    assert arguments.dry_run and arguments.world_size == 512 and arguments.recipe is None and arguments.notes == ()
    assert not parse(BASE).dry_run


# Recipes -----------------------------------------------------------------------------------------------------------------------

def test_recipes_have_their_published_sizes():
    millions = {name: parameters(make_run(name, {"vocab_size": 50257})) / 1e6 for name in RECIPES}
    assert millions["124m"] == pytest.approx(124.5, abs=0.2)
    assert millions["1.3b"] == pytest.approx(1315, abs=5)
    assert millions["13b"] == pytest.approx(13180, abs=100)
    assert millions["30b"] == pytest.approx(29970, abs=100)
    assert parameters(make_run("demo", {"vocab_size": 320})) / 1e6 == pytest.approx(0.85, abs=0.02)


def test_sums_in_fp16_are_off_unless_asked_for():
    chunks = [parse(["--recipe", "124m", "--fp16", *flags]).run.system.fp16_accumulation_chunk
              for flags in ([], ["--fp16-accumulation"], ["--fp16-accumulation-chunk", "128"])]
    assert chunks == [None, 64, 128]


def test_a_recipe_alone_is_the_recipe():
    for name, recipe in RECIPES.items():
        assert make_run(name, {}) == recipe() and parse(["--recipe", name.upper()]).run == recipe()


@pytest.mark.parametrize("name", [f.name for config in GROUPS.values() for f in fields(config)])
def test_every_value_of_a_recipe_can_be_overridden(name, monkeypatch):
    monkeypatch.setitem(NORMS, "Other", NORMS["LayerNorm"])
    recipe = RECIPES["124m"]()
    before = value(recipe, name)
    others = {"num_attention_heads": 8, "zero_stage": 1, "lr_decay_style": "linear", "weight_decay_incr_style": "linear",
              "recompute_granularity": "full", "recompute_method": "block", "data_path": ("a",),
              "train_data_path": ("a",), "valid_data_path": ("b",), "lr_wsd_decay_style": "cosine", "lr_warmup_init": 1e-7,
              "step_batch_size_schedule": "0:8 1M:16",
              "recompute_part_layers": (3,), "skip_samples": ("2:3",), "abft": ("1",), "rampup_batch_size": (512, 512, 9),
              "split": "1,1,1", "pipeline_split": "even", "pipeline_schedule": "zbv", "tokenizer_type": "t", "kernels": "torch",
              "allocator": "stock", "thread_affinity": "none", "profile_ranks": (1, 2),
              "profile_step_start": 4, "profile_dir": "d", "log_live": "off", "mask_vocab_padding": "yes",
              "num_query_groups": 4, "position_embedding_type": "rope", "window_size": "9,0",
              "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16",
              "normalization": "Other", "min_lr": 1e-6, "hidden_size": 96, "max_position_embeddings": 4096}
    companions = {"start_weight_decay": {"weight_decay_incr_style": "linear"}, "lr_decay_samples": {"train_samples": 9},
                  "lr_warmup_samples": {"train_samples": 9}, "vocab_file": {"merge_file": "m"}, "merge_file": {"vocab_file": "v"}}
    companions |= {"num_query_groups": {"group_query_attention": True}, "qk_layernorm": {"normalization": "RMSNorm"}}
    companions |= dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype"), {"use_precision_aware_optimizer": True})
    companions |= {"fp16_accumulation_chunk": {"fp16": True}, "ckpt_step": {"load": "l"}}
    pipeline = {"pipeline_model_parallel_size": 2}
    companions |= dict.fromkeys(("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
                                 "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"), pipeline)
    companions |= {"lr_warmup_samples": {"train_samples": 9}, "lr_wsd_decay_samples": {"train_samples": 9}}
    companions["zero_bubble_max_pending_backward"] = {"pipeline_schedule": "zb-h1"}
    companions["wandb_project"] = {"wandb_exp_name": "n"}
    companions["valid_data_path"] = {"train_data_path": ("a",)}
    companions["recompute_part_layers"] = {"recompute_granularity": "full"}
    companions["overlap_param_gather"] = {"overlap_grad_reduce": True, "zero_stage": 1}
    companions["tp_comm_overlap"] = {"sequence_parallel": True}
    companions["end_weight_decay"] = companions["start_weight_decay"]
    if name in others:
        new = others[name]
    elif isinstance(before, bool):
        new = not before
    elif name.startswith("wandb") or name in ("vocab_file", "merge_file", "tokenizer_model", "save", "load", "tensorboard_dir",
                                              "log_file"):
        new = "somewhere"
    else:
        new = (before or 0.5) / 2 if isinstance(before, float) else (before or 5) * 2 + (name == "seed")
    run = make_run("124m", {name: new, **companions.get(name, {})})
    assert value(run, name) == new != before


def test_a_flag_drops_what_the_recipe_derived_from_the_old_value():
    run = make_run("124m", {"hidden_size": 96, "seq_length": 2048, "lr": 1e-5})
    assert (run.model.ffn_hidden_size, run.model.max_position_embeddings, run.optimizer.min_lr) == (384, 2048, 0.0)
    assert make_run("124m", {"hidden_size": 96, "ffn_hidden_size": 100}).model.ffn_hidden_size == 100
    for recipe in RECIPES:
        run = make_run(recipe, {"train_samples": 10000})
        assert run.training.train_iters is None and run.training.train_samples == 10000
        assert run.optimizer.lr_warmup_fraction or run.optimizer.lr_warmup_samples, "the warm-up of the recipe stays"
    run = make_run("124m", {"lr_warmup_iters": 3})
    assert run.optimizer.lr_warmup_iters == 3 and run.optimizer.lr_warmup_fraction is None


@pytest.mark.parametrize("name", RECIPES)
def test_a_models_flags_make_it_again(name):
    model = RECIPES[name]().model
    words = [*model_flags(model), "--seq-length", str(model.seq_length), "--micro-batch-size", "1", "--train-iters", "1"]
    assert parse(words).run.model == model
