"""``fedkeep start``: a table that nobody described becomes a configuration that runs."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from PIL import Image

from fedkeep.experiments import starting
from tests.commands import call, succeeded


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDKEEP_DATA", raising=False)
    return tmp_path


def fedkeep(*arguments: str) -> Result:
    return call(*arguments)


def written(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def test_a_table_of_nothing_that_a_model_reads_is_refused_and_nothing_written(at: Path) -> None:
    rows = [{"user": f"u{n % 3}", "beats": ["low", "high"], "same": 1, "label": n % 2} for n in range(30)]
    Path("t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    result = fedkeep("start", "t.jsonl")
    assert result.exit_code == 2
    assert all(fact in result.stderr for fact in ("'user'", "'label'", "'beats'", "'same'", "number"))
    assert not Path("t.toml").exists()


def test_a_banks_table_runs_at_once(at: Path) -> None:
    draw = np.random.default_rng(0)
    rows = ["Kunde;Alter;Einkommen;Beruf;seit;aktiv;id;Kredit"]
    for n in range(120):
        age = "" if n % 11 == 0 else str(draw.integers(18, 80))
        day = f"{draw.integers(13, 29)}.{draw.integers(1, 13):02}.2019"
        job, answer = draw.choice(["Köchin", "Lehrer"]), draw.choice(["gut", "schlecht"])
        rows.append(
            f"K {n % 6};{age};{draw.integers(1, 9)}.{draw.integers(100, 999)},50;{job};{day};yes;{n};{answer}"
        )
        rows[-1] = rows[-1].replace("yes", "no") if n % 2 else rows[-1]
    (at / "bank.csv").write_text("\n".join(rows), encoding="latin-1")
    with pytest.warns(UserWarning, match="is no UTF-8"):
        result = fedkeep("start", "bank.csv")
    assert result.exit_code == 0, result.output
    found = written(at / "bank.toml")["data"]
    assert (found["user"], found["label"], found["decimal"]) == ("Kunde", "Kredit", ",")
    kinds = {
        "Alter": "number",
        "Einkommen": "number",
        "Beruf": "category",
        "seit": "date:%d.%m.%Y",
        "aktiv": "truth",
    }
    assert found["kinds"] == kinds
    with pytest.warns(UserWarning, match="is no UTF-8"):
        ran = fedkeep("run", "bank.toml", "--set", "run.epochs=1")
    assert ran.exit_code == 0, ran.output
    again = fedkeep("start", "bank.csv")
    assert (again.exit_code, "is there already" in again.stderr) == (2, True)


def test_a_column_called_label_is_it_wherever_it_stands(at: Path) -> None:
    rows = [f"u{n % 5},{n / 7:.2f},{n % 3},{'ab'[n % 2]}" for n in range(60)]
    Path("t.csv").write_text("\n".join(["user,score,rating,label", *rows]) + "\n")
    assert fedkeep("start", "t.csv").exit_code == 0
    assert written(at / "t.toml")["data"]["label"] == "label"


def test_an_amount_is_a_label_where_nothing_says_more(at: Path) -> None:
    for name, wanted in (("defaulted", "income"), ("default", "default")):
        rows = [f"{n % 4},{n * 10},{n % 2}" for n in range(40)]
        (at / "t.csv").write_text("\n".join([f"user,income,{name}", *rows]) + "\n")
        assert fedkeep("start", "t.csv").exit_code == 0
        assert written(at / "t.toml")["data"]["label"] == wanted
        (at / "t.toml").unlink()


def test_ratings_are_of_an_item_and_copies_are_told(at: Path) -> None:
    rows = [f"r{n % 6},{n % 9},film {n % 30} of the year,{n % 5 + 1}" for n in range(120)]
    (at / "t.csv").write_text("\n".join(["reader_id,film_id,title,stars", *rows]))
    result = fedkeep("start", "t.csv", "--client", "reader_id")
    assert (result.exit_code, "30 rows are as one above" in result.stdout) == (0, True), result.output
    found = written(at / "t.toml")["data"]
    assert (found["item"], found["label"], found["task"]) == ("film_id", "stars", "regression")
    assert "features" not in found
    ran = fedkeep("run", "t.toml", "--set", "run.epochs=1")
    assert (ran.exit_code, "RMSE" in ran.stdout) == (0, True), ran.output
    (at / "s.csv").write_text("\n".join(["reader_id,when,title,stars", *rows]))
    assert (
        "'title': texts; if they name what is rated"
        in fedkeep("start", "s.csv", "--client", "reader_id").stdout
    )


def test_numbers_and_texts_to_predict_from(at: Path) -> None:
    rows = [f'b{n % 4},{n % 5},"{n % 5 * 1000 + n:,}"' for n in range(80)]
    (at / "house.csv").write_text("\n".join(["branch,rooms,price", *rows]))
    assert fedkeep("start", "house.csv").exit_code == 0
    made = written(at / "house.toml")
    assert made["data"]["task"] == "regression"
    assert fedkeep("run", "house.toml", "--set", "run.epochs=1").exit_code == 0
    texts = [
        f"a{n % 4}\tsay {n} times {'yes' if n % 2 else 'no'}{'x' * n} now\t{1 + n % 2}" for n in range(120)
    ]
    (at / "said.tsv").write_text("\n".join(["author\tmessage\tmark", *texts]))
    assert fedkeep("start", "said.tsv").exit_code == 0
    made = written(at / "said.toml")
    assert (made["data"]["text"], made["data"]["label_names"]) == ("message", ["1", "2"])
    assert fedkeep("run", "said.toml", "--set", "run.epochs=1").exit_code == 0


@pytest.mark.parametrize(
    "message", ["我今天很高兴因为天气非常好{}", "ฉันมีความสุขมากวันนี้{}", "my code is {} as ever"]
)
@pytest.mark.parametrize("different", [40, 1500])
def test_messages_are_no_categories(at: Path, message: str, different: int) -> None:
    rows = [
        f"u{n % 4},{message.format(n % different)},{'yes' if n % 3 else 'no'}" for n in range(2 * different)
    ]
    (at / "said.csv").write_text("\n".join(["user,said,label", *rows]), encoding="utf-8")
    assert fedkeep("start", "said.csv").exit_code == 0
    assert written(at / "said.toml")["data"]["text"] == "said"
    told = fedkeep("prepare", "said.toml").stdout
    assert "label" in told
    assert message.format(7) not in told


def test_few_long_answers_stay_categories(at: Path) -> None:
    rows = [f"u{n % 4},more than {n % 5} years ago,{n % 2}" for n in range(80)]
    (at / "t.csv").write_text("\n".join(["user,since,label", *rows]))
    assert fedkeep("start", "t.csv").exit_code == 0
    assert written(at / "t.toml")["data"]["kinds"] == {"since": "category"}


def test_what_cannot_be_used_is_all_named(at: Path) -> None:
    rows = [f"u{n % 3},{n if n != 7 else 'x'},{n % 5},7,{n % 2 if n != 9 else ''}" for n in range(30)]
    (at / "t.csv").write_text("\n".join(["user,a,b,same,label", *rows]))
    result = succeeded(fedkeep("start", "t.csv"))
    for said in ("'a': t.csv, line 9: wanted a number", "'same': the same in every row"):
        assert said in result.stdout
    found = written(at / "t.toml")["data"]
    assert (found["skip_unlabelled"], list(found["kinds"])) == (True, ["b"])


def test_rows_without_a_number_to_predict_are_left_out(at: Path) -> None:
    rows = [f"u{n % 3},{n},{'NA' if n % 4 == 1 else n * 0.5}" for n in range(40)]
    (at / "t.csv").write_text("\n".join(["user,a,delay", *rows]))
    succeeded(fedkeep("start", "t.csv"))
    found = written(at / "t.toml")["data"]
    assert (found["task"], found["skip_unlabelled"]) == ("regression", True)
    succeeded(fedkeep("run", "t.toml", "--set", "run.epochs=1"))
    refused = fedkeep("check", "t.toml", "--set", "data.skip_unlabelled=false")
    assert all(fact in refused.stderr for fact in ("line 3", "'delay'", "skip_unlabelled"))


@pytest.mark.parametrize(
    "last", [lambda n: f"2013-01-01T{n // 60:02}:{n % 60:02}:00Z", lambda n: f"N{n}"], ids=["dates", "names"]
)
def test_a_last_column_that_is_hardly_a_label_is_asked_about(at: Path, last: Callable[[int], str]) -> None:
    rows = [f"c{n % 3},{n % 7},{last(n)}" for n in range(300)]
    (at / "t.csv").write_text("\n".join(["user,a,last", *rows]))
    result = fedkeep("start", "t.csv")
    assert result.exit_code == 2
    assert all(fact in result.stderr for fact in ("'last'", "--label COLUMN", "'a'"))
    assert not Path("t.toml").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--client COLUMN"),
        (["--client", "aa"], "has no column 'aa'"),
        (["--client", "a", "--out", "../t.toml"], "beside the data"),
    ],
)
def test_what_start_asks_for(at: Path, arguments: list[str], said: str) -> None:
    (at / "t.csv").write_text("a,b\n1,2\n3,4\n5,6\n")
    result = fedkeep("start", "t.csv", *arguments)
    assert (result.exit_code, said in result.stderr) == (2, True)
    assert [path.name for path in at.iterdir()] == ["t.csv"]


def images(folder: Path, places: list[str], side: int = 8) -> None:
    for number, place in enumerate(places):
        file = folder / place
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((side + number % 2, side, 3), number, np.uint8)).save(file)


@pytest.mark.parametrize(
    ("places", "levels"),
    [
        ([f"{c}/{n}.png" for c in ("cat", "dog") for n in range(20)], "class"),
        ([f"{p}/{c}/{n}.png" for p in ("train", "test") for c in "ab" for n in range(20)], "split/class"),
        ([f"{u}/{c}/{n}.png" for u in ("ann", "bob", "eve") for c in "ab" for n in range(8)], "client/class"),
        ([f"{c}/user 1{u}/{n}.png" for c in "abc" for u in range(2) for n in range(6)], "class/client"),
    ],
)
def test_a_folder_of_images_runs_at_once(at: Path, places: list[str], levels: str) -> None:
    images(at / "my pets", places)
    result = succeeded(fedkeep("start", "my pets"))
    assert "fedkeep run 'my pets.toml'" in result.stdout
    assert ("a guess" in result.stdout) == ("client" in levels)
    found = written(at / "my pets.toml")["data"]
    assert (found["levels"], found["size"]) == (levels, 8)
    assert ("partition" in found) == ("client" not in levels)
    assert fedkeep("check", "my pets.toml").exit_code == 0


def test_models_of_images_say_how_to_predict_them(at: Path) -> None:
    images(at / "pets", [f"{u}/{c}/{n}.png" for u in ("ann", "bob", "eve") for c in "ab" for n in range(8)])
    for command in (
        ("start", "pets"),
        ("run", "pets.toml", "--set", "run.epochs=1", "--out", "r"),
        ("export", "r", "--all", "--out", "m"),
    ):
        succeeded(fedkeep(*command))
    result = fedkeep("predict", "m", "--data", "pets")
    assert result.exit_code
    assert "load_run(RUN).predict(CLIENT, {'image': array})" in " ".join(result.stderr.split())


def test_a_folder_of_leafs_runs_at_once(at: Path) -> None:
    users = ["ann", "bob"]
    for part in ("train", "test"):
        (at / f"leaf/{part}").mkdir(parents=True)
        own = {u: {"x": [[k / 10, 1.0] for k in range(6)], "y": [0, 1] * 3} for u in users}
        content = {"users": users, "num_samples": [6, 6], "user_data": own}
        (at / f"leaf/{part}/all.json").write_text(json.dumps(content))
    assert fedkeep("start", "leaf").exit_code == 0
    assert fedkeep("run", "leaf.toml", "--set", "run.epochs=1").exit_code == 0


def test_a_folder_of_one_table_a_client_runs_at_once(at: Path) -> None:
    (at / "shops").mkdir()
    for shop in ("north 1", "south 2"):
        rows = [f"2024-01-{n % 28 + 1:02},{n / 4},{'ab'[n % 2]},{n % 3 == 0:d}" for n in range(24)]
        (at / f"shops/{shop}.csv").write_text("\n".join(["day,price,kind,label", *rows]))
    assert fedkeep("start", "shops").exit_code == 0
    assert written(at / "shops.toml")["data"]["user"] == "user"
    assert fedkeep("run", "shops.toml", "--set", "run.epochs=1").exit_code == 0


def test_a_folder_of_nothing_known_is_refused_and_nothing_is_written(at: Path) -> None:
    (at / "empty").mkdir()
    assert fedkeep("start", "empty").exit_code == 2
    images(at / "deep", ["a/b/c/d/1.png"])
    assert fedkeep("start", "deep").exit_code == 2
    assert sorted(path.name for path in at.iterdir()) == ["deep", "empty"]


def test_epochs_are_the_usual_ones_but_where_examples_are_too_many(
    at: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images(at / "pets", [f"{c}/{n}.png" for c in "ab" for n in range(6)])
    rows = "\n".join(["user,x,label", *(f"u{n % 4},{n / 7:.3f},{n % 2}" for n in range(40))])
    for name, most, epochs in (("few", None, None), ("many", 200, 5)):
        if most is not None:
            monkeypatch.setattr(starting, "MOST_ROWS", most)
        (at / f"{name}.csv").write_text(rows)
        assert fedkeep("start", f"{name}.csv").exit_code == 0
        assert written(at / f"{name}.toml").get("run", {}).get("epochs") == epochs
    assert fedkeep("start", "pets").exit_code == 0
    assert "epochs" not in written(at / "pets.toml").get("run", {})
