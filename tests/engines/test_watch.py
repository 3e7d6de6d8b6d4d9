"""Looking at a local run while it goes on changes nothing, and sees every parameter as it is then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedkeep import Client, Phase, Split, sgd
from fedkeep.core.net import Net
from fedkeep.core.params import Params, clone
from fedkeep.engines import LocalResult, LocalRunWatch, Stream, local_run
from fedkeep.models import BagOfWords
from tests.engines.reference import rows_of
from tests.tiny import Noisy, classes, same_bits, texts

DATA = texts(counts=(9, 6), vocabulary=40)
STEEP = sgd(0.5, momentum=0.9)


pytestmark = pytest.mark.usefixtures("no_table_is_too_small")


def words() -> Net:
    torch.manual_seed(0)
    return Net(BagOfWords(40, 3, 2, embedding_dim=4, mlp=5).double())


def train(
    net: Net, phases: Any, data: Any = DATA, *, turns: Any = "phases", watch: LocalRunWatch | None = None
) -> LocalResult:
    start = net.initial()
    split, client = Split("user") if "user" in start else Split(), Client(phases=tuple(phases), turns=turns)
    return local_run(net, split, client, start, start, data, rows_of(data, 0), Stream(0, "a"), watch=watch)


@pytest.mark.parametrize("turns", ["phases", "batches"])
@pytest.mark.parametrize("optimizer", [STEEP, sgd(0.5)])
def test_what_is_seen_is_what_shorter_training_gives(turns: Any, optimizer: Any) -> None:
    phase = Phase(optimizer=optimizer, batch_size=2, steps=9)
    seen: dict[int, Params] = {}
    whole = train(
        words(),
        [phase],
        turns=turns,
        watch=LocalRunWatch(3, lambda step, params: seen.update({step: clone(params)})),
    )
    assert list(seen) == [3, 6, 9]
    for steps, params in seen.items():
        shorter = train(words(), [Phase(optimizer=optimizer, batch_size=2, steps=steps)], turns=turns)
        torch.testing.assert_close(params, shorter.params, rtol=0, atol=1e-14)
    unseen = train(words(), [phase], turns=turns)
    torch.testing.assert_close(whole.params, unseen.params, rtol=0, atol=1e-14)


def test_mini_batches_are_counted_over_all_phases() -> None:
    phases = [
        Phase(trains="user", batch_size=4, steps=2, optimizer=STEEP),
        Phase(trains=("mlp.*",), batch_size=4, steps=2, optimizer=STEEP),
    ]
    steps: list[int] = []
    train(words(), phases, watch=LocalRunWatch(1, lambda step, _: steps.append(step)))
    assert steps == [1, 2, 3, 4]
    steps.clear()
    train(words(), phases, turns=(3, 1), watch=LocalRunWatch(1, lambda step, _: steps.append(step)))
    assert steps == [1, 2]


@pytest.mark.parametrize("judged", ["another model", "the model that is trained"])
def test_judging_on_the_way_disturbs_neither_batch_statistics_nor_dropout(judged: str) -> None:
    data = classes(counts=(12, 3))
    phases = [Phase(batch_size=4, epochs=2, optimizer=STEEP)]
    seen: list[int] = []

    def run(watched: bool) -> Params:
        trained = Net(Noisy(dropout=0.5).double())
        net = Net(Noisy(dropout=0.5).double()) if judged == "another model" else trained

        def look(step: int, params: Params) -> None:
            seen.append(step)
            net.train(False)
            batch: dict[str, Tensor] = data.batch(data.rows(0, "test"))
            with torch.no_grad():
                net(params, batch)

        return train(trained, phases, data, watch=LocalRunWatch(2, look) if watched else None).params

    assert same_bits(run(False), run(True))
    assert seen == [2, 4, 6]
