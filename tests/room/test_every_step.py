"""kill −9 at every step of founding and of a query: of an agent that founds and asks, of one that answers, of the room.

How the steps are found, and that each of them was died at, is in `tests.kit.dying`. A few of them in every run of the
tests; all of them in the slow ones.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from quorumark.consortium.home import HomeFolder
from quorumark.consortium.keystore import Unlock
from quorumark.room.demo import press
from quorumark.room.drafts import Draft
from quorumark.room.place import Place
from quorumark.verify.certificate import Certificate
from quorumark.verify.ledger import Ledger
from tests.kit.consortium import NAMES
from tests.kit.rooms import Group, RoomProcess, free_port, make_home, until

pytest.importorskip("starlette")
pytestmark = pytest.mark.room

PATIENCE = 900.0  # seconds for all deaths of one scenario; each costs the start of a process


class Mortal:
    """A process that is started again whenever it was killed, until it is stopped."""

    def __init__(
        self,
        died: Path,
        log: Path,
        every: int,
        *arguments: str,
        mortal: bool = True,
        again: bool = False,
        only: str = "",
    ) -> None:
        """`again`: a person types the command once more whenever it ended, since the room was away. `only`: labels."""
        self._start = [sys.executable, "-c", "from quorumark.cli import main; main()"]
        if mortal:
            self._start = [sys.executable, "-m", "tests.kit.dying", str(died), "--"]
        self._start += ["room", *arguments]
        self._log, self._every, self._again, self._only = log, every, again, only
        self._stopped = False
        self.deaths = 0
        self.ended = ""
        self._process = self._run()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _run(self) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "EVERY": str(self._every),
            "ONLY": self._only,
            "NUMBA_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        with self._log.open("ab") as log:
            return subprocess.Popen(self._start, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)

    def _watch(self) -> None:
        while True:
            code = self._process.wait()
            if self._stopped:
                return
            if code != -9 and not self._again:
                self.ended = f"it ended by itself ({code}): {self._log.read_text()[-2000:]}"
                return
            self.deaths += code == -9
            self._process = self._run()

    def stop(self) -> None:
        self._stopped = True
        self._process.kill()
        self._process.wait()
        self._thread.join()


def scenario(tmp_path: Path, victim: str, every: int, only: str = "", declines: bool = False) -> tuple[int, list[str]]:
    """Making a key with three members and one query, with one mortal process; how often it died, and where. `declines`:
    Cedar does not answer the query."""
    died = tmp_path / "died"
    folder = tmp_path / "room"
    folder.mkdir()
    port = free_port()
    room = RoomProcess(folder, port)
    place = ("serve", "--data", str(folder / "data"), "--address", room.address, "--port", str(port))
    running: dict[str, Mortal] = {}
    try:
        room.start()  # whole while members join; then as one that dies
        group = Group.join(tmp_path / "members", room.address, members=3, threshold=2)
        room.kill()
        every_room = victim == "room"
        log = folder / "mortal.log"
        running["room"] = Mortal(died, log, every, *place, "--anyone-may-found", mortal=every_room)
        for index, name in enumerate(NAMES[:3]):
            log = tmp_path / f"{name}.log"
            home = str(group.homes[index][0].path)
            running[name] = Mortal(died, log, every, "join", "--home", home, mortal=victim == name, only=only)
        go_through(group, running, declines)
    finally:
        for one in running.values():
            one.stop()
        room.kill()
    check_all(group, folder, declines)
    return running[victim].deaths, died.read_text().splitlines()


def go_through(group: Group, running: dict[str, Mortal], declines: bool = False) -> None:
    def wait(true: object, what: str) -> None:
        def sound() -> bool:
            problems = [f"{name}: {one.ended}" for name, one in running.items() if one.ended]
            assert not problems, problems
            return bool(true())  # type: ignore[operator]

        until(sound, what, PATIENCE)

    def pressed(index: int, say: str) -> bool:
        page = Place(group.homes[index][0].path).page
        return page.exists() and press(page.read_text(), say)

    def decided(index: int, count: int, say: str = "yes") -> bool:
        """Presses until the decision is on disk: the agent may die while it is made."""
        path = group.homes[index][0].path / "room" / group.consortium / "decisions.json"
        made = json.loads(path.read_text())["made"] if path.exists() else {}
        if len(made) < count:
            pressed(index, say)
        return len(made) >= count

    terms = group.terms()
    about = terms.digest().hex()
    Place(group.homes[0][0].path).hand_over(about, group.folder / "agreed")
    for index in range(3):
        wait(lambda index=index: decided(index, 1), f"the terms at {NAMES[index]}")
    places = [home.path / "consortia" / about[:16] / "anchor.safetensors" for home, _ in group.homes]
    wait(lambda: all(path.exists() for path in places), "the key")
    # Avon asks as its page would: a draft on disk
    folder = group.homes[0][0].path / "room" / group.consortium / "drafts" / ("ab" * 8)
    (folder / "files").mkdir(parents=True)
    (folder / "files" / "suspect.safetensors").write_bytes(group.marked().read_bytes())
    (folder / "draft.json").write_bytes(Draft("why", answers=2 if declines else 3).to_bytes())
    for index in reversed(range(3)):  # who declines comes first: it is not decided without Cedar
        say = "no" if declines and index == 2 else "yes"
        wait(lambda index=index, say=say: decided(index, 2, say), f"the query at {NAMES[index]}")
    found = [home.path / "room" / group.consortium / "certificates" for home, _ in group.homes]
    wait(lambda: all(list(path.glob("*/certificate.json")) for path in found), "the certificate at all members")
    time.sleep(4)  # what comes after it


def check_all(group: Group, folder: Path, declines: bool = False) -> None:
    """Nothing is lost, and nothing was done twice."""
    manifests = {home.only_consortium().manifest().digest() for home, _ in group.homes}
    assert len(manifests) == 1
    count = 2 if declines else 3
    for index, (home, unlock) in enumerate(group.homes):
        ours = home.only_consortium()
        ours.verify_share(unlock)
        assert not ours.ceremony_path.exists()
        kinds = Counter(entry["kind"] for entry in Ledger.open(ours, ours.manifest()).entries)
        assert kinds["answered"] == (0 if index == count else 1)
        assert not kinds["refused"]
        certificates = list((home.path / "room" / group.consortium / "certificates").glob("*/certificate.json"))
        assert len(certificates) == 1
        finding = Certificate.from_bytes(certificates[0].read_bytes()).finding
        assert (finding.verdict, len(finding.partials), finding.wrong) == ("PASSED", count, ())
        assert not list((home.path / "room" / group.consortium / "drafts").iterdir())
    room = RoomProcess(folder, free_port())
    room.start()
    try:
        group.address = room.address
        names = Counter(one.name.partition("/")[2].partition("/")[2] for one in group.client(0).whole_log())
    finally:
        room.kill()
    expected = {"ask.msg": 1, "query.json": 1, "file/0": 1, "combined.msg": 1}
    expected |= {"partial.json": count, "signed.json": count, "declined.msg": 3 - count}
    assert {name: names[name] for name in expected} == expected
    assert names["certificate.json"] == names["report.html"] == 1


def founding(tmp_path: Path, victim: str, every: int) -> tuple[int, list[str]]:
    """One founds, one joins by an invitation, each by the same command again and again; how often it died, where."""
    died, port = tmp_path / "died", free_port()
    folder, members = tmp_path / "room", tmp_path / "members"
    for place in (folder, members):
        place.mkdir()
    room = RoomProcess(folder, port)
    homes = [make_home(members, name) for name in NAMES[:2]]
    running: dict[str, Mortal] = {}
    serve = ("serve", "--data", str(folder / "data"), "--address", room.address, "--port", str(port))

    def log(name: str) -> Path:
        return tmp_path / f"{name}.log"

    def start(name: str, *arguments: str) -> None:
        running[name] = Mortal(died, log(name), every, *arguments, mortal=victim == name, again=victim == "room")

    def sound() -> None:
        problems = [f"{name}: {one.ended}" for name, one in running.items() if one.ended]
        assert not problems, problems

    def invitations() -> list[str]:
        sound()
        said = log("Avon").read_text() if log("Avon").exists() else ""
        return re.findall(r"room join '(\S+)'", said)

    def settled() -> bool:
        """Both agents run, both have introduced themselves, and have heard of each other."""
        sound()
        for home, _ in homes:
            place = Place(home.path)
            if not place.joined or not place.page.exists() or len(list(place.people.glob("*-*.json"))) < 2:
                return False
        return True

    try:
        start("room", *serve, "--anyone-may-found")
        where = ("--examples", "100", "--home", str(homes[0][0].path))
        start("Avon", "join", room.address, "--found", "hospitals", "--invite", "1", *where)
        until(invitations, "an invitation", PATIENCE)
        where = ("--examples", "200", "--home", str(homes[1][0].path))
        start("Birch", "join", invitations()[-1], *where)
        until(settled, "both are there", PATIENCE)
        time.sleep(3)
        until(settled, "both are there still", PATIENCE)
        deaths = running[victim].deaths
    finally:
        for one in running.values():
            one.stop()
    check_founded(folder, homes)
    return deaths, died.read_text().splitlines()


def check_founded(folder: Path, homes: Sequence[tuple[HomeFolder, Unlock]]) -> None:
    """One consortium, with both in it, once; and both homes know it."""
    database = sqlite3.connect(folder / "data" / "room.db")
    consortia = database.execute("SELECT id, name, founder FROM consortia").fetchall()
    people = database.execute("SELECT consortium, name, active FROM members ORDER BY name").fetchall()
    said = database.execute("SELECT author, name FROM entries WHERE name LIKE 'person/%'").fetchall()
    database.close()
    keys = [home.card().ed25519 for home, _ in homes]
    ((consortium, name, founder),) = consortia
    assert (name, founder) == ("hospitals", keys[0])
    assert people == [(consortium, "Avon", 1), (consortium, "Birch", 1)]
    assert sorted(said) == sorted(zip(keys, ("person/100.json", "person/200.json"), strict=True))
    for (home, _), examples in zip(homes, (100, 200), strict=True):
        settings = Place(home.path).settings()
        assert (settings.consortium, settings.examples) == (consortium, examples)


@pytest.mark.parametrize("victim", ["Avon", "room"])
def test_some_steps_of_founding_and_joining(tmp_path: Path, victim: str) -> None:
    deaths, labels = founding(tmp_path, victim, every=7)
    assert deaths >= 2, labels


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["Avon", "Birch", "room"])
def test_every_step_of_founding_and_joining(tmp_path: Path, victim: str) -> None:
    deaths, labels = founding(tmp_path, victim, every=1)
    assert deaths == len(labels) == len(set(labels))
    needed = {
        "Avon": ["answered POST hospitals", "after file room/room.json", "answered POST #/invite"],
        "Birch": ["answered POST #/join", "after file room/room.json"],
        "room": ["after a consortium", "after invitations", "after somebody joins"],
    }
    assert set(needed[victim]) <= set(labels), labels
    sys.stdout.write(f"{victim}: {len(labels)} labels of founding and joining\n")


@pytest.mark.parametrize("victim", ["Avon", "room"])
def test_some_steps(tmp_path: Path, victim: str) -> None:
    deaths, labels = scenario(tmp_path, victim, every=20 if victim == "Avon" else 12)
    assert deaths >= 3, labels


@pytest.mark.slow
def test_declining(tmp_path: Path) -> None:
    """A member that declines dies at each step of it: its word is there once, and it has answered nothing."""
    deaths, labels = scenario(tmp_path, "Cedar", every=1, only="declined", declines=True)
    assert deaths == len(labels)
    assert {"before", "after", "answered"} <= {label.partition(" ")[0] for label in labels}, labels


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["Avon", "Birch", "room"])
def test_every_step(tmp_path: Path, victim: str) -> None:
    deaths, labels = scenario(tmp_path, victim, every=1)
    assert deaths == len(labels) == len(set(labels))
    assert deaths > (40 if victim == "room" else 60), labels
    (tmp_path / "labels").write_text("\n".join(labels))
