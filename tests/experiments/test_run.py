"""What a run knows of its server, finished or resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedkeep import FederatedData, Phase, averaging, methods, sgd, simulate
from fedkeep.core.errors import ConfigError, DataError
from fedkeep.data import toy
from fedkeep.methods import Global, Sent, terms
from fedkeep.models import Linear
from fedkeep.privacy import QuantileClip
from tests.refusals import raises
from tests.tiny import classes

SEEN: list[tuple[Any, ...]] = []


def send(server: Global, client: str) -> Sent:
    """Note what the server has."""
    about = (server.round, server.progress, server.population, len(server.clients))
    SEEN.append((*about, sorted(server.links), server.optimizer.step, sorted(server.optimizer.first)))
    return Sent(params=server.params, state=server.state)


def test_a_send_is_given_after_the_run_what_it_was_given_in_it(tmp_path: Path) -> None:
    method = (
        methods.fedavg(server=averaging(sgd(1.0, momentum=0.5)))
        .on_server(send=send)
        .but(upload=(QuantileClip(),))
    )
    options: dict[str, Any] = {"rounds": 3, "hold_out": 0.3, "out": tmp_path / "run"}
    data, model = toy(users=7), Linear(4, 3)
    SEEN.clear()
    run = simulate(model, method, data, **options)
    (last,) = {s for s in map(repr, SEEN) if s.startswith("(3,")}
    for finished in (run, simulate(model, method, data, resume=True, **options)):
        SEEN.clear()
        finished.last.evaluate("test")
        assert set(map(repr, SEEN)) == {last}
    assert run.whole.links
    assert run.whole.optimizer.first
    assert run.last.whole.progress == 2 / 3
    assert run.whole.population == len(run.clients) < len(data)
    changed = {n: torch.zeros_like(v) for n, v in run.server.items()}
    run.server = changed
    assert run.whole.params is changed


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (["f1"], "metrics must be {name: function(outputs, labels)}; got ['f1']."),
        ({"f1": 3}, "metrics must be {name: function(outputs, labels)}; 'f1' is 3."),
        (
            {"f1": lambda outputs: 1.0},
            "metrics must be {name: function(outputs, labels)}; 'f1' does not take both: ",
        ),
        (
            {"f1": lambda outputs, labels: "x"},
            "metrics must be {name: function(outputs, labels)}, and return a number; 'f1' returned 'x'.",
        ),
        (
            {"f1": lambda outputs, labels: None},
            "metrics must be {name: function(outputs, labels)}, and return a number; 'f1' returned None.",
        ),
    ],
)
def test_metrics_that_are_none(metrics: Any, message: str) -> None:
    run = simulate(Linear(4, 3), methods.fedavg(), toy(users=3), rounds=1)
    with raises(ConfigError, said=message):
        run.evaluate("train", metrics=metrics)


def test_a_run_is_shown_in_a_line() -> None:
    run = simulate(Linear(4, 3), methods.fedavg(), toy(users=3), rounds=1, engine="sequential")
    assert repr(run) == (
        "<Run of 'fedavg' with Linear after round 1, engine 'sequential', 3 clients, 3 federated parameters>"
    )


def test_a_label_of_another_name_is_judged_where_the_loss_takes_it() -> None:
    whole = classes()
    columns = {"target" if name == "label" else name: column for name, column in whole.columns.items()}
    other = FederatedData(columns, whole.offsets, whole.ids, whole.bounds)
    found = []
    for data, loss in ((whole, terms.cross_entropy()), (other, terms.cross_entropy("target"))):
        torch.manual_seed(0)
        method = methods.fedavg(local=Phase(loss=loss))
        run = simulate(Linear(3, 3).double(), method, data, rounds=2)
        found.append((run.evaluate(), run.on(data).evaluate()))
    assert found[0] == found[1]


def test_a_clients_parameters_load_into_a_module_whose_weights_are_tied() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4)] * 2)
            self.head = torch.nn.Linear(4, 4)
            self.head.weight = self.layers[0].weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.layers[1](self.layers[0](x)))

    run = simulate(Tied(), methods.fedavg(), toy(users=3, features=4, classes=4), rounds=1, progress=False)
    module = Tied()
    module.load_state_dict(run.parameters("user-1"))  # every name of every place
    batch = run.data.batch(run.data.rows(1, "test"))["x"].float()
    assert torch.equal(module(batch), run.model("user-1")(x=batch))
    assert module.head.weight is module.layers[1].weight


def test_where_nobody_is_judged_it_says_whom_to_name() -> None:
    run = simulate(Linear(4, 3), methods.fedavg(), toy(users=3), rounds=1, progress=False)
    with pytest.raises(DataError, match=r"none of the 0 clients .* name others, e\.g\. clients="):
        run.evaluate("test", clients=[])
