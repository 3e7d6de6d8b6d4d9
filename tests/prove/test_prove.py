"""Proofs of small configurations: verdicts, paths, claims, the falsifier, the page."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from fedkeep import Optimize, Phase, averaging, methods, models, sgd
from fedkeep.audit.canaries import with_opt_out
from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params
from fedkeep.data import many_user_text
from fedkeep.engines.lanes import LanePass
from fedkeep.engines.tables import local_rows
from fedkeep.methods import Finish, Finished, Global, Reduced, Start, Started
from fedkeep.methods.added_parts import PulledCopy
from fedkeep.methods.terms import Term
from fedkeep.prove import prove, proving, rounds, traced_labels
from fedkeep.prove.proving import AGREES, CHANGES, PACKED
from fedkeep.prove.rounds import Channels, Labelled
from fedkeep.prove.traced_labels import Tracer
from fedkeep.report.page import write_content
from tests.audit import leaks
from tests.audit.clients import users
from tests.audit.leaks import Own, furl
from tests.engines.tables.test_tables import Words
from tests.engines.vectorised.cohorts import TEXTS
from tests.engines.vectorised.test_suits import Packed
from tests.methods.table import DATA, ROWS
from tests.prove.planted import a_number
from tests.tiny import texts

CLIPPED = Phase(batch_size=4, clip_norm=0.1)


@pytest.mark.parametrize(
    ("name", "verdict"),
    [("fedavg", "independent"), ("furl", "declared"), ("kteps", "declared"), ("kteps_star", "declared")],
)
def test_uploads_are_reached_by_declared_channels_alone(name: str, verdict: str) -> None:
    make, method = ROWS[name]
    proof = prove(make(), method, DATA)
    uploads = [i for i in proof.items if i.leaves.startswith("upload/")]
    assert uploads
    assert {i.verdict for i in uploads} == {verdict}
    assert {i.falsifier for i in uploads} == {AGREES}
    assert proof.verdict("weight") == "independent"
    assert proof.ok


class Measures(models.TextClassifier):
    """Writes the padded length of a mini-batch into a federated weight, on the way to its features."""

    def features(self, text: Tensor, text_length: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.embedding.weight.add_(1e-3 * text.shape[1])
        return super().features(text, text_length)


@pytest.mark.parametrize(("kind", "ok"), [(models.TextClassifier, True), (Measures, False)])
def test_what_may_tell_of_examples_may_tell_of_their_lengths(kind: Any, ok: bool) -> None:
    method = methods.fedcp(local=Phase(batch_size=4))
    proof = prove(
        kind(200, 4, embedding_dim=3, hidden=3),
        method,
        many_user_text(users=3, examples=16, classes=4, choices=3),
    )
    assert proof.ok is ok
    assert proof.verdict("upload/classifier.0.weight") == "declared"
    assert (proof.verdict("upload/embedding.weight") == "declared") is ok


@pytest.mark.parametrize("name", ["furl", pytest.param("kteps", marks=pytest.mark.slow)])
def test_a_process_with_other_threads_proves_the_same(name: str) -> None:
    make, method = ROWS[name]
    alone, done = prove(make(), method, DATA), threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        beside = prove(make(), method, DATA)
    finally:
        done.set()
        thread.join()
    assert alone.ok
    assert (beside.items, beside.claims) == (alone.items, alone.claims)


@pytest.mark.parametrize(("name", "verdict"), [("ifca", "independent"), ("fedala", "declared")])
def test_losses_that_a_registered_hook_asks_for_leave_nothing_unknown(name: str, verdict: str) -> None:
    make, method = ROWS[name]
    proof = prove(make(), method, DATA)
    assert proof.verdict("upload/head.weight") == verdict
    assert proof.ok


def by_private_loss(s: Start) -> Started:
    return Started(params={"linear.bias": s.params["linear.bias"] + s.loss({})})


def test_a_loss_that_another_hook_asks_for_is_unknown() -> None:
    """It is a number of private values and of Python: it may go anywhere."""
    method = methods.furl("user", local=Phase(batch_size=4)).on_client(start=by_private_loss)
    proof = prove(Own(), method, DATA)
    item = next(i for i in proof.items if i.leaves == "upload/linear.bias")
    assert item.verdict == "unknown"
    assert item.path == ("_local_scalar_dense in tests.prove.test_prove.by_private_loss",)


def test_the_joint_norm_is_a_path_unless_it_is_declared() -> None:
    joint = methods.furl("user", local=CLIPPED)
    halves = methods.furl("user", local=CLIPPED.but(clip_over="halves"))
    assert prove(Own(), joint, DATA).verdict("upload/linear.bias") == "path named"
    assert (
        prove(Own(), joint, DATA, allow=("loss", "judged", "clip")).verdict("upload/linear.bias")
        == "declared"
    )
    assert prove(Own(), halves, DATA).verdict("upload/linear.bias") == "declared"
    assert prove(Own(), halves, DATA, allow=()).verdict("loss") == "path named"


def test_clients_that_train_nothing_are_no_proof() -> None:
    """They sort first, and of the two that are traced one at least must train."""
    data = users(a=(0, 2, 0, 1), b=(0, 2, 0, 1), c=(4, 0, 1, 1), d=(1, 0, 0, 0))
    joint = methods.furl("user", local=CLIPPED)
    assert prove(Own(), joint, data).verdict("upload/linear.bias") == "path named"


def test_a_phase_that_took_no_step_leaves_all_unknown() -> None:
    said = "took no step"
    one, none = users(a=(4, 1, 0, 0), b=(0, 4, 0, 0)), users(a=(0, 4, 0, 0), b=(0, 4, 0, 0))
    assert said not in str(prove(leaks.Body(), leaks.TWO_HEADS, one).claims)
    proof = prove(leaks.Body(), leaks.TWO_HEADS, none)
    assert proof.verdict("weight") == "unknown"
    why = f"the phase that trains 'federated' {said}: no client has an example to train on"
    assert why in proof.claims[0].against


def test_training_that_breaks_down_proves_nothing() -> None:
    proof = prove(Own(), methods.furl("user", local=Phase(optimizer=sgd(1e200))), DATA)
    assert proof.verdict("loss") == "unknown"
    assert "took no step: Client 'user-0', round 0" in proof.claims[0].against[0]


def test_of_opted_out_examples_nothing_is_proved_where_there_can_be_none() -> None:
    proof = prove(Own(), furl(), users(a=(1, 0, 1, 1), b=(1, 0, 1, 1)))
    assert proof.claims[-1].against == ("none is there, and no client has two to train on",)
    assert not proof.ok
    proof = prove(Own(), furl(), users(a=(4, 0, 1, 1), b=(4, 2, 1, 1)))
    assert "Some clients have opted no example out, so some were, to look at these too." in proof.notes


def test_batch_statistics_above_a_private_layer_are_a_path() -> None:
    proof = prove(Own(norm=True), methods.furl("user", local=Phase(batch_size=4)), DATA)
    item = next(i for i in proof.items if i.leaves == "upload/norm.running_mean")
    assert item.verdict == "path named"
    assert item.path[0] == "private user of user-0"
    assert "native_batch_norm in norm" in item.path
    assert proof.verdict("upload/norm.num_batches_tracked") == "independent"


def test_the_loss_of_a_private_model_is_told_where_nobody_opted_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where some have opted out, that loss stays; the data that are proved of have no such column."""
    make, method = ROWS["ditto"]
    monkeypatch.setattr(PulledCopy, "reveals", ())
    assert prove(make(), method, DATA).verdict("loss") == "declared"
    proof = prove(make(), method, DATA, allow=())
    item = next(i for i in proof.items if i.leaves == "loss")
    assert item.verdict == "path named"
    assert item.path[0].startswith("private ")
    assert item.falsifier == CHANGES
    assert not any(claim.against for claim in proof.claims)
    assert prove(make(), method, with_opt_out(DATA), allow=()).verdict("loss") == "independent"


def test_the_falsifier_finds_a_loss_that_the_labels_would_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LanePass, "totals", lambda step: without_labels(step.total))
    monkeypatch.setattr(traced_labels, "hiding", lambda *_: "")  # of which this has one
    proof = prove(Own(), methods.furl("user", local=Phase(batch_size=4)), DATA, allow=())
    item = next(i for i in proof.items if i.leaves == "loss")
    assert (item.verdict, item.falsifier) == ("path named", CHANGES)


def without_labels(total: Tensor) -> list[float]:
    profile = sys.getprofile()
    sys.setprofile(None)
    try:
        with _disable_current_modes():
            return [float(total)]
    finally:
        sys.setprofile(profile)


def an_example(f: Finish) -> Finished:
    first = next(found for found, _ in f.outputs(leaks.inputs_of))[0].float()
    return Finished(params={"linear.bias": f.trained["linear.bias"] + first})


def test_an_example_in_an_upload_is_a_path_unless_it_is_declared() -> None:
    method = methods.furl("user", local=Phase(batch_size=4)).on_client(finish=an_example)
    proof = prove(Own(), method, DATA)
    item = next(i for i in proof.items if i.leaves == "upload/linear.bias")
    assert item.verdict == "path named"
    assert item.path[0] == "examples of user-0"
    assert proof.verdict("upload/linear.weight") == "declared"
    assert proof.verdict("loss") == "declared"
    allowed = prove(Own(), method, DATA, allow=("loss", "judged", "upload/linear.bias"))
    assert allowed.ok
    assert allowed.verdict("upload/linear.bias") == "declared"


def test_what_is_made_of_examples_and_leaves_in_every_run_is_declared() -> None:
    proof = prove(Own(norm=True), methods.fedavg(local=Phase(batch_size=4)), DATA)
    by = {i.leaves: i.by for i in proof.items}
    assert by["upload/norm.running_mean"] == ("the split federates this buffer",)
    assert by["upload/linear.weight"] == ()


def a_spread(done: Finish) -> Finished:
    spreads = [found.float().var(0, unbiased=False) for found, _ in done.outputs(leaks.inputs_of)]
    return Finished(sends={"seen": sum(spreads, torch.zeros(3))})


@pytest.mark.parametrize(
    ("finish", "verdict"),
    [(a_spread, "declared"), (leaks.send_examples, "path named"), (leaks.send_an_example, "path named")],
)
def test_what_is_sent_along_may_be_made_of_examples_and_carry_none(
    finish: Callable[[Finish], Finished], verdict: str
) -> None:
    proof = prove(Own(), furl(sends=leaks.inputs, finish=finish), DATA)
    assert proof.verdict("sent/seen") == verdict
    assert proof.ok is (verdict == "declared")


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_rows_of_a_table_that_examples_use_are_no_path(
    momentum: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_rows, "SMALL", 1)
    method = methods.fedavg(local=Phase(batch_size=4, optimizer=sgd(0.1, momentum=momentum)))
    proof = prove(Words(300), method.on_client(tables="local"), texts(counts=(4, 5, 3), vocabulary=300))
    assert proof.verdict("rows/embedding.weight") == "independent"
    assert proof.verdict("upload/embedding.weight") == "independent"


def look_later(server: Global, reduced: Reduced) -> Global:
    server.clients.counts("train")  # type: ignore[attr-defined]
    return Optimize()(server, reduced)


def told_where(net: Net, clients: Any) -> Params:
    return {
        "places": torch.tensor([float(clients.index(i)) for i in clients.ids]),
        "count": torch.ones(len(clients)),
    }


def test_a_server_that_looks_into_the_data_is_no_proof() -> None:
    """A simulation hands it the data as the list of clients; an audit calls what is taken of them a leak."""
    looked = "which a server in a simulation is handed, in tests."
    proof = prove(Own(), furl().but(server=leaks.LOOKS), DATA)
    why = f"the data's columns, {looked}audit.leaks.of_examples"
    assert {i.verdict for i in proof.items if i.leaves != "judged"} == {"unknown"}
    assert why in proof.claims[-1].against
    later = prove(Own(), furl().but(server=averaging().but(update=look_later)), DATA)
    assert f"the data's counts, {looked}prove.test_prove.look_later" in later.claims[-1].against
    assert not later.ok
    assert prove(Own(), furl().but(server=averaging().but(state=told_where)), DATA).ok


class Shown(Labelled):
    """Lets a hook at all of the data, as a device's own code could."""

    seen: ClassVar[list[Labelled]] = []

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.seen[:] = [self]


def sends_a_validation_example(f: Finish) -> Finished:
    data = Shown.seen[0]
    batch = data.batch(np.arange(1) + data.rows(0, "valid").start)
    return Finished(sends={"seen": batch["x"].sum().float()})


def test_validation_examples_are_no_training_examples_that_may_be_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rounds, "Labelled", Shown)
    monkeypatch.setattr(proving, "falsified", lambda made, seed, allowed: {})
    proof = prove(Own(), furl(sends=a_number, finish=sends_a_validation_example), DATA)
    sent = next(item for item in proof.items if item.leaves == "sent/seen")
    assert sent.verdict == "path named"
    assert any("validation and test examples" in step for step in sent.path)


def keep_in_memory(f: Finish) -> Finished:
    HELD.append(f.trained["user"].clone())
    return Finished()


def another_clients(f: Finish) -> Finished:
    moved = f.trained["linear.bias"] + sum(v.sum() for v in HELD)
    return Finished(params={"linear.bias": moved})


def keeps_for_another(f: Finish) -> Finished:
    made = another_clients(f)
    HELD[:] = [f.trained["user"].clone()]
    return made


HELD: list[Tensor] = []


def test_what_stays_in_memory_and_goes_to_another_client_is_found() -> None:
    method = methods.furl("user", local=Phase(batch_size=4))
    HELD.clear()
    proof = prove(Own(), method.on_client(finish=keep_in_memory), DATA)
    reads, keeps, opted = proof.claims
    assert not reads.against
    assert keeps.against
    assert not opted.against
    HELD[:] = [torch.ones(1)]
    assert (
        prove(Own(), method.on_client(finish=another_clients), DATA).verdict("upload/linear.bias")
        == "unknown"
    )
    HELD.clear()


@dataclass(frozen=True)
class Keeps(Term):
    """A loss that keeps the private vector, of whoever adapts, where the next client finds it."""

    inner: Term = leaks.LOCAL.loss

    def __call__(self, net: Net, params: Params, batch: Batch, received: Any) -> Tensor:
        HELD[:] = [params["user"].detach().clone()]
        return self.inner(net, params, batch, received)


@dataclass(frozen=True)
class Fails(Term):
    def __call__(self, net: Net, params: Params, batch: Batch, received: Any) -> Tensor:
        raise ValueError("there is no such loss")


@pytest.mark.parametrize(
    ("adapts", "verdict", "kept"),
    [(leaks.LOCAL.loss, "declared", ""), (Keeps(), "declared", "private user"), (Fails(), "unknown", "")],
    ids=["as usual", "a vector stays in memory", "it fails"],
)
def test_what_clients_adapt_is_followed_too(adapts: Term, verdict: str, kept: str) -> None:
    """Nothing of it is uploaded, so only adapting itself shows what else it does."""
    HELD.clear()
    phase = leaks.LOCAL.but(trains="private", loss=adapts)
    proof = prove(Own(), methods.furl("user", local=leaks.LOCAL).adapting(phases=(phase,)), DATA)
    HELD.clear()
    assert proof.verdict("judged") == verdict
    assert proof.ok == (adapts is leaks.LOCAL.loss)
    assert [why.partition(" of ")[0] for why in proof.claims[1].against] == [kept] * bool(kept)
    path = next(item.path for item in proof.items if item.leaves == "judged")
    assert any("adapting: the model failed" in why for why in path) == (verdict == "unknown")


def test_examples_of_another_client_are_no_gradient_of_ones_own() -> None:
    """A value that is computed once, for whoever comes first, stands in the next client's gradients."""
    proof = prove(Own(), leaks.of_term(leaks.KeepsFirst()), DATA)
    assert "upload/linear.weight depends on examples of user-0" in proof.claims[0].against
    assert "loss depends on examples of user-0 and user-1" in proof.claims[0].against
    item = next(i for i in proof.items if i.leaves == "upload/linear.weight")
    assert (item.verdict, item.path[0]) == ("path named", "examples of user-0")


@pytest.mark.parametrize("names", [("Bank of America", "America"), ("America", "Bank of America")])
def test_a_client_whose_name_ends_another_ones_is_another_client(names: tuple[str, str]) -> None:
    data = users(**dict.fromkeys(names, (4, 1, 1, 1)))
    HELD.clear()
    method = methods.furl("user", local=Phase(batch_size=4)).on_client(finish=keeps_for_another)
    (reads, *_) = prove(Own(), method, data).claims
    assert {f"upload/linear.bias depends on private user of {name}" for name in names} <= set(reads.against)
    HELD.clear()


def test_the_falsifier_finds_what_the_labels_would_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    put = Tracer.put

    def blind(self: Tracer, tensor: Tensor, node: object) -> None:
        put(self, tensor, node.__class__(getattr(node, "what", ""), 0))  # type: ignore[call-arg]

    monkeypatch.setattr(Tracer, "put", blind)
    proof = prove(Own(norm=True), methods.furl("user", local=Phase(batch_size=4)), DATA)
    item = next(i for i in proof.items if i.leaves == "upload/norm.running_mean")
    assert (item.verdict, item.path) == ("path named", ("it changes, with the channels replayed",))


def test_a_gradient_that_is_not_replayed_changes() -> None:
    """The falsifier can fail: without the replay FURL's uploads change with private values."""
    found: list[Params] = []
    original = Channels.gradients

    def unplayed(self: Channels, step: object, grads: Params, *, clipped: bool) -> Params:
        found.append(grads)
        self.replay = None
        return original(self, step, grads, clipped=clipped)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channels, "gradients", unplayed)
        proof = prove(Own(), methods.furl("user", local=Phase(batch_size=4)), DATA)
    assert found
    assert proof.verdict("upload/linear.weight") == "path named"


def test_the_page_says_what_proven_does_not_mean(tmp_path: Path) -> None:
    proof = prove(Own(), methods.furl("user", local=Phase(batch_size=4)), DATA, name="mine")
    page = write_content(proof.content(), tmp_path / "proof.html")
    text = page.read_text(encoding="utf-8")
    assert "What is proved of mine" in text
    assert "Proven never means hidden" in text
    assert json.loads(json.dumps(proof.plain()))["ok"]
    assert "http://" not in text.replace("http://www.w3.org", "")


def test_packed_sequences_are_unknown_with_a_way_out_that_is_proved() -> None:
    packed, ours = (prove(Packed(ours), methods.fedper("gru.bias*"), TEXTS) for ours in (False, True))
    assert packed.verdict("upload/embedding.weight") == "unknown"
    assert PACKED in packed.notes
    assert ours.verdict("upload/embedding.weight") == "declared"
    assert PACKED not in ours.notes


class Saves(Own):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def test_a_model_that_hooks_saved_tensors_is_told_what_to_do() -> None:
    with pytest.raises(MethodError, match=r"does not follow hooks .* Prove the model without them"):
        prove(Saves(), furl(), DATA)
