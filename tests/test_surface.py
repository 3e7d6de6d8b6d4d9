"""What ``import fedkeep`` offers is what tests/surface.txt lists."""

from difflib import unified_diff
from pathlib import Path

from tests.surface import lines

LISTED = Path(__file__).with_name("surface.txt")


def test_the_public_surface_is_what_is_listed() -> None:
    """Where the change is meant: ``python -m tests.surface > tests/surface.txt``, and a line in the changelog."""
    listed = LISTED.read_text(encoding="utf-8").splitlines()
    assert list(unified_diff(listed, list(lines()), "listed", "offered", n=0, lineterm="")) == []
