"""Asking: what a suspect is, as a query that everybody computes alike (docs/verification.md).

ours = Reference.read("consortium.json")                                   # with layout.json, anchor.safetensors
query = prepare(ours, "suspect.safetensors").query                         # anybody
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import Self

import numpy as np
from numpy.typing import NDArray

from quorumark.align import lora as gauge
from quorumark.align.alignment import PROCEDURE, Alignment
from quorumark.align.groups import Groups
from quorumark.align.lora import Lora, gauge_suspect
from quorumark.align.procedure import align as align_suspect
from quorumark.consortium.policy import NO_BLOCKS
from quorumark.consortium.records import Card, Terms
from quorumark.errors import EvidenceError, InconclusiveError, InputError, RecordError
from quorumark.model.blocks import Blocks, blocks_of
from quorumark.model.layout import ModelLayout, Source
from quorumark.model.statistic import Canonical, Model, canonical_form
from quorumark.model.suspect import Counted, Match, Suspect, match_layout, non_finite, read_suspect
from quorumark.reasons import Reason, printable
from quorumark.verify.certificate import Certificate
from quorumark.verify.evidence import Query, now
from quorumark.verify.guard import block_breadth, budget, layers_offered
from quorumark.verify.layered import BROAD, Examiner, Layers, broad_blocks
from quorumark.verify.reference import Reference

__all__ = [
    "AskLayers",
    "Prepared",
    "agreed_alignment",
    "agreed_blocks",
    "difference",
    "how_aligned",
    "omitted",
    "prepare",
    "prepare_again",
]

NO_ALIGNMENT = "none"
_LEAST_COVERAGE = 50  # percent of the carriers: with fewer it is another model
_LEAST_ALIGNED = 10  # the same for what an alignment found: a third of the channels removed halves the weights
_SHOWN = 4
Progress = Callable[[str], None]


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
    layers: AskLayers | None = None,
    progress: Progress | None = None,
) -> Prepared:
    """What to ask about a suspect. An InconclusiveError says why nothing can be asked: then nothing is accused either.

    `align`: the suspect's channels are first put where the anchor has them (docs/alignment.md). `lora`: the suspect is
    an adapter, or a whole model that one was added to; its factors are put where the anchor's are (docs/lora.md). Each
    is another query than the one without. `burnt`: the leaves that audits opened; they are left out. Members answer if
    these are exactly the leaves that they know to be opened, or are proved to be with the query. `layers`: ask block by
    block (docs/layers.md), after the plain query did not pass.
    """
    manifest, layout = reference.manifest, reference.layout
    if not manifest.terms.has_key:
        raise RecordError(
            f"the members of {manifest.terms.name!r} agreed on sums alone (setup 'sums'): their models carry no mark, "
            "and there is nothing to verify. Name the manifest of a consortium with a key"
        )
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
            "the suspect is the anchor itself, all zeros, or not finite: there is nothing in it to test",
            reason=Reason.of("untestable.empty"),
        )
    blocks = agreed_blocks(reference)
    cut = None if layers is None else _by_layers(reference, blocks, form, layers)
    query = Query(
        manifest=manifest.digest().hex(),
        epoch=manifest.epoch,
        statistic=manifest.terms.statistic,
        alignment=agreed_alignment(manifest.terms, align=align, lora=lora),
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
        matching=(*_matching(read.counted, read.match), *read.reasons),
        created=created or now(),
        surplus=read.surplus,
        blocks=0 if blocks is None else blocks.count,
        layers=cut,
    )
    return Prepared(query, form)


def agreed_blocks(reference: Reference) -> Blocks | None:
    """The blocks that the terms' rule gives for the layout; None where they agreed on none."""
    rule = reference.manifest.terms.policy.blocks
    return None if rule == NO_BLOCKS else blocks_of(reference.layout, rule)


def _by_layers(reference: Reference, blocks: Blocks | None, form: Canonical, asked: AskLayers) -> Layers:
    terms = reference.manifest.terms
    if blocks is None or blocks.count < 2 or not layers_offered(terms):
        raise InconclusiveError(
            f"this consortium answers nothing by layers: with {terms.coordinates:,} coordinates and this strength the "
            f"mark would pay for at most {budget(terms):,} equations, too few; or it agreed on no blocks",
            reason=Reason.of("untestable.no-layers", coordinates=terms.coordinates, budget=budget(terms)),
        )
    norm1, norm2 = broad_blocks(form.x, blocks, block_breadth(terms))
    broad = sum(value > 0 for value in norm2)
    if 100 * broad < BROAD * blocks.count:
        raise InconclusiveError(
            f"only {broad} of the {blocks.count} blocks depend on many coordinates by themselves, and {BROAD} % must",
            reason=Reason.of("untestable.narrow-blocks", broad=broad, blocks=blocks.count),
        )
    return Layers(terms.policy.blocks, asked.after, asked.value, norm1, norm2, asked.examiner)


@dataclass(frozen=True)
class AskLayers:
    """What it takes to ask by layers: the digest of the certificate that did not pass and its Y, and the examiner."""

    after: str
    value: str
    examiner: Examiner

    @classmethod
    def of(cls, before: Certificate, examiner: Card) -> Self:
        """After a certificate, with answers for the holder of a card."""
        if before.finding.verdict == "PASSED" or before.finding.query.layers is not None:
            raise EvidenceError("a query by layers comes after a plain one that did not pass")
        return cls(before.digest(), before.finding.value, Examiner.of(examiner))


@dataclass(frozen=True, eq=False)
class _Read:
    """A suspect as a model of the layout: `names` are its carriers, `reasons` say what was done to it."""

    model: Model
    names: Mapping[str, str]
    match: Match
    covered: int
    counted: Counted
    reasons: tuple[Reason, ...] = ()
    found: Alignment | None = None

    @property
    def surplus(self) -> int:
        """The suspect's channels that no place was found for."""
        return 0 if self.found is None else self.found.surplus


def _read_weights(reference: Reference, opened: Suspect, align: bool, progress: Progress | None) -> _Read:
    """A suspect whose tensors are the layout's own."""
    layout = reference.layout
    if align and reference.manifest.terms.policy.lora:
        raise RecordError("the consortium's groups are the base model's: align a whole model, with --lora")
    match = match_layout(opened, layout, _agreed_groups(reference).resizable() if align else None)
    _require_coverage(layout, match.coverage[0], _LEAST_COVERAGE, match)
    counted = Counted(opened)
    if not align:
        return _Read(counted, match.names, match, match.coverage[0], counted)
    every = {**match.plain, **match.names}
    found = align_suspect(counted, reference.anchor, layout, _agreed_groups(reference), every, progress=progress)
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
    reasons = [found.kind]
    if found.alignment is not None:
        reasons += _aligned(found.match, found.alignment)
    return _Read(found, found.names, found.match, covered, Counted(opened), tuple(reasons), found.alignment)


def _require_coverage(layout: ModelLayout, covered: int, least: int, match: Match | None = None) -> None:
    if covered * 100 >= least * layout.carrier_size:
        return
    found = f"{covered:,} of {layout.carrier_size:,} carrying weights"
    reason = Reason.of("untestable.coverage", covered=covered, carriers=layout.carrier_size)
    if match is None:
        text = f"too little of the consortium's model was found in the suspect: {found}"
        raise InconclusiveError(text, reason=reason)
    problems = match.problems[:_SHOWN]
    codes = ", ".join(sorted({problem.code for problem in problems}))
    raise InconclusiveError(
        f"the suspect does not fit the consortium's model: {found} were found in it ({codes})",
        reason=reason,
        problems=problems,
    )


def _agreed_groups(reference: Reference) -> Groups:
    """The groups to align with: nobody chooses them now."""
    if reference.groups is None:
        if reference.manifest.terms.policy.groups:
            raise RecordError("the consortium's groups are not here: put groups.json beside the manifest, or name it")
        raise RecordError("this consortium agreed on no groups when it was made, so that nothing can be aligned")
    return reference.groups


def _agreed_factors(reference: Reference) -> Lora:
    """The factors of an adapter: nobody chooses them now."""
    if reference.lora is None:
        if reference.manifest.terms.policy.lora:
            raise RecordError("the consortium's lora.json is not here: put it beside the manifest, or name it")
        raise RecordError("this consortium agreed on no adapter when it was made: leave out --lora")
    return reference.lora


def _covered(layout: ModelLayout, match: Match, found: Alignment) -> int:
    """Carrying weights that the suspect has: all but those at places that no channel of it came to."""
    total = 0
    for spec, _ in layout.spans("carrier"):
        if spec.name in match.names:
            places = [found.indices.get((spec.name, axis)) for axis in range(len(spec.shape))]
            total += prod(n if at is None else int((at >= 0).sum()) for n, at in zip(spec.shape, places, strict=True))
    return total


def _aligned(match: Match, found: Alignment) -> list[Reason]:
    """What the alignment did."""
    ours, theirs, matched = (sum(numbers) for numbers in zip(*found.sizes, strict=True))
    code = "read.aligned" if found.stable else "read.aligned-unsettled"
    reasons = [Reason.of(code, found=matched, channels=ours, moved=sum(found.moved), sweeps=found.sweeps)]
    if (like := found.like).judged:
        counts = {"groups": like.groups, "judged": like.judged, "weights": like.weights, "compared": like.compared}
        reasons.append(Reason.of("read.like-the-anchor", **counts))
    if found.rotation is not None:
        reasons.append(Reason.of("read.stream-turned"))
    if found.signs:
        changed = sum(int((signs < 0).sum()) for signs in found.signs.values())
        reasons.append(Reason.of("read.signs", lines=changed, tensors=len({name for name, _ in found.signs})))
    if found.unmixed:
        reasons.append(Reason.of("read.unmixed", blocks=found.blocks))
    if match.resized:
        reasons.append(Reason.of("read.resized", tensors=len(match.resized)))
    if found.surplus:
        theirs += 0 if found.rotation is None else found.rotation.surplus
        reasons.append(Reason.of("read.channels-left-over", surplus=found.surplus, channels=theirs))
    return reasons


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


def _matching(suspect: Counted, match: Match) -> list[Reason]:
    """How the suspect was read."""
    reasons = []
    if match.stripped:
        reasons.append(Reason.of("read.names-stripped", prefix=printable(match.stripped)))
    if match.added:
        reasons.append(Reason.of("read.names-added", prefix=printable(match.added)))
    for cast, count in sorted(Counter(match.casts.values()).items()):
        code = f"read.dequantised-per-{cast.per}" if cast.per else "read.cast"
        reasons.append(Reason.of(code, tensors=count, layout=cast.layout, suspect=cast.suspect))
    reasons.extend(match.problems)
    if match.extra:
        reasons.append(Reason.of("read.extra-tensors", tensors=len(match.extra)))
    for name, count in non_finite(suspect, match).items():
        reasons.append(Reason.of("read.not-finite", tensor=printable(name), numbers=count))
    return reasons


def agreed_alignment(terms: Terms, *, align: bool, lora: bool) -> str:
    """What a query says about how the suspect was matched: procedures, with what the terms name for them."""
    used = [f"{PROCEDURE}:{terms.policy.groups}"] if align else []
    used += [f"{gauge.PROCEDURE}:{terms.policy.lora}"] if lora else []
    return "+".join(used) or NO_ALIGNMENT


def how_aligned(terms: Terms, text: str) -> dict[str, bool]:
    """What a query's text asks for, `align` and `lora`; an EvidenceError if that is not what the terms name."""
    choices = ((False, True) if named else (False,) for named in (terms.policy.groups, terms.policy.lora))
    for align, lora in itertools.product(*choices):
        if text == agreed_alignment(terms, align=align, lora=lora):
            return {"align": align, "lora": lora}
    raise EvidenceError("the query is aligned in another way than the one that was agreed on with the terms")


def prepare_again(
    reference: Reference, suspect: Source | Suspect, query: Query, progress: Progress | None = None
) -> Prepared:
    """What a query should be for this suspect, its files' names included: a certificate signs them."""
    how = how_aligned(reference.manifest.terms, query.alignment)
    cut = query.layers
    layers = None if cut is None else AskLayers(cut.after, cut.value, cut.examiner)
    return prepare(
        reference, suspect, **how, burnt=query.burnt, created=query.created, layers=layers, progress=progress
    )


def difference(mine: Query, theirs: Query) -> str:
    one, two = mine.as_dict(), theirs.as_dict()
    names = [name for name in one if one[name] != two[name]]
    return f"{names[0]} is {str(one[names[0]])[:80]}, not {str(two[names[0]])[:80]}"
