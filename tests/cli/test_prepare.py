"""``fedkeep prepare``: summaries by hand, added up in any order, and the encoding that follows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedkeep.data.preparation import Encoding, Summary
from tests.cli.conftest import Command
from tests.commands import succeeded
from tests.tiny import fill_disk

TEXTS = """
[data]
reader = "table"
path = "{name}.csv"
tokens = "word"

[model]
kind = "document"
user_dim = 2

[method]
kind = "furl"

[run]
rounds = 1
"""


@pytest.fixture
def nodes(tmp_path: Path) -> None:
    """Write ``here.toml`` and ``there.toml``, and the tables that they name."""
    rows = {"here": "a,hello you,pos\nb,hello me,neg\n", "there": "c,good day,neutral\n"}
    for name, text in rows.items():
        (tmp_path / f"{name}.toml").write_text(TEXTS.format(name=name))
        (tmp_path / f"{name}.csv").write_text("user,text,label\n" + text)


@pytest.mark.usefixtures("nodes")
def test_two_devices_prepare_by_hand(fedkeep: Command) -> None:
    for name in ("here", "there"):
        result = succeeded(fedkeep("prepare", f"{name}.toml", "--data", ".", "--summary", f"{name}.json"))
    assert "What the summary of one client tells the server:" in result.stdout
    assert "which labels there are, not how many of each: 'neutral'." in result.stdout
    digests = []
    for order, out in ((("here", "there"), "one.json"), (("there", "here"), "other.json")):
        result = succeeded(fedkeep("prepare", "--merge", *(f"{n}.json" for n in order), "--out", out))
        digests.append(result.stdout.splitlines()[-1])
    encoding = Encoding.from_json(Path("one.json").read_text())
    assert Path("one.json").read_text() == Path("other.json").read_text()
    assert digests == [f"Encoding {encoding.digest[:16]}: vocabulary 7, classes 3"] * 2
    assert encoding.meta["label_names"] == ["neg", "neutral", "pos"]


@pytest.mark.usefixtures("nodes")
def test_show_prints_all_that_would_leave(fedkeep: Command) -> None:
    result = fedkeep("prepare", "here.toml", "--data", ".", "--show", "--set", "preparation.clients_a_word=2")
    lines = result.stdout.splitlines()
    summary = Summary.from_json(lines[-2])
    assert lines[-3] == summary.describe().splitlines()[-1]
    assert summary.columns["text"].clients == {"hello": 2, "me": 1, "you": 1}  # type: ignore[attr-defined]
    assert lines[-1] == f"Encoding {Encoding.of(summary).digest[:16]}: vocabulary 3, classes 2"


def test_generated_data_reveal_their_types(fedkeep: Command) -> None:
    result = fedkeep("prepare", "toy.toml")
    assert "  x: numbers: their type (float32) and shape, nothing of their values." in result.stdout
    assert result.stdout.splitlines()[-1].endswith(": classes 3, features 4")


@pytest.mark.usefixtures("nodes")
def test_an_encoding_that_cannot_be_written_is_whole_or_absent(
    fedkeep: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk(monkeypatch, "replace")
    result = fedkeep("prepare", "here.toml", "--data", ".", "--out", "code.json")
    assert result.exit_code == 2
    assert "Cannot write code.json: No space left on device." in result.stderr
    assert not Path("code.json").exists()


@pytest.mark.usefixtures("nodes")
def test_what_is_refused(fedkeep: Command, refused: Callable[..., str]) -> None:
    data = ("--data", ".")
    fedkeep("prepare", "here.toml", *data, "--summary", "here.json")
    fedkeep("prepare", "there.toml", *data, "--summary", "there.json", "--set", "data.max_length=7")
    assert refused("prepare", "here.toml", *data, "--out", "here.json") == (
        "Error: here.json is there already. Name another file, or remove it."
    )
    assert refused("prepare", "here.toml", *data, "--out", "a.json", "--summary", "./a.json") == (
        "Error: --out and --summary both name a.json. Give the encoding and the summary a file each."
    )
    assert not Path("a.json").exists()
    assert refused("prepare", "here.toml", "there.toml") == (
        "Error: Wanted one configuration; got 2. To add summaries up, say --merge."
    )
    assert refused("prepare", "--merge", "here.json", "there.json", "--out", "e.json") == (
        "Error: there.json does not fit the other summaries: the column 'text' has max_length 7, not 256. Give all "
        "devices the same settings of data."
    )
    assert not Path("e.json").exists()
    assert refused("prepare", "--merge", "nowhere.json") == (
        "Error: nowhere.json: No such file or directory. Check the path, its rights, and whether the disk can be written."
    )
    assert refused("prepare", "--merge", "here.csv").startswith(
        "Error: here.csv is no summary, or is damaged: "
    )
    assert refused("prepare", "--merge", "here.json", "here.json") == (
        "Error: here.json is named twice. Each device's summary counts once."
    )
    Path("here.csv").write_text("user,text,label\na,x,0\na,y,-1\n")
    assert refused("prepare", "here.toml", *data) == (
        "Error: Labels: wanted a label of 0 or more, of at most 18 digits; got '-1'."
    )
    assert "preparation.tokens: wanted" in refused(
        "prepare", "here.toml", "--set", "preparation.tokens=chars"
    )
    assert refused("prepare", "there.toml", *data, "--out", "no/such/folder.json").startswith(
        "Error: Cannot write no/such/folder.json: No such file or directory. What was there"
    )


@pytest.mark.usefixtures("nodes")
def test_with_secure_sums_it_says_what_leaves_in_them_alone(fedkeep: Command) -> None:
    secure = ["--set", "method.secure.clip=1.0", "--set", "method.weighting=uniform"]
    for more in ([], secure):
        result = succeeded(fedkeep("prepare", "there.toml", "--data", ".", *more))
        assert ("in sums over devices alone" in result.stdout) == bool(more)
