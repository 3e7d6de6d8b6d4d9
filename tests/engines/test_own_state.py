"""Models with containers, generators, scratch tensors or late layers of their own; and models that draw where judged."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkeep import Phase, methods, sgd, simulate
from fedkeep.core.errors import ConfigError, MethodError, SplitError
from fedkeep.core.net import Net
from fedkeep.methods import EarlyStopping
from tests import refusals
from tests.engines.test_interactions import agree
from tests.engines.test_odd_models import numbers
from tests.tiny import Parts, same_bits

pytestmark = pytest.mark.filterwarnings("ignore:The model predicts otherwise:UserWarning")

LOCAL = Phase(batch_size=4, epochs=2, optimizer=sgd(0.1))
FEDAVG = methods.fedavg(local=LOCAL)


class Counting(Parts):
    """Warms up by a counter in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = {"steps": [0]}

    def features(self, x: Tensor) -> Tensor:
        self.seen["steps"][0] += 1
        return super().features(x) * min(1.0, self.seen["steps"][0] / 20)


class Recalling(Parts):
    """Mixes in the last mini-batches' features."""

    def __init__(self) -> None:
        super().__init__()
        self.last: deque[Tensor] = deque(maxlen=2)

    def features(self, x: Tensor) -> Tensor:
        found = super().features(x)
        self.last.append(found.detach().mean(0))
        return found - 0.3 * self.last[0]


class Hooked(Parts):
    """Looks at what a layer gave by a hook, in the same pass."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Tensor] = {}
        self.encoder.register_forward_hook(self.keep)

    def keep(self, layer: nn.Module, given: Any, out: Tensor) -> None:
        self.found["encoder"] = out

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.1 * self.found["encoder"].mean()


@pytest.mark.parametrize(("model", "name"), [(Counting, "seen"), (Recalling, "last")])
def test_what_stands_in_containers_is_the_clients_own(model: type[nn.Module], name: str) -> None:
    settings: dict[str, Any] = {"rounds": 1, "evaluate_every": 0, "progress": False}
    method = methods.local(local=LOCAL)
    torch.manual_seed(0)
    first = model().double()
    together = simulate(first, method, numbers(), cohort=4, engine="sequential", **settings)
    for client in range(4):
        alone = simulate(first, method, numbers().select([client]), cohort=1, engine="sequential", **settings)
        assert same_bits(together.parameters(client), alone.parameters(client))
    with refusals.raises(ConfigError, said=f"{name}[", method="local"):
        simulate(first, method, numbers(), cohort=4, engine="vectorised", **settings)


def test_what_a_hook_leaves_in_a_dict_is_no_hindrance() -> None:
    agree(Hooked, FEDAVG, numbers(), "sequential", "vectorised")


def test_containers_are_as_before_afterwards() -> None:
    held: dict[str, Any] = {"list": [1, [2]], "set": {3}, "deque": deque([4], maxlen=9), "tuple": ([5],)}
    module = nn.Linear(1, 1)
    layer = type("Own", (nn.Module,), {})()
    layer.inner, layer.held = module, held
    with Net(layer).still():
        held["list"][1].append(0)
        held["list"].clear()
        held["set"].add(0)
        held["deque"].append(0)
        held["tuple"][0].append(0)
        held["more"] = 0
    assert layer.held is held
    assert held == {"list": [1, [2]], "set": {3}, "deque": deque([4]), "tuple": ([5],)}


GENERATORS: dict[str, tuple[Any, Any]] = {
    "torch": (lambda: torch.Generator().manual_seed(0), lambda own: torch.rand((), generator=own)),
    "numpy": (lambda: np.random.default_rng(0), lambda own: own.random()),
    "numpy's old": (lambda: np.random.RandomState(0), lambda own: own.rand()),
    "python": (lambda: random.Random(0), lambda own: own.random()),  # noqa: S311
}


@pytest.mark.parametrize("which", GENERATORS)
@pytest.mark.parametrize("engine", ["sequential", "workers", "vectorised"])
def test_a_generator_of_the_models_own_is_refused(which: str, engine: str) -> None:
    make, draw = GENERATORS[which]

    class Drawing(Parts):
        def __init__(self) -> None:
            super().__init__()
            self.own = {"noise": make()}

        def features(self, x: Tensor) -> Tensor:
            return super().features(x) * (1 + float(draw(self.own["noise"])) if self.training else 1)

    with pytest.raises(
        MethodError, match=r"forward drew random numbers from \"own\['noise'\]\", a generator"
    ):
        simulate(Drawing().double(), FEDAVG, numbers(), rounds=1, cohort=4, engine=engine, progress=False)


class Summing(Parts):
    """Sums up in a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros((), dtype=torch.float64)

    def features(self, x: Tensor) -> Tensor:
        self.total += x.detach().mean()
        return super().features(x) - self.total


def test_a_tensor_that_is_written_in_place_is_named() -> None:
    with pytest.raises(SplitError, match="training wrote into 'total', which is no persistent buffer"):
        simulate(Summing().double(), FEDAVG, numbers(), rounds=1, engine="sequential", progress=False)


class Late(Parts):
    """Makes a layer when it first sees how wide its input is."""

    late: Any

    def __init__(self) -> None:
        super().__init__()
        self.late = None

    def forward(self, x: Tensor) -> Tensor:
        if self.late is None:
            self.late = nn.Linear(x.shape[1], 3).double()
        return super().forward(x) + self.late(x)


class LateParameter(Parts):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Parameter(torch.zeros(3))
        return super().forward(x) + self.late


class Relu(Parts):
    """Makes a layer that has nothing to train."""

    def forward(self, x: Tensor) -> Tensor:
        self.late = nn.ReLU()
        return self.late(super().forward(x))


@pytest.mark.parametrize("model", [Late, LateParameter])
@pytest.mark.parametrize("engine", ["sequential", "vectorised", "auto"])
def test_a_layer_that_forward_makes_is_refused(model: type[nn.Module], engine: str) -> None:
    with refusals.raises(MethodError, who="The model", layer="late"):
        simulate(model().double(), FEDAVG, numbers(), rounds=1, cohort=4, engine=engine, progress=False)


def test_a_layer_without_parameters_that_forward_makes_is_no_hindrance() -> None:
    agree(Relu, FEDAVG, numbers())
    model = Relu().double()
    simulate(model, FEDAVG, numbers(), rounds=1, cohort=4, progress=False)
    assert not hasattr(model, "late")


class Always(Parts):
    """Drops while it is judged, too."""

    def head(self, features: Tensor) -> Tensor:
        return super().head(nn.functional.dropout(features, 0.5))


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_random_numbers_are_refused_where_a_model_is_judged(engine: str) -> None:
    data = numbers().split_per_user((0.5, 0.0, 0.5))
    run = simulate(
        Always().double(), FEDAVG, data, rounds=1, cohort=4, evaluate_every=0, engine=engine, progress=False
    )
    with refusals.raises(
        MethodError, said="examples drew random numbers, so its result", what="judging of 'test' examples"
    ):
        run.evaluate("test")


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_random_numbers_are_refused_where_training_stops_early(engine: str) -> None:
    data = numbers().split_per_user((0.5, 0.5, 0.0))
    stopping = LOCAL.but(epochs=3, early_stopping=EarlyStopping(every=1, patience=1))
    with pytest.raises(MethodError, match=r"The validation loss drew random numbers.*self\.train"):
        simulate(
            Always().double(),
            methods.local(local=stopping),
            data,
            rounds=1,
            cohort=4,
            evaluate_every=0,
            engine=engine,
            progress=False,
        )


def test_a_hook_that_judges_by_chance_is_refused() -> None:
    with pytest.raises(MethodError, match=r"The start of 'ifca' drew random numbers.*self\.training"):
        simulate(Always().double(), methods.ifca(2, local=LOCAL), numbers(), rounds=1, progress=False)
