"""The examiner of a query by layers, in a room: takes the sealed answers from it, and puts its signed word there.

Numbers by layer stay with the examiner: nothing but Q and whose answers were wrong goes to the room.
"""

from __future__ import annotations

from quorumark.checks import require
from quorumark.consortium.home import HomeFolder
from quorumark.consortium.identity import Identity
from quorumark.consortium.records import Manifest
from quorumark.errors import QuorumarkError, RoomError
from quorumark.room.client import Client, Notice
from quorumark.room.manifests import fetch_chain
from quorumark.room.question import LARGEST_PARTIAL, LARGEST_QUERY
from quorumark.verify.evidence import Partial, Query
from quorumark.verify.examine import Examined, examine

__all__ = ["examine_in_room"]


def examine_in_room(client: Client, home: HomeFolder, identity: Identity, start: str) -> tuple[Examined, Manifest]:
    """Opens the answers that are in the room, and puts the examiner's word beside them; what only the examiner sees.

    `start` is the beginning of the query's digest. An examiner that is not a member takes the manifest from the room:
    it must compare its digest with what members say.
    """
    log = [one for one in client.whole_log() if not one.gone]
    query = _query(client, log, start)
    ours = home.consortium_of(query.manifest)
    if ours is not None and ours.manifest_path.exists():
        chain = ours.chain()
    else:
        chain = fetch_chain(client, lambda name: [one for one in log if one.name == name], query.manifest)
    manifest = next((link for link in chain if link.digest().hex() == query.manifest), chain[-1])
    examined = examine(identity, manifest, query, _partials(client, log, manifest, query))
    client.upload(examined.opened.to_bytes(), f"query/{query.digest()}/opened.json")
    return examined, manifest


def _query(client: Client, log: list[Notice], start: str) -> Query:
    found = {}
    for one in log:
        if start and one.name.startswith(f"query/{start}") and one.name.endswith("/query.json"):
            query = Query.from_bytes(client.small(one, LARGEST_QUERY))
            if query.digest() == one.name.split("/")[1]:
                found[query.digest()] = query
    if len(found) != 1:
        raise RoomError("there is no such query, or more than one: give more of its digest", code="room.not-found")
    return found.popitem()[1]


def _partials(client: Client, log: list[Notice], manifest: Manifest, query: Query) -> list[Partial]:
    """The answers that hold, each its member's; others are passed over."""
    found = []
    for member in manifest.terms.roster:
        for one in log:
            if (one.author, one.name) == (member.ed25519, f"query/{query.digest()}/partial.json"):
                try:
                    partial = Partial.from_bytes(client.small(one, LARGEST_PARTIAL))
                    partial.verify(manifest.terms)
                    require(partial.point == member.point and bool(partial.sealed), "an answer", "must be its own")
                except QuorumarkError as error:
                    if error.code == "room.unreachable":
                        raise
                    continue
                found.append(partial)
    return found
