"""kill −9: the room, and agents as processes of their own, at steps of the founding and of a query. All go on."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quorumark.room.asking import ask
from quorumark.room.demo import press
from quorumark.room.place import Place
from quorumark.verify.certificate import Certificate
from quorumark.verify.ledger import Ledger
from tests.kit.commands import run
from tests.kit.consortium import NAMES
from tests.kit.rooms import Group, RoomProcess, make_home, room_on, until

pytest.importorskip("starlette")
pytestmark = pytest.mark.room


class Agents:
    """Members' agents, each a process that knows its home only."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, *indices: int) -> None:
        for index in indices:
            home = self._group.homes[index][0].path
            Place(home).page.unlink(missing_ok=True)
            command = [
                sys.executable,
                "-c",
                "from quorumark.cli import main; main()",
                "room",
                "join",
                "--home",
                str(home),
            ]
            with (self._group.folder / f"{index}.log").open("ab") as log:
                self._running[index] = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def kill(self, index: int) -> None:
        process = self._running.pop(index)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def press(self, index: int, say: str = "yes") -> None:
        place = Place(self._group.homes[index][0].path)

        def pressed() -> bool:
            assert self._running[index].poll() is None, (self._group.folder / f"{index}.log").read_text()
            return place.page.exists() and press(place.page.read_text(), say)

        until(pressed, f"a button at {NAMES[index]}", 90)

    def stop(self) -> None:
        for index in list(self._running):
            self.kill(index)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[tuple[RoomProcess, Group, Agents]]:
    with room_on(tmp_path / "room") as room:
        group = Group.join(tmp_path / "members", room.address, members=3, threshold=2)
        agents = Agents(group)
        yield room, group, agents
        agents.stop()


def names(room: RoomProcess) -> set[tuple[str, str]]:
    """What the room has, by its own database."""
    database = sqlite3.connect(room.folder / "data" / "room.db", timeout=30)
    found = set(database.execute("SELECT author, name FROM entries"))
    database.close()
    return found


def test_the_room_and_an_agent_die_again_and_again_and_all_is_done_once(
    scene: tuple[RoomProcess, Group, Agents], environment: dict[str, str], tmp_path: Path
) -> None:
    room, group, agents = scene
    keys = [home.card().ed25519 for home, _ in group.homes]
    agents.start(0, 1, 2)
    # the founder's command: who joined comes from the room, and the agent proposes what it wrote
    home = str(group.homes[0][0].path)
    people = group.homes[0][0].path / "room" / "people"
    until(lambda: len(list(people.glob("*-*.json"))) == 3, "all introduced themselves", 90)
    terms = group.terms()
    create = ("consortium", "create", "--name", "hospitals", "--threshold", "2", "--without-alignment")
    model = str(group.folder / "agreed" / "anchor.safetensors")
    made = run(environment, *create, "--model", model, "--room", home, "--out", str(tmp_path / "written"))
    assert made.returncode == 0, made.stderr
    digest = next(line.split()[1] for line in made.stdout.splitlines() if line.startswith("terms "))
    roster = json.loads((tmp_path / "written" / "terms.json").read_text())["roster"]
    assert {(one["name"], one["examples"]) for one in roster} == {(m.name, m.examples) for m in terms.roster}

    point = {one["ed25519"]: one["point"] for one in roster}[keys[2]]
    for index in (0, 1):
        agents.press(index)
    agents.press(2)
    until(lambda: (keys[2], f"setup/{digest}/1-commit/{point}.msg") in names(room), "Cedar's commitment", 90)
    agents.kill(2)  # in the middle of the ceremony
    room.kill()
    room.start()
    agents.start(2)
    until(lambda: (keys[2], f"setup/{digest}/6-root/{point}.msg") in names(room), "Cedar's root", 90)
    room.kill()
    agents.kill(2)
    room.start()
    agents.start(2)
    places = [home.path / "consortia" / digest[:16] for home, _ in group.homes]
    until(lambda: all((place / "anchor.safetensors").exists() for place in places), "the key", 90)
    manifests = {home.only_consortium().manifest().digest() for home, _ in group.homes}
    assert len(manifests) == 1
    for member, unlock in group.homes:
        member.only_consortium().verify_share(unlock)
        assert not member.only_consortium().ceremony_path.exists()

    # a query: the agent dies after it was told to answer, the room before the signatures
    suspect = group.marked()
    asker, unlock = group.homes[0]
    query = ask(group.client(0), asker, asker.identity(unlock), suspect, "why", answers=3).digest()
    agents.press(2)
    agents.kill(2)
    agents.start(2)
    agents.press(1)
    room.kill()
    room.start()
    agents.press(0)
    path = asker.path / "room" / group.consortium / "certificates" / query / "certificate.json"
    until(path.exists, "the certificate", 90)
    until(lambda: (keys[0], f"query/{query}/certificate.json") in names(room), "it is in the room", 90)
    certificate = Certificate.from_bytes(path.read_bytes())
    assert certificate.finding.verdict == "PASSED"
    assert len(certificate.finding.partials) == 3
    for member, _ in group.homes:
        ours = member.only_consortium()
        entries = Ledger.open(ours, ours.manifest()).entries
        assert [entry["kind"] for entry in entries].count("answered") == 1
    # a second agent on a home that has one is refused
    refused = run(environment, "room", "join", "--home", home)
    assert refused.returncode == 2
    assert "another agent" in refused.stderr


def test_a_founder_that_dies_before_it_remembers_where_founds_once(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command again goes on, after either of the two steps at which it can have died."""
    with room_on(tmp_path / "room") as room:
        home, _ = make_home(tmp_path, "Avon")

        class Died(BaseException):
            pass

        def dies(*_: object) -> None:
            raise Died

        def enter(name: str = "hospitals") -> int:
            command = ("room", "join", room.address, "--found", name, "--home", str(home.path), "--invite", "1")
            return run(environment, *command).returncode

        def founded() -> list[str]:
            database = sqlite3.connect(room.folder / "data" / "room.db", timeout=30)
            found = [str(one) for (one,) in database.execute("SELECT id FROM consortia")]
            database.close()
            return found

        monkeypatch.setattr("quorumark.room.agent.Agent.start", dies)
        with monkeypatch.context() as patch:
            patch.setattr(Place, "remember", dies)
            with pytest.raises(Died):
                enter()
            with pytest.raises(Died):
                enter()
        assert len(founded()) == 1
        with pytest.raises(Died):  # in the agent's start: all before it was done
            enter()
        assert Place(home.path).settings().consortium == founded()[0]
        with pytest.raises(Died):
            enter()
        assert len(founded()) == 1
        assert enter("clinics") == 2  # it is in a room already
        assert len(founded()) == 1
