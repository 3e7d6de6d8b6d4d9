"""One run on a cluster: the bits of ``sequential``, whatever becomes of the processes that train."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedkeep.core.errors import ConfigError, MethodError, NonFiniteError, RunError, WorkerError
from fedkeep.core.run_files import read_info
from fedkeep.experiments import places
from fedkeep.experiments.build import run_config
from fedkeep.experiments.config import parse_config
from fedkeep.experiments.load import load_run
from fedkeep.experiments.run import Run
from fedkeep.methods import METHODS
from fedkeep.remote import cluster
from fedkeep.remote.cluster import ClusterWorkers, dealt
from tests.refusals import raises

TOY = """
seed = 7
[data]
reader = "toy"
users = 12
examples = 20
[model]
kind = "mlp"
hidden = 6
[method]
kind = "fedavg"
[run]
rounds = 3
cohort = 6
evaluate_every = 1
"""


@pytest.fixture(autouse=True)
def a_process_of_its_own() -> None:
    """A process builds a run once; these tests are many in one."""
    cluster._job.cache_clear()


class Break(nn.Module):
    """Raises, or gives no number, for a client whose first feature says so."""

    def __init__(self, features: int, classes: int, how: str = "raise") -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(features, classes), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "raise" and bool((x[:, 0] > 2.2).any()):
            raise ValueError("an odd example")
        return self.layer(x) / ((x[:, :1] <= 2.2) if self.how == "nan" else 1.0)


def configured(**overrides: Any) -> Any:
    return parse_config(TOY, overrides={name.replace("__", "."): v for name, v in overrides.items()})


def ran(
    out: Path, make: Callable[[], Executor] | None = None, *, resume: bool = False, **overrides: Any
) -> Run:
    engine = None if make is None else ClusterWorkers(make, out, None, 2)
    given: dict[str, Any] = {"workers": 1} if engine is None else {"engine": engine}
    return run_config(configured(**overrides), out=out, progress=False, resume=resume, **given)


def threads() -> Executor:
    return ThreadPoolExecutor(2)


def same(one: Run, other: Run) -> None:
    for name, value in {**one.server, **one.state}.items():
        assert torch.equal(value, {**other.server, **other.state}[name]), name
    for client in one.clients:
        mine, there = (run.parameters(client, stage="before") for run in (one, other))
        assert all(torch.equal(value, there[name]) for name, value in mine.items())
    untimed = [[repr(r) for r in run.history if r.split not in ("time", "traffic")] for run in (one, other)]
    assert untimed[0] == untimed[1]
    assert any("split='test'" in line for line in untimed[0])


# A private part, copies, adapting, states of clients and of the server, weights of its own, sums of examples, several
# models, a part for each client, class means.
FEW = {
    "furl",
    "ditto",
    "fedbabu",
    "scaffold",
    "fedamp",
    "fedala",
    "fedpac",
    "ifca",
    "pfedhn",
    "fedproto",
    "mixture",
}
"""What a process is sent and gives back stands in packets, as what nodes are sent: they try every method."""


@pytest.mark.parametrize(
    "kind",
    [
        k if k in FEW else pytest.param(k, marks=pytest.mark.slow)
        for k in sorted(METHODS.keys() - {"kteps_star"})
    ],
)
def test_it_has_the_bits_of_sequential(tmp_path: Path, kind: str) -> None:
    one, other = ran(tmp_path / "one", method__kind=kind), ran(tmp_path / "other", threads, method__kind=kind)
    same(one, other)
    assert read_info(tmp_path / "other")["engine"] == "workers"


@pytest.mark.parametrize("kind", ["furl", "scaffold"])
def test_the_number_of_processes_changes_no_bit(tmp_path: Path, kind: str) -> None:
    one = ran(tmp_path / "one", method__kind=kind)
    for count in (1, 2, 3, 5):
        cluster._job.cache_clear()
        out = tmp_path / str(count)
        engine = ClusterWorkers(partial(ThreadPoolExecutor, count), out, None, count)
        same(one, run_config(configured(method__kind=kind), out=out, engine=engine, progress=False))


def test_it_goes_on_here_and_there_again(tmp_path: Path) -> None:
    whole = ran(tmp_path / "whole", run__rounds=6)
    out = tmp_path / "parts"
    ran(out, threads)
    ran(out, resume=True, run__rounds=5)
    same(whole, ran(out, threads, resume=True, run__rounds=6))
    same(whole, load_run(out))


def dying(folder: str, fn: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a process that is killed at its third call, in the first two such processes."""
    Path(folder, f"{os.getpid()}-{time.monotonic_ns()}").touch()
    calls = len(list(Path(folder).glob(f"{os.getpid()}-*")))
    killed = len(list(Path(folder).glob("killed-*")))
    if calls == 3 and killed < 2:
        Path(folder, f"killed-{os.getpid()}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return fn(*args)


class Dying(ProcessPoolExecutor):
    """Processes, two of which are killed."""

    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")  # whose processes have imported torch already
        context.set_forkserver_preload(["fedkeep.experiments.build", __name__])
        super().__init__(2, context)
        self.folder = str(folder)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(dying, self.folder, fn, *args)


def test_processes_that_are_killed_change_no_bit(tmp_path: Path) -> None:
    (tmp_path / "dead").mkdir()
    run = ran(tmp_path / "b", lambda: Dying(tmp_path / "dead"), method__kind="ditto")
    same(ran(tmp_path / "a", method__kind="ditto"), run)
    assert len(list((tmp_path / "dead").glob("killed-*"))) == 2


class Lost(Executor):
    """Loses all that it is given, and counts it."""

    def __init__(self) -> None:
        self.orders: list[bytes] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.orders.append(args[-1])
        found = Future[Any]()
        found.set_exception(BrokenExecutor("gone"))
        return found


def test_clients_that_are_lost_again_and_again_end_the_run(tmp_path: Path) -> None:
    on = Lost()
    with pytest.raises(WorkerError) as raised:
        ran(tmp_path / "a", lambda: on)
    first = [order for order in on.orders if order == on.orders[0]]
    assert len(first) == 1 + places.RETRIES
    assert raised.value.facts["why"].args == ("gone",)
    assert not (tmp_path / "a").exists()  # as nothing was finished


@pytest.mark.parametrize(("how", "error"), [("raise", MethodError), ("nan", NonFiniteError)])
def test_what_a_client_raises_is_raised_here_in_its_turn(tmp_path: Path, how: str, error: type) -> None:
    given = {"model": {"kind": f"{__name__}:Break", "how": how}, "data__users": 40}
    found = []
    for name, make in {"one": None, "other": threads}.items():
        with pytest.raises(error) as raised:
            ran(tmp_path / name, make, **given)
        found.append(str(raised.value))
    assert found[0] == found[1]


def test_clients_that_break_down_may_be_skipped_there_too(tmp_path: Path) -> None:
    given = {
        "model": {"kind": f"{__name__}:Break", "how": "nan"},
        "data__users": 40,
        "run__on_nonfinite": "skip",
    }
    one, other = ran(tmp_path / "one", **given), ran(tmp_path / "other", threads, **given)
    same(one, other)


def test_a_machine_that_cannot_build_the_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match="does not see"):
        run_config(
            configured(), out=tmp_path / "a", engine=ClusterWorkers(threads, tmp_path / "b"), progress=False
        )

    class Older(ThreadPoolExecutor):
        def submit(self, fn: Callable[..., Any], /, about: str, *args: Any, **kwargs: Any) -> Future[Any]:
            told = json.loads(about)
            older = {**told, "installed": {**told["installed"], "fedkeep": "0.0.1", "python": "3.1"}}
            return super().submit(fn, json.dumps(older), *args)

    with raises(ConfigError, what="The run", there="fedkeep 0.0.1, python 3.1"):
        ran(tmp_path / "c", lambda: Older(1))
    assert not list(tmp_path.glob("c/params*"))


def test_what_is_centralised_is_not_spread(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Centralised"):
        ran(tmp_path / "a", threads, run__centralised=True)


@pytest.mark.parametrize(
    ("sizes", "count", "bundles"),
    [
        ([1, 1, 1, 1], 2, [[0, 1], [2, 3]]),
        ([6, 1, 1, 1, 1, 2], 2, [[0], [1, 2, 3, 4, 5]]),
        ([1, 9, 1], 3, [[0, 1], [2]]),
        ([0, 0], 5, [[0], [1]]),
        ([5], 3, [[0]]),
    ],
)
def test_clients_are_dealt_by_their_examples(
    sizes: Sequence[int], count: int, bundles: Sequence[Sequence[int]]
) -> None:
    assert [list(bundle) for bundle in dealt(sizes, count)] == bundles


@pytest.mark.parametrize(("gpus", "wanted"), [((), 5), (("0", "1"), 2)])
def test_on_gpus_each_process_has_one_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: Sequence[str], wanted: int
) -> None:
    """Six clients of unlike sizes make five bundles for two processes of the CPU, of at most six."""
    sent = list[str]()

    class Counting(ThreadPoolExecutor):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            sent.append(fn.__name__)
            return super().submit(fn, *args)

    monkeypatch.setattr(cluster, "gpus_of", lambda device: gpus)
    ran(tmp_path / "a", lambda: Counting(2), run__rounds="1")
    assert len(sent) == wanted


def test_a_process_builds_a_run_once(tmp_path: Path) -> None:
    ran(tmp_path / "a", threads)
    assert cluster._job.cache_info().misses == 1


@pytest.mark.parametrize(
    "given",
    [
        {
            "privacy": {"clip": 1.0, "noise": 0.5, "delta": 0.01, "noise_seed": 3},
            "method__weighting": "uniform",
            "run__sampling": "poisson",
        },
        {"method__upload_noise": 0.1},
        {"method__secure": {"clip": 4.0}, "method__weighting": "uniform"},
        {"method__reduce": {"kind": "median"}},
    ],
    ids=["privacy", "noise", "secure", "median"],
)
def test_what_protects_uploads_holds_there_too(tmp_path: Path, given: dict[str, Any]) -> None:
    same(ran(tmp_path / "one", **given), ran(tmp_path / "other", threads, **given))


def test_a_run_that_goes_on_from_another_one_does_so_there(tmp_path: Path) -> None:
    ran(tmp_path / "may", method__kind="fedper")
    given: dict[str, Any] = {"continue_from": tmp_path / "may", "progress": False}
    more = configured(method__kind="fedper")
    one = run_config(more, out=tmp_path / "one", workers=1, **given)
    engine = ClusterWorkers(threads, tmp_path / "other", None, 2)
    same(one, run_config(more, out=tmp_path / "other", engine=engine, **given))
