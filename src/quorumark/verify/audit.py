"""The spot audit: it convinces a stranger who trusts no member (docs/verification.md, "The spot audit").

A certificate is worth as much as the t members who signed it: together they could have agreed on any number. An audit
needs no trust in them. Once the suspect, and with it x, is fixed, a seed picks a small part of the leaves of the
shares; members open those leaves of their *genesis* shares; and anyone computes z on that part of the coordinates:

    z_sub = Σ_opened x_j·τ_j / √(Σ_opened x_j²)            signs;   τ = σ ⊙ τ_raw, σ the public sign whitening
    z_sub = Σ_opened x_j·τ_j / √(Σ_opened (x_j·τ_j)²)      gaussian keys: the whitening covers signs, not magnitudes

Why z_sub ≥ 12 is a proof. The genesis roots fix every genesis share, hence τ_raw, before σ exists, which is a hash of
those roots. To a model that does not come from the key, σ is a row of coin flips, and Hoeffding's inequality gives
P(z_sub ≥ a) ≤ exp(−a²/2): 10^-31 for a = 12. Who repeats the setup, or draws seeds, until it fits needs 10^31 tries.

Which members. Shares that do not lie on one polynomial of degree t−1 (t: the first threshold) give another τ_raw for
every choice of members, so the same members must open all leaves, and the choice has a price. Every t points fix one
τ_raw, and m points that agree stand for C(m,t) such choices with the same τ_raw; so no more than C(K,t)/C(m,t)
different keys can be shown by m of K members, and the bound is multiplied by that: 1 if all K open.

Which leaves. x is 0 on leaves that earlier audits opened ("burnt"). Whoever could name any leaves as burnt would leave
out those that speak against it; u leaves that nothing explains cost a factor L·C(L,u). Earlier challenges explain
leaves: they are drawn again from their seeds, and must leave out nothing but what challenges before them opened. But
whoever knows the key can make up challenges, and draw seeds until they fit. So a challenge of c leaves costs a factor
L·min(C(L,c), 2^80), for all the seeds that anybody can try, unless the reader vouches for it: it drew that seed itself,
or asked whoever did.

The leaves are drawn in `challenge`, and opened and read in `openings`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from decimal import ROUND_CEILING, ROUND_HALF_EVEN, Context, Decimal
from fractions import Fraction
from math import comb, prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quorumark import field as arithmetic
from quorumark import shamir
from quorumark.checks import require
from quorumark.consortium.archive import leaf_count
from quorumark.consortium.identity import verify_chain
from quorumark.consortium.records import Manifest, Terms
from quorumark.errors import InputError, ShareError
from quorumark.field import Vector
from quorumark.verify.challenge import (
    PROOF,
    Challenge,
    challenge,
    check_challenge,
    genesis_digest,
    leaves_needed,
    spread,
)
from quorumark.verify.evidence import VERDICTS, Query, vector_digest
from quorumark.verify.null import decimal_of, log10_bound, z_text
from quorumark.verify.omissions import MOST_SEEDS
from quorumark.verify.openings import (
    LIFE,
    Burns,
    KeyOpening,
    ShareOpening,
    from_archives,
    from_shares,
    open_leaves,
    outliers,
)

__all__ = [
    "LIFE",
    "PROOF",
    "AuditResult",
    "Burns",
    "Challenge",
    "KeyOpening",
    "ShareOpening",
    "challenge",
    "check_audit",
    "check_challenge",
    "genesis_digest",
    "leaves_needed",
    "open_leaves",
]

_ENOUGH = Decimal(-24)  # log10 of the bound after all charges: 2^-80, what nobody can make up for by trying again
_NOTHING = Decimal(6)  # a smaller z_sub is no more than a model that knows nothing of the key may show
_FAR = Decimal(5)  # standard deviations between z_sub and what the certificate's z predicts
_LARGEST_ENTRY = 1 << 12  # of a gaussian key, in steps of 2^-8: 16 standard deviations
# contexts of our own: what a host program does to the default one must not change a result
_MATH = Context(prec=60, rounding=ROUND_HALF_EVEN)
_UP = Context(prec=60, rounding=ROUND_CEILING)

Integers: TypeAlias = NDArray[np.integer[Any]]


# --- the check --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AuditResult:
    """What an audit shows. `verdict` PASSED is a proof; `reasons` and `faults` are sentences.

    `z` is z_sub, and `predicted` what the certificate's z leads one to expect, ± `tolerance`; `agrees` whether the two
    fit. The certificate's number counts as confirmed if they do and predicted − tolerance ≥ 6: with less, what a model
    without the mark may show would agree as well. `log10_bound` bounds the chance of such a z_sub for a model that
    knows nothing of the key, after the charges for choices (`charge`, log10 of a factor). `members` are the genesis
    points whose shares were opened. z, predicted and the others are empty where the openings do not get that far.
    `faults` say what was wrong, and whose it was.
    """

    verdict: str
    reasons: tuple[str, ...]
    faults: tuple[str, ...]
    members: tuple[int, ...]
    leaves: int
    coordinates: int
    z: str = ""
    predicted: str = ""
    tolerance: str = ""
    agrees: bool = False
    charge: str = ""
    log10_bound: str = ""

    def __post_init__(self) -> None:
        require(self.verdict in VERDICTS, "a verdict", f"must be one of {', '.join(VERDICTS)}")

    @property
    def proof(self) -> bool:
        return self.verdict == "PASSED"

    def as_dict(self) -> dict[str, Any]:
        lists = {name: list(getattr(self, name)) for name in ("reasons", "faults", "members")}
        return {f.name: getattr(self, f.name) for f in fields(self)} | lists


def check_audit(
    challenge: Challenge,
    query: Query,
    x: Integers,
    chain: Sequence[Manifest],
    openings: Sequence[bytes],
    archives: Sequence[str | os.PathLike[str]] = (),
    earlier: Sequence[Challenge] = (),
    vouched: Sequence[Challenge] = (),
) -> AuditResult:
    """Checks an audit from public files alone. `chain`: all manifests up to the query's; `x`: computed by the reader.

    `archives`: copies of members' archives, after a resharing. `earlier`: the challenges of the audits in which the
    query's burnt leaves were opened; each is charged for, since its seed may have been chosen. `vouched`: those whose
    seeds the reader drew, or confirmed with whoever did; they cost nothing. What the question itself gets wrong is an
    error; a member's fault is named in the result, and the audit goes on without that member.
    """
    # 1.–3. the chain, the query under its last manifest, the challenge for that query, leaves drawn from the seed
    verify_chain(chain)
    manifest = chain[-1]
    check_challenge(challenge, query, manifest)
    # 4. x is the query's, and leaves out what is burnt
    _check_x(x, query, manifest.terms)
    # 5. whose openings are good: signed, for this challenge, of exactly the asked leaves
    # 6. every leaf leads to the genesis root of its member
    if manifest.epoch == 0:
        leaves, faults = from_shares(challenge, chain, openings)
    else:
        leaves, faults = from_archives(challenge, chain, openings, archives)
    opened = {point: np.concatenate([leaf.values for leaf in found]) for point, found in leaves.items()}
    facts = _Facts(challenge, query, x, chain, opened, tuple(faults))
    # 7. one set of members for all leaves, and no fewer than the first threshold
    if len(opened) < facts.threshold:
        text = f"{len(opened)} members' genesis shares were opened, but it takes {facts.threshold}"
        return facts.result("INCONCLUSIVE", text)
    # 8. their values lie on polynomials of degree t−1: there is one key
    try:
        facts = _of_one_key(facts)
    except ShareError as error:
        return facts.result("FAILED", f"the committed shares are not shares of one key: {error}")
    # 9. that key is of the kind that the terms say
    some = dict(itertools.islice(facts.opened.items(), facts.threshold))
    raw = arithmetic.to_signed(shamir.reconstruct(some, facts.threshold))
    wrong = _odd_entries(raw, manifest.terms.key)
    if wrong:
        return facts.result("FAILED", wrong)
    # 10. z on the opened part, under the whitening; 11. what it is worth after the charges; 12. against the certificate
    told = _Earlier.of(facts, earlier, vouched)
    return facts.judged(raw, _charge(facts, told), _about_choices(facts, told))


def _check_x(x: Integers, query: Query, terms: Terms) -> None:
    """The reader's x against the query."""
    if not isinstance(x, np.ndarray) or x.dtype.kind != "i" or x.dtype.itemsize > 2:
        raise InputError("x", "must be a vector of int8 or int16", getattr(x, "dtype", type(x).__name__))
    if x.shape != (terms.coordinates,):
        raise InputError("x", f"must have {terms.coordinates} entries", f"shape {x.shape}")
    require(vector_digest(x) == query.x, "x", "is not the one that the query names: compute it from the suspect again")
    require(_sum_squares(x) == query.norm2, "the query's norm", "is not that of x")
    for leaf in query.burnt:
        empty = not x[leaf * terms.leaf : (leaf + 1) * terms.leaf].any()
        require(empty, "x", f"is not 0 on leaf {leaf}, which the query calls burnt")


def _sum_squares(values: Integers) -> int:
    """Σ v², exact: pieces whose sum stays below 2^63 for entries below 2^27."""
    wide = 1 << 8 if values.dtype.itemsize > 2 else 1 << 20
    total = 0
    for start in range(0, values.size, wide):
        part = values[start : start + wide].astype(np.int64)
        total += int(part @ part)
    return total


def _of_one_key(facts: _Facts) -> _Facts:
    """Without the members whose values are off the polynomials of the others, if so few are wrong that it shows who.

    Leaving them out is a choice like any other: it is charged. That the rest fits is checked by a random combination,
    which values that do not fit pass with probability 1/p.
    """
    wrong = outliers(facts.opened, facts.threshold)
    first = facts.chain[0].terms
    faults = [
        f"the committed share of {first.member(x).name!r} does not fit the others' and is left out" for x in wrong
    ]
    left = {point: values for point, values in facts.opened.items() if point not in wrong}
    return replace(facts, opened=left, faults=(*facts.faults, *faults))


def _odd_entries(raw: NDArray[np.int64], kind: str) -> str:
    """Why the shared values are no key; empty if they are one."""
    if kind == "rademacher":
        odd = int(np.count_nonzero(np.abs(raw) != 1))
        return f"{odd} of the {raw.size} opened entries of the key are not ±1" if odd else ""
    odd = int(np.count_nonzero(np.abs(raw) > _LARGEST_ENTRY))
    return f"{odd} of the {raw.size} opened entries of the key are larger than any normal number" if odd else ""


@dataclass(frozen=True, eq=False)
class _Facts:
    """What the last steps of a check work on."""

    challenge: Challenge
    query: Query
    x: Integers
    chain: Sequence[Manifest]
    opened: Mapping[int, Vector]
    faults: tuple[str, ...]

    @property
    def threshold(self) -> int:
        return self.chain[0].terms.threshold  # the genesis shares are the first terms'

    @property
    def leaves(self) -> int:
        terms = self.chain[-1].terms
        return leaf_count(terms.coordinates, terms.leaf)

    def result(self, verdict: str, *reasons: str, **values: Any) -> AuditResult:
        members, asked = tuple(self.opened), len(self.challenge.leaves)
        size = sum(part.stop - part.start for part in self._parts())
        return AuditResult(verdict, reasons, self.faults, members, asked, size, **values)

    def _parts(self) -> list[slice]:
        """Where the opened leaves lie."""
        terms = self.chain[-1].terms
        size, length = terms.leaf, terms.coordinates
        return [slice(leaf * size, min((leaf + 1) * size, length)) for leaf in self.challenge.leaves]

    def judged(self, raw: NDArray[np.int64], charge: Fraction, about: Sequence[str]) -> AuditResult:
        parts, genesis = self._parts(), self.chain[-1].genesis
        x = np.concatenate([self.x[part] for part in parts]).astype(np.int64)
        minus = np.concatenate([genesis.whitening(part.start, part.stop - part.start) for part in parts])
        products = x * np.where(minus, -raw, raw)
        value, squares = int(products.sum()), _sum_squares(products)
        if squares == 0:
            return self.result("INCONCLUSIVE", "x is 0 on all opened leaves: they say nothing", *about)
        z = z_text(value, squares)
        share = _MATH.divide(Decimal(_sum_squares(x)), Decimal(self.query.norm2))
        claimed = decimal_of("z", self.challenge.z)
        predicted = _MATH.multiply(claimed, _MATH.sqrt(share))
        tolerance = _MATH.multiply(_FAR, spread(claimed, self.leaves - len(self.query.burnt)))
        agrees = abs(Decimal(z) - predicted) <= tolerance
        log_charge = _MATH.subtract(_log10(charge.numerator), _log10(charge.denominator))
        bound = min(_MATH.add(Decimal(log10_bound(z)), log_charge), Decimal(0))
        verdict, reasons = _verdict(Decimal(z), bound, agrees)
        expected = f"the certificate's z = {self.challenge.z} predicts {predicted:.2f} ± {tolerance:.2f} on the "
        if agrees and _MATH.subtract(predicted, tolerance) >= _NOTHING:
            reasons.append(
                f"{expected}opened leaves, and they show {Decimal(z):.2f}: the certificate's number is confirmed"
            )
        elif agrees:
            reasons.append(
                f"{expected}opened leaves, and they show {Decimal(z):.2f}: that neither confirms nor contradicts the "
                "certificate's number, since a model without the mark may show as much; too few leaves were opened"
            )
        else:
            reasons.append(
                f"{expected}opened leaves, but they show {Decimal(z):.2f}: the certificate's number is contradicted"
            )
        return self.result(
            verdict,
            *reasons,
            *about,
            z=z,
            predicted=f"{_MATH.quantize(predicted, Decimal('0.000001')):f}",
            tolerance=f"{_MATH.quantize(tolerance, Decimal('0.000001')):f}",
            agrees=agrees,
            charge=f"{_UP.quantize(log_charge, Decimal('0.01')):f}",
            log10_bound=f"{_UP.quantize(bound, Decimal('0.01')):f}",
        )


def _verdict(z: Decimal, bound: Decimal, agrees: bool) -> tuple[str, list[str]]:
    """z_sub ≥ 12 that the charges leave standing is a proof; less may be bad luck, if it agrees with the claim."""
    if z >= PROOF and bound <= _ENOUGH:
        return "PASSED", [f"z = {z:.2f} on the opened leaves is at least {PROOF}: it proves itself"]
    if z >= PROOF:
        return "INCONCLUSIVE", [
            f"z = {z:.2f} on the opened leaves, but after the charges for choices the bound is 10^{bound:.1f}, and "
            f"10^{_ENOUGH} is needed: let more members open, show the challenges that burnt leaves come from, and "
            "vouch for those whose seeds you drew, or confirmed with whoever did"
        ]
    if z < _NOTHING:
        return "FAILED", [f"z = {z:.2f} on the opened leaves is no more than a model without the mark may show"]
    if not agrees:
        return "FAILED", [f"z = {z:.2f} on the opened leaves is below {PROOF}"]
    return "INCONCLUSIVE", [
        f"z = {z:.2f} on the opened leaves is below {PROOF}, as 1 honest audit in 100 is: draw another challenge"
    ]


def _log10(value: int) -> Decimal:
    return _MATH.log10(Decimal(value))


@dataclass(frozen=True)
class _Earlier:
    """Challenges of earlier audits and the leaves that they drew: with the reader's word for the seeds, or without."""

    claimed: tuple[Challenge, ...]
    vouched: tuple[Challenge, ...]
    leaves: frozenset[int]
    sure: frozenset[int]

    @classmethod
    def of(cls, facts: _Facts, earlier: Sequence[Challenge], vouched: Sequence[Challenge]) -> _Earlier:
        """Draws them again. Each may leave out only what others here opened, or it could be made to draw anything; and
        the query leaves out all that they opened."""
        known = {one.digest(): one for one in vouched}
        claimed = {one.digest(): one for one in earlier if one.digest() not in known}
        waiting = list(enumerate((*known.values(), *claimed.values()), 1))
        found: set[int] = set()
        while waiting:
            ready = [(number, one) for number, one in waiting if found.issuperset(one.burnt)]
            for number, one in ready or waiting[:1]:
                what = f"earlier challenge {number}"
                require(one.genesis == facts.challenge.genesis, what, "is for another genesis")
                require(one.leaves == one.drawn(facts.leaves), what, "asks for other leaves than its seed draws")
                lacking = set(one.burnt) - found
                rule = f"leaves out {len(lacking)} leaves that no challenge before it opened: show those challenges too"
                require(not lacking, what, rule)
                kept = set(one.leaves) - set(facts.query.burnt)
                require(not kept, what, f"opened {len(kept)} leaves that the query does not leave out")
            found.update(leaf for _, one in ready for leaf in one.leaves)
            waiting = [item for item in waiting if item not in ready]
        sure = frozenset(leaf for one in known.values() for leaf in one.leaves)
        return cls(tuple(claimed.values()), tuple(known.values()), frozenset(found), sure)


def _charge(facts: _Facts, earlier: _Earlier) -> Fraction:
    """By what the bound is multiplied: C(K,t)/C(m,t) for the members; for burnt leaves that the reader does not vouch
    for, the smaller of two counts of choices: as if nothing explained them, or by the challenges that do."""
    t, members, leaves = facts.threshold, len(facts.chain[-1].genesis.roots), facts.leaves

    def any_leaves(count: int) -> int:
        return leaves * comb(leaves, count) if count else 1

    burnt = set(facts.query.burnt)
    seeds = prod(leaves * min(comb(leaves, len(one.leaves)), MOST_SEEDS) for one in earlier.claimed)
    choices = min(any_leaves(len(burnt - earlier.sure)), seeds * any_leaves(len(burnt - earlier.leaves)))
    return Fraction(comb(members, t), comb(len(facts.opened), t)) * choices


def _about_choices(facts: _Facts, earlier: _Earlier) -> list[str]:
    """What a reader must know to believe that nobody chose what suited it."""
    source = facts.challenge.source
    said = f"the leaves were drawn by a seed of {source!r}"
    texts = [f"{said}: it must have been drawn after the query was fixed, by you or by somebody who you trust in this"]
    members, opened = len(facts.chain[-1].genesis.roots), len(facts.opened)
    if opened < members:
        texts.append(
            f"{opened} of the {members} first members' shares were opened; the bound is charged for the choice"
        )
    burnt = set(facts.query.burnt)
    if burnt:
        sure, left = len(burnt & earlier.sure), len(burnt - earlier.leaves)
        texts.append(
            f"{len(burnt)} leaves are left out as burnt: {sure} of them by earlier challenges that you vouch for"
            f"{_sources(earlier.vouched)}; {len(burnt) - sure - left} by others{_sources(earlier.claimed)}, whose "
            f"seeds may have been chosen, and {left} are not explained: both are charged for"
        )
    return texts


def _sources(challenges: Sequence[Challenge]) -> str:
    names = sorted({repr(one.source) for one in challenges})
    return f", drawn by seeds of {', '.join(names)}" if names else ""
