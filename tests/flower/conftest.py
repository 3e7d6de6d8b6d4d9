"""What tests of processes share."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedkeep.flower import watch


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the file of ``watch`` with short waits."""
    text, path = (
        Path(watch.__file__).read_text(encoding="utf-8"),
        tmp_path_factory.mktemp("quick") / "watch.py",
    )
    for long, short in (("GRACE = 5.0", "GRACE = 0.5"), ("AGAIN, PATIENCE = 5.0", "AGAIN, PATIENCE = 0.5")):
        assert text.count(long) == 1
        text = text.replace(long, short)
    path.write_text(text, encoding="utf-8")
    return str(path)
