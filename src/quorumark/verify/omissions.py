"""What a query leaves out, and what that costs (docs/verification.md, "What a query leaves out").

x is 0 on leaves of the key that audits opened, since their signs are public. Leaving out is a choice, and a choice made
by somebody who has seen a marked model is worth something: that model shows a part ρ of the key's signs, and anyone who
may drop the leaves on which an innocent suspect disagrees with it raises that suspect's z by about 0.64·ρ·√(d/leaf).

So a member answers only if the query leaves out exactly what this member knows to be opened (`guard`, 3), and a
certificate pays for the choices that there were. With L leaves in all, of which u are left out:

    an audit that opened c leaves     2·L·min(C(L,c), 2^80) choices: its seed was the asker's, and so was whether it is
                                      shown at all; nobody can try more seeds than 2^80
    v leaves that no audit explains   L·C(L,v)

Let N be the product of these, or L·C(L,u) if that is less, and φ the part of ‖x‖² that was left out. For a model that
knows nothing of the key P(z ≥ a) ≤ exp(−a²/2) holds for each choice. By the union bound over all N of them

    a₁ = √(z*² + 2·ln N)                                         is passed with a probability of at most exp(−z*²/2).

Few leaves cannot change z by much, and that gives a second bound. Let Z be z of the whole x, and n_S that of what the
choice S leaves out: z_S = (Z − √φ·n_S)/√(1 − φ). With b² = z*² + 2·ln 2, Z ≥ b has a probability of at most
exp(−z*²/2)/2, and so has any −n_S ≥ √(b² + 2·ln N). If neither happens, z_S stays below

    a₂ = (b + √φ·√(b² + 2·ln N)) / √(1 − φ).

The threshold is the smaller of the two. After an audit of 0.7 % of 11,000 leaves it is 7.2 instead of 6.

The asker also chooses how the suspect is read, among the V ways that the terms allow: as it is, aligned (where the
terms name groups), as an adapter. That choice comes first, by the union bound: z* above is √(z*² + 2·ln V). A query by
layers has two tests, z and Q: V counts twice, so that each has half of the significance.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Context, Decimal
from typing import TypeAlias

from quorumark.consortium.archive import leaf_count
from quorumark.consortium.records import Terms
from quorumark.verify.evidence import Query
from quorumark.verify.null import decimal_of

__all__ = ["MOST_SEEDS", "Audits", "Omitted", "left_out"]

MOST_SEEDS = 1 << 80
"""How many seeds of a challenge anybody can try."""

Audits: TypeAlias = Mapping[str, Collection[int]]
"""Leaves by the digest of the challenge that had them opened. Only what was proved (`proof.explain`), or what a
member wrote into its own ledger."""

# contexts of our own: what a host program does to the default one must not change a certificate
_MATH = Context(prec=40, rounding=ROUND_HALF_EVEN)
_UP = Context(prec=40, rounding=ROUND_CEILING)
_DOWN = Context(prec=40, rounding=ROUND_FLOOR)
_STEP = Decimal("0.000001")
_LN2 = _MATH.ln(Decimal(2))
_LN10 = _MATH.ln(Decimal(10))


def left_out(terms: Terms, leaves: Collection[int]) -> int:
    """How many coordinates these leaves hold; the last leaf may be shorter."""
    size = terms.coordinates
    return sum(min((leaf + 1) * terms.leaf, size) - leaf * terms.leaf for leaf in leaves)


@dataclass(frozen=True)
class Omitted:
    """What a query leaves out: `audits` explain leaves, `unexplained` are the others; `log_choices` is ln N, and
    `share` φ, the part of ‖x‖² that is gone. `variants` is V, the ways to read a suspect."""

    audits: Mapping[str, tuple[int, ...]]
    unexplained: tuple[int, ...]
    log_choices: Decimal
    share: Decimal
    variants: int = 1

    @classmethod
    def of(cls, query: Query, terms: Terms, audits: Audits) -> Omitted:
        """Audits that opened something that the query does not leave out explain nothing, and are not named."""
        burnt, total = set(query.burnt), leaf_count(terms.coordinates, terms.leaf)
        used = {name: tuple(sorted(found)) for name, found in sorted(audits.items()) if burnt.issuperset(found)}
        rest = burnt.difference(*used.values())
        seeds = Decimal(0)
        for found in used.values():
            some = min(_log_choose(total, len(found)), _MATH.multiply(Decimal(80), _LN2))
            seeds = _MATH.add(seeds, _MATH.add(_MATH.add(_LN2, _MATH.ln(Decimal(total))), some))
        choices = min(_any_leaves(total, len(burnt)), _MATH.add(seeds, _any_leaves(total, len(rest))))
        whole = query.norm2 + query.burnt_norm2
        share = _MATH.divide(Decimal(query.burnt_norm2), Decimal(whole)) if whole else Decimal(0)
        tests = 1 if query.layers is None else 2
        return cls(used, tuple(sorted(rest)), choices, share, tests * _variants(terms))

    @property
    def log10_choices(self) -> str:
        """log10(N·V), to two decimals, rounded up."""
        return f"{_UP.quantize(_MATH.divide(self.log_all, _LN10), Decimal('0.01')):f}"

    @property
    def log_all(self) -> Decimal:
        """ln(N·V): all choices and tests, for the union bound."""
        return _MATH.add(self.log_choices, _MATH.ln(Decimal(self.variants)))

    @property
    def _free(self) -> bool:
        return not self.log_choices and self.variants == 1

    def charged(self, threshold: str) -> str:
        """The threshold z* with the choices paid for, rounded up to six decimals; unchanged if there were none."""
        if self._free:
            return threshold
        return f"{_UP.quantize(self._charged(decimal_of('threshold', threshold)), _STEP):f}"

    def worth(self, z: str) -> str:
        """What z is worth without the choices: the largest a whose charged threshold it reaches; 0 if there is none."""
        if self._free:
            return z
        value, low, high = decimal_of("z", z), 0, 0
        if self._charged(Decimal(0)) > value:
            return "0.000000" if value > 0 else z
        high = int(_MATH.divide(value, _STEP)) + 1
        while high - low > 1:  # in steps of 10^-6; _charged grows with its argument
            middle = (low + high) // 2
            if self._charged(_MATH.multiply(Decimal(middle), _STEP)) <= value:
                low = middle
            else:
                high = middle
        return f"{_DOWN.quantize(_MATH.multiply(Decimal(low), _STEP), _STEP):f}"

    def _charged(self, z: Decimal) -> Decimal:
        """min(a₁, a₂): see the module's text."""
        square = _MATH.add(_MATH.multiply(z, z), _MATH.multiply(Decimal(2), _MATH.ln(Decimal(self.variants))))
        twice = _MATH.multiply(Decimal(2), self.log_choices)
        whole = _MATH.sqrt(_MATH.add(square, twice))
        kept = _MATH.subtract(Decimal(1), self.share)
        if kept <= 0:
            return whole
        b2 = _MATH.add(square, _MATH.multiply(Decimal(2), _LN2))
        part = _MATH.multiply(_MATH.sqrt(self.share), _MATH.sqrt(_MATH.add(b2, twice)))
        return min(whole, _MATH.divide(_MATH.add(_MATH.sqrt(b2), part), _MATH.sqrt(kept)))


def _variants(terms: Terms) -> int:
    """As it is; aligned, where the terms name groups; as an adapter, where they name its factors (with groups: aligned
    or not, and never aligned as it is)."""
    return 1 + (terms.policy.groups is not None) + (terms.policy.lora is not None)


def _any_leaves(total: int, count: int) -> Decimal:
    """ln(L·C(L,count)): any so many leaves; 0 if none is left out."""
    return _MATH.add(_MATH.ln(Decimal(total)), _log_choose(total, count)) if count else Decimal(0)


def _log_choose(total: int, count: int) -> Decimal:
    """ln C(L,c) ≤ L·ln L − c·ln c − (L−c)·ln(L−c): above it by less than ln L, and cheap for any numbers."""
    found = _times_log(total)
    for part in (count, total - count):
        found = _MATH.subtract(found, _times_log(part))
    return found


def _times_log(value: int) -> Decimal:
    return _MATH.multiply(Decimal(value), _MATH.ln(Decimal(value))) if value else Decimal(0)
