"""The three halves: what is private, federated, frozen, or in no half; and frozen values that training changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedkeep
from fedkeep import Split, check_split, declare
from fedkeep.core.describe import digest
from fedkeep.core.errors import SplitError
from fedkeep.core.net import Net
from fedkeep.privacy import Chain, GaussianNoise, RunDraws
from fedkeep.split import Frozen, Halves, updated_buffers
from tests.refusals import raises
from tests.split.test_check import CROSS_ENTROPY, batches
from tests.tiny import Logits, Noisy, Tied


class Everything(nn.Module):
    """A frozen and a trained table, batch normalisation, constants kept and not kept, statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.pretrained = nn.Embedding(5, 2)
        self.pretrained.weight.requires_grad_(False)
        self.norm = nn.BatchNorm1d(2)
        self.still = nn.BatchNorm1d(2, track_running_stats=False)
        self.head = nn.Linear(2, 3)
        self.register_buffer("mask", torch.ones(2))
        self.register_buffer("positions", torch.arange(5), persistent=False)
        self.register_buffer("mean", torch.zeros(2))
        declare(self, updated_buffers=("mean",))

    def forward(self, word: Tensor) -> Tensor:
        found = self.norm(self.pretrained(word + 0 * self.positions[0])) * self.mask
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * found.mean(0))
        return self.head(self.still(found - self.mean))


NORM = ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")


def test_every_tensor_is_exactly_one_of_the_three() -> None:
    model = Everything()
    halves = Split("head.*").halves(model)
    assert halves.private_names == ("head.weight", "head.bias")
    assert halves.federated_names == ("mean", "norm.weight", "norm.bias", *NORM, "still.weight", "still.bias")
    assert halves.frozen_names == ("mask", "pretrained.weight")
    assert halves.trainable == {
        "norm.weight",
        "norm.bias",
        "still.weight",
        "still.bias",
        "head.weight",
        "head.bias",
    }
    params = Net(model).initial()
    three = halves.private(params), halves.federated(params), halves.frozen(params)
    assert sorted(n for half in three for n in half) == sorted(params)
    assert all(half[n] is params[n] for half in three for n in half)
    assert halves == Split("head.*").halves(Everything())
    assert [halves.half(n) for n in ("head.bias", "mean", "mask")] == ["private", "federated", "frozen"]


@pytest.mark.parametrize(
    ("private", "frozen", "own", "still"),
    [
        ((), (), (), ("mask", "pretrained.weight")),
        (
            "*",
            (),
            (
                "mean",
                "norm.weight",
                "norm.bias",
                *NORM,
                "still.weight",
                "still.bias",
                "head.weight",
                "head.bias",
            ),
            ("mask", "pretrained.weight"),
        ),
        ("mask", (), ("mask",), ("pretrained.weight",)),  # its own name makes a constant private
        (
            "head.bias",
            "norm.*",
            ("head.bias",),
            ("mask", "pretrained.weight", "norm.weight", "norm.bias", *NORM),
        ),
        (("head.*",), ["mean", "mask"], ("head.weight", "head.bias"), ("mask", "mean", "pretrained.weight")),
    ],
)
def test_patterns(private: Any, frozen: Any, own: tuple[str, ...], still: tuple[str, ...]) -> None:
    halves = Split(private, frozen).halves(Everything())
    assert (halves.private_names, halves.frozen_names) == (own, still)
    assert not halves.trainable & set(still)


def test_the_table_shows_three_halves() -> None:
    table = {row["name"]: row["half"] for row in Split("head.*", frozen="norm.weight").table(Everything())}
    assert table["head.weight"] == "private"
    assert table["norm.bias"] == "federated"
    assert table["norm.weight"] == table["mask"] == table["pretrained.weight"] == "frozen"
    assert "positions" not in table


ONLY_FROZEN = (
    "Split pattern {!r} matches only frozen tensors of Everything ({}), of which no client has its own: parameters that "
    "require no gradient, buffers that training does not update, or what the split names frozen. Drop the pattern, or let "
    "them be trained."
)


@pytest.mark.parametrize(
    ("private", "frozen", "facts"),
    [
        (
            "pretrained.*",
            (),
            {"pattern": "pretrained.*", "module_type": "Everything", "names": ["pretrained.weight"]},
        ),
        (("head.*", "mas*"), (), {"pattern": "mas*", "module_type": "Everything", "names": ["mask"]}),
        (
            "positions",
            (),
            ({"said": "The private pattern 'positions' matches only buffers of"}),
        ),
        (
            (),
            "haed.bias",
            {"said": "The frozen pattern 'haed.bias' matches no parameter of"},
        ),
        ("haed.*", (), {"said": "matches no parameter of Everything. Did you mean 'head.*'?"}),
        (
            "head.*",
            "*.bias",
            ({"name": "head.bias", "mine": "head.*", "theirs": "*.bias"}),
        ),
    ],
)
def test_patterns_that_are_refused(private: Any, frozen: Any, facts: dict[str, Any]) -> None:
    with raises(SplitError, **facts):
        Split(private, frozen).check(Everything())


def test_a_pattern_is_text() -> None:
    with raises(SplitError, name="private", got=3):
        Split(["user", 3])  # type: ignore[list-item]

    assert Split("a", "b") == Split(["a"], frozen=("b",)) != Split("a")


def test_buffers_that_are_not_persistent_stand_in_no_half() -> None:
    """Position ids of transformers were refused under a private pattern; they are left where they are."""
    Split("*").check(Everything())
    halves = Split("*").halves(Everything())
    with raises(SplitError, name="positions"):
        halves.half("positions")


def test_updated_buffers() -> None:
    assert updated_buffers(Everything()) == {"mean", *NORM}
    assert updated_buffers(nn.Sequential(Noisy(), nn.InstanceNorm1d(2, track_running_stats=True))) == {
        "0.norm.running_mean",
        "0.norm.running_var",
        "0.norm.num_batches_tracked",
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    }


def test_tied_tensors_across_halves_are_refused() -> None:
    with raises(SplitError, name="head.weight", other="body.weight", module="Tied"):
        Split(frozen="head.*").check(Tied())
    Split(frozen="*.weight").check(Tied())
    with raises(SplitError, pattern="head.weight", module_type="Tied", names=["body.weight"]):
        Split("head.weight", "body.weight").check(Tied())
    with raises(SplitError, own="body.weight", rest="federated", theirs="head.weight", module_type="Tied"):
        Split("body.*").check(Tied())
    assert Split("*.weight").halves(Tied()).private_names == ("body.weight",)


def test_the_frozen_half_has_a_digest() -> None:
    model = Everything()
    halves, params = Split("head.*").halves(model), Net(model).initial()
    first = halves.frozen_digest(params)
    assert first == digest({n: params[n] for n in ("mask", "pretrained.weight")})
    assert first == halves.frozen_digest({**params, "head.bias": torch.ones(3)})
    assert first != halves.frozen_digest({**params, "mask": torch.zeros(2)})


def test_what_training_changed_of_the_frozen_half_is_named() -> None:
    watched = Frozen({"mask": torch.ones(2), "table": torch.zeros(2, 2)})
    assert watched.changed() == []
    watched.check("Client 'ann', round 3")
    watched.values["table"].add_(0)  # written to, though its value is the same
    assert watched.changed() == ["table"]
    with pytest.raises(SplitError) as error:
        watched.check("Client 'ann', round 3")
    assert str(error.value).startswith("Client 'ann', round 3: training changed 'table', which is frozen")


def test_what_was_made_in_inference_mode_is_not_watched() -> None:
    with torch.inference_mode():
        table = torch.zeros(2)
    assert Frozen({"table": table}).changed() == []
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode"):
        table.add_(1)


def test_a_forward_pass_that_writes_a_frozen_buffer_is_noticed() -> None:
    model = Everything()
    declare(model, updated_buffers=())
    net = Net(model)
    params = net.initial()
    watched = Frozen(Split("head.*").halves(model).frozen(params))
    net(params, {"word": torch.tensor([1, 2, 3])})
    assert watched.changed() == ["mean"]


def test_frozen_parameters_are_neither_uploaded_nor_noised() -> None:
    """The hole: noise moved what requires no gradient, as its (zero) change was uploaded."""
    model = Everything()
    split = Split("head.*")
    halves, params = split.halves(model), Net(model).initial()
    received = halves.federated(params)
    upload = split.upload(received, params, 1.0)
    sent, _ = Chain((GaussianNoise(0.5),)).encode(upload.deltas, received, RunDraws(0, "ann", 1))
    assert list(sent) == list(halves.federated_names)
    assert "pretrained.weight" not in sent
    assert float(sent["norm.weight"].abs().max()) > 0
    assert torch.equal(sent["norm.num_batches_tracked"], params["norm.num_batches_tracked"])


def test_a_name_that_is_frozen_by_pattern_does_not_leave() -> None:
    params = Net(Logits()).initial()
    assert list(Split("user", "linear.weight").upload(params, params, 1.0).deltas) == ["linear.bias"]


def test_the_checker_probes_a_model_with_a_frozen_half() -> None:
    data = [{"word": torch.tensor([0, 1, 2, k]), "label": torch.tensor([0, 1, 2, k])} for k in range(3)]
    report = check_split(Everything(), Split("head.*"), data, loss=CROSS_ENTROPY)
    assert report.violations == ()
    assert "pretrained.weight" not in report.immovable
    report = check_split(Logits(), Split("user", frozen="linear.*"), batches(), loss=CROSS_ENTROPY)
    assert (report.ok, report.immovable) == (True, ())


def test_halves_are_values() -> None:
    assert hash(Split("user").halves(Logits())) == hash(Split("user").halves(Logits()))
    assert Halves() == Halves(private_names=(), federated_names=(), frozen_names=())


def test_what_is_trained_is_real() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("angle", torch.ones(2, dtype=torch.cfloat))
    assert Split().halves(model).half("angle") == "frozen"
    model.wave = nn.Parameter(torch.ones(3, dtype=torch.cfloat))
    with raises(SplitError, name="wave", wanted=[3, 2]):
        Split("wave").halves(model)
    assert Split(frozen="wave").halves(model).half("wave") == "frozen"


def test_what_a_layer_keeps_besides_tensors_stays_in_it(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        calls = 3

        def get_extra_state(self) -> dict[str, int]:
            return {"calls": self.calls}

        def set_extra_state(self, state: Any) -> None:
            self.calls = state["calls"]

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    model = Counting(4, 3)
    assert Split("bias").halves(model).federated_names == ("weight",)
    run = fedkeep.simulate(
        model, fedkeep.methods.furl("bias"), fedkeep.data.toy(users=3, examples=9, classes=3), rounds=1
    )
    run.export(tmp_path / "models")
    kept = fedkeep.load_model(tmp_path / "models", "user-1", model=Counting(4, 3))
    assert torch.equal(kept.state_dict()["bias"], run.parameters("user-1")["bias"])
