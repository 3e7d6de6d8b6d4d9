"""The ledger: what it notes, writes and reads again."""

from __future__ import annotations

import pytest

from fedkeep.core.errors import RunError
from fedkeep.store import VersionLedger
from fedkeep.store.versions import CLOCK_NONCE_BITS, NONCE_BITS, new_attempt


def noted(by_share: bool = False) -> VersionLedger:
    ledger = VersionLedger(6)
    ledger.accept([4, 1], [11, 11], [0.25, 0.75] if by_share else None)
    ledger.accept([1, 2], [21, 22], [1 / 3, 2 / 3] if by_share else None)
    return ledger


@pytest.mark.parametrize("by_share", [False, True])
def test_what_is_written_is_read_again(by_share: bool) -> None:
    ledger, again = noted(by_share), VersionLedger(6)
    again.read(ledger.written())
    for found in (ledger, again):
        lines = found.of(range(6))
        assert lines.version.tolist() == [0, 2, 1, 0, 1, 0]
        assert lines.attempt.tolist() == [0, 21, 22, 0, 11, 0]
        assert lines.share.tolist() == ([0, 1 / 3, 2 / 3, 0, 0.25, 0] if by_share else [0] * 6)
        assert found.seen().clients.tolist() == [1, 2, 4]


def test_no_share_is_written_where_nobody_accepts_by_it() -> None:
    assert b"share" not in noted().written()


def test_lines_are_written_until_they_are_committed() -> None:
    ledger = noted()
    assert ledger.written() == ledger.written() != b""
    ledger.committed()
    assert ledger.written() == b""
    ledger.accept([0], [31])
    assert ledger.written() == b'{"attempt":31,"clients":[0]}\n'


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{",
        "{}",
        '{"attempt":1,"clients":[6]}',
        '{"attempt":1,"clients":[-1]}',
        '{"attempt":0,"clients":[1]}',
        '{"attempt":"x","clients":[1]}',
        '{"attempt":1,"clients":["a"]}',
    ],
)
def test_damage_is_named(content: str) -> None:
    with pytest.raises(RunError, match=r"ledger\.jsonl is damaged"):
        VersionLedger(6).read(content.encode())


@pytest.mark.parametrize(("number", "bits"), [(5, NONCE_BITS), (2**41 - 2, CLOCK_NONCE_BITS)])
def test_names_of_attempts_ascend_and_those_of_one_number_differ(number: int, bits: int) -> None:
    made, later = ([new_attempt(one, bits) for _ in range(9)] for one in (number, number + 1))
    assert len(set(made)) > 1
    assert [name >> bits for name in made] == [number] * 9
    assert max(made) < min(later) <= max(later) < 2**63
