import json
import os
import subprocess
import sys
import time

import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.supercore.constant import TASK_TYPE_TO_COMMAND

from fedkeep.flower import guard
from fedkeep.flower.keys import make_keys
from fedkeep.flower.local_federation import Local, federation
from fedkeep.flower.project import new_project
from fedkeep.flower.served import federation_of
from fedkeep.flower.signed import SIGNATURE, sign_project
from tests.flower.small import CONFIG, SECURE

EVIL = """
import pathlib
pathlib.Path({ran!r}).write_text(__name__)
app = None
"""
# A server of the attacker's: it asks a node, and writes down what came back.
ASKS = """
import json, sys
from flwr.serverapp import ServerApp
app = ServerApp()

@app.main()
def main(grid, context):
    sys.path[:] = [place for place in sys.path if "flower/apps" not in place]  # fedkeep's own, here at the server
    from fedkeep.flower.grid import GridTransport
    from fedkeep.remote import Packet
    transport = GridTransport(grid)
    while not (nodes := transport.nodes()):
        transport.wait(1)
    tickets = transport.send([(nodes[0], Packet({{"kind": "hello"}}))])
    while not (replies := transport.receive(tickets)):
        transport.wait(1)
    packet = replies[0].packet
    with open({said!r}, "w") as file:
        json.dump({{"kind": packet.header["kind"] if packet else "", "reason": replies[0].reason}}, file)
"""
MODULES = ("evil.py", "torch.py", "safetensors.py", "fedkeep/__init__.py")


@pytest.mark.parametrize("command", sorted(set(TASK_TYPE_TO_COMMAND.values()) - {guard.COMMAND}))
def test_no_other_app_than_a_client_app_is_started_for_a_bundle(command):
    with pytest.raises(SystemExit, match=f"fedkeep's ClientApp alone; {command} was not started"):
        guard.serve([command, "--token", "x"])


@pytest.mark.slow
def test_a_bundle_with_a_module_named_fedkeep_runs_nothing_on_the_device(tmp_path):
    """Signed by a key that the device trusts, and still the installed code answers; unsigned, nothing answers."""
    local = Local(folder=tmp_path / "local", config_text="seed = 0\n", data={}, clients={"node-1": ["a"]})
    project, said, ran = local.folder / "project", tmp_path / "said.json", tmp_path / "ran"
    with federation(local) as (link, _):
        (project / "asks.py").write_text(ASKS.format(said=str(said)))
        for module in MODULES:
            (project / module).parent.mkdir(exist_ok=True)
            (project / module).write_text(EVIL.format(ran=str(ran)))
        settings = (project / "pyproject.toml").read_text()
        settings = settings.replace("fedkeep.flower.server_app", "asks").replace(
            "fedkeep.flower.client_app", "evil"
        )
        (project / "pyproject.toml").write_text(settings)
        sign_project(project, local.folder / "keys" / "signer.key")
        signed = asked(link, project, said)
        (project / SIGNATURE).unlink()
        unsigned = asked(link, project, said)
    assert not ran.exists()
    assert signed == {"kind": "refused", "reason": ""}
    assert "refuses a project that nobody has signed" in unsigned["reason"]


def asked(link, project, said):
    """Return what a node answers to a server app of a project."""
    said.unlink(missing_ok=True)
    run = link.submit(project, {})
    end = time.monotonic() + 150
    while not link.state_of(run).startswith("finished"):
        assert time.monotonic() < end, link.processes.last("node-1")
        time.sleep(5)
    return json.loads(said.read_text())


def test_commands_do_not_put_the_folder_that_they_run_in_on_the_path(tmp_path):
    """Python's -P; else a file of a package's name in that folder would be imported in its place."""
    guard.install_at_link(tmp_path)
    assert " -P " in (tmp_path / guard.SERVER).read_text()
    assert guard.started_by(guard.NODE)[1] == "-P"


# Flower's own loader, replaced as the command replaces it, is given a signed bundle and then an unsigned one.
LOADS = """
import os, sys
from pathlib import Path
from fedkeep.flower import guard
import flwr.supernode.cli as cli
from flwr.supernode.runtime import run_clientapp as runtime

def serve():
    signed, unsigned = (Path(path).read_bytes() for path in {bundles!r})
    runtime.install_from_fab(signed, flwr_dir=None, skip_prompt=True)
    try:
        runtime.install_from_fab(unsigned, flwr_dir=None, skip_prompt=True)
    except Exception as error:
        print(type(error).__name__, str(error).split(" Sign")[0])
    print(runtime.get_project_dir("a", "b", "c", None) == Path(os.devnull))
    from fedkeep.flower import client_app
    load = runtime.get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
    print(load("f", "v", "h") is client_app.app)
    print(sorted(client_app.signed) == sorted({texts!r}))

cli.flwr_clientapp = serve
guard.serve(["flwr-clientapp", "--token", "x"])
"""


def test_an_unsigned_bundle_is_refused_and_of_a_signed_one_nothing_is_loaded_but_what_may_be_trained(
    tmp_path,
):
    make_keys(tmp_path / "keys", hosts=["localhost"], nodes=[])
    new_project(tmp_path / "project", CONFIG)
    (tmp_path / "project" / "more").mkdir()
    (tmp_path / "project" / "more" / "other.toml").write_text(SECURE)
    sign_project(tmp_path / "project", tmp_path / "keys" / "signer.key")
    signed, unsigned = tmp_path / "signed", tmp_path / "unsigned"
    signed.write_bytes(build_fab_from_disk(tmp_path / "project"))
    (tmp_path / "project" / SIGNATURE).unlink()
    unsigned.write_bytes(build_fab_from_disk(tmp_path / "project"))
    texts = [federation_of(text).text for text in (CONFIG, SECURE)]
    code = LOADS.format(bundles=[str(signed), str(unsigned)], texts=texts)
    environment = {
        **os.environ,
        guard.TRUSTED: str(tmp_path / "keys" / "signer.pub"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        check=False,
    )
    refused = "RunError This device refuses a project that nobody has signed."
    assert done.stdout.splitlines() == [refused, "True", "True", "True"], done.stderr
