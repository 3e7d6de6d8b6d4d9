"""What the site adds to the pages of docs/: notebooks as pages, and the files of the repository that pages link to."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))
LINK = re.compile(r"(\]\()((?:\.\./)*)([^)#:\s]+)((?:#[^)]*)?\))")
ROOM = re.compile(r"^::: (fedkeep[\w.]*)$", re.MULTILINE)
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


def reference(match: re.Match[str]) -> str:
    """Return directives for a module and each of its public names, by where they are defined.

    A function that is called like the module that defines it (``methods.fedavg``) would else be taken for that module.
    """
    module = importlib.import_module(match[1])
    places = []
    for name in getattr(module, "__all__", []):
        found = getattr(module, name)
        home = sys.modules.get(getattr(found, "__module__", ""), module)
        if not inspect.ismodule(found):
            places.append(f"{home.__name__ if getattr(home, name, None) is found else match[1]}.{name}")
    options = "    options:\n      heading_level: 3\n      show_root_full_path: false\n"
    whole = "    options:\n      members: false\n" if places else ""
    return f"{match[0]}\n{whole}\n" + "\n".join(f"::: {place}\n{options}" for place in places)


def on_files(files: Any, config: Any) -> Any:
    """Add notebooks as pages, and what the repository has outside of docs/ that pages link to."""
    for path in sorted(ROOT.glob("docs/notebooks/*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=notebook_page(path)))
    queue = [ROOT / name for name in ALWAYS] + [
        (ROOT / "docs" / page.src_uri).parent / link
        for page in files.documentation_pages()
        if page.abs_src_path
        for link in re.findall(r"\]\((\.\./[^)#\s]+)", Path(page.abs_src_path).read_text(encoding="utf-8"))
    ]
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

    parts = FENCED.split(ROOM.sub(reference, markdown))
    return "".join(part if part.startswith("```") else LINK.sub(moved, part) for part in parts)
