"""The transcripts that the documents show, replayed: the same commands say the same, but for times, ports and numbers."""

import os
import re
import shlex
import subprocess
import sys

import pytest

from fedkeep.flower.processes import program
from tests.documents import ROOT, blocks

TRANSCRIPTS = sorted((ROOT / "docs" / "transcripts").glob("*.txt"))
VARIES = [
    (r"127\.0\.0\.1:\d+", "127.0.0.1:PORT"),
    (r"\b\d{15,20}\b", "NUMBER"),
    (r"\d+\.\d+ (s|seconds)\b", "TIME"),
    (r"[ \t]+$", ""),
]


def alike(text):
    """Return a text without what may differ from run to run."""
    for pattern, word in VARIES:
        text = re.sub(pattern, word, text, flags=re.MULTILINE)
    return text.strip()


def steps(path):
    """Return the commands of a transcript, each with what it printed."""
    parts = re.split(r"^\$ (.*)\n", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def test_there_is_a_transcript_and_its_commands_stand_in_a_page():
    shown = "\n".join(b.text for page in (ROOT / "docs").glob("*.md") for b in blocks(page, "sh"))
    assert TRANSCRIPTS
    for path in TRANSCRIPTS:
        for command, _ in steps(path):
            assert command in shown, command


@pytest.mark.slow
@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_a_transcript_is_what_the_commands_say(path, tmp_path):
    fedkeep = [sys.executable, "-m", "fedkeep.cli"]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "NO_COLOR": "1", "FLWR_HOME": str(tmp_path / "flower"),
        "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "OMP_NUM_THREADS": "1",
        "PATH": f"{program('flwr').parent}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    for command, printed in steps(path):
        name, *words = shlex.split(command)
        done = subprocess.run(
            [*(fedkeep if name == "fedkeep" else [name]), *words], capture_output=True, text=True, cwd=tmp_path,
            env=environment, timeout=1200, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert alike(done.stdout) == alike(printed)
