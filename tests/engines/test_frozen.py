"""The frozen half: part of the model, and in no upload, average, store, noise or traffic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedkeep import Phase, Split, methods, simulate
from fedkeep.core.errors import MethodError, RunError, SplitError
from fedkeep.engines import Vectorised
from fedkeep.methods import Finish, Finished, Start, Started
from fedkeep.privacy import GaussianNoise
from tests.refusals import raises
from tests.tiny import Rounds, classes, everyone, job, results, run_by

DATA = classes(kind="f4")
FURL = methods.furl("user", local=Phase(batch_size=4))


class Backbone(nn.Module):
    """A frozen layer with a constant and a buffer that is not persistent, below a head and a private vector."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.body = nn.Linear(3, 4).requires_grad_(False)
            self.head = nn.Linear(4, 3)
            self.user = nn.Parameter(torch.zeros(3))
            self.register_buffer("scale", torch.tensor(2.0))
            self.register_buffer("positions", torch.arange(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.scale * self.body(x))) + self.user


def test_what_is_frozen_is_neither_sent_back_nor_kept_nor_counted() -> None:
    model = Backbone()
    run = simulate(model, FURL, DATA, rounds=3, cohort=4)
    assert sorted(run.server) == ["head.bias", "head.weight"]
    assert sorted(everyone(run.private, 6)) == ["user"]
    federated = (4 * 3 + 3) * 4
    assert {r.value for r in run.history if r.metric in ("upload_bytes", "download_bytes")} == {federated}
    whole = run.parameters("user-0")
    assert sorted(whole) == ["body.bias", "body.weight", "head.bias", "head.weight", "scale", "user"]
    assert torch.equal(whole["body.weight"], model.body.weight)
    assert not torch.equal(whole["head.weight"], model.head.weight)
    (result,) = results(job(Backbone(), FURL, DATA), [0])
    assert sorted(result.upload.deltas) == ["head.bias", "head.weight"]


def test_noise_leaves_the_frozen_half_alone() -> None:
    rounds = Rounds(job(Backbone(), FURL.but(upload=(GaussianNoise(0.5),)), DATA))
    rounds([0, 1])
    assert sorted(rounds.server.params) == ["head.bias", "head.weight"]


def test_a_frozen_backbone_trains_like_a_model_that_holds_it_elsewhere() -> None:
    class Held(Backbone):
        def __init__(self) -> None:
            super().__init__()
            body = self.body
            del self.body
            self.__dict__["body"] = body  # no parameter of the module

    one, other = (simulate(m, FURL, DATA, rounds=3, cohort=4) for m in (Backbone(), Held()))
    assert all(torch.equal(one.server[n], other.server[n]) for n in one.server)


def test_a_pattern_freezes_what_could_be_trained() -> None:
    model = Backbone()
    method = FURL.but(split=Split("user", frozen="head.bias"))
    run = simulate(model, method, DATA, rounds=2, cohort=4)
    assert sorted(run.server) == ["head.weight"]
    assert torch.equal(run.parameters("user-0")["head.bias"], model.head.bias)
    assert model.head.bias.requires_grad  # the user's model is left as it was


ENGINES = ["sequential", "vectorised", "workers", "centralised"]


class Counting(Backbone):
    """Its forward pass changes a buffer that nobody said is to change."""

    def forward(self, x: Tensor) -> Tensor:
        self.scale += 0.0  # type: ignore[operator]
        return super().forward(x)


class Growing(Backbone):
    """Its forward pass changes a frozen weight in training."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.body.weight.mul_(1.5)
        return super().forward(x)


@pytest.mark.parametrize(("kind", "name"), [(Counting, "scale"), (Growing, "body.weight")])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_frozen_tensor_that_training_changed_is_named(engine: str, kind: type[Backbone], name: str) -> None:
    with raises(SplitError, said=f"round 0: training changed {name!r}, which is frozen"):
        simulate(kind(), FURL, DATA, rounds=1, cohort=1, **run_by(engine))


def test_what_a_phase_of_a_starts_own_changes_is_named() -> None:
    method = FURL.on_client(start=warm)
    with pytest.raises(SplitError, match="training changed 'body.weight', which is frozen"):
        results(job(Growing(), method, DATA), [0], Vectorised())


def warm(given: Start) -> Started:
    given.train(Phase(batch_size=4), {})
    return Started()


def grow(given: Any) -> None:
    given.net.module.body.weight.mul_(1.5)


def growing_start(given: Start) -> Started:
    grow(given)
    return Started()


def growing_finish(given: Finish) -> Finished:
    grow(given)
    return Finished()


@pytest.mark.parametrize("engine", ENGINES[:3])  # centralised training has no hooks
@pytest.mark.parametrize("hook", [growing_start, growing_finish])
def test_a_hook_that_writes_into_a_frozen_tensor_is_named(engine: str, hook: Any) -> None:
    which = hook.__name__.removeprefix("growing_")
    with raises(MethodError, name="body.weight"):
        simulate(Backbone(), FURL.on_client(**{which: hook}), DATA, rounds=1, cohort=2, **run_by(engine))


def test_another_frozen_half_is_another_run(tmp_path: Path) -> None:
    options: dict[str, Any] = {"rounds": 1, "cohort": 4, "out": tmp_path / "run"}
    simulate(Backbone(), FURL, DATA, **options)
    with pytest.raises(RunError, match="frozen_sha256"):
        simulate(Backbone(seed=1), FURL, DATA, resume=True, **options)
