"""A room, five agents, one consortium: founding, asking, approving, and who sees what. All over HTTP on loopback."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quorumark import field, shamir
from quorumark.consortium.identity import Identity
from quorumark.consortium.records import Manifest
from quorumark.errors import RoomError
from quorumark.room.agent_page import AgentPage
from quorumark.room.asking import ask
from quorumark.room.board import STEPS
from quorumark.room.client import Client
from quorumark.room.place import Place, Policy
from quorumark.room.requests import sign_request
from quorumark.room.store import hashed
from quorumark.setup.dkg import DkgMember
from quorumark.verify.certificate import Certificate
from quorumark.verify.check import check_certificate
from quorumark.verify.ledger import Ledger
from quorumark.verify.reference import Reference
from tests.kit.overheard import search, texts, windows
from tests.kit.rooms import Group, RoomProcess, room_on, until, visit
from tests.kit.secrets import Seeds, secrets_of, signs_of

pytest.importorskip("starlette")
pytestmark = pytest.mark.room


class World:
    """A room with a founded consortium, a suspect that passed and one that did not."""

    def __init__(self, folder: Path, room: RoomProcess) -> None:
        self.folder, self.room = folder, room
        self.group = Group.join(folder / "members", room.address)
        self.seeds = Seeds(folder / "members")
        self.seeds.start()
        self.group.start()
        self.pages = [AgentPage(agent) for agent in self.group.agents]
        for page in self.pages:
            page.start()
        self.manifest: Manifest = self.group.found()
        self.suspect = self.group.marked()
        self.passed = self.ask(self.suspect)
        for index in (0, 1, 3):
            self.group.decide(index, "query")
        for index in range(5):
            self.group.matter(index, "query", "done")
        self.other = self.group.marked("other.safetensors", rho=0.0, seed=2)
        self.failed = self.ask(self.other)
        self.group.decide(4, "query", "no")
        for index in (0, 1, 2):
            self.group.decide(index, "query")
        until(lambda: all(self._verdicts(i) == {"PASSED", "FAILED"} for i in range(4)), "both verdicts")

    def ask(self, suspect: Path, index: int = 0, **options: Any) -> str:
        home, unlock = self.group.homes[index]
        identity = home.identity(unlock)
        query = ask(self.group.client(index), home, identity, suspect, "a reseller", answers=3, **options)
        return query.digest()

    def _verdicts(self, index: int) -> set[str]:
        return {one.verdict for one in self.group.agent(index).desk.matters() if one.kind == "query"}

    def opened(self, link: str) -> tuple[str, str]:
        """A browser that followed a link: its cookie, and where it was sent."""
        status, headers, _ = visit(link)
        assert status == 303, link
        assert re.search(r"; HttpOnly; .*SameSite=lax", headers["set-cookie"])
        return headers["set-cookie"].partition(";")[0], self.room.address + headers["location"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("room")
    with room_on(folder / "room") as room:
        made = World(folder, room)
        yield made
        made.seeds.stop()
        for page in made.pages:
            page.stop()
        made.group.stop()


def test_five_members_make_a_key_and_three_answer(world: World) -> None:
    group = world.group
    for home, unlock in group.homes:
        ours = home.only_consortium()
        assert ours.manifest().digest() == world.manifest.digest()
        ours.verify_share(unlock)
    home = group.homes[0][0]
    reference = Reference.read(home.only_consortium().manifest_path)
    folder = home.path / "room" / group.consortium / "certificates"
    for digest, suspect, verdict, names in (
        (world.passed, world.suspect, "PASSED", ["Avon", "Birch", "Delta"]),
        (world.failed, world.other, "FAILED", ["Avon", "Birch", "Cedar"]),
    ):
        certificate = Certificate.from_bytes((folder / digest / "certificate.json").read_bytes())
        checked, left = check_certificate(certificate, reference.chain, suspect=suspect, reference=reference)
        assert checked
        assert not left
        assert certificate.finding.verdict == verdict
        assert [member.name for member in certificate.signers(world.manifest)] == names
    # who declined, and who was not asked in time, opened nothing
    answered = [len(Ledger.open(h.only_consortium(), world.manifest).answered()) for h, _ in group.homes]
    assert answered == [2, 2, 1, 1, 0]


def test_the_member_sees_what_it_decides_on(world: World) -> None:
    matter = next(m for m in world.group.agent(2).desk.matters() if dict(m.facts).get("query") == world.passed)
    facts = dict(matter.facts)
    assert facts["who asks"] == "Avon"
    assert facts["why"] == "a reseller"
    assert hashlib.sha256(world.suspect.read_bytes()).hexdigest() in facts["suspect"]
    assert facts["it takes"].startswith("3 of 5 members")
    assert world.manifest.digest().hex() in facts["consortium"]
    assert facts["kind of query"] == "plain; equations: 1; leaves left out: 0"


def test_the_steps_on_the_pages_are_those_of_the_ceremony() -> None:
    assert STEPS == DkgMember.STEPS


def test_members_and_judges_look_at_the_room(world: World) -> None:
    client = world.group.client(1)
    cookie, place = world.opened(client.post("ticket")["link"])
    status, headers, text = visit(place, cookie=cookie)
    assert status == 200
    assert "PASSED" in text
    assert "FAILED" in text
    assert "any 3 of them" in re.sub(r"\s+", " ", text)
    assert headers["x-frame-options"] == "DENY"
    assert not re.findall(r'(?:src|href)="(?!/|#)', text)  # nothing from elsewhere
    # a judge: one query, its certificate and report, and what it takes to check them
    link = client.post("link", label="court", query=world.passed, days=3)["link"]
    judge, page = world.opened(link)
    status, _, text = visit(page, cookie=judge)
    assert status == 200
    assert "PASSED" in text
    assert "Avon asks: a reseller" in text
    start = f"{world.room.address}/c/{world.group.consortium}"
    for path in ("certificate.json", "report"):
        status, headers, text = visit(f"{start}/q/{world.passed}/{path}", cookie=judge)
        assert status == 200
    assert headers["content-security-policy"].startswith("sandbox;")
    assert "PASSED" in text
    manifest = visit(f"{start}/consortium.json", cookie=judge)[2]
    assert Manifest.from_bytes(manifest.encode()).digest() == world.manifest.digest()
    for other in (start, f"{start}/q/{world.failed}", f"{start}/q/{world.failed}/report"):
        status, _, text = visit(other, cookie=judge)
        assert status == 403
        assert "FAILED" not in text
    client.post("unlink", label="court")
    assert visit(page, cookie=judge)[0] == 403
    assert visit(link)[0] == 403


def test_the_pages_tell_news(world: World) -> None:
    """Server-sent events: the first number at once, the next with the next entry."""
    import http.client

    cookie, place = world.opened(world.group.client(1).post("ticket")["link"])
    connection = http.client.HTTPConnection("127.0.0.1", world.room.port, timeout=30)
    connection.request("GET", f"/c/{world.group.consortium}/events", headers={"cookie": cookie})
    answer = connection.getresponse()
    assert answer.getheader("content-type", "").startswith("text/event-stream")
    first = answer.readline()
    assert first.startswith(b"data: ")
    answer.readline()
    world.group.client(1).upload(os.urandom(8), f"note/{os.urandom(4).hex()}")
    second = answer.readline()
    assert second.startswith(b"data: ")
    assert second != first
    connection.close()
    assert place


def test_strangers_former_members_and_members_of_others_get_nothing(world: World) -> None:
    group, address = world.group, world.room.address
    stranger = Client(address, Identity.generate("Mallory"), group.consortium)
    other = Client(address, Identity.generate("Oak"))
    other.create_consortium("another consortium")
    other.consortium = group.consortium
    invited = Identity.generate("Pine")
    code = group.client(0).post("invite", count=1)["invitations"][0].partition("#")[2]
    former = Client(address, invited, group.consortium)
    former.join(code)
    former.about()
    ticket = former.post("ticket")["link"]
    cookie, place = world.opened(ticket)
    assert visit(place, cookie=cookie)[0] == 200  # so far it may look
    group.client(0).post("remove", name="Pine")
    sha256 = group.client(0).log(0)[0].sha256
    paths = ["", "/log?after=0&wait=0", f"/file/{sha256}", f"/upload/{sha256}"]
    posts: list[tuple[str, dict[str, Any]]] = [
        ("entry", {"name": "note/1", "sha256": sha256}),
        ("invite", {"count": 1}),
        ("link", {"label": "x", "query": "", "days": 1}),
        ("ticket", {}),
        ("delete", {"sha256": sha256}),
        ("remove", {"name": "Avon"}),
        ("unlink", {"label": "court"}),
    ]
    used = {"code": code}  # by Pine, before it was removed
    for client in (stranger, other, former):
        for path in paths:
            with pytest.raises(RoomError) as caught:
                client._send("GET", f"/api/c/{group.consortium}{path}", b"")
            assert caught.value.code == "room.not-a-member", path
            status, _, text = visit(f"{address}/api/c/{group.consortium}{path}")
            assert (status, json.loads(text)["code"]) == (401, "room.not-signed")
        for name, fields in posts:
            with pytest.raises(RoomError) as caught:
                client.post(name, **fields)
            assert caught.value.code == "room.not-a-member", name
        for code, card, expected in (
            ("wrong", client._identity.card(), "room.no-invitation"),
            (used["code"], client._identity.card(), "room.no-invitation"),
            ("wrong", group.homes[0][0].card(), "room.malformed"),  # somebody else's card
        ):
            with pytest.raises(RoomError) as caught:
                client.post("join", code=code, card=card.to_bytes().decode())
            assert caught.value.code == expected
    assert visit(place, cookie=cookie)[0] == 403
    for path in ("", f"/q/{world.passed}", "/events", "/consortium.json", "/public/layout.json"):
        status, _, text = visit(f"{address}/c/{group.consortium}{path}")
        assert status == 403
        assert "hospitals" not in text


def test_a_request_counts_once_and_in_this_room_only(world: World) -> None:
    home, unlock = world.group.homes[1]
    identity, path = home.identity(unlock), f"/api/c/{world.group.consortium}/log?after=0&wait=0"

    def send(room: str, when: int, nonce: str) -> tuple[int, str]:
        headers = sign_request(identity, room, "GET", path, b"", when, nonce)
        status, _, text = visit(world.room.address + path, **headers)
        return status, "" if status == 200 else json.loads(text)["code"]

    now, nonce = int(time.time()), os.urandom(16).hex()
    assert send(world.room.address, now, nonce) == (200, "")
    assert send(world.room.address, now, nonce) == (401, "room.replayed")
    assert send("http://other.example", now, os.urandom(16).hex()) == (401, "room.not-signed")
    assert send(world.room.address, now - 500, os.urandom(16).hex()) == (401, "room.clock")


def test_a_policy_answers_without_a_person_and_a_suspect_may_stay_at_home(world: World) -> None:
    """The asker keeps the file; two members get it by other means, and one of them has a policy."""
    group = world.group
    suspect = group.marked("private.safetensors", seed=5)
    index = 4
    group.agent(index).stop()
    group.agents = [agent for agent in group.agents if agent.identity.name != "Elm"]
    digest = world.ask(suspect, index=1, keep_file=True)
    group.start(index, policy=Policy(askers=("Birch",), most_a_day=1))

    def matter(at: int) -> Any:
        named = [
            m for m in group.agent(at).desk.matters() if digest[:12] in m.title or dict(m.facts).get("query") == digest
        ]
        return named[0] if named else None

    refused = until(lambda: matter(index), "the query at Elm")
    assert refused.state == "refused"
    assert refused.code == "room.not-found"
    assert hashlib.sha256(suspect.read_bytes()).hexdigest() in refused.status
    for at in (index, 2):
        folder = group.homes[at][0].path / "room" / group.consortium / "suspects" / digest
        until(folder.is_dir, "the folder for the suspect")
        (folder / suspect.name).write_bytes(suspect.read_bytes())
    until(lambda: (found := matter(index)) and found.state == "working", "Elm answers by its policy")
    ours = group.homes[index][0].only_consortium()

    def answers() -> list[Any]:
        every = Ledger.open(ours, world.manifest).entries
        return [entry.get("approved_by") for entry in every if entry["kind"] == "answered"]

    assert until(answers, "once the others' ledgers were compared") == ["rules"]
    assert not [one for one in group.client(0).log(0) if one.sha256 == hashlib.sha256(suspect.read_bytes()).hexdigest()]


def test_nothing_secret_is_in_the_room(world: World) -> None:
    """What every member has for itself, the key that all of them have together, and what opens pages: looked for in
    the room's database, files and log, in all the ways that people write bytes. The same search finds what must be
    there, and each kind of secret once it is put there."""
    wanted: dict[str, Any] = {}
    shares, put = {}, {}
    for point, (home, unlock) in enumerate(world.group.homes, 1):
        identity, share = home.identity(unlock), home.only_consortium().share(unlock)
        key_file, seeds = (
            (home.path.parent / f"{identity.name}.key").read_bytes(),
            world.seeds.of(home.path.name, unlock),
        )
        assert len(seeds) == 1, "the seed of the ceremony must be known to be looked for"
        wanted |= secrets_of(identity.name, identity, share, key_file, seeds)
        shares[point] = share.vector()
        page = world.pages[point - 1].address.split("/")[3]
        assert page in Place(home.path).page.read_text()
        wanted[f"{identity.name}'s page"] = texts(page.encode())
        if identity.name == "Avon":
            put = {
                "Avon's share": shares[point][1000:1008].tobytes(),
                "Avon's share, written otherwise": ", ".join(map(str, shares[point][:8].tolist())).encode(),
                "Avon's salts": share.salt.tobytes(),
                "Avon's key file": base64.b64encode(b"x" + key_file),
                "Avon's private keys": identity.to_secret_bytes().hex().encode(),
                "Avon's seed of the ceremony": base64.urlsafe_b64encode(bytes.fromhex(next(iter(seeds)))),
                "Avon's page": b"http://127.0.0.1/" + page.encode(),
            }
    wanted |= signs_of(shares, 3, world.manifest)
    client = world.group.client(1)
    link, ticket = client.link("for the search", "", 1), client.ticket()
    code = world.group.client(0).post("invite", count=1)["invitations"][0].partition("#")[2]
    cookie, _ = world.opened(link)
    for name, token in {"link": link, "ticket": ticket, "cookie": cookie, "invitation": code}.items():
        wanted[f"the {name}"] = texts(re.findall("[A-Za-z0-9_-]{43}", token)[0].encode())
    content = b"".join(p.read_bytes() + bytes(16) for p in sorted(world.room.folder.rglob("*")) if p.is_file())
    passed = {
        "a suspect": windows(np.frombuffer(world.suspect.read_bytes(), np.uint8)[-4096:]),
        "a public key": texts(bytes.fromhex(world.group.homes[0][0].card().ed25519)),
        "the hash of a link": texts(bytes.fromhex(hashed(link.rpartition("/")[2]))),
    }
    found = search(content, wanted | passed)
    assert found["a suspect"] > 0.99
    assert found["a public key"] > 0.1
    assert found["the hash of a link"] > 0.1
    assert {name: part for name, part in found.items() if part and name not in passed} == {}

    raw = field.to_signed(shamir.reconstruct({x: shares[x] for x in (1, 2, 3)}, 3))
    put["the signs, packed"] = np.packbits(raw > 0).tobytes()[40:80]
    put["the signs, as bytes"] = raw.astype(np.int8)[100:200].tobytes()
    put["the cookie"] = cookie.encode()
    planted = search(b"-----".join([content, *put.values(), content]), wanted)
    found_there = {name for name, part in planted.items() if part}
    assert put.keys() <= found_there
    assert found_there - put.keys() <= {"the signs in use, packed", "the signs in use, as bytes"}  # partly the same


def test_the_rooms_log_has_no_addresses(world: World) -> None:
    log = (world.room.folder / "room.log").read_text()
    assert "/open/" not in log
    assert "/api/" not in log


def test_the_room_is_small_whatever_passes_through(world: World, tmp_path: Path) -> None:
    """Files go through in parts: the room's memory does not grow with them."""
    assert world.room.process is not None
    status = Path(f"/proc/{world.room.process.pid}/status")
    if not status.exists():
        pytest.skip("no /proc here")
    content = np.random.default_rng(0).bytes(96 << 20)
    source, target = tmp_path / "large", tmp_path / "back"
    source.write_bytes(content)
    sha256 = world.group.client(0).upload(source, "query/large/file/0")
    world.group.client(1).download(sha256, len(content), target)
    assert target.read_bytes() == content
    peak = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
    assert peak is not None
    assert int(peak[1]) < 96 << 10  # less than the file alone
