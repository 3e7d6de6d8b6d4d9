"""Formats of all that is on a disk: one way to look at them, one sentence, and what to do; nothing is touched."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fedkeep.core import sealed
from fedkeep.core.errors import DataError, FedkeepError, RunError, StoreError
from fedkeep.core.run_files import read_info
from fedkeep.core.sealed import check_format, sealed_bytes
from fedkeep.data import FederatedData, disk, toy
from fedkeep.experiments import comparing
from fedkeep.experiments.sweeps.plan import FORMAT as SWEEP
from fedkeep.experiments.sweeps.plan import Sweep, held
from fedkeep.privacy import budget_ledger
from fedkeep.remote import device_file
from fedkeep.store import sqlite
from tests.privacy.test_ledger import TERMS
from tests.remote import device_states
from tests.store import build
from tests.tiny import files

Case = tuple[type[FedkeepError], int, str, Callable[[], Any]]


def dumped(said: Any, **changes: Any) -> str:
    return json.dumps(
        {key: value for key, value in {**json.loads(said), **changes}.items() if value is not None}
    )


def run_folder(folder: Path, found: Any) -> Case:
    content = {"run": "abc", "identity": {}} | ({} if found is None else {"format": found})
    (folder / "run.json").write_bytes(sealed_bytes(content))
    return RunError, sealed.FORMAT, "run it again", lambda: read_info(folder)


def device(folder: Path, found: Any) -> Case:
    device_states.made(folder)
    ((said,),) = device_states.run_sql(folder, "SELECT content FROM about")
    said = dumped(said, format=found)
    device_states.run_sql(folder, f"UPDATE about SET content = '{said}', crc = {zlib.crc32(said.encode())}")
    return StoreError, device_file.FORMAT, "forget it", lambda: device_states.opened(folder)


def store(folder: Path, found: Any) -> Case:
    build.FILE.at_rest(folder, 1)
    ((said,),) = build.FILE.sql(folder, "SELECT content FROM about")
    build.FILE.sql(folder, f"UPDATE about SET content = '{dumped(said, format=found)}'")
    return StoreError, sqlite.FORMAT, "run it again", lambda: build.sqlite(folder)


def data(folder: Path, found: Any) -> Case:
    toy(users=2).save(folder / "data")
    about = folder / "data" / "data.json"
    about.write_bytes(sealed_bytes(json.loads(dumped(about.read_text(), format=found))))
    return DataError, disk.FORMAT, "save the data again", lambda: FederatedData.load(folder / "data")


def published(folder: Path, found: Any) -> Case:
    publishing = pytest.importorskip("fedkeep.flower.publishing", exc_type=ImportError)
    about = {"published": dumped('{"run": "abc"}', format=found), "signature": ""}
    save_file({"0/params/w": torch.zeros(1)}, folder / "run.published", metadata=about)
    read = publishing.read_published
    return RunError, publishing.FORMAT, "publish it again", lambda: read(folder / "run.published", [])


def kept_by_a_mod(folder: Path, found: Any) -> Case:
    keep = pytest.importorskip("fedkeep.flower.keep_mod", exc_type=ImportError)
    about = sealed_bytes(json.loads(dumped('{"order": "1"}', format=found))).decode()
    save_file({"params/w": torch.zeros(1)}, folder / "own", metadata={"fedkeep": about})
    anew = "remove it to begin anew with the server's values"
    return StoreError, keep.FORMAT, anew, lambda: keep.Own.read(folder / "own")


def comparison(folder: Path, found: Any) -> Case:
    (folder / "compare.json").write_text(dumped('{"data": {}, "tune": 0}', format=found))
    return RunError, comparing.FORMAT, "compare again in another folder", lambda: comparing._plan_in(folder)


def sweep(folder: Path, found: Any) -> Case:
    made = Sweep(
        out=folder,
        configs={},
        spaces={},
        trials=1,
        seeds=(0,),
        prune="none",
        metric="accuracy",
        folder=None,
        data={},
    )
    (folder / "sweep.json").write_text(dumped(json.dumps(made.about()), format=found))

    def go_on() -> None:
        with held(made):
            pass

    return RunError, SWEEP, "sweep again in another folder", go_on


def budget(folder: Path, found: Any) -> Case:
    path = folder / "budget.jsonl"
    budget_ledger.BudgetLedger.open(path, "run-1", TERMS)
    path.write_text(dumped(path.read_text(), format=found) + "\n")
    return (
        RunError,
        budget_ledger.FORMAT,
        "run it again",
        lambda: budget_ledger.BudgetLedger.read(path, "run-1"),
    )


PLACES = [run_folder, device, store, data, published, kept_by_a_mod, comparison, sweep, budget]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("found", "said"), [(None, "no format"), (0, "the format 0"), (99, "the format 99")])
def test_another_format_is_named_and_what_to_do(
    place: Callable[[Path, Any], Case], found: int | None, said: str, tmp_path: Path
) -> None:
    error, reads, anew, read = place(tmp_path, found)
    before = files(tmp_path)
    older = f"It is of an older fedkeep: {anew}, or read it with that one."
    with pytest.raises(error) as caught:
        read()
    wanted = f" has {said}; this fedkeep reads format {reads}. {older if found != 99 else 'Update fedkeep.'}"
    assert str(caught.value).endswith(wanted)
    assert {name: content for name, content in files(tmp_path).items() if "lock" not in name} == {
        name: content for name, content in before.items() if "lock" not in name
    }


@pytest.mark.parametrize("found", [True, "1", 1.0, [1]])
def test_a_format_is_a_whole_number(found: Any) -> None:
    with pytest.raises(RunError, match="Update fedkeep"):
        check_format("it", found, 1)
    check_format("it", 1, 1)
