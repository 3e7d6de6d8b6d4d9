"""Small files of every reader, and the fingerprints that their data had before readers went through an encoding."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedkeep.data import FederatedData, movielens, review_files
from fedkeep.data import read_table as read_any_table
from fedkeep_papers.furl.zulip import zulip_channels
from fedkeep_papers.kteps.fdu_mtl import fdu_mtl
from fedkeep_papers.kteps.tang import tang

ROWS = [
    # user, text, label, split, time, f, g
    ("bo", "good  tea\u00a0é", "pos", "train", "3", "0.1", "2"),
    ("al", "bad tea", "neg", "train", "2", "-1e-40", "2"),
    ("bo", "new tea 😀", "neutral", "val", "1", "3e38", "-7"),
    ("cy", "good good", "pos", "test", "9", "0.30000001", "0"),
    ("al", "odd", "pos", "train", "4", "5", "1"),
    ("cy", "tea", "neg", "train", "5", "6", "-1"),
]


def read_table(path: Path, **settings: Any) -> FederatedData:
    """Read a table by characters, unless settings say else."""
    return read_any_table(path, **{"tokens": "char"} | settings)


HEADER = ("user", "text", "label", "split", "time", "f", "g")
NUMBERS = {"pos": "2", "neg": "0", "neutral": "07"}


def csv(
    path: Path,
    rows: list[tuple[str, ...]] = ROWS,
    drop: tuple[str, ...] = (),
    **changed: Callable[[str], str],
) -> Path:
    """Write a table without some columns, the others changed."""
    kept = [k for k, name in enumerate(HEADER) if name not in drop]
    lines = [
        [HEADER[k] for k in kept],
        *([changed.get(HEADER[k], str)(row[k]) for k in kept] for row in rows),
    ]
    path.write_text("\n".join(map(",".join, lines)) + "\n", encoding="utf-8")
    return path


def shops(folder: Path) -> Path:
    """Write reviews of two shops, labels as words, one training review of which is tested too."""
    folder.mkdir()
    for name, words in (("tea", "pot cup leaf"), ("film", "plot cast cup")):
        for split, count in (("train", 6), ("test", 3)):
            lines = [f"{'good' if n % 2 else 'bad'} {words.split()[n % 3]} {n},{n % 2}" for n in range(count)]
            (folder / f"{name}.{split}.csv").write_text("\n".join(["text,label", *lines, ",1"]) + "\n")
    return folder


def films(folder: Path) -> Path:
    """Write ratings as MovieLens 100K has them."""
    folder.mkdir()
    rows = [(7, 30, 4, 100), (7, 2, 1, 101), (11, 30, 5, 90), (3, 900, 3, 80), (11, 4, 2, 95)]
    (folder / "u.data").write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))
    return folder


def chats(folder: Path) -> Path:
    """Write messages as the Zulip channels have them."""
    folder.mkdir()
    lines = ["label\tcommunity\tchannel\tmessages"] + [f"{k}\tlean\tc{k}\t5" for k in range(3)]
    (folder / "channels.tsv").write_text("\n".join(lines) + "\n")
    rows = [
        {
            "user": 12 - n % 4,
            "community": "lean",
            "label": n % 3,
            "time": n,
            "split": s,
            "text": f"Hello {n} né",
        }
        for n, s in enumerate(["train", "train", "valid", "test"] * 5)
    ]
    (folder / "messages.jsonl.gz").write_bytes(
        gzip.compress("\n".join(map(json.dumps, rows)).encode(), mtime=0)
    )
    return folder


def domains(folder: Path) -> Path:
    """Write reviews as FDU-MTL has them."""
    folder.mkdir()
    rows = [
        {"domain": d, "split": s, "label": n % 2, "text": f"a {d} {'good' if n % 2 else 'bad'} {n // 2}"}
        for d in ("books", "dvd")
        for s in ("train", "test")
        for n in range(5)
    ]
    (folder / "fdu_mtl.jsonl.gz").write_bytes(
        gzip.compress("\n".join(map(json.dumps, rows)).encode(), mtime=0)
    )
    return folder


def corpora(folder: Path) -> Path:
    """Write reviews as Tang's files have them."""
    folder.mkdir()
    for name, levels in (("imdb", 10), ("yelp-2013", 5)):
        for split in ("train", "test"):
            lines = [f"u{n}\t\tp\t\t{n % levels + 1}\t\tso {name} <sssss> {n}" for n in range(7)]
            (folder / f"{name}.{split}.txt.ss").write_text("\n".join(lines) + "\n")
    return folder


READ: dict[str, Callable[[Path], FederatedData]] = {
    "characters": lambda p: read_table(csv(p / "t.csv"), max_length=6),
    "few characters": lambda p: read_table(csv(p / "t.csv"), vocabulary=5),
    "words": lambda p: read_table(csv(p / "t.csv"), tokens="word", vocabulary=4),
    "words, not split": lambda p: read_table(csv(p / "t.csv", drop=("split", "time")), tokens="word"),
    "integers as labels": lambda p: read_table(csv(p / "t.csv", label=NUMBERS.__getitem__)),
    "names of labels": lambda p: read_table(csv(p / "t.csv"), label_names=["neutral", "pos", "other", "neg"]),
    "times with fractions": lambda p: read_table(csv(p / "t.csv", time="{}.5".format)),
    "features": lambda p: read_table(csv(p / "t.csv"), features=["g", "f"], standardise=False),
    "regression": lambda p: read_table(
        csv(p / "t.csv"), features=["f"], label="g", task="regression", standardise=False
    ),
    "reviews": lambda p: review_files(shops(p / "shops"), max_length=2, vocabulary=6),
    "reviews, cut": lambda p: review_files(shops(p / "s"), valid=1, limit=4, drop_duplicates=True, seed=3),
    "films": lambda p: movielens(films(p / "films")),
    "chats": lambda p: zulip_channels(chats(p / "chats"), max_length=7, vocabulary=9, limit_users=3),
    "chats, hashed": lambda p: zulip_channels(chats(p / "chats"), tokens="words", vocabulary=50),
    "domains": lambda p: fdu_mtl(domains(p / "fdu"), domains=["books", "dvd"], vocabulary=5, valid=1),
    "corpora": lambda p: tang(corpora(p / "tang"), levels={"imdb": 10, "yelp-2013": 5}, max_length=3),
}
