"""Clients' personalised models as files: what ``fedkeep export`` writes, ``load_model`` and ``load_encoding`` read.

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
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from fedkeep.core.describe import check_kind, differences
from fedkeep.core.errors import ConfigError, MethodError, RunError, did_you_mean
from fedkeep.core.files import beside, check_tensors, layout, load_verified, state_name, write_whole
from fedkeep.core.net import Net, tensors_of
from fedkeep.core.params import SERVER, Params, is_state, prefixed
from fedkeep.core.run_files import read_info
from fedkeep.core.sealed import FORMAT, read_sealed, sealed_bytes
from fedkeep.data.ids import SomeIds, as_id
from fedkeep.engines.base import first_kept
from fedkeep.experiments.adapt import adapt_clients
from fedkeep.experiments.run import Run
from fedkeep.methods import Method
from fedkeep.methods.base import Recalls, forward
from fedkeep.version import __version__

if TYPE_CHECKING:
    from fedkeep.data.preparation import Encoding
    from fedkeep.experiments.config import Config

INFO, SHARED = "model.json", "shared.safetensors"


class PersonalModel(nn.Module):
    """One client's model, of a method that predicts in a way of its own; called with columns by name.

    Args:
        module: holds the client's values.
        method: says how to predict.
        state: what the method keeps beside the model, by name.
    """

    def __init__(self, module: nn.Module, method: Method, state: Params) -> None:
        super().__init__()
        self.module, self._net, self._predict, self._names = module, Net(module), method.predict, list(state)
        # as buffers, whose names have no dot, they move with the module
        for place, value in enumerate(state.values()):
            self.register_buffer(f"_state_{place}", value, persistent=False)

    def forward(self, **columns: Tensor) -> Any:
        """Return what the method predicts for examples."""
        state = {name: self.get_buffer(f"_state_{place}") for place, name in enumerate(self._names)}
        return self._predict(self._net, {**tensors_of(self.module), **state}, columns)


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
        run: a run.
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
    config = _config_text(run)
    _check(run, chosen, adapt, bool(config))
    if out.exists():
        raise RunError(f"{out} already exists; it is not overwritten. Move it, or name another folder.")
    part = beside(out.absolute())
    try:
        (part / "clients").mkdir(parents=True)
        _write(run, part, chosen, adapt, config)
        if onnx:
            from fedkeep.experiments.onnx_files import write_onnx

            bare = None if config else copy.deepcopy(run.net.module).cpu()
            for client, name in zip(chosen.positions.tolist(), chosen, strict=True):
                model = load_model(part, name, model=bare)
                write_onnx(
                    model, run.data, client, (part / "clients" / state_name(name)).with_suffix(".onnx")
                )
        os.rename(part, out)
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


def _check(run: Run, chosen: SomeIds, adapt: bool, configured: bool) -> None:
    method = run.method
    if isinstance(method.predict, Recalls):
        raise MethodError(
            f"{method.name!r} looks at a client's own examples to predict, and a file holds no examples. Export a run "
            f"of another method."
        )
    if not configured and (method.predict is not forward or method.extend is not None):
        raise MethodError(
            f"{method.name!r} predicts in a way of its own, which only a run's configuration tells a file. Make the "
            f"run from a configuration (fedkeep run)."
        )
    if adapt:
        return
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


def _write(run: Run, part: Path, chosen: SomeIds, adapt: bool, config: str) -> None:
    plain = run.method.predict is forward
    store = adapt_clients(run, chosen).store if adapt else run.private
    frozen = run.method.split.halves(run.net.module).frozen(run.net.initial())
    whole = {**frozen, **run.server, **prefixed(SERVER, run.state)}
    shared: Params = {}
    entries = {}
    for client, name in zip(chosen.positions.tolist(), chosen, strict=True):
        own = {n: v[0] for n, v in store.read([client]).items()}
        values = {**frozen, **run.sent(name).flat, **own}
        if plain:
            values = {n: v for n, v in values.items() if not is_state(n)}
        same = {n for n in values.keys() & whole.keys() - own.keys() if torch.equal(values[n], whole[n])}
        shared |= {n: values[n] for n in same}
        content = {n: v for n, v in values.items() if n not in same}
        entries[name] = _tensors(part / "clients" / state_name(name), content)
    info = {
        "kind": "personalised models", "format": FORMAT, "fedkeep": __version__, "method": run.method.name,
        "round": run.round, "config": config, "encoding": _encoding(run, config),
        "shared": _tensors(part / SHARED, shared), "clients": entries,
    }  # fmt: skip
    write_whole(part / INFO, sealed_bytes(info))


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
    """Write tensors; return the file's hash."""
    content = save({n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()})
    write_whole(path, content)
    return hashlib.sha256(content).hexdigest()


def load_model(folder: Path | str, client: str | int, *, model: nn.Module | None = None) -> nn.Module:
    """Return a client's personalised model from a folder that ``fedkeep export`` wrote, ready to predict.

    Args:
        folder: the folder.
        client: the client's id.
        model: the module that was trained, where the run was made without a configuration; it is copied.

    Returns:
        A module in evaluation mode. It takes the data's columns by name, first axis examples; a module of torch's own
        takes them as it does.

    Raises:
        RunError: the folder holds no models, none of this client, or is damaged.
        DataError: the client's id is none.
        ConfigError: ``model`` is missing, is no module, or another one than was trained.
    """
    if model is not None:
        check_kind("model", model, nn.Module, "a torch.nn.Module")
    place, info = Path(folder), _info(folder)
    client, clients = as_id(client), info["clients"]
    if client not in clients:
        raise RunError(
            f"{place} holds no model of {client!r} ({len(clients)} clients).{did_you_mean(client, clients)}"
        )
    path = place / "clients" / state_name(client)
    values = load_verified(place / SHARED, info["shared"]) | load_verified(path, clients[client])
    state = {n: v for n, v in values.items() if is_state(n)}
    module, method = _module(place, info, model)
    wanted, found = layout(tensors_of(module)), {n: v for n, v in values.items() if n not in state}
    if not info["config"] and (lines := differences(wanted, layout(found), "model")):
        shown = "\n  ".join(lines[:8])
        raise ConfigError(
            f"The {type(model).__name__} that was given is another module than was trained:\n  {shown}\n"
            f"Give one that is made as it was for the run."
        )
    check_tensors(path, wanted, layout(found), found)
    module.load_state_dict({**module.state_dict(), **Net(module).placed(found)})  # what is no tensor stays
    ready = module if method is None or method.predict is forward else PersonalModel(module, method, state)
    return ready.eval()


def load_shared(folder: Path | str) -> nn.Module:
    """Return the model of nobody in particular from a folder that ``fedkeep export`` wrote: the shared part alone.

    What is private has the values that a new client begins with.

    Raises:
        RunError: the folder holds no models, or is damaged.
        ConfigError: it comes from a run without a configuration, or private values began as word vectors of a file.
        MethodError: the method's shared part cannot predict alone, or differs between clients.
    """
    place, info = Path(folder), _info(folder)
    module, method = _module(place, info, None)
    assert method is not None
    if method.predict_shared is None:
        raise MethodError(
            f"The shared part of {method.name!r} cannot predict alone. Take clients' own models (--client ID), or fit "
            f"new clients': fedkeep export RUN --client ID --adapt."
        )
    config, net = exported_config(place), Net(module)
    begins = first_kept(method, net)
    if config.model.word_vectors and set(begins) & {
        n for n, c in getattr(module, "lookup", {}).items() if c == "text"
    }:
        raise ConfigError(
            f"The private part began as the vectors of {config.model.word_vectors}, which {place} does not hold. Take "
            f"clients' own models (--client ID)."
        )
    values = load_verified(place / SHARED, info["shared"]) | begins
    if missing := [n for n in tensors_of(module) if n not in values]:
        raise MethodError(
            f"{place} holds no shared value of {missing[0]!r}: clients of {method.name!r} are sent different ones. "
            f"Take clients' own models (--client ID)."
        )
    state = {n: v for n, v in values.items() if is_state(n)}
    found = {n: values[n] for n in tensors_of(module)}
    module.load_state_dict({**module.state_dict(), **net.placed(found)})
    plain = method.predict_shared is forward
    return (
        module if plain else PersonalModel(module, replace(method, predict=method.predict_shared), state)
    ).eval()


def exported_clients(folder: Path | str) -> list[str]:
    """Return the ids of the clients whose models a folder holds.

    Raises:
        RunError: the folder holds no models, or is damaged.
    """
    return list(_info(folder)["clients"])


def exported_config(folder: Path | str) -> Config:
    """Return the configuration that exported models were trained by.

    Raises:
        RunError: the folder holds no models, or is damaged.
        ConfigError: they come from a run without a configuration.
    """
    from fedkeep.experiments.config import parse_config

    if not (text := _info(folder)["config"]):
        raise ConfigError(
            f"{folder} comes from a run without a configuration, so its module is not known here. Load its models in "
            f"Python: fedkeep.load_model({str(folder)!r}, ID, model=MyModule())."
        )
    return parse_config(text, f"{Path(folder) / INFO}")


def load_encoding(folder: Path | str) -> Encoding:
    """Return how the data became numbers that exported models were trained on.

    Its ``batch(**columns)`` gives new examples as the models take them; its ``meta["label_names"]`` the classes' names.

    Args:
        folder: the folder that ``fedkeep export`` wrote.

    Raises:
        RunError: the folder holds no models, or is damaged.
        ConfigError: the data were numbers already when they came, and no configuration says more of them.
    """
    from fedkeep.data.preparation import Encoding

    info = _info(folder)
    if not info["encoding"]:
        raise ConfigError(
            f"{folder} keeps no encoding: its models were trained on numbers that your program made. Make numbers of "
            f"new examples as it did."
        )
    return Encoding.from_json(info["encoding"], f"The encoding in {Path(folder) / INFO}")


def _info(folder: Path | str) -> dict[str, Any]:
    place = Path(folder)
    if not (place / INFO).exists():
        raise RunError(
            f"{place} holds no exported models: there is no {INFO} in it. Write it with fedkeep export."
        )
    return read_sealed(place / INFO)


def _module(place: Path, info: Mapping[str, Any], model: nn.Module | None) -> tuple[nn.Module, Method | None]:
    """Return the module without its values, and the method where a configuration names it."""
    if not info["config"]:
        if model is None:
            raise ConfigError(
                f"{place} comes from a run without a configuration, so its module is not known here: give it, "
                f"load_model(..., model=MyModule())."
            )
        return copy.deepcopy(model), None
    from fedkeep.data.preparation import Encoding
    from fedkeep.experiments.build import build_method, build_model

    config = exported_config(place)
    bare = config.model_copy(update={"model": config.model.model_copy(update={"word_vectors": None})})
    method = build_method(config.method)
    return method.made_for(build_model(bare, Encoding.from_json(info["encoding"]))), method
