"""The command line, called in this process."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import click
from click.testing import CliRunner, Result
from typer.main import get_command

from fedkeep.cli import app
from tests.installed import skip_without_flower


@cache
def _command() -> click.Command:
    """Return the command, made once: typer's own runner makes it for every call, which takes longer than most calls."""
    return get_command(app)


def call(*words: object, env: Mapping[str, str | None] | None = None) -> Result:
    """Return what ``fedkeep WORDS`` ends with; a command that needs Flower skips its test where that is missing."""
    given = [str(word) for word in words]
    result = CliRunner(env=env).invoke(_command(), given, prog_name="fedkeep")
    if "This command needs Flower" in result.stderr:
        skip_without_flower(f"fedkeep {' '.join(given[:2])}", ModuleNotFoundError(name="flwr"))
    return result


def succeeded(result: Result) -> Result:
    """Return how a command ended, after asserting that it ended well."""
    assert result.exit_code == 0, result.output
    return result
