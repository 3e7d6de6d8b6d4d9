"""The ledger of a run with differential privacy: every round is written down before anything of it is released.

    budget.jsonl    one line of JSON for the run, then one for each round whose result may have been released

Each line holds the SHA-256 of the line before it, and is flushed to the disk before anything that the round computed
leaves the server's memory. So a run that is killed anywhere has charged at least what it released. A round that comes
again after its charge is charged again, as its noise is another; one that fails, e.g. as no client answers, is not.
A last line without a newline is a write that was cut short: its round was not released. After each charge ``run.json``
notes the ledger's mark, how many charges there are and the last line's hash, before anything of the round is released;
the run's commit notes it too. So a ledger that was cut, changed, swapped or put back to an earlier state is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

from fedkeep.core.errors import BudgetError, ConfigError, RunError, raising
from fedkeep.core.files import append_of_run, sync_folder, whole_or_error
from fedkeep.core.sealed import check_format
from fedkeep.privacy.accounting import Accountant, Release, epsilon, rounds_within

FILE = "budget.jsonl"
FORMAT = 1
ASSUMED = """\
Protected is a client as a whole, all its examples and private values, added or removed.
Protected it is against anybody who sees the federated parameters of every round; N is public.
Each client was in each round by a coin of its own. Who was must stay secret, and so must the run's seed and folder.
The server is trusted: it sees each upload before noise is added.
Losses, metrics and numbers of clients in the records are not covered, nor is choosing settings by them.
Counted are this run's rounds and those of runs that it continues. Other runs on the same clients cost more.
What was agreed on before the first round, of all clients' data and without noise, is not covered: words, label names, \
means and scales.
That a client's fault stopped a run is not covered, nor what a client's predictions say of its private part.
Attacks on the lowest bits of the noise, which is added in double precision, are not covered.""".splitlines()
FROM_A_SEED = "Noise is drawn from a seed: this is a simulation, and protects nobody."
FROM_THE_SYSTEM = "Noise is drawn from the system's source, and nobody can draw it again."


@dataclass(frozen=True, kw_only=True)
class BudgetTerms:
    """What a run's rounds cost, and what they may come to.

    Attributes:
        clients: N, how many clients cohorts are drawn from.
        cohort: the expected number of clients in a round.
        release: what a round gives away.
        delta: δ.
        budget: the largest ε; None: no bound.
        accountant: the one that the budget goes by.
        repeatable: whether noise is drawn from a seed, so that it protects nobody.
        carried: what the runs that this one continues have charged: kinds of rounds, and how many of each.
    """

    clients: int
    cohort: float
    release: Release
    delta: float
    budget: float | None
    accountant: Accountant
    repeatable: bool = False
    carried: tuple[tuple[Release, int], ...] = ()


@dataclass
class BudgetLedger:
    """What a run has charged.

    Attributes:
        terms: of the run.
        path: the file; None: nothing is written, e.g. for a run without a folder.
        rounds: the number of the round of each charge, in order.
        head: the SHA-256 of the last line.
        resumed: whether it was there before, so that rounds may have been released.
        bind: is told the mark after each charge, and keeps it where the run is.
    """

    terms: BudgetTerms
    path: Path | None = None
    rounds: list[int] = field(default_factory=list)
    head: str = ""
    resumed: bool = False
    bind: Callable[[dict[str, Any]], None] = lambda mark: None
    _room: int = 0
    _size: int = 0

    @classmethod
    def open(
        cls, path: Path, run: str, terms: BudgetTerms, known: Sequence[Mapping[str, Any]] = ()
    ) -> BudgetLedger:
        """Open a run's ledger to go on with it, or begin one.

        Args:
            path: its file.
            run: the run's id.
            terms: of the run.
            known: what the run's folder says of it, see ``marks``.

        Raises:
            RunError: the ledger is damaged, missing, of another run, or lacks a charge that the folder knows of.
        """
        content = _read(path) if path.exists() or known else b""
        whole = content[: content.rfind(b"\n") + 1]
        if not whole and not known:
            ledger = cls(terms, path)
            with whole_or_error(path):
                os.truncate(path, 0) if path.exists() else path.touch()
                sync_folder(path.parent)
            ledger._append({"format": FORMAT, "run": run, **asdict(terms)})
            return ledger
        ledger = _parsed(path, whole, run)
        if ledger.terms != terms:
            raise RunError(
                "{file} was begun with {terms}, and the run goes on with {got}. Restore both from the "
                "same copy.",
                file=path,
                terms=ledger.terms,
                got=terms,
            )
        ledger._check(known, whole)
        with whole_or_error(path):
            os.truncate(path, len(whole))
        ledger.resumed = True
        return ledger

    @classmethod
    def read(cls, path: Path, run: str, known: Sequence[Mapping[str, Any]] = ()) -> BudgetLedger:
        """Return a run's ledger; nothing is touched.

        Raises:
            RunError: as for ``open``.
        """
        content = _read(path)
        whole = content[: content.rfind(b"\n") + 1]
        ledger = _parsed(path, whole, run)
        ledger._check(known, whole)
        return ledger

    @property
    def mark(self) -> dict[str, Any]:
        """What the run's folder keeps of the ledger: how many charges there are, and the last line's hash."""
        return {"charges": len(self.rounds), "head": self.head}

    @property
    def before(self) -> int:
        """How many rounds were charged in the runs that this one continues."""
        return sum(count for _, count in self.terms.carried)

    @property
    def charged(self) -> dict[Release, int]:
        """What was charged, with what was before in the runs that this one continues: how many rounds of each kind."""
        charged = Counter(dict(self.terms.carried))
        charged[self.terms.release] += len(self.rounds)
        return dict(charged)

    def check(self, round: int, planned: int = 1) -> None:
        """Refuse a round that would exceed the budget, before it begins.

        Args:
            round: its number.
            planned: how many rounds, with this one, the run still wants.

        Raises:
            BudgetError: it would exceed the budget.
        """
        if self.terms.budget is None or self._room:
            return
        self._room = self.room(planned)  # also where more rounds than planned were charged: some came again
        if not self._room:
            raise BudgetError(
                "Round {round} would cost more privacy than is left: {before} rounds have come to ε = "
                "{spent:.4g}, the budget is {budget:g} at δ = {delta:g}. The rounds so far are kept. Take "
                "more noise, fewer rounds or smaller cohorts in another run.",
                round=round,
                before=self.before + len(self.rounds),
                spent=self.spent(),
                budget=self.terms.budget,
                delta=self.terms.delta,
            )

    def charge(self, round: int) -> None:
        """Write a round down that ``check`` let begin, before anything of it is released.

        Raises:
            RunError: it cannot be written, so nothing of the round may be released.
        """
        self._append({"round": round})
        self.rounds.append(round)
        self.bind(self.mark)
        self._room = max(0, self._room - 1)

    def room(self, most: int) -> int:
        """Return how many more rounds fit in the budget, at most so many."""
        terms = self.terms
        if terms.budget is None:
            return most
        return rounds_within(terms.budget, terms.release, self.charged, terms.delta, terms.accountant, most)

    def spent(self, delta: float | None = None, accountant: Accountant | None = None) -> float:
        """Return ε of all that was charged, by default at the run's own δ and by its own accountant."""
        terms = self.terms
        return epsilon(self.charged, terms.delta if delta is None else delta, accountant or terms.accountant)

    def assumptions(self) -> list[str]:
        """Return what ε rests on, and what it does not cover, a line each."""
        return [*ASSUMED, FROM_A_SEED if self.terms.repeatable else FROM_THE_SYSTEM]

    @property
    def repeated(self) -> int:
        """How many charges are of rounds that were run again after a stop."""
        return sum(count - 1 for count in Counter(self.rounds).values())

    def _append(self, entry: Mapping[str, Any]) -> None:
        line = (json.dumps({"before": self.head, **entry}) + "\n").encode()
        if self.path is not None:
            append_of_run(self.path, line, self._size)
        self.head, self._size = hashlib.sha256(line).hexdigest(), self._size + len(line)

    def _check(self, known: Sequence[Mapping[str, Any]], whole: bytes) -> None:
        """Raise RunError unless the ledger holds all that the run's folder knows of it."""
        lines = whole.splitlines(keepends=True)
        for mark in known:
            charges, head = mark["charges"], mark["head"]
            if charges + 1 > len(lines) or hashlib.sha256(lines[charges]).hexdigest() != head:
                raise RunError(
                    "{path} is not the ledger that the run knows, of {charges} charges: it would count too little. "
                    "Restore the run from a copy.",
                    path=self.path,
                    charges=charges,
                )


def marks(info: Mapping[str, Any], extra: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what a run's folder knows of its ledger: by the last charge, and by the last commit.

    Args:
        info: the content of ``run.json``.
        extra: of the commit.
    """
    return [mark for mark in (info.get("charged"), extra.get("ledger")) if mark]


def _read(path: Path) -> bytes:
    with (
        raising(
            RunError, "Cannot read the ledger {file}: {why}. Restore the run from a copy.", OSError, file=path
        ),
        raising(
            RunError,
            "There is no ledger {file}: the run has no differential privacy, or the file was lost. A run "
            "with a table [privacy] writes one; a lost one must come from a copy, as nobody can tell what "
            "was spent.",
            FileNotFoundError,
            file=path,
        ),
    ):
        return path.read_bytes()


def _parsed(path: Path, content: bytes, run: str) -> BudgetLedger:
    """Return the ledger that whole lines give; RunError: a line is not as it was written, or of another run."""
    lines, head, entries = content.splitlines(keepends=True), "", list[dict[str, Any]]()
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            right = isinstance(entry, dict) and entry.pop("before", None) == head
        except (ValueError, RecursionError):
            right = False
        if not right:
            raise RunError(
                "{file}, line {number}: damaged or edited; it does not follow from the line before. Restore "
                "the run from a copy.",
                file=path,
                number=number,
            )
        entries.append(entry)
        head = hashlib.sha256(line).hexdigest()
    if entries:
        check_format(path, entries[0].get("format"), FORMAT)
    with raising(
        RunError,
        "{file} is no ledger of this run: {why}. Restore the run from a copy.",
        IndexError,
        KeyError,
        TypeError,
        ValueError,
        ConfigError,
        file=path,
    ):
        ledger = BudgetLedger(_terms(entries[0], run), path, [_round(e) for e in entries[1:]], head)
        ledger._size = len(content)
    return ledger


def _terms(entry: Mapping[str, Any], run: str) -> BudgetTerms:
    """Return the terms of a first line; ValueError, KeyError, TypeError: it is none of this run."""
    if entry["run"] != run:
        raise ValueError(f"wanted the run {run}, got {entry['run']!r}")
    fields = {
        name: value for name, value in entry.items() if name not in ("format", "run", "release", "carried")
    }
    carried = tuple((Release(**kind), _count(rounds)) for kind, rounds in entry.get("carried", ()))
    terms = BudgetTerms(**fields, release=Release(**entry["release"]), carried=carried)
    numbers = (terms.clients, terms.cohort, terms.delta, terms.release.rate, terms.release.noise)
    right = all(type(v) in (int, float) and math.isfinite(v) and v >= 0 for v in numbers)
    bounded = terms.budget is None or type(terms.budget) in (int, float)
    if not (right and bounded and 0 < terms.release.rate <= 1 and terms.accountant in get_args(Accountant)):
        raise ValueError("its first line has values that no run has")
    return terms


def _count(rounds: object) -> int:
    if type(rounds) is not int or rounds < 0:
        raise ValueError(f"a number of rounds is a whole number of at least 0; got {rounds!r}")
    return rounds


def _round(entry: Mapping[str, Any]) -> int:
    if list(entry) != ["round"] or type(entry["round"]) is not int:
        raise ValueError(f"a charge names its round alone; got {entry!r}")
    return int(entry["round"])
