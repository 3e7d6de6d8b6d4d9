"""Flower's simulation trains as ``sequential`` does, to the bit; also on a cluster of two Ray nodes."""

import json
import subprocess
import sys

import pytest

from tests.documents import ROOT

ASK = """
import json
from benchmarks.flower_conformance import trained
print(json.dumps(trained({where!r}, [("furl", "float32"), ("scaffold", "float32")], 2)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["ray", "cluster"])
def test_a_simulation_with_several_clients_an_actor_equals_sequential(where):
    done = subprocess.run(
        [sys.executable, "-c", ASK.format(where=where)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert [(row.get("case"), row.get("server"), row.get("private")) for row in rows] == [
        ("furl", True, True), ("scaffold", True, True),
    ], rows  # fmt: skip
