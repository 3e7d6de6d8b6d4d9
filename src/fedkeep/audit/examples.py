"""Canaries in examples: those that train, those that judge, and those that are opted out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fedkeep.audit import audited_server as on_server
from fedkeep.audit.bench import FIRST, Items, SentItem, adapting, changed, items, on_common_rows, unjudged
from fedkeep.audit.canaries import (
    floats_of,
    kept_rows,
    number_columns,
    numbers_replaced,
    opted_out,
    replaced,
    resampled,
    single,
    with_lengths,
    with_opt_out,
)
from fedkeep.audit.canary_images import DRAWS, made_singly
from fedkeep.audit.findings import BUFFER, NO_OPT_OUT, Finding, made_up
from fedkeep.audit.looking import Looking, MessageStep, image_of
from fedkeep.core.errors import MethodError
from fedkeep.data import FederatedData, Ragged
from fedkeep.data.columns import Rows

TRAINING = "training examples"
JUDGING = "validation and test examples"
LENGTHS = "lengths of training examples"


def look_at_examples(audit: Looking) -> None:
    """Replace training examples, which may leave by gradients, and those of other partitions, which may not."""
    rows = np.setdiff1d(audit.data.split_rows("train", [0]), opted_out(audit.data, 0))
    if names := single(audit.data):
        audit.missed[f"{', '.join(names)}: one value alone is there, so no other could be put in"] = None
    if len(rows):
        audit.looked[TRAINING] = None
        other = replaced(audit.data, rows, 1)
        for step in audit.steps:
            _training(audit, step, rows, other)
        _singly(audit, audit.steps[0], rows)
        _lengths(audit, rows)
        _begun(audit, audit.data, other, TRAINING)
    rest = np.concatenate([audit.data.split_rows(part) for part in ("valid", "test")])
    if len(rest):
        audit.looked[JUDGING] = None
        other = replaced(audit.data, rest, 1)
        for step in audit.steps:
            for item in changed(step.have, audit.bench.once(step.work, step.kept, data=other)):
                audit.note(item.label, JUDGING, "")


def _singly(audit: Looking, step: MessageStep, rows: Rows) -> None:
    """Replace training examples one by one: a federated buffer may tell of many together, and not of single ones."""
    work = unjudged(step.work, audit.client)
    if len(rows) < 2 or not number_columns(audit.data) or not audit.buffers:
        return
    before = audit.bench.once(work, step.kept, method=audit.frozen)
    left = [
        i
        for i, v in before.items()
        if i.kind == "upload" and i.name in audit.buffers and v.is_floating_point()
    ]
    moved: dict[SentItem, list[np.ndarray]] = {item: [] for item in left}
    for row in rows if left else ():
        data = numbers_replaced(audit.data, rows=np.array([row]), seed=1)
        after = audit.bench.once(work, step.kept, data=data, method=audit.frozen)
        for item in left:
            moved[item].append((after[item] != before[item]).reshape(-1).numpy())
    for item, masks in moved.items():
        if made_singly(masks):
            audit.note(item.label, TRAINING, of=("examples",), image="made of single examples")


def _lengths(audit: Looking, rows: Rows) -> None:
    """Give training examples other lengths: no federated parameter may move but by gradients."""
    if not any(isinstance(column, Ragged) for column in audit.data.columns.values()):
        return
    audit.looked[LENGTHS] = None
    for longer in (True, False):
        data = with_lengths(audit.data, rows, longer=longer)
        for step in audit.steps:
            try:
                again = audit.bench.once(step.work, step.kept, data=data, method=audit.still)
            except MethodError as error:
                audit.missed[f"other lengths of texts: {error}"] = None
                return
            for item in changed(*on_common_rows(step.have_still, again)):
                if item.kind == "upload" and item.name not in audit.buffers:
                    audit.note(item.label, LENGTHS, of=("examples",))


def _training(audit: Looking, step: MessageStep, rows: Rows, other: FederatedData) -> None:
    found = changed(step.have, audit.bench.once(step.work, step.kept, data=other))
    again = audit.bench.once(step.work, step.kept, data=other, method=audit.still)
    rest = set(changed(*on_common_rows(step.have_still, again)))
    image = _images(audit, step, rows)
    for item in found:
        if item.client not in ("", audit.client):
            audit.note(item.label, f"{TRAINING} of another client ({audit.client})", "", of_client=False)
            continue
        declared = ""
        if item.kind == "upload" and item.name in audit.buffers:
            declared = BUFFER
        elif item.kind in ("rows", "report", "weight"):
            declared = "every run tells it"
        elif item.kind == "upload" and item not in rest and audit.base(item.name) not in audit.given:
            audit.put(Finding(leaves=item.label, source=TRAINING, verdict="gradients"))
            continue
        how = image(item) if item.kind in ("sent", "upload") and not declared else ""
        if item.kind == "sent" and not how:
            declared = "Client.sends"
        if declared:
            audit.put(Finding(leaves=item.label, source=TRAINING, verdict="declared", by=declared))
        else:
            audit.note(item.label, TRAINING, of=("examples",), image=how, direct=item in rest)


def _images(audit: Looking, step: MessageStep, rows: Rows) -> Callable[[SentItem], str]:
    """Return what says what an item is of the numbers in examples: of each of them, or of their sums."""
    made: list[tuple[np.ndarray, np.ndarray, list[Items]]] = []

    def image(item: SentItem) -> str:
        if not made:
            datas = [audit.data, *(replaced(audit.data, rows, seed) for seed in range(2, DRAWS))]
            numbers = [floats_of(data, rows) for data in datas]  # (rows, width) each
            found = [audit.bench.once(unjudged(step.work), step.kept, data=data) for data in datas]
            each, sums = np.stack([n.reshape(-1) for n in numbers]), np.stack([n.sum(0) for n in numbers])
            made.append((each, sums, found))
        each, sums, found = made[0]
        for words, canaries in (("", each), ("of the sums of examples: ", sums)):
            how = image_of(item, canaries, found)
            if "value" in how:
                return words + how
        return ""

    return image


def look_at_opt_out(audit: Looking) -> None:
    """Replace opted-out examples, then leave some out: neither values nor numbers may leave, in any round."""
    data = with_opt_out(audit.data)
    rows, real = opted_out(data), opted_out(audit.data)
    if not len(rows):
        audit.missed[f"opted-out examples: {NO_OPT_OUT}"] = None
        return
    if len(rows) > len(real):
        audit.notes[made_up(len(real) > 0)] = None
    heard = audit.heard[FIRST]
    works = [work for work, _ in heard.answered()]
    first = [packet for kind in ("hello", "encoding") for packet, _ in heard.of(kind)]
    try:
        before = [items(packet) for packet, _ in audit.bench.asked(works, data=data)]
    except MethodError as error:
        audit.missed[f"opted-out examples: {error}"] = None
        return
    own = data.clients_of(rows) == 0  # of whom every other one goes, and of all others all
    fewer = kept_rows(data, np.setdiff1d(np.arange(data.examples), np.r_[rows[own][::2], rows[~own]]))
    met = audit.bench.met(first, data)
    values = "values of opted-out examples"
    signs = (1, -1) if number_columns(data) else (0,)
    others = [("the number of opted-out examples", fewer)]
    others += [(values, replaced(data, rows, 1, sign)) for sign in signs]
    which = "which opted-out examples there are"
    others += [(which, other) for other in resampled(data, rows, 50)]
    if any(isinstance(column, Ragged) for column in data.columns.values()):
        others += [
            ("lengths of opted-out examples", with_lengths(data, rows, longer=b)) for b in (True, False)
        ]
    for label, other in others:
        audit.looked[label] = None
        try:
            after = [items(packet) for packet, _ in audit.bench.asked(works, data=other)]
        except MethodError as error:
            audit.missed[f"other {label}: {error}"] = None
            continue
        for one, two in zip((met, *before), (audit.bench.met(first, other), *after), strict=True):
            for item in changed(one, two):
                how = "running statistics" if item.name in audit.buffers else ""
                audit.note(item.label, label, how, of_client=False)
        _begun(audit, data, other, label)


def look_at_adapting(audit: Looking) -> None:
    """See that an order to adapt is answered alike, whatever the client keeps, and whatever its examples are."""
    method, step = audit.bench.method, audit.steps[-1]
    if not method.adapt.phases:
        return
    one_step = method.adapting(phases=tuple(p.but(steps=1, early_stopping=None) for p in method.adapt.phases))
    work = adapting(step.work)
    first, last = (audit.data.split_rows(part, [0]) for part in ("train", "valid"))
    others: dict[str, dict[str, Any]] = {
        "what a client keeps that adapts": {
            "fixed": audit.planted(step, audit.client, step.kept[audit.client])
        },
        "the examples of a client that adapts": {
            "data": replaced(audit.data, np.concatenate([first, last]), 1)
        },
    }
    try:
        before = audit.bench.once(work, step.kept, method=one_step)
        for label, change in others.items():
            audit.looked[label] = None
            asked = {"fixed": step.kept, "method": one_step, **change}
            after = audit.bench.once(work, asked.pop("fixed"), **asked)
            for item in changed(before, after):
                audit.note(item.label, label, of_client=False)
    except MethodError as error:
        audit.missed[f"adapting: {error}"] = None


def _begun(audit: Looking, data: FederatedData, other: FederatedData, label: str) -> None:
    """See whether a server of a simulation looks into the data that it is handed as the list of clients."""
    one, two = (on_server.begun(audit.bench, each) for each in (data, other))
    for name in changed(one, two):
        audit.note(f"server/{name}", label, "in the server's first state", of_client=False)


def look_at_memory(audit: Looking) -> None:
    """See whether device or server remember what neither keeps nor sends: after canaries all must be as at first."""
    for step in audit.steps:
        everything = {client: audit.planted(step, client, kept)[client] for client, kept in step.kept.items()}
        audit.bench.once(step.work, everything)
        for item in changed(step.have, audit.bench.once(step.work, step.kept)):
            audit.note(item.label, "what the device was asked before", "", of_client=False)
        audit.bench.once(step.work, everything)
    after = on_server.followed(audit.bench, audit.heard)
    for one, two in zip(audit.before, after, strict=True):
        for name in changed(one, two):
            audit.note(f"server/{name}", "something besides uploads", "in this process", of_client=False)
