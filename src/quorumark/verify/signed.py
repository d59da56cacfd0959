"""Records that one party signs, for one purpose and over everything but the signature."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self

from quorumark.canonical import canonical
from quorumark.consortium.identity import Identity, verify
from quorumark.consortium.records import Terms

__all__ = ["Signed", "SignedByMember"]


class Signed(ABC):
    """A record with a signature."""

    FORMAT: ClassVar[str]
    PURPOSE: ClassVar[str]

    signature: str

    @abstractmethod
    def as_dict(self) -> dict[str, Any]: ...

    def signed_bytes(self) -> bytes:
        """What the signature covers."""
        body = self.as_dict()
        del body["signature"]
        return canonical({"format": self.FORMAT, **body})

    def to_bytes(self) -> bytes:
        return canonical({"format": self.FORMAT, **self.as_dict()})

    @classmethod
    def sign(cls, identity: Identity, **values: Any) -> Self:
        """The record with its author's signature."""
        unsigned = cls(**{**values, "signature": "00" * 64})
        return cls(**{**values, "signature": identity.sign(cls.PURPOSE, unsigned.signed_bytes()).hex()})

    def verify_by(self, key: str, name: str) -> None:
        """Whether this key signed it; a SignatureError has the name."""
        verify(key, self.PURPOSE, self.signed_bytes(), self.signature, name)


class SignedByMember(Signed):
    """One that the member at its `point` signs."""

    point: int

    def verify(self, terms: Terms) -> None:
        """Whether that member signed it; a SignatureError names it."""
        member = terms.member(self.point)
        self.verify_by(member.ed25519, member.name)
