"""Is this model ours? Asked by anybody, answered by t members or more, each on its own machine (docs/verification.md).

    ours = Reference.read("consortium.json")                                   # with layout.json, anchor.safetensors
    query = prepare(ours, "suspect.safetensors").query                         # anybody
    partial = answer(home, unlock, ours, "suspect.safetensors", query, approved=True)       # each member
    finding = combine(ours.manifest, query, partials)                          # anybody: z, verdict, who lied

A member computes x from the suspect itself and takes nobody's word for it; the one number that leaves its machine is
⟨x, its share⟩ mod p. The answers are a Shamir sharing of Y = ⟨x, τ⟩, which is opened anyway, and say no more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark import shamir
from quorumark.align import matching as alignment
from quorumark.align.lora import Lora, gauge_suspect, is_whole
from quorumark.align.matching import Alignment, Groups
from quorumark.canonical import canonical
from quorumark.consortium.home import ConsortiumFolder, HomeFolder
from quorumark.consortium.identity import Identity
from quorumark.consortium.keystore import Unlock
from quorumark.consortium.merkle import Tree, salt_seed
from quorumark.consortium.records import Manifest
from quorumark.consortium.shares import ShareInfo
from quorumark.errors import EvidenceError, GuardError, InconclusiveError, InputError, KeystoreError, RecordError
from quorumark.field import P, derive_key
from quorumark.model.layout import ModelLayout, Source
from quorumark.model.statistic import Canonical, Model, canonical_form, inner_product
from quorumark.model.suspect import Counted, Match, Suspect, match_layout, non_finite, read_suspect
from quorumark.verify.audited import Audit, explain
from quorumark.verify.certificate import Certificate
from quorumark.verify.evidence import Finding, Partial, Query, now
from quorumark.verify.findings import again, agreed_alignment, check_signed, combine, how_aligned
from quorumark.verify.guard import check_query
from quorumark.verify.ledger import Ledger, read_policy
from quorumark.verify.null import raised_threshold
from quorumark.verify.omissions import Audits, Omitted
from quorumark.verify.reference import Reference

__all__ = ["Prepared", "answer", "answer_with", "check_certificate", "combine", "prepare", "prepare_again", "sign"]

_LEAST_COVERAGE = 50  # percent of the carriers: with fewer it is another model
_LEAST_ALIGNED = 10  # the same for what an alignment found: a third of the channels removed halves the weights
_SHOWN = 4

Progress = Callable[[str], None]


# --- asking -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Prepared:
    """A query and the vector x that it names."""

    query: Query
    form: Canonical


def prepare(
    reference: Reference,
    suspect: Source | Suspect,
    *,
    align: bool = False,
    lora: bool = False,
    burnt: Collection[int] = (),
    created: str | None = None,
    progress: Progress | None = None,
) -> Prepared:
    """What to ask about a suspect. An InconclusiveError says why nothing can be asked: then nothing is accused either.

    `align`: the suspect's channels are first put where the anchor has them (docs/alignment.md). `lora`: the suspect is
    an adapter, or a whole model that one was added to; its factors are put where the anchor's are (docs/lora.md). Each
    is another query than the one without. `burnt`: the leaves that audits opened; they are left out. Members answer if
    these are exactly the leaves that they know to be opened, or are proved to be with the query.
    """
    manifest, layout = reference.manifest, reference.layout
    opened = suspect if isinstance(suspect, Suspect) else read_suspect(suspect)
    omit = omitted(burnt, manifest.terms.leaf, manifest.terms.coordinates)
    read = (_read_factors if lora else _read_weights)(reference, opened, align, progress)
    form = canonical_form(
        manifest.terms.statistic, layout, read.model, reference.anchor, read.names, omit=omit, progress=progress
    )
    if progress is not None:
        progress("hashing the suspect's files")
    if not form.norm2:
        raise InconclusiveError(
            "the suspect is the anchor itself, all zeros, or not finite: there is nothing in it to test"
        )
    query = Query(
        manifest=manifest.digest().hex(),
        epoch=manifest.epoch,
        statistic=manifest.terms.statistic,
        alignment=agreed_alignment(manifest.terms, read.procedure, lora=lora),
        suspect=opened.digest(),
        files=opened.files,
        x=form.digest,
        coordinates=layout.coordinates,
        carriers=layout.carrier_size,
        covered=read.covered,
        norm1=form.norm1,
        norm2=form.norm2,
        norm4=form.norm4,
        burnt=tuple(sorted(set(burnt))),
        burnt_norm2=form.omitted,
        matching=(*_matching(read.counted, read.match), *read.texts),
        created=created or now(),
        surplus=read.surplus,
    )
    return Prepared(query, form)


@dataclass(frozen=True, eq=False)
class _Read:
    """A suspect as a model of the layout: `names` are its carriers, `texts` says in sentences what was done to it."""

    model: Model
    names: Mapping[str, str]
    match: Match
    covered: int
    counted: Counted
    texts: tuple[str, ...] = ()
    found: Alignment | None = None

    @property
    def surplus(self) -> int:
        """The suspect's channels that no place was found for."""
        return 0 if self.found is None else self.found.surplus

    @property
    def procedure(self) -> str | None:
        return None if self.found is None else self.found.procedure


def _read_weights(reference: Reference, opened: Suspect, align: bool, progress: Progress | None) -> _Read:
    """A suspect whose tensors are the layout's own."""
    layout = reference.layout
    if align and "lora" in reference.manifest.terms.policy:
        raise RecordError("the consortium's groups are the base model's: align a whole model, with --lora")
    match = match_layout(opened, layout, _agreed_groups(reference).resizable() if align else None)
    _require_coverage(layout, match.coverage[0], _LEAST_COVERAGE, match)
    counted = Counted(opened)
    if not align:
        return _Read(counted, match.names, match, match.coverage[0], counted)
    every = {**match.plain, **match.names}
    found = alignment.align(counted, reference.anchor, layout, _agreed_groups(reference), every, progress=progress)
    covered = _covered(layout, match, found)
    _require_coverage(layout, covered, _LEAST_ALIGNED)
    names = {carrier: carrier for carrier in match.names}
    return _Read(found.model(counted, every), names, match, covered, counted, tuple(_aligned(match, found)), found)


def _read_factors(reference: Reference, opened: Suspect, align: bool, progress: Progress | None) -> _Read:
    """An adapter, or a whole model that one was added to."""
    layout, factors = reference.layout, _agreed_factors(reference)
    groups = _agreed_groups(reference) if align else None
    found = gauge_suspect(opened, layout, reference.anchor, factors, lambda: reference.base, groups, progress=progress)
    covered = found.covered(layout)
    _require_coverage(layout, covered, _LEAST_ALIGNED if align else _LEAST_COVERAGE, found.match)
    texts = [f"read as {found.kind}; its factors were put where the anchor's are"]
    if found.alignment is not None:
        texts += _aligned(found.match, found.alignment)
    return _Read(found, found.names, found.match, covered, Counted(opened), tuple(texts), found.alignment)


def _require_coverage(layout: ModelLayout, covered: int, least: int, match: Match | None = None) -> None:
    if covered * 100 >= least * layout.carrier_size:
        return
    found = f"{covered:,} of {layout.carrier_size:,} carrying weights"
    if match is None:
        raise InconclusiveError(f"too little of the consortium's model was found in the suspect: {found}")
    raise InconclusiveError(
        f"the suspect does not fit the consortium's model: {found} were found in it "
        f"({'; '.join(match.problems[:_SHOWN])})"
    )


def _agreed_groups(reference: Reference) -> Groups:
    """The groups to align with: nobody chooses them now."""
    if reference.groups is None:
        if "groups" in reference.manifest.terms.policy:
            raise RecordError("the consortium's groups are not here: put groups.json beside the manifest, or name it")
        raise RecordError("this consortium agreed on no groups when it was made, so that nothing can be aligned")
    return reference.groups


def _agreed_factors(reference: Reference) -> Lora:
    """The factors of an adapter: nobody chooses them now."""
    if reference.lora is None:
        if "lora" in reference.manifest.terms.policy:
            raise RecordError("the consortium's lora.json is not here: put it beside the manifest, or name it")
        raise RecordError("this consortium agreed on no adapter when it was made: leave out --lora")
    return reference.lora


def _covered(layout: ModelLayout, match: Match, found: Alignment) -> int:
    """Carrying weights that the suspect has: all but those at places that no channel of it came to."""
    total = 0
    for spec, _ in layout.spans("carrier"):
        if spec.name in match.names:
            places = [found.places.get((spec.name, axis)) for axis in range(len(spec.shape))]
            total += prod(n if at is None else int((at >= 0).sum()) for n, at in zip(spec.shape, places, strict=True))
    return total


def _aligned(match: Match, found: Alignment) -> list[str]:
    """What the alignment did, in sentences."""
    ours, theirs, matched = (sum(numbers) for numbers in zip(*found.sizes, strict=True))
    settled = "the last one changed nothing" if found.stable else "the last one still changed something"
    texts = [
        f"aligned to the anchor: {matched:,} of {ours:,} channels were found, {sum(found.moved):,} of them elsewhere "
        f"than in the anchor; {found.sweeps} sweeps, {settled}"
    ]
    if found.turn is not None and not found.turn.mixes:
        texts.append("gains of its residual stream had other signs; they were taken into what reads them")
    elif found.turn is not None:
        texts.append("its residual stream had been turned; it was turned back to the anchor's")
    if found.signs:
        changed = sum(int((signs < 0).sum()) for signs in found.signs.values())
        texts.append(f"{changed:,} rows or columns of {len({name for name, _ in found.signs})} tensors had other signs")
    if found.unmixed:
        texts.append(f"the channels of {found.blocks:,} blocks that can be mixed were put back to the anchor's")
    if match.resized:
        texts.append(f"{len(match.resized)} tensors have more or fewer channels than the consortium's model")
    if found.surplus:
        theirs += 0 if found.turn is None else found.turn.surplus
        texts.append(f"{found.surplus:,} of the suspect's {theirs:,} channels are left over")
    return texts


def omitted(burnt: Collection[int], leaf: int, coordinates: int) -> NDArray[np.bool_] | None:
    """Which coordinates the burnt leaves hold."""
    if not burnt:
        return None
    omit = np.zeros(coordinates, np.bool_)
    for index in burnt:
        if not 0 <= index * leaf < coordinates:
            raise InputError("burnt", f"must be leaves of a share of {coordinates} elements", index)
        omit[index * leaf : (index + 1) * leaf] = True
    return omit


def _matching(suspect: Counted, match: Match) -> tuple[str, ...]:
    """How the suspect was read, in sentences."""
    texts = []
    if match.prefix:
        texts.append(f"names: {match.prefix}")
    if match.casts:
        kinds = sorted(set(match.casts.values()))
        texts.append(f"{len(match.casts)} tensors cast: {', '.join(kinds)}")
    texts.extend(f"left out: {problem}" for problem in match.problems)
    if match.extra:
        texts.append(f"{len(match.extra)} tensors that the consortium's model does not have were ignored")
    for name, count in non_finite(suspect, match).items():
        texts.append(f"tensor {name!r} holds {count:,} numbers that are not finite: they count as 0")
    return tuple(text if len(text) < 1000 else f"{text[:990]} …" for text in texts)


# --- answering --------------------------------------------------------------------------------------------


def answer(
    home: HomeFolder,
    unlock: Unlock,
    reference: Reference,
    suspect: Source | Suspect,
    query: Query,
    *,
    approved: bool = False,
    members: Collection[int] = (),
    audits: Sequence[Audit] = (),
    place: ConsortiumFolder | None = None,
    progress: Progress | None = None,
) -> Partial:
    """A member's partial, from its home. A GuardError says why the member does not answer; the ledger keeps that too.

    `members`: for the paper's variant, the points whose answers are to be added up under masks (none: an open partial).
    `audits`: what the query leaves out, where the member took no part in opening it. What they prove goes into the
    ledger, whatever becomes of the query.
    """
    place = place or home.only_consortium()
    manifest = place.manifest()
    if manifest.digest() != reference.manifest.digest():
        raise EvidenceError("this member's manifest in force is another one than the query's: compare their digests")
    prepared = prepare_again(reference, suspect, query, progress)
    if prepared.query != query:
        raise EvidenceError(f"the query does not describe this suspect: {_difference(prepared.query, query)}")
    identity = home.identity(unlock)
    point = manifest.terms.point_of(identity.ed25519)
    _check_set(manifest, point, members)
    ledger = Ledger.open(place, manifest)
    with ledger.exclusive():  # nobody else answers here between the check and the entry
        for name, leaves in explain(place.chain(), audits, ledger.audits()).items():
            ledger.record_burnt(leaves, name)
        try:
            approved_by = check_query(query, prepared.form.x, manifest, ledger, read_policy(home.policy_path), approved)
        except GuardError as error:
            ledger.record_refusal(query, str(error))
            raise
        value = _inner_product(place, unlock, manifest, point, prepared.form.x)
        history = {x: outcome for x, outcome in ledger.known().items() if x != query.x}
        # on disk before the answer leaves: a crash costs an answer, never an entry
        ledger.record_answer(query, prepared.form.x, approved_by)
    return answer_with(identity, manifest, query, value, members, history, ledger.head)


def prepare_again(
    reference: Reference, suspect: Source | Suspect, query: Query, progress: Progress | None = None
) -> Prepared:
    """What a query should be for this suspect, its files' names included: a certificate signs them."""
    how = how_aligned(reference.manifest.terms, query.alignment)
    return prepare(reference, suspect, **how, burnt=query.burnt, created=query.created, progress=progress)


def _difference(mine: Query, theirs: Query) -> str:
    one, two = mine.as_dict(), theirs.as_dict()
    names = [name for name in one if one[name] != two[name]]
    return f"{names[0]} is {str(one[names[0]])[:80]}, not {str(two[names[0]])[:80]}"


def _inner_product(place: ConsortiumFolder, unlock: Unlock, manifest: Manifest, point: int, x: NDArray[Any]) -> int:
    """⟨x, σ ⊙ s⟩ mod p over the sealed share, checked against its root in the same pass."""
    share = place.share(unlock)
    if share.info != ShareInfo.under(manifest, point, share.info.block):
        raise KeystoreError(f"{str(place.share_path())!r} belongs to another consortium, member or epoch")
    tree = Tree(salt_seed(share.salt), share.info.leaf, share.info.length)
    total, start = 0, 0
    for piece in share.pieces():
        tree.update(piece)
        used = piece[: max(0, x.size - start)]  # behind the key lie the keys of the archives
        if used.size:
            total += inner_product(whitened(manifest, x, start, used.size), used)
        start += piece.size
    if tree.root().hex() != manifest.roots[point - 1]:
        raise KeystoreError(f"{str(place.share_path())!r} is not the share that the manifest's root commits to")
    return total % P


def whitened(manifest: Manifest, x: NDArray[Any], start: int, count: int) -> NDArray[Any]:
    """σ ⊙ x for some coordinates: ⟨x, σ ⊙ τ_raw⟩ = ⟨σ ⊙ x, τ_raw⟩, and shares are of τ_raw."""
    part = x[start : start + count]
    return np.where(manifest.genesis.whitening(start, count), -part, part).astype(x.dtype, copy=False)


def answer_with(
    identity: Identity,
    manifest: Manifest,
    query: Query,
    value: int,
    members: Collection[int] = (),
    history: Mapping[str, str] | None = None,
    ledger: str = "00" * 32,
) -> Partial:
    """Signs ⟨x, share⟩ as a partial: open, or masked for a set of members.

    Masked: λ·y + Σ± masks, one for each other member of the set, from the key that the two share. Over the whole set
    they cancel, and the sum opens Y and nothing else; nobody can be corrected or named then.
    """
    point = manifest.terms.point_of(identity.ed25519)
    chosen = _check_set(manifest, point, members)
    if chosen:
        weights = dict(zip(chosen, shamir.lagrange(chosen), strict=True))
        value = weights[point] * value
        for other in chosen:
            if other != point:
                secret = identity.exchange(manifest.terms.member(other).x25519)
                pair = canonical({"query": query.digest(), "members": list(chosen), "pair": sorted((point, other))})
                mask = int.from_bytes(derive_key(secret, "partial mask", pair), "big")
                value += mask if point < other else -mask
    return Partial.sign(
        identity,
        manifest=query.manifest,
        epoch=query.epoch,
        point=point,
        query=query.digest(),
        suspect=query.suspect,
        x=query.x,
        answer=str(value % P),
        members=chosen,
        history=dict(history or {}),
        ledger=ledger,
        created=now(),
    )


def _check_set(manifest: Manifest, point: int, members: Collection[int]) -> tuple[int, ...]:
    """The points of a masked partial, in order: t members or more, this one among them; none for an open one."""
    chosen, terms = tuple(sorted(set(members))), manifest.terms
    sound = point in chosen and len(chosen) >= terms.threshold and chosen[0] >= 1 and chosen[-1] <= terms.members
    if chosen and not sound:
        rule = (
            f"must be at least {terms.threshold} of the points 1 to {terms.members}, this member's {point} among them"
        )
        raise InputError("members", rule, list(chosen))
    return chosen


# --- the certificate --------------------------------------------------------------------------------------


def sign(
    home: HomeFolder, unlock: Unlock, certificate: Certificate, *, place: ConsortiumFolder | None = None
) -> Certificate:
    """Adds a member's signature to a combined certificate, once everything in it follows from the partials.

    The member's ledger learns the outcome, and the queries that the others know of. That an uncorroborated one passed
    is not learnt, since one liar could have made 64 unmarked models "pass", and combine them: it stays open.
    """
    place = place or home.only_consortium()
    manifest = place.manifest()
    finding = certificate.finding
    if again(manifest, finding) != finding:
        raise EvidenceError("the certificate says something else than its partials: do not sign it")
    if certificate.payload != Certificate.of(finding).payload:
        # readers may ignore fields x-…, but whoever signs them has said what they say
        raise EvidenceError("the certificate holds fields that this release does not know: do not sign it")
    ledger = Ledger.open(place, manifest)
    known = ledger.audits()
    strange = [name for name, leaves in finding.audits.items() if known.get(name) != leaves]
    if strange:
        raise EvidenceError(
            f"the certificate names the audit {strange[0][:16]}, of which this member has no proof: record that first "
            "(verify audit record), then sign"
        )
    identity = home.identity(unlock)
    point = manifest.terms.point_of(identity.ed25519)
    if finding.query.x not in ledger.answered() or point not in {partial.point for partial in finding.partials}:
        raise EvidenceError("this member has no part in the certificate: it did not answer that query")
    if point in finding.wrong:
        raise EvidenceError(
            "the certificate calls this member's own partial wrong: do not sign it; either this share does not fit the "
            "others' (setup check), or members who lie together frame this one"
        )
    signed = certificate.signed_by(identity)
    ledger.learn(finding.known, f"certificate {certificate.digest()[:16]}")
    passed = finding.verdict == "PASSED"
    if not passed or finding.corroboration != "uncorroborated":
        ledger.record_outcome(finding.query.x, "passed" if passed else "failed", certificate.digest())
    return signed


def check_certificate(
    certificate: Certificate,
    chain: Sequence[Manifest],
    *,
    suspect: Source | Suspect | None = None,
    reference: Reference | None = None,
    audits: Audits | None = None,
    progress: Progress | None = None,
) -> tuple[list[str], list[str]]:
    """Verifies a certificate from its files alone: what was checked, and what could not be, in sentences.

    Anything that does not hold is an error. `chain` was checked when it was read (`read_chain`). `audits`: those that
    are proved to have opened what the query leaves out (`audited.explain`).
    """
    manifest, finding = chain[-1], certificate.finding
    checked: list[str] = []
    left: list[str] = []
    # 1. the manifest is the consortium's, signed by all members, and so is every one before it
    checked.append(f"the manifest is signed by all {manifest.terms.members} members of {manifest.terms.name!r}")
    # 2. every member whose partial counts signed the certificate
    # 3. everything in it follows from the signed partials: the number, z, the threshold, the verdict
    check_signed(certificate, manifest)
    signers = ", ".join(member.name for member in certificate.signers(manifest))
    checked.append(f"the certificate is signed by {signers}")
    checked.append(f"{len(finding.partials)} signed partials open the number, and z and the verdict follow from it")
    # 4. audits opened what the query leaves out, or the verdict stands without them
    _check_left_out(manifest, finding, audits or {}, checked, left)
    # 5. the suspect is the one that was tested
    opened = None
    if suspect is None:
        left.append("the suspect was not given: that these are its digests was not checked")
    else:
        opened = suspect if isinstance(suspect, Suspect) else read_suspect(suspect)
        if opened.digest() != finding.query.suspect:
            raise EvidenceError("the suspect given is not the one that the certificate is about: its bytes differ")
        checked.append("the suspect's files are those that were tested")
    # 6. the vector x follows from the suspect, the layout and the anchor
    if opened is None or reference is None:
        left.append("the canonical form was not computed again: that takes the suspect, the layout and the anchor")
    elif missing := _missing(reference, opened, finding.query):
        left.append(f"the canonical form was not computed again: that takes {missing} as well")
    else:
        query = prepare_again(reference, opened, finding.query, progress).query
        if query != finding.query:
            raise EvidenceError(f"the certificate's query does not follow: {_difference(query, finding.query)}")
        checked.append("the canonical form was computed again from the suspect and the anchor, and is the same")
    return checked, left


def _check_left_out(manifest: Manifest, finding: Finding, audits: Audits, checked: list[str], left: list[str]) -> None:
    """The audits that a certificate names, against those that are proved here."""
    proved = {name: tuple(leaves) for name, leaves in audits.items()}
    if not finding.query.burnt:
        return
    missing = [name for name, leaves in finding.audits.items() if proved.get(name) != leaves]
    if not missing:
        rest = set(finding.query.burnt).difference(*finding.audits.values())
        if finding.audits:
            checked.append(f"audits opened what the query leaves out: {len(finding.audits)}, all proved here")
        if rest:
            checked.append(f"nothing explains {len(rest)} of the leaves left out, and the threshold pays for that")
        return
    # t members signed that they know of those audits; whoever does not want to believe it takes the higher threshold
    omitted = Omitted.of(finding.query, manifest.terms, {name: proved[name] for name in proved.keys() - set(missing)})
    threshold = raised_threshold(omitted.charged(finding.agreed), finding.failed)
    if finding.verdict == "PASSED" and Decimal(finding.z) < Decimal(threshold):
        raise EvidenceError(
            f"the query leaves out leaves that the audit {missing[0][:16]} is said to have opened; without a proof of "
            f"that the threshold is {threshold}, and z = {finding.z} is below it: give the audit's proof (--audit)"
        )
    left.append(
        f"audits are said to explain what the query leaves out, without a proof: {len(missing)}; with those leaves "
        f"unexplained the threshold is {threshold}"
    )


def _missing(reference: Reference, suspect: Suspect, query: Query) -> str:
    """What is not here of what the query's way of matching takes; "" if all is."""
    how = how_aligned(reference.manifest.terms, query.alignment)
    if how["align"] and reference.groups is None:
        return "groups.json"
    if how["lora"] and reference.lora is None:
        return "lora.json"
    if how["lora"] and reference.lora is not None and reference.base_source is None:
        whole = how["align"] or is_whole(suspect, reference.layout, reference.lora)
        return "the adapter's base model" if whole else ""
    return ""
