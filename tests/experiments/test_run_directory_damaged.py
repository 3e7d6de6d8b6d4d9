"""A run's folder that was damaged, edited, forged or mixed with another's is refused and not made worse."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from fedkeep.core.errors import RunError, StoreError
from fedkeep.core.files import read_tensors
from fedkeep.core.sealed import seal
from tests.experiments.runs import damage, refused, run, stopped, with_id
from tests.refusals import raises
from tests.tiny import files, lasting

pytestmark = pytest.mark.usefixtures("same_id")


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("commit.json", "missing"),
        ("commit.json", "empty"),
        ("commit.json", "cut"),
        ("commit.json", "{}"),
        ("commit.json", "[]"),
        ("commit.json", '{"round": 2}'),
        ("run.json", "empty"),
        ("run.json", "cut"),
        ("run.json", "[]"),
        ("server-2.safetensors", "missing"),
        ("server-2.safetensors", "empty"),
        ("server-2.safetensors", "cut"),
        ("server-2.safetensors", "flip"),
        ("examples-2.safetensors", "missing"),
        ("examples-2.safetensors", "cut"),
        ("examples-2.safetensors", "flip"),
        ("records.jsonl", "missing"),
        ("records.jsonl", "cut"),
        ("timings.jsonl", "missing"),
        ("ledger.jsonl", "missing"),
        ("ledger.jsonl", "cut"),
        ("ledger.jsonl", "flip"),
        ("private/store.db", "missing"),
        ("private/store.db", "empty"),
        ("private/store.db", "cut"),
        ("private/store.db", "{}"),
    ],
)
def test_a_damaged_folder_is_named_and_not_made_worse(tmp_path: Path, name: str, how: str) -> None:
    out = tmp_path / "run"
    stopped(out, 2)
    (out / "server-3.safetensors").write_bytes(b"of a round that was never committed")
    damage(out / name, how)
    before = files(out)
    with pytest.raises((RunError, StoreError)) as error:
        run(out, resume=True)
    assert Path(name).name in str(error.value) or str(out / "private") in str(error.value)
    assert files(out) == before


@pytest.mark.parametrize("name", ["records.jsonl", "timings.jsonl"])
def test_a_changed_line_of_what_was_measured_is_refused(tmp_path: Path, name: str) -> None:
    out = tmp_path / "run"
    stopped(out, 2)
    path = out / name
    content = path.read_text()
    at = content.index('"value": ') + 9
    path.write_text(content[:at] + ("1" if content[at] != "1" else "2") + content[at + 1 :])
    with refused(out, RunError, f"{path} is damaged or was edited: its checksum is not the committed one."):
        run(out, resume=True)


@pytest.mark.parametrize(
    ("found", "rest"),
    [
        (99, "Update fedkeep."),
        (1, "It is of an older fedkeep: run it again, or read it with that one."),
    ],
)
def test_a_folder_of_another_fedkeep(tmp_path: Path, found: int, rest: str) -> None:
    out = tmp_path / "run"
    run(out, rounds=1)
    info = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps({**info, "format": found}))
    with refused(out, said=f"{out / 'run.json'} has the format {found}; this fedkeep reads format 4. {rest}"):
        run(out, rounds=1, resume=True)


@pytest.mark.parametrize("name", ["run.json", "commit.json"])
def test_an_edited_number_is_refused(tmp_path: Path, name: str) -> None:
    out = tmp_path / "run"
    stopped(out, 2)
    content = json.loads((out / name).read_text())
    (out / name).write_text(json.dumps({**content, "cohort": 3, "round": 1}))
    with refused(
        out, RunError, f"{out / name} is damaged or was edited: its checksum is not that of its content."
    ):
        run(out, resume=True)


def test_the_store_of_another_run_is_refused_by_name(tmp_path: Path) -> None:
    """Private states of one seed in the folder of another were evaluated as if they were its own."""
    for name, seed in (("one", 5), ("two", 6)):
        with with_id(name):
            run(tmp_path / name, seed=seed)
    shutil.rmtree(tmp_path / "one" / "private")
    shutil.copytree(tmp_path / "two" / "private", tmp_path / "one" / "private")
    with refused(tmp_path / "one", StoreError, "belongs to the run 'two', not to 'one'"):
        run(tmp_path / "one", resume=True)


def test_a_commit_of_another_run_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with with_id(name):
            run(tmp_path / name)
    shutil.copy(tmp_path / "two" / "commit.json", tmp_path / "one" / "commit.json")
    with refused(tmp_path / "one", said="commit.json is of the run two, but run.json of the run one."):
        run(tmp_path / "one", resume=True)


def test_a_store_of_another_round_of_the_same_run_is_refused(tmp_path: Path) -> None:
    """Server, commit and records of round 2 beside the store of round 4, and the other way round."""
    early, late = tmp_path / "early", tmp_path / "late"
    stopped(early, 2)
    run(late)
    for folder, other in ((early, late), (late, early)):
        mixed = tmp_path / f"mixed-{folder.name}"
        shutil.copytree(folder, mixed)
        shutil.copy(other / "private" / "store.db", mixed / "private" / "store.db")
        with refused(mixed, StoreError, "Restore the whole run from one copy"):
            run(mixed, resume=True)


def test_a_run_restored_from_the_round_before_its_store_goes_on_to_the_same_bits(
    tmp_path: Path, whole: dict[str, bytes]
) -> None:
    """The store can take one round back, whoever asks for it."""
    early, late = tmp_path / "early", tmp_path / "late"
    stopped(late, 3)
    shutil.copytree(late, early)
    run(late, resume=True)
    shutil.copy(late / "private" / "store.db", early / "private" / "store.db")
    run(early, resume=True)
    assert lasting(early) == whole


def test_the_store_of_a_copy_of_the_run_that_went_on_by_itself_is_refused(tmp_path: Path) -> None:
    """Noise of the system is another in each: server and clients of two trainings would be mixed."""
    one, two = tmp_path / "one", tmp_path / "two"
    stopped(one, 2)
    shutil.copytree(one, two)
    run(one, resume=True)
    run(two, resume=True)
    shutil.copy(one / "private" / "store.db", two / "private" / "store.db")
    with refused(two, StoreError, "Restore the whole run from one copy"):
        run(two, resume=True)


def test_an_older_copy_of_the_whole_folder_is_no_damage(tmp_path: Path, whole: dict[str, bytes]) -> None:
    out = tmp_path / "run"
    stopped(out, 2)
    shutil.copytree(out, tmp_path / "copy")
    run(tmp_path / "copy", resume=True)
    assert lasting(tmp_path / "copy") == whole


@pytest.mark.parametrize("how", ["gone", "cut", "longer"])
def test_records_that_change_during_a_run_are_noticed(tmp_path: Path, how: str) -> None:
    from fedkeep.experiments.run_directory import RunDirectory

    out, commit = tmp_path / "run", RunDirectory.commit
    path = out / "records.jsonl"

    def meddled(self: RunDirectory, round: int, *arguments: Any, **options: Any) -> None:
        if round == 3:
            content = path.read_bytes()
            path.unlink()
            if how != "gone":
                path.write_bytes(content[:-9] if how == "cut" else content + b"{}\n")
        commit(self, round, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunDirectory, "commit", meddled)
        with raises(RunError, said=f"{path} was changed while the run went on: wanted "):
            run(out)
    assert json.loads((out / "commit.json").read_text())["round"] == 2


def forged(out: Path, **changes: Any) -> Path:
    """Rewrite the server's state with other tensors, and let every hash fit."""
    commit = json.loads((out / "commit.json").read_text())
    path = out / commit["server"]
    tensors = read_tensors(path)
    for name, value in changes.items():
        name = name.replace("__", "/").replace("_DOT_", ".")
        tensors = {n: v for n, v in tensors.items() if n != name} | ({} if value is None else {name: value})
    path.write_bytes(save(tensors))
    commit["server_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (out / "commit.json").write_text(json.dumps(seal(commit)))
    return path


FORGED: dict[str, tuple[Any, str]] = {
    "missing": (None, "missing ['params/linear.bias']"),
    "shape": (torch.zeros(4), "'params/linear.bias' should be float32 3, is float32 4"),
    "dtype": (torch.zeros(3).double(), "'params/linear.bias' should be float32 3, is float64 3"),
    "nan": (torch.tensor([0.0, torch.nan, 0.0]), "'params/linear.bias' holds a NaN or an infinity"),
    "infinity": (torch.tensor([0.0, torch.inf, 0.0]), "'params/linear.bias' holds a NaN or an infinity"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_state_whose_hash_fits_is_looked_at_all_the_same(tmp_path: Path, name: str) -> None:
    value, fault = FORGED[name]
    out = tmp_path / "run"
    run(out)
    path = forged(out, params__linear_DOT_bias=value)
    with raises(
        RunError, said=f"{path} does not hold what the run needs: {fault}. Restore the run from a copy."
    ):
        run(out, resume=True)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 40, (2**40).to_bytes(8, "little") + b"{}", b"\2\0\0\0\0\0\0\0[]"]
)
def test_a_header_that_says_nothing_is_our_error(tmp_path: Path, content: bytes) -> None:
    out = tmp_path / "run"
    run(out)
    path = forged(out)
    commit = json.loads((out / "commit.json").read_text())
    path.write_bytes(content)
    commit["server_sha256"] = hashlib.sha256(content).hexdigest()
    (out / "commit.json").write_text(json.dumps(seal(commit)))
    with pytest.raises(RunError, match=r"server-4\.safetensors is"):
        run(out, resume=True)
