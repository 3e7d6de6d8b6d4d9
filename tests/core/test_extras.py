"""Where an extra is installed from."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest

from fedkeep.core import errors as extras


@pytest.mark.parametrize(
    ("origin", "said"),
    [
        (None, "pip install 'fedkeep[onnx]'"),
        ({"url": "https://example.org/fedkeep.whl", "archive_info": {}}, "pip install 'fedkeep[onnx]'"),
        ({"url": "file:///home/ann/fedkeep", "dir_info": {}}, "pip install '/home/ann/fedkeep[onnx]'"),
        (
            {"url": "file:///home/ann/my%20work", "dir_info": {"editable": True}},
            "pip install -e '/home/ann/my work[onnx]'",
        ),
    ],
)
def test_an_extra_comes_from_where_fedkeep_came(
    monkeypatch: pytest.MonkeyPatch, origin: object, said: str
) -> None:
    text = None if origin is None else json.dumps(origin)
    monkeypatch.setattr(extras, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text))
    assert extras.installing.__wrapped__("onnx") == said


def test_without_any_distribution_it_has_its_public_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "distribution", missing)
    assert extras.installing.__wrapped__("onnx") == "pip install 'fedkeep[onnx]'"
