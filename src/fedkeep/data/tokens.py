"""Labels of next-token prediction."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedkeep.core.errors import DataError
from fedkeep.tasks.tokens import IGNORED


def next_tokens(input_ids: ArrayLike, attention_mask: ArrayLike | None = None) -> NDArray[np.int64]:
    """Return for each token the one that follows, int64 (examples, tokens): the labels of the task ``"next_token"``.

    Args:
        input_ids: (examples, tokens), padded to one length.
        attention_mask: (examples, tokens), 0 where padded; None: nowhere.

    Returns:
        −100 where nothing follows; such places count neither in the loss nor in a metric.

    Raises:
        DataError: the shapes are others.
    """
    ids = np.asarray(input_ids)
    mask: NDArray[Any] = np.ones(ids.shape) if attention_mask is None else np.asarray(attention_mask)
    if ids.ndim != 2 or ids.dtype.kind not in "iu" or mask.shape != ids.shape:
        raise DataError(
            "Wanted input_ids as integers (examples, tokens) and a mask of that shape; got {got} {shape} "
            "and {shape_2}.",
            got=ids.dtype,
            shape=ids.shape,
            shape_2=mask.shape,
        )
    label = np.full(ids.shape, IGNORED, np.int64)
    label[:, :-1] = np.where(mask[:, :-1] * mask[:, 1:] > 0, ids[:, 1:], IGNORED)
    return label
