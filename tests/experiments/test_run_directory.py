"""A run's folder: what it holds, what damages it, and that a failed commit loses nothing."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from fedkeep import Optimize, Phase, Run, WeightedMean, adam, averaging, methods, sgd, simulate
from fedkeep.core.errors import FedkeepError, RunError, StoreError
from fedkeep.core.files import read_tensors
from fedkeep.core.records import Record, read_records
from fedkeep.core.sealed import seal
from fedkeep.store.database import Database
from tests.tiny import Logits, classes, everyone, files, lasting, one_run_id, same_bits

METHOD = methods.furl("user", local=Phase(batch_size=4), server=averaging(sgd(1.0, momentum=0.9)))
DATA = classes(counts=(5, 9, 3, 7), kind="f4")


def run(out: Path | None, *, resume: bool = False, rounds: int = 4, model: Any = None, **changes: Any) -> Run:
    options: dict[str, Any] = {
        "method": METHOD,
        "data": DATA,
        "cohort": 2,
        "seed": 5,
        "evaluate_every": 2,
    } | changes
    return simulate(model or Logits(), rounds=rounds, out=out, resume=resume, **options)


@pytest.fixture(scope="module", autouse=True)
def same_id() -> Iterator[None]:
    """Let all runs have one id, so that folders can be compared; tests of several runs give each its own."""
    with one_run_id():
        yield


@contextmanager
def with_id(name: str) -> Iterator[None]:
    """Let runs that are begun have the id of this name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedkeep.experiments.run_directory.new_run_id", lambda: name)
        yield


class Stop(Exception):
    """Stops a run between two rounds."""


def stopped(out: Path, after: int, **changes: Any) -> None:
    """Leave a run at its commit of round ``after``."""
    from fedkeep.experiments.run_directory import RunDirectory

    commit = RunDirectory.commit

    def stopping(self: RunDirectory, round: int, *arguments: Any) -> None:
        if round > after:
            raise Stop
        commit(self, round, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunDirectory, "commit", stopping)
        with pytest.raises(Stop):
            run(out, **changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(folder)
    return lasting(folder)


def test_what_a_folder_holds(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "run"
    done = run(out, name="mine", config={"seed": 5}, config_text="seed = 5\n")
    names = set(files(out))
    assert names == {
        "lock", "run.json", "config.toml", "records.jsonl", "timings.jsonl", "commit.json", "server-4.safetensors",
        "examples-2.safetensors", "private/store.db",
    }  # fmt: skip
    assert (out / "config.toml").read_text() == "seed = 5\n"
    info = json.loads((out / "run.json").read_text())
    assert (info["name"], info["method"], info["seed"], info["status"]) == ("mine", "furl", 5, "finished")
    assert (info["engine"], info["pooled"], info["rounds"], info["cohort"]) == ("sequential", False, 4, 2)
    assert (info["rounds_per_epoch"], info["metric"], info["config"]) == (2, "accuracy", {"seed": 5})
    assert info["bytes_up"] == info["bytes_down"] == 48
    assert [(r["name"], r["half"], r["bytes"]) for r in info["split_table"]] == [
        ("user", "private", 12), ("linear.weight", "federated", 36), ("linear.bias", "federated", 12),
    ]  # fmt: skip
    assert info["data"]["counts"] == {"train": 24, "valid": 8, "test": 12}
    assert info["data"]["fingerprint"] == DATA.fingerprint()
    assert {"python", "torch", "fedkeep", "platform", "machine", "cores", "commit"} <= info[
        "environment"
    ].keys()
    assert list(read_records(out / "records.jsonl")) == done.history
    server = read_tensors(out / "server-4.safetensors")
    assert same_bits(
        {n.removeprefix("params/"): v for n, v in server.items() if n.startswith("params/")}, done.server
    )


def test_records_hold_what_is_reproducible_and_timings_the_rest(tmp_path: Path) -> None:
    for name in ("a", "b"):
        run(tmp_path / name)
    assert (tmp_path / "a" / "records.jsonl").read_bytes() == (tmp_path / "b" / "records.jsonl").read_bytes()
    assert {(r.split, r.metric) for r in read_records(tmp_path / "a" / "timings.jsonl")} == {
        ("time", "seconds"), ("time", "aggregate_seconds"),
    }  # fmt: skip
    assert not any(r.split == "time" for r in read_records(tmp_path / "a" / "records.jsonl"))


def test_a_run_with_a_folder_equals_one_without(tmp_path: Path) -> None:
    kept, fleeting = run(tmp_path / "run"), run(None)
    assert same_bits(kept.server, fleeting.server)
    assert same_bits(everyone(kept.private, 4), everyone(fleeting.private, 4))
    assert kept.history == fleeting.history
    assert kept.evaluate() == fleeting.evaluate()


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_stopped_run_resumes_to_the_same_bits(tmp_path: Path, after: int, whole: dict[str, bytes]) -> None:
    stopped(tmp_path / "run", after)
    done = run(tmp_path / "run", resume=True)
    assert lasting(tmp_path / "run") == whole
    assert done.round == 4
    assert done.history == list(read_records(tmp_path / "run" / "records.jsonl"))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished"


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    first = run(tmp_path / "run")
    before = lasting(tmp_path / "run")
    again = run(tmp_path / "run", resume=True)
    assert lasting(tmp_path / "run") == before
    assert again.history == first.history
    assert same_bits(again.server, first.server)
    assert again.evaluate() == first.evaluate()


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(out, rounds=1)
    before = files(out)
    with pytest.raises(RunError) as error:
        run(out, rounds=1)
    assert str(error.value) == (
        f"{out} already exists and is not empty. Resume that run (resume=True, on the command line --resume), "
        f"or name another folder."
    )
    assert files(out) == before
    other = tmp_path / "file"
    other.write_text("mine")
    with pytest.raises(RunError, match="already exists and is not empty"):
        run(other)
    assert other.read_text() == "mine"
    with pytest.raises(RunError, match=r"^Cannot make the run's folder .*: Not a directory\.$"):
        run(other / "below")
    (tmp_path / "empty").mkdir()
    run(tmp_path / "empty", rounds=1)


def test_nothing_to_resume(tmp_path: Path) -> None:
    for out in (tmp_path / "none", tmp_path):
        with pytest.raises(RunError) as error:
            run(out, resume=True)
        assert str(error.value) == (
            f"{out} holds no run: there is no run.json in it. Name the folder that a run wrote."
        )
    assert files(tmp_path) == {}


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"seed": 6}, "seed: 5 in the run, 6 now"),
    "rounds": ({"rounds": 9, "cohort": 3}, "rounds: 4 in the run, 9 now"),
    "cohort": ({"cohort": 3}, "cohort: 2 in the run, 3 now"),
    "sampling": ({"sampling": "independent"}, "sampling: 'shuffled' in the run, 'independent' now"),
    "method": (
        {"method": METHOD.on_server(reduce=WeightedMean(by="uniform"))},
        "method.server.reduce.by: 'examples' in the run, 'uniform' now",
    ),
    "server": (
        {"method": METHOD.on_server(update=Optimize(optimizer=adam(0.1)))},
        "method.server.update.optimizer.kind: 'sgd' in the run, 'adam' now",
    ),
    "model": ({"model": Logits(seed=1)}, "model.initial_sha256: "),
    "data": ({"data": classes(counts=(5, 9, 3, 7), kind="f4", seed=1)}, "data.columns.label: "),
    "engine": ({"engine": "pooled"}, "pooled: False in the run, True now"),
    "hold out": ({"hold_out": 0.25}, "hold_out: 0.0 in the run, 0.25 now"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_a_run_of_another_configuration_is_refused_and_the_difference_named(
    tmp_path: Path, name: str
) -> None:
    changes, line = OTHERS[name]
    out = tmp_path / "run"
    stopped(out, 2)
    before = files(out)
    with pytest.raises(RunError) as error:
        run(out, resume=True, **changes)
    message = str(error.value)
    assert message.startswith(
        f"{out} is a run of another configuration, so it cannot be resumed with this one:\n  "
    )
    assert message.endswith("\nUse the settings it was made with, or name another folder.")
    assert f"\n  {line}" in message
    assert files(out) == before


class Wider(Logits):
    """The same values as ``Logits``, used in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.drop(x))


def test_a_model_of_the_same_values_but_other_layers_is_refused(tmp_path: Path) -> None:
    stopped(tmp_path / "run", 1)
    with pytest.raises(RunError, match="model"):
        run(tmp_path / "run", resume=True, model=Wider())


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "flip":
        path.write_bytes(content[:-20] + bytes([content[-20] ^ 1]) + content[-19:])
    else:
        path.write_text(how)


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
    before = files(out)
    with pytest.raises(RunError) as error:
        run(out, resume=True)
    assert str(error.value) == (
        f"{path} is damaged or was edited: its checksum is not the committed one. Restore the run from a copy."
    )
    assert files(out) == before


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
    with pytest.raises(RunError) as error:
        run(out, rounds=1, resume=True)
    assert (
        str(error.value) == f"{out / 'run.json'} has the format {found}; this fedkeep reads format 2. {rest}"
    )


@pytest.mark.parametrize("name", ["run.json", "commit.json"])
def test_an_edited_number_is_refused(tmp_path: Path, name: str) -> None:
    out = tmp_path / "run"
    stopped(out, 2)
    content = json.loads((out / name).read_text())
    (out / name).write_text(json.dumps({**content, "cohort": 3, "round": 1}))
    before = files(out)
    with pytest.raises(RunError) as error:
        run(out, resume=True)
    assert str(error.value) == (
        f"{out / name} is damaged or was edited: its checksum is not that of its content. Restore the run from a copy."
    )
    assert files(out) == before


def test_the_store_of_another_run_is_refused_by_name(tmp_path: Path) -> None:
    """Private states of one seed in the folder of another were evaluated as if they were its own."""
    for name, seed in (("one", 5), ("two", 6)):
        with with_id(name):
            run(tmp_path / name, seed=seed)
    shutil.rmtree(tmp_path / "one" / "private")
    shutil.copytree(tmp_path / "two" / "private", tmp_path / "one" / "private")
    before = files(tmp_path / "one")
    with pytest.raises(StoreError) as error:
        run(tmp_path / "one", resume=True)
    assert str(error.value) == (
        f"The private store {tmp_path / 'one' / 'private'} belongs to the run 'two', not to 'one'. Restore this run's "
        f"own store from a copy."
    )
    assert files(tmp_path / "one") == before


def test_a_commit_of_another_run_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with with_id(name):
            run(tmp_path / name)
    shutil.copy(tmp_path / "two" / "commit.json", tmp_path / "one" / "commit.json")
    with pytest.raises(RunError) as error:
        run(tmp_path / "one", resume=True)
    assert str(error.value) == (
        f"{tmp_path / 'one' / 'commit.json'} is of the run two, but run.json of the run one. Restore both from the same "
        f"copy."
    )


def test_a_store_of_another_round_of_the_same_run_is_refused(tmp_path: Path) -> None:
    """Server, commit and records of round 2 beside the store of round 4, and the other way round."""
    early, late = tmp_path / "early", tmp_path / "late"
    stopped(early, 2)
    run(late)
    for folder, other in ((early, late), (late, early)):
        mixed = tmp_path / f"mixed-{folder.name}"
        shutil.copytree(folder, mixed)
        shutil.copy(other / "private" / "store.db", mixed / "private" / "store.db")
        before = files(mixed)
        with pytest.raises(StoreError) as error:
            run(mixed, resume=True)
        assert str(error.value) == (
            f"The private store {mixed / 'private'} stands at round {4 if folder == early else 2}, the run at round "
            f"{2 if folder == early else 4}; restore both from the same copy."
        )
        assert files(mixed) == before


def test_a_run_restored_from_the_round_before_its_store_goes_on_to_the_same_bits(
    tmp_path: Path, whole: dict[str, bytes]
) -> None:
    """The store can take one round back, whoever asks for it."""
    early, late = tmp_path / "early", tmp_path / "late"
    stopped(early, 3)
    run(late)
    shutil.copy(late / "private" / "store.db", early / "private" / "store.db")
    run(early, resume=True)
    assert lasting(early) == whole


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

    def meddled(self: RunDirectory, round: int, *arguments: Any) -> None:
        if round == 3:
            content = path.read_bytes()
            path.unlink()
            if how != "gone":
                path.write_bytes(content[:-9] if how == "cut" else content + b"{}\n")
        commit(self, round, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunDirectory, "commit", meddled)
        with pytest.raises(RunError) as error:
            run(out)
    assert f"{path} was changed while the run went on: wanted " in str(error.value)
    assert str(error.value).endswith("Restore the run from a copy, then resume.")
    assert json.loads((out / "commit.json").read_text())["round"] == 2


class TestLength:
    """A run may be given another number of rounds, where nothing but its length differs."""

    @pytest.mark.parametrize("after", [None, 3])
    def test_a_run_goes_on_to_more_rounds(self, tmp_path: Path, after: int | None) -> None:
        out = tmp_path / "run"
        run(out, evaluate_every=1) if after is None else stopped(out, after, evaluate_every=1)
        done = run(
            out, rounds=7, resume=True, evaluate_every=1, config_text="new = 1\n", config={"rounds": 7}
        )
        assert done.round == 7
        run(tmp_path / "other", rounds=7, evaluate_every=1, config_text="new = 1\n")
        assert lasting(out) == lasting(tmp_path / "other")
        info = json.loads((out / "run.json").read_text())
        assert (info["rounds"], info["identity"]["rounds"], info["status"]) == (7, 7, "finished")
        assert (info["config"], info["config_text"]) == ({"rounds": 7}, "new = 1\n")
        assert run(out, rounds=7, resume=True, evaluate_every=1).history == done.history

    def test_or_to_fewer_but_not_to_fewer_than_it_has(self, tmp_path: Path) -> None:
        out = tmp_path / "run"
        stopped(out, 2, evaluate_every=1)
        shutil.copytree(out, tmp_path / "copy")
        run(tmp_path / "copy", rounds=3, resume=True, evaluate_every=1)
        run(tmp_path / "other", rounds=3, evaluate_every=1)
        assert lasting(tmp_path / "copy") == lasting(tmp_path / "other")
        before = files(out)
        with pytest.raises(RunError) as error:
            run(out, rounds=1, resume=True, evaluate_every=1)
        assert str(error.value) == (
            f"{out} has finished 2 rounds already, so it cannot end after 1. Name at least 2, or another folder."
        )
        assert files(out) == before

    def test_a_schedule_that_follows_the_length_forbids_it(self, tmp_path: Path) -> None:
        out = tmp_path / "run"
        method = methods.furl("user", local=Phase(batch_size=4, optimizer=sgd(0.1, schedule="cosine")))
        run(out, method=method)
        before = files(out)
        with pytest.raises(RunError) as error:
            run(out, rounds=6, resume=True, method=method)
        message = str(error.value)
        assert message.startswith(
            f"{out} is a run of 4 rounds and cannot be continued to 6: the learning rate of "
        )
        assert "optimizer (cosine)" in message
        assert message.endswith(
            " follows the run's length, so its rounds so far would have been others. Only a constant schedule can be "
            "continued; name another folder."
        )
        assert files(out) == before

    def test_a_damaged_folder_is_not_given_another_length(self, tmp_path: Path) -> None:
        out = tmp_path / "run"
        run(out)
        damage(out / "private" / "store.db", "cut")
        before = files(out)
        with pytest.raises(StoreError):
            run(out, rounds=9, resume=True)
        assert files(out) == before


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
    with pytest.raises(RunError) as error:
        run(out, resume=True)
    assert (
        str(error.value) == f"{path} does not hold what the run needs: {fault}. Restore the run from a copy."
    )


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
    with pytest.raises(RunError, match=r"server-4\.safetensors is damaged: .*Restore the run from a copy\.$"):
        run(out, resume=True)


def test_what_was_written_after_the_last_commit_is_dropped(tmp_path: Path, whole: dict[str, bytes]) -> None:
    out = tmp_path / "run"
    stopped(out, 2)
    with open(out / "records.jsonl", "a") as file:
        file.write('{"round": 3, "torn')
    (out / "server-3.safetensors").write_bytes(b"half a file")
    (out / "server-3.safetensors.part").write_bytes(b"half a file")
    (out / "examples-3.safetensors").write_bytes(b"half a file")
    (out / "commit.json.part").write_bytes(b"{")
    run(out, resume=True)
    (out / "commit.json.part").unlink(missing_ok=True)
    assert lasting(out) == whole


def test_a_start_that_was_killed_can_be_started_again(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "lock").write_bytes(b"")
    (out / "run.json.part").write_bytes(b'{"na')
    run(out, rounds=1)


def failing(call: str, number: int, error: BaseException) -> Callable[..., Any]:
    """Return ``os.<call>``, but its ``number``-th call fails."""
    real, count = getattr(os, call), 0

    def maybe(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            raise error
        return real(*arguments, **options)

    return maybe


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_fills_up_at_any_instant_loses_nothing(
    tmp_path: Path, whole: dict[str, bytes], call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every flush (rename) of rounds 1 and 2 fails once; afterwards the run resumes to the same bits."""
    messages = []
    for number in range(2, 22 if call == "fsync" else 8):
        out = tmp_path / str(number)
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing(call, number, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
            with pytest.raises(FedkeepError) as error:
                run(out)
        messages.append(str(error.value))
        run(out, resume=(out / "run.json").exists())
        assert lasting(out) == whole
    assert all("No space left on device" in m for m in messages)
    assert all("Nothing was lost" in m and "resume" in m for m in messages)
    assert {m.split(":")[0].split("/")[-1] for m in messages} >= {"store.db", "commit.json"}


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("statement", ["BEGIN IMMEDIATE", "COMMIT"])
def test_a_disk_that_fills_up_while_private_states_are_written_loses_nothing(
    tmp_path: Path, whole: dict[str, bytes], number: int, statement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, query, count = tmp_path / "run", Database.query, 0

    def full(self: Database, text: str, *rest: Any) -> sqlite3.Cursor:
        nonlocal count
        count += text == "BEGIN IMMEDIATE"
        if text == statement and count == number:
            raise sqlite3.OperationalError("database or disk is full")
        return query(self, text, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Database, "query", full)
        with pytest.raises(RunError) as error:
            run(out)
    assert str(error.value) == (
        f"Cannot write {out / 'private' / 'store.db'}: database or disk is full. Nothing was lost: the last finished "
        f"round is kept. Free some space or check the rights, then resume."
    )
    run(out, resume=True)
    assert lasting(out) == whole


@pytest.mark.parametrize("number", [3, 8, 14])
def test_an_interrupt_inside_a_commit_loses_nothing(
    tmp_path: Path, whole: dict[str, bytes], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing("fsync", number, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            run(out)
    run(out, resume=True)
    assert lasting(out) == whole


class Interrupted(Logits):
    """Its ``left``-th forward is interrupted, as by Ctrl-C."""

    left = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).left -= 1
        if type(self).left == 0:
            raise KeyboardInterrupt
        return super().forward(x)


@pytest.mark.parametrize("left", [1, 5, 9, 14])
def test_an_interrupt_inside_a_round_leaves_the_last_commit(
    tmp_path: Path, whole: dict[str, bytes], left: int
) -> None:
    out = tmp_path / "run"
    Interrupted.left = left
    with pytest.raises(KeyboardInterrupt):
        run(out, model=Interrupted())
    Interrupted.left = 0
    committed = len(list(read_records(out / "records.jsonl"))) if (out / "records.jsonl").exists() else 0
    round = json.loads((out / "commit.json").read_text())["round"] if (out / "commit.json").exists() else 0
    assert (committed == 0) == (round == 0)
    run(out, resume=True, model=Interrupted())  # the folder is free again
    assert {n: v for n, v in lasting(out).items() if n != "run.json"} == whole


@pytest.mark.skipif(os.name != "posix", reason="files are told apart by inode")
def test_all_that_a_commit_names_is_flushed_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What kill -9 cannot show, a loss of power would. Private states are flushed by SQLite: see tests/store."""
    out = tmp_path / "run"
    sync, replace = os.fsync, os.replace
    flushed: dict[int, int] = {}  # inode → its change time when it was flushed
    commits = 0

    def fsync(handle: int) -> None:
        sync(handle)
        stat = os.fstat(handle)
        flushed[stat.st_ino] = stat.st_mtime_ns

    def rename(source: Path, target: Path) -> None:
        nonlocal commits
        if target.name == "commit.json":
            commits += 1
            copy = shutil.copytree(out / "private", tmp_path / f"private-{commits}")
            with closing(sqlite3.connect(copy / "store.db")) as sql:
                assert sql.execute("SELECT max(round) FROM rounds").fetchone() == (commits,)
            named = ["records.jsonl", "timings.jsonl", f"server-{commits}.safetensors"]
            named += [p.name for p in out.glob("examples-*.safetensors")]
            for name in [*named, source.relative_to(out)]:
                stat = (out / name).stat()
                assert flushed.get(stat.st_ino) == stat.st_mtime_ns, name
        replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    run(out)
    assert commits == 4


def test_client_ids_with_path_characters_write_nothing_outside(tmp_path: Path) -> None:
    ids = ("../../evil", "/etc/passwd", "CON", "a/b\\c", "..", " ", "ü", "x" * 200)
    data = classes(counts=(3, 4, 5, 2, 3, 3, 3, 3), kind="f4", ids=ids)
    out = tmp_path / "deep" / "run"
    done = run(out, data=data, rounds=4)
    assert [p.name for p in tmp_path.iterdir()] == ["deep"]
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["run"]
    assert not any("evil" in n or "CON" in n for n in files(out))
    assert {r.client for r in done.history if r.client} == set(ids)
    assert run(out, data=data, rounds=4, resume=True).history == done.history
    assert done.parameters("../../evil").keys() == {"user", "linear.weight", "linear.bias"}


def test_the_run_is_free_after_an_error(tmp_path: Path) -> None:
    out = tmp_path / "run"
    stopped(out, 1)
    with pytest.raises(RunError):
        run(out, resume=True, seed=7)
    run(out, resume=True)
    assert isinstance(Record(0, 0.0, "", None, "", 0.0, 0), Record)
    assert dataclasses.is_dataclass(Record)
