"""Next month on machines: new words and labels get the next numbers, and what server and clients have grows with them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedkeep import FederatedData, Run, simulate
from fedkeep.core.errors import ConfigError
from fedkeep.core.net import Net
from fedkeep.core.params import Params
from fedkeep.data.preparation import Encoding
from fedkeep.engines import first_default
from fedkeep.experiments.build import data_of, run_config
from fedkeep.experiments.config import parse_config
from fedkeep.flower.served import federation_of
from fedkeep.remote.device_file import DeviceFile
from fedkeep.remote.device_store import counted
from fedkeep.remote.node_config import build_node
from fedkeep.remote.served_run import serve_run
from fedkeep.remote.transport import MemoryTransport
from fedkeep.store import MemoryStore
from tests import refusals
from tests.remote.test_conformance import server_of
from tests.remote.test_life_server import said
from tests.tiny import on_server, same_bits

SITES = ("north", "south", "west")
WORDS = ("ache", "fever", "cough", "rash")
COUNTED = """
[preparation]
tokens = "word"
clients_a_word_here = 1
"""
HASHED = """
[model]
kind = "bag_of_words"
user_dim = 0
[method]
kind = "fedper"
private = "mlp.3.*"
batch_size = 8
optimizer = { learning_rate = 0.1 }
[run]
rounds = 2
cohort = 2
evaluate_every = 0
accelerate = false
"""
TEXT = COUNTED + HASHED


def rows(site: str, words: tuple[str, ...], labels: str, count: int) -> list[str]:
    """Return examples that differ from each other: each word stands in many of them."""
    place = SITES.index(site)
    texts = (" ".join([words[k % len(words)]] * (1 + k // len(words))) for k in range(count))
    return [f"{site},{text},{labels[(k + place) % len(labels)]}" for k, text in enumerate(texts)]


def write(folder: Path, found: Mapping[str, list[str]]) -> None:
    """Write the table of each site, its node.toml, and the table of all."""
    for site, lines in {**found, "all": [line for own in found.values() for line in own]}.items():
        (folder / site).mkdir(exist_ok=True)
        (folder / site / "mine.csv").write_text("\n".join(["user,text,label", *lines]))
        (folder / site / "node.toml").write_text(
            f'[data]\nreader = "table"\npath = "mine.csv"\n[device]\nowner = "{site}"\nfolder = "states"\nclients_a_word = 1\n'
        )


def trained(folder: Path, out: str, since: str = "", text: str = TEXT) -> None:
    """Train at the sites, each with what its table holds now."""
    nodes = {site: build_node(folder / site / "node.toml") for site in SITES}
    made = replace(federation_of(text), clients=len(SITES), simulated_noise=False)
    if since:
        made = replace(made, continue_from=folder / since)
    try:
        transport = MemoryTransport({site: node.serve for site, node in nodes.items()})
        serve_run(made, transport, folder / out, progress=False, patience=100)
    finally:
        for node in nodes.values():
            node.close()


def kept(folder: Path, out: str, round: int) -> dict[str, Params]:
    """Return what each site keeps of a run's last round."""
    run, found = json.loads((folder / out / "run.json").read_text())["run"], dict[str, Params]()
    for site in SITES:
        file = DeviceFile(folder / site / "states" / f"{run}.db", site)
        version, lacking = counted(file, site, round)
        assert not lacking
        found[site] = {} if version is None else file.values(version)
        file.close()
    return found


def wide(values: Params, like: Params) -> Params:
    """Return values in the first rows of larger ones."""
    found = {name: value.clone() for name, value in like.items()}
    for name, value in values.items():
        found[name][: len(value)] = value
    return found


def going_on(first: Run, june: FederatedData, encoding: Mapping[str, Any], text: str = TEXT) -> Run:
    """Return a simulation that begins with what server and clients of another had, in the first rows of larger tensors."""
    model, method = federation_of(text).build(encoding)
    method = method.resolved(model)
    module = method.made_for(model)
    model.load_state_dict(wide(first.server, {n: module.state_dict()[n] for n in first.server}), strict=False)
    private = MemoryStore(first_default(method, Net(module), 0), list(map(str, june.ids)))
    for place, site in enumerate(map(str, june.ids)):
        there = {name: value[0] for name, value in first.private.read([first.data.index(site)]).items()}
        own = wide(there, private.default(site))
        private.write([place], {name: value[None] for name, value in own.items()})
    options: dict[str, Any] = {"rounds": 2, "cohort": 2, "evaluate_every": 0, "engine": "sequential"}
    return simulate(model, method, june, private=private, **options).last


MAY = {site: rows(site, WORDS, "abc", 40) for site in SITES}
JUNE = {
    site: [*MAY[site], *rows(site, ("sleep", "ache rash"), "acd", 10 * k)] for k, site in enumerate(SITES)
}


def test_server_and_clients_go_on_with_the_bits_of_a_simulation(tmp_path: Path) -> None:
    data = '[data]\nreader = "table"\npath = "{}"\n'.format(tmp_path / "all" / "mine.csv")
    config = parse_config(data + TEXT, "", {"run.engine": "sequential"})
    write(tmp_path, MAY)
    first = run_config(config, out=tmp_path / "simulated").last
    trained(tmp_path, "may")
    assert same_bits(server_of(tmp_path / "may"), on_server(first))

    write(tmp_path, JUNE)
    trained(tmp_path, "june", since="may")
    june = data_of(config, None, tmp_path / "simulated")
    assert june.meta["classes"] == 4
    assert june.meta["vocabulary"]["size"] == 2 + len(WORDS) + 1
    info = json.loads((tmp_path / "june" / "run.json").read_text())
    assert Encoding.from_json(json.dumps(info["encoding"])).digest == june.meta["encoding"]
    assert info["roster"]["counts"] == [
        {part: int(june.counts(part)[place]) for part in ("train", "valid", "test")} for place in range(3)
    ]
    expected = going_on(first, june, info["encoding"])
    assert same_bits(server_of(tmp_path / "june"), on_server(expected))
    for site, values in kept(tmp_path, "june", 2).items():
        own = {name: value[0] for name, value in expected.private.read([june.index(site)]).items()}
        assert same_bits(values, own)
        assert values["mlp.3.weight"].shape[0] == 4
    assert any("is extended: 1 new class, 1 new word." in text for text in said(tmp_path / "june"))


@pytest.mark.parametrize("word", ["", " {}{}"], ids=["known words", "words of its own in each text"])
def test_what_was_tested_before_never_trains(word: str, tmp_path: Path) -> None:
    """A device divides its examples by their place: with rows on top it would train on what it has tested.

    A word of tested texts alone has no number in May; in June, as other rows shape the encoding, it has one.
    """
    may = {
        site: [re.sub(",(.)$", rf"{word.format(site, k)},\1", row) for k, row in enumerate(own)]
        for site, own in MAY.items()
    }
    write(tmp_path, may)
    trained(tmp_path, "may")
    write(
        tmp_path,
        {site: [*(f"{site},sleep{' well' * k},a" for k in range(7)), *own] for site, own in may.items()},
    )
    trained(tmp_path, "june", since="may")
    runs = [json.loads((tmp_path / run / "run.json").read_text())["run"] for run in ("may", "june")]
    for site in SITES:
        before, after = ({}, {})
        for run, found in zip(runs, (before, after), strict=True):
            file = DeviceFile(tmp_path / site / "states" / f"{run}.db", site)
            found |= file.parts()[site]
            file.close()
        assert len(after) == len(before) + 7
        assert before.items() <= after.items()


@pytest.mark.parametrize(
    ("header", "more", "data", "words"),
    [
        ("user,text,label", "ache,d", "", r"'d'.*the task is multiclass, and was binary"),
        ("user,text,label,dose", "ache,a,3", 'features = ["dose"]', "the column 'text' is missing"),
    ],
    ids=["another task", "another column"],
)
def test_an_encoding_that_does_not_extend_is_refused_before_anything_is_made(
    header: str, more: str, data: str, words: str, tmp_path: Path
) -> None:
    write(tmp_path, {site: rows(site, WORDS, "ab", 40) for site in SITES})
    trained(tmp_path, "may", text=HASHED)
    for site in SITES:
        home = tmp_path / site
        old = [row + ",1" * (header.count(",") - 2) for row in rows(site, WORDS, "ab", 40)]
        (home / "mine.csv").write_text("\n".join([header, *old, f"{site},{more}"]))
        (home / "node.toml").write_text(
            (home / "node.toml").read_text().replace("[device]", f"{data}\n[device]")
        )
    with pytest.raises(ConfigError, match=f"^continue_from: .*{words}.*begin a new run"):
        trained(tmp_path, "june", since="may", text=HASHED)
    assert not (tmp_path / "june").exists()
    assert {len(list((tmp_path / site / "states").glob("*.db"))) for site in SITES} == {1}


CHARACTERS = HASHED.replace(
    '"bag_of_words"\nuser_dim = 0', '"document"\nuser_dim = 0\nembedding_dim = 4\nhidden = 4\nmlp = 4'
).replace('"fedper"\nprivate = "mlp.3.*"', '"fedavg"')


def test_a_model_of_characters_is_not_given_words_because_nobody_said_so(tmp_path: Path) -> None:
    """In a simulation a table's texts are then cut into characters, so one configuration would be two models."""
    write(tmp_path, MAY)
    with refusals.raises(ConfigError, said="reads characters, and devices hash words of", model="document"):
        trained(tmp_path, "run", text=CHARACTERS)
    assert not (tmp_path / "run").exists()
    assert not list(tmp_path.glob("*/states/*.db"))
    for tokens, size in (("char", 2 + len({*" ".join(WORDS)})), ("unicode_words", 16384)):
        trained(tmp_path, tokens, text=f'[preparation]\ntokens = "{tokens}"\n{CHARACTERS}')
        assert server_of(tmp_path / tokens)["embedding.weight"].shape[0] == size
