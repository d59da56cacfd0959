"""What an agent keeps of a room, in its member's home: public copies, and the member's decisions. No secrets, but
what an examiner sees.

HOME/room/room.json              the room's address, the consortium's id there, this member's number of examples
HOME/room/page                   the address of the agent's page while it runs (0600: it opens the page)
HOME/room/cards/NAME.json        the cards of those who joined
HOME/room/ID/decisions.json      what the member decided, by the digest of what was decided on
HOME/room/ID/proposals/T/        terms and the files beside them
HOME/room/ID/exchange/T/         the ceremony's folder, as setup.exchange wants it
HOME/room/ID/drafts/…            questions that the member wrote on its page, until they are in the room
HOME/room/ID/suspects/Q/         suspects' files
HOME/room/ID/answers/…           what this member sent about a query: sent again after a crash, never made anew
HOME/room/ID/certificates/Q/     certificate.json, checked here, and report.html, made here; -4 with late answers
HOME/room/ID/examined/Q.html     an examiner's numbers by layer (0600): they tell how to take the mark out
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from quorumark.canonical import canonical, parse
from quorumark.checks import field_names, is_count, is_hex, is_text, require, take
from quorumark.consortium.home import read_file
from quorumark.errors import RoomError
from quorumark.files import write_private
from quorumark.room.requests import address_of

__all__ = ["Decisions", "Place", "Policy", "Settings"]


@dataclass(frozen=True)
class Settings:
    """Where this member's room is."""

    FORMAT: ClassVar[str] = "quorumark-room/v1"

    address: str
    consortium: str
    examples: int

    def to_bytes(self) -> bytes:
        return canonical({"format": self.FORMAT, **{f.name: getattr(self, f.name) for f in fields(self)}})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        found = cls(**take(parse(data, cls.FORMAT, "a room's settings"), field_names(cls), "a room's settings"))
        require(is_hex(found.consortium, 16), "a room's consortium", "must be 16 bytes in hex")
        require(is_count(found.examples), "a member's examples", "must be an integer, at least 0")
        address_of(found.address)
        return found


class Place:
    """The folder in a home."""

    def __init__(self, home: Path) -> None:
        self.base = home / "room"
        self.page = self.base / "page"
        self.people = self.base / "people"
        self.outbox = self.base / "outbox"

    def make(self) -> None:
        self.base.mkdir(mode=0o700, parents=True, exist_ok=True)

    @property
    def joined(self) -> bool:
        return (self.base / "room.json").exists()

    def settings(self) -> Settings:
        if not self.joined:
            raise RoomError(
                f"{str(self.base.parent)!r} is in no room yet: run quorumark room join", code="room.not-a-member"
            )
        return Settings.from_bytes(read_file(self.base / "room.json", "a room's settings"))

    def remember(self, settings: Settings) -> None:
        self.make()
        write_private(self.base / "room.json", settings.to_bytes())

    def folder(self, *parts: str) -> Path:
        """A folder for this consortium, made if need be."""
        path = self.base.joinpath(self.settings().consortium, *parts)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def hand_over(self, terms: str, folder: Path) -> None:
        """Lets the agent propose the terms in a folder."""
        self.outbox.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(self.outbox / f"{terms}.folder", str(folder.absolute()).encode())


class Decisions:
    """What the member decided: digest → yes or no, kept before anything follows from it."""

    FORMAT = "quorumark-room-decisions/v1"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._made: dict[str, dict[str, str]] = {}
        if path.exists():
            body = parse(read_file(path, "a member's decisions"), self.FORMAT, "a member's decisions")
            made = body.get("made")
            require(isinstance(made, dict), "a member's decisions", "must be a map")
            self._made = {str(digest): dict(one) for digest, one in dict(made or {}).items()}

    def of(self, digest: str) -> str:
        """ "yes", "no" or ""."""
        return self._made.get(digest, {}).get("said", "")

    def by(self, digest: str) -> str:
        """ "person" or "policy"."""
        return self._made.get(digest, {}).get("by", "")

    def make(self, digest: str, said: str, by: str) -> None:
        if self.of(digest):
            return  # a decision is made once
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._keep({**self._made, digest: {"said": said, "by": by, "time": at}})

    def withdraw(self, digest: str) -> None:
        """A policy's decision; a person's stays."""
        if self.by(digest) == "policy":
            self._keep({name: one for name, one in self._made.items() if name != digest})

    def _keep(self, made: dict[str, dict[str, str]]) -> None:
        write_private(self._path, canonical({"format": self.FORMAT, "made": made}))
        self._made = made


@dataclass(frozen=True)
class Policy:
    """What the agent decides without a person (`--approve-with`). Without such a file: nothing.

    `agree`: digests of terms. `askers`: names in the signed roster. `kinds`: plain, aligned. `most_equations`: that one
    answer may open; `most_a_day`: answers in 24 hours. `most_mib`: a suspect of up to so many MiB is fetched from the
    room before anybody looks; a larger one waits for a person. The guard and HOME/rules.json hold all the same. A
    decision holds while the policy that made it is given.
    """

    FORMAT: ClassVar[str] = "quorumark-room-policy/v1"

    agree: tuple[str, ...] = ()
    askers: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ("plain",)
    most_equations: int = 1
    most_a_day: int = 1
    most_mib: int = 1024

    @classmethod
    def read(cls, path: Path) -> Self:
        what = "a room's policy"
        body = parse(read_file(path, what), cls.FORMAT, what, by_hand=True)
        known = {"agree", "askers", "kinds", "most_equations", "most_a_day", "most_mib"}
        strange = sorted(name for name in body if name not in known and not name.startswith("x-"))
        require(not strange, what, f"has the unknown field {strange[0]!r}" if strange else "")
        values: dict[str, Any] = {}
        for name in ("agree", "askers", "kinds"):
            if name in body:
                given = body[name]
                sound = isinstance(given, list) and all(is_text(one, 100) for one in given)
                require(sound, f"{name} in {what}", "must be a list of strings")
                values[name] = tuple(given)
        for name in ("most_equations", "most_a_day", "most_mib"):
            if name in body:
                require(is_count(body[name]), f"{name} in {what}", "must be an integer, at least 0")
                values[name] = body[name]
        require(
            all(is_hex(one, 32) for one in values.get("agree", ())), f"agree in {what}", "must list digests of terms"
        )
        require(
            set(values.get("kinds", ())) <= {"plain", "aligned"}, f"kinds in {what}", "must be plain, aligned or both"
        )
        return cls(**values)

    def agrees(self, terms: str) -> bool:
        return terms in self.agree

    def approves(self, asker: str, kind: str, equations: int) -> bool:
        return asker in self.askers and kind in self.kinds and equations <= self.most_equations
