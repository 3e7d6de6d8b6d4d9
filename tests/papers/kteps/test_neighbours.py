"""Neighbours of words under compression: what each of the three embeddings is, against the engines' own parts."""

from __future__ import annotations

import pytest
import torch

from fedkeep import Phase, methods, sgd, simulate
from fedkeep.core.errors import ConfigError
from fedkeep.data import TokenVocabulary, toy
from fedkeep.experiments.run import Run
from fedkeep.models import Linear, TextClassifier
from fedkeep.privacy import Projection
from fedkeep_papers.kteps.neighbours import _tables, word_neighbours
from tests.refusals import raises
from tests.tiny import bits, toy_reviews

DATA = toy_reviews()


pytestmark = pytest.mark.usefixtures("no_table_is_too_small")


def run(*, projected: bool = True) -> Run:
    torch.manual_seed(0)
    model = TextClassifier(
        len(TokenVocabulary.from_dict(DATA.meta["vocabulary"])), 2, embedding_dim=6, hidden=3
    )
    method = methods.fedavg(local=Phase(optimizer=sgd(0.5, momentum=0.9), batch_size=4))
    if projected:
        method = method.but(upload=(Projection(2, 5),)).on_client(tables="local")
    return simulate(model, method, DATA, rounds=1, cohort=9, seed=3, evaluate_every=0)


def test_the_three_tables() -> None:
    before = run()
    server = {name: bits(value) for name, value in before.server.items()}
    client, restored, aggregate, rows = _tables(before, 0, "embedding.weight")
    used = DATA.batch(DATA.rows(0, "train"))["text"]
    assert rows.tolist() == sorted(set(used.reshape(-1).tolist()) - {0})
    # What the server restores is the client's table on the components that its projection keeps.
    sent = torch.cat([torch.zeros(1, 6), client])  # the row of padding goes along
    basis = Projection(2, 5).basis(sent)
    torch.testing.assert_close(restored, client @ basis @ basis.T, rtol=0, atol=1e-5)
    assert not torch.allclose(restored, client, atol=1e-2)
    # The aggregate is the next round's table.
    torch.manual_seed(0)
    model = TextClassifier(len(before.server["embedding.weight"]), 2, embedding_dim=6, hidden=3)
    next_round = simulate(model, before.method, DATA, rounds=2, cohort=9, seed=3, evaluate_every=0)
    torch.testing.assert_close(aggregate, next_round.server["embedding.weight"][rows], rtol=0, atol=1e-6)
    assert server == {name: bits(value) for name, value in before.server.items()}  # nothing has changed


def test_without_compression_the_server_restores_everything() -> None:
    found = word_neighbours(run(projected=False), ["good", "unheard"], client="a", ks=(2, 3))
    assert found["client"] == "a"
    assert found["own_words"] == 6
    assert set(found["nearest"]) == set(found["common"]) == {"good"}
    assert found["common"]["good"]["server"] == {"cosine": {"2": 2, "3": 3}, "inner": {"2": 2, "3": 3}}
    near = found["nearest"]["good"]
    assert near["client"] == near["server"]
    assert len(near["aggregate"]["inner"]) == 5
    assert "good" not in near["client"]["cosine"]


def test_the_client_with_the_most_words_is_taken() -> None:
    assert word_neighbours(run(), ["good"])["client"] == "b"


def test_a_model_without_a_table_of_words() -> None:
    with raises(ConfigError, said="Neighbours of words want a federated table"):
        word_neighbours(simulate(Linear(4, 3), methods.fedavg(), toy(), rounds=0), ["good"])
