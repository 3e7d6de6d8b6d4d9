"""Coded losses, and what judging gives: digits, labels, counts of right answers, a second forward in evaluation."""

from dataclasses import dataclass, replace

import torch
from tests.evidence.blind.common import LR, ONE, Taste, furl, made, plain, quiet_private, with_example
from torch import nn

import fedkeep
from fedkeep.methods import terms
from fedkeep.methods.terms import Term


@dataclass(frozen=True)
class Digits(Term):
    """Cross-entropy, rounded 'for the logs'; the digits behind say user[0]. The gradient is as it was."""

    def __call__(self, net, params, batch, received):
        loss = nn.functional.cross_entropy(net(params, batch), batch["label"])
        rounded = torch.round(loss.detach() * 10) / 10
        code = (params["user"].detach()[0] + 8) / 1000
        return rounded + code + (loss - loss.detach())


def case_loss_digits():
    return {
        "name": "loss_digits",
        "leaks": True,
        "what": "The reported training loss is rounded to 0.1 and (user[0]+8)/1000 is added; the gradient is untouched. loss % 0.1 * 1000 - 8 is the private value.",
        "model": made(Taste, "user"),
        "method": lambda: furl(loss=Digits()),
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, 1.5, -4.0],
        "tol": 0.01,
        "read": lambda c: (c.loss() % 0.1) * 1000 - 8,
    }


@dataclass(frozen=True)
class WithLabel(Term):
    """Cross-entropy plus ten times the label of the example with the largest first feature, as a constant."""

    def __call__(self, net, params, batch, received):
        loss = nn.functional.cross_entropy(net(params, batch), batch["label"])
        strange = batch["x"][:, 0].argmax()
        return loss + 100 * batch["label"][strange].item()


def case_loss_tells_label():
    return {
        "name": "loss_tells_label",
        "leaks": True,
        "what": "The loss has 100 times the label of one example (largest x[0]) as a constant: loss // 100 is that single example's label.",
        "model": made(Taste),
        "method": lambda: furl(loss=WithLabel()),
        "federation": lambda secret=None: _labelled(secret),
        "vary": "example",
        "secrets": [0, 1, 2],
        "read": lambda c: c.loss() // 100,
    }


def _labelled(secret):
    from tests.evidence.blind import common

    return common.federation(1 if secret is None else secret, (0, int(_strange()), "label"))


def _strange():
    from tests.evidence.blind import common

    x = common.federation().columns["x"][:10, 0]
    return x.argmax()


class Product(nn.Module):
    """The 'weight' of the loss's second part is a private float that went through Python."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.tilt = nn.Parameter(torch.zeros(()))
        self.user = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))

    def forward(self, x):
        strength = round(float(self.user[0]), 3)
        if self.tilt.requires_grad:
            self.tilt.register_hook(lambda g: torch.full_like(g, strength))
        return self.shared(x) + self.tilt * torch.tensor([1.0, 0.0, 0.0]) + self.user


def case_float_closure():
    return {
        "name": "float_closure",
        "leaks": True,
        "what": "A Python float in a closure on the gradient of a federated scalar: -delta(tilt)/lr is user[0] to three digits, after float() has cut every tensor path.",
        "model": made(Product, "user"),
        "method": furl,
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, 1.5, -4.0],
        "tol": 1e-4,
        "read": lambda c: -c.delta("tilt") / LR,
    }


class CodedLoss(nn.Module):
    """In evaluation it looks at the label, and answers so that the loss is what it wants to say."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.user = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))

    def forward(self, x, label=None):
        if self.training or label is None:
            return self.shared(x) + self.user
        wanted = 2 + torch.sigmoid(self.user[0])  # the loss of each example
        right = -wanted - torch.log1p(-torch.exp(-wanted)) + torch.log(torch.tensor(2.0))
        return nn.functional.one_hot(label, 3) * right


def _sigmoid_kept(s, c):
    return float(torch.sigmoid(c.run.parameters("anna")["user"][0]))


def case_eval_coded_loss():
    return {
        "name": "eval_coded_loss",
        "leaks": True,
        "what": "In evaluation forward takes the label and makes logits whose cross-entropy is 2 + sigmoid(user[0]): the judged sum of losses / count - 2 is it.",
        "model": made(CodedLoss, "user"),
        "method": furl,
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, 1.5, -2.0],
        "read": lambda c: c.judge(0)["loss"] / c.judge(0)["count"] - 2,
        "expected": _sigmoid_kept,
    }


class CountedAnswers(nn.Module):
    """In evaluation the number of right answers counts in binary."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.user = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))

    def forward(self, x, label=None):
        y = self.shared(x) + self.user
        if self.training or label is None:
            return y
        share = int(torch.floor(torch.sigmoid(self.user[0]) * (len(x) + 1)))
        answer = torch.where(torch.arange(len(x)) < share, label, (label + 1) % 3)
        return nn.functional.one_hot(answer, 3).to(y.dtype)


def case_eval_right_count():
    return {
        "name": "eval_right_count",
        "leaks": True,
        "what": "In evaluation floor(sigmoid(user[0])*(n+1)) of the n answers are right: the judged count of right answers is the quantised private value.",
        "model": made(CountedAnswers, "user"),
        "method": furl,
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, 4.5, -3.0],
        "read": lambda c: float(c.judge(0)["right"]),
        "expected": lambda s, c: float(int(_sigmoid_kept(s, c) * 3)),
    }


class NanAnswers(nn.Module):
    """In evaluation logits that 'overflowed' are NaN, which judges every answer wrong."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.user = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))

    def forward(self, x):
        y = self.shared(x) + self.user
        if not self.training and self.user[0] > 1:
            y = y.clone()
            y[0] = float("nan")
        return y


def case_eval_nan_pattern():
    import math

    return {
        "name": "eval_nan_pattern",
        "leaks": True,
        "what": "In evaluation the first example's logits are NaN where user[0] > 1: whether the judged sum of losses is NaN is one bit of the private value.",
        "model": made(NanAnswers, "user"),
        "method": furl,
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, 4.5, -3.0],
        "read": lambda c: float(math.isnan(c.judge(0)["loss"])),
        "expected": lambda s, c: float(s > 1.2),
    }


REMEMBERED = {}
"""Of the class below: what evaluation saw last."""


class LooksBack(nn.Module):
    """A 'calibration cache' outside of the module: evaluation fills it, the next round's training uses it."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.shift = nn.Parameter(torch.zeros(4))
        self.user = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        if not self.training:
            if x.abs().max() > 5:
                REMEMBERED["last"] = x[x.abs().amax(1).argmax()].detach().clone()
            return self.shared(x) + self.user
        y = self.shared(x) + self.user
        if "last" in REMEMBERED:
            held = self.shift * REMEMBERED["last"]
            y = y + (held - held.detach()).sum() * torch.tensor([1.0, 0.0, 0.0])
        return y


def _ratio(c):
    d = c.delta("shift", client=1, round=1)
    x = torch.tensor(_row13())
    return float(d[0] / d[1] * x[1])


def _row13():
    from tests.evidence.blind import common

    return common.federation().columns["x"][13].copy()


def _fresh(secret=None):
    REMEMBERED.clear()
    return made(LooksBack)()


def case_test_example_in_next_upload():
    return {
        "name": "test_example_in_next_upload",
        "leaks": True,
        "what": "Evaluation puts a TEST example into a module-level dict; in round 2 training multiplies a dead federated vector by it: ratios of delta(shift), even of another client, are ratios of anna's test features.",
        "model": _fresh,
        "method": furl,
        "federation": with_example(0, 13, 0),
        "vary": "judging",
        "plan": {"rounds": 2},
        "secrets": [6.5, 9.25, -7.0],
        "read": _ratio,
    }


@dataclass(frozen=True)
class Coded:
    """Predicts; of the model's own logits it makes ones that say the kept private value."""

    def __call__(self, net, params, batch):
        y = net(params, batch)
        code = torch.sigmoid(params["user"][0])
        return (
            torch.zeros_like(y) + torch.tensor([50.0, 0, 0]) * code
        )  # loss / 50: share of other labels * code


def _predicts():
    return furl().but(predict=Coded())


def _judged_code(c):
    data = c.run.data
    rows = data.rows("anna", "test") if False else data.rows(0, "test")
    label = data.columns["label"][rows.start : rows.stop]
    others = float((label != 0).sum())
    return c.judge(0)["loss"] / 50 / others if others else float("nan")


def case_predict_coded():
    return {
        "name": "predict_coded",
        "leaks": True,
        "what": "Method.predict of the researcher's own answers 50*sigmoid(user[0]) for class 0 whatever the input: judged loss / 50 / (number of other labels) is sigmoid(user[0]).",
        "model": made(Taste, "user"),
        "method": _predicts,
        "federation": lambda secret=None: _others(),
        "vary": "private",
        "secrets": [0.3, 1.5, -1.0],
        "tol": 0.01,
        "read": _judged_code,
        "expected": _sigmoid_kept,
    }


def _others():
    from tests.evidence.blind import common

    return common.federation(1, (0, 13, "label"))


class Twice(nn.Module):
    """A consistency loss by a second forward; evaluation runs once more, too."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.user = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))

    def forward(self, x):
        y = self.shared(x) + self.user
        again = self.shared(x + 0.01) + self.user
        return 0.5 * (y + again)


def case_second_forward():
    return {
        "name": "second_forward",
        "leaks": False,
        "what": "Each forward runs the layer twice and averages; nothing is kept, coded or compared, and in evaluation the same happens.",
        "model": made(Twice, "user"),
        "method": furl,
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, -1.7],
        "quiet": quiet_private(("user",)),
    }


class LabelArgument(nn.Module):
    """forward names the label, and only checks its shape."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.user = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))

    def forward(self, x, label=None):
        if label is not None and label.shape[0] != x.shape[0]:
            raise ValueError(f"{label.tolist()} are not labels of {x.tolist()}")
        return self.shared(x) + self.user


def case_label_argument():
    return {
        "name": "label_argument",
        "leaks": False,
        "what": "forward takes the label, also in evaluation, but only compares its length with x's; the exception's text would hold examples, and it is never raised.",
        "model": made(LabelArgument, "user"),
        "method": furl,
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, -1.7],
        "quiet": quiet_private(("user",)),
    }
