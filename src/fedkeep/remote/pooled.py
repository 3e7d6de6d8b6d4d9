"""The server's side of secure sums before the first round: what devices tell of their data, as their sum alone.

The parties are devices, each for all of its clients; a device that comes back under another name is known by its
clients. All that agree in kind are asked for the four steps of a sum, see ``masking``. Who is lost on the way is missed
while enough are left; else a sum begins anew, until one is unmasked: no device unmasks two.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from fedkeep.core.errors import ConfigError, RunError, SecureSumError, UploadError
from fedkeep.data.preparation import Summary, agreeing, merged
from fedkeep.privacy.secure import Keys, SecureServer, Spent, threshold_for
from fedkeep.privacy.secure.messages import LEAST
from fedkeep.remote.masking import about_data, revealed_of
from fedkeep.remote.messages import Ask, Packet, Prepare, Prepared, Refused, Step, message_of, packet_of
from fedkeep.remote.nodes import SOON, Nodes

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
class _Asked:
    """What a party was asked last.

    Attributes:
        node: whom.
        ticket: of the message; empty: it is to be asked again after ``due``.
        due: when it is asked again.
    """

    node: str = ""
    ticket: str = ""
    due: float = 0.0


@dataclass
class _Pooling:
    """Sums over devices until one is unmasked; ``end`` is when that is given up.

    Attributes:
        out: by party that refused, why.
    """

    nodes: Nodes
    end: float
    poll: float
    out: dict[str, str] = field(default_factory=dict)
    spent: Spent = field(default_factory=Spent)
    number: int = 0

    def found(self) -> Summary:
        """Return the sum."""
        while True:
            blanks = {party: one for party, one in self._agreeing().items() if party not in self.out}
            try:
                if blanks:
                    return self._summed(blanks)
            except SecureSumError as error:
                self._note(f"The sum of what devices tell of their data failed, and begins anew. {error}")
            if self._now() >= self.end:
                refused = "".join(
                    f"\n  The device of client {party!r}: {why}" for party, why in self.out.items()
                )
                raise ConfigError(
                    f"Wanted at least {LEAST} devices that tell of their data in a secure sum; got {len(blanks)}. The sum "
                    f"of one is what it has. Start more devices, or tell less (preparation.standardise = false, "
                    f"label_names).{refused}"
                )
            self._wait()

    def _summed(self, blanks: Mapping[str, Summary]) -> Summary:
        """Return the sum over these parties.

        Raises:
            SecureSumError: they are too few, or too few have answered.
            RunError: the same, after the first was asked to unmask.
        """
        form = merged(blanks.values())
        if (column := form.counting) is not None:
            raise ConfigError(
                f"The words of the column {column!r} are to be counted, and their counts would not leave in a secure sum. "
                f"Hash them (preparation.tokens = 'unicode_words'), or give devices a vocabulary."
            )
        if not form.widths:
            return form
        self.number += 1
        threshold = threshold_for(len(blanks), self.nodes.hello.secure or 1.0)
        name = about_data(self.nodes.hello.run, self.number, self.nodes.hello, form)
        server = SecureServer(name, threshold, sum(form.widths), np.dtype(np.uint64), self.spent)
        count = {"clients": str(len(blanks))}

        def key(party: str, said: Prepared) -> None:
            server.add_keys(party, Keys.from_bytes(bytes.fromhex(said.made["keys"])))

        def shares(party: str, said: Prepared) -> None:
            server.add_shares(party, {other: bytes.fromhex(box) for other, box in said.made.items()})

        def masked(party: str, said: Prepared) -> None:
            if said.vector is None:
                raise SecureSumError(f"The device of client {party!r} sent no vector.")
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
        try:
            self._step("revealed", dict.fromkeys(survivors, survivors), threshold, revealed)
            total = server.total()
        except SecureSumError as error:
            raise RunError(
                f"What devices tell of their data was summed, and could not be unmasked. {error} No device takes part in "
                f"a second sum of this run. Begin a new run."
            ) from error
        self._note(f"{len(survivors)} devices have told of their data in a sum.")
        return merged(blanks[party] for party in survivors).with_numbers(total)

    def _step(
        self,
        step: Step,
        given: Mapping[str, Mapping[str, str]],
        threshold: int,
        take: Callable[[str, Prepared], None],
    ) -> list[str]:
        """Ask parties for a step, again where they are silent; return who has answered."""
        asked, here, began = {party: _Asked() for party in given}, list[str](), self._now()
        late = began + LATE * self.nodes.patience
        while asked and self._now() < self.end:
            # Before anything is unmasked a sum of fewer can begin anew; afterwards there is no other.
            if self._now() >= late and (step != "revealed" or len(here) >= threshold):
                break
            self._send(step, given, asked)
            tickets = {one.ticket: party for party, one in asked.items() if one.ticket}
            for reply in self.nodes.transport.receive(list(tickets)) if tickets else ():
                party = tickets[reply.ticket]
                if party not in asked:  # it came twice
                    continue
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

    def _send(self, step: Step, given: Mapping[str, Mapping[str, str]], asked: Mapping[str, _Asked]) -> None:
        """Ask those parties that were not asked yet, are on another node by now, or have been silent."""
        place = {min(here.clients): name for name, here in self.nodes.here.items() if here.clients}
        hello = self.nodes.hello
        for party, one in asked.items():
            node = place.get(party)
            if node is None or (one.node == node and self._now() < one.due):
                continue
            ask = Ask(step=step, sum=self.number, given=given[party])
            message = packet_of(Prepare(run=hello.run, hello=hello, party=party, ask=ask))
            (one.ticket,) = self.nodes.transport.send([(node, message)])
            one.node, one.due = node, self._now() + self.nodes.patience

    def _heard(
        self, party: str, step: Step, packet: Packet | None, asked: Mapping[str, _Asked]
    ) -> Prepared | None:
        """Return an answer; None: it is to be asked again soon, or has refused."""
        one, run = asked[party], self.nodes.hello.run
        one.ticket, one.due = "", self._now() + SOON
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
