"""The page of the mixture shows Figure 3 at q = 0.9 as it was measured."""

from __future__ import annotations

import re

from tests.test_measured import MIXTURE, by_scene, check, percent, tables


def test_figure_3() -> None:
    rows = by_scene("moe-figure3")
    ((head, *body),) = [t for t in tables(MIXTURE) if t[0][0] == "q = 0.9 (%)"]
    assert [label for label, *_ in body] == [f"p = {p / 10:g}" for p in range(2, 11)]
    ahead, behind = [], []
    for label, *cells in body:
        scene = f"CIFAR-10, 5 × 500, {label}, q = 0.9, clean protocol"
        for method, cell in zip(head[1:], cells, strict=True):
            check(f"{method}, {label}", cell, percent(rows[scene, method]))
        local, tuned, mixture = (rows[scene, m]["value"] for m in ("Local", "Fine-tuned", "Mixture"))
        ahead.append(100 * (mixture - tuned))
        behind.append(100 * (local - mixture))
    said = re.search(
        r"within (\S+) points of local training, and (\d+) to (\d+) points ahead of fine-tuning",
        MIXTURE.read_text(encoding="utf-8").replace("\n", " "),
    )
    assert said is not None
    assert float(said[1]) - 0.1 < max(map(abs, behind)) <= float(said[1])
    assert (round(min(ahead)), round(max(ahead))) == (int(said[2]), int(said[3]))


def test_where_nobody_opts_out() -> None:
    rows, page = by_scene("moe-figure3"), MIXTURE.read_text(encoding="utf-8").replace("\n", " ")
    told = []
    for method in ("Mixture", "Fine-tuned", "Local", "FedAvg"):
        values = (
            rows[f"CIFAR-10, 5 × 500, p = {p}, clean protocol", method]["value"] for p in ("0.2", "0.6")
        )
        told.append(" and ".join(f"{100 * value:.1f}" for value in values))
    mixture, tuned, local, fedavg = told
    assert (
        f"the mixture has {mixture} %, fine-tuning {tuned}, local training {local}, FedAvg {fedavg}." in page
    )
