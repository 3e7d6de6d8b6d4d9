"""Options against a function's signature."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from fedkeep.core.errors import ConfigError
from fedkeep.experiments.config_tables import check_options
from tests.refusals import raises


def function(
    count: int,
    rate: float = 0.1,
    kind: Literal["a", "b"] = "a",
    init: float | tuple[Literal["normal"], float] = 0.0,
    names: Sequence[str] | None = None,
    where: str | Path = "",
    anything: Any = None,
    *rest: int,
    given: int = 0,
    **more: int,
) -> None:
    """Takes arguments of many types."""


class Strange:
    """A class whose annotation nothing resolves."""

    def __init__(self, size: "Unknown") -> None:  # type: ignore[name-defined]  # noqa: F821, UP037
        pass


def fault(**options: Any) -> str:
    with pytest.raises(ConfigError) as error:
        check_options("table", function, options, {"given"})
    return str(error.value)


def test_what_fits_is_returned() -> None:
    options = {"count": 3, "rate": 1, "kind": "b", "names": ["x"], "where": Path("p"), "anything": {"z": 1}}
    assert check_options("table", function, options) == options
    assert check_options("table", function, {"count": 1, "init": ["normal", 0.5]})["init"] == ("normal", 0.5)


def test_what_does_not_fit_is_named() -> None:
    assert fault() == "table: missing count."
    assert fault(count="3") == "table.count: wanted a whole number; got '3'."
    assert fault(count=True) == "table.count: wanted a whole number; got true."
    assert fault(count=3, kind="c") == "table.kind: wanted 'a' or 'b'; got 'c'."
    assert fault(count=3, init=["normal", "x"]) == "table.init.1: wanted a number; got 'x'."
    assert fault(count=3, init="x") == "table.init: wanted a number or a list; got 'x'."
    assert fault(count=3, names="x").startswith("table.names: wanted a list; got 'x'. Write a list: ['x']")
    message = fault(coutn=3)
    assert message.startswith("table.coutn: unknown key. Did you mean table.count?")


@pytest.mark.parametrize("key", ["given", "rest", "more"])
def test_arguments_that_are_not_for_files(key: str) -> None:
    assert fault(count=1, **{key: 2}).startswith(f"table.{key}: unknown key.")


def test_a_function_without_options() -> None:
    with raises(ConfigError, said="table.size: unknown key. It takes no options."):
        check_options("table", lambda: None, {"size": 1})


def test_annotations_that_cannot_be_resolved_are_not_checked() -> None:
    assert check_options("model", Strange, {"size": "any"}) == {"size": "any"}
