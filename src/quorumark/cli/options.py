"""Options that many commands share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from quorumark.consortium.keystore import Unlock
    from quorumark.consortium.records import Manifest
    from quorumark.setup.exchange import Progress
    from quorumark.verify.audited import Audit
    from quorumark.verify.certificate import Certificate

Answer = TypeVar("Answer")

HomeOption = Annotated[Path, typer.Option("--home", help="This member's folder.", show_default=True)]
DEFAULT_HOME = Path("~/.quorumark").expanduser()
KeyFile = Annotated[Path | None, typer.Option(help="A file that opens this member's secrets (mode 0600).")]
PassphraseFile = Annotated[Path | None, typer.Option(help="A file whose first line is the passphrase (mode 0600).")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]

From = Annotated[
    str | None,
    typer.Option("--from", help="For who is new here: the digest of the manifest in force, as the others tell it."),
]
Layout = Annotated[Path | None, typer.Option(help="layout.json; by default the one beside the manifest.")]
Anchor = Annotated[
    Path | None, typer.Option(help="The public anchor model; by default anchor.safetensors beside the manifest.")
]

Groups = Annotated[Path | None, typer.Option(help="The agreed groups; by default groups.json beside the manifest.")]
Factors = Annotated[
    Path | None, typer.Option("--factors", help="The agreed factors; by default lora.json beside the manifest.")
]
Base = Annotated[
    Path | None, typer.Option(help="An adapter's public base model; by default base.safetensors or base/ beside it.")
]
AuditFiles = Annotated[
    list[Path] | None,
    typer.Option("--audit", help="Proof of an audit that opened what is left out (audit check --keep); repeatable."),
]
Which = Annotated[str | None, typer.Option("--consortium", help="The start of its id, if there are several.")]


def report(progress: Progress, home: Path) -> None:
    """Says how far a ceremony got."""
    if progress.manifest is not None:
        typer.echo(f"finished: the share is sealed in {home}\n{in_force(progress.manifest, home)}")
    else:
        typer.echo(
            f"waiting for {', '.join(progress.waiting)} ({progress.step}); run this again when they have written"
        )


def in_force(manifest: Manifest, home: Path) -> str:
    """A manifest, and where this member has it: others need the file for verifications."""
    from quorumark.consortium.home import HomeFolder

    places = (place.manifest_path for place in HomeFolder(home).consortia())
    content = manifest.to_bytes()
    where = next((str(path) for path in places if path.exists() and path.read_bytes() == content), str(home))
    return f"manifest {manifest.digest().hex()}, epoch {manifest.epoch}, public, in {where}"


def unlock(key_file: Path | None, passphrase_file: Path | None, *, new: bool = False) -> Unlock:
    """What opens the member's secrets: a key file, a passphrase from a file, or one that is asked for.

    Never from the command line or the environment, where other processes can see it.
    """
    from quorumark.consortium.keystore import Unlock
    from quorumark.errors import InputError

    if key_file is not None and passphrase_file is not None:
        raise InputError("--key-file and --passphrase-file", "exclude each other", "both")
    if key_file is not None:
        if new and not key_file.exists():
            Unlock.new_key_file(key_file)
        return Unlock.key_file(key_file)
    if passphrase_file is not None:
        return Unlock.passphrase_file(passphrase_file)
    if not sys.stdin.isatty():
        raise InputError("--key-file or --passphrase-file", "must be given where nobody can be asked", "neither")
    return Unlock.passphrase(answered(lambda: typer.prompt("passphrase", hide_input=True, confirmation_prompt=new)))


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
    from quorumark.verify.audited import LARGEST, Audit

    found = []
    for path in paths or ():
        try:
            found.append(Audit.from_bytes(read_file(path, "a proof of an audit", LARGEST)))
        except QuorumarkError as error:
            raise EvidenceError(f"{str(path)!r} cannot be used: {error}") from None
    return found
