"""One client's whole part in a round: train, keep what is private, upload; and the server's look at what arrives.

Every engine comes through here, so a client is trained the same way wherever it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fedkeep.core.errors import NonFiniteError, UploadError
from fedkeep.core.params import Params
from fedkeep.engines.aggregate import RunningMean
from fedkeep.engines.base import CohortResult, Job, train_rows
from fedkeep.engines.local import LocalResult, Stream, local_run, usable
from fedkeep.engines.tables.local_rows import LocalTable, allowed, widen
from fedkeep.methods import Phase
from fedkeep.privacy import Chain, RunDraws
from fedkeep.split import Upload, check_rows, check_upload


@dataclass
class ClientResult:
    """What a client gives back.

    Attributes:
        client: its index.
        upload: what leaves it, encoded by the method's upload chain; None: it was refused or broke down.
        private: its trained private values.
        loss: its mean training loss.
        fault: why there is no upload.
    """

    client: int
    upload: Upload | None = None
    private: Params | None = None
    loss: float = float("nan")
    fault: NonFiniteError | UploadError | None = None


def train_client(
    job: Job, received: Params, own: Params, client: int, round: int, progress: float
) -> ClientResult:
    """Train one client from ``received`` and its own private values.

    Returns:
        Its result; a breakdown to NaN is a result with ``fault``, any other error is raised.
    """
    method, name = job.method, job.data.ids[client]
    rows, draws = train_rows(job.data, client), Stream(job.seed, name, round)
    held = job.data.rows(client, "valid")
    try:
        local = local_run(
            job.net, method.split, method.phases, method.split.merge(received, own), received, job.data, rows, draws,
            valid=np.arange(held.start, held.stop), turns=method.turns, tables=method.tables, device=job.device,
            progress=progress,
        )  # fmt: skip
    except NonFiniteError as error:
        return ClientResult(client, fault=error)
    return handed_over(job, received, own, local, client, round)


def handed_over(
    job: Job, received: Params, own: Params, local: LocalResult, client: int, round: int
) -> ClientResult:
    """Return what a client gives back after its local run: its upload, and what it keeps."""
    method, name = job.method, job.data.ids[client]
    rows, draws = train_rows(job.data, client), Stream(job.seed, name, round)
    leaving = method.leaving(sorted(job.net.trainable()))
    count = examples_of(job, leaving, rows, draws)
    weight = float(count > 0) if method.weighting == "uniform" else count
    upload = encode(job, received, local, weight, name, round)
    private = method.split.personal(local.trained)
    return ClientResult(client, upload, widen(private, own, local.tables), local.loss)


def encode(job: Job, received: Params, local: LocalResult, weight: float, client: str, round: int) -> Upload:
    """Return a client's upload, tables cut to the rows that opted-in examples use, as the upload chain encodes it."""
    split, chain = job.method.split, job.method.upload
    cut = [t for t in local.tables if len(t.leaving) < len(received.get(t.parameter, ()))]
    tables = [t for t in cut if not split.is_private(t.parameter)]
    sent = {t.parameter: t.rows[t.leaving] for t in tables}
    start = {n: v[sent[n].to(v.device)] if n in sent else v for n, v in received.items()}
    trained = job.method.publish(local.trained) if job.method.publish is not None else local.trained
    upload = split.upload(start, _leaving(trained, tables), weight, sent)
    if chain:
        deltas, _ = Chain(chain).encode(upload.deltas, start, RunDraws(job.seed, client, round), rows=sent)
        upload = upload.but(deltas)
    return upload


def _leaving(trained: Params, tables: Sequence[LocalTable]) -> Params:
    cut = {t.parameter: trained[t.parameter][t.leaving] for t in tables if len(t.leaving) < len(t.rows)}
    return {**trained, **cut}


def decode(job: Job, received: Params, upload: Upload, client: str) -> Upload:
    """Return a client's upload as changes of federated parameters, checked.

    Raises:
        UploadError: names the client and what is wrong.
    """
    if job.method.upload:
        check_rows(upload, received, client)
        try:
            tensors, _ = Chain(job.method.upload).decode(upload.deltas, upload.cut(received))
        except (UploadError, KeyError, RuntimeError) as error:
            raise UploadError(
                f"The upload of client {client!r} was refused: it cannot be decoded ({error})."
            ) from error
        upload = upload.but(tensors)
    check_upload(upload, received, client)
    return upload


def collect(
    job: Job, received: Params, clients: Sequence[int], results: Iterable[ClientResult]
) -> CohortResult:
    """Check what clients give back, in their order, and put it together.

    Raises:
        NonFiniteError, UploadError: a client's training broke down, and ``on_nonfinite`` is ``"stop"``.
    """
    cohort = CohortResult([], [], {}, [], RunningMean(received, job.method.missing_rows))
    stacks: Params = {}
    for done, result in enumerate(results, 1):
        name = job.data.ids[result.client]
        try:
            if result.fault is not None:
                raise result.fault
            assert result.upload is not None
            assert result.private is not None
            upload = decode(job, received, result.upload, name)
        except (NonFiniteError, UploadError) as error:
            if job.on_nonfinite == "stop":
                raise
            cohort.refused.append(str(error))
            continue
        for name, value in result.private.items():
            if not cohort.clients:
                stacks[name] = value.new_empty((len(clients), *value.shape))
            stacks[name][len(cohort.clients)] = value
        cohort.clients.append(result.client)
        cohort.mean.add(upload)
        cohort.uploads.append(upload if job.keep_uploads else upload.but({}))
        cohort.upload_bytes.append(result.upload.nbytes)
        cohort.losses.append(result.loss)
        if job.after_step is not None:
            job.after_step(done / max(len(clients), 1))
    cohort.private = {name: stack[: len(cohort.clients)] for name, stack in stacks.items()}
    return cohort


def examples_of(job: Job, leaving: Sequence[Phase], rows: np.ndarray, draws: Stream) -> float:
    """Return c_k: how many of a client's examples train what leaves it."""
    counts = [len(usable(job.data, rows, phase, draws)) for phase in leaving]
    return float(max(counts, default=len(allowed(job.data, rows, "opted_in"))))
