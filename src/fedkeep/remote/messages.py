"""What travels between server and devices: orders, answers and small messages, written, read and checked here.

A message is a ``Packet``, a header and named tensors; its bytes are a safetensors file and a checksum of it. Whoever
reads one gets it checked: names, types, shapes and values, and that it is of this run, round and attempt.

Tensors of a message ``work`` stand under ``group/G/params/NAME`` and ``group/G/state/NAME``: orders that are sent the
same share a group, so the global model travels once a node. Those of ``answers`` stand under ``answer/I/deltas/NAME``
and ``answer/I/rows/NAME``, losses under ``losses`` (JSON has no NaN), results of judging under ``judged/J/…``.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Annotated, Any, Literal, TypeVar, get_args

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedkeep.core.errors import FailedError, LostError, NonFiniteError, UploadError, first_line, shown
from fedkeep.core.params import (
    Params,
    difference_of_names,
    is_state,
    misfit,
    mistyped,
    nonfinite,
    prefixed,
    under,
)
from fedkeep.engines import Answer, Judged, Judgement, Leaves, Order, Tallies
from fedkeep.engines.tally import ROWS
from fedkeep.methods import Sent
from fedkeep.metrics.scores import BINS
from fedkeep.split import Split
from fedkeep.tasks import KINDS, Task
from fedkeep.tasks.results import Model

CHECKSUM = 4
TYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)
"""What a tensor that travels may be."""


@dataclass(frozen=True)
class Packet:
    """A message.

    Attributes:
        header: what JSON can hold; ``header["kind"]`` says what the message is.
        tensors: by name. Their order counts, as sums over names and draws go by it: a transport keeps it.
    """

    header: Mapping[str, Any]
    tensors: Params = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the packet as a safetensors file and its CRC-32, 4 bytes, for transports that carry bytes.

        Raises:
            UploadError: a header that JSON cannot hold, or a tensor that a safetensors file cannot: a sparse one, say.
        """
        about = {
            "header": dict(self.header),
            "names": list(self.tensors),
        }  # under one key: safetensors shuffles several
        try:
            packet = json.dumps(about, allow_nan=False, sort_keys=True)
        except (TypeError, ValueError, RecursionError) as error:
            raise UploadError(f"A message's header cannot be written: {first_line(error)}.") from error
        for name, tensor in self.tensors.items():
            if tensor.layout is not torch.strided or tensor.dtype not in TYPES:
                raise UploadError(
                    f"The tensor {name!r} is {tensor.dtype}, {tensor.layout}. Dense ones travel, of these types: "
                    f"{', '.join(str(dtype).removeprefix('torch.') for dtype in TYPES)}."
                )
        content = save(_apart(self.tensors), {"packet": packet})
        return content + zlib.crc32(content).to_bytes(CHECKSUM, "little")

    @classmethod
    def from_bytes(cls, content: bytes) -> Packet:
        """Read what ``to_bytes`` wrote.

        Raises:
            UploadError: the bytes are damaged, or were never a packet.
        """
        content, checksum = content[:-CHECKSUM], content[-CHECKSUM:]
        if zlib.crc32(content).to_bytes(CHECKSUM, "little") != checksum:
            raise UploadError("A message cannot be read: its checksum is not that of its content.")
        try:
            size = int.from_bytes(content[:8], "little")
            text = json.loads(content[8 : 8 + size])["__metadata__"]["packet"]
            about = json.loads(text, parse_constant=_refuse)
            header, names, found = about["header"], about["names"], load(content)
            tensors = {name: found.pop(name) for name in names}
        except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UploadError(f"A message cannot be read: {first_line(error)}.") from error
        if any(
            t.dtype is torch.bool and t.numel() and t.view(torch.uint8).max() > 1 for t in tensors.values()
        ):
            raise UploadError("A message cannot be read: a truth value in it is neither 0 nor 1.")
        if found:
            raise UploadError(f"A message cannot be read: its list of names lacks {sorted(found)[:3]}.")
        if not isinstance(header, dict):
            raise UploadError(f"A message's header should be a table; it is {type(header).__name__}.")
        return cls(header, tensors)


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no number in JSON")


def _apart(tensors: Mapping[str, Tensor]) -> Params:
    """Return the tensors as a file takes them: dense, on the CPU, and none in the memory of another."""
    taken: set[int] = set()
    out: Params = {}
    for name, value in tensors.items():
        value = value.detach().cpu().contiguous()
        place = value.untyped_storage().data_ptr()
        out[name] = value.clone() if place in taken else value
        taken.add(place)
    return out


PROTOCOL = 2  # of the messages; server and device must speak the same
Count = Annotated[int, Field(ge=0, lt=2**63)]
Part = Annotated[float, Field(ge=0, le=1)]


class Header(BaseModel):
    """Knows all its keys; ``"3"`` is no number, ``true`` is no 1."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


H = TypeVar("H", bound=Header)


class Hello(Header):
    """The first message to a node: which run, which experiment.

    Attributes:
        protocol: ``PROTOCOL``.
        run: the run's id.
        code: ``fingerprint.code()`` of the server: version and digest of the installed source.
        experiment: the configuration's text, the server's ``[data]`` reader left out.
        seed: what devices' streams follow: the run's, or another where devices must not know it.
        simulated_noise: noise on uploads follows the seed too (tests alone); else it comes from the system.
        continue_from: the id of a run whose private states this one begins with; empty: none.
        summarise: what the device is asked to tell of its data for the encoding; None: it is not asked.
    """

    kind: Literal["hello"] = "hello"
    protocol: int
    run: str
    code: str
    experiment: str
    seed: int
    simulated_noise: bool = False
    continue_from: str = ""
    summarise: dict[str, Any] | None = None


class Here(Header):
    """A node's answer to ``Hello``: whose data it has, and what it tells of them."""

    kind: Literal["here"] = "here"
    run: str
    clients: list[str]
    summary: dict[str, Any] | None = None


class Named(Header):
    """A version of what a client keeps, as in ``ClientOrder``."""

    version: Count
    attempt: Count
    share: Part


class Encode(Header):
    """The second message: how data become numbers, and what the experiment must be; sent again to a node that joins.

    Attributes:
        run: the run's id.
        hello: the first message, as a node may be another process by now.
        encoding: as JSON.
        fingerprint: a digest of each part, ``fingerprint.parts``.
        versions: with ``hello.continue_from`` those of the node's clients that its server accepted last.
    """

    kind: Literal["encoding"] = "encoding"
    run: str
    hello: Hello
    encoding: dict[str, Any]
    fingerprint: dict[str, str]
    versions: dict[str, Named] = {}


class Fits(Header):
    """A node's answer to ``Encode``: the clients that take part, each with its numbers of examples by partition.

    ``unfit`` are those whose data cannot be used.
    """

    kind: Literal["fits"] = "fits"
    run: str
    clients: dict[str, dict[str, int]]
    unfit: list[str] = []


UNFIT = "Its data cannot be used: they are damaged or do not fit. Its own log says more."
"""What the server is told of clients whose data cannot be used."""


class Refused(Header):
    """A node's answer to a message that it does not serve; nothing has changed there.

    ``busy``: an earlier message is still being served there; this one, said again later, may be. ``failed``: the method
    or the model failed on it.
    """

    kind: Literal["refused"] = "refused"
    run: str
    reason: str
    busy: bool = False
    failed: bool = False


def told(header: Header, tensors: Params | None = None) -> Packet:
    """Return a packet of a header, and tensors if there are any."""
    return Packet(header.model_dump(mode="json"), tensors or {})


def header_of(packet: Packet, kind: type[H]) -> H:
    """Return a packet's header, checked.

    Raises:
        UploadError: it is of another kind, or a field is missing, unknown or of another type; names the first.
    """
    try:
        return kind.model_validate(dict(packet.header))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "header"
        raise malformed(str(packet.header.get("kind"))[:20], f"{place}: {first['msg']}") from error


def malformed(message: str, fault: str) -> UploadError:
    """Return the error that a message is refused with."""
    return UploadError(f"A message {message!r} was refused: {fault}.")


Partition = Literal["valid", "test"]
"""What a server may have judged. Not training examples: some may have opted out, and losses of models that a server
makes up would tell their number, and of each client its gradient."""
Step = Literal["keys", "shares", "masked", "revealed"]
LEAVES: Sequence[Leaves] = get_args(Leaves)  # from the least to the most
FAULTS: dict[str, type[NonFiniteError | UploadError | LostError]] = {
    "broken": NonFiniteError,
    "failed": FailedError,
    "malformed": UploadError,
    "lost": LostError,
}


class Judging(Header):
    """What of a client is judged: models, side by side on its examples of a partition."""

    split: Partition
    models: Annotated[tuple[Model, ...], Field(min_length=1, strict=False)]


class Ask(Header):
    """A step of a secure sum that a client is asked for, see ``remote.masking``.

    Attributes:
        step: which.
        sum: the number of the sum: the attempt of the message that asked for its keys.
        given: what the step needs, by client or name.
    """

    step: Step
    sum: Count
    given: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class ClientOrder:
    """What the server asks of one client, and which of its private versions it builds on.

    Attributes:
        order: its round is that of the whole message, and so is its progress if it trains.
        version: how many of the client's rounds the server has accepted in this run; 0: it starts from the default.
        attempt: of the message whose answer made this version, see ``Work.attempt``; 0 for version 0.
        share: z = c_k / Σ c of the round that made this version, where clients accept by it (FURL eq. 6); else 0.
        train: train, stage version + 1 and upload; False: it does not.
        adapt: adapt as the method says, before judging; the device keeps the result, and nothing of it is uploaded. The
            server has no say in which examples it adapts on, or to which of its parameters: with that it could tell
            single examples apart.
        judge: what is judged, before training.
        asks: steps of secure sums.
    """

    order: Order
    version: int = 0
    attempt: int = 0
    share: float = 0.0
    train: bool = True
    adapt: bool = False
    judge: tuple[Judging, ...] = ()
    asks: tuple[Ask, ...] = ()

    @property
    def begins(self) -> bool:
        """Whether the client begins at the version, and so learns which was accepted; a mere step needs no state."""
        return self.train or self.adapt or bool(self.judge) or not self.asks


@dataclass(frozen=True, kw_only=True)
class Work:
    """A round's message to a node, for all of its clients.

    Attributes:
        run: the run's id.
        fingerprint: of the experiment, as ``hello`` agreed on it.
        encoding: the encoding's digest.
        round: the round's number.
        attempt: a number that the server gives to no other message of the run but a repetition of this one, in
            [1, 2⁶³). What is staged bears it, and so does the next order that builds on it: a late repetition or a
            server that was rolled back can't mix two trainings of the same version.
        orders: each client once.
        leaves: what of judging may leave; the node's own rule may allow less.
    """

    run: str
    fingerprint: str
    encoding: str
    round: int
    attempt: int
    orders: tuple[ClientOrder, ...]
    leaves: Leaves = "sums"


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What a node answers to ``Work``.

    Attributes:
        run, round, attempt: of the message.
        answers: one for each order, in their order; of a client that was only judged without upload and fault. A
            ``LostError`` says that its private state is not the one that the order wants, or can't be read.
        judged: by partition, the results of each task; those of clients that are lost are not in them.
        made: by client and step, what came of steps of secure sums.
    """

    run: str
    round: int
    attempt: int
    answers: tuple[Answer, ...]
    judged: tuple[tuple[Partition, Judged], ...] = ()
    made: Mapping[str, Mapping[Step, Mapping[str, str]]] = field(default_factory=dict)


ASKED = ("version", "attempt", "share", "train", "adapt", "judge", "asks")
"""What is said of an order beside what it sends."""
NAMED = ("run", "fingerprint", "encoding", "round", "attempt", "leaves")
"""What is said of a round's message beside its orders."""


class _Order(Header):
    client: str
    group: Count
    progress: Part
    version: Count
    attempt: Count
    share: Part
    train: bool
    adapt: bool
    judge: Annotated[tuple[Judging, ...], Field(strict=False)]
    asks: Annotated[tuple[Ask, ...], Field(strict=False)] = ()


class _Work(Header):
    kind: Literal["work"] = "work"
    run: str
    fingerprint: str
    encoding: str
    round: Count
    attempt: Annotated[int, Field(ge=1, lt=2**63)]
    leaves: Leaves
    orders: list[_Order]


class _Answer(Header):
    client: str
    status: Literal["trained", "idle", "broken", "failed", "malformed", "lost"]
    weight: float
    text: str
    made: Mapping[Step, Mapping[str, str]] = {}


class _Judged(Header):
    """What is said of a result beside its numbers.

    ``clients``: with tallies the client of each row, an empty text where a row is a sum; with examples the ids that
    clients' numbers stand for.
    """

    split: Partition
    kind: Annotated[str, Field(pattern=f"^({'|'.join(KINDS)})$")]
    label: str
    name: str | None
    models: Annotated[tuple[Model, ...], Field(min_length=1, strict=False)]
    leaves: Leaves
    clients: list[str]


class _Answers(Header):
    kind: Literal["answers"] = "answers"
    run: str
    round: Count
    attempt: Count
    answers: list[_Answer]
    judged: list[_Judged]


def _same(one: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(one, name) for name in names}


def work_packet(work: Work) -> Packet:
    """Return the message; orders that are sent the very same tensors share a group."""
    groups: dict[tuple[tuple[str, int], ...], tuple[int, Sent]] = {}
    orders = []
    for one in work.orders:
        order = one.order
        same = tuple((name, id(value)) for name, value in order.sent.flat.items())
        group, _ = groups.setdefault(same, (len(groups), order.sent))
        about: dict[str, Any] = {"client": order.client, "group": group, "progress": order.progress}
        orders.append(_Order(**about, **_same(one, ASKED)))
    tensors: Params = {}
    for group, sent in groups.values():
        tensors |= prefixed(f"group/{group}/params/", sent.params)
        tensors |= prefixed(f"group/{group}/state/", sent.state)
    return told(_Work(**_same(work, NAMED), orders=orders), tensors)


def read_work(packet: Packet) -> Work:
    """Return what ``work_packet`` wrote; ``check_work`` sees whether it is for this device.

    Raises:
        UploadError: the message is malformed; says where.
    """
    header = header_of(packet, _Work)
    _check_once((o.client for o in header.orders), "orders")
    groups = sorted({o.group for o in header.orders})
    if groups != list(range(len(groups))):
        raise malformed("work", f"the groups should be 0 … {len(groups) - 1}; they are {groups}")
    parts = _parted(packet, "work", "group", len(groups), ("params", "state"))
    sent = [Sent(params=part["params"], state=part["state"]) for part in parts]
    for number, group in enumerate(sent):
        if wrong := [name for name in group.params if is_state(name)]:
            raise malformed("work", f"the parameter {wrong[0]!r} of group {number} has the name of a state")
        if (name := nonfinite(group.flat)) is not None:
            raise malformed("work", f"{name!r} of group {number} holds a NaN or an infinity")
    orders = tuple(
        ClientOrder(
            order=Order(round=header.round, client=o.client, sent=sent[o.group], progress=o.progress),
            **_same(o, ASKED),
        )
        for o in header.orders
    )
    return Work(**_same(header, NAMED), orders=orders)


def check_work(work: Work, fingerprint: str, encoding: str, wanted: Params) -> None:
    """Raise UploadError unless a message is of what a device has agreed on, and its parameters are those of the model.

    Args:
        work: the message.
        fingerprint, encoding: of the experiment and the encoding, as for ``Work``.
        wanted: gives the parameters' names, shapes and types.
    """
    for what, theirs, ours in (
        ("encoding", work.encoding, encoding),
        ("experiment", work.fingerprint, fingerprint),
    ):
        if theirs != ours:
            raise UploadError(f"The order is of another {what} than this device has agreed on.")
    for sent in {id(one.order.sent): one.order.sent for one in work.orders if one.begins}.values():
        if fault := misfit(wanted, sent.params) or mistyped(wanted, sent.params):
            raise UploadError(f"The parameters that were sent do not fit the model: {fault}.")
    if len(progress := sorted({one.order.progress for one in work.orders if one.train})) > 1:
        got = " and ".join(map(str, progress))
        raise UploadError(f"A message was refused: the orders to train must have one progress; got {got}.")


def answers_packet(answers: Answers) -> Packet:
    """Return the message: the list of what leaves a device.

    Tensors stand in the order of their names: any other could tell of what made them.
    """
    said, tensors = [], Params()
    for number, one in enumerate(answers.answers):
        weight, status = 0.0, next((s for s, kind in FAULTS.items() if isinstance(one.fault, kind)), "idle")
        if one.upload is not None:
            weight, status = one.upload.weight, "trained"
            tensors |= prefixed(f"answer/{number}/deltas/", dict(sorted(one.upload.deltas.items())))
            tensors |= prefixed(f"answer/{number}/rows/", dict(sorted(one.upload.rows.items())))
        text, made = "" if one.fault is None else str(one.fault), answers.made.get(one.client, {})
        about: dict[str, Any] = {"client": one.client, "status": status, "weight": weight}
        said.append(_Answer(**about, text=text, made=made))
    tensors["losses"] = torch.tensor([one.loss for one in answers.answers], dtype=torch.float64)
    judged = []
    for number, (split, found) in enumerate(answers.judged):
        header, columns = _judged(split, found)
        judged.append(header)
        tensors |= prefixed(f"judged/{number}/", columns)
    named = _same(answers, ("run", "round", "attempt"))
    return told(_Answers(**named, answers=said, judged=judged), tensors)


def read_answers(packet: Packet, split: Split) -> Answers:
    """Return what ``answers_packet`` wrote. Uploads are checked against what was sent where the round takes them.

    Args:
        packet: the message.
        split: the method's; it refuses uploads with private names.

    Raises:
        UploadError: the message is malformed; says where.
    """
    header = header_of(packet, _Answers)
    _check_once((a.client for a in header.answers), "answers")
    losses = packet.tensors.get("losses", torch.zeros(0))
    if losses.dtype != torch.float64 or tuple(losses.shape) != (len(header.answers),):
        raise malformed("answers", f"losses should be {len(header.answers)} float64 numbers")
    parts = _parted(packet, "answers", "answer", len(header.answers), ("deltas", "rows"))
    answers = []
    for told, part, loss in zip(header.answers, parts, losses.tolist(), strict=True):
        if told.status == "trained":
            upload = split.arrived(part["deltas"], told.weight, part["rows"])
            answers.append(Answer(client=told.client, upload=upload, loss=loss))
        elif part["deltas"] or part["rows"]:
            raise malformed(
                "answers", f"client {shown(told.client)} is {told.status!r}, and there is an upload"
            )
        else:
            fault = None if told.status == "idle" else FAULTS[told.status](told.text)
            answers.append(Answer(client=told.client, loss=loss, fault=fault))
    judged = tuple(
        (one.split, _read_judged(one, under(f"judged/{number}/", packet.tensors)))
        for number, one in enumerate(header.judged)
    )
    return Answers(
        run=header.run,
        round=header.round,
        attempt=header.attempt,
        answers=tuple(answers),
        judged=judged,
        made={one.client: one.made for one in header.answers if one.made},
    )


def check_answers(answers: Answers, work: Work, tasks: Collection[Task], node: str) -> None:
    """Raise UploadError where these are no answers to that message.

    Args:
        answers: what came.
        work: the message.
        tasks: what is judged.
        node: whose answers they are.
    """
    refused = f"The answers of node {node!r} were refused: they"
    clients = [one.order.client for one in work.orders]
    wanted = (work.run, work.round, work.attempt, clients)
    got = (answers.run, answers.round, answers.attempt, [answer.client for answer in answers.answers])
    if wanted != got:
        raise UploadError(
            f"{refused} are not to these orders; wanted (run, round, attempt, clients) {wanted}, got {got}."
        )
    asked = {(judging.split, judging.models) for one in work.orders for judging in one.judge}
    seen = set()
    for split, judged in answers.judged:
        key = (split, judged.task)
        fine = (split, judged.models) in asked and judged.task in tasks and key not in seen
        fine = fine and LEAVES.index(judged.leaves) <= LEAVES.index(work.leaves)
        if not (fine and _of_these(judged, clients)):
            raise UploadError(f"{refused} hold a result of judging {split!r} that nobody asked for.")
        seen.add(key)


def _of_these(judged: Judged, orders: Collection[str]) -> bool:
    """Return whether a result is of these clients, each once at most, or of no more than there are."""
    of_whom, people = judged.tallies.clients, set(orders) if judged.leaves != "sums" else {""}
    once = set(of_whom) <= people and len(set(of_whom)) == len(of_whom)
    return once and sum(judged.tallies.people.tolist()) <= len(orders)


def _parted(
    packet: Packet, message: str, what: str, count: int, halves: tuple[str, str]
) -> list[dict[str, Params]]:
    """Return for each number the tensors under ``WHAT/NUMBER/HALF/NAME``, by half and name; no other may be there."""
    parts: list[dict[str, Params]] = [{half: {} for half in halves} for _ in range(count)]
    numbers = {str(number): number for number in range(count)}
    for full, value in packet.tensors.items():
        if message == "answers" and (full == "losses" or full.startswith("judged/")):
            continue
        head, _, rest = full.partition("/")
        number, _, rest = rest.partition("/")
        half, _, name = rest.partition("/")
        if head != what or number not in numbers or half not in halves or not name:
            raise malformed(message, f"the tensor {shown(full)} has no place in it")
        parts[numbers[number]][half][name] = value
    return parts


def _check_once(clients: Iterable[str], what: str) -> None:
    twice = [client for client, count in Counter(clients).items() if count > 1]
    if twice:
        raise UploadError(f"A message was refused: client {shown(twice[0])} stands in its {what} twice.")


WHOLE = ("people", "count", "right", "agreed", "scores")
"""Columns of a tally that hold whole numbers of at least 0."""
POSITIVE = ("loss", "absolute", "accuracy")
"""Columns of at least 0, or NaN, that are no whole numbers."""
EXAMPLE = ("client", "loss", "score", "label", "row")
MOST, MOST_WHOLE = 1e300, 2**53
"""Numbers beyond are no sums of examples, and those of several nodes would have no room."""
NO_LABELS = (torch.bfloat16, torch.complex64)


def _judged(split: Partition, judged: Judged) -> tuple[_Judged, Params]:
    """Return what is said of a result, and its columns by name: a tally's, or ``M/COLUMN`` of each model's examples."""
    tensors: Params = {}
    if judged.examples:
        numbers = np.unique(judged.examples[0].client)
        clients = [str(judged.roster[int(c)]) for c in numbers]
        for m, one in enumerate(judged.examples):
            columns = dict(zip(EXAMPLE, one.columns, strict=True))
            columns["client"] = np.searchsorted(numbers, one.client)
            tensors |= {f"{m}/{name}": torch.from_numpy(values.copy()) for name, values in columns.items()}
    else:
        clients = list(judged.tallies.clients)
        tensors = {name: torch.from_numpy(np.array(getattr(judged.tallies, name))) for name in ROWS}
    task = judged.task
    header = _Judged(
        split=split,
        kind=task.kind.name,
        label=task.label,
        name=task.name,
        models=judged.models,
        leaves=judged.leaves,
        clients=clients,
    )
    return header, tensors


def _read_judged(header: _Judged, tensors: Params) -> Judged:
    """Return what ``_judged`` wrote.

    Raises:
        UploadError: names, shapes, types or values are not those of a result.
    """
    task, models = Task(KINDS[header.kind], header.label, header.name), header.models
    if len(set(models)) < len(models):
        raise _refused(f"a model stands twice in {list(models)}")
    if header.leaves == "examples":
        examples = _examples(task, len(models), len(header.clients), tensors)
        return Judged(
            task=task, models=models, leaves=header.leaves, examples=examples, roster=header.clients
        )
    return Judged(
        task=task, models=models, leaves=header.leaves, table=_table(task, models, header.clients, tensors)
    )


def _table(task: Task, models: tuple[Model, ...], clients: Sequence[str], tensors: Params) -> Tallies:
    k, m, p = len(clients), len(models), len(list(combinations(models, 2)))
    shapes = dict.fromkeys(ROWS, (k, m)) | {
        "people": (k,),
        "count": (k,),
        "agreed": (k, p, 2, 2),
        "difference": (k, p, 2),
        "scores": (k, m, 2, BINS if task.kind.ranks_scores else 0),
    }
    if fault := difference_of_names(shapes, tensors):
        raise _refused(fault)
    for name, shape in shapes.items():
        value = tensors[name]
        _check(name, value, shape, torch.int64 if name in WHOLE else torch.float64)
        _check_range(name, value, at_least_0=name in WHOLE or name in POSITIVE)
    if bool((tensors["right"] > tensors["count"][:, None]).any()):
        raise _refused("'right' is more than 'count'")
    if bool(((tensors["people"] == 0) & (tensors["count"] > 0)).any()):
        raise _refused("'count' tells of examples of nobody")
    columns: dict[str, Any] = {name: tensors[name].numpy() for name in ROWS}
    return Tallies(task=task, models=models, clients=tuple(clients), **columns)


def _examples(task: Task, models: int, clients: int, tensors: Params) -> tuple[Judgement, ...]:
    wanted = [f"{m}/{name}" for m in range(models) for name in EXAMPLE]
    if fault := difference_of_names(wanted, tensors):
        raise _refused(fault)
    count = len(tensors["0/client"]) if tensors["0/client"].dim() else -1
    for name in wanted:
        value, column = tensors[name], name.partition("/")[2]
        if column == "label" and value.dtype in NO_LABELS:
            raise _refused(f"{shown(name)} should be real numbers, is {value.dtype}")
        kind = {"client": torch.int64, "row": torch.int64, "label": value.dtype}
        _check(name, value, (count,), kind.get(column, torch.float64))
        if column == "loss":
            _check_range(name, value, at_least_0=True)
        elif column == "score" and (fault := task.kind.score_fault(value)):
            raise _refused(f"{shown(name)} {fault}")
    found = []
    for m in range(models):
        columns = [tensors[f"{m}/{name}"].numpy() for name in EXAMPLE]
        if count and not (columns[0].min() >= 0 and columns[0].max() < clients):
            raise _refused(f"an example is of none of the {clients} clients")
        found.append(Judgement.joined(task, [columns]))
    return tuple(found)


def _check(name: str, value: torch.Tensor, shape: tuple[int, ...], kind: torch.dtype) -> None:
    if tuple(value.shape) != shape or value.dtype != kind:
        got = f"{tuple(value.shape)} {value.dtype}"
        raise _refused(f"{shown(name)} should be {shape} {kind}, is {got}")


def _check_range(name: str, value: torch.Tensor, *, at_least_0: bool) -> None:
    """Raise UploadError at a number that comes of no examples; a model that diverged has NaN and infinity."""
    if at_least_0 and bool((value < 0).any()):
        raise _refused(f"{shown(name)} holds a number below 0")
    if value.is_floating_point():
        if bool(((value.abs() > MOST) & ~value.isinf()).any()):
            raise _refused(f"{shown(name)} holds a number beyond {MOST:g}")
    elif bool((value > MOST_WHOLE).any()):
        raise _refused(f"{shown(name)} holds a number beyond 2^53")


def _refused(fault: str) -> UploadError:
    return UploadError(f"A result of judging was refused: {fault}.")
