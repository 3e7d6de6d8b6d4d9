"""The fingerprint tells apart what must be the same on server and device, part by part."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import fedkeep
from fedkeep import Phase, averaging, methods
from fedkeep.remote import fingerprint
from fedkeep.split import Split
from tests.tiny import Logits

FURL = methods.furl("user", local=Phase(batch_size=4))


def test_the_code_is_the_version_and_a_digest_of_the_files() -> None:
    version, _, source = fingerprint.code().partition(" ")
    assert version == fedkeep.__version__
    assert len(source) == 64


NET = """
import torch
from fedkeep.methods import Finished

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3, bias=False)
        torch.nn.init.ones_(self.linear.weight)

    def forward(self, x):
        return self.linear(x).{how}()

def finish(given):
    return Finished()
"""


def test_another_version_of_the_models_or_the_methods_file_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what ``forward`` does nor what a function does is in their names."""
    monkeypatch.syspath_prepend(tmp_path)

    def parts(model: str, method: str) -> dict[str, str]:
        for name, how in (("a_models_file", model), ("a_methods_file", method)):
            (tmp_path / f"{name}.py").write_text(NET.format(how=how))
            monkeypatch.delitem(sys.modules, name, raising=False)
            importlib.invalidate_caches()
        net = importlib.import_module("a_models_file").Net()
        own = FURL.but(split=Split()).on_client(finish=importlib.import_module("a_methods_file").finish)
        return fingerprint.parts(own.made_for(net), own, dict(net.state_dict()), {})

    first = parts("tanh", "relu")
    assert fingerprint.differing(first, parts("tanh", "relu")) == ""
    assert fingerprint.differing(first, parts("relu", "relu")) == "own code"
    assert fingerprint.differing(first, parts("tanh", "tanh")) == "own code"


def test_every_part_is_told_apart() -> None:
    def parts(model: nn.Module, method: Any, encoding: Mapping[str, Any]) -> dict[str, str]:
        module = method.made_for(model)
        return fingerprint.parts(module, method, dict(module.state_dict()), encoding)

    first = parts(Logits(), FURL, {"a": 1})
    assert fingerprint.differing(first, parts(Logits(), FURL, {"a": 1})) == ""
    assert fingerprint.differing(first, parts(Logits(), FURL, {"a": 2})) == "encoding"
    server = FURL.but(server=averaging(by="uniform"))
    assert fingerprint.differing(first, parts(Logits(), server, {"a": 1})) == "method"
    frozen = FURL.but(split=Split("user", frozen="linear.bias"))
    assert (
        fingerprint.differing(first, parts(Logits(), frozen, {"a": 1}))
        == "method, frozen values, split, uploads"
    )
    assert fingerprint.differing(first, parts(Logits(labels=4), FURL, {"a": 1})) == (
        "layers, initial values, uploads"
    )
    assert fingerprint.differing({**first, "more": "x"}, first) == "more"
