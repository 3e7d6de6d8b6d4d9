"""How a run across machines goes, for whoever looks: its owner, by its folder, or a site, by its device's file.

Both may be written at the same time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from fedkeep.core.errors import FedkeepError
from fedkeep.core.records import Record, read_records
from fedkeep.core.run_files import read_commit, read_info
from fedkeep.data import SPLITS
from fedkeep.privacy.budget_ledger import FILE as LEDGER
from fedkeep.privacy.budget_ledger import BudgetLedger, marks
from fedkeep.remote.attendance import Attendance, attendance_of
from fedkeep.remote.device_file import LogLine
from fedkeep.report.wording import metric_name, number, size
from fedkeep.tasks.results import MODELS

ROUNDS, FAULTS, MESSAGES = 5, 5, 10
"""The last rounds, faults and messages that are shown."""
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
            ledger = BudgetLedger.read(run / LEDGER, info["run"], marks(info, commit.extra))
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
    for after, values in view.last.items():
        shown = [
            f"{'loss' if split == 'train' else view.metric} on {split} {v:.4g}" for split, v in values.items()
        ]
        lines.append(f"Round {after}: {', '.join(shown)}.")
    up, down = (view.bytes[name] for name in BYTES)
    lines.append(f"{size(up)} have come from clients, {size(down)} have gone to them.")
    if view.epsilon is not None:
        spent, budget = view.epsilon
        lines.append(f"ε {spent:.3g}{f' of {budget:g}' if budget is not None else ''} is spent.")
    lines += view.attendance.lines()
    return lines + [f"{when[:19]}  {text}" for when, text in view.faults]


Column = tuple[str, str, str]
"""Split, metric and model of scores."""


class Served(NamedTuple):
    """A message that a device has served, in plain words."""

    when: str
    round: str
    asked: str
    left: str


def served(line: LogLine) -> Served:
    """Return what a message asked and what left."""
    asked = [f"{_some(line.trainings, 'client')} to train"] if line.trainings else []
    if line.judgings:
        asked.append(f"{_some(line.judgings, 'client')} to be judged on {' and '.join(line.splits.split())}")
    asked += [f"{_some(line.adaptations, 'client')} to adapt"] if line.adaptations else []
    if line.bytes is None or line.uploads is None or line.examples is None:
        left = "nothing: the answer was not finished"
    else:
        parts = [_some(line.uploads, "update")] * bool(line.uploads)
        parts += [f"results over {_some(line.examples, 'example')}"] * bool(line.examples)
        left = f"{' and '.join(parts) or 'no values'}, {size(line.bytes)}"
    when = datetime.fromtimestamp(line.time).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    looks_back = not line.trainings and bool(line.judgings or line.adaptations)
    round = f"after round {line.round}" if looks_back else f"round {line.round + 1}"
    return Served(when, round, ", ".join(asked) or "for a step of a sum", left)


def _some(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def scores(lines: Sequence[LogLine]) -> tuple[list[str], list[list[str]]]:
    """Return how models of a device's clients did after the last rounds, as headings and rows.

    Of a round that came again it is the last.
    """
    found: dict[int, dict[Column, float]] = {}
    for line in lines:
        for one in line.scores:  # what is judged rides with the next round
            after = line.round + (one.split == "train")
            found.setdefault(after, {})[one.split, one.metric, one.model] = one.value
    last = {after: found[after] for after in sorted(found)[-ROUNDS:]}
    columns = sorted({column for values in last.values() for column in values}, key=_order)
    heads = [", ".join(filter(None, (metric_name(metric), split, model))) for split, metric, model in columns]
    rows = [
        [str(after), *(number(values.get(one), one[1]) for one in columns)] for after, values in last.items()
    ]
    return ["Round", *heads], rows


def _order(column: Column) -> tuple[int, str, int]:
    split, metric, model = column
    return SPLITS.index(split), metric, list[str](MODELS).index(model) if model else -1
