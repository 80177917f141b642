"""config.json of published models: sizes, recipes, and what is refused by a field."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fugaku_megatron.config.architecture import architecture
from fugaku_megatron.config.model import ModelConfig
from fugaku_megatron.config.recipes import RECIPES
from fugaku_megatron.config.run_config import RunConfig
from fugaku_megatron.config.training import BatchConfig
from fugaku_megatron.convert.hugging_face.config_json import plain_config, read_config
from fugaku_megatron.costs.stages import model_parameters

transformers = pytest.importorskip("transformers")


pytestmark = pytest.mark.unit


# Fields of the config.json that models were published with at huggingface.co, by recipe or by architecture.
PUBLISHED = json.loads(
    (Path(__file__).parents[1] / "foreign" / "published_configs.json").read_text()
)


@pytest.mark.parametrize("recipe", sorted(PUBLISHED.keys() & RECIPES.keys()))
def test_a_recipe_is_the_published_model(recipe):
    assert architecture(read_config(PUBLISHED[recipe])[1]) == architecture(RECIPES[recipe]().model)


# config.json of models as published, each with the file that it was found in. "parameters": transformers' number.
MODELS_PUBLISHED = json.loads(
    (Path(__file__).parents[1] / "foreign" / "published_models.json").read_text()
)


CONVERTED = {name: row for name, row in MODELS_PUBLISHED.items() if "parameters" in row}


REFUSED = {
    "MiniMaxAI/MiniMax-M2.5": "model_type is 'minimax_m2'",
    "Qwen/Qwen3-VL-2B-Instruct": "model_type is 'qwen3_vl'",
    "XiaomiMiMo/MiMo-7B-Base": "model_type is 'mimo'",
    "deepseek-ai/DeepSeek-V2.5": "topk_group is 3 and num_experts_per_tok 6",
    "deepseek-ai/DeepSeek-V3.2": "model_type is 'deepseek_v32'",
    "google/gemma-4-26B-A4B": "model_type is 'gemma4'",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "model_type is 'llama4'",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "model_type is 'nemotron_h'",
    "swiss-ai/Apertus 8B with 8192 positions": "rope_scaling is None without rope_parameters",
    "zai-org/GLM-5": "model_type is 'glm_moe_dsa'",
}


def model_of_file(name: str) -> ModelConfig:
    return read_config(plain_config(MODELS_PUBLISHED[name]["config"]))[1]


def parameters_of(model: ModelConfig) -> int:
    return model_parameters(RunConfig(model=model, batch=BatchConfig(micro_batch_size=1)))


@pytest.mark.parametrize("name", CONVERTED)
def test_a_published_file_is_a_model_of_the_published_size(name):
    model = replace(model_of_file(name), make_vocab_size_divisible_by=1, mtp_num_layers=None)
    assert parameters_of(model) == CONVERTED[name]["parameters"]


def test_apertus_with_rope_as_the_message_asks_has_the_published_size():
    config = MODELS_PUBLISHED["swiss-ai/Apertus 8B with 8192 positions"]["config"]
    rope = {"rope_type": "default", "rope_theta": 5e5}
    model = read_config({**config, "rope_parameters": rope})[1]
    assert (model.rotary_base, model.use_rope_scaling) == (5e5, False)
    linear = {"rope_type": "linear", "factor": 2.0}
    scaled = {name: config[name] for name in config if name != "rope_theta"}
    assert read_config({**scaled, "rope_scaling": linear})[1].rotary_base == 12e6
    model = replace(model, make_vocab_size_divisible_by=1)
    assert parameters_of(model) == 8053338176


def test_a_pattern_of_exaone_in_letters():
    """The text of EXAONE 4.5 has both."""
    published = MODELS_PUBLISHED["LGAI-EXAONE/EXAONE-4.0-1.2B"]["config"]
    config = {**published, "sliding_window": 4096, "num_hidden_layers": 8, "reorder_qk_norm": True}
    kinds = 2 * [*3 * ["sliding_attention"], "full_attention"]
    named = read_config({**config, "layer_types": kinds, "sliding_window_pattern": "LLLG"})[1]
    assert (named.window_size, named.window_attn_skip_freq) == ("4095,0", "4")
    for pattern in ("LLLG", 4):
        given = {**config, "layer_types": None, "sliding_window_pattern": pattern}
        assert read_config(given)[1] == named
    with pytest.raises(ValueError, match="sliding_window_pattern is 'LGLL', not a whole number"):
        read_config({**config, "layer_types": None, "sliding_window_pattern": "LGLL"})


@pytest.mark.parametrize("size", ["27B", "35B-A3B"])
def test_the_recipes_of_qwen3_6_are_the_published_models(size):
    found = model_of_file(f"nvidia/Qwen3.6-{size}-NVFP4")
    recipe = RECIPES[f"qwen3.6-{size.lower()}"]()
    assert architecture(found) == architecture(recipe.model)


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ("deepseek-v3", "deepseek-ai/DeepSeek-R1"),
        ("deepseek-v2-lite", "deepseek-ai/DeepSeek-V2-Lite-Chat"),
    ],
)
def test_the_recipes_of_deepseek_are_the_published_models(recipe, name):
    """The chat models have their sizes; the recipe of DeepSeek-V3 leaves its MTP module out."""
    model = RECIPES[recipe]().model
    found = replace(model_of_file(name), mtp_num_layers=None)
    assert found.all_layer_kinds == model.all_layer_kinds
    same_words = replace(found, moe_layer_freq=model.moe_layer_freq)
    assert architecture(same_words) == architecture(model)
    assert parameters_of(model) == CONVERTED[name]["parameters"]


@pytest.mark.parametrize("name", REFUSED)
def test_a_published_file_that_is_not_built_is_refused_by_a_field(name):
    with pytest.raises(ValueError, match=REFUSED[name]) as error:
        model_of_file(name)
    assert "\n" not in str(error.value)
