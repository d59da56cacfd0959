"""Commitments to shares: a Merkle tree over salted chunks (docs/format.md, "Share roots").

A member commits to its share by one root of 32 bytes. Later it can open any chunk, by the chunk's values, its salt and
a path of hashes, without saying anything about the others: the salts hide what is not opened.

    leaf_i = SHA-256(0x00 ‖ salt_i ‖ i as 8 bytes ‖ chunk's elements),  salt_i = digest("leaf salt", seed, i as 8 bytes)
    node   = SHA-256(0x01 ‖ left ‖ right); a last node without a partner moves up as it is
    root   = digest("share root", number of leaves as 8 bytes, top)

The seed of a member's salts is the digest of five random field elements, which are themselves shared t-of-K: anyone who
recovers a lost share recovers them too, and can check the result against the root.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quorumark import field
from quorumark.canonical import digest
from quorumark.errors import InputError
from quorumark.field import Vector

__all__ = ["SALT_ELEMENTS", "Opening", "Tree", "levels_of", "new_salt", "path_of", "root_from", "root_of", "salt_seed"]

SALT_ELEMENTS = 5  # 305 random bits


def new_salt() -> Vector:
    """Five uniform elements from the operating system."""
    return field.random(SALT_ELEMENTS)


def salt_seed(salt: Vector) -> bytes:
    """The secret that leaf salts are derived from."""
    if salt.shape != (SALT_ELEMENTS,):
        raise InputError("salt", f"must be {SALT_ELEMENTS} field elements", f"shape {salt.shape}")
    field.check(salt, "salt")
    return digest("salt seed", salt.astype("<u8").tobytes())


@dataclass(frozen=True)
class Opening:
    """One chunk of a share with what it takes to check it against the root."""

    index: int
    values: Vector
    salt: bytes
    path: tuple[bytes, ...]


class Tree:
    """The tree of one share, fed in order with pieces of any size; keeps the leaf hashes, not the share."""

    def __init__(self, seed: bytes, leaf: int, length: int) -> None:
        self._seed = seed
        self._leaf = leaf
        self._length = length
        self._pending = np.empty(0, np.uint64)
        self._fed = 0
        self._leaves: list[bytes] = []

    def update(self, values: Vector) -> None:
        """The share's next elements."""
        self._fed += values.size
        if self._fed > self._length:
            raise InputError("values", f"must be {self._length} elements in all", f"{self._fed}")
        pending = np.concatenate([self._pending, values]) if self._pending.size else values
        full = pending.size - pending.size % self._leaf
        for start in range(0, full, self._leaf):
            self._add(pending[start : start + self._leaf])
        self._pending = pending[full:].copy()

    def _add(self, values: Vector) -> None:
        index = len(self._leaves)
        self._leaves.append(_leaf_hash(self.salt(index), index, values))

    def salt(self, index: int) -> bytes:
        return digest("leaf salt", self._seed, index.to_bytes(8, "big"))

    def root(self) -> bytes:
        """The commitment, once all elements are in."""
        return root_of(self.leaves())

    def open(self, index: int, values: Vector) -> Opening:
        """The opening of a leaf whose values the caller has at hand."""
        return Opening(index, values, self.salt(index), path_of(levels_of(self.leaves()), index))

    def leaves(self) -> list[bytes]:
        """The hashes of all leaves, once all elements are in. They say nothing about the share: it is salted."""
        if self._fed != self._length:
            raise InputError("share", f"must be fed whole, {self._length} elements", f"{self._fed}")
        if self._pending.size:
            self._add(self._pending)
            self._pending = self._pending[:0]
        return self._leaves


def path_of(levels: Sequence[Sequence[bytes]], index: int) -> tuple[bytes, ...]:
    """The hashes beside the way from a leaf to the top, in the tree that `levels_of` gives."""
    if not 0 <= index < len(levels[0]):
        raise InputError("index", f"must be in [0, {len(levels[0])})", index)
    path, at = [], index
    for level in levels[:-1]:
        if at ^ 1 < len(level):
            path.append(level[at ^ 1])
        at //= 2
    return tuple(path)


def root_of(leaves: Sequence[bytes]) -> bytes:
    """The root over all leaves."""
    return _root(len(leaves), levels_of(leaves)[-1][0])


def root_from(opening: Opening, leaf: int, length: int) -> bytes:
    """The root that an opening belongs to: equal to the member's root, or the opening is false."""
    leaves = -(-length // leaf)
    if not 0 <= opening.index < leaves:
        raise InputError("index", f"must be in [0, {leaves})", opening.index)
    size = min(leaf, length - opening.index * leaf)
    if opening.values.shape != (size,):
        raise InputError(
            "values", f"must be the {size} elements of leaf {opening.index}", f"shape {opening.values.shape}"
        )
    field.check(opening.values, "values")
    current, at, width, used = _leaf_hash(opening.salt, opening.index, opening.values), opening.index, leaves, 0
    while width > 1:
        if at ^ 1 < width:
            if used >= len(opening.path):
                raise InputError("path", "must reach the top", f"{len(opening.path)} hashes")
            sibling = opening.path[used]
            current = _node(sibling, current) if at % 2 else _node(current, sibling)
            used += 1
        at, width = at // 2, -(-width // 2)
    if used != len(opening.path):
        raise InputError("path", f"must hold {used} hashes", len(opening.path))
    return _root(leaves, current)


def _leaf_hash(salt: bytes, index: int, values: Vector) -> bytes:
    hashed = hashlib.sha256(b"\x00" + salt + index.to_bytes(8, "big"))
    hashed.update(np.ascontiguousarray(values.astype("<u8", copy=False)).data)
    return hashed.digest()


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


def levels_of(leaves: Sequence[bytes]) -> list[Sequence[bytes]]:
    """All hashes of the tree, from the leaves to the top: for a caller that needs many paths."""
    levels = [leaves]
    while len(levels[-1]) > 1:
        levels.append(_parents(levels[-1]))
    return levels


def _parents(level: Sequence[bytes]) -> list[bytes]:
    pairs = [_node(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
    return pairs + ([level[-1]] if len(level) % 2 else [])


def _root(leaves: int, top: bytes) -> bytes:
    return digest("share root", leaves.to_bytes(8, "big"), top)
