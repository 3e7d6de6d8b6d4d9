"""Random streams named by (seed, purpose, client, round), and torch's own generators.

A draw depends on its stream's name alone, so results don't depend on the number of workers, the order of
clients or the engine. Dropout draws from torch's own generators, of the CPU and of a GPU; what draws from others is found.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch

from fedkeep.core.errors import MethodError
from fedkeep.core.modes import EagerMode


def stream(seed: int, purpose: str, client: str = "", round: int = 0) -> int:
    """Return the 63-bit number that seeds the stream of this name."""
    name = f"{seed}\x1f{purpose}\x1f{client}\x1f{round}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str, client: str = "", round: int = 0) -> torch.Generator:
    """Return a CPU ``torch.Generator`` at the start of the stream of this name."""
    return torch.Generator().manual_seed(stream(seed, purpose, client, round))


def numpy_generator(seed: int, purpose: str, client: str = "", round: int = 0) -> np.random.Generator:
    """Return a numpy generator at the start of the stream of this name."""
    return np.random.default_rng(stream(seed, purpose, client, round))


T = TypeVar("T")
LOOK = 0.02  # seconds in which a thread that draws all the time has drawn
LOOK_AT_NEW = 0.2  # the same, of threads that were not there at the last look: they may wait for a core
LOOK_BEFORE_BLAME = 1.0  # the same, where many threads wait for a core
EVERY = 1.0  # seconds between two looks


def position() -> tuple[object, ...]:
    """Return how far Python's and NumPy's global generators have come, which no seed governs.

    Normal numbers are drawn by twos, and one may be left.
    """
    there: Any = np.random.get_state(legacy=True)  # noqa: NPY002
    _, own, left = random.getstate()
    return int(there[2]), int(there[3]), own[-1], own[0], left


def forked(device: str) -> AbstractContextManager[None]:
    """Leave torch's generators afterwards as they were, a GPU's too."""
    return torch.random.fork_rng(devices=[device] if device.startswith("cuda") else [])


def repeatable(device: str) -> None:
    """Let a GPU compute as the CPU does, and the same bits each time, from now on in this process."""
    if device.startswith("cuda"):
        cudnn = torch.backends.cudnn
        cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = False, True, False


def seed_all(seed: int, device: str) -> None:
    """Seed torch's own generators, which dropout draws from."""
    # Not torch.manual_seed, which notes a traceback for a GPU each time.
    torch.default_generator.manual_seed(seed)
    if device.startswith("cuda"):
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def states(device: str) -> list[torch.Tensor]:
    """Return how far torch's own generators have come, of the CPU and of a GPU."""
    cuda = [torch.cuda.get_rng_state(device)] if device.startswith("cuda") else []
    return [torch.get_rng_state(), *cuda]


def unmoved(before: Sequence[torch.Tensor], device: str) -> bool:
    """Return whether torch's own generators stand where they stood."""
    return all(map(torch.equal, before, states(device)))


class DrawWatch(EagerMode):
    """While it is active, this thread's operations that draw from torch's own generators are noted in ``seen``.

    Args:
        generator: what they draw from instead, to the same bits; other threads draw from torch's own. None: from these.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.generator, self.seen = generator, list[str]()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note an operation that draws, and call it."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            given = {a.name: a.default_value for a in func._schema.arguments}  # which are not passed on
            given |= dict(zip(given, args, strict=False)) | (kwargs or {})
            none = any(given.get(name) == 0 for name in ("dropout", "dropout_p"))
            if given.get("generator") is None and not none:
                self.seen.append(str(func))
                if self.generator is not None:
                    return func.overloadpacket(*args, **{**(kwargs or {}), "generator": self.generator})
        return func(*args, **(kwargs or {}))


def others_draw(look: Callable[[], object] = position, seconds: float = LOOK_BEFORE_BLAME) -> bool:
    """Tell whether another thread of this process draws: whether a generator moves while nothing of ours runs.

    Args:
        look: returns how far the generators have come.
        seconds: to look for at most.
    """
    if threading.active_count() == 1:
        return False
    before, end = look(), time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(LOOK)
        if look() != before:
            return True
    return False


def without_draws(what: str, hook: Callable[[], T], device: str) -> T:
    """Return what a hook gives that runs on a device; where other threads draw, it may be called a second time.

    Raises:
        MethodError: it drew random numbers, so that its result would depend on the order of clients.
    """
    before, place = states(device), position()
    found = hook()
    drew = not unmoved(before, device)
    if drew and threading.active_count() > 1:
        with DrawWatch() as draws:
            found = hook()
        drew = bool(draws.seen)
    if drew or (position() != place and not others_draw()):
        raise MethodError(
            "The {what} drew random numbers, so its result would depend on the order of clients. A model "
            "may draw in training alone, e.g. functional.dropout(x, p, self.training); a hook draws from "
            "a generator of its own, seeded by what it is given.",
            what=what,
        )
    return found


class Undisturbed:
    """Steps of one thread that may draw from torch's own generators, which all threads of a process share.

    Where there are other threads, it is looked at once a second, whenever there are new ones, and between two steps,
    whether a generator moves by itself. A thread that draws seldom, and only while a step is under way, is not seen.

    Args:
        who: takes the steps, for messages.
        device: where.
    """

    looked: ClassVar[float] = -EVERY
    """When this process was last looked at, in seconds of its clock."""
    disturbed: ClassVar[bool] = False
    """Whether another thread drew then."""
    known: ClassVar[weakref.WeakSet[threading.Thread]] = weakref.WeakSet()
    """The threads that there were then."""

    def __init__(self, who: object, device: str) -> None:
        self.who, self.device = who, device
        self.left: list[torch.Tensor] = []

    def seeded(self) -> None:
        """Begin: the generators have just been seeded."""
        threads = threading.enumerate()
        several = len(threads) > 1
        new = any(thread not in self.known for thread in threads)
        if several and (new or time.monotonic() - self.looked >= EVERY):
            before = states(self.device)
            seconds = LOOK_AT_NEW if new else LOOK
            Undisturbed.disturbed = others_draw(lambda: unmoved(before, self.device), seconds)
            Undisturbed.looked = time.monotonic()
            Undisturbed.known = weakref.WeakSet(threads)
        self.left = states(self.device) if several else []

    def step(self, take: Callable[[], T]) -> T:
        """Return what a step gives.

        Raises:
            MethodError: it draws, and so does another thread.
        """
        if not self.left:
            return take()
        if not self.disturbed and unmoved(self.left, self.device):
            found = take()
        else:
            with DrawWatch() as draws:
                found = take()
            if draws.seen:
                raise MethodError(
                    "{who}: training draws random numbers ({operation}) from torch's own generator, and so does another "
                    "thread of this process ({threads} run): no seed would govern it. Let the other thread draw from a "
                    "torch.Generator of its own, or train in a process of its own, e.g. with engine='workers'.",
                    who=self.who,
                    operation=draws.seen[0],
                    threads=threading.active_count(),
                )
        self.left = states(self.device)
        return found
