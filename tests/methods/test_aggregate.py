"""The mean of uploads, summed as they come: by hand, against the plain formula, and what it refuses."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from fedkeep.engines.aggregate import mean_of, spread
from torch import Tensor

from fedkeep import Split, adam, averaging, methods, sgd
from fedkeep.core.errors import UploadError
from fedkeep.core.optim import Optimizer, OptimizerState
from fedkeep.core.params import Params, weighted_mean
from fedkeep.engines import RunningMean
from fedkeep.engines.round import apply
from fedkeep.split import Upload
from tests.tiny import same_bits

RECEIVED: Params = {"w": torch.zeros(2), "table": torch.zeros(4, 2), "count": torch.tensor(0)}


def upload(
    weight: float, w: list[float], rows: list[int] | None = None, value: float = 0.0, count: int = 0
) -> Upload:
    """Return an upload; of the table it holds some rows, or all."""
    held = range(4) if rows is None else rows
    deltas = {"w": torch.tensor(w), "table": torch.full((len(held), 2), value), "count": torch.tensor(count)}
    made = Split().upload({}, {}, weight)
    return dataclasses.replace(
        made, deltas=deltas, rows={} if rows is None else {"table": torch.tensor(rows)}
    )


def test_by_hand() -> None:
    """(1·[1, 2] + 3·[5, −2]) / 4 = [4, −1]."""
    mean = mean_of([upload(1, [1, 2]), upload(3, [5, -2])], RECEIVED)
    assert mean["w"].tolist() == [4.0, -1.0]


def test_counters_are_the_first_ones() -> None:
    assert int(mean_of([upload(1, [0, 0], count=7), upload(5, [0, 0], count=9)], RECEIVED)["count"]) == 7


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        # row 0: 1·6 of weight 1; row 1: 1·6 + 2·3 of weight 3; row 2: 2·3 of weight 2; row 3: nobody; all: weight 3
        ("unchanged", [2.0, 4.0, 2.0, 0.0]),
        ("owners_only", [6.0, 4.0, 3.0, 0.0]),
    ],
)
def test_rows_that_some_lack_by_hand(missing: str, expected: list[float]) -> None:
    mean = mean_of([upload(1, [0, 0], [0, 1], 6), upload(2, [0, 0], [1, 2], 3)], RECEIVED, missing)
    assert mean["table"].tolist() == [[v, v] for v in expected]


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_some_send_the_whole_table_and_some_send_rows(turn: int) -> None:
    """Weights 1, 1 and 2; whole 8, rows {0} 4, whole 2: owners of row 0 have 4, of the others 3."""
    each = [upload(1, [0, 0], None, 8), upload(1, [0, 0], [0], 4), upload(2, [0, 0], None, 2)]
    mean = mean_of(each[turn:] + each[:turn], RECEIVED, "owners_only")
    assert mean["table"][:, 0].tolist() == [4.0, 4.0, 4.0, 4.0]
    mean = mean_of(each[turn:] + each[:turn], RECEIVED)
    assert mean["table"][:, 0].tolist() == [4.0, 3.0, 3.0, 3.0]


def test_only_rows_that_were_sent_take_memory() -> None:
    start = {"table": torch.zeros(10_000, 2)}
    draw = torch.Generator().manual_seed(0)
    held = [torch.randperm(10_000, generator=draw)[:n].sort().values for n in (3, 40, 0, 500, 500)]
    running, dense = RunningMean(start), torch.zeros(10_000, 2, dtype=torch.float64)
    for number, rows in enumerate(held, 1):
        change = torch.randn(len(rows), 2, generator=draw)
        made = Split().upload({}, {}, float(number))
        running.add(dataclasses.replace(made, deltas={"table": change}, rows={"table": rows}))
        dense[rows] += number * change.double()
    means, rows = running.compact()
    used = torch.cat(held).unique()
    assert rows["table"].tolist() == used.tolist()
    assert torch.equal(means["table"], (dense[used] / 15).float())
    assert torch.equal(running.mean()["table"], (dense / 15).float())
    assert len(running._rows["table"].sums) < 2 * len(used)


@pytest.mark.parametrize(
    "optimizer",
    [sgd(1.0), sgd(0.3), sgd(0.3, schedule="linear"), sgd(1.0, rates={"t*": 0.7}), sgd(1.0, momentum=0.9),
     sgd(1.0, weight_decay=0.1), adam(0.1), sgd(1.0, bounds={"t*": (-1, 1)})],
    ids=["plain", "rate", "schedule", "pattern", "momentum", "decay", "adam", "bounds"],
)  # fmt: skip
@pytest.mark.parametrize("trainable", [{"table", "w"}, {"w"}, {"table"}, set()])
def test_rows_are_applied_as_the_whole_table_would_be(optimizer: Optimizer, trainable: set[str]) -> None:
    """To the bit, over several rounds, the optimiser's state too."""
    draw = torch.Generator().manual_seed(0)
    method = methods.fedavg(server=averaging(optimizer))
    start: Params = {"w": torch.randn(3, generator=draw), "table": torch.randn(6, 2, generator=draw)}
    states = [OptimizerState(), OptimizerState()]
    params = [dict(start), dict(start)]
    for number in range(3):
        rows = {"table": torch.randperm(6, generator=draw)[:3].sort().values}
        few = {"w": torch.randn(3, generator=draw), "table": torch.randn(3, 2, generator=draw)}
        before = {n: v.clone() for n, v in params[0].items()}
        whole = {**few, "table": spread(few["table"], rows["table"], start["table"])}
        names = frozenset(trainable)
        after = apply(method, names, params[0], few, states[0], number / 3, rows)
        assert same_bits(params[0], before)
        params = [after, apply(method, names, params[1], whole, states[1], number / 3)]
        assert same_bits(params[0], params[1])
        assert same_bits(states[0].tensors(), states[1].tensors())
    assert not torch.equal(params[0]["table"], start["table"])


def test_many_uploads_lose_no_digits() -> None:
    """1e4 once and 0.001 ten thousand times: a sum in single precision would drop the small ones."""
    each = [upload(1, [1e4, 0])] + [upload(1, [1e-3, 0])] * 10_000
    assert float(mean_of(each, RECEIVED)["w"][0]) * 10_001 == pytest.approx(10_010, rel=1e-6)


def test_it_is_the_weighted_mean() -> None:
    draw = torch.Generator().manual_seed(0)
    trees = [{"w": torch.randn(50, generator=draw, dtype=torch.float64)} for _ in range(9)]
    weights = [float(k) for k in range(9)]
    made = [
        dataclasses.replace(Split().upload({}, {}, w), deltas=t) for t, w in zip(trees, weights, strict=True)
    ]
    start = {"w": torch.zeros(50, dtype=torch.float64)}
    torch.testing.assert_close(mean_of(made, start), weighted_mean(trees, weights), rtol=1e-14, atol=0)


def test_the_uploads_are_left_alone() -> None:
    one = upload(3, [1, 2], [1, 3], 5, count=2)
    before = {n: v.clone() for n, v in one.deltas.items()}
    running = RunningMean(RECEIVED)
    running.add(one)
    running.add(one)
    assert (running.weight, running.count) == (6.0, 2)
    mean = running.mean()
    mean["w"].add_(1)
    assert same_bits(one.deltas, before)
    assert float(RECEIVED["table"].abs().max()) == 0


@pytest.mark.parametrize("weights", [[], [0.0, 0.0]])
def test_nothing_to_average(weights: list[float]) -> None:
    with pytest.raises(UploadError) as error:
        mean_of([upload(w, [0, 0]) for w in weights], RECEIVED)
    assert str(error.value) == (
        f"An average needs at least one upload of positive weight; got {len(weights)} of total 0.0."
    )


def test_half_precision_is_summed_in_double() -> None:
    start: dict[str, Tensor] = {"w": torch.zeros(1, dtype=torch.bfloat16)}
    each = [dataclasses.replace(Split().upload({}, {}, 1.0), deltas={"w": torch.ones(1).bfloat16()})] * 1000
    found = mean_of(each, start)["w"]
    assert (found.dtype, float(found)) == (torch.bfloat16, 1.0)
