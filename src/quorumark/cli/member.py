"""`quorumark member …`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quorumark.cli.bundles import Here, Keys, bundled
from quorumark.cli.options import DEFAULT_HOME, HomeOption

app = typer.Typer(help="This member's identity: keys, card, backup.", no_args_is_help=True)


@app.command("init")
@bundled
def init(
    name: Annotated[str, typer.Option(help="The member's name, as the others will see it.")],
    home: HomeOption = DEFAULT_HOME,
    *,
    keys: Keys,
) -> None:
    """Make this member's keys. A --key-file that does not exist is made, and later commands find it by themselves."""
    from quorumark.consortium.home import HomeFolder

    created = HomeFolder.create(home, name, keys.unlock(home, new=True))
    if keys.key_file is not None:
        created.remember_key_file(keys.key_file)
    typer.echo(
        f"{name}: keys made and sealed in {home}\n"
        f"send {created.path / 'member.json'} to the member who sets the consortium up\n"
        f"its fingerprint, for people who compare by phone: {created.card().fingerprint()}"
    )


@app.command("card")
def card(
    home: HomeOption = DEFAULT_HOME,
    fingerprint: Annotated[
        bool, typer.Option("--fingerprint", help="Only its fingerprint, of the name and both keys.")
    ] = False,
) -> None:
    """Print this member's card: public, for the others."""
    from quorumark.consortium.home import HomeFolder

    own = HomeFolder(home).card()
    typer.echo(own.fingerprint() if fingerprint else own.to_bytes().decode())


@app.command("backup")
def backup(
    to: Annotated[Path, typer.Argument(help="The file to write; secrets in it stay sealed as they are.")],
    home: HomeOption = DEFAULT_HOME,
    without_shares: Annotated[
        bool, typer.Option("--without-shares", help="For an agent's home, where a signer holds the shares.")
    ] = False,
) -> None:
    """Copy this member's folder into one file."""
    from quorumark.consortium.home import HomeFolder

    count = HomeFolder(home).backup(to, shares=not without_shares)
    typer.echo(f"{count} files backed up to {to}; the passphrase or key file is not among them")


@app.command("restore")
def restore(
    backup: Annotated[Path, typer.Argument(help="A file that `member backup` wrote.")], home: HomeOption = DEFAULT_HOME
) -> None:
    """Make this member's folder from a backup."""
    from quorumark.consortium.home import HomeFolder

    typer.echo(f"{HomeFolder.restore(backup, home).card().name} restored to {home}")


@app.command("rounds")
@bundled
def rounds(
    lost: Annotated[
        bool, typer.Option("--lost", help="It may have taken part, and its memory of rounds is lost.")
    ] = False,
    *,
    here: Here,
    keys: Keys,
) -> None:
    """Make this member's memory of rounds anew, after it was lost: a restored backup does not hold it. The first one
    came with the share. The member takes part again as soon as others say that the model is newer than its loss; until
    then it could do things twice."""
    from quorumark.errors import InputError
    from quorumark.node.journal import create_lost_memory

    if not lost:
        raise InputError(
            "--lost",
            "must be given: this member's first memory of rounds came with its share, and is made anew only "
            "after it was lost",
        )
    create_lost_memory(here.folder, here.member.identity(keys.unlock(here.home)))
    typer.echo(f"{here.member.card().name} takes part again once the others have gone on for two rounds without it")


@app.command("consent")
@bundled
def consent(
    from_last: Annotated[
        bool, typer.Option("--here", help="To another sum from the last model, not to a second run from the first.")
    ] = False,
    unmarked: Annotated[
        bool,
        typer.Option("--unmarked", help="To sums without a key, though another consortium here marks such models."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    *,
    here: Here,
    keys: Keys,
) -> None:
    """Let this member answer once more from a model for which it has answered: a second run from the initial model, or
    another sum from the last one, where the first can never be opened. With --unmarked: let it sum models without a
    key that another of its consortia marks."""
    from quorumark.errors import InputError
    from quorumark.node.consent import consent_text, give_consent
    from quorumark.node.journal import Journal

    if from_last and unmarked:
        raise InputError("--unmarked", "must not come with --here: they are two consents")
    journal = Journal(here.folder, here.member.identity(keys.unlock(here.home)))
    typer.echo(consent_text(journal, here=from_last, unmarked=unmarked))
    if not yes and not typer.confirm("Consent?"):
        raise typer.Exit(1)
    give_consent(journal, here=from_last, unmarked=unmarked)
    typer.echo("noted")


@app.command("serve", short_help="Hold the share in a process of its own, for an engine's node.")
@bundled
def serve(
    socket: Annotated[Path, typer.Option(help="Where the engine's node finds this member: a Unix socket.")],
    *,
    here: Here,
    keys: Keys,
    terms: Annotated[str | None, typer.Option(help="The digest of the terms that a key may be made for.")] = None,
    manifest: Annotated[
        str | None, typer.Option(help="The digest of the manifest that is served, and no other.")
    ] = None,
    seeds: Annotated[
        bool,
        typer.Option("--seeds", help="Let the server choose the seeds of training, for a run that can be repeated."),
    ] = False,
) -> None:
    """Hold the share in this process, and take part in rounds, ceremonies and verifications for an engine's node that
    runs as another user."""
    import signal
    import threading

    from quorumark.checks import is_hex
    from quorumark.errors import InputError
    from quorumark.node.member import MemberNode
    from quorumark.node.signer import SignerServer

    for option, digest in (("--terms", terms), ("--manifest", manifest)):
        if digest is not None and not is_hex(digest, 32):
            raise InputError(option, "must be a digest of 64 hex digits, as consortium show prints it", repr(digest))
    member, opened = here.member, keys.unlock(here.home)
    name = member.identity(opened).name  # a wrong key is noticed now, not in a round
    node = MemberNode(member, opened, terms=terms, manifest=manifest, consortium=here.consortium, seeds=seeds)
    server = SignerServer(node, socket)
    # shutdown waits for the loop that the signal interrupts, so it must not run inside it
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.stop).start())
    typer.echo(f"{name} is served at {socket}")
    server.serve()
