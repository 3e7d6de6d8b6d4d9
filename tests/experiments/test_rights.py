"""What holds private values of clients is its owner's alone, whatever the system gives to new files."""

import os
import stat

import pytest

from fedkeep.experiments.build import build_data, run_config
from fedkeep.experiments.config import parse_config
from fedkeep.store.sqlite import SqliteStore

TEXT = """
name = "rights"
[data]
reader = "toy"
[model]
kind = "linear"
[method]
kind = "fedper"
private = "linear.bias"
[run]
rounds = 1
cohort = 3
hold_out = 0.3
"""


@pytest.mark.filterwarnings("ignore:.*were never drawn:UserWarning")
def test_private_values_are_their_owners_alone(tmp_path, monkeypatch):
    flush, written = SqliteStore.flush, {}

    def looking(store):
        flush(store)
        written.update({path.name: path.stat().st_mode for path in store.folder.iterdir()})

    monkeypatch.setattr(SqliteStore, "flush", looking)
    config = parse_config(TEXT)
    old = os.umask(0)
    try:
        run = run_config(config, data=build_data(config), out=tmp_path / "run", progress=False)
        run.fit(run.held_out)
        run.export(tmp_path / "models")
    finally:
        os.umask(old)
    assert {"store.db", "store.db-wal"} <= written.keys()
    assert {stat.S_IMODE(mode) for mode in written.values()} == {0o600}, written
    places = [tmp_path / "run" / "private", tmp_path / "run" / "fitted", tmp_path / "models"]
    for place in places:
        assert stat.S_IMODE(place.stat().st_mode) == 0o700, place
        found = [path for path in place.rglob("*") if path.is_file()]
        assert found
        private = [path for path in found if path.name != "fitted.json"]
        assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}, found
