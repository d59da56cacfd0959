"""`quorumark verify …`: is this model ours?

Exit codes: 0 PASSED, 1 FAILED, 2 INCONCLUSIVE, bad evidence or wrong usage.
"""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quorumark.cli import audit
from quorumark.cli.options import (
    DEFAULT_HOME,
    EXIT_CODES,
    Anchor,
    AuditFiles,
    Base,
    Factors,
    Groups,
    HomeOption,
    Json,
    KeyFile,
    Layout,
    PassphraseFile,
    Which,
    answered,
    file_name,
    read_audits,
    read_certificate,
    unlock,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from quorumark.consortium.home import ConsortiumFolder
    from quorumark.consortium.records import Terms
    from quorumark.reasons import Reason
    from quorumark.verify.certificate import Certificate
    from quorumark.verify.evidence import Finding, Query
    from quorumark.verify.proof import Audit
    from quorumark.verify.reference import Reference

app = typer.Typer(
    help="Is this model ours? prepare a query, answer it (t members), combine, sign; anybody can check.",
    no_args_is_help=True,
)

app.add_typer(audit.app, name="audit")


Suspect = Annotated[Path, typer.Option(help="The model in question: a file, or a folder of shards.")]
Manifest = Annotated[
    Path | None, typer.Option(help="The consortium's manifest; by default the one in this member's home.")
]


@app.command("prepare")
def prepare(
    suspect: Annotated[Path, typer.Argument(help="The model in question: a file, or a folder of shards.")],
    out: Annotated[Path, typer.Option(help="Where to write the query.")] = Path("query.json"),
    align: Annotated[
        bool, typer.Option("--align", help="First put the suspect's channels where the anchor has them.")
    ] = False,
    lora: Annotated[
        bool, typer.Option("--lora", help="The suspect is an adapter, or a whole model that one was added to.")
    ] = False,
    audits: AuditFiles = None,
    manifest: Manifest = None,
    layout: Layout = None,
    anchor: Anchor = None,
    groups: Groups = None,
    factors: Factors = None,
    base: Base = None,
    home: HomeOption = DEFAULT_HOME,
    consortium: Which = None,
    json: Json = False,
) -> None:
    """Write a query about a suspect, for members to answer. Needs no secrets: anybody can do it.

    With --align channels that were permuted, rescaled, removed or added are matched to the anchor's first. That is
    another query than the one without: each counts in the budget, and raises the threshold if it does not pass. So is
    one with --lora, where the mark is in an adapter: its factors are put where the anchor's are, whatever was done to
    them, and a whole model has its public base taken away first (--base).

    Leaves of the key that audits opened are left out: those that this member's ledger knows of, and those that --audit
    proves. Members answer only if that is exactly what they know too.

    Exits with 2, INCONCLUSIVE, if the suspect does not fit the consortium's model.
    """
    from quorumark.errors import InconclusiveError
    from quorumark.files import write_shared
    from quorumark.report.texts import sentences
    from quorumark.verify.query import prepare as prepare_query

    place = _place(home, consortium, manifest)
    with _progress(json) as note:
        reference = _reference(place, manifest, layout, anchor, groups, factors, base, note)
    opened = _opened(place, reference.chain, audits)
    burnt = {leaf for leaves in opened.values() for leaf in leaves}
    try:
        with _progress(json) as note:
            query = prepare_query(reference, suspect, align=align, lora=lora, burnt=burnt, progress=note).query
            query, again = _as_asked_before(query, out)
    except InconclusiveError as error:
        if not json:
            raise
        reasons = [*([error.reason] if error.reason is not None else []), *error.problems]
        body = {"reasons": [one.as_dict() for one in reasons], "texts": sentences(reasons) or [str(error)]}
        typer.echo(jsonlib.dumps({"verdict": "INCONCLUSIVE", **body}))
        raise typer.Exit(2) from None
    if not again:
        write_shared(out, query.to_bytes())
    if json:
        typer.echo(jsonlib.dumps({"query": str(out), "digest": query.digest(), **query.as_dict()}))
        return
    typer.echo(_describe(query, reference.manifest.terms, opened))
    done = "it was in" if again else "written to"
    typer.echo(f"{done} {out}; each member answers with: quorumark verify partial {out.name} --suspect …")


@app.command("partial", short_help="Answer a query with this member's share: one signed number.")
def partial(
    query: Annotated[Path, typer.Argument(help="The query that `prepare` wrote.")],
    suspect: Suspect,
    out: Annotated[Path | None, typer.Option(help="Where to write it; by default partial-NAME.json.")] = None,
    approve: Annotated[bool, typer.Option("--approve", help="Answer: you know who asks, and why.")] = False,
    masked: Annotated[
        str | None,
        typer.Option(help="The paper's variant: points like 1,3,4 whose answers are only ever seen as a sum."),
    ] = None,
    audits: AuditFiles = None,
    manifest: Manifest = None,
    layout: Layout = None,
    anchor: Anchor = None,
    groups: Groups = None,
    factors: Factors = None,
    base: Base = None,
    home: HomeOption = DEFAULT_HOME,
    consortium: Which = None,
    key_file: KeyFile = None,
    passphrase_file: PassphraseFile = None,
    json: Json = False,
) -> None:
    """Answer a query with this member's share: one number, signed, in a small file that can be e-mailed.

    Every answer says a little about the key, so it is written to this member's ledger, and refused where it would say
    too much. Without --approve and without a HOME/rules.json that allows it, you are asked.
    """
    from quorumark.consortium.home import HomeFolder, read_as
    from quorumark.files import write_shared
    from quorumark.verify.answer import answer
    from quorumark.verify.evidence import Query

    member = HomeFolder(home)
    place = member.only_consortium(consortium)
    with _progress(json) as note:
        reference = _reference(place, manifest, layout, anchor, groups, factors, base, note)
    asked = read_as(query, "a query", Query.from_bytes)
    given = read_audits(audits)
    if not json:
        typer.echo(_describe(asked, reference.manifest.terms, _opened(place, place.chain(), given)))
    approve = approve or _ask(member, json)
    opened = unlock(key_file, passphrase_file)
    with _progress(json) as note:
        made = answer(
            member,
            opened,
            reference,
            suspect,
            asked,
            approved=approve,
            members=_points(masked),
            audits=given,
            place=place,
            progress=note,
        )
    name = reference.manifest.terms.member(made.point).name
    target = out or Path(f"partial-{file_name(name)}.json")
    write_shared(target, made.to_bytes())
    if json:
        typer.echo(jsonlib.dumps({"partial": str(target), "point": made.point, "query": made.query}))
    else:
        typer.echo(f"answered as {name}: {target}, {target.stat().st_size:,} bytes; send it to the asker")


@app.command("combine")
def combine(
    query: Annotated[Path, typer.Argument(help="The query.")],
    partials: Annotated[list[Path], typer.Argument(help="The partials, t or more, in any order.")],
    out: Annotated[Path, typer.Option(help="Where to write the certificate.")] = Path("certificate.json"),
    alpha: Annotated[
        str, typer.Option(help="A false-alarm probability such as 1e-9: a higher threshold than the policy's.")
    ] = "",
    audits: AuditFiles = None,
    manifest: Manifest = None,
    home: HomeOption = DEFAULT_HOME,
    consortium: Which = None,
    json: Json = False,
) -> None:
    """Put partials together: z, the verdict, and a certificate for the members to sign. Needs no secrets.

    With more than t partials wrong ones are noticed; of every two more, one can be corrected and named.

    Exits with the code of the verdict. A certificate that somebody has signed is not written over.
    """
    from quorumark.consortium.home import read_as, read_file
    from quorumark.errors import EvidenceError, InputError, QuorumarkError
    from quorumark.files import write_shared
    from quorumark.verify.certificate import Certificate
    from quorumark.verify.combine import combine as combine_partials
    from quorumark.verify.evidence import Partial, Query

    if _is_signed(out):
        raise InputError("--out", "must not be a certificate that somebody has signed: name another file", str(out))
    place = _place(home, consortium, manifest)
    chain = _chain(place, manifest)
    asked = read_as(query, "a query", Query.from_bytes)
    answers = []
    for path in partials:
        try:
            answers.append(Partial.from_bytes(read_file(path, "a partial")))
        except QuorumarkError as error:
            raise EvidenceError(f"{str(path)!r} is refused: {error}") from None
    finding = combine_partials(chain[-1], asked, answers, alpha=alpha, audits=_opened(place, chain, audits))
    write_shared(out, Certificate.of(finding).to_bytes())
    if json:
        typer.echo(jsonlib.dumps({"certificate": str(out), **_figures(finding)}))
    else:
        _print_finding(finding, chain[-1].terms)
        names = [finding.names[str(p.point)] for p in finding.partials if p.point not in finding.wrong]
        typer.echo(f"written to {out}; now {', '.join(names)} sign it, each with: quorumark verify sign {out.name}")
    raise typer.Exit(EXIT_CODES[finding.verdict])


@app.command("sign", short_help="Add this member's signature to a certificate.")
def sign(
    certificate: Annotated[Path, typer.Argument(help="The combined certificate; the signature is added to it.")],
    home: HomeOption = DEFAULT_HOME,
    consortium: Which = None,
    key_file: KeyFile = None,
    passphrase_file: PassphraseFile = None,
    json: Json = False,
) -> None:
    """Add this member's signature to a certificate, once everything in it was found to follow from the partials."""
    from quorumark.consortium.home import HomeFolder
    from quorumark.files import write_shared
    from quorumark.verify.check import sign as sign_certificate

    member = HomeFolder(home)
    place = member.only_consortium(consortium)
    signed = sign_certificate(member, unlock(key_file, passphrase_file), read_certificate(certificate), place=place)
    write_shared(certificate, signed.to_bytes())
    names = [person.name for person in signed.signers(place.manifest())]
    if json:
        typer.echo(jsonlib.dumps({"certificate": str(certificate), "signed_by": names}))
    else:
        typer.echo(f"signed: {certificate} now has the signatures of {', '.join(names)}")


@app.command("check")
def check(
    certificate: Annotated[Path, typer.Argument(help="The certificate.")],
    manifest: Annotated[Path, typer.Option(help="The consortium's manifest; earlier ones in history/ beside it.")],
    suspect: Annotated[Path | None, typer.Option(help="The model that was tested.")] = None,
    layout: Layout = None,
    anchor: Anchor = None,
    groups: Groups = None,
    factors: Factors = None,
    base: Base = None,
    audits: AuditFiles = None,
    report: Annotated[Path | None, typer.Option(help="Also write the report as one HTML file.")] = None,
    json: Json = False,
) -> None:
    """Verify a certificate from its files alone, years later, on any machine; no shares, no secrets.

    Exits with the code of the verdict that it confirms.
    """
    from quorumark.report.texts import sentences
    from quorumark.verify.check import check_certificate
    from quorumark.verify.reference import Reference, read_chain

    found = read_certificate(certificate)
    chain = read_chain(manifest)
    reference = None
    with _progress(json) as note:
        if suspect is not None and _has_reference(manifest, layout, anchor):
            reference = Reference.read(manifest, layout, anchor, groups, factors, base, progress=note)
        checked, left = check_certificate(
            found,
            chain,
            suspect=suspect,
            reference=reference,
            audits=_opened(None, chain, audits),
            progress=note,
        )
    if report is not None:
        names = [certificate.name, "--manifest", manifest.name, "--suspect", suspect.name if suspect else "SUSPECT"]
        _write_report(report, found, chain[-1], checked, left, f"quorumark verify check {' '.join(names)}")
    finding = found.finding
    if json:
        body = {"checked": [one.as_dict() for one in checked], "not_checked": [one.as_dict() for one in left]}
        typer.echo(jsonlib.dumps({**body, **_figures(finding)}))
    else:
        _print_finding(finding, chain[-1].terms)
        for text in sentences(checked):
            typer.echo(f"checked: {text}")
        for text in sentences(left):
            typer.echo(f"NOT checked: {text}")
        if report is not None:
            typer.echo(f"the report is in {report}")
    raise typer.Exit(EXIT_CODES[finding.verdict])


@app.command("ledger")
def ledger(home: HomeOption = DEFAULT_HOME, consortium: Which = None, json: Json = False) -> None:
    """Show what this member answered and knows of, and how much of the consortium's budget is left."""
    from quorumark.consortium.home import HomeFolder
    from quorumark.reasons import Reason
    from quorumark.report.texts import sentence
    from quorumark.verify.guard import budget
    from quorumark.verify.ledger import Ledger

    place = HomeFolder(home).only_consortium(consortium)
    manifest = place.manifest()
    book = Ledger.open(place, manifest)
    known, most = book.known(), budget(manifest.terms.coordinates, manifest.terms.policy)
    if json:
        entries = [dict(entry) for entry in book.entries]
        body = {"head": book.head, "known": known, "budget": most, "burnt": list(book.burnt())}
        typer.echo(jsonlib.dumps({**body, "entries": entries}))
        return
    for entry in book.entries:
        shown = {k: v for k, v in entry.items() if k not in ("previous", "number", "time", "kind")}
        if "reason" in shown:
            shown["reason"] = sentence(Reason.from_dict(shown["reason"]))
        text = ", ".join(f"{k} {v if k == 'reason' else str(v)[:40]}" for k, v in shown.items())
        typer.echo(f"{entry['number']:>4}  {entry['time']}  {entry['kind']:<9} {text}")
    typer.echo(
        f"different queries that are known here: {len(known)}, of {most} in the consortium's life; "
        f"burnt leaves: {len(book.burnt())}\nhead {book.head}"
    )


# --- what the commands share ------------------------------------------------------------------------------


def _as_asked_before(query: Query, out: Path) -> tuple[Query, bool]:
    """The same question in the file that it would be written to, if there is one; whether there is.

    A query has its time in its digest: written anew, it would leave the answers that are on their way without one.
    """
    from dataclasses import replace

    from quorumark.consortium.home import read_as
    from quorumark.errors import QuorumarkError
    from quorumark.verify.evidence import Query

    try:
        before = read_as(out, "a query", Query.from_bytes)
    except QuorumarkError:
        return query, False
    same = replace(query, created=before.created) == before
    return (before, True) if same else (query, False)


def _is_signed(path: Path) -> bool:
    """Whether a file is a certificate with signatures."""
    from quorumark.errors import QuorumarkError

    try:
        return bool(read_certificate(path).signatures)
    except QuorumarkError:
        return False


def _place(home: Path, consortium: str | None, manifest: Path | None) -> ConsortiumFolder | None:
    """This member's folder, unless a manifest is named and there is no home: anybody may prepare and combine."""
    from quorumark.consortium.home import HomeFolder

    if manifest is not None and not (home / "identity.sealed").exists():
        return None
    return HomeFolder(home).only_consortium(consortium)


def _chain(place: ConsortiumFolder | None, manifest: Path | None) -> list[Any]:
    from quorumark.errors import InputError
    from quorumark.verify.reference import read_chain

    if manifest is not None:
        return list(read_chain(manifest))
    if place is None:
        raise InputError("--manifest", "must be given where there is no member's home", "none")
    return place.chain()


def _reference(
    place: ConsortiumFolder | None,
    manifest: Path | None,
    layout: Path | None,
    anchor: Path | None,
    groups: Path | None,
    factors: Path | None,
    base: Path | None,
    progress: Any = None,
) -> Reference:
    from quorumark.errors import InputError
    from quorumark.verify.reference import Reference

    if manifest is None:
        if place is None:
            raise InputError("--manifest", "must be given where there is no member's home", "none")
        manifest = place.manifest_path
    elif not manifest.is_file():  # before the files that are looked for beside it
        raise InputError("--manifest", "must name the consortium's manifest", f"{str(manifest)!r}, which is no file")
    return Reference.read(manifest, layout, anchor, groups, factors, base, progress=progress)


def _has_reference(manifest: Path, layout: Path | None, anchor: Path | None) -> bool:
    from quorumark.verify.reference import ANCHOR, LAYOUT

    named = layout is not None or anchor is not None
    return named or ((manifest.parent / LAYOUT).exists() and (manifest.parent / ANCHOR).exists())


def _write_report(
    path: Path, certificate: Certificate, manifest: Any, checked: list[Reason], left: list[Reason], command: str
) -> None:
    from quorumark.report import certificate_page, write_page

    signers = certificate.signers(manifest)
    page = certificate_page(certificate, manifest, signers=signers, checked=checked, left=left, command=command)
    write_page(path, page)


def _points(text: str | None) -> tuple[int, ...]:
    from quorumark.errors import InputError

    if text is None:
        return ()
    try:
        return tuple(int(x) for x in text.split(","))
    except ValueError:
        raise InputError("--masked", "must be points like 1,3,4", repr(text)) from None


def _ask(member: Any, json: bool) -> bool:
    """Asks the person at the terminal, if there is one; HOME/rules.json may answer instead."""
    import sys

    from quorumark.verify.rules import read_rules

    if json or not sys.stdin.isatty() or read_rules(member.rules_path).approve == "always":
        return False
    question = "answer this query? it is written to the ledger, and counts against the budget"
    return answered(lambda: typer.confirm(question))


def _progress(quiet: bool) -> Any:
    """A context that shows what is being worked on, on a terminal."""
    from contextlib import nullcontext

    from rich.text import Text

    from quorumark.cli.console import make_console

    console = make_console(stderr=True)
    if quiet or not console.is_terminal:
        return nullcontext(None)

    class Status:
        def __enter__(self) -> Any:
            self.status = console.status("reading the anchor")
            self.status.__enter__()
            return lambda text: self.status.update(Text(text))  # names are the suspect's own: no markup

        def __exit__(self, *error: Any) -> None:
            self.status.__exit__(*error)

    return Status()


def _opened(
    place: ConsortiumFolder | None, chain: Sequence[Any], audits: Sequence[Path | Audit] | None
) -> dict[str, tuple[int, ...]]:
    """The leaves that audits opened, by audit: what this member's ledger knows, and what is proved here."""
    from quorumark.verify.ledger import Ledger
    from quorumark.verify.proof import Audit, explain

    known = Ledger.open(place, chain[-1]).audits() if place is not None else {}
    proofs = [one for one in audits or () if isinstance(one, Audit)]
    proofs += read_audits([one for one in audits or () if isinstance(one, Path)])
    return known | explain(chain, proofs, known)


def _describe(query: Query, terms: Terms, opened: Mapping[str, tuple[int, ...]]) -> str:
    from quorumark.report.texts import about_left_out, sentences

    files = ", ".join(file.name for file in query.files[:3]) or "a model in memory"
    more = f" and {len(query.files) - 3} more files" if len(query.files) > 3 else ""
    lines = [
        f"suspect: {files}{more}, {100 * query.covered / query.carriers:.1f} % of the carrying weights found",
        f"statistic {query.statistic}, alignment {query.alignment}, {query.effective:,} effective coordinates",
        *sentences(query.matching),
        *about_left_out(query, terms, opened),
        f"query {query.digest()}",
    ]
    return "\n".join(lines)


def _figures(finding: Finding) -> dict[str, Any]:
    from quorumark.report.texts import sentences

    names = ["verdict", "z", "threshold", "log10_p", "log10_bound", "cosine", "corroboration", "failed"]
    names += ["agreed", "charged", "log10_choices", "audits"]
    members = [finding.names[str(partial.point)] for partial in finding.partials]
    wrong = [finding.names[str(point)] for point in finding.wrong]
    reasons = [reason.as_dict() for reason in finding.reasons]
    texts = {"reasons": reasons, "texts": sentences(finding.reasons)}
    return {name: getattr(finding, name) for name in names} | texts | {"members": members, "wrong": wrong}


def _print_finding(finding: Finding, terms: Terms) -> None:
    from quorumark.report.texts import about_charges, about_left_out, sentences

    typer.echo(
        f"{finding.verdict}: z = {finding.z}, threshold {finding.threshold}; an unrelated model gets as far with "
        f"probability 10^{finding.log10_p} (at most 10^{finding.log10_bound})"
    )
    about = about_left_out(finding.query, terms, finding.audits) + about_charges(finding)
    for text in sentences(finding.reasons) + about:
        typer.echo(f"- {text}")
