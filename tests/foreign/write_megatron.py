"""Write the checkpoints of tests/foreign/megatron with Megatron-LM's own parser, GPTModel and dist_checkpointing, on a CPU.

    git clone https://github.com/NVIDIA/Megatron-LM; git -C Megatron-LM checkout TAG     # core_v0.16.0, say
    pip install torch einops six sentencepiece psutil
    TORCHDYNAMO_DISABLE=1 PYTHONPATH=Megatron-LM python tests/foreign/write_megatron.py ROW DIR

ROW is a row in ROWS. The expected logits come from the saved GPTModel, on one rank and in FP32.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
import typing
from itertools import repeat
from pathlib import Path

import torch
import typing_extensions
from torch.distributed.checkpoint import filesystem

BASE = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --train-iters 10 --lr 1e-4 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 60 --make-vocab-size-divisible-by 8 "
    "--transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm "
    "--no-rope-fusion --init-method-std 0.2 --hidden-dropout 0 --attention-dropout 0 "
    "--use-cpu-initialization --distributed-backend gloo --ckpt-format torch_dist"
)
LLAMA = (
    "--swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2 "
    "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights "
    "--no-bias-swiglu-fusion"
)
SHARDED = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
# row -> (tag of Megatron-LM, ranks, flags)
ROWS = {
    "gpt_tp2": ("core_v0.16.0", 2, "--tensor-model-parallel-size 2"),
    "llama_tp2_pp2": ("core_v0.16.0", 4, f"{LLAMA} {SHARDED}"),
    "llama_qk_dp2": (
        "core_v0.16.0",
        2,
        f"{LLAMA} --qk-layernorm --rotary-percent 0.5 --rotary-base 5000 --norm-epsilon 1e-6",
    ),
    "gelu_tied_rope": (
        "core_v0.16.0",
        1,
        "--position-embedding-type rope --squared-relu --add-qkv-bias --disable-bias-linear",
    ),
    "llama_0_12": ("core_v0.12.0", 1, LLAMA),
    "llama_0_13": ("core_v0.13.0", 1, LLAMA),
    "llama_0_14": ("core_v0.14.0", 1, LLAMA),
    "llama_0_15": ("core_v0.15.0", 1, LLAMA),
    "llama_0_17": ("core_v0.17.0", 1, LLAMA),
    "llama_0_18": ("core_v0.18.0", 1, LLAMA),
}
FULLY_PARALLEL = ("llama_qk_dp2",)  # data-parallel ranks share the work of saving


def without_gpu() -> None:
    """Answer Megatron-LM's questions to a GPU."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if not hasattr(typing, "override"):
        typing.override = typing_extensions.override  # of Python 3.12
    torch.cuda.get_device_capability = lambda *device: (8, 0)
    torch.cuda.get_device_properties = lambda *device: argparse.Namespace(major=8)
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *device: None
    torch.Tensor.cuda = lambda tensor, *options, **named: tensor
    filesystem._write_item = (
        functools.partial(  # whose last argument is newer than megatron-core 0.13
            filesystem._write_item,
            serialization_format=filesystem.SerializationFormat.TORCH_SAVE,
        )
    )


def arguments(flags: str, ranks: int, rank: int) -> argparse.Namespace:
    """Return the arguments that Megatron-LM saves: parsed and validated by its own code."""
    os.environ |= {"WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    from megatron.training import arguments as theirs

    sys.argv = ["pretrain_gpt.py", *BASE.split(), "--global-batch-size", str(ranks), *flags.split()]
    parser = theirs.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args = parser.parse_args()
    args.rank = rank
    args.world_size = ranks
    theirs.validate_args(args, {})
    args.padded_vocab_size = 64
    args.iteration = 10
    return args


def build(args: argparse.Namespace) -> torch.nn.Module:
    """Build this rank's GPTModel, as pretrain_gpt.py does."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.training.arguments import core_transformer_config_from_args

    config = core_transformer_config_from_args(args)
    torch.manual_seed(1234)
    spec = get_gpt_layer_local_spec(
        qk_layernorm=args.qk_layernorm, normalization=args.normalization
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
    )


def value(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a global tensor's values: a function of its name."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return 0.3 * torch.randn(shape, generator=generator) + ("norm" in name and "weight" in name)


def fill(state: dict) -> None:
    """Set every local shard to its slice of the global tensor, so that no layout changes the model."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    apply_factories(state)
    for sharded in nested_values(state):
        if isinstance(sharded, ShardedTensor):
            whole = value(sharded.key, sharded.global_shape)
            index = [
                slice(first, first + size)
                for first, size in zip(
                    sharded.global_offset,
                    (*repeat(1, sharded.prepend_axis_num), *sharded.local_shape),
                )
            ]
            sharded.data.detach().copy_(whole[tuple(index)].view(sharded.data.shape))


def work(rank: int, row: str, directory: str) -> None:
    """Save a checkpoint on one rank. A row with one rank also stores its logits."""
    without_gpu()
    _, ranks, flags = ROWS[row]
    args = arguments(flags, ranks, rank)
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelSaveStrategyWrapper,
    )

    store = f"file://{Path(directory).absolute()}.store"
    torch.distributed.init_process_group("gloo", store, rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    )
    tensor_parallel.get_cuda_rng_tracker().fork = lambda *name: contextlib.nullcontext()
    model = build(args).eval()
    state = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 10,
        "num_floating_point_operations_so_far": 0,
        "model": model.sharded_state_dict(),
    }
    fill(state)
    path = Path(directory) / "iter_0000010"
    path.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    strategy = get_default_save_sharded_strategy("torch_dist")
    if row in FULLY_PARALLEL:
        strategy = FullyParallelSaveStrategyWrapper(
            strategy, parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
    dist_checkpointing.save(state, str(path), strategy)
    tokens = torch.randint(60, (1, 24), generator=torch.Generator().manual_seed(7))
    logits = forward(model, tokens, args.pipeline_model_parallel_size)
    if rank == ranks - 1:
        (Path(directory) / "latest_checkpointed_iteration.txt").write_text("10")
        expected = {
            "by": f"megatron-core {version()}, torch {torch.__version__}",
            "row": row,
            "tokens": tokens[0].tolist(),
            "logits": [[round(number, 5) for number in line] for line in logits.tolist()],
        }
        (Path(directory) / "expected.json").write_text(json.dumps(expected) + "\n")
    torch.distributed.barrier()


def forward(model: torch.nn.Module, tokens: torch.Tensor, stages: int) -> torch.Tensor:
    """Return the logits (tokens, vocabulary) on the last pipeline stage."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    size = tokens.shape[1]
    mask = torch.triu(torch.ones(1, 1, size, size, dtype=torch.bool), diagonal=1)
    positions = torch.arange(size)[None]
    hidden = torch.empty(size, 1, model.config.hidden_size)
    with torch.no_grad():
        if not parallel_state.is_pipeline_first_stage():
            torch.distributed.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
            model.set_input_tensor(hidden)
        output = model(tokens, positions, mask)
        if not parallel_state.is_pipeline_last_stage():
            torch.distributed.send(output, parallel_state.get_pipeline_model_parallel_next_rank())
            return output
        return gather_from_tensor_model_parallel_region(output)[0]


def version() -> str:
    from megatron.core.package_info import __version__

    return __version__


if __name__ == "__main__":
    name, target = sys.argv[1:]
    torch.multiprocessing.spawn(work, (name, target), nprocs=ROWS[name][1])
    Path(f"{target}.store").unlink(missing_ok=True)
