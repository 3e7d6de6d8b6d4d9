"""``fedkeep check``: the split's table, and the verdict."""

from __future__ import annotations

from typing import Any

import pytest

from fedkeep.split import CheckReport, Violation
from tests.cli.conftest import Command
from tests.commands import succeeded


def test_a_sound_split(fedkeep: Command) -> None:
    result = succeeded(fedkeep("check", "toy.toml"))
    # toy: 4 features, 3 classes, float32
    rows = [" ".join(line.split()) for line in result.stdout.splitlines()]
    for row in (
        "user private parameter 3 12 B",
        "linear.weight federated parameter 3 × 4 48 B",
        "linear.bias federated parameter 3 12 B",
        "all federated federated 60 B",
        "all private private 12 B",
    ):
        assert row in rows
    assert "A round sends 60 B down and 60 B up for each user (3 users: 180 B each way)." in result.stdout
    for number in (1, 2, 3):
        assert f"✓ equation ({number}) holds" in result.stdout


@pytest.mark.parametrize(
    "name", ["demo/personalized-fl", "demo/personalized-server", "furl-sticker/personalized-fl"]
)
def test_built_in_splits_are_sound(fedkeep: Command, name: str) -> None:
    result = succeeded(fedkeep("check", name, "--set", "data.users=4", "--set", "data.examples=10"))
    assert "✓ equation (3) holds" in result.stdout


def test_centralised_training_sends_nothing(fedkeep: Command) -> None:
    result = fedkeep("check", "toy.toml", "--set", "run.centralised=true")
    assert "Centralised training: all users' data and private values are in one place" in result.stdout


def test_nothing_private_nothing_to_probe(fedkeep: Command) -> None:
    result = succeeded(
        fedkeep("check", "toy.toml", "--set", "method.kind=fedavg", "--set", "method.optimizer={}")
    )
    assert "No equation was probed: nothing is private." in result.stdout


def test_everything_private(fedkeep: Command) -> None:
    result = succeeded(fedkeep("check", "toy.toml", "--set", "method.kind=local"))
    assert "A round sends 0 B down and 0 B up for each user" in result.stdout


def test_too_few_users_to_probe(fedkeep: Command) -> None:
    result = succeeded(fedkeep("check", "toy.toml", "--set", "data.users=1"))
    assert "No equation was probed: fewer than two users have training examples." in result.stdout


def test_violations_are_named_and_give_exit_code_1(fedkeep: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    violation = Violation(1, "user", "the loss of user 0 has a gradient.")
    found = CheckReport(table=[], violations=(violation,), probed=(1, 2, 3))
    monkeypatch.setattr("fedkeep.split.check_split", lambda *_, **__: found)
    result = fedkeep("check", "toy.toml")
    assert result.exit_code == 1
    assert result.stderr == (
        "Equation (1) is violated by 'user' (independent local training: ∂L(user i)/∂w_p(user j) = 0): "
        "the loss of user 0 has a gradient.\n"
    )
    assert "✓" not in result.stdout


def test_the_texts_of_few_clients_are_described(fedkeep: Command) -> None:
    result = fedkeep("check", "demo/personalized-fl", "--set", "data.users=3", "--set", "data.examples=10")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["Client", "Train", "Valid", "Test", "Tokens", "a", "text", "Different", "tokens"] in rows
    assert [row[1:4] for row in rows if row[:1] == ["user-0"]] == [["10", "1", "1"]]
    many = fedkeep("check", "demo/personalized-fl", "--set", "data.users=50", "--set", "data.examples=10")
    assert "Different tokens" not in many.stdout


def test_a_part_that_cannot_move_is_a_warning(fedkeep: Command) -> None:
    """Where FURL's private values are set to zero, both layers of a private network stay there."""
    small = ("--set", "data.users=4", "--set", "data.examples=10")
    zero = ("--set", "method.private_init=0.0")
    result = succeeded(
        fedkeep("check", "demo/personalized-fl", *small, "--set", 'method.private=["user", "mlp.*"]', *zero)
    )
    assert result.stderr.startswith("Warning: To be trained, but unable to move: user, embedding.weight, ")
    assert "mlp.1.weight, mlp.1.bias, mlp.3.weight. Their gradient is exactly zero" in result.stderr
    result = fedkeep("check", "demo/personalized-fl", *small, "--set", 'method.private=["user", "mlp.*"]')
    assert result.stderr == ""


def test_a_model_that_mixes_examples_is_a_warning(fedkeep: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    import fedkeep.experiments.build as room

    build = room.build_model

    def mixing(*arguments: Any) -> Any:
        model = build(*arguments)
        model.linear.register_forward_hook(lambda _, inputs, output: output - output.mean(0))
        return model

    assert fedkeep("check", "toy.toml").stderr == ""
    monkeypatch.setattr(room, "build_model", mixing)
    result = succeeded(fedkeep("check", "toy.toml"))
    assert result.stderr.startswith(
        "Warning: The model predicts otherwise for an example when others are in its batch"
    )


def test_the_frozen_half_is_shown(fedkeep: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    import fedkeep.experiments.build as room

    build = room.build_model

    def frozen(*arguments: Any) -> Any:
        model = build(*arguments)
        model.linear.weight.requires_grad_(False)
        return model

    monkeypatch.setattr(room, "build_model", frozen)
    result = succeeded(fedkeep("check", "toy.toml"))
    rows = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "linear.weight frozen parameter 3 × 4 48 B" in rows
    assert "all frozen frozen 48 B" in rows
    assert "A round sends 12 B down and 12 B up for each user (3 users: 36 B each way)." in result.stdout


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("run.engine=gpu", "there is no engine 'gpu'"),
        ("run.device=cuda:99", "The device 'cuda:99' cannot be used"),
        ("run.evaluate_shared=true", "cannot predict alone"),
        ("run.trackers=['nobody']", "run.trackers wants package.module:Class"),
        ("privacy.noise=1.0", "Noise without clipping protects nobody"),
        ("privacy={ noise = 1.0, clip = 1.0 }", "poisson"),
        ("privacy={ noise = 1.0, clip = { other = 1.0 } }", "other"),
        ("method.secure.clip=1.0", "have no bound"),
    ],
)
def test_what_a_run_refuses_is_refused(fedkeep: Command, setting: str, message: str) -> None:
    own = ("--set", "method={ kind = 'local' }", "--set", setting)
    checked, ran = fedkeep("check", "toy.toml", *own), fedkeep("run", "toy.toml", *own)
    assert (checked.exit_code, checked.stderr) == (ran.exit_code, ran.stderr) != (0, "")
    assert message in checked.stderr


def test_layers_on_kernels_are_named(fedkeep: Command) -> None:
    model = "model={ kind = 'tests.experiments.test_accelerate:Columns' }"
    result = succeeded(fedkeep("check", "toy.toml", "--set", model))
    assert "Layers on fedkeep's kernels: wide (Linear)." in result.stdout
