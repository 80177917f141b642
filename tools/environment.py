"""The environment of a checkout: its scripts start themselves again with the Python of .venv when theirs lacks the packages.

Needs nothing but a Python 3, which may be too old for the rest. Left out: the command fugaku-megatron, which is part of an
environment.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLDEST = (3, 10)


def use(*packages: str) -> None:
    """Continue with a Python that has the packages: this one, else .venv's, whose programs are then first on the PATH.

    Raises SystemExit with one line when neither has them.
    """
    folder = ROOT / ".venv" / "bin"
    inside = folder.exists() and os.path.samefile(sys.prefix, folder.parent)
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    usable = not missing and sys.version_info >= OLDEST
    if inside or not usable and folder.exists():
        paths = [
            path
            for path in os.environ.get("PATH", "").split(os.pathsep)
            if path and path != str(folder)
        ]
        os.environ["PATH"] = os.pathsep.join([str(folder), *paths])
    if not usable and not inside and (folder / "python").exists():
        os.execv(str(folder / "python"), [str(folder / "python"), *sys.argv])
    if not usable:
        lack = (
            f"lacks {' and '.join(missing)}"
            if missing
            else f"is older than {OLDEST[0]}.{OLDEST[1]}"
        )
        sys.exit(
            f"{Path(sys.argv[0]).name}: {sys.executable} {lack}: run `make setup` in {ROOT}, or pip install it there"
        )
