"""Private states that were damaged, forged, renamed, lost or are another's are refused, and not touched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedkeep.core.errors import StoreError
from fedkeep.methods.client import by_share
from fedkeep.remote.device_file import file_of
from fedkeep.remote.device_store import MissingError
from fedkeep.store import Default
from tests.refusals import raises
from tests.remote.device_states import (
    CLIENTS,
    INITIAL,
    RUN,
    after,
    begun,
    copied,
    line_in,
    made,
    opened,
    plain,
    run_sql,
    stage,
    train_rounds,
)
from tests.tiny import files, harmed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a device after three rounds: versions 1 and 2 are accepted, 3 is staged."""
    made(tmp_path / "a")
    train_rounds(tmp_path / "a", 3)
    return tmp_path / "a"


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE kept SET row = zeroblob(length(row)) WHERE client = 'b'",
        "UPDATE kept SET row = x'00' WHERE client = 'b'",
        "UPDATE kept SET row = 'text' WHERE client = 'b'",
        "UPDATE kept SET crc = crc + 1 WHERE client = 'b'",
        (
            "UPDATE kept SET row = (SELECT row FROM kept WHERE client = 'a' AND version = 2), "
            "crc = (SELECT crc FROM kept WHERE client = 'a' AND version = 2) WHERE client = 'b' AND version = 2"
        ),
        "UPDATE kept SET accepted = 0 WHERE client = 'b'",
        "UPDATE kept SET parent = 9 WHERE client = 'b'",
        "UPDATE kept SET round = 9 WHERE client = 'b'",
    ],
)
def test_a_row_that_was_changed_is_refused_and_the_others_are_read(folder: Path, change: str) -> None:
    run_sql(folder, change)
    store = opened(folder, accept=by_share)
    with raises(
        StoreError,
        text=(
            "Version 2 of what client 'b' keeps in the run 'abc123' does not fit its checksum: it is damaged. Restore it "
            "from a copy, or forget the client."
        ),
    ):
        begun(store, "b", line_in(2))
    assert plain(begun(store, "a", line_in(2))) == after(2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("DELETE FROM kept WHERE client = 'b'", "this device has none"),
        (
            "DELETE FROM kept WHERE client = 'b' AND version = 2",
            "has 1 (round 0, accepted), 3 (round 2, staged)",
        ),
        ("UPDATE kept SET client = 'z' WHERE client = 'b'", "this device has none"),
        (
            "UPDATE kept SET attempt = 7 WHERE client = 'b' AND version = 2",
            "wants version 2 of another attempt",
        ),
    ],
)
def test_a_row_that_is_gone_is_no_new_client(folder: Path, change: str, said: str) -> None:
    run_sql(folder, change)
    with raises(MissingError, said=said):
        begun(opened(folder, accept=by_share), "b", line_in(2))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("DROP TABLE about", "no such table: about"),
        ("DELETE FROM about", "not enough values to unpack"),
        ("UPDATE about SET content = replace(content, 'ann', 'bob')", "does not fit its checksum"),
        ("UPDATE about SET content = x'ff'", ""),
    ],
)
def test_what_it_says_of_itself_is_checked(folder: Path, change: str, said: str) -> None:
    run_sql(folder, change)
    before = files(folder)
    with pytest.raises(StoreError) as error:
        opened(folder)
    assert str(error.value).startswith("The private state of the run 'abc123' cannot be read: ")
    assert said in str(error.value)
    assert files(folder) == before


@pytest.mark.parametrize(
    "change",
    [
        "DROP TABLE kept",
        "UPDATE kept SET version = 'two'",
        "UPDATE kept SET client = x'00' WHERE client = 'b' AND version = 2",
    ],
)
def test_rows_that_make_no_sense_are_refused(folder: Path, change: str) -> None:
    run_sql(folder, change)
    store = opened(folder)
    with pytest.raises(StoreError, match="The private state of the run 'abc123' cannot be read: "):
        store.file.versions()


def test_of_any_byte_is_right_or_refused(folder: Path, tmp_path: Path) -> None:
    """Flipped bits, zeroed bytes, a cut: what is read is what was written, or an error."""
    content = file_of(folder, RUN).read_bytes()
    ends = []
    (tmp_path / "b").mkdir()
    for damaged in harmed(content, 300):
        file_of(tmp_path / "b", RUN).write_bytes(damaged)
        ends.append(outcome(tmp_path / "b"))
    assert set(ends) == {"refused", "right"}


def outcome(folder: Path) -> str:
    try:
        store = opened(folder, accept=by_share)
    except StoreError:
        return "refused"
    try:
        for client in CLIENTS:
            for version in (2, 3):
                assert plain(begun(store, client, line_in(version))) == after(version)
    except StoreError:
        return "refused"
    finally:
        store.close()
    return "right"


def test_of_another_owner(folder: Path) -> None:
    with raises(
        StoreError,
        text=(
            "The private state of the run 'abc123' belongs to 'ann', and this device to 'bob'. Restore this device's own "
            "from a copy."
        ),
    ):
        opened(folder, owner="bob")
    opened(folder).close()


def test_of_another_run(folder: Path) -> None:
    file_of(folder, RUN).rename(file_of(folder, "other"))
    with pytest.raises(StoreError, match="'other' belongs to the run 'abc123': somebody renamed it"):
        opened(folder, run="other")


@pytest.mark.parametrize(("run", "owner"), [(RUN, "bob"), ("other", "ann")])
def test_what_is_anothers_is_not_touched_if_a_kill_has_left_its_log(
    run: str, owner: str, folder: Path, tmp_path: Path
) -> None:
    store = opened(folder)
    begun(store, "a", line_in(3))
    store.flush()
    left = copied(folder, tmp_path / "left")
    for end in ("", "-wal"):
        (left / f"{RUN}.db{end}").rename(left / f"{run}.db{end}")
    store.close()
    before = files(left)
    assert before[f"{run}.db-wal"]
    with pytest.raises(StoreError, match="belongs to"):
        opened(left, run=run, owner=owner)
    assert files(left, but=(f"{run}.lock",)) == before


def test_of_another_model(folder: Path) -> None:
    for initial in (
        {"user": torch.zeros(2)},
        {**INITIAL, "user": torch.zeros(3)},
        {**INITIAL, "user": torch.zeros(2).double()},
        {**INITIAL, "more": torch.zeros(1)},
    ):
        with pytest.raises(StoreError, match="was made for other private values: wanted"):
            opened(folder, default=Default(initial))
    opened(folder).close()


@pytest.mark.parametrize("content", [b"", b"nonsense" * 1000, b"SQLite format 3\0"])
def test_a_file_that_is_none(tmp_path: Path, content: bytes) -> None:
    file_of(tmp_path, RUN).write_bytes(content)
    with pytest.raises(StoreError, match="The private state of the run 'abc123' cannot be read"):
        opened(tmp_path)
    assert file_of(tmp_path, RUN).read_bytes() == content


def test_a_log_without_its_file(tmp_path: Path) -> None:
    file_of(tmp_path, RUN).with_name(f"{RUN}.db-wal").write_bytes(b"x")
    with pytest.raises(StoreError, match="is missing, and its log is there"):
        opened(tmp_path)
    with pytest.raises(StoreError, match="is missing, and its log is there"):
        made(tmp_path)


def test_an_error_does_not_say_where_the_file_is(tmp_path: Path) -> None:
    """Its text goes to the server."""
    file_of(tmp_path, RUN).mkdir()
    with raises(
        StoreError,
        text="The private state of the run 'abc123' cannot be read: Is a directory. Restore it from a copy, or forget it.",
    ):
        opened(tmp_path)


def test_a_damaged_log_loses_its_message_and_says_so(folder: Path, tmp_path: Path) -> None:
    """SQLite drops what is damaged in a log without a word; the server's next order then asks for what is not there."""
    store = opened(folder, accept=by_share)
    for client in CLIENTS:
        kept = begun(store, client, line_in(3))
        stage(store, client, kept, round=3, attempt=40)
    store.flush()
    copy = copied(folder, tmp_path / "copy")
    store.close()
    log = file_of(copy, RUN).with_name(f"{RUN}.db-wal")
    log.write_bytes(log.read_bytes()[:200] + b"x" * 100 + log.read_bytes()[300:])
    store = opened(copy, accept=by_share)
    with pytest.raises(MissingError, match="wants version 4 .* has 1 .*, 2 .*, 3 .round 2, staged"):
        begun(store, "a", line_in(4))
    assert plain(begun(store, "a", line_in(3))) == after(3)
