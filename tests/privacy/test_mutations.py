"""Does a test notice when a promise of protection is broken in one line? Each mutation makes one test fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedkeep.methods import private, secure
from fedkeep.privacy import DifferentialPrivacy, budget_ledger, dp
from fedkeep.privacy.draws import SystemDraw
from fedkeep.privacy.secure import secure_client
from fedkeep.privacy.secure.ring import FixedPoint
from fedkeep.privacy.secure.secure_server import Spent
from tests.methods import test_private, test_secure
from tests.methods.table import ROWS
from tests.privacy import test_dp, test_ledger
from tests.privacy.secure import test_parts, test_secure_sum

Broken = tuple[Any, str, Any, Callable[[Path], None]]


class Quieter(SystemDraw):
    """Noise of half the size."""

    def normal(self, *about: Any) -> Any:
        return 0.5 * super().normal(*about)


def refused_by_nobody(method: Any, *_: Any, **__: Any) -> Any:
    return method.server.reduce


def every_time(self: Any, client: str, keys: Any) -> None:
    return


def counted_last(self: budget_ledger.BudgetLedger, round: int, planned: int = 1) -> None:
    self.rounds.append(round)
    self._append({"round": round})


def whole(self: FixedPoint, values: Any) -> Any:
    """Wrap what is out of range."""
    return (values / self.step).astype("i8").astype(self.dtype)


def one_sided(key: Any, theirs: bytes, round: str, one: str, other: str) -> bytes:
    """Return another key to each of the two."""
    return (one + other).encode().ljust(32)[:32]


def asked_first(self: secure_client.SecureClient, wanted: str, to: str) -> None:
    self._step = to


def masks_cancel() -> None:
    made = test_secure_sum.Round().revealed()
    assert (made.server.total() == made.wanted).all()


# promise: what is broken, its name, what stands there then, the test that fails
BROKEN: dict[str, Broken] = {
    "a change is clipped before noise comes": (
        dp.Clipping,
        "factors",
        lambda self, deltas, scale=1.0: {},
        lambda _: test_private.test_a_round_by_hand(),
    ),
    "noise has the size that ε is counted by": (
        DifferentialPrivacy,
        "draw",
        lambda self, round: Quieter(),
        lambda _: test_private.test_an_empty_round_releases_noise_alone_of_the_right_size(),
    ),
    "an adaptive bound's counts share the privacy": (
        DifferentialPrivacy,
        "multiplier",
        property(lambda self: self.noise),
        lambda _: test_dp.test_the_adaptive_bound_shares_the_privacy(),
    ),
    "δ is below 1 / N": (
        DifferentialPrivacy,
        "check_clients",
        lambda self, clients: None,
        lambda _: test_dp.test_delta_must_be_below_one_over_the_number_of_clients(),
    ),
    "a round beyond the budget is refused": (
        budget_ledger.BudgetLedger,
        "charge",
        counted_last,
        test_ledger.test_a_round_beyond_the_budget_is_refused_and_not_written,
    ),
    "a ledger that was put back is refused": (
        budget_ledger.BudgetLedger,
        "_check",
        lambda self, known, whole: None,
        test_ledger.test_a_ledger_that_was_put_back_is_refused,
    ),
    "no method without a bounded sum has noise": (
        private,
        "bounded_mean",
        refused_by_nobody,
        lambda _: test_private.test_a_method_whose_rounds_are_no_bounded_sum_is_refused(ROWS["ifca"][1], ""),
    ),
    "no method that looks at single uploads is summed": (
        secure,
        "bounded_mean",
        refused_by_nobody,
        lambda _: test_secure.test_what_looks_at_single_uploads_is_refused(ROWS["ifca"][1], ""),
    ),
    "masks cancel": (secure_client, "pair_key", one_sided, lambda _: masks_cancel()),
    "a client masks one vector with a key": (
        secure_client.SecureClient,
        "_move",
        asked_first,
        lambda _: test_secure_sum.test_a_mask_key_is_used_once(),
    ),
    "a mask key is used once": (
        Spent,
        "spend",
        every_time,
        lambda _: test_secure_sum.test_a_mask_key_is_used_once(),
    ),
    "fewer than the threshold are refused": (
        secure_client,
        "check_threshold",
        lambda *_: None,
        lambda _: test_secure_sum.test_clients_refuse_too_few_by_themselves(),
    ),
    "nothing wraps": (
        FixedPoint,
        "encode",
        whole,
        lambda _: test_parts.test_a_value_out_of_range_is_refused_neither_wrapped_nor_cut(1.0001),
    ),
}


@pytest.mark.parametrize("promise", BROKEN)
def test_a_broken_promise_is_noticed(promise: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, name, other, test = BROKEN[promise]
    test_folder = tmp_path / "whole"
    test_folder.mkdir()
    monkeypatch.setattr(place, name, other)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test(test_folder)
