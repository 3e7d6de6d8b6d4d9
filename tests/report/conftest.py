from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.report.run_folders import write_run_folder


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes one run directory below tmp_path."""

    def write(folder: str = "run", **settings: Any) -> Path:
        return write_run_folder(tmp_path / folder, **settings)

    return write
