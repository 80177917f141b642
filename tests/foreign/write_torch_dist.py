"""Write small checkpoints with megatron-core on a CPU: python write_torch_dist.py FOLDER

    python -m venv mcore && mcore/bin/pip install megatron-core==0.16.1 torch==2.13.0 psutil
    mcore/bin/python tests/foreign/write_torch_dist.py tests/foreign/torch_dist

Each folder is a checkpoint in the format torch_dist, with `expected.json`: token ids, and the logits
of the last one as megatron-core's GPTModel computes them. Two tensor-parallel ranks save the second
one, so that its tensors are in pieces.
"""

import json
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist
from megatron.core import __version__, dist_checkpointing
from megatron_core import LLAMA, TIED, UNTIED, arguments, build, logits_of, without_gpu

# folder -> tensor-parallel ranks, model
CHECKPOINTS = {
    "gpt2": (1, ({"bias_activation_fusion": True}, TIED, None)),
    "llama_tp2": (2, (LLAMA, UNTIED, None)),
}


def write(rank: int, name: str, folder: Path) -> None:
    size, case = CHECKPOINTS[name]
    path = folder / name / "iter_0000010"
    if rank == 0:
        path.mkdir(parents=True)
    store = dist.FileStore(str(folder / f"{name}.store"), size)
    without_gpu(rank, size, store)
    model = build(case, rank, size)
    found = logits_of(model)
    contents = {
        **model.sharded_state_dict(),
        "args": arguments(case, size),
        "iteration": 10,
    }
    dist_checkpointing.save(contents, str(path))
    if rank == 0:
        (folder / name / "latest_checkpointed_iteration.txt").write_text("10")
        expected = {
            "by": f"megatron-core {__version__}, GPTModel",
            "ids": found["ids"].tolist(),
            "logits_of_the_last_token": [round(x, 5) for x in found["logits"][-1].tolist()],
        }
        (folder / name / "expected.json").write_text(json.dumps(expected) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) == 2:  # start every rank of every checkpoint
        for name, (size, _) in CHECKPOINTS.items():
            command = [sys.executable, __file__, sys.argv[1], name]
            ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(size)]
            if any(rank.wait() for rank in ranks):
                sys.exit(f"{name} was not written")
    else:
        write(int(sys.argv[3]), sys.argv[2], Path(sys.argv[1]))
