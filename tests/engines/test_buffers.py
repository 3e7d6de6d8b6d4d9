"""Forward passes that write where one would not expect it: into tables while judging, into buffers by assigning them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedkeep import FederatedData, Method, Phase, Run, Split, declare, methods, sgd, simulate
from fedkeep.core.errors import ConfigError, SplitError
from fedkeep.core.net import Net
from fedkeep.core.params import SERVER, Batch, Params, prefixed, under
from fedkeep.engines import Job, first_global
from fedkeep.methods import EarlyStopping, Sent
from fedkeep.methods.server import Roster
from fedkeep.methods.terms import Term, l2_penalty
from tests import tiny
from tests.tiny import classes, everyone, job, on_server, parts, results

pytestmark = pytest.mark.filterwarnings("ignore:The model predicts otherwise:UserWarning")

LOCAL = Phase(batch_size=3, optimizer=sgd(0.3))
FEDAVG = methods.fedavg(local=LOCAL)
DATA = classes(kind="f4")


def texts() -> FederatedData:
    """Return clients whose examples to judge have words that those to train on have not."""
    rng = np.random.default_rng(0)
    split = parts(4, 2, 2) * 4
    words = np.where((np.array(split) == "train")[:, None], 0, 12) + rng.integers(0, 12, (len(split), 5))
    columns = {"text": words, "label": rng.integers(0, 3, len(split))}
    owner = np.repeat([f"u{client}" for client in range(4)], 8)
    return FederatedData.from_columns(owner, columns, split, meta={"task": "multiclass", "classes": 3})


TEXTS = texts()


class Words(nn.Module):
    """The mean of some words' vectors of bounded length, and a linear layer."""

    def __init__(self, kind: type[nn.Module] = nn.Embedding) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.table, self.last = kind(24, 4, max_norm=1.0), nn.Linear(4, 3)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.features(text))

    def features(self, text: Tensor) -> Tensor:
        """Return the mean, for methods that look at it."""
        out: Tensor = self.table(text)
        return out if out.dim() == 2 else out.mean(1)

    def head(self, features: Tensor) -> Tensor:
        """Return what the last layer makes of them."""
        return self.last(features)


def bounded(run: Run) -> Params:
    """Return all that a run has."""
    return {**on_server(run), **{f"own/{n}": v.clone() for n, v in everyone(run.private, 4).items()}}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("method", [FEDAVG, methods.ifca(local=LOCAL), FEDAVG.but(split=Split("table.*"))])
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_judging_changes_no_table_of_bounded_rows(kind: Any, method: Method, engine: str) -> None:
    one, other = (
        simulate(Words(kind), method, TEXTS, rounds=2, cohort=4, engine=engine, evaluate_every=k).last
        for k in (0, 1)
    )
    before = {n: v.clone() for n, v in bounded(one).items()}
    assert before.keys() == bounded(other).keys()
    assert all(torch.equal(value, bounded(other)[n]) for n, value in before.items())
    one.evaluate("test")
    assert all(torch.equal(value, bounded(one)[n]) for n, value in before.items())


def test_a_start_hook_changes_no_table_of_what_was_sent() -> None:
    work = job(Words(), methods.ifca(local=LOCAL), TEXTS)
    sent = first_sent(work)
    before = {n: v.clone() for n, v in sent.items()}
    results(work, [0, 1], sent=sent)
    assert all(torch.equal(v, sent[n]) for n, v in before.items())


def first_sent(work: Job) -> Params:
    """Return what a server sends first."""
    server = first_global(work.method, work.net, work.data)
    return Sent(params=server.params, state=server.state).flat


class Near(Term):
    """Stays near the predictions of what was received, which a term computes while the model trains."""

    def __call__(self, net: Net, params: Params, batch: Batch, received: Any) -> Tensor:
        out = net(params, batch)
        far = (out - net(received, batch).detach()).square().mean()
        return F.cross_entropy(out, batch["label"]) + 0.1 * far


class SaysNo(Near):
    """Looks at no values, and says so."""

    reads_parameters = False


@dataclass(frozen=True)
class NearOld(Near):
    """Stays near the predictions of an old model, which is the server's state."""

    def __call__(self, net: Net, params: Params, batch: Batch, received: Any) -> Tensor:
        return super().__call__(net, params, batch, under(f"{SERVER}old/", received))


def old_model(net: Net, clients: Roster) -> Params:
    """Return the server's first state: the model as it is."""
    return prefixed("old/", net.initial())


OLD = methods.fedavg(local=LOCAL.but(loss=NearOld()))
TERMS = {
    "silent": methods.fedavg(local=LOCAL.but(loss=Near())),
    "says no": methods.fedavg(local=LOCAL.but(loss=SaysNo())),
    "with a penalty": methods.fedavg(local=LOCAL.but(loss=Near() + 0.01 * l2_penalty("*"))),
    "an old model": OLD.but(server=replace(OLD.server, state=old_model)),
    "fedmmd": methods.fedmmd(1.0, local=LOCAL),
    "moon": methods.moon(local=LOCAL),
    "both": methods.fedmmd(1.0, local=methods.moon(local=LOCAL).client.phases[0]),
}


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("name", TERMS)
def test_a_term_changes_nothing_of_what_was_received(name: str, batch_norm: bool) -> None:
    method = TERMS[name]
    method = method.on_client(phases=tuple(p.but(merge_single=True) for p in method.client.phases))
    work = job(Normed(), method, DATA) if batch_norm else job(Words(), method, TEXTS)
    sent = first_sent(work)
    before = {n: v.clone() for n, v in sent.items()}
    results(work, [0], sent=sent)
    assert all(torch.equal(v, sent[n]) for n, v in before.items())


def test_a_term_that_runs_what_was_received_trains_alike_side_by_side() -> None:
    """One after the other, clients had statistics that those before them had moved."""
    method = methods.fedavg(local=LOCAL.but(loss=Near() + 0.01 * l2_penalty("*"), merge_single=True))
    one, other = (
        on_server(simulate(Normed(), method, DATA, rounds=2, cohort=6, engine=e))
        for e in ("sequential", "vectorised")
    )
    assert all(torch.allclose(v.double(), other[n].double(), atol=1e-6) for n, v in one.items())


class Normed(nn.BatchNorm1d):
    """Batch normalisation alone."""

    def __init__(self) -> None:
        super().__init__(3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)

    def features(self, x: Tensor) -> Tensor:
        """Return all of it, for methods that look at features."""
        return self(x)  # type: ignore[no-any-return]

    def head(self, features: Tensor) -> Tensor:
        """Return it as it is."""
        return features


class Centred(nn.Module):
    """Subtracts a running mean of what it has seen, which it assigns or writes in place, in training or always."""

    def __init__(
        self, how: str = "assigned", always: bool = False, named: bool = True, persistent: bool = True
    ) -> None:
        super().__init__()
        self.how, self.always = how, always
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.a = nn.Linear(3, 3)
        self.register_buffer("m", torch.zeros(3), persistent=persistent)
        if named:
            declare(self, updated_buffers=("m",))

    def forward(self, x: Tensor) -> Tensor:
        now = 0.9 * self.m + 0.1 * (x.mean(0) + 1)
        if self.training or self.always:
            if self.how == "in place":
                self.m.copy_(now)
            else:
                self.m = now
        return self.a(x - self.m)


COPIES = [methods.ditto(local=LOCAL), methods.apfl(local=LOCAL)]
STOPPING = LOCAL.but(epochs=4, early_stopping=EarlyStopping(every=1, patience=2))


@pytest.mark.parametrize(
    ("method", "always", "engine"),
    [
        (FEDAVG, False, "workers"),
        (FEDAVG, True, "auto"),
        (methods.furl("m", local=LOCAL), False, "auto"),
        (methods.furl("m", local=LOCAL), True, "workers"),
        (methods.local(local=STOPPING), False, "sequential"),
        (methods.local(local=STOPPING), True, "workers"),
        (COPIES[0], False, "workers"),
        (COPIES[0], True, "sequential"),
        (COPIES[1], False, "auto"),
        (COPIES[1], True, "sequential"),
    ],
)
def test_an_assigned_buffer_is_updated_as_one_in_place(method: Method, always: bool, engine: str) -> None:
    one = simulate(Centred("in place", always), method, DATA, rounds=2, cohort=4, engine="sequential")
    other = simulate(Centred("assigned", always), method, DATA, rounds=2, cohort=4, engine=engine)
    mine, theirs = ({**run.server, **everyone(run.private, 6)} for run in (one, other))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[n]) for n, value in mine.items())
    assert all(bool(value.any()) for n, value in mine.items() if n.endswith("m"))


def test_an_assigned_buffer_is_refused_side_by_side() -> None:
    with pytest.raises(ConfigError, match=r"forward assigns the buffer 'm', .*Use engine='sequential'."):
        simulate(Centred(), FEDAVG, DATA, rounds=1, engine="vectorised")


@pytest.mark.parametrize("engine", ["sequential", "workers"])
@pytest.mark.parametrize(("how", "persistent"), [("assigned", True), ("in place", True), ("in place", False)])
def test_another_buffer_that_training_changes_is_named(how: str, persistent: bool, engine: str) -> None:
    model = Centred(how, named=False, persistent=persistent)
    said = "changed 'm', which is frozen" if persistent else "wrote into 'm', which is no persistent buffer"
    with pytest.raises(SplitError, match=f"Client '[^']*', round 0: training {said}"):
        simulate(model, FEDAVG, DATA, rounds=1, cohort=4, engine=engine)
    assert how == "in place" or not model.m.any()


class Scaled(nn.Module):
    """Scales texts by a cache that depends on the longest text so far: state, were it to go on."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.table, self.head = nn.Embedding(24, 4), nn.Linear(4, 3)
        self.reach = 0
        self.register_buffer("cache", None, persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        if text.shape[1] > self.reach:
            self.reach = text.shape[1]
            self.cache = torch.linspace(0.5, 1.5, self.reach)
        scale = self.cache[: text.shape[1]].to(self.head.weight.dtype)
        return self.head((self.table(text) * scale[None, :, None]).mean(1))


def test_a_cache_does_not_go_on_to_the_next_client() -> None:
    data, model = tiny.texts(), Scaled()
    work = job(model, FEDAVG, data)
    alone = [results(work, [client])[0] for client in range(4)]
    together = results(work, [3, 1, 0, 2])
    for mine in together:
        upload, other = mine.upload, alone[mine.client].upload
        assert all(torch.equal(v, other.deltas[n]) for n, v in upload.deltas.items())
    assert model.cache is None
    assert model.reach == 0
    one, other_run = (
        simulate(Scaled(), FEDAVG, data, rounds=3, cohort=2, engine="sequential", evaluate_every=k).last
        for k in (0, 1)
    )
    assert all(torch.equal(v, other_run.server[n]) for n, v in one.server.items())
