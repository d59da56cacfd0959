"""How much it takes of people: five members found a consortium and get their first certificate, and each of them runs
at most three commands and presses at most two buttons. A step that needs one more fails here."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from quorumark.align.groups import Groups
from quorumark.consortium.home import HomeFolder
from quorumark.consortium.keystore import Unlock
from quorumark.model.layout import write_safetensors
from quorumark.model.usercode import load_function
from quorumark.room.demo import press
from quorumark.room.place import Place
from quorumark.verify.certificate import Certificate
from tests.kit.browser import CHROMIUM, Browser, browser
from tests.kit.commands import process, run
from tests.kit.consortium import NAMES, Tensors
from tests.kit.rooms import Group, room_on, until, visit

pytest.importorskip("starlette")
pytestmark = pytest.mark.room

MOST_COMMANDS, MOST_CLICKS = 3, 2
PATIENCE = 180.0  # seconds: five agents start at once, on a machine that does other things as well
ENVIRONMENT = {**os.environ, "NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


@dataclass
class Person:
    """Somebody who counts what it has to do."""

    name: str
    folder: Path
    tab: Browser | None  # without a browser, the page's own forms are sent
    commands: list[str] = field(default_factory=list)
    clicks: list[str] = field(default_factory=list)
    agent: subprocess.Popen[bytes] | None = None

    @property
    def home(self) -> Path:
        return self.folder / self.name

    @property
    def said(self) -> str:
        return (self.folder / f"{self.name}.log").read_text()

    def _counted(self, *arguments: str) -> list[str]:
        self.commands.append(" ".join(arguments[:2]))
        assert len(self.commands) <= MOST_COMMANDS, f"{self.name} runs {self.commands}"
        return [*arguments, *(() if "--room" in arguments else ("--home", str(self.home)))]

    def run(self, *arguments: str) -> None:
        done = run(ENVIRONMENT, *self._counted(*arguments))
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)

    def join(self, *arguments: str) -> None:
        """`room join` goes on until it is stopped."""
        command = [sys.executable, "-c", "from quorumark.cli import main; main()"]
        with (self.folder / f"{self.name}.log").open("wb") as log:
            self.agent = subprocess.Popen(
                command + self._counted("room", "join", *arguments), stdout=log, stderr=log, env=ENVIRONMENT
            )
        until(lambda: self.agent is not None and self.agent.poll() is None and self._page.exists(), self.name, PATIENCE)

    @property
    def _page(self) -> Path:
        return Place(self.home).page

    def click(self, label: str, about: str) -> None:
        """Opens its own page, waits until `about` is there, and presses a button."""
        self.clicks.append(label)
        assert len(self.clicks) <= MOST_CLICKS, f"{self.name} presses {self.clicks}"
        if self.tab is None:
            until(lambda: press(self._page.read_text(), "yes"), f"{about} at {self.name}", PATIENCE)
            return
        self.tab.go(self._page.read_text())
        self.tab.wait(f"document.querySelector('main').innerText.includes({about!r})", PATIENCE)
        self.tab.press(label)


@contextlib.contextmanager
def five(folder: Path) -> Iterator[list[Person]]:
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        tab = None if CHROMIUM is None else stack.enter_context(browser(folder / "profile"))
        people = [Person(name, folder, tab) for name in NAMES[:5]]
        try:
            yield people
        finally:
            for one in people:
                if one.agent is not None:
                    one.agent.kill()
                    one.agent.wait()


NET = """
import torch


def make():
    torch.manual_seed(1)
    one, two, three = torch.nn.Linear(60, 120), torch.nn.Linear(120, 60), torch.nn.Linear(60, 10)
    return torch.nn.Sequential(one, torch.nn.ReLU(), two, torch.nn.ReLU(), three)
"""


def written(folder: Path) -> Tensors:
    """What the founder has before all this: the model's code, and its initial weights."""
    (folder / "net.py").write_text(NET)
    model = load_function(f"{folder / 'net.py'}:make")()
    anchor = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    write_safetensors(anchor, folder / "initial.safetensors")
    return anchor


def marked(people: list[Person], address: str, anchor: Tensors) -> Path:
    """What they trained, as only a test can make it in a moment."""
    homes = [(HomeFolder(one.home), Unlock.key_file(one.folder / f"{one.name}.key")) for one in people]
    return Group(people[0].folder, address, homes, "", threshold=3, anchor=anchor).marked()


def test_three_commands_and_two_clicks_each(tmp_path: Path) -> None:
    """Each with the terms that a newcomer should have: with alignment."""
    pytest.importorskip("torch")
    with room_on(tmp_path / "room") as room, five(tmp_path / "members") as people:
        founder, asker, folder = people[0], people[1], tmp_path / "members"
        for one in people:
            one.run("member", "init", "--name", one.name, "--key-file", str(folder / f"{one.name}.key"))
        founder.join(room.address, "--found", "hospitals", "--invite", "4", "--examples", "100")
        until(lambda: founder.said.count("invitation:") == 4, "the invitations")
        codes = re.findall(r"room join '(\S+)'", founder.said)
        for number, (one, code) in enumerate(zip(people[1:], codes, strict=True), 2):
            one.join(code, "--examples", str(100 * number))

        joined = Place(founder.home).people
        until(
            lambda: len(list(joined.glob("*-*.json"))) == 5, "all have introduced themselves to the founder", PATIENCE
        )

        anchor = written(folder)
        terms = ["--name", "hospitals", "--threshold", "3", "--model", str(folder / "initial.safetensors")]
        terms += ["--groups", f"{folder / 'net.py'}:make", "--example", "2,60"]  # alignment is what a newcomer needs
        terms += ["--out", str(folder / "agreed"), "--room", str(founder.home)]
        founder.run("consortium", "create", *terms)
        for one in people:
            one.click("Agree", "Make a key")
        until(  # the last file that an agent keeps beside the key
            lambda: all(list(one.home.glob("consortia/*/groups.json")) for one in people), "the key", PATIENCE
        )
        for one in people:
            (groups,) = one.home.glob("consortia/*/groups.json")
            assert Groups.from_bytes(groups.read_bytes()).groups
        suspect = marked(people, room.address, anchor)
        asker.run("room", "ask", str(suspect), "--purpose", "offered by a reseller", "--answers", "5")
        for one in people:
            one.click("Approve", "offered by a reseller")
        for one in people:
            until(lambda one=one: list(one.home.glob("room/*/certificates/*/certificate.json")), one.name, PATIENCE)  # type: ignore[misc]
            (path,) = one.home.glob("room/*/certificates/*/certificate.json")
            finding = Certificate.from_bytes(path.read_bytes()).finding
            assert (finding.verdict, len(finding.partials)) == ("PASSED", 5)

        assert founder.commands == ["member init", "room join", "consortium create"]
        assert asker.commands == ["member init", "room join", "room ask"]
        assert all(one.commands == ["member init", "room join"] for one in people[2:])
        assert all(one.clicks == ["Agree", "Approve"] for one in people)
        assert all(one.agent is not None and one.agent.poll() is None for one in people)


@pytest.mark.slow
def test_the_demo_passes(tmp_path: Path) -> None:
    """From `room demo` to PASSED: how long it takes is printed. The bound is five minutes, for machines that do other
    things as well."""
    pytest.importorskip("torch")
    start = time.monotonic()
    done = process({**os.environ}, "room", "demo", "--out", str(tmp_path / "demo"), timeout=600)
    assert done.returncode == 0, (done.stdout, done.stderr)
    passed = re.search(r"^ *([0-9.]+) s  PASSED", done.stdout, re.MULTILINE)
    assert passed is not None, done.stdout
    sys.stdout.write(f"from `room demo` to PASSED: {passed[1]} s; whole command {time.monotonic() - start:.1f} s\n")
    assert float(passed[1]) < 300
    assert "page of" not in done.stdout  # nobody would answer there any more
    assert "with --stay they go on" in done.stdout


@pytest.mark.slow
def test_the_demo_s_pages_are_there_as_long_as_it_says(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    command = [sys.executable, "-c", "from quorumark.cli import main; main()", "room", "demo", "--stay"]
    said = tmp_path / "said"
    with said.open("wb") as out:
        demo = subprocess.Popen([*command, "--out", str(tmp_path / "demo")], stdout=out, stderr=out)
    try:
        until(lambda: "until you press Ctrl-C" in said.read_text() or demo.poll() is not None, "the demo", 600)
        pages = re.findall(r"page of (.*): (http\S+)", said.read_text())
        assert len(pages) == 5, said.read_text()
        for name, page in pages:
            status, _, text = visit(page)
            assert (status, f"{name}: your agent" in text) == (200, True)
        demo.send_signal(signal.SIGINT)
        assert demo.wait(timeout=60) == 0
        for _, page in pages:
            with pytest.raises(OSError, match="refused"):
                visit(page)
    finally:
        demo.kill()
        demo.wait()
