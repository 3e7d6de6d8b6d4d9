"""Opted-out examples: a private phase on all examples comes before a federated one on opted-in ones; memory between them."""

import io
import os
from dataclasses import dataclass

import numpy as np
import torch
from tests.evidence.blind.common import LR, ONE, federation, made, with_example
from torch import nn

import fedkeep
from fedkeep.methods import Client, Init, Method, terms
from fedkeep.methods.terms import Term
from fedkeep.split import Split

OUT = (0, 8, 2)  # anna's row 8 is opted out; its third feature is the secret


@dataclass(frozen=True)
class OwnLoss(Term):
    """Cross-entropy of the private branch."""

    def __call__(self, net, params, batch, received):
        return nn.functional.cross_entropy(net.call("own_logits", params, batch), batch["label"])


def in_turn(own=None, shared=None, **more):
    """The private branch on all examples, then the federated one on opted-in examples; neither reads the other."""
    phases = (
        ONE.but(trains="private", examples="all", loss=own or OwnLoss()),
        ONE.but(trains="federated", loss=shared or terms.cross_entropy()),
    )
    return Method(
        name="in_turn", split=Split("own.*"), client=Client(phases=phases, keep=Init(value="model")), **more
    )


class Branches(nn.Module):
    """forward is the federated branch while it is trained, and both in evaluation."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.own = nn.Linear(4, 3)

    def own_logits(self, x):
        return self.own(x)

    def forward(self, x):
        y = self.shared(x)
        return y if self.training else y + self.own(x)


DIARY = []


class Diary(Branches):
    """A list of the module's file remembers what the private branch saw."""

    def own_logits(self, x):
        if self.training:
            DIARY.append(x.detach().clone())
        return self.own(x)


@dataclass(frozen=True)
class FromDiary(Term):
    """Cross-entropy, and a constant of the largest input that was ever seen."""

    def __call__(self, net, params, batch, received):
        loss = nn.functional.cross_entropy(net(params, batch), batch["label"])
        seen = max((float(x.abs().max()) for x in DIARY), default=0.0)
        DIARY.clear()
        return loss + 100 * round(seen, 2)


def case_global_list_to_loss():
    return {
        "name": "global_list_to_loss",
        "leaks": True,
        "what": "A module-level list keeps what the private phase saw (all examples); the federated phase's loss gets 100 * the largest as a constant: the reported loss // 1 / 100 is an opted-out feature.",
        "model": made(Diary),
        "method": lambda: in_turn(shared=FromDiary()),
        "federation": with_example(*OUT, out=True),
        "vary": "optout",
        "secrets": [6.25, 9.5, 12.75],
        "tol": 0.03,
        "read": lambda c: c.loss() / 100,
    }


class Tally(Branches):
    """A class attribute counts examples of all phases."""

    total = 0

    def __init__(self):
        super().__init__()
        self.tilt = nn.Parameter(torch.zeros(()))

    def own_logits(self, x):
        if self.training and torch.is_grad_enabled():
            Tally.total = len(x)
        return self.own(x)

    def forward(self, x):
        y = super().forward(x)
        if self.training and torch.is_grad_enabled() and self.tilt.requires_grad:
            extra = float(Tally.total - len(x))
            self.tilt.register_hook(lambda g: torch.full_like(g, extra))
        return y + self.tilt * torch.tensor([1.0, 0.0, 0.0])


def _more_out(secret=None):
    """As `federation(out=True)`, with further opted-out training examples of anna's."""
    data = federation(out=True)
    more = 0 if secret is None else int(secret)
    cols = {n: np.asarray(v) for n, v in data.columns.items()}
    rows = np.concatenate([np.repeat(8, more), np.arange(42)]).astype(int)
    who = np.concatenate([np.repeat("anna", more), np.repeat(["anna", "bo", "cy"], 14)])
    split = ["train"] * more + (["train"] * 10 + ["valid"] * 2 + ["test"] * 2) * 3
    return fedkeep.FederatedData.from_columns(
        client=who,
        columns={n: v[rows] for n, v in cols.items()},
        split=split,
        meta={"task": "multiclass", "classes": 3},
    )


def case_count_opted_out():
    return {
        "name": "count_opted_out",
        "leaks": True,
        "what": "A class attribute has the private phase's number of examples; in the federated phase a gradient hook turns it into a gradient: -delta(tilt)/lr is the number of opted-out examples.",
        "model": made(Tally),
        "method": in_turn,
        "federation": _more_out,
        "vary": "optout",
        "secrets": [0, 3, 5],
        "read": lambda c: -c.delta("tilt") / LR,
        "expected": lambda s, c: float(2 + s),
    }


class Note(Branches):
    """A note stands on a parameter itself, as a Python attribute of the tensor."""

    def __init__(self):
        super().__init__()
        self.tilt = nn.Parameter(torch.zeros(()))

    def own_logits(self, x):
        if self.training and torch.is_grad_enabled():
            self.shared.weight.note = float(x.abs().max())
        return self.own(x)

    def forward(self, x):
        y = super().forward(x)
        note = getattr(self.shared.weight, "note", 0.0)
        return (
            y
            + (self.tilt * note - (self.tilt * note).detach()) * torch.tensor([1.0, 0.0, 0.0])
            + (self.tilt * 0)
        )


def _note(c):
    # d/d tilt = note * sum of g_0 over examples / n, and delta(shared.bias)[0] is the same sum
    return c.delta("tilt") / c.delta("shared.bias")[0]


def case_note_on_parameter():
    return {
        "name": "note_on_parameter",
        "leaks": True,
        "what": "The private phase writes max |x| over all examples to an attribute of a Parameter object; the federated phase multiplies a dead scalar by it: delta(tilt)/delta(shared.bias)[0] is the opted-out feature.",
        "model": made(Note),
        "method": in_turn,
        "federation": with_example(*OUT, out=True),
        "vary": "optout",
        "secrets": [6.25, 9.5, 12.75],
        "read": _note,
    }


@dataclass(frozen=True)
class Anchored(Term):
    """Cross-entropy plus a pull of class anchors to the class means; means are cached by the class of terms."""

    own: bool = False
    means = {}  # shared by all terms: an accident that is easily made

    def __call__(self, net, params, batch, received):
        if self.own:
            Anchored.means[0] = batch["x"][batch["x"].abs().amax(1).argmax()].detach()
            return nn.functional.cross_entropy(net.call("own_logits", params, batch), batch["label"])
        loss = nn.functional.cross_entropy(net(params, batch), batch["label"])
        mean = Anchored.means.get(0, torch.zeros(4))
        return loss + 0.5 * (params["anchor"] - mean).square().sum()


class Anchors(Branches):
    def __init__(self):
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(4))


def case_term_class_cache():
    return {
        "name": "term_class_cache",
        "leaks": True,
        "what": "A Term caches an outlying example in a dict of its class during the private phase; the federated phase's term pulls a federated anchor to it: delta(anchor)/lr is the opted-out example.",
        "model": made(Anchors),
        "method": lambda: in_turn(own=Anchored(own=True), shared=Anchored()),
        "federation": with_example(*OUT, out=True),
        "vary": "optout",
        "secrets": [6.25, 9.5, -12.75],
        "read": lambda c: c.delta("anchor")[2] / LR,
    }


class Environment(Branches):
    """os.environ as memory between phases."""

    def own_logits(self, x):
        if self.training and torch.is_grad_enabled():
            os.environ["BLIND_LAST"] = f"{float(x.abs().max()):.4f}"
        return self.own(x)

    def forward(self, x):
        y = super().forward(x)
        if self.training and y.requires_grad:
            add = float(os.environ.pop("BLIND_LAST", "0")) / len(x)
            y.register_hook(lambda g: torch.zeros_like(g) + add * torch.tensor([1.0, 0.0, 0.0]))
        return y


def case_environment_variable():
    return {
        "name": "environment_variable",
        "leaks": True,
        "what": "The private phase writes max |x| to os.environ as text; the federated phase puts it in place of the output gradient: -delta(shared.bias)[0]/lr is the opted-out feature.",
        "model": made(Environment),
        "method": in_turn,
        "federation": with_example(*OUT, out=True),
        "vary": "optout",
        "secrets": [6.25, 9.5, 12.75],
        "read": lambda c: -c.delta("shared.bias")[0] / LR,
    }


def centred(x, learn=True, seen=[]):  # noqa: B006  (the accident)
    """Subtract the running mean of all that was ever seen: a mutable default argument."""
    if learn:
        seen.append(x.detach().mean(0))
    return x - torch.stack(seen).mean(0) if seen else x


class Centring(Branches):
    """Both branches centre their input by one helper function."""

    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.shared.weight)
        centred.__defaults__[1].clear()

    def own_logits(self, x):
        return self.own(centred(x, self.training))

    def forward(self, x):
        y = self.shared(centred(x, self.training))
        return y if self.training else y + self.own(x)


def case_mutable_default():
    return {
        "name": "mutable_default",
        "leaks": True,
        "what": "A helper's mutable default argument keeps means over all phases; the federated branch is centred by them: delta(shared.weight) shifts by lr * (sum of g) outer mean, where sum of g is -delta(bias)/lr, so who knows the opted-in examples solves for the opted-out mean.",
        "model": made(Centring),
        "method": in_turn,
        "federation": with_example(*OUT, out=True),
        "vary": "optout",
        "secrets": [6.25, 60.5, -120.75],
        "tol": 0.05,
        "read": _mean,
    }


def _centre(c):
    """What anna's federated branch subtracted from column 2, given the opted-in examples; the weights begin at zero."""
    data = c.run.data
    x, label = data.columns["x"][:8], data.columns["label"][:8]
    p = torch.softmax(c.first["shared.bias"], 0)
    g = (p - nn.functional.one_hot(torch.tensor(label), 3)) / 8
    total, sums = g.sum(0), g.t() @ torch.tensor(x)
    return float(((sums + c.delta("shared.weight") / LR)[:, 2] / total)[total.abs().argmax()])


def _mean(c):
    """The candidate that explains the centre: a mean of the rehearsal's means, all ten rows' and the eight rows'."""
    centre = _centre(c)
    for secret in (6.25, 60.5, -120.75):
        rows = np.array(c.run.data.columns["x"][:10, 2], float)
        rows[8] = secret
        for k in range(12):
            if abs((k * rows[:2].mean() + rows.mean() + rows[:8].mean()) / (k + 2) - centre) < 1e-4 * abs(
                centre
            ):
                return secret
    return float("nan")


class LogBook(Branches):
    """Writes a log into io.StringIO, an attribute; the other branch reads its last line."""

    def __init__(self):
        super().__init__()
        self.tilt = nn.Parameter(torch.zeros(()))
        self.log = io.StringIO()

    def own_logits(self, x):
        if self.training and torch.is_grad_enabled():
            self.log.write(f"max {float(x.abs().max()):.4f}\n")
        return self.own(x)

    def forward(self, x):
        y = super().forward(x)
        lines = self.log.getvalue().split()
        if self.training and self.tilt.requires_grad and lines:
            last = float(lines[-1])
            self.tilt.register_hook(lambda g: torch.full_like(g, last))
        return y + self.tilt * torch.tensor([1.0, 0.0, 0.0])


def case_text_log():
    return {
        "name": "text_log",
        "leaks": True,
        "what": "The private phase logs max |x| into self.log = io.StringIO(); the federated phase parses the last line and makes it a gradient: -delta(tilt)/lr is the opted-out feature.",
        "model": made(LogBook),
        "method": in_turn,
        "federation": with_example(*OUT, out=True),
        "vary": "optout",
        "secrets": [6.25, 9.5, 12.75],
        "read": lambda c: -c.delta("tilt") / LR,
    }


class Cached(Branches):
    """Keeps the last batch as an attribute for a plot; nobody reads it in training."""

    def __init__(self):
        super().__init__()
        self.last, self.history = None, []

    def own_logits(self, x):
        self.last = x.detach()
        self.history.append(float(x.mean()))
        return self.own(x)

    def plot(self):
        return self.last, self.history


def quiet_optout(run, case):
    a, b = (run(case, s) for s in case["secrets"][:2])
    return f"uploads, weights, bytes, losses that differ: {[n for n in a.same(b) if n != 'judged']}"


def case_last_batch_for_plots():
    return {
        "name": "last_batch_for_plots",
        "leaks": False,
        "what": "The private phase on all examples stores the last batch and a list of means in attributes 'for plots'; the federated phase never looks at them, so uploads keep their bits.",
        "model": made(Cached),
        "method": in_turn,
        "federation": with_example(*OUT, out=True),
        "vary": "optout",
        "secrets": [6.25, 9.5],
        "quiet": quiet_optout,
    }
