"""A round's orders and answers as packets, and back. What is read is checked before it is used.

Tensors of a message ``work`` stand under ``group/G/params/NAME`` and ``group/G/state/NAME``: orders that are sent the
same share a group, so the global model travels once a node. Those of ``answers`` stand under ``answer/I/deltas/NAME``
and ``answer/I/rows/NAME``, losses under ``losses`` (JSON has no NaN), results of judging under ``judged/J/…``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

import torch
from pydantic import Field

from fedkeep.core.errors import FailedError, LostError, NonFiniteError, UploadError, shown
from fedkeep.core.params import Params, is_state, nonfinite, prefixed, under
from fedkeep.engines import Answer, Judged, Leaves, Order
from fedkeep.methods import Sent
from fedkeep.remote.headers import Count, Header, header_of, malformed
from fedkeep.remote.packet import Packet
from fedkeep.remote.sums import JudgedHeader, judged_tensors, read_judged
from fedkeep.split import Split
from fedkeep.tasks.results import Model

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


@dataclass(frozen=True, kw_only=True)
class Judging:
    """What of a client is judged: models, side by side on its examples of a partition."""

    split: Partition
    models: tuple[Model, ...]


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A step of a secure sum that a client is asked for, see ``remote.masking``.

    Attributes:
        step: which.
        sum: the number of the sum: the attempt of the message that asked for its keys.
        given: what the step needs, by client or name.
    """

    step: Step
    sum: int
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


class _Ask(Header):
    step: Step
    sum: Count
    given: dict[str, str]


class _Judging(Header):
    split: Partition
    models: Annotated[list[Model], Field(min_length=1)]


class _Order(Header):
    client: str
    group: Count
    version: Count
    attempt: Count
    share: Annotated[float, Field(ge=0, le=1)]
    progress: Annotated[float, Field(ge=0, le=1)]
    train: bool
    adapt: bool
    judge: list[_Judging]
    asks: list[_Ask] = Field(default_factory=list)


class _Work(Header):
    kind: Literal["work"]
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
    made: dict[Step, dict[str, str]] = Field(default_factory=dict)


class _Answers(Header):
    kind: Literal["answers"]
    run: str
    round: Count
    attempt: Count
    answers: list[_Answer]
    judged: list[JudgedHeader]


def work_packet(work: Work) -> Packet:
    """Return the message; orders that are sent the very same tensors share a group."""
    groups: dict[tuple[tuple[str, int], ...], tuple[int, Sent]] = {}
    orders = []
    for one in work.orders:
        same = tuple((name, id(value)) for name, value in one.order.sent.flat.items())
        group, _ = groups.setdefault(same, (len(groups), one.order.sent))
        judge = [{"split": j.split, "models": list(j.models)} for j in one.judge]
        asks = [{"step": a.step, "sum": a.sum, "given": dict(a.given)} for a in one.asks]
        orders.append(
            {
                "client": one.order.client,
                "group": group,
                "version": one.version,
                "attempt": one.attempt,
                "share": one.share,
                "progress": one.order.progress,
                "train": one.train,
                "adapt": one.adapt,
                "judge": judge,
                **({"asks": asks} if asks else {}),
            }
        )
    tensors: Params = {}
    for group, sent in groups.values():
        tensors |= prefixed(f"group/{group}/params/", sent.params) | prefixed(
            f"group/{group}/state/", sent.state
        )
    header = {
        "kind": "work",
        "run": work.run,
        "fingerprint": work.fingerprint,
        "encoding": work.encoding,
        "round": work.round,
        "attempt": work.attempt,
        "leaves": work.leaves,
        "orders": orders,
    }
    return Packet(header, tensors)


def read_work(packet: Packet) -> Work:
    """Return what ``work_packet`` wrote.

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
            version=o.version,
            attempt=o.attempt,
            share=o.share,
            train=o.train,
            adapt=o.adapt,
            judge=tuple(Judging(split=j.split, models=tuple(j.models)) for j in o.judge),
            asks=tuple(Ask(step=a.step, sum=a.sum, given=a.given) for a in o.asks),
        )
        for o in header.orders
    )
    return Work(
        run=header.run,
        fingerprint=header.fingerprint,
        encoding=header.encoding,
        round=header.round,
        attempt=header.attempt,
        orders=orders,
        leaves=header.leaves,
    )


def answers_packet(answers: Answers) -> Packet:
    """Return the message: the list of what leaves a device.

    Tensors stand in the order of their names: any other could tell of what made them.
    """
    told, tensors = [], Params()
    for number, one in enumerate(answers.answers):
        weight, status = 0.0, next((s for s, kind in FAULTS.items() if isinstance(one.fault, kind)), "idle")
        if one.upload is not None:
            weight, status = one.upload.weight, "trained"
            tensors |= prefixed(f"answer/{number}/deltas/", dict(sorted(one.upload.deltas.items())))
            tensors |= prefixed(f"answer/{number}/rows/", dict(sorted(one.upload.rows.items())))
        text = "" if one.fault is None else str(one.fault)
        made = {step: dict(values) for step, values in answers.made.get(one.client, {}).items()}
        about = {"client": one.client, "status": status, "weight": weight, "text": text}
        told.append({**about, "made": made} if made else about)
    tensors["losses"] = torch.tensor([one.loss for one in answers.answers], dtype=torch.float64)
    judged = []
    for number, (split, found) in enumerate(answers.judged):
        header, columns = judged_tensors(split, found)
        judged.append(header)
        tensors |= prefixed(f"judged/{number}/", columns)
    header = {
        "kind": "answers",
        "run": answers.run,
        "round": answers.round,
        "attempt": answers.attempt,
        "answers": told,
        "judged": judged,
    }
    return Packet(header, tensors)


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
        (one.split, read_judged(one, under(f"judged/{number}/", packet.tensors)))
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
