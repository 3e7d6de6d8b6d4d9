"""FedRoD: numbers by hand, reductions as equalities, and once more in plain PyTorch."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkeep import FederatedData, methods, sgd
from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net
from fedkeep.methods import Phase
from fedkeep.methods.features import no_counts, one_hot
from fedkeep.methods.fedrod import TwoHeads
from tests.engines.reference import averaged, close, cohorts, mini_batches, rows_of
from tests.methods import parts
from tests.methods.parts import Parts
from tests.refusals import raises
from tests.tiny import bits, classes, job, results, same_bits

DATA = classes()
LOCAL = Phase(batch_size=4, epochs=2, optimizer=sgd(0.2, momentum=0.9))
OWN = ("private.classifier.weight", "private.classifier.bias")
State = dict[str, Tensor]


trained = partial(parts.trained, rounds=6)


def logits(w: State, x: Tensor, freeze: bool = False) -> tuple[Tensor, Tensor]:
    found = torch.tanh(x @ w["encoder.weight"].T + w["encoder.bias"])
    generic = found @ w["classifier.weight"].T + w["classifier.bias"]
    return generic, found.detach() @ w[OWN[0]].T + w[OWN[1]]


def plain(rounds: int) -> tuple[State, list[State]]:
    """Return the server's model and every client's head."""
    initial = {n: v.detach().clone() for n, v in Parts().double().state_dict().items()}
    server = dict(initial)
    own = [{n: initial[n.removeprefix("private.")] for n in OWN} for _ in range(len(DATA))]
    for number, cohort in enumerate(cohorts(DATA, 4, rounds, 3)):
        found = []
        for c in cohort:
            labels = DATA.batch(rows_of(DATA, c))["label"]
            prior = torch.tensor([float((labels == j).sum()) for j in range(3)]).double().log()
            w = {n: v.clone().requires_grad_() for n, v in {**server, **own[c]}.items()}
            shared = torch.optim.SGD([w[n] for n in server], 0.2, momentum=0.9)
            private = torch.optim.SGD([w[n] for n in OWN], 0.2, momentum=0.9)
            for batch in mini_batches(DATA, c, LOCAL, 3, number):
                generic, mine = logits(w, batch["x"])
                shared.zero_grad()
                nn.functional.cross_entropy(generic + prior, batch["label"]).backward()
                private.zero_grad()
                nn.functional.cross_entropy(generic.detach() + mine, batch["label"]).backward()
                shared.step()
                private.step()
            found.append({n: w[n].detach() for n in server})
            own[c] = {n: w[n].detach() for n in OWN}
        server = averaged(found, [float(len(rows_of(DATA, c))) for c in cohort])
    return server, own


def test_rounds_equal_plain_pytorch() -> None:
    run = trained(methods.fedrod(local=LOCAL))
    server, own = plain(6)
    close(run.server, server)
    missing = 0
    for c, mine in enumerate(own):
        kept = run.kept(str(DATA.ids[c]))
        close(kept.params, mine)
        labels = DATA.batch(rows_of(DATA, c))["label"]
        assert kept.state["counts"].tolist() == torch.bincount(labels, minlength=3).tolist()
        missing += int((kept.state["counts"] == 0).sum())
    assert missing, "a client lacks a class, whose prior is log 0"
    losses = {False: [0.0, 0], True: [0.0, 0]}
    for c in range(len(DATA)):
        rows = DATA.rows(c, "test")
        batch = DATA.batch(np.arange(rows.start, rows.stop))
        generic, mine = logits({**server, **own[c]}, batch["x"])
        for shared, output in ((False, generic + mine), (True, generic)):
            losses[shared][0] += float(nn.functional.cross_entropy(output, batch["label"], reduction="sum"))
            losses[shared][1] += len(output)
    for shared, (total, count) in losses.items():
        assert run.evaluate(stage="shared" if shared else "own")["loss"] == pytest.approx(
            total / count, abs=1e-9
        )


def test_with_equal_classes_the_shared_part_is_fedavg() -> None:
    rng = np.random.default_rng(0)
    counts = (6, 9, 3, 12, 3, 6)
    owner = [f"u{c}" for c, n in enumerate(counts) for _ in range(n)]
    label = [k % 3 for n in counts for k in range(n)]
    x = rng.standard_normal((len(owner), 3))
    equal = FederatedData.from_columns(
        owner, {"x": x, "label": label}, ["train"] * len(owner), meta={"task": "multiclass"}
    )
    ours, fedavg = (
        trained(m, data=equal, evaluate_every=0)
        for m in (methods.fedrod(local=LOCAL), methods.fedavg(local=LOCAL))
    )
    close(fedavg.server, ours.server, atol=1e-13)
    skewed = (trained(m) for m in (methods.fedrod(local=LOCAL), methods.fedavg(local=LOCAL)))
    assert not same_bits(*(run.server for run in skewed))


def test_the_loss_by_hand() -> None:
    net = Net(methods.fedrod().extend(Parts().double()))  # type: ignore[misc]
    params = {n: torch.zeros_like(v) for n, v in net.initial().items()}
    params["classifier.bias"] = torch.tensor([1.0, 2.0, 0.0]).double()
    params[OWN[1]] = torch.tensor([0.0, 0.0, 4.0]).double()
    params["client/counts"] = torch.tensor([3.0, 1.0, 0.0]).double()
    batch = {"x": torch.ones(1, 3).double(), "label": torch.tensor([0])}
    balanced = -math.log(3 * math.e / (3 * math.e + math.e**2))
    own = -math.log(math.e / (math.e + math.e**2 + math.e**4))
    assert float(TwoHeads()(net, params, batch, {})) == pytest.approx(balanced + own, abs=1e-13)


def test_a_new_client_balances_nothing() -> None:
    net = Net(methods.fedrod().extend(Parts().double()))  # type: ignore[misc]
    batch = {"x": torch.randn(5, 3).double(), "label": torch.tensor([0, 1, 2, 0, 1])}
    params = {**net.initial(), "client/counts": torch.zeros(3).double()}
    generic, own = logits(params, batch["x"])
    expected = sum(nn.functional.cross_entropy(g, batch["label"]) for g in (generic, generic + own))
    assert float(TwoHeads()(net, params, batch, {}).detach()) == pytest.approx(float(expected), abs=1e-9)


def test_neither_counts_nor_head_leave() -> None:
    method = methods.fedrod(local=LOCAL)
    work = job(method.extend(Parts().double()), method, DATA)  # type: ignore[misc]
    for result in results(work, [0, 1, 2]):
        assert result.upload.deltas.keys() == Parts().state_dict().keys()
        sent = b"".join(bits(v) for v in result.upload.deltas.values())
        assert not any(bits(v) in sent for v in result.kept.values())


def test_what_is_refused() -> None:
    with raises(MethodError, low=1, high=3, last=2):
        trained(methods.fedrod(local=LOCAL), data=classes(labels=5))
    with pytest.raises(MethodError, match=r"^The labels reach from -1 to.*2"):
        one_hot(torch.tensor([2, -1]), torch.zeros(3))
    with raises(MethodError, classifier="0", module="Sequential"):
        no_counts(nn.Sequential(nn.Tanh()), "0")
