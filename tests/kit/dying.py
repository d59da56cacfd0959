"""Runs a command of ours that dies by SIGKILL once at every step, to be started again each time.

    python -m tests.kit.dying DIED -- room join --home HOME

A step is anything that the outside can notice: before and after each file takes its place, before each request leaves,
after each answer came (an agent); before and after each change of the database or of a file (a room). Each has a label
without what differs between runs. A process dies at the first step whose label is not in the file DIED yet, and adds it
there first; so a scenario that ends has survived a death at every step that it has, each one once. With EVERY=n in the
environment it dies at every n-th label only, with ONLY=pattern at labels that the pattern is found in.
"""

from __future__ import annotations

import http.client
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

_DIFFERS = re.compile(r"[0-9a-f]{16,}|\.[0-9a-f]{12}\.partial|[0-9]{5,}")


class Deaths:
    """The labels at which processes have died, on disk."""

    def __init__(self, path: Path, every: int = 1, only: str = "") -> None:
        self._path, self._every, self._only = path, every, re.compile(only)
        self._lock = threading.Lock()
        self._died = set(path.read_text().splitlines()) if path.exists() else set()

    def step(self, label: str) -> None:
        """Dies here, unless that was done before."""
        label = _DIFFERS.sub("#", label)
        with self._lock:
            if label in self._died or not self._only.search(label):
                return
            dies = len(self._died) % self._every == 0
            self._died.add(label)
            with self._path.open("a") as file:
                file.write(label + "\n")
                file.flush()
                os.fsync(file.fileno())
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
                threading.Event().wait()


def _around(owner: Any, name: str, deaths: Deaths, label: Callable[..., str]) -> None:
    real = getattr(owner, name)

    def replaced(*arguments: Any, **options: Any) -> Any:
        text = label(*arguments)
        deaths.step(f"before {text}")
        found = real(*arguments, **options)
        deaths.step(f"after {text}")
        return found

    setattr(owner, name, replaced)


def watch_agent(deaths: Deaths) -> None:
    """Files that take their place, requests and answers."""
    asked = threading.local()

    def file_label(_: Any, target: Any, *__: Any) -> str:
        path = Path(target)
        return f"file {path.parent.name}/{path.name}"

    _around(os, "replace", deaths, file_label)
    real_request, real_answer = http.client.HTTPConnection.request, http.client.HTTPConnection.getresponse

    def request(connection: Any, method: str, path: str, body: Any = None, *rest: Any, **options: Any) -> None:
        named = re.search(rb'"name":"([^"]+)"', body or b"")
        what = named[1].decode() if named else path.partition("?")[0].rpartition("/c/")[2]
        asked.label = f"{method} {what}"
        if method != "GET":  # what only reads can be asked again at any time; its answer is a step all the same
            deaths.step(f"before {asked.label}")
        real_request(connection, method, path, body, *rest, **options)

    def getresponse(connection: Any) -> Any:
        found = real_answer(connection)
        deaths.step(f"answered {asked.label}")
        return found

    setattr(http.client.HTTPConnection, "request", request)  # noqa: B010 - the types of both differ
    setattr(http.client.HTTPConnection, "getresponse", getresponse)  # noqa: B010


def watch_room(deaths: Deaths) -> None:
    """What a room writes: consortia and their people, parts, whole files, entries, nonces."""
    from quorumark.room.store import Store

    _around(Store, "create_consortium", deaths, lambda *_: "a consortium")
    _around(Store, "invite", deaths, lambda *_: "invitations")
    _around(Store, "join", deaths, lambda *_: "somebody joins")
    _around(Store, "begin_part", deaths, lambda *_: "begin a part")
    _around(Store, "finish", deaths, lambda *_: "a whole file")
    _around(Store, "add_entry", deaths, lambda _, __, ___, name, *____: f"entry {re.sub('/[0-9]+', '/n', name)}")
    _around(Store, "use_nonce", deaths, lambda *_: "a nonce")
    real = Store.write_part

    def write_part(*arguments: Any) -> bool:
        deaths.step("before a part")
        found = real(*arguments)
        deaths.step("after a part")
        return found

    setattr(Store, "write_part", staticmethod(write_part))  # noqa: B010


def main() -> None:
    path, dashes, *arguments = sys.argv[1:]
    assert dashes == "--"
    deaths = Deaths(Path(path), int(os.environ.get("EVERY", "1")), os.environ.get("ONLY", ""))
    (watch_room if arguments[1] == "serve" else watch_agent)(deaths)
    sys.argv = ["quorumark", *arguments]
    from quorumark.cli import main as quorumark

    quorumark()


if __name__ == "__main__":
    main()
