"""An activation, a norm, a mixer, an optimizer, a learning-rate shape and a schedule of a module outside the package."""

import pytest

from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.nn.ops import Ops
from fugaku_megatron.pipeline.schedule import build
from fugaku_megatron.pipeline.schedule_names import ONE_F_ONE_B
from tests.checks.allocations import plan_memory, state_bytes
from tests.checks.costs import check_bytes, check_kept, check_parameters
from tests.checks.moments import BF16_MOMENTS, EIGHT
from tests.helpers import PP2, TP2, make_trainer, parse_layout, small_run, train
from tests.llama_models import DELTA_NETS
from tests.outside_rows import ROWS
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel


@pytest.fixture(autouse=True)
def rows(monkeypatch):
    """The rows, until the test ends."""
    for table, name, row in ROWS:
        monkeypatch.setitem(table, name, row)


def losses(run, backend: str = "native", *, ranks: int) -> list[float]:
    """Losses of three iterations."""

    def work(world):
        return [result.loss for result in train(world, run, 3, Ops.build(backend))]

    if ranks == 1:
        return work(SoloComm())
    first, second = ThreadWorld(ranks).run(work)
    assert first == second
    return first


PLAIN = {"disable_bias_linear": True}
GATE = {"activation_func": "gate"}
SWIGLU = {"swiglu": True}
SQUARE = {"activation_func": "square"}
SQUARED_RELU = {"squared_relu": True}
RMS = {"normalization": "RMS", **PLAIN}
RMS_NORM = {"normalization": "RMSNorm", **PLAIN}
SEQUENCE = {**TP2, "sequence_parallel": True}
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, **PLAIN}
MEAN = {"layer_types": "M-,*-,M-,M"}
STYLE = "lr_decay_style"


@pytest.mark.parametrize(
    ("ours", "built_in", "layout", "ranks"),
    [
        (GATE, SWIGLU, {}, 1),
        (GATE, SWIGLU, TP2, 2),
        (GATE, SWIGLU, {**SEQUENCE, "tp_comm_overlap": True}, 2),
        (GATE, SWIGLU, {**PP2, "pipeline_schedule": "zb-h1"}, 2),
        ({**GATE, **EXPERTS}, {**SWIGLU, **EXPERTS}, TP2, 2),
        (SQUARE, SQUARED_RELU, {}, 1),
        (SQUARE, SQUARED_RELU, TP2, 2),
        (RMS, RMS_NORM, {}, 1),
        (RMS, RMS_NORM, TP2, 2),
        (RMS, RMS_NORM, SEQUENCE, 2),
        ({"optimizer": "own_adamw"}, {}, {"weight_decay": 0.1}, 1),
        ({"optimizer": "own_adamw"}, {}, {"zero_stage": 1, "bf16": True}, 2),
        ({STYLE: "straight"}, {STYLE: "linear"}, {}, 1),
    ],
)
def test_losses_are_those_of_the_built_in_row(ours, built_in, layout, ranks):
    layout = {**layout, "lr": 1e-2}
    backend = "torch" if ranks == 1 else "native"
    own = losses(small_run(**ours, **layout), backend, ranks=ranks)
    expected = losses(small_run(**built_in, **layout), backend, ranks=ranks)
    tolerance = 2e-4 if "bf16" in layout else 5e-5
    assert own == pytest.approx(expected, rel=tolerance)
    assert abs(own[2] - own[0]) > 10 * tolerance * own[0]


OPTIMIZER_RUNS = [
    *({"optimizer": name} for name in ("adam", "muon", "own_adamw", "momentum", "descent")),
    BF16_MOMENTS,
    {**BF16_MOMENTS, "optimizer": "muon"},
    {**BF16_MOMENTS, "exp_avg_sq_dtype": "fp32"},
    {**DELTA_NETS, "optimizer": "muon"},
    {"bf16": True, "use_precision_aware_optimizer": True, "main_params_dtype": "bf16"},
    EIGHT,
]


@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        (changes, layout)
        for changes in OPTIMIZER_RUNS
        for layout in ("", "dp2 zero", "tp2 pp2 dp2 bf16")
        # with ZeRO-1 the plan of 8-bit moments is an upper limit: tests/optim/test_int8.py
        if changes != EIGHT or "zero" not in layout
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(map(str, value.values())),
)
def test_the_plan_has_the_optimizer_s_memory(changes, layout):
    """Moments and master weights on the fullest rank of each stage, to 1 %."""
    ranks, options = parse_layout(layout)
    run = small_run(**{**changes, **options})
    stages = run.parallel.pipeline_model_parallel_size
    held = [
        state_bytes(make_trainer(SoloComm(rank, ranks), run).optimizer) for rank in range(ranks)
    ]
    for stage in range(stages):
        tp = run.parallel.tensor_model_parallel_size
        of_stage = [held[rank] for rank in range(ranks) if rank // tp % stages == stage]
        planned = plan_memory(run, ranks, stage).optimizer
        assert max(of_stage) == pytest.approx(planned, rel=0.01)


@pytest.mark.parametrize("name", ["momentum", "descent"])
def test_an_optimizer_without_both_moments_trains_in_layouts_and_resumes(name, tmp_path):
    flags = {"optimizer": name, "lr": 0.01}
    expected = losses(small_run(**flags), ranks=1)
    assert losses(small_run(**flags, zero_stage=1), ranks=2) == pytest.approx(expected, rel=5e-5)
    assert expected[2] < expected[0]
    trainer = make_trainer(SoloComm(), small_run(**flags))
    trainer.train_step()
    trainer.save(str(tmp_path))
    resumed = make_trainer(SoloComm(), small_run(**flags))
    resumed.load(str(tmp_path))
    assert resumed.train_step().loss == trainer.train_step().loss


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_layouts_of_the_mixer_have_the_losses_of_one_rank(optimizer):
    changes = {**MEAN, "optimizer": optimizer, "lr": 1e-2}
    expected = losses(small_run(**changes), ranks=1)
    assert losses(small_run(**changes, **SEQUENCE), ranks=2) == pytest.approx(expected, rel=5e-5)
    assert abs(expected[2] - expected[0]) > 1e-3 * expected[0]


def test_the_schedule_trains_as_1f1b():
    """The order of the micro-batches' backwards is the same, so every bit is."""
    own = losses(small_run(**PP2, pipeline_schedule="gpipe"), ranks=2)
    assert own == losses(small_run(**PP2), ranks=2)
    first, later = (build(name, 2, 1, 8).in_flight(0) for name in ("gpipe", ONE_F_ONE_B))
    assert (first[0].activations, later[0].activations) == ((8,), (2,))


def test_rows_are_accounted_for():
    """Parameters, FLOPs, messages and saved bytes."""
    for changes in (GATE, SQUARE, RMS, MEAN):
        check_parameters(small_run(**changes, **TP2), 2)
        check_bytes(small_run(**changes, **TP2), 2)
        check_kept(small_run(**changes))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"activation_func": "cube"}, "--activation-func is cube, .*: pass gate or square"),
        ({"activation_func": "swiglu"}, "--activation-func swiglu has a flag .*: pass --swiglu"),
        ({"activation_func": "gate", "swiglu": True}, "--swiglu and --activation-func exclude"),
        ({"normalization": "RMS", "qk_layernorm": True}, "for LayerNorm and RMSNorm"),
        (
            {"normalization": "BatchNorm"},
            "--normalization is BatchNorm: pass LayerNorm or .* or RMS",
        ),
        ({"optimizer": "sgd"}, "--optimizer is sgd: pass adam or muon or dist_muon or own_adamw"),
        (
            {
                "optimizer": "own_adamw",
                "use_precision_aware_optimizer": True,
                "exp_avg_dtype": "bf16",
            },
            "supported with AdamW, not with --optimizer own_adamw: pass fp32",
        ),
        ({STYLE: "curved"}, "--lr-decay-style is curved: pass .* or straight"),
        ({**PP2, "pipeline_schedule": "all"}, "--pipeline-schedule is all: pass .* gpipe or auto"),
    ],
)
def test_mistakes_name_the_rows(flags, message):
    with pytest.raises(ValueError, match=message):
        small_run(**flags)
