"""Checked sums: what a server announces as a round's sum is what the members sent (docs/secagg.md, "Checked sums").

A server that could announce any model as the last round's sum could choose one that shows the key in the next round. So
the members of a round, U, put one element more behind their vectors: together a tag of the sum, under a key that all of
U know and the server does not. With g and β from that key,

    x_k[last] = ⟨g, x_k⟩, and β on top for the first member of U,  so that the opened sum has  O[last] = ⟨g, O⟩ + β.

For a server without the key β hides ⟨g, O⟩ entirely, so that the tag says nothing, and another sum with a tag that fits
is a guess of one element: 1 in 2^61. Everybody of U must keep the key to itself: one member who gives it to the server
undoes this.

Each member has a new part of the key for each round, and seals it to every other member. A member that could check
the sum which its round starts from says so, signed (it *vouches*); the others take part only if t members of U do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from quorumark import field
from quorumark.consortium.identity import Identity
from quorumark.errors import MessageError, RoundError
from quorumark.field import P, Stream, Vector, derive_key
from quorumark.round.group import Group, word
from quorumark.round.memory import State, answers_from
from quorumark.round.secagg.messages import opened as opened_message
from quorumark.round.statements import Turn

__all__ = [
    "box_for",
    "check",
    "check_said",
    "check_vouchers",
    "holds",
    "kept",
    "round_key",
    "seal_keys",
    "tag",
    "vouch",
    "vouchers",
]

_PIECE = 1 << 20
_BOX = 32 + 16
# a box's key is for one sender, recipient, round and binding, and its content always the same: one nonce is right
_NONCE = bytes(12)


# --- the key of a round -----------------------------------------------------------------------------------


def seal_keys(identity: Identity, group: Group, round_no: int, binding: bytes) -> bytes:
    """This member's part of the round's key, in a box for each point of the roster (its own one is empty)."""
    point = group.point_of(identity.ed25519)
    part = _own_part(identity, group, round_no, binding)
    boxes = [
        bytes(_BOX)
        if member.point == point
        else _cipher(identity, group, round_no, binding, point, member.point).encrypt(_NONCE, part, None)
        for member in group.roster
    ]
    return b"".join(boxes)


def box_for(boxes: bytes, point: int) -> bytes:
    """What the server hands on of a member's boxes."""
    return boxes[_BOX * (point - 1) : _BOX * point]


def round_key(
    identity: Identity, group: Group, round_no: int, binding: bytes, members: Sequence[int], boxes: Sequence[bytes]
) -> bytes:
    """The key of the sum over `members`, from their boxes for this member."""
    point, parts = group.point_of(identity.ed25519), []
    if len(boxes) != len(members):
        raise MessageError(
            "the server must hand on one box of every member of the announced set", code="message.incomplete"
        )
    for sender, box in zip(members, boxes, strict=True):
        if sender == point:
            parts.append(_own_part(identity, group, round_no, binding))
            continue
        try:
            parts.append(_cipher(identity, group, round_no, binding, sender, point).decrypt(_NONCE, box, None))
        except (InvalidTag, ValueError):
            raise MessageError(
                f"the box from {group.name(sender)} cannot be opened (step 'sums/key')", code="message.cannot-open"
            ) from None
    about = b"".join(map(word, members))
    return derive_key(b"".join(parts), "sum key", group.id, word(round_no), binding, about)


def _own_part(identity: Identity, group: Group, round_no: int, binding: bytes) -> bytes:
    """From the member's private keys, so that nothing must be remembered between two messages."""
    return derive_key(identity.to_secret_bytes(), "sum key part", group.id, word(round_no), binding)


def _cipher(identity: Identity, group: Group, round_no: int, binding: bytes, sender: int, recipient: int) -> AESGCM:
    other = recipient if group.point_of(identity.ed25519) == sender else sender
    secret = identity.exchange_lasting(group.member(other).x25519)
    about = group.id, word(round_no), binding, word(sender), word(recipient)
    return AESGCM(derive_key(secret, "sum key box", *about))


# --- the tag ----------------------------------------------------------------------------------------------


def tag(key: bytes, vector: Vector, first: bool) -> int:
    """⟨g, x⟩, and β on top for the first member of U."""
    stream, total = Stream(key, "sum tag"), 0
    for part in field.chunks(vector.size, _PIECE):
        piece = stream.elements(part.stop - part.start, part.start)
        total += field.dot(piece, np.ascontiguousarray(vector[part]), checked=False)
    offset = int(Stream(key, "sum offset").elements(1)[0])
    return (total + (offset if first else 0)) % P


def holds(key: bytes, opened: Vector) -> bool:
    """Whether a sum with its tag behind it is what the members of U sent: O[last] = ⟨g, O⟩ + β."""
    return bool(opened[-1] == tag(key, opened[:-1], first=True))


def kept(group: Group, origin: bytes, turn: Turn, key: bytes, level: bytes = b"") -> dict[str, Any]:
    """What a member remembers of the sum that it uploads for, until it uploads for another one."""
    about = {"origin": origin.hex(), "group": group.id.hex(), "round": turn.round, "halvings": turn.halvings}
    return {**about, "level": level.hex(), "key": key.hex()}


def check(
    state: State, origin: bytes, group: Group, round_no: int, halvings: int, opened: Vector, level: bytes = b""
) -> bool | None:
    """Whether this is the sum of a round of `group` from the state `origin`, with its tag, a mark that was halved so
    many times, and units of this level; None if this member cannot say, because it last uploaded in another round.

    A true sum that follows another history is from another state. A member that uploaded and was not asked to unmask
    may know the key of an attempt that led to nothing: that the tag does not fit then says nothing.
    """
    with state.edit() as memory:
        known = memory["sum"]
        answered = [last for last, *_ in answers_from(memory, origin, "model")]
    if (known.get("origin"), known.get("round")) != (origin.hex(), round_no):
        return None
    said = known["group"], known["halvings"], known["level"]
    fits = said == (group.id.hex(), halvings, level.hex()) and holds(bytes.fromhex(known["key"]), opened)
    return True if fits else False if known["round"] in answered else None


# --- who could check --------------------------------------------------------------------------------------


def vouch(identity: Identity, group: Group, round_no: int, binding: bytes) -> bytes:
    """A member says that it has seen for itself that what the round starts from is what was summed."""
    header = group.header("vouch", group.session(round_no, "model"), group.point_of(identity.ed25519))
    return identity.write(header, binding)


def vouchers(group: Group, round_no: int, binding: bytes, said: Mapping[int, bytes]) -> tuple[int, ...]:
    """Who vouches. An empty message is of a member that could not check; any other must be right."""
    return _vouchers(group, round_no, binding, tuple(said.items()))


@lru_cache(maxsize=4)
def _vouchers(group: Group, round_no: int, binding: bytes, said: tuple[tuple[int, bytes], ...]) -> tuple[int, ...]:
    """All members of a simulation are told the same."""
    found = []
    for point, message in said:
        if message:
            header = group.header("vouch", group.session(round_no, "model"), point)
            if opened_message(group.member(point), header, message) != binding:
                raise MessageError(
                    f"{group.name(point)} vouches for something else (step 'sums/vouch')", code="message.other-vouch"
                )
            found.append(point)
    return tuple(found)


def check_said(group: Group, round_no: int, binding: bytes, point: int, boxes: bytes, message: bytes) -> None:
    """For the server: boxes for everybody, and a voucher that is right or none. All of U would stop at another."""
    if len(boxes) != _BOX * len(group.roster):
        raise MessageError(
            f"{group.name(point)} must send one box for each member (step 'sums/key')", code="message.malformed"
        )
    vouchers(group, round_no, binding, {point: message})


def check_vouchers(group: Group, round_no: int, binding: bytes, said: Mapping[int, bytes]) -> None:
    """t members of U must vouch: any two sets of T members have so many in common."""
    found = vouchers(group, round_no, binding, said)
    if len(found) < group.threshold:
        names = group.names(found) or "nobody"
        raise RoundError(
            f"{group.threshold} members of the announced set must have checked the sum that round {round_no} starts "
            f"from, and only {names} did: wait for members who took part in the last round, or begin a new run from "
            "the anchor",
            code="round.unchecked-sum",
        )
