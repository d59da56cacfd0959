"""Masks, their seeds, and the boxes that carry the seeds' shares (docs/secagg.md)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from quorumark.canonical import digest
from quorumark.field import P, Stream, Vector, derive_key
from quorumark.round.group import word

SEED = 5  # field elements in the seed of a self-mask: 305 bits, so that 256-bit keys lose nothing
SHARE = 8 * SEED
BOX = SHARE + 16
# elements that all masks are added to before the next ones: 8 MiB, enough to be worth spreading over threads, and small
# enough to stay in a third-level cache
PIECE = 1 << 20
# every box has a key of its own (ctx, sender, recipient, seed), so one nonce is right
NONCE = bytes(12)

PROBE = X25519PrivateKey.generate()


def private_key(entry: Mapping[str, Any]) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(derive_key(bytes.fromhex(entry["secret"]), "secagg round key"))


def pair_mask(pair: bytes, low: int, high: int) -> Stream:
    """The lower one adds it, the higher one subtracts it."""
    return Stream(pair, "secagg mask", word(low), word(high))


def self_mask(ctx: bytes, point: int, seed: Vector) -> Stream:
    return Stream(bytes_of(seed), "secagg self mask", ctx, word(point))


def commitment_of(ctx: bytes, point: int, seed: Vector) -> bytes:
    """Shows nothing of 305 random bits, and shows the server that it opened the right ones."""
    return digest("secagg seed", ctx, word(point), bytes_of(seed))


def cipher_of(pair: bytes, sender: int, recipient: int, commitment: bytes) -> AESGCM:
    """Directed, and for one seed: a box is no box of the other direction, another attempt or another upload."""
    return AESGCM(derive_key(pair, "secagg box", word(sender), word(recipient), commitment))


def add_masks(vector: Vector, part: slice, masks: Sequence[tuple[Stream, bool]]) -> None:
    piece = vector[part]
    for stream, negate in masks:
        stream.add_to(piece, part.start, negate=negate, checked=False)


class VectorDigest:
    """SHA-256 of a vector's little-endian bytes, piece by piece."""

    def __init__(self) -> None:
        self._hashed = hashlib.sha256(b"quorumark/v1 secagg vector")

    def update(self, piece: Vector) -> None:
        self._hashed.update(np.ascontiguousarray(piece.astype("<u8", copy=False)).data)

    def digest(self) -> bytes:
        return self._hashed.digest()


def elements_of(data: bytes, count: int) -> Vector:
    """Field elements from bytes; a ValueError if they are none."""
    if len(data) != 8 * count:
        raise ValueError("length")
    words = np.frombuffer(data, "<u8").astype(np.uint64)
    if int(words.max()) >= P:
        raise ValueError("range")
    return words


def bytes_of(vector: Vector) -> bytes:
    return vector.astype("<u8", copy=False).tobytes()
