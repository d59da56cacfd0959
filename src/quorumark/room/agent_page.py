"""The member's own page, served by its agent on 127.0.0.1: what waits for a decision, and Approve or Decline.

Other web pages in the member's browser, and other programs that it trusts less than itself, must not reach it:

1. the port is random, and every address has a token of 256 random bits in its path; no cookie, since cookies are for
   all ports of a host
2. Host must be exactly 127.0.0.1:PORT: a name that was rebound to this address is refused
3. a POST must have exactly this page's Origin; whatever a browser says about a request from another site
   (Sec-Fetch-Site) or for another use (Sec-Fetch-Dest) is refused
4. it cannot be framed, sends other sites no referrer, loads nothing from elsewhere, runs no script but its own
5. a decision names what it is about by the digest of all that was shown
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from quorumark.canonical import canonical, digest
from quorumark.errors import RoomError
from quorumark.files import write_private
from quorumark.room.agent import Agent
from quorumark.room.codes import STATUS
from quorumark.room.pages import environment, static

__all__ = ["AgentPage"]

_LARGEST_FORM = 4096
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'self'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # with no-referrer browsers send the page's own forms with Origin: null
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class AgentPage:
    """The page of one agent, in a thread of its own."""

    def __init__(self, agent: Agent) -> None:
        self._agent, self._token = agent, secrets.token_urlsafe(32)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._host = f"127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            self.app(), access_log=False, log_level="error", server_header=False, ws="none", lifespan="off"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="room-page", daemon=True
        )

    @property
    def address(self) -> str:
        """Where the member opens it: whoever has this can decide."""
        return f"http://{self._host}/{self._token}/"

    def start(self) -> None:
        self._thread.start()
        until = time.monotonic() + 10
        while not self._server.started and time.monotonic() < until:
            time.sleep(0.02)
        write_private(self._agent.place.page, self.address.encode())

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=10)
        self._socket.close()
        self._agent.place.page.unlink(missing_ok=True)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/{token}/", self._guarded(self._page), methods=["GET"]),
                Route("/{token}/decide", self._guarded(self._decide), methods=["POST"]),
                Route("/{token}/room", self._guarded(self._room), methods=["POST"]),
                Route("/{token}/events", self._guarded(self._events), methods=["GET"]),
                Route("/{token}/static/{name}", self._guarded(self._static), methods=["GET"]),
                Route("/{rest:path}", self._guarded(self._nowhere), methods=["GET", "POST", "PUT", "DELETE"]),
            ]
        )

    # --- who may ask ---

    def _guarded(self, page: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                self._check(request)
                answer = await page(request)
            except RoomError as error:
                answer = PlainTextResponse(f"{error.code}: {error}", STATUS[error.code])
            for name, value in _HEADERS.items():
                answer.headers[name] = value
            return answer

        return endpoint

    def _check(self, request: Request) -> None:
        refused = RoomError(
            "this page is for its member alone: open the address that the agent shows", code="room.elsewhere"
        )
        if request.headers.getlist("host") != [self._host]:
            raise refused
        if not hmac.compare_digest(request.path_params.get("token", "").encode(), self._token.encode()):
            raise refused
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise refused
        if request.headers.get("sec-fetch-dest", "document") not in ("document", "empty", "style", "script"):
            raise refused
        origin = request.headers.getlist("origin")
        if (request.method != "GET" or origin) and origin != [f"http://{self._host}"]:
            raise refused

    # --- pages ---

    async def _nowhere(self, _: Request) -> Response:
        raise RoomError("there is nothing at this address", code="room.not-found")

    async def _page(self, _: Request) -> Response:
        agent, now = self._agent, self._now()  # first: what changes meanwhile is loaded anew
        matters = agent.desk.matters()
        rank = {"waiting": 0, "working": 1, "checking": 1, "refused": 2, "done": 3, "declined": 3}
        text = (
            environment()
            .get_template("agent.html")
            .render(
                now=now,
                name=agent.identity.name,
                start=f"/{self._token}",
                waiting=[one for one in matters if one.state == "waiting" and not agent.desk.said(one.digest)[0]],
                others=sorted(
                    (one for one in matters if one.state != "waiting" or agent.desk.said(one.digest)[0]),
                    key=lambda one: rank[one.state],
                ),
                standing=agent.standing(),
                troubles=list(agent.desk.troubles.values()),
                room=agent.settings.address,
            )
        )
        return HTMLResponse(text)

    async def _decide(self, request: Request) -> Response:
        form = await self._form(request)
        try:
            self._agent.desk.decide(form.get("about", ""), form.get("shown", ""), form.get("say", ""), "person")
        except RoomError as error:
            if error.code != "room.not-shown":
                raise
            text = environment().get_template("changed.html").render(start=f"/{self._token}", text=str(error))
            return HTMLResponse(text, STATUS[error.code])
        return RedirectResponse(f"/{self._token}/", 303)

    async def _room(self, request: Request) -> Response:
        """To the room's own pages, by a ticket."""
        await self._form(request)
        link = await asyncio.to_thread(self._ticket)  # the room may let it wait: the page goes on meanwhile
        text = environment().get_template("ticket.html").render(link=link, start=f"/{self._token}")
        return HTMLResponse(text)

    def _ticket(self) -> str:
        client = self._agent.client()
        try:
            return client.ticket()
        finally:
            client.close()

    async def _form(self, request: Request) -> dict[str, str]:
        """A small form as browsers send it by default."""
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/x-www-form-urlencoded":
            raise RoomError("this is no form of this page", code="room.malformed")
        pieces, size = [], 0
        async for piece in request.stream():
            size += len(piece)
            if size > _LARGEST_FORM:
                raise RoomError("this is no form of this page", code="room.too-large")
            pieces.append(piece)
        found = parse_qs(b"".join(pieces).decode("ascii", "replace"))
        return {name: values[0] for name, values in found.items() if len(values) == 1}

    async def _events(self, _: Request) -> Response:
        """What the script compares every few seconds: a digest that changes when the page would."""
        return PlainTextResponse(self._now())

    def _now(self) -> str:
        desk = self._agent.desk
        states: list[Any] = [[one.shown, one.state, one.status, *desk.said(one.digest)] for one in desk.matters()]
        return digest("room page", canonical([states, list(desk.troubles.values())])).hex()

    async def _static(self, request: Request) -> Response:
        kinds = {"room.css": "text/css", "agent.js": "text/javascript"}
        name = request.path_params["name"]
        if name not in kinds:
            raise RoomError("there is nothing at this address", code="room.not-found")
        return FileResponse(static(name), media_type=kinds[name])
