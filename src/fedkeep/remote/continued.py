"""The server's side of a run that continues an older one: it begins with what that run's server had last.

Its encoding is extended by what devices tell of their data now. Federated parameters are taken over by name, where shapes
and types agree; with the encoding they may have grown, old entries first. Nothing else is guessed. What the method, the
upload chain and the server's optimiser kept is reset. Devices do likewise with private states (``migration``), at
the versions of the older run's ledger. With differential privacy what the older run has charged counts on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedkeep.core.copying import copied
from fedkeep.core.errors import ConfigError, DataError, RunError, raising
from fedkeep.core.net import Net
from fedkeep.core.params import Params, under
from fedkeep.core.run_files import read_commit, read_info
from fedkeep.data.preparation import Encoding, Summary
from fedkeep.experiments.continuing import (
    Ancestor,
    Grown,
    charged_of,
    compared,
    enlarged,
    grown,
    growth_of,
    sizes_of,
    told,
)
from fedkeep.experiments.run_directory import RunDirectory
from fedkeep.methods import Method
from fedkeep.remote.client_ledger import Ledger, RunClients
from fedkeep.remote.events import Events
from fedkeep.remote.migration import OnChange
from fedkeep.store import Line, VersionLedger

ANEW = {
    "state": "The method's state on the server",
    "links": "The upload chain's state on the server",
    "optimizer": "The server optimiser's state",
}


@dataclass(frozen=True, kw_only=True)
class Older(Ancestor):
    """A run across machines that a new one continues.

    Attributes:
        versions: by client, the version that its server accepted last; clients that have default values are not in it.
        clients: the ids of all its clients.
        owners: by client, the key that first brought it, where the link knows keys.
        encoding: of its data, as JSON.
        values: what its server had after that round, see ``conductor.checkpoint``; None where the new run has finished
            rounds of its own, and goes on with those.
    """

    versions: Mapping[str, Line]
    clients: Sequence[str] = ()
    owners: Mapping[str, str] = field(default_factory=dict)
    encoding: Mapping[str, Any] = field(default_factory=dict)
    values: Params | None = None

    @classmethod
    def at(cls, folder: Path) -> Older:
        """Return what a run's folder holds; nothing in it is touched.

        Raises:
            RunError: there is no run across machines, it has finished no round, is in use or is damaged.
        """
        with closing(RunDirectory.open(folder, write=False)) as directory:
            info = directory.read_info()
            if "encoding" not in info:
                raise RunError(
                    "{folder} is a simulation, so no device keeps a state of it. Continue from a run across machines.",
                    folder=folder,
                )
            roster = RunClients.from_plain(info["roster"])
            ledger = VersionLedger(len(roster.ids))
            values = directory.recover(ledger)
            if values is None:
                raise RunError(
                    "{folder} has finished no round to continue from. Run it first, or begin a new run.",
                    folder=folder,
                )
            entries = Ledger(ledger, roster).entries(roster.ids)
            charged = charged_of(directory)
        before = info.get("began_from", {}).get("versions", {})  # at version 0 they keep what they began with
        versions = {client: entry for client, entry in entries.items() if entry.version or client in before}
        return cls(
            run=directory.id,
            round=directory.round,
            versions=versions,
            clients=list(roster.ids),
            owners=roster.owners,
            encoding=info["encoding"],
            charged=charged,
            values=values,
        )

    def plain(self) -> dict[str, Any]:
        """Return what the new run's ``run.json`` says of it."""
        versions = {client: version._asdict() for client, version in self.versions.items()}
        return {"run": self.run, "round": self.round, "versions": versions, "charged": self.charged}

    def extended(self, told: Summary) -> Encoding:
        """Return its encoding, extended by what devices tell of their data now.

        Raises:
            ConfigError: what is new cannot have a number; says why.
        """
        with raising(
            ConfigError,
            "continue_from: these data do not extend the encoding of the run {run}. {why} Give all devices "
            "columns and labels of the same kind as then, or begin a new run.",
            DataError,
            run=self.run,
        ):
            return encoding_from(self.encoding).extended(told)

    def grown(self, encoding: Encoding) -> Grown:
        """Return which sizes have grown in the new run's encoding."""
        return grown(sizes_of(encoding_from(self.encoding)), sizes_of(encoding))

    def tell_of(self, clients: Sequence[str], events: Events) -> None:
        """Note which clients of the new run are new, and which have left."""
        there, here = set(self.clients), set(clients)
        for text, some in (
            ("joined; they begin with default values", here - there),
            ("left; what they keep stays in the older run", there - here),
        ):
            if some:
                events.note("began", f"{len(some)} clients have {text}: {_some(some)}.")


def older_for(folder: Path | None, out: Path | None) -> Older | None:
    """Return what a run begins with.

    Args:
        folder: of the run that it continues; None: there is none.
        out: the new run's own folder if it has begun already; then it stays with what it began with.

    Raises:
        ConfigError: it began with another run.
        RunError: as for ``Older.at``.
    """
    if out is None:
        return None if folder is None else Older.at(folder)
    info = read_info(out)
    began = info.get("began_from")
    if (began is None) != (folder is None):
        said = "none" if began is None else f"the run {began['run']}"
        raise ConfigError(
            "continue_from: {out} began with {said}. Name the same, or another folder for a new run.",
            out=out,
            said=said,
        )
    if began is None or folder is None:
        return None
    if not read_commit(out, info).round:
        older = Older.at(folder)
        if older.plain() != began:
            raise ConfigError(
                "continue_from: {out} began with round {round} of the run {run}; {folder} is at "
                "round {older_round} of the run {older}. Restore that folder, or name another for a new run.",
                out=out,
                round=began["round"],
                run=began["run"],
                folder=folder,
                older_round=older.round,
                older=older.run,
            )
        return older
    versions = {client: Line(**version) for client, version in began["versions"].items()}
    return Older(run=began["run"], round=began["round"], versions=versions, charged=began.get("charged"))


def encoding_from(plain: Mapping[str, Any]) -> Encoding:
    """Return an encoding from its JSON."""
    return Encoding.from_json(json.dumps(plain))


def begun(
    net: Net,
    method: Method,
    older: Older,
    on_change: OnChange,
    events: Events,
    grown: Mapping[str, tuple[int, int]] = {},
) -> Net:
    """Return a net whose first values are the older run's, where they agree in name, shape and type.

    Args:
        net: of the new run.
        method: of the new run.
        older: with ``values``.
        on_change: about federated parameters that don't agree, are new, or are gone.
        events: a log of what begins with which values.
        grown: what has grown with the encoding, and parameters with it.

    Raises:
        ConfigError: something does not agree, and ``on_change`` is ``"refuse"``; names the first.
    """
    assert older.values is not None
    params, growth = under("params/", older.values), growth_of(grown)
    first = method.split.halves(net.module).federated(net.initial())
    same, changed = compared(params, first, growth)
    if changed and on_change == "refuse":
        name, more = next(iter(changed)), f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise ConfigError(
            "The federated parameters of the run {older} do not fit the new model: "
            "{name!r} is {got}{more}. Continue with the model they were made with, or let what "
            "changed begin with the model's own values: on_change = 'anew'.",
            older=older.run,
            name=name,
            got=changed[name],
            more=more,
        )
    if grown:
        events.note("began", f"The encoding of the run {older.run} is extended: {', '.join(told(grown))}.")
    events.note(
        "began", f"{len(same)} federated parameters begin with round {older.round} of the run {older.run}."
    )
    for name, change in changed.items():
        instead = "it begins with the model's own values" if name in first else "its values are not used"
        events.note("began", f"The federated parameter {name!r} is {change}: {instead}.")
    for part, what in ANEW.items():
        if names := under(f"{part}/", older.values):
            events.note(
                "began", f"{what} is not taken over, it starts from its initial values: {_some(names)}."
            )
    module = copied(net.module)
    taken = {name: enlarged(name, params[name], first[name], growth) for name in same}
    module.load_state_dict(taken, strict=False)
    return Net(module)


def _some(names: Any) -> str:
    """Return the first five names, sorted, and whether there are more."""
    first = sorted(names)
    return ", ".join(first[:5]) + (", …" if first[5:] else "")
