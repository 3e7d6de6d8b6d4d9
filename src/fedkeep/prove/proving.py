"""``prove``: what must stay reaches what leaves by declared channels alone, or by a path that is named.

A few rounds of two clients run under a tracer (``labels``, ``rounds``) whose labels say what each number may depend on.
``Judge`` turns labels into verdicts. A falsifier then changes what must stay, replays the channels, and looks whether
anything that was proved changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import nn

from fedkeep.audit.bench import quiet, same
from fedkeep.audit.canaries import (
    CanarySource,
    drawn,
    floats_of,
    kept_rows,
    number_columns,
    numbers_replaced,
    opted_out,
    out_counts,
    planted,
    replaced,
    resampled,
    side_by_side,
    small,
    sources,
    tokens_of,
    with_lengths,
    with_opt_out,
)
from fedkeep.audit.canary_images import (
    carries_exactly,
    describe_code,
    describe_copy,
    made_singly,
    may_carry,
    stands,
    statistics,
)
from fedkeep.audit.findings import BUFFER, HALVES, JOINT, NO_OPT_OUT, PROTOCOL, Allowed, made_up
from fedkeep.core.errors import FedkeepError
from fedkeep.core.modes import with_gradients
from fedkeep.core.params import Params
from fedkeep.core.records import by_key
from fedkeep.data import FederatedData, Ragged
from fedkeep.data.splits import SPLITS
from fedkeep.engines import Order
from fedkeep.engines.rehearsal import resolve
from fedkeep.methods import Method, Phase, Sent
from fedkeep.methods.base import Recalls
from fedkeep.methods.hook_declarations import revealed
from fedkeep.prove.proof_findings import VERDICTS, Claim, Item, Proof, Verdict
from fedkeep.prove.rounds import (
    OPEN,
    Channels,
    Items,
    SeenRounds,
    Taken,
    judged,
    left,
    run,
    set_aside,
    trained,
)
from fedkeep.prove.rules import OUTSIDE
from fedkeep.prove.sites import CLIP, DATA, GRADIENTS, HELD, OPTED_OUT
from fedkeep.prove.traced_labels import LabelNode
from fedkeep.store import MemoryStore

DRAWS = ((1, 1.0), (2, 1.0), (3, 100.0))
"""Seeds and sizes of other private values."""
AGREES, CHANGES, OPT_OUT_CHANGES = "agrees", "it changes", "it changes with opted-out examples"
LENGTHS_CHANGE = "it changes with the lengths of examples"
CARRIES, SINGLY = "it carries a value of what must stay", "parts of it are made of single examples"
COPIES = "it carries values of examples"
LONGER: tuple[bool | int, ...] = (True, False, 1, 2, 5)
"""Other lengths of texts: see ``canaries.with_lengths``. Single tokens more change what is even, or counted."""
CODES = 12
"""Draws of what a client keeps, and of its examples, for codes and copies in what it tells."""
ENOUGH = 4
"""Draws after which it is looked whether those to come can still make a finding."""


def falsified(made: SeenRounds, seed: int, allowed: Allowed) -> dict[str, str]:
    """Return for each thing that leaves whether it changed; what could not be tried is not there.

    What clients keep, and the lengths of texts, are changed while federated gradients are replayed; then values of
    opted-out examples, their number and lengths, while nothing is replayed.
    """
    found: dict[str, str] = {}
    job, trainable = made.job, made.job.net.trainable()
    buffers = {name for name, _ in job.net.module.named_buffers()}
    for taken in made.taken:
        for draw, scale in DRAWS if taken.kept else ():
            other = replace(taken, kept=planted(taken.kept, taken.kept, trainable, seed + draw, scale))
            _compare(found, taken, _again(made, other, replayed=True), CHANGES)
    _carried(found, made, seed, allowed)
    _copied(found, made, seed)
    _singly(found, made, seed)
    rows, ragged = opted_out(job.data), any(isinstance(c, Ragged) for c in job.data.columns.values())
    inside = np.setdiff1d(job.data.split_rows("train"), rows)
    for longer in LONGER if ragged else ():
        data = with_lengths(job.data, inside, longer=longer)
        last = isinstance(longer, int) and not isinstance(longer, bool)
        for taken in made.taken[-1 if last else -len(job.data) :]:
            again = _again(made, taken, data, replayed=True)
            names = {n: n.removeprefix("upload/") for n in taken.left if n.startswith("upload/")}
            some = {  # of other tokens a table has other rows
                label: taken.left[label]
                for label, n in names.items()
                if n not in buffers and (longer or f"rows/{n}" not in taken.left)
            }
            _compare(found, replace(taken, left=some), again, LENGTHS_CHANGE)
    if len(rows):
        others = _other_opted_out(job.data, rows, seed)
        # beside one without a tracer, under which some operations round otherwise
        plain = [replace(taken, left=_again(made, taken)) for taken in made.taken]
        for taken in plain:
            for changes in others:
                again = _again(made, taken, changes[-1])
                _compare(found, taken, again, OPT_OUT_CHANGES)
                for data in () if again else changes[:-1]:
                    _compare(found, taken, _again(made, taken, data), OPT_OUT_CHANGES)
        drawn_anew = resampled(job.data, rows, seed + 50)
        for taken in plain[-len(job.data) :]:
            for data in drawn_anew:
                _compare(found, taken, _again(made, taken, data), OPT_OUT_CHANGES)
    return found


def _other_opted_out(data: FederatedData, rows: np.ndarray, seed: int) -> list[list[FederatedData]]:
    """Return data with other opted-out examples, in ``rows``: other values, lengths, signs, and fewer of them.

    Each is a list of single changes, and last of all of them at once, where training can do it. Labels follow values, so
    these are changed beside something else. Numbers and lengths are not followed, and one may hide the other: apart.
    What is told of one number or length, of order or of equality, ``resampled`` examples show.
    """
    ragged = any(isinstance(column, Ragged) for column in data.columns.values())
    every = np.setdiff1d(np.arange(data.examples), rows[::2])

    def changed(*changes: Callable[[FederatedData], FederatedData]) -> list[FederatedData]:
        together = data
        for change in changes:
            together = change(together)
        return [*(change(data) for change in changes if len(changes) > 1), together]

    def signed(sign: int) -> list[Callable[[FederatedData], FederatedData]]:
        return [lambda one: replaced(one, rows, seed + 2, sign)] * bool(number_columns(data))

    def long(longer: bool | int) -> list[Callable[[FederatedData], FederatedData]]:
        return [lambda one: with_lengths(one, rows, longer=longer)] * ragged

    return [
        changed(lambda one: replaced(one, rows, seed + 1), *long(LONGER[0])),
        changed(lambda one: kept_rows(one, every)),
        changed(*signed(1), *long(LONGER[1]), lambda one: kept_rows(one, every)),
        *([changed(*signed(-1), *long(LONGER[2]))] if ragged or number_columns(data) else []),
    ]


def _carried(found: dict[str, str], made: SeenRounds, seed: int, allowed: Allowed) -> None:
    """Look whether a client's loss, judging and first gradients carry a value of what it keeps.

    Loss and judging by a linear map or one that only grows; gradients, which are declared, as the very value.
    """
    for taken, order in _tellers(made):
        trainable = made.job.net.trainable()
        told = [drawn(taken.kept, trainable, seed + 10 + k) for k in range(CODES)] if taken.kept else []
        known = [
            (source, values)
            for source in sources(taken.kept, trainable)
            if (values := _values(source, told)).size
        ]
        if not known:
            continue
        summed = [np.concatenate([values, statistics(values)], 1) for _, values in known]
        again = _Again(made, taken, order, seed)
        draws = (_first_step(made, replace(taken, kept=row)) for row in told)
        every = _until(draws, summed) if order is None else _judgings(made, order, told)
        for label in every[0] if every else ():
            if all(label in one and one[label] for one in every) and (left := _columns(every, label)).size:
                for source, values in known if len(every) == len(told) else ():
                    if _tells(source, values, left, label, allowed, again):
                        found[label] = CARRIES
                found.setdefault(label, AGREES)


@dataclass(frozen=True)
class _Again:
    """Draws of what a client keeps, told once more: beside other examples, or larger. See ``images.stands``.

    Attributes:
        made: the rounds.
        taken: the client's part in one.
        order: what it is asked to judge; None: it tells its loss.
        seed: of the draws.
    """

    made: SeenRounds
    taken: Taken
    order: Order | None
    seed: int

    def rows(self, scale: float = 1.0) -> list[Params]:
        """Return what the client keeps, with other values of a scale."""
        trainable = self.made.job.net.trainable()
        return [drawn(self.taken.kept, trainable, self.seed + 10 + k, 0, scale) for k in range(CODES)]

    def left(self, rows: Sequence[Params], data: FederatedData | None = None) -> np.ndarray:
        """Return the loss or the sums of judging that the client then tells, (draws, numbers); (0, 0): it broke down."""
        job = self.made.job if data is None else replace(self.made.job, data=data)
        if self.order is None:
            told = [
                {"": {n: v for n, v in again.items() if n == "loss"}}
                for row in rows
                if (again := _again(self.made, replace(self.taken, kept=row), data, replayed=True))
            ]
        else:
            told = [{"": one["judged"]} for one in _judgings(replace(self.made, job=job), self.order, rows)]
        return _columns(told, "") if len(told) == len(rows) else np.zeros((0, 0))

    def elsewhere(self) -> np.ndarray:
        """Return what is told with other examples."""
        data = self.made.job.data
        return self.left(self.rows(), replaced(data, np.arange(data.examples), self.seed + 40))

    def far(self, source: CanarySource, scale: float) -> tuple[np.ndarray, np.ndarray]:
        """Return larger values of a source, and what is told with these."""
        rows = self.rows(scale)
        return _values(source, rows), self.left(rows)


Told = dict[str, Items]
"""What left by one draw, by its label."""


def _first_step(made: SeenRounds, taken: Taken) -> Told:
    """Return the loss, and the first gradients, when a client does the same again."""
    noted: list[Params] = []
    again = _again(made, taken, replayed=True, noted=noted)
    told = {f"upload/{n}": {n: v} for n, v in (noted[0] if noted else {}).items()}
    return told | {"loss": {"loss": again["loss"]}} if again else told


def _until(draws: Iterable[Told], values: Sequence[np.ndarray]) -> list[Told]:
    """Return what leaves by one draw after the other, up to the one after which none to come can make a finding.

    ``values``: of all draws, what may be carried, see ``may_carry``.
    """
    every: list[Told] = []
    may: list[tuple[str, np.ndarray]] | None = None
    for told in draws:
        every.append(told)
        if len(every) < ENOUGH:
            continue
        left = {k: _columns(every, k) for k in every[0] if all(k in one for one in every)}
        may = [(k, v) for k in left for v in values] if may is None else may
        while may and not (may[-1][0] in left and may_carry(may[-1][1], left[may[-1][0]])):
            may.pop()  # what some draws deny, more deny, too
        if not may:
            break
    return every


def _values(source: CanarySource, told: Sequence[Params]) -> np.ndarray:
    """Return the numbers of a source in several draws, (draws, numbers)."""
    names = [n for n in source.names if told and told[0][n].is_floating_point()]
    return _columns([{"": {n: row[n] for n in names}} for row in told], "")


def _tells(
    source: CanarySource, values: np.ndarray, left: np.ndarray, label: str, allowed: Allowed, again: _Again
) -> bool:
    """Tell whether what left carries a value of a source, and nothing says that it may."""
    if allowed.by(label, source.declared, copied=True):
        return False
    if label.startswith("upload/"):
        return source.kind == "private parameter" and carries_exactly(values, left)
    describe = partial(describe_code, singly=label == "judged")
    far = partial(again.far, source)
    return bool(describe(values, left)) and stands(describe, values, left, again.elsewhere, far)


def _copied(found: dict[str, str], made: SeenRounds, seed: int) -> None:
    """Look whether what the last client tells or sends along carries values of examples."""
    job, (training, judging) = made.job, _tellers(made)
    taken, order = training[0], judging[1]
    trained_on = np.setdiff1d(job.data.split_rows("train", [taken.work.client]), opted_out(job.data))
    labels = ["loss", *(n for n in taken.left if n.startswith("sent/") and taken.left[n].is_floating_point())]
    if order is not None:
        client = job.data.index(order.client)
        rows = np.concatenate([job.data.split_rows(part, [client]) for part in SPLITS])
        datas = [replaced(job.data, rows, seed + 20 + k) for k in range(CODES)]
        values, sums = _inputs(datas, rows)
        every = _judgings(made, order, datas=datas)
        if len(every) == len(datas) and describe_copy(values, sums, _columns(every, "judged")):
            found["judged"] = COPIES
    datas = [replaced(job.data, trained_on, seed + 30 + k) for k in range(CODES)] if len(trained_on) else []
    if not datas:
        return
    values, sums = _inputs(datas, trained_on)
    again = (_again(made, taken, data, replayed=True) for data in datas)
    told = ({label: {label: one[label]} for label in labels if label in one} for one in again)
    every = _until(told, [np.concatenate([values, sums], 1)])
    for label in labels if len(every) == len(datas) else ():
        if all(label in one for one in every) and describe_copy(values, sums, _columns(every, label)):
            found[label] = COPIES


def _tellers(made: SeenRounds) -> tuple[tuple[Taken, None], tuple[Taken, Order | None]]:
    """Return who tells a loss, the last one, and who judges: the first, who has most kinds of examples."""
    orders, first = made.orders, made.taken[-len(made.job.data)]
    order = next((o for o in orders if o.client == made.job.data.ids[first.work.client]), None)
    return (made.taken[-1], None), (first, None if made.unjudged or made.error else order)


def _inputs(datas: Sequence[FederatedData], rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return of several data sets the numbers and tokens in some rows, and the sums of the numbers, each (draws, …)."""
    numbers = [floats_of(data, rows) for data in datas]
    values = [
        np.concatenate([n.reshape(-1), tokens_of(data, rows)]) for n, data in zip(numbers, datas, strict=True)
    ]
    return np.stack(values), np.stack([n.sum(0) for n in numbers])


def _columns(told: Sequence[Told], label: str) -> np.ndarray:
    """Return the numbers that are in all of several draws under a label, in the same shape: (draws, numbers)."""
    every = [one[label] for one in told]
    names = [n for n, v in every[0].items() if all(n in e and e[n].shape == v.shape for e in every)]
    rows = [[e[n].double().reshape(-1).numpy() for n in names] for e in every]
    return np.stack([np.concatenate(row) if row else np.zeros(0) for row in rows])


def _judgings(
    made: SeenRounds, order: Order, kept: Sequence[Params] = (), datas: Sequence[FederatedData] = ()
) -> list[Told]:
    """Return the sums that a client's judging gives, each with other kept values or examples; none: it broke down.

    They are judged at once, as those of clients who are sent different values, so that each is computed alone.
    """
    job, client = made.job, made.job.data.index(order.client)
    if not kept:
        stored = {name: value[0] for name, value in job.store.read([client]).items()}
        kept = [stored] * len(datas)
    data = side_by_side(datas or [job.data] * len(kept), client)
    store = MemoryStore(job.store.default, [order.client] * len(data))
    values = {n: torch.stack([row[n] for row in kept]) for n in job.store.default.initial}
    store.write(range(len(data)), values)
    orders = [replace(order, client=name, sent=Sent.of(order.sent.flat)) for name in data.ids]
    try:
        return [{"judged": items} for items in judged(replace(job, data=data, store=store), orders)]
    except (FedkeepError, RuntimeError):
        return []


def _singly(found: dict[str, str], made: SeenRounds, seed: int) -> None:
    """Look whether a federated buffer of the last client is made of single examples."""
    job, taken = made.job, made.taken[-1]
    rows = np.setdiff1d(job.data.split_rows("train", [taken.work.client]), opted_out(job.data))
    buffers = {f"upload/{name}" for name, _ in job.net.module.named_buffers()}
    left = {label: v for label, v in taken.left.items() if label in buffers and v.is_floating_point()}
    if len(rows) < 2 or not left or not number_columns(job.data):
        return
    datas = [numbers_replaced(job.data, np.array([row]), seed) for row in rows]
    again = [_again(made, taken, data, replayed=True) for data in datas]
    for label, value in left.items():
        by = [(one[label] != value).reshape(-1).numpy() for one in again if label in one]
        if made_singly(by):
            found[label] = SINGLY


def _again(
    made: SeenRounds,
    taken: Taken,
    data: FederatedData | None = None,
    *,
    replayed: bool = False,
    noted: list[Params] | None = None,
) -> Items:
    """Return what leaves when a client does the same again; nothing: training broke down. ``noted`` gets gradients."""
    job = made.job if data is None else replace(made.job, data=data)
    noted = [] if noted is None else noted
    tap = Channels(None, noted=noted, replay=iter(taken.gradients) if replayed else None)
    try:
        result = trained(job, taken, tap)
    except (FedkeepError, RuntimeError):
        return {}
    return {} if result.fault is not None else left(result)


def _compare(found: dict[str, str], taken: Taken, again: Items, words: str) -> None:
    for label, value in taken.left.items() if again else ():
        if label == "status":
            continue
        if not (label in again and same(value, again[label])):
            found[label] = words
        found.setdefault(label, AGREES)


Seen = Sequence[tuple[LabelNode, Taken | None]]
"""What is known of a value that leaves, for each client and round; None: of what is told by all."""
STATUS = "every run tells whether training broke down"
SENDS = "training examples, by Client.sends"


class Judge:
    """Gives verdicts on what was traced.

    Args:
        made: the rounds.
        allowed: what may leave otherwise.
        falsified: what the falsifier found, by what leaves.
    """

    def __init__(self, made: SeenRounds, allowed: Allowed, falsified: Mapping[str, str]) -> None:
        self.made, self.allowed, self.falsified = made, allowed, falsified
        tracer = self.tracer = made.tracer
        self.open = OUTSIDE | tracer.bits(*OPEN)
        self.strict = OUTSIDE | tracer.bit(OPTED_OUT) | tracer.bit(HELD)
        self.buffers = {name for name, _ in made.job.net.module.named_buffers()}
        crossings = [*tracer.crossings.values()]
        loose = [c for c in crossings if not c.told]
        self.loose = 0
        for crossing in loose:
            self.loose |= crossing.node.labels
        self.told = {t: [c.node for c in crossings if c.told == t] for t in ("loss", "status", "judged")}
        reasons = [f"{c.what} in {c.site}" for c in loose] + [made.error] * bool(made.error)
        if not made.stable and not made.error:
            reasons.append("labels still spread in the last round")
        self.reasons = tuple(dict.fromkeys(reasons))

    def items(self) -> list[Item]:
        """Return a verdict on each thing that leaves."""
        left = ((label, (node, taken)) for taken in self.made.taken for label, node in taken.nodes.items())
        found: dict[str, list[tuple[LabelNode, Taken | None]]] = {**by_key(left)}
        found |= {"weight": []} | {told: [(n, None) for n in self.told[told]] for told in ("loss", "status")}
        found |= {label: [(node, None)] for label, node in self.made.server.items()}
        return [*(self.item(label, seen) for label, seen in found.items()), self.judged()]

    def judged(self) -> Item:
        """Return the verdict on sums of judging: of one client's own values and examples, and no copy of any."""
        tracer, labels, said = self.tracer, 0, self.falsified.get("judged", "not tried")
        for node in self.told["judged"]:
            labels |= node.labels
        why = [n.path(OUTSIDE)[0] for n in self.told["judged"] if n.labels & OUTSIDE]
        reasons = (*self.reasons, *([self.made.unjudged] * bool(self.made.unjudged)), *why)
        if reasons:
            return Item(
                leaves="judged", verdict="unknown", path=tuple(dict.fromkeys(reasons)), falsifier=said
            )
        for node in self.told["judged"]:
            whose = {tracer.owners[n] for n in tracer.words(node.labels) if n in tracer.owners}
            if len(whose) > 1:
                return _undeclared(
                    "judged", f"one client's are made of {' and '.join(sorted(whose))}", falsifier=said
                )
            recalls = isinstance(
                self.made.job.method.predict, Recalls
            )  # what it makes of them is a private value
            if (out := node.labels & tracer.bit(OPTED_OUT)) and not recalls:
                return _undeclared("judged", *node.path(out), falsifier=said)
        if said in (CARRIES, COPIES, OPT_OUT_CHANGES):
            return _undeclared("judged", said, falsifier=said)
        names = (n.removesuffix(f" of {tracer.owners.get(n)}") for n in tracer.words(labels))
        of = f"made of {', '.join(dict.fromkeys(names)) or 'nothing'}"
        if not (by := self.allowed.by("judged")):
            return _undeclared("judged", of, falsifier=said)
        return Item(leaves="judged", verdict="declared", by=(of, by), falsifier=said)

    def item(self, label: str, seen: Seen) -> Item:
        """Return the verdict on one thing."""
        tracer, mask, said = self.tracer, 0, self.falsified.get(label, "not tried")
        for node, _ in seen:
            mask |= node.labels
        examples = tracer.bits(DATA) if label.startswith(("upload/", "sent/")) else 0
        telling = [(self._beyond(n, t) | n.labels & examples) for n, t in seen]
        by = STATUS if label == "status" else self._declared(label, telling)
        if by and label != "status" and any(self._beyond(n, t) & ~self._own(t) for n, t in seen):
            by = ""  # it is no leave to tell of opted-out examples, or of other clients
        if mask & OUTSIDE or self.reasons:
            by = self._declared(label, [*telling, self.loose & ~self.open])
            if by and "/" in label and not (mask | self.loose) & self.strict:
                return Item(leaves=label, verdict="declared", by=(by,), path=self.reasons, falsifier=said)
            why = [n.path(OUTSIDE)[0] for n, _ in seen if n.labels & OUTSIDE]
            return Item(
                leaves=label,
                verdict="unknown",
                path=tuple(dict.fromkeys([*self.reasons, *why])),
                falsifier=said,
            )
        words = ["federated gradients"] * bool(mask & tracer.bit(GRADIENTS))
        if mask & tracer.bit(CLIP) and not by:
            if not (clip := self.allowed.by("clip")):
                return _undeclared(label, JOINT, HALVES, by=words, falsifier=said)
            words.append(f"{JOINT} ({clip})")
        beyond = next(((n, b) for n, t in seen if (b := self._beyond(n, t))), None)
        raw = next(((n, b) for n, _ in seen if (b := n.labels & examples)), None)  # not by a gradient
        if beyond is None and raw is not None:
            by = by or (
                SENDS
                if label.startswith("sent/")
                else BUFFER * (label.removeprefix("upload/") in self.buffers)
            )
        if (found := beyond or raw) is not None and not by:
            node, which = found
            return _undeclared(label, *node.path(_lowest(which)), label, by=words, falsifier=said)
        # lengths are of examples: what is made of these, and may tell of them, may change with their lengths
        lengths = said == LENGTHS_CHANGE and not (raw and self.allowed.by(label, ("examples",)))
        if lengths or said in (CARRIES, COPIES, SINGLY) or (beyond is None and said == CHANGES):
            return _undeclared(label, f"{said}, with the channels replayed", by=words, falsifier=said)
        words += [by] * (found is not None)
        verdict: Verdict = "declared" if words else "independent"
        return Item(leaves=label, verdict=verdict, by=tuple(words), falsifier=said)

    def claims(self) -> tuple[Claim, ...]:
        """Return what holds of the round as a whole."""
        tracer = self.tracer
        reads, opted = list(self.reasons), list(self.reasons)
        for taken in self.made.taken:
            others = self._others(taken)
            for label, node in taken.nodes.items():
                reads += [node.path(OUTSIDE)[0]] * bool(node.labels & OUTSIDE)
                opted += [label] * bool(node.labels & tracer.bit(OPTED_OUT))
            masks = {**{n: node.labels for n, node in taken.nodes.items()}, **taken.after}
            reads += [f"{n} depends on {tracer.words(m & others)[0]}" for n, m in masks.items() if m & others]
        for node in self.told["loss"]:
            whose = {tracer.owners[n] for n in tracer.words(node.labels & tracer.bits(DATA))}
            reads += [f"loss depends on examples of {' and '.join(sorted(whose))}"] * (len(whose) > 1)
        opted += ["loss"] * any(node.labels & tracer.bit(OPTED_OUT) for node in self.told["loss"])
        opted += [label for label, said in self.falsified.items() if said == OPT_OUT_CHANGES]
        keeps = [" → ".join(n.path(_lowest(n.labels & ~self.open))) for n in self.made.elsewhere]
        return (
            Claim(says="a client's round reads what it is given alone", against=_few(reads)),
            Claim(says="no tensor but what it keeps holds private values afterwards", against=_few(keeps)),
            Claim(
                says="neither values nor numbers of opted-out examples reach what leaves", against=_few(opted)
            ),
        )

    def _declared(self, label: str, telling: Iterable[int]) -> str:
        """Return what declares that something tells of labels; empty: nothing does."""
        labels = 0
        for each in telling:
            labels |= each
        whose = self.tracer.owners
        names = [name.removesuffix(f" of {whose.get(name)}") for name in self.tracer.words(labels)]
        return self.allowed.by(label, dict.fromkeys(names))

    def _beyond(self, node: LabelNode, taken: Taken | None) -> int:
        """Return the labels that may not leave as such: of what must stay, and of other clients' examples."""
        return node.labels & (~self.open | self._others(taken))

    def _others(self, taken: Taken | None) -> int:
        """Return the labels of what other clients keep and train on; None: of no client."""
        return 0 if taken is None else self._labels(lambda owner: owner != self._who(taken))

    def _own(self, taken: Taken | None) -> int:
        """Return the labels of what a client keeps; None: of what any keeps."""
        return self._labels(lambda owner: taken is None or owner == self._who(taken)) & ~self.open

    def _who(self, taken: Taken) -> str:
        return self.made.job.data.ids[taken.work.client]

    def _labels(self, of: Callable[[str], bool]) -> int:
        return sum(self.tracer.bit(label) for label, owner in self.tracer.owners.items() if of(owner))


def worst(found: Sequence[Sequence[Item]]) -> tuple[Item, ...]:
    """Return of each thing that leaves the worst verdict of several traces, and the falsifier's worst word."""
    by = by_key((one.leaves, one) for items in found for one in items)
    rank, said = (
        list(VERDICTS),
        ("not tried", AGREES, CHANGES, LENGTHS_CHANGE, CARRIES, COPIES, SINGLY, OPT_OUT_CHANGES),
    )
    return tuple(
        replace(
            max(items, key=lambda one: rank.index(one.verdict)),
            falsifier=max((one.falsifier for one in items), key=said.index),
        )
        for items in by.values()
    )


def joined(found: Sequence[Sequence[Claim]]) -> tuple[Claim, ...]:
    """Return the claims of several traces: against each speaks what speaks against it in any."""
    return tuple(
        Claim(says=same[0].says, against=_few(why for one in same for why in one.against))
        for same in zip(*found, strict=True)
    )


def _undeclared(label: str, *path: str, by: Iterable[str] = (), falsifier: str = "not tried") -> Item:
    return Item(leaves=label, verdict="path named", by=tuple(by), path=path, falsifier=falsifier)


def _lowest(bits: int) -> int:
    return bits & -bits


def _few(words: Iterable[str], most: int = 4) -> tuple[str, ...]:
    return tuple(dict.fromkeys(words))[:most]


CLIENTS, PASSES = 2, 2
BATCHES = (6, 5, 4, 7)
"""Sizes of mini-batches, so that a pass has several; the first that leaves no example alone, for batch statistics."""

PACKED = (
    "pack_padded_sequence takes lengths as numbers, which cannot be followed. Give them to fedkeep.nn.GRU or LSTM, "
    "layer(x, lengths)."
)


@with_gradients
def prove(
    model: nn.Module,
    method: Method,
    data: FederatedData,
    *,
    seed: int = 0,
    allow: Sequence[str] = PROTOCOL,
    name: str = "",
) -> Proof:
    """Follow what must stay through a client's round, and say by which ways it reaches what leaves.

    Args:
        model: the module; it is not changed.
        method: the method. Long phases and large mini-batches are cut; rounds go on until no label spreads further.
        data: the data set; a few examples of two clients are used, or of some more where these lack a kind of examples.
        seed: of the run, and of the falsifier's values.
        allow: as for ``fedkeep.audit.audit``: what may tell of what stays beside gradients.
        name: for the report.

    Raises:
        FedkeepError: model, method and data do not fit.
    """
    began = time.perf_counter()
    method = resolve(method, model, data)
    some, notes, allowed = small(data, CLIENTS), list[str](), Allowed(revealed(method), tuple(allow))
    real, traced = out_counts(some), [with_opt_out(some)]
    if len(opted_out(traced[0])) > real.sum():
        notes.append(made_up(bool(real.any())))
        if any(phase.examples == "all" for phase in method.client.phases):
            traced.append(some)
            notes.append(
                "The loss on all examples leaves where none is opted out, so rounds ran without, too."
            )
    judges, cut = list[Judge](), False
    with quiet(), set_aside():
        for each in traced:
            short = _cut(method, each)
            made, cut = run(model, short, each, seed), cut or short != method
            judges.append(Judge(made, allowed, falsified(made, seed, allowed)))
    if cut:
        notes.append(f"Phases were cut to {PASSES} passes, mini-batches to {max(BATCHES)} examples at most.")
    *claims, last = joined([judge.claims() for judge in judges])
    if not len(opted_out(traced[0])):
        last = replace(last, against=(NO_OPT_OUT, *last.against))
    items = worst([judge.items() for judge in judges])
    if any("_pack_padded_sequence" in step for one in items if one.verdict == "unknown" for step in one.path):
        notes.append(PACKED)
    return Proof(
        name=name or method.name,
        items=items,
        claims=(*claims, last),
        notes=tuple(notes),
        rounds=sum(len(judge.made.taken) for judge in judges) // len(some),
        clients=len(some),
        storages=sum(judge.tracer.storages for judge in judges),
        seconds=time.perf_counter() - began,
    )


def _cut(method: Method, data: FederatedData) -> Method:
    """Return the method with short phases of small mini-batches."""
    counts = data.counts("train") - out_counts(data)
    size = next((b for b in BATCHES if all(c % b != 1 for c in counts)), max(np.max(counts), 1))

    def cut(phase: Phase) -> Phase:
        return phase.but(
            epochs=min(phase.epochs, PASSES),
            steps=None if phase.steps is None else min(phase.steps, 4 * PASSES),
            batch_size=min(phase.batch_size, int(size)),
        )

    adapts = tuple(cut(p.but(early_stopping=None)) for p in method.adapt.phases)
    return method.on_client(phases=tuple(map(cut, method.client.phases))).adapting(phases=adapts)
