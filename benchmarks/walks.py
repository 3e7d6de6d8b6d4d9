"""How far one thing walks through the house: walks of this commit and of another, counted by tracing.

    python -m benchmarks.walks CHECKOUT

A walk is what runs between two doors that a user has: a data set from ``simulate`` to the first gradient, a rate from a
configuration's file to it, a test example's result from where it is judged to the page, and a client's upload from its
device's training to the server's sum. A **stay** is the first
entry of a function of ``src/fedkeep`` that is handed the thing, or what holds it; a **room** is a file; a **return**
enters a room that was left before; a **climb** enters a room on a higher floor than the one before (floors as the import
contracts name them). "All functions" counts those that are handed something else, too.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType, MappingProxyType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RATE = 0.0371
"""A learning rate that is nothing else."""
CONFIGURATION = f"""
[data]
reader = "many_user_text"
users = 6
examples = 30
classes = 5
seed = 0
[model]
kind = "stranger:Reader"
[method]
kind = "fedavg"
batch_size = 4
[method.optimizer]
learning_rate = {RATE}
[run]
cohort = 2
rounds = 1
engine = "sequential"
"""


def floors(checkout: Path) -> dict[str, int]:
    """Return each package's floor, 0 the highest, by the import contracts."""
    settings = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    return {
        room.strip(): floor
        for floor, layer in enumerate(layers)
        for room in layer.replace(":", "|").split("|")
    }


class Walk:
    """Records the functions of a package that are entered, in order, until it is ended."""

    def __init__(self, source: Path, carries: Callable[[Any], bool]) -> None:
        self.source, self.carries = str(source) + os.sep, carries
        self.entered: list[tuple[str, str, bool]] = []
        self.open, self.known = True, set[str]()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Take note of a call."""
        code = frame.f_code
        if self.open and event == "call" and code.co_filename.startswith(self.source) and named(code):
            room = code.co_filename.removeprefix(self.source)
            function = f"{room}:{code.co_qualname}"
            count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
            with_it = function not in self.known and any(
                self.carries(frame.f_locals.get(name)) for name in code.co_varnames[:count]
            )
            if with_it:
                self.known.add(function)
            self.entered.append((room, function, with_it))

    def run(self, train: Callable[[], Any]) -> None:
        """Trace a call."""
        sys.setprofile(self)
        try:
            train()
        finally:
            sys.setprofile(None)

    def counted(self, floor: dict[str, int], everything: bool = False) -> dict[str, int]:
        """Return stays, rooms, returns and climbs."""
        stays: list[tuple[str, str]] = []
        known: set[str] = set()
        for room, function, with_it in self.entered:
            if function not in known and (with_it or everything):
                known.add(function)
                stays.append((room, function))
        rooms = [room for room, _ in stays]
        changes = [(a, b) for a, b in itertools.pairwise(rooms) if a != b]
        left: set[str] = set()
        returns = climbs = 0
        for a, b in changes:
            left.add(a)
            returns += b in left
            climbs += floor.get(Path(b).parts[0], 0) < floor.get(Path(a).parts[0], 0)
        return {"stays": len(stays), "rooms": len(set(rooms)), "returns": returns, "climbs": climbs}


def holds(thing: Any, wanted: Callable[[Any], bool], depth: int = 3) -> bool:
    """Return whether an object is what is wanted, or an attribute or item of it is, down to a depth."""
    if wanted(thing):
        return True
    if depth == 0 or thing is None or isinstance(thing, str | bytes | int | float | type):
        return False
    inner: list[Any] = []
    if isinstance(thing, dict | MappingProxyType):
        inner = list(thing.values())[:30]
    elif isinstance(thing, tuple | list):
        inner = list(thing)[:30]
    elif type(thing).__module__.startswith("fedkeep"):
        inner = list(getattr(thing, "__dict__", {}).values())
        inner += [getattr(thing, name, None) for name in getattr(type(thing), "__slots__", ())]
    return any(holds(one, wanted, depth - 1) for one in inner)


def named(code: CodeType) -> bool:
    """Return whether code is a function with a name, neither a lambda nor a comprehension nor a module."""
    return not code.co_name.startswith("<")


def walks(checkout: Path) -> dict[str, dict[str, int]]:
    """Return the walks of the library that is imported, which is the checkout's."""
    import torch
    from torch import nn

    import fedkeep

    source, floor = checkout / "src" / "fedkeep", floors(checkout)
    now: list[Walk] = []

    class Door(torch.autograd.Function):
        """The identity, whose gradient ends the walk."""

        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(context: Any, *gradients: Any) -> Any:
            for walk in now:
                walk.open = False
            return gradients[0]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.user = nn.Linear(4, 3), nn.Parameter(torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Door.apply(self.shared(x) + self.user)

    class Reader(nn.Module):
        def __init__(self, vocabulary: int, classes: int) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(vocabulary, 4), nn.Linear(4, classes)

        def forward(self, text: torch.Tensor) -> torch.Tensor:
            return Door.apply(self.head(self.table(text).mean(1)))

    sys.modules["stranger"] = stranger = type(sys)("stranger")
    for model in (Model, Reader):
        model.__module__, model.__qualname__ = "stranger", model.__name__
        setattr(stranger, model.__name__, model)
    data = fedkeep.data.toy(users=6, examples=30, features=4, classes=3)
    local = fedkeep.Phase(optimizer=fedkeep.sgd(RATE), batch_size=32)
    method = fedkeep.methods.furl("user", local=local)

    def simulated() -> None:
        fedkeep.simulate(Model(), method, data, rounds=1, cohort=2, engine="sequential", progress=False)

    def command(*words: str) -> None:
        from fedkeep.cli import main as fedkeep_command

        sys.argv = ["fedkeep", *words]
        try:
            fedkeep_command()
        except SystemExit as stop:
            if stop.code:
                raise RuntimeError(f"fedkeep {words[0]} failed") from stop

    def configured(page: bool = False) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run.toml"
            path.write_text(CONFIGURATION, encoding="utf-8")
            command("run", str(path), "--out", f"{folder}/run")
            if page:
                command("report", f"{folder}/run")

    def result(x: Any) -> bool:
        return type(x).__name__ in ("Judged", "Examples") or getattr(x, "split", "") == "test"

    def over_machines() -> None:
        from tests.remote.federations import Devices
        from tests.remote.test_server import CASE, served

        with tempfile.TemporaryDirectory() as folder:
            devices = Devices(CASE, Path(folder), 1)
            served(devices, Path(folder), rounds=1, cohort=1, evaluate_every=0)
            devices.close()

    def upload(x: Any) -> bool:
        if type(x).__name__ == "Upload":
            made.append(x)
        forms = ("Upload", "Answer", "ClientAnswer", "_Answer", "Answers", "Packet", "Message")
        return bool(made) and (type(x).__name__ in forms or (isinstance(x, bytes) and len(x) > 64))

    made: list[Any] = []
    doors: dict[str, tuple[Callable[[], None], Callable[[Any], bool], bool]] = {
        "a data set, from simulate to the first gradient": (simulated, lambda x: x is data, True),
        "a rate, from its file to the optimiser": (
            configured,
            lambda x: isinstance(x, float) and x == RATE,
            True,
        ),
        "a test example's result, from where it is judged to the page": (
            lambda: configured(page=True),
            result,
            False,
        ),
        "an upload, from its device's training to the server's sum": (over_machines, upload, False),
    }
    found = {}
    for name, (train, wanted, ends) in doors.items():
        train()  # what is done once a process is not of the walk
        made.clear()
        walk = Walk(source, lambda x, w=wanted: holds(x, w))
        now[:] = [walk] if ends else []
        walk.run(train)
        found[name] = walk.counted(floor)
        if ends:
            found[f"{name}, all functions"] = walk.counted(floor, everything=True)
        if "FEDKEEP_WALKS" in os.environ:
            met = (function for _, function, with_it in walk.entered if with_it)
            print(name, *dict.fromkeys(met), sep="\n", file=sys.stderr)
    return found


def of(checkout: Path) -> dict[str, Any]:
    """Count a checkout's walks in a process of its own."""
    paths = [str(checkout / "src"), str(checkout / "papers" / "src"), str(checkout)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "walks.json"
        words = [sys.executable, "-P", str(Path(__file__).resolve()), str(checkout), "--write", str(path)]
        subprocess.run(words, env=environment, cwd=checkout, check=True)
        return dict(json.loads(path.read_text(encoding="utf-8")))


def main(words: Sequence[str] | None = None) -> None:
    """Print the walks of the other commit beside those of this one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.walks", description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.write:
        given.write.write_text(json.dumps(walks(given.checkout)), encoding="utf-8")
        return
    before, after = of(given.checkout.resolve()), of(ROOT)
    for walk, counts in after.items():
        print(walk)
        for what, count in counts.items():
            print(f"  {what}: {before[walk][what]} → {count}")


if __name__ == "__main__":
    main()
