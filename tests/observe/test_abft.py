"""Checks with --abft: flipped bits in matmuls are found and named, right matmuls pass."""

import re

import pytest
import torch

from fugaku_megatron.checkpoint.load import open_checkpoint
from fugaku_megatron.checkpoint.trusted import read_fault
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.host import kernels
from fugaku_megatron.host.observed import Observed
from fugaku_megatron.nn.ops import Ops
from fugaku_megatron.observe.numbers.abft import ALL, REPEATED, Checksums, compare
from fugaku_megatron.run.kernel_choice import checked_matmuls
from fugaku_megatron.run.loop import Session
from fugaku_megatron.start.exit_codes import ExitCode
from tests.checks.session import Writer
from tests.fault_injection import flipped_kernels, matmul_result
from tests.helpers import DROPOUT, PP2, TP2, make_trainer, small_run, train
from tests.llama_models import FAMILIES
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel

ROUTED = {"num_experts": 4, "moe_router_topk": 2, "swiglu": True, "disable_bias_linear": True}


def checked(
    world, run, library=kernels, layers=(ALL,), iterations: int = 2
) -> tuple[list[str | None], list[float]]:
    """Train some iterations; return their reports and losses."""
    checksums = Checksums(layers)
    trainer = make_trainer(world, run, Ops.build(kernels=checksums.observe(library)))
    checksums.watch(trainer.optimizer.flat)
    steps = [(trainer.train_step().loss, checksums.report(world)) for _ in range(iterations)]
    trainer.close()
    return [report for _, report in steps], [loss for loss, _ in steps]


@pytest.mark.parametrize(
    "changes",
    [
        {"bf16": True},
        {"fp16": True, "initial_loss_scale": 2.0**40},
        {"hidden_size": 64, "seq_length": 64, "vocab_size": 960},
        {"recompute_granularity": "full"},
        {"disable_bias_linear": True, "lr": 0.5},
        ROUTED,
        {**ROUTED, "bf16": True, "cache_packed_weights": True},
        {
            **ROUTED,
            "squared_relu": True,
            "swiglu": False,
            "moe_shared_expert_intermediate_size": 32,
        },
        {"optimizer": "muon", "bf16": True},
    ],
    ids=str,
)
def test_right_matmuls_pass_and_keep_their_bits(changes):
    run = small_run(num_layers=2, **{**DROPOUT, **changes})
    reports, losses = checked(SoloComm(), run, iterations=3)
    assert reports == [None] * 3 and losses == [step.loss for step in train(SoloComm(), run, 3)]


@pytest.mark.parametrize(
    "layout",
    [
        {**PP2, "pipeline_schedule": "zbv"},
        {**TP2, "sequence_parallel": True, **FAMILIES["qwen3"]},
        {**ROUTED, "num_layers": 2, "expert_model_parallel_size": 2},
    ],
)
def test_right_matmuls_of_several_ranks_pass(layout):
    for reports, _ in ThreadWorld(2).run(
        lambda world: checked(world, small_run(**DROPOUT, **layout))
    ):
        assert reports == [None] * 2


# Calls of a micro-batch of one layer: forward qkv, proj, fc1, fc2, head; gradients of inputs head, the MLP's inner one, fc1 ...; of
# weights head, fc2, fc1 ... A gated MLP has one matmul for gates and values, and no derivative in the epilogue of another one.
@pytest.mark.parametrize(
    ("model", "kernel", "call", "named"),
    [
        ("gpt", "linear_forward", 2, "result of decoder.layers.0.mlp.linear_fc1.weight"),
        ("gpt", "linear_forward", 8, "result of decoder.layers.0.mlp.linear_fc2.weight"),
        (
            "gpt",
            "linear_forward",
            5 + 5 + 1,
            "result of decoder.layers.0.self_attention.linear_proj.weight",
        ),
        (
            "gpt",
            "linear_data_gradient",
            2,
            "gradient of the input of decoder.layers.0.mlp.linear_fc1.weight",
        ),
        (
            "gpt",
            "linear_data_gradient",
            0,
            "gradient of the input of embedding.word_embeddings.weight",
        ),
        (
            "gpt",
            "linear_weight_gradient",
            0,
            "gradient of the weight of embedding.word_embeddings.weight",
        ),
        (
            "gpt",
            "linear_weight_gradient",
            5 + 3,
            "gradient of the weight of decoder.layers.0.self_attention.linear_proj.weight",
        ),
        ("qwen3", "linear_forward", 2, "result of decoder.layers.0.mlp.linear_fc1.weight"),
        (
            "qwen3",
            "linear_data_gradient",
            1,
            "gradient of the input of decoder.layers.0.mlp.linear_fc2.weight",
        ),
        ("qwen3", "linear_weight_gradient", 0, "gradient of the weight of output_layer.weight"),
        (
            "experts",
            "grouped_linear_forward",
            0,
            "result of decoder.layers.0.mlp.experts.linear_fc1.weight",
        ),
        (
            "experts",
            "grouped_linear_forward",
            3,
            "result of decoder.layers.0.mlp.experts.linear_fc2.weight",
        ),
        (
            "experts",
            "grouped_linear_data_gradient",
            0,
            "gradient of the input of decoder.layers.0.mlp.experts.linear_fc2.weight",
        ),
        (
            "experts",
            "grouped_linear_weight_gradient",
            1,
            "gradient of the weight of decoder.layers.0.mlp.experts.linear_fc1.weight",
        ),
    ],
)
def test_a_wrong_matmul_is_named(model, kernel, call, named):
    changes = ROUTED if model == "experts" else FAMILIES.get(model, {})
    run = small_run(**{**changes, "num_layers": 1})
    reports, losses = checked(SoloComm(), run, flipped_kernels(kernel, call, 29))
    assert re.match(
        rf"rank 0 \(node .*, cores? [0-9,-]+\), {re.escape(named)}: (expert 0 .*)?row 1 sums to ",
        reports[0],
    ), reports
    assert reports[0].endswith(
        "; it is part of the gradient now"
        if kernel.endswith("linear_weight_gradient")
        else "; computed again it is correct"
    )
    assert reports[1] is None
    same = losses == [step.loss for step in train(SoloComm(), run, 2)]
    assert same or kernel.endswith("linear_weight_gradient"), "the second result stays"


def test_a_matmul_that_is_wrong_again():
    reports, _ = checked(
        SoloComm(), small_run(num_layers=1), flipped_kernels("linear_forward", 1, 30, repeated=True)
    )
    assert reports[0].endswith("; computed again it is wrong")


def test_only_chosen_layers_are_checked():
    run = small_run(num_layers=3, pipeline_split="3")
    calls = {layer: 4 * layer + 2 for layer in range(3)}  # the first micro-batch's fc1
    for layer, call in calls.items():
        reports, _ = checked(
            SoloComm(),
            run,
            flipped_kernels("linear_forward", call, 29),
            layers=("1",),
            iterations=1,
        )
        assert (reports[0] is not None) == (layer == 1)


def test_the_rank_is_named():
    def rank(world):
        return checked(
            world,
            small_run(num_layers=1),
            flipped_kernels("linear_forward", 3, 30) if world.rank == 1 else kernels,
        )[0]

    reports = ThreadWorld(2).run(rank)
    assert (
        reports[1] == reports[0]
        and reports[0][0].startswith("rank 1 (node ")
        and reports[0][1] is None
    )


def test_the_tolerance_is_above_rounding_and_far_below_an_element():
    torch.manual_seed(0)
    for m, n, k in ((64, 512, 512), (256, 128, 4096), (32, 4096, 64), (16, 20000, 64)):
        for mean in (0.0, 1.0):  # sums that cancel, and sums that grow
            left = torch.randn(m, k) + mean
            right = torch.randn(n, k) + mean
            matmul = left @ right.t()
            assert compare(left, right, matmul) is None
            matmul[m // 2, n // 3] += (0.5 if mean else 0.05) * matmul.square().mean().sqrt()
            found = compare(left, right, matmul)
            assert (
                found and found.row == m // 2 and found.tolerance < abs(found.sum - found.checksum)
            )
    assert compare(left * torch.inf, right, matmul) is None, "an Inf that came in"
    for value in (torch.nan, torch.inf, 1e36):
        matmul[3, 3] = value
        assert compare(left, right, matmul).row == 3


def test_the_session_tells_it():
    checksums = Checksums(("0",))
    log = Writer()
    trainer = make_trainer(
        SoloComm(),
        small_run(num_layers=1, train_iters=3),
        Ops.build(kernels=checksums.observe(flipped_kernels("linear_forward", 41, 29))),
    )
    checksums.watch(trainer.optimizer.flat)
    Session(trainer, log, 3, (), checksums=checksums).run()
    trainer.close()
    assert len(log.lines) == 1 and log.lines[0].startswith(
        "wrong matmul in iteration 2: rank 0 (node "
    )


def broken(kernel: str, since: int = 0, correct_again: bool = False) -> Observed:
    """Return the kernels; one is wrong in each call after `since` calls, or only in every seventh with `correct_again`."""
    calls = []

    def observe(name, function, args, kwargs):
        function(*args, **kwargs)
        calls.append(name)
        if len(calls) > since and not (correct_again and len(calls) % 7):
            matmul_result(name, args).data.view(-1)[3] += 1e3

    return Observed(kernels, (kernel,), observe)


def broken_session(directory, library, **changes):
    checksums = Checksums((ALL,))
    log = Writer()
    run = small_run(
        **{"num_layers": 1, "train_iters": 9, "save": str(directory), "save_interval": 1, **changes}
    )
    trainer = make_trainer(SoloComm(), run, Ops.build(kernels=checksums.observe(library)))
    checksums.watch(trainer.optimizer.flat)
    session = Session(trainer, log, 9, (), checksums=checksums)
    try:
        session.run()
    except SystemExit as end:
        return end.code, log.lines
    finally:
        trainer.close()
    return 0, log.lines


@pytest.mark.parametrize(
    ("kernel", "correct_again", "suspect"),
    [
        ("linear_data_gradient", False, (1, 2)),
        ("linear_weight_gradient", False, (1, 2)),
        ("linear_data_gradient", True, ()),
    ],
)
def test_a_core_that_is_wrong_again_and_again_ends_the_run(
    tmp_path, kernel, correct_again, suspect
):
    code, lines = broken_session(tmp_path, broken(kernel, correct_again=correct_again))
    assert code == ExitCode.REPLICAS_DIFFER, lines
    assert re.match(
        rf"faulty core: rank 0 \(node .*, core \d+\) computed wrong matmuls in {REPEATED} of the "
        r"last 3 iterations, "
        "up to iteration 3. Nothing is saved: ",
        lines[-1],
    ), lines[-1]
    assert read_fault(tmp_path).suspect == suspect
    if suspect:
        with pytest.raises(ValueError, match="iteration 2 is suspect"):
            open_checkpoint(tmp_path, SoloComm())
        assert lines[-1].endswith("start anew, without that node")
    else:
        assert "continue from a checkpoint of iteration 2 or before" in lines[-1]


def test_two_wrong_iterations_do_not_end_a_run(tmp_path):
    one = flipped_kernels("linear_forward", 2, 29)
    other = flipped_kernels("linear_data_gradient", 40, 29)
    library = Observed(one, ("linear_data_gradient",), other._observe)
    assert broken_session(tmp_path, library)[0] == 0


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {},
            "matmuls of all layers and of the logits checked by checksums; not checked: "
            "attention's own (scores and "
            "values), the gradient of an MLP's inner tensor, which the kernel multiplies by the "
            "activation's derivative",
        ),
        (
            ROUTED,
            "matmuls of all layers with their experts and of the logits checked by checksums; not "
            "checked: attention's own "
            "(scores and values), routers",
        ),
        ({"swiglu": True, "optimizer": "muon"}, "of the logits and of Muon checked"),
        ({"abft": ("1",), "swiglu": True}, "values), other layers and the logits"),
    ],
)
def test_the_log_names_what_is_not_checked(changes, line):
    assert line in checked_matmuls(small_run(**{"num_layers": 2, "abft": (ALL,), **changes}))
