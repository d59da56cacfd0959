"""What a member signs of a request to a room (docs/room.md, "Signed requests").

    headers = sign_request(identity, room, "POST", "/api/c/…/entry", body, now, nonce)      # the agent
    key = check_request(room, "POST", path, body, headers, now)                             # the room

The statement binds the room's address, method, path with its query string, body, time and a nonce. The room remembers
nonces for longer than it accepts their time, so that no request counts twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Protocol
from urllib.parse import urlsplit

from quorumark.canonical import canonical
from quorumark.checks import is_hex
from quorumark.consortium.signatures import verify
from quorumark.errors import InputError, RoomError, SignatureError

__all__ = ["HEADERS", "WINDOW", "address_of", "check_request", "claimed_key", "sign_request"]

PURPOSE = "room request"
FORMAT = "quorumark-room-request/v1"
WINDOW = 120
"""Seconds that a request's time may be off."""
HEADERS = ("quorumark-key", "quorumark-time", "quorumark-nonce", "quorumark-signature")


class Signer(Protocol):
    """A member's identity, as far as requests need it."""

    @property
    def ed25519(self) -> str: ...

    def sign(self, purpose: str, data: bytes) -> bytes: ...


def address_of(url: str) -> str:
    """A room's address in its one spelling: scheme, host, and the port where it is not the scheme's own."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise InputError("the room's address", "must be like https://room.example, without a password", repr(url[:200]))
    try:
        port = parts.port
    except ValueError:
        raise InputError("the room's address", "must have a port from 1 to 65535", repr(url[:200])) from None
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    usual = {"http": 80, "https": 443}[parts.scheme]
    return f"{parts.scheme}://{host}" + ("" if port in (None, usual) else f":{port}")


def _statement(room: str, method: str, path: str, body: bytes, time: int, nonce: str) -> bytes:
    about = {"format": FORMAT, "room": room, "method": method, "path": path, "time": time, "nonce": nonce}
    return canonical(about | {"body": hashlib.sha256(body).hexdigest()})


def sign_request(
    identity: Signer, room: str, method: str, path: str, body: bytes, time: int, nonce: str
) -> dict[str, str]:
    """The headers that go with a request."""
    signature = identity.sign(PURPOSE, _statement(room, method, path, body, time, nonce)).hex()
    return dict(zip(HEADERS, (identity.ed25519, str(time), nonce, signature), strict=True))


def check_request(
    room: str, method: str, path: str, body: bytes, headers: Mapping[str, str], now: int
) -> tuple[str, str]:
    """The key that signed a request, and its nonce, which the caller must not have seen before."""
    key, time, nonce, signature = _read(headers)
    try:
        verify(key, PURPOSE, _statement(room, method, path, body, int(time), nonce), signature, "the request")
    except SignatureError:
        raise RoomError(
            f"the request's signature does not hold for {method} at {room}: use the room's own address",
            code="room.not-signed",
        ) from None
    _check_time(int(time), now)
    return key, nonce


def claimed_key(headers: Mapping[str, str], now: int) -> str:
    """Who a request says that it is from, before its body is there: a claim, and a time that is right."""
    key, time, _, _ = _read(headers)
    _check_time(int(time), now)
    return key


def _read(headers: Mapping[str, str]) -> tuple[str, str, str, str]:
    key, time, nonce, signature = (headers.get(name, "") for name in HEADERS)
    sound = is_hex(key, 32) and is_hex(nonce, 16) and is_hex(signature, 64)
    if not sound or not (time.isascii() and time.isdecimal() and len(time) < 13):
        raise RoomError("the request is not signed by a member: use quorumark room join", code="room.not-signed")
    return key, time, nonce, signature


def _check_time(time: int, now: int) -> None:
    if abs(time - now) > WINDOW:
        raise RoomError(
            f"the request's time is {abs(time - now)} s off this room's clock: set the clock, and try again",
            code="room.clock",
        )
