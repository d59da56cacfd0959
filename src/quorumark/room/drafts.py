"""Questions that a member wrote on its own page, until they are in the room.

    HOME/room/ID/drafts/D/draft.json     what the member wrote; a folder without it is an upload that never ended
    HOME/room/ID/drafts/D/files/…        the suspect
    HOME/room/ID/drafts/D/after.json     by layers: the certificate of the plain query, and examiner.json, a card
    HOME/room/ID/drafts/D/query.json     the query, once it is computed: kept before anything of it is sent

A crash loses nothing and asks nothing twice: each step can be done again, with the same result.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import threading
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, Self

from quorumark.canonical import canonical, parse
from quorumark.checks import field_names, is_count, is_text, require, take
from quorumark.consortium.home import HomeFolder, read_file
from quorumark.consortium.identity import Identity
from quorumark.consortium.records import Card
from quorumark.errors import InconclusiveError, InputError, QuorumarkError, RoomError
from quorumark.files import move, write_private
from quorumark.report.texts import sentences
from quorumark.room.asking import compute_query, send_question
from quorumark.room.client import Client
from quorumark.room.layering import Before
from quorumark.room.place import Place
from quorumark.verify.certificate import Certificate
from quorumark.verify.evidence import Query
from quorumark.verify.query import AskLayers, how_aligned

__all__ = ["KINDS", "Draft", "Drafts", "Shown"]

KINDS = ("plain", "aligned", "adapter", "layers")
MOST_DRAFTS = 8
MOST_FILES = 500
_AFTER, _EXAMINER = "after.json", "examiner.json"
_PLAIN = re.compile(r"[^A-Za-z0-9._ -]")
_ID = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True)
class Draft:
    """What a member wants to ask. `answers`: 0 for t+1. `keep_file`: the suspect is not uploaded."""

    FORMAT: ClassVar[str] = "quorumark-room-draft/v1"

    purpose: str
    kind: str = "plain"
    answers: int = 0
    keep_file: bool = False

    def __post_init__(self) -> None:
        said = is_text(self.purpose, 500) and bool(self.purpose.strip())
        require(said, "why you ask", "must be said in 1 to 500 printable characters")
        require(self.kind in KINDS, "the kind of query", f"must be {', '.join(KINDS)}")
        require(is_count(self.answers), "the number of answers", "must be an integer, at least 0")
        require(isinstance(self.keep_file, bool), "whether the file stays here", "must be true or false")

    def to_bytes(self) -> bytes:
        return canonical({"format": self.FORMAT, **{f.name: getattr(self, f.name) for f in fields(self)}})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        return cls(**take(parse(data, cls.FORMAT, "a draft"), field_names(cls), "a draft"))


@dataclass(frozen=True)
class Shown:
    """A draft as its member sees it."""

    id: str
    files: str
    purpose: str
    state: str
    failed: bool


class Drafts:
    """All drafts of one agent. The page makes them, one thread works on them."""

    def __init__(self, home: HomeFolder, identity: Identity, place: Place) -> None:
        self._home, self._identity, self._place = home, identity, place
        self._lock = threading.Lock()
        self._states: dict[str, tuple[str, bool]] = {}
        self.news = threading.Event()

    def _folder(self) -> Path:
        return self._place.folder("drafts")

    # --- the page's side ---

    def begin(self) -> Path:
        """A folder for a suspect's files, before the draft is complete."""
        if sum(path.is_dir() for path in self._folder().iterdir()) >= MOST_DRAFTS:
            raise RoomError("too many questions are being prepared: wait, or discard one", code="room.too-many")
        folder = self._folder() / secrets.token_hex(8)
        (folder / "files").mkdir(mode=0o700, parents=True)
        return folder

    def by_layers(self, folder: Path, before: Before, examiner: Card) -> None:
        """Keeps what a question by layers takes. Without a file of its own it is about the suspect of the plain one."""
        write_private(folder / _AFTER, before.path.read_bytes())
        write_private(folder / _EXAMINER, examiner.to_bytes())
        files = folder / "files"
        for path in files.iterdir():  # browsers send an empty one where none was chosen
            if not path.stat().st_size:
                path.unlink()
        if not any(files.iterdir()):
            certificate = Certificate.from_bytes(before.path.read_bytes())
            for file in certificate.finding.query.files:
                _link(self._place.folder("suspects", before.query) / file.name, files / file.name)

    def finish(self, folder: Path, draft: Draft) -> None:
        """The member has asked: from here on the agent does the rest."""
        files = [path for path in sorted((folder / "files").iterdir()) if path.stat().st_size]
        if not files:
            raise RoomError("choose the file of the model that you ask about", code="room.malformed")
        self._check(draft)
        write_private(folder / "draft.json", draft.to_bytes())
        self.news.set()

    def _check(self, draft: Draft) -> None:
        """What can be said before the suspect is read."""
        terms = self._home.only_consortium().manifest().terms
        if draft.answers and not terms.threshold <= draft.answers <= terms.members:
            raise InputError("the number of answers", f"must be {terms.threshold} to {terms.members}")

    def drop(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def discard(self, name: str) -> None:
        """A draft that failed, at its member's word."""
        with self._lock:
            failed = _ID.fullmatch(name) is not None and self._states.get(name, ("", False))[1]
            if not failed:
                raise RoomError("there is no such question that failed", code="room.not-found")
            self._states.pop(name)
        self.drop(self._folder() / name)

    def shown(self) -> list[Shown]:
        found = []
        for folder in self._waiting():
            try:
                draft = Draft.from_bytes((folder / "draft.json").read_bytes())
            except (OSError, QuorumarkError):
                continue  # it was done, or discarded, meanwhile
            with self._lock:
                state, failed = self._states.get(folder.name, ("waits for its turn", False))
            names = [path.name for path in sorted((folder / "files").glob("*"))]
            found.append(Shown(folder.name, ", ".join(names[:3]) or "the suspect", draft.purpose, state, failed))
        return found

    def _waiting(self) -> list[Path]:
        every = (path for path in self._folder().iterdir() if (path / "draft.json").exists())
        return sorted(every, key=lambda path: (path / "draft.json").stat().st_mtime_ns)

    # --- the agent's side ---

    def clear(self) -> None:
        """Uploads that an earlier agent never ended; when this one starts."""
        for folder in self._folder().iterdir():
            if not (folder / "draft.json").exists():
                self.drop(folder)

    def step(self, client: Client) -> None:
        """Goes on with every draft that has not failed. A room that is away is the caller's to wait for."""
        for folder in self._waiting():
            with self._lock:
                failed = self._states.get(folder.name, ("", False))[1]
            if failed:
                continue
            try:
                self._ask(client, folder)
            except InconclusiveError as error:
                self._say(folder, "; ".join([str(error), *sentences(error.problems)]), failed=True)
            except QuorumarkError as error:
                if error.code == "room.unreachable":
                    self._say(folder, "waits for the room")
                    raise
                self._say(folder, str(error), failed=True)
            except Exception as error:  # noqa: BLE001 - a suspect may be anything, and is not read again and again
                self._say(folder, f"it cannot be asked about ({type(error).__name__})", failed=True)

    def _say(self, folder: Path, text: str, *, failed: bool = False) -> None:
        with self._lock:
            self._states[folder.name] = text, failed

    def _ask(self, client: Client, folder: Path) -> None:
        draft = Draft.from_bytes(read_file(folder / "draft.json", "a draft"))
        files, kept = folder / "files", folder / "query.json"
        layers, after = self._layers(folder) if draft.kind == "layers" else (None, None)
        if not kept.exists():
            self._say(folder, "your agent reads the suspect")
            every = sorted(files.iterdir())
            source = every[0] if len(every) == 1 else files
            how = {"align": draft.kind == "aligned", "lora": draft.kind == "adapter"}
            if after is not None:  # the suspect is read as the plain query has read it
                how = how_aligned(self._home.only_consortium().manifest().terms, after.finding.query.alignment)
            made = compute_query(self._home, source, align=how["align"], lora=how["lora"], layers=layers)
            write_private(kept, made.to_bytes())
        query = Query.from_bytes(read_file(kept, "a query"))
        # the suspect goes where this agent looks for it anyway, before others are asked
        place = self._place.folder("suspects", query.digest())
        for path in sorted(files.iterdir()):  # a single file has another name in its query
            move(path, place / (query.files[0].name if len(query.files) == 1 else path.name))

        def progress(done: int, size: int) -> None:
            self._say(folder, f"the suspect goes to the room: {100 * done // max(1, size)} %")

        self._say(folder, "the question goes to the room")
        send_question(
            client,
            self._home,
            self._identity,
            query,
            {file.name: place / file.name for file in query.files},
            draft.purpose,
            answers=draft.answers,
            keep_file=draft.keep_file,
            after=after,
            progress=progress,
        )
        self.drop(folder)
        with self._lock:
            self._states.pop(folder.name, None)

    def _layers(self, folder: Path) -> tuple[AskLayers, Certificate]:
        after = Certificate.from_bytes(read_file(folder / _AFTER, "a certificate"))
        examiner = Card.from_bytes(read_file(folder / _EXAMINER, "a member's card"))
        return AskLayers.of(after, examiner), after


def _link(source: Path, target: Path) -> None:
    """The same file under another name; a copy, if need be."""
    if not source.is_file():
        raise RoomError("the model of that question is not here any more: choose its file", code="room.not-found")
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def plain_name(text: str) -> str:
    """A file's name as all agents accept it, from whatever a browser says."""
    name = _PLAIN.sub("_", re.split(r"[/\\]", text)[-1]).strip(" ")[-150:]
    return name if re.match("[A-Za-z0-9_]", name) else f"suspect{name[:100]}"


def free_bytes(folder: Path) -> int:
    """What may be written to the disk of a folder: one part in twenty stays free."""
    disk = shutil.disk_usage(os.fspath(folder))
    return max(0, disk.free - disk.total // 20)
