"""Ledgers compared before a member answers: every agent says its head for each query, and once more when it has
answered; each remembers the others'.

An agent answers once t−1 others have said theirs for this very query, and each continues what it saw of them before.
One that does not stops the answer; so does a head of another member that saw something else. What a room withholds is
waited for, or, if nobody was shown it, not noticed. (`verify.heads` has what contradicts what.)
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from quorumark.canonical import canonical
from quorumark.checks import require
from quorumark.consortium.home import ConsortiumFolder, HomeFolder
from quorumark.consortium.identity import Identity
from quorumark.consortium.records import Manifest, Member
from quorumark.errors import QuorumarkError, RoomError
from quorumark.files import locked, write_private
from quorumark.room.client import Client, Notice
from quorumark.room.place import Place
from quorumark.room.question import Asked
from quorumark.room.seat import Seat, sha256_of
from quorumark.verify.evidence import Query, now
from quorumark.verify.heads import Head, contradiction, differs, occasion
from quorumark.verify.ledger import Ledger

__all__ = ["Heads", "accept_ledger", "accepted_standings", "say_head"]

_LARGEST = 1 << 24  # a ledger has 100,000 lines at most
_ASKED, _ANSWERED = "head.json", "answered.json"


def _folder(place: Place, ours: ConsortiumFolder) -> Path:
    return place.folder("heads", ours.path.name)


def _own(place: Place, ours: ConsortiumFolder) -> Path:
    """This member's own heads, by their numbers."""
    return place.folder("heads", ours.path.name, "own")


def _known(place: Place, ours: ConsortiumFolder, key: str) -> Head | None:
    path = _folder(place, ours) / f"{key}.json"
    return Head.from_bytes(path.read_bytes()) if path.exists() else None


def _ignored(place: Place, ours: ConsortiumFolder, key: str) -> set[str]:
    """Heads of a past that a person has said is lost (`accept_ledger`)."""
    path = _folder(place, ours) / f"{key}.past"
    return set(json.loads(path.read_bytes())) if path.exists() else set()


def accepted_standings(place: Place, ours: ConsortiumFolder) -> set[str]:
    """This member's own words on its ledger, from before it was lost."""
    path = _folder(place, ours) / "standing.past"
    return set(json.loads(path.read_bytes())) if path.exists() else set()


def _last(place: Place, ours: ConsortiumFolder) -> Head | None:
    """The latest head that this member said."""
    path = max(_own(place, ours).glob("*.json"), key=lambda path: int(path.stem), default=None)
    return None if path is None else Head.from_bytes(path.read_bytes())


def say_head(
    client: Client,
    home: HomeFolder,
    identity: Identity,
    ours: ConsortiumFolder,
    manifest: Manifest,
    query: Query,
    answered: bool = False,
) -> None:
    """This member's head for a query, or for its answer: made once, and sent."""
    place, what = Place(home.path), _ANSWERED if answered else _ASKED
    path = place.folder("answers") / f"{query.digest()}-{what}"
    with locked(place.base / ".heads.lock", wait=True):  # the asker's command says it, too
        if not path.exists():
            own, terms, last = _own(place, ours), manifest.terms, _last(place, ours)
            known = {m.ed25519: _known(place, ours, m.ed25519) for m in terms.roster if m.ed25519 != identity.ed25519}
            what_for = occasion(query.digest(), answered)
            if last is not None and what_for in last.said:  # a crash came between the two files
                head = Head.from_bytes((own / f"{last.said.index(what_for) + 1}.json").read_bytes())
            else:
                head = Head.sign(
                    identity,
                    manifest=query.manifest,
                    point=terms.point_of(identity.ed25519),
                    said=(*(() if last is None else last.said), what_for),
                    lines=Ledger.open(ours, manifest).lines,
                    seen={key: one.as_seen for key, one in known.items() if one is not None},
                    created=now(),
                )
            write_private(own / f"{head.number}.json", head.to_bytes())
            write_private(path, head.to_bytes())
    client.upload(path, f"query/{query.digest()}/{what}")


class Heads:
    """One member's view of all ledgers."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._strange: set[str] = set()  # files in this member's name that it did not sign
        self._compared: set[str] = set()  # what others said when they answered
        self._junk: set[tuple[str, str]] = set()  # whose, and which file: what will never be a head of theirs
        self._sent: dict[tuple[Path, int], str] = {}  # SHA-256 of this member's own heads

    def say(self, client: Client, asked: Asked, answered: bool = False) -> None:
        seat, name = self._seat, f"{asked.start}/{_ANSWERED if answered else _ASKED}"
        self._check_own(client, asked)
        if seat.mirror.find(seat.key, name) is None and name not in seat.sent:
            say_head(client, seat.home, seat.identity, asked.ours, asked.manifest, asked.query, answered)
            seat.sent.add(name)

    def _of(self, author: str, what: str) -> list[Notice]:
        return [one for one in self._seat.mirror.named("query/", f"/{what}") if one.author == author]

    def _check_own(self, client: Client, asked: Asked) -> None:
        """The room has no head that this member signed and this home does not know."""
        kept = {self._hash(path) for path in _own(self._seat.place, asked.ours).glob("*.json")}
        for notice in self._of(self._seat.key, _ASKED) + self._of(self._seat.key, _ANSWERED):
            if notice.sha256 in kept | self._strange:
                continue
            try:
                head = Head.from_bytes(client.small(notice, _LARGEST))
                head.verify_by(self._seat.key, "this member")
            except QuorumarkError as error:
                if error.code == "room.unreachable":
                    raise
                self._strange.add(notice.sha256)
                continue
            if self._seat.home.consortium_of(head.manifest) is None:
                continue
            raise RoomError(
                "the room has a head of this member's ledger that this home did not send: the home was set back to an "
                "earlier day, or another copy of it is in use; nothing is answered until that is mended "
                f"(if the ledger is lost: quorumark room accept-ledger {self._seat.identity.name!r})",
                code="room.set-back",
            )

    def _hash(self, path: Path) -> str:
        written = path.stat().st_mtime_ns
        if (path, written) not in self._sent:
            self._sent[path, written] = sha256_of(path)
        return self._sent[path, written]

    def compare(self, client: Client, asked: Asked) -> list[str]:
        """The names of the others whose ledgers continue what this member saw of them; an error for one that does not.

        A head that is not its author's, or not for this query, is as good as none.
        """
        found: dict[str, tuple[Member, Head]] = {}
        for member in asked.terms.roster:
            if member.ed25519 == self._seat.key:
                continue
            self._compare_answers(client, asked, member)
            notice = self._seat.mirror.find(member.ed25519, f"{asked.start}/{_ASKED}")
            head = None if notice is None else self._read(client, asked, member, notice)
            if head is not None:
                self._compare_one(asked, member, head)
                found[member.ed25519] = member, head
        for member, head in found.values():
            self._compare_seen(asked, member, head)
        return [member.name for member, _ in found.values()]

    def _read(self, client: Client, asked: Asked, member: Member, notice: Notice) -> Head | None:
        where = notice.name + member.name
        try:
            head = Head.from_bytes(self._seat.cached(client, notice, _LARGEST))
            head.verify(asked.terms)
            wanted = (asked.query.manifest, occasion(asked.query.digest(), False), member.point)
            sound = (head.manifest, head.occasion, head.point) == wanted
            require(sound, f"the head of {member.name!r}", "must be its own, and for this query")
        except QuorumarkError as error:
            if error.code == "room.unreachable":
                raise
            self._seat.desk.trouble(where, f"the ledger's head of {member.name} is not used: {error}")
            return None
        self._seat.desk.trouble(where, "")
        return head

    def _compare_answers(self, client: Client, asked: Asked, member: Member) -> None:
        """What a member said when it answered other queries: its ledger has those answers since then."""
        ignored = _ignored(self._seat.place, asked.ours, member.ed25519)
        for notice in self._of(member.ed25519, _ANSWERED):
            if notice.sha256 in self._compared | ignored or (notice.author, notice.sha256) in self._junk:
                continue
            try:
                data = self._seat.cached(client, notice, _LARGEST)
            except QuorumarkError as error:
                if error.code == "room.unreachable":
                    raise
                continue  # the room has another file
            try:
                head = Head.from_bytes(data)
                head.verify_by(member.ed25519, member.name)
            except QuorumarkError:  # looked at once, and not kept: there may be many, and large ones
                self._junk.add((notice.author, notice.sha256))
                self._seat.forget(notice)
                continue
            if _same(self._seat.home.consortium_of(head.manifest), asked.ours):
                self._compare_one(asked, member, head)
            self._compared.add(notice.sha256)

    def _compare_one(self, asked: Asked, member: Member, head: Head) -> None:
        known = _known(self._seat.place, asked.ours, member.ed25519)
        if known is not None and (how := contradiction(known, head)):
            raise RoomError(
                f"the ledger of {member.name} does not continue what this member saw of it ({how}): it was set back, "
                f"or there are two copies of it; nothing is answered. Ask {member.name} by phone; if its ledger is "
                f"lost for good, all members run: quorumark room accept-ledger {member.name!r} "
                f"{asked.query.digest()[:16]}, and the query is asked anew",
                code="room.ledger-head",
            )
        if known is None or head.number > known.number:
            write_private(_folder(self._seat.place, asked.ours) / f"{member.ed25519}.json", head.to_bytes())

    def _compare_seen(self, asked: Asked, witness: Member, head: Head) -> None:
        """What another member saw of everybody's ledgers, this member's among them, and what is known of them here."""
        for member in asked.terms.roster:
            told = head.seen.get(member.ed25519)
            if told is None:
                continue
            own = member.ed25519 == self._seat.key
            known = None if own else _known(self._seat.place, asked.ours, member.ed25519)
            if own:
                lines = Ledger.open(asked.ours, asked.manifest).lines
                last = _last(self._seat.place, asked.ours)
                wrong = last is None or told.number > last.number or differs(told, last.as_seen, lines)
            else:
                wrong = known is not None and differs(told, known.as_seen, known.lines)
            if wrong:
                whose = "this member's ledger" if own else f"the ledger of {member.name}"
                raise RoomError(
                    f"{witness.name} saw another state of {whose} (head {told.number}, {told.length} lines) than this "
                    "member: a ledger was set back, the room shows members different things, or somebody lies; nothing "
                    "is answered. Compare by phone",
                    code="room.ledger-head",
                )


def accept_ledger(client: Client, home: HomeFolder, identity: Identity, name: str, query: str) -> str:
    """A person's word that a ledger was lost, and begins anew as a query's head has it: it counts from now on.

    For this member's own ledger (without a query) the heads in the room count as sent by this home: others notice.
    """
    place, log = Place(home.path), client.whole_log()
    for ours in home.consortia():
        if not ours.manifest_path.exists():
            continue
        member = next((m for m in ours.manifest().terms.roster if m.name == name), None)
        if member is None:
            continue
        own = member.ed25519 == identity.ed25519
        heads = []
        for one in log:
            if one.author == member.ed25519 and one.name.endswith((f"/{_ASKED}", f"/{_ANSWERED}")) and not one.gone:
                head = Head.from_bytes(client.small(one, _LARGEST))
                head.verify_by(member.ed25519, member.name)
                if _same(home.consortium_of(head.manifest), ours):
                    heads.append((one, head))
        if own:
            for _, head in heads:
                write_private(_own(place, ours) / f"{head.number}.json", head.to_bytes())
            words = [one.sha256 for one in log if one.author == member.ed25519 and one.name.startswith("standing/")]
            write_private(_folder(place, ours) / "standing.past", canonical(words))
            return f"{len(heads)} heads of your own ledger are known here now; the others will ask you"
        chosen = [head for one, head in heads if query and re.fullmatch(f"query/{query}[0-9a-f]*/{_ASKED}", one.name)]
        if len(chosen) != 1:
            raise RoomError("there is no head of this member for such a query", code="room.not-found")
        write_private(_folder(place, ours) / f"{member.ed25519}.json", chosen[0].to_bytes())
        past = canonical([one.sha256 for one, _ in heads])
        write_private(_folder(place, ours) / f"{member.ed25519}.past", past)
        return f"the ledger of {name} counts from head {chosen[0].number} on, with {len(chosen[0].lines)} lines"
    raise RoomError(f"nobody is called {name!r} in a consortium of this home", code="room.not-found")


def _same(one: ConsortiumFolder | None, two: ConsortiumFolder) -> bool:
    return one is not None and one.path == two.path
