"""Passes that a method asks for count, whether its local phase counts passes or steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedkeep import adam
from fedkeep import methods as m
from fedkeep.core.errors import ConfigError, MethodError
from fedkeep.methods import Init, Method, Phase

STEPS = Phase(steps=1, batch_size=2)


@pytest.mark.parametrize(
    ("method", "rounds", "adapt"),
    [
        (m.fedrep(head_epochs=7, local=STEPS), [(7, None), (1, 1)], [(7, None)]),
        (m.ditto(own_epochs=7, local=STEPS), [(1, 1), (7, None)], [(10, None)]),
        (m.ditto(local=STEPS), [(1, 1), (1, 1)], [(10, None)]),
        (m.ditto(local=replace(STEPS, steps=None, epochs=3)), [(3, None), (3, None)], [(10, None)]),
        (m.fine_tuned(tune_epochs=7, local=STEPS), [(1, 1)], [(7, None)]),
        (m.mr_mtl(local=STEPS), [(1, 1)], [(10, None)]),
        (m.pfedme(local=STEPS), [(1, 1), (1, 1)], [(10, None)]),
        (m.fedamp(local=STEPS), [(1, 1)], [(10, None)]),
        (m.mixture(local=STEPS, local_epochs=7, mixture_epochs=8), [(1, 1)], [(7, None), (8, None)]),
        (m.furl("user", local=STEPS), [(1, 1)], [(10, None)]),
    ],
    ids=lambda v: v.name if isinstance(v, Method) else "",
)
def test_passes(
    method: Method, rounds: list[tuple[int, int | None]], adapt: list[tuple[int, int | None]]
) -> None:
    assert [(p.epochs, p.steps) for p in method.client.phases] == rounds
    assert [(p.epochs, p.steps) for p in method.adapt.phases] == adapt


def test_steps_that_are_asked_for_with_passes_stay() -> None:
    assert STEPS.but(epochs=3, steps=2).steps == 2
    assert STEPS.but(batch_size=4).steps == 1


def test_a_list_of_a_first_value_is_the_pair() -> None:
    assert Init(value=["normal", 0.3]) == Init(value=("normal", 0.3))  # type: ignore[arg-type]


def test_settings_that_are_none_are_refused_when_they_are_made() -> None:
    with pytest.raises(MethodError, match=r"^trains must be patterns of.*'head\.\*'.*3"):
        Phase(trains=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^betas must be two numbers in \[0, 1\); got \(0\.9,\)\.$"):
        adam(0.1, betas=(0.9,))  # type: ignore[arg-type]
    for value in (("normal", "x"), float("nan"), ("normal", float("inf"))):
        with pytest.raises(ConfigError, match=r"^private_init must be a.*'normal'.*'model'"):
            Init(value=value)  # type: ignore[arg-type]
