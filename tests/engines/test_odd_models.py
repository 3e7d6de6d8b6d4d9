"""Models that do more than compute: each client trains as if it were alone, with every engine, or a message says why not."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkeep import FederatedData, Phase, Split, declare, methods, sgd, simulate
from fedkeep.core.errors import ConfigError, MethodError
from fedkeep.methods import Method, terms
from tests import refusals
from tests.engines.test_interactions import agree
from tests.tiny import Parts, same_bits

pytestmark = pytest.mark.filterwarnings("ignore:The model predicts otherwise:UserWarning")

LOCAL = Phase(batch_size=4, epochs=2, optimizer=sgd(0.1))
COUNTS = (5, 9, 3, 7)  # clients take 2, 3, 1 and 2 steps an epoch


def data(**given: Any) -> FederatedData:
    rows, rng = sum(COUNTS), np.random.default_rng(0)
    label = {"label": rng.integers(0, 3, rows)}
    return FederatedData.from_columns(
        np.repeat(np.arange(len(COUNTS)), COUNTS), {**label, **given}, ["train"] * rows
    )


def numbers(**given: Any) -> FederatedData:
    return data(x=np.random.default_rng(1).standard_normal((sum(COUNTS), 2)), **given)


class Counting(Parts):
    """Warms up by a counter of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def features(self, x: Tensor) -> Tensor:
        self.step += 1
        return super().features(x) * min(1.0, self.step / 20)


class Averaging(Parts):
    """Subtracts a running mean that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(2, dtype=torch.float64)

    def features(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().features(x - self.mean)


class Ticking(Parts):
    """Counts in a tensor, which is the same for all clients at once."""

    def __init__(self) -> None:
        super().__init__()
        self.step = torch.zeros((), dtype=torch.float64)

    def features(self, x: Tensor) -> Tensor:
        self.step = self.step + 1
        return super().features(x) / self.step


class Showing(Parts):
    """Leaves its last features, and what they are like, for whoever looks."""

    last: Tensor
    size: int

    def features(self, x: Tensor) -> Tensor:
        self.last, self.size = super().features(x), x.shape[-1]
        return self.last


LASTING = [(Counting, "step"), (Averaging, "mean"), (Ticking, "step")]


@pytest.mark.parametrize(("model", "name"), LASTING)
@pytest.mark.parametrize("engine", ["sequential", "auto"])
def test_what_forward_keeps_is_the_clients_own(model: type[nn.Module], name: str, engine: str) -> None:
    settings: dict[str, Any] = {"rounds": 1, "evaluate_every": 0, "progress": False, "engine": engine}
    method = methods.local(local=LOCAL)
    torch.manual_seed(0)
    first = model().double()
    together = simulate(first, method, numbers(), cohort=len(COUNTS), **settings)
    for client in range(len(COUNTS)):
        alone = simulate(first, method, numbers().select([client]), cohort=1, **settings)
        assert same_bits(together.parameters(client), alone.parameters(client))
    with pytest.raises(ConfigError, match=rf"\(forward keeps '{name}' from one mini-batch to the next\)"):
        simulate(first, method, numbers(), cohort=4, **(settings | {"engine": "vectorised"}))


def test_what_forward_only_leaves_is_no_hindrance() -> None:
    agree(Showing, methods.fedavg(local=LOCAL), numbers())


class Python(Parts):
    def features(self, x: Tensor) -> Tensor:
        return super().features(x) * (1 + (random.random() < 0.5))  # noqa: S311


class NumPy(Parts):
    def features(self, x: Tensor) -> Tensor:
        return super().features(x) * (1 + (np.random.rand() < 0.5))  # noqa: NPY002


@pytest.mark.parametrize("model", [Python, NumPy])
@pytest.mark.parametrize("engine", ["sequential", "workers", "vectorised", "auto"])
def test_draws_that_no_seed_governs_are_refused(model: type[nn.Module], engine: str) -> None:
    with pytest.raises(
        MethodError, match=r"round 0: the model or its loss drew random numbers from random or numpy"
    ):
        simulate(
            model().double(),
            methods.fedavg(local=LOCAL),
            numbers(),
            rounds=1,
            cohort=4,
            engine=engine,
            workers=2 if engine == "workers" else None,
            progress=False,
        )


class Bounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.classifier = nn.Embedding(300, 4, max_norm=0.5), nn.Linear(4, 3)

    def forward(self, item: Tensor) -> Tensor:
        return self.classifier(torch.tanh(self.embedding(item)))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.filterwarnings("ignore:The table 'embedding.weight' is trained and sent whole")
def test_a_table_that_is_renormalised_where_it_is_not_trained() -> None:
    """The head sees examples that the body does not, and clients of one and three steps do not step side by side."""
    item = np.random.default_rng(0).integers(0, 300, sum(COUNTS))
    method = methods.fedrep("classifier.*", head_epochs=2, local=LOCAL.but(epochs=None, steps=1))
    agree(Bounded, method, data(item=item))


class Masked(Parts):
    """With a frozen weight, and a frozen buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 1.0]))
        self.encoder.bias.requires_grad_(False)

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) * self.mask


@pytest.mark.parametrize("split", [Split(), Split(frozen="encoder.*")])
def test_models_of_clusters_leave_out_what_is_frozen(split: Split) -> None:
    method = methods.ifca(2, spread=0.5, local=LOCAL).but(split=split)
    agree(Masked, method, numbers())
    run = simulate(Masked(), method, numbers(), rounds=2, cohort=4, progress=False)
    moved = {"classifier.weight", "classifier.bias"} | (set() if split.frozen else {"encoder.weight"})
    assert {name.removeprefix("1/") for name in run.state} == moved
    picks = {int(run.kept(client).state["cluster"]) for client in range(len(COUNTS))}
    assert picks == {0, 1}, "or nobody started from the second model"


def test_clusters_with_a_private_part_are_refused() -> None:
    method = methods.ifca(2, local=LOCAL).but(split=Split("classifier.*"))
    with refusals.raises(
        MethodError, said="classifier.bias' private. Leave private", private="classifier.bias"
    ):
        simulate(Parts(), method, numbers(), rounds=1, cohort=4, progress=False)


@pytest.mark.parametrize(
    ("method", "plain"),
    [
        (methods.scaffold(local=LOCAL), "encoder.weight"),
        (methods.feddyn(local=LOCAL), "encoder.weight"),
        (methods.fedcp(local=LOCAL), "encoder.weight"),
    ],
    ids=["SCAFFOLD", "FedDyn", "FedCP"],
)
def test_methods_with_state_for_each_parameter_take_a_private_part(method: Method, plain: str) -> None:
    """What is private has no part in the state: it stays zero where it is a correction."""
    method = method.but(split=Split((*method.split.private, "classifier.bias")))
    agree(Parts, method, numbers())
    run = simulate(Parts(), method, numbers(), rounds=2, cohort=4, progress=False)
    assert "classifier.bias" not in run.server
    state = run.kept(0).state
    if "classifier.bias" in state:
        assert not state["classifier.bias"].any()
        assert state[plain].any()


class InPlace(Parts):
    def features(self, x: Tensor) -> Tensor:
        found = torch.relu(self.encoder(x))
        found[:, 0] = 0.5
        return found


@pytest.mark.parametrize("engine", ["sequential", "workers", "auto"])
def test_a_write_in_place_is_said_in_words(engine: str) -> None:
    with pytest.raises(MethodError) as error:
        simulate(
            InPlace().double(),
            methods.fedavg(local=LOCAL),
            numbers(),
            rounds=1,
            cohort=4,
            engine=engine,
            workers=2 if engine == "workers" else None,
            progress=False,
        )
    said = str(error.value)
    assert (
        "The loss has no gradient: one of the variables needed for gradient computation has been modified"
        in said
    )
    assert said.endswith(
        "A forward may not write in place into what its gradient needs: write y = y.clone() before."
    )


class Attending(Parts):
    def features(self, x: Tensor) -> Tensor:
        found = super().features(x)
        rows = torch.stack([found, found.flip(1)], 1)[:, None]  # two words, one head
        return nn.functional.scaled_dot_product_attention(rows, rows, rows)[:, 0, 0]


def test_exact_second_derivatives_of_attention() -> None:
    agree(Attending, methods.per_fedavg(order="exact", local=LOCAL), numbers())


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.classifier = nn.EmbeddingBag(20, 4), nn.Linear(4, 3)

    def forward(self, item: Tensor) -> Tensor:
        return self.classifier(self.embedding(item[:, None]))


def test_a_layer_without_second_derivatives_is_said_in_words() -> None:
    item = np.random.default_rng(0).integers(0, 20, sum(COUNTS))
    with pytest.raises(MethodError, match=r"is not implemented\. Use another layer, or .*order='free'"):
        simulate(
            Bag(),
            methods.per_fedavg(order="exact", local=LOCAL),
            data(item=item),
            rounds=1,
            cohort=4,
            progress=False,
        )


class Number(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(4, 1)

    def head(self, features: Tensor) -> Tensor:
        return super().head(features).squeeze(-1)


REAL = LOCAL.but(loss=terms.squared_error())


@pytest.mark.parametrize(
    "method",
    [
        methods.kteps(local=REAL),
        methods.pfl_da(local=REAL),
        methods.fedproto(local=REAL),
        methods.fedpac(local=REAL),
        methods.fedrod(local=REAL),
        methods.gpfl(local=REAL),
        methods.knn_per(local=REAL),
    ],
    ids=lambda method: method.name,
)
def test_methods_for_classes_say_so_of_numbers(method: Method) -> None:
    label = np.random.default_rng(2).standard_normal(sum(COUNTS)).astype(np.float32)
    some = numbers(label=label).split_per_user((0.5, 0.0, 0.5))
    with refusals.raises(MethodError, said="This method wants"):
        simulate(Number().double(), method, some, rounds=1, cohort=4, progress=False)
    simulate(Number().double(), methods.ditto(local=REAL), some, rounds=1, cohort=4, progress=False)


def test_a_model_of_which_nothing_is_trained() -> None:
    still = Parts().double().requires_grad_(False)
    with pytest.warns(
        UserWarning, match="^No parameter of the model requires a gradient, so rounds train nothing"
    ):
        simulate(still, methods.fedavg(local=LOCAL), numbers(), rounds=1, cohort=4, progress=False)


class Mixing(nn.Module):
    """Mixes the inputs by a sparse matrix: an attribute, or made in ``forward`` of buffers."""

    def __init__(self, attribute: bool) -> None:
        super().__init__()
        self.head, self.user = nn.Linear(2, 3), nn.Parameter(torch.zeros(3))
        self.register_buffer("places", torch.tensor([[0, 1, 1], [0, 0, 1]]))
        self.register_buffer("values", torch.tensor([1.0, 0.5, 2.0]), persistent=False)
        self.mixer = self.made(torch.float64) if attribute else None

    def made(self, dtype: torch.dtype) -> Tensor:
        return torch.sparse_coo_tensor(self.places, self.values.to(dtype), (2, 2), check_invariants=True)

    def forward(self, x: Tensor) -> Tensor:
        mixer = self.made(x.dtype) if self.mixer is None else self.mixer
        return self.head(torch.sparse.mm(mixer, x.mT).mT) + self.user


class Fixed(Mixing):
    def __init__(self) -> None:
        super().__init__(True)


class Made(Mixing):
    def __init__(self) -> None:
        super().__init__(False)


class Mixed(Mixing):
    """The same, computed densely."""

    def __init__(self) -> None:
        super().__init__(False)

    def forward(self, x: Tensor) -> Tensor:
        mixer = torch.tensor([[1.0, 0.0], [0.5, 2.0]], dtype=x.dtype)
        return self.head(x @ mixer.mT) + self.user


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("kind", [Fixed, Made])
def test_a_sparse_matrix_computes_as_a_dense_one_with_every_engine(kind: type[nn.Module]) -> None:
    method = methods.furl("user", local=LOCAL)
    agree(kind, method, numbers(), "sequential", "vectorised", "workers")
    servers = []
    for model in (kind, Mixed):
        torch.manual_seed(0)
        servers.append(simulate(model().double(), method, numbers(), rounds=2, progress=False).server)
    torch.testing.assert_close(servers[0]["head.weight"], servers[1]["head.weight"], rtol=1e-9, atol=1e-10)


class Divides(nn.Module):
    """Scales bytes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 2)

    def forward(self, image: Tensor) -> Tensor:
        return self.head((image.float() / 255).flatten(1))


@pytest.mark.parametrize("takes", [False, True])
def test_a_model_that_scales_bytes_itself_is_told(takes: bool) -> None:
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (12, 3, 2, 2)).astype(np.uint8)
    columns = {"image": images, "label": np.arange(12) % 2}
    data = FederatedData.from_columns(np.arange(12) % 2, columns, ["train"] * 12)
    model = declare(Divides(), takes_bytes=True) if takes else Divides()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        simulate(model, methods.fedavg(), data, rounds=1, evaluate_every=0)
    assert any("Divides" in str(one.message) and "255" in str(one.message) for one in said) == (not takes)
