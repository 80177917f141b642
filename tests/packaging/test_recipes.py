"""The recipes of packaging/ name this version, its packages, a command that trains, and a release's checksum."""

import re
from pathlib import Path

import pytest

import fugaku_megatron
from tools import release_recipes

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
(EASYCONFIG,) = (ROOT / "packaging" / "easybuild").glob("*.eb")
RECIPES = {
    "easybuild": EASYCONFIG,
    "spack": ROOT / "packaging" / "spack" / "package.py",
    "conda": ROOT / "packaging" / "conda" / "recipe.yaml",
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


def test_a_releases_recipes_name_its_checksum(tmp_path):
    archive = tmp_path / f"fugaku_megatron-{fugaku_megatron.__version__}.tar.gz"
    archive.write_bytes(b"abc")
    release_recipes.write(archive)
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    easyconfig = (tmp_path / EASYCONFIG.name).read_text()
    assert f"'checksums': ['{digest}']," in easyconfig and archive.name in easyconfig.replace(
        "%(version)s", fugaku_megatron.__version__
    )
    package = (tmp_path / "py_fugaku_megatron" / "package.py").read_text()
    assert f'version("{fugaku_megatron.__version__}", sha256="{digest}")' in package


def test_a_recipe_without_a_place_for_the_checksum_is_named(tmp_path, monkeypatch):
    recipe = tmp_path / "recipe"
    recipe.write_text("no checksum")
    rows = (release_recipes.Recipe(recipe, "recipe.out", "[None]", "['{}']"),)
    monkeypatch.setattr(release_recipes, "RECIPES", rows)
    archive = tmp_path / "archive.tar.gz"
    archive.write_bytes(b"")
    with pytest.raises(ValueError, match=r"recipe: expected \[None\] once, found 0"):
        release_recipes.write(archive)
