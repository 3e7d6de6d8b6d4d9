"""PFLlib's Fashion-MNIST: its partition of the images and its network.

Source: J. Zhang et al., PFLlib: A Beginner-Friendly and Comprehensive Personalized Federated Learning Library and
Benchmark, JMLR 26(50), 2025 (arXiv:2312.04992), and the defaults of its code on GitHub, TsingZ0/PFLlib.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep.core.errors import DataError
from fedkeep.core.seeds import numpy_generator
from fedkeep.data import FederatedData, ImageSet
from fedkeep.data.columns import Rows
from fedkeep.data.readers import fashion_mnist
from fedkeep.nn import ConvPool

TRAIN = 0.75
"""Of each client's images."""
ATTEMPTS = 1000


def pfllib_fashion(
    folder: str | Path,
    clients: int = 20,
    alpha: float = 0.1,
    valid: float = 0.2,
    limit: int | None = None,
    seed: int = 0,
) -> FederatedData:
    """Read Fashion-MNIST, merge its training and test images, and divide them as PFLlib does.

    Args:
        folder: as for ``fedkeep.data.readers.fashion_mnist``.
        clients, alpha, valid, seed: as for `divided`.
        limit: so many of the merged images, for a try; None: all 70,000.

    Raises:
        DataError: as for ``fashion_mnist`` and `divided`.
    """
    return divided(fashion_mnist(folder), clients, alpha, valid, limit, seed)


def divided(
    images: ImageSet, clients: int, alpha: float, valid: float, limit: int | None = None, seed: int = 0
) -> FederatedData:
    """Divide all images among clients, then each client's at random: three quarters to train, the rest to test.

    Each class is shuffled and cut at the cumulated proportions of a draw from Dirichlet(alpha), rounded down; a client
    that has 1 / ``clients`` of all images already gets none of it. This is drawn again until every client has
    two images (PFLlib: one, on which its division of a client's images fails).

    PFLlib has no validation images. Here a fraction ``valid`` of each client's quarter is for validation, so that
    training is on as many images as there, and the test on fewer. The draws are this library's, so no client has the
    very images that it has there.

    Raises:
        DataError: a number is out of range, or a thousand draws left a client with fewer than two images.
    """
    labels = images.labels[:limit]
    if clients < 1 or not alpha > 0 or not 0 <= valid < 1:
        raise DataError(
            "Wanted clients ≥ 1, alpha > 0 and valid in [0, 1); got {clients}, {alpha} and {valid}.",
            clients=clients,
            alpha=alpha,
            valid=valid,
        )
    for attempt in range(ATTEMPTS):
        own = _dealt(labels, images.classes, clients, alpha, numpy_generator(seed, "pfllib", round=attempt))
        if min(map(len, own)) >= 2:
            break
    else:
        raise DataError(
            "{attempts} draws left one of {clients} clients with fewer than two images. Take fewer.",
            attempts=ATTEMPTS,
            clients=clients,
        )
    rows, owner, split = [], [], []
    for client, mine in enumerate(own):
        mixed = numpy_generator(seed, "pfllib/split", f"client-{client}").permutation(mine)
        train = int(TRAIN * len(mixed))
        held = min(round(valid * (len(mixed) - train)), len(mixed) - train - 1)
        rows.append(mixed)
        owner.append(np.full(len(mixed), client))
        split += ["train"] * train + ["valid"] * held + ["test"] * (len(mixed) - train - held)
    order = np.concatenate(rows)
    about = {"kind": "pfllib", "alpha": alpha, "valid": valid, "seed": seed}
    return FederatedData.from_columns(
        client=np.concatenate(owner),
        columns={"image": images.images[order], "label": labels[order], "_image": order},
        split=split,
        meta={
            "name": f"{images.name}-pfllib",
            "task": "multiclass",
            "classes": images.classes,
            "partition": about,
            "label_names": list(images.label_names),
            "source": dict(images.source),
        },
    )


def _dealt(labels: Rows, classes: int, clients: int, alpha: float, rng: np.random.Generator) -> list[Rows]:
    """Return each client's images, class after class."""
    own: list[list[Rows]] = [[] for _ in range(clients)]
    have = np.zeros(clients, np.int64)
    for c in range(classes):
        mixed = rng.permutation(np.flatnonzero(labels == c))
        shares = rng.dirichlet(np.full(clients, alpha)) * (have < len(labels) / clients)
        if not shares.sum() > 0:  # only clients that are full were drawn
            return [np.zeros(0, np.int64)] * clients
        cuts = (np.cumsum(shares / shares.sum()) * len(mixed)).astype(np.int64)[:-1]
        for client, piece in enumerate(np.split(mixed, cuts)):
            own[client].append(piece)
            have[client] += len(piece)
    return [np.concatenate(mine) for mine in own]


class FourLayerCNN(nn.Module):
    """Conv 5 × 5 of 32 channels, ReLU, max-pool 2; the same of 64; linear to 512, ReLU; linear to the classes.

    Of 28 × 28 grey images: 1,024 inputs of the first linear layer, 582,026 parameters with ten classes. Bytes are
    scaled to −1…1, as PFLlib normalises them.

    Args:
        classes: number of labels.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv1 = ConvPool(1, 32, 5)
        self.conv2 = ConvPool(32, 64, 5, flat=True)
        self.fc1 = nn.Linear(1024, 512)
        self.fc = nn.Linear(512, classes)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits, shape (B, classes), for images (B, 1, 28, 28), uint8."""
        return self.head(self.features(image))

    def features(self, image: Tensor) -> Tensor:
        """Return the input of the last layer, shape (B, 512)."""
        return torch.relu(self.fc1(self.conv2(self.conv1(image))))

    def head(self, features: Tensor) -> Tensor:
        """Return logits for features, shape (B, classes)."""
        logits: Tensor = self.fc(features)
        return logits
