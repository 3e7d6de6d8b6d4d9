"""A device of a federation: it builds the experiment that the server names, keeps its clients' states, and serves.

    hello     -> here      whose data it has, and the summary that it is asked for
    prepare   -> prepared  a step of the secure sum of summaries' numbers, where these leave in sums alone
    encoding  -> fits      it has built the experiment, and compared it with the server's part by part
    work      -> answers   begin at the versions that the server names, judge, train, stage durably, answer

Nothing that it answers holds a private value, an example or a path of the device. What is wrong is said in an answer
``refused``, or as a client's fault; the text of an error that may hold data stays on the device (``tell``).

A message may come twice, and may be served by a process that has heard none before it: what was agreed on is kept with
the states.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from torch import nn

from fedkeep.core.errors import ConfigError, MethodError, SecureSumError, SplitError, UploadError, raising
from fedkeep.core.files import private_folder
from fedkeep.core.net import Net
from fedkeep.core.packet import Packet
from fedkeep.core.params import Params, nbytes
from fedkeep.data import SPLITS
from fedkeep.data.preparation import Encoding, RuleError, Rules, Source, Summary
from fedkeep.engines import Engine, Job, Leaves, Sequential, first_default, job_of
from fedkeep.engines.judge import ExamplesOf, counts_of
from fedkeep.engines.rehearsal import resolve
from fedkeep.methods import Method, SecureMean
from fedkeep.remote import fingerprint
from fedkeep.remote.agreement import (
    RefusalError,
    agreement,
    differing,
    fault_of,
    is_ours,
    other_fedkeep,
    place_of,
    refusal,
    told_counts,
)
from fedkeep.remote.device_file import DeviceFile, FileHeader, create, file_of, locked, packed
from fedkeep.remote.device_store import DeviceStore, OnMissing
from fedkeep.remote.device_tally import Limits, Most, SignedWords, Tally, asked_of
from fedkeep.remote.masking import Masking, Preparing, about_data
from fedkeep.remote.messages import (
    LEAVES,
    Encode,
    EncodingFits,
    Hello,
    Here,
    Partition,
    Prepare,
    Prepared,
    Work,
    check_work,
    message_of,
    packet_of,
)
from fedkeep.remote.migration import OnChange, migrated, opted_out
from fedkeep.remote.own_data import encodable, settled
from fedkeep.remote.serving import serve
from fedkeep.remote.told import lanes_told
from fedkeep.store import Line
from fedkeep.store.rows import RowFormat
from fedkeep.store.version_file import Version

Experiment = Callable[[str, Mapping[str, Any]], tuple[nn.Module, Method]]
"""Makes model and method of a configuration's text and an encoding as JSON; server and device call the same."""


MOST_RUNS = 2
"""Runs that are held in memory, each with its data and its model; an order of another builds it anew."""


@dataclass(frozen=True, kw_only=True)
class OwnerTerms:
    """What a device's owner lays down.

    Attributes:
        owner: whose device it is; states of another owner are refused.
        history: accepted versions that are kept beside the last, so that a server that goes back can be followed.
        on_missing: about a client whose version is not there, as its file came from a backup: ``"refuse"``, let it begin
            with the ``"older"`` one that is, or ``"anew"``.
        on_change: about private values that a run which continues another does not find as they were: likewise.
        leaves: the most of judging that may leave.
        judge_adapted: whether models that clients have adapted may be judged for the server. What comes of it tells of all
            training examples, opted-out ones included, and no device knows whether what it adapts is the run's own model.
        judge_opted_out: whether models are judged on opted-out examples too. Else these are in no sum that leaves, and no
            number of examples that is told counts them.
        least_examples: the fewest that a sum over judged examples, or a difference between such sums of a run, may be of; it
            does not leave else. More than 1: sums alone leave, whatever ``leaves`` says.
        trainings, judgings, adaptations: the most of each that a client does in a run, below what the signed project says
            (``tally.Limits``).
        clients_a_word: a counted word is told only if so many clients of this device have it, whatever the server says.
        secure: whether uploads, and numbers that tell of the data, leave in secure sums alone; a run whose method has none
            is refused.
        simulated_noise: whether a server may have noise on uploads follow a seed; for tests alone.
        compute: where to compute, e.g. ``"cpu"``.
        patience: seconds to wait for another process that serves a message of the same run.
    """

    owner: Annotated[str, Field(min_length=1, max_length=200)]
    history: Annotated[int, Field(ge=0)] = 1
    on_missing: OnMissing = "refuse"
    on_change: OnChange = "refuse"
    leaves: Leaves = "sums"
    judge_adapted: bool = False
    judge_opted_out: bool = False
    least_examples: Annotated[int, Field(ge=1)] = 1
    trainings: Most = None
    judgings: Most = None
    adaptations: Most = None
    clients_a_word: Annotated[int, Field(ge=1)] = 2
    secure: bool = False
    simulated_noise: bool = False
    compute: str = "cpu"
    patience: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0

    @property
    def judges(self) -> ExamplesOf:
        """On which examples models are judged."""
        return "all" if self.judge_opted_out else "opted_in"


@dataclass
class Running:
    """A run as this device has built it; ``unfit`` are its clients whose data do not fit the encoding."""

    hello: Hello
    parts: Mapping[str, str]
    job: Job
    store: DeviceStore
    received: Params
    unfit: Sequence[str] = ()

    def masking(self, folder: Path) -> Masking | None:
        """Return what takes the steps of secure sums; None: the method has none."""
        reduce = self.job.method.server.reduce
        if not isinstance(reduce, SecureMean):
            return None
        return Masking(file_of(folder, self.hello.run), reduce.sums, self.job.method.split, self.job.declared)


class Node:
    """A device.

    Args:
        source: its clients' data.
        folder: where private states are kept.
        terms: what its owner lays down.
        experiment: makes model and method.
        engine: trains clients; one by one if none is given.
        tell: called with what happens here, and why something was refused, in full; it stays on the device.

    Attributes:
        signed: by the text of each experiment that may be trained here, what is signed beside it; None: any may be.
    """

    signed: Mapping[str, SignedWords] | None = None

    def __init__(
        self,
        source: Source,
        folder: Path,
        terms: OwnerTerms,
        experiment: Experiment,
        *,
        engine: Engine | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.source, self.folder, self.terms, self.experiment = source, folder, terms, experiment
        self.engine, self.tell = engine or Sequential(), tell
        self._runs: dict[str, Running] = {}
        self._told: tuple[Mapping[str, Any], Summary] | None = None
        self._turn = threading.Lock()

    @property
    def clients(self) -> Sequence[str]:
        """The ids of its clients."""
        return [str(client) for client in self.source.ids]

    def serve(self, packet: Packet) -> Packet:
        """Answer a message; never raises for what is in it, or for what is wrong on this device."""
        try:
            with self._turn:
                return self._served(packet)
        except Exception as error:  # noqa: BLE001  also a fault in a model or in this node
            return refusal(error, packet, self.tell)

    def _served(self, packet: Packet) -> Packet:
        kind = packet.header.get("kind")
        if kind == "hello":
            if fault := other_fedkeep(packet.header):  # its messages may have other fields
                raise RefusalError(fault)
            return packet_of(self._hello(message_of(packet, Hello)))
        if kind == "prepare":
            return packet_of(self._prepare(message_of(packet, Prepare)))
        if kind == "encoding":
            return packet_of(self._encoding(message_of(packet, Encode)))
        if kind == "work":
            return self._work(packet)
        raise UploadError("A message was refused: there is no kind {got!r}.", got=str(kind)[:20])

    def release(self) -> None:
        """Let go of all files until the next message, so that another process may serve it."""
        with self._turn:
            for running in self._runs.values():
                running.store.close()

    def close(self) -> None:
        """Let go of all files, and of what the engine holds."""
        with self._turn:
            for running in self._runs.values():
                running.store.close()
            self._runs = {}
            self.engine.close()

    def _hello(self, hello: Hello) -> Here:
        self._check(hello)
        told = self._summary(hello.summarise)
        blank = told.blank
        if self.terms.secure and hello.secure is None and told != blank:
            raise RefusalError(
                "This device tells of its data in secure sums alone (device.secure). Add a table [method.secure]."
            )
        summary = json.loads((told if hello.secure is None else blank).to_json())
        return Here(run=hello.run, clients=list(self.clients), summary=summary)

    def _summary(self, asked: Mapping[str, Any]) -> Summary:
        """Return what this device tells of its data by rules, as the server named them, and by its owner's."""
        if self._told is not None and self._told[0] == asked:
            return self._told[1]
        unused = "The rules of the summary cannot be used"
        with raising(RefusalError, "{unused}: {why}", TypeError, ConfigError, unused=unused):
            rules = Rules(**asked)
            here = max(rules.clients_a_word_here, self.terms.clients_a_word)
            rules = replace(rules, clients_a_word_here=here)
        # What else a reader says may hold data
        with raising(RefusalError, "{unused}: {why}", RuleError, unused=unused):
            told = self.source.summary(rules)
        self._told = dict(asked), told
        return told

    def _prepare(self, message: Prepare) -> Prepared:
        """Take a step of the secure sum over what devices tell of their data."""
        hello, ask = message.hello, message.ask
        self._check(hello)
        if hello.secure is None or hello.run != message.run:
            raise UploadError("A message was refused: its run sums nothing of devices' data securely.")
        if message.party not in self.clients:
            raise UploadError("A message was refused: it is for none of this device's clients.")
        states = file_of(self.folder, message.run)
        asked, portion = hello.summarise, message.portion

        def bound() -> str:
            return about_data(message.run, ask.sum, hello, self._summary(asked).blank, portion)

        private_folder(states.parent)
        with locked(states, self.terms.patience), raising(RefusalError, "{why}", SecureSumError):
            made, vector = Preparing(states, hello.secure, portion.what).prepared(
                message.party, ask, bound, lambda: lanes_told(portion, self._summary(asked), message.run)
            )
        return Prepared(run=message.run, step=ask.step, sum=ask.sum, made=made, vector=vector)

    def _check(self, hello: Hello) -> None:
        """Raise RefusalError unless this device can take part in the run at all."""
        file_of(self.folder, hello.run)
        if fault := fault_of(hello, self.signed):
            raise RefusalError(fault)
        if hello.simulated_noise and not self.terms.simulated_noise:
            raise RefusalError("simulated_noise is for tests: this device draws its noise from the system.")
        if not len(self.source.ids):
            raise RefusalError("This device has no client's data.")

    def _encoding(self, message: Encode) -> EncodingFits:
        running = self._built(message.hello, message.encoding, message.fingerprint)
        if message.run in self._runs:
            self._runs[message.run].store.close()
        path = file_of(self.folder, message.run)
        if not path.exists():
            self._create(path, message, running, self._agreed(message, running, {}))
        with self._opened(running):
            file = running.store.file
            about = file.about
            agreed = self._agreed(message, running, about.agreed)
            if about.agreed and (names := differing(about.agreed, agreed)):
                raise RefusalError(
                    "The run {run!r} is not the one that this device has agreed on; what differs: {names}. Go "
                    "on with that one, or begin a new run.",
                    run=message.run,
                    names=names,
                )
            if about.agreed != agreed:
                file.write_about(replace(about, agreed=agreed))
        self._hold(message.run, running)
        data = running.job.data
        counts = {split: counts_of(data, split, self.terms.judges).tolist() for split in SPLITS}
        counts["train"] = told_counts(data, running.job.method).tolist()
        return EncodingFits(
            run=message.run,
            clients={
                str(client): {split: counts[split][place] for split in SPLITS}
                for place, client in enumerate(data.ids)
            },
            unfit=list(running.unfit),
        )

    def _agreed(self, message: Encode, running: Running, before: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is agreed on, as the run's file keeps it."""
        limits = asdict(self._limits(message.hello))
        return {**agreement(message, running.parts, running.job, before), "limits": limits}

    def _limits(self, hello: Hello) -> Limits:
        """Return the most that a run may ask of a client: as was signed, and as the owner says."""
        own = Limits(**{one.name: getattr(self.terms, one.name) for one in fields(Limits)})
        return own if self.signed is None else own.with_others(self.signed[hello.experiment].limits)

    def _built(self, hello: Hello, encoding: Mapping[str, Any], wanted: Mapping[str, str]) -> Running:
        """Return a run as this device builds it.

        Raises:
            RefusalError: it can't be built, or differs from the server's; names the parts.
        """
        self._check(hello)
        data, faults = encodable(self.source, Encoding.from_json(json.dumps(encoding)))
        for client, fault in faults.items():
            self.tell(f"Client {client!r} takes no part: {fault}")
        try:
            model, method = self.experiment(hello.experiment, encoding)
            if method.head is not None:
                resolve(method, model, data)  # the head that the server names is one on these examples, too
            method = method.resolved(model)
            module = method.made_for(model).to(self.terms.compute)
        except (ConfigError, MethodError, SplitError) as error:
            why = str(error)
            if not is_ours(error):
                self.tell(f"{type(error).__name__}: {error}{place_of(error)}")
                why = f"{type(error).__name__}. Its own log says more."
            raise RefusalError("The experiment cannot be built on this device: {why}", why=why) from error
        if self.terms.secure and not isinstance(method.server.reduce, SecureMean):
            raise RefusalError(
                "This device trains for secure sums alone (device.secure). Add a table [method.secure]."
            )
        net = Net(module)
        initial = net.initial()
        parts = fingerprint.parts(module, method, initial, encoding)
        if names := fingerprint.differing(wanted, parts):
            raise RefusalError(
                "The experiment on this device is not the server's; what differs: {names}. Install the same versions "
                "of all packages, and look whether the model's first values follow from the configuration.",
                names=names,
            )
        store = DeviceStore(
            self.folder,
            self.terms.owner,
            hello.run,
            first_default(method, net, hello.seed),
            data.ids,
            history=self.terms.history,
            accept=method.client.accept,
            patience=self.terms.patience,
        )
        job = job_of(
            method,
            net,
            data,
            store,
            hello.seed,
            self.terms.compute,
            entropy="run" if hello.simulated_noise else "system",
        )
        return Running(hello, parts, job, store, method.split.halves(module).federated(initial), list(faults))

    def _create(self, path: Path, message: Encode, running: Running, agreed: Mapping[str, Any]) -> None:
        """Make the run's file; with ``continue_from`` clients begin it with what they kept of that run."""
        default, old = running.store.default, message.hello.continue_from
        about = FileHeader(
            owner=self.terms.owner,
            run=message.run,
            columns=RowFormat(default.initial).columns(),
            agreed=agreed,
            began_from=old,
        )
        wanted, here = {}, set(self.clients)
        for client, v in message.versions.items():
            if client in here:
                wanted[client] = Line(v.version, v.attempt, v.share)
        if old and wanted and self.terms.on_missing == "anew" and not file_of(self.folder, old).exists():
            self.tell(
                f"The run {old!r} has no private state on this device. Its clients start from default values."
            )
            wanted = {}
        if not old or not (wanted or file_of(self.folder, old).exists()):
            create(path, about)
            return
        if old in self._runs:
            self._runs[old].store.close()
        older = file_of(self.folder, old)
        with closing(DeviceFile(older, self.terms.owner, self.terms.patience)) as file:
            form = RowFormat(default.initial)
            rows = (
                (Version(0, client, 0, 0, 0, 0, accepted=True), packed(form, values, client))
                for client, values in migrated(
                    file,
                    wanted,
                    default,
                    encoding=message.encoding,
                    on_change=self.terms.on_change,
                    on_missing=self.terms.on_missing,
                )
            )
            made = opted_out(file, default, message.encoding) if wanted else []
            parts = {client: known for client, known in file.parts().items() if client in here}
            create(path, replace(about, began=list(wanted), opted_out=made), rows, parts)

    @contextmanager
    def _opened(self, running: Running) -> Iterator[None]:
        """Open a run's file, settle its examples after what is done within, and let go of it where anything fails."""
        running.store.open()
        try:
            running.job.net.opted_out = frozenset(running.store.file.about.opted_out)
            yield
            self._settle(running)
        except BaseException:
            running.store.close()
            raise

    def _running(self, run: str) -> Running:
        """Return a run, built from what was agreed on where this process has not heard of it yet."""
        if run not in self._runs:
            path = file_of(self.folder, run)
            with closing(DeviceFile(path, self.terms.owner, self.terms.patience)) as file:
                agreed = file.about.agreed
            if not agreed:
                raise RefusalError(
                    "This device has not agreed on the run {run!r} yet. Say hello first.", run=run
                )
            hello = Hello(**agreed["hello"])
            running = self._built(hello, agreed["encoded"], agreed["fingerprint"])
        else:
            running = self._runs[run]
        if not running.store.is_open:
            with self._opened(running):
                pass
        self._hold(run, running)
        return running

    def _hold(self, run: str, running: Running) -> None:
        """Hold a run, and let go of those that were not asked for lately."""
        self._runs.pop(run, None)
        self._runs[run] = running
        for old in list(self._runs)[:-MOST_RUNS]:
            self._runs.pop(old).store.close()

    def _settle(self, running: Running) -> None:
        """Keep each example in the part where this run has had it, if the device divides its examples itself."""
        if not running.job.data.meta.get("divided_here"):
            return
        known = running.store.file.parts()
        data, new, joined = settled(running.job.data, known)
        if joined:
            self.tell(
                f"{joined} examples are new since the run began. The others stay in train, valid or test."
            )
        if new:
            running.store.file.put_parts(
                {client: {**known.get(client, {}), **found} for client, found in new.items()}
            )
        running.job = replace(running.job, data=data)

    def _work(self, packet: Packet) -> Packet:
        work = message_of(packet, Work)
        running = self._running(work.run)
        check_work(work, fingerprint.digest(running.parts), running.parts["encoding"], running.received)
        asked = {model for one in work.orders for judging in one.judge for model in judging.models}
        if "adapted" in asked and not self.terms.judge_adapted:
            raise RefusalError(
                "Its owner does not let the models be judged that clients adapt (device.judge_adapted). Let them adapt "
                "without evaluate_adapted."
            )
        least = self.terms.least_examples
        leaves: Leaves = min(work.leaves, self.terms.leaves, key=LEAVES.index) if least == 1 else "sums"
        work = replace(work, leaves=leaves)

        def counts(split: Partition) -> dict[str, int]:
            found = counts_of(running.job.data, split, self.terms.judges).tolist()
            return dict(zip(map(str, running.job.data.ids), found, strict=True))

        tally = Tally(running.store.file, self._limits(running.hello), least, asked_of(packet, work), counts)
        tally.check()
        running.store.asked = tally.asked
        answers = serve(
            work,
            running.job,
            running.store,
            self.engine,
            on_missing=self.terms.on_missing,
            tell=self.tell,
            masking=running.masking(self.folder),
            unfit=running.unfit,
            judges=self.terms.judges,
            admits=tally.admits,
            note=tally.note,
        )
        packet = packet_of(answers)
        uploads = sum(one.upload is not None for one in answers.answers)
        told = sum(int(judged.tallies.count.sum()) for _, judged in answers.judged)
        size = nbytes(packet.tensors) + len(json.dumps(packet.header))
        running.store.file.put_left(tally.asked.name, uploads, told, size)
        return packet
