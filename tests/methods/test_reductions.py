"""Methods that become one another at the limit of a setting: reductions as equalities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from fedkeep import Method, averaging, methods, sgd, simulate
from fedkeep.core.params import Params
from fedkeep.methods import Phase
from tests.engines.reference import close
from tests.methods.parts import Deep, Normal, Parts
from tests.methods.table import DATA, WHOLE
from tests.tiny import everyone, same_bits


def server_of(method: Method, model: nn.Module | None = None, **options: Any) -> Params:
    return simulate(
        model or Deep(norm=True).double(), method, DATA, rounds=3, cohort=4, seed=3, **options
    ).server


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_what_is_fedavg_bit_for_bit(weighting: Any) -> None:
    options: dict[str, Any] = {
        "local": Phase(batch_size=50, optimizer=sgd(0.3), epochs=2),
        "server": averaging(by=weighting),
    }
    alike = (
        methods.fedprox(mu=0, **options),
        methods.fedper((), **options),
        methods.lg_fedavg((), **options),
        methods.fedbn((), **options),
        methods.fine_tuned(**options),
    )
    plain = server_of(methods.fedavg(**options))
    assert [method.name for method in alike if not same_bits(server_of(method), plain)] == []
    assert not same_bits(server_of(methods.fedprox(1.0, **options)), plain)


@pytest.mark.parametrize("build", [methods.ditto, methods.apfl])
def test_a_private_copy_leaves_fedavg_as_it_is(build: Callable[..., Method]) -> None:
    local, server = Phase(batch_size=50, optimizer=sgd(0.3), epochs=2), averaging(by="uniform")
    plain = server_of(methods.fedavg(local=local, server=server))
    assert same_bits(server_of(build(local=local, server=server)), plain)
    assert any("running_mean" in n for n in plain)


@pytest.mark.filterwarnings("ignore:A phase of .* trains 'private':UserWarning")
@pytest.mark.parametrize("build", [methods.fedrep, methods.fedrecon])
def test_two_phases_with_nothing_private_are_fedavg(build: Callable[..., Method]) -> None:
    """Up to the order of the examples within the one mini-batch, which has a stream per phase."""
    halves = {"halves": False} if build is methods.fedrecon else {}
    local = Phase(batch_size=WHOLE, optimizer=sgd(0.3), epochs=2)
    options: dict[str, Any] = {"local": local, "server": averaging(by="examples")}
    ours, theirs = server_of(build((), **options, **halves)), server_of(methods.fedavg(**options))
    close({n: v for n, v in ours.items() if v.is_floating_point()}, theirs, atol=1e-13)


LOCAL = Phase(batch_size=4, epochs=2, optimizer=sgd(0.2, momentum=0.9))
FREELY = Phase(batch_size=4, epochs=2, optimizer=sgd(0.2))
UNIFORM = averaging(by="uniform")
# A model, a method without what is its own, what it then is, the same method with it, whether to the bit.
WITHOUT: dict[str, tuple[Callable[[], nn.Module], Method, Method, Method, bool]] = {
    "moon": (
        Parts,
        methods.moon(0, local=LOCAL),
        methods.fedavg(local=LOCAL),
        methods.moon(local=LOCAL),
        True,
    ),
    "moon with batch statistics": (
        Normal,
        methods.moon(0, local=LOCAL.but(batch_size=50)),
        methods.fedavg(local=LOCAL.but(batch_size=50)),
        methods.moon(local=LOCAL.but(batch_size=50)),
        True,
    ),
    "fedbabu": (
        Deep,
        methods.fedbabu((), local=LOCAL),
        methods.fedavg(local=LOCAL),
        methods.fedbabu("head.*", local=LOCAL),
        True,
    ),
    "ifca": (
        Deep,
        methods.ifca(1, local=LOCAL),
        methods.fedavg(local=LOCAL, server=UNIFORM),
        methods.fedavg(local=LOCAL),
        True,
    ),
    "fedproto": (
        Parts,
        methods.fedproto(0, local=LOCAL),
        methods.local(local=LOCAL),
        methods.fedproto(1.0, local=LOCAL),
        True,
    ),
    "mr_mtl": (
        Deep,
        methods.mr_mtl(0, local=FREELY),
        methods.local(local=FREELY),
        methods.mr_mtl(1.0, local=FREELY),
        False,
    ),
    "fedamp": (
        Deep,
        methods.fedamp(lam=0, local=FREELY),
        methods.local(local=FREELY),
        methods.fedamp(lam=1.0, local=FREELY),
        False,
    ),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_without_what_is_its_own_a_method_is_another(name: str) -> None:
    model, *three, to_the_bit = WITHOUT[name]

    def trained(method: Method) -> Params:
        run = simulate(model().double(), method, DATA, rounds=6, cohort=4, seed=3).last
        alone = three[1].name == "local"
        values = everyone(run.private, 6) if alone else run.server
        return {n.removeprefix("own."): v for n, v in values.items()}

    free, plain, full = map(trained, three)
    close(free, plain, atol=1e-13)
    assert not to_the_bit or same_bits(free, plain)
    assert not same_bits(full, plain)


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
    fedavg = methods.fedavg(local=local, server=averaging(by="uniform"))
    plain = simulate(Deep().double(), fedavg, DATA, **settings)
    assert none.evaluate() == plain.evaluate() != only.evaluate()
