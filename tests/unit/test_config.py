"""Config dataclasses: every field is documented, and every mistake is refused with its flag and the remedy."""

import math
import pickle
from dataclasses import asdict, fields, replace

import pytest

from fugaku_megatron.cli.arguments import make_run
from fugaku_megatron.config.fields import declarations, flag
from fugaku_megatron.config.model import ARCHITECTURE, BLOCK, architecture, with_block
from fugaku_megatron.config.output import OutputConfig
from fugaku_megatron.config.precision import PrecisionConfig
from fugaku_megatron.config.rules import RULES
from fugaku_megatron.config.run_config import (
    GROUPS,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
)
from fugaku_megatron.config.system import SystemConfig
from fugaku_megatron.config.training import BatchConfig, TrainingConfig

MODEL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16}


@pytest.mark.parametrize("name", GROUPS)
def test_every_field_has_help_and_a_type_the_command_line_can_read(name):
    for declared in declarations(GROUPS[name]):
        assert len(declared.help) > 10 and "\n" not in declared.help, declared.name
        assert declared.kind in (bool, int, float, str), declared.name


def test_derived_values_and_groups():
    assert set(GROUPS) == {f.name for f in fields(RunConfig)}
    names = [f.name for config in GROUPS.values() for f in fields(config)]
    assert len(names) == len(set(names)), "one command line takes one flag of a name"
    assert set(ARCHITECTURE) <= {f.name for f in fields(ModelConfig)}
    model = ModelConfig(**MODEL)
    assert (model.ffn_hidden_size, model.max_position_embeddings, model.vocab_size) == (
        128,
        16,
        None,
    )
    assert (
        ModelConfig(**MODEL, ffn_hidden_size=40, max_position_embeddings=20).ffn_hidden_size == 40
    )
    assert [PrecisionConfig(**kind).name for kind in ({}, {"bf16": True}, {"fp16": True})] == [
        "fp32",
        "bf16",
        "fp16",
    ]
    model = ModelConfig(
        **{**MODEL, "hidden_size": 96}, swiglu=True, group_query_attention=True, num_query_groups=2
    )
    assert (model.ffn_hidden_size, model.kv_channels, model.query_groups, model.qkv_width) == (
        256,
        24,
        2,
        192,
    )
    model = ModelConfig(
        **MODEL,
        kv_channels=6,
        num_query_groups=2,
        position_embedding_type="rope",
        rotary_percent=0.7,
    )
    assert (model.query_groups, model.num_query_groups, model.context_width, model.rotary_size) == (
        4,
        None,
        24,
        4,
    )
    assert ModelConfig(**MODEL, group_query_attention=True).query_groups == 1
    windows = {
        text: ModelConfig(**MODEL, window_size=text).window
        for text in ("3,0", "(3, 0)", " 0,0", "-1,0")
    }
    assert windows == {"3,0": 4, "(3, 0)": 4, " 0,0": 1, "-1,0": None}


def test_a_checkpoint_without_these_values_has_gpt2s_block():
    model = ModelConfig(**MODEL)
    saved = {
        name: getattr(model, name) for name in ("num_layers", "hidden_size", "num_attention_heads")
    }
    assert with_block(saved).items() >= {name: getattr(model, name) for name in BLOCK}.items()
    assert with_block({**saved, "swiglu": True})["swiglu"]
    assert "max_position_embeddings" in architecture(model), "it counts where positions are learned"
    assert "max_position_embeddings" not in architecture(
        ModelConfig(**MODEL, position_embedding_type="none")
    )


def positive(config: type, required: dict, *names: str) -> list:
    return [
        (config, {**required, name: value}, f"{flag(name)} is {value}: pass a number above 0")
        for name in names
        for value in (0, -1)
    ]


def fraction(config: type, required: dict, *names: str) -> list:
    return [
        (
            config,
            {**required, name: value},
            f"{flag(name)} is {value}: pass a number from 0 to below 1",
        )
        for name in names
        for value in (-0.1, 1.0)
    ]


def not_negative(config: type, *names: str) -> list:
    return [(config, {name: -1}, f"{flag(name)} is -1: pass 0 or more") for name in names]


def choice(config: type, name: str, value: object, choices: str) -> tuple:
    return (config, {name: value}, f"{flag(name)} is {value}: pass {choices}")


MISTAKES = [
    *positive(
        ModelConfig,
        MODEL,
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "ffn_hidden_size",
        "seq_length",
        "max_position_embeddings",
        "vocab_size",
        "make_vocab_size_divisible_by",
        "init_method_std",
        "layernorm_epsilon",
    ),
    *fraction(ModelConfig, MODEL, "hidden_dropout", "attention_dropout"),
    (
        ModelConfig,
        {**MODEL, "num_attention_heads": 5},
        "--hidden-size 32 is not divisible by --num-attention-heads 5: change one",
    ),
    (
        ModelConfig,
        {**MODEL, "group_query_attention": True, "num_query_groups": 3},
        "--num-attention-heads 4 is not divisible by --num-query-groups 3",
    ),
    (
        ModelConfig,
        {**MODEL, "rotary_percent": 1.5},
        "--rotary-percent is 1.5: pass a number above 0, and 1 at most",
    ),
    *positive(
        ModelConfig,
        {**MODEL, "disable_bias_linear": True},
        "embedding_multiplier",
        "residual_multiplier",
        "logits_scaling",
    ),
    (
        ModelConfig,
        {**MODEL, "swiglu": True, "geglu": True},
        "--swiglu and --geglu exclude each other: pass one",
    ),
    (
        ModelConfig,
        {**MODEL, "qk_layernorm": True, "normalization": "PlainLayerNorm"},
        "--qk-layernorm is for LayerNorm and",
    ),
    (
        ModelConfig,
        {**MODEL, "residual_multiplier": 0.5},
        "--residual-multiplier 0.5 would leave out the biases: pass",
    ),
    (
        ModelConfig,
        {**MODEL, "attention_multiplier": 0.5},
        "--attention-multiplier 0.5 is computed with rope of whole heads",
    ),
    (
        ModelConfig,
        {**MODEL, "position_embedding_type": "rope", "kv_channels": 7},
        "of a head of 7 is 7: change it",
    ),
    *(
        (ModelConfig, {**MODEL, "window_size": text}, f"--window-size {text!r}: pass LEFT,0")
        for text in ("4", "4,1", "x,0")
    ),
    (
        ModelConfig,
        {**MODEL, "max_position_embeddings": 15},
        "--max-position-embeddings 15 is below --seq-length 16: raise",
    ),
    *positive(ParallelConfig, {}, "tensor_model_parallel_size", "pipeline_model_parallel_size"),
    choice(ParallelConfig, "zero_stage", 4, "0 or 1 or 2 or 3"),
    *positive(BatchConfig, {"micro_batch_size": 1}, "micro_batch_size", "global_batch_size"),
    (
        BatchConfig,
        {"micro_batch_size": 1, "global_batch_size": 8, "rampup_batch_size": (1, 2)},
        "--rampup-batch-size .*pass three",
    ),
    (
        BatchConfig,
        {"micro_batch_size": 1, "rampup_batch_size": (1, 1, 8)},
        "--rampup-batch-size needs --global-batch-size",
    ),
    *positive(OptimizerConfig, {"min_lr": -1}, "lr"),
    *positive(
        OptimizerConfig,
        {},
        "lr_decay_iters",
        "lr_decay_samples",
        "lr_decay_tokens",
        "lr_wsd_decay_iters",
        "adam_eps",
    ),
    *fraction(OptimizerConfig, {}, "adam_beta1", "adam_beta2"),
    *not_negative(
        OptimizerConfig,
        "min_lr",
        "weight_decay",
        "clip_grad",
        "lr_warmup_iters",
        "lr_warmup_samples",
        "start_weight_decay",
        "end_weight_decay",
    ),
    (OptimizerConfig, {"lr": 1e-4, "min_lr": 1e-3}, "--min-lr 0.001 is above --lr 0.0001"),
    choice(
        OptimizerConfig,
        "lr_decay_style",
        "stepwise",
        "constant or linear or cosine or inverse-square-root or WSD",
    ),
    choice(
        OptimizerConfig,
        "lr_wsd_decay_style",
        "stepwise",
        "exponential or linear or cosine or minus_sqrt",
    ),
    (
        OptimizerConfig,
        {"lr_decay_style": "WSD"},
        "--lr-decay-style WSD needs --lr-wsd-decay-iters or --lr-wsd-decay-samples",
    ),
    (
        OptimizerConfig,
        {"lr": 1e-4, "lr_warmup_init": 1e-3},
        "--lr-warmup-init 0.001 is above --lr 0.0001",
    ),
    (
        OptimizerConfig,
        {"lr_decay_iters": 5, "lr_decay_tokens": 10.0},
        "--lr-decay-iters and --lr-decay-tokens exclude each other",
    ),
    (
        OptimizerConfig,
        {"no_load_optim": True, "use_checkpoint_opt_param_scheduler": True},
        "goes with neither --no-load-lr-state",
    ),
    choice(OptimizerConfig, "weight_decay_incr_style", "stepwise", "constant or linear or cosine"),
    (
        OptimizerConfig,
        {"exp_avg_dtype": "bf16"},
        "--exp-avg-dtype bf16 needs --use-precision-aware-optimizer, as in Megatron-LM",
    ),
    (
        OptimizerConfig,
        {"exp_avg_sq_dtype": "fp8", "use_precision_aware_optimizer": True},
        "--exp-avg-sq-dtype fp8: moments lie below the range of FP8, and the scale of each tensor that it needs is not supported: ",
    ),
    (
        OptimizerConfig,
        {"start_weight_decay": 0.1},
        "--start-weight-decay 0.1 has no effect with --weight-decay-incr-style",
    ),
    (
        OptimizerConfig,
        {"lr_warmup_iters": 1, "lr_warmup_samples": 1},
        "--lr-warmup-iters and --lr-warmup-samples exclude",
    ),
    (
        OptimizerConfig,
        {"lr_warmup_fraction": 1.1},
        "--lr-warmup-fraction is 1.1: pass a number from 0 to 1",
    ),
    (PrecisionConfig, {"bf16": True, "fp16": True}, "--bf16 and --fp16 exclude each other"),
    *positive(
        PrecisionConfig,
        {},
        "loss_scale",
        "initial_loss_scale",
        "min_loss_scale",
        "loss_scale_window",
        "hysteresis",
    ),
    (
        PrecisionConfig,
        {"initial_loss_scale": 4.0, "min_loss_scale": 8.0},
        "--min-loss-scale 8.0 is above --initial-loss-scale",
    ),
    *positive(
        TrainingConfig,
        {},
        "train_samples",
        "exit_interval",
        "exit_duration_in_mins",
        "eval_interval",
        "recompute_num_layers",
    ),
    *not_negative(TrainingConfig, "train_iters", "eval_iters"),
    (
        TrainingConfig,
        {"train_iters": 1, "train_samples": 1},
        "--train-iters and --train-samples exclude each other",
    ),
    (TrainingConfig, {"seed": -1}, "--seed is -1: pass a number from 0 to 4294967295"),
    (TrainingConfig, {"seed": 2**32}, "--seed is 4294967296: pass at most 4294967295"),
    *(
        (
            OptimizerConfig,
            {name: math.inf},
            f"--{name.replace('_', '-')} is inf: pass a finite number",
        )
        for name in ("lr", "min_lr", "adam_eps", "weight_decay", "clip_grad")
    ),
    *(
        (
            PrecisionConfig,
            {"fp16": True, name: math.inf},
            f"--{name.replace('_', '-')} is inf: pass a finite number",
        )
        for name in ("loss_scale", "initial_loss_scale")
    ),
    *(
        (
            ModelConfig,
            {**MODEL, name: math.inf},
            f"--{name.replace('_', '-')} is inf: pass a finite number",
        )
        for name in ("init_method_std", "layernorm_epsilon")
    ),
    (
        ModelConfig,
        {**MODEL, "num_layers": 10**20},
        "--num-layers is a number of 21 digits: pass at most 4096",
    ),
    (
        ModelConfig,
        {**MODEL, "hidden_size": 10**9},
        "--hidden-size is 1000000000: pass at most 1048576",
    ),
    (BatchConfig, {"micro_batch_size": 10**9}, "--micro-batch-size is 1000000000: pass at most"),
    (
        BatchConfig,
        {"micro_batch_size": 1, "global_batch_size": 8, "rampup_batch_size": (1, 1, 10**30)},
        "--rampup-batch-size is a number of 31 digits: pass at most",
    ),
    choice(TrainingConfig, "recompute_granularity", "some", "full or selective"),
    choice(TrainingConfig, "recompute_method", "some", "uniform or block"),
    (
        DataConfig,
        {"vocab_file": "v"},
        "--vocab-file is v and --merge-file is None: pass both or neither",
    ),
    (
        DataConfig,
        {"mock_data": True, "data_path": ("a",)},
        "--mock-data and --data-path exclude each other",
    ),
    *positive(
        OutputConfig,
        {"load": "l"},
        "save_interval",
        "save_interval_in_mins",
        "keep_last",
        "log_interval",
        "ckpt_step",
    ),
    *(
        (OutputConfig, {name: ""}, f"{flag(name)} is empty: pass a directory")
        for name in ("save", "load", "tensorboard_dir", "profile_dir")
    ),
    (OutputConfig, {"ckpt_step": 5}, "--ckpt-step 5 needs --load"),
    *(
        (
            SystemConfig,
            {"fp16_accumulation_chunk": chunk},
            f"--fp16-accumulation-chunk is {chunk}: pass a number from 1 to 65536",
        )
        for chunk in (-1, 0, 65537)
    ),
    choice(SystemConfig, "fp32_matmul", "tf32", "ieee or bf16x3"),
]


@pytest.mark.parametrize(
    ("config", "values", "message"), MISTAKES, ids=[f"{c.__name__}-{v}" for c, v, _ in MISTAKES]
)
def test_a_mistake_is_refused_with_its_flag(config, values, message):
    with pytest.raises(ValueError, match=message) as caught:
        config(**values)
    assert "\n" not in str(caught.value)


CHUNKED = SystemConfig(fp16_accumulation_chunk=64)
SPLIT = SystemConfig(fp32_matmul="bf16x3")


def run_config(**groups) -> RunConfig:
    return RunConfig(model=ModelConfig(**MODEL), batch=BatchConfig(micro_batch_size=1), **groups)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            {"precision": PrecisionConfig(bf16=True), "system": CHUNKED},
            "--fp16-accumulation-chunk 64 is for --fp16, and this run is bf16: pass",
        ),
        (
            {"system": CHUNKED},
            "--fp16-accumulation-chunk 64 is for --fp16, and this run is fp32: pass",
        ),
        (
            {"precision": PrecisionConfig(fp16=True), "system": replace(CHUNKED, kernels="torch")},
            "--fp16-accumulation-chunk 64 is for the C.. kernels, and --kernels is torch: pass",
        ),
        (
            {"precision": PrecisionConfig(bf16=True), "system": SPLIT},
            "--fp32-matmul bf16x3 is for FP32, and this run is bf16: leave it out",
        ),
        (
            {"system": replace(SPLIT, kernels="torch")},
            "--fp32-matmul bf16x3 is for the C.. kernels, and --kernels is torch: pass",
        ),
        *(
            (
                {
                    "training": TrainingConfig(train_samples=8),
                    "optimizer": OptimizerConfig(**{name: 4}),
                },
                "--train-samples goes with --lr-decay-samples",
            )
            for name in ("lr_decay_iters", "lr_warmup_iters")
        ),
        *(
            (
                {
                    "training": TrainingConfig(train_iters=8),
                    "optimizer": OptimizerConfig(**{name: 4}),
                },
                "--lr-decay-samples and --lr-warmup-samples go with --train-samples",
            )
            for name in ("lr_decay_samples", "lr_warmup_samples")
        ),
    ],
)
def test_groups_that_do_not_go_together_are_refused(groups, message):
    with pytest.raises(ValueError, match=message) as caught:
        run_config(**groups)
    assert "\n" not in str(caught.value)


def test_the_hash_is_computed_once_and_not_sent_to_other_processes():
    run, other = (make_run("124m", {"vocab_size": 50257}) for _ in range(2))
    assert hash(run) == hash(other) == run._hash and run == other and repr(run) == repr(other)
    assert "_hash" not in asdict(run)
    changed = replace(run, batch=replace(run.batch, micro_batch_size=7))
    assert hash(changed) != hash(run) and changed.batch._hash == hash(changed.batch)
    sent = pickle.loads(pickle.dumps(run))
    assert sent == run and "_hash" not in vars(sent) and "_hash" not in vars(sent.model)


def test_rules_name_fields_of_their_group():
    """Compare the names in every row with the fields of its group."""
    for group, rules in RULES.items():
        known = {field.name for field in fields(GROUPS[group])}
        for rule in rules:
            assert known.issuperset(rule.names), (group, rule.names)
