"""A device's side of secure sums across machines: what it answers in each step is on its disk first.

    keys       how many clients begin        -> public keys
    shares     by client, its keys           -> by other client, sealed shares of the secrets
    masked     by sender, its sealed shares  -> the masked vector, in the place of the upload
    revealed   who is in the sum             -> by secret, the shares that unmask

What a client has answered it answers again to the same message, to the bit, and to no other message of that step: two
vectors under one mask would show their difference, and two lists of survivors would unmask one client. So secrets and
vectors lie on the disk until the sum is unmasked, or the client has begun two later ones. A sum is known by the attempt
of the message that asked for its keys; numbers never go back.

In rounds the parties of a sum are clients. Before them it is the devices, each with what it tells of its clients' data:
the same data in two sums over other devices would show what the difference holds, so a device unmasks one in a run.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedkeep.core.errors import RunError, SecureSumError, StoreError, UploadError, raising
from fedkeep.core.files import write_whole
from fedkeep.core.packet import Packet
from fedkeep.core.params import SERVER, Params
from fedkeep.data.preparation import Summary
from fedkeep.methods.secure import SecureSums, Vectors
from fedkeep.privacy.secure.secure_client import SecureClient
from fedkeep.privacy.secure.secure_messages import LEAST, Keys, Revealed
from fedkeep.privacy.secure.secure_server import threshold_for
from fedkeep.remote.device_file import sum_of
from fedkeep.remote.messages import Ask, ClientAnswer, ClientOrder, Hello, Portion, Step
from fedkeep.split import Split

VECTOR = SERVER + "masked"
SEEDS, KEYS = "seed/", "key/"
LIVE = 2
"""Sums that a client takes part in at a time: one is unmasked while the next begins."""


def about(run: str, number: int) -> str:
    """Return what the masks of a sum are bound to."""
    return f"{run}/{number}"


def about_data(run: str, number: int, hello: Hello, blank: Summary, portion: Portion) -> str:
    """Return what the masks of a sum over what devices tell are bound to: also what they are asked, and its form."""
    form = json.dumps([hello.summarise, blank.form, asdict(portion)], sort_keys=True)
    return f"{run}/preparation/{number}/{hashlib.sha256(form.encode()).hexdigest()}"


@dataclass
class _ClientSum:
    """One sum, as a client knows it.

    Attributes:
        cohort: how many begin.
        secrets: None after the last step.
        answered: by step, a digest of the message.
        made: what the last step gave.
        vector, weight, loss: of the upload; there between ``masked`` and ``revealed``.
    """

    cohort: int
    secrets: SecureClient | None
    answered: dict[Step, str] = field(default_factory=dict)
    made: dict[str, str] = field(default_factory=dict)
    vector: torch.Tensor | None = None
    weight: float = 0.0
    loss: float = float("nan")


class DeviceSums:
    """The secure sums of a run on one device, on its disk.

    Args:
        states: the file of the run's states; those of sums lie beside it, of their owner alone.
        threshold: the share of the parties that must be there at every step.
    """

    def __init__(self, states: Path, threshold: float) -> None:
        self.states, self.threshold = states, threshold

    def _place(self, party: str) -> Path:
        """Return the file of a party's secrets."""
        return sum_of(self.states, party)

    def _keys(self, party: str, ask: Ask, attempt: int, bound: str) -> Mapping[str, str]:
        """Return new keys for a sum, whose masks are ``bound`` to what it is of."""
        sums = self._read(party)
        found = sums.get(ask.sum)
        if found is None:
            if any(number > ask.sum for number in sums):
                raise SecureSumError(
                    "{party!r} was asked for keys of the sum {sum}, and has begun a later one.",
                    party=party,
                    sum=ask.sum,
                )
            cohort = _cohort(ask)
            secrets = SecureClient(party, bound, threshold_for(cohort, self.threshold))
            found = _ClientSum(cohort, secrets, made={"keys": secrets.keys().to_bytes().hex()})
            found.answered["keys"] = _digest(ask, attempt)
            self._write(party, dict(sorted({**sums, ask.sum: found}.items())[-LIVE:]))
        self._check_same(party, found, ask, attempt)
        return found.made

    def _step(
        self, party: str, ask: Ask, attempt: int, act: Callable[[_ClientSum, SecureClient], None]
    ) -> _ClientSum:
        """Take a step that follows others, or return what it gave."""
        sums = self._read(party)
        found = sums.get(ask.sum)
        if found is None:
            raise StoreError(
                "{party!r} has made no keys of the sum {sum}, or has dropped them.", party=party, sum=ask.sum
            )
        if ask.step not in found.answered:
            if found.secrets is None:
                raise SecureSumError("The sum {sum} of {party!r} is over.", sum=ask.sum, party=party)
            found.made = {}
            act(found, found.secrets)
            found.answered[ask.step] = _digest(ask, attempt)
            self._write(party, sums)
        self._check_same(party, found, ask, attempt)
        return found

    def _check_same(self, party: str, found: _ClientSum, ask: Ask, attempt: int) -> None:
        """Refuse another message of a step that was answered, and what came before the last one."""
        if found.answered[ask.step] != _digest(ask, attempt) or ask.step != list(found.answered)[-1]:
            raise SecureSumError(
                "{party!r} was asked for {step!r} of the sum {sum} again, and otherwise or too late. Each "
                "step is answered once: a mask key used twice would show what it hides.",
                party=party,
                step=ask.step,
                sum=ask.sum,
            )

    def _read(self, party: str) -> dict[int, _ClientSum]:
        """Return a party's sums by number; none, where there is no file."""
        path = self._place(party)
        if not path.exists():
            return {}
        try:
            packet = Packet.from_bytes(path.read_bytes())
            return {
                int(k): _from_plain(one, packet.tensors.get(k)) for k, one in packet.header["sums"].items()
            }
        except (OSError, UploadError, ValueError, KeyError, TypeError) as error:
            reason = getattr(error, "strerror", None) or "it is damaged"
            return self._unreadable(
                path, f"The secrets of {party!r} for secure sums cannot be read: {reason}."
            )

    def _unreadable(self, path: Path, said: str) -> dict[int, _ClientSum]:
        """Return the sums to go on with where they cannot be read; StoreError: there are none."""
        raise StoreError(
            "{said} Begin a new run, or remove {path} where it has told nothing in this one yet.",
            said=said,
            path=path.name,
        )

    def _write(self, party: str, sums: Mapping[int, _ClientSum]) -> None:
        packet = Packet(
            {"kind": "sums", "sums": {str(number): _to_plain(one) for number, one in sums.items()}},
            {str(number): one.vector for number, one in sums.items() if one.vector is not None},
        )
        try:
            write_whole(self._place(party), packet.to_bytes(), 0o600)
        except RunError as error:
            reason = getattr(error.__cause__, "strerror", None) or "the disk refused"
            raise StoreError(
                "The secrets of {party!r} for secure sums cannot be written: {why}. It takes no step until they "
                "can: free some space or check the rights.",
                party=party,
                why=reason,
            ) from error


BEFORE = "\x1fbefore the rounds: "
"""Stands, with the part of the summary, for a client, in whose place a file is: no client has such an id."""


class Preparing(DeviceSums):
    """What a device tells before the first round, in secure sums over devices.

    A device that has unmasked a sum of a part of what it tells takes part in no other one in the same run.

    Args:
        states, threshold: as for `DeviceSums`.
        portion: which portion, see `messages.Portion`.
    """

    def __init__(self, states: Path, threshold: float, portion: str) -> None:
        super().__init__(states, threshold)
        self.portion = portion

    def _place(self, party: str) -> Path:
        return sum_of(self.states, BEFORE + self.portion)

    def prepared(
        self, party: str, ask: Ask, bound: Callable[[], str], vector: Callable[[], NDArray[np.uint64]]
    ) -> tuple[dict[str, str], torch.Tensor | None]:
        """Return what comes of a step, and with ``masked`` the masked vector.

        Args:
            party: stands for the device.
            ask: the step.
            bound: says what the sum is of; all of its devices must say the same, or their masks stay.
            vector: gives what the device adds.

        Raises:
            SecureSumError: it is not the time for this step, or another sum was unmasked.
            StoreError: secrets can't be read or written.
        """

        def mask(found: _ClientSum, secrets: SecureClient) -> None:
            if secrets.round != bound():
                raise SecureSumError(
                    "This device was asked for another sum than the one that it has made keys for."
                )
            found.vector = torch.from_numpy(secrets.masked(_plain(ask.given), vector()).view(np.int64))

        if any("revealed" in one.answered for number, one in self._read(party).items() if number != ask.sum):
            raise SecureSumError(
                "This device has unmasked what it tells of its data in another sum of this run. A second sum over other "
                "devices would show by how much the two differ. Begin a new run."
            )
        if ask.step == "keys":
            return dict(self._keys(party, ask, 0, bound())), None
        acts = {"shares": _shares, "revealed": _revealed}
        found = self._step(party, ask, 0, mask if ask.step == "masked" else acts[ask.step](ask))
        return dict(found.made), found.vector if ask.step == "masked" else None


class Masking(DeviceSums):
    """The secure sums of a run's clients on one device.

    Args:
        states: as for `DeviceSums`.
        rule: clipping, range and threshold, as the device's own configuration says.
        split: makes what leaves.
        declared: zeros of what clients send along, under ``server/NAME``.

    Attributes:
        lost: what the device's owner should know of secrets that could not be read.
    """

    def __init__(self, states: Path, rule: SecureSums, split: Split, declared: Params) -> None:
        super().__init__(states, rule.threshold)
        self.rule, self.split, self.declared = rule, split, declared
        self.lost: list[str] = []

    def check(self, one: ClientOrder) -> None:
        """Raise UploadError if an order would have an upload leave without a mask, or twice."""
        steps = [ask.step for ask in one.asks]
        if one.train != ("masked" in steps) or len(set(steps)) < len(steps):
            raise UploadError(
                "Client {client!r} was asked to train, and for the steps {steps}: its method sums securely, "
                "so it trains for a masked vector alone, and takes each step once.",
                client=one.client,
                steps=steps,
            )

    def again(self, one: ClientOrder, attempt: int) -> ClientAnswer | None:
        """Return what a client answered to the same order to train, None if it has not."""
        ask = next(ask for ask in one.asks if ask.step == "masked")
        found = self._read(one.client).get(ask.sum)
        if found is None or found.vector is None or found.answered.get("masked") != _digest(ask, attempt):
            return None
        return self._answer(one.client, found)

    def masked(self, one: ClientOrder, attempt: int, answer: ClientAnswer) -> ClientAnswer:
        """Return an answer with a masked vector in the place of its upload.

        Raises:
            SecureSumError: it is not the time for it, shares were changed, or a number is out of range.
            StoreError: the disk is full or can't be written.
        """
        upload, ask = answer.upload, next(ask for ask in one.asks if ask.step == "masked")
        if upload is None:
            return answer

        def mask(found: _ClientSum, secrets: SecureClient) -> None:
            vectors = Vectors(self.rule, {**one.sent.params, **self.declared}, found.cohort)
            masked = secrets.masked(_plain(ask.given), vectors.vector(upload))
            found.vector = torch.from_numpy(masked.view(vectors.ring.signed))
            found.weight, found.loss = upload.weight, answer.loss

        return self._answer(one.client, self._step(one.client, ask, attempt, mask))

    def made(self, one: ClientOrder, attempt: int) -> Iterator[tuple[Step, Mapping[str, str]]]:
        """Yield what comes of an order's other steps, one after the other: what a step gave counts if the next fails.

        Raises:
            SecureSumError, StoreError: as for ``masked``.
        """
        client, acts = one.client, {"shares": _shares, "revealed": _revealed}
        for ask in one.asks:
            if ask.step == "keys":
                yield ask.step, self._keys(client, ask, attempt, about(self.states.stem, ask.sum))
            elif ask.step != "masked":
                yield ask.step, self._step(client, ask, attempt, acts[ask.step](ask)).made

    def _answer(self, client: str, found: _ClientSum) -> ClientAnswer:
        assert found.vector is not None
        return ClientAnswer(
            client=client,
            loss=found.loss,
            upload=self.split.arrived({VECTOR: found.vector}, found.weight, {}),
        )

    def _unreadable(self, path: Path, said: str) -> dict[int, _ClientSum]:
        """Remove secrets that cannot be read: the client makes new keys for the next sum."""
        with raising(
            StoreError,
            "{said} Nor can they be removed: {why}. Check the rights, or remove {name}.",
            OSError,
            said=said,
            name=path.name,
        ):
            path.unlink()
        self.lost.append(
            f"{said} They are removed: it sits out the sums that they were of, and makes new ones for later sums."
        )
        return {}


def _cohort(ask: Ask) -> int:
    """Return how many clients begin."""
    told = ask.given.get("clients", "")
    if not re.fullmatch("[0-9]{1,9}", told) or int(told) < LEAST:  # more have no room in the ring
        raise SecureSumError(
            "A sum begins with at least {least} clients, fewer than 10^9; the server said {got!r}.",
            least=LEAST,
            got=told[:20],
        )
    return int(told)


def _shares(ask: Ask) -> Callable[[_ClientSum, SecureClient], None]:
    def act(found: _ClientSum, secrets: SecureClient) -> None:
        keys = {name: Keys.from_bytes(content) for name, content in _plain(ask.given).items()}
        if len(keys) > found.cohort:
            raise SecureSumError(
                "Keys of {count} clients came, and {cohort} were to begin.",
                count=len(keys),
                cohort=found.cohort,
            )
        found.made = {name: box.hex() for name, box in secrets.shares(keys).items()}

    return act


def _revealed(ask: Ask) -> Callable[[_ClientSum, SecureClient], None]:
    def act(found: _ClientSum, secrets: SecureClient) -> None:
        shares = secrets.revealed(list(ask.given))
        found.made = {SEEDS + name: share.hex() for name, share in shares.seeds.items()}
        found.made |= {KEYS + name: share.hex() for name, share in shares.keys.items()}
        found.secrets, found.vector = None, None

    return act


def revealed_of(made: Mapping[str, str]) -> Revealed:
    """Return the shares that a party reveals; ValueError: they are no hexadecimal text."""
    shares = {name: bytes.fromhex(share) for name, share in made.items()}
    return Revealed(
        seeds={name.removeprefix(SEEDS): share for name, share in shares.items() if name.startswith(SEEDS)},
        keys={name.removeprefix(KEYS): share for name, share in shares.items() if name.startswith(KEYS)},
    )


def _plain(given: Mapping[str, str]) -> dict[str, bytes]:
    with raising(SecureSumError, "What came for a step of a secure sum is no hexadecimal text.", ValueError):
        return {name: bytes.fromhex(text) for name, text in given.items()}


def _digest(ask: Ask, attempt: int) -> str:
    text = json.dumps([ask.step, ask.sum, sorted(ask.given.items()), attempt])
    return hashlib.sha256(text.encode()).hexdigest()


def _to_plain(one: _ClientSum) -> dict[str, Any]:
    secrets = None if one.secrets is None else one.secrets.to_plain()
    loss = one.loss.hex()  # JSON has no NaN
    return {
        "cohort": one.cohort,
        "secrets": secrets,
        "answered": list(one.answered.items()),
        "made": one.made,
        "weight": one.weight,
        "loss": loss,
    }


def _from_plain(plain: Mapping[str, Any], vector: torch.Tensor | None) -> _ClientSum:
    secrets = None if plain["secrets"] is None else SecureClient.from_plain(plain["secrets"])
    loss = float.fromhex(plain["loss"])
    return _ClientSum(
        plain["cohort"], secrets, dict(plain["answered"]), plain["made"], vector, plain["weight"], loss
    )
