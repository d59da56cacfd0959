"""`quorumark room …`: where members meet (docs/room.md)."""

from __future__ import annotations

import ipaddress
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quorumark.cli.bundles import Keys, bundled
from quorumark.cli.options import DEFAULT_HOME, HomeOption, Roots, answered

if TYPE_CHECKING:
    from quorumark.consortium.home import HomeFolder
    from quorumark.consortium.identity import Identity
    from quorumark.room.agent import Agent
    from quorumark.room.client import Client
    from quorumark.room.desk import Matter

app = typer.Typer(
    help="Where members meet: a server that passes messages on, and an agent beside each member's keys.",
    no_args_is_help=True,
)
CaFile = Annotated[Path | None, typer.Option("--ca", help="Roots for TLS, if not the system's (PEM).")]
NOT_INSTALLED = "the room's server and pages"


@dataclass(frozen=True)
class InRoom(Keys):
    """Which member this is, and how it reaches its room, for one command."""

    home: HomeOption = DEFAULT_HOME
    ca: CaFile = None

    @property
    def member(self) -> HomeFolder:
        from quorumark.consortium.home import HomeFolder

        return HomeFolder(self.home)

    def connect(self) -> tuple[Client, Identity]:
        from quorumark.room.client import Client
        from quorumark.room.place import Place

        settings = Place(self.home).settings()
        identity = self.member.identity(self.unlock(self.home))
        return Client(settings.address, identity, settings.consortium, self.ca), identity


@app.command("serve")
def serve_room(
    data: Annotated[Path, typer.Option(help="The folder for everything that the room keeps.")],
    address: Annotated[str, typer.Option(help="How members reach it, like https://room.example.")],
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on.")] = 8420,
    founder: Annotated[
        list[Path] | None, typer.Option(help="Card of somebody who may found a consortium; repeatable.")
    ] = None,
    anyone_may_found: Annotated[
        bool, typer.Option("--anyone-may-found", help="Everybody who reaches the room may found a consortium.")
    ] = False,
    quota: Annotated[int, typer.Option(help="GiB that one consortium may keep.", min=1)] = 50,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate for TLS (PEM), with --tls-key.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key (PEM).")] = None,
    proxy: Annotated[
        list[str] | None,
        typer.Option(help="Address of a proxy whose X-Forwarded-For is believed, for limits by host; repeatable."),
    ] = None,
) -> None:
    """Run a room. It holds no secrets, and members believe it nothing.

    Without TLS files it is for a proxy on this machine that ends TLS, or for trying it out.
    """
    from quorumark.canonical import parse
    from quorumark.errors import InputError, MissingDependencyError
    from quorumark.room.store import Limits

    if bool(founder) == anyone_may_found:
        raise InputError("--founder", "must name a card, or --anyone-may-found must be given, and not both")
    if (tls_cert is None) != (tls_key is None):
        raise InputError("--tls-cert and --tls-key", "must be given together")
    for text in proxy or ():
        try:
            ipaddress.ip_network(text)
        except ValueError:
            raise InputError("--proxy", "must be an IP address, or a network like 10.0.0.0/24", text) from None
    keys = tuple(
        str(parse(path.read_bytes(), "quorumark-member/v1", "a member's card").get("ed25519")) for path in founder or ()
    )
    limits = Limits(consortium=quota << 30, file=quota << 30, founders=None if anyone_may_found else keys)
    try:
        from quorumark.room.server import serve
    except ImportError as error:
        raise MissingDependencyError(error.name or "starlette", NOT_INSTALLED) from None
    tls = None if tls_cert is None or tls_key is None else (tls_cert, tls_key)
    serve(data, address, host, port, limits, tls, started=typer.echo, proxies=proxy or ())


@app.command("alive")
def room_is_alive(
    host: Annotated[str, typer.Option(help="Where the room listens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Its port.")] = 8420,
) -> None:
    """Whether a room answers on this machine, with TLS or without; exit code 1 if none does. For health checks."""
    from quorumark.room.client import answers_at

    raise typer.Exit(0 if answers_at(host, port) else 1)


@app.command("join")
@bundled
def join_room(
    url: Annotated[str | None, typer.Argument(help="The room's address, or your invitation; once for a home.")] = None,
    home: HomeOption = DEFAULT_HOME,
    found: Annotated[str | None, typer.Option(help="Found a consortium of this name in the room.")] = None,
    invite: Annotated[int, typer.Option(help="Print so many invitations (the founder).", min=0, max=100)] = 0,
    examples: Annotated[int | None, typer.Option(help="How many examples you have: terms must say so.", min=1)] = None,
    approve_with: Annotated[
        Path | None, typer.Option(help="A policy that decides without a person (docs/room.md).")
    ] = None,
    prompt: Annotated[bool, typer.Option("--prompt", help="Ask for decisions at this terminal as well.")] = False,
    page: Annotated[bool, typer.Option("--page/--no-page", help="Serve your own page on 127.0.0.1.")] = True,
    signer: Annotated[
        Path | None,
        typer.Option(help="The socket of `quorumark member serve`, where another user holds the share (docs/room.md)."),
    ] = None,
    ca: CaFile = None,
    *,
    keys: Keys,
) -> None:
    """Run this member's agent: it takes part in the room until it is stopped, and shows you what waits for you.

    It makes the key with the others once you agreed to the terms, and answers queries that you approved; nothing else
    is done without you. Stopped and started again, it goes on.
    """
    from quorumark.consortium.home import HomeFolder
    from quorumark.errors import MissingDependencyError
    from quorumark.room.agent import Agent
    from quorumark.room.place import Place, Policy

    member, unlock = HomeFolder(home), keys.unlock(home)
    policy = None if approve_with is None else Policy.read(approve_with)
    _enter(home, member.identity(unlock), url, found, examples, invite, ca)
    agent = Agent(member, unlock, policy, note=_say, cafile=ca, signer=signer)
    shown = None
    if page:
        try:
            from quorumark.room.agent_page import AgentPage
        except ImportError as error:
            raise MissingDependencyError(error.name or "starlette", "the agent's page (or pass --no-page)") from None
        agent.start()
        shown = AgentPage(agent)
        shown.start()
        # its address has a token: not for a service's journal, which others may read
        _say(f"your page: {shown.address if sys.stdout.isatty() else f'its address is in {Place(home).page}'}")
    else:
        agent.start()
    try:
        while not agent.stopped.is_set():
            time.sleep(0.5)
            if prompt:
                _ask_at_terminal(agent)
    finally:
        if shown is not None:
            shown.stop()
        agent.stop()


def _say(text: str) -> None:
    """Texts in it come from others: one line, and nothing that moves a terminal's cursor."""
    typer.echo("".join(c if c.isprintable() else " " for c in text))
    sys.stdout.flush()


def _enter(
    home: Path,
    identity: Identity,
    url: str | None,
    found: str | None,
    examples: int | None,
    invite: int,
    ca: Path | None,
) -> None:
    """Joins or founds, and remembers where; then prints invitations."""
    from urllib.parse import urlsplit

    from quorumark.errors import InputError, RoomError
    from quorumark.room.client import Client
    from quorumark.room.place import Place, Settings
    from quorumark.room.requests import address_of

    place = Place(home)
    before = place.settings() if place.joined else None
    if url is None and before is None:
        raise InputError("URL", "must be the room's address, or your invitation, the first time")
    address = address_of(url) if url is not None else before.address if before is not None else ""
    parts = urlsplit(url or "")
    named = parts.path.removeprefix("/c/") if parts.path.startswith("/c/") else ""
    consortium = named or (before.consortium if before is not None else "")
    client = Client(address, identity, consortium, ca)
    if found is not None and before is None:
        consortium = client.create_consortium(found)
    elif found is not None and before is not None:
        said = client.about()  # the same command again goes on
        if (said.get("name"), said.get("founder")) != (found, identity.ed25519):
            raise InputError("--found", "is for a home that is in no room yet", before.address)
    elif not consortium:
        raise InputError("URL", "must be your invitation, or --found must be given", url or "")
    if before is not None and before.consortium != consortium:
        raise InputError(
            "URL", "must be of the consortium that this home is in: use another home for another", url or ""
        )
    if parts.fragment:
        client.join(parts.fragment)
    try:
        client.about()  # a stranger is refused here, and nothing is remembered
    except RoomError as error:
        known = before is not None and url is None and not invite
        if error.code != "room.unreachable" or not known:
            raise  # who was here before waits for the room like an agent that runs
    count = examples if examples is not None else before.examples if before is not None else 0
    place.remember(Settings(address, consortium, count))
    if invite:
        for text in client.invite(invite):
            _say(f"invitation: quorumark room join '{text}'")
    client.close()


def _ask_at_terminal(agent: Agent) -> None:
    from quorumark.errors import RoomError

    for matter in agent.desk.matters():
        if matter.state != "waiting" or agent.desk.said(matter.digest)[0]:
            continue
        for line in _lines(matter):
            _say(line)
        questions = {"terms": "agree, and make the key?", "call": "agree, and do this with the others?"}
        questions["audit"] = "open these pieces of your share, for good?"
        questions["examine"] = "open the answers that are sealed to you?"
        question = questions.get(matter.kind, "answer, and sign what follows?")
        said = answered(lambda question=question: typer.confirm(question))  # type: ignore[misc]
        try:
            agent.desk.decide(matter.digest, matter.shown, "yes" if said else "no", "person")
        except RoomError as error:
            _say(str(error))


def _lines(matter: Matter) -> list[str]:
    return [matter.title, *(f"  {label}: {text}" for label, text in matter.facts)]


@app.command("propose")
@bundled
def propose_terms(
    folder: Annotated[Path, typer.Argument(help="The folder that `consortium create` wrote.")],
    *,
    room: InRoom,
) -> None:
    """Put terms before all members: each sees them on its page, and agrees or declines."""
    from quorumark.room.founding import propose

    client, identity = room.connect()
    about = propose(client, identity, folder)
    typer.echo(f"proposed; all members compare this digest by phone:\n{about}")


@app.command("ask")
@bundled
def ask_room(
    suspect: Annotated[Path, typer.Argument(help="The model in question: a file, or a folder of shards.")],
    purpose: Annotated[str, typer.Option(help="Why: all members read it before they approve.")],
    align: Annotated[
        bool, typer.Option("--align", help="First put the suspect's channels where the anchor has them.")
    ] = False,
    lora: Annotated[bool, typer.Option("--lora", help="The suspect is an adapter, or a model with one added.")] = False,
    after: Annotated[
        Path | None, typer.Option(help="Ask by layers, after this certificate of a plain query that did not pass.")
    ] = None,
    examiner: Annotated[Path | None, typer.Option(help="By layers: card of whom alone sees its numbers.")] = None,
    answers: Annotated[int, typer.Option(help="How many answers to combine; t+1 by default.", min=0)] = 0,
    keep_file: Annotated[
        bool, typer.Option("--keep-file", help="Do not upload the suspect: members get it by other means.")
    ] = False,
    *,
    room: InRoom,
) -> None:
    """Ask all members whether a model is the consortium's. Your agent combines their answers when enough are there."""
    from quorumark.cli.options import read_certificate
    from quorumark.consortium.home import read_as
    from quorumark.consortium.records import Card
    from quorumark.room.asking import ask

    client, identity = room.connect()
    query = ask(
        client,
        room.member,
        identity,
        suspect,
        purpose,
        align=align,
        lora=lora,
        answers=answers,
        keep_file=keep_file,
        after=None if after is None else read_certificate(after),
        examiner=None if examiner is None else read_as(examiner, "a member's card", Card.from_bytes),
    )
    typer.echo(f"asked; query {query.digest()}\nmembers decide on their pages, you too")


@app.command("call")
@bundled
def call_members(
    purpose: Annotated[str, typer.Option(help="Why: all members read it before they agree.")],
    terms: Annotated[
        Path | None, typer.Option(help="New terms, from `quorumark consortium amend`: sign them, or hand the key on.")
    ] = None,
    new_shares: Annotated[
        bool | None,
        typer.Option("--new-shares/--same-shares", help="With --terms: whether all make new shares for them."),
    ] = None,
    recover: Annotated[
        str | None, typer.Option(help="Get your lost share back: the points of t other members, like 2,3,5.")
    ] = None,
    consortium: Annotated[str | None, typer.Option(help="The start of its id, if there are several.")] = None,
    *,
    room: InRoom,
) -> None:
    """Call all members to make new shares (a refresh), to change terms or members, or to bring your share back.

    Each member sees the call on its page, and agrees or declines; the agents do the rest.
    """
    from quorumark.consortium.home import read_as
    from quorumark.consortium.records import Terms
    from quorumark.errors import InputError
    from quorumark.room.calls import put_call

    if terms is not None and recover is not None:
        raise InputError("--terms and --recover", "must not be given together")
    try:
        helpers = tuple(int(x) for x in recover.split(",")) if recover else ()
    except ValueError:
        raise InputError("--recover", "must be points like 2,3,5", repr(recover)) from None
    client, _ = room.connect()
    agreed = None if terms is None else read_as(terms, "a consortium's terms", Terms.from_bytes)
    ours, unlock = room.member.only_consortium(consortium), room.unlock(room.home)
    call = put_call(client, room.member, unlock, ours, purpose, terms=agreed, new_shares=new_shares, helpers=helpers)
    typer.echo(f"called; {call.digest()}\nmembers decide on their pages, you too")


@app.command("audit")
@bundled
def audit_certificate(
    certificate: Annotated[Path, typer.Argument(help="The certificate that is audited.")],
    purpose: Annotated[str, typer.Option(help="Why: all members read it before they open anything.")],
    seed: Annotated[
        str | None, typer.Option(help="32 bytes in hex, of a public coin; by default fresh random ones.")
    ] = None,
    source: Annotated[str, typer.Option(help="Who drew the seed, or which public coin it is from.")] = "challenger",
    *,
    room: InRoom,
) -> None:
    """Ask members to open a few pieces of their shares, for somebody who trusts none of them (a spot audit).

    Each decides on its page: what is opened is public, and burnt. `verify audit check` then shows what it proves.
    """
    from quorumark.cli.options import read_certificate
    from quorumark.errors import InputError
    from quorumark.room.auditing import bring_audit

    try:
        raw = None if seed is None else bytes.fromhex(seed)
    except ValueError:
        raise InputError("--seed", "must be 32 bytes in hex", repr(seed)) from None
    client, identity = room.connect()
    found = read_certificate(certificate)
    made = bring_audit(client, room.member, identity, found, purpose, raw, source)
    typer.echo(
        f"brought; audit {made.digest()}\n{len(made.leaves)} leaves are to be opened; members decide on their pages"
    )


@app.command("stamps")
@bundled
def share_stamps(
    file: Annotated[Path, typer.Argument(help="The manifest, or a certificate that its members have signed.")],
    roots: Roots = None,
    *,
    room: InRoom,
) -> None:
    """Put the time stamps beside a file into the room; with --tsa-roots, take those of the others that hold.

    Time stamps are made with `quorumark stamp`.
    """
    from quorumark.room.stamping import put_stamps, take_stamps
    from quorumark.stamps.tokens import read_roots

    client, _ = room.connect()
    if roots:
        for one in take_stamps(client, file, read_roots(roots)):
            typer.echo(f"existed by {one.when}, says {one.authority!r}; renew before {one.until}")
        return
    typer.echo(f"{put_stamps(client, file)} stamps are in the room")


@app.command("examine")
@bundled
def examine_answers(
    query: Annotated[str, typer.Argument(help="The start of the query's digest.")],
    report: Annotated[
        Path | None, typer.Option(help="Also write the numbers by layer as one HTML file, 0600: keep it to yourself.")
    ] = None,
    layout: Annotated[Path | None, typer.Option(help="With --report: layout.json, if this home has none.")] = None,
    save: Annotated[
        Path | None,
        typer.Option(help="Only write the query and the sealed answers to this folder, for an examiner elsewhere."),
    ] = None,
    word: Annotated[
        Path | None,
        typer.Option(help="Only bring the word of an examiner who is not in the room (`verify open` wrote it)."),
    ] = None,
    *,
    room: InRoom,
) -> None:
    """Open the answers by layers that are sealed to you, and put your signed word into the room.

    An examiner who is not in the room gets the answers as files (--save), runs `quorumark verify open`, and any
    member brings its word (--word): its signature says whose it is.
    """
    from quorumark.consortium.home import read_as, read_file
    from quorumark.errors import InputError
    from quorumark.files import write_private
    from quorumark.model.layout import ModelLayout
    from quorumark.report.layers import layers_page
    from quorumark.room.examining import bring_word, examine_in_room, save_sealed
    from quorumark.verify.reference import LAYOUT

    if (save is not None) + (word is not None) + (report is not None) > 1:
        raise InputError("--save, --word and --report", "exclude each other")
    client, identity = room.connect()
    member = room.member
    if save is not None:
        typer.echo(f"{save_sealed(client, member, query, save)} sealed answers are in {save}")
        return
    if word is not None:
        brought = bring_word(client, member, identity, query, read_file(word, "an examiner's word"))
        typer.echo(f"Q = {brought.q}; the examiner's word is in the room")
        return
    examined, manifest = examine_in_room(client, member, identity, query)
    if report is not None:
        ours = member.consortium_of(manifest.digest().hex())
        if layout is None and ours is None:
            raise InputError("--layout", "must be given where this home has no such consortium")
        path = layout if layout is not None or ours is None else ours.path / LAYOUT
        shape = read_as(path or Path(LAYOUT), "a layout", ModelLayout.from_bytes)
        write_private(report, layers_page(examined, manifest, shape).encode())
    wrong = ", ".join(manifest.terms.member(point).name for point in examined.opened.wrong)
    typer.echo(f"Q = {examined.opened.q}; your word is in the room" + (f"; wrong: {wrong}" if wrong else ""))
    typer.echo(f"it is about {manifest.terms.name}, manifest {manifest.digest().hex()}: compare this digest by phone")


@app.command("accept-ledger")
@bundled
def accept_other_ledger(
    name: Annotated[str, typer.Argument(help="Whose ledger was lost; your own name, if it is yours.")],
    query: Annotated[str, typer.Argument(help="The start of the digest of the query that was stopped.")] = "",
    *,
    room: InRoom,
) -> None:
    """Accept that a member's ledger was lost, and begins anew. Ask the member by phone first: whoever sets ledgers back
    can ask for more than the budget."""
    from quorumark.room.heads import accept_ledger

    client, identity = room.connect()
    typer.echo(accept_ledger(client, room.member, identity, name, query))


@app.command("invite")
@bundled
def invite_people(
    count: Annotated[int, typer.Argument(help="How many.", min=1, max=100)] = 1,
    *,
    room: InRoom,
) -> None:
    """Print invitations, each for one person and a week (the founder)."""
    client, _ = room.connect()
    for text in client.invite(count):
        _say(f"quorumark room join '{text}'")


@app.command("remove")
@bundled
def remove_person(
    name: Annotated[str, typer.Argument(help="Whose place in the room ends.")],
    *,
    room: InRoom,
) -> None:
    """Take somebody's place in the room away (the founder). Their share of the key is another matter: reshare."""
    client, _ = room.connect()
    client.post("remove", name=name)
    typer.echo(f"{name} sees nothing of the room any more; what they sent stays")


@app.command("delete")
@bundled
def delete_suspect(
    query: Annotated[str, typer.Argument(help="The query's digest, or its start.")],
    *,
    room: InRoom,
) -> None:
    """Delete a suspect's files from the room: who uploaded them may, and the founder."""
    client, _ = room.connect()
    found = [one for one in client.whole_log() if one.name.startswith(f"query/{query}") and "/file/" in one.name]
    for sha256 in {one.sha256 for one in found if not one.gone}:
        client.post("delete", sha256=sha256)
    typer.echo(f"{len(found)} files deleted" if found else "there are no files of such a query")


@app.command("link")
@bundled
def make_link(
    label: Annotated[str, typer.Option(help="What you will know it by, like the court's name.")],
    days: Annotated[int, typer.Option(help="How long it is good.", min=1, max=3650)] = 30,
    query: Annotated[str, typer.Option(help="The start of a query's digest: the link shows that one only.")] = "",
    *,
    room: InRoom,
) -> None:
    """Make a read-only link for a judge or an auditor. Whoever has it can look, until it ends or is revoked."""
    from quorumark.errors import InputError

    client, _ = room.connect()
    scope = ""
    if query:
        names = {one.name.split("/")[1] for one in client.whole_log() if one.name.startswith(f"query/{query}")}
        if len(names) != 1:
            raise InputError("--query", "must be the start of one query's digest", query)
        scope = names.pop()
    _say(client.link(label, scope, days))


@app.command("unlink")
@bundled
def revoke_link(
    label: Annotated[str, typer.Argument(help="The link's label.")],
    *,
    room: InRoom,
) -> None:
    """Revoke a link: what it opened is closed at once."""
    client, _ = room.connect()
    client.post("unlink", label=label)
    typer.echo("revoked")


@app.command("demo")
def demo_room(
    out: Annotated[Path | None, typer.Option(help="Keep everything in this new folder.")] = None,
    stay: Annotated[
        bool, typer.Option("--stay", help="Leave the room and the agents running, to look around.")
    ] = False,
) -> None:
    """A room and five agents on this machine make a key, mark a model, and prove that it is theirs."""
    from quorumark.room.demo import run

    raise typer.Exit(0 if run(out, stay=stay, say=_say) == "PASSED" else 1)
