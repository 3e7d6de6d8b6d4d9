"""A run's folder: what it holds, and how a run is resumed, refused or given another length."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedkeep import Optimize, Phase, WeightedMean, adam, methods, sgd
from fedkeep.core.errors import RunError, StoreError
from fedkeep.core.files import read_tensors
from fedkeep.core.records import read_records
from fedkeep.nn import Linear
from fedkeep.version import NUMERICS
from tests.experiments.runs import DATA, METHOD, damage, refused, run, stopped
from tests.refusals import raises
from tests.tiny import Logits, classes, everyone, files, lasting, same_bits

pytestmark = pytest.mark.usefixtures("same_id")


def test_what_a_folder_holds(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "run"
    done = run(out, name="mine", config={"seed": 5}, config_text="seed = 5\n")
    names = set(files(out))
    assert names == {
        "lock",
        "run.json",
        "config.toml",
        "records.jsonl",
        "timings.jsonl",
        "ledger.jsonl",
        "commit.json",
        "server-2.safetensors",
        "server-4.safetensors",
        "examples-2.safetensors",
        "seen.safetensors",
        "private/store.db",
    }
    assert (out / "config.toml").read_text() == "seed = 5\n"
    info = json.loads((out / "run.json").read_text())
    assert (info["name"], info["method"], info["seed"], info["status"]) == ("mine", "furl", 5, "finished")
    assert (info["engine"], info["centralised"], info["rounds"], info["cohort"]) == (
        "sequential",
        False,
        4,
        2,
    )
    assert (info["rounds_per_epoch"], info["metric"], info["config"]) == (2, "accuracy", {"seed": 5})
    assert info["bytes_up"] == info["bytes_down"] == 48
    assert [(r["name"], r["half"], r["bytes"]) for r in info["split_table"]] == [
        ("user", "private", 12),
        ("linear.weight", "federated", 36),
        ("linear.bias", "federated", 12),
    ]
    assert info["data"]["counts"] == {"train": 24, "valid": 8, "test": 12}
    assert info["data"]["fingerprint"] == DATA.fingerprint()
    assert {"python", "torch", "fedkeep", "platform", "machine", "cores", "commit"} <= info[
        "environment"
    ].keys()
    assert list(read_records(out / "records.jsonl")) == done.history
    server = read_tensors(out / "server-4.safetensors")
    assert same_bits(
        {n.removeprefix("params/"): v for n, v in server.items() if n.startswith("params/")}, done.last.server
    )


def test_records_hold_what_is_reproducible_and_timings_the_rest(tmp_path: Path) -> None:
    for name in ("a", "b"):
        run(tmp_path / name)
    assert (tmp_path / "a" / "records.jsonl").read_bytes() == (tmp_path / "b" / "records.jsonl").read_bytes()
    assert {(r.split, r.metric) for r in read_records(tmp_path / "a" / "timings.jsonl")} == {
        ("time", "seconds"),
        ("time", "aggregate_seconds"),
        ("time", "judge_seconds"),
    }
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
    assert done.last.round == 4
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


def test_a_new_run_is_told_how_far_the_one_in_its_folder_is(tmp_path: Path) -> None:
    stopped(tmp_path / "half", 2)
    with raises(
        RunError, said="not finished; it stands after round 2 of 4. resume=True", folder=tmp_path / "half"
    ):
        run(tmp_path / "half")
    (tmp_path / "half" / "run.json").write_text("{")
    with raises(RunError, said="cannot be read", folder=tmp_path / "half"):
        run(tmp_path / "half")


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(out, rounds=1)
    with refused(out, RunError, f"{out} already exists and is not empty."):
        run(out, rounds=1)
    other = tmp_path / "file"
    other.write_text("mine")
    with pytest.raises(RunError, match="already exists and is not empty"):
        run(other)
    assert other.read_text() == "mine"
    with raises(RunError, said="Not a directory. Name another: --out FOLDER,", why="Not a directory"):
        run(other / "below")
    (tmp_path / "empty").mkdir()
    run(tmp_path / "empty", rounds=1)


def test_nothing_to_resume(tmp_path: Path) -> None:
    for out in (tmp_path / "none", tmp_path):
        with raises(RunError, said=f"There is no run in {out}: "):
            run(out, resume=True)
    assert files(tmp_path) == {}


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"seed": 6}, "seed: 5 in the run, 6 now"),
    "rounds": ({"rounds": 9, "cohort": 3}, "cohort: 2 in the run, 3 now\nUse"),
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
    "centralised": ({"centralised": True}, "centralised: False in the run, True now"),
    "hold out": ({"hold_out": 0.25}, "hold_out: 0.0 in the run, 0.25 now"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_run_of_another_configuration_is_refused_and_the_difference_named(
    tmp_path: Path, name: str
) -> None:
    changes, line = OTHERS[name]
    out = tmp_path / "run"
    stopped(out, 2)
    with refused(out, said=f"\n  {line}"):
        run(out, resume=True, **changes)


def test_a_run_of_other_numerics_does_not_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    stopped(out, 2)
    assert json.loads((out / "run.json").read_text())["numerics"] == NUMERICS
    whole = run(tmp_path / "whole")
    monkeypatch.setattr("fedkeep.experiments.run_directory.NUMERICS", NUMERICS + 1)
    with refused(out, RunError, f"(NUMERICS {NUMERICS} there, {NUMERICS + 1} here)"):
        run(out, resume=True)
    assert run(tmp_path / "whole", resume=True).history == whole.history  # finished: it is only read
    with pytest.raises(RunError, match="was begun by a fedkeep whose numbers may differ"):
        run(tmp_path / "whole", resume=True, rounds=6)


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


class TestLength:
    """A run may be given another number of rounds, where nothing but its length differs."""

    @pytest.mark.parametrize("after", [None, 3])
    def test_a_run_goes_on_to_more_rounds(self, tmp_path: Path, after: int | None) -> None:
        out = tmp_path / "run"
        run(out, evaluate_every=1) if after is None else stopped(out, after, evaluate_every=1)
        done = run(
            out, rounds=7, resume=True, evaluate_every=1, config_text="new = 1\n", config={"rounds": 7}
        )
        assert done.last.round == 7
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
        with refused(
            out, RunError, "has finished 2 rounds already, so it cannot end after 1. Name at least 2"
        ):
            run(out, rounds=1, resume=True, evaluate_every=1)

    @pytest.mark.parametrize(
        ("after", "settings", "goes_on"),
        [
            (None, {"evaluate_every": 3}, False),
            (None, {"evaluate_every": 2}, True),
            (None, {"evaluate_every": 0, "evaluate_shared": True}, True),
            (None, {"evaluate_every": 2, "evaluate_shared": True}, True),
            (None, {"evaluate_every": 3, "evaluate_shared": True}, False),
            (3, {"evaluate_every": 3, "evaluate_shared": True}, True),
        ],
    )
    def test_a_last_round_that_is_judged_otherwise_forbids_it(
        self, tmp_path: Path, after: int | None, settings: dict[str, Any], goes_on: bool
    ) -> None:
        out = tmp_path / "run"
        run(out, **settings) if after is None else stopped(out, after, **settings)
        before = files(out)
        if goes_on:
            run(out, rounds=7, resume=True, **settings)
            run(tmp_path / "other", rounds=7, **settings)
            assert lasting(out) == lasting(tmp_path / "other")
            return
        with raises(RunError, before=4, round=4, rounds=7):
            run(out, rounds=7, resume=True, **settings)
        assert files(out) == before

    def test_nor_can_it_end_with_a_round_that_was_not_judged(self, tmp_path: Path) -> None:
        out = tmp_path / "run"
        stopped(out, 3, evaluate_every=2)
        with pytest.raises(RunError, match=r"with evaluate_every = 2, a.*3.*3"):
            run(out, rounds=3, resume=True, evaluate_every=2)
        assert run(out, resume=True, evaluate_every=2).last.round == 4

    def test_a_schedule_that_follows_the_length_forbids_it(self, tmp_path: Path) -> None:
        out = tmp_path / "run"
        method = methods.furl("user", local=Phase(batch_size=4, optimizer=sgd(0.1, schedule="cosine")))
        run(out, method=method)
        with refused(out, said="optimizer (cosine) follows the run's length"):
            run(out, rounds=6, resume=True, method=method)

    def test_a_damaged_folder_is_not_given_another_length(self, tmp_path: Path) -> None:
        out = tmp_path / "run"
        run(out)
        damage(out / "private" / "store.db", "cut")
        with refused(out, StoreError):
            run(out, rounds=9, resume=True)


def test_another_activation_of_our_layers_is_another_model(tmp_path: Path) -> None:
    class Net(Logits):
        def __init__(self, relu: bool) -> None:
            super().__init__()
            self.front = Linear(3, 3, relu=relu)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.front(x))

    torch.manual_seed(0)
    run(tmp_path / "run", model=Net(True), rounds=1)
    torch.manual_seed(0)
    with pytest.raises(RunError, match="model.layers"):
        run(tmp_path / "run", model=Net(False), rounds=1, resume=True)


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
