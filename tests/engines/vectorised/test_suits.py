"""Whether a job can be trained side by side: the look at it, and the reasons why not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import fedkeep as library
from fedkeep import FederatedData, Method, methods, simulate
from fedkeep.core.errors import ConfigError, MethodError
from fedkeep.engines import Vectorised
from tests.engines.vectorised.cohorts import RAGGED, TEXTS, Judged, furl
from tests.refusals import raises
from tests.tiny import Logits, Noisy, classes, job


class Diluted(nn.Module):
    """A mean over words that counts the padding."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.out, self.dropout = nn.Embedding(40, 4), nn.Linear(4, 3), dropout

    def forward(self, text: Tensor) -> Tensor:
        return self.out(self.embedding(text).mean(1))  # type: ignore[no-any-return]


class Shaken(Logits):
    """Noise of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn_like(x))


class ShakenInTraining(Logits):
    """Noise of its own, in training alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn_like(x) if self.training else x)


class DilutedInTraining(Diluted):
    """A mean over words that counts the padding, in training alone."""

    def forward(self, text: Tensor) -> Tensor:
        if self.training:
            return super().forward(text)
        real = (text > 0).unsqueeze(-1)
        return self.out((self.embedding(text) * real).sum(1) / real.sum(1).clamp_min(1))  # type: ignore[no-any-return]


class Torchs(nn.Module):
    """PyTorch's own recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(40, 4), nn.LSTM(4, 3, batch_first=True)

    def forward(self, text: Tensor) -> Tensor:
        return self.lstm(self.embedding(text))[0][:, 0]  # type: ignore[no-any-return]


class Packed(nn.Module):
    """PyTorch's own recurrent layer over packed texts, or ours with their lengths."""

    def __init__(self, ours: bool = False) -> None:
        super().__init__()
        self.embedding, self.ours = nn.Embedding(40, 4), ours
        self.gru = library.nn.GRU(4, 3) if ours else nn.GRU(4, 3, batch_first=True)

    def forward(self, text: Tensor, text_length: Tensor) -> Tensor:
        x, lengths = self.embedding(text), text_length.clamp(min=1)
        if self.ours:
            return self.gru(x, lengths)[1]  # type: ignore[no-any-return]
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.gru(packed)[1][0]  # type: ignore[no-any-return]


REASONS: dict[str, tuple[nn.Module, Method, FederatedData, str]] = {
    "looks at values": (
        Logits(),
        furl(loss=Judged()),
        RAGGED,
        "its loss cannot be computed for several clients at once (vmap: It looks like you're calling .item() on a Tensor. We don't support vmap over calling .item() on a Tensor, please try to rewrite what you're doing with other operations. If error is occurring somewhere inside PyTorch internals, please file a bug report).",
    ),
    "draws": (
        Shaken(),
        furl(),
        RAGGED,
        "its loss cannot be computed for several clients at once (it draws random numbers otherwise than by dropout).",
    ),
    "PyTorch's layers": (
        Torchs(),
        methods.fedavg(),
        TEXTS,
        "its loss cannot be computed for several clients at once (Batching rule not implemented for aten::lstm.input. We could not generate a fallback; fedkeep.nn.LSTM has the parameters of torch.nn.LSTM and can).",
    ),
    "counts padding": (
        Diluted(),
        methods.fedavg(),
        TEXTS,
        "the loss depends on how far texts are padded, which differs with the clients trained at once.",
    ),
    "draws in training, after a start in evaluation mode": (
        ShakenInTraining(),
        methods.ifca(),
        classes(),
        "its loss cannot be computed for several clients at once (it draws random numbers otherwise than by dropout).",
    ),
    "counts padding in training, after a start in evaluation mode": (
        DilutedInTraining(),
        methods.ifca(),
        TEXTS,
        "the loss depends on how far texts are padded, which differs with the clients trained at once.",
    ),
}


@pytest.mark.filterwarnings("ignore:The model predicts otherwise:UserWarning")
@pytest.mark.parametrize("name", REASONS)
def test_says_why_it_cannot(name: str) -> None:
    model, method, data, reason = REASONS[name]
    assert Vectorised.suits(job(model, method, data)) == reason
    with raises(ConfigError, method=method.name, reason=reason):
        simulate(model, method, data, rounds=1, engine="vectorised", accelerate=False)


def test_pytorchs_recurrent_layers_run_together_once_they_are_swapped() -> None:
    model, method, data, _ = REASONS["PyTorch's layers"]
    runs = [
        simulate(model, method, data, rounds=2, engine=e, progress=False)
        for e in ("sequential", "vectorised")
    ]
    torch.testing.assert_close(runs[1].server, runs[0].server, rtol=1e-05, atol=1e-07)


def test_looking_changes_nothing() -> None:
    model = Noisy(dropout=0.5)
    work = job(model, furl(), RAGGED)
    before = work.net.initial()
    state = torch.get_rng_state()
    assert Vectorised.suits(work) is None
    assert all(torch.equal(before[n], v) for n, v in work.net.initial().items())
    assert torch.equal(state, torch.get_rng_state())
    assert not any(work.store.seen(range(6)))
    assert Vectorised.suits(job(model, furl(), classes(counts=(0, 0)))) is None


def test_a_model_that_fails_is_not_the_engines_fault() -> None:
    data = FederatedData.from_columns([0, 0], {"z": np.ones((2, 3)), "label": [0, 1]}, ["train"] * 2)
    with pytest.raises(MethodError, match=r"^Logits.forward wants the column 'x'"):
        Vectorised.suits(job(Logits(), furl(), data))


@pytest.mark.filterwarnings("error")
def test_packed_sequences_are_named_as_the_cause_without_torchs_warnings() -> None:
    assert Vectorised.suits(job(Packed(), methods.fedavg(), TEXTS)) == (
        "its loss cannot be computed for several clients at once (pack_padded_sequence makes shapes of lengths, which "
        "differ between clients; give lengths to fedkeep.nn.GRU or LSTM, layer(x, lengths), or mask the padding)."
    )
    assert Vectorised.suits(job(Packed(ours=True), methods.fedavg(), TEXTS)) is None
