"""From ratings to a ranking: which of some items did the user take? Leave-one-out, with items drawn against each.

Training knows nothing of what is left out. So the items that are drawn against a training example are those without a
training rating of this user: the test item may be among them. Were it never, a user's vector would learn which items
it had not seen as a wrong answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedkeep.core.errors import DataError
from fedkeep.core.seeds import numpy_generator
from fedkeep.data.federated import FederatedData
from fedkeep.tasks.ranking import TOP

LEAST = 3  # items: of a user with fewer none is left out


def leave_one_out(data: FederatedData, against: int = 99, seed: int = 0) -> FederatedData:
    """Make each rating a question: the item that was rated, among others: for validation and test among items that this
    user never rated, for training among those without a training rating.

    A user's last rating is the test example, the one before it the validation example; the others are for training
    (He et al., WWW 2017, §4.1, which has no validation example). Ratings at the same time go by the item's number.
    A user with ratings of fewer than three items only trains. The right item stands at a random place.

    Of an item that a user rated several times, what is left out is the last rating: the test item is that of the last
    rating of all, the validation item that of the last rating of another item. Earlier ratings of these two are
    dropped, so that no user trains on what is asked. Repeated ratings of other items stay, for training.

    Args:
        data: ratings, with columns ``item`` (int) and ``time``, and ``meta["items"]``.
        against: items drawn against each, at least 10, as the first ten of any fewer hold the right one; without
            repetition for validation and test, with it for training.
        seed: of the draws, which depend on a user's id and not on other users.

    Returns:
        Data of the task ``"ranking"``: ``item`` (examples, 1 + against), and ``label``, the right one's place. What was
        opted out stays so. ``meta["source"]`` has the sha256 of the questions too.

    Raises:
        DataError: a column or the number of items is missing, an item is out of its range, ``against`` is below 10, or
            a user left too few.
    """
    missing = [name for name in ("item", "time") if name not in data.columns]
    if missing or "items" not in data.meta:
        raise DataError(
            "A ranking wants columns 'item' and 'time', and meta['items'], the number of items; the "
            "columns {missing} are missing, meta['items'] is {items}.",
            missing=missing,
            items=data.meta.get("items"),
        )
    if against < TOP:
        raise DataError(
            "A ranking is judged by whether the right item is among the first {least}, which says nothing "
            "among so few. against must be at least {least}; got {got}.",
            least=TOP,
            got=against,
        )
    items = int(data.meta["items"])
    item, time = np.asarray(data.columns["item"]), np.asarray(data.columns["time"])
    if len(item) and not (item.min() >= 0 and item.max() < items):
        raise DataError(
            "Wanted items from 0 to {items}; got {got} to {largest}.",
            items=items - 1,
            got=item.min(),
            largest=item.max(),
        )
    owner = data.clients_of(np.arange(len(item)))
    order = np.lexsort((item, time, owner))
    starts = np.searchsorted(owner[order], np.arange(len(data) + 1))
    parts: list[np.ndarray[Any, Any]] = []
    labels: list[np.ndarray[Any, Any]] = []
    split: list[str] = []
    kept: list[np.ndarray[Any, Any]] = []
    for client, name in enumerate(data.ids):
        rows = order[starts[client] : starts[client + 1]]
        left = 2 if len(np.unique(item[rows])) >= LEAST else 0
        kept.append(_asked(item, rows) if left else rows)
        own = item[kept[-1]]
        trained, every = np.unique(own[: len(own) - left]), np.unique(own)
        if items - len(every) < against:
            raise DataError(
                "Client {name!r} left {left} of {of} items, too few to draw {against}. Lower against.",
                name=name,
                left=items - len(every),
                of=items,
                against=against,
            )
        rng = numpy_generator(seed, "leave_one_out", name)
        drawn = _others(trained, rng.integers(items - len(trained), size=(len(own), against)))
        for row in range(len(own) - left, len(own)):
            drawn[row] = _others(every, rng.choice(items - len(every), against, replace=False))
        label = rng.integers(against + 1, size=len(own))
        whole = np.concatenate([drawn[:, :1], drawn], 1)  # the first column makes room
        place = np.arange(against + 1)[None]
        whole = np.where(place == label[:, None], own[:, None], whole)
        whole[:, 0] = np.where(label == 0, own, drawn[np.arange(len(own)), np.maximum(label - 1, 0)])
        parts.append(whole.astype(np.int32))
        labels.append(label)
        split += ["train"] * (len(own) - left) + (["valid", "test"] if left else [])
    columns = {"item": np.concatenate(parts), "label": np.concatenate(labels)}
    known = ("items", "item_ids")
    return FederatedData.from_columns(
        client=[name for name, rows in zip(data.ids, kept, strict=True) for _ in rows],
        columns=columns
        | {
            name: np.asarray(column)[np.concatenate(kept)]
            for name, column in data.columns.items()
            if name == "opted_in"
        },
        split=split,
        meta={name: data.meta[name] for name in known if name in data.meta}
        | {"name": f"{data.meta.get('name', 'data')}-ranking", "task": "ranking", "classes": against + 1}
        | {"source": {**data.meta.get("source", {}), "questions": _digest(columns)}},
    )


def _asked(item: np.ndarray[Any, Any], rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a user's ratings in their order, those to validate and to test last, without others of these two items."""
    own = item[rows]
    valid = np.flatnonzero(own != own[-1])[-1]
    return np.concatenate([rows[(own != own[-1]) & (own != own[valid])], rows[[valid, -1]]])


def _others(
    taken: np.ndarray[Any, Any], places: np.ndarray[Any, np.dtype[np.int64]]
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the items at these places of all that are not taken, in ascending order, without a list of these.

    Below ``taken[k]``, the k-th of those taken, lie ``taken[k] − k`` others.
    """
    below = taken.astype(np.int64) - np.arange(len(taken))
    return places + np.searchsorted(below, places, side="right")


def _digest(columns: Mapping[str, np.ndarray[Any, Any]]) -> str:
    found = hashlib.sha256()
    for column in columns.values():
        found.update(np.ascontiguousarray(column, column.dtype.newbyteorder("<")).tobytes())
    return found.hexdigest()
