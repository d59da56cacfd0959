"""The spot audit: it convinces a stranger who trusts no member (docs/verification.md, "The spot audit").

A certificate is worth as much as the t members who signed it: together they could have agreed on any number. An audit
needs no trust in them. Once the suspect, and with it x, is fixed, a seed picks a small part of the leaves of the
shares; members open those leaves of their *genesis* shares; and anyone computes z on that part of the coordinates:

    z_sub = Σ_opened x_j·τ_j / √(Σ_opened x_j²)            signs;   τ = σ ⊙ τ_raw, σ the public sign whitening
    z_sub = Σ_opened x_j·τ_j / √(Σ_opened (x_j·τ_j)²)      gaussian keys: the whitening covers signs, not magnitudes

Why z_sub ≥ 12 is a proof. The genesis roots fix every genesis share, hence τ_raw, before σ exists, which is a hash of
those roots. To a model that does not come from the key, σ is a row of coin flips, and Hoeffding's inequality gives
P(z_sub ≥ a) ≤ exp(−a²/2): 10^-31 for a = 12. Who repeats the setup, or draws seeds, until it fits needs 10^31 tries.

What choices cost, of members and of leaves, is in `choices`.

The leaves are drawn in `challenge`, and opened and read in `opening` and `leaves`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from decimal import ROUND_CEILING, ROUND_HALF_EVEN, Context, Decimal
from fractions import Fraction
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
from quorumark.model.statistic import vector_digest
from quorumark.reasons import Reason
from quorumark.verify.challenge import (
    PROOF,
    Challenge,
    challenge,
    check_challenge,
    genesis_digest,
    leaves_needed,
    spread,
)
from quorumark.verify.choices import Earlier, about_choices, charge_of
from quorumark.verify.evidence import VERDICTS, Query
from quorumark.verify.leaves import from_archives, from_shares, outliers
from quorumark.verify.null import decimal_of, log10_bound, z_text
from quorumark.verify.opening import LIFE, Burns, KeyOpening, ShareOpening, open_leaves

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
_STEP = Decimal("0.000001")

Integers: TypeAlias = NDArray[np.integer[Any]]


# --- the check --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AuditResult:
    """What an audit shows. `verdict` PASSED is a proof; `reasons` and `faults` are codes.

    `z` is z_sub, and `predicted` what the certificate's z leads one to expect, ± `tolerance`; `agrees` whether the two
    fit. The certificate's number counts as confirmed if they do and predicted − tolerance ≥ 6: with less, what a model
    without the mark may show would agree as well. `log10_bound` bounds the chance of such a z_sub for a model that
    knows nothing of the key, after the charges for choices (`charge`, log10 of a factor). `members` are the genesis
    points whose shares were opened. z, predicted and the others are empty where the openings do not get that far.
    `faults` say what was wrong, and whose it was.
    """

    verdict: str
    reasons: tuple[Reason, ...]
    faults: tuple[Reason, ...]
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
        body = {f.name: getattr(self, f.name) for f in fields(self)}
        return body | {
            "reasons": [reason.as_dict() for reason in self.reasons],
            "faults": [fault.as_dict() for fault in self.faults],
            "members": list(self.members),
        }


def check_audit(
    challenge: Challenge,
    query: Query,
    x: Integers,
    chain: Sequence[Manifest],
    openings: Sequence[bytes],
    archives: Sequence[str | os.PathLike[str]] = (),
    earlier: Sequence[Challenge] = (),
    vouched: Sequence[Challenge] = (),
    age: Sequence[Reason] | None = None,
) -> AuditResult:
    """Checks an audit from public files alone. `chain`: all manifests up to the query's; `x`: computed by the reader.

    `archives`: copies of members' archives, after a resharing. `earlier`: the challenges of the audits in which the
    query's burnt leaves were opened; each is charged for, since its seed may have been chosen. `vouched`: those whose
    seeds the reader drew, or confirmed with its author; they cost nothing. `age`: what time stamps show of the
    key's age (`dates.about_age`); without it, the result says what must be believed about that.

    What the question itself gets wrong is an error; a member's fault is named in the result, and the audit goes on
    without that member.
    """
    result = _checked(challenge, query, x, chain, openings, archives, earlier, vouched)
    return replace(result, reasons=(*result.reasons, *([Reason.of("audit.undated")] if age is None else age)))


def _checked(
    challenge: Challenge,
    query: Query,
    x: Integers,
    chain: Sequence[Manifest],
    openings: Sequence[bytes],
    archives: Sequence[str | os.PathLike[str]],
    earlier: Sequence[Challenge],
    vouched: Sequence[Challenge],
) -> AuditResult:
    """The check in twelve steps; the key's age is not its business."""
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
        few = Reason.of("audit.too-few-shares", opened=len(opened), needed=facts.threshold)
        return facts.result("INCONCLUSIVE", few)
    # 8. their values are on polynomials of degree t−1: there is one key
    try:
        facts = _of_one_key(facts)
    except ShareError:
        return facts.result("FAILED", Reason.of("audit.not-one-key", members=len(opened)))
    # 9. that key is of the kind that the terms say
    some = dict(itertools.islice(facts.opened.items(), facts.threshold))
    raw = arithmetic.to_signed(shamir.reconstruct(some, facts.threshold))
    wrong = _odd_entries(raw, manifest.terms.key)
    if wrong is not None:
        return facts.result("FAILED", wrong)
    # 10. z on the opened part, under the whitening; 11. what it is worth after the charges; 12. against the certificate
    told = Earlier.of(challenge, query, facts.leaves, earlier, vouched)
    members = len(manifest.genesis.roots)
    charge = charge_of(query, facts.leaves, told, members, len(facts.opened), facts.threshold)
    return facts.judged(raw, charge, about_choices(challenge, query, told, members, len(facts.opened)))


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
    faults = [Reason.of("fault.share-misfit", name=first.member(x).name) for x in wrong]
    left = {point: values for point, values in facts.opened.items() if point not in wrong}
    return replace(facts, opened=left, faults=(*facts.faults, *faults))


def _odd_entries(raw: NDArray[np.int64], kind: str) -> Reason | None:
    """Why the shared values are no key; None if they are one."""
    signs = kind == "rademacher"
    odd = int(np.count_nonzero(np.abs(raw) != 1 if signs else np.abs(raw) > _LARGEST_ENTRY))
    code = "audit.not-signs" if signs else "audit.too-large"
    return Reason.of(code, odd=odd, entries=raw.size) if odd else None


@dataclass(frozen=True, eq=False)
class _Facts:
    """What the last steps of a check work on."""

    challenge: Challenge
    query: Query
    x: Integers
    chain: Sequence[Manifest]
    opened: Mapping[int, Vector]
    faults: tuple[Reason, ...]

    @property
    def threshold(self) -> int:
        return self.chain[0].terms.threshold  # the genesis shares are the first terms'

    @property
    def leaves(self) -> int:
        terms = self.chain[-1].terms
        return leaf_count(terms.coordinates, terms.leaf)

    def result(self, verdict: str, *reasons: Reason, **values: Any) -> AuditResult:
        members, asked = tuple(self.opened), len(self.challenge.leaves)
        size = sum(part.stop - part.start for part in self._parts())
        return AuditResult(verdict, reasons, self.faults, members, asked, size, **values)

    def _parts(self) -> list[slice]:
        """Where the opened leaves lie."""
        terms = self.chain[-1].terms
        size, length = terms.leaf, terms.coordinates
        return [slice(leaf * size, min((leaf + 1) * size, length)) for leaf in self.challenge.leaves]

    def judged(self, raw: NDArray[np.int64], charge: Fraction, about: Sequence[Reason]) -> AuditResult:
        parts, genesis = self._parts(), self.chain[-1].genesis
        x = np.concatenate([self.x[part] for part in parts]).astype(np.int64)
        minus = np.concatenate([genesis.whitening(part.start, part.stop - part.start) for part in parts])
        products = x * np.where(minus, -raw, raw)
        value, squares = int(products.sum()), _sum_squares(products)
        if squares == 0:
            return self.result("INCONCLUSIVE", Reason.of("audit.x-is-zero"), *about)
        z = z_text(value, squares)
        share = _MATH.divide(Decimal(_sum_squares(x)), Decimal(self.query.norm2))
        claimed = decimal_of("z", self.challenge.z)
        predicted = _MATH.multiply(claimed, _MATH.sqrt(share))
        tolerance = _MATH.multiply(_FAR, spread(claimed, self.leaves - len(self.query.burnt)))
        agrees = abs(Decimal(z) - predicted) <= tolerance
        log_charge = _MATH.subtract(_log10(charge.numerator), _log10(charge.denominator))
        bound = min(_MATH.add(Decimal(log10_bound(z)), log_charge), Decimal(0))
        verdict, why = _verdict(z, bound, agrees)
        shown = {
            "claimed": self.challenge.z,
            "predicted": f"{_MATH.quantize(predicted, _STEP):f}",
            "tolerance": f"{_MATH.quantize(tolerance, _STEP):f}",
            "z": z,
        }
        # with predicted − tolerance below 6, what a model without the mark may show would agree as well
        clear = _MATH.subtract(predicted, tolerance) >= _NOTHING
        said = "contradicted" if not agrees else "confirmed" if clear else "neither"
        return self.result(
            verdict,
            why,
            Reason.of(f"audit.{said}", **shown),
            *about,
            z=z,
            predicted=shown["predicted"],
            tolerance=shown["tolerance"],
            agrees=agrees,
            charge=f"{_UP.quantize(log_charge, Decimal('0.01')):f}",
            log10_bound=f"{_UP.quantize(bound, Decimal('0.01')):f}",
        )


def _verdict(z: str, bound: Decimal, agrees: bool) -> tuple[str, Reason]:
    """z_sub ≥ 12 that the charges leave standing is a proof; less may be bad luck, if it agrees with the claim."""
    value, proof = Decimal(z), str(PROOF)
    if value >= PROOF and bound <= _ENOUGH:
        return "PASSED", Reason.of("audit.proof", z=z, proof=proof)
    if value >= PROOF:
        worth = f"{_UP.quantize(bound, Decimal('0.01')):f}"
        return "INCONCLUSIVE", Reason.of("audit.bound-too-weak", z=z, bound=worth, enough=str(_ENOUGH))
    if value < _NOTHING:
        return "FAILED", Reason.of("audit.no-mark", z=z)
    if not agrees:
        return "FAILED", Reason.of("audit.below-proof", z=z, proof=proof)
    return "INCONCLUSIVE", Reason.of("audit.bad-luck", z=z, proof=proof)


def _log10(value: int) -> Decimal:
    return _MATH.log10(Decimal(value))
