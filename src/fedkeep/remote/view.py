"""How a run across machines goes, for whoever looks: read from its folder, which may be written at the same time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedkeep.core.errors import FedkeepError
from fedkeep.core.records import Record, read_records
from fedkeep.core.run_files import read_commit, read_info
from fedkeep.privacy.ledger import FILE as LEDGER
from fedkeep.privacy.ledger import Ledger, marks
from fedkeep.remote.attendance import Attendance, attendance_of
from fedkeep.report.wording import size

ROUNDS, FAULTS = 5, 5
"""The last rounds and faults that are shown."""
FAULTY = ("left", "lost", "late", "refused", "broken")
BYTES = ("upload_bytes", "download_bytes")


@dataclass(frozen=True, kw_only=True)
class View:
    """What there is to see of a run.

    Attributes:
        done, rounds: finished rounds, and how many there are to be; None where the run does not say.
        metric: the headline's.
        last: of the last rounds that have records, by round and split, the headline, and the loss of ``train``.
        bytes: up and down, of all rounds.
        attendance: who took part.
        state: by client what was heard of it last: ``here``, ``late``, ``lost``, ``dropped``, ….
        faults: time and text of the last events that are faults.
        epsilon: what the rounds have spent, and of how much; None: no differential privacy.
    """

    done: int
    rounds: int | None
    metric: str
    last: Mapping[int, Mapping[str, float]]
    bytes: Mapping[str, float]
    attendance: Attendance
    state: Mapping[str, str]
    faults: Sequence[tuple[str, str]]
    epsilon: tuple[float, float | None] | None = None


def view_of(run: Path) -> View:
    """Return what there is to see of a run.

    Raises:
        RunError: there is none across machines yet, or it is damaged.
    """
    info = read_info(run)
    commit, attendance = read_commit(run, info), attendance_of(run)
    metric, last = str(info["metric"]), dict[int, dict[str, float]]()
    sums = dict.fromkeys(BYTES, 0.0)
    for record in read_records(run / "records.jsonl", commit.records):
        if record.client is not None:
            continue
        if record.metric in sums:
            sums[record.metric] += record.value * record.n  # a mean over clients
        elif _is_headline(record, metric):
            last.setdefault(record.round, {})[record.split] = record.value
    epsilon = None
    with suppress(FedkeepError):  # it is written apart from the rounds: the next look has it
        if (run / LEDGER).exists():
            ledger = Ledger.read(run / LEDGER, info["run"], marks(info, commit.extra))
            epsilon = ledger.spent(None, ledger.terms.accountant), ledger.terms.budget
    state, faults = dict.fromkeys(map(str, attendance.roster.ids), "here"), []
    for event in _events(run / "events.jsonl"):
        if event["kind"] in FAULTY:
            faults.append((event["time"], event["text"]))
        if event["client"] in state:  # of earlier rounds nobody waits any more
            lasting = event["kind"] in FAULTY and int(event["round"]) >= commit.round - 1
            state[event["client"]] = event["kind"] if lasting else "here"
    state |= dict.fromkeys(attendance.dropped, "dropped")
    return View(
        done=commit.round,
        rounds=info.get("rounds"),
        metric=metric,
        last={number: last[number] for number in sorted(last)[-ROUNDS:]},
        bytes=sums,
        attendance=attendance,
        state=state,
        faults=faults[-FAULTS:],
        epsilon=epsilon,
    )


def _is_headline(record: Record, metric: str) -> bool:
    if record.split == "train":
        return record.metric == "loss"
    return record.split in ("valid", "test") and record.metric == metric


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield events; a line that a full disk or a kill has cut short is left out."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        with suppress(ValueError, TypeError, KeyError):
            event = json.loads(line)
            yield {name: str(event[name]) for name in ("time", "kind", "text", "client", "round")}


def lines_of(view: View) -> list[str]:
    """Return a view without its clients, for people."""
    rounds = f" of {view.rounds}" if view.rounds else ""
    lines = [f"{view.done}{rounds} rounds are finished."]
    for number, values in view.last.items():
        shown = [
            f"{'loss' if split == 'train' else view.metric} on {split} {v:.4g}" for split, v in values.items()
        ]
        lines.append(f"Round {number}: {', '.join(shown)}.")
    up, down = (view.bytes[name] for name in BYTES)
    lines.append(f"{size(up)} have come from clients, {size(down)} have gone to them.")
    if view.epsilon is not None:
        spent, budget = view.epsilon
        lines.append(f"ε {spent:.3g}{f' of {budget:g}' if budget is not None else ''} is spent.")
    lines += view.attendance.lines()
    return lines + [f"{when[:19]}  {text}" for when, text in view.faults]
