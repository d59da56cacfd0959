"""Links and cookies of a room over HTTP: each opens what it is for, while it lasts, and nothing of others."""

from __future__ import annotations

import contextlib
import http.client
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from quorumark.canonical import canonical
from quorumark.consortium.identity import Identity
from quorumark.errors import RoomError
from quorumark.room.client import Client
from quorumark.room.requests import sign_request
from quorumark.room.store import Store
from tests.kit.rooms import free_port, until, visit

pytest.importorskip("starlette")
pytestmark = pytest.mark.room

QUERY, OTHER = "ab" * 32, "cd" * 32


class Place:
    """A room in a thread of this process, so that a test can take a rule out."""

    def __init__(self, folder: Path) -> None:
        import uvicorn

        from quorumark.room.server import make_app

        self.folder, port = folder, free_port()
        self.address = f"http://127.0.0.1:{port}"
        self._servers: list[uvicorn.Server] = []

        def run() -> None:
            self.app = app = make_app(folder, self.address)  # its database is for this thread
            config = uvicorn.Config(app, port=port, access_log=False, log_level="error", ws="none", lifespan="off")
            self._servers.append(uvicorn.Server(config))
            self._servers[0].run()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        until(lambda: self._servers and self._servers[0].started, "the room answers")

    def stop(self) -> None:
        self._servers[0].should_exit = True
        self._thread.join(timeout=20)

    def consortium(self, name: str, founder: str) -> Client:
        """With a query, as far as pages look at it, about a suspect that has the founder's name."""
        client = Client(self.address, Identity.generate(founder))
        client.create_consortium(name)
        for query in (QUERY, OTHER):
            suspect = {"name": f"{founder}-{query[:2]}.safetensors"}
            client.upload(canonical({"files": [suspect]}), f"query/{query}/query.json")
            client.upload(b"x", f"query/{query}/ask.msg")
        return client

    def open(self, link: str) -> tuple[int, str, str]:
        """Status, cookie, and where one is sent."""
        status, headers, _ = visit(link)
        return status, headers.get("set-cookie", "").partition(";")[0], headers.get("location", "")

    def look(self, place: str, cookie: str) -> tuple[int, str]:
        status, _, text = visit(self.address + place, cookie=cookie)
        return status, text

    def expire(self, kind: str, when: int) -> list[int]:
        """When links of a kind end, from now on; when they ended before."""
        with contextlib.closing(sqlite3.connect(self.folder / "room.db", timeout=30)) as database, database:
            found = database.execute("SELECT expires FROM links WHERE kind = ?", (kind,)).fetchall()
            database.execute("UPDATE links SET expires = ? WHERE kind = ?", (when, kind))
        return [int(one) for (one,) in found]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path / "room")
    yield made
    made.stop()


def test_a_judges_link_ends_when_it_was_said(place: Place) -> None:
    """The cookie that it gave ends with it. With another end on the room's disk, the same requests are answered."""
    avon = place.consortium("hospitals", "Avon")
    link, page = avon.link("court", QUERY, 3), f"/c/{avon.consortium}/q/{QUERY}"
    status, cookie, where = place.open(link)
    assert (status, where) == (303, page)
    status, text = place.look(page, cookie)
    assert status == 200
    assert "Avon-ab.safetensors" in text
    (end,) = place.expire("link", int(time.time()) - 1)
    assert 2 * 86_400 < end - time.time() <= 3 * 86_400
    status, text = place.look(page, cookie)
    assert status == 403
    assert "revoked, or is too old" in text
    assert "Avon" not in text
    place.expire("link", end)
    assert place.look(page, cookie)[0] == 200  # the end alone made the difference
    place.expire("link", int(time.time()) - 1)
    status, headers, text = visit(link)
    assert (status, "set-cookie" in headers) == (403, False)
    assert "unknown, used, revoked or too old" in text


def test_a_judges_link_ends_when_it_is_revoked(place: Place) -> None:
    avon = place.consortium("hospitals", "Avon")
    link, page = avon.link("court", QUERY, 3), f"/c/{avon.consortium}/q/{QUERY}"
    _, cookie, _ = place.open(link)
    _, kept, _ = place.open(avon.link("other", QUERY, 3))
    avon.post("unlink", label="court")
    status, text = place.look(page, cookie)
    assert status == 403
    assert "Open the room" in text
    assert "Avon" not in text
    assert place.open(link)[0] == 403
    assert place.look(page, kept)[0] == 200  # the other link holds


def test_a_link_for_one_query_opens_no_other(place: Place) -> None:
    avon = place.consortium("hospitals", "Avon")
    _, cookie, where = place.open(avon.link("court", QUERY, 3))
    assert place.look(where, cookie)[0] == 200
    for page in (
        "",
        f"/q/{OTHER}",
        f"/q/{OTHER}/report",
        f"/q/{OTHER}/certificate.json",
        f"/q/{OTHER}/consortium.json",
    ):
        status, text = place.look(f"/c/{avon.consortium}{page}", cookie)
        assert status == 403
        assert "Your link is for another page" in text
        assert "Avon-" not in text


PAGES = ["", f"/q/{QUERY}", f"/q/{QUERY}/report", f"/q/{QUERY}/consortium.json", "/consortium.json", "/events"]
PAGES += ["/manifest/0123456789abcdef.json", "/public/layout.json"]


def everybody(place: Place, oak: Client) -> dict[str, str]:
    """Valid cookies of another consortium: a member's, a judge's for all of it, and one's for a query of this name."""
    links = {"a member": oak.ticket(), "a judge": oak.link("all", "", 3), "of a query": oak.link("one", QUERY, 3)}
    return {who: place.open(link)[1] for who, link in links.items()}


def test_a_cookie_of_another_consortium_opens_nothing(place: Place) -> None:
    avon, oak = place.consortium("hospitals", "Avon"), place.consortium("clinics", "Oak")
    for who, cookie in everybody(place, oak).items():
        own = f"/c/{oak.consortium}/q/{QUERY}"
        status, text = place.look(own, cookie)
        assert (status, "Oak-ab" in text) == (200, True), who
        for page in PAGES:
            status, text = place.look(f"/c/{avon.consortium}{page}", cookie)
            assert status == 403, (who, page)
            assert "Your link is for another" in text
            assert "Avon" not in text
            assert "hospitals" not in text
        # nor with the address of the other in some other spelling
        for spelling in (f"/c/{oak.consortium}/../{avon.consortium}", f"/c/{oak.consortium}%2f..%2f{avon.consortium}"):
            status, text = place.look(spelling, cookie)
            assert status in (403, 404)
            assert "hospitals" not in text


def test_without_the_comparison_it_would_open_the_others_pages(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a session that is taken for whatever consortium the address names."""
    avon, oak = place.consortium("hospitals", "Avon"), place.consortium("clinics", "Oak")
    cookies, real = everybody(place, oak), Store.seat
    page = f"/c/{avon.consortium}/q/{QUERY}"

    def seat(store: Store, token: str, now: int) -> object:
        return replace(real(store, token, now), consortium=avon.consortium)

    monkeypatch.setattr(Store, "seat", seat)
    for cookie in cookies.values():
        status, text = place.look(page, cookie)
        assert (status, "Avon-ab" in text) == (200, True)


def test_requests_of_a_member_of_another_consortium_are_refused_by_name(place: Place) -> None:
    """Signed well, by somebody who is a member elsewhere in this room, with an id that it was told."""
    avon, oak = place.consortium("hospitals", "Avon"), place.consortium("clinics", "Oak")
    sha256 = avon.log(0)[0].sha256
    connection = http.client.HTTPConnection(place.address.partition("//")[2], timeout=30)
    for method, what in (("GET", ""), ("GET", "/log?after=0&wait=0"), ("GET", f"/file/{sha256}"), ("POST", "/ticket")):
        for client in (oak, avon):
            path, body = f"/api/c/{avon.consortium}{what}", b"{}" if method == "POST" else b""
            headers = sign_request(
                client._identity,
                place.address,
                method,
                path,
                body,
                int(time.time()),
                os.urandom(16).hex(),
            )
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            text = answer.read()
            if client is avon:
                assert answer.status == 200
            else:
                assert answer.status == 403
                assert b"room.not-a-member" in text
    connection.close()


# --- a room that has too many requests ---


@pytest.mark.parametrize("waits", [True, False])
def test_a_member_waits_while_the_room_has_too_many_requests(
    place: Place, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """Nothing that it does is lost for that; without the wait it is refused."""
    from quorumark.room import client
    from quorumark.room.limits import Buckets

    avon = place.consortium("hospitals", "Avon")
    place.app.state.room.by_key = Buckets(rate=4, burst=2)
    if not waits:
        monkeypatch.setattr(client, "_PATIENCE", 0)
        with pytest.raises(RoomError) as refused:
            sum(len(avon.log(0, 0)) for _ in range(6))
        assert refused.value.code == "room.too-many"
        return
    assert [len(avon.log(0, 0)) for _ in range(6)] == [4] * 6
