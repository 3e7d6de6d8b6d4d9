"""What to type instead, where a command line has words that a command doesn't take."""

from __future__ import annotations

import click

MOST = 3
"""How many keys of a configuration are named."""
ONE_OF = "One of these"
"""The panel of a command's help with options of which it wants one."""


def advised(error: click.UsageError) -> click.UsageError:
    """Return an error of click's that also says what to type, where that is known."""
    advice = _advice(error)
    if not advice:
        return error
    what = error.message if isinstance(error, click.NoSuchOption) else error.format_message()
    end = "" if what.endswith("?") else "."
    return click.UsageError(f"{what.rstrip('.')}{end} {advice}", ctx=error.ctx)


def _advice(error: click.UsageError) -> str:
    if error.ctx is None:
        return ""
    command = error.ctx.command
    if isinstance(error, click.MissingParameter):
        return _meaning(error.param, error.ctx)
    if isinstance(command, click.Group) and not isinstance(error, click.BadParameter | click.NoSuchOption):
        if "'resume'" in error.message:
            return "To go on with a run: fedkeep run RUN --resume."
        first = (
            ""
            if error.ctx.parent
            else " Begin with start, which looks at a table, or with run, which trains."
        )
        return f"The commands are {', '.join(command.list_commands(error.ctx))}.{first}"
    options = {one.opts[0]: one for one in command.params if isinstance(one, click.Option)}
    if "--set" in options:
        if isinstance(error, click.NoSuchOption):
            return _setting(error)
        given = error.ctx.params.get(options["--set"].name or "") or ()
        if torn := [one for one in given if "=" not in one]:
            return f"--set wants one word: --set {torn[0]}=VALUE, without spaces."
    if "unexpected extra argument" not in error.message:
        return ""
    return f"The options are {', '.join(_written(one, error.ctx) for one in options.values())}."


def _meaning(parameter: click.Parameter | None, context: click.Context) -> str:
    """Return how an option or argument is written, and what it means."""
    text = getattr(parameter, "help", None)
    if parameter is None or not text:
        return ""
    params = context.command.params
    wanted = [_written(one, context) for one in params if one.required]
    either = [_written(one, context) for one in params if getattr(one, "rich_help_panel", None) == ONE_OF]
    wanted += [f"({' | '.join(either)})"] if either else []
    return f"Wanted {context.command_path} {' '.join(wanted)}. {_written(parameter, context)}: {text}"


def _written(parameter: click.Parameter, context: click.Context) -> str:
    """Return a parameter as it is typed: ``--out DIR``, ``RUN``."""
    if isinstance(parameter, click.Option):
        return f"{parameter.opts[0]}{'' if parameter.is_flag else f' {parameter.make_metavar(context)}'}"
    return parameter.make_metavar(context)


def _setting(error: click.NoSuchOption) -> str:
    """Return the settings of a configuration that an unknown option may mean."""
    from fedkeep.cli.keys import keys_meant

    names = keys_meant(error.option_name.lstrip("-").replace("-", "_"))[:MOST]
    if not names:
        return ""
    others = (
        f" Others of that name: {', '.join(names[1:])}; fedkeep explain NAME says what one is."
        if names[1:]
        else ""
    )
    return f"It is a setting of the configuration: --set {names[0]}=VALUE.{others}"
