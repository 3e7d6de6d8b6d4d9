"""The table ``method.loss`` of a configuration, and the loss that it names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from fedkeep.core.errors import ConfigError
from fedkeep.data.preparation import Encoding
from fedkeep.experiments.config_tables import Rate, Strict, check_options
from fedkeep.methods import terms
from fedkeep.methods.augment import Augmented
from fedkeep.methods.class_weights import fault_of


class LossConfig(Strict):
    """The loss: ``kind``, and penalties on the client's own parameters by name pattern.

    ``class_weights`` are a number for each class: how much its examples count in ``cross_entropy``. ``augment`` moves
    training images at random; its keys are those of ``fedkeep.methods.augment.Augmented``.
    """

    kind: Literal["cross_entropy", "squared_error", "binary_cross_entropy"] = "cross_entropy"
    label: str = "label"
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    class_weights: Annotated[tuple[Rate, ...] | None, Field(strict=False)] = None
    l2: dict[str, Rate] = {}  # noqa: RUF012 (pydantic copies it)
    augment: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _weights_of_classes(self) -> LossConfig:
        if self.class_weights is not None:
            if self.kind != "cross_entropy":
                raise ValueError(f"class_weights are for 'cross_entropy'; {self.kind!r} knows no classes")
            if fault := fault_of(self.class_weights):
                raise ValueError(f"class_weights {fault.removesuffix('.')}")
        return self


def build_loss(config: LossConfig) -> terms.Term:
    """Make the loss that a configuration names."""
    loss = (
        terms.cross_entropy(config.label, smoothing=config.smoothing, class_weights=config.class_weights)
        if config.kind == "cross_entropy"
        else {
            "squared_error": terms.squared_error,
            "binary_cross_entropy": terms.binary_cross_entropy,
        }[config.kind](config.label)
    )
    for pattern, factor in config.l2.items():
        loss = loss + factor * terms.l2_penalty(pattern)
    if config.augment is None:
        return loss
    return Augmented(loss, **check_options("method.loss.augment", Augmented, config.augment, ("term",)))


def check_loss(
    config: LossConfig, encoding: Encoding, make: Callable[..., Any], options: dict[str, Any]
) -> None:
    """Check that a loss fits the data and the model, before a run's folder is made.

    Args:
        config: the loss.
        encoding: of the data.
        make: makes the model.
        options: what it is given, beside sizes that the data fix.

    Raises:
        ConfigError: the loss wants classes and the data hold numbers, or there are not as many weights as classes.
    """
    label = encoding.columns.get(config.label)
    if config.kind == "cross_entropy" and label is not None and label.dtype.kind == "f":
        raise ConfigError(
            f"method.loss: 'cross_entropy' wants classes, but the column {config.label!r} holds {label.dtype}. For "
            f"numbers as labels say method.loss.kind = 'squared_error'."
        )
    classes = options.get("classes", encoding.sizes.get("classes"))
    weights, known = config.class_weights, "classes" in inspect.signature(make).parameters
    if weights is not None and known and isinstance(classes, int) and len(weights) != classes:
        raise ConfigError(
            f"method.loss.class_weights: wanted {classes} numbers, one for each class; got {len(weights)}."
        )
