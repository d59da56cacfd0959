"""A query in a room, as one agent has checked it; and what its messages are bound to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quorumark.consortium.home import ConsortiumFolder
from quorumark.consortium.identity import Header
from quorumark.consortium.records import Manifest, Terms
from quorumark.room.place import Place
from quorumark.verify.certificate import Certificate
from quorumark.verify.evidence import Query
from quorumark.verify.reference import Reference

__all__ = ["ASK", "LARGEST_CERTIFICATE", "LARGEST_PARTIAL", "LARGEST_QUERY", "LARGEST_WORD", "Asked", "header"]

ASK = "quorumark-room-ask/v1"
LARGEST_QUERY = 1 << 24
LARGEST_WORD = 1 << 13
LARGEST_PARTIAL = 1 << 20
LARGEST_CERTIFICATE = 1 << 25


def header(step: str, query: Query, sender: int) -> Header:
    """What a message about a query is bound to."""
    return Header(query.manifest, query.digest(), f"room/{step}", sender)


@dataclass(frozen=True)
class Asked:
    """A query that this agent has checked. `after`: for one by layers, the certificate of the plain query before it."""

    query: Query
    asker: str  # its key
    purpose: str
    answers: int
    ours: ConsortiumFolder
    manifest: Manifest
    reference: Reference
    suspect: Path
    after: Certificate | None = None

    @property
    def terms(self) -> Terms:
        return self.manifest.terms

    @property
    def start(self) -> str:
        return f"query/{self.query.digest()}"

    @property
    def kind(self) -> str:
        """What an answer opens, in a word."""
        if self.query.layers is not None:
            return "by layers"
        return "plain" if self.query.alignment == "none" else "aligned"

    @property
    def tested(self) -> Path | None:
        """Where the suspect is."""
        return self.suspect

    def compared_with(self) -> Reference | None:
        return self.reference

    def kept(self, place: Place, what: str) -> Path:
        """Where this member keeps what it sends about it: kept first, sent again if need be, never made anew."""
        return place.folder("answers") / f"{self.query.digest()}-{what}"
