"""The commands of README.md and docs/*.md: the blocks between fences, in order, and what is changed before they are run here.

A change is a row of CHANGES: the document, the text as it stands there, the text that is run, and why. A row whose text is not
in its document any more is a mistake. Test: tests/docs/test_docs_commands.py
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = (
    "README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")),
)
FOLLOW_README = (
    "README.md",
    "docs/data.md",
    "docs/evaluation.md",
    "docs/training.md",
    "docs/monitoring.md",
)  # the others use its text, vocabulary and checkpoints
FENCE = re.compile(r"^```(\w*|c\+\+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ELSEWHERE = ":"  # the shell's command that does nothing: what needs another machine, or is run by another test

TINY = "--recipe demo --train-iters 4 --log-interval 1 --eval-iters 0 --kernels native"
# document, what stands there, what is run, why
CHANGES = (
    ("README.md", "make train ", f"make train TRAIN_FLAGS='{TINY}' ", "4 iterations"),
    ("README.md", "make test ", f"{ELSEWHERE} ", "this test is one of them"),
    ("README.md", "--recipe demo --train-iters 200", TINY, "4 iterations instead of some minutes"),
    (
        "docs/chat.md",
        "--seq-length 256 --train-iters 300",
        "--seq-length 256 --train-iters 4 --kernels native",
        "4 iterations, not two minutes",
    ),
    (
        "docs/chat.md",
        "--train-iters 200",
        "--train-iters 4 --kernels native",
        "4 iterations, not a minute",
    ),
    (
        "docs/chat.md",
        "flag_chats my_chats\n",
        "flag_chats my_chats\nsed -i '9,$d' my_chats/held_out.jsonl\n",
        "8 chats instead of 262",
    ),
    ("docs/chat.md", "--max-new-tokens 60", "--max-new-tokens 8", "8 tokens instead of 60"),
    (
        "docs/chat.md",
        "--train-iters 500",
        "--train-iters 4 --kernels native",
        "4 iterations, not two minutes",
    ),
    (
        "docs/data.md",
        "train --recipe demo",
        f"train {TINY}",
        "4 iterations instead of some minutes",
    ),
    *(
        (
            name,
            begin,
            f"{begin} --micro-batch-size 1 --tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}",
            "few layouts: seconds",
        )
        for name, begin, tp, pp in (
            ("docs/fugaku.md", "--recipe 124m --nodes 256", 1, 1),
            ("docs/fugaku.md", "--recipe 124m --nodes 192", 1, 3),
            ("docs/fugaku.md", "--recipe 30b --nodes 6144", 4, 6),
            ("docs/fugaku.md", "--recipe 30b --nodes 384", 2, 8),
            ("docs/fugaku.md", "--recipe 30b --nodes 12288", 4, 6),
            ("docs/performance-model.md", "--recipe 30b --nodes 12288", 4, 6),
            ("docs/performance-model.md", "--recipe 30b --nodes 6144 --features", 4, 6),
            ("docs/performance-model.md", "--recipe 30b --nodes 6144 --int8", 4, 6),
            ("docs/training.md", "--recipe 30b --nodes 6144", 4, 6),
        )
    ),
    (
        "docs/fugaku.md",
        "scripts/pjsub/local_pjsub --scale",
        f"{ELSEWHERE} --scale",
        "tests/jobs/test_local.py",
    ),
    (
        "docs/measuring.md",
        "python -m benchmarks experts --recipe qwen3-30b-a3b \\\n    [--dtype bf16] [--experts 32] [--rows 64]",
        ELSEWHERE,
        "minutes; tests/benchmarks/test_benchmarks.py runs a small one",
    ),
    (
        "docs/evaluation.md",
        "python -m fugaku_megatron.inference.lm_eval --model fugaku_megatron \\\n    "
        "--model_args load=checkpoints --tasks lambada_openai",
        ELSEWHERE,
        "data from the network",
    ),
    (
        "docs/evaluation.md",
        "mpiexec -n 2 python -m fugaku_megatron.inference.lm_eval",
        ELSEWHERE,
        "the harness is not installed; tests/inference/test_lm_eval.py",
    ),
    (
        "docs/fugaku.md",
        "pjsub --interact -g GROUP --llio cn-cache-size=1Gi \\\n    "
        '-L "node=1,rscgrp=int,elapse=3:00:00,freq=2000,eco_state=0" \\\n    '
        '-x PJM_LLIO_GFSCACHE=/vol0004 --sparam "wait-time=600"',
        ELSEWHERE,
        "Fugaku",
    ),
    (
        "docs/fugaku.md",
        "scripts/build.sh --data my_text_document --vocab vocab.json --merges merges.txt",
        "touch fugaku_megatron.tar",
        "1.2 GB and minutes; `job check` only looks whether the archive is there",
    ),
    (
        "docs/fugaku.md",
        "scripts/build.sh --data my_pieces_text_document --tokenizer-model my.model",
        ELSEWHERE,
        "1.2 GB and minutes; what is packed is tested in tests/jobs/test_submission.py",
    ),
    (
        "docs/fugaku.md",
        "job submit run_pieces.sh -- \\\n    -x DATA=my_pieces_text_document,TOKENIZER=my.model",
        "job check run_pieces.sh",
        "Fugaku's pjsub",
    ),
    (
        "docs/fugaku.md",
        "job submit scripts/pjsub/run_124m.sh\n",
        "job check scripts/pjsub/run_124m.sh\n",
        "Fugaku's pjsub",
    ),
    (
        "docs/fugaku.md",
        "job submit scripts/pjsub/resume.sh --steps 3",
        "job check scripts/pjsub/resume.sh",
        "Fugaku's pjsub",
    ),
    (
        "docs/fugaku.md",
        "job submit scripts/pjsub/run_30b.sh --steps 5",
        "job check scripts/pjsub/run_30b.sh",
        "Fugaku's pjsub",
    ),
    (
        "docs/fugaku.md",
        "job submit run_30b_12288.sh",
        "job check run_30b_12288.sh",
        "Fugaku's pjsub",
    ),
    ("docs/training.md", "make train\n", f"{ELSEWHERE}\n", "README.md"),
    (
        "docs/training.md",
        "--train-iters 20 \\\n    --eval-iters 0 --log-interval 10",
        "--train-iters 2 \\\n    --eval-iters 0 --log-interval 1",
        "2 iterations instead of 20",
    ),
    (
        "docs/monitoring.md",
        "--log-interval 10 --train-iters 40",
        "--log-interval 2 --train-iters 4",
        "4 iterations instead of 40",
    ),
    ("docs/training.md", "mpiexec -n 512", "mpiexec -n 2", "2 processors"),
    ("docs/training.md", "--recipe 124m --data-path", f"{TINY} --data-path", "the demo's size"),
    (
        "docs/training.md",
        "--recipe demo --train-iters 200",
        TINY,
        "4 iterations instead of a minute",
    ),
    (
        "docs/training.md",
        "--recipe demo --train-iters 300",
        f"{TINY} --train-iters 6",
        "2 more iterations",
    ),
    ("docs/clusters.md", "module load gcc openmpi python", ELSEWHERE, "modules of a cluster"),
    (
        "docs/clusters.md",
        "make setup MPI=system",
        ELSEWHERE,
        "another MPI; tests/packaging/test_setup_mpi.py",
    ),
    (
        "docs/clusters.md",
        "train ...",
        f"train {TINY} --train-iters 1 --mock-data --vocab-size 512 --kernels native --num-layers 1",
        "the flags of a run",
    ),
    (
        "docs/clusters.md",
        "sbatch --partition=NAME --account=NAME scripts",
        f"{ELSEWHERE} scripts",
        "Slurm; tests/jobs/test_slurm.py",
    ),
    (
        "docs/clusters.md",
        "sbatch --nodes=8 scripts",
        f"{ELSEWHERE} scripts",
        "Slurm; tests/jobs/test_slurm.py",
    ),
    (
        "docs/clusters.md",
        "sbatch --export=ALL,PMI=pmix",
        f"{ELSEWHERE} PMI=pmix",
        "Slurm; tests/jobs/test_slurm.py",
    ),
    (
        "docs/clusters.md",
        "apt-get install -y slurm-wlm munge\nscripts/slurm/one_node.sh start /tmp/slurm \\\n    && export",
        "export",
        "root, packages; tests/jobs/test_slurm.py",
    ),
    (
        "docs/clusters.md",
        "sbatch --nodes=1",
        f"{ELSEWHERE} --nodes=1",
        "Slurm; tests/jobs/test_slurm.py",
    ),
    (
        "docs/clusters.md",
        "squeue; scripts/slurm/one_node.sh stop /tmp/slurm",
        ELSEWHERE,
        "Slurm; tests/jobs/test_slurm.py",
    ),
    ("docs/install.md", "sudo ", f"{ELSEWHERE} ", "packages of the system"),
    (
        "docs/install.md",
        "make setup MPI=system",
        f"{ELSEWHERE} MPI=system",
        "another MPI; tests/packaging/test_setup_mpi.py",
    ),
    (
        "docs/install.md",
        "make setup PYTHON=python3.11",
        f"{ELSEWHERE} PYTHON=python3.11",
        "another Python",
    ),
    (
        "docs/install.md",
        "pip install .",
        f"{ELSEWHERE} .",
        "another environment; tests/packaging/test_wheel.py",
    ),
    ("docs/install.md", "source /opt/rh", f"{ELSEWHERE} /opt/rh", "RHEL"),
    (
        "docs/install.md",
        "pip install --no-deps dist/",
        f"{ELSEWHERE} dist/",
        "the wheel of make wheels; tests/packaging/test_wheel.py",
    ),
    ("docs/install.md", "make sdist", ELSEWHERE, "EasyBuild"),
    ("docs/install.md", "eb ", f"{ELSEWHERE} ", "EasyBuild"),
    ("docs/install.md", "mkdir ", f"{ELSEWHERE} ", "Spack"),
    ("docs/install.md", "cp ", f"{ELSEWHERE} ", "Spack"),
    ("docs/install.md", "spack ", f"{ELSEWHERE} ", "Spack"),
    ("docs/install.md", "rattler-build ", f"{ELSEWHERE} ", "conda"),
    ("docs/install.md", "scripts/build.sh\n", ELSEWHERE + "\n", "1.2 GB and minutes"),
    ("docs/install.md", "module load", f"{ELSEWHERE} load", "RHEL"),
    ("docs/install.md", "docker ", f"{ELSEWHERE} ", "Docker; tests/packaging/test_containers.py"),
    (
        "docs/install.md",
        "apptainer build",
        f"{ELSEWHERE} build",
        "Apptainer; tests/packaging/test_containers.py",
    ),
    (
        "docs/install.md",
        "mpiexec -n 2 apptainer",
        f"{ELSEWHERE} apptainer",
        "Apptainer; tests/packaging/test_containers.py",
    ),
    ("docs/install.md", "OMP_NUM_THREADS=72", "OMP_NUM_THREADS=1", "2 processors"),
    (
        "docs/measuring.md",
        "gemm|attention|rowwise --recipe 124m \\\n    --micro-batch-size 4 [--dtype bf16] [--target all]",
        "rowwise --recipe demo --micro-batch-size 1 --rounds 1 --only residual_norm",
        "a synopsis; one kernel of the demo's size",
    ),
    (
        "docs/measuring.md",
        "python -m benchmarks step --micro-batch-size 4 [--dtype bf16] \\\n    "
        "[--baseline hf] [--baseline-compile] [--baseline-preload tcmalloc]",
        ELSEWHERE,
        "minutes, alone on the machine; tests/benchmarks/test_benchmarks.py",
    ),
    (
        "docs/measuring.md",
        "python -m benchmarks step --recipe qwen2.5-0.5b --seq-length 1024 \\\n    "
        "--baseline trl --baseline-preload tcmalloc \\\n    "
        "[--dtype bf16] [--lora-rank 16 [--baseline-load-in 8bit]]",
        ELSEWHERE,
        "trl is not installed; tests/benchmarks/test_trl.py",
    ),
    (
        "docs/measuring.md",
        "python -m benchmarks step --ranks 2",
        ELSEWHERE,
        "minutes; tests/benchmarks/test_benchmarks.py",
    ),
    (
        "docs/measuring.md",
        "python -m benchmarks alloc --png alloc.png",
        ELSEWHERE,
        "minutes; tests/benchmarks/test_benchmarks.py",
    ),
    (
        "docs/measuring.md",
        "python -m benchmarks tables --machine host.json --png tables.png",
        ELSEWHERE,
        "minutes; tests/benchmarks/test_tables.py",
    ),
    ("docs/performance-model.md", "fugaku-megatron tables --document", ELSEWHERE, "docs/tables.md"),
    ("docs/performance-model.md", "fugaku-megatron tables --markdown", ELSEWHERE, "docs/tables.md"),
    ("docs/performance-model.md", "tables --csv", "tables --document 001 --csv", "one document"),
    (
        "docs/library.md",
        "mpiexec -n 2 python examples",
        f"{ELSEWHERE} examples",
        "test_examples_run",
    ),
    ("docs/library.md", "python examples", f"{ELSEWHERE} examples", "test_examples_run"),
    ("docs/install.md", "--train-iters 20", "--train-iters 2", "2 iterations instead of 20"),
    (
        "docs/performance-model.md",
        "python -m tools.fit\n",
        f"{ELSEWHERE}\n",
        "minutes; tests/planner/test_fit.py",
    ),
    (
        "docs/report.md",
        "fugaku-megatron report\n",
        "fugaku-megatron report --minutes 0.3 --ranks 1 --shrunk\n",
        "ten minutes",
    ),
    (
        "docs/report.md",
        "mpiexec -n 16 fugaku-megatron report",
        f"{ELSEWHERE} report",
        "16 ranks; tests/cli/test_ranks.py",
    ),
    (
        "docs/performance-model.md",
        "mpiexec -n 2 fugaku-megatron calibrate --output host.json",
        ELSEWHERE,
        "minutes; tests/cli/test_ranks.py",
    ),
)
# document -> files that its commands leave
LEAVES = {
    "README.md": (
        "my_text_document.bin",
        "my_text_document.idx",
        "run.log",
        "checkpoints/latest_checkpointed_iteration.txt",
        "demo/checkpoint/loss_curve.png",
    ),
    "docs/evaluation.md": ("my_result.json",),
    "docs/data.md": (
        "my_pieces_text_document.tokenizer.json",
        "my_checkpoints/latest_checkpointed_iteration.txt",
    ),
    "docs/fugaku.md": ("my.sh", "try.sh", "run_30b_12288.sh"),
    "docs/models.md": (
        "my_hf/model.safetensors",
        "my_start/latest_checkpointed_iteration.txt",
        "my_tuned_hf/config.json",
        "my_from_megatron/iter_0000000/manifest.json",
    ),
    "docs/performance-model.md": ("all.csv", "all.png"),
    "docs/chat.md": (
        "my_chats/train.mask",
        "my_chats/tuned_hf/chat_template.jinja",
        "my_chats/tuned_hf/model.safetensors",
    ),
    "docs/report.md": ("report.json", "report.txt", "report.sh", "report.sbatch"),
    "docs/training.md": (
        "run_30b.sh",
        "my_model/loss_curve.png",
        "my_model/iter_0000006/manifest.json",
    ),
    "docs/monitoring.md": ("my_run.csv", "my_run.png", "my_ranks.png", "my_run.prom"),
}


def blocks(document: str, language: str = "") -> list[str]:
    """Return the fenced blocks of commands, or the blocks of a language."""
    fenced = [(match[1], match[2]) for match in FENCE.finditer((ROOT / document).read_text())]
    return [text for name, text in fenced if name == language]


def script(document: str) -> str:
    """The commands of a document with the changes of the table, as one shell script."""
    text = "\n".join(blocks(document))
    for name, before, after, why in CHANGES:
        if name == document:
            assert text.count(before) >= 1, f"{document} has no {before!r} any more ({why})"
            text = text.replace(before, after)
    return text


def commands(document: str) -> Iterator[list[str]]:
    """The words of every command as it stands in the document, without comments, `$(...)` and the signs of a synopsis."""
    for block in blocks(document):
        for line in block.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(
                re.sub(r"[\[\]]|(?<=\w)(\|\w+)+|\$\([^)]*\)", "", line),
                posix=True,
                punctuation_chars=";&|",
            )
            lexer.whitespace_split = True
            for operator, words in itertools.groupby(lexer, lambda word: word in ("&&", "|", ";")):
                if not operator:
                    yield list(words)
