"""`quorumark verify audit …`: for a stranger who trusts no member."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quorumark.cli.bundles import AgreedFiles, Here, Keys, bundled
from quorumark.cli.options import (
    EXIT_CODES,
    AuditFiles,
    Json,
    Roots,
    file_name,
    read_audits,
    read_certificate,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quorumark.consortium.records import Manifest
    from quorumark.reasons import Reason
    from quorumark.verify.audit import AuditResult
    from quorumark.verify.certificate import Certificate
    from quorumark.verify.challenge import Challenge
    from quorumark.verify.omissions import Audits

app = typer.Typer(
    help="The spot audit: a proof that trusts no member. challenge, open (each member), check.", no_args_is_help=True
)

CertificateFile = Annotated[Path, typer.Option("--certificate", help="The certificate that is audited.")]


@app.command("challenge")
def challenge(
    certificate: Annotated[Path, typer.Argument(help="The certificate that is audited.")],
    manifest: Annotated[Path, typer.Option(help="The consortium's manifest; earlier ones in history/ beside it.")],
    out: Annotated[Path, typer.Option(help="Where to write the challenge.")] = Path("challenge.json"),
    seed: Annotated[
        str | None, typer.Option(help="32 bytes in hex, of a public coin; by default fresh random ones.")
    ] = None,
    source: Annotated[str, typer.Option(help="Who drew the seed, or which public coin it is from.")] = "challenger",
    json: Json = False,
) -> None:
    """Pick the pieces of the shares that members are to open: for anyone who doubts them, after the certificate."""
    from quorumark.errors import InputError
    from quorumark.files import write_shared
    from quorumark.verify.challenge import challenge as draw
    from quorumark.verify.opening import LIFE
    from quorumark.verify.reference import read_chain

    finding = read_certificate(certificate).finding
    try:
        raw = None if seed is None else bytes.fromhex(seed)
    except ValueError:
        raise InputError("--seed", "must be 32 bytes in hex", repr(seed)) from None
    current = read_chain(manifest)[-1]
    made = draw(finding.query, current, finding.z, raw, source)
    write_shared(out, made.to_bytes())
    total = -(-current.terms.coordinates // current.terms.leaf)
    if json:
        body = {"challenge": str(out), "digest": made.digest(), "leaves": list(made.leaves), "of": total}
        typer.echo(jsonlib.dumps(body))
        return
    typer.echo(
        f"{len(made.leaves)} of {total} leaves ({100 * len(made.leaves) / total:.2f} %) are to be opened, and burnt"
        f"\nwritten to {out}; each member answers with: quorumark verify audit open {out.name} --certificate …"
    )
    if LIFE * len(made.leaves) > total:
        typer.echo(
            f"members will refuse: they open at most one leaf in {LIFE} in their lives, and z is too small for that"
        )


@app.command("open")
@bundled
def open_(
    challenge: Annotated[Path, typer.Argument(help="The challenge.")],
    certificate: CertificateFile,
    out: Annotated[Path | None, typer.Option(help="Where to write it; by default opening-NAME.json.")] = None,
    *,
    here: Here,
    keys: Keys,
    json: Json = False,
) -> None:
    """Open the pieces of this member's share that a challenge asks for. They are public then, and burnt for ever.

    Only for a signed certificate of a query that this member answered, and only so many in a consortium's life. Members
    who do not open record what others opened (audit record): it is public, and must not be answered about again.
    """
    from quorumark.consortium.home import read_as
    from quorumark.files import write_shared
    from quorumark.verify.challenge import Challenge
    from quorumark.verify.check import check_corroborated
    from quorumark.verify.ledger import Ledger
    from quorumark.verify.opening import open_leaves

    member, ours = here.member, here.folder_for(read_certificate(certificate).finding.query.manifest)
    asked = read_as(challenge, "a challenge", Challenge.from_bytes)
    ledger = Ledger.open(ours, ours.manifest())
    finding = _certified(certificate, ours.chain(), asked, ledger.audits())[0].finding
    query = finding.query
    check_corroborated(finding)
    opened = keys.unlock(here.home)
    with ledger.exclusive():
        answered = query.x in ledger.answered()
        data = open_leaves(member, ours, opened, asked, query, answered=answered, burns=ledger)
    name = member.card().name
    target = out or Path(f"opening-{file_name(name)}.json")
    write_shared(target, data)
    if json:
        typer.echo(jsonlib.dumps({"opening": str(target), "leaves": len(asked.leaves)}))
    else:
        typer.echo(f"opened {len(asked.leaves)} leaves as {name}: {target}, {len(data):,} bytes; they are burnt now")


@app.command("record")
@bundled
def record(
    audits: Annotated[list[Path], typer.Argument(help="Proofs of audits, as `audit check --keep` writes them.")],
    *,
    here: Here,
    json: Json = False,
) -> None:
    """Remember what others opened in audits, once it is proved. For members who did not open; needs no secrets.

    What t members opened is public, and this member answers no query about it any more. A proof holds the certificate,
    the challenge and t signed openings that lead to the genesis roots; a challenge alone proves nothing.
    """
    from quorumark.verify.ledger import Ledger
    from quorumark.verify.proof import explain

    ours = here.folder
    ledger = Ledger.open(ours, ours.manifest())
    with ledger.exclusive():
        before = set(ledger.burnt())
        for name, leaves in explain(ours.chain(), read_audits(audits), ledger.audits()).items():
            ledger.record_burnt(leaves, name)
        new = len(set(ledger.burnt()) - before)
    if json:
        typer.echo(jsonlib.dumps({"new": new, "burnt": list(ledger.burnt())}))
    else:
        typer.echo(f"{new} more leaves are recorded as burnt, {len(ledger.burnt())} in all; nothing was opened")


@app.command("check", short_help="Check an audit, with nobody's word for it.")
@bundled
def check(
    challenge: Annotated[Path, typer.Argument(help="The challenge.")],
    openings: Annotated[list[Path], typer.Argument(help="The members' openings.")],
    certificate: CertificateFile,
    suspect: Annotated[Path, typer.Option(help="The model that was tested.")],
    manifest: Annotated[Path, typer.Option(help="The consortium's manifest; earlier ones in history/ beside it.")],
    *,
    files: AgreedFiles,
    archive: Annotated[
        list[Path] | None, typer.Option(help="After a resharing: the members' archive.bin; may be repeated.")
    ] = None,
    earlier: Annotated[
        list[Path] | None,
        typer.Option(help="Challenges of earlier audits, which burnt leaves; their seeds are charged for; repeatable."),
    ] = None,
    vouched: Annotated[
        list[Path] | None,
        typer.Option(help="Such challenges whose seeds you drew, or confirmed with their authors; may be repeated."),
    ] = None,
    audits: AuditFiles = None,
    keep: Annotated[
        Path | None, typer.Option(help="Also write the proof that these leaves were opened: later queries need it.")
    ] = None,
    roots: Roots = None,
    appeared: Annotated[
        str | None, typer.Option(help="When the suspect first appeared, as far as you know: a day like 2026-01-31.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Also write the report as one HTML file.")] = None,
    json: Json = False,
) -> None:
    """Check an audit: with no member's word for anything.

    Time stamps beside the manifest (quorumark stamp), with the roots that you trust for them, show how old the key is;
    with --appeared the check says whether that is before the suspect. Without stamps it says what must be believed.

    Exits with 0 if it is a proof, 1 if the mark is not there, 2 if nothing follows.
    """
    from quorumark.consortium.home import read_as, read_file
    from quorumark.files import write_shared
    from quorumark.report import certificate_page, write_page
    from quorumark.report.texts import sentences
    from quorumark.stamps.tokens import read_roots
    from quorumark.verify.audit import check_audit
    from quorumark.verify.challenge import Challenge
    from quorumark.verify.dates import about_age, read_appeared
    from quorumark.verify.proof import LARGEST, Audit, explain
    from quorumark.verify.query import prepare_again

    asked = read_as(challenge, "a challenge", Challenge.from_bytes)
    reference = files.reference(manifest)
    proved = explain(reference.chain, read_audits(audits))
    found, checked, left = _certified(certificate, reference.chain, asked, proved)
    query = found.finding.query
    opened = [read_file(path, "an opening", LARGEST) for path in openings]
    if keep is not None:  # whatever the audit shows, these leaves are public now
        proof = Audit.of(found, asked, opened, reference.chain, archive or ())
        write_shared(keep, proof.to_bytes())
    first = None if appeared is None else read_appeared(appeared)
    dates, age = about_age(reference.chain, manifest, read_roots(roots or ()), first)
    prepared = prepare_again(reference, suspect, query)
    result = check_audit(
        asked,
        prepared.query,
        prepared.form.x,
        reference.chain,
        opened,
        archives=archive or (),
        earlier=[read_as(path, "a challenge", Challenge.from_bytes) for path in earlier or ()],
        vouched=[read_as(path, "a challenge", Challenge.from_bytes) for path in vouched or ()],
        age=age,
    )
    if report is not None:
        signers = found.signers(reference.manifest)
        page = certificate_page(
            found, reference.manifest, signers=signers, checked=checked, left=left, dates=dates, audit=_rows(result)
        )
        write_page(report, page)
    if json:
        texts = sentences((*result.reasons, *result.faults))
        body = {**result.as_dict(), "texts": texts, "dates": [one.as_dict() for one in dates]}
        typer.echo(jsonlib.dumps(body))
    else:
        shown = (
            f"z = {result.z} on the opened part, {result.predicted} ± {result.tolerance} expected" if result.z else ""
        )
        typer.echo(f"{result.verdict}: {shown}")
        for text in sentences((*result.reasons, *result.faults)):
            typer.echo(f"- {text}")
        if report is not None:
            typer.echo(f"the report is in {report}")
        if keep is not None:
            typer.echo(
                f"the proof that these leaves were opened is in {keep}: all other members record it (verify audit "
                "record), and anybody who prepares a later query names it (--audit)"
            )
    raise typer.Exit(EXIT_CODES[result.verdict])


def _rows(result: AuditResult) -> dict[str, str]:
    """What an audit showed, for the report."""
    from quorumark.report.texts import sentences

    rows = {"Verdict": result.verdict}
    if result.z:
        rows["z on the opened part"] = f"{result.z}; {result.predicted} ± {result.tolerance} expected"
        rows["Bound on p"] = f"10^{result.log10_bound}, after the charges for choices"
    rows["Opened"] = f"{result.leaves} leaves, {result.coordinates} coordinates, by {len(result.members)} members"
    return rows | {f"Note {n}": text for n, text in enumerate(sentences((*result.reasons, *result.faults)), 1)}


def _certified(
    path: Path, chain: Sequence[Manifest], asked: Challenge, audits: Audits
) -> tuple[Certificate, list[Reason], list[Reason]]:
    """The certificate that is challenged, with what was checked of it, and what was not."""
    from quorumark.verify.check import check_challenged

    certificate = read_certificate(path)
    return certificate, *check_challenged(certificate, chain, asked, audits)
