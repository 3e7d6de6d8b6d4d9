"""Other word vectors: the same methods from longer ones, and from none."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedkeep.experiments.reproductions import reproduce
from fedkeep_papers.kteps import book, vectors
from fedkeep_papers.kteps.cells import CellJob, Numbers
from tests.papers.kteps.runs import read_numbers, request, rows


@pytest.mark.slow
def test_each_method_from_each_kind_of_vectors(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[CellJob] = []
    monkeypatch.setattr(book, "run_long_jobs", lambda tasks, *_, on: asked.extend(tasks))
    reproduce("kteps-vectors", request(data, tmp_path))
    found = {task.cell.name: (task.cell.resolved().model, set(task.source)) for task in asked}
    assert len(asked) == len(found) == 10
    assert "fdu-kteps-star-full-0" in found
    both = {"fdu_mtl.jsonl.gz", "word_vectors_200d.npz"}
    for method in ("indiv", "fedavg", "kteps"):
        usual, source = found[f"fdu-{method}-full-0"]
        assert source == both
        longer, source = found[f"fdu-{method}-vectors-twice-as-long-full-0"]
        assert longer == usual.model_copy(update={"word_vectors_scale": 2.0})
        assert source == both
        none, source = found[f"fdu-{method}-no-vectors-full-0"]
        assert none == usual.model_copy(update={"word_vectors": ""})
        assert source == {"fdu_mtl.jsonl.gz"}
    ratios = {task.cell.name: task.cell.ratios for task in asked}
    assert ratios["fdu-kteps-no-vectors-full-0"] == ratios["fdu-kteps-full-0"] == (1.0, 0.1, 0.01, 0.001)


@pytest.mark.slow
def test_glove_is_asked_for_where_its_files_are(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everywhere = tmp_path / "data"
    everywhere.mkdir()
    for each in data.iterdir():
        (everywhere / each.name).symlink_to(each)
    (everywhere / "glove").mkdir()
    (everywhere / vectors.GLOVE_150).write_bytes(b"")
    asked: list[CellJob] = []
    monkeypatch.setattr(book, "run_long_jobs", lambda tasks, *_, on: asked.extend(tasks))
    reproduce("kteps-vectors", request(everywhere, tmp_path))
    found = {task.cell.name: task for task in asked if "150" in task.cell.name}
    assert sorted(found) == [
        *(f"fdu-{m}-glove-150-numbers-full-0" for m in ("fedavg", "indiv", "kteps")),
        "fdu-kteps-glove-150-numbers-tuned-by-adam-for-100-steps-full-0",
        "fdu-kteps-glove-150-numbers-tuned-by-adam-full-0",
        "fdu-kteps-star-glove-150-numbers-full-0",
    ]
    usual, other, briefly = (
        found[f"fdu-kteps-glove-150-numbers{n}-full-0"].cell.resolved()
        for n in ("", "-tuned-by-adam", "-tuned-by-adam-for-100-steps")
    )
    assert usual.personalization.optimizer is None
    assert other.personalization.optimizer == "adam"
    assert (briefly.personalization.optimizer, briefly.personalization.steps) == ("adam", 100)
    assert briefly.personalization.every == 2
    for tuned in (other, briefly):
        assert usual == tuned.model_copy(update={"personalization": usual.personalization})
    star = found["fdu-kteps-star-glove-150-numbers-full-0"]
    assert set(star.source) == {"fdu_mtl.jsonl.gz", "glove_150d.npz"}
    assert star.cell.resolved().model.options["embedding_dim"] == 150
    lines = rows(tmp_path, "kteps-vectors")
    for way in ("", ", tuned by Adam", ", tuned by Adam for 100 steps"):
        for ratio, published in (
            (", ratio 1", 0.790),
            (", ratio 0.1", 0.851),
            ("", 0.858),
            (", ratio 0.001", 0.855),
        ):
            line = lines[f"KTEPS, GloVe, 150 numbers{way}{ratio}", "accuracy_ap"]
            assert line.published == pytest.approx(published)
    assert ("Indiv, ours, 150 numbers", "accuracy_ag") not in lines


@pytest.mark.slow
def test_how_far_kteps_is_ahead_is_paired_by_seed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ap_ag = {
        "fdu-kteps-full-0": (0.81, 0.80),
        "fdu-kteps-full-1": (0.84, 0.83),
        "fdu-kteps-full-2": (0.99, 0.99),
        "fdu-fedavg-full-0": (0.80, 0.80),
        "fdu-fedavg-full-1": (0.81, 0.81),
        "fdu-kteps-vectors-twice-as-long-full-1": (0.7, 0.6),
        "fdu-fedavg-vectors-twice-as-long-full-1": (0.8, 0.9),
        "fdu-kteps-no-vectors-full-0": (0.8, 0.8),
        "fdu-fedavg-no-vectors-full-1": (0.8, 0.8),
    }

    def done(tasks: list[CellJob], *_: object, on: object) -> None:
        for task in tasks:
            if task.cell.name in ap_ag:
                ap, ag = ap_ag[task.cell.name]
                curves = {str(r): {"own": {"a": [ap, ap], "b": [ap, ap]}} for r in task.cell.ratios}
                shared = {"a": ag - 0.1, "b": ag + 0.1}
                task.slot.write(Numbers(task.cell.name, {}, {}, test=shared, shared=shared, curves=curves))

    monkeypatch.setattr(book, "run_long_jobs", done)
    text = reproduce("kteps-vectors", request(data, tmp_path, seeds=[0, 1, 2])).read_text(encoding="utf-8")
    found = text.partition("KTEPS minus FedAvg, paired by seed")[2].partition("## FDU")[0]
    # (1 + 3) / 2 points of Ap and (0 + 2) / 2 of Ag, √2 from each other; seed 2 and none of "no vectors" have a pair
    assert "| as configured | +2.00 ± 1.41 | +1.00 ± 1.41 | 2 |" in found
    assert "| vectors twice as long | -10.00 | -30.00 | 1 |" in found
    assert found.count("\n|") == 4


@pytest.mark.slow
def test_the_usual_rows_are_those_of_the_tables(
    finished: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vectors, "ROWS", ("KTEPS",))
    monkeypatch.setattr(vectors, "OF_GLOVE", ())
    reproduce("kteps-vectors", request(data, tmp_path))
    ours = rows(tmp_path, "kteps-vectors")
    usual = rows(finished, "kteps-table3")["KTEPS", "accuracy_ap"]
    assert ours["KTEPS, as configured", "accuracy_ap"].value == usual.value
    assert ours["KTEPS, as configured", "accuracy_ap"].published == pytest.approx(0.858)
    assert ours["KTEPS, as configured, ratio 1", "accuracy_ap"].published == pytest.approx(0.790)
    others = [ours[f"KTEPS, {way}", "accuracy_ap"] for way in list(vectors.WAYS)[1:3]]
    assert all(other.published is None for other in others)
    losses = {tuple(read_numbers(file).loss) for file in (tmp_path / "kteps").glob("fdu-kteps-*")}
    assert len(losses) == 3
