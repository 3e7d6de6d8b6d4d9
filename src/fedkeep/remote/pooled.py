"""The server's side of secure sums before the first round: what devices tell of their data, as their sum alone.

The parties are devices, each for all of its clients; a device that comes back under another name is known by its
clients. First numbers are summed, then a table of words, then names of words, see ``told``. All that agree in kind are asked for the four steps of a sum, see ``masking``. Who is lost on the way is missed
while enough are left; else a sum begins anew, until one is unmasked: no device unmasks two.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import ConfigError, RunError, SecureSumError, UploadError, raising
from fedkeep.core.packet import Packet
from fedkeep.data.preparation import Summary, agreeing, merged
from fedkeep.data.preparation.table import cells_for, read_table
from fedkeep.privacy.secure.secure_messages import LEAST, Keys
from fedkeep.privacy.secure.secure_server import SecureServer, Spent, threshold_for
from fedkeep.remote.masking import about_data, revealed_of
from fedkeep.remote.messages import Ask, Portion, Prepare, Prepared, Refused, Step, message_of, packet_of
from fedkeep.remote.nodes import SOON, Nodes
from fedkeep.remote.told import names_portion, size_of, with_names

LATE = 5
"""How many times ``Nodes.patience`` a step waits for the last devices."""


def pooled(nodes: Nodes, *, patience: float, poll: float) -> Summary:
    """Return the summary of all devices that are there and agree in kind: their numbers are summed securely.

    Args:
        nodes: they have answered ``hello``, whose ``secure`` is the threshold.
        patience: seconds after which it is given up.
        poll: seconds between two looks.

    Raises:
        ConfigError: too few devices are there, or words are to be counted.
        RunError: the sum was begun to be unmasked, and too few devices are left for it.
    """
    return _Pooling(nodes, nodes.transport.now() + patience, poll).found()


@dataclass
class _LastRequest:
    """What a party was asked last.

    Attributes:
        node: whom.
        tickets: of the messages that were not answered.
        due: when it is asked again.
    """

    node: str = ""
    tickets: list[str] = field(default_factory=list)
    due: float = 0.0


@dataclass
class _Pooling:
    """Sums over devices until one is unmasked; ``end`` is when that is given up.

    Attributes:
        out: by party that refused, why.
        portion, number: of the sum that is made now.
        told: by party, what those told in the clear who were in the last sum.
        failed: whether a sum has begun anew.
    """

    nodes: Nodes
    end: float
    poll: float
    out: dict[str, str] = field(default_factory=dict)
    spent: Spent = field(default_factory=Spent)
    number: int = 0
    portion: Portion = field(default_factory=Portion)
    told: Mapping[str, Summary] = field(default_factory=dict)
    failed: bool = False

    def found(self) -> Summary:
        """Return the sum."""
        form, lanes = self._sum(Portion(what="numbers"), self._agreeing)
        if lanes is None:
            return form
        summed, entries = form.with_numbers(lanes)
        if not entries:
            return summed
        told, lanes = self._sum(Portion(what="words", cells=cells_for(entries)), self._still_there)
        table = read_table(_there(lanes))
        names = names_portion(told, table)
        if not names.wanted:
            return summed
        _, lanes = self._sum(names, self._still_there)
        return with_names(summed, names, table, _there(lanes), self.nodes.hello.run)

    def _sum(
        self, portion: Portion, there: Callable[[], Mapping[str, Summary]]
    ) -> tuple[Summary, NDArray[np.uint64] | None]:
        """Return what those tell in the clear who are in the sum of a portion, merged, and the sum; None: there is nothing.

        Raises:
            ConfigError: too few devices are there.
            RunError: too few are left to unmask the sum.
        """
        while True:
            blanks = {party: one for party, one in there().items() if party not in self.out}
            try:
                if blanks:
                    return self._summed(portion, blanks)
            except SecureSumError as error:
                self.failed = True
                self._note(f"The sum of what devices tell of their data failed, and begins anew. {error}")
            if self._now() >= self.end:
                refused = "".join(
                    f"\n  The device of client {party!r}: {why}" for party, why in self.out.items()
                )
                raise ConfigError(
                    "Wanted at least {least} devices that tell of their data in a secure sum; got {count}. The sum "
                    "of one is what it has. Start more devices, or tell less (preparation.standardise = false, "
                    "label_names).{refused}",
                    least=LEAST,
                    count=len(blanks),
                    refused=refused,
                )
            self._wait()

    def _summed(
        self, portion: Portion, blanks: Mapping[str, Summary]
    ) -> tuple[Summary, NDArray[np.uint64] | None]:
        """Return the sum over these parties.

        Raises:
            SecureSumError: they are too few, or too few have answered.
            RunError: the same, after the first was asked to unmask.
        """
        form = merged(blanks.values())
        if not (size := size_of(portion, form)):
            return form, None
        self.portion, self.number = portion, self.number + 1
        threshold = threshold_for(len(blanks), self.nodes.hello.secure or 1.0)
        name = about_data(self.nodes.hello.run, self.number, self.nodes.hello, form, portion)
        server = SecureServer(name, threshold, size, np.dtype(np.uint64), self.spent)
        count = {"clients": str(len(blanks))}

        def key(party: str, said: Prepared) -> None:
            server.add_keys(party, Keys.from_bytes(bytes.fromhex(said.made["keys"])))

        def shares(party: str, said: Prepared) -> None:
            server.add_shares(party, {other: bytes.fromhex(box) for other, box in said.made.items()})

        def masked(party: str, said: Prepared) -> None:
            if said.vector is None:
                raise SecureSumError("The device of client {party!r} sent no vector.", party=party)
            server.add_masked(party, said.vector.numpy().view(np.uint64))

        def revealed(party: str, said: Prepared) -> None:
            server.add_revealed(party, revealed_of(said.made))

        self._step("keys", dict.fromkeys(blanks, count), threshold, key)
        keys = {party: one.to_bytes().hex() for party, one in server.keys().items()}
        ready = self._step("shares", dict.fromkeys(keys, keys), threshold, shares)
        boxes = {party: server.shares_for(party) for party in ready}
        given = {party: {other: box.hex() for other, box in one.items()} for party, one in boxes.items()}
        self._step("masked", given, threshold, masked)
        survivors = dict.fromkeys(server.survivors(), "")
        with raising(
            RunError,
            "What devices tell of their data was summed, and could not be unmasked. {why} No device takes "
            "part in a second sum of this run. Begin a new run.",
            SecureSumError,
        ):
            self._step("revealed", dict.fromkeys(survivors, survivors), threshold, revealed)
            total = server.total()
        said = f"{len(survivors)} devices have told of their data in a sum: {portion.what}."
        self.nodes.events.note("began", said)
        self.told = {party: blanks[party] for party in survivors}
        return merged(self.told.values()), total

    def _still_there(self) -> Mapping[str, Summary]:
        """Return those who were in the last sum; once a sum of theirs has failed, those of them who are there now."""
        here = {min(here.clients) for here in self.nodes.here.values() if here.clients}
        return {party: one for party, one in self.told.items() if party in here or not self.failed}

    def _step(
        self,
        step: Step,
        given: Mapping[str, Mapping[str, str]],
        threshold: int,
        take: Callable[[str, Prepared], None],
    ) -> list[str]:
        """Ask parties for a step, again where they are silent; return who has answered."""
        asked, here, began = {party: _LastRequest() for party in given}, list[str](), self._now()
        late = began + LATE * self.nodes.patience
        while asked and self._now() < self.end:
            # Before anything is unmasked a sum of fewer can begin anew; afterwards there is no other.
            if self._now() >= late and (step != "revealed" or len(here) >= threshold):
                break
            self._send(step, given, asked)
            tickets = {ticket: party for party, one in asked.items() for ticket in one.tickets}
            for reply in self.nodes.transport.receive(list(tickets)) if tickets else ():
                party = tickets[reply.ticket]
                if party not in asked:  # it came twice
                    continue
                if reply.ticket in asked[party].tickets:
                    asked[party].tickets.remove(reply.ticket)
                if (said := self._heard(party, step, reply.packet, asked)) is not None:
                    try:
                        take(party, said)
                        here.append(party)
                    except (SecureSumError, ValueError, KeyError) as error:
                        self._refused(party, str(error))
                    asked.pop(party, None)
                elif party in self.out:
                    asked.pop(party, None)
            if asked:
                self._wait()
        for party in asked:
            self._note(
                f"The device of client {party!r} has not answered {step!r}, and is missed in this sum."
            )
        return here

    def _send(
        self, step: Step, given: Mapping[str, Mapping[str, str]], asked: Mapping[str, _LastRequest]
    ) -> None:
        """Ask those parties that were not asked yet, are on another node by now, or have been silent."""
        place = {min(here.clients): name for name, here in self.nodes.here.items() if here.clients}
        hello = self.nodes.hello
        for party, one in asked.items():
            node = place.get(party)
            if node is None or (one.node == node and self._now() < one.due):
                continue
            ask = Ask(step=step, sum=self.number, given=given[party])
            whole = step in ("keys", "masked")  # the others go by what keys were made for
            portion = self.portion if whole else Portion(what=self.portion.what)
            message = Prepare(run=hello.run, hello=hello, party=party, portion=portion, ask=ask)
            one.tickets += self.nodes.transport.send([(node, packet_of(message))])
            one.node, one.due = node, self._now() + self.nodes.patience

    def _heard(
        self, party: str, step: Step, packet: Packet | None, asked: Mapping[str, _LastRequest]
    ) -> Prepared | None:
        """Return an answer; None: it is to be asked again soon, or has refused."""
        one, run = asked[party], self.nodes.hello.run
        one.due = self._now() + SOON
        if packet is None:
            return None
        try:
            if packet.header.get("kind") == "refused":
                said = message_of(packet, Refused)
                if not said.busy:
                    self._refused(party, said.reason)
                return None
            found = message_of(packet, Prepared)
        except UploadError as error:
            self._note(f"An answer of the device of client {party!r} was refused: {error}")
            return None
        if (found.run, found.step, found.sum) != (run, step, self.number):
            return None
        return found

    def _agreeing(self) -> dict[str, Summary]:
        """Return by party what those devices tell without a number that agree in kind."""
        told = {
            min(here.clients): Summary.from_json(json.dumps(here.summary))
            for here in self.nodes.here.values()
            if here.summary is not None and here.clients
        }
        if not told:
            return {}
        _, others = agreeing(told)
        for party, fault in others.items():
            if party not in self.out:
                self._refused(party, f"its data differ from the others': {fault}.")
        return {party: one for party, one in told.items() if party not in others}

    def _refused(self, party: str, why: str) -> None:
        self.out[party] = why
        self.nodes.events.note("refused", f"The device of client {party!r} is in no sum: {why}", client=party)

    def _note(self, text: str) -> None:
        self.nodes.events.note("round", text)

    def _now(self) -> float:
        return self.nodes.transport.now()

    def _wait(self) -> None:
        self.nodes.transport.wait(self.poll)
        self.nodes.look()


def _there(lanes: NDArray[np.uint64] | None) -> NDArray[np.uint64]:
    assert lanes is not None, "a table has cells, and a name has lanes"
    return lanes
