"""Keys and certificates of a deployment: who the link is, which nodes may join, and whose projects devices answer.

A folder of keys holds ``ca.pem`` and ``ca.key`` (our own authority), ``link.pem`` and ``link.key`` (the link's
certificate), ``NAME.key`` and ``NAME.pub`` of each node (P-384, as Flower wants them), ``signer.key`` and ``signer.pub``
(Ed25519, for projects), and ``publisher.key`` and ``publisher.pub`` (Ed25519, for what a run publishes). Files that end in ``.key`` are private: 0600, and only on the machine that uses
them. So of a pair the public part alone may be here.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedkeep.core.errors import ConfigError, raising
from fedkeep.core.files import write_whole

DAYS = 365
LOOPBACK = ("localhost", "127.0.0.1")
"""Stand in every link's certificate: the process that starts server apps reaches the link so, whatever its name is."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,60}")
RESERVED = ("ca", "link", "signer", "publisher")
HOST = re.compile(r"[A-Za-z0-9_*][A-Za-z0-9._*-]*")
_PrivateKey = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


def make_keys(folder: Path, *, hosts: Sequence[str], nodes: Sequence[str], days: int = DAYS) -> None:
    """Write all keys and certificates of a deployment; files that are there are kept, so nodes can be added later.

    Where a public key or a certificate is there without its private key, that one was taken to another machine, and no
    other pair is made. Where a stop has left a private key alone, its public part is made.

    Args:
        folder: where.
        hosts: names and addresses by which nodes reach the link; its certificate holds them, and loopback.
        nodes: names of the nodes.
        days: how long certificates are valid.

    Raises:
        ConfigError: a node's name or a host is no such thing, the link's certificate is there and lacks a host, a file
            that is needed was taken away, or one is no key.
    """
    for name in nodes:
        if not NAME.fullmatch(name) or name in RESERVED:
            raise ConfigError(
                "A node's name is letters, digits, '.', '_' and '-', and not {reserved}; got {name!r}.",
                reserved=", ".join(RESERVED),
                name=name,
            )
    names = [_host(host) for host in dict.fromkeys([*hosts, *LOOPBACK])]
    _check_there(folder, hosts)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not (folder / "ca.pem").exists():
        _write_authority(folder, days)
    if not (folder / "link.pem").exists():
        _write_link(folder, names, days)
    for name in nodes:
        _write_pair(folder, name, lambda: ec.generate_private_key(ec.SECP384R1()))
    for name in ("signer", "publisher"):
        _write_pair(folder, name, ed25519.Ed25519PrivateKey.generate)


def _check_there(folder: Path, hosts: Sequence[str]) -> None:
    """Raise ConfigError unless what is there can stay, and what is not can be made beside it."""
    certificate, authority = folder / "link.pem", folder / "ca.pem"
    own = (folder / "ca.key").exists()
    if not certificate.exists():
        if authority.exists() and not own:
            raise ConfigError(
                "{authority} is there, and its key ca.key is not: it must sign the link's certificate. Bring the key "
                "back, or take another folder.",
                authority=authority,
            )
        return
    if not authority.exists() and not own:
        raise ConfigError(
            "{certificate} is there, and the ca.pem of who signed it is not. Bring it back, or take another folder.",
            certificate=certificate,
        )
    there = _names_of(certificate)
    lacking = [host for host in hosts if str(_host(host).value).lower() not in map(str.lower, there)]
    if lacking:
        raise ConfigError(
            "{certificate} speaks for {there}, and not for {lacking}. For another, "
            "move link.pem and link.key away and name all hosts; ca.key must be there to sign it.",
            certificate=certificate,
            there=", ".join(there),
            lacking=", ".join(map(repr, lacking)),
        )


def _names_of(path: Path) -> list[str]:
    """Return the names and addresses that a certificate speaks for."""
    try:
        found = _certificate_in(path).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in found.value]


def _write_authority(folder: Path, days: int) -> None:
    key, name = _elliptic(folder / "ca.key"), _named("fedkeep deployment")
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        _certificate(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    write_whole(folder / "ca.pem", certificate.public_bytes(Encoding.PEM))


def _write_link(folder: Path, names: Sequence[x509.GeneralName], days: int) -> None:
    authority, issuer = _elliptic(folder / "ca.key"), _certificate_in(folder / "ca.pem")
    key = _elliptic(folder / "link.key")
    certificate = (
        _certificate(_named("fedkeep link"), issuer.subject, key.public_key(), days)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False
        )
        .sign(authority, hashes.SHA384())
    )
    write_whole(folder / "link.pem", certificate.public_bytes(Encoding.PEM))


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))  # a device's clock may be a little behind
        .not_valid_after(now + timedelta(days=days))
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not HOST.fullmatch(host):
        raise ConfigError(
            "A host is a name or an address in ASCII; got {host!r}. Leave out port and path.",
            host=host,
        )
    return x509.DNSName(host)


def _write_pair(folder: Path, name: str, make: Callable[[], _PrivateKey]) -> None:
    if (folder / f"{name}.pub").exists():
        return
    key = _private(folder / f"{name}.key", make, PrivateFormat.OpenSSH)
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    write_whole(folder / f"{name}.pub", public + b"\n")


def _elliptic(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return the key of a certificate, made where there is none."""
    key = _private(path, lambda: ec.generate_private_key(ec.SECP384R1()), PrivateFormat.PKCS8)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise _no_key(path)
    return key


def _private(path: Path, make: Callable[[], _PrivateKey], form: PrivateFormat) -> _PrivateKey:
    """Return the private key of a file, made and written where there is none: before its public part."""
    if not path.exists():
        key = make()
        write_whole(path, key.private_bytes(Encoding.PEM, form, NoEncryption()), 0o600)
        return key
    load = load_ssh_private_key if form is PrivateFormat.OpenSSH else load_pem_private_key
    try:
        found = load(path.read_bytes(), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise _no_key(path) from error
    if not isinstance(found, ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey):
        raise _no_key(path)
    return found


def _no_key(path: Path) -> ConfigError:
    return ConfigError("{path} is no key that fedkeep made. Move it away, or take another folder.", path=path)


def check_certificate(path: Path, now: datetime | None = None) -> None:
    """Raise ConfigError unless a file holds a certificate that is valid now."""
    now = now or datetime.now(UTC)
    certificate = _certificate_in(path)
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < begins:
        raise ConfigError(
            "The certificate {path} is valid from {begins:%Y-%m-%d %H:%M} UTC on, and this machine's clock says "
            "{now:%Y-%m-%d %H:%M}. Set the clock.",
            path=path,
            begins=begins,
            now=now,
        )
    if now > ends:
        raise ConfigError(
            "The certificate {path} expired at {ends:%Y-%m-%d %H:%M} UTC. Make new ones with fedkeep flower init in "
            "a new folder, or set this machine's clock if it is wrong.",
            path=path,
            ends=ends,
        )


def _certificate_in(path: Path) -> x509.Certificate:
    with (
        raising(ConfigError, "{path} is no certificate.", ValueError, path=path),
        raising(ConfigError, "There is no certificate {path}: {why}.", OSError, path=path),
    ):
        return x509.load_pem_x509_certificate(path.read_bytes())
