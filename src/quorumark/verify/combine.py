"""Combining: what the partials of a query say together, as a number, z, a threshold, a verdict (docs/verification.md).

finding = combine(manifest, query, partials, audits=explain(chain, files))              # anybody
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction

from quorumark import shamir
from quorumark.consortium.records import Manifest, Terms
from quorumark.errors import DecodingError, EvidenceError, InputError
from quorumark.field import P
from quorumark.reasons import Reason
from quorumark.verify import null
from quorumark.verify.certificate import Certificate, verify_signatures
from quorumark.verify.evidence import Finding, Partial, Query, now
from quorumark.verify.guard import budget, layers_offered
from quorumark.verify.layered import Found, Layers, Opened
from quorumark.verify.omissions import Audits, Omitted, left_out
from quorumark.verify.query import how_aligned

__all__ = ["again", "check_signed", "combine", "reconcile"]

_FULL_COVERAGE = 90  # percent: with fewer a low z says nothing
_FULL_LIKENESS = 90  # percent of the compared weights: with fewer, down to a tenth, a low z says nothing


def combine(
    manifest: Manifest,
    query: Query,
    partials: Sequence[Partial],
    *,
    alpha: str = "",
    created: str | None = None,
    audits: Audits | None = None,
    opened: Opened | None = None,
) -> Finding:
    """What the partials say together. Each check is numbered; an EvidenceError names whose partial is refused, and why.

    `alpha` sets the threshold by a probability of false alarm instead of the policy's z; it can only raise it.
    `audits` explain what the query leaves out: proved ones (`proof.explain`), or those of a member's own ledger.
    `opened`: for a query by layers, what its examiner found in the sealed partials.
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
        if bool(partial.sealed) != (query.layers is not None):
            raise EvidenceError(f"the partial of {name!r} answers another kind of query: leave it out or ask again")
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
    # 5. they open one number, or the examiner has opened them
    if query.layers is None:
        value, wrong, corroboration = _open(manifest, used)
    else:
        wrong, corroboration = _check_opened(manifest, query, query.layers, used, opened)
        value = int(query.layers.value)
    # 6. which a key of this kind can give
    if value * value > _largest_squared(manifest, query):
        raise EvidenceError(
            "no key can give the number that the partials open: at least one of them is wrong; collect more"
        )
    # 7. the members' ledgers: earlier queries, and what became of them
    known, blocks, equations = reconcile(used)
    most, others = budget(terms), sum(blocks.get(x, 1) for x in known)
    if others + query.equations > most:
        raise EvidenceError(
            f"the members' ledgers together know of {others} equations from other queries: with this one's "
            f"{query.equations} more than the {most} that the consortium may answer in its life"
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
    threshold = null.raised_threshold(charged, equations)
    z, cosine = _z(manifest, query, value)
    layers = None if opened is None else _by_layers(query, opened, agreed, equations, omitted)
    verdict, reasons = _verdict(terms, query, z, threshold, null.raised_threshold(agreed, equations), layers)
    reasons += _caveats(manifest, used, wrong, corroboration, query)
    if verdict != "PASSED":
        reasons += _what_next(terms, query, z, agreed, equations, most - others)
    if alpha:
        reasons.append(Reason.of("finding.alpha", alpha=alpha))
    if equations:
        reasons.append(Reason.of("finding.raised", equations=equations, charged=charged, threshold=threshold))
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
        equations=equations,
        threshold=threshold,
        known=known,
        blocks=blocks,
        layers=layers,
        opened=opened,
        verdict=verdict,
        reasons=tuple(reasons),
        created=created or now(),
    )


def reconcile(partials: Sequence[Partial]) -> tuple[dict[str, str], dict[str, int], int]:
    """All earlier queries that the partials of one query know of; the equations of those that were answered by layers;
    and E, how many equations those opened in all that count as failed.

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
    blocks: dict[str, int] = {}
    for partial in partials:
        for x, outcome in partial.history.items():
            if x != partial.x:
                known[x] = max(known.get(x, "passed"), outcome, key=("passed", "open", "failed").index)
        for x, count in partial.blocks.items():
            if x != partial.x:
                blocks[x] = max(blocks.get(x, 1), count)
    failed = sum(blocks.get(x, 1) for x, outcome in known.items() if outcome != "passed")
    return dict(sorted(known.items())), dict(sorted(blocks.items())), failed


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


def _check_opened(
    manifest: Manifest, query: Query, layers: Layers, partials: Sequence[Partial], opened: Opened | None
) -> tuple[tuple[int, ...], str]:
    """The examiner's word about exactly these partials: whose are wrong, and how well the others are corroborated."""
    if opened is None:
        raise EvidenceError(f"only {layers.examiner.name!r} can open these partials: ask for its word (verify open)")
    opened.verify(layers.examiner)
    if opened.query != query.digest() or opened.partials != tuple(sorted(partial.digest() for partial in partials)):
        raise EvidenceError("the examiner's word is about another query, or other partials: give exactly those")
    _terms, spare = manifest.terms, len(partials) - manifest.terms.threshold
    if not set(opened.wrong) <= {partial.point for partial in partials} or len(opened.wrong) > spare // 2:
        raise EvidenceError("the examiner's word calls more partials wrong than can be told: nothing follows")
    # z² ≤ Q ≤ Σ (Σ|x_b|)²/‖x_b‖²: what no key can give shows that the word is false
    q, pairs = Fraction(opened.q), [(a, b) for a, b in zip(layers.norm1, layers.norm2, strict=True) if b]
    most = sum((Fraction(a * a, b) for a, b in pairs), Fraction(0))
    rest = query.norm1 - sum(layers.norm1)  # what blocks that are left out may add to Y
    least = Fraction(max(0, abs(int(layers.value)) - rest) ** 2, sum(b for _, b in pairs))
    if not least * Fraction(99, 100) - Fraction(1, 100) <= q <= most:
        raise EvidenceError("no key can give the Q of the examiner's word beside the Y of the plain query")
    corroboration = "corrected" if opened.wrong else "corroborated" if spare else "uncorroborated"
    return opened.wrong, corroboration


def _by_layers(query: Query, opened: Opened, agreed: str, equations: int, omitted: Omitted) -> Found:
    """Q is tested with m = B + E degrees of freedom: E equations that are known can be built into it."""
    freedom = query.equations + equations
    return Found(
        q=opened.q,
        blocks=query.equations,
        freedom=freedom,
        threshold=null.layers_threshold(agreed, freedom, omitted.log_all),
        log10_bound=null.log10_layers(opened.q, freedom, omitted.log_all),
    )


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


def _verdict(
    terms: Terms, query: Query, z: str, threshold: str, uncharged: str, layers: Found | None
) -> tuple[str, list[Reason]]:
    about: list[Reason] = []

    def because(code: str, **values: int | str) -> list[Reason]:
        return [*about, Reason.of(f"finding.{code}", z=z, threshold=threshold, **values)]

    if layers is not None:
        passed = Decimal(layers.q) >= Decimal(layers.threshold)
        code = "finding.layers-passed" if passed else "finding.layers-failed"
        about = [Reason.of(code, q=layers.q, threshold=layers.threshold, blocks=layers.blocks)]
        if passed:
            return "PASSED", about

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
    like = next((reason.values for reason in query.matching if reason.code == "read.like-the-anchor"), None)
    if like is None:
        return "FAILED", because("failed")
    weights, compared = int(str(like["weights"])), int(str(like["compared"]))
    if weights * 100 >= _FULL_LIKENESS * compared:
        return "FAILED", because("failed")
    # a model of another origin is like the anchor nowhere; one of which a part is like it has something to explain
    if weights * 100 >= (100 - _FULL_LIKENESS) * compared:
        return "INCONCLUSIVE", because("doubtful", weights=weights, compared=compared)
    return "FAILED", [*because("failed"), Reason.of("finding.unrelated", weights=weights, compared=compared)]


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


def _what_next(terms: Terms, query: Query, z: str, agreed: str, equations: int, left: int) -> list[Reason]:
    """What else can be asked about this suspect, and what that costs: the z* of later queries if it does not pass.

    `left`: equations that are left for this suspect; the x of another way of reading is another one.
    """

    def raised(count: int) -> str:
        return null.raised_threshold(agreed, equations + count)

    how, reasons = how_aligned(terms, query.alignment), []
    if Decimal(z) <= -Decimal(agreed):
        reasons.append(Reason.of("finding.far-below", z=z))
    if query.covered * 100 < _FULL_COVERAGE * query.carriers:
        reasons.append(Reason.of("finding.next-names"))
    more = query.equations + 1
    if terms.policy.lora is not None and not how["lora"]:
        reasons.append(Reason.of("finding.next-lora", threshold=raised(more)))
    if terms.policy.groups is not None and not how["align"]:
        reasons.append(Reason.of("finding.next-align", threshold=raised(more)))
    if query.layers is None and 2 <= query.blocks <= left and layers_offered(terms):
        reasons.append(Reason.of("finding.next-layers", blocks=query.blocks, left=left, threshold=raised(query.blocks)))
    return reasons


def again(manifest: Manifest, finding: Finding) -> Finding:
    """What follows from the partials of a finding, with the audits that it names. Whether those were is not asked."""
    return combine(
        manifest,
        finding.query,
        finding.partials,
        alpha=finding.alpha,
        created=finding.created,
        audits=finding.audits,
        opened=finding.opened,
    )


def check_signed(certificate: Certificate, manifest: Manifest) -> None:
    """That all whose partials count signed a certificate, and that everything in it follows from those partials."""
    verify_signatures(certificate, manifest)
    if again(manifest, certificate.finding) != certificate.finding:
        raise EvidenceError(
            "the certificate says something else than the partials in it: it was altered, or made by a faulty program"
        )
