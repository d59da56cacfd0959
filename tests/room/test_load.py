"""A room under load, as a process on this machine: 100 members, each a process, who listen while others write and have
browsers that stream and read; and a suspect of 2 GB that goes in once and out to five agents. The figures are printed
(pytest -s)."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from quorumark.consortium.identity import Identity
from quorumark.room.client import Client
from quorumark.room.place import Place
from tests.kit.commands import process
from tests.kit.room_members import END
from tests.kit.rooms import Group, RoomProcess, room_on, until, visit

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


def test_a_hundred_members_listen_and_read(tmp_path: Path) -> None:
    """Two entries a second for 30 s, after 2,000 that were there; every member must hear of each, soon.

    Each member is a process with its own key, connections and host (by a proxy's header); it knows its invitation.
    """
    folder = tmp_path / "members"
    folder.mkdir()
    with room_on(tmp_path / "room", "--anyone-may-found", "--proxy", "127.0.0.1") as room:
        writers = joined(room, 20)
        for number in range(2000):
            writers[number % 20].upload(b"x%d" % number, f"note/{number}.msg")
        codes = [text for count in (50, MEMBERS - 50) for text in writers[0].invite(count)]
        (folder / "invitations.txt").write_text("\n".join(codes))
        members = subprocess.Popen([sys.executable, "-m", "tests.kit.room_members", str(folder)])
        try:
            until(lambda: len(list(folder.glob("*.here"))) == MEMBERS, "all have joined", 300)
            time.sleep(3)
            written: dict[str, float] = {}
            used, begun = cpu(room), time.monotonic()
            for number in range(ENTRIES):
                name = f"news/{number}.msg"
                written[name] = time.monotonic()
                writers[1].upload(b"y%d" % number, name)
                time.sleep(max(0.0, begun + (number + 1) / 2 - time.monotonic()))
            took = time.monotonic() - begun
            used = cpu(room) - used
            time.sleep(5)
            writers[1].upload(b"end", END)
            assert members.wait(timeout=120) == 0
        finally:
            members.kill()
            members.wait()
        peak = memory(room, "VmHWM")
    every = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    late = [at - written[name] for one in every for name, at in one["heard"].items() if name in written]
    pages = [one for member in every for one in member["pages"]]
    problems = [one for member in every for one in member["problems"]]
    figures = {
        "member processes": len(every),
        "heard": len(late),
        "median seconds until a member hears": round(statistics.median(late), 3),
        "99 % of them": round(statistics.quantiles(late, n=100)[98], 3),
        "pages read": len(pages),
        "pages refused, since they were too many": sum(member["refused"] for member in every),
        "median seconds for a page": round(statistics.median(pages), 3),
        "99 % of pages": round(statistics.quantiles(pages, n=100)[98], 3),
        "entries a second": round(ENTRIES / took, 1),
        "the room's CPU, of one core": round(used / took, 2),
        "the room's memory at most, MB": round(peak),
        "load of the machine": os.getloadavg()[0],
        "problems": problems[:5],
    }
    sys.stdout.write(json.dumps(figures, indent=1))
    assert len(every) == MEMBERS
    assert len(late) == MEMBERS * ENTRIES
    assert not problems
    assert peak < 300


def large_suspect(group: Group, path: Path) -> None:
    """A marked model with one more tensor, which makes it 2 GiB."""
    small = group.marked("small.safetensors")
    data = small.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    end = len(data) - 8 - length
    header["more"] = {"dtype": "U8", "shape": [LARGE], "data_offsets": [end, end + LARGE]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + data[8 + length :])
        block = os.urandom(1 << 24)
        for number in range(LARGE >> 24):
            file.write(number.to_bytes(8, "big") + block[8:])


def test_a_suspect_of_two_gigabytes_goes_to_five_agents(tmp_path: Path) -> None:
    """Six members; one asks at a terminal, the agents of the five others are processes, and fetch the suspect once
    their members press "Fetch it". Each computes x and the query again before it shows what it found."""
    with room_on(tmp_path / "room") as room:
        group = Group.join(tmp_path / "members", room.address, members=6, threshold=3)
        group.start()
        group.found()
        source = tmp_path / "large.safetensors"
        large_suspect(group, source)
        group.stop()
        environment = {**os.environ, "NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        begun, used = time.monotonic(), cpu(room)
        home = str(group.homes[0][0].path)
        asked = process(environment, "room", "ask", str(source), "--purpose", "large", "--home", home, timeout=900)
        up = time.monotonic() - begun
        assert asked.returncode == 0, asked.stderr
        agents = []
        try:
            for member, _ in group.homes[1:]:
                command = [sys.executable, "-c", "from quorumark.cli import main; main()", "room", "join", "--home"]
                with (tmp_path / f"{member.path.name}.log").open("wb") as log:
                    agents.append(
                        subprocess.Popen([*command, str(member.path)], stdout=log, stderr=log, env=environment)
                    )
            places = [Place(member.path).page for member, _ in group.homes[1:]]
            until(lambda: all(place.exists() for place in places), "the agents' pages", 300)
            pages = [place.read_text() for place in places]
            until(lambda: all("Fetch it" in visit(page)[2] for page in pages), "the query at all five", 300)
            begun = time.monotonic()
            for page in pages:
                about = re.search(r'/fetch"><input type="hidden" name="about" value="([0-9a-f]{64})"', visit(page)[2])
                assert about is not None
                origin = page.rstrip("/").rpartition("/")[0]
                assert visit(f"{page}fetch", "POST", {"about": about[1]}, origin=origin)[0] == 303
            until(lambda: all(">Approve<" in visit(page)[2] for page in pages), "all five have it", 900)
            down = time.monotonic() - begun
            copies = [list(member.path.glob("room/*/suspects/*/*")) for member, _ in group.homes[1:]]
            assert [[one.stat().st_size for one in found] for found in copies] == [[source.stat().st_size]] * 5
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()
        figures = {
            "seconds to ask: read, computed, sent": round(up, 1),
            "seconds until five agents have it, and computed the query again": round(down, 1),
            "the room's CPU seconds": round(cpu(room) - used, 1),
            "the room's memory at most, MB": round(memory(room, "VmHWM")),
            "load of the machine": os.getloadavg()[0],
        }
        sys.stdout.write(json.dumps(figures, indent=1))
        assert memory(room, "VmHWM") < 300
