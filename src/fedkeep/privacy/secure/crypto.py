"""Keys, sealed messages and masks, by the package cryptography (the extra ``privacy``): X25519, HKDF, ChaCha20."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from fedkeep.core.errors import SecureSumError, needing, raising

NONCE = bytes(12)
"""Every key is for one message or mask alone, so the nonce is nothing that has to differ."""
SEAL = 16
"""Bytes that ``sealed`` adds to its content."""
PIECE = 1 << 16
"""Numbers of a mask that are made at a time."""


def new_key() -> Any:
    """Return a new private key, from the system's source of randomness."""
    return _x25519().X25519PrivateKey.generate()


def public(key: Any) -> bytes:
    """Return the public half of a private key, 32 bytes."""
    return bytes(key.public_key().public_bytes_raw())


def key_from(secret: bytes) -> Any:
    """Return the private key of 32 bytes."""
    return _x25519().X25519PrivateKey.from_private_bytes(secret)


def agreed(key: Any, theirs: bytes, purpose: str) -> bytes:
    """Return the 32 bytes that two clients alone know, for one purpose; each has a private key and a public one."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    # A point of small order: everybody knows what it agrees on
    with raising(SecureSumError, "A public key is none that can be agreed with: {why}.", ValueError):
        shared = key.exchange(_x25519().X25519PublicKey.from_public_bytes(theirs))
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=purpose.encode()).derive(shared)


def sealed(key: bytes, content: bytes, about: str) -> bytes:
    """Return content that only who has the key can read or change; ``about`` is bound to it."""
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    return ChaCha20Poly1305(key).encrypt(NONCE, content, about.encode())


def opened(key: bytes, content: bytes, about: str) -> bytes:
    """Return what ``sealed`` was given.

    Raises:
        SecureSumError: it was changed on its way, or is of another place.
    """
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    with raising(
        SecureSumError,
        "A sealed message ({about}) was changed on its way.",
        InvalidTag,
        ValueError,
        about=about,
    ):
        return ChaCha20Poly1305(key).decrypt(NONCE, content, about.encode())


def mask(key: bytes, vector: np.ndarray, sign: Literal[1, -1]) -> None:
    """Add the mask of a key to a vector of whole numbers, or take it off, in place and by pieces.

    A mask is as many numbers that nobody without the key can tell from random ones.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    stream = Cipher(ChaCha20(key, bytes(4) + NONCE), mode=None).encryptor()
    change = np.add if sign > 0 else np.subtract
    for start in range(0, vector.size, PIECE):
        part = vector[start : start + PIECE]
        change(part, np.frombuffer(stream.update(bytes(part.nbytes)), part.dtype.newbyteorder("<")), out=part)


def _x25519() -> Any:
    with needing("A secure sum", "cryptography", "privacy"):
        from cryptography.hazmat.primitives.asymmetric import x25519
    return x25519
