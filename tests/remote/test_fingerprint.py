"""The fingerprint tells apart what must be the same on server and device, part by part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
