"""What a loss asks of a batch's labels and of a model's output, and what it says where these do not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fedkeep.core.errors import MethodError, did_you_mean
from fedkeep.core.params import Batch
from fedkeep.core.ranking import TOP

OTHERS = "For numbers, or labels of tokens, take a method that knows no classes, e.g. fedper or ditto."


def label_of(batch: Batch, column: str) -> Tensor:
    """Return the column that a loss compares with.

    Raises:
        MethodError: the batch lacks it.
    """
    if column not in batch:
        raise MethodError(
            f"The loss wants the column {column!r}; the data have {sorted(batch)}.{did_you_mean(column, batch)} Name "
            f"it so, or say in the loss which column it is."
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
        raise MethodError(f"This method wants one class for each example as {column!r}; got {kind}. {OTHERS}")
    return label


def check_rows(logits: Tensor) -> None:
    """Raise MethodError unless a model gave a row of logits for each example, to a method that is made for these."""
    if logits.dim() != 2:
        raise MethodError(
            f"This method wants logits of shape (B, classes); the model gave {tuple(logits.shape)}. {OTHERS}"
        )


def check_regression(output: Tensor, label: Tensor) -> None:
    """Raise MethodError unless the model gave one number per example."""
    if output.shape != label.shape:
        raise MethodError(
            f"Regression wants outputs of shape (B,), one per label; the model gave {tuple(output.shape)} for labels "
            f"{tuple(label.shape)}. Squeeze the last axis: out.squeeze(-1)."
        )


def check_classes(output: Tensor) -> None:
    """Raise MethodError unless the model gave a logit for each class."""
    if output.dim() != 2 or output.shape[1] == 1:
        raise MethodError(
            f"Classes want logits of shape (B, classes), (B, 2) for a binary task; the model gave "
            f"{tuple(output.shape)}. Let its last layer have one output for each class; numbers as labels want the "
            f"loss squared_error."
        )


def check_candidates(output: Tensor) -> None:
    """Raise MethodError unless the model gave scores of so many candidates that the right one may be missed."""
    if output.dim() != 2 or output.shape[1] <= TOP:
        raise MethodError(
            f"A ranking wants scores of shape (B, candidates), of more than {TOP} candidates: it is judged by whether "
            f"the right one is among the first {TOP}. The model gave {tuple(output.shape)}. Of fewer candidates, each "
            f"is a class: say meta['task'] = 'multiclass'."
        )


def check_tokens(output: Tensor, label: Tensor) -> None:
    """Raise MethodError unless the model gave logits for each token."""
    if output.dim() != label.dim() + 1 or output.shape[:-1] != label.shape:
        raise MethodError(
            f"Labels are {tuple(label.shape)}, one for each token, so the model's logits must be (B, T, classes); it "
            f"gave {tuple(output.shape)}. Take a model with a head for tokens, or labels of shape (examples,)."
        )


def output_of(output: Any, task: str | None) -> Tensor:
    """Return the tensor that a model gave for a task (or for its only one)."""
    if isinstance(output, Mapping):
        task = "logits" if task is None and "logits" in output else task
        if task not in output:
            missing = f"the loss asks for task {task!r}."
            if task is None:
                missing = (
                    "'logits' is missing, which the loss takes. Take a model with a head, or say in the loss which "
                    "output it is, e.g. cross_entropy(task='scores')."
                )
            raise MethodError(f"The model returns outputs for {sorted(output)}; {missing}")
        output = output[task]
    if not isinstance(output, Tensor):
        raise MethodError(
            f"The model returned a {type(output).__name__}; the loss wants a tensor, a tuple that begins with one, an "
            f"output with 'logits', or a dict of tensors by task."
        )
    return output
