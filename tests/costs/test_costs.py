"""The formulas in costs/ against a model's parameters, FLOPs, messages and memory, and against benchmark tables."""

import threading
from dataclasses import asdict, replace

import psutil
import pytest
import torch

from fugaku_megatron.cli.arguments import make_run
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.freezing import FreezingConfig
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.costs import memory
from fugaku_megatron.costs.attention import attention_workspace_bytes
from fugaku_megatron.costs.context_parallel import key_working_bytes, p2p_keys
from fugaku_megatron.costs.flops import hardware_flops, model_flops, parameter_flops
from fugaku_megatron.costs.layers import layer_records
from fugaku_megatron.costs.stages import model_parameters
from fugaku_megatron.host import kernels
from fugaku_megatron.planner import software, work
from tests.checks.allocations import (
    MICROBATCHES,
    MODEL,
    STAGES,
    allocated_peak,
    check_peak,
    plan_memory,
)
from tests.checks.costs import (
    check_bytes,
    check_flops,
    check_kept,
    check_parameters,
    check_quantized,
    tallies,
)
from tests.checks.experts import EXPERTS, SHARED
from tests.helpers import CP4, DROPOUT, P2P, lay_out, small_run
from tests.llama_models import DELTA_NETS, FAMILIES, LATENT

pytestmark = pytest.mark.parallel

MODELS = {
    "gpt": {},
    "gpt with dropout": DROPOUT,
    **FAMILIES,
    "plain norms in parallel": {"normalization": "PlainLayerNorm", "parallel_residual": True},
    "geglu": {"normalization": "RMSNorm", "apply_layernorm_1p": True, "geglu": True},
    "exact gelu": {"bias_gelu_fusion": False},
    "layers of one part": {
        **FAMILIES["qwen3"],
        "num_layers": 2,
        "layer_types": "-,*",
    },
    "squared relu": {"squared_relu": True, "use_z_loss": True},
    "norms after": {
        **FAMILIES["mistral"],
        "norm_placement": "post",
        "window_attn_skip_freq": "2",
        "qk_layernorm": True,
        "qk_layernorm_all_heads": True,
    },
    "gated attention": {**FAMILIES["qwen3"], "attention_output_gate": True},
    "gated delta nets": {**DELTA_NETS, "linear_num_key_heads": 4, "linear_num_value_heads": 8},
    "latent attention": LATENT,
    "latent keys": {**LATENT, "q_lora_rank": None, "qk_layernorm": False},
    "norms around and soft caps": {
        **FAMILIES["llama"],
        "norm_placement": "both",
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "sinks and scalars": {"softmax_type": "learnable", "xielu": True},
    "two mtp modules": {**FAMILIES["llama"], "mtp_num_layers": 2},
    "one norm": {
        "normalization": "LayerNormWithoutBias",
        "parallel_residual": True,
        "parallel_shared_norm": True,
        "position_embedding_type": "rope",
        "no_rope_freq": "2",
    },
}
COMPUTED_AGAIN = {"attn_logit_softcapping", "softmax_type", "experimental_attention_variant"}
FULL = {"recompute_granularity": "full"}


# What the model has ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("gpt", ""),
        ("gpt", "pp2"),
        ("gpt", "tp2 pp2 dp2"),
        *((family, "tp2 pp2") for family in FAMILIES),
        ("norms after", "tp2 pp2"),
        ("one norm", "tp2"),
        ("sinks and scalars", "tp2 pp2"),
        ("layers of one part", "tp2 pp2"),
        ("gated attention", "tp2 pp2"),
        ("gated delta nets", "tp2 pp2"),
        ("two mtp modules", ""),
        ("two mtp modules", "tp2 pp2"),
        ("two mtp modules", "pp2 untie_embeddings_and_output_weights"),
        ("two mtp modules", "pp2 pipeline_split='2,0'"),
        ("latent attention", "tp2 pp2"),
        ("latent keys", "tp2 pp2"),
    ],
)
def test_parameters_are_those_of_the_stages(model, layout):
    check_parameters(*lay_out(layout, MODELS[model]))


@pytest.mark.parametrize(
    ("recipe", "count"),
    [
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.1-8b", 8_030_261_248),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen3-0.6b", 596_049_920),
        ("tinyllama-1.1b", 1_100_048_384),
        ("mistral-7b", 7_241_732_096),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("llm-jp-4-8b", 8_590_200_832),
        ("llm-jp-4-32b-a3b", 32_139_028_992),
        ("124m", 124_439_808),
        ("30b", pytest.approx(30e9, rel=0.01)),
    ],
)
def test_recipes_have_the_published_number_of_parameters(recipe, count):
    assert (
        model_parameters(
            make_run(recipe, {"make_vocab_size_divisible_by": 1} if recipe == "124m" else {})
        )
        == count
    )


# What it computes -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "dropout"),
    [
        ("gpt", 0.1),
        # The backward of attention in blocks, with soft caps or sinks, and of the delta rule computes parts of the forward again.
        *((name, 0.0) for name, flags in MODELS.items() if not COMPUTED_AGAIN & flags.keys()),
    ],
)
def test_flops_are_torchs(model, dropout):
    check_flops(
        small_run(
            **{
                **MODELS[model],
                "num_layers": 2,
                "attention_dropout": dropout,
                "micro_batch_size": 1,
            }
        )
    )


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({}, "int8"),
        ({}, "int8 int8_wgrad"),
        ({}, "int8 int8_wgrad int8_head full"),
        (FAMILIES["qwen3"], "int8 int8_head bf16"),
        (LATENT, "int8 int8_wgrad"),
        ({**EXPERTS, **SHARED}, "int8"),
        ({**EXPERTS, **SHARED}, "int8 int8_wgrad"),
        ({}, "int8 int8_wgrad lora_rank=4"),
        (MODELS["two mtp modules"], "int8 int8_wgrad int8_head"),
    ],
)
def test_matmuls_in_int8_are_those_of_the_trainer(changes, flags):
    check_quantized(lay_out(flags, changes)[0])


def test_flops_of_an_iteration():
    """GPT-2's formulas and a block with other widths give the FLOPs: matmuls of 2 FLOPs a term, backward twice forward."""
    run = make_run("llama-3.2-1b", {"seq_length": 4096})
    layer = 2048 * (2048 + 2 * 512) + 2048 * 2048 + 3 * 2048 * 8192  # qkv, projection, MLP
    # with half of attention's square
    expected = 4096 * (6 * (16 * layer + 128256 * 2048) + 6 * 16 * 2048 * 4096)
    assert model_flops(run, 1) == pytest.approx(expected, rel=1e-12)
    # 8192 tokens, of which a token sees the last 4096: 3/4 of the triangle
    mistral = make_run("mistral-7b", {})
    whole = make_run("mistral-7b", {"window_size": None})
    assert model_flops(whole, 1) - model_flops(mistral, 1) == pytest.approx(
        32 * 12 * 4096 * 8192**2 / 8, rel=1e-9
    )
    products = [
        work.phases(run, software.load("fugaku_megatron"))["layer_forward"].matmuls
        for run in (whole, mistral)
    ]
    assert [{p.visible for p in each if p.attention} for each in products] == [{0.5}, {0.375}]


def test_flops_of_documents():
    """FLOPs follow from measured documents, and from a mean document length, as predict and plan use it."""
    changes = {"seq_length": 4096, "recompute_granularity": "selective"}
    run = make_run("llama-3.2-1b", changes)
    short = make_run(
        "llama-3.2-1b", {**changes, "reset_attention_mask": True, "mean_document_length": 512}
    )
    # of attention over one more token of a document, of all tokens and layers
    square = 16 * 4 * 2048 * 4096
    assert hardware_flops(run, 3) - hardware_flops(run, 3, 3 * 8 * 512**2) == pytest.approx(
        3 * 4 * square * (4096 - 512)
    )
    assert hardware_flops(short, 3) == pytest.approx(hardware_flops(run, 3, 3 * 8 * 512**2))
    assert hardware_flops(short, 3, 3 * 4096**2) == pytest.approx(hardware_flops(run, 3))
    assert model_flops(run, 3) - model_flops(short, 3) == pytest.approx(
        3 * 3 * square * (4096 - 512) / 2
    )
    attended = [
        [
            p
            for p in work.phases(r, software.load("fugaku_megatron"))["layer_forward"].matmuls
            if p.attention
        ]
        for r in (run, short)
    ]
    whole, parts = (sum(p.m * p.n * p.k * p.count * p.visible for p in each) for each in attended)
    assert parts == whole / 8


def test_parameter_flops_reproduce_the_tables():
    # The A100 table's 187B row: h 13824, 80 layers, 40 nodes of 8, 160.29 s, printed 120.05
    run = make_run(
        None,
        {
            "num_layers": 80,
            "hidden_size": 13824,
            "num_attention_heads": 108,
            "seq_length": 2048,
            "vocab_size": 50257,
            "micro_batch_size": 1,
            "global_batch_size": 2048,
            **FULL,
            "train_iters": 1,
        },
    )
    assert parameter_flops(run, 2048) / 160.29 / 320 / 1e12 == pytest.approx(120.02, abs=0.005)
    split = make_run(
        None,
        {
            **asdict(run.model),
            **asdict(run.batch),
            **FULL,
            "tensor_model_parallel_size": 8,
            "pipeline_model_parallel_size": 10,
        },
    )
    assert parameter_flops(split, 2048, replicas=True) / 160.29 / 320 / 1e12 == pytest.approx(
        120.05, abs=0.008
    )


# What it sends --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("gpt", "overlap ddp_bucket_size=20_000 grad_reduce_in_bf16"),
        ("gpt", "tp2"),
        ("gpt", "pp2 full"),
        (
            "gpt",
            "tp2 pp2 zero overlap_grad_reduce overlap_param_gather ddp_bucket_size=20000 grad_reduce_in_bf16",
        ),
        (
            "gpt",
            "dp4 zero overlap_grad_reduce overlap_param_gather ddp_bucket_size=20000 grad_reduce_in_bf16",
        ),
        ("gpt", "tp2 pp2 dp2 zero"),
        ("gpt", "tp2 sequence freeze=('embedding',) freeze_first_layers=1"),
        ("gpt", "tp2 dp2 zero sequence freeze=('layers',)"),
        ("gpt", "tp2 sequence blocks full"),
        ("gpt", "tp2 pp2 sequence full"),
        ("gpt", "tp2 pp2 dp2 overlap sequence bf16"),
        ("qwen3", "cp2 pp2"),
        ("gpt", "cp2 dp2 overlap"),
        ("qwen3", "cp4 zero allgather"),
        ("gpt", "cp2 tp2 pp2 sequence allgather bf16"),
        ("qwen3", "tp2 pp2 zero"),
        ("norms after", "tp2 pp2 sequence full"),
        ("gated delta nets", "tp2 cp2 sequence"),
        ("latent attention", "tp2 cp2"),
        ("latent attention", "tp2 cp2 sequence"),
        ("latent keys", "tp2 cp2 sequence allgather"),
        ("qwen3", "tp2 pp2 sequence blocks"),
        ("layers of one part", "tp2 pp2 sequence"),
        ("two mtp modules", "tp2 pp2"),
        ("two mtp modules", "tp2 pp2 sequence"),
        ("two mtp modules", "cp2 pp2 zero"),
    ],
)
def test_bytes_are_those_communicated(model, layout):
    check_bytes(*lay_out(layout, MODELS[model]))


@pytest.mark.parametrize(
    "layout",
    ["cp2 bf16", "cp4", "cp4 window_size='2,0'", "cp4 tp2 sequence"],
)
def test_keys_that_are_passed_are_those_counted(layout):
    """Every rank passes as many keys as the formula says; a record has the keys of the rank that sends most."""
    run, world = lay_out(layout, P2P)
    layout = Layout.from_run(run, world)
    model = run.model
    e = run.element_bytes
    passed = p2p_keys(model.seq_length, layout.cp, model.window)
    of_key = run.batch.micro_batch_size * 2 * model.query_groups // layout.tp * model.kv_channels
    microbatches = layout.microbatches(run, layout.global_batch_size(run)) * model.num_layers
    for rank, tally in enumerate(tallies(run, world)):
        sent, got = passed[rank // layout.tp % layout.cp]
        assert tally["cp", "send"][1] == microbatches * of_key * (2 * sent * e + got * 4)
    record = next(r for r in layer_records(run) if r.name == "attention")
    most_sent, most_got = (max(row) * of_key for row in zip(*passed, strict=True))
    assert sum(c.bytes for c in record.forward) == pytest.approx(most_sent * e, abs=layout.cp * e)
    assert sum(c.bytes for c in record.backward) == pytest.approx(
        most_sent * e + most_got * 4, abs=layout.cp * 8
    )


# What it keeps --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("gpt", ""),
        ("gpt", "tp2 bf16"),
        ("gpt with dropout", "selective"),
        ("gpt with dropout", "tp2 sequence bf16"),
        ("gpt", "tp2 sequence full"),
        ("llama", "bf16"),
        ("llama", "tp2 sequence selective"),
        ("qwen3", "tp2 full"),
        ("plain norms in parallel", ""),
        ("norms after", "tp2 sequence"),
        ("norms after", "full"),
        ("norms around and soft caps", "selective"),
        ("one norm", "tp2 sequence"),
        ("gated attention", "tp2 selective"),
        ("gated delta nets", "tp2 sequence"),
        ("gated delta nets", "cp2 selective"),
        ("latent attention", "tp2 sequence"),
        ("latent attention", "tp2 sequence lora_rank=4"),
        ("latent attention", "tp2 selective bf16"),
        (
            "latent attention",
            "tp2 sequence selective recompute_modules=('core_attn','mla_up_proj')",
        ),
        ("latent keys", "cp2 p2p"),
        ("latent attention", "tp2 sequence selective lora_rank=4"),
        ("geglu", "tp2 sequence"),
        ("two mtp modules", ""),
        ("two mtp modules", "tp2 bf16"),
        ("two mtp modules", "tp2 sequence"),
        ("two mtp modules", "full"),
        ("two mtp modules", "selective"),
        ("exact gelu", "tp2 bf16"),
        ("squared relu", "tp2 sequence"),
        ("qwen3", "tp2 sequence"),
        ("qwen3", "lora_rank=4"),
        ("gpt", "tp2 sequence lora_rank=4"),
        ("gpt", "tp2 sequence freeze=('embedding',) freeze_first_layers=1"),
        ("gpt", "full freeze=('embedding',) freeze_first_layers=1"),
        ("gated delta nets", "tp2 sequence lora_rank=4"),
        ("gpt with dropout", "cp2"),
        ("gpt with dropout", "cp4 p2p"),
        ("qwen3", "cp2 p2p selective"),
        ("llama", "cp2 allgather bf16"),
        ("layers of one part", "tp2 sequence selective"),
        ("layers of one part", "full recompute_num_layers=2"),
    ],
)
def test_saved_bytes_are_those_that_autograd_keeps(model, layout):
    check_kept(lay_out(layout, MODELS[model])[0])


@pytest.mark.parametrize(
    ("heads", "groups", "seq_length", "value_size"),
    [
        (2, 2, 12288, 64),
        (2, 2, 12288, 16),
        (4, 2, 6144, 64),
        pytest.param(2, 1, 36864, 64, marks=pytest.mark.full),
    ],
)
def test_memory_of_attention_is_that_of_its_kernels(heads, groups, seq_length, value_size):
    """A new thread has no buffers. Forward touches fewer buffers than backward."""
    kind = {"group_query_attention": True, "num_query_groups": groups, "kv_channels": 64}
    if value_size < 64:
        kind = {**LATENT, "qk_head_dim": 60, "qk_pos_emb_head_dim": 4, "v_head_dim": value_size}
    run = small_run(
        **{**kind, "num_attention_heads": heads, "seq_length": seq_length, "micro_batch_size": 1}
    )
    qkv = torch.zeros(seq_length, 1, (heads + groups) * 64 + groups * value_size)
    dout = torch.zeros(seq_length, 1, heads * value_size)
    lse = torch.full((1, heads, seq_length), float("inf"))  # every probability is 0
    dqkv = torch.zeros_like(qkv)
    process = psutil.Process()
    grown = list[int]()

    def backward() -> None:
        torch.set_num_threads(1)
        before = process.memory_info().rss
        kernels.attention_backward(qkv, dout, lse, dout, dqkv, key_size=64)
        grown.append(process.memory_info().rss - before)

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert grown == [pytest.approx(attention_workspace_bytes(run, 1), rel=0.05, abs=2 << 20)]


@pytest.mark.parametrize(
    ("block", "stage", "layout"),
    [
        ("qwen3", 3, "selective"),
        ("qwen3", 1, "full"),
        ("qwen3", 0, "zb-h1"),
        ("qwen3", 1, "lora_rank=4"),
        ("qwen3", 0, "lora_rank=4"),
        ("qwen3", 3, "lora_rank=4"),
        ("qwen3", 0, "freeze=('embedding',) freeze_first_layers=1"),
        ("gated delta nets", 1, "selective"),
        ("gated delta nets", 0, ""),
        ("gated delta nets", 3, "full"),
        ("gated delta nets", 1, "lora_rank=4"),
        ("latent attention", 0, ""),
        ("latent attention", 1, "selective recompute_modules=('mla_up_proj',)"),
        ("latent attention", 1, "selective recompute_modules=('core_attn','mla_up_proj')"),
        ("latent attention", 3, "full"),
        ("latent attention", 0, "zb-h1"),
        ("latent keys", 2, "selective"),
        ("latent attention", 1, "lora_rank=4"),
    ],
)
def test_peak_of_another_block(block, stage, layout):
    widths = {"ffn_hidden_size": 192, "num_attention_heads": 8, "kv_channels": 16}
    model = {**FAMILIES, **MODELS}[block]
    run, _ = lay_out(layout, {**model, **MODEL, **widths})
    check_peak(SoloComm(stage, STAGES), run)


@pytest.mark.parametrize(
    ("stage", "layout"),
    [
        (0, "freeze=('embedding',) freeze_first_layers=8"),
        (1, "full freeze=('embedding',) freeze_first_layers=12"),
        (3, "freeze=('embedding','layers')"),
    ],
)
def test_layers_without_backward_need_at_most_the_bytes_of_one_layer(stage, layout):
    run, _ = lay_out(layout, {**FAMILIES["qwen3"], **MODEL})
    planned = plan_memory(run, STAGES, stage, MICROBATCHES)
    whole = plan_memory(replace(run, freezing=FreezingConfig()), STAGES, stage, MICROBATCHES)
    measured = allocated_peak(SoloComm(stage, STAGES), run)
    assert measured <= planned.activations + planned.logits
    assert planned.total < 0.5 * whole.total


@pytest.mark.parametrize(
    ("model", "stage", "schedule"),
    [
        ("geglu", 0, "zb-h1"),
        ("exact gelu", 3, "zb-h1"),
        ("squared relu", 0, "zbv"),
        ("squared relu", 3, "zbv"),
    ],
)
def test_peak_of_a_split_backward_with_other_activations(model, stage, schedule):
    """Between the halves of a backward the argument and its gradient are kept, and the activation's values are not."""
    run = small_run(**{**MODELS[model], **MODEL, "pipeline_schedule": schedule})
    check_peak(SoloComm(stage, STAGES), run)


def test_peak_of_a_split_backward_of_layers_of_one_part():
    types = ",".join(["*,*-,-,*-"] * (MODEL["num_layers"] // 4))
    run = small_run(**{**MODEL, "layer_types": types, "pipeline_schedule": "zb-h1"})
    check_peak(SoloComm(0, STAGES), run)


class HeldTensor:
    def __init__(self, tensor):
        self.tensor = tensor

    def wait(self):
        self.tensor = None


class HoldingComm(SoloComm):
    """Its sends hold their tensors until somebody waits for them, as MPI's do."""

    def isend(self, tensor, dst, tag=0):
        return HeldTensor(tensor)

    def subgroup(self, ranks):
        return HoldingComm(ranks.index(self.rank), len(ranks))


@pytest.mark.parametrize(
    ("rank", "layout"),
    [
        (0, "cp2 p2p"),
        (0, "cp4 p2p"),
        (3, "cp4 p2p bf16"),
        (1, "cp2 allgather"),
        (0, "cp4 allgather bf16"),
    ],
)
def test_peak_where_ranks_exchange_keys(rank, layout):
    """In these layers attention needs more memory than the MLP."""
    flags = {
        "num_layers": 2,
        "ffn_hidden_size": 16,
        "num_attention_heads": 8,
        "kv_channels": 16,
        "seq_length": 768,
        "max_position_embeddings": 768,
        "global_batch_size": 2,
    }
    run, ranks = lay_out(layout, flags)
    assert memory.working_bytes(run) == key_working_bytes(run)
    check_peak(HoldingComm(rank, ranks), run, microbatches=1)


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        # a quarter of what the layers keep holds half of the logits
        ({"micro_batch_size": 1}, 512),
        ({"micro_batch_size": 4}, 1024),  # the most
        ({"micro_batch_size": 1, **FULL}, 171),  # the least memory, in equal chunks
        ({"micro_batch_size": 1, "tensor_model_parallel_size": 4}, 1024),
    ],
)
def test_rows_of_logits(changes, rows):
    run = make_run("124m", {"vocab_size": 50257, **changes})
    assert memory.logits_rows(run) == rows


# How it is cut --------------------------------------------------------------------------------------------------------------------


def test_memory_of_attention_is_that_of_the_layer_which_needs_most():
    """Layers with different --cp-comm-type need as much as the largest. Saved bytes and FLOPs are counted as in most layers."""

    def of(*ways):
        run = small_run(num_layers=3, num_attention_heads=8, **CP4, cp_comm_type=ways)
        return run, attention_workspace_bytes(run, 4), key_working_bytes(run)

    _, *heads = of("a2a")
    _, *keys = of("p2p")
    run, *mixed = of("p2p", "a2a", "a2a")
    assert mixed == [max(pair) for pair in zip(heads, keys, strict=True)] and heads != keys
    assert layer_records(run) == layer_records(run, cp_comm_type="a2a")
