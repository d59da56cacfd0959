"""What lies before the member: the agent's view of terms and queries, each checked here, and the decisions on them.

The worker (`agent`) fills it, the page and the terminal read it and decide. A decision names what it is about by its
digest, and by the digest of what was shown: if anything changed in between, it does not count.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Literal

from quorumark.canonical import canonical, digest
from quorumark.errors import RoomError
from quorumark.room.client import Notice
from quorumark.room.place import Decisions

__all__ = ["Desk", "Matter", "Mirror", "State"]

State = Literal["checking", "waiting", "working", "declined", "refused", "done"]


@dataclass(frozen=True)
class Matter:
    """Something to decide on. `facts` were computed by this agent; `status` says how far it is."""

    kind: Literal["terms", "query", "call", "audit", "examine"]
    digest: str
    title: str
    facts: tuple[tuple[str, str], ...] = ()
    state: State = "checking"
    status: str = ""
    code: str = ""
    verdict: str = ""
    people: tuple[tuple[str, str], ...] = ()  # of the signed roster, and what each did
    late: bool = False  # it is done without this member, whose answer can still be added

    @property
    def shown(self) -> str:
        """Of all that the member sees before it decides."""
        facts = [list(pair) for pair in self.facts]
        return digest("room shown", canonical({"kind": self.kind, "digest": self.digest, "facts": facts})).hex()


class Mirror:
    """What the room says is there, by author and name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._notices: dict[tuple[str, str], Notice] = {}

    def __len__(self) -> int:
        with self._lock:
            return len(self._notices)

    def replace(self, notices: list[Notice]) -> None:
        with self._lock:
            self._notices = {}
        self.add(notices)

    def add(self, notices: list[Notice]) -> None:
        with self._lock:
            for one in notices:
                self._notices[one.author, one.name] = one

    def find(self, author: str, name: str) -> Notice | None:
        with self._lock:
            found = self._notices.get((author, name))
        return None if found is None or found.gone else found

    def named(self, start: str, end: str) -> list[Notice]:
        """Entries whose names start and end like this, in the room's order."""
        with self._lock:
            every = list(self._notices.values())
        return [one for one in every if one.name.startswith(start) and one.name.endswith(end) and not one.gone]


class Desk:
    """All matters, for several threads."""

    def __init__(self, decisions: Decisions) -> None:
        self._lock = threading.Lock()
        self._matters: dict[str, Matter] = {}
        self._decisions = decisions
        self.news = threading.Event()
        self.troubles: dict[str, str] = {}

    def matters(self) -> list[Matter]:
        with self._lock:
            return list(self._matters.values())

    def find(self, about: str) -> Matter | None:
        with self._lock:
            return self._matters.get(about)

    def put(self, matter: Matter) -> None:
        with self._lock:
            self._matters[matter.digest] = matter

    def move(
        self,
        about: str,
        state: State,
        status: str = "",
        code: str = "",
        verdict: str = "",
        people: tuple[tuple[str, str], ...] = (),
        late: bool = False,
    ) -> None:
        with self._lock:
            one = self._matters[about]
            one = replace(one, verdict=verdict or one.verdict, people=people or one.people)
            self._matters[about] = replace(one, state=state, status=status, code=code, late=late)

    def trouble(self, where: str, text: str) -> None:
        """What goes wrong, by where: shown on the page until it is over ("")."""
        with self._lock:
            self.troubles = {k: v for k, v in {**self.troubles, where: text}.items() if v}

    def said(self, about: str) -> tuple[str, str]:
        """What was decided, and by whom."""
        return self._decisions.of(about), self._decisions.by(about)

    def withdraw(self, about: str) -> None:
        """What a policy decided that is not given any more: a person decides."""
        with self._lock:
            self._decisions.withdraw(about)

    def decide(self, about: str, shown: str, said: str, by: str) -> None:
        """The member's word. It counts for exactly what was shown."""
        with self._lock:
            matter = self._matters.get(about)
            waits = matter is not None and (matter.state == "waiting" or (matter.late and said == "yes"))
            if matter is None or matter.shown != shown or not waits or said not in ("yes", "no"):
                raise RoomError(
                    "this is not what was shown, or is decided already: look at the page again", code="room.not-shown"
                )
            self._decisions.make(about, said, by)
        self.news.set()
