"""A device's configuration file: what it names is built, and what is wrong with it is said in a clear line."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from fedkeep.core.errors import ConfigError, DataError
from fedkeep.data.preparation import Encoding, Rules
from fedkeep.remote.agreement import RefusalError
from fedkeep.remote.fingerprint import code, parts
from fedkeep.remote.messages import PROTOCOL, Hello, Here, message_of, packet_of
from fedkeep.remote.node import OwnerTerms
from fedkeep.remote.node_config import build_node, experiment, read_node_config, states_folder
from tests.refusals import raises

TABLE = """user,text,label,split
ann,good tea,pos,train
ann,bad tea,neg,train
bob,good film,pos,train
bob,dull secret,neg,train
ann,good cup,pos,test
"""
NODE = """
[data]
reader = "table"
path = "notes.csv"
user = "user"
tokens = "word"

[device]
owner = "ann's laptop"
folder = "states"
"""
SERVER = """
name = "notes"
seed = 3
[data]
reader = "table"
[model]
kind = "bag_of_words"
[method]
kind = "furl"
private = "user"
[run]
rounds = 2
"""


def written(folder: Path, text: str = NODE) -> Path:
    (folder / "notes.csv").write_text(TABLE)
    path = folder / "node.toml"
    path.write_text(text)
    return path


def test_what_it_does_not_say_is_strict(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert terms_of(path) == OwnerTerms(owner="ann's laptop")
    assert states_folder(path) == tmp_path / "states"


def terms_of(path: Path) -> OwnerTerms:
    device = read_node_config(path).device
    return OwnerTerms(**{one.name: getattr(device, one.name) for one in fields(OwnerTerms)})


def test_it_says_everything(tmp_path: Path) -> None:
    more = (
        'clients = ["bob"]\nhistory = 3\non_missing = "anew"\non_change = "anew"\nleaves = "clients"\n'
        "clients_a_word = 5\nsecure = true\npatience = 2.5\n"
    )
    path = written(tmp_path, NODE + more)
    assert terms_of(path) == OwnerTerms(
        owner="ann's laptop",
        history=3,
        on_missing="anew",
        on_change="anew",
        leaves="clients",
        clients_a_word=5,
        secure=True,
        patience=2.5,
    )
    assert build_node(path).clients == ["bob"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            ("owner", "ower"),
            "  device.owner: missing.\n  device.ower: unknown key. Did you mean device.owner?",
        ),
        (('folder = "states"', "folder = 3"), "device.folder: wanted a text; got 3"),
        (("[device]", "[device]\nhistory = -1"), "device.history: wanted at least 0; got -1"),
        (
            ("[device]", "[device]\non_missing = 'reset'"),
            "device.on_missing: wanted 'refuse', 'older' or 'anew'; got 'reset'",
        ),
        (
            ("[device]", "[device]\nleaves = 'all'"),
            "device.leaves: wanted 'sums', 'clients' or 'examples'; got 'all'",
        ),
        (("[data]", "data = 3\n[other]"), "data: wanted a table; got 3"),
        (("[device]", "[device"), "is no valid TOML"),
        (
            ("[device]", "[device]\nclients = ['anne']"),
            "device.clients: there are no data of 'anne'. Did you mean 'ann'? There are data of 2 clients.",
        ),
        (("[device]", "[device]\nclients = ['ann', 'ann']"), "device.clients: 'ann' is named twice."),
        (("[device]", "[device]\ncompute = 'tpu9'"), "The device 'tpu9' cannot be used"),
        (('reader = "table"', 'reader = "tabel"'), "data.reader: there is no reader 'tabel'"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    with raises(ConfigError, said=said):
        build_node(written(tmp_path, NODE.replace(*change)))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with raises(
        ConfigError, said="s owner makes one for each node by fedkeep", reason="No such file or directory"
    ):
        build_node(tmp_path / "node.toml")
    path = written(tmp_path)
    (tmp_path / "notes.csv").unlink()
    with pytest.raises(DataError, match="notes.csv"):
        build_node(path)


def test_clients_that_take_no_part_are_not_summed_up(tmp_path: Path) -> None:
    path = written(tmp_path, NODE + "clients = ['ann']\n")
    told = build_node(path).source.summary(Rules()).to_json()
    assert "tea" in told
    assert "secret" not in told
    assert "film" not in told
    assert "secret" in build_node(written(tmp_path)).source.summary(Rules()).to_json()


def test_opted_out_examples_of_chosen_clients_stay_out(tmp_path: Path) -> None:
    path = written(tmp_path, NODE + "clients = ['bob']\n")
    head, *rows = TABLE.splitlines()
    table = [f"{head},opted_in", *(f"{row},{'secret' not in row}" for row in rows)]
    (tmp_path / "notes.csv").write_text("\n".join(table) + "\n")
    source = build_node(path).source
    told = source.summary(Rules(label_names=("neg", "pos")))
    assert told.columns["text"].counts == {"good": 1, "film": 1}  # type: ignore[attr-defined]
    assert source.encoded(Encoding.of(told)).columns["opted_in"].tolist() == [True, False]  # type: ignore[union-attr]
    with pytest.raises(DataError, match=r"line 5 \(opted out, so .* label 'neg' is not one of"):
        source.encoded(Encoding.of(source.summary()))


def test_labels_of_dropped_reviews_are_told_by_their_own_client_alone(tmp_path: Path) -> None:
    folder = tmp_path / "reviews"
    folder.mkdir()
    for name, train in (("ann", "a 1,p\na 2,q\n"), ("bob", "same,SECRET\nb 1,p\n")):
        (folder / f"{name}.train.csv").write_text(f"text,label\n{train}")
        (folder / f"{name}.test.csv").write_text("text,label\nsame,p\n")
    reviews = '[data]\nreader = "reviews"\nfolder = "reviews"\ndrop_duplicates = true\n'
    path = tmp_path / "node.toml"
    for clients, words in (("ann", ("p", "q")), ("bob", ("SECRET", "p"))):
        path.write_text(f"{reviews}[device]\nowner = 'o'\nfolder = 'states'\nclients = ['{clients}']\n")
        assert build_node(path).source.summary().columns["label"].words == words  # type: ignore[attr-defined]


def test_a_rule_that_its_data_have_no_column_for_is_refused_with_its_reason(tmp_path: Path) -> None:
    hello = Hello(
        protocol=PROTOCOL, run="r", code=code(), experiment="", seed=0, summarise={"standardise": True}
    )
    with pytest.raises(RefusalError, match="cannot be used: preparation.standardise: wanted a column"):
        build_node(written(tmp_path))._hello(hello)


@pytest.mark.parametrize(("more", "words"), [("", 1), ("clients_a_word = 1\n", 6)])
def test_words_that_few_of_its_clients_have_stay_on_the_device(tmp_path: Path, more: str, words: int) -> None:
    """Good is of both clients; tea, bad, film, dull and secret are of one."""
    hello = Hello(
        protocol=PROTOCOL, run="r", code=code(), experiment="", seed=0, summarise={"clients_a_word": 1}
    )
    here = message_of(build_node(written(tmp_path, NODE + more)).serve(packet_of(hello)), Here)
    counts = here.summary["columns"]["text"]["counts"]
    assert counts["good"] == 2
    assert len(counts) == words


def test_their_examples_are_those_of_the_whole_table(tmp_path: Path) -> None:
    whole = build_node(written(tmp_path)).source
    alone = build_node(written(tmp_path, NODE + "clients = ['ann']\n")).source
    encoding = Encoding.of(whole.summary())
    mine, all_of_it = alone.encoded(encoding), whole.encoded(encoding)
    wanted = all_of_it.select([all_of_it.index("ann")])
    assert mine.fingerprint() == wanted.fingerprint()
    raw = [source.read for source in (alone, whole)]  # type: ignore[attr-defined]
    assert [raw[0].where(row) for row in range(3)] == [raw[1].where(row) for row in (0, 1, 4)]


def test_server_and_device_build_the_same_experiment(tmp_path: Path) -> None:
    encoding = Encoding.of(build_node(written(tmp_path)).source.summary())
    plain = json.loads(encoding.to_json())

    def built(text: str) -> dict[str, str]:
        model, method = experiment(text, plain)
        module = method.made_for(model)
        return parts(module, method, dict(module.state_dict()), plain)

    assert built(SERVER) == built(SERVER)
    assert built(SERVER)["initial values"] != built(SERVER.replace("seed = 3", "seed = 4"))["initial values"]
