"""What the server of a federation asks for when it lets devices sum up their data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedkeep.core.errors import ConfigError, check_choice, check_range

TOKENS = ("char", "word", "token", "hashed_words", "unicode_words")

KINDS = {
    "standardise": ("features", "series", "target"),
    "tokens": ("text",),
    "vocabulary": ("text",),
    "max_length": ("text", "series"),
    "clients_a_word": ("text",),
    "label_names": ("label",),
}
"""The kinds of column that each rule is for; ``clients_a_word_here`` is a device's own, whatever its data."""

LEAST = {"clients_a_word": 1, "clients_a_word_here": 1, "vocabulary": 2, "max_length": 1}


class RuleError(ConfigError):
    """A rule is for none of the columns."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How data are summed up and numbered. None leaves a matter to each device's own reader.

    Attributes:
        clients_a_word: a character or word counts only where at least so many clients have it (1: every one).
        clients_a_word_here: a character or word leaves a device only where at least so many of its own clients have it.
            Above 1, the vocabulary depends on how clients are divided over devices.
        standardise: subtract from each numeric feature, each channel of a series, and from a number to predict, its mean, and divide by its
            standard deviation; metrics and predictions are in its own units again. None: unless the reader is told not to.
        tokens: what texts are cut into. "unicode_words" (words by Unicode's rules) and "hashed_words" (runs of letters
            or of digits, and signs) are hashed, so that nothing is counted. "char", "word" (between white space) and
            "token" (between spaces) are counted.
        vocabulary: the most ids that a vocabulary may have, padding and unknown included. None: the reader's number, or
            where ``tokens`` are others than the reader's, 256 characters, 20,000 words or 16,384 hashed ones.
        max_length: characters or words of a text, or steps of a series, to keep.
        label_names: the labels in the order of their numbers; then no client has to tell its labels.

    Raises:
        ConfigError: a number is too small, or there are no such tokens.
    """

    clients_a_word: int = 1
    clients_a_word_here: int = 1
    standardise: bool | None = None
    tokens: str | None = None
    vocabulary: int | None = None
    max_length: int | None = None
    label_names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.tokens is not None:
            check_choice("preparation.tokens: wanted", self.tokens, TOKENS)
        for name, least in LEAST.items():
            check_range(f"[{least}, inf]", **{f"preparation.{name}": getattr(self, name)})

    def check_used(self, kinds: Mapping[str, str]) -> None:
        """Raise RuleError where a rule is given and none of the columns, by name with their kinds, follows it."""
        for name, fitting in KINDS.items():
            asked = getattr(self, name) not in (getattr(Rules, name), False)
            if asked and not {*fitting} & {*kinds.values()}:
                there = ", ".join(f"{column} ({its})" for column, its in kinds.items())
                raise RuleError(
                    "preparation.{name}: wanted a column of the kind {kind!r}, which it is for; got {got}. Leave "
                    "it out. Columns that a reader encoded already are plain, and no rule changes them.",
                    name=name,
                    kind=fitting[0],
                    got=there,
                )
