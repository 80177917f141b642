"""The evaluate command on two real ranks finds what one rank finds, which tests/parallel/test_evaluate.py holds to transformers."""

from __future__ import annotations

import json

import pytest

from fugaku_megatron.comm.solo import SoloComm
from tests.parallel.test_evaluate import PROSE, QUESTIONS, result
from tests.parallel.test_generate import save_trained, write_tokenizer

pytestmark = pytest.mark.mpi


def test_two_ranks(mpich, tmp_path):
    save_trained(SoloComm(), tmp_path / "saved", 1)
    (tmp_path / "text.txt").write_text(PROSE, encoding="utf-8")
    (tmp_path / "questions.json").write_text(json.dumps(QUESTIONS))
    words = ["--load", str(tmp_path / "saved"), *write_tokenizer(tmp_path), "--text", str(tmp_path / "text.txt"),
             "--choices", str(tmp_path / "questions.json")]
    job = mpich.run(2, "-m", "fugaku_megatron", "evaluate", *words, "--pipeline-model-parallel-size", "2", "--json",
                    str(tmp_path / "result.json"))
    assert job.returncode == 0, job.stderr
    found, expected = json.loads((tmp_path / "result.json").read_text()), result(words)
    assert found.pop("load") == expected.pop("load") and found == pytest.approx(expected, rel=1e-6)
    begins = ["perplexity ", "6 windows ", "accuracy ", "questions without a context: 1"]  # each once, from one rank
    lines = job.stdout.splitlines()
    assert len(lines) == len(begins) and all(map(str.startswith, lines, begins)), job.stdout
