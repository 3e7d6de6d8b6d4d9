"""What leaves a device before the first round: the summary of its data, asked again with other texts and numbers in rows that
may shape it, and in rows that must not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from fedkeep.audit.findings import Allowed, Finding, Leaving
from fedkeep.audit.report import AuditReport
from fedkeep.data.columns import Rows
from fedkeep.data.preparation import Features, Raw, Rules, Source, Target, Texts
from fedkeep.remote.node import OwnerTerms

CLIENTS, ROWS = 3, 50
"""Clients on the device, and rows of each."""
CANARY = "zqcanaryqz"
TRAINED, JUDGED, OUT = "examples to train on", "examples of valid and test", "opted-out examples"


def with_preparation(
    report: AuditReport, source: Source, rules: Rules, *, secure: bool, allow: Sequence[str] = ()
) -> AuditReport:
    """Return an audit's report with what the summary tells that a device of three of the data's clients makes.

    Args:
        report: of the rounds.
        source: raw data, divided; data that are encoded already tell of no summary.
        rules: of the preparation; a device tells of a counted word only if two of its clients have it.
        secure: whether summaries leave in secure sums alone.
        allow: as of ``audit``.
    """
    if not isinstance(source, Raw):
        return report
    here = replace(rules, clients_a_word_here=max(rules.clients_a_word_here, OwnerTerms.clients_a_word))
    few, allowed = _few(source), Allowed((), tuple(allow))
    before, found = _columns(few, here), list[Finding]()
    for rows, what in _kinds(few):
        for column, after in _columns(_changed(few, rows), here).items():
            if after == before[column]:
                continue
            label, copied = f"summary/{column}", CANARY in repr(after)
            by = "what is told of the data: fedkeep prepare" if what == TRAINED and not copied else ""
            by = by or allowed.by(label, of_client=False)
            how = "a word of one client's alone is named" if copied else ""
            verdict = "declared" if by else "leak"
            found.append(Finding(leaves=label, source=what, verdict=verdict, how=how, by=by))  # type: ignore[arg-type]
    seen = "server (in a sum)" if secure else "server"
    left = [
        Leaving(label=f"summary/{name}", type="table", shape=(), bytes=len(repr(told)), seen_by=seen)
        for name, told in before.items()
    ]
    rounds = [one for one in report.left if one.label != "here/summary"]  # of the audit's own, encoded data
    return replace(report, left=(*left, *rounds), findings=(*found, *report.findings))


def _few(raw: Raw) -> Raw:
    chosen = set(list(raw.ids)[:CLIENTS])
    client = np.asarray([str(one) for one in np.asarray(raw.client, object)])
    rows = [np.flatnonzero(client == one)[:ROWS] for one in sorted(chosen)]
    return raw.taken(np.concatenate(rows))


def _kinds(raw: Raw) -> Iterator[tuple[Rows, str]]:
    """Yield rows of one client: those that shape the summary, and each kind of those that must not."""
    first = np.asarray([str(one) for one in np.asarray(raw.client, object)]) == str(next(iter(raw.ids)))
    trains = np.ones(len(raw), bool) if raw.split is None else np.asarray(raw.split) == "train"
    inside = np.ones(len(raw), bool) if raw.opted_in is None else raw.opted_in
    for chosen, what in ((trains & inside & first, TRAINED), (~trains & inside, JUDGED), (~inside, OUT)):
        if chosen.any():
            yield np.flatnonzero(chosen), what


def _columns(raw: Raw, rules: Rules) -> dict[str, Mapping[str, Any]]:
    return {name: asdict(one) for name, one in raw.summary(rules).columns.items()}


def _changed(raw: Raw, rows: Rows) -> Raw:
    """Return data whose texts and numbers are others in some rows."""
    columns: dict[str, Any] = dict(raw.columns)
    for name, column in columns.items():
        if isinstance(column, Texts):
            texts = list(column.values)
            for row in rows.tolist():
                texts[row] = f"{texts[row]} {CANARY}"
            columns[name] = replace(column, values=texts)
        elif isinstance(column, Target | Features):
            levels = column.levels if isinstance(column, Features) else ()
            named = column.names if isinstance(column, Features) else ("",)
            numbers = [place for place, name in enumerate(named) if name not in levels]
            values = column.values.reshape(len(raw), -1).copy()
            values[rows[:, None], numbers] += 1.0
            columns[name] = replace(column, values=values.reshape(column.values.shape))
    return replace(raw, columns=columns)
