"""The mean of uploads, summed as they come: by hand, against the plain formula, and what it refuses."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from fedkeep import Split, adam, sgd
from fedkeep.core.errors import UploadError
from fedkeep.core.optim import Optimizer, OptimizerState
from fedkeep.core.params import Params, weighted_mean
from fedkeep.kernels import native, values
from fedkeep.methods import Global, Optimize, Reduced, RunningMean
from fedkeep.methods.aggregate import BLOCK, spread
from fedkeep.split import Upload
from tests.refusals import raises
from tests.tiny import mean_of, same_bits

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
        running.add("", dataclasses.replace(made, deltas={"table": change}, rows={"table": rows}))
        dense[rows] += number * change.double()
    assert len(running._total._rows["table"].sums) < 2 * len(torch.cat(held).unique())
    found = running.value()
    used = torch.cat(held).unique()
    assert found.rows["table"].tolist() == used.tolist()
    assert torch.equal(found.changes["table"], (dense[used] / 15).float())
    assert torch.equal(found.params["table"], (dense / 15).float())


@pytest.mark.parametrize(
    "optimizer",
    [
        sgd(1.0),
        sgd(0.3),
        sgd(0.3, schedule="linear"),
        sgd(1.0, rates={"t*": 0.7}),
        sgd(1.0, momentum=0.9),
        sgd(1.0, weight_decay=0.1),
        adam(0.1),
        sgd(1.0, bounds={"t*": (-1, 1)}),
    ],
    ids=["plain", "rate", "schedule", "pattern", "momentum", "decay", "adam", "bounds"],
)
@pytest.mark.parametrize("trainable", [{"table", "w"}, {"w"}, {"table"}, set()])
def test_rows_are_applied_as_the_whole_table_would_be(optimizer: Optimizer, trainable: set[str]) -> None:
    """To the bit, over several rounds, the optimiser's state too."""
    draw = torch.Generator().manual_seed(0)
    update = Optimize(optimizer=optimizer)
    start: Params = {"w": torch.randn(3, generator=draw), "table": torch.randn(6, 2, generator=draw)}
    servers = [
        Global(params=dict(start), optimizer=OptimizerState(), trainable=frozenset(trainable))
        for _ in range(2)
    ]
    for number in range(3):
        rows = {"table": torch.randperm(6, generator=draw)[:3].sort().values}
        few = {"w": torch.randn(3, generator=draw), "table": torch.randn(3, 2, generator=draw)}
        before = {n: v.clone() for n, v in servers[0].params.items()}
        whole = {**few, "table": spread(few["table"], rows["table"], start["table"])}
        cut = Reduced(changes=few, rows=rows, tables={"table": start["table"]})
        assert same_bits(cut.params, whole)
        given = [server.but(progress=number / 3) for server in servers]
        servers = [update(given[0], cut), update(given[1], Reduced(changes=whole))]
        assert same_bits(given[0].params, before)
        assert same_bits(servers[0].params, servers[1].params)
        assert same_bits(servers[0].optimizer.tensors(), servers[1].optimizer.tensors())
    assert not torch.equal(servers[0].params["table"], start["table"])


def test_many_uploads_lose_no_digits() -> None:
    """1e4 once and 0.001 ten thousand times: a sum in single precision would drop the small ones."""
    each = [upload(1, [1e4, 0])] + [upload(1, [1e-3, 0])] * 10_000
    assert float(mean_of(each, RECEIVED)["w"][0]) * 10_001 == pytest.approx(10_010, rel=1e-6)


def test_the_uploads_are_left_alone() -> None:
    one = upload(3, [1, 2], [1, 3], 5, count=2)
    before = {n: v.clone() for n, v in one.deltas.items()}
    running = RunningMean(RECEIVED)
    running.add("a", one)
    running.add("b", one)
    found = running.value()
    assert (found.weight, found.count) == (6.0, 2)
    found.changes["w"].add_(1)
    assert same_bits(one.deltas, before)
    assert float(RECEIVED["table"].abs().max()) == 0


@pytest.mark.parametrize("weights", [[], [0.0, 0.0]])
def test_nothing_to_average(weights: list[float]) -> None:
    with raises(UploadError, weight=0.0, count=len(weights)):
        mean_of([upload(w, [0, 0]) for w in weights], RECEIVED)


def test_half_precision_is_summed_in_double() -> None:
    start: dict[str, Tensor] = {"w": torch.zeros(1, dtype=torch.bfloat16)}
    each = [dataclasses.replace(Split().upload({}, {}, 1.0), deltas={"w": torch.ones(1).bfloat16()})] * 1000
    found = mean_of(each, start)["w"]
    assert (found.dtype, float(found)) == (torch.bfloat16, 1.0)


# --- blocks


COHORTS = (5, 16, 17, 40)
START: Params = {
    "w": torch.zeros(7),
    "table": torch.zeros(30, 2),
    "moving": torch.zeros(3, dtype=torch.float64),
    "count": torch.tensor(0),
}


def drawn(clients: int) -> dict[str, Upload]:
    """Return uploads of many sizes by client; of the table some hold everything, others some rows."""
    draw = torch.Generator().manual_seed(clients)
    found = {}
    for k in range(clients):
        scale = 10.0 ** int(torch.randint(-6, 7, (1,), generator=draw))
        rows = torch.randperm(30, generator=draw)[: 1 + k % 9].sort().values if k % 4 else torch.arange(30)
        deltas = {
            n: torch.randn(v.shape, generator=draw, dtype=v.dtype) * scale
            for n, v in START.items()
            if n != "count"
        }
        deltas |= {"table": deltas["table"][rows], "count": torch.tensor(k)}
        made = Split().upload({}, {}, 1.0 + float(torch.randint(0, 300, (1,), generator=draw)))
        # In the order of ids: client-10 comes before client-2.
        found[f"client-{k}"] = dataclasses.replace(made, deltas=deltas, rows={"table": rows} if k % 4 else {})
    return found


def bits_of(reduced: Reduced) -> dict[str, Tensor]:
    return {**reduced.changes, **{f"rows of {n}": v for n, v in reduced.rows.items()}} | {
        "weight": torch.tensor(reduced.weight, dtype=torch.float64),
        "count of uploads": torch.tensor(reduced.count),
    }


def orders(uploads: dict[str, Upload]) -> list[list[str]]:
    """Return the clients as sorted, backwards, and in some random orders."""
    clients = sorted(uploads)
    draw = torch.Generator().manual_seed(0)
    random = [[clients[k] for k in torch.randperm(len(clients), generator=draw).tolist()] for _ in range(6)]
    return [clients, clients[::-1], *random]


@pytest.mark.parametrize("missing_rows", ["unchanged", "owners_only"])
@pytest.mark.parametrize("clients", COHORTS)
def test_the_order_of_arrival_changes_no_bit(clients: int, missing_rows: str) -> None:
    uploads = drawn(clients)
    found = []
    for order in orders(uploads):
        mean = RunningMean(START, order, missing_rows)
        for client in order:
            mean.add(client, uploads[client])
        found.append(bits_of(mean.value()))
    assert all(same_bits(found[0], other) for other in found[1:])
    assert int(found[0]["count"]) == 0  # the counter of client-0, the first of ids
    assert int(found[0]["count of uploads"]) == clients
    expected = weighted_mean(
        [{"w": upload.deltas["w"].double()} for upload in uploads.values()],
        [upload.weight for upload in uploads.values()],
    )
    torch.testing.assert_close(found[0]["w"], expected["w"].float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("clients", COHORTS)
def test_a_missing_client_changes_no_bit_of_the_others(clients: int, told: bool) -> None:
    """Whether it is said that an upload will not come, or nothing is heard of it; three are missing, or a block."""
    uploads = drawn(clients)
    ids = sorted(uploads)
    for missing in ({ids[0]}, {ids[-1]}, {ids[1], ids[3], ids[-2]}, set(ids[:16]) - {ids[-1]}):
        found = []
        for order in orders(uploads):
            mean = RunningMean(START, order)
            for client in order:
                if client not in missing:
                    mean.add(client, uploads[client])
                elif told:
                    mean.skip(client)
            found.append(bits_of(mean.value()))
        assert all(same_bits(found[0], other) for other in found[1:])
        assert int(found[0]["count of uploads"]) == clients - len(missing)
        silent = RunningMean(START, ids)
        for client in ids:
            if client not in missing:
                silent.add(client, uploads[client])
        assert same_bits(found[0], bits_of(silent.value()))


@pytest.mark.parametrize("missing_rows", ["unchanged", "owners_only"])
@pytest.mark.parametrize("clients", COHORTS)
@pytest.mark.parametrize("missing", [0, 1])
def test_partial_means_of_whole_blocks_give_the_bits_of_one(
    clients: int, missing_rows: str, missing: int
) -> None:
    """However the blocks are dealt out to two or three, in whatever order these are merged, and summed in any order."""
    uploads = drawn(clients)
    ids = sorted(uploads)
    left = ids[:3] + ids[3 + missing :]
    one = RunningMean(START, ids, missing_rows)
    for client in left:
        one.add(client, uploads[client])
    expected = bits_of(one.value())
    blocks = range(-(-clients // BLOCK))
    for dealt in itertools.product(range(3), repeat=len(blocks)):
        for turn in ((0, 1, 2), (2, 0, 1)):
            parts = [RunningMean(START, ids, missing_rows) for _ in range(3)]
            for client in reversed(left):
                parts[dealt[ids.index(client) // BLOCK]].add(client, uploads[client])
            first, *others = (parts[k] for k in turn)
            for other in others:
                first.merge(other)
            assert same_bits(bits_of(first.value()), expected)


@pytest.mark.parametrize("turn", [1, -1])
def test_blocks_of_rows_and_blocks_of_whole_tables_have_the_owners_of_both(turn: int) -> None:
    """Weights 1 and 3; row {0} 4, whole 8: (1 · 4 + 3 · 8) / 4 = 7 in row 0, and 8 in the others."""
    cohort = [f"client-{k:02}" for k in range(BLOCK + 1)]
    mean = RunningMean(RECEIVED, cohort, "owners_only")
    each = [upload(1, [0, 0], [0], 4), upload(3, [0, 0], None, 8)]
    for client, one in zip((cohort[0], cohort[BLOCK]), each[::turn], strict=True):
        mean.add(client, one)
    assert mean.value().params["table"][:, 0].tolist() == [7.0, 8.0, 8.0, 8.0]


def test_a_block_that_was_summed_in_two_places_is_refused() -> None:
    uploads = drawn(40)
    ids = sorted(uploads)

    def part(clients: list[str], cohort: list[str] | None = ids) -> RunningMean:
        made = RunningMean(START, cohort)
        for client in clients:
            made.add(client, uploads[client])
        return made

    def message(number: int) -> str:
        return (
            "Partial means can be merged if each block of 16 clients was summed in one place; "
            f"block {number} stands in both."
        )

    for one, two, both in (
        (ids[:8], ids[8:16], 0),  # half of it each
        (ids[:16], ids[:16], 0),  # complete in both
        (ids[:16], ids[12:32], 0),  # complete in one
        (ids[12:32], ids[:16], 0),
        (ids[:18], ids[18:], 1),
        (ids[20:32], ids[16:40], 1),
    ):
        merged = part(one)
        with raises(UploadError, text=message(both)):
            merged.merge(part(two))
        assert same_bits(bits_of(merged.value()), bits_of(part(one).value()))  # nothing was taken over
    for cohort in (None, ids[:-1]):
        with raises(UploadError, said="Partial means can be merged if they are of"):
            part(ids[:4]).merge(part(ids[:4], cohort))


def test_large_tensors_are_summed_in_pieces_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(3)
    start = {"w": torch.zeros(7, 11), "turned": torch.zeros(11, 7).T}
    changes = [{n: torch.randn(7, 11, generator=draw) for n in start} for _ in range(3)]
    uploads = [
        Split().upload(start, each, weight) for each, weight in zip(changes, (1.0, 5.0, 0.3), strict=True)
    ]
    found = []
    monkeypatch.setattr(native, "available", lambda: False)  # the kernel goes through them at once
    for piece in (1 << 18, 8):
        monkeypatch.setattr(values, "PIECE", piece)
        mean = RunningMean(start)
        for upload in uploads:
            mean.add("", upload)
        found.append(mean.value().params)
    assert same_bits(*found)
    expected = sum(w * c["w"].double() for c, w in zip(changes, (1.0, 5.0, 0.3), strict=True)) / 6.3
    torch.testing.assert_close(found[1]["w"].double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_whole_tables_and_rows_add_up_in_any_order(order: tuple[int, ...]) -> None:
    """The first whole upload waits for the second, also where rows come between, and sums are merged."""
    start = {"t": torch.zeros(4, 2)}
    whole = torch.arange(8.0).view(4, 2)
    rows, few = torch.tensor([1, 3]), torch.tensor([[10.0, 20.0], [30.0, 40.0]])
    uploads = [
        Split().upload(start, {"t": whole}, 2.0),
        Split().upload({"t": start["t"][rows]}, {"t": few}, 3.0, {"t": rows}),
        Split().upload(start, {"t": -whole}, 1.0),
    ]
    wanted = whole.clone()
    wanted[rows] += 3.0 * few
    for cut in range(4):
        sums = [RunningMean(start) for _ in range(2)]
        for place, number in enumerate(order):
            sums[place >= cut].add("", uploads[number])
        found = sums[0].sums().merge(sums[1].sums()).mean()
        assert torch.equal(found.params["t"], wanted / 6.0)
