"""`quorumark setup …`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quorumark.cli.bundles import Here, Keys, Waiting, bundled
from quorumark.cli.options import DEFAULT_HOME, HomeOption, keep_agreed_files, report

app = typer.Typer(
    help="Make the key: without a dealer (dkg), or with one; check it. Or agree on sums alone.", no_args_is_help=True
)
Folder = Annotated[Path, typer.Option(help="The folder that all members exchange files through.")]
TermsFile = Annotated[Path, typer.Option("--terms", help="terms.json, as agreed.")]


@app.command("dkg")
@bundled
def dkg(
    terms: TermsFile,
    folder: Folder,
    home: HomeOption = DEFAULT_HOME,
    protocol: Annotated[
        str, typer.Option(help="leak-free, or paper: the published protocol, which leaks; the terms must say so too.")
    ] = "leak-free",
    accept_leak: Annotated[
        bool, typer.Option("--accept-leak", help="Run the paper's protocol although t−1 members learn part of the key.")
    ] = False,
    *,
    keys: Keys,
    waiting: Waiting,
) -> None:
    """Make a key without a dealer, with all other members: each runs this once, and it says who is awaited."""
    from quorumark.consortium.home import HomeFolder, read_as
    from quorumark.consortium.records import Terms
    from quorumark.errors import InputError
    from quorumark.setup.exchange import set_up
    from quorumark.setup.paper import leak

    agreed = read_as(terms, "a consortium's terms", Terms.from_bytes)
    if not agreed.has_key:
        raise InputError("--terms", "must ask for a key: for sums alone run quorumark setup sums", agreed.setup)
    if protocol not in ("leak-free", "paper"):
        raise InputError("--protocol", "must be leak-free or paper", protocol)
    if (protocol == "paper") != (agreed.setup == "paper"):
        raise InputError("--protocol", f"must be what the terms ask for (setup {agreed.setup!r})", protocol)
    if protocol == "paper":
        warning = (
            f"t−1 = {agreed.threshold - 1} members together know a vector with cosine {leak(agreed):.3f} to the key"
        )
        if not accept_leak:
            raise InputError("--accept-leak", f"must be given with the paper's protocol: {warning}")
        typer.echo(f"the paper's protocol leaks: {warning}, √((t−1)/K)", err=True)
    member, opened = HomeFolder(home), keys.unlock(home)
    name = member.card().name  # members who share a terminal are told apart
    progress = waiting.until_finished(
        lambda: set_up(member, opened, agreed, folder, note=lambda text: typer.echo(f"{name}: {text}")), name
    )
    keep_agreed_files(progress, member, terms)
    report(progress, home)


@app.command("sums")
@bundled
def sums(terms: TermsFile, folder: Folder, home: HomeOption = DEFAULT_HOME, *, keys: Keys, waiting: Waiting) -> None:
    """Agree on sums alone, without a key: each member runs this once, signs the terms, and it says who is awaited."""
    from quorumark.consortium.home import HomeFolder, read_as
    from quorumark.consortium.records import Terms
    from quorumark.setup.sums import sign_terms

    agreed = read_as(terms, "a consortium's terms", Terms.from_bytes)
    member, opened = HomeFolder(home), keys.unlock(home)
    progress = waiting.until_finished(lambda: sign_terms(member, opened, agreed, folder), member.card().name)
    keep_agreed_files(progress, member, terms)
    report(progress, home)


@app.command("check")
@bundled
def check_setup(
    folder: Folder,
    *,
    here: Here,
    keys: Keys,
    waiting: Waiting,
) -> None:
    """Check together that the shares on disk fit together and hold a key. All run this, with a new folder."""
    from quorumark.setup.exchange import check

    member = here.member
    ours, opened = here.folder, keys.unlock(here.home)
    progress = waiting.until_finished(lambda: check(member, opened, ours, folder, note=typer.echo))
    if progress.finished:
        typer.echo(f"healthy: {progress.finding}")
    else:
        report(progress, here.home)


@app.command("discard")
@bundled
def discard_ceremony(
    terms: Annotated[Path | None, typer.Option(help="terms.json of the setup, if there are several.")] = None,
    although_signed: Annotated[
        bool, typer.Option("--although-signed", help="Even after this member has signed: only if nobody can finish.")
    ] = False,
    *,
    here: Here,
) -> None:
    """Forget a ceremony (setup, check, resharing) that has failed. All members do so, and start with a new folder."""
    from quorumark.consortium.home import read_as
    from quorumark.consortium.records import Terms
    from quorumark.setup.exchange import discard

    member = here.member
    if terms is not None:
        ours = member.consortium(read_as(terms, "a consortium's terms", Terms.from_bytes))
    else:
        ours = here.folder
    there = discard(ours, although_signed)
    typer.echo("forgotten; start again with a new folder" if there else "there is no running ceremony to forget")


@app.command("dealer")
def dealer(terms: TermsFile, folder: Folder) -> None:
    """Be the dealer: draw a key, deal it to all members, forget it. Anyone who runs this must be trusted to."""
    from rich.progress import Progress

    from quorumark.cli.console import make_console
    from quorumark.consortium.home import read_as
    from quorumark.consortium.records import Terms
    from quorumark.setup.dealer import deal

    agreed = read_as(terms, "a consortium's terms", Terms.from_bytes)
    console = make_console()
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("dealing", total=agreed.coordinates)
        manifest = deal(agreed, folder, lambda done, _: bar.update(task, completed=done))
    typer.echo(
        f"dealt to {agreed.members} members in {folder}; the key is gone\n"
        f"commitment {manifest.commitment['hash'] if manifest.commitment else ''}\n"
        "each member now runs: quorumark setup accept --folder …"
    )


@app.command("accept")
@bundled
def accept_share(
    folder: Folder,
    home: HomeOption = DEFAULT_HOME,
    terms: Annotated[Path | None, typer.Option(help="terms.json, as this member agreed to them.")] = None,
    *,
    keys: Keys,
    waiting: Waiting,
) -> None:
    """Take the share that a dealer dealt: check it, seal it, sign, and wait until all have signed."""
    from quorumark.consortium.home import HomeFolder, read_as
    from quorumark.consortium.records import Terms
    from quorumark.setup.dealer import accept

    agreed = None if terms is None else read_as(terms, "a consortium's terms", Terms.from_bytes)
    member, opened = HomeFolder(home), keys.unlock(home)
    progress = waiting.until_finished(lambda: accept(member, opened, folder, agreed))
    keep_agreed_files(progress, member, terms)
    report(progress, home)
