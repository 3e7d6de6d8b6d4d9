"""``fedkeep prepare``: what devices would tell of their data, and the encoding that follows from it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedkeep.cli.output import say
from fedkeep.cli.settings import DataOption, SetOption, find_config
from fedkeep.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from fedkeep.data.preparation import Encoding, Summary

ShowOption = Annotated[
    bool, typer.Option("--show", help="Print the summary itself too: all that would leave.")
]


def prepare(
    named: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG", help="A configuration as for fedkeep run; with --merge files of summaries."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the encoding there, as JSON.")
    ] = None,
    summary: Annotated[
        Path | None, typer.Option("--summary", metavar="FILE", help="Write the summary there, as JSON.")
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Add the summaries of several devices, in any order.")
    ] = False,
    show: ShowOption = False,
    data: DataOption = None,
    overrides: SetOption = None,
) -> None:
    """Sum up the data that CONFIG names, print in plain words what the summary reveals, and make the encoding that
    follows: the vocabulary, the numbers of labels, the scales of features.

    Each device writes its summary with --summary; whoever has them all makes the one encoding with --merge.
    """
    from fedkeep.core.files import write_whole
    from fedkeep.data.preparation import Encoding

    for path in (out, summary):
        if path is not None and path.exists():
            raise ConfigError("{path} is there already. Name another file, or remove it.", path=path)
    if out is not None and summary is not None and out.resolve() == summary.resolve():
        raise ConfigError(
            "--out and --summary both name {out}. Give the encoding and the summary a file each.",
            out=out,
        )
    found, secure = (_merged(named), False) if merge else _of_config(named, data, overrides)
    encoding = Encoding.of(found)
    say(found.describe(secure=secure))
    if show:
        say(found.to_json())
    for path, text in ((summary, found.to_json()), (out, encoding.to_json())):
        if path is not None:
            write_whole(path, f"{text}\n".encode())
    say(f"Encoding {encoding.digest[:16]}: {_sizes(encoding)}")


def _of_config(named: list[str], data: Path | None, overrides: list[str] | None) -> tuple[Summary, bool]:
    """Return the summary of a configuration's data, and whether its method sums securely."""
    from fedkeep.experiments.build import build_source

    if len(named) > 1:
        raise ConfigError(
            "Wanted one configuration; got {count}. To add summaries up, say --merge.", count=len(named)
        )
    found = find_config(named[0], overrides)
    config = found.config
    source = build_source(config.data, config.seed, found.data_folder(data))
    return source.summary(config.preparation), config.method.secure is not None


def _merged(named: list[str]) -> Summary:
    from fedkeep.data.preparation import Summary, agreeing

    found: dict[str, Summary] = {}
    for name in named:
        if name in found:
            raise ConfigError("{name} is named twice. Each device's summary counts once.", name=name)
        found[name] = Summary.from_json(Path(name).read_bytes(), name)
    inside, refused = agreeing(found)
    for name, why in refused.items():
        raise DataError(
            "{name} does not fit the other summaries: {why}. Give all devices the same settings of data.",
            name=name,
            why=why,
        )
    return inside


def _sizes(encoding: Encoding) -> str:
    """Return the sizes of a model in this encoding: "vocabulary 30, classes 2"."""
    return ", ".join(f"{name} {size:,}" for name, size in encoding.sizes.items()) or "no sizes"
