"""FDU-MTL: reviews of 16 domains of products and films, positive or negative; a domain is a client.

P. Liu, X. Qiu, X. Huang, "Adversarial Multi-task Learning for Text Classification", ACL 2017. The folder holds
``fdu_mtl.jsonl.gz``, one object a line with domain, split, label and text, or the files as they were published,
``DOMAIN.task.train`` and ``DOMAIN.task.test``, with a label, a tab and a text on each line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fedkeep.core.errors import DataError, did_you_mean
from fedkeep.data.preparation import Raw, encoded_alone
from fedkeep.data.readers.opened_files import existing, json_lines, lines, readable, sha256
from fedkeep.data.reviews import Reviews, raw_reviews
from fedkeep.data.text import TokenVocabulary
from fedkeep_papers.kit.data import check_fields

DOMAINS = (
    "apparel",
    "baby",
    "books",
    "camera_photo",
    "dvd",
    "electronics",
    "health_personal_care",
    "kitchen_housewares",
    "magazines",
    "music",
    "software",
    "sports_outdoors",
    "toys_games",
    "video",
    "imdb",
    "MR",
)
SPLITS = ("train", "test")
LABELS = ("negative", "positive")
ONE_FILE = "fdu_mtl.jsonl.gz"
FIELDS: dict[str, type] = {"domain": str, "split": str, "label": int, "text": str}

Line = tuple[str, str, int, str]
"""Domain, split, label and text."""


def raw_fdu_mtl(
    folder: str | Path,
    max_length: int = 200,
    vocabulary: TokenVocabulary | int = 50_000,
    domains: Sequence[str] | None = None,
    valid: int = 0,
    drop_duplicates: bool = False,
    limit: int | None = None,
    seed: int = 0,
) -> Raw:
    """Read FDU-MTL: a client per domain, columns ``text`` (word ids) and ``label`` (1 positive, 0 negative).

    Args:
        folder: holds ``fdu_mtl.jsonl.gz``, or the published files of each domain.
        max_length: words of a review to keep.
        vocabulary: a vocabulary, or how many words to keep, the most frequent in training reviews.
        domains: the domains to read; None: all 16.
        valid: training reviews of each domain to validate on instead, drawn at random; KTEPS has none.
        drop_duplicates: drop training reviews that stand word for word in a test set (KTEPS keeps them).
        limit: keep at most this many training and this many test reviews of each domain, drawn at random.
        seed: of the draws.

    Raises:
        DataError: a file is missing, empty, truncated or malformed, or a domain has no reviews; the message names
            file and line.
    """
    wanted = _domains(domains)
    one = Path(folder) / ONE_FILE
    if one.exists() or not any(Path(folder).glob("*.task.train")):
        found, files = _from_one(existing(one)), [one]
    else:
        files = [existing(Path(folder) / f"{domain}.task.{split}") for domain in wanted for split in SPLITS]
        found = (line for file in files for line in _from_published(file))
    reviews = Reviews()
    for domain, split, label, text in found:
        if domain in wanted:
            reviews.add(domain, split, LABELS[label], text)
    for split in SPLITS:
        have = {domain for domain, rows in reviews.rows(split).items() if rows}
        for domain in wanted:
            if domain not in have:
                raise DataError(
                    "{one} has no {split} reviews of the domain {domain!r}. Fetch it again, or name the domains to "
                    "read.",
                    one=one,
                    split=split,
                    domain=domain,
                )
    meta = {"name": "fdu_mtl", "source": {file.name: sha256(file) for file in files}}
    return raw_reviews(
        reviews,
        meta,
        label_names=LABELS,
        max_length=max_length,
        vocabulary=vocabulary,
        valid=valid,
        drop_duplicates=drop_duplicates,
        limit=limit,
        seed=seed,
    )


fdu_mtl = encoded_alone(raw_fdu_mtl)
"""Read FDU-MTL as :func:`raw_fdu_mtl` does, and encode it."""


def _domains(given: Sequence[str] | None) -> tuple[str, ...]:
    chosen = DOMAINS if given is None else tuple(given)
    for domain in chosen:
        if domain not in DOMAINS:
            raise DataError(
                "FDU-MTL has no domain {domain!r}; it has {domains}.{near}",
                domain=domain,
                domains=", ".join(DOMAINS),
                near=did_you_mean(domain, DOMAINS),
            )
    if not chosen:
        raise DataError("Wanted at least one domain of FDU-MTL; got none.")
    return chosen


def _from_one(path: Path) -> Iterator[Line]:
    for number, entry in json_lines(path):
        check_fields(path, number, entry, FIELDS)
        if entry["label"] not in (0, 1) or entry["split"] not in SPLITS or entry["domain"] not in DOMAINS:
            raise DataError(
                "{path}, line {number}: wanted a domain of FDU-MTL, the split 'train' or 'test', and the label 0 or "
                "1; got {domain!r}, {split!r} and {label}.",
                path=path,
                number=number,
                domain=entry["domain"],
                split=entry["split"],
                label=entry["label"],
            )
        yield entry["domain"], entry["split"], entry["label"], entry["text"]


def _from_published(path: Path) -> Iterator[Line]:
    domain, _, split = path.name.split(".")
    for number, line in lines(path, _encoding(path)):
        label, tab, text = line.partition("\t")
        if not tab or label not in ("0", "1"):
            raise DataError(
                "{path}, line {number}: wanted the label 0 or 1, a tab and a text; got {line!r}.",
                path=path,
                number=number,
                line=line,
            )
        yield domain, split, int(label), text


def _encoding(path: Path) -> str:
    """Return the encoding of a published file: UTF-8, but for two that are Latin-1."""
    try:
        with readable(path):
            path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return "latin-1"
    return "utf-8"
