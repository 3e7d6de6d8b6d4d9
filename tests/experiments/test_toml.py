"""Writing TOML, read back by the standard library."""

from __future__ import annotations

import datetime
import math
import tomllib

import pytest

from fedkeep.experiments.toml import to_toml


def test_a_file_by_hand() -> None:
    content = {
        "a": 1,
        "b": 'x"y\\\n\x7f\u00e9',
        "t": {"u": {"h.*": 0.5, "k": None}, "e": {}, "l": [1, True, "z", {"q": 2}]},
    }
    assert to_toml(content) == (
        'a = 1\nb = "x\\"y\\\\\\n\\u007f\u00e9"\n\n[t]\nl = [1, true, "z", {q = 2}]\n\n[t.u]\n"h.*" = 0.5\n\n[t.e]\n'
    )


def test_a_table_of_tables_needs_no_header_of_its_own() -> None:
    assert to_toml({"a": {"b": {"c": 1}}}) == "[a.b]\nc = 1\n"


def test_numbers_and_dates_come_back() -> None:
    day = datetime.date(2020, 2, 29)
    content = {"inf": math.inf, "low": -math.inf, "small": 1e-300, "big": 1e300, "day": day, "one": 1.0}
    found = tomllib.loads(to_toml(content))
    assert found == content
    assert type(found["one"]) is float
    assert math.isnan(tomllib.loads(to_toml({"nan": math.nan}))["nan"])


def test_anything_else_is_refused() -> None:
    with pytest.raises(TypeError, match="got set"):
        to_toml({"a": {1}})
