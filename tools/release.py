"""Checks a checkout before `make release` builds it, and writes checksums of what was built: it publishes nothing.

python -m tools.release check [TAG]     clean tree, version everywhere, section of the changelog, tag
python -m tools.release finish          dist/SHA256SUMS of archive, wheels and recipes; prints the next steps
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import fugaku_megatron
from tools.release_recipes import EASYCONFIG, PACKAGING
from tools.verify_wheel import record_problem

ROOT = Path(__file__).resolve().parents[1]
VERSION = fugaku_megatron.__version__
NAMING = (  # files that repeat the version of fugaku_megatron/__init__.py
    ROOT / "CITATION.cff",
    PACKAGING / "conda" / "recipe.yaml",
    PACKAGING / "spack" / "package.py",
    PACKAGING / "easybuild" / EASYCONFIG,
    ROOT / "docs" / "install.md",
)
NEXT_STEPS = """next steps (nothing is published yet):
  make test-release
  git tag -s v{version} -m "fugaku_megatron {version}" && git push origin v{version}
  approve the jobs of the workflow `release`: first the test index, then PyPI
  send the recipes of dist/release to EasyBuild and Spack"""


def changelog_section(text: str, version: str) -> str:
    """Return the lines below a version's heading of the changelog; empty if there is none."""
    pattern = rf"^## {re.escape(version)}\b.*\n((?:(?!## ).*\n?)*)"
    found = re.search(pattern, text, re.MULTILINE)
    return found[1].strip() if found else ""


def problems(root: Path, tag: str = "") -> list[str]:
    """Return one line for each reason why the checkout in `root` is no release."""
    found = []
    status = ["git", "status", "--porcelain"]
    changed = subprocess.run(status, cwd=root, capture_output=True, text=True, check=True).stdout
    if changed:
        found.append(f"{changed.splitlines()[0][3:]} is not committed: commit or remove it")
    if not changelog_section((root / "CHANGELOG.md").read_text(), VERSION):
        found.append(f"CHANGELOG.md has no section {VERSION}: add `## {VERSION}` with its changes")
    for path in NAMING:
        if not path.exists() or VERSION not in path.read_text():
            found.append(f"{path.relative_to(ROOT)} does not name version {VERSION}")
    if tag and tag != f"v{VERSION}":
        found.append(f"the tag is {tag} and fugaku_megatron.__version__ {VERSION}: make them equal")
    return found


def write_checksums(folder: Path) -> list[str]:
    """Write SHA256SUMS of this version's files in `folder`, and return its lines. SystemExit for a changed wheel."""
    wheels = sorted(folder.glob(f"fugaku_megatron-{VERSION}-*.whl"))
    recipes = sorted(path for path in (folder / "release").rglob("*") if path.is_file())
    if not wheels or not recipes:
        raise SystemExit(f"release: {folder} lacks wheels or a source archive: run make release")
    for wheel in wheels:
        if problem := record_problem(wheel):
            raise SystemExit(f"release: {wheel}: {problem}")
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder)}"
        for path in [*wheels, *recipes]
    ]
    (folder / "SHA256SUMS").write_text("\n".join(lines) + "\n")
    return lines


def main(arguments: list[str]) -> None:
    if arguments == ["finish"]:
        print(*write_checksums(ROOT / "dist"), sep="\n")
        print(NEXT_STEPS.format(version=VERSION))
        return
    if arguments[:1] != ["check"] or len(arguments) > 2:
        raise SystemExit("usage: python -m tools.release check [TAG] | finish")
    if found := problems(ROOT, *arguments[1:]):
        raise SystemExit("\n".join(f"release: {line}" for line in found))


if __name__ == "__main__":
    main(sys.argv[1:])
