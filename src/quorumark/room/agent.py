"""The agent: beside a member's keys, it does the member's steps in a room, and asks the member what is the member's.

    agent = Agent(home, unlock, policy)
    agent.start(); …; agent.stop()

One thread listens to the room, one works, one asks what the member wrote on its page; the page (`agent_page`) and the
terminal read the desk. One agent works for a home at a time. After a crash it goes on from what is on disk: all that it
sent is kept first, and is sent again if the room does not have it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from quorumark.consortium.home import HomeFolder
from quorumark.consortium.keystore import Unlock
from quorumark.consortium.records import Terms
from quorumark.errors import BusyError, QuorumarkError, RoomError
from quorumark.files import locked
from quorumark.room.asking import Asking
from quorumark.room.auditing import Auditing
from quorumark.room.calls import put_call
from quorumark.room.changing import Changing
from quorumark.room.client import MOST_ENTRIES, Client
from quorumark.room.combining import Papers
from quorumark.room.desk import Desk, Mirror
from quorumark.room.drafts import Drafts
from quorumark.room.examining import Examining
from quorumark.room.founding import Founding
from quorumark.room.layering import Choices, find_choices
from quorumark.room.people import introduce, keep_people
from quorumark.room.place import Decisions, Place, Policy
from quorumark.room.seat import Seat
from quorumark.room.shares import OwnShare, Signer
from quorumark.room.standing import Standings
from quorumark.verify.guard import budget
from quorumark.verify.ledger import Ledger

__all__ = ["Agent", "enter"]

_LISTEN = 20  # seconds that the room holds a question for news
_PAUSE = 2.0  # between two looks at what is on disk
_RETRY = (0.5, 10.0)  # seconds until an unreachable room is tried again: first, and at most
Note = Callable[[str], None]


def enter(client: Client, place: Place, code: str = "") -> None:
    """Joins with an invitation; who is a member already needs none."""
    if code:
        client.join(code)
    client.about()  # a stranger is refused here
    place.make()


class Agent:
    """One member's agent in one room."""

    def __init__(
        self,
        home: HomeFolder,
        unlock: Unlock,
        policy: Policy | None = None,
        note: Note = lambda _: None,
        cafile: Path | None = None,
        signer: Path | None = None,
    ) -> None:
        """`signer`: the socket of the process that holds the share, where it is not in this home."""
        self.home, self.place = home, Place(home.path)
        self.settings = self.place.settings()
        self.identity = home.identity(unlock)
        self.desk = Desk(Decisions(self.place.folder() / "decisions.json"))
        self.drafts = Drafts(home, self.identity, self.place)
        self.stopped = threading.Event()
        self._mirror, self._note, self._cafile = Mirror(), note, cafile
        share = OwnShare(home, unlock) if signer is None else Signer(home, self.identity, signer)
        where = (self.place, self.desk, self._mirror, policy or Policy(), share)
        self._seat = Seat(home, unlock, self.identity, *where)
        self._founding, self._asking = Founding(self._seat), Asking(self._seat)
        self._changing, self._auditing = Changing(self._seat), Auditing(self._seat)
        self._standings, self._examining = Standings(self._seat), Examining(self._seat)
        self._threads: list[threading.Thread] = []
        self._alone = contextlib.ExitStack()
        self._again = threading.Event()
        self._first = True  # nothing is known of the room yet
        self._told: dict[str, str] = {}
        self._ear = self.client()

    def client(self) -> Client:
        """A connection of its own, for one thread."""
        return Client(self.settings.address, self.identity, self.settings.consortium, self._cafile)

    def start(self) -> None:
        """Begins to work; a BusyError if another agent works for this home."""
        try:
            self._alone.enter_context(locked(self.place.base / ".lock", wait=False))
        except BusyError:
            raise BusyError(
                f"another agent works for {str(self.home.path)!r}: use its page, or stop it first"
            ) from None
        self.drafts.clear()
        for work in (self._listen, self._work, self._ask):
            thread = threading.Thread(target=work, name=f"room-{work.__name__.strip('_')}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        self.stopped.set()
        self.desk.news.set()
        self.drafts.news.set()
        self._ear.interrupt()
        for thread in self._threads:
            thread.join(timeout=60)
        self._alone.close()

    # --- listening ---

    def _listen(self) -> None:
        client, pause, after, away = self._ear, _RETRY[0], 0, True
        while not self.stopped.is_set():
            try:
                if away:
                    self._mirror.replace(client.whole_log())
                    after = max((one.number for one in self._mirror.named("", "")), default=0)
                    self._again.set()
                    self.desk.trouble("room", "")
                    away, pause = False, _RETRY[0]
                    self.desk.news.set()
                found = client.log(after, _LISTEN if not self.stopped.is_set() else 0)
                if found:
                    if len(self._mirror) + len(found) > MOST_ENTRIES:
                        raise RoomError("the room's log has no end: it is not read", code="room.answer")
                    self._mirror.add(found)
                    after = max(after, *(one.number for one in found))
                    self.desk.news.set()
            except RoomError as error:
                self.desk.trouble("room", str(error))
                away = True
                self.stopped.wait(pause)
                pause = min(_RETRY[1], 2 * pause)
            except Exception as error:  # noqa: BLE001 - a hostile room must not end the agent
                self.desk.trouble("room", f"the room's answer cannot be used ({type(error).__name__})")
                away = True
                self.stopped.wait(_RETRY[1])
        client.close()

    # --- working ---

    def _work(self) -> None:
        client = self.client()
        while not self.stopped.is_set():
            self.desk.news.clear()
            if self._again.is_set():
                self._again.clear()
                self._first = False
                self._founding.sent_again()
                self._changing.sent_again()
                self._seat.sent.clear()  # what was sent may be lost there
            try:
                if not self._first:
                    introduce(client, self.identity, self._mirror, self.settings.examples)
                    keep_people(client, self.place, self._mirror)
                    every = (self._standings, self._founding, self._changing, self._auditing, self._asking)
                    for part in (*every, self._examining):
                        part.step(client)
                self.desk.trouble("agent", "")
            except QuorumarkError as error:
                self.desk.trouble("agent", str(error))
            except Exception as error:  # noqa: BLE001 - what somebody put into the room must not end the agent
                self.desk.trouble("agent", f"a step failed ({type(error).__name__})")
            self._tell()
            self.desk.news.wait(_PAUSE)
        client.close()

    def _ask(self) -> None:
        """Questions from the page: reading and sending a suspect takes long, and holds up nothing else."""
        client = self.client()
        while not self.stopped.is_set():
            self.drafts.news.clear()
            with contextlib.suppress(QuorumarkError, OSError):  # the room is away: the listening thread says so
                self.drafts.step(client)
            self.drafts.news.wait(_PAUSE)
        client.close()

    def _tell(self) -> None:
        """A line for everything that changed."""
        for matter in self.desk.matters():
            text = f"{matter.title} {matter.state}" + (f": {matter.status}" if matter.status else "")
            if self._told.get(matter.digest) != text:
                self._told[matter.digest] = text
                self._note(text)
        for where, text in self.desk.troubles.items():
            if self._told.get(where) != text:
                self._told[where] = text
                self._note(text)

    # --- what the member sees ---

    def terms(self) -> Terms | None:
        """Of the consortium that the member asks for; None while there is no key, or several."""
        try:
            terms = self.home.only_consortium().manifest().terms
        except QuorumarkError:
            return None
        return terms if terms.has_key else None

    def report(self, about: str) -> Papers | None:
        """Where certificate and report of a query are, once they are there."""
        return self._asking.report(about)

    def numbers(self, about: str) -> Path | None:
        """The numbers by layer of a query that this member examined: for its own page alone."""
        return self._examining.numbers(about)

    def choices(self) -> Choices | None:
        """What a question can be about; None while there is no key, or several."""
        return None if self.terms() is None else find_choices(self.home, self.place)

    def fetch(self, about: str) -> None:
        """The member wants to see a suspect that is too large to be fetched unasked."""
        self._asking.fetch(about)

    def call_refresh(self, purpose: str) -> None:
        """Calls all members to make new shares: every one of them decides, this one, too."""
        client = self.client()
        try:
            put_call(client, self.home, self._seat.unlock, self.home.only_consortium(), purpose)
        finally:
            client.close()

    def standing(self) -> list[tuple[str, str, str]]:
        """Each consortium of this home, by its signed manifest: name, what it takes, what is used of the budget."""
        found = []
        for place in self.home.consortia():
            if not place.manifest_path.exists():
                continue
            try:
                manifest = place.manifest()
                terms = manifest.terms
                used = sum(Ledger.open(place, manifest).equations().values())
            except QuorumarkError as error:
                found.append((place.path.name, "cannot be read", str(error)))
                continue
            takes = f"{terms.threshold} of {terms.members}: {', '.join(m.name for m in terms.roster)}"
            spent = (
                f"{used} of {budget(terms)} equations used; epoch {manifest.epoch}; manifest {manifest.digest().hex()}"
            )
            found.append((terms.name, takes, spent))
        return found
