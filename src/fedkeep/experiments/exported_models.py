"""Clients' personalised models as files: what ``fedkeep export`` writes, and what reads it.

    model.json                  the configuration, the data's encoding, the clients, and the hash of every file
    shared.safetensors          what the models have in common, once
    clients/HASH.safetensors    what is one client's own, under the module's names; a method's state beside it
    clients/HASH.onnx           where it is wanted: one client's whole model

Nothing is pickled. The folder appears whole, or not at all. ``Exported`` opens it once: what its models have in common
is read a single time, however many are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fedkeep.core.declared import declared
from fedkeep.core.describe import check_kind, check_same, differences
from fedkeep.core.errors import ConfigError, MethodError, RunError, did_you_mean, near_path, some_of
from fedkeep.core.files import (
    check_tensors,
    expanded,
    layout,
    load_verified,
    state_name,
)
from fedkeep.core.heads import Head
from fedkeep.core.net import Net, tensors_of
from fedkeep.core.params import Params, is_state
from fedkeep.core.sealed import read_sealed
from fedkeep.data.ids import as_id
from fedkeep.engines.first_values import first_kept
from fedkeep.engines.use import Predicted, as_module
from fedkeep.experiments.new_rows import predict_rows
from fedkeep.experiments.run import INFO, SHARED, told_of
from fedkeep.methods import Method

if TYPE_CHECKING:
    from fedkeep.data.preparation import Encoding
    from fedkeep.experiments.config import Config


def _to_export(folder: Path) -> str:
    """Return how to come by exported models, where a folder holds none."""
    if (folder / "run.json").is_file():
        return f"it holds a run, whose models are written by fedkeep export {folder} --all --out FOLDER."
    what = f"it holds no {INFO}." if folder.exists() else f"there is no such folder.{near_path(folder)}"
    return f"{what} fedkeep export RUN --all --out FOLDER writes one, in Python run.export(FOLDER, [ID])."


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
        """The module without its values, and the method where a configuration names it."""
        if not self.info["config"]:
            model, method = self._given
            if model is None:
                raise ConfigError(
                    "{folder} comes from a run without a configuration, so its module is not known here: give "
                    "it, load_model(..., model=MyModule()).",
                    folder=self.folder,
                )
            if self.info["predicts"] and method is None:
                raise ConfigError(
                    "{method!r} predicts in a way of its own: give the method of the run too, "
                    "load_model(..., model=MyModule(), method=methods.{method}(...)).",
                    method=self.info["method"],
                )
            if method is not None:
                check_same(
                    differences(self.info["predicts"], told_of(method)),
                    ConfigError,
                    "The method that was given predicts otherwise than the run's:\n  {lines}",
                )
            return model, method
        from fedkeep.experiments.build import build_method, build_model, settled

        config = settled(self.config, self.encoding)
        bare = config.model_copy(update={"model": config.model.model_copy(update={"word_vectors": None})})
        model = build_model(bare, self.encoding)
        method = fitting(self.info, model, build_method(config.method))
        return method.made_for(model), method


def fitting(info: Mapping[str, Any], model: nn.Module, method: Method) -> Method:
    """Return a method with the names that the run found for a model's parts."""
    known = info.get("head")
    return (method if known is None else method.but(head=Head(**known))).fitted(model)


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
