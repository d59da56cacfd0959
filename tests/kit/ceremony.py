"""What tests of the key ceremony share: a small consortium with identities in memory."""

from __future__ import annotations

import hashlib

from quorumark.consortium.identity import Identity
from quorumark.consortium.records import Member, Terms

NAMES = ("Avon", "Birch", "Cedar", "Delta", "Elm", "Fir", "Gorse", "Hazel", "Iris")


def identities(count: int) -> list[Identity]:
    names = [NAMES[i] if i < len(NAMES) else f"member {i + 1}" for i in range(count)]
    return [Identity.generate(name) for name in names]


def make_terms(people: list[Identity], threshold: int, coordinates: int, **changes: object) -> Terms:
    roster = tuple(
        Member(point, person.name, person.ed25519, person.x25519, 100 * point) for point, person in enumerate(people, 1)
    )
    values: dict[str, object] = {
        "name": "hospitals",
        "threshold": threshold,
        "roster": roster,
        "layout": hashlib.sha256(b"layout").hexdigest(),
        "coordinates": coordinates,
        "anchor": hashlib.sha256(b"anchor").hexdigest(),
        "created": "2026-01-31T12:00:00Z",
    }
    return Terms(**{**values, **changes})  # type: ignore[arg-type]
