"""The fingerprint tells apart what must be the same on server and device, part by part."""

from __future__ import annotations

import functools
import importlib
import sys
import types
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


def test_the_code_of_fedkeep_is_told_apart_by_what_its_files_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "__init__.py").touch()
    monkeypatch.setattr("fedkeep.__file__", str(tmp_path / "__init__.py"))
    found = set()
    for name, content in (("a.py", "x = 1"), ("a.py", "x = 2"), ("b.py", "x = 2")):
        (tmp_path / name).write_text(content)
        found.add(fingerprint.code.__wrapped__())
    assert len(found) == 3


NET = """
import torch

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


def own(
    folder: Path, name: str, content: bytes, monkeypatch: pytest.MonkeyPatch, wrap: Any = None
) -> dict[str, str]:
    """Return the own code of a method whose ``finish`` is in a file of this content."""
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    (folder / f"{name}.py").write_bytes(content)
    finish = importlib.import_module(name).finish
    return fingerprint.own_code(Logits(), FURL.on_client(finish=wrap(finish) if wrap else finish))


def test_a_file_is_the_same_with_another_systems_ends_of_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = NET.format(how="tanh").encode()
    first = own(tmp_path, "a_file_of_lines", content, monkeypatch)
    assert "a_file_of_lines" in first
    assert own(tmp_path, "a_file_of_lines", content.replace(b"\n", b"\r\n"), monkeypatch) == first


def test_the_file_of_a_function_whose_arguments_are_bound_is_told_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = NET.format(how="tanh").encode()
    assert "a_bound_file" in own(tmp_path, "a_bound_file", content, monkeypatch, functools.partial)


def test_a_compiled_module_is_not_read_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each system has another one."""
    module = types.ModuleType("a_compiled_one")
    module.__file__ = str(tmp_path / "a_compiled_one.so")
    Path(module.__file__).write_bytes(b"\x7fELF")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    net = type("Net", (Logits,), {"__module__": module.__name__})()
    assert module.__name__ not in fingerprint.own_code(net, FURL)
