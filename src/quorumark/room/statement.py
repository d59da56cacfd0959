"""What a member's agent says of its own state in a room, signed; by it a home that was set back is noticed, too.

The server reads it too, so nothing here needs arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Self

from quorumark.canonical import canonical, parse
from quorumark.checks import field_names, is_count, is_hex, is_time, require, take
from quorumark.consortium.signatures import verify
from quorumark.room.requests import Signer

__all__ = ["LARGEST", "PURPOSE", "Standing", "name_of", "number_of"]

PURPOSE = "room standing"
LARGEST = 1 << 12
SHARES = ("sound", "unsound")


@dataclass(frozen=True)
class Standing:
    """A member's share and ledger under a manifest. `genesis`: the first terms. `entries`, `head`: of its ledger.

    `used` of `budget` equations are opened by what it knows. `stamps`: of the manifest, beside it in this home.
    """

    FORMAT: ClassVar[str] = "quorumark-room-standing/v1"

    genesis: str
    manifest: str
    epoch: int
    share: str
    entries: int
    head: str
    used: int
    budget: int
    stamps: int
    time: str

    def __post_init__(self) -> None:
        hexed = all(is_hex(value, 32) for value in (self.genesis, self.manifest, self.head))
        require(hexed, "a standing's digests", "must be 32 bytes in hex")
        counts = (self.epoch, self.entries, self.used, self.budget, self.stamps)
        require(all(is_count(value) for value in counts), "a standing's numbers", "must be integers, at least 0")
        require(self.share in SHARES, "a standing's share", "must be sound or unsound")
        require(is_time(self.time), "a standing's time", "must be like 2026-01-31T12:00:00Z")

    def same(self, other: Standing) -> bool:
        """Whether both say the same, whenever."""
        return all(getattr(self, f.name) == getattr(other, f.name) for f in fields(self) if f.name != "time")

    def signed(self, identity: Signer) -> bytes:
        body = self._body()
        return canonical({**body, "signature": identity.sign(PURPOSE, canonical(body)).hex()})

    def _body(self) -> Mapping[str, object]:
        return {"format": self.FORMAT, **{f.name: getattr(self, f.name) for f in fields(self)}}

    @classmethod
    def read(cls, data: bytes, key: str) -> Self:
        """A statement that the owner of a key signed."""
        body = take(parse(data, cls.FORMAT, "a standing"), [*field_names(cls), "signature"], "a standing")
        signature = body.pop("signature")
        found = cls(**body)
        verify(key, PURPOSE, canonical(found._body()), str(signature), "a standing")
        return found


def name_of(genesis: str, number: int) -> str:
    """Its name in a room: a member's statements about one consortium are numbered, by seconds."""
    return f"standing/{genesis}/{number}.json"


def number_of(name: str, genesis: str) -> int:
    """The number in a name; 0 if it is another name."""
    text = name.removeprefix(f"standing/{genesis}/").removesuffix(".json")
    return (
        int(text)
        if text.isascii() and text.isdecimal() and len(text) < 13 and name == name_of(genesis, int(text))
        else 0
    )
