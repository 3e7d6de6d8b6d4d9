"""KTEPS (arXiv 2107.11956), §5.5 and Figure 5: how far an embedding keeps the neighbours that a word has in another.

The words nearest to "man" are looked up in a client's embedding, in what the server restores of it, and aggregated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedkeep.core.declared import declared
from fedkeep.core.errors import ConfigError, DataError
from fedkeep.core.optim import OptimizerState
from fedkeep.core.params import Params
from fedkeep.data import WordVocabulary, text_statistics, vocabulary_from
from fedkeep.engines import LocalDevice, Sequential, job_of, run_round
from fedkeep.engines.client_step import train_client
from fedkeep.engines.round import decode
from fedkeep.experiments.run import Run
from fedkeep.split import Upload
from fedkeep.store import MemoryStore

KS = (10, 50, 100, 500)
SHOWN = 10
SIMILARITIES: tuple[Similarity, ...] = ("cosine", "inner")


def word_neighbours(
    run: Run, words: Sequence[str], client: str | None = None, ks: Sequence[int] = KS
) -> dict[str, Any]:
    """Run one more round beside a finished run, and compare a word's neighbours in three embeddings of it.

    "client" is the client's table after local training; "server" what the server decodes of its upload; "aggregate" the
    server's table after the round. Only the client's own words are compared: it changes no other.

    Args:
        run: a finished run; it is not changed.
        words: whose neighbours; a word that the client does not use is left out.
        client: whose table; by default the client with the most different words.
        ks: numbers of neighbours.

    Returns:
        For JSON: ``client``, ``own_words``, ``nearest`` (word, embedding, similarity → words) and ``common`` (word,
        embedding beside the client's, similarity → {k: how many of the k nearest are the same}).

    Raises:
        ConfigError: the model looks no word up, or the data have no vocabulary of words.
    """
    entry = run.data.meta.get("vocabulary")
    vocabulary = vocabulary_from(entry) if isinstance(entry, dict) else None
    tables = [n for n, c in declared(run.net.module).lookup.items() if c == "text" and n in run.server]
    if not tables or not isinstance(vocabulary, WordVocabulary):
        raise ConfigError(
            "Neighbours of words want a federated table of words that the model declares as its `lookup`."
        )
    name = tables[0]
    index = _most_words(run) if client is None else run.data.index(client)
    before, after, aggregate, rows = _tables(run, index, name)
    symbols = ["<pad>", "<unk>", *vocabulary.symbols]
    own = [symbols[row] for row in rows.tolist()]
    embeddings = {"client": before, "server": after, "aggregate": aggregate}
    found: dict[str, Any] = {
        "client": run.data.ids[index],
        "own_words": len(own),
        "nearest": {},
        "common": {},
    }
    for word in words:
        if word not in own:
            continue
        row = own.index(word)
        found["nearest"][word] = {
            place: {s: [own[i] for i in nearest(table, row, SHOWN, s)] for s in SIMILARITIES}
            for place, table in embeddings.items()
        }
        found["common"][word] = {
            place: {s: _counts(before, embeddings[place], row, ks, s) for s in SIMILARITIES}
            for place in ("server", "aggregate")
        }
    return found


def _counts(
    first: Tensor, second: Tensor, row: int, ks: Sequence[int], similarity: Similarity
) -> dict[str, int]:
    return {str(k): count for k, count in common_neighbours(first, second, row, ks, similarity).items()}


def _most_words(run: Run) -> int:
    words = [s.different_words for s in text_statistics(run.data)]
    return max(range(len(words)), key=lambda c: words[c])


def _tables(run: Run, client: int, name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the client's rows of a table, trained, as restored, and aggregated, and the rows' numbers."""
    everyone = run.clients.positions.tolist()
    store = MemoryStore(run.private.default, run.private.ids)
    store.write(everyone, run.private.read(everyone))
    seed = run.private.default.seed
    job = job_of(run.method, run.net, run.data, store, seed, run.device)
    plain = replace(job, method=job.method.but(upload=()))
    stacked = store.read([client])
    own: Params = {n: v[0] for n, v in stacked.items()}
    name_of, given = str(run.data.ids[client]), run.sent(str(run.data.ids[client])).flat
    bare = train_client(plain, given, own, client, run.round, 1.0)
    sent = train_client(job, given, own, client, run.round, 1.0)
    for result in (bare, sent):
        if result.fault is not None:
            raise result.fault
    assert bare.upload is not None
    assert sent.upload is not None
    restored, _ = decode(run.method, {**run.server, **job.declared}, sent.upload, name_of)
    rows = bare.upload.rows.get(name, torch.arange(len(run.server[name])))
    rows = rows[rows > 1]  # neither padding nor the unknown word
    device = LocalDevice(job, Sequential())
    # A round moves the optimiser's state, and the run keeps its own.
    optimizer = OptimizerState.from_tensors(run.base.optimizer.tensors())
    whole = run.whole.but(progress=1.0, optimizer=optimizer)
    server, _ = run_round(run.method, device, whole, list(run.clients), job.declared)
    start = run.server[name]
    return (
        _moved(start, bare.upload, name)[rows],
        _moved(start, restored, name)[rows],
        server.params[name][rows],
        rows,
    )


def _moved(start: Tensor, upload: Upload, name: str) -> Tensor:
    table = start.clone()
    if name in upload.rows:
        table[upload.rows[name]] += upload.deltas[name]
        return table
    return table + upload.deltas[name]


Similarity = Literal["cosine", "inner"]


def nearest(table: Tensor, row: int, k: int, similarity: Similarity = "cosine") -> list[int]:
    """Return the k rows most similar to a row, itself left out, the most similar first; of equals the lower row.

    Args:
        table: (n, d) vectors.
        row: whose neighbours.
        k: how many, fewer where there are not so many others.
        similarity: ``"cosine"`` (a zero vector is similar to nothing: 0) or ``"inner"`` product.

    Raises:
        ConfigError: an unknown similarity, or k below 1.
        DataError: there is no such row, or the table is not finite.
    """
    if similarity not in ("cosine", "inner") or k < 1:
        raise ConfigError(
            "Neighbours want a similarity 'cosine' or 'inner' and k of at least 1; got {similarity!r} and {k}.",
            similarity=similarity,
            k=k,
        )
    if table.dim() != 2 or not 0 <= row < len(table) or not bool(torch.isfinite(table).all()):
        raise DataError(
            "Neighbours want a finite table (n, d) and a row of it; got shape {got}, row {row}.",
            got=tuple(table.shape),
            row=row,
        )
    exact = table.detach().double()
    if similarity == "cosine":
        exact = torch.nn.functional.normalize(exact, dim=1)
    scores = exact @ exact[row]
    scores[row] = -torch.inf
    order = torch.sort(scores, descending=True, stable=True).indices
    return [int(i) for i in order[: min(k, len(table) - 1)]]


def common_neighbours(
    first: Tensor, second: Tensor, row: int, ks: Sequence[int], similarity: Similarity = "cosine"
) -> dict[int, int]:
    """Return for each k how many of a row's k nearest rows are the same in two tables of the same rows.

    Raises:
        ConfigError, DataError: as for ``nearest``; the tables have different numbers of rows; no k.
    """
    if len(first) != len(second) or not ks:
        raise DataError(
            "Common neighbours want two tables of the same rows and some k; got {count} and {second} rows, "
            "k {ks}.",
            count=len(first),
            second=len(second),
            ks=list(ks),
        )
    a, b = (nearest(table, row, max(ks), similarity) for table in (first, second))
    return {k: len(set(a[:k]) & set(b[:k])) for k in ks}
