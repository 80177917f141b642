"""Write small checkpoints with another version of this program: python tests/recorded/write_checkpoints.py SOURCE FOLDER [NAME ...]

    git worktree add /tmp/old VERSION && cd /tmp/old && make kernels
    python tests/recorded/write_checkpoints.py /tmp/old tests/recorded/checkpoints/VERSION

Each NAME.tar.xz holds a checkpoint of iteration 4 in `save`, or one of Megatron-LM in `megatron`. expected.json has by name the
number of ranks, the flags of the run, and its losses of iterations 5 to 8, which a resumed run must have. Ranks are MPI processes,
and their data are random tokens.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

SAVED = 4
LAST = 8
TRACKER = "latest_checkpointed_iteration.txt"
KEPT = (TRACKER, ".run")  # files in --save: the last iteration, the run's name
BASE = "dense"  # the weights under adapters
MODEL = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 16 --vocab-size 40 --make-vocab-size-divisible-by 8 "
    "--mock-data --split 100,0,0 --eval-iters 0 --micro-batch-size 1 --global-batch-size 8 --lr 1e-2 --weight-decay 0.1 "
    f"--hidden-dropout 0.1 --attention-dropout 0.0 --log-interval 1 --kernels torch --train-iters {LAST}"
)
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --swiglu --disable-bias-linear"
)
LORA = "--lora-rank 4"
MEGATRON = "--load megatron --finetune"
DELTA = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-key-head-dim 4 --linear-value-head-dim 4 "
    "--linear-num-key-heads 2 --linear-num-value-heads 2 --linear-conv-kernel-dim 4 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --position-embedding-type rope"
)
# name -> ranks, flags
RUNS = {
    "dense": (2, ""),
    "zero": (4, "--tensor-model-parallel-size 2 --use-distributed-optimizer"),
    "pipeline": (2, "--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights"),
    "experts": (2, f"{EXPERTS} --expert-model-parallel-size 2"),
    "moments": (
        2,
        "--use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-dtype int8 --exp-avg-sq-dtype int8",
    ),
    "bf16": (2, "--bf16 --use-distributed-optimizer"),
    "fp16": (1, "--fp16 --initial-loss-scale 1024"),
    "muon": (1, "--optimizer muon"),
    "adapters": (2, LORA),
    "local": (2, "--save-local local"),
    "int8": (2, f"{LORA} --lora-base-format int8 --kernels native"),
    "delta": (2, DELTA),
    "megatron": (1, MEGATRON),  # torch_dist, made of `dense`
}
FOLDERS = "folders"  # 130 ranks' files, in folders of 127, of the numbers in tests/checkpoint/test_folders.py
FOLDER_RANKS = 130
FOLDER_TESTS = ("tests/checkpoint/test_folders.py", "tests/parallel/test_checkpoint_folders.py")
REFUSED = re.compile(r"^fugaku-megatron train: (unknown flag )?--", re.MULTILINE)


def train(source: Path, folder: Path, ranks: int, flags: str) -> str:
    """Run `flags` in a folder; return its refusal of a flag that this version lacks."""
    return run(source, folder, ranks, f"train {flags}")


def run(source: Path, folder: Path, ranks: int, words: str) -> str:
    """Run a command in a folder; return its refusal of a flag that this version lacks."""
    command = f"-n {ranks} {sys.executable} -m fugaku_megatron {words}".split()
    mpiexec = Path(sys.executable).parent / "mpiexec"
    done = subprocess.run(
        [str(mpiexec), *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode and not REFUSED.search(done.stdout):
        sys.exit(f"{words}:\n{done.stdout[-3000:]}")
    return done.stdout if done.returncode else ""


def losses_after(folder: Path) -> list[float]:
    """Return the losses after iteration SAVED."""
    lines = map(json.loads, (folder / "save" / "history.jsonl").read_text().splitlines())
    losses = {line["iteration"]: line["lm_loss"] for line in lines if "lm_loss" in line}
    return [losses[iteration] for iteration in range(SAVED + 1, LAST + 1)]


def keep_saved(save: Path) -> None:
    """Remove the checkpoint after iteration SAVED, and what is no checkpoint."""
    shutil.rmtree(save / f"iter_{LAST:07d}")
    (save / TRACKER).write_text(str(SAVED))
    for path in save.iterdir():
        if not path.is_dir() and path.name not in KEPT:
            path.unlink()


def keep_copies(folder: Path) -> None:
    """Remove the checkpoints in --save, so that the copies in --save-local are alone."""
    shutil.rmtree(folder / "save" / f"iter_{SAVED:07d}")
    (folder / "save" / TRACKER).unlink()


def write_folders(source: Path, place: Path, output: Path) -> dict[str, Any]:
    """Write the checkpoint FOLDERS."""
    (file,) = (name for name in FOLDER_TESTS if (source / name).exists())
    module = file.removesuffix(".py").replace("/", ".")
    program = f"import {module} as tests; tests.RANKS = {FOLDER_RANKS}; tests.save('save', size={FOLDER_RANKS})"
    folder = place / FOLDERS
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(source)}
    subprocess.run([sys.executable, "-c", program], cwd=folder, env=environment, check=True)
    pack(folder, output / f"{FOLDERS}.tar.xz")
    return {"ranks": FOLDER_RANKS}


def pack(folder: Path, path: Path) -> None:
    with tarfile.open(path, "w:xz") as archive:
        for entry in sorted(folder.iterdir()):
            archive.add(entry, entry.name)


def write(name: str, source: Path, place: Path, output: Path) -> dict[str, Any]:
    """Write a checkpoint; return what a resumed run must find, or nothing if this version refuses the flags."""
    ranks, special = RUNS[name]
    folder = place / name
    folder.mkdir()
    flags = f"{MODEL} {special} --save save"
    if LORA in special:
        flags += f" --pretrained-checkpoint ../{BASE}/save"
    if special == MEGATRON:
        run(source, folder, 1, f"convert --load ../{BASE}/save --to-megatron megatron")
    refusal = train(source, folder, ranks, f"{flags} --save-interval {SAVED}")
    if refusal:
        print(f"{name}: {refusal.strip()}")
        return {}
    losses = losses_after(folder)
    if special == MEGATRON:
        shutil.rmtree(folder / "save")
    else:
        keep_saved(folder / "save")
    if "--save-local" in special:  # copies are of the last checkpoint
        shutil.rmtree(folder)
        folder.mkdir()
        train(source, folder, ranks, f"{flags} --exit-interval {SAVED}")
        keep_copies(folder)
    pack(folder, output / f"{name}.tar.xz")
    print(name, losses, flush=True)
    return {"ranks": ranks, "flags": special, "losses": losses}


def main() -> None:
    """Write a version's checkpoints, or those with the names."""
    source = Path(sys.argv[1]).resolve()
    output = Path(sys.argv[2]).resolve()
    output.mkdir(parents=True, exist_ok=True)
    record = output / "expected.json"
    expected = json.loads(record.read_text()) if record.exists() else {}
    with tempfile.TemporaryDirectory() as place:
        for name in sys.argv[3:] or (*RUNS, FOLDERS):
            if name == FOLDERS:
                expected[name] = write_folders(source, Path(place), output)
            else:
                expected[name] = write(name, source, Path(place), output)
    written = {name: value for name, value in expected.items() if value}
    record.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
