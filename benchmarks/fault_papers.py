"""Hostile files for the readers of the papers' data, see ``benchmarks.fault_makers``."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from random import Random

from benchmarks.fault_makers import Trial, mutated, odd, sound


def paper_data(random: Random, folder: Path) -> Trial:
    """The files of Zulip, FDU-MTL or Tang, with odd values and damaged bytes."""
    return random.choice((_zulip, _fdu, _tang))(random, folder)


def _write(random: Random, path: Path, text: str) -> None:
    content = text.encode("utf-8", "surrogatepass")
    content = mutated(random, content) if random.random() < 0.3 else content
    if path.suffix == ".gz":
        content = gzip.compress(content)
        content = mutated(random, content) if random.random() < 0.2 else content
    path.write_bytes(content)


def _zulip(random: Random, folder: Path) -> Trial:
    from fedkeep_papers.furl.zulip import zulip_channels

    share = random.choice((0.0, 0.01))
    rows = [
        {
            "user": odd(random, n % 3, share),
            "community": odd(random, "rust", share),
            "label": odd(random, n % 2, share),
            "time": odd(random, n, share),
            "split": odd(random, ("train", "valid", "test")[n % 3], share),
            "text": odd(random, "hello", share),
        }
        for n in range(9)
    ]
    _write(random, folder / "messages.jsonl.gz", "\n".join(map(json.dumps, rows)))
    _write(
        random, folder / "channels.tsv", "label\tcommunity\tchannel\tmessages\n0\trust\ta\t5\n1\trust\tb\t4"
    )
    return lambda: sound(zulip_channels(folder))


def _fdu(random: Random, folder: Path) -> Trial:
    from fedkeep_papers.kteps.fdu_mtl import fdu_mtl

    share = random.choice((0.0, 0.01))
    rows = [
        {
            "domain": odd(random, domain, share),
            "split": odd(random, split, share),
            "label": odd(random, n % 2, share),
            "text": odd(random, "good", share),
        }
        for domain in ("books", "dvd")
        for split in ("train", "test")
        for n in range(3)
    ]
    _write(random, folder / "fdu_mtl.jsonl.gz", "\n".join(map(json.dumps, rows)))
    return lambda: sound(fdu_mtl(folder, domains=["books", "dvd"]))


def _tang(random: Random, folder: Path) -> Trial:
    from fedkeep_papers.kteps.tang import tang

    for split in ("train", "test"):
        rows = [
            "\t\t".join(("u", "p", str(odd(random, n % 5 + 1, 0.02) if n else 1), "good day"))
            for n in range(5)
        ]
        _write(random, folder / f"yelp-2013-{split}.txt.ss", "\n".join(rows))
    return lambda: sound(tang(folder, levels={"yelp-2013": 5}))
