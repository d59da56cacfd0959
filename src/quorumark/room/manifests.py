"""Manifests in a room, with their history: each under its digest, by every member that has it in force or had.

A room cannot make one up: who takes a chain from it names the digest of its last link, and checks all signatures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quorumark.consortium.home import ConsortiumFolder
from quorumark.consortium.identity import verify_chain
from quorumark.consortium.records import Manifest
from quorumark.errors import QuorumarkError, RoomError
from quorumark.room.client import Client, Notice
from quorumark.room.seat import Seat

__all__ = ["fetch_chain", "manifest_name", "publish_chain"]

_LARGEST = 1 << 26
_MOST = 1000  # links


def manifest_name(digest: str) -> str:
    return f"manifest/{digest}.json"


def publish_chain(client: Client, seat: Seat, ours: ConsortiumFolder) -> None:
    """The manifest in force here and all before it, unless the room has them of this member."""
    for link in ours.chain():
        name = manifest_name(link.digest().hex())
        if seat.mirror.find(seat.key, name) is None and name not in seat.sent:
            client.upload(link.to_bytes(), name)
            seat.sent.add(name)


def fetch_chain(client: Client, named: Callable[[str], Sequence[Notice]], digest: str) -> list[Manifest]:
    """The manifests up to the one with this digest, from the room; every link and signature checked.

    `named` gives the entries of a name, of all authors: one that was damaged does not hide the others'.
    """
    chain: list[Manifest] = []
    wanted: str | None = digest
    while wanted is not None and len(chain) < _MOST:
        link = _fetch(client, named(manifest_name(wanted)), wanted)
        chain.insert(0, link)
        wanted = link.predecessor
    verify_chain(chain)
    return chain


def _fetch(client: Client, notices: Sequence[Notice], digest: str) -> Manifest:
    for notice in notices:
        try:
            link = Manifest.from_bytes(client.small(notice, _LARGEST))
        except QuorumarkError as error:
            if error.code == "room.unreachable":
                raise
            continue
        if link.digest().hex() == digest and len(link.signatures) == link.terms.members:
            return link
    raise RoomError(f"the manifest {digest[:16]}… is not in the room, or not whole", code="room.not-found")
