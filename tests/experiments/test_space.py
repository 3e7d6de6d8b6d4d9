"""The space of a sweep: what ranges mean, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedkeep.core.errors import ConfigError
from fedkeep.experiments.sweeps import Range, read_space
from tests.refusals import raises

SPACE = """
[method.optimizer]
learning_rate = { low = 0.01, high = 1.0, log = true }
rates = { "user*" = { low = 0.0, high = 1.0, step = 0.25 } }

[method]
batch_size = { choices = [8, 16] }

[run]
cohort = { low = 2, high = 8 }

[for.furl.method]
private = ["user"]

[for.fedprox.method]
mu = { low = 0.001, high = 1.0, log = true }
batch_size = 4
"""


class Asked:
    """Stands for a trial: notes what it is asked, and answers with the upper end."""

    def __init__(self) -> None:
        self.asked: dict[str, tuple[Any, ...]] = {}

    def suggest_int(self, name: str, low: int, high: int, *, step: int, log: bool) -> int:
        self.asked[name] = ("int", low, high, step, log)
        return high

    def suggest_float(self, name: str, low: float, high: float, *, step: float | None, log: bool) -> float:
        self.asked[name] = ("float", low, high, step, log)
        return high

    def suggest_categorical(self, name: str, choices: Any) -> str:
        self.asked[name] = ("choices", *choices)
        return str(choices[-1])


def read(text: str, methods: list[str] | None = None, **given: str) -> Any:
    path = Path("space.toml")
    path.write_text(text, encoding="utf-8")
    return read_space(path, given, methods or ["furl"])


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_each_method_has_what_is_for_all_and_what_is_for_it() -> None:
    found = read(SPACE, ["furl", "fedprox"])
    shared = {"method.optimizer.learning_rate", 'method.optimizer.rates."user*"', "run.cohort"}
    assert set(found["furl"].ranges) == shared | {"method.batch_size"}
    assert found["furl"].fixed == {"method.private": '["user"]'}
    assert set(found["fedprox"].ranges) == shared | {"method.mu"}
    assert found["fedprox"].fixed == {"method.batch_size": "4"}


def test_what_a_trial_is_asked() -> None:
    asked = Asked()
    ranges = read(SPACE)["furl"].ranges
    values = {key: one.suggest(asked, key) for key, one in ranges.items()}
    assert asked.asked == {
        "method.optimizer.learning_rate": ("float", 0.01, 1.0, None, True),
        'method.optimizer.rates."user*"': ("float", 0.0, 1.0, 0.25, False),
        "method.batch_size": ("choices", "8", "16"),
        "run.cohort": ("int", 2, 8, 1, False),
    }
    assert values["method.batch_size"] == 16
    lists = Range(choices=(["a.*"], ["b.*", "c"], True, "x"))
    assert Range(choices=lists.choices[:2]).suggest(asked, "private") == ["b.*", "c"]
    assert [str(one) for one in (*ranges.values(), lists)] == [
        "0.01 to 1.0, by the logarithm",
        "0.0 to 1.0 in steps of 0.25",
        "one of 8, 16",
        "whole numbers from 2 to 8",
        'one of ["a.*"], ["b.*", "c"], true, "x"',
    ]


def test_ranges_of_the_command_replace_those_of_the_file() -> None:
    more = {"method.optimizer.learning_rate": "{low = 1, high = 3}", "model.user_dim": "{choices = [4, 8]}"}
    found = read_space(None, more, ["furl"])["furl"].ranges
    assert {key: one.plain() for key, one in found.items()} == {
        "method.optimizer.learning_rate": {"low": 1, "high": 3},
        "model.user_dim": {"choices": [4, 8]},
    }
    both = read(SPACE, None, **more)["furl"].ranges
    assert both["method.optimizer.learning_rate"].high == 3
    assert "run.cohort" in both


def test_one_value_is_no_choice() -> None:
    told = r"^space\.toml: method\.batch_size: there is one value only, 8, so nothing is chosen\.$"
    for text in ("choices = [8]", "low = 8, high = 8"):
        with pytest.warns(UserWarning, match=told):
            read(f"method.batch_size = {{ {text} }}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "",
            (
                "the space of furl is empty: nothing is to be chosen. Give a range, e.g. method.optimizer.learning_rate = "
                "{ low = 0.01, high = 1.0, log = true }."
            ),
        ),
        ("method.mu = {low = 2.0, high = 1.0}", "method.mu: the range is empty: low is 2.0, high is 1.0."),
        (
            (
                "method.optimizer = {choices = [{kind = 'sgd'}, {kind = 'adam'}]}\n"
                "[for.furl.method.optimizer]\nlearning_rate = {low = 0.1, high = 1.0}"
            ),
            (
                "method.optimizer is chosen whole, and method.optimizer.learning_rate in it apart: one would undo the other. "
                "Give ranges of keys, or choices of tables that hold all."
            ),
        ),
        (
            "method.mu = {choices = [2026-01-01]}",
            (
                "method.mu: choices: wanted numbers, texts, truth values, lists or tables; got [datetime.date(2026, 1, 1)]."
            ),
        ),
        (
            "method.mu = {choices = []}",
            "method.mu: the range is empty: choices wants a list of values; got [].",
        ),
        ("method.mu = {choices = [1, 1]}", "method.mu: choices names a value twice: [1, 1]."),
        (
            "method.mu = {choices = [1, 2], low = 1}",
            "method.mu: wanted either choices or low and high; got {'choices': [1, 2], 'low': 1}.",
        ),
        ("method.mu = {low = 1.0}", "method.mu: high: wanted a number; got None."),
        ('method.mu = {low = "a", high = 2}', "method.mu: low: wanted a number; got 'a'."),
        (
            "method.mu = {low = 0.0, high = 1.0, log = true}",
            "method.mu: by the logarithm, low must be above 0; got 0.0.",
        ),
        (
            "method.mu = {low = 1, high = 2, log = true, step = 1}",
            "method.mu: step: wanted a number above 0, and none with log; got 1.",
        ),
        (
            "method.mu = {low = 1, high = 2, step = 0.5}",
            "method.mu: step: wanted a whole number between whole numbers; got 0.5.",
        ),
        ("method.mu = {low = 1, high = 2, log = 1}", "method.mu: log: wanted true or false; got 1."),
        (
            "method.mu = {low = 1.0, high = 2.0, logg = true}",
            "method.mu: unknown key 'logg' of a range. Did you mean 'log'? Known here: low, high, log, step, choices.",
        ),
        (
            "method.mu = 3",
            (
                "method.mu: wanted a range, e.g. { low = 0.01, high = 1.0, log = true } or { choices = [1, 2] }; got 3. What "
                "does not vary stands in the configuration."
            ),
        ),
        (
            "methd.mu = {low = 1, high = 2}",
            (
                "methd.mu: a sweep chooses settings of the tables method, model, privacy, and run.cohort and run.sampling: "
                "what is judged, and how long, is the same for all trials. Did you mean 'method'?"
            ),
        ),
        (
            "run.rounds = {low = 1, high = 2}",
            (
                "run.rounds: a sweep chooses settings of the tables method, model, privacy, and run.cohort and run.sampling: "
                "what is judged, and how long, is the same for all trials."
            ),
        ),
        (
            'method.kind = {choices = ["furl", "fedavg"]}',
            "method.kind: a sweep keeps to its kinds. Name methods with --methods; sweep models apart.",
        ),
        (
            "method.adapt.epochs = {low = 1, high = 9}",
            "method.adapt.epochs: a sweep chooses by valid during training, and adapting afterwards is not seen there.",
        ),
        ("for.fulr.method.mu = 1", "for.fulr: there is no such method. Did you mean 'furl'?"),
        ("for = 3", "for: wanted tables of methods, e.g. [for.fedprox.method]; got 3."),
    ],
)
def test_spaces_that_are_refused(text: str, message: str) -> None:
    with raises(ConfigError, said=f"space.toml: {message}"):
        read(text)
