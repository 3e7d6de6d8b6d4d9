"""fedkeep or torch upgraded between rounds, on all machines: what goes on with the same bits, and what is refused.

Where one side alone is upgraded both versions are named: ``test_agreement``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fedkeep.core.errors import RunError, StoreError
from fedkeep.experiments import run_directory
from fedkeep.remote import device_file, fingerprint
from fedkeep.remote.device_file import DeviceFile
from tests.remote.test_conformance import server_of
from tests.remote.test_extended import HASHED, MAY, SITES, kept, trained, write
from tests.remote.test_life_server import said
from tests.tiny import same_bits

LONGER = HASHED.replace("rounds = 2", "rounds = 4")


@pytest.fixture
def older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with two rounds, ``run``, of an older fedkeep and an older torch, everywhere."""
    write(tmp_path, MAY)
    with monkeypatch.context() as then:
        then.setattr(fingerprint, "code", lambda: "0.9 abc")
        then.setattr(torch, "__version__", "2.12.0")
        trained(tmp_path, "run", text=HASHED)
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["environment"]["torch"] == "2.12.0"
    return tmp_path


def test_a_run_goes_on_with_the_bits_of_one_that_was_never_upgraded(older: Path) -> None:
    trained(older, "run", text=LONGER)
    values, private = server_of(older / "run"), kept(older, "run", 4)
    trained(older, "whole", text=LONGER)
    assert same_bits(values, server_of(older / "whole"))
    for site, own in kept(older, "whole", 4).items():
        assert same_bits(private[site], own)


def test_what_would_give_other_numbers_begins_a_new_run_with_the_values_of_before(
    older: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_directory, "NUMERICS", run_directory.NUMERICS + 1)
    with pytest.raises(RunError, match="NUMERICS"):
        trained(older, "run", text=LONGER)
    trained(older, "june", since="run", text=HASHED)
    assert any("begin with round 2 of the run" in text for text in said(older / "june"))
    began = [DeviceFile(path, path.parts[-3]) for path in older.glob("*/states/*.db")]
    assert sorted(len(file.about.began) for file in began) == [0] * len(SITES) + [1] * len(SITES)
    for file in began:
        file.close()


def test_a_file_of_another_form_is_named_and_left_as_it_is(
    older: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {path: path.read_bytes() for path in older.glob("*/states/*.db")}
    assert len(files) == len(SITES)
    monkeypatch.setattr(device_file, "FORMAT", device_file.FORMAT + 1)
    for path in files:
        with pytest.raises(StoreError, match="of an older fedkeep: forget it, or read it with that one"):
            DeviceFile(path, path.parts[-3])
    assert {path: path.read_bytes() for path in files} == files
