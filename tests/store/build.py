"""Small stores for the tests of this folder, rounds that they go through, and what stands in their files."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fedkeep.core.errors import StoreError
from fedkeep.core.params import Params
from fedkeep.remote.device_file import FileHeader, create, file_of
from fedkeep.remote.device_store import DeviceStore
from fedkeep.store import Default, LedgerLines, MemoryStore, Named, PrivateStore, SqliteStore, VersionLedger
from fedkeep.store.database import Database
from fedkeep.store.rows import RowFormat
from tests.tiny import files

CLIENTS = 7
INITIAL = {
    "user": torch.tensor([0.5, -1.5, 2.5]),
    "scalar": torch.tensor(3.0, dtype=torch.float64),
    "flag": torch.tensor([[True, False]]),
    "count": torch.tensor(4),
    "half": torch.ones(2, 2, dtype=torch.bfloat16),
}


IDS = [f"user-{k}" for k in range(CLIENTS)]
RUN = "a-run"


def sqlite(
    folder: Path, rule: Any = "model", ids: list[str] = IDS, initial: Params = INITIAL, **options: Any
) -> SqliteStore:
    return SqliteStore(folder, Default(initial, rule, seed=3), ids, **{"run": RUN, **options})


def device(
    folder: Path, rule: Any = "model", ids: list[str] = IDS, initial: Params = INITIAL, **options: Any
) -> DeviceStore:
    """Return the store of a device, whose file is made where there is none, unless it must be there (``create``)."""
    given = {"owner": "ann", "run": RUN, "create": True, "patience": 0.1, **options}
    owner, run = given.pop("owner"), given.pop("run")
    path = file_of(folder, run)
    if given.pop("create") and not path.exists():
        create(path, FileHeader(owner=owner, run=run, columns=RowFormat(initial).columns()))
    store = DeviceStore(folder, owner, run, Default(initial, rule, seed=3), ids, **given)
    store.open()
    return store


def values(number: int, clients: int) -> Params:
    draw = torch.Generator().manual_seed(number)
    return {
        "user": torch.randn(clients, 3, generator=draw),
        "scalar": torch.randn(clients, generator=draw, dtype=torch.float64),
        "flag": torch.randint(0, 2, (clients, 1, 2), generator=draw).bool(),
        "count": torch.randint(-(2**62), 2**62, (clients,), generator=draw),
        "half": torch.randn(clients, 2, 2, generator=draw).bfloat16(),
    }


def numbers(store: PrivateStore, clients: int = CLIENTS) -> dict[str, Any]:
    read = store.read(range(clients))
    assert {n: (v.dtype, tuple(v.shape[1:])) for n, v in read.items()} == {
        n: (v.dtype, tuple(v.shape)) for n, v in store.default.initial.items()
    }
    return {n: v.tolist() for n, v in read.items()} | {"seen": store.seen(range(clients))}


def of_round(round: int) -> tuple[list[int], Params]:
    """Return who takes part in a round, and what these write."""
    return [round % CLIENTS, (round + 3) % CLIENTS], values(round, 2)


def of_large_round(round: int) -> tuple[list[int], Params]:
    """Return the same of rounds in which every second client writes two pages."""
    clients = [c for c in range(CLIENTS) if (c + round) % 2]
    return clients, {"user": torch.full((len(clients), 1500), float(round))}


class Rounds(NamedTuple):
    """What a store is made for, and what happens to it in each round."""

    initial: Params
    of: Callable[[int], tuple[list[int], Params]]


SMALL = Rounds(INITIAL, of_round)
LARGE = Rounds({"user": torch.zeros(1500)}, of_large_round)  # 6,000 bytes: a row takes two pages


def stage(store: PrivateStore, clients: Sequence[int], params: Params, attempt: int) -> None:
    for k, client in enumerate(clients):
        store.stage(client, {n: v[k] for n, v in params.items()}, attempt, attempt)


def count(store: PrivateStore, clients: Sequence[int], params: Params, attempt: int) -> None:
    """Let values count that clients have staged in an attempt."""
    stage(store, clients, params, attempt)
    store.begin(lines(dict.fromkeys(clients, attempt)))


def lines(attempts: Mapping[int, int]) -> LedgerLines:
    """Return lines of a ledger, given clients' attempts."""
    ledger = VersionLedger(max(attempts, default=0) + 1)
    return ledger.accept(list(attempts), list(attempts.values()))


def lines_after(round: int, rounds: Rounds = SMALL) -> LedgerLines:
    """Return the ledger after a round."""
    ledger = VersionLedger(CLIENTS)
    for each in range(1, round + 1):
        clients, _ = rounds.of(each)
        ledger.accept(clients, [each] * len(clients))
    return ledger.seen()


@dataclass(frozen=True)
class Kind:
    """A store in a file: a simulation's, or a device's.

    Attributes:
        open: gives the store of a folder.
        file: the file's name.
        reads: whether it can be opened to be read only, so that nothing on the disk is touched.
        unreadable: what is said of a file that can't be read.
    """

    open: Callable[..., Any]
    file: str
    reads: bool
    unreadable: str

    @property
    def to_read(self) -> dict[str, bool]:
        """How it is opened so that nothing is touched, where it can be."""
        return {"write": False} if self.reads else {}

    def path(self, folder: Path) -> Path:
        return folder / self.file

    def log(self, folder: Path) -> Path:
        return folder / f"{self.file}-wal"

    def client(self, place: int) -> object:
        """Return how a client is named in the file, as SQL."""
        return place if self is FILE else f"'{IDS[place]}'"

    def database(self, store: Any) -> Database:
        found: Database = store._file.database
        return found

    def train(
        self, store: Any, round: int, rounds: Rounds = SMALL, *, best: int = 0, flush: bool = True
    ) -> None:
        """Let a round happen: a simulation's ledger names it before the flush, a device hears of it in the next round.

        So it does of the ``best`` round.
        """
        store.begin(lines_after(round - 1, rounds))
        if self is DEVICE and 0 < best < round:
            for client, line in lines_after(best, rounds).by_client().items():
                assert store.name(client, None, Named(best, line.version, line.attempt), round) == ""
        self.write(store, *rounds.of(round), round, flush=False)
        if self is FILE and best == round:
            store.mark()
        if flush:
            store.flush()

    def write(
        self, store: Any, clients: Sequence[int], params: Params, attempt: int, flush: bool = True
    ) -> None:
        """Make durable what clients have staged in an attempt, which counts already in a simulation."""
        stage(store, clients, params, attempt)
        if self is FILE:
            store.begin(lines(dict.fromkeys(clients, attempt)))
        if flush:
            store.flush()

    def at_best(self, folder: Path, round: int, best: int, rounds: Rounds) -> dict[str, Any]:
        """Return what counted after the best round, read after another; to a device a server may go back."""
        if self is DEVICE:
            return self.state(folder, best, rounds)
        store = sqlite(folder, initial=rounds.initial)
        store.begin(lines_after(round, rounds), lines_after(best, rounds))
        return numbers(store.marked())

    def trained(self, folder: Path, round: int, rounds: Rounds = SMALL) -> Any:
        """Return a store after so many rounds."""
        store = self.open(folder, initial=rounds.initial)
        for each in range(1, round + 1):
            self.train(store, each, rounds)
        return store

    def again(self, store: PrivateStore, round: int, rounds: Rounds = SMALL) -> None:
        """Go on after a flush that failed: a simulation flushes what counts, a device serves the message again."""
        if self is FILE:
            store.flush()
        else:
            self.train(store, round, rounds)

    def rest(self, store: Any) -> None:
        if self is FILE:
            store.rest()
        else:
            store.close()

    def at_rest(self, folder: Path, round: int, rounds: Rounds = SMALL) -> Path:
        """Return the folder of a store after so many rounds, that nobody has open."""
        self.rest(self.trained(folder, round, rounds))
        return folder

    def state(self, folder: Path, round: int, rounds: Rounds = SMALL, **options: Any) -> dict[str, Any]:
        """Return all values of the versions that counted after a round."""
        store = self.open(folder, initial=rounds.initial, **options)
        try:
            store.begin(lines_after(round, rounds))
            return numbers(store)
        finally:
            if self is DEVICE:
                store.close()

    def outcome(self, folder: Path, round: int, rounds: Rounds = SMALL, **options: Any) -> object:
        """Return the state, or ``"refused"``."""
        try:
            return self.state(folder, round, rounds, **options)
        except StoreError:
            return "refused"

    def sql(self, folder: Path, *statements: str) -> list[Any]:
        """Run statements on the file; return what the last one gives."""
        with closing(sqlite3.connect(self.path(folder), isolation_level=None)) as sql:
            return [sql.execute(text).fetchall() for text in statements][-1]

    def versions(self, folder: Path) -> list[tuple[Any, int]]:
        """Return client and attempt of all versions."""
        return [
            (c, a) for c, a in self.sql(folder, "SELECT client, attempt FROM kept ORDER BY client, attempt")
        ]


FILE = Kind(sqlite, "store.db", reads=True, unreadable="Cannot open the private store ")
DEVICE = Kind(
    device, f"{RUN}.db", reads=False, unreadable=f"The private state of the run '{RUN}' cannot be read: "
)
KINDS = pytest.mark.parametrize("kind", [pytest.param(FILE, id="file"), pytest.param(DEVICE, id="device")])


def expected(round: int, rounds: Rounds = SMALL) -> dict[str, Any]:
    """Return what each client has after a round."""
    store = MemoryStore(Default(rounds.initial, seed=3), IDS)
    for each in range(1, round + 1):
        count(store, *rounds.of(each), each)
    return numbers(store)


def killed(folder: Path) -> Path:
    """Return a copy of a store's folder: what a kill at this instant leaves."""
    copy = folder.with_name(f"{folder.name}-killed-{len(list(folder.parent.iterdir()))}")
    return shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.lock"))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def content_of(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files but a lock."""
    return files(folder, but=(f"{RUN}.lock",))


@contextmanager
def untouched(folder: Path) -> Iterator[None]:
    before = content_of(folder)
    yield
    assert content_of(folder) == before
