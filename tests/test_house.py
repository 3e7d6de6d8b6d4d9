"""The house: imports look down only, importing fedkeep is cheap, gradients are taken in one place."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest
from importlinter import cli

from fedkeep.tasks import KINDS, Kind

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "fedkeep"
HEAVY = {
    "cryptography",
    "dp_accounting",
    "pydantic",
    "sklearn",
    "matplotlib",
    "typer",
    "pyarrow",
    "jinja2",
    "rich",
    "scipy",
    "datasets",
    "PIL",
    "click",
    "mlflow",
    "optuna",
    "tensorboard",
    "wandb",
}

# Training takes gradients in the local run; the split checker's probes and the kernels' own backward passes are the
# only other places, a loss whose definition holds a gradient step, and a server that pulls uploads back through the
# network that made the clients' models: it sees no example and trains nothing on one. Attacks take
# them too: they train nothing, and look for inputs and private values that give what an attacker sees.
MAY_TAKE_GRADIENTS = {
    "engines/lanes.py",
    "split/probe.py",
    "split/find_head.py",
    "split/can_move.py",
    "methods/per_fedavg.py",
    "methods/pfedhn.py",
    "attacks/inputs.py",
    "attacks/vector_attack.py",
    "core/params.py",
}
MAY_DEFINE_BACKWARD = ("nn/", "kernels/")
TAKES_GRADIENTS = (".backward", "autograd.grad", "func.grad", "func.vjp", "grad_and_value", " gradients")
UNPICKLES = ("torch.load", "pickle.load", "pickle.loads")


def run_python(code: str) -> str:
    environment = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_imports_only_look_down() -> None:
    # In a process of its own: it sets logging up anew, and handlers that other packages left here may close pytest's files.
    lint = f"cli.lint_imports(config_filename={str(ROOT / 'pyproject.toml')!r}, no_cache=True)"
    found = subprocess.run(
        [sys.executable, "-c", f"from importlinter import cli; raise SystemExit({lint})"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert found.returncode == cli.EXIT_STATUS_SUCCESS, found.stdout + found.stderr


def test_every_room_stands_on_a_floor() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = contracts["contracts"][0]["layers"]
    named = {room.strip() for layer in layers for room in layer.replace(":", "|").split("|")}
    rooms = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert rooms == named


def test_no_import_leads_back_to_where_it_began() -> None:
    """Imports within functions and for type checkers count, but for the doors of a class to what knows it."""
    graph = grimp.build_graph(
        "fedkeep", "fedkeep_papers", exclude_type_checking_imports=False, cache_dir=None
    )
    needs = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert "fedkeep.core.errors" in needs["fedkeep.experiments.simulate"]
    needs["fedkeep.data.federated"].remove("fedkeep.data.readers.tables")  # FederatedData.from_frame
    needs["fedkeep.experiments.run"].remove("fedkeep.experiments.personalize.exported")  # Run.export
    TopologicalSorter(needs).prepare()  # else a CycleError that names the circle


# Runs every module of fedkeep, whatever it imports at its top; the packages of extras are not there.
BARE = """
import importlib, pkgutil, sys
for name in {absent}:
    sys.modules[name] = None
import fedkeep
for module in pkgutil.walk_packages(fedkeep.__path__, "fedkeep."):
    left_out = module.name.endswith(("__main__", ".nn.fused")) or ".kernels._" in module.name or ".flower." in module.name
    if not left_out:
        importlib.import_module(module.name)
print(len(sys.modules))
"""


def test_fedkeep_needs_nothing_of_its_extras() -> None:
    """But for the kernels of ``nn.fused``, in Triton, which torch for CUDA brings along; matplotlib brings Pillow."""
    absent = [
        "sklearn",
        "scipy",
        "pyarrow",
        "datasets",
        "dp_accounting",
        "cryptography",
        "fedkeep_papers",
        "mlflow",
        "onnx",
        "onnxruntime",
        "onnxscript",
        "optuna",
        "tensorboard",
        "wandb",
    ]
    assert int(run_python(BARE.format(absent=absent))) > 500
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    assert not [line for line in declared if line.startswith(("scikit-learn", "scipy"))]


# What is loaded after each step, in one process.
STEPS = """
import sys, json
found = []
for step in {steps}:
    exec(step)
    found.append(sorted(sys.modules))
print(json.dumps(found))
"""


def test_what_importing_fedkeep_its_names_and_all_of_a_report_but_its_drawing_load() -> None:
    """Nothing; torch and numpy alone; no matplotlib."""
    rooms = (
        "fedkeep.experiments.simulate, fedkeep.report.page, fedkeep.report.standings, fedkeep.audit.report"
    )
    steps = [
        "import fedkeep",
        "import torch, numpy",
        "for name in fedkeep.__all__: getattr(fedkeep, name)",
        f"import {rooms}",
    ]
    first, theirs, names, report = map(set, json.loads(run_python(STEPS.format(steps=steps))))
    assert not first & {"torch", "numpy", *HEAVY}
    assert {"torch", "numpy"} <= theirs
    assert {name.partition(".")[0] for name in names - theirs} & HEAVY == set()
    assert "fedkeep.report.page" in report
    assert "matplotlib" not in report


def test_help_loads_no_torch() -> None:
    code = """
import sys, json
from fedkeep.cli import main
for words in (["--help"], ["run", "--help"], ["device", "--help"], ["flower", "init", "--help"], ["--version"]):
    sys.argv = ["fedkeep", *words]
    try:
        main()
    except SystemExit as end:
        assert not end.code, words
print(json.dumps(sorted(sys.modules)))
"""
    loaded = json.loads(run_python(code).splitlines()[-1])
    assert "fedkeep.cli" in loaded
    assert not {"torch", "numpy", "pydantic", "flwr", "matplotlib"} & set(loaded)


def calls(module: Path, endings: tuple[str, ...]) -> list[int]:
    """Return the lines of a module that call a function whose dotted name ends so."""
    text = module.read_text(encoding="utf-8")
    if not any(ending.rpartition(".")[2].strip() in text for ending in endings):
        return []
    called = [
        (n.lineno, f" {ast.unparse(n.func)}") for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call)
    ]
    return [line for line, name in called if name.endswith(endings)]


def test_gradients_are_taken_in_the_local_run_alone() -> None:
    taken = {
        module.relative_to(SOURCE).as_posix(): calls(module, TAKES_GRADIENTS)
        for module in SOURCE.rglob("*.py")
    }
    elsewhere = {
        name: lines
        for name, lines in taken.items()
        if lines and name not in MAY_TAKE_GRADIENTS and not name.startswith(MAY_DEFINE_BACKWARD)
    }
    assert all(taken[name] for name in MAY_TAKE_GRADIENTS)  # the search finds what it looks for
    assert elsewhere == {}, "a second training loop? engines/lanes.py has the one"


def test_nothing_is_unpickled() -> None:
    found = {str(module): calls(module, UNPICKLES) for module in SOURCE.rglob("*.py")}
    assert {name: lines for name, lines in found.items() if lines} == {}


@functools.cache
def errors_made() -> list[tuple[str, ast.FunctionDef, ast.Call]]:
    """Return each call that makes an error of fedkeep, or takes its sentence, with its file and function."""
    found = {
        path.relative_to(ROOT).as_posix(): list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        for folder in (SOURCE, ROOT / "papers" / "src")
        for path in folder.rglob("*.py")
    }
    classes = [n for nodes in found.values() for n in nodes if isinstance(n, ast.ClassDef)]
    errors, before = {"FedkeepError"}, 0
    while len(errors) > before:
        before = len(errors)
        errors |= {c.name for c in classes if any(ast.unparse(base) in errors for base in c.bases)}
    assert {"ConfigError", "RuleError", "WrongShareError"} <= errors  # the search finds what it looks for
    functions = [(name, n) for name, nodes in found.items() for n in nodes if isinstance(n, ast.FunctionDef)]
    takes = {f.name for _, f in functions if f.args.kwarg is not None and f.args.kwarg.arg == "facts"}
    makers = {*errors, *takes, "error", "kind"} - {"__init__"}
    return [
        (name, function, call)
        for name, function in functions
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and getattr(call.func, "attr", getattr(call.func, "id", "")) in makers
    ]


def test_an_errors_sentence_is_plain_and_its_facts_fill_it() -> None:
    filled = {
        f"{name}:{call.lineno}"
        for name, function, call in errors_made()
        if any(is_filled(text, function) for text in call.args)
    }
    assert filled == set(), "name what an error is about: Error('... {column!r} ...', column=name)"


def test_an_errors_sentence_stands_in_one_place() -> None:
    places: dict[str, set[tuple[str, int]]] = {}
    for name, _, call in errors_made():
        for text in call.args:
            if isinstance(text, ast.Constant) and isinstance(text.value, str) and len(text.value) > 15:
                places.setdefault(text.value, set()).add((name, call.lineno))
    assert len(places) > 1000
    assert {text: where for text, where in places.items() if len(where) > 1} == {}


def is_filled(text: ast.expr, function: ast.FunctionDef) -> bool:
    """Tell whether a text is an f-string or made by ``format``, or a name that the function gives to one."""
    match text:
        case ast.JoinedStr() | ast.Call(func=ast.Attribute(attr="format")):
            return True
        case ast.IfExp(body=one, orelse=other) | ast.BinOp(left=one, right=other):
            return is_filled(one, function) or is_filled(other, function)
        case ast.Name(id=name):
            return any(
                isinstance(n.value, ast.JoinedStr) and name in map(ast.unparse, n.targets)
                for n in ast.walk(function)
                if isinstance(n, ast.Assign)
            )
        case _:
            return False


def test_the_package_says_that_it_is_typed_and_which_version_it_is() -> None:
    import fedkeep

    assert (SOURCE / "py.typed").exists()
    assert set(fedkeep.__all__) <= set(dir(fedkeep))
    assert all(getattr(fedkeep, name) is not None for name in fedkeep.__all__)
    with pytest.raises(AttributeError, match="no_such_name") as caught:
        fedkeep.no_such_name  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("no_such_name", fedkeep)  # Python names a near one
    for page, wanted in (
        ("CHANGELOG.md", fedkeep.__version__),
        ("CITATION.cff", f"version: {fedkeep.__version__}\n"),
    ):
        assert wanted in (ROOT / page).read_text(encoding="utf-8")


def test_a_hook_refuses_a_subject_of_more_than_72_bytes() -> None:
    hooks = re.findall(
        r"- id: subject\n(?:.*\n)*?\s+entry: '(.*)'", (ROOT / ".pre-commit-config.yaml").read_text()
    )
    (pattern,) = (re.compile(hook.encode()) for hook in hooks)
    assert pattern.search(b"s" * 73)
    assert pattern.search("…".encode() * 25)
    assert not pattern.search(b"s" * 72 + b"\n\n" + b"what it does " * 9)


def kinds_named(module: Path, tree: ast.AST) -> list[str]:
    """Return where a module imports a kind of task by its name, or compares or matches something with one's name."""
    found = []
    for node in ast.walk(tree):
        names: list[object] = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedkeep.tasks"):
            there = vars(importlib.import_module(str(node.module)))
            names = [alias.name for alias in node.names if isinstance(there.get(alias.name), Kind)]
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            each = [one for side in sides for one in getattr(side, "elts", [side])]
            names = [one.value for one in each if isinstance(one, ast.Constant)]
        elif isinstance(node, ast.MatchValue) and isinstance(node.value, ast.Constant):
            names = [node.value.value]
        known = (name for name in names if isinstance(node, ast.ImportFrom) or name in KINDS)
        found += [f"{module.relative_to(SOURCE)}:{node.lineno} {name}" for name in known]
    return found


def test_nothing_but_its_record_knows_a_kind_of_task_by_its_name() -> None:
    """What differs between kinds is asked of their records, so that a new one, or a copy under another name, has it all."""
    rest = [path for path in SOURCE.rglob("*.py") if SOURCE / "tasks" not in path.parents]
    assert [name for path in rest for name in kinds_named(path, ast.parse(path.read_text("utf-8")))] == []


def test_the_rule_on_kinds_finds_each_way_to_name_one() -> None:
    imported = "from fedkeep.tasks.ranking import RANKING\nfrom fedkeep.tasks import TOKENS, KINDS"
    compared = "kind == 'pixels' or 'binary' != kind or kind in ('tokens', 'x')"
    matched = "match kind:\n    case 'regression' | 'x': pass\n    case ['ranking', y]: pass"
    allowed = "about(task='binary') or x['tokens'] in y"
    for text, count in ((imported, 2), (compared, 3), (matched, 2), (allowed, 0)):
        assert len(kinds_named(SOURCE / "x.py", ast.parse(text))) == count
