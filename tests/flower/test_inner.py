"""What fedkeep relies on inside Flower: each test names one thing, and fails first where a new version has changed it."""

import ast
import importlib
import inspect
import subprocess
import sys
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


WAITS = """
import threading, types
from flwr.supercore.inflatable import inflatable_utils as there
from fedkeep.flower import inner

waited, tries = [], []

class Event(threading.Event):
    def wait(self, seconds=None):
        waited.append(seconds)
        return self.is_set()

def pull(name):
    tries.append(name)
    if len(tries) < 4:
        raise there.ObjectUnavailableError(name)
    return b"here"

inner.ask_again_after(0.1)
there.threading = types.SimpleNamespace(Event=Event, Lock=threading.Lock)
there.random.uniform = lambda *_: 0.0
print(there.pull_objects(["x"], pull), waited)
"""


def test_an_object_that_is_not_there_yet_is_asked_for_again_soon():
    done = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, text=True, check=True)
    assert done.stdout == "{'x': b'here'} [0.1, 0.2, 0.4]\n"


@pytest.mark.parametrize(
    "module", [inner.NODE, inner.CLIENT, inner.SERVER, "flwr.superlink.grid.http_grid", inner.PULLING]
)
def test_nobody_says_how_long_it_waits_for_an_object(module):
    """So the default counts. In its own module the one function hands it to the other."""
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) in inner.PULLS]
    said = {ast.unparse(k.value) for call in calls for k in call.keywords if k.arg == inner.AGAIN}
    assert said <= ({inner.AGAIN} if module == inner.PULLING else set())


def test_a_flower_that_waits_in_another_way_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(inner, "PULLS", ("pull_nothing",))
    with pytest.raises(RunError, match="pull_nothing has no initial_backoff"):
        inner.ask_again_after(0.1)
