"""The campaign against readers, configurations, ids and command lines: hostile inputs, each with bounds of its own.

Inputs are tried in a process with 2 GB more of address space than it has after loading, and 10 s for each. The process
is started anew where an input ends it.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from random import Random
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from fedkeep.core.errors import FedkeepError

SECONDS, BYTES = 10, 2 << 30
ROOT = Path(__file__).resolve().parent.parent


class Late(BaseException):
    """An input took too long; no handler of errors catches it."""


def makers() -> dict[str, Any]:
    """Return what makes the inputs of each class, by name."""
    from benchmarks import fault_arrays as arrays
    from benchmarks import fault_makers as made
    from benchmarks import fault_papers as papers
    from benchmarks import fault_settings as settings

    return {
        "CSV and TSV tables": made.csv_table,
        "JSON tables": made.json_table,
        "Parquet tables": made.parquet_table,
        "gzipped tables": made.gzip_table,
        "files of reviews": made.reviews_files,
        "MovieLens": made.movie_ratings,
        "saved data": arrays.saved_data,
        "word vectors": arrays.word_vectors,
        "image sets": arrays.images,
        "pictures in Parquet": arrays.pictures,
        "readers of papers' data": papers.paper_data,
        "client ids": made.odd_ids,
        "configurations": settings.configuration,
        "command lines": settings.command,
    }


def classes(tried: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield ``{name, tried, silent, crashed, hung}`` for each class of inputs, ``tried`` inputs in all.

    Silent: accepted, though a promise is broken (a checksum does not fit, a label is no class, …). Crashed: an
    exception that is none of fedkeep's, or the end of the process. Hung: more than 10 s or 2 GB.
    """
    names = list(makers())
    share = [tried // len(names) + (place < tried % len(names)) for place in range(len(names))]
    worker = Worker()
    try:
        for name, number in zip(names, share, strict=True):
            counts = {"silent": 0, "crashed": 0, "hung": 0}
            for index in range(number):
                verdict, detail = worker.ask(name, f"{seed}/{name}/{index}")
                if verdict in counts:
                    counts[verdict] += 1
                    print(f"{name}, input {seed}/{name}/{index}: {verdict}\n{detail}", file=sys.stderr)
            yield {"name": name, "tried": number, **counts}
    finally:
        worker.close()


class Worker:
    """A process that tries inputs, and is started anew where one ends it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def ask(self, name: str, key: str) -> tuple[str, str]:
        """Return the verdict on an input, and what there is to say of it."""
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([name, key]) + "\n")
        process.stdin.flush()
        with DefaultSelector() as selector:
            selector.register(process.stdout, EVENT_READ)
            answered = selector.select(3 * SECONDS)
        line = process.stdout.readline() if answered else ""
        if line:
            verdict, detail = json.loads(line)
            return verdict, detail
        code = process.poll()
        self.close()
        return ("hung", "no answer") if not answered else ("crashed", f"the process ended with {code}")

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
            environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.fault_inputs"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
                cwd=ROOT,
            )
            assert self._process.stdout is not None
            self._process.stdout.readline()  # it says that it has loaded
        return self._process

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def answer() -> None:
    """Try the inputs that come by standard input, one a line, and answer on standard output."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints must not answer
    known = makers()
    import fedkeep.cli  # noqa: F401 - loaded before the bounds are set

    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    bound = pages * resource.getpagesize() + BYTES
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    warnings.simplefilter("error")
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        name, key = json.loads(line)
        print(json.dumps(verdict_on(known[name], key)), file=out, flush=True)


def _late(*_: object) -> None:
    raise Late


def verdict_on(maker: Any, key: str) -> tuple[str, str]:
    """Return the verdict on an input of this key, and what there is to say of it."""
    from benchmarks.fault_makers import SilentError

    with tempfile.TemporaryDirectory() as folder:
        trial = maker(Random(key), Path(folder))  # noqa: S311 - inputs, no secrets
        try:
            before = signal.signal(signal.SIGALRM, _late)
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            try:
                with (
                    warnings.catch_warnings()
                ):  # a warning is no crash, whatever the caller makes of warnings
                    warnings.simplefilter("default")
                    trial()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
        except FedkeepError as error:
            return ("hung", traceback.format_exc()) if _beyond_memory(error) else ("refused", "")
        except SilentError as error:
            return "silent", str(error)
        except (Late, MemoryError):
            return "hung", traceback.format_exc()
        except BaseException:  # noqa: BLE001 - what else there may be is what the campaign looks for
            return "crashed", traceback.format_exc()
    return "accepted", ""


def _beyond_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


if __name__ == "__main__":
    answer()
