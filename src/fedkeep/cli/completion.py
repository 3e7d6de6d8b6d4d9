"""``fedkeep completion``: scripts that complete commands and options, made from the commands themselves.

They hold all words, so that a shell never waits for fedkeep (which would import torch).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated

import click
import typer

from fedkeep.core.errors import check_choice

BASH = """_fedkeep() {{
    local first="${{COMP_WORDS[1]}}" second="${{COMP_WORDS[2]}}" words=""
    case "$COMP_CWORD $first $second " in
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _fedkeep fedkeep"""
ZSH = "autoload -U +X compinit bashcompinit && compinit && bashcompinit"


def completion(
    context: typer.Context, shell: Annotated[str, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")]
) -> None:
    """Print a shell's script that completes fedkeep's commands and options.

    bash: source <(fedkeep completion bash) in ~/.bashrc; zsh: likewise in ~/.zshrc;
    fish: fedkeep completion fish > ~/.config/fish/completions/fedkeep.fish.
    """
    check_choice("SHELL must be", shell, ("bash", "zsh", "fish"))
    commands = list(_commands(context.find_root().command, ()))
    if shell == "fish":
        typer.echo("\n".join(_fish(commands)))
        return
    cases = "\n".join(_case(path, command) for path, command in reversed(commands))
    typer.echo((f"{ZSH}\n" if shell == "zsh" else "") + BASH.format(cases=cases))


def _commands(
    command: click.Command, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield a command and all below it with their names."""
    yield path, command
    for name, inner in _inner(command).items():
        yield from _commands(inner, (*path, name))


def _inner(command: click.Command) -> Mapping[str, click.Command]:
    return command.commands if isinstance(command, click.Group) else {}


def _options(command: click.Command) -> list[click.Option]:
    return [parameter for parameter in command.params if isinstance(parameter, click.Option)]


def _case(path: tuple[str, ...], command: click.Command) -> str:
    """Return what may follow a command, as a line of bash."""
    words = [word for option in _options(command) for word in option.opts if word.startswith("--")]
    inner = _inner(command)
    name = "".join(f"{part} " for part in path)  # a command's own options may stand anywhere behind it
    place = f'"{len(path) + 1} {name}"*' if inner else f'*" {name}"*'
    return f'        {place}) words="{" ".join([*inner, *words, "--help"])}" ;;'


def _fish(commands: list[tuple[tuple[str, ...], click.Command]]) -> Iterator[str]:
    for path, command in commands:
        seen = [f"__fish_seen_subcommand_from {name}" for name in path]
        below = _inner(command)
        for name, inner in below.items():
            where = " && ".join([*seen, f"not __fish_seen_subcommand_from {' '.join(below)}"])
            yield f"complete -c fedkeep -f -n '{where}' -a {name} -d {_quoted(inner.get_short_help_str())}"
        for option in _options(command):
            flag = "" if option.is_flag else " -r"
            for word in (w for w in option.opts if w.startswith("--")):
                where = f" -n '{' && '.join(seen)}'" if seen else ""
                yield f"complete -c fedkeep{where} -l {word[2:]}{flag} -d {_quoted(option.help or '')}"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", " ") + "'"
