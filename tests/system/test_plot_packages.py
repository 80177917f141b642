"""The picture of rooms and arrows."""

import subprocess
import sys
from pathlib import Path

from tools.plot_rooms import layers, read_arrows

ROOT = Path(__file__).resolve().parents[2]


def package(folder: Path) -> Path:
    """a -> b -> c, and a cycle of c and d."""
    for path, text in {"a/x.py": "from ..b import y\n", "b/y.py": "def f():\n    from ..c import VALUE\n",
                       "c.py": "from . import d\nVALUE = 1\n",
                       "d.py": "import house.c\n", "e.py": "import json\n"}.items():
        file = folder / "house" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        (file.parent / "__init__.py").touch()
    return folder / "house"


def test_rooms_arrows_and_layers(tmp_path):
    rooms, arrows = read_arrows(package(tmp_path))
    assert rooms == ["a", "b", "c", "d", "e"]
    assert set(arrows) == {("a", "b"), ("b", "c"), ("c", "d"), ("d", "c")}
    assert layers(rooms, arrows) == {"a": 2, "b": 1, "c": 0, "d": 0, "e": 0}


def test_the_house_is_drawn(tmp_path):
    command = [sys.executable, "-m", "tools.plot_rooms", "--png", str(tmp_path / "rooms.png"), "now=fugaku_megatron"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("now: "), done.stderr
    assert (tmp_path / "rooms.png").stat().st_size > 10_000
