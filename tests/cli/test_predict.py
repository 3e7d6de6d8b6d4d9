"""``fedkeep predict``: what a client's model says of new rows, as ``load_model`` gives it."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedkeep as library
from fedkeep.core.net import logits_of
from fedkeep.experiments.load import load_run
from fedkeep.experiments.personalize import exported
from fedkeep.experiments.run import Run
from tests.cli.conftest import Command
from tests.commands import succeeded

NEW = "user,height,width\nbo,0.5,2\nann,1.5,0\nbo,2.5,1\n"
X = torch.tensor([[0.5, 2.0], [1.5, 0.0], [2.5, 1.0]])


@pytest.fixture
def trained(fedkeep: Command, csv: Callable[..., Path]) -> Callable[..., Run]:
    """Trains ``table.toml`` with settings in ``r``, and exports all its models to ``m``."""

    def train(*settings: str, data: Path | None = None, config: str = "table.toml") -> Run:
        words = [word for setting in settings for word in ("--set", setting)]
        folder = data or csv()
        Path("new.csv").write_text(NEW)
        for command in (("run", config, "--out", "r", *words), ("export", "r", "--all", "--out", "m")):
            succeeded(fedkeep(*command, "--data", folder))
        return load_run(Path("r"), data_folder=folder)

    return train


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text.splitlines()))


def scaled(run: Run, x: torch.Tensor) -> torch.Tensor:
    scales = run.data.meta["standardised"]
    return ((x - torch.tensor(scales["means"])) / torch.tensor(scales["scales"])).float()


def logits(run: Run, client: str | None, x: torch.Tensor) -> torch.Tensor:
    """Compute FURL's linear model by hand: W x + b, and the client's own vector; nobody's is 0, as it begins."""
    weight, bias = (run.server[f"linear.{name}"] for name in ("weight", "bias"))
    return scaled(run, x) @ weight.T + bias + (run.parameters(client)["user"] if client else 0)


def test_each_row_is_predicted_by_its_users_model(trained: Callable[..., Run], fedkeep: Command) -> None:
    run = trained()
    result = succeeded(fedkeep("predict", "m", "--data", "new.csv"))
    found = rows(result.stdout)
    assert [row["client"] for row in found] == ["bo", "ann", "bo"]
    for k, (row, client) in enumerate(zip(found, ("bo", "ann", "bo"), strict=True)):
        wanted = logits(run, client, X[k]).softmax(0)
        assert [float(row["p(0)"]), float(row["p(1)"])] == pytest.approx(wanted.tolist(), abs=1e-6)
        assert row["prediction"] == str(int(wanted.argmax()))
    exact = library.load_model("m", "ann")(**library.load_encoding("m").batch(x=[[1.5, 0.0]])).softmax(1)[0]
    assert torch.tensor([float(found[1]["p(0)"]), float(found[1]["p(1)"])]).equal(exact)


@pytest.mark.parametrize("labels", [("0", "1", "00"), ("1", "", "1")])
def test_a_file_with_labels_is_scored(
    trained: Callable[..., Run], fedkeep: Command, labels: tuple[str, str, str]
) -> None:
    trained()
    lines = NEW.splitlines()
    Path("known.csv").write_text(
        "\n".join([lines[0] + ",label", *map("{},{}".format, lines[1:], labels)]) + "\n"
    )
    result = fedkeep("predict", "m", "--data", "known.csv")
    assert result.stdout == fedkeep("predict", "m", "--data", "new.csv").stdout
    said = [row["prediction"] for row in rows(result.stdout)]
    right = [str(int(label)) == one for label, one in zip(labels, said, strict=True) if label]
    assert f"on {len(right)} row" in result.stderr
    assert f"{100 * sum(right) / len(right):.1f}" in result.stderr
    assert "row" not in fedkeep("predict", "m", "--data", "new.csv").stderr


def test_a_file_with_numbers_is_scored(
    trained: Callable[..., Run], fedkeep: Command, csv: Callable[..., Path]
) -> None:
    trained("data.task='regression'")
    lines = NEW.splitlines()
    Path("known.csv").write_text(
        "\n".join([lines[0] + ",label", *(f"{line},0.5" for line in lines[1:])]) + "\n"
    )
    result = fedkeep("predict", "m", "--data", "known.csv")
    gaps = [float(row["prediction"]) - 0.5 for row in rows(result.stdout)]
    value = float(result.stderr.rpartition(": ")[2])
    assert value == pytest.approx((sum(g * g for g in gaps) / len(gaps)) ** 0.5, abs=1e-3)


def test_what_models_have_in_common_is_read_once(
    trained: Callable[..., Run], fedkeep: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained()
    Path("all.csv").write_text("user,height,width\nann,0,1\nbo,1,0\n../eve,1,1\nann,2,1\n")
    read = list[str]()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Path, *rest: Any) -> Any:
            read.append(path.name)
            return function(path, *rest)

        return call

    for name in ("read_sealed", "load_verified"):
        own = counted(getattr(exported, name))
        monkeypatch.setattr(exported, name, own)
    assert fedkeep("predict", "m", "--data", "all.csv").exit_code == 0
    assert (read.count("model.json"), read.count("shared.safetensors")) == (1, 1)


def test_one_clients_model_predicts_rows_of_nobody(trained: Callable[..., Run], fedkeep: Command) -> None:
    run = trained("preparation.label_names=['no','yes']", data=named_labels())
    Path("new.jsonl").write_text("\n".join(json.dumps({"width": w, "height": h}) for h, w in X.tolist()))
    result = fedkeep("predict", "m", "--client", "bo", "--data", "new.jsonl", "--json", "--out", "said.jsonl")
    assert (result.exit_code, result.stdout) == (0, ""), result.output
    found = [json.loads(line) for line in Path("said.jsonl").read_text().splitlines()]
    wanted = logits(run, "bo", X).softmax(1)
    for row, shares in zip(found, wanted.tolist(), strict=True):
        assert row["client"] == "bo"
        assert row["probabilities"] == pytest.approx(dict(zip(("no", "yes"), shares, strict=True)), abs=1e-6)
        assert row["prediction"] == ("yes" if shares[1] > shares[0] else "no")


def named_labels() -> Path:
    Path("words").mkdir()
    lines = [
        f"{u},{i % 5}.5,{i * 7 % 3},{('no', 'yes')[i % 2]}" for u in ("ann", "bo", "cy") for i in range(10)
    ]
    Path("words/mine.csv").write_text("\n".join(["user,height,width,label", *lines]) + "\n")
    return Path("words")


def test_users_without_a_model_have_the_shared_one_if_it_is_asked_for(
    trained: Callable[..., Run], fedkeep: Command, refused: Callable[..., str]
) -> None:
    run = trained()
    Path("new.csv").write_text(NEW.replace("bo,2.5", "dora,2.5").replace("bo,0.5", "bob,0.5"))
    assert refused("predict", "m", "--data", "new.csv") == (
        "Error: new.csv, line 2: m holds no model of 'bob', nor of 1 other user of the table. Did you mean 'bo'? "
        "Fit and export their models: fedkeep personalize RUN --client ID, or for somebody new --new FILE; then fedkeep export; or say --shared to "
        "predict such rows by the shared part alone."
    )
    found = rows(fedkeep("predict", "m", "--data", "new.csv", "--shared").stdout)
    assert [row["client"] for row in found] == ["", "ann", ""]
    for k, client in enumerate((None, "ann", None)):
        wanted = logits(run, client, X[k]).softmax(0)
        assert float(found[k]["p(1)"]) == pytest.approx(float(wanted[1]), abs=1e-6)
    Path("bare.csv").write_text("height,width\n0.5,2\n")
    (alone,) = rows(fedkeep("predict", "m", "--data", "bare.csv", "--shared").stdout)
    assert alone == found[0]


def test_private_weights_begin_as_in_the_run(trained: Callable[..., Run], fedkeep: Command) -> None:
    run = trained("method={kind='furl',private='linear.weight'}")
    (found, *_) = rows(fedkeep("predict", "m", "--data", "new.csv", "--user", "user", "--shared").stdout)
    assert found["client"] == "bo"
    Path("new.csv").write_text("height,width\n0.5,2\n")
    (found,) = rows(fedkeep("predict", "m", "--data", "new.csv", "--shared").stdout)
    wanted = (
        scaled(run, X[0]) @ run.net.initial()["linear.weight"].T
        + run.server["linear.bias"]
        + run.server["user"]
    )
    assert float(found["p(1)"]) == pytest.approx(float(wanted.softmax(0)[1]), abs=1e-6)


@pytest.mark.parametrize("kind", ["apfl", "ditto"])
def test_methods_that_predict_in_their_own_way(
    kind: str, trained: Callable[..., Run], fedkeep: Command
) -> None:
    run = trained(f"method={{kind='{kind}'}}")
    flat = {**run.sent("ann").flat, **run.kept("ann").flat}
    wanted = run.method.predict(run.net, flat, {"x": scaled(run, X[1:2])}).softmax(1)[0]
    found = rows(fedkeep("predict", "m", "--data", "new.csv").stdout)[1]
    assert [float(found["p(0)"]), float(found["p(1)"])] == pytest.approx(wanted.tolist(), abs=1e-6)


def test_numbers_and_texts_under_their_own_names(fedkeep: Command, trained: Callable[..., Run]) -> None:
    Path("d").mkdir()
    lines = [f"{u},{t},{n}" for u in "ab" for t, n in (("good day", 1.5), ("bad", -2)) * 4]
    Path("d/t.csv").write_text("\n".join(["who,msg,score", *lines]) + "\n")
    Path("t.toml").write_text(
        'data = { reader = "table", path = "t.csv", user = "who", text = "msg", label = "score", tokens = "word", '
        'task = "regression" }\nmodel = { kind = "bag_of_words", user_dim = 2 }\n'
        'method = { kind = "furl", loss = { kind = "squared_error" } }\nrun = { rounds = 1, cohort = 2 }\n'
    )
    trained(data=Path("d"), config="t.toml")
    Path("new.csv").write_text("who,msg,more\nb,good day,1\na,day of nobody,2\n")
    found = rows(fedkeep("predict", "m", "--data", "new.csv").stdout)
    encoding = library.load_encoding("m")
    for row, client, text in zip(found, "ba", ("good day", "day of nobody"), strict=True):
        wanted = library.load_model("m", client)(**encoding.batch(text=[text]))
        assert row == {"client": client, "prediction": row["prediction"]}
        mean, scale = encoding.meta["units"]
        assert float(row["prediction"]) == pytest.approx(wanted.item() * scale + mean, abs=1e-6)


def test_a_mixture_of_models_needs_no_more_columns_of_counted_texts_than_one(
    fedkeep: Command, trained: Callable[..., Run]
) -> None:
    """It names none, so it takes all that it was trained on: not what tells rows apart."""
    Path("d").mkdir()
    lines = [f"{user},{text},{label}" for user in "ab" for text, label in (("good", 1), ("bad", 0)) * 6]
    Path("d/t.csv").write_text("\n".join(["user,text,label", *lines]) + "\n")
    Path("t.toml").write_text(
        'data = { reader = "table", path = "t.csv", tokens = "word" }\nmodel = { kind = "bag_of_words" }\n'
        'method = { kind = "mixture" }\nrun = { rounds = 1, cohort = 2 }\n'
    )
    trained(data=Path("d"), config="t.toml")
    Path("new.csv").write_text("user,text\nb,good\na,bad\n")
    found = rows(succeeded(fedkeep("predict", "m", "--data", "new.csv")).stdout)
    assert [row["client"] for row in found] == ["b", "a"]


def test_parquet_is_read_too(trained: Callable[..., Run], fedkeep: Command) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    trained()
    columns: dict[str, Any] = {
        "user": ["bo", "ann", "bo"],
        "height": X[:, 0].numpy(),
        "width": X[:, 1].numpy(),
    }
    parquet.write_table(pyarrow.table(columns), "new.parquet")
    found = [fedkeep("predict", "m", "--data", name).stdout for name in ("new.csv", "new.parquet")]
    assert found[0] == found[1] != ""


def test_several_tasks_are_columns_of_their_own() -> None:
    from fedkeep.cli.models import _csv, _line
    from fedkeep.engines.use import Predicted, Prediction

    said = (Prediction("mood", "good", {"bad": 0.25, "good": 0.75}), Prediction("place", [1.0, -2.5], {}))
    row = Predicted("ann", said)
    assert _csv([row]) == (
        "client,mood.prediction,mood.p(bad),mood.p(good),place.prediction.0,place.prediction.1\n"
        "ann,good,0.25,0.75,1.0,-2.5\n"
    )
    assert json.loads(_line(row)) == {
        "client": "ann",
        "mood": {"prediction": "good", "probabilities": {"bad": 0.25, "good": 0.75}},
        "place": {"prediction": [1.0, -2.5]},
    }


def test_what_does_not_fit_is_said(trained: Callable[..., Run], refused: Callable[..., str]) -> None:
    trained()
    assert (
        "m holds no model of 'anna'; there are 3, such as '../eve', 'ann', 'bo'. Did you mean 'ann'?"
        in refused("predict", "m", "--client", "anna", "--data", "new.csv")
    )
    Path("bare.csv").write_text("height,width\n0.5,x\n")
    assert (
        "has no column 'user'; it has ['height', 'width']. Name the column of users: --user COLUMN;"
        in refused("predict", "m", "--data", "bare.csv")
    )
    assert "bare.csv, line 2: wanted a number in column 'width'" in refused(
        "predict", "m", "--client", "bo", "--data", "bare.csv"
    )
    assert "has no column 'who'" in refused("predict", "m", "--data", "new.csv", "--user", "who", "--shared")
    assert "Leave out --user and --shared" in refused(
        "predict", "m", "--data", "new.csv", "--client", "bo", "--shared"
    )
    assert "There are no exported models" in refused("predict", "r", "--data", "new.csv")
    for place, fault in (
        ("m", "m is a folder"),
        ("none/a.csv", "there is no folder none"),
    ):  # said before any work
        assert refused("predict", "m", "--data", "not-there.csv", "--out", place) == (
            f"Error: --out wants a file in a folder that is there; {fault}."
        )


def test_a_shared_part_that_cannot_predict_alone(
    trained: Callable[..., Run], refused: Callable[..., str]
) -> None:
    trained("method={kind='fedper',private='linear.*'}")
    assert "The shared part of 'fedper' cannot predict alone" in refused(
        "predict", "m", "--data", "new.csv", "--shared"
    )
    Path("others.csv").write_text("user,height,width\nzoe,0.5,2\n")
    assert refused("predict", "m", "--data", "others.csv") == (
        "Error: others.csv, line 2: m holds no model of 'zoe'. Fit and export their models: fedkeep "
        "personalize RUN --client ID, or for somebody new --new FILE; then fedkeep export."
    )


@pytest.mark.parametrize("kind", ["fine_tuned", "mixture"])
def test_nobody_has_the_shared_model_where_every_client_has_a_copy_of_its_own(
    kind: str, trained: Callable[..., Run]
) -> None:
    run = trained(f"method.kind={kind}")
    written = exported.Exported(Path("m")).shared()
    with torch.no_grad():
        here, there = (
            logits_of(model(x=scaled(run, X)))
            for model in (written, run.model(run.clients[0], stage="shared"))
        )
    assert torch.equal(here, there)
