"""An agent's part in making a key: terms that were proposed, the member's word, and the ceremony over a local folder.

The ceremony itself is `setup.exchange`, unchanged; `carrying` brings its messages to the room and back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from quorumark.consortium.hiding import check_roster
from quorumark.consortium.home import ConsortiumFolder
from quorumark.consortium.identity import Header, Identity, open_message
from quorumark.consortium.records import Member, Terms
from quorumark.errors import BusyError, CeremonyError, MessageError, QuorumarkError, RoomError
from quorumark.files import write_shared
from quorumark.room.carrying import Carrier
from quorumark.room.client import Client, Notice
from quorumark.room.desk import Matter, State
from quorumark.room.manifests import publish_chain
from quorumark.room.numbering import sender_of
from quorumark.room.seat import Seat
from quorumark.setup.dkg import check_terms
from quorumark.setup.exchange import expected_messages
from quorumark.verify.public import agreed, fits, keep_agreed
from quorumark.verify.reference import ANCHOR

__all__ = ["Founding", "facts_of", "fetch_agreed", "flat", "propose"]

_LARGEST_TERMS = 1 << 22
_LARGEST_RECORD = 1 << 26
_WORD = 1 << 13
_PROPOSED = re.compile("proposal/([0-9a-f]{64})/word.msg")


def _word(step: str, terms: Terms, sender: int) -> Header:
    about = terms.digest().hex()
    return Header(about, about, f"room/{step}", sender)


def propose(client: Client, identity: Identity, folder: Path) -> str:
    """Puts terms and the files beside them into the room; the terms' digest."""
    terms = Terms.from_bytes((folder / "terms.json").read_bytes())
    if terms.setup != "dkg":
        raise RoomError("terms in a room must be for a setup without a dealer (dkg)", code="room.not-proposed")
    point, about = terms.point_of(identity.ed25519), terms.digest().hex()
    for name in agreed(terms):
        if not (folder / name).is_file() or not fits(name, folder, terms):
            raise RoomError(
                f"{name} beside the terms is missing, or not what they name: take the folder as consortium create "
                "wrote it",
                code="room.not-proposed",
            )
    for name in ("terms.json", *agreed(terms)):
        client.upload(folder / name, f"proposal/{about}/{name}")
    client.upload(identity.write(_word("proposal", terms, point), b"proposed"), f"proposal/{about}/word.msg")
    return about


def fetch_agreed(client: Client, terms: Terms, folder: Path, entries: Callable[[str], Sequence[Notice]]) -> None:
    """The files beside terms, into a folder; each is what the terms name. `entries`: those with a file's name."""
    for name in agreed(terms):
        target, problem = folder / name, f"{name} is not in the room"
        for notice in entries(name):
            if not target.exists():
                if name == ANCHOR:
                    most = (
                        16 * _LARGEST_RECORD + 64 * terms.coordinates
                    )  # a model, in any format, with what cannot carry
                    if notice.size > most:
                        raise RoomError(f"the anchor has {notice.size:,} bytes, too many for it", code="room.too-large")
                    client.download(notice.sha256, notice.size, target)
                else:
                    write_shared(target, client.small(notice, _LARGEST_RECORD))
            if fits(name, folder, terms):
                break
            target.unlink()
            problem = f"{name} in the room is not what the terms name"
        else:
            raise RoomError(problem, code="room.other-terms")


def _expected(terms: Terms, point: int) -> dict[str, tuple[Member, int]]:
    """The messages of others that this member takes in a setup: their senders, and the most bytes of each."""
    names = expected_messages(terms, point)
    return {name: (terms.member(sender_of(name)), most) for name, most in names.items()}


class Founding:
    """One member's setups in a room."""

    def __init__(self, seat: Seat) -> None:
        self._home, self._identity = seat.home, seat.identity
        self._place, self._desk, self._mirror, self._policy = seat.place, seat.desk, seat.mirror, seat.policy
        self._seat = seat
        self._terms: dict[str, Terms] = {}
        self._carriers: dict[str, Carrier] = {}
        self._refused: dict[tuple[str, str, str], frozenset[str]] = {}  # what was there when it was refused

    def step(self, client: Client) -> None:
        """Does what can be done now."""
        for path in sorted(self._place.outbox.glob("*.folder")):  # `consortium create --room` wrote it
            propose(client, self._identity, Path(path.read_text(encoding="utf-8")))
            path.unlink()
        for notice in self._mirror.named("proposal/", "/word.msg"):
            found = _PROPOSED.fullmatch(notice.name)
            if found is None:
                continue
            about = found[1]
            if about not in self._terms:
                self._look(client, about, notice)
            if about in self._terms:
                self._go_on(client, about)

    # --- terms ---

    def _look(self, client: Client, about: str, word: Notice) -> None:
        """Fetches terms and checks all that can be checked before the member is asked."""
        there = frozenset(one.sha256 for one in self._mirror.named(f"proposal/{about}/", ""))
        if self._refused.get((about, word.author, word.sha256)) == there:
            return  # nothing new about it
        try:
            terms = self._fetch_terms(client, about, word)
        except RoomError as error:
            if error.code == "room.unreachable":
                raise
            self._refuse(about, word, error, there)
            return
        except QuorumarkError as error:
            self._refuse(about, word, error, there)
            return
        self._terms[about] = terms
        self._desk.put(Matter("terms", about, f"Make a key as {terms.name!r}", facts_of(terms, self._own(terms))))
        self._desk.move(about, "waiting")

    def _refuse(self, about: str, word: Notice, error: QuorumarkError, there: frozenset[str]) -> None:
        """Each member's own word: one that was sent in another's place hides nothing."""
        self._refused[about, word.author, word.sha256] = there
        code = error.code or "room.other-terms"
        self._desk.put(Matter("terms", about, f"Terms {about[:12]}…", (), "refused", str(error), code))

    def _fetch_terms(self, client: Client, about: str, word: Notice) -> Terms:
        author, folder = word.author, self._place.folder("proposals", about)
        terms = Terms.from_bytes(
            client.small(self._seat.there(author, f"proposal/{about}/terms.json", "room.not-proposed"), _LARGEST_TERMS)
        )
        if terms.digest().hex() != about:
            raise RoomError("the room's terms have another digest than their name says", code="room.other-terms")
        open_message(client.small(word, _WORD), terms, _word("proposal", terms, terms.point_of(author)))
        self._check_own(terms)
        check_terms(terms)
        check_roster(terms)
        write_shared(folder / "terms.json", terms.to_bytes())
        fetch_agreed(
            client,
            terms,
            folder,
            lambda name: [self._seat.there(author, f"proposal/{about}/{name}", "room.not-proposed")],
        )
        return terms

    def _own(self, terms: Terms) -> str:
        return terms.member(terms.point_of(self._identity.ed25519)).name

    def _check_own(self, terms: Terms) -> None:
        """This member's line in the roster is what it said itself."""
        own = terms.member(terms.point_of(self._identity.ed25519))
        said = self._place.settings().examples
        if own.x25519 != self._identity.x25519 or own.name != self._identity.name:
            raise RoomError("the terms have another card of this member: they are refused", code="room.other-terms")
        if said and own.examples != said:
            raise RoomError(
                f"the terms say {own.examples:,} examples for this member, which has {said:,}: they are refused",
                code="room.other-terms",
            )
        if terms.setup != "dkg":
            raise RoomError("the terms are for another setup than one without a dealer", code="room.other-terms")

    # --- the ceremony ---

    def _go_on(self, client: Client, about: str) -> None:
        matter, terms = self._desk.find(about), self._terms[about]
        if matter is None or matter.state in ("done", "refused", "declined"):
            return
        said, by = self._desk.said(about)
        made = by == "policy" and self._home.consortium(terms).manifest_path.exists()
        if by == "policy" and not made and not self._policy.agrees(about):
            self._desk.withdraw(about)
            self._desk.move(about, "waiting")
            return
        if not said and self._policy.agrees(about):
            self._desk.decide(about, matter.shown, "yes", "policy")
            said = "yes"
        if said == "no":
            self._desk.move(about, "declined", "you declined")
        if said != "yes":
            return
        point = terms.point_of(self._identity.ed25519)
        if self._mirror.find(self._identity.ed25519, f"agreed/{about}.msg") is None:
            client.upload(self._kept_word(about, terms, point), f"agreed/{about}.msg")
        ours, carrier = self._home.consortium(terms), self._carrier(about, point)
        try:
            if not ours.manifest_path.exists():
                carrier.check_not_set_back(client)
            carrier.fetch(client, _expected(terms, point))
            self._visit(about, terms, carrier)
        except BusyError as error:
            self._desk.move(about, "working", str(error))
        except MessageError as error:
            carrier.stuck()
            self._desk.move(about, "working", str(error), error.code)
        except (CeremonyError, RoomError) as error:
            if error.code == "room.unreachable":
                raise
            state: State = "working" if error.code == "room.signer" else "refused"  # its operator can mend it
            self._desk.move(about, state, str(error), error.code)
            return
        finally:
            carrier.send(client)
        self._finish(client, about, terms, ours)

    def _carrier(self, about: str, point: int) -> Carrier:
        if about not in self._carriers:
            folder = self._place.folder("exchange", about)
            self._carriers[about] = Carrier(self._seat, f"setup/{about}/", folder, point)
        return self._carriers[about]

    def _kept_word(self, about: str, terms: Terms, point: int) -> bytes:
        path = self._place.folder("exchange") / f"{about}.agreed"
        if not path.exists():
            write_shared(path, self._identity.write(_word("agreed", terms, point), b"agreed"))
        return path.read_bytes()

    def _visit(self, about: str, terms: Terms, carrier: Carrier) -> None:
        waiting = carrier.visit(lambda: self._seat.share.set_up(terms, carrier.folder))
        if waiting is not None and not waiting.finished:
            names = ", ".join(waiting.waiting)
            self._desk.move(about, "working", f"the key is being made; waiting for {names} ({waiting.step})")

    def sent_again(self) -> None:
        for carrier in self._carriers.values():
            carrier.sent_again()

    def _finish(self, client: Client, about: str, terms: Terms, ours: ConsortiumFolder) -> None:
        progress = self._carriers[about].progress
        if progress is None or progress.manifest is None:
            return
        strange = keep_agreed(ours, self._place.folder("proposals", about))
        publish_chain(client, self._seat, ours)
        left = f"; {', '.join(strange)} was not what the terms name" if strange else ""
        count = f"any {terms.threshold} of {terms.members} can prove ownership"
        self._desk.move(about, "done", f"the key is made, and your share is sealed in your home; {count}{left}")


def facts_of(terms: Terms, own: str) -> tuple[tuple[str, str], ...]:
    """What a person must see before it agrees: what matters most in plain words, then every field of the terms."""
    people = ", ".join(f"{m.name} ({m.examples:,} examples)" for m in terms.roster)
    settings = {f.name: "not set: the default" for f in fields(terms.policy)} | terms.policy.as_dict()
    return (
        ("members", people),
        ("you are", own),
        ("it takes", f"{terms.threshold} of {terms.members} to prove ownership"),
        ("carrying weights", f"{terms.coordinates:,}"),
        ("alignment", "agreed" if terms.policy.groups else "not possible"),
        ("files", "layout, initial model and groups are what the terms name"),
        *flat("terms", terms.as_dict() | {"policy": settings}),
        ("digest, to compare by phone with all members", terms.digest().hex()),
    )


def flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Every leaf of a record with its path, like terms.policy.z: a new field is shown without a line here."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from flat(f"{path}.{name}", inner)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value, 1):
            yield from flat(f"{path}.{number}", inner)
    else:
        yield path, "empty" if value == "" else str(value)
