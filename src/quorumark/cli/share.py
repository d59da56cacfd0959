"""`quorumark share …`"""

from __future__ import annotations

import json as jsonlib
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from quorumark.cli.options import DEFAULT_HOME, From, HomeOption, Json, KeyFile, PassphraseFile, Which, report, unlock

app = typer.Typer(help="This member's share: at rest, recovered, made anew.", no_args_is_help=True)


@app.command("inspect")
def inspect(home: HomeOption = DEFAULT_HOME, consortium: Which = None, json: Json = False) -> None:
    """Show what a sealed share says of itself; opens nothing."""
    from quorumark.consortium.home import HomeFolder
    from quorumark.consortium.keystore import SealedReader
    from quorumark.consortium.shares import ShareInfo

    place = HomeFolder(home).only_consortium(consortium)
    place.manifest()  # an unfinished setup says so
    path = place.check_share()
    info = ShareInfo.from_about(SealedReader(path, None, "share").about, str(path))
    if json:
        typer.echo(jsonlib.dumps(asdict(info)))
        return
    kind = f"compressed, blocks of {info.block:,}" if info.block else "dense"
    typer.echo(
        f"{path}: {path.stat().st_size:,} bytes, {kind}\n"
        f"point {info.point} of {info.members}, threshold {info.threshold}, {info.length:,} elements, "
        f"epoch {info.epoch}"
    )


@app.command("verify")
def verify(
    home: HomeOption = DEFAULT_HOME,
    consortium: Which = None,
    key_file: KeyFile = None,
    passphrase_file: PassphraseFile = None,
) -> None:
    """Open the share and check every bit of it against the manifest that all members signed."""
    from quorumark.consortium.home import HomeFolder

    place = HomeFolder(home).only_consortium(consortium)
    info = place.verify_share(unlock(key_file, passphrase_file)).info
    typer.echo(f"the share at point {info.point} is whole: it is what the signed manifest commits to")


@app.command("recover")
def recover(
    folder: Annotated[Path, typer.Option(help="The folder to exchange files with the helpers through.")],
    helpers: Annotated[str | None, typer.Option(help="To ask: the points of t other members, like 2,3,5.")] = None,
    home: HomeOption = DEFAULT_HOME,
    consortium: Which = None,
    key_file: KeyFile = None,
    passphrase_file: PassphraseFile = None,
) -> None:
    """Get a lost share back from t helpers. First with --helpers, to ask; then without, until it says recovered."""
    from quorumark.consortium.home import HomeFolder
    from quorumark.errors import InputError
    from quorumark.setup.recover import finish, request

    member = HomeFolder(home)
    place, opened = member.only_consortium(consortium), unlock(key_file, passphrase_file)
    if helpers is not None:
        try:
            points = tuple(int(x) for x in helpers.split(","))
        except ValueError:
            raise InputError("--helpers", "must be points like 2,3,5", repr(helpers)) from None
        request(member, place, opened, folder, points)
        typer.echo(f"asked in {folder}; each helper runs: quorumark share help --folder …")
        return
    missing = finish(member, place, opened, folder)
    typer.echo(
        f"waiting for {', '.join(missing)}" if missing else "recovered: the share is what the manifest commits to"
    )


@app.command("help")
def help_other(
    folder: Annotated[Path, typer.Option(help="The folder with the request.")],
    home: HomeOption = DEFAULT_HOME,
    consortium: Which = None,
    key_file: KeyFile = None,
    passphrase_file: PassphraseFile = None,
) -> None:
    """Help another member to get its share back. Make sure first that it is really that member who asks.

    Helpers first say hello to each other; run it again when all have, until it says answered.
    """
    from quorumark.consortium.home import HomeFolder
    from quorumark.setup.recover import help_recover

    member = HomeFolder(home)
    place, opened = member.only_consortium(consortium), unlock(key_file, passphrase_file)
    name, missing = help_recover(member, place, opened, folder)
    if missing:
        typer.echo(f"said hello; waiting for {', '.join(missing)}; run this again when they have")
    else:
        typer.echo(f"answered: {name} can now read its own share, and nothing else")


@app.command("refresh", short_help="Make new shares of the same key for the same members.")
def refresh(
    folder: Annotated[Path, typer.Option(help="A new folder that all members exchange files through.")],
    home: HomeOption = DEFAULT_HOME,
    consortium: Which = None,
    key_file: KeyFile = None,
    passphrase_file: PassphraseFile = None,
) -> None:
    """Make new shares of the same key for the same members, so that stolen old ones are worth nothing. All take part.

    Run it again until it says finished. Old shares are erased here; whoever kept t old copies still has the key.
    """
    from quorumark.consortium.home import HomeFolder
    from quorumark.setup.exchange import reshare as advance

    member = HomeFolder(home)
    place, opened = member.only_consortium(consortium), unlock(key_file, passphrase_file)
    report(advance(member, opened, folder, place=place, note=typer.echo), home)


@app.command("reshare")
def reshare(
    terms: Annotated[Path, typer.Option(help="The new terms, from `quorumark consortium amend`, as all agreed.")],
    folder: Annotated[Path, typer.Option(help="A new folder that all members exchange files through.")],
    pinned: From = None,
    home: HomeOption = DEFAULT_HOME,
    consortium: Which = None,
    key_file: KeyFile = None,
    passphrase_file: PassphraseFile = None,
) -> None:
    """Hand the key on to other members or another threshold; nobody sees it. Members who stay and new ones take part.

    Run it again until it says finished. The shares of members who left are worth nothing afterwards, unless t of them
    were kept.
    """
    from quorumark.consortium.home import HomeFolder, read_as
    from quorumark.consortium.records import Terms
    from quorumark.setup.amend import changes
    from quorumark.setup.chain import find_place
    from quorumark.setup.exchange import reshare as advance

    member = HomeFolder(home)
    agreed = read_as(terms, "a consortium's terms", Terms.from_bytes)
    place = None if pinned is not None else find_place(member, agreed, consortium)
    if place is not None and place.manifest().terms.digest() != agreed.digest() and not place.ceremony_path.exists():
        typer.echo("\n".join(changes(agreed, place.manifest().terms)))
    opened = unlock(key_file, passphrase_file)
    report(advance(member, opened, folder, agreed, place, pinned, note=typer.echo), home)


@app.command("hand-over")
def hand_over(
    to: Annotated[Path, typer.Option(help="The card of the member who will reconstruct the key.")],
    out: Annotated[Path, typer.Option(help="The file to write, sealed to that member.")],
    understood: Annotated[
        bool, typer.Option("--i-understand-this-hands-over-my-share", help="Whoever collects t of these has the key.")
    ] = False,
    home: HomeOption = DEFAULT_HOME,
    consortium: Which = None,
    key_file: KeyFile = None,
    passphrase_file: PassphraseFile = None,
) -> None:
    """Seal a copy of this share to another member, for `key reconstruct`."""
    from quorumark.consortium.home import HomeFolder, read_as
    from quorumark.consortium.identity import verify_card
    from quorumark.consortium.keystore import Unlock
    from quorumark.consortium.records import Card
    from quorumark.errors import InputError

    if not understood:
        raise InputError("--i-understand-this-hands-over-my-share", "must be given", "nothing")
    card = read_as(to, "a member's card", Card.from_bytes)
    verify_card(card)
    place = HomeFolder(home).only_consortium(consortium)
    if card.ed25519 not in {member.ed25519 for member in place.manifest().terms.roster}:
        raise InputError("--to", "must be the card of a member of this consortium", card.name)
    place.verify_share(unlock(key_file, passphrase_file)).copy_to(out, Unlock.to_member(card.x25519))
    typer.echo(f"a copy of this share, sealed to {card.name}, is in {out}")
