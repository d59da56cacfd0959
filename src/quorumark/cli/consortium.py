"""`quorumark consortium …`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from quorumark.cli.options import Json

app = typer.Typer(
    help="What the members agree on: terms before the key exists, the manifest after.", no_args_is_help=True
)


@app.command("create")
def create(
    name: Annotated[str, typer.Option(help="The consortium's name.")],
    threshold: Annotated[int, typer.Option(help="t: how many members it takes.")],
    member: Annotated[list[str], typer.Option(help="CARD.json or CARD.json:EXAMPLES; once for each, in order.")],
    model: Annotated[Path, typer.Option(help="The public initial model (.safetensors): layout and anchor.")],
    out: Annotated[Path, typer.Option(help="The folder to write terms.json and layout.json to.")],
    setup: Annotated[str, typer.Option(help="dkg (nobody ever knows the key) or dealer.")] = "dkg",
    key: Annotated[str, typer.Option(help="rademacher or gaussian.")] = "rademacher",
    max_coordinates: Annotated[int | None, typer.Option(help="Carry on a public sample of this many.")] = None,
    include: Annotated[list[str] | None, typer.Option(help="Glob of tensors that may carry; may be repeated.")] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="Glob of tensors that must not, besides embeddings.")
    ] = None,
) -> None:
    """Write the terms that all members will sign."""
    import datetime

    from quorumark.errors import InputError
    from quorumark.home import read_file
    from quorumark.identity import verify_card
    from quorumark.layout import DEFAULT_EXCLUDE, ModelLayout
    from quorumark.records import Card, Member, Terms, digest

    if (out / "terms.json").exists():
        raise InputError("--out", "must not hold terms already", str(out))
    layout = ModelLayout.of(
        model, include=include or ("*",), exclude=[*DEFAULT_EXCLUDE, *(exclude or ())], max_coordinates=max_coordinates
    )
    anchor = digest("anchor", bytes.fromhex(layout.digest()), layout.encode(model).astype("<u8").tobytes())
    roster = []
    for point, text in enumerate(member, 1):
        path, _, examples = text.rpartition(":") if text.rpartition(":")[2].isdecimal() else (text, "", "1")
        card = Card.from_bytes(read_file(Path(path), "a member's card"))
        verify_card(card)
        roster.append(Member(point, card.name, card.ed25519, card.x25519, int(examples)))
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    digests: dict[str, Any] = {"layout": layout.digest(), "anchor": anchor.hex()}
    terms = Terms(
        name, threshold, tuple(roster), coordinates=layout.coordinates, created=now, key=key, setup=setup, **digests
    )
    if setup == "dkg":
        from quorumark.setup.dkg import check_terms

        check_terms(terms)
    out.mkdir(parents=True, exist_ok=True)
    (out / "layout.json").write_bytes(layout.to_bytes())
    (out / "terms.json").write_bytes(terms.to_bytes())
    typer.echo(
        f"{name}: {threshold} of {terms.members} members, {terms.coordinates:,} coordinates\n"
        f"terms {terms.digest().hex()}\nwritten to {out}; every member should compare this digest"
    )


@app.command("show")
def show(
    file: Annotated[Path, typer.Argument(help="terms.json, manifest.json or dealing.json")], json: Json = False
) -> None:
    """Show terms or a manifest in plain words."""
    from rich.table import Table

    from quorumark.cli.console import make_console

    terms, manifest = _read(file)
    if json:
        typer.echo(file.read_text())
        return
    console = make_console()
    console.print(f"{terms.name}: any {terms.threshold} of {terms.members} members; made {terms.created}")
    console.print(
        f"key {terms.key}, setup {terms.setup}, {terms.coordinates:,} coordinates, statistic {terms.statistic}"
    )
    console.print(f"terms    {terms.digest().hex()}\nlayout   {terms.layout}\nanchor   {terms.anchor}")
    if manifest is not None:
        console.print(f"manifest {manifest.digest().hex()}, epoch {manifest.epoch}")
    table = Table("point", "member", "examples", "signs with", "signed")
    for member in terms.roster:
        signed = "" if manifest is None else ("yes" if member.point in manifest.signatures else "no")
        table.add_row(str(member.point), member.name, f"{member.examples:,}", member.ed25519[:16] + "…", signed)
    console.print(table)


@app.command("check")
def check(file: Annotated[Path, typer.Argument(help="manifest.json")]) -> None:
    """Check a manifest: every member's signature, and that it does not contradict itself."""
    from quorumark.errors import RecordError
    from quorumark.identity import verify_manifest

    terms, manifest = _read(file)
    if manifest is None:
        raise RecordError(f"{str(file)!r} holds terms: there is nothing signed in it yet")
    verify_manifest(manifest)
    typer.echo(
        f"{terms.name}: the manifest is sound and signed by all {terms.members} members\n{manifest.digest().hex()}"
    )


def _read(file: Path) -> tuple[Any, Any]:
    from quorumark.home import read_file
    from quorumark.records import Manifest, Terms

    data = read_file(file, "terms or a manifest")
    if b'"quorumark-terms/' in data[:4096] and b'"quorumark-manifest/' not in data:
        return Terms.from_bytes(data), None
    manifest = Manifest.from_bytes(data)
    return manifest.terms, manifest
