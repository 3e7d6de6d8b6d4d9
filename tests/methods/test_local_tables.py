"""Tables are trained and sent by the rows that a client's examples use, by methods with losses and hooks of their own."""

from __future__ import annotations

import pytest

from fedkeep import Method, Run, methods, sgd, simulate
from fedkeep.methods import Phase
from fedkeep.methods.fedproto import NearPrototypes
from fedkeep.methods.fedrod import TwoHeads
from fedkeep.methods.terms import cross_entropy
from tests.engines.reference import close
from tests.methods.parts import Words
from tests.tiny import everyone, texts

DATA = texts(counts=(9, 4, 12), vocabulary=300)
PLAIN = Phase(batch_size=4, epochs=2, optimizer=sgd(0.2))
LOCAL = PLAIN.but(optimizer=sgd(0.2, momentum=0.9))


def largest_upload(run: Run) -> float:
    return max(r.value for r in run.history if r.metric == "upload_bytes")


@pytest.mark.parametrize(
    "method",
    [
        methods.apfl(0.3, local=LOCAL),
        methods.fedcp(local=LOCAL),
        methods.fedproto(local=LOCAL),
        methods.fedrod(local=LOCAL),
        methods.gpfl(local=LOCAL.but(optimizer=sgd(0.1, momentum=0.9))),
        methods.per_fedavg(0.3, order="first", local=PLAIN),
        methods.per_fedavg(0.3, order="free", local=PLAIN),
    ],
    ids=lambda method: method.name,
)
def test_tables_are_trained_by_the_rows_that_a_client_uses(method: Method) -> None:
    few, whole = (
        simulate(Words().double(), each, DATA, rounds=3, cohort=2, seed=3)
        for each in (method, method.on_client(tables="whole"))
    )
    close(few.server, whole.server, atol=1e-13)
    close(few.state, whole.state, atol=1e-13)
    close(everyone(few.private, 3), everyone(whole.private, 3), atol=1e-13)
    if method.name != "fedproto":  # it sends prototypes, not the model
        assert largest_upload(few) < largest_upload(whole) / 2


def test_losses_that_read_outputs_alone_say_so() -> None:
    assert not TwoHeads(cross_entropy()).reads_parameters
    assert not NearPrototypes().reads_parameters
