"""Generated texts: learned by heart, token by token as transformers' texts, and the same in every layout."""

from pathlib import Path

import pytest
import torch

from fugaku_megatron.checkpoint.manifest import read_manifest
from fugaku_megatron.cli.parser import Parser
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.run_config import saved_run
from fugaku_megatron.costs.mixers import cache_bytes
from fugaku_megatron.inference import generate, generation, loading
from fugaku_megatron.inference.generation import Decoder, Sampling
from fugaku_megatron.inference.loading import load_model
from fugaku_megatron.nn.forward_context import Pass
from fugaku_megatron.nn.parameter import scales_of
from fugaku_megatron.tokenizers.byte_level_bpe import gpt2_files
from tests.checks.generation import (
    NEW,
    TEXT,
    TEXTS,
    WIDE,
    our_tokens,
    random_model,
    save_trained,
    their_model,
    tokens_of,
    write_tokenizer,
)
from tests.llama_models import DELTA_HEADS, FAMILIES, LATENT, copy_to, theirs
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a checkpoint directory with TEXT learned by heart, and tokenizer flags."""
    directory = tmp_path_factory.mktemp("generate")
    flags = write_tokenizer(directory)
    save_trained(SoloComm(), directory / "checkpoint", 80)
    return directory / "checkpoint", flags


@pytest.fixture
def write(trained, capsys):
    """Return a function that runs the command with flags and returns its output."""

    def call(*flags: str, world=None) -> str:
        parser = Parser()
        generate.add_arguments(parser)
        options = parser.parse_args(["--load", str(trained[0]), *trained[1], *flags])
        generate.continue_prompts(generate.Request.of(options), world or SoloComm())
        return capsys.readouterr().out

    return call


LEARNED = ("--prompt", "to be or", "--tokens", "16", "--temperature", "0")


def test_it_continues_what_it_has_learned(write):
    text = write(*LEARNED)
    assert text == "--- iteration 80, prompt in brackets ---\n[to be or] not to be, to b\n"
    for name in ("bf16", "q8"):
        assert write(*LEARNED, "--weights-format", name) == text
    assert "[\ufffd]" in write("--prompt", "\udcff", "--tokens", "1"), "a prompt that is not UTF-8"


def test_memory_has_huge_pages_before_weights_are_loaded(monkeypatch):
    called = []
    monkeypatch.setattr(generate.allocator, "tune", called.append)
    monkeypatch.setattr(generate, "run_or_abort", lambda job: called.append("load"))
    parser = Parser()
    generate.add_arguments(parser)
    generate.main(parser.parse_args(["--load", "checkpoint", "--prompt", "a"]))
    assert called == ["tuned", "load"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--prompt", "a", "--prompt", TEXT, "--tokens", "5"],
            "prompt 2 has 20 tokens and --max-new-tokens is 5, 25 positions in all, .* learned 24 ",
        ),
        (["--prompt", ""], "a prompt is empty"),
        ([], "nothing to continue: pass --prompt TEXT"),
        (["--prompt", "a", "--load", "."], "--load . holds no checkpoint"),
        (
            ["--prompt", "a", "--load", "hf"],
            "--load hf holds a model of Hugging Face .* --from-hf hf",
        ),
        (
            ["--prompt", "a", "--load", "Qwen/Qwen3-0.6B"],
            "no such directory; nothing is downloaded",
        ),
        (["--prompt", "a", "--ckpt-step", "7"], "iter_0000007"),
        (["--prompt", "a", "--foo"], "unknown flag --foo"),
        (["--prompt", "a", "--interactive"], "--interactive asks for prompts"),
        (["--prompts", "absent"], "No such file"),
        (["--prompts", "none"], "--prompts none.*has no prompt"),
        (["--prompts", "a.json"], "--prompts a.json.*not a JSON list of texts"),
        (["--prompts", "b.json"], "not a JSON list of texts"),
        (["--prompts", "c.json"], "Expecting value"),
        (["--prompts", "d"], "not UTF-8 text"),
        *(
            (["--prompt", "a", flag, wrong], f"{flag} is {wrong}: pass")
            for flag, wrong in (
                ("--max-new-tokens", "-1"),
                ("--temperature", "nan"),
                ("--temperature", "1e-45"),
                ("--top-k", "-1"),
                ("--top-p", "1.5"),
                ("--seed", "-1"),
                ("--seed", str(2**70)),
            )
        ),
    ],
)
def test_mistakes(write, tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    for name, content in (
        ("none", b""),
        ("a.json", b"{}"),
        ("b.json", b"[1]"),
        ("c.json", b"["),
        ("d", b"\xff"),
    ):
        Path(name).write_bytes(content)
    Path("hf").mkdir()
    Path("hf/config.json").write_text("{}")
    with pytest.raises(ValueError, match=message):
        write(*flags)


def test_ranks_and_vocabularies_that_do_not_fit(write):
    with pytest.raises(
        ValueError, match="1 x 1 x 1 = 1, but 2 ranks were started: .* or start it without mpiexec$"
    ):
        write("--prompt", "a", world=SoloComm(0, 2))
    with pytest.raises(
        ValueError, match="--pipeline-model-parallel-size 1 = 4, but 2 ranks were started: start 4"
    ):
        write("--prompt", "a", "--tensor-model-parallel-size", "4", world=SoloComm(0, 2))
    vocab, merges = map(str, gpt2_files())
    with pytest.raises(
        ValueError,
        match=f"--vocab-file {vocab} has 50257 tokens, the model of --load .*: pass the files",
    ):
        write("--prompt", "a", "--vocab-file", vocab, "--merge-file", merges)


def test_sampled_texts_do_not_depend_on_the_layout(trained):
    manifest = read_manifest(trained[0], 80)
    sampled = Sampling(temperature=3.0, top_k=100, top_p=0.9, seed=3)

    def continued(world, *sizes: int) -> list[list[int]]:
        loaded = load_model(saved_run(manifest, sizes), world, str(trained[0]), 80, manifest)
        prompts = [list(b"to be"), list(b"or not to"), list(b"q")]
        return tokens_of(loaded, prompts, 12, sampled)

    alone = continued(SoloComm(), 1, 1)
    assert list(map(len, alone)) == [12] * 3
    for tp, pp in ((2, 1), (1, 2), (2, 2)):
        assert ThreadWorld(tp * pp).run(continued, tp, pp) == [alone for _ in range(tp * pp)]


def test_a_batch(write, tmp_path):
    flags = ["--tokens", "14", "--temperature", "0", "--stop", "or", "--stop", "zz"]
    (tmp_path / "lines").write_text("to be or\n\n, t\n")
    (tmp_path / "list.json").write_text('["to be or", ", t"]')
    answers = [
        write(*flags, *prompts).splitlines()[1:]
        for prompts in (
            ["--prompt", "to be or", "--prompt", ", t"],
            ["--prompts", str(tmp_path / "lines")],
            ["--prompts", str(tmp_path / "list.json")],
        )
    ]
    assert answers == [["[to be or] not to be, to", "[, t]o be "]] * 3


def test_what_a_rank_would_hold(write, trained):
    flags = ["--prompt", "to be", "--prompt", "q", "--tokens", "7", "--dry-run"]
    printed = write(
        *flags, "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"
    )
    cache = (
        2 * 1 * 2 * 12 * 32 // 2 * 4
    )  # keys and values, layers, samples, positions, half of the width, bytes
    assert f"{cache / 2**20:.1f} MiB of cache: 1 layers, 2 samples, 12 positions\n" in printed
    manifest = read_manifest(trained[0], 80)
    loaded = load_model(saved_run(manifest, (1, 1)), SoloComm(), str(trained[0]), 80, manifest)
    weights = sum(p.nbytes for p in loaded.stage.parameters())
    assert f"holds at most {weights / 2**20:.1f} MiB of weights" in write(*flags)
    in_q8 = load_model(saved_run(manifest, (1, 1)), SoloComm(), str(trained[0]), 80, manifest, True)
    weights = sum(p.nbytes for p in in_q8.stage.parameters())
    scales = map(scales_of, in_q8.stage.parameters())
    weights += sum(found.nbytes for found in scales if found is not None)
    printed = write(*flags, "--weights-format", "q8")
    assert f"holds at most {weights / 2**20:.1f} MiB of weights" in printed
    assert "parameters in fp32 and q8," in printed
    assert "parameters in bf16," in write(*flags, "--weights-format", "bf16")
    decoder = Decoder(loaded, [12, 8])
    kept = sum(each.nbytes for cache in decoder.cache.values() for each in vars(cache).values())
    kinds = loaded.run.model.layer_kinds
    assert kept == cache_bytes(loaded.run, 2, 12, kinds)


def test_layers_are_quantized_as_they_are_loaded(trained, monkeypatch):
    """At any time one layer has its weights in the format of the checkpoint."""
    stages = []
    counts = []
    load = loading.load_weights
    empty = loading._empty_model

    def captured(*args):
        loaded = empty(*args)
        stages.append(loaded.stage)
        return loaded

    def counted(*args):
        load(*args)
        weights = [layer.mlp.linear_fc1.weight for layer in stages[-1].layers]
        counts.append(sum(not w.is_meta and scales_of(w) is None for w in weights))

    monkeypatch.setattr(loading, "_empty_model", captured)
    monkeypatch.setattr(loading, "load_weights", counted)
    manifest = read_manifest(trained[0], 80)
    run = saved_run(manifest, (1, 1))
    load_model(run, SoloComm(), str(trained[0]), 80, manifest, True)
    assert counts == [*(1 for _ in run.model.layer_kinds), 0]


SHORT = [
    [5],
    [3, 80, 21, 7, 7, 64, 90, 12, 33],
    [17, 2],
    [9, 8, 7, 6, 5, 4],
]  # of a vocabulary of 96


def their_tokens(weights: dict[str, torch.Tensor]) -> list[list[int]]:
    """Greedy continuations of TEXTS by transformers, one prompt at a time."""
    theirs = their_model(weights)
    flags = {
        "do_sample": False,
        "max_new_tokens": NEW,
        "min_new_tokens": NEW,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return [
        theirs.generate(torch.tensor([prompt]), **flags)[0, len(prompt) :].tolist()
        for prompt in TEXTS
    ]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(directory of a checkpoint, transformers' continuations with its weights)."""
    directory = tmp_path_factory.mktemp("wide")
    return directory, their_tokens(save_trained(SoloComm(), directory, 3, **WIDE))


def family_tokens(world, family: str, tp: int, pp: int, count: int) -> list[list[int]]:
    return tokens_of(random_model(world, family, tp, pp), SHORT, count)


def likeliest(family: str, ids: list[list[int]]) -> list[list[int]]:
    """Return transformers' likeliest token after each prefix of SHORT with `ids`, in one forward per sequence."""
    pytest.importorskip("transformers")
    model = theirs(family)
    trained = random_model(SoloComm(), family, 1, 1)
    copy_to(model, {p.spec.name: p.data for p in trained.stage.parameters()}, family)
    with torch.no_grad():
        return [
            model(torch.tensor([prompt + own])).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
            for prompt, own in zip(SHORT, ids, strict=True)
        ]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_of_families_that_people_train(family):
    """Each token is the likeliest for transformers after those before it, so the text is the one that it would write."""
    ids = family_tokens(SoloComm(), family, 1, 1, NEW)
    assert ids == likeliest(family, ids) and len({tuple(own) for own in ids}) == len(SHORT)
    tp, pp = (1, 2) if family == "mistral" else (2, 1)
    assert (
        ThreadWorld(2).run(lambda world: family_tokens(world, family, tp, pp, 50))
        == [[own[:50] for own in ids]] * 2
    )


DELTA_NETS = {
    "layer_types": "G-,*-,G-,-",
    "num_layers": 4,
    "position_embedding_type": "rope",
    "attention_output_gate": True,
    **DELTA_HEADS,
}


def test_ranks_and_a_state_that_does_not_grow():
    """Gated delta nets write the same texts on tensor- and pipeline-parallel ranks, with states of one size."""
    model = random_model(SoloComm(), "gpt", 1, 1, **DELTA_NETS)
    expected = tokens_of(model, SHORT, 8)
    for tp, pp in ((2, 1), (1, 2)):
        found = ThreadWorld(2).run(
            lambda world, tp=tp, pp=pp: tokens_of(
                random_model(world, "gpt", tp, pp, **DELTA_NETS), SHORT, 8
            )
        )
        assert found == [expected, expected]
    sizes = [
        sum(tensor.nbytes for tensor in vars(generation.Decoder(model, [length]).cache[1]).values())
        for length in (16, 4096)
    ]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"squared_relu": True},
        {"qk_layernorm": True},
        {"normalization": "PlainLayerNorm"},
        {"parallel_residual": True, "position_embedding_type": "rope", "rotary_percent": 0.5},
        {
            "num_experts": 6,
            "swiglu": True,
            "disable_bias_linear": True,
            "moe_shared_expert_intermediate_size": 24,
            "moe_layer_freq": "2",
            "moe_expert_capacity_factor": 9.0,
        },
        {"layer_types": "-,*,*-,-", "num_layers": 4, "position_embedding_type": "rope"},
        DELTA_NETS,
        LATENT,
        {
            "normalization": "RMSNorm",
            "apply_layernorm_1p": True,
            "geglu": True,
            "position_embedding_type": "rope",
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.5,
            "logits_scaling": 2.0,
            "disable_bias_linear": True,
        },
    ],
    ids=str,
)
def test_tokens_with_kept_keys_are_those_of_whole_sequences(changes):
    """Each token is the likeliest after one forward over all tokens before it, for models that torch computes in part."""
    model = random_model(SoloComm(), "gpt", 1, 1, **changes)
    ids = tokens_of(model, SHORT, 6)
    chunk = model.stage.last
    at = Pass(first_sample=0, training=False)
    for prompt, own in zip(SHORT, ids, strict=True):
        tokens = torch.tensor(prompt + own)[:, None]  # (s, 1)
        with torch.no_grad():
            logits = chunk.logits(chunk.decode(chunk.embedding(tokens, at), at))
        assert logits[len(prompt) - 1 : -1, 0].argmax(-1).tolist() == own


def test_finished_samples_are_computed_no_further(pair, monkeypatch):
    directory, expected = pair
    rows = []
    forward = generation.Decoder._forward
    monkeypatch.setattr(
        generation.Decoder,
        "_forward",
        lambda self, samples, *new: rows.append(len(samples)) or forward(self, samples, *new),
    )
    ids = our_tokens(SoloComm(), directory, (1, 1), ends={0: 5, 2: 1, 1: 3, 3: 7})
    assert ids == [expected[0][:5], expected[1][:3], expected[2][:1], expected[3][:7]]
    assert rows == [4, 3, 3, 2, 2, 1, 1]


def test_prompts_that_do_not_fit_into_one_forward(pair, monkeypatch):
    directory, expected = pair
    monkeypatch.setattr(generation, "PREFILL_ROWS", 14)
    assert our_tokens(SoloComm(), directory, (1, 1), ends=dict.fromkeys(range(4), 9)) == [
        ids[:9] for ids in expected
    ]
