"""What an audit asks for: leaves of the shares that a seed draws (docs/verification.md, "The spot audit").

How many. z on a part φ of the leaves is about z·√φ, with a standard deviation of s = √(1 + h²·z²/L) where the leaves'
contributions differ by h of their mean; h = 1/2 is assumed. φ is chosen such that z·√φ = 12 + 2.4·s, so that an honest
audit falls short in 1 of 100 cases. For L ≫ z² that is (14.4/z)²: 0.7 % at z = 170.

A challenge is unsigned, and its seed and z are the asker's: it burns no leaf (`proof`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from decimal import ROUND_CEILING, ROUND_HALF_EVEN, Context, Decimal
from typing import Any, ClassVar, Self

import numpy as np

from quorumark.canonical import canonical, digest, parse
from quorumark.checks import field_names, is_count, is_decimal, is_hex, is_text, is_time, require, take
from quorumark.consortium.archive import leaf_count
from quorumark.consortium.records import Genesis, Manifest
from quorumark.errors import EvidenceError, InputError
from quorumark.reasons import Reason
from quorumark.verify.evidence import Query, now
from quorumark.verify.null import decimal_of

__all__ = ["PROOF", "Challenge", "challenge", "check_challenge", "genesis_digest", "leaves_needed", "spread"]

PROOF = Decimal(12)
"""The z on the opened leaves that is a proof by itself."""

_MARGIN = Decimal("2.4")  # standard deviations; the normal tail beyond is 0.8 %
# contexts of our own: what a host program does to the default one must not change a result
_MATH = Context(prec=60, rounding=ROUND_HALF_EVEN)
_UP = Context(prec=60, rounding=ROUND_CEILING)


def genesis_digest(genesis: Genesis) -> str:
    """digest("genesis", canonical genesis): names the commitment that the sign whitening depends on."""
    return digest("genesis", canonical(genesis.as_dict())).hex()


def spread(z: Decimal, usable: int) -> Decimal:
    """s = √(1 + z²/(4·L)), the standard deviation of z_sub around z·√φ: see the module's text."""
    return _MATH.sqrt(_MATH.add(Decimal(1), _MATH.divide(_MATH.multiply(z, z), Decimal(4 * usable))))


def leaves_needed(z: str, usable: int) -> int:
    """⌈φ·L⌉ with z·√φ = 12 + 2.4·s: how many of L leaves must be opened so that z_sub ≥ 12 in 99 of 100 cases."""
    value = decimal_of("z", z)
    rule = "must be so large that half of the leaves are enough to show 12 (about 21, more where there are few leaves)"
    if value <= 0 or usable < 2:
        raise InputError("z", f"{rule}: below that there is no audit", f"{z} with {usable} leaves")
    ratio = _MATH.divide(_MATH.add(PROOF, _MATH.multiply(_MARGIN, spread(value, usable))), value)
    exact = _MATH.multiply(_MATH.multiply(ratio, ratio), Decimal(usable))
    count = int(exact.to_integral_value(rounding=ROUND_CEILING, context=_UP))
    if 2 * count > usable:
        raise InputError("z", f"{rule}: below that there is no audit", f"{z} with {usable} leaves")
    return count


def _draw(query: str, seed: str, burnt: Sequence[int], leaves: int, count: int) -> tuple[int, ...]:
    """The first `count` leaves, burnt ones left out, in the order of their 8 bytes of SHAKE-128(digest("audit", …)).

    Numbers are read big-endian; of equal ones the smaller leaf comes first. The result is sorted.
    """
    start = digest("audit", bytes.fromhex(query), bytes.fromhex(seed))
    ranks = np.frombuffer(hashlib.shake_128(start).digest(8 * leaves), ">u8").astype(np.uint64)
    order = np.argsort(ranks, kind="stable")
    kept = order[~np.isin(order, np.array(burnt, np.int64))]
    return tuple(sorted(int(leaf) for leaf in kept[:count]))


@dataclass(frozen=True)
class Challenge:
    """Which leaves are to be opened, and how they were drawn. Public; anyone can draw them again.

    `z` is what the certificate says; it decides how many leaves are asked. `seed` must have been drawn after the query
    was fixed, by `source`: the challenger, or a public beacon. `burnt` are the query's burnt leaves.
    """

    FORMAT: ClassVar[str] = "quorumark-challenge/v1"

    manifest: str
    genesis: str
    query: str
    x: str
    z: str
    seed: str
    source: str
    burnt: tuple[int, ...]
    leaves: tuple[int, ...]
    created: str

    def __post_init__(self) -> None:
        for name in ("manifest", "genesis", "query", "x", "seed"):
            require(is_hex(getattr(self, name), 32), f"a challenge's {name}", "must be 32 bytes in hex")
        require(is_decimal(self.z), "a challenge's z", "must be a decimal number as a string")
        require(is_text(self.source, 200) and bool(self.source), "a challenge's source", "must be a printable string")
        for name in ("burnt", "leaves"):
            numbers = getattr(self, name)
            sound = all(is_count(n) for n in numbers) and list(numbers) == sorted(set(numbers))
            require(sound, f"a challenge's {name}", "must be leaf numbers in order, each once")
        require(bool(self.leaves), "a challenge", "must ask for at least one leaf")
        require(is_time(self.created), "a challenge's time", "must be in UTC like 2026-01-31T12:00:00Z")

    def drawn(self, leaves: int) -> tuple[int, ...]:
        """The leaves that the seed picks, in shares of so many leaves: must be those that are asked."""
        burnt = [leaf for leaf in self.burnt if leaf < leaves]
        count = leaves_needed(self.z, leaves - len(burnt))
        return _draw(self.query, self.seed, burnt, leaves, count)

    def as_dict(self) -> dict[str, Any]:
        body = {f.name: getattr(self, f.name) for f in fields(self)}
        return body | {"burnt": list(self.burnt), "leaves": list(self.leaves)}

    def to_bytes(self) -> bytes:
        return canonical({"format": self.FORMAT, **self.as_dict()})

    def digest(self) -> str:
        return digest("challenge", self.to_bytes()).hex()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        taken = take(parse(data, cls.FORMAT, "a challenge"), field_names(cls), "a challenge")
        for name in ("burnt", "leaves"):
            require(isinstance(taken[name], list), f"a challenge's {name}", "must be a list")
        return cls(**{**taken, "burnt": tuple(taken["burnt"]), "leaves": tuple(taken["leaves"])})


def challenge(
    query: Query, manifest: Manifest, z: str, seed: bytes | None = None, source: str = "challenger"
) -> Challenge:
    """Asks for as many leaves as a certificate's z makes necessary; the seed is fresh unless it is given."""
    _require_plain(query)
    seed = os.urandom(32) if seed is None else seed
    if len(seed) != 32:
        raise InputError("seed", "must be 32 bytes: hash a longer public value first", f"{len(seed)} bytes")
    total = leaf_count(manifest.terms.coordinates, manifest.terms.leaf)
    count = leaves_needed(z, total - len(query.burnt))
    leaves = _draw(query.digest(), seed.hex(), query.burnt, total, count)
    names = genesis_digest(manifest.genesis), query.digest(), query.x
    made = Challenge(query.manifest, *names, z, seed.hex(), source, query.burnt, leaves, now())
    check_challenge(made, query, manifest)
    return made


def _require_plain(query: Query) -> None:
    """An audit is about z. By layers there is none (docs/layers.md, "Audits")."""
    if query.layers is None:
        return
    raise EvidenceError(
        "a certificate by layers has no spot audit: opened leaves would show everybody numbers by layer, which tell "
        "how to take the mark out, and a small Q would take more leaves than members open in their lives; audit the "
        f"certificate of the plain query before it ({query.layers.after[:16]}) if its z is 21 or more",
        reason=Reason.of("audit.by-layers"),
    )


def check_challenge(challenge: Challenge, query: Query, manifest: Manifest) -> None:
    """Whether a challenge is about this query under this manifest, and asks for what its seed draws."""
    _require_plain(query)
    terms, genesis = manifest.terms, manifest.genesis
    # 1. the query is about this consortium's key as it is today, by the statistic that the genesis names
    require(query.manifest == manifest.digest().hex(), "the query", "is about another manifest than the one given")
    facts = (query.coordinates, query.epoch, query.statistic)
    agreed = (terms.coordinates, manifest.epoch, genesis.statistic)
    require(facts == agreed, "the query", "contradicts the manifest in coordinates, epoch or statistic")
    leaves = leaf_count(terms.coordinates, terms.leaf)
    require(
        all(leaf < leaves for leaf in query.burnt), "the query", f"names burnt leaves beyond the last, {leaves - 1}"
    )
    # 2. the challenge is about this query
    require(challenge.genesis == genesis_digest(genesis), "the challenge", "is for another genesis")
    same = (challenge.manifest, challenge.query, challenge.x, challenge.burnt)
    wanted = (query.manifest, query.digest(), query.x, query.burnt)
    require(same == wanted, "the challenge", "is for another query")
    # 3. and it asks for the leaves that its seed draws, no others and no more of them than its z needs
    require(challenge.leaves == challenge.drawn(leaves), "the challenge", "asks for other leaves than its seed draws")
