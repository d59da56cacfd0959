"""What a member says of its ledger before a query is answered, so that others notice if it forgot something.

A ledger is a chain of hashes: setting a member's folder back to an earlier day, or running two copies of it, gives it
another past. A member signs a `Head` before it answers a query, and one when it has. It lists the hash of every line of
its ledger, which tells nothing of what the lines say, and all occasions on which it said a head, in order, this one
last: their count is the head's number. Of two heads of one member, one must continue the other; `contradiction` says
where it does not:

    fork          the ledgers differ where both have a line
    said twice    the occasions differ where both have one: after it forgot some, a member counts anew
    rollback      the head with the higher number has fewer lines

`seen` is what the member knows of the others' ledgers. So a room that shows members different heads of one ledger is
noticed too, by `differs`: somebody's word is then against another's, and people must ask each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

from quorumark.canonical import digest, parse
from quorumark.checks import field_names, is_count, is_hex, is_time, require, take
from quorumark.verify.signed import SignedByMember

__all__ = ["Head", "Seen", "contradiction", "differs", "occasion"]


@dataclass(frozen=True)
class Seen:
    """What was seen of a member's ledger: the number of its latest head, how many lines it had, the last one's hash."""

    number: int
    length: int
    last: str  # "" without lines

    def __post_init__(self) -> None:
        require(is_count(self.number, 1) and is_count(self.length), "a ledger that was seen", "must have counts")
        sound = is_hex(self.last, 32) if self.length else self.last == ""
        require(sound, "a ledger that was seen", "must have the hash of its last line")


@dataclass(frozen=True)
class Head(SignedByMember):
    """One member's word about its ledger. `said` are the occasions on which it gave one (`occasion`), this one last;
    `lines` are the hashes of all lines of its ledger; `seen` is what it knows of the others, by their keys."""

    FORMAT: ClassVar[str] = "quorumark-room-head/v1"
    PURPOSE: ClassVar[str] = "ledger head"

    manifest: str
    point: int
    said: tuple[str, ...]
    lines: tuple[str, ...]
    seen: Mapping[str, Seen]
    created: str
    signature: str = field(repr=False)

    def __post_init__(self) -> None:
        require(is_hex(self.manifest, 32), "a head's manifest", "must be 32 bytes in hex")
        require(is_count(self.point, 1), "a head's point", "must be an integer, at least 1")
        for name in ("said", "lines"):
            sound = all(is_hex(one, 32) for one in getattr(self, name))
            require(sound, f"a head's {name}", "must be digests of 32 bytes in hex")
        sound = len(set(self.said)) == len(self.said) >= 1
        require(sound, "a head's occasions", "must be different ones, its own last")
        require(all(is_hex(key, 32) for key in self.seen), "what a head has seen", "must be named by members' keys")
        require(is_time(self.created), "a head's time", "must be in UTC like 2026-01-31T12:00:00Z")
        require(is_hex(self.signature, 64), "a head's signature", "must be 64 bytes in hex")

    @property
    def occasion(self) -> str:
        return self.said[-1]

    @property
    def number(self) -> int:
        return len(self.said)

    @property
    def as_seen(self) -> Seen:
        return Seen(self.number, len(self.lines), self.lines[-1] if self.lines else "")

    def as_dict(self) -> dict[str, Any]:
        body = {f.name: getattr(self, f.name) for f in fields(self)}
        seen = {key: {f.name: getattr(one, f.name) for f in fields(one)} for key, one in sorted(self.seen.items())}
        return body | {"said": list(self.said), "lines": list(self.lines), "seen": seen}

    def digest(self) -> str:
        return digest("head", self.to_bytes()).hex()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        taken = take(parse(data, cls.FORMAT, "a head"), field_names(cls), "a head")
        for name in ("said", "lines"):
            require(isinstance(taken[name], list), f"a head's {name}", "must be a list")
        require(isinstance(taken["seen"], Mapping), "what a head has seen", "must be a map")
        seen = {
            str(key): Seen(**take(one, field_names(Seen), "a ledger that was seen"))
            for key, one in taken["seen"].items()
        }
        return cls(**{**taken, "said": tuple(taken["said"]), "lines": tuple(taken["lines"]), "seen": seen})


def occasion(query: str, answered: bool) -> str:
    """What a head is said for: before a query is answered, or when it is."""
    return digest("ledger head", b"answered" if answered else b"asked", bytes.fromhex(query)).hex()


def contradiction(known: Head, other: Head) -> str:
    """How two heads of one member contradict each other, in words; "" if one ledger continues the other."""
    for what, one, two in (("line", known.lines, other.lines), ("head", known.said, other.said)):
        for number, (mine, theirs) in enumerate(zip(one, two, strict=False), 1):
            if mine != theirs:
                return f"{what} {number} of it was another one before"
    if known.number == other.number and known.digest() != other.digest():
        return f"it signed two different heads with the number {known.number}"
    earlier, later = sorted((known, other), key=lambda head: head.number)
    if len(later.lines) < len(earlier.lines):
        return f"it had {len(earlier.lines)} lines before, and has {len(later.lines)} now"
    return ""


def differs(told: Seen, known: Seen, lines: tuple[str, ...]) -> bool:
    """Whether what somebody saw of a ledger cannot be of the one that is known here: its latest head and all lines."""
    if told.length <= len(lines):
        same = not told.length or lines[told.length - 1] == told.last
        return not same or (told.number > known.number and told.length < known.length)
    return told.number <= known.number  # more lines than this ledger has, in a head that is not later
