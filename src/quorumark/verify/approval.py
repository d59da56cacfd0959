"""A person's approval of one query, for a member whose share another process holds (docs/room.md, "The signer").

It is signed by the member's own identity and bound to the query's digest: who else reaches that process cannot make
one, and one query's approval is for no other.
"""

from __future__ import annotations

from quorumark.consortium.identity import Header, Identity, open_message
from quorumark.consortium.records import Manifest
from quorumark.errors import EvidenceError
from quorumark.verify.evidence import Query

__all__ = ["approve", "ask_for_ledger", "check_approval", "check_asked"]

_PERSON, _LEDGER = b"a person approved", b"the ledger"


def _about(query: Query, point: int) -> Header:
    return Header(query.manifest, query.digest(), "signer/approved", point)


def approve(identity: Identity, manifest: Manifest, query: Query) -> bytes:
    """That a person at this member approved the query."""
    return identity.write(_about(query, manifest.terms.point_of(identity.ed25519)), _PERSON)


def check_approval(message: bytes, manifest: Manifest, point: int, query: Query) -> None:
    """A SignatureError, MessageError or EvidenceError unless the member at `point` approved exactly this query."""
    if query.manifest != manifest.digest().hex():
        raise EvidenceError("the approval is for a query under another manifest than the one in force here")
    if open_message(message, manifest.terms, _about(query, point)) != _PERSON:
        raise EvidenceError("the message with the query is no person's approval")


def _asked(manifest: Manifest, point: int) -> Header:
    return Header(manifest.digest().hex(), manifest.genesis.terms, "signer/ledger", point)


def ask_for_ledger(identity: Identity, manifest: Manifest) -> bytes:
    """That it is this member's own agent that reads its ledger."""
    return identity.write(_asked(manifest, manifest.terms.point_of(identity.ed25519)), _LEDGER)


def check_asked(message: bytes, manifest: Manifest, point: int) -> None:
    open_message(message, manifest.terms, _asked(manifest, point))
