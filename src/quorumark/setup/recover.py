"""A lost share comes back: t helpers give the member at x_i its share f(x_i); they do not learn it, nor it theirs.

Helper h sends λ_h·s_h, with λ_h the Lagrange coefficient of the helpers' points at x_i, under masks that cancel over
exactly this set of helpers and this request; so only the sum can be read, and the sum is f(x_i). (Unmasked, t such
answers would be t shares: the key.) The salts come back the same way, and the result is checked against the root in
the signed manifest. Masks and seals come from keys made for this recovery and forgotten after it: who steals a
member's lasting keys later cannot read what was sent.

    FOLDER/request.msg            signed by the member who lost its share: a nonce, a key, the helpers
    FOLDER/hello-POINT.msg        a key of each helper
    FOLDER/answer-POINT.msg       sealed to the member's key, one from each helper, once all helpers said hello

The member keeps its identity: restore it from a backup first (`quorumark member restore`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from quorumark import field, shamir
from quorumark.canonical import canonical, parse
from quorumark.checks import take
from quorumark.consortium.home import ConsortiumFolder, HomeFolder, read_file
from quorumark.consortium.identity import Header, Identity, check_sealed, exchange, open_message
from quorumark.consortium.keystore import Unlock, read_sealed, write_sealed
from quorumark.consortium.merkle import SALT_ELEMENTS
from quorumark.consortium.records import Manifest
from quorumark.consortium.shares import ShareInfo, ShareWriter, share_root
from quorumark.errors import CeremonyError, MessageError
from quorumark.field import P, Stream, derive_key
from quorumark.files import only_one, write_shared
from quorumark.setup.waiting import Progress

__all__ = ["finish", "help_recover", "largest_answer", "read_asked", "request"]

_FORMAT = "quorumark-recovery/v1"


def _header(manifest: Manifest, step: str, sender: int, recipient: int = 0, session: str = "00" * 32) -> Header:
    return Header(manifest.digest().hex(), session, f"recover/{step}", sender, recipient)


def request(
    home: HomeFolder, consortium: ConsortiumFolder, unlock: Unlock, folder: Path, helpers: tuple[int, ...]
) -> str:
    """Asks `helpers` (t points, not this member's) for this member's share; the request's nonce.

    Asked once more in the same folder, nothing is done: the request is there.
    """
    with only_one(consortium.path):
        manifest, identity = consortium.manifest(), home.identity(unlock)
        point = manifest.terms.point_of(identity.ed25519)
        _check_helpers(manifest, point, helpers)
        asked = _asked(consortium, unlock, folder, manifest, point)
        if asked is not None and asked[1] == helpers:
            return asked[0]
        if consortium.share_path().exists():
            raise CeremonyError(
                f"{str(consortium.share_path())!r} is still there: move it away if it is damaged",
                code="ceremony.share-exists",
            )
        if any(folder.glob("*.msg")):
            raise CeremonyError(
                f"{str(folder)!r} holds an earlier recovery: use a new, empty folder", code="ceremony.folder-used"
            )
        nonce, key = os.urandom(32).hex(), X25519PrivateKey.generate()
        public = key.public_key().public_bytes_raw().hex()
        body = canonical({"format": _FORMAT, "nonce": nonce, "helpers": list(helpers), "key": public})
        kept = {"request": body.decode(), "manifest": manifest.digest().hex(), "key": key.private_bytes_raw().hex()}
        write_sealed(consortium.path / "recovery.sealed", unlock, "recovery", canonical(kept))
        message = identity.write(_header(manifest, "request", point), body)
        write_shared(folder / "request.msg", bytes([point >> 8, point & 255]) + message)
        return nonce


def read_asked(data: bytes, manifest: Manifest) -> tuple[int, tuple[int, ...]]:
    """Whose request a file is, by its point, and whom it asks; the signature is checked."""
    point = int.from_bytes(data[:2], "big")
    body = open_message(data[2:], manifest.terms, _header(manifest, "request", point))
    return point, _read_request(body, manifest, point)[1]


def _asked(
    consortium: ConsortiumFolder, unlock: Unlock, folder: Path, manifest: Manifest, point: int
) -> tuple[str, tuple[int, ...]] | None:
    """The nonce and the helpers of this member's own request, if it is the one in this folder."""
    state, message = consortium.path / "recovery.sealed", folder / "request.msg"
    if not state.exists() or not message.exists():
        return None
    kept = json.loads(read_sealed(state, unlock, "recovery"))
    body = kept["request"].encode()
    if kept["manifest"] != manifest.digest().hex() or body not in read_file(message, "a request"):
        return None
    return _read_request(body, manifest, point)[:2]


def help_recover(home: HomeFolder, consortium: ConsortiumFolder, unlock: Unlock, folder: Path) -> Progress:
    """Helps with a request that names this member as a helper: says hello; answers once all helpers have.

    Its `finding` is the name of whose share it is for.
    """
    with only_one(consortium.path):
        manifest, identity = consortium.manifest(), home.identity(unlock)
        terms, own = manifest.terms, manifest.terms.point_of(identity.ed25519)
        if not (folder / "request.msg").exists():  # not waited for: who helps should know who asks
            raise CeremonyError(
                f"there is no request in {str(folder)!r} yet: the member who lost its share asks first",
                code="ceremony.not-asked",
            )
        data = read_file(folder / "request.msg", "a request")
        point = int.from_bytes(data[:2], "big")
        name = terms.member(point).name
        try:
            body = identity.read(data[2:], terms, _header(manifest, "request", point))
        except MessageError as error:
            if manifest.digest().hex().encode() in data:  # its header names the manifest that it was made under
                raise
            raise MessageError(
                f"{error}: it was not made under the manifest in force here; a member that is behind finishes the "
                "ceremony that is under way there, or takes over the later one with quorumark consortium update",
                code=error.code,
            ) from None
        nonce, helpers, requesters_key = _read_request(body, manifest, point)
        if own not in helpers:
            raise CeremonyError(f"{name!r} asks other members for help, not this one", code="ceremony.not-asked")
        # a key for each request: helping two members at once must not mix their masks
        state = consortium.path / f"help-{_hash(body)[:16]}.sealed"
        answer, answered = folder / f"answer-{own}.msg", _header(manifest, "answer", own, point, nonce)
        if not state.exists() and answer.exists():
            check_sealed(read_file(answer, "an answer", largest_answer(manifest)), terms, answered)
            return Progress("answer", (), finding=name)  # and the key for it is forgotten
        if not state.exists():
            new = X25519PrivateKey.generate().private_bytes_raw().hex()
            write_sealed(state, unlock, "help", canonical({"request": _hash(body), "key": new}))
        key = X25519PrivateKey.from_private_bytes(bytes.fromhex(json.loads(read_sealed(state, unlock, "help"))["key"]))
        hello = identity.write(_header(manifest, "hello", own, session=nonce), key.public_key().public_bytes_raw())
        write_shared(folder / f"hello-{own}.msg", hello)
        if awaited := _awaited(folder, "hello", helpers, manifest, name):
            return awaited
        share = consortium.verify_share(unlock)
        # the salt is the shared number itself (its polynomial at 0); all the rest is wanted at the member's own point
        at_secret, at_point = (shamir.lagrange(helpers, x)[helpers.index(own)] for x in (0, point))
        salt = field.scale(at_secret, share.others_salts[point - 1])
        rest = np.concatenate([share.others_salts.reshape(-1), share.vector()])
        vector = np.concatenate([salt, field.scale(at_point, rest, checked=False)])
        for other in helpers:
            if other != own:
                said = read_file(folder / f"hello-{other}.msg", f"the hello of {terms.member(other).name!r}")
                theirs = identity.read(said, terms, _header(manifest, "hello", other, session=nonce))
                secret = exchange(key, theirs.hex()) + identity.exchange(terms.member(other).x25519)
                _mask(manifest, secret, own, other, point, body).add_to(vector, negate=own > other, checked=False)
        write_shared(answer, identity.write(answered, vector.astype("<u8").tobytes(), requesters_key))
        state.unlink()
        return Progress("answer", (), finding=name)


def _awaited(folder: Path, step: str, helpers: tuple[int, ...], manifest: Manifest, name: str = "") -> Progress | None:
    """The helpers whose messages of a step are missing, if any."""
    files = {manifest.terms.member(h).name: folder / f"{step}-{h}.msg" for h in helpers}
    missing = {who: file for who, file in files.items() if not file.exists()}
    return Progress(step, tuple(missing), None, name, tuple(missing.values())) if missing else None


def finish(home: HomeFolder, consortium: ConsortiumFolder, unlock: Unlock, folder: Path) -> Progress:
    """Puts the answers together, checks the share against its root and keeps it, once all have answered."""
    with only_one(consortium.path):
        manifest, identity = consortium.manifest(), home.identity(unlock)
        terms, point = manifest.terms, manifest.terms.point_of(identity.ed25519)
        state = consortium.path / "recovery.sealed"
        if not state.exists():
            raise CeremonyError(
                "no recovery was asked for here: run it with --helpers first", code="ceremony.too-early"
            )
        kept = json.loads(read_sealed(state, unlock, "recovery"))
        if kept["manifest"] != manifest.digest().hex():
            raise CeremonyError(
                "another manifest has come into force since this member asked: ask again, with --helpers",
                code="ceremony.manifest-changed",
            )
        nonce, helpers, _ = _read_request(kept["request"].encode(), manifest, point)
        key = X25519PrivateKey.from_private_bytes(bytes.fromhex(kept["key"]))
        if awaited := _awaited(folder, "answer", helpers, manifest):
            return awaited
        total = np.zeros(SALT_ELEMENTS * (1 + terms.members) + manifest.share_length, np.uint64)
        for helper in helpers:
            words = _read_answer(
                identity, manifest, folder, helper, _header(manifest, "answer", helper, point, nonce), key
            )
            if words.size != total.size or int(words.max()) >= P:
                raise MessageError(f"the answer of {terms.member(helper).name!r} is no share", code="message.malformed")
            field.add(total, words, out=total, checked=False)
        salt, others, values = np.split(total, [SALT_ELEMENTS, SALT_ELEMENTS * (1 + terms.members)])
        if share_root([values], salt, terms.leaf, manifest.share_length).hex() != manifest.roots[point - 1]:
            names = ", ".join(terms.member(h).name for h in helpers)
            raise CeremonyError(
                f"what {names} sent is not this member's share: one of them is wrong; ask others",
                code="ceremony.wrong-share",
            )
        info = ShareInfo.under(manifest, point)
        with ShareWriter(
            consortium.share_path(), unlock, info, salt, others.reshape(terms.members, SALT_ELEMENTS)
        ) as file:
            file.write(values)
        state.unlink()
        consortium.tidy()
        return Progress("answer", (), manifest)


def _read_answer(
    identity: Identity, manifest: Manifest, folder: Path, helper: int, header: Header, key: X25519PrivateKey
) -> field.Vector:
    name = manifest.terms.member(helper).name
    data = read_file(folder / f"answer-{helper}.msg", f"the answer of {name!r}", largest_answer(manifest))
    answer = identity.read(data, manifest.terms, header, private=key)
    return np.frombuffer(answer[: len(answer) // 8 * 8], "<u8").astype(np.uint64)


def largest_answer(manifest: Manifest) -> int:
    """Bytes of an answer: as large as a share, with all salts and a header."""
    return 8 * (manifest.share_length + SALT_ELEMENTS * (1 + manifest.terms.members)) + (1 << 16)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _check_helpers(manifest: Manifest, point: int, helpers: tuple[int, ...]) -> None:
    terms = manifest.terms
    known = all(type(h) is int and 1 <= h <= terms.members for h in helpers)
    if not known or len(set(helpers)) != len(helpers) or len(helpers) != terms.threshold or point in helpers:
        raise CeremonyError(
            f"a recovery needs exactly t = {terms.threshold} different helpers other than the member",
            code="ceremony.wrong-helpers",
        )


def _read_request(body: bytes, manifest: Manifest, point: int) -> tuple[str, tuple[int, ...], str]:
    """The nonce, the helpers and the key of a request, checked."""
    read = take(parse(body, _FORMAT, "a request"), ("nonce", "helpers", "key"), "a request")
    nonce, helpers, key = read["nonce"], read["helpers"], read["key"]
    texts = all(isinstance(text, str) and re.fullmatch("[0-9a-f]{64}", text) for text in (nonce, key))
    if not texts or not isinstance(helpers, list):
        raise CeremonyError(
            f"the request of {manifest.terms.member(point).name!r} is damaged", code="message.malformed"
        )
    _check_helpers(manifest, point, tuple(helpers))
    return str(nonce), tuple(helpers), str(key)


def _mask(manifest: Manifest, secret: bytes, own: int, other: int, point: int, request: bytes) -> Stream:
    """What two helpers share for exactly this request of exactly this member.

    The member's point is part of it: with the same masks for two requesters, the difference of a helper's two answers
    would be a multiple of its share.
    """
    pair = [x.to_bytes(8, "big") for x in sorted((own, other))]
    return Stream(
        derive_key(secret, "recovery pair", manifest.digest(), point.to_bytes(8, "big"), request, *pair),
        "recovery mask",
    )
