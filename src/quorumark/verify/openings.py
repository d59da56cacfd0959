"""What members open for an audit, and how anybody reads it (docs/verification.md, "The spot audit").

In epoch 0 members open leaves of their share files (`ShareOpening`). Later the genesis shares are archived
(docs/protocol.md, "Archives"): then t members of today open what their shares hold of those leaves' keys (`KeyOpening`)
and anyone with copies of the archives reads the leaves. A wrong key opens nothing, and what is read must lead to the
genesis root, so nobody has to be believed.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Protocol, Self, TypeAlias

import numpy as np

from quorumark import field as arithmetic
from quorumark import shamir
from quorumark.canonical import parse
from quorumark.checks import field_names, is_count, is_hex, require, take
from quorumark.consortium.archive import Archive, key_place, leaf_count
from quorumark.consortium.home import ConsortiumFolder, HomeFolder
from quorumark.consortium.keystore import Unlock
from quorumark.consortium.merkle import Opening, Tree, levels_of, path_of, root_from, salt_seed
from quorumark.consortium.records import ARCHIVE_KEY, Manifest, Terms
from quorumark.consortium.shares import ShareFile
from quorumark.errors import DecodingError, QuorumarkError, RecordError
from quorumark.field import P, Stream, Vector
from quorumark.verify.challenge import Challenge, check_challenge
from quorumark.verify.evidence import Query, Signed

__all__ = [
    "LIFE",
    "Burns",
    "KeyOpening",
    "Leaves",
    "ShareOpening",
    "check_opening",
    "from_archives",
    "from_shares",
    "leaf_dict",
    "leaf_from",
    "open_leaves",
    "outliers",
]

LIFE = 4
"""A member opens at most one in so many of its leaves in its life."""

_MOST_SETS = 256  # of key openings that are tried where they contradict each other

Leaves: TypeAlias = dict[int, tuple[Opening, ...]]
"""Opened leaves of genesis shares, by point: all that a challenge asks for, in order."""


def _text(words: Vector) -> str:
    return base64.b64encode(words.astype("<u8", copy=False).tobytes()).decode()


def _words(text: object, what: str) -> Vector:
    try:
        raw = base64.b64decode(text, validate=True) if isinstance(text, str) else b"?"
    except (binascii.Error, ValueError):
        raw = b"?"
    require(len(raw) % 8 == 0, what, "must be 8-byte numbers in base64")
    return np.frombuffer(raw, "<u8").astype(np.uint64)


def leaf_dict(leaf: Opening) -> dict[str, Any]:
    path = [node.hex() for node in leaf.path]
    return {"index": leaf.index, "values": _text(leaf.values), "salt": leaf.salt.hex(), "path": path}


def leaf_from(body: object) -> Opening:
    taken = take(body, field_names(Opening), "an opened leaf")
    path = taken["path"]
    require(is_count(taken["index"]), "an opened leaf's number", "must be a whole number")
    require(is_hex(taken["salt"], 32), "an opened leaf's salt", "must be 32 bytes in hex")  # one length: it is hashed
    sound = isinstance(path, list) and all(is_hex(node, 32) for node in path)
    require(sound, "an opened leaf's path", "must be hashes of 32 bytes in hex")
    nodes = tuple(bytes.fromhex(node) for node in path)
    return Opening(
        taken["index"], _words(taken["values"], "an opened leaf's values"), bytes.fromhex(taken["salt"]), nodes
    )


@dataclass(frozen=True, eq=False)
class _Answer(Signed):
    """What both kinds of openings share: what they answer, whose they are, and the signature over all of it."""

    PURPOSE: ClassVar[str] = "audit"

    manifest: str
    challenge: str
    point: int
    signature: str = field(repr=False, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("manifest", "challenge"):
            require(is_hex(getattr(self, name), 32), f"an opening's {name}", "must be 32 bytes in hex")
        require(is_count(self.point, 1), "an opening's point", "must be a whole number, at least 1")
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
    place: ConsortiumFolder,
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
    manifest = place.manifest()
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
    share, identity = place.verify_share(unlock), home.identity(unlock)
    common = {"manifest": query.manifest, "challenge": challenge.digest(), "point": share.info.point}
    opening: Signed
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


# --- reading them -----------------------------------------------------------------------------------------


def from_shares(challenge: Challenge, chain: Sequence[Manifest], files: Sequence[bytes]) -> tuple[Leaves, list[str]]:
    """Epoch 0: the opened leaves by point, and what was wrong with the other files."""
    terms, genesis = chain[-1].terms, chain[-1].genesis
    opened, faults = {}, []
    for number, data in enumerate(files, 1):
        who = f"opening {number} of {len(files)}"
        try:
            opening = ShareOpening.from_bytes(data)
            who = f"the opening of {terms.member(opening.point).name!r}"
            check_opening(opening, challenge, terms)
            for leaf in opening.leaves:
                if root_from(leaf, terms.leaf, terms.coordinates).hex() != genesis.roots[opening.point - 1]:
                    raise RecordError(f"leaf {leaf.index} is not what the genesis root commits to")
            opened[opening.point] = opening.leaves
        except QuorumarkError as error:
            faults.append(f"{who} is left out: {error}")
    return dict(sorted(opened.items())), faults


def check_opening(opening: ShareOpening | KeyOpening, challenge: Challenge, terms: Terms) -> None:
    """Signed by its member, for this challenge, and of all asked leaves: nobody opens some of them only."""
    opening.verify(terms)
    answers = (opening.challenge, opening.manifest) == (challenge.digest(), challenge.manifest)
    require(answers, "it", "answers another challenge")
    require(opening.indices == challenge.leaves, "it", "does not open exactly the leaves that were asked")


def from_archives(
    challenge: Challenge,
    chain: Sequence[Manifest],
    files: Sequence[bytes],
    archives: Sequence[str | os.PathLike[str]],
) -> tuple[Leaves, list[str]]:
    """Later epochs: keys from t members of today, leaves from copies of the archives, checked as above."""
    manifest = chain[-1]
    terms = manifest.terms
    parts, faults = {}, []
    for number, data in enumerate(files, 1):
        who = f"opening {number} of {len(files)}"
        try:
            opening = KeyOpening.from_bytes(data)
            who = f"the opening of {terms.member(opening.point).name!r}"
            check_opening(opening, challenge, terms)
            require(tuple(sorted(opening.keys)) == manifest.archived, "it", "must hold keys for all archives")
            parts[opening.point] = np.concatenate([opening.keys[point] for point in manifest.archived])
        except QuorumarkError as error:
            faults.append(f"{who} is left out: {error}")
    readable: dict[int, Archive] = {}
    for path in archives:
        try:
            archive = Archive.read(path, manifest)
            require(archive.point in manifest.archived, f"the archive {os.fspath(path)!r}", "is of no archived share")
            readable.setdefault(archive.point, archive)
        except QuorumarkError as error:
            faults.append(str(error))
    if len(parts) < terms.threshold:
        faults.append(f"the archives' keys take {terms.threshold} members' openings, but there are {len(parts)}")
        return {}, faults
    opened, why = _read_archives(challenge, manifest, parts, readable)
    return opened, faults + why


def _read_archives(
    challenge: Challenge, manifest: Manifest, parts: Mapping[int, Vector], archives: Mapping[int, Archive]
) -> tuple[Leaves, list[str]]:
    """The leaves that the key parts open. Parts that contradict each other are told apart by what opens an archive."""
    terms, t = manifest.terms, manifest.terms.threshold
    best: Leaves = {}
    faults: list[str] = []
    for chosen in _sets_to_try(parts, t):
        keys = shamir.reconstruct({point: parts[point] for point in chosen}, t)
        opened, why = _open_archives(challenge, manifest, keys, archives)
        if not best or len(opened) > len(best):
            best, faults = opened, why
            if opened:
                others = [point for point in parts if point not in chosen]
                misfits = _misfits(parts, chosen, others)
                names = ", ".join(repr(terms.member(point).name) for point in misfits)
                faults += [f"the keys that {names} opened do not fit the others' and were left out"] if misfits else []
        if len(best) == len(archives):
            break
    return best, faults


def _sets_to_try(parts: Mapping[int, Vector], threshold: int) -> Iterator[tuple[int, ...]]:
    """Sets of t members whose parts may be right: the one that decoding gives, and where parts contradict each other
    others too, since liars who work together can make it go wrong."""
    points = sorted(parts)
    try:
        wrong = outliers(parts, threshold)
        yield tuple([x for x in points if x not in wrong][:threshold])
    except DecodingError:
        wrong = tuple(points)
    if wrong:
        yield from itertools.islice(itertools.combinations(points, threshold), _MOST_SETS)


def _misfits(parts: Mapping[int, Vector], chosen: Sequence[int], others: Sequence[int]) -> list[int]:
    known = np.stack([parts[point] for point in chosen])
    if not others:
        return []
    expected = arithmetic.matmul(shamir.lagrange_matrix(chosen, others), known)
    return [point for point, row in zip(others, expected, strict=True) if (row != parts[point]).any()]


def _open_archives(
    challenge: Challenge, manifest: Manifest, keys: Vector, archives: Mapping[int, Archive]
) -> tuple[Leaves, list[str]]:
    """All asked leaves of each archive, checked against its genesis root; an archive counts whole or not at all."""
    terms, genesis, n = manifest.terms, manifest.genesis, len(challenge.leaves)
    opened, faults = {}, []
    for point, archive in sorted(archives.items()):
        start, values = manifest.archived.index(point) * n, []
        try:
            for i, index in enumerate(challenge.leaves, start):
                leaf = archive.open(index, keys[i * ARCHIVE_KEY : (i + 1) * ARCHIVE_KEY])
                if root_from(leaf, terms.leaf, terms.coordinates).hex() != genesis.roots[point - 1]:
                    raise RecordError(f"leaf {index} of {str(archive.path)!r} is not what the genesis root commits to")
                values.append(leaf)
            opened[point] = tuple(values)
        except (QuorumarkError, OSError) as error:
            faults.append(f"the archive of the genesis share at point {point} is left out: {error}")
    return opened, faults


def outliers(rows: Mapping[int, Vector], threshold: int) -> tuple[int, ...]:
    """The points whose vectors do not fit the others, by a random combination; a DecodingError if it shows not who."""
    weights = Stream.fresh("audit").elements(next(iter(rows.values())).size)
    return shamir.decode({x: arithmetic.dot(weights, row) for x, row in rows.items()}, threshold).wrong
