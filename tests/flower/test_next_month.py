"""Next month over Flower: a run goes on with a label that is new, by processes, with the bits of a simulation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedkeep.experiments.build import data_of, run_config
from fedkeep.experiments.config import parse_config
from fedkeep.flower.local_federation import federation, local_of, train
from tests.remote.test_conformance import server_of
from tests.remote.test_extended import HASHED, MAY, going_on, rows, write
from tests.tiny import on_server, same_bits


@pytest.mark.slow
def test_by_processes(tmp_path: Path) -> None:
    table, june = tmp_path / "all" / "mine.csv", tmp_path / "june"
    text = f'[data]\nreader = "table"\npath = "{table}"\n{HASHED}'
    config = parse_config(text, "", {"run.engine": "sequential"})
    write(tmp_path, MAY)
    first = run_config(config, out=tmp_path / "simulated").last
    place = local_of(tmp_path / "place", text, None, 2)
    with federation(place) as (link, _):
        train(place, link)
        write(
            tmp_path,
            {site: [*own, *rows(site, ("sleep", "ache rash"), "acd", 12)] for site, own in MAY.items()},
        )
        train(place, link, settings={"continue-from": str(place.run), "out": str(june)})
    info = json.loads((june / "run.json").read_text())
    expected = going_on(first, data_of(config, None, tmp_path / "simulated"), info["encoding"], HASHED)
    assert info["encoding"]["columns"]["label"]["names"] == ["a", "b", "c", "d"]
    assert same_bits(server_of(june), on_server(expected))
