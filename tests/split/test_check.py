"""The split-constraint checker passes what FURL §3.2 allows and names the equation that anything else breaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedkeep import Split, check_split, methods
from fedkeep.core.errors import ConfigError, SplitError
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params, weighted_mean
from fedkeep.models import DocumentModel, MatrixFactorization
from fedkeep.split.joint import Joint, fedavg_update, joint_from_loss, keep_trained
from tests.refusals import raises
from tests.tiny import Logits, Noisy

CROSS_ENTROPY = methods.terms.cross_entropy()


def batches(users: int = 3, features: int = 3) -> list[Batch]:
    draw = torch.Generator().manual_seed(4)
    return [
        {
            "x": torch.randn(4 + user, features, generator=draw),
            "label": torch.randint(0, 3, (4 + user,), generator=draw),
        }
        for user in range(users)
    ]


class Weights(nn.Module):
    """User-specific weights: a private layer on top of a federated one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def ratings() -> list[Batch]:
    return [{"item": torch.tensor([0, 2, 1]), "label": torch.tensor([4.0, 1.0, 3.0])} for _ in range(2)]


def documents() -> list[Batch]:
    text = torch.tensor([[1, 2, 3], [4, 5, 0]])
    return [
        {"text": text + k, "text_length": torch.tensor([3, 2]), "label": torch.tensor([k, 1])}
        for k in range(2)
    ]


@pytest.mark.parametrize(
    ("model", "private", "data", "loss"),
    [
        (Logits(), "user", batches(), CROSS_ENTROPY),
        (DocumentModel(12, 2, 4, embedding_dim=3, hidden=2, mlp=4), "user", documents(), CROSS_ENTROPY),
        (Weights(), "head.*", batches(), CROSS_ENTROPY),
        (MatrixFactorization(3, 2), ("user", "user_bias"), ratings(), methods.terms.squared_error()),
        (Noisy(dropout=0.5), "user", batches(), CROSS_ENTROPY),
        (Noisy(dropout=0.5), ("user", "norm.*"), batches(), CROSS_ENTROPY),
        (Logits(), "user", batches(), CROSS_ENTROPY + 0.3 * methods.terms.l2_penalty("user")),
        (Logits(), "*", batches(), CROSS_ENTROPY),
    ],
    ids=[
        "embedding",
        "document",
        "weights",
        "factorisation",
        "dropout",
        "batch norm",
        "norm per user",
        "all private",
    ],
)
def test_sound_splits_pass(model: nn.Module, private: Any, data: list[Batch], loss: Any) -> None:
    before = {n: v.clone() for n, v in model.state_dict().items()}
    report = check_split(model, Split(private), data, loss=loss)
    assert report.violations == ()
    assert report.ok
    assert report.probed == (1, 2, 3)
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())


def test_without_batches_the_check_is_static() -> None:
    report = check_split(Logits(), Split("user"))
    assert report.probed == ()
    assert [r["half"] for r in report.table] == ["private", "federated", "federated"]
    with pytest.raises(SplitError, match="matches no parameter"):
        check_split(Logits(), Split("usr"))


@pytest.mark.parametrize(
    ("model", "split", "said"),
    [
        (Logits(), ["user"], "split must be a split, e.g. fedkeep.Split(['head.*']); got ['user']."),
        (
            Logits,
            Split("user"),
            "model must be a torch.nn.Module; got <class 'tests.tiny.Logits'>. This is a class: call it, Logits(...).",
        ),
    ],
)
def test_what_is_no_model_or_no_split_is_refused(model: Any, split: Any, said: str) -> None:
    with raises(ConfigError, text=said):
        check_split(model, split, batches(), loss=CROSS_ENTROPY)


def test_probes_need_a_loss() -> None:
    with raises(SplitError, said="A probe needs a loss: pass loss=..., e.g."):
        check_split(Logits(), Split("user"), batches())


def joint(
    model: nn.Module,
    *,
    penalty: Callable[[Params, int], Tensor] | None = None,
    federated_update: Any = fedavg_update,
    private_update: Any = keep_trained,
) -> Joint:
    plain = joint_from_loss(Net(model), CROSS_ENTROPY).loss

    def loss(federated: Params, private: Params, batch: Batch, user: int) -> Tensor:
        value = plain(federated, private, batch, user)
        return value if penalty is None else value + penalty(private, user)

    return Joint(loss, federated_update, private_update)


def penalise_the_matrix(private: Params, user: int) -> Tensor:
    return 0.1 * torch.linalg.matrix_norm(private["user"], "nuc")


def penalise_own_row(private: Params, user: int) -> Tensor:
    return 0.1 * torch.linalg.vector_norm(private["user"][user])


def regress_to_the_mean(private: Params, user: int) -> Tensor:
    return ((private["user"][user] - private["user"].mean(0)) ** 2).sum()


def test_a_penalty_on_each_users_own_vector_passes() -> None:
    model = Logits()
    report = check_split(model, Split("user"), batches(), joint=joint(model, penalty=penalise_own_row))
    assert report.ok


@pytest.mark.parametrize("penalty", [penalise_the_matrix, regress_to_the_mean])
def test_a_penalty_on_the_whole_user_matrix_violates_equation_1(
    penalty: Callable[[Params, int], Tensor],
) -> None:
    model = Logits()
    report = check_split(model, Split("user"), batches(), joint=joint(model, penalty=penalty))
    assert [(v.equation, v.parameter) for v in report.violations if v.equation == 1] == [(1, "user")]
    assert not report.ok
    told = str(report.violations[0])
    assert told.startswith(
        "Equation (1) is violated by 'user' (independent local training: ∂L(user i)/∂w_p(user j) = 0): "
        "the loss of user 0 has a gradient of up to "
    )
    assert "for the private values of user " in told
    assert told.splitlines()[0].endswith("A penalty must be taken on each user's own values.")


def test_the_penalised_parameter_is_the_one_named() -> None:
    model = Logits()

    def penalty(private: Params, user: int) -> Tensor:
        return (private["linear.bias"] ** 2).sum()

    report = check_split(
        model, Split(["user", "linear.bias"]), batches(), joint=joint(model, penalty=penalty)
    )
    assert [(v.equation, v.parameter) for v in report.violations] == [(1, "linear.bias")]


def test_a_tiny_influence_is_found_too() -> None:
    model = Logits()

    def penalty(private: Params, user: int) -> Tensor:
        return 1e-12 * private["user"][(user + 1) % 3, 0]

    assert not check_split(model, Split("user"), batches(), joint=joint(model, penalty=penalty)).ok


def test_an_aggregation_that_uses_private_values_violates_equation_2() -> None:
    def update(w_f: Params, trained: Sequence[Params], private: Params, summaries: Sequence[float]) -> Params:
        """Weight users by how near they are to the first one."""
        near = torch.softmax(-((private["user"] - private["user"][0]) ** 2).sum(1), 0)
        return {
            **weighted_mean(trained, summaries),
            "linear.bias": sum(n * t["linear.bias"] for n, t in zip(near, trained, strict=True)),
        }

    model = Logits()
    report = check_split(model, Split("user"), batches(), joint=joint(model, federated_update=update))
    assert [str(v) for v in report.violations] == [
        (
            "Equation (2) is violated by 'linear.bias' (federated update: a_f(w_f, u_f of all users, summaries)): "
            "the aggregated value changes when private values are replaced by noise."
        )
    ]


@pytest.mark.parametrize(
    ("what", "term"),
    [
        ("other users' private values", lambda user, w_f, before, after, trained: after["user"].mean(0)),
        ("other users' private values", lambda user, w_f, before, after, trained: before["user"].mean(0)),
        ("federated parameters", lambda user, w_f, before, after, trained: w_f["linear.bias"]),
        ("federated parameters", lambda user, w_f, before, after, trained: trained[user]["linear.bias"]),
    ],
)
def test_a_private_update_with_others_violates_equation_3(what: str, term: Any) -> None:
    """Multi-task federated learning pulls users towards each other at aggregation (user–user terms)."""

    def update(
        user: int,
        w_f: Params,
        before: Params,
        after: Params,
        trained: Sequence[Params],
        summaries: Sequence[float],
    ) -> Params:
        return {
            "user": after["user"][user]
            + 0.1 * (term(user, w_f, before, after, trained) - after["user"][user])
        }

    model = Logits()
    report = check_split(model, Split("user"), batches(), joint=joint(model, private_update=update))
    assert [str(v) for v in report.violations] == [
        (
            "Equation (3) is violated by 'user' (private update: a_p(w_p, u_p of the same user, summaries)): "
            f"the new value of user 0 changes when {what} are perturbed."
        )
    ]


def test_a_private_update_scaled_by_the_users_share_passes() -> None:
    """FURL's equation 6: z = c_i / Σc is a summary, so it is allowed."""

    def update(
        user: int,
        w_f: Params,
        before: Params,
        after: Params,
        trained: Sequence[Params],
        summaries: Sequence[float],
    ) -> Params:
        z = summaries[user] / sum(summaries)
        return {n: before[n][user] + z * (after[n][user] - before[n][user]) for n in after}

    model = Logits()
    assert check_split(model, Split("user"), batches(), joint=joint(model, private_update=update)).ok


def test_every_broken_equation_is_reported() -> None:
    model = Logits()

    def federated_update(
        w_f: Params, trained: Sequence[Params], private: Params, summaries: Sequence[float]
    ) -> Params:
        return {n: v + private["user"].sum() for n, v in weighted_mean(trained, summaries).items()}

    def private_update(
        user: int, w_f: Params, before: Params, after: Params, trained: Any, summaries: Any
    ) -> Params:
        return {"user": after["user"].mean(0)}

    broken = joint(
        model, penalty=penalise_the_matrix, federated_update=federated_update, private_update=private_update
    )
    report = check_split(model, Split("user"), batches(), joint=broken)
    assert [(v.equation, v.parameter) for v in report.violations] == [
        (1, "user"),
        (2, "linear.weight"),
        (2, "linear.bias"),
        (3, "user"),
    ]


def test_dropout_does_not_disturb_the_global_random_state() -> None:
    before = torch.random.get_rng_state()
    check_split(Noisy(dropout=0.5), Split("user"), batches(), loss=CROSS_ENTROPY)
    assert torch.equal(before, torch.random.get_rng_state())


class Casts(Weights):
    """Weights whose forward says of what type its values are."""

    def __init__(self, cast: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.cast, self.table = cast, nn.Embedding(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.cast(x) + self.table(x[:, 0].abs().long().clamp(max=8)))


@pytest.mark.parametrize(
    "cast",
    [
        lambda x: x.float(),
        lambda x: (x - torch.tensor([0.1, 0.2, 0.3])).to(torch.float32),
        lambda x: torch.stack([torch.bincount(row.long().abs(), minlength=9)[:3] for row in x]).float(),
        lambda x: nn.functional.normalize(x.half().float()),
        lambda x: torch.as_tensor(x.detach().numpy().astype("f4")),
    ],
)
@pytest.mark.parametrize("given", [torch.float32, torch.float64])
def test_a_forward_that_casts_is_probed_as_it_is_trained(
    cast: Callable[[Tensor], Tensor], given: torch.dtype
) -> None:
    torch.manual_seed(0)
    data = [{**each, "x": each["x"].to(given)} for each in batches()]
    report = check_split(Casts(cast), Split(["head.*"]), data, loss=CROSS_ENTROPY)
    assert report.ok
    assert report.probed == (1, 2, 3)
