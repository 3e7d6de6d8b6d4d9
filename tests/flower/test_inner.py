"""What fedkeep relies on inside Flower: each test names one thing, and fails first where a new version has changed it."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest
from flwr.app import Array, ArrayRecord, RecordDict
from flwr.supercore.constant import TASK_TYPE_TO_COMMAND

import fedkeep
from fedkeep.core.errors import RunError
from fedkeep.flower import inner
from fedkeep.flower.guard import COMMAND, SERVER
from fedkeep.flower.project import new_project
from tests.flower.small import CONFIG

USED = {
    "subprocess": "subprocess.Popen",
    "time": "time.sleep",
    "FleetHttpClient": "FleetHttpClient.from_server_address",
}
"""What of a replaced name is called, and nothing else: ours have no more."""
PUBLIC = {"flwr.app", "flwr.clientapp", "flwr.clientapp.typing", "flwr.serverapp"}


def test_only_one_file_takes_anything_from_inside_flower():
    found = {}
    for path in Path(fedkeep.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "flwr" in text else ():
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            inside = {n for n in names if n.partition(".")[0] == "flwr"} - PUBLIC
            if inside:
                found.setdefault(path.name, set()).update(inside)
    assert set(found) == {"inner.py"}, found


def test_what_is_sent_of_records_holds_every_arrays_bytes():
    content = bytes(range(256)) * 8
    record = ArrayRecord()
    record["x"] = Array("uint8", (len(content),), "ours", content)
    assert any(content in part for part in inner.nested_bytes(RecordDict({"arrays": record})))


def test_a_project_is_packed_without_being_run(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    new_project(tmp_path / "visits", CONFIG)
    assert inner.bundle_of(tmp_path / "visits")[:2] == b"PK"
    with pytest.raises((ValueError, OSError)):
        inner.bundle_of(tmp_path / "home")


def test_apps_are_started_by_commands_of_these_names():
    assert {COMMAND, SERVER} <= set(TASK_TYPE_TO_COMMAND.values())


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in inner.REPLACED.items() for n in names])
def test_what_is_replaced_is_called_by_name_in_its_own_module(module, name):
    """So putting another function there is enough."""
    there = importlib.import_module(module)
    assert hasattr(there, name)
    calls = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(there)))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == USED.get(name, name)
    ]
    assert calls
    assert not [
        node
        for node in ast.walk(ast.parse(inspect.getsource(there)))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value) == name
        and ast.unparse(node) not in (USED.get(name), f"{name}.DEVNULL")
    ]
    if name in ("get_load_client_app_fn", "push_task_output"):  # ours take names alone
        assert all(not call.args for call in calls)


def test_a_flower_that_lacks_one_is_refused_by_name():
    with pytest.raises(RunError, match="has no another"):
        inner.replace(inner.CLIENT, "another", print)
