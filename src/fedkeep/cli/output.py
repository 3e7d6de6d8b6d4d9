"""What the commands print: tables on standard output, complaints on standard error."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fedkeep.core.errors import visible
from fedkeep.core.run_files import read_commit, read_info
from fedkeep.report.wording import metric_name, number

if TYPE_CHECKING:
    from fedkeep.report.blocks import Content

WIDE = 160

EveryOption = Annotated[float, typer.Option("--every", min=1, help="Seconds between two looks.")]
OnceOption = Annotated[bool, typer.Option("--once", help="Look once.")]


def looks(every: float, once: bool) -> Iterator[None]:
    """Yield for each look at what goes on, until Ctrl-C, or once."""
    yield
    while not once:
        sys.stdout.flush()
        time.sleep(every)
        yield


def redrawn(looks: Iterable[tuple[Sequence[str], Sequence[str], Sequence[Sequence[str]]]]) -> None:
    """Draw each look, lines above a table's columns and rows, in place of the last; but on a terminal, the last alone."""
    with Live(console=console(), auto_refresh=False) as screen:
        for lines, columns, rows in looks:
            above = (Text(visible(line)) for line in lines)
            screen.update(Group(*above, _table(columns, rows, 1)), refresh=True)


def fresh() -> None:
    """Let what is printed next take the place of all that a terminal shows."""
    if sys.stdout.isatty():
        typer.clear()


def console(stderr: bool = False) -> Console:
    """Return a console that fits its terminal; in a pipe or a file, lines are as long as they need to be."""
    stream = sys.stderr if stderr else sys.stdout
    width = shutil.get_terminal_size().columns if stream.isatty() else WIDE
    return Console(file=stream, width=width, highlight=False, soft_wrap=False)


def say(*lines: str) -> None:
    """Print lines of text as they are, on standard output."""
    for line in lines:
        console().print(Text(visible(line)), soft_wrap=True)


def note(text: str) -> None:
    """Print a line about progress on standard error, on a terminal only."""
    if sys.stderr.isatty():
        console(stderr=True).print(Text(visible(text), style="dim"), soft_wrap=True)


def complain(*lines: str) -> None:
    """Print errors on standard error, red where colours are shown."""
    for line in lines:
        console(stderr=True).print(Text(visible(line), style="bold red"), soft_wrap=True)


def warn_of_unfinished(folders: Iterable[Path]) -> None:
    """Say on standard error which of some runs are not finished, and where they stand.

    Raises:
        RunError: a folder holds no run, or it is damaged.
    """
    for folder in folders:
        info = read_info(folder)
        if info.get("status") != "finished":
            failed = f" It ended in an error: {info['error']}" if "error" in info else ""
            text = (
                f"{folder} is not finished: it stands after round {read_commit(folder, info).round} of "
                f"{info.get('rounds')}, so its numbers may still change.{failed}"
            )
            console(stderr=True).print(Text(visible(text), style="yellow"), soft_wrap=True)


def show_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, note: str = ""
) -> None:
    """Print a table.

    Args:
        title: above it.
        columns: the headings; all empty: no line of headings.
        rows: cells as text.
        left: how many columns from the left hold text; the others are aligned right.
        note: below it.
    """
    out = console()
    out.print(Text(visible(title), style="bold"), soft_wrap=True)
    out.print(_table(columns, rows, left))
    if note:
        out.print(Text(visible(note)), soft_wrap=True)
    out.print()


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_header=any(columns), pad_edge=False, show_edge=False)
    for index, name in enumerate(columns):
        table.add_column(Text(visible(name)), justify="left" if index < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    return table


def show_content(content: Content) -> None:
    """Print a report's sections as a page shows them but for those it folds; what is wrong comes last, as complaints."""
    from fedkeep.report.blocks import Text as Said
    from fedkeep.report.text_tables import TextTable as Cells

    say(f"{content.title} ({content.lead})")
    wrong = []
    for section in (section for section in content.sections if not section.folded):
        say(f"\n{section.title}")
        for block in section.blocks:
            if isinstance(block, Cells):
                show_table(block.title, block.columns, block.rows, block.left, block.note)
            elif isinstance(block, Said) and block.warning:
                wrong.append(block.text)
            elif isinstance(block, Said):
                say(f"· {block.text}")
    for text in wrong:
        complain(f"✗ {text}")


def metrics_table(title: str, columns: Mapping[str, Mapping[str, float]], note: str = "") -> None:
    """Print a table with a row for every metric and a column for every split."""
    names = dict.fromkeys(name for metrics in columns.values() for name in metrics)
    rows = [[metric_name(n), *(number(metrics.get(n), n) for metrics in columns.values())] for n in names]
    show_table(title, ["", *columns], rows, note=note)
