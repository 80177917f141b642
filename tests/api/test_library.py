"""The library `import fugaku_megatron as fm` in one process.

Left out: several ranks (tests/api/test_ranks.py), the examples (tests/docs/test_docs_commands.py).
"""

import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import fugaku_megatron as fm
from fugaku_megatron.api import trainer as process
from fugaku_megatron.checkpoint.manifest import list_iterations
from fugaku_megatron.cli.arguments import build_parser, parse
from fugaku_megatron.cli.parser import Parser
from fugaku_megatron.config.recipes import RECIPES
from fugaku_megatron.data.chat.chat_files import ChatWriter, signed
from fugaku_megatron.inference import evaluate, generate
from tests.checks.generation import TEXT, save_trained, write_tokenizer
from tests.checks.library import FLAGS, documents, write
from tests.checks.tokenizers import write_hugging_face
from tests.threads import ThreadWorld

transformers = pytest.importorskip("transformers")

from tests.hf_models import MODELS, VOCABULARY, randomized, same, tensors  # noqa: E402

pytestmark = pytest.mark.parallel


def python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout


def test_importing_loads_few_modules_and_no_other_package():
    """So it is fast: it takes milliseconds, and torch alone takes seconds."""
    assert set(fm.__all__) <= set(dir(fm)) and all(getattr(fm, name) for name in fm.__all__)
    code = """if True:
        import sys
        before = set(sys.modules)
        import fugaku_megatron as fm
        fm.Config.recipe("124m", lr=1e-4).replace(num_layers=2)
        loaded = set(sys.modules) - before
        print(len(loaded), *{name.split(".")[0] for name in loaded} - sys.stdlib_module_names)"""
    count, *packages = python(code).split()
    assert int(count) < 100 and packages == ["fugaku_megatron"]


def test_a_config_is_the_run_of_the_flags():
    words = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --batch-size 2 --lr 1 "
        "--use-distributed-optimizer"
    )
    config = fm.Config(
        num_layers=np.int64(2),
        hidden_size=32,
        num_attention_heads=4,
        seq_length=16,
        batch_size=2,
        lr=1,
        use_distributed_optimizer=True,
        recompute_activations=False,
    )
    assert config.run == parse(words.split()).run and config == fm.Config.from_flags(words.split())
    assert (config.lr, config.zero_stage, config.micro_batch_size) == (1.0, 1, 2) and type(
        config.lr
    ) is float
    assert fm.Config.recipe("124M").run == RECIPES["124m"]() and hash(config) == hash(
        fm.Config.from_flags(words.split())
    )
    paths = fm.Config.recipe("demo", data_path=Path("a"), save=Path("b"), skip_samples=["1:2"])
    assert (paths.data_path, paths.save, paths.skip_samples) == (("a",), "b", ("1:2",))
    assert eval(repr(paths), {"Config": fm.Config}) == paths


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fm.Config(num_layer=2), "unknown keyword num_layer: did you mean num_layers[?]"),
        (
            lambda: fm.Config(quux=2),
            "unknown keyword quux: fugaku-megatron train --help lists the flags",
        ),
        (
            lambda: fm.Config(num_layers="twelve"),
            "num_layers .--num-layers. is 'twelve': expected int",
        ),
        (lambda: fm.Config(swiglu=1), "swiglu .--swiglu. is 1: expected bool"),
        (
            lambda: fm.Config(use_distributed_optimizer="yes"),
            "use_distributed_optimizer .* is 'yes': expected bool",
        ),
        (
            lambda: fm.Config.from_flags(["--num-layer", "2"]),
            "unknown flag --num-layer: did you mean --num-layers[?]",
        ),
        (lambda: fm.Config.from_flags("--num-layers 2"), "from_flags takes a list of words"),
        (
            lambda: fm.Config.from_flags(["--recipe", "124m", "--dry-run"]),
            "--dry-run and --world-size belong to the command",
        ),
        (
            lambda: fm.Config.from_flags(["--recipe", "124m", "--no-position-embedding"]),
            "--no-position-embedding: it goes with rope",
        ),
        (
            lambda: fm.Config(**{**FLAGS, "kernels": "auto"}, kv_channels=6),
            "--kv-channels is 6, .* multiples of 4",
        ),
    ],
)
def test_mistakes_of_a_config_are_one_line(make, message):
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_every_flag_is_a_keyword():
    from fugaku_megatron.cli.arguments import _OTHER, _keywords

    actions = [a for a in build_parser()._actions if not a.dest.startswith(_OTHER)]
    names = {
        name[2:].replace("-", "_")
        for a in actions
        for name in a.option_strings
        if name.startswith("--")
    }
    missing = {name for name in names - _keywords().keys() if not name.startswith("no_")}
    assert missing == {
        "help",
        "recipe",
        "dry_run",
        "world_size",
        "activations_checkpoint_method",
        "yaml_cfg",
    }


def results(config: fm.Config, data, valid=None, count: int = 6) -> list[float]:
    trainer = fm.Trainer(config, data, valid)
    found = [value for step in trainer.steps(count) for value in (step.loss, step.grad_norm)]
    return found + ([trainer.evaluate()] if valid is not None else [])


class MapStyle(torch.utils.data.Dataset):
    """A data set as torch has it."""

    def __len__(self) -> int:
        return len(documents())

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(documents()[index])


MARKS = {
    "reset_attention_mask": True,
    "reset_position_ids": True,
    "eod_mask_loss": True,
    "tokenizer_type": "NullTokenizer",
}


@pytest.mark.parametrize("marks", [{}, MARKS], ids=["plain", "marked"])
def test_arrays_are_trained_on_as_files_are(tmp_path, marks):
    config = fm.Config(**FLAGS, **marks, train_iters=10)
    arrays = documents()
    files = write(tmp_path / "train", arrays)
    other = write(tmp_path / "valid", documents(1))
    expected = results(config, files, valid=[str(other)])
    assert len(set(expected)) == 13 and results(config, arrays, valid=documents(1)) == expected
    assert results(config, [torch.from_numpy(array) for array in arrays]) == expected[:-1]
    assert (
        results(config, MapStyle())
        == results(config, [array.tolist() for array in arrays])
        == expected[:-1]
    )
    blend = results(config, [0.3, files, 0.7, other])
    assert (
        blend != expected[:-1]
        and results(config.replace(train_data_path=["0.3", files, "0.7", other]), None) == blend
    )
    if marks:
        one = results(config.replace(micro_batch_size=1), [0.3, files, 0.7, other])
        assert one == pytest.approx(blend, rel=1e-5) and blend != results(
            fm.Config(**FLAGS), [0.3, files, 0.7, other]
        )


@pytest.mark.parametrize("marks", [{}, MARKS], ids=["plain", "marked"])
def test_a_run_goes_on_from_its_checkpoint_as_if_it_had_not_stopped(tmp_path, marks):
    config = fm.Config(**FLAGS, **marks, train_iters=6)
    trainer = fm.Trainer(config, documents())
    for step in trainer.steps():
        if step.iteration == 2:
            trainer.save(tmp_path / "saved")
            break
    rest = [step.loss for step in trainer.steps()]
    again = fm.Trainer(config, documents())
    again.load(tmp_path / "saved")
    assert again.iteration == 2 and [step.loss for step in again.steps()] == rest and len(rest) == 4
    by_iteration = fm.Trainer(config, documents())
    by_iteration.load(tmp_path / "saved" / "iter_0000002")
    assert by_iteration.iteration == 2 and next(iter(by_iteration.steps())).loss == rest[0]
    anew = fm.Trainer(config, documents())
    anew.load(tmp_path / "saved", weights_only=True)
    assert anew.iteration == 0 and next(iter(anew.steps())).loss != rest[0]
    with pytest.raises(ValueError, match="holds another model, with --num-layers 2 .this run: 3."):
        fm.Trainer(config.replace(num_layers=3), documents()).load(tmp_path / "saved")


def test_a_loaded_run_without_a_length_reads_its_documents_again(tmp_path):
    config = fm.Config(**FLAGS, lr_decay_style="constant")
    trainer = fm.Trainer(config, documents())
    list(trainer.steps(2))
    trainer.save(tmp_path)
    rest = [step.loss for step in trainer.steps(2)]
    again = fm.Trainer(config, documents())
    again.load(tmp_path)
    assert [step.loss for step in again.steps(2)] == rest


def test_a_checkpoint_brings_its_choice_of_kernels(tmp_path):
    config = fm.Config(**{**FLAGS, "kernels": "torch"}, train_iters=2)
    fm.Trainer(config, documents()).save(tmp_path)
    again = fm.Trainer(config.replace(kernels="auto"), documents())
    again.load(tmp_path)
    assert set(again._trainer.ops.choice.values()) == {"torch"} and len(list(again.steps())) == 2


def test_the_length_of_a_run():
    with_length = fm.Trainer(fm.Config(**FLAGS, train_iters=3), documents())
    with pytest.raises(
        ValueError, match="steps.4. after iteration 0 goes beyond the 3 iterations of the run"
    ):
        with_length.steps(4)
    assert (
        len(list(with_length.steps(1))) == 1
        and len(list(with_length.steps())) == 2
        and not list(with_length.steps())
    )
    decaying = fm.Trainer(fm.Config(**FLAGS, lr_warmup_iters=1), documents())
    with pytest.raises(ValueError, match="steps.. goes to the end of the run, which is not known"):
        decaying.steps()
    rates = [step.learning_rate for step in decaying.steps(3)]
    assert rates == [
        s.learning_rate
        for s in fm.Trainer(
            fm.Config(**FLAGS, lr_warmup_iters=1, train_iters=3), documents()
        ).steps()
    ]
    with pytest.raises(ValueError, match="the learning rate decays .linear. over the 3 iterations"):
        decaying.steps(1)
    constant = fm.Trainer(fm.Config(**FLAGS, lr_decay_style="constant"), documents())
    assert [step.iteration for step in (*constant.steps(2), *constant.steps(40))] == [*range(1, 43)]


def test_documents_need_a_token_that_ends_them():
    with pytest.raises(
        ValueError,
        match="^--reset-attention-mask --eod-mask-loss: the token that ends a document is not known",
    ):
        fm.Trainer(
            fm.Config(**FLAGS, train_iters=1, reset_attention_mask=True, eod_mask_loss=True),
            documents(),
        )


def test_mistakes_about_data(tmp_path):
    config = fm.Config(**FLAGS, train_iters=2)
    for data, message in (
        ([1, 2, 3], "document 0 of <data> is a int of shape"),
        ([[0.5]], "type float64: pass"),
        ([[1], [2, 96]], "document 1 of <data>: token id 96 is outside the vocabulary of 96"),
        ([], "data is empty"),
        (5, "data is a int: pass a prefix"),
        ([[[1, 2], [3]]], "is a list of shape"),
        (tmp_path / "none", "none.idx: cannot be read"),
        (None, "there is no data: pass data to Trainer"),
    ):
        with pytest.raises(ValueError, match=message):
            fm.Trainer(config, data)
    with pytest.raises(ValueError, match="the config names data as well"):
        fm.Trainer(config.replace(mock_data=True), documents())
    with pytest.raises(ValueError, match="there is no validation data: pass valid"):
        fm.Trainer(config, documents()).evaluate()
    with pytest.raises(ValueError, match="config is a dict: expected Config"):
        fm.Trainer(FLAGS, documents())
    with pytest.raises(ValueError, match="--split divides data .* and valid was passed"):
        fm.Trainer(config.replace(split="1,1,0"), documents(), documents(1))


QUIET = """if True:
    import os, signal, sys, threading
    import torch
    handlers = [signal.getsignal(n) for n in range(1, 32)]
    hooks, threads, mask = (sys.excepthook, threading.excepthook), torch.get_num_threads(), os.sched_getaffinity(0)
    import fugaku_megatron as fm
    from tests.checks.library import FLAGS, documents
    trainer = fm.Trainer(fm.Config(**FLAGS, train_iters=2), documents(), valid=documents())
    losses = [step.loss for step in trainer.steps()] + [trainer.evaluate()]
    assert handlers == [signal.getsignal(n) for n in range(1, 32)] and mask == os.sched_getaffinity(0)
    assert hooks == (sys.excepthook, threading.excepthook) and threads == torch.get_num_threads()
    assert (torch.tensor(1e-39) * 1).item() != 0, "denormals are flushed"
    assert "mpi4py" not in sys.modules and "arena" not in open("/proc/self/maps").read()
    line = fm.init(stop_signals=True)
    assert (torch.tensor(1e-39) * 1).item() == 0 and signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    print(line)
    """


def test_the_process_is_left_as_it_is_until_init():
    assert "allocator glibc" in python(QUIET)


def test_a_signal_ends_the_steps(monkeypatch):
    signals = process.signals_module.StopSignals((signal.SIGUSR1,))
    monkeypatch.setattr(process, "_signals", [signals])
    trainer = fm.Trainer(fm.Config(**FLAGS, train_iters=5), documents())
    done = []
    with signals:
        for step in trainer.steps():
            done.append(step.iteration)
            if len(done) == 2:
                signal.raise_signal(signal.SIGUSR1)
    assert done == [1, 2]


def their_logits(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float()


@pytest.fixture
def tokens() -> list[int]:
    return torch.randint(VOCABULARY, (20,), generator=torch.Generator().manual_seed(2)).tolist()


def test_a_model_of_hugging_face_is_loaded_and_saved(tmp_path, tokens):
    theirs = randomized(MODELS["qwen3"])
    theirs.save_pretrained(tmp_path / "hf")
    model = fm.load(tmp_path / "hf")
    found = model.logits(tokens)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, their_logits(theirs, tokens), rtol=1e-4, atol=1e-4)
    model.save_hf(tmp_path / "again")
    assert same(tensors(tmp_path / "hf"), tensors(tmp_path / "again"))
    with pytest.raises(ValueError, match="save_hf .* is not empty: pass a new directory"):
        model.save_hf(tmp_path / "again")


def test_hugging_face_s_tokenizer_comes_with_the_model(tmp_path):
    torch.manual_seed(3)
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=304, n_positions=64, n_embd=48, n_layer=2, n_head=4, initializer_range=0.2
        )
    ).eval()
    theirs.save_pretrained(tmp_path / "hf")
    write_hugging_face(tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    model = fm.load(tmp_path / "hf")
    ids = tokenizer("to be or not to be")["input_ids"]
    assert model.tokenizer.encode("to be or not to be") == ids
    with torch.no_grad():
        expected = theirs(torch.tensor([ids]), labels=torch.tensor([ids])).loss
    assert model.loss("to be or not to be") == pytest.approx(float(expected), rel=1e-5)
    flags = {
        "do_sample": False,
        "max_new_tokens": 7,
        "min_new_tokens": 7,
        "eos_token_id": None,
        "pad_token_id": 303,
    }
    added = theirs.generate(torch.tensor([ids]), **flags)[0, len(ids) :].tolist()
    found = model.generate("to be or not to be", 7, temperature=0.0)
    assert found == tokenizer.decode(added[: added.index(1)] if 1 in added else added)
    named = fm.load(tmp_path / "hf", tokenizer_model=tmp_path / "hf")
    assert named.generate("to be", 3, seed=2) == model.generate("to be", 3, seed=2)


def test_training_goes_on_from_hugging_face_s_weights(tmp_path, tokens):
    theirs = randomized(MODELS["qwen2"])
    theirs.save_pretrained(tmp_path / "hf")
    config = fm.load(tmp_path / "hf").config(
        micro_batch_size=1, train_iters=1, lr=1e-9, kernels="native"
    )
    trainer = fm.Trainer(config, [tokens * 10])
    trainer.load(tmp_path / "hf")
    trainer.save(tmp_path / "start")
    torch.testing.assert_close(
        fm.load(tmp_path / "start").logits(tokens),
        their_logits(theirs, tokens),
        rtol=1e-4,
        atol=1e-4,
    )
    with pytest.raises(ValueError, match="holds another model, with --num-attention-heads 4"):
        fm.Trainer(config.replace(num_attention_heads=2), [tokens]).load(tmp_path / "hf")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, list[str]]:
    """Return a checkpoint directory, and tokenizer flags."""
    folder = tmp_path_factory.mktemp("library")
    flags = write_tokenizer(folder)
    save_trained(process.world(), folder / "saved", 20)
    return folder / "saved", flags


def parsed(command, *words: str):
    parser = Parser()
    command.add_arguments(parser)
    return command.Request.of(parser.parse_args(list(words)))


@pytest.mark.parametrize(
    "changes", [{"temperature": 0.0}, {"temperature": 2.0, "top_k": 0, "seed": 5}, {"stop": ["e"]}]
)
def test_it_generates_what_the_command_generates(trained, changes, capsys):
    directory, flags = trained
    model = fm.load(directory, vocab_file=flags[1], merge_file=flags[3])
    prompts = ["to be", "q"]
    words = []
    for name, value in changes.items():
        words += [
            f"--{name.replace('_', '-')}",
            value[0] if isinstance(value, list) else str(value),
        ]
    generate.continue_prompts(
        parsed(
            generate,
            "--load",
            str(directory),
            *flags,
            "--prompt",
            prompts[0],
            "--prompt",
            prompts[1],
            "--max-new-tokens",
            "12",
            *words,
        ),
        process.world(),
    )
    printed = capsys.readouterr().out
    texts = model.generate(prompts, 12, **changes)
    assert printed == "--- iteration 20, prompt in brackets ---\n" + "".join(
        f"[{p}]{t}\n" for p, t in zip(prompts, texts)
    )
    assert model.generate("to be", 12, **changes) == texts[0]


def test_the_loss_of_a_text_is_that_of_the_command(trained, tmp_path):
    directory, flags = trained
    model = fm.load(directory, vocab_file=flags[1], merge_file=flags[3])
    length = 24
    text = (TEXT * 3)[: length + 1]  # one whole window of the command
    (tmp_path / "text").write_text(text)
    result = evaluate.evaluate(
        parsed(
            evaluate,
            "--load",
            str(directory),
            *flags,
            "--text",
            str(tmp_path / "text"),
            "--seq-length",
            str(length),
        ),
        process.world(),
    )
    assert result["tokens"] == length and model.loss(text) == pytest.approx(
        result["loss"], rel=1e-6
    )
    ids = model.tokenizer.encode(text)
    rows = torch.log_softmax(model.logits(ids[:-1]).double(), 1)
    assert model.loss(text) == pytest.approx(-float(rows[range(length), ids[1:]].mean()), rel=1e-6)
    assert np.isfinite(model.loss(TEXT * 20))


def test_mistakes_about_models(trained, tmp_path):
    directory, flags = trained
    model = fm.load(directory, vocab_file=flags[1], merge_file=flags[3])
    for call, message in (
        (lambda: fm.load(tmp_path / "none"), "none is not a directory: pass a checkpoint"),
        (lambda: fm.load(tmp_path), "holds no checkpoint of this program or of Megatron-LM"),
        (lambda: fm.load(directory, ckpt_step=7), "iter_0000007"),
        (
            lambda: fm.load(directory, dtype="int8"),
            "dtype is 'int8': pass fp32 or bf16 or fp16 or q8",
        ),
        (
            lambda: fm.load(directory, vocab_file="none", merge_file="none"),
            "--vocab-file none: cannot be read",
        ),
        (lambda: fm.load(directory).generate("a"), "the tokenizer is unknown"),
        (lambda: model.generate(""), "a prompt is empty"),
        (lambda: model.generate([]), "there is no prompt"),
        (lambda: model.generate("a", -1), "--max-new-tokens is -1"),
        (lambda: model.generate("a", temperature=-1.0), "--temperature is -1.0: pass 0 or more"),
        (lambda: model.loss("a"), "the text has 1 tokens"),
        (lambda: model.logits([]), "tokens have shape"),
        (lambda: model.logits([[1]]), "tokens have shape .1, 1."),
        (lambda: model.logits([9999]), "outside the"),
        (lambda: model.logits([1] * 99), "99 tokens were passed, and the model has 24 positions"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fm.load(directory, dtype="bf16").logits([1]).dtype == torch.float32


def test_a_save_compares_replicas_first(monkeypatch, tmp_path):
    """Two ranks as threads, each with its own world."""
    local = threading.local()
    monkeypatch.setattr(process, "world", lambda: local.world)

    def rank(world):
        local.world = world
        config = fm.Config(
            **FLAGS, train_iters=2, check_weight_hash_across_dp_replicas_interval=1000
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the flag has an effect
            trainer = fm.Trainer(config, documents())
        list(trainer.steps())
        trainer.save(tmp_path / "whole")
        if world.rank == 1:
            weight = trainer._trainer.stage.layers[0].mlp.linear_fc2.weight
            weight.data.view(torch.int32)[1, 2] ^= 1 << 9
        trainer._trainer.replicas.reset()
        with pytest.raises(fm.ReplicasDiffer) as found:
            trainer.save(tmp_path / "torn")
        trainer.close()
        return str(found.value)

    (message,) = set(ThreadWorld(2).run(rank))
    assert message.startswith("weights differ after iteration 2: rank 0 (node ")
    assert list_iterations(tmp_path / "whole") == [2] and list_iterations(tmp_path / "torn") == []


def test_chats_and_labels_that_do_not_count_are_said(tmp_path, capsys):
    with ChatWriter(tmp_path / "chats", "uint16") as writer:
        for length in (10, 90):  # only the first has a trained token in the sample
            tokens = np.arange(100) % FLAGS["vocab_size"]
            writer.add_document(signed(tokens, np.arange(100) >= length))
    config = fm.Config(
        **FLAGS, sft=True, sft_truncate=True, train_data_path=(str(tmp_path / "chats"),)
    )
    with pytest.warns(UserWarning, match="1 of 2 chats have no trained token in their first"):
        trainer = fm.Trainer(config)
    trainer.close()
    with ChatWriter(tmp_path / "none", "uint16") as writer:
        writer.add_document(signed(np.arange(9), np.zeros(9, bool)))
    with pytest.raises(ValueError, match="none of its 9 tokens is trained"):
        fm.Trainer(config.replace(train_data_path=(str(tmp_path / "none"),)))


def test_an_iteration_of_labels_that_do_not_count_says_so(tmp_path):
    size = FLAGS["vocab_size"]
    prefix = str(write(tmp_path / "ends", [np.full(300, size - 1)]))
    flags = {
        **FLAGS,
        "train_iters": 2,
        "eval_iters": 1,
        "tokenizer_type": "NullTokenizer",
        "train_data_path": prefix,
        "valid_data_path": prefix,
    }
    words = [
        word
        for name, value in flags.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ] + ["--eod-mask-loss"]
    done = subprocess.run(
        [sys.executable, "-m", "fugaku_megatron", "train", *words, "--log-interval", "1"]
        + ["--save", str(tmp_path / "saved")],
        capture_output=True,
        text=True,
    )
    warning = "has 0 counted tokens: no label of its 4 samples counts in the loss"
    assert done.stdout.count(warning) == 2
    assert "lm loss value: NAN | lm loss PPL: NAN" in done.stdout
    assert "nothing was trained: no label of 2 iterations counts in the loss" in done.stdout
    assert done.returncode == 2 and not list_iterations(tmp_path / "saved")
    trainer = fm.Trainer(fm.Config.from_flags(words))
    with pytest.warns(UserWarning, match=f"iteration 1 {warning}"):
        assert next(trainer.steps()).loss == 0
    trainer.close()
