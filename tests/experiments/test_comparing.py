"""Comparisons: cells that are run once, data that are the same with every seed, and what is refused."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn

from fedkeep.core.errors import ConfigError, NonFiniteError, RoundError, RunError
from fedkeep.core.run_files import read_info
from fedkeep.core.sealed import sealed_bytes
from fedkeep.data import FederatedData
from fedkeep.experiments.build import build_data, run_config
from fedkeep.experiments.comparing import (
    Plan,
    data_sets,
    found,
    plan,
    plans,
    published,
    read_groups,
    run,
    run_all,
)
from fedkeep.experiments.config import Config, parse_config
from fedkeep.methods import METHODS
from fedkeep.report.standings import not_beating, plain_rows, said, table
from fedkeep.version import NUMERICS
from tests.experiments.configs import shops
from tests.refusals import raises

TOY = """
name = "Toy"
seed = 7
[data]
reader = "toy"
users = 12
examples = 20
[model]
kind = "linear"
[method]
kind = "furl"
optimizer = { learning_rate = 0.1, rates = { user = 0.5 } }
[run]
rounds = 2
cohort = 6
"""


class Layers(nn.Module):
    """Two layers, of which methods may keep the head."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(features, 4), nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


class Tags(nn.Module):
    """A label for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(8, 4), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.table(ids))


class Constant(nn.Module):
    """One number for all, 0 at first."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.value.expand(len(x))


def toy(**changes: str) -> Config:
    return parse_config(TOY, overrides={key.replace("__", "."): value for key, value in changes.items()})


pytestmark = pytest.mark.usefixtures("undrawn")


def planned(
    out: Path,
    methods: Sequence[str] = ("fedavg", "furl"),
    seeds: Sequence[int] = (0, 1),
    *configs: Config,
    **more: Any,
) -> Plan:
    return plan(list(configs) or [toy()], methods, seeds, out, **more)


def edit(folder: Path, **changes: Any) -> None:
    (folder / "run.json").write_bytes(sealed_bytes(read_info(folder) | changes))


def test_methods_that_do_not_fit_are_all_named_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        planned(tmp_path / "c", ("furl", "fedbn", "kteps_star"))
    head, *lines = str(error.value).split("\n")
    assert head == "2 of 5 methods do not fit:"
    assert [line.split(":")[0] for line in lines] == ["- fedbn", "- kteps_star"]
    assert not (tmp_path / "c").exists()
    with pytest.raises(ConfigError, match="^fedbn: "):
        planned(tmp_path / "c", ("furl", "fedbn"))


def test_all_methods_are_compared_that_fit_and_the_others_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {kind: METHODS[kind] for kind in ("fedavg", "fedbn", "fine_tuned")}
    monkeypatch.setattr("fedkeep.experiments.variants.offered_methods", lambda: few)
    made = planned(tmp_path / "c", ["all"], [0], references=False)
    names = [v.config.name for v in made.variants]
    assert names == ["fedavg", "fine_tuned", "furl"]  # furl is the configuration's
    assert [line.partition(":")[0] for line in made.left_out] == ["fedbn"]
    result, _ = run(made, progress=False)
    assert any("fedbn" in note and "batch normalisation" in note for note in result.notes)
    for none in ({"fedbn": METHODS["fedbn"]}, {}):
        monkeypatch.setattr("fedkeep.experiments.variants.offered_methods", lambda few=none: few)
        with pytest.raises(ConfigError, match="^fedbn: "):
            planned(tmp_path / "d", ["all"], [0], toy(method={"kind": "fedbn"}), references=False)


def test_all_seeds_have_the_data_of_the_configurations_seed(tmp_path: Path) -> None:
    made = planned(tmp_path / "c")
    assert [v.config.name for v in made.variants] == ["fedavg", "furl", "local", "fine_tuned"]
    assert [(c.label, c.config.seed) for c in made.cells[:5]] == [
        ("fedavg", 0),
        ("furl", 0),
        ("local", 0),
        ("fine_tuned", 0),
        ("fedavg", 1),
    ]
    data = made.cells[0].config.data
    assert data.options["seed"] == 7
    assert data.split is None  # toy data come divided
    wanted = build_data(toy()).fingerprint()
    assert all(build_data(cell.config).fingerprint() == wanted for cell in made.cells)


@pytest.mark.parametrize("divided", [True, False])
def test_data_are_divided_once_and_only_where_they_come_whole(tmp_path: Path, divided: bool) -> None:
    rows = [f"{u},{i % 5}.5,{i % 2}" for u in "abc" for i in range(27)]
    if divided:
        rows = [f"{row},{('train', 'valid', 'test')[i % 3]}" for i, row in enumerate(rows)]
    head = "user,height,label" + (",split" if divided else "")
    (tmp_path / "mine.csv").write_text("\n".join([head, *rows]) + "\n")
    table = 'reader = "table"\npath = "mine.csv"\nfeatures = ["height"]'
    config = parse_config(TOY.replace('reader = "toy"\nusers = 12\nexamples = 20', table))
    made = planned(tmp_path / "c", ("furl",), (0, 1), config, folder=tmp_path)
    assert made.variants[0].config.data.split == (None if divided else {"seed": 7})
    wanted = build_data(config, tmp_path).fingerprint()
    assert all(build_data(cell.config, tmp_path).fingerprint() == wanted for cell in made.cells)


def test_data_that_a_reader_draws_are_those_of_the_configurations_seed_and_saved_ones_take_none(
    tmp_path: Path,
) -> None:
    shops(tmp_path)
    drawn = parse_config(
        TOY.replace(
            'reader = "toy"\nusers = 12\nexamples = 20', 'reader = "reviews"\nfolder = "shops"\nvalid = 2'
        ),
        overrides={"model": '{kind = "bag_of_words", embedding_dim = 2}'},
    )
    made = planned(tmp_path / "c", ("fedavg",), (0, 1), drawn, folder=tmp_path)
    wanted = build_data(drawn, tmp_path).fingerprint()
    assert {c.config.seed for c in made.cells} == {0, 1}
    assert all(build_data(c.config, tmp_path).fingerprint() == wanted for c in made.cells)
    build_data(toy()).save(tmp_path / "kept")
    saved = parse_config(
        TOY.replace('reader = "toy"\nusers = 12\nexamples = 20', 'reader = "saved"\nfolder = "kept"')
    )
    for cell in planned(tmp_path / "d", ("fedavg",), (0, 1), saved, folder=tmp_path).cells:
        assert not build_data(cell.config, tmp_path).meta["follows_seed"]


def test_cells_are_run_once_and_more_can_be_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    real = run_config

    def watched(config: Config, **more: Any) -> Any:
        ran.append(f"{config.name}-{config.seed}{' again' if more['resume'] else ''}")
        return real(config, **more)

    monkeypatch.setattr("fedkeep.experiments.comparing.run_config", watched)
    out = tmp_path / "c"
    run(planned(out, seeds=(0,)), progress=False)
    assert ran == ["fedavg-0", "furl-0", "local-0", "fine_tuned-0"]
    ran.clear()
    first = (out / "report.html").read_bytes()
    made, page = run(planned(out, seeds=(0,)), progress=False)
    assert ran == []
    assert page.read_bytes() == first

    shutil.rmtree(out / "runs" / "furl-0")  # one that was killed in its second round has a folder with one
    real(planned(out, seeds=(0,)).cells[1].config.model_copy(), out=out / "runs" / "furl-0", progress=False)
    edit(out / "runs" / "furl-0", status="running")
    made, _ = run(planned(out, ("fedavg", "furl", "ditto")), progress=False)
    assert ran == [
        "furl-0 again",
        "ditto-0",
        *(f"{m}-1" for m in ("fedavg", "furl", "ditto", "local", "fine_tuned")),
    ]
    (c,) = made.compared
    assert c.labels == ("fedavg", "furl", "ditto", "local", "fine_tuned", "counting each user's labels")
    assert (c.users, c.seeds) == (12, (0, 1))
    assert sum(s.is_best for s in c.standings) == 1
    files = {str(p.relative_to(out)) for p in out.rglob("*") if "runs" not in p.parts}
    assert {
        "report.html",
        "report.md",
        "report.json",
        "tables/comparison.tex",
        "tables/comparison.csv",
    } <= files
    assert {"tables/gains.md", "figures/comparison.svg", "figures/curves-1.svg"} <= files
    text = (out / "report.md").read_text(encoding="utf-8")
    assert said(c).split(" (")[0].replace("_", r"\_") in text
    for line in not_beating(made.gains):
        assert line.split(". ")[0] in text
    bold = {c.labels[row] for row, _ in table(c).bold}
    assert bold == {row["method"] for row in plain_rows(c) if row["bold"] == "yes"}
    assert c.labels[c.best] in bold


def test_each_method_has_as_many_trials_and_then_the_best_for_its_seeds(tmp_path: Path) -> None:
    """All answers are 3, and one step of rate r goes from 0 to 6 r, so errors on valid are |3 - 6 r|."""
    owner, split = np.repeat([f"u{k}" for k in range(12)], 3), ["train", "valid", "test"] * 12
    columns = {"x": np.ones((36, 1), np.float32), "label": np.full(36, 3, np.float32)}
    FederatedData.from_columns(owner, columns, split, {"task": "regression", "classes": 1}).save(
        tmp_path / "kept"
    )
    config = parse_config(
        f'[data]\nreader = "saved"\nfolder = "kept"\n[model]\nkind = "{__name__}:Constant"\n'
        "[method]\noptimizer = { learning_rate = 0.1 }\n[run]\nrounds = 1\ncohort = 12\n"
    )
    out = tmp_path / "c"

    def tuned(number: int = 5, folder: Path = out) -> Plan:
        methods = ("fedavg", "fedprox")
        return planned(folder, methods, (0, 1), config, folder=tmp_path, references=False, tune=number)

    assert len(tuned().missing) == 2 * 5 + 2 * 2
    made, page = run(tuned(), progress=False)
    about = json.loads((out / "tuned.json").read_text())["methods"]
    assert [one["rate"] for one in about["fedavg"]["trials"]] == [0.1, 0.03, 0.3, 0.01, 1.0]
    errors = [round(one["valid"], 4) for one in about["fedavg"]["trials"]]
    assert errors in ([2.4, 2.82, 1.2, 2.94, 3.0], [5.76, 7.9524, 1.44, 8.6436, 9.0])
    tried = [(one["rate"], one["mu"]) for one in about["fedprox"]["trials"]]
    assert tried == [(0.1, 0.01), (0.03, 0.01), (0.3, 0.01), (0.1, 0.001), (0.1, 0.1)]
    assert about["fedprox"]["chosen"] == {"rate": 0.3, "mu": 0.01}
    for seed in (0, 1):
        config_of = read_info(out / "runs" / f"fedavg-{seed}")["config"]
        assert config_of["method"]["optimizer"]["learning_rate"] == 0.3
    assert dict(made.chosen) == {"fedavg": "rate 0.3", "fedprox": "rate 0.3, mu 0.01"}
    assert "rate 0.3, mu 0.01" in page.read_text(encoding="utf-8")
    assert "5 trials" in made.how

    shutil.rmtree(out / "runs" / "fedavg-1")
    assert run(tuned(), progress=False)[0].chosen == made.chosen
    assert (out / "runs" / "fedavg-1").exists()
    with pytest.raises(ConfigError, match="holds a comparison with trials"):
        tuned(0)


def test_frozen_values_that_a_seed_draws_are_compared_over_seeds(tmp_path: Path) -> None:
    """FedBABU's head is frozen in rounds: every seed has its own, and all was run before the comparison failed."""
    mine = toy(model=f'{{ kind = "{__name__}:Layers" }}', method="{ kind = 'fedbabu' }")
    made, page = run(planned(tmp_path / "c", ("fedbabu", "fedavg"), (0, 1), mine), progress=False)
    assert made.compared[0].labels[:2] == ("fedbabu", "fedavg")
    assert made.compared[0].seeds == (0, 1)
    assert [len(g.runs) for g in made.groups] == [2] * len(made.groups)
    assert page.exists()


def test_without_references_only_what_was_named_is_run(tmp_path: Path) -> None:
    made, _ = run(planned(tmp_path / "c", seeds=(0,), references=False), progress=False)
    assert made.compared[0].labels == ("fedavg", "furl")
    assert made.gains == ()
    assert not (tmp_path / "c" / "tables" / "gains.csv").exists()


def test_one_method_alone_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two methods at least; got furl"):
        planned(tmp_path / "c", ("furl",), (0,), references=False)
    assert not (tmp_path / "c").exists()


def test_labels_of_tokens_are_compared_without_counting(tmp_path: Path) -> None:
    """All was run, and the comparison then ended with an error and no page."""
    ids = np.random.default_rng(0).integers(0, 8, (96, 5))
    owner, split = (
        np.repeat([f"u{k}" for k in range(12)], 8),
        (["train"] * 4 + ["valid", "valid", "test", "test"]) * 12,
    )
    meta = {"task": "tokens", "classes": 3}
    FederatedData.from_columns(owner, {"ids": ids, "label": ids % 3}, split, meta).save(tmp_path / "kept")
    text = TOY.replace('reader = "toy"\nusers = 12\nexamples = 20', 'reader = "saved"\nfolder = "kept"')
    mine = parse_config(
        text,
        overrides={
            "model": f'{{ kind = "{__name__}:Tags" }}',
            "method": "{ kind = 'fedper', private = 'out.*' }",
        },
    )
    made, page = run(
        planned(tmp_path / "c", ("fedper", "fedavg"), (0,), mine, folder=tmp_path), progress=False
    )
    assert made.notes == ("Counting is left out: it counts a user's labels, and each token has one here.",)
    assert made.compared[0].labels == ("fedper", "fedavg", "local", "fine_tuned")
    assert {c.ours for c in made.gains if c.reference == "local"} == {"fedper", "fedavg", "fine_tuned"}
    assert page.exists()


def test_counting_is_a_reference_of_the_method_whose_examples_it_counts(tmp_path: Path) -> None:
    mine = toy(model=f'{{ kind = "{__name__}:Layers" }}', method="{ kind = 'fedrep', batch_size = 8 }")
    made, _ = run(planned(tmp_path / "c", ("fedrep", "fedavg"), (0,), mine), progress=False)
    gains = [(c.ours, c.theirs) for c in made.gains]
    others = ["FedAvg", "counting each user's labels", "local training alone"]
    tuned = "FedAvg with fine-tuning"  # is a method and a reference, but none of its own
    assert [theirs for ours, theirs in gains if ours == "fedrep"] == [*others, tuned]
    assert [theirs for ours, theirs in gains if ours == "fine_tuned"] == [*others, "the shared part alone"]
    assert [theirs for ours, theirs in gains if ours == "fedavg"] == others[1:]  # what needs no federation
    text = (tmp_path / "c" / "report.md").read_text(encoding="utf-8")
    assert (
        text.count("Before they adapt, unlike in the comparison: fine\\_tuned.") == 3
    )  # curves, users, runs


def test_what_a_run_would_refuse_is_named_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "c"
    private = {"privacy": "{ noise = 1.2, clip = 1.0, delta = 0.01 }", "run__sampling": "poisson"}
    with pytest.raises(ConfigError) as error:
        planned(out, ("furl", "fedavg"), (0,), toy(**private))
    head, *lines = str(error.value).split("\n")
    assert head == "3 of 4 methods do not fit:"  # local training sends nothing, so it needs no noise
    for line, name in zip(lines, ("furl", "fedavg", "fine_tuned"), strict=True):
        assert line.startswith(f"- {name}: {name!r} weights clients by their numbers of examples")
    assert not out.exists()
    mine = toy(**private, method__weighting="uniform")
    _, page = run(planned(out, ("furl", "fedavg"), (0,), mine), progress=False)
    assert "local: without [privacy], as nothing of it leaves a client." in page.read_text(encoding="utf-8")
    monkeypatch.setattr("fedkeep.experiments.comparing.simulation_of", pytest.fail)
    planned(
        out, ("furl", "fedavg"), (0,), mine
    )  # finished runs may have needed another machine than this one


@pytest.mark.parametrize("kind", [NonFiniteError, RoundError])
def test_a_method_that_diverges_is_left_out_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    real = run_config

    def broken(config: Config, **more: Any) -> Any:
        if config.name == "furl" and config.seed == 1:
            raise kind("The loss became NaN.")
        return real(config, **more)

    monkeypatch.setattr("fedkeep.experiments.comparing.run_config", broken)
    chosen = planned(tmp_path / "c", ("fedavg", "furl", "local"), references=False)
    made, _ = run(chosen, progress=False)
    assert made.notes == ("furl is left out: with seed 1 its training broke down. The loss became NaN.",)
    assert "furl" not in made.compared[0].labels
    assert "furl is left out" in (tmp_path / "c" / "report.md").read_text(encoding="utf-8")


def test_configurations_of_their_own(tmp_path: Path) -> None:
    slow = toy(name="'Slow'", method__optimizer__learning_rate="0.01")
    ditto = toy(name="'Mine'", method__kind="ditto", method__lam="0.7", method__optimizer__rates="{}")
    made = planned(tmp_path / "c", ("fedavg", "furl", "ditto"), (0,), toy(), slow, ditto, references=False)
    assert [v.config.name for v in made.variants] == ["fedavg", "Toy", "Slow", "ditto"]
    assert made.variants[3].config.method.options["lam"] == 0.7
    assert [c.folder.name for c in made.cells] == ["fedavg-0", "Toy-0", "Slow-0", "ditto-0"]
    alike = planned(tmp_path / "d", (), (0,), toy(), toy(), references=False)
    assert [v.config.name for v in alike.variants] == ["Toy", "Toy 2"]
    mine = toy(name="'local'", method__kind="fedavg", method__optimizer__rates="{}")
    taken = planned(tmp_path / "e", (), (0,), mine, mine.model_copy(update={"name": "x"}))
    assert [v.config.name for v in taken.variants] == ["local 2", "x", "local", "fine_tuned"]
    long = toy(name=f"'{'n' * 100}'")
    names = [
        c.folder.name for c in planned(tmp_path / "f", (), (0,), long, long, long, references=False).cells
    ]
    assert len(set(names)) == 3


def test_what_is_refused_before_anything_is_run(tmp_path: Path) -> None:
    out = tmp_path / "c"

    def refused(*given: Any, **more: Any) -> str:
        with pytest.raises(ConfigError) as error:
            planned(*given, **more)
        assert not out.exists()
        assert "\n" not in str(error.value)
        return str(error.value)

    assert refused(out, ("fedavg", "dito")).startswith("--methods: there is no method 'dito'.")
    assert refused(out, (), (0,), toy(), toy(data__users="13", name="'Other'")) == (
        "'Other' is on other data than 'Toy' (clients: 12 in the run, 13 now). One table compares methods on the same "
        "data; ``plans`` takes several data sets."
    )
    untested = toy(data__split="{ fractions = [0.8, 0.2, 0.0] }")
    assert refused(out, (), (0,), untested).startswith("Methods are compared on test examples")
    assert refused(out, metric="auc").startswith("auc has no value for a single example")
    assert refused(out, (), (0, 1), toy(run__hold_out="0.2")).startswith("run.hold_out holds out other users")
    assert refused(out, (), (0,), toy(run__evaluate_every="0")).startswith(
        "run.evaluate_every = 0 judges nothing"
    )
    assert refused(out, ("fedavg",), (0,), toy(), toy(method__kind="ditto", name="'D'")).startswith(
        "The method of 'D' is 'ditto', which --methods does not name."
    )


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "c"
    out.mkdir()
    planned(out)  # an empty one is free
    (out / "compare.json.0123456789abcdef.part").touch()
    planned(out)  # and one of a start that was killed
    (out / "thesis.txt").touch()
    with pytest.raises(ConfigError, match=r"c is not empty and holds no.*--out"):
        planned(out)
    (out / "thesis.txt").unlink()
    run(planned(out, ("furl", "fedavg"), (0,), references=False), progress=False)
    with pytest.raises(
        ConfigError,
        match=r"c holds another comparison:.*12.*13",
    ):
        planned(out, ("furl",), (0,), toy(data__users="13"))
    with raises(ConfigError, name="furl-0", lines="run.rounds: 2 in the run, 3 now"):
        planned(out, ("furl",), (0,), toy(run__rounds="3"))
    assert found(
        planned(out, ("furl", "fedavg"), (0,), references=False)
    ).compared  # what is there is as it was
    (out / "compare.json").write_text("{")
    with pytest.raises(RunError, match=r"compare\.json is damaged\."):
        planned(out, ("furl",), (0,))


def test_several_data_sets_are_compared_each_in_a_folder_and_all_in_one_table(tmp_path: Path) -> None:
    out = tmp_path / "c"
    of = [
        ("Toy", toy(), None),
        ("Toy", toy(data__users="13"), None),
        ("Ditto", toy(data__users="13", method={"kind": "ditto", "lam": 0.5}), None),
    ]
    sets = data_sets(of)
    assert {name: len(own) for name, own in sets.items()} == {"Toy": 1, "Toy-2": 2}
    made = plans(sets, (), (0,), out, references=False)
    assert [(p.out, [v.config.name for v in p.variants]) for p in made] == [
        (out / "Toy", ["furl", "ditto"]),
        (out / "Toy-2", ["furl", "ditto"]),
    ]
    lams = [v.config.method.options.get("lam") for p in made for v in p.variants if v.config.name == "ditto"]
    assert lams == [None, 0.5]  # the second data set has a configuration of its own
    assert len({cell.name for p in made for cell in p.cells}) == 4
    found, page = run_all(made, progress=False)
    assert page == out / "report.html"
    assert [c.users for one in found.values() for c in one.compared] == [12, 13]
    paper = (out / "tables" / "data-sets.tex").read_text(encoding="utf-8")
    assert "\nFURL & " in paper
    assert "\nDitto & " in paper
    text = (out / "tables" / "data-sets.md").read_text(encoding="utf-8")
    assert "| method | Toy | Toy-2 | average rank |" in text
    assert (out / "Toy-2" / "report.html").exists()
    assert not any(p.missing for p in plans(sets, ("furl", "ditto"), (0,), out, references=False))

    with pytest.raises(ConfigError, match=r"several data sets.*--out"):
        plans(data_sets(of[:1]), (), (0,), out)
    planned(tmp_path / "one", ("furl", "fedavg"), (0,))
    run(planned(tmp_path / "one", ("furl", "fedavg"), (0,), references=False), progress=False)
    with pytest.raises(ConfigError, match=r"on one data set.*--out"):
        plans(sets, (), (0,), tmp_path / "one")


def test_groups_of_users_are_shown_apart(tmp_path: Path) -> None:
    made = planned(tmp_path / "c", seeds=(0,), references=False)
    ids = [str(one) for one in made.data.ids]
    rows = [f"{one},{'north' if n < 5 else 'south'},{n % 2 or ''}" for n, one in enumerate(ids[:-1])]
    (tmp_path / "groups.csv").write_text("\n".join(["who,region,odd", *rows]))
    groups = read_groups(tmp_path / "groups.csv")
    assert groups["odd"] == dict.fromkeys(ids[1:-1:2], "1")
    made = planned(tmp_path / "c", seeds=(0,), references=False, groups=groups)
    result, _ = run(made, progress=False)
    assert list(result.further) == ["by-region", "by-odd"]
    shown, _ = result.further["by-region"]
    assert shown.columns == ("method", "south (6 users)", "north (5 users)")
    assert "1 user without a group" in shown.note
    frame = pq.read_table(tmp_path / "c" / "tables" / "clients.parquet").to_pylist()
    north = {
        m: np.mean([r["value"] for r in frame if r["method"] == m and r["client"] in ids[:5]])
        for m in ("furl", "fedavg")
    }
    text = (tmp_path / "c" / "tables" / "by-region.csv").read_text()
    for line in csv.DictReader(text.splitlines()):
        if line["column"].startswith("north"):
            assert float(line["mean"]) == pytest.approx(north[line["method"]])
    assert "By region" in (tmp_path / "c" / "report.md").read_text()


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("who\na\n", ("one column", "who")),
        ("who,g\na,1\na,2\n", ("'a'", "more than once")),
        ("who,g\nnobody,1\n", ("nobody", "'g'")),
    ],
)
def test_groups_that_are_refused(tmp_path: Path, text: str, facts: tuple[str, ...]) -> None:
    (tmp_path / "groups.csv").write_text(text)
    with pytest.raises(ConfigError) as error:
        planned(tmp_path / "c", groups=read_groups(tmp_path / "groups.csv"))
    assert all(fact in str(error.value) for fact in facts)
    assert not (tmp_path / "c").exists()


def test_every_method_has_a_published_name() -> None:
    names = {kind: published(kind) for kind in METHODS}
    assert names["fedrep"] == "FedRep"
    assert names["kteps_star"] == "KTEPS⋆"
    assert len({*names.values()}) == len(METHODS)
    assert all(0 < len(name) < 35 and "\n" not in name for name in names.values())


def test_runs_on_other_data_are_not_mixed(tmp_path: Path) -> None:
    made = planned(tmp_path / "c", seeds=(0,), references=False)
    run(made, progress=False)
    folder = tmp_path / "c" / "runs" / "furl-0"
    data = read_info(folder)["data"]
    edit(folder, data=data | {"fingerprint": data["fingerprint"] | {"partition": "0" * 64}})
    with pytest.raises(ConfigError, match=r"was run on other data than .*: partition differ\."):
        found(made)


def test_a_run_of_other_numerics_is_not_compared(tmp_path: Path) -> None:
    out = tmp_path / "c"
    run(planned(out, seeds=(0,), references=False), progress=False)
    folder = out / "runs" / "furl-0"
    edit(folder, numerics=NUMERICS - 1)
    with raises(ConfigError, name="furl-0", there=2, numerics=3):
        planned(out, seeds=(0,), references=False)
