"""Write small checkpoints with megatron-core on a CPU: python write_torch_dist.py FOLDER

    python -m venv mcore && mcore/bin/pip install megatron-core==0.16.1 torch==2.13.0 psutil
    mcore/bin/python tests/foreign/write_torch_dist.py tests/foreign/torch_dist

Each folder is a checkpoint in the format torch_dist, with `expected.json`: token ids, and the logits
of the last one as megatron-core's GPTModel computes them. Two tensor-parallel ranks save the second
one, so that its tensors are in pieces.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import __version__, dist_checkpointing, parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.transformer_config import TransformerConfig

ROWS = 64
LENGTH = 32
COMMON = dict(num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=48)
# folder -> tensor-parallel ranks, fields of the config, other arguments
CHECKPOINTS = {
    "gpt2": (1, {}, {}),
    "llama_tp2": (
        2,
        dict(
            num_query_groups=2,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
        ),
        dict(position_embedding_type="rope", untie_embeddings_and_output_weights=True),
    ),
}


def arguments(size: int, config: dict, other: dict) -> argparse.Namespace:
    """Return this model's common.pt as in Megatron-LM's training script."""
    return argparse.Namespace(
        **COMMON,
        seq_length=LENGTH,
        max_position_embeddings=LENGTH,
        padded_vocab_size=ROWS,
        vocab_size=ROWS,
        normalization=config.get("normalization", "LayerNorm"),
        norm_epsilon=1e-5,
        group_query_attention="num_query_groups" in config,
        num_query_groups=config.get("num_query_groups", 1),
        swiglu=config.get("gated_linear_unit", False),
        add_bias_linear=config.get("add_bias_linear", True),
        position_embedding_type=other.get("position_embedding_type", "learned_absolute"),
        untie_embeddings_and_output_weights=other.get("untie_embeddings_and_output_weights", False),
        rotary_base=10000,
        rotary_percent=1.0,
        tensor_model_parallel_size=size,
        pipeline_model_parallel_size=1,
    )


def write(rank: int, name: str, folder: Path, port: int) -> None:
    size, config, other = CHECKPOINTS[name]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()  # without a GPU
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    torch.manual_seed(1 + rank)
    model = GPTModel(
        config=TransformerConfig(
            **COMMON,
            **config,
            use_cpu_initialization=True,
            tensor_model_parallel_size=size,
            pipeline_dtype=torch.float32,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            init_method_std=0.2,
            bias_dropout_fusion=False,
            bias_activation_fusion=not config,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
        ),
        transformer_layer_spec=get_gpt_layer_local_spec(
            normalization=config.get("normalization", "LayerNorm")
        ),
        vocab_size=ROWS,
        max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=not other.get("untie_embeddings_and_output_weights"),
        position_embedding_type=other.get("position_embedding_type", "learned_absolute"),
        parallel_output=False,
    ).eval()
    ids = torch.randint(ROWS, (1, 24), generator=torch.Generator().manual_seed(5))
    mask = torch.triu(torch.ones(1, 1, 24, 24, dtype=torch.bool), diagonal=1)
    with torch.no_grad():
        logits = model(ids, torch.arange(24)[None], mask)
    path = folder / name / "iter_0000010"
    if rank == 0:
        path.mkdir(parents=True)
    dist.barrier()
    contents = {
        **model.sharded_state_dict(),
        "args": arguments(size, config, other),
        "iteration": 10,
    }
    dist_checkpointing.save(contents, str(path))
    if rank == 0:
        (folder / name / "latest_checkpointed_iteration.txt").write_text("10")
        expected = {
            "by": f"megatron-core {__version__}, GPTModel",
            "ids": ids[0].tolist(),
            "logits_of_the_last_token": [round(x, 5) for x in logits[0, -1].tolist()],
        }
        (folder / name / "expected.json").write_text(json.dumps(expected) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) == 2:  # start every rank of every checkpoint
        for number, (name, (size, _, _)) in enumerate(CHECKPOINTS.items()):
            command = [sys.executable, __file__, sys.argv[1], name, str(29511 + number)]
            ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(size)]
            if any(rank.wait() for rank in ranks):
                sys.exit(f"{name} was not written")
    else:
        write(int(sys.argv[4]), sys.argv[2], Path(sys.argv[1]), int(sys.argv[3]))
