"""The reproduction of KTEPS on tiny generated reviews: shared cells, interrupted, committed ones, and what is written."""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedkeep.core.errors import ConfigError, DataError, RunError
from fedkeep.experiments.reproductions import reproduce
from fedkeep.version import NUMERICS
from fedkeep_papers.kit.results import read_results
from fedkeep_papers.kteps import book, cells, published
from fedkeep_papers.kteps.cells import CellJob, Numbers
from fedkeep_papers.kteps.fdu_mtl import DOMAINS
from fedkeep_papers.kteps.figures import _shares
from tests.papers.kteps.conftest import READY
from tests.papers.kteps.runs import read_numbers, request, rows
from tests.refusals import raises
from tests.tiny import interrupt

RUNS = f"numerics-{NUMERICS}"


@pytest.mark.slow
def test_table3_and_what_it_shares(finished: Path, data: Path, tmp_path: Path, computed: list[str]) -> None:
    names = {path.name.rsplit("-", 1)[0] for path in (finished / "kteps").iterdir()}
    assert names == {f"fdu-{m.removeprefix('kteps/')}-full-{seed}" for m in READY for seed in (0, 1)}
    assert not (finished / "runs" / RUNS / "kteps-full-running").exists() or not list(
        (finished / "runs" / RUNS / "kteps-full-running").iterdir()
    )
    found = rows(finished, "kteps-table3")
    assert {m for m, _ in found} == {*published.AP_METHODS, book.OWN_WORDS}
    kteps = found["KTEPS", "accuracy_ap"]
    assert (kteps.published, kteps.seeds, kteps.scene) == (0.858, (0, 1), "FDU")
    numbers = [read_numbers(p) for p in sorted((finished / "kteps").glob("fdu-kteps-full-*"))]
    curves = np.array([list(n.curves["0.01"]["own"].values()) for n in numbers])  # (seeds, clients, tests)
    assert curves.shape == (2, 16, 3)
    assert kteps.value == pytest.approx(curves.mean(), abs=1e-6)
    assert found["KTEPS", "accuracy_ap_last"].value == pytest.approx(curves[:, :, -1].mean(), abs=1e-6)
    assert found["KTEPS", "accuracy_ap_max"].value == pytest.approx(curves.max(axis=2).mean(), abs=1e-6)
    absent = found["FedMMD", "accuracy_ap"]
    assert (absent.value, absent.published, absent.seeds) == (None, 0.856, ())
    text = (finished / "kteps-table3.md").read_text(encoding="utf-8")
    for part in (
        "FDU by client, ours",
        "Fairness over clients",
        "Costs a client and round",
        "skip-gram",
        "559 test reviews",
    ):
        assert part in text
    # Table 2 and the ablations on the same runs compute nothing.
    out = tmp_path / "again"
    shutil.copytree(finished / "kteps", out / "kteps")
    for name in ("kteps-table2", "kteps-table5", "kteps-table6", "kteps-figure4"):
        reproduce(name, request(data, out, seeds=[0, 1]))
    assert computed == []
    two = rows(out, "kteps-table2")
    shared = [list(n.shared.values()) for n in numbers]
    assert two["KTEPS", "accuracy_ag"].value == pytest.approx(np.mean(shared), abs=1e-6)
    assert two["KTEPS", "accuracy_ag"].published == 0.857
    own = [read_numbers(p).test for p in sorted((finished / "kteps").glob("fdu-indiv-full-*"))]
    assert two["Indiv", "accuracy_ag"].value == pytest.approx(
        np.mean([list(o.values()) for o in own]), abs=1e-6
    )
    assert two["Indiv", "accuracy_ag"].value == found["Indiv", "accuracy_ap"].value
    five, six = rows(out, "kteps-table5"), rows(out, "kteps-table6")
    assert (
        five["KTEPS, ratio 0.01", "accuracy_ap"].value == kteps.value == six["KTEPS, sp", "accuracy_ap"].value
    )
    assert five["KTEPS⋆, ratio 1", "accuracy_ap"].published == 0.775
    assert six["KTEPS, s", "accuracy_ap"].published == 0.855
    assert (out / "kteps-figure4" / "figure4.png").stat().st_size > 5_000
    four = rows(out, "kteps-figure4")
    first = four["FedAvg, before fine-tuning", "accuracy_ap"].value
    assert four["FedAvg", "accuracy_ag"].value == pytest.approx(first, abs=1e-6)  # Remark 4


@pytest.mark.slow
def test_bytes_and_settings_are_kept(finished: Path) -> None:
    def of(name: str) -> Numbers:
        return read_numbers(next((finished / "kteps").glob(f"fdu-{name}-full-0-*")))

    average, kteps, star, alone = map(of, ("fedavg", "kteps", "kteps-star", "indiv"))
    assert average.private_bytes == 0
    assert kteps.private_bytes > 0
    assert alone.upload_bytes == 0
    assert alone.private_bytes > 200 * 4
    assert star.upload_bytes is not None
    assert average.upload_bytes is not None
    assert kteps.upload_bytes is not None
    assert average.upload_bytes < kteps.upload_bytes  # its projection
    assert kteps.settings["config"]["run"]["rounds"] == kteps.rounds == 2
    assert "seed" not in kteps.settings["config"]  # 0 is the default
    assert len(kteps.loss) == len(kteps.test_curve) == len(kteps.shared_curve) == 2
    assert kteps.shared_curve[-1] == [2, pytest.approx(np.mean(list(kteps.shared.values())))]
    assert set(kteps.curves) == {"1.0", "0.1", "0.01", "0.001"}
    assert set(kteps.curves["0.01"]) == {"own", "s", "p", "sp"}
    assert set(kteps.curves["1.0"]) == {"own"}
    assert set(kteps.source) == {"fdu_mtl.jsonl.gz", "word_vectors_200d.npz"}
    assert average.curves["0.01"]["own"].keys() == average.test.keys() == set(DOMAINS)


def test_an_interrupted_table_goes_on(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    whole = CellJob.__call__

    def stopped(task: CellJob, **how: Any) -> None:
        if len(started) == 1:
            raise KeyboardInterrupt
        started.append(task.cell.name)
        whole(task, **how)

    monkeypatch.setattr(book, "builtin_names", lambda: ["kteps/fedavg", "kteps/fedprox"])
    monkeypatch.setattr(CellJob, "__call__", stopped)
    with pytest.raises(KeyboardInterrupt):
        reproduce("kteps-table2", request(data, tmp_path))
    partly = rows(tmp_path, "kteps-table2")
    assert partly["FedAvg", "accuracy_ag"].value is not None
    assert partly["FedProx", "accuracy_ag"].value is None
    monkeypatch.setattr(
        CellJob, "__call__", lambda task, **how: (started.append(task.cell.name), whole(task, **how))[1]
    )
    reproduce("kteps-table2", request(data, tmp_path))
    assert started == ["fdu-fedavg-full-0", "fdu-fedprox-full-0"]
    assert rows(tmp_path, "kteps-table2")["FedProx", "accuracy_ag"].value is not None


def test_a_cell_that_was_killed_goes_on_with_its_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(book, "builtin_names", lambda: ["kteps/fedavg"])
    with monkeypatch.context() as patch:
        patch.setattr(cells, "personalization_curve", interrupt)
        with pytest.raises(KeyboardInterrupt):
            reproduce("kteps-table2", request(data, tmp_path))
    (run,) = (tmp_path / "runs" / RUNS / "kteps-full-running").iterdir()
    assert (run / "run.json").exists()
    monkeypatch.setattr("fedkeep.experiments.drive.run_round", interrupt)  # nothing is trained any more
    reproduce("kteps-table2", request(data, tmp_path))
    assert rows(tmp_path, "kteps-table2")["FedAvg", "accuracy_ag"].seeds == (0,)
    assert not run.exists()


@pytest.mark.slow
def test_other_settings_or_data_are_other_cells(
    finished: Path, data: Path, tmp_path: Path, computed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished / "kteps", tmp_path / "kteps")
    monkeypatch.setattr(book, "builtin_names", lambda: ["kteps/fedavg"])
    reproduce("kteps-table2", request(data, tmp_path, seeds=[0, 2]))
    assert computed == ["fdu-fedavg-full-2"]
    other = tmp_path / "data"
    shutil.copytree(data, other)
    lines = gzip.decompress((data / "fdu_mtl" / "fdu_mtl.jsonl.gz").read_bytes())
    (other / "fdu_mtl" / "fdu_mtl.jsonl.gz").write_bytes(gzip.compress(lines.replace(b"man", b"film")))
    reproduce("kteps-table2", request(other, tmp_path))
    assert computed == ["fdu-fedavg-full-2", "fdu-fedavg-full-0"]


def test_a_cell_that_diverges_leaves_its_fault(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = book.SCENES[0]
    steep = replace(scene, overrides=(("method.optimizer.learning_rate", "1e30"),))
    monkeypatch.setattr(book, "SCENES", (steep,))
    monkeypatch.setattr(book, "builtin_names", lambda: ["kteps/fedavg"])
    path = reproduce("kteps-table2", request(data, tmp_path))
    row = rows(tmp_path, "kteps-table2")["FedAvg", "accuracy_ag"]
    assert (row.value, row.seeds) == (None, ())
    assert "- fdu-fedavg-full-0: Client " in path.read_text(encoding="utf-8")
    assert read_numbers(next((tmp_path / "kteps").iterdir())).fault


@pytest.mark.slow
def test_figure5_and_table7_share_runs(
    data: Path, tmp_path: Path, computed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = replace(book.METHODS[book.OWN_WORDS], ratios=(0.01,), inferences=())
    monkeypatch.setitem(book.METHODS, book.OWN_WORDS, entry)  # type: ignore[arg-type]
    path = reproduce("kteps-figure5", request(data, tmp_path, scale="quick"))
    assert path == tmp_path / "kteps-figure5-quick.md"
    assert computed == [
        "fdu-kteps-star-own-words-end-150-start-1-quick-0",
        "fdu-kteps-star-own-words-quick-0",
    ]
    found = rows(tmp_path, "kteps-figure5-quick")
    row = found["man: client and server, components 1 to 150", "common_of_10"]
    assert row.value is not None
    assert (tmp_path / "kteps-figure5-quick" / "figure5.png").stat().st_size > 5_000
    assert 0 <= row.value <= 10
    assert (
        found["price: client and server, components 1 to 150", "common_of_10"].value is None
    )  # no such word
    text = path.read_text(encoding="utf-8")
    assert "Nearest words by cosine, components 2 to 150, client " in text
    numbers = read_numbers(
        next((tmp_path / "runs" / RUNS / "kteps-quick").glob("fdu-kteps-star-own-words-quick-0-*"))
    )
    assert len(numbers.neighbours["nearest"]["man"]["client"]["cosine"]) == 10
    assert set(numbers.neighbours["common"]["man"]["aggregate"]["inner"]) == {"10", "50", "100", "500"}


def test_shares_of_common_neighbours_by_hand() -> None:
    def found(*common: int) -> dict[str, Any]:
        return {"server": {"inner": dict(zip(("10", "50", "100", "500"), common, strict=True))}}

    numbers = replace(
        Numbers("a", {}, {}),
        neighbours={"common": {"man": found(10, 25, 80, 400), "good": found(5, 50, 70, 500)}},
    )
    assert _shares([numbers], "server", "inner") == [(10, 0.75), (50, 0.75), (100, 0.75), (500, 0.9)]
    other = replace(numbers, neighbours={"common": {"man": found(0, 25, 0, 100)}})  # of another seed
    assert _shares([numbers, other], "server", "inner") == [
        (10, 0.375),
        (50, 0.625),
        (100, 0.375),
        (500, 0.55),
    ]


def test_a_table_is_run_in_pieces(
    data: Path, tmp_path: Path, computed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(book, "builtin_names", lambda: ["kteps/fedavg", "kteps/fedprox"])
    reproduce("kteps-table3", request(data, tmp_path, seeds=[0, 1], only=["*-fedprox-full-1-*"]))
    assert computed == ["fdu-fedprox-full-1"]
    found = rows(tmp_path, "kteps-table3")
    assert found["FedProx", "accuracy_ap"].seeds == (1,)
    assert found["FedAvg", "accuracy_ap"].value is None
    with pytest.raises(ConfigError, match=r"No run matches 'iyy-\*'\. The runs are: fdu-"):
        reproduce("kteps-table3", request(data, tmp_path, only=["iyy-*"]))
    assert computed == ["fdu-fedprox-full-1"]


@pytest.mark.parametrize(
    ("table", "settings", "row", "published"),
    [
        ("kteps-table4", 9, ("λ1 = 0.001, λ2 = 0", "accuracy_ap"), 0.858),
        ("kteps-table7", 15, ("components 3 to 150", "accuracy_ag"), 0.616),
        ("kteps-table8", 12, ("B, λ2 = 0.01", "accuracy_ap"), 0.833),
    ],
)
def test_the_cells_of_the_other_tables(
    table: str,
    settings: int,
    row: tuple[str, str],
    published: float,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[CellJob] = []
    monkeypatch.setattr(book, "run_long_jobs", lambda tasks, *_, **__: asked.extend(tasks))
    reproduce(table, request(data, tmp_path))
    assert len({task.slot.file for task in asked}) == settings
    assert len({json.dumps(task.cell.settings(), sort_keys=True) for task in asked}) == settings
    found = rows(tmp_path, table)
    assert len(found) == 2 * settings
    assert found[row].published == published
    for task in asked:
        assert task.cell.resolved().seed == 0


@pytest.mark.slow
def test_a_scene_without_its_folder_shows_what_is_published_alone(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(book, "run_long_jobs", lambda *_, **__: None)
    monkeypatch.setattr(book.Book, "source", lambda *_: {})
    reproduce("kteps-table3", request(data, tmp_path / "a"))
    found = read_results(tmp_path / "a" / "kteps-table3.json")
    empty = [r for r in found if r.scene == "IYY, no data here"]
    assert {r.scene for r in found} == {"FDU", "IYY, no data here"}
    assert [r.method for r in empty] == list(published.AP_METHODS)
    assert all(r.value is None and r.published is not None for r in empty)
    shutil.copytree(data, tmp_path / "data")
    (tmp_path / "data" / "tang").mkdir()
    reproduce("kteps-table3", request(tmp_path / "data", tmp_path / "b"))
    found = read_results(tmp_path / "b" / "kteps-table3.json")
    assert {r.scene for r in found} == {"FDU", "IYY"}
    assert next(r.published for r in found if r.scene == "IYY" and r.method == "LG-FedAvg") == 0.608
    own = book.Book(request(tmp_path / "data", tmp_path), "kteps-table3")
    (cell,) = own.cells(book.SCENES[1], "KTEPS").values()
    config = cell.resolved()
    assert (config.data.reader, config.run.rounds, config.method.optimizer.learning_rate) == ("tang", 20, 0.1)
    assert config.method.optimizer.rate("embedding.weight") == 0.01


@pytest.mark.slow
def test_what_is_refused(tmp_path: Path, data: Path, finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(
        DataError,
        text="The scene FDU reads real data. Name its folder with --data DIR or the variable FEDKEEP_DATA.",
    ):
        reproduce("kteps-table2", request(None, tmp_path))
    monkeypatch.setattr(book, "builtin_names", lambda: ["kteps/fedavg"])
    shutil.copytree(finished / "kteps", tmp_path / "kteps")
    file = next((tmp_path / "kteps").glob("fdu-fedavg-full-0-*"))
    file.write_text("{}")
    with pytest.raises(RunError) as failed:
        reproduce("kteps-table2", request(data, tmp_path))
    assert str(failed.value).startswith(
        f"{file} holds no finished cell: wanted an object with settings; got {{}}."
    )
    assert str(failed.value).endswith("Delete it, and it is computed again.")


@pytest.mark.slow
def test_workers_give_the_same_numbers(
    data: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(book, "builtin_names", lambda: ["kteps/fedavg", "kteps/kteps"])
    reproduce("kteps-table2", request(data, tmp_path, jobs=2))
    for path in (tmp_path / "kteps").iterdir():
        again, once = read_numbers(path), read_numbers(finished / "kteps" / path.name)
        assert (again.curves, again.shared, again.loss) == (once.curves, once.shared, once.loss)


def test_the_published_averages_are_means_over_clients() -> None:
    for table in (published.AG, published.AP):
        for scene, clients in (("FDU", DOMAINS), ("IYY", ("IYY-imdb", "IYY-yelp-2013", "IYY-yelp-2014"))):
            for method, value in table[scene].items():
                assert np.mean([table[c][method] for c in clients]) == pytest.approx(value, abs=7e-4)
