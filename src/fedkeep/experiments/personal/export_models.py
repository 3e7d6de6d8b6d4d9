"""Clients' personalised models as files: what ``fedkeep export`` writes; ``exported`` reads them.

    model.json                  the configuration, the data's encoding, the clients, and the hash of every file
    shared.safetensors          what the models have in common, once
    clients/HASH.safetensors    what is one client's own, under the module's names; a method's state beside it
    clients/HASH.onnx           where it is wanted: one client's whole model

Nothing is pickled. The folder appears whole, or not at all.
"""

from __future__ import annotations

import copy
import hashlib
import os
import shutil
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from fedkeep.core.errors import ConfigError, MethodError, RunError
from fedkeep.core.files import beside, state_name, sync_folder, sync_tree
from fedkeep.core.params import SERVER, Params, is_state, prefixed
from fedkeep.core.run_files import read_info
from fedkeep.core.sealed import FORMAT, sealed_bytes
from fedkeep.data.ids import SomeIds
from fedkeep.experiments.personal.adapt_clients import AdaptedRun, adapt_clients
from fedkeep.experiments.personal.exported_models import INFO, SHARED, Exported, told_of
from fedkeep.experiments.personal.personal_model import check_module
from fedkeep.experiments.run import Run
from fedkeep.methods.base import forward
from fedkeep.version import __version__


def export_models(
    run: Run,
    folder: Path | str,
    clients: Iterable[str | int] | None = None,
    *,
    adapt: bool = False,
    onnx: bool = False,
) -> list[str]:
    """Write clients' personalised models into a new folder.

    Args:
        run: a run, or what ``adapt_clients`` made of it.
        folder: must not exist.
        clients: their ids; by default of all that took part in federation.
        adapt: fit what is a client's own on all of its examples first, as ``fedkeep personalize`` does.
        onnx: write each client's model as ONNX too, computed by onnxruntime and compared with torch's numbers.

    Returns:
        The clients' ids.

    Raises:
        RunError: the folder exists or cannot be written.
        MethodError: the method's models cannot be written to files.
        DataError: there is no such client.
        ConfigError: a client was held out of federation and is not adapted; a package for ONNX is missing.
    """
    out, chosen = Path(folder), run.members(clients)
    check_module(run.method)
    config = _config_text(run)
    if adapt:
        run = adapt_clients(run, chosen)
    elif not isinstance(run, AdaptedRun):
        _check(run, chosen)
    if out.exists():
        raise RunError(f"{out} already exists; it is not overwritten. Move it, or name another folder.")
    part = beside(out.absolute())
    try:
        (part / "clients").mkdir(parents=True)
        _write(run, part, chosen, config)
        if onnx:
            from fedkeep.experiments.onnx_files import write_onnx

            bare = None if config else copy.deepcopy(run.net.module).cpu()
            exported = Exported(part, bare, run.method)
            for client, name in zip(chosen.positions.tolist(), chosen, strict=True):
                path = (part / "clients" / state_name(name)).with_suffix(".onnx")
                write_onnx(exported.model(name), run.data, client, path)
        sync_tree(part)
        os.rename(part, out)
        sync_folder(out.absolute().parent)
    except OSError as error:
        raise RunError(f"Cannot write {out}: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return list(chosen)


def _config_text(run: Run) -> str:
    """Return the configuration that a run was made from; empty where there was none.

    What reads configurations loads pydantic, so it is imported where it is needed: ``import fedkeep`` stays light.
    """
    if run.folder is None or not (run.folder / "run.json").exists():
        return ""
    from fedkeep.experiments.load import run_folder_config

    return run_folder_config(run.folder)[1] if read_info(run.folder).get("config") else ""


def _check(run: Run, chosen: SomeIds) -> None:
    method = run.method
    if run.personal == "shared":
        raise MethodError(
            f"Clients of {method.name!r} have models of their own only after adapting: say --adapt (adapt=True)."
        )
    split, own = method.adapt.split or method.split, method.split.halves(run.net.module).private_names
    names = sorted(run.net.trainable())
    if not own and any(
        map(split.is_private, (n for p in method.adapt.phases for n in p.trained_names(split, names)))
    ):
        warnings.warn(
            f"Clients of {method.name!r} get models of their own by adapting, so each file holds the shared model. "
            f"--adapt (adapt=True) fits each client's.",
            stacklevel=3,
        )
    for client in set(chosen) & set(run.held_out):
        raise ConfigError(
            f"{client!r} was held out of federation, so it has no values of its own yet. Fit them "
            f"on its examples: --adapt (adapt=True)."
        )


def _write(run: Run, part: Path, chosen: SomeIds, config: str) -> None:
    plain = run.method.predict is forward
    frozen = run.method.split.halves(run.net.module).frozen(run.net.initial())
    whole = {**frozen, **run.server, **prefixed(SERVER, run.state)}
    shared: Params = {}
    entries = {}
    for name in chosen:
        own = run.own(name)
        values = {**frozen, **run.sent(name).flat, **own}
        if plain:
            values = {n: v for n, v in values.items() if not is_state(n)}
        same = {n for n in values.keys() & whole.keys() - own.keys() if torch.equal(values[n], whole[n])}
        shared |= {n: values[n] for n in same}
        content = {n: v for n, v in values.items() if n not in same}
        entries[name] = _tensors(part / "clients" / state_name(name), content)
    info = {
        "kind": "personalised models",
        "format": FORMAT,
        "fedkeep": __version__,
        "method": run.method.name,
        "predicts": told_of(run.method),
        "round": run.round,
        "config": config,
        "encoding": _encoding(run, config),
        "shared": _tensors(part / SHARED, shared),
        "clients": entries,
    }
    (part / INFO).write_bytes(sealed_bytes(info))


def _encoding(run: Run, config: str) -> str:
    """Return what the data say of themselves, and how their columns came to be numbers; empty where nothing says so."""
    from fedkeep.data.preparation import Encoding
    from fedkeep.experiments.build import encoding_of

    agreed = run.data.meta.get("encoded_by")
    if agreed is None:
        return encoding_of(run.data).to_json() if config else ""
    found, codes = encoding_of(run.data), Encoding.from_json(agreed, "The data's encoding").columns
    return replace(found, columns={**found.columns, **codes}).to_json()


def _tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors into a folder that has no name yet; return the file's hash."""
    content = save({n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()})
    path.write_bytes(content)
    return hashlib.sha256(content).hexdigest()
