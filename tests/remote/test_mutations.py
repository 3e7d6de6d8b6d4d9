"""Does the comparison notice? Faults are put into server and devices, and a run must end in something else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedkeep.core.packet import Packet
from fedkeep.remote import exchange
from fedkeep.remote.client_ledger import Ledger
from fedkeep.remote.device_store import DeviceStore
from fedkeep.remote.fleet import Fleet
from fedkeep.remote.policy import RoundPolicy
from fedkeep.remote.served_run import serve_run
from fedkeep.store import LedgerLines
from tests.engines.test_conformance import reference
from tests.remote.federations import Devices, federation
from tests.remote.test_conformance import assert_near, ledger_of, server_of
from tests.tiny import everyone, on_server, same_bits

CASE = "the share of FedAvg"
Mutation = Callable[[pytest.MonkeyPatch], None]


def swapped_clients(patch: pytest.MonkeyPatch) -> None:
    write = exchange.packet_of

    def packet(work: Any) -> Packet:
        made = write(work)
        names = [order["client"] for order in made.header["orders"]]
        swapped = [{**o, "client": n} for o, n in zip(made.header["orders"], reversed(names), strict=True)]
        return Packet({**made.header, "orders": swapped}, made.tensors)

    patch.setattr(exchange, "packet_of", packet)
    patch.setattr(exchange, "check_answers", lambda *_: None)


def wrong_sum(patch: pytest.MonkeyPatch) -> None:
    accept = Ledger.accept
    patch.setattr(
        Ledger, "accept", lambda self, shares, made: accept(self, {c: v / 2 for c, v in shares.items()}, made)
    )


def wrong_index(patch: pytest.MonkeyPatch) -> None:
    entries = Ledger.entries

    def shifted(self: Ledger, clients: Any) -> Any:
        found = entries(self, clients)
        return dict(zip(found, [*list(found.values())[1:], next(iter(found.values()))], strict=True))

    patch.setattr(Ledger, "entries", shifted)


def ignored_state(patch: pytest.MonkeyPatch) -> None:
    begin = DeviceStore.begin

    def forgetful(self: DeviceStore, lines: LedgerLines) -> None:
        begin(self, lines)
        self._rows = {}

    patch.setattr(DeviceStore, "begin", forgetful)


def judged_with_the_next_round(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fleet, "announce", lambda self, orders, asked: None)


MUTATIONS: dict[str, Mutation] = {
    f.__name__: f
    for f in (swapped_clients, wrong_sum, wrong_index, ignored_state, judged_with_the_next_round)
}


def compared(folder: Path, mutate: Mutation) -> None:
    """Run a federation with a fault in it, and assert all that is asserted of one without."""
    expected = reference(CASE, "float32")
    devices = Devices(CASE, folder, 2)
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch)
        # A round without enough sites is asked for again and again, and a fault may refuse all of them.
        made = federation(CASE, policy=RoundPolicy(minimum=1))
        history = serve_run(made, devices.transport, folder / "run", progress=False)
    try:
        assert same_bits(server_of(folder / "run"), on_server(expected))
        kept = devices.kept(ledger_of(folder / "run"))
        assert same_bits(kept, everyone(expected.private, 6))
        assert_near(history, expected.history)
    finally:
        devices.close()


def test_without_a_fault_all_is_equal(tmp_path: Path) -> None:
    compared(tmp_path, lambda patch: None)


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_fault_is_noticed(name: str, tmp_path: Path) -> None:
    with pytest.raises(Exception) as noticed:  # noqa: PT011
        compared(tmp_path, MUTATIONS[name])
    assert not isinstance(noticed.value, AttributeError | TypeError | KeyError), noticed.value
