"""A run that goes on from another: the bits of one that was never cut, and what has changed in the data since."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedkeep import FederatedData, load_run, methods, simulate
from fedkeep.core.errors import ConfigError, DataError, FedkeepError, MethodError, RunError
from fedkeep.data.preparation import Encoding, Raw
from fedkeep.data.preparation.label_columns import LabelCode, LabelError, Labels, LabelSets, LabelSummary
from fedkeep.data.preparation.numbers import KeyCode, KeyColumn, KeySummary
from fedkeep.data.preparation.texts import Texts, TextSummary
from fedkeep.data.seen import Seen
from fedkeep.methods import Phase
from fedkeep.privacy import DifferentialPrivacy
from tests.methods.parts import Deep
from tests.methods.table import DATA, ROWS, trained
from tests.tiny import everyone, on_server, same_bits


def goes_on(name: str, before: Any, data: FederatedData = DATA, **more: Any) -> Any:
    model, method = ROWS[name][0]().double(), ROWS[name][1]
    return simulate(
        model, method, data, **{"rounds": 2, "cohort": 4, "seed": 3, "continue_from": before, **more}
    )


FEW = {"fedper", "ditto", "scaffold", "pfedhn", "fedamp", "mixture", "fedbabu", "ifca", "feddyn"}
"""Whatever is carried over: private values, copies, states of clients and of the server, a part for each client, what
adapts, several models. ``test_one_answer`` goes on from a folder with every method."""


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in ROWS]
)
def test_cut_and_continued_is_never_cut(name: str, tmp_path: Path) -> None:
    whole, run = trained(name, 4), trained(name, 2)
    more = goes_on(name, run, out=tmp_path / "r")
    assert more.last.round == 4
    assert same_bits(on_server(more), on_server(whole))
    assert same_bits(everyone(more.last.private, len(DATA)), everyone(whole.last.private, len(DATA)))
    assert [r for r in whole.history if r.round > 2 and r.split == "train"] == [
        r for r in more.history if r.split == "train"
    ]
    given = {"model": ROWS[name][0]().double(), "method": ROWS[name][1], "data": DATA}
    assert load_run(tmp_path / "r", **given).last.evaluate() == whole.last.evaluate()


def test_without_a_folder_it_is_the_same() -> None:
    whole, more = trained("scaffold", 4), goes_on("scaffold", trained("scaffold", 2))
    assert same_bits(on_server(more), on_server(whole))
    assert same_bits(everyone(more.last.private, len(DATA)), everyone(whole.last.private, len(DATA)))


def test_a_continued_run_is_resumed(tmp_path: Path) -> None:
    whole, run = trained("ditto", 5), trained("ditto", 2)
    goes_on("ditto", run, rounds=1, out=tmp_path / "r", evaluate_every=1)
    more = goes_on("ditto", run, rounds=3, out=tmp_path / "r", evaluate_every=1, resume=True)
    assert same_bits(on_server(more), on_server(whole))


def examples(ids: list[str], rows: int, features: int = 3, classes: int = 3, seed: int = 0) -> FederatedData:
    """Return clients with rows of their own; the first rows are the same for every number of them."""
    client, x, label = [], [], []
    for name in ids:
        rng = np.random.default_rng([seed, sum(name.encode())])
        x.append(rng.normal(size=(rows, features)))
        label.append((np.arange(rows) + len(name)) % classes)
        client += [name] * rows
    columns = {"x": np.concatenate(x), "label": np.concatenate(label)}
    return FederatedData.from_columns(client, columns).split_per_user((0.6, 0.2, 0.2))


def placed(data: FederatedData) -> dict[tuple[str, bytes], str]:
    """Return in which part each example is."""
    return {
        (data.ids[c], np.asarray(data.columns["x"])[row].tobytes()): split
        for c in range(len(data))
        for split in ("train", "valid", "test")
        for row in data.rows(c, split)
    }


def test_examples_stay_in_their_parts_however_a_file_grows() -> None:
    may = examples(["a", "b", "c"], 20)
    june = examples(["b", "c", "d"], 33)
    before, alone, kept = placed(may), placed(june), placed(Seen.of(may).kept_apart(june))
    same = before.keys() & kept.keys()
    assert len(same) == 40
    assert {key: kept[key] for key in same} == {key: before[key] for key in same}
    assert any(alone[key] != before[key] for key in same)
    assert {key: kept[key] for key in kept.keys() - same} == {key: alone[key] for key in kept.keys() - same}
    assert Seen.of(may).kept_apart(may) is may


def test_equal_examples_are_counted() -> None:
    def rows(splits: list[str]) -> FederatedData:
        return FederatedData.from_columns(
            ["a"] * len(splits),
            {"x": np.zeros((len(splits), 2)), "label": np.zeros(len(splits), np.int64)},
            splits,
        )

    seen = Seen.of(rows(["train", "train", "test"]))
    kept = seen.kept_apart(rows(["train"] * 5))
    assert [kept.count(0, s) for s in ("train", "valid", "test")] == [2, 0, 3]


def test_marks_know_values_clients_and_lengths() -> None:
    from fedkeep.data import Ragged

    def of(client: str, x: list[list[float]], words: list[list[int]], type: str = "f8") -> set[int]:
        data = FederatedData.from_columns(
            [client] * len(x),
            {
                "x": np.array(x, type),
                "text": Ragged.from_rows(words, np.int64),
                "label": np.zeros(len(x), int),
            },
            ["train"] * len(x),
        )
        return set(Seen.of(data).marks.tolist())

    one = of("a", [[1.0, 2.0]], [[5, 6]])
    assert one == of("a", [[1.0, 2.0]], [[5, 6]], "f4")
    others = [
        of("b", [[1.0, 2.0]], [[5, 6]]),
        of("a", [[2.0, 1.0]], [[5, 6]]),
        of("a", [[1.0, 2.0]], [[6, 5]]),
        of("a", [[1.0, 2.0]], [[5, 6, 0]]),
        of("a", [[1.0, 2.0]], [[]]),
    ]
    assert len({frozenset(o) for o in [one, *others]}) == 6


def read(column: Any, name: str) -> Raw:
    """Return a source of two clients with five rows each, of which the last is tested."""
    return Raw(client=["ann"] * 5 + ["bob"] * 5, split=(["train"] * 4 + ["test"]) * 2, columns={name: column})


def words(values: list[str]) -> Texts:
    return Texts(values=values, tokens="word", size=9000, max_length=200)


GROWN: dict[str, tuple[str, Any, Any]] = {
    "a word that only a test has": ("text", words([*"aaaaxbbbby"]), words([*"xyxyzxyxyz"])),
    "ids of another type": ("text", words([*"abcdefghij"]), words([f"w{n} v{n}" * 200 for n in range(10)])),
    "a label": ("label", Labels(values=[*"abcabcabca"]), Labels(values=[*"dbcabcabca"])),
    "one of several labels": (
        "label",
        LabelSets(values=[("a", "b"), ("b",), (), ("c",), ("a",)] * 2),
        LabelSets(values=[("d",)] * 10),
    ),
    "an item": ("item", KeyColumn(values=np.arange(10)), KeyColumn(values=np.arange(5, 15))),
}
"""Of an encoding that is extended: a column, what it held, and what has come since."""


@pytest.mark.parametrize("what", GROWN)
def test_an_example_is_known_whatever_numbers_it_gets(what: str) -> None:
    """Else what was tested would train, once its word has a number."""
    name, was, came = GROWN[what]
    may, june = read(was, name), read(came, name)
    encoding = Encoding.of(may.summary())
    extended = encoding.extended(june.summary())
    assert extended != encoding
    before, after = may.encoded(encoding), may.encoded(extended)
    assert Seen.of(before).among(after) == 10
    assert Seen.of(before).kept_apart(after) is after
    assert before.fingerprint()["columns"].keys() == {name}


def test_new_clients_begin_anew_and_others_keep_theirs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, method = Deep().double(), methods.fedper("head.*", local=Phase(batch_size=4))
    may = simulate(model, method, examples(["a", "b", "c"], 20), rounds=4, cohort=3, seed=1)
    june = examples(["b", "c", "d"], 30)
    run = simulate(model, method, june, rounds=0, cohort=3, seed=1, continue_from=may, out=tmp_path / "june")
    assert run.last.round == 4
    assert same_bits(on_server(run), on_server(may))
    assert same_bits(run.last.private.read([0, 1]), may.last.private.read([1, 2]))
    assert run.last.private.seen([0, 1, 2]) == [True, True, False]
    for part in ("50 new examples", "40 that stay", "1 new client", "1 gone client"):
        assert part in run.continues
    assert load_run(tmp_path / "june", model=model, method=method, data=june).continues == run.continues


def test_a_new_label_gets_rows_of_its_own() -> None:
    def model(classes: int) -> Deep:
        torch.manual_seed(classes)
        made = Deep()
        made.head = torch.nn.Linear(made.head.in_features, classes)
        return made.double()

    method = methods.fedper("head.*", local=Phase(batch_size=4))
    may = simulate(model(3), method, examples(["a", "b"], 20), rounds=3, cohort=2)
    larger = model(4)
    run = simulate(larger, method, examples(["a", "b"], 20, classes=4), rounds=0, continue_from=may)
    old, new = may.last.private.read([0, 1])["head.weight"], run.last.private.read([0, 1])["head.weight"]
    assert torch.equal(new[:, :3], old)
    assert torch.equal(new[0, 3], larger.head.weight.detach()[3])
    assert "1 new class" in run.continues


def test_what_cannot_go_on_is_refused(tmp_path: Path) -> None:
    data, method = examples(["a", "b"], 20), methods.fedper("head.*")
    run = simulate(Deep().double(), method, data, rounds=1, cohort=2)
    wrong: list[tuple[type[FedkeepError], dict[str, Any]]] = [
        (ConfigError, {"method": methods.fedper("body.*")}),
        (FedkeepError, {"method": methods.ditto(0.4)}),
        (ConfigError, {"data": examples(["a", "b"], 20, classes=2)}),
        (ConfigError, {"private": run.private}),
        (
            ConfigError,
            {"privacy": DifferentialPrivacy(noise=1.0, clip=1.0, delta=0.1), "sampling": "poisson"},
        ),
    ]
    for kind, other in wrong:
        given = {"model": Deep().double(), "method": method, "data": data, "rounds": 1, **other}
        with pytest.raises(kind):
            simulate(**given, continue_from=run, out=tmp_path / "r")
        assert not (tmp_path / "r").exists()
    nothing = simulate(Deep().double(), method, data, rounds=0)
    with pytest.raises(RunError):
        simulate(Deep().double(), method, data, rounds=1, continue_from=nothing)


def test_a_private_run_goes_on_and_is_resumed_with_its_charges(tmp_path: Path) -> None:
    data, method = examples(["a", "b", "c", "d"], 20), methods.fedper("head.*")

    def run(rounds: int, **more: Any) -> Any:
        torch.manual_seed(0)
        privacy = DifferentialPrivacy(noise=2.0, clip=1.0, delta=0.1, heaviest=20.0)
        given = {
            "rounds": rounds,
            "cohort": 2,
            "sampling": "poisson",
            "privacy": privacy,
            "min_clients": 0,
            "evaluate_every": 1,
        }
        return simulate(Deep().double(), method, data, **{**given, **more})

    may = run(3, out=tmp_path / "may")
    run(1, out=tmp_path / "june", continue_from=may)
    assert run(2, out=tmp_path / "june", continue_from=may, resume=True).last.round == 5
    with pytest.raises(ConfigError):
        run(1, out=tmp_path / "july", continue_from=may, privacy=None, sampling="shuffled")


def test_an_id_that_changed_its_spelling_is_named() -> None:
    method = methods.fedper("head.*")
    run = simulate(Deep().double(), method, examples(["North", "b"], 20), rounds=1, cohort=2)
    with pytest.warns(UserWarning, match="'north'.*'North'"):
        simulate(Deep().double(), method, examples(["north", "b"], 20), rounds=1, continue_from=run)


def test_a_new_person_whose_id_is_nearly_a_known_one_is_named() -> None:
    method = methods.fedper("head.*")
    run = simulate(Deep().double(), method, examples(["North", "b"], 20), rounds=1, cohort=2)
    with pytest.warns(UserWarning, match="'north '.*'North'"):
        run.fit(rows=examples(["north ", "b"], 20))


def test_what_fails_before_its_own_first_round_leaves_no_folder(tmp_path: Path) -> None:
    method = methods.fedper("head.*", local=Phase(batch_size=4))
    may = simulate(
        Deep().double(), method, examples(["a", "b"], 20), rounds=1, cohort=2, out=tmp_path / "may"
    )
    june = examples(["a", "b"], 20, classes=4)
    with pytest.raises(MethodError, match="class 3"):
        simulate(Deep().double(), method, june, rounds=1, continue_from=may, out=tmp_path / "june")
    assert not (tmp_path / "june").exists()


def test_words_get_the_next_numbers_where_enough_clients_have_them() -> None:
    may = TextSummary(tokens="word", size=6, max_length=9, counts={"b": 2, "a": 5}, clients={"b": 1, "a": 2})
    known = may.code(1)
    assert known.symbols == ("a", "b")
    june = replace(may, counts={"a": 1, "z": 3, "y": 3, "x": 9}, clients={"a": 1, "z": 2, "y": 2, "x": 1})
    assert known.extended(june, 1).symbols == ("a", "b", "x", "y")  # as many as there is room for
    more = known.extended(june, 2)
    assert (more.symbols, more.size) == (("a", "b", "y", "z"), 6)
    assert more.extended(june, 1) == more  # it is full
    assert known.extended(may, 1) == known
    hashed = TextSummary(tokens="hashed_words", size=64, max_length=9)
    assert hashed.code(1).extended(hashed, 1) == hashed.code(1)
    assert known.extended(replace(may, symbols=("q",), counts={}, clients={}), 1) == known


def test_labels_and_items_get_the_next_numbers() -> None:
    labels = LabelSummary(words=("cat", "dog")).code(1)
    assert labels.extended(LabelSummary(words=("dog",))) is labels
    three = LabelSummary(words=("b", "c", "d")).code(1)
    assert three.extended(LabelSummary(words=("a", "c"))).names == ("b", "c", "d", "a")
    with pytest.raises(LabelError):
        labels.extended(LabelSummary(words=("ant",)))  # two classes become three
    whole = LabelSummary(words=("0", "1", "2")).code(1)
    assert whole.extended(LabelSummary(words=("4",))).names == tuple("01234")
    with pytest.raises(LabelError):
        whole.extended(LabelSummary(words=("x",)))
    items = KeySummary(keys=(3, 9)).code(1).extended(KeySummary(keys=(1, 9)))
    assert items.encoded(KeyColumn(values=np.array([1, 3, 9])), str).tolist() == [2, 0, 1]
    text = Encoding(columns={"item": items, "label": three}).to_json()
    again = Encoding.from_json(text)
    assert isinstance(again.columns["item"], KeyCode)
    assert isinstance(again.columns["label"], LabelCode)
    assert again.columns["item"].keys == (3, 9, 1)
    with pytest.raises(DataError):
        KeyCode(keys=(1, 1))
