"""The page of the mixture shows Figure 2 as it was measured, beside the authors' plot."""

from __future__ import annotations

import re

from tests.test_measured import MIXTURE, by_scene, check, percent, tables

ROWS = by_scene("moe-figure2")
PAGE = " ".join(MIXTURE.read_text(encoding="utf-8").split())
BY_LOGS = "Mixture of log-probabilities"
P = ("p = 0.2", "p = 0.6", "p = 1")


def row(p: str, method: str, protocol: str = "paper's", fraction: str = "1") -> dict[str, float]:
    name = f"{method} (the authors' code)" if method == BY_LOGS else method
    return ROWS[f"CIFAR-100, 50 × 100, {p}, {protocol} protocol, fraction of clients {fraction}", name]


def above(p: str, method: str) -> float:
    """Return the points by which ours is above the plot."""
    found = row(p, method)
    return 100 * (found["value"] - found["published"])


def said(pattern: str) -> str:
    found = re.search(pattern, PAGE)
    assert found is not None, pattern
    return found[1]


def test_the_table() -> None:
    ((head, *body),) = [t for t in tables(MIXTURE) if t[0][0] == "Figure 2, all clients (%)"]
    assert tuple(label for label, *_ in body) == P
    for label, *cells in body:
        for method, cell in zip(head[1:], cells, strict=True):
            found = row(label, method)
            check(f"{method}, {label}", cell, [*percent(found), 100 * found["published"]])


def test_the_published_mixture_is_of_log_probabilities() -> None:
    check("logs", said(r"it is within (\S+) points of the plot"), [max(abs(above(p, BY_LOGS)) for p in P)])
    check(
        "ours",
        said(r"By ours it is (\S+) points below the plot there, and behind"),
        [-above("p = 0.6", "Mixture")],
    )
    for protocol in ("paper's", "clean"):
        ours, tuned, theirs = (
            row("p = 0.6", m, protocol)["value"] for m in ("Mixture", "Fine-tuned", BY_LOGS)
        )
        assert ours < tuned < theirs
    check(
        "clean",
        said(r"On the clean protocol it is the same: (.*?) % by ours"),
        [100 * x for x in (ours, tuned, theirs)],
    )


def test_both_mixtures_on_the_scenes_of_table_2() -> None:
    scenes, gaps = by_scene("moe-table2"), []
    for p in ("p = 1", "p = 0.9", "p = 0.8"):
        ours, theirs = (
            scenes[f"CIFAR-10, 5 × 500, {p}, paper's protocol", name]["value"]
            for name in ("Mixture", f"{BY_LOGS} (the authors' code)")
        )
        gaps.append(100 * (theirs - ours))
    found = re.search(r"scenes theirs is (\S+) to (\S+) points ahead of ours", PAGE)
    assert found is not None
    check("Table 2", " ".join(found.groups()), [min(gaps), max(gaps)])


def test_the_other_methods() -> None:
    others = [
        (p, m) for m in ("FedAvg", "Local", "Fine-tuned") for p in P if (p, m) != ("p = 1", "Fine-tuned")
    ]
    check("others", said(r"Fine-tuned are within (\S+) points"), [max(abs(above(p, m)) for p, m in others)])
    tenth = row("p = 1", "Fine-tuned", fraction="0.1")["value"]
    check("p = 1", said(r"at p = 1, which is (\S+) above the plot"), [above("p = 1", "Fine-tuned")])
    check("a tenth", said(r"it comes near the plot\*\*: (\S+) %"), [100 * tenth])
    off = 100 * (tenth - row("p = 1", "Fine-tuned")["published"])
    check("a tenth", said(r"it comes near the plot\*\*: \S+ %, (\S+) above it"), [off])


def test_a_tenth_of_the_clients() -> None:
    ((head, *body),) = [t for t in tables(MIXTURE) if t[0][0] == "Figure 2, a tenth of the clients (%)"]
    assert tuple(label for label, *_ in body) == P
    for label, *cells in body:
        for method, cell in zip(head[1:], cells, strict=True):
            check(f"{method}, {label}", cell, percent(row(label, method, fraction="0.1")))
    tuned, ours, theirs = (
        row("p = 0.6", m, fraction="0.1")["value"] for m in ("Fine-tuned", "Mixture", BY_LOGS)
    )
    found = re.search(r"both mixtures are then behind fine-tuning, by (\S+) and (\S+) points", PAGE)
    assert found is not None
    check("p = 0.6", " ".join(found.groups()), [100 * (tuned - ours), 100 * (tuned - theirs)])
