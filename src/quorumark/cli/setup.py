"""`quorumark setup …`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quorumark.cli.options import DEFAULT_HOME, HomeOption, KeyFile, PassphraseFile, unlock

app = typer.Typer(help="Make the key: without a dealer (dkg), or with one.", no_args_is_help=True)
Folder = Annotated[Path, typer.Option(help="The folder that all members exchange files through.")]
TermsFile = Annotated[Path, typer.Option("--terms", help="terms.json, as agreed.")]


@app.command("dkg")
def dkg(
    terms: TermsFile,
    folder: Folder,
    home: HomeOption = DEFAULT_HOME,
    key_file: KeyFile = None,
    passphrase_file: PassphraseFile = None,
) -> None:
    """Take the next steps of the dealer-free setup. Run it again when others have written: it says who is awaited."""
    from quorumark.home import Home, read_file
    from quorumark.records import Terms
    from quorumark.setup.folder import advance

    agreed = Terms.from_bytes(read_file(terms, "a consortium's terms"))
    progress = advance(Home(home), unlock(key_file, passphrase_file), agreed, folder, note=typer.echo)
    if progress.manifest is not None:
        typer.echo(f"finished: the share is sealed in {home}\nmanifest {progress.manifest.digest().hex()}")
    else:
        typer.echo(
            f"waiting for {', '.join(progress.waiting)} ({progress.step}); run this again when they have written"
        )


@app.command("discard")
def discard_ceremony(terms: TermsFile, home: HomeOption = DEFAULT_HOME) -> None:
    """Forget a dealer-free setup that has failed. All members do so, and start again with a new, empty folder."""
    from quorumark.home import Home, read_file
    from quorumark.records import Terms
    from quorumark.setup.folder import discard

    there = discard(Home(home), Terms.from_bytes(read_file(terms, "a consortium's terms")))
    typer.echo("forgotten; start again with a new folder" if there else "there is no running ceremony for these terms")


@app.command("dealer")
def dealer(terms: TermsFile, folder: Folder) -> None:
    """Be the dealer: draw a key, deal it to all members, forget it. Whoever runs this must be trusted to."""
    from rich.progress import Progress

    from quorumark.cli.console import make_console
    from quorumark.home import read_file
    from quorumark.records import Terms
    from quorumark.setup.dealer import deal

    agreed = Terms.from_bytes(read_file(terms, "a consortium's terms"))
    with Progress(console=make_console(), transient=True) as bar:
        task = bar.add_task("dealing", total=agreed.coordinates)
        manifest = deal(agreed, folder, lambda done, _: bar.update(task, completed=done))
    typer.echo(
        f"dealt to {agreed.members} members in {folder}; the key is gone\n"
        f"commitment {manifest.commitment['hash'] if manifest.commitment else ''}\n"
        "each member now runs: quorumark setup accept --folder …"
    )


@app.command("accept")
def accept_share(
    folder: Folder,
    home: HomeOption = DEFAULT_HOME,
    terms: Annotated[Path | None, typer.Option(help="terms.json, as this member agreed to them.")] = None,
    key_file: KeyFile = None,
    passphrase_file: PassphraseFile = None,
) -> None:
    """Take the share that a dealer dealt: check it, seal it, sign. Run it again once all have signed."""
    from quorumark.home import Home, read_file
    from quorumark.records import Terms
    from quorumark.setup.dealer import accept

    agreed = None if terms is None else Terms.from_bytes(read_file(terms, "a consortium's terms"))
    manifest = accept(Home(home), unlock(key_file, passphrase_file), folder, agreed)
    if manifest is None:
        typer.echo("share checked, sealed and signed for; run this again when all members have signed")
    else:
        typer.echo(f"finished: the share is sealed in {home}\nmanifest {manifest.digest().hex()}")
