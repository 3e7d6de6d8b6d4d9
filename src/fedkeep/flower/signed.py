"""Signed projects: a device answers only for a bundle that a key it trusts has signed.

Flower 1.41 checks signatures of bundles that its own platform hands out, but a link of your own gives bundles from disk
without any. So a project carries our signature (Ed25519) of names and contents of all its files, in
``fedkeep-signature.json``. Devices check it in ``fedkeep.flower.guard``; nothing of a bundle is ever run there.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path, PurePosixPath

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedkeep.core.errors import ConfigError, RunError, first_line
from fedkeep.core.files import write_whole

SIGNATURE = "fedkeep-signature.json"
LARGEST = 16 << 20  # bytes of all files of a bundle; Flower's own limit for the packed bundle is 10 MiB


def sign_project(project: Path, key: Path) -> None:
    """Write the signature of a Flower project beside its files.

    Raises:
        ConfigError: there is no such key, or the project is none that Flower can bundle, or holds a server's run.
    """
    with _home(project):
        from flwr.cli.build import build_fab_from_disk

    signer = _private_key(key)
    try:
        bundle = build_fab_from_disk(project)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{project} cannot be bundled by Flower: {first_line(error)}") from error
    _check_no_run(project, bundle)
    signature = base64.b64encode(signer.sign(_statement(_files(bundle)))).decode()
    write_whole(project / SIGNATURE, json.dumps({"ed25519": signature}).encode() + b"\n")


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
                    f"{project} holds the run {place!r}: every device would get the run's secrets, and the signature "
                    f"would not fit after its next round. Name its folder in {project / '.gitignore'}, or keep runs "
                    f"elsewhere."
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
        raise RunError(f"The bundle cannot be read: {first_line(error)}.") from error
    if signature is None:
        raise RunError(
            "This device refuses a project that nobody has signed. Sign it with fedkeep flower sign DIR --key KEY, by "
            "a key that the device trusts."
        )
    for key in keys:
        try:
            key.verify(signature, _statement(files))
        except InvalidSignature:
            continue
        return files
    raise RunError(
        "This device refuses the project: no key that it trusts has signed these files. Sign it with fedkeep flower "
        "sign DIR --key KEY after the last change."
    )


def _files(bundle: bytes) -> dict[str, bytes]:
    """Return what is signed: all files of a bundle by name, but for Flower's list and the signature."""
    with zipfile.ZipFile(BytesIO(bundle)) as files:
        names = sorted(n for n in files.namelist() if n != SIGNATURE and not n.startswith(".info/"))
        if len(set(names)) < len(names):
            raise ValueError("it holds a file twice")
        if sum(info.file_size for info in files.infolist()) > LARGEST:
            raise ValueError(f"its files take more than {LARGEST:,} bytes")
        return {name: files.read(name) for name in names}


def _statement(files: Mapping[str, bytes]) -> bytes:
    hashed = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    return b"fedkeep project\n" + json.dumps(hashed, sort_keys=True).encode()


def _signature(bundle: bytes) -> bytes | None:
    with zipfile.ZipFile(BytesIO(bundle)) as files:
        if SIGNATURE not in files.namelist():
            return None
        return base64.b64decode(json.loads(files.read(SIGNATURE))["ed25519"], validate=True)


def _private_key(path: Path) -> Ed25519PrivateKey:
    try:
        key = load_ssh_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise ConfigError(f"There is no key {path}: {error.strerror}.") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} is no private key in OpenSSH's form without a password.") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path} is no Ed25519 key; projects are signed by signer.key.")
    return key


def public_key(path: Path) -> Ed25519PublicKey:
    """Return a key whose signatures are trusted.

    Raises:
        ConfigError: there is none, or it is no public key that signs projects.
    """
    try:
        key = load_ssh_public_key(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"There is no key {path}: {error.strerror}.") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} is no public key in OpenSSH's form.") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"{path} is no Ed25519 key; a device trusts the signer.pub of a folder of keys.")
    return key
