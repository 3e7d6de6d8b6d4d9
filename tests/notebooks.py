"""Runs notebooks without Jupyter: cells one after the other in one namespace, what they print kept as their output.

``python -m tests.notebooks`` writes today's outputs into docs/notebooks/.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any

from tests.documents import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def run_notebook(path: Path) -> dict[str, Any]:
    """Return the notebook as it is after a run in the current folder."""
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "notebook"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for count, cell in enumerate(cells, 1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"{path.name}, cell {count}", "exec"), names)
        lines = printed.getvalue().splitlines(keepends=True)
        cell["execution_count"] = count
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    return notebook


if __name__ == "__main__":
    for one in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            text = json.dumps(run_notebook(one), indent=1, ensure_ascii=False)
        one.write_text(text + "\n", encoding="utf-8")
