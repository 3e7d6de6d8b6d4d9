"""What a run's server publishes for its devices, and a device's clients joined with it to models that are used there.

Federated values of one finished round, and nothing of any client: where all clients are sent the same, once; where a
method sends each something else (FedPAC, pFedHN, FedAMP), for the clients that were named.

As in a simulation the round is the best on ``valid``, or if that is asked the last. A device joins it with what each of
its clients kept after that very round, which it has as ``device_store`` says. Where it has not, as it is new, came from
a backup or missed messages, it uses the client's last values and says so (``Models.notes``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from fedkeep.core.errors import ConfigError, RunError
from fedkeep.core.files import check_tensors, layout, load_verified
from fedkeep.core.net import Net
from fedkeep.core.params import Params, is_state, under
from fedkeep.core.run_files import read_commit, read_info
from fedkeep.data.ids import SomeIds
from fedkeep.data.preparation import Encoding, Source
from fedkeep.engines import first_default, first_global
from fedkeep.engines.adapt import own_split
from fedkeep.engines.use import Predicted
from fedkeep.experiments.conductor import after_round, ordered
from fedkeep.experiments.config import parse_toml
from fedkeep.experiments.environment import check_device
from fedkeep.experiments.personalize import Exported, adapt_clients, export_models
from fedkeep.experiments.predicting import predict_table
from fedkeep.experiments.run import ALL, Run
from fedkeep.experiments.sources import build_source
from fedkeep.experiments.toml import to_toml
from fedkeep.methods import Method, Sent
from fedkeep.methods.base import forward
from fedkeep.remote import fingerprint
from fedkeep.remote.client_ledger import RunClients
from fedkeep.remote.device_file import AdaptedRow, DeviceFile, FileHeader, adapted_content, create, file_of
from fedkeep.remote.device_store import RolledBack, counted, stands
from fedkeep.remote.node_config import NodeConfig, experiment, read_node_config
from fedkeep.remote.own_data import encodable, of_clients, settled
from fedkeep.store import MemoryStore
from fedkeep.store.rows import RowFormat

ADAPT = "fedkeep device adapt NODE.toml"


@dataclass(frozen=True, kw_only=True)
class Published:
    """What a server has after a finished round, as far as its clients need it to predict and to adapt.

    Attributes:
        run, round: of which run, and after how many rounds.
        finished: how many rounds the run had finished.
        experiment: the configuration that devices build model and method from.
        encoding: how the data became numbers, as JSON.
        seed: what clients' first values and draws follow from.
        fingerprint: of the experiment's parts.
        rolled_back: what the server has taken back.
        sent: what a client is sent, by its id, or for all.
    """

    run: str
    round: int
    finished: int
    experiment: str
    encoding: Mapping[str, Any]
    seed: int
    fingerprint: Mapping[str, str]
    rolled_back: RolledBack
    sent: Mapping[str, Sent]

    @property
    def age(self) -> tuple[int, int]:
        """What ascends from one to the next of a run."""
        return len(self.rolled_back), self.finished


def published_of(folder: Path, clients: Sequence[str] = (), *, last: bool = False) -> Published:
    """Return what a server's run publishes: of its best round on ``valid``; where none was judged, of the last.

    Args:
        folder: the run's, which is only read.
        clients: for whom, where the method sends each client something else.
        last: of the last finished round in any case.

    Raises:
        RunError: there is no run across machines, no finished round, or it is damaged.
        ConfigError: clients are named where all are sent the same, or none where they are not; or there is none such.
    """
    info = read_info(folder)
    if "encoding" not in info:
        raise RunError(
            "{folder} is a simulation, not a run across machines: fedkeep export writes its models.",
            folder=folder,
        )
    commit = read_commit(folder, info)
    if not commit.round:
        raise RunError("{folder} has finished no round yet, so there is nothing to publish.", folder=folder)
    text, encoding, roster = str(info["config_text"]), info["encoding"], RunClients.from_plain(info["roster"])
    method, net = _built(text, encoding)
    first = first_global(method, net, roster)
    moment = commit.moment if last or not commit.best.server else commit.best
    path = folder / moment.server
    tensors = load_verified(path, moment.sha256)
    check_tensors(path, moment.tensors, layout(tensors), tensors)
    server = after_round(
        first.but(
            params=ordered(under("params/", tensors), first.params),
            state=ordered(under("state/", tensors), first.state),
        ),
        moment.round,
        int(info["rounds"]),
    )
    sent = {
        client: method.server.sent(server, client)
        for client in (roster.ids if method.server.send is not None else [ALL])
    }
    first_sent = next(iter(sent.values()))
    if all(_same(first_sent, other) for other in sent.values()):
        if clients:
            raise ConfigError(
                "{method!r} sends all clients the same: leave out --client.", method=method.name
            )
        sent = {ALL: first_sent}
    elif not clients:
        raise ConfigError(
            "{method!r} sends each client something else, which tells of the others' data. Write a file for each "
            "device, and name its clients: --client ID, which may be repeated.",
            method=method.name,
        )
    for client in clients:
        roster.index(client)
    return Published(
        run=str(info["run"]),
        round=moment.round,
        finished=commit.round,
        experiment=text,
        encoding=encoding,
        seed=int(info["seed"]),
        fingerprint=fingerprint.parts(net.module, method, net.initial(), encoding),
        rolled_back=info.get("rolled_back", ()),
        sent={client: sent[client] for client in clients or [ALL]},
    )


def _same(one: Sent, other: Sent) -> bool:
    pairs = zip(one.flat.values(), other.flat.values(), strict=True)
    return one is other or all(a is b or torch.equal(a, b) for a, b in pairs)


def _built(text: str, encoding: Mapping[str, Any]) -> tuple[Method, Net]:
    model, method = experiment(text, encoding)
    method = method.resolved(model)
    return method, Net(method.made_for(model))


class Models:
    """The models of a device's clients: what was published, joined with what the device keeps of them.

    Args:
        config: the device's configuration.
        published: what the server has.

    Attributes:
        run: the device's clients as a run, which evaluates, predicts and exports; ``of`` has it with adapted ones.
        text: the configuration that it follows, with the device's own table of data.
        newest: the last round of which the device has had word or values.
        notes: by client whose values are not surely those of the round, what is used in their place.

    Raises:
        ConfigError, DataError: the configuration or the data are wrong, or fedkeep here makes another experiment of it.
        RunError: what was published is older than what the device keeps.
        StoreError: what the device keeps is damaged, of another owner, or in use.
    """

    def __init__(self, config: Path, published: Published) -> None:
        self.published, settings = published, read_node_config(config)
        device = settings.device
        check_device(device.compute)
        self.folder, self.owner = config.parent / device.folder, device.owner
        method, net = _built(published.experiment, published.encoding)
        net = Net(net.module.to(device.compute))
        if names := _differing(method, net, published):
            raise ConfigError(
                "The experiment on this device is not the one that was published; what differs: {names}. Install the "
                "same versions of all packages.",
                names=names,
            )
        self.default = first_default(method, net, published.seed)
        source: Source = build_source(settings.data, settings.seed, config.parent)
        if device.clients:
            source = of_clients(source, device.clients, f"{config}: device.clients")
        data, self.unfit = encodable(source, Encoding.from_json(json.dumps(published.encoding)))
        self.adapted: dict[str, Params] = {}
        self.trained: dict[str, AdaptedRow] = {}
        """By client, the version that counted after the round, as what the client would adapt from."""
        self.notes: dict[str, str] = {}
        store, self.newest = MemoryStore(self.default, data.ids), 0
        if (path := file_of(self.folder, published.run)).exists():
            with closing(DeviceFile(path, self.owner, device.patience)) as file:
                if data.meta.get("divided_here"):
                    data, _, _ = settled(data, file.parts())
                net.opted_out = frozenset(file.about.opted_out)
                self._read(file, store, set(map(str, data.ids)))
        if self.newest > published.finished:
            raise RunError(
                "What was published is of {finished} rounds, and this device keeps values of round {newest}: "
                "it is older. Ask the server's owner for what it has now.",
                finished=published.finished,
                newest=self.newest,
            )
        self.text = _text(published.experiment, settings)
        first = next(iter(published.sent.values()))
        self.run = Run(
            net=net,
            method=method,
            data=data,
            server=first.params,
            state=first.state,
            private=store,
            engine="remote",
            rounds_per_epoch=1,
            clients=SomeIds(data.ids, np.arange(len(data))),
            held_out=SomeIds(data.ids, np.arange(0)),
            round=published.round,
            device=device.compute,
            published=published.sent,
        )

    def _read(self, file: DeviceFile, store: MemoryStore, clients: set[str]) -> None:
        taken = self.published.rolled_back
        for name in file.clients() & clients:
            heard = [(v.round + 1, v.attempt) for v in file.versions(name) if v.accepted and v.version]
            heard += [(word.named.round, word.message) for word in file.named(name).values()]
            self.newest = max([self.newest, *(one[0] for one in heard if stands(*one, taken))])
            version, note = counted(file, name, self.published.round, taken)
            if note:
                self.notes[name] = note
            if version is not None:
                values = {n: v.unsqueeze(0) for n, v in file.values(version).items()}
                store.write([store.ids.index(name)], values)
                self.trained[name] = AdaptedRow(
                    name, version.version, 0, version.attempt, self.published.round
                )
        for name, found in file.adapted().items():
            now = found.round == self.published.round and stands(found.round, found.attempt, taken)
            if name in clients and now:
                self.adapted[name] = file.adapted_values(found)

    @property
    def waits(self) -> bool:
        """Whether clients have models of their own only after adapting."""
        method, names = self.run.method, sorted(self.run.net.trainable())
        split = own_split(method)
        later = {n for p in method.adapt.phases for n in p.trained_names(split, names) if split.is_private(n)}
        rounds = {n for p in method.client.phases for n in p.trained_names(method.split, names)}
        less = not later <= set(filter(method.split.is_private, rounds))
        return method.adapt.everyone or (ALL in self.published.sent and less)

    def of(self, clients: Iterable[str] | None = None, *, adapted: bool = False) -> Run:
        """Return a run of some clients, with what is each one's own.

        Args:
            clients: their ids; None: all of the device.
            adapted: what they adapted to, also where rounds have trained what is their own.

        Raises:
            DataError: there is no such client.
            ConfigError: nothing has trained what is to be a client's own: it would pass for the client's model.
        """
        chosen = self.run.members(clients)
        names = [str(name) for name in chosen]
        use = [name for name in names if adapted or self._must_adapt(name)]
        for name in use:
            if name not in self.adapted:
                raise ConfigError(
                    "Client {name!r} has no values of its own for round {round} of the run "
                    "{run}: {why} Let it adapt: {adapt}.",
                    name=name,
                    round=self.published.round,
                    run=self.published.run,
                    why=self._why(name),
                    adapt=ADAPT,
                )
        found = replace(self.run, clients=chosen)
        found.fitted = {name: self.adapted[name] for name in use}
        return found

    def _must_adapt(self, client: str) -> bool:
        """Whether nothing but adapting gives a client what is its own."""
        return self.waits or (self._has_own and client not in self.trained)

    def _is_ready(self, client: str) -> bool:
        return client in self.adapted or not self._must_adapt(client)

    @property
    def _has_own(self) -> bool:
        """Whether anything of a client's own says how its model predicts."""
        method, halves = self.run.method, self.run.method.split.halves(self.run.net.module)
        state = any(map(is_state, self.default.initial))
        return bool(halves.private_names) or (state and method.predict is not forward)

    def _why(self, client: str) -> str:
        if self.waits:
            return f"{self.run.method.name!r} gives clients models of their own by adapting after the rounds."
        return "it has adapted to none." if client in self.trained else "no round has trained it."

    def predict(
        self,
        file: Path,
        *,
        client: str | None = None,
        user: str | None = None,
        shared: bool = False,
        adapted: bool = False,
    ) -> list[Predicted]:
        """Return predictions for a table's rows, as ``predict_table`` does; on a device of one client, by that one.

        Raises:
            FedkeepError: as for ``predict_table`` and ``of``.
        """
        if client is None and user is None and not shared:
            client = self.only
        with self.opened(None if client is None else [client], adapted=adapted) as exported:
            return predict_table(exported, file, client=client, user=user, shared=shared)

    @property
    def only(self) -> str | None:
        """The client of a device that has one; else None."""
        return str(self.run.data.ids[0]) if len(self.run.data) == 1 else None

    @contextmanager
    def opened(self, clients: Iterable[str] | None = None, *, adapted: bool = False) -> Iterator[Exported]:
        """Yield the models that predict here, until the block is left; without ``clients`` of all who have one.

        Raises:
            FedkeepError: as for ``of``.
        """
        known = [name for name in map(str, self.run.data.ids) if adapted or self._is_ready(name)]
        with TemporaryDirectory(prefix="fedkeep-") as place:  # for its owner alone
            self.export(Path(place) / "models", known if clients is None else clients, adapted=adapted)
            exported = Exported(Path(place) / "models")
            exported.name, exported.advice = "This device", f"Let it adapt: {ADAPT}"
            yield exported

    def export(
        self,
        out: Path,
        clients: Iterable[str] | None = None,
        *,
        adapted: bool = False,
        onnx: bool = False,
        peft: bool = False,
    ) -> list[str]:
        """Write clients' whole models into a new folder, as ``export_models`` does; only its owner may enter it.

        Raises:
            FedkeepError: as for ``export_models`` and ``of``.
        """
        chosen = self.of(clients, adapted=adapted)
        before = os.umask(0o077)
        try:
            return export_models(chosen, out, list(chosen.clients), onnx=onnx, peft=peft, config=self.text)
        finally:
            os.umask(before)

    def adapt(self, clients: Iterable[str] | None = None) -> list[str]:
        """Let clients adapt to what was published, on all of their training examples, and keep the result here.

        Values equal those of a simulation, and of an order of the server, to the bit.

        Returns:
            Their ids.

        Raises:
            MethodError: the method has no adaptation.
            StoreError: the result can't be kept; nothing has changed.
        """
        found = adapt_clients(self.run, clients)
        path = file_of(self.folder, self.published.run)
        if not path.exists():  # a device that joins after training
            columns = RowFormat(self.default.initial).columns()
            about = FileHeader(owner=self.owner, run=self.published.run, columns=columns)
            create(path, about)
        done = [str(client) for client in found.clients]
        with closing(DeviceFile(path, self.owner)) as file:
            before, rows = file.adapted(), []
            least = max((first for _, first in self.published.rolled_back), default=0)
            for name in done:
                attempt = max(before[name].attempt, least) if name in before else least
                made = self.trained.get(name, AdaptedRow(name, 0, 0, 0, self.published.round))
                values = {n: v.cpu() for n, v in found.own(name).items()}
                rows.append((made._replace(attempt=attempt), adapted_content(values, name)))
                self.adapted[name] = values
            with file.writing():
                for row in rows:
                    file.put_adapted(*row)
        return done


def _differing(method: Method, net: Net, published: Published) -> str:
    parts = fingerprint.parts(net.module, method, net.initial(), published.encoding)
    return fingerprint.differing(
        {**published.fingerprint, "code": ""}, {**parts, "code": ""}
    )  # fedkeep may be another version later


def _text(experiment: str, settings: NodeConfig) -> str:
    """Return the configuration of a device's models: what was signed, and the device's own table of data."""
    table = settings.data.model_dump(mode="json", exclude_unset=True)
    return to_toml({**parse_toml(experiment, "The published configuration"), "data": table})
