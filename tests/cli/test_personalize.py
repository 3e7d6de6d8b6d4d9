"""``fedkeep personalize``: users outside of federation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from fedkeep.cli.personalize import parse_k
from fedkeep.core.errors import ConfigError
from fedkeep.core.files import state_name
from fedkeep.experiments.load import load_run
from fedkeep.experiments.personalize import adapt_clients
from tests.cli.conftest import Command
from tests.cli.test_run import states
from tests.refusals import raises


def folder_of(fedkeep: Command, *further: str) -> Path:
    result = fedkeep("run", "toy.toml", "--out", "r", *further)
    assert result.exit_code == 0, result.output
    return Path("r")


def rows_of(stdout: str) -> list[str]:
    """Return the first cells of the rows that have a percentage."""
    return [line.split()[0] for line in stdout.splitlines() if " % " in line and "(95 %" not in line]


def test_held_out_users(fedkeep: Command) -> None:
    run = folder_of(fedkeep, "--set", "run.hold_out=0.4")
    before = states(run)
    result = fedkeep("personalize", "r")
    assert result.exit_code == 0, result.output
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
    result = fedkeep("personalize", "r", "--k", "0,3")
    assert result.exit_code == 0, result.output
    assert rows_of(result.stdout) == ["0", "3"]
    assert not (run / "analyses.json").exists()


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


@pytest.mark.parametrize("config", ["toy.toml", "mixture.toml"])
def test_all_clients_adapt(config: str, fedkeep: Command) -> None:
    Path("mixture.toml").write_text(MIXTURE, encoding="utf-8")
    assert fedkeep("run", config, "--out", "r").exit_code == 0
    run = Path("r")
    before = states(run)
    result = fedkeep("personalize", "r", "--all")
    assert result.exit_code == 0, result.output
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
    shared = config == "mixture.toml"  # before it adapts, a client has the global expert alone
    assert mean[3] == pytest.approx(loaded.evaluate("test", shared=shared)["accuracy_user_mean"])
    assert mean[4] == pytest.approx(adapt_clients(loaded).evaluate("test")["accuracy_user_mean"])
    assert states(run) == before
    assert fedkeep("report", "r", "--out", "page").exit_code == 0
    page = (Path("page") / "report.html").read_text(encoding="utf-8")
    assert "Clients before and after adapting" in page


def test_all_goes_with_nothing_that_names_some(fedkeep: Command, refused: Callable[..., str]) -> None:
    folder_of(fedkeep)
    wanted = "Error: --all adapts every client on all of its examples; leave out --client, --k and --out."
    for further in (("--k", "3"), ("--client", "user-1"), ("--client", "user-1", "--out", "mine")):
        assert refused("personalize", "r", "--all", *further) == wanted
    assert refused("personalize", "r", "--workers", "2") == "Error: --workers goes with --all."


def test_no_held_out_users(fedkeep: Command, refused: Callable[..., str]) -> None:
    folder_of(fedkeep)
    assert refused("personalize", "r") == (
        "Error: No user was held out of r. Name users with --client ID, or train with --set run.hold_out=0.1."
    )


def test_a_named_user_keeps_its_private_values(fedkeep: Command, refused: Callable[..., str]) -> None:
    run = folder_of(fedkeep)
    before = states(run)
    result = fedkeep(
        "personalize", "r", "--client", "user-1", "--client", "user-3", "--k", "0,all", "--out", "mine"
    )
    assert result.exit_code == 0, result.output
    assert {p.name for p in Path("mine").iterdir()} == {state_name("user-1"), state_name("user-3")}
    values = load_file(Path("mine") / state_name("user-1"))
    assert set(values) == {"user"}  # no federated name
    assert values["user"].shape == (3,)
    assert values["user"].abs().sum() > 0
    assert states(run) == before
    content = (Path("mine") / state_name("user-1")).read_bytes()
    again = refused("personalize", "r", "--client", "user-1", "--out", "mine")
    assert again == (
        f"Error: {Path('mine') / state_name('user-1')} already exists; it is not overwritten. Move it, or name "
        "another folder with --out."
    )
    assert (Path("mine") / state_name("user-1")).read_bytes() == content


def test_no_example_leaves_the_default_values(fedkeep: Command) -> None:
    folder_of(fedkeep)
    assert fedkeep("personalize", "r", "--client", "user-1", "--k", "0", "--out", "mine").exit_code == 0
    assert load_file(Path("mine") / state_name("user-1"))["user"].tolist() == [0, 0, 0]


def test_an_id_with_path_characters_names_no_other_place(fedkeep: Command, csv: Callable[..., Path]) -> None:
    csv()
    assert fedkeep("run", "table.toml", "--data", "data", "--out", "r").exit_code == 0
    before = {p for p in Path.cwd().rglob("*") if "mine" not in p.parts}
    result = fedkeep(
        "personalize", "r", "--data", "data", "--client", "../eve", "--k", "all", "--out", "mine/deep"
    )
    assert result.exit_code == 0, result.output
    assert [p.name for p in Path("mine/deep").iterdir()] == [state_name("../eve")]
    assert {p for p in Path.cwd().rglob("*") if "mine" not in p.parts} == before


def test_a_users_file_is_the_same_however_the_id_is_written(
    fedkeep: Command, csv: Callable[..., Path]
) -> None:
    csv(*(f"e\u0301,{i},1,{i % 2}" for i in range(10)))
    assert fedkeep("run", "table.toml", "--data", "data", "--out", "r").exit_code == 0
    named = ("--client", "e\u0301", "--client", "\u00e9")
    result = fedkeep("personalize", "r", "--data", "data", *named, "--k", "1", "--out", "mine")
    assert result.exit_code == 0, result.output
    assert [p.name for p in Path("mine").iterdir()] == [state_name("\u00e9")]


def test_names_of_states_are_hashes() -> None:
    names = [state_name(c) for c in ("../eve", "a/b", "A", "a", "CON", "", "\u00e4")]
    assert len({name.lower() for name in names}) == len(names)
    assert all(len(name) == 44 and name.removesuffix(".safetensors").isalnum() for name in names)


def test_an_unknown_user(fedkeep: Command, refused: Callable[..., str]) -> None:
    folder_of(fedkeep)
    assert refused("personalize", "r", "--client", "user-1", "--client", "usr-3", "--out", "mine") == (
        "Error: No client of these data has the id 'usr-3' (6 clients). Did you mean 'user-3'?"
    )
    assert not Path("mine").exists()


def test_a_method_that_cannot_adapt(fedkeep: Command, refused: Callable[..., str]) -> None:
    folder_of(fedkeep, "--set", "method.kind=fedavg")
    message = refused("personalize", "r", "--client", "user-1")
    assert message == "Error: 'fedavg' has no phases of adaptation, so there is nothing to personalise."


def test_out_wants_users(refused: Callable[..., str]) -> None:
    message = "Error: --out keeps the private values of users named by --client; name at least one."
    assert refused("personalize", "r", "--out", "mine") == message


def test_k() -> None:
    assert parse_k("0, 5,all") == [0, 5, None]
    for wrong, word in (("0;5", "'0;5'"), ("-1", "'-1'"), ("1,,2", "''"), ("ten", "'ten'")):
        with raises(
            ConfigError, said=f"--k wants whole numbers and 'all' between commas, e.g. 0,5,all; got {word}."
        ):
            parse_k(wrong)
