"""From a run's folder back to a ``Run``: configuration, data, model, method, server state and private states."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from fedkeep.core.describe import differences
from fedkeep.core.errors import ConfigError, RunError
from fedkeep.core.files import expanded, read_tensors
from fedkeep.data import FederatedData
from fedkeep.data.seen import Seen
from fedkeep.experiments.continuing import Origin
from fedkeep.experiments.environment import check_device
from fedkeep.experiments.run import Run
from fedkeep.experiments.run_directory import read_info
from fedkeep.experiments.run_settings import RunSettings
from fedkeep.experiments.simulate import FIRST, Simulation, divided
from fedkeep.methods import Method

if TYPE_CHECKING:
    from fedkeep.experiments.config import Config


def run_folder_config(folder: Path) -> tuple[Config, str]:
    """Return the configuration that a run's folder keeps, and its text.

    Raises:
        RunError: there is no run, it is a federation's, it was made without a configuration, or its ``config.toml``
            was changed.
    """
    from fedkeep.experiments.config import Config, parse_config, read_config

    info = read_info(folder)
    if info.get("engine") == "remote":
        raise RunError(
            "{folder} is a federation's run: examples and private values are on its devices, not here. fedkeep report "
            "and fedkeep budget read this folder; fedkeep flower publish lets devices predict, evaluate and export. "
            "For everything in one place, run the same configuration with fedkeep run.",
            folder=folder,
        )
    path = folder / "config.toml"
    kept = str(info.get("config_text") or "")
    if not path.exists() and not kept:
        raise RunError(
            "{folder} keeps no config.toml: it was not made from a configuration, so its model is not known here. "
            "Give it: fedkeep.load_run('{folder}', model=..., method=..., data=...).",
            folder=folder,
        )
    try:
        config, text = read_config(path) if path.exists() else (parse_config(kept, str(path)), kept)
        before = Config.model_validate(info.get("config"), strict=False)
    except (ConfigError, ValueError) as error:
        raise RunError("{folder} is damaged: {why}", folder=folder, why=error) from error
    lines = differences(config.model_dump(mode="json"), before.model_dump(mode="json"))
    if lines:
        shown = "\n  ".join(lines[:8])
        raise RunError(
            "{path} was changed after the run was made:\n  {value}\nRestore it, or start another run.",
            path=path,
            value=shown,
        )
    return config, text


def folder_of_data(folder: Path) -> Path | None:
    """Return the folder that a run's data were read from; where it has none, or it is gone, that of FEDKEEP_DATA."""
    from fedkeep.experiments.sources import data_folder

    place = read_info(folder).get("data_folder")
    found = folder / place if isinstance(place, str) else None
    return found if found is not None and found.is_dir() else data_folder(None)


def load_run(
    folder: Path | str,
    *,
    model: nn.Module | None = None,
    method: Method | None = None,
    data: FederatedData | None = None,
    data_folder: Path | None = None,
    device: str = "cpu",
) -> Run:
    """Return the run of a folder as it stood after its last committed round. Nothing in the folder is touched.

    Args:
        folder: the run's folder.
        model, method: as they were given to ``simulate``, where the run was made without a configuration.
        data: the data; with a configuration it reads them where None.
        data_folder: the folder of data; None: the one that the run was made with, or, where it is gone, that of the
            variable FEDKEEP_DATA.
        device: where to compute.

    Raises:
        RunError, StoreError: there is no run, it is damaged or in use, or model, method or data differ from those it was
            made with.
        ConfigError, DataError: as for ``build_data``; or model, method and data are not all given.
    """
    folder = expanded(folder)
    check_device(device)
    if model is not None or method is not None:
        if model is None or method is None or data is None:
            raise ConfigError("load_run wants all of model, method and data, or none of them.")
        return _of_python(folder, model, method, data, device)
    return simulation_in(folder, data, data_folder, device).read(folder)


def check_same_data(folder: Path, data: FederatedData, fingerprint: object) -> None:
    """Raise RunError where data differ from those that the run in a folder was made with."""
    if lines := differences(data.fingerprint(), fingerprint):
        raise RunError(
            "The data differ from those that {folder} was made with:\n  {value}\nName the same with --data DIR.",
            folder=folder,
            value="\n  ".join(lines[:4]),
        )


def simulation_in(
    folder: Path, data: FederatedData | None = None, data_folder: Path | None = None, device: str = "cpu"
) -> Simulation:
    """Return the simulation that a run's folder was made by, from its configuration; args and errors as ``load_run``."""
    from fedkeep.experiments.build import data_of, simulation_of

    config, _ = run_folder_config(folder)
    origin = Origin.of(read_info(folder))
    if data is None:
        data = data_of(config, data_folder or folder_of_data(folder), folder if origin else None)
    check_same_data(folder, data, read_info(folder).get("data", {}).get("fingerprint"))
    engine = "auto" if config.run.centralised else "sequential"
    here = replace(config.run, engine=engine, workers=None, device=device, trackers=())
    if config.privacy is not None:  # nothing is spent
        config = config.model_copy(update={"privacy": replace(config.privacy, budget=None)})
    return simulation_of(config, data, data_folder, here, origin=origin)


def _of_python(folder: Path, model: nn.Module, method: Method, data: FederatedData, device: str) -> Run:
    """Return a run that was made without a configuration."""
    info = read_info(folder)
    was = info["identity"]
    settings = RunSettings.of(
        was,
        engine="auto" if was["centralised"] else "sequential",
        device=device,
        accelerate=bool(info["accelerated"].get("swapped")),
    )
    first = read_tensors(folder / FIRST) if (folder / FIRST).exists() else None
    if (origin := Origin.of(info)) is not None:
        settings = replace(settings, rounds=was["rounds"] - origin.round)
        data = Seen.read(folder, info["seen"]).kept_apart(divided(data))
    simulation = Simulation(
        model, method, data, settings, origin=origin, seed=was["seed"], name=str(info["name"]), first=first
    )
    asked = {**simulation.conductor.identity, "data": simulation.data.fingerprint()}
    if lines := differences(json.loads(json.dumps(asked)), was):
        shown = "\n  ".join(lines[:8])
        hint = " with the same first values (torch.manual_seed)" if "initial_sha256" in shown else ""
        raise RunError(
            "{folder} was made with another model, method or data:\n  {value}\nGive the same{hint}.",
            folder=folder,
            value=shown,
            hint=hint,
        )
    return simulation.read(folder)


def rows_of_run(folder: Path, data: FederatedData, file: Path) -> FederatedData:
    """Return the examples of another file in numbers, as a run's data are, not split.

    Args:
        folder: the run's; its configuration says how its data are read.
        data: its data.
        file: in the same format as the run's own.

    Raises:
        ConfigError: the run's reader reads no file, or knows no encoding.
        DataError: a fault in the file, or a value that does not fit the run's encoding.
    """
    from fedkeep.data.preparation import Encoding
    from fedkeep.experiments.config import DataConfig
    from fedkeep.experiments.sources import build_source

    config, _ = run_folder_config(folder)
    agreed = data.meta.get("encoded_by")
    if "path" not in config.data.options or agreed is None:
        raise ConfigError(
            "The run's reader {reader!r} does not read a file that could be exchanged. Read it in Python: "
            "run.fit(rows=data).",
            reader=config.data.reader,
        )
    table = config.data.model_dump(exclude_unset=True) | {"path": file.name, "split": None}
    table.pop("test_path", None)
    source = build_source(DataConfig.model_validate(table), config.seed, file.absolute().parent)
    found = source.encoded(Encoding.from_json(agreed, "The run's encoding"))
    found.bounds = None
    return found
