"""``fedkeep personalize``: users outside of federation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from fedkeep.cli.personalize import parse_k
from fedkeep.core.errors import ConfigError, RunError
from fedkeep.core.files import state_name
from fedkeep.core.run_files import read_info
from fedkeep.experiments.load import load_run
from fedkeep.experiments.personalize import adapt_clients
from fedkeep.experiments.personalize.kept import read_fitted
from tests.cli.conftest import Command
from tests.cli.test_run import states
from tests.commands import succeeded
from tests.refusals import raises


def folder_of(fedkeep: Command, *further: str) -> Path:
    succeeded(fedkeep("run", "toy.toml", "--out", "r", *further))
    return Path("r")


def rows_of(stdout: str) -> list[str]:
    """Return the first cells of the rows that have a percentage."""
    return [line.split()[0] for line in stdout.splitlines() if " % " in line and "(95 %" not in line]


@pytest.mark.usefixtures("undrawn")
def test_held_out_users(fedkeep: Command) -> None:
    run = folder_of(fedkeep, "--set", "run.hold_out=0.4")
    before = states(run)
    result = succeeded(fedkeep("personalize", "r"))
    assert result.stdout.startswith("2 users held out of federation, on their test examples\n")
    rows = rows_of(result.stdout)
    assert rows == ["0", "1", "2", "5", "10", "20", "50", "all"]
    kept = json.loads((run / "analyses.json").read_text(encoding="utf-8"))["cold_start"]
    assert kept["k"] == [0, 1, 2, 5, 10, 20, 50, "all"]
    assert kept["users"] == 2
    fitted, frequent = kept["series"]
    assert (fitted["name"], frequent["name"]) == ("fitted private part", "most frequent label of the same k")
    assert frequent["mean"][0] is None
    assert all(0 <= share <= 1 for share in frequent["mean"][1:])
    assert kept["changes"] == [None] * 8  # two users are too few for an interval
    assert "With 2 users nothing is claimed" in kept["note"]
    assert "Change from the k before (95 %)" in result.stdout
    assert states(run) == before  # nothing was uploaded, nobody's state was changed
    assert fedkeep("report", "r").exit_code == 0


def test_held_out_users_at_other_k(fedkeep: Command) -> None:
    run = folder_of(fedkeep, "--set", "run.hold_out=0.4")
    result = succeeded(fedkeep("personalize", "r", "--k", "0,3"))
    assert rows_of(result.stdout) == ["0", "3"]
    assert "is all of them" not in result.stdout
    assert not (run / "analyses.json").exists()
    for further in ((), ("--client", "user-1")):
        result = fedkeep("personalize", "r", "--k", "3,500", *further)
        assert "so k = 500 is all of them" in " ".join(result.stdout.split())


MIXTURE = """
name = "Mixture"
data = { reader = "toy", users = 4, examples = 40 }
run = { rounds = 2, cohort = 2 }

[model]
kind = "mixture_of_experts"
global_expert = { kind = "linear" }
local_expert = { kind = "linear" }
gate = { kind = "confidence_gate" }

[method]
kind = "mixture"
adapt = { epochs = 6, optimizer = { learning_rate = 0.5 }, early_stopping = { every = 1, patience = 2 } }
"""


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("config", ["toy.toml", "mixture.toml"])
def test_all_clients_adapt(config: str, fedkeep: Command) -> None:
    Path("mixture.toml").write_text(MIXTURE, encoding="utf-8")
    assert fedkeep("run", config, "--out", "r").exit_code == 0
    run = Path("r")
    before = states(run)
    result = succeeded(fedkeep("personalize", "r", "--all"))
    kept = json.loads((run / "analyses.json").read_text(encoding="utf-8"))["adapted_clients"]
    assert kept["columns"] == [
        "client",
        "accuracy on valid, before",
        "accuracy on valid, after",
        "accuracy on test, before",
        "accuracy on test, after",
    ]
    *clients, mean = kept["rows"]
    assert result.stdout.startswith(f"Accuracy of {len(clients)} clients before and after adapting\n")
    assert mean[0] == "mean over clients"
    for column in range(1, 5):
        assert mean[column] == pytest.approx(sum(row[column] for row in clients) / len(clients))
    assert [row[2] for row in clients] != [row[1] for row in clients]
    loaded = load_run(run)
    assert mean[3] == pytest.approx(loaded.evaluate("test", stage="before")["accuracy_user_mean"])
    assert mean[4] == pytest.approx(adapt_clients(loaded).evaluate("test")["accuracy_user_mean"])
    assert states(run) == before
    assert fedkeep("report", "r", "--out", "page").exit_code == 0
    page = (Path("page") / "report.html").read_text(encoding="utf-8")
    assert "Clients before and after adapting" in page


def test_all_goes_with_nothing_that_names_some(fedkeep: Command, refused: Callable[..., str]) -> None:
    folder_of(fedkeep)
    wanted = "Error: --all adapts every client on all of its examples; leave out --client and --k."
    for further in (("--k", "3"), ("--client", "user-1")):
        assert refused("personalize", "r", "--all", *further) == wanted
    assert refused("personalize", "r", "--workers", "2") == "Error: --workers goes with --all."


def test_no_held_out_users(fedkeep: Command, refused: Callable[..., str]) -> None:
    folder_of(fedkeep)
    assert refused("personalize", "r") == (
        "Error: No user was held out of r. Name users with --client ID, or train with --set run.hold_out=0.1."
    )


def kept_in(folder: Path) -> dict[str, str]:
    return json.loads((folder / "fitted" / "fitted.json").read_text("utf-8"))["clients"]


def test_what_a_named_user_fits_is_kept_in_the_run(fedkeep: Command) -> None:
    run = folder_of(fedkeep)
    before = states(run)
    named = ("--client", "user-1", "--client", "user-3")
    succeeded(fedkeep("personalize", "r", *named, "--k", "0,all"))
    assert kept_in(run).keys() == {"user-1", "user-3"}
    values = load_file(run / "fitted" / f"{kept_in(run)['user-1']}.safetensors")
    assert set(values) == {"user"}  # no federated name
    assert values["user"].shape == (3,)
    assert values["user"].abs().sum() > 0
    assert states(run) == before
    loaded = load_run(run)
    assert loaded.own("user-1")["user"].equal(values["user"])
    assert not loaded.own("user-1", stage="before")["user"].equal(values["user"])
    assert fedkeep("personalize", "r", "--client", "user-2").exit_code == 0  # beside those that are there
    assert kept_in(run).keys() == {"user-1", "user-2", "user-3"}
    assert len(list((run / "fitted").glob("*.safetensors"))) == 3


def test_damaged_or_older_fitted_values_are_told_of(fedkeep: Command, refused: Callable[..., str]) -> None:
    run = folder_of(fedkeep)
    assert fedkeep("personalize", "r", "--client", "user-1").exit_code == 0
    with pytest.warns(UserWarning, match="fitted after round"):
        assert read_fitted(run, read_info(run)["run"], 99) == {}
    with pytest.raises(RunError, match="of another run"):
        read_fitted(run, "other", 99)
    (run / "fitted" / f"{kept_in(run)['user-1']}.safetensors").write_bytes(b"")
    assert "is damaged" in refused("evaluate", "r")


def test_an_id_names_no_other_place_and_is_the_same_however_it_is_written(
    fedkeep: Command, csv: Callable[..., Path]
) -> None:
    csv(*(f"{user},{i},1,{i % 2}" for i in range(10) for user in ("e\u0301", "../eve")))
    assert fedkeep("run", "table.toml", "--data", "data", "--out", "r").exit_code == 0
    before = {p for p in Path.cwd().rglob("*") if "fitted" not in p.parts}
    named = ("--client", "e\u0301", "--client", "\u00e9", "--client", "../eve")
    succeeded(fedkeep("personalize", "r", "--data", "data", *named, "--k", "1"))
    assert kept_in(Path("r")).keys() == {"\u00e9", "../eve"}
    assert {p for p in Path.cwd().rglob("*") if "fitted" not in p.parts} == before


def test_new_people_of_a_file_are_fitted_beside_the_others(
    fedkeep: Command, csv: Callable[..., Path], refused: Callable[..., str]
) -> None:
    csv(*(f"{user},{i},1,{i % 2}" for i in range(10) for user in ("ann", "bo")))
    assert fedkeep("run", "table.toml", "--data", "data", "--out", "r").exit_code == 0
    header = Path("data/mine.csv").read_text("utf-8").splitlines()[0]
    Path("new.csv").write_text(
        "\n".join([header, *(f"cy,{i},1,{i % 2}" for i in range(3)), "ann,1,1,1"]) + "\n"
    )
    Path("bad.csv").write_text(f"{header}\ncy,1,1,maybe\n")
    server = states(Path("r"))
    assert "maybe" in refused("personalize", "r", "--data", "data", "--new", "bad.csv")
    assert not Path("r/fitted").exists()
    result = succeeded(fedkeep("personalize", "r", "--data", "data", "--new", "new.csv"))
    assert "ann of them took part" in result.stdout
    assert kept_in(Path("r")).keys() == {"cy", "ann"}
    assert states(Path("r")) == server
    assert (
        fedkeep("export", "r", "--data", "data", "--client", "cy", "--client", "bo", "--out", "m").exit_code
        == 0
    )
    succeeded(fedkeep("predict", "m", "--data", "new.csv", "--client", "cy"))
    Path("later.csv").write_text(
        "\n".join([header, *(f"cy,{i},1,{i % 2}" for i in range(4)), "bo,1,1,1"]) + "\n"
    )
    succeeded(fedkeep("evaluate", "r", "--data", "data", "--new", "later.csv", "--out", "users.csv"))
    users = [line.split(",")[:2] for line in Path("users.csv").read_text().splitlines()[1:]]
    assert sorted(users) == [["bo", "1"], ["cy", "4"]]
    Path("later.csv").write_text(f"{header}\ndi,1,1,1\n")
    assert "'di' of later.csv has no values" in refused(
        "evaluate", "r", "--data", "data", "--new", "later.csv"
    )
    assert "leave out" in refused("personalize", "r", "--new", "new.csv", "--all")


def test_new_people_of_a_file_get_a_mixture_though_nothing_was_held_out_for_them(
    fedkeep: Command, csv: Callable[..., Path]
) -> None:
    csv(*(f"{user},{i},1,{i % 2}" for i in range(10) for user in ("ann", "bo")))
    mixture = (
        "--set",
        "method.kind=mixture",
        "--set",
        "method.local_epochs=2",
        "--set",
        "method.mixture_epochs=2",
    )
    assert fedkeep("run", "table.toml", "--data", "data", "--out", "r", *mixture).exit_code == 0
    header = Path("data/mine.csv").read_text("utf-8").splitlines()[0]
    Path("new.csv").write_text("\n".join([header, *(f"cy,{i},1,{i % 2}" for i in range(5))]) + "\n")
    succeeded(fedkeep("personalize", "r", "--data", "data", "--new", "new.csv"))
    assert kept_in(Path("r")).keys() >= {"cy"}
    succeeded(fedkeep("export", "r", "--data", "data", "--client", "cy", "--out", "m"))


def test_of_a_method_without_own_values_new_people_are_known_and_nothing_is_fitted(
    fedkeep: Command, csv: Callable[..., Path]
) -> None:
    csv(*(f"{user},{i},1,{i % 2}" for i in range(10) for user in ("ann", "bo")))
    fedavg = ("--set", "method.kind=fedavg")
    assert fedkeep("run", "table.toml", "--data", "data", "--out", "r", *fedavg).exit_code == 0
    header = Path("data/mine.csv").read_text("utf-8").splitlines()[0]
    Path("new.csv").write_text(f"{header}\ncy,1,1,0\ncy,2,1,1\n")
    result = fedkeep("personalize", "r", "--data", "data", "--new", "new.csv")
    assert (result.exit_code, "nothing was fitted" in result.stdout) == (0, True), result.output
    assert fedkeep("evaluate", "r", "--data", "data", "--new", "new.csv").exit_code == 0


def test_names_of_states_are_hashes() -> None:
    names = [state_name(c) for c in ("../eve", "a/b", "A", "a", "CON", "", "\u00e4")]
    assert len({name.lower() for name in names}) == len(names)
    assert all(len(name) == 44 and name.removesuffix(".safetensors").isalnum() for name in names)


def test_an_unknown_user(fedkeep: Command, refused: Callable[..., str]) -> None:
    folder_of(fedkeep)
    told = refused("personalize", "r", "--client", "user-1", "--client", "usr-3")
    assert "'usr-3'; there are 6, such as 'user-0', 'user-1', 'user-2'. Did you mean 'user-3'?" in told
    assert "data.ids" in told
    assert not Path("r/fitted").exists()


def test_a_method_that_cannot_adapt(fedkeep: Command, refused: Callable[..., str]) -> None:
    folder_of(fedkeep, "--set", "method.kind=fedavg")
    message = refused("personalize", "r", "--client", "user-1")
    assert message == "Error: 'fedavg' has no phases of adaptation, so there is nothing to personalise."


def test_k() -> None:
    assert parse_k("0, 5,all") == [0, 5, None]
    for wrong, word in (("0;5", "0;5"), ("-1", "-1"), ("1,,2", ""), ("ten", "ten")):
        with raises(ConfigError, said="--k wants whole numbers", word=word):
            parse_k(wrong)
