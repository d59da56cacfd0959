"""`quorumark stamp …`: dates that nobody can backdate, for manifests and certificates."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quorumark.cli.options import Json, Roots

if TYPE_CHECKING:
    from quorumark.stamps.record import Dated, Stamps
    from quorumark.verify.dates import Found

app = typer.Typer(
    help="When did it exist? Time stamps by outside authorities (RFC 3161) for manifests and certificates.",
    no_args_is_help=True,
)

File = Annotated[Path, typer.Argument(help="The manifest, or a certificate that its members have signed.")]
Renew = Annotated[
    int | None, typer.Option(min=1, help="Renew this stamp, by its number in `stamp show`, before it expires.")
]


@app.command("request")
def request(
    file: File,
    out: Annotated[Path, typer.Option(help="Where to write the request.")] = Path("request.tsq"),
    renew: Renew = None,
    json: Json = False,
) -> None:
    """Write a request that any time-stamping authority answers. Nothing is sent.

    It holds a SHA-512 and a random number, and says nothing else about the file. Dated are: of a manifest, its file; of
    a certificate, its file with the signatures that it has now. So stamp a certificate after everybody has signed it.
    """
    from quorumark.files import write_shared
    from quorumark.stamps.tokens import ask

    found = _found(file)
    number = _chain(found.stamps, renew)
    made = ask(found.stamps.message(number, found.message))
    write_shared(out, made)
    if json:
        typer.echo(jsonlib.dumps({"request": str(out), "kind": found.stamps.kind, "renews": renew}))
        return
    what = f"stamp {renew} of the {found.stamps.kind}" if renew else f"the {found.stamps.kind}"
    typer.echo(
        f"a request to date {what}: {out}, {len(made)} bytes; let an authority answer it, for instance with\n"
        f"  curl -H 'Content-Type: application/timestamp-query' --data-binary @{out.name} URL > response.tsr\n"
        f"then: quorumark stamp attach {file.name} response.tsr --request {out.name} --tsa-roots ROOTS.pem"
    )


@app.command("attach")
def attach(
    file: File,
    response: Annotated[Path | None, typer.Argument(help="The authority's answer; not with --url.")] = None,
    request: Annotated[Path | None, typer.Option(help="The request that it answers, as `request` wrote it.")] = None,
    url: Annotated[
        str | None,
        typer.Option(help="Ask this authority now. The only network connection that quorumark opens by itself."),
    ] = None,
    renew: Renew = None,
    roots: Roots = None,
    json: Json = False,
) -> None:
    """Check an authority's answer against the request and your roots, and keep it beside the file.

    Several authorities may stamp one file: each stamp is kept. With --url the request is made, sent and answered in one
    step; only the request goes out, a hash and a random number, and the answer is checked like one from a file.
    """
    from quorumark.consortium.home import read_file
    from quorumark.errors import InputError
    from quorumark.files import write_shared
    from quorumark.stamps.fetch import fetch
    from quorumark.stamps.record import stamps_path
    from quorumark.stamps.tokens import LARGEST, LARGEST_REQUEST, ask, check_token, read_request, read_roots

    trusted = read_roots(roots or ())
    if not trusted:
        raise InputError("--tsa-roots", "must name the roots that you trust for time stamps", "none")
    found = _found(file)
    if url is not None:
        if response is not None or request is not None:
            raise InputError("--url", "excludes a response and --request", "both")
        number = _chain(found.stamps, renew)
        query = ask(found.stamps.message(number, found.message))
        answer, asked = fetch(url, query), read_request(query)
    else:
        if response is None or request is None:
            raise InputError("a response and --request", "must be given, or --url instead", "one or none")
        answer = _small(read_file, response, "an authority's answer", LARGEST)
        asked = read_request(_small(read_file, request, "a request for a stamp", LARGEST_REQUEST))
        number = found.stamps.place_of(asked, found.message)
        if renew is not None and number != renew - 1:
            raise InputError("--renew", "must be the stamp that the request is for", renew)
    check_token(answer, found.stamps.message(number, found.message), trusted, asked.nonce)
    stamps = found.stamps.with_response(number, answer)
    dated = stamps.check(number, found.message, trusted)
    path = stamps_path(file, found.message)
    write_shared(path, stamps.to_bytes())
    if json:
        typer.echo(jsonlib.dumps({"stamps": str(path), "stamp": number + 1, **dated.as_dict()}))
    else:
        typer.echo(f"stamp {number + 1} of the {stamps.kind}: {_line(dated)}\nkept in {path}, beside {file.name}")


@app.command("show")
def show(
    file: File,
    roots: Roots = None,
    extract: Annotated[
        Path | None, typer.Option(help="Also write each stamp, and what it dates, into this folder, for other tools.")
    ] = None,
    json: Json = False,
) -> None:
    """Show the stamps of a manifest or a certificate: what was dated, by whom, when, and until when that is good.

    With roots they are checked, offline; without, they are only what the file says. Exits with 2 if one does not hold.
    """
    from quorumark.report.texts import sentences
    from quorumark.stamps.tokens import read_roots, time_text

    found = _found(file)
    stamps, trusted = found.stamps, read_roots(roots or ())
    if extract is not None:
        _extract(found, extract)
    shown: list[dict[str, Any]] = []
    lines: list[str] = []
    failed = None
    for number in range(len(stamps.chains)):
        said = stamps.inspect(number, found.message)
        body: dict[str, Any] = {
            "stamp": number + 1,
            "says": [{"authority": token.authority, "time": time_text(token.time)} for token in said],
        }
        lines.append(f"stamp {number + 1} of the {stamps.kind}:")
        for place, token in enumerate(said):
            act = "renewed by" if place else "by"
            lines.append(f"  {act} '{token.authority}' at {time_text(token.time)}, serial number {token.serial}")
        if trusted:
            held, why = _checked(stamps, number, found.message, trusted)
            failed = failed or why
            body |= {"holds": why is None, **(held.as_dict() if held else {"code": why.code if why else ""})}
            lines.append(
                f"  holds: {_line(held)}" if held else f"  REFUSED: {sentences([why.reason])[0]}" if why else ""
            )
        shown.append(body)
    if json:
        typer.echo(jsonlib.dumps({"kind": stamps.kind, "sha512": stamps.sha512, "stamps": shown}))
    else:
        typer.echo("\n".join(lines) or f"no time stamp dates this {stamps.kind}: make one with quorumark stamp request")
        if shown and not trusted:
            typer.echo("NOT checked: name the roots that you trust for time stamps (--tsa-roots)")
    if failed is not None:
        raise typer.Exit(2)


def _found(file: Path) -> Found:
    from quorumark.verify.dates import find_stamps, read_dated

    return find_stamps(read_dated(file), [file.parent])


def _chain(stamps: Stamps, renew: int | None) -> int:
    """The number of the chain that a request is for: the one that it renews, or a new one."""
    from quorumark.errors import InputError

    if renew is None:
        return len(stamps.chains)
    if renew > len(stamps.chains):
        raise InputError("--renew", f"must be one of the {len(stamps.chains)} stamps", renew)
    return renew - 1


def _checked(stamps: Stamps, number: int, message: bytes, roots: Any) -> tuple[Dated | None, Any]:
    from quorumark.errors import StampError

    try:
        return stamps.check(number, message, roots), None
    except StampError as error:
        return None, error


def _small(read: Any, path: Path, what: str, most: int) -> bytes:
    """A file of at most so many bytes: it is anybody's."""
    from quorumark.errors import StampError

    if path.is_file() and path.stat().st_size > most:
        raise StampError(f"{str(path)!r} is too large to be {what}: it has more than {most} bytes")
    data: bytes = read(path, what)
    return data


def _line(dated: Dated) -> str:
    renewed = f", renewed by {', '.join(dated.renewals)}" if dated.renewals else ""
    return f"existed by {dated.when}, says '{dated.authority}'{renewed}; renew before {dated.until}"


def _extract(found: Found, folder: Path) -> None:
    """For `openssl ts -verify -in stamp-1.tsr -data stamp-1.data -CAfile roots.pem`, with none of our code."""
    from quorumark.files import write_shared

    for number, chain in enumerate(found.stamps.chains):
        for done, response in enumerate(chain):
            name = f"stamp-{number + 1}" + (f"-renewal-{done}" if done else "")
            write_shared(folder / f"{name}.tsr", response)
            write_shared(folder / f"{name}.data", found.stamps.message(number, found.message, done))
