"""Hostile web pages in the member's own browser, which know the whole address of its page: from a file, from another
port of this machine, and under a name that was bound to this machine meanwhile. They read and decide nothing, and a
frame of the page stays empty. Where a check is taken out, the very same attack works."""

from __future__ import annotations

import contextlib
import functools
import json
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.kit.browser import CHROMIUM, Browser, browser
from tests.kit.rooms import Group, room_on, until

pytest.importorskip("starlette")
pytestmark = [pytest.mark.room, pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")]

from starlette.requests import Request  # noqa: E402 - after the check that it is there

from quorumark.room import agent_page  # noqa: E402
from quorumark.room.agent_page import AgentPage  # noqa: E402
from quorumark.room.desk import Matter  # noqa: E402

NAME = "evil.example"

EVIL = """<!doctype html><title>evil</title><iframe src="{address}"></iframe>
<form id="f" method="post" action="{address}decide" target="out">
<input name="about" value="{about}"><input name="shown" value="{shown}"><input name="say" value="yes"></form>
<iframe name="out"></iframe><script>
document.getElementById("f").submit();
const form = new FormData();
form.append("suspect", new File(["12345678"], "x.safetensors"));
for (const [name, text] of [["purpose", "evil"], ["kind", "plain"], ["answers", "3"]]) form.append(name, text);
Promise.allSettled([
  fetch("{address}decide", {{method: "POST", mode: "no-cors", body: new URLSearchParams({{about: "{about}",
    shown: "{shown}", say: "yes"}})}}),
  fetch("{address}ask", {{method: "POST", mode: "no-cors", body: form}}),
  fetch("{address}").then(r => r.text()).then(t => {{ window.found = t; }}),
]).then(() => {{ document.title = "tried"; }});
</script>"""


class WithoutChecks(AgentPage):
    """The page as it would be if it asked nobody where a request comes from."""

    def _check(self, request: Request) -> None:
        pass


class AnyName(AgentPage):
    """The page as it would be under whatever name the browser knows it: all checks but that of its name."""

    def _check(self, request: Request) -> None:
        kept, self._host = self._host, request.headers.get("host", "")
        try:
            super()._check(request)
        finally:
            self._host = kept


class Scene:
    """A member before whom terms lie."""

    def __init__(self, group: Group) -> None:
        self.group = group
        group.terms()
        group.propose()
        self.matter: Matter = group.matter(1, "terms")

    @contextlib.contextmanager
    def page(self, kind: type[AgentPage] = AgentPage) -> Iterator[str]:
        page = kind(self.group.agent(1))
        page.start()
        try:
            yield page.address
        finally:
            page.stop()

    def evil(self, address: str) -> str:
        return EVIL.format(address=address, about=self.matter.digest, shown=self.matter.shown)

    @property
    def said(self) -> tuple[str, str]:
        return self.group.agent(1).desk.said(self.matter.digest)

    @property
    def drafts(self) -> list[Path]:
        return list((self.group.homes[1][0].path / "room" / self.group.consortium).glob("drafts/*"))


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with room_on(tmp_path / "room") as room:
        group = Group.join(tmp_path / "members", room.address, members=3, threshold=2)
        group.start()
        yield Scene(group)
        group.stop()


@contextlib.contextmanager
def elsewhere(folder: Path) -> Iterator[str]:
    """Another port of this machine."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def attack(tab: Browser, address: str) -> tuple[str, list[str]]:
    """What a hostile page could read, and what is in its frames."""
    tab.go(address)
    tab.wait("document.title === 'tried'")
    return str(tab.run("window.found || ''")), [text for _, text in tab.frames()]


def test_a_page_of_another_port_or_a_file_gets_nothing(scene: Scene, tmp_path: Path) -> None:
    folder = tmp_path / "evil"
    folder.mkdir()
    with scene.page() as address, elsewhere(folder) as other, browser(tmp_path / "profile") as tab:
        (folder / "evil.html").write_text(scene.evil(address))
        for place in (f"{other}/evil.html", (folder / "evil.html").as_uri()):
            found, frames = attack(tab, place)
            assert found == ""
            assert len(frames) == (2 if place.startswith("http") else 0)  # a file's frames are in other processes
            assert not [text for text in frames if "Make a key" in text or scene.matter.digest in text]
            assert scene.said == ("", "")
            assert not scene.drafts
        tab.go(address)
        tab.press("Agree")  # the member itself can
        until(lambda: scene.said == ("yes", "person"), "the member's own word")


def test_without_its_checks_the_same_page_would_decide(scene: Scene, tmp_path: Path) -> None:
    """The control: what was refused above is not refused by the browser."""
    folder = tmp_path / "evil"
    folder.mkdir()
    with scene.page(WithoutChecks) as address, elsewhere(folder) as other, browser(tmp_path / "profile") as tab:
        (folder / "evil.html").write_text(scene.evil(address))
        attack(tab, f"{other}/evil.html")
        until(lambda: scene.said == ("yes", "person"), "the hostile page's word")


@pytest.mark.parametrize("taken_out", ["nothing", "the headers", "the checks", "both"])
def test_a_frame_stays_empty(scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken_out: str) -> None:
    """The headers forbid it, and the checks refuse the request: only without both is the page in the frame."""
    if taken_out in ("the headers", "both"):
        monkeypatch.setattr(agent_page, "_HEADERS", {})
    kind = WithoutChecks if taken_out in ("the checks", "both") else AgentPage
    folder = tmp_path / "evil"
    folder.mkdir()
    with scene.page(kind) as address, elsewhere(folder) as other, browser(tmp_path / "profile") as tab:
        (folder / "frame.html").write_text(f'<!doctype html><title>tried</title><iframe src="{address}"></iframe>')
        _, frames = attack(tab, f"{other}/frame.html")
        (text,) = frames
        if taken_out == "both":
            assert "Make a key" in text
            assert "Agree" in text
        else:
            assert "Make a key" not in text
            assert scene.matter.digest not in text
            assert "Agree" not in text


@pytest.mark.parametrize("kind", [AgentPage, AnyName])
def test_a_name_that_leads_here_meanwhile(scene: Scene, tmp_path: Path, kind: type[AgentPage]) -> None:
    """DNS rebinding: the page came from the attacker's server; then its name leads to this machine, and to the browser
    the agent's page is of the same origin. Only the check of the name is between them."""
    rules = f"--host-resolver-rules=MAP {NAME} 127.0.0.1"
    # browsers begin to ask before a page reaches into the local network: what is tested here does not need them
    off = "--disable-features=LocalNetworkAccessChecks,BlockInsecurePrivateNetworkRequests"
    with scene.page(kind) as address, browser(tmp_path / "profile", rules, off) as tab:
        same = address.replace("127.0.0.1", NAME)
        place = f"{same.split('/', 3)[0]}//{same.split('/', 3)[2]}/evil.html"
        tab.serve(place, scene.evil(same))
        found, _ = attack(tab, place)
        answer = tab.run(f"fetch({json.dumps(same)}).then(async r => [r.status, await r.text()], e => [0, String(e)])")
        if kind is AgentPage:
            assert answer[0] == 403
            assert answer[1].startswith("room.elsewhere:")
            assert found == answer[1]  # it came to the agent, and not to somewhere else
            assert scene.said == ("", "")
            assert not scene.drafts
        else:  # the control
            assert answer[0] == 200
            assert "Make a key" in found
            assert scene.matter.digest in found
            until(lambda: scene.said == ("yes", "person"), "the hostile page's word")
