"""Linking uploads, and the class that a client holds."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from fedkeep.attacks import Sighting, label_guesses, likeness, present, recognised, trait_guesses
from fedkeep.metrics.scores import auc

N = 200


def uploads(seed: int, names: tuple[str, ...], own: float) -> Iterator[Sighting]:
    """Yield uploads of noise and, in the tensor ``user``, of each client's own direction."""
    draw, same = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(99)
    whose = torch.randn(N, 30, generator=same)
    for k in range(N):
        noise = {n: torch.randn(30, generator=draw) for n in names}
        yield Sighting(
            changes={n: v + own * (n == "user") * whose[k] for n, v in noise.items()}, clients=(f"c{k}",)
        )


def test_likeness_by_hand() -> None:
    """Means off: (1, 0), (−1, 0) against (0, 2), (0, −2) and itself."""
    first, second = (
        [Sighting(changes={"w": torch.tensor(v)}, clients=("",)) for v in some]
        for some in (([2.0, 5.0], [0.0, 5.0]), ([7.0, 1.0], [1.0, 1.0]))
    )
    assert likeness(first, second) == pytest.approx(np.array([[1, -1], [-1, 1]]))
    assert likeness(first, second, ["other"]).tolist() == [[0, 0], [0, 0]]


def test_a_private_part_that_stays_home_names_nobody_and_one_that_leaves_names_all() -> None:
    """The same attack on the private part: with the split it guesses, once in N; without the split it is right."""
    split = [list(uploads(seed, ("body",), 0.0)) for seed in (1, 2)]
    plain = [list(uploads(seed, ("body", "user"), 3.0)) for seed in (1, 2)]
    assert recognised(likeness(*split, ["user"])).tolist() == [1 / N] * N
    assert recognised(likeness(*plain, ["user"])).mean() > 0.95


def test_present_in_a_sum() -> None:
    """Sums of 10 clients: who is in them shows, where clients have directions; where they have none, it does not."""
    inside = np.zeros((N, 20), bool)
    for own, low, high in ((3.0, 0.75, 1.0), (0.0, 0.45, 0.55)):
        known, later = (list(uploads(seed, ("user",), own)) for seed in (1, 2))
        sums = []
        for place in range(20):
            members = range(10 * place, 10 * place + 10)
            inside[list(members), place] = True
            mean = torch.stack([later[k].changes["user"] for k in members]).mean(0)
            sums.append(Sighting(changes={"user": mean}, clients=tuple(f"c{k}" for k in members)))
        score, truth, client = present(likeness(known, sums), inside)
        assert (client[:20] == 0).all()
        assert low <= auc(score, truth) <= high


def test_labels_by_hand() -> None:
    seen = [
        Sighting(changes={"out.bias": torch.tensor([-0.1, 0.3, -0.2])}, clients=("anna",)),
        Sighting(changes={"out.bias": torch.tensor([0.2, 0.1, -0.3])}, clients=("ben", "cem")),
    ]
    assert label_guesses(seen, "out.bias") == {"anna": 1, "ben": 0, "cem": 0}


def test_a_trait_that_is_in_uploads_is_found_and_one_that_is_not_is_not() -> None:
    draw = torch.Generator().manual_seed(0)
    trait = torch.arange(60) % 3
    for strength, low, high in ((1.0, 0.9, 1.0), (0.0, 0.1, 0.55)):
        seen = []
        for k in range(60):
            change = torch.randn(50, generator=draw)
            change[int(trait[k])] += 8 * strength
            seen.append(Sighting(changes={"w": change}, clients=(f"c{k}",)))
        right = np.mean(np.array(trait_guesses(seen, trait.tolist())) == trait.numpy())
        assert low <= right <= high
