"""One client fitted on rows of its choice, as ``engines.adapt`` does it, for tests of what a fit gives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedkeep import FederatedData, Run
from fedkeep.core.params import Params
from fedkeep.engines import Adapted, Fitting, fit
from fedkeep.engines.adapt import first_rows


def first_examples(run: Run, client: str | int, k: int | None) -> np.ndarray:
    """Return k of a client's training rows in a seeded order."""
    return first_rows(run.job, run.data.index(client), k)


def adapt_client(
    run: Run,
    client: str | int,
    rows: np.ndarray,
    *,
    data: FederatedData | None = None,
    start: Params | None = None,
) -> Adapted:
    """Fit what is a client's own on some rows, from default values or given ones."""
    job = run.job if data is None else replace(run.job, data=data)
    index = job.data.index(client)
    sent = run.method.server.sent(run.whole, str(job.data.ids[index]))
    return fit(job, run.method.adapt, Fitting(index, sent, rows, start or {}))


def fit_private(run: Run, client: str | int, rows: np.ndarray, data: FederatedData | None = None) -> Params:
    """Return what a client's own values become on some rows."""
    return adapt_client(run, client, rows, data=data).own
