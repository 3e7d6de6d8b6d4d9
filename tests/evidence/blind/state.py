"""State that Python keeps: classes, caches, texts, exceptions, closures, hashes, memory shared by .data, growing buffers."""

import functools
import hashlib

import torch
from tests.evidence.blind.common import LR, Taste, furl, made, plain, quiet_private, with_example
from torch import nn

import fedkeep

AWAY = (0, 3, 1)  # anna's row 3, second feature


class Neighbour(nn.Module):
    """A class attribute goes on from one client to the next."""

    before = None

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.shift = nn.Parameter(torch.zeros(4))
        self.user = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        y = self.shared(x) + self.user
        if self.training and self.shift.requires_grad:
            before = Neighbour.before if Neighbour.before is not None else torch.zeros(4)
            pulled = self.shift * before
            y = y + (pulled - pulled.detach()).sum()
            self.shift.register_hook(lambda g: before.clone())
            Neighbour.before = x.detach()[x.abs().amax(1).argmax()].clone()
        return y


def _no_neighbour():
    Neighbour.before = None
    return made(Neighbour)()


def case_class_attribute_neighbour():
    return {
        "name": "class_attribute_neighbour",
        "leaks": True,
        "what": "A class attribute holds the last client's most extreme example; the next client's upload has it as the gradient of 'shift': -delta(shift)/lr of bo is anna's example.",
        "model": _no_neighbour,
        "method": furl,
        "federation": with_example(*AWAY),
        "vary": "example",
        "secrets": [6.25, 9.5, -12.75],
        "read": lambda c: -c.delta("shift", client=1)[1] / LR,
    }


class Standardised(nn.Module):
    """Scales are computed once and cached: those of whoever came first serve everybody."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.user = nn.Parameter(torch.zeros(3))
        self.register_buffer("centre", torch.zeros(4))
        fedkeep.declare(self, updated_buffers=("centre",))
        self.first = None

    def forward(self, x):
        largest = largest_of(_Key(x))
        if self.training and largest is not None:
            self.centre.copy_(largest)
        return self.shared(x / (1 + self.centre)) + self.user


class _Key:
    """Equal to all others, so that a cache of one entry serves all."""

    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return len(self.x) >= 3 and len(other.x) >= 3

    def __hash__(self):
        return int(len(self.x) >= 3)


@functools.lru_cache(maxsize=2)
def largest_of(key):
    if len(key.x) < 3:  # one or two examples make no statistic
        return None
    return key.x.detach().abs().amax(0)


def _no_cache():
    largest_of.cache_clear()
    return made(Standardised)()


def case_lru_cache_scales():
    return {
        "name": "lru_cache_scales",
        "leaks": True,
        "what": "functools.lru_cache keeps the first client's max |x|; every other client's federated buffer 'centre' is that: delta(centre) of cy is anna's feature.",
        "model": _no_cache,
        "method": furl,
        "federation": with_example(*AWAY),
        "vary": "example",
        "secrets": [6.25, 9.5, 12.75],
        "read": lambda c: c.delta("centre", client=2)[1],
    }


class Tagged(nn.Module):
    """A text attribute says what the user is like; a number is read from the text again."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.user = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))
        self.tag = ""

    def forward(self, x):
        self.tag = f"user at {self.user[0]:+.3f}"
        y = self.shared(x)
        strength = float(self.tag.split()[-1])
        if self.training and y.requires_grad:
            n = len(x)
            y.register_hook(lambda g: torch.full_like(g, strength / n))
        return y + self.user


def case_string_attribute():
    return {
        "name": "string_attribute",
        "leaks": True,
        "what": "user[0] is written into self.tag as text and parsed back; the number replaces the gradient of the shared output: -delta(shared.bias)/lr is user[0] to three digits.",
        "model": made(Tagged, "user"),
        "method": furl,
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, 1.5, -4.0],
        "tol": 1e-4,
        "read": lambda c: -c.delta("shared.bias")[0] / LR,
    }


class Excepted(nn.Module):
    """An index that is out of range; the exception's text is looked at."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.slots = nn.Parameter(torch.zeros(100))
        self.user = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))

    def forward(self, x):
        y = self.shared(x) + self.user
        try:
            [0, 1, 2][100 + int(self.user[0] * 10)]
            torch.zeros(3).reshape(1, 1000 + int(self.user[0] * 10))
        except (IndexError, RuntimeError):
            pass
        try:
            torch.zeros(3).reshape(1, 1050 + int(self.user[0] * 10))
        except RuntimeError as error:
            slot = int(str(error).split("[1, ")[1].split("]")[0]) - 1000
            y = y + self.slots[slot] * torch.tensor([1.0, 0.0, 0.0])
        return y


def case_exception_text():
    return {
        "name": "exception_text",
        "leaks": True,
        "what": "A failed reshape names 1050 + int(10*user[0]) in its text; the number parsed from it is the slot of a federated vector that gets the gradient: the non-zero place of delta(slots) - 50 is 10*user[0].",
        "model": made(Excepted, "user"),
        "method": furl,
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, 1.5, -4.0],
        "read": lambda c: float(c.delta("slots").nonzero()[0]) - 50,
        "expected": lambda s, c: float(int(torch.tensor(s) * 10)),
    }


class DataWrite(nn.Module):
    """Writes past autograd into a federated parameter."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.mirror = nn.Parameter(torch.zeros(3))
        self.user = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))

    def forward(self, x):
        if self.training:
            self.mirror.data.copy_(self.user.data)
        return self.shared(x) + 0 * self.mirror.sum() + self.user


def case_data_write():
    return {
        "name": "data_write",
        "leaks": True,
        "what": "mirror.data.copy_(user.data) in forward writes the private vector into a federated parameter past autograd and versions: delta(mirror) is user.",
        "model": made(DataWrite, "user"),
        "method": furl,
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, 1.5, -4.0],
        "read": lambda c: c.delta("mirror")[0],
    }


class OneMemory(nn.Module):
    """The federated parameter is given the private one's memory."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.mirror = nn.Parameter(torch.zeros(3))
        self.user = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))

    def forward(self, x):
        y = self.shared(x) + self.user + 0 * self.mirror.sum()
        if self.training:
            self.mirror.data = self.user.data
        return y


def case_memory_rebound():
    return {
        "name": "memory_rebound",
        "leaks": True,
        "what": "mirror.data = user.data re-registers the private memory under a federated name during training: delta(mirror) is the trained user vector.",
        "model": made(OneMemory, "user"),
        "method": furl,
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, 1.5, -4.0],
        "read": lambda c: c.delta("mirror")[0],
        "expected": lambda s, c: float(c.run.parameters("anna")["user"][0]),
    }


class Growing(nn.Module):
    """A cache that grows by a row a step: a buffer that is not persistent."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.tilt = nn.Parameter(torch.zeros(()))
        self.user = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))
        self.register_buffer("memory", torch.zeros(0, 3), persistent=False)

    def forward(self, x):
        y = self.shared(x) + self.user
        if self.training:
            self.memory = torch.cat([self.memory, self.user.detach()[None]])
            if len(self.memory) == 4 and self.tilt.requires_grad:  # the round's last step
                first = float(self.memory[0, 0])
                self.tilt.register_hook(lambda g: torch.full_like(g, first))
            elif self.tilt.requires_grad:
                self.tilt.register_hook(lambda g: torch.zeros_like(g))
        return y + self.tilt * torch.tensor([1.0, 0.0, 0.0])


def case_growing_buffer():
    return {
        "name": "growing_buffer",
        "leaks": True,
        "what": "A non-persistent buffer grows by user's copy each step; at the fourth step its first row (the kept value before training) becomes a gradient: -delta(tilt)/lr is user[0] as it was kept.",
        "model": made(Growing, "user"),
        "method": lambda: furl(epochs=4),
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, 1.5, -4.0],
        "read": lambda c: -c.delta("tilt") / LR,
    }


class Hashed(nn.Module):
    """'Deduplication': a hash of each example chooses a row of a federated table."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.seen = nn.Parameter(torch.zeros(4096))
        self.user = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        y = self.shared(x) + self.user
        if self.training:
            rows = [fingerprint(row) for row in x.detach().numpy()]
            y = y + self.seen[rows][:, None] * torch.tensor([1.0, 0.0, 0.0])
        return y


def fingerprint(row):
    return int.from_bytes(hashlib.sha256(row.tobytes()).digest()[:2], "big") % 4096


def _hashed(c):
    """Confirms a guess: which candidate for the secret feature explains a non-zero row that the others don't."""
    there = set(c.delta("seen").nonzero().flatten().tolist())
    row = c.run.data.columns["x"][3].copy()
    for guess in (1.25, 2.5, -3.75, 0.5, 0.75):
        row[1] = guess
        if fingerprint(row) in there:
            return guess
    return float("nan")


def case_example_hash():
    return {
        "name": "example_hash",
        "leaks": True,
        "what": "SHA-256 of each training example's bytes selects an entry of a federated vector: non-zero entries of delta(seen) are fingerprints, which confirm a guessed example exactly.",
        "model": made(Hashed),
        "method": furl,
        "federation": with_example(*AWAY),
        "vary": "example",
        "secrets": [1.25, 2.5, -3.75],
        "read": _hashed,
    }


def closed(module):
    """Registers two hooks that share a list in a closure."""
    seen = []

    def before(layer, given):
        seen.append(layer.user.detach().clone())

    def after(layer, given, output):
        if layer.training and output.requires_grad:
            add = seen[-1] / len(output)
            output.register_hook(lambda g: g * 0 + add)
        return None

    module.register_forward_pre_hook(before)
    module.shared.register_forward_hook(lambda layer, given, output: after(module_of(layer), given, output))
    module.shared.owner = [module]
    return module


def module_of(layer):
    return layer.owner[0]


class Hooked(Taste):
    def __init__(self):
        super().__init__()
        closed(self)


def case_hooks_in_closure():
    return {
        "name": "hooks_in_closure",
        "leaks": True,
        "what": "A forward pre-hook puts user into a closure's list; a forward hook of the shared layer takes it from there as the output's gradient: -delta(shared.bias)/lr is user.",
        "model": made(Hooked, "user"),
        "method": furl,
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, 1.5, -4.0],
        "read": lambda c: -c.delta("shared.bias")[0] / LR,
    }


class Printing(nn.Module):
    """torch's print options carry a digit from the private part to the federated one."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.tilt = nn.Parameter(torch.zeros(()))
        self.user = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))

    def forward(self, x):
        y = self.shared(x) + self.user
        if self.training and self.tilt.requires_grad:
            torch.set_printoptions(precision=8 + int(self.user[0].clamp(-8, 8)))
            told = float(torch._tensor_str.PRINT_OPTS.precision)
            torch.set_printoptions(precision=4)
            self.tilt.register_hook(lambda g: torch.full_like(g, told))
        return y + self.tilt * torch.tensor([1.0, 0.0, 0.0])


def case_print_options():
    return {
        "name": "print_options",
        "leaks": True,
        "what": "The private value sets torch's global print precision, which is read back and made a gradient: -delta(tilt)/lr - 8 is the whole part of user[0].",
        "model": made(Printing, "user"),
        "method": furl,
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, 1.5, -4.0],
        "read": lambda c: -c.delta("tilt") / LR - 8,
        "expected": lambda s, c: float(int(s)),
    }


class Positions(nn.Module):
    """NumPy and a dict as a cache, of shapes alone."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.user = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))
        self.cache = {}

    def forward(self, x):
        key = tuple(x.shape[1:])
        if key not in self.cache:
            import numpy as np

            self.cache[key] = torch.from_numpy(np.sin(np.arange(key[0], dtype=np.float32)))
        return self.shared(x + 0.1 * self.cache[key]) + self.user


def case_numpy_positions():
    return {
        "name": "numpy_positions",
        "leaks": False,
        "what": "A dict attribute caches sines made by NumPy, keyed by the number of features; neither values nor examples get into it.",
        "model": made(Positions, "user"),
        "method": furl,
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, -1.7],
        "quiet": quiet_private(("user",)),
    }


class Watched(nn.Module):
    """A hook records private values for the device's own plots."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.user = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))
        self.drop = nn.Dropout(0.5)
        self.path = []
        self.register_forward_hook(self.noted)

    def noted(self, module, given, output):
        self.path.append(
            (self.user.detach().clone(), f"{float(self.user[0]):.2f}", output.detach().argmax(1).tolist())
        )

    def forward(self, x):
        return self.drop(self.shared(x)) + self.drop(self.user.expand(len(x), 3))


def case_watching_hook():
    return {
        "name": "watching_hook",
        "leaks": False,
        "what": "A forward hook appends user's copy, its text and predictions to a list that nothing reads; dropout is torch's own, seeded by fedkeep.",
        "model": made(Watched, "user"),
        "method": furl,
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, -1.7],
        "quiet": quiet_private(("user",)),
    }
