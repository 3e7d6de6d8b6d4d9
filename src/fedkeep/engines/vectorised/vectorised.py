"""Clients side by side: a cohort, or as much of it as memory holds, is trained as one tensor program.

The way on CUDA, where one client's small batches leave most of the machine idle. On a CPU it pays for small clients in
large cohorts, whose time goes into calling operations (``auto``); others run faster one after the other, in cache.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fedkeep.core.errors import ConfigError, MethodError, check_range
from fedkeep.core.params import Params
from fedkeep.engines.client_step import ClientResult, ClientToTrain, Engine, Job
from fedkeep.engines.vectorised.costs import room
from fedkeep.engines.vectorised.padding_probe import runs_together
from fedkeep.engines.vectorised.stacked_lanes import Stacked


class Vectorised(Engine):
    """Trains many clients as one tensor program; the result is that of ``sequential`` but for rounding.

    It depends neither on how many clients are trained at once nor on their order: every client has its own random
    streams, for dropout too. A cohort that memory does not hold is divided.

    Args:
        clients: how many are trained at once; None: as many as ``memory`` holds.
        memory: bytes that they may take together; None: 64 MiB on a CPU, half of what is free on a GPU.
    """

    name = "vectorised"

    def __init__(self, clients: int | None = None, memory: int | None = None) -> None:
        check_range("[1, inf]", clients=clients, memory=memory)
        self.clients, self.memory = clients, memory
        self._job: Job | None = None
        self._most = 1

    def train(
        self, job: Job, work: Sequence[ClientToTrain], round: int, progress: float
    ) -> Iterator[ClientResult]:
        """Train clients, as many at once as memory holds, and yield what each gives.

        Raises:
            ConfigError: this model or method cannot be trained so; says why.
        """
        if self._job is not job:
            if (reason := self.suits(job)) is not None:
                raise ConfigError(
                    "engine='vectorised' cannot train {method!r}: {reason} Use engine='sequential'.",
                    method=job.method.name,
                    reason=reason,
                )
            self._job, self._most = job, self.clients or room(job, self.memory)
        yield from self._results(job, work, round, progress)

    def _results(
        self, job: Job, work: Sequence[ClientToTrain], round: int, progress: float
    ) -> Iterator[ClientResult]:
        """Train some clients at once, and some more; fewer at a time where a GPU's memory runs out."""
        stored, done = job.kept([each.client for each in work]), 0
        while done < len(work):
            some = work[done : done + self._most]
            own = {name: values[done : done + self._most] for name, values in stored.items()}
            together = self._together(job, some, own, round, progress)
            if together is None:
                self._most = len(some) // 2
                torch.cuda.empty_cache()
                continue
            yield from together.results()
            del together  # before the next are stacked: memory holds them once
            done += len(some)

    def _together(
        self, job: Job, work: Sequence[ClientToTrain], own: Params, round: int, progress: float
    ) -> Stacked | None:
        """Train clients at once; None: a GPU has no memory for so many."""
        try:
            together = Stacked(job, work, own, round, progress)
            together.train()
        except torch.OutOfMemoryError:
            if len(work) == 1:
                raise
            return None
        return together

    @staticmethod
    def suits(job: Job) -> str | None:
        """Return why this engine cannot train a job, or None: it can; see ``tried``."""
        return Vectorised.tried(job)[0]

    @staticmethod
    def tried(job: Job) -> tuple[str | None, bool]:
        """Return why this engine cannot train a job, or None, and if torch computes an operation client by client.

        Every phase's loss and gradient are computed for one client's first mini-batch; and where there are texts, for a
        few clients' first mini-batches, padded little and much.
        """
        calls, one_by_one = Calls(), False
        if job.net.switches:
            return "a layer's own train() or eval() is for one client's values at a time.", one_by_one
        if not job.net.functional:
            return (
                "the model holds its tensors in a list or a closure, too, where no others can be put.",
                one_by_one,
            )
        if hooked := [n for n, p in job.net.module.named_parameters() if p._backward_hooks]:
            return (
                f"{hooked[0]!r} has a hook, which is called for one client's gradient at a time.",
                one_by_one,
            )
        try:
            with warnings.catch_warnings(record=True) as said, job.net.still(), calls:
                warnings.simplefilter("always")
                indifferent = runs_together(job)
        except MethodError as error:
            if not isinstance(error.__cause__, ValueError | RuntimeError):
                raise
            why = PACKED if PACKS in calls.seen else _said(error.__cause__, job.net.module)
            return f"its loss cannot be computed for several clients at once ({why}).", one_by_one
        for each in said:
            if "batching rule" in str(each.message):  # torch's word to its developers
                one_by_one = True
            else:
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        if PACKS in calls.seen:
            return f"its loss cannot be computed for several clients at once ({PACKED}).", one_by_one
        if not indifferent:
            why = "the loss depends on how far texts are padded, which differs with the clients trained at once."
            return why, one_by_one
        return None, one_by_one


PACKED = (
    "pack_padded_sequence makes shapes of lengths, which differ between clients; give lengths to fedkeep.nn.GRU or "
    "LSTM, layer(x, lengths), or mask the padding"
)

IN_PLACE = ("inplace", "accessing `data`", "out= or view ops")
"""What torch says where something is written in place that is one for all clients."""


PACKS = "_pack_padded_sequence"
"""Called where sequences are packed: lengths then become shapes, and clients' cannot be stacked."""


class Calls(TorchFunctionMode):
    """Sees which of torch's functions are called, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = set[str]()

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function as it is."""
        self.seen.add(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def _said(error: BaseException, module: nn.Module) -> str:
    """Return the reason in a few words, with a way out where there is one."""
    text = str(error).strip().split("\n")[0].rstrip(".")
    if "random" in text and "randomness" in text:
        inside = any(isinstance(m, nn.MultiheadAttention) and m.dropout for m in module.modules())
        return "it draws random numbers otherwise than by dropout" + (
            "; nn.MultiheadAttention(dropout=0) draws none" if inside else ""
        )
    if any(sign in text for sign in IN_PLACE):
        return (
            "forward writes into a tensor in place, e.g. a slow copy or a power iteration, where each client needs one "
            "of its own"
        )
    layers = {type(m).__name__ for m in module.modules() if type(m) in (nn.LSTM, nn.GRU)}
    return text + "".join(
        f"; fedkeep.nn.{n} has the parameters of torch.nn.{n} and can" for n in sorted(layers)
    )
