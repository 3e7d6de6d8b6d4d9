"""Tables that columns of ids look up: declared or found by a trace, of any shape, or whole with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedkeep import FederatedData, Method, Phase, Run, adam, declare, methods, sgd, simulate
from fedkeep.core.net import Net
from fedkeep.engines.tables.lookups import with_declared_tables
from fedkeep.methods import EarlyStopping
from fedkeep.methods.terms import cross_entropy, l2_penalty
from fedkeep.privacy import GaussianNoise, QuantileClip
from tests.engines.reference import close, cohorts, federated
from tests.tiny import parts, same_bits

ITEMS, DIM = 300, 4
STEEP = sgd(0.2, momentum=0.9)


class Ratings(nn.Module):
    """Classes from the vectors of an item and of three tags, and from a number of each item."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.item = nn.Embedding(ITEMS, DIM)
            self.bias = nn.Embedding(ITEMS, 3)
            self.tag = nn.Embedding(ITEMS, DIM)
            self.out = nn.Linear(DIM, 3)
        self.double()

    def forward(self, item: Tensor, tags: Tensor) -> Tensor:
        known = (item != 0).unsqueeze(1)
        return self.out(self.item(item.view(-1)) * known + self.bag(tags)) + self.bias(item)

    def bag(self, tags: Tensor) -> Tensor:
        return self.tag(tags).sum(1)  # type: ignore[no-any-return]


class Bagged(Ratings):
    """The same with a layer that adds up."""

    def __init__(self) -> None:
        super().__init__()
        table = self.tag.weight.detach()
        self.tag = nn.EmbeddingBag.from_pretrained(table, freeze=False, mode="sum")  # type: ignore[assignment]

    def bag(self, tags: Tensor) -> Tensor:
        return self.tag(tags)  # type: ignore[no-any-return]


class Declared(Ratings):
    def __init__(self) -> None:
        super().__init__()
        declare(self, lookup=FOUND)


FOUND = {"item.weight": "item", "bias.weight": "item", "tag.weight": "tags"}


def ratings(kind: str = "int64") -> FederatedData:
    rng = np.random.default_rng(2)
    counts = (9, 6, 7, 5, 8)
    owner = [f"user-{c}" for c, count in enumerate(counts) for _ in range(count + 1)]
    columns = {
        "item": rng.integers(0, ITEMS, len(owner)).astype(kind),
        "tags": rng.integers(0, ITEMS, (len(owner), 3)),
        "label": rng.integers(0, 3, len(owner)),
    }
    split = [s for count in counts for s in parts(count, 0, 1)]
    return FederatedData.from_columns(owner, columns, split, meta={"task": "multiclass", "classes": 3})


DATA = ratings()


def loss_of(model: nn.Module, batch: dict[str, Tensor], client: int) -> Tensor:
    return F.cross_entropy(model(batch["item"].long(), batch["tags"]), batch["label"])


def run(model: nn.Module, optimizer: Any = STEEP, engine: str = "sequential", **changed: Any) -> Run:
    method = methods.fedavg(local=Phase(optimizer=optimizer, batch_size=2, epochs=3)).but(**changed)
    return simulate(model, method, DATA, rounds=4, cohort=3, seed=5, engine=engine, evaluate_every=0)


def uploaded(done: Run) -> list[float]:
    return [r.value for r in done.history if r.metric == "upload_bytes"]


def rows_used(client: int) -> tuple[int, int]:
    """Return how many items and tags a client's training examples use, row 0 included."""
    rows = DATA.rows(client, "train")
    return tuple(len({0, *np.asarray(DATA.columns[c])[rows].reshape(-1)}) for c in ("item", "tags"))  # type: ignore[return-value]


MOMENTUM = (STEEP, lambda m: torch.optim.SGD(m.parameters(), 0.2, momentum=0.9))
ADAM = (adam(0.05), lambda m: torch.optim.Adam(m.parameters(), 0.05))


@pytest.mark.parametrize(
    ("kind", "engine", "optimizers"),
    [
        (Ratings, "sequential", MOMENTUM),
        (Ratings, "sequential", ADAM),
        (Ratings, "workers", ADAM),
        (Ratings, "vectorised", MOMENTUM),
        (Ratings, "vectorised", ADAM),
        (Declared, "sequential", MOMENTUM),
        (Bagged, "sequential", ADAM),
    ],
)
def test_equal_to_the_dense_computation_at_the_bytes_of_the_rows_in_use(
    kind: type[nn.Module], engine: str, optimizers: tuple[Any, Any]
) -> None:
    ours, theirs = optimizers
    done = run(kind(), ours, engine)
    plan, phase = cohorts(DATA, 3, 4, 5), done.method.client.phases[0]
    close(done.server, federated(Ratings(), DATA, plan, phase, theirs, seed=5, loss=loss_of), atol=1e-12)
    used = [[rows_used(client) for client in clients] for clients in plan]
    layer = 8 * (3 * DIM + 3)
    expected = [
        layer + round(np.mean([8 * ((DIM + 5) * items + (DIM + 1) * tags) for items, tags in each]))
        for each in used
    ]
    assert uploaded(done) == expected


def test_plain_sgd_gives_the_bits_of_whole_tables() -> None:
    whole = methods.fedavg().client.but(tables="whole")
    cut = run(Ratings(), sgd(0.5))
    full = run(Ratings(), sgd(0.5), client=whole.but(phases=cut.method.client.phases))
    assert same_bits(cut.server, full.server)
    assert max(uploaded(cut)) < min(uploaded(full)) / 8
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        dense = run(Opaque(), sgd(0.5))
    assert not said
    close(cut.server, dense.server, atol=1e-12)
    assert uploaded(dense) == uploaded(full)


class Opaque(Ratings):
    """Looks at a number, so nothing is found."""

    def forward(self, item: Tensor, tags: Tensor) -> Tensor:
        return (
            super().forward(item, tags)
            if float(self.out.bias.detach()[0]) < 1e9
            else torch.zeros(len(item), 3)
        )


def test_links_of_the_upload_chain_see_the_rows_in_use() -> None:
    clip = QuantileClip(quantile=0.5)
    cut = run(Ratings(), upload=(clip,))
    dense = run(Opaque(), upload=(clip,))
    close(cut.server, dense.server, atol=1e-12)
    assert max(uploaded(cut)) < min(uploaded(dense)) / 8


class Changed(Ratings):
    """The same with another use of an id or a table.

    Args:
        how: given this, the ids of items and of tags, and the output; makes another output.
    """

    def __init__(self, how: Callable[[Any, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.how = how

    def forward(self, item: Tensor, tags: Tensor) -> Tensor:
        return self.how(self, item, tags, super().forward(item, tags))


def looked_up(method: Method, model: nn.Module, data: FederatedData = DATA) -> dict[str, str]:
    net = Net(model)
    with_declared_tables(method, net, data)
    return dict(net.lookup)


def found(model: nn.Module, **local: Any) -> dict[str, str]:
    return looked_up(methods.fedavg(local=Phase(**local)), model)


@pytest.mark.parametrize(
    ("how", "left"),
    [
        (lambda m, i, t, out: out, {"item", "tags"}),
        (lambda m, i, t, out: out + (i > 0).unsqueeze(1) + m.bag(t[:, 1:]).sum(), {"item", "tags"}),
        (lambda m, i, t, out: out + len(i) / i.numel() + t.shape[1], {"item", "tags"}),
        (lambda m, i, t, out: out + i.unsqueeze(1), {"tags"}),
        (lambda m, i, t, out: out + (i == 7).unsqueeze(1), {"tags"}),
        (lambda m, i, t, out: out + m.item(i * 1).sum(), {"tags"}),
        (lambda m, i, t, out: out + F.one_hot(t, ITEMS).sum(), {"item"}),
        (lambda m, i, t, out: out + torch.ones(ITEMS)[t].sum(), {"item"}),
        (lambda m, i, t, out: out + F.embedding(t, torch.ones(ITEMS, 1)).sum(), {"item"}),
        (lambda m, i, t, out: out + t.float().mean(), {"item"}),
        (lambda m, i, t, out: out + float(t.numpy().sum()), set()),
        (lambda m, i, t, out: out if out.sum() < 1e9 else -out, set()),
    ],
)
def test_a_column_that_is_used_otherwise_is_not_found(how: Any, left: set[str]) -> None:
    assert found(Changed(how)) == {n: c for n, c in FOUND.items() if c in left}


def test_a_label_that_is_an_id_too_is_not_found() -> None:
    assert "item" not in found(Ratings(), loss=cross_entropy("item")).values()
    with pytest.warns(UserWarning, match="Sum reads parameters"):
        assert found(Ratings(), loss=cross_entropy() + l2_penalty("out.*")) == FOUND


def test_a_small_table_of_the_same_column_keeps_it_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Ratings()
    model.bias = nn.Embedding(200, 3).double()
    assert found(Changed(lambda m, i, t, out: out)) == FOUND
    data = ratings()
    data.columns["item"] = np.asarray(data.columns["item"]) % 200
    assert looked_up(methods.fedavg(), model, data) == {"tag.weight": "tags"}


class Tied(Ratings):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(DIM, ITEMS, bias=False).double()
        self.again.weight = self.item.weight


def with_layer(**options: Any) -> nn.Module:
    model = Ratings()
    model.item = nn.Embedding(ITEMS, DIM, **options).double()
    return model


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Tied, "it is tied to 'again.weight'"),
        (lambda: with_layer(max_norm=1.0), "max_norm changes rows as they are looked up"),
        (lambda: with_layer(scale_grad_by_freq=True), "scale_grad_by_freq divides gradients by how often a"),
        (
            lambda: with_layer(padding_idx=3),
            "padding_idx is 3, and rows are renumbered; only row 0 stays where",
        ),
        (lambda: Changed(lambda m, i, t, out: out + m.item.weight.sum()), "the model uses it in sum, too"),
    ],
)
def test_a_table_whose_rows_are_not_independent_stays_whole_with_a_warning(model: Any, why: str) -> None:
    with pytest.warns(UserWarning, match="The table 'item.weight' is trained and sent whole, though") as said:
        assert found(model()) == {"tag.weight": "tags"}
    assert len(said) == 1
    assert why in str(said[0].message)
    assert f"use {len(set(np.asarray(DATA.columns['item'])[:9]))} of its rows" in str(said[0].message)


class Otherwise(Ratings):
    """A model that reads all items in some mini-batches."""

    def __init__(self, when: Callable[[Any, Tensor], bool]) -> None:
        super().__init__()
        self.when = when

    def forward(self, item: Tensor, tags: Tensor) -> Tensor:
        out = super().forward(item, tags)
        return out + self.item.weight.mean() if self.when(self, item) else out


@pytest.mark.parametrize(
    ("when", "early"),
    [
        (lambda _, item: len(item) == 1, None),
        (lambda _, item: len(item) > 8, None),
        (lambda m, item: len(item) > 8 and m.item.weight.requires_grad, None),
        (lambda m, _: not m.training, EarlyStopping()),
    ],
    ids=["one example", "large mini-batches", "where it is trained", "evaluation"],
)
def test_single_examples_full_mini_batches_and_both_modes_are_looked_at(when: Any, early: Any) -> None:
    method = methods.local(local=Phase(early_stopping=early))
    with pytest.warns(
        UserWarning, match=r"The table 'item.weight' is trained and sent whole, .* in mean, too"
    ):
        assert looked_up(method, Otherwise(when)) == {"tag.weight": "tags"}


@pytest.mark.parametrize("ask", [lambda t: t.shape[0], len, lambda t: t.size(0), lambda t: t.numel()])
def test_a_model_that_counts_the_rows_has_them_all(ask: Any) -> None:
    with pytest.warns(UserWarning, match="the model uses it in (shape|__len__|size|numel), too"):
        assert found(Changed(lambda m, i, t, out: out / ask(m.item.weight))) == {"tag.weight": "tags"}
    assert found(Changed(lambda m, i, t, out: out / m.item.weight.size(1))) == FOUND  # all are as wide


def test_weight_decay_keeps_tables_whole_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="weight decay moves every row in each step") as said:
        done = run(Ratings(), sgd(0.5, weight_decay=0.1))
    assert len(said) == 3
    assert set(uploaded(done)) == {8 * sum(v.numel() for v in done.server.values())}


@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_bounds_hold_for_rows_that_nobody_uses(optimizer: Any) -> None:
    with pytest.warns(UserWarning, match="'tag.weight' .* the optimiser's bounds hold for every row") as said:
        done = run(Ratings(), optimizer(0.01, bounds={"tag*": (-0.5, 0.25)}))
    assert len(said) == 1
    assert done.server["tag.weight"].unique()[[0, -1]].tolist() == [-0.5, 0.25]
    most = sum(v.numel() for v in done.server.values()) - (DIM + 3) * (ITEMS - 30)
    assert all(8 * ITEMS * DIM < sent < 8 * most for sent in uploaded(done))  # the other tables are cut


def test_each_table_of_a_column_is_sent_whole() -> None:
    model = Ratings()
    model.bias = nn.Embedding(ITEMS + 50, 3).double()
    method = methods.fedavg(local=Phase(optimizer=sgd(0.2), batch_size=2)).on_client(tables="whole")
    noisy = method.but(upload=(GaussianNoise(0.1),))
    done = simulate(model, noisy, DATA, rounds=1, cohort=3, evaluate_every=0)
    assert (done.server["bias.weight"] != model.bias.weight).any(1).all()


@pytest.mark.parametrize("kind", ["uint8", "int16", "int32"])
def test_ids_may_have_any_integer_type(kind: str) -> None:
    class Long(Ratings):
        def forward(self, item: Tensor, tags: Tensor) -> Tensor:
            return super().forward(item.long(), tags)

    data = ratings()
    data.columns["item"] = (np.asarray(data.columns["item"]) % 250).astype(kind)
    method = methods.fedavg(local=Phase(optimizer=sgd(0.5), batch_size=2))
    done = simulate(Long(), method, data, rounds=2, cohort=3, seed=5, evaluate_every=0)
    assert done.net.lookup == FOUND
    plan = cohorts(data, 3, 2, 5)
    expected = federated(
        Ratings(),
        data,
        plan,
        method.client.phases[0],
        lambda m: torch.optim.SGD(m.parameters(), 0.5),
        seed=5,
        loss=loss_of,
    )
    close(done.server, expected, atol=1e-12)


class Sized(Ratings):
    """Divides by the size of the item's table, but in training alone."""

    def __init__(self, trains: Callable[[Any], bool]) -> None:
        super().__init__()
        self.trains = trains

    def forward(self, item: Tensor, tags: Tensor) -> Tensor:
        out = super().forward(item, tags)
        return out / (1 + self.item.weight.square().sum()) if self.trains(self) else out


@pytest.mark.parametrize(
    "trains",
    [lambda m: m.item.weight.requires_grad, lambda _: torch.is_grad_enabled()],
    ids=["asks", "enabled"],
)
def test_a_model_that_reads_a_whole_table_where_it_is_trained(trains: Any) -> None:
    with pytest.warns(
        UserWarning, match="'item.weight' is trained and sent whole, .* uses it in square, too"
    ):
        ours = run(Sized(trains))
    expected = federated(
        Sized(trains),
        DATA,
        cohorts(DATA, 3, 4, 5),
        Phase(batch_size=2, epochs=3),
        lambda m: torch.optim.SGD(m.parameters(), 0.2, momentum=0.9),
        seed=5,
        loss=loss_of,
    )
    close(ours.server, expected, atol=1e-12)


def test_what_a_phase_does_not_train_requires_no_gradient() -> None:
    frozen = Sized(lambda m: not m.out.weight.requires_grad)
    phases = (Phase(trains="out.*"), Phase(trains=("item.*", "bias.*", "tag.*")))
    with pytest.warns(
        UserWarning, match="'item.weight' is trained and sent whole, .* uses it in square, too"
    ):
        assert looked_up(methods.fedavg().on_client(phases=phases), frozen) == {"tag.weight": "tags"}
    assert looked_up(methods.fedavg(), Sized(lambda m: not m.out.weight.requires_grad)) == FOUND
