"""A client or a model that breaks down is named, and nobody else is harmed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from torch import Tensor, nn

from fedkeep import Phase, methods, sgd, simulate
from fedkeep.core.errors import MethodError, NonFiniteError
from fedkeep.engines import Sequential, Vectorised
from fedkeep.engines.batches import Stream, batches, steps_per_pass
from fedkeep.engines.client_step import Job
from fedkeep.engines.vectorised.padding_probe import runs_together
from fedkeep.methods.terms import squared_error
from tests.engines.test_round import BROKEN, Fragile
from tests.engines.vectorised.cohorts import close, cohort, furl
from tests.refusals import raises
from tests.tiny import Logits, Noisy, Rounds, Scalar, classes, job, pairs


def test_who_breaks_down_is_named_and_nobody_else_is_harmed() -> None:
    method = methods.furl("user", local=Phase(loss=squared_error()))
    work = job(Fragile(), method, BROKEN)
    expected = cohort(work, Sequential())
    assert [result.fault is not None for result in expected] == [False, True, False]
    close(cohort(work, Vectorised()), expected)
    with raises(NonFiniteError, text=str(expected[1].fault).replace("round 3", "round 0")):
        Rounds(work, Vectorised())([0, 1, 2])


def test_a_parameter_that_breaks_down_is_named() -> None:
    """The loss of the last step was finite, what it leads to is not."""
    data = pairs({"a": [(1, 1)], "b": [(1e200, 1e200)]})
    method = methods.fedavg(local=Phase(loss=squared_error(), optimizer=sgd(1e300)))
    result = cohort(job(Scalar(), method, data), Vectorised())
    assert result[0].fault is None
    assert str(result[1].fault).startswith(
        "Client 'b', round 3: the training loss became NaN or infinite after 1 steps."
    )
    data = pairs({"a": [(1, 1)], "b": [(1e100, 1e100)]})
    result = cohort(job(Scalar(), method, data), Vectorised())
    assert result[0].fault is None
    assert str(result[1].fault).startswith("Client 'b', round 3: w became NaN or infinite after 1 steps.")


def test_clients_whose_model_fails_are_named() -> None:
    """Batch normalisation of one example: client user-0 alone has a last mini-batch of one."""
    method = methods.furl("user", local=furl().client.phases[0].but(merge_single=False))
    work = job(Noisy(), method, classes(counts=(5, 8, 8)))
    with pytest.raises(MethodError) as error:
        cohort(work, Vectorised())
    facts = error.value.facts
    assert (facts["who"], facts["examples"]) == ("Client 'user-0', round 3", 1)
    assert "merge_single = True" in facts["advice"]


def test_what_is_advised_where_a_client_has_one_example_lets_the_others_train() -> None:
    data = classes(counts=(5, 1, 8), kind="f4")
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    with pytest.raises(MethodError) as error:
        simulate(model, methods.fedavg(), data, rounds=1)
    advised = "data.select([n for n in range(len(data)) if data.count(n, 'train') > 1])"
    assert advised in error.value.facts["advice"]
    kept = data.select([n for n in range(len(data)) if data.count(n, "train") > 1])
    assert list(kept.ids) == ["user-0", "user-2"]
    assert simulate(model, methods.fedavg(), kept, rounds=1).evaluate("test")["loss"] > 0


def test_each_client_is_named_once() -> None:
    """Trying whether losses can be computed side by side takes the same client twice."""

    class Pairs(Logits):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) < 2:
                raise ValueError("no pair")
            return super().forward(x)

    def said(examples: int, call: Callable[[Job], object]) -> str:
        method = methods.fedavg(local=Phase(batch_size=4))
        with pytest.raises(MethodError) as error:
            call(job(Pairs(), method, classes(counts=(examples,) * 5)))
        return str(error.value)

    cause, way_out = "the model failed on a batch of 1 example: no pair", "says which client it is."
    tried = said(1, runs_together)
    assert tried.startswith(f"Client 'user-0', round 0: {cause}")
    assert way_out not in tried
    trained = said(5, lambda work: cohort(work, Vectorised()))
    assert trained.startswith(f"Clients 'user-0', 'user-1', 'user-2' and 2 more, round 3: {cause}")
    assert trained.endswith(way_out)


def test_a_last_example_joins_the_mini_batch_before_it() -> None:
    """What broke down above trains: user-0 has mini-batches of 5 in place of 4 and 1, the others of 4 and 4."""
    local = Phase(batch_size=4, merge_single=True)
    work = job(Noisy().double(), methods.furl("user", local=local), classes(counts=(5, 8, 8)))
    found = cohort(work, Sequential())
    close(cohort(work, Vectorised()), found)
    whole = job(Noisy().double(), methods.furl("user", local=local.but(batch_size=5)), classes(counts=(5,)))
    close(found[:1], cohort(whole, Sequential()))


def test_what_a_pass_is_cut_into() -> None:
    def sizes(examples: int, size: int, merge: bool) -> list[int]:
        phase = Phase(batch_size=size, merge_single=merge)
        data = classes(counts=(examples,))
        found = [len(b) for b in batches(data, np.arange(examples), phase, Stream(0, "user-0"), 0)]
        assert len(found) == steps_per_pass(examples, phase)
        return found

    assert [sizes(n, 3, False) for n in (1, 3, 4, 5, 7)] == [[1], [3], [3, 1], [3, 2], [3, 3, 1]]
    assert [sizes(n, 3, True) for n in (1, 3, 4, 5, 7)] == [[1], [3], [4], [3, 2], [3, 4]]
    assert sizes(3, 1, True) == [1, 1, 1]  # all are single, as asked for
