"""Clients' personalised models as files: ``export_models`` writes them; ``load_model`` and ``Exported`` read them.

    model.json                  the configuration, the data's encoding, the clients, and the hash of every file
    shared.safetensors          what the models have in common, once
    clients/HASH.safetensors    what is one client's own, under the module's names; a method's state beside it
    clients/HASH.onnx           where it is wanted: one client's whole model

Nothing is pickled. The folder appears whole, or not at all. ``Exported`` opens it once: what its models have in common
is read a single time, however many are loaded.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fedkeep.core.declared import declared
from fedkeep.core.describe import check_kind, check_same, describe, differences
from fedkeep.core.errors import ConfigError, MethodError, RunError, did_you_mean, near_path, some_of, warn
from fedkeep.core.files import (
    beside,
    check_tensors,
    expanded,
    keep_private,
    layout,
    load_verified,
    state_name,
    sync_folder,
    sync_tree,
    tensor_file,
)
from fedkeep.core.heads import Head
from fedkeep.core.net import Net, tensors_of
from fedkeep.core.params import SERVER, Params, is_state, prefixed, to
from fedkeep.core.run_files import read_info
from fedkeep.core.sealed import FORMAT, read_sealed, sealed_bytes
from fedkeep.data.ids import as_id
from fedkeep.engines.first_values import first_kept
from fedkeep.engines.use import Predicted, as_module, encoding_of
from fedkeep.experiments.new_rows import predict_rows
from fedkeep.experiments.onnx_files import write_onnx
from fedkeep.methods import Method
from fedkeep.methods.base import forward
from fedkeep.nn.adapters import save_adapter
from fedkeep.version import __version__

if TYPE_CHECKING:
    from fedkeep.data.preparation import Encoding
    from fedkeep.experiments.config import Config
    from fedkeep.experiments.run import Run

INFO, SHARED = "model.json", "shared.safetensors"
"""Files of a folder of exported models."""


def export_models(
    run: Run,
    folder: Path | str,
    clients: Iterable[str | int] | None = None,
    *,
    onnx: bool = False,
    peft: bool = False,
    config: str | None = None,
) -> list[str]:
    """Write clients' models into a new folder; see ``Run.export``.

    Args:
        run, folder, clients, onnx: as there.
        peft: also write each client's adapter as ``save_adapter`` does, in ``clients/NAME.peft``.
        config: the configuration that the models follow, as TOML; None: the one that the run's folder keeps.
    """
    out = expanded(folder)
    given = clients if clients is None or isinstance(clients, str | int) else list(clients)
    new = _new_in(run, given)
    rest = [c for c in given if as_id(c) not in new] if new else given  # type: ignore[union-attr]
    chosen = [*run.members(rest), *new]
    if config is None:
        info = {} if run.folder is None or not (run.folder / "run.json").exists() else read_info(run.folder)
        config = str(info.get("config_text") or "") if info.get("config") else ""
    _check(run, chosen)
    if out.exists():
        raise RunError(
            "{out} already exists; it is not overwritten. Move it, or name another folder.", out=out
        )
    part = beside(out.absolute())
    try:
        (part / "clients").mkdir(parents=True)
        _write(run, part, chosen, config)
        if onnx:
            for name in chosen:
                path = (part / "clients" / state_name(name)).with_suffix(".onnx")
                write_onnx(run.model(name).cpu(), run.data, max(0, run.data.ids.position(name)), path)
        for name in chosen if peft else ():
            save_adapter(run.model(name).cpu(), (part / "clients" / state_name(name)).with_suffix(".peft"))
        keep_private(part)
        sync_tree(part)
        os.rename(part, out)
        sync_folder(out.absolute().parent)
    except OSError as error:
        raise RunError("Cannot write {out}: {why}.", out=out, why=error.strerror or error) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return chosen


def _new_in(run: Run, clients: Sequence[str | int] | str | int | None) -> list[str]:
    """Return the clients among these who were fitted on other data than the run's, each once."""
    if clients is None or isinstance(clients, str | int):
        return []
    return [c for c in dict.fromkeys(map(as_id, clients)) if c in run.fitted and run.data.ids.position(c) < 0]


def _check(run: Run, chosen: Sequence[str]) -> None:
    """Raise ConfigError where a client has nothing of its own yet; warn where what it has was never trained."""
    if run.method.adapt.everyone:
        return
    late = set(chosen) & set(run.held_out) - set(run.fitted)
    for client in late if run.method.adapt.phases else ():  # without a phase it has what it ever will
        raise ConfigError(
            "{client!r} was held out of federation, so it has no values of its own yet. Fit them on its examples: "
            "run.fit([{client!r}]), on the command line fedkeep personalize RUN --client {client}.",
            client=client,
        )
    rest = [client for client in chosen if client not in run.fitted]
    if not rest or run.published is not None:
        return
    if not run.round:
        warn("No round was trained: what is written are the model's initial values.")
    elif run.private.default.initial:
        drawn = run.private.seen([run.data.index(client) for client in rest])
        if never := [client for client, was in zip(rest, drawn, strict=True) if not was]:
            warn(
                f"{len(never)} of {len(rest)} clients were never drawn, such as {never[0]!r}: their private values were never "
                f"trained. Train more rounds, or fit them first: run.fit([{never[0]!r}])."
            )


def _write(run: Run, part: Path, chosen: Sequence[str], config: str) -> None:
    plain = run.method.predict is forward
    frozen = run.method.split.halves(run.net.module).frozen(run.net.initial())
    whole = {**frozen, **run.server, **prefixed(SERVER, run.state)}
    shared: Params = {}
    entries = {}
    for name in chosen:
        values = to(run.values(name), "cpu")
        own = run.own(name)
        if plain:
            values = {n: v for n, v in values.items() if not is_state(n)}
        same = {n for n in values.keys() & whole.keys() - own.keys() if torch.equal(values[n], whole[n])}
        shared |= {n: values[n] for n in same}
        content = {n: v for n, v in values.items() if n not in same}
        file, entries[name] = tensor_file(content)
        (part / "clients" / state_name(name)).write_bytes(file)
    if not entries or run.method.server.send is None:  # for people without a model, too
        shared |= {n: v for n, v in whole.items() if not (plain and is_state(n))}
    file, sha256 = tensor_file(shared)
    (part / SHARED).write_bytes(file)
    info = {
        "kind": "personalised models",
        "format": FORMAT,
        "fedkeep": __version__,
        "method": run.method.name,
        "predicts": told_of(run.method),
        "head": None if run.method.head is None else asdict(run.method.head),
        "round": run.round,
        "config": config,
        "encoding": encoding_of(run.data).to_json() if config or run.data.meta.get("encoded_by") else "",
        "shared": sha256,
        "clients": entries,
    }
    (part / INFO).write_bytes(sealed_bytes(info))


def told_of(method: Method) -> Any:
    """Return what tells how a method's models predict; nothing where they do by themselves."""
    plain = method.predict is forward and method.extend is None
    return {} if plain else {"predict": describe(method.predict), "extend": describe(method.extend)}


class Exported:
    """A folder of exported models, opened: ``model.json``, the shared values and the bare module are read once.

    Args:
        folder: what ``fedkeep export`` wrote.
        model, method: what was trained, and by which method, where the run had no configuration; see ``load_model``.

    Attributes:
        name, advice: what messages call it, and what they say to do where a client has no model there.

    Raises:
        RunError: the folder holds no models, or is damaged.
    """

    advice = (
        "Fit and export their models: fedkeep personalize RUN --client ID, or for somebody new --new FILE; then fedkeep "
        "export"
    )

    def __init__(
        self, folder: Path | str, model: nn.Module | None = None, method: Method | None = None
    ) -> None:
        self.folder, self._given = expanded(folder), (model, method)
        self.name = str(self.folder)
        if not (self.folder / INFO).exists():
            raise RunError(
                "There are no exported models in {folder}: {advice}",
                folder=self.folder,
                advice=_to_export(self.folder),
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
                "{folder} comes from a run without a configuration, so its module is not known here. Load its "
                "models in Python: fedkeep.load_model('{folder}', ID, model=MyModule()).",
                folder=self.folder,
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
                "{folder} keeps no encoding: its models were trained on numbers that your program made. Make "
                "numbers of new examples as it did.",
                folder=self.folder,
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
                "{folder} holds no model of {client!r}; there are {clients:,}, such as {some}.{near}",
                folder=self.folder,
                client=client,
                clients=len(self.clients),
                some=some_of(self.clients),
                near=did_you_mean(client, self.clients),
            )
        path = self.folder / "clients" / state_name(client)
        values = self._shared | load_verified(path, self.clients[client])
        bare, method = self._bare
        wanted, found = layout(tensors_of(bare)), {n: v for n, v in values.items() if not is_state(n)}
        check_same(
            [] if self.info["config"] else differences(wanted, layout(found), "model"),
            ConfigError,
            "The {kind} that was given is another module than was trained:\n  {lines}\nGive one that is made as it was "
            "for the run.",
            kind=type(bare).__name__,
        )
        check_tensors(path, wanted, layout(found), found)
        return as_module(bare, method, values)

    def predict(self, client: str | int, rows: Any) -> list[Predicted]:
        """Return what a client's model says of new examples, as ``Run.predict``."""
        return predict_rows(self.model(client), rows, self.encoding, as_id(client))

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
                "The shared part of {method!r} cannot predict alone. Take clients' own models (--client ID), or "
                "fit new clients': fedkeep personalize RUN --client ID.",
                method=method.name,
            )
        begins = first_kept(method, Net(bare))
        if config.model.word_vectors and set(begins) & {
            n for n, c in declared(bare).lookup.items() if c == "text"
        }:
            raise ConfigError(
                "The private part began as the vectors of {word_vectors}, which {folder} does not "
                "hold. Take clients' own models (--client ID).",
                word_vectors=config.model.word_vectors,
                folder=self.folder,
            )
        values = self._shared | begins
        if missing := [n for n in tensors_of(bare) if n not in values]:
            raise MethodError(
                "{folder} holds no shared value of {name!r}: clients of {method!r} are sent different "
                "ones. Take clients' own models (--client ID).",
                folder=self.folder,
                name=missing[0],
                method=method.name,
            )
        known = {n: v for n, v in values.items() if is_state(n) or n in tensors_of(bare)}
        return as_module(bare, method.but(predict=method.predict_shared), known)

    @cached_property
    def _shared(self) -> Params:
        return load_verified(self.folder / SHARED, self.info["shared"])

    @cached_property
    def _bare(self) -> tuple[nn.Module, Method | None]:
        """The module without its values, and the method where it is known."""
        own, (model, method) = bool(self.info["config"]), self._given
        if own:
            from fedkeep.experiments.build import build_method, build_model, settled

            config = settled(self.config, self.encoding)
            bare = config.model_copy(update={"model": config.model.model_copy(update={"word_vectors": None})})
            model, method = build_model(bare, self.encoding), build_method(config.method)
        if model is None:
            raise ConfigError(
                "{folder} comes from a run without a configuration, so its module is not known here: give "
                "it, load_model(..., model=MyModule()).",
                folder=self.folder,
            )
        if method is None:
            if self.info["predicts"]:
                raise ConfigError(
                    "{method!r} predicts in a way of its own: give the method of the run too, "
                    "load_model(..., model=MyModule(), method=methods.{method}(...)).",
                    method=self.info["method"],
                )
            return model, None
        known = self.info.get("head")
        method = (method if known is None else method.but(head=Head(**known))).resolved(model)
        check_same(
            [] if own else differences(self.info["predicts"], told_of(method)),
            ConfigError,
            "The method that was given predicts otherwise than the run's:\n  {lines}",
        )
        return method.made_for(model), method


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


def _to_export(folder: Path) -> str:
    """Return how to come by exported models, where a folder holds none."""
    if (folder / "run.json").is_file():
        return f"it holds a run, whose models are written by fedkeep export {folder} --all --out FOLDER."
    what = f"it holds no {INFO}." if folder.exists() else f"there is no such folder.{near_path(folder)}"
    return f"{what} fedkeep export RUN --all --out FOLDER writes one, in Python run.export(FOLDER, [ID])."
