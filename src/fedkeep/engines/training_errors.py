"""What is said of a client whose training broke down, or whose data the model does not fit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedkeep.core.errors import DataError, MethodError, NonFiniteError

MODEL_ERRORS = (ValueError, IndexError, RuntimeError, DataError)
"""What a model raises that does not fit its data."""


def nonfinite_error(who: str, fault: str, steps: int) -> NonFiniteError:
    """Return the error of a client whose training broke down."""
    return NonFiniteError(
        "{who}: {what} became NaN or infinite after {steps} steps. Lower the learning rate, set clip_norm, or look "
        "for NaN in this client's data.",
        who=who,
        what=fault,
        steps=steps,
    )


def no_gradient(names: Sequence[str]) -> MethodError:
    """Return the error of a loss that depends on nothing that is to be trained."""
    some = ", ".join([*names[:3], *(["..."] if len(names) > 3 else [])])
    return MethodError(
        "The loss depends on none of what is trained ({some}), so there is no gradient. Does the model's forward "
        "detach its outputs, or compute them under torch.no_grad()?",
        some=some,
    )


def model_error(who: str, examples: int, error: Exception, more: str = "") -> MethodError:
    """Return the error of a model that failed on a batch, with what usually helps."""
    advice = "Check its forward and the data's columns"
    if isinstance(error, torch.OutOfMemoryError):
        advice = "Use a smaller batch_size, or another device"
    elif isinstance(error, torch.AcceleratorError):
        advice = (
            "An id or a label may be beyond what the model was made for: on device='cpu' the error says which"
        )
    elif isinstance(error, IndexError):
        advice += ": an id or a label may be beyond what it was made for"
    elif examples == 1:
        advice += (
            "; batch normalisation needs more than one example: merge_single = True lets a last one join the "
            "mini-batch before it, and a client with a single one must be left out"
        )
    batch = f"a batch of {examples} example{'s' * (examples != 1)}"
    return MethodError(
        "{who}: the model failed on {batch}: {why}. {advice}.{more}",
        who=who,
        batch=batch,
        examples=examples,
        why=str(error).strip().rstrip("."),
        advice=advice,
        more=more,
    )
