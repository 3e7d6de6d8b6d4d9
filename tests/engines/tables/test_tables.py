"""Embedding tables by the client's own rows: local vocabulary, lazy momentum, and uploads of some rows only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkeep import Client, FederatedData, Method, Phase, Split, adam, declare, methods, sgd, simulate
from fedkeep.core.errors import DataError, UploadError
from fedkeep.core.net import Net
from fedkeep.core.optim import Optimizer
from fedkeep.core.params import Params
from fedkeep.data import Ragged
from fedkeep.engines import Job, Stream, lanes, local_run
from fedkeep.engines.client_step import train_client
from fedkeep.engines.round import decode
from fedkeep.engines.tables import lazy_rows
from fedkeep.methods import EarlyStopping
from fedkeep.methods.added_parts import OnCopy, with_copy
from fedkeep.methods.fedprox import Proximal
from fedkeep.methods.terms import cross_entropy, l2_penalty
from fedkeep.privacy import GaussianNoise
from fedkeep.split import Upload
from tests import refusals
from tests.engines.reference import close, cohorts, federated, rows_of
from tests.tiny import Rounds, job, mean_of, results, same_bits, texts

pytestmark = pytest.mark.usefixtures("no_table_is_too_small")


class Words(nn.Module):
    """The mean of word vectors, then a linear layer."""

    def __init__(self, vocabulary: int = 40, labels: int = 3) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding = nn.Embedding(vocabulary, 4)
            self.out = nn.Linear(4, labels)
        self.double()
        declare(self, lookup={"embedding.weight": "text"})

    def forward(self, text: Tensor, text_length: Tensor) -> Tensor:
        inside = (torch.arange(text.shape[1], device=text.device) < text_length.unsqueeze(1)).unsqueeze(2)
        mean = (self.embedding(text) * inside).sum(1) / text_length.unsqueeze(1)
        return self.out(mean)


class Dense(Words):
    """The table is trained whole, as any parameter."""

    def __init__(self, vocabulary: int = 40, labels: int = 3) -> None:
        super().__init__(vocabulary, labels)
        declare(self, lookup={})


DATA = texts(counts=(9, 6, 7, 5, 8), vocabulary=40)
STEEP = sgd(0.5, momentum=0.9)


def loss_of(model: nn.Module, batch: dict[str, Tensor], client: int) -> Tensor:
    return nn.functional.cross_entropy(model(batch["text"], batch["text_length"]), batch["label"])


def method(optimizer: Optimizer = STEEP, **client: Any) -> Method:
    return methods.fedavg(local=Phase(optimizer=optimizer, batch_size=2, epochs=3)).on_client(**client)


OPTIMIZERS = {
    "sgd": (sgd(0.5), lambda m: torch.optim.SGD(m.parameters(), 0.5)),
    "momentum": (STEEP, lambda m: torch.optim.SGD(m.parameters(), 0.5, momentum=0.9)),
    "momentum, two rates": (
        sgd(0.5, momentum=0.8, rates={"embedding.*": 2.0}),
        lambda m: torch.optim.SGD(
            [{"params": m.out.parameters()}, {"params": m.embedding.parameters(), "lr": 2.0}],
            0.5,
            momentum=0.8,
        ),
    ),
    "decay": (
        sgd(0.5, momentum=0.9, weight_decay=0.1),
        lambda m: torch.optim.SGD(m.parameters(), 0.5, momentum=0.9, weight_decay=0.1),
    ),
    "adam": (adam(0.05), lambda m: torch.optim.Adam(m.parameters(), 0.05)),
}


@pytest.mark.filterwarnings("ignore:The table 'embedding.weight' is trained and sent whole.*weight decay")
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equal_to_the_dense_computation(name: str, clip: float | None) -> None:
    ours, theirs = OPTIMIZERS[name]
    rule = method(ours)
    rule = rule.on_client(phases=(replace(rule.client.phases[0], clip_norm=clip),))
    run = simulate(Words(), rule, DATA, rounds=4, cohort=3, seed=5).last
    expected = federated(
        Words(), DATA, cohorts(DATA, 3, 4, 5), rule.client.phases[0], theirs, seed=5, loss=loss_of, clip=clip
    )
    close(
        run.server, expected, atol=1e-12 if clip is None else 1e-5
    )  # torch adds 1e-6 to the norm, and so do we


@pytest.mark.parametrize("tables", ["exact", "local", "whole"])
@pytest.mark.parametrize(("wrong", "at"), [(40, 0), (-1, 3)])
def test_an_id_beyond_the_table_is_named(tables: str, wrong: int, at: int) -> None:
    data = texts(counts=(2, 3), vocabulary=40)
    data.columns["text"].values[at] = wrong  # type: ignore[union-attr]
    with pytest.raises(DataError) as error:
        simulate(Words(), method(tables=tables), data, rounds=1, cohort=2)
    expected = {"column": "text", "got": wrong, "parameter": "embedding.weight", "last": 39}
    assert error.value.facts == expected


def test_a_row_catches_up_by_hand() -> None:
    """μ = 1/2, η = 1: after v = g, three steps without a gradient move w by −g (1/2 + 1/4 + 1/8), and v is g/8."""
    from fedkeep.core.optim import OptimizerState
    from fedkeep.engines.tables.lazy_rows import LazyRows
    from fedkeep.engines.tables.local_rows import LocalTable

    params = {"table": torch.zeros(3, 1, dtype=torch.float64)}
    table = LocalTable("table", "ids", torch.arange(3), torch.arange(3))
    state = OptimizerState()
    rows = LazyRows([table], ["table"], params, {}, sgd(1.0, momentum=0.5), state, 1.0)
    for ids, slope in (([1], 8.0), ([2], 1.0), ([2], 0.0), ([2], 0.0)):
        batch = {"ids": torch.tensor([ids])}
        cut, _ = rows.look_up(batch)
        assert batch["ids"].tolist() == [[1]]  # row 0, padding, is always there
        rows.update(cut, {"table": torch.tensor([[0.0], [slope]], dtype=torch.float64)})
    assert params["table"].tolist() == [[0.0], [-8.0], [-1.75]]
    rows.finish()
    assert params["table"].tolist() == [[0.0], [-8.0 - 7.0], [-1.75]]
    assert state.first["table"].tolist() == [[0.0], [1.0], [0.25]]


def test_a_step_sees_the_rows_of_its_batch_alone() -> None:
    seen: list[int] = []

    class Spy(Words):
        def forward(self, text: Tensor, text_length: Tensor) -> Tensor:
            seen.append(len(self.embedding.weight))
            assert len(self.embedding.weight) == len(
                torch.unique(torch.cat([text.flatten(), torch.zeros(1)]))
            )
            return super().forward(text, text_length)

    simulate(Spy(), method(), DATA, rounds=1, cohort=5, evaluate_every=0)
    rehearsed = 2 + 3  # both modes, and three batches in evaluation: are examples mixed?
    assert max(seen[rehearsed:]) < 20


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fedprox_is_exact_with_local_rows(momentum: float) -> None:
    rule = methods.fedprox(0.7, local=Phase(optimizer=sgd(0.3, momentum=momentum), batch_size=2, epochs=2))
    found = [
        simulate(Words(), rule.on_client(tables=t), DATA, rounds=3, cohort=3).server
        for t in ("exact", "whole")
    ]
    close(found[0], found[1], atol=1e-14)


@pytest.mark.parametrize("client", range(5))
def test_early_stopping_sees_every_row_as_it_is(client: int) -> None:
    """Validation examples use rows that no mini-batch looked up lately: with momentum these are late until then."""
    data = texts(counts=(9, 6, 7, 5, 8), vocabulary=40, valid=6)
    rule = Phase(
        loss=cross_entropy(),
        optimizer=STEEP,
        batch_size=2,
        epochs=12,
        early_stopping=EarlyStopping(every=2, patience=2),
    )
    found = []
    for net in (Net(Words()), Net(Dense())):
        held, start = data.rows(client, "valid"), net.initial()
        result = local_run(
            net,
            Split(),
            Client(phases=(rule,)),
            start,
            start,
            data,
            rows_of(data, client),
            Stream(3, f"user-{client}"),
            valid=np.arange(held.start, held.stop),
        )
        found.append((result.stopped, result.params, bool(result.tables)))
    assert [lazily for _, _, lazily in found] == [True, False]
    assert found[0][0] == found[1][0]
    assert 0 < found[0][0][0] < 12
    close(found[0][1], found[1][1], atol=1e-13)


@pytest.mark.filterwarnings("ignore:The table .* is trained and sent whole.*PulledCopy")
@pytest.mark.parametrize("build", [methods.ditto, methods.apfl, methods.fine_tuned, methods.local])
def test_methods_with_private_copies(build: Any) -> None:
    rule = build(local=Phase(optimizer=sgd(0.3, momentum=0.5), batch_size=2))
    runs = [simulate(Words(), rule.on_client(tables=t), DATA, rounds=3, cohort=3) for t in ("exact", "whole")]
    close(runs[0].server, runs[1].server, atol=1e-13)
    kept = [r.private.read(range(5)) for r in runs]
    close(kept[0], kept[1], atol=1e-13)


def test_terms_that_read_parameters_train_the_whole_table() -> None:
    data, net = DATA, Net(Words())
    for loss in (cross_entropy() + 0.1 * l2_penalty("embedding.*"), cross_entropy()):
        result = local_run(
            net,
            Split(),
            Client(phases=(Phase(loss=loss),)),
            net.initial(),
            net.initial(),
            data,
            rows_of(data, 0),
            Stream(0, "user-0"),
        )
        assert bool(result.tables) == (loss.reads_parameters is False)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_rates_that_fall_reach_rows_as_they_reach_the_whole_table(momentum: float) -> None:
    """Rows that wait know one rate, so none wait where rates fall."""
    client, found = method(sgd(0.5, momentum=momentum)).client, []
    rows, draws = rows_of(DATA, 0), Stream(0, "user-0")
    for net in (Net(Words()), Net(Dense())):
        start = net.initial()
        result = local_run(net, Split(), client, start, start, DATA, rows, draws, falls=True)
        found.append(result.params)
    close(found[0], found[1], atol=1e-13)


def test_local_by_definition_leaves_other_rows_as_received() -> None:
    rule = method(sgd(0.5, weight_decay=0.5), tables="local")
    net = Net(Words())
    start = net.initial()
    result = local_run(net, Split(), rule.client, start, start, DATA, rows_of(DATA, 0), Stream(0, "user-0"))
    used = np.union1d(DATA.columns["text"].take(rows_of(DATA, 0)).values, [0])  # type: ignore[union-attr]
    others = np.setdiff1d(np.arange(40), used)
    moved = (result.params["embedding.weight"] != start["embedding.weight"]).any(1)
    assert not moved[others].any()
    assert moved[used[1:]].all()


def work(rule: Method, data: FederatedData = DATA) -> tuple[Job, Params]:
    made = job(Words(), rule, data)
    return made, made.net.initial()


def test_the_upload_holds_the_clients_own_rows() -> None:
    made, start = work(method())
    result = train_client(made, start, {}, 1, 0, 0.0)
    used = np.union1d(DATA.columns["text"].take(rows_of(DATA, 1)).values, [0])  # type: ignore[union-attr]
    assert result.upload.rows["embedding.weight"].tolist() == used.tolist()
    assert result.upload.deltas["embedding.weight"].shape == (len(used), 4)
    assert result.upload.nbytes == 8 * (len(used) * 4 + len(used) + 3 * 4 + 3)
    report = Rounds(made)([1])
    assert report.upload_bytes == result.upload.nbytes
    assert report.download_bytes == 8 * (len(used) * 4 + 3 * 4 + 3)


def uploads_of(rule: Method) -> tuple[list[Upload], Params]:
    made, start = work(rule)
    found = [result.upload for result in results(made, [0, 1, 2])]
    assert all(upload is not None for upload in found)
    return [upload for upload in found if upload is not None], start


def test_rows_that_some_clients_lack() -> None:
    """Unchanged: Σ c_k d_k / Σ c_k over all; owners_only: over the clients that hold the row."""
    uploads, start = uploads_of(method())
    mean = mean_of(uploads, start)["embedding.weight"]
    owners = mean_of(uploads, start, "owners_only")["embedding.weight"]
    weights = [9.0, 6.0, 7.0]
    assert [u.weight for u in uploads] == weights
    partly = 0
    for row in range(40):
        change, held = torch.zeros(4, dtype=torch.float64), 0.0
        for upload, weight in zip(uploads, weights, strict=True):
            place = (upload.rows["embedding.weight"] == row).nonzero()
            if len(place):
                change += weight * upload.deltas["embedding.weight"][int(place)]
                held += weight
        torch.testing.assert_close(mean[row], change / 22, rtol=0, atol=1e-15)
        torch.testing.assert_close(owners[row], change / max(held, 1.0), rtol=0, atol=1e-15)
        partly += 0 < held < 22
    assert partly > 5


def test_whole_tables_are_sent_on_request() -> None:
    (some, start), (whole, _) = uploads_of(method()), uploads_of(method(tables="whole"))
    assert not whole[0].rows
    close(mean_of(whole, start), mean_of(some, start), atol=1e-15)


def test_opted_out_examples_name_no_row() -> None:
    """Their words are trained on the device by a private phase, but the upload's rows are those of the others."""
    rng = np.random.default_rng(0)
    columns = {"text": Ragged(np.arange(1, 25), np.arange(0, 25, 3)), "label": rng.integers(0, 3, 8)}
    columns["opted_in"] = np.arange(8) % 2 == 0
    data = FederatedData.from_columns(["a"] * 8, columns, ["train"] * 8, meta={"classes": 3})
    rule = methods.ditto(local=Phase(optimizer=sgd(0.5, momentum=0.5), batch_size=2)).on_client(
        tables="local"
    )
    made = job(with_copy(Words()), rule, data)
    start = made.net.initial()
    own = rule.split.personal(start)
    result = train_client(made, rule.split.federated(start), own, 0, 0, 0.0)
    assert result.upload.rows["embedding.weight"].tolist() == [0, 1, 2, 3, 7, 8, 9, 13, 14, 15, 19, 20, 21]
    moved = (result.kept["own.embedding.weight"] != own["own.embedding.weight"]).any(1)
    assert moved.nonzero().squeeze(1).tolist() == list(range(1, 25))


def test_the_bits_are_those_of_a_run_without_momentum() -> None:
    """Without momentum a row that isn't looked up isn't touched: cutting tables changes no bit."""
    found = [
        simulate(Words(), method(sgd(0.3), tables=t), DATA, rounds=3, cohort=1).server
        for t in ("exact", "whole")
    ]
    assert same_bits(found[0], found[1])


def test_the_proximal_term_says_what_it_reads() -> None:
    assert not Proximal().reads_parameters
    assert Proximal().reads_received
    assert (cross_entropy() + Proximal()).reads_received
    assert OnCopy(term=cross_entropy() + Proximal()).reads_parameters
    assert not OnCopy(term=cross_entropy()).reads_parameters


@pytest.mark.parametrize("wrong", [[0, 3], [-1, 1], [1, 1]])
def test_rows_that_were_not_sent_are_refused_before_anything_is_decoded(wrong: list[int]) -> None:
    received = {"table": torch.zeros(3, 2)}
    upload = Split().upload(
        {"table": torch.zeros(2, 2)}, {"table": torch.ones(2, 2)}, 1.0, {"table": torch.tensor([0, 1])}
    )
    of = method().but(upload=(GaussianNoise(0.1),))
    torch.testing.assert_close(decode(of, received, upload, "ann")[0].deltas["table"], torch.ones(2, 2))
    with refusals.raises(UploadError, client="ann", fault="the rows of 'table' should ascend within 0 … 2"):
        decode(of, received, replace(upload, rows={"table": torch.tensor(wrong)}), "ann")


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_proximal_rows_wait_exactly(
    momentum: float, clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row by row and on all local rows at each step: the same server and the same reported loss; not under a bound."""
    rule = methods.fedprox(
        0.7, local=Phase(optimizer=sgd(0.3, momentum=momentum), batch_size=2, epochs=3, clip_norm=clip)
    )
    anchored: list[float] = []
    whole = lazy_rows.MovingRows

    def spy(*arguments: Any) -> Any:
        anchored.append(arguments[-1])
        return whole(*arguments)

    monkeypatch.setattr(lazy_rows, "MovingRows", spy)
    ours = simulate(Words(), rule, DATA, rounds=3, cohort=3)
    assert bool(anchored) is (clip is None)
    assert set(anchored) <= {0.7}
    monkeypatch.setattr(lanes, "lazy_tables", lambda *_: [])
    dense = simulate(Words(), rule, DATA, rounds=3, cohort=3)
    close(ours.server, dense.server, atol=1e-12)
    losses = [
        [r.value for r in run.history if (r.split, r.metric) == ("train", "loss")] for run in (ours, dense)
    ]
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
