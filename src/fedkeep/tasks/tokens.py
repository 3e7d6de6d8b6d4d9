"""The tasks ``tokens`` and ``next_token``: a class for each token of an example; each with a label is a result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from fedkeep.core.errors import DataError, MethodError
from fedkeep.tasks.kind import Array, Means, Metric
from fedkeep.tasks.multiclass import MULTICLASS, class_metrics

IGNORED = -100
"""The label of a token that does not count, as in torch and transformers."""
PERPLEXITY = Metric(name="perplexity", words="Perplexity", lower=True)


def check_tokens(output: Tensor, label: Tensor) -> None:
    """Raise MethodError unless the model gave logits for each token."""
    if output.dim() != label.dim() + 1 or output.shape[:-1] != label.shape:
        raise MethodError(
            f"Labels are {tuple(label.shape)}, one for each token, so the model's logits must be (B, T, classes); it "
            f"gave {tuple(output.shape)}. Take a model with a head for tokens, or labels of shape (examples,)."
        )


def _check_shifted(label: Array, columns: Mapping[str, Any], classes: int | None) -> None:
    """Refuse labels that are the tokens themselves, which a model is shown."""
    counts, ids = label != IGNORED, columns.get("input_ids")
    if isinstance(ids, np.ndarray) and ids.shape == label.shape and (ids == label)[counts].all():
        raise DataError(
            "Labels of a next-token task are the tokens that follow; got the input_ids themselves, which the model is "
            "shown. Make them by fedkeep.data.next_tokens(input_ids, attention_mask)."
        )


def _with_perplexity(means: Means) -> dict[str, float]:
    return class_metrics(means) | {"perplexity": perplexity(means.loss)}


def perplexity(loss: float) -> float:
    """Return e to the mean loss in nats."""
    return math.exp(min(loss, 700.0))  # beyond, a float64 has no room


TOKENS = replace(
    MULTICLASS,
    name="tokens",
    axes=2,
    one_class=False,
    unlike_classes="of tokens",
    ignored=IGNORED,
    close=False,
    check_output=check_tokens,
    counting=None,
    says=None,
    from_table=False,
)
"""A class for each token of an example."""
NEXT_TOKEN = replace(
    TOKENS,
    name="next_token",
    check_labels=_check_shifted,
    metrics=_with_perplexity,
    shown=(PERPLEXITY,),
    headline=PERPLEXITY,
)
"""The token that follows, for each token of an example."""
