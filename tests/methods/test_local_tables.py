"""Tables are trained and sent by the rows that a client's examples use, by methods with losses and hooks of their own."""

from __future__ import annotations

import numpy as np
import pytest

from fedkeep import FederatedData, Method, Run, methods, sgd, simulate
from fedkeep.methods import Phase
from fedkeep.methods.candidates import BPR, Pointwise
from fedkeep.methods.fedproto import NearPrototypes
from fedkeep.methods.fedrod import TwoHeads
from fedkeep.methods.terms import TaskLoss, binary_cross_entropy, cross_entropy, squared_error
from fedkeep.tasks import KINDS
from tests.engines.reference import close
from tests.methods.parts import Words
from tests.tiny import everyone, texts

DATA = texts(counts=(9, 4, 12), vocabulary=300)
EVERY = np.arange(DATA.examples)
SEVERAL = FederatedData.from_columns(
    DATA.clients_of(EVERY),
    {**DATA.columns, "label": np.eye(3, dtype=int)[DATA.columns["label"]]},
    ["train"] * len(EVERY),
    {"task": "multi_label"},
)
"""The same texts, with a row of labels each."""
PLAIN = Phase(batch_size=4, epochs=2, optimizer=sgd(0.2))
LOCAL = PLAIN.but(optimizer=sgd(0.2, momentum=0.9))


def largest_upload(run: Run) -> float:
    return max(r.value for r in run.history if r.metric == "upload_bytes")


METHODS = [
    methods.apfl(0.3, local=LOCAL),
    methods.fedcp(local=LOCAL),
    methods.fedproto(local=LOCAL),
    methods.fedrod(local=LOCAL),
    methods.gpfl(local=LOCAL.but(optimizer=sgd(0.1, momentum=0.9))),
    methods.per_fedavg(0.3, order="first", local=PLAIN),
    methods.per_fedavg(0.3, order="free", local=PLAIN),
]
LOSSES = [
    (Pointwise(), DATA),
    (BPR(), DATA),
    (squared_error(), SEVERAL),
    (binary_cross_entropy(), SEVERAL),
    (TaskLoss(KINDS["multi_label"]), SEVERAL),
]


@pytest.mark.parametrize(
    ("method", "data"),
    [
        *((method, DATA) for method in METHODS),
        *((methods.fedavg(local=LOCAL.but(loss=loss)), data) for loss, data in LOSSES),
    ],
    ids=[*(method.name for method in METHODS), *(type(loss).__name__ for loss, _ in LOSSES)],
)
def test_tables_are_trained_by_the_rows_that_a_client_uses(method: Method, data: FederatedData) -> None:
    few, whole = (
        simulate(Words().double(), each, data, rounds=3, cohort=2, seed=3)
        for each in (method, method.on_client(tables="whole"))
    )
    close(few.server, whole.server, atol=1e-13)
    close(few.state, whole.state, atol=1e-13)
    close(everyone(few.private, 3), everyone(whole.private, 3), atol=1e-13)
    if method.name != "fedproto":  # it sends prototypes, not the model
        assert largest_upload(few) < largest_upload(whole) / 2


def test_moon_runs_the_previous_model_of_whole_tables_and_says_so() -> None:
    with pytest.warns(UserWarning, match="'embedding.weight' is trained and sent whole.*Contrast reads"):
        simulate(Words(), methods.moon(local=LOCAL), DATA, rounds=1, cohort=2)


def test_losses_that_read_outputs_alone_say_so() -> None:
    assert not TwoHeads(cross_entropy()).reads_parameters
    assert not NearPrototypes().reads_parameters
