"""A member's genesis share after its shares were made anew: kept for audits, readable by nobody alone.

The sign whitening depends on the genesis roots, so an audit must open chunks of the *genesis* shares, however often
shares were made anew since. Kept in the clear, t old shares would give the key for ever. So each leaf of the old share
is encrypted under a key of its own, of three random field elements, and those keys are shared t-of-K like the key
itself: they are part of every later share, and are refreshed and handed on with it. An audit of a leaf opens that
leaf's key, and nothing else.

    4 bytes: length of the header; the header (JSON); the hashes of all leaves, 32 bytes each;
    for each leaf AES-256-GCM(its elements as 8 bytes each ‖ its salt), with the header as associated data

The file may be copied: without t members it says nothing. It is checked against the genesis root when it is opened.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from quorumark import field
from quorumark.canonical import canonical, digest, parse
from quorumark.consortium.merkle import Opening, Tree, levels_of, path_of, root_of, salt_seed
from quorumark.consortium.records import ARCHIVE_KEY, Manifest
from quorumark.consortium.shares import ShareFile
from quorumark.errors import KeystoreError, RecordError
from quorumark.field import Vector, derive_key
from quorumark.files import replacing

__all__ = ["Archive", "key_place", "leaf_count", "write_archive"]

FORMAT = "quorumark-archive/v1"
_NONCE = bytes(12)  # every leaf has a key of its own
_SALT, _TAG, _LARGEST_HEADER = 32, 16, 4096


def leaf_count(length: int, leaf: int) -> int:
    return -(-length // leaf)


def key_place(manifest: Manifest, point: int, index: int) -> slice:
    """Where the key of a leaf of the archived genesis share of a member lies in every current share."""
    if point not in manifest.archived:
        raise RecordError(f"the genesis share of point {point} is not archived")
    leaves = leaf_count(manifest.terms.coordinates, manifest.terms.leaf)
    if not 0 <= index < leaves:
        raise RecordError(f"a share has the leaves 0 to {leaves - 1}, not {index}")
    start = manifest.terms.coordinates + (manifest.archived.index(point) * leaves + index) * ARCHIVE_KEY
    return slice(start, start + ARCHIVE_KEY)


def write_archive(path: str | os.PathLike[str], share: ShareFile, keys: Vector) -> None:
    """Encrypts a genesis share leaf by leaf; `keys` holds three elements for each leaf."""
    info = share.info
    leaves = leaf_count(info.length, info.leaf)
    if info.epoch != 0 or keys.shape != (leaves * ARCHIVE_KEY,):
        raise KeystoreError("an archive is made of a genesis share and one key for each of its leaves")
    tree = Tree(salt_seed(share.salt), info.leaf, info.length)
    for piece in share.pieces():
        tree.update(piece)
    numbers = {"point": info.point, "length": info.length, "leaf": info.leaf}
    header = canonical({"format": FORMAT, "consortium": info.consortium, "session": info.session, **numbers})
    with replacing(Path(path)) as file:
        file.write(len(header).to_bytes(4, "big") + header + b"".join(tree.leaves()))
        for index, values in enumerate(_leaves(share)):
            content = values.astype("<u8", copy=False).tobytes() + tree.salt(index)
            key = keys[index * ARCHIVE_KEY : (index + 1) * ARCHIVE_KEY]
            file.write(_cipher(key, header, index).encrypt(_NONCE, content, header))


def _leaves(share: ShareFile) -> Iterator[Vector]:
    pending = np.empty(0, np.uint64)
    for piece in share.pieces():
        pending = np.concatenate([pending, piece])
        full = pending.size - pending.size % share.info.leaf
        yield from pending[:full].reshape(-1, share.info.leaf)
        pending = pending[full:]
    if pending.size:
        yield pending


def _cipher(key: Vector, header: bytes, index: int) -> AESGCM:
    field.check(key, "key")
    secret = digest("archive key", key.astype("<u8").tobytes())
    return AESGCM(derive_key(secret, "archive leaf", header, index.to_bytes(8, "big")))


@dataclass(frozen=True)
class Archive:
    """An archived genesis share."""

    path: Path
    point: int
    length: int
    leaf: int
    header: bytes
    hashes: tuple[bytes, ...]

    @classmethod
    def read(cls, path: str | os.PathLike[str], manifest: Manifest) -> Archive:
        """Opens the file and checks that it is of this consortium and of a genesis share that its root commits to."""
        genesis, terms = manifest.genesis, manifest.terms
        try:
            if Path(path).exists() and not Path(path).is_file():  # a pipe would be waited for
                raise RecordError(f"{os.fspath(path)!r} is no regular file")
            with Path(path).open("rb") as file:
                size = int.from_bytes(file.read(4), "big")
                header = file.read(size) if 0 < size <= _LARGEST_HEADER else b""
                body = parse(header, FORMAT, "an archive")
                point = body.get("point")
                if not isinstance(point, int) or not 1 <= point <= len(genesis.roots):
                    raise RecordError(f"{os.fspath(path)!r} is an archive of nobody's share")
                numbers = {"point": point, "length": terms.coordinates, "leaf": terms.leaf}
                expected = {"format": FORMAT, "consortium": genesis.terms, "session": genesis.session, **numbers}
                if header != canonical(expected):
                    raise RecordError(f"{os.fspath(path)!r} is an archive of another consortium")
                count = leaf_count(terms.coordinates, terms.leaf)
                hashes = tuple(file.read(32) for _ in range(count))
        except OSError as error:
            raise KeystoreError(f"cannot read {os.fspath(path)!r}: {error.strerror}") from None
        if len(hashes[-1]) != 32 or root_of(hashes).hex() != genesis.roots[point - 1]:
            raise RecordError(f"{os.fspath(path)!r} is not of the share that the genesis root commits to")
        return cls(Path(path), point, terms.coordinates, terms.leaf, header, hashes)

    @functools.cached_property
    def _levels(self) -> list[Sequence[bytes]]:
        return levels_of(self.hashes)  # once, however many leaves are opened

    def open(self, index: int, key: Vector) -> Opening:
        """One leaf of the genesis share, as `merkle.root_from` checks it, given the leaf's key."""
        path = path_of(self._levels, index)
        whole = 8 * self.leaf + _SALT + _TAG
        size = 8 * min(self.leaf, self.length - index * self.leaf) + _SALT + _TAG
        with self.path.open("rb") as file:
            file.seek(4 + len(self.header) + 32 * len(self.hashes) + index * whole)
            sealed = file.read(size)
        try:
            content = _cipher(key, self.header, index).decrypt(_NONCE, sealed, self.header)
        except (InvalidTag, ValueError):
            raise KeystoreError(f"leaf {index} of {str(self.path)!r} cannot be opened: wrong key or damaged") from None
        values = np.frombuffer(content[:-_SALT], "<u8").astype(np.uint64)
        return Opening(index, values, content[-_SALT:], path)
