"""Methods with differential privacy: a round by hand, an empty round, every method, and those that are refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedkeep import Method, Phase, Run, Split, WeightedMean, averaging, methods, sgd, simulate
from fedkeep.core.errors import ConfigError, MethodError
from fedkeep.core.params import Params
from fedkeep.methods import Global, Kept, PrivateMean, Sent, differentially_private
from fedkeep.methods.private import INSIDE, NoisyMean
from fedkeep.privacy import Adaptive, DifferentialPrivacy, GaussianNoise, QuantileClip
from fedkeep.split import Upload
from tests.methods.table import ROWS
from tests.refusals import raises
from tests.tiny import Rounds, classes, job, same_bits

START = {
    "w": torch.zeros(2, dtype=torch.float64),
    "t": torch.zeros(4, 1, dtype=torch.float64),
    "n": torch.tensor(3),
}
UNIFORM = averaging(by="uniform")
NOTHING = (
    "Nothing is federated, so nothing leaves the clients that could be clipped. Leave differential privacy and secure "
    "sums out, or take another method."
)
PLAIN = DifferentialPrivacy(noise=0.0, clip=1.0)


def as_before(before: Kept, after: Kept, share: float) -> Kept:
    return before


def upload(w: list[float], row: int, value: float, weight: float = 1.0, n: int = 9) -> Upload:
    rows = {"t": torch.tensor([row])}
    start = {"w": START["w"], "t": START["t"][rows["t"]], "n": START["n"]}
    trained = {"w": torch.tensor(w).double(), "t": torch.tensor([[value]]).double(), "n": torch.tensor(n)}
    return Split().upload(start, trained, weight, rows)


def noisy(privacy: DifferentialPrivacy, clients: str, cohort: float = 4, round: int = 0) -> NoisyMean:
    rule = PrivateMean(mean=WeightedMean(by="uniform"), privacy=privacy, cohort=cohort)
    state = {} if privacy.adaptive is None else {"clip_bound": torch.tensor(2.0).double()}
    return rule.begin(Global(params=START, state=state, round=round), START, clients)


def test_a_round_by_hand() -> None:
    """‖(3, 0, 4)‖ = 5 is cut to 1: (0.6, 0, 0.8); (0, 0.5, 0) stays; both over the expected 4 clients, not over 2."""
    found = noisy(PLAIN, "ab")
    found.add("b", upload([0.0, 0.5], 0, 0.0))
    found.add("a", upload([3.0, 0.0], 2, 4.0))
    made = found.value()
    torch.testing.assert_close(made.changes["w"], torch.tensor([0.15, 0.125]).double())
    torch.testing.assert_close(made.changes["t"].flatten(), torch.tensor([0, 0, 0.2, 0]).double())
    assert made.rows == {}  # all rows: which of them the clients have is private
    assert made.changes["n"] == 3  # a counter stays
    assert (made.weight, made.count) == (4.0, 4)  # the expected number; how many there were is private


def test_weights_are_at_most_one() -> None:
    heavy = DifferentialPrivacy(noise=0.0, clip=10.0, heaviest=5.0)
    found = noisy(heavy, "abc")
    for client, weight in (("a", 2.0), ("b", 5.0), ("c", 1e9)):
        found.add(client, upload([1.0, 0.0], 0, 0.0, weight))
    assert float(found.value().changes["w"][0]) == pytest.approx((0.4 + 1 + 1) / 4)


def test_an_empty_round_releases_noise_alone_of_the_right_size() -> None:
    privacy = DifferentialPrivacy(noise=1.5, clip={"w": 0.5, "*": 0.1})
    values = [noisy(privacy, "").value().changes for _ in range(4000)]
    root = math.sqrt(2)
    for name, bound in (("w", 0.5), ("t", 0.1)):
        stacked = torch.stack([v[name].flatten() for v in values]).numpy()
        wanted = 1.5 * root * bound / 4
        assert np.abs(stacked.std(0) / wanted - 1).max() < 5 / math.sqrt(2 * 4000)
        assert np.abs(stacked.mean(0)).max() < 5 * wanted / math.sqrt(4000)
        assert np.abs(np.corrcoef(stacked.T) - np.eye(stacked.shape[1])).max() < 5 / math.sqrt(4000)


def test_noise_from_the_system_never_comes_twice_and_from_a_seed_it_does() -> None:
    system = DifferentialPrivacy(noise=1.0, clip=1.0)
    assert not same_bits(noisy(system, "").value().changes, noisy(system, "").value().changes)
    seeded = DifferentialPrivacy(noise=1.0, clip=1.0, noise_seed=3)
    first = noisy(seeded, "").value().changes
    assert same_bits(first, noisy(seeded, "").value().changes)
    assert not same_bits(first, noisy(seeded, "", round=1).value().changes)


def test_the_bound_follows_the_clients_with_noise_of_its_own() -> None:
    """Bound 2; one of three is inside: Σ (b − ½) = ½ − ½ − ½; the share is (−½ + noise) / 4 + ½."""
    privacy = DifferentialPrivacy(noise=1e-9, clip=1.0, adaptive=Adaptive(noise=1e-3, quantile=0.9, rate=0.2))
    shares = []
    for _ in range(300):
        found = noisy(privacy, "abc")
        for client, size in (("a", 1.9), ("b", 2.1), ("c", 9.0)):
            found.add(client, upload([size, 0.0], 0, 0.0))
        made = found.value()
        shares.append(float(made.state[INSIDE]))
    assert float(made.changes["w"][0]) == pytest.approx((1.9 + 2 + 2) / 4, abs=1e-6)
    assert np.mean(shares) == pytest.approx(0.375, abs=2e-4)
    assert np.std(shares) == pytest.approx(1e-3 / 4, rel=0.25)


def test_noise_follows_a_bound_that_has_moved() -> None:
    """The bound has moved from 1 to 2: a client may change the sum by 2, so the noise is z_Δ · 2, over 4 clients."""
    asked = DifferentialPrivacy(noise=1.5, clip=1.0, noise_seed=0, adaptive=Adaptive(noise=4.0))
    made = [noisy(asked, "ab", round=k).value().changes for k in range(500)]
    drawn = torch.cat([one[name].flatten() for one in made for name in ("w", "t")])
    assert float(drawn.std()) == pytest.approx(asked.multiplier * 2 / 4, rel=0.06)


def everything(server: Global, client: str) -> Sent:
    return Sent(params=server.params, state=server.state)


def test_a_methods_own_sending_knows_nothing_of_the_bound() -> None:
    asked = DifferentialPrivacy(noise=1.5, clip=1.0, adaptive=Adaptive(noise=4.0))
    method = differentially_private(methods.fedavg(server=UNIFORM).on_server(send=everything), asked, 6)
    state = {"clip_bound": torch.tensor(2.0), "own": torch.tensor(1.0)}
    assert set(method.server.sent(Global(params=START, state=state), "a").state) == {"own"}


def test_partial_sums_are_merged_and_noise_is_added_once() -> None:
    privacy = DifferentialPrivacy(noise=1e-6, clip=1.0, noise_seed=0, adaptive=Adaptive(noise=1.0))
    names = [f"c{k:02}" for k in range(20)]  # two blocks
    parts = [
        PrivateMean(mean=WeightedMean(), privacy=privacy, cohort=20).begin(
            Global(params=START, state={"clip_bound": torch.tensor(1.0).double()}), START, names
        )
        for _ in range(3)
    ]
    for k, name in enumerate(names):
        for part in (parts[2], parts[k // 16]):
            part.add(name, upload([0.1 * k, 0.0], k % 4, 1.0))
    parts[0].merge(parts[1])
    assert same_bits(parts[0].value().changes, parts[2].value().changes)
    assert torch.equal(parts[0].value().state[INSIDE], parts[2].value().state[INSIDE])


REFUSED = {"ifca", "pfedhn", "fedamp", "fedpac", "scaffold", "feddyn", "fedproto"}
SUMS = sorted(set(ROWS) - REFUSED - {"local", "asp_mtl"})


@pytest.mark.parametrize("name", SUMS)
def test_every_method_that_sums_runs_with_privacy_and_without_noise_moves_as_before(name: str) -> None:
    """Bounds that nobody reaches, no noise, everybody in every round: uniform weights give what the method gives."""
    build, method = ROWS[name]
    even = method.on_server(reduce=WeightedMean(by="uniform"))
    loose = differentially_private(even, DifferentialPrivacy(noise=0.0, clip=1e9), 6)
    made = [Rounds(job(each.made_for(build()).double(), each, classes())) for each in (even, loose)]
    for rounds in made:
        for _ in range(2):
            rounds(range(6))
    plain, same = (
        {n: v for n, v in {**r.server.params, **r.server.state}.items() if v.is_floating_point()}
        for r in made
    )
    torch.testing.assert_close(same, plain, rtol=1e-09, atol=1e-12)
    noisy_method = differentially_private(
        even, DifferentialPrivacy(noise=1.0, clip=0.1, adaptive=Adaptive(noise=3.0), noise_seed=1), 6
    )
    third = Rounds(job(noisy_method.made_for(build()).double(), noisy_method, classes()))
    before = dict(third.server.params), dict(third.server.state)
    assert third([]).clients == 0  # nobody came: noise alone
    alone = {**third.server.params, **third.server.state}
    assert all(not torch.equal(alone[n], v) for part in before for n, v in part.items() if n in plain)
    third(range(6))
    assert third.server.round == 2
    after = {**third.server.params, **third.server.state}
    assert not any(torch.equal(after[n], v) for n, v in plain.items())


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (ROWS["ifca"][1], "'ifca' reduces uploads by MeanByGroup, which is no plain sum over clients"),
        (ROWS["pfedhn"][1], "'pfedhn' reduces uploads by PullBack, which is no plain sum over clients"),
        (ROWS["fedamp"][1], "'fedamp' reduces uploads by KeepEach, which is no plain sum over clients"),
        (
            ROWS["scaffold"][1],
            (
                "'scaffold' cannot have its uploads clipped: the server's control is the mean of what clients keep, which "
                "would part for good. Differential privacy wants clipping. Take another method."
            ),
        ),
        (
            ROWS["feddyn"][1],
            (
                "'feddyn' cannot have its uploads clipped: the server's h is the mean of the slopes that clients keep, "
                "which would part for good. Differential privacy wants clipping. Take another method."
            ),
        ),
        (
            ROWS["fedproto"][1],
            (
                "'fedproto' bears no noise: a prototype is a sum of features over a count, and noise over noise has no bound. "
                "Take another method."
            ),
        ),
        (
            methods.fedavg(server=averaging().but(reduce=methods.Median())),
            "'fedavg' reduces uploads by Median",
        ),
        (
            methods.fedavg(server=averaging().but(reduce=methods.ClippedMean())),
            "'fedavg' reduces uploads by ClippedM",
        ),
        (methods.fedavg(), "'fedavg' weights clients by their numbers of examples, which have no bound."),
        (
            methods.fedavg(
                server=averaging().but(reduce=WeightedMean(by="uniform", missing_rows="owners_only"))
            ),
            "'fedavg' divides each row by the weights of those who hold it, and who does is private.",
        ),
        (
            methods.furl("user", private_scale="fedavg", server=UNIFORM),
            "'furl' scales what a client keeps by",
        ),
        (
            methods.furl("user", server=UNIFORM).on_client(accept=as_before),
            "'furl' keeps by a rule of its own (Client.ac",
        ),
        (
            methods.fedavg(server=UNIFORM).but(upload=(QuantileClip(),)),
            "The link QuantileClip of 'fedavg' gathers",
        ),
    ],
)
def test_a_method_whose_rounds_are_no_bounded_sum_is_refused(method: Method, message: str) -> None:
    with pytest.raises(MethodError) as error:
        differentially_private(method, PLAIN, 4)
    assert str(error.value).startswith(message)


def test_equal_weights_have_no_heaviest() -> None:
    """It would divide every change and leave the noise as it is."""
    asked = DifferentialPrivacy(noise=0.0, clip=1.0, heaviest=100.0)
    with raises(MethodError, said="so there is no number of examples that", method="fedavg"):
        differentially_private(methods.fedavg(server=UNIFORM), asked, 4)


def test_a_method_that_sends_nothing_has_nothing_to_clip() -> None:
    build, method = ROWS["local"]
    nothing = differentially_private(method.on_server(reduce=WeightedMean(by="uniform")), PLAIN, 4)
    with raises(ConfigError, text=NOTHING):
        Rounds(job(build().double(), nothing, classes()))(range(3))


def test_one_client_moves_the_server_by_no_more_than_its_bound() -> None:
    """Without noise, with and without a client of huge inputs: the difference is at most C / (q N)."""
    wild = classes(counts=(8, 9, 7))
    x = wild.columns["x"]
    x[wild.rows(2, "train").start : wild.rows(2, "train").stop] *= 1e6  # type: ignore[index]
    build, _ = ROWS["furl"]
    method = methods.furl("user", local=Phase(batch_size=4, optimizer=sgd(0.1)), server=UNIFORM)
    bounded = differentially_private(method, DifferentialPrivacy(noise=0.0, clip=0.05), 3)

    def after(clients: list[int], method: Method) -> Params:
        rounds = Rounds(job(build().double(), method, wild))
        rounds(clients)
        return rounds.server.params

    def apart(a: Params, b: Params) -> float:
        return math.sqrt(sum(float((a[n] - b[n]).square().sum()) for n in a))

    assert apart(after([0, 1, 2], bounded), after([0, 1], bounded)) <= 0.05 / 3 * (1 + 1e-9)
    assert apart(after([0, 1, 2], method), after([0, 1], method)) > 1


STATISTICS = {
    "privacy": (
        {
            "privacy": DifferentialPrivacy(noise=1.0, clip=1.0, delta=1e-2, noise_seed=0),
            "sampling": "poisson",
        },
        (),
    ),
    "link": ({}, (GaussianNoise(0.3),)),
}


def normalised(layer: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(layer, nn.Linear(3, 3)).double()


@pytest.mark.parametrize("noise", STATISTICS)
def test_noise_on_federated_running_variances_is_refused_and_each_remedy_trains(noise: str) -> None:
    """A variance became negative, and every output NaN."""
    asked, upload = STATISTICS[noise]
    model, data = normalised(nn.BatchNorm1d(3)), classes(counts=(6,) * 8)

    def run(model: nn.Module, method: Method, **more: Any) -> Run:
        return simulate(model, method.but(upload=upload), data, rounds=6, cohort=4, **(asked | more))

    spectral = normalised(nn.utils.spectral_norm(nn.Linear(3, 3)))
    for refused, name in ((model, "0.running_var"), (spectral, "0.weight_u")):
        with raises(MethodError, name=name):
            run(refused, methods.fedavg(server=UNIFORM))
    for kept, method in (
        (spectral, methods.fedper("0.weight_?", server=UNIFORM)),
        (model, methods.fedper("0.running_*", server=UNIFORM)),
        (model, methods.fedbn(methods.batch_norm_names(model), server=UNIFORM)),
        (normalised(nn.GroupNorm(1, 3)), methods.fedavg(server=UNIFORM)),
    ):
        assert math.isfinite(run(kept, method).evaluate("train")["loss"])
    if noise == "privacy":  # clipped changes alone leave every variance a mean of variances
        quiet = run(model, methods.fedavg(server=UNIFORM), privacy=replace(asked["privacy"], noise=0.0))
        assert quiet.server["0.running_var"].min() > 0
    else:
        refused = methods.fedavg(server=UNIFORM).but(upload=upload)
        assert simulate(model, refused, data, rounds=1, centralised=True).server["0.running_var"].min() > 0
