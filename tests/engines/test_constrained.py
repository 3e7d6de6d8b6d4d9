"""Models whose forward constrains their own weights: each client's own in training, and nobody's where it is judged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedkeep import Phase, methods, sgd, simulate
from fedkeep.core.errors import ConfigError
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, clone
from fedkeep.engines.rehearsal import rehearse
from fedkeep.methods import Method, terms
from tests.engines import test_odd_models as odd
from tests.engines.test_interactions import agree, numbers
from tests.tiny import Parts, same_bits

LOCAL = Phase(batch_size=4, epochs=2, optimizer=sgd(0.3))
DATA = numbers(4, 8).split_per_user((0.5, 0.25, 0.25))


class Replaced(nn.Linear):
    """Bounds its rows as EEGNet does."""

    def forward(self, input: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.2)
        return super().forward(input)


class Clamped(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(input)


class Shrunk(nn.Linear):
    """Is another each time that it is computed."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.95)
        return super().forward(input)


class Judged(nn.Linear):
    """Bounds its rows where nobody trains, and by a tensor that does not tell that it is written."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(input)


def model_with(kind: type[nn.Linear]) -> type[nn.Module]:
    class Constrained(Parts):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = kind(2, 4)

    return Constrained


KINDS = [Replaced, Clamped, Shrunk, Judged]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "method",
    [methods.fedavg(local=LOCAL), methods.fedper("encoder.*", local=LOCAL), methods.ifca(2, local=LOCAL)],
    ids=lambda method: method.name,
)
def test_judging_and_hooks_leave_a_run_as_it_is(kind: type[nn.Linear], method: Method) -> None:
    def run(**options: Any) -> Any:
        torch.manual_seed(0)
        settings: dict[str, Any] = {"rounds": 2, "cohort": 4, "evaluate_every": 0, "engine": "sequential"}
        return simulate(model_with(kind)(), method, DATA, progress=False, **{**settings, **options}).last

    def values(run: Any) -> dict[str, Tensor]:
        kept = {f"{c}/{n}": v for c in DATA.ids for n, v in run.kept(c).flat.items()}
        return clone({**run.server, **run.state, **kept})

    one = run()
    before = values(one)
    assert same_bits(values(run(evaluate_every=1)), before)
    assert same_bits(values(run(engine="workers", workers=2)), before)
    one.evaluate("test")
    assert same_bits(values(one), before)


@dataclass(frozen=True)
class Like(terms.Term):
    """Holds the outputs to those of the model that was received."""

    loss: terms.Term = field(default_factory=terms.cross_entropy)

    def __call__(self, net: Net, params: Any, batch: Batch, received: Any) -> Tensor:
        was = net({**params, **received}, batch).detach()
        found: Tensor = self.loss(net, params, batch, received)
        return found + ((net(params, batch) - was) ** 2).mean()


SIDE_BY_SIDE = {
    "all": (Shrunk, methods.fedavg(local=LOCAL)),
    "the head alone": (Shrunk, methods.fedavg(local=LOCAL.but(trains="classifier.*"))),
    "a term that runs what was received": (Clamped, methods.fedavg(local=LOCAL.but(loss=Like()))),
    "features of what was received": (Shrunk, methods.moon(local=LOCAL)),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("which", SIDE_BY_SIDE)
def test_each_client_has_a_constraint_of_its_own_side_by_side(which: str) -> None:
    kind, method = SIDE_BY_SIDE[which]
    agree(model_with(kind), method, odd.numbers(), "sequential", "vectorised", "workers", workers=None)


def test_a_constraint_that_cannot_be_followed_side_by_side_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"in place.*Use engine='sequential'\.$"):
        simulate(model_with(Replaced)(), methods.fedavg(local=LOCAL), DATA, rounds=1, engine="vectorised")


@pytest.mark.parametrize("kind", [*KINDS, nn.Linear])
def test_a_rehearsal_changes_nothing_but_what_is_known(kind: type[nn.Linear]) -> None:
    net = Net(nn.Sequential(kind(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)))
    net.module.forward = lambda x: nn.Sequential.forward(net.module, x)  # type: ignore[method-assign, arg-type]
    params, state = net.initial(), torch.get_rng_state()
    before = clone(params)
    rehearse(net, params, DATA, DATA.split_rows("train", [0]), "cpu")
    assert set(net.written) == (set() if kind is nn.Linear else {"0.weight"})
    assert same_bits(params, before)
    assert same_bits(net.initial(), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert net.module.training
