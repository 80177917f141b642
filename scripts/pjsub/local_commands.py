"""The commands that the local scheduler emulator puts on a job's PATH: mpiexec with Fujitsu's options, and llio_transfer.

With --scale N mpiexec starts N ranks of a tiny model. To try the failure of a node, write its line of the rank map into the file
`down` of the job's folder: mpiexec then refuses to start ranks on it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "pretrain_gpt.py"
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 96 --make-vocab-size-divisible-by 8 "
    "--micro-batch-size 2 --global-batch-size 8 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 "
    "--pipeline-split even --eval-iters 0 --kernels native"
)
LEFT_OUT = (
    "--cpu-frequency",
    "--pipeline-schedule",
    "--num-virtual-stages-per-pipeline-rank",
    "--zero-bubble-max-pending-backward",
)  # they need Fugaku's clock or several stages
VALUED = {"-n": 1, "-mca": 2, "--vcoordfile": 1, "-stdout-proc": 1, "-stderr-proc": 1, "-x": 1}


def write(folder: Path) -> None:
    """Write the commands into `folder`."""
    folder.mkdir(exist_ok=True)
    for name in ("mpiexec", "llio_transfer"):
        words, path = (
            [sys.executable, __file__, name],
            f"PYTHONPATH={shlex.quote(str(ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}",
        )
        (folder / name).write_text(f'#!/bin/sh\nexport {path}\nexec {shlex.join(words)} "$@"\n')
        (folder / name).chmod(0o755)


def archive(folder: Path) -> Path:
    """A small archive that replaces the one of scripts/build.sh: a script that starts this Python, and a link to the checkout."""
    path, python = folder / "archive.tar", folder / "python3"
    python.write_text(f'#!/bin/sh\nunset PYTHONHOME\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    link = tarfile.TarInfo("app")
    link.type, link.linkname = tarfile.SYMTYPE, str(ROOT)
    with tarfile.open(path, "w") as tar:
        tar.add(python, "bin/python3")
        tar.addfile(link)
    return path


def split(words: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """(options of Fujitsu's mpiexec, the command). Raises ValueError for an option that the emulator does not know."""
    options: dict[str, list[str]] = {}
    while words and words[0].startswith("-"):
        name = words.pop(0)
        if name not in VALUED or len(words) < VALUED[name]:
            raise ValueError(
                f"mpiexec option {name} is unknown to this emulator, or its value is missing"
            )
        options[name] = [words.pop(0) for _ in range(VALUED[name])]
    return options, words


def scaled(command: list[str]) -> list[str]:
    """The command with the flags of a tiny model at its end, where they take effect, and without LEFT_OUT."""
    if not any(word.endswith(PROGRAM) for word in command):
        return command
    pairs = zip(["", *command], command)
    kept = [word for before, word in pairs if not {before, word} & set(LEFT_OUT)]
    return [*kept, *shlex.split(TINY), *shlex.split(os.environ.get("LOCAL_PJSUB_FLAGS", ""))]


def mpiexec(words: list[str]) -> int:
    """Replace this process by the mpiexec that is installed here; returns an exit code if a node is down."""
    options, command = split(words)
    ranks_requested, scale = int(options.get("-n", ["1"])[0]), os.environ.get("LOCAL_PJSUB_SCALE")
    placed = (
        Path(options["--vcoordfile"][0]).read_text().splitlines()
        if "--vcoordfile" in options
        else []
    )
    if placed and len(placed) < ranks_requested:
        raise ValueError(
            f"--vcoordfile {options['--vcoordfile'][0]} has {len(placed)} lines, fewer than -n {ranks_requested}"
        )
    failed = sorted(set(placed[:ranks_requested]) & set(_down()))
    if failed:
        print(f"local scheduler emulator: node {failed[0]} is down", file=sys.stderr)
        return 1
    own = Path(sys.executable).parent / "mpiexec"
    path = os.pathsep.join(os.environ["PATH"].split(os.pathsep)[1:])  # without this command itself
    real = str(own) if own.exists() else shutil.which("mpiexec", path=path)
    if real is None:
        raise ValueError("no mpiexec is installed here: pip install mpich")
    ranks = min(ranks_requested, int(scale)) if scale else ranks_requested
    for stream, name in ((1, "-stdout-proc"), (2, "-stderr-proc")):
        _redirect(stream, options.get(name))
    if scale:
        os.environ["OMP_NUM_THREADS"] = "1"
    os.execv(
        real, [real, "-n", str(ranks), *(scaled(command) if scale else command)]
    )  # signals to this command reach it


def _down() -> list[str]:
    file = Path(os.environ.get("PJM_JOBDIR", ".")) / "down"
    return file.read_text().splitlines() if file.exists() else []


def _redirect(stream: int, pattern: list[str] | None) -> None:
    """Redirect the output of all ranks into one file with the name of rank 0's file."""
    if pattern is None:
        return
    path = Path(pattern[0].replace("/%/", "/0/").replace("/1000r/", "/0/") + ".1.0")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        os.dup2(file.fileno(), stream)


def main(words: list[str]) -> int:
    try:
        if words[0] == "mpiexec":
            return mpiexec(words[1:])
        names = [word for word in words[1:] if word != "--purge"]
        missing = [name for name in names if not Path(name).is_file()]
        if missing or not names:
            raise ValueError(f"llio_transfer: {' '.join(missing) or 'no file name'}: no such file")
        return 0
    except ValueError as error:
        print(f"local scheduler emulator: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
