"""Claim: no damage to a run's folder gives a wrong result without a word, a traceback or a hang.

    python -m benchmarks.fault_folders [--tried N] [--seed S]

Three kinds of fault, each against small runs that stand in a folder of their own:

- **mutations** of every file of a run's folder: a bit flipped, bytes zeroed, the end cut off, an older version of the
  file, the same file of another run, the file removed. The run may be finished, or stopped after some rounds as by a
  kill; it is then loaded, reported or resumed. *Silent* means that this went through and any number, state or record is
  not that of the intact folder. What is left out with a note that says so is not silent.
- **forged states**: the server's or a client's state with other names, shapes or dtypes or with a NaN, and every
  checksum rewritten to fit. *Silent* means that it was accepted.
- **kills** with SIGKILL at a random instant, then ``resume``, over all engines, until the run is finished: the result
  must have the bits of a run that was never stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load, save
from torch import Tensor

from benchmarks.fault_runs import ROUNDS, config, counted, ended, kills, short_log
from benchmarks.measure import write
from fedkeep.core.sealed import seal
from fedkeep.experiments.analyses import write_analyses
from fedkeep.experiments.build import run_config
from fedkeep.experiments.load import load_run
from fedkeep.experiments.simulate import Run
from fedkeep.report.runs import read_run
from fedkeep.store import SqliteStore, VersionLedger

STOPPED = 4
MUTATIONS = ("flip", "zero", "truncate", "older", "swapped", "removed")


def classes(tried: int = 3000, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield how each class of faults ended: ``{name, tried, silent, crashed, hung}``.

    Args:
        tried: how many mutations; forged states are 2 in 15 of that, kills 1 in 30.
        seed: of what is drawn.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    where = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    try:
        with tempfile.TemporaryDirectory(dir=where) as folder, short_log():
            scenes = [Scene(Path(folder) / kind, kind) for kind in KINDS]
            yield from mutations(scenes, tried, seed)
            yield forged(scenes, max(1, tried * 2 // 15), seed)
            yield kills(Path(folder) / "kills", max(1, tried // 30), seed)
    finally:
        torch.set_num_threads(before)


KINDS = ("private", "federated", "centralised")


class Scene:
    """Runs of one kind: a finished one, a stopped one, older copies of both, and another run's.

    ``intact`` is the finished folder's result; a stopped run that is resumed must reach it too.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind
        self.versions = [folder / f"after-{round}" for round in range(1, ROUNDS + 1)]
        commits = patch_commits(self.versions, folder / "finished")
        with commits:
            self.run(folder / "finished")
        other = run_config(config(kind, seed=7), out=folder / "other", progress=False)
        for name, number in (("finished", 0.25), ("other", 0.5)):
            write_analyses(
                folder / name, {"numbers": {"columns": ["x", "round"], "rows": [[number, other.round]]}}
            )
        self.work = folder / "work"
        self.targets = {"finished": folder / "finished", "stopped": self.versions[STOPPED - 1]}
        self.intact: dict[tuple[str, str], Any] = {}
        for target, action in PAIRS:
            self.fresh(target)
            self.intact[target, action] = ACTIONS[action](self)
        self.final = self.intact["finished", "load"]

    def run(self, out: Path, resume: bool = False) -> Run:
        """Run, or go on."""
        return run_config(config(self.kind), out=out, resume=resume, progress=False)

    def fresh(self, target: str) -> Path:
        """Copy a folder to where it is harmed."""
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.targets[target], self.work)
        return self.work


@contextlib.contextmanager
def patch_commits(versions: list[Path], run: Path) -> Iterator[None]:
    """Keep a copy of the run's folder after each commit."""
    from fedkeep.experiments.run_directory import RunDirectory

    commit = RunDirectory.commit

    def keeping(self: RunDirectory, round: int, *arguments: Any, **named: Any) -> None:
        commit(self, round, *arguments, **named)
        shutil.copytree(run, versions[round - 1])

    with patch.object(RunDirectory, "commit", keeping):
        yield


def state_of(run: Run) -> dict[str, Any]:
    """Return all that a run holds: server, private values of everybody, who was seen, history, metrics, examples."""
    everybody = range(len(run.data))
    return {
        "round": run.round,
        "server": bits(run.server),
        "private": bits(run.private.read(everybody)),
        "seen": run.private.seen(everybody),
        "history": sorted(map(repr, run.history)),
        "metrics": repr(run.evaluate("test")),
        "examples": None if run.examples is None else (run.examples.round, bits(run.examples.tensors)),
    }


def bits(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    """Return the bytes of tensors by name."""
    return {
        n: t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for n, t in sorted(tensors.items())
    }


def loaded(scene: Scene) -> Any:
    """Load the run, as ``fedkeep evaluate`` does."""
    return state_of(load_run(scene.work))


def reported(scene: Scene) -> Any:
    """Read the run, as ``fedkeep report`` does."""
    files = read_run(scene.work)
    left_out = ("status", "engine_reason", "analyses")
    return {
        "info": {k: json.dumps(v, sort_keys=True) for k, v in files.info.items() if k not in left_out},
        "records": sorted(map(repr, files.records)),
        "analyses": json.dumps(files.analyses, sort_keys=True),
        "notes": files.notes,
    }


def resumed(scene: Scene) -> Any:
    """Go on with the run, to its end."""
    return state_of(scene.run(scene.work, resume=True))


ACTIONS: dict[str, Callable[[Scene], Any]] = {"load": loaded, "report": reported, "resume": resumed}
PAIRS = [(target, action) for target in ("finished", "stopped") for action in ACTIONS]


def same(found: Any, intact: Any) -> bool:
    """Tell whether a result is the intact folder's; a report that leaves something out must say so in a note."""
    if found == intact:
        return True
    if "notes" not in found or set(found["notes"]) <= set(intact["notes"]):
        return False
    return found["info"].items() <= intact["info"].items() and set(found["records"]) <= set(intact["records"])


def goes_right(scene: Scene, target: str, action: str) -> bool:
    """Do something with the harmed folder; tell whether the result is the intact one's."""
    return same(ACTIONS[action](scene), scene.intact[target, action])


def mutations(scenes: list[Scene], tried: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield a line for each way to harm a file."""
    draw = random.Random(seed)  # noqa: S311
    for number, how in enumerate(MUTATIONS):
        ends: Counter[str] = Counter()
        while ends.total() < tried // len(MUTATIONS) + (number < tried % len(MUTATIONS)):
            scene, (target, action) = draw.choice(scenes), draw.choice(PAIRS)
            harmed = harm(scene, scene.fresh(target), how, draw)
            if harmed is None:
                continue
            end = ended(partial(goes_right, scene, target, action))
            if end in ("silent", "crashed", "hung"):
                print(f"{end}: {how} of {harmed}, {scene.kind}, {target}, {action}", file=sys.stderr)
            ends[end] += 1
        yield counted(f"run folders: {how}", ends)


def harm(scene: Scene, folder: Path, how: str, draw: random.Random) -> str | None:
    """Harm a file of the folder; return what was done, or None where it would change nothing."""
    names = [p.relative_to(folder) for p in sorted(folder.rglob("*")) if p.is_file()]
    name = draw.choice(names)
    path = folder / name
    content = bytearray(path.read_bytes())
    before = bytes(content)
    if how in ("older", "swapped"):
        source = (
            scene.folder / "other" if how == "swapped" else draw.choice(scene.versions[:STOPPED])
        ) / name
        if not source.is_file() and name.name.startswith("server-"):
            source = next(source.parent.glob("server-*"))
        if not source.is_file() or source.read_bytes() == before:
            return None
        shutil.copyfile(source, path)
        return f"{name} from {source.parent.name}"
    if how == "removed":
        path.unlink()
        return str(name)
    if not content:
        return None
    at = draw.randrange(len(content))
    if how == "flip":
        content[at] ^= 1 << draw.randrange(8)
    elif how == "zero":
        end = at + draw.choice((1, 8, 64, 4096))
        content[at:end] = bytes(len(content[at:end]))
    else:
        del content[draw.choice((at, 0, len(content) - 1)) :]
    if bytes(content) == before:
        return None
    path.write_bytes(content)
    return f"{name} at {at} of {len(before)}"


def forged(scenes: list[Scene], tried: int, seed: int) -> dict[str, Any]:
    """Return how forged states with fitting checksums ended."""
    draw = random.Random(seed)  # noqa: S311
    ends: Counter[str] = Counter()
    for _ in range(tried):
        scene, (target, action) = draw.choice(scenes), draw.choice([p for p in PAIRS if p[1] != "report"])
        folder = scene.fresh(target)
        if scene.kind == "private" and draw.random() < 0.25:
            what = forge_private(scene, folder, draw)
        else:
            what = forge_server(folder, draw)

        def accepted(scene: Scene = scene, action: str = action) -> bool:
            ACTIONS[action](scene)
            return False

        end = ended(accepted)
        if end != "refused":
            print(f"{end}: {what}, {scene.kind}, {target}, {action}", file=sys.stderr)
        ends[end] += 1
    return counted("forged states", ends)


def forge_server(folder: Path, draw: random.Random) -> str:
    """Rewrite the server's state with a fault, and let all checksums fit."""
    path = folder / "commit.json"
    commit = json.loads(path.read_text(encoding="utf-8"))
    file = folder / commit["server"]
    tensors = load(file.read_bytes())
    name = draw.choice(sorted(tensors))
    floats = [n for n, t in sorted(tensors.items()) if t.is_floating_point() and t.numel()]
    how = draw.choice(("drop", "add", "rename", "shape", "dtype", "nan", "infinity", "header", "length"))
    content = b""
    if how == "drop":
        del tensors[name]
    elif how == "add":
        tensors[f"{name}.more"] = torch.zeros(2)
    elif how == "rename":
        tensors[name[:-1] + "_"] = tensors.pop(name)
    elif how == "shape":
        tensors[name] = torch.zeros(*tensors[name].shape, 2, dtype=tensors[name].dtype)
    elif how == "dtype":
        tensors[name] = tensors[name].to(torch.float16)
    elif how in ("nan", "infinity"):
        value = tensors[draw.choice(floats)].view(-1)
        value[draw.randrange(len(value))] = torch.nan if how == "nan" else -torch.inf
    elif how == "header":
        content = bytearray(save(tensors))  # type: ignore[assignment]
        content[8 + draw.randrange(40)] = draw.randrange(32)  # type: ignore[index]
    else:
        content = draw.choice((2**62, 2**31, 0, 7)).to_bytes(8, "little") + save(tensors)[8:]
    file.write_bytes(content or save(tensors))
    commit["server_sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    path.write_text(json.dumps(seal(commit)), encoding="utf-8")
    return f"{how} of {name}"


def forge_private(scene: Scene, folder: Path, draw: random.Random) -> str:
    """Let the store itself write values that are not finite, with all of its checksums, as the run's last round."""
    run = load_run(scene.targets["finished"])
    path = folder / "commit.json"
    commit = json.loads(path.read_text(encoding="utf-8"))
    shutil.rmtree(folder / "private")
    store = SqliteStore(folder / "private", run.private.default, run.private.ids, run=commit["run"])
    client = draw.randrange(len(run.data))
    values = run.private.read([client])
    name = draw.choice(sorted(values))
    values[name].view(-1)[draw.randrange(values[name].numel())] = draw.choice((torch.nan, torch.inf))
    with patch.object(SqliteStore, "_check_finite", lambda *_: None):
        ledger = VersionLedger(len(run.private.ids))
        store.stage(client, {n: v[0] for n, v in values.items()}, 1)
        store.begin(ledger.accept([client], [1]))
        store.flush()
    content = ledger.written()
    (folder / "ledger.jsonl").write_bytes(content)
    commit["ledger"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    path.write_text(json.dumps(seal(commit)), encoding="utf-8")
    return f"private {name} of client {client}"


def main(arguments: list[str] | None = None) -> int:
    """Run the campaign, write ``fault-folders.json``, and return 1 if the claim fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tried", type=int, default=3000, help="mutations of run folders")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where to write")
    options = parser.parse_args(arguments)
    began, found = time.monotonic(), []
    for line in classes(options.tried, options.seed):
        print(line, flush=True)
        found.append(line)
    content = {
        "tried": options.tried,
        "seed": options.seed,
        "seconds": round(time.monotonic() - began),
        "classes": found,
    }
    write("fault-folders", content, folder=options.out)
    failed = [line["name"] for line in found if line["silent"] or line["crashed"] or line["hung"]]
    print(f"claims that failed: {', '.join(failed)}" if failed else "every claim holds")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
