"""Code blocks of Markdown files, for the tests that run them."""

from __future__ import annotations

import re
import shlex
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line of its first line in the file."""

    file: Path
    language: str
    text: str
    line: int

    @property
    def name(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}"


def blocks(file: Path, language: str) -> list[Block]:
    """Return a file's fenced blocks of one language, in order."""
    text = file.read_text(encoding="utf-8")
    found = [
        Block(file, match[1], match[2], text.count("\n", 0, match.start()) + 2)
        for match in FENCE.finditer(text)
    ]
    return [block for block in found if block.language == language]


def run_python(file: Path) -> dict[str, Any]:
    """Execute a file's Python blocks one after the other in one namespace, and return it.

    A traceback names the file and the line in it.
    """
    module = types.ModuleType("document")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    try:
        for block in blocks(file, "python"):
            exec(compile("\n" * (block.line - 1) + block.text, str(file), "exec"), vars(module))
    finally:
        del sys.modules[module.__name__]
    return vars(module)


def fedkeep_commands(file: Path) -> list[list[str]]:
    """Return the arguments of every ``fedkeep ...`` line of a file's shell blocks; ``\\`` joins lines."""
    commands = []
    for block in blocks(file, "sh"):
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0] == "fedkeep":
                commands.append(words[1:])
    return commands
