"""Which items a person gets to see, and how well the ones that it took stand among all: the full ranking.

Every item is scored by a client's own model and ranked, but for those that it has in training (and, where ``test`` is
judged, in validation): they are left out of the lists. Sampled rankings, such as He et al.'s one right item among 100,
order methods otherwise than full ones do (W. Krichene and S. Rendle, On Sampled Metrics for Item Recommendation,
KDD 2020). Items with the same score stand before the right one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedkeep.core.errors import ConfigError, DataError, FedkeepError, MethodError, check_whole, raising
from fedkeep.core.net import logits_of
from fedkeep.data import FederatedData, Ragged
from fedkeep.data.ids import SomeIds
from fedkeep.engines.use import PersonalModel, place_of, takes_of
from fedkeep.report.wording import count
from fedkeep.tasks import tasks_in

if TYPE_CHECKING:
    import pyarrow as pa

KS = (5, 10, 20)
ROUNDING = 1e-4
"""Labels are kept in single precision, perhaps in other units."""
Models = Callable[[str], nn.Module]


@dataclass(frozen=True)
class Ranking:
    """How a run's models rank all items once it is trained, see ``full_ranking``.

    Attributes:
        ks: lengths of lists.
        liked: of ratings, the least that counts as taken; None: every rated item does.
    """

    ks: tuple[int, ...] = (10,)
    liked: float | None = None

    def check(self, data: FederatedData) -> None:
        """Check before training that the data can be ranked so.

        Raises:
            ConfigError: there are fewer items than a k, or the data have none, or no user has one in ``test`` that it
                had not before.
        """
        with raising(ConfigError, "ranking: {why}", FedkeepError):
            check_ks(self.ks, items_of(data))
            everyone = range(len(data))
            if not any(len(asked_of(data, client, "test", self.liked)[0]) for client in everyone):
                raise DataError("No user has an item in test that counts and that it has not seen before.")


USUAL = Ranking(KS)
"""Of a run whose configuration says nothing of a ranking."""


@dataclass(frozen=True)
class FullRanking:
    """How items that clients took stand among all that they had not seen.

    Attributes:
        metrics: by name, the mean over clients: ``hr@k``, whether one of its items is among the first k; ``recall@k``,
            which share of them is; ``ndcg@k``, with gains of 1; ``mrr``, one by the first one's place.
        clients: how many clients have such an item.
        ranks: by client's id, the places of its items, ascending, 1 for the best.
        cold_items: how many of the items are in no client's training examples; they are ranked too.
        cold_recall: which share of them is among the largest k; NaN where there is none.
        cold_clients: how many of the clients have no training example.
        liked: of ratings, the least that counted as taken; None: every rated item did.
    """

    metrics: dict[str, float]
    clients: int
    ranks: dict[str, list[int]]
    cold_items: int
    cold_recall: float
    cold_clients: int
    liked: float | None = None

    @property
    def told(self) -> str:
        """How many items of how many clients were ranked, and how many of both are cold, in words."""
        items, users = count(sum(map(len, self.ranks.values())), "item"), count(self.clients, "user")
        said = f"{items} of {users}, each among all but those that the user had before."
        if self.cold_items:
            said += f" {self.cold_items:,} of the items nobody had in training: {self.cold_recall:.1%} of these are found."
        if self.cold_clients:
            said += f" {self.cold_clients:,} of the users have no training example."
        if self.liked is not None:
            said += f" Of ratings, {self.liked:g} and more count."
        return said


def full_ranking(
    data: FederatedData,
    clients: SomeIds,
    models: Models,
    split: str = "test",
    *,
    ks: Sequence[int] = KS,
    liked: float | None = None,
) -> FullRanking:
    """Rank all items for each client, and look where those of a split stand.

    Args:
        data: with a column ``item``: ratings, or questions that ``leave_one_out`` made of them.
        clients: whose items.
        models: returns a client's model, given its id.
        split: ``valid`` or ``test``.
        ks: lengths of lists.
        liked: of ratings, the least that counts as taken; None: every rated item does.

    Raises:
        ConfigError: there are fewer items than a k.
        DataError: the data have no items, or no client has one in the split.
        MethodError: the model wants more than an item to score it.
    """
    items = items_of(data)
    check_ks(ks, items)
    trained = np.zeros(items, bool)
    trained[taken(data, data.split_rows("train"))] = True
    found, cold = dict[str, list[int]](), list[int]()
    per_client: dict[str, list[float]] = {}
    for name, place in zip(map(str, clients), clients.positions.tolist(), strict=True):
        own, seen = asked_of(data, place, split, liked)
        if not len(own):
            continue
        scores = scores_of(models(name), data, items)
        rank = places(scores, own, seen)
        found[name] = sorted(rank.tolist())
        cold += rank[~trained[own]].tolist()
        for metric, value in judged(rank, ks).items():
            per_client.setdefault(metric, []).append(value)
    if not found:
        raise DataError(
            "None of the {count} clients has an item in the split {split!r} that it has not seen before.",
            count=len(clients),
            split=split,
        )
    train = data.counts("train")
    return FullRanking(
        metrics={metric: float(np.mean(values)) for metric, values in per_client.items()},
        clients=len(found),
        ranks=found,
        cold_items=len(cold),
        cold_recall=float(np.mean([rank <= max(ks) for rank in cold])) if cold else float("nan"),
        cold_clients=sum(train[data.index(name)] == 0 for name in found),
        liked=None if liked == -np.inf else liked,
    )


def recommended(data: FederatedData, clients: SomeIds, models: Models, n: int = 10) -> pa.Table:
    """Return each client's n best items of those that it has not in any split, best first, as a table of pyarrow.

    ``.to_pandas()`` makes a data frame of it. Columns: client, rank, item, score. An item is named as in the data's
    ``meta["item_ids"]``, where they name it; else by its number. One that has seen all but a few gets fewer. Of ratings a
    score is a predicted one, in the units that they were read in.

    Raises:
        ConfigError, DataError, MethodError: as for `full_ranking`.
    """
    import pyarrow as pa

    items = items_of(data)
    check_whole({"n": n})
    if not 1 <= n <= items:
        raise ConfigError(
            "n must be a whole number from 1 to {items}, the number of items; got {count}.",
            items=items,
            count=n,
        )
    names = data.meta.get("item_ids") or range(items)
    rows: list[dict[str, Any]] = []
    for name, place in zip(map(str, clients), clients.positions.tolist(), strict=True):
        scores = tasks_in(data.meta)[0].in_units(scores_of(models(name), data, items))
        left = np.setdiff1d(np.arange(items), taken(data, np.asarray(data.rows(place), np.int64)))
        best = left[np.argsort(-scores[left], kind="stable")][:n]
        rows += [
            {"client": name, "rank": rank, "item": names[item], "score": float(scores[item])}
            for rank, item in enumerate(best.tolist(), 1)
        ]
    return pa.Table.from_pylist(rows)


def items_of(data: FederatedData) -> int:
    """Return the number of items.

    Raises:
        DataError: the data have no column of them.
    """
    if "item" not in data.columns or isinstance(data.columns["item"], Ragged) or "items" not in data.meta:
        raise DataError(
            "These data cannot be ranked: wanted a column 'item', as of films, which a table names under [data], item = "
            "'COLUMN', and arrays with meta['items'], how many there are; the data have {columns}. For labels take fedkeep "
            "export RUN --all --out FOLDER, then fedkeep predict FOLDER --data FILE.",
            columns=sorted(name for name in data.columns if not name.startswith("_")),
        )
    return int(data.meta["items"])


def taken(data: FederatedData, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the items of rows, each once: of a question the right one."""
    return np.unique(right_items(data, rows))


def right_items(data: FederatedData, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the item of each row, (rows,): of a question the right one."""
    item = np.asarray(data.columns["item"])[rows]
    if item.ndim == 2:
        item = item[np.arange(len(rows)), np.asarray(data.columns["label"])[rows]]
    return item.astype(np.int64)


def check_ks(ks: Sequence[int], items: int) -> None:
    """Raise ConfigError unless lists have lengths from 1 to the number of items."""
    check_whole({f"ks[{place}]": k for place, k in enumerate(ks)})
    if not ks or min(ks) < 1 or max(ks) > items:
        raise ConfigError(
            "ks must be whole numbers from 1 to {items}, the number of items; got {ks}.",
            items=items,
            ks=list(ks),
        )


def asked_of(
    data: FederatedData, client: int, split: str, liked: float | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the items that a client took in a split and not before, and those that it had before."""
    seen, rows = seen_by(data, client, split), np.asarray(data.rows(client, split), np.int64)
    if liked is not None:
        label = np.asarray(data.columns["label"])[rows].astype(np.float64)
        rows = rows[tasks_in(data.meta)[0].in_units(label) >= liked - ROUNDING]
    return np.setdiff1d(taken(data, rows), seen), seen


class Popular(nn.Module):
    """Scores an item by how many training examples of all clients have it: the reference that learns nothing."""

    def __init__(self, data: FederatedData) -> None:
        super().__init__()
        item = right_items(data, data.split_rows("train"))
        self.register_buffer("counts", torch.from_numpy(np.bincount(item, minlength=items_of(data))))

    def forward(self, item: Tensor) -> Tensor:
        """Return counts, shaped as the items."""
        found: Tensor = self.get_buffer("counts")[item]
        return found


def seen_by(data: FederatedData, client: int, split: str) -> NDArray[np.int64]:
    """Return the items that a client had before a split is asked for."""
    before = ("train", "valid") if split == "test" else ("train",)
    return taken(data, np.concatenate([np.asarray(data.rows(client, s), np.int64) for s in before]))


def scores_of(model: nn.Module, data: FederatedData, items: int) -> NDArray[np.float64]:
    """Return what a client's model gives each item, (items,)."""
    asks = tasks_in(data.meta)[0].kind.candidates
    item = torch.arange(items, device=place_of(model))
    batch = {"item": item[None] if asks else item}
    wants = takes_of(model)
    if missing := [name for name in wants.needed if name not in batch]:
        raise MethodError(
            "{model} wants {missing} beside an item to score it. A ranking of all items wants a model that scores an "
            "item alone.",
            model=wants.who,
            missing=missing,
        )
    with torch.no_grad():
        output = logits_of(model(**batch) if isinstance(model, PersonalModel) else model(**wants.of(batch)))
    if output.numel() != items:
        raise MethodError(
            "Wanted a number for each of {items} items; the model gave {shape}. Train a regression, a binary task or a "
            "ranking.",
            items=items,
            shape=tuple(output.shape),
        )
    found: NDArray[np.float64] = output.double().reshape(-1).cpu().numpy()
    return found


def places(scores: NDArray[np.float64], own: NDArray[np.int64], seen: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the place of each of a client's items among all but those seen, 1 for the best.

    Those with the same score stand before it, and so do those whose score is no number.
    """
    left = np.ones(len(scores), bool)
    left[seen] = False
    others = scores.copy()
    found = [int((left & ~(others < others[item])).sum()) for item in own.tolist()]
    return np.asarray(found, np.int64)


def judged(rank: NDArray[np.int64], ks: Sequence[int]) -> dict[str, float]:
    """Return a client's metrics from the places of its items."""
    found: dict[str, float] = {}
    for k in ks:
        inside = np.sort(rank[rank <= k])
        ideal = (1 / np.log2(1.0 + np.arange(1, min(k, len(rank)) + 1))).sum()
        found |= {
            f"hr@{k}": float(len(inside) > 0),
            f"recall@{k}": len(inside) / len(rank),
            f"ndcg@{k}": float((1 / np.log2(1.0 + inside)).sum() / ideal),
        }
    return found | {"mrr": float(1 / rank.min())}
