"""Using a client's model, wherever it comes from: a run, exported files, a device.

``as_module`` puts a client's values into a module that predicts as the method says. ``predictions`` is the one path from
it to labels with probabilities, or numbers: of examples in numbers, and their encoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep.core.copying import copied
from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net, Takes, float_type, logits_of, tensors_of
from fedkeep.core.params import Params, is_state
from fedkeep.data.federated import FederatedData
from fedkeep.data.preparation import Encoding, Ready
from fedkeep.data.preparation.feature_columns import TargetsCode
from fedkeep.data.preparation.label_columns import LabelCode
from fedkeep.engines.batches import load_batch
from fedkeep.engines.lanes import MODEL_ERRORS, columns_of, model_error
from fedkeep.methods import Method
from fedkeep.methods.base import forward
from fedkeep.methods.labels import output_of
from fedkeep.tasks import Task, tasks_in

BLOCK = 32
"""Rows that are computed at once, always: so a row's numbers hang neither on how many there are nor on the others."""


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


def as_module(bare: nn.Module, method: Method | None, values: Params) -> nn.Module:
    """Return a copy of a module with one client's values, ready to predict as its method says.

    Args:
        bare: the module, as ``Method.made_for`` made it.
        method: None: the module predicts by itself.
        values: of all of the module's tensors, and the method's state beside them.
    """
    module, state = copied(bare), {n: v for n, v in values.items() if is_state(n)}
    found = {n: v for n, v in values.items() if n not in state}
    module.load_state_dict({**module.state_dict(), **Net(module).placed(found)})  # what is no tensor stays
    if method is None or method.predict is forward:
        return module.eval()
    return PersonalModel(module, method, state).eval()


@dataclass(frozen=True)
class Prediction:
    """What a model says of one row for one task.

    Attributes:
        task: its name; None where there is one without a name.
        value: the label of the likeliest class, or a number, or several labels or numbers.
        probabilities: of each label; empty for numbers.
        names: of several numbers, where they have any.
    """

    task: str | None
    value: str | float | list[float] | list[str]
    probabilities: dict[str, float]
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Predicted:
    """A row's predictions, one for each task, and whose model made them; None: the shared one."""

    client: str | None
    tasks: tuple[Prediction, ...]


def predictions(
    model: nn.Module, data: FederatedData, encoding: Encoding, rows: Sequence[int] | None = None
) -> Iterator[tuple[Prediction, ...]]:
    """Yield what a model says of each example, one prediction for each task.

    Args:
        model: as :func:`as_module` gives it.
        data: the examples in numbers.
        encoding: names the tasks and their labels.
        rows: their numbers; None: all.

    Raises:
        MethodError: there is a task that gives neither classes nor numbers, or the model fails on the examples.
    """
    kind, takes, tasks = float_type(model), takes_of(model), said_tasks(encoding)
    chosen = np.arange(data.examples) if rows is None else np.asarray(rows, np.int64)
    for start in range(0, len(chosen), BLOCK):
        block = chosen[start : start + BLOCK]
        batch = load_batch(data, np.resize(block, BLOCK), place_of(model), kind)
        given = batch if isinstance(model, PersonalModel) else takes.of(batch)
        try:
            with torch.no_grad():
                output = logits_of(model(**given))
        except MODEL_ERRORS as error:
            whose = f"The examples to predict, from row {block[0]} on"
            raise model_error(whose, len(block), error, columns=columns_of(batch)) from error
        said = [_said(output_of(output, task.name)[: len(block)], task, encoding) for task in tasks]
        yield from zip(*said, strict=True)


def encoding_of(data: FederatedData) -> Encoding:
    """Return what data say of themselves, and how their columns came to be numbers."""
    found, agreed = Encoding.of(Ready(data=data).summary()), data.meta.get("encoded_by")
    if agreed is None:
        return found
    codes = Encoding.from_json(agreed, "The data's encoding").columns
    return replace(found, columns={**found.columns, **codes})


def said_tasks(encoding: Encoding) -> list[Task]:
    """Return the tasks of data, which all give classes or numbers.

    Raises:
        MethodError: one does not.
    """
    tasks = tasks_in(encoding.meta)
    for task in tasks:
        if task.kind.says is None:
            raise MethodError(
                "Predictions are classes or numbers; these models were trained for {task!r}. Call the model "
                "itself in Python: run.model(ID), or fedkeep.load_model(DIR, ID).",
                task=task.kind.name,
            )
    return list(tasks)


def place_of(model: nn.Module) -> str:
    """Return the device that a model is on."""
    return next((str(t.device) for t in tensors_of(model).values()), "cpu")


def takes_of(model: nn.Module) -> Takes:
    """Return which columns a client's model takes."""
    module = getattr(model, "module", model)
    return Takes(f"{type(module).__name__}.forward", module.forward)


def _said(output: Tensor, task: Task, encoding: Encoding) -> list[Prediction]:
    """Return a task's predictions from its outputs."""
    assert task.kind.says is not None
    code = encoding.columns.get(task.label)
    names = code.names if isinstance(code, LabelCode | TargetsCode) else encoding.about.label_names or ()
    outputs = tuple(names) if task.kind.several and not task.kind.whole else ()
    return [
        Prediction(task.name, value, shares, outputs)
        for value, shares in task.kind.says(task.in_units(output), names)
    ]
