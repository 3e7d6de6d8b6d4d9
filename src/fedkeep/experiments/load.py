"""From a run's folder back to a ``Run``: configuration, data, model, method, server state and private states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fedkeep.core.describe import differences
from fedkeep.core.errors import ConfigError, RunError
from fedkeep.data import FederatedData
from fedkeep.experiments.build import build_data, simulation_of
from fedkeep.experiments.config import Config, parse_config, read_config
from fedkeep.experiments.environment import check_device
from fedkeep.experiments.run import Run
from fedkeep.experiments.run_directory import read_info


def run_folder_config(folder: Path) -> tuple[Config, str]:
    """Return the configuration that a run's folder keeps, and its text.

    Raises:
        RunError: there is no run, it is a federation's, it was made without a configuration, or its ``config.toml``
            was changed.
    """
    info = read_info(folder)
    if info.get("engine") == "remote":
        raise RunError(
            f"{folder} is a federation's run: examples and private values are on its devices, not here. fedkeep report "
            f"and fedkeep budget read this folder; fedkeep flower publish lets devices predict, evaluate and export. "
            f"For everything in one place, run the same configuration with fedkeep run."
        )
    path = folder / "config.toml"
    kept = str(info.get("config_text") or "")
    if not path.exists() and not kept:
        raise RunError(
            f"{folder} keeps no config.toml: it was not made from a configuration, so its model is not known here. "
            f"Call fedkeep.simulate with the same model, out=... and resume=True instead."
        )
    try:
        config, text = read_config(path) if path.exists() else (parse_config(kept, str(path)), kept)
        before = Config.model_validate(info.get("config"), strict=False)
    except (ConfigError, ValueError) as error:
        raise RunError(f"{folder} is damaged: {error}") from error
    lines = differences(config.model_dump(mode="json"), before.model_dump(mode="json"))
    if lines:
        shown = "\n  ".join(lines[:8])
        raise RunError(
            f"{path} was changed after the run was made:\n  {shown}\nRestore it, or start another run."
        )
    return config, text


def folder_of_data(folder: Path) -> Path | None:
    """Return the folder that a run's data were read from; None where it has none, or it is gone."""
    place = read_info(folder).get("data_folder")
    found = folder / place if isinstance(place, str) else None
    return found if found is not None and found.is_dir() else None


def load_run(
    folder: Path, *, data_folder: Path | None = None, data: FederatedData | None = None, device: str = "cpu"
) -> Run:
    """Return the run of a folder as it stood after its last committed round. Nothing in the folder is touched.

    Args:
        folder: the run's folder.
        data_folder: the folder of data; None: the one that the run was made with.
        data: the data, where they are read already.
        device: where to compute.

    Raises:
        RunError, StoreError: there is no run, it is damaged or in use, or the data differ from those it was made with.
        ConfigError, DataError: as for ``build_data``.
    """
    config, _ = run_folder_config(folder)
    check_device(device)
    data = data if data is not None else build_data(config, data_folder or folder_of_data(folder))
    lines = differences(data.fingerprint(), read_info(folder).get("data", {}).get("fingerprint"))
    if lines:
        shown = "\n  ".join(lines[:4])
        raise RunError(
            f"The data differ from those that {folder} was made with:\n  {shown}\nName the same with --data DIR."
        )
    engine = "auto" if config.run.centralised else "sequential"
    here = replace(config.run, engine=engine, workers=None, device=device, trackers=())
    if config.privacy is not None:  # nothing is spent
        config = config.model_copy(update={"privacy": replace(config.privacy, budget=None)})
    return simulation_of(config, data, data_folder, here).read(folder)
