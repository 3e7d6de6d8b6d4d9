"""Every test example's result at the round that was best on valid: in memory, in the folder, and read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedkeep
from fedkeep import Phase, Run, methods, sgd, simulate
from fedkeep.core.errors import ConfigError, RunError
from fedkeep.core.sealed import seal
from fedkeep.engines import Adaptation
from fedkeep.tasks.results import ExampleResults, JudgedClients, read_examples
from tests.refusals import raises
from tests.tiny import Logits, Slope, classes, pairs, same_bits

DATA = classes(counts=(5, 9, 3, 7), kind="f4", test=6)
FURL = methods.furl("user", local=Phase(batch_size=4, optimizer=sgd(1.0)))
SETTINGS: dict[str, Any] = {"cohort": 2, "seed": 4, "evaluate_every": 1, "evaluate_shared": True}


def run(out: Path | None, rounds: int = 6, **changes: Any) -> Run:
    return simulate(Logits(), FURL, DATA, rounds=rounds, out=out, **{**SETTINGS, **changes})


def best_round(done: Run) -> int:
    """The first round with the highest accuracy on valid."""
    values = {r.round: r.value for r in done.history if (r.split, r.metric) == ("valid", "accuracy")}
    return max(values, key=lambda r: (values[r], -r))


def test_they_are_of_the_round_that_is_best_on_valid(tmp_path: Path) -> None:
    done = run(tmp_path / "run")
    best = best_round(done)
    assert 1 < best < 6  # neither the first nor the last, so that it matters
    there = run(None, best)
    assert done.examples.round == best
    for model in ("own", "shared"):
        found, wanted = done.examples(model), there.judge((model,))[0].of(model)
        assert found.loss.tobytes() == wanted.loss.tobytes()
        assert found.right.tolist() == wanted.right().astype(bool).tolist()
        assert found.client.tolist() == wanted.client.tolist()
        rows = np.concatenate([np.arange(r.start, r.stop) for r in (DATA.rows(c, "test") for c in range(4))])
        assert found.row.tolist() == rows.tolist()
    assert done.examples("own").loss.tolist() != done.examples("shared").loss.tolist()
    own = {r.client: r.value for r in done.history if (r.split, r.round) == ("test", best) and r.client}
    found = done.examples()
    assert own == {DATA.ids[c]: float(found.right[found.client == c].mean()) for c in range(4)}


def test_validation_examples_are_of_the_same_round_and_models(tmp_path: Path) -> None:
    done = run(tmp_path / "run")
    there = run(None, best_round(done))
    for model in ("own", "shared"):
        found, wanted = done.examples(model, split="valid"), there.judge((model,), "valid")[0].of(model)
        assert found.loss.tobytes() == wanted.loss.tobytes()
        assert found.row.tolist() == wanted.row.tolist()
    assert done.examples("own", split="valid").loss.tolist() != done.examples("own").loss.tolist()
    roster = done.examples.roster
    assert roster.client.tolist() == [0, 1, 2, 3]
    assert roster.trained.tolist() == [5, 9, 3, 7]
    assert roster.ids == tuple(DATA.ids)


def test_no_validation_examples_leave_none() -> None:
    data = classes(counts=(5, 9), kind="f4", valid=0)
    done = simulate(Logits(), FURL, data, rounds=1, cohort=2)
    assert done.examples.valid == {}


def test_adapted_clients_are_judged_where_valid_is_best() -> None:
    tuned = methods.fine_tuned(local=Phase(batch_size=4, optimizer=sgd(0.5)), tune_epochs=2)
    done = simulate(
        Logits(), tuned, DATA, rounds=6, evaluate_adapted=True, **{**SETTINGS, "evaluate_shared": False}
    )
    best = best_round(done)
    assert best < 6
    there = simulate(Logits(), tuned, DATA, rounds=best, **{**SETTINGS, "evaluate_shared": False})
    device = there.local_device()
    for split in ("test", "valid"):
        (judged,) = device.adapt(there.orders(there.clients), Adaptation(split=split))
        found = done.examples("adapted", split=split)
        assert found.loss.tobytes() == judged.of("adapted").loss.tobytes()
        assert found.loss.tolist() != done.examples("own", split=split).loss.tolist()
    recorded = {r.round: r.value for r in done.history if (r.split, r.metric) == ("test/adapted", "accuracy")}
    assert recorded[best] == float(done.examples("adapted").right.mean())
    plain = simulate(Logits(), tuned, DATA, rounds=6, **{**SETTINGS, "evaluate_shared": False})
    assert same_bits(plain.server, done.server)  # adapting changes nothing of federation


def test_a_method_without_adaptation_has_none_to_evaluate() -> None:
    with raises(ConfigError, said="evaluate_adapted: 'fedavg' has no phases of adaptation."):
        simulate(Logits(), methods.fedavg(), DATA, rounds=1, evaluate_adapted=True)


def test_a_folder_keeps_them_and_they_are_read_as_they_were(tmp_path: Path) -> None:
    done = run(tmp_path / "run")
    paths = list((tmp_path / "run").glob("examples-*"))
    assert [p.name for p in paths] == [
        f"examples-{done.examples.round}.safetensors"
    ]  # the older ones are gone
    found = read_examples(tmp_path / "run")
    assert found.round == done.examples.round
    assert same_bits(found.to_tensors(), done.examples.to_tensors())
    assert found.roster.ids == tuple(DATA.ids)
    columns = sum(t.nbytes for t in found.tensors.values())
    assert columns == 24 * (21 + 9)  # what the module says of its size
    again = run(tmp_path / "run", resume=True)
    assert same_bits(again.examples.tensors, done.examples.tensors)


def test_a_longer_run_ends_as_one_that_was_long_from_the_start(tmp_path: Path) -> None:
    run(tmp_path / "a", 2)
    longer = run(tmp_path / "a", 6, resume=True)
    whole = run(tmp_path / "b", 6)
    assert longer.history == whole.history
    assert longer.examples.round == whole.examples.round
    assert same_bits(longer.examples.tensors, whole.examples.tensors)


def test_nothing_is_kept_where_nothing_is_evaluated(tmp_path: Path) -> None:
    done = run(tmp_path / "run", evaluate_every=0, evaluate_shared=False)
    assert done.examples is None
    assert read_examples(tmp_path / "run") is None
    assert not list((tmp_path / "run").glob("examples-*"))


def test_a_binary_task_keeps_scores_and_labels() -> None:
    data = fedkeep.data.many_user_text(users=8, examples=20, kind="binary", seed=0)
    model = fedkeep.models.BagOfWords(data.meta["vocabulary"]["size"], 2, 2, embedding_dim=2, mlp=4)
    done = simulate(model, methods.furl("user"), data, rounds=2, cohort=4, evaluate_every=2)
    found, wanted = done.examples(), done.judge(("own",))[0].of("own")
    assert found.score.tobytes() == wanted.score.tobytes()
    assert found.label.tolist() == wanted.label.tolist()
    assert float(found.right.mean()) == wanted.metrics()["accuracy"]
    assert sum(t.nbytes for t in done.examples.tensors.values()) == 29 * len(found.row)


def test_a_regression_keeps_errors() -> None:
    data = pairs({"a": [(0, 0), (1, 3)], "b": [(0, 0), (2, 2), (3, 6)]}, test=1)
    squared = methods.fedavg(local=Phase(loss=methods.terms.squared_error(), optimizer=sgd(0.0)))
    done = simulate(Slope(), squared, data, rounds=1)
    found = done.examples()
    assert (found.score.tolist(), found.loss.tolist()) == ([-2.0, -3.0], [4.0, 9.0])
    assert (found.client.tolist(), found.row.tolist()) == ([0, 1], [1, 4])
    with pytest.raises(ConfigError, match="A regression has errors"):
        _ = found.right
    with raises(ConfigError, said="There are no results of 'shared'; there are ['own']."):
        done.examples("shared")


GOOD = {
    "kind:": torch.tensor(list(b"multiclass"), dtype=torch.uint8),
    "client": torch.zeros(2, dtype=torch.int32),
    "row": torch.arange(2),
    "own/loss": torch.zeros(2).double(),
    "own/score": torch.zeros(2, dtype=torch.uint8),
}
BAD: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "nothing": (dict.fromkeys(GOOD), "no task of a known kind"),
    "no kind": ({"kind:": None}, "no task of a known kind"),
    "another kind": ({"kind:": torch.zeros(3, dtype=torch.uint8)}, "no task of a known kind"),
    "a column is missing": ({"row": None}, "'row' is missing"),
    "a score is missing": ({"own/score": None}, "'own/score' is missing"),
    "no model": ({"own/loss": None, "own/score": None}, "there is no model beside 'client'"),
    "length": ({"row": torch.arange(3)}, "'row' has the shape (3,) and the type torch.int64"),
    "type": ({"own/loss": torch.zeros(2)}, "'own/loss' has the shape (2,) and the type torch.float32"),
    "negative": ({"client": torch.tensor([0, -1], dtype=torch.int32)}, "a client or a row is negative"),
    "valid": ({"valid:row": torch.arange(2)}, "'client' is missing"),
    "roster": (
        {"roster:client": torch.zeros(1, dtype=torch.int32)},
        "the clients are not listed as they should be",
    ),
    "another roster": (
        {
            f"roster:{n}": t
            for n, t in JudgedClients(np.array([1], np.int32), np.array([3]), ("b",)).to_tensors().items()
        },
        "the client 0 is not listed",
    ),
    "unknown": ({"mine/loss": torch.zeros(2).double()}, "unknown ['mine/loss']"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_holds_something_else_is_named(name: str) -> None:
    changes, fault = BAD[name]
    assert ExampleResults.checked(Path("f"), 3, GOOD).round == 3
    with raises(RunError, file=Path("f"), fault=fault):
        ExampleResults.checked(Path("f"), 3, {n: t for n, t in {**GOOD, **changes}.items() if t is not None})


@pytest.mark.parametrize(
    "name", ["examples-7.safetensors", "examples-0.safetensors", "../examples-1.safetensors"]
)
def test_a_commit_that_names_another_file_is_damaged(tmp_path: Path, name: str) -> None:
    run(tmp_path / "run")
    path = tmp_path / "run" / "commit.json"
    path.write_text(json.dumps(seal({**json.loads(path.read_text()), "examples": name})))
    with raises(RunError, said=f"{path} is damaged: it names {name!r} as the results of examples."):
        read_examples(tmp_path / "run")
