"""A run on a GPU: the CPU's numbers, the same bits each time, and nothing of it that stays there."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedkeep import FederatedData, Method, Phase, adam, methods, sgd, simulate
from fedkeep.core.params import Params
from fedkeep.engines import Sequential, Vectorised
from fedkeep.methods.phase import EarlyStopping
from fedkeep.models import CifarCNN, DocumentModel, TextClassifier
from tests.engines.vectorised.cohorts import TEXTS, cohort, uploads
from tests.tiny import Logits, classes, job, run_by

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
DATA = classes(counts=(8, 9, 7, 12), valid=3, test=4)


class Torchs(nn.Module):
    """Torch's own recurrent layer, with a private vector."""

    def __init__(self, kind: Callable[..., nn.RNNBase], **options: float) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embedding = nn.Embedding(40, 6)
        self.encoder = kind(6, 5, batch_first=True, **options)
        self.user, self.head = nn.Parameter(torch.zeros(5)), nn.Linear(5, 3)

    def forward(self, text: Tensor, text_length: Tensor) -> Tensor:
        output, _ = self.encoder(self.embedding(text))
        last = output[torch.arange(len(text), device=text.device), text_length - 1]
        return self.head(last + self.user)


def images() -> FederatedData:
    draw = torch.Generator().manual_seed(0)
    image = torch.randn(24, 3, 32, 32, generator=draw, dtype=torch.float64).numpy()
    columns = {"image": image, "label": torch.arange(24).remainder(10).numpy()}
    return FederatedData.from_columns(["a"] * 10 + ["b"] * 14, columns, ["train"] * 20 + ["test"] * 4)


STEPS = Phase(batch_size=4, epochs=2, optimizer=sgd(0.1, momentum=0.5))
SCENES: dict[str, tuple[Callable[[], nn.Module], Method, FederatedData]] = {
    "logits": (Logits, methods.furl("user", local=STEPS), DATA),
    "adam": (Logits, methods.furl("user", local=STEPS.but(optimizer=adam(0.05))), DATA),
    "lstm of fedkeep": (
        lambda: DocumentModel(40, 3, 4, embedding_dim=5, hidden=8, mlp=6),
        methods.furl("user", local=STEPS),
        TEXTS,
    ),
    "gru of fedkeep": (
        lambda: TextClassifier(40, 3, embedding_dim=5, hidden=4),
        methods.fedavg(local=STEPS),
        TEXTS,
    ),
    "lstm of torch": (lambda: Torchs(nn.LSTM), methods.furl("user", local=STEPS), TEXTS),
    "gru of torch": (lambda: Torchs(nn.GRU), methods.furl("user", local=STEPS), TEXTS),
    "convolution": (lambda: CifarCNN(10, dropout=0.0), methods.fedavg(local=STEPS), images()),
    "a hook at the end": (Logits, methods.scaffold(local=STEPS.but(optimizer=sgd(0.1))), DATA),
    "a hook at the start": (Logits, methods.fedala("linear.*", local=STEPS), DATA),
    "terms of what was received": (Logits, methods.ditto(0.4, local=STEPS), DATA),
}


@pytest.mark.parametrize("engine", [Sequential, Vectorised])
@pytest.mark.parametrize("name", SCENES)
def test_a_cohort_gives_what_it_gives_on_the_cpu(name: str, engine: type[Sequential | Vectorised]) -> None:
    """And what it gives is on the CPU, where the server and the clients' stores are."""
    make, method, data = SCENES[name]
    torch.manual_seed(0)
    model = make().double()
    wanted, found = (
        cohort(job(method.made_for(model, accelerate=True), method, data, device=device), engine())
        for device in ("cpu", "cuda")
    )
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.kept is not None
        assert theirs.kept is not None
        same(ours.kept, theirs.kept)
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-9)
    for mine, other in zip(uploads(found), uploads(wanted), strict=True):
        assert mine.weight == other.weight
        same(mine.deltas, other.deltas)


def same(found: Params, wanted: Params) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].device.type == "cpu"
        torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("name", ["lstm of fedkeep", "lstm of torch", "convolution", "logits"])
def test_a_run_has_the_same_bits_each_time_and_after_a_stop(name: str, engine: str, tmp_path: Path) -> None:
    make, method, data = SCENES[name]

    def run(rounds: int, out: Path, **more: bool) -> Params:
        torch.manual_seed(0)
        found = simulate(
            make(),
            method,
            data,
            rounds=rounds,
            cohort=2,
            device="cuda",
            engine=engine,
            out=out,
            seed=3,
            evaluate_every=1,
            **more,
        )
        return {**found.server, **found.kept(str(found.data.ids[0])).params}

    whole, again = run(4, tmp_path / "whole"), run(4, tmp_path / "again")
    run(2, tmp_path / "parts")
    parts = run(4, tmp_path / "parts", resume=True)
    for other in (again, parts):
        assert all(torch.equal(other[n], v) for n, v in whole.items())


def test_a_stacked_recurrent_layer_with_dropout_draws_for_each_client_alone() -> None:
    make, method = lambda: Torchs(nn.LSTM, num_layers=2, dropout=0.5), methods.furl("user", local=STEPS)
    work = job(method.made_for(make()), method, TEXTS, device="cuda")
    clients = list(range(len(TEXTS)))
    forwards, backwards = cohort(work, Sequential(), clients), cohort(work, Sequential(), clients[::-1])[::-1]
    for ours, theirs in zip(uploads(forwards), uploads(backwards), strict=True):
        assert all(torch.equal(ours.deltas[n], v) for n, v in theirs.deltas.items())


class Thinned(nn.Module):
    """Dropout of ones, as of words: a mask that no client's own values are part of."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * nn.functional.dropout(torch.ones_like(x), 0.3, self.training))


@pytest.mark.parametrize("engine", ["centralised", "sequential", "vectorised"])
def test_dropout_of_what_clients_share(engine: str) -> None:
    run = simulate(
        Thinned(),
        methods.furl("head.*", local=STEPS),
        DATA,
        rounds=2,
        cohort=4,
        device="cuda",
        **run_by(engine),
    )
    assert all(v.isfinite().all() for v in run.kept("user-1").params.values())


@pytest.mark.parametrize("engine", [Sequential, Vectorised])
def test_a_round_leaves_nothing_on_the_gpu(engine: type[Sequential | Vectorised]) -> None:
    stopping = STEPS.but(early_stopping=EarlyStopping(patience=1))
    for method in (methods.furl("user", local=STEPS), methods.local(local=stopping)):
        work = job(method.made_for(Logits()), method, DATA, device="cuda")
        used = engine()
        cohort(work, used)  # a first round tries whether the clients can be computed at once
        gc.collect()
        gc.disable()
        try:
            before = torch.cuda.memory_allocated()
            for _ in range(3):
                assert len(cohort(work, used)) == len(DATA)
            assert torch.cuda.memory_allocated() == before
        finally:
            gc.enable()


def test_a_model_that_is_on_the_gpu_is_taken_from_there() -> None:
    """Torch lays an LSTM's weights there into one piece of memory; each has its own in the copy that is trained."""
    model = Torchs(nn.LSTM).cuda()
    method = methods.furl("user", local=STEPS)
    module = method.made_for(model, accelerate=True)
    assert all(p.device.type == "cpu" for p in module.parameters())
    assert len({p.untyped_storage().data_ptr() for p in module.parameters()}) == len(
        list(module.parameters())
    )
    assert all(p.is_cuda for p in model.parameters())
