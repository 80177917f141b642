"""A config is a key again and again: its hash is computed once, and is no part of what is compared, printed or pickled."""

from __future__ import annotations

import pickle
from dataclasses import asdict, replace

from fugaku_megatron.config.arguments import make_run


def test_equal_runs_have_one_hash():
    run, other = (make_run("124m", {"vocab_size": 50257}) for _ in range(2))
    assert hash(run) == hash(other) == run._hash and run == other and repr(run) == repr(other)
    assert "_hash" not in asdict(run)
    changed = replace(run, batch=replace(run.batch, micro_batch_size=7))
    assert hash(changed) != hash(run) and changed.batch._hash == hash(changed.batch)


def test_a_hash_is_not_sent_to_other_processes():
    run = make_run("124m", {"vocab_size": 50257})
    hash(run)
    sent = pickle.loads(pickle.dumps(run))
    assert sent == run and "_hash" not in vars(sent) and "_hash" not in vars(sent.model)
