"""The room's demo: a room and five agents, each a process that knows only the address, and people who press buttons.

The people are played here: for each, the agent's own page is fetched, and its form is sent back, as a browser would.
The model is that of `quorumark demo`.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import quorumark as qm
from quorumark.demo import EXAMPLES, HOSPITALS, PLANNED, ROUNDS, THRESHOLD, digits
from quorumark.errors import InputError, RoomError
from quorumark.room.place import Place

__all__ = ["press", "run"]

_PATIENCE = 300.0
Say = Callable[[str], None]


def run(out: Path | None = None, *, stay: bool = False, say: Say = print) -> str:
    """Runs it; the verdict about the marked model."""
    if out is not None and out.exists() and any(out.iterdir()):
        raise InputError("--out", "must be a new or empty folder", str(out))
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(tempfile.TemporaryDirectory(prefix="quorumark-room-")) if out is None else out
        scene = stack.enter_context(_scene(Path(made)))
        verdict = _play(scene, say)
        if stay:
            for name in HOSPITALS:
                say(f"page of {name}: {scene.page(name)}")
            say("the room and the agents run until you press Ctrl-C")
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    time.sleep(1)
    say("the room and the agents have stopped" + ("" if stay else "; with --stay they go on, and you see their pages"))
    return verdict


@dataclass
class _Scene:
    """Processes and homes."""

    folder: Path
    address: str
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    def start(self, name: str, *arguments: str) -> None:
        command = [sys.executable, "-c", "from quorumark.cli import main; main()", "room", *arguments]
        environment = {**os.environ, "NUMBA_NUM_THREADS": "1"}  # five agents share this machine
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(  # noqa: S603 - our own command
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment
            )

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def wait(self, true: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + _PATIENCE
        while not true():
            for name, process in self.processes.items():
                if process.poll() is not None:
                    raise RoomError(f"{name} has ended: {self.said(name)[-500:]}", code="room.answer")
            if time.monotonic() > until:
                raise RoomError(f"{what} took more than {_PATIENCE:g} s", code="room.unreachable")
            time.sleep(0.1)

    def home(self, name: str) -> Path:
        return self.folder / "members" / name

    def page(self, name: str) -> str:
        return Place(self.home(name)).page.read_text(encoding="ascii")


@contextlib.contextmanager
def _scene(folder: Path) -> Iterator[_Scene]:
    """A room that answers; in the end every process is stopped."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
    scene = _Scene(folder, f"http://127.0.0.1:{port}")
    try:
        where = ("--data", str(folder / "room"), "--address", scene.address, "--port", str(port))
        scene.start("room", "serve", *where, "--anyone-may-found")
        scene.wait(lambda: _answers(port), "the room's start")
        yield scene
    finally:
        for process in scene.processes.values():
            process.terminate()
        for process in scene.processes.values():
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def _play(scene: _Scene, say: Say) -> str:
    world = digits()
    initial = world.initial(seed=2026)

    def tell(text: str) -> None:
        say(f"{time.monotonic() - scene.started:5.1f} s  {text}")

    tell(f"a room at {scene.address}; it holds no secret")
    homes = {
        name: qm.Home.create(scene.home(name), name, key_file=scene.folder / "members" / f"{name}.key")
        for name in HOSPITALS
    }
    _join(scene)
    tell(f"{', '.join(HOSPITALS)} joined, each with an agent of its own")

    cards = [(homes[name].card, count) for name, count in zip(HOSPITALS, EXAMPLES, strict=True)]
    groups = world.groups()
    terms = qm.Terms.agree("demo", THRESHOLD, cards, initial, groups=groups, **PLANNED)
    agreed = scene.folder / "agreed"
    qm.Reference.write_agreed(agreed, terms, initial, groups)
    Place(scene.home(HOSPITALS[0])).hand_over(terms.digest().hex(), agreed)
    for name in HOSPITALS:
        scene.wait(lambda name=name: press(scene.page(name), "yes"), f"the terms at {name}")  # type: ignore[misc]
    tell(f"all five agreed to the terms: {THRESHOLD} of {len(HOSPITALS)} will do")
    for name in HOSPITALS:
        done = scene.home(name) / "consortia" / terms.digest().hex()[:16] / "anchor.safetensors"
        scene.wait(done.exists, f"the key at {name}")
    tell(f"the key of {terms.coordinates:,} signs is made, over the room; nobody ever saw it")

    training = qm.Federation.of_homes(list(homes.values()), initial, world.train, world.data, evaluate=world.evaluate)
    for _ in training.rounds(ROUNDS):
        pass
    accuracy = training.reports[-1].metrics["accuracy"]
    suspect = scene.folder / "suspect.safetensors"
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in training.model.items()}, suspect)
    tell(f"they trained a marked model for {ROUNDS} rounds: accuracy {100 * accuracy:.1f} %")

    asker, answering = HOSPITALS[0], HOSPITALS[: THRESHOLD + 1]
    home = str(scene.home(asker))
    scene.start("ask", "ask", str(suspect), "--purpose", "is the model on offer ours?", "--home", home)
    if scene.processes.pop("ask").wait(timeout=_PATIENCE) != 0:
        raise RoomError(f"asking failed: {scene.said('ask')[-500:]}", code="room.answer")
    tell(f"{asker} asks: is this model ours?")
    for name in answering:
        scene.wait(lambda name=name: press(scene.page(name), "yes"), f"the query at {name}")  # type: ignore[misc]
        tell(f"{name} read what is asked, and approved")
    found = scene.home(asker) / "room"
    scene.wait(lambda: bool(list(found.glob("*/certificates/*/certificate.json"))), "the certificate")
    certificate = qm.Certificate.from_bytes(next(found.glob("*/certificates/*/certificate.json")).read_bytes())
    finding = certificate.finding
    tell(f"{finding.verdict}: z = {float(finding.z):.1f}, threshold {float(finding.threshold):.1f}; signed by all four")
    return finding.verdict


def _join(scene: _Scene) -> None:
    founder, others = HOSPITALS[0], HOSPITALS[1:]
    first = ("--found", "demo", "--invite", str(len(others)), "--home", str(scene.home(founder)))
    scene.start(founder, "join", scene.address, "--examples", str(EXAMPLES[0]), *first)
    scene.wait(lambda: scene.said(founder).count("invitation:") == len(others), "the invitations")
    codes = re.findall(r"room join '(\S+)'", scene.said(founder))
    for name, code, count in zip(others, codes, EXAMPLES[1:], strict=True):
        scene.start(name, "join", code, "--examples", str(count), "--home", str(scene.home(name)))
    for name in HOSPITALS:
        scene.wait(Place(scene.home(name)).page.exists, f"the agent of {name}")


def press(page: str, say: str) -> bool:
    """What a person does on an agent's page: reads what waits, and presses a button. False if nothing waits."""
    parts = urlsplit(page)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    try:
        connection.request("GET", parts.path)
        text = connection.getresponse().read().decode()
        about, shown = (re.search(rf'name="{name}" value="([0-9a-f]{{64}})"', text) for name in ("about", "shown"))
        if about is None or shown is None:
            return False
        form = urlencode({"about": about[1], "shown": shown[1], "say": say})
        headers = {"Origin": f"http://{parts.netloc}", "Content-Type": "application/x-www-form-urlencoded"}
        connection.request("POST", f"{parts.path}decide", form, headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status == 303
    except (OSError, http.client.HTTPException):  # the agent is away, or ended in the middle of its page
        return False
    finally:
        connection.close()
