"""The numbers that KTEPS (arXiv 2107.11956) prints in Tables 2 to 8, as fractions.

IYY is IMDB, Yelp 2013 and Yelp 2014. The paper gives no deviations and no numbers of runs; Figures 4 and 5 have no
numbers that survive.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

AG_METHODS = (
    "Indiv",
    "FS",
    "ASP-MTL",
    "FedAvg",
    "FedFusion",
    "PFL-DA",
    "FedProx",
    "FedMMD",
    "KTEPS",
    "KTEPS⋆",
)
AP_METHODS = (
    "Indiv",
    "FS",
    "ASP-MTL",
    "FedAvg",
    "FedPer",
    "LG-FedAvg",
    "FedFusion",
    "PFL-DA",
    "FedProx",
    "FedMMD",
    "KTEPS",
    "KTEPS⋆",
)

_AG = """
apparel              83.6 86.4 86.0 86.2 84.1 85.2 86.0 87.6 85.7 84.4
baby                 81.1 89.0 88.5 85.2 85.4 88.4 87.8 88.1 89.8 85.2
books                79.1 82.5 85.4 83.3 82.6 84.6 81.8 84.1 82.7 80.2
camera_photo         84.9 85.3 88.8 86.2 82.4 85.4 86.6 85.2 86.6 83.4
dvd                  80.7 84.5 86.2 87.5 85.8 85.4 83.6 84.9 86.3 81.0
electronics          80.1 85.2 85.4 86.1 84.1 84.1 84.0 84.9 84.2 85.2
health_personal_care 79.8 89.0 90.2 87.6 86.0 88.0 87.9 88.5 89.2 86.5
kitchen_housewares   79.8 86.8 87.9 86.1 86.8 88.2 87.2 88.8 87.7 86.9
magazines            89.6 87.7 87.5 87.8 85.6 87.6 84.8 86.1 85.7 85.6
music                76.6 82.7 82.2 85.7 79.8 81.8 80.8 80.4 83.3 79.9
software             85.0 89.4 87.4 86.6 85.9 86.8 87.2 88.0 88.9 85.1
sports_outdoors      82.1 84.3 86.9 84.9 84.5 85.4 86.4 84.0 85.6 83.5
toys_games           83.3 89.9 89.6 86.2 86.2 88.8 86.6 88.9 88.2 90.6
video                82.8 88.1 86.2 87.1 85.9 87.2 85.4 86.0 87.6 83.5
imdb                 77.2 83.1 82.9 85.3 82.8 82.8 82.5 83.5 84.0 79.4
MR                   72.4 75.8 74.4 69.2 73.4 74.8 74.4 74.8 75.3 65.9
FDU                  81.1 85.6 86.0 85.1 83.8 85.3 84.6 85.2 85.7 82.9
IYY-imdb             55.3 55.7 56.7 54.6 53.7 53.6 56.6 53.4 55.6 54.9
IYY-yelp-2013        61.8 62.6 63.8 62.4 61.6 61.5 61.0 59.4 62.9 62.3
IYY-yelp-2014        59.7 60.1 61.0 60.1 59.3 59.4 59.3 57.1 60.7 60.0
IYY                  58.9 59.5 60.5 59.1 58.2 58.2 59.0 56.6 59.7 59.1
"""
_AP = """
apparel              83.6 86.8 86.0 86.6 87.2 80.4 84.2 86.4 86.0 87.4 86.2 85.0
baby                 81.1 89.1 88.0 86.5 87.6 82.0 85.3 83.9 87.1 88.0 89.8 84.9
books                79.1 82.7 84.7 84.7 81.9 81.0 82.2 80.7 84.0 84.2 83.6 80.5
camera_photo         84.9 85.5 88.2 85.8 86.3 85.2 85.7 85.2 86.2 85.0 86.8 82.5
dvd                  80.7 84.5 86.2 85.0 83.4 78.3 81.5 81.4 83.8 84.9 86.0 80.8
electronics          80.1 85.0 86.3 86.2 84.3 80.5 82.3 79.8 85.6 84.9 84.0 84.0
health_personal_care 79.8 88.6 90.5 89.8 88.0 79.6 84.5 84.3 87.8 88.4 89.8 87.6
kitchen_housewares   79.8 86.4 87.4 84.0 88.9 80.8 79.8 80.0 87.1 88.5 87.3 86.0
magazines            89.6 87.6 87.4 87.5 87.8 91.2 88.5 89.5 85.3 87.9 87.5 86.9
music                76.6 82.8 83.1 84.0 80.7 76.9 79.1 79.0 82.1 82.1 82.2 79.0
software             85.0 90.0 89.0 87.2 88.6 88.5 85.0 81.5 88.5 88.2 88.9 85.5
sports_outdoors      82.1 84.6 85.4 84.2 85.7 81.5 84.8 83.3 84.9 84.0 85.3 83.1
toys_games           83.3 89.8 90.2 88.2 88.0 81.8 83.3 86.2 88.0 89.0 89.0 91.2
video                82.8 88.0 86.6 86.7 87.3 84.2 86.4 81.5 85.7 86.3 87.6 84.4
imdb                 77.2 82.7 82.6 81.8 82.5 78.0 76.5 78.0 82.0 83.9 82.8 79.2
MR                   72.4 76.0 75.2 77.0 75.6 69.3 70.9 72.4 74.9 76.2 75.7 69.7
FDU                  81.1 85.6 86.0 85.3 85.2 81.2 82.5 82.1 84.9 85.6 85.8 83.1
IYY-imdb             55.3 56.5 56.2 56.0 56.0 60.0 57.8 57.8 57.6 53.7 56.9 55.4
IYY-yelp-2013        61.8 63.1 64.1 62.6 62.4 62.0 62.0 61.6 61.4 59.7 63.0 62.8
IYY-yelp-2014        59.7 60.2 61.4 60.3 60.1 60.5 60.1 59.8 59.5 57.7 60.9 60.4
IYY                  58.9 59.9 60.6 59.6 59.5 60.8 59.9 59.7 59.5 57.0 60.3 59.6
"""


def _percent(words: list[str]) -> list[float]:
    return [round(float(word) / 100, 4) for word in words]


def _table(text: str, columns: tuple[str, ...]) -> dict[str, dict[str, float]]:
    lines = (line.split() for line in text.strip().splitlines())
    return {name: dict(zip(columns, _percent(values), strict=True)) for name, *values in lines}


AG: Mapping[str, Mapping[str, float]] = _table(_AG, AG_METHODS)
"""Table 2: Ag by client or scene, then method."""
AP: Mapping[str, Mapping[str, float]] = _table(_AP, AP_METHODS)
"""Table 3: Ap by client or scene, then method."""

WEIGHTS = (0.0, 0.001, 0.01)


def _grid(
    rows: tuple[object, ...], columns: tuple[object, ...], text: str
) -> dict[tuple[object, object], float]:
    lines = [_percent(line.split()) for line in text.strip().splitlines()]
    return {
        (row, column): value
        for row, values in zip(rows, lines, strict=True)
        for column, value in zip(columns, values, strict=True)
    }


# Which axis is λ1 is lost; rows are read as λ1, columns as λ2.
LOSS_WEIGHTS = {
    ("FDU", "ag"): _grid(WEIGHTS, WEIGHTS, "85.0 85.4 85.2\n85.5 85.3 85.1\n85.2 85.0 85.7"),
    ("FDU", "ap"): _grid(WEIGHTS, WEIGHTS, "85.2 85.5 85.3\n85.8 85.6 85.3\n85.3 85.3 85.8"),
    ("IYY", "ag"): _grid(WEIGHTS, WEIGHTS, "58.8 59.0 58.8\n59.1 59.2 59.1\n58.5 59.5 59.7"),
    ("IYY", "ap"): _grid(WEIGHTS, WEIGHTS, "59.6 59.6 59.7\n59.7 59.7 59.8\n59.7 59.7 60.3"),
}
"""Table 4, by scene and metric: (λ1, λ2) → value."""

RATIOS = (1.0, 0.1, 0.01, 0.001)
TUNING_RATES = {
    "FDU": _grid(("KTEPS", "KTEPS⋆"), RATIOS, "79.0 85.1 85.8 85.5\n77.5 81.1 83.1 83.5"),
    "IYY": _grid(("KTEPS", "KTEPS⋆"), RATIOS, "44.5 58.1 60.3 59.9\n40.3 59.1 59.6 59.4"),
}
"""Table 5: Ap by (method, ratio of the learning rate)."""

INFERENCES = ("s", "p", "sp")
INFERENCE = {
    "FDU": _grid(("KTEPS", "KTEPS⋆"), INFERENCES, "85.5 85.6 85.8\n83.0 83.0 83.1"),
    "IYY": _grid(("KTEPS", "KTEPS⋆"), INFERENCES, "60.1 60.2 60.3\n59.5 59.6 59.6"),
}
"""Table 6: Ap by (method, branch that predicts)."""

STARTS, ENDS = (1, 2, 3, 6), (200, 150)
COMPONENTS = {
    ("FDU", "ag"): _grid(ENDS, STARTS, "85.7 83.7 82.6 50.5\n84.9 82.9 61.6 50.5"),
    ("FDU", "ap"): _grid(ENDS, STARTS, "85.8 83.9 83.1 49.2\n85.5 83.1 65.0 49.1"),
    ("IYY", "ag"): _grid(ENDS, STARTS, "59.7 59.0 58.7 58.2\n59.5 59.1 58.8 56.9"),
    ("IYY", "ap"): _grid(ENDS, STARTS, "60.3 59.9 59.5 59.2\n60.3 59.6 59.0 58.1"),
}
"""Table 7, by scene and metric: (last component, first component) → value."""

TRANSFERS = (0.0, 0.001, 0.01, 0.1)
ARCHITECTURES = ("A", "B", "C")
PRIVATE_PARTS = {
    ("FDU", "ag"): _grid(
        TRANSFERS, ARCHITECTURES, "85.0 85.1 85.3\n85.6 85.2 85.1\n85.8 85.5 85.3\n85.9 85.5 85.6"
    ),
    ("FDU", "ap"): _grid(
        TRANSFERS, ARCHITECTURES, "85.6 83.5 82.1\n86.0 83.6 82.8\n85.8 83.3 81.4\n86.0 83.7 82.1"
    ),
}
"""Table 8 (FDU, λ1 = 0, no projections): (λ2, what is private) → value."""

STATISTICS: Mapping[str, tuple[float, ...]] = {
    name: (int(train), int(test), float(words), 1000.0 * int(different))
    for name, train, test, words, different in (
        line.split()
        for line in """
apparel              1600   400    71  7
baby                 1500   400    125 8
books                1600   400    190 22
camera_photo         1597   400    146 10
dvd                  1600   400    208 21
electronics          1598   400    124 9
health_personal_care 1600   400    99  8
kitchen_housewares   1600   400    104 8
magazines            1570   400    135 11
music                1600   400    157 14
software             1515   400    156 9
sports_outdoors      1599   400    114 9
toys_games           1600   400    108 9
video                1600   400    173 17
imdb                 1600   400    312 21
MR                   1600   400    23  7
IYY-imdb             67426  9112   409 44
IYY-yelp-2013        62522  8671   199 38
IYY-yelp-2014        183019 25399  207 43
""".strip().splitlines()
    )
}
"""Table 1: training and test reviews, mean words, different words (printed in thousands), by client."""

V = TypeVar("V")
PREFIXES = {"FDU": "", "IYY": "IYY-"}
"""What stands before a client's name in the tables above, by scene."""


def of_scene(table: Mapping[str, V], scene: str) -> dict[str, V]:
    """Return what is printed of a scene's clients, by client; nothing of data that are not the paper's."""
    if scene not in PREFIXES:
        return {}
    prefix = PREFIXES[scene]
    return {name.removeprefix(prefix): value for name, value in table.items() if name.startswith(prefix)}
