"""A run that continues an older one: what its server begins with, what devices are told, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedkeep import FederatedData, Method, Phase, Run, methods, simulate
from fedkeep.core.errors import ConfigError, RunError
from fedkeep.core.net import Net
from fedkeep.remote.continued import Older, begun, older_for
from fedkeep.remote.events import Events
from fedkeep.remote.served_run import Federation, serve_run
from fedkeep.remote.transport import Died
from fedkeep.store import MemoryStore
from tests.engines.test_conformance import CASES, COHORT, SEED, trained
from tests.remote.federations import Devices, federation
from tests.remote.test_conformance import assert_near, ledger_of, server_of
from tests.remote.test_server import stops_after
from tests.tiny import Logits, classes, everyone, files, on_server, same_bits

CASE = "furl"
KIND = "float64"
FURL = methods.furl("user", local=Phase(batch_size=4))
ALIKE = [
    "furl",
    "the share of FedAvg",
    "scaffold",
    "top-k with error feedback",
    "batch statistics and dropout",
]
MORE = [pytest.param(case, marks=() if case in ALIKE else pytest.mark.slow) for case in CASES]


class Deeper(Logits):
    """The model with one more federated layer."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Parameter(torch.full((3,), 0.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.last


def deeper(text: str, encoding: Mapping[str, Any]) -> tuple[nn.Module, Method]:
    return Deeper().double(), CASES[CASE].method


def first_run(folder: Path, case: str = CASE) -> Run:
    """Serve the older run, and return the simulation that it equals."""
    devices = Devices(case, folder)
    serve_run(federation(case, KIND), devices.transport, folder / "old", progress=False, keep_rounds=2)
    devices.close()
    return trained(case, KIND, engine="sequential")


def second(folder: Path, devices: Devices, case: str = CASE, **changes: Any) -> list[Any]:
    given = {"rounds": 2, "continue_from": folder / "old", **changes}
    return serve_run(
        federation(case, KIND, **given), devices.transport, folder / "new", patience=100, progress=False
    )


def by_hand(
    first: Run,
    make: Callable[[], nn.Module],
    case: str = CASE,
    data: FederatedData | None = None,
    rounds: int = 2,
) -> Run:
    """Return a simulation that is given the server's parameters and what those clients kept who are still there."""
    what = CASES[case]
    data = data or what.data
    torch.manual_seed(0)
    model = what.method.made_for(make().to(getattr(torch, KIND)))
    model.load_state_dict(first.server, strict=False)
    private = MemoryStore(first.private.default, [str(client) for client in data.ids])
    for place, client in enumerate(map(str, data.ids)):
        if client in first.private.ids:
            private.write([place], first.private.read([list(first.private.ids).index(client)]))
    options = {"cohort": COHORT, "seed": SEED, "evaluate_every": 2, **what.options, "rounds": rounds}
    method = what.method.but(extend=None)  # the model has the method's own modules already
    return simulate(model, method, data, engine="sequential", private=private, **options).last


def said(folder: Path, kind: str = "began") -> list[str]:
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [event["text"] for event in events if event["kind"] == kind]


@pytest.mark.parametrize("case", MORE)
def test_it_goes_on_as_sequential_does_that_is_given_what_server_and_clients_had(
    case: str, tmp_path: Path
) -> None:
    first = first_run(tmp_path, case)
    expected = by_hand(first, CASES[case].model, case)
    before = files(tmp_path / "old", but=("lock",))
    devices = Devices(case, tmp_path)
    history = second(tmp_path, devices, case)
    assert same_bits(server_of(tmp_path / "new"), on_server(expected))
    assert same_bits(
        devices.kept(ledger_of(tmp_path / "new")), everyone(expected.private, len(expected.data))
    )
    assert files(tmp_path / "old", but=("lock",)) == before
    devices.close()
    assert_near(history, expected.history)


def test_a_third_run_begins_with_what_the_second_only_took_over(tmp_path: Path) -> None:
    first = first_run(tmp_path)
    middle = by_hand(first, CASES[CASE].model, rounds=1)
    expected = by_hand(middle, CASES[CASE].model, rounds=1)
    devices = Devices(CASE, tmp_path)
    second(tmp_path, devices, rounds=1)
    devices.close()
    entries = ledger_of(tmp_path / "new")
    assert [entry.version for entry in entries.values()].count(0) == 2
    devices = Devices(CASE, tmp_path)
    third = federation(CASE, KIND, rounds=1, continue_from=tmp_path / "new")
    serve_run(third, devices.transport, tmp_path / "third", progress=False)
    assert same_bits(server_of(tmp_path / "third"), on_server(expected))
    assert same_bits(devices.kept(ledger_of(tmp_path / "third")), everyone(expected.private, 6))


def test_clients_join_and_leave_and_new_data_are_used(tmp_path: Path) -> None:
    first = first_run(tmp_path)
    data = classes((8, 9, 3, 7, 4, 6, 5)).select([0, 1, 2, 3, 4, 6])
    expected = by_hand(first, CASES[CASE].model, data=data)
    devices = Devices(CASE, tmp_path, data=data)
    second(tmp_path, devices)
    kept = devices.kept(ledger_of(tmp_path / "new"))
    devices.close()
    assert same_bits(server_of(tmp_path / "new"), on_server(expected))
    assert same_bits(kept, everyone(expected.private, 6))
    info = json.loads((tmp_path / "new" / "run.json").read_text())
    assert info["roster"]["ids"] == ["user-0", "user-1", "user-2", "user-3", "user-4", "user-6"]
    assert info["roster"]["counts"][0]["train"] == 8
    assert ledger_of(tmp_path / "old")["user-5"].version > 0
    assert said(tmp_path / "new")[-2:] == [
        "1 clients have joined; they begin with default values: user-6.",
        "1 clients have left; what they keep stays in the older run: user-5.",
    ]


def test_a_node_hears_of_its_own_clients_alone(tmp_path: Path) -> None:
    first_run(tmp_path)
    devices = Devices(CASE, tmp_path)
    sent, send = dict[str, list[str]](), devices.transport.send

    def noting(messages: Any) -> list[str]:
        given = list(messages)
        sent.update({n: sorted(p.header["versions"]) for n, p in given if p.header["kind"] == "encoding"})
        return send(given)

    devices.transport.send = noting  # type: ignore[method-assign]
    second(tmp_path, devices)
    devices.close()
    trained_once = [client for client, entry in ledger_of(tmp_path / "old").items() if entry.version]
    assert sent == {
        f"node-{k}": [c for c in trained_once if int(c.removeprefix("user-")) % 2 == k] for k in range(2)
    }


def test_the_encoding_is_the_older_runs(tmp_path: Path) -> None:
    first_run(tmp_path)
    devices = Devices(CASE, tmp_path)
    second(tmp_path, devices)
    devices.close()
    old, new = (json.loads((tmp_path / name / "run.json").read_text()) for name in ("old", "new"))
    assert new["encoding"] == old["encoding"]
    assert new["began_from"]["run"] == old["run"] != new["run"]
    assert new["began_from"]["round"] == 3
    again = older_for(
        tmp_path / "old", tmp_path / "new"
    )  # as the new run's server finds it when started again
    assert again.values is None
    with (tmp_path / "old" / "records.jsonl").open("a") as torn:
        torn.write("{")  # as a server that was killed leaves it
    before = files(tmp_path / "old")
    assert again.versions == Older.at(tmp_path / "old").versions
    assert files(tmp_path / "old") == before
    assert len(again.versions) == 6


def test_a_new_layer_is_refused_by_name(tmp_path: Path) -> None:
    first_run(tmp_path)
    devices = Devices(CASE, tmp_path, experiment=deeper)
    with pytest.raises(ConfigError, match=r"do not fit the new model:.*'last'"):
        second(tmp_path, devices, build=lambda encoding: deeper("", encoding))
    devices.close()
    assert not (tmp_path / "new").exists()
    assert "work" not in [kind for kind, _, _ in devices.transport.carried]


def test_a_new_layer_begins_anew_and_the_others_migrate_by_name(tmp_path: Path) -> None:
    first = first_run(tmp_path)
    expected = by_hand(first, Deeper)
    devices = Devices(CASE, tmp_path, experiment=deeper)
    second(tmp_path, devices, build=lambda encoding: deeper("", encoding), on_change="anew")
    assert same_bits(server_of(tmp_path / "new"), on_server(expected))
    assert same_bits(devices.kept(ledger_of(tmp_path / "new")), everyone(expected.private, 6))
    devices.close()
    run = json.loads((tmp_path / "old" / "run.json").read_text())["run"]
    assert said(tmp_path / "new") == [
        f"2 federated parameters begin with round 3 of the run {run}.",
        "The federated parameter 'last' is new: it begins with the model's own values.",
        "The server optimiser's state is not taken over, it starts from its initial values: step.",
    ]


def older(values: Mapping[str, torch.Tensor], **others: torch.Tensor) -> Older:
    params = {f"params/{name}": value for name, value in values.items()}
    return Older(run="r", round=4, versions={}, values={**params, **others})


def test_what_changed_its_shape_or_type_or_is_gone_is_named() -> None:
    net, events = Net(Logits()), Events(lambda: 0.0)
    weight, bias = torch.full((3, 3), 2.0), torch.zeros(4)
    values = older({"linear.weight": weight, "linear.bias": bias, "gone": bias})
    with pytest.raises(ConfigError, match=r"'linear.bias' is float32 3,.*4.*1"):
        begun(net, FURL, values, "refuse", events)
    assert events.said == []
    found = begun(net, FURL, values, "anew", events).initial()
    assert torch.equal(found["linear.weight"], weight)
    assert torch.equal(found["linear.bias"], net.initial()["linear.bias"])
    assert torch.equal(net.initial()["linear.weight"], Logits().linear.weight)
    assert [event.text for event in events.said] == [
        "1 federated parameters begin with round 4 of the run r.",
        "The federated parameter 'linear.bias' is float32 3, and was float32 4: it begins with the model's own values.",
        "The federated parameter 'gone' is gone: its values are not used.",
    ]
    typed = older({"linear.weight": weight.double(), "linear.bias": torch.zeros(3)})
    with pytest.raises(ConfigError, match="'linear.weight' is float32"):
        begun(net, FURL, typed, "refuse", events)


def test_that_the_methods_state_begins_anew_is_told(tmp_path: Path) -> None:
    first_run(tmp_path, "scaffold")
    devices = Devices("scaffold", tmp_path)
    second(tmp_path, devices, "scaffold")
    devices.close()
    assert any(
        t.startswith("The method's state on the server is not taken over, ") for t in said(tmp_path / "new")
    )


@pytest.mark.parametrize("rounds", [0, 1])
def test_a_server_that_was_killed_begins_or_goes_on_in_the_same_way(rounds: int, tmp_path: Path) -> None:
    first = first_run(tmp_path)
    devices = Devices(CASE, tmp_path)
    stops_after(devices, rounds)
    with pytest.raises(Died):
        second(tmp_path, devices)
    if rounds:  # it has a round of its own: the older run's folder may go
        shutil.rmtree(tmp_path / "old")
    second(tmp_path, devices)
    expected = by_hand(first, CASES[CASE].model)
    assert same_bits(server_of(tmp_path / "new"), on_server(expected))
    assert same_bits(devices.kept(ledger_of(tmp_path / "new")), everyone(expected.private, 6))


def test_an_older_run_that_went_on_before_the_first_round_is_refused(tmp_path: Path) -> None:
    first_run(tmp_path)
    devices = Devices(CASE, tmp_path)
    stops_after(devices, 0)
    with pytest.raises(Died):
        second(tmp_path, devices)
    again = Devices(CASE, tmp_path / "others")
    shutil.rmtree(tmp_path / "old")
    serve_run(federation(CASE, KIND, rounds=1), again.transport, tmp_path / "old", progress=False)
    again.close()
    with pytest.raises(ConfigError, match="began with round 3 of the run .* is at round 1 of the run"):
        second(tmp_path, devices)
    with pytest.raises(ConfigError, match="^continue_from: .*new began with the run .* Name the same"):
        second(tmp_path, devices, continue_from=None)


def test_an_older_run_that_was_made_longer_before_the_first_round_is_refused(tmp_path: Path) -> None:
    old = federation(CASE, KIND, evaluate_every=1)
    for step in range(4):
        devices = Devices(CASE, tmp_path)
        if step in (0, 2):
            longer = replace(old, rounds=3 if step == 0 else 4)
            serve_run(longer, devices.transport, tmp_path / "old", progress=False)
        elif step == 1:
            stops_after(devices, 0)
            with pytest.raises(Died):
                second(tmp_path, devices)
        else:
            with pytest.raises(
                ConfigError, match="began with round 3 of the run .* is at round 4 of the run"
            ):
                second(tmp_path, devices)
        devices.close()


def test_a_run_cannot_continue_itself_a_simulation_or_one_without_a_round(tmp_path: Path) -> None:
    first_run(tmp_path)
    trained(CASE, KIND, engine="sequential", out=tmp_path / "simulated")
    devices = Devices(CASE, tmp_path)
    stops_after(devices, 0)
    with pytest.raises(Died):
        serve_run(federation(CASE, KIND), devices.transport, tmp_path / "begun", progress=False)
    with pytest.raises(RunError, match="begun has finished no round to continue from"):
        second(tmp_path, devices, continue_from=tmp_path / "begun")
    with pytest.raises(RunError, match="simulated is a simulation, so no device keeps a state of it"):
        second(tmp_path, devices, continue_from=tmp_path / "simulated")
    with pytest.raises(RunError, match="There is no run in"):
        second(tmp_path, devices, continue_from=tmp_path / "nowhere")
    same: Federation = federation(CASE, KIND, continue_from=tmp_path / "old")
    with pytest.raises(ConfigError, match="old began with none. Name the"):
        serve_run(same, devices.transport, tmp_path / "old", progress=False)
