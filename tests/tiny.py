"""Tiny data sets and models for the tests, and a full disk."""

from __future__ import annotations

import errno
import json
import os
import random
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedkeep import FederatedData, Method, Run, Split, declare
from fedkeep.core.net import Net
from fedkeep.core.params import Params
from fedkeep.data import Ragged, TokenVocabulary
from fedkeep.engines import (
    ClientResult,
    ClientToTrain,
    Engine,
    Job,
    LocalDevice,
    RoundReport,
    Sequential,
    first_global,
    first_kept,
    run_round,
)
from fedkeep.engines.faults import Faults
from fedkeep.methods import RunningMean, Sent
from fedkeep.split import Upload
from fedkeep.store import Default, MemoryStore
from fedkeep.store.versions import NONCE_BITS


def parts(train: int, valid: int = 0, test: int = 0) -> list[str]:
    """Return the split names of one client's rows."""
    return ["train"] * train + ["valid"] * valid + ["test"] * test


def classes(
    counts: Sequence[int] = (5, 9, 3, 7, 4, 6),
    *,
    features: int = 3,
    labels: int = 3,
    valid: int = 2,
    test: int = 3,
    seed: int = 0,
    opted_in: bool = False,
    ids: Sequence[str] | None = None,
    kind: str = "f8",
) -> FederatedData:
    """Return clients with ``counts`` training examples each and labels that depend on features and client."""
    rng = np.random.default_rng(seed)
    names = list(ids) if ids is not None else [f"user-{c}" for c in range(len(counts))]
    owner, split = [], []
    for name, count in zip(names, counts, strict=True):
        rows = parts(count, valid, test)
        owner += [name] * len(rows)
        split += rows
    x = rng.standard_normal((len(owner), features)).astype(kind)
    own = np.array([names.index(name) for name in owner])
    label = (x.argmax(1) + own) % labels
    columns: dict[str, Any] = {"x": x, "label": label}
    if opted_in:
        columns["opted_in"] = rng.random(len(owner)) < 0.6
    return FederatedData.from_columns(owner, columns, split, meta={"task": "multiclass", "classes": labels})


def texts(
    counts: Sequence[int] = (4, 6, 3, 5),
    *,
    vocabulary: int = 12,
    labels: int = 3,
    valid: int = 1,
    test: int = 2,
    seed: int = 0,
) -> FederatedData:
    """Return clients with short texts of different lengths."""
    rng = np.random.default_rng(seed)
    owner, split = [], []
    for client, count in enumerate(counts):
        rows = parts(count, valid, test)
        owner += [f"user-{client}"] * len(rows)
        split += rows
    length = rng.integers(1, 9, len(owner))
    offsets = np.concatenate([[0], np.cumsum(length)])
    ids = rng.integers(1, vocabulary, int(offsets[-1]))
    columns: dict[str, Any] = {"text": Ragged(ids, offsets), "label": rng.integers(0, labels, len(owner))}
    return FederatedData.from_columns(owner, columns, split, meta={"task": "multiclass", "classes": labels})


def toy_reviews() -> FederatedData:
    """Return two clients with tokenised reviews; "a" has six different words, "b" eight."""
    texts = {
        "a": ["good tea", "bad tea", "good cup", "bad pot of tea"],
        "b": ["good film", "bad film", "good film of old", "bad book", "dull old film here"],
    }
    words = TokenVocabulary.from_texts(t for own in texts.values() for t in own)
    owner = [c for c, own in texts.items() for _ in own]
    label = [int(t.startswith("good")) for own in texts.values() for t in own]
    columns: dict[str, Any] = {
        "text": words.encode_all([t for own in texts.values() for t in own]),
        "label": label,
    }
    meta = {"task": "multiclass", "classes": 2, "vocabulary": words.to_dict()}
    return FederatedData.from_columns(owner, columns, ["train"] * len(owner), meta)


class Logits(nn.Module):
    """logits = W x + b + user, with values that are not zero."""

    def __init__(self, features: int = 3, labels: int = 3, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.linear = nn.Linear(features, labels)
            self.user = nn.Parameter(0.1 * torch.randn(labels))
        declare(self, per_example=("user",))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.user


class Unsaid(Logits):
    """The same, saying nothing of rows per example."""

    def __init__(self, features: int = 3, labels: int = 3, seed: int = 0) -> None:
        super().__init__(features, labels, seed)
        declare(self, per_example=())


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 2)
        self.head.weight = self.body.weight


class Scalar(nn.Module):
    """ŷ = w·x: one federated number."""

    def __init__(self, w: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x[:, 0]


class Noisy(nn.Module):
    """Batch statistics, dropout, and a private vector."""

    def __init__(self, features: int = 3, labels: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.norm = nn.BatchNorm1d(features)
            self.drop = nn.Dropout(dropout)
            self.linear = nn.Linear(features, labels)
            self.user = nn.Parameter(torch.zeros(labels))
        declare(self, per_example=("user",))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.drop(self.norm(x))) + self.user


def pairs(rows: dict[str, list[tuple[float, float]]], test: int = 0) -> FederatedData:
    """Return a regression data set of (x, y) pairs by client; the last ``test`` pairs of each are its test examples."""
    owner = [c for c, xy in rows.items() for _ in xy]
    split = [s for xy in rows.values() for s in parts(len(xy) - test, 0, test)]
    x = np.array([[x] for xy in rows.values() for x, _ in xy], "f8")
    y = np.array([y for xy in rows.values() for _, y in xy], "f8")
    return FederatedData.from_columns(owner, {"x": x, "label": y}, split, meta={"task": "regression"})


def job(model: nn.Module, method: Method, data: FederatedData, seed: int = 0, **options: Any) -> Job:
    """Return a job with a store in memory."""
    device = options.setdefault("device", Job.__init__.__defaults__[0])  # type: ignore[index]
    net = Net(model.to(device) if device == "cuda" else model)
    store = MemoryStore(Default(first_kept(method, net), method.client.keep.value, seed), data.ids)
    return Job(method, net, data, store, seed, **options)


class Rounds:
    """A server and the device of a job, round after round.

    Attributes:
        server: what the server has.
    """

    def __init__(self, work: Job, engine: Engine | None = None, faults: Faults = Faults()) -> None:
        self.work, self.faults = work, faults
        self.device = LocalDevice(work, engine or Sequential())
        self.server = first_global(work.method, work.net, work.data)

    def __call__(self, clients: Sequence[int], progress: float = 0.0) -> RoundReport:
        """Run a round with clients, by index."""
        ids = [str(self.work.data.ids[c]) for c in clients]
        server = self.server.but(progress=progress)
        self.server, report = run_round(
            self.work.method, self.device, server, ids, self.work.declared, self.faults
        )
        return report


def results(
    work: Job,
    clients: Sequence[int],
    engine: Engine | None = None,
    *,
    sent: Params | None = None,
    round: int = 0,
    progress: float = 0.0,
) -> list[ClientResult]:
    """Return what clients' training gives, from what a server sends in the first round or from ``sent``."""
    flat = (
        sent
        if sent is not None
        else Sent(
            params=(server := first_global(work.method, work.net, work.data)).params,
            state=server.state,
        ).flat
    )
    found = (engine or Sequential()).train(work, [ClientToTrain(c, flat) for c in clients], round, progress)
    return list(found)


def mean_of(uploads: Sequence[Upload], start: Params, missing_rows: str = "unchanged") -> Params:
    """Return the weighted mean of uploads, tables whole."""
    mean = RunningMean(start, None, missing_rows)
    for upload in uploads:
        mean.add("", upload)
    return mean.value().params


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Tell whether two sets of tensors have the same names and bits."""
    return a.keys() == b.keys() and all(bits(a[n]) == bits(b[n]) for n in a)


def bits(value: Tensor) -> bytes:
    """Return a tensor's bytes."""
    flat = value.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def threads_noted(monkeypatch: pytest.MonkeyPatch, place: Any, name: str) -> list[int]:
    """Return a list to which every call of a function adds the number of threads that torch computes with."""
    seen, function = [], getattr(place, name)

    def spy(*arguments: Any) -> Any:
        seen.append(torch.get_num_threads())
        return function(*arguments)

    monkeypatch.setattr(place, name, spy)
    return seen


def everyone(store: Any, clients: int) -> Params:
    """Return the private values of all clients."""
    return store.read(range(clients))


def on_server(run: Run) -> Params:
    """Return what a run's server has after the last round: parameters, and the method's state under ``server/NAME``."""
    return at_best(run.last)


def at_best(run: Run) -> Params:
    """Return the same of the round that the run's answer is of."""
    return Sent(params=run.server, state=run.state).flat


def files(folder: Path, *, but: tuple[str, ...] = ()) -> dict[str, bytes]:
    """Return the bytes of every file below a folder, by relative path."""
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name not in but
    }


def lasting(folder: Path) -> dict[str, bytes]:
    """Return all of a run's folder that the same run of the same id always leaves: all but times.

    Of the private states what is kept: a run that was stopped may have other pages of its file free.
    """
    found = files(
        folder, but=("run.json", "timings.jsonl", "ledger.jsonl", "lock", "commit.json", "store.db")
    )
    found["ledger.jsonl"] = ledger_in(folder / "ledger.jsonl")
    if (path := folder / "private" / "store.db").exists():
        found["private/store.db"] = kept_in(path)
    commit = json.loads((folder / "commit.json").read_text())
    kept = {key: value for key, value in commit.items() if key not in ("timings", "ledger", "seal")}
    kept["best"].pop("ledger")
    return found | {"commit.json": json.dumps(kept).encode()}


def kept_in(path: Path) -> bytes:
    """Return all versions in a store's file as text: whose, of which round, which bytes."""
    with closing(sqlite3.connect(path)) as sql:
        rows = sql.execute("SELECT client, attempt, row FROM kept ORDER BY client, attempt").fetchall()
        return repr([(client, attempt >> NONCE_BITS, row) for client, attempt, row in rows]).encode()


def ledger_in(path: Path) -> bytes:
    """Return a ledger's lines with rounds in the place of attempts, whose names are each process's own."""
    if not path.exists():
        return b""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return repr([(line["attempt"] >> NONCE_BITS, line["clients"]) for line in lines]).encode()


@contextmanager
def one_run_id() -> Iterator[None]:
    """Let every run that is begun have the same id, so that its files can be compared byte by byte."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedkeep.experiments.run_directory.new_run_id", lambda: "0" * 32)
        yield


def fill_disk(monkeypatch: pytest.MonkeyPatch, call: str = "fsync") -> None:
    """Let every flush (or rename) fail as on a full disk."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)


class Line(nn.Module):
    """ŷ = w·x + user; both begin at 0, and ``user`` is one example's own where it is private."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.user = nn.Parameter(torch.zeros((), dtype=torch.float64))
        declare(self, per_example=("user",))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x[:, 0] + self.user


class Slope(nn.Module):
    """ŷ = w·x; w begins at 1."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x[:, 0]


def private_split() -> Split:
    """Return the split of the tiny models: ``user`` is private."""
    return Split("user")


Array = NDArray[Any]


def users(numbers: Iterable[int]) -> list[str]:
    """Return the ids of clients by number, as ``classes`` names them."""
    return [f"user-{number}" for number in numbers]


class Parts(nn.Module):
    """A classifier of features."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.classifier = nn.Linear(2, 4), nn.Linear(4, 3)

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.encoder(x))

    def head(self, features: Tensor) -> Tensor:
        return self.classifier(features)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def run_by(engine: str) -> dict[str, Any]:
    """Return the settings of a run with one of the engines, or of centralised training."""
    return {"centralised": True} if engine == "centralised" else {"engine": engine}


def interrupt(*_: object, **__: object) -> NoReturn:
    """Stop as Ctrl-C does."""
    raise KeyboardInterrupt


def harmed(content: bytes, times: int) -> Iterator[bytes]:
    """Yield a file's content with one harm each: a flipped bit, zeroed bytes, or a cut, at a byte that is not zero."""
    draw = random.Random(0)  # noqa: S311
    held = [at for at in range(len(content)) if content[at]]
    for number in range(times):
        made, at = bytearray(content), draw.choice(held)
        if number % 3 == 0:
            made[at] ^= 1 << draw.randrange(8)
        elif number % 3 == 1:
            made[at : at + 64] = bytes(len(made[at : at + 64]))
        else:
            del made[at:]
        yield bytes(made)
