"""kNN-Per: FedAvg, whose clients predict with the help of their own examples that look alike to the shared model.

Source: Marfoq, Neglia, Kameni and Vidal, Personalized Federated Learning through Local Memorization, arXiv 2111.09360.
Rounds are FedAvg's. To predict, a client has a memory of its own training examples, (f(x_i), y_i), with the features f
of the newest shared model. For an example x it takes the k that are nearest to f(x), and predicts
λ p_near(x) + (1 − λ) p(x), where p_near(y | x) ∝ Σ_{i near, y_i = y} e^(−‖f(x) − f(x_i)‖) and p is the shared model.
The memory is made again whenever a client is judged, and never leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedkeep.core.errors import MethodError, check_range
from fedkeep.core.net import Net, logits_of
from fedkeep.core.params import CLIENT, Batch, Params, State
from fedkeep.methods.base import Method, Recall
from fedkeep.methods.client import Client
from fedkeep.methods.features import one_hot, pooled_features
from fedkeep.methods.hook_checks import check_count
from fedkeep.methods.labels import check_rows, class_of
from fedkeep.methods.phase import Phase, telling
from fedkeep.methods.server import Server

KEYS, CLASSES, WEIGHT = "keys", "classes", "weight"
GRID = 11
"""λ is one of 0, 0.1, …, 1 where it is chosen."""


@dataclass(frozen=True)
class Memorize:
    """Predicts with a client's memory; without one, as the shared model.

    Attributes:
        neighbours: k.
        weight: λ; None: of 0, 0.1, …, 1 that of the lowest loss on the client's validation examples, of equal ones the
            lowest; ½ where it has none.
        label: the column that holds the class.
    """

    neighbours: int
    weight: float | None
    label: str

    def recall(self, given: Recall) -> State:
        """Return the client's memory: ``keys`` (n, F), ``classes`` (n,) and λ, (); nothing without an example."""
        found = [(key, class_of(batch, self.label)) for key, batch in given.outputs(pooled_features, "train")]
        if not found:
            return {}
        keys, classes = torch.cat([k for k, _ in found]), torch.cat([y for _, y in found])
        memory = {KEYS: keys, CLASSES: classes, WEIGHT: keys.new_tensor(0.5)}
        if self.weight is not None:
            return {**memory, WEIGHT: keys.new_tensor(self.weight)}
        params = {**given.params, **{CLIENT + n: v for n, v in memory.items()}}
        weights, total = torch.linspace(0, 1, GRID, dtype=torch.float64, device=keys.device), None
        for (shared, near), batch in given.outputs(
            lambda net, _, columns: self.both(net, params, columns), "valid"
        ):
            label = class_of(batch, self.label).unsqueeze(1)
            shared, near = (p.gather(1, label).double() for p in (shared, near))  # (B, 1)
            losses = -(weights * near + (1 - weights) * shared).clamp_min(1e-12).log().sum(0)
            total = losses if total is None else total + losses
        return (
            memory
            if total is None
            else {**memory, WEIGHT: weights.index_select(0, total.argmin().reshape(1))[0].to(keys)}
        )

    def both(self, net: Net, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return p, of what the rounds train, and p_near, each (B, C)."""
        found, logits = pooled_features(net, params, batch), logits_of(net(params, batch))
        check_rows(logits)
        shared = logits.softmax(1)
        keys, classes = params[CLIENT + KEYS], params[CLIENT + CLASSES]
        wide = torch.promote_types(found.dtype, torch.float32)  # cdist has no half precision
        apart = torch.cdist(found.to(wide), keys.to(wide), compute_mode="donot_use_mm_for_euclid_dist").to(
            found
        )
        near, which = apart.topk(min(self.neighbours, len(keys)), largest=False)  # (B, k)
        votes = one_hot(classes, shared.new_zeros(shared.shape[1]))[which]  # (B, k, C)
        return shared, ((-near).softmax(1).unsqueeze(2) * votes).sum(1)

    def __call__(self, net: Net, params: Params, batch: Batch) -> Tensor:
        """Return log-probabilities, (B, C)."""
        if CLIENT + KEYS not in params:
            return net(params, batch)
        shared, near = self.both(net, params, batch)
        weight = params[CLIENT + WEIGHT]
        mixed = weight * near + (1 - weight) * shared
        return mixed.clamp_min(torch.finfo(mixed.dtype).tiny).log()


@telling
def knn_per(
    neighbours: int = 10,
    *,
    weight: float | None = None,
    label: str = "label",
    local: Phase = Phase(),
    server: Server = Server(),
) -> Method:
    """Return kNN-Per, for a classifier with ``features``. Nothing is trained after the rounds.

    A memory looks at all of a client's training examples, opted out or not. So what is judged on ``train`` finds each
    example itself, and where λ is chosen, what is judged on ``valid`` has been looked at.

    Args:
        neighbours: k.
        weight: λ in [0, 1], the memory's share; None: every client chooses, as the paper has it.
        label: the column that holds the class.
        local: see ``methods``.
        server: see ``methods``.

    Raises:
        MethodError: an argument is out of range.
    """
    check_count(1, neighbours=neighbours)
    check_range("[0, 1]", MethodError, weight=weight)
    predict = Memorize(neighbours=neighbours, weight=None if weight is None else float(weight), label=label)
    return Method(
        name="knn_per", needs_features=True, client=Client(phases=(local,)), server=server, predict=predict
    )
