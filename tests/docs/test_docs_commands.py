"""The commands in README.md and docs/*.md work unchanged.

    make docs      runs them all, document by document, each in a copy of the checkout (marked `docs`; up to 5 minutes);
                   also the examples, alone and under mpiexec, and the Python in PYTHON_DOCUMENTS

`make test` checks that every named program, file, make target and flag exists, by the commands' own parsers. Changes
before a run are in tests/docs/doc_commands.py with their reasons.
"""

from __future__ import annotations

import os
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import fugaku_megatron
from benchmarks import __main__ as benchmarks
from fugaku_megatron.cli import program
from fugaku_megatron.cli.parser import Parser
from fugaku_megatron.torch_backend import __main__ as backend
from tests.docs.doc_commands import (
    CHANGES,
    DOCUMENTS,
    FOLLOW_README,
    LEAVES,
    ROOT,
    blocks,
    commands,
    script,
)
from tests.mpi import launch

pytestmark = pytest.mark.system

# Programs of the system, or of a site; their own flags are not ours to check.
SYSTEM = set(
    "module source export cd git apt-get dnf sudo docker apptainer rattler-build eb pjsub squeue curl ls mkdir cp pip cat "
    "echo nproc lscpu srun python3 tee spack g++ make".split()
)
THEIR_OWN_FLAGS = (
    "-m venv",
    "-m fugaku_megatron.inference.lm_eval",
    "-m trl.scripts.dpo",
    "train.py",
)
DOCUMENTS_WITH_COMMANDS = [document for document in DOCUMENTS if any(commands(document))]
ENVIRONMENT = {
    **os.environ,
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    "PYTHONPATH": launch.PATH,
}
FAILURES = re.compile(r"Traceback|command not found|No such file or directory|error while loading")


def parse(words: list[str]) -> None:
    """Parse fugaku-megatron's words by the command's own parser. Raise ValueError for an unknown word."""
    command: object = program
    while hasattr(command, "COMMANDS"):
        if words[0] == "--help":
            return
        name, *words = words
        command = command.COMMANDS[name].load()
    if "--help" not in words:
        parser = Parser()
        command.add_arguments(parser)
        parser.parse_args([word for word in words if word != "..."])


def check_python(words: list[str]) -> None:
    """Check a script or module that python starts."""
    stands_for = {
        "pretrain_gpt.py": ["train"],
        "pretrain_hybrid.py": ["train"],
        "scripts/submit.py": ["job"],
        "tools/preprocess_data.py": ["preprocess"],
        "-m fugaku_megatron": [],
    }
    if words[:2] == ["-m", "fugaku_megatron.torch_backend"]:
        options = backend._parser().parse_args(words[2:])
        words = ["-m", *options.module] if options.module else options.program
    length = 2 if words[0] == "-m" else 1
    name = " ".join(words[:length])
    rest = words[length:]
    if name == "-m benchmarks":
        with (
            mock.patch.object(benchmarks, "check_outputs", side_effect=RuntimeError("parsed")),
            pytest.raises(SystemExit) as end,
        ):
            benchmarks.main(rest)
        assert str(end.value).endswith("parsed"), rest
    elif name == "-c":
        compile(rest[0], "document", "exec")
    elif name.startswith("examples/"):
        assert (ROOT / name).is_file(), name
    elif name.startswith("-m tools."):
        assert (ROOT / (name.removeprefix("-m ").replace(".", "/") + ".py")).is_file(), name
    elif name not in THEIR_OWN_FLAGS:
        parse([*stands_for[name], *rest])


def check_command(words: list[str]) -> None:
    """Raise KeyError, ValueError or AssertionError if a command names anything that does not exist."""
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    if words[0] in ("mpiexec", "srun"):
        words = words[3:]
    program, *rest = words
    if program.endswith("fugaku-megatron"):
        parse(rest)
    elif program in ("python", "python3", ".venv/bin/python"):
        check_python(rest)
    elif program == "make":
        targets = [word for word in rest if "=" not in word and not word.startswith("-")]
        assert all(
            re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
            for target in targets
        ), rest
    elif program.startswith("scripts/"):
        assert os.access(ROOT / program, os.X_OK), program
    elif program == "sbatch":
        job = next(i for i, word in enumerate(rest) if word.endswith(".sbatch"))
        assert (ROOT / rest[job]).is_file()
        parse(["train", *rest[job + 1 :]])
    else:
        assert program in SYSTEM, program


@pytest.mark.parametrize("document", DOCUMENTS_WITH_COMMANDS)
def test_programs_and_flags_exist(document):
    for words in commands(document):
        check_command(list(words))


def test_documents_have_commands_and_every_change_is_in_use():
    pages = (
        "chat clusters data evaluation fugaku install library measuring megatron models monitoring "
        "performance-model predictions pytorch reliability report tables training"
    )
    names = {f"docs/{page}.md" for page in pages.split()}
    assert set(DOCUMENTS_WITH_COMMANDS) == {"README.md", *names}
    assert {change[0] for change in CHANGES} <= set(DOCUMENTS_WITH_COMMANDS)
    for document in DOCUMENTS_WITH_COMMANDS:
        script(document)


def git(*words: str, **options) -> list[str]:
    """Return the lines that git prints for the checkout."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, **options)
    return done.stdout.split("\n")


def copy_checkout(folder: Path) -> None:
    """Make a clone as after `make setup`: tracked files, built kernels, and this environment as its .venv."""
    libraries = (ROOT / "fugaku_megatron").rglob("*.so")
    for name in [*filter(None, git("ls-files")), *(path.relative_to(ROOT) for path in libraries)]:
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    (folder / ".venv").symlink_to(ROOT / ".venv")


@pytest.fixture
def checkout(tmp_path):
    """A copy of the checkout. The documents' make targets have nothing to set up there."""
    folder = tmp_path / "clone"
    copy_checkout(folder)
    # Otherwise the documents' `make` would install the copy into the environment of this checkout.
    assert subprocess.run(["make", "--question", "setup"], cwd=folder).returncode == 0, (
        "run `make docs`, which sets up first"
    )
    return folder


def own_text(folder: Path) -> None:
    """Write the reader's own text, with which the documents start."""
    (folder / "my_texts").mkdir()
    for name in ("cli/program.py", "pipeline/zero_bubble.py"):
        source = ROOT / "fugaku_megatron" / name
        shutil.copy(source, folder / "my_texts" / f"{source.name}.txt")


def not_ignored(checkout: Path) -> list[str]:
    """Return new files that git does not ignore: a newcomer's `git status` stays empty."""
    files = {str(path.relative_to(checkout)) for path in checkout.rglob("*") if path.is_file()}
    new = sorted(files - set(git("ls-files")))
    new = [name for name in new if not name.startswith((".venv/", "my_texts/"))]
    ignored = git("check-ignore", "--no-index", "--stdin", input="\n".join(new))
    return [name for name in new if name not in ignored and not (ROOT / name).exists()]


def run_document(document: str, checkout: Path) -> None:
    """Run in a shell without an activated environment: README activates it."""
    own = str(Path(sys.executable).parent)
    path = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if p != own)
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MAKE", "MFLAGS", "VIRTUAL_ENV", "PYTEST"))
    }
    if document == "README.md":
        own_text(checkout)
    first = "" if document == "README.md" else "source .venv/bin/activate\n"
    # Elsewhere no process draws losses.
    is_drawn = any(name.endswith("loss_curve.png") for name in LEAVES.get(document, ()))
    shell = "set -e -o pipefail\ntrap 'echo \"FAILED: $BASH_COMMAND\"' ERR\n"
    done = subprocess.run(
        ["bash", "-c", shell + first + script(document)],
        cwd=checkout,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=600,
        # Another document uses the other core.
        env={
            **clean,
            "PATH": path,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": "" if is_drawn else str(launch.FIRST),
        },
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert not FAILURES.search(done.stdout), done.stdout[-4000:]
    assert [name for name in LEAVES.get(document, ()) if not (checkout / name).exists()] == [], (
        done.stdout[-4000:]
    )
    assert not_ignored(checkout) == []


@pytest.mark.docs
@pytest.mark.parametrize(
    "documents",
    [FOLLOW_README, *((name,) for name in DOCUMENTS_WITH_COMMANDS if name not in FOLLOW_README)],
    ids=" ".join,
)
def test_commands_run_as_they_stand(documents, checkout):
    """Run documents that use each other's files one after another, and the others on any worker."""
    for document in documents:
        run_document(document, checkout)


EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


def run_python(folder: Path, *words: str, launcher: str = "", **environment: str) -> str:
    """Run Python in a folder and return the output."""
    done = subprocess.run(
        [*launcher.split(), sys.executable, *words],
        cwd=folder,
        text=True,
        timeout=300,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**ENVIRONMENT, "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.mark.docs
@pytest.mark.parametrize("launcher", ["", "mpiexec -n 2"])
@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_run(example, launcher, tmp_path):
    """From another folder, alone and under mpiexec; each checks its own result."""
    printed = run_python(tmp_path, str(ROOT / "examples" / example), launcher=launcher)
    assert printed and not FAILURES.search(printed), printed[-4000:]
    assert not [*tmp_path.iterdir()], "it leaves nothing"


PYTHON_DOCUMENTS = ("README.md", "docs/library.md", "docs/extending.md", "docs/pytorch.md")


def apply_changes(folder: Path, *flags: str) -> None:
    """Apply the changes that docs/extending.md shows to a checkout. CalledProcessError if one does not fit."""
    changes = "".join(blocks("docs/extending.md", "diff"))
    subprocess.run(["git", "apply", *flags, "-"], cwd=folder, input=changes, text=True, check=True)


def test_the_changes_of_extending_fit_the_sources():
    """Each is against the lines around it, so a renamed function is seen."""
    apply_changes(ROOT, "--check")


def test_api_pages_document_every_public_name():
    """Every name on a page exists, and the library's page has all names of `fugaku_megatron`."""
    named = {
        page.name: re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
        for page in (ROOT / "docs" / "api").glob("*.md")
    }
    for path in (path for paths in named.values() for path in paths):
        assert pkgutil.resolve_name(path) is not None
    public = {path.rpartition(".")[2] for path in named["library.md"]}
    assert public == set(fugaku_megatron.__all__) - {"__version__"}


@pytest.mark.docs
def test_the_flag_of_extending_works(tmp_path):
    """The flag cuts the gradients: their norm is below the norm in the same run without it."""
    copy_checkout(tmp_path)
    apply_changes(tmp_path)
    command = (
        "-m fugaku_megatron train --recipe demo --mock-data --vocab-size 256 --train-iters 3 "
        "--log-interval 1 --eval-iters 0 --clip-grad 100"
    )
    norms = []
    for more in ("", "--clip-grad-value 1e-5"):
        words = f"{command} {more}".split()
        printed = run_python(tmp_path, *words, PYTHONPATH=str(tmp_path))
        norms.append(re.findall(r"grad norm: (\S+)", printed))
    assert norms[0][0] != norms[1][0] and float(norms[1][0]) < float(norms[0][0])


@pytest.mark.docs
@pytest.mark.parametrize("document", PYTHON_DOCUMENTS)
def test_python_of_the_documents_runs(document, tmp_path):
    """All blocks in a document, one after another, as in a notebook."""
    code = "\n".join(blocks(document, "python"))
    run_python(tmp_path, "-W", "error::UserWarning", "-c", code)
