"""Variants of KTEPS on tiny generated reviews: chosen on some that are held out, then tested."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from fedkeep.core.errors import RunError
from fedkeep.experiments.reproductions import reproduce
from fedkeep_papers.kteps import variants
from fedkeep_papers.kteps.book import Book
from tests.papers.kteps.runs import read_numbers, request, rows


@pytest.mark.slow
def test_a_variant_is_chosen_on_held_out_reviews_and_tested(
    finished: Path, data: Path, tmp_path: Path, computed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variants, "HELD_OUT", 3)
    monkeypatch.setattr(variants, "SHORTER", {"full": (("run.rounds", "1"),)})
    monkeypatch.setattr(
        variants,
        "VARIANTS",
        {
            "KTEPS": variants.Variant(),
            "KTEPS, all rounds": variants.Variant(early=False),
            "linear schedule": variants.VARIANTS["linear schedule"],
            "dropout": variants.VARIANTS["dropout"],
        },
    )
    tried = tuple(variants.VARIANTS)
    shutil.copytree(finished / "kteps", tmp_path / "kteps")
    reproduce("kteps-variants", request(data, tmp_path, seeds=[0, 1]))
    slugs = [n.replace(", ", "-").replace(" ", "-").lower() for n in tried]
    assert computed[:4] == [f"fdu-variant-{slug}-held-out-full-0" for slug in slugs]
    choosing = [read_numbers(next((tmp_path / "kteps").glob(f"{name}-*"))) for name in computed[:4]]
    assert [n.rounds for n in choosing] == [1, 2, 1, 1]
    curves = [np.array(list(n.curves["0.01"]["own"].values())) for n in choosing]
    assert all(
        np.allclose(c * 3, (c * 3).round(), atol=1e-5) for c in curves
    )  # 3 reviews each, not the 5 of test
    chosen = max((2, 3), key=lambda i: curves[i].mean())
    assert computed[4:] == [  # KTEPS and FedAvg were there
        f"fdu-variant-{whose}{slugs[chosen]}-full-{seed}" for whose in ("", "fedavg-") for seed in (0, 1)
    ]
    found = rows(tmp_path, "kteps-variants")
    assert {m for m, _ in found} == {"KTEPS", "FedAvg", tried[chosen], f"FedAvg, {tried[chosen]}"}
    assert found["KTEPS", "accuracy_ap"].value == rows(finished, "kteps-table3")["KTEPS", "accuracy_ap"].value
    text = (tmp_path / "kteps-variants.md").read_text(encoding="utf-8")
    assert f"| {tried[chosen]} | 1 | {100 * curves[chosen].mean():.2f} |" in text
    assert f"| KTEPS, all rounds | 2 | {100 * curves[1].mean():.2f} |" in text
    gaps = found[tried[chosen], "accuracy_ap"].value - found["KTEPS", "accuracy_ap"].value  # type: ignore[operator]
    assert f"paired by seed: {100 * gaps:+.2f}" in text
    sent = {
        read_numbers(p).upload_bytes for p in (tmp_path / "kteps").glob("*-full-*") if "kteps-full" in p.name
    }
    own = [read_numbers(p) for p in (tmp_path / "kteps").glob(f"{computed[4]}-*")]
    assert sent == {n.upload_bytes for n in own}  # the same bytes
    assert [n.rounds for n in own] == [1]  # tested as it was chosen
    assert "KTEPS trains for 2 rounds, it for 1;" in text
    stopped, ahead = [], []
    for seed in (0, 1):
        (base,) = (read_numbers(p).test_curve for p in (tmp_path / "kteps").glob(f"fdu-kteps-full-{seed}-*"))
        (it,) = (
            read_numbers(p).test_curve
            for p in (tmp_path / "kteps").glob(f"fdu-variant-{slugs[chosen]}-full-{seed}-*")
        )
        (_, at_1), (_, at_2) = base
        stopped.append(100 * (at_1 - at_2))
        ahead.append(100 * (it[0][1] - at_1))
    early, same = (
        f"{np.mean(gaps):+.2f} ± {np.std(gaps, ddof=1):.2f} points better" for gaps in (stopped, ahead)
    )
    assert f"of KTEPS were {early} after round 1 than" in text
    assert f"were then {same} than KTEPS's after the same round 1." in text
    ap, ag = (
        {
            m: 100 * row.value
            for (m, metric), row in found.items()
            if metric == wanted and row.value is not None
        }
        for wanted in ("accuracy_ap", "accuracy_ag")
    )
    ruled = f"FedAvg, {tried[chosen]}"
    (gain,) = re.findall(r"FedAvg has (\S+) ± \S+ points of Ap and (\S+) ± \S+ of Ag more", text)
    (ahead_of,) = re.findall(r"minus FedAvg by that rule: (\S+) ± \S+ and (\S+) ± \S+ points", text)
    for by, shown, lost in ((ap, gain[0], ahead_of[0]), (ag, gain[1], ahead_of[1])):
        assert float(shown) == pytest.approx(by[ruled] - by["FedAvg"], abs=0.006)
        assert float(lost) == pytest.approx(by[tried[chosen]] - by[ruled], abs=0.006)
    computed.clear()
    reproduce("kteps-variants", request(data, tmp_path, seeds=[0, 1]))
    assert computed == []
    (one,) = (tmp_path / "kteps").glob(f"fdu-variant-fedavg-{slugs[chosen]}-full-1-*")
    one.unlink()
    reproduce("kteps-variants", request(data, tmp_path, seeds=[0, 1], only=["*-variant-fedavg-*-full-0-*"]))
    assert computed == []
    reproduce("kteps-variants", request(data, tmp_path, seeds=[0, 1], only=["*-variant-fedavg-*"]))
    assert computed == [f"fdu-variant-fedavg-{slugs[chosen]}-full-1"]


@pytest.mark.slow
def test_no_variant_is_chosen_while_one_is_not_tried(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variants, "HELD_OUT", 3)
    monkeypatch.setattr(variants, "SHORTER", {"full": (("run.rounds", "1"),)})
    monkeypatch.setattr(
        variants,
        "VARIANTS",
        {name: variants.VARIANTS[name] for name in ("KTEPS", "linear schedule", "dropout")},
    )
    asked = request(data, tmp_path, finished=True)
    text = reproduce("kteps-variants", asked).read_text(encoding="utf-8")
    assert 'Not run yet: "KTEPS", "linear schedule", "dropout". Once all are tried,' in text
    own = Book(asked, "kteps-variants")
    own.task(variants._cell(own, "linear schedule", 0, held_out=True))(progress=False)
    text = reproduce("kteps-variants", asked).read_text(encoding="utf-8")
    assert 'Not run yet: "KTEPS", "dropout". Once all are tried,' in text
    assert "| linear schedule | 1 |" in text
    assert {method for method, _ in rows(tmp_path, "kteps-variants")} == {"KTEPS", "FedAvg"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The training loss of the last")
def test_variants_that_all_break_down_are_an_error(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variants, "HELD_OUT", 3)
    wild = {
        "KTEPS": variants.Variant(),
        "too fast": variants.Variant((("method.optimizer.learning_rate", "1e30"),)),
    }
    monkeypatch.setattr(variants, "VARIANTS", wild)
    with pytest.raises(RunError, match="broke down for every variant"):
        reproduce("kteps-variants", request(data, tmp_path))
