"""Config dataclasses: every field is documented, and every mistake is refused with its flag and the remedy."""

import pickle
from dataclasses import asdict, fields, replace

import pytest

from fugaku_megatron.cli.arguments import make_run
from fugaku_megatron.config.architecture import ARCHITECTURE, architecture, with_block
from fugaku_megatron.config.fields import declarations
from fugaku_megatron.config.precision import PrecisionConfig
from fugaku_megatron.config.run_config import (
    GROUPS,
    ModelConfig,
)

pytestmark = pytest.mark.unit

MODEL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16}


@pytest.mark.parametrize("name", GROUPS)
def test_every_field_has_help_and_a_type_the_command_line_can_read(name):
    for declared in declarations(GROUPS[name]):
        assert len(declared.help) > 10 and "\n" not in declared.help, declared.name
        assert declared.kind in (bool, int, float, str), declared.name


def test_derived_values_and_groups():
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


DELTA_NET = {"num_layers": 4, "experimental_attention_variant": "gdn"}


@pytest.mark.parametrize(
    ("flags", "mixers"),
    [
        ({"linear_attention_freq": "2"}, "G*G*"),
        ({"linear_attention_freq": "[1]*3+[0]"}, "GGG*"),
        ({"layer_types": "G-,*-,G,-"}, "G*G-"),
    ],
)
def test_gated_delta_nets_are_the_layers_of_a_pattern(flags, mixers):
    symbols = {"gated_delta_net": "G", "attention": "*", None: "-"}
    model = ModelConfig(**{**MODEL, **DELTA_NET, **flags})
    assert "".join(symbols[kind.mixer] for kind in model.layer_kinds) == mixers


LAYERS = {"position_embedding_type": "rope", "window_size": "2,0", "num_layers": 4}


@pytest.mark.parametrize(
    ("flags", "windows", "ropes"),
    [
        ({}, [3, 3, 3, 3], ["global"] * 4),
        ({"window_attn_skip_freq": "2"}, [3, None, 3, None], ["global"] * 4),
        ({"window_attn_skip_freq": "[0]+[1]*3"}, [None, 3, 3, 3], ["global"] * 4),
        (
            {"window_attn_skip_freq": "4", "window_rotary_base": 100.0},
            [3, 3, 3, None],
            ["local", "local", "local", "global"],
        ),
        ({"no_rope_freq": "2"}, [3] * 4, ["global", None, "global", None]),
        ({"no_rope_freq": "[1,0,0,0]"}, [3] * 4, [None, "global", "global", "global"]),
        ({"position_embedding_type": "none"}, [3] * 4, [None] * 4),
    ],
)
def test_each_layer_has_its_window_and_its_rope(flags, windows, ropes):
    model = ModelConfig(**{**MODEL, **LAYERS, **flags})
    assert [kind.window for kind in model.layer_kinds] == windows
    assert [kind.rope for kind in model.layer_kinds] == ropes


def test_a_checkpoint_without_these_values_has_gpt2s_block():
    model = ModelConfig(**MODEL)
    names = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size")
    saved = {name: getattr(model, name) for name in (*names, "max_position_embeddings")}
    assert with_block(saved).items() >= architecture(model).items()
    assert with_block({**saved, "swiglu": True})["swiglu"]
    assert "max_position_embeddings" in architecture(model), "it counts where positions are learned"
    assert "max_position_embeddings" not in architecture(
        ModelConfig(**MODEL, position_embedding_type="none")
    )


def test_the_hash_is_computed_once_and_not_sent_to_other_processes():
    run, other = (make_run("124m", {"vocab_size": 50257}) for _ in range(2))
    assert hash(run) == hash(other) == run._hash and run == other and repr(run) == repr(other)
    assert "_hash" not in asdict(run)
    changed = replace(run, batch=replace(run.batch, micro_batch_size=7))
    assert hash(changed) != hash(run) and changed.batch._hash == hash(changed.batch)
    sent = pickle.loads(pickle.dumps(run))
    assert sent == run and "_hash" not in vars(sent) and "_hash" not in vars(sent.model)
