"""The networks, against the same written in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedkeep import Phase, Split, check_split, methods, simulate
from fedkeep.core.errors import ConfigError
from fedkeep.core.net import Net, PooledNet
from fedkeep.models import (
    BagOfWords,
    DocumentModel,
    Linear,
    MatrixFactorization,
    MultiTaskDocument,
    TextClassifier,
)
from tests.refusals import raises
from tests.tiny import everyone, texts

TEXT = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 0, 0, 0], [6, 0, 0, 0, 0]])
LENGTH = torch.tensor([5, 2, 1])


def document(**options: Any) -> DocumentModel:
    torch.manual_seed(0)
    model = DocumentModel(
        10, 3, options.pop("user_dim", 4), embedding_dim=5, hidden=3, mlp=6, **options
    ).double()
    for name, value in model.named_parameters():
        if name.startswith("user"):
            nn.init.normal_(value)
    return model


def plain(model: DocumentModel, text: Tensor, length: Tensor, pool: str) -> Tensor:
    lstm = nn.LSTM(5, 3, batch_first=True, bidirectional=True).double()
    lstm.load_state_dict(dict(model.lstm.state_dict().items()))
    rows = []
    for ids, n in zip(text, length.tolist(), strict=True):
        output, (state, _) = lstm(model.embedding.weight[ids[:n]].unsqueeze(0))
        vector = {
            "last": torch.cat([state[0, 0], state[1, 0]]),
            "max": output[0].amax(0),
            "mean": output[0].mean(0),
        }[pool]
        parts = [vector] + ([model.user] if hasattr(model, "user") else [])
        hidden = torch.relu(model.mlp[1].weight @ torch.cat(parts) + model.mlp[1].bias)
        logits = model.mlp[3].weight @ hidden + model.mlp[3].bias
        rows.append(logits + (model.user_bias if hasattr(model, "user_bias") else 0))
    return torch.stack(rows)


@pytest.mark.parametrize("pool", ["last", "max", "mean"])
@pytest.mark.parametrize("options", [{}, {"user_dim": 0}, {"user_bias": True}])
def test_the_document_model_is_what_figure_1_draws(pool: Any, options: dict[str, Any]) -> None:
    model = document(pool=pool, **options)
    torch.testing.assert_close(model(TEXT, LENGTH), plain(model, TEXT, LENGTH, pool), rtol=0, atol=1e-12)


@pytest.mark.parametrize("pool", ["last", "max", "mean"])
def test_padding_changes_nothing(pool: Any) -> None:
    model = document(pool=pool)
    longer = torch.cat([TEXT, torch.full((3, 4), 7)], 1)
    torch.testing.assert_close(model(longer, LENGTH), model(TEXT, LENGTH), rtol=0, atol=1e-14)
    alone = torch.cat([model(TEXT[i : i + 1, :n], LENGTH[i : i + 1]) for i, n in enumerate(LENGTH.tolist())])
    torch.testing.assert_close(model(TEXT, LENGTH), alone, rtol=0, atol=1e-14)


@pytest.mark.parametrize("user_bias", [False, True])
def test_a_user_vector_per_example(user_bias: bool) -> None:
    model = document(user_bias=user_bias)
    private = frozenset({"user", "user_bias"} if user_bias else {"user"})
    values = Net(model).initial()
    for name in private:
        values[name] = torch.randn(4, *values[name].shape, dtype=torch.float64)
    client = torch.tensor([3, 0, 3])
    net = PooledNet(model, private)
    assert net.gathers
    together = net(values, {"text": TEXT, "text_length": LENGTH, "client": client})
    for row, c in enumerate(client.tolist()):
        own = {**values, **{n: values[n][c] for n in private}}
        alone = Net(model)(own, {"text": TEXT[row : row + 1], "text_length": LENGTH[row : row + 1]})
        torch.testing.assert_close(together[row], alone[0], rtol=0, atol=1e-12)


def test_features_and_head_make_the_whole() -> None:
    model = document(user_bias=True)
    net = Net(model)
    values, batch = net.initial(), {"text": TEXT, "text_length": LENGTH}
    features = net.call("features", values, batch)
    assert features.shape == (3, 2 * 3 + 4)
    assert torch.equal(features[:, -4:], values["user"].expand(3, 4))
    assert torch.equal(net.call("head", values, {"features": features}), net(values, batch))


def test_a_new_user_starts_at_zero() -> None:
    model = DocumentModel(10, 3, 4, user_bias=True)
    assert not model.user.any()
    assert not model.user_bias.any()
    assert not hasattr(DocumentModel(10, 3, 0), "user")


def test_dropout_is_on_in_training_alone() -> None:
    model = document(dropout=0.5)
    assert not torch.equal(model(TEXT, LENGTH), model(TEXT, LENGTH))
    model.eval()
    assert torch.equal(model(TEXT, LENGTH), model(TEXT, LENGTH))


def test_models_of_other_pools_are_told_apart() -> None:
    """A run is resumed only if its model looks the same; the pool has no parameters of its own."""
    assert repr(document(pool="last")) != repr(document(pool="max"))


def test_an_unknown_pool_is_refused() -> None:
    with raises(ConfigError, text="pool must be 'last', 'max' or 'mean'; got 'sum'."):
        DocumentModel(10, 3, pool="sum")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="MultiTaskDocument needs at least one task"):
        MultiTaskDocument(10, {})


def test_the_bag_of_words_by_a_plain_loop() -> None:
    torch.manual_seed(0)
    model = BagOfWords(10, 3, 4, embedding_dim=5, mlp=6, user_bias=True).double()
    nn.init.normal_(model.user)
    nn.init.normal_(model.user_bias)
    rows = []
    for ids, n in zip(TEXT, LENGTH.tolist(), strict=True):
        vector = torch.cat([model.embedding.weight[ids[:n]].sum(0) / n**0.5, model.user])
        rows.append(model.mlp(vector) + model.user_bias)
    torch.testing.assert_close(model(TEXT, LENGTH), torch.stack(rows), rtol=0, atol=1e-12)
    longer = torch.cat([TEXT, torch.full((3, 4), 7)], 1)
    torch.testing.assert_close(model(longer, LENGTH), torch.stack(rows), rtol=0, atol=1e-12)


def test_the_linear_model() -> None:
    model = Linear(3, 2)
    nn.init.normal_(model.user)
    x = torch.randn(4, 3)
    torch.testing.assert_close(model(x), x @ model.linear.weight.T + model.linear.bias + model.user)
    one = Linear(3, 1)
    torch.testing.assert_close(one(x), x @ one.linear.weight[0] + one.linear.bias[0])


@pytest.mark.parametrize("kind", [DocumentModel, BagOfWords, TextClassifier])
def test_one_output_is_a_prediction_for_each_example(kind: Any) -> None:
    torch.manual_seed(0)
    model, several = kind(10, 1), kind(10, 2)
    assert model(TEXT, LENGTH).shape == model.head(model.features(TEXT, LENGTH)).shape == (3,)
    assert several(TEXT, LENGTH).shape == (3, 2)


def test_matrix_factorisation_by_hand() -> None:
    model = MatrixFactorization(3, 2)
    with torch.no_grad():
        model.item.weight.copy_(torch.tensor([[1.0, 2.0], [0.0, 1.0], [5.0, 5.0]]))
        model.item_bias.weight.copy_(torch.tensor([[0.1], [0.2], [0.3]]))
        model.mean.fill_(3.0)
        model.user.copy_(torch.tensor([0.5, -1.0]))
        model.user_bias.fill_(0.25)
    expected = [3 + 0.25 + 0.1 + 0.5 - 2.0, 3 + 0.25 + 0.2 - 1.0]
    assert model(torch.tensor([0, 1])).tolist() == pytest.approx(expected)
    values = Net(model).initial()
    tables = {
        **values,
        "user": torch.tensor([[0.5, -1.0], [0.0, 0.0]]),
        "user_bias": torch.tensor([[0.25], [1.0]]),
    }
    net = PooledNet(model, frozenset({"user", "user_bias"}))
    got = net(tables, {"item": torch.tensor([0, 1]), "client": torch.tensor([0, 1])})
    assert got.tolist() == pytest.approx([expected[0], 3 + 1.0 + 0.2])


def tasks() -> MultiTaskDocument:
    torch.manual_seed(0)
    model = MultiTaskDocument(12, {"topic": 3, "tone": 2}, 4, embedding_dim=3, hidden=2, mlp=5).double()
    nn.init.normal_(model.user)
    return model


def test_several_tasks_share_the_user_vector_alone() -> None:
    model = tasks()
    out = model(TEXT, LENGTH)
    assert {n: tuple(v.shape) for n, v in out.items()} == {"topic": (3, 3), "tone": (3, 2)}
    for name, value in out.items():
        single = DocumentModel(12, value.shape[1], 4, embedding_dim=3, hidden=2, mlp=5).double()
        prefix = f"tasks.{name}."
        own = {n.removeprefix(prefix): v for n, v in model.state_dict().items() if n.startswith(prefix)}
        single.load_state_dict({**own, "user": model.user})
        torch.testing.assert_close(single(TEXT, LENGTH), value, rtol=0, atol=1e-12)
    slopes = torch.autograd.grad(
        out["topic"].sum(), [model.user, *model.tasks["tone"].parameters()], allow_unused=True
    )
    assert slopes[0] is not None
    assert all(s is None for s in slopes[1:])


def multi_task_loss() -> methods.terms.Term:
    return methods.terms.multi_task(
        {
            "topic": methods.terms.cross_entropy("label", "topic"),
            "tone": methods.terms.cross_entropy("tone", "tone"),
        },
        {"tone": 0.5},
    )


def test_a_multi_task_model_passes_the_checker_and_trains() -> None:
    model = tasks()
    batches = [
        {
            "text": TEXT + k,
            "text_length": LENGTH,
            "label": torch.tensor([0, 1, 2]),
            "tone": torch.tensor([k, -1, 0]),
        }
        for k in range(2)
    ]
    assert check_split(model, Split("user"), batches, loss=multi_task_loss()).ok
    data = texts(counts=(4, 6, 3))
    data.columns["tone"] = data.columns["label"] % 2  # type: ignore[operator,index]
    data.meta["tasks"] = {
        "topic": {"task": "multiclass", "label": "label"},
        "tone": {"task": "binary", "label": "tone"},
    }
    run = simulate(model, methods.furl("user", local=Phase(loss=multi_task_loss())), data, rounds=2, cohort=2)
    assert everyone(run.private, 3)["user"].shape == (3, 4)
    assert {"accuracy/topic", "accuracy/tone", "auc/tone"} <= run.evaluate("train").keys()
    pooled = simulate(
        model, methods.furl("user", local=Phase(loss=multi_task_loss())), data, rounds=2, centralised=True
    )
    assert pooled.evaluate("train")["loss/topic"] > 0
