"""Sentences from codes: the one place where what records say becomes English.

`SENTENCES` has a template for every code that a record may hold (`consortium.reasons.CODES`), `PHRASES` those for what
follows from numbers alone. Rewording either changes no digest, no verdict and no answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal

from quorumark.consortium.records import Terms
from quorumark.reasons import CODES, Reason, Value
from quorumark.verify.evidence import Finding, Query
from quorumark.verify.null import raised_threshold
from quorumark.verify.omissions import left_out

__all__ = [
    "PHRASES",
    "SENTENCES",
    "about_charges",
    "about_cost",
    "about_layers",
    "about_left_out",
    "about_quorum",
    "sentence",
    "sentences",
]

SENTENCES: dict[str, str] = {
    "read.names-stripped": "the prefix '{prefix}' was stripped from the tensors' names",
    "read.names-added": "the prefix '{prefix}' was added to the tensors' names",
    "read.cast": "tensors stored as {suspect} instead of {layout}: {tensors}",
    "read.dequantised-per-tensor": "tensors dequantised from {suspect}, with one scale per tensor: {tensors}",
    "read.dequantised-per-row": "tensors dequantised from {suspect}, with one scale per row: {tensors}",
    "read.carriers-missing": "left out: {missing} of {carriers} carrying tensors are missing, among them {some}",
    "read.carrier-ambiguous": "left out: '{tensor}' could be any of {candidates} tensors, among them {some}",
    "read.carrier-shape": "left out: '{tensor}' has the shape ({shape}), but the consortium's model has ({wanted})",
    "read.carrier-transposed": (
        "left out: '{tensor}' is transposed: it has the shape ({shape}), but the consortium's model has ({wanted})"
    ),
    "read.factors-do-not-fit": "left out: the factors '{down}' and '{up}' cannot be multiplied",
    "read.type-unknown": "left out: '{tensor}' has the type {type}, which is not supported",
    "read.damaged": "left out: '{tensor}' cannot be read: its file is damaged",
    "read.no-scale": "left out: '{tensor}' has the type {type} and no scale beside it",
    "read.several-scales": "left out: '{tensor}' has more than one scale or zero point: {some}",
    "read.scale-shape": (
        "left out: '{tensor}' is quantised in a way that is not supported: '{helper}' has the shape ({shape}), not one "
        "number for each of the ({wanted}) rows"
    ),
    "read.row-order": "left out: '{tensor}' is not in row order, by '{helper}'",
    "read.scale-type": "left out: the scale '{helper}' of '{tensor}' has the type {type}, which is not floating-point",
    "read.zero-point-type": "left out: the zero point '{helper}' of '{tensor}' has the type {type}",
    "read.extra-tensors": "tensors that the consortium's model does not have were ignored: {tensors}",
    "read.not-finite": "'{tensor}' holds {numbers:,} numbers that are not finite: they count as 0",
    "read.adapter": "read as an adapter; its factors were put where the anchor's are",
    "read.adapter-of-rank": "read as an adapter of rank {ranks}; its factors were put where the anchor's are",
    "read.whole-model": (
        "read as a whole model, from which the base was taken away; its factors were put where the anchor's are"
    ),
    "read.aligned": (
        "aligned to the anchor: {found:,} of {channels:,} channels were found, {moved:,} of them elsewhere than in the "
        "anchor; {sweeps} sweeps, the last of which changed nothing"
    ),
    "read.aligned-unsettled": (
        "aligned to the anchor: {found:,} of {channels:,} channels were found, {moved:,} of them elsewhere than in the "
        "anchor; {sweeps} sweeps, the last of which still changed something"
    ),
    "read.like-the-anchor": (
        "{groups} of {judged} groups of channels, with {weights:,} of {compared:,} weights, are more like the anchor's "
        "than those of a model of another origin would be"
    ),
    "read.stream-turned": "its residual stream had been turned; it was turned back to the anchor's",
    "read.signs": "{lines:,} rows or columns of {tensors} tensors had other signs",
    "read.unmixed": "the channels of {blocks:,} blocks that can be mixed were put back to the anchor's",
    "read.resized": "tensors with more or fewer channels than the consortium's model: {tensors}",
    "read.channels-left-over": "{surplus:,} of the suspect's {channels:,} channels are left over",
    "untestable.empty": "the suspect is the anchor itself, all zeros, or not finite: there is nothing in it to test",
    "untestable.coverage": "only {covered:,} of {carriers:,} carrying weights were found in the suspect",
    "untestable.no-layers": (
        "nothing is answered by layers: with {coordinates:,} coordinates and this strength the mark pays for at most "
        "{budget:,} equations; or the consortium agreed on no blocks"
    ),
    "untestable.narrow-blocks": "only {broad} of {blocks} blocks depend on many coordinates by themselves",
    "finding.passed": "z = {z} reaches the threshold {threshold}",
    "finding.failed": "z = {z} is below the threshold {threshold}: the mark was not found",
    "finding.coverage": (
        "z = {z} is below the threshold {threshold}, but only {covered:,} of {carriers:,} carrying weights were found"
    ),
    "finding.left-out": (
        "z = {z} is below the threshold {threshold}, but {left_out:,} of {coordinates:,} coordinates were left out as "
        "burnt"
    ),
    "finding.charged": (
        "z = {z} would reach the threshold {uncharged}, but not {threshold}, which pays for the choices of the asker"
    ),
    "finding.surplus": (
        "z = {z} is below the threshold {threshold}, but {surplus:,} of the suspect's channels are left over: those "
        "that were matched can be decoys"
    ),
    "finding.doubtful": (
        "z = {z} is below the threshold {threshold}, but only {weights:,} of {compared:,} weights were matched to the "
        "anchor's; a part of it is of the same origin, and what was done to the rest may hide the mark"
    ),
    "finding.unrelated": (
        "only {weights:,} of {compared:,} weights are more like the anchor's than those of a model of another origin: "
        "it is one, or it was changed in a way that alignment does not undo"
    ),
    "finding.uncorroborated": (
        "uncorroborated: {partials} partials open a number whatever they say, so one lying member could have set it; "
        "with one more answer, combined again, that would be noticed"
    ),
    "finding.corroborated": (
        "corroborated: {partials} partials agree; up to {liars} lying members would have been noticed"
    ),
    "finding.corrected": (
        "the partials of {members} contradict the others and were corrected; that is right if no more than {liars} of "
        "the {partials} members lie; more who work together could have framed them"
    ),
    "finding.weights-missing": "{missing:,} of {carriers:,} carrying weights were not found",
    "finding.alpha": "the threshold was set by a false-alarm probability of {alpha}, not by the consortium's policy",
    "finding.layers-passed": "by layers: Q = {q} over {blocks} blocks reaches the threshold {threshold}",
    "finding.layers-failed": (
        "by layers: Q = {q} over {blocks} blocks is below the threshold {threshold}: the mark was not found in them"
    ),
    "finding.far-below": (
        "z = {z} is far below 0, which chance does not explain: as a rule such a model was trained against an estimate "
        "of the key"
    ),
    "finding.next-align": (
        "next: ask again with --align, in case channels were moved or scaled; it opens one more equation, and raises "
        "z* to {threshold} for later queries if that does not pass either"
    ),
    "finding.next-layers": (
        "next: ask by layers (--layers), which still sees a mark whose z was trained away; it opens up to {blocks} "
        "equations of the {left:,} that are left, and raises z* to {threshold} for later queries if it does not pass"
    ),
    "finding.next-lora": (
        "next: ask again with --lora, in case the suspect is the adapter in other factors, or a whole model that it "
        "was added to; it opens one more equation, and raises z* to {threshold} for later queries if that does not pass"
    ),
    "finding.next-names": (
        "next: look at the tensors' names and shapes above; a suspect whose carriers are renamed as in the "
        "consortium's model can be asked about again, and this query counts as one that did not pass"
    ),
    "finding.raised": (
        "earlier queries that did not pass opened equations in the key, {equations} of them, and raised the threshold "
        "from {charged} to {threshold}"
    ),
    "guard.manifest": "the query was for another manifest or epoch than the one in force",
    "guard.vector": "the query did not name the vector x that this member computed from the suspect",
    "guard.statistic": "the query used the statistic '{statistic}', but '{agreed}' is agreed",
    "guard.statistic-policy": "this member's policy does not list the statistic '{statistic}'",
    "guard.forgotten-leaves": (
        "the query did not leave out {count:,} leaves of the key that audits opened: verify prepare --audit does"
    ),
    "guard.unexplained-leaves": (
        "the query left out {count:,} leaves of the key that no known audit opened: verify partial --audit explains it"
    ),
    "guard.leaf-not-zero": "the vector x was not zero on the leaf {leaf}, which an audit opened",
    "guard.budget": (
        "the query would have opened more than the {budget} equations about the key that the consortium may ever open"
    ),
    "guard.max-answers": "all {answers} answers that this member's policy allows were given",
    "guard.norms": "the query's norms were not those of its vector x",
    "guard.narrow": "the query rested on {effective} coordinates, fewer than {least}",
    "guard.remainder": "a remainder of the answer would have rested on {effective} coordinates, fewer than {least}",
    "guard.adds-little": (
        "the query added {effective} coordinates to those answered before, fewer than {least}; the closest was query "
        "{query:.16} of {answered} (cosine {cosine})"
    ),
    "guard.too-close": (
        "the query was too close to a combination of those answered before; the closest was query {query:.16} of "
        "{answered} (cosine {cosine})"
    ),
    "guard.no-layers": "this consortium answers nothing by layers",
    "guard.blocks": "the query's blocks were not those of the agreed rule",
    "guard.narrow-blocks": "only {broad} of {blocks} blocks depended on many coordinates by themselves",
    "guard.passed-before": "the plain query about this suspect had passed",
    "guard.not-approved": "nobody had approved the query",
    "guard.per-day": "this member's policy approves {allowed} queries in 24 hours, and {answered} were answered",
    "audit.too-few-shares": "genesis shares of {opened} members were opened, but it takes {needed}",
    "audit.not-one-key": "the committed shares of the {members} members who opened are not shares of one key",
    "audit.not-signs": "{odd:,} of the {entries:,} opened entries of the key are not ±1",
    "audit.too-large": "{odd:,} of the {entries:,} opened entries of the key are larger than any normal number",
    "audit.x-is-zero": "x is 0 on all opened leaves: they say nothing",
    "audit.by-layers": "a certificate by layers has no spot audit: audit the plain one before it, if its z is large",
    "audit.proof": "z = {z:.2f} on the opened leaves is at least {proof}: it proves itself",
    "audit.bound-too-weak": (
        "z = {z:.2f} on the opened leaves, but after the charges for choices the bound is 10^{bound:.1f}, and "
        "10^{enough} is needed: let more members open, show the challenges that burnt leaves come from, and vouch for "
        "those whose seeds you drew, or confirmed with the person who did"
    ),
    "audit.no-mark": "z = {z:.2f} on the opened leaves is no more than a model without the mark may show",
    "audit.below-proof": "z = {z:.2f} on the opened leaves is below {proof}",
    "audit.bad-luck": (
        "z = {z:.2f} on the opened leaves is below {proof}, as in 1 of 100 honest audits: draw another challenge"
    ),
    "audit.confirmed": (
        "the certificate's z = {claimed} predicts {predicted:.2f} ± {tolerance:.2f} on the opened leaves, and they "
        "show "
        "{z:.2f}: the certificate's number is confirmed"
    ),
    "audit.neither": (
        "the certificate's z = {claimed} predicts {predicted:.2f} ± {tolerance:.2f} on the opened leaves, and they "
        "show "
        "{z:.2f}: that neither confirms nor contradicts the certificate's number, since a model without the mark may "
        "show as much; too few leaves were opened"
    ),
    "audit.contradicted": (
        "the certificate's z = {claimed} predicts {predicted:.2f} ± {tolerance:.2f} on the opened leaves, but they "
        "show "
        "{z:.2f}: the certificate's number is contradicted"
    ),
    "audit.seed": (
        "the leaves were drawn by a seed of '{source}': it must have been drawn after the query was fixed, by you or "
        "by "
        "somebody you trust in this"
    ),
    "audit.some-members": (
        "shares of {opened} of the {members} first members were opened; the bound is charged for the choice"
    ),
    "audit.burnt-vouched": (
        "leaves left out as burnt by earlier challenges that you vouch for: {leaves}; seeds of {sources}"
    ),
    "audit.burnt-claimed": (
        "leaves left out as burnt by earlier challenges whose seeds may have been chosen: {leaves}; seeds of "
        "{sources}; "
        "the bound is charged for them"
    ),
    "audit.burnt-unexplained": (
        "leaves left out as burnt that nothing explains: {leaves}; the bound is charged for them"
    ),
    "audit.dated": (
        "the manifest, and with it everything that the key follows from, existed by {when}: so says the time-stamping "
        "authority '{authority}', which is not a member"
    ),
    "audit.older": (
        "the suspect first appeared on {appeared}, as you say, after {when}: the key is older than the suspect, and no "
        "member's clock is trusted for that"
    ),
    "audit.not-older": (
        "the suspect first appeared on {appeared}, as you say, but the earliest stamp shows only that the manifest "
        "existed by {when}: that it is older than the suspect must be believed"
    ),
    "audit.no-roots": (
        "the manifest has time stamps, {stamps} of them, which were not checked: name the roots that you trust for "
        "time stamps (--tsa-roots); without them it must be believed that the manifest is older than the suspect"
    ),
    "audit.undated": (
        "no time stamp dates the manifest: that it is older than the suspect must be believed, of the members or of "
        "somebody else who kept its digest"
    ),
    "fault.opening-malformed": (
        "opening {number} of {files} is left out: it is damaged, or not an opening of this epoch"
    ),
    "fault.opening-of-nobody": "an opening is left out: no member is at point {point}",
    "fault.opening-signature": "the opening of {name} is left out: its signature does not hold",
    "fault.opening-of-another-challenge": "the opening of {name} is left out: it answers another challenge",
    "fault.opening-of-other-leaves": "the opening of {name} is left out: it does not open exactly the leaves asked for",
    "fault.opening-lacks-archives": "the opening of {name} is left out: it does not hold keys for all archives",
    "fault.opening-leaf": (
        "the opening of {name} is left out: the leaf {leaf} is not what the genesis root commits to"
    ),
    "fault.share-misfit": "the committed share of {name} does not fit the others' and is left out",
    "fault.keys-misfit": "the keys that {members} opened do not fit the others' and were left out",
    "fault.too-few-keys": "the archives' keys take {needed} members' openings, but there are {opened}",
    "fault.archive-unusable": "the file '{file}' is left out: it is not an archive of this consortium, or is damaged",
    "fault.archive-of-nobody": "the archive '{file}' is left out: it is not of an archived share",
    "fault.archive-closed": (
        "the archive of the genesis share at point {point} is left out: the keys do not open it, or it is damaged"
    ),
    "fault.archive-leaf": (
        "the archive of the genesis share at point {point} is left out: the leaf {leaf} is not what the genesis root "
        "commits to"
    ),
    "check.manifest": "the manifest is signed by all {members} members of '{consortium}'",
    "check.signatures": "the certificate is signed by {members}",
    "check.partials": "{partials} signed partials open the number, and z and the verdict follow from it",
    "check.audits": "audits opened what the query leaves out: {audits}, all proved here",
    "check.unexplained": "nothing explains {leaves} of the leaves left out, and the threshold pays for that",
    "check.suspect": "the suspect's files are those that were tested",
    "check.form": "the canonical form was computed again from the suspect and the anchor, and is the same",
    "check.no-proof": (
        "audits said to explain what the query leaves out, without a proof: {audits}; with those leaves unexplained "
        "the threshold is {threshold}"
    ),
    "check.no-suspect": "the suspect was not given, so its digests were not compared",
    "check.no-reference": (
        "the canonical form was not computed again: that takes the suspect, the layout and the anchor"
    ),
    "check.no-groups": "the canonical form was not computed again: that takes groups.json as well",
    "check.no-factors": "the canonical form was not computed again: that takes lora.json as well",
    "check.no-base": "the canonical form was not computed again: that takes the adapter's base model as well",
    "check.dated": (
        "the {what} existed by {when}, says the time-stamping authority '{authority}', which is not a member; to be "
        "renewed before {until}"
    ),
    "check.renewed": "that stamp of the {what} was renewed in time by {authorities}",
    "check.stamp-untrusted": (
        "a time stamp of the {what} by '{authority}', whose certificates lead to none of the roots given"
    ),
    "check.stamp-expired": (
        "a time stamp of the {what} by '{authority}', whose certificates expired on {expired} and which nothing renewed"
    ),
    "check.no-roots": (
        "the time stamps of the {what}, {stamps} of them: name the roots that you trust for time stamps (--tsa-roots)"
    ),
    "check.undated": "the {what}: no time stamp dates it, so its times are what members say",
    "stamp.too-large": "the stamp has {bytes:,} bytes, and none has more than {most:,}",
    "stamp.malformed": "the file is not an answer of a time-stamping authority, or is truncated or damaged",
    "stamp.unsorted": "a set in the stamp is not sorted, as DER asks for",
    "stamp.refused": "the authority refused to stamp: status {status}",
    "stamp.hash": "the stamp hashes with an algorithm other than SHA-256, SHA-384 and SHA-512",
    "stamp.other-bytes": "the stamp dates something else",
    "stamp.nonce": "the stamp answers another request",
    "stamp.no-certificate": "the certificate of the one who signed the stamp is not in it",
    "stamp.purpose": "the certificate of '{authority}' is not one for time stamps",
    "stamp.signer": "what '{authority}' signed names another certificate than the one that the stamp comes with",
    "stamp.untrusted": "the certificates of '{authority}' lead to none of the roots given",
    "stamp.not-valid-then": "the certificates of '{authority}' were not valid at {time}, the time of the stamp",
    "stamp.signature": "the stamp's signature does not hold",
    "stamp.future": "the stamp of '{authority}' names {time}, which has not come yet by the clock of this machine",
    "stamp.expired": "the certificates of '{authority}' expired on {expired}, and nothing renewed the stamp before",
    "stamp.renewed-late": "the stamp was renewed on {renewed}, after its certificates had expired on {expired}",
    "stamp.renewed-early": "the stamp of {time} is said to be renewed by one of {renewed}, which is older",
    "stamp.twice": "the stamp is there already",
}
"""Code → template. Values are numbers (decimals as `Decimal`), strings, or lists that are joined by commas."""

PHRASES: dict[str, str] = {
    "layers-copy": "Every layer carries the mark.",
    "layers-copy-why": (
        "Nearly all bars point to the right and stand out: this is what an untouched copy looks like, or one that was "
        "changed little."
    ),
    "layers-faded": "The layers carry the mark, some of them faintly.",
    "layers-faded-why": (
        "Bars point to the right, and some are within chance: this is what a copy looks like that was trained on, "
        "pruned or mixed with another model. No layer points clearly away from the key."
    ),
    "layers-against": "This model was trained against the mark.",
    "layers-against-why": (
        "Some layers lean clearly away from the key. Chance does not do that, and neither does training on: somebody "
        "pushed the weights against an estimate of the key, and went too far in these layers."
    ),
    "layers-nothing": "The layers show nothing of the mark.",
    "layers-nothing-why": (
        "The bars scatter around 0 as those of an unrelated model do. The same picture results if the mark was taken "
        "out of every layer by just the right amount."
    ),
    "layers-below": (
        "z itself is far below 0. A model that knows nothing of the key is as unlikely to be there as it is to be far "
        "above 0: it leans away from the key because somebody trained it to."
    ),
    "by-layers": (
        "by layers: {blocks} blocks by the rule {rule}, after the certificate {after:.16} that did not pass; answers "
        "are sealed to {examiner} (card {card}), who alone sees numbers by layer"
    ),
    "cost": (
        "an answer opens {equations} of the {budget:,} equations about the key that the consortium may ever open, "
        "{used:,} of which are open; if the query does not pass, z* rises from {now} to {then} for the next ones"
    ),
    "not-checked": "not checked: {what}",
    "left-out": (
        "left out: {leaves:,} of the key's leaves, {gone:,} of {coordinates:,} coordinates ({percent:.2f} %), with "
        "{energy:.2f} % of what the suspect would have shown"
    ),
    "audit-opened": "leaves of them that the audit {audit:.16} opened: {leaves:,}",
    "unexplained": "NOTHING EXPLAINS why {leaves:,} of these leaves are left out; --audit with a proof would",
    "quorum": (
        "{enough} members' answers give a verdict, but one who lies could have set it (uncorroborated); ask {better}, "
        "so that a lie is noticed"
    ),
    "quorum-all": "all {enough} members must answer, and one who lies could have set the number (uncorroborated)",
    "charges-by-layers": (
        "z and Q are two tests, and the asker had a choice of what to leave out and how to read the suspect: both "
        "thresholds pay for all of that, {ways} ways in all; z* is {charged} instead of {agreed}"
    ),
    "charges": (
        "the asker had up to {ways} ways to read the suspect and to leave something out; the threshold "
        "pays for that: {charged} instead of {agreed}"
    ),
}


def sentence(reason: Reason) -> str:
    """What a code says, for people."""
    kinds = CODES[reason.code]
    return SENTENCES[reason.code].format_map({n: _shown(kinds[n], value) for n, value in reason.values.items()})


def sentences(reasons: Sequence[Reason]) -> list[str]:
    return [sentence(reason) for reason in reasons]


def _shown(kind: str, value: Value) -> Value | Decimal:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return Decimal(value) if kind == "decimal" else value


def about_left_out(query: Query, terms: Terms, audits: Mapping[str, Collection[int]]) -> list[str]:
    """What a query leaves out, how much, and why. `audits`: those that explain it, by the digest of their challenge."""
    if not query.burnt:
        return []
    burnt, whole = set(query.burnt), query.norm2 + query.burnt_norm2
    gone = left_out(terms, query.burnt)
    texts = [
        PHRASES["left-out"].format(
            leaves=len(burnt),
            gone=gone,
            coordinates=terms.coordinates,
            percent=100 * gone / terms.coordinates,
            energy=100 * query.burnt_norm2 / max(whole, 1),
        )
    ]
    explained: set[int] = set()
    for name, leaves in sorted(audits.items()):
        if burnt.issuperset(leaves):
            explained.update(leaves)
            texts.append(PHRASES["audit-opened"].format(audit=name, leaves=len(leaves)))
    rest = len(burnt - explained)
    if rest:
        texts.append(PHRASES["unexplained"].format(leaves=rest))
    return texts


def about_quorum(terms: Terms) -> str:
    """How many answers to ask for: with t alone nobody can tell a liar."""
    phrase = PHRASES["quorum" if terms.members > terms.threshold else "quorum-all"]
    return phrase.format(enough=terms.threshold, better=terms.threshold + 1)


def about_layers(query: Query) -> list[str]:
    """What a query by layers asks, and who will see the answers."""
    if query.layers is None:
        return []
    asked = query.layers
    return [
        PHRASES["by-layers"].format(
            blocks=asked.count,
            rule=asked.rule,
            after=asked.after,
            examiner=asked.examiner.name,
            card=asked.examiner.card.fingerprint(),
        )
    ]


def about_cost(query: Query, terms: Terms, used: int, failed: int, budget: int) -> str:
    """What an answer costs: equations, and the thresholds of later queries. `used` and `failed` are the others'."""
    z = terms.policy.as_dict()["z"]
    now, then = (f"{Decimal(raised_threshold(z, count)):.2f}" for count in (failed, failed + query.equations))
    return PHRASES["cost"].format(equations=query.equations, budget=budget, used=used, now=now, then=then)


def about_charges(finding: Finding) -> list[str]:
    """By how much the threshold was raised for what the asker could choose."""
    if finding.charged == finding.agreed:
        return []
    return [
        PHRASES["charges" if finding.layers is None else "charges-by-layers"].format(
            ways=_ways(finding.log10_choices), charged=finding.charged, agreed=finding.agreed
        )
    ]


def _ways(log10: str) -> str:
    """A count, from its logarithm, which is rounded up: as a number where that is short."""
    return f"{int(10 ** float(log10)):,}" if float(log10) < 6 else f"10^{log10}"
