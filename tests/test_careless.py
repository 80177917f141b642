"""1,000 careless inputs: manifests, machine files, job scripts, flags and vocabularies, drawn by hypothesis with a fixed seed.

Each is refused by a ValueError of one line, or by SystemExit, or accepted; none gives another exception, takes more than 10 s or
loads a changed manifest. docs/reliability.md counts them. Run: pytest tests/test_careless.py
"""

import copy
import json
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fugaku_megatron.checkpoint import manifest
from fugaku_megatron.data.tokenizer import build_tokenizer
from fugaku_megatron.jobs import check, scripts
from fugaku_megatron.perf import machine
from fugaku_megatron.run import arguments

EXAMPLES = {"manifests": 300, "machine files": 200, "job scripts": 100, "flags": 250, "vocabularies": 150}
SCRIPT = scripts.text("run_124m.sh")
FLAGS = ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--micro-batch-size", "--global-batch-size",
         "--lr", "--min-lr", "--adam-eps", "--weight-decay", "--clip-grad", "--train-iters", "--seed", "--split", "--loss-scale",
         "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--hidden-dropout", "--save-interval", "--log-interval",
         "--rampup-batch-size", "--lr-decay-style", "--vocab-size", "--init-method-std", "--cpu-frequency", "--recipe", "--dry-run")
WORDS = st.one_of(st.sampled_from(["inf", "nan", "-1", "0", "1e400", "1e-400", "", "abc", "9" * 20, "9" * 5000, "1,2", "cosine",
                                   "½", "124m", "--", "\x00", "a b"]),
                  st.integers().map(str), st.floats().map(str), st.text(max_size=8))
VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6), st.just([]), st.just({}),
                   st.just([{}]), st.sampled_from([1e300, 10**400, -1, 0, 1]))
RECORD = {"key": "w", "dtype": "float32", "global_shape": [8, 6], "offset": [4, 0], "slice_shape": [4, 6], "flat_start": 12,
          "numel": 12}
STATE = {"progress": {"iteration": 5, "consumed_samples": 40, "skipped": 0, "nans": 0}, "scaler": {"scale": 1.0},
         "optimizer_steps": 5, "rng": {"seed": 1, "sample": 40}}


def careless(kind, **strategies):
    """Runs `test`, which returns its outcome, on EXAMPLES[kind] inputs, the same every time, and prints how often each came."""
    rules = settings(max_examples=EXAMPLES[kind], derandomize=True, database=None, deadline=10_000,
                     suppress_health_check=list(HealthCheck))
    seen = Counter()

    def run(test):
        @rules
        @given(**strategies)
        def one(**drawn):
            seen[test(**drawn)] += 1

        one()
        print(kind, dict(seen))
        assert sum(seen.values()) >= EXAMPLES[kind]

    return run


def outcome(work):
    """"refused" with one line or "accepted"; any other exception escapes and fails the test."""
    try:
        work()
    except ValueError as error:
        assert str(error).strip(), "a refusal that says nothing"
        return "refused"
    except SystemExit:
        return "refused"
    return "accepted"


def places(value, path=()):
    """The paths of all entries of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, part in items for place in ((*path, key), *places(part, (*path, key)))]


def edited(value, place, new, remove):
    """The JSON value with one entry set to `new`, or removed."""
    value = copy.deepcopy(value)
    owner = value
    for key in place[:-1]:
        owner = owner[key]
    if remove:
        del owner[place[-1]]
    else:
        owner[place[-1]] = new
    return value


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("careless") / "iter_0000005"
    folder.mkdir()
    manifest.write_manifest(folder, 5, {"world_size": 1}, {"model": {"num_layers": 1}}, STATE,
                            {"rank_00000.safetensors": {"size": 4, "crc32": "0123abcd", "shards": [RECORD]}})
    return folder / manifest.MANIFEST, json.loads((folder / manifest.MANIFEST).read_text())


def test_no_changed_manifest_loads(saved):
    path, contents = saved

    @careless("manifests", place=st.sampled_from(places(contents)), new=VALUES, remove=st.booleans())
    def change(place, new, remove):
        text = json.dumps(edited(contents, place, new, remove))
        path.write_text(text)
        same = text == json.dumps(contents)
        answer = outcome(lambda: manifest.read_manifest(path.parents[1], 5))
        assert answer == ("accepted" if same else "refused"), text
        return "unchanged" if same else answer


def test_machine_files_are_refused_or_predict(tmp_path):
    data = json.loads((machine.FOLDER / "a64fx.json").read_text())
    path = tmp_path / "host.json"

    @careless("machine files", place=st.sampled_from(places(data)), new=VALUES, remove=st.booleans())
    def change(place, new, remove):
        path.write_text(json.dumps(edited(data, place, new, remove)))
        answer = outcome(lambda: machine.load(str(path)))
        assert answer == "refused" or machine.load(str(path)).gemm_curve(12).maximum > 0
        return answer


def test_job_scripts_are_checked():
    lines = SCRIPT.splitlines()

    @careless("job scripts", number=st.integers(0, len(lines) - 1), word=WORDS, group=WORDS)
    def change(number, word, group):
        text = "\n".join([*lines[:number], lines[number].partition("=")[0] + "=" + word, *lines[number + 1:]])
        return "refused" if check.problems(text, group, files=False) else "accepted"


def test_flags_are_refused_or_parsed():
    @careless("flags", pairs=st.lists(st.tuples(st.sampled_from(FLAGS), WORDS), min_size=1, max_size=4))
    def change(pairs):
        return outcome(lambda: arguments.parse(["--recipe", "124m", *(word for pair in pairs for word in pair)]))


def test_vocabularies_are_refused_or_read(tmp_path):
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    nested = st.recursive(VALUES, lambda part: st.dictionaries(st.text(max_size=3), part, max_size=4), max_leaves=8)
    text = st.one_of(nested.map(json.dumps), st.text(max_size=30), st.just("[" * 100_000), st.just('{"a": ' + "9" * 5000 + "}"))

    @careless("vocabularies", contents=text, rules=st.text(max_size=30))
    def change(contents, rules):
        for path, value in ((vocab, contents), (merges, rules)):
            path.write_bytes(value.encode("utf-8", "surrogatepass"))
        return outcome(lambda: build_tokenizer("GPT2BPETokenizer", str(vocab), str(merges)))
