"""Whether a model gives the same where a table has the rows in use alone: by numbers, once a run.

A trace sees the way that a model takes with one mini-batch. With a single example, with a full mini-batch or in
evaluation mode it may take another, which reads a table's other rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor

from fedkeep.core.draws import forked, seed_all
from fedkeep.core.errors import FedkeepError
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params, clone
from fedkeep.engines.tables.local_rows import LocalTable, narrow
from fedkeep.engines.tables.trace import tensors_in


def differing(
    net: Net,
    tables: Mapping[str, str],
    params: Mapping[str, Tensor],
    batch: Batch,
    device: str,
    modes: Sequence[bool],
    trained: Collection[Collection[str]],
) -> dict[str, str]:
    """Return tables that may not be cut, each with the reason.

    Args:
        net: the model, which is left in the last of the modes.
        tables: the tables, with the column that looks each up.
        params: all parameters; they are not changed.
        batch: a mini-batch.
        device: where they are.
        modes: whether the model is in training mode; else it is computed without gradients, as in validation.
        trained: the names that require gradients, of each phase.
    """
    found = dict[str, str]()
    # Rows that are alike, as zeros are, would show nothing.
    apart = {n: torch.linspace(0, 1, len(params[n])).unsqueeze(1).to(params[n]) for n in tables}
    values = {n: v + apart[n] if n in apart else v for n, v in params.items()}
    size = len(next(iter(batch.values())))
    for training, leaves in product(modes, trained):
        net.train(training)
        try:
            whole = _outputs(net, values, tables, batch, device, leaves)
            if not _alike(_outputs(net, values, tables, batch, device, leaves), whole):
                continue  # it draws random numbers of its own
            for column in set(tables.values()):
                names = [n for n, c in tables.items() if c == column]
                ids = np.append(batch[column].reshape(-1).cpu().numpy(), 0)
                rows = torch.from_numpy(np.unique(ids).astype(np.int64))
                cut = [LocalTable(n, column, rows, rows) for n in names]
                less = {**batch, column: cut[0].local(batch[column].cpu()).to(batch[column])}
                if not _alike(_outputs(net, narrow(values, cut), tables, less, device, leaves), whole):
                    mode, few = "training" if training else "evaluation", f"{size} example{'s' * (size > 1)}"
                    reason = f"for {few} in {mode} mode the rows in use alone give another output"
                    found |= dict.fromkeys(names, reason)
        except (FedkeepError, RuntimeError, ValueError, IndexError, TypeError):
            continue  # e.g. batch normalisation of one example, which training would not compute either
    return found


def _outputs(
    net: Net,
    values: Mapping[str, Tensor],
    tables: Mapping[str, str],
    batch: Batch,
    device: str,
    leaves: Collection[str],
) -> list[Tensor]:
    """Return what the model gives, with noise that is always the same."""
    mine: Params = {n: v.detach() if n in tables else v.detach().clone() for n, v in values.items()}
    for name in mine.keys() & leaves:
        mine[name].requires_grad_()
    with forked(device), torch.set_grad_enabled(net.module.training):
        seed_all(0, device)
        return [found.detach() for found in tensors_in(net(mine, clone(batch)))]


def _alike(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    pairs = zip(ours, theirs, strict=False)
    return len(ours) == len(theirs) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True) for a, b in pairs
    )
