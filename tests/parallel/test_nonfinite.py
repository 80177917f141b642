"""The first Inf or NaN of an iteration is named: rank, layer, operation, samples."""

from __future__ import annotations

import json

import pytest
import torch

from fugaku_megatron.comm.agreement import first_rank
from fugaku_megatron.comm.solo import SoloComm
from fugaku_megatron.host import kernels
from fugaku_megatron.host.observed import Observed
from fugaku_megatron.logs.metrics import MetricsWriter, read_history
from fugaku_megatron.nn.layers import dropout_stream
from fugaku_megatron.nn.ops import Ops
from fugaku_megatron.training.nonfinite import find_nonfinite
from fugaku_megatron.training.session import Session
from fugaku_megatron.training.train import Trainer
from tests.helpers import make_trainer, small_run
from tests.threads import ThreadWorld

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
RESULT = {"attention_forward": 1, "attention_backward": 4}  # the argument that a kernel writes


def faulty_ops(kernel: str, layer: int, first_sample: int, value: float = float("nan"), backend: str = "native") -> Ops:
    """Attention of one layer (from 1) goes wrong in the micro-batch that begins at a sample."""

    def call(name, function, args, kwargs):
        result = function(*args, **kwargs)
        if args[-3:-1] == (dropout_stream(layer, "attention"), first_sample):
            args[RESULT[name]].view(-1)[3] = value
        return result

    return Ops.build(backend, kernels=Observed(kernels, (kernel,), call))


def explained(world, run, ops) -> str:
    torch.set_num_threads(1)
    trainer = make_trainer(world, run, ops(world.rank))
    result = trainer.train_step()
    assert result.skipped
    before = trainer.progress
    text = find_nonfinite(trainer, 0, result.loss_scale)
    assert trainer.progress == before
    healthy = trainer.train_step()  # the data goes on where it was
    trainer.close()
    assert not healthy.skipped and trainer.progress.consumed_samples == 32
    return text


LAYOUTS = {
    "one": (1, {}, 0), "tp2": (2, {TP: 2}, 1), "pp2": (2, {PP: 2}, 1), "dp2-zero": (2, {"zero_stage": 1}, 1),
    "dp2-overlap": (2, {"zero_stage": 1, "overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 1}, 1),
    "zbv": (2, {PP: 2, "pipeline_schedule": "zbv"}, 1), "tp2-pp2-dp2": (8, {TP: 2, PP: 2, "sequence_parallel": True}, 7),
    "tp2-blocks": (2, {TP: 2, "sequence_parallel": True, "tp_comm_overlap": True}, 1),
    "full": (1, {"recompute_granularity": "full"}, 0), "selective": (1, {"recompute_granularity": "selective"}, 0),
}


@pytest.mark.parametrize("kernel", RESULT)
@pytest.mark.parametrize("name", LAYOUTS)
def test_rank_layer_operation_and_samples_are_named(name, kernel):
    ranks, layout, guilty = LAYOUTS[name]
    run = small_run(num_layers=4, **layout)
    healthy, layer = Ops.build(), 2 if name == "zbv" else 4  # the last stage has layer 4, in a V layer 2
    dp = ranks // (layout.get(TP, 1) * layout.get(PP, 1))
    first = 6 if dp == 2 else 4  # the third micro-batch, or the second one of the second replica
    texts = ThreadWorld(ranks).run(
        lambda world: explained(world, run, lambda rank: faulty_ops(kernel, layer, first) if rank == guilty else healthy))
    assert len(set(texts)) == 1
    way = kernel.removeprefix("attention_")
    assert texts[0].startswith("first made by rank ") and f"rank {guilty} (node " in texts[0]
    where = f"decoder.layers.{layer - 1}, micro-batch {first // (2 * dp)} (samples {first} to {first + 1})"
    assert f"{way} of attention, {where}: its inputs are finite, its result is not (" in texts[0]


def test_what_turns_queries_and_keys_is_named_by_what_comes_before_it():
    def call(name, function, args, kwargs):
        function(*args, **kwargs)
        args[3].view(-1)[7] = float("nan")

    run = small_run(num_layers=2, position_embedding_type="rope", hidden_dropout=0.1)
    trainer = make_trainer(SoloComm(), run, Ops.build(kernels=Observed(kernels, ("rotary",), call)))
    assert trainer.train_step().skipped
    text = find_nonfinite(trainer, 0, 1.0)
    trainer.close()
    assert "forward of rotary, after linear, decoder.layers.0.self_attention.linear_qkv, micro-batch 0" in text


def test_the_first_of_several_in_the_order_of_samples():
    run = small_run(num_layers=2)
    texts = ThreadWorld(2).run(
        lambda world: explained(world, run, lambda rank: faulty_ops("attention_forward", 1, (12, 2)[rank])))
    assert "rank 1 (node" in texts[0] and "samples 2 to 3" in texts[0]


def test_torch_operations_are_seen_as_well():
    def overflow(name, function, args, kwargs):
        result = function(*args, **kwargs)
        args[1].mul_(float("inf") if args[5] == 6 else 1)
        return result

    ops = Ops.build("torch", kernels=Observed(kernels, ("dropout",), overflow))
    text = explained(SoloComm(), small_run(num_layers=2, attention_dropout=0.1), lambda rank: ops)
    assert "forward of attention, decoder.layers.0, micro-batch 3 (samples 6 to 7)" in text


def test_a_weight_that_is_not_finite_is_named():
    def broken(world) -> str:
        torch.set_num_threads(1)
        trainer = make_trainer(world, small_run(num_layers=2))
        if world.rank == 1:
            trainer.stage.layers[1].mlp.linear_fc1.weight.data[5, 3] = float("inf")
        text = find_nonfinite(trainer, 0, 1.0)
        trainer.close()
        return text

    texts = ThreadWorld(2).run(broken)
    assert texts[0] == texts[1] and texts[0].startswith("the weights were not finite before: rank 1 (node ")
    assert texts[0].endswith("weight decoder.layers.1.mlp.linear_fc1.weight: 1 of 4,096 elements")


def explained_only(trainer: Trainer) -> str:
    text = find_nonfinite(trainer, 0, 1.0)
    trainer.close()
    return text


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_no_operation_made(ranks):
    texts = ThreadWorld(ranks).run(lambda world: explained_only(make_trainer(world, small_run(num_layers=2))))
    assert set(texts) == {"not there when the iteration was repeated from the same state: memory or network of some node may be "
                          "faulty"}


def test_weight_gradients_and_their_sums():
    def overflow(value):
        def call(name, function, args, kwargs):
            function(*args, **kwargs)
            args[1].fill_(value)

        return Ops.build(kernels=Observed(kernels, ("add_position_backward",), call))

    run = small_run(num_layers=2)
    assert set(ThreadWorld(2).run(lambda world: explained_only(make_trainer(world, run, overflow(3e38))))) == {
        "every rank's own gradients are finite, their sum over ranks is not"}
    text = explained_only(make_trainer(SoloComm(), run, overflow(float("inf"))))
    assert "the gradient of embedding.position_embeddings.weight, after finite gradients of activations, micro-batch 0" in text


class Signals:
    stop_requested = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def test_one_line_in_the_log_and_in_the_history(tmp_path, capsys):
    torch.set_num_threads(1)
    run = small_run(num_layers=2, train_iters=3)
    trainer = make_trainer(SoloComm(), run, faulty_ops("attention_forward", 1, 20))
    writer = MetricsWriter(3, 1, history_path=tmp_path / "history.jsonl", live="off")
    Session(trainer, writer, 3, False, signals=Signals()).run()
    trainer.close()
    writer.close()
    lines = [line for line in capsys.readouterr().out.splitlines() if "Inf or NaN" in line]
    assert len(lines) == 1 and lines[0].startswith("Inf or NaN in the gradients of iteration 2: first made by rank 0 (node ")
    events = [record for record in read_history(tmp_path / "history.jsonl") if record["kind"] == "event"]
    assert events == [{"kind": "event", "iteration": 2, "text": lines[0]}] and json.dumps(events)


@pytest.mark.parametrize(("keys", "rank"), [
    ([None, None, None], None), ([None, (3, 1), (2, 9)], 2), ([(2, 9), (2, 1), None], 1), ([(1, 1), (1, 1), (1, 1)], 0)])
def test_the_rank_with_the_least_key(keys, rank):
    assert ThreadWorld(3).run(lambda world: first_rank(world, keys[world.rank], 2)) == [rank] * 3
