"""A member's side of the requests to a room: signed, to one address, following no redirects.

Nothing that comes back is believed here: files are compared with the digest that was asked for, and limited in size.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import re
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quorumark.canonical import canonical, read_json
from quorumark.checks import is_count, is_hex
from quorumark.consortium.identity import Identity
from quorumark.errors import QuorumarkError, RoomError
from quorumark.files import replacing
from quorumark.room.codes import REFUSED
from quorumark.room.requests import address_of, sign_request

__all__ = ["MOST_ENTRIES", "Client", "Notice", "answers_at"]

_PART = 4 << 20
_LARGEST_ANSWER = 1 << 24
_SECONDS = 60.0
_PATIENCE = 20  # seconds: so long a room may have too many requests
MOST_ENTRIES = 200_000
"""As many as a room keeps for a consortium."""
_RANDOM = "[A-Za-z0-9_-]{43}"  # 32 random bytes


@dataclass(frozen=True)
class Notice:
    """An entry as the room tells it: a claim."""

    number: int
    author: str
    name: str
    sha256: str
    size: int
    gone: bool


def answers_at(host: str, port: int) -> bool:
    """Whether a room answers there, in plain HTTP or in TLS. Nothing is sent but the question, so that its certificate,
    which is for another name than this machine's own address, need not be checked."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    plain = http.client.HTTPConnection(host, port, timeout=5)
    for connection in (plain, http.client.HTTPSConnection(host, port, timeout=5, context=context)):
        try:
            connection.request("GET", "/")
            if connection.getresponse().status == http.HTTPStatus.OK:
                return True
        except (OSError, http.client.HTTPException):
            continue
        finally:
            connection.close()
    return False


class Client:
    """One member in one room; for one thread."""

    def __init__(self, address: str, identity: Identity, consortium: str = "", cafile: Path | None = None) -> None:
        self._connection: http.client.HTTPConnection | None = None
        self._ended = False
        self.address, self.consortium = address_of(address), consortium
        self._identity = identity
        self._parts = urlsplit(self.address)
        self._cafile = cafile

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def interrupt(self) -> None:
        """Ends a request that another thread waits for."""
        self._ended = True
        connection = self._connection
        with contextlib.suppress(OSError, AttributeError):
            if connection is not None and connection.sock is not None:
                connection.sock.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        self.close()

    # --- requests ---

    def post(self, what: str, **fields: Any) -> dict[str, Any]:
        """A request that changes something in the room of this consortium."""
        return self._object("POST", self._place(what), canonical(fields))

    def create_consortium(self, name: str) -> str:
        """A new consortium's place; its id."""
        body = canonical({"name": name, "card": self._identity.card().to_bytes().decode()})
        found = self._object("POST", "/api/found", body).get("consortium")
        if not is_hex(found, 16):
            raise _strange("no id of a consortium")
        self.consortium = str(found)
        return self.consortium

    def join(self, code: str) -> None:
        self.post("join", code=code, card=self._identity.card().to_bytes().decode())

    def invite(self, count: int) -> list[str]:
        """Invitations for so many people, fit to be pasted into a shell."""
        found = self.post("invite", count=count).get("invitations")
        if not isinstance(found, list) or len(found) != count:
            raise _strange("no list of invitations")
        return [self._own(f"/c/{self.consortium}#", text) for text in found]

    def link(self, label: str, query: str, days: int) -> str:
        """A read-only link for somebody else."""
        return self._own("/open/", self.post("link", label=label, query=query, days=days).get("link"))

    def ticket(self) -> str:
        """A link that opens the room's pages for this member, once."""
        return self._own("/open/", self.post("ticket").get("link"))

    def about(self) -> dict[str, Any]:
        """What the room says about the consortium and who is in it."""
        return self._object("GET", self._place(""))

    def log(self, after: int, wait: int = 0) -> list[Notice]:
        """Entries after a number, at most a page of them; waits so many seconds for one."""
        found = self._object("GET", self._place(f"log?after={after}&wait={wait}"), wait=wait).get("entries")
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            raise _strange("no list of entries")
        return [_notice(one) for one in found]

    def whole_log(self) -> list[Notice]:
        """All entries. A room that never ends is not read for ever."""
        every: list[Notice] = []
        while found := self.log(every[-1].number if every else 0):
            if (every and found[-1].number <= every[-1].number) or len(every) + len(found) > MOST_ENTRIES:
                raise _strange("a log without an end")
            every += found
        return every

    def upload(self, source: Path | bytes, name: str, progress: Callable[[int, int], None] | None = None) -> str:
        """Puts a file into the room, from where an earlier attempt ended, and names it; its SHA-256."""
        sha256, size = _hash(source)
        have = self._object("GET", self._place(f"upload/{sha256}"))
        at, whole = have.get("have"), have.get("whole") is True
        if not is_count(at) or int(at or 0) > size:
            raise _strange("more of a file than there is")
        at = int(at or 0)
        while not whole:
            part = _read_part(source, at)
            answer = self._object("PUT", self._place(f"upload/{sha256}?size={size}&offset={at}"), part)
            whole, at = answer.get("whole") is True, at + len(part)
            if progress is not None:
                progress(at, size)
            if at >= size and not whole:
                raise _strange("that a whole file is not whole")
        self.post("entry", name=name, sha256=sha256)
        return sha256

    def small(self, notice: Notice, most: int) -> bytes:
        """A file of at most so many bytes, as its digest says."""
        if notice.size > most:
            raise RoomError(
                f"{notice.name!r} has {notice.size:,} bytes in the room, more than {most:,}: refused",
                code="room.too-large",
            )
        data = self._send("GET", self._place(f"file/{notice.sha256}"), b"", most=most)
        if hashlib.sha256(data).hexdigest() != notice.sha256:
            raise RoomError(f"{notice.name!r} is not what its digest says: refused", code="room.wrong-digest")
        return data

    def download(self, sha256: str, size: int, target: Path) -> None:
        """A file of any size to a place on disk, whole and as its digest says, or not at all."""
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        hashed, at = hashlib.sha256(), 0
        with replacing(target) as file:
            while at < size:
                last = min(size, at + _PART) - 1
                part = self._send(
                    "GET", self._place(f"file/{sha256}"), b"", {"Range": f"bytes={at}-{last}"}, most=_PART
                )
                if len(part) != last - at + 1:
                    raise _strange("another part of a file than was asked for")
                hashed.update(part)
                file.write(part)
                at += len(part)
            if hashed.hexdigest() != sha256:
                raise RoomError(f"{target.name!r} is not what its digest says: refused", code="room.wrong-digest")

    # --- inside ---

    def _own(self, start: str, text: object) -> str:
        """An address at this room that ends in a token. People paste it: it must not be anything else."""
        if not isinstance(text, str) or re.fullmatch(re.escape(self.address + start) + _RANDOM, text) is None:
            raise _strange("a link to elsewhere")
        return text

    def _place(self, what: str) -> str:
        return f"/api/c/{self.consortium}" + (f"/{what}" if what else "")

    def _object(self, method: str, path: str, body: bytes = b"", wait: float = 0) -> dict[str, Any]:
        data = self._send(method, path, body, wait=wait)
        try:
            found = read_json(data, "a room's answer")
        except QuorumarkError:
            found = None
        if not isinstance(found, dict):
            raise _strange("no JSON object")
        return found

    def _send(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: dict[str, str] | None = None,
        wait: float = 0,
        most: int = _LARGEST_ANSWER,
    ) -> bytes:
        """The answer. Where the room has too many requests, the same is sent again a little later."""
        for _ in range(_PATIENCE):
            try:
                return self._sent(method, path, body, headers, wait, most)
            except RoomError as error:
                if error.code != "room.too-many" or self._ended:
                    raise
            time.sleep(1)
        return self._sent(method, path, body, headers, wait, most)

    def _sent(
        self, method: str, path: str, body: bytes, headers: dict[str, str] | None, wait: float, most: int
    ) -> bytes:
        used = self._connection is not None  # the room may have closed a connection that was quiet for a while
        try:
            try:
                answer, data = self._once(method, path, body, headers or {}, wait, most)
            except (ConnectionError, http.client.BadStatusLine):
                self.close()
                if not used or self._ended:
                    raise
                answer, data = self._once(method, path, body, headers or {}, wait, most)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise RoomError(
                f"the room at {self.address} cannot be reached ({type(error).__name__}): it is tried again",
                code="room.unreachable",
            ) from None
        if answer.will_close or len(data) > most:
            self.close()
        if len(data) > most:
            raise _strange(f"more than {most:,} bytes")
        if answer.status not in (200, 206):
            raise _told(answer.status, data)
        return data

    def _once(
        self, method: str, path: str, body: bytes, headers: dict[str, str], wait: float, most: int
    ) -> tuple[http.client.HTTPResponse, bytes]:
        signed = sign_request(self._identity, self.address, method, path, body, int(time.time()), os.urandom(16).hex())
        connection = self._connected(_SECONDS + wait)
        connection.request(method, path, body, {**signed, **headers})
        answer = connection.getresponse()
        data = answer.read(most + 1)
        if answer.length and len(data) <= most:  # the room ended in the middle of its answer
            raise http.client.IncompleteRead(data, answer.length)
        return answer, data

    def _connected(self, seconds: float) -> http.client.HTTPConnection:
        if self._connection is None:
            host, port = self._parts.hostname or "", self._parts.port
            if self._parts.scheme == "https":
                context = ssl.create_default_context(cafile=None if self._cafile is None else str(self._cafile))
                self._connection = http.client.HTTPSConnection(host, port, timeout=seconds, context=context)
            else:
                self._connection = http.client.HTTPConnection(host, port, timeout=seconds)
        if self._connection.sock is not None:
            self._connection.sock.settimeout(seconds)
        return self._connection


def _strange(what: str) -> RoomError:
    return RoomError(f"the room answered with {what}: it is not a room of this release", code="room.answer")


def _told(status: int, data: bytes) -> RoomError:
    """A refusal by its code, if it is one of a room's; nothing of the room's words."""
    try:
        code = str(json.loads(data)["code"])
    except (ValueError, KeyError, TypeError, RecursionError):
        code = ""
    if code not in REFUSED:
        return RoomError(f"the room answered with the HTTP status {status}", code="room.answer")
    return RoomError(f"the room refuses: {REFUSED[code]}", code=code)


def _notice(body: dict[str, Any]) -> Notice:
    number, author, name, sha256, size, gone = (
        body.get(key) for key in ("number", "author", "name", "sha256", "size", "gone")
    )
    if not (is_count(number, 1) and is_hex(author, 32) and is_hex(sha256, 32) and is_count(size)):
        raise _strange("an entry that is none")
    if not isinstance(name, str) or len(name) > 500 or not isinstance(gone, bool):
        raise _strange("an entry that is none")
    return Notice(int(number or 0), str(author), name, str(sha256), int(size or 0), gone)


def _hash(source: Path | bytes) -> tuple[str, int]:
    if isinstance(source, bytes):
        return hashlib.sha256(source).hexdigest(), len(source)
    with source.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest(), source.stat().st_size


def _read_part(source: Path | bytes, at: int) -> bytes:
    if isinstance(source, bytes):
        return source[at : at + _PART]
    with source.open("rb") as file:
        file.seek(at)
        return file.read(_PART)
