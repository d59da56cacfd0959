"""What a query by layers asks, and what an examiner says of its answers (docs/layers.md).

    Layers     in a query: the blocks' rule, the plain query that did not pass before, ‖x_b‖² of each block, and the
               examiner that answers are sealed to
    Opened     the examiner's signed word: Q to three digits, and whose answers were wrong
    Found      in a certificate: Q, its threshold and its bound

Numbers by block tell how to take the mark out, layer by layer. So they are in none of these.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from quorumark.canonical import parse
from quorumark.checks import field_names, is_count, is_decimal, is_hex, is_text, is_time, require, take
from quorumark.consortium.identity import Identity, exchange, verify_card
from quorumark.consortium.records import Card
from quorumark.errors import EvidenceError, MessageError
from quorumark.field import P, derive_key
from quorumark.model.blocks import MOST, Blocks
from quorumark.model.statistic import SIZES, count_sizes, norms
from quorumark.verify.breadth import narrow_histograms, narrow_remainder
from quorumark.verify.signed import Signed
from quorumark.verify.vectors import Numbers

__all__ = ["Examiner", "Found", "Layers", "Opened", "broad_blocks", "seal", "unseal"]

BROAD = 90
"""Percent of the blocks that must be broad by themselves; the others are left out of an answer."""
_NONCE = bytes(12)  # every sealed answer has a key of its own


@dataclass(frozen=True)
class Examiner:
    """Who alone sees numbers by layer: a judge, an auditor, an officer of the consortium. It is their whole card.

    Answers are sealed to `x25519`, and people know `ed25519`: the card's signature binds the two. There is no examiner
    without it, so an asker cannot put a key of its own beside a judge's name.
    """

    name: str
    ed25519: str
    x25519: str
    signature: str = field(repr=False)

    def __post_init__(self) -> None:
        verify_card(self.card)

    @classmethod
    def of(cls, card: Card) -> Self:
        return cls(card.name, card.ed25519, card.x25519, card.signature)

    @property
    def card(self) -> Card:
        return Card(self.name, self.ed25519, self.x25519, self.signature)

    def as_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class Layers:
    """What makes a query one by layers.

    `rule` is the terms' rule for blocks. `after` is the digest of the certificate of the plain query about the same x
    that did not pass, `value` the Y that it opened. `norm1` and `norm2` are Σ|x| and Σx² of each block; 0 for blocks
    that are left out, because alone they depend on too few coordinates.
    """

    rule: str
    after: str
    value: str
    norm1: tuple[int, ...]
    norm2: tuple[int, ...]
    examiner: Examiner

    def __post_init__(self) -> None:
        require(is_text(self.rule, 100) and bool(self.rule), "a query's rule for blocks", "must be a name")
        require(is_hex(self.after, 32), "the certificate before a query by layers", "must be 32 bytes in hex")
        sound = is_decimal(self.value) and "." not in self.value
        require(sound, "the value before a query by layers", "must be an integer in decimal digits")
        for name in ("norm1", "norm2"):
            values = getattr(self, name)
            sound = 2 <= len(values) <= MOST and all(is_count(value) for value in values)
            require(sound, f"a query's {name} by layers", f"must be integers, for 2 to {MOST} blocks")
        sound = [bool(one) for one in self.norm1] == [bool(two) for two in self.norm2]
        require(
            sound and self.count >= 2, "a query's blocks", "must have both norms, or be left out, and be two or more"
        )

    @property
    def count(self) -> int:
        """Equations that an answer opens: the blocks that are not left out."""
        return sum(norm2 > 0 for norm2 in self.norm2)

    def as_dict(self) -> dict[str, Any]:
        body = {f.name: getattr(self, f.name) for f in fields(self)}
        return body | {
            "norm1": list(self.norm1),
            "norm2": list(self.norm2),
            "examiner": self.examiner.as_dict(),
        }

    @classmethod
    def from_dict(cls, body: object) -> Self:
        taken = take(body, field_names(cls), "a query's layers")
        for name in ("norm1", "norm2"):
            require(isinstance(taken[name], list), f"a query's {name} by layers", "must be a list")
        examiner = Examiner(**take(taken["examiner"], field_names(Examiner), "an examiner"))
        return cls(**{**taken, "norm1": tuple(taken["norm1"]), "norm2": tuple(taken["norm2"]), "examiner": examiner})


def broad_blocks(x: Numbers, blocks: Blocks, least: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Σ|x| and Σx² of each block; 0 and 0 where the block alone, or a remainder of it, rests on too few coordinates."""
    if x.dtype == np.int8:
        return _broad_histograms(x, blocks, least)
    found = []
    for span in blocks.spans:
        norm1, norm2, norm4 = norms(x[span])
        broad = norm4 > 0 and norm2 * norm2 >= least * norm4 and narrow_remainder(x[span], least) is None
        found.append((norm1, norm2) if broad else (0, 0))
    return tuple(norm1 for norm1, _ in found), tuple(norm2 for _, norm2 in found)


def _broad_histograms(x: Numbers, blocks: Blocks, least: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The same of 8-bit entries, by how many of each size there are."""
    counts = np.stack([count_sizes(x[span]) for span in blocks.spans])
    sizes = np.arange(SIZES)
    sums = zip(*((counts @ sizes**power).tolist() for power in (1, 2, 4)), strict=True)  # below 2^31 · 2^28
    found = []
    for (norm1, norm2, norm4), bad in zip(sums, narrow_histograms(counts, least), strict=True):
        broad = not bad and norm4 > 0 and norm2 * norm2 >= least * norm4
        found.append((norm1, norm2) if broad else (0, 0))
    return tuple(norm1 for norm1, _ in found), tuple(norm2 for _, norm2 in found)


@dataclass(frozen=True)
class Opened(Signed):
    """What an examiner found in sealed answers, signed by the examiner.

    `partials` are the digests of the answers that it opened, `q` is Q rounded down to three digits, `wrong` the points
    whose answers contradict the others in any block.
    """

    FORMAT: ClassVar[str] = "quorumark-opened/v1"
    PURPOSE: ClassVar[str] = "layers opened"

    query: str
    partials: tuple[str, ...]
    q: str
    wrong: tuple[int, ...]
    created: str
    signature: str = field(repr=False)

    def __post_init__(self) -> None:
        require(is_hex(self.query, 32), "an opened query", "must be 32 bytes in hex")
        sound = all(is_hex(one, 32) for one in self.partials) and list(self.partials) == sorted(set(self.partials))
        require(sound, "the partials that an examiner opened", "must be digests in order, each once")
        require(is_decimal(self.q) and not self.q.startswith("-"), "an examiner's Q", "must be a decimal number from 0")
        sound = all(is_count(x, 1) for x in self.wrong) and list(self.wrong) == sorted(set(self.wrong))
        require(sound, "wrong partials", "must be points in order")
        require(is_time(self.created), "an examiner's time", "must be in UTC like 2026-01-31T12:00:00Z")
        require(is_hex(self.signature, 64), "an examiner's signature", "must be 64 bytes in hex")

    def as_dict(self) -> dict[str, Any]:
        body = {f.name: getattr(self, f.name) for f in fields(self)}
        return body | {"partials": list(self.partials), "wrong": list(self.wrong)}

    def verify(self, examiner: Examiner) -> None:
        self.verify_by(examiner.ed25519, examiner.name)

    @classmethod
    def from_dict(cls, body: object) -> Self:
        taken = take(body, field_names(cls), "an examiner's word")
        for name in ("partials", "wrong"):
            require(isinstance(taken[name], list), f"an examiner's {name}", "must be a list")
        return cls(**{**taken, "partials": tuple(taken["partials"]), "wrong": tuple(taken["wrong"])})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        return cls.from_dict(parse(data, cls.FORMAT, "an examiner's word"))


@dataclass(frozen=True)
class Found:
    """Q in a certificate: of how many `blocks`; the `freedom` m = B + E that it is tested with; `threshold` is the q*
    that applied, `log10_bound` how probable such a Q is without the mark, at most, choices included."""

    q: str
    blocks: int
    freedom: int
    threshold: str
    log10_bound: str

    def __post_init__(self) -> None:
        for name in ("q", "threshold", "log10_bound"):
            require(is_decimal(getattr(self, name)), f"a finding's {name} by layers", "must be a decimal number")
        for name in ("blocks", "freedom"):
            require(is_count(getattr(self, name), 1), f"a finding's {name}", "must be an integer, at least 1")

    def as_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_dict(cls, body: object) -> Self:
        return cls(**take(body, field_names(cls), "a finding by layers"))


# --- sealed numbers ---------------------------------------------------------------------------------------


def seal(numbers: Sequence[int], examiner: Examiner, context: bytes) -> str:
    """Field elements for an examiner's eyes, in base64: a fresh public key, then AES-GCM under the key of the two.

    `context` is what they answer: sealed numbers fit no other query and no other member.
    """
    ephemeral = X25519PrivateKey.generate()
    public = ephemeral.public_key().public_bytes_raw()
    body = b"".join(number.to_bytes(8, "big") for number in numbers)
    key = _key(exchange(ephemeral, examiner.x25519), public, examiner.x25519, context)
    return base64.b64encode(public + AESGCM(key).encrypt(_NONCE, body, context)).decode()


def unseal(identity: Identity, text: str, context: bytes) -> tuple[int, ...]:
    """What was sealed to this examiner; an EvidenceError if it was not, or for another query or member."""
    try:
        raw = base64.b64decode(text, validate=True)
        public, body = raw[:32], raw[32:]
        key = _key(identity.exchange(public.hex()), public, identity.x25519, context)
        words = AESGCM(key).decrypt(_NONCE, body, context)
    except (InvalidTag, ValueError, binascii.Error, MessageError):
        raise EvidenceError("a sealed answer cannot be opened: it was sealed to another examiner, or altered") from None
    numbers = tuple(int.from_bytes(words[i : i + 8], "big") for i in range(0, len(words), 8))
    if len(words) % 8 or any(number >= P for number in numbers):
        raise EvidenceError("a sealed answer holds something else than field elements")
    return numbers


def _key(shared: bytes, public: bytes, sealed_to: str, context: bytes) -> bytes:
    return derive_key(shared, "layers seal", public, bytes.fromhex(sealed_to), context)
