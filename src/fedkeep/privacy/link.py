"""The contract of an upload chain's links."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from fedkeep.core.errors import UploadError
from fedkeep.core.params import Params
from fedkeep.privacy.draws import Draw


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """What a link makes on the client.

    Attributes:
        tensors: what travels instead of the link's input.
        state: the client's new state of the link; it is kept beside private values and never leaves.
        report: numbers for the server's state of the link, apart from the upload's tensors; no other link sees them.
    """

    tensors: Params
    state: Params = field(default_factory=dict)
    report: Params = field(default_factory=dict)


@dataclass(frozen=True)
class Link:
    """A link of the upload chain, a frozen value: ``encode`` runs on the client, ``decode`` on the server.

    The links of ``Method.upload`` encode in order and decode in the opposite order, one client at a time, before the
    uploads are combined. None sees a private parameter. A link without state overrides ``encode``, and ``decode`` where
    that has to be undone. A state of a federated tensor's own name has its shape; where a client holds some rows of a
    table, it is given those rows of the state.

    Attributes:
        rowwise: encoding some rows of a table equals those rows of the encoded table, if the others don't change; so a
            client may leave out the rows that its examples don't use.
        reveals: patterns of what leaves that is made of the client's state of the link, see ``methods.reveals``.
    """

    rowwise: ClassVar[bool] = False
    reveals: ClassVar[tuple[str, ...]] = ()

    def client_state(self, shapes: Params) -> Params:
        """Return a new client's state.

        Args:
            shapes: tensors of the names, shapes and types of what ``encode`` will be given; their values mean nothing.
        """
        return {}

    def server_state(self, shapes: Params) -> Params:
        """Return the server's state before the first round, given the same as ``client_state``."""
        return {}

    def sent(self, state: Params) -> Params:
        """Return what of the server's state every client of the round is sent."""
        return {}

    def encode(self, tensors: Params, start: Params, draw: Draw, state: Params, sent: Params) -> Encoded:
        """Return what travels instead of ``tensors``, and the client's new state.

        Args:
            tensors: changes by federated name, or what the link before made of them; tables are cut to the rows that
                the client uploads.
            start: the federated parameters as the server sent them, cut likewise.
            draw: the client's random numbers for this link and round.
            state: the client's state of this link; it is not changed in place.
            sent: what the server sent of its own.
        """
        raise TypeError(f"{type(self).__name__} is no link: it lacks encode.")

    def decode(self, tensors: Params, start: Params, sent: Params) -> Params:
        """Return what ``encode`` was given, or the server's best account of it: by default what arrived.

        Args:
            tensors: what arrived, decoded by the later links.
            start: as for ``encode``.
            sent: what this client was sent.

        Raises:
            UploadError: the tensors cannot be decoded, e.g. a name is missing or a shape is wrong.
        """
        return tensors

    @staticmethod
    def pair(name: str, tensors: Params, *endings: str) -> list[Tensor]:
        """Return what of a tensor arrived under its name with each of these endings; UploadError: one is missing."""
        for ending in endings:
            if name + ending not in tensors:
                raise UploadError(
                    "{name!r} is missing",
                    name=name + ending,
                )
        return [tensors[name + ending] for ending in endings]

    def check_report(self, report: Params) -> None:
        """Raise UploadError unless a client's report is one that ``encode`` can make."""
        if report:
            raise UploadError(
                "{type} makes no report, and {name!r} came",
                type=type(self).__name__,
                name=next(iter(report)),
            )

    def update(self, state: Params, reports: Params, count: int) -> Params:
        """Return the server's state after a round.

        Args:
            state: before it.
            reports: sums of the reports of the clients whose uploads were accepted, by name.
            count: how many these are; at least 1.
        """
        return state
