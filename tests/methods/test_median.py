"""The median: numbers by hand, what it keeps, and a run with it."""

from __future__ import annotations

import pytest
import torch

from fedkeep import Phase, Split, averaging, methods, sgd, simulate
from fedkeep.core.errors import UploadError
from fedkeep.core.params import Params
from fedkeep.methods import Global, Median
from fedkeep.split import Upload
from tests.tiny import Logits, classes, same_bits

START = {"w": torch.zeros(2, dtype=torch.float64), "count": torch.tensor(0)}
TABLE = {"t": torch.zeros(4, 1)}


def upload(w: list[float], count: int = 0, weight: float = 1.0) -> Upload:
    trained = {"w": torch.tensor(w, dtype=torch.float64), "count": torch.tensor(count)}
    return Split().upload(START, trained, weight)


def median(uploads: dict[str, Upload], start: Params = START) -> Params:
    kept = Median().begin(Global(params=start), start, list(uploads))
    for client, one in uploads.items():
        kept.add(client, one)
    return kept.value().params


def test_by_hand() -> None:
    three = {"c": upload([1, -4], 7), "a": upload([9, 2], 5), "b": upload([5, 0], 6)}
    found = median(three)
    assert found["w"].tolist() == [5, 0]
    assert found["count"] == 5  # of the first in the order of ids
    assert median(three | {"d": upload([6, 1])})["w"].tolist() == [5.5, 0.5]
    assert median(three | {"d": upload([1e300, 1e300]), "e": upload([6, 1])})["w"].tolist() == [6, 1]
    assert median(three | {"d": upload([6, 1], weight=0.0)})["w"].tolist() == [5, 0]


def test_rows_that_a_client_does_not_hold_have_not_changed() -> None:
    def some(rows: list[int], values: list[float]) -> Upload:
        which = torch.tensor(rows)
        trained = {"t": torch.tensor(values).unsqueeze(1)}
        return Split().upload({"t": TABLE["t"][which]}, trained, 1.0, {"t": which})

    uploads = {"a": some([0, 1], [1, 2]), "b": some([0, 3], [3, 4]), "c": some([0, 1], [5, 6])}
    assert median(uploads, TABLE)["t"].flatten().tolist() == [3, 2, 0, 0]


def test_who_kept_what_changes_nothing_and_nothing_comes_twice() -> None:
    uploads = {c: upload([k * 0.1, -k]) for k, c in enumerate("dbeac")}
    parts = [Median().begin(Global(params=START), START, "abcde") for _ in range(3)]
    for k, (client, one) in enumerate(uploads.items()):
        parts[k % 3].add(client, one)
    assert [p.held_bytes for p in parts] == [48, 48, 24]  # two float64 and an int64 each
    parts[2].merge(parts[0])
    parts[2].merge(parts[1])
    assert parts[2].held_bytes == 120
    assert same_bits(parts[2].value().params, median(uploads))
    with pytest.raises(UploadError, match="Client 'b' has two uploads in one round"):
        parts[2].merge(parts[1])
    with pytest.raises(UploadError, match="at least one upload of positive weight; got none"):
        Median().begin(Global(params=START), START, "a").value()


def test_a_run_says_how_many_bytes_are_kept_and_heeds_no_single_client() -> None:
    data = classes(counts=(8, 9, 7))
    wild = classes(counts=(8, 9, 7))
    x = wild.columns["x"]
    x[wild.rows(2, "train").start : wild.rows(2, "train").stop] *= 1e6  # type: ignore[index]
    local = Phase(batch_size=4, optimizer=sgd(0.1))

    def moved(given: object, server: object) -> float:
        run = simulate(
            Logits().double(), methods.fedavg(local=local, server=server), given, rounds=2, cohort=3
        )  # type: ignore[arg-type]
        assert [r.value for r in run.history if r.metric == "held_bytes"] == held
        start = run.net.initial()
        return max(float((run.server[n] - start[n]).abs().max()) for n in start)

    robust = averaging().but(reduce=Median())
    size = sum(v.numel() * 8 for v in Logits().double().state_dict().values())
    held = [3.0 * size] * 2
    assert moved(wild, robust) < 10 * moved(data, robust)
    held = []
    assert moved(wild, averaging()) > 1000 * moved(data, averaging())
