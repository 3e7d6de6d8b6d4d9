"""The command ``fedkeep``: one thin function a command."""

from fedkeep.cli.app import app, main

__all__ = ["app", "main"]
