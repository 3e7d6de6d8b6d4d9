"""What happened on the way of a federation, beside its records: a line of JSON each, in the run's folder."""

from __future__ import annotations

import datetime
import json
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

LOG = logging.getLogger("fedkeep.events")
"""Gets every event: those that are rare as information, those of single clients and messages as debugging, and of
the clients that a round lacked one line."""
RARE = ("joined", "left", "refused", "round", "began", "adapted", "waiting")
Kind = Literal[
    "joined",
    "moved",
    "left",
    "lost",
    "late",
    "refused",
    "broken",
    "again",
    "round",
    "began",
    "adapted",
    "waiting",
]
"""``joined``: a node was heard of first. ``moved``: a client is on another node. ``left``: a node did not answer, or
said no more. ``lost``, ``late``, ``refused``, ``broken``: a client was missing from a round. ``again``: a message was
sent again. ``round``: of a round as a whole. ``began``: what a run begins with. ``adapted``: how many clients have.
``waiting``: for clients or answers, for how long."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened.

    Attributes:
        time: when, in UTC, by this machine's clock; it is in the form of ISO 8601.
        seconds: since the server was started, by the transport's clock.
        round: the number of the round it happened in.
        kind: what.
        text: for people.
        node, client: who; empty where nobody in particular.
    """

    time: str
    seconds: float
    round: int
    kind: Kind
    text: str
    node: str = ""
    client: str = ""


@dataclass
class Events:
    """All events of a run, in their order.

    Attributes:
        now: the transport's clock.
        today: seconds since 1970.
        path: a file that gets a line of each; None: there is none. It is for people: nothing is read from it, and a
            disk that is full costs events alone.
        round: the round that is on its way.
        said: all since the server started, until ``write_to``; a server that lives long keeps none.
    """

    now: Callable[[], float]
    today: Callable[[], float] = time.time
    path: Path | None = None
    round: int = 0
    said: list[Event] = field(default_factory=list)
    _keeps: bool = True
    _missing: dict[str, str] = field(default_factory=dict)
    _began: float = field(init=False)

    def __post_init__(self) -> None:
        self._began = self.now()

    def note(self, kind: Kind, text: str, *, node: str = "", client: str = "") -> None:
        """Note an event."""
        when = datetime.datetime.fromtimestamp(self.today(), datetime.UTC).isoformat(timespec="milliseconds")
        event = Event(
            time=when,
            seconds=round(self.now() - self._began, 3),
            round=self.round,
            kind=kind,
            text=text,
            node=node,
            client=client,
        )
        if self._keeps:
            self.said.append(event)
        self._write([event])
        LOG.log(logging.INFO if kind in RARE else logging.DEBUG, text)
        if client and kind in ("lost", "late", "broken"):
            self._missing.setdefault(client, text)

    def sum_up(self) -> None:
        """Tell the log, in one line, of the clients that were missing since the last call."""
        for client, text in list(self._missing.items())[:1]:
            count = len(self._missing)
            who = f"{count} clients were missing, e.g." if count > 1 else "a client was missing:"
            LOG.info(f"Round {self.round}: {who} {client!r}. {text}")
        self._missing.clear()

    def write_to(self, path: Path) -> None:
        """Keep events in a file from now on, and those that were said before; a line that was cut short is ended."""
        self.path = path
        try:
            with open(path, "a+b") as file:
                file.seek(max(0, file.tell() - 1))
                if file.read(1) not in (b"", b"\n"):
                    file.write(b"\n")
        except OSError:
            self.path = None
        self._write(self.said)
        self.said, self._keeps = [], False

    def _write(self, events: Iterable[Event]) -> None:
        if self.path is None:
            return
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(event)) + "\n" for event in events)
        except OSError:
            self.path = None
