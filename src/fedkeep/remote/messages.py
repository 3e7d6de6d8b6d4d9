"""What travels between server and devices: orders, answers and small messages, written, read and checked here.

A message is a frozen dataclass: its fields' types are what is checked of one that comes. ``packet_of`` writes it as a
``Packet``, a header and named tensors; ``message_of`` reads it. Whoever reads one gets it checked: names, types, shapes and values, and that it is of this run, round and attempt.

What holds tensors stands in the header as a number, and its tensors under ``WHAT/NUMBER/…``: ``sent/N/params/NAME`` and
``sent/N/state/NAME`` of an order, once for all orders that are sent the same, so the global model travels once a node;
``upload/N/deltas/NAME`` and ``upload/N/rows/NAME`` of an answer; ``judged/N/columns/…`` of a result of judging. Training
losses stand under ``losses`` (JSON has no NaN).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

import numpy as np
import torch
from pydantic import ConfigDict, Field, GetPydanticSchema, TypeAdapter, ValidationError
from pydantic_core import core_schema
from torch import Tensor

from fedkeep.core.errors import FailedError, LostError, NonFiniteError, UploadError, first_line, shown
from fedkeep.core.packet import Packet
from fedkeep.core.params import Params, difference_of_names, is_state, misfit, mistyped, nonfinite
from fedkeep.engines import Answer, Judged, Judgement, Leaves, Order, Tallies
from fedkeep.engines.faults import Fault
from fedkeep.engines.tally import ROWS
from fedkeep.methods import Sent
from fedkeep.metrics.scores import BINS
from fedkeep.split import Split, Upload
from fedkeep.store import Line, Named
from fedkeep.tasks import KINDS, Task
from fedkeep.tasks.results import Model

PROTOCOL = 5  # of the messages; server and device must speak the same
Count = Annotated[int, Field(ge=0, lt=2**63)]
Part = Annotated[float, Field(ge=0, le=1)]
Partition = Literal["valid", "test"]
"""What a server may have judged. Not training examples: some may have opted out, and losses of models that a server
makes up would tell their number, and of each client its gradient."""
Step = Literal["keys", "shares", "masked", "revealed"]
LEAVES: Sequence[Leaves] = get_args(Leaves)  # from the least to the most
FAULTS: dict[str, type[Fault]] = {
    "broken": NonFiniteError,
    "failed": FailedError,
    "malformed": UploadError,
    "lost": LostError,
}
UNFIT = "Its data cannot be used: they are damaged or do not fit. Its own log says more."
"""What the server is told of clients whose data cannot be used."""
M = TypeVar("M", bound="Message")


class Written:
    """Of what a message is made is known to its reader: no more and no less; ``"3"`` is no number, ``true`` is no 1."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Message(Written):
    """What is said in one go; the types of its fields are checked where it is read."""

    kind: ClassVar[str]

    def fault(self) -> str:
        """Return why its fields do not go together, or an empty text."""
        return ""


def packet_of(message: Message) -> Packet:
    """Return a message as it travels."""
    parts = _Parts()
    said = _adapter(type(message)).dump_python(message, mode="json", context=parts)
    return Packet({"kind": message.kind, **said}, parts.written())


def message_of(packet: Packet, kind: type[M], split: Split | None = None) -> M:
    """Return the message that ``packet_of`` wrote.

    Args:
        packet: what came.
        kind: what it should be.
        split: the method's, where uploads are in it: it refuses those with private names.

    Raises:
        UploadError: it is of another kind, a field is missing, unknown or of another type, its fields do not go
            together, or a tensor has no place in it; names the first.
    """
    said, parts = dict(packet.header), _Parts(split)
    if (got := said.pop("kind", None)) != kind.kind:
        raise malformed(shown(got, 20), "it should be {wanted!r}", wanted=kind.kind)
    parts.read(kind.kind, packet.tensors)
    try:
        text = json.dumps(said, allow_nan=False)
        message: M = _adapter(kind).validate_json(text, context=parts)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "header"
        raise malformed(kind.kind, "{place}: {why}", place=place, why=first["msg"]) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise malformed(kind.kind, "{why}", why=first_line(error)) from error
    if fault := parts.left() or message.fault():
        raise malformed(kind.kind, "{fault}", fault=fault)
    return message


_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def malformed(message: str, fault: str, /, **facts: Any) -> UploadError:
    """Return the error that a message is refused with; ``fault`` is a sentence with the facts' names in braces."""
    return UploadError("A message {message!r} was refused: " + fault + ".", message=message, **facts)


class _Parts:
    """The tensors of a message while it is written or read: under ``WHAT/NUMBER/HALF/NAME``, and training losses."""

    def __init__(self, split: Split | None = None) -> None:
        self.split, self.kind = split, ""
        self.losses: list[float] = []
        self.sent: list[Sent] = []
        self._sent: dict[tuple[tuple[str, int], ...], int] = {}
        self._count, self._tensors = Counter[str](), Params()
        self._unread: dict[tuple[str, str], dict[str, Params]] = {}

    def put(self, what: str, **halves: Params) -> int:
        """Take tensors in; return the number that stands for them."""
        number = self._count[what]
        self._count[what] += 1
        for half, tensors in halves.items():
            self._tensors |= {f"{what}/{number}/{half}/{name}": value for name, value in tensors.items()}
        return number

    def put_sent(self, sent: Sent) -> int:
        """Take in what a client is sent, once where the very same tensors are sent to several."""
        same = tuple((name, id(value)) for name, value in sent.flat.items())
        if same not in self._sent:
            self._sent[same] = self.put("sent", params=sent.params, state=sent.state)
        return self._sent[same]

    def put_loss(self, loss: float) -> int:
        """Take a loss in."""
        self.losses.append(loss)
        return len(self.losses) - 1

    def written(self) -> Params:
        """Return all that was taken in."""
        losses = torch.tensor(self.losses, dtype=torch.float64)
        return {**self._tensors, **({"losses": losses} if self.losses else {})}

    def read(self, kind: str, tensors: Params) -> None:
        """Take the tensors of a message that came."""
        self.kind = kind
        for full, value in tensors.items():
            what, _, rest = full.partition("/")
            number, _, rest = rest.partition("/")
            half, _, name = rest.partition("/")
            if full == "losses" and value.dtype == torch.float64 and value.dim() == 1:
                self.losses = value.tolist()
            elif not name:
                raise malformed(kind, "the tensor {name!r} has no place in it", name=full)
            else:
                self._unread.setdefault((what, number), {}).setdefault(half, {})[name] = value

    def take(self, what: str, number: int, *halves: str) -> list[Params]:
        """Return what ``put`` took in; numbers stand in the order of their first mention."""
        if number != self._count[what]:
            raise malformed(
                self.kind,
                "{what} should be number {wanted}, is {number}",
                what=what,
                wanted=self._count[what],
                number=number,
            )
        self._count[what] += 1
        found = self._unread.pop((what, str(number)), {})
        if wrong := found.keys() - set(halves):
            name = f"{what}/{number}/{min(wrong)}/"
            raise malformed(self.kind, "the tensor {name!r}… has no place in it", name=name)
        return [found.get(half, {}) for half in halves]

    def take_loss(self, number: int) -> float:
        """Return what ``put_loss`` took in."""
        if number != self._count["losses"] or number >= len(self.losses):
            raise malformed(
                self.kind,
                "losses should be float64 numbers, one for each answer; {number} is not there",
                number=number,
            )
        self._count["losses"] += 1
        return self.losses[number]

    def left(self) -> str:
        """Return which tensor nothing in the message has named, or an empty text."""
        if len(self.losses) > self._count["losses"]:
            return f"losses should be {self._count['losses']} float64 numbers, are {len(self.losses)}"
        first = next(iter(self._unread), None)
        return "" if first is None else f"the tensor {shown('/'.join(first))}/… has no place in it"


def _coded(
    form: Any, read: Callable[[Any, _Parts], Any], write: Callable[[Any, _Parts], Any]
) -> GetPydanticSchema:
    """Return how a field travels: as a ``form``, which ``write`` makes of it and ``read`` takes back."""

    def schema(_: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.with_info_after_validator_function(
            lambda value, info: read(value, info.context),
            handler.generate_schema(form),
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda value, info: write(value, info.context), info_arg=True
            ),
        )

    return GetPydanticSchema(schema)


def _read_sent(number: int, parts: _Parts) -> Sent:
    if number < len(parts.sent):
        return parts.sent[number]
    params, state = parts.take("sent", number, "params", "state")
    sent = Sent(params=params, state=state)
    if wrong := [name for name in params if is_state(name)]:
        raise malformed(parts.kind, "the parameter {name!r} has the name of a state", name=wrong[0])
    if (name := nonfinite(sent.flat)) is not None:
        raise malformed(parts.kind, "{name!r} holds a NaN or an infinity", name=name)
    parts.sent.append(sent)
    return sent


def _read_upload(said: tuple[int, float] | None, parts: _Parts) -> Upload | None:
    if said is None:
        return None
    number, weight = said
    deltas, rows = parts.take("upload", number, "deltas", "rows")
    if parts.split is None:
        raise malformed(parts.kind, "an upload has no place in it")
    return parts.split.arrived(deltas, weight, rows)


def _write_upload(upload: Upload | None, parts: _Parts) -> tuple[int, float] | None:
    """Return the number of an upload's tensors, and its weight.

    Tensors stand in the order of their names: any other could tell of what made them.
    """
    if upload is None:
        return None
    deltas, rows = (dict(sorted(tensors.items())) for tensors in (upload.deltas, upload.rows))
    return parts.put("upload", deltas=deltas, rows=rows), upload.weight


def _read_fault(said: tuple[str, str] | None, parts: _Parts) -> Fault | None:
    return None if said is None else FAULTS[said[0]](said[1])


def _write_fault(fault: Fault | None, parts: _Parts) -> tuple[str, str] | None:
    if fault is None:
        return None
    return next(name for name, kind in FAULTS.items() if isinstance(fault, kind)), str(fault)


def _read_vector(number: int | None, parts: _Parts) -> Tensor | None:
    if number is None:
        return None
    (found,) = parts.take("vector", number, "lanes")
    vector = found.get("all")
    if len(found) != 1 or vector is None or vector.dtype != torch.int64 or vector.dim() != 1:
        raise malformed(parts.kind, "its vector should be int64 (lanes,)")
    return vector


VECTOR = _coded(
    Count | None,
    _read_vector,
    lambda vector, parts: None if vector is None else parts.put("vector", lanes={"all": vector}),
)
LINE = _coded(tuple[Count, Count, Part], lambda said, _: Line(*said), lambda line, _: tuple(line))
NAMED = _coded(
    tuple[Count, Count, Count] | None,
    lambda said, _: None if said is None else Named(*said),
    lambda named, _: None if named is None else tuple(named),
)
SENT = _coded(Count, _read_sent, lambda sent, parts: parts.put_sent(sent))
UPLOAD = _coded(tuple[Count, float] | None, _read_upload, _write_upload)
LOSS = _coded(Count, lambda number, parts: parts.take_loss(number), lambda loss, parts: parts.put_loss(loss))
FAULT = _coded(tuple[Literal["broken", "failed", "malformed", "lost"], str] | None, _read_fault, _write_fault)


@dataclass(frozen=True, kw_only=True)
class Hello(Message):
    """The first message to a node: which run, which experiment.

    Attributes:
        protocol: ``PROTOCOL``.
        run: the run's id.
        code: ``fingerprint.code()`` of the server: version and digest of the installed source.
        experiment: the configuration's text, the server's ``[data]`` reader left out.
        seed: what devices' streams follow: the run's, or another where devices must not know it.
        simulated_noise: noise on uploads follows the seed too (tests alone); else it comes from the system.
        continue_from: the id of a run whose private states this one begins with; empty: none.
        summarise: the rules by which the device tells of its data for the encoding.
        secure: the numbers of what it tells leave in secure sums alone, and this is the share of the devices that must
            answer at each step; None: they leave in the clear.
    """

    kind: ClassVar[str] = "hello"
    protocol: int
    run: str
    code: str
    experiment: str
    seed: int
    simulated_noise: bool = False
    continue_from: str = ""
    summarise: dict[str, Any] = field(default_factory=dict)
    secure: Annotated[float, Field(gt=0.5, le=1)] | None = None


@dataclass(frozen=True, kw_only=True)
class Here(Message):
    """A node's answer to ``Hello``: whose data it has, and what it tells of them; with ``hello.secure`` no number."""

    kind: ClassVar[str] = "here"
    run: str
    clients: list[str]
    summary: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Encode(Message):
    """The second message: how data become numbers, and what the experiment must be; sent again to a node that joins.

    Attributes:
        run: the run's id.
        hello: the first message, as a node may be another process by now.
        encoding: as JSON.
        fingerprint: a digest of each part, ``fingerprint.parts``.
        versions: with ``hello.continue_from`` those of the node's clients that its server accepted last.
    """

    kind: ClassVar[str] = "encoding"
    run: str
    hello: Hello
    encoding: dict[str, Any]
    fingerprint: dict[str, str]
    versions: dict[str, Annotated[Line, LINE]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EncodingFits(Message):
    """A node's answer to ``Encode``: the clients that take part, each with its numbers of examples by partition.

    ``unfit`` are those whose data cannot be used.
    """

    kind: ClassVar[str] = "fits"
    run: str
    clients: dict[str, dict[str, int]]
    unfit: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Refused(Message):
    """A node's answer to a message that it does not serve; nothing has changed there.

    ``busy``: an earlier message is still being served there; this one, said again later, may be. ``failed``: the method
    or the model failed on it.
    """

    kind: ClassVar[str] = "refused"
    run: str
    reason: str
    busy: bool = False
    failed: bool = False


@dataclass(frozen=True, kw_only=True)
class Judging(Written):
    """What of a client is judged: models, side by side on its examples of a partition."""

    split: Partition
    models: Annotated[tuple[Model, ...], Field(min_length=1)]


@dataclass(frozen=True, kw_only=True)
class Ask(Written):
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
class Portion(Written):
    """What of a node's summary goes into a secure sum, see ``remote.told``.

    Attributes:
        what: its numbers, the table of its words, or names of words.
        cells: of the table.
        wanted: with ``names`` of each its hash (column, high, low), and how many bytes it has.
    """

    what: Literal["numbers", "words", "names"] = "numbers"
    cells: Count = 0
    wanted: tuple[tuple[Count, Count, Count, Count], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Prepare(Message):
    """A step of a secure sum over what nodes tell of their data, before the encoding, see ``remote.masking``.

    Attributes:
        run: the run's id.
        hello: the first message, as a node may be another process by now.
        party: one of its clients, which stands for the node in the sum.
        portion: what is summed.
        ask: the step.
    """

    kind: ClassVar[str] = "prepare"
    run: str
    hello: Hello
    party: str
    portion: Portion
    ask: Ask


@dataclass(frozen=True, kw_only=True)
class Prepared(Message):
    """A node's answer to ``Prepare``.

    Attributes:
        run: the run's id.
        step, sum: of the message.
        made: what came of the step.
        vector: with ``masked`` the masked vector, int64 (lanes,).
    """

    kind: ClassVar[str] = "prepared"
    run: str
    step: Step
    sum: Count
    made: dict[str, str] = field(default_factory=dict)
    vector: Annotated[Tensor | None, VECTOR] = None


@dataclass(frozen=True, kw_only=True)
class ClientOrder(Written, Order):
    """What the server asks of one client, and which of its private versions it builds on.

    Attributes:
        round, client, sent, progress: as of any order; the progress counts if it trains.
        version: how many of the client's rounds the server has accepted in this run; 0: it starts from the default.
        attempt: of the message whose answer made this version, see ``Work.attempt``; 0 for version 0.
        share: z = c_k / Σ c of the round that made this version, where clients accept by it (FURL eq. 6); else 0.
        best: which of its versions counted after the best round so far, which the device keeps; None: there is none.
        train: train, stage version + 1 and upload; False: it does not.
        adapt: adapt as the method says, before judging; the device keeps the result, and nothing of it is uploaded. The
            server has no say in which examples it adapts on, or to which of its parameters: with that it could tell
            single examples apart.
        judge: what is judged, before training.
        asks: steps of secure sums.
    """

    round: Count
    sent: Annotated[Sent, SENT]
    progress: Part = 0.0
    version: Count = 0
    attempt: Count = 0
    share: Part = 0.0
    best: Annotated[Named | None, NAMED] = None
    train: bool = True
    adapt: bool = False
    judge: tuple[Judging, ...] = ()
    asks: tuple[Ask, ...] = ()

    @property
    def begins(self) -> bool:
        """Whether the client begins at the version, and so learns which was accepted; a mere step needs no state."""
        return self.train or self.adapt or bool(self.judge) or not self.asks

    def fault(self) -> str:
        """Return why its fields do not go together, or an empty text."""
        best = self.best or Named(0)
        for one in (self, best):
            if bool(one.version) != bool(one.attempt):
                return f"version {one.version} of client {shown(self.client)} is of attempt {one.attempt}"
        later = best.round > self.round or best.version > self.version
        if later or (best.version == self.version) != (best.attempt == self.attempt):
            own = (self.round, self.version, self.attempt)
            return f"client {shown(self.client)} is at (round, version, attempt) {own}, and at its best at {tuple(best)}"
        return ""


@dataclass(frozen=True, kw_only=True)
class Work(Message):
    """A round's message to a node, for all of its clients.

    Attributes:
        run: the run's id.
        fingerprint: of the experiment, as ``hello`` agreed on it.
        encoding: the encoding's digest.
        round: the round's number, that of each order.
        attempt: a number that the server gives to no other message of the run but a repetition of this one, in
            [1, 2⁶³). What is staged bears it, and so does the next order that builds on it: a late repetition or a
            server that was rolled back can't mix two trainings of the same version.
        orders: each client once.
        leaves: what of judging may leave; the node's own rule may allow less.
    """

    kind: ClassVar[str] = "work"
    run: str
    fingerprint: str
    encoding: str
    round: Count
    attempt: Annotated[int, Field(ge=1, lt=2**63)]
    orders: tuple[ClientOrder, ...]
    leaves: Leaves = "sums"

    def fault(self) -> str:
        """Return why its fields do not go together, or an empty text."""
        if rounds := {one.round for one in self.orders} - {self.round}:
            return f"an order is of round {min(rounds)}, and the message of round {self.round}"
        if fault := next(filter(None, (one.fault() for one in self.orders)), ""):
            return fault
        return _twice((one.client for one in self.orders), "orders")


@dataclass(frozen=True, kw_only=True)
class ClientAnswer(Written, Answer):
    """What comes back from a client on another machine."""

    upload: Annotated[Upload | None, UPLOAD] = None
    loss: Annotated[float, LOSS] = float("nan")
    fault: Annotated[Fault | None, FAULT] = None


@dataclass(frozen=True, kw_only=True)
class ResultHeader(Written):
    """What is said of a result of judging beside its numbers.

    Attributes:
        split: of which part the examples were.
        task, label, name: the task's kind, label and name.
        models, leaves: as of ``Judged``.
        clients: with tallies the client of each row, an empty text where a row is a sum; with examples the ids that
            clients' numbers stand for.
        columns: the number of its columns among the message's tensors.
    """

    split: Partition
    task: Annotated[str, Field(pattern=f"^({'|'.join(KINDS)})$")]
    label: str
    name: str | None
    models: Annotated[tuple[Model, ...], Field(min_length=1)]
    leaves: Leaves
    clients: list[str]
    columns: Count


WHOLE = ("people", "count", "right", "agreed", "scores")
"""Columns of a tally that hold whole numbers of at least 0."""
POSITIVE = ("loss", "absolute", "accuracy")
"""Columns of at least 0, or NaN, that are no whole numbers."""
EXAMPLE = ("client", "loss", "score", "label", "row")
MOST, MOST_WHOLE = 1e300, 2**53
"""Numbers beyond are no sums of examples, and those of several nodes would have no room."""
NO_LABELS = (torch.bfloat16, torch.complex64)


def _write_result(found: tuple[Partition, Judged], parts: _Parts) -> ResultHeader:
    """Return what is said of a result; its columns are a tally's, or ``M/COLUMN`` of each model's examples."""
    split, judged = found
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
    return ResultHeader(
        split=split,
        task=task.kind.name,
        label=task.label,
        name=task.name,
        models=judged.models,
        leaves=judged.leaves,
        clients=clients,
        columns=parts.put("judged", columns=tensors),
    )


def _read_result(header: ResultHeader, parts: _Parts) -> tuple[Partition, Judged]:
    """Return what ``_write_result`` wrote.

    Raises:
        UploadError: names, shapes, types or values are not those of a result.
    """
    task, models = Task(KINDS[header.task], header.label, header.name), header.models
    (tensors,) = parts.take("judged", header.columns, "columns")
    if len(set(models)) < len(models):
        raise _refused_result("a model stands twice in {models}", models=list(models))
    examples: tuple[Judgement, ...] = ()
    table = None
    if header.leaves == "examples":
        examples = _examples(task, len(models), len(header.clients), tensors)
    else:
        table = _table(task, models, header.clients, tensors)
    roster = header.clients if examples else ()
    return header.split, Judged(
        task=task, models=models, leaves=header.leaves, table=table, examples=examples, roster=roster
    )


RESULT = _coded(ResultHeader, _read_result, _write_result)


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
        raise _refused_result("{fault}", fault=fault)
    for name, shape in shapes.items():
        value = tensors[name]
        _check(name, value, shape, torch.int64 if name in WHOLE else torch.float64)
        _check_range(name, value, at_least_0=name in WHOLE or name in POSITIVE)
    if bool((tensors["right"] > tensors["count"][:, None]).any()):
        raise _refused_result("'right' is more than 'count'")
    if bool(((tensors["people"] == 0) & (tensors["count"] > 0)).any()):
        raise _refused_result("'count' tells of examples of nobody")
    columns: dict[str, Any] = {name: tensors[name].numpy() for name in ROWS}
    return Tallies(task=task, models=models, clients=tuple(clients), **columns)


def _examples(task: Task, models: int, clients: int, tensors: Params) -> tuple[Judgement, ...]:
    wanted = [f"{m}/{name}" for m in range(models) for name in EXAMPLE]
    if fault := difference_of_names(wanted, tensors):
        raise _refused_result("{fault}", fault=fault)
    count = len(tensors["0/client"]) if tensors["0/client"].dim() else -1
    for name in wanted:
        value, column = tensors[name], name.partition("/")[2]
        if column == "label" and value.dtype in NO_LABELS:
            raise _refused_result("{name!r} should be real numbers, is {dtype}", name=name, dtype=value.dtype)
        kind = {"client": torch.int64, "row": torch.int64, "label": value.dtype}
        _check(name, value, (count,), kind.get(column, torch.float64))
        if column == "loss":
            _check_range(name, value, at_least_0=True)
        elif column == "score" and (fault := task.kind.score_fault(value)):
            raise _refused_result("{name!r} {fault}", name=name, fault=fault)
    found = []
    for m in range(models):
        columns = [tensors[f"{m}/{name}"].numpy() for name in EXAMPLE]
        if count and not (columns[0].min() >= 0 and columns[0].max() < clients):
            raise _refused_result("an example is of none of the {clients} clients", clients=clients)
        found.append(Judgement.joined(task, [columns]))
    return tuple(found)


def _check(name: str, value: torch.Tensor, shape: tuple[int, ...], kind: torch.dtype) -> None:
    if tuple(value.shape) != shape or value.dtype != kind:
        raise _refused_result(
            "{name!r} should be {shape} {kind}, is {got} {got_dtype}",
            name=name,
            shape=shape,
            kind=kind,
            got=tuple(value.shape),
            got_dtype=value.dtype,
        )


def _check_range(name: str, value: torch.Tensor, *, at_least_0: bool) -> None:
    """Raise UploadError at a number that comes of no examples; a model that diverged has NaN and infinity."""
    if at_least_0 and bool((value < 0).any()):
        raise _refused_result("{name!r} holds a number below 0", name=name)
    if value.is_floating_point():
        if bool(((value.abs() > MOST) & ~value.isinf()).any()):
            raise _refused_result("{name!r} holds a number beyond {most:g}", name=name, most=MOST)
    elif bool((value > MOST_WHOLE).any()):
        raise _refused_result("{name!r} holds a number beyond 2^53", name=name)


def _refused_result(fault: str, /, **facts: Any) -> UploadError:
    return UploadError("A result of judging was refused: " + fault + ".", **facts)


@dataclass(frozen=True, kw_only=True)
class Answers(Message):
    """What a node answers to ``Work``.

    Attributes:
        run, round, attempt: of the message.
        answers: one for each order, in their order; of a client that was only judged without upload and fault. A
            ``LostError`` says that its private state is not the one that the order wants, or can't be read.
        judged: by partition, the results of each task; those of clients that are lost are not in them.
        made: by client and step, what came of steps of secure sums.
    """

    kind: ClassVar[str] = "answers"
    run: str
    round: Count
    attempt: Count
    answers: tuple[ClientAnswer, ...]
    judged: tuple[Annotated[tuple[Partition, Judged], RESULT], ...] = ()
    made: Mapping[str, Mapping[Step, Mapping[str, str]]] = field(default_factory=dict)

    def fault(self) -> str:
        """Return why its fields do not go together, or an empty text."""
        both = [one.client for one in self.answers if one.upload is not None and one.fault is not None]
        if both:
            return f"of client {shown(both[0])} there are an upload and a fault"
        clients = [one.client for one in self.answers]
        if strangers := self.made.keys() - set(clients):
            return f"steps of client {shown(min(strangers))} are in it, and no answer"
        return _twice(clients, "answers")


def _twice(clients: Iterable[str], what: str) -> str:
    twice = [client for client, count in Counter(clients).items() if count > 1]
    return f"client {shown(twice[0])} stands in its {what} twice" if twice else ""


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
            raise UploadError("The order is of another {what} than this device has agreed on.", what=what)
    for sent in {id(one.sent): one.sent for one in work.orders if one.begins}.values():
        if fault := misfit(wanted, sent.params) or mistyped(wanted, sent.params):
            raise UploadError("The parameters that were sent do not fit the model: {fault}.", fault=fault)
    if len(progress := sorted({one.progress for one in work.orders if one.train})) > 1:
        got = " and ".join(map(str, progress))
        raise UploadError(
            "A message was refused: the orders to train must have one progress; got {got}.", got=got
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
    clients = [one.client for one in work.orders]
    wanted = (work.run, work.round, work.attempt, clients)
    got = (answers.run, answers.round, answers.attempt, [answer.client for answer in answers.answers])
    if wanted != got:
        raise UploadError(
            "{refused} are not to these orders; wanted (run, round, attempt, clients) {wanted}, got {got}.",
            refused=refused,
            wanted=wanted,
            got=got,
        )
    asked = {(judging.split, judging.models) for one in work.orders for judging in one.judge}
    seen = set()
    for split, judged in answers.judged:
        key = (split, judged.task)
        fine = (split, judged.models) in asked and judged.task in tasks and key not in seen
        fine = fine and LEAVES.index(judged.leaves) <= LEAVES.index(work.leaves)
        if not (fine and _of_these(judged, clients)):
            raise UploadError(
                "{refused} hold a result of judging {split!r} that nobody asked for.",
                refused=refused,
                split=split,
            )
        seen.add(key)


def _of_these(judged: Judged, orders: Collection[str]) -> bool:
    """Return whether a result is of these clients, each once at most, or of no more than there are."""
    of_whom, people = judged.tallies.clients, set(orders) if judged.leaves != "sums" else {""}
    once = set(of_whom) <= people and len(set(of_whom)) == len(of_whom)
    return once and sum(judged.tallies.people.tolist()) <= len(orders)
