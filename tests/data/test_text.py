from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedkeep.core.errors import DataError, RunError
from fedkeep.data import (
    CharVocabulary,
    HashedWords,
    TokenVocabulary,
    UnicodeWords,
    WordVocabulary,
    vocabulary_from,
)
from tests.refusals import raises
from tests.tiny import fill_disk


def test_characters_by_frequency_then_by_value() -> None:
    vocabulary = CharVocabulary.from_texts(["banana", "cab"])
    assert vocabulary.symbols == ("a", "b", "n", "c")  # 4, 2, 2 and 1 times
    assert len(vocabulary) == 6
    assert vocabulary.encode("cab!a").tolist() == [5, 2, 3, 1, 2]
    assert vocabulary.decode([5, 2, 3, 1, 0]) == "cab\ufffd"
    assert repr(vocabulary) == "CharVocabulary(6 ids)"


def test_words_by_frequency_then_by_value() -> None:
    vocabulary = WordVocabulary.from_texts(["b a  a", "a c"])
    assert vocabulary.symbols == ("a", "b", "c")
    assert vocabulary.encode("c a\tx a").tolist() == [4, 2, 1, 2]
    assert vocabulary.decode([4, 1, 2, 0]) == "c \ufffd a"


def test_size_counts_padding_and_unknown() -> None:
    assert len(CharVocabulary.from_texts(["aaabbc"], size=4)) == 4
    assert CharVocabulary.from_texts(["aaabbc"], size=4).symbols == ("a", "b")
    assert CharVocabulary.from_texts(["aaabbc"], size=2).symbols == ()
    assert CharVocabulary.from_texts(["aaabbc"], min_count=3).symbols == ("a",)
    with raises(DataError, got=1):
        CharVocabulary.from_counts({}, size=1)


def test_counts_of_clients_add() -> None:
    clients = [["abc", "a"], ["ccc"], []]
    total: Counter[str] = sum((CharVocabulary.count(texts) for texts in clients), Counter())
    pooled = CharVocabulary.from_texts(text for texts in clients for text in texts)
    assert CharVocabulary.from_counts(total) == pooled
    assert CharVocabulary.from_counts(dict(reversed(total.items()))) == pooled


@given(
    known=st.text(max_size=20),
    texts=st.lists(st.text(max_size=12), max_size=6),
    cut=st.integers(1, 12) | st.none(),
)
def test_characters_equal_a_loop(known: str, texts: list[str], cut: int | None) -> None:
    vocabulary = CharVocabulary.from_texts([known])
    ids = {symbol: number for number, symbol in enumerate(vocabulary.symbols, start=2)}
    encoded = vocabulary.encode_all(texts, cut)
    assert [row.tolist() for row in encoded] == [[ids.get(c, 1) for c in text[:cut]] for text in texts]


@given(known=st.text("ab ", max_size=20), texts=st.lists(st.text("abc ", max_size=12), max_size=6))
def test_words_equal_a_loop(known: str, texts: list[str]) -> None:
    vocabulary = WordVocabulary.from_texts([known])
    ids = {symbol: number for number, symbol in enumerate(vocabulary.symbols, start=2)}
    encoded = vocabulary.encode_all(texts, 3)
    assert [row.tolist() for row in encoded] == [[ids.get(w, 1) for w in text.split()[:3]] for text in texts]


@pytest.mark.parametrize("cut", [0, -1])
@pytest.mark.parametrize("kind", [CharVocabulary, WordVocabulary, TokenVocabulary, UnicodeWords])
def test_a_text_keeps_at_least_one_symbol(kind: Any, cut: int) -> None:
    """Minus one would cut the last one off."""
    vocabulary = kind(9) if kind is UnicodeWords else kind("ab")
    with raises(DataError, got=cut, said="max_length"):
        vocabulary.encode_all(["a b"], cut)


def test_characters_beyond_the_basic_plane_and_lone_surrogates() -> None:
    vocabulary = CharVocabulary(["😀", "\ud800"])
    assert vocabulary.encode("😀\ud800\U0010ffff").tolist() == [2, 3, 1]


def test_the_smallest_type_that_fits() -> None:
    assert CharVocabulary(map(chr, range(100, 354))).dtype == np.uint8
    assert CharVocabulary(map(chr, range(100, 355))).dtype == np.uint16
    big = WordVocabulary(str(i) for i in range(65535))
    assert big.dtype == np.int32
    assert big.encode("65534 0").tolist() == [65536, 2]


def test_an_empty_vocabulary_knows_nothing() -> None:
    assert CharVocabulary([]).encode("ab").tolist() == [1, 1]
    assert WordVocabulary([]).encode("").tolist() == []


@pytest.mark.parametrize(
    "vocabulary",
    [CharVocabulary(["ä", "b", "\n"]), WordVocabulary(["zwei", "ä"]), HashedWords(64), UnicodeWords(64)],
)
def test_vocabularies_describe_themselves(vocabulary: CharVocabulary | WordVocabulary | HashedWords) -> None:
    again = vocabulary_from(vocabulary.to_dict())
    assert type(again) is type(vocabulary)
    assert vocabulary.to_dict()["size"] == len(vocabulary) == len(again)
    assert (
        again.encode_all(["ä b zwei"]).values.tolist() == vocabulary.encode_all(["ä b zwei"]).values.tolist()
    )


def test_a_vocabulary_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "v.json").write_text("old")
    fill_disk(monkeypatch, "replace")
    with pytest.raises(RunError, match=r"^Cannot write .*v\.json: No space left on device"):
        CharVocabulary(["a"]).save(tmp_path / "v.json")
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"v.json": "old"}


@pytest.mark.parametrize("kind", [CharVocabulary, WordVocabulary])
def test_save_and_load(tmp_path: Path, kind: type[CharVocabulary | WordVocabulary]) -> None:
    vocabulary = kind(["ä", "b", "\u2028"])
    vocabulary.save(tmp_path / "v.json")
    assert kind.load(tmp_path / "v.json") == vocabulary
    assert hash(kind.load(tmp_path / "v.json")) == hash(vocabulary)
    assert vocabulary != kind(["b", "ä"])
    assert CharVocabulary(["a"]) != WordVocabulary(["a"])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "The vocabulary {path} does not exist."),
        (
            "{",
            (
                "The vocabulary {path} is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 "
                "(char 1)."
            ),
        ),
        ("[]", "Wanted a JSON object in the vocabulary {path}; got a list."),
        (
            '{"kind": "word", "symbols": []}',
            "Wanted a char vocabulary with a list of symbols; got kind 'word' and symbols list.",
        ),
        (
            '{"kind": "char", "symbols": [1]}',
            "Wanted a char vocabulary with a list of symbols; got kind 'char' and symbols list.",
        ),
        (
            '{"kind": "char", "symbols": ["ab"]}',
            "A symbol of a character vocabulary is one character; got 'ab'.",
        ),
        (
            '{"kind": "char", "symbols": ["a", "a"]}',
            "A vocabulary needs different symbols; 'a' occurs more than once.",
        ),
    ],
)
def test_vocabulary_files_that_are_refused(tmp_path: Path, content: str | None, expected: str) -> None:
    path = tmp_path / "v.json"
    if content is not None:
        path.write_text(content)
    with raises(DataError, text=expected.format(path=path)):
        CharVocabulary.load(path)


def test_a_description_of_no_vocabulary() -> None:
    with raises(DataError, got="subword", known="'char', 'word', 'token', 'hashed_words', 'unicode_words'"):
        vocabulary_from({"kind": "subword"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The fox can't pay 32.3, right?", ["the", "fox", "can't", "pay", "32.3", ",", "right", "?"]),
        ("你好世界 很好", ["你", "好", "你好", "世", "好世", "界", "世界", "很", "好", "很好"]),
        ("これはテスト", ["こ", "れ", "これ", "は", "れは", "テスト"]),
        ("한국어 문장은", ["한국어", "문장은"]),
        ("नमस्ते दुनिया", ["नमस्ते", "दुनिया"]),
        ("cafe\u0301 \U0001f469\u200d\U0001f467!", ["caf\u00e9", "\U0001f469\u200d\U0001f467", "!"]),
        (" \n", [""]),
        ("\ud800", ["\ud800"]),
    ],
)
def test_words_by_unicodes_rules(text: str, words: list[str]) -> None:
    """A comment in Chinese was one word, and the server's summary held whole comments."""
    assert UnicodeWords.words(text) == words
    assert len(UnicodeWords(64).encode_all([text]).values) == len(words)


def test_a_text_without_spaces_is_counted_by_nobody() -> None:
    assert WordVocabulary.count(["a" * 40 + " " + "b" * 41]) == {"a" * 40: 1}


def test_hashed_words_by_hand() -> None:
    words = HashedWords(1000)
    # The standard CRC-32 of b"hello" is 907060870, of b"!" 2657877971.
    expected = [1 + 907060870 % 999, 1 + 2657877971 % 999]
    assert words.encode_all(["Hello!"]).values.tolist() == expected
    assert words.encode_all(["HELLO hello"], 1).values.tolist() == expected[:1]
    assert [len(row) for row in words.encode_all(["", "a1_b"])] == [0, 4]
    with raises(DataError, got=1):
        HashedWords(1)
