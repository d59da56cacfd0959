"""What the room's pages serve as the consortium's is not for one member to choose."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from quorumark.canonical import canonical, digest
from quorumark.consortium.identity import Identity
from quorumark.errors import RoomError
from quorumark.room import board as board_module
from quorumark.room import store as store_module
from quorumark.room.board import Board
from quorumark.room.store import Store

NOW = 1_767_225_600
PEOPLE = [Identity.generate(name) for name in ("Avon", "Birch", "Mallory")]
AVON, BIRCH, MALLORY = (one.ed25519 for one in PEOPLE)
Q = "cd" * 32


class Shelf:
    """A room with three members, who put things there."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder)
        self.consortium = self.store.create_consortium(AVON, PEOPLE[0].card().to_bytes(), "hospitals", NOW)
        codes = self.store.invite(self.consortium, AVON, 2, NOW)
        for one, code in zip(PEOPLE[1:], codes, strict=True):
            self.store.join(self.consortium, one.ed25519, one.card().to_bytes(), code, NOW)

    def put(self, author: str, name: str, data: bytes) -> str:
        sha256 = hashlib.sha256(data).hexdigest()
        part = self.store.begin_part(self.consortium, author, sha256, len(data), 0, NOW)
        if part is not None:
            assert self.store.write_part(part, sha256, len(data), 0, data)
            self.store.finish(self.consortium, author, sha256, len(data))
        self.store.add_entry(self.consortium, author, name, sha256, NOW)
        return sha256

    @property
    def board(self) -> Board:
        return Board(self.store, self.consortium)


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "room")


def terms_of(*people: Identity, layout: bytes = b"layout", threshold: int = 2) -> dict[str, Any]:
    keys = [{"name": one.name, "ed25519": one.ed25519, "x25519": one.x25519} for one in people]
    roster = [{"point": point, **one} for point, one in enumerate(keys, 1)]
    return {"name": "x", "threshold": threshold, "roster": roster, "layout": hashlib.sha256(layout).hexdigest()}


def written(terms: dict[str, Any]) -> tuple[str, bytes]:
    data = canonical({"format": "quorumark-terms/v1", **terms})
    return digest("terms", data).hex(), data


def manifest_of(
    terms: dict[str, Any], of: str, before: str | None = None, epoch: int = 0, *, signed: bool = True
) -> tuple[str, bytes]:
    """The name and the bytes of a manifest, as far as a room looks at it."""
    body = {"format": "quorumark-manifest/v1", "terms": terms, "genesis": {"terms": of}, "epoch": epoch}
    body["predecessor"] = before
    about = digest("manifest", canonical(body))
    people = {one.ed25519: one for one in PEOPLE}
    signatures = {
        str(one["point"]): people[one["ed25519"]].sign("manifest", about).hex() for one in terms["roster"] if signed
    }
    return f"manifest/{about.hex()}.json", canonical({**body, "signatures": signatures})


def test_the_manifest_is_one_that_all_of_its_members_uploaded(shelf: Shelf) -> None:
    terms = terms_of(*PEOPLE)
    about, data = written(terms)
    name, right = manifest_of(terms, about)
    shelf.put(AVON, f"proposal/{about}/terms.json", data)
    shelf.put(MALLORY, "manifest/alone.json", canonical({"terms": terms_of(PEOPLE[2]), "epoch": 7}))
    for author in (AVON, BIRCH):
        shelf.put(author, name, right)
        assert shelf.board.manifest is None  # not all yet
    shelf.put(MALLORY, name, right)
    before = name.split("/")[1].removesuffix(".json")
    for other, false in (
        manifest_of(terms, about, before, epoch=1),  # all members' roster, by one of them
        manifest_of(terms_of(PEOPLE[2]), about, before, epoch=1),  # a consortium of its own
        manifest_of({"roster": []}, about),
        ("manifest/x.json", b"{"),
    ):
        shelf.put(MALLORY, other, false)
    assert shelf.board.manifest is not None
    assert shelf.board.manifest.sha256 == hashlib.sha256(right).hexdigest()
    assert shelf.board.in_force is not None
    assert shelf.board.in_force.digest == about


def signed_by_all(shelf: Shelf) -> tuple[dict[str, Any], str, str]:
    """Terms that are proposed, their digest, and the name of the manifest that all three uploaded."""
    terms = terms_of(*PEOPLE)
    about, data = written(terms)
    shelf.put(AVON, f"proposal/{about}/terms.json", data)
    first, body = manifest_of(terms, about)
    for author in (AVON, BIRCH, MALLORY):
        shelf.put(author, first, body)
    return terms, about, first


def test_a_query_has_the_manifest_and_the_members_of_its_time(shelf: Shelf) -> None:
    """Also once Mallory has left; a manifest that not all of its members uploaded is nobody's."""
    terms, about, first = signed_by_all(shelf)
    before = first.split("/")[1].removesuffix(".json")
    later, body = manifest_of(terms_of(*PEOPLE[:2]), about, before, epoch=1)
    for author in (AVON, BIRCH):
        shelf.put(author, later, body)
    alone, body = manifest_of(terms, about, before, epoch=1)
    shelf.put(MALLORY, alone, body)
    asked = {"01" * 32: first, "02" * 32: later, "03" * 32: alone}
    for query, name in asked.items():
        named = name.split("/")[1].removesuffix(".json")
        shelf.put(AVON, f"query/{query}/query.json", canonical({"files": [], "manifest": named}))
        shelf.put(AVON, f"query/{query}/ask.msg", b"x" + query.encode())
    board = shelf.board
    chains = [[entry.name for entry in board.chain_of(board.question(query))] for query in asked]
    assert chains == [[first], [first, later], []]
    found = [board.terms_of(board.question(query)) for query in asked]
    names = [one.members for one in found if one is not None]
    assert names == [("Avon", "Birch", "Mallory"), ("Avon", "Birch"), ("Avon", "Birch")]


def test_a_successor_counts_once_all_of_its_own_members_uploaded_it(shelf: Shelf, tmp_path: Path) -> None:
    """Mallory leaves: the smaller consortium that follows is in force, whatever larger one was before."""
    terms = terms_of(*PEOPLE)
    about, data = written(terms)
    shelf.put(AVON, f"proposal/{about}/terms.json", data)
    first, body = manifest_of(terms, about)
    for author in (AVON, BIRCH, MALLORY):
        shelf.put(author, first, body)
    later, body = manifest_of(terms_of(*PEOPLE[:2]), about, first.split("/")[1].removesuffix(".json"), epoch=1)
    shelf.put(AVON, later, body)
    assert shelf.board.manifest is not None
    assert shelf.board.manifest.name == first
    shelf.put(BIRCH, later, body)
    board = shelf.board
    assert board.manifest is not None
    assert board.manifest.name == later
    assert board.in_force is not None
    assert (board.in_force.members, board.in_force.epoch) == (("Avon", "Birch"), 1)
    misnamed = Shelf(tmp_path / "other")
    for author in (AVON, BIRCH, MALLORY):
        misnamed.put(author, later, manifest_of(terms, about)[1])
    assert misnamed.board.manifest is None


def test_a_few_members_cannot_put_a_manifest_of_theirs_in_the_place_of_the_right_one(shelf: Shelf) -> None:
    """Neither one that nobody signed, nor one that keeps fewer than t, or fewer than more than half."""
    _, about, first = signed_by_all(shelf)
    before = first.split("/")[1].removesuffix(".json")
    alone = terms_of(PEOPLE[1], PEOPLE[2], threshold=1)
    for false in (
        manifest_of(alone, about, before, epoch=2, signed=False),
        manifest_of(terms_of(PEOPLE[2], PEOPLE[2], threshold=1), about, before, epoch=1),
    ):
        for author in (BIRCH, MALLORY):
            shelf.put(author, *false)
    board = shelf.board
    assert board.manifest is not None
    assert board.in_force is not None
    assert (board.manifest.name, board.in_force.threshold) == (first, 2)
    right = manifest_of(alone, about, before, epoch=1)  # the control: two of three may go on without the third
    for author in (BIRCH, MALLORY):
        shelf.put(author, *right)
    assert shelf.board.manifest.name == right[0]  # type: ignore[union-attr]


def test_what_is_kept_of_files_has_a_limit_in_bytes(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = board_module._Kept(3000)
    monkeypatch.setattr(board_module, "_SMALL", kept)
    for number in range(10):
        about, data = written(terms_of(*PEOPLE, threshold=number))
        shelf.put(MALLORY, f"proposal/{about}/terms.json", data)
    assert len(shelf.board.proposals) == 10
    assert 1000 < kept.size <= 3000
    assert len(shelf.board.proposals) == 10  # what was let go is read again


def test_no_member_uses_up_the_entries_of_the_others(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_MOST_ENTRIES", 30)
    for number in range(10):
        shelf.put(MALLORY, f"junk/{number}.json", b"{}")
    with pytest.raises(RoomError) as caught:
        shelf.put(MALLORY, "junk/10.json", b"{}")
    assert caught.value.code == "room.quota"
    for author in (AVON, BIRCH):
        for number in range(10):
            shelf.put(author, f"query/{number}.json", b"{}")


def test_files_beside_the_terms_are_of_whoever_brought_the_terms(shelf: Shelf) -> None:
    terms = terms_of(*PEOPLE[:2])
    about, data = written(terms)
    shelf.put(MALLORY, f"proposal/{about}/terms.json", data.replace(b'"threshold":2', b'"threshold":1'))
    shelf.put(AVON, f"proposal/{about}/terms.json", data)
    kept = {name: shelf.put(AVON, f"proposal/{about}/{name}", name[:6].encode()) for name in ("layout.json",)}
    kept["anchor.safetensors"] = shelf.put(AVON, f"proposal/{about}/anchor.safetensors", b"anchor")
    other, others = written(terms_of(*PEOPLE, threshold=3))
    for start, body in ((about, b"false"), (other, b"false")):
        for name in ("layout.json", "anchor.safetensors"):
            shelf.put(MALLORY, f"proposal/{start}/{name}", body)
    shelf.put(MALLORY, f"proposal/{other}/terms.json", others)
    shelf.put(MALLORY, f"manifest/{other}.json", b"{}")
    for author in (AVON, BIRCH):
        shelf.put(author, *manifest_of(terms, about))
    board = shelf.board
    assert board.in_force is not None
    assert (board.in_force.threshold, board.in_force.members) == (2, ("Avon", "Birch"))
    assert {name: sha for name, sha in board.files.items() if name != "terms.json"} == kept
    assert board.in_force.state == "in force"


def test_who_asks_is_who_said_so(shelf: Shelf) -> None:
    shelf.put(MALLORY, f"query/{Q}/query.json", canonical({"files": [{"name": "mine"}]}))
    shelf.put(MALLORY, f"query/{Q}/report.html", b"a false report")
    assert not shelf.board.questions
    shelf.put(AVON, f"query/{Q}/query.json", canonical({"files": [{"name": "suspect"}]}))
    word = canonical({"purpose": "a reseller", "answers": 2})
    shelf.put(AVON, f"query/{Q}/ask.msg", (2).to_bytes(4, "big") + b"{}" + bytes(64) + word)
    report = shelf.put(AVON, f"query/{Q}/report.html", b"a report")
    (one,) = shelf.board.questions
    assert (one.asker, one.purpose, one.files) == ("Avon", "a reseller", ("suspect",))
    assert one.shown == {"report.html": report}
