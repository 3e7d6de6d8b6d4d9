"""An error in a worker process is raised in the parent, and the round it stopped changed nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedkeep.core.errors import MethodError, NonFiniteError, WorkerError
from fedkeep.engines import Sequential, Workers
from tests.engines.test_round import BROKEN, METHOD, Fragile
from tests.engines.workers.rounds import check, rounds, scripted, throw
from tests.refusals import raises
from tests.tiny import Logits, Rounds, job, same_bits


class OwnError(Exception):
    """An error of the user's own, with more than a message."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)


class Quoting(Exception):
    """Says its argument as ``KeyError`` does."""

    def __str__(self) -> str:
        return repr(self.args[0])


class Difficult(Exception):
    """An error that can't be made from its message."""

    def __init__(self, one: object, two: object) -> None:
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize(
    "error",
    [
        OwnError(3, "text"),
        ArithmeticError("column"),
        MethodError("A message."),
        MethodError("Wanted {wanted}.", wanted=3),
        ZeroDivisionError(),
        SystemExit(4),
    ],
    ids=lambda e: type(e).__name__,
)
def test_an_error_in_a_worker_is_raised_here(engine: Workers, error: BaseException) -> None:
    with pytest.raises(type(error)) as found:
        rounds(engine, [[0, 1, 2, 3]], **scripted(throw(error)))
    assert (str(found.value), found.value.args) == (str(error), error.args)
    assert getattr(found.value, "facts", None) == getattr(error, "facts", None)
    assert "In the worker process:" in found.value.__notes__[0]
    assert "self.act()" in found.value.__notes__[0]
    check(rounds(engine, [[0, 1]]), rounds(Sequential(), [[0, 1]]))  # the engine goes on


@pytest.mark.parametrize(
    ("error", "text"),
    [(Difficult(1, 2), "Difficult: 1 and 2"), (Quoting(Path("a")), f"Quoting: {Path('a')!r}")],
    ids=["difficult", "not plain"],
)
def test_an_error_that_cannot_be_made_again_is_told(engine: Workers, error: Exception, text: str) -> None:
    with raises(WorkerError, text=text):
        rounds(engine, [[0, 2]], **scripted(throw(error)))


def test_what_the_model_raises_is_a_method_error_as_ever(engine: Workers) -> None:
    found = []
    for each in (engine, Sequential()):
        with pytest.raises(MethodError) as error:
            rounds(each, [[0, 1]], model=lambda: Logits(features=4))
        found.append(str(error.value))
    assert found[0] == found[1]
    assert found[0].startswith("Client 'user-0', round 0: the model failed on a batch of 4 examples: ")


def test_of_two_errors_the_first_in_the_cohort_is_raised(engine: Workers) -> None:
    """Whichever happens first: ``bad`` is the largest client, so it is trained first, but its turn comes later."""
    data = dict(scripted(throw(ArithmeticError("bad"))))
    data["data"].columns["x"][0] = 13.0
    with pytest.raises(ArithmeticError):
        rounds(engine, [[2, 1, 0]], **data)
    with pytest.raises(NonFiniteError) as error:
        rounds(engine, [[0, 1, 2]], model=Fragile, method=METHOD, data=BROKEN)
    assert str(error.value).startswith("Client 'bad', round 0: the training loss became NaN")


def test_a_round_that_failed_changed_nothing(engine: Workers) -> None:
    options = scripted(throw(ValueError("stop")))
    work = job(options["model"](), options["method"], options["data"])
    run = Rounds(work, engine)
    before = {n: v.clone() for n, v in run.server.params.items()}
    with pytest.raises(MethodError):
        run([0, 1, 2, 3])
    assert same_bits(run.server.params, before)
    assert run.server.round == 0
    assert work.store.seen(range(4)) == [False] * 4
