"""How members introduce themselves in a room: card and number of examples, signed, for whoever writes the terms."""

from __future__ import annotations

import re
from pathlib import Path

from quorumark.canonical import canonical, parse
from quorumark.checks import is_count, require, take
from quorumark.consortium.home import read_file
from quorumark.consortium.identity import Identity, verify, verify_card
from quorumark.consortium.records import Card
from quorumark.errors import QuorumarkError, RoomError
from quorumark.files import write_shared
from quorumark.room.client import Client
from quorumark.room.desk import Mirror
from quorumark.room.place import Place

__all__ = ["introduce", "keep_people", "read_cards", "read_people"]

_FORMAT = "quorumark-room-person/v1"
_PURPOSE = "room person"
_NAMED = re.compile("person/([0-9]{1,15}).json")
_LARGEST = 1 << 13


def introduce(client: Client, identity: Identity, mirror: Mirror, examples: int) -> None:
    """Says who this member is, once for each number of examples."""
    name = f"person/{examples}.json"
    if mirror.find(identity.ed25519, name) is None:
        body = {"format": _FORMAT, "card": identity.card().to_bytes().decode(), "examples": examples}
        signature = identity.sign(_PURPOSE, canonical(body)).hex()
        client.upload(canonical(body | {"signature": signature}), name)


def _read(data: bytes) -> tuple[Card, int]:
    body = take(parse(data, _FORMAT, "an introduction"), ["card", "examples", "signature"], "an introduction")
    require(
        isinstance(body["card"], str) and is_count(body["examples"]), "an introduction", "must have card and examples"
    )
    card = Card.from_bytes(body["card"].encode())
    verify_card(card)
    signed = canonical({"format": _FORMAT, "card": body["card"], "examples": body["examples"]})
    verify(card.ed25519, _PURPOSE, signed, str(body["signature"]), card.name)
    return card, body["examples"]


def keep_people(client: Client, place: Place, mirror: Mirror) -> None:
    """Keeps the introductions of all who joined; what does not hold is passed over."""
    for number, notice in enumerate(mirror.named("person/", ".json"), 1):
        path = place.people / f"{notice.author}-{notice.sha256[:16]}.json"
        if _NAMED.fullmatch(notice.name) is None or path.exists():
            continue
        try:
            data = client.small(notice, _LARGEST)
            card, _ = _read(data)
            require(card.ed25519 == notice.author, "an introduction", "must be its author's")
        except QuorumarkError as error:
            if error.code == "room.unreachable":
                raise
            continue
        for old in place.people.glob(f"{notice.author}-*.json"):
            old.unlink()  # a later number of examples counts
        write_shared(path, data)
        _order(place, notice.author, number)


def _order(place: Place, author: str, number: int) -> None:
    """Points follow the order in which members came."""
    path = place.people / f"{author}.order"
    if not path.exists():
        write_shared(path, str(number).encode())


def read_cards(place: Place) -> list[Card]:
    """The cards of all who introduced themselves: signed each by its own keys, and no more is known of them."""
    found = []
    for path in sorted(place.people.glob("*-*.json")):
        card, _ = _read(read_file(path, "an introduction"))
        found.append(card)
    return found


def read_people(home: Path) -> list[tuple[Card, int]]:
    """All who introduced themselves in the room of a home, in the order in which they came."""
    place = Place(home)
    place.settings()  # a home that is in no room is refused
    found = []
    for path in place.people.glob("*-*.json"):
        card, examples = _read(read_file(path, "an introduction"))
        order = place.people / f"{card.ed25519}.order"
        found.append((int(order.read_text()) if order.exists() else 0, card.name, card, examples))
    if not found:
        raise RoomError(
            "nobody is in the room yet: run quorumark room join, and wait for the others", code="room.not-found"
        )
    without = [name for _, name, _, examples in found if not examples]
    if without:
        raise RoomError(
            f"{', '.join(without)} did not say how many examples there are: join again with --examples",
            code="room.not-proposed",
        )
    return [(card, examples) for _, _, card, examples in sorted(found, key=lambda one: one[:2])]
