"""Signed projects: a device answers only for a bundle that a key it trusts has signed.

Flower 1.41 checks signatures of bundles that its own platform hands out, but a link of your own gives bundles from disk
without any. So a project carries our signature (Ed25519) of names and contents of all its files, in
``fedkeep-signature.json``. Devices check it in ``fedkeep.flower.guard``; nothing of a bundle is ever run there.

``clients.toml`` says which clients live at which node:

    [clients]
    north = ["anna", "north-*"]

Names of nodes are those of their keys; clients are named, or met by globs. A client that is named somewhere is met by no glob.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path, PurePosixPath

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from fedkeep.core.errors import ConfigError, RunError, did_you_mean, first_line
from fedkeep.core.files import write_whole
from fedkeep.experiments.config import parse_toml, read_text
from fedkeep.flower.inner import bundle_of
from fedkeep.flower.keys import RESERVED
from fedkeep.remote.client_ledger import Listed

SIGNATURE = "fedkeep-signature.json"
PUBLISHER = "publisher.json"
"""Names the key that signs what a run of the project publishes."""
NODES = "nodes.json"
"""Names nodes by their keys, for whoever reads."""
LARGEST = 16 << 20  # bytes of all files of a bundle; Flower's own limit for the packed bundle is 10 MiB


def sign_project(project: Path, key: Path) -> None:
    """Write the signature of a Flower project beside its files, and what it names of the keys beside ``key``.

    ``publisher.json`` has the public key that signs what runs publish, ``nodes.json`` those of the nodes, by name.

    Raises:
        ConfigError: there is no such key, or the project is none that Flower can bundle, holds a server's run, or lists
            clients of a node that has no key.
    """
    signer, publisher = private_key(key), key.with_name("publisher.pub")
    if (listed := project / CLIENTS).exists():
        clients_by_node(read_text(listed), named_keys(key.parent), str(listed))
    if nodes := named_keys(key.parent):
        write_whole(project / NODES, json.dumps(nodes, indent=1).encode() + b"\n")
    if publisher.exists():
        public_key(publisher)
        content = {"ed25519": publisher.read_text(encoding="utf-8").strip()}
        write_whole(project / PUBLISHER, json.dumps(content).encode() + b"\n")
    bundle = _bundle(project)
    _check_no_run(project, bundle)
    signature = base64.b64encode(signer.sign(_statement(_hashes(_files(bundle))))).decode()
    write_whole(project / SIGNATURE, json.dumps({"ed25519": signature}).encode() + b"\n")


def _bundle(project: Path) -> bytes:
    with _home(project):
        try:
            return bundle_of(project)
        except (ValueError, OSError) as error:
            raise ConfigError(
                "{project} cannot be bundled by Flower: {why}", project=project, why=first_line(error)
            ) from error


@dataclass(frozen=True)
class Signed:
    """A project as its signature names it, without most of what is in it.

    Attributes:
        hashes: SHA-256 of each file, by name.
        contents: the texts of its configurations, and of ``publisher.json``.
        signature: of the hashes, in base64.
    """

    hashes: Mapping[str, str]
    contents: Mapping[str, str]
    signature: str

    @classmethod
    def of(cls, project: Path) -> Signed:
        """Return a signed project's.

        Raises:
            ConfigError: it is none that Flower can bundle, or nobody has signed it.
        """
        bundle = _bundle(project)
        files, signature = _files(bundle), _signature(bundle)
        if signature is None:
            raise ConfigError(
                "{project} is not signed: fedkeep flower init, in the folder above it.", project=project
            )
        wanted = {
            n: c.decode()
            for n, c in files.items()
            if (n.endswith(".toml") and n != CLIENTS) or n == PUBLISHER
        }
        return cls(_hashes(files), wanted, base64.b64encode(signature).decode())

    def check(self, trusted: Iterable[Path]) -> dict[str, bytes]:
        """Return its contents by name.

        Raises:
            RunError: no key that is trusted has signed it, or a content is not the one that was signed.
            ConfigError: one of the keys is none.
        """
        contents = {name: text.encode() for name, text in self.contents.items()}
        if any(self.hashes.get(name) != one for name, one in _hashes(contents).items()):
            raise RunError("The project's files are not those that were signed.")
        _verify([public_key(path) for path in trusted], self.hashes, base64.b64decode(self.signature))
        return contents


@contextmanager
def _home(folder: Path) -> Iterator[None]:
    """Tell Flower of a folder for its own files, which it wants to know where it is imported: HOME may not be set."""
    given = os.environ.get("FLWR_HOME")
    os.environ["FLWR_HOME"] = given or str(folder / ".flwr")
    try:
        yield
    finally:
        if given is None:
            del os.environ["FLWR_HOME"]
        else:
            os.environ["FLWR_HOME"] = given


def _check_no_run(project: Path, bundle: bytes) -> None:
    """Raise ConfigError if a bundle, which goes to every device, holds the folder of a server's run."""
    with zipfile.ZipFile(BytesIO(bundle)) as files:
        for name in files.namelist():
            if PurePosixPath(name).name == "run.json" and _is_run(files.read(name)):
                place = str(PurePosixPath(name).parent)
                raise ConfigError(
                    "{project} holds the run {place!r}: every device would get the run's secrets, and the signature "
                    "would not fit after its next round. Name its folder in {file}, or keep runs "
                    "elsewhere.",
                    project=project,
                    place=place,
                    file=project / ".gitignore",
                )


def _is_run(content: bytes) -> bool:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and {"run", "seal"} <= found.keys()


def check_signed(bundle: bytes, trusted: Iterable[Path]) -> dict[str, bytes]:
    """Return the signed files of a bundle, by name.

    Raises:
        RunError: none of the public keys that are trusted has signed them, or it is no bundle.
        ConfigError: one of the keys is none.
    """
    keys = [public_key(path) for path in trusted]
    try:
        files, signature = _files(bundle), _signature(bundle)
    except (zipfile.BadZipFile, ValueError, KeyError, TypeError, NotImplementedError, OSError) as error:
        raise RunError("The bundle cannot be read: {why}.", why=first_line(error)) from error
    if signature is None:
        raise RunError(
            "This device refuses a project that nobody has signed. Sign it with fedkeep flower init DIR, by "
            "a key that the device trusts."
        )
    _verify(keys, _hashes(files), signature)
    return files


def _verify(keys: Sequence[Ed25519PublicKey], hashes: Mapping[str, str], signature: bytes) -> None:
    if not any(is_signed(key, _statement(hashes), signature) for key in keys):
        raise RunError(
            "This device refuses the project: no key that it trusts has signed these files. Sign it with fedkeep flower "
            "init DIR after the last change."
        )


def is_signed(key: Ed25519PublicKey, statement: bytes, signature: bytes) -> bool:
    """Tell whether a key has signed a statement."""
    try:
        key.verify(signature, statement)
    except InvalidSignature:
        return False
    return True


def _files(bundle: bytes) -> dict[str, bytes]:
    """Return what is signed: all files of a bundle by name, but for Flower's list and the signature."""
    with zipfile.ZipFile(BytesIO(bundle)) as files:
        names = sorted(n for n in files.namelist() if n != SIGNATURE and not n.startswith(".info/"))
        if len(set(names)) < len(names):
            raise ValueError("it holds a file twice")
        if sum(info.file_size for info in files.infolist()) > LARGEST:
            raise ValueError(f"its files take more than {LARGEST:,} bytes")
        return {name: files.read(name) for name in names}


def _hashes(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def _statement(hashes: Mapping[str, str]) -> bytes:
    return b"fedkeep project\n" + json.dumps(dict(hashes), sort_keys=True).encode()


def _signature(bundle: bytes) -> bytes | None:
    with zipfile.ZipFile(BytesIO(bundle)) as files:
        if SIGNATURE not in files.namelist():
            return None
        return base64.b64decode(json.loads(files.read(SIGNATURE))["ed25519"], validate=True)


def named_keys(folder: Path) -> dict[str, str]:
    """Return the public keys of nodes in a folder of keys, by name, in OpenSSH's form."""
    paths = (path for path in sorted(folder.glob("*.pub")) if path.stem not in RESERVED)
    return {path.stem: path.read_text(encoding="utf-8").strip() for path in paths}


def node_names(path: Path) -> dict[str, str]:
    """Return the names of nodes by what stands for their keys at the link: a project's ``nodes.json``, if it has one.

    Raises:
        ConfigError: it is damaged.
    """
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
        keys = {name: load_ssh_public_key(text.encode()) for name, text in found.items()}
    except (ValueError, TypeError, AttributeError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            "{path} is damaged: {why}. Sign the project again.", path=path, why=first_line(error)
        ) from error
    form = Encoding.PEM, PublicFormat.SubjectPublicKeyInfo  # as Flower's link has them
    return {key.public_bytes(*form).hex(): name for name, key in keys.items()}


def private_key(path: Path) -> Ed25519PrivateKey:
    """Return a key that signs.

    Raises:
        ConfigError: there is none, or it is no Ed25519 key.
    """
    try:
        key = load_ssh_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise _no_key(path, error) from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            "{path} is no private key in OpenSSH's form without a password.", path=path
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(
            "{path} is no Ed25519 key; projects are signed by signer.key, publications by publisher.key.",
            path=path,
        )
    return key


def _no_key(path: Path, error: OSError) -> ConfigError:
    return ConfigError("There is no key {path}: {why}.", path=path, why=error.strerror)


def public_key(path: Path) -> Ed25519PublicKey:
    """Return a key whose signatures are trusted.

    Raises:
        ConfigError: there is none, or it is no public key that signs projects.
    """
    try:
        key = load_ssh_public_key(path.read_bytes())
    except OSError as error:
        raise _no_key(path, error) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError("{path} is no public key in OpenSSH's form.", path=path) from error
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(
            "{path} is no Ed25519 key; a device trusts the signer.pub of a folder of keys.", path=path
        )
    return key


CLIENTS = "clients.toml"


def clients_by_node(text: str, nodes: Collection[str], where: str = CLIENTS) -> dict[str, list[str]]:
    """Return names and globs of clients by the name of their node.

    Args:
        text: of the file.
        nodes: the names of those that have keys.
        where: the file's name, for messages.

    Raises:
        ConfigError: it is wrong, or names a node that has no key, or a client twice.
    """
    content = parse_toml(text, where)
    table = content.get("clients")
    if set(content) != {"clients"} or not isinstance(table, Mapping) or not table:
        raise ConfigError(
            "{where}: wanted one table [clients], with a line for each node: north = ['anna', 'north-*']; got "
            "{there}.",
            where=where,
            there=", ".join(content) or "nothing",
        )
    found, taken = dict[str, list[str]](), dict[str, str]()
    for node, names in table.items():
        if node not in nodes:
            raise ConfigError(
                "{where}: clients.{node}: no node of that name has a key; known are {nodes}."
                "{near} Add it: fedkeep flower init DIR --node {node}.",
                where=where,
                node=node,
                nodes=", ".join(sorted(nodes)) or "none",
                near=did_you_mean(node, nodes),
            )
        if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
            raise ConfigError(
                "{where}: clients.{node}: wanted a list of names and globs of clients; got {names!r}.",
                where=where,
                node=node,
                names=names,
            )
        for name in names:
            if taken.setdefault(name, node) != node:
                raise ConfigError(
                    "{where}: {name!r} is listed for {taken} and for {node}. Take it out of one.",
                    where=where,
                    name=name,
                    taken=taken[name],
                    node=node,
                )
        found[node] = list(names)
    return found


def listed_in(project: Path, keys: Mapping[str, str]) -> Listed | None:
    """Return which clients a project lists for which node's key; None: it lists none.

    Args:
        project: its folder.
        keys: the names of nodes by what stands for their keys at the link.

    Raises:
        ConfigError: as for ``clients_by_node``.
    """
    path = project / CLIENTS
    if not path.exists():
        return None
    found = clients_by_node(read_text(path), keys.values(), str(path))
    return Listed({key: found[name] for key, name in keys.items() if name in found})
