"""What a member needs that asks by layers on its page: a plain certificate that did not pass, and an examiner.

Both are shown as they are on this disk: certificates were checked when they came. Who may examine is who joined the
room; that somebody is a member is not the room's word, but the signed manifest's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quorumark.consortium.home import HomeFolder, read_as, read_file
from quorumark.consortium.policy import NO_BLOCKS
from quorumark.consortium.records import Card, Manifest, Terms
from quorumark.errors import QuorumarkError, RoomError
from quorumark.model.blocks import blocks_of
from quorumark.model.layout import ModelLayout
from quorumark.room.people import read_cards
from quorumark.room.place import Place
from quorumark.verify.certificate import Certificate
from quorumark.verify.guard import budget, layers_offered
from quorumark.verify.ledger import Ledger
from quorumark.verify.reference import LAYOUT

__all__ = ["Before", "Candidate", "Choices", "find_choices"]


@dataclass(frozen=True)
class Before:
    """A plain certificate that did not pass. `query` and `digest` are the query's digest and its own."""

    query: str
    digest: str
    text: str
    path: Path


@dataclass(frozen=True)
class Candidate:
    """Who can examine."""

    card: Card
    is_member: bool

    @property
    def fingerprint(self) -> str:
        return self.card.fingerprint()


@dataclass(frozen=True)
class Choices:
    """For the form. `blocks` is what an answer costs, of `left` equations; 0 where nothing is answered by layers."""

    terms: Terms
    before: tuple[Before, ...] = ()
    examiners: tuple[Candidate, ...] = ()
    blocks: int = 0
    left: int = 0

    def certificate(self, digest: str) -> Before:
        for one in self.before:
            if one.digest == digest:
                return one
        raise RoomError("choose the question that did not pass: look at the page again", code="room.not-shown")

    def examiner(self, fingerprint: str) -> Card:
        for one in self.examiners:
            if one.fingerprint == fingerprint:
                return one.card
        raise RoomError("choose the examiner: look at the page again", code="room.not-shown")


def find_choices(home: HomeFolder, place: Place) -> Choices:
    """What there is to choose under the manifest in force."""
    ours = home.only_consortium()
    manifest = ours.manifest()
    terms = manifest.terms
    if terms.policy.blocks == NO_BLOCKS or not layers_offered(terms):
        return Choices(terms)
    layout = read_as(ours.path / LAYOUT, "a layout", ModelLayout.from_bytes)
    used = sum(Ledger.open(ours, manifest).equations().values())
    examiners = tuple(_examiners(place, manifest))
    blocks = blocks_of(layout, terms.policy.blocks).count
    return Choices(terms, tuple(_before(place, manifest)), examiners, blocks, budget(terms) - used)


def _before(place: Place, manifest: Manifest) -> list[Before]:
    found: dict[str, Before] = {}
    for path in sorted(place.folder("certificates").glob("*/certificate*.json")):
        try:
            certificate = Certificate.from_bytes(read_file(path, "a certificate"))
        except QuorumarkError:
            continue
        finding = certificate.finding
        query = finding.query
        passed = finding.verdict == "PASSED" or query.layers is not None
        if not passed and query.manifest == manifest.digest().hex():
            names = ", ".join(file.name for file in query.files[:3])
            text = f"{names}: {finding.verdict}, {len(finding.partials)} answers, {finding.created[:10]}"
            found[path.as_posix()] = Before(query.digest(), certificate.digest(), text, path)
        elif finding.verdict == "PASSED":  # with a later answer
            found = {name: one for name, one in found.items() if one.query != query.digest()}
    return sorted(found.values(), key=lambda one: one.path.stat().st_mtime, reverse=True)


def _examiners(place: Place, manifest: Manifest) -> list[Candidate]:
    """Members as the manifest has them, both keys; then others who joined, unless they have a member's name or key."""
    roster = {(m.name, m.ed25519, m.x25519) for m in manifest.terms.roster}
    taken = {part for member in roster for part in member}
    cards = read_cards(place)
    members = [Candidate(c, True) for c in cards if (c.name, c.ed25519, c.x25519) in roster]
    others = [Candidate(c, False) for c in cards if not {c.name, c.ed25519, c.x25519} & taken]
    return [*sorted(members, key=lambda one: one.card.name), *sorted(others, key=lambda one: one.card.name)]
