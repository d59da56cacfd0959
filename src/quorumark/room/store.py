"""What a room keeps: one SQLite file, and members' files by their digests (docs/room.md, "What the room stores").

    DATA/room.db                     who is where, entries, links and invitations as hashes, nonces
    DATA/files/CONSORTIUM/SHA256     whole files
    DATA/parts/CONSORTIUM/…          uploads that are not whole yet: their lengths say how far they got

A file is on disk, and was hashed, before anything names it; so a crash loses at most what nobody was told is there.
Nothing here is secret, and nothing is believed: names and sizes are limits, not claims.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quorumark.canonical import canonical, parse
from quorumark.checks import is_hex, is_name
from quorumark.consortium.signatures import verify
from quorumark.errors import QuorumarkError, RoomError
from quorumark.files import move
from quorumark.room.requests import WINDOW

__all__ = ["Entry", "Limits", "Person", "Seat", "Store"]

PART = 4 << 20
"""The most bytes in one part of an upload."""
DAY = 86_400
_INVITED = 7 * DAY
_ABANDONED = 7 * DAY
_TICKET = 60
_FORGET = 10  # seconds between two looks for nonces that are too old
_SESSION = DAY // 2
_MOST_ENTRIES, _MOST_MEMBERS, _MOST_LINKS = 200_000, 1_000, 10_000
_NAME = re.compile(r"[a-z]{1,20}(/[A-Za-z0-9._-]{1,80}){1,5}")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS consortia (id TEXT PRIMARY KEY, name TEXT, founder TEXT, made INTEGER);
CREATE TABLE IF NOT EXISTS members (
    consortium TEXT, key TEXT, name TEXT, card BLOB, active INTEGER, joined INTEGER, PRIMARY KEY (consortium, key));
CREATE TABLE IF NOT EXISTS invitations (hash TEXT PRIMARY KEY, consortium TEXT, expires INTEGER);
CREATE TABLE IF NOT EXISTS entries (
    consortium TEXT, number INTEGER, author TEXT, name TEXT, sha256 TEXT, size INTEGER, time INTEGER, gone INTEGER,
    PRIMARY KEY (consortium, number), UNIQUE (consortium, author, name));
CREATE TABLE IF NOT EXISTS files (
    consortium TEXT, sha256 TEXT, size INTEGER, author TEXT, PRIMARY KEY (consortium, sha256));
CREATE TABLE IF NOT EXISTS uploads (
    consortium TEXT, author TEXT, sha256 TEXT, size INTEGER, time INTEGER, PRIMARY KEY (consortium, author, sha256));
CREATE TABLE IF NOT EXISTS nonces (key TEXT, nonce TEXT, time INTEGER, PRIMARY KEY (key, nonce));
CREATE INDEX IF NOT EXISTS old_nonces ON nonces (time);
CREATE TABLE IF NOT EXISTS links (
    hash TEXT PRIMARY KEY, kind TEXT, consortium TEXT, member TEXT, parent TEXT, label TEXT, scope TEXT,
    expires INTEGER);
"""


@dataclass(frozen=True)
class Limits:
    """What the host allows: bytes for a consortium and for one file, how many consortia, and who may found one."""

    consortium: int = 50 << 30
    file: int = 20 << 30
    consortia: int = 100
    founders: tuple[str, ...] | None = None  # None: anyone


@dataclass(frozen=True)
class Person:
    """Somebody who joined."""

    key: str
    name: str
    card: bytes
    active: bool


@dataclass(frozen=True)
class Entry:
    """A name that an author gave to a file."""

    number: int
    author: str
    name: str
    sha256: str
    size: int
    time: int
    gone: bool


@dataclass(frozen=True)
class Seat:
    """Who looks at the room's pages: a member, or the holder of a link (`member` is empty), maybe at one query only."""

    consortium: str
    member: str
    label: str
    scope: str


def hashed(token: str) -> str:
    """What the room keeps of a token: who reads its database cannot use one. Tokens have 256 random bits."""
    return hashlib.sha256(token.encode()).hexdigest()


class Store:
    """One room's data. For one thread, but for `write_part`, which touches files only."""

    def __init__(self, folder: Path, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(folder / "room.db", os.O_RDWR | os.O_CREAT, 0o600)):
            pass
        self._db = sqlite3.connect(folder / "room.db", isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.executescript(_SCHEMA)
        self._forgot = 0  # when old nonces were last deleted

    def close(self) -> None:
        self._db.close()

    def reader(self) -> Store:
        """The same data for another thread."""
        return Store(self._folder, self.limits)

    # --- requests ---

    def use_nonce(self, key: str, nonce: str, now: int, *, reads: bool = False) -> None:
        """Refuses a request that came before. That of a request that only reads may be lost in a power cut, not in a
        crash of this process: members ask for news often, and a sync for each would be most of the room's work."""
        if reads:
            self._db.execute("PRAGMA synchronous=NORMAL")
        try:
            if now >= self._forgot + _FORGET:
                self._forgot = now
                self._db.execute("DELETE FROM nonces WHERE time < ?", (now - 3 * WINDOW,))
            self._db.execute("INSERT INTO nonces VALUES (?, ?, ?)", (key, nonce, now))
        except sqlite3.IntegrityError:
            raise RoomError("this request came before: it is not done twice", code="room.replayed") from None
        finally:
            if reads:
                self._db.execute("PRAGMA synchronous=FULL")

    # --- people ---

    def create_consortium(self, key: str, card: bytes, name: str, now: int) -> str:
        """A new consortium's place in the room; its id. Asked again by who did not hear the answer, it is the same one,
        as long as nobody else is there and nothing was put there."""
        founders = self.limits.founders
        if founders is not None and key not in founders:
            raise RoomError(
                "this room's host lets others found a consortium: send the host your card", code="room.not-allowed"
            )
        if not is_name(name):
            raise RoomError("a consortium's name must be 1 to 100 printable characters", code="room.malformed")
        same = self._db.execute(
            "SELECT id FROM consortia WHERE founder = ? AND name = ? AND id NOT IN (SELECT consortium FROM entries) "
            "AND (SELECT COUNT(*) FROM members WHERE consortium = id) = 1",
            (key, name),
        ).fetchone()
        if same is not None:
            return str(same[0])
        (count,) = self._db.execute("SELECT COUNT(*) FROM consortia").fetchone()
        if count >= self.limits.consortia:
            raise RoomError(f"this room has place for {count} consortia: ask its host", code="room.quota")
        person = _person(card, key)
        consortium = secrets.token_hex(16)
        self._db.execute("BEGIN")
        self._db.execute("INSERT INTO consortia VALUES (?, ?, ?, ?)", (consortium, name, key, now))
        self._db.execute("INSERT INTO members VALUES (?, ?, ?, ?, 1, ?)", (consortium, key, person.name, card, now))
        self._db.execute("COMMIT")
        return consortium

    def invite(self, consortium: str, key: str, count: int, now: int) -> list[str]:
        """Codes by which so many people can join, each once, for a week."""
        self.require_founder(consortium, key)
        if not 1 <= count <= 100:
            raise RoomError("between 1 and 100 people can be invited at a time", code="room.malformed")
        codes = [secrets.token_urlsafe(32) for _ in range(count)]
        self._db.execute("DELETE FROM invitations WHERE expires < ?", (now,))
        rows = [(hashed(code), consortium, now + _INVITED) for code in codes]
        self._db.executemany("INSERT INTO invitations VALUES (?, ?, ?)", rows)
        return codes

    def join(self, consortium: str, key: str, card: bytes, code: str, now: int) -> None:
        """Takes an invitation. Who is in already stays in, whatever the code."""
        row = self._db.execute(
            "SELECT active FROM members WHERE consortium = ? AND key = ?", (consortium, key)
        ).fetchone()
        if row is not None and row[0]:
            return
        person = _person(card, key)
        names = {other.name for other in self.people(consortium)}
        if row is None and person.name in names:
            raise RoomError(f"somebody called {person.name!r} is here already", code="room.name-taken")
        if len(names) >= _MOST_MEMBERS:
            raise RoomError(f"a consortium has at most {_MOST_MEMBERS} members here", code="room.quota")
        self._db.execute("BEGIN IMMEDIATE")
        found = self._db.execute(
            "DELETE FROM invitations WHERE hash = ? AND consortium = ? AND expires >= ? RETURNING hash",
            (hashed(code), consortium, now),
        ).fetchone()
        if found is None:
            self._db.execute("ROLLBACK")
            raise RoomError(
                "the invitation is unknown, used or too old: ask the founder for another", code="room.no-invitation"
            )
        self._db.execute(
            "INSERT OR REPLACE INTO members VALUES (?, ?, ?, ?, 1, ?)", (consortium, key, person.name, card, now)
        )
        self._db.execute("COMMIT")

    def remove(self, consortium: str, key: str, name: str) -> None:
        """Takes somebody's place away, with the links that they made, and uploads under way. What they wrote stays."""
        self.require_founder(consortium, key)
        found = [person for person in self.people(consortium) if person.name == name and person.key != key]
        if not found:
            raise RoomError(f"nobody else called {name!r} is here", code="room.not-found")
        who = (consortium, found[0].key)
        self._db.execute("BEGIN")
        self._db.execute("UPDATE members SET active = 0 WHERE consortium = ? AND key = ?", who)
        self._db.execute(
            "DELETE FROM links WHERE consortium = ?1 AND (member = ?2 OR parent IN "
            "(SELECT hash FROM links WHERE consortium = ?1 AND member = ?2))",
            who,
        )
        self._db.execute("COMMIT")
        uploads = self._db.execute("SELECT sha256 FROM uploads WHERE consortium = ? AND author = ?", who).fetchall()
        for (sha256,) in uploads:
            self._drop_upload(*who, sha256)

    def people(self, consortium: str) -> list[Person]:
        rows = self._db.execute(
            "SELECT key, name, card, active FROM members WHERE consortium = ? ORDER BY joined, rowid", (consortium,)
        )
        return [Person(key, name, card, bool(active)) for key, name, card, active in rows]

    def require_member(self, consortium: str, key: str) -> None:
        """Refuses strangers, former members, and members of other consortia; and says to none of them what there is."""
        if not self._is_member(consortium, key):
            raise RoomError("you are not a member here: ask the founder for an invitation", code="room.not-a-member")

    def require_founder(self, consortium: str, key: str) -> None:
        self.require_member(consortium, key)
        if self.about(consortium)[1] != key:
            raise RoomError("only who founded the consortium here can do that", code="room.not-allowed")

    def about(self, consortium: str) -> tuple[str, str]:
        """The consortium's name, and its founder's key."""
        row = self._db.execute("SELECT name, founder FROM consortia WHERE id = ?", (consortium,)).fetchone()
        if row is None:
            raise RoomError("there is no such consortium in this room", code="room.not-found")
        return str(row[0]), str(row[1])

    # --- files ---

    def have(self, consortium: str, author: str, sha256: str) -> tuple[int, bool]:
        """How many bytes of a file are here, and whether it is whole."""
        path = self._file(consortium, sha256)
        row = self._db.execute(
            "SELECT size FROM files WHERE consortium = ? AND sha256 = ?", (consortium, sha256)
        ).fetchone()
        if row is not None and path.exists():
            return int(row[0]), True
        part = self._part(consortium, author, sha256)
        return (part.stat().st_size if part.exists() else 0), False

    def begin_part(self, consortium: str, author: str, sha256: str, size: int, offset: int, now: int) -> Path | None:
        """Where a part goes, within the quota; None if the file is whole."""
        if not is_hex(sha256, 32) or size < 0 or offset < 0:
            raise RoomError("an upload needs a digest, a size and an offset", code="room.malformed")
        if size > self.limits.file:
            raise RoomError(f"a file may have {self.limits.file:,} bytes here", code="room.too-large")
        have, whole = self.have(consortium, author, sha256)
        if whole:
            return None
        self._forget_abandoned(consortium, now)
        known = self._db.execute(
            "SELECT size FROM uploads WHERE consortium = ? AND author = ? AND sha256 = ?", (consortium, author, sha256)
        ).fetchone()
        if offset != have or (known is not None and known[0] != size):
            raise RoomError(
                f"the next part begins at {have}, in a file of the size that was said", code="room.wrong-part"
            )
        if known is None:
            self._require_room(consortium, author, size)
        self._db.execute(
            "INSERT OR REPLACE INTO uploads VALUES (?, ?, ?, ?, ?)", (consortium, author, sha256, size, now)
        )
        part = self._part(consortium, author, sha256)
        part.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return part

    def _require_room(self, consortium: str, author: str, size: int) -> None:
        """Refuses what is beyond the quota, or beyond this member's share of it: nobody can take the others' place.

        What is under way counts with the size that was said.
        """
        kept, own = self._db.execute(
            "SELECT COALESCE(SUM(size), 0), COALESCE(SUM(CASE author WHEN ?2 THEN size ELSE 0 END), 0) FROM "
            "(SELECT size, author FROM files WHERE consortium = ?1 UNION ALL "
            "SELECT size, author FROM uploads WHERE consortium = ?1)",
            (consortium, author),
        ).fetchone()
        members = sum(person.active for person in self.people(consortium))
        share = self.limits.consortium // max(1, members)
        if kept + size > self.limits.consortium or own + size > share:
            raise RoomError(
                f"a consortium may keep {self.limits.consortium:,} bytes here and each member {share:,}; {kept:,} are "
                f"used, {own:,} by you: delete a suspect, or ask the host",
                code="room.quota",
            )

    @staticmethod
    def write_part(part: Path, sha256: str, size: int, offset: int, data: bytes) -> bool:
        """Writes a part; whether the file is whole now, and is what its digest says."""
        if offset + len(data) > size:
            raise RoomError("the part ends behind the file's end", code="room.wrong-part")
        with os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            file.seek(offset)
            file.write(data)
            file.flush()
            if offset + len(data) < size:
                return False
            os.fsync(file.fileno())
            file.seek(0)
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != sha256:
            part.unlink()
            raise RoomError(
                "the file is not what its digest says: it was dropped, upload it again", code="room.wrong-digest"
            )
        return True

    def finish(self, consortium: str, author: str, sha256: str, size: int) -> None:
        """A whole file takes its place."""
        target = self._file(consortium, sha256)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = self._part(consortium, author, sha256)
        if part.exists():
            move(part, target)
        self._db.execute("BEGIN")
        self._db.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?)", (consortium, sha256, size, author))
        self._db.execute(
            "DELETE FROM uploads WHERE consortium = ? AND sha256 = ? AND author = ?", (consortium, sha256, author)
        )
        self._db.execute("COMMIT")

    def file(self, consortium: str, sha256: str) -> Path:
        """Where a whole file is."""
        path = self._file(consortium, sha256)
        row = self._db.execute(
            "SELECT 1 FROM files WHERE consortium = ? AND sha256 = ?", (consortium, sha256)
        ).fetchone()
        if row is None or not path.exists():
            raise RoomError("there is no such file, or it was deleted", code="room.gone")
        return path

    def delete(self, consortium: str, key: str, sha256: str) -> int:
        """Deletes a file's bytes: who named it may, and the founder. How many entries named it."""
        entries = [entry for entry in self.entries(consortium) if entry.sha256 == sha256]
        if not entries:
            raise RoomError("there is no such file", code="room.not-found")
        if self.about(consortium)[1] != key and any(entry.author != key for entry in entries):
            raise RoomError("only who uploaded a file, or the founder, can delete it", code="room.not-allowed")
        self._db.execute("BEGIN")
        self._db.execute("DELETE FROM files WHERE consortium = ? AND sha256 = ?", (consortium, sha256))
        self._db.execute("UPDATE entries SET gone = 1 WHERE consortium = ? AND sha256 = ?", (consortium, sha256))
        self._db.execute("COMMIT")
        self._file(consortium, sha256).unlink(missing_ok=True)
        return len(entries)

    # --- entries ---

    def add_entry(self, consortium: str, author: str, name: str, sha256: str, now: int) -> int:
        """Names a file that is here. A name is given once; to the same file, it may be given again."""
        if not isinstance(name, str) or not _NAME.fullmatch(name) or ".." in name:
            raise RoomError("an entry's name must be like setup/1-commit/3.msg", code="room.malformed")
        row = self._db.execute(
            "SELECT number, sha256 FROM entries WHERE consortium = ? AND author = ? AND name = ?",
            (consortium, author, name),
        ).fetchone()
        if row is not None:
            if row[1] != sha256:
                raise RoomError(f"{name!r} is there already, and is another file", code="room.exists")
            return int(row[0])
        size = self.file(consortium, sha256).stat().st_size
        own = self._db.execute(
            "SELECT COUNT(*) FROM entries WHERE consortium = ? AND author = ?", (consortium, author)
        ).fetchone()[0]
        share = _MOST_ENTRIES // max(1, sum(person.active for person in self.people(consortium)))
        if own >= share:
            raise RoomError(f"each member may have {share:,} entries here", code="room.quota")
        number = (
            "SELECT ?1, COALESCE(MAX(number), 0) + 1, ?2, ?3, ?4, ?5, ?6, 0 FROM entries WHERE consortium = ?1 "
            "HAVING COALESCE(MAX(number), 0) < ?7"
        )
        values = (consortium, author, name, sha256, size, now, _MOST_ENTRIES)
        made = self._db.execute(f"INSERT INTO entries {number} RETURNING number", values).fetchone()
        if made is None:
            raise RoomError(f"a consortium may have {_MOST_ENTRIES:,} entries here", code="room.quota")
        return int(made[0])

    def entries(self, consortium: str, after: int = 0, most: int = _MOST_ENTRIES) -> list[Entry]:
        rows = self._db.execute(
            "SELECT number, author, name, sha256, size, time, gone FROM entries WHERE consortium = ? AND number > ? "
            "ORDER BY number LIMIT ?",
            (consortium, after, most),
        )
        return [Entry(n, a, name, sha, size, t, bool(gone)) for n, a, name, sha, size, t, gone in rows]

    def news(self, consortium: str) -> str:
        """A text that changes with every entry, deleted file and person that comes or goes."""
        entries, gone = self._db.execute(
            "SELECT COALESCE(MAX(number), 0), COALESCE(SUM(gone), 0) FROM entries WHERE consortium = ?", (consortium,)
        ).fetchone()
        people, active = self._db.execute(
            "SELECT COUNT(*), COALESCE(SUM(active), 0) FROM members WHERE consortium = ?", (consortium,)
        ).fetchone()
        return f"{entries}.{gone}.{people}.{active}"

    # --- links, tickets and sessions: read-only ---

    def make_link(self, consortium: str, member: str, label: str, scope: str, days: int, now: int) -> str:
        """A token for a judge or an auditor, for so many days; `scope`: a query's digest, or "" for everything."""
        if not is_name(label) or not 1 <= days <= 3650 or not (scope == "" or is_hex(scope, 32)):
            raise RoomError("a link needs a label, 1 to 3650 days, and a query's digest or none", code="room.malformed")
        (count,) = self._db.execute(
            "SELECT COUNT(*) FROM links WHERE kind = 'link' AND consortium = ?", (consortium,)
        ).fetchone()
        if count >= _MOST_LINKS:
            raise RoomError("there are too many links: revoke some", code="room.quota")
        if self._db.execute(
            "SELECT 1 FROM links WHERE kind = 'link' AND consortium = ? AND label = ?", (consortium, label)
        ).fetchone():
            raise RoomError(
                f"there is a link called {label!r}: revoke it, or choose another label", code="room.name-taken"
            )
        return self._token("link", consortium, member, "", label, scope, now + days * DAY)

    def revoke(self, consortium: str, key: str, label: str) -> None:
        """Ends a link, with the sessions that it opened: who made it may, and the founder."""
        row = self._db.execute(
            "SELECT hash, member FROM links WHERE kind = 'link' AND consortium = ? AND label = ?", (consortium, label)
        ).fetchone()
        if row is None:
            raise RoomError(f"there is no link called {label!r}", code="room.not-found")
        if key not in (row[1], self.about(consortium)[1]):
            raise RoomError("only who made a link, or the founder, can revoke it", code="room.not-allowed")
        self._db.execute("DELETE FROM links WHERE hash = ? OR parent = ?", (row[0], row[0]))

    def make_ticket(self, consortium: str, member: str, now: int) -> str:
        """A token by which a member opens the room's pages in a browser, once, within a minute."""
        return self._token("ticket", consortium, member, "", "", "", now + _TICKET)

    def open_session(self, token: str, now: int) -> str:
        """A browser's session, from a ticket (which is used up) or a link."""
        self._db.execute("DELETE FROM links WHERE expires < ?", (now,))
        row = self._db.execute(
            "SELECT hash, kind, consortium, member, label, scope, expires FROM links "
            "WHERE hash = ? AND kind != 'session'",
            (hashed(token),),
        ).fetchone()
        if row is None:
            raise RoomError("this link is unknown, used, revoked or too old: ask for another", code="room.not-allowed")
        digest, kind, consortium, member, label, scope, expires = row
        if kind == "ticket":
            self._db.execute("DELETE FROM links WHERE hash = ?", (digest,))
            return self._token("session", consortium, member, "", label, scope, now + _SESSION)
        until = min(expires, now + _SESSION)
        return self._token("session", consortium, "", digest, label, scope, until)

    def seat(self, token: str, now: int) -> Seat:
        """Who a session is."""
        row = self._db.execute(
            "SELECT consortium, member, parent, label, scope FROM links "
            "WHERE hash = ? AND kind = 'session' AND expires >= ?",
            (hashed(token), now),
        ).fetchone()
        if row is None:
            raise RoomError("open the room from your agent's page, or by your link", code="room.not-allowed")
        consortium, member, parent, label, scope = row
        if parent:
            link = "SELECT member FROM links WHERE hash = ? AND expires >= ?"
            maker = self._db.execute(link, (parent, now)).fetchone()
            if maker is None or not self._is_member(consortium, maker[0]):
                raise RoomError("this link was revoked, or is too old: ask for another", code="room.not-allowed")
        else:
            self.require_member(consortium, member)
        return Seat(consortium, member, label, scope)

    def links(self, consortium: str) -> list[tuple[str, str, int]]:
        """Labels, scopes and ends of the links that hold."""
        rows = self._db.execute(
            "SELECT label, scope, expires FROM links WHERE kind = 'link' AND consortium = ? ORDER BY label",
            (consortium,),
        )
        return list(rows)

    # --- inside ---

    def _is_member(self, consortium: str, key: str) -> bool:
        row = self._db.execute(
            "SELECT active FROM members WHERE consortium = ? AND key = ?", (consortium, key)
        ).fetchone()
        return row is not None and bool(row[0])

    def _token(self, kind: str, consortium: str, member: str, parent: str, label: str, scope: str, expires: int) -> str:
        token = secrets.token_urlsafe(32)
        row = (hashed(token), kind, consortium, member, parent, label, scope, expires)
        self._db.execute("INSERT INTO links VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        return token

    def _forget_abandoned(self, consortium: str, now: int) -> None:
        old: Sequence[tuple[str, str]] = self._db.execute(
            "SELECT author, sha256 FROM uploads WHERE consortium = ? AND time < ?", (consortium, now - _ABANDONED)
        ).fetchall()
        for author, sha256 in old:
            self._drop_upload(consortium, author, sha256)

    def _drop_upload(self, consortium: str, author: str, sha256: str) -> None:
        self._part(consortium, author, sha256).unlink(missing_ok=True)
        self._db.execute(
            "DELETE FROM uploads WHERE consortium = ? AND author = ? AND sha256 = ?", (consortium, author, sha256)
        )

    def _file(self, consortium: str, sha256: str) -> Path:
        if not is_hex(consortium, 16) or not is_hex(sha256, 32):
            raise RoomError("a file is named by its SHA-256 in hex", code="room.malformed")
        return self._folder / "files" / consortium / sha256

    def _part(self, consortium: str, author: str, sha256: str) -> Path:
        self._file(consortium, sha256)  # both are hex
        return self._folder / "parts" / consortium / f"{author[:16]}-{sha256}"


def _person(card: bytes, key: str) -> Person:
    """A card, if it is signed by the key that it shows, and that key asks."""
    try:
        body = parse(card, "quorumark-member/v1", "a member's card")
        signature = str(body.pop("signature", ""))
        name = body.get("name")
        if body.keys() != {"name", "ed25519", "x25519"} or body["ed25519"] != key or not is_name(name):
            raise RoomError("the card is not that of who asks", code="room.malformed")
        verify(key, "card", canonical({"format": "quorumark-member/v1", **body}), signature, "the card")
    except RoomError:
        raise
    except QuorumarkError as error:
        raise RoomError(f"the card cannot be used: {error}", code="room.malformed") from None
    return Person(key, str(name), card, True)
