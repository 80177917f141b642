"""The generate command on two real ranks writes what one does; tests/parallel/test_decoding.py compares it with transformers."""

from __future__ import annotations

import pytest

from fugaku_megatron.comm.solo import SoloComm
from tests.parallel.test_decoding import NEW, PROMPTS, WIDE, our_tokens
from tests.parallel.test_generate import save_trained, write_tokenizer

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(directory of a checkpoint, what it continues PROMPTS with)."""
    directory = tmp_path_factory.mktemp("wide")
    save_trained(SoloComm(), directory, 3, **WIDE)
    return directory, our_tokens(SoloComm(), directory, (1, 1))


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_two_ranks(mpich, saved, tmp_path, kind):
    directory, expected = saved
    prompts = [word for prompt in PROMPTS for word in ("--prompt", bytes(prompt).decode())]
    job = mpich.run(2, "-m", "fugaku_megatron", "generate", "--load", str(directory), *write_tokenizer(tmp_path), *prompts,
                    "--max-new-tokens", str(NEW), "--temperature", "0", f"--{kind}-model-parallel-size", "2")
    assert job.returncode == 0, job.stderr
    texts = [f"[{bytes(prompt).decode()}]{bytes(ids).decode('utf-8', 'replace')}" for prompt, ids in zip(PROMPTS, expected)]
    assert job.stdout == "\n".join(["--- iteration 3, prompt in brackets ---", *texts, ""])
