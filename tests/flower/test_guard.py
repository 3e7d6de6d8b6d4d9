import json
import os
import subprocess

import pytest
from flwr.supercore.constant import TASK_TYPE_TO_COMMAND

from fedkeep.core.errors import RunError
from fedkeep.flower import guard
from fedkeep.flower.local import Local, federation
from fedkeep.flower.signed import SIGNATURE, sign_project

EVIL = """
import pathlib
pathlib.Path({ran!r}).write_text(__name__)
"""
# A server of the attacker: it asks every node, and writes down what came back.
ASKS = """
import json
from flwr.serverapp import ServerApp
app = ServerApp()

@app.main()
def main(grid, context):
    from fedkeep.flower.transport import GridTransport
    from fedkeep.remote import Packet
    transport = GridTransport(grid)
    while not (nodes := transport.nodes()):
        transport.wait(1)
    tickets = transport.send([(nodes[0], Packet({{"kind": "hello"}}))])
    while not (replies := transport.receive(tickets)):
        transport.wait(1)
    packet = replies[0].packet
    with open({said!r}, "w") as file:
        json.dump({{"header": dict(packet.header) if packet else None, "reason": replies[0].reason}}, file)
"""


def test_every_command_that_may_run_a_bundle_is_ours(tmp_path):
    guard.install(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(set(TASK_TYPE_TO_COMMAND.values()))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(__import__("sys").path)}
    done = subprocess.run(
        [tmp_path / "flwr-agentapp", "--token", "x"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "This device runs fedkeep's ClientApp alone; flwr-agentapp was not started.\n"


def test_a_flower_that_loads_apps_in_another_way_is_refused(monkeypatch):
    from flwr.supernode.runtime import run_clientapp

    monkeypatch.delattr(run_clientapp, "get_project_dir")
    with pytest.raises(RunError, match="has no get_project_dir.*Install flwr 1.41"):
        guard._replace(run_clientapp, "get_project_dir", lambda: None)


@pytest.mark.slow
def test_a_bundle_with_a_module_named_fedkeep_runs_nothing_on_the_device(tmp_path):
    """Signed by a key that the device trusts, and still: the installed code answers, and none of the bundle's is run."""
    local = Local(folder=tmp_path / "local", config_text="seed = 0\n", data={}, clients={"node-1": ["a"]})
    with federation(local) as (link, _):
        project, said, ran = tmp_path / "local" / "project", tmp_path / "said.json", tmp_path / "ran"
        (project / "asks.py").write_text(ASKS.format(said=str(said)))
        for module in ("evil.py", "torch.py", "numpy.py", "json_tricks.py"):
            (project / module).write_text(EVIL.format(ran=str(ran)) + "app = None\n")
        settings = project / "pyproject.toml"
        settings.write_text(
            settings.read_text()
            .replace("fedkeep.flower.server_app:app", "asks:app")
            .replace("fedkeep.flower.client_app:app", "evil:app")
        )
        answers = {}
        for how in ("signed", "unsigned"):
            (project / "torch.py").unlink(missing_ok=True)  # the server app imports torch; the device must not meet ours
            (project / "numpy.py").unlink(missing_ok=True)
            (project / "fedkeep").mkdir(exist_ok=True)
            if how == "signed":
                sign_project(project, tmp_path / "local" / "keys" / "signer.key")
            else:
                (project / SIGNATURE).unlink()
            run = link.submit(project, {})
            while not link.state_of(run).startswith("finished"):
                pass
            answers[how] = json.loads(said.read_text())
    assert not ran.exists()
    assert answers["signed"]["header"]["kind"] == "refused"
    assert "refuses a project that nobody has signed" in answers["unsigned"]["reason"]
