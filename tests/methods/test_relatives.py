"""FedAvg's and FURL's relatives: numbers by hand, reductions as equalities, and each once more in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import Tensor, nn

from fedkeep import FederatedData, Method, Run, WeightedMean, averaging, methods, sgd, simulate
from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net
from fedkeep.core.params import Params
from fedkeep.engines import ClientResult, Sequential, Stream, run_round
from fedkeep.engines.batches import batches, usable
from fedkeep.experiments.build import build_method
from fedkeep.experiments.config import MethodConfig
from fedkeep.experiments.personalize import cold_start, fit_private, personalize_client
from fedkeep.methods import METHODS, Phase, batch_norm_names
from fedkeep.methods.copies import with_copy
from fedkeep.methods.fedprox import Proximal
from fedkeep.models import ConfidenceGate, MixtureOfExperts
from tests.engines.reference import averaged, close, cohorts, rows_of
from tests.methods.parts import Parts
from tests.tiny import (
    Logits,
    Noisy,
    Rounds,
    Scalar,
    bits,
    classes,
    everyone,
    job,
    on_server,
    pairs,
    same_bits,
)

SQUARED = methods.terms.squared_error()
DATA = classes()
WHOLE = 100  # a mini-batch that holds everything


class Deep(nn.Module):
    """A body, batch statistics if asked for, and a head."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(4)
            self.body = nn.Linear(3, 4)
            self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
            self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.norm(self.body(x))))
        return out


class Product(nn.Module):
    """ŷ = h·w·x from h = w = 1; h is the head."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.h = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.h * self.w * x[:, 0]


ROWS: dict[str, tuple[Callable[[], nn.Module], Method]] = {
    "fedavg": (Deep, methods.fedavg(local=Phase(batch_size=4))),
    "furl": (Logits, methods.furl("user", local=Phase(batch_size=4))),
    "local": (Deep, methods.local(local=Phase(batch_size=4))),
    "fedprox": (Deep, methods.fedprox(0.7, local=Phase(batch_size=4, optimizer=sgd(0.3)))),
    "fine_tuned": (Deep, methods.fine_tuned(local=Phase(batch_size=4))),
    "fedper": (Deep, methods.fedper("head.*", local=Phase(batch_size=4, optimizer=sgd(0.3)))),
    "lg_fedavg": (Deep, methods.lg_fedavg("body.*", local=Phase(batch_size=4, optimizer=sgd(0.3)))),
    "fedbn": (lambda: Deep(norm=True), methods.fedbn("norm.*", local=Phase(batch_size=WHOLE, optimizer=sgd(0.3)))),
    "fedrep": (
        lambda: Deep(norm=True),
        methods.fedrep(
            "head.*", head_epochs=2, head_optimizer=sgd(0.5),
        local=Phase(batch_size=WHOLE, optimizer=sgd(0.3))),
    ),
    "fedrecon": (
        Deep,
        methods.fedrecon(
            "head.*", reconstruction_steps=3, reconstruction_optimizer=sgd(0.5), local=Phase(batch_size=2, optimizer=sgd(0.3))),
    ),
    "ditto": (Deep, methods.ditto(0.4, own_epochs=2, local=Phase(batch_size=4, optimizer=sgd(0.3)))),
    "apfl": (Deep, methods.apfl(0.3, local=Phase(batch_size=4, optimizer=sgd(0.3)))),
    "pfedme": (
        Deep,
        methods.pfedme(2.0, steps=3, own_optimizer=sgd(0.3), local=Phase(batch_size=4, optimizer=sgd(0.2))),
    ),
    "per_fedavg": (Deep, methods.per_fedavg(0.2, local=Phase(batch_size=4, optimizer=sgd(0.3)))),
    "scaffold": (lambda: Deep(norm=True), methods.scaffold(local=Phase(batch_size=7, epochs=2, optimizer=sgd(0.3, rates={"head.*": 0.1})))),
    "feddyn": (lambda: Deep(norm=True), methods.feddyn(0.5, local=Phase(batch_size=7, epochs=2, optimizer=sgd(0.2, momentum=0.5)))),
    "ifca": (lambda: Deep(norm=True), methods.ifca(3, spread=0.5, local=Phase(batch_size=7, epochs=2, optimizer=sgd(0.3)))),
    "pfedhn": (
        lambda: Deep(norm=True),
        methods.pfedhn(
            (5,), embedding=2, local=Phase(batch_size=7, epochs=2, optimizer=sgd(0.3)),
            server=averaging(sgd(0.5, momentum=0.5), by="uniform"),
        ),
    ),
    "fedbabu": (Deep, methods.fedbabu("head.*", local=Phase(batch_size=4, optimizer=sgd(0.3)))),
    "fedmmd": (Parts, methods.fedmmd(2.0, local=Phase(batch_size=4, optimizer=sgd(0.3)))),
    "fedfusion": (Parts, methods.fedfusion("multi", local=Phase(batch_size=4, optimizer=sgd(0.3)))),
    "asp_mtl": (Parts, methods.asp_mtl(6, local=Phase(batch_size=4, optimizer=sgd(0.3)))),
    "pfl_da": (Parts, methods.pfl_da(local=Phase(batch_size=4, optimizer=sgd(0.3)))),
    "kteps": (Parts, methods.kteps(0.5, 0.5, local=Phase(batch_size=4, optimizer=sgd(0.3)))),
    "kteps_star": (Parts, methods.kteps_star(1, 2, table="encoder.weight", local=Phase(batch_size=4, optimizer=sgd(0.3)))),
    "fedala": (
        Deep,
        methods.fedala("head.*", rate=2.0, tolerance=1e-4, most_passes=3, local=Phase(batch_size=4, optimizer=sgd(0.3))),
    ),
    "fedproto": (Parts, methods.fedproto(2.0, local=Phase(batch_size=4, optimizer=sgd(0.3)))),
    "fedrod": (Parts, methods.fedrod(local=Phase(batch_size=4, optimizer=sgd(0.3)))),
    "moon": (Parts, methods.moon(2.0, local=Phase(batch_size=4, optimizer=sgd(0.3)))),
    "mixture": (
        lambda: MixtureOfExperts(Deep(), Deep(norm=True), ConfidenceGate()),
        methods.mixture(local=Phase(batch_size=4, optimizer=sgd(0.3), epochs=3)),
    ),
}  # fmt: skip


def trained(name: str, rounds: int = 3, **options: Any) -> Run:
    make, method = ROWS[name]
    return simulate(make().double(), method, DATA, rounds=rounds, cohort=4, seed=3, **options)


def test_the_rows_are_all_methods() -> None:
    assert set(ROWS) == set(METHODS)


@pytest.mark.parametrize("name", ROWS)
def test_the_same_seed_gives_the_same_bits(name: str) -> None:
    one, two = trained(name), trained(name)
    assert same_bits(on_server(one), on_server(two))
    assert same_bits(everyone(one.private, 6), everyone(two.private, 6))
    other = simulate(ROWS[name][0]().double(), ROWS[name][1], DATA, rounds=3, cohort=4, seed=4)
    assert not (
        same_bits(on_server(one), on_server(other))
        and same_bits(everyone(one.private, 6), everyone(other.private, 6))
    )


@pytest.mark.parametrize("name", ROWS)
def test_stopped_and_continued_is_never_stopped(
    name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fedkeep.experiments.drive as room

    whole, rounds = trained(name), []

    def stop(*arguments: Any) -> Any:
        rounds.append(arguments)
        if len(rounds) == 3:
            raise KeyboardInterrupt
        return run_round(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(room, "run_round", stop)
        with pytest.raises(KeyboardInterrupt):
            trained(name, out=tmp_path / "run")
    again = trained(name, out=tmp_path / "run", resume=True)
    assert same_bits(on_server(whole), on_server(again))
    assert list(on_server(whole)) == list(on_server(again))
    assert same_bits(everyone(whole.private, 6), everyone(again.private, 6))


class Watched(Sequential):
    """Keeps the bytes of every upload and the private values that stayed."""

    def __init__(self) -> None:
        self.bytes: list[bytes] = []
        self.weights: list[float] = []
        self.private: list[Params] = []

    def train(self, *arguments: Any) -> Iterator[ClientResult]:
        for result in super().train(*arguments):
            assert result.upload is not None
            assert result.kept is not None
            self.bytes.append(save({n: v.contiguous() for n, v in result.upload.deltas.items()}))
            self.weights.append(result.upload.weight)
            self.private.append(result.kept)
            yield result


@pytest.mark.parametrize("name", ROWS)
def test_no_private_name_and_no_private_value_is_in_the_bytes_that_leave(name: str) -> None:
    make, method = ROWS[name]
    model = make().double()
    work, engine = job(method.extend(model) if method.extend else model, method, DATA), Watched()
    rounds = Rounds(work, engine)
    for _ in range(2):
        rounds([0, 1, 2, 3])
    names = method.split.private_names(work.net.initial())
    assert bool(names) == (
        name
        not in (
            "fedavg",
            "fedprox",
            "fine_tuned",
            "fedmmd",
            "fedfusion",
            "per_fedavg",
            "scaffold",
            "feddyn",
            "fedbabu",
            "ifca",
            "pfedhn",
            "moon",
        )
    )
    for upload in engine.bytes:
        assert not any(f'"{n}"'.encode() in upload for n in names)
        assert b'"client/' not in upload
        for kept in engine.private:
            assert not any(bits(kept[n]) in upload for n in names if kept[n].numel() > 1)


# --- by hand


def test_the_proximal_term_by_hand() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2))
            self.register_buffer("mean", torch.zeros(2))

    net = Net(Pair())
    params = {"w": torch.tensor([1.0, 2.0]), "mean": torch.tensor([9.0, 9.0])}
    value = float(Proximal(0.1)(net, params, {}, net.initial()))
    assert value == pytest.approx(0.25, abs=1e-7)  # ½ · 0.1 · (1 + 4); the norm unsquared would give 0.112
    with pytest.raises(MethodError, match="^mu must be at least 0; got -1"):
        methods.fedprox(-1)
    with pytest.raises(MethodError, match="no federated parameter to pull"):
        Proximal(0.1)(net, params, {}, {})


def one_client(method: Method, rows: list[tuple[float, float]], rounds: int = 1) -> tuple[float, Params]:
    model = Product() if method.split.is_private("h") else Scalar(1.0)
    run = simulate(model, method, pairs({"a": rows}), rounds=rounds)
    return float(run.server["w"]), {n: v[0] for n, v in run.private.read([0]).items()}


LOCAL = Phase(loss=SQUARED, optimizer=sgd(0.1))


def test_rounds_by_hand() -> None:
    """(x, y) = (1, 3), loss (ŷ − 3)², from 1: gradient −4, a step of 0.1 gives 1.4."""
    w, own = one_client(methods.fedper("h", local=LOCAL), [(1, 3)])
    assert (w, float(own["h"])) == pytest.approx((1.4, 1.4), abs=1e-14)
    w, own = one_client(methods.fedrep("h", head_epochs=1, local=LOCAL), [(1, 3)])
    assert (w, float(own["h"])) == pytest.approx((1.448, 1.4), abs=1e-14)  # 2 (1.4 − 3) 1.4 = −4.48
    w, own = one_client(methods.ditto(0.5, own_epochs=2, local=LOCAL), [(1, 3)])
    assert (w, float(own["own.w"])) == pytest.approx((1.4, 1.7), abs=1e-14)  # 2 (1.4 − 3) + 0.5 · 0.4 = −3
    w, own = one_client(methods.apfl(0.5, adaptive=False, local=LOCAL), [(1, 3)])
    assert (w, float(own["own.w"])) == pytest.approx((1.4, 1.2), abs=1e-14)
    w, _ = one_client(methods.fedprox(0.5, local=LOCAL.but(epochs=2)), [(1, 3)])
    assert w == pytest.approx(1.7, abs=1e-14)


def test_reconstruction_by_hand() -> None:
    """Two equal examples, one for each half; h starts from 1 in both rounds."""
    method = methods.fedrecon("h", reconstruction_steps=1, local=LOCAL)
    w, own = one_client(method, [(1, 3), (1, 3)])
    assert (w, float(own["h"])) == pytest.approx((1.448, 1.4), abs=1e-14)
    w, own = one_client(method, [(1, 3), (1, 3)], rounds=2)
    h = 1 - 0.1 * 2 * (1.448 - 3) * 1.448
    assert float(own["h"]) == pytest.approx(h, abs=1e-14)
    assert w == pytest.approx(1.448 - 0.1 * 2 * (h * 1.448 - 3) * h, abs=1e-14)
    data = pairs({"a": [(1, 3)] * 5, "b": [(1, 3)], "c": [(1, 3)] * 4})
    for halves, weights in ((True, [3, 1, 2]), (False, [5, 1, 4])):
        work, engine = job(Product(), methods.fedrecon("h", halves=halves, local=LOCAL), data), Watched()
        Rounds(work, engine)([0, 1, 2])
        assert engine.weights == weights


def test_halves_are_disjoint_complete_and_lasting() -> None:
    support, query = Phase(examples="support"), Phase(examples="query")
    data = classes(counts=(5, 9, 1), opted_in=True)
    for client in range(3):
        rows = rows_of(data, client)
        drawn = [
            [usable(data, rows, p, Stream(7, data.ids[client], r)).tolist() for p in (support, query)]
            for r in (0, 1)
        ]
        assert drawn[0] == drawn[1]
        inside = rows[np.asarray(data.columns["opted_in"])[rows]].tolist()  # type: ignore[index]
        assert sorted(drawn[0][0] + drawn[0][1]) == inside
        assert len(drawn[0][0]) == len(inside) // 2
    one, two = (usable(DATA, rows_of(DATA, 1), support, Stream(s, "user-1")).tolist() for s in (1, 2))
    assert sorted(one) != sorted(two)


# --- reductions


def server_of(method: Method, model: nn.Module | None = None, **options: Any) -> Params:
    return simulate(
        model or Deep(norm=True).double(), method, DATA, rounds=3, cohort=4, seed=3, **options
    ).server


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
@pytest.mark.parametrize(
    "build",
    [
        lambda **o: methods.fedprox(mu=0, **o),
        lambda **o: methods.fedper((), **o),
        lambda **o: methods.lg_fedavg((), **o),
        lambda **o: methods.fedbn((), **o),
        methods.fine_tuned,
    ],
    ids=["fedprox", "fedper", "lg_fedavg", "fedbn", "fine_tuned"],
)
def test_what_is_fedavg_bit_for_bit(build: Callable[..., Method], weighting: Any) -> None:
    options: dict[str, Any] = {
        "local": Phase(batch_size=50, optimizer=sgd(0.3), epochs=2),
        "server": averaging(by=weighting),
    }
    assert same_bits(server_of(build(**options)), server_of(methods.fedavg(**options)))
    assert not same_bits(server_of(methods.fedprox(1.0, **options)), server_of(methods.fedavg(**options)))


@pytest.mark.parametrize("build", [methods.ditto, methods.apfl])
def test_a_private_copy_leaves_fedavg_as_it_is(build: Callable[..., Method]) -> None:
    local = Phase(batch_size=50, optimizer=sgd(0.3), epochs=2)
    plain = server_of(methods.fedavg(local=local))
    assert same_bits(server_of(build(local=local)), plain)
    assert any("running_mean" in n for n in plain)


@pytest.mark.parametrize("build", [methods.fedrep, methods.fedrecon])
def test_two_phases_with_nothing_private_are_fedavg(build: Callable[..., Method]) -> None:
    """Up to the order of the examples within the one mini-batch, which has a stream per phase."""
    halves = {"halves": False} if build is methods.fedrecon else {}
    local = Phase(batch_size=WHOLE, optimizer=sgd(0.3), epochs=2)
    ours, theirs = server_of(build((), local=local, **halves)), server_of(methods.fedavg(local=local))
    close({n: v for n, v in ours.items() if v.is_floating_point()}, theirs, atol=1e-13)


def test_other_reductions() -> None:
    local = Phase(batch_size=4, optimizer=sgd(0.3))
    settings: dict[str, Any] = {"rounds": 3, "cohort": 4, "seed": 3}
    everything = simulate(Deep().double(), methods.fedper("*", local=local), DATA, **settings)
    alone = simulate(Deep().double(), methods.local(local=local), DATA, **settings)
    assert same_bits(everyone(everything.private, 6), everyone(alone.private, 6))
    assert methods.lg_fedavg("body.*").but(name="fedper") == methods.fedper("body.*")
    whole = local.but(batch_size=WHOLE)
    free = simulate(Deep().double(), methods.ditto(0.0, local=whole), DATA, **settings)
    alone = simulate(Deep().double(), methods.local(local=whole), DATA, **settings)
    lonely = everyone(alone.private, 6)
    close({n.removeprefix("own."): v for n, v in everyone(free.private, 6).items()}, lonely, atol=1e-13)
    only = simulate(Deep().double(), methods.apfl(1.0, adaptive=False, local=whole), DATA, **settings)
    close({n.removeprefix("own."): v for n, v in everyone(only.private, 6).items()}, lonely, atol=1e-13)
    none = simulate(Deep().double(), methods.apfl(0.0, adaptive=False, local=local), DATA, **settings)
    plain = simulate(Deep().double(), methods.fedavg(local=local), DATA, **settings)
    assert none.evaluate() == plain.evaluate() != only.evaluate()


# --- plain PyTorch


State = dict[str, Tensor]
Client = Callable[["Plain", nn.Module, State, int, int], float]


class Plain:
    """Federated training with private names, in modules and ``torch.optim``; a client's round is given."""

    def __init__(
        self, model: nn.Module, method: Method, data: FederatedData, private: str | tuple[str, ...]
    ) -> None:
        self.model, self.method, self.data, self.private = model.double(), method, data, private
        self.server = self.only(model.state_dict(), False)
        self.own = [self.only(model.state_dict(), True) for _ in range(len(data))]
        self.share = [0.3] * len(data)  # α of APFL

    def only(self, state: State, private: bool) -> State:
        return {n: v.detach().clone() for n, v in state.items() if n.startswith(self.private) == private}

    def draw(self, client: int, number: int, round: int) -> Iterator[tuple[Tensor, Tensor]]:
        name = Stream(3, self.data.ids[client], round)
        for chosen in batches(
            self.data, rows_of(self.data, client), self.method.client.phases[number], name, number
        ):
            batch = self.data.batch(chosen)
            yield batch["x"], batch["label"]

    def steps(
        self,
        local: nn.Module,
        names: Any,
        rate: float,
        batches: Any,
        extra: Callable[[nn.Module], Tensor] | None = None,
    ) -> None:
        stepper = torch.optim.SGD([p for n, p in local.named_parameters() if n.startswith(names)], rate)
        for x, label in batches:
            local.zero_grad()
            loss = nn.functional.cross_entropy(local(x), label)
            (loss if extra is None else loss + extra(local)).backward()
            stepper.step()

    def run(self, client: Client, rounds: int = 3, uniform: bool = False) -> Plain:
        for number, cohort in enumerate(cohorts(self.data, 4, rounds, 3)):
            results, weights = [], []
            for c in cohort:
                local = copy.deepcopy(self.model).train()
                local.load_state_dict({**self.server, **self.own[c]}, strict=False)
                weight = client(self, local, self.server, c, number)
                results.append(self.only(local.state_dict(), False))
                self.own[c] = self.only(local.state_dict(), True)
                weights.append(1.0 if uniform else weight)
            self.server = averaged(results, weights)
        return self


def count(plain: Plain, client: int) -> float:
    return float(len(rows_of(plain.data, client)))


def fedprox_client(plain: Plain, local: nn.Module, received: State, c: int, number: int) -> float:
    def pull(model: nn.Module) -> Tensor:
        return sum(
            (0.35 * (p - received[n]).pow(2).sum() for n, p in model.named_parameters()), torch.zeros(())
        )

    plain.steps(local, "", 0.3, plain.draw(c, 0, number), pull)
    return count(plain, c)


def joint_client(plain: Plain, local: nn.Module, received: State, c: int, number: int) -> float:
    plain.steps(local, "", 0.3, plain.draw(c, 0, number))
    return count(plain, c)


def fedrep_client(plain: Plain, local: nn.Module, received: State, c: int, number: int) -> float:
    plain.steps(local, "head.", 0.5, plain.draw(c, 0, number))
    plain.steps(local, ("body.", "norm."), 0.3, plain.draw(c, 1, number))
    return count(plain, c)


def fedrecon_client(plain: Plain, local: nn.Module, received: State, c: int, number: int) -> float:
    local.load_state_dict(
        {n: v for n, v in plain.model.state_dict().items() if n.startswith("head.")}, strict=False
    )
    plain.steps(local, "head.", 0.5, plain.draw(c, 0, number))
    query = list(plain.draw(c, 1, number))
    plain.steps(local, "body.", 0.3, query)
    return float(sum(len(label) for _, label in query))


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
@pytest.mark.parametrize(
    ("name", "private", "client"),
    [
        ("fedprox", (), fedprox_client),
        ("fedper", ("head.",), joint_client),
        ("lg_fedavg", ("body.",), joint_client),
        ("fedbn", ("norm.",), joint_client),
        ("fedrep", ("head.",), fedrep_client),
        ("fedrecon", ("head.",), fedrecon_client),
    ],
)
def test_three_rounds_equal_plain_pytorch(
    name: str, private: tuple[str, ...], client: Client, weighting: Any
) -> None:
    make, method = ROWS[name]
    run = simulate(
        make().double(), method.on_server(reduce=WeightedMean(by=weighting)), DATA, rounds=3, cohort=4, seed=3
    )
    plain = Plain(make().double(), method, DATA, private).run(client, uniform=weighting == "uniform")
    assert run.server.keys() == plain.server.keys()
    close(run.server, plain.server)
    kept = everyone(run.private, 6)
    for c, state in enumerate(plain.own):
        assert kept.keys() == state.keys()
        close({n: v[c] for n, v in kept.items()}, state)
    start = make().double().state_dict()
    assert all(not torch.equal(run.server[n], start[n]) for n in run.server if n.endswith("weight"))


def ditto_step(plain: Plain, w: nn.Module, v: nn.Module, received: State, c: int, number: int) -> None:
    plain.steps(w, "", 0.3, plain.draw(c, 0, number))

    def pull(model: nn.Module) -> Tensor:
        return sum(
            (0.2 * (p - received[n]).pow(2).sum() for n, p in model.named_parameters()), torch.zeros(())
        )

    plain.steps(v, "", 0.3, plain.draw(c, 1, number), pull)


def apfl_step(plain: Plain, w: nn.Module, v: nn.Module, received: State, c: int, number: int) -> None:
    for x, label in plain.draw(c, 0, number):
        middle = copy.deepcopy(w)
        with torch.no_grad():
            for m, a, b in zip(middle.parameters(), v.parameters(), w.parameters(), strict=True):
                m.copy_(plain.share[c] * a + (1 - plain.share[c]) * b)
        for model in (w, middle):
            model.zero_grad()
            nn.functional.cross_entropy(model(x), label).backward()
        slope = 0.0
        with torch.no_grad():
            for m, a, b in zip(middle.parameters(), v.parameters(), w.parameters(), strict=True):
                slope += float((m.grad * (a - b)).sum())
                a -= 0.3 * plain.share[c] * m.grad  # the chain rule's α, times the rate
                b -= 0.3 * b.grad
        plain.share[c] = min(max(plain.share[c] - 0.3 * slope, 0.0), 1.0)


@pytest.mark.parametrize(("name", "step"), [("ditto", ditto_step), ("apfl", apfl_step)])
def test_private_copies_equal_plain_pytorch(name: str, step: Callable[..., None]) -> None:
    run = trained(name)
    plain = Plain(Deep().double(), ROWS[name][1], DATA, ())
    own = [copy.deepcopy(plain.model).train() for _ in range(len(DATA))]

    def client(plain: Plain, local: nn.Module, received: State, c: int, number: int) -> float:
        step(plain, local, own[c], received, c, number)
        return count(plain, c)

    plain.run(client)
    close(run.server, plain.server)
    kept = everyone(run.private, 6)
    shared, mine = [], []
    for c, model in enumerate(own):
        close({n.removeprefix("own."): v[c] for n, v in kept.items() if n != "alpha"}, model.state_dict())
        share = 1.0 if name == "ditto" else plain.share[c]
        assert name == "ditto" or float(kept["alpha"][c]) == pytest.approx(share, abs=1e-12)
        state = {n: share * v + (1 - share) * run.server[n] for n, v in model.state_dict().items()}
        batch = DATA.batch(np.arange(DATA.rows(c, "test").start, DATA.rows(c, "test").stop))
        for losses, values in ((mine, state), (shared, run.server)):
            logits = torch.func.functional_call(plain.model, values, batch["x"])
            losses.append(nn.functional.cross_entropy(logits, batch["label"], reduction="none"))
    assert run.evaluate()["loss"] == pytest.approx(float(torch.cat(mine).mean()), abs=1e-10)
    assert run.evaluate(shared=True)["loss"] == pytest.approx(float(torch.cat(shared).mean()), abs=1e-10)
    assert any(not torch.equal(kept[f"own.{n}"][0], v) for n, v in run.server.items())
    assert name == "ditto" or len(set(plain.share)) == 6


def test_a_fine_tuned_copy_equals_plain_pytorch() -> None:
    method = methods.fine_tuned(
        tune_optimizer=sgd(0.2), tune_epochs=3, local=Phase(batch_size=50, optimizer=sgd(0.3))
    )
    run = simulate(Deep(norm=True).double(), method, DATA, rounds=2, cohort=4, seed=3)
    before = {n: bits(v) for n, v in run.server.items()}
    rows = rows_of(DATA, 1)
    own = fit_private(run, 1, rows)
    local = Deep(norm=True).double().train()
    local.load_state_dict(run.server)
    stepper = torch.optim.SGD(local.parameters(), 0.2)
    for chosen in batches(DATA, rows, method.adapt.phases[0], Stream(3, "personalize/user-1", len(rows)), 0):
        batch = DATA.batch(chosen)
        stepper.zero_grad()
        nn.functional.cross_entropy(local(batch["x"]), batch["label"]).backward()
        stepper.step()
    assert own.keys() == local.state_dict().keys()
    close(own, {n: v.detach() for n, v in local.state_dict().items()})
    assert not torch.equal(
        own["norm.running_mean"], run.server["norm.running_mean"]
    )  # the copy's own statistics
    assert before == {n: bits(v) for n, v in run.server.items()}
    found, metrics = personalize_client(run, "user-1")
    local.eval()
    batch = DATA.batch(np.arange(DATA.rows(1, "test").start, DATA.rows(1, "test").stop))
    assert metrics["before_loss"] == pytest.approx(run.evaluate(clients=[1])["loss"])
    local.load_state_dict(found)
    with torch.no_grad():
        assert metrics["loss"] == pytest.approx(
            float(nn.functional.cross_entropy(local(batch["x"]), batch["label"]))
        )
    curve = cold_start(run, range(6), (0, None))
    assert curve.pooled[0] == run.evaluate()["accuracy"]


def test_reconstruction_is_how_a_client_of_fedrecon_predicts() -> None:
    run = trained("fedrecon")
    rows = rows_of(DATA, 2)
    own = fit_private(run, 2, rows)
    local = Deep().double()
    local.load_state_dict({**local.state_dict(), **run.server})
    stepper = torch.optim.SGD(local.head.parameters(), 0.5)
    for chosen in batches(
        DATA, rows, run.method.adapt.phases[0], Stream(3, "personalize/user-2", len(rows)), 0
    ):
        batch = DATA.batch(chosen)
        stepper.zero_grad()
        nn.functional.cross_entropy(local(batch["x"]), batch["label"]).backward()
        stepper.step()
    close(own, {f"head.{n}": v.detach() for n, v in local.head.state_dict().items()})


# --- what is refused, and configurations


def test_the_names_of_batch_normalisation() -> None:
    assert batch_norm_names(Noisy()) == (
        "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked",
    )  # fmt: skip
    assert batch_norm_names(nn.BatchNorm1d(2, affine=False, track_running_stats=True))[0] == "running_mean"
    assert methods.fedbn(batch_norm_names(Noisy())).split.table(Noisy())[-1]["half"] == "federated"
    with pytest.raises(MethodError) as error:
        batch_norm_names(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))
    assert str(error.value) == "Sequential has no batch normalisation; without any, use methods.fedavg()."


def test_copies_do_not_collide_and_leave_the_model_alone() -> None:
    model = Logits()
    names = list(model.state_dict())
    both = with_copy(model)
    assert list(both.state_dict()) == names + [f"own.{n}" for n in names]
    assert list(model.state_dict()) == names
    with pytest.raises(
        MethodError, match="^Logits has an attribute 'own', where this training method puts a part"
    ):
        with_copy(both)
    with pytest.raises(MethodError, match=r"^alpha must be in \[0, 1\]; got 1.5"):
        methods.apfl(1.5)


def test_centralised_training_refuses_what_it_cannot_do() -> None:
    with pytest.raises(
        MethodError, match="^'fedrecon' is stateless: its private values start anew in every round"
    ):
        trained("fedrecon", engine="pooled")
    for name in ("ditto", "apfl"):
        wanted = (
            "need a table of the private 'own.body.bias'"
            if name == "ditto"
            else "^APFL mixes one client's model"
        )
        with pytest.raises(MethodError, match=wanted):
            trained(name, engine="pooled")


def test_a_configurations_adaptation_keeps_the_methods_loss() -> None:
    table = {"kind": "ditto", "lam": 0.5, "adapt": {"epochs": 2, "optimizer": {"learning_rate": 0.7}}}
    (phase,) = build_method(MethodConfig.model_validate(table)).adapt.phases
    assert phase.loss == methods.ditto(0.5).adapt.phases[0].loss
    assert (phase.epochs, phase.optimizer, phase.trains, phase.examples) == (2, sgd(0.7), "private", "all")
    table = {"kind": "fine_tuned", "adapt": {"epochs": 2}}
    assert build_method(MethodConfig.model_validate(table)).adapt.phases[0].trains == "all"
