"""The proof that leaves of the shares were opened, which alone burns them (docs/verification.md, "What a query leaves
out").

A challenge proves nothing: it is unsigned, and its seed and z are the asker's. `Audit` is one file with all that does:

    the certificate     signed by its members, and following from their partials
    the challenge       about that certificate's query and z, with the leaves that its seed draws
    the openings        of exactly those leaves, signed by t members of that time
    the leaves          of t genesis shares (t: the first threshold), each with its path to the genesis root

Fewer than t members cannot make one: nobody else knows what the roots commit to, and an honest member opens only for a
certificate of a query that it answered, which leaves out only what was proved before. t members can, and those can sign
any number anyway.

    audit = Audit.of(certificate, challenge, openings, chain, archives)       # anybody, after the openings
    audits = explain(chain, [audit])                                          # name → leaves, for anybody who checks
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import ClassVar, Self

from quorumark.canonical import canonical, parse
from quorumark.checks import require, take
from quorumark.consortium.merkle import Opening, root_from
from quorumark.consortium.records import Manifest
from quorumark.errors import EvidenceError, QuorumarkError
from quorumark.verify.certificate import Certificate
from quorumark.verify.challenge import Challenge, check_challenge, genesis_digest
from quorumark.verify.combine import check_signed
from quorumark.verify.leaves import check_opening, from_archives, from_shares
from quorumark.verify.omissions import Audits
from quorumark.verify.opening import KeyOpening, leaf_dict, leaf_from

__all__ = ["LARGEST", "Audit", "explain"]

LARGEST = 1 << 30
"""Bytes of such a file, at most."""


@dataclass(frozen=True, eq=False)
class Audit:
    """An audit that took place. `openings` are members' files; `leaves`, from epoch 1 on, is what the archives hold."""

    FORMAT: ClassVar[str] = "quorumark-audit/v1"

    certificate: Certificate
    challenge: Challenge
    openings: tuple[bytes, ...] = field(repr=False)
    leaves: dict[int, tuple[Opening, ...]] = field(repr=False)

    @property
    def name(self) -> str:
        """The digest of the challenge: certificates and ledgers name an audit by it, no matter who opened."""
        return self.challenge.digest()

    @classmethod
    def of(
        cls,
        certificate: Certificate,
        challenge: Challenge,
        openings: Sequence[bytes],
        chain: Sequence[Manifest],
        archives: Sequence[str | os.PathLike[str]] = (),
    ) -> Self:
        """From the files of an audit, without those that are wrong, and no more of them than the proof takes."""
        past = _until(chain, challenge)
        first, quorum = past[0].terms.threshold, past[-1].terms.threshold
        sound = tuple(data for data in openings if _is_sound(data, challenge, past))
        if past[-1].epoch == 0:
            found = cls(certificate, challenge, sound[:quorum], {})
        else:
            leaves, _ = from_archives(challenge, past, sound, archives)
            found = cls(certificate, challenge, sound[:quorum], dict(islice(leaves.items(), first)))
        found._check_openings(past)
        return found

    def to_bytes(self) -> bytes:
        return canonical(
            {
                "format": self.FORMAT,
                "certificate": json.loads(self.certificate.to_bytes()),
                "challenge": json.loads(self.challenge.to_bytes()),
                "openings": [json.loads(data) for data in self.openings],
                "leaves": {str(x): [leaf_dict(leaf) for leaf in found] for x, found in self.leaves.items()},
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        what = "a proof of an audit"
        taken = take(parse(data, cls.FORMAT, what), ("certificate", "challenge", "openings", "leaves"), what)
        require(isinstance(taken["openings"], list), f"{what}: its openings", "must be a list")
        found = taken["leaves"]
        sound = isinstance(found, dict) and all(
            x.isascii() and x.isdecimal() and len(x) < 10 and str(int(x)) == x and isinstance(leaves, list)
            for x, leaves in found.items()
        )
        require(sound, f"{what}: its leaves", "must be lists, named by points")
        return cls(
            Certificate.from_bytes(canonical(taken["certificate"])),
            Challenge.from_bytes(canonical(taken["challenge"])),
            tuple(canonical(opening) for opening in taken["openings"]),
            {int(x): tuple(leaf_from(leaf) for leaf in leaves) for x, leaves in found.items()},
        )

    def check(self, chain: Sequence[Manifest]) -> None:
        """Whether it proves that these leaves were opened; an EvidenceError says what is missing. `chain` was checked.

        What its query leaves out itself is not asked here: `explain` does that.
        """
        past, finding = _until(chain, self.challenge), self.certificate.finding
        # 1. the certificate is signed by its members, and follows
        check_signed(self.certificate, past[-1])
        # 2. the challenge is about it, and draws these leaves
        check_challenge(self.challenge, finding.query, past[-1])
        if self.challenge.z != finding.z:
            raise EvidenceError(f"it is for z = {self.challenge.z}, but its certificate says {finding.z}")
        # 3. t members opened them, and t genesis shares lead to their roots
        self._check_openings(past)

    def _check_openings(self, past: Sequence[Manifest]) -> None:
        manifest, first = past[-1], past[0].terms.threshold
        terms, genesis = manifest.terms, manifest.genesis
        if manifest.epoch == 0:
            opened, _ = from_shares(self.challenge, past, self.openings)
            needed = max(first, terms.threshold)
            if len(opened) < needed:
                raise EvidenceError(_too_few(len(opened), needed))
            return
        signers = set()
        for data in self.openings:
            opening = KeyOpening.from_bytes(data)
            check_opening(opening, self.challenge, terms)
            signers.add(opening.point)
        if len(signers) < terms.threshold:
            raise EvidenceError(_too_few(len(signers), terms.threshold))
        for point, leaves in self.leaves.items():
            require(
                1 <= point <= len(genesis.roots),
                f"point {point}",
                f"must be one of the genesis, which has {len(genesis.roots)}",
            )
            require(
                tuple(leaf.index for leaf in leaves) == self.challenge.leaves,
                f"what is opened of the share at point {point}",
                "is not exactly what was asked",
            )
            for leaf in leaves:
                if root_from(leaf, terms.leaf, terms.coordinates).hex() != genesis.roots[point - 1]:
                    raise EvidenceError(f"leaf {leaf.index} at point {point} is not what the genesis root commits to")
        if len(self.leaves) < first:
            raise EvidenceError(
                f"leaves of {len(self.leaves)} archived genesis shares are in it, but it takes {first}: add copies of "
                "more archives"
            )


def _too_few(found: int, needed: int) -> str:
    return (
        f"{found} members' openings hold, but it takes {needed}: fewer make nothing public; collect more (verify audit "
        "check says what is wrong with each)"
    )


def _is_sound(data: bytes, challenge: Challenge, past: Sequence[Manifest]) -> bool:
    if past[-1].epoch == 0:
        return bool(from_shares(challenge, past, [data])[0])
    try:
        check_opening(KeyOpening.from_bytes(data), challenge, past[-1].terms)
    except QuorumarkError:
        return False
    return True


def _until(chain: Sequence[Manifest], challenge: Challenge) -> list[Manifest]:
    """The manifests up to the one that a challenge was made under."""
    if challenge.genesis != genesis_digest(chain[-1].genesis):
        raise EvidenceError("it is about another consortium's key: its genesis is another one")
    names = [manifest.digest().hex() for manifest in chain]
    if challenge.manifest not in names:
        raise EvidenceError(
            "it was made under a manifest that is not among those given: put the newest one beside history"
        )
    return list(chain[: names.index(challenge.manifest) + 1])


def explain(
    chain: Sequence[Manifest], audits: Sequence[Audit], known: Audits | None = None
) -> dict[str, tuple[int, ...]]:
    """The leaves that these audits opened, by their names; an EvidenceError names the one that proves nothing.

    What an audit's own query left out must be explained too, by the others or by what is `known` (a member's ledger):
    or its seed would have been drawn among leaves of somebody's choice.
    """
    found = {name: tuple(leaves) for name, leaves in (known or {}).items()}
    given = {audit.name: audit for audit in audits if audit.name not in found}
    waiting = dict(given)
    while waiting:
        public = {leaf for leaves in found.values() for leaf in leaves}
        ready = [audit for audit in waiting.values() if public.issuperset(audit.challenge.burnt)]
        for audit in ready or list(waiting.values())[:1]:
            try:
                lacking = set(audit.challenge.burnt) - public
                rule = f"its query leaves out {len(lacking)} leaves that no audit here explains: give those audits too"
                if lacking:
                    raise EvidenceError(rule)
                audit.check(chain)
            except QuorumarkError as error:
                raise EvidenceError(f"the audit {audit.name[:16]} explains nothing: {error}") from None
            found[audit.name] = audit.challenge.leaves
            del waiting[audit.name]
    return {name: found[name] for name in given}
