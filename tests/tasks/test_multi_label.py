"""The task of several labels: trained, judged, kept, counted and shown."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedkeep
from fedkeep.core.errors import DataError, MethodError
from fedkeep.core.optim import sgd
from fedkeep.data import FederatedData
from fedkeep.engines.tally import tallied
from fedkeep.experiments.worth import counted
from fedkeep.methods import fedavg, terms
from fedkeep.metrics import auc
from fedkeep.metrics.worth.pooled import pooled_gain
from fedkeep.report.page import write_report
from fedkeep.tasks import MULTI_LABEL
from fedkeep.tasks.multi_label import micro_f1_pooled

USERS, EACH, LABELS = 12, 20, 3
LOCAL = fedkeep.Phase(loss=terms.binary_cross_entropy(), optimizer=sgd(0.5), epochs=2)


def made(**meta: object) -> FederatedData:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((USERS * EACH, 4)).astype("f4")
    label = (x[:, :LABELS] + 0.5 * rng.standard_normal((len(x), LABELS)) > 0.3).astype(int)
    split = (["train"] * 12 + ["valid"] * 4 + ["test"] * 4) * USERS
    owner = np.repeat(np.arange(USERS), EACH)
    return FederatedData.from_columns(owner, {"x": x, "label": label}, split, {"task": "multi_label", **meta})


def trained(engine: str = "sequential", **options: object) -> fedkeep.Run:
    torch.manual_seed(0)
    settings = {"rounds": 30, "cohort": 6, "seed": 1, "progress": False, "engine": engine}
    return fedkeep.simulate(nn.Linear(4, LABELS), fedavg(local=LOCAL), made(), **(settings | options))


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_metrics_are_those_of_all_labels_pooled(engine: str) -> None:
    run = trained(engine)
    (judged,) = run.judge(("own",), "test")
    one = judged.of("own")
    rows = run.data.split_rows("test")
    true = np.asarray(run.data.columns["label"])[rows].ravel()
    assert np.array_equal(one.label, true)
    assert np.array_equal(one.row, np.repeat(rows, LABELS))
    found = judged.metrics("own")
    says = one.score > 0
    hits = (says & (true > 0)).sum()
    assert found["micro_f1"] == pytest.approx(2 * hits / (says.sum() + true.sum()))
    assert found["accuracy"] == pytest.approx((says == (true > 0)).mean())
    assert found["auc"] == auc(one.score, true)
    assert found["loss"] == pytest.approx(np.log1p(np.exp(np.where(true > 0, -one.score, one.score))).mean())
    assert found["micro_f1"] > 0.5
    sums = tallied(one.task, ("own",), (one,), run.data.ids).metrics("own")
    assert {n: sums[n] for n in found if n != "auc"} == pytest.approx(
        {n: found[n] for n in found if n != "auc"}
    )
    assert abs(sums["auc"] - found["auc"]) <= sums["auc_error"]


def test_it_goes_from_a_run_to_a_page_beside_counting(tmp_path: Path) -> None:
    run = trained(out=tmp_path / "run")
    assert run.examples is not None
    results = run.examples()
    assert results.kind == MULTI_LABEL
    assert results.place is not None
    assert results.place.tolist() == [0, 1, 2] * (len(results.row) // LABELS)
    assert results.classes is None
    page = write_report([tmp_path / "run"], tmp_path / "page").read_text()
    assert "micro-F1" in page
    share = counted(run.data, run.examples)()
    train = run.data.split_rows("train")
    label, owner = np.asarray(run.data.columns["label"])[train], run.data.clients_of(train)
    everywhere = (label.sum(0) + 1) / (len(label) + 2)
    own = owner == share.client[0]
    p = (label[own].sum(0) + everywhere) / (own.sum() + 1)
    assert share.score[:LABELS] == pytest.approx(np.log(p / (1 - p)))


def test_a_gain_in_micro_f1_leaves_out_one_client_at_a_time() -> None:
    client, found, wrong = np.array([0, 0, 1, 1]), np.array([1.0, 0, 1, 1]), np.array([0.0, 1, 0, 0])
    whole, without = micro_f1_pooled(client, found, wrong)
    assert whole == pytest.approx(6 / 7)
    assert without.tolist() == pytest.approx([1.0, 2 / 3])
    gain = pooled_gain(micro_f1_pooled, client, [(found, wrong)], [(found, 1 - found)])
    assert gain.mean == pytest.approx(0.0)
    assert math.isnan(micro_f1_pooled(client, 0 * found, 0 * wrong)[0])


def test_what_does_not_fit_is_refused() -> None:
    columns = {"x": np.zeros((4, 2)), "label": np.full((4, 3), 2)}
    with pytest.raises(DataError, match="labels 0 to 1"):
        FederatedData.from_columns(np.zeros(4, int), columns, ["train"] * 4, {"task": "multi_label"})
    with pytest.raises(DataError) as refused:
        made(classes=LABELS + 1)
    assert refused.value.facts == {"wanted": LABELS + 1, "got": LABELS}
    assert made().meta["classes"] == LABELS
    with pytest.raises(MethodError):
        fedkeep.simulate(nn.Linear(4, 5), fedavg(local=LOCAL), made(), rounds=1, progress=False)
