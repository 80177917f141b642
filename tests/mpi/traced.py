"""A rank under strace: `mpiexec -n 4 python traced.py FOLDER program flags`; FOLDER/opened.r.t: files that thread t opens."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    rank = next(
        os.environ[name]
        for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
        if name in os.environ
    )
    folder, *command = sys.argv[1:]
    # --seccomp-bpf: other system calls do not stop the rank; -ff: threads in one file tear each other's lines
    os.execvp(
        "strace",
        [
            *f"strace -ff -qq --seccomp-bpf -e trace=open,openat,creat -o {folder}/opened.{rank}".split(),
            sys.executable,
            *command,
        ],
    )
