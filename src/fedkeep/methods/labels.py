"""What a loss asks of a batch's labels and of a model's output, and what it says where these do not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fedkeep.core.errors import MethodError, did_you_mean
from fedkeep.core.params import Batch

HIDDEN = "last_hidden_state"
"""What transformers' models without a head return, which is no prediction."""
OTHERS = "For numbers, or labels of tokens, take a method that knows no classes, e.g. fedper or ditto."


def label_of(batch: Batch, column: str) -> Tensor:
    """Return the column that a loss compares with.

    Raises:
        MethodError: the batch lacks it.
    """
    if column not in batch:
        raise MethodError(
            "The loss wants the column {column!r}; the data have {there}.{near} Name "
            "it so, or say in the loss which column it is, e.g. fedkeep.methods.terms.cross_entropy('COLUMN').",
            column=column,
            there=sorted(batch),
            near=did_you_mean(column, batch),
        )
    return batch[column]


def class_of(batch: Batch, column: str) -> Tensor:
    """Return the classes of a batch's examples, (B,), for a method that is made for these.

    Raises:
        MethodError: the batch lacks the column, or holds numbers, or a label for each token.
    """
    label = label_of(batch, column)
    if label.dim() != 1 or label.is_floating_point():
        kind = f"{str(label.dtype).removeprefix('torch.')} of shape {tuple(label.shape)}"
        raise MethodError(
            "This method wants one class for each example as {column!r}; got {kind}. {others}",
            column=column,
            kind=kind,
            others=OTHERS,
        )
    return label


def check_rows(logits: Tensor) -> None:
    """Raise MethodError unless a model gave a row of logits for each example, to a method that is made for these."""
    if logits.dim() != 2:
        raise MethodError(
            "This method wants logits of shape (B, classes); the model gave {got}. {others}",
            got=tuple(logits.shape),
            others=OTHERS,
        )


def output_of(output: Any, task: str | None) -> Tensor:
    """Return the tensor that a model gave for a task (or for its only one): ``logits``, or the only output.

    Raises:
        MethodError: there is no such output, or it is no tensor.
    """
    if not isinstance(output, Tensor) and isinstance(output, Mapping):
        if task is None:
            task = next(iter(output)) if len(output) == 1 and HIDDEN not in output else "logits"
        if task not in output:
            missing = f"the loss asks for task {task!r}."
            if task == "logits":
                some = min(output, default="scores")
                missing = (
                    f"'logits' is missing, which the loss takes. Take a model with a head; or say in the loss which "
                    f"output it is, e.g. cross_entropy(task={some!r}), and in the data which is judged, e.g. "
                    f"meta['tasks'] = {{{some!r}: {{'task': 'multiclass', 'label': 'label'}}}}."
                )
            raise MethodError(
                "The model returns outputs for {there}; {missing}", there=sorted(output), missing=missing
            )
        output = output[task]
    if not isinstance(output, Tensor):
        raise MethodError(
            "The model returned a {got}; the loss wants a tensor, a tuple that begins with one, an "
            "output with 'logits', or a dict of tensors by task.",
            got=type(output).__name__,
        )
    return output
