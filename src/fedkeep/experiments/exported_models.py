"""Clients' personalised models as files: what ``fedkeep export`` writes, and what reads it.

    model.json                  the configuration, the data's encoding, the clients, and the hash of every file
    shared.safetensors          what the models have in common, once
    clients/HASH.safetensors    what is one client's own, under the module's names; a method's state beside it
    clients/HASH.onnx           where it is wanted: one client's whole model

Nothing is pickled. The folder appears whole, or not at all. ``Exported`` opens it once: what its models have in common
is read a single time, however many are loaded.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from fedkeep.core.copying import copied
from fedkeep.core.declared import declared
from fedkeep.core.describe import check_kind, describe, differences
from fedkeep.core.errors import ConfigError, MethodError, RunError, did_you_mean, warn
from fedkeep.core.files import (
    beside,
    check_tensors,
    expanded,
    layout,
    load_verified,
    state_name,
    sync_folder,
    sync_tree,
)
from fedkeep.core.heads import Head
from fedkeep.core.net import Net, tensors_of
from fedkeep.core.params import SERVER, Params, is_state, prefixed
from fedkeep.core.run_files import read_info
from fedkeep.core.sealed import FORMAT, read_sealed, sealed_bytes
from fedkeep.data.ids import SomeIds, as_id
from fedkeep.engines.first_values import first_kept
from fedkeep.experiments.personalize import AdaptedRun, adapt_clients
from fedkeep.experiments.run import Run, as_module, check_module
from fedkeep.methods import Method
from fedkeep.methods.base import forward
from fedkeep.version import __version__

if TYPE_CHECKING:
    from fedkeep.data.preparation import Encoding
    from fedkeep.experiments.config import Config

INFO, SHARED = "model.json", "shared.safetensors"


class Exported:
    """A folder of exported models, opened: ``model.json``, the shared values and the bare module are read once.

    Args:
        folder: what ``fedkeep export`` wrote.
        model: the module, as its method made it for training, where the run had no configuration; it is copied.
        method: the method that it was trained by; where the module predicts by itself it may be left out.

    Attributes:
        name, advice: what messages call it, and what they say to do where a client has no model there.

    Raises:
        RunError: the folder holds no models, or is damaged.
    """

    advice = "Export their models: fedkeep export RUN --client ID --adapt --out DIR"

    def __init__(
        self, folder: Path | str, model: nn.Module | None = None, method: Method | None = None
    ) -> None:
        self.folder, self._given = expanded(folder), (model, method)
        self.name = str(self.folder)
        if not (self.folder / INFO).exists():
            raise RunError(
                f"{self.folder} holds no exported models: there is no {INFO} in it. Write it with fedkeep export."
            )
        self.info: Mapping[str, Any] = read_sealed(self.folder / INFO)

    @property
    def clients(self) -> Mapping[str, str]:
        """By the id of each client whose model is there, its file's hash."""
        found: Mapping[str, str] = self.info["clients"]
        return found

    @cached_property
    def config(self) -> Config:
        """The configuration that the models were trained by.

        Raises:
            ConfigError: they come from a run without a configuration.
        """
        from fedkeep.experiments.config import parse_config

        if not (text := self.info["config"]):
            raise ConfigError(
                f"{self.folder} comes from a run without a configuration, so its module is not known here. Load its "
                f"models in Python: fedkeep.load_model({str(self.folder)!r}, ID, model=MyModule())."
            )
        return parse_config(text, f"{self.folder / INFO}")

    @cached_property
    def encoding(self) -> Encoding:
        """How the data became numbers that the models were trained on.

        Raises:
            ConfigError: the data were numbers already when they came, and no configuration says more of them.
        """
        from fedkeep.data.preparation import Encoding

        if not self.info["encoding"]:
            raise ConfigError(
                f"{self.folder} keeps no encoding: its models were trained on numbers that your program made. Make "
                f"numbers of new examples as it did."
            )
        return Encoding.from_json(self.info["encoding"], f"The encoding in {self.folder / INFO}")

    def model(self, client: str | int) -> nn.Module:
        """Return a client's model, ready to predict.

        Raises:
            RunError: there is none of this client, or a file is damaged.
            DataError: the client's id is none.
            ConfigError: ``model`` is missing, or another one than was trained.
        """
        client = as_id(client)
        if client not in self.clients:
            raise RunError(
                f"{self.folder} holds no model of {client!r} ({len(self.clients)} clients)."
                f"{did_you_mean(client, self.clients)}"
            )
        path = self.folder / "clients" / state_name(client)
        values = self._shared | load_verified(path, self.clients[client])
        bare, method = self._bare
        wanted, found = layout(tensors_of(bare)), {n: v for n, v in values.items() if not is_state(n)}
        if not self.info["config"] and (lines := differences(wanted, layout(found), "model")):
            shown = "\n  ".join(lines[:8])
            raise ConfigError(
                f"The {type(bare).__name__} that was given is another module than was trained:\n  {shown}\n"
                f"Give one that is made as it was for the run."
            )
        check_tensors(path, wanted, layout(found), found)
        return as_module(bare, method, values)

    def shared(self) -> nn.Module:
        """Return the model of nobody in particular: the shared part alone.

        What is private has the values that a new client begins with.

        Raises:
            RunError: a file is damaged.
            ConfigError: the run had no configuration, or private values began as word vectors of a file.
            MethodError: the method's shared part cannot predict alone, or differs between clients.
        """
        config = self.config
        bare, method = self._bare
        assert method is not None
        if method.predict_shared is None:
            raise MethodError(
                f"The shared part of {method.name!r} cannot predict alone. Take clients' own models (--client ID), or "
                f"fit new clients': fedkeep export RUN --client ID --adapt."
            )
        begins = first_kept(method, Net(bare))
        if config.model.word_vectors and set(begins) & {
            n for n, c in declared(bare).lookup.items() if c == "text"
        }:
            raise ConfigError(
                f"The private part began as the vectors of {config.model.word_vectors}, which {self.folder} does not "
                f"hold. Take clients' own models (--client ID)."
            )
        values = self._shared | begins
        if missing := [n for n in tensors_of(bare) if n not in values]:
            raise MethodError(
                f"{self.folder} holds no shared value of {missing[0]!r}: clients of {method.name!r} are sent different "
                f"ones. Take clients' own models (--client ID)."
            )
        known = {n: v for n, v in values.items() if is_state(n) or n in tensors_of(bare)}
        return as_module(bare, method.but(predict=method.predict_shared), known)

    @cached_property
    def _shared(self) -> Params:
        return load_verified(self.folder / SHARED, self.info["shared"])

    @cached_property
    def _bare(self) -> tuple[nn.Module, Method | None]:
        """The module without its values, and the method where a configuration names it."""
        if not self.info["config"]:
            model, method = self._given
            if model is None:
                raise ConfigError(
                    f"{self.folder} comes from a run without a configuration, so its module is not known here: give "
                    f"it, load_model(..., model=MyModule())."
                )
            if self.info["predicts"] and method is None:
                raise ConfigError(
                    f"{self.info['method']!r} predicts in a way of its own: give the method of the run too, "
                    f"load_model(..., model=MyModule(), method=methods.{self.info['method']}(...))."
                )
            if method is not None and (lines := differences(self.info["predicts"], told_of(method))):
                raise ConfigError(
                    f"The method that was given predicts otherwise than the run's: {'; '.join(lines[:8])}."
                )
            return model, method
        from fedkeep.experiments.build import build_method, build_model

        config = self.config
        bare = config.model_copy(update={"model": config.model.model_copy(update={"word_vectors": None})})
        model = build_model(bare, self.encoding)
        method = fitting(self.info, model, build_method(config.method))
        return method.made_for(model), method


def fitting(info: Mapping[str, Any], model: nn.Module, method: Method) -> Method:
    """Return a method with the names that the run found for a model's parts."""
    known = info.get("head")
    return (method if known is None else method.but(head=Head(**known))).fitted(model)


def told_of(method: Method) -> Any:
    """Return what tells how a method's models predict; nothing where they do by themselves."""
    plain = method.predict is forward and method.extend is None
    return {} if plain else {"predict": describe(method.predict), "extend": describe(method.extend)}


def load_model(
    folder: Path | str, client: str | int, *, model: nn.Module | None = None, method: Method | None = None
) -> nn.Module:
    """Return a client's personalised model from a folder that ``fedkeep export`` wrote, ready to predict.

    Args:
        folder: the folder.
        client: the client's id.
        model: the module that was trained, where the run was made without a configuration; it is copied.
        method: the method that it was trained by, where that adds to the module or predicts in a way of its own.

    Returns:
        A module in evaluation mode. It takes the data's columns by name, first axis examples; a module of torch's own
        takes them as it does.

    Raises:
        RunError: the folder holds no models, none of this client, or is damaged.
        DataError: the client's id is none.
        ConfigError: ``model`` or ``method`` is missing, is none, or another one than was trained.
    """
    if model is not None:
        check_kind("model", model, nn.Module, "a torch.nn.Module")
    if method is not None:
        check_kind("method", method, Method, "a method, e.g. fedkeep.methods.mixture()")
    if model is not None and method is not None:
        method = fitting(Exported(folder).info, model, method)
        model = method.made_for(model)
    return Exported(folder, model, method).model(client)


def load_encoding(folder: Path | str) -> Encoding:
    """Return how the data became numbers that exported models were trained on.

    Its ``batch(**columns)`` gives new examples as the models take them; its ``meta["label_names"]`` the classes' names.

    Args:
        folder: the folder that ``fedkeep export`` wrote.

    Raises:
        RunError: the folder holds no models, or is damaged.
        ConfigError: the data were numbers already when they came, and no configuration says more of them.
    """
    return Exported(folder).encoding


def export_models(
    run: Run,
    folder: Path | str,
    clients: Iterable[str | int] | None = None,
    *,
    adapt: bool = False,
    onnx: bool = False,
    config: str | None = None,
) -> list[str]:
    """Write clients' personalised models into a new folder.

    Args:
        run: a run, or what ``adapt_clients`` made of it.
        folder: must not exist.
        clients: their ids; by default of all that took part in federation.
        adapt: fit what is a client's own on all of its examples first, as ``fedkeep personalize`` does.
        onnx: write each client's model as ONNX too, computed by onnxruntime and compared with torch's numbers.
        config: the configuration that the models follow, as TOML; None: the one that the run's folder keeps.

    Returns:
        The clients' ids.

    Raises:
        RunError: the folder exists or cannot be written.
        MethodError: the method's models cannot be written to files.
        DataError: there is no such client.
        ConfigError: a client was held out of federation and is not adapted; a package for ONNX is missing.
    """
    out, chosen = expanded(folder), run.members(clients)
    check_module(run.method)
    config = _config_text(run) if config is None else config
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

            bare = None if config else copied(run.net.module).cpu()
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
        warn(
            f"Clients of {method.name!r} get models of their own by adapting, so each file holds the shared model. "
            f"--adapt (adapt=True) fits each client's."
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
    if not entries:
        shared = {n: v for n, v in whole.items() if not (plain and is_state(n))}
    info = {
        "kind": "personalised models",
        "format": FORMAT,
        "fedkeep": __version__,
        "method": run.method.name,
        "predicts": told_of(run.method),
        "head": None if run.method.head is None else asdict(run.method.head),
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
