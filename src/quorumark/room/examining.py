"""The examiner of a query by layers, in a room: takes the sealed answers from it, and puts its signed word there.

    query/Q/opened.json          what Q is, and whose answers were wrong, for the answers that were there; opened-4.json
                                 with later ones (`numbering.again`)

Numbers by layer stay with the examiner: nothing but Q and whose answers were wrong goes to the room. An examiner whose
agent runs presses a button on its own page, and sees the numbers there; the others have `room examine`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from quorumark.canonical import digest, parse
from quorumark.checks import is_count, is_text, require, take
from quorumark.consortium.home import HomeFolder, history_name
from quorumark.consortium.identity import Identity, open_message
from quorumark.consortium.records import Manifest
from quorumark.errors import EvidenceError, QuorumarkError, RoomError
from quorumark.files import write_private, write_shared
from quorumark.model.layout import ModelLayout
from quorumark.report.layers import layers_page
from quorumark.room.client import Client, Notice
from quorumark.room.desk import Matter
from quorumark.room.manifests import fetch_chain
from quorumark.room.numbering import again, count_in
from quorumark.room.question import ASK, LARGEST_PARTIAL, LARGEST_QUERY, LARGEST_WORD, header
from quorumark.room.seat import Seat
from quorumark.verify.evidence import Partial, Query
from quorumark.verify.examine import Examined, examine
from quorumark.verify.layered import Opened
from quorumark.verify.reference import LAYOUT

__all__ = ["Examining", "bring_word", "examine_in_room", "save_sealed"]

_LARGEST_LAYOUT = 1 << 26
_ASKED = re.compile("query/([0-9a-f]{64})/ask.msg")


# --- at a terminal ---


def examine_in_room(client: Client, home: HomeFolder, identity: Identity, start: str) -> tuple[Examined, Manifest]:
    """Opens the answers that are in the room, and puts the examiner's word beside them; what only the examiner sees.

    `start` is the beginning of the query's digest. An examiner that is not a member takes the manifest from the room:
    it must compare its digest with what members say.
    """
    log, query, chain = _find(client, home, start)
    manifest = chain[-1]
    examined = examine(identity, manifest, query, _partials(client, log, manifest, query))
    _put(client, log, identity.ed25519, query, examined.opened)
    return examined, manifest


def save_sealed(client: Client, home: HomeFolder, start: str, folder: Path) -> int:
    """The query and its sealed answers as files, for an examiner who is not in the room; how many answers."""
    log, query, chain = _find(client, home, start)
    found = _partials(client, log, chain[-1], query)
    files = {f"partial-{partial.point}.json": partial.to_bytes() for partial in found}
    files |= {f"history/{history_name(link.digest().hex())}": link.to_bytes() for link in chain[:-1]}
    files |= {"consortium.json": chain[-1].to_bytes(), "query.json": query.to_bytes()}
    for name, content in files.items():
        write_shared(folder / name, content)
    return len(found)


def bring_word(client: Client, home: HomeFolder, identity: Identity, start: str, data: bytes) -> Opened:
    """Puts the word of an examiner who is not in the room beside the answers: its signature says whose it is."""
    log, query, _ = _find(client, home, start)
    word = Opened.from_bytes(data)
    if query.layers is None or word.query != query.digest():
        raise EvidenceError("the word is about another query than the one that you named")
    word.verify(query.layers.examiner)
    _put(client, log, identity.ed25519, query, word)
    return word


def _find(client: Client, home: HomeFolder, start: str) -> tuple[list[Notice], Query, list[Manifest]]:
    log = [one for one in client.whole_log() if not one.gone]
    query = _query(client, log, start)
    return log, query, _chain(client, home, log, query)


def _chain(client: Client, home: HomeFolder, log: list[Notice], query: Query) -> list[Manifest]:
    """The manifests up to the query's, from this home or from the room."""
    ours = home.consortium_of(query.manifest)
    if ours is not None and ours.manifest_path.exists():
        chain = ours.chain()
    else:
        chain = fetch_chain(client, lambda name: [one for one in log if one.name == name], query.manifest)
    digests = [link.digest().hex() for link in chain]
    require(query.manifest in digests, "a query", "must be about a manifest of its consortium")
    return chain[: digests.index(query.manifest) + 1]


def _put(client: Client, log: list[Notice], author: str, query: Query, word: Opened) -> None:
    """An entry is for ever: a word about more answers has another name."""
    start = f"query/{query.digest()}/"
    first = not any((one.author, one.name) == (author, f"{start}opened.json") for one in log)
    client.upload(word.to_bytes(), start + again("opened.json", 0 if first else len(word.partials)))


def _query(client: Client, log: list[Notice], start: str) -> Query:
    found = {}
    for one in log:
        if start and one.name.startswith(f"query/{start}") and one.name.endswith("/query.json"):
            query = Query.from_bytes(client.small(one, LARGEST_QUERY))
            if query.digest() == one.name.split("/")[1]:
                found[query.digest()] = query
    if len(found) != 1:
        raise RoomError("there is no such query, or more than one: give more of its digest", code="room.not-found")
    return found.popitem()[1]


def _partials(client: Client, log: list[Notice], manifest: Manifest, query: Query) -> list[Partial]:
    """The answers that hold, each its member's; others are passed over."""
    found = []
    for member in manifest.terms.roster:
        for one in log:
            if (one.author, one.name) == (member.ed25519, f"query/{query.digest()}/partial.json"):
                try:
                    partial = Partial.from_bytes(client.small(one, LARGEST_PARTIAL))
                    partial.verify(manifest.terms)
                    require(partial.point == member.point and bool(partial.sealed), "an answer", "must be its own")
                    require(partial.query == query.digest(), "an answer", "must be to this query")
                except QuorumarkError as error:
                    if error.code == "room.unreachable":
                        raise
                    continue
                found.append(partial)
    return found


# --- an examiner's agent ---


@dataclass
class _Sealed:
    """A query whose answers are sealed to this agent's identity, as it has checked it."""

    query: Query
    manifest: Manifest
    asker: str
    purpose: str
    answers: int
    seen: frozenset[str] = field(default_factory=frozenset)  # what was there when it was last looked at

    @property
    def start(self) -> str:
        return f"query/{self.query.digest()}/"


class Examining:
    """One examiner's queries in a room. A person opens the answers; numbers by layer are kept in its home, 0600."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._sealed: dict[str, _Sealed] = {}
        self._others: set[tuple[str, str]] = set()  # queries that name somebody else
        self._waiting: dict[str, frozenset[str]] = {}  # what was there when nothing could be made of it

    def step(self, client: Client) -> None:
        """Does what can be done now."""
        for word in self._seat.mirror.named("query/", "/ask.msg"):
            found = _ASKED.fullmatch(word.name)
            if found is None:
                continue
            parts = (word.author, found[1], word.sha256)
            about = digest("room examine", *(bytes.fromhex(part) for part in parts)).hex()
            if about not in self._sealed:
                self._look(client, about, found[1], word)
            if about in self._sealed:
                self._go_on(client, about, self._sealed[about])

    def numbers(self, about: str) -> Path | None:
        """The examiner's own report on a query, once the answers are open."""
        one = self._sealed.get(about)
        path = None if one is None else self._page(one)
        return path if path is not None and path.exists() else None

    def _page(self, one: _Sealed) -> Path:
        return self._seat.place.folder("examined") / f"{one.query.digest()}.html"

    def _there(self, query: str) -> frozenset[str]:
        mirror = self._seat.mirror
        return frozenset(one.sha256 for start in (f"query/{query}/", "manifest/") for one in mirror.named(start, ""))

    def _look(self, client: Client, about: str, name: str, word: Notice) -> None:
        seat, notice = self._seat, self._seat.mirror.find(word.author, f"query/{name}/query.json")
        if notice is None or (about, notice.sha256) in self._others:
            return
        there = self._there(name)
        if self._waiting.get(about) == there:
            return
        try:
            query = Query.from_bytes(client.small(notice, LARGEST_QUERY))
        except QuorumarkError as error:
            if error.code == "room.unreachable":
                raise
            self._others.add((about, notice.sha256))
            return
        asked = query.layers
        keys = (seat.key, seat.identity.x25519)
        if asked is None or (asked.examiner.ed25519, asked.examiner.x25519) != keys or query.digest() != name:
            self._others.add((about, notice.sha256))
            return
        try:
            manifest = _chain(client, seat.home, seat.mirror.named("manifest/", ".json"), query)[-1]
            point = manifest.terms.point_of(word.author)
            body = open_message(client.small(word, LARGEST_WORD), manifest.terms, header("ask", query, point))
            said = take(parse(body, ASK, "a question"), ["purpose", "answers"], "a question")
            require(is_text(said["purpose"], 500), "a question's purpose", "must be printable")
            require(is_count(said["answers"], 1), "a question's answers", "must be an integer, at least 1")
        except QuorumarkError as error:
            if error.code == "room.unreachable":
                raise
            self._waiting[about] = there
            seat.desk.trouble(about, f"a query by layers that names you as its examiner cannot be used: {error}")
            return
        seat.desk.trouble(about, "")
        name_of = manifest.terms.member(point).name
        one = _Sealed(query, manifest, name_of, said["purpose"], said["answers"])
        self._sealed[about] = one
        files = ", ".join(file.name for file in query.files[:3])
        seat.desk.put(Matter("examine", about, f"Open the answers about {files!r}", self._facts(one)))

    def _facts(self, one: _Sealed) -> tuple[tuple[str, str], ...]:
        query, terms = one.query, one.manifest.terms
        files = "; ".join(f"{file.name}, {file.size:,} bytes, SHA-256 {file.sha256}" for file in query.files[:8])
        return (
            ("who asks", one.asker),
            ("why", one.purpose),
            ("suspect", files),
            ("what you see", f"a number for each of {query.equations} blocks of the model; nobody else sees them"),
            ("what goes to the room", "Q, and whose answers were wrong, signed by you"),
            ("members", ", ".join(member.name for member in terms.roster)),
            ("query", query.digest()),
            ("consortium", f"{terms.name}; compare this manifest by phone with a member: {query.manifest}"),
        )

    def _go_on(self, client: Client, about: str, one: _Sealed) -> None:
        seat, there = self._seat, self._there(one.query.digest())
        said = seat.desk.said(about)[0]
        if one.seen == there | {said}:
            return
        partials = _partials(client, seat.mirror.named(one.start, "/partial.json"), one.manifest, one.query)
        count = f"{len(partials)} of {one.answers} answers are there"
        enough = len(partials) >= one.manifest.terms.threshold
        if said == "no":
            seat.desk.move(about, "declined", "you declined")
        elif said == "yes" and enough:
            self._open(client, about, one, partials)
        else:
            seat.desk.move(about, "waiting" if enough and not said else "working", count)
        one.seen = there | {said}

    def _open(self, client: Client, about: str, one: _Sealed, partials: list[Partial]) -> None:
        """The first time, and again when there are more answers."""
        seat, query = self._seat, one.query.digest()
        kept = {path: Opened.from_bytes(path.read_bytes()) for path in self._words(one)}
        digests = {partial.digest() for partial in partials}
        if not any(digests <= set(word.partials) for word in kept.values()):
            try:
                examined = examine(seat.identity, one.manifest, one.query, partials)
            except EvidenceError as error:
                seat.desk.move(about, "working", str(error))
                return
            name = again("opened.json", len(partials) if kept else 0)
            write_private(self._page(one), self._report(client, examined, one))
            path = seat.place.folder("answers") / f"{query}-{name}"
            write_private(path, examined.opened.to_bytes())
            kept[path] = examined.opened
        for path in kept:
            seat.send(client, path, one.start + path.name.partition("-")[2])
        last = max(kept.values(), key=lambda word: len(word.partials))
        wrong = ", ".join(one.manifest.terms.member(point).name for point in last.wrong)
        text = f"Q = {last.q}, from {len(last.partials)} answers; your word is in the room"
        seat.desk.move(about, "done", text + (f"; wrong: {wrong}" if wrong else ""))

    def _words(self, one: _Sealed) -> list[Path]:
        start = f"{one.query.digest()}-"
        found = self._seat.place.folder("answers").glob(f"{start}opened*.json")
        return sorted(path for path in found if count_in(path.name.removeprefix(start), "opened.json") is not None)

    def _report(self, client: Client, examined: Examined, one: _Sealed) -> bytes:
        """The page with the numbers. A layout is what the manifest names, whoever brought it."""
        ours = self._seat.home.consortium_of(one.query.manifest)
        if ours is not None and (ours.path / LAYOUT).exists():
            layout = ModelLayout.from_bytes((ours.path / LAYOUT).read_bytes())
            return layers_page(examined, one.manifest, layout).encode()
        for notice in self._seat.mirror.named(f"proposal/{one.manifest.genesis.terms}/", LAYOUT):
            try:
                layout = ModelLayout.from_bytes(client.small(notice, _LARGEST_LAYOUT))
                return layers_page(examined, one.manifest, layout).encode()
            except QuorumarkError as error:
                if error.code == "room.unreachable":
                    raise
        raise RoomError(
            "the room has no layout that the manifest names: get layout.json from a member, and run quorumark room "
            f"examine {one.query.digest()[:16]} --report FILE --layout layout.json",
            code="room.not-found",
        )
