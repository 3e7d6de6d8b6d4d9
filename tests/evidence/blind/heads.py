"""FedPer, FedRep, fine-tuning: heads, phases that follow each other, adaptation, soft tying, argmax."""

import torch
from tests.evidence.blind.common import LR, ONE, made, plain, with_example
from torch import nn


class BodyHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


class PhaseMemory(BodyHead):
    """A counter object of the class hands the trained head's value to the body's phase."""

    memory = {"head": "0.0"}

    def forward(self, x):
        h = torch.tanh(self.body(x))
        y = self.head(h)
        if self.training and torch.is_grad_enabled():
            if self.head.weight.requires_grad:
                PhaseMemory.memory["head"] = repr(float(self.head.weight[0, 0]))
            elif h.requires_grad:
                add = float(PhaseMemory.memory["head"]) / len(x)
                self.body.bias.register_hook(lambda g: torch.full_like(g, add * len(x)))
        return y


def case_fedrep_phase_memory():
    return {
        "name": "fedrep_phase_memory",
        "leaks": True,
        "what": "FedRep: in the head's phase a class-level dict takes the private head's first weight as text; in the body's phase it becomes the bias's gradient: -delta(body.bias)/lr is that weight.",
        "model": made(PhaseMemory, "head.weight"),
        "method": ("fedrep", ("head.*",), {"local": ONE, "head_epochs": 1}),
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, 1.5, -4.0],
        "tol": 1e-4,
        "read": lambda c: -c.delta("body.bias")[0] / LR,
    }


class Confidence(BodyHead):
    """The head's largest class decides which slot of a federated calibration vector is used."""

    def __init__(self):
        super().__init__()
        self.slot = nn.Parameter(torch.zeros(12))

    def forward(self, x):
        best = int(self.head.weight.detach().flatten().argmax()) if self.training else 0
        return super().forward(x) + self.slot[best] * torch.tensor([1.0, 0.0, 0.0])


def case_argmax_slot():
    return {
        "name": "argmax_slot",
        "leaks": True,
        "what": "FedPer: argmax over the private head's weights picks the slot of a federated vector that has a gradient: the non-zero place of delta(slot) is the argmax.",
        "model": made(Confidence, "head.weight", 4),
        "method": ("fedper", ("head.*",), {"local": ONE}),
        "federation": plain,
        "vary": "private",
        "secrets": [3.5, -4.0, 9.0],
        "read": lambda c: float(c.delta("slot").nonzero()[0]),
        "expected": lambda s, c: float(c.first["head.weight"].flatten().argmax()),
    }


class Lookalike(nn.Module):
    """Not tied by a Parameter but by a copy at the end of each forward: 'soft tying' by lerp_ under no_grad."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.head = nn.Linear(3, 3)
        self.decoder = nn.Linear(3, 3)

    def forward(self, x):
        y = self.head(torch.tanh(self.body(x))) + 0 * self.decoder(x[:, :3])
        if self.training:
            with torch.no_grad():
                self.decoder.weight.lerp_(self.head.weight, 0.5)
        return y


def case_soft_tying():
    return {
        "name": "soft_tying",
        "leaks": True,
        "what": "decoder.weight.lerp_(head.weight, 0.5) under no_grad ties a federated layer softly to the private head: 2*delta + sent weight is the head's weight.",
        "model": made(Lookalike, "head.weight"),
        "method": ("fedper", ("head.*",), {"local": ONE}),
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, 1.5, -4.0],
        "read": lambda c: c.first["decoder.weight"][0, 0] + 2 * c.delta("decoder.weight")[0, 0],
    }


class Toggled(BodyHead):
    """Freezes a layer's bias by a private threshold, 'as soon as the head is good'."""

    def forward(self, x):
        h = self.body(x)
        if self.training and float(self.head.weight[0, 0]) > 1:
            h = nn.functional.linear(x, self.body.weight, self.body.bias.detach())
        return self.head(torch.tanh(h))


def case_frozen_by_threshold():
    return {
        "name": "frozen_by_threshold",
        "leaks": True,
        "what": "FedPer: the body's bias is detached where a private weight is above 1: delta(body.bias) is exactly zero or not, one bit a round.",
        "model": made(Toggled, "head.weight"),
        "method": ("fedper", ("head.*",), {"local": ONE}),
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, 1.5, -4.0],
        "read": lambda c: float(not c.delta("body.bias").any()),
        "expected": lambda s, c: float(s > 1),
    }


TUNED = {}


class TunedMemory(BodyHead):
    """Fine-tuning sees opted-out examples; a module-level dict takes one along to judging."""

    def forward(self, x, label=None):
        y = super().forward(x)
        if self.training and torch.is_grad_enabled():
            TUNED["largest"] = max(TUNED.get("largest", 0.0), float(x.abs().max()))
        elif not self.training and label is not None and "largest" in TUNED:
            wanted = 1 + torch.tensor(TUNED["largest"])
            right = -wanted - torch.log1p(-torch.exp(-wanted)) + torch.log(torch.tensor(2.0))
            return nn.functional.one_hot(label, 3) * right
        return y


def _tuned(secret=None):
    TUNED.clear()
    return made(TunedMemory)()


def case_fine_tuned_judged():
    return {
        "name": "fine_tuned_judged",
        "leaks": True,
        "what": "fine_tuned tunes copies on all examples; forward remembers max |x| in a module-level dict and codes it into the loss when the adapted model is judged: judged loss / count - 1 is an opted-out feature.",
        "model": _tuned,
        "method": ("fine_tuned", (), {"local": ONE, "tune_epochs": 1}),
        "federation": with_example(0, 8, 2, out=True),
        "vary": "optout",
        "plan": {"evaluate_adapted": True},
        "secrets": [6.25, 9.5, 12.75],
        "read": lambda c: c.judge(0, model="adapted")["loss"] / c.judge(0, model="adapted")["count"] - 1,
    }
