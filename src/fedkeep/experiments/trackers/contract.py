"""What a tracker is, and which of its methods are called when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from fedkeep.core.records import Record

End = Literal["finished", "stopped", "failed"]
"""How a run ended: all rounds done, ended early or by Ctrl-C, or by an error."""


class EndRun(Exception):  # noqa: N818 - it is none
    """Raised by a tracker in ``recorded``: the run ends after this round, which is kept."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a tracker gets of a run before the first record.

    Attributes:
        run: the run's id, the same when it is resumed.
        name: for people.
        folder: the run's folder; None: it has none.
        settings: the run's settings as nested plain data.
        round: rounds finished before; 0 in a new run.
        history: the records of these rounds, whether the tracker has had them or not.
        since: records of this round and later ones are told from now on. A tracker that was stopped in the middle of a
            round may have some of them already, and drops or skips those.
    """

    run: str
    name: str
    folder: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    round: int = 0
    history: Sequence[Record] = ()
    since: int = 1


@runtime_checkable
class Tracker(Protocol):
    """Receives the records of a run. A class of your own needs these three methods, and may have a ``name``."""

    def started(self, facts: Facts) -> None:
        """Take note of a run that begins or goes on."""
        ...

    def recorded(self, records: Sequence[Record]) -> None:
        """Take note of what was measured in a round that is committed, its seconds included.

        Raises:
            EndRun: the run is to end here.
        """
        ...

    def finished(self, how: End) -> None:
        """Take note of the end: ``finished``, ``stopped`` before its last round, or ``failed`` with an error."""
        ...
