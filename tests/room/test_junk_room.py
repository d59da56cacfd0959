"""A member who puts junk into the room: it hides nobody's word, and nobody reads or keeps it again and again."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from quorumark.room.calls import Call, call_header
from quorumark.room.desk import Matter
from quorumark.verify.heads import Head
from tests.kit.rooms import Group, Host, about, identity, put_question, room_on, until

pytest.importorskip("starlette")
pytestmark = pytest.mark.room
AVON, BIRCH, CEDAR = 0, 1, 2


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Group, Host]]:
    folder = tmp_path_factory.mktemp("junk")
    with room_on(folder / "room") as room:
        group = Group.join(folder / "members", room.address, members=3, threshold=2)
        group.start()
        group.found()
        yield group, Host(room, group)
        group.stop()


def test_junk_that_is_there_first_does_not_hide_a_call(scene: tuple[Group, Host]) -> None:
    group, _ = scene
    manifest = group.homes[AVON][0].only_consortium().manifest()
    avon = identity(group, AVON)
    call = Call("refresh", avon.ed25519, manifest.digest().hex(), "", "", (), "yearly", os.urandom(16).hex())
    name = f"call/{call.digest()}/call.msg"

    def shown(state: str) -> Matter | None:
        every = group.agent(BIRCH).desk.matters()
        return next((one for one in every if one.digest == call.digest() and one.state == state), None)

    group.client(CEDAR).upload(b"junk" * 30, name)
    until(lambda: shown("refused"), "the junk to be refused")
    group.client(AVON).upload(avon.write(call_header(call, 1), call.to_bytes()), name)
    assert until(lambda: shown("waiting"), "the call")


def test_junk_in_the_place_of_heads_is_read_once_and_not_kept(
    scene: tuple[Group, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    group, _ = scene
    sizes, honest = list[int](), Head.from_bytes

    def counted(data: bytes) -> Head:
        sizes.append(len(data))
        return honest(data)

    monkeypatch.setattr(Head, "from_bytes", staticmethod(counted))
    junk = [1_000_000 + number for number in range(3)]
    for size in junk:
        group.client(CEDAR).upload(os.urandom(size), f"query/{os.urandom(32).hex()}/answered.json")
    first = put_question(group, group.marked("one.safetensors", seed=5), answers=2)
    until(about(group, BIRCH, first.digest()), "a question")
    until(lambda: all(sizes.count(size) >= 3 for size in junk), "all agents to look at it")
    second = put_question(group, group.marked("two.safetensors", seed=6), answers=2)  # heads are compared again
    until(about(group, BIRCH, second.digest()), "another question")
    assert [sizes.count(size) for size in junk] == [3, 3, 3]  # once by each agent
    for index in (AVON, BIRCH):
        kept = (group.homes[index][0].path / "room" / group.consortium / "answers" / "others").glob("*")
        assert max((path.stat().st_size for path in kept), default=0) < 1_000_000
