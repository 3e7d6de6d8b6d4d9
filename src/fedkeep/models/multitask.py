"""One private user vector shared by several tasks: a multi-task user embedding.

Source: FURL, §6 names it as future work; L_i = Σ_τ ω_τ L_τ(f_τ(x; w_f^τ, e_i)).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedkeep.core.errors import ConfigError
from fedkeep.models.document import DocumentModel


class MultiTaskDocument(nn.Module):
    """A document model per task with federated parameters of its own, and one private vector ``user`` for all.

    Args:
        vocabulary: number of character ids.
        tasks: number of classes by task name; 1 for regression.
        user_dim: length of the shared user vector.
        options: further arguments of each ``DocumentModel``.
    """

    per_example = ("user",)

    def __init__(
        self, vocabulary: int, tasks: Mapping[str, int], user_dim: int = 32, **options: object
    ) -> None:
        super().__init__()
        if not tasks:
            raise ConfigError("MultiTaskDocument needs at least one task.")
        self.user = nn.Parameter(torch.zeros(user_dim))
        self.tasks = nn.ModuleDict()
        for name, classes in tasks.items():
            model = DocumentModel(vocabulary, classes, user_dim, **options)  # type: ignore[arg-type]
            del model.user
            self.tasks[name] = model

    def forward(self, text: Tensor, text_length: Tensor) -> dict[str, Tensor]:
        """Return logits by task, each (B, classes of the task), or predictions (B,) for regression."""
        out = {}
        for name, model in self.tasks.items():
            vector = model.features(text, text_length)  # type: ignore[operator]
            joined = torch.cat([vector, self.user.expand(vector.shape[0], -1)], 1)
            out[name] = model.head(joined)  # type: ignore[operator]
        return out
