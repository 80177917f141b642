"""The evaluate command against transformers with the same weights, on one rank and on several, and its mistakes."""

import json
import math
from pathlib import Path

import pytest
import torch

from fugaku_megatron.cli.parser import Parser
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.data.chat.chat_dataset import ChatDataset
from fugaku_megatron.data.chat.chat_files import ChatFiles, unsigned
from fugaku_megatron.data.chat.chat_template import ChatTemplate
from fugaku_megatron.data.chat.chats import Chat
from fugaku_megatron.data.dataset import DatasetConfig
from fugaku_megatron.data.indexed import IndexedDatasetWriter
from fugaku_megatron.inference import evaluate, generate, scoring
from fugaku_megatron.tokenizers.hugging_face import HuggingFaceTokenizer
from fugaku_megatron.tokenizers.tokenizer import NullTokenizer
from tests.checks import chats as chat_checks
from tests.checks.evaluation import LENGTH, PROSE, result, their_likelihoods
from tests.checks.generation import LEARNS, WIDE, save_trained, their_model, write_tokenizer
from tests.helpers import build_trainer, one_error, small_run
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(folder with a checkpoint and a text, flags, transformers' model with the same weights)."""
    folder = tmp_path_factory.mktemp("evaluate")
    flags = ["--load", str(folder / "saved"), *write_tokenizer(folder)]
    theirs = their_model(save_trained(SoloComm(), folder / "saved", 3, **WIDE))
    (folder / "text.txt").write_text(PROSE, encoding="utf-8")
    return folder, flags, theirs


@pytest.mark.parametrize(("ranks", "sizes"), [(1, (1, 1)), (2, (1, 2)), (4, (2, 1))])
def test_perplexity_is_that_of_transformers(models, ranks, sizes):
    folder, flags, theirs = models
    ids = list(PROSE.encode())
    count = (len(ids) - 1) // LENGTH
    total = sum(
        float(their_likelihoods(theirs, ids[i * LENGTH : (i + 1) * LENGTH + 1]).sum())
        for i in range(count)
    )
    words = [
        *flags,
        *(
            f"--text {folder}/text.txt --micro-batch-size 2 "
            f"--tensor-model-parallel-size {sizes[0]} "
            f"--pipeline-model-parallel-size {sizes[1]}"
        ).split(),
    ]
    found = ThreadWorld(ranks).run(lambda world: result(words, world=world))
    assert all(one == found[0] for one in found)
    (first, *_) = found
    tokens = count * LENGTH
    assert (
        first["perplexity"] == pytest.approx(math.exp(-total / tokens), rel=1e-6)
        and first["tokens"] == first["bytes"] == tokens
    )
    assert first["perplexity_per_byte"] == first["perplexity"] and first["windows"] == count
    assert first["left_out"] == len(ids) - 1 - tokens > 0 == first["after_max_windows"]
    assert first["bits_per_byte"] == pytest.approx(-total / tokens / math.log(2))


def test_formats_of_the_weights(models):
    """Eight bits change the perplexity by less than a per cent, and no more than BF16's rounding allows."""
    folder, flags, _ = models
    words = [*flags, "--text", f"{folder}/text.txt", "--weights-format"]
    found = {name: result([*words, name])["perplexity"] for name in ("fp32", "bf16", "q8")}
    assert found["fp32"] == result(words[:-1])["perplexity"]
    for name in ("bf16", "q8"):
        assert found[name] != found["fp32"]
        assert found[name] == pytest.approx(found["fp32"], rel=0.01)


def test_a_stride_scores_every_token_once_with_more_before_it(models):
    folder, flags, theirs = models
    ids = list(PROSE.encode())
    starts = range(0, len(ids) - 20, 8)
    total = sum(
        float(their_likelihoods(theirs, ids[start : start + 21])[-8 if start else -20 :].sum())
        for start in starts
    )
    tokens = 20 + 8 * (len(starts) - 1)
    found = result(flags, *f"--text {folder}/text.txt --seq-length 20 --stride 8".split())
    assert found["perplexity"] == pytest.approx(math.exp(-total / tokens), rel=1e-6)
    assert (found["tokens"], found["windows"]) == (tokens, len(starts))


def test_a_file_and_lines_of_the_result(models, tmp_path, capsys):
    folder, flags, _ = models
    found = result(
        flags,
        *f"--input {folder}/text.txt --json {tmp_path}/r.json --max-windows 2".split(),
    )
    assert (
        json.loads((tmp_path / "r.json").read_text()) == found
        and found["windows"] == 2
        and found["iteration"] == 3
    )
    assert capsys.readouterr().out.splitlines() == [
        f"perplexity {found['perplexity']:.4f} per token, 48 tokens, {found['perplexity']:.4f} per byte "
        f"({found['bits_per_byte']:.4f} bits), 48 bytes",
        f"2 windows of 24 tokens, one every 24; --max-windows left out {4 * 24} tokens, and the last {found['left_out']} of the "
        "text fill no window",
    ]
    assert (
        found["after_max_windows"] == 4 * 24
        and found["left_out"] == len(PROSE.encode()) - 1 - 6 * 24 > 0
    )
    result(flags, "--text", str(folder / "text.txt"))
    assert capsys.readouterr().out.splitlines()[1:] == [
        f"6 windows of 24 tokens, one every 24; the last {found['left_out']} tokens of the text fill no window"
    ]


def test_a_data_set(models, tmp_path):
    folder, flags, _ = models
    with IndexedDatasetWriter(tmp_path / "d", "uint16") as writer:
        writer.add_document(list(PROSE.encode())[:60])
        writer.add_document(list(PROSE.encode())[60:])
    found = result(flags, "--data-path", str(tmp_path / "d"))
    assert found["perplexity"] == result(flags, "--text", str(folder / "text.txt"))["perplexity"]


def test_logits_are_computed_for_some_rows_at_a_time_and_progress_is_told(
    models, monkeypatch, capsys
):
    folder, flags, _ = models
    expected = result(flags, "--text", str(folder / "text.txt"))
    rows = []
    gather = scoring.gather_from_tensor_parallel
    monkeypatch.setattr(scoring, "LOGITS_BYTES", 257 * 4 * 10)
    monkeypatch.setattr(
        scoring,
        "gather_from_tensor_parallel",
        lambda x, comm: rows.append(len(x)) or gather(x, comm),
    )
    monkeypatch.setattr(scoring, "PROGRESS_SECONDS", 0.0)
    found = result(flags, *f"--text {folder}/text.txt --micro-batch-size 3".split())
    assert max(rows) == 10 and sum(rows) == found["tokens"]
    assert found["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-6)
    lines = capsys.readouterr().err.splitlines()
    assert (
        len(lines) == 2
        and lines[0].startswith("3 of 6 windows, ")
        and lines[1] == "6 of 6 windows, 0 s left"
    )


def test_pairs_of_context_and_continuation():
    tokenizer = NullTokenizer(100)
    assert scoring.encode_pair(tokenizer, "1 2 ", "3 4", 10) == scoring.Request([1, 2, 3, 4], 2)
    assert scoring.encode_pair(tokenizer, "", "3 4", 10) == scoring.Request([99, 3, 4], 2)
    assert scoring.encode_pair(tokenizer, "1 2 ", "3 4", 2) == scoring.Request([2, 3, 4], 2)
    for continuation, message in (
        ("", "'' has no tokens of its own"),
        (" 1 2 3", "' 1 2 3' has 3 tokens, and"),
    ):
        with pytest.raises(ValueError, match=message):
            scoring.encode_pair(tokenizer, "1", continuation, 2)
    tokenizer.eod = None
    with pytest.raises(ValueError, match="NullTokenizer has no token that begins or ends a text"):
        scoring.encode_pair(tokenizer, "", "1", 2)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("", "nothing to evaluate: pass --input"),
        ("--text a --data-path b", "--input and --data-path exclude each other"),
        (
            "--text short.txt",
            r"--input short.txt has 5 tokens, and a window needs 24 and the one that follows: pass a longer",
        ),
        ("--input absent", "--input absent: cannot be read"),
        ("--text t --stride 25", "--stride is 25, more than the 24"),
        ("--text t --stride 0", "--stride is 0: pass a number above 0"),
        (
            "--text t --json no/where.json",
            "--json no/where.json: .*no is not a directory",
        ),
        (
            "--text t --seq-length 225",
            "--seq-length is 225, and the model of --load .* has 224 positions",
        ),
    ],
)
def test_mistakes(models, tmp_path, monkeypatch, more, message):
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("short")
    with pytest.raises(ValueError, match=message) as refused:
        result(models[1], *more.split())
    assert "\n" not in str(refused.value)


def test_a_number_of_ranks_that_does_not_fit(models):
    words = [*models[1], *"--text t --tensor-model-parallel-size 2".split()]
    assert "2 x 1 takes a multiple of 2 ranks, and 3 were started" in one_error(
        3, lambda world: result(words, world=world)
    )


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """(folder with a checkpoint and the tokenizer of chats that came with it, flags)."""
    folder = tmp_path_factory.mktemp("chats")
    save_trained(SoloComm(), folder / "saved", 2, vocab_size=300, max_position_embeddings=64)
    chat_checks.write_tokenizer(folder / "saved" / "hugging_face")
    return folder, ["--load", str(folder / "saved")]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_loss_of_chats_is_that_of_the_assistants_tokens(chat_model, ranks):
    folder, flags = chat_model
    talks = [
        chat_checks.TALK,
        chat_checks.TALK[:2],
        [chat_checks.user("x" * 30), *chat_checks.TALK[1:2]],
    ]
    for name, part in (("a", talks), ("b", talks[:1])):
        chat_checks.write_lines(folder / f"{name}.jsonl", *({"messages": talk} for talk in part))
    words = [
        *flags,
        *(
            f"--chats {folder}/a.jsonl {folder}/b.jsonl --micro-batch-size 2 "
            f"--pipeline-model-parallel-size {ranks}"
        ).split(),
    ]
    a, b = ThreadWorld(ranks).run(lambda world: result(words, world=world))[0]["chats"]
    template = ChatTemplate(HuggingFaceTokenizer(folder / "saved" / "hugging_face"))
    loaded = loading_of(flags)
    for found, part in ((a, talks), (b, talks[:1])):
        requests = []
        for talk in part:
            ids, trained = unsigned(template.encode(Chat(talk)))
            requests += [
                scoring.Request(ids[: i + 1], 1)
                for i in range(1, min(len(ids), LENGTH + 1))
                if trained[i]
            ]
        scores = scoring.score(loaded, requests, 1)
        assert found["tokens"] == len(requests) and found["loss"] == pytest.approx(
            -float(scores[:, 0].mean()), rel=1e-6
        )
        assert found["accuracy"] == float(scores[:, 1].mean())
    assert (a["cut"], a["left_out"], a["chats"], b["cut"]) == (2, 1, 2, 1)
    assert "; 2 chats are longer than a window and were cut, 1 of them" in evaluate.chat_line(a)


@pytest.mark.parametrize("tp, pp", [(1, 1), (2, 2)])
def test_the_loss_of_training_on_packed_chats_is_that_of_each_chat_alone(tmp_path, tp, pp):
    """Losses over the whole set are equal, in samples with several chats and padding."""
    folder = tmp_path / "saved"
    prefix = str(tmp_path / "chats")
    talks = [
        [chat_checks.user("q" * (i % 5)), chat_checks.assistant("a" * (1 + i % 3))]
        for i in range(9)
    ]
    chat_checks.write_lines(tmp_path / "chats.jsonl", *({"messages": talk} for talk in talks))
    tokenizer = chat_checks.write_tokenizer(tmp_path / "tokenizer")
    assert chat_checks.preprocess(tokenizer, tmp_path / "chats.jsonl", prefix) == 0
    run = small_run(
        **{
            **LEARNS,
            "vocab_size": 300,
            "mask_vocab_padding": "yes",
            "seq_length": 64,
            "micro_batch_size": 1,
            "global_batch_size": 1,
            "sft": True,
            "mock_data": False,
            "data_path": (prefix,),
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
        }
    )

    def trained(world):
        torch.set_num_threads(1)
        data = ChatDataset(ChatFiles(prefix), "train", range(9), None, DatasetConfig(64, 1))
        trainer = build_trainer(run, world, data, data)
        for _ in range(2):
            trainer.train_step()
        loss = trainer.evaluate(data, 0, len(data))
        trainer.close()
        trainer.save(str(folder))
        return len(data), loss

    (samples, loss), *_ = ThreadWorld(tp * pp).run(trained)
    words = (
        f"--load {folder} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {tokenizer}"
    ).split()
    (alone,) = result([*words, "--chats", str(tmp_path / "chats.jsonl")])["chats"]
    assert 1 < samples < 9 and loss == pytest.approx(alone["loss"], rel=1e-6)


def loading_of(flags: list[str]):
    """The model, on one rank."""
    parser = Parser()
    evaluate.add_arguments(parser)
    source = evaluate.Source.of(parser.parse_args(flags))
    iteration, manifest = source.manifest(SoloComm())
    run = source.run(manifest, (1, 1))
    return evaluate.load_model(run, SoloComm(), source.load, iteration, manifest)


def test_generate_renders_chats(chat_model, capsys, tmp_path):
    folder, flags = chat_model

    def write(*words: str) -> str:
        parser = Parser()
        generate.add_arguments(parser)
        generate.continue_prompts(
            generate.Request.of(parser.parse_args([*flags, "--tokens", "3", *words])), SoloComm()
        )
        return capsys.readouterr().out.split("---\n", 1)[1]

    answer = "<|im_start|>assistant\n"
    begin = f"<|im_start|>user\none?<|im_end|>\n{answer}"
    assert write(*"--chat --prompt one? --system s".split()).startswith(
        f"[<|im_start|>system\ns<|im_end|>\n{begin}]"
    )
    assert write(*"--chat --prompt one? --temperature 0".split()) == write(
        "--prompt", begin, "--temperature", "0"
    )
    (tmp_path / "p.json").write_text(json.dumps(["one?", chat_checks.TALK[:3]]))
    shown = write("--chat", "--prompts", str(tmp_path / "p.json"))
    assert (
        f"[{begin}]" in shown
        and f"two <|im_end|>\n<|im_start|>user\nand?<|im_end|>\n{answer}]" in shown
    )
    for words, message in (
        (("--prompts", str(tmp_path / "p.json")), "not a JSON list of texts: "),
        (("--prompt", "a", "--system", "s"), "--system goes with --chat: pass both"),
        (
            ("--chat", "--prompt", "a", "--chat-template", "none"),
            "--chat-template none: cannot be read",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            write(*words)
