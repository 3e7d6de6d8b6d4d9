"""Attacks on trained runs, under each protection."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from fedkeep.core.errors import ConfigError
from fedkeep.data import FederatedData, opt_out
from fedkeep.experiments import attack_scenes
from fedkeep.experiments.attack import AttackRequest, attack
from fedkeep.experiments.attack_measures import MEASURES, share
from fedkeep.experiments.attack_scenes import divided, multiplier
from fedkeep.experiments.build import build_data, build_method, build_model
from fedkeep.experiments.config import Config, parse_config
from fedkeep.experiments.simulate import simulate
from fedkeep.metrics.worth.intervals import Interval
from fedkeep.privacy import Release, epsilon
from fedkeep.report.attacks import AttackFinding
from tests.refusals import raises

TEXT = """
[data]
reader = "many_user_text"
users = 12
examples = 24
classes = 5

[model]
kind = "document"
user_dim = 6
embedding_dim = 6
hidden = 6
mlp = 12

[method]
kind = "furl"
private = "user"
batch_size = 4
optimizer = { learning_rate = 0.2, rates = { user = 1.0 } }

[run]
rounds = 12
cohort = 4
engine = "sequential"
"""
FEW = AttackRequest(attacks=("who", "label", "trait", "words", "predictions", "upload"), epsilons=(2.0,))


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str, str], AttackFinding]:
    result = attack(parse_config(TEXT), FEW)
    assert [line.split(":")[0] for line in result.settings] == ["dp ε=2", "secure"]
    return {(f.attack, f.measure, f.protection): f for f in result.findings}


@pytest.mark.slow
def test_the_private_part_names_nobody_with_the_split_and_names_clients_without(
    found: dict[tuple[str, str, str], AttackFinding],
) -> None:
    measure = "named right by the private part alone"
    plain, split = (found["Who is she", measure, name] for name in ("plain", "split"))
    assert plain.guess == split.guess == pytest.approx(1 / 12)
    assert plain.verdict == "found"
    assert split.verdict == "nothing"
    assert split.note == "it is in no upload, so this is a guess"


def test_one_upload_gives_the_vector_to_the_server_and_not_to_those_who_see_a_noisy_sum(
    found: dict[tuple[str, str, str], AttackFinding],
) -> None:
    title, step, whole = (
        "The private vector from one upload",
        "cosine, one local step",
        "cosine, a whole round",
    )
    split, noisy = (found[title, step, name] for name in ("split", "dp ε=2"))
    assert split.value == pytest.approx(1.0, abs=1e-5)
    assert found[title, whole, "split"].value > 0.9  # type: ignore[operator]
    assert noisy.verdict == "nothing"
    assert found[title, step, "secure"].value < 0.9  # type: ignore[operator]
    assert found[title, step, "plain"].note == "everybody shares one vector, which is federated."


def test_words_are_exact_in_a_bare_upload_alone(found: dict[tuple[str, str, str], AttackFinding]) -> None:
    one = {
        name: found["Which words", "F1, one step on 4 texts", name]
        for name in ("plain", "split", "dp ε=2", "secure")
    }
    assert one["plain"].value == one["split"].value == 1.0
    assert "exactly right for 12 of 12 clients" in one["split"].note
    assert one["secure"].value < 1.0  # type: ignore[operator]
    assert one["dp ε=2"].verdict == "nothing"


def test_words_of_a_bag_are_read_too() -> None:
    """``EmbeddingBag`` is no ``Embedding``, and its rows say as much."""
    text = (
        TEXT.replace('"document"', '"bag_of_words"')
        .replace("hidden = 6\n", "")
        .replace("rounds = 12", "rounds = 1")
    )
    found = attack(parse_config(text), AttackRequest(attacks=("words",), epsilons=())).findings
    assert {f.value for f in found if f.protection == "split"} == {1.0}


def test_predictions_are_protected_by_nothing(found: dict[tuple[str, str, str], AttackFinding]) -> None:
    title = "The private vector from predictions"
    assert found[title, "cosine with her vector", "split"].low > 0.5  # type: ignore[operator]
    measure = "predicts as she does, on unseen inputs"
    assert found[title, measure, "dp ε=2"].note == "nothing protects predictions; see split."


def test_what_does_not_apply_says_so(found: dict[tuple[str, str, str], AttackFinding]) -> None:
    for key in (
        ("Who is she", "named right", "secure"),
        ("Which class, by a linear classifier", "most frequent class right", "secure"),
    ):
        assert found[key].value is None
        assert found[key].note.startswith("a sum has no single sender")


def test_a_number_without_an_interval_has_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not defined without one of the clients: whether it lies above guessing can't be told."""
    number = Interval(0.9, np.nan, np.nan)
    monkeypatch.setitem(MEASURES, "upload", lambda *_: [("cosine", number, 0.5, "")])
    asked = AttackRequest(attacks=("upload",), epsilons=())
    findings = attack(parse_config(TEXT, overrides={"run.rounds": "1"}), asked).findings
    assert {(f.value, f.low, f.high, f.verdict) for f in findings} == {(0.9, None, None, "–")}


MEMBERS = """
[data]
reader = "toy"
users = 6
examples = 20
features = 60
classes = 2
[model]
kind = "linear"
[method]
kind = "furl"
private = "user"
epochs = 5
batch_size = 16
weighting = "uniform"
optimizer = { learning_rate = 0.5 }
[run]
rounds = 5
cohort = 6
engine = "vectorised"
"""
SHADOWS = AttackRequest(attacks=("membership",), epsilons=(), shadows=4, clients=4)


def members(config: Config, data: FederatedData) -> dict[str, AttackFinding]:
    run = simulate(
        build_model(config, data), build_method(config.method), data, rounds=5, cohort=6, engine="vectorised"
    )
    return {f.measure: f for f in attack(config, SHADOWS, run=run.last).findings if f.protection == "split"}


@pytest.mark.slow
def test_membership_is_of_the_clients_that_are_attacked_whatever_their_ids() -> None:
    """Ids that are other clients' positions, and ids that are nobody's, change no number but the draws of clients."""
    config = parse_config(MEMBERS)
    made = build_data(config)
    measure = "threshold AUC, the released model"
    for ids in ([str(5 - n) for n in range(6)], [str(100 + n) for n in range(6)]):
        data = FederatedData(made.columns, made.offsets, ids, made.bounds, made.meta)
        found = members(config, data)
        assert found[measure].low > 0.6  # type: ignore[operator]
        assert found["LiRA AUC, her own model"].value > 0.6  # type: ignore[operator]
    tpr = found["LiRA TPR, her own model"]
    others = int(tpr.note.rpartition("; ")[2].removesuffix(" outside each"))
    assert 0 < others < 100  # too few for a false alarm in a hundred
    assert tpr.guess == pytest.approx(1 / (others + 1))


def test_examples_that_opted_out_are_no_members_of_the_released_model() -> None:
    """The model never saw them: counted as members, they would make it look better protected than it is."""
    config = parse_config(MEMBERS)
    made = opt_out(build_data(config), 0.5, by="example")
    found = members(config, made)["threshold AUC, the released model"]
    said = re.fullmatch(
        "4 models, each attacked in turn, of ([0-9]+) examples that opted in; [0-9]+ outside each", found.note
    )
    assert said
    assert int(said[1]) < made.counts("train").sum() / 2
    assert found.value > 0.8  # type: ignore[operator]


def test_of_clients_that_all_opted_out_no_membership_is_measured() -> None:
    """Nothing of theirs is in the released model; their own models learn from it all the same."""
    text = MEMBERS.replace('"furl"\nprivate = "user"', '"ditto"').replace("epochs = 5", "epochs = 1")
    config = parse_config(text)
    made = build_data(config)
    columns = {**made.columns, "opted_in": np.zeros(made.examples, bool)}
    found = members(config, FederatedData(columns, made.offsets, made.ids, made.bounds, made.meta))
    released = {measure: f for measure, f in found.items() if measure.endswith("the released model")}
    assert {m: (f.value, f.note) for m, f in released.items()} == {
        "LiRA AUC, the released model": (None, "all attacked clients opted out: none is in it."),
    }
    assert found["LiRA AUC, her own model"].value is not None


@pytest.mark.slow
def test_membership_of_a_model_that_knows_its_examples_by_heart_and_under_noise() -> None:
    """A linear model of many features, trained long, knows them; one under strong noise does not."""
    result = attack(parse_config(MEMBERS), AttackRequest(attacks=("membership",), epsilons=(0.5,), shadows=4))
    by = {(f.measure, f.protection): f for f in result.findings}
    measure = "threshold AUC, the released model"
    assert by[measure, "split"].low > 0.6  # type: ignore[operator]
    assert by[measure, "secure"].value == by[measure, "split"].value
    assert by[measure, "secure"].note == "the sum is exact, so the model is the split's."
    assert by[measure, "dp ε=0.5"].high < by[measure, "split"].low  # type: ignore[operator]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"run.centralised": "true"},
            "There is no upload to attack: this configuration trains in one place, or federates nothing.",
        ),
        ({"data.users": "2"}, "Attacks want at least 3 clients with training examples; these data have 2."),
    ],
)
def test_refused(settings: dict[str, str], message: str) -> None:
    with raises(ConfigError, said=message):
        attack(parse_config(TEXT, overrides={"run.rounds": "1", **settings}), FEW)


def test_refused_before_anything_is_trained() -> None:
    with pytest.raises(ConfigError, match="An attack must be 'who', .* or 'upload'; got 'whom'"):
        AttackRequest(attacks=("whom",))
    with pytest.raises(ConfigError, match="shadows must be at least 3; got 2."):
        AttackRequest(shadows=2)


def test_the_noise_is_what_epsilon_asks_for() -> None:
    noise = multiplier(3.0, 0.25, 20, 1e-3)
    assert 2.97 < epsilon({Release(rate=0.25, noise=noise): 20}, 1e-3, "rdp") <= 3.0
    with pytest.raises(ConfigError, match="ε must be positive; got 0"):
        multiplier(0.0, 0.25, 20, 1e-3)
    with pytest.raises(ConfigError, match=r"No noise up to 10,000 comes to ε = 0\.0001\."):
        multiplier(1e-4, 0.25, 20, 1e-9)


def test_a_share_by_hand() -> None:
    """Wilson: 5 of 5 gives 1 / (1 + z² / 5) = 0.5655 to 1."""
    assert share([True] * 5).low == pytest.approx(0.5655, abs=1e-4)
    assert (share([True] * 5).mean, share([True] * 5).high) == (1.0, pytest.approx(1.0))


def test_divided_moves_what_does_not_train_to_test() -> None:
    config: Config = parse_config(TEXT)
    data = build_data(config)
    chosen = [np.arange(0, data.count(c, "train"), 2) for c in range(len(data))]
    half, rows = divided(data, chosen)
    for client in range(len(data)):
        train = np.asarray(data.rows(client, "train"))
        assert rows[half.rows(client, "train")].tolist() == train[::2].tolist()
        assert set(rows[half.rows(client, "test")]) == set(data.rows(client, "test")) | set(train[1::2])
        assert rows[half.rows(client, "valid")].tolist() == list(data.rows(client, "valid"))
    assert (half.columns["label"] == data.columns["label"][rows]).all()  # type: ignore[index, union-attr]


def test_noise_is_that_of_a_run_on_the_clients_that_train(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """10 of 30 clients have training examples, 5 of them a round, and 4 are attacked: a rate of a half, δ = 1 / 100."""
    lines = [
        f"u{k},w{k % 3} w{i},{'pos' if (k + i) % 2 else 'neg'},{'train' if k < 10 else 'test'}"
        for k in range(30)
        for i in range(4)
    ]
    (tmp_path / "few.csv").write_text("user,text,label,split\n" + "\n".join(lines) + "\n")
    asked: list[tuple[float, ...]] = []
    monkeypatch.setattr(attack_scenes, "multiplier", lambda *given: asked.append(given) or 2.0)
    text = f"""
[data]
reader = "table"
path = {str(tmp_path / "few.csv")!r}
[model]
kind = "bag_of_words"
user_dim = 2
[method]
kind = "furl"
weighting = "uniform"
[run]
rounds = 2
cohort = 5
"""
    found = attack(parse_config(text), AttackRequest(attacks=("upload",), epsilons=(1.0,), clients=4))
    assert asked == [(1.0, 0.5, 2, 0.01)]
    assert "of 4 clients a sum" in found.settings[0]
    assert "5 of 10 clients in a round, 2 rounds, δ = 0.01" in found.settings[0]
