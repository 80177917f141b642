"""One rank per node opens each file, seen by strace."""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from fugaku_megatron.data.indexed import IndexedDatasetWriter
from tests.checks.generation import write_tokenizer
from tests.mpi import launch
from tests.mpi.launch import words
from tests.mpi.pretraining import PROGRAM, pretrain, resuming

pytestmark = [
    pytest.mark.system,
    pytest.mark.mpi,
    pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed"),
]
OPENED = re.compile(r'\b(?:open|openat|creat)\((?:AT_FDCWD, )?"([^"]+)".* = \d+$')


def openers(folder: Path, job: Path) -> dict[str, set[str]]:
    """Return the ranks that opened each file or directory in the job."""
    ranks: dict[str, set[str]] = defaultdict(set)
    for trace in folder.glob("opened.*"):
        for line in trace.read_text(errors="replace").splitlines():
            match = OPENED.search(line)
            if match and match[1].startswith(str(job)):
                ranks[match[1][len(str(job)) + 1 :]].add(trace.name.split(".")[1])
    return ranks


@pytest.mark.parametrize(
    "ranks, tensor_ranks", [(2, 1), pytest.param(4, 2, marks=pytest.mark.full)]
)
def test_no_file_of_a_job_is_opened_by_two_ranks_of_a_node(
    mpich, alone, tmp_path, ranks, tensor_ranks
):
    """Resume on twice as many ranks as saved the checkpoint, evaluate and save.

    Tensor-parallel ranks are as many as before: in another layout several ranks read pieces of a file.
    """
    job = tmp_path / "job"
    traces = tmp_path / "traces"
    rng = np.random.default_rng(0)
    job.mkdir()
    traces.mkdir()
    with IndexedDatasetWriter(job / "corpus", "<u2") as writer:
        for _ in range(200):
            writer.add_document(rng.integers(0, 95, 100))
    resumed = resuming(job / "save")
    flags = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --lr 1e-3 "
        "--make-vocab-size-divisible-by 8 --micro-batch-size 1 --global-batch-size 4 "
        f"--kernels native --eval-iters 1 --eval-interval 2 --split 90,10 {resumed} "
        f"--data-path {job}/corpus {' '.join(write_tokenizer(job))} "
        f"--tensor-model-parallel-size {tensor_ranks}"
    )
    if tensor_ranks == 1:
        alone(flags, "--train-iters 2")
    else:
        pretrain(mpich, tensor_ranks, flags, "--train-iters 2")
    more = f"--data-cache-path {job}/cache --log-file {job}/log.txt --train-iters 4"
    mpich.run(ranks, *words(launch.TESTS / "mpi" / "traced.py", traces, PROGRAM, flags, more))
    opened = openers(traces, job)
    assert not {name: who for name, who in opened.items() if len(who) > 1}
    assert len(opened) > 15 and {
        "corpus.bin",
        "corpus.idx",
        "vocab.json",
        "merges.txt",
        "log.txt",
        "save/history.jsonl",
        "save/iter_0000002/manifest.json",
        "save/latest_checkpointed_iteration.txt",
    } <= set(opened)
    shards = {
        name: who for name, who in opened.items() if name.startswith("save/iter_0000002/rank_")
    }
    assert shards == {
        f"save/iter_0000002/rank_{rank:05}.safetensors": {str(rank)} for rank in range(tensor_ranks)
    }, "the other data-parallel ranks get them from these"
