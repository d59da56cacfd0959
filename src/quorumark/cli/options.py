"""Options that many commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from quorumark.consortium.home import HomeFolder
    from quorumark.consortium.records import Manifest
    from quorumark.setup.waiting import Progress
    from quorumark.verify.certificate import Certificate
    from quorumark.verify.proof import Audit

Answer = TypeVar("Answer")

HomeOption = Annotated[
    Path,
    typer.Option("--home", envvar="QUORUMARK_HOME", help="This member's folder.", show_default="~/.quorumark"),
]
DEFAULT_HOME = Path("~/.quorumark").expanduser()
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]

From = Annotated[
    str | None,
    typer.Option("--from", help="For who is new here: the digest of the manifest in force, as the others tell it."),
]
AuditFiles = Annotated[
    list[Path] | None,
    typer.Option("--audit", help="Proof of an audit that opened what is left out (audit check --keep); repeatable."),
]
Roots = Annotated[
    list[Path] | None,
    typer.Option("--tsa-roots", help="PEM file with the roots that you trust for time stamps; repeatable."),
]


def report(progress: Progress, home: Path) -> None:
    """Says how far a ceremony got."""
    if progress.manifest is not None:
        typer.echo(f"finished: the share is sealed in {home}\n{in_force(progress.manifest, home)}")
    else:
        typer.echo(f"{awaited(progress)}; run this again when they have written")


def keep_agreed_files(progress: Progress, member: HomeFolder, terms: Path | None) -> None:
    """Once a manifest is in force: keeps the layout and what else is beside the terms, for `public` and `verify`."""
    from quorumark.verify.public import keep_agreed

    if progress.manifest is None or terms is None:
        return
    ours = member.consortium_of(progress.manifest.digest().hex())
    for name in keep_agreed(ours, terms.parent) if ours is not None else ():
        typer.echo(f"{terms.parent / name} is not what the terms name, and was not kept", err=True)


def awaited(progress: Progress) -> str:
    """Who is awaited, and with what."""
    return f"waiting for {', '.join(progress.waiting)} ({progress.step})"


def say_once() -> Callable[[str], None]:
    """Prints a text the first time: visits to a folder repeat their warnings."""
    said: set[str] = set()

    def say(text: str) -> None:
        if text not in said:
            said.add(text)
            typer.echo(text)

    return say


def in_force(manifest: Manifest, home: Path) -> str:
    """A manifest, and where this member has it: others need the file for verifications."""
    from quorumark.consortium.home import HomeFolder

    places = (place.manifest_path for place in HomeFolder(home).consortia())
    content = manifest.to_bytes()
    where = next((str(path) for path in places if path.exists() and path.read_bytes() == content), str(home))
    return f"manifest {manifest.digest().hex()}, epoch {manifest.epoch}, public, in {where}"


def answered(ask: Callable[[], Answer]) -> Answer:
    """What a person answers. Who breaks off at a question interrupts the command: code 130, not 1, which is FAILED."""
    try:
        return ask()
    except typer.Abort:
        typer.echo(err=True)  # the question's line has no end yet
        raise typer.Exit(130) from None


EXIT_CODES = {"PASSED": 0, "FAILED": 1, "INCONCLUSIVE": 2}
"""What a verdict is to a shell."""


def read_certificate(path: Path) -> Certificate:
    from quorumark.consortium.home import read_as
    from quorumark.verify.certificate import Certificate

    return read_as(path, "a certificate", Certificate.from_bytes)


def file_name(name: str) -> str:
    """A member's name as a part of a file's."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name)


def read_audits(paths: list[Path] | None) -> list[Audit]:
    """Proofs of audits, as `verify audit check --keep` wrote them."""
    from quorumark.consortium.home import read_file
    from quorumark.errors import EvidenceError, QuorumarkError
    from quorumark.verify.proof import LARGEST, Audit

    found = []
    for path in paths or ():
        try:
            found.append(Audit.from_bytes(read_file(path, "a proof of an audit", LARGEST)))
        except QuorumarkError as error:
            raise EvidenceError(f"{str(path)!r} cannot be used: {error}") from None
    return found
