"""Federated buffers: running statistics, observers, counters, views, power vectors."""

import numpy as np
import torch
from tests.evidence.blind.common import furl, made, plain, quiet_private, with_example
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import fedkeep


class NormAfterUser(nn.Module):
    """The user's vector is added before a batch normalisation that nobody named private."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.user = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))
        self.norm = nn.BatchNorm1d(3)
        self.out = nn.Linear(3, 3)

    def forward(self, x):
        return self.out(self.norm(torch.tanh(self.body(x)) * 0.01 + self.user))


def case_norm_after_user():
    return {
        "name": "norm_after_user",
        "leaks": True,
        "what": "BatchNorm1d over (features + private user) is federated: running_mean' = 0.9*0 + 0.1*(user + mean of small features), "
        "so 10*delta of norm.running_mean is the user's vector within 0.01.",
        "model": made(NormAfterUser, "user"),
        "method": furl,
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, 1.7, -2.4],
        "tol": 0.02,
        "read": lambda c: c.delta("norm.running_mean")[0] / 0.1,
    }


class GateStatistic(nn.Module):
    """Keeps a slow mean of a private gate, 'to start new clients from a typical one'."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.gate = nn.Parameter(torch.tensor(0.2))
        self.register_buffer("typical_gate", torch.zeros(()))
        fedkeep.declare(self, updated_buffers=("typical_gate",))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.typical_gate.mul_(0.5).add_(0.5 * self.gate)
        return self.shared(x) * torch.sigmoid(self.gate)


def case_typical_gate():
    return {
        "name": "typical_gate",
        "leaks": True,
        "what": "A declared federated buffer keeps an exponential mean of the private gate: delta of typical_gate times 2 is the gate.",
        "model": made(GateStatistic, "gate"),
        "method": lambda: furl("gate"),
        "federation": plain,
        "vary": "private",
        "secrets": [0.2, 1.25, -0.75],
        "read": lambda c: 2 * c.delta("typical_gate"),
    }


class SignCounter(nn.Module):
    """An integer counter beside the batches' counter."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.user = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        fedkeep.declare(self, updated_buffers=("calls",))

    def forward(self, x):
        if self.training:
            bits = (self.user.detach() > 0).long()
            self.calls += 1 + 16 * (bits * torch.tensor([1, 2, 4])).sum()
        return self.shared(x) + self.user


def case_sign_counter():
    return {
        "name": "sign_counter",
        "leaks": True,
        "what": "An int64 counter of calls counts 16*(sign bits of user) more per call; the server gets the counter: (calls // 16) % 8 are the three signs.",
        "model": made(SignCounter, "user"),
        "method": furl,
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, -0.3, 2.0],
        "read": lambda c: float(int(c.delta("calls")) // 16 % 2),
        "expected": lambda s, c: float(s > 0),
    }


class Observer(nn.Module):
    """A range observer as for quantisation: the largest input seen so far."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.user = nn.Parameter(torch.zeros(3))
        self.register_buffer("largest", torch.zeros(4))
        fedkeep.declare(self, updated_buffers=("largest",))

    def forward(self, x):
        if self.training:
            self.largest.copy_(torch.maximum(self.largest, x.detach().abs().amax(0)))
        return self.shared(x / (1 + self.largest)) + self.user


def case_range_observer():
    return {
        "name": "range_observer",
        "leaks": True,
        "what": "A min/max observer as a federated buffer holds max |x| of the client's training examples: delta of largest is one example's feature, digit for digit.",
        "model": made(Observer),
        "method": furl,
        "federation": with_example(0, 3, 1),
        "vary": "example",
        "secrets": [7.5, 9.125, 6.28125],
        "tol": 1e-6,
        "read": lambda c: c.delta("largest")[1],
    }


class LastView(nn.Module):
    """Writes through a view of a view of a bigger federated buffer."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.user = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))
        self.register_buffer("board", torch.zeros(4, 6))
        fedkeep.declare(self, updated_buffers=("board",))

    def forward(self, x):
        if self.training:
            corner = self.board[1:3].t()[::2]  # (3, 2), strided
            corner.select(1, 1).copy_(self.user.detach().flip(0))
        return self.shared(x) + self.user


def case_strided_view():
    return {
        "name": "strided_view",
        "leaks": True,
        "what": "A strided view of the federated buffer 'board' takes a flipped copy of user in place: delta of board[2, 4] is user[0].",
        "model": made(LastView, "user"),
        "method": furl,
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, 1.5, -4.0],
        "read": lambda c: c.delta("board")[2, 4],
    }


class SharedMemory(nn.Module):
    """A NumPy array that has the buffer's memory."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.user = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))
        self.register_buffer("history", torch.zeros(3))
        fedkeep.declare(self, updated_buffers=("history",))

    def forward(self, x):
        if self.training:
            np.copyto(self.history.numpy(), self.user.detach().numpy())
        return self.shared(x) + self.user


def case_numpy_memory():
    return {
        "name": "numpy_memory",
        "leaks": True,
        "what": "np.copyto writes the private user into the memory of a federated buffer past torch: delta of history is user.",
        "model": made(SharedMemory, "user"),
        "method": furl,
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, 1.5, -4.0],
        "read": lambda c: c.delta("history")[0],
    }


class SpectralHead(nn.Module):
    """A private head under spectral normalisation, of which the pattern names the weight alone."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 2)
        self.head = spectral_norm(nn.Linear(2, 3, bias=False))

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def _power(c):
    u, v = (
        c.first[f"head.parametrizations.weight.0.{n}"] + c.delta(f"head.parametrizations.weight.0.{n}")
        for n in ("_u", "_v")
    )
    return u[0] / u[1]


def _power_wanted(s, c):
    w = c.first["head.parametrizations.weight.original"]
    u, _, _ = torch.linalg.svd(w)
    return float(u[0, 0] / u[1, 0])


def case_spectral_vectors():
    return {
        "name": "spectral_vectors",
        "leaks": True,
        "what": "Only head.*.original is private, so the spectral norm's vectors u, v (buffers) are federated: they are the leading singular vectors of the private weight.",
        "model": made(SpectralHead, "head.parametrizations.weight.original"),
        "method": lambda: furl("head.parametrizations.weight.original"),
        "federation": plain,
        "vary": "private",
        "secrets": [3.0, 6.0, -6.0],
        "tol": 0.12,
        "read": _power,
        "expected": _power_wanted,
    }


class PrivateNorm(NormAfterUser):
    """The same with statistics that stay."""


def case_private_norm():
    return {
        "name": "private_norm",
        "leaks": False,
        "what": "The same norm after the user's vector, but user and norm.* are private: only gradients of body and out leave.",
        "model": made(PrivateNorm, "user"),
        "method": lambda: furl(("user", "norm.*")),
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, 1.7],
        "quiet": quiet_private(("user", "norm.*")),
    }


class StepCounter(nn.Module):
    """A federated step counter used for warm-up."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.user = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        fedkeep.declare(self, updated_buffers=("steps",))

    def forward(self, x):
        if self.training:
            self.steps += 1
        warm = (self.steps / 10).clamp(max=1.0)
        return self.shared(x) + (0.5 + 0.5 * warm) * self.user


def case_step_counter():
    return {
        "name": "step_counter",
        "leaks": False,
        "what": "An int64 federated buffer counts steps for a warm-up beside the user's vector; it depends on nothing but the number of mini-batches.",
        "model": made(StepCounter, "user"),
        "method": furl,
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, -1.7],
        "quiet": quiet_private(("user",)),
    }
