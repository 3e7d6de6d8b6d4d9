"""What a device says of its clients' models: the same as a plain loop, and never more than its policy lets leave."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedkeep import Adapt, FederatedData, Phase, Split, declare, methods, sgd, simulate
from fedkeep.core.errors import ConfigError, DataError, MethodError
from fedkeep.engines import Adaptation, LocalDevice, Sequential, orders_of
from fedkeep.engines.faults import Faults
from fedkeep.engines.tally import Leaves
from fedkeep.experiments.conductor import Conductor, Members
from fedkeep.experiments.drive import Drive
from fedkeep.experiments.run_settings import RunSettings
from fedkeep.tasks import tasks_in
from fedkeep.tasks.results import Model
from tests.fitting import adapt_client, first_examples
from tests.refusals import raises
from tests.tiny import Logits, Unsaid, classes, job, same_bits, users

DATA = classes(counts=(5, 9, 3, 7, 4, 6), valid=2, test=5)
ADAPT = Adapt(phases=(Phase(trains="private", optimizer=sgd(0.4), epochs=3, batch_size=5),))
FURL = methods.furl("user", private_init="model", local=Phase(batch_size=4, optimizer=sgd(0.3))).but(
    adapt=ADAPT
)
RUN = simulate(Logits().double(), FURL, DATA, rounds=4, cohort=3, evaluate_every=0)


class Two(nn.Module):
    """Scores of a binary task."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2).double()
        self.user = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        declare(self, per_example=("user",))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.user


def judged_by(leaves: Leaves, models: tuple[Model, ...] = ("own", "shared")) -> Any:
    device = LocalDevice(RUN.job, Sequential(), leaves=leaves)
    return device.judge(RUN.orders(users(range(6))), "test", models)


@pytest.mark.parametrize("kind", [Logits, Unsaid])
def test_several_models_in_one_call_equal_separate_calls_to_the_bit(kind: type[Logits]) -> None:
    run = simulate(kind().double(), FURL, DATA, rounds=4, cohort=3, evaluate_every=0)
    device = run.local_device()
    device.adapt(run.orders(users(range(6))), Adaptation(split=""))
    models: tuple[Model, ...] = ("own", "shared", "default", "adapted")
    (together,) = device.judge(run.orders(users(range(6))), "test", models)
    losses = set()
    for model in models:
        (alone,) = device.judge(run.orders(users(range(6))), "test", (model,))
        for one, other in zip(together.of(model).columns, alone.of(model).columns, strict=True):
            assert one.tobytes() == other.tobytes()
        losses.add(alone.of(model).loss.tobytes())
    assert len(losses) == 3  # what is shared alone is what a new client has; the others differ


class Spoiling(Logits):
    """Changes what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(x.clone())
        x.zero_()
        return out


def test_a_model_that_changes_its_batch_changes_no_other_models() -> None:
    found = [
        simulate(kind().double(), FURL, DATA, rounds=2, cohort=3, evaluate_every=0).judge(("own", "shared"))[
            0
        ]
        for kind in (Logits, Spoiling)
    ]
    assert found[0].of("shared").loss.tolist() == found[1].of("shared").loss.tolist()


def test_the_records_of_a_run_are_those_of_a_plain_loop_over_clients_to_the_bit() -> None:
    """Client by client through the module itself; only the state after each round is the run's."""
    done = simulate(Unsaid().double(), FURL, DATA, rounds=3, cohort=3, evaluate_every=1, evaluate_shared=True)
    best, wanted = -1.0, []
    for rounds in (1, 2, 3):
        run = simulate(Unsaid().double(), FURL, DATA, rounds=rounds, cohort=3, evaluate_every=0)
        own_test: list[tuple[str, float, int]] = []
        for split, shared in (("valid", False), ("test", False), ("test/shared", True)):
            losses, right = [], []
            for client in range(6):
                model, batch = Unsaid().double(), DATA.batch(DATA.rows(client, split.split("/")[0]))
                values = run.parameters(DATA.ids[client])
                if shared:
                    values = {**values, "user": Unsaid().double().user.detach()}
                model.load_state_dict(values)
                logits = model(batch["x"]).detach()
                losses.append(nn.functional.cross_entropy(logits, batch["label"], reduction="none").numpy())
                right.append((logits.argmax(1) == batch["label"]).double().numpy())
            means = [float(r.sum() / len(r)) for r in right]
            n = sum(map(len, right))
            accuracy = float(np.concatenate(right).mean())
            for metric, value in (
                ("loss", float(np.concatenate(losses).mean())),
                ("accuracy", accuracy),
                ("accuracy_user_mean", float(np.mean(means))),
            ):
                wanted.append((rounds, split, None, metric, value, n))
            own_test = [(DATA.ids[c], means[c], len(right[c])) for c in range(6)]
            improved = improved if split != "valid" else accuracy > best  # noqa: F821 of this round's valid
            best = max(best, accuracy) if split == "valid" else best
            if split != "valid" and improved:
                wanted += [(rounds, split, name, "accuracy", value, m) for name, value, m in own_test]
    found = [
        (r.round, r.split, r.client, r.metric, r.value, r.n)
        for r in done.history
        if r.split in ("valid", "test", "test/shared")
    ]
    assert found == wanted


def arrays(root: object) -> list[np.ndarray]:
    """Return every array and tensor that can be reached from an object through the interpreter's own references."""
    seen: dict[int, object] = {}
    waiting = [root]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, type) or callable(one):
            continue
        seen[id(one)] = one
        waiting += gc.get_referents(one)
    return [np.asarray(o) for o in seen.values() if isinstance(o, np.ndarray | torch.Tensor)]


CANARY = [0.7390851332151607, -1.3247179572447461, 0.5671432904097838]


@pytest.mark.parametrize("leaves", ["sums", "clients"])
@pytest.mark.parametrize("kind", ["multiclass", "binary", "regression"])
def test_what_leaves_holds_neither_examples_nor_private_values(leaves: Leaves, kind: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((34, 3))
    label = rng.standard_normal(34) if kind == "regression" else rng.integers(0, 2, 34)
    names = [f"user-{c}" for c in range(2)]
    data = FederatedData.from_columns(
        np.repeat(names, 17),
        {"x": x, "label": label},
        (["train"] * 4 + ["test"] * 13) * 2,
        meta={"task": kind, "classes": 2},
    )
    model = Two() if kind != "regression" else Numbers()
    run = simulate(model, methods.furl("user"), data, rounds=0)
    canary = torch.tensor(CANARY, dtype=torch.float64)
    run.private.write(
        [0, 1], {"user": torch.stack([canary[: model.user.numel()].reshape(model.user.shape)] * 2)}
    )
    device = LocalDevice(run.job, Sequential(), leaves=leaves)
    found = device.judge(run.orders(run.clients), "test", ("own", "shared"))
    rows = 1 if leaves == "sums" else 2
    exact = run.judge(("own", "shared"))[0].of("own")
    secrets = {*CANARY, *exact.loss.tolist(), *exact.score.tolist()} - {0.0, 1.0}
    reached = arrays(found)
    assert len(reached) >= 9
    for array in reached:
        assert len(array) == rows
        assert 13 not in array.shape
        assert 26 not in array.shape
        assert not secrets & set(array.astype(float).ravel().tolist())
    assert [len(found[0].tallies.clients), int(found[0].tallies.count.sum())] == [rows, 26]
    with pytest.raises(ConfigError, match="Only 'examples' lets them leave"):
        found[0].of("own")


class Numbers(nn.Module):
    """ŷ = w·x + user."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.user = nn.Parameter(torch.zeros((), dtype=torch.float64))
        declare(self, per_example=("user",))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w + self.user


def test_the_policies_agree() -> None:
    (examples,), (clients,), (sums,) = (judged_by(leaves) for leaves in ("examples", "clients", "sums"))
    for model in ("own", "shared"):
        assert (
            clients.metrics(model) == sums.metrics(model) == pytest.approx(examples.metrics(model), abs=1e-14)
        )
        assert clients.per_client(model) == examples.per_client(model)
        assert sums.per_client(model) == {}
    table = clients.tallies.pair("own", "shared").table
    own, shared = examples.of("own"), examples.of("shared")
    for client in range(6):
        mine = own.client == client
        for a in (0, 1):
            for b in (0, 1):
                both = (own.score[mine] == a) & (shared.score[mine] == b)
                assert table[client, a, b] == both.sum()
    assert sums.tallies.pair("own", "shared").table[0].tolist() == table.sum(0).tolist()


def test_a_device_lets_sums_alone_leave_unless_it_is_told() -> None:
    assert LocalDevice(RUN.job, Sequential()).leaves == "sums"
    with raises(ConfigError, got="all", known=["sums", "clients", "examples"]):
        LocalDevice(RUN.job, Sequential(), leaves="all")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("models", "got"),
    [((), []), (("own", "own"), ["own", "own"]), (("mine",), ["mine"]), ("own", "own")],
)
def test_models_that_are_not_known_are_refused(models: Any, got: object) -> None:
    with raises(
        ConfigError,
        said="Wanted a list of one or several of",
        known=["own", "shared", "default", "adapted", "local"],
        got=got,
    ):
        judged_by("sums", models)


def test_clients_adapt_on_the_device_and_are_judged_before_and_after() -> None:
    device = RUN.local_device()
    (found,) = device.adapt(RUN.orders(users(range(4))), Adaptation(split="test"))
    assert found.models == ("own", "adapted")
    for client in range(4):
        start = {n: v[0] for n, v in RUN.private.read([client]).items()}
        own = adapt_client(
            RUN, f"user-{client}", first_examples(RUN, f"user-{client}", None), start=start
        ).own
        held = {n: v[0] for n, v in device.held("adapted").read([client]).items()}
        assert same_bits(held, own)
        assert not same_bits(held, start)
    (before,) = RUN.judge(("own",), "test", users(range(4)))
    assert found.of("own").loss.tobytes() == before.of("own").loss.tobytes()
    assert found.of("adapted").loss.tobytes() != before.of("own").loss.tobytes()
    assert found.tallies.pair("own", "adapted").count.tolist() == [5] * 4
    with raises(MethodError, client="user-5", model="adapted"):
        device.judge(RUN.orders(["user-5"]), "test", ("adapted",))
    with raises(MethodError, name="local"):
        device.judge(RUN.orders(["user-0"]), "test", ("local",))


def test_a_local_reference_is_trained_from_the_initial_model_alone() -> None:
    """As the method ``local`` would: nothing of what the server sends is in it."""
    alone = Adapt(split=Split("*"), phases=(Phase(optimizer=sgd(0.3), epochs=2, batch_size=4),))
    device = RUN.local_device()
    reference = Adaptation(adapt=alone, begin="initial", name="local", split="test", beside=("own",))
    (found,) = device.adapt(RUN.orders(users(range(6))), reference)
    other = dataclasses.replace(RUN, server={n: v + 1 for n, v in RUN.server.items()})
    (again,) = other.local_device().adapt(other.orders(users(range(6))), reference)
    assert found.of("local").loss.tobytes() == again.of("local").loss.tobytes()
    assert found.of("own").loss.tobytes() != again.of("own").loss.tobytes()
    initial = RUN.net.initial()
    held = device.held("local").read([1])
    assert held.keys() == initial.keys()
    assert all(not torch.equal(held[n][0], initial[n]) for n in initial)


def test_nobody_to_adapt() -> None:
    with pytest.raises(ConfigError, match=r"^There is no client to adapt\.$"):
        RUN.local_device().adapt([], Adaptation())


class Names:
    """A roster: ids, and nothing else."""

    def __init__(self, ids: tuple[str, ...]) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def index(self, client: str) -> int:
        return self.ids.index(client)


@pytest.mark.parametrize("leaves", ["sums", "clients", "examples"])
def test_a_run_needs_no_more_than_a_roster_and_a_device(leaves: Leaves) -> None:
    """The server's side reaches data and private values through the device alone."""
    work = job(Logits().double(), FURL, DATA)
    ids = tuple(map(str, DATA.ids))
    run = Conductor(
        RunSettings(rounds=3, cohort=3, evaluate_every=1, evaluate_shared=True),
        Members(
            clients=Names(ids),
            trains=np.arange(6),
            judged=np.arange(6),
            tasks=tasks_in(DATA.meta),
            meta=DATA.meta,
        ),
        name="far",
        seed=0,
        method=FURL,
        net=work.net,
    )
    device = LocalDevice(work, Sequential(), leaves=leaves)
    Drive(run, device, Faults(), progress=False).go()
    done = simulate(
        Logits().double(), FURL, DATA, rounds=3, cohort=3, evaluate_every=1, evaluate_shared=True
    ).last
    assert same_bits(run.server.params, done.server)
    wanted = [r for r in done.history if leaves != "sums" or r.client is None]
    assert [(r.split, r.client, r.metric, r.n) for r in run.history] == [
        (r.split, r.client, r.metric, r.n) for r in wanted
    ]
    values = [[r.value for r in history] for history in (run.history, wanted)]
    assert values[0] == pytest.approx(values[1], abs=1e-14)
    if leaves == "examples":
        assert run.history == done.history
    assert (run.examples is not None) == (leaves == "examples")
    assert not any(
        a.shape[:1] == (len(DATA.columns["label"]),) for a in arrays([run.members, run.server, run.history])
    )


def test_orders_that_are_not_in_the_order_of_the_data() -> None:
    (found,) = RUN.judge(("own",), "test", users([4, 0, 1, 5, 2]))
    (sorted_,) = RUN.judge(("own",), "test", users([0, 1, 2, 4, 5]))
    assert found.of("own").client[::5].tolist() == [4, 0, 1, 5, 2]
    assert found.per_client("own") == sorted_.per_client("own")
    given = list(orders_of(RUN.method, RUN.whole, ["user-4", "user-0"]))
    assert [order.client for order in given] == ["user-4", "user-0"]
    assert given[0].sent is given[1].sent  # not a copy for each


@pytest.mark.parametrize("client", [6, -1, "user-6"])
def test_a_client_that_is_not_there(client: int | str) -> None:
    with raises(DataError, clients=6, wanted=str(client)):
        RUN.evaluate(clients=["user-0", client])


@pytest.mark.parametrize("client", [7, "user-1", np.int64(7)])
def test_one_id_where_several_are_wanted(client: Any) -> None:
    with raises(DataError, said="Wanted the ids of clients; got one"):
        RUN.evaluate(clients=client)
