"""Packages as if they were installed, by the metadata in which fedkeep finds entry points; and the one that may be missing."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

PAPERS = Path(__file__).resolve().parent.parent / "papers"


def write_package(folder: Path, name: str, entry_points: Mapping[str, Mapping[str, str]]) -> Path:
    """Write a package's metadata with its entry points by group; returns the folder, for ``sys.path``."""
    info = folder / f"{name.replace('-', '_')}-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n", encoding="utf-8")
    lines = []
    for group, points in entry_points.items():
        lines += [f"[{group}]", *(f"{point} = {value}" for point, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def write_papers(folder: Path) -> Path:
    """Write the metadata of this tree's ``papers``, as its ``pyproject.toml`` says them."""
    project = tomllib.loads((PAPERS / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return write_package(folder, project["name"], project["entry-points"])


def skip_without_flower(what: str, error: BaseException | None) -> None:
    """Skip what has met neither Flower nor what comes with it, where that extra is not installed."""
    missing = isinstance(error, ModuleNotFoundError) and error.name in ("flwr", "httpx", "uvicorn")
    if missing and find_spec("flwr") is None:
        pytest.skip(f"{what} needs the extra flower", allow_module_level=True)
