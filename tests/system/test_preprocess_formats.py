"""preprocess on compressed files, tables and folders of these, and what is left of a run that was killed."""

import fcntl
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest

from fugaku_megatron.cli import program as program_module
from fugaku_megatron.data import preprocess, unfinished
from fugaku_megatron.data.files import input_files, read_documents
from fugaku_megatron.data.formats import CHAT, Columns

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
zstandard = pytest.importorskip("zstandard")

TOKENIZER = "--tokenizer-type NullTokenizer --vocab-size 60000".split()
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


def write_all_forms(folder, some):
    """The same documents as plain.jsonl and in each other form; returns their names."""
    third = len(some) // 3
    pieces, rows = (
        [some[:third], some[third : 2 * third], some[2 * third :]],
        [{"n": i, "text": t} for i, t in enumerate(some)],
    )
    (folder / "plain.jsonl").write_bytes(lines(some))
    (folder / "members.jsonl.gz").write_bytes(
        b"".join(gzip.compress(lines(piece)) for piece in pieces) + b"\0" * 512
    )
    compress = zstandard.ZstdCompressor(write_checksum=True).compress
    (folder / "frames.jsonl.zst").write_bytes(b"".join(compress(lines(piece)) for piece in pieces))
    (folder / "folder" / "later").mkdir(parents=True)
    (folder / "saved").mkdir()
    for number, piece in enumerate(pieces):
        place = folder / "folder" / ("later" if number == 2 else ".")
        (place / f"{number}.json.gz").write_bytes(gzip.compress(lines(piece)))
        write_stream(
            folder / "saved" / f"data-0000{number}.arrow",
            [{"text": text, "n": 0} for text in piece],
        )
    write_stream(folder / "saved" / "cache-1.arrow", [{"text": "1", "n": 0}])
    (folder / "saved" / "dataset_info.json").write_text("{}")
    (folder / "saved" / "state.json").write_text(
        json.dumps(
            {"_data_files": [{"filename": f"data-0000{number}.arrow"} for number in range(3)]}
        )
    )
    parquet.write_table(
        pyarrow.Table.from_pylist(rows), folder / "table.parquet", row_group_size=130
    )
    with pyarrow.OSFile(str(folder / "file.arrow"), "wb") as sink:
        table = pyarrow.Table.from_pylist(rows).set_column(
            1, "text", pyarrow.array(some).dictionary_encode()
        )
        with pyarrow.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=50)
    return [
        "members.jsonl.gz",
        "frames.jsonl.zst",
        "folder",
        "saved",
        "table.parquet",
        "file.arrow",
    ]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """The command within this process and `tmp_path`: input, prefix, more words -> (exit code, lines on stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(source, prefix="out", *more):
        code = program_module.main(
            [
                "preprocess",
                "--input",
                *source.split(),
                "--output-prefix",
                prefix,
                *TOKENIZER,
                *map(str, more),
            ]
        )
        return code, capsys.readouterr().err.splitlines()

    return call


def outputs(folder, prefix):
    return [(folder / f"{prefix}_text_document.{suffix}").read_bytes() for suffix in OUTPUTS]


@pytest.mark.parametrize("pile_bytes", [2**26, 2**12], ids=["one pile", "many piles"])
def test_every_form_of_the_input_gives_the_same_files(tmp_path, run, monkeypatch, pile_bytes):
    monkeypatch.setattr(unfinished, "PILE_BYTES", pile_bytes)
    names = write_all_forms(tmp_path, texts())
    for prefix, more in (("shuffled", []), ("kept", ["--keep-order"])):
        assert run("plain.jsonl", f"plain_{prefix}", *more)[0] == 0
        for number, name in enumerate(names):
            code, errors = run(name, f"{prefix}{number}", *more, "--workers", 1 + number % 2)
            assert code == 0, errors
            assert outputs(tmp_path, f"{prefix}{number}") == outputs(tmp_path, f"plain_{prefix}"), (
                name
            )
    assert outputs(tmp_path, "plain_kept")[0] != outputs(tmp_path, "plain_shuffled")[0]
    assert not list(tmp_path.glob("*.unfinished"))


def test_compressed_plain_text_is_one_document(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\ntwo\n"))
    (tmp_path / "b.md.zst").write_bytes(zstandard.ZstdCompressor().compress(b"three"))
    found = [*read_documents(input_files([str(tmp_path)], ["text"]))]
    assert [(document.line, document.raw) for document in found] == [
        (0, b"one\ntwo\n"),
        (0, b"three"),
    ]


def test_chats_in_a_table_are_those_of_lines(tmp_path):
    """A table has every field in every row; a field that is null does not count."""
    chats = [
        {
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Ho", "thinking": "x"},
            ]
        },
        {"prompt": "1 + 1 =", "completion": " 2"},
    ]
    parquet.write_table(
        pyarrow.Table.from_pylist(
            [
                {"messages": None, "prompt": None, "completion": None, "n": 1, **chat}
                for chat in chats
            ]
        ),
        tmp_path / "chats.parquet",
    )
    found = read_documents(input_files([str(tmp_path / "chats.parquet")], ["text"], CHAT), CHAT)
    assert [json.loads(document.raw) for document in found] == chats


def interrupted(monkeypatch, batches):
    """Ctrl-C after so many batches."""
    add, left = unfinished.Unfinished.add, [batches]

    def counted(self, *arguments):
        add(self, *arguments)
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    monkeypatch.setattr(unfinished.Unfinished, "add", counted)


def test_an_interrupted_run_goes_on_from_any_place_of_any_form(tmp_path, run, monkeypatch):
    names = write_all_forms(tmp_path, texts(300))
    monkeypatch.setattr(preprocess, "BATCH_BYTES", 5000)
    assert run("plain.jsonl", "plain")[0] == 0
    monkeypatch.setattr(unfinished, "JOURNAL_SECONDS", 0.0)
    for name in ["plain.jsonl", *names]:
        codes, said = [], []
        while not codes or codes[-1]:
            with monkeypatch.context() as patch:
                interrupted(patch, 5)
                code, errors = run(name)
            codes, said = [*codes, code], said + errors
        assert len(codes) > 3 and set(codes[:-1]) == {130}
        assert sum("going on after" in line for line in said) == len(codes) - 1
        assert outputs(tmp_path, "out") == outputs(tmp_path, "plain"), name
        assert not list(tmp_path.glob("*.unfinished"))


def test_the_folder_of_the_tokens_is_no_input(tmp_path, run, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(lines(texts(300)))
    monkeypatch.setattr(preprocess, "BATCH_BYTES", 5000)
    monkeypatch.setattr(unfinished, "JOURNAL_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        interrupted(patch, 3)
        assert run(".")[0] == 130
    code, errors = run(".")
    assert code == 0 and "going on after" in errors[0]


def test_unrecorded_tokens_do_not_count(tmp_path, run, monkeypatch):
    """Tokens written after the last record are cut off."""
    write_all_forms(tmp_path, texts(300))
    monkeypatch.setattr(preprocess, "BATCH_BYTES", 5000)
    assert run("plain.jsonl", "plain")[0] == 0
    monkeypatch.setattr(unfinished, "JOURNAL_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        interrupted(patch, 5)
        assert run("plain.jsonl")[0] == 130
    for file in ("0.tokens", "0.lengths"):
        with open(tmp_path / "out.unfinished" / file, "ab") as stream:
            stream.write(b"\1" * 333)
    assert run("plain.jsonl")[0] == 0 and outputs(tmp_path, "out") == outputs(tmp_path, "plain")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("later file", "going on after"),
        ("earlier file", "its input files have changed"),
        ("flags", "another tokenizer or other"),
        ("lost tokens", "begun anew"),
        ("damaged journal", "Processed"),
    ],
)
def test_what_has_changed_decides_whether_a_run_goes_on(tmp_path, run, monkeypatch, change, said):
    some = texts(300)
    for name, part in (("a.jsonl", some[:200]), ("b.jsonl", some[200:])):
        (tmp_path / name).write_bytes(lines(part))
    monkeypatch.setattr(preprocess, "BATCH_BYTES", 5000)
    monkeypatch.setattr(unfinished, "JOURNAL_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        interrupted(patch, 3)
        assert run("a.jsonl b.jsonl")[0] == 130
    if change.endswith("file"):
        (tmp_path / ("a.jsonl" if change == "earlier file" else "b.jsonl")).write_bytes(
            lines(texts(50))
        )
    elif change == "lost tokens":
        os.truncate(tmp_path / "out.unfinished" / "0.tokens", 10)
    elif change == "damaged journal":
        (tmp_path / "out.unfinished" / "journal.json").write_text("{")
    more = ["--append-eod"] if change == "flags" else []
    code, errors = run("a.jsonl b.jsonl", "out", *more)
    assert code == 0 and said in "\n".join(errors)
    assert run("a.jsonl b.jsonl", "again", *more)[0] == 0 and outputs(tmp_path, "out") == outputs(
        tmp_path, "again"
    )


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
        code, errors = run("a.jsonl")
    finally:
        other.kill()
        other.wait()
    assert code == 2 and "--output-prefix out: another preprocess is writing it" in errors[0]
    assert fcntl and run("a.jsonl")[0] == 0


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.full)])
def test_kills_at_random_moments_lose_and_repeat_nothing(tmp_path, run, kills):
    some = texts(6000)
    (tmp_path / "corpus").mkdir()
    for number in range(3):
        (tmp_path / "corpus" / f"{number}.jsonl.gz").write_bytes(
            gzip.compress(lines(some[number::3]))
        )
    assert run("corpus", "whole")[0] == 0
    imports = "import time; from fugaku_megatron.cli import program; from fugaku_megatron.data import preprocess, unfinished; "
    never_ends = "unfinished.Unfinished.finish = lambda *_: time.sleep(600); "  # so that the first kill comes before the end
    program = (
        "preprocess.BATCH_BYTES = 2000; unfinished.JOURNAL_SECONDS = 0; unfinished.PILE_BYTES = 2**26; "
        f"program.main('preprocess --input corpus --output-prefix out --workers 2 {' '.join(TOKENIZER)}'.split())"
    )
    moments, said = random.Random(os.getpid()), ""
    for number in range(kills):
        code = imports + (never_ends if number == 0 else "") + program
        with open(tmp_path / "stderr", "w") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-c", code], cwd=tmp_path, stderr=stderr, stdout=subprocess.DEVNULL
            )
            while (
                process.poll() is None
                and not (tmp_path / "out.unfinished" / "journal.json").exists()
            ):
                time.sleep(0.01)
            time.sleep(moments.uniform(0, 2 if kills < 5 else 0.5))
            workers = (
                psutil.Process(process.pid).children(recursive=True)
                if process.poll() is None
                else []
            )
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert psutil.wait_procs(workers, timeout=200)[1] == []
        said += (tmp_path / "stderr").read_text()
    code, errors = run("corpus", "out")
    assert code == 0 and "going on after" in said + "\n".join(errors)
    assert outputs(tmp_path, "out") == outputs(tmp_path, "whole")
    assert not (tmp_path / "out.unfinished").exists()


def test_progress_says_percent_and_remaining_time(tmp_path, run, monkeypatch):
    write_all_forms(tmp_path, texts(300))
    monkeypatch.setattr(preprocess, "BATCH_BYTES", 5000)
    for name in ("plain.jsonl", "table.parquet", "folder"):
        _, errors = run(name, "out", "--log-interval", 100)
        shares = [
            int(line.split("%")[0].rsplit(" ", 1)[1])
            for line in errors
            if line.startswith("Processed")
        ]
        assert (
            shares == sorted(shares)
            and len(shares) >= 3
            and 0 < shares[0] < 100
            and shares[-1] == 100
        )
        assert errors[0].endswith(" left") and "left" not in errors[-1]


def cut(name, share):
    return lambda folder: os.truncate(folder / name, int(share * (folder / name).stat().st_size))


def rename(name, new):
    return lambda folder: os.replace(folder / name, folder / new)


def split_folder(folder):
    (folder / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')


@pytest.mark.parametrize(
    ("break_it", "source", "keys", "message"),
    [
        (
            cut("members.jsonl.gz", 0.9),
            "members.jsonl.gz",
            "text",
            "--input members.jsonl.gz: was cut off or is damaged (its com",
        ),
        (
            cut("frames.jsonl.zst", 0.9),
            "frames.jsonl.zst",
            "text",
            "--input frames.jsonl.zst: was cut off or is damaged (its com",
        ),
        (
            cut("table.parquet", 0.9),
            "table.parquet",
            "text",
            "--input table.parquet: was cut off or is damaged (Parquet magic bytes",
        ),
        (
            cut("file.arrow", 0.9),
            "file.arrow",
            "text",
            "--input file.arrow: was cut off or is damaged (",
        ),
        (
            cut("saved/data-00001.arrow", 0.9),
            "saved",
            "text",
            "--input saved/data-00001.arrow: was cut off or is damaged (it has no",
        ),
        (
            rename("plain.jsonl", "p.jsonl.gz"),
            "p.jsonl.gz",
            "text",
            "--input p.jsonl.gz: is not a gzip file (it begins with b'{\"te')",
        ),
        (
            rename("plain.jsonl", "p.jsonl.zst"),
            "p.jsonl.zst",
            "text",
            "--input p.jsonl.zst: is not a Zstandard file",
        ),
        (
            rename("plain.jsonl", "p.parquet"),
            "p.parquet",
            "text",
            "--input p.parquet: is not a Parquet file",
        ),
        (
            rename("plain.jsonl", "p.arrow"),
            "p.arrow",
            "text",
            "--input p.arrow: was cut off or is damaged (",
        ),
        (
            split_folder,
            "saved",
            "text",
            "--input saved: is a data set with the splits train, test: pass the folder of one, such",
        ),
        (
            None,
            "table.parquet",
            "body",
            "--input table.parquet: has no column 'body' (--json-keys); its columns are n, text",
        ),
        (
            None,
            "saved",
            "body",
            "--input saved/data-00000.arrow: has no column 'body' (--json-keys); its columns are text, n",
        ),
        (
            None,
            "table.parquet",
            "n",
            "--input table.parquet: column 'n' (--json-keys) is of type int64, not text; its columns are",
        ),
        (
            None,
            "members.jsonl.gz",
            "body",
            "members.jsonl.gz:1: expected text under key 'body' (--json-keys), found only keys text, n",
        ),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(tmp_path, run, break_it, source, keys, message):
    write_all_forms(tmp_path, texts(90))
    if break_it:
        break_it(tmp_path)
    before = sorted(os.listdir(tmp_path))
    code, errors = run(source, "out", "--json-keys", keys)
    assert code == 2 and len(errors) == 1 and message in errors[0], errors
    assert sorted(os.listdir(tmp_path)) == before


def test_a_flipped_bit_of_a_compressed_file_is_found(tmp_path, run):
    write_all_forms(tmp_path, texts(90))
    for name in ("members.jsonl.gz", "frames.jsonl.zst"):
        content = bytearray((tmp_path / name).read_bytes())
        content[len(content) // 2] ^= 64
        (tmp_path / name).write_bytes(content)
        code, errors = run(name)
        assert code == 2 and len(errors) == 1, errors
        assert f"--input {name}: was cut off or is damaged" in errors[0] or f"{name}:" in errors[0]


@pytest.mark.parametrize(
    ("package", "source"), [("zstandard", "frames.jsonl.zst"), ("pyarrow", "table.parquet")]
)
def test_a_missing_package_is_named(tmp_path, run, monkeypatch, package, source):
    write_all_forms(tmp_path, texts(90))
    monkeypatch.setitem(sys.modules, package, None)
    code, errors = run(source)
    assert code == 2 and len(errors) == 1
    assert f"--input {source} needs the Python package {package} (" in errors[0]
    assert errors[0].endswith(f"): pip install {package}, or this package with its extra [data]")


def test_rows_that_were_read_are_skipped(tmp_path):
    """The places of a table and of lines agree, whatever its row groups are."""
    some = [text or "7" for text in texts(300)]
    names = [*write_all_forms(tmp_path, some), "plain.jsonl"]
    for name in names:
        files = input_files([str(tmp_path / name)], ["text"])
        all_of_them = [*read_documents(files)]
        for place in (0, 1, 69, 70, 129, 130, 131, 298, 299):
            rest = [*read_documents(files, Columns(), all_of_them[place].after)]
            assert [document.raw for document in rest] == [
                document.raw for document in all_of_them[place + 1 :]
            ]
