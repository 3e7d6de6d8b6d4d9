from __future__ import annotations

import gzip
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedkeep.core.errors import DataError
from fedkeep.data import CharVocabulary, HashedWords
from fedkeep_papers.furl.zulip import zulip_channels
from tests.refusals import raises

CHANNELS = "label\tcommunity\tchannel\tmessages\n0\tlean\tgeneral\t3\n1\trust\tt-lang\t2\n"
MESSAGES: list[dict[str, Any]] = [
    {"user": 10, "community": "lean", "label": 0, "time": 5, "split": "train", "text": "abca"},
    {"user": 10, "community": "lean", "label": 1, "time": 6, "split": "test", "text": "zzzz"},
    {"user": 9, "community": "rust", "label": 1, "time": 1, "split": "train", "text": "ab\u2028"},
    {"user": 9, "community": "rust", "label": 1, "time": 2, "split": "valid", "text": ""},
    {"user": 9, "community": "rust", "label": 0, "time": 3, "split": "train", "text": "a" * 300},
]


def folder(path: Path, messages: Any = MESSAGES, channels: str | None = CHANNELS) -> Path:
    if channels is not None:
        (path / "channels.tsv").write_text(channels, encoding="utf-8")
    if not isinstance(messages, bytes):
        lines = (one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in messages)
        messages = gzip.compress("".join(line + "\n" for line in lines).encode())
    (path / "messages.jsonl.gz").write_bytes(messages)
    return path


def test_what_is_read(tmp_path: Path) -> None:
    data = zulip_channels(folder(tmp_path), max_length=4)
    assert list(data.ids) == ["9", "10"]
    assert data.meta["traits"] == {
        "community": ["rust", "lean"],
        "most_used_label": ["lean/general", "lean/general"],
    }
    assert data.meta["label_names"] == ["lean/general", "rust/t-lang"]
    assert (data.meta["name"], data.meta["task"], data.meta["classes"]) == ("zulip_channels", "multiclass", 2)
    assert data.meta["max_length"] == 4
    assert data.counts("train").tolist() == [2, 1]
    assert data.counts("valid").tolist() == [1, 0]
    assert data.counts("test").tolist() == [0, 1]
    # Training text, cut at 4: "ab\u2028", "aaaa", "abca". So a is 2, b is 3, c is 4, U+2028 is 5; z is unknown.
    assert data.meta["vocabulary"]["symbols"] == ["a", "b", "c", "\u2028"]
    batch = data.batch(range(5))
    assert batch["text"].tolist() == [[2, 3, 5, 0], [2, 2, 2, 2], [0, 0, 0, 0], [2, 3, 4, 2], [1, 1, 1, 1]]
    assert batch["text_length"].tolist() == [3, 4, 1, 4, 4]
    assert batch["label"].tolist() == [1, 0, 1, 0, 1]
    assert batch["time"].tolist() == [1, 3, 2, 5, 6]
    assert set(data.meta["source"]) == {"messages.jsonl.gz", "channels.tsv"}
    assert data.meta["source"]["channels.tsv"] == hashlib.sha256(CHANNELS.encode()).hexdigest()


def test_a_vocabulary_given(tmp_path: Path) -> None:
    data = zulip_channels(folder(tmp_path), vocabulary=CharVocabulary(["z"]))
    assert data.batch(data.rows(1, "test"))["text"].tolist() == [[2, 2, 2, 2]]
    assert zulip_channels(tmp_path, vocabulary=3).meta["vocabulary"]["symbols"] == ["a"]


def test_words(tmp_path: Path) -> None:
    data = zulip_channels(folder(tmp_path), tokens="words", vocabulary=50, max_length=2)
    assert data.meta["vocabulary"] == {"kind": "hashed_words", "size": 50}
    expected = HashedWords(50).encode_all(["zzzz"]).values.tolist()
    assert data.batch(data.rows(1, "test"))["text"].tolist() == [expected]


def test_limit_users_keeps_labels_and_depends_on_the_seed(tmp_path: Path) -> None:
    many = [MESSAGES[0] | {"user": user, "text": chr(97 + user % 26)} for user in range(40)]
    folder(tmp_path, many)
    data = zulip_channels(tmp_path, limit_users=5)
    assert len(data) == 5
    assert data.meta["classes"] == 2
    assert list(zulip_channels(tmp_path, limit_users=5).ids) == list(data.ids)
    assert list(zulip_channels(tmp_path, limit_users=5, seed=1).ids) != list(data.ids)
    assert len(zulip_channels(tmp_path, limit_users=99)) == 40
    kept = {chr(97 + int(user) % 26) for user in data.ids}
    assert set(data.meta["vocabulary"]["symbols"]) == kept  # others' messages don't shape it
    with raises(DataError, max_length=160, limit_users=0):
        zulip_channels(tmp_path, limit_users=0)


def line(**changes: Any) -> dict[str, Any]:
    return {name: value for name, value in (MESSAGES[0] | changes).items() if value is not ...}


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (
            '{"user": 1,',
            (
                "not JSON (Expecting property name enclosed in double quotes: line 1 column 12 (char 11)). "
                "One object a line is wanted."
            ),
        ),
        ("[1, 2]", "wanted a JSON object; got list."),
        (line(label=2), "label 2 is not in channels.tsv, which lists 0 to 1."),
        (line(label=-1), "label -1 is not in channels.tsv, which lists 0 to 1."),
        (line(label="0"), "wanted 'label' to be int; got '0'."),
        (line(label=True), "wanted 'label' to be int; got True."),
        (line(text=None), "wanted 'text' to be str; got None."),
        (
            line(text=...),
            "wanted 'text' to be str; it has only ['community', 'label', 'split', 'time', 'user'].",
        ),
        (line(time=float("nan")), "wanted 'time' to be int; got nan."),
        (line(split="dev"), "wanted the split 'train', 'valid' or 'test'; got 'dev'."),
    ],
)
def test_a_bad_line(tmp_path: Path, bad: Any, expected: str) -> None:
    folder(tmp_path, [MESSAGES[0], "", bad])
    with raises(DataError, text=f"{tmp_path / 'messages.jsonl.gz'}, line 3: {expected}"):
        zulip_channels(tmp_path)


@pytest.mark.parametrize(
    ("channels", "expected"),
    [
        ("", "The data file {path} is empty. Fetch it again."),
        (None, "Wanted the data file {path}, which does not exist. Check the path."),
        (
            "label\tchannel\n",
            (
                "{path}, line 1: wanted the header ['label', 'community', 'channel', 'messages']; got "
                "['label', 'channel']."
            ),
        ),
        (CHANNELS.splitlines()[0] + "\n", "{path} lists no channel. Fetch it again."),
        (CHANNELS + "3\ta\tb\t1\n", "{path}, line 4: wanted label 2 and 4 cells; got ['3', 'a', 'b', '1']."),
        (CHANNELS + "2\ta\n", "{path}, line 4: wanted label 2 and 4 cells; got ['2', 'a']."),
    ],
)
def test_bad_channels(tmp_path: Path, channels: str | None, expected: str) -> None:
    with raises(DataError, text=expected.format(path=tmp_path / "channels.tsv")):
        zulip_channels(folder(tmp_path, channels=channels))


def test_messages_missing_empty_or_without_a_line(tmp_path: Path) -> None:
    path = folder(tmp_path) / "messages.jsonl.gz"
    for content, expected in [
        (gzip.compress(b""), f"The data file {path} holds no line. Fetch it again."),
        (gzip.compress(b"\n  \n"), f"The data file {path} holds no line. Fetch it again."),
        (b"", f"The data file {path} is empty. Fetch it again."),
        (None, f"Wanted the data file {path}, which does not exist. Check the path."),
    ]:
        path.write_bytes(content) if content is not None else path.unlink()
        with raises(DataError, text=expected):
            zulip_channels(tmp_path)
    path.mkdir()
    with raises(DataError, said="which is a folder. Check the path", where="is a folder"):
        zulip_channels(tmp_path)


def test_a_truncated_file(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    many = [MESSAGES[0] | {"text": "".join(map(chr, draw.integers(97, 123, 200)))} for _ in range(200)]
    whole = gzip.compress("".join(json.dumps(one) + "\n" for one in many).encode())
    folder(tmp_path, whole[: len(whole) // 2])
    with pytest.raises(DataError) as error:
        zulip_channels(tmp_path)
    said = str(error.value)
    start = f"{tmp_path / 'messages.jsonl.gz'} is truncated or no gzip file: it breaks off after line "
    assert said.startswith(start)
    number, rest = said.removeprefix(start).split(" ", 1)
    assert 50 < int(number) < 150
    assert rest == "(Compressed file ended before the end-of-stream marker was reached). Fetch it again."


def test_a_file_that_is_no_gzip(tmp_path: Path) -> None:
    with raises(DataError, said="is truncated or no gzip file: it breaks off", number=0):
        zulip_channels(folder(tmp_path, b"<html>not found</html>"))


def test_a_file_damaged_inside(tmp_path: Path) -> None:
    whole = bytearray(gzip.compress("".join(json.dumps(one) + "\n" for one in MESSAGES * 50).encode()))
    whole[40:60] = b"\xff" * 20
    with pytest.raises(DataError, match=r"is truncated or no gzip file:"):
        zulip_channels(folder(tmp_path, bytes(whole)))


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    content = json.dumps(MESSAGES[0]).encode() + b"\n" + b'{"text": "\xff"}\n'
    with raises(DataError, encoding="UTF-8", why="invalid start byte", start=10):
        zulip_channels(folder(tmp_path, gzip.compress(content)))


DATA = os.environ.get("FEDKEEP_DATA", "")


@pytest.mark.skipif(
    not (DATA and Path(DATA, "zulip_channels").is_dir()),
    reason="set FEDKEEP_DATA to a folder that holds zulip_channels/ to test the real data",
)
def test_the_real_messages() -> None:
    data = zulip_channels(Path(DATA, "zulip_channels"))
    assert data.summary()["examples"] == {"train": 156_491, "valid": 19_551, "test": 19_551, "total": 195_593}
    assert len(data) == 624
    assert data.meta["classes"] == 163
    assert data.meta["source"]["messages.jsonl.gz"].startswith("169fff161bcdf987")
    communities, users = np.unique(data.meta["traits"]["community"], return_counts=True)
    assert dict(zip(communities.tolist(), users.tolist(), strict=True)) == {
        "lean": 375,
        "rust": 159,
        "bytecodealliance": 36,
        "brlcad": 29,
        "julia": 13,
        "isabelle": 12,
    }
    text = data.columns["text"]
    assert np.diff(text.offsets).max() == 160
    # The reference accuracies of the data's description: 0.148 and 0.528.
    label = np.asarray(data.columns["label"])
    test = data.split_rows("test")
    assert (label[test] == np.bincount(label[data.split_rows("train")]).argmax()).mean() == pytest.approx(
        0.148, abs=5e-4
    )
    place = {name: number for number, name in enumerate(data.meta["label_names"])}
    favourite = np.array([place[name] for name in data.meta["traits"]["most_used_label"]])
    assert (label[test] == favourite[data.clients_of(test)]).mean() == pytest.approx(0.528, abs=5e-4)
