"""``fedkeep doctor``: what this machine offers, and what to do about what is missing."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from fedkeep.cli.output import say, show_table
from fedkeep.core.errors import Inspection, installing
from fedkeep.version import __version__

EXTRAS = {
    "flower": "flwr",
    "privacy": "dp_accounting",
    "onnx": "onnxruntime",
    "datasets": "datasets",
    "excel": "openpyxl",
    "maps": "sklearn",
    "sweep": "optuna",
    "natural": "rdata",
    "transformers": "transformers",
    "tensorboard": "tensorboard",
    "mlflow": "mlflow",
    "wandb": "wandb",
    "ray": "ray",
    "papers": "fedkeep_papers",
}
"""A module of each extra."""
RAY = (
    "it pickles objects between its processes, and its ports ask for nothing unless RAY_AUTH_MODE=token: keep them inside "
    "the cluster"
)
MEGABYTES = 16
SLOW = 20.0
"""Megabytes a second below which saving each round costs more than many a round."""


def doctor(
    folder: Annotated[
        Path, typer.Option("--folder", metavar="DIR", help="Where runs are written: its disk is measured.")
    ] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say what fedkeep finds on this machine, and what to do about what is missing.

    Exit code 1 if something keeps fedkeep from running well; extras that are not installed do not.
    """
    findings = [*_versions(), _kernels(), _gpu(), _threads(), _disk(folder), *_extras()]
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        marks = {True: "✓", False: "✗", None: "·"}
        rows = [[f"{marks[f.good]} {f.what}", f.found, f.do] for f in findings]
        show_table(
            f"fedkeep {__version__} on {platform.system()}, {platform.machine()}", ["", "", ""], rows, left=3
        )
    wrong = [finding.what for finding in findings if finding.good is False]
    if wrong:
        if not as_json:
            say(f"To mend: {', '.join(wrong)}.")
        raise typer.Exit(1)


def _versions() -> Iterator[Inspection]:
    import numpy as np
    import torch

    yield Inspection("Python", f"{platform.python_version()}, {sys.executable}")
    yield Inspection("fedkeep", __version__)
    large = torch.version.cuda is not None and not torch.cuda.is_available()
    small = "for CPUs alone there is a much smaller torch: choose CPU at pytorch.org/get-started/locally"
    yield Inspection("torch", torch.__version__, None if large else True, small if large else "")
    yield Inspection("numpy", np.__version__)


def _kernels() -> Inspection:
    from fedkeep.kernels import native

    status = native.status()
    if status.native:
        return Inspection("kernels", status.level)
    return Inspection(
        "kernels", str(status), False, "pip install a wheel for this machine, or a C++ compiler and build"
    )


def _gpu() -> Inspection:
    import torch

    if torch.cuda.is_available():
        return Inspection("GPU", f"{torch.cuda.get_device_name()}: run.device=cuda, --device cuda")
    if torch.backends.mps.is_available():
        return Inspection("GPU", "Apple's: run.device=mps, --device mps")
    return Inspection(
        "GPU", "none that torch can use", None, "small models of many users are trained on CPUs as well"
    )


def _threads() -> Inspection:
    import torch

    cores, threads = os.cpu_count() or 1, torch.get_num_threads()
    if threads <= cores:
        return Inspection("threads", f"{threads} of {cores} cores")
    return Inspection("threads", f"{threads} on {cores} cores", False, f"set OMP_NUM_THREADS={cores}")


def _disk(folder: Path) -> Inspection:
    """Write a file to the disk as a run does, flushed, and remove it."""
    from fedkeep.core.files import beside, write_whole

    path, what = beside(folder / "doctor"), f"disk of {folder.absolute()}"
    start = time.perf_counter()
    try:
        write_whole(path, os.urandom(MEGABYTES << 20))
    except Exception as error:  # noqa: BLE001 - whatever it is, runs could not be written here
        return Inspection(what, str(error), False, "name another folder with --folder, and runs' with --out")
    finally:
        path.unlink(missing_ok=True)
    speed = MEGABYTES / (time.perf_counter() - start)
    do = "" if speed >= SLOW else "every round is flushed to the disk: write runs to a faster one with --out"
    return Inspection(what, f"{speed:,.0f} MB/s", speed >= SLOW, do)


def _extras() -> Iterator[Inspection]:
    for extra, module in EXTRAS.items():
        if find_spec(module) is None:
            yield Inspection(extra, "not installed", None, installing(extra))
            continue
        try:
            found = version("scikit-learn" if module == "sklearn" else module)
        except PackageNotFoundError:
            found = "there"
        note = RAY if extra == "ray" else ""
        yield Inspection(extra, f"{module} {found}", do=note)
