"""Clients' personalised models, read from the files that ``fedkeep export`` wrote.

``Exported`` opens a folder once: what its models have in common is read a single time, however many are loaded.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fedkeep.core.describe import check_kind, differences
from fedkeep.core.errors import ConfigError, MethodError, RunError, did_you_mean
from fedkeep.core.files import check_tensors, layout, load_verified, state_name
from fedkeep.core.net import Net, tensors_of
from fedkeep.core.params import Params, is_state
from fedkeep.core.sealed import read_sealed
from fedkeep.data.ids import as_id
from fedkeep.engines.job import first_kept
from fedkeep.methods import Method
from fedkeep.methods.base import forward

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
        # as buffers, whose names have no dot, they move with the module; a whole number, such as which model is the
        # client's, is none, so that the exporter of ONNX knows it
        for place, value in enumerate(state.values()):
            if value.ndim or value.is_floating_point():
                self.register_buffer(f"_state_{place}", value, persistent=False)
            else:
                setattr(self, f"_state_{place}", value)

    def forward(self, **columns: Tensor) -> Any:
        """Return what the method predicts for examples."""
        state = {name: getattr(self, f"_state_{place}") for place, name in enumerate(self._names)}
        return self._predict(self._net, {**tensors_of(self.module), **state}, columns)


class Exported:
    """A folder of exported models, opened: ``model.json``, the shared values and the bare module are read once.

    Args:
        folder: what ``fedkeep export`` wrote.
        model: the module that was trained, where the run was made without a configuration; it is copied.

    Raises:
        RunError: the folder holds no models, or is damaged.
    """

    def __init__(self, folder: Path | str, model: nn.Module | None = None) -> None:
        self.folder, self._given = Path(folder), model
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
        state = {n: v for n, v in values.items() if is_state(n)}
        bare, method = self._bare
        module = copy.deepcopy(bare)
        wanted, found = layout(tensors_of(module)), {n: v for n, v in values.items() if n not in state}
        if not self.info["config"] and (lines := differences(wanted, layout(found), "model")):
            shown = "\n  ".join(lines[:8])
            raise ConfigError(
                f"The {type(module).__name__} that was given is another module than was trained:\n  {shown}\n"
                f"Give one that is made as it was for the run."
            )
        check_tensors(path, wanted, layout(found), found)
        module.load_state_dict(
            {**module.state_dict(), **Net(module).placed(found)}
        )  # what is no tensor stays
        ready = (
            module if method is None or method.predict is forward else PersonalModel(module, method, state)
        )
        return ready.eval()

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
        module = copy.deepcopy(bare)
        assert method is not None
        if method.predict_shared is None:
            raise MethodError(
                f"The shared part of {method.name!r} cannot predict alone. Take clients' own models (--client ID), or "
                f"fit new clients': fedkeep export RUN --client ID --adapt."
            )
        net = Net(module)
        begins = first_kept(method, net)
        if config.model.word_vectors and set(begins) & {
            n for n, c in getattr(module, "lookup", {}).items() if c == "text"
        }:
            raise ConfigError(
                f"The private part began as the vectors of {config.model.word_vectors}, which {self.folder} does not "
                f"hold. Take clients' own models (--client ID)."
            )
        values = self._shared | begins
        if missing := [n for n in tensors_of(module) if n not in values]:
            raise MethodError(
                f"{self.folder} holds no shared value of {missing[0]!r}: clients of {method.name!r} are sent different "
                f"ones. Take clients' own models (--client ID)."
            )
        state = {n: v for n, v in values.items() if is_state(n)}
        found = {n: values[n] for n in tensors_of(module)}
        module.load_state_dict({**module.state_dict(), **net.placed(found)})
        plain = method.predict_shared is forward
        return (
            module if plain else PersonalModel(module, replace(method, predict=method.predict_shared), state)
        ).eval()

    @cached_property
    def _shared(self) -> Params:
        return load_verified(self.folder / SHARED, self.info["shared"])

    @cached_property
    def _bare(self) -> tuple[nn.Module, Method | None]:
        """The module without its values, and the method where a configuration names it."""
        if not self.info["config"]:
            if self._given is None:
                raise ConfigError(
                    f"{self.folder} comes from a run without a configuration, so its module is not known here: give "
                    f"it, load_model(..., model=MyModule())."
                )
            return self._given, None
        from fedkeep.experiments.build import build_method, build_model

        config = self.config
        bare = config.model_copy(update={"model": config.model.model_copy(update={"word_vectors": None})})
        method = build_method(config.method)
        return method.made_for(build_model(bare, self.encoding)), method


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
    return Exported(folder, model).model(client)


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
