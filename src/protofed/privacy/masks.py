"""The primitives of secure sums, all of them from libraries.

X25519, HKDF, AES-CTR and AES-GCM are those of `cryptography`, Shamir's shares those of `pycryptodome`.

A secret has 16 bytes, so that one of Shamir's shares over GF(2¹²⁸) holds it: the seed of a client's self-mask, and the seed
that its private mask key is derived from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..errors import ProtofedError
from .fixed import Words

try:
    from Crypto.Protocol.SecretSharing import Shamir
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError:
    raise ProtofedError("secure sums need cryptography and pycryptodome: pip install 'protofed[privacy]'") from None

SECRET = 16  # bytes of a secret and of a share
PUBLIC = 32  # bytes of a public key
SEALED = 2 * SECRET + 16  # bytes of two shares, encrypted, with the tag of AES-GCM
COMMITMENT = 32  # bytes of a commitment
BLOCK = 2**14  # words that are masked at a time: the block stays in the cache while all masks are added to it
ZEROS = bytes(8 * BLOCK)


def derive(secret: bytes, purpose: str, context: bytes, *clients: int) -> bytes:
    """Derive a key by HKDF-SHA256.

    Args:
        secret: a seed or the result of a key agreement.
        purpose: what the key is for.
        context: the sixteen bytes of the round.
        clients: whom the key concerns, in order.

    Returns:
        the 32 bytes of the key.
    """
    info = b"protofed secure sum, " + purpose.encode() + b"\0" + _label(context, *clients)
    return HKDF(hashes.SHA256(), 32, None, info).derive(secret)


def _label(context: bytes, *clients: int) -> bytes:
    """The round and the clients, as bytes."""
    return context + b"".join(client.to_bytes(4, "little") for client in clients)


def mask_key(seed: bytes, context: bytes) -> X25519PrivateKey:
    """The private mask key that a seed stands for."""
    return X25519PrivateKey.from_private_bytes(derive(seed, "mask key", context))


def self_key(seed: bytes, context: bytes) -> bytes:
    """The key of the self-mask that a seed stands for."""
    return derive(seed, "self-mask", context)


def commitment(seed: bytes, context: bytes) -> bytes:
    """Thirty-two bytes by which the seed of a self-mask is recognised, and from which it cannot be found."""
    return derive(seed, "commitment", context)


def pair_key(agreed: bytes, context: bytes, one: int, other: int) -> bytes:
    """The key of two clients' common mask: the one with the smaller number adds it, the other subtracts it."""
    return derive(agreed, "pair mask", context, min(one, other), max(one, other))


def public_bytes(key: X25519PrivateKey) -> bytes:
    """The public key that belongs to a private one, as 32 bytes."""
    return key.public_key().public_bytes_raw()


def agree(private: X25519PrivateKey, public: bytes) -> bytes:
    """The secret that two clients have in common, each from its own private and the other's public key.

    Args:
        private: the own private key.
        public: the other's public key, 32 bytes.

    Returns:
        the secret, which keys are to be derived from.

    Raises:
        ValueError: the public key is of low order, so the secret would be a constant.
    """
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise ValueError("a public key of low order") from None


def seal(agreed: bytes, shares: bytes, context: bytes, sender: int, receiver: int) -> bytes:
    """Encrypt two shares with AES-GCM, bound to the round, the sender and the receiver.

    Args:
        agreed: what the two have agreed on. The key derived from it is for this message alone, so the nonce is constant.
        shares: the two shares.
        context: the sixteen bytes of the round.
        sender: the number of the client whose secrets are shared.
        receiver: the number of the client that is to hold the shares.

    Returns:
        the encrypted shares.
    """
    key = derive(agreed, "seal", context, sender, receiver)
    return AESGCM(key).encrypt(bytes(12), shares, _label(context, sender, receiver))


def unseal(agreed: bytes, sealed: bytes, context: bytes, sender: int, receiver: int) -> bytes:
    """Decrypt two shares, as `seal` has encrypted them; a ValueError says that these are others."""
    key = derive(agreed, "seal", context, sender, receiver)
    try:
        return AESGCM(key).decrypt(bytes(12), sealed, _label(context, sender, receiver))
    except InvalidTag:
        raise ValueError(f"the shares of client {sender} were changed on the way, or are of another round") from None


def split(secret: bytes, threshold: int, holders: int) -> list[bytes]:
    """Shamir's shares of a secret, one for each holder in order; `threshold` of them give it back."""
    return [share for _, share in Shamir.split(threshold, holders, secret, False)]


def combine(shares: Sequence[tuple[int, bytes]]) -> bytes:
    """The secret behind exactly `threshold` shares, each with the number of its holder, from 1."""
    return bytes(Shamir.combine(list(shares), False))


def add_masks(words: Words, keys: Iterable[tuple[bytes, bool]]) -> None:
    """Add keystreams of AES-256-CTR to a vector, modulo 2⁶⁴.

    Args:
        words: is changed in place.
        keys: each key, and whether its stream is subtracted instead.
    """
    streams = [
        (Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor(), np.subtract if negative else np.add)
        for key, negative in keys
    ]
    room = bytearray(8 * BLOCK + 15)  # update_into asks for this much
    stream = np.frombuffer(room, dtype="<u8", count=BLOCK)
    for start in range(0, len(words), BLOCK):
        part = words[start : start + BLOCK]
        zeros = memoryview(ZEROS)[: 8 * len(part)]
        for cipher, operation in streams:
            cipher.update_into(zeros, room)
            operation(part, stream[: len(part)], out=part)
