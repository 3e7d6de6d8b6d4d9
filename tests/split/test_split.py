"""The split divides and merges, and only it lets anything leave a client."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor, nn

from fedkeep import Init, Phase, Split
from fedkeep.core.errors import SplitError, UploadError
from fedkeep.core.net import Net
from fedkeep.core.params import Params
from fedkeep.methods import furl
from fedkeep.split.split import Upload, check_upload
from tests.refusals import raises
from tests.tiny import Logits, Noisy, Tied, classes, job, results

NAMES = ["user", "linear.weight", "linear.bias"]


@pytest.mark.parametrize(
    ("patterns", "private"),
    [
        ((), []),
        ("user", ["user"]),
        (["user"], ["user"]),
        (("linear.*",), ["linear.weight", "linear.bias"]),
        (("*",), NAMES),
        (("USER", "*.bias"), ["linear.bias"]),
        (("use",), []),
        (("user*", "user"), ["user"]),
    ],
)
def test_the_halves_are_disjoint_and_complete(patterns: Any, private: list[str]) -> None:
    split = Split(patterns)
    params = Net(Logits()).initial()
    own, federated = split.personal(params), split.federated(params)
    assert list(own) == private == split.private_names(NAMES)
    assert [n for n in NAMES if n not in private] == list(federated)
    merged = split.merge(federated, own)
    assert merged.keys() == params.keys()
    assert all(merged[n] is params[n] for n in NAMES)


def test_a_split_is_a_value() -> None:
    assert Split("user") == Split(["user"]) == Split(("user",))
    assert hash(Split("user")) == hash(Split(["user"]))


def test_a_name_in_the_wrong_half_is_refused() -> None:
    split, params = Split("user"), Net(Logits()).initial()
    with raises(SplitError, wrong=["user", "linear.bias"]):
        split.merge(params, {"linear.bias": params["linear.bias"]})


def test_a_pattern_without_match_is_an_error_with_a_suggestion() -> None:
    with raises(SplitError, half="private", pattern="linaer.weight"):
        Split(["user", "linaer.weight"]).check(Logits())
    with raises(SplitError, half="private", pattern="zzz"):
        Split("zzz").check(Logits())


def test_storage_tied_across_the_halves_is_refused() -> None:
    with raises(SplitError, own="head.weight", rest="federated", theirs="body.weight", module_type="Tied"):
        Split("head.*").check(Tied())
    with raises(SplitError, own="head.weight", rest="federated", theirs="body.weight", module_type="Tied"):
        Split("head.*").table(Tied())

    Split("head.bias").check(Tied())
    Split("*").check(Tied())
    Split().check(Tied())


def test_a_private_view_of_a_federated_tensor_is_tied() -> None:
    class View(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.whole = nn.Parameter(torch.zeros(4))
            self.user = nn.Parameter(self.whole.data[2:])

    with raises(SplitError, own="user", rest="federated", theirs="whole", module_type="View"):
        Split("user").check(View())


def test_the_table_places_every_parameter_and_buffer() -> None:
    table = Split(["user", "norm.running_*"]).table(Noisy())
    assert [(r["name"], r["half"], r["kind"], r["shape"], r["bytes"]) for r in table] == [
        ("user", "private", "parameter", [3], 12),
        ("norm.weight", "federated", "parameter", [3], 12),
        ("norm.bias", "federated", "parameter", [3], 12),
        ("norm.running_mean", "private", "buffer", [3], 12),
        ("norm.running_var", "private", "buffer", [3], 12),
        ("norm.num_batches_tracked", "federated", "buffer", [], 8),
        ("linear.weight", "federated", "parameter", [3, 3], 36),
        ("linear.bias", "federated", "parameter", [3], 12),
    ]


def test_an_upload_holds_the_change_of_the_federated_half() -> None:
    start = {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor(3)}
    trained = {
        "w": torch.tensor([1.5, 0.0]).requires_grad_(),
        "n": torch.tensor(7),
        "user": torch.tensor(9.0),
    }
    upload = Split("user").upload(start, trained, 4.0)
    assert {n: v.tolist() for n, v in upload.deltas.items()} == {"w": [0.5, -2.0], "n": 7}
    assert not upload.deltas["w"].requires_grad
    assert upload.weight == 4.0
    trained["n"] += 1
    assert int(upload.deltas["n"]) == 7


def test_a_private_name_does_not_leave_even_if_the_server_asks_for_it() -> None:
    params = Net(Logits()).initial()
    assert "user" not in Split("user").upload(params, params, 1.0).deltas


def test_only_the_split_makes_an_upload() -> None:
    for key in (None, object()):
        with raises(SplitError, said="An Upload is made by Split.upload alone, so"):
            Upload({"user": torch.zeros(1)}, 1.0, key)


def canary(shape: torch.Size, number: int) -> Tensor:
    """Return floats of a bit pattern that no training gives: 0x7A… with a counter in the mantissa, about 1e35."""
    count = max(1, shape.numel())
    return (
        (torch.arange(count, dtype=torch.int32) + 0x7A5A0000 + 4096 * number)
        .view(torch.float32)
        .reshape(shape)
    )


def found(canaries: Params, content: bytes) -> list[str]:
    return [n for n, v in canaries.items() for i in v.reshape(-1) if i.numpy().tobytes() in content]


@pytest.mark.parametrize("private", ["user", ("user", "linear.bias"), ("user", "norm.running_*"), "*"])
def test_no_canary_is_found_in_the_bytes_that_leave(private: Any) -> None:
    """Private tensors hold canaries before training and others after it; neither are in the serialised upload."""
    split, params = Split(private), Net(Noisy()).initial()
    received = split.federated(params)
    names = list(split.personal(params))
    planted = {n: canary(params[n].shape, k) for k, n in enumerate(names) if params[n].is_floating_point()}
    trained = {n: v + 0.5 if v.is_floating_point() else v + 1 for n, v in params.items()} | planted
    assert planted
    content = save(split.upload(received, trained, 3.0).deltas)
    assert found(planted, content) == []
    assert not any(n.encode() in content for n in names)
    assert len(set(found(planted, save(planted)))) == len(planted)  # the search does find them where they are


def test_no_canary_is_found_in_the_uploads_of_a_round() -> None:
    """The same through the local run: neither the values before training nor those after it leave."""
    method = furl("user", local=Phase(batch_size=4)).on_client(keep=Init(value="model"))
    model = Logits()
    with torch.no_grad():
        model.user.copy_(torch.tensor([0.7390851, -1.3247180, 0.5671433]))
    work = job(model, method, classes(kind="f4"))
    planted = {"user": model.user.detach().clone()}
    given = results(work, [0, 1, 2])
    trained = {f"user-{result.client}": result.kept["user"] for result in given if result.kept is not None}
    assert len(trained) == 3
    for result in given:
        upload = result.upload
        content = save(upload.deltas)
        assert list(upload.deltas) == ["linear.weight", "linear.bias"]
        assert found(planted | trained, content) == []


RECEIVED = {"a": torch.zeros(2), "b": torch.zeros(3)}


def upload(deltas: Params, weight: float = 1.0) -> Upload:
    return dataclasses.replace(Split().upload({}, {}, weight), deltas=deltas)


@pytest.mark.parametrize(
    ("deltas", "weight", "facts"),
    [
        ({"a": torch.zeros(2)}, 1.0, {"client": "ann"}),
        ({"a": torch.zeros(2), "b": torch.zeros(3), "user": torch.zeros(1)}, 1.0, {"client": "ann"}),
        (
            {"a": torch.zeros(2), "b": torch.zeros(3, 1)},
            1.0,
            {"client": "ann"},
        ),
        (
            {"a": torch.zeros(2), "b": torch.zeros(3).double()},
            1.0,
            {"client": "ann"},
        ),
        (
            {"a": torch.zeros(2), "b": torch.tensor([0, float("nan"), 0])},
            1.0,
            {"client": "ann"},
        ),
        ({"a": torch.tensor([0, -float("inf")]), "b": torch.zeros(3)}, 1.0, {"client": "ann"}),
        (dict(RECEIVED), -1.0, {"client": "ann"}),
        (dict(RECEIVED), float("nan"), {"client": "ann"}),
        (dict(RECEIVED), float("inf"), {"client": "ann"}),
    ],
)
def test_a_faulty_upload_is_refused_with_its_client_named(
    deltas: Params, weight: float, facts: dict[str, Any]
) -> None:
    with raises(UploadError, **facts):
        check_upload(upload(deltas, weight), RECEIVED, "ann")


@pytest.mark.parametrize("weight", [0.0, 1.0, 274.0])
def test_a_good_upload_passes(weight: float) -> None:
    check_upload(upload(dict(RECEIVED), weight), RECEIVED, "ann")


def test_an_upload_that_arrives_with_a_private_name_is_refused() -> None:
    values = {"head.weight": torch.zeros(2), "user": torch.zeros(3)}
    with pytest.raises(UploadError, match="^An upload was refused: the private 'user' is in it.$"):
        Split("user").arrived(values, 1.0, {})
    assert Split().arrived(values, 1.0, {}).deltas is values


@pytest.mark.parametrize(
    ("rows", "facts"),
    [
        ({"x": torch.tensor([0])}, {"client": "ann"}),
        ({"step": torch.tensor([0])}, {"client": "ann"}),
        (
            {"table": torch.tensor([[0]])},
            {"client": "ann"},
        ),
        (
            {"table": torch.tensor([0.0])},
            {"client": "ann"},
        ),
        ({"table": torch.tensor([1, 1])}, {"client": "ann"}),
        ({"table": torch.tensor([2, 1])}, {"client": "ann"}),
        ({"table": torch.tensor([-1, 1])}, {"client": "ann"}),
        ({"table": torch.tensor([1, 4])}, {"client": "ann"}),
        ({"table": torch.tensor([1])}, {"client": "ann"}),
    ],
)
def test_the_rows_of_a_faulty_upload_are_refused(rows: Params, facts: dict[str, Any]) -> None:
    received = {"table": torch.zeros(4, 2), "step": torch.tensor(3)}
    start, trained = {"table": torch.zeros(2, 2)}, {"table": torch.ones(2, 2)}
    step = {"step": torch.tensor(3)}
    good = Split().upload(start | step, trained | step, 1.0, {"table": torch.tensor([1, 3])})
    check_upload(good, received, "ann")
    assert good.cut(received)["table"].shape == (2, 2)
    assert good.cut_bytes(received) == 2 * 2 * 4 + 8
    with raises(UploadError, **facts):
        check_upload(dataclasses.replace(good, rows=rows), received, "ann")


def test_a_pattern_that_is_a_number_is_refused() -> None:
    with raises(SplitError, name="private", got=2):
        Split(2)  # type: ignore[arg-type]


def test_a_type_is_found_by_a_method() -> None:
    with pytest.raises(SplitError, match=r"method\.resolved"):
        Split(private=("type:Linear",)).table(Logits())
