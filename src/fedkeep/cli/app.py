"""The application: its commands, and what becomes of errors.

Exit codes: 0 done · 1 ``check`` found a violation, ``audit`` or ``prove`` a leak or something that it
could not look at, ``doctor`` a fault, ``sweep`` no finished trial of a method · 2 wrong use, settings, data or run folder · 130 Ctrl-C.
"""

from __future__ import annotations

import inspect
import sys
import traceback
import warnings
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from click.shell_completion import get_completion_class
from rich.markup import escape
from typer.core import TyperGroup

import fedkeep
from fedkeep.cli.attack import attack
from fedkeep.cli.audit import audit, prove
from fedkeep.cli.check import check
from fedkeep.cli.compare import compare, reproduce, sweep
from fedkeep.cli.device import device
from fedkeep.cli.doctor import doctor
from fedkeep.cli.flower import app as flower
from fedkeep.cli.flower import deploy
from fedkeep.cli.listing import explain, list_all
from fedkeep.cli.models import export, predict, recommend
from fedkeep.cli.output import complain
from fedkeep.cli.personalize import personalize
from fedkeep.cli.prepare import prepare
from fedkeep.cli.results import budget, evaluate, report, worth
from fedkeep.cli.run import run
from fedkeep.cli.start import demo, start
from fedkeep.cli.usage import advised
from fedkeep.core.allocator import tune_allocator
from fedkeep.core.errors import FedkeepError, check_choice


def _system(error: OSError | MemoryError | RuntimeError) -> str | None:
    """Return what to say of an error that the system made, or None where it is fedkeep's own."""
    import torch

    text = str(error)
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text:
        return (
            "There is not enough memory for this. Take fewer users or examples, or a smaller model or batch."
        )
    if isinstance(error, OSError) and error.errno is not None:
        named = f"{str(error.filename)[:300]}: " if error.filename is not None else ""
        return f"{named}{error.strerror}. Check the path, its rights, and whether the disk can be written."
    return None


def _as_written(command: click.Command) -> None:
    """Keep rich from reading help as markup, in which ``[data]`` is a style and every line end is kept."""
    for field in ("help", "epilog"):
        if text := getattr(command, field):
            setattr(command, field, escape("\n\n".join(map(_one_line, inspect.cleandoc(text).split("\n\n")))))
    for parameter in command.params:
        if text := getattr(parameter, "help", None):
            parameter.help = escape(text)  # type: ignore[attr-defined]
    for each in command.commands.values() if isinstance(command, click.Group) else ():
        _as_written(each)


def _one_line(paragraph: str) -> str:
    return " ".join(paragraph.split())


class _Path(click.Path):
    """A path, in which ``~`` is the home directory wherever it stands: shells leave ``--out=~/x`` as it is."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path."""
        from fedkeep.core.files import expanded

        return expanded(value)


def _expanding(command: click.Command) -> None:
    """Let all paths of a command and its own commands be expanded."""
    for parameter in command.params:
        if isinstance(parameter.type, click.Path):
            parameter.type = _Path()
    for each in command.commands.values() if isinstance(command, click.Group) else ():
        _expanding(each)


class Commands(TyperGroup):
    """Turns errors that fedkeep raises on purpose, and the system's, into a message and an exit code.

    Others are faults of the program and keep their traceback. Help is shown as it is written, whatever brackets it
    holds, and its paragraphs are broken where the terminal ends.
    """

    _main_shell_completion = click.Group._main_shell_completion  # as its scripts ask; Typer's ask otherwise

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        _as_written(self)
        _expanding(self)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except FedkeepError as error:
            raise _ended(ctx, f"Error: {error}", 2) from error
        except click.UsageError as error:
            raise advised(error) from error
        except KeyboardInterrupt as stop:
            raise _ended(ctx, "Stopped.", 130) from stop
        except (click.exceptions.Exit, BrokenPipeError):
            raise  # whoever reads the output has seen enough, or all; click knows what to do
        except (OSError, MemoryError, RuntimeError) as error:
            said = _system(error)
            if said is None:
                raise
            raise _ended(ctx, f"Error: {said}", 2) from error


def _ended(ctx: click.Context, text: str, code: int) -> typer.Exit:
    """Say why a command ended, with --debug also where; return its exit."""
    if ctx.params.get("debug"):
        traceback.print_exc()
    complain(text)
    return typer.Exit(code)


app = typer.Typer(
    name="fedkeep",
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Personalised federated learning: name the parameters that are private; the rest is federated.",
    epilog="Start with: fedkeep demo",
    suggest_commands=False,  # click suggests too
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedkeep {fedkeep.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show where an error came from (a traceback).")
    ] = False,
) -> None:
    """Personalised federated learning: name the parameters that are private; the rest is federated."""
    tune_allocator()


def completion(
    context: typer.Context, shell: Annotated[str, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")]
) -> None:
    """Print a shell's script that completes fedkeep's commands and options.

    bash: source <(fedkeep completion bash) in ~/.bashrc; zsh: likewise in ~/.zshrc;
    fish: fedkeep completion fish > ~/.config/fish/completions/fedkeep.fish.
    """
    check_choice("SHELL must be", shell, ("bash", "zsh", "fish"))
    if (made := get_completion_class(shell)) is not None:
        typer.echo(made(context.find_root().command, {}, "fedkeep", "_FEDKEEP_COMPLETE").source())


def _add(function: Any, example: str, name: str | None = None) -> None:
    app.command(name or function.__name__, epilog=f"Example: {example}")(function)


_add(demo, "fedkeep demo")
_add(start, "fedkeep start my.csv --client customer --label churned")
_add(
    prepare, "fedkeep prepare my.toml --summary mine.json, then fedkeep prepare --merge *.json --out encoding"
)
_add(run, "fedkeep run furl/personalized-fl --data DIR --set run.epochs=4")
_add(check, "fedkeep check demo/personalized-fl")
_add(audit, "fedkeep audit demo/personalized-fl --rounds 2")
_add(prove, "fedkeep prove demo/personalized-fl --out page")
_add(evaluate, "fedkeep evaluate runs/demo/personalized-fl --per-client")
_add(personalize, "fedkeep personalize runs/demo/personalized-fl --client user-07 --k 0,5,all")
_add(export, "fedkeep export runs/demo/personalized-fl --client user-07 --out anna")
_add(predict, "fedkeep predict models --client anna --data new.csv")
_add(recommend, "fedkeep recommend runs/films --n 10 --out lists.csv")
_add(worth, "fedkeep worth runs/demo/personalized-fl runs/demo/global-fl")
_add(compare, "fedkeep compare my.toml --methods fedavg,furl,ditto --seeds 5 --jobs 2")
_add(sweep, "fedkeep sweep my.toml --space space.toml --methods fedavg,furl --trials 20 --seeds 3 --jobs 2")
_add(budget, "fedkeep budget runs/mine --delta 1e-6")
_add(attack, "fedkeep attack demo/personalized-fl --attacks who,words --out page")
_add(report, "fedkeep report runs/demo/global-fl runs/demo/personalized-fl --out page")
_add(reproduce, "fedkeep reproduce furl-table3 --data DIR --scale quick")
_add(deploy, "fedkeep deploy --local 2 --config demo/personalized-fl --set run.epochs=0.5")
_add(list_all, "fedkeep list", "list")
_add(explain, "fedkeep explain method.optimizer.learning_rate")
_add(doctor, "fedkeep doctor --folder runs")
_add(completion, "fedkeep completion bash")
app.add_typer(flower)
app.add_typer(device)


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a character that the terminal lacks must not stop a run
            stream.reconfigure(errors="replace")
    warnings.showwarning = lambda message, *_: complain(f"Warning: {message}")
    app()
