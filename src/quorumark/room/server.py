"""The room's server: a relay and a notice board (docs/room.md). It holds no secret, and nobody believes it.

    POST /api/found                         a new consortium: card and name
    POST /api/c/ID/join                     with an invitation
    POST /api/c/ID/invite, remove           the founder's
    GET  /api/c/ID                          who is here
    GET  /api/c/ID/log?after=N&wait=S       entries after a number; waits up to S seconds for one
    GET  /api/c/ID/upload/SHA256            how far an upload got
    PUT  /api/c/ID/upload/SHA256?size=N&offset=M
    POST /api/c/ID/entry                    names a file
    GET  /api/c/ID/file/SHA256              a file, or a range of it
    POST /api/c/ID/delete, link, unlink, ticket

Every one of these is signed by a member (`requests`). Pages for people (`pages`) are read-only and take a session.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from quorumark.canonical import read_json
from quorumark.checks import is_hex
from quorumark.errors import QuorumarkError, RoomError
from quorumark.room.codes import STATUS
from quorumark.room.limits import Buckets
from quorumark.room.pages import Pages
from quorumark.room.requests import address_of, check_request, claimed_key
from quorumark.room.store import PART, Limits, Store

__all__ = ["make_app", "serve"]

_LONGEST_WAIT = 25.0
_LARGEST_JSON = 1 << 16
_BODY_SECONDS = 120.0  # for at most 4 MiB: 35 kB/s. At most WINDOW, or nonces would be forgotten too early
_MOST_AT_ONCE = 900  # connections and requests under way, below the 1,024 files that a process may usually open
_PAGE = 1_000  # entries in one answer
_BURST = 0.1  # seconds: entries that come together are one piece of news for all who wait
Handler = Callable[["Room", Request, str, str, bytes], Awaitable[Response]]

SECURITY = {
    "content-security-policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",
}


class Room:
    """What all requests of one room share."""

    def __init__(self, store: Store, address: str) -> None:
        self.store, self.address = store, address_of(address)
        self.news: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.by_key = Buckets(rate=50, burst=500)
        self.by_host = Buckets(rate=100, burst=1000)
        self.strangers = Buckets(rate=1, burst=60)
        self.uploading: set[tuple[str, str, str]] = set()

    def tell(self, consortium: str) -> None:
        """Wakes everybody who waits for news of a consortium."""
        self.news.pop(consortium, asyncio.Event()).set()

    async def wait(self, consortium: str, seconds: float) -> None:
        try:
            await asyncio.wait_for(self.news[consortium].wait(), seconds)
        except TimeoutError:
            return


def make_app(folder: Path, address: str, limits: Limits | None = None) -> Starlette:
    """The room as an application, for uvicorn or a test."""
    room = Room(Store(folder, limits), address)
    pages = Pages(room.store, room.address, room.wait)
    routes = [
        _route(room, "/api/found", "POST", _found),
        _route(room, "/api/c/{id}/join", "POST", _join),
        _route(room, "/api/c/{id}/invite", "POST", _invite),
        _route(room, "/api/c/{id}/remove", "POST", _remove),
        _route(room, "/api/c/{id}", "GET", _about),
        _route(room, "/api/c/{id}/log", "GET", _log),
        _route(room, "/api/c/{id}/upload/{sha256}", "GET", _have),
        _route(room, "/api/c/{id}/upload/{sha256}", "PUT", _part),
        _route(room, "/api/c/{id}/entry", "POST", _entry),
        _route(room, "/api/c/{id}/file/{sha256}", "GET", _file),
        _route(room, "/api/c/{id}/delete", "POST", _delete),
        _route(room, "/api/c/{id}/link", "POST", _link),
        _route(room, "/api/c/{id}/unlink", "POST", _unlink),
        _route(room, "/api/c/{id}/ticket", "POST", _ticket),
        *pages.routes(),
    ]
    app = Starlette(routes=routes, exception_handlers={404: _nothing_there, 405: _nothing_there})
    app.state.room = room
    app.add_middleware(_Frame, room=room)
    return app


async def _nothing_there(_: Request, __: Exception) -> Response:
    return _refusal(RoomError("there is nothing at this address", code="room.not-found"))


class _Frame:
    """Around every answer: limits by host, refusals as JSON, security headers."""

    def __init__(self, app: Any, room: Room) -> None:
        self._app, self._room = app, room

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def framed(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                there = {name.lower() for name, _ in message["headers"]}
                extra = [(n.encode(), v.encode()) for n, v in SECURITY.items() if n.encode() not in there]
                message["headers"] = [*message["headers"], *extra]
            await send(message)

        try:
            self._room.by_host.take(scope["client"][0] if scope.get("client") else "")
        except RoomError as error:
            await _refusal(error)(scope, receive, framed)
            return
        await self._app(scope, receive, framed)


def _refusal(error: RoomError) -> Response:
    status = STATUS[error.code]
    headers = {"retry-after": "1"} if status == 429 else {}
    return JSONResponse({"code": error.code, "text": str(error)}, status, headers)


def _route(room: Room, path: str, method: str, handler: Handler) -> Route:
    """A route for members: the request is signed, new, and of somebody who may be here."""

    async def endpoint(request: Request) -> Response:
        try:
            target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
            now = int(time.time())
            consortium = request.path_params.get("id", "")
            try:
                claimed = claimed_key(dict(request.headers), now)
                if handler not in (_found, _join):
                    room.store.require_member(consortium, claimed)  # a stranger's body takes no memory
                body = await _body(request, PART if method == "PUT" else _LARGEST_JSON, _BODY_SECONDS)
                key, nonce = check_request(room.address, method, target, body, dict(request.headers), now)
                room.by_key.take(key)
                room.store.use_nonce(key, nonce, now, reads=method == "GET")
                if handler not in (_found, _join):
                    room.store.require_member(consortium, key)
            except RoomError:
                room.strangers.take(request.client.host if request.client else "")
                raise
            return await handler(room, request, consortium, key, body)
        except RoomError as error:
            return _refusal(error)
        except (ClientDisconnect, ConnectionError):
            return Response(status_code=400)

    return Route(path, endpoint, methods=[method])


async def _body(request: Request, most: int, seconds: float) -> bytes:
    pieces, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                size += len(piece)
                if size > most:
                    raise RoomError(f"a request may have {most:,} bytes here", code="room.too-large")
                pieces.append(piece)
    except TimeoutError:
        raise RoomError(f"the request was not whole after {seconds:.0f} s", code="room.malformed") from None
    return b"".join(pieces)


def _fields(body: bytes, **kinds: type) -> list[Any]:
    """The fields of a JSON object, all of them, each of its kind."""
    try:
        found = read_json(body, "a request")
    except QuorumarkError:
        found = None
    if not isinstance(found, dict) or found.keys() != kinds.keys():
        raise RoomError(f"the request must have the fields {', '.join(kinds)}", code="room.malformed")
    if not all(type(found[name]) is kind for name, kind in kinds.items()):
        raise RoomError("a field of the request has another type", code="room.malformed")
    return [found[name] for name in kinds]


def _number(request: Request, name: str, most: int = 1 << 50) -> int:
    text = request.query_params.get(name, "0")
    if not (text.isascii() and text.isdecimal() and len(text) < 17 and int(text) <= most):
        raise RoomError(f"{name} must be an integer from 0 to {most}", code="room.malformed")
    return int(text)


# --- what members ask for ---------------------------------------------------------------------------------


async def _found(room: Room, _: Request, __: str, key: str, body: bytes) -> Response:
    name, card = _fields(body, name=str, card=str)
    return JSONResponse({"consortium": room.store.create_consortium(key, card.encode(), name, int(time.time()))})


async def _join(room: Room, _: Request, consortium: str, key: str, body: bytes) -> Response:
    code, card = _fields(body, code=str, card=str)
    room.store.join(consortium, key, card.encode(), code, int(time.time()))
    room.tell(consortium)
    return JSONResponse({"name": room.store.about(consortium)[0]})


async def _invite(room: Room, _: Request, consortium: str, key: str, body: bytes) -> Response:
    (count,) = _fields(body, count=int)
    codes = room.store.invite(consortium, key, count, int(time.time()))
    return JSONResponse({"invitations": [f"{room.address}/c/{consortium}#{code}" for code in codes]})


async def _remove(room: Room, _: Request, consortium: str, key: str, body: bytes) -> Response:
    (name,) = _fields(body, name=str)
    room.store.remove(consortium, key, name)
    room.tell(consortium)
    return JSONResponse({})


async def _about(room: Room, _: Request, consortium: str, __: str, ___: bytes) -> Response:
    name, founder = room.store.about(consortium)
    people = [
        {"key": one.key, "card": one.card.decode(), "active": one.active} for one in room.store.people(consortium)
    ]
    links = [
        {"label": label, "query": scope, "expires": expires} for label, scope, expires in room.store.links(consortium)
    ]
    return JSONResponse({"name": name, "founder": founder, "people": people, "links": links})


async def _log(room: Room, request: Request, consortium: str, key: str, _: bytes) -> Response:
    after, wait = _number(request, "after"), _number(request, "wait", 60)
    until = time.monotonic() + min(wait, _LONGEST_WAIT)
    while not (found := room.store.entries(consortium, after, _PAGE)) and (left := until - time.monotonic()) > 0:
        await room.wait(consortium, left)
        await asyncio.sleep(_BURST)
        room.store.require_member(consortium, key)  # it may have been removed meanwhile
    names = ("number", "author", "name", "sha256", "size", "time", "gone")
    return JSONResponse({"entries": [{name: getattr(entry, name) for name in names} for entry in found]})


async def _have(room: Room, request: Request, consortium: str, key: str, _: bytes) -> Response:
    have, whole = room.store.have(consortium, key, request.path_params["sha256"])
    return JSONResponse({"have": have, "whole": whole})


async def _part(room: Room, request: Request, consortium: str, key: str, body: bytes) -> Response:
    sha256, size, offset = request.path_params["sha256"], _number(request, "size"), _number(request, "offset")
    this = (consortium, key, sha256)
    if this in room.uploading:
        raise RoomError("another part of this file is being written: wait for it", code="room.wrong-part")
    room.uploading.add(this)
    try:
        part = room.store.begin_part(*this, size, offset, int(time.time()))
        whole = part is None
        if part is not None:
            whole = await asyncio.to_thread(room.store.write_part, part, sha256, size, offset, body)
            room.store.require_member(consortium, key)  # it may have been removed meanwhile
            if whole:
                room.store.finish(*this, size)
    finally:
        room.uploading.discard(this)
    return JSONResponse({"have": size if whole else offset + len(body), "whole": whole})


async def _entry(room: Room, _: Request, consortium: str, key: str, body: bytes) -> Response:
    name, sha256 = _fields(body, name=str, sha256=str)
    number = room.store.add_entry(consortium, key, name, sha256, int(time.time()))
    room.tell(consortium)
    return JSONResponse({"number": number})


async def _file(room: Room, request: Request, consortium: str, _: str, __: bytes) -> Response:
    return FileResponse(
        room.store.file(consortium, request.path_params["sha256"]), media_type="application/octet-stream"
    )


async def _delete(room: Room, _: Request, consortium: str, key: str, body: bytes) -> Response:
    (sha256,) = _fields(body, sha256=str)
    entries = room.store.delete(consortium, key, sha256)
    room.tell(consortium)
    return JSONResponse({"entries": entries})


async def _link(room: Room, _: Request, consortium: str, key: str, body: bytes) -> Response:
    label, query, days = _fields(body, label=str, query=str, days=int)
    if query and not is_hex(query, 32):
        raise RoomError("a query is named by its digest", code="room.malformed")
    token = room.store.make_link(consortium, key, label, query, days, int(time.time()))
    return JSONResponse({"link": f"{room.address}/open/{token}"})


async def _unlink(room: Room, _: Request, consortium: str, key: str, body: bytes) -> Response:
    (label,) = _fields(body, label=str)
    room.store.revoke(consortium, key, label)
    room.tell(consortium)
    return JSONResponse({})


async def _ticket(room: Room, _: Request, consortium: str, key: str, __: bytes) -> Response:
    token = room.store.make_ticket(consortium, key, int(time.time()))
    return JSONResponse({"link": f"{room.address}/open/{token}"})


# --- running it -------------------------------------------------------------------------------------------


def serve(
    folder: Path,
    address: str,
    host: str,
    port: int,
    limits: Limits,
    tls: tuple[Path, Path] | None = None,
    started: Callable[[str], None] = lambda _: None,
    proxies: Sequence[str] = (),
) -> None:
    """Runs until it is stopped. Addresses of requests are not logged: some have tokens in them.

    `proxies`: addresses from which X-Forwarded-For is believed, so that limits by host count the hosts behind them.
    """
    import uvicorn

    app = make_app(folder, address, limits)
    options: dict[str, Any] = {} if tls is None else {"ssl_certfile": str(tls[0]), "ssl_keyfile": str(tls[1])}
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=2,
        limit_concurrency=_MOST_AT_ONCE,
        proxy_headers=bool(proxies),
        forwarded_allow_ips=list(proxies),
        ws="none",
        lifespan="off",
        **options,
    )
    started(json.dumps({"room": address_of(address), "listening": f"{host}:{port}"}))
    uvicorn.Server(config).run()
