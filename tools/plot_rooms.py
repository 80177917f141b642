"""Draw which room of the package imports which: rooms as boxes, imports as arrows, cycles in red.

    python -m tools.plot_rooms --png docs/figures/rooms.png "before=/tmp/old/fugaku_megatron" "now=fugaku_megatron"

A room is a package, or a module that stands beside them. An arrow points from the importing room to the imported one. Boxes stand
in layers: every arrow points down unless it is part of a cycle. Imports are read from the source, those inside functions too.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from pathlib import Path

from fugaku_megatron import cli
from fugaku_megatron.config.checks import check
from fugaku_megatron.config.outputs import check_picture

Arrows = Counter  # (room, imported room) -> number of imports
TALL, HALF = 10.0, 0.17  # of a picture, of half a box


def module_name(path: Path, package: Path) -> str:
    """config.run_config for config/run_config.py of the package."""
    return ".".join(path.relative_to(package).with_suffix("").parts)


def imports(path: Path, package: Path) -> set[str]:
    """Absolute dotted names of everything a file of the package imports, modules and names in them alike."""
    here = (package.name, *path.relative_to(package).with_suffix("").parts)
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(here[: -node.level]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return names


def own_imports(path: Path, package: Path) -> set[str]:
    """Those of `imports` that lie in the package, without its name: run.config, comm.base, nn.ops.Ops ..."""
    prefix = f"{package.name}."
    return {name.removeprefix(prefix) for name in imports(path, package) if name.startswith(prefix)}


def read_arrows(package: Path) -> tuple[list[str], Arrows]:
    """The rooms of a package, and how many modules of a room import one of another."""
    paths = [path for path in package.rglob("*.py") if path.name != "__init__.py"]
    modules = {module_name(path, package) for path in paths}
    arrows: Arrows = Counter()
    for path in paths:
        room = module_name(path, package).split(".")[0]
        for name in own_imports(path, package) & modules:
            if name.split(".")[0] != room:
                arrows[room, name.split(".")[0]] += 1
    return sorted({name.split(".")[0] for name in modules}), arrows


def reachable(arrows: Arrows, start: str) -> set[str]:
    """Rooms at the end of some path of arrows."""
    rooms, waiting = set(), [start]
    while waiting:
        room = waiting.pop()
        for target in {b for a, b in arrows if a == room} - rooms:
            rooms.add(target)
            waiting.append(target)
    return rooms


def layers(rooms: list[str], arrows: Arrows) -> dict[str, int]:
    """Layer 0 imports nothing; every other room stands above what it imports, rooms of one cycle side by side."""
    below = {room: reachable(arrows, room) for room in rooms}
    cycle = {room: {other for other in below[room] if room in below[other]} for room in rooms}
    level: dict[str, int] = {}

    def place(room: str) -> int:
        if room not in level:
            group = cycle[room] or {room}
            outside = {b for a, b in arrows if a in group and b not in group}
            level.update(dict.fromkeys(group, 1 + max((place(b) for b in outside), default=-1)))
        return level[room]

    for room in rooms:
        place(room)
    return level


def positions(rooms: list[str], arrows: Arrows) -> dict[str, tuple[float, float]]:
    """Centres of boxes: layers above each other, a layer in the order of what it imports, so that fewer arrows cross."""
    level = layers(rooms, arrows)
    widest = max(Counter(level.values()).values())
    centres: dict[str, tuple[float, float]] = {}
    for layer in range(max(level.values()) + 1):
        row = [room for room in rooms if level[room] == layer]

        def weight(room: str) -> float:
            targets = [centres[b][0] for a, b in arrows if a == room and b in centres]
            return sum(targets) / len(targets) if targets else 0.0

        row.sort(key=lambda room: (weight(room), room))
        for n, room in enumerate(row):
            centres[room] = ((n + 0.5) * widest / len(row), TALL * layer / max(1, *level.values()))
    return centres


def draw(axes: object, title: str, rooms: list[str], arrows: Arrows) -> None:
    """One picture of a package."""
    centres = positions(rooms, arrows)
    cyclic = {(a, b) for a, b in arrows if a in reachable(arrows, b)}
    for (a, b), count in arrows.items():
        (x0, y0), (x1, y1) = centres[a], centres[b]
        color, line = ("tab:red", 1.8) if (a, b) in cyclic else ("0.55", 0.5 + 0.15 * min(count, 12))
        axes.annotate("", xy=(x1, y1 + HALF), xytext=(x0, y0 - HALF),
                      arrowprops={"arrowstyle": "-|>", "color": color, "lw": line, "shrinkA": 0, "shrinkB": 0})
    for room, (x, y) in centres.items():
        axes.text(x, y, room, ha="center", va="center", fontsize=11,
                  bbox={"boxstyle": "round,pad=0.35", "facecolor": "#dbe9f6", "edgecolor": "0.3"}, zorder=3)
    axes.set_title(f"{title}: {len(rooms)} rooms, {len(arrows)} arrows, {len(cyclic)} of them in cycles", fontsize=13)
    axes.set_xlim(0, max(x for x, _ in centres.values()) + 1)
    axes.set_ylim(-3 * HALF, TALL + 3 * HALF)
    axes.axis("off")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("packages", nargs="+", metavar="TITLE=FOLDER")
    parser.add_argument("--png", required=True, metavar="FILE")


def main(options: argparse.Namespace) -> int:
    """Read the packages, say what they have, draw them side by side. Raises ValueError, one line, for a user's mistake."""
    check_picture(options.png)
    for package in options.packages:
        check(Path(package.partition("=")[2]).is_dir() and package[0] != "=" and "=" in package,
              f"{package}: give TITLE=FOLDER, a folder that is there")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5 * len(options.packages), 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    for n, package in enumerate(options.packages):
        title, _, folder = package.partition("=")
        rooms, arrows = read_arrows(Path(folder))
        draw(figure.add_subplot(1, len(options.packages), n + 1), title, rooms, arrows)
        print(f"{title}: {len(rooms)} rooms, {len(arrows)} arrows")
    figure.savefig(options.png, dpi=110)
    return 0


if __name__ == "__main__":
    sys.exit(cli.start("plot_rooms", sys.modules[__name__], sys.argv[1:]))
