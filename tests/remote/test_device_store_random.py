"""Whatever is repeated, late or killed, a client begins with exactly what its server has accepted."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fedkeep.core.params import Params
from fedkeep.methods.client import by_share
from fedkeep.remote.device_store import DeviceStore, MissingError
from fedkeep.store import Line
from tests.remote.device_states import DEFAULT, begun, made, opened, stage

MOST_UNDER_WAY = 4  # messages that may still come, again and again: as many as a device keeps attempts


@dataclass
class Accepted:
    """A version that the server has accepted, and what the client must keep of it."""

    line: Line
    user: list[float]


@dataclass
class Message:
    """An order of one attempt."""

    attempt: int
    base: Accepted


def trained(user: list[float], attempt: int) -> list[float]:
    """Return what training gives: another result for each beginning and attempt."""
    return [2 * user[0] + attempt, user[1] - 8 * attempt]


class Server:
    """Sends orders for one client, some of them again and late; accepts answers, and goes back a round now and then."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.draw, self.folder = random.Random(seed), folder  # noqa: S311
        self.line = [Accepted(Line(), [0.5, -1.5])]
        self.under_way: list[Message] = []
        self.served: list[Message] = []
        self.attempt, self.may_go_back, self.begun, self.missed = 0, False, 0, 0
        made(folder)
        self.store = self.opened()

    def opened(self) -> DeviceStore:
        store = opened(self.folder, accept=by_share)
        store.file._file.query("PRAGMA synchronous = OFF")  # no power is lost here
        return store

    def step(self) -> None:
        what = self.draw.choice(["send", "send", "again", "again", "accept", "accept", "kill", "back"])
        if what == "send":
            self.attempt += 1
            self.serve(message := Message(self.attempt, self.line[-1]), fresh=True)
            self.under_way = [*self.under_way, message][-MOST_UNDER_WAY:]
        elif what == "again" and self.under_way:
            self.serve(self.draw.choice(self.under_way), fresh=False)
        elif what == "accept":
            self.accept()
        elif what == "kill":
            self.store.close()
            self.store = self.opened()
        elif what == "back" and self.may_go_back:  # of history = 1
            gone = self.line.pop()
            self.under_way = [m for m in self.under_way if m.base is not gone]
            self.served, self.may_go_back = [], False

    def serve(self, message: Message, *, fresh: bool) -> None:
        base = message.base
        try:
            kept = begun(self.store, "a", base.line)
        except MissingError:
            assert not fresh
            self.missed += 1
            return
        self.begun += 1
        assert kept["user"].tolist() == base.user
        values: Params = {
            "user": torch.tensor(trained(base.user, message.attempt)),
            "client/count": kept["client/count"],
        }
        if self.draw.random() < 0.1:  # killed before the message is done
            self.store.clear()
            assert begun(self.store, "a", base.line)["user"].tolist() == base.user
        stage(self.store, "a", values, round=base.line.version, attempt=message.attempt)
        self.store.flush()
        if fresh:
            self.served.append(message)

    def accept(self) -> None:
        fine = [m for m in self.served[-2:] if m.base is self.line[-1]]
        if not fine:
            return
        message, share = self.draw.choice(fine), self.draw.choice([0.25, 0.5, 1.0])
        before, after = message.base.user, trained(message.base.user, message.attempt)
        user = [b + share * (a - b) for b, a in zip(before, after, strict=True)]
        user = torch.tensor(user, dtype=torch.float32).tolist()
        line = Line(message.base.line.version + 1, message.attempt, share)
        self.line.append(Accepted(line, user))
        self.served, self.may_go_back = [], True


@pytest.mark.parametrize("count", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_it_begins_with_what_the_server_accepted(tmp_path: Path, count: int) -> None:
    begun = missed = longest = 0
    assert DEFAULT.initial["user"].tolist() == [0.5, -1.5]
    for seed in range(count):
        server = Server(tmp_path / str(seed), seed)
        for _ in range(25):  # in float32 the numbers stay exact enough
            server.step()
        server.store.close()
        begun, missed, longest = begun + server.begun, missed + server.missed, max(longest, len(server.line))
    assert begun > 8 * count
    assert missed > 0  # late messages that name what is gone change nothing
    assert longest > 4
