"""Asserting what an error is about: its class and its facts, not its wording."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def raises(
    kind: type[Exception], /, *, said: str = "", text: str | None = None, **facts: Any
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Assert that an error of this class, and of none below it, is raised.

    Args:
        kind: its class.
        said: what its message says, among other things.
        text: its whole message; None: any.
        facts: its facts, among others.
    """
    with pytest.raises(kind) as caught:
        yield caught
    assert type(caught.value) is kind
    assert said in str(caught.value)
    assert text is None or str(caught.value) == text
    assert {name: caught.value.facts.get(name) for name in facts} == facts
