"""`quorumark share …`"""

from __future__ import annotations

import json as jsonlib
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from quorumark.cli.bundles import Here, Keys, Waiting, bundled
from quorumark.cli.options import From, Json, awaited, keep_agreed_files, report, say_once

app = typer.Typer(help="This member's share: at rest, recovered, made anew.", no_args_is_help=True)


@app.command("inspect")
@bundled
def inspect(*, here: Here, json: Json = False) -> None:
    """Show what a sealed share says of itself; opens nothing."""
    from quorumark.consortium.keystore import SealedReader
    from quorumark.consortium.shares import ShareInfo

    ours = here.folder
    ours.manifest()  # an unfinished setup says so
    path = ours.check_share()
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
@bundled
def verify(
    *,
    here: Here,
    keys: Keys,
) -> None:
    """Open the share and check every bit of it against the manifest that all members signed."""

    ours = here.folder
    info = ours.verify_share(keys.unlock(here.home)).info
    typer.echo(f"the share at point {info.point} is whole: it is what the signed manifest commits to")


@app.command("recover")
@bundled
def recover(
    folder: Annotated[Path, typer.Option(help="The folder to exchange files with the helpers through.")],
    helpers: Annotated[str | None, typer.Option(help="To ask: the points of t other members, like 2,3,5.")] = None,
    *,
    here: Here,
    keys: Keys,
    waiting: Waiting,
) -> None:
    """Get a lost share back from t helpers, who each run `quorumark share help` with the same folder.

    With --helpers it asks them first; without, it goes on with what was asked in this folder.
    """
    from quorumark.errors import InputError
    from quorumark.setup.recover import finish, request

    member = here.member
    ours, opened = here.folder, keys.unlock(here.home)
    if helpers is not None:
        try:
            points = tuple(int(x) for x in helpers.split(","))
        except ValueError:
            raise InputError("--helpers", "must be points like 2,3,5", repr(helpers)) from None
        request(member, ours, opened, folder, points)
        typer.echo(f"asked in {folder}; each helper runs: quorumark share help --folder …")
        if not waiting.wait:
            return
    progress = waiting.until_finished(lambda: finish(member, ours, opened, folder))
    done = "recovered: the share is what the manifest commits to"
    typer.echo(done if progress.finished else awaited(progress))


@app.command("help")
@bundled
def help_other(
    folder: Annotated[Path, typer.Option(help="The folder with the request.")],
    *,
    here: Here,
    keys: Keys,
    waiting: Waiting,
) -> None:
    """Help another member to get its share back. Make sure first that it is really that member who asks.

    Helpers first say hello to each other; once all have, each answers.
    """
    from quorumark.setup.recover import help_recover

    member = here.member
    ours, opened = here.folder, keys.unlock(here.home)
    progress = waiting.until_finished(lambda: help_recover(member, ours, opened, folder))
    if progress.finished:
        typer.echo(f"answered: {progress.finding} can now read its own share, and nothing else")
    else:
        report(progress, here.home)


@app.command("refresh", short_help="Make new shares of the same key for the same members.")
@bundled
def refresh(
    folder: Annotated[Path, typer.Option(help="A new folder that all members exchange files through.")],
    *,
    here: Here,
    keys: Keys,
    waiting: Waiting,
) -> None:
    """Make new shares of the same key for the same members, so that stolen old ones are worth nothing. All take part.

    Old shares are erased here; anyone who kept t old copies still has the key.
    """
    from quorumark.setup.exchange import reshare

    member = here.member
    ours, opened = here.folder, keys.unlock(here.home)
    visit = partial(reshare, member, opened, folder, consortium=ours, note=say_once())
    report(waiting.until_finished(visit), here.home)


@app.command("reshare")
@bundled
def reshare(
    terms: Annotated[Path, typer.Option(help="The new terms, from `quorumark consortium amend`, as all agreed.")],
    folder: Annotated[Path, typer.Option(help="A new folder that all members exchange files through.")],
    pinned: From = None,
    *,
    here: Here,
    keys: Keys,
    waiting: Waiting,
) -> None:
    """Hand the key on to other members or another threshold; nobody sees it. Members who stay and new ones take part.

    The shares of members who left are worth nothing afterwards, unless t of them were kept.
    """
    from quorumark.consortium.home import read_as
    from quorumark.consortium.records import Terms
    from quorumark.setup.amend import changes
    from quorumark.setup.chain import find_consortium
    from quorumark.setup.exchange import reshare

    member = here.member
    agreed = read_as(terms, "a consortium's terms", Terms.from_bytes)
    ours = None if pinned is not None else find_consortium(member, agreed, here.consortium)
    if ours is not None and ours.manifest().terms.digest() != agreed.digest() and not ours.ceremony_path.exists():
        typer.echo("\n".join(changes(agreed, ours.manifest().terms)))
    opened = keys.unlock(here.home)
    visit = partial(reshare, member, opened, folder, agreed, ours, pinned, note=say_once())
    progress = waiting.until_finished(visit)
    keep_agreed_files(progress, member, terms)  # for who is new
    report(progress, here.home)


@app.command("hand-over")
@bundled
def hand_over(
    to: Annotated[Path, typer.Option(help="The card of the member who will reconstruct the key.")],
    out: Annotated[Path, typer.Option(help="The file to write, sealed to that member.")],
    understood: Annotated[
        bool,
        typer.Option("--i-understand-this-hands-over-my-share", help="Who collects t of these has the key."),
    ] = False,
    *,
    here: Here,
    keys: Keys,
) -> None:
    """Seal a copy of this share to another member, for `key reconstruct`."""
    from quorumark.consortium.home import read_as
    from quorumark.consortium.identity import verify_card
    from quorumark.consortium.keystore import Unlock
    from quorumark.consortium.records import Card
    from quorumark.errors import InputError

    if not understood:
        raise InputError("--i-understand-this-hands-over-my-share", "must be given")
    card = read_as(to, "a member's card", Card.from_bytes)
    verify_card(card)
    ours = here.folder
    if card.ed25519 not in {member.ed25519 for member in ours.manifest().terms.roster}:
        raise InputError("--to", "must be the card of a member of this consortium", card.name)
    ours.verify_share(keys.unlock(here.home)).copy_to(out, Unlock.to_member(card.x25519))
    typer.echo(f"a copy of this share, sealed to {card.name}, is in {out}")
