"""A run's folder comes back as the run that wrote it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedkeep import methods, models
from fedkeep.core.errors import ConfigError, DataError, FedkeepError, RunError, StoreError
from fedkeep.core.sealed import seal
from fedkeep.data import toy
from fedkeep.experiments.build import run_config
from fedkeep.experiments.config import Config
from fedkeep.experiments.load import load_run, run_folder_config
from fedkeep.experiments.personalize import rooted
from fedkeep.experiments.run import Run
from fedkeep.experiments.run_directory import layout
from fedkeep.experiments.simulate import simulate
from tests.tiny import files, interrupt, same_bits


def config(**tables: Any) -> Config:
    content: dict[str, Any] = {
        "name": "Toy",
        "data": {"reader": "toy", "users": 7},
        "model": {"kind": "linear"},
        "method": {"kind": "furl", "private_init": ["normal", 0.5]},
        "run": {"rounds": 3, "cohort": 2, "hold_out": 0.3},
    }
    return Config.model_validate(content | tables)


def fault(kind: type[FedkeepError], folder: Path, **arguments: Any) -> str:
    with pytest.raises(kind) as error:
        load_run(folder, **arguments)
    return str(error.value)


def same(a: Run, b: Run) -> None:
    assert a.server.keys() == b.server.keys()
    assert all(torch.equal(a.server[n], b.server[n]) for n in a.server)
    everybody = list(range(len(a.data)))
    mine, other = a.private.read(everybody), b.private.read(everybody)
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[n], other[n]) for n in mine)
    assert a.private.seen(everybody) == b.private.seen(everybody)
    assert a.evaluate("test") == b.evaluate("test")
    assert np.array_equal(a.clients, b.clients)
    assert np.array_equal(a.held_out, b.held_out)
    assert (a.round, a.epoch, a.engine, a.folder) == (b.round, b.epoch, b.engine, b.folder)
    assert a.method == b.method
    assert a.history[-1].round == b.history[-1].round
    one, two = a.whole, b.whole
    for name in ("round", "progress", "trainable", "population"):
        assert getattr(one, name) == getattr(two, name), name
    for mine, other in ((one.params, two.params), (one.state, two.state), (one.links, two.links)):
        assert same_bits(mine, other)
    assert same_bits(one.optimizer.tensors(), two.optimizer.tensors())


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"seed": 8},
        {"method": {"kind": "fedavg"}},
        {"method": {"kind": "local"}},
        {"run": {"rounds": 2, "centralised": True}},
        {"method": {"kind": "furl", "server_optimizer": {"kind": "adam", "learning_rate": 0.1}}},
        {"method": {"kind": "scaffold"}},
    ],
    ids=["furl", "other seed", "fedavg", "local", "centralised", "adam", "scaffold"],
)
def test_a_finished_run_comes_back(tmp_path: Path, tables: dict[str, Any]) -> None:
    run = run_config(config(**tables), out=tmp_path / "r")
    loaded = load_run(tmp_path / "r")
    same(run, loaded)
    before = sorted(
        (r.split, r.metric, r.round, r.value) for r in run.history if r.split in ("valid", "test")
    )
    after = sorted(
        (r.split, r.metric, r.round, r.value) for r in loaded.history if r.split in ("valid", "test")
    )
    assert before == after


def test_loading_changes_nothing_and_leaves_the_folder_free(tmp_path: Path) -> None:
    run_config(config(), out=tmp_path / "r")
    before = {p: p.read_bytes() for p in (tmp_path / "r").rglob("*") if p.is_file()}
    first = load_run(tmp_path / "r")
    load_run(tmp_path / "r")  # not locked by the first
    first.evaluate("test")
    assert {p: p.read_bytes() for p in (tmp_path / "r").rglob("*") if p.is_file()} == before


def test_a_folder_that_cannot_be_written_is_read(tmp_path: Path) -> None:
    """A copy on a read-only disk; and reading never makes a missing file anew."""
    run = run_config(config(), out=tmp_path / "r")
    (tmp_path / "r" / "lock").unlink()
    held = [tmp_path / "r" / "private", tmp_path / "r"]
    for folder in held:
        folder.chmod(0o555)
    try:
        same(run, load_run(tmp_path / "r"))
    finally:
        for folder in held:
            folder.chmod(0o755)
    assert not (tmp_path / "r" / "lock").exists()


@pytest.mark.parametrize("gone", ["store.db", "."])
def test_reading_makes_nothing_anew(tmp_path: Path, gone: str) -> None:
    """A table of private states was once erased by a command that only reads."""
    run_config(config(), out=tmp_path / "r")
    path = tmp_path / "r" / "private" / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = files(tmp_path / "r")
    message = fault(StoreError, tmp_path / "r")
    assert str(tmp_path / "r" / "private") in message
    assert files(tmp_path / "r") == before
    with pytest.raises(StoreError):
        run_config(config(), out=tmp_path / "r", resume=True)
    assert files(tmp_path / "r") == before


def test_what_a_killed_round_left_is_read_past_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the private versions and the commit: reading gives the last commit, and touches nothing."""
    from fedkeep.experiments.run_directory import Commit

    whole = tmp_path / "whole"
    run = run_config(config(run={"rounds": 2, "cohort": 2}), out=whole)
    write, count = Commit.to_bytes, 0

    def to_bytes(self: Commit) -> bytes:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return write(self)

    monkeypatch.setattr(Commit, "to_bytes", to_bytes)
    with pytest.raises(KeyboardInterrupt):
        run_config(config(run={"rounds": 3, "cohort": 2}), out=tmp_path / "r")
    before = files(tmp_path / "r")
    loaded = load_run(tmp_path / "r")
    assert loaded.last.round == 2
    everybody = list(range(7))
    for found, wanted in ((loaded, run), (loaded.last, run.last)):
        assert same_bits(found.server, wanted.server)
        assert same_bits(found.private.read(everybody), wanted.private.read(everybody))
    assert loaded.history[-1].round == 2
    assert files(tmp_path / "r") == before


def test_a_run_killed_before_its_first_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedkeep.experiments.drive.run_round", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_config(config(), out=tmp_path / "r")
    loaded = load_run(tmp_path / "r")
    assert (loaded.round, loaded.history) == (0, [])


def test_data_given_need_not_be_read(tmp_path: Path) -> None:
    run = run_config(config(), out=tmp_path / "r")
    assert load_run(tmp_path / "r", data=run.data).data is run.data


def test_other_data_are_refused(tmp_path: Path) -> None:
    run_config(config(), out=tmp_path / "r")
    message = fault(RunError, tmp_path / "r", data=toy(users=7, seed=1))
    assert message.startswith(
        f"The data differ from those that {tmp_path / 'r'} was made with:\n  columns.label: "
    )
    assert message.endswith("\nName the same with --data DIR.")


def test_a_changed_configuration_is_refused(tmp_path: Path) -> None:
    run_config(config(), out=tmp_path / "r")
    path = tmp_path / "r" / "config.toml"
    path.write_text(path.read_text(encoding="utf-8").replace("cohort = 2", "cohort = 3"), encoding="utf-8")
    assert fault(RunError, tmp_path / "r") == (
        f"{path} was changed after the run was made:\n  run.cohort: 2 in the run, 3 now\nRestore it, or start "
        "another run."
    )


def test_a_run_made_by_code_has_no_configuration(tmp_path: Path) -> None:
    simulate(models.Linear(4, 3), methods.furl(), toy(), rounds=1, out=tmp_path / "r")
    assert fault(RunError, tmp_path / "r").startswith(
        f"{tmp_path / 'r'} keeps no config.toml: it was not made from"
    )


def test_an_unknown_device(tmp_path: Path) -> None:
    run_config(config(), out=tmp_path / "r")
    assert fault(ConfigError, tmp_path / "r", device="warp").startswith("The device 'warp' cannot be used: ")


def test_the_folder_of_data_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDKEEP_DATA", raising=False)
    toy(users=5).save(tmp_path / "data" / "mine")
    saved = config(data={"reader": "saved", "folder": "mine"})
    run = run_config(saved, folder=tmp_path / "data", out=tmp_path / "r")
    same(run, load_run(tmp_path / "r"))
    shutil.move(tmp_path / "data", tmp_path / "moved")
    assert "wants a folder of data" in fault(DataError, tmp_path / "r")
    same(run, load_run(tmp_path / "r", data_folder=tmp_path / "moved"))


def test_a_state_that_does_not_fit(tmp_path: Path) -> None:
    import hashlib

    from safetensors.torch import save

    run_config(config(), out=tmp_path / "r")
    content = save({"params/linear.weight": torch.zeros(3, 4)})
    commit = json.loads((tmp_path / "r" / "commit.json").read_text(encoding="utf-8"))
    (tmp_path / "r" / commit["server"]).write_bytes(content)
    commit["server_sha256"] = hashlib.sha256(content).hexdigest()
    (tmp_path / "r" / "commit.json").write_text(json.dumps(seal(commit)), encoding="utf-8")
    assert fault(RunError, tmp_path / "r") == (
        f"{tmp_path / 'r' / commit['server']} does not hold what the run needs: missing ['optimizer/step', "
        f"'params/linear.bias']. Restore the run from a copy."
    )
    commit["tensors"] = {"params/linear.weight": "float32 3x4"}
    (tmp_path / "r" / "commit.json").write_text(json.dumps(seal(commit)), encoding="utf-8")
    assert fault(RunError, tmp_path / "r") == (
        f"{tmp_path / 'r'} does not hold what the run needs: missing ['linear.bias']. Restore the run from a copy."
    )
    whole = {"params/linear.weight": torch.zeros(3, 4), "params/linear.bias": torch.zeros(3)}
    content = save(whole)
    (tmp_path / "r" / commit["server"]).write_bytes(content)
    commit |= {"server_sha256": hashlib.sha256(content).hexdigest(), "tensors": layout(whole)}
    (tmp_path / "r" / "commit.json").write_text(json.dumps(seal(commit)), encoding="utf-8")
    assert fault(RunError, tmp_path / "r") == (
        f"{tmp_path / 'r'} does not hold what the run needs: missing ['optimizer/step']. Restore the run from a copy."
    )


def test_the_configuration_and_its_text(tmp_path: Path) -> None:
    run_config(config(), out=tmp_path / "r")
    kept, text = run_folder_config(tmp_path / "r")
    assert kept == config()
    assert text == config().to_toml()


def test_a_run_made_in_python_is_saved_and_comes_back(tmp_path: Path) -> None:
    data, method = toy(users=8, examples=20), methods.furl("user")
    run = simulate(models.Linear(4, 3), method, data, rounds=3, cohort=3, hold_out=["user-1", "user-3"])
    assert list(run.held_out) == ["user-1", "user-3"]
    run.fit()
    run.save(tmp_path / "r")
    before = files(tmp_path / "r")
    again = load_run(
        tmp_path / "r", model=models.Linear(4, 3), method=method, data=data
    )  # other first values
    assert again.folder == tmp_path / "r"
    again.folder = None
    same(run, again)
    assert list(again.held_out) == list(run.held_out)
    for clients in (None, run.held_out):
        for stage in ("own", "before", "shared"):
            assert again.evaluate(clients=clients, stage=stage) == run.evaluate(clients=clients, stage=stage)
    assert files(tmp_path / "r") == before
    with pytest.raises(RunError, match="not empty"):
        run.save(tmp_path / "r")
    assert "load_run" in fault(RunError, tmp_path / "r")
    assert "all of model, method and data" in fault(ConfigError, tmp_path / "r", method=method)
    given = {"model": models.Linear(4, 3), "method": method, "data": data}
    for other, said in (
        ({"method": methods.fedavg()}, "method.name"),
        ({"data": toy(users=9, examples=20)}, "data.clients"),
        ({"model": models.Linear(4, 2)}, "model"),
    ):
        with pytest.raises(FedkeepError, match=said):
            load_run(tmp_path / "r", **{**given, **other})  # type: ignore[arg-type]


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    data = toy(users=4, examples=20)
    run = simulate(models.Linear(4, 3), methods.fedavg(), data, rounds=1)
    with pytest.raises(ConfigError, match="another one's values"):
        rooted(run, models.Linear(4, 3), methods.fine_tuned()).save(tmp_path / "r")
    with pytest.raises(ConfigError, match="names every client"):
        simulate(models.Linear(4, 3), methods.fedavg(), data, rounds=1, hold_out=list(data.ids))
    assert not (tmp_path / "r").exists()
