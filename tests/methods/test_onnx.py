"""Every method's answer can be written as ONNX but kNN-Per's, as ONNX knows no distances between rows.

Writing compares onnxruntime's numbers with torch's.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fedkeep.core.errors import MethodError
from tests.methods.table import ROWS, trained

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.mark.parametrize("name", ROWS)
def test_every_method_is_written_as_onnx(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    run = trained(name, 2)
    client = str(run.data.ids[0])
    if name == "knn_per":
        with pytest.raises(MethodError):
            run.export(tmp_path / "m", [client], onnx=True)
        return
    assert run.export(tmp_path / "m", [client], onnx=True) == [client]
    assert list((tmp_path / "m").rglob("*.onnx"))
