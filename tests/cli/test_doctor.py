"""``fedkeep doctor`` and ``fedkeep completion``."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedkeep.cli import doctor
from fedkeep.core.errors import installing
from fedkeep.kernels import native
from fedkeep.kernels.native import Status
from tests.cli.conftest import Command

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with kernels, torch for CPUs and a fast disk, without Flower."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(native, "status", lambda: Status(True, "AVX2", ""))
    monkeypatch.setattr(doctor, "SLOW", 0.0)
    monkeypatch.setattr(doctor, "MEGABYTES", 1)
    monkeypatch.setattr(doctor, "find_spec", lambda module: None if module == "flwr" else module)


def found(fedkeep: Command, code: int, *words: str) -> dict[str, dict[str, object]]:
    result = fedkeep("doctor", "--json", *words)
    assert result.exit_code == code, result.output
    return {line["what"]: line for line in json.loads(result.stdout)}


def test_what_is_there_and_what_is_missing(fedkeep: Command) -> None:
    lines = found(fedkeep, 0)
    assert lines["torch"]["found"] == torch.__version__
    assert "pickles" in str(lines["ray"]["do"])
    assert lines["kernels"]["found"] == "AVX2"
    assert lines["flower"] == {
        "what": "flower",
        "found": "not installed",
        "good": None,
        "do": installing("flower"),
    }
    assert sorted(path.name for path in Path().iterdir()) == [
        "table.toml",
        "toy.toml",
    ]  # nothing is left behind
    assert "✓ torch" in fedkeep("doctor").stdout


def test_what_must_be_mended(fedkeep: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "status", lambda: Status(False, "pure PyTorch", "no library"))
    lines = found(fedkeep, 1, "--folder", "nowhere")
    assert lines["kernels"]["found"] == "pure PyTorch: no library"
    (disk,) = (line for what, line in lines.items() if what.startswith("disk of "))
    assert disk["good"] is False
    assert "No such file or directory" in str(disk["found"])
    assert "To mend: kernels, disk of" in fedkeep("doctor", "--folder", "nowhere").stdout


def test_every_extra_is_looked_for() -> None:
    import tomllib

    from tests.documents import ROOT

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(doctor.EXTRAS) == set(project["optional-dependencies"]) - {
        "all",
        "dev",
        "docs",
        "flower-simulation",
    }


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes(fedkeep: Command) -> None:
    script = fedkeep("completion", "bash").stdout
    program = Path(sys.executable).with_name("fedkeep")

    def completed(*words: str) -> set[str]:
        line = (
            f"COMP_WORDS=(fedkeep {' '.join(map(repr, words))}); COMP_CWORD={len(words)}; _fedkeep_completion"
        )
        code = f"{script}\n{line} {program}; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
        return set(done.stdout.split())

    assert completed("ev") == {"evaluate"}
    assert completed("flower", "i") == {"init"}
    assert completed("evaluate", "runs/mine", "--per") == {"--per-client"}
    assert completed("flower", "init", "visits", "--con") == {"--config"}
    assert completed("device", "run", "--no-such") == set()


def test_the_other_shells(fedkeep: Command) -> None:
    for shell in ("zsh", "fish"):
        assert f"_FEDKEEP_COMPLETE={shell}_complete" in fedkeep("completion", shell).stdout
    result = fedkeep("completion", "bsh")
    assert result.exit_code == 2
    assert result.stderr == "Error: SHELL must be 'bash', 'zsh' or 'fish'; got 'bsh'. Did you mean 'bash'?\n"
