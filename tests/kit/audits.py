"""An audit of a world's key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quorumark.verify.audit import Challenge, challenge, open_leaves
from quorumark.verify.audited import Audit, explain
from quorumark.verify.certificate import Certificate
from quorumark.verify.coalition import answer, combine, prepare, sign
from quorumark.verify.evidence import Partial, Query
from quorumark.verify.ledger import Ledger
from quorumark.verify.omissions import Audits
from tests.kit.consortium import World

SEED = bytes(range(32))


def ask(
    world: World, suspect: Path, points: Sequence[int], audits: Sequence[Audit] = (), known: Audits | None = None
) -> tuple[Query, list[Partial]]:
    """A query that leaves out what these audits opened, and the answers of some members, who get the proofs too."""
    opened = {**(known or {}), **explain(world.reference.chain, audits, known)}
    query = prepare(world.reference, suspect, burnt={leaf for leaves in opened.values() for leaf in leaves}).query
    homes = [world.homes[point - 1] for point in points]
    return query, [answer(*home, world.reference, suspect, query, approved=True, audits=audits) for home in homes]


@dataclass
class Audited:
    """A certificate, the challenge, and the members' openings by point."""

    certificate: Certificate
    challenge: Challenge
    openings: dict[int, bytes]

    def proof(self, world: World, points: Sequence[int], archives: Sequence[Path] = ()) -> Audit:
        files = [self.openings[point] for point in points]
        return Audit.of(self.certificate, self.challenge, files, world.reference.chain, archives)


def audit(
    world: World, suspect: Path, openers: Sequence[int], audits: Sequence[Audit] = (), seed: bytes = SEED
) -> Audited:
    """All members answer and sign; those in `openers` open what a seed draws."""
    points = range(1, len(world.homes) + 1)
    query, partials = ask(world, suspect, points, audits)
    opened = explain(world.reference.chain, audits)
    certificate = Certificate.of(combine(world.manifest, query, partials, audits=opened))
    for point in points:
        certificate = sign(*world.homes[point - 1], certificate)
    asked = challenge(query, world.manifest, certificate.finding.z, seed)
    openings = {}
    for point in openers:
        home, unlock = world.homes[point - 1]
        place = home.only_consortium()
        burns = Ledger.open(place, world.manifest)
        openings[point] = open_leaves(home, place, unlock, asked, query, answered=True, burns=burns)
    return Audited(certificate, asked, openings)


# --- forged and ground challenges --------------------------------------------------------------------------
