"""A room on loopback as a process of its own, and agents in this process or in theirs."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import numpy as np

from quorumark.consortium.home import HomeFolder
from quorumark.consortium.identity import Identity
from quorumark.consortium.keystore import Unlock
from quorumark.consortium.records import Manifest, Member, Terms, anchor_of
from quorumark.files import write_shared
from quorumark.model.layout import ModelLayout, write_safetensors
from quorumark.research.known import KnownKey
from quorumark.room.agent import Agent
from quorumark.room.asking import ask
from quorumark.room.client import Client
from quorumark.room.desk import Matter
from quorumark.room.founding import propose
from quorumark.room.place import Place, Policy, Settings
from quorumark.verify.evidence import Query
from quorumark.verify.ledger import Ledger
from quorumark.verify.reference import Reference
from tests.kit.consortium import NAMES, Tensors, anchor_model, trained_from

PATIENCE = 60.0  # seconds; all that is waited for takes a few, on a machine that does other things as well


def until(true: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    """Waits for something that must come."""
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, f"waited in vain: {what}"
        time.sleep(0.05)
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@dataclass
class RoomProcess:
    """`quorumark room serve` on loopback."""

    folder: Path
    port: int = 0
    arguments: Sequence[str] = ("--anyone-may-found",)
    process: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.port = self.port or free_port()
        command = [sys.executable, "-c", "from quorumark.cli import main; main()", "room", "serve"]
        command += ["--data", str(self.folder / "data"), "--address", self.address, "--port", str(self.port)]
        with (self.folder / "room.log").open("a") as log:
            self.process = subprocess.Popen([*command, *self.arguments], stdout=log, stderr=log, text=True)
        until(self._answers, "the room answers")

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "room.log").read_text()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None


@contextlib.contextmanager
def room_on(folder: Path, *arguments: str) -> Iterator[RoomProcess]:
    folder.mkdir(parents=True, exist_ok=True)
    room = RoomProcess(folder, arguments=arguments or ("--anyone-may-found",))
    room.start()
    try:
        yield room
    finally:
        room.kill()


def make_home(folder: Path, name: str) -> tuple[HomeFolder, Unlock]:
    Unlock.new_key_file(folder / f"{name}.key")
    unlock = Unlock.key_file(folder / f"{name}.key")
    home = HomeFolder.create(folder / name, name, unlock)
    home.remember_key_file(folder / f"{name}.key")
    return home, unlock


@dataclass
class Group:
    """Members with homes, in one room."""

    folder: Path
    address: str
    homes: list[tuple[HomeFolder, Unlock]]
    consortium: str
    agents: list[Agent] = field(default_factory=list)
    threshold: int = 3
    anchor: Tensors = field(default_factory=anchor_model)

    @classmethod
    def join(cls, folder: Path, address: str, members: int = 5, threshold: int = 3) -> Group:
        """A founder and the others, who joined by invitations."""
        folder.mkdir(parents=True, exist_ok=True)
        homes = [make_home(folder, name) for name in NAMES[:members]]
        founder = Client(address, homes[0][0].identity(homes[0][1]))
        consortium = founder.create_consortium("hospitals")
        codes = founder.post("invite", count=members)["invitations"] if members > 1 else []
        for (home, unlock), text in zip(homes[1:], codes, strict=False):
            Client(address, home.identity(unlock), consortium).join(urlsplit(text).fragment)
        for point, (home, _) in enumerate(homes, 1):
            Place(home.path).remember(Settings(address, consortium, 100 * point))
        return cls(folder, address, homes, consortium, threshold=threshold)

    def client(self, index: int) -> Client:
        home, unlock = self.homes[index]
        return Client(self.address, home.identity(unlock), self.consortium)

    def terms(self, **changes: Any) -> Terms:
        """Terms for all members, with the files beside them in `agreed`."""
        anchor = self.anchor
        layout = ModelLayout.of(anchor)
        cards = [home.card() for home, _ in self.homes]
        roster = tuple(Member(x, c.name, c.ed25519, c.x25519, 100 * x) for x, c in enumerate(cards, 1))
        values: dict[str, Any] = {"roster": roster, "created": "2026-01-31T12:00:00Z", "leaf": 64, **changes}
        values |= {"layout": layout.digest(), "coordinates": layout.coordinates, "anchor": anchor_of(layout, anchor)}
        terms = Terms(name="hospitals", threshold=self.threshold, **values)
        out = self.folder / "agreed"
        write_shared(out / "layout.json", layout.to_bytes())
        write_safetensors(anchor, out / "anchor.safetensors")
        write_shared(out / "terms.json", terms.to_bytes())
        return terms

    def propose(self, index: int = 0) -> str:
        home, unlock = self.homes[index]
        return propose(self.client(index), home.identity(unlock), self.folder / "agreed")

    def start(self, *indices: int, policy: Policy | None = None) -> None:
        for index in indices or range(len(self.homes)):
            agent = Agent(*self.homes[index], policy)
            agent.start()
            self.agents.append(agent)

    def stop(self) -> None:
        for agent in self.agents:
            agent.stopped.set()
        for agent in self.agents:
            agent.stop()
        self.agents = []

    def agent(self, index: int) -> Agent:
        card = self.homes[index][0].card()
        return next(agent for agent in self.agents if agent.identity.ed25519 == card.ed25519)

    def matter(self, index: int, kind: str, state: str = "waiting") -> Matter:
        """What waits for a member, or is in another state."""
        desk = self.agent(index).desk

        def look() -> Matter | None:
            return next((one for one in desk.matters() if one.kind == kind and one.state == state), None)

        found: Matter = until(
            look, f"{kind} {state} at {NAMES[index]}: {[(m.state, m.status) for m in desk.matters()]}"
        )
        return found

    def decide(self, index: int, kind: str, said: str = "yes") -> Matter:
        matter = self.matter(index, kind)
        self.agent(index).desk.decide(matter.digest, matter.shown, said, "person")
        return matter

    def found(self, **changes: Any) -> Manifest:
        """The whole founding: terms, everybody agrees, the key is made."""
        self.terms(**changes)
        self.propose()
        for index in range(len(self.homes)):
            self.decide(index, "terms")
        for index in range(len(self.homes)):
            self.matter(index, "terms", "done")
        return self.homes[0][0].only_consortium().manifest()

    def known(self) -> tuple[KnownKey, Reference]:
        """The whole key, as only a test can have it."""
        ours = self.homes[0][0].only_consortium()
        manifest, reference = ours.manifest(), Reference.read(ours.manifest_path)
        point = {member.ed25519: member.point for member in manifest.terms.roster}
        shares = {
            point[h.card().ed25519]: h.only_consortium().share(u).vector()[: manifest.terms.coordinates]
            for h, u in self.homes
            if h.card().ed25519 in point
        }
        return KnownKey.from_shares(manifest, shares, reference.layout, reference.anchor), reference

    def marked(self, name: str = "suspect.safetensors", rho: float = 0.25, seed: int = 1) -> Path:
        """A model that carries the mark."""
        path = self.folder / name
        write_safetensors(self.marked_model(rho, seed), path)
        return path

    def marked_model(self, rho: float = 0.25, seed: int = 1) -> Tensors:
        known, reference = self.known()
        model = trained_from(self.anchor, seed=seed)
        for spec, place in reference.layout.spans("carrier"):
            moved = float((model[spec.name] - self.anchor[spec.name]).std())
            mark = (rho * moved * known.key[place]).reshape(spec.shape)
            model[spec.name] = (model[spec.name] + mark).astype(np.float32)
        return model


class Host:
    """The host of the room, who can change everything there."""

    def __init__(self, room: RoomProcess, group: Group) -> None:
        consortium = group.consortium
        self._group, self.folder = group, room.folder
        self._files = room.folder / "data" / "files" / consortium
        self._path, self._consortium = room.folder / "data" / "room.db", consortium
        self._last = 0

    def _do(self, statement: str, *values: Any) -> list[Any]:
        database = sqlite3.connect(self._path, timeout=30)
        with database:
            found = database.execute(statement, values).fetchall()
        database.close()
        return found

    def read(self, author: str, name: str) -> bytes:
        ((sha256,),) = self._do("SELECT sha256 FROM entries WHERE author = ? AND name = ?", author, name)
        return (self._files / str(sha256)).read_bytes()

    def put(self, author: str, name: str, data: bytes) -> None:
        """In anybody's name, with a later number, so that all hear of it."""
        sha256 = hashlib.sha256(data).hexdigest()
        if not (self._files / sha256).exists():  # somebody may be reading it
            (self._files / sha256).write_bytes(data)
        self._do("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?)", self._consortium, sha256, len(data), author)
        self.withhold(author, name)
        statement = "INSERT INTO entries SELECT ?1, MAX(MAX(number), ?2) + 1, ?3, ?4, ?5, ?6, 0, 0 FROM entries "
        statement += "WHERE consortium = ?1 RETURNING number"
        values = (self._consortium, self._last, author, name, sha256, len(data))
        ((self._last,),) = self._do(statement, *values)
        poke = f"note/{os.urandom(4).hex()}"
        self._group.client(0).upload(os.urandom(8), poke)  # whoever listens hears of it at once

    def withhold(self, author: str, name: str) -> None:
        self._do("DELETE FROM entries WHERE author = ? AND name = ?", author, name)

    def names(self, start: str) -> list[tuple[str, str]]:
        return self._do("SELECT author, name FROM entries WHERE name LIKE ? ORDER BY number", start + "%")

    def reverse(self) -> None:
        """All entries in another order."""
        ((last,),) = self._do("SELECT MAX(number) FROM entries WHERE consortium = ?", self._consortium)
        self._do("UPDATE entries SET number = -number WHERE consortium = ?", self._consortium)
        self._do("UPDATE entries SET number = ? + number WHERE consortium = ?", last + 1, self._consortium)


def identity(group: Group, index: int) -> Identity:
    home, unlock = group.homes[index]
    return home.identity(unlock)


def put_question(group: Group, suspect: Path, purpose: str = "a reseller", index: int = 0, answers: int = 2) -> Query:
    home, _ = group.homes[index]
    return ask(group.client(index), home, identity(group, index), suspect, purpose, answers=answers)


def about(group: Group, index: int, query: str) -> Callable[[], Matter | None]:
    """The matter of a query at a member, once its agent has looked at it."""

    def look() -> Matter | None:
        for one in group.agent(index).desk.matters():
            if one.state != "checking" and (query[:12] in one.title or dict(one.facts).get("query") == query):
                return one
        return None

    return look


def answered(group: Group, index: int) -> set[str]:
    ours = group.homes[index][0].only_consortium()
    return Ledger.open(ours, ours.manifest()).answered()


def visit(address: str, method: str = "GET", form: Any = None, **headers: str) -> tuple[int, dict[str, str], str]:
    """One request, as a browser or something worse would make it: status, headers, text. No redirects."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    body = None if form is None else urlencode(form)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    if form is not None:
        sent.setdefault("content-type", "application/x-www-form-urlencoded")
    connection.putrequest(method, parts.path + (f"?{parts.query}" if parts.query else ""), skip_host="host" in sent)
    for name, value in sent.items():
        connection.putheader(name, value)
    if body is not None:
        connection.putheader("content-length", str(len(body)))
    connection.endheaders(None if body is None else body.encode())
    answer = connection.getresponse()
    text = answer.read().decode("utf-8", "replace")
    found = {name.lower(): value for name, value in answer.getheaders()}
    connection.close()
    return answer.status, found, text
