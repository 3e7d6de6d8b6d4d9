"""README and CONTRIBUTING: their Python runs, and what they name exists."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.documents import ROOT, blocks, run_python


@pytest.fixture(scope="module")
def readme() -> tuple[dict[str, Any], str]:
    """What the README's Python leaves behind, and what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        names = run_python(ROOT / "README.md")
    return names, printed.getvalue()


def test_the_first_snippet_trains_in_ten_lines_and_prints_metrics(readme: tuple[dict[str, Any], str]) -> None:
    names, printed = readme
    first = blocks(ROOT / "README.md", "python")[0].text
    assert len([line for line in first.splitlines() if line and not line.startswith("import")]) <= 10
    assert names["run"].evaluate("test")["accuracy"] > 0.75
    (shown,) = blocks(ROOT / "README.md", "text")
    assert re.fullmatch(r"\d\.\d\d against \d\.\d\d\n", printed)
    for here, there in zip(printed.split(), shown.text.split(), strict=True):  # but for processors' rounding
        assert here == there or abs(float(here) - float(there)) <= 0.05


def test_the_snippet_keeps_its_private_part_private(readme: tuple[dict[str, Any], str]) -> None:
    run = readme[0]["run"]
    assert set(run.server) == {"weight", "bias"}
    own = [run.parameters(name)["user"] for name in ("user-7", "user-8")]
    assert not torch.equal(own[0], own[1])
    assert run.evaluate("test")["accuracy"] > run.evaluate("test", stage="shared")["accuracy"]


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for name in ("README.md", "CONTRIBUTING.md"):
        named = [
            w.split()[1]
            for b in blocks(ROOT / name, "sh")
            for w in b.text.splitlines()
            if w.startswith("make ")
        ]
        assert named
        assert set(named) <= targets


def test_the_licence_is_the_whole_apache_licence() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_every_room_is_on_the_map() -> None:
    rooms = {path.parent.name for path in Path(ROOT, "src", "fedkeep").glob("*/__init__.py")}
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert [room for room in sorted(rooms) if f"`{room}`" not in text] == []
