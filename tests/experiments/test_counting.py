"""Counting as a reference: by hand, with times, and on the test examples of a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedkeep import FederatedData
from fedkeep.experiments.worth import counted
from fedkeep.tasks import tasks_in
from fedkeep.tasks.results import ExampleResults


def data_of(
    labels: dict[str, list[float]], split: str, task: str = "multiclass", times: bool = False
) -> FederatedData:
    """Return users with these labels, whose splits are spelled out by t(rain), v(alid) and x (test)."""
    owner = [user for user, own in labels.items() for _ in own]
    label = np.array([v for own in labels.values() for v in own], "f4" if task == "regression" else "i8")
    columns: dict[str, Any] = {"x": np.zeros((len(owner), 1), "f4"), "label": label}
    if times:
        columns["time"] = np.array([i for own in labels.values() for i in range(len(own))])
    names = {"t": "train", "v": "valid", "x": "test"}
    meta = {"task": task, "classes": 3} if task == "multiclass" else {"task": task}
    return FederatedData.from_columns(owner, columns, [names[c] for c in split * len(labels)], meta)


def examples(data: FederatedData) -> ExampleResults:
    """Return results of a model on the test and validation examples, which counting takes its rows from."""
    parts = []
    for split in ("test", "valid"):
        rows = data.split_rows(split)
        columns = {
            "client": torch.from_numpy(data.clients_of(rows).astype(np.int32)),
            "row": torch.from_numpy(rows),
        }
        columns |= {
            "own/loss": torch.zeros(len(rows)).double(),
            "own/score": torch.zeros(len(rows), dtype=torch.uint8),
        }
        parts.append(columns)
    kinds = {task.name: task.kind for task in tasks_in(data.meta)}
    return ExampleResults(round=1, tensors=parts[0], kinds=kinds, valid=parts[1])


def test_a_users_most_frequent_label_by_hand() -> None:
    data = data_of({"ann": [2, 2, 1, 2, 1], "bob": [0, 1, 1, 0, 1]}, "tttxx")
    found = counted(data, examples(data))()
    assert found.right.tolist() == [True, False, False, True]
    # all labels: 1, 3 and 2 of 6, with one more of each (2, 4, 3) / 9; ann: (0 + 2/9, 1 + 4/9, 2 + 3/9) / 4
    assert found.loss[:2].tolist() == pytest.approx([-math.log((2 + 3 / 9) / 4), -math.log((1 + 4 / 9) / 4)])


def test_a_tie_goes_to_what_is_frequent_everywhere() -> None:
    data = data_of({"ann": [0, 1, 1], "bob": [1, 1, 1]}, "ttx")
    assert counted(data, examples(data))().right.tolist() == [True, True]


def test_a_regressions_mean_by_hand() -> None:
    data = data_of({"ann": [1.0, 3.0, 5.0], "bob": [5.0, 7.0, 5.0]}, "ttx", "regression")
    found = counted(data, examples(data))()
    # the mean of all is 4: (1 + 3 + 4) / 3 − 5 and (5 + 7 + 4) / 3 − 5
    assert found.score.tolist() == pytest.approx([-7 / 3, 1 / 3])
    assert found.loss.tolist() == pytest.approx([49 / 9, 1 / 9])


def test_a_binary_score_is_the_logit_of_the_share() -> None:
    data = data_of({"ann": [1, 1, 0, 1], "bob": [0, 0, 0, 1]}, "tttx", "binary")
    kept = examples(data)
    kept.tensors["label"] = torch.ones(2, dtype=torch.uint8)
    found = counted(data, kept)()
    # labels everywhere (4 + 1, 2 + 1) / 8: ann (1 + 5/8, 2 + 3/8), bob (3 + 5/8, 3/8)
    assert found.score.tolist() == pytest.approx([math.log(19 / 13), math.log(3 / 29)])
    assert found.right.tolist() == [True, False]


def test_later_labels_count_more_where_validation_says_so() -> None:
    labels = {f"user-{k}": [0, 0, 0, 0, 1, 1, 1, 1, 1] for k in range(3)}
    timed, plain = (data_of(labels, "ttttttvxx", times=times) for times in (True, False))
    assert not counted(plain, examples(plain))().right.any()  # four zeros, two ones
    assert counted(timed, examples(timed))().right.all()  # the last two weigh 1 and γ


def test_examples_keep_their_places() -> None:
    data = data_of({"ann": [2, 2, 1, 2, 1], "bob": [0, 1, 1, 0, 1]}, "ttvxx")
    before = examples(data)
    after = counted(data, before)
    assert after.tensors["row"].tolist() == before.tensors["row"].tolist()
    assert after.valid["client"].tolist() == before.valid["client"].tolist()
    assert ExampleResults.checked(Path("f"), 1, after.to_tensors()).models() == ("own",)
