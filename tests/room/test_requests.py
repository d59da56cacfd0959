"""What a request's signature binds, and what a room keeps."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quorumark.canonical import read_json
from quorumark.consortium.identity import Identity
from quorumark.consortium.policy import Policy
from quorumark.consortium.records import Terms, roster_of
from quorumark.errors import InputError, RoomError
from quorumark.room.client import Client
from quorumark.room.codes import REFUSED, STATUS
from quorumark.room.founding import facts_of
from quorumark.room.limits import Buckets
from quorumark.room.requests import HEADERS, WINDOW, address_of, check_request, sign_request
from quorumark.room.store import DAY, Limits, Store

ROOM, NOW = "https://room.example", 1_767_225_600
AVON, BIRCH = Identity.generate("Avon"), Identity.generate("Birch")


def code_of(call: object, *arguments: object) -> str:
    assert callable(call)
    with pytest.raises(RoomError) as caught:
        call(*arguments)
    assert caught.value.code in STATUS
    return caught.value.code


def test_a_request_is_bound_to_everything_in_it() -> None:
    sent = ("POST", "/api/c/1/entry?x=1", b"body")
    headers = sign_request(AVON, ROOM, *sent, NOW, "00" * 16)
    assert check_request(ROOM, *sent, headers, NOW) == (AVON.ed25519, "00" * 16)
    others = [
        ("https://other.example", *sent, headers),
        (ROOM, "PUT", *sent[1:], headers),
        (ROOM, "POST", "/api/c/1/entry?x=2", b"body", headers),
        (ROOM, "POST", sent[1], b"Body", headers),
        (ROOM, *sent, {**headers, "quorumark-time": str(NOW + 1)}),
        (ROOM, *sent, {**headers, "quorumark-nonce": "01" * 16}),
        (ROOM, *sent, {**headers, "quorumark-key": BIRCH.ed25519}),
        (ROOM, *sent, {**headers, "quorumark-key": "01" + "00" * 31}),  # a point of small order
        *((ROOM, *sent, {k: v for k, v in headers.items() if k != name}) for name in HEADERS),
    ]
    assert {code_of(check_request, *other, NOW) for other in others} == {"room.not-signed"}


def test_a_signature_for_another_purpose_is_none_for_a_request() -> None:
    """What members sign elsewhere cannot be sent as a request, even over the same bytes."""

    class Elsewhere:
        ed25519 = AVON.ed25519

        def sign(self, purpose: str, data: bytes) -> bytes:
            assert purpose == "room request"
            return AVON.sign("message", data)

    headers = sign_request(Elsewhere(), ROOM, "GET", "/", b"", NOW, "00" * 16)
    assert code_of(check_request, ROOM, "GET", "/", b"", headers, NOW) == "room.not-signed"


@given(off=st.integers(-10 * WINDOW, 10 * WINDOW))
def test_a_request_is_for_its_time(off: int) -> None:
    headers = sign_request(AVON, ROOM, "GET", "/", b"", NOW + off, "00" * 16)
    if abs(off) <= WINDOW:
        assert check_request(ROOM, "GET", "/", b"", headers, NOW)[0] == AVON.ed25519
    else:
        assert code_of(check_request, ROOM, "GET", "/", b"", headers, NOW) == "room.clock"


def test_an_address_has_one_spelling() -> None:
    assert address_of("https://Room.Example:443/c/1#x") == "https://room.example"
    assert address_of("http://127.0.0.1:8420/") == "http://127.0.0.1:8420"
    assert address_of("http://[::1]:80") == "http://[::1]"
    for bad in ("room.example", "ftp://room.example", "https://me:secret@room.example", "https://room.example:99999"):
        with pytest.raises(InputError):
            address_of(bad)


def leaves(value: Any, path: str = "terms") -> dict[str, str]:
    if not isinstance(value, dict | list):
        return {path: str(value) or "empty"}
    items = value.items() if isinstance(value, dict) else enumerate(value, 1)
    return {name: text for key, inner in items for name, text in leaves(inner, f"{path}.{key}").items()}


def test_a_member_sees_every_field_of_the_terms_before_it_agrees() -> None:
    """Terms that are bad for a member may differ from good ones in one field."""
    policy = {"z": "2.5", "sums": "unchecked", "attempts": "7", "packing": "2", "budget": "99999", "effective": "17"}
    policy |= {"cohort": "3", "groups": "ab" * 32, "lora": "cd" * 32, "blocks": "none"}
    optimised = Policy.of({"optimiser": "fedadam:eta=0.01"})  # which goes with checked sums only
    roster = roster_of((who.card(), 10) for who in (AVON, BIRCH, Identity.generate("Cedar")))
    terms = Terms("hospitals", 2, roster, "11" * 32, 5_000, "22" * 32, "2026-01-31T12:00:00Z", policy=Policy.of(policy))
    seen = set[str]()
    for one in (terms, replace(terms, policy=optimised)):
        body = read_json(one.to_bytes(), "terms")
        assert isinstance(body, dict)
        seen |= body["policy"].keys()
        del body["format"]
        shown = facts_of(one, "Avon")
        assert len(dict(shown)) == len(shown)
        assert {name: text for name, text in shown if name.startswith("terms.")}.items() >= leaves(body).items()
        assert body["policy"].keys() >= (policy.keys() if one is terms else {"optimiser"})
    assert seen == {f.name for f in fields(Policy)}
    # what is left to a default is named as well
    plain = dict(facts_of(replace(terms, policy=Policy()), "Avon"))
    assert {f"terms.policy.{f.name}" for f in fields(Policy)} <= plain.keys()


# --- what a room keeps ------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "data", Limits(consortium=10_000, file=8_000, consortia=2))


def found(store: Store) -> str:
    consortium = store.create_consortium(AVON.ed25519, AVON.card().to_bytes(), "hospitals", NOW)
    (code,) = store.invite(consortium, AVON.ed25519, 1, NOW)
    store.join(consortium, BIRCH.ed25519, BIRCH.card().to_bytes(), code, NOW)
    return consortium


def test_a_founding_whose_answer_was_lost_is_not_done_twice(store: Store) -> None:
    """The same place, while it is empty; another name, another founder, or a place that is in use: another one."""

    def create(who: Identity, name: str = "hospitals") -> str:
        return store.create_consortium(who.ed25519, who.card().to_bytes(), name, NOW)

    first = create(AVON)
    (code,) = store.invite(first, AVON.ed25519, 1, NOW)
    assert create(AVON) == first
    other = create(BIRCH)
    assert other != first
    store.join(first, BIRCH.ed25519, BIRCH.card().to_bytes(), code, NOW)  # the invitation holds all the same
    assert code_of(create, AVON) == "room.quota"  # it would be a third one
    put(store, other, BIRCH.ed25519, b"one")
    assert create(BIRCH) == other
    store.add_entry(other, BIRCH.ed25519, "note/1", hashlib.sha256(b"one").hexdigest(), NOW)
    assert code_of(create, BIRCH) == "room.quota"


def put(store: Store, consortium: str, author: str, data: bytes, part: int = 1 << 20) -> str:
    sha256 = hashlib.sha256(data).hexdigest()
    at, whole = store.have(consortium, author, sha256)
    while not whole:
        path = store.begin_part(consortium, author, sha256, len(data), at, NOW)
        assert path is not None
        piece = data[at : at + part]
        whole = store.write_part(path, sha256, len(data), at, piece)
        at += len(piece)
        if whole:
            store.finish(consortium, author, sha256, len(data))
    return sha256


def test_nonces_outlive_a_restart(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.use_nonce("key", "nonce", NOW)
    store.use_nonce("other", "nonce", NOW)
    store.close()
    store = Store(tmp_path)
    assert code_of(store.use_nonce, "key", "nonce", NOW + WINDOW) == "room.replayed"
    store.use_nonce("key", "nonce", NOW + 10 * WINDOW)  # by then its time is refused


def test_an_invitation_is_for_one_person_and_a_week(store: Store) -> None:
    consortium = found(store)
    one, two = store.invite(consortium, AVON.ed25519, 2, NOW)
    cedar, delta = Identity.generate("Cedar"), Identity.generate("Delta")
    late = (consortium, cedar.ed25519, cedar.card().to_bytes(), one)
    assert code_of(store.join, *late, NOW + 8 * DAY) == "room.no-invitation"
    store.join(*late, NOW)
    used = (consortium, delta.ed25519, delta.card().to_bytes())
    assert code_of(store.join, *used, one, NOW) == "room.no-invitation"
    assert code_of(store.join, *used, "", NOW) == "room.no-invitation"
    elsewhere = store.create_consortium(AVON.ed25519, AVON.card().to_bytes(), "other", NOW)
    assert code_of(store.join, elsewhere, *used[1:], two, NOW) == "room.no-invitation"
    assert code_of(store.invite, consortium, BIRCH.ed25519, 1, NOW) == "room.not-allowed"
    # a card of somebody else, or one that was altered, is not a card of who asks
    assert code_of(store.join, consortium, delta.ed25519, cedar.card().to_bytes(), two, NOW) == "room.malformed"
    altered = delta.card().to_bytes().replace(b"Delta", b"Dolta")
    assert code_of(store.join, consortium, delta.ed25519, altered, two, NOW) == "room.malformed"
    twin = Identity.generate("Avon")
    assert code_of(store.join, consortium, twin.ed25519, twin.card().to_bytes(), two, NOW) == "room.name-taken"


def test_who_may_found_is_the_hosts_setting(tmp_path: Path) -> None:
    store = Store(tmp_path, Limits(founders=(AVON.ed25519,)))
    assert store.create_consortium(AVON.ed25519, AVON.card().to_bytes(), "hospitals", NOW)
    assert code_of(store.create_consortium, BIRCH.ed25519, BIRCH.card().to_bytes(), "x", NOW) == "room.not-allowed"


def test_a_member_who_was_removed_is_a_stranger(store: Store) -> None:
    consortium = found(store)
    session = store.open_session(store.make_ticket(consortium, BIRCH.ed25519, NOW), NOW)
    store.require_member(consortium, BIRCH.ed25519)
    assert code_of(store.remove, consortium, BIRCH.ed25519, "Avon") == "room.not-allowed"
    store.remove(consortium, AVON.ed25519, "Birch")
    assert code_of(store.require_member, consortium, BIRCH.ed25519) == "room.not-a-member"
    assert code_of(store.seat, session, NOW) == "room.not-allowed"


def test_links_of_a_member_who_was_removed_open_nothing(store: Store) -> None:
    """Somebody who expects to be removed keeps a link for itself, and a session that it opened."""
    consortium = found(store)
    own = store.make_link(consortium, BIRCH.ed25519, "myself", "", 365, NOW)
    others = store.open_session(store.make_link(consortium, AVON.ed25519, "court", "", 365, NOW), NOW)
    session = store.open_session(own, NOW)
    store.remove(consortium, AVON.ed25519, "Birch")
    assert code_of(store.seat, session, NOW) == "room.not-allowed"
    assert code_of(store.open_session, own, NOW) == "room.not-allowed"
    assert [label for label, _, _ in store.links(consortium)] == ["court"]
    assert store.seat(others, NOW).label == "court"
    (code,) = store.invite(consortium, AVON.ed25519, 1, NOW)
    store.join(consortium, BIRCH.ed25519, BIRCH.card().to_bytes(), code, NOW)
    assert code_of(store.open_session, own, NOW) == "room.not-allowed"  # not even after it came back


def test_a_session_ends_with_its_links_makers_membership(store: Store) -> None:
    """Even if a link stayed behind, as in a room of an earlier release."""
    consortium = found(store)
    session = store.open_session(store.make_link(consortium, BIRCH.ed25519, "court", "", 9, NOW), NOW)
    store._db.execute("UPDATE members SET active = 0 WHERE key = ?", (BIRCH.ed25519,))
    assert code_of(store.seat, session, NOW) == "room.not-allowed"


@settings(max_examples=25, deadline=None)
@given(data=st.binary(max_size=3000), part=st.integers(1, 997), cut=st.integers(0, 3000))
def test_an_upload_goes_on_where_it_was_cut(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, part: int, cut: int
) -> None:
    folder = tmp_path_factory.mktemp("store")
    store = Store(folder)
    consortium = found(store)
    sha256 = hashlib.sha256(data).hexdigest()
    cut = min(cut, max(0, len(data) - 1))
    if cut:
        path = store.begin_part(consortium, AVON.ed25519, sha256, len(data), 0, NOW)
        assert path is not None
        assert not store.write_part(path, sha256, len(data), 0, data[:cut])
    store.close()  # killed
    store = Store(folder)
    assert store.have(consortium, AVON.ed25519, sha256) == (cut, False)
    assert put(store, consortium, AVON.ed25519, data, part) == sha256
    assert store.file(consortium, sha256).read_bytes() == data


def test_a_file_is_what_its_digest_says_and_fits_the_quota(store: Store) -> None:
    consortium, key = found(store), AVON.ed25519
    wrong = hashlib.sha256(b"right").hexdigest()
    path = store.begin_part(consortium, key, wrong, 5, 0, NOW)
    assert path is not None
    assert code_of(store.write_part, path, wrong, 5, 0, b"wrong") == "room.wrong-digest"
    assert code_of(store.file, consortium, wrong) == "room.gone"
    assert code_of(store.begin_part, consortium, key, wrong, 5, 3, NOW) == "room.wrong-part"
    assert code_of(store.write_part, path, wrong, 5, 0, b"longer") == "room.wrong-part"
    assert code_of(store.begin_part, consortium, key, "11" * 32, 8_001, 0, NOW) == "room.too-large"
    assert code_of(store.begin_part, consortium, key, "../" * 20, 1, 0, NOW) == "room.malformed"
    put(store, consortium, key, bytes(4_000))
    assert code_of(store.begin_part, consortium, key, "11" * 32, 2_000, 0, NOW) == "room.quota"
    # what is under way counts as well: not even two halves exceed it
    assert store.begin_part(consortium, BIRCH.ed25519, "22" * 32, 3_000, 0, NOW) is not None
    assert code_of(store.begin_part, consortium, BIRCH.ed25519, "33" * 32, 3_000, 0, NOW) == "room.quota"


def test_one_member_cannot_take_the_others_place(store: Store) -> None:
    """Each has its share of the quota, whatever sizes somebody announces; and who is removed holds nothing."""
    consortium, birch = found(store), BIRCH.ed25519
    assert code_of(store.begin_part, consortium, birch, "11" * 32, 8_000, 0, NOW) == "room.quota"
    path = store.begin_part(consortium, birch, "11" * 32, 5_000, 0, NOW)
    assert path is not None
    store.write_part(path, "11" * 32, 5_000, 0, bytes(100))
    put(store, consortium, AVON.ed25519, bytes(5_000))
    store.remove(consortium, AVON.ed25519, "Birch")
    assert not path.exists()
    put(store, consortium, AVON.ed25519, b"1" * 5_000)  # alone now: all of it is Avon's


@settings(max_examples=50, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 900), st.integers(0, 900)), max_size=40))
def test_no_order_of_parts_gets_more_on_disk_than_the_quota(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int, int]]
) -> None:
    """Sizes that change, offsets that are wrong, parts that are never finished."""
    folder = tmp_path_factory.mktemp("quota")
    store = Store(folder, Limits(consortium=1_000, file=1_000))
    consortium = store.create_consortium(AVON.ed25519, AVON.card().to_bytes(), "hospitals", NOW)
    for which, size, offset in steps:
        sha256 = f"{which:02x}" * 32
        at = store.have(consortium, AVON.ed25519, sha256)[0] if offset % 2 else offset
        for said in (size, 1):  # the attack: 1 byte is announced, at an offset that is refused
            with contextlib.suppress(RoomError):
                path = store.begin_part(consortium, AVON.ed25519, sha256, said, at if said == size else 900, NOW)
                assert path is not None
                store.write_part(path, sha256, said, at, bytes(max(0, said - at - 1)))
    assert sum(path.stat().st_size for path in (folder / "parts").rglob("*") if path.is_file()) <= 1_000
    store.close()


def test_a_size_is_said_once(store: Store) -> None:
    consortium, key = found(store), AVON.ed25519
    path = store.begin_part(consortium, key, "11" * 32, 900, 0, NOW)
    assert path is not None
    store.write_part(path, "11" * 32, 900, 0, bytes(899))
    assert code_of(store.begin_part, consortium, key, "11" * 32, 1, 5, NOW) == "room.wrong-part"
    assert code_of(store.begin_part, consortium, key, "11" * 32, 1_000, 899, NOW) == "room.wrong-part"
    # so the 900 still count
    assert code_of(store.begin_part, consortium, key, "22" * 32, 4_101, 0, NOW) == "room.quota"
    assert store.begin_part(consortium, key, "22" * 32, 4_100, 0, NOW) is not None


def test_a_name_is_given_once_and_belongs_to_its_author(store: Store) -> None:
    consortium = found(store)
    one, two = (put(store, consortium, AVON.ed25519, data) for data in (b"one", b"two"))
    number = store.add_entry(consortium, AVON.ed25519, "setup/1-commit/1.msg", one, NOW)
    assert store.add_entry(consortium, AVON.ed25519, "setup/1-commit/1.msg", one, NOW) == number
    assert code_of(store.add_entry, consortium, AVON.ed25519, "setup/1-commit/1.msg", two, NOW) == "room.exists"
    assert store.add_entry(consortium, BIRCH.ed25519, "setup/1-commit/1.msg", two, NOW) == number + 1
    for bad in ("setup", "/etc/passwd", "a/../b", "a/b\n", "A/b", "a/" + "b" * 81):
        assert code_of(store.add_entry, consortium, AVON.ed25519, bad, one, NOW) == "room.malformed"
    other = store.create_consortium(BIRCH.ed25519, BIRCH.card().to_bytes(), "other", NOW)
    assert code_of(store.file, other, one) == "room.gone"  # files are apart for each consortium


def test_a_suspect_can_be_deleted_by_its_author_and_the_founder(store: Store) -> None:
    consortium = found(store)
    mine, theirs = put(store, consortium, AVON.ed25519, b"mine"), put(store, consortium, BIRCH.ed25519, b"theirs")
    store.add_entry(consortium, AVON.ed25519, "query/1/file/0", mine, NOW)
    store.add_entry(consortium, BIRCH.ed25519, "query/1/file/0", theirs, NOW)
    assert code_of(store.delete, consortium, BIRCH.ed25519, mine) == "room.not-allowed"
    path = store.file(consortium, theirs)
    store.delete(consortium, AVON.ed25519, theirs)
    assert not path.exists()
    assert [entry.gone for entry in store.entries(consortium)] == [False, True]
    assert code_of(store.file, consortium, theirs) == "room.gone"


def test_links_end_and_can_be_revoked_with_the_sessions_that_they_opened(store: Store) -> None:
    consortium = found(store)
    token = store.make_link(consortium, BIRCH.ed25519, "court", "11" * 32, 2, NOW)
    session = store.open_session(token, NOW)
    assert store.seat(session, NOW).scope == "11" * 32
    assert store.seat(session, NOW).member == ""
    assert code_of(store.seat, token, NOW) == "room.not-allowed"  # the link itself is no session
    assert code_of(store.seat, session, NOW + DAY) == "room.not-allowed"
    assert code_of(store.open_session, session, NOW) == "room.not-allowed"
    later = store.open_session(token, NOW + DAY)
    cedar = Identity.generate("Cedar").ed25519
    assert code_of(store.revoke, consortium, cedar, "court") == "room.not-allowed"
    store.revoke(consortium, AVON.ed25519, "court")
    assert code_of(store.seat, later, NOW + DAY) == "room.not-allowed"
    assert code_of(store.open_session, token, NOW) == "room.not-allowed"
    short = store.make_link(consortium, BIRCH.ed25519, "auditor", "", 1, NOW)
    assert code_of(store.open_session, short, NOW + DAY + 1) == "room.not-allowed"


def test_a_ticket_is_good_once_for_a_minute(store: Store) -> None:
    consortium = found(store)
    ticket = store.make_ticket(consortium, BIRCH.ed25519, NOW)
    assert store.seat(store.open_session(ticket, NOW), NOW).member == BIRCH.ed25519
    assert code_of(store.open_session, ticket, NOW) == "room.not-allowed"
    late = store.make_ticket(consortium, BIRCH.ed25519, NOW)
    assert code_of(store.open_session, late, NOW + 61) == "room.not-allowed"


def test_tokens_are_not_in_the_database(store: Store, tmp_path: Path) -> None:
    consortium = found(store)
    kept = [
        store.make_link(consortium, AVON.ed25519, "court", "", 1, NOW),
        store.make_ticket(consortium, AVON.ed25519, NOW),
    ]
    kept += store.invite(consortium, AVON.ed25519, 1, NOW)
    kept.append(store.open_session(kept[0], NOW))
    store.close()
    content = b"".join(path.read_bytes() for path in (tmp_path / "data").rglob("*") if path.is_file())
    assert b"court" in content  # it would be found
    assert not [token for token in kept if token.encode() in content]


def test_a_bucket_fills_at_its_rate() -> None:
    buckets = Buckets(rate=2, burst=3)
    for _ in range(3):
        buckets.take("a", now=0.0)
    assert code_of(buckets.take, "a", 0.0) == "room.too-many"
    buckets.take("b", now=0.0)
    buckets.take("a", now=0.5)
    assert code_of(buckets.take, "a", 0.5) == "room.too-many"


def test_the_page_about_rooms_lists_every_code(root: Path) -> None:
    page = (root / "docs/room.md").read_text(encoding="utf-8")
    rows = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `room.")]
    assert sorted(rows) == sorted(STATUS)
    assert REFUSED.keys() <= STATUS.keys()
    sources = "".join(path.read_text(encoding="utf-8") for path in (root / "src/quorumark/room").glob("*.py"))
    unused = [code for code in STATUS if sources.count(f'"{code}"') < 2]
    assert not unused


def test_an_answer_that_was_cut_short_is_tried_again_and_decides_nothing() -> None:
    """A room that dies while it answers: what came of it must not be read as the room's word."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            connection.recv(1 << 16)
            connection.sendall(b'HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{"entries": [')
            connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        client = Client(f"http://127.0.0.1:{server.getsockname()[1]}", Identity.generate("Avon"), "00" * 16)
        with pytest.raises(RoomError) as caught:
            client.log(0)
        thread.join()
    assert caught.value.code == "room.unreachable"
