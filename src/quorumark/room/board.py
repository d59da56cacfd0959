"""What a room's pages show, from the entries. The room cannot check any of it: members' agents do.

Small files are read as JSON, as far as they look like what their names say; what does not is not shown. What is served
as the consortium's is not a few members' choice: every member of a manifest's roster signed and uploaded it, and it
keeps enough members of the one before. Files beside the terms are those of the member that brought the terms first.
"""

from __future__ import annotations

import base64
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any

from quorumark.canonical import canonical, digest
from quorumark.consortium.signatures import verify
from quorumark.errors import QuorumarkError, RoomError
from quorumark.room.notices import Noticed
from quorumark.room.numbering import count_in
from quorumark.room.reading import integer_of, message_body, object_of, roster_of, text_of
from quorumark.room.statement import Standing, number_of
from quorumark.room.store import Entry, Store

__all__ = ["STEPS", "Board", "Proposal", "Question"]

STEPS = ("commit", "reveal", "deal", "open", "confirm", "root", "echo", "health", "sign")
"""The steps of a setup without a dealer, in order."""
_LARGEST = 1 << 20


@dataclass
class Proposal:
    """Terms, who agreed, and how far the ceremony got."""

    digest: str
    name: str = ""
    threshold: int = 0
    members: tuple[str, ...] = ()
    coordinates: int = 0
    agreed: list[str] = field(default_factory=list)
    steps: dict[str, list[str]] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)
    author: str = ""  # the key of whoever brought the terms first
    layout: str = ""
    epoch: int = 0

    @property
    def progress(self) -> list[tuple[str, int, bool]]:
        """Each step, how many members have done it, and whether all have who must."""
        return [(step, len(who), len(who) >= len(self.members)) for step, who in self.steps.items()]

    @property
    def state(self) -> str:
        if self.finished:
            return "in force" if len(self.finished) >= len(self.members) else "nearly done"
        return "key is being made" if any(self.steps.values()) else "proposed"


@dataclass
class Question:
    """A query: who asks, who answered, what came of it."""

    digest: str
    asker: str
    purpose: str = ""
    answers: int = 0
    files: tuple[str, ...] = ()
    manifest: str = ""
    kind: str = "plain"
    asked: str = ""
    answered: list[str] = field(default_factory=list)
    declined: list[str] = field(default_factory=list)
    signed: list[str] = field(default_factory=list)
    verdict: str = ""
    z: str = ""
    threshold: str = ""
    shown: dict[str, str] = field(default_factory=dict)  # name of a page or file → SHA-256
    counts: dict[str, int] = field(default_factory=dict)  # the number of answers in its name

    @property
    def state(self) -> str:
        if self.verdict:
            return self.verdict
        return "being signed" if "combined.msg" in self.shown else "open"


class Board:
    """One consortium's notices."""

    def __init__(self, store: Store, consortium: str) -> None:
        self.consortium = consortium
        self.name, founder = store.about(consortium)
        self.people = store.people(consortium)
        self.founder = next((one.name for one in self.people if one.key == founder), "")
        self._names = {one.key: one.name for one in self.people}
        self._store = store
        self.now = store.news(consortium)  # first: what comes meanwhile is news
        entries = store.entries(consortium)
        self.proposals = self._proposals(entries)
        self.questions = self._questions(entries)
        self.chain = self._chain(entries)
        last: tuple[Entry | None, dict[str, Any]] = self.chain[-1] if self.chain else (None, {})
        self.manifest, body = last
        self.in_force = next((one for one in self.proposals if one.digest == _genesis(body)), None)
        if self.in_force is not None and body.get("predecessor") is not None:
            self.in_force = self._as_it_is(self.in_force, body)
        self.files = {} if self.in_force is None else self._files(entries, self.in_force)
        self.standings = {} if self.in_force is None else self._standings(entries, self.in_force.digest)
        self.noticed = Noticed(entries, self.chain, self._names, self._read)

    def question(self, digest: str) -> Question:
        for one in self.questions:
            if one.digest == digest:
                return one
        raise RoomError("there is no such query here", code="room.not-found")

    def proposal(self, digest: str) -> Proposal | None:
        return next((one for one in self.proposals if one.digest == digest), None)

    def chain_of(self, one: Question) -> list[Entry]:
        """The manifest that a query is about, and all before it, the first one first; none if the room lacks it."""
        names = [entry.name for entry, _ in self.chain]
        end = names.index(_manifest_name(one.manifest)) + 1 if _manifest_name(one.manifest) in names else 0
        return [entry for entry, _ in self.chain[:end]]

    def terms_of(self, one: Question) -> Proposal | None:
        """The consortium as it was when a query was asked; as it is, if the room lacks that manifest."""
        count = len(self.chain_of(one))
        body = self.chain[count - 1][1] if count else {}
        return self.in_force if self.in_force is None or not count else self._as_it_is(self.in_force, body)

    def _read(self, entry: Entry) -> bytes:
        if entry.gone or entry.size > _LARGEST:
            return b""
        try:
            return _SMALL.read(self._store.file(self.consortium, entry.sha256))
        except RoomError:
            return b""

    def _chain(self, entries: Iterable[Entry]) -> list[tuple[Entry, dict[str, Any]]]:
        """The manifest in force after all before it, as far as a room can tell: of the first ones that all of their
        members signed and uploaded the largest consortium's, then the latest (some members can agree on another one
        among themselves); and from there on each successor of the kind that keeps enough members of the one before."""
        uploaded: dict[str, dict[str, Entry]] = {}
        for entry in entries:
            if entry.name.startswith("manifest/") and not entry.gone:
                uploaded.setdefault(entry.sha256, {})[entry.author] = entry
        whole: list[tuple[Entry, dict[str, Any]]] = []
        for by in uploaded.values():
            last = max(by.values(), key=lambda entry: entry.number)
            body = object_of(self._read(last))
            roster = _keys(body)
            about = _manifest_digest(body)
            complete = len(roster) > 1 and roster <= by.keys() and last.name == _manifest_name(about)
            if complete and _is_signed(body, about):
                whole.append((last, body))
        first = [one for one in whole if one[1].get("predecessor") is None]
        if not first:
            return []
        found = [max(first, key=lambda one: (len(_keys(one[1])), one[0].number))]
        for _ in whole:
            entry, body = found[-1]
            name = entry.name.removeprefix("manifest/").removesuffix(".json")
            later = [one for one in whole if one[1].get("predecessor") == name and _keeps_enough(one[1], body)]
            if not later:
                break
            found.append(max(later, key=lambda one: one[0].number))
        return found

    def _as_it_is(self, proposal: Proposal, body: dict[str, Any]) -> Proposal:
        """The consortium after its terms or shares were changed; the files beside the first terms stay."""
        terms = body.get("terms")
        terms = terms if isinstance(terms, dict) else {}
        names = tuple(text_of(one, "name") for one in terms.get("roster", ()) if isinstance(one, dict))
        return replace(
            proposal,
            name=text_of(terms, "name"),
            threshold=integer_of(terms, "threshold"),
            members=names,
            finished=list(names),  # all of them uploaded it
            epoch=integer_of(body, "epoch"),
        )

    def _files(self, entries: Iterable[Entry], proposal: Proposal) -> dict[str, str]:
        """Layout, anchor and groups beside terms: name → SHA-256."""
        start = f"proposal/{proposal.digest}/"
        return {
            entry.name.removeprefix(start): entry.sha256
            for entry in entries
            if entry.author == proposal.author and entry.name.startswith(start) and not entry.gone
            if entry.name.endswith((".json", ".safetensors"))
            if not entry.name.endswith("/layout.json") or entry.sha256 == proposal.layout
        }

    def _standings(self, entries: Iterable[Entry], genesis: str) -> dict[str, Standing]:
        """The latest word of each member on its share and ledger, by name; the room checks who signed it."""
        latest: dict[str, Entry] = {}
        for entry in entries:
            number = number_of(entry.name, genesis) if entry.name.startswith("standing/") else 0
            before = latest.get(entry.author)
            if number and (before is None or number > number_of(before.name, genesis)):
                latest[entry.author] = entry
        found = {}
        for author, entry in latest.items():
            try:
                found[self._names.get(author, "")] = Standing.read(self._read(entry), author)
            except QuorumarkError:
                continue  # not signed by its author
        return found

    def _proposals(self, entries: Iterable[Entry]) -> list[Proposal]:
        found: dict[str, Proposal] = {}
        for entry in entries:
            kind, _, rest = entry.name.partition("/")
            about, _, what = rest.partition("/")
            who = self._names.get(entry.author, "")
            if kind == "proposal" and what == "terms.json" and about not in found:
                data = self._read(entry)
                if digest("terms", data).hex() != about:
                    continue
                body = object_of(data)
                roster = body.get("roster")
                names = (
                    [str(one.get("name")) for one in roster if isinstance(one, dict)]
                    if isinstance(roster, list)
                    else []
                )
                proposal = Proposal(about, text_of(body, "name"), integer_of(body, "threshold"), tuple(names))
                proposal.author, proposal.layout = entry.author, text_of(body, "layout")
                proposal.coordinates = integer_of(body, "coordinates")
                proposal.steps = {step: [] for step in STEPS}
                found[about] = proposal
            about = about.removesuffix(".msg")
            if kind == "manifest":
                about = _genesis(object_of(self._read(entry)))
            if about not in found or who not in found[about].members:
                continue
            if kind == "agreed" and who not in found[about].agreed:
                found[about].agreed.append(who)
            elif kind == "manifest" and who not in found[about].finished:
                found[about].finished.append(who)
            elif kind == "setup":
                step = found[about].steps.get(what.partition("/")[0].partition("-")[2])
                if step is not None and who not in step:
                    step.append(who)
        return list(found.values())

    def _questions(self, entries: Iterable[Entry]) -> list[Question]:
        """Who asks is who said so (ask.msg), not who named a query first."""
        found: dict[str, Question] = {}
        askers: dict[str, str] = {}
        for entry in entries:
            if entry.name.startswith("query/") and entry.name.endswith("/ask.msg"):
                askers.setdefault(entry.name.split("/")[1], entry.author)
        for entry in entries:
            kind, _, rest = entry.name.partition("/")
            about, _, what = rest.partition("/")
            who = self._names.get(entry.author, "")
            if kind != "query":
                continue
            own = entry.author == askers.get(about)
            if what == "query.json" and own:
                body = object_of(self._read(entry))
                files = body.get("files")
                names = (
                    [str(one.get("name")) for one in files if isinstance(one, dict)] if isinstance(files, list) else []
                )
                aligned = "aligned" if body.get("alignment") not in (None, "none") else "plain"
                asked = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(entry.time))
                found[about] = Question(about, who, files=tuple(names), kind=aligned, asked=asked)
                found[about].manifest = text_of(body, "manifest")
                if body.get("layers") is not None:
                    found[about].kind = "by layers"
            if about not in found:
                continue
            one = found[about]
            if what == "ask.msg" and own:
                body = object_of(message_body(self._read(entry)))
                one.purpose, one.answers = text_of(body, "purpose"), integer_of(body, "answers")
            elif what == "partial.json":
                one.answered.append(who)
            elif what == "declined.msg":
                one.declined.append(who)
            elif count_in(what, "signed.json") is not None and who not in one.signed:
                one.signed.append(who)
            elif own and not entry.gone:
                self._show(one, what, entry)
        return list(reversed(found.values()))

    def _show(self, one: Question, what: str, entry: Entry) -> None:
        """What the asker made of the answers: the one with the most of them counts."""
        for name in ("certificate.json", "report.html", "combined.msg"):
            count = count_in(what, name)
            if count is not None and count >= one.counts.get(name, 0):
                one.shown[name], one.counts[name] = entry.sha256, count
                if name == "certificate.json":
                    finding = _finding(self._read(entry))
                    one.verdict, one.z, one.threshold = (text_of(finding, n) for n in ("verdict", "z", "threshold"))


class _Kept:
    """Small files that were read: their names are their digests, so that they never change. What was not read for
    longest goes first, beyond so many bytes."""

    def __init__(self, most: int) -> None:
        self.most, self.size = most, 0
        self._files: OrderedDict[Path, bytes] = OrderedDict()
        self._lock = Lock()

    def read(self, path: Path) -> bytes:
        with self._lock:
            if path in self._files:
                self._files.move_to_end(path)
                return self._files[path]
        data = path.read_bytes()
        with self._lock:
            if path not in self._files:
                self._files[path] = data
                self.size += len(data)
            while self.size > self.most:
                self.size -= len(self._files.popitem(last=False)[1])
        return data


_SMALL = _Kept(32 << 20)


def _manifest_digest(body: dict[str, Any]) -> str:
    try:
        return digest("manifest", canonical({name: body[name] for name in body if name != "signatures"})).hex()
    except (QuorumarkError, ValueError, TypeError):
        return ""


def _manifest_name(about: str) -> str:
    return f"manifest/{about}.json"


def _is_signed(body: dict[str, Any], about: str) -> bool:
    """Whether every member of the roster signed the manifest with this digest."""
    signatures = body.get("signatures")
    for member in roster_of(body):
        signature = signatures.get(str(member.get("point"))) if isinstance(signatures, dict) else None
        try:
            verify(
                text_of(member, "ed25519"), "manifest", bytes.fromhex(about), str(signature), text_of(member, "name")
            )
        except QuorumarkError:
            return False
    return True


def _keeps_enough(body: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether so many members stay, with both their keys, as a successor needs (docs/years-later.md): t, and more than
    half."""
    now, then = ({(text_of(m, "ed25519"), text_of(m, "x25519")) for m in roster_of(one)} for one in (body, before))
    return len(now & then) >= max(integer_of(before["terms"], "threshold"), len(then) // 2 + 1)


def _genesis(body: dict[str, Any]) -> str:
    """The digest of the first terms of a manifest."""
    genesis = body.get("genesis")
    return text_of(genesis, "terms") if isinstance(genesis, dict) else ""


def _keys(body: dict[str, Any]) -> set[str]:
    """The keys in a manifest's roster."""
    return {text_of(one, "ed25519") for one in roster_of(body)}


def _finding(data: bytes) -> dict[str, Any]:
    """What a certificate's envelope holds."""
    payload = object_of(data).get("payload")
    try:
        statement = object_of(base64.b64decode(payload if isinstance(payload, str) else "", validate=True))
    except ValueError:
        return {}
    predicate = statement.get("predicate")
    return predicate if isinstance(predicate, dict) else {}
