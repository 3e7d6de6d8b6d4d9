"""Rows of FURL's Table 3 that need no training: by hand, beside what furl-channels found, and paired over users."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fedkeep import FederatedData
from fedkeep.core.errors import DataError
from fedkeep.data import many_user_text
from fedkeep.experiments.build import build_data
from fedkeep.experiments.reproductions import Request
from fedkeep_papers.furl import table3
from fedkeep_papers.furl.channels import Found
from fedkeep_papers.furl.own_counts import messages
from fedkeep_papers.furl.scenes import SCENES, specs_of
from fedkeep_papers.furl.scoring import Scored
from fedkeep_papers.furl.untrained import (
    CLICKS,
    COUNTING,
    DECAYED,
    MEMORY,
    most_frequent_label,
    of_clicks,
    of_messages,
    side_by_side,
)


def three_users() -> FederatedData:
    """Three users; the second has nothing to judge."""
    return FederatedData.from_columns(
        ["a"] * 5 + ["b"] * 2 + ["c"] * 3,
        {"label": [0, 0, 1, 0, 1, 1, 1, 2, 2, 1]},
        split=["train"] * 3 + ["test"] * 2 + ["train"] * 2 + ["train", "train", "test"],
        meta={"classes": 3},
    )


def test_messages_by_hand_and_from_the_cell() -> None:
    data = three_users()
    counting = of_messages(data, None, 7)
    assert list(counting) == [COUNTING]  # the cell has not been computed
    assert counting[COUNTING].values == {7: pytest.approx(1 / 3)}
    assert counting[COUNTING].users == {None: {"a": 0.5, "c": 0.0}}
    row = Scored(0.1, 0.75, (0.25, 1.0), {})
    found = of_messages(data, Found({"decayed": Scored(0.1, 0.5, (0.0, 1.0), {}), "local": row}), 7)
    assert list(found) == [COUNTING, DECAYED, MEMORY]
    assert (found[MEMORY].values, found[MEMORY].users) == ({7: 0.75}, {None: {"a": 0.25, "c": 1.0}})
    assert found[DECAYED].users == {None: {"a": 0.0, "c": 1.0}}
    with pytest.raises(DataError, match="Wanted accuracies of these 2.*1"):
        of_messages(data, Found({"decayed": row, "local": Scored(0.1, 0.5, (0.0,), {})}), 7)
    assert of_messages(data, Found({"decayed": row, "local": row}, ("a", "c")), 7)[MEMORY] == found[MEMORY]
    with pytest.raises(DataError, match="Wanted accuracies of these 2.*2"):
        of_messages(data, Found({"decayed": row, "local": row}, ("a", "b")), 7)


def test_at_the_quick_scale_every_seed_has_the_users_of_the_untrained_rows(tmp_path: Path) -> None:
    place = tmp_path / "zulip_channels"
    place.mkdir()
    (place / "channels.tsv").write_text(
        "label\tcommunity\tchannel\tmessages\n0\tlean\tc\t9\n", encoding="utf-8"
    )
    splits = ("train", "valid", "test")
    line = {"community": "lean", "label": 0, "text": "so it is"}
    lines = [
        json.dumps({"user": u, "split": s, "time": (u + k) % 3, **line}) + "\n"
        for u in range(200)
        for k, s in enumerate(splits)
    ]
    (place / "messages.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
    request = Request(tmp_path, tmp_path, "quick", seeds=[1, 2])
    for scene in (s for s in SCENES if s.needs_data):
        specs = specs_of(scene, request, tmp_path, {})
        holder = SimpleNamespace(request=request, specs={scene.name: specs}, sources={scene.name: {}})
        cell = table3._Sheet._channels(holder, scene)  # type: ignore[arg-type]
        found = messages(place, cell.order, cell.users)
        assert len(found) == 80
        for spec in specs.values():
            read = build_data(spec.resolved(), tmp_path)
            assert list(read.ids) == list(found.ids)
            assert np.array_equal(read.columns["time"], found.columns["time"])


def test_clicks_are_scored_by_the_users_own_shares_and_words() -> None:
    data = {s: many_user_text(users=30, examples=40, kind="binary", seed=s) for s in (0, 1)}
    found = of_clicks(data)
    assert list(found) == [CLICKS, MEMORY]
    for seed, own in data.items():
        labels, scores, judged = np.asarray(own.columns["label"]), [], []
        for client in range(len(own)):
            train, test = (labels[np.asarray(own.rows(client, split))] for split in ("train", "test"))
            scores += [train.mean()] * len(test)
            judged += test.tolist()
        s, y = np.array(scores), np.array(judged)
        above = (s[y == 1][:, None] > s[y == 0]).mean() + 0.5 * (s[y == 1][:, None] == s[y == 0]).mean()
        assert found[CLICKS].values[seed] == pytest.approx(above)
        mean = np.mean(list(found[CLICKS].users[seed].values()))
        assert 0 <= mean <= 1
        assert set(found[MEMORY].users[seed]) == set(map(str, own.ids))
        assert (
            found[MEMORY].values[seed] > found[CLICKS].values[seed]
        )  # the words of a user's topics tell more
    users = found[CLICKS].users[0]
    labels = np.asarray(data[0].columns["label"])
    for client in range(3):  # without a tie the larger share is the more frequent label
        train = labels[np.asarray(data[0].rows(client, "train"))]
        if 2 * train.sum() != len(train):
            want = most_frequent_label(data[0], clients=[client])
            assert users[str(data[0].ids[client])] == pytest.approx(want)


def test_side_by_side_pairs_users_and_seeds() -> None:
    a = {0: {"u": 0.5, "v": 0.75, "w": 1.0}, 1: {"u": 0.5, "v": 0.25, "w": 1.0}}
    b = {1: {"w": 0.5, "v": 0.25, "u": 0.375}}  # another order of users, and one seed
    alone = {None: {"u": 0.25, "v": 0.25, "w": 0.25, "x": 1.0}}
    text = side_by_side(
        {"A": a, "B": b, "not run": {}, "(alone)": alone}, ("B", "absent", "(alone)"), "Title"
    )
    lines = [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert lines[0] == ["row", "accuracy, mean over users", "points over B", "points over (alone)", "seeds"]
    first, second, third = lines[2:]
    # A − B under seed 1, by user: 0.125, 0, 0.5; mean 0.20833, deviation 0.26021; t of 2 degrees 4.30265.
    half = 4.302653 * np.std([0.125, 0, 0.5], ddof=1) / np.sqrt(3)
    mean = 0.625 / 3
    want = f"{100 * mean:+.2f} ({100 * (mean - half):+.2f} to {100 * (mean + half):+.2f})".replace("-", "−")
    assert first[:3] == ["A", "66.67 %", want]
    assert first[4] == "2"
    # A − alone over both seeds: (0.25, 0.5, 0.75) and (0.25, 0, 0.75), user x left out; mean 5 / 12.
    assert first[3].startswith("+41.67 (")
    assert (second[0], second[2], second[4]) == ("B", "–", "1")
    assert (third[0], third[1], third[4]) == ("(alone)", "43.75 %", "–")
    assert third[2].startswith("−12.50 (")  # of one seed: −0.125, 0, −0.25
    assert side_by_side({"A": {}}, ("A",), "Title") == ""
