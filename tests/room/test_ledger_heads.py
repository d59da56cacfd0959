"""Ledgers compared before an answer: a member with two pasts, a home that was set back, a room that withholds, replays
and shows members different heads. No answer leaves; each control takes the check away, and it does."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from quorumark.checks import field_names
from quorumark.errors import RoomError
from quorumark.room import heads
from quorumark.room.desk import Matter
from quorumark.room.heads import accept_ledger
from quorumark.verify.evidence import Query
from quorumark.verify.heads import Head
from tests.kit.rooms import Group, Host, about, answered, identity, put_question, room_on, until

pytest.importorskip("starlette")
pytestmark = pytest.mark.room
AVON, BIRCH, CEDAR = 0, 1, 2
OTHER = "ab" * 32
Lie = Callable[[Head, Head], dict[str, object]]


class Scene:
    """Three members, of whom all have answered one query; agents are not running."""

    def __init__(self, group: Group, host: Host) -> None:
        self.group, self.host = group, host
        self._numbers = itertools.count(100)
        self.true: list[tuple[str, str, bytes]] = []  # what lies took the place of
        self.before = self.ask()
        self.group.start()
        for index in (AVON, BIRCH, CEDAR):
            self.say(index, self.before)
        for index in (AVON, BIRCH, CEDAR):
            self.until(index, self.before, "done")
        # once more: now everybody has seen ledgers with a line in them
        shown = self.ask()
        for index in (AVON, BIRCH, CEDAR):
            self.until(index, shown, "waiting")
            self.seen(index)
        group.stop()

    def seen(self, index: int) -> None:
        """Until a member remembers the others' ledgers with their lines."""
        folder = self.group.homes[index][0].path / "room" / self.group.consortium / "heads"

        def look() -> bool:
            kept = [Head.from_bytes(path.read_bytes()) for path in folder.glob("*/*.json")]
            return len(kept) == 2 and all(one.lines for one in kept)

        until(look, "the others' heads")

    def memories(self) -> list[Path]:
        return [path for home, _ in self.group.homes for path in home.path.glob("room/*/heads/*/*.json")]

    def remembered(self, index: int, other: int) -> Head:
        """What a member knows of another's ledger."""
        folder = self.group.homes[index][0].path / "room" / self.group.consortium / "heads"
        (path,) = folder.glob(f"*/{identity(self.group, other).ed25519}.json")
        return Head.from_bytes(path.read_bytes())

    def ask(self, index: int = AVON) -> Query:
        number = next(self._numbers)
        suspect = self.group.marked(f"{number}.safetensors", seed=number)
        return put_question(self.group, suspect, index=index)

    def head(self, query: Query) -> str:
        return f"query/{query.digest()}/head.json"

    def partial(self, index: int, query: Query) -> bool:
        name = f"query/{query.digest()}/partial.json"
        return (identity(self.group, index).ed25519, name) in self.host.names("query/")

    def matter(self, index: int, query: Query) -> Matter:
        found: Matter = until(about(self.group, index, query.digest()), "the query")
        return found

    def say(self, index: int, query: Query) -> None:
        matter = self.until(index, query, "waiting")
        self.group.agent(index).desk.decide(matter.digest, matter.shown, "yes", "person")

    def until(self, index: int, query: Query, state: str) -> Matter:
        found: Matter = until(lambda: (m := self.matter(index, query)).state == state and m, f"{state} at {index}")
        return found

    def last(self, index: int, query: Query) -> Head:
        return Head.from_bytes(self.host.read(identity(self.group, index).ed25519, self.head(query)))

    def put(self, index: int, query: Query, head: Head, **changes: object) -> None:
        """Another head in a member's name, signed by it: the member itself lies, or is somewhere else as well."""
        key = identity(self.group, index).ed25519
        self.true.append((key, self.head(query), self.host.read(key, self.head(query))))
        values = {name: getattr(head, name) for name in field_names(Head) if name != "signature"}
        signed = Head.sign(identity(self.group, index), **{**values, **changes})
        self.host.put(key, self.head(query), signed.to_bytes())


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("heads")
    with room_on(folder / "room") as room:
        group = Group.join(folder / "members", room.address, members=3, threshold=2)
        group.start()
        group.found()
        group.stop()
        yield Scene(group, Host(room, group))
        group.stop()


@pytest.fixture(autouse=True)
def _still(scene: Scene) -> Iterator[None]:
    """Agents that a test started end with it. Where somebody lied, the room and what members remember are as before."""
    before = {path: path.read_bytes() for path in scene.memories()}
    yield
    scene.group.stop()
    if scene.true:
        for path in scene.memories():
            path.unlink()
        for path, data in before.items():
            path.write_bytes(data)
    while scene.true:
        scene.host.put(*scene.true.pop())


def _fork(head: Head, _: Head) -> dict[str, object]:
    return {"lines": (*head.lines[:-1], OTHER)}


def _rollback(head: Head, _: Head) -> dict[str, object]:
    return {"lines": head.lines[:-1]}


def _twice(head: Head, known: Head) -> dict[str, object]:
    """It forgot the queries since then, and counts its heads anew."""
    return {"said": (*known.said[:-1], head.occasion)}


@pytest.mark.parametrize("lie", [_fork, _rollback, _twice])
def test_a_ledger_with_another_past_stops_the_answer(
    scene: Scene, lie: Callable[[Head, Head], dict[str, object]]
) -> None:
    query = scene.ask()
    head = scene.last(AVON, query)
    scene.put(AVON, query, head, **lie(head, scene.remembered(CEDAR, AVON)))
    scene.group.start(CEDAR)
    matter = scene.until(CEDAR, query, "refused")
    assert matter.code == "room.ledger-head"
    assert "Avon" in matter.status
    with pytest.raises(RoomError):
        scene.group.agent(CEDAR).desk.decide(matter.digest, matter.shown, "yes", "person")
    assert not scene.partial(CEDAR, query)


def test_without_the_comparison_the_same_head_lets_the_answer_out(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = scene.ask()
    head = scene.last(AVON, query)
    scene.put(AVON, query, head, **_fork(head, head))
    monkeypatch.setattr(heads, "contradiction", lambda *_: "")
    scene.group.start(CEDAR)
    scene.say(CEDAR, query)
    until(lambda: scene.partial(CEDAR, query), "Cedar's answer")


def test_a_room_that_shows_members_different_ledgers_is_noticed(scene: Scene) -> None:
    """Birch was shown another ledger of Avon than Cedar was: what each saw is in its own head."""
    query = scene.ask()
    scene.group.start(BIRCH)
    until(lambda: (identity(scene.group, BIRCH).ed25519, scene.head(query)) in scene.host.names("query/"), "Birch's")
    scene.group.stop()
    avon, head = identity(scene.group, AVON).ed25519, scene.last(BIRCH, query)
    scene.put(BIRCH, query, head, seen={**head.seen, avon: replace(head.seen[avon], last=OTHER)})
    scene.group.start(CEDAR)
    matter = scene.until(CEDAR, query, "refused")
    assert matter.code == "room.ledger-head"
    assert "Birch saw another state of the ledger of Avon" in matter.status
    assert not scene.partial(CEDAR, query)


def test_heads_that_are_withheld_or_replayed_are_waited_for(scene: Scene) -> None:
    query, avon = scene.ask(), identity(scene.group, AVON).ed25519
    right, earlier = scene.last(AVON, query), scene.host.read(avon, scene.head(scene.before))
    scene.host.withhold(avon, scene.head(query))
    scene.group.start(CEDAR)
    scene.say(CEDAR, query)
    until(lambda: "your answer waits until the ledgers of 1 others" in scene.matter(CEDAR, query).status, "it waits")
    scene.host.put(avon, scene.head(query), earlier)  # Avon's own, for another query
    until(lambda: any("head of Avon" in text for text in scene.group.agent(CEDAR).desk.troubles.values()), "refused")
    assert not scene.partial(CEDAR, query)
    scene.host.put(avon, scene.head(query), right.to_bytes())
    until(lambda: scene.partial(CEDAR, query), "Cedar's answer")


def test_heads_of_two_queries_may_come_in_any_order(scene: Scene) -> None:
    one, two = scene.ask(), scene.ask()
    scene.host.reverse()
    scene.group.start(CEDAR)
    for query in (two, one):
        scene.say(CEDAR, query)
        until(lambda query=query: scene.partial(CEDAR, query), "Cedar's answer")  # type: ignore[misc]


def test_what_the_guard_refuses_is_not_put_before_a_person(scene: Scene, tmp_path: Path) -> None:
    """A copy of an answered model with a few weights changed would read off signs of the key."""
    number = next(scene._numbers)
    suspect = scene.group.marked(f"{number}.safetensors", seed=number)
    query = put_question(scene.group, suspect)
    scene.group.start(CEDAR)
    scene.say(CEDAR, query)
    until(lambda: scene.partial(CEDAR, query), "Cedar's answer")
    nearly = suspect.read_bytes()[:-12] + 3 * b"\x00\x00\x80?"  # its last three weights are 1
    (tmp_path / "nearly.safetensors").write_bytes(nearly)
    other = put_question(scene.group, tmp_path / "nearly.safetensors")
    matter = scene.until(CEDAR, other, "refused")
    assert matter.code == "guard.adds-little"
    assert dict(matter.facts)["query"] == other.digest()
    with pytest.raises(RoomError):
        scene.group.agent(CEDAR).desk.decide(matter.digest, matter.shown, "yes", "person")


def test_a_home_that_was_set_back_is_noticed_and_people_can_mend_it(scene: Scene) -> None:
    """Cedar's disk of yesterday: its own agent notices by what the room has, and where the room hides that, the others
    do. After a phone call all accept the ledger, and the next query is answered."""
    group, host, home = scene.group, scene.host, scene.group.homes[CEDAR][0].path
    shutil.copytree(home, group.folder / "yesterday")
    query = scene.ask()
    group.start()
    for index in (AVON, BIRCH, CEDAR):
        scene.say(index, query)
    for index in (AVON, BIRCH, CEDAR):
        scene.until(index, query, "done")
    group.stop()
    before = len(answered(group, CEDAR))
    cedar = identity(group, CEDAR).ed25519
    shutil.rmtree(home)
    shutil.copytree(group.folder / "yesterday", home)
    assert len(answered(group, CEDAR)) == before - 1
    again = scene.ask()
    group.start(CEDAR)
    until(lambda: "set back" in group.agent(CEDAR).desk.troubles.get("agent", ""), "Cedar notices by its own words")
    for _, name in host.names("standing/"):
        host.withhold(cedar, name)  # the room hides those: its heads tell as well
    group.stop()
    group.start(CEDAR)
    assert scene.until(CEDAR, again, "refused").code == "room.set-back"
    assert not scene.partial(CEDAR, again)
    group.stop()
    # the room hides from Cedar what it sent, and Cedar says its head once more: with fewer lines
    host.withhold(cedar, scene.head(query))
    host.withhold(cedar, f"query/{query.digest()}/answered.json")
    host.withhold(cedar, f"query/{query.digest()}/partial.json")
    group.start()
    for index in (AVON, BIRCH):
        matter = scene.until(index, again, "refused")
        assert matter.code == "room.ledger-head"
        assert "Cedar" in matter.status
    until(lambda: any(m.code == "room.ledger-head" for m in group.agent(CEDAR).desk.matters()), "Cedar hears of it")
    assert not any(scene.partial(index, again) for index in (AVON, BIRCH, CEDAR))
    group.stop()
    for index in (AVON, BIRCH):
        member, _ = group.homes[index]
        with pytest.raises(RoomError):
            accept_ledger(group.client(index), member, identity(group, index), "Cedar", "ff" * 8)
        said = accept_ledger(group.client(index), member, identity(group, index), "Cedar", again.digest()[:16])
        assert "Cedar" in said
    later = scene.ask()
    group.start()
    for index in (AVON, BIRCH, CEDAR):
        scene.say(index, later)
    for index in (AVON, BIRCH, CEDAR):
        scene.until(index, later, "done")
