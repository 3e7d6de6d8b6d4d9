from __future__ import annotations

import gzip
import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from fedkeep import simulate
from fedkeep.core.errors import DataError, NonFiniteError, RoundError
from fedkeep.data import FederatedData
from fedkeep.data.columns import Ragged
from fedkeep.experiments.reproductions import Request
from fedkeep_papers.furl import channels as table
from fedkeep_papers.furl.memory import DAY, decayed, log_shares, memory_scores, own_prior
from fedkeep_papers.furl.own_counts import PAIRS, WORDS, Order, TextAndCounts, messages, with_pairs
from fedkeep_papers.furl.scoring import counted
from fedkeep_papers.kit.results import read_results

LABEL, TIME = np.array([0, 1, 0, 0]), np.array([0.0, 8.0, 16.0, 24.0]) * DAY


def test_shares_of_nothing_are_even_and_recent_ones_are_mixed_in() -> None:
    assert log_shares(np.zeros(2), floor=0.0) == pytest.approx(np.log([0.5, 0.5]))
    # counts 3 and 1, late ones 0 and 1: 0.4 · 0.75 = 0.3, 0.4 · 0.25 + 0.6 = 0.7; each share + 0.2 / 2
    found = log_shares(np.array([3.0, 1.0]), np.array([0.0, 1.0]), recent=0.6, floor=0.2)
    assert found == pytest.approx(np.log([0.4, 0.8]))


def test_decayed_counts_halve_every_half_life() -> None:
    assert decayed(LABEL, TIME, 2, 8.0).tolist() == [[0.125, 0], [0, 0.25], [0.5, 0], [1, 0]]


def test_at_random_a_count_prior_leaves_out_the_examples_own_label() -> None:
    after, beside = own_prior(LABEL, TIME, 2, by_time=False)
    floor = 1e-3 / 2
    assert np.exp(after) == pytest.approx(np.array([0.75, 0.25]) + floor)
    # beside a 0: two 0 and one 1 are left; beside the only 1: three 0
    assert np.exp(beside) == pytest.approx(
        np.array([[2 / 3, 1 / 3], [1, 0], [2 / 3, 1 / 3], [2 / 3, 1 / 3]]) + floor
    )


def test_by_time_a_count_prior_knows_earlier_messages_only() -> None:
    after, beside = own_prior(LABEL, TIME, 2, by_time=True)
    floor = 1e-3 / 2
    # Late sums before the third: 2^-3 of label 0 and 2^-2 of label 1, so shares 1/3 and 2/3, beside plain ones of 1/2.
    third = 0.4 * np.array([1 / 2, 1 / 2]) + 0.6 * np.array([1 / 3, 2 / 3]) + floor
    assert np.exp(beside[:3]) == pytest.approx(np.stack([[0.5 + floor] * 2, [1 + floor, floor], third]))
    late = np.array([1.625, 0.25]) / 1.875
    assert np.exp(after) == pytest.approx(0.4 * np.array([0.75, 0.25]) + 0.6 * late + floor)
    changed = own_prior(np.array([0, 1, 1, 1]), TIME, 2, by_time=True)[1]
    assert np.array_equal(changed[:3], beside[:3])  # a message's own label, and later ones, change nothing


@pytest.mark.slow
def test_by_time_late_shares_are_exact_over_years() -> None:
    """Ages are whole half-lives, so that a recursion in fractions is exact; some sums are below 2^-1000."""
    draw = np.random.default_rng(0)
    gaps, label = draw.choice([0, 1, 3, 70, 250], 400), draw.integers(0, 5, 400)
    after, beside = own_prior(label, np.cumsum(gaps) * 8 * DAY, 5, by_time=True)
    plain, late, wanted = [0] * 5, [Fraction(0)] * 5, [[1 / 5 + 1e-3 / 5] * 5]
    for gap, k in zip(gaps, label, strict=True):
        late = [each / 2 ** int(gap) for each in late]
        plain[k] += 1
        late[k] += 1
        shares = [0.4 * p / sum(plain) + 0.6 * float(s / sum(late)) for p, s in zip(plain, late, strict=True)]
        wanted.append([1e-3 / 5 + share for share in shares])
    assert np.exp([*beside, after]) == pytest.approx(np.array(wanted), rel=1e-9)


def test_by_time_a_later_messages_time_changes_nothing_before() -> None:
    label = np.array([0, 0, 0, 0, 1, 1, 0])
    found = [
        own_prior(label, np.array([0, 1, 2, 3, 400, 401, 401 + gap]) * DAY, 3, by_time=True)[1][:6]
        for gap in (10, 5_000)
    ]
    assert np.array_equal(*found)


def test_naive_bayes_is_shrunk_and_votes_are_cosines() -> None:
    train = Ragged.from_rows([[1, 2, 2], [1, 3]])  # a word counts once a message
    bayes, votes = memory_scores(
        train, np.array([0, 2]), Ragged.from_rows([[2, 9], [9]]), 3, shrink=5.0, neighbours=1
    )
    # Label 0: 2 words, of which word 2 once; in all messages word 2 is 1 of 4, so b = 1.5 / 5 = 0.3.
    known, other, unknown = math.log((1 / 0.3 + 5) / 7), math.log(5 / 7), math.log(5 / 7)
    assert bayes[0] == pytest.approx([(known + unknown) / math.sqrt(2), 0, (other + unknown) / math.sqrt(2)])
    assert bayes[1] == pytest.approx([unknown, 0, unknown])
    # Weights: word 1 is in both, log(3/3) = 0; words 2 and 3 log(3/2); an unknown word log(3).
    assert votes[0] == pytest.approx([math.log(1.5) / math.hypot(math.log(1.5), math.log(3)), 0, 0])
    assert votes[1] == pytest.approx([0, 0, 0])


def test_a_user_without_training_messages_has_no_memory() -> None:
    bayes, votes = memory_scores(Ragged.from_rows([]), np.zeros(0, int), Ragged.from_rows([[1]]), 2)
    assert (bayes.tolist(), votes.tolist()) == ([[0, 0]], [[0, 0]])


def test_pairs_follow_words_and_stay_in_their_row() -> None:
    found = with_pairs(Ragged.from_rows([[5, 6, 5, 6], [], [6], [5, 6]]))
    first, _, last = found[0], found[2], found[3]
    assert first[:4].tolist() == [5, 6, 5, 6]
    assert first[4] == first[6] == last[2] != first[5]
    assert (found[1].tolist(), found[2].tolist()) == ([], [6])
    assert all(WORDS <= each < WORDS + PAIRS for each in first[4:])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten users of thirty messages, in no order; each has a word of its label."""
    draw, place = np.random.default_rng(0), tmp_path / "zulip_channels"
    place.mkdir()
    (place / "channels.tsv").write_text(
        "label\tcommunity\tchannel\tmessages\n" + "".join(f"{k}\tlean\tc{k}\t9\n" for k in range(3)),
        encoding="utf-8",
    )
    lines = [
        {
            "user": user,
            "community": "lean",
            "label": int(label),
            "time": int(time),
            "split": ("train", "valid", "test")[max(0, n - 27)],
            "text": f"say {'abc'[label]} {n % 4}",
        }
        for user in range(10)
        for n, (label, time) in enumerate(
            zip(draw.integers(0, 3, 30), draw.permutation(30) * DAY, strict=True)
        )
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (place / "messages.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    return place


def test_by_time_no_later_message_trains(folder: Path) -> None:
    data = messages(folder, "time")
    time = np.asarray(data.columns["time"])
    for client in range(len(data)):
        train, valid, test = (time[np.asarray(data.rows(client, s))] for s in ("train", "valid", "test"))
        assert (len(train), len(valid), len(test)) == (24, 3, 3)
        assert train.max() < valid.min()
        assert valid.max() < test.min()
        assert (np.diff(train) > 0).all()  # own_prior counts what stands before


def test_what_stands_beside_new_messages_comes_of_training_messages(folder: Path) -> None:
    orders: tuple[Order, ...] = ("time", "random")
    for order in orders:
        data = messages(folder, order)
        label, time, own = (np.asarray(data.columns[n]) for n in ("label", "time", "own"))
        for client in range(len(data)):
            train = np.asarray(data.rows(client, "train"))
            after, beside = own_prior(label[train], time[train], 3, by_time=order == "time")
            assert own[train] == pytest.approx(beside, rel=1e-6)
            for new in (*data.rows(client, "valid"), *data.rows(client, "test")):
                assert own[new] == pytest.approx(after, rel=1e-6)


def test_an_unknown_order(folder: Path) -> None:
    with pytest.raises(DataError, match=r"^Wanted the order 'time' or.*'random'.*'tim'.*'time'"):
        messages(folder, "tim")  # type: ignore[arg-type]


def test_nothing_but_federated_parameters_leaves_and_counts_are_no_parameter(folder: Path) -> None:
    data = messages(folder, "time")
    model = TextAndCounts(3, embedding_dim=4)
    run = simulate(model, table.recipe(), data, rounds=1, cohort=2, workers=1, progress=False)
    assert set(run.server) == {"embedding.weight", "mlp.1.weight", "mlp.1.bias"}
    assert dict(run.server).keys() == dict(model.named_parameters()).keys()


def test_logits_add_the_own_counts() -> None:
    model = TextAndCounts(2, embedding_dim=3).eval()
    own = torch.tensor([[0.5, -1.0]])
    text, length = torch.tensor([[1, 2]]), torch.tensor([2])
    assert torch.allclose(model(text, length, own), model.head(model.features(text, length)) + own)
    alone = TextAndCounts(2, counts=False, embedding_dim=3).eval()
    assert torch.equal(alone(text, length, own), alone(text, length, 5 * own))


def test_counting_and_decayed_counting() -> None:
    # One user: trains on 0 0 0 (long ago) 1 1 (now), validates and tests on 1.
    data = FederatedData.from_columns(
        ["a"] * 7,
        {
            "x": np.zeros((7, 1)),
            "label": np.array([0, 0, 0, 1, 1, 1, 1]),
            "time": np.array([0, 0, 0, 90, 90, 91, 92]) * DAY,
        },
        ["train"] * 5 + ["valid", "test"],
    )
    found = counted(data)
    assert (found["counting"].test, found["decayed"].test) == (0.0, 1.0)
    assert found["decayed"].chosen == {"half_life": 2.0}
    assert found["decayed"].users == (1.0,)


def test_the_quick_table_goes_on_where_it_stopped(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "RECIPE", {**table.RECIPE, "dim": 4, "epochs": 1})

    def request(*only: str, finished: bool = False) -> Request:
        return Request(tmp_path, tmp_path / "out", only=only, progress=False, finished=finished)

    first = table.channels(request("channels-time-local", "channels-time-own-0")).read_text(encoding="utf-8")
    assert "**Not finished**: channels-time-text-0, channels-random-local" in first
    assert "| split by time | federated text + private count prior and memory |" in first
    rows = read_results(tmp_path / "out" / "furl-channels-quick.json")
    values = {(r.scene, r.method): r.value for r in rows}
    assert (values["split by time", "local memory alone"] or 0) > 0.9  # a word tells the label
    assert values["split by time", "federated text, one model for all"] is None

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a finished cell was computed again")

    (local,) = (tmp_path / "out").rglob("channels-time-local-*.json")
    assert json.loads(local.read_text(encoding="utf-8"))["ids"] == [str(user) for user in range(10)]
    monkeypatch.setattr(table, "messages", fail)
    again = table.channels(request("channels-time-local", "channels-time-own-0")).read_text(encoding="utf-8")
    assert again == first == table.channels(request(finished=True)).read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", [NonFiniteError, RoundError])
def test_a_cell_that_breaks_down_is_named_and_ends_no_table(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise kind("all are lost")

    monkeypatch.setattr(table, "simulate", broken)
    request = Request(tmp_path, tmp_path / "out", only=("channels-time-*",), progress=False)
    text = table.channels(request).read_text(encoding="utf-8")
    said = "**Broke down**: channels-time-own-0 (all are lost), channels-time-text-0 (all are lost)."
    assert said in text
    assert "**Not finished**: channels-random-local" in text
    rows = read_results(tmp_path / "out" / "furl-channels-quick.json")
    assert {r.method for r in rows if r.scene == "split by time" and r.value is not None} >= {
        "local memory alone"
    }

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a cell that broke down was computed again")

    monkeypatch.setattr(table, "messages", fail)
    assert table.channels(request).read_text(encoding="utf-8") == text


def test_what_trains_beside_decayed_counts_is_of_their_revision(tmp_path: Path) -> None:
    cells = [
        table.Cell(order, part, 0, None, None, tmp_path, tmp_path, ())
        for order in ORDERS
        for part in ("local", "own", "text")
    ]
    assert {c.name: c.slot.revision for c in cells if c.slot.revision} == {"channels-time-own-0": 1}


ORDERS: tuple[Order, ...] = ("time", "random")
LOCAL, OWN, TEXT, TIME_OWN = (
    {"channels-time-local", "channels-random-local"},
    {"channels-time-own-0", "channels-random-own-0"},
    {"channels-time-text-0", "channels-random-text-0"},
    {"channels-time-local", "channels-time-own-0"},
)


@pytest.mark.parametrize(
    ("name", "value", "used_by"),
    [
        ("GRID", {**table.GRID, "bayes": (0.0, 3.0)}, LOCAL | OWN),
        ("GRID", {**table.GRID, "votes": (0.0,)}, LOCAL | OWN),
        ("GRID", {**table.GRID, "text": (1.0,)}, OWN | TEXT),
        ("HALF_LIVES", (1.0,), LOCAL),
        ("HALF_LIFE", 4.0, TIME_OWN),
        ("RECENT", 0.5, TIME_OWN),
        ("SHRINK", 1.0, LOCAL | OWN),
        ("NEIGHBOURS", 5, LOCAL | OWN),
    ],
)
def test_a_cell_is_found_by_what_it_depends_on(
    name: str, value: object, used_by: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keys() -> dict[str, str]:
        cells = [
            table.Cell(order, part, 0, None, None, tmp_path, tmp_path, ())
            for order in ORDERS
            for part in ("local", "own", "text")
        ]
        return {cell.name: cell.slot.file.name for cell in cells}

    before = keys()
    monkeypatch.setattr(table, name, value)
    assert {cell for cell, file in keys().items() if file != before[cell]} == used_by


def test_no_run_of_other_settings_or_an_older_revision_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Path] = []

    def begin(*_: object, out: Path, resume: bool, **__: object) -> None:
        assert not resume
        begun.append(out)
        out.mkdir(parents=True, exist_ok=True)
        (out / "run.json").touch()
        raise RoundError("stopped")

    monkeypatch.setattr(table, "simulate", begin)
    request = Request(tmp_path, tmp_path / "out", only=("channels-time-own-0",), progress=False)
    table.channels(request)
    monkeypatch.setattr(table, "REVISION", 2)
    table.channels(request)
    monkeypatch.setattr(table, "RECIPE", {**table.RECIPE, "epochs": 1})
    table.channels(request)
    assert len(set(begun)) == 3


def test_without_data() -> None:
    with pytest.raises(DataError, match=r"^furl-channels reads real.*--data.*DIR"):
        table.channels(Request(None, Path("out")))
