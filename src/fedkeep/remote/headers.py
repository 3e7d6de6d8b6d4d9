"""Headers of messages, checked as they are read, and those messages that are a header alone."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedkeep.core.errors import UploadError
from fedkeep.remote.packet import Packet

PROTOCOL = 2  # of the messages; server and device must speak the same
Count = Annotated[int, Field(ge=0, lt=2**63)]


class Header(BaseModel):
    """Knows all its keys; ``"3"`` is no number, ``true`` is no 1."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


H = TypeVar("H", bound=Header)


class Hello(Header):
    """The first message to a node: which run, which experiment.

    Attributes:
        protocol: ``PROTOCOL``.
        run: the run's id.
        code: ``fingerprint.code()`` of the server: version and digest of the installed source.
        experiment: the configuration's text, the server's ``[data]`` reader left out.
        seed: what devices' streams follow: the run's, or another where devices must not know it.
        simulated_noise: noise on uploads follows the seed too (tests alone); else it comes from the system.
        continue_from: the id of a run whose private states this one begins with; empty: none.
        summarise: what the device is asked to tell of its data for the encoding; None: it is not asked.
    """

    kind: Literal["hello"] = "hello"
    protocol: int
    run: str
    code: str
    experiment: str
    seed: int
    simulated_noise: bool = False
    continue_from: str = ""
    summarise: dict[str, Any] | None = None


class Here(Header):
    """A node's answer to ``Hello``: whose data it has, and what it tells of them."""

    kind: Literal["here"] = "here"
    run: str
    clients: list[str]
    summary: dict[str, Any] | None = None


class Named(Header):
    """A version of what a client keeps, as in ``ClientOrder``."""

    version: Count
    attempt: Count
    share: Annotated[float, Field(ge=0, le=1)]


class Encode(Header):
    """The second message: how data become numbers, and what the experiment must be; sent again to a node that joins.

    Attributes:
        run: the run's id.
        hello: the first message, as a node may be another process by now.
        encoding: as JSON.
        fingerprint: a digest of each part, ``fingerprint.parts``.
        versions: with ``hello.continue_from`` those of the node's clients that its server accepted last.
    """

    kind: Literal["encoding"] = "encoding"
    run: str
    hello: Hello
    encoding: dict[str, Any]
    fingerprint: dict[str, str]
    versions: dict[str, Named] = {}


class Fits(Header):
    """A node's answer to ``Encode``: the clients that take part, each with its numbers of examples by partition.

    ``unfit`` are those whose data cannot be used.
    """

    kind: Literal["fits"] = "fits"
    run: str
    clients: dict[str, dict[str, int]]
    unfit: list[str] = []


UNFIT = "Its data cannot be used: they are damaged or do not fit. Its own log says more."
"""What the server is told of clients whose data cannot be used."""


class Refused(Header):
    """A node's answer to a message that it does not serve; nothing has changed there.

    ``busy``: an earlier message is still being served there; this one, said again later, may be. ``failed``: the method
    or the model failed on it.
    """

    kind: Literal["refused"] = "refused"
    run: str
    reason: str
    busy: bool = False
    failed: bool = False


def told(header: Header) -> Packet:
    """Return a packet of a header alone."""
    return Packet(header.model_dump(mode="json"))


def header_of(packet: Packet, kind: type[H]) -> H:
    """Return a packet's header, checked.

    Raises:
        UploadError: it is of another kind, or a field is missing, unknown or of another type; names the first.
    """
    try:
        return kind.model_validate(dict(packet.header))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "header"
        raise malformed(str(packet.header.get("kind"))[:20], f"{place}: {first['msg']}") from error


def malformed(message: str, fault: str) -> UploadError:
    """Return the error that a message is refused with."""
    return UploadError(f"A message {message!r} was refused: {fault}.")
