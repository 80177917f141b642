"""The recipes of packaging/ name this version, its packages and a command that trains."""

import re
from pathlib import Path

import pytest

import fugaku_megatron

ROOT = Path(__file__).resolve().parents[2]
(EASYCONFIG,) = (ROOT / "packaging" / "easybuild").glob("*.eb")
RECIPES = {
    "easybuild": EASYCONFIG,
    "spack": ROOT / "packaging" / "spack" / "package.py",
    "conda": ROOT / "packaging" / "conda" / "meta.yaml",
}
NAMES = {"torch": "(py)?torch"}  # PyTorch, pytorch, py-torch


@pytest.mark.parametrize("tool", RECIPES)
def test_a_recipe_is_of_this_version_with_its_packages(tool):
    tomllib = pytest.importorskip("tomllib")
    text = RECIPES[tool].read_text()
    assert fugaku_megatron.__version__ in text
    assert "train --recipe demo --mock-data --vocab-size 512 --train-iters 20" in text
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    if tool == "easybuild":
        text = text.replace("SciPy-bundle", "numpy")
    for line in [*project["dependencies"], "mpi4py"]:
        name = re.match(r"[\w-]+", line)[0]
        assert re.search(rf"\b{NAMES.get(name, name)}\b", text, re.IGNORECASE), name
