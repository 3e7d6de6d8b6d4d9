"""A label for each token: losses and metrics are those that plain PyTorch finds, whatever form a model's output has."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedkeep
from fedkeep import FederatedData, Phase, sgd
from fedkeep.core.errors import DataError, MethodError
from fedkeep.data import next_tokens
from fedkeep.report.runs import read_run
from tests.refusals import raises

WORDS, TOKENS = 11, 6


class Outputs(OrderedDict):  # type: ignore[type-arg]
    """As transformers' ``ModelOutput``: a dictionary with attributes."""

    @property
    def logits(self) -> Tensor:
        return self["logits"]


FORMS: dict[str, Any] = {
    "tensor": lambda out: out,
    "tuple": lambda out: (out, object()),
    "dict": lambda out: {"features": 2 * out, "logits": out},
    "ModelOutput": lambda out: Outputs(logits=out, past=object()),
}


class Reader(nn.Module):
    """Logits of each token from itself and the mean of those that the mask shows."""

    def __init__(self, form: str = "tensor") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, 4)
        self.head = nn.Linear(4, WORDS)
        self.user = nn.Parameter(torch.zeros(4))
        self.form = FORMS[form]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        seen, mask = self.embedding(input_ids), attention_mask.unsqueeze(-1)
        mean = (seen * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        return self.form(self.head(seen + mean + self.user))


def corpus(task: str = "next_token", clients: int = 3, each: int = 7) -> FederatedData:
    rng, rows = np.random.default_rng(0), clients * each
    ids = rng.integers(1, WORDS, (rows, TOKENS))
    mask = (np.arange(TOKENS) < rng.integers(2, TOKENS + 1, rows)[:, None]).astype(np.int64)
    label = next_tokens(ids, mask) if task == "next_token" else np.where(mask, (ids * 3) % WORDS, -100)
    columns = {"input_ids": ids * mask, "attention_mask": mask, "label": label}
    split = (["train"] * (each - 3) + ["valid", "test", "test"]) * clients
    meta = {"task": task, "classes": WORDS}
    return FederatedData.from_columns(np.repeat(np.arange(clients), each), columns, split, meta)


LOCAL = Phase(optimizer=sgd(0.5), batch_size=2, epochs=2)
METHOD = fedkeep.methods.furl("user", local=LOCAL)


def test_rows_that_look_padded_want_a_mask() -> None:
    ids = np.array([[5, 6, 0, 0, 0], [7, 8, 9, 0, 0], [1, 2, 3, 4, 5]])
    with raises(DataError, pad=0):
        next_tokens(ids)
    assert next_tokens(ids, ids > 0)[0].tolist() == [6, -100, -100, -100, -100]
    assert next_tokens(ids, np.ones_like(ids))[0].tolist() == [6, 0, 0, 0, -100]
    assert next_tokens([[1, 2, 2, 2], [2, 1, 1, 1]])[0].tolist() == [2, 2, 2, -100]


def test_next_tokens_by_hand() -> None:
    found = next_tokens([[5, 6, 7, 0], [8, 9, 4, 3]], [[1, 1, 1, 0], [1, 1, 1, 1]])
    assert found.tolist() == [[6, 7, -100, -100], [9, 4, 3, -100]]
    assert next_tokens([[1, 2]]).tolist() == [[2, -100]]
    with pytest.raises(DataError, match="Wanted input_ids as integers"):
        next_tokens([[1, 2]], [[1, 1, 1]])


def test_the_loss_is_that_of_torch() -> None:
    data, model = corpus(), Reader()
    batch = data.batch(range(data.examples))
    out = model(batch["input_ids"], batch["attention_mask"]).detach()
    wanted = nn.functional.cross_entropy(out.transpose(1, 2), batch["label"], ignore_index=-100)
    net = fedkeep.core.net.Net(model)
    loss = LOCAL.loss(net, net.initial(), batch, {})
    assert float(loss) == pytest.approx(float(wanted), rel=1e-6)
    half = batch | {"weight": torch.tensor([1.0, 0.0] * 10 + [1.0])}  # padding counts for nothing
    kept = nn.functional.cross_entropy(out[::2].transpose(1, 2), batch["label"][::2], ignore_index=-100)
    assert float(LOCAL.loss(net, net.initial(), half, {})) == pytest.approx(float(kept), rel=1e-6)


@pytest.mark.parametrize(
    ("form", "engine"),
    [*((form, "sequential") for form in FORMS), ("tensor", "vectorised"), ("ModelOutput", "vectorised")],
)
def test_every_form_of_output_gives_the_same(form: str, engine: str) -> None:
    ours, plain = (
        fedkeep.simulate(Reader(f), METHOD, corpus(), rounds=2, cohort=2, engine=e, seed=1)
        for f, e in ((form, engine), ("tensor", "sequential"))
    )
    for name, value in plain.server.items():
        assert torch.allclose(ours.server[name], value, atol=1e-6)
    assert ours.evaluate("test") == pytest.approx(plain.evaluate("test"), rel=1e-5)


@pytest.mark.parametrize("task", ["next_token", "tokens"])
def test_metrics_are_of_tokens_with_a_label(task: str, tmp_path: Any) -> None:
    data = corpus(task)
    run = fedkeep.simulate(Reader(), METHOD, data, rounds=1, cohort=3, out=tmp_path / "run")
    loss, right, by_user = [], [], []
    for client in range(len(data)):
        model = Reader()
        model.load_state_dict(run.parameters(str(client)))
        batch = data.batch(data.rows(client, "test"))
        out, label = model(batch["input_ids"], batch["attention_mask"]), batch["label"]
        values = nn.functional.cross_entropy(out.transpose(1, 2), label, ignore_index=-100, reduction="none")
        loss += values[label != -100].tolist()
        hit = (out.argmax(2) == label)[label != -100].tolist()
        right, by_user = right + hit, [*by_user, np.mean(hit)]
    found = run.evaluate("test")
    assert found["loss"] == pytest.approx(np.mean(loss), rel=1e-5)
    assert found["accuracy"] == pytest.approx(np.mean(right))
    assert found["accuracy_user_mean"] == pytest.approx(np.mean(by_user))
    assert found.get("perplexity", 0) == pytest.approx(
        math.exp(np.mean(loss)) if task == "next_token" else 0, rel=1e-5
    )
    (judged,) = run.local_device().judge(run.orders(run.clients), "test", ["own"])
    assert judged.tallies.metrics("own") == pytest.approx(found)
    examples = read_run(tmp_path / "run").examples
    assert examples("own").right.sum() == sum(right)


def test_a_metric_of_ones_own() -> None:
    data = corpus("tokens")
    run = fedkeep.simulate(Reader(), METHOD, data, rounds=1, cohort=3)

    def top3(outputs: np.ndarray, labels: np.ndarray) -> float:
        return float((np.argsort(-outputs, 1)[:, :3] == labels[:, None]).any(1).mean())

    found = run.evaluate("test", metrics={"top3": top3, "count": lambda outputs, labels: len(labels)})
    assert found["count"] == (np.asarray(data.columns["label"])[data.split_rows("test")] != -100).sum()
    assert 1 > found["top3"] > found["accuracy"]


@pytest.mark.parametrize(
    ("label", "meta", "message"),
    [
        (
            [[1, -1]],
            {"task": "tokens"},
            "Wanted labels 0 to 1 (2 classes), and -100 for what does not count; got -1 in",
        ),
        ([[1, 2]], {}, "say meta['task'] = 'tokens' where each token has a label"),
        (
            [1],
            {"task": "tokens"},
            "Wanted labels of the shape (examples, labels), as meta['task'] is 'tokens'",
        ),
        (
            [[3, 4]],
            {"task": "next_token"},
            "Labels of a next-token task are the tokens that follow; got the input_ids",
        ),
    ],
)
def test_labels_that_are_refused(label: Any, meta: dict[str, Any], message: str) -> None:
    with raises(DataError, said=message):
        FederatedData.from_columns(
            ["a"], {"input_ids": np.array([[3, 4]]), "label": np.array(label)}, None, meta
        )


def test_a_model_without_a_head_for_tokens() -> None:
    class Whole(Reader):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
            return super().forward(input_ids, attention_mask)[:, 0]

    with pytest.raises(MethodError, match=r"logits must be \(B, T, classes\); it gave \(2, 11\)"):
        fedkeep.simulate(Whole(), METHOD, corpus(), rounds=1)
