"""One conversation with nodes: orders go out, a message for each node, and answers come in until the deadline.

An order can be repeated: a message that was lost is sent again, and a client that turns up on another node is asked
again there, always as the same attempt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fedkeep.core.errors import DroppedError, FailedError, LateError, LostError, UploadError
from fedkeep.core.packet import Packet
from fedkeep.core.params import nbytes
from fedkeep.core.tensor_file import Filed, TensorFile
from fedkeep.engines import Answer, Judged, Leaves
from fedkeep.remote.events import Events
from fedkeep.remote.messages import (
    Answers,
    ClientOrder,
    Refused,
    Step,
    Work,
    check_answers,
    message_of,
    packet_of,
)
from fedkeep.remote.nodes import Nodes, WaitingNotice, some_of
from fedkeep.split import Split, Upload
from fedkeep.tasks import Task

MOST_REFUSALS = 2
"""Refusals of a client's order until the client sits out: after the first its node is told of the run anew."""
BUSY = 10
"""A busy node is asked again after this part of the time that an answer may take."""
HELD = 16 << 20
"""Bytes of uploads that wait in memory for their turn; more wait in a temporary file."""


@dataclass(frozen=True, kw_only=True)
class ExchangeRules:
    """What a federation's server and devices have agreed on, and what the server puts up with.

    Attributes:
        run, fingerprint, encoding: as in ``Work``.
        split: the method's; uploads with private names are refused.
        tasks: what is judged.
        leaves: what of judging the server asks for.
        poll: seconds between looks for new nodes while answers are awaited.
        again: seconds until an order is sent again that nobody answered; it doubles each time.
    """

    run: str
    fingerprint: str
    encoding: str
    split: Split
    tasks: Sequence[Task]
    leaves: Leaves = "sums"
    poll: float = 1.0
    again: float = 600.0


@dataclass
class _SentMessage:
    node: str
    orders: Mapping[str, ClientOrder]
    since: float
    patience: float

    @property
    def size(self) -> int:
        """About how many bytes its answer has: as many as what its clients are to train."""
        return sum(nbytes(order.sent.params) for order in self.orders.values() if order.train)


class Shelf:
    """Uploads that wait for their turn in a sum, by client: so many in memory, the others in a ``TensorFile``."""

    def __init__(self) -> None:
        self._here: dict[str, Upload] = {}
        self._there: dict[str, tuple[Upload, list[dict[str, Filed]]]] = {}
        self._file: TensorFile | None = None
        self._held = 0

    def put(self, client: str, upload: Upload) -> None:
        """Keep an upload."""
        if self._held + upload.nbytes <= HELD:
            self._here[client] = upload
            self._held += upload.nbytes
            return
        file = self._file = self._file or TensorFile()
        parts = [{n: file.put(v) for n, v in part.items()} for part in (upload.deltas, upload.rows)]
        self._there[client] = upload.but({}, {}), parts

    def take(self, client: str) -> Upload | None:
        """Return a client's upload, which is kept no more; None: there is none."""
        if client in self._here:
            self._held -= self._here[client].nbytes
            return self._here.pop(client)
        if client not in self._there:
            return None
        upload, parts = self._there.pop(client)
        return upload.but(*({n: filed.load() for n, filed in part.items()} for part in parts))


@dataclass
class Exchange:
    """Orders on their way.

    Attributes:
        rules: of the federation.
        nodes: reaches the clients.
        events: a log of what goes wrong.
        round, attempt: of the messages.
        orders: by client.
        deadline: the time at which nothing more is awaited.
        enough: uploads after which nothing more is awaited; None: all are.
        dropped: returns the clients that the run's owner has dropped: nobody asks them, or waits for them.
        gone: clients that were on no node at an earlier deadline: nobody waits for them while they still are.
        open: orders that were not answered yet.
        found: answers that came, by client, until they are fetched; their uploads are on the shelf.
        judged: by partition, what came of judging.
        heard: the clients that answered in any way.
        made: by client, what came of its steps of secure sums.
    """

    rules: ExchangeRules
    nodes: Nodes
    events: Events
    round: int
    attempt: int
    orders: Mapping[str, ClientOrder]
    deadline: float = math.inf
    enough: int | None = None
    dropped: Callable[[], Collection[str]] = tuple
    gone: Collection[str] = ()
    open: dict[str, ClientOrder] = field(default_factory=dict)
    found: dict[str, Answer] = field(default_factory=dict)
    judged: list[tuple[str, Judged]] = field(default_factory=list)
    heard: set[str] = field(default_factory=set)
    made: dict[str, Mapping[Step, Mapping[str, str]]] = field(default_factory=dict)
    _sent: dict[str, _SentMessage] = field(default_factory=dict)
    _refusals: dict[str, int] = field(default_factory=dict)
    _repeats: dict[str, int] = field(default_factory=dict)
    _busy: dict[str, float] = field(default_factory=dict)
    _fails: dict[str, int] = field(default_factory=dict)
    _taken: int = 0
    _told: bool = False
    _telling: WaitingNotice = field(init=False)
    _shelf: Shelf = field(init=False)

    def __post_init__(self) -> None:
        self._shelf = Shelf()
        self._telling = WaitingNotice(self.nodes.transport.now, self.rules.again / BUSY)
        self.open = dict(self.orders)
        self._leave_out()
        self._send(self.open)

    @property
    def closed(self) -> bool:
        """Whether nothing more is awaited."""
        return self.late or (self.enough is not None and self._taken >= self.enough)

    @property
    def late(self) -> bool:
        """Whether its deadline has passed."""
        return self.nodes.transport.now() >= self.deadline

    def answer(self, client: str) -> Answer:
        """Return a client's answer; wait for it until the conversation is closed."""
        while client in self.open and not self.closed:
            self.step()
        if client in self.found:
            return replace(self.found.pop(client), upload=self._shelf.take(client))
        return Answer(client=client, fault=self._missing(client))

    def finish(self) -> None:
        """Wait for all that is still awaited."""
        while self.open and not self.closed:
            self.step()

    def step(self) -> None:
        """Hear what has come, send what must be, and wait a little if there was nothing."""
        if self.poll() or not self.open or self.closed:
            return
        transport = self.nodes.transport
        transport.wait(max(0.0, min(self.rules.poll, self.deadline - transport.now())))

    def poll(self) -> bool:
        """Hear what has come; send to clients that are at a new place, or were sent something that nobody answered."""
        transport = self.nodes.transport
        heard = False
        for tickets in self._portions():
            for reply in transport.receive(tickets):
                heard = True
                sent = self._sent.pop(reply.ticket, None)
                if sent is not None:
                    self._hear(sent, reply.packet, reply.reason)
        self.nodes.look()
        for sent in self._sent.values():
            if transport.now() >= sent.since + sent.patience:
                said = (
                    f"Node {sent.node!r} did not answer for {sent.patience:g} s; its orders are sent again."
                )
                self._repeats[sent.node] = self._repeats.get(sent.node, 0) + 1
                sent.patience = math.inf  # its answer is taken still, if it comes
                self.events.note("again", said, node=sent.node)
        self._leave_out()
        self._send(self.open)
        if self.open and not self.closed and self._telling.due():
            self.events.note("waiting", self._awaited())
        busy = any(until > transport.now() for until in self._busy.values())
        if not self._sent and not busy and self.open and not self._told:
            self._told = True
            some = ", ".join(sorted(self.open)[:3])
            self.events.note(
                "again", f"{len(self.open)} clients are on no node, e.g. {some}; waiting for them."
            )
        return heard

    def _portions(self) -> list[list[str]]:
        """Return the tickets, so many together that their answers are about as large as what is held in memory."""
        found, left = list[list[str]](), 0
        for ticket, sent in self._sent.items():
            left -= sent.size
            if not found or left < 0:
                found.append([])
                left = HELD - sent.size
            found[-1].append(ticket)
        return found

    def _leave_out(self) -> None:
        """Wait no longer for clients that take no part, were dropped, or are still gone."""
        dropped = self.dropped()
        for client in list(self.open):
            fault: LostError | None = None
            if client in dropped:
                fault = DroppedError("Client {client!r} was dropped by the run's owner.", client=client)
            elif (reason := self.nodes.refusal(client)) is not None:
                fault = LostError("Client {client!r} takes no part: {why}", client=client, why=reason)
            elif client in self.gone and client not in self.nodes.place:
                fault = LostError(
                    "Client {client!r} is on no node since an earlier round's deadline.", client=client
                )
            if fault is not None:
                del self.open[client]
                self.found[client] = Answer(client=client, fault=fault)

    def _awaited(self) -> str:
        """Return who has not answered, for people."""
        place, repeats = self.nodes.place, sum(self._repeats.values())
        asked = {place[client] for client in self.open if client in place}
        nowhere = [client for client in self.open if client not in place]
        parts = [f"no answer from {some_of(asked)}"] if asked else []
        parts += [f"on no node: {some_of(nowhere)}"] if nowhere else []
        parts += [f"orders were sent again {repeats} times"] if repeats else []
        return (
            f"Round {self.round}: waiting for {len(self.open)} of {len(self.orders)} clients for "
            f"{self._telling.waited:.0f} s: {'; '.join(parts)}."
        )

    def _send(self, orders: Mapping[str, ClientOrder]) -> None:
        by_node: dict[str, dict[str, ClientOrder]] = {}
        now = self.nodes.transport.now()
        awaited = {
            (s.node, client) for s in self._sent.values() if s.patience < math.inf for client in s.orders
        }
        for client, order in orders.items():
            node = self.nodes.place.get(client)
            if node is not None and (node, client) not in awaited and self._busy.get(node, 0.0) <= now:
                by_node.setdefault(node, {})[client] = order
        messages = [(node, packet_of(self._work(some))) for node, some in by_node.items()]
        tickets = self.nodes.transport.send(messages) if messages else []
        for ticket, (node, some) in zip(tickets, by_node.items(), strict=True):
            self._sent[ticket] = _SentMessage(
                node, some, now, self.rules.again * 2 ** self._repeats.get(node, 0)
            )

    def _work(self, orders: Mapping[str, ClientOrder]) -> Work:
        rules = self.rules
        return Work(
            run=rules.run,
            fingerprint=rules.fingerprint,
            encoding=rules.encoding,
            round=self.round,
            attempt=self.attempt,
            orders=tuple(orders.values()),
            leaves=rules.leaves,
        )

    def _hear(self, sent: _SentMessage, packet: Packet | None, reason: str) -> None:
        orders = {client: order for client, order in sent.orders.items() if client in self.open}
        if not orders:
            return
        if packet is None:
            self.events.note("again", f"Node {sent.node!r}: {reason}.", node=sent.node)
            self.nodes.forget(sent.node, reason)  # if it is there, it is asked again as soon as it says so
            fails = self._fails[sent.node] = self._fails.get(sent.node, 0) + 1
            if fails > 1:  # what fails at each order is not asked without end
                self._busy[sent.node] = self.nodes.transport.now() + min(2.0**fails, self.rules.again)
            return
        self._fails.pop(sent.node, None)
        try:
            if packet.header.get("kind") == "refused":
                refused = message_of(packet, Refused)
                if refused.busy:
                    # It serves an earlier message, whose answer is taken if it was this server's.
                    said = f"Node {sent.node!r} is busy with an earlier message: {refused.reason}"
                    self.events.note("again", said, node=sent.node)
                    self._busy[sent.node] = self.nodes.transport.now() + self.rules.again / BUSY
                else:
                    self._refused(sent.node, orders, refused)
                return
            answers = message_of(packet, Answers, self.rules.split)
            check_answers(answers, self._work(sent.orders), self.rules.tasks, sent.node)
        except UploadError as error:
            for client in orders:
                self._settle(client, Answer(client=client, fault=error))
            return
        for answer in answers.answers:
            if answer.client in orders:
                self.made[answer.client] = answers.made.get(answer.client, {})
                self._settle(answer.client, answer)
        if len(orders) == len(sent.orders):
            self.judged += answers.judged
        elif answers.judged:  # some were judged before, and are in this sum again
            left = ", ".join(sorted(orders))
            said = f"Node {sent.node!r} judged {left} together with clients that another node has judged; left out."
            self.events.note("lost", said, node=sent.node)

    def _refused(self, node: str, orders: Mapping[str, ClientOrder], refused: Refused) -> None:
        reason, kind = refused.reason, FailedError if refused.failed else UploadError
        self.events.note("refused", f"Node {node!r} refused its orders: {reason}", node=node)
        for client in orders:
            self._refusals[client] = self._refusals.get(client, 0) + 1
            if self._refusals[client] >= MOST_REFUSALS:
                error = kind(
                    "Client {client!r}: its node refused the order: {why}", client=client, why=reason
                )
                self._settle(client, Answer(client=client, fault=error))
        self.nodes.ask_anew(node)

    def _settle(self, client: str, answer: Answer) -> None:
        """Take a client's answer."""
        order = self.open.pop(client)
        fault = answer.fault
        if fault is None and order.train != (answer.upload is not None):
            wrong = "no upload came" if order.train else "an upload came that nobody asked for"
            fault = UploadError(
                "The answer of client {client!r} was refused: {wrong}.", client=client, wrong=wrong
            )
        if fault is not None:
            answer = Answer(client=client, loss=answer.loss, fault=fault)
        elif order.train and self.closed:
            answer = Answer(client=client, fault=self._missing(client))
        elif order.train:
            self._taken += 1
        self.heard.add(client)
        if answer.upload is not None:
            self._shelf.put(client, answer.upload)
        self.found[client] = replace(answer, upload=None)

    def _missing(self, client: str) -> LostError:
        if self.enough is not None and self._taken >= self.enough:
            return LateError(
                "Client {client!r} was not waited for: the first {enough} answers are taken.",
                client=client,
                enough=self.enough,
            )
        if client in self.nodes.place:
            return LateError("Client {client!r} had not answered at the round's deadline.", client=client)
        return LostError("Client {client!r} is on no node.", client=client)
