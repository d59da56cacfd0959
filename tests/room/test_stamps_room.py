"""Time stamps in a room: two members stamp one manifest, a third takes what its own roots vouch for."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from quorumark.errors import InputError
from quorumark.room.stamping import put_stamps, take_stamps
from quorumark.stamps.record import Stamps, stamps_path
from quorumark.stamps.tokens import ask, read_roots
from tests.kit.authority import make_authority
from tests.kit.consortium import make_world
from tests.kit.rooms import Group, Host, identity, room_on

pytest.importorskip("starlette")
pytestmark = pytest.mark.room


def test_stamps_that_hold_under_the_readers_roots_are_taken_and_others_are_not(tmp_path: Path) -> None:
    world = make_world(tmp_path, 3, 2)
    data = world.manifest.to_bytes()
    one, two, strange = (make_authority(tmp_path / name, f"{name} stamps") for name in ("one", "two", "strange"))
    files = []
    for name in ("avon", "birch", "cedar"):
        files.append(tmp_path / f"{name}-public" / "consortium.json")
        files[-1].parent.mkdir()
        files[-1].write_bytes(data)

    def stamp(path: Path, stamps: Stamps) -> None:
        stamps_path(path, data).write_bytes(stamps.to_bytes())

    first = Stamps.of("manifest", data).with_response(0, one.answer(ask(data)))
    stamp(files[0], first)
    stamp(files[1], Stamps.of("manifest", data).with_response(0, two.answer(ask(data))))
    roots = read_roots([one.root, two.root])
    with room_on(tmp_path / "room") as room:
        group = Group.join(tmp_path / "members", room.address, members=3, threshold=2)
        host, cedar = Host(room, group), group.client(2)
        with pytest.raises(InputError, match="must have stamps beside it"):
            put_stamps(cedar, files[2])
        assert put_stamps(group.client(0), files[0]) == 1
        assert put_stamps(group.client(1), files[1]) == 1
        # the room adds: an authority that nobody trusts, a damaged file, and the stamps of something else
        start = next(name for _, name in host.names("stamps/")).rpartition("/")[0]
        other = Stamps.of("manifest", b"else").with_response(0, one.answer(ask(b"else")))
        moved = Stamps("manifest", first.sha512, other.chains)
        false = Stamps.of("manifest", data).with_response(0, strange.answer(ask(data)))
        for number, lie in enumerate((false, other, moved)):
            host.put(identity(group, 1).ed25519, f"{start}/{number}.json", lie.to_bytes())
        host.put(identity(group, 1).ed25519, f"{start}/9.json", b"{")
        shown = take_stamps(cedar, files[2], roots)
        assert {dated.authority for dated in shown} == {one.name, two.name}
        kept = Stamps.from_bytes(stamps_path(files[2], data).read_bytes())
        assert len(kept.chains) == 2
        assert len(take_stamps(cedar, files[2], roots)) == 2  # once more changes nothing
        # a renewal takes the place of what it renews
        renewed = first.with_response(0, two.answer(ask(first.message(0, data))))
        stamp(files[0], renewed)
        put_stamps(group.client(0), files[0])
        again = take_stamps(cedar, files[2], roots)
        assert len(again) == 2
        assert [dated.renewals for dated in again if dated.authority == one.name] == [(two.name,)]
        # with one root only, nothing of the other is taken
        shutil.copy(files[2], tmp_path / "consortium.json")
        stamps_path(tmp_path / "consortium.json", data).unlink(missing_ok=True)
        alone = take_stamps(cedar, tmp_path / "consortium.json", read_roots([two.root]))
        assert {dated.authority for dated in alone} == {two.name}
