"""Canaries in what clients keep: private parameters and buffers, and the method's state."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Literal

import numpy as np
import torch

from fedkeep.audit.bench import Items, SentItem, changed, judging, unjudged
from fedkeep.audit.canaries import CanarySource, drawn, planted, replaced, sources
from fedkeep.audit.canary_images import (
    DRAWS,
    IN_LAST_BITS,
    describe_code,
    describe_image,
    may_carry,
    stands,
    statistics,
)
from fedkeep.audit.findings import HALVES, JOINT, Finding
from fedkeep.audit.looking import Looking, MessageStep, image_of
from fedkeep.core.packet import Packet
from fedkeep.core.params import Params
from fedkeep.data import FederatedData
from fedkeep.methods import Method


def look_at_kept(audit: Looking) -> None:
    """Plant canaries at the first client, then at another one, in every round.

    What changes is asked once more with learning rates of zero for federated parameters. Then nothing moves by
    gradients, so what changes still has left in another way. Rounds may differ in this, so each is looked at.
    """
    everything = list(audit.steps[0].kept[audit.client])
    if not everything:
        audit.notes["Nothing is private, and no state is kept."] = None
        return
    for step in reversed(audit.steps):
        known = sources(step.kept[audit.client], audit.trainable)
        asked = [audit.bench.once(step.work, c) for c in _canaries(audit, step, audit.client, everything)]
        moved = [item for each in asked for item in changed(step.have, each)]
        before = dict[bool, Items]()
        for source in known:
            _look_at(audit, step, source, before, asked if len(known) == 1 else [])
        _others(audit, moved, audit.client, audit.others)
        for other in audit.others[:1]:
            _others(audit, _changed(audit, step, other, everything), other, [audit.client])
    for source in sources(audit.steps[0].kept[audit.client], audit.trainable):
        audit.looked[str(source)] = None


def _others(audit: Looking, moved: Iterable[SentItem], client: str, others: Iterable[str]) -> None:
    for item in moved:
        if item.client in others:
            audit.note(item.label, f"what another client keeps ({client})", "", of_client=False)


def _canaries(
    audit: Looking, step: MessageStep, client: str, names: Iterable[str]
) -> list[dict[str, Params]]:
    """Return what clients keep with a canary at one of them, and with its mirror image.

    Of both at least one is on the other side of a threshold that is near, as of a sign or the largest of some.
    """
    names = list(names)
    return [audit.planted(step, client, names, scale=scale) for scale in (1.0, -1.0)]


def _changed(audit: Looking, step: MessageStep, client: str, names: Iterable[str]) -> dict[SentItem, None]:
    """Return what changes with a canary or its mirror image."""
    found = (
        changed(step.have, audit.bench.once(step.work, c)) for c in _canaries(audit, step, client, names)
    )
    return dict.fromkeys(item for each in found for item in each)


def _moved(
    audit: Looking, step: MessageStep, client: str, names: Iterable[str], asked: Sequence[Items]
) -> list[tuple[SentItem, bool]]:
    """Return what changes with a canary or its mirror image, and what of uploads without federated gradients too.

    Nothing else is trained by these, so that it is not asked of the rest. ``asked``: what leaves with each, if known.
    """
    moved = dict[SentItem, bool]()
    for k, canary in enumerate(_canaries(audit, step, client, names)):
        found, rest = (
            changed(step.have, asked[k] if asked else audit.bench.once(step.work, canary)),
            set[SentItem](),
        )
        if any(item.kind in ("upload", "sent") and not moved.get(item) for item in found):
            rest = set(changed(step.have_still, audit.bench.once(step.work, canary, method=audit.still)))
        moved |= {item: moved.get(item, False) or item in rest for item in found}
    return list(moved.items())


def _look_at(
    audit: Looking, step: MessageStep, source: CanarySource, before: dict[bool, Items], asked: Sequence[Items]
) -> None:
    """Give a verdict on each thing that changes with one that the client keeps.

    ``before`` holds what leaves without a canary, of the step, once for all sources: see ``_drawn``. ``asked``: what
    leaves with each of ``_canaries``, where it is known.
    """
    drawn: dict[bool, tuple[np.ndarray, list[Items]]] = {}

    def image(item: SentItem, *, moving: bool) -> str:
        """Say what something is of its canary; without steps of gradients there is nothing in it but the canary."""
        if moving not in drawn:
            drawn[moving] = _drawn(audit, step, source, before, moving=moving)
        return image_of(item, *drawn[moving])

    for item, direct in _moved(audit, step, audit.client, source.names, asked):
        if item.client not in ("", audit.client):
            continue
        base = audit.base(item.name)
        known = base in audit.buffers or base in audit.federated
        trained = item.kind == "upload" and known and base not in audit.given
        buffer = item.name in audit.buffers and item.kind == "upload"
        if audit.settled(item.label, source, direct=direct or not trained):
            continue
        if trained and not direct:
            how = "running statistics, after such steps" if buffer else image(item, moving=True)
            how = how if buffer or not _readable(how) else f"readable: {how}"
            how = how if buffer or how.startswith("readable") else ""
            audit.put(Finding(leaves=item.label, source=str(source), verdict="gradients", how=how))
        elif buffer:
            audit.note(item.label, str(source), "running statistics", of=source.declared)
        else:
            how = image(item, moving=False) if item.kind != "judged" else ""
            if item.kind == "loss" and how and not _image_stands(audit, step, source, item, *drawn[False]):
                how = ""
            audit.note(item.label, str(source), of=source.declared, image=how, direct=direct)


def _image_stands(
    audit: Looking,
    step: MessageStep,
    source: CanarySource,
    item: SentItem,
    canaries: np.ndarray,
    found: Sequence[Items],
) -> bool:
    """Tell whether a loss is an image of what a client keeps, and does not only slope with it, see ``stands``."""

    def left(found: Sequence[Items]) -> np.ndarray:
        return np.stack([one[item].double().reshape(-1).numpy() for one in found])

    def elsewhere() -> np.ndarray:
        return left(_drawn(audit, step, source, {}, moving=False, data=_other_examples(audit))[1])

    def far(scale: float) -> tuple[np.ndarray, np.ndarray]:
        large, found = _drawn(audit, step, source, {}, moving=False, scale=scale)
        return large, left(found)

    def describe(canaries: np.ndarray, left: np.ndarray) -> str:
        words = describe_image(canaries, left)
        return words if words != IN_LAST_BITS else ""

    return stands(describe, canaries, left(found), elsewhere, far)


def _other_examples(audit: Looking) -> FederatedData:
    return replaced(audit.data, np.arange(audit.data.examples), 9)


KEPT = "what the client keeps"
SIGNS = (0, 0, 1, -1, 0, 0, 0, 0, 0, 0, 0, 0)
"""Of draws of all that a client keeps: those with one sign are for bits of sums, norms and largest values."""
SIZES = (10.0, 0.05)
NOTHING = np.zeros((0, 0))
FEW, MANY = 4, 8
"""Draws for bits: in each round, and in the last one; codes want all, unless these tell that there is none."""


def look_at_draws(audit: Looking) -> None:
    """Draw all that a client keeps many times: for bits that few values change, and codes in what is told.

    Federated parameters stay where they are, so nothing reaches an upload by gradients.
    """
    training = [s for s in audit.steps if any(o["train"] for o in s.work.header["orders"])]
    for step in training:
        if step.kept[audit.client]:
            kind = "loss" if step is training[-1] else ""
            _draws(audit, step, unjudged(step.work, audit.client), kind)
    if (last := audit.steps[-1]).kept[audit.client]:
        _draws(audit, last, judging(last.work, audit.client), "judged")


def _draws(audit: Looking, step: MessageStep, work: Packet, kind: str) -> None:
    """Look at draws of what a client keeps, and at codes in what is told of a kind."""
    first = step.kept[audit.client]
    signs, sizes = SIGNS if kind else SIGNS[:FEW], SIZES if kind != "judged" else ()
    rows = [drawn(first, audit.trainable, 100 + k, sign) for k, sign in enumerate(signs)]
    sized = [drawn(first, audit.trainable, 200 + k, 0, size) for k, size in enumerate(sizes)]
    before = audit.bench.once(work, step.kept, method=audit.still)
    known = sources(first, audit.trainable)
    left = [item for item in before if item.kind == kind and before[item].is_floating_point()]

    def asked(row: Params, data: FederatedData | None = None) -> Items:
        return audit.bench.once(work, {**step.kept, audit.client: row}, method=audit.still, data=data)

    def broke_down(told: Items) -> bool:
        return any(item.kind == "status" for item in _own(audit, before, told))

    def coded() -> list[tuple[CanarySource, np.ndarray]]:
        return [(source, values) for source in known if kind and (values := _numbers(source, rows)).size]

    told = list[Items]()
    for k, sign in enumerate(signs):
        told.append(asked(rows[k]))
        if broke_down(told[k]):  # of large values that is no bit of theirs, unless smaller ones do, too
            smaller = drawn(first, audit.trainable, 100 + k, sign, SIZES[-1])
            if not broke_down(again := asked(smaller)):
                rows[k], told[k] = smaller, again
        if len(told) == MANY and not _may_code(audit, coded(), left, told):
            break
    large = [asked(row) for row in sized]
    found = [item for each in told for item in _own(audit, before, each)]
    for each in large:
        found += [] if broke_down(each) else _own(audit, before, each)
    alone = dict[frozenset[str], tuple[set[SentItem], Iterator[list[SentItem]]]]()
    for item in dict.fromkeys(found):
        if item.kind in ("loss", "judged"):
            continue
        rest = [s for s in known if not audit.told_of(item.label, s)]
        if len(rest) < len(known):
            some = frozenset(name for source in rest for name in source.names)
            others = _moving(asked, first, some, rows[: len(told)], before)
            moving, coming = alone.setdefault(some, (set(), others))
            while item not in moving and (more := next(coming, None)) is not None:
                moving.update(more)
            if item not in moving:
                continue
        names = [name for s in rest for name in s.declared]
        audit.note(item.label, KEPT, f"with some of {len(told) + len(large)} draws", of=names)
    for source, values in coded() if len(told) == len(rows) else ():
        for label, out in _outs(audit, left, told):
            if not (how := describe_code(values, out)):
                continue

            def elsewhere(label: str = label) -> np.ndarray:
                data = _other_examples(audit)
                return dict(_outs(audit, left, [asked(row, data) for row in rows])).get(label, NOTHING)

            def far(
                scale: float, source: CanarySource = source, label: str = label
            ) -> tuple[np.ndarray, np.ndarray]:
                large = [drawn(first, audit.trainable, 100 + k, s, scale) for k, s in enumerate(signs)]
                outs = dict(_outs(audit, left, [asked(row) for row in large]))
                return _numbers(source, large), outs.get(label, NOTHING)

            if stands(describe_code, values, out, elsewhere, far):
                audit.note(label, str(source), of=source.declared, image=how)


def _own(audit: Looking, before: Items, after: Items) -> list[SentItem]:
    """Return what changes of the client that is looked at, and of all together."""
    return [item for item in changed(before, after) if item.client in ("", audit.client)]


def _numbers(source: CanarySource, rows: Sequence[Params]) -> np.ndarray:
    """Return the numbers of a source in several draws, (draws, numbers)."""
    names = [n for n in source.names if rows[0][n].is_floating_point() and rows[0][n].numel()]
    if not names:
        return np.zeros((len(rows), 0))
    return np.stack([torch.cat([row[n].double().reshape(-1) for n in names]).numpy() for row in rows])


def _may_code(
    audit: Looking,
    coded: Sequence[tuple[CanarySource, np.ndarray]],
    left: Sequence[SentItem],
    told: Sequence[Items],
) -> bool:
    """Tell whether all draws may show a code that some do not deny."""
    outs = _outs(audit, left, told)
    return any(
        may_carry(np.concatenate([values, statistics(values)], 1), out)
        for _, values in coded
        for _, out in outs
    )


def _moving(
    asked: Callable[[Params], Items],
    first: Params,
    names: Collection[str],
    rows: Sequence[Params],
    before: Items,
) -> Iterator[list[SentItem]]:
    """Yield for each draw what moves with some of the names that a client keeps alone."""
    for row in rows if names else ():
        yield changed(before, asked({n: v if n in names else first[n] for n, v in row.items()}))


def _outs(audit: Looking, left: Sequence[SentItem], told: Sequence[Items]) -> list[tuple[str, np.ndarray]]:
    """Return by label the numbers that left in several draws, (draws, numbers)."""
    found = []
    for label in dict.fromkeys(item.label for item in left):
        mine = [item for item in left if item.label == label and item.client in ("", audit.client)]
        whole = [i for i in mine if all(i in one and one[i].shape == told[0][i].shape for one in told)]
        if whole:
            rows = [torch.cat([one[i].double().reshape(-1) for i in whole]).numpy() for one in told]
            found.append((label, np.stack(rows)))
    return found


def _readable(how: str) -> bool:
    """Tell whether an image gives the values themselves up to a factor, and not by rounding alone."""
    return "value" in how and "last bits" not in how


def _drawn(
    audit: Looking,
    step: MessageStep,
    source: CanarySource,
    before: dict[bool, Items],
    *,
    moving: bool,
    scale: float = 1.0,
    data: FederatedData | None = None,
) -> tuple[np.ndarray, list[Items]]:
    """Return several canaries, (draws, k), and what leaves with each; the first are the values that stand there."""
    first = step.kept[audit.client]
    names = [n for n in source.names if first[n].is_floating_point() and first[n].numel()]
    if not names:
        return np.zeros((0, 0)), [step.have]
    rows = [planted(first, names, audit.trainable, seed, scale) for seed in range(2, DRAWS)]
    both = {n: rows[0][n] + rows[1][n] - first[n] for n in names}
    rows = [*rows, {**first, **both}]
    work, method = unjudged(step.work, audit.client), audit.bench.method if moving else audit.frozen
    if moving not in before:
        before[moving] = audit.bench.once(work, step.kept, method=method, data=data)
    found = [
        audit.bench.once(work, {**step.kept, audit.client: row}, method=method, data=data) for row in rows
    ]
    canaries = [torch.cat([row[n].double().reshape(-1) for n in names]).numpy() for row in (first, *rows)]
    return np.stack(canaries), [before[moving], *found]


BOUNDS = (math.inf, 1e-2, 1e-4)
"""The most that a joint norm may be: as it is set, and so low that it cuts, where it cut nothing of the few examples."""


def look_at_clipping(audit: Looking) -> None:
    """See whether the joint norm of private and federated gradients is in what leaves, by this bound or a lower one."""
    method, names = audit.bench.method, sorted(audit.trainable)
    joint = [
        p
        for p in method.client.phases
        if p.clip_norm is not None
        and p.clip_over == "all"
        and {method.split.is_private(n) for n in p.trained_names(method.split, names)} == {True, False}
    ]
    for most in BOUNDS if joint else ():

        def clipped(over: Literal["all", "halves"], most: float = most) -> Method:
            phases = (
                p.but(clip_over=over, clip_norm=min(p.clip_norm, most)) if p in joint and p.clip_norm else p
                for p in method.client.phases
            )
            return method.on_client(phases=tuple(phases))

        for step in audit.steps:
            for fixed in (step.kept, audit.planted(step, audit.client, step.kept[audit.client])):
                one = audit.bench.once(step.work, fixed, method=clipped("all"))
                if changed(one, audit.bench.once(step.work, fixed, method=clipped("halves"))):
                    audit.looked[JOINT] = None
                    cut = "" if most == math.inf else "the bound cut no gradient here, longer ones it would; "
                    audit.note("clip", JOINT, f"{cut}{HALVES}")
                    return
    if joint:
        audit.missed[f"{JOINT}: no gradient can be cut, as all are zero"] = None
