"""Each kind of column: what leaves the device, and how it becomes numbers, against values computed by hand."""

from __future__ import annotations

import math
import warnings
from fractions import Fraction
from typing import Any

import hypothesis
import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import numpy as np
import pytest

from fedkeep.core.errors import ConfigError, DataError
from fedkeep.data import CharVocabulary, FederatedData, HashedWords, Ragged, TokenVocabulary
from fedkeep.data.preparation import (
    Encoding,
    Features,
    KeyColumn,
    Labels,
    Plain,
    Raw,
    RawColumn,
    Ready,
    Rules,
    Texts,
    Times,
)
from fedkeep.data.preparation.contract import Code, ColumnSummary
from fedkeep.data.preparation.feature_columns import FeatureCode, exact_sums
from fedkeep.data.preparation.label_columns import LabelError
from tests.refusals import raises

TEXTS = ["a b a", "b", "c a", "a z"]
CLIENTS = ["x", "x", "y", "z"]


def summary(
    column: RawColumn, rules: Rules = Rules(), split: list[str] | None = None, inside: Any = None
) -> Any:
    """Return what leaves of a column of four rows of three clients."""
    raw = Raw(client=CLIENTS, split=split, columns={"c": column}, opted_in=inside)
    return raw.summary(rules).columns["c"]


def code(column: RawColumn, rules: Rules = Rules()) -> Any:
    return summary(column, rules).code(rules.clients_a_word)


def texts(**settings: Any) -> Texts:
    return Texts(**{"values": TEXTS, "tokens": "word", "size": 10, "max_length": 2} | settings)


def where(row: int) -> str:
    return f"t.csv, line {row + 2}"


def message(made: Code, raw: RawColumn) -> str:
    with pytest.raises(DataError) as error:
        made.encoded(raw, where)
    return str(error.value)


def test_words_are_counted_client_by_client() -> None:
    one = summary(texts())
    assert (one.counts, one.clients) == ({"a": 4, "b": 2, "c": 1, "z": 1}, {})
    two = summary(texts(), Rules(clients_a_word=2))
    assert two.clients == {"a": 3, "b": 1, "c": 1, "z": 1}
    made = two.code(2)
    assert (made.symbols, made.size) == (("a",), 3)  # b occurs twice, but with one client
    text = made.encoded(texts(), where)
    assert (text.values.tolist(), text.offsets.tolist()) == ([2, 1, 1, 1, 2, 2, 1], [0, 2, 3, 5, 7])
    assert code(texts(size=4)).symbols == ("a", "b")


def test_a_device_may_keep_words_that_few_of_its_clients_have() -> None:
    assert summary(texts(), Rules(clients_a_word_here=2)).counts == {"a": 4}
    both = summary(texts(), Rules(clients_a_word=3, clients_a_word_here=2))
    assert (both.counts, both.clients, both.code(3).symbols) == ({"a": 4}, {"a": 3}, ("a",))
    none = summary(texts(), Rules(clients_a_word_here=4))
    assert none.counts == {}
    with pytest.raises(DataError, match="No words are left to number.*clients_a_word.*unicode_words"):
        none.code(1)


def test_words_of_texts_to_train_on_alone_count() -> None:
    assert summary(texts(), split=["test", "train", "train", "valid"]).counts == {"a": 1, "b": 1, "c": 1}


@pytest.mark.parametrize(
    ("settings", "symbols"),
    [
        ({"given": TokenVocabulary(["b"]), "tokens": "char"}, ("b",)),
        ({"given": HashedWords(9)}, None),
        ({"tokens": "hashed_words"}, None),
    ],
)
def test_a_vocabulary_that_is_known_reveals_no_word(settings: dict[str, Any], symbols: Any) -> None:
    found = summary(texts(**settings), Rules(clients_a_word=2))
    assert (found.counts, found.clients, found.symbols) == ({}, {}, symbols)
    given = settings.get("given", HashedWords(10))
    made = found.code(2)
    assert made.vocabulary.to_dict() == given.to_dict()
    encoded = made.encoded(texts(**settings), where)
    assert encoded.values.tolist() == given.encode_all(TEXTS, 2).values.tolist()
    assert encoded.values.dtype == made.dtype


def test_the_server_may_say_what_texts_are_cut_into() -> None:
    rules = Rules(tokens="char", vocabulary=4, max_length=1)
    found = summary(texts(given=TokenVocabulary(["b"])), rules)
    assert (found.tokens, found.size, found.max_length) == ("char", 4, 1)
    assert found.counts == {"a": 4, " ": 4, "b": 2, "c": 1, "z": 1}
    assert found.code(1).vocabulary == CharVocabulary([" ", "a"])
    with pytest.raises(ConfigError, match="preparation.tokens: wanted 'char', 'word'.* got 'chars'"):
        Rules(tokens="chars")
    with pytest.raises(ConfigError, match="preparation.clients_a_word must be at least 1; got 0"):
        Rules(clients_a_word=0)


@pytest.mark.parametrize(
    ("own", "asked", "size"),
    [
        ("char", "word", 20_000),
        ("char", "token", 20_000),
        ("word", "char", 256),
        ("word", "hashed_words", 16_384),
        ("word", "word", 10),
        ("char", None, 10),
    ],
)
def test_other_tokens_than_the_readers_have_their_own_usual_number(
    own: str, asked: str | None, size: int
) -> None:
    assert summary(texts(tokens=own), Rules(tokens=asked)).size == size


def test_half_a_pair_of_surrogates_is_unknown() -> None:
    raw = Texts(values=["\ud800x", "x", "x", "x"], tokens="char", size=9, max_length=5)
    made = code(raw)
    assert made.symbols == ("x",)
    assert made.encoded(raw, where).values.tolist() == [1, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("words", "names", "numbers"),
    [
        (["pos", "neg", "pos", "10"], ("10", "neg", "pos"), [2, 1, 2, 0]),
        (["2", "0", "02", "2"], ("0", "1", "2"), [2, 0, 2, 2]),
        (["-1", "b", "a", "a"], ("-1", "a", "b"), [0, 2, 1, 1]),
    ],
)
def test_labels_are_numbered_in_order_and_whole_numbers_stay(
    words: list[str], names: tuple[str, ...], numbers: list[int]
) -> None:
    made = code(Labels(values=words))
    assert made.names == names
    assert made.encoded(Labels(values=words), where).tolist() == numbers
    assert message(made, Labels(values=[words[0], "99"])) == (
        f"t.csv, line 3: label '99' is not one of label_names, {list(names)}."
    )


def test_labels_that_are_known_beforehand_do_not_leave() -> None:
    raw = Labels(values=["b", "a", "b", "b"], names=("b", "a"), elsewhere={"x": ["c"]})
    assert (summary(raw).words, code(raw).names) == ((), ("b", "a"))
    named = Rules(label_names=("a", "b"))
    assert summary(Labels(values=raw.values), named).words == ()
    assert code(Labels(values=raw.values), named).encoded(raw, where).tolist() == [1, 0, 1, 1]
    assert code(Labels(values=["b"] * 4, elsewhere={"x": ["c", "a"]})).names == ("a", "b", "c")


@pytest.mark.parametrize("task", [None, "multiclass"])
def test_one_number_in_two_spellings_is_no_two_classes(task: str | None) -> None:
    here, there = (summary(Labels(values=words * 2, task=task)) for words in (["0", "1"], ["0.0", "1.0"]))
    assert there.code(1).names == ("0.0", "1.0")
    with pytest.raises(LabelError, match="got '0' and '0.0', which are equal"):
        here.merged([there]).code(1)
    named = Labels(values=["1", "1.0", "yes", "1"])
    assert code(named).names == ("1", "1.0", "yes")  # not all are numbers


INSIDE = np.array([True, False, True, True])


def test_what_examples_hold_that_opted_out_is_in_no_summary() -> None:
    words = Labels(values=["a", "SECRET", "b", "a"], elsewhere={"x": ["dropped"]})
    keys, times = KeyColumn(values=np.array([5, 99, 6, 5])), Times(values=np.array([1.0, 2.5, 3.0, 4.0]))
    for split in (None, ["train", "test", "test", "valid"]):
        assert summary(words, split=split, inside=INSIDE).words == ("a", "b")
        assert summary(keys, split=split, inside=INSIDE).keys == (5, 6)
        assert summary(times, split=split, inside=INSIDE).whole
    for column, said in (
        (words, "label 'SECRET' is not one of label_names, ['a', 'b']."),
        (keys, "99 is not one of the 2 items that are known."),
        (times, "wanted a whole number as time; got 2.5."),
    ):
        raw = Raw(client=CLIENTS, split=None, columns={"c": column}, opted_in=INSIDE, where=where)
        with pytest.raises(DataError) as error:
            raw.encoded(Encoding.of(raw.summary()))
        place = (
            "t.csv, line 3 (opted out, so nobody was told what it holds; name all labels in label_names, or "
        )
        assert str(error.value) == f"{place}drop it): {said}"
    named = Rules(label_names=("a", "b", "SECRET"))
    raw = Raw(client=CLIENTS, split=None, columns={"c": words}, opted_in=INSIDE)
    assert raw.encoded(Encoding.of(raw.summary(named))).columns["c"].tolist() == [0, 2, 1, 0]  # type: ignore[union-attr]


def test_a_device_of_which_all_opted_out_tells_no_label_and_takes_part() -> None:
    none = summary(Labels(values=["a", "b", "a", "b"]), inside=np.zeros(4, bool))
    assert (none.words, none.reveals()) == ((), "labels: nothing; every example opted out")
    assert none.merged([summary(Labels(values=["a", "b", "c", "c"]))]).code(1).names == ("a", "b", "c")
    with pytest.raises(DataError, match="Name all labels in label_names"):
        none.code(1)


def test_a_rule_that_no_column_follows_is_refused() -> None:
    features = Features(names=("f",), values=np.ones((4, 1), np.float32))
    for column, rules, said in (
        (texts(), Rules(standardise=True), "preparation.standardise: wanted a column of the kind 'features'"),
        (features, Rules(tokens="word"), "preparation.tokens: wanted a column of the kind 'text'"),
        (features, Rules(vocabulary=9), "preparation.vocabulary: "),
        (features, Rules(max_length=7), "preparation.max_length: "),
        (features, Rules(clients_a_word=2), "preparation.clients_a_word: "),
        (features, Rules(label_names=("a",)), "preparation.label_names: wanted a column of the kind 'label'"),
    ):
        with pytest.raises(ConfigError) as error:
            summary(column, rules)
        assert str(error.value).startswith(said)
        assert f"got c ({column.kind}). Leave it out." in str(error.value)
    assert summary(features, Rules(clients_a_word_here=3)) == summary(features)
    data = FederatedData.from_columns([1, 2], {"x": np.zeros((2, 3)), "label": [0, 1]})
    for rules in (Rules(standardise=True), Rules(tokens="word"), Rules(label_names=("b", "a"))):
        with pytest.raises(ConfigError, match=r"got x \(plain\), label \(plain\)"):
            Ready(data=data).summary(rules)


def test_whole_numbers_that_are_no_classes() -> None:
    for words, why in (
        (["0", "-3", "1", "1"], "wanted a label of 0 or more, of at most 18 digits; got '-3'."),
        (["0", "5000", "1", "1"], "the label 5000 would make 5,001 classes, of which 3 occur."),
    ):
        with pytest.raises(LabelError) as error:
            code(Labels(values=words))
        assert error.value.label == words[1]
        assert error.value.why.startswith(why)


def test_whole_numbers_from_one_are_told_of() -> None:
    said = "^Labels are 1 to 3, so there are 4 classes: no example has the label 0. Number labels from 0, or give "
    with pytest.warns(UserWarning, match=said + "label_names"):
        assert code(Labels(values=["3", "1", "2", "1"])).meta("label")["classes"] == 4
    columns = {"x": np.zeros((3, 1)), "label": [1, 2, 3]}
    with pytest.warns(UserWarning, match=said + r"meta\['classes'\]"):
        FederatedData.from_columns([1, 1, 2], columns)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for words in (["1", "1", "1", "1"], ["1", "3", "3", "3"], ["0", "1", "2", "2"]):
            code(Labels(values=words))
        code(Labels(values=["1", "2"] * 2), Rules(label_names=("1", "2")))
        FederatedData.from_columns([1, 1, 2], columns, meta={"classes": 4})


@hypothesis.given(
    arrays.arrays(
        np.float32,
        st.tuples(st.integers(0, 6), st.just(2)),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    )
)
def test_sums_of_features_are_exact(values: np.ndarray) -> None:
    sums, squares = exact_sums(values.T)
    for column, total, square in zip(values.T.tolist(), sums, squares, strict=True):
        assert Fraction(total, 1 << 172) == sum(map(Fraction, column), Fraction(0))
        assert Fraction(square, 1 << 344) == sum((Fraction(v) ** 2 for v in column), Fraction(0))


@hypothesis.given(
    arrays.arrays(np.float64, st.tuples(st.integers(0, 6), st.just(2)), elements=st.floats(-3e38, 3e38))
)
def test_sums_of_features_in_double_precision_leave_out_what_is_below_the_unit(values: np.ndarray) -> None:
    sums, squares = exact_sums(values.T)
    for column, total, square in zip(values.T.tolist(), sums, squares, strict=True):
        whole = [math.floor(Fraction(v) * (1 << 172)) for v in column]
        assert total == sum(whole)
        assert square == sum(w * w for w in whole)
    halves = [exact_sums(part.T) for part in (values[:2], values[2:])]
    assert all(a + b == c for a, b, c in zip(halves[0][0], halves[1][0], sums, strict=True))


@pytest.mark.parametrize("one", [1 - 2.0**-24, -1 + 2.0**-53])
def test_sums_of_squares_of_many_rows_do_not_overflow(one: float) -> None:
    values = np.full((1 << 17, 1), one)
    sums, squares = exact_sums(values.T)
    assert Fraction(sums[0], 1 << 172) == (1 << 17) * Fraction(one)
    assert Fraction(squares[0], 1 << 344) == (1 << 17) * Fraction(one) ** 2


def test_features_are_standardised_unless_rules_or_reader_say_no() -> None:
    x = np.array([[1, 7], [2, 7], [6, 7], [7, 7]], np.float32)
    raw = Features(names=("a", "b"), values=x)
    off = Rules(standardise=False)
    assert summary(raw, off).sums == ()
    assert code(raw, off).encoded(raw, where) is x
    made = code(raw)  # mean 4, variance (9 + 4 + 4 + 9) / 4
    as_read = Features(names=("a", "b"), values=x, standardise=False)
    assert (code(as_read).means, code(as_read, Rules(standardise=True))) == ((), made)
    assert (made.means, made.scales) == ((4.0, 7.0), (6.5**0.5, 1.0))
    wanted = [[v / 6.5**0.5, 0] for v in (-3, -2, 2, 3)]
    assert np.allclose(made.encoded(raw, where), wanted, rtol=1e-7, atol=0)
    assert message(made, Features(names=("b", "a"), values=x)) == (
        "t.csv, line 2: features ('b', 'a'), not ('a', 'b')."
    )


def test_a_feature_that_its_scale_makes_too_large_is_named_with_its_row() -> None:
    code = FeatureCode(names=("a", "b"), means=(0.0, 1.0), scales=(1.0, 1e-3))
    with raises(DataError, place="line 1", feature="b", value=1e38, mean=1.0, scale=1e-3):
        code.encoded(
            Features(names=("a", "b"), values=np.array([[1e38, 0.0], [0.0, 1e38]])), lambda row: f"line {row}"
        )


def test_seconds_since_1970_are_told_apart_where_they_are_standardised() -> None:
    seconds = 1_700_000_000.0 + np.arange(4)
    raw = Features(names=("a", "b"), values=np.stack([seconds, seconds / 1e3], 1))
    made = code(raw)
    assert np.allclose(made.encoded(raw, where)[:, 0], (np.arange(4) - 1.5) / 1.25**0.5, rtol=1e-6, atol=0)
    large = r"^The feature 'a' reaches 1.7e\+09, and 1 more are as large. From such numbers training"
    alike = "^The 4 different values of the feature 'a' are 1 in float32. Leave out"
    with pytest.warns(UserWarning, match=large), pytest.warns(UserWarning, match=alike):
        assert len(set(code(raw, Rules(standardise=False)).encoded(raw, where)[:, 0].tolist())) == 1
    near = Features(names=("a", "b"), values=np.array([[999.0, -999.0]] * 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        code(near, Rules(standardise=False)).encoded(near, where)


def test_times_are_whole_where_all_are() -> None:
    whole, other = (Times(values=np.array([1.0, 2, 3, last])) for last in (4, 4.5))
    assert code(whole).encoded(whole, where).dtype == np.int64
    both = summary(whole).merged([summary(other)]).code(1)
    assert [both.encoded(raw, where).dtype for raw in (whole, other)] == [np.float64] * 2
    assert code(whole).fault(summary(other)) == "times with fractions, where whole numbers are wanted"
    assert message(code(whole), other) == "t.csv, line 5: wanted a whole number as time; got 4.5."
    large = Times(values=np.array([1e300] * 4))
    assert code(large).encoded(large, where).tolist() == [1e300] * 4


def test_keys_are_numbered_in_order() -> None:
    raw = KeyColumn(values=np.array([30, 2, 30, 900]))
    made = code(raw)
    assert made.encoded(raw, where).tolist() == [1, 0, 1, 2]
    assert made.meta("item") == {"items": 3, "item_ids": [2, 30, 900]}
    other = KeyColumn(values=np.array([2, 1000, 2, 2]))
    assert message(made, other) == "t.csv, line 3: 1000 is not one of the 3 items that are known."
    assert made.fault(summary(other)) == "the item 1000 is not one of the 3 that are known"


@pytest.mark.parametrize(
    ("column", "fault"),
    [
        (np.zeros((4, 3)), None),
        (np.zeros((4, 2)), "shape (2,), not (3,)"),
        (np.zeros((4, 3), np.int64), "type 'int64', not 'float64'"),
        (Ragged.from_rows([[1]] * 4), "type 'int64', not 'float64'"),
    ],
)
def test_an_array_is_taken_as_it_is_if_its_type_is_the_same(column: Any, fault: str | None) -> None:
    made, raw = code(Plain(values=np.zeros((4, 3)))), Plain(values=column)
    assert made.fault(summary(raw)) == fault
    if fault is None:
        assert made.encoded(raw, where) is column
    else:
        assert message(made, raw) == f"t.csv, line 2: {fault}."


RAW: list[RawColumn] = [
    texts(),
    Labels(values=["a", "b", "c", "c"]),
    Features(names=("f",), values=np.ones((4, 1), np.float32)),
    Times(values=np.arange(4.0)),
    KeyColumn(values=np.arange(4)),
    Plain(values=np.arange(4)),
]


@pytest.mark.parametrize("raw", RAW, ids=lambda raw: raw.kind)
def test_a_kind_is_the_same_all_the_way(raw: RawColumn) -> None:
    found: ColumnSummary = summary(raw)
    made = found.code(1)
    encoded = made.encoded(raw, where)
    array = encoded.values if isinstance(encoded, Ragged) else encoded
    assert raw.kind == found.kind == made.kind
    assert len(raw) == len(encoded) == 4
    assert array.dtype == made.dtype
    assert made.fault(found) is None
    assert found.merged([found]).form == found.form
    assert found.reveals()
