"""A room under load, as a process on this machine: 100 members who listen while others write, 100 browsers that stream
and read, and a suspect of 2 GB that goes in once and out five times. The figures are printed (pytest -s)."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import resource
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from quorumark.consortium.identity import Identity
from quorumark.errors import RoomError
from quorumark.room.client import Client
from quorumark.room.requests import sign_request
from tests.kit.rooms import RoomProcess, room_on, visit

pytest.importorskip("starlette")
pytestmark = [pytest.mark.room, pytest.mark.slow]

MEMBERS = 100
ENTRIES = 60
LARGE = 2 << 30


def memory(room: RoomProcess, what: str) -> float:
    """VmRSS or VmHWM in MB."""
    assert room.process is not None
    found = re.search(rf"{what}:\s+(\d+) kB", Path(f"/proc/{room.process.pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1000


def cpu(room: RoomProcess) -> float:
    assert room.process is not None
    fields = Path(f"/proc/{room.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def joined(room: RoomProcess, count: int) -> list[Client]:
    founder = Client(room.address, Identity.generate("Member 000"))
    consortium = founder.create_consortium("many")
    clients = [founder]
    codes = [urlsplit(text).fragment for _ in range(0, count - 1, 99) for text in founder.invite(min(99, count - 1))]
    for number, code in zip(range(1, count), codes, strict=False):
        client = Client(room.address, Identity.generate(f"Member {number:03}"), consortium)
        client.join(code)
        clients.append(client)
    return clients


class Reader(threading.Thread):
    """A browser: streams news, and loads the page anew with each."""

    def __init__(self, room: RoomProcess, client: Client, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        _, headers, _ = visit(client.ticket())
        host = client._identity.name.rpartition(" ")[2]
        self._headers = {
            "cookie": headers["set-cookie"].partition(";")[0],
            "x-forwarded-for": f"10.0.1.{int(host)}",
        }
        self._port, self._place, self._stopped = room.port, f"/c/{client.consortium}", stop
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


def test_a_hundred_members_listen_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two entries a second for 30 s, after 2,000 that were there; every member must hear of each, soon.

    Members are threads of this process, each with its own key, connections and host (by a proxy's header).
    """

    def from_own_host(identity: Identity, *arguments: Any) -> dict[str, str]:
        number = identity.name.rpartition(" ")[2]
        return {**sign_request(identity, *arguments), "x-forwarded-for": f"10.0.0.{int(number)}"}

    monkeypatch.setattr("quorumark.room.client.sign_request", from_own_host)
    with room_on(tmp_path / "room", "--anyone-may-found", "--proxy", "127.0.0.1") as room:
        clients = joined(room, MEMBERS)
        for number in range(2000):
            clients[number % 20].upload(b"x%d" % number, f"note/{number}.msg")
        written: dict[str, float] = {}
        late: list[float] = []
        heard: set[tuple[str, str]] = set()  # who, and of what
        problems: list[str] = []
        stop = threading.Event()

        def listen(client: Client) -> None:
            after = 2000
            try:
                while not stop.is_set():
                    for one in client.log(after, 20):
                        after = max(after, one.number)
                        if one.name in written:
                            late.append(time.monotonic() - written[one.name])
                            heard.add((client._identity.ed25519, one.name))
            except RoomError as error:
                problems.append(str(error))

        writer = Client(room.address, clients[1]._identity, clients[1].consortium)
        readers = [Reader(room, client, stop) for client in clients]
        threads = [threading.Thread(target=listen, args=(client,), daemon=True) for client in clients]
        for thread in [*readers, *threads]:
            thread.start()
        time.sleep(3)
        used, begun = cpu(room), time.monotonic()
        for number in range(ENTRIES):
            name = f"news/{number}.msg"
            written[name] = time.monotonic()
            writer.upload(b"y%d" % number, name)
            time.sleep(max(0.0, begun + (number + 1) / 2 - time.monotonic()))
        took = time.monotonic() - begun
        used = cpu(room) - used
        deadline = time.monotonic() + 60
        while len(heard) < MEMBERS * ENTRIES and time.monotonic() < deadline:
            time.sleep(0.5)
        peak = memory(room, "VmHWM")
        stop.set()
        pages = [one for reader in readers for one in reader.pages]
        figures = {
            "heard": len(heard),
            "median seconds until a member hears": round(statistics.median(late), 3),
            "99 % of them": round(statistics.quantiles(late, n=100)[98], 3),
            "pages read": len(pages),
            "pages refused, since they were too many": sum(reader.refused for reader in readers),
            "median seconds for a page": round(statistics.median(pages), 3),
            "99 % of pages": round(statistics.quantiles(pages, n=100)[98], 3),
            "entries a second": round(ENTRIES / took, 1),
            "the room's CPU, of one core": round(used / took, 2),
            "the room's memory at most, MB": round(peak),
            "problems": (problems + [p for r in readers for p in r.problems])[:5],
        }
        sys.stdout.write(json.dumps(figures, indent=1))
        assert len(heard) == len(late) == MEMBERS * ENTRIES  # every member, of each entry, once
        assert not problems
        assert not [p for r in readers for p in r.problems]
        assert peak < 300


def test_a_suspect_of_two_gigabytes_goes_in_once_and_out_five_times(tmp_path: Path) -> None:
    with room_on(tmp_path / "room") as room:
        clients = joined(room, 6)
        source = tmp_path / "large"
        with source.open("wb") as file:
            block = os.urandom(1 << 24)
            for number in range(LARGE >> 24):
                file.write(number.to_bytes(8, "big") + block[8:])
        begun, used = time.monotonic(), cpu(room)
        sha256 = clients[0].upload(source, "query/large/file/0")
        up = time.monotonic() - begun

        def fetch(number: int) -> str:
            target = tmp_path / f"copy-{number}"
            clients[number].download(sha256, LARGE, target)
            with target.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            target.unlink()
            return found

        begun = time.monotonic()
        with ThreadPoolExecutor(5) as pool:
            assert set(pool.map(fetch, range(1, 6))) == {sha256}
        down = time.monotonic() - begun
        figures = {
            "seconds up": round(up, 1),
            "seconds for five down": round(down, 1),
            "the room's CPU seconds": round(cpu(room) - used, 1),
            "the room's memory at most, MB": round(memory(room, "VmHWM")),
            "this process, MB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000),
        }
        sys.stdout.write(json.dumps(figures, indent=1))
        assert memory(room, "VmHWM") < 300
