"""Combining: what the partials of a query say together, as a number, z, a threshold, a verdict (docs/verification.md).

finding = combine(manifest, query, partials, audits=explain(chain, files))              # anybody
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

from quorumark import shamir
from quorumark.consortium.records import Manifest, Terms
from quorumark.errors import DecodingError, EvidenceError, InputError
from quorumark.field import P
from quorumark.reasons import Reason
from quorumark.verify import null
from quorumark.verify.evidence import Finding, Partial, Query, now
from quorumark.verify.guard import budget
from quorumark.verify.omissions import Audits, Omitted, left_out
from quorumark.verify.query import how_aligned

__all__ = ["again", "combine", "reconcile"]

_FULL_COVERAGE = 90  # percent: with fewer a low z says nothing


def combine(
    manifest: Manifest,
    query: Query,
    partials: Sequence[Partial],
    *,
    alpha: str = "",
    created: str | None = None,
    audits: Audits | None = None,
) -> Finding:
    """What the partials say together. Each check is numbered; an EvidenceError names whose partial is refused, and why.

    `alpha` sets the threshold by a probability of false alarm instead of the policy's z; it can only raise it.
    `audits` explain what the query leaves out: proved ones (`proof.explain`), or those of a member's own ledger.
    """
    terms = manifest.terms
    # 1. the query is for this manifest, as all members signed it
    if (query.manifest, query.epoch) != (manifest.digest().hex(), manifest.epoch):
        raise EvidenceError(
            "the query was made under another manifest than the one given: prepare it again under this one"
        )
    if (query.coordinates, query.statistic) != (terms.coordinates, terms.statistic):
        raise EvidenceError(f"the query is not by the agreed statistic, {terms.statistic}: prepare it again")
    how_aligned(terms, query.alignment)
    if any(leaf * terms.leaf >= terms.coordinates for leaf in query.burnt):
        raise EvidenceError("the query leaves out leaves that no share has: prepare it again")
    # 2. every partial is a member's, signed by it, one for each
    by_point: dict[int, Partial] = {}
    for partial in partials:
        if partial.point not in range(1, terms.members + 1):
            raise EvidenceError(
                f"a partial is for point {partial.point}, but {terms.name!r} has {terms.members} members: leave it out"
            )
        name = terms.member(partial.point).name
        partial.verify(terms)
        # 3. it answers this query: this manifest and epoch, this suspect, this x
        for what, mine, theirs in (
            ("manifest", query.manifest, partial.manifest),
            ("epoch of shares", query.epoch, partial.epoch),
            ("suspect", query.suspect, partial.suspect),
            ("canonical form of the suspect", query.x, partial.x),
            ("query", query.digest(), partial.query),
        ):
            if mine != theirs:
                raise EvidenceError(f"the partial of {name!r} is for another {what}: leave it out or ask again")
        other = by_point.get(partial.point, partial)
        if other.answer != partial.answer:
            raise EvidenceError(f"there are two partials of {name!r} with different answers: find out which is true")
        # a member may answer twice: the one that knows of more queries counts, in whatever order they come
        by_point[partial.point] = max(other, partial, key=lambda one: (len(one.history), one.to_bytes()))
    # 4. there are enough of them
    points = sorted(by_point)
    if len(points) < terms.threshold:
        are = "partial is" if len(points) == 1 else "partials are"
        raise EvidenceError(f"{len(points)} {are} too few: {terms.name!r} needs {terms.threshold}; collect more")
    used = tuple(by_point[point] for point in points)
    # 5. they open one number
    value, wrong, corroboration = _open(manifest, used)
    # 6. which a key of this kind can give
    if value * value > _largest_squared(manifest, query):
        raise EvidenceError(
            "no key can give the number that the partials open: at least one of them is wrong; collect more"
        )
    # 7. the members' ledgers: earlier queries, and what became of them
    known, failed = reconcile(used)
    most = budget(terms.coordinates, terms.policy)
    if len(known) + 1 > most:
        raise EvidenceError(
            f"the members' ledgers together know of {len(known)} other queries: with this one more than the "
            f"{most} that the consortium may answer in its life"
        )
    # 8. choices that the asker had are paid for: what was left out, and how the suspect is read
    omitted = Omitted.of(query, terms, audits or {})
    # 9. z, and what it means
    policy = terms.policy.as_dict()["z"]
    agreed = null.threshold_for(alpha) if alpha else policy
    if Decimal(agreed) < terms.policy.z:
        # who combines may not lower it: what passes then counts as no failure in the members' ledgers either
        raise InputError(
            "alpha", f"must not allow more than the agreed threshold {policy}: choose a smaller one", alpha
        )
    charged = omitted.charged(agreed)
    threshold = null.raised_threshold(charged, failed)
    z, cosine = _z(manifest, query, value)
    verdict, reasons = _verdict(terms, query, z, threshold, null.raised_threshold(agreed, failed))
    reasons += _caveats(manifest, used, wrong, corroboration, query)
    if alpha:
        reasons.append(Reason.of("finding.alpha", alpha=alpha))
    if failed:
        reasons.append(Reason.of("finding.raised", failed=failed, charged=charged, threshold=threshold))
    return Finding(
        consortium=terms.name,
        members=terms.members,
        quorum=terms.threshold,
        query=query,
        partials=used,
        names={str(member.point): member.name for member in terms.roster},
        corroboration=corroboration,
        wrong=wrong,
        value=str(value),
        z=z,
        cosine=cosine,
        log10_p=null.log10_p(omitted.worth(z)),
        log10_bound=null.log10_bound(omitted.worth(z)),
        agreed=agreed,
        alpha=alpha,
        audits=omitted.audits,
        log10_choices=omitted.log10_choices,
        charged=charged,
        failed=failed,
        threshold=threshold,
        known=known,
        verdict=verdict,
        reasons=tuple(reasons),
        created=created or now(),
    )


def reconcile(partials: Sequence[Partial]) -> tuple[dict[str, str], int]:
    """All earlier queries that the partials of one query know of, and how many of them count as failed.

    For each x the worst that any partial says: an x counts as passed only if every partial that knows of it says so;
    else it is failed if anybody says failed, or open. A "passed" that one member claims alone is believed, since
    refusing it would gain nothing: that member could as well have left the x out. What honest members of this
    coalition answered themselves is in their own histories as failed or open until they have seen its certificate, and
    no claim of others overrides that. Open ones count as failed. The query's own x is left out.
    """
    if not partials:
        raise EvidenceError("no partials given")
    if len({partial.x for partial in partials}) != 1:
        raise EvidenceError("the partials answer several queries: combine those of one")
    known: dict[str, str] = {}
    for partial in partials:
        for x, outcome in partial.history.items():
            if x != partial.x:
                known[x] = max(known.get(x, "passed"), outcome, key=("passed", "open", "failed").index)
    known = dict(sorted(known.items()))
    return known, sum(outcome != "passed" for outcome in known.values())


def _open(manifest: Manifest, partials: Sequence[Partial]) -> tuple[int, tuple[int, ...], str]:
    """Y as a signed number, whose partials are wrong, and how well it is corroborated."""
    terms = manifest.terms
    sets = {partial.members for partial in partials}
    wrong: tuple[int, ...] = ()
    if sets != {()}:
        expected = tuple(partial.point for partial in partials)
        if sets != {expected}:
            raise EvidenceError(
                "masked partials open nothing unless they come from exactly the members that they were made for: "
                f"{' and '.join(str(list(members)) for members in sorted(sets))}, not {list(expected)}"
            )
        value, spare = sum(partial.value for partial in partials) % P, 0
    else:
        try:
            decoded = shamir.decode({partial.point: partial.value for partial in partials}, terms.threshold)
        except DecodingError:
            spare = len(partials) - terms.threshold
            raise EvidenceError(
                f"the {len(partials)} partials contradict each other, and more than {spare // 2} of them are wrong: "
                "nobody can be named, and nothing follows; collect more"
            ) from None
        value, wrong, spare = decoded.value, decoded.wrong, decoded.spare
    corroboration = "corrected" if wrong else "corroborated" if spare else "uncorroborated"
    return (value - P if value > P // 2 else value), wrong, corroboration


def _key_energy(manifest: Manifest) -> int:
    """‖τ‖², in the square of the units that shares are in."""
    terms = manifest.terms
    if terms.key == "rademacher":
        return terms.coordinates
    opened = (manifest.commitment or {}).get("norm")  # of a normal key: opened at setup, or as it is on average
    return int(opened) if opened else terms.coordinates << 16


def _z(manifest: Manifest, query: Query, value: int) -> tuple[str, str]:
    """z = Y·√d/(‖x‖·‖τ‖) and the cosine Y/(‖x‖·‖τ‖); for keys of ±1 ‖τ‖ = √d."""
    energy, d = _key_energy(manifest), manifest.terms.coordinates
    return null.z_text(value * d, query.norm2 * energy * d), null.cosine_text(value, query.norm2, energy)


def _largest_squared(manifest: Manifest, query: Query) -> int:
    """The largest Y² there is: (Σ|x|)² for keys of ±1, ‖x‖²·‖τ‖² (twice that, if ‖τ‖ is not known) otherwise."""
    if manifest.terms.key == "rademacher":
        return query.norm1**2
    return 2 * query.norm2 * _key_energy(manifest)


def _verdict(terms: Terms, query: Query, z: str, threshold: str, uncharged: str) -> tuple[str, list[Reason]]:
    def because(code: str, **values: int | str) -> list[Reason]:
        return [Reason.of(f"finding.{code}", z=z, threshold=threshold, **values)]

    if Decimal(z) >= Decimal(threshold):
        return "PASSED", because("passed")
    if query.covered * 100 < _FULL_COVERAGE * query.carriers:
        return "INCONCLUSIVE", because("coverage", covered=query.covered, carriers=query.carriers)
    # leaving out enough gives a low z for any model
    size, gone = terms.coordinates, left_out(terms, query.burnt)
    if (query.covered * size - gone * query.carriers) * 100 < _FULL_COVERAGE * query.carriers * size:
        return "INCONCLUSIVE", because("left-out", left_out=gone, coordinates=size)
    if Decimal(z) >= Decimal(uncharged):
        return "INCONCLUSIVE", because("charged", uncharged=uncharged)
    if query.surplus:  # the channels that were matched can be decoys
        return "INCONCLUSIVE", because("surplus", surplus=query.surplus)
    return "FAILED", because("failed")


def _caveats(
    manifest: Manifest, partials: Sequence[Partial], wrong: Sequence[int], corroboration: str, query: Query
) -> list[Reason]:
    terms, count = manifest.terms, len(partials)
    spare = count - terms.threshold
    if corroboration == "uncorroborated":
        reasons = [Reason.of("finding.uncorroborated", partials=count)]
    elif corroboration == "corroborated":
        reasons = [Reason.of("finding.corroborated", partials=count, liars=spare)]
    else:
        named = tuple(terms.member(point).name for point in wrong)
        reasons = [Reason.of("finding.corrected", partials=count, members=named, liars=spare // 2)]
    if query.covered < query.carriers:
        missing = query.carriers - query.covered
        reasons.append(Reason.of("finding.weights-missing", missing=missing, carriers=query.carriers))
    return reasons


def again(manifest: Manifest, finding: Finding) -> Finding:
    """What follows from the partials of a finding, with the audits that it names. Whether those were is not asked."""
    return combine(
        manifest, finding.query, finding.partials, alpha=finding.alpha, created=finding.created, audits=finding.audits
    )
