"""What members and server send each other for one secure sum (docs/secagg.md, "Formats")."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from quorumark.canonical import canonical, digest, parse
from quorumark.checks import is_count
from quorumark.consortium.identity import Header, open_message
from quorumark.consortium.records import Member
from quorumark.errors import (
    InputError,
    MessageError,
    RecordError,
)
from quorumark.field import Vector
from quorumark.round.group import LARGEST_ROUND, Group, word
from quorumark.round.secagg.masks import bytes_of
from quorumark.round.units import is_level

__all__ = ["Plan", "Upload", "pack", "unpack"]


@dataclass(frozen=True)
class Plan:
    """An attempt: what a member must know to compute its vector, and all that the members must agree on."""

    group: bytes
    quorum: int
    round: int
    purpose: str
    attempt: int
    length: int
    binding: bytes
    members: tuple[int, ...]
    keys: tuple[str, ...]
    level: bytes = b""
    levels: tuple[bytes, ...] = ()  # what each of the members needs: `level` is the widest of them

    @cached_property
    def ctx(self) -> bytes:
        """The digest of all of it, which enters every key. No level is not written, nor are the members' own ones."""
        numbers = (self.quorum, self.round, self.attempt, self.length)
        level = [self.level] if self.level else []
        everyone = b"".join(word(x) + bytes.fromhex(key) for x, key in zip(self.members, self.keys, strict=True))
        return digest(
            "secagg ctx", self.group, self.purpose.encode(), *map(word, numbers), self.binding, everyone, *level
        )


@dataclass(frozen=True, eq=False)
class Upload:
    """A masked vector, and the signed head that belongs to it."""

    head: bytes
    vector: Vector

    def to_bytes(self) -> bytes:
        """The head's length, the head, zeros up to a multiple of 8 bytes, the vector in little-endian words."""
        start = 4 + len(self.head)
        return b"".join([len(self.head).to_bytes(4, "big"), self.head, bytes(-start % 8), bytes_of(self.vector)])

    @classmethod
    def from_bytes(cls, data: bytes) -> Upload:
        """Without copying the vector. The caller checks what is inside."""
        stop = 4 + int.from_bytes(data[:4], "big")
        start = stop + -stop % 8
        if len(data) <= start or (len(data) - start) % 8:
            raise MessageError("an upload is truncated, or is something else", code="message.malformed")
        vector = np.frombuffer(data, "<u8", offset=start).astype(np.uint64, copy=False)
        return cls(bytes(data[4:stop]), vector if vector.flags.aligned else vector.copy())


@dataclass(frozen=True)
class _Only:
    """A roster of one member."""

    who: Member

    def member(self, point: int) -> Member:
        if point != self.who.point:
            raise RecordError(f"nobody is known at point {point}")
        return self.who


@lru_cache(maxsize=1 << 12)
def opened(sender: Member, expected: Header, data: bytes) -> bytes:
    """An open message's body. The same ones come again in a further attempt, and to all members of a simulation."""
    return open_message(data, _Only(sender), expected)


def read_ready(
    group: Group, round_no: int, purpose: str, point: int, data: bytes, draw: int = 0
) -> tuple[str, bytes, int, bytes]:
    """A member's key for the round, what it was told, how long its vector is, and the level that it needs, if any."""
    body = opened(group.member(point), group.header("ready", group.session(round_no, purpose, draw), point), data)
    if len(body) < 72 or not is_level(body[72:]):
        raise MessageError(
            f"the message of {group.name(point)} for step 'secagg/ready' must hold 72 bytes, and a level of units",
            code="message.malformed",
        )
    return body[:32].hex(), body[32:64], int.from_bytes(body[64:72], "big"), body[72:]


@lru_cache(maxsize=4)
def read_readies(
    group: Group, round_no: int, purpose: str, draw: int, members: tuple[int, ...], readies: tuple[bytes, ...]
) -> tuple[tuple[str, bytes, int, bytes], ...]:
    """The same of all members of a set: what everybody reads in an announcement."""
    each = zip(members, readies, strict=True)
    return tuple(read_ready(group, round_no, purpose, point, data, draw) for point, data in each)


@lru_cache(maxsize=4)
def read_uploads(group: Group, plan: Plan, messages: tuple[bytes, ...]) -> tuple[tuple[bytes, bytes, bytes], ...]:
    """What everybody reads in a request."""
    return tuple(read_upload(group, plan, point, data) for point, data in zip(plan.members, messages, strict=True))


def read_upload(group: Group, plan: Plan, point: int, data: bytes) -> tuple[bytes, bytes, bytes]:
    """Digests of a member's vector and of its boxes, and the commitment to its seed."""
    body = opened(group.member(point), group.header("upload", plan.ctx, point, plan.attempt), data)
    if len(body) != 96:
        raise MessageError(
            f"the message of {group.name(point)} for step 'secagg/upload' must hold 96 bytes", code="message.malformed"
        )
    return body[:32], body[32:64], body[64:]


def say(kind: str, about: Mapping[str, Any], parts: Iterable[bytes]) -> bytes:
    """What the server sends: a JSON object, then byte strings, each with its length before it."""
    return pack((canonical({"format": f"quorumark-{kind}/v1", **about}), *parts))


def pack(parts: Iterable[bytes]) -> bytes:
    """Byte strings in one, each with its length before it."""
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def unpack(data: bytes, what: str) -> list[bytes]:
    if not isinstance(data, bytes):
        raise MessageError(f"the server's {what} must be bytes", code="message.malformed")
    parts, start = [], 0
    while start < len(data):
        stop = start + 4 + int.from_bytes(data[start : start + 4], "big")
        if stop > len(data) or start + 4 > len(data):
            raise MessageError(f"the server's {what} is truncated, or is something else", code="message.malformed")
        parts.append(data[start + 4 : stop])
        start = stop
    return parts


def hear(kind: str, data: bytes) -> tuple[dict[str, Any], list[bytes]]:
    parts = unpack(data, kind)
    try:
        head = parse(parts[0] if parts else b"", f"quorumark-{kind}/v1", f"a server's {kind}")
    except (RecordError, InputError) as error:
        raise MessageError(f"the server's {kind} is refused: {error}", code="message.malformed") from None
    sound = all(is_count(head.get(name), 1) for name in ("round", "attempt")) and isinstance(head.get("purpose"), str)
    if not sound or head["round"] >= LARGEST_ROUND:
        raise MessageError(
            f"the server's {kind} is refused: it names no round, purpose and attempt", code="message.malformed"
        )
    return head, parts[1:]


def own_origin(group: Group, round_no: int) -> bytes:
    """The state of a round that starts from nothing in particular: the round itself."""
    return digest("secagg origin", group.id, word(round_no))


def check_arguments(binding: bytes, length: int, purpose: str) -> None:
    if not isinstance(binding, bytes) or len(binding) != 32:
        raise InputError("binding", "must be a digest of 32 bytes", type(binding).__name__)
    if not is_count(length, 1):
        raise InputError("length", "must be an integer, at least 1", length)
    if not isinstance(purpose, str) or not 0 < len(purpose) <= 100 or not purpose.isprintable():
        raise InputError("purpose", "must be a short text", repr(purpose)[:80])
