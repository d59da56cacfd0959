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
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from quorumark.canonical import canonical, digest
from quorumark.errors import QuorumarkError, RoomError
from quorumark.files import write_private
from quorumark.room.agent import Agent
from quorumark.room.codes import STATUS
from quorumark.room.desk import Matter
from quorumark.room.drafts import Draft
from quorumark.room.forms import receive_files, small_form
from quorumark.room.pages import environment, static

__all__ = ["AgentPage"]

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
_REPORT = "sandbox; default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
_RANK = {"waiting": 0, "working": 1, "checking": 1, "refused": 2, "done": 3, "declined": 3}


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
                Route("/{token}/ask", self._guarded(self._ask_form), methods=["GET"]),
                Route("/{token}/ask", self._guarded(self._ask), methods=["POST"]),
                Route("/{token}/call", self._guarded(self._call), methods=["POST"]),
                Route("/{token}/discard", self._guarded(self._discard), methods=["POST"]),
                Route("/{token}/fetch", self._guarded(self._fetch), methods=["POST"]),
                Route("/{token}/q/{about}", self._guarded(self._matter), methods=["GET"]),
                Route("/{token}/q/{about}/{name}", self._guarded(self._result), methods=["GET"]),
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
                answer.headers.setdefault(name, value)
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

    def _render(self, template: str, status: int = 200, **values: Any) -> HTMLResponse:
        start, name = f"/{self._token}", self._agent.identity.name
        text = environment().get_template(template).render(start=start, name=name, **values)
        return HTMLResponse(text, status)

    async def _page(self, _: Request) -> Response:
        agent, now = self._agent, self._now()  # first: what changes meanwhile is loaded anew
        waiting: list[Matter] = []
        others: list[Matter] = []
        for one in agent.desk.matters():
            open_still = one.state == "waiting" and not agent.desk.said(one.digest)[0]
            (waiting if open_still else others).append(one)
        return self._render(
            "agent.html",
            now=now,
            waiting=waiting,
            others=sorted(others, key=lambda one: _RANK[one.state]),
            drafts=agent.drafts.shown(),
            standing=agent.standing(),
            may_call=agent.terms() is not None,
            troubles=list(agent.desk.troubles.values()),
            room=agent.settings.address,
        )

    async def _matter(self, request: Request) -> Response:
        """One query: how far it is, and what came of it."""
        now, one = self._now(), self._find(request)
        said, by = self._agent.desk.said(one.digest)
        kind = dict(one.facts).get("kind of query", "")
        by_layers = one.verdict in ("FAILED", "INCONCLUSIVE") and not kind.startswith("by layers")
        numbers = one.kind == "examine" and self._agent.numbers(one.digest) is not None
        return self._render("matter.html", now=now, one=one, said=said, by=by, by_layers=by_layers, numbers=numbers)

    def _find(self, request: Request) -> Matter:
        one = self._agent.desk.find(request.path_params["about"])
        if one is None:
            raise RoomError("there is no such thing on this page", code="room.not-found")
        return one

    async def _result(self, request: Request) -> Response:
        """Report and certificate, once there is one. The report is made and checked by this agent."""
        one, name = self._find(request), request.path_params["name"]
        if one.kind == "examine" and name == "numbers.html":
            return await self._numbers(one)
        kinds = {"report.html": "text/html; charset=utf-8", "certificate.json": "application/octet-stream"}
        if name not in kinds or one.kind != "query" or one.state != "done":
            raise RoomError("there is nothing at this address", code="room.not-found")
        papers = await asyncio.to_thread(self._agent.report, one.digest)
        if papers is None:
            raise RoomError("there is no certificate yet", code="room.not-found")
        headers = {"content-security-policy": _REPORT} if name == "report.html" else {}
        path = papers.report if name == "report.html" else papers.certificate
        return FileResponse(path, media_type=kinds[name], headers=headers)

    async def _numbers(self, one: Matter) -> Response:
        """For an examiner: what nobody else may see."""
        path = await asyncio.to_thread(self._agent.numbers, one.digest)
        if path is None:
            raise RoomError("the answers are not open yet", code="room.not-found")
        return FileResponse(path, media_type="text/html; charset=utf-8", headers={"content-security-policy": _REPORT})

    # --- asking ---

    async def _ask_form(self, request: Request) -> Response:
        about = self._agent.desk.find(request.query_params.get("about", ""))
        query = "" if about is None else dict(about.facts).get("query", "")
        return await asyncio.to_thread(self._form_page, after=query)

    def _form_page(self, status: int = 200, problem: str = "", after: str = "") -> Response:
        """The form; without a key there is nothing to ask about. `after`: the plain query before one by layers."""
        return self._render("ask.html", status, choices=self._agent.choices(), problem=problem, after=after)

    async def _ask(self, request: Request) -> Response:
        """A file and a purpose. The file goes to disk while it arrives; the agent does the rest."""
        drafts = self._agent.drafts
        folder = drafts.begin()
        try:
            form = await receive_files(request, "suspect", folder / "files")
            answers = form.get("answers", "0")
            if not (answers.isascii() and answers.isdecimal() and len(answers) < 6):
                raise RoomError("this is no form of this page", code="room.malformed")
            keep = form.get("keep", "") == "yes"
            draft = Draft(form.get("purpose", "").strip(), form.get("kind", ""), int(answers), keep)
            if draft.kind == "layers":
                await asyncio.to_thread(self._by_layers, folder, form)
            drafts.finish(folder, draft)
        except QuorumarkError as error:
            drafts.drop(folder)
            return self._form_page(STATUS.get(error.code, 400), str(error))
        except BaseException:
            drafts.drop(folder)
            raise
        return RedirectResponse(f"/{self._token}/", 303)

    def _by_layers(self, folder: Path, form: dict[str, str]) -> None:
        """Exactly what the form showed: the certificate by its digest, the examiner by the card's fingerprint."""
        choices = self._agent.choices()
        if choices is None or not choices.blocks:
            raise RoomError("nothing is answered by layers here: the terms do not allow it", code="room.malformed")
        before, examiner = choices.certificate(form.get("after", "")), choices.examiner(form.get("examiner", ""))
        self._agent.drafts.by_layers(folder, before, examiner)

    async def _call(self, request: Request) -> Response:
        """Calls for new shares. Nothing happens by it: each member decides, this one, too."""
        purpose = (await small_form(request)).get("purpose", "").strip()
        try:
            await asyncio.to_thread(self._agent.call_refresh, purpose)
        except QuorumarkError as error:
            title = "Nothing was called for"
            return self._render("changed.html", STATUS.get(error.code, 400), title=title, text=str(error))
        return RedirectResponse(f"/{self._token}/", 303)

    async def _discard(self, request: Request) -> Response:
        form = await small_form(request)
        self._agent.drafts.discard(form.get("draft", ""))
        return RedirectResponse(f"/{self._token}/", 303)

    async def _fetch(self, request: Request) -> Response:
        form = await small_form(request)
        self._agent.fetch(form.get("about", ""))
        return RedirectResponse(f"/{self._token}/", 303)

    # --- deciding ---

    async def _decide(self, request: Request) -> Response:
        form = await small_form(request)
        try:
            self._agent.desk.decide(form.get("about", ""), form.get("shown", ""), form.get("say", ""), "person")
        except RoomError as error:
            if error.code != "room.not-shown":
                raise
            return self._render("changed.html", STATUS[error.code], title="Look again", text=str(error))
        return RedirectResponse(f"/{self._token}/", 303)

    async def _room(self, request: Request) -> Response:
        """To the room's own pages, by a ticket."""
        await small_form(request)
        link = await asyncio.to_thread(self._ticket)  # the room may let it wait: the page goes on meanwhile
        return self._render("ticket.html", link=link)

    def _ticket(self) -> str:
        client = self._agent.client()
        try:
            return client.ticket()
        finally:
            client.close()

    async def _events(self, _: Request) -> Response:
        """What the script compares every few seconds: a digest that changes when the page would."""
        return PlainTextResponse(self._now())

    def _now(self) -> str:
        desk = self._agent.desk
        states: list[Any] = [
            [one.shown, one.state, one.late, one.status, [list(pair) for pair in one.people], *desk.said(one.digest)]
            for one in desk.matters()
        ]
        drafts: list[Any] = [[one.id, one.state] for one in self._agent.drafts.shown()]
        return digest("room page", canonical([states, drafts, list(desk.troubles.values())])).hex()

    async def _static(self, request: Request) -> Response:
        kinds = {"room.css": "text/css", "renew.js": "text/javascript", "agent.js": "text/javascript"}
        name = request.path_params["name"]
        if name not in kinds:
            raise RoomError("there is nothing at this address", code="room.not-found")
        return FileResponse(static(name), media_type=kinds[name])
