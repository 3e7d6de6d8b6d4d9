"""A whole simulation: reproducible, independent of order and threads."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkeep import FederatedData, Init, Phase, Run, adam, methods, sgd, simulate
from fedkeep.core.errors import ConfigError, DataError, NonFiniteError
from fedkeep.core.run_files import read_info
from fedkeep.data import RangeIds
from fedkeep.engines import LocalDevice, Sampler
from tests.refusals import raises
from tests.tiny import Logits, Noisy, classes, everyone, parts, run_by, same_bits, users

DATA = classes(counts=(5, 9, 3, 7, 4, 6), kind="f4")
FURL = methods.furl("user", local=Phase(batch_size=4, optimizer=sgd(0.3)))


def bits(run: Run) -> tuple[Any, ...]:
    private = everyone(run.private, len(run.data))
    return (
        {n: v.tolist() for n, v in run.server.items()},
        {n: v.tolist() for n, v in private.items()},
        [str(r) for r in run.history],
    )


def test_the_same_seed_gives_the_same_bits() -> None:
    drawn, data = FURL.on_client(keep=Init(value=("normal", 0.1))), classes(counts=(8, 6, 10), kind="f4")
    one, two = (simulate(Noisy(dropout=0.5), drawn, data, rounds=4, cohort=2, seed=3) for _ in range(2))
    assert bits(one) == bits(two)


def test_another_seed_gives_other_results() -> None:
    found = [bits(simulate(Logits(), FURL, DATA, rounds=3, cohort=2, seed=seed)) for seed in (0, 1)]
    assert found[0][0] != found[1][0]
    assert found[0][1] != found[1][1]


@pytest.mark.parametrize("engine", ["sequential", "centralised"])
def test_the_global_random_state_is_neither_read_nor_moved(engine: str) -> None:
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        before = torch.random.get_rng_state(), str(np.random.get_state())  # noqa: NPY002
        data = classes(counts=(8, 6, 10), kind="f4")
        method = methods.furl("user", private_init=("normal", 0.1))
        found.append(bits(simulate(Noisy(dropout=0.5), method, data, rounds=2, **run_by(engine))))
        assert torch.equal(before[0], torch.random.get_rng_state())
        assert before[1] == str(np.random.get_state())  # noqa: NPY002
    assert found[0] == found[1]


def test_threads_change_no_bit() -> None:
    found = []
    threads = torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            found.append(bits(simulate(Logits(), FURL, DATA, rounds=4, cohort=3, seed=3)))
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1]


def test_an_epoch_uses_every_client_once() -> None:
    run = simulate(Logits(), FURL, DATA, epochs=2, cohort=4, seed=3)
    assert (run.round, run.rounds_per_epoch, run.epoch) == (4, 2, 2.0)
    assert [r.n for r in run.history if (r.split, r.metric) == ("train", "loss")][0::2] != []
    examples = [r.n for r in run.history if (r.split, r.metric) == ("train", "loss")]
    assert sum(examples[:2]) == sum(examples[2:]) == 34
    drawn = [Sampler(np.arange(6), 4, "shuffled", 3)(r) for r in range(2)]
    assert sorted(c for d in drawn for c in d) == list(range(6))


def test_evaluations_come_once_an_epoch_and_at_the_end() -> None:
    def rounds(**options: Any) -> list[int]:
        run = simulate(Logits(), FURL, DATA, cohort=2, **options)
        return [
            r.round for r in run.history if (r.split, r.metric) == ("test", "accuracy") and r.client is None
        ]

    assert rounds(rounds=7) == [3, 6, 7]
    assert rounds(rounds=4, evaluate_every=2) == [2, 4]
    assert rounds(rounds=4, evaluate_every=0) == []
    assert rounds(rounds=0) == []


def test_independent_sampling() -> None:
    run = simulate(Logits(), FURL, DATA, rounds=3, cohort=2, seed=1, sampling="independent")
    sampler = Sampler(np.arange(6), 2, "independent", 1)
    drawn = {c for r in range(3) for c in sampler(r)}
    assert run.private.seen(range(6)) == [c in drawn for c in range(6)]


def test_clients_never_drawn_keep_the_default() -> None:
    run = simulate(Logits(), FURL.on_client(keep=Init(value=0.5)), DATA, rounds=1, cohort=2)
    seen = run.private.seen(range(6))
    assert sum(seen) == 2
    users = everyone(run.private, 6)["user"]
    assert all((users[c] == 0.5).all() != seen[c] for c in range(6))


def test_who_is_held_out_never_trains() -> None:
    data = classes(counts=(5, 9, 3, 7, 4, 6), kind="f4")
    run = simulate(Logits(), FURL, data, rounds=9, cohort=2, hold_out=0.34, seed=2)
    assert len(run.held_out) == 2
    assert sorted([*run.clients, *run.held_out]) == users(range(6))
    assert run.private.seen(run.held_out.positions) == [False, False]
    assert all(run.private.seen(run.clients.positions))
    other = {n: np.array(c) for n, c in data.columns.items()}  # type: ignore[arg-type]
    for c in run.held_out.positions:
        other["x"][data.offsets[c] : data.offsets[c + 1]] += 100
    changed = FederatedData(other, data.offsets, data.ids, data.bounds, data.meta)
    again = simulate(Logits(), FURL, changed, rounds=9, cohort=2, hold_out=0.34, seed=2)
    assert bits(run) == bits(again)  # not even the records of evaluations know of them
    assert run.evaluate("test", clients=run.held_out) != again.evaluate("test", clients=run.held_out)


def test_the_clients_own_records_are_those_of_the_best_epoch() -> None:
    run = simulate(
        Logits(), methods.furl("user", local=Phase(optimizer=adam(0.3))), DATA, rounds=8, cohort=6, seed=1
    )
    valid = [
        (r.round, r.value)
        for r in run.history
        if (r.split, r.metric) == ("valid", "accuracy") and r.client is None
    ]
    own = [r for r in run.history if r.client is not None]
    assert {(r.split, r.metric) for r in own} == {("test", "accuracy")}
    best = max(v for _, v in valid)
    last = max(r.round for r in own)
    assert last == next(r for r, v in valid if v == best)
    assert {r.client for r in own if r.round == last} == set(DATA.ids)
    improving = [r for r, v in valid if v > max([w for q, w in valid if q < r], default=-1.0)]
    assert sorted({r.round for r in own}) == improving
    assert 1 < len(improving) < len(valid)


def test_without_validation_examples_the_clients_own_records_are_the_last() -> None:
    data = classes(counts=(5, 9, 3), valid=0, kind="f4")
    run = simulate(Logits(), FURL, data, rounds=3, cohort=3)
    assert max(r.round for r in run.history if r.client is not None) == 3


def test_the_shared_part_is_evaluated_where_it_is_asked_for() -> None:
    run = simulate(Logits(), FURL, DATA, rounds=3, cohort=6, evaluate_every=2, evaluate_shared=True)
    shared = [r for r in run.history if r.split == "test/shared"]
    assert {r.round for r in shared} == {2, 3}
    own = [(r.round, r.client) for r in run.history if r.split == "test" and r.client is not None]
    assert [(r.round, r.client) for r in shared if r.client is not None] == own != []
    last = {r.metric: r.value for r in shared if r.round == 3 and r.client is None}
    assert last == run.evaluate("test", stage="shared")
    assert last != run.evaluate("test")
    rest = [r for r in run.history if r.split != "test/shared"]
    assert rest == simulate(Logits(), FURL, DATA, rounds=3, cohort=6, evaluate_every=2).history
    with raises(ConfigError, said="evaluate_shared: the shared part of", method="local"):
        simulate(Logits(), methods.local(), DATA, rounds=1, evaluate_shared=True)


def test_what_is_all_shared_is_tested_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    usual = LocalDevice.judge
    monkeypatch.setattr(LocalDevice, "judge", lambda *a: calls.append((a[2], *a[3])) or usual(*a))
    run = simulate(Logits(), methods.fedavg(), DATA, rounds=1, cohort=6, evaluate_shared=True)
    assert calls == [("valid", "own"), ("test", "own")]
    found = {
        s: [(r.metric, r.value) for r in run.history if r.split == s and r.client is None]
        for s in ("test", "test/shared")
    }
    assert found["test/shared"] == found["test"] != []
    calls.clear()
    simulate(Logits(), FURL, DATA, rounds=1, cohort=6, evaluate_shared=True)
    assert calls == [("valid", "own"), ("test", "own", "shared"), ("valid", "own", "shared")]


def test_regression_keeps_the_epoch_of_the_smallest_error() -> None:
    rng = np.random.default_rng(0)
    owner = np.repeat(["a", "b"], 10)
    data = FederatedData.from_columns(
        owner,
        {"x": rng.standard_normal((20, 3)), "label": rng.standard_normal(20)},
        parts(6, 2, 2) * 2,
        meta={"task": "regression"},
    )

    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.w

    method = methods.fedavg(local=Phase(loss=methods.terms.squared_error(), optimizer=sgd(0.6), batch_size=2))
    run = simulate(Line(), method, data, rounds=10, cohort=1)
    valid = {
        r.round: r.value for r in run.history if (r.split, r.metric) == ("valid", "rmse") and r.client is None
    }
    assert max(r.round for r in run.history if r.client) == min(valid, key=lambda r: (valid[r], r))


def test_nan_in_the_loss_names_the_client() -> None:
    class Thin(Logits):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log(x[:, :1]) + super().forward(x)

    data = FederatedData.from_columns(
        ["good", "good", "ill", "ill"],
        {"x": np.array([[1.0] * 3, [2.0] * 3, [-1.0] * 3, [1.0] * 3], "f4"), "label": np.array([0, 1, 2, 0])},
        parts(2) * 2,
        meta={"task": "multiclass", "classes": 3},
    )
    with pytest.raises(NonFiniteError, match=r"^Client 'ill', round 0: the.*NaN"):
        simulate(Thin(), FURL, data, rounds=1, cohort=2)
    run = simulate(Thin(), FURL, data, rounds=2, cohort=2, on_nonfinite="skip", evaluate_every=0)
    assert run.private.seen([0, 1]) == [True, False]
    assert [r.value for r in run.history if r.metric == "refused_clients"] == [1.0, 1.0]


def test_a_device_by_torchs_name() -> None:
    runs = [
        simulate(Logits(), FURL, DATA, rounds=1, cohort=2, device=d) for d in ("cpu", torch.device("cpu"))
    ]
    assert runs[1].device == "cpu"
    assert same_bits(runs[0].server, runs[1].server)


def test_a_store_may_go_on_with_another_task() -> None:
    first = simulate(Logits(), FURL, DATA, rounds=3, cohort=6)
    second = simulate(Logits(seed=3), FURL, DATA, rounds=0, private=first.private)
    assert torch.equal(everyone(second.private, 6)["user"], everyone(first.private, 6)["user"])
    third = simulate(Logits(seed=3), FURL, DATA, rounds=1, cohort=6, private=first.private)
    assert not same_bits(third.server, second.server)
    assert torch.equal(everyone(second.private, 6)["user"], everyone(first.private, 6)["user"])
    assert not same_bits(everyone(third.private, 6), everyone(first.private, 6))


def test_a_store_in_a_folder_may_go_on_in_memory_and_stays(tmp_path: Path) -> None:
    kept = simulate(Logits(), FURL, DATA, rounds=3, cohort=6, out=tmp_path / "run")
    fleeting = simulate(Logits(), FURL, DATA, rounds=3, cohort=6)
    before = everyone(kept.private, 6)
    ends = [
        simulate(Logits(), FURL, DATA, rounds=2, cohort=6, private=run.private) for run in (kept, fleeting)
    ]
    assert same_bits(everyone(ends[0].private, 6), everyone(ends[1].private, 6))
    assert same_bits(everyone(kept.private, 6), before)


@pytest.mark.parametrize("ids", [(0, 1, 2, 3, 4), (1, 2, 3, 4, 5), (0, 1, 2, 3, 4, 5, 6), (5, 3, 4, 1, 2, 0)])
def test_people_of_another_task_have_what_they_kept(ids: tuple[int, ...]) -> None:
    """A store goes by position: a task without the first person gave everybody somebody else's values."""
    first = simulate(Logits(), FURL, DATA, rounds=3, cohort=6)
    before = everyone(first.private, 6)["user"]
    data = classes([4] * len(ids), kind="f4", ids=[f"user-{k}" for k in ids])
    second = simulate(Logits(seed=3), FURL, data, rounds=0, private=first.private)
    for k in ids:
        assert torch.equal(
            second.kept(f"user-{k}").params["user"],
            before[k] if k < 6 else Logits(seed=3).user,
        )
    third = simulate(Logits(seed=3), FURL, data, rounds=1, cohort=len(ids), private=first.private)
    for k in {0, 1, 2, 3, 4, 5} & set(ids):
        assert torch.equal(first.kept(f"user-{k}").params["user"], before[k])
        assert not torch.equal(third.kept(f"user-{k}").params["user"], before[k])


def test_a_store_of_other_parameters_is_refused() -> None:
    first = simulate(Logits(), FURL, DATA, rounds=1, cohort=6)
    for method in (methods.furl(["user", "linear.bias"]), methods.fedavg(), methods.ditto()):
        with pytest.raises(ConfigError, match="^The store given as private"):
            simulate(Logits(), method, DATA, rounds=1, private=first.private)


def test_parameters_are_the_clients_whole_model() -> None:
    run = simulate(Logits(), FURL, DATA, rounds=3, cohort=6)
    whole = run.parameters("user-4")
    assert whole.keys() == Logits().state_dict().keys()
    assert torch.equal(whole["user"], everyone(run.private, 6)["user"][4])
    model = Logits()
    model.load_state_dict(whole)
    x = torch.from_numpy(np.asarray(DATA.batch(DATA.rows(4, "test"))["x"]))
    right = (model(x).argmax(1) == DATA.batch(DATA.rows(4, "test"))["label"]).double().mean()
    assert run.evaluate(clients=["user-4"])["accuracy"] == pytest.approx(float(right))
    with pytest.raises(DataError, match="Did you mean 'user-4'"):
        run.parameters("usr-4")


def with_user(model: nn.Module) -> nn.Module:
    model.user = nn.Parameter(torch.zeros(3))
    return model


def test_extend_adds_the_methods_own_modules() -> None:
    class Base(Logits):
        def __init__(self) -> None:
            super().__init__()
            del self.user

    given = Base()
    run = simulate(given, FURL.but(extend=with_user), DATA, rounds=1, cohort=2)
    assert set(everyone(run.private, 6)) == {"user"}
    assert "user" not in given.state_dict()


def test_a_million_clients_cost_only_the_cohort() -> None:
    """Two of a million clients train: neither store nor sampler may walk over all of them in Python."""
    count = 1_000_000
    rows = np.arange(count, dtype=np.int64)
    bounds = np.stack([rows, rows + 1, rows + 1, rows + 1], 1)
    columns: dict[str, Any] = {"x": np.ones((count, 3), "f4"), "label": np.zeros(count, np.int64)}
    data = FederatedData(
        columns,
        np.arange(count + 1),
        RangeIds(count, "user-{}"),
        bounds,
        {"task": "multiclass", "classes": 3},
    )
    run = simulate(Logits(), FURL, data, rounds=3, cohort=2, evaluate_every=0)
    assert len(run.clients) == count
    assert len([r for r in run.history if r.metric == "loss"]) == 3


def test_judging_needs_no_more_than_the_run() -> None:
    run = simulate(Logits(), FURL, DATA, rounds=2, cohort=3, evaluate_every=1).last
    judged = run.judge(("own",))
    last = {r.metric: r.value for r in run.history if r.split == "test" and r.round == 2 and r.client is None}
    assert judged[0].metrics("own") == last == run.evaluate()
    assert dataclasses.is_dataclass(judged[0])


class TwoLayers(nn.Module):
    """The docstring's own example of FURL: a user vector and a private head of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Parameter(torch.zeros(3))
        self.head = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.user)


def test_a_private_head_of_two_layers_trains() -> None:
    torch.manual_seed(0)
    model = TwoLayers()
    run = simulate(model, methods.furl(["user", "head.*"]), DATA, rounds=3, cohort=6)
    kept = everyone(run.private, len(DATA))
    start = dict(model.named_parameters())
    assert all(not torch.equal(values[0], start[name]) for name, values in kept.items())


def test_a_part_that_is_set_to_where_it_cannot_move_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"unable to move: user,.*head\.0\.weight.*head\.0\.bias"):
        simulate(TwoLayers(), methods.furl(["user", "head.*"], private_init=0.0), DATA, rounds=1, cohort=6)


@pytest.mark.parametrize("engine", ["sequential", "vectorised", "centralised"])
def test_a_sequence_of_layers_is_trained_as_a_module_around_it(engine: str) -> None:
    class Around(nn.Module):
        def __init__(self, layers: nn.Module) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)

    layers = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))
    runs = [
        simulate(
            model, methods.fedavg(), classes(counts=(6, 7, 5), test=2), rounds=2, cohort=2, **run_by(engine)
        )
        for model in (layers, Around(layers))
    ]
    assert all(torch.equal(runs[1].server[f"layers.{n}"], v) for n, v in runs[0].server.items())
    assert runs[0].evaluate() == runs[1].evaluate()


@pytest.mark.parametrize("sampling", ["shuffled", "independent"])
def test_who_was_never_drawn_stands_in_the_run(tmp_path: Path, sampling: Any) -> None:
    data, drawn = classes(kind="f4"), set[int]()
    for rounds in (2, 40):
        out = tmp_path / str(rounds)
        given: dict[str, Any] = {"cohort": 2, "sampling": sampling, "seed": 3, "evaluate_every": 0}
        simulate(Logits(), methods.fedavg(), data, rounds=rounds, out=out, **given)
        sampler = Sampler(len(data), 2, sampling, 3)
        drawn = {c for number in range(rounds) for c in sampler(number)}
        ids = [str(data.ids[c]) for c in range(len(data)) if c not in drawn]
        assert read_info(out).get("never_drawn") == ({"count": len(ids), "ids": ids} if ids else None)
        assert bool(ids) is (rounds == 2)
