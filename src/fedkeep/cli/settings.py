"""Options that several commands share, how they find a configuration, and the packages that some need."""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ParamSpec, TypeVar

import typer

from fedkeep.core.errors import ConfigError, check_choice, installing, near_path, raising

if TYPE_CHECKING:
    from fedkeep.experiments.config import Config
    from fedkeep.experiments.places import Place
    from fedkeep.experiments.run import Run

DataOption = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="DIR",
        help="The folder of data; by default that of CONFIG, or the variable FEDKEEP_DATA.",
    ),
]
DeviceOption = Annotated[str, typer.Option("--device", help="Where to compute, e.g. cpu or cuda.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Replace a setting, e.g. run.epochs=2. May be repeated."),
]
ConfigArgument = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG", help="A TOML file, or the name of a built-in configuration (fedkeep list)."
    ),
]
ConfigOption = Annotated[str, typer.Option("--config", metavar="CONFIG", help="As for fedkeep run.")]
MetricOption = Annotated[
    str | None,
    typer.Option(
        "--metric",
        help="accuracy or loss (fedkeep compare also takes balanced_accuracy, macro_f1 or mean_iou); by default accuracy, for a "
        "regression loss.",
    ),
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]
RoundOption = Annotated[
    str,
    typer.Option(
        "--round", help="best: the best on valid, of which fedkeep run tells first. last: the last one."
    ),
]
OnOption = Annotated[
    str,
    typer.Option(
        "--on",
        metavar="PLACE",
        help="Where runs are computed: local, slurm, ray (or ray://HOST:PORT), or package.module:function, which returns a "
        "concurrent.futures.Executor.",
    ),
]
SlurmOption = Annotated[
    str,
    typer.Option(
        "--slurm",
        metavar="OPTIONS",
        help='With --on slurm: options of sbatch, e.g. "--partition=gpu --time=2:00:00".',
    ),
]
JobsOption = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        metavar="N",
        min=1,
        help="Runs at a time, each in a process of its own; by default 1, elsewhere as many as the place lets.",
    ),
]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask.")]

MOST_SEEDS = 1000
LONGEST = 30 * 86400
"""Seconds; what would take longer is asked for."""


def ask(question: str, why: str, yes: bool) -> None:
    """Ask whether to go on, unless the answer was given; a no ends the command.

    Raises:
        ConfigError: nobody can be asked.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError("{why} Say --yes where nobody can be asked.", why=why)
    typer.confirm(question, abort=True)


def ask_if_long(seconds: float, told: str, yes: bool) -> None:
    """Ask whether to begin what would take more than 30 days; ``told``: what it is, and how long it takes.

    Raises:
        ConfigError: as for ``ask``.
    """
    if not seconds <= LONGEST:
        ask(f"{told} Begin?", f"{told} Fewer rounds, passes or runs take less.", yes)


@contextmanager
def place_of(
    on: str, folder: Path, jobs: int | None, slurm: str = "", *, look: bool = False
) -> Iterator[Place | None]:
    """Yield the place that ``--on`` names, and close it then; None: this machine.

    Args:
        on, slurm, jobs: as the options.
        folder: where the jobs are.
        look: send nothing; then it is None, too, where nobody but the process that sent jobs can ask for them.

    Raises:
        ConfigError: there is no such place, or it cannot be reached from here.
    """
    from fedkeep.experiments.places import executors, place

    if on == "local" and not slurm:
        yield None
        return
    if look and on != "slurm" and not slurm:
        executors(on)  # it is a place's name
        yield None
        return
    with closing(place(on, folder, most=jobs, options=slurm)) as made:
        yield made


Folder = TypeVar("Folder", Path, Path | None)


def seen_from(on: str, folder: Folder) -> Folder:
    """Return a folder as other machines find it: by its whole path, where runs are computed elsewhere."""
    return folder if on == "local" or folder is None else folder.absolute()


def at_round(run: Run, round: str) -> Run:
    """Return a run at the round that ``--round`` names."""
    return run.last if is_last(round) else run


def is_last(round: str) -> bool:
    """Tell whether ``--round`` names the last round."""
    check_choice("--round must be", round, ("best", "last"))
    return round == "last"


@dataclass(frozen=True)
class FoundConfig:
    """A configuration as a command found it.

    Attributes:
        config: checked, with overrides.
        text: the text of a file that gives it.
        label: a short name, good for a folder.
        folder: the run's folder, where the configuration was taken from a run.
        beside: the folder of the file, or that a run's data were read from.
    """

    config: Config
    text: str
    label: str
    folder: Path | None = None
    beside: Path | None = None

    def data_folder(self, given: Path | None) -> Path | None:
        """Return the folder that paths of data are looked up in.

        It is the one given; else the file's own, where it holds the data; else FEDKEEP_DATA; else the file's own.
        """
        from fedkeep.experiments.sources import data_folder

        if given is None and self.beside is not None:
            places = [place for place in self.config.data.options.values() if isinstance(place, str)]
            if any((self.beside / place).exists() for place in places if len(place) < 300):
                return self.beside
        return data_folder(given) or self.beside


def find_config(
    named: str, overrides: list[str] | None = None, seed: int | None = None, *, resume: bool = False
) -> FoundConfig:
    """Return the configuration of a file, a run's folder, or a built-in name, with overrides.

    Args:
        named: which.
        overrides: ``KEY=VALUE`` as TOML.
        seed: in place of its own.
        resume: a run is to go on, so that what is not there is more likely a run's folder.

    Raises:
        ConfigError: there is none, or it doesn't fit.
    """
    from fedkeep.core.run_files import read_info
    from fedkeep.data.readers.load_table import FORMATS
    from fedkeep.experiments.config import parse_config, parse_overrides, read_config
    from fedkeep.experiments.load import folder_of_data, run_folder_config
    from fedkeep.experiments.plugins import builtin_names, builtin_text, near_names
    from fedkeep.methods import METHODS

    changes = parse_overrides(overrides or []) | ({} if seed is None else {"seed": str(seed)})
    path = Path(named)
    # A name that is too long, a folder that may not be entered
    with raising(ConfigError, "There is no configuration {named!r}: {why}.", OSError, named=named[:80]):
        is_run, is_file, is_folder = (path / "run.json").is_file(), path.is_file(), path.is_dir()
    if is_run:
        config, text = run_folder_config(path)
        if changes:
            config = parse_config(text, named, changes)
        return FoundConfig(
            config, config.to_toml() if changes else text, path.name, path, folder_of_data(path)
        )
    if is_file and path.name.endswith(FORMATS):
        raise ConfigError(
            "{file} is a table, not a configuration. fedkeep start {file} looks at it and writes one.",
            file=path,
        )
    if is_file:
        config, text = read_config(path, changes)
        return FoundConfig(config, text, safe_name(config.name or path.stem), beside=path.resolve().parent)
    key = named.replace("\\", "/")
    names = builtin_names()
    if key not in names and resume:
        raise ConfigError(
            "There is no run to resume in {got!r}: "
            "{why}.{near} To begin one: "
            "fedkeep run CONFIG --out {folder}.",
            got=named,
            why="it is a folder without one" if is_folder else "there is no such folder",
            near=near_path(path),
            folder=named[:80],
        )
    if key not in names and is_folder:
        read_info(path)
    if key not in names:
        near = near_path(path.with_name(f"{path.name.removesuffix('.toml')}.toml")) if path.name else ""
        if named in METHODS:
            near = f" {named!r} is a method: --methods A,B without spaces, or --set method.kind={named}."
        raise ConfigError(
            "There is no configuration {named!r}: no such file, and none built in (fedkeep list names those).{near}",
            named=named,
            near=near if named in METHODS else near_names(key.removesuffix(".toml"), names, near),
        )
    text = builtin_text(key)
    config = parse_config(text, key, changes)
    return FoundConfig(config, config.to_toml() if changes else text, safe_name(key))


def safe_name(text: str) -> str:
    """Return a name that is good for a folder on any system: ``Global FL`` -> ``global-fl``."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:80].strip("-") or "run"


P = ParamSpec("P")


def needs(module: str, name: str, extra: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Return what makes a command say what to install where a module of an extra is missing."""

    def of(command: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(command)
        def checked(*args: P.args, **settings: P.kwargs) -> None:
            if importlib.util.find_spec(module) is None:
                raise ConfigError(
                    "This command needs {name}, which is not installed: {install}.",
                    name=name,
                    install=installing(extra),
                )
            command(*args, **settings)

        return checked

    return of


needs_flower = needs("flwr", "Flower", "flower")
