"""Shared keys with liars among their members, for audits."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark import field, shamir
from quorumark.consortium.merkle import Opening, Tree, levels_of, new_salt, path_of, salt_seed
from quorumark.consortium.records import Genesis, Manifest
from quorumark.field import Vector
from quorumark.model.suspect import SuspectFile
from quorumark.verify.audit import Challenge, ShareOpening
from quorumark.verify.evidence import Query, vector_digest
from quorumark.verify.null import z_text
from tests.kit.ceremony import identities, make_terms

D, LEAF, Z = 60_000, 64, 100.0


SEED = bytes(range(32))


# --- a query, without the machinery that makes one --------------------------------------------------------


def query_of(x: NDArray[np.int8], manifest: Manifest, burnt: tuple[int, ...] = (), **changes: Any) -> Query:
    wide = x.astype(np.int64)
    values: dict[str, Any] = {
        "manifest": manifest.digest().hex(),
        "epoch": manifest.epoch,
        "statistic": manifest.terms.statistic,
        "alignment": "none",
        "suspect": "5a" * 32,
        "files": (SuspectFile("suspect.safetensors", "5b" * 32, 4 * x.size),),
        "x": vector_digest(x),
        "coordinates": x.size,
        "carriers": x.size,
        "covered": x.size,
        "norm1": int(np.abs(wide).sum()),
        "norm2": int((wide**2).sum()),
        "norm4": int((wide**4).sum()),
        "burnt": burnt,
        "burnt_norm2": 0,
        "matching": (),
        "created": "2026-01-31T12:00:00Z",
    }
    return Query(**{**values, **changes})


def vector(rng: np.random.Generator, key: NDArray[Any] | None = None, z: float = Z, size: int = D) -> Any:
    """A suspect's x: noise, and the mark in it where it carries one of that z. (a/√(1+a²) is the cosine z/√d.)"""
    cosine = z / sqrt(size)
    mark = 0 if key is None else cosine / sqrt(1 - cosine**2) * key
    return np.clip(np.round(20 * (rng.standard_normal(size) + mark)), -127, 127).astype(np.int8)


def score(x: NDArray[np.int8], key: NDArray[np.int64]) -> str:
    wide = x.astype(np.int64)
    return z_text(int(wide @ key), int(wide @ wide))


def signs(genesis: Genesis, size: int) -> NDArray[np.int64]:
    return 1 - 2 * genesis.whitening(0, size).astype(np.int64)


# --- liars ------------------------------------------------------------------------------------------------


class Liars:
    """People who control all that they sign: any shares, committed to by honest roots."""

    def __init__(self, shares: Vector, threshold: int = 3, leaf: int = LEAF, **terms: Any) -> None:
        self.people = identities(shares.shape[0])
        self.shares, self.size = shares, leaf
        self.terms = make_terms(self.people, threshold, shares.shape[1], leaf=leaf, **terms)
        self.trees = []
        for share in shares:
            self.trees.append(Tree(salt_seed(new_salt()), leaf, shares.shape[1]))
            self.trees[-1].update(share)
        self.levels = [levels_of(tree.leaves()) for tree in self.trees]
        self.redo("ab" * 32)

    def redo(self, session: str) -> None:
        """The setup again, with the same shares: another session gives another whitening."""
        t, roots = self.terms, tuple(tree.root().hex() for tree in self.trees)
        genesis = Genesis(t.digest().hex(), t.layout, t.anchor, t.statistic, session, roots)
        commitment = {"hash": "00" * 32, "nonce": "00" * 32, "norm": "1"} if t.setup == "dealer" else None
        manifest = Manifest(t, genesis, roots, commitment=commitment)
        for point, person in enumerate(self.people, 1):
            manifest = manifest.with_signature(point, person.sign("manifest", manifest.sign_bytes()))
        self.manifest = manifest

    def leaf(self, point: int, index: int) -> Opening:
        values = self.shares[point - 1][index * self.size : (index + 1) * self.size]
        return Opening(index, values, self.trees[point - 1].salt(index), path_of(self.levels[point - 1], index))

    def opening(self, point: int, asked: Challenge, leaves: Sequence[Opening] | None = None, **changes: Any) -> bytes:
        given = tuple(self.leaf(point, i) for i in asked.leaves) if leaves is None else tuple(leaves)
        values = {"manifest": asked.manifest, "challenge": asked.digest(), "point": point, **changes}
        return ShareOpening.sign(self.people[point - 1], **values, leaves=given).to_bytes()

    def openings(self, asked: Challenge) -> list[bytes]:
        return [self.opening(point, asked) for point in range(1, len(self.people) + 1)]


def shared(key: NDArray[np.int64], threshold: int = 3, members: int = 5) -> Vector:
    return shamir.share(field.from_signed(key), threshold, members)
