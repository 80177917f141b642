"""Every type of rope scaling of Hugging Face: angles, logits, and the way back."""

import json

import pytest
import torch

from fugaku_megatron.convert.hugging_face.config_json import read_config
from fugaku_megatron.nn.attention.rotary_angles import frequencies, rotary_angles

transformers = pytest.importorskip("transformers")

from tests.hf_models import (  # noqa: E402
    LENGTH,
    LLAMA3,
    VOCABULARY,
    YARN,
    decoder,
    randomized,
)

pytestmark = pytest.mark.unit
from tests.checks.conversions import refused  # noqa: E402
from tests.checks.hugging_face import (  # noqa: E402
    assert_same_logits,
    edit,
    model_of_flags,
    there_and_back,
    without_files,
)

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(12)],
    "long_factor": [1.5 + 0.5 * i for i in range(12)],
    "original_max_position_embeddings": 16,
}
TYPES = {  # of rope_scaling, each with positions beyond the original ones
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": YARN,
    "yarn with its own numbers": {
        **YARN,
        "beta_fast": 4.0,
        "beta_slow": 0.25,
        "truncate": False,
        "attention_factor": 1.3,
    },
    "longrope": LONGROPE,
    "longrope with its own factor": {**LONGROPE, "factor": 3.0},
    "longrope with a factor of attention": {**LONGROPE, "attention_factor": 1.2},
    "yarn with mscales": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 16},
}


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(("Llama", kind) for kind in TYPES),
        ("Qwen3", "yarn"),
        ("StableLm", "linear"),
        ("Phi3", "longrope"),
    ],
)
def test_every_type_of_rope_scaling_is_computed_and_comes_back(tmp_path, family, kind):
    rope = {"rope_theta": 10000.0, **TYPES[kind]}
    heads = {
        "StableLm": {"partial_rotary_factor": 0.5},
        "Phi3": {"num_attention_heads": 2},  # of 24 elements each
    }.get(family, {"head_dim": 24})
    model = randomized(
        decoder(family, rope_parameters=rope, max_position_embeddings=LENGTH, **heads)
    )
    model.save_pretrained(tmp_path / "hf")
    back = there_and_back(tmp_path, *without_files(tmp_path))
    assert_same_logits(model, tmp_path / "ours", 4 * LENGTH, 1e-5)
    again, theirs = (
        transformers.AutoModelForCausalLM.from_pretrained(path).eval()
        for path in (back, tmp_path / "hf")
    )
    tokens = torch.arange(3 * LENGTH).remainder(VOCABULARY)[None]
    with torch.no_grad():
        # Phi-3 comes back as Llama, whose matmuls of queries, keys and values are apart.
        tolerance = 5e-6 if family == "Phi3" else 1e-6
        torch.testing.assert_close(
            again(tokens).logits, theirs(tokens).logits, rtol=0, atol=tolerance
        )
    assert again.config.rope_parameters["rope_type"] == rope["rope_type"]


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("length", [LENGTH, 5 * LENGTH, 131072])
def test_angles_are_those_of_transformers(kind, length):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_theta": 10000.0, "partial_rotary_factor": 1.0, **TYPES[kind]}
    config = decoder("Llama", rope_parameters=rope, head_dim=24)().config
    wanted, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](
        config, torch.device("cpu"), seq_len=length
    )
    model = read_config(json.loads(config.to_json_string()))[1]
    scaled = frequencies(model, length) / (model.rotary_seq_len_interpolation_factor or 1.0)
    torch.testing.assert_close(scaled, wanted, rtol=1e-6, atol=0)
    cosines, _ = rotary_angles(model, torch.zeros(1), length)
    torch.testing.assert_close(cosines, torch.full_like(cosines, factor), rtol=1e-6, atol=0)


SCALINGS = [
    {
        "factor": 16.0,
        "low_freq_factor": 2.0,
        "high_freq_factor": 8.0,
        "original_max_position_embeddings": 64,
    },
    {
        "factor": 3.0,
        "low_freq_factor": 0.5,
        "high_freq_factor": 32.5,
    },  # transformers then takes max_position_embeddings
    {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 4096,
    },
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_any_scaling_of_llama_3_is_computed_and_comes_back(tmp_path, scaling):
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, **scaling}
    model = randomized(
        decoder("Llama", rope_parameters=rope, max_position_embeddings=256, head_dim=24)
    )
    model.save_pretrained(tmp_path / "hf")
    if "original_max_position_embeddings" not in scaling:
        edit(tmp_path / "hf" / "config.json", "rope_parameters", rope)
    back = there_and_back(tmp_path, *without_files(tmp_path))
    assert_same_logits(model, tmp_path / "ours", 200, 1e-4)
    flags = model_of_flags(tmp_path / "ours")
    assert flags.rope_scaling_original_max_position_embeddings == scaling.get(
        "original_max_position_embeddings", 256
    )
    assert (flags.rope_scaling_low_freq_factor, flags.rope_scaling_high_freq_factor) == (
        scaling["low_freq_factor"],
        scaling["high_freq_factor"],
    )
    made = transformers.AutoConfig.from_pretrained(back).rope_parameters
    assert made == {**rope, "original_max_position_embeddings": 256, **scaling}
    again, theirs = (
        read_config(json.loads((path / "config.json").read_text()))[1]
        for path in (back, tmp_path / "hf")
    )
    assert torch.equal(frequencies(again, 256), frequencies(theirs, 256))


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (
            {"rope_type": "llama3", **SCALINGS[0]},
            "--rope-scaling-low-freq-factor is 2.0, and Megatron-LM computes 1.0",
        ),
        (TYPES["longrope"], "--longrope-short-factors is (1.0, 1.1"),
        (TYPES["dynamic"], "--rope-dynamic-factor is 2.0, and Megatron-LM's GPT computes None"),
    ],
)
def test_a_scaling_that_megatron_has_no_arguments_for_is_refused(
    tmp_path, capsys, scaling, message
):
    rope = {"rope_theta": 10000.0, **scaling}
    llama = decoder("Llama", rope_parameters=rope, max_position_embeddings=256, head_dim=24)
    randomized(llama).save_pretrained(tmp_path / "hf")
    line = refused(capsys, "--from-hf", tmp_path / "hf", "--to-megatron", tmp_path / "megatron")
    assert message in line and not list(tmp_path.glob("*megatron*"))
