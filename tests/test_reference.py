"""The reference of the site holds every public name, each with a docstring; the site builds without a warning."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fedkeep
from tests.documents import ROOT

REFERENCE = ROOT / "docs" / "reference"
COMMANDS = (
    "fedkeep.cli",
    "fedkeep.flower",
    "fedkeep.kernels._kernels",
)  # docs/cli.md; Flower's apps; not Python


def public_modules() -> list[ModuleType]:
    """Return the modules that say what of them is public, and the package itself."""
    names = (m.name for m in pkgutil.walk_packages(fedkeep.__path__, "fedkeep."))
    asked = [n for n in names if not n.startswith(COMMANDS) and not n.endswith(("__main__", "nn.fused"))]
    return [fedkeep, *(m for m in map(importlib.import_module, asked) if hasattr(m, "__all__"))]


MODULES = public_modules()


def aliases_with_docstrings(path: Path) -> set[str]:
    """Return the names of a file that a string follows, as types and constants have it."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return {
        target.id
        for first, then in pairwise(body)
        if isinstance(first, ast.Assign | ast.AnnAssign) and isinstance(then, ast.Expr)
        for target in (first.targets if isinstance(first, ast.Assign) else [first.target])
        if isinstance(target, ast.Name)
    }


def test_every_public_name_has_a_docstring() -> None:
    aliases = set().union(*map(aliases_with_docstrings, ROOT.glob("src/fedkeep/**/*.py")))
    bare = []
    for module in MODULES:
        for name in set(module.__all__) - aliases - {"__version__"}:
            found = getattr(module, name)
            own = isinstance(found, ModuleType) or callable(found)  # else __doc__ is of its type
            if not (own and (found.__doc__ or "").strip()):
                bare.append(f"{module.__name__}.{name}")
    assert bare == []


def test_every_public_name_is_on_a_page_of_the_reference() -> None:
    shown = set(
        re.findall(r"^::: (\S+)", "".join(p.read_text() for p in REFERENCE.glob("*.md")), re.MULTILINE)
    )
    for name in shown:
        pkgutil.resolve_name(name)
    assert {module.__name__ for module in MODULES} - shown <= {"fedkeep", "fedkeep.data.federated"}
    homes = {value for module in MODULES if module is not fedkeep for value in module.__all__}
    away = {
        name for name in fedkeep.__all__ if name not in homes and home(getattr(fedkeep, name)) not in shown
    }
    assert away == {"__version__"}


def test_what_pages_import_is_on_a_page_of_the_reference() -> None:
    """Names that a page imports from inside fedkeep are explained: those of modules with a page, and others by name."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md"))
    shown = set(re.findall(r"^::: (\S+)", pages, flags=re.MULTILINE))
    missing = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for module, names in re.findall(
            r"^from (fedkeep\.core\S*) import (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE
        ):
            missing += [
                f"{page.name}: {module}.{name}"
                for name in re.split(r",\s*", names)
                if not {module, f"{module}.{name}"} & shown
            ]
    assert missing == []


def test_every_method_has_its_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (REFERENCE / "methods.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(fedkeep.methods.METHODS)


def home(found: Any) -> str:
    """Return the module that a public name is of."""
    return str(found.__name__ if isinstance(found, ModuleType) else getattr(found, "__module__", ""))


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    dead = [
        f"{page.relative_to(tmp_path)}: {link}"
        for page in tmp_path.rglob("*.html")
        if page.name != "404.html"
        for link in re.findall(r'(?:href|src)="(?!https?:)([^"#?]+)', page.read_text(encoding="utf-8"))
        if not (page.parent / link).exists()
    ]
    assert dead == []
    assert '<abbr title="' in (tmp_path / "own.html").read_text(encoding="utf-8")
    from_elsewhere = [
        page.name
        for page in tmp_path.rglob("*.html")
        if re.search(
            r'<(?:script|link rel="stylesheet")[^>]* (?:src|href)="https?:', page.read_text(encoding="utf-8")
        )
    ]
    assert from_elsewhere == []
    large = {
        p.name: p.stat().st_size for p in tmp_path.glob("reference/*.html") if p.stat().st_size > 300_000
    }
    assert large == {}
    pages = "".join(page.read_text(encoding="utf-8") for page in tmp_path.glob("reference/*.html"))
    away = [
        f"{module.__name__}.{name}"
        for module in MODULES[1:]
        for name in module.__all__
        if not isinstance(getattr(module, name), ModuleType)
        and not re.search(rf'id="fedkeep\.[\w.]*\b{name}"', pages)
    ]
    assert away == []
