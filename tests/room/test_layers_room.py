"""A query by layers in a room: after a plain one that did not pass, sealed to an examiner, whose word is an entry."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from quorumark.consortium.home import HomeFolder
from quorumark.consortium.keystore import Unlock
from quorumark.errors import RoomError
from quorumark.field import P
from quorumark.model.layout import write_safetensors
from quorumark.room.asking import ask, compute_query, send_question
from quorumark.room.client import Client
from quorumark.room.desk import Matter
from quorumark.room.examining import examine_in_room
from quorumark.room.place import Policy
from quorumark.verify.certificate import Certificate
from quorumark.verify.evidence import Query
from quorumark.verify.layered import Examiner
from quorumark.verify.ledger import Ledger
from quorumark.verify.query import AskLayers
from tests.kit.layered import STRENGTH, evaded, layered_anchor
from tests.kit.rooms import Group, Host, about, identity, make_home, room_on, until

pytest.importorskip("starlette")
pytestmark = pytest.mark.room


class Scene:
    """Three members; a suspect whose z is gone; the certificate of the plain query, which did not pass; a judge."""

    def __init__(self, group: Group, host: Host) -> None:
        self.group, self.host = group, host
        self.judge: tuple[HomeFolder, Unlock] = make_home(group.folder, "Judge Oak")
        known, reference = group.known()
        world: Any = SimpleNamespace(marked=group.marked_model(0.1), known=known, reference=reference)
        self.suspect = group.folder / "evaded.safetensors"
        write_safetensors(evaded(world), self.suspect)
        self.plain = self.ask()
        for index in range(3):
            self.say(index, self.plain)
        self.before = self.certificate(self.plain)
        until(lambda: all(self.matter(index, self.plain).state == "done" for index in range(3)), "the first verdict")

    def ask(self, **options: Any) -> Query:
        home, _ = self.group.homes[0]
        avon = identity(self.group, 0)
        return ask(self.group.client(0), home, avon, self.suspect, "a reseller", answers=3, **options)

    def by_layers(self) -> Query:
        return self.ask(after=self.before, examiner=self.judge[0].card())

    def matter(self, index: int, query: Query) -> Matter:
        found: Matter = until(about(self.group, index, query.digest()), "the query")
        return found

    def say(self, index: int, query: Query) -> None:
        matter: Matter = until(lambda: (m := self.matter(index, query)).state == "waiting" and m, "it waits")
        self.group.agent(index).desk.decide(matter.digest, matter.shown, "yes", "person")

    def certificate(self, query: Query) -> Certificate:
        home = self.group.homes[0][0].path
        path = home / "room" / self.group.consortium / "certificates" / query.digest() / "certificate.json"
        until(path.exists, "the certificate")
        return Certificate.from_bytes(path.read_bytes())

    def examiner(self) -> Client:
        """The judge, who was invited to the room."""
        home, unlock = self.judge
        client = Client(self.group.address, home.identity(unlock), self.group.consortium)
        code = self.group.client(0).post("invite", count=1)["invitations"][0].partition("#")[2]
        client.join(code)
        return client


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("layers")
    with room_on(folder / "room") as room:
        group = Group.join(folder / "members", room.address, members=3, threshold=2)
        group.anchor = layered_anchor()
        group.start()
        group.found(strength=STRENGTH)
        yield Scene(group, Host(room, group))
        group.stop()


def test_a_query_by_layers_without_its_certificate_is_not_put_before_a_person(scene: Scene) -> None:
    """The room withholds the plain certificate, gives another one, and one that somebody changed."""
    scene.group.stop()
    query, avon = scene.by_layers(), identity(scene.group, 0).ed25519
    name = f"query/{query.digest()}/after.json"
    right = scene.host.read(avon, name)
    scene.host.withhold(avon, name)
    scene.group.start()
    try:
        assert until(lambda: (m := scene.matter(2, query)).state == "refused" and m, "it").code == "room.not-found"
        altered = right.replace(b'"sig": "', b'"sig": "A') if b'"sig": "' in right else right[:-40] + right[-39:]
        said = []
        for data in (altered, b"{}"):  # each is refused for a reason of its own
            scene.host.put(avon, name, data)
            until(
                lambda: (m := scene.matter(2, query)).code == "room.other-query" and m.status not in said,
                "another certificate",
            )
            said.append(scene.matter(2, query).status)
            assert scene.matter(2, query).state == "refused"
        scene.host.put(avon, name, right)
        until(lambda: scene.matter(2, query).state == "waiting", "the right one")
    finally:
        scene.group.stop()
        scene.group.start()


def test_a_query_by_layers_from_the_plain_one_to_the_certificate(scene: Scene) -> None:
    assert scene.before.finding.verdict != "PASSED"
    query = scene.by_layers()
    assert query.equations == 9
    facts = dict(scene.matter(1, query).facts)
    assert facts["kind of query"].startswith("by layers; equations: 9")
    assert "Judge Oak" in facts["by layers"]
    assert scene.judge[0].card().fingerprint() == facts["the examiner's card, to compare by phone"]
    assert "9" in facts["cost"]
    for index in range(3):
        scene.say(index, query)
    until(lambda: "Judge Oak must open them" in scene.matter(0, query).status, "all answers are there")
    judge, unlock = scene.judge
    client = scene.examiner()
    wrong = Client(scene.group.address, identity(scene.group, 1), scene.group.consortium)
    with pytest.raises(Exception, match="names another examiner"):  # a member is not the examiner
        examine_in_room(wrong, scene.group.homes[1][0], identity(scene.group, 1), query.digest()[:16])
    examined, manifest = examine_in_room(client, judge, judge.identity(unlock), query.digest()[:16])
    assert manifest.digest().hex() == query.manifest
    finding = scene.certificate(query).finding
    assert finding.verdict == "PASSED"
    assert finding.layers is not None
    assert finding.opened == examined.opened
    for index in range(3):
        until(lambda index=index: scene.matter(index, query).state == "done", "the verdict")  # type: ignore[misc]
    for home, _ in scene.group.homes:
        ours = home.only_consortium()
        assert Ledger.open(ours, ours.manifest()).opened(query.x) == 9
    # numbers by block are nowhere in the room, as digits or as the words that were sealed
    content = b"".join(p.read_bytes() for p in sorted(scene.host.folder.rglob("*")) if p.is_file())
    values = [value for value in examined.values if value is not None]
    assert len(values) == 9

    def digits(number: int) -> bool:
        return re.search(rb"(?<![0-9a-zA-Z])" + str(abs(number)).encode() + rb"(?![0-9a-zA-Z])", content) is not None

    large = [value for value in values if abs(value) > 9_999]
    assert len(large) >= 5
    assert not [value for value in large if digits(value)]
    assert not [
        value for value in values if (value % P).to_bytes(8, "big") + (values[1] % P).to_bytes(8, "big") in content
    ]
    assert query.layers is not None
    assert digits(query.layers.norm2[0])  # what is public is found


def test_an_askers_own_seal_key_is_not_put_before_a_person(scene: Scene) -> None:
    """Judge Oak's name, key and signature, but answers would be sealed to Avon, who asks."""
    avon, judge = identity(scene.group, 0), scene.judge[0].card()
    forged = object.__new__(Examiner)  # no examiner is made without its card's signature
    for name, value in {**asdict(Examiner.of(judge)), "x25519": avon.x25519}.items():
        object.__setattr__(forged, name, value)
    home = scene.group.homes[0][0]
    layers = AskLayers(scene.before.digest(), scene.before.finding.value, forged)
    query = compute_query(home, scene.suspect, layers=layers)
    files = {query.files[0].name: scene.suspect}
    send_question(scene.group.client(0), home, avon, query, files, "the court", answers=3, after=scene.before)
    for index in (1, 2):
        matter = scene.matter(index, query)
        assert (matter.state, matter.code, matter.facts) == ("refused", "room.other-query", ())
        with pytest.raises(RoomError):
            scene.group.agent(index).desk.decide(matter.digest, matter.shown, "yes", "person")
    assert not [name for _, name in scene.host.names(f"query/{query.digest()}/") if name.endswith("partial.json")]


def test_nobody_answers_by_layers_by_a_policy(scene: Scene) -> None:
    assert not Policy(askers=("Avon",), most_equations=100, most_a_day=100).approves("Avon", "by layers", 9)
    path = scene.group.folder / "policy.json"
    path.write_text('{"format": "quorumark-room-policy/v1", "kinds": ["by layers"]}')
    with pytest.raises(Exception, match="plain, aligned or both"):
        Policy.read(path)


def test_a_query_by_layers_needs_both(scene: Scene) -> None:
    with pytest.raises(Exception, match="takes --after and --examiner"):
        scene.ask(after=scene.before)


def test_an_examiner_in_another_room_finds_no_query(scene: Scene) -> None:
    judge, unlock = make_home(scene.group.folder, "Stranger")
    client = Client(scene.group.address, judge.identity(unlock), scene.group.consortium)
    with pytest.raises(RoomError) as caught:
        examine_in_room(client, judge, judge.identity(unlock), scene.plain.digest())
    assert caught.value.code == "room.not-a-member"
