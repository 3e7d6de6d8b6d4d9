"""What the site adds to the pages of docs/: notebooks as pages, and the files of the repository that pages link to."""

from __future__ import annotations

import inspect
import json
import pkgutil
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))
LINK = re.compile(r"(\]\()((?:\.\./)*)([^)#:\s]+)((?:#[^)]*)?\))")
ROOM = re.compile(r"^::: (fedkeep[\w.]*)(?: (classes|functions))?$", re.MULTILINE)
MADE_BY = {"adapters": "fedkeep reproduce channel-adapters"}
EXPLAINED = re.compile(r"^\| \*\*(private|federated|kept|cohort)\*\* \| (.*) \|$", re.MULTILINE)
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
ALWAYS = ("CONTRIBUTING.md", "CHANGELOG.md", "LICENSE")


def notebook_page(path: Path) -> str:
    """Return a notebook as Markdown: its texts, its code, and what the code printed."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        printed = "".join(line for output in cell["outputs"] for line in output["text"])
        parts += [f"```text\n{printed.rstrip()}\n```"] if printed else []
    return "\n\n".join(parts) + f"\n\n[This page as a notebook]({path.name})\n"


def results_list() -> str:
    """Return a list of the tables in results/, each with its title and the command that makes it."""
    rows = ["| table | made by |", "|---|---|"]
    for path in sorted(ROOT.glob("results/*.md")):
        text = path.read_text(encoding="utf-8")
        name, cut, _ = path.stem.partition("-medium")
        made = re.search(r"`(python -m benchmarks\.\w+)", text)
        scale = "medium" if cut else "full"
        command = made[1] if made else MADE_BY.get(name, f"fedkeep reproduce {name}") + f" --scale {scale}"
        command = "python -m benchmarks.own_models" if name.startswith("own-models") else command
        title = re.search(r"^# (.*)$", text, re.MULTILINE)  # a table alone has none
        rows.append(f"| [{title[1] if title else name}](../results/{path.name}) | `{command}` |")
    return "\n".join(rows)


def configuration_keys() -> str:
    """Return every table of a configuration with its keys."""
    from fedkeep.cli.keys import tables

    parts = []
    for name, table in tables().items():
        parts.append(
            f"### {f'[{name}]' if name else 'The file'}\n\n{table.about}\n\nRead by {table.read_by}.\n"
        )
        parts.append("| key | type | default | meaning |\n|---|---|---|---|")
        rows = [
            (f"`{key}`", *map(cell, (one.type, one.default, one.about))) for key, one in table.keys.items()
        ]
        parts += [f"| {' | '.join(row)} |" for row in rows]
        parts.append("")
    return "\n".join(parts)


def cell(text: str) -> str:
    """Return a text as a cell of a table."""
    return text.replace("|", "\\|")


def option_row(option: Any) -> str:
    """Return a row of a command's table: an option by all its names, an argument by the name that its usage has."""
    names = [*option.opts, *option.secondary_opts]
    named = option.param_type_name == "option"
    name = ", ".join(names) if named else option.metavar or option.name.upper()
    said = " ".join((getattr(option, "help", "") or "").split())
    default = "required" if option.required and named else ""
    if option.secondary_opts:
        default = f"`{names[0] if option.default else names[-1]}`"
    elif not option.required and not isinstance(option.default, bool) and option.default not in (None, ""):
        default = f"`{option.default}`"
    return f"| `{name}` | {cell(said)} | {default} |"


def command_options() -> str:
    """Return every command with its arguments and options, from the command line itself."""
    from typer.main import get_command

    from fedkeep.cli import app

    parts: list[str] = []

    def describe(command: Any, path: str) -> None:
        if inner := getattr(command, "commands", None):
            for name, each in sorted(inner.items()):
                describe(each, f"{path} {name}")
            return
        text = inspect.cleandoc(command.help or "").replace("\b", "")
        parts.append(f"### `{path}`\n\n{text}\n")
        rows = [option_row(option) for option in command.params if option.name != "help"]
        if rows:
            parts.extend(["| option | meaning | default |\n|---|---|---|", *rows, ""])

    describe(get_command(app), "fedkeep")
    return "\n".join(parts)


MADE_HERE = {
    "<!-- every table of results/ -->": results_list,
    "<!-- every key of a configuration -->": configuration_keys,
    "<!-- every option of every command -->": command_options,
}


def listed() -> set[str]:
    """Return the modules that have a place in the reference."""
    pages = (page.read_text(encoding="utf-8") for page in ROOT.glob("docs/reference/*.md"))
    return {found[1] for page in pages for found in ROOM.finditer(page)}


def reference(match: re.Match[str]) -> str:
    """Return directives for a module and each of its public names, or its classes or its others, by where they are defined.

    A function that is called like the module that defines it (``methods.fedavg``) would else be taken for that module.
    What a module below offers that has a place of its own in the reference stands there alone. A class is shown as it is.
    """
    module = pkgutil.resolve_name(match[1])
    if not inspect.ismodule(module):
        return match[0]
    below = [name for name in listed() if name.startswith(f"{match[1]}.")]
    places = []
    for name in getattr(module, "__all__", []):
        found = getattr(module, name)
        if inspect.ismodule(found) or (match[2] and inspect.isclass(found) != (match[2] == "classes")):
            continue
        home = sys.modules.get(getattr(found, "__module__", ""), module)
        place = home.__name__ if getattr(home, name, None) is found else match[1]
        if not any(f"{place}.".startswith(f"{other}.") for other in below):
            places.append(f"{place}.{name}")
    options = "    options:\n      heading_level: 3\n      show_root_full_path: false\n"
    whole = "    options:\n      members: false\n" if places else ""
    return f"::: {match[1]}\n{whole}\n" + "\n".join(f"::: {place}\n{options}" for place in places)


def on_files(files: Any, config: Any) -> Any:
    """Add notebooks as pages, and what the repository has outside of docs/ that pages link to."""
    from mkdocs.structure.files import File

    for path in sorted(ROOT.glob("docs/notebooks/*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=notebook_page(path)))
    queue = (
        [ROOT / name for name in ALWAYS]
        + sorted(ROOT.glob("results/*.md"))
        + [
            (ROOT / "docs" / page.src_uri).parent / link
            for page in files.documentation_pages()
            if page.abs_src_path
            for link in re.findall(
                r"\]\((\.\./[^)#\s]+)", Path(page.abs_src_path).read_text(encoding="utf-8")
            )
        ]
    )
    while queue:
        path = queue.pop().resolve()
        source = path.relative_to(ROOT).as_posix()
        if source.startswith("docs/") or not path.is_file() or files.get_file_from_path(source):
            continue
        files.append(File.generated(config, source, abs_src_path=str(path)))
        if path.suffix == ".md":  # a result's page has pictures
            found = re.findall(r"\]\(([^)#:\s]+)", path.read_text(encoding="utf-8"))
            queue += [path.parent / link for link in found]
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to where the site has things: docs/ is its top, and notebooks are pages."""
    source = page.file.src_uri
    inside = source.startswith("notebooks/") or (ROOT / "docs" / source).exists()

    kept = r"\g<0>" if source.startswith("notebooks/") else ".md"

    def moved(match: re.Match[str]) -> str:
        start, up, name, end = match.groups()
        if not inside:
            name = name.removeprefix("docs/")
        elif len(up) > 3 * source.count("/"):  # leaves docs/
            up = up.removeprefix("../")
        return start + up + re.sub(r"\.ipynb$", kept, name) + end

    if inside and not source.startswith("reference/"):
        words = EXPLAINED.findall((ROOT / "docs" / "concepts.md").read_text(encoding="utf-8"))
        markdown += "\n\n" + "\n".join(f"*[{word}]: {meaning}" for word, meaning in words)  # tooltips
    for mark, make in MADE_HERE.items():
        if mark in markdown:
            markdown = markdown.replace(mark, make().replace("``", "`"))
    parts = FENCED.split(ROOM.sub(reference, markdown))
    return "".join(part if part.startswith("```") else LINK.sub(moved, part) for part in parts)
