"""What Windows and macOS do otherwise, tried where the tests run: doubles of their file systems, and what they lack.

The workflow ``tests`` runs the whole suite on real ones.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
import pytest

import fedkeep
from fedkeep import FederatedData, methods
from fedkeep.cli.run import _quoted
from fedkeep_papers.kit.results import _links
from tests.commands import call
from tests.experiments.runs import DATA, run, stopped
from tests.tiny import Logits

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the double reads /proc")


def opened() -> set[str]:
    """Return the files that this process holds open or maps."""
    found = {
        os.readlink(f"/proc/self/fd/{n}")
        for n in os.listdir("/proc/self/fd")
        if os.path.islink(f"/proc/self/fd/{n}")
    }
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        found.add(line.partition("/")[1] + line.partition("/")[2])
    return found


@pytest.fixture
def as_windows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Let no file be replaced, renamed or removed while this process has it open, as on Windows; return what was refused."""
    refused = list[str]()

    def guarded(real: Callable[..., Any], places: int) -> Callable[..., Any]:
        def call_of(*paths: Any, **options: Any) -> Any:
            held = opened()
            for path in paths[:places]:
                base = f"/proc/self/fd/{options['dir_fd']}" if options.get("dir_fd") is not None else "."
                whole = os.path.realpath(os.path.join(os.path.realpath(base), os.fspath(path)))
                if whole.startswith(str(tmp_path)) and whole in held:
                    refused.append(whole)
                    raise PermissionError(errno.EACCES, "The process cannot access the file", whole)
            return real(*paths, **options)

        return call_of

    for name, places in (("replace", 2), ("rename", 2), ("unlink", 1), ("remove", 1)):
        monkeypatch.setattr(os, name, guarded(getattr(os, name), places))
    return refused


@LINUX
def test_the_double_refuses_what_is_open(as_windows: list[str], tmp_path: Path) -> None:
    (tmp_path / "new").write_bytes(b"new")
    with open(tmp_path / "old", "wb"), pytest.raises(PermissionError):
        os.replace(tmp_path / "new", tmp_path / "old")
    os.replace(tmp_path / "new", tmp_path / "old")
    assert len(as_windows) == 1


@LINUX
def test_a_run_replaces_no_file_that_it_has_open(as_windows: list[str], tmp_path: Path) -> None:
    DATA.save(tmp_path / "data")
    mapped = FederatedData.load(tmp_path / "data")
    stopped(tmp_path / "run", 2)
    run(tmp_path / "run", resume=True)
    found = run(tmp_path / "other", data=mapped, evaluate_shared=True)
    found.export(tmp_path / "models", found.data.ids[:2])
    fedkeep.load_model(tmp_path / "models", found.data.ids[0], model=Logits())
    assert call("report", str(tmp_path / "run"), "--out", str(tmp_path / "page")).exit_code == 0
    assert as_windows == []


NAMES = ["Ann", "ann", "ANN", "con", "a.", "a", "b/c", r"b\c", "x:y", "\u00fc"]
RESERVED = {"con", "prn", "aux", "nul"}
ILLEGAL = set('<>:"\\|?*')


@pytest.mark.filterwarnings("ignore:Some client")
def test_no_two_files_differ_by_their_case_alone_and_windows_takes_each_name(tmp_path: Path) -> None:
    """Ids of clients, which are anybody's, name no file."""
    rows = np.arange(8 * len(NAMES))
    who = [NAMES[n % len(NAMES)] for n in rows]
    x = np.stack([rows % 5, rows % 3, rows % 7, rows % 2], 1).astype(np.float32)
    data = FederatedData.from_columns(who, {"x": x, "label": rows % 3}).split_per_user()
    found = fedkeep.simulate(
        fedkeep.models.Linear(4, 3), methods.furl("user"), data, rounds=1, out=tmp_path / "run"
    )
    found.export(tmp_path / "models", NAMES)
    data.save(tmp_path / "data")
    places = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")]
    twice = {name: n for name, n in Counter(place.casefold() for place in places).items() if n > 1}
    assert twice == {}
    for part in {part for place in places for part in place.split("/")}:
        assert part.split(".")[0].casefold() not in RESERVED
        assert not ILLEGAL & set(part)
        assert not part.endswith((".", " "))


def test_paths_with_backslashes() -> None:
    assert _quoted(PureWindowsPath(r"C:\my runs\toy-0")) == '"C:/my runs/toy-0"'  # type: ignore[arg-type]


def test_a_figure_on_another_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def relpath(path: Any, start: Any = None) -> str:
        raise ValueError("path is on mount 'D:', start on mount 'C:'")

    monkeypatch.setattr("os.path.relpath", relpath)
    assert _links([tmp_path / "a figure.svg"], tmp_path) == [
        ("a figure", (tmp_path / "a figure.svg").resolve().as_uri())
    ]


LACKING = """
import os, signal, sys

ABSENT = ("fcntl", "resource", "pwd", "grp", "termios")

class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Lacking())
for place, names in ((os, ("memfd_create", "fork", "killpg", "getuid", "sched_getaffinity")), (signal, ("pthread_sigmask",))):
    for name in names:
        if hasattr(place, name):
            delattr(place, name)

import pkgutil
import torch
import fedkeep
from fedkeep.engines import Workers

class Model(fedkeep.models.Linear):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(4, 3)

if __name__ == "__main__":
    for found in pkgutil.walk_packages(fedkeep.__path__, "fedkeep."):
        if not found.name.endswith(("__main__", "_kernels")):
            try:
                __import__(found.name)
            except ModuleNotFoundError as error:  # an extra that is not installed
                if error.name in ABSENT or error.name.startswith("fedkeep"):
                    raise
    import fedkeep.engines.auto as auto, fedkeep.engines.workers.pool as pool
    auto.start_method = pool.start_method = lambda: "spawn"
    data = fedkeep.data.toy(users=4, examples=8, features=4, classes=3)
    one, two = (
        fedkeep.simulate(Model(), fedkeep.methods.furl("user"), data, rounds=1, cohort=4, engine=engine, out=out)
        for engine, out in (("sequential", "one"), ("workers", "two"))
    )
    assert all((one.server[name] == two.server[name]).all() for name in one.server)
    print("done")
"""


def test_without_what_posix_alone_has(tmp_path: Path) -> None:
    """No fcntl, fork, memory without a name, or masks of signals: all modules load, and spawned workers do the same."""
    (tmp_path / "program.py").write_text(LACKING, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout.endswith("done\n"), done.stderr
