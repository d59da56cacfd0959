"""`quorumark verify …`: is this model ours?

Exit codes: 0 PASSED, 1 FAILED, 2 INCONCLUSIVE, bad evidence or wrong usage.
"""

from __future__ import annotations

import itertools
import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quorumark.cli import audit
from quorumark.cli.bundles import AgreedFiles, Here, Keys, bundled
from quorumark.cli.options import (
    EXIT_CODES,
    AuditFiles,
    Json,
    Roots,
    answered,
    file_name,
    read_audits,
    read_certificate,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from quorumark.consortium.home import ConsortiumFolder
    from quorumark.consortium.records import Terms
    from quorumark.verify.certificate import Certificate
    from quorumark.verify.evidence import Finding, Partial, Query
    from quorumark.verify.proof import Audit
    from quorumark.verify.query import AskLayers
    from quorumark.verify.reference import Reference

app = typer.Typer(
    help="Is this model ours? prepare a query, answer it (t members, better t+1), combine, sign; anybody can check.",
    no_args_is_help=True,
)

app.add_typer(audit.app, name="audit")


Suspect = Annotated[Path, typer.Option(help="The model in question: a file, or a folder of shards.")]
After = Annotated[
    Path | None, typer.Option(help="For a query by layers: the certificate of the plain query that did not pass.")
]
Manifest = Annotated[
    Path | None, typer.Option(help="The consortium's manifest; by default the one in this member's home.")
]


@app.command("prepare")
@bundled
def prepare(
    suspect: Annotated[Path, typer.Argument(help="The model in question: a file, or a folder of shards.")],
    out: Annotated[Path, typer.Option(help="Where to write the query.")] = Path("query.json"),
    align: Annotated[
        bool, typer.Option("--align", help="First put the suspect's channels where the anchor has them.")
    ] = False,
    lora: Annotated[
        bool, typer.Option("--lora", help="The suspect is an adapter, or a whole model that one was added to.")
    ] = False,
    layers: Annotated[
        bool, typer.Option("--layers", help="Ask layer by layer, after the plain query (--after) did not pass.")
    ] = False,
    after: After = None,
    examiner: Annotated[
        Path | None, typer.Option(help="With --layers: the card of whom alone sees numbers by layer.")
    ] = None,
    audits: AuditFiles = None,
    manifest: Manifest = None,
    *,
    files: AgreedFiles,
    here: Here,
    json: Json = False,
) -> None:
    """Write a query about a suspect, for members to answer. Needs no secrets: anybody can do it.

    With --align channels that were permuted, rescaled, removed or added are matched to the anchor's first. That is
    another query than the one without: each counts in the budget, and raises the threshold if it does not pass. So is
    one with --lora, where the mark is in an adapter: its factors are put where the anchor's are, whatever was done to
    them, and a whole model has its public base taken away first (--base).

    With --layers members answer block by block, sealed to one examiner (a judge, an auditor), and what comes out is Q:
    it still sees a mark whose z was trained to 0. It costs an equation for each block, so it takes the certificate of
    the plain query that did not pass, asked in the same way (--align, --lora).

    Leaves of the key that audits opened are left out: those that this member's ledger knows of, and those that --audit
    proves. Members answer only if that is exactly what they know too.

    Exits with 2, INCONCLUSIVE, if the suspect does not fit the consortium's model.
    """
    from quorumark.errors import InconclusiveError
    from quorumark.files import write_shared
    from quorumark.report.texts import about_quorum, sentences
    from quorumark.verify.query import prepare as prepare_query

    ours = here.folder_unless(manifest)
    with _progress(json) as note:
        reference = files.reference(_manifest_path(ours, manifest), note)
    opened = _opened(ours, reference.chain, audits)
    burnt = {leaf for leaves in opened.values() for leaf in leaves}
    try:
        with _progress(json) as note:
            asked = _asked_layers(layers, after, examiner)
            query = prepare_query(
                reference, suspect, align=align, lora=lora, burnt=burnt, layers=asked, progress=note
            ).query
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
    more = "" if after is None else f" --after {after.name}"
    typer.echo(f"{done} {out}; each member answers with: quorumark verify partial {out.name} --suspect …{more}")
    typer.echo(about_quorum(reference.manifest.terms))


@app.command("partial", short_help="Answer a query with this member's share: one signed number.")
@bundled
def partial(
    query: Annotated[Path, typer.Argument(help="The query that `prepare` wrote.")],
    suspect: Suspect,
    out: Annotated[Path | None, typer.Option(help="Where to write it; by default partial-NAME.json.")] = None,
    approve: Annotated[bool, typer.Option("--approve", help="Answer: you know who asks, and why.")] = False,
    masked: Annotated[
        str | None,
        typer.Option(help="The paper's variant: points like 1,3,4 whose answers are only ever seen as a sum."),
    ] = None,
    after: After = None,
    audits: AuditFiles = None,
    manifest: Manifest = None,
    *,
    files: AgreedFiles,
    here: Here,
    keys: Keys,
    json: Json = False,
) -> None:
    """Answer a query with this member's share: one number, signed, in a small file that can be e-mailed.

    Every answer says a little about the key, so it is written to this member's ledger, and refused where it would say
    too much. Without --approve and without a HOME/rules.json that allows it, you are asked.
    """
    from quorumark.consortium.home import read_as
    from quorumark.files import write_shared
    from quorumark.verify.answer import answer
    from quorumark.verify.evidence import Query

    asked = read_as(query, "a query", Query.from_bytes)
    member, ours = here.member, here.folder_for(asked.manifest)
    with _progress(json) as note:
        reference = files.reference(_manifest_path(ours, manifest), note)
    given = read_audits(audits)
    if not json:
        typer.echo(_describe(asked, reference.manifest.terms, _opened(ours, ours.chain(), given)))
        typer.echo(_cost(asked, ours, reference))
    approve = approve or _ask(member, json)
    opened = keys.unlock(here.home)
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
            after=None if after is None else read_certificate(after),
            consortium=ours,
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
@bundled
def combine(
    query: Annotated[Path, typer.Argument(help="The query.")],
    partials: Annotated[list[Path], typer.Argument(help="The partials, t+1 or more, in any order.")],
    out: Annotated[Path, typer.Option(help="Where to write the certificate.")] = Path("certificate.json"),
    alpha: Annotated[
        str, typer.Option(help="A false-alarm probability such as 1e-9: a higher threshold than the policy's.")
    ] = "",
    opened: Annotated[
        Path | None, typer.Option(help="For a query by layers: the examiner's word, from `verify open`.")
    ] = None,
    audits: AuditFiles = None,
    manifest: Manifest = None,
    *,
    here: Here,
    json: Json = False,
) -> None:
    """Put partials together: z, the verdict, and a certificate for the members to sign. Needs no secrets.

    With t partials one liar could have set the number, so ask for t+1: then a wrong one is noticed, and of every two
    more, one can be corrected and named.

    Partials that come later can be added: where --out is a signed certificate of the same query, its partials count as
    well, and it is kept under another name. Its signatures are for what it says; the new one needs new ones.

    Exits with the code of the verdict.
    """
    from quorumark.consortium.home import read_as
    from quorumark.files import write_shared
    from quorumark.verify.certificate import Certificate
    from quorumark.verify.combine import combine as combine_partials
    from quorumark.verify.evidence import Query
    from quorumark.verify.layered import Opened

    asked = read_as(query, "a query", Query.from_bytes)
    ours = here.folder_unless(manifest) if manifest is not None else here.folder_for(asked.manifest)
    chain = _chain(ours, manifest)
    word = None if opened is None else read_as(opened, "an examiner's word", Opened.from_bytes)
    left_out = _opened(ours, chain, audits)
    before = _signed(out)
    given = _partials(partials)
    if before is not None:
        given = _added(before, asked, given, out)
    finding = combine_partials(chain[-1], asked, given, alpha=alpha, audits=left_out, opened=word)
    kept = None
    if before is not None:
        kept = _free_name(out)
        write_shared(kept, before.to_bytes())
    write_shared(out, Certificate.of(finding).to_bytes())
    if json:
        earlier = {} if kept is None else {"kept": str(kept)}
        typer.echo(jsonlib.dumps({"certificate": str(out), **earlier, **_figures(finding)}))
    else:
        _print_finding(finding, chain[-1].terms)
        if before is not None:
            signers = ", ".join(person.name for person in before.signers(chain[-1]))
            typer.echo(f"the certificate that {signers} signed is in {kept} now, and holds as it is")
        names = [finding.names[str(p.point)] for p in finding.partials if p.point not in finding.wrong]
        typer.echo(f"written to {out}; now {', '.join(names)} sign it, each with: quorumark verify sign {out.name}")
    raise typer.Exit(EXIT_CODES[finding.verdict])


@app.command("sign", short_help="Add this member's signature to a certificate.")
@bundled
def sign(
    certificate: Annotated[Path, typer.Argument(help="The combined certificate; the signature is added to it.")],
    *,
    here: Here,
    keys: Keys,
    json: Json = False,
) -> None:
    """Add this member's signature to a certificate, once everything in it was found to follow from the partials."""
    from quorumark.files import write_shared
    from quorumark.verify.check import sign as sign_certificate

    given = read_certificate(certificate)
    member, ours = here.member, here.folder_for(given.finding.query.manifest)
    signed = sign_certificate(member, keys.unlock(here.home), given, consortium=ours)
    write_shared(certificate, signed.to_bytes())
    names = [person.name for person in signed.signers(ours.manifest())]
    if json:
        typer.echo(jsonlib.dumps({"certificate": str(certificate), "signed_by": names}))
    else:
        typer.echo(f"signed: {certificate} now has the signatures of {', '.join(names)}")


@app.command("check")
@bundled
def check(
    certificate: Annotated[Path, typer.Argument(help="The certificate.")],
    manifest: Annotated[Path, typer.Option(help="The consortium's manifest; earlier ones in history/, or beside it.")],
    suspect: Annotated[Path | None, typer.Option(help="The model that was tested.")] = None,
    *,
    files: AgreedFiles,
    audits: AuditFiles = None,
    roots: Roots = None,
    report: Annotated[Path | None, typer.Option(help="Also write the report as one HTML file.")] = None,
    json: Json = False,
) -> None:
    """Verify a certificate from its files alone, years later, on any machine; no shares, no secrets, no network.

    Time stamps beside the certificate and the manifest (quorumark stamp) are checked against the roots that you name.

    Exits with the code of the verdict that it confirms.
    """
    from quorumark.report import certificate_page, write_page
    from quorumark.report.texts import sentences
    from quorumark.stamps.tokens import read_roots
    from quorumark.verify.check import check_certificate
    from quorumark.verify.dates import check_stamps
    from quorumark.verify.reference import read_chain

    found = read_certificate(certificate)
    chain = read_chain(manifest)
    reference = None
    with _progress(json) as note:
        if suspect is not None and files.are_there(manifest):
            reference = files.reference(manifest, note)
        checked, left = check_certificate(
            found,
            chain,
            suspect=suspect,
            reference=reference,
            audits=_opened(None, chain, audits),
            progress=note,
        )
    dates, dated, unsure, undated = check_stamps(found, certificate, chain, manifest, read_roots(roots or ()))
    checked, left = [*checked, *dated], [*left, *unsure]
    if report is not None:
        names = [certificate.name, "--manifest", manifest.name, "--suspect", suspect.name if suspect else "SUSPECT"]
        command = f"quorumark verify check {' '.join(names)}" + (" --tsa-roots ROOTS.pem" if dates else "")
        page = certificate_page(
            found,
            chain[-1],
            signers=found.signers(chain[-1]),
            checked=checked,
            left=left,
            dates=dates,
            command=command,
        )
        write_page(report, page)
    finding = found.finding
    if json:
        body = {"checked": [one.as_dict() for one in checked], "not_checked": [one.as_dict() for one in left]}
        body |= {"dates": [one.as_dict() for one in dates], "undated": [one.as_dict() for one in undated]}
        typer.echo(jsonlib.dumps({**body, **_figures(finding)}))
    else:
        _print_finding(finding, chain[-1].terms)
        for text in sentences(checked):
            typer.echo(f"checked: {text}")
        for text in sentences(left):
            typer.echo(f"NOT checked: {text}")
        for text in sentences(undated):
            typer.echo(f"undated: {text}")
        if report is not None:
            typer.echo(f"the report is in {report}")
    raise typer.Exit(EXIT_CODES[finding.verdict])


@app.command("ledger")
@bundled
def ledger(*, here: Here, json: Json = False) -> None:
    """Show what this member answered and knows of, and how much of the consortium's budget is left."""
    from quorumark.reasons import Reason
    from quorumark.report.texts import sentence
    from quorumark.verify.guard import budget
    from quorumark.verify.ledger import Ledger

    ours = here.folder
    manifest = ours.manifest()
    book = Ledger.open(ours, manifest)
    known, equations, most = book.known(), sum(book.equations().values()), budget(manifest.terms)
    if json:
        entries = [dict(entry) for entry in book.entries]
        body = {"head": book.head, "known": known, "equations": book.equations(), "budget": most}
        body |= {"burnt": list(book.burnt())}
        typer.echo(jsonlib.dumps({**body, "entries": entries}))
        return
    for entry in book.entries:
        shown = {k: v for k, v in entry.items() if k not in ("previous", "number", "time", "kind")}
        if "reason" in shown:
            shown["reason"] = sentence(Reason.from_dict(shown["reason"]))
        text = ", ".join(f"{k} {v if k == 'reason' else str(v)[:40]}" for k, v in shown.items())
        typer.echo(f"{entry['number']:>4}  {entry['time']}  {entry['kind']:<9} {text}")
    typer.echo(
        f"different queries that are known here: {len(known)}; equations that they opened: {equations}, of {most} in "
        f"the consortium's life; burnt leaves: {len(book.burnt())}\nhead {book.head}"
    )


@app.command("open", short_help="Open answers by layers that are sealed to you.")
@bundled
def open_sealed(
    query: Annotated[Path, typer.Argument(help="The query by layers.")],
    partials: Annotated[list[Path], typer.Argument(help="The partials, t or more, in any order.")],
    out: Annotated[Path, typer.Option(help="Where to write your word, for the certificate.")] = Path("opened.json"),
    report: Annotated[
        Path | None, typer.Option(help="Also write the numbers by layer as one HTML file, 0600: keep it to yourself.")
    ] = None,
    manifest: Manifest = None,
    layout: Annotated[Path | None, typer.Option(help="layout.json; by default the one beside the manifest.")] = None,
    *,
    here: Here,
    keys: Keys,
    json: Json = False,
) -> None:
    """Open the answers to a query by layers that names you as the examiner, and sign what they say together.

    Your word holds Q to three digits, and whose answers were wrong. The numbers by layer tell how to take the mark out:
    they are on the report only, and nobody else should see it.
    """
    from quorumark.consortium.home import read_as
    from quorumark.files import write_private, write_shared
    from quorumark.model.layout import ModelLayout
    from quorumark.report.layers import layers_page
    from quorumark.verify.evidence import Query
    from quorumark.verify.examine import examine
    from quorumark.verify.reference import LAYOUT

    asked = read_as(query, "a query", Query.from_bytes)
    ours = None if manifest is not None else here.folder_for(asked.manifest)
    chain = _chain(ours, manifest)
    examined = examine(here.member.identity(keys.unlock(here.home)), chain[-1], asked, _partials(partials))
    write_shared(out, examined.opened.to_bytes())
    if report is not None:
        folder = (manifest if manifest is not None else ours.manifest_path if ours else Path()).parent
        shape = read_as(layout or folder / LAYOUT, "a layout", ModelLayout.from_bytes)
        write_private(report, layers_page(examined, chain[-1], shape).encode())
    wrong = [chain[-1].terms.member(point).name for point in examined.opened.wrong]
    if json:
        typer.echo(jsonlib.dumps({"opened": str(out), "q": examined.opened.q, "wrong": wrong}))
        return
    typer.echo(
        f"Q = {examined.opened.q} over {asked.equations} blocks; your word is in {out}, for verify combine --opened"
    )
    if wrong:
        typer.echo(f"the answers of {', '.join(wrong)} contradict the others, and were corrected")
    if report is not None:
        typer.echo(f"the numbers by layer are in {report}: keep them to yourself")


# --- what the commands share ------------------------------------------------------------------------------


def _asked_layers(layers: bool, after: Path | None, examiner: Path | None) -> AskLayers | None:
    from quorumark.consortium.home import read_as
    from quorumark.consortium.records import Card
    from quorumark.errors import InputError
    from quorumark.verify.query import AskLayers

    if not layers:
        if after is not None or examiner is not None:
            raise InputError("--after, --examiner", "must be given with --layers only", "without it")
        return None
    if after is None or examiner is None:
        rule = (
            "takes --after, the certificate of the plain query, and --examiner, the card of whom answers are sealed to"
        )
        raise InputError("--layers", rule, "one of them is missing")
    return AskLayers.of(read_certificate(after), read_as(examiner, "a member's card", Card.from_bytes))


def _partials(paths: Sequence[Path]) -> list[Partial]:
    from quorumark.consortium.home import read_file
    from quorumark.errors import EvidenceError, QuorumarkError
    from quorumark.verify.evidence import Partial

    answers = []
    for path in paths:
        try:
            answers.append(Partial.from_bytes(read_file(path, "a partial")))
        except QuorumarkError as error:
            raise EvidenceError(f"{str(path)!r} is refused: {error}") from None
    return answers


def _cost(query: Query, ours: ConsortiumFolder, reference: Reference) -> str:
    """What an answer costs, for the person who approves it."""
    from quorumark.report.texts import about_cost
    from quorumark.verify.guard import budget
    from quorumark.verify.ledger import Ledger

    terms = reference.manifest.terms
    book = Ledger.open(ours, reference.manifest)
    used = sum(count for x, count in book.equations().items() if x != query.x)
    failed = sum(count for x, count in book.equations().items() if x != query.x and book.known()[x] != "passed")
    return about_cost(query, terms, used, failed, budget(terms))


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


def _signed(path: Path) -> Certificate | None:
    """The certificate in a file, if there is one and somebody has signed it."""
    from quorumark.errors import QuorumarkError

    try:
        found = read_certificate(path)
    except QuorumarkError:
        return None
    return found if found.signatures else None


def _added(before: Certificate, query: Query, partials: Sequence[Partial], out: Path) -> list[Partial]:
    """The partials of a signed certificate and those that came later; a member's own in the certificate counts."""
    from quorumark.errors import InputError

    if before.finding.query.digest() != query.digest():
        raise InputError("--out", "must not be a signed certificate of another query: name another file", str(out))
    there = {partial.point for partial in before.finding.partials}
    new = [partial for partial in partials if partial.point not in there]
    if not new:
        raise InputError(
            "--out",
            "is a signed certificate with all of these partials: sign or check it, or name another file",
            str(out),
        )
    return [*before.finding.partials, *new]


def _free_name(path: Path) -> Path:
    """A name for the earlier version of a file: the first of certificate-1.json, certificate-2.json, … that is free."""
    names = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def _chain(ours: ConsortiumFolder | None, manifest: Path | None) -> list[Any]:
    from quorumark.errors import InputError
    from quorumark.verify.reference import read_chain

    if manifest is not None:
        return list(read_chain(manifest))
    if ours is None:
        raise InputError("--manifest", "must be given where there is no member's home")
    return ours.chain()


def _manifest_path(ours: ConsortiumFolder | None, manifest: Path | None) -> Path:
    """The manifest that is named, or this member's."""
    from quorumark.errors import InputError

    if manifest is None:
        if ours is None:
            raise InputError("--manifest", "must be given where there is no member's home")
        return ours.manifest_path
    if not manifest.is_file():  # before the files that are looked for beside it
        raise InputError("--manifest", "must name the consortium's manifest", f"{str(manifest)!r}, which is no file")
    return manifest


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
    ours: ConsortiumFolder | None, chain: Sequence[Any], audits: Sequence[Path | Audit] | None
) -> dict[str, tuple[int, ...]]:
    """The leaves that audits opened, by audit: what this member's ledger knows, and what is proved here."""
    from quorumark.verify.ledger import Ledger
    from quorumark.verify.proof import Audit, explain

    known = Ledger.open(ours, chain[-1]).audits() if ours is not None else {}
    proofs = [one for one in audits or () if isinstance(one, Audit)]
    proofs += read_audits([one for one in audits or () if isinstance(one, Path)])
    return known | explain(chain, proofs, known)


def _describe(query: Query, terms: Terms, opened: Mapping[str, tuple[int, ...]]) -> str:
    from quorumark.report.texts import about_layers, about_left_out, sentences

    files = ", ".join(file.name for file in query.files[:3]) or "a model in memory"
    more = f" and {len(query.files) - 3} more files" if len(query.files) > 3 else ""
    lines = [
        f"suspect: {files}{more}, {100 * query.covered / query.carriers:.1f} % of the carrying weights found",
        f"statistic {query.statistic}, alignment {query.alignment}, {query.effective:,} effective coordinates",
        *sentences(query.matching),
        *about_left_out(query, terms, opened),
        *about_layers(query),
        f"query {query.digest()}",
    ]
    return "\n".join(lines)


def _figures(finding: Finding) -> dict[str, Any]:
    from quorumark.report.texts import sentences

    names = ["verdict", "z", "threshold", "log10_p", "log10_bound", "cosine", "corroboration", "equations"]
    names += ["agreed", "charged", "log10_choices", "audits"]
    members = [finding.names[str(partial.point)] for partial in finding.partials]
    wrong = [finding.names[str(point)] for point in finding.wrong]
    reasons = [reason.as_dict() for reason in finding.reasons]
    texts = {"reasons": reasons, "texts": sentences(finding.reasons)}
    by_layers = None if finding.layers is None else finding.layers.as_dict()
    found = {name: getattr(finding, name) for name in names} | texts | {"members": members, "wrong": wrong}
    return found | {"layers": by_layers}


def _print_finding(finding: Finding, terms: Terms) -> None:
    from quorumark.report.texts import about_charges, about_left_out, sentences

    typer.echo(
        f"{finding.verdict}: z = {finding.z}, threshold {finding.threshold}; an unrelated model gets as far with "
        f"probability 10^{finding.log10_p} (at most 10^{finding.log10_bound})"
    )
    if finding.layers is not None:
        by = finding.layers
        typer.echo(
            f"by layers: Q = {by.q} over {by.blocks} blocks, threshold {by.threshold}; an unrelated model gets as far "
            f"with probability 10^{by.log10_bound} at most"
        )
    about = about_left_out(finding.query, terms, finding.audits) + about_charges(finding)
    for text in sentences(finding.reasons) + about:
        typer.echo(f"- {text}")
