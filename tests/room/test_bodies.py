"""Bodies that nobody signed, and bodies that never end."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from quorumark.consortium.identity import Identity
from quorumark.room import server
from quorumark.room.requests import WINDOW, sign_request
from quorumark.room.server import make_app

ROOM, AVON = "http://room.example", Identity.generate("Avon")
pytestmark = pytest.mark.room


def put(
    folder: Path, who: Identity, receive: Callable[[], Awaitable[dict[str, Any]]], late: int = 0, signature: str = ""
) -> tuple[int, str]:
    """A part of an upload, by its headers; `receive` is its body. Status and code."""
    app = make_app(folder, ROOM)
    store = app.state.room.store
    consortium = store.create_consortium(AVON.ed25519, AVON.card().to_bytes(), "hospitals", int(time.time()))
    path, query = f"/api/c/{consortium}/upload/{'ab' * 32}", "size=1000&offset=0"
    headers = sign_request(who, ROOM, "PUT", f"{path}?{query}", b"", int(time.time()) - late, "00" * 16)
    headers |= {"quorumark-signature": signature or headers["quorumark-signature"]}
    scope = {"type": "http", "http_version": "1.1", "method": "PUT", "path": path, "query_string": query.encode()}
    scope |= {"headers": [(k.encode(), v.encode()) for k, v in headers.items()], "client": ("127.0.0.1", 1)}
    scope |= {"scheme": "http", "server": ("room.example", 80), "root_path": "", "raw_path": path.encode()}
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def whole() -> None:
        await asyncio.wait_for(app(scope, receive, send), 30)

    asyncio.run(whole())
    store.close()
    return sent[0]["status"], json.loads(sent[1]["body"])["code"]


async def forbidden() -> dict[str, Any]:
    raise AssertionError("the body was read")


async def endless() -> dict[str, Any]:
    await asyncio.sleep(0.01)
    return {"type": "http.request", "body": b"", "more_body": True}


def test_a_body_is_read_only_of_somebody_who_may_be_a_member(tmp_path: Path) -> None:
    assert put(tmp_path / "a", Identity.generate("Mallory"), forbidden) == (403, "room.not-a-member")
    assert put(tmp_path / "b", AVON, forbidden, late=2 * WINDOW) == (401, "room.clock")
    assert put(tmp_path / "c", AVON, forbidden, signature="x") == (401, "room.not-signed")
    with pytest.raises(AssertionError, match="was read"):
        put(tmp_path / "d", AVON, forbidden)  # it would be noticed


def test_a_body_that_does_not_end_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server._BODY_SECONDS <= WINDOW
    monkeypatch.setattr(server, "_BODY_SECONDS", 0.1)
    assert put(tmp_path, AVON, endless) == (400, "room.malformed")
