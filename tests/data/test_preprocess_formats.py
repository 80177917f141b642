"""preprocess on compressed files, tables and folders, and after a killed run."""

import gzip
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest

from fugaku_megatron.data.input.documents import read_documents
from fugaku_megatron.data.input.input_files import input_files
from fugaku_megatron.data.input.tables import CHAT, Columns
from fugaku_megatron.data.preprocessing import document_order, encoder, unfinished
from tests.fault_injection import flip_file_bit

pytestmark = pytest.mark.system

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
zstandard = pytest.importorskip("zstandard")

TOKENIZER = "--tokenizer-type NullTokenizer --vocab-size 60000"
OUTPUTS = ("bin", "idx")


def texts(count=900):
    numbers = random.Random(1)
    return [
        " ".join(str(numbers.randrange(60000)) for _ in range(numbers.randrange(120)))
        for _ in range(count)
    ]


def lines(some):
    return "".join(
        json.dumps({"text": text, "n": i}) + "\n" for i, text in enumerate(some)
    ).encode()


def write_stream(path, rows):
    table = pyarrow.Table.from_pylist(rows)
    with (
        pyarrow.OSFile(str(path), "wb") as sink,
        pyarrow.ipc.new_stream(sink, table.schema) as writer,
    ):
        for batch in table.to_batches(max_chunksize=70):
            writer.write_batch(batch)


FORMS = "members.jsonl.gz frames.jsonl.zst folder saved table.parquet file.arrow".split()


def write_all_forms(folder, some):
    """Write the same documents as plain.jsonl and in each other form."""
    third = len(some) // 3
    pieces = [some[:third], some[third : 2 * third], some[2 * third :]]
    rows = [{"n": i, "text": text} for i, text in enumerate(some)]
    (folder / "plain.jsonl").write_bytes(lines(some))
    members = b"".join(gzip.compress(lines(piece)) for piece in pieces)
    (folder / "members.jsonl.gz").write_bytes(members + b"\0" * 512)
    compress = zstandard.ZstdCompressor(write_checksum=True).compress
    (folder / "frames.jsonl.zst").write_bytes(b"".join(compress(lines(piece)) for piece in pieces))
    (folder / "folder" / "later").mkdir(parents=True)
    saved = folder / "saved"
    saved.mkdir()
    names = [f"data-0000{number}.arrow" for number in range(3)]
    for number, piece in enumerate(pieces):
        place = folder / "folder" / ("later" if number == 2 else ".")
        (place / f"{number}.json.gz").write_bytes(gzip.compress(lines(piece)))
        write_stream(saved / names[number], [{"text": text, "n": 0} for text in piece])
    write_stream(saved / "cache-1.arrow", [{"text": "1", "n": 0}])
    (saved / "dataset_info.json").write_text("{}")
    state = {"_data_files": [{"filename": name} for name in names]}
    (saved / "state.json").write_text(json.dumps(state))
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, folder / "table.parquet", row_group_size=130)
    table = table.set_column(1, "text", pyarrow.array(some).dictionary_encode())
    with (
        pyarrow.OSFile(str(folder / "file.arrow"), "wb") as sink,
        pyarrow.ipc.new_file(sink, table.schema) as writer,
    ):
        writer.write_table(table, max_chunksize=50)


@pytest.fixture
def run(tmp_path, monkeypatch, command):
    """Run the command in `tmp_path` on an input; return the lines on stderr."""
    monkeypatch.chdir(tmp_path)

    def call(source, prefix="out", more="", code=0):
        flags = f"--input {source} --output-prefix {prefix} {TOKENIZER} {more}"
        return command("preprocess", flags, code=code).stderr.splitlines()

    return call


def refused(errors, *said):
    """Check a mistake's one line."""
    assert len(errors) == 1 and all(part in errors[0] for part in said), errors


@pytest.fixture
def short_batches(monkeypatch):
    """Small batches, each recorded."""
    monkeypatch.setattr(encoder, "BATCH_BYTES", 5000)
    monkeypatch.setattr(unfinished, "JOURNAL_SECONDS", 0.0)


def outputs(folder, prefix):
    return [(folder / f"{prefix}_text_document.{suffix}").read_bytes() for suffix in OUTPUTS]


@pytest.mark.parametrize(
    "pile_bytes, orders",
    [(2**26, {"shuffled": "", "kept": "--keep-order"}), (2**12, {"shuffled": ""})],
    ids=["one pile", "many piles"],
)
def test_every_form_of_the_input_gives_the_same_files(
    tmp_path, run, monkeypatch, pile_bytes, orders
):
    monkeypatch.setattr(document_order, "PILE_BYTES", pile_bytes)
    write_all_forms(tmp_path, texts())
    plain = []
    for prefix, more in orders.items():
        run("plain.jsonl", f"plain_{prefix}", more)
        plain.append(outputs(tmp_path, f"plain_{prefix}"))
        for number, name in enumerate(FORMS):
            run(name, f"{prefix}{number}", f"{more} --workers {1 + number % 2}")
            assert outputs(tmp_path, f"{prefix}{number}") == plain[-1], name
    assert plain[0][0] != plain[-1][0] or len(plain) == 1
    assert not list(tmp_path.glob("*.unfinished"))


def test_chats_in_a_table_are_those_of_lines(tmp_path):
    """A table has every field in every row; a field that is null does not count."""
    answer = {"role": "assistant", "content": "Ho", "thinking": "x"}
    chats = [
        {"messages": [{"role": "user", "content": "Hi"}, answer]},
        {"prompt": "1 + 1 =", "completion": " 2"},
    ]
    empty = {"messages": None, "prompt": None, "completion": None, "n": 1}
    table = pyarrow.Table.from_pylist([{**empty, **chat} for chat in chats])
    file = tmp_path / "chats.parquet"
    parquet.write_table(table, file)
    found = read_documents(input_files([str(file)], ["text"], CHAT), CHAT)
    assert [json.loads(document.raw) for document in found] == chats


def interrupt(run, monkeypatch, batches, source, code=130):
    """Run, press Ctrl-C after so many batches, and return the lines on stderr."""
    add = unfinished.Unfinished.add
    left = itertools.count(batches - 1, -1)

    def counted(self, *arguments):
        add(self, *arguments)
        if next(left) == 0:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(unfinished.Unfinished, "add", counted)
        return run(source, code=code)


def test_an_interrupted_run_goes_on_from_any_place_of_any_form(
    tmp_path, run, monkeypatch, short_batches
):
    write_all_forms(tmp_path, texts(300))
    run("plain.jsonl", "plain")
    for name in ["plain.jsonl", *FORMS]:
        ends = 0
        said = []
        done = tmp_path / "out_text_document.idx"
        done.unlink(missing_ok=True)
        while not done.exists():
            said += interrupt(run, monkeypatch, 5, name, code=None)
            ends += 1
        assert ends > 3 and said.count("fugaku-megatron preprocess: interrupted") == ends - 1
        assert sum("resuming after" in line for line in said) == ends - 1
        assert outputs(tmp_path, "out") == outputs(tmp_path, "plain"), name
        assert not list(tmp_path.glob("*.unfinished"))


def test_the_folder_of_the_tokens_is_no_input(tmp_path, run, monkeypatch, short_batches):
    (tmp_path / "a.jsonl").write_bytes(lines(texts(300)))
    interrupt(run, monkeypatch, 3, ".")
    assert "resuming after" in run(".")[0]


def test_unrecorded_tokens_do_not_count(tmp_path, run, monkeypatch, short_batches):
    """Tokens written after the last record are cut off."""
    (tmp_path / "plain.jsonl").write_bytes(lines(texts(300)))
    run("plain.jsonl", "plain")
    interrupt(run, monkeypatch, 5, "plain.jsonl")
    for file in ("0.tokens", "0.lengths"):
        with open(tmp_path / "out.unfinished" / file, "ab") as stream:
            stream.write(b"\1" * 333)
    run("plain.jsonl")
    assert outputs(tmp_path, "out") == outputs(tmp_path, "plain")


def replace(name):
    return lambda folder: (folder / name).write_bytes(lines(texts(50)))


# change -> (its effect on the folder, flags of the second start, words of the second start)
CHANGES = {
    "later file": (replace("b.jsonl"), "", "resuming after"),
    "earlier file": (replace("a.jsonl"), "", "its input files have changed"),
    "flags": (lambda folder: None, "--append-eod", "another tokenizer or other"),
    "lost tokens": (
        lambda folder: os.truncate(folder / "out.unfinished" / "0.tokens", 10),
        "",
        "begun anew",
    ),
    "damaged journal": (
        lambda folder: (folder / "out.unfinished" / "journal.json").write_text("{"),
        "",
        "Processed",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_decides_whether_a_run_goes_on(
    tmp_path, run, monkeypatch, short_batches, change
):
    apply, more, said = CHANGES[change]
    some = texts(300)
    (tmp_path / "a.jsonl").write_bytes(lines(some[:200]))
    (tmp_path / "b.jsonl").write_bytes(lines(some[200:]))
    interrupt(run, monkeypatch, 3, "a.jsonl b.jsonl")
    apply(tmp_path)
    assert said in "\n".join(run("a.jsonl b.jsonl", "out", more))
    run("a.jsonl b.jsonl", "again", more)
    assert outputs(tmp_path, "out") == outputs(tmp_path, "again")


def test_two_processes_do_not_write_one_prefix(tmp_path, run):
    (tmp_path / "a.jsonl").write_bytes(lines(texts(9)))
    (tmp_path / "out.unfinished").mkdir()
    hold = (
        "import fcntl, time; file = open('out.unfinished/lock', 'w'); fcntl.lockf(file, fcntl.LOCK_EX); print(flush=True); "
        "time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", hold], cwd=tmp_path, stdout=subprocess.PIPE)
    try:
        other.stdout.readline()
        refused(run("a.jsonl", code=2), "--output-prefix out: another preprocess is writing it")
    finally:
        other.kill()
        other.wait()
    run("a.jsonl")


# Small piles and batches; the first kill comes before the end, which takes for ever.
KILLED = """
import sys, time
from fugaku_megatron.cli import program
from fugaku_megatron.data.preprocessing import encoder, unfinished
if sys.argv[1] == "never ends":
    unfinished.Unfinished.finish = lambda *_: time.sleep(600)
encoder.BATCH_BYTES, unfinished.JOURNAL_SECONDS = 2000, 0
program.main(sys.argv[2:])
"""


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.full)])
def test_kills_at_random_moments_lose_and_repeat_nothing(tmp_path, run, kills):
    some = texts(6000)
    (tmp_path / "corpus").mkdir()
    for number in range(3):
        piece = gzip.compress(lines(some[number::3]))
        (tmp_path / "corpus" / f"{number}.jsonl.gz").write_bytes(piece)
    run("corpus", "whole")
    words = f"preprocess --input corpus --output-prefix out --workers 2 {TOKENIZER}".split()
    journal = tmp_path / "out.unfinished" / "journal.json"
    moments = random.Random(os.getpid())
    said = ""
    for number in range(kills):
        end = "ends" if number else "never ends"
        with open(tmp_path / "stderr", "w") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-c", KILLED, end, *words],
                cwd=tmp_path,
                stderr=stderr,
                stdout=subprocess.DEVNULL,
            )
        while process.poll() is None and not journal.exists():
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 2 if kills < 5 else 0.5))
        workers = []
        if process.poll() is None:
            workers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert psutil.wait_procs(workers, timeout=200)[1] == []
        said += (tmp_path / "stderr").read_text()
    assert "resuming after" in said + "\n".join(run("corpus", "out"))
    assert outputs(tmp_path, "out") == outputs(tmp_path, "whole")
    assert not (tmp_path / "out.unfinished").exists()


def test_progress_says_percent_and_remaining_time(tmp_path, run, short_batches):
    write_all_forms(tmp_path, texts(300))
    for name in ("plain.jsonl", "table.parquet", "folder"):
        errors = run(name, "out", "--log-interval 100")
        processed = [line for line in errors if line.startswith("Processed")]
        shares = [int(line.split("%")[0].rsplit(" ", 1)[1]) for line in processed]
        assert shares == sorted(shares) and len(shares) >= 3
        assert 0 < shares[0] < 100 and shares[-1] == 100
        assert errors[0].endswith(" left") and "left" not in errors[-1]


def cut(name, share):
    return lambda folder: os.truncate(folder / name, int(share * (folder / name).stat().st_size))


def rename(name, new):
    return lambda folder: os.replace(folder / name, folder / new)


def split_folder(folder):
    (folder / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')


DAMAGED = "was cut off or is damaged ("


@pytest.mark.parametrize(
    ("break_it", "source", "message"),
    [
        (cut("members.jsonl.gz", 0.9), "members.jsonl.gz", f"{DAMAGED}its com"),
        (cut("frames.jsonl.zst", 0.9), "frames.jsonl.zst", f"{DAMAGED}its com"),
        (cut("table.parquet", 0.9), "table.parquet", f"{DAMAGED}Parquet magic bytes"),
        (cut("file.arrow", 0.9), "file.arrow", DAMAGED),
        (cut("saved/data-00001.arrow", 0.9), "saved/data-00001.arrow", f"{DAMAGED}it has no"),
        (
            rename("plain.jsonl", "p.jsonl.gz"),
            "p.jsonl.gz",
            "is not a gzip file (it begins with b'{\"te')",
        ),
        (rename("plain.jsonl", "p.jsonl.zst"), "p.jsonl.zst", "is not a Zstandard file"),
        (rename("plain.jsonl", "p.parquet"), "p.parquet", "is not a Parquet file"),
        (rename("plain.jsonl", "p.arrow"), "p.arrow", DAMAGED),
        (
            split_folder,
            "saved",
            "is a data set with the splits train, test: pass the folder of one, such",
        ),
    ],
)
def test_damaged_files_are_one_line_and_leave_nothing(tmp_path, run, break_it, source, message):
    write_all_forms(tmp_path, texts(90))
    break_it(tmp_path)
    before = sorted(os.listdir(tmp_path))
    name = "saved" if source.startswith("saved") else source
    refused(run(name, code=2), f"--input {source}: {message}")
    assert sorted(os.listdir(tmp_path)) == before


def test_missing_keys_are_one_line_and_leave_nothing(tmp_path, run):
    write_all_forms(tmp_path, texts(90))
    before = sorted(os.listdir(tmp_path))
    for words, message in {
        "table.parquet body": "--input table.parquet: has no column 'body' (--json-keys); its columns are n, text",
        "saved body": "--input saved/data-00000.arrow: has no column 'body' (--json-keys); its columns are text, n",
        "table.parquet n": "--input table.parquet: column 'n' (--json-keys) is of type int64, not text; its columns are",
        "members.jsonl.gz body": "members.jsonl.gz:1: expected text under key 'body' (--json-keys), found only keys text, n",
    }.items():
        source, key = words.split()
        refused(run(source, "out", f"--json-keys {key}", code=2), message)
        assert sorted(os.listdir(tmp_path)) == before


def test_a_flipped_bit_of_a_compressed_file_is_found(tmp_path, run):
    write_all_forms(tmp_path, texts(90))
    for name in ("members.jsonl.gz", "frames.jsonl.zst"):
        middle = (tmp_path / name).stat().st_size // 2
        flip_file_bit(tmp_path / name, middle, 6)
        (error,) = run(name, code=2)
        assert f"--input {name}: was cut off or is damaged" in error or f"{name}:" in error


@pytest.mark.parametrize(
    ("package", "source"), [("zstandard", "frames.jsonl.zst"), ("pyarrow", "table.parquet")]
)
def test_a_missing_package_is_named(tmp_path, run, monkeypatch, package, source):
    write_all_forms(tmp_path, texts(90))
    monkeypatch.setitem(sys.modules, package, None)
    refused(
        run(source, code=2),
        f"--input {source} needs the Python package {package} (",
        f"): pip install {package}, or this package with its extra [data]",
    )


def test_rows_that_were_read_are_skipped(tmp_path):
    """Places in tables and lines agree for any row groups."""
    some = [text or "7" for text in texts(300)]
    write_all_forms(tmp_path, some)
    for name in [*FORMS, "plain.jsonl"]:
        files = input_files([str(tmp_path / name)], ["text"])
        documents = [*read_documents(files)]
        for place in (0, 1, 69, 70, 129, 130, 131, 298, 299):
            rest = read_documents(files, Columns(), documents[place].after)
            expected = [document.raw for document in documents[place + 1 :]]
            assert [document.raw for document in rest] == expected
