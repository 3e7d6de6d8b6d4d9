"""Asserting what an error is about: its class and its facts, not its wording."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fedkeep.core.errors import FedkeepError


@contextmanager
def raises(
    kind: type[FedkeepError], /, *, said: str = "", **facts: Any
) -> Iterator[pytest.ExceptionInfo[FedkeepError]]:
    """Assert that an error of this class, and of none below it, is raised.

    Args:
        kind: its class.
        said: what its message says, among other things.
        facts: its facts, among others.
    """
    with pytest.raises(kind) as caught:
        yield caught
    assert type(caught.value) is kind
    assert said in str(caught.value)
    assert {name: caught.value.facts.get(name) for name in facts} == facts
