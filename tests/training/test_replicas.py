"""Replicas: tensors that several ranks share are compared before every save: a flipped bit is found,
and suspect checkpoints are refused.
"""

import json
import re
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch

from fugaku_megatron.checkpoint import trusted
from fugaku_megatron.checkpoint.load import open_checkpoint
from fugaku_megatron.checkpoint.manifest import latest_iteration, list_iterations, read_head
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.run.loop import Session
from fugaku_megatron.start.exit_codes import ExitCode
from fugaku_megatron.training.replicas import (
    WORDS,
    ReplicasDiffer,
    comparison_line,
    content_hash,
)
from tests.checks.moments import EIGHT
from tests.checks.session import Writer
from tests.fault_injection import change_after, flip_bit
from tests.helpers import (
    build_trainer,
    find_checkpoint,
    make_trainer,
    mock,
    one_error,
    run_layout,
    small_run,
)
from tests.llama_models import FAMILIES
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel

ROUTED = {"num_experts": 4, "moe_router_topk": 2, "swiglu": True, "disable_bias_linear": True}
INTERVAL = "check_weight_hash_across_dp_replicas_interval"


def compared(world, run, flips) -> str | None:
    """Return the difference found after a step in which bits flip on some ranks: rank -> (layer of
    the stage, bit).
    """
    trainer = make_trainer(world, run)
    trainer.train_step()
    assert trainer.find_difference() is None, "healthy replicas agree"
    trainer.train_step()
    if world.rank in flips:
        layer, bit = flips[world.rank]
        trainer.optimizer.buckets.await_weights()
        weight = trainer.stage.layers[layer].self_attention.linear_qkv.weight.data
        flip_bit(weight.view(torch.int16), 11, bit)
    found = trainer.find_difference()
    trainer.close()
    return None if found is None else found.text


@pytest.mark.parametrize(
    ("layout", "flips", "named"),
    [
        (
            "dp4 overlap ddp_bucket_size=1",
            {3: (1, 14)},
            "rank 3 ({}, replica 3) holds other bits in "
            "decoder.layers.1.self_attention.linear_qkv.weight than 3 of",
        ),
        (
            "tp2 dp3 bf16 micro_batch_size=1 global_batch_size=12",
            {5: (1, 7)},
            "rank 5 ({}, replica 2) holds other bits",
        ),
        (
            "pp2 dp2",
            {3: (0, 7)},
            "rank 1 ({0}, replica 0), rank 3 ({0}, replica 1) hold different bits in "
            "decoder.layers.1.",
        ),
    ],
    ids=["zero-overlap", "tp2-dp3", "pp2-dp2"],
)
def test_one_flipped_bit(layout, flips, named, monkeypatch):
    monkeypatch.setattr("platform.node", lambda: "c12")
    found = run_layout(layout, compared, {"num_layers": 2}, flips)
    assert len(set(found)) == 1 and found[0].startswith(named.format("node c12")), found[0]


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("dp2", {}),
        ("tp2 dp2 bf16", {}),
        ("tp2 dp2 overlap bf16", {}),
        ("dp2", EIGHT),
        ("tp2 dp2", EIGHT),
        ("tp2 pp2 zero", {}),
        ("pp2 dp2 overlap", {}),
        ("tp2 sequence", FAMILIES["qwen3"]),
        ("cp2", {}),
        ("pp2 dp2 zbv num_layers=4", {}),
        ("tp2 dp2 ep2 sequence", ROUTED),
        ("tp2", ROUTED),
        ("dp4 ep2 zero", ROUTED),
        ("tp2 dp2 optimizer=muon", {}),
    ],
)
def test_healthy_ranks_agree(layout, model):
    def rank(world, run):
        with closing(make_trainer(world, run)) as trainer:
            for _ in range(3):
                trainer.train_step()
            return trainer.find_difference(), trainer.replicas.agreed

    flags = {"num_layers": 2, "lr": 1e-2, "hidden_dropout": 0.1, **model}
    assert set(run_layout(layout, rank, flags)) == {(None, 3)}


def tensors(trainer):
    """Return tensors by kind, to flip a bit."""
    part = trainer.optimizer.shards[-1]
    layer = trainer.stage.layers[0]
    norm = layer.input_layernorm.weight.data
    return {
        "norm": norm,
        "moment": part.exp_avg,
        "second": part.exp_avg_sq,
        "master": part.master,
        "router": layer.mlp.router.weight.data if hasattr(layer.mlp, "router") else norm,
        "expert": layer.mlp.experts.linear_fc1.weight.data
        if hasattr(layer.mlp, "experts")
        else norm,
        "tied": norm if trainer.stage.tied_copy is None else trainer.stage.tied_copy.data,
    }


@pytest.mark.parametrize(
    ("layout", "kind", "at", "named"),
    [
        ("dp2", "moment", 1, "optimizer states differ after iteration 1: rank 0 .*exp_avg of "),
        (
            "dp3 global_batch_size=12",
            "second",
            1,
            "optimizer states differ .*: rank 1 .* exp_avg_sq of .* than 2 of 3 replicas",
        ),
        ("dp3 bf16 global_batch_size=12", "master", 2, "rank 2 .* master weight of .* than 2 of 3"),
        (
            "tp2",
            "norm",
            1,
            "weights differ .*rank 0 .*tensor-parallel rank 0.*rank 1 .*input_layernorm.weight",
        ),
        (
            "tp2 num_experts=4 moe_router_topk=2 swiglu disable_bias_linear",
            "router",
            1,
            "weights differ .*router.weight",
        ),
        (
            "tp2 dp2 overlap bf16",
            "norm",
            1,
            "rank 1 \\(.*\\) holds other bits in .*input_layernorm.weight than 1 of 2 ",
        ),
        (
            "pp2",
            "tied",
            1,
            "weights differ .*copy of the tied embedding 0.*embedding.word_embeddings.weight",
        ),
        (
            "dp4 ep2 num_experts=4 moe_router_topk=2 swiglu disable_bias_linear",
            "expert",
            3,
            "rank 1 .*rank 3 .*linear_fc1.weight",
        ),
    ],
)
def test_a_flip_in_anything_that_is_held_twice(layout, kind, at, named, tmp_path):
    def rank(world, run):
        with closing(make_trainer(world, run)) as trainer:
            trainer.train_step()
            trainer.optimizer.buckets.await_weights()
            if world.rank == at:
                flip_bit(tensors(trainer)[kind], 3, bit=5)
            trainer.save(str(tmp_path))

    with pytest.raises(ReplicasDiffer, match=named):
        run_layout(layout, rank, {"num_layers": 2})
    assert list_iterations(tmp_path) == []


def test_one_rank_has_no_replicas_and_every_bit_counts():
    trainer = make_trainer(SoloComm(), small_run(num_layers=1))
    assert trainer.find_difference() is None and trainer.replicas.agreed is None
    for numel in (1, 7, WORDS * 2, WORDS * 4 + 11):
        for dtype in (torch.float32, torch.bfloat16, torch.int8):
            x = torch.randn(numel + 1).to(dtype)[1:]
            before = content_hash(x)
            assert content_hash(x.clone()) == before, "whatever its place in memory"
            for element in {0, numel // 2, numel - 1}:
                for bit in (0, 6):
                    flip_bit(x, element, bit)
                    assert content_hash(x) != before
                    flip_bit(x, element, bit)
            assert content_hash(x) == before


def session(world, at, **changes):
    """Return a session in which a bit flips in the last rank's weights after iteration `at`."""
    run = small_run(**{"num_layers": 2, "train_iters": 6, **changes})
    trainer = build_trainer(run, world, mock(run))
    change_after(
        trainer,
        at,
        lambda trainer: flip_bit(trainer.stage.layers[0].mlp.linear_fc2.weight, 3, bit=5),
    )
    return Session(
        trainer,
        Writer(),
        run.training.train_iters,
        (),
        signals=SimpleNamespace(stop_requested=False),
    )


def end(world, at, **changes):
    """(exit code, lines) of a run."""
    made = session(world, at, **changes)
    try:
        made.run()
        code = 0
    except SystemExit as left:
        code = left.code
    made.trainer.close()
    return code, made.writer.lines


@pytest.mark.parametrize(
    ("changes", "at", "found"),
    [
        ({}, 6, 6),
        ({"save_interval": 2}, 3, 4),
        ({"save_interval": 2, "async_save": True}, 3, 4),
        ({"exit_interval": 5}, 5, 5),
        ({"save_interval_in_mins": 1e-9}, 3, 3),
        ({INTERVAL: 2, "save_interval": 5}, 1, 2),
    ],
)
def test_replicas_are_compared_before_every_save(tmp_path, changes, at, found):
    changes = {"save": str(tmp_path), "keep_last": 1, **changes}
    for code, lines in ThreadWorld(2).run(lambda world: end(world, at, **changes)):
        assert code == ExitCode.REPLICAS_DIFFER == 6
        assert lines[-1].startswith(f"weights differ after iteration {found}: "), lines
    saved = list_iterations(tmp_path)
    assert all(number < found for number in saved)
    if saved:
        assert f"from a checkpoint of iteration {saved[-1]} or before" in lines[-1]
        assert read_head(tmp_path, saved[-1])["state"][trusted.REPLICAS] == trusted.AGREED
    else:
        assert lines[-1].endswith(
            "start anew without that node, or from a checkpoint that was saved elsewhere"
        )
    assert trusted.read_fault(tmp_path).iteration == found


def test_zero_turns_it_off(tmp_path):
    changes = {"save": str(tmp_path), INTERVAL: 0, "save_interval": 3}
    for code, _ in ThreadWorld(2).run(lambda world: end(world, 2, **changes)):
        assert code == 0
    state = read_head(tmp_path, 6)["state"]
    assert state[trusted.REPLICAS] == trusted.NOT_COMPARED


def test_a_signal_and_a_time_limit_compare_too(tmp_path):
    def rank(world):
        made = session(world, 2, save=str(tmp_path))
        step = made.trainer.train_step

        def signalled():
            result = step()
            made.signals.stop_requested = made.trainer.progress.iteration == 2
            return result

        made.trainer.train_step = signalled
        with pytest.raises(SystemExit) as left:
            made.run()
        made.trainer.close()
        return left.value.code

    assert ThreadWorld(2).run(rank) == [6, 6] and list_iterations(tmp_path) == []


def test_the_last_checkpoint_that_agreed_stays(tmp_path):
    """--keep-last 1 leaves it next to newer ones that were not compared."""

    def rank(world):
        for interval, iterations in ((3, 2), (0, 6)):
            run = small_run(
                num_layers=1,
                save=str(tmp_path),
                load=str(tmp_path),
                keep_last=1,
                train_iters=6,
                **{INTERVAL: interval},
            )
            with closing(make_trainer(world, run)) as trainer:
                if interval == 0:
                    trainer.load(str(tmp_path))
                while trainer.progress.iteration < iterations:
                    trainer.train_step()
                    trainer.save(str(tmp_path))

    ThreadWorld(2).run(rank)
    assert list_iterations(tmp_path) == [2, 6] and latest_iteration(tmp_path) == 6
    assert trusted.newest_agreed(tmp_path, [2, 6]) == 2


def saved(directory, iterations):
    """Checkpoints of one rank."""
    run = small_run(num_layers=1)
    with closing(make_trainer(SoloComm(), run)) as trainer:
        while trainer.progress.iteration < max(iterations):
            trainer.train_step()
            if trainer.progress.iteration in iterations:
                trainer.save(str(directory))
        return trainer


def test_suspect_checkpoints_are_refused_unless_named(tmp_path):
    saved(tmp_path, (2, 4, 6))
    fault = trusted.record_fault(tmp_path, 7, "a core of rank 1 computes wrong results", 4)
    assert (fault.trusted, fault.suspect) == (2, (4, 6))
    run = small_run(num_layers=1, load=str(tmp_path))
    message = one_error(2, lambda world: find_checkpoint(run, world))
    assert "iteration 6 is suspect" in message and "a core of rank 1" in message, message
    assert "--ckpt-step 2 " in message and "--ckpt-step 6 " in message
    assert open_checkpoint(tmp_path, SoloComm(), 6).iteration == 6
    chosen = small_run(num_layers=1, load=str(tmp_path), ckpt_step=2)
    assert find_checkpoint(chosen, SoloComm()).iteration == 2
    assert trusted.fault_note(tmp_path, 2).endswith("iteration 2 is not suspect")
    assert trusted.fault_note(tmp_path, 8) is None, "saved after it"
    with pytest.raises(ValueError, match="Use iteration 2: --ckpt-step 2$"):
        open_checkpoint(tmp_path, SoloComm(), 5)  # no other proposal is suspect
    saved(tmp_path, (4,))
    assert trusted.read_fault(tmp_path).suspect == (6,)
    saved(tmp_path, (6,))
    assert trusted.read_fault(tmp_path) is None
    assert open_checkpoint(tmp_path, SoloComm()).iteration == 6


@pytest.mark.parametrize("text", ["", "[]", "{", json.dumps({"suspect": "x"}), "[" * 10**5])
def test_a_damaged_record_is_refused_in_one_line(tmp_path, text):
    saved(tmp_path, (1,))
    (tmp_path / trusted.FAULT).write_text(text)
    message = one_error(1, lambda world: open_checkpoint(tmp_path, world))
    assert "is damaged" in message and "--ckpt-step" in message


def test_the_next_start_says_why_the_last_one_ended(tmp_path):
    changes = {"save": str(tmp_path), "load": str(tmp_path), "save_interval": 2}
    ThreadWorld(2).run(lambda world: end(world, 3, **changes))
    assert latest_iteration(tmp_path) == 2
    note = trusted.fault_note(tmp_path, 2)
    assert "ended after iteration 4: weights differ" in note and note.endswith(
        "iteration 2 is not suspect"
    )


@pytest.mark.parametrize(
    ("layout", "line"),
    [
        (
            "check_weight_hash_across_dp_replicas_interval=7",
            "note: no rank's weights have a copy on another rank",
        ),
        ("pp2 untie_embeddings_and_output_weights", "note: no rank's weights"),
        (
            "dp2 check_weight_hash_across_dp_replicas_interval=0",
            "note: --check-weight-hash-across-dp-replicas-interval 0: ",
        ),
        (
            "dp2 check_weight_hash_across_dp_replicas_interval=7",
            "weights and optimizer states of 2 data-parallel replicas, every 7 iterations and "
            "before every save",
        ),
        ("dp2 zero", "; not optimizer states, which --zero-stage 1 keeps once"),
        ("pp2 zbv num_layers=4", "note: no rank's weights"),
        (
            "tp2",
            "compared are what tensor-parallel ranks do not split, every 100 .*; not all else, "
            "which data-parallel size 1",
        ),
        ("pp2", "compared are the tied embedding of two stages"),
    ],
)
def test_the_log_says_what_is_compared(layout, line):
    def rank(world, run):
        trainer = make_trainer(world, run)
        return comparison_line(trainer.replicas, run, trainer.groups)

    (found,) = set(run_layout(layout, rank, {"num_layers": 2}))
    assert re.search(line, found), found
