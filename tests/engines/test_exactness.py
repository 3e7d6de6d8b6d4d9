"""Splitting changes nothing (FURL, §2.2): a joint model that holds every user's vector equals the split model.

The joint model is plain PyTorch: a table with a row per user, trained on each client and averaged centrally with all
other parameters. z = c / Σc is what averaging does to a user's row (eq. 6); z = 1 keeps the row as trained (eq. 7).
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from fedkeep import FederatedData, Phase, averaging, methods, sgd, simulate
from fedkeep.models import DocumentModel, Linear
from tests.engines.reference import close, cohorts, federated
from tests.tiny import Line, Rounds, classes, job, pairs, texts


class JointLinear(nn.Module):
    def __init__(self, split: Linear, users: int) -> None:
        super().__init__()
        self.linear = nn.Linear(split.linear.in_features, split.linear.out_features)
        self.linear.load_state_dict(split.linear.state_dict())
        self.users = nn.Parameter(split.user.detach().repeat(users, 1))

    def forward(self, batch: dict[str, Tensor], client: int) -> Tensor:
        return self.linear(batch["x"]) + self.users[client]


class JointDocument(nn.Module):
    """Characters → embedding → torch's LSTM over packed sequences → concat with the user's row → MLP."""

    def __init__(self, split: DocumentModel, users: int, pool: str) -> None:
        super().__init__()
        self.pool = pool
        vocabulary, width = split.embedding.weight.shape
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, split.lstm.hidden_size, batch_first=True, bidirectional=True)
        self.mlp = nn.Sequential(
            nn.Identity(),
            nn.Linear(*split.mlp[1].weight.shape[::-1]),
            nn.ReLU(),
            nn.Linear(*split.mlp[3].weight.shape[::-1]),
        )
        own = {n: v for n, v in split.state_dict().items() if n not in ("user", "user_bias")}
        self.load_state_dict(own)
        self.users = nn.Parameter(split.user.detach().repeat(users, 1))
        self.user_biases = nn.Parameter(split.user_bias.detach().repeat(users, 1))

    def forward(self, batch: dict[str, Tensor], client: int) -> Tensor:
        length = batch["text_length"]
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embedding(batch["text"]), length, batch_first=True, enforce_sorted=False
        )
        output, (state, _) = self.lstm(packed)
        if self.pool == "last":
            text = torch.cat([state[0], state[1]], 1)
        else:
            steps, _ = nn.utils.rnn.pad_packed_sequence(output, batch_first=True, padding_value=-float("inf"))
            text = steps.amax(1)
        joined = torch.cat([text, self.users[client].expand(len(text), -1)], 1)
        return self.mlp(joined) + self.user_biases[client]


def joint_loss(model: nn.Module, batch: dict[str, Tensor], client: int) -> Tensor:
    return nn.functional.cross_entropy(model(batch, client), batch["label"])


@functools.cache
def linear() -> tuple[Linear, nn.Module, FederatedData, tuple[tuple[str, str], ...]]:
    data = classes(counts=(5, 9, 3, 7, 4, 6, 8))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        split = Linear(3, 3).double()
        nn.init.normal_(split.user)
    return split, JointLinear(split, len(data)).double(), data, (("user", "users"),)


@functools.cache
def document(
    pool: Literal["last", "max"],
) -> tuple[DocumentModel, nn.Module, FederatedData, tuple[tuple[str, str], ...]]:
    data = texts(counts=(4, 6, 3, 5, 7), vocabulary=60)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        split = DocumentModel(60, 3, 4, embedding_dim=5, hidden=3, mlp=6, pool=pool, user_bias=True).double()
        nn.init.normal_(split.user)
        nn.init.normal_(split.user_bias)
    tables = (("user", "users"), ("user_bias", "user_biases"))
    return split, JointDocument(split, len(data), pool).double(), data, tables


@pytest.mark.parametrize(
    ("build", "scale", "weighting"),
    [
        pytest.param(linear, 1, "examples", id="linear"),
        pytest.param(linear, 1, "uniform", id="linear, every client alike"),
        pytest.param(linear, "fedavg", "examples", id="linear, the share"),
        pytest.param(linear, "fedavg", "uniform", id="linear, the share, every client alike"),
        pytest.param(lambda: document("last"), "fedavg", "examples", id="document, the share"),
        pytest.param(lambda: document("max"), 1, "uniform", id="document max, every client alike"),
    ],
)
def test_the_split_model_equals_the_joint_model(build: Any, scale: Any, weighting: Any) -> None:
    split, joint, data, tables = build()
    rounds, cohort, seed = 6, 3, 11
    method = methods.furl(
        [a for a, _ in tables],
        private_scale=scale,
        private_init="model",
        local=Phase(optimizer=sgd(0.4), batch_size=2, epochs=2),
        server=averaging(by=weighting),
    )
    run = simulate(split, method, data, rounds=rounds, cohort=cohort, seed=seed).last
    expected = federated(
        joint,
        data,
        cohorts(data, cohort, rounds, seed),
        method.client.phases[0],
        lambda m: torch.optim.SGD(m.parameters(), 0.4),
        seed=seed,
        uniform=weighting == "uniform",
        loss=joint_loss,
        keep_rows=[b for _, b in tables] if scale == 1 else (),
    )
    close(run.server, expected)
    kept = run.private.read(range(len(data)))
    for ours, theirs in tables:
        torch.testing.assert_close(kept[ours], expected[theirs], rtol=0, atol=1e-10)
        assert float((kept[ours] - split.state_dict()[ours]).abs().min(1).values.max()) > 1e-3  # it did learn


def test_the_two_rules_differ() -> None:
    split, _, data, _ = linear()
    runs = [
        simulate(split, methods.furl("user", private_scale=scale), data, rounds=3, cohort=3).private.read(
            range(7)
        )
        for scale in (1, "fedavg")
    ]
    assert not torch.allclose(runs[0]["user"], runs[1]["user"])


def test_the_share_by_hand() -> None:
    """z = c / Σc over the round's cohort: 3 of 4 examples and 1 of 4."""

    class Bias(Line):
        def forward(self, x: Tensor) -> Tensor:
            return self.user + 0 * self.w * x[:, 0]

    data = pairs({"a": [(0, 1), (0, 1), (0, 1)], "b": [(0, 5)]})
    for scale, expected in ((1, [0.2, 1.0]), ("fedavg", [0.15, 0.25])):
        method = methods.furl("user", private_scale=scale, local=Phase(loss=methods.terms.squared_error()))  # type: ignore[arg-type]
        work = job(Bias(), method, data)
        Rounds(work)([0, 1])
        assert work.store.read([0, 1])["user"].tolist() == pytest.approx(expected, abs=1e-15)
