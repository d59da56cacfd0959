"""A lost share comes back: t helpers give the member at x_i its share f(x_i); they do not learn it, nor it theirs.

Helper h sends λ_h·s_h, with λ_h the Lagrange coefficient of the helpers' points at x_i, under masks that cancel over
exactly this set of helpers and this request; so only the sum can be read, and the sum is f(x_i). (Unmasked, t such
answers would be t shares: the key.) The salts come back the same way, and the result is checked against the root in
the signed manifest.

    FOLDER/request.msg            signed by the member who lost its share: a nonce and the helpers
    FOLDER/answer-POINT.msg       sealed to it, one from each helper

The member keeps its identity: restore it from a backup first (`quorumark member restore`).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np

from quorumark import field, shamir
from quorumark.errors import CeremonyError, MessageError
from quorumark.field import P, Stream, derive_key
from quorumark.home import ConsortiumFolder, Home, read_file
from quorumark.identity import Header, Identity
from quorumark.keystore import Unlock, read_sealed, write_sealed, write_shared
from quorumark.merkle import SALT_ELEMENTS
from quorumark.records import Manifest, canonical, parse
from quorumark.shares import ShareInfo, ShareWriter, share_root

__all__ = ["finish", "help_recover", "request"]

_FORMAT = "quorumark-recovery/v1"


def _header(manifest: Manifest, step: str, sender: int, recipient: int = 0, session: str = "00" * 32) -> Header:
    return Header(manifest.digest().hex(), session, f"recover/{step}", sender, recipient)


def request(home: Home, place: ConsortiumFolder, unlock: Unlock, folder: Path, helpers: tuple[int, ...]) -> str:
    """Asks `helpers` (t points, not this member's) for this member's share; the request's nonce."""
    manifest, identity = place.manifest(), home.identity(unlock)
    point = manifest.terms.point_of(identity.ed25519)
    _check_helpers(manifest, point, helpers)
    if place.share_path().exists():
        raise CeremonyError(f"{str(place.share_path())!r} is still there: move it away if it is damaged")
    nonce = os.urandom(32).hex()
    body = canonical({"format": _FORMAT, "nonce": nonce, "helpers": list(helpers)})
    write_sealed(place.path / "recovery.sealed", unlock, "recovery", body)
    message = identity.write(_header(manifest, "request", point), body)
    write_shared(folder / "request.msg", bytes([point >> 8, point & 255]) + message)
    return nonce


def help_recover(home: Home, place: ConsortiumFolder, unlock: Unlock, folder: Path) -> str:
    """Answers a request that names this member as a helper; whose share it is for."""
    manifest, identity = place.manifest(), home.identity(unlock)
    terms, own = manifest.terms, manifest.terms.point_of(identity.ed25519)
    data = read_file(folder / "request.msg", "a request")
    point = int.from_bytes(data[:2], "big")
    name = terms.member(point).name
    body = identity.read(data[2:], terms, _header(manifest, "request", point))
    nonce, helpers = _read_request(body, manifest, point)
    if own not in helpers:
        raise CeremonyError(f"{name!r} asks other members for help, not this one")
    share = place.verify_share(unlock)
    # the salt is the shared number itself (its polynomial at 0); all the rest is wanted at the member's own point
    at_secret, at_point = (shamir.lagrange(helpers, x)[helpers.index(own)] for x in (0, point))
    salt = field.scale(at_secret, share.others_salts[point - 1])
    rest = np.concatenate([share.others_salts.reshape(-1), share.vector()])
    vector = np.concatenate([salt, field.scale(at_point, rest, checked=False)])
    for other in helpers:
        if other != own:
            _mask(identity, manifest, own, other, point, body).add_to(vector, negate=own > other, checked=False)
    header = _header(manifest, "answer", own, point, nonce)
    message = identity.write(header, vector.astype("<u8").tobytes(), terms.member(point).x25519)
    write_shared(folder / f"answer-{own}.msg", message)
    return name


def finish(home: Home, place: ConsortiumFolder, unlock: Unlock, folder: Path) -> tuple[str, ...]:
    """Puts the answers together, checks the share against its root and keeps it; or the names still missing."""
    manifest, identity = place.manifest(), home.identity(unlock)
    terms, point = manifest.terms, manifest.terms.point_of(identity.ed25519)
    if not (place.path / "recovery.sealed").exists():
        raise CeremonyError("no recovery was asked for here: run it with --helpers first")
    nonce, helpers = _read_request(read_sealed(place.path / "recovery.sealed", unlock, "recovery"), manifest, point)
    missing = tuple(terms.member(h).name for h in helpers if not (folder / f"answer-{h}.msg").exists())
    if missing:
        return missing
    total = np.zeros(SALT_ELEMENTS * (1 + terms.members) + manifest.share_length, np.uint64)
    for helper in helpers:
        try:
            data = (folder / f"answer-{helper}.msg").read_bytes()  # as large as a share: no record's limit holds here
        except OSError as error:
            raise MessageError(
                f"the answer of {terms.member(helper).name!r} cannot be read: {error.strerror}"
            ) from None
        answer = identity.read(data, terms, _header(manifest, "answer", helper, point, nonce))
        words = np.frombuffer(answer, "<u8").astype(np.uint64) if len(answer) == total.nbytes else total[:0]
        if words.size != total.size or int(words.max()) >= P:
            raise MessageError(f"the answer of {terms.member(helper).name!r} is no share")
        field.add(total, words, out=total, checked=False)
    salt, others, values = np.split(total, [SALT_ELEMENTS, SALT_ELEMENTS * (1 + terms.members)])
    if share_root([values], salt, terms.leaf, manifest.share_length).hex() != manifest.roots[point - 1]:
        names = ", ".join(terms.member(h).name for h in helpers)
        raise CeremonyError(f"what {names} sent is not this member's share: one of them is wrong; ask others")
    info = ShareInfo.under(manifest, point)
    with ShareWriter(place.share_path(), unlock, info, salt, others.reshape(terms.members, SALT_ELEMENTS)) as file:
        file.write(values)
    (place.path / "recovery.sealed").unlink()
    place.tidy()
    return ()


def _check_helpers(manifest: Manifest, point: int, helpers: tuple[int, ...]) -> None:
    terms = manifest.terms
    known = all(type(h) is int and 1 <= h <= terms.members for h in helpers)
    if not known or len(set(helpers)) != len(helpers) or len(helpers) != terms.threshold or point in helpers:
        raise CeremonyError(f"a recovery needs exactly t = {terms.threshold} different helpers other than the member")


def _read_request(body: bytes, manifest: Manifest, point: int) -> tuple[str, tuple[int, ...]]:
    """The nonce and the helpers of a request, checked."""
    read = parse(body, _FORMAT, "a request")
    nonce, helpers = read.get("nonce"), read.get("helpers")
    if not isinstance(nonce, str) or not re.fullmatch("[0-9a-f]{64}", nonce) or not isinstance(helpers, list):
        raise CeremonyError(f"the request of {manifest.terms.member(point).name!r} is damaged")
    _check_helpers(manifest, point, tuple(helpers))
    return nonce, tuple(helpers)


def _mask(identity: Identity, manifest: Manifest, own: int, other: int, point: int, request: bytes) -> Stream:
    """What two helpers share for exactly this request of exactly this member.

    The member's point is part of it: with the same masks for two requesters, the difference of a helper's two answers
    would be a multiple of its share.
    """
    secret = identity.exchange(manifest.terms.member(other).x25519)
    pair = [x.to_bytes(8, "big") for x in sorted((own, other))]
    return Stream(
        derive_key(secret, "recovery pair", manifest.digest(), point.to_bytes(8, "big"), request, *pair),
        "recovery mask",
    )
