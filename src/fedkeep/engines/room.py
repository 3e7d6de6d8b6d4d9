"""How many clients memory holds side by side."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedkeep.core.params import Params, nbytes
from fedkeep.data import Ragged
from fedkeep.engines.base import Job, train_rows
from fedkeep.engines.stacked import Stacked
from fedkeep.engines.together import Pass, noise_of

CPU_BYTES = 64 << 20
"""What clients side by side may take on a CPU: about what stays in its caches."""

CUDA_SHARE = 0.5
"""The share of a GPU's free memory that they may take; the estimate leaves out what its libraries need for work."""


class Room:
    """How many clients of a job are trained at once.

    Args:
        job: the job.
        memory: bytes that they may take together; None: 64 MiB on a CPU, half of what is free on a GPU.
    """

    def __init__(self, job: Job, memory: int | None) -> None:
        self.job, self.memory = job, memory
        self._most, self._longest, self._bytes = 0, 0, 0

    def clients(self, received: Params, clients: list[int], stored: Params) -> int:
        """Return for how many clients of a cohort there is room, at least 1.

        A client counts as much as one would that had the most examples and the longest text of them all. It is
        measured again when a cohort exceeds those before.
        """
        counts = [self.job.data.count(client, "train") for client in clients]
        largest = int(np.argmax(counts))
        longest = max(self._length(client) for client in clients)
        if counts[largest] > self._most or longest > self._longest:
            self._most, self._longest = max(counts[largest], self._most), max(longest, self._longest)
            own = {name: values[largest : largest + 1] for name, values in stored.items()}
            one = Stacked(self.job, received, [clients[largest]], own, 0, 0.0)
            self._bytes = bytes_of(one, self._longest)
        return max(1, self._memory() // max(1, self._bytes))

    def _memory(self) -> int:
        if self.memory is not None:
            return self.memory
        if self.job.device.startswith("cuda"):
            return int(CUDA_SHARE * torch.cuda.mem_get_info(self.job.device)[0])
        return CPU_BYTES

    def _length(self, client: int) -> int:
        rows = train_rows(self.job.data, client)
        texts = [c for c in self.job.data.columns.values() if isinstance(c, Ragged)]
        return max(
            (int(np.diff(t.offsets[rows[0] : rows[-1] + 2]).max()) for t in texts if len(rows)), default=0
        )


def bytes_of(one: Stacked, longest: int = 0) -> int:
    """Return what training takes for one client: values, gradients, moments and activations of its largest step.

    Args:
        one: the client, alone.
        longest: texts are padded to this length.
    """
    one.job.net.train()
    texts = one.examples.lengths
    needed = 0
    for number in range(len(one.method.phases)):
        phase = Pass(one, number, noise_of(one, number))
        step = next(phase.steps(), None)
        if step is None or not phase.names:
            continue
        batch = one.examples.batch(step)
        batch |= {n: F.pad(batch[n], (0, max(0, longest - batch[n].shape[-1]))) for n in texts}
        saved: dict[int, int] = {}

        def note(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            phase.gradients(step, slice(0, 1), batch)
        optimizer = phase.phase.optimizer
        moments = int(optimizer.momentum > 0) if optimizer.kind == "sgd" else 2
        trained = nbytes({n: one.params[n] for n in phase.names})
        # A gradient and what the step needs for work; and as much again as was kept, while gradients flow back.
        needed = max(needed, (2 + moments) * trained + 2 * sum(saved.values()))
    return one.nbytes + needed
