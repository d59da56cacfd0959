"""Ceremonies in which every member runs one command: it waits for the others, and says for whom."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import quorumark as qm
from quorumark.consortium.home import HomeFolder
from quorumark.consortium.plan import PlanWarning
from quorumark.errors import BusyError
from quorumark.files import only_one
from quorumark.setup.waiting import Progress, until_finished
from tests.kit.ceremony_folder import Consortium
from tests.kit.commands import run

COMMAND = [sys.executable, "-c", "from quorumark.cli import main; main()"]
DAY = """
import json, sys
from quorumark.cli import main
for command in json.loads(sys.argv[1]):
    sys.argv = ["quorumark", *command]
    try:
        main()
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    print("exit", code, flush=True)
"""


class Members:
    """Members whose commands are processes of their own, on one machine."""

    def __init__(self, group: Consortium, environment: dict[str, str]) -> None:
        self.group, self.environment = group, environment
        self.running: list[subprocess.Popen[str]] = []

    def _start(self, *command: str) -> subprocess.Popen[str]:
        made = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment,
            # a shell starts its background jobs without Ctrl-C, and children would inherit that
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        self.running.append(made)
        return made

    def start(self, index: int, *command: str) -> subprocess.Popen[str]:
        """A command of one member."""
        return self._start(*COMMAND, *command, *self.group.secrets(self.group.homes[index]))

    def day(self, index: int, *commands: list[str]) -> subprocess.Popen[str]:
        """One after the other, in one process: Python takes a second to start."""
        secrets = self.group.secrets(self.group.homes[index])
        return self._start(sys.executable, "-c", DAY, json.dumps([[*command, *secrets] for command in commands]))

    def setup(self, index: int, *more: str) -> subprocess.Popen[str]:
        return self.start(
            index, "setup", "dkg", "--terms", str(self.group.terms), "--folder", str(self.group.folder), *more
        )

    def end(self, process: subprocess.Popen[str], code: int = 0) -> str:
        said, _ = process.communicate(timeout=120)
        assert process.returncode == code, said
        return said


@pytest.fixture
def members(tmp_path: Path, environment: dict[str, str]) -> Iterator[Members]:
    here = Members(Consortium(tmp_path), environment)
    yield here
    for process in here.running:
        if process.poll() is None:
            process.kill()
        process.communicate()


def until(true: Callable[[], object]) -> None:
    for _ in range(600):
        if true():
            return
        time.sleep(0.1)
    raise AssertionError("it did not happen within a minute")


def test_five_processes_at_once_finish_with_one_command_each_though_two_die(members: Members) -> None:
    """One is killed and one interrupted while they wait; the same command goes on."""
    group = members.group
    first = [members.setup(i) for i in range(4)]  # Elm is late, so that all the others come to wait for it
    until(lambda: len(list((group.folder / "1-commit").glob("*.msg"))) == 4)
    place = HomeFolder(group.homes[0]).only_consortium().path
    until(lambda: (place / "ceremony.sealed").exists())
    first[0].send_signal(signal.SIGKILL)
    first[1].send_signal(signal.SIGINT)
    assert first[0].wait(60) == -signal.SIGKILL
    assert "nothing is lost" in members.end(first[1], code=130)
    again = [members.setup(0), members.setup(1), *first[2:], members.setup(4)]
    said = [members.end(process) for process in again]
    assert all("finished: the share is sealed" in text for text in said)
    assert "waiting for Elm (commit)" in said[2]
    assert len({m.to_bytes() for m in group.manifests()}) == 1
    for home in group.homes:
        group.run("share", "verify", *group.secrets(home))


def test_a_member_who_never_comes_is_named_when_the_time_is_up(members: Members) -> None:
    group, options = members.group, ["--terms", str(members.group.terms), "--folder", str(members.group.folder)]
    for i in range(3):
        group.step(i)
    done = run(members.environment, "setup", "dkg", *options, "--timeout", "0.5", *group.secrets(group.homes[0]))
    assert done.returncode == 3
    assert "waiting for Delta, Elm (commit)" in done.stderr
    assert "the same command goes on" in done.stderr
    group.step(3)
    done = run(members.environment, "setup", "dkg", *options, "--timeout", "0", *group.secrets(group.homes[0]))
    assert done.returncode == 3
    assert "waiting for Elm (commit)" in done.stderr
    done = run(members.environment, "setup", "dkg", *options, "--no-wait", "--timeout", "1")
    assert done.returncode == 2
    group.finish()


def test_a_second_start_beside_the_first_is_no_harm(members: Members) -> None:
    """Two commands of one member at once, and nobody holds the lock while it waits."""
    members.group = group = Consortium(members.group.base / "three", count=3, threshold=2)
    for i in (1, 2):
        group.step(i)
    twins = [members.setup(0) for _ in range(2)]
    until(lambda: (group.folder / "2-reveal" / "1.msg").exists())
    others = [members.setup(i) for i in (1, 2)]
    assert all("finished" in members.end(process) for process in [*twins, *others])
    assert len({m.to_bytes() for m in group.manifests()}) == 1
    # while a command works, not waits, another one waits for it, or says so when its time is up
    place = HomeFolder(group.homes[0]).only_consortium()
    arguments = ["setup", "dkg", "--terms", str(group.terms), "--folder", str(group.folder)]
    arguments += group.secrets(group.homes[0])
    with only_one(place.path):
        done = run(members.environment, *arguments, "--timeout", "0.3")
        assert (done.returncode, "another command is working" in done.stderr) == (3, True)
        assert "waiting for another command of this member" in done.stdout
        assert run(members.environment, *arguments, "--no-wait").returncode == 2


def test_every_other_ceremony_takes_one_command_each(members: Members) -> None:
    """Check, refresh, recovery, an amendment, a member who leaves and one who comes: nobody waits to be called."""
    members.group = group = Consortium(members.group.base / "three", count=3, threshold=2)
    group.finish()
    base, avon = group.base, str(group.homes[0])

    def all_run(*everybodys: list[list[str]]) -> list[str]:
        return [members.end(one) for one in [members.day(i, *commands) for i, commands in enumerate(everybodys)]]

    check, refresh = ["setup", "check", "--folder", str(base / "a")], ["share", "refresh", "--folder", str(base / "b")]
    for said in all_run(*[[check, refresh]] * 3):
        assert "healthy: " in said
        assert "finished: " in said
        assert said.count("exit 0") == 2
    # Cedar lost its share; nobody helps before it asks, and its first command ends before anybody could answer
    HomeFolder(group.homes[2]).only_consortium().share_path().unlink()
    folder, new = ["--folder", str(base / "recovery")], str(base / "new.json")
    group.run("consortium", "amend", "--home", avon, "--out", new, "--policy", "z=7")
    sign = ["consortium", "sign", "--terms", new, "--folder", str(base / "c")]
    ask, answer = ["share", "recover", "--helpers", "1,2", *folder], ["share", "help", *folder]
    early = run(members.environment, *answer, *group.secrets(group.homes[0]))
    assert (early.returncode, "asks first" in early.stderr) == (2, True)
    asked = run(members.environment, *ask, "--timeout", "0", *group.secrets(group.homes[2]))
    assert (asked.returncode, "waiting for Avon, Birch (answer)" in asked.stderr) == (3, True)
    *helpers, cedar = all_run([answer, sign], [answer, sign], [ask, sign])
    assert all("answered: Cedar" in said for said in helpers)
    assert cedar.count("exit 0") == 2
    assert "recovered: " in cedar
    assert all("in force: manifest" in said for said in (*helpers, cedar))
    # Cedar leaves, Hazel comes, and starts before anybody has shown the manifests
    hazel, newer = base / "Hazel", str(base / "agreed" / "newer.json")
    group.run("member", "init", "--name", "Hazel", *group.secrets(hazel))
    change = ["--remove", "3", "--add", f"{hazel}/member.json:100"]
    group.run("consortium", "amend", "--home", avon, "--out", newer, *change)
    before = group.manifests()[0].digest().hex()
    group.homes[2] = hazel
    reshare = ["share", "reshare", "--terms", newer, "--folder", str(base / "d")]
    comes = members.day(2, [*reshare, "--from", before])
    assert all("finished: " in said for said in all_run([reshare], [reshare]))
    assert "finished: " in members.end(comes)
    assert {m.epoch for m in group.manifests()} == {2}
    for name in ("layout.json", "anchor.safetensors"):  # they were beside the new terms
        assert (HomeFolder(hazel).only_consortium().path / name).exists()
    for home in group.homes:
        group.run("share", "verify", *group.secrets(home))


def test_a_dealers_members_wait_for_the_dealing_and_for_each_other(tmp_path: Path, environment: dict[str, str]) -> None:
    group = Consortium(tmp_path, "dealer", count=3, threshold=2)
    here = Members(group, environment)
    accept = ["setup", "accept", "--folder", str(group.folder), "--terms", str(group.terms)]
    early = here.start(0, *accept)
    assert "waiting for the dealer (deal)" in group.run(*accept, *group.secrets(group.homes[1]))
    group.run("setup", "dealer", "--terms", str(group.terms), "--folder", str(group.folder))
    assert "waiting for" in group.run(*accept, *group.secrets(group.homes[1]))
    late = here.start(2, *accept)
    assert all("finished" in here.end(process) for process in (early, late))
    assert "finished" in group.run(*accept, *group.secrets(group.homes[1]))


def test_a_terminal_shows_one_live_line(members: Members) -> None:
    group = members.group
    group.step(1)
    ours, theirs = pty.openpty()
    line = ["setup", "dkg", "--terms", str(group.terms), "--folder", str(group.folder), "--timeout", "2"]
    environment = {**members.environment, "TERM": "xterm", "COLUMNS": "100"}
    shown = b""
    with subprocess.Popen(
        [*COMMAND, *line, *group.secrets(group.homes[0])], stdout=theirs, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        os.close(theirs)
        with contextlib.suppress(OSError):  # how a terminal ends
            while part := os.read(ours, 4096):
                shown += part
    os.close(ours)
    assert process.returncode == 3
    assert b"waiting for Cedar, Delta, Elm (commit)" in shown
    assert shown.count(b"waiting for Cedar, Delta, Elm (commit)\r\n") <= 1  # redrawn in place, no line each


def test_the_loop_visits_only_when_all_files_are_there(tmp_path: Path) -> None:
    """One visit without a time to wait, and none while nothing has come."""
    visits: list[int] = []
    file = tmp_path / "awaited"

    def visit() -> Progress:
        visits.append(1)
        return Progress("step", () if file.exists() else ("Birch",), files=() if file.exists() else (file,))

    assert until_finished(visit, 0).waiting == ("Birch",)
    assert until_finished(visit, 0.5).waiting == ("Birch",)
    assert len(visits) == 2
    heard: list[tuple[str, ...]] = []

    def tell(progress: Progress) -> None:
        heard.append(progress.waiting)
        file.touch()

    assert until_finished(visit, 30, tell).finished
    assert (len(visits), heard) == (4, [("Birch",)])

    def busy() -> Progress:
        raise BusyError("another command is working")

    with pytest.raises(BusyError):
        until_finished(busy, 0.1)


def test_python_members_wait_too(tmp_path: Path) -> None:
    names = ("Avon", "Birch", "Cedar")
    homes = [qm.Home.create(tmp_path / name, name, key_file=tmp_path / f"{name}.key") for name in names]
    model = {"w": np.ones((8, 40), np.float32)}
    cards, strength = [(home.card, 100) for home in homes], {"rho": "0.05"}
    with pytest.warns(PlanWarning):
        terms = qm.Terms.agree("trial", 2, cards, model, strength=strength, without_alignment=True)
    assert homes[0].setup(terms, tmp_path / "exchange", wait=0.3, note=lambda _: None) is None
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(lambda home: home.setup(terms, tmp_path / "exchange", wait=60, note=len), homes))
    assert len({manifest.digest() for manifest in made if manifest is not None}) == 1
    assert None not in made
