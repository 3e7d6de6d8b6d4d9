"""TensorBoard, MLflow and Weights & Biases, read by what reads them: every record once, also where a run went on."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fedkeep.core.records import Record
from fedkeep.experiments.trackers import EndRun, Facts, MLflow, TensorBoard, WandB, flat, label
from tests.experiments.runs import run
from tests.experiments.test_trackers import lines

Points = dict[str, list[tuple[int, float]]]


class EndAt:
    """Ends a run at a round."""

    name = "end"

    def __init__(self, round: int) -> None:
        self.round = round

    def started(self, facts: Facts) -> None:
        pass

    def recorded(self, records: Sequence[Record]) -> None:
        if records[-1].round == self.round:
            raise EndRun

    def finished(self, how: str) -> None:
        pass


def wanted(folder: Path) -> Points:
    found: Points = {}
    for r in lines(folder):
        found.setdefault(label(r), []).append((r.round, r.value))
    return found


def close(found: Points, want: Points, single: bool = False) -> bool:
    """Tell whether two are the same, after rounding to single precision where a store does that."""
    same = found.keys() == want.keys()
    for name in found if same else ():
        same = same and [t for t, _ in found[name]] == [t for t, _ in want[name]]
        pairs = zip(found[name], want[name], strict=True) if same else ()
        same = same and all(math.isclose(a, b, rel_tol=1e-6 if single else 0.0) for (_, a), (_, b) in pairs)
    return same


def test_names_of_records() -> None:
    one = Record(3, 1.0, "test/shared", None, "accuracy", 0.5, 7)
    assert label(one) == "test/shared/accuracy"
    ids = ["a b", "a:b", "a/b", "a%b", "ä~"]
    names = [label(Record(3, 1.0, "test", client, "loss", 0.5, 7)) for client in ids]
    assert names[0] == "clients/a:20b/test/loss"
    assert len(set(names)) == len(ids)
    settings = {"run": {"rounds": 3, "none": None}, "name": "x", "rates": {"a.*": (1, 2)}}
    assert flat(settings) == {"run.rounds": 3, "name": "x", "rates.a.*": [1, 2]}


def scalars(folder: Path) -> Points:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    return {tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_tensorboard_shows_every_record_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    out = tmp_path / "run"
    run(out, trackers=["tensorboard", EndAt(2)])
    assert close(scalars(out / "tensorboard"), wanted(out), single=True)
    mark = json.loads((out / "tracked.json").read_text())
    mark["tensorboard"] = {"records": 1, "timings": 0}  # killed before the mark: all is told once more
    (out / "tracked.json").write_text(json.dumps(mark))
    run(out, resume=True, trackers=["tensorboard"])
    assert max(r.round for r in lines(out)) == 4
    assert close(scalars(out / "tensorboard"), wanted(out), single=True)
    run(tmp_path / "other", trackers=[TensorBoard(tmp_path / "elsewhere")])
    assert close(scalars(tmp_path / "elsewhere"), wanted(tmp_path / "other"), single=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # its own
def test_mlflow_has_every_record_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr("fedkeep.experiments.trackers.MOST", 5)
    out = tmp_path / "runs" / "run"
    run(out, trackers=["mlflow", EndAt(2)], name="Mine")
    client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    (experiment,) = [e for e in client.search_experiments() if e.name == "fedkeep"]

    def read() -> tuple[str, str, Points]:
        (found,) = client.search_runs([experiment.experiment_id])
        assert found.data.params == {"rounds": "4", "seed": "5", "method": "furl"}
        keys = found.data.metrics
        points = {
            key: [(m.step, m.value) for m in client.get_metric_history(found.info.run_id, key)]
            for key in keys
        }
        return found.info.run_name, found.info.status, {k: sorted(v) for k, v in points.items()}

    name, status, points = read()
    assert (name, status) == ("Mine", "KILLED")
    assert close(points, wanted(out))
    mark = json.loads((out / "tracked.json").read_text())
    mark["mlflow"] = {"records": 1, "timings": 0}
    (out / "tracked.json").write_text(json.dumps(mark))
    run(out, resume=True, trackers=[MLflow()], name="Mine")
    name, status, points = read()
    assert status == "FINISHED"
    assert close(points, wanted(out))


def entries(log: bytes) -> Iterator[bytes]:
    """Yield the entries of LevelDB's log format: blocks of 32 KiB, pieces with CRC, length and place in the entry."""
    at, entry = 7, b""  # after ":W&B", a magic number and a version
    assert log[:4] == b":W&B"
    while at + 7 <= len(log):
        if 32768 - at % 32768 < 7:  # padding
            at += 32768 - at % 32768
            continue
        length, place = struct.unpack_from("<HB", log, at + 4)
        entry = (b"" if place in (1, 2) else entry) + log[at + 7 : at + 7 + length]
        at += 7 + length
        if place in (1, 4):  # whole, or the last piece
            yield entry


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wandb_keeps_every_record_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record as Entry

    monkeypatch.delenv("WANDB_MODE", raising=False)
    out = tmp_path / "run"
    run(out, trackers=["wandb", EndAt(2)], name="Mine")
    run(out, resume=True, trackers=[WandB()], name="Mine")
    parts = sorted((out / "wandb").glob("offline-run-*/*.wandb"))
    assert len(parts) == 2
    ids, points = set(), dict[str, list[tuple[int, float]]]()
    for part in parts:
        for content in entries(part.read_bytes()):
            entry = Entry()
            entry.ParseFromString(content)
            if entry.HasField("run"):
                ids.add(entry.run.run_id)
            if entry.HasField("history"):
                row = {i.key or i.nested_key[0]: json.loads(i.value_json) for i in entry.history.item}
                for key, value in row.items():
                    if key != "round" and not key.startswith("_"):
                        points.setdefault(key, []).append((row["round"], value))
    assert ids == {json.loads((out / "run.json").read_text())["run"]}
    assert close({k: sorted(v) for k, v in points.items()}, wanted(out))
