"""Which rank opens which file of a job: one rank of a node each, seen by strace."""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from fugaku_megatron.data.indexed import IndexedDatasetWriter
from tests.checks.generation import write_tokenizer
from tests.system.mpi.test_pretrain import PROGRAM

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed"),
]
OPENED = re.compile(r'\b(?:open|openat|creat)\((?:AT_FDCWD, )?"([^"]+)".* = \d+$')


def openers(folder: Path, job: Path) -> dict[str, set[str]]:
    """File or directory of the job -> the ranks that opened it."""
    ranks: dict[str, set[str]] = defaultdict(set)
    for trace in folder.glob("opened.*"):
        for line in trace.read_text(errors="replace").splitlines():
            match = OPENED.search(line)
            if match and match[1].startswith(str(job)):
                ranks[match[1][len(str(job)) + 1 :]].add(trace.name.split(".")[1])
    return ranks


@pytest.fixture(scope="module")
def opened(mpich, tmp_path_factory):
    """What was opened by a run that saves and by one that resumes, the second on twice as many ranks, two of them
    data-parallel."""
    job, rng, traces = tmp_path_factory.mktemp("job"), np.random.default_rng(0), []
    with IndexedDatasetWriter(job / "corpus", "<u2") as writer:
        for _ in range(200):
            writer.add_document(rng.integers(0, 95, 100))
    flags = [
        "--num-layers",
        "2",
        "--hidden-size",
        "32",
        "--num-attention-heads",
        "4",
        "--seq-length",
        "16",
        "--lr",
        "1e-3",
        "--make-vocab-size-divisible-by",
        "8",
        "--micro-batch-size",
        "1",
        "--global-batch-size",
        "4",
        "--kernels",
        "native",
        "--tensor-model-parallel-size",
        "2",
        "--eval-iters",
        "1",
        "--eval-interval",
        "2",
        "--split",
        "90,10",
        "--data-path",
        str(job / "corpus"),
        "--data-cache-path",
        str(job / "cache"),
        "--save",
        str(job / "save"),
        "--load",
        str(job / "save"),
        "--log-file",
        str(job / "log.txt"),
        *write_tokenizer(job),
    ]
    for ranks, iterations in ((2, "2"), (4, "4")):
        traces.append(tmp_path_factory.mktemp("traces"))
        result = mpich.run(
            ranks,
            str(Path(__file__).with_name("traced.py")),
            str(traces[-1]),
            PROGRAM,
            *flags,
            "--train-iters",
            iterations,
        )
        assert result.returncode == 0, result.stderr
    return [openers(trace, job) for trace in traces]


def test_no_file_of_a_job_is_opened_by_two_ranks_of_a_node(opened):
    for ranks in opened:
        assert len(ranks) > 15 and not {name: who for name, who in ranks.items() if len(who) > 1}


def test_the_trace_saw_what_is_read_and_written(opened):
    first, resumed = opened
    assert {
        "corpus.bin",
        "corpus.idx",
        "vocab.json",
        "merges.txt",
        "log.txt",
        "save/history.jsonl",
    } <= set(first)
    assert {
        "save/iter_0000002/manifest.json",
        "save/latest_checkpointed_iteration.txt",
        "corpus.bin",
    } <= set(resumed)
    shards = {
        name: who for name, who in resumed.items() if name.startswith("save/iter_0000002/rank_")
    }
    assert shards == {
        "save/iter_0000002/rank_00000.safetensors": {"0"},
        "save/iter_0000002/rank_00001.safetensors": {"1"},
    }, "the other data-parallel ranks get them from these"
