"""Many members of a room, each a process of its own that knows an invitation and nothing else.

    python -m tests.kit.room_members FOLDER

FOLDER/invitations.txt has a line for each. The modules are loaded once, and each member is a fork of that: on two cores
and in little memory there is no place for a hundred interpreters. A member makes its key, joins, listens as an agent
does, and has a browser that streams news and loads the overview anew with each, until there is an entry
`note/end.msg`. FOLDER/N.json is what it heard and when (CLOCK_MONOTONIC), and how long its pages took.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from quorumark.consortium.identity import Identity
from quorumark.errors import RoomError
from quorumark.room.client import Client
from quorumark.room.requests import sign_request
from tests.kit.rooms import visit

END = "note/end.msg"


class Reader(threading.Thread):
    """A browser: streams news, and loads the page anew with each."""

    def __init__(self, client: Client, host: str, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        _, headers, _ = visit(client.ticket(), x_forwarded_for=host)
        self._headers = {"cookie": headers["set-cookie"].partition(";")[0], "x-forwarded-for": host}
        self._port, self._place = urlsplit(client.address).port, f"/c/{client.consortium}"
        self._stopped = stop
        self.pages: list[float] = []
        self.refused = 0
        self.problems: list[str] = []

    def run(self) -> None:
        while not self._stopped.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
            page = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
            try:
                connection.request("GET", f"{self._place}/events", headers=self._headers)
                answer = connection.getresponse()
                while not self._stopped.is_set() and (line := answer.readline()):
                    if line.startswith(b"data:"):
                        begun = time.monotonic()
                        page.request("GET", self._place, headers=self._headers)
                        found = page.getresponse()
                        found.read()
                        if found.status == 200:
                            self.pages.append(time.monotonic() - begun)
                        elif found.status == 429:
                            self.refused += 1
                        else:
                            self.problems.append(f"status {found.status}")
            except OSError as error:
                if not self._stopped.is_set():
                    self.problems.append(repr(error))
            finally:
                connection.close()
                page.close()


def live(number: int, invitation: str, folder: Path) -> None:
    """One member's life."""
    host = f"10.0.0.{number}"  # by a proxy's header: the room limits requests by host

    def from_own_host(identity: Identity, *arguments: Any) -> dict[str, str]:
        return {**sign_request(identity, *arguments), "x-forwarded-for": host}

    pytest.MonkeyPatch().setattr("quorumark.room.client.sign_request", from_own_host)
    parts = urlsplit(invitation)
    address, consortium = f"{parts.scheme}://{parts.netloc}", parts.path.removeprefix("/c/")
    client = Client(address, Identity.generate(f"Agent {number:03}"), consortium)
    client.join(parts.fragment)
    after = max((one.number for one in client.whole_log()), default=0)
    stop, heard, problems = threading.Event(), {}, []
    reader = Reader(client, host, stop)
    reader.start()
    (folder / f"{number}.here").touch()
    try:
        while not stop.is_set():
            for one in client.log(after, 20):
                after = max(after, one.number)
                heard[one.name] = time.monotonic()
                if one.name == END:
                    stop.set()
    except RoomError as error:
        problems.append(str(error))
    time.sleep(2)
    found = {"heard": heard, "pages": reader.pages, "refused": reader.refused, "problems": problems + reader.problems}
    (folder / f"{number}.json").write_text(json.dumps(found))


def main(folder: Path) -> None:
    children = []
    for number, invitation in enumerate((folder / "invitations.txt").read_text().split(), 1):
        if (child := os.fork()) == 0:
            try:
                live(number, invitation, folder)
            except Exception as error:  # noqa: BLE001 - the test must hear of whatever it was
                found = {"heard": {}, "pages": [], "refused": 0, "problems": [repr(error)]}
                (folder / f"{number}.json").write_text(json.dumps(found))
                (folder / f"{number}.here").touch()
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
