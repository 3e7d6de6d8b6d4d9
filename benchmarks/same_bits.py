"""The same bits as another checkout: a frozen set of runs here and there, compared by digests.

``python -m benchmarks.same_bits CHECKOUT [--only TEXT …] [--jobs 2]`` runs every method one client after the other, in
workers, vectorised, as chosen and centralised, in memory and in a folder; methods that adapt; differential privacy; secure
sums; runs that are killed after a round and resumed; and four methods between nodes with stores on the disk, each message in
Flower's form, there and back. CHECKOUT is a clone of another commit whose kernels are built. For each
run it compares the server's values, every client's, and all records but times. Digests are of one machine and are not kept;
``results/same-bits.json`` says which runs were equal, which were not, and which the other commit has not.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ADAPTING = ("fine_tuned", "mixture", "fedbabu", "furl", "per_fedavg")
KILLED = ("furl", "fedrep", "scaffold", "kteps_star", "mixture", "pfedhn")
PRIVATE = ("fedavg", "furl", "fedper", "ditto", "mixture")
DEPLOYED = ("furl", "fedrep", "scaffold", "kteps_star")
NODES = 3
ENGINES = ("sequential", "workers", "vectorised", "auto")
PLAIN_MEANS = ("apfl", "fedbn", "fedrep", "ifca", "mr_mtl", "per_fedavg", "pfedme")
COMMON = {"rounds": 3, "cohort": 4, "seed": 3, "evaluate_every": 1, "progress": False}


def digest(tensors: dict[str, Any]) -> str:
    """Return a digest of named tensors: names, types, shapes and bytes."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        found.update(value.numpy().tobytes())
    return found.hexdigest()[:16]


def told(run: Any) -> dict[str, str]:
    """Return the digests of a run: its server's values, its clients' and its records."""
    run = run.last if isinstance(run.last, type(run)) else run  # an older fedkeep's run is of its last round
    # What clients kept in the rounds: in later checkouts a method's last step is taken when it is asked for.
    stage = {"stage": "before"} if "stage" in inspect.signature(run.parameters).parameters else {}
    clients = {
        f"{client}/{name}": value
        for client in run.clients
        for name, value in run.parameters(str(client), **stage).items()
    }
    return {
        "server": digest({**run.server, **{f"state/{n}": v for n, v in run.state.items()}}),
        "clients": digest(clients),
        "records": digest_of_records(run.history),
    }


def digest_of_records(records: Sequence[Any]) -> str:
    """Return a digest of records, but of times and bytes, in any order."""
    lines = sorted(
        f"{r.round} {r.split} {r.client} {r.metric} {r.value!r} {r.n}"
        for r in records
        if r.split not in ("time", "traffic")
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield every run's name and what trains it."""
    import fedkeep
    from fedkeep.core.optim import adam
    from tests.methods.table import DATA, ROWS

    def trained(name: str, dtype: str, **options: Any) -> Any:
        make, method = ROWS[name]
        method = with_defaults_named(method)
        data = DATA
        model = make()
        if dtype == "float32":
            from tests.tiny import classes

            data = classes(kind="f4")
        else:
            model = model.double()
        if options.get("engine") == "centralised":
            named = "centralised" in inspect.signature(fedkeep.simulate).parameters
            options = {
                **options,
                **({"engine": "auto", "centralised": True} if named else {"engine": "pooled"}),
            }
        return fedkeep.simulate(model, method, data, **{**COMMON, **options})

    def in_folder(name: str, engine: str) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            return told(trained(name, "float64", engine=engine, out=Path(folder) / "run"))

    def killed(name: str, engine: str) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            here = Path(__file__).resolve()
            words = [sys.executable, "-P", str(here), "--killed", name, engine, f"{folder}/run"]
            done = subprocess.run(words, capture_output=True, text=True)
            if done.returncode != -signal.SIGKILL:
                raise RuntimeError(f"it was not killed: {done.stderr[-2000:]}")
            return told(trained(name, "float64", engine=engine, out=Path(folder) / "run", resume=True))

    for name in ROWS:
        for engine in (*ENGINES, "centralised"):
            for dtype in ("float64", "float32"):
                yield (
                    f"{name} {engine} {dtype}",
                    lambda n=name, e=engine, d=dtype: told(trained(n, d, engine=e)),
                )
        for engine in ("sequential", "vectorised"):
            yield f"{name} {engine} folder", lambda n=name, e=engine: in_folder(n, e)
    for name in ADAPTING:
        for engine in ENGINES:
            yield (
                f"{name} {engine} adapted",
                lambda n=name, e=engine: told(
                    trained(n, "float64", engine=e, evaluate_adapted=True, evaluate_shared=True)
                ),
            )
            yield (
                f"{name} {engine} held out",
                lambda n=name, e=engine: told(trained(n, "float64", engine=e, hold_out=0.3)),
            )
    for name in KILLED:
        for engine in ("sequential", "vectorised"):
            yield f"{name} {engine} killed", lambda n=name, e=engine: killed(n, e)
    for name in PRIVATE:
        for engine in ("sequential", "vectorised"):
            yield f"{name} {engine} noise", lambda n=name, e=engine: told(noisy(n, trained, e))
            yield f"{name} {engine} secure", lambda n=name, e=engine: told(summed(n, e))
    for name in DEPLOYED:
        yield f"{name} flower", lambda n=name: deployed(n)
    yield (
        "fedavg sequential momentum",
        lambda: told(
            fedkeep.simulate(
                ROWS["fedavg"][0]().double(),
                fedkeep.methods.fedavg(
                    local=fedkeep.Phase(optimizer=fedkeep.sgd(0.1), batch_size=32),
                    server=fedkeep.averaging(adam(0.05)),
                ),
                DATA,
                **COMMON,
            )
        ),
    )


def with_defaults_named(method: Any) -> Any:
    """Return a method with values named whose defaults checkouts may have otherwise.

    They are the means of ``PLAIN_MEANS``; and of ``mixture`` whether a last mini-batch of one example joins the one before
    it, as its model normalises by batches, and at most ten epochs of its last step.
    """
    if method.name == "mixture":
        client, adapt = (
            replace(
                part,
                phases=tuple(
                    replace(phase, merge_single=True, epochs=min(phase.epochs, 10)) for phase in part.phases
                ),
            )
            for part in (method.client, method.adapt)
        )
        return method.but(client=client, adapt=adapt)
    if method.name not in PLAIN_MEANS:
        return method
    reduce = method.server.reduce
    if method.name == "ifca":
        return method.on_server(reduce=replace(reduce, mean=replace(reduce.mean, by="uniform")))
    return method.on_server(reduce=replace(reduce, by="uniform"))


def noisy(name: str, trained: Callable[..., Any], engine: str) -> Any:
    """Train with differential privacy whose noise follows from the seed."""
    from fedkeep.privacy import DifferentialPrivacy

    privacy = DifferentialPrivacy(noise=0.5, clip=1.0, heaviest=5.0, noise_seed=9)
    return trained(name, "float64", engine=engine, privacy=privacy, sampling="poisson", min_clients=0)


def summed(name: str, engine: str) -> Any:
    """Train with secure sums."""
    import fedkeep
    from fedkeep.methods import SecureSums, securely
    from tests.methods.table import DATA, ROWS

    make, method = ROWS[name]
    return fedkeep.simulate(
        make().double(),
        securely(with_defaults_named(method), SecureSums(clip=1.0, heaviest=5.0)),
        DATA,
        **{**COMMON, "engine": engine},
    )


def deployed(name: str, kind: str = "float32") -> dict[str, str]:
    """Train a case of the conformance table on Flower's nodes, in this process; return its digests."""
    from benchmarks.flower_cases import FOLDER, GridTransport, client, kept, node
    from tests.engines.test_conformance import CASES
    from tests.flower.loopback import Loopback, context
    from tests.remote.federations import federation
    from tests.remote.test_conformance import server_of

    room = "served_run" if find_spec("fedkeep.remote.served_run") else "server"  # as it was called before
    serve_run = import_module(f"fedkeep.remote.{room}").serve_run
    CASES[name] = replace(CASES[name], method=with_defaults_named(CASES[name].method))
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder
        nodes = [context(7 + k, **{"partition-id": k, "num-partitions": NODES}) for k in range(NODES)]
        out, grid = Path(folder) / "run", GridTransport(Loopback(client, nodes))
        history = serve_run(federation(name, kind), grid, out, progress=False, poll=0.01)
        found = {
            "server": digest(server_of(out)),
            "clients": digest(kept(name, kind, out, NODES)),
            "records": digest_of_records(history),
        }
        node.cache_clear()
    return found


class Kill:
    """A tracker that kills the process after the second round."""

    name = "kill"

    def started(self, facts: Any) -> None:
        """Wait."""

    def recorded(self, records: Sequence[Any]) -> None:
        """Kill the process once the second round is committed."""
        if any(record.round >= 2 for record in records):
            os.kill(os.getpid(), signal.SIGKILL)

    def finished(self, how: str) -> None:
        """Is not reached."""


def train_and_die(name: str, engine: str, out: str) -> None:
    """Train until the second round is committed; then the process is killed."""
    import fedkeep
    from tests.methods.table import DATA, ROWS

    make, method = ROWS[name]
    fedkeep.simulate(
        make().double(),
        with_defaults_named(method),
        DATA,
        engine=engine,
        out=out,
        trackers=[Kill()],
        **{**COMMON, "rounds": 3},
    )


def write(path: Path, only: Sequence[str]) -> None:
    """Train the cases of this checkout whose names hold one of the texts; write their digests, line by line."""
    import warnings

    import torch

    from fedkeep.core.errors import FedkeepError

    warnings.simplefilter("ignore")
    with path.open("w", encoding="utf-8") as file:
        for name, train in cases():
            if only and not any(text in name for text in only):
                continue
            torch.manual_seed(0)
            try:
                found: dict[str, str] = train()
            except FedkeepError as error:  # a method that an engine refuses is a result, too
                found = {"refused": type(error).__name__, "message": str(error)[:300]}
            file.write(json.dumps({"case": name, **found}) + "\n")
            file.flush()


def beside(checkout: Path, only: Sequence[str], jobs: int) -> dict[str, Any]:
    """Train everything in both checkouts, each in a process of its own, and compare."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        both = list(
            pool.map(lambda t: digests(t[0], Path(folder) / t[1], only), ((checkout, "a"), (ROOT, "b")))
        )
    before, after = both
    same = [case for case in after if case in before and facts(before[case]) == facts(after[case])]
    apart = {
        case: {"before": before[case], "after": after[case]}
        for case in after
        if case in before and case not in same
    }
    return {
        "cases": len(after),
        "equal": len(same),
        "of them refused by both": sum("refused" in after[case] for case in same),
        "different": apart,
        "only here": sorted(set(after) - set(before)),
        "only there": sorted(set(before) - set(after)),
    }


def facts(found: dict[str, str]) -> dict[str, str]:
    """Return what must be equal: digests, or that it is refused."""
    return {name: value for name, value in found.items() if name != "message"}


def digests(checkout: Path, path: Path, only: Sequence[str]) -> dict[str, dict[str, str]]:
    """Train a checkout's cases in a process; return their digests by name."""
    paths = [str(checkout / "src"), str(checkout / "papers" / "src"), str(checkout)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-P", str(Path(__file__).resolve()), "--write", str(path), "--only", *only]
    subprocess.run(words, env=environment, cwd=checkout, check=True)
    lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return {line.pop("case"): line for line in lines}


def main(words: Sequence[str] | None = None) -> int:
    """Return 0 if every run is equal."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.same_bits", description=__doc__.split("\n")[0]
    )
    parser.add_argument("checkout", nargs="?", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="runs whose names hold one of these texts")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--killed", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.killed:
        train_and_die(*given.killed)
        return 1
    if given.write:
        write(given.write, given.only)
        return 0
    if given.checkout is None:
        parser.error("name a clone of the other commit")
    found = beside(given.checkout.resolve(), given.only, given.jobs)
    for case, values in found["different"].items():
        print(case, json.dumps(values))
    print(f"{found['equal']} of {found['cases']} runs are equal, {len(found['different'])} are not")
    if not given.only:
        from benchmarks.measure import RESULTS, processor
        from benchmarks.versions import commit

        told_ = {"before": commit(given.checkout), "after": commit(ROOT), "machine": processor(), **found}
        (RESULTS / "same-bits.json").write_text(json.dumps(told_, indent=1) + "\n", encoding="utf-8")
    return int(bool(found["different"]))


if __name__ == "__main__":
    sys.exit(main())
