"""What a room's pages show of the years after the founding: calls and how far they are, audits, ledgers, the history of
manifests, stamps.

As on the board, the room believes nobody more than it must: a call and an audit have the digests in their names, and
are of whom they say; who counts is in a manifest that all of its members signed; a step is done by the member whose
number is in its name; a head is signed. What of it is true, only members' agents find out.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quorumark.canonical import canonical, digest
from quorumark.consortium.signatures import verify
from quorumark.errors import QuorumarkError
from quorumark.room.numbering import sender_of
from quorumark.room.reading import integer_of, message_body, object_of, roster_of, text_of
from quorumark.room.store import Entry

__all__ = ["AMENDMENT", "RECOVERY", "RESHARING", "Audited", "Called", "Link", "Noticed", "Spoken"]

RESHARING = ("commit", "reveal", "deal", "difference", "root", "echo", "health", "sign", "kept")
"""The steps in which members make new shares, in order."""
AMENDMENT, RECOVERY = ("signature",), ("hello", "answer")
_STEPS = {"refresh": RESHARING, "reshare": RESHARING, "sign": AMENDMENT, "recover": RECOVERY}
_MOST_HEADS = 60  # queries whose heads are shown, the latest ones
Read = Callable[[Entry], bytes]
Chain = Sequence[tuple[Entry, dict[str, Any]]]


@dataclass
class Link:
    """One manifest of the consortium's: the first, or one that took the place of the one before."""

    digest: str
    name: str
    epoch: int
    threshold: int
    members: tuple[str, ...]
    there: str  # since when all have it here
    stamps: Mapping[str, int] = field(default_factory=dict)  # who brought how many


@dataclass
class Called:
    """A call: what for, how far it is. `steps`: each step, and who has done it."""

    digest: str
    kind: str
    caller: str
    purpose: str
    asked: str
    takes_part: tuple[str, ...]
    steps: dict[str, list[str]] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)
    state: str = "called"

    @property
    def title(self) -> str:
        said = {"refresh": "New shares for the same members", "reshare": "New shares under other terms"}
        said |= {"sign": "Other terms, with the shares as they are", "recover": f"The share of {self.caller}, again"}
        return said[self.kind]


@dataclass
class Audited:
    """A spot audit. `opened`: who has opened its leaves; `needed`: how many must."""

    digest: str
    bringer: str
    purpose: str
    brought: str
    query: str
    source: str
    seed: str
    leaves: int
    burnt: int
    needed: int
    members: tuple[str, ...]
    opened: list[str] = field(default_factory=list)
    shown: dict[str, str] = field(default_factory=dict)  # name of a file → SHA-256

    @property
    def state(self) -> str:
        return "opened" if "proof.json" in self.shown else f"{len(self.opened)} of {self.needed} have opened"


@dataclass
class Spoken:
    """What a member said of its ledger for one query: its lines before it answered, and after."""

    before: int | None = None
    after: int | None = None
    last: str = ""


class Noticed:
    """All of these of one consortium. `names`: of who is here, by their keys."""

    def __init__(self, entries: Sequence[Entry], chain: Chain, names: Mapping[str, str], read: Read) -> None:
        self._read, self._names = read, names
        self._links = {_digest_of(entry): (number, body) for number, (entry, body) in enumerate(chain)}
        stamps = self._stamps(entries)
        self._stamps_of = {sha256: stamps.get(name, {}) for sha256, name in self._dated(entries, chain).items()}
        self.history = [self._link(entry, body) for entry, body in chain]
        self.calls = self._calls(entries, chain)
        self.audits = self._audits(entries)
        self.heads = self._heads(entries)

    def call(self, about: str) -> Called | None:
        return next((one for one in self.calls if one.digest == about), None)

    def audit(self, about: str) -> Audited | None:
        return next((one for one in self.audits if one.digest == about), None)

    def stamps_of(self, sha256: str) -> Mapping[str, int]:
        """Stamps that members brought for a file, by who brought them: the room did not check them."""
        return self._stamps_of.get(sha256, {})

    # --- manifests and stamps ---

    def _link(self, entry: Entry, body: dict[str, Any]) -> Link:
        terms = body["terms"]
        return Link(
            _digest_of(entry),
            text_of(terms, "name"),
            integer_of(body, "epoch"),
            integer_of(terms, "threshold"),
            tuple(text_of(one, "name") for one in roster_of(body)),
            _day(entry.time),
            self.stamps_of(entry.sha256),
        )

    def _dated(self, entries: Iterable[Entry], chain: Chain) -> dict[str, str]:
        """What can have stamps: SHA-256 of its file → the start of its SHA-512, which is in their names."""
        every = [entry for entry, _ in chain]
        every += [one for one in entries if one.name.startswith("query/") and "/certificate" in one.name]
        return {one.sha256: hashlib.sha512(self._read(one)).hexdigest()[:64] for one in every if not one.gone}

    def _stamps(self, entries: Iterable[Entry]) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for entry in entries:
            kind, _, rest = entry.name.partition("/")
            if kind == "stamps" and not entry.gone and entry.author in self._names:
                chains = object_of(self._read(entry)).get("chains")
                count = len(chains) if isinstance(chains, list) else 0
                by = found.setdefault(rest.partition("/")[0], {})
                who = self._names[entry.author]
                by[who] = max(count, by.get(who, 0))
        return found

    # --- calls ---

    def _calls(self, entries: Iterable[Entry], chain: Chain) -> list[Called]:
        found: dict[str, Called] = {}
        points: dict[str, dict[str, int]] = {}  # who has which number in the names of its messages
        wanted: dict[str, tuple[str, dict[str, Any]]] = {}  # the manifest before, and the terms after
        terms = {
            (one.author, one.name.split("/")[1]): one
            for one in entries
            if one.name.startswith("call/") and one.name.endswith("/terms.json") and not one.gone
        }
        for entry in entries:
            kind, about, what = _parts(entry)
            if kind != "call" or what != "call.msg" or about in found or entry.gone:
                continue
            body = object_of(message_body(self._read(entry)))
            before = self._called_by(entry, about, body)
            after = self._terms_after(terms.get((entry.author, about)), body, before)
            if after is None:
                continue
            roster = roster_of({"terms": after})
            found[about] = self._new_call(about, entry, body, roster)
            points[about] = {text_of(one, "ed25519"): integer_of(one, "point") for one in roster}
            wanted[about] = text_of(body, "manifest"), after
        for entry in entries:
            kind, about, what = _parts(entry)
            if kind == "manifest" and not entry.gone:
                self._took_over(found, wanted, entry)
            elif kind == "call" and about in found and (point := sender_of(what)):
                one, who = found[about], self._names.get(entry.author, "")
                done = one.steps.get(_step_of(what))
                if done is None or who in done or points[about].get(entry.author) != point or who not in one.takes_part:
                    continue
                done.append(who)
        for about, one in found.items():
            if one.kind != "recover":  # another call of the same kind can have led to the same manifest
                signed = one.steps["signature" if one.kind == "sign" else "sign"]
                one.finished = [who for who in one.finished if who in signed]
            one.state = self._state(one, wanted[about][0], len(chain))
        return list(reversed(found.values()))

    def _called_by(self, entry: Entry, about: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The manifest that a call is about, if it is what its name says, and its author a member by that manifest."""
        _, before = self._links.get(text_of(body, "manifest"), (0, {}))
        try:
            sound = digest("room call", canonical(body)).hex() == about
        except (QuorumarkError, ValueError, TypeError):
            return None
        members = {text_of(one, "ed25519") for one in roster_of(before)}
        own = text_of(body, "caller") == entry.author and entry.author in members
        return before if sound and own and text_of(body, "kind") in _STEPS else None

    def _terms_after(
        self, entry: Entry | None, body: dict[str, Any], before: dict[str, Any] | None
    ) -> dict[str, Any] | None:
        """The terms after a call; None if there are none that have the digest in it, or the call is none."""
        if before is None or not text_of(body, "terms"):
            return None if before is None else dict(before["terms"])
        data = b"" if entry is None else self._read(entry)
        if digest("terms", data).hex() != text_of(body, "terms"):
            return None
        return {name: value for name, value in object_of(data).items() if name != "format"}

    def _new_call(self, about: str, entry: Entry, body: dict[str, Any], roster: list[dict[str, Any]]) -> Called:
        kind, helpers = text_of(body, "kind"), body.get("helpers")
        asked = helpers if isinstance(helpers, list) else []
        who = tuple(text_of(m, "name") for m in roster if kind != "recover" or integer_of(m, "point") in asked)
        caller, purpose = self._names.get(entry.author, ""), text_of(body, "purpose")
        return Called(about, kind, caller, purpose, _day(entry.time), who, {step: [] for step in _STEPS[kind]})

    def _took_over(self, found: dict[str, Called], wanted: Mapping[str, tuple[str, dict[str, Any]]], it: Entry) -> None:
        """A member has a successor of the kind that a call is for."""
        body = object_of(self._read(it))
        before, who = text_of(body, "predecessor"), self._names.get(it.author, "")
        for about, (manifest, terms) in wanted.items():
            one, old = found[about], integer_of(self._links[manifest][1], "epoch")
            epoch = old if one.kind == "sign" else old + 1
            if one.kind == "recover" or before != manifest or who not in one.takes_part or who in one.finished:
                continue
            if body.get("terms") == terms and integer_of(body, "epoch") == epoch:
                one.finished.append(who)

    def _state(self, one: Called, manifest: str, links: int) -> str:
        if one.kind == "recover":
            whole = set(one.takes_part) <= set(one.steps["answer"])
            return "answered" if whole else "under way" if any(one.steps.values()) else "called"
        if set(one.takes_part) <= set(one.finished):
            return "in force"
        if self._links[manifest][0] < links - 1:
            return "over"  # another one took the place of the manifest
        return "under way" if any(one.steps.values()) else "called"

    # --- audits ---

    def _audits(self, entries: Iterable[Entry]) -> list[Audited]:
        found: dict[str, Audited] = {}
        bringers: dict[str, str] = {}
        rosters: dict[str, set[str]] = {}
        for entry in entries:
            kind, about, what = _parts(entry)
            if kind != "audit" or entry.gone:
                continue
            who = self._names.get(entry.author, "")
            if what == "challenge.json" and about not in found:
                data = self._read(entry)
                body = object_of(data)
                _, manifest = self._links.get(text_of(body, "manifest"), (0, {}))
                members = {text_of(one, "ed25519") for one in roster_of(manifest)}
                if digest("challenge", data).hex() != about or entry.author not in members:
                    continue
                found[about] = _audited(about, who, entry, body, manifest)
                bringers[about], rosters[about] = entry.author, members
            if about not in found:
                continue
            own = entry.author == bringers[about]
            if what == "word.msg" and own:
                found[about].purpose = text_of(object_of(message_body(self._read(entry))), "purpose")
            elif what == "opening.json" and entry.author in rosters[about] and who not in found[about].opened:
                found[about].opened.append(who)
            if own and what in ("challenge.json", "proof.json"):
                found[about].shown[what] = entry.sha256
        return list(reversed(found.values()))

    # --- ledgers ---

    def _heads(self, entries: Iterable[Entry]) -> dict[str, dict[str, Spoken]]:
        """Query → member → what it said of its ledger, the latest queries first."""
        every: dict[str, list[Entry]] = {}
        for entry in entries:
            kind, about, what = _parts(entry)
            if kind == "query" and what in ("head.json", "answered.json") and not entry.gone:
                every.setdefault(about, []).append(entry)
        found: dict[str, dict[str, Spoken]] = {}
        for about in list(reversed(every))[:_MOST_HEADS]:
            for entry in every[about]:
                lines = _lines_of(self._read(entry), entry.author)
                who = self._names.get(entry.author, "")
                if lines is None or not who:
                    continue
                spoken = found.setdefault(about, {}).setdefault(who, Spoken())
                if entry.name.endswith("/answered.json"):
                    spoken.after = len(lines)
                else:
                    spoken.before = len(lines)
                if len(lines) >= max(spoken.before or 0, spoken.after or 0):
                    spoken.last = lines[-1] if lines else ""
        return found


def _audited(about: str, who: str, entry: Entry, body: dict[str, Any], manifest: dict[str, Any]) -> Audited:
    members = tuple(text_of(one, "name") for one in roster_of(manifest))
    return Audited(
        about,
        who,
        "",
        _day(entry.time),
        query=text_of(body, "query"),
        source=text_of(body, "source"),
        seed=text_of(body, "seed"),
        leaves=_length(body.get("leaves")),
        burnt=_length(body.get("burnt")),
        needed=integer_of(manifest["terms"], "threshold"),
        members=members,
    )


def _length(found: object) -> int:
    return len(found) if isinstance(found, list) else 0


def _lines_of(data: bytes, key: str) -> list[str] | None:
    """The hashes of a ledger's lines in a head that its author signed; None: it is none."""
    body = object_of(data)
    lines = body.get("lines")
    if text_of(body, "format") != "quorumark-room-head/v1" or not isinstance(lines, list):
        return None
    try:
        said = canonical({name: value for name, value in body.items() if name != "signature"})
        verify(key, "ledger head", said, text_of(body, "signature"), "a head")
    except (QuorumarkError, ValueError, TypeError):
        return None
    return [str(one)[:64] for one in lines]


def _parts(entry: Entry) -> tuple[str, str, str]:
    """call/C/1-commit/3.msg → call, C, 1-commit/3.msg."""
    kind, _, rest = entry.name.partition("/")
    about, _, what = rest.partition("/")
    return kind, about, what


def _step_of(name: str) -> str:
    """1-commit/3.msg → commit; signature-3.hex → signature; hello-3.msg → hello."""
    folder, slash, _ = name.partition("/")
    return folder.partition("-")[2] if slash else name.partition("-")[0]


def _digest_of(entry: Entry) -> str:
    return entry.name.removeprefix("manifest/").removesuffix(".json")


def _day(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
