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
from fugaku_megatron.inference.loading import LoadedModel
from fugaku_megatron.inference.needles import needle_figures, read_needles
from fugaku_megatron.tokenizers.hugging_face_tokenizer import HuggingFaceTokenizer
from fugaku_megatron.tokenizers.null_tokenizer import NullTokenizer
from tests.checks import chats as chat_checks
from tests.checks.evaluation import LENGTH, PROSE, QUESTIONS, result, their_likelihoods
from tests.checks.generation import LEARNS, WIDE, save_trained, their_model, write_tokenizer
from tests.helpers import build_trainer, one_error, small_run
from tests.threads import ThreadWorld


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(folder with a checkpoint, texts and questions, flags, transformers' model with the same weights)."""
    folder = tmp_path_factory.mktemp("evaluate")
    flags = ["--load", str(folder / "saved"), *write_tokenizer(folder)]
    theirs = their_model(save_trained(SoloComm(), folder / "saved", 3, **WIDE))
    (folder / "text.txt").write_text(PROSE, encoding="utf-8")
    (folder / "questions.json").write_text(json.dumps(QUESTIONS))
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
            f"--choices {folder}/questions.json --tensor-model-parallel-size {sizes[0]} "
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
    assert (
        first["left_out"] == len(ids) - 1 - tokens > 0 == first["after_max_windows"]
        and first["without_context"] == 1
    )
    assert first["bits_per_byte"] == pytest.approx(-total / tokens / math.log(2))
    right = by_length = 0
    for question in QUESTIONS:
        own = []
        for choice in question["choices"]:
            scored = len(choice) + len(question["context"]) - len(question["context"].rstrip())
            first_token = [] if question["context"] else [256]
            text = list((question["context"] + choice).encode())
            whole = first_token + text[-LENGTH - 1 :]
            own.append(float(their_likelihoods(theirs, whole)[-scored:].sum()))
        scaled = [likelihood / len(choice) for likelihood, choice in zip(own, question["choices"])]
        right += own.index(max(own)) == question["answer"]
        by_length += scaled.index(max(scaled)) == question["answer"]
    assert (first["accuracy"], first["accuracy_norm"]) == (right / 3, by_length / 3)


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
    whole = result(flags, *f"--text {folder}/text.txt --choices {folder}/questions.json".split())
    assert (
        whole["windows"] == 6
        and whole["without_context"] == 1
        and capsys.readouterr().out.splitlines()[1:]
        == [
            f"6 windows of 24 tokens, one every 24; the last {found['left_out']} tokens of the text fill no window",
            f"accuracy {whole['accuracy']:.4f}, by length {whole['accuracy_norm']:.4f}, 3 questions",
            "questions without a context: 1, whose choices are scored after the token that begins or ends a text",
        ]
    )


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


def copied(tokens: list[int], window: int) -> list[int]:
    """Return a copying model's next tokens: the token that followed the same 9 tokens at most `window` ago."""
    said = []
    for end in range(1, len(tokens) + 1):
        first = max(0, end - window)
        starts = [
            i
            for i in range(first, end - 9)
            if end > 9 and tokens[i : i + 9] == tokens[end - 9 : end]
        ]
        said.append(tokens[starts[-1] + 9] if starts else 0)
    return said


def needles_of(flags: list[str], file: Path, length: tuple[int, ...], depths: tuple[int, ...]):
    """(the model on one rank, its tokenizer, two prompts of each length and depth)."""
    parser = Parser()
    evaluate.add_arguments(parser)
    source = evaluate.Source.of(parser.parse_args(flags))
    loaded = loading_of(flags)
    tokenizer = source.open_tokenizer(source.manifest(SoloComm())[1])
    return (
        loaded,
        tokenizer,
        read_needles(str(file), tokenizer, loaded.run.model, LENGTH, length, depths, 2),
    )


@pytest.mark.parametrize("window", [1000, 100])
def test_a_model_that_copies_finds_the_needles_that_it_sees(models, monkeypatch, window):
    """With forced logits. A needle outside the window is not found."""
    folder, flags, _ = models
    loaded, tokenizer, needles = needles_of(flags, folder / "text.txt", (220,), (0, 50, 100))

    def forced(loaded, tokens, forward_pass):
        said = torch.tensor([copied(column, window) for column in tokens.t().tolist()]).t()
        return torch.nn.functional.one_hot(said, 257).float()

    monkeypatch.setattr(scoring, "through_stages", forced)
    monkeypatch.setattr(LoadedModel, "logits", lambda self, x: x)
    figures = needle_figures(needles, scoring.score(loaded, needles.requests, 4))
    assert figures["exact"] == ([[1, 1, 1]] if window == 1000 else [[0, 0, 1]])
    assert figures["likelier"][0][2] == 1 and (figures["likelier"][0][0] == 1) == (window == 1000)
    for number, request in enumerate(needles.requests):
        text = tokenizer.decode(request.tokens.tolist())
        assert (
            len(request.tokens) == 221
            and text.count("The secret number of") == 2
            and text[-6:].isdecimal()
        )
        assert text.count(f"is{text[-7:]}") == 2
        place = text.index("\nThe secret")
        end = text.index(".\n") + 2
        after = text.rindex("\nThe secret") - end
        assert (place == 0, abs(place - after) < 6, after == 0) == tuple(
            number // 2 == depth for depth in range(3)
        )


@pytest.mark.parametrize(("ranks", "sizes"), [(1, (1, 1)), (4, (2, 2)), (2, (1, 1))])
def test_needles_are_scored_as_transformers_does(models, tmp_path, capsys, ranks, sizes):
    folder, flags, theirs = models
    words = [
        *flags,
        *(
            f"--needle {folder}/text.txt --needle-lengths 100 200 --needle-depths 0 90 "
            f"--needle-samples 2 --tensor-model-parallel-size {sizes[0]} "
            f"--pipeline-model-parallel-size {sizes[1]}"
        ).split(),
    ]
    found = ThreadWorld(ranks).run(lambda world: result(words, world=world))[0]["needle"]
    _, _, needles = needles_of(flags, folder / "text.txt", (100, 200), (0, 90))
    loss = []
    likelier = []
    for request in needles.requests:
        with torch.no_grad():
            logits = theirs(torch.tensor(request.tokens[None, :-1].astype("int64"))).logits[0, -7:]
        answer = request.tokens[-7:].tolist()
        loss.append(-float(torch.log_softmax(logits.double(), 1)[range(7), answer].mean()))
        wins = [
            all(row[token] > row[other] for other in others if other >= 0)
            for row, token, others in zip(logits, answer, request.others.tolist())
        ]
        assert wins[0] and max(request.others[0]) < 0, (
            "the space before a number is the same for all"
        )
        likelier.append(sum(wins[1:]) / 6)
    for name, own in (("loss", loss), ("likelier", likelier)):
        pairs = [(own[i] + own[i + 1]) / 2 for i in range(0, 8, 2)]
        assert sum(found[name], []) == pytest.approx(pairs, rel=1e-5)
    table = capsys.readouterr().out.splitlines()
    assert table[0].startswith("needle: share of 2 greedy answers") and table[1].split("|")[
        1:3
    ] == [" tokens ", "   depth 0 % "]


def test_a_picture_of_the_needles(models, tmp_path):
    folder, flags, _ = models
    pytest.importorskip("matplotlib")
    result(
        flags,
        *(
            f"--needle {folder}/text.txt --needle-lengths 90 --needle-depths 0 100 "
            f"--needle-samples 1 --png {tmp_path}/n.png"
        ).split(),
    )
    assert (tmp_path / "n.png").read_bytes()[:4] == b"\x89PNG"


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
        (
            "--text t --needle-lengths 9",
            "--needle-lengths goes with --needle FILE: pass both",
        ),
        ("--text t --png x.png", "--png goes with --needle FILE: pass both"),
        (
            "--needle short.txt --needle-depths 101",
            "--needle-depths is 101: pass a number from 0 to 100",
        ),
        (
            "--needle short.txt --needle-samples 0",
            "--needle-samples is 0: pass a number from 1 to",
        ),
        (
            "--needle short.txt --needle-lengths 60",
            "--needle-lengths has 60, and the sentence and its beginning have 7",
        ),
        (
            "--needle short.txt --needle-lengths 225",
            "--needle-lengths has 225, and the model learned 224 positions: pass",
        ),
        ("--choices none.json", "--choices none.json: not JSON"),
        ("--choices empty.json", "empty.json: expected a list"),
        (
            "--choices answer.json",
            "answer.json: question 0: answer is 2: pass the number of a choice, 0 to 1",
        ),
        ("--choices fields.json", 'fields.json: question 1: expected ."context"'),
        (
            "--choices long.json",
            "long.json: question 0: continuation 'bbb.*' has 25 tokens, and the model takes 24",
        ),
    ],
)
def test_mistakes(models, tmp_path, monkeypatch, more, message):
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("short")
    good = {"context": "a", "choices": ["b", "c"], "answer": 0}
    for name, text in (
        ("none", "{"),
        ("empty", "[]"),
        ("answer", json.dumps([{**good, "answer": 2}])),
        ("fields", json.dumps([good, {**good, "choices": ["a"]}])),
        ("long", json.dumps([{**good, "choices": ["b" * 25, "c"]}])),
    ):
        Path(f"{name}.json").write_text(text)
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
