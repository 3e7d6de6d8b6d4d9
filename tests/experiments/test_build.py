"""From a configuration to a whole run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedkeep.core.errors import ConfigError
from fedkeep.data import PARTITIONS
from fedkeep.experiments.build import run_config
from fedkeep.experiments.config import parse_config
from fedkeep.experiments.load import load_run
from tests.experiments.configs import CLASSIFIER, REVIEWS, config, shops


def test_a_personalisation_without_classes_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    toys = {"reader": "toy", "users": 4, "examples": 6, "features": 3, "task": "regression"}
    wanted = config(data=toys, model={"kind": "linear", "classes": 3}, personalization={})
    with pytest.raises(ConfigError, match="curve measures accuracy; this task is a regression"):
        run_config(wanted, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_steps_of_personalisation_that_are_no_multiple_are_refused() -> None:
    text = config().to_toml() + "[personalization]\nsteps = 3\nevery = 2\n"
    with pytest.raises(ConfigError, match="personalization: .* multiple of every.* steps 3 and every 2"):
        parse_config(text)


def test_a_whole_run_of_reviews_with_a_personalisation_curve(tmp_path: Path) -> None:
    wanted = config(
        data=REVIEWS,
        model=CLASSIFIER,
        method={"kind": "fedavg", "batch_size": 2},
        run={"rounds": 2, "cohort": 2, "evaluate_shared": True},
        personalization={"ratio": 0.5, "steps": 4, "every": 2},
    )
    run = run_config(wanted, folder=shops(tmp_path), out=tmp_path / "run")
    curve = [r for r in run.history if r.split.startswith("personalization/")]
    assert {(r.split, r.client) for r in curve} == {
        (f"personalization/{step}", client) for step in (0, 2, 4) for client in ("a", "b")
    }
    shared = [r for r in run.history if r.split == "test/shared"]
    assert {r.round for r in shared} == {1, 2}
    assert {r.client for r in shared if r.round == 2} == {None, "a", "b"}
    again = run_config(wanted, folder=tmp_path, out=tmp_path / "run", resume=True)
    assert again.history == run.history  # read, not measured once more
    in_memory = run_config(wanted, folder=tmp_path)
    assert [r for r in in_memory.history if r.split.startswith("personalization/")] == curve
    loaded = load_run(tmp_path / "run", data_folder=tmp_path)
    assert torch.equal(loaded.server["embedding.weight"], run.server["embedding.weight"])


def test_run_config_keeps_a_file_that_gives_the_run_again(tmp_path: Path) -> None:
    from fedkeep.experiments.config import read_config

    run_config(config(seed=3), out=tmp_path / "r")
    kept, _ = read_config(tmp_path / "r" / "config.toml")
    assert kept == config(seed=3)


def test_movielens_end_to_end(tmp_path: Path) -> None:
    """Matrix factorisation as an instance of FURL: the error falls below that of the mean rating."""
    from fedkeep.experiments.config import builtin_config

    rng = np.random.default_rng(0)
    taste, kind = rng.standard_normal((20, 1)), rng.standard_normal((15, 1))
    lines = [
        f"{u + 1}\t{i + 1}\t{int(np.clip(np.rint(3 + 1.5 * (taste[u] @ kind[i])), 1, 5))}\t{u * 100 + i}"
        for u in range(20)
        for i in range(15)
    ]
    (tmp_path / "ml-100k").mkdir()
    (tmp_path / "ml-100k" / "u.data").write_text("\n".join(lines) + "\n", encoding="utf-8")
    small = builtin_config("matrix-factorization", {"run.epochs": "20", "run.cohort": "10"})
    run = run_config(small, folder=tmp_path)
    ratings = np.concatenate([run.data.columns["label"][list(run.data.rows(c, "test"))] for c in range(20)])  # type: ignore[index]
    assert run.evaluate("test")["rmse"] < 0.8 * ratings.std()


def test_every_name_has_a_line_of_documentation() -> None:
    for thing in PARTITIONS.values():
        assert len(thing.__doc__ or "") > 10
