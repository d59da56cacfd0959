"""What a member opens for an audit (docs/verification.md, "The spot audit").

In epoch 0 members open leaves of their share files (`ShareOpening`). Later the genesis shares are archived
(docs/protocol.md, "Archives"): then t members of today open what their shares hold of the leaves' keys (`KeyOpening`).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Protocol, Self

import numpy as np

from quorumark.canonical import parse
from quorumark.checks import field_names, is_count, is_hex, require, take
from quorumark.consortium.archive import key_place, leaf_count
from quorumark.consortium.home import ConsortiumFolder, HomeFolder
from quorumark.consortium.keystore import Unlock
from quorumark.consortium.merkle import Opening, Tree, levels_of, path_of, salt_seed
from quorumark.consortium.records import ARCHIVE_KEY, Manifest
from quorumark.consortium.shares import ShareFile
from quorumark.errors import RecordError
from quorumark.field import P, Vector
from quorumark.verify.challenge import Challenge, check_challenge
from quorumark.verify.evidence import Query
from quorumark.verify.signed import SignedByMember

__all__ = ["LIFE", "Burns", "KeyOpening", "ShareOpening", "leaf_dict", "leaf_from", "open_leaves"]

LIFE = 4
"""A member opens at most one in so many of its leaves in its life."""


def _text(words: Vector) -> str:
    return base64.b64encode(words.astype("<u8", copy=False).tobytes()).decode()


def _words(text: object, what: str) -> Vector:
    try:
        raw = base64.b64decode(text, validate=True) if isinstance(text, str) else b"?"
    except (binascii.Error, ValueError):
        raw = b"?"
    # a decoder passes over stray bits at the end: only what encodes to the same string again is meant
    sound = len(raw) % 8 == 0 and base64.b64encode(raw).decode() == text
    require(sound, what, "must be 8-byte numbers in base64")
    return np.frombuffer(raw, "<u8").astype(np.uint64)


def leaf_dict(leaf: Opening) -> dict[str, Any]:
    path = [node.hex() for node in leaf.path]
    return {"index": leaf.index, "values": _text(leaf.values), "salt": leaf.salt.hex(), "path": path}


def leaf_from(body: object) -> Opening:
    taken = take(body, field_names(Opening), "an opened leaf")
    path = taken["path"]
    require(is_count(taken["index"]), "an opened leaf's number", "must be an integer, at least 0")
    require(is_hex(taken["salt"], 32), "an opened leaf's salt", "must be 32 bytes in hex")  # one length: it is hashed
    sound = isinstance(path, list) and all(is_hex(node, 32) for node in path)
    require(sound, "an opened leaf's path", "must be hashes of 32 bytes in hex")
    nodes = tuple(bytes.fromhex(node) for node in path)
    return Opening(
        taken["index"], _words(taken["values"], "an opened leaf's values"), bytes.fromhex(taken["salt"]), nodes
    )


@dataclass(frozen=True, eq=False)
class _Answer(SignedByMember):
    """What both kinds of openings share: what they answer, whose they are, and the signature over all of it."""

    PURPOSE: ClassVar[str] = "audit"

    manifest: str
    challenge: str
    point: int
    signature: str = field(repr=False, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("manifest", "challenge"):
            require(is_hex(getattr(self, name), 32), f"an opening's {name}", "must be 32 bytes in hex")
        require(is_count(self.point, 1), "an opening's point", "must be an integer, at least 1")
        require(is_hex(self.signature, 64), "an opening's signature", "must be 64 bytes in hex")


@dataclass(frozen=True, eq=False)
class ShareOpening(_Answer):
    """In epoch 0: the asked leaves of a member's genesis share, with their salts and paths. Never a seed."""

    FORMAT: ClassVar[str] = "quorumark-opening/v1"

    leaves: tuple[Opening, ...] = field(repr=False)

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(leaf.index for leaf in self.leaves)

    def as_dict(self) -> dict[str, Any]:
        body = {f.name: getattr(self, f.name) for f in fields(self)}
        return body | {"leaves": [leaf_dict(leaf) for leaf in self.leaves]}

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        taken = take(parse(data, cls.FORMAT, "an opening"), field_names(cls), "an opening")
        require(isinstance(taken["leaves"], list), "an opening's leaves", "must be a list")
        return cls(**{**taken, "leaves": tuple(leaf_from(leaf) for leaf in taken["leaves"])})


@dataclass(frozen=True, eq=False)
class KeyOpening(_Answer):
    """After a resharing: what a member's share of today holds of the asked leaves' archive keys.

    `keys` maps each archived point to three elements for each of `indices`, in order.
    """

    FORMAT: ClassVar[str] = "quorumark-opening-keys/v1"

    indices: tuple[int, ...]
    keys: Mapping[int, Vector] = field(repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        sound = all(is_count(leaf) for leaf in self.indices) and list(self.indices) == sorted(set(self.indices))
        require(sound, "an opening's leaves", "must be leaf numbers in order, each once")
        for words in self.keys.values():
            sound = words.shape == (ARCHIVE_KEY * len(self.indices),) and bool((words < P).all())
            require(sound, "an opening's keys", f"must be {ARCHIVE_KEY} field elements for each leaf")

    def as_dict(self) -> dict[str, Any]:
        body = {f.name: getattr(self, f.name) for f in fields(self)}
        keys = {str(point): _text(words) for point, words in self.keys.items()}
        return body | {"indices": list(self.indices), "keys": keys}

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        taken = take(parse(data, cls.FORMAT, "an opening of keys"), field_names(cls), "an opening of keys")
        keys = taken["keys"]
        require(isinstance(taken["indices"], list), "an opening's leaves", "must be a list")
        require(isinstance(keys, Mapping), "an opening's keys", "must be named by points")
        sound = all(
            point.isascii() and point.isdecimal() and len(point) < 10 and str(int(point)) == point for point in keys
        )
        require(sound, "an opening's keys", "must be named by points")
        words = {int(point): _words(text, "an opening's keys") for point, text in keys.items()}
        return cls(**{**taken, "indices": tuple(taken["indices"]), "keys": words})


class Burns(Protocol):
    """A member's memory of what it opened: its ledger."""

    def burnt(self) -> tuple[int, ...]:
        """All leaves that this member ever opened."""

    def record_burnt(self, leaves: Sequence[int], digest: str) -> None:
        """Writes them down for good, with the challenge's digest, before the opening leaves; twice is once."""


def open_leaves(
    home: HomeFolder,
    consortium: ConsortiumFolder,
    unlock: Unlock,
    challenge: Challenge,
    query: Query,
    *,
    answered: bool,
    burns: Burns,
) -> bytes:
    """A member's answer to a challenge: the file to hand out. The leaves are burnt from then on.

    `answered`: whether this member has answered the query. It opens nothing for one that it has not, and no more than
    a quarter of its leaves in its life.
    """
    manifest = consortium.manifest()
    check_challenge(challenge, query, manifest)
    if not answered:
        raise RecordError("this member has not answered the query that the challenge is about: answer it first")
    leaves = leaf_count(manifest.terms.coordinates, manifest.terms.leaf)
    after = len({*burns.burnt(), *challenge.leaves})
    if LIFE * after > leaves:
        raise RecordError(
            f"with this audit {after} of {leaves} leaves would be burnt, but a member opens at most a quarter of them "
            f"in its life: the key must not be given away piece by piece"
        )
    share, identity = consortium.verify_share(unlock), home.identity(unlock)
    common = {"manifest": query.manifest, "challenge": challenge.digest(), "point": share.info.point}
    opening: SignedByMember
    if manifest.epoch == 0:
        opening = ShareOpening.sign(identity, **common, leaves=_opened(share, challenge.leaves))
    else:
        keys = _key_parts(share, manifest, challenge.leaves)
        opening = KeyOpening.sign(identity, **common, indices=challenge.leaves, keys=keys)
    burns.record_burnt(challenge.leaves, challenge.digest())
    return opening.to_bytes()


def _opened(share: ShareFile, indices: Sequence[int]) -> tuple[Opening, ...]:
    """Leaves of a share with their salts and paths. Values alone: where a generator made them, its seed stays here."""
    size, length = share.info.leaf, share.info.length
    tree = Tree(salt_seed(share.salt), size, length)

    def fed() -> Iterator[Vector]:
        for piece in share.pieces():
            tree.update(piece)
            yield piece

    values = _gather(fed(), [slice(i * size, min((i + 1) * size, length)) for i in indices])
    levels = levels_of(tree.leaves())
    return tuple(Opening(i, v, tree.salt(i), path_of(levels, i)) for i, v in zip(indices, values, strict=True))


def _key_parts(share: ShareFile, manifest: Manifest, indices: Sequence[int]) -> dict[int, Vector]:
    """What a share holds of the keys of these leaves, for each archived point."""
    places = [key_place(manifest, point, i) for point in manifest.archived for i in indices]
    parts, n = _gather(share.pieces(), places), len(indices)
    return {point: np.concatenate(parts[a * n : (a + 1) * n]) for a, point in enumerate(manifest.archived)}


def _gather(pieces: Iterator[Vector], places: Sequence[slice]) -> list[Vector]:
    """Parts of a vector that comes in pieces; `places` are in order. Every piece is read."""
    found: list[list[Vector]] = [[] for _ in places]
    start = first = 0
    for piece in pieces:
        stop = start + piece.size
        for i in range(first, len(places)):
            if places[i].start >= stop:
                break
            found[i].append(piece[max(places[i].start - start, 0) : places[i].stop - start].copy())
            first = i if places[i].stop > stop else i + 1
        start = stop
    return [np.concatenate(parts) for parts in found]
