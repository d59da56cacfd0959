"""The opened leaves of genesis shares, as anybody reads them (docs/verification.md, "The spot audit").

In epoch 0 the members' openings hold them. Later t openings give the keys of the leaves, and anyone with copies of the
archives reads them. A wrong key opens nothing, and what is read must lead to the genesis root, so nobody has to be
believed.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from quorumark import field as arithmetic
from quorumark import shamir
from quorumark.consortium.archive import Archive
from quorumark.consortium.merkle import Opening, root_from
from quorumark.consortium.records import ARCHIVE_KEY, Manifest, Terms
from quorumark.errors import DecodingError, QuorumarkError, RecordError, SignatureError
from quorumark.field import Stream, Vector
from quorumark.reasons import Reason, printable
from quorumark.verify.challenge import Challenge
from quorumark.verify.opening import KeyOpening, ShareOpening

__all__ = ["Leaves", "check_opening", "from_archives", "from_shares", "outliers"]

_MOST_SETS = 256  # of key openings that are tried where they contradict each other

Leaves: TypeAlias = dict[int, tuple[Opening, ...]]
"""Opened leaves of genesis shares, by point: all that a challenge asks for, in order."""


def from_shares(challenge: Challenge, chain: Sequence[Manifest], files: Sequence[bytes]) -> tuple[Leaves, list[Reason]]:
    """Epoch 0: the opened leaves by point, and what was wrong with the other files."""
    terms, genesis = chain[-1].terms, chain[-1].genesis
    opened, faults = {}, []
    for number, data in enumerate(files, 1):
        try:
            opening = ShareOpening.from_bytes(data)
            check_opening(opening, challenge, terms)
            for leaf in opening.leaves:
                if not _leads_to(genesis.roots[opening.point - 1], leaf, terms):
                    name = terms.member(opening.point).name
                    raise RecordError(
                        f"leaf {leaf.index} of {name!r} is not what the genesis root commits to",
                        reason=Reason.of("fault.opening-leaf", name=name, leaf=leaf.index),
                    )
            opened[opening.point] = opening.leaves
        except QuorumarkError as error:
            faults.append(error.reason or Reason.of("fault.opening-malformed", number=number, files=len(files)))
    return dict(sorted(opened.items())), faults


def _leads_to(root: str, leaf: Opening, terms: Terms) -> bool:
    """Whether an opened leaf is what a root commits to."""
    try:
        return root_from(leaf, terms.leaf, terms.coordinates).hex() == root
    except QuorumarkError:  # a leaf of another length, or one that no share has
        return False


def check_opening(opening: ShareOpening | KeyOpening, challenge: Challenge, terms: Terms) -> None:
    """Signed by its member, for this challenge, and of all asked leaves: nobody opens some of them only."""
    if opening.point > terms.members:
        text = f"the opening is for point {opening.point}, but {terms.name!r} has {terms.members} members"
        raise RecordError(text, reason=Reason.of("fault.opening-of-nobody", point=opening.point))
    name = terms.member(opening.point).name
    try:
        opening.verify(terms)
    except SignatureError as error:
        raise SignatureError(str(error), reason=Reason.of("fault.opening-signature", name=name)) from None
    if (opening.challenge, opening.manifest) != (challenge.digest(), challenge.manifest):
        reason = Reason.of("fault.opening-of-another-challenge", name=name)
        raise RecordError(f"the opening of {name!r} answers another challenge", reason=reason)
    if opening.indices != challenge.leaves:
        raise RecordError(
            f"the opening of {name!r} does not open exactly the leaves that were asked",
            reason=Reason.of("fault.opening-of-other-leaves", name=name),
        )


def from_archives(
    challenge: Challenge,
    chain: Sequence[Manifest],
    files: Sequence[bytes],
    archives: Sequence[str | os.PathLike[str]],
) -> tuple[Leaves, list[Reason]]:
    """Later epochs: keys from t members of today, leaves from copies of the archives, checked as above."""
    manifest = chain[-1]
    terms = manifest.terms
    parts, faults = {}, []
    for number, data in enumerate(files, 1):
        try:
            opening = KeyOpening.from_bytes(data)
            check_opening(opening, challenge, terms)
            if tuple(sorted(opening.keys)) != manifest.archived:
                name = terms.member(opening.point).name
                raise RecordError(
                    f"the opening of {name!r} must hold keys for all archives",
                    reason=Reason.of("fault.opening-lacks-archives", name=name),
                )
            parts[opening.point] = np.concatenate([opening.keys[point] for point in manifest.archived])
        except QuorumarkError as error:
            faults.append(error.reason or Reason.of("fault.opening-malformed", number=number, files=len(files)))
    readable: dict[int, Archive] = {}
    for path in archives:
        file = printable(os.fspath(path))
        try:
            archive = Archive.read(path, manifest)
        except QuorumarkError:
            faults.append(Reason.of("fault.archive-unusable", file=file))
            continue
        if archive.point in manifest.archived:
            readable.setdefault(archive.point, archive)
        else:
            faults.append(Reason.of("fault.archive-of-nobody", file=file))
    if len(parts) < terms.threshold:
        faults.append(Reason.of("fault.too-few-keys", opened=len(parts), needed=terms.threshold))
        return {}, faults
    opened, why = _read_archives(challenge, manifest, parts, readable)
    return opened, faults + why


def _read_archives(
    challenge: Challenge, manifest: Manifest, parts: Mapping[int, Vector], archives: Mapping[int, Archive]
) -> tuple[Leaves, list[Reason]]:
    """The leaves that the key parts open. Parts that contradict each other are told apart by what opens an archive."""
    terms, t = manifest.terms, manifest.terms.threshold
    best: Leaves = {}
    faults: list[Reason] = []
    for chosen in _sets_to_try(parts, t):
        keys = shamir.reconstruct({point: parts[point] for point in chosen}, t)
        opened, why = _open_archives(challenge, manifest, keys, archives)
        if not best or len(opened) > len(best):
            best, faults = opened, why
            if opened:
                others = [point for point in parts if point not in chosen]
                misfits = _misfits(parts, chosen, others)
                if misfits:
                    names = tuple(terms.member(point).name for point in misfits)
                    faults.append(Reason.of("fault.keys-misfit", members=names))
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
) -> tuple[Leaves, list[Reason]]:
    """All asked leaves of each archive, checked against its genesis root; an archive counts whole or not at all."""
    terms, genesis, n = manifest.terms, manifest.genesis, len(challenge.leaves)
    opened, faults = {}, []
    for point, archive in sorted(archives.items()):
        start, values = manifest.archived.index(point) * n, []
        try:
            for i, index in enumerate(challenge.leaves, start):
                leaf = archive.open(index, keys[i * ARCHIVE_KEY : (i + 1) * ARCHIVE_KEY])
                if not _leads_to(genesis.roots[point - 1], leaf, terms):
                    faults.append(Reason.of("fault.archive-leaf", point=point, leaf=index))
                    break
                values.append(leaf)
            else:
                opened[point] = tuple(values)
        except (QuorumarkError, OSError):
            faults.append(Reason.of("fault.archive-closed", point=point))
    return opened, faults


def outliers(rows: Mapping[int, Vector], threshold: int) -> tuple[int, ...]:
    """The points whose vectors do not fit the others, by a random combination; a DecodingError if it shows not who."""
    weights = Stream.fresh("audit").elements(next(iter(rows.values())).size)
    return shamir.decode({x: arithmetic.dot(weights, row) for x, row in rows.items()}, threshold).wrong
