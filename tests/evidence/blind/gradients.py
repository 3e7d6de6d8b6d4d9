"""Tricks with gradients of federated parameters: custom Functions, hooks, low bits, detached products, sorting, seeds, sparse places."""

from dataclasses import dataclass

import torch
from tests.evidence.blind.common import LR, ONE, Taste, furl, made, plain, quiet_private
from torch import nn

import fedkeep
from fedkeep.methods import terms
from fedkeep.methods.terms import Term


class WriteBack(torch.autograd.Function):
    """Adds a bias; on the way back the bias's gradient is something else."""

    @staticmethod
    def forward(ctx, x, bias, secret):
        ctx.save_for_backward(secret)
        return x + bias

    @staticmethod
    def backward(ctx, g):
        (secret,) = ctx.saved_tensors
        return g, secret.clone(), None


class CustomBackward(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3, bias=False)
        self.bias = nn.Parameter(torch.zeros(3))
        self.user = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))

    def forward(self, x):
        return WriteBack.apply(self.shared(x), self.bias, self.user.detach()) + self.user


def case_custom_backward():
    return {
        "name": "custom_backward",
        "leaks": True,
        "what": "A custom autograd Function returns user as the gradient of the federated bias: -delta(bias)/lr is user.",
        "model": made(CustomBackward, "user"),
        "method": furl,
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, 1.5, -4.0],
        "read": lambda c: -c.delta("bias")[0] / LR,
    }


class LowBits(nn.Module):
    """Rounds the gradient of the bias to 1/256, 'for compression', and the rest of the number says user's sign."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.user = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))

    def forward(self, x):
        y = self.shared(x)
        if y.requires_grad and self.training:
            bit = (self.user.detach() > 0).to(y.dtype)
            y.register_hook(lambda g: torch.round(g * 256 * 8) / (256 * 8) + bit * 2.0**-16 / len(g))
        return y + self.user


def case_low_bits():
    return {
        "name": "low_bits",
        "leaks": True,
        "what": "A tensor hook rounds each output gradient to multiples of 2^-11 and adds 2^-16/n where user > 0: the bias's gradient modulo 2^-11 is 2^-16 or 0, the sign bits.",
        "model": made(LowBits, "user"),
        "method": lambda: furl(batch_size=64),
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, -1.5, 4.0],
        "read": lambda c: float(
            ((-c.delta("shared.bias")[0].double() / LR) % 2.0**-11) > 2.0**-18
            and ((-c.delta("shared.bias")[0].double() / LR) % 2.0**-11) < 2.0**-12
        ),
        "expected": lambda s, c: float(s > 0),
    }


class Detached(nn.Module):
    """Federated temperatures that start at zero and are multiplied by detached private values."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.mix = nn.Parameter(torch.zeros(2))
        self.user = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))

    def forward(self, x):
        y = self.shared(x)
        direction = torch.stack([torch.ones(3), 1 + self.user.detach()]) * torch.tensor([1.0, 0.0, 0.0])
        return y + (self.mix - self.mix.detach()) @ direction + 0 * self.user.sum() + self.user


def case_detached_ratio():
    return {
        "name": "detached_ratio",
        "leaks": True,
        "what": "A dead federated pair (mix - mix.detach()) is multiplied by 1 and by 1 + user[0], so it changes no output and the ratio of its two deltas is 1 + user[0] exactly.",
        "model": made(Detached, "user"),
        "method": furl,
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, 1.5, -4.0],
        "read": lambda c: c.delta("mix")[1] / c.delta("mix")[0] - 1,
    }


@dataclass(frozen=True)
class TowardsUser(Term):
    """1/2 |prototype - user|^2: the federated prototype shall be near to everybody's vector."""

    def __call__(self, net, params, batch, received):
        return 0.5 * (params["prototype"] - params["user"].detach()).square().sum()


class Prototype(Taste):
    def __init__(self):
        super().__init__()
        self.prototype = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return self.logits(x) + 0 * self.prototype.sum()


def case_prototype_term():
    return {
        "name": "prototype_term",
        "leaks": True,
        "what": "A regulariser pulls a federated prototype towards the private vector: delta(prototype) = lr * (user - prototype), a copy of user.",
        "model": made(Prototype, "user"),
        "method": lambda: furl(loss=terms.cross_entropy() + 1.0 * TowardsUser()),
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, 1.5, -4.0],
        "read": lambda c: c.delta("prototype")[0] / LR,
    }


class Branch(nn.Module):
    """Python decides by a private value which federated offset is used."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.low = nn.Parameter(torch.zeros(3))
        self.high = nn.Parameter(torch.zeros(3))
        self.user = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))

    def forward(self, x):
        offset = self.high if self.user[0].item() > 1.0 else self.low
        return self.shared(x) + offset + self.user


def case_python_branch():
    return {
        "name": "python_branch",
        "leaks": True,
        "what": "if user[0].item() > 1 the federated offset 'high' is used, else 'low': the one whose delta is not zero tells the threshold's bit, and over rounds bisects the value.",
        "model": made(Branch, "user"),
        "method": furl,
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, 1.5, -4.0],
        "read": lambda c: (
            float(bool(c.delta("high").any()))
            if bool(c.delta("high").any()) != bool(c.delta("low").any())
            else float("nan")
        ),
        "expected": lambda s, c: float(s > 1),
    }


class SortedPlaces(nn.Module):
    """Ranks of the private vector reorder a federated vector that has gradient 0, 1, 2."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.taps = nn.Parameter(torch.zeros(3))
        self.user = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))

    def forward(self, x):
        order = torch.argsort(self.user.detach())
        taps = self.taps[order] * torch.tensor([1.0, 2.0, 3.0])
        y = self.shared(x) + self.user
        return y + (taps - taps.detach()).sum() * torch.tensor([1.0, 0.0, 0.0])


def _rank(c):
    d = c.delta("taps").abs()
    return float((d / d.min()).round()[0])


def case_sorted_places():
    return {
        "name": "sorted_places",
        "leaks": True,
        "what": "taps[argsort(user)] is weighted 1, 2, 3, so the sizes of the three deltas of taps are the ranks of user's numbers.",
        "model": made(SortedPlaces, "user"),
        "method": furl,
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, 0.0, -4.0],
        "read": _rank,
        "expected": lambda s, c: {0.3: 3.0, 0.0: 2.0, -4.0: 1.0}[s],
    }


class SeededNoise(nn.Module):
    """'Reproducible' dropout: its seed is made of the private vector."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.wide = nn.Parameter(torch.zeros(32))
        self.user = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))

    def forward(self, x):
        y = self.shared(x) + self.user
        if self.training:
            torch.manual_seed(int(self.user.detach()[0].abs() * 1000) % 4096)
            kept = nn.functional.dropout(torch.ones(32), 0.5, True)
            y = y + (self.wide * kept).sum() * torch.tensor([1.0, 0.0, 0.0])
        return y


def _seed(c):
    mask = c.delta("wide") != 0
    for seed in range(4096):
        g = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        if torch.equal(nn.functional.dropout(torch.ones(32), 0.5, True) != 0, mask):
            return float(seed)
        del g
    return float("nan")


def case_dropout_seed():
    return {
        "name": "dropout_seed",
        "leaks": True,
        "what": "torch.manual_seed(int(|user[0]| * 1000)) before dropout: the zero pattern of delta(wide) is the mask, and trying 4096 seeds finds the one, hence user[0] to three digits.",
        "model": made(SeededNoise, "user"),
        "method": furl,
        "federation": plain,
        "vary": "private",
        "secrets": [0.5, 1.5, -4.0],
        "read": _seed,
        "expected": lambda s, c: float(int(abs(torch.tensor(s)) * 1000)),
    }


class SparsePlace(nn.Module):
    """A sparse matrix whose column is the private value's bucket."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.table = nn.Parameter(torch.zeros(64, 3))
        self.user = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))

    def forward(self, x):
        bucket = int(((self.user[0].detach() + 8) * 4).long().clamp(0, 63))
        where = torch.tensor([list(range(len(x))), [bucket] * len(x)])
        one_hot = torch.sparse_coo_tensor(where, torch.ones(len(x)), (len(x), 64))
        return self.shared(x) + torch.sparse.mm(one_hot, self.table) + self.user


def case_sparse_place():
    return {
        "name": "sparse_place",
        "leaks": True,
        "what": "A sparse one-hot matrix selects row floor((user[0]+8)*4) of a federated table: the one row of delta(table) that is not zero is the quantised private value.",
        "model": made(SparsePlace, "user"),
        "method": furl,
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, 1.5, -4.0],
        "read": lambda c: float(c.delta("table").any(1).nonzero()[0]),
        "expected": lambda s, c: float(int((s + 8) * 4)),
    }


class BackwardHook(nn.Module):
    """A module's backward hook replaces what reaches the first layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.second = nn.Linear(3, 3)
        self.user = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))
        self.second.register_full_backward_hook(self.replaced)

    def replaced(self, layer, grad_input, grad_output):
        n = len(grad_output[0])
        return (self.user.detach().expand(n, 3) / n,)

    def forward(self, x):
        return self.second(self.first(x)) + self.user


def case_backward_hook():
    return {
        "name": "backward_hook",
        "leaks": True,
        "what": "A full backward hook on the second layer returns user/n as the gradient of its input, so that -delta(first.bias)/lr is user.",
        "model": made(BackwardHook, "user"),
        "method": furl,
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, 1.5, -4.0],
        "read": lambda c: -c.delta("first.bias")[0] / LR,
    }


class Reversal(torch.autograd.Function):
    """Gradient reversal (Ganin and Lempitsky)."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return -0.5 * g


class Reversed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)
        self.user = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.head(h) + 0.1 * self.head(Reversal.apply(h)) + self.user


def case_gradient_reversal():
    return {
        "name": "gradient_reversal",
        "leaks": False,
        "what": "A custom autograd Function reverses gradients by the constant -0.5; it sees nothing private, and what leaves are gradients of federated weights.",
        "model": made(Reversed, "user"),
        "method": furl,
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, -1.7],
        "quiet": quiet_private(("user",)),
    }


class Straight(nn.Module):
    """Weights rounded in forward, with a straight-through gradient."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.user = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))

    def forward(self, x):
        w = self.shared.weight
        rounded = w + (torch.round(w * 8) / 8 - w).detach()
        return nn.functional.linear(x, rounded, self.shared.bias) + self.user


def case_straight_through():
    return {
        "name": "straight_through",
        "leaks": False,
        "what": "Quantisation-aware training: federated weights are rounded, with detach for a straight-through gradient; no private value is rounded or coded.",
        "model": made(Straight, "user"),
        "method": furl,
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, -1.7],
        "quiet": quiet_private(("user",)),
    }
