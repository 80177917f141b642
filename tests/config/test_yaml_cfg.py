"""--yaml-cfg: flags from a file of Megatron-LM, and mistakes in it."""

import sys

import pytest

from fugaku_megatron.cli.arguments import parse

pytestmark = pytest.mark.parallel


YAML = """
language_model:
  num_layers: 2
  hidden_size: 64
  num_attention_heads: 4
  num_query_groups: null
  add_bias_linear: False
  activation_func: ACTIVATION
  gated_linear_unit: False
  layernorm_zero_centered_gamma: True
  layernorm_epsilon: 1.e-6
  apply_rope_fusion: True
  init_method: null
model_parallel:
  tensor_model_parallel_size: 2
  bf16: True
  timers: null
micro_batch_size: 2
global_batch_size: 8
rampup_batch_size: [2, 2, 100]
swiglu: True
add_position_embedding: False
position_embedding_type: rope
check_for_nan_in_loss_and_grad: True
seq_length: 32
max_position_embeddings: 64
lr: 2.5e-4
use_flush_denormal: False
train_samples: 400
train_data_path: 0.3 a 0.7 b
wandb_project: ''
"""
LIKE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --disable-bias-linear --layernorm-epsilon 1e-6 --bf16 "
    "--tensor-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 8 --rampup-batch-size 2 2 100 --lr 2.5e-4 "
    "--position-embedding-type rope --seq-length 32 --max-position-embeddings 64 --no-use-flush-denormal --train-samples 400 "
    "--apply-layernorm-1p --train-data-path 0.3 a 0.7 b"
)


@pytest.mark.parametrize(
    ("activation", "switch"),
    [("swiglu", "--swiglu"), ("squaredrelu", "--squared-relu"), ("gelu", "--no-bias-gelu-fusion")],
)
def test_flags_from_a_yaml_file(tmp_path, activation, switch):
    """megatron/training/yaml_arguments.py: activation_func decides, whatever swiglu says, and the command line is ignored."""
    path = tmp_path / "gpt.yaml"
    path.write_text(YAML.replace("ACTIVATION", activation))
    found = parse(f"--yaml-cfg {path} --dry-run --num-layers 7 --use-mpi".split())
    assert found.dry_run and found.run == parse([*LIKE.split(), switch]).run
    assert (
        found.notes[0]
        == f"--yaml-cfg {path}: the command line's --num-layers, --use-mpi are ignored, as in Megatron-LM"
    )
    assert (
        found.notes[1].startswith("--no-position-embedding:") and found.run.model.apply_layernorm_1p
    )
    assert parse(["--yaml-cfg", str(path)]).notes == found.notes[1:]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "language_model:\n  num_layer: 3",
            "language_model.num_layer: unknown key: did you mean --num-layers?",
        ),
        ("lr: fast", "lr: argument --lr: invalid float value: 'fast'"),
        ("bf16: 3", "bf16: 3 is not a value of a switch: pass true, false or null"),
        ("lr: True", "lr: True is not a value of --lr: pass one, or null"),
        (
            "language_model: {activation_func: tanh}",
            "language_model.activation_func: 'tanh' is not an activation: pass swiglu",
        ),
        (
            "language_model: {init_method: xavier_uniform}",
            "language_model.init_method: 'xavier_uniform' is not supported: pass null",
        ),
        (
            "language_model: {tensor_parallel_num_weight_shards: 2}",
            "language_model.tensor_parallel_num_weight_shards: "
            "--tensor-parallel-num-weight-shards 2: weights are not cut further",
        ),
        (
            "training: {lr: 1}",
            "training is a section, and the sections are language_model and model_parallel",
        ),
        (
            "lr: 1\nlanguage_model: {lr: 1}",
            "lr stands at the top or in a section twice: leave one out",
        ),
        ("lr: {a: 1}", "lr is a section"),
        ("language_model: {lr: {a: 1}}", "language_model.lr: it has keys of its own"),
        ("- 1", "it holds no keys"),
        ("a: [", "cannot be read: line 1: while parsing"),
        (None, "cannot be read (No such file or directory); pass the path"),
    ],
)
def test_mistakes_in_a_yaml_file_name_the_file_and_the_key(tmp_path, text, message):
    path = tmp_path / "gpt.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError) as refused:
        parse(["--yaml-cfg", str(path)])
    assert str(refused.value).startswith(f"--yaml-cfg {path}: {message}") and "\n" not in str(
        refused.value
    )


def test_a_yaml_file_needs_a_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ruamel.yaml", None)
    with pytest.raises(
        ValueError, match=r"--yaml-cfg x needs .*: pip install ruamel.yaml, or .* extra \[yaml\]"
    ):
        parse(["--yaml-cfg", "x"])
