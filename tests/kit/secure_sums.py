"""A network of members who sum vectors in one process."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from quorumark import field
from quorumark.field import P, Vector
from quorumark.round.group import Group
from quorumark.round.memory import MemoryState, State
from quorumark.round.secagg import masks, messages
from quorumark.round.secagg import member as member_side
from quorumark.round.secagg import server as server_side
from quorumark.round.secagg.member import SecAggMember
from quorumark.round.secagg.messages import Upload
from quorumark.round.secagg.server import SecAggServer
from tests.kit.ceremony import identities

BINDING = hashlib.sha256(b"the model that all start from").digest()
OTHER = hashlib.sha256(b"another model").digest()
LENGTH = 40
PEOPLE = sorted(identities(12), key=lambda person: person.ed25519)


def make_group(count: int, threshold: int, **changes: Any) -> Group:
    return Group.of_cards([person.card() for person in PEOPLE[:count]], threshold, **changes)


class Net:
    """Members and a server in one process. Vectors are kept, to compare sums with."""

    def __init__(self, count: int, threshold: int, length: int = LENGTH, **changes: Any) -> None:
        self.group = make_group(count, threshold, **changes)
        self.length = length
        self.states: dict[int, State] = {x: MemoryState(self.group) for x in range(1, count + 1)}
        self.members = {x: self.member(x) for x in self.states}
        self.vectors: dict[int, Vector] = {}
        self.uploads: dict[int, dict[int, Upload]] = {}
        self.requests: dict[int, bytes] = {}
        self.server = self.serve(1)

    def member(self, point: int) -> SecAggMember:
        return SecAggMember(PEOPLE[point - 1], self.group, self.states[point])

    def serve(self, round_no: int, purpose: str = "model") -> SecAggServer:
        return SecAggServer(self.group, round_no, BINDING, self.length, purpose)

    def announce(self, who: Iterable[int] | None = None, server: SecAggServer | None = None) -> bytes:
        server = server or self.server
        for x in who or self.members:
            ready = self.members[x].ready(server.plan.round, BINDING, self.length, server.plan.purpose)
            server.take_ready(x, ready)
        return server.announce()

    def upload(self, announcement: bytes, who: Iterable[int], server: SecAggServer | None = None) -> None:
        server = server or self.server
        for x in who:
            plan = self.members[x].plan(announcement)
            self.vectors[x] = field.random(self.length)
            upload = self.members[x].upload(plan, self.vectors[x].copy())
            self.uploads.setdefault(plan.attempt, {})[x] = upload
            server.take_upload(x, Upload.from_bytes(upload.to_bytes()))

    def answer(self, who: Iterable[int], server: SecAggServer | None = None) -> None:
        server = server or self.server
        for x in who:
            self.requests[x] = server.request(x)
            server.take_answer(x, self.members[x].unmask(self.requests[x]))

    def until_uploaded(self) -> Net:
        self.upload(self.announce(), self.members)
        return self

    def expected(self, who: Iterable[int]) -> Vector:
        """The sum in Python's integers."""
        rows = [[int(v) for v in self.vectors[x]] for x in who]
        return np.array([sum(column) % P for column in zip(*rows, strict=True)], np.uint64)


def announcement(net: Net, attempt: int, who: Iterable[int], round_no: int = 1) -> bytes:
    """One that the server's own rules would not make."""
    chosen = sorted(who)
    about = {"round": round_no, "purpose": "model", "attempt": attempt, "members": chosen}
    return messages.say("announcement", about, [net.server._readies[x][0] for x in chosen])


def request(attempt: int, uploads: dict[int, Upload], point: int, round_no: int = 1) -> bytes:
    """One for any uploads."""
    parts: list[bytes] = []
    for x in sorted(uploads):
        head = uploads[x].head
        stop = 4 + int.from_bytes(head[:4], "big")
        start = stop + masks.BOX * sorted(uploads).index(point)
        parts += head[4:stop], head[start : start + masks.BOX]
    return messages.say("request", {"round": round_no, "purpose": "model", "attempt": attempt}, parts)


class NoStream:
    def __init__(self, *_: object) -> None: ...

    def add_to(self, *_: object, **__: object) -> None: ...


def without_self_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    for side in (member_side, server_side):
        monkeypatch.setattr(side, "self_mask", NoStream)
