"""Every method's run has one answer: judged, framed, saved, loaded, written and predicted with it is one number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedkeep
from fedkeep import FederatedData
from fedkeep.core.errors import MethodError
from fedkeep.core.net import logits_of
from fedkeep.core.sealed import read_sealed
from fedkeep.engines.rehearsal import told_head
from fedkeep.engines.use import encoding_of, predictions
from fedkeep.experiments.learned import summarize
from fedkeep.experiments.personalize.exported import INFO
from fedkeep.methods import Global, Sent
from fedkeep.methods.private import SendWithoutBound
from fedkeep.models import Linear
from tests.methods.table import DATA, ROWS, trained
from tests.tiny import classes, everyone, on_server, same_bits

pytestmark = pytest.mark.filterwarnings("ignore:.*were never drawn:UserWarning")
"""The best of three rounds may stand before some clients' first one."""
LAST = {"fine_tuned", "per_fedavg", "fedbabu", "fedrecon", "mixture"}


@pytest.mark.parametrize("name", ROWS)
def test_one_answer(name: str, tmp_path: Path) -> None:
    run, exact = trained(name, 3, evaluate_every=1), pytest.approx
    judged, best = run.evaluate(), summarize(run.history, "accuracy")
    assert best.round == run.round
    assert best.test == run.evaluate(stage="before")  # what a run's headline says
    answer = [row for row in run.frame().to_pylist() if row["split"] == "test" and row["stage"] == "own"]
    assert {
        row["metric"]: row["value"] for row in answer if row["round"] == run.round and row["client"] is None
    } == judged
    frame = run.clients_frame().to_pydict()
    assert frame["client"] == list(DATA.ids)
    assert sum(frame["accuracy"]) / 6 == exact(judged["accuracy_user_mean"])
    run.save(tmp_path / "r")
    given = {"model": ROWS[name][0]().double(), "method": ROWS[name][1], "data": DATA}
    loaded = fedkeep.load_run(tmp_path / "r", **given)
    assert loaded.evaluate() == judged
    assert loaded.frame().equals(run.frame())
    assert loaded.last.evaluate() == run.last.evaluate()
    settings = {"rounds": 4, "cohort": 4, "seed": 3, "evaluate_every": 1}
    more = fedkeep.simulate(**given, **settings, out=tmp_path / "r", resume="auto")
    whole = trained(name, 4, evaluate_every=1)
    assert list(on_server(more)) == list(on_server(run)) == list(on_server(whole))
    assert same_bits(on_server(more), on_server(whole))
    assert same_bits(everyone(more.private, 6), everyone(whole.private, 6))
    assert more.evaluate() == whole.evaluate()
    assert run.export(tmp_path / "m") == list(DATA.ids)
    assert read_sealed(tmp_path / "m" / INFO)["round"] == run.round
    loss = count = 0.0
    for client, accuracy in zip(frame["client"], frame["accuracy"], strict=True):
        batch = DATA.batch(DATA.rows(DATA.index(client), "test"))
        written = fedkeep.load_model(
            tmp_path / "m", client, model=ROWS[name][0]().double(), method=run.method
        )
        with torch.no_grad():
            here, there = (logits_of(model(x=batch["x"])) for model in (run.model(client), written))
        assert torch.equal(here, there)
        right = here.log_softmax(1).gather(1, batch["label"].long().unsqueeze(1))
        loss, count = loss - float(right.sum()), count + len(right)
        said = [int(str(row.tasks[0].value)) for row in run.predict(client, {"x": batch["x"].numpy()})]
        assert sum(a == b for a, b in zip(said, batch["label"].tolist(), strict=True)) / len(said) == accuracy
    assert loss / count == exact(judged["loss"], rel=1e-9)
    assert run.method.adapt.everyone == (name in LAST)
    assert (run.evaluate(stage="before") != judged) == (name in LAST)


OTHERS = classes(counts=(6, 5), valid=1, test=4)
NEW = FederatedData(OTHERS.columns, OTHERS.offsets, ["new", "newer"], OTHERS.bounds, OTHERS.meta)
PARTS = {"fedamp", "fedpac", "pfedhn"}
"""Their servers have a part for each client."""


@pytest.mark.parametrize("name", ROWS)
def test_who_cannot_be_served_is_said_before_training(name: str) -> None:
    told = told_head(ROWS[name][1], ROWS[name][0]().double(), DATA)
    assert ("none for people who come later" in told) == (name in PARTS)


def failing(server: Global, client: str) -> Sent:
    raise RuntimeError("it is not asked before training")


@fedkeep.methods.sends_to("all")
def failing_alike(server: Global, client: str) -> Sent:
    return failing(server, client)


@fedkeep.methods.sends_to("members")
def failing_apart(server: Global, client: str) -> Sent:
    return failing(server, client)


def test_whose_an_own_send_is_goes_by_what_it_says() -> None:
    def told(send: Any) -> str:
        return told_head(fedkeep.methods.fedavg().on_server(send=send), Linear(3, 2), DATA)

    assert told(failing) == told(failing_alike) == ""
    for send in (failing_apart, SendWithoutBound(send=failing_apart)):
        assert "none for people who come later" in told(send)


@pytest.mark.parametrize("name", ROWS)
def test_new_people_have_the_same_answer(name: str, tmp_path: Path) -> None:
    run = trained(name, 1)
    if name in PARTS:
        with pytest.raises(MethodError, match="has a part for each client that trained, and none for 'new'"):
            run.fit(rows=NEW)
        return
    judged, server = run.evaluate(), {n: v.clone() for n, v in on_server(run).items()}
    assert run.on(DATA).evaluate() == judged
    run.fit(rows=NEW)
    assert run.evaluate() == judged
    assert same_bits(on_server(run), server)
    assert run.export(tmp_path / "m", ["user-1", "new", "newer"]) == ["user-1", "new", "newer"]
    loss = count = 0.0
    for client in NEW.ids:
        batch = NEW.batch(NEW.rows(NEW.index(client), "test"))
        model = fedkeep.load_model(tmp_path / "m", client, model=ROWS[name][0]().double(), method=run.method)
        with torch.no_grad():
            here = logits_of(model(x=batch["x"])).log_softmax(1)
        loss, count = (
            loss - float(here.gather(1, batch["label"].long().unsqueeze(1)).sum()),
            count + len(here),
        )
        assert len(run.predict(client, {"x": batch["x"].numpy()})) == len(here)
    there = run.on(NEW).evaluate(clients=NEW.ids)
    assert there["loss"] == pytest.approx(loss / count, rel=1e-9)


def test_a_row_alone_is_predicted_with_the_bits_that_it_has_among_others() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(37, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3)).eval()
    rows = torch.randn(50, 37).numpy()
    data = FederatedData.from_columns(client=["a"] * 50, columns={"x": rows, "label": np.arange(50) % 3})
    encoding = encoding_of(data)
    together = list(predictions(model, data, encoding))
    assert len(together) == 50
    assert [next(predictions(model, data, encoding, [row])) for row in range(50)] == together
    assert list(predictions(model, data, encoding, [9, 40, 3])) == [together[9], together[40], together[3]]
