"""All stamps of one file: by several authorities, each a chain of renewals (docs/format.md, "Stamps").

    chain     response 1 dates the file's bytes; response n+1 dates everything before it: the file and responses 1 … n

A stamp is worth something as long as its authority's certificates are. Before they expire the stamp is renewed: another
stamp, by the same authority or another one, over the file and all earlier stamps of the chain. It shows that those
existed while they were still good. What counts is then the newest one; the date is the first one's.

The record is not signed, and need not be: a stamp that is left out, or added, is one fewer or one more.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from quorumark.canonical import canonical, parse
from quorumark.checks import is_hex, require, take
from quorumark.errors import StampError
from quorumark.stamps.tokens import LARGEST, Asked, Token, check_token, inspect_token, refuse, time_text

if TYPE_CHECKING:
    from cryptography import x509

__all__ = ["KINDS", "Dated", "Stamps", "stamps_name"]

KINDS = ("manifest", "certificate")
MOST_CHAINS, MOST_RENEWALS = 16, 32
_CLOCK = timedelta(minutes=5)  # by so much the clocks of a reader and an authority may differ


def stamps_name(message: bytes) -> str:
    """The name of the file with the stamps over these bytes. By content: a manifest moves when another follows it."""
    return f"stamps-{hashlib.sha512(message).hexdigest()[:16]}.json"


@dataclass(frozen=True)
class Dated:
    """What a chain of stamps shows: `what` existed by `latest`, says `authority`; to be renewed before `expires`.

    `renewals` are the authorities that renewed it, the newest last.
    """

    what: str
    authority: str
    latest: datetime
    expires: datetime
    renewals: tuple[str, ...] = ()

    @property
    def when(self) -> str:
        return time_text(self.latest)

    @property
    def until(self) -> str:
        return time_text(self.expires)

    def as_dict(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "authority": self.authority,
            "existed_by": self.when,
            "renew_before": self.until,
            "renewals": list(self.renewals),
        }


@dataclass(frozen=True)
class Stamps:
    """The stamps of one file. `sha512` is that of the bytes that are dated; chains hold responses as they came."""

    FORMAT: ClassVar[str] = "quorumark-stamps/v1"

    kind: str
    sha512: str
    chains: tuple[tuple[bytes, ...], ...] = ()

    def __post_init__(self) -> None:
        require(self.kind in KINDS, "the kind of what is stamped", f"must be one of {', '.join(KINDS)}")
        require(is_hex(self.sha512, 64), "the digest of what is stamped", "must be 64 bytes in hex")
        require(len(self.chains) <= MOST_CHAINS, "stamps", f"must be of at most {MOST_CHAINS} chains")
        for chain in self.chains:
            require(0 < len(chain) <= MOST_RENEWALS, "a chain of stamps", f"must have 1 to {MOST_RENEWALS} stamps")
            require(all(0 < len(one) <= LARGEST for one in chain), "a stamp", f"must have at most {LARGEST} bytes")

    @classmethod
    def of(cls, kind: str, message: bytes) -> Self:
        """No stamps yet."""
        return cls(kind, hashlib.sha512(message).hexdigest())

    def to_bytes(self) -> bytes:
        chains = [[base64.b64encode(one).decode() for one in chain] for chain in self.chains]
        return canonical({"format": self.FORMAT, "kind": self.kind, "sha512": self.sha512, "chains": chains})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        body = take(parse(data, cls.FORMAT, "a file of stamps"), ["kind", "sha512", "chains"], "a file of stamps")
        lists = body["chains"]
        sound = isinstance(lists, list) and all(
            isinstance(chain, list) and all(isinstance(one, str) for one in chain) for chain in lists
        )
        require(sound, "a file of stamps: its chains", "must be lists of strings")
        try:
            chains = tuple(tuple(base64.b64decode(one, validate=True) for one in chain) for chain in lists)
        except (binascii.Error, ValueError):
            chains = None
        require(chains is not None, "a stamp", "must be in base64")
        made = cls(body["kind"], body["sha512"], chains or ())
        require(made.to_bytes() == data, "a file of stamps", "must be in canonical bytes")
        return made

    # --- what is dated ---

    def message(self, number: int, message: bytes, length: int | None = None) -> bytes:
        """The bytes that the next stamp of chain `number` dates, or the one after `length` others.

        The first stamp of a chain dates `message` itself; a renewal dates the digest of it and all stamps so far.
        """
        chain = self.chains[number][:length] if number < len(self.chains) else ()
        if not chain:
            return message
        stamps = [base64.b64encode(one).decode() for one in chain]
        renewed = {"format": "quorumark-renewal/v1", "kind": self.kind, "stamps": stamps}
        return canonical({**renewed, "sha512": hashlib.sha512(message).hexdigest()})

    def place_of(self, asked: Asked, message: bytes) -> int:
        """Which chain a request is for: a new one (their number) if it asks about the file itself."""
        for number in range(len(self.chains), -1, -1):
            if asked.is_about(self.message(number, message)):
                return number
        raise StampError(
            "the request is not about this file, and renews none of its stamps as they are now: make another with "
            "`stamp request`"
        )

    def with_response(self, number: int, response: bytes) -> Self:
        """With one more stamp, at the end of that chain."""
        if any(response in chain for chain in self.chains):
            refuse("stamp.twice")
        chain = self.chains[number] if number < len(self.chains) else ()
        return replace(self, chains=(*self.chains[:number], (*chain, response), *self.chains[number + 1 :]))

    # --- checking ---

    def inspect(self, number: int, message: bytes) -> list[Token]:
        """What the stamps of a chain say, with nobody's signature checked."""
        return [
            inspect_token(response, self.message(number, message, done))
            for done, response in enumerate(self.chains[number])
        ]

    def check(
        self, number: int, message: bytes, roots: Sequence[x509.Certificate], at: datetime | None = None
    ) -> Dated:
        """Checks a chain at the time `at` (now, by this machine's clock); a StampError says what does not hold.

        Each stamp is checked by itself (`check_token`). Then: a renewal came after what it renews, and before that
        expired; and the newest one has not expired.
        """
        at = at or datetime.now(UTC)
        tokens = [
            check_token(response, self.message(number, message, done), roots)
            for done, response in enumerate(self.chains[number])
        ]
        for before, after in itertools.pairwise(tokens):
            if after.latest < before.time:
                refuse("stamp.renewed-early", time=time_text(before.time), renewed=time_text(after.latest))
            if after.latest > _expires(before):
                refuse("stamp.renewed-late", expired=time_text(_expires(before)), renewed=time_text(after.latest))
        first, last = tokens[0], tokens[-1]
        if last.time > at + _CLOCK:
            refuse("stamp.future", authority=last.authority, time=time_text(last.time))
        if at > _expires(last):
            refuse("stamp.expired", authority=last.authority, expired=time_text(_expires(last)))
        others = tuple(token.authority for token in tokens[1:])
        return Dated(self.kind, first.authority, first.latest, _expires(last), others)


def _expires(token: Token) -> datetime:
    return token.expires or token.time  # `check_token` always gives the first


def stamps_path(path: Path, message: bytes) -> Path:
    """Where the stamps of a file are kept: in its folder."""
    return path.parent / stamps_name(message)
