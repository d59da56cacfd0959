"""`quorumark member …`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quorumark.cli.options import DEFAULT_HOME, HomeOption, KeyFile, PassphraseFile, unlock

app = typer.Typer(help="This member's identity: keys, card, backup.", no_args_is_help=True)


@app.command("init")
def init(
    name: Annotated[str, typer.Option(help="The member's name, as the others will see it.")],
    home: HomeOption = DEFAULT_HOME,
    key_file: KeyFile = None,
    passphrase_file: PassphraseFile = None,
) -> None:
    """Make this member's keys. A --key-file that does not exist is made."""
    from quorumark.home import Home

    created = Home.create(home, name, unlock(key_file, passphrase_file, new=True))
    typer.echo(
        f"{name}: keys made and sealed in {home}\nsend {created.path / 'member.json'} to whoever sets the consortium up"
    )


@app.command("card")
def card(home: HomeOption = DEFAULT_HOME) -> None:
    """Print this member's card: public, for the others."""
    from quorumark.home import Home

    typer.echo(Home(home).card().to_bytes().decode())


@app.command("backup")
def backup(
    to: Annotated[Path, typer.Argument(help="The file to write; secrets in it stay sealed as they are.")],
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Copy this member's folder into one file."""
    from quorumark.home import Home

    typer.echo(f"{Home(home).backup(to)} files backed up to {to}; the passphrase or key file is not among them")


@app.command("restore")
def restore(
    backup: Annotated[Path, typer.Argument(help="A file that `member backup` wrote.")], home: HomeOption = DEFAULT_HOME
) -> None:
    """Make this member's folder from a backup."""
    from quorumark.home import Home

    typer.echo(f"{Home.restore(backup, home).card().name} restored to {home}")
