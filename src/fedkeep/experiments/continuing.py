"""Next month: a run that goes on from another one, on data that have changed since.

Rounds go on where the older run ended: federated values, what the method, the upload chain and the server's optimiser
keep, and each client's private values, by id. Clients that are new begin with default values; what those keep who are
gone stays in the older run. An example that the older run had stays in the part in which it was, so none that was once
in test trains. Where nothing has changed the rounds are those, to the bit, of one run that was never cut.

Labels and items may have been added. Tensors then grow at their end by as many rows: the old ones keep their values, and
the new ones begin with the model's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedkeep.core.errors import ConfigError, RunError, raising, warn
from fedkeep.core.files import layout
from fedkeep.core.params import Params, row
from fedkeep.core.run_files import read_info
from fedkeep.data import FederatedData
from fedkeep.data.alike import respelled
from fedkeep.data.preparation import Encoding
from fedkeep.data.seen import Seen
from fedkeep.experiments.conductor import checkpoint
from fedkeep.experiments.environment import code_of
from fedkeep.experiments.run_directory import RunDirectory
from fedkeep.methods import Global
from fedkeep.privacy import BudgetLedger, BudgetTerms, Release
from fedkeep.privacy.budget_ledger import FILE as LEDGER
from fedkeep.privacy.budget_ledger import marks
from fedkeep.report.wording import count
from fedkeep.store import PrivateStore, SqliteStore, VersionLedger
from fedkeep.store.versions import NONCE_BITS

if TYPE_CHECKING:
    from fedkeep.experiments.run import Run

ENCODING = "encoding.json"
"""In a run's folder: how its data were turned into numbers."""
SIZES = {"classes": ("class", "classes"), "items": ("item", "items"), "vocabulary": ("word", "words")}
"""What of a data set's ``meta`` may grow, and what one and several are called."""
CHUNK = 1024
"""Clients whose private values are taken over at a time."""


@dataclass(frozen=True, kw_only=True)
class Ancestor:
    """A run that another one goes on from.

    Attributes:
        run: its id, or "memory".
        round: its last finished round.
        charged: what it and those before it have charged, rate, noise and rounds of each kind; None: it has no noise
            that protects.
    """

    run: str
    round: int
    charged: Sequence[Sequence[float]] | None = None

    def carried(self, terms: BudgetTerms) -> BudgetTerms:
        """Return what the new run's rounds cost, after those that were charged before.

        Raises:
            ConfigError: the older run has no differential privacy, so no ε holds for what it released.
        """
        if self.charged is None:
            raise ConfigError(
                "continue_from: the run {run} has no differential privacy, or noise from a seed, so no ε holds for "
                "what it released, nor for a run that continues it. Continue one that has, or begin a new run.",
                run=self.run,
            )
        kinds = ((Release(rate=rate, noise=noise), int(count)) for rate, noise, count in self.charged)
        return replace(terms, carried=tuple(kinds))


@dataclass(frozen=True, kw_only=True)
class Origin(Ancestor):
    """Where a run went on from, as its ``run.json`` says; ``told``: in words, what has changed since."""

    told: str = ""

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Origin | None:
        """Return what ``run.json`` says of it; None: the run began by itself."""
        found = info.get("continues")
        return None if found is None else cls(**found)


@dataclass(frozen=True, kw_only=True)
class Before(Ancestor):
    """A run of this machine that another one goes on from, with all that it hands over.

    Attributes:
        state: what its server had, see ``conductor.checkpoint``.
        private: what its clients keep, for the clients of ``seen``.
        seen: its examples and clients.
        sizes: of its data, those of ``SIZES`` that are known.
        code: hashes of its model's classes, see ``environment.code_of``.
    """

    state: Params
    private: PrivateStore
    seen: Seen
    sizes: Mapping[str, int]
    code: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Run) -> Before:
        """Return what a run in this process has.

        Raises:
            RunError: it has finished no round.
        """
        run = run.last
        folder = run.folder
        if not run.round:
            raise RunError("continue_from: the run has finished no round. Begin a new one.")
        return cls(
            run="memory" if folder is None else str(read_info(folder)["run"]),
            round=run.round,
            state=checkpoint(run.whole),
            private=run.private,
            seen=Seen.of(run.data),
            sizes=sizes_of(run.data),
            charged=None if folder is None else charged_in(folder),
            code=code_of(run.net.module),
        )

    @classmethod
    def at(cls, folder: Path) -> Before:
        """Return what a run's folder holds; its data need not be there any more, and nothing in it is touched.

        Raises:
            RunError: there is no run of one machine, it has finished no round, is in use or is damaged.
        """
        with closing(RunDirectory.open(folder, write=False)) as directory:
            info = directory.read_info()
            if "seen" not in info:
                raise RunError(
                    "{folder} is a federation's run: what its clients keep is on devices. Continue it there: "
                    "continue_from in the project's [run].",
                    folder=folder,
                )
            seen = Seen.read(folder, info["seen"])
            versions = VersionLedger(len(seen.ids))
            store = SqliteStore.there(folder / "private", seen.ids, directory.id)
            state = directory.recover(versions, store)
            if state is None:
                raise RunError(
                    "{folder} has finished no round to continue from. Run it first.", folder=folder
                )
            charged = charged_of(directory)
        return cls(
            run=directory.id,
            round=directory.round,
            state=state,
            private=store,
            seen=seen,
            sizes=info["data"]["sizes"],
            charged=charged,
            code=info.get("code") or {},
        )

    def origin(self, data: FederatedData) -> Origin:
        """Return what the new run's ``run.json`` says of this one; ids that changed their spelling are warned of."""
        there, here = set(self.seen.ids), set(map(str, data.ids))
        new, gone = sorted(here - there), sorted(there - here)
        for name, other in respelled(new, gone):
            warn(
                f"The client {name!r} is new and {other!r} is gone. Where they are the same, write the id as before: "
                f"it begins with default values now."
            )
        known = self.seen.among(data)
        parts = [
            f"{data.examples - known:,} new examples, and {known:,} that stay in the parts they were in",
            *[count(len(some), f"{what} client") for some, what in ((new, "new"), (gone, "gone")) if some],
            *told(self.grown(data)),
        ]
        return Origin(run=self.run, round=self.round, told="; ".join(parts), charged=self.charged)

    def grown(self, data: FederatedData) -> Grown:
        """Return which sizes have grown.

        Raises:
            ConfigError: one has shrunk.
        """
        return grown(self.sizes, sizes_of(data))

    def server(self, first: Global, data: FederatedData) -> Params:
        """Return the state for the new run's server, each tensor as large as there.

        Args:
            first: the new run's server before its first round.
            data: the new run's.

        Raises:
            ConfigError: there are others, or one differs otherwise than by what was added to the data.
        """
        like = checkpoint(first)
        growth = growth_of(self.grown(data))
        found = {name: resized(name, value, like, growth) for name, value in self.state.items()}
        wanted, there = (
            {n: v for n, v in of.items() if n.startswith(("params/", "state/"))} for of in (like, found)
        )
        if layout(wanted) != layout(there):
            raise misfit_of(wanted, there)
        return found

    def hand_over(self, store: PrivateStore, data: FederatedData, versions: VersionLedger) -> None:
        """Let clients of the new run keep what they kept in this one."""
        growth = growth_of(self.grown(data))
        places = {name: place for place, name in enumerate(self.seen.ids)}
        pairs = [(now, places[name]) for now, name in enumerate(map(str, data.ids)) if name in places]
        kept = [
            pair for pair, there in zip(pairs, self.private.seen([p for _, p in pairs]), strict=True) if there
        ]
        attempt = self.round << NONCE_BITS
        for start in range(0, len(kept), CHUNK):
            some = kept[start : start + CHUNK]
            values = self.private.read([place for _, place in some])
            for number, (client, _) in enumerate(some):
                own = row(values, number)
                if own.keys() != store.default.initial.keys():
                    raise misfit_of(store.default.initial, own)
                default = store.default(data.ids[client])
                wider = {name: enlarged(name, value, default[name], growth) for name, value in own.items()}
                store.stage(client, wider, attempt, self.round)
            clients = [client for client, _ in some]
            store.begin(versions.accept(clients, [attempt] * len(clients)))


Grown = Mapping[str, tuple[int, int]]
"""By name, which of ``SIZES`` have grown, from and to what."""


def grown(was: Mapping[str, int], now: Mapping[str, int]) -> Grown:
    """Return which sizes have grown.

    Raises:
        ConfigError: one has shrunk.
    """
    found = {name: (size, now[name]) for name, size in was.items() if name in now and now[name] != size}
    for name, (size, less) in found.items():
        if less < size:
            raise ConfigError(
                "continue_from: the data have {less} {name}, and had {size}. Name all of them, e.g. in label_names.",
                less=less,
                name=name,
                size=size,
            )
    return found


def told(grown: Grown) -> list[str]:
    """Return what has grown, in words."""
    return [f"{now - was:,} new {SIZES[name][now - was > 1]}" for name, (was, now) in grown.items()]


def growth_of(grown: Grown) -> set[int]:
    """Return by how many entries an axis of a tensor may have grown."""
    return {now - was for was, now in grown.values()}


def sizes_of(data: FederatedData | Encoding) -> dict[str, int]:
    """Return the sizes of a data set, or of an encoding, that may grow."""
    found = {name: data.meta.get(name) for name in SIZES}
    whole = {n: v["size"] if isinstance(v, Mapping) else v for n, v in found.items()}
    return {name: int(value) for name, value in whole.items() if value is not None}


def resized(name: str, value: Tensor, like: Params, growth: set[int]) -> Tensor:
    """Return a tensor as large as the one of its name in ``like``: old entries first, the others as there.

    What an optimiser keeps of a parameter has that parameter's shape; its new entries are 0.
    """
    model = like.get(name)
    if model is None:
        of = next(
            (p for p in like if p.startswith("params/") and name.endswith("/" + p.removeprefix("params/"))),
            None,
        )
        model = (
            None
            if of is None or value.dim() != like[of].dim()
            else torch.zeros_like(like[of], dtype=value.dtype)
        )
    return value if model is None else enlarged(name, value, model, growth)


def may_grow(was: Sequence[int], now: Sequence[int], growth: set[int]) -> bool:
    """Tell whether a shape is another one, of which axes may have grown."""
    return len(was) == len(now) and {b - a for a, b in zip(was, now, strict=True)} <= {0, *growth}


def compared(was: Params, now: Params, growth: set[int]) -> tuple[list[str], dict[str, str]]:
    """Return the names of tensors that are as they were or have grown, and by name what has changed of others."""
    there, here = layout(was), layout(now)
    same = [
        name
        for name, value in now.items()
        if name in was and was[name].dtype == value.dtype and may_grow(was[name].shape, value.shape, growth)
    ]
    both = here.keys() & there.keys()
    return same, {
        name: f"{here[name]}, and was {there[name]}" if name in both else "new" if name in here else "gone"
        for name in {**here, **there}
        if name not in same
    }


def enlarged(name: str, value: Tensor, like: Tensor, growth: set[int]) -> Tensor:
    """Return ``like`` with its first entries of each axis those of ``value``.

    Raises:
        ConfigError: a shape or type differs otherwise than by a growth.
    """
    if value.dtype != like.dtype or not may_grow(value.shape, like.shape, growth):
        raise misfit_of({name: like}, {name: value})
    if value.shape == like.shape:
        return value
    made = like.detach().clone()
    made[tuple(slice(n) for n in value.shape)] = value.to(made.device)
    return made


def misfit_of(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> ConfigError:
    """Return what to say of a model that is another than the older run's."""
    ours, theirs = layout(wanted), layout(found)
    return ConfigError(
        "continue_from: the older run's values do not fit: wanted {wanted}, found {found}. Continue with the model and "
        "the method that it was made with.",
        wanted={n: v for n, v in ours.items() if theirs.get(n) != v},
        found={n: v for n, v in theirs.items() if ours.get(n) != v},
    )


def charged_in(folder: Path) -> list[list[float]] | None:
    """Return what the run of a folder has charged, as ``charged_of``."""
    with closing(RunDirectory.open(folder, write=False)) as directory:
        return charged_of(directory)


def charged_of(directory: RunDirectory) -> list[list[float]] | None:
    """Return what a run and those before it have charged; None: it has no noise that protects."""
    known = marks(directory.read_info(), directory.extra)
    if not known:
        return None
    ledger = BudgetLedger.read(directory.folder / LEDGER, directory.id, known)
    if ledger.terms.repeatable:
        return None
    return [[kind.rate, kind.noise, count] for kind, count in ledger.charged.items()]


def encoding_in(folder: Path) -> Encoding | None:
    """Return the encoding that a run's folder keeps; None: its data needed none.

    Raises:
        DataError: it is damaged.
        RunError: it is missing.
    """
    info = read_info(folder)
    if not info.get("data", {}).get("encoded"):
        return None
    path = folder / ENCODING
    with raising(RunError, "Cannot read {path}: {why}. Restore the run from a copy.", OSError, path=path):
        return Encoding.from_json(path.read_bytes(), str(path))
