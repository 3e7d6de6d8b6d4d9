"""Draw which room of the house imports which: ``results/house.svg``, and that of other versions beside it.

    python -m benchmarks.house [FOLDER …]

Rooms are the packages of ``src/fedkeep`` (and of the papers, where they are a package of their own), on floors: a room
stands above all that it imports. A line's width grows with the number of imports between two rooms; a red line leads up
or sideways into a circle. FOLDER is a checkout of another version; its picture is named by its commit.
"""

from __future__ import annotations

import argparse
import ast
import math
from collections import Counter
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.measure import RESULTS
from benchmarks.processes import ROOT
from benchmarks.versions import commit


def rooms(root: Path) -> tuple[Counter[tuple[str, str]], Counter[str]]:
    """Return how many imports lead from room to room, and each room's lines."""
    imports, lines = Counter[tuple[str, str]](), Counter[str]()
    for source, whole in ((root / "src/fedkeep", None), (root / "papers/src/fedkeep_papers", "papers")):
        for path in sorted(source.rglob("*.py")):
            parts = path.relative_to(source).parts
            room = whole or (parts[0] if len(parts) > 1 else "fedkeep")
            text = path.read_text(encoding="utf-8")
            lines[room] += text.count("\n")
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ImportFrom) and node.module:
                    names = (
                        [node.module]
                        if node.module != "fedkeep"
                        else [f"fedkeep.{a.name}" for a in node.names]
                    )
                elif isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                else:
                    continue
                for name in names:
                    target = room_of(name, root)
                    if target not in (None, room):
                        imports[room, str(target)] += 1
    return imports, lines


def room_of(module: str, root: Path) -> str | None:
    """Return the room of a module; None: it is of another package."""
    package, *rest = module.split(".")
    if package == "fedkeep_papers":
        return "papers"
    if package != "fedkeep":
        return None
    return rest[0] if rest and (root / "src/fedkeep" / rest[0]).is_dir() else "fedkeep"


def floors(imports: Counter[tuple[str, str]], names: list[str]) -> dict[str, int]:
    """Return each room's floor: one above the highest that it imports, circles left out."""
    found: dict[str, int] = {}

    def floor(room: str, seen: tuple[str, ...]) -> int:
        if room in found:
            return found[room]
        below = [b for (a, b) in imports if a == room and b not in seen]
        height = 1 + max((floor(b, (*seen, room)) for b in below), default=-1)
        if not seen:
            found[room] = height
        return height

    return {room: floor(room, ()) for room in names}


def draw(root: Path, file: Path) -> None:
    """Draw one version."""
    imports, lines = rooms(root)
    names = sorted(set(lines) - {"fedkeep", "configs"})
    level = floors(imports, names)
    place = {}
    for height in sorted(set(level.values())):
        row = [n for n in names if level[n] == height]
        place |= {n: (k - (len(row) - 1) / 2, height) for k, n in enumerate(row)}
    figure = Figure(figsize=(9, 9))
    axes = figure.add_axes((0.02, 0.02, 0.96, 0.92))
    for (a, b), count in imports.items():
        if a in place and b in place:
            up = level[b] >= level[a]
            axes.annotate(
                "",
                xy=place[b],
                xytext=place[a],
                zorder=1,
                arrowprops={
                    "arrowstyle": "->",
                    "lw": 0.5 + math.log2(1 + count) / 2,
                    "alpha": 0.55,
                    "color": "red" if up else "0.45",
                    "connectionstyle": "arc3,rad=0.06",
                    "shrinkB": 18,
                },
            )
    for name, (x, y) in place.items():
        axes.text(
            x,
            y,
            f"{name}\n{lines[name]:,}",
            ha="center",
            va="center",
            fontsize=9,
            zorder=2,
            bbox={"boxstyle": "round", "facecolor": "white", "edgecolor": "0.2"},
        )
    axes.set_xlim(min(x for x, _ in place.values()) - 0.7, max(x for x, _ in place.values()) + 0.7)
    axes.set_ylim(-0.6, max(level.values()) + 0.6)
    axes.axis("off")
    total = sum(lines.values()) - lines["papers"]
    figure.suptitle(f"Rooms of fedkeep at {commit(root)[:7]}: {total:,} lines of library", fontsize=11)
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=Path)
    draw(ROOT, RESULTS / "house.svg")
    for folder in parser.parse_args().folders:
        draw(folder, RESULTS / f"house-{commit(folder)[:7]}.svg")


if __name__ == "__main__":
    main()
