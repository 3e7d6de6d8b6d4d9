"""Estimates how many clients fit into memory side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedkeep.core.dispatch import EagerMode
from fedkeep.core.errors import MethodError
from fedkeep.core.params import nbytes, prefixed
from fedkeep.data import Ragged
from fedkeep.engines.base import Job, Work, defaults, first_global
from fedkeep.engines.round import with_links
from fedkeep.engines.vectorised.local import Stacked, StackedPass
from fedkeep.methods.hooks import UPLOAD

CPU_BYTES = 64 << 20
"""What clients side by side may take on a CPU: about what stays in its caches."""

CUDA_SHARE = 0.5
"""The share of a GPU's free memory that they may take; the estimate leaves out what its libraries need for work."""


def room(job: Job, memory: int | None = None) -> int:
    """Return how many clients of a job are trained at once, at least 1.

    Each is counted as one that has the most examples and the longest texts of all the data. So on a CPU the number
    depends on the job alone, and a run that is continued computes as one that was never stopped.

    Args:
        job: what is trained.
        memory: bytes that they may take together; None: 64 MiB on a CPU, half of what is free on a GPU.
    """
    largest = [int(np.argmax(job.data.counts("train")))]
    one = first_clients(job, largest)
    texts = {n: c for n, c in job.data.columns.items() if isinstance(c, Ragged)}
    longest = {
        n: int(np.diff(c.offsets).max(initial=1)) for n, c in texts.items() if n in one.examples.lengths
    }
    if memory is None:
        cuda = job.device.startswith("cuda")
        memory = int(CUDA_SHARE * torch.cuda.mem_get_info(job.device)[0]) if cuda else CPU_BYTES
    return max(1, memory // max(1, bytes_of(one, longest)))


def first_clients(job: Job, clients: Sequence[int]) -> Stacked:
    """Return clients as they are in the first round, each at its default."""
    server = first_global(job.method, job.net, job.data)
    links = prefixed(UPLOAD, job.method.chain().sent(server.links))
    sent = [with_links(job.method.server.sent(server, str(job.data.ids[c])), links).flat for c in clients]
    if job.method.server.send is None:
        sent = sent[:1] * len(clients)
    work = [Work(c, each) for c, each in zip(clients, sent, strict=True)]
    return Stacked(job, work, defaults(job.store, clients), 0, 0.0)


def bytes_of(one: Stacked, longest: Mapping[str, int]) -> int:
    """Return what training takes for one client: values, gradients, moments, and the activations of a step.

    Args:
        one: the client, alone.
        longest: texts are padded to this length, by column.
    """
    one.job.net.train()
    one.seed(0)
    needed = 0
    for number in range(len(one.client.phases)):
        phase = StackedPass(one, number)
        step = next(one.mini_batches(number), None)
        if step is None or not phase.names:
            continue
        batch = step.batch()
        batch |= {n: F.pad(batch[n], (0, max(0, size - batch[n].shape[-1]))) for n, size in longest.items()}
        saved = _saved(partial(phase.computed, step, slice(0, 1), batch))
        moments = phase.phase.optimizer.moments
        trained = nbytes({n: one.params[n] for n in phase.names})
        # Gradients and what the step needs for work; and as much as was saved once more, while gradients flow back.
        needed = max(needed, (2 + moments) * trained + 2 * saved)
    return one.nbytes + needed


def _saved(compute: Callable[[], object]) -> int:
    """Return the bytes that autograd saves on the way; all that is made where a loss takes gradients of its own."""
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            compute()
    except MethodError:
        # torch.func allows no such hooks where gradients are taken within; any other error comes once more.
        made = _Made()
        with made:
            compute()
        return made.nbytes
    return sum(saved.values())


class _Made(EagerMode):
    """Adds up the bytes of all tensors that operations return while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and note what it returns."""
        found = func(*args, **(kwargs or {}))
        for value in found if isinstance(found, tuple | list) else (found,):
            if isinstance(value, Tensor) and not value._is_view():
                self.nbytes += value.nbytes
        return found
