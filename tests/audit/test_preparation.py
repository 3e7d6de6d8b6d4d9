"""Round 0 of an audit: which rows shape what a device tells of its data, and whether one client's word is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedkeep.audit.preparation import CANARY, JUDGED, OUT, TRAINED, with_preparation
from fedkeep.audit.report import AuditReport
from fedkeep.data.preparation import Features, Labels, Raw, Rules, Texts

EMPTY = AuditReport(
    name="",
    rounds=1,
    clients=3,
    messages={},
    left=(),
    findings=(),
    sources=(),
    notes=(),
    missed=(),
    allow=(),
    searched={},
    seconds=0.0,
)


def source(tokens: str = "word") -> Raw:
    clients = [client for client in "abcd" for _ in range(6)]
    texts = [f"good bad {client}only" for client in clients]
    values = np.arange(48, dtype=np.float64).reshape(24, 2) % 5
    columns: dict[str, Any] = {
        "text": Texts(values=texts, tokens=tokens, size=100, max_length=10),
        "x": Features(
            names=("age", "kind"), values=values % 2, kinds={"kind": "category"}, levels={"kind": ("m", "n")}
        ),
        "label": Labels(values=["yes", "no"] * 12),
    }
    opted = np.ones(24, bool)
    opted[[1, 7]] = False
    return Raw(
        client=clients,
        split=["train", "train", "train", "train", "valid", "test"] * 4,
        columns=columns,
        opted_in=opted,
    )


def found(raw: Raw, rules: Rules = Rules(), **more: Any) -> dict[tuple[str, str], str]:
    report = with_preparation(EMPTY, raw, rules, secure=False, **more)
    return {(one.leaves, one.source): one.verdict for one in report.findings}


def test_sums_and_words_change_with_rows_to_train_on_alone() -> None:
    assert found(source()) == {("summary/x", TRAINED): "declared"}  # of words none that one client alone has
    rules = Rules(tokens="char")
    assert found(source(), rules) == {
        ("summary/x", TRAINED): "declared",
        ("summary/text", TRAINED): "declared",
    }
    assert found(source("unicode_words"), Rules(standardise=False)) == {}


def broken(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Let a summary be made of other rows than those that shape it."""
    right = Raw.summary
    monkeypatch.setattr(Raw, "summary", lambda self, rules: right(replace(self, **changes), rules))


def test_a_summary_of_rows_that_opted_out_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, opted_in=None)
    assert found(source())["summary/x", OUT] == "leak"
    assert found(source(), allow=["summary/x"])["summary/x", OUT] == "declared"


def test_a_summary_of_rows_to_test_on_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, split=None)
    assert found(source())["summary/x", JUDGED] == "leak"


def test_a_word_that_one_client_alone_has_leaks_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Raw.summary
    alone = {"clients_a_word_here": 1}
    monkeypatch.setattr(Raw, "summary", lambda self, rules: right(self, replace(rules, **alone)))
    report = with_preparation(EMPTY, source(), Rules(), secure=False)
    (leak,) = report.leaks
    assert (leak.leaves, leak.source) == ("summary/text", TRAINED)
    assert not report.ok
    assert CANARY not in str(leak)


def test_what_leaves_is_listed_with_who_sees_it() -> None:
    report = with_preparation(EMPTY, source(), Rules(), secure=True)
    assert {one.label for one in report.left} == {"summary/text", "summary/x", "summary/label"}
    assert {one.seen_by for one in report.left} == {"server (in a sum)"}
