"""Which models are compared, that their test examples are the same, and what is said where they are not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedkeep.core.errors import ConfigError
from fedkeep.metrics import auc
from fedkeep.report import pairing
from fedkeep.report.groups import configurations
from fedkeep.report.pairing import (
    Side,
    check_metric,
    client_aucs,
    own_side,
    pair,
    pooled_gains,
    reference_side,
    shared_side,
)
from fedkeep.report.runs import read_run
from fedkeep.report.standings import compared, plain_rows
from fedkeep.report.worth_page import compare, fairness_table, sentences
from fedkeep.tasks import BINARY, MULTICLASS, RANKING, REGRESSION, Kind
from fedkeep.tasks.results import ExampleResults, JudgedClients
from tests.refusals import raises
from tests.report.run_folders import write_examples, write_info

CLIENT = np.array([2, 2, 5, 5, 5], np.int32)
RIGHT = {"own": [1, 1, 0, 1, 1], "shared": [0, 1, 0, 0, 1], "adapted": [1, 1, 1, 1, 1]}


def results(
    right: dict[str, list[int]], client: np.ndarray = CLIENT, row: int = 10
) -> dict[str, torch.Tensor]:
    columns = {"client": torch.from_numpy(client), "row": torch.arange(row, row + len(client))}
    for model, answers in right.items():
        columns[f"{model}/score"] = torch.tensor(answers, dtype=torch.uint8)
        columns[f"{model}/loss"] = 1.0 - 0.75 * columns[f"{model}/score"].double()
    return columns


def examples(*models: str, **changes: Any) -> ExampleResults:
    roster = JudgedClients(np.array([2, 5], np.int32), np.array([30, 40]), ("ann", "bob"))
    valid = results({m: [1, 0, 0] for m in models}, np.array([2, 5, 5], np.int32), row=3)
    test = results({m: RIGHT[m] for m in models})
    made = {"round": 4, "tensors": test, "kinds": {None: MULTICLASS}, "valid": valid, "roster": roster}
    return ExampleResults(**made | changes)


def of_kind(kind: Kind, columns: dict[str, torch.Tensor]) -> ExampleResults:
    return examples(tensors=columns, kinds={None: kind}, valid={})


@pytest.fixture
def folder(write_run: Callable[..., Path]) -> Callable[..., Path]:
    def write(name: str, found: ExampleResults | None, **settings: Any) -> Path:
        path = write_run(name, name=name.split("-")[0], **settings)
        if found is not None:
            write_examples(path, found)
        return path

    return write


def groups(*folders: Path) -> list[Any]:
    return configurations([read_run(f) for f in folders])


def sides(*folders: Path) -> tuple[Side, Side]:
    """Return a configuration's own model and the model without."""
    (group,) = groups(*folders)
    own = own_side(group)
    shared = shared_side(own)
    assert shared is not None
    return own, shared


def test_a_model_is_paired_with_the_shared_part_example_by_example(folder: Callable[..., Path]) -> None:
    own, shared = sides(
        folder("FURL-0", examples("own", "shared")), folder("FURL-1", examples("own", "shared"), seed=1)
    )
    assert (own.model, shared.model, shared.label) == ("own", "shared", "the shared part alone")
    found = pair(own, shared, None, "accuracy")
    assert found.clients == ("ann", "bob")
    assert found.seeds == (0, 1)
    assert found.client.tolist() == [0, 0, 1, 1, 1]
    assert found.differences.tolist() == [[1, 0, 0, 1, 0]] * 2
    assert found.trained.tolist() == [30, 40]
    assert found.valid.tolist() == [[1.0, 0.0], [1.0, 0.0]]
    losses = pair(own, shared, None, "loss")
    assert losses.differences[0].tolist() == [0.75, 0, 0, 0.75, 0]
    ((metric, gain),) = pooled_gains(own, shared, None, found.client)
    assert (metric, gain.mean) == ("accuracy", pytest.approx(0.4))


def test_what_clients_adapt_afterwards_is_their_own_model(folder: Callable[..., Path]) -> None:
    later = {"method": "fine_tuned", "split_table": [], "identity": {"method": {"adapt": {"everyone": True}}}}
    (group,) = groups(folder("FT-0", examples("own", "adapted"), **later))
    own = own_side(group)
    shared = shared_side(own)
    assert (own.model, shared.model, shared.label) == ("adapted", "own", "the shared part alone")
    assert reference_side(group).label == "FedAvg with fine-tuning (FT)"
    (without,) = groups(folder("FT-1", examples("own"), **later))
    with pytest.raises(ConfigError) as error:
        own_side(without)
    assert str(error.value).endswith(
        "FT-1: 'fine_tuned' gives clients models of their own only after adapting, and the run keeps no results of "
        "these. Run it with evaluate_adapted = true."
    )


def test_what_only_new_clients_adapt_is_not_waited_for(folder: Callable[..., Path]) -> None:
    """FedPAC's rounds send each client a head of its own; a client that was in none fits one afterwards."""
    adapt = {"phases": [{}], "everyone": False}
    info = {"method": "fedpac", "split_table": [], "identity": {"method": {"adapt": adapt}}}
    (group,) = groups(folder("FedPAC-0", examples("own"), **info))
    assert own_side(group).model == "own"


@pytest.mark.parametrize(
    ("info", "why"),
    [
        ({}, "was never evaluated"),
        ({"error": "The loss became NaN."}, r"ended in an error: The loss became NaN\.$"),
        ({"roster": {}}, "ran across machines"),
    ],
)
def test_runs_without_examples_are_named(folder: Callable[..., Path], info: dict[str, Any], why: str) -> None:
    (group,) = groups(folder("FURL-0", None, **info))
    with pytest.raises(
        ConfigError,
        match=rf"FURL-0 keeps no results of single test examples, so it can't be compared with another\. It {why}",
    ):
        own_side(group)


def test_an_older_run_has_no_names_and_no_validation(folder: Callable[..., Path]) -> None:
    own, shared = sides(folder("FURL-0", examples("own", "shared", valid={}, roster=None)))
    found = pair(own, shared, None, "accuracy")
    assert found.clients == ("client 2", "client 5")
    assert (found.trained, found.valid) == (None, None)


def refusal(ours: Path, theirs: Path, metric: str = "accuracy") -> str:
    (a,), (b,) = groups(ours), groups(theirs)
    with pytest.raises(ConfigError) as error:
        pair(own_side(a), reference_side(b), None, metric)
    return str(error.value)


def test_other_seeds_are_refused(folder: Callable[..., Path]) -> None:
    ours = folder("FURL-0", examples("own"))
    message = refusal(ours, folder("Local-1", examples("own"), seed=1, method="local"))
    assert message == (
        "Seeds differ between methods: FURL has 0, local training alone has 1. Run both with the same seeds."
    )


def test_other_data_are_refused(folder: Callable[..., Path]) -> None:
    ours, theirs = folder("FURL-0", examples("own")), folder("Local-0", examples("own"))
    info = json.loads((theirs / "run.json").read_text())
    info["data"]["fingerprint"]["text"] = "ef" * 32
    write_info(theirs, {k: v for k, v in info.items() if k != "seal"})
    assert refusal(ours, theirs) == (
        f"{theirs} was run on other data than {ours}: text differ. Compare runs on the same data; where they follow the "
        f"seed, compare one seed at a time."
    )


@pytest.mark.parametrize("change", ["row", "client"])
def test_other_test_examples_are_refused(folder: Callable[..., Path], change: str) -> None:
    client = np.array([2, 2, 2, 5, 5], np.int32) if change == "client" else CLIENT
    other = results({"own": RIGHT["own"]}, client, row=11 if change == "row" else 10)
    ours, theirs = folder("FURL-0", examples("own")), folder("Local-0", examples("own", tensors=other))
    assert refusal(ours, theirs) == (
        f"{theirs} has results of other test examples than {ours}: 5 examples of 2 clients against 5 examples of 2 "
        f"clients. Compare runs that judge the same clients; hold_out leaves out others with every seed."
    )


def test_a_metric_without_a_value_for_an_example_is_refused(folder: Callable[..., Path]) -> None:
    ours, theirs = folder("FURL-0", examples("own")), folder("Local-0", examples("own"))
    assert refusal(ours, theirs, "auc").startswith("auc has no value for a single example")
    with raises(ConfigError, said="mae has no value for a single example, so", metric="mae"):
        check_metric("mae", REGRESSION)
    assert refusal(ours, theirs, "acuracy") == (
        "The metric must be 'accuracy', 'loss', 'balanced_accuracy', 'macro_f1' or 'mean_iou'; got 'acuracy'. Did you mean "
        "'accuracy'?"
    )
    errors = {**results({"own": RIGHT["own"]}), "own/score": torch.ones(5, dtype=torch.float64)}
    ours = folder("FURL-1", of_kind(REGRESSION, errors))
    theirs = folder("Local-1", of_kind(REGRESSION, errors))
    assert (
        refusal(ours, theirs)
        == "A regression has no right or wrong answers, so no accuracy. Choose --metric loss."
    )


def test_a_seed_is_named_once(folder: Callable[..., Path]) -> None:
    ours = folder("FURL-0", examples("own", "shared"))
    run = read_run(ours)
    (group,) = groups(ours)
    side = own_side(group)
    with pytest.raises(ConfigError, match="FURL: two runs have the same seed"):
        pair(type(side)(side.label, (run, run), "own"), side, None, "accuracy")


def test_a_users_auc_is_shown_where_both_classes_are_there(folder: Callable[..., Path]) -> None:
    rng = np.random.default_rng(0)
    client = np.repeat(np.array([2, 5], np.int32), 12)
    label = np.array([1, 0] * 6 + [1] * 4 + [0] * 8)  # the second client has four positives
    tests = []
    for _ in range(2):
        columns = {
            "client": torch.from_numpy(client),
            "row": torch.arange(24),
            "label": torch.from_numpy(label).byte(),
        }
        for model in ("own", "shared"):
            score = torch.from_numpy(np.round(rng.normal(label * (model == "own"), 1.0), 1))
            columns |= {f"{model}/score": score, f"{model}/loss": torch.ones(24).double()}
        tests.append(columns)
    paths = [folder(f"FURL-{s}", of_kind(BINARY, t), seed=s) for s, t in enumerate(tests)]
    own, shared = sides(*paths)
    paired = pair(own, shared, None, "accuracy")
    found = client_aucs(own, shared, None, paired.client)
    assert np.isnan(found[:, 1]).all()
    for place, model in enumerate(("own", "shared")):
        scores = [t[f"{model}/score"].numpy()[:12] for t in tests]
        each = [(s[label[:12] == 1][:, None] - s[label[:12] == 0][None, :]) for s in scores]
        wanted = np.mean([((d > 0) + 0.5 * (d == 0)).mean() for d in each])
        assert found[place, 0] == pytest.approx(wanted)
    assert [metric for metric, _ in pooled_gains(own, shared, None, paired.client)] == ["accuracy", "auc"]


class Once(np.ndarray):
    """Rows that are not looked through anew for each client."""

    def __eq__(self, other: object) -> Any:
        raise AssertionError(f"looked through for {other}")


def test_aucs_of_many_users_are_those_of_each_users_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    client = rng.permutation(np.repeat(np.arange(30), 20))
    label = rng.integers(0, 2, 600) * (client > 0)
    scores = {model: np.round(rng.normal(label, 1.0), 1) for model in ("own", "shared")}
    monkeypatch.setattr(
        pairing, "_results", lambda _, side, __: SimpleNamespace(label=label, score=scores[side.model])
    )
    run: Any = None
    own, shared = Side("FURL", (run,), "own"), Side("FURL", (run,), "shared")
    found = client_aucs(own, shared, None, client.view(Once))
    for place, score in enumerate(scores.values()):
        rows = [client == k for k in range(30)]
        each = [auc(score[r], label[r]) if 5 <= label[r].sum() <= 15 else np.nan for r in rows]
        assert np.array_equal(found[place], each, equal_nan=True)
    assert np.isnan(found).any()


@pytest.mark.parametrize(("positives", "negatives", "shown"), [(5, 5, True), (4, 6, False), (6, 4, False)])
def test_a_users_auc_takes_five_examples_of_either_class(
    positives: int, negatives: int, shown: bool, folder: Callable[..., Path]
) -> None:
    label = np.array([1] * positives + [0] * negatives + [1] * 5 + [0] * 5)
    columns = results({}, np.repeat(np.array([2, 5], np.int32), [positives + negatives, 10]))
    columns["label"] = torch.from_numpy(label).byte()
    for model in ("own", "shared"):
        columns |= {f"{model}/score": torch.from_numpy(label - 0.5), f"{model}/loss": torch.ones(20).double()}
    own, shared = sides(folder("FURL-0", of_kind(BINARY, columns)))
    found = client_aucs(own, shared, None, pair(own, shared, None, "accuracy").client)
    assert found is not None
    assert np.isfinite(found).tolist() == [[shown, True]] * 2


def test_a_smaller_error_is_a_gain_in_rmse(folder: Callable[..., Path]) -> None:
    columns = results({})
    for model, error in (("own", 1.0), ("shared", 2.0)):
        columns[f"{model}/score"] = torch.full((5,), error, dtype=torch.float64)
        columns[f"{model}/loss"] = columns[f"{model}/score"] ** 2
    own, shared = sides(folder("FURL-0", of_kind(REGRESSION, columns)))
    found = pair(own, shared, None, "loss")
    assert found.differences.tolist() == [[3.0] * 5]
    ((metric, gain),) = pooled_gains(own, shared, None, found.client)
    assert (metric, gain.mean) == ("rmse", 1.0)


def ranked(folder: Callable[..., Path]) -> tuple[Side, Side]:
    """Return two sides of a ranking, of 2 and 3 questions."""
    columns = results({})
    for model, ranks in (("own", [1, 3, 11, 1, 3]), ("shared", [3, 3, 1, 1, 3])):
        columns[f"{model}/score"] = torch.tensor(ranks, dtype=torch.int32)
        columns[f"{model}/loss"] = torch.ones(5, dtype=torch.float64)
    return sides(folder("FURL-0", of_kind(RANKING, columns)))


def test_gains_of_rankings_are_in_hits_and_in_discounted_gain(folder: Callable[..., Path]) -> None:
    """1 / log2(1 + rank): 1 of the first, ½ of the third, 0 of the eleventh."""
    own, shared = ranked(folder)
    found = pair(own, shared, None, "accuracy")
    assert found.differences.tolist() == [[0, 0, -1, 0, 0]]
    gains = {metric: gain.mean for metric, gain in pooled_gains(own, shared, None, found.client)}
    assert gains == pytest.approx({"hr10": -0.2, "ndcg10": -0.1})


def test_what_is_compared_of_a_ranking_is_called_by_its_name(folder: Callable[..., Path]) -> None:
    """Of 2 and 3 questions the shared part answers all, the other misses one: 100 and 2/3; the means are 5/6 and 1."""
    own, shared = ranked(folder)
    (found,) = compare(own, shared)
    assert sentences(found)[0].startswith("Gain −16.7 points")
    assert sentences(found)[0].endswith(" in HR@10.")  # no share of users is told that is 0
    (stand,) = compared([own, shared])
    assert stand.name == "HR@10, mean over users"
    assert [stand.value(s) for s in stand.standings] == ["83.3 %", "100.0 %"]
    assert [row["metric"] for row in plain_rows(stand)] == ["hr10", "hr10"]
    assert fairness_table([found]).rows[0][4:6] == ("100.0 %", "70.0 %")
