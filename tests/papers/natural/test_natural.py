from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedkeep.core.errors import ConfigError, DataError
from fedkeep.experiments.build import build_method
from fedkeep.experiments.reproductions import Request
from fedkeep_papers.kit.results import read_results
from fedkeep_papers.natural import scenes, table
from fedkeep_papers.natural.cells import Run, gains_slot
from fedkeep_papers.natural.models import NextCharacter
from fedkeep_papers.natural.scenes import METHODS, SCENES, Cell
from fedkeep_papers.natural.table import natural_users

NAMES = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
USERS, FILMS = 12, 20


@pytest.fixture
def ratings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """A small package recbole: (users, films), what each user gives each film; MovieLens is the only data set."""
    rng = np.random.default_rng(0)
    given = np.clip(np.round(3 + rng.normal(size=(USERS, 1)) + 0.4 * rng.normal(size=(USERS, FILMS))), 1, 5)
    file = tmp_path / "site/recbole/dataset_example/ml-100k/ml-100k.inter"
    file.parent.mkdir(parents=True)
    (tmp_path / "site/recbole/__init__.py").touch()
    lines = (f"{u}\t{i}\t{given[u, i]:g}\t{u + i}\n" for u in range(USERS) for i in range(FILMS))
    file.write_text(NAMES + "".join(lines))
    monkeypatch.syspath_prepend(tmp_path / "site")
    for place in (scenes, table):
        monkeypatch.setattr(place, "SCENES", SCENES[:1])
    return given


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The table .* is trained and sent whole"
)  # Ditto's pull reads all of its copy
def test_it_runs_and_compares_and_goes_on_where_it_stopped(
    ratings: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def request(**more: object) -> Request:
        return Request(None, tmp_path / "results", "quick", progress=False, **more)

    computed: list[str] = []
    run = Run.__call__

    def counted(self: Run, **settings: object) -> None:
        computed.append(self.name)
        run(self, **settings)

    monkeypatch.setattr(Run, "__call__", counted)
    path = natural_users(request(only=["*-furl-*", "*-fedavg-0"]))
    assert "**Not finished**: 5 of 7 runs: 5 of 7 on movielens." in path.read_text()
    assert "what personalisation was worth" not in path.read_text()
    natural_users(request())
    assert sorted(computed) == sorted(Cell(SCENES[0], m, 0, "quick").name for m in METHODS)
    natural_users(request())
    assert len(computed) == len(METHODS)  # nothing twice
    text = path.read_text()
    assert "Not finished" not in text
    for against in (
        "FedAvg",
        "local training alone",
        "FedAvg with fine-tuning",
        "each user's mean label",
        "the shared part alone",
    ):
        assert f"| FURL | {against} |" in text
    rows = {(r.method, r.metric): r.value for r in read_results(path.with_suffix(".json"))}
    assert f"| Counting | {counting(ratings):.4f} |" in text
    assert rows["Counting", "rmse"] == pytest.approx(counting(ratings), rel=1e-5)
    assert len({rows[m, "rmse"] for m in METHODS}) == len(METHODS)
    written = path.read_bytes(), path.with_suffix(".json").read_bytes()
    for runs in (tmp_path / "results/runs").glob("*/natural-users-quick"):
        shutil.rmtree(runs)
    natural_users(request(finished=True))  # from what is kept alone, without the folders of runs
    assert (path.read_bytes(), path.with_suffix(".json").read_bytes()) == written


def counting(ratings: np.ndarray) -> float:
    """Return the RMSE of each user's mean, with one example of everybody's mean, on the table's test examples."""
    data = scenes.build_data(Cell(SCENES[0], "FURL", 0, "full").config(), None)
    item = np.asarray(data.columns["item"])
    train, test = data.split_rows("train"), data.split_rows("test")
    of_train, of_test = data.clients_of(train), data.clients_of(test)
    everybody = np.mean([ratings[u, i] for u, i in zip(of_train, item[train], strict=True)])
    errors = []
    for u, i in zip(of_test, item[test], strict=True):
        own = [ratings[u, k] for k in item[train][of_train == u]]
        errors.append((sum(own) + everybody) / (len(own) + 1) - ratings[u, i])
    return float(np.sqrt(np.mean(np.square(errors))))


def test_a_missing_package_is_said_only_where_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise DataError("Install it.")

    monkeypatch.setattr(table, "source_of", missing)
    with pytest.raises(DataError, match="Install it."):
        natural_users(Request(None, tmp_path, "quick", only=["insteval-furl-0"]))
    assert "28 of 28 runs" in natural_users(Request(None, tmp_path, "quick", finished=True)).read_text()
    with pytest.raises(ConfigError, match="No run matches 'imdb'. The.*0.*0"):
        natural_users(Request(None, tmp_path, "quick", only=["imdb"]))


def test_a_worth_report_is_of_the_references_settings_too(monkeypatch: pytest.MonkeyPatch) -> None:
    own = [Cell(SCENES[0], "FURL", seed, "full") for seed in (0, 1)]

    def key(cells: list[Cell]) -> str:
        return gains_slot(cells, Path(), {"u.data": "ab"}).file.name

    first, local = key(own), key([Cell(SCENES[0], "Local", 0, "full")])
    whole = Cell._own

    def tuned(cell: Cell) -> tuple[dict[str, Any], dict[str, Any]]:
        table, run = whole(cell)
        return (table | {"tune_epochs": 30} if cell.method == "FedAvg + fine-tuning" else table), run

    monkeypatch.setattr(Cell, "_own", tuned)
    assert key(own) != first
    assert key([Cell(SCENES[0], "Local", 0, "full")]) != local
    monkeypatch.setattr(Cell, "_own", whole)
    assert (key(own), key([Cell(SCENES[0], "Local", 0, "full")])) == (first, local)


def test_runs_of_other_settings_or_data_stand_in_other_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Path] = []
    monkeypatch.setattr("fedkeep_papers.natural.cells.run_config", lambda *_, out, **__: begun.append(out))
    monkeypatch.setattr("fedkeep_papers.natural.cells.side_of", lambda *_: pytest.fail("judged"))
    cell = Cell(SCENES[0], "FURL", 0, "quick")
    for scale, digest in (("quick", "ab"), ("quick", "cd"), ("full", "ab")):
        sheet = table.Sheet(Request(None, tmp_path, "quick"), {SCENES[0].name: {"u.data": digest}})
        with pytest.raises(pytest.fail.Exception):
            sheet.run(replace(cell, scale=scale))()
        assert begun[-1] == sheet.run_folder(replace(cell, scale=scale))
    assert len(set(begun)) == 3


def test_every_run_has_a_configuration() -> None:
    for scene in SCENES:
        kinds = {m: build_method(Cell(scene, m, 1, "full").config().method).name for m in METHODS}
        assert [*kinds.values()] == ["fedavg", "local", "furl", "fedrep", "fedper", "ditto", "fine_tuned"]
        configs = {m: Cell(scene, m, 1, "full").config() for m in METHODS}
        assert {c.seed for c in configs.values()} == {1}
        assert (
            len(
                {
                    str((c.data, c.model, c.method.optimizer, c.run.cohort, c.run.epochs))
                    for c in configs.values()
                }
            )
            == 1
        )
        assert configs["FURL"].run.evaluate_shared
        assert configs["FedAvg + fine-tuning"].run.evaluate_adapted


def test_the_next_character_by_hand() -> None:
    torch.manual_seed(0)
    net = NextCharacter(5, width=2, embedding_dim=3, hidden=4, user_dim=2)
    with torch.no_grad():
        net.user.copy_(torch.tensor([1.0, -2.0]))
        net.user_bias.copy_(torch.arange(5.0))
    x = torch.cat([net.embedding.weight[3], net.embedding.weight[1], torch.tensor([1.0, -2.0])])
    hidden = (net.body.weight @ x + net.body.bias).clamp(min=0)
    expected = net.head.weight @ hidden + net.head.bias + torch.arange(5.0)
    assert torch.allclose(net(torch.tensor([[3, 1]], dtype=torch.uint8))[0], expected)
