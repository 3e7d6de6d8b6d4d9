import math

import pytest
import torch

from fedkeep.core.errors import DataError, NonFiniteError
from fedkeep.metrics import accuracy, per_client


def test_accuracy_by_hand() -> None:
    logits = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.4], [5.0, -5.0]])
    label = torch.tensor([1, 0, 0, 0])
    assert accuracy(logits, label) == 0.75
    assert accuracy(logits, label, torch.tensor([1.0, 1.0, 2.0, 0.0])) == 0.5
    assert accuracy(torch.zeros(2, 3), torch.tensor([0, 1])) == 0.5  # a tie goes to the lower class


def test_accuracy_of_nothing_is_nan() -> None:
    assert math.isnan(accuracy(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64)))
    assert math.isnan(accuracy(torch.zeros(1, 2), torch.tensor([0]), torch.tensor([0.0])))


def test_accuracy_ignores_nan_in_padding_only() -> None:
    logits = torch.tensor([[0.0, 1.0], [math.nan, 0.0]])
    label = torch.tensor([1, 0])
    assert accuracy(logits, label, torch.tensor([1.0, 0.0])) == 1.0
    with pytest.raises(
        NonFiniteError, match=r"^accuracy: a logit is NaN\. Lower the learning rate or set clip_norm\.$"
    ):
        accuracy(logits, label)


def test_accuracy_says_which_shapes_it_wants() -> None:
    with pytest.raises(DataError) as error:
        accuracy(torch.zeros(2, 3), torch.tensor([0]))
    assert str(error.value) == (
        "accuracy wants logits (B, classes), label (B,) and weight (B,) or None; got (2, 3), (1,), None."
    )


def test_per_client_by_hand() -> None:
    summary = per_client({f"u{i}": i / 10 for i in range(11)} | {"empty": math.nan})
    assert (summary.clients, summary.undefined) == (11, 1)
    assert summary.mean == pytest.approx(0.5)
    assert summary.std == pytest.approx(math.sqrt(0.1))  # variance of 0..10 is 10, in tenths 0.1
    assert (summary.min, summary.max, summary.worst) == (0.0, 1.0, "u0")
    assert summary.deciles == pytest.approx([i / 10 for i in range(1, 10)])
    assert summary.median == pytest.approx(0.5)


def test_per_client_without_values() -> None:
    summary = per_client({"a": math.nan})
    assert (summary.clients, summary.undefined, summary.worst) == (0, 1, None)
    assert math.isnan(summary.mean)
    assert math.isnan(summary.median)
