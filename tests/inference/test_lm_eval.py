"""The lm-eval harness on a checkpoint: a stand-in of its base class, and the real one, marked `slow`, where it is installed.

pip install -r requirements-lm-eval.txt brings 45 packages of 440 MB, so it is not among what the tests install.
"""

import importlib
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.inference.harness import Asker, read_arguments, read_settings, serve
from tests.checks.evaluation import LENGTH, their_likelihoods
from tests.checks.generation import TEXT, WIDE, save_trained, their_model, write_tokenizer
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel

PAIRS = [("to be or", " not to be"), ("", "to be"), (TEXT * 2, "zebra"), ("to be or not ", "t")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(values of --model_args, transformers' model with the same weights)."""
    folder = tmp_path_factory.mktemp("harness")
    flags = write_tokenizer(folder)
    theirs = their_model(save_trained(SoloComm(), folder / "saved", 3, **WIDE))
    return {"load": str(folder / "saved"), "vocab_file": flags[1], "merge_file": flags[3]}, theirs


def likelihood(theirs, context: str, continuation: str) -> tuple[float, bool]:
    before = len(context.rstrip()) if context else 1
    first_token = [] if context else [256]
    ids = first_token + list((context + continuation).encode("utf-8", "surrogateescape"))
    scored = len(ids) - before
    ids = ids[-LENGTH - 1 :]
    greedy = (
        theirs(torch.tensor([ids[:-1]])).logits[0].argmax(1)[-scored:].tolist() == ids[-scored:]
    )
    return float(their_likelihoods(theirs, ids)[-scored:].sum()), greedy


@pytest.mark.parametrize("ranks", [1, 2])
def test_likelihoods_are_those_of_transformers(model, ranks):
    values, theirs = model

    likeliest = (
        theirs(torch.tensor([[ord(text)] for text in "abcdefgh"]))
        .logits[:, -1, :256]
        .argmax(1)
        .tolist()
    )
    asked = [
        *PAIRS,
        *(
            (text, bytes([i]).decode("utf-8", "surrogateescape"))
            for text, i in zip("abcdefgh", likeliest)
        ),
    ]

    def work(world):
        if world.rank:
            return serve(world)
        asker = Asker(world, {**values, "tensor_model_parallel_size": ranks})
        found = asker.likelihoods(asked), asker.rolling_likelihoods([TEXT * 3, "x", ""])
        world.broadcast_object(None)
        return found

    pairs, texts = ThreadWorld(ranks).run(work)[0]
    for pair, (value, greedy) in zip(asked, pairs):
        assert (
            value == pytest.approx(likelihood(theirs, *pair)[0], rel=1e-5)
            and greedy == likelihood(theirs, *pair)[1]
        )
    assert {greedy for _, greedy in pairs} == {False, True}
    ids = [256, *(TEXT * 3).encode()]
    whole = (len(ids) - 1) // LENGTH * LENGTH
    total = sum(
        float(their_likelihoods(theirs, ids[i : i + LENGTH + 1]).sum())
        for i in range(0, whole, LENGTH)
    )
    total += float(their_likelihoods(theirs, ids[-LENGTH - 1 :])[whole - len(ids) + 1 :].sum())
    assert texts[0] == pytest.approx(total, rel=1e-5) and texts[2] == 0
    assert texts[1] == pytest.approx(float(their_likelihoods(theirs, [256, ord("x")])), rel=1e-5)


def test_texts_go_on_until_a_word(model):
    values, theirs = model
    asker = Asker(SoloComm(), {**values, "micro_batch_size": 2})
    settings = {"until": ["\u2402"], "max_gen_toks": 9, "do_sample": False, "temperature": 0.0}
    contexts = ["to be", "qu", "a" * 300]
    texts = asker.texts_until([(context, settings) for context in contexts])
    for context, text in zip(contexts, texts):
        ids = torch.tensor([list(context.encode())[-215:]])
        flags = {
            "do_sample": False,
            "max_new_tokens": 9,
            "min_new_tokens": 9,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        expected = bytes(theirs.generate(ids, **flags)[0, ids.shape[1] :].tolist()).decode(
            "utf-8", "replace"
        )
        assert text == expected
    first = asker.texts_until([("to be", {"until": texts[0][3], "max_gen_toks": 9})])[0]
    assert first == texts[0][: texts[0].index(texts[0][3])]
    with pytest.raises(ValueError, match="224 new tokens fill all positions of the model"):
        asker.texts_until([("a", {"max_gen_toks": 224})])


def test_arguments_and_settings():
    assert read_arguments({"load": "d", "ckpt_step": 3, "vocab_file": None}).source.ckpt_step == 3
    for values, message in (
        ({"load": "d", "quux": 1}, "unknown flag --quux"),
        ({"load": "d", "micro_batch_size": 0}, "is 0: pass"),
    ):
        with pytest.raises(ValueError, match=message):
            read_arguments(values)
    words, tokens, sampling = read_settings({"until": "a", "temperature": 0.5, "do_sample": False})
    assert (words, tokens, sampling.temperature) == (["a"], 256, 0.0)
    assert read_settings({"temperature": 0.5, "do_sample": True, "top_k": 3})[2].top_k == 3


@pytest.fixture
def adapter(monkeypatch):
    """The module, on a stand-in of the harness."""
    base = ModuleType("lm_eval.api.model")
    base.LM = type("LM", (), {"__init__": lambda self: None})
    for name, module in (
        ("lm_eval", ModuleType("lm_eval")),
        ("lm_eval.api", ModuleType("lm_eval.api")),
        ("lm_eval.api.model", base),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "fugaku_megatron.inference.lm_eval", raising=False)
    yield importlib.import_module("fugaku_megatron.inference.lm_eval")
    del sys.modules["fugaku_megatron.inference.lm_eval"]


def test_the_harness_s_own_class(adapter, model):
    values, theirs = model
    ours = adapter.MegatronLM(**values, batch_size="3", max_batch_size=None, device="cpu")
    assert ours.asker.model.batch == 3
    requests = [SimpleNamespace(args=pair) for pair in PAIRS[:1]]
    assert ours.loglikelihood(requests)[0][0] == pytest.approx(
        likelihood(theirs, *PAIRS[0])[0], rel=1e-5
    )
    assert ours.loglikelihood_rolling([SimpleNamespace(args=("to",))])[0] < 0
    assert len(ours.generate_until([SimpleNamespace(args=("to", {"max_gen_toks": 2}))])[0]) <= 2


def test_a_harness_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    monkeypatch.delitem(sys.modules, "fugaku_megatron.inference.lm_eval", raising=False)
    with pytest.raises(
        ImportError,
        match="the lm-eval harness is missing .*pip install lm_eval, or .* its extra .lm-eval.",
    ):
        importlib.import_module("fugaku_megatron.inference.lm_eval")


TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: docs.json}}
test_split: train
output_type: {kind}
doc_to_text: "{text}"
doc_to_target: "{target}"
"""


@pytest.mark.system
@pytest.mark.slow
def test_the_real_harness_runs_a_local_task(model, tmp_path):
    if (
        importlib.util.find_spec("lm_eval") is None
    ):  # an import would change this process's environment
        pytest.skip("the lm-eval harness is not installed")
    values, theirs = model
    documents = [
        {"question": context, "choices": ["not to be", "zebra"], "answer": 0}
        for context in ("to be or", "qu")
    ]
    (tmp_path / "docs.json").write_text(json.dumps(documents))
    (tmp_path / "choice.yaml").write_text(
        TASK.format(name="choice", kind="multiple_choice", text="{{question}}", target="{{answer}}")
        + 'doc_to_choice: "{{choices}}"\n'
    )
    (tmp_path / "prose.yaml").write_text(
        TASK.format(name="prose", kind="loglikelihood_rolling", text="", target="{{question}}")
        + "metric_list: [{metric: byte_perplexity}]\n"
    )
    (tmp_path / "answer.yaml").write_text(
        TASK.format(name="answer", kind="generate_until", text="{{question}}", target="not")
        + 'generation_kwargs: {until: [","], max_gen_toks: 5, do_sample: false}\nmetric_list: [{metric: exact_match}]\n'
    )
    words = [
        "-m",
        "fugaku_megatron.inference.lm_eval",
        "--model",
        "fugaku_megatron",
        "--model_args",
        ",".join(f"{name}={value}" for name, value in values.items()),
        *"--include_path . --tasks choice,prose,answer --output_path scores".split(),
    ]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    scores = json.loads(next(tmp_path.glob("scores/**/results_*.json")).read_text())["results"]
    right = [
        likelihood(theirs, d["question"], " not to be")[0]
        > likelihood(theirs, d["question"], " zebra")[0]
        for d in documents
    ]
    assert scores["choice"]["acc,none"] == sum(right) / 2
    total = sum(
        float(their_likelihoods(theirs, [256, *d["question"].encode()]).sum()) for d in documents
    )
    expected = math.exp(-total / sum(len(d["question"]) for d in documents))
    assert scores["prose"]["byte_perplexity,none"] == pytest.approx(expected, rel=1e-5)
    assert 0 <= scores["answer"]["exact_match,none"] <= 1
