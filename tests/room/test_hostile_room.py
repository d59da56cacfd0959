"""A room that lies. Its host changes whatever it likes in its database and files; agents answer and sign nothing that
their members did not see, and say what is wrong."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from quorumark.canonical import canonical
from quorumark.consortium.identity import Header, Identity
from quorumark.consortium.records import Member, Terms
from quorumark.errors import RoomError
from quorumark.room import asking, combining
from quorumark.room.agent_page import AgentPage
from quorumark.room.client import Client, Notice
from quorumark.room.shares import OwnShare
from quorumark.setup.ceremony import Ceremony
from quorumark.setup.dkg import DkgMember
from quorumark.verify.answer import answer
from quorumark.verify.certificate import Certificate
from quorumark.verify.combine import combine
from quorumark.verify.evidence import Partial, Query
from quorumark.verify.query import prepare
from quorumark.verify.reference import Reference
from tests.kit.rooms import Group, Host, RoomProcess, about, answered, identity, put_question, room_on, until, visit

pytest.importorskip("starlette")
pytestmark = pytest.mark.room


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoomProcess]:
    with room_on(tmp_path_factory.mktemp("hostile") / "room") as made:
        yield made


@pytest.fixture
def group(room: RoomProcess, tmp_path: Path) -> Iterator[Group]:
    made = Group.join(tmp_path / "members", room.address, members=3, threshold=2)
    yield made
    made.stop()


Founded = tuple[Group, Host, Callable[[], Path]]


@pytest.fixture(scope="module")
def founded(room: RoomProcess, tmp_path_factory: pytest.TempPathFactory) -> Founded:
    """A consortium that is there, with agents that are not running, and models of theirs."""
    made = Group.join(tmp_path_factory.mktemp("founded"), room.address, members=3, threshold=2)
    made.start()
    made.found()
    made.stop()
    numbers = itertools.count(1)
    return made, Host(room, made), lambda: made.marked(f"{(n := next(numbers))}.safetensors", seed=n)


# --- terms ------------------------------------------------------------------------------------------------


def _other_threshold(terms: Terms, _: Group) -> Terms:
    return replace(terms, threshold=3)  # for which there are too few members


def _other_name(terms: Terms, _: Group) -> Terms:
    return replace(terms, name="clinics")


def _other_examples(terms: Terms, _: Group) -> Terms:
    return replace(terms, roster=(*terms.roster[:2], replace(terms.roster[2], examples=250)))


def _other_card(terms: Terms, _: Group) -> Terms:
    fake = Identity.generate("Cedar")
    return replace(terms, roster=(*terms.roster[:2], Member(3, "Cedar", fake.ed25519, fake.x25519, 300)))


def _other_sealing_key(terms: Terms, _: Group) -> Terms:
    """Its own key for signatures, and somebody else's for what is sealed to it."""
    own = terms.roster[2]
    return replace(terms, roster=(*terms.roster[:2], replace(own, x25519=Identity.generate("x").x25519)))


@pytest.mark.parametrize("change", [_other_name, _other_threshold, _other_examples, _other_card, _other_sealing_key])
@pytest.mark.parametrize("named", ["as it was", "by its digest"])
def test_terms_that_were_swapped_are_not_put_before_the_member(
    room: RoomProcess, group: Group, change: Callable[[Terms, Group], Terms], named: str
) -> None:
    host, avon = Host(room, group), identity(group, 0)
    terms = group.terms()
    digest = group.propose()
    other = change(terms, group)
    if named == "as it was":
        host.put(avon.ed25519, f"proposal/{digest}/terms.json", other.to_bytes())
    else:  # the founder is in it, too: a whole other proposal
        (group.folder / "agreed" / "terms.json").write_bytes(other.to_bytes())
        for _, name in host.names(f"proposal/{digest}/"):
            host.withhold(avon.ed25519, name)
        digest = group.propose()
    group.start(2)
    if named == "by its digest" and change is _other_name:
        matter = group.matter(2, "terms")  # nothing is wrong with such terms: the person sees what they say
        assert dict(matter.facts)["terms.name"] == "clinics"
        assert matter.digest == other.digest().hex() != terms.digest().hex()
        return
    matter = group.matter(2, "terms", "refused")
    impossible = named == "by its digest" and change is _other_threshold
    assert matter.code.startswith("ceremony.too-few-members" if impossible else "room.")
    with pytest.raises(RoomError):
        group.agent(2).desk.decide(matter.digest, matter.shown, "yes", "person")
    assert not host.names("agreed/")
    assert not host.names("setup/")


def test_a_proposal_that_no_member_signed_is_refused(room: RoomProcess, group: Group) -> None:
    host, birch = Host(room, group), identity(group, 1)
    group.terms()
    digest = group.propose()
    word = Header(digest, digest, "room/proposal", 1)
    host.put(identity(group, 0).ed25519, f"proposal/{digest}/word.msg", birch.write(word, b"proposed"))
    group.start(2)
    assert group.matter(2, "terms", "refused").code == "message.altered"


# --- the ceremony -----------------------------------------------------------------------------------------


def test_a_ceremony_waits_names_who_is_missing_and_goes_on(room: RoomProcess, group: Group) -> None:
    """The room withholds a message, then gives an altered one, one of another step, and at last the right one."""
    host, (avon, birch, cedar) = Host(room, group), (identity(group, i) for i in range(3))
    group.terms()
    digest = group.propose()
    group.start(0, 1)
    for index in (0, 1):
        group.decide(index, "terms")
    name = f"setup/{digest}/1-commit/2.msg"
    until(lambda: len(host.names(f"setup/{digest}/1-commit/")) == 2, "both commitments")
    right, first = host.read(birch.ed25519, name), host.read(avon.ed25519, f"setup/{digest}/1-commit/1.msg")
    host.withhold(birch.ed25519, name)
    group.start(2)
    group.decide(2, "terms")

    def status(text: str) -> Callable[[], bool]:
        return lambda: any(m.state == "working" and text in m.status for m in group.agent(2).desk.matters())

    def code() -> str:
        return next(m.code for m in group.agent(2).desk.matters() if m.kind == "terms")

    until(status("waiting for Birch (commit)"), "Cedar waits for Birch")
    altered = bytearray(right)
    altered[-1] ^= 1
    for data, expected in (
        (bytes(altered), "message.altered"),
        (first, "message.elsewhere"),
        (b"", "message.malformed"),
    ):
        host.put(birch.ed25519, name, data)
        until(lambda expected=expected: code() == expected, expected)  # type: ignore[misc]
        assert "Birch" in next(m.status for m in group.agent(2).desk.matters())
    host.put(birch.ed25519, name, bytes(1 << 20))  # longer than the terms allow: not even fetched
    until(lambda: any("Birch" in text for text in group.agent(2).desk.troubles.values()), "its size is refused")
    assert (cedar.ed25519, f"setup/{digest}/2-reveal/3.msg") not in host.names("setup/")
    host.put(birch.ed25519, name, right)
    for index in range(3):
        until(lambda index=index: not group.agent(index).desk.matters()[0].code, "all have the right one")  # type: ignore[misc]
    group.stop()
    host.reverse()
    group.start()  # they read everything in another order
    for index in range(3):
        group.matter(index, "terms", "done")


class _Anything(bytes):
    """Bytes that are equal to any others: a comparison that is taken out."""

    def __ne__(self, _: object) -> bool:
        return False

    __hash__ = bytes.__hash__


@pytest.mark.parametrize("checked", [True, False])
def test_two_commitments_of_one_member_make_nothing(
    room: RoomProcess, group: Group, monkeypatch: pytest.MonkeyPatch, checked: bool
) -> None:
    """Birch's key signs two commitments; the room shows one to Avon, and the other one to Cedar. Cedar stops where it
    is revealed, names Birch, and deals nothing: nobody gets a share. Without the comparison the key would be made."""
    host, (avon, birch, cedar) = Host(room, group), (identity(group, i) for i in range(3))
    terms = group.terms()
    digest = group.propose()
    other = DkgMember(birch, terms, os.urandom(32)).commit()
    name, real = f"setup/{digest}/1-commit/2.msg", Client.log
    sha256 = group.client(1).upload(other, "note/other")  # a file that the room has, by its digest

    def log(self: Client, after: int, wait: int = 0) -> list[Notice]:
        """What the room tells: another story for Cedar."""
        found = real(self, after, wait)
        if self._identity.ed25519 != cedar.ed25519:
            return found
        return [
            replace(one, sha256=sha256, size=len(other)) if (one.author, one.name) == (birch.ed25519, name) else one
            for one in found
        ]

    monkeypatch.setattr(Client, "log", log)
    if not checked:
        commitment = Ceremony._commitment
        monkeypatch.setattr(Ceremony, "_commitment", lambda *arguments: _Anything(commitment(*arguments)))
    group.start()
    for index in range(3):
        group.decide(index, "terms")
    places = [home.consortium(terms) for home, _ in group.homes]
    if not checked:
        for index in range(3):
            group.matter(index, "terms", "done")
        assert len({place.manifest().digest() for place in places}) == 1
        return
    until(lambda: (one := group.agent(2).desk.find(digest)) and one.code == "message.not-as-committed", "Cedar stops")
    found = group.agent(2).desk.find(digest)
    assert found is not None
    assert "Birch" in found.status
    assert "Avon" not in found.status
    until(lambda: "waiting for Cedar" in group.matter(0, "terms", "working").status, "Avon waits for Cedar")
    assert not [one for one in host.names(f"setup/{digest}/3-deal/") if one[0] == cedar.ed25519]
    for place in places:
        assert not place.manifest_path.exists()
        assert not list(place.path.glob("share-*"))
    assert avon.ed25519 in {author for author, _ in host.names(f"setup/{digest}/2-reveal/")}


def test_a_home_that_was_set_back_sends_nothing(room: RoomProcess, group: Group) -> None:
    host = Host(room, group)
    group.terms()
    digest = group.propose()
    home = group.homes[2][0].path
    group.start(2)
    matter = group.matter(2, "terms")
    group.stop()
    shutil.copytree(home, group.folder / "yesterday")
    group.start(2)
    group.decide(2, "terms")
    until(lambda: host.names(f"setup/{digest}/1-commit/3"), "Cedar's commitment")
    group.stop()
    before = host.names("setup/")
    shutil.rmtree(home)
    shutil.copytree(group.folder / "yesterday", home)
    group.start(2)
    group.decide(2, "terms")
    assert group.matter(2, "terms", "refused").code == "room.set-back"
    assert host.names("setup/") == before
    assert matter.state == "waiting"


# --- queries ----------------------------------------------------------------------------------------------


def _swap_query(group: Group, host: Host, query: Query, _: Path) -> None:
    """Another query in its place: more of what is asked, for the same suspect."""
    other = replace(query, created="2026-02-01T12:00:00Z")
    host.put(identity(group, 0).ed25519, f"query/{query.digest()}/query.json", other.to_bytes())


def _swap_suspect(group: Group, host: Host, query: Query, suspect: Path) -> None:
    host.put(identity(group, 0).ed25519, f"query/{query.digest()}/file/0", suspect.read_bytes()[:-4] + b"\x00\x00\x80?")


def _other_purpose(group: Group, host: Host, query: Query, _: Path) -> None:
    """The room's own words, signed by a member who does not ask."""
    word = canonical({"format": "quorumark-room-ask/v1", "purpose": "harmless", "answers": 2})
    message = identity(group, 1).write(Header(query.manifest, query.digest(), "room/ask", 1), word)
    host.put(identity(group, 0).ed25519, f"query/{query.digest()}/ask.msg", message)


def _altered_purpose(group: Group, host: Host, query: Query, _: Path) -> None:
    name = f"query/{query.digest()}/ask.msg"
    words = host.read(identity(group, 0).ed25519, name)
    host.put(identity(group, 0).ed25519, name, words.replace(b"a reseller", b"a customer"))


def _words_of_another_query(group: Group, host: Host, query: Query, _: Path) -> None:
    other = put_question(group, group.marked("another.safetensors", seed=99), "another question")
    words = host.read(identity(group, 0).ed25519, f"query/{other.digest()}/ask.msg")
    host.put(identity(group, 0).ed25519, f"query/{query.digest()}/ask.msg", words)


def _another_asker(group: Group, host: Host, query: Query, _: Path) -> None:
    """Avon's question in the name of Birch."""
    start, avon, birch = f"query/{query.digest()}", identity(group, 0).ed25519, identity(group, 1).ed25519
    for name in ("query.json", "file/0", "ask.msg"):
        host.put(birch, f"{start}/{name}", host.read(avon, f"{start}/{name}"))
        host.withhold(avon, f"{start}/{name}")


def _renamed(query: Query) -> Query:
    """The same bytes under another name, as people would read it."""
    return replace(query, files=(replace(query.files[0], name="harmless.safetensors"),))


def _other_name_of_the_suspect(group: Group, host: Host, query: Query, _: Path) -> None:
    host.put(identity(group, 0).ed25519, f"query/{query.digest()}/query.json", _renamed(query).to_bytes())


def _other_name_and_digest(group: Group, host: Host, query: Query, _: Path) -> None:
    """The suspect's other name all through, with the asker's words: they are about the query that it signed."""
    avon, start, other = identity(group, 0).ed25519, f"query/{query.digest()}", _renamed(query)
    moved = f"query/{other.digest()}"
    host.put(avon, f"{moved}/query.json", other.to_bytes())
    for name in ("file/0", "ask.msg"):
        host.put(avon, f"{moved}/{name}", host.read(avon, f"{start}/{name}"))
    for name in ("query.json", "file/0", "ask.msg"):
        host.withhold(avon, f"{start}/{name}")


@pytest.mark.parametrize(
    "lie",
    [
        _swap_query,
        _swap_suspect,
        _other_name_of_the_suspect,
        _other_purpose,
        _altered_purpose,
        _words_of_another_query,
        _another_asker,
    ],
)
def test_a_query_that_was_swapped_is_not_put_before_the_member(
    founded: Founded, lie: Callable[[Group, Host, Query, Path], None]
) -> None:
    group, host, suspect = founded[0], founded[1], founded[2]()
    query = put_question(group, suspect)
    lie(group, host, query, suspect)
    group.start(2)
    try:
        matter = until(about(group, 2, query.digest()), "the query at Cedar")
        assert matter.state == "refused"
        assert matter.code == "room.other-query"
        with pytest.raises(RoomError):
            group.agent(2).desk.decide(matter.digest, matter.shown, "yes", "person")
        assert (identity(group, 2).ed25519, f"query/{query.digest()}/partial.json") not in host.names("query/")
    finally:
        group.stop()


def test_a_suspect_under_another_name_and_digest_is_not_put_before_the_member(founded: Founded) -> None:
    group, host, suspect = founded[0], founded[1], founded[2]()
    query = put_question(group, suspect)
    _other_name_and_digest(group, host, query, suspect)
    group.start(2)
    try:
        matter = until(about(group, 2, _renamed(query).digest()), "the query at Cedar")
        assert (matter.state, matter.code) == ("refused", "room.other-query")
        assert "step 'room/ask'" in matter.status
        assert "harmless" not in f"{matter.title} {matter.facts}"
    finally:
        group.stop()


def test_the_name_that_the_member_sees_is_the_one_that_it_answers_for(founded: Founded) -> None:
    """The room has another name on its own pages; the member's page shows the asker's, and that is what is signed."""
    group, host, suspect = founded[0], founded[1], founded[2]()
    query = put_question(group, suspect)
    birch, cedar, start = identity(group, 1).ed25519, identity(group, 2).ed25519, f"query/{query.digest()}"
    host.put(birch, f"{start}/query.json", _renamed(query).to_bytes())  # nobody's word, but there
    group.start(2)
    page = AgentPage(group.agent(2))
    page.start()
    try:
        matter = until(about(group, 2, query.digest()), "the query at Cedar")
        text = visit(page.address)[2]
        assert query.files[0].name in text
        assert "harmless" not in text
        group.agent(2).desk.decide(matter.digest, matter.shown, "yes", "person")
        until(lambda: (cedar, f"{start}/partial.json") in host.names(start), "Cedar's answer")
        partial = Partial.from_bytes(host.read(cedar, f"{start}/partial.json"))
        assert partial.query == query.digest() != _renamed(query).digest()
    finally:
        page.stop()
        group.stop()


def _unchecked_signature(patch: pytest.MonkeyPatch, _: Query) -> None:
    patch.setattr(asking, "open_message", lambda data, *_: data[4 + int.from_bytes(data[:4], "big") + 64 :])


def _not_computed_again(patch: pytest.MonkeyPatch) -> None:
    real = prepare
    patch.setattr(asking, "prepare_again", lambda reference, path, query: replace(real(reference, path), query=query))


def _unchecked_digest(patch: pytest.MonkeyPatch, query: Query) -> None:
    real, other = Query.digest, _renamed(query)
    patch.setattr(Query, "digest", lambda one: real(query) if one == other else real(one))
    _not_computed_again(patch)  # which notices it as well


def _unchecked_suspect(patch: pytest.MonkeyPatch, _: Query) -> None:
    """Whatever the room has is fetched; nobody computes the query again, and there is no guard."""

    def fetch(self: asking.Asking, client: Client, query: Query, author: str) -> Path:
        notice = self._seat.mirror.find(author, f"query/{query.digest()}/file/0")
        assert notice is not None
        path = self._seat.place.folder("suspects", query.digest()) / query.files[0].name
        client.download(notice.sha256, notice.size, path)
        return path

    patch.setattr(asking.Asking, "_fetch_suspect", fetch)
    patch.setattr(OwnShare, "check", lambda *_: None)
    _not_computed_again(patch)


@pytest.mark.parametrize(
    ("lie", "without"),
    [
        (_altered_purpose, _unchecked_signature),
        (_other_name_of_the_suspect, _unchecked_digest),
        (_swap_suspect, _unchecked_suspect),
    ],
)
def test_without_the_check_the_same_lie_would_be_believed(
    founded: Founded,
    monkeypatch: pytest.MonkeyPatch,
    lie: Callable[[Group, Host, Query, Path], None],
    without: Callable[[pytest.MonkeyPatch, Query], None],
) -> None:
    """Controls: a signature that is not checked lets another purpose through; a digest that is not, another name; and
    files that are not compared, another suspect."""
    group, host, suspect = founded[0], founded[1], founded[2]()
    query = put_question(group, suspect)
    lie(group, host, query, suspect)
    without(monkeypatch, query)
    group.start(2)
    try:
        matter = until(about(group, 2, query.digest()), "the query at Cedar")
        assert matter.state == "waiting", matter
        facts = dict(matter.facts)
        assert (facts["why"] == "a customer") == (lie is _altered_purpose)
        assert ("harmless" in facts["suspect"]) == (lie is _other_name_of_the_suspect)
        folder = group.homes[2][0].path / "room" / group.consortium / "suspects" / query.digest()
        (fetched,) = folder.iterdir()
        assert (fetched.read_bytes() != suspect.read_bytes()) == (lie is _swap_suspect)
    finally:
        group.stop()


@pytest.mark.parametrize("checked", [True, False])
def test_an_old_answer_is_none_to_a_new_query(founded: Founded, monkeypatch: pytest.MonkeyPatch, checked: bool) -> None:
    """The room puts Cedar's answer to one query where its answer to the next would be. It is named and does not count;
    without the check the asker would count it."""
    group, host, suspects = founded[0], founded[1], [founded[2](), founded[2]()]
    cedar = identity(group, 2).ed25519
    first = put_question(group, suspects[0])
    group.start(0, 2)
    try:
        one = until(about(group, 2, first.digest()), "the first query at Cedar")
        group.agent(2).desk.decide(one.digest, one.shown, "yes", "person")
        old = f"query/{first.digest()}/partial.json"
        until(lambda: (cedar, old) in host.names(old), "Cedar's answer")
        second = put_question(group, suspects[1])
        if not checked:
            monkeypatch.setattr(combining, "require", lambda *_: None)
        host.put(cedar, f"query/{second.digest()}/partial.json", host.read(cedar, old))
        desk = group.agent(0).desk

        def people() -> str:
            found = about(group, 0, second.digest())()
            return "" if found is None else dict(found.people).get("Cedar", "")

        if checked:
            text = until(lambda: [t for t in desk.troubles.values() if "the answer of Cedar is not used" in t], "named")
            assert "to this query" in text[0]
            until(lambda: about(group, 0, second.digest())(), "the second query")
            assert people() == ""
            assert second.x not in answered(group, 2)
        else:
            until(lambda: people() == "answered", "it counts")
    finally:
        group.stop()


def test_an_approval_is_for_one_query_and_one_combination(founded: Founded) -> None:
    """After the member approved, the room shows other words, another combination, and everything once more."""
    group, host, suspect = founded[0], founded[1], founded[2]()
    query = put_question(group, suspect)
    name, keys = f"query/{query.digest()}", [identity(group, i) for i in range(3)]
    group.start(2)
    try:
        matter = until(about(group, 2, query.digest()), "the query at Cedar")
        group.agent(2).desk.decide(matter.digest, matter.shown, "yes", "person")
        until(lambda: (keys[2].ed25519, f"{name}/partial.json") in host.names(name), "Cedar's answer")
        before = len(answered(group, 2))
        # a combination that the asker did not make
        ours = group.homes[2][0].only_consortium()
        partial = Partial.from_bytes(host.read(keys[2].ed25519, f"{name}/partial.json"))
        home, unlock = group.homes[1]
        reference = Reference.read(home.only_consortium().manifest_path)
        own = answer(home, unlock, reference, suspect, query, approved=True)
        made = Certificate.of(combine(ours.manifest(), query, [own, partial])).to_bytes()
        header = Header(query.manifest, query.digest(), "room/combined", 1)
        for author in (keys[1], Identity.generate("Mallory")):
            host.put(keys[0].ed25519, f"{name}/combined.msg", author.write(header, made))
            until(
                lambda: (
                    any(m.code.startswith("message.") for m in group.agent(2).desk.matters())
                    or group.agent(2).desk.troubles
                ),
                "refused",
            )
            assert (keys[2].ed25519, f"{name}/signed.json") not in host.names(name)
        # the asker's words with another purpose, by the asker itself: a new matter, which waits for a person
        point = Header(query.manifest, query.digest(), "room/ask", 1)
        word = canonical({"format": "quorumark-room-ask/v1", "purpose": "something else", "answers": 2})
        host.put(keys[0].ed25519, f"{name}/ask.msg", keys[0].write(point, word))
        until(lambda: [m for m in group.agent(2).desk.matters() if dict(m.facts).get("why") == "something else"], "it")
        later = next(m for m in group.agent(2).desk.matters() if dict(m.facts).get("why") == "something else")
        assert later.state == "waiting"
        assert group.agent(2).desk.said(later.digest) == ("", "")
        assert len(answered(group, 2)) == before
    finally:
        group.stop()


def test_numbers_come_from_the_manifest_and_not_from_the_room(founded: Founded) -> None:
    group, host, _ = founded
    host._do("UPDATE consortia SET name = 'other people'")
    ours = group.homes[0][0].only_consortium()
    digest = ours.manifest().genesis.terms
    avon = identity(group, 0)
    host.put(
        avon.ed25519,
        f"proposal/{digest}/terms.json",
        host.read(avon.ed25519, f"proposal/{digest}/terms.json").replace(b'"threshold":2', b'"threshold":1'),
    )
    group.start(2)
    try:
        until(lambda: group.agent(2).desk.matters(), "something from the room")
        ((name, takes, _),) = group.agent(2).standing()
        assert name == "hospitals"
        assert takes.startswith("2 of 3")
    finally:
        group.stop()


def test_an_agent_takes_no_redirects_and_no_nonsense() -> None:
    """A server that answers with other things than a room does."""
    answers = {
        "/api/c/1": (302, b"", {"Location": "http://127.0.0.1:1/elsewhere"}),
        "/api/c/2": (200, b"[" * 5000, {}),
        "/api/c/3": (200, b'{"entries": [{"number": -1}]}', {}),
        "/api/c/4": (500, b"<html>", {}),
        "/api/c/5": (403, b'{"code": "room.not-a-member", "text": "\\u001b[2Jx"}', {}),
    }

    class Liar(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body, headers = answers[self.path.partition("?")[0].removesuffix("/log")]
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Liar)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    codes = []
    for number in range(1, 6):
        client = Client(f"http://127.0.0.1:{server.server_port}", Identity.generate("Avon"), str(number))
        with pytest.raises(RoomError) as caught:
            client.log(0)
        codes.append(caught.value.code)
        assert "\x1b" not in str(caught.value)
        client.close()
    assert codes == ["room.answer"] * 4 + ["room.not-a-member"]
    server.shutdown()
    server.server_close()
