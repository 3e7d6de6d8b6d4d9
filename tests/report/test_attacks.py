"""What attacks found, in sentences, a table and a page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedkeep.report.attacks import AttackFinding, content, plain, sentences, table
from fedkeep.report.page import to_html, to_json, to_markdown_page


def one(
    protection: str, value: float | None, *, spread: float = 0.1, note: str = "", measure: str = "AUC"
) -> AttackFinding:
    low, high = (None, None) if value is None else (value - spread, value + spread)
    return AttackFinding(
        attack="Who",
        measure=measure,
        protection=protection,
        value=value,
        low=low,
        high=high,
        guess=0.5,
        note=note,
    )


@pytest.mark.parametrize(
    ("values", "worth", "not_worth"),
    [
        (
            (0.9, 0.5, 0.5),
            [
                "Who, AUC: 0.500 (0.400 to 0.600) with the split, 0.900 (0.800 to 1.000) in the plain run; guessing gives 0.500."
            ],
            [],
        ),
        (
            (0.9, 0.8, 0.5),
            [],
            [
                "Who, AUC: 0.800 (0.700 to 0.900) with the split, 0.900 (0.800 to 1.000) in the plain run; guessing gives 0.500. Nothing is found under secure."
            ],
        ),
        (
            (0.95, 0.7, 0.8),
            [
                "Who, AUC: 0.700 (0.600 to 0.800) with the split, 0.950 (0.850 to 1.050) in the plain run; guessing gives 0.500. Less, and not nothing."
            ],
            [],
        ),
        (
            (0.5, 0.5, 0.5),
            [],
            [
                "Who, AUC: 0.500 (0.400 to 0.600) with the split, 0.500 (0.400 to 0.600) in the plain run; guessing gives 0.500. Nothing was found."
            ],
        ),
        ((None, 0.9, 0.8), [], ["Who, AUC: 0.900 (0.800 to 1.000) with the split; guessing gives 0.500."]),
        (
            (0.9, None, None),
            ["Who, AUC: 0.900 (0.800 to 1.000) in the plain run; with the split it stays home."],
            [],
        ),
    ],
)
def test_sentences(values: tuple[float | None, ...], worth: list[str], not_worth: list[str]) -> None:
    names = ("plain", "split", "secure")
    found = [
        one(n, v, note="" if v is not None else "it stays home.") for n, v in zip(names, values, strict=True)
    ]
    assert sentences(found) == (worth, not_worth)


def test_what_cannot_be_told_from_guessing_is_said_and_not_passed_over() -> None:
    """Of one client there is no interval; the page said that no attack got through."""
    found = [replace(one(name, 0.98), low=None, high=None, guess=None) for name in ("plain", "split")]
    said = (
        "Who, AUC: 0.980 with the split, 0.980 in the plain run; it can't be told from guessing, as there is no "
        "interval or nothing to guess from."
    )
    assert sentences(found) == ([], [said])
    assert said in to_markdown_page(content("mine", "lead", found, ()))


def test_verdicts_ask_the_whole_interval() -> None:
    assert [one("split", v).verdict for v in (0.61, 0.59, 0.3, None)] == ["found", "nothing", "nothing", "–"]
    assert [row["verdict"] for row in plain([one("split", 0.9)])] == ["found"]


def test_table_and_page() -> None:
    found = [one("plain", 0.9), one("split", None, note="<b>it stays home.</b>")]
    assert table(found).rows == (
        ("Who", "AUC", "plain", "0.900", "0.800 to 1.000", "0.500", "found", ""),
        ("Who", "AUC", "split", "–", "", "0.500", "–", "<b>it stays home.</b>"),
    )
    made = content(
        "mine", "furl", found, [("Who", "The attacker sees everything.")], ["secure: sums over 3 clients"]
    )
    page = to_html(made)
    for text in (
        "What keeping parameters home is worth, and what it is not: mine",
        "The attacker sees everything.",
        "secure: sums over 3",
    ):
        assert text in page
        assert text.split(":")[0] in to_markdown_page(made)
    assert "<b>it" not in page
    assert '"protection": "split"' in to_json(made)
