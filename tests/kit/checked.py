"""Consortia whose sums are checked."""

from __future__ import annotations

from quorumark.consortium.identity import Identity
from quorumark.consortium.records import DEFAULT_POLICY
from quorumark.round.group import Group

CHECKED = {**DEFAULT_POLICY, "sums": "checked"}


# --- the key ----------------------------------------------------------------------------------------------


def five_people(count: int = 5) -> tuple[list[Identity], Group]:
    people = [Identity.generate(f"Hospital {x}") for x in range(1, count + 1)]
    group = Group.of_cards([person.card() for person in people], 3, b"sums")
    return sorted(people, key=lambda person: group.point_of(person.ed25519)), group
