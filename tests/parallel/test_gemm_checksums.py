"""--abft: a wrong product is found and named, right ones are let pass."""

from __future__ import annotations

import pytest
import torch

from fugaku_megatron.comm.solo import SoloComm
from fugaku_megatron.config.arguments import make_run
from fugaku_megatron.host import kernels
from fugaku_megatron.host.observed import Observed
from fugaku_megatron.nn.ops import Ops
from fugaku_megatron.training.checksums import ALL, PRODUCTS, Checksums, compare
from fugaku_megatron.training.session import Session
from tests.helpers import SMALL, make_trainer, small_run, train
from tests.llama_models import FAMILIES
from tests.parallel.test_session import Writer
from tests.threads import ThreadWorld

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "lr": 1e-2}
TP = "tensor_model_parallel_size"


def flipped(kernel: str, call: int, bit: int, repeated: bool = False) -> Observed:
    """The kernels, of which one flips a bit of its result's element [1, 2] in its `call`-th call, and the next if `repeated`."""
    calls = []

    def observe(name, function, args, kwargs):
        function(*args, **kwargs)
        calls.append(name)
        if len(calls) - 1 in (call, call + repeated):
            result = args[5] if name == PRODUCTS[0] and len(args) > 5 else args[2]  # what comes before a GELU
            result.data.view(torch.int32)[1, 2] ^= 1 << bit

    return Observed(kernels, (kernel,), observe)


def checked(world, run, library=kernels, layers=(ALL,), iterations: int = 2) -> tuple[list[str | None], list[float]]:
    """Reports and losses of some iterations."""
    torch.set_num_threads(1)
    checksums = Checksums(layers)
    trainer = make_trainer(world, run, Ops.build(kernels=checksums.observe(library)))
    checksums.watch(trainer.optimizer.flat)
    steps = [(trainer.train_step().loss, checksums.report(world)) for _ in range(iterations)]
    trainer.close()
    return [report for _, report in steps], [loss for loss, _ in steps]


@pytest.mark.parametrize("changes", [
    {}, {"bf16": True}, {"fp16": True, "initial_loss_scale": 2.0**40}, {"hidden_size": 64, "seq_length": 64, "vocab_size": 960},
    {"recompute_granularity": "full"}, {"disable_bias_linear": True}, {"lr": 0.5}], ids=str)
def test_right_products_pass_and_keep_their_bits(changes):
    run = small_run(num_layers=2, **{**DROPOUT, **changes})
    reports, losses = checked(SoloComm(), run, iterations=8)
    assert reports == [None] * 8 and losses == [step.loss for step in train(SoloComm(), run, 8)]


@pytest.mark.parametrize("layout", [{TP: 2, "sequence_parallel": True},
                                    {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zbv"}])
def test_right_products_of_several_ranks_pass(layout):
    for reports, _ in ThreadWorld(2).run(lambda world: checked(world, small_run(**DROPOUT, **layout))):
        assert reports == [None] * 2


# Calls of a micro-batch of one layer: forward qkv, proj, fc1, fc2, head; gradients of inputs head, the MLP's inner one, fc1 ...; of
# weights head, fc2, fc1 ...
@pytest.mark.parametrize(("kernel", "call", "named"), [
    ("linear_forward", 2, "result of decoder.layers.0.mlp.linear_fc1.weight"),
    ("linear_forward", 8, "result of decoder.layers.0.mlp.linear_fc2.weight"),
    ("linear_forward", 5 + 5 + 1, "result of decoder.layers.0.self_attention.linear_proj.weight"),
    ("linear_data_gradient", 2, "gradient of the input of decoder.layers.0.mlp.linear_fc1.weight"),
    ("linear_data_gradient", 0, "gradient of the input of embedding.word_embeddings.weight"),
    ("linear_weight_gradient", 0, "gradient of the weight of embedding.word_embeddings.weight"),
    ("linear_weight_gradient", 5 + 3, "gradient of the weight of decoder.layers.0.self_attention.linear_proj.weight"),
])
def test_a_wrong_product_is_named(kernel, call, named):
    run = small_run(num_layers=1)
    reports, losses = checked(SoloComm(), run, flipped(kernel, call, 29))
    assert reports[0].startswith("rank 0 (node ") and f", {named}: row 1 sums to " in reports[0], reports
    assert reports[0].endswith("; it was added" if kernel == PRODUCTS[2] else "; computed again it is right")
    assert reports[1] is None
    same = losses == [step.loss for step in train(SoloComm(), run, 2)]
    assert same or kernel == PRODUCTS[2], "the second result stays"


@pytest.mark.parametrize(("kernel", "call", "named"), [
    ("linear_forward", 2, "result of decoder.layers.0.mlp.linear_fc1.weight"),
    ("linear_data_gradient", 1, "gradient of the input of decoder.layers.0.mlp.linear_fc2.weight"),
    ("linear_weight_gradient", 0, "gradient of the weight of output_layer.weight")])
def test_a_wrong_product_of_other_blocks_is_named(kernel, call, named):
    """A gated MLP has one product for its gates and what they multiply, and no derivative in another product's epilogue."""
    reports, _ = checked(SoloComm(), small_run(**{**FAMILIES["qwen3"], "num_layers": 1}), flipped(kernel, call, 29))
    assert f", {named}: row 1 sums to " in reports[0] and reports[1] is None


def test_right_products_of_other_blocks_are_let_pass():
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    assert ThreadWorld(2).run(lambda world: checked(world, small_run(**FAMILIES["qwen3"], **layout))[0]) == [[None] * 2] * 2


def test_a_product_that_is_wrong_again():
    reports, _ = checked(SoloComm(), small_run(num_layers=1), flipped("linear_forward", 1, 30, repeated=True))
    assert reports[0].endswith("; computed again it is wrong")


def test_only_chosen_layers_are_checked():
    run = small_run(num_layers=3, pipeline_split="3")
    calls = {layer: 4 * layer + 2 for layer in range(3)}  # the first micro-batch's fc1
    for layer, call in calls.items():
        reports, _ = checked(SoloComm(), run, flipped("linear_forward", call, 29), layers=("1",), iterations=1)
        assert (reports[0] is not None) == (layer == 1)


def test_the_rank_is_named():
    def rank(world):
        return checked(world, small_run(num_layers=1), flipped("linear_forward", 3, 30) if world.rank == 2 else kernels)[0]

    reports = ThreadWorld(4).run(rank)
    assert all(report == reports[0] for report in reports) and reports[0][0].startswith("rank 2 (node ") and reports[0][1] is None


def test_the_tolerance_is_above_rounding_and_far_below_an_element():
    torch.manual_seed(0)
    for m, n, k in ((64, 512, 512), (256, 128, 4096), (32, 4096, 64), (16, 20000, 64)):
        for mean in (0.0, 1.0):  # sums that cancel, and sums that grow
            left, right = torch.randn(m, k) + mean, torch.randn(n, k) + mean
            product = left @ right.t()
            assert compare(left, right, product) is None
            product[m // 2, n // 3] += (0.5 if mean else 0.05) * product.square().mean().sqrt()
            found = compare(left, right, product)
            assert found and found.row == m // 2 and found.tolerance < abs(found.sum - found.checksum)
    assert compare(left * torch.inf, right, product) is None, "an Inf that came in"
    for value in (torch.nan, torch.inf, 1e36):
        product[3, 3] = value
        assert compare(left, right, product).row == 3


def test_the_session_tells_it():
    checksums, log = Checksums(("0",)), Writer()
    trainer = make_trainer(SoloComm(), small_run(num_layers=1, train_iters=3),
                           Ops.build(kernels=checksums.observe(flipped("linear_forward", 41, 29))))
    checksums.watch(trainer.optimizer.flat)
    Session(trainer, log, 3, False, checksums=checksums).run()
    trainer.close()
    assert len(log.lines) == 1 and log.lines[0].startswith("wrong product in iteration 2: rank 0 (node ")


@pytest.mark.parametrize(("changes", "message"), [
    ({"abft": ("x",)}, "^--abft x: pass numbers of layers, from 0, or all$"),
    ({"abft": ("-1",)}, "^--abft -1: pass numbers of layers"),
    ({"abft": ("0", "4")}, "^--abft 4: the model has layers 0 to 3: pass some of them, or all$"),
    ({"abft": ("all",), "kernels": "torch"}, "^--abft is for the C\\+\\+ kernels"),
    ({"abft": ("all",), "fp16": True, "fp16_accumulation_chunk": 64}, "^--abft is for the C\\+\\+ kernels")])
def test_what_cannot_be_checked_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make_run(None, {**SMALL, **changes})
