"""Signing a certificate, and checking one from its files alone, years later (docs/verification.md)."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

from quorumark.align.lora import is_whole
from quorumark.consortium.home import ConsortiumFolder, HomeFolder
from quorumark.consortium.keystore import Unlock
from quorumark.consortium.records import Manifest
from quorumark.errors import EvidenceError
from quorumark.model.layout import Source
from quorumark.model.suspect import Suspect, read_suspect
from quorumark.reasons import Reason
from quorumark.verify.certificate import Certificate
from quorumark.verify.challenge import Challenge
from quorumark.verify.combine import again, check_signed
from quorumark.verify.evidence import Finding, Query
from quorumark.verify.ledger import Ledger
from quorumark.verify.null import raised_threshold
from quorumark.verify.omissions import Audits, Omitted
from quorumark.verify.query import Progress, difference, how_aligned, prepare_again
from quorumark.verify.reference import Reference

__all__ = ["check_certificate", "check_challenged", "check_corroborated", "sign"]


def sign(
    home: HomeFolder, unlock: Unlock, certificate: Certificate, *, consortium: ConsortiumFolder | None = None
) -> Certificate:
    """Adds a member's signature to a combined certificate, once everything in it follows from the partials.

    The member's ledger learns the outcome, and the queries that the others know of. That an uncorroborated one passed
    is not learnt, since one liar could have made 64 unmarked models "pass", and combine them: it stays open.
    """
    consortium = consortium or home.only_consortium()
    manifest = consortium.manifest()
    finding = certificate.finding
    if again(manifest, finding) != finding:
        raise EvidenceError("the certificate says something else than its partials: do not sign it")
    if certificate.payload != Certificate.of(finding).payload:
        # readers may ignore fields x-…, but a member who signs them has said what they say
        raise EvidenceError("the certificate holds fields that this release does not know: do not sign it")
    ledger = Ledger.open(consortium, manifest)
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
    ledger.learn(finding.known, certificate.digest(), finding.blocks)
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
) -> tuple[list[Reason], list[Reason]]:
    """Verifies a certificate from its files alone: what was checked, and what could not be.

    Anything that does not hold is an error. `chain` was checked when it was read (`read_chain`). `audits`: those that
    are proved to have opened what the query leaves out (`proof.explain`).
    """
    manifest, finding = chain[-1], certificate.finding
    checked: list[Reason] = []
    left: list[Reason] = []
    # 1. the manifest is the consortium's, signed by all members, and so is every one before it
    checked.append(Reason.of("check.manifest", members=manifest.terms.members, consortium=manifest.terms.name))
    # 2. every member whose partial counts signed the certificate
    # 3. everything in it follows from the signed partials: the number, z, the threshold, the verdict
    check_signed(certificate, manifest)
    signers = tuple(member.name for member in certificate.signers(manifest))
    checked.append(Reason.of("check.signatures", members=signers))
    checked.append(Reason.of("check.partials", partials=len(finding.partials)))
    # 4. audits opened what the query leaves out, or the verdict stands without them
    _check_left_out(manifest, finding, audits or {}, checked, left)
    # 5. the suspect is the one that was tested
    opened = None
    if suspect is None:
        left.append(Reason.of("check.no-suspect"))
    else:
        opened = suspect if isinstance(suspect, Suspect) else read_suspect(suspect)
        if opened.digest() != finding.query.suspect:
            raise EvidenceError("the suspect given is not the one that the certificate is about: its bytes differ")
        checked.append(Reason.of("check.suspect"))
    # 6. the vector x follows from the suspect, the layout and the anchor
    if opened is None or reference is None:
        left.append(Reason.of("check.no-reference"))
    elif missing := _missing(reference, opened, finding.query):
        left.append(missing)
    else:
        query = prepare_again(reference, opened, finding.query, progress).query
        if query != finding.query:
            raise EvidenceError(f"the certificate's query does not follow: {difference(query, finding.query)}")
        checked.append(Reason.of("check.form"))
    return checked, left


def check_challenged(
    certificate: Certificate, chain: Sequence[Manifest], asked: Challenge, audits: Audits
) -> tuple[list[Reason], list[Reason]]:
    """A certificate that its members signed, that follows from its partials, and whose z is challenged.

    What was checked of it, and what was not.
    """
    found = check_certificate(certificate, chain, audits=audits)
    if asked.z != certificate.finding.z:
        raise EvidenceError(
            f"the challenge is for z = {asked.z}, but the certificate says {certificate.finding.z}: draw another"
        )
    return found


def check_corroborated(finding: Finding) -> None:
    """Whether members open anything for it: not if one liar could have set its number."""
    if finding.corroboration == "uncorroborated" and finding.members > finding.quorum:
        raise EvidenceError(
            "the certificate rests on t answers, of which one could have set its number: let another member answer, "
            "combine again, and audit that"
        )


def _check_left_out(
    manifest: Manifest, finding: Finding, audits: Audits, checked: list[Reason], left: list[Reason]
) -> None:
    """The audits that a certificate names, against those that are proved here."""
    proved = {name: tuple(leaves) for name, leaves in audits.items()}
    if not finding.query.burnt:
        return
    missing = [name for name, leaves in finding.audits.items() if proved.get(name) != leaves]
    if not missing:
        rest = set(finding.query.burnt).difference(*finding.audits.values())
        if finding.audits:
            checked.append(Reason.of("check.audits", audits=len(finding.audits)))
        if rest:
            checked.append(Reason.of("check.unexplained", leaves=len(rest)))
        return
    # t members signed that they know of those audits; a reader who does not believe it takes the higher threshold
    omitted = Omitted.of(finding.query, manifest.terms, {name: proved[name] for name in proved.keys() - set(missing)})
    threshold = raised_threshold(omitted.charged(finding.agreed), finding.equations)
    if finding.verdict == "PASSED" and Decimal(finding.z) < Decimal(threshold):
        raise EvidenceError(
            f"the query leaves out leaves that the audit {missing[0][:16]} is said to have opened; without a proof of "
            f"that the threshold is {threshold}, and z = {finding.z} is below it: give the audit's proof (--audit)"
        )
    left.append(Reason.of("check.no-proof", audits=len(missing), threshold=threshold))


def _missing(reference: Reference, suspect: Suspect, query: Query) -> Reason | None:
    """What is not here of what the query's way of matching takes; None if all is."""
    how = how_aligned(reference.manifest.terms, query.alignment)
    if how["align"] and reference.groups is None:
        return Reason.of("check.no-groups")
    if how["lora"] and reference.lora is None:
        return Reason.of("check.no-factors")
    if how["lora"] and reference.lora is not None and reference.base_source is None:
        whole = how["align"] or is_whole(suspect, reference.layout, reference.lora)
        return Reason.of("check.no-base") if whole else None
    return None
