"""The room's pages for people: read-only, rendered here, without scripts but for one that shows news (docs/room.md)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from quorumark.checks import is_hex
from quorumark.errors import RoomError
from quorumark.room.board import Board
from quorumark.room.codes import STATUS
from quorumark.room.store import Entry, Seat, Store

__all__ = ["Pages", "environment"]

_COOKIE = "quorumark-room"
_STATIC = {"room.css": "text/css", "renew.js": "text/javascript", "live.js": "text/javascript"}
_REPORT = "sandbox; default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
_MOST_BOARDS, _MOST_TEXTS = 100, 16 << 20  # boards, and characters of pages
_STREAM = 30.0  # seconds until a browser connects again: then its session is checked anew


@cache
def environment() -> Environment:
    """Templates with everything escaped: names come from others."""
    return Environment(loader=PackageLoader("quorumark.room"), autoescape=True, undefined=StrictUndefined)


def static(name: str) -> Path:
    return Path(__file__).parent / "static" / name


def short_name(entry: Entry) -> str:
    """The name of an earlier manifest beside later ones, as in a member's folder `history`."""
    return f"{entry.name.removeprefix('manifest/')[:16]}.json"


class Pages:
    """Pages over a store; `wait` ends when there is news of a consortium, or after so many seconds."""

    def __init__(self, store: Store, address: str, wait: Callable[[str, float], Awaitable[None]]) -> None:
        self._store, self._address, self._wait = store, address, wait
        # boards are made by one other thread: many entries do not hold up requests, many readers make one board
        self._maker = ThreadPoolExecutor(1, "room-board")
        self._reader: Store | None = None
        self._boards: dict[str, tuple[str, asyncio.Future[Board]]] = {}
        self._texts: dict[tuple[str, ...], str] = {}

    def routes(self) -> list[Route]:
        return [
            Route("/", self._shown(self._welcome)),
            Route("/static/{name}", self._shown(self._static)),
            Route("/open/{token}", self._shown(self._open)),
            Route("/c/{id}", self._shown(self._overview)),
            Route("/c/{id}/events", self._shown(self._events)),
            Route("/c/{id}/q/{query}", self._shown(self._query)),
            Route("/c/{id}/q/{query}/report", self._shown(self._report)),
            Route("/c/{id}/q/{query}/certificate.json", self._shown(self._certificate)),
            Route("/c/{id}/q/{query}/consortium.json", self._shown(self._manifest_then)),
            Route("/c/{id}/ceremony/{about}", self._shown(self._ceremony)),
            Route("/c/{id}/audits", self._shown(self._audits)),
            Route("/c/{id}/audit/{about}/{name}", self._shown(self._audit_file)),
            Route("/c/{id}/ledger", self._shown(self._ledger)),
            Route("/c/{id}/manifests", self._shown(self._manifests)),
            Route("/c/{id}/consortium.json", self._shown(self._manifest)),
            Route("/c/{id}/manifest/{name}", self._shown(self._earlier)),
            Route("/c/{id}/public/{name}", self._shown(self._public)),
        ]

    def _shown(self, page: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """A page, or a page that says why not."""

        async def endpoint(request: Request) -> Response:
            try:
                return await page(request)
            except RoomError as error:
                return self._render("refused.html", STATUS[error.code], text=str(error))

        return endpoint

    def _render(self, template: str, status: int = 200, **values: Any) -> HTMLResponse:
        return HTMLResponse(environment().get_template(template).render(address=self._address, **values), status)

    def _seat(self, request: Request, query: str = "") -> Seat:
        """Who looks, if they may look at this."""
        seat = self._store.seat(request.cookies.get(_COOKIE, ""), int(time.time()))
        if seat.consortium != request.path_params["id"] or (seat.scope and seat.scope != query):
            raise RoomError("your link is for another page: open it again", code="room.not-allowed")
        return seat

    async def _board(self, consortium: str) -> Board:
        """What there is to show, as of now."""
        now = self._store.news(consortium)
        if self._boards.get(consortium, ("",))[0] != now:
            if len(self._boards) >= _MOST_BOARDS:
                self._boards.pop(next(iter(self._boards)))
            making = asyncio.get_running_loop().run_in_executor(self._maker, self._make, consortium)
            self._boards[consortium] = now, making
        making = self._boards[consortium][1]
        try:
            return await asyncio.shield(making)  # one reader who leaves does not end it for the others
        except BaseException:
            if making.done():
                self._boards.pop(consortium, None)  # what failed is tried again
            raise

    def _make(self, consortium: str) -> Board:
        if self._reader is None:
            self._reader = self._store.reader()
        return Board(self._reader, consortium)

    def _shown_page(self, template: str, board: Board, seat: Seat, **values: Any) -> HTMLResponse:
        """A page of a board; for all who see the same it is written once."""
        key = (template, board.consortium, board.now, seat.label, seat.scope, str(values.get("digest", "")))
        if key not in self._texts:
            if sum(map(len, self._texts.values())) >= _MOST_TEXTS:
                self._texts.clear()
            place = f"/c/{seat.consortium}"
            answer = self._render(template, board=board, seat=seat, place=place, **values)
            self._texts[key] = bytes(answer.body).decode()
        return HTMLResponse(self._texts[key])

    async def _welcome(self, _: Request) -> Response:
        return self._render("welcome.html")

    async def _static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in _STATIC:
            raise RoomError("there is nothing at this address", code="room.not-found")
        return FileResponse(static(name), media_type=_STATIC[name], headers={"cache-control": "max-age=3600"})

    async def _open(self, request: Request) -> Response:
        token = self._store.open_session(request.path_params["token"], int(time.time()))
        seat = self._store.seat(token, int(time.time()))
        place = f"/c/{seat.consortium}"
        answer = RedirectResponse(place + (f"/q/{seat.scope}" if seat.scope else ""), 303)
        secure = self._address.startswith("https://")
        # Lax: the browser may come from the agent's page or from a mail; pages change nothing
        answer.set_cookie(_COOKIE, token, path=place, httponly=True, secure=secure, samesite="lax")
        return answer

    async def _overview(self, request: Request) -> Response:
        seat = self._seat(request)
        return self._shown_page("overview.html", await self._board(seat.consortium), seat)

    async def _ceremony(self, request: Request) -> Response:
        """How far a setup is, or a ceremony that somebody called for."""
        seat, about = self._seat(request), request.path_params["about"]
        board = await self._board(seat.consortium)
        setup, call = board.proposal(about), board.noticed.call(about)
        if setup is None and call is None:
            raise RoomError("there is no such ceremony here", code="room.not-found")
        return self._shown_page("ceremony.html", board, seat, digest=about, setup=setup, call=call)

    async def _audits(self, request: Request) -> Response:
        seat = self._seat(request)
        return self._shown_page("audits.html", await self._board(seat.consortium), seat)

    async def _audit_file(self, request: Request) -> Response:
        """A challenge, or the proof that came of it."""
        seat = self._seat(request)
        one = (await self._board(seat.consortium)).noticed.audit(request.path_params["about"])
        shown = {} if one is None else one.shown
        if request.path_params["name"] not in shown:
            raise RoomError("there is no such file here", code="room.not-found")
        return self._send(seat.consortium, shown[request.path_params["name"]])

    async def _ledger(self, request: Request) -> Response:
        seat = self._seat(request)
        return self._shown_page("ledger.html", await self._board(seat.consortium), seat)

    async def _manifests(self, request: Request) -> Response:
        seat = self._seat(request)
        return self._shown_page("manifests.html", await self._board(seat.consortium), seat)

    async def _query(self, request: Request) -> Response:
        seat = self._seat(request, request.path_params["query"])
        board, digest = await self._board(seat.consortium), request.path_params["query"]
        one = board.question(digest)
        earlier = [short_name(entry) for entry in board.chain_of(one)[:-1]]
        return self._shown_page(
            "query.html", board, seat, one=one, terms=board.terms_of(one), earlier=earlier, digest=digest
        )

    async def _report(self, request: Request) -> Response:
        """A member's page, in a sandbox: no scripts, no cookies, nothing from elsewhere."""
        answer = await self._notice(request, "report.html")
        answer.headers["content-security-policy"] = _REPORT
        answer.headers["content-type"] = "text/html; charset=utf-8"
        return answer

    async def _certificate(self, request: Request) -> Response:
        return await self._notice(request, "certificate.json")

    async def _notice(self, request: Request, what: str) -> Response:
        query = request.path_params["query"]
        seat = self._seat(request, query)
        shown = (await self._board(seat.consortium)).question(query).shown
        if what not in shown:
            raise RoomError("it is not there yet: wait until all have signed", code="room.not-found")
        return self._send(seat.consortium, shown[what])

    async def _manifest(self, request: Request) -> Response:
        seat = self._seat_anywhere(request)
        manifest = (await self._board(seat.consortium)).manifest
        if manifest is None:
            raise RoomError("there is no manifest yet", code="room.not-found")
        return self._send(seat.consortium, manifest.sha256)

    async def _manifest_then(self, request: Request) -> Response:
        """The manifest that a query is about: a certificate is checked against that one."""
        query = request.path_params["query"]
        seat = self._seat(request, query)
        board = await self._board(seat.consortium)
        chain = board.chain_of(board.question(query))
        if not chain:
            raise RoomError("the manifest of this query is not in the room", code="room.not-found")
        return self._send(seat.consortium, chain[-1].sha256)

    async def _earlier(self, request: Request) -> Response:
        """One manifest of those up to the one in force, under the name by which `verify check` looks for it."""
        seat, name = self._seat_anywhere(request), request.path_params["name"]
        for entry, _ in (await self._board(seat.consortium)).chain:
            if short_name(entry) == name:
                return self._send(seat.consortium, entry.sha256)
        raise RoomError("there is no such manifest here", code="room.not-found")

    async def _public(self, request: Request) -> Response:
        """Layout, anchor and groups: what anybody needs who checks a certificate."""
        seat = self._seat_anywhere(request)
        files = (await self._board(seat.consortium)).files
        name = request.path_params["name"]
        if name not in files:
            raise RoomError("there is no such file here", code="room.not-found")
        return self._send(seat.consortium, files[name])

    def _seat_anywhere(self, request: Request) -> Seat:
        """Public files go with every link."""
        seat = self._store.seat(request.cookies.get(_COOKIE, ""), int(time.time()))
        if seat.consortium != request.path_params["id"]:
            raise RoomError("your link is for another consortium", code="room.not-allowed")
        return seat

    def _send(self, consortium: str, sha256: str) -> FileResponse:
        if not is_hex(sha256, 32):
            raise RoomError("there is no such file here", code="room.not-found")
        return FileResponse(self._store.file(consortium, sha256), media_type="application/octet-stream")

    async def _events(self, request: Request) -> Response:
        """Server-sent events: a text for every piece of news; the script loads the page anew then."""
        seat = self._seat_anywhere(request)

        async def stream() -> AsyncIterator[str]:
            until = time.monotonic() + _STREAM
            last = ""
            while (left := until - time.monotonic()) > 0 and not await request.is_disconnected():
                now = self._store.news(seat.consortium)
                if now != last:
                    last = now
                    yield f"data: {now}\n\n"
                await self._wait(seat.consortium, min(left, 5.0))
                await asyncio.sleep(0.2)  # a burst of entries is one piece of news

        return StreamingResponse(stream(), media_type="text/event-stream")
