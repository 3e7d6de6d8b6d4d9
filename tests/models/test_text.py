"""The text classifier of KTEPS, against the same written in plain PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedkeep
from fedkeep import Phase, declare
from fedkeep.core.errors import ConfigError
from fedkeep.core.net import Net
from fedkeep.data import Ragged
from fedkeep.engines.tables.local_rows import local_tables
from fedkeep.models import TextClassifier
from fedkeep.models.text_models import thinned
from tests.refusals import raises
from tests.tiny import texts

TEXT = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 0, 0, 0], [6, 0, 0, 0, 0]])
LENGTH = torch.tensor([5, 2, 1])


def small(**options: Any) -> TextClassifier:
    torch.manual_seed(0)
    return TextClassifier(10, 2, embedding_dim=5, hidden=3, **options).double()


def plain(model: TextClassifier) -> Tensor:
    """Equations 1 to 4, a text at a time, so that nothing has to be masked."""
    gru = nn.GRU(5, 3, batch_first=True, bidirectional=True).double()
    gru.load_state_dict(model.encoder.state_dict())
    first, second = model.classifier[0], model.classifier[2]
    rows = []
    for ids, n in zip(TEXT, LENGTH.tolist(), strict=True):
        output, _ = gru(model.embedding.weight[ids[:n]].unsqueeze(0))
        mean = output[0].mean(0)
        rows.append(second.weight @ torch.relu(first.weight @ mean + first.bias) + second.bias)
    return torch.stack(rows)


def test_it_is_equations_1_to_4() -> None:
    model = small()
    torch.testing.assert_close(model(TEXT, LENGTH), plain(model), rtol=0, atol=1e-12)
    torch.testing.assert_close(model.head(model.features(TEXT, LENGTH)), model(TEXT, LENGTH), rtol=0, atol=0)
    assert model.features(TEXT, LENGTH).shape == (3, 6)


def test_the_mean_over_the_padded_length_counts_padding_as_zeros() -> None:
    """Of 8 places the texts fill 5, 2 and 1."""
    own, padded = small().features(TEXT, LENGTH), small(mean_over=8).features(TEXT, LENGTH)
    assert torch.equal(padded, own * torch.tensor([[5 / 8], [2 / 8], [1 / 8]]).double())
    assert "mean_over=8" in repr(small(mean_over=8))
    with raises(ConfigError, text="mean_over must be at least 1; got 0."):
        small(mean_over=0)


def test_gradients_equal_the_plain_network() -> None:
    model = small()
    parameters = [p for p in model.parameters() if p is not model.embedding.weight]
    ours = torch.autograd.grad(model(TEXT, LENGTH).square().sum(), [*parameters, model.embedding.weight])
    wanted = torch.autograd.grad(plain(model).square().sum(), parameters, allow_unused=True)
    for got, expected in zip(ours, wanted, strict=False):
        if expected is not None:  # the GRU of the plain network is a copy, whose gradients go elsewhere
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    rows = ours[-1]
    assert not rows[[0, 7, 8]].any()  # padding and words that no text holds
    assert rows[[1, 2, 3, 4, 5, 6, 9]].any(1).all()


def test_the_sizes_of_the_paper() -> None:
    shapes = {n: tuple(p.shape) for n, p in TextClassifier(50_002, 2).named_parameters()}
    assert shapes["embedding.weight"] == (50_002, 200)
    assert shapes["encoder.weight_hh_l0_reverse"] == (3 * 64, 64)
    assert shapes["classifier.0.weight"] == (128, 128)
    assert shapes["classifier.2.weight"] == (2, 128)
    assert {name.split(".")[0] for name in shapes} == {"embedding", "encoder", "classifier"}
    assert small(mlp=7).classifier[0].weight.shape == (7, 6)


def test_padding_is_zero_and_stays_so() -> None:
    model = small()
    weight = model.embedding.weight
    assert not weight[0].any()
    assert ((weight[1:].abs() <= 0.1) & (weight[1:] != 0)).all()
    longer = torch.cat([TEXT, torch.full((3, 4), 7)], 1)  # what stands behind the end is not read
    torch.testing.assert_close(model(longer, LENGTH), model(TEXT, LENGTH), rtol=0, atol=1e-14)
    torch.manual_seed(0)
    fresh = TextClassifier(12, 3, embedding_dim=5, hidden=3)
    method = fedkeep.methods.fedavg(local=Phase(optimizer=fedkeep.sgd(0.5, momentum=0.9), batch_size=2))
    run = fedkeep.simulate(fresh, method, texts(), rounds=3, progress=False)
    trained = run.server["embedding.weight"]
    assert not trained[0].any()
    assert not torch.equal(trained, fresh.embedding.weight)


def test_it_names_its_table_for_local_vocabularies() -> None:
    model = TextClassifier(300, 3, embedding_dim=5, hidden=3)
    data = texts(vocabulary=300)
    ids = data.columns["text"]
    assert isinstance(ids, Ragged)
    (phase,) = fedkeep.methods.fedavg().client.phases
    (table,) = local_tables(Net(model), [phase], Net(model).initial(), data, np.arange(2))
    assert (table.parameter, table.column) == ("embedding.weight", "text")
    assert set(table.rows.tolist()) == {0, *ids[0].tolist(), *ids[1].tolist()}


@pytest.mark.parametrize("private", ["embedding.*", "encoder.*", "classifier.*"])
def test_its_parts_are_natural_patterns(private: str) -> None:
    split = fedkeep.Split(private)
    split.check(small())
    assert any(split.is_private(name) for name, _ in small().named_parameters())


def test_words_are_left_out_in_their_order_and_one_stays() -> None:
    torch.manual_seed(0)
    text = torch.arange(1, 41).repeat(50, 1)
    length = torch.tensor([40] * 25 + [7] * 24 + [1])
    found, short = thinned(text, length, 0.25)
    assert found.shape == text.shape
    for row, before, after in zip(found, length.tolist(), short.tolist(), strict=True):
        words = row[:after].tolist()
        assert words == sorted(set(words))
        assert 1 <= after <= before
        assert max(words) <= before
    assert int(short[-1]) == 1
    assert float(short[:25].float().mean()) == pytest.approx(30, abs=1.5)
    assert short.unique().numel() > 5
    found, short = thinned(text, length, 0.999999)
    assert short.tolist() == [1] * 50
    assert (found[:, 0] == 1).sum() >= 49


def test_dropout_is_for_training_alone() -> None:
    bare = small()
    for options in ({"dropout": 0.5}, {"word_dropout": 0.5}):
        model = small(**options)
        assert torch.equal(model.eval()(TEXT, LENGTH), bare(TEXT, LENGTH))
        torch.manual_seed(0)
        one, two = (model.train()(TEXT, LENGTH) for _ in range(2))
        assert not torch.equal(one, two)
    assert "word_dropout=0.5" in repr(small(word_dropout=0.5))


@pytest.mark.parametrize("name", ["dropout", "word_dropout"])
def test_probabilities_that_make_no_sense_are_refused(name: str) -> None:
    with raises(ConfigError, text=f"{name} must be in [0, 1); got 1.0."):
        small(**{name: 1.0})


def test_a_text_model_with_dropout_trains_by_local_rows_as_by_the_whole_table() -> None:
    runs = []
    for lookup in ({"embedding.weight": "text"}, {}):
        torch.manual_seed(0)
        model = TextClassifier(300, 3, embedding_dim=5, hidden=3, dropout=0.3, word_dropout=0.3).double()
        declare(model, lookup=lookup)
        method = fedkeep.methods.kteps(
            noise=0, local=Phase(optimizer=fedkeep.sgd(0.2, momentum=0.9), batch_size=2, epochs=2)
        )
        runs.append(
            fedkeep.simulate(model, method, texts(vocabulary=300), rounds=2, cohort=2, progress=False)
        )
    torch.testing.assert_close(runs[0].server, runs[1].server, rtol=0, atol=1e-12)
