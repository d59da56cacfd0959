"""Setup with a dealer who is trusted to forget the key (the paper's Alg. 1; docs/protocol.md, "Setup").

The dealer draws τ, commits to it, cuts it into compressed shares and seals each to its member's public key, block by
block: memory is bounded by a block, not by K·d. It learns everything while it runs; where nobody is trusted that far,
use the dealer-free setup.

    FOLDER/dealing.json          terms, session, roots and commitment: the manifest to be, without signatures
    FOLDER/share-POINT.sealed    sealed to that member
    FOLDER/signature-POINT.hex   written by the member once its share is checked and kept
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quorumark import field, shamir
from quorumark.canonical import digest
from quorumark.consortium import memory
from quorumark.consortium.home import ConsortiumFolder, HomeFolder, read_as, read_file
from quorumark.consortium.identity import Identity, verify, verify_manifest
from quorumark.consortium.keystore import Unlock
from quorumark.consortium.merkle import SALT_ELEMENTS, Tree, salt_seed
from quorumark.consortium.records import Genesis, Manifest, Terms
from quorumark.consortium.shares import ShareFile, ShareInfo, ShareWriter
from quorumark.errors import CeremonyError, RecordError
from quorumark.field import Stream
from quorumark.files import only_one, write_shared
from quorumark.setup.waiting import Progress

__all__ = ["accept", "check_commitment", "commitment", "deal", "draw_key", "draw_normal"]

GAUSSIAN_BITS = 8
"""Fractional bits of a gaussian key's entries: 32 of the 40 are left for the amplitude."""


def commitment(nonce: bytes, terms: bytes) -> hashlib._Hash:
    """A hash to feed the key's entries to, as 4-byte little-endian numbers: C = SHA-256(domain ‖ ρ ‖ terms ‖ τ_raw)."""
    return hashlib.sha256(digest("key commitment", nonce, terms))


def draw_key(stream: Stream, kind: str, start: int, count: int) -> NDArray[np.int64]:
    """The key's raw entries: ±1, or standard normal in steps of 2^-8."""
    if kind == "rademacher":
        bits = stream.elements(count, start) & np.uint64(1)
        return 2 * bits.astype(np.int64) - np.int64(1)  # type: ignore[no-any-return]
    return draw_normal(stream, start, count)


def draw_normal(stream: Stream, start: int, count: int, variance: float = 1.0) -> NDArray[np.int64]:
    """Normal numbers in steps of 2^-8 (Box–Muller on 61-bit uniform numbers)."""
    words = stream.elements(2 * count, 2 * start).reshape(2, count)
    radius, angle = (words.astype(np.float64) + 0.5) / field.P
    normal = np.sqrt(-2 * np.log(radius)) * np.cos(2 * np.pi * angle)
    return np.round(normal * (np.sqrt(variance) * 2**GAUSSIAN_BITS)).astype(np.int64)  # type: ignore[no-any-return]


def deal(
    terms: Terms, folder: str | os.PathLike[str], progress: Callable[[int, int], None] = lambda _done, _of: None
) -> Manifest:
    """Draws and deals a key; the manifest to be signed. `progress` hears how many coordinates are done, of how many."""
    if terms.setup != "dealer":
        raise CeremonyError(
            f"the terms of {terms.name!r} ask for the setup {terms.setup!r}, not 'dealer'", code="ceremony.other-setup"
        )
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    if (target / "dealing.json").exists():
        raise CeremonyError(f"{str(target)!r} already holds a dealing", code="ceremony.folder-used")
    session, nonce = os.urandom(32).hex(), os.urandom(32)
    # blocks small enough that the choice of generated shares goes round several times, and everyone saves alike
    block = max(1024, min(shamir.DEFAULT_BLOCK, terms.coordinates // (8 * terms.members)))
    points = range(1, terms.members + 1)
    seeds = {point: os.urandom(32) for point in points}
    salts = field.random(terms.members * SALT_ELEMENTS)
    salt_shares = shamir.share(salts, terms.threshold, terms.members)
    trees = {
        x: Tree(salt_seed(salts[(x - 1) * SALT_ELEMENTS : x * SALT_ELEMENTS]), terms.leaf, terms.coordinates)
        for x in points
    }
    key, hashed, norm = Stream.fresh("dealer key"), commitment(nonce, terms.digest()), 0
    with contextlib.ExitStack() as stack:
        files = {}
        for x in points:
            info = ShareInfo.first(terms, session, x, block)
            own = salts[(x - 1) * SALT_ELEMENTS : x * SALT_ELEMENTS]
            unlock = Unlock.to_member(terms.member(x).x25519)
            others = salt_shares[x - 1].reshape(terms.members, SALT_ELEMENTS)
            writer = ShareWriter(target / f"share-{x}.sealed", unlock, info, own, others, seeds[x])
            files[x] = stack.enter_context(writer)
        for index, part in enumerate(field.chunks(terms.coordinates, block)):
            size = part.stop - part.start
            entries = draw_key(key, terms.key, part.start, size)
            hashed.update(entries.astype("<i4").tobytes())
            norm += int(entries @ entries)
            stored = shamir.compressed_block(field.from_signed(entries), index, seeds, terms.threshold)
            entries.fill(0)  # as far as Python lets us: the key is not kept
            for x in points:
                if x in stored:
                    files[x].write(stored[x])
                values = stored[x] if x in stored else shamir.generated_block(seeds[x], x, index, size)
                trees[x].update(values)
            progress(part.stop, terms.coordinates)
    committed = {"hash": hashed.hexdigest(), "nonce": nonce.hex()}
    if terms.key == "gaussian":
        committed["norm"] = str(norm)  # Σ τ², in units of 2^-16
    roots = tuple(trees[x].root().hex() for x in points)
    genesis = Genesis(terms.digest().hex(), terms.layout, terms.anchor, terms.statistic, session, roots)
    manifest = Manifest(terms, genesis, roots, commitment=committed)
    for x in points:
        (target / f"share-{x}.sealed").chmod(0o644)  # for the members; it is sealed to them
    write_shared(target / "dealing.json", manifest.to_bytes())
    return manifest


def accept(home: HomeFolder, unlock: Unlock, folder: str | os.PathLike[str], terms: Terms | None = None) -> Progress:
    """A member takes its share: checks it against the dealing, keeps it sealed, signs. The manifest once all signed.

    `terms`, where given, are what this member agreed to; the dealing must be for exactly these. Run it again to finish.
    """
    source = Path(folder)
    if not (source / "dealing.json").exists():
        return Progress("deal", ("the dealer",), files=(source / "dealing.json",))
    manifest = read_as(source / "dealing.json", "a dealing", Manifest.from_bytes)
    if manifest.signatures or manifest.predecessor is not None:
        raise RecordError("a dealing must be a first manifest, without signatures")
    if manifest.terms.setup != "dealer":
        raise RecordError(f"the terms ask for the setup {manifest.terms.setup!r}: a dealt key is not that")
    if terms is not None and manifest.terms.digest() != terms.digest():
        raise RecordError("the dealing is for other terms than this member agreed to")
    identity = home.identity(unlock)
    point = manifest.terms.point_of(identity.ed25519)
    consortium = home.consortium(manifest.terms)
    with only_one(consortium.path):
        return _take(consortium, identity, unlock, source, manifest, point)


def _take(
    consortium: ConsortiumFolder, identity: Identity, unlock: Unlock, source: Path, manifest: Manifest, point: int
) -> Progress:
    if consortium.manifest_path.exists() and consortium.manifest().digest() != manifest.digest():
        raise CeremonyError(
            "this member already holds a share of another dealing under these terms", code="ceremony.share-exists"
        )
    if consortium.share_path().exists():
        kept = consortium.share(unlock)
        if kept.info.session != manifest.genesis.session or kept.root().hex() != manifest.roots[point - 1]:
            raise CeremonyError(
                "the share that this member keeps is not the one of this dealing", code="ceremony.wrong-share"
            )
    else:
        sealed = ShareFile(source / f"share-{point}.sealed", Unlock.by_identity(identity))
        expected = ShareInfo.under(manifest, point, sealed.info.block)
        if sealed.info != expected:
            raise CeremonyError(
                "the dealer's file for this member describes another share than the dealing does",
                code="ceremony.wrong-share",
            )
        if sealed.root().hex() != manifest.roots[point - 1]:
            raise CeremonyError(
                "the dealer's share for this member is not the one that its root commits to",
                code="ceremony.wrong-share",
            )
        sealed.copy_to(consortium.share_path(), unlock)
    if not consortium.manifest_path.exists():
        memory.begin(consortium, identity)
    consortium.remember_signed(manifest.terms.digest().hex(), manifest.digest().hex())
    signature = identity.sign("manifest", manifest.sign_bytes()).hex()
    write_shared(source / f"signature-{point}.hex", signature.encode())
    for member in manifest.terms.roster:
        path = source / f"signature-{member.point}.hex"
        if path.exists():
            found = read_file(path, "a signature").decode(errors="replace").strip()
            verify(member.ed25519, "manifest", manifest.sign_bytes(), found, member.name)
            manifest = manifest.with_signature(member.point, bytes.fromhex(found))
    missing = [member for member in manifest.terms.roster if member.point not in manifest.signatures]
    if missing:
        files = tuple(source / f"signature-{member.point}.hex" for member in missing)
        return Progress("sign", tuple(member.name for member in missing), files=files)
    verify_manifest(manifest)
    write_shared(consortium.manifest_path, manifest.to_bytes())
    return Progress("sign", (), manifest)


def check_commitment(manifest: Manifest, key: NDArray[np.int64]) -> bool:
    """Whether a reconstructed raw key is the one that the dealer committed to."""
    if manifest.commitment is None:
        raise CeremonyError(
            "this consortium's key was made without a dealer: there is no commitment to check",
            code="ceremony.nothing-to-check",
        )
    hashed = commitment(bytes.fromhex(manifest.commitment["nonce"]), bytes.fromhex(manifest.genesis.terms))
    hashed.update(key.astype("<i4").tobytes())
    return hashed.hexdigest() == manifest.commitment["hash"]
