"""A device's node: Flower's SuperNode, with fedkeep's own ClientApp in place of whatever a bundle brings.

The node's own configuration has a table for it, beside ``[device]`` and ``[data]``::

    [link]
    address = "link.example.org:8443"
    certificate = "ca.pem"            # of the authority that signed the link's certificate
    key = "clinic-a.key"              # this node's private key; the link knows the public one
    trusted = ["signer.pub"]          # whose projects this device answers
    port = 9094                       # of this machine alone: SuperNode and ClientApp talk there

Paths are looked up beside the configuration.
"""

from __future__ import annotations

import email.utils
import os
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from pydantic import Field

from fedkeep.core.errors import ConfigError, first_line, raising
from fedkeep.experiments.config import parse_toml, read_text
from fedkeep.experiments.config_tables import Strict, made_of
from fedkeep.flower import guard
from fedkeep.flower.keys import check_certificate
from fedkeep.flower.processes import (
    check_port,
    check_proxies,
    check_reachable,
    listed,
    past_proxies,
    proxy_before,
)
from fedkeep.flower.project import NODE_CONFIG
from fedkeep.flower.signed import public_key

AHEAD, BEHIND = 5.0, 305.0  # seconds that Flower 1.41 lets a node's clock differ


class LinkConfig(Strict):
    """The table ``[link]`` of a node's configuration."""

    address: str
    certificate: str
    key: str
    trusted: Annotated[list[str], Field(min_length=1)]
    port: Annotated[int, Field(ge=1, le=65535)] = 9094


@dataclass(frozen=True, kw_only=True)
class SuperNode:
    """A node that can be started.

    Attributes:
        config: the path of its configuration.
        link: the table ``[link]``.
        home: a folder of Flower's own on this device.
    """

    config: Path
    link: LinkConfig
    home: Path

    @classmethod
    def read(cls, path: Path, home: Path) -> SuperNode:
        """Read a node's configuration.

        Raises:
            ConfigError: there is none, or its table ``[link]`` is missing or wrong; all faults are named.
        """
        table = parse_toml(read_text(path), str(path)).get("link", {})
        link: LinkConfig = made_of(LinkConfig, table, str(path), "link")
        return cls(config=path.resolve(), link=link, home=home.resolve())

    def check(self) -> None:
        """Look at all that a node needs before anything is started.

        Raises:
            ConfigError: a key or a certificate is missing, wrong or expired, the port is in use, there is no link, it
                is not the link that the certificate speaks for, or this machine's clock differs from the link's.
        """
        for _, look in self.looks():
            look()

    def looks(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """Yield what ``check`` looks at, each by its name; a function raises ConfigError, or says what it has found."""
        yield "certificate", self._certificate
        yield "key", self._key
        yield "trusted keys", self._trusted
        yield "port", self._port
        yield "link and clock", self._link

    def _certificate(self) -> str:
        check_certificate(self._beside(self.link.certificate))
        return f"{self.link.certificate} is valid now"

    def _key(self) -> str:
        _check_key(self._beside(self.link.key))
        return f"{self.link.key} can be used; whether the link knows it shows when the node joins"

    def _trusted(self) -> str:
        for path in self.link.trusted:
            _check_trusted(self._beside(path))
        return f"projects are answered that {' or '.join(self.link.trusted)} has signed"

    def _port(self) -> str:
        check_port(self.link.port, "this node", f"Name another in {self.config.name}: port = ... in [link].")
        return f"{self.link.port} of this machine is free"

    def _link(self) -> str:
        check_proxies()
        proxy = proxy_before(self.link.address)
        if not proxy:
            check_reachable(self.link.address)
        self._check_link(proxy)
        return f"{self.link.address} is there, and this machine's clock is right"

    def command(self) -> list[str]:
        """Return the command that starts the node."""
        return [
            *guard.started_by(guard.NODE),
            "--superlink",
            self.link.address,
            "--root-certificates",
            str(self._beside(self.link.certificate)),
            "--auth-supernode-private-key",
            str(self._beside(self.link.key)),
            "--port",
            str(self.link.port),
            "--node-config",
            f"{NODE_CONFIG}='{self.config}'",
        ]

    def environment(self) -> dict[str, str]:
        """Return the environment that the command needs.

        Raises:
            ConfigError: a path holds a sign by which another one would be taken.
        """
        if "'" in str(self.config):
            raise ConfigError(
                "A node configuration's path holds no quotation mark, for Flower's sake; got {config}.",
                config=self.config,
            )
        ours = {
            guard.TRUSTED: listed(map(self._beside, self.link.trusted)),
            **past_proxies(),
            "FLWR_HOME": str(self.home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }
        return {**os.environ, **ours}

    def _beside(self, path: str) -> Path:
        return (self.config.parent / path).resolve()

    def _check_link(self, proxy: str) -> None:
        """Ask the link for its health, by the certificate that the node trusts, and compare clocks."""
        import httpx

        trusted = ssl.create_default_context(cafile=self._beside(self.link.certificate))
        try:
            answer = httpx.get(
                f"https://{self.link.address}/health", verify=trusted, timeout=10, trust_env=bool(proxy)
            )
        except httpx.HTTPError as error:
            through = (
                f" It was asked through the proxy {proxy} of the environment; if it is reached without, name its host "
                f"in no_proxy."
                if proxy
                else ""
            )
            raise ConfigError(
                "The link at {address} is not the one that {certificate} speaks for, or speaks no "
                "TLS: {why}.{through}",
                address=self.link.address,
                certificate=self.link.certificate,
                why=first_line(error),
                through=through,
            ) from error
        check_clock(answer.headers.get("date", ""), time.time())


def trusted_by(config: Path) -> list[Path]:
    """Return the public keys that a device's configuration trusts.

    Raises:
        ConfigError: its table ``[link]`` is missing or wrong.
    """
    node = SuperNode.read(config, config.parent)
    return [node._beside(path) for path in node.link.trusted]


def check_clock(told: str, now: float) -> None:
    """Raise ConfigError if the link's time, as HTTP writes it, is so far from ours that it would refuse our name."""
    try:
        link = email.utils.parsedate_to_datetime(told).timestamp()
    except (ValueError, TypeError):
        return  # a proxy that tells no time
    ahead = now - link
    if not -BEHIND < ahead < AHEAD + 1:  # HTTP's time has whole seconds
        side = "ahead of" if ahead > 0 else "behind"
        raise ConfigError(
            "This machine's clock is {seconds:.0f} seconds {side} the link's; Flower allows {ahead:.0f} ahead and "
            "{behind:.0f} behind. Set the clock (timedatectl set-ntp true).",
            seconds=abs(ahead),
            side=side,
            ahead=AHEAD,
            behind=BEHIND,
        )


def _check_key(path: Path) -> None:
    with (
        raising(
            ConfigError,
            "link.key: {path} is no private key in OpenSSH's form without a password.",
            ValueError,
            TypeError,
            UnsupportedAlgorithm,
            path=path,
        ),
        raising(ConfigError, "link.key: there is no key {path}: {why}.", OSError, path=path),
    ):
        key = load_ssh_private_key(path.read_bytes(), password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(
            "link.key: {path} is no key on a NIST curve. Make one with fedkeep flower init.", path=path
        )


def _check_trusted(path: Path) -> None:
    with raising(ConfigError, "link.trusted: {why}", ConfigError):
        public_key(path)
