"""Six kinds of random input, 280 examples by hypothesis with a fixed seed: files, flags and contents.

Each example is refused by a ValueError of one line that names the file or a flag, or it is accepted and does what it says. None
raises another exception, takes more than 10 s or loads what was changed.
"""

import argparse
import copy
import json
import math
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture.providers import HypothesisProvider

from fugaku_megatron.checkpoint.manifest import Description
from fugaku_megatron.checkpoint.shards import Shard
from fugaku_megatron.checkpoint.verify import check_iteration
from fugaku_megatron.cli import arguments
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.data.build import Builder, build_datasets
from fugaku_megatron.data.indexed import IndexedDatasetWriter
from fugaku_megatron.data.input.documents import document_texts, read_documents
from fugaku_megatron.data.input.input_files import input_files
from fugaku_megatron.jobs import check, render
from fugaku_megatron.observe.log import log_command
from fugaku_megatron.planner import machine, model, software
from fugaku_megatron.planner.system import System
from fugaku_megatron.run.dry_run import report
from tests.checks.run_logs import read_log
from tests.file_damage import DAMAGES, OTHER_KINDS, damaged, remove, replace
from tests.helpers import OUR_LOG, load_checkpoint, save_checkpoint, small_run
from tests.threads import ThreadWorld
from tests.time_limit import time_limit

pytestmark = pytest.mark.parallel

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {
    "tensor files": 40,
    "machine files": 50,
    "job scripts": 40,
    "flags": 80,
    "data files": 40,
    "logs": 30,
}
SCRIPT = render.self_contained((ROOT / "scripts" / "pjsub" / "run_124m.sh").read_text())
PARSER = argparse.ArgumentParser(add_help=False)
arguments.add_flags(PARSER)
FLAGS = tuple(option for action in PARSER._actions for option in action.option_strings)
NUMBERS = st.sampled_from(
    [
        "1",
        "2",
        "4",
        "12",
        "64",
        "512",
        "1024",
        "10000",
        "65536",
        "1000000",
        "16777216",
        "2147483647",
        "1000000000000",
    ]
)
WORDS = st.one_of(
    NUMBERS,
    st.sampled_from(
        [
            "inf",
            "nan",
            "-1",
            "0",
            "0.5",
            "1e400",
            "1e-400",
            "",
            "abc",
            "9" * 20,
            "9" * 5000,
            "1,2",
            "cosine",
            "½",
            "demo",
            "--",
            "\x00",
            "a b",
        ]
    ),
    st.integers().map(str),
    st.floats().map(str),
    st.text(max_size=8),
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=6),
    st.just([]),
    st.just({}),
    st.just([{}]),
    st.sampled_from([1e300, 1e-300, 10**400, -1, 0, 1, "12", 1.5]),
)


def refused_or_harmless(kind, **strategies):
    """Run `test`, which returns its outcome, on EXAMPLES[kind] inputs, the same every time; some of them must be refused.

    Hypothesis would also draw constants that it finds in the modules that other tests have loaded.
    """
    rules = settings(
        max_examples=EXAMPLES[kind],
        suppress_health_check=list(HealthCheck),
    )
    seen = []

    def run(test):
        @rules
        @given(**strategies)
        def one(**drawn):
            with time_limit():
                answer = test(**drawn)
            seen.append(answer)

        with mock.patch.object(HypothesisProvider, "_maybe_draw_constant", return_value=None):
            one()
        assert len(seen) >= EXAMPLES[kind] and "refused" in seen

    return run


def outcome(work, *names):
    """ "refused" with one line that has one of the names, or "accepted"; any other exception escapes and fails the test."""
    try:
        work()
    except ValueError as error:
        text = str(error)
        assert text.strip() and len(text) < 1000 and any(name in text for name in names), text
        return "refused"
    return "accepted"


def places(value, path=()):
    """Return the paths to all entries in a JSON value."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [place for key, part in items for place in ((*path, key), *places(part, (*path, key)))]


def edited(value, place, new, remove_it):
    """The JSON value with one entry set to `new`, or removed."""
    value = copy.deepcopy(value)
    owner = value
    for key in place[:-1]:
        owner = owner[key]
    if remove_it:
        del owner[place[-1]]
    else:
        owner[place[-1]] = new
    return value


def test_no_changed_file_of_tensors_loads(tmp_path):
    """Not even in a layout that needs two files. The verify command finds the change, too."""

    def save(comm):
        part = Shard(
            "w",
            torch.arange(48.0)[24 * comm.rank :][:24].view(4, 6),
            (8, 6),
            (4 * comm.rank, 0),
            (4, 6),
        )
        save_checkpoint(tmp_path, [part], comm, Description(1, {}, {}, {}))

    ThreadWorld(2).run(save)
    folder = tmp_path / "iter_0000001"
    path = folder / "rank_00001.safetensors"
    whole = Shard("w", torch.zeros(8, 6), (8, 6), (0, 0), (8, 6))
    content = path.read_bytes()
    at = st.integers(0, len(content) - 1)
    noises = st.binary(min_size=1, max_size=40)

    @refused_or_harmless(
        "tensor files", damage=st.sampled_from([*DAMAGES, *OTHER_KINDS]), i=at, j=at, noise=noises
    )
    def change(damage, i, j, noise):
        replace(path, damage) if damage in OTHER_KINDS else path.write_bytes(
            damaged(content, damage, i, j, noise)
        )
        same = damage in DAMAGES and path.read_bytes() == content
        answer = outcome(lambda: load_checkpoint(tmp_path, [whole], SoloComm()), path.name)
        assert answer == ("accepted" if same else "refused")
        assert bool(check_iteration(tmp_path, 1, 1)[0]) != same
        remove(path)
        path.write_bytes(content)
        return "unchanged" if same else answer


def test_machine_files_are_refused_or_predict(tmp_path):
    data = json.loads((machine.FOLDER / "a64fx.json").read_text())
    path = tmp_path / "host.json"
    run = small_run()

    def predicted():
        prediction = model.predict(run, System.from_names(str(path), software.THIS_PROJECT, 1, 1))
        assert 0 < prediction.seconds < math.inf and 0 < prediction.memory_mib_max < math.inf

    @refused_or_harmless(
        "machine files", place=st.sampled_from(places(data)), new=VALUES, remove_it=st.booleans()
    )
    def change(place, new, remove_it):
        path.write_text(json.dumps(edited(data, place, new, remove_it)))
        return outcome(predicted, path.name)


def test_job_scripts_are_checked():
    lines = SCRIPT.splitlines()

    @refused_or_harmless(
        "job scripts", number=st.integers(0, len(lines) - 1), word=WORDS, group=WORDS
    )
    def change(number, word, group):
        text = "\n".join(
            [*lines[:number], lines[number].partition("=")[0] + "=" + word, *lines[number + 1 :]]
        )
        problems = check.problems(text, group, files=False)
        assert all(
            0 <= problem.line <= len(text.splitlines()) and problem.text.strip()
            for problem in problems
        )
        return "refused" if problems else "accepted"


def test_flags_are_refused_or_planned():
    def planned(words):
        parsed = arguments.parse(
            [*"--recipe demo --mock-data --vocab-size 512 --dry-run".split(), *words]
        )
        report(parsed.run, parsed.world_size or 1)

    @refused_or_harmless(
        "flags", pairs=st.lists(st.tuples(st.sampled_from(FLAGS), WORDS), min_size=1, max_size=3)
    )
    def change(pairs):
        return outcome(
            lambda: planned([word for pair in pairs for word in pair]),
            "--",
            "unknown flag",
            "world size",
        )


@pytest.fixture
def corpus(tmp_path):
    """Return a folder with byte tokens and JSON lines, and its documents."""
    documents = [list(range(3 * n)) for n in range(1, 7)]
    with IndexedDatasetWriter(tmp_path / "corpus", "uint16") as writer:
        for tokens in documents:
            writer.add_document(tokens)
    (tmp_path / "corpus.jsonl").write_text(
        "".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(5))
    )
    return tmp_path, documents


def test_data_files_are_refused_or_read(corpus):
    """Only size and kind of .bin are checked: the format has no checksum, so a token that is changed into another one is other data."""
    folder, documents = corpus
    originals = {
        name: (folder / name).read_bytes() for name in ("corpus.idx", "corpus.bin", "corpus.jsonl")
    }

    def trained():
        train, _, _ = build_datasets(
            [str(folder / "corpus")], "1,0,0", (10, 0, 0), Builder(4, 1, vocab_size=257)
        )
        assert [train.indexed[i].tolist() for i in range(len(documents))] == documents
        assert all(train[i].shape == (5,) for i in range(len(train)))

    def read():
        for document in read_documents(input_files([str(folder / "corpus.jsonl")], ["text"])):
            assert all(isinstance(text, str) for text in document_texts(document, ["text"]))

    @refused_or_harmless(
        "data files",
        name=st.sampled_from(list(originals)),
        damage=st.sampled_from((*DAMAGES, *OTHER_KINDS)),
        place=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)),
        noise=st.binary(min_size=1, max_size=40),
    )
    def change(name, damage, place, noise):
        path = folder / name
        content = originals[name]
        i, j = (number % len(content) for number in place)
        if damage in OTHER_KINDS:
            replace(path, damage)
        else:
            path.write_bytes(damaged(content, damage, i, j, noise))
        sized = damage in OTHER_KINDS or path.stat().st_size != len(content)
        work = read if name == "corpus.jsonl" else trained
        if name == "corpus.bin" and not sized:
            path.write_bytes(
                content[: i - i % 2] + b"\x01\x01" + content[i - i % 2 + 2 :]
            )  # token 257, above the vocabulary
        answer = outcome(work, name)
        assert answer == "refused" or name != "corpus.bin", (
            "a .bin of another size or with a token of no vocabulary"
        )
        remove(path)
        path.write_bytes(content)
        return answer


def test_logs_are_refused_or_make_a_row(tmp_path):
    path = tmp_path / "run.log"
    values = json.loads(re.search(r"^run: (.*)$", OUR_LOG, re.MULTILINE)[1])
    names = [
        *values,
        "lr",
        "tensor_model_parallel_size",
        "rampup_batch_size",
        "bf16",
        "recompute_granularity",
    ]

    def table():
        assert log_command.text([read_log(path)])

    @refused_or_harmless("logs", name=st.sampled_from(names), new=VALUES, remove_it=st.booleans())
    def change(name, new, remove_it):
        line = json.dumps(edited(values, (name,), new, remove_it and name in values))
        path.write_text(
            re.sub(r"^run: .*$", lambda match: "run: " + line, OUR_LOG, flags=re.MULTILINE)
        )
        return outcome(table, path.name)
