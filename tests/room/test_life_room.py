"""The life of shares in a room: refresh, other members, other terms, a lost share. Each waits for people; a room that
lies stops it or is passed over; nothing secret is left there; who left gets nothing."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from quorumark.consortium.home import ConsortiumFolder
from quorumark.consortium.identity import Header, Identity
from quorumark.consortium.records import Manifest, Terms
from quorumark.errors import InputError, RoomError
from quorumark.room.calls import Call, call_header, put_call
from quorumark.room.client import Client
from quorumark.room.desk import Matter
from quorumark.room.place import Place, Policy, Settings
from quorumark.setup import amend
from tests.kit.overheard import search, texts, windows
from tests.kit.rooms import Group, Host, RoomProcess, identity, make_home, put_question, room_on, until
from tests.kit.secrets import Seeds, secrets_of, signs_of

pytest.importorskip("starlette")
pytestmark = pytest.mark.room
AVON, BIRCH, CEDAR, DELTA, ELM = range(5)


def ours(group: Group, index: int) -> ConsortiumFolder:
    return group.homes[index][0].only_consortium()


def call(group: Group, index: int = AVON, **options: Any) -> Call:
    home, unlock = group.homes[index]
    return put_call(group.client(index), home, unlock, ours(group, index), "as agreed by phone", **options)


def matter(group: Group, index: int, about: str) -> Matter | None:
    every = group.agent(index).desk.matters()
    return next((one for one in every if one.digest == about and one.state != "checking"), None)


def wait(group: Group, index: int, about: str, state: str) -> Matter:
    found: Matter = until(
        lambda: (one := matter(group, index, about)) is not None and one.state == state and one,
        f"{state} at {index}: {[(m.title, m.state, m.status) for m in group.agent(index).desk.matters()]}",
    )
    return found


def agree(group: Group, index: int, about: str, said: str = "yes") -> Matter:
    one = wait(group, index, about, "waiting")
    group.agent(index).desk.decide(about, one.shown, said, "person")
    return one


def everybody(group: Group, about: str, *indices: int) -> None:
    for index in indices:
        agree(group, index, about)
    for index in indices:
        wait(group, index, about, "done")


class Scene:
    """Four members, two of whom prove ownership. Old shares are remembered, to look for them later."""

    def __init__(self, folder: Path, room: RoomProcess) -> None:
        self.room = room
        self.group = Group.join(folder / "members", room.address, members=4, threshold=2)
        self.seeds = Seeds(folder / "members")
        self.seeds.start()
        self.group.start()
        self.group.found()
        self.host = Host(room, self.group)
        self.shares: dict[str, tuple[Any, Any]] = {}  # with their salts
        self.secrets: dict[str, Any] = {}
        self.keep("first")

    def keep(self, when: str) -> None:
        """What every member has for itself now, with the seeds of all ceremonies so far."""
        for index, (home, unlock) in enumerate(self.group.homes):
            if ours(self.group, index).share_path().exists():
                name, mine = home.card().name, home.identity(unlock)
                share, key_file = ours(self.group, index).share(unlock), home.path.parent / f"{home.card().name}.key"
                self.shares[f"{name} {when}"] = share.vector(), share.salt
                seeds = self.seeds.of(home.path.name, unlock)
                self.secrets |= secrets_of(f"{name} {when}", mine, share, key_file.read_bytes(), seeds)

    def certified(self, seed: int, *indices: int) -> str:
        """Somebody asks, and these approve; the verdict."""
        query = put_question(self.group, self.group.marked(f"{seed}.safetensors", seed=seed), answers=len(indices))

        def find(index: int, state: str) -> Matter | None:
            every = self.group.agent(index).desk.matters()
            return next((m for m in every if dict(m.facts).get("query") == query.digest() and m.state == state), None)

        for index in indices:
            one = until(lambda index=index: find(index, "waiting"), "the query")  # type: ignore[misc]
            self.group.agent(index).desk.decide(one.digest, one.shown, "yes", "person")
        done: Matter = until(lambda: find(indices[0], "done"), "the verdict")
        return done.verdict


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("life")
    with room_on(folder / "room") as room:
        made = Scene(folder, room)
        yield made
        made.seeds.stop()
        made.group.stop()


def test_all_make_new_shares_once_every_person_agreed(scene: Scene) -> None:
    group, before = scene.group, ours(scene.group, AVON).manifest()
    about = call(group).digest()
    facts = dict(wait(group, BIRCH, about, "waiting").facts)
    assert facts["who calls"] == "Avon"
    assert facts["why"] == "as agreed by phone"
    assert facts["manifest in force"] == before.digest().hex()
    for index in (AVON, BIRCH, CEDAR):
        agree(group, index, about)
    until(lambda: len(scene.host.names(f"call/{about}/1-commit/")) == 3, "three commitments")
    until(lambda: "Delta" in wait(group, AVON, about, "working").status, "they wait for Delta")
    assert ours(group, AVON).manifest().epoch == 0
    everybody(group, about, DELTA)
    for index in range(4):
        wait(group, index, about, "done")
        manifest = ours(group, index).manifest()
        assert (manifest.epoch, manifest.predecessor) == (1, before.digest().hex())
        ours(group, index).verify_share(group.homes[index][1])
        assert [p.name for p in ours(group, index).path.glob("share-*.sealed")] == ["share-1.sealed"]
        key = identity(group, index).ed25519
        names = {(key, f"manifest/{link.digest().hex()}.json") for link in (before, manifest)}
        until(lambda names=names: names <= set(scene.host.names("manifest/")), "both manifests in the room")  # type: ignore[misc]
    scene.keep("refreshed")
    assert scene.certified(11, AVON, BIRCH, DELTA) == "PASSED"


def test_a_number_of_examples_changes(scene: Scene) -> None:
    group = scene.group
    terms = amend.propose(ours(group, AVON).manifest().terms, examples={2: 777})
    about = call(group, CEDAR, terms=terms).digest()
    facts = dict(wait(group, DELTA, about, "waiting").facts)
    assert facts["change 1"] == "Birch: examples 200 → 777"
    assert facts["the new terms' digest"] == terms.digest().hex()
    everybody(group, about, AVON, BIRCH, CEDAR, DELTA)
    assert {ours(group, index).manifest().terms.digest() for index in range(4)} == {terms.digest()}


def test_a_lost_share_comes_back(scene: Scene) -> None:
    group = scene.group
    ours(group, BIRCH).share_path().unlink()
    about = call(group, BIRCH, helpers=(1, 3)).digest()
    facts = dict(wait(group, AVON, about, "waiting").facts)
    assert "Birch lost its share" in facts["what"]
    assert "Avon, Cedar" in facts["what"]
    assert matter(group, DELTA, about) is None  # it was not asked
    for index in (AVON, CEDAR):
        agree(group, index, about)
    wait(group, BIRCH, about, "done")
    ours(group, BIRCH).verify_share(group.homes[BIRCH][1])
    scene.keep("recovered")


def test_a_member_leaves_another_comes_and_who_left_gets_nothing(scene: Scene) -> None:
    group = scene.group
    home, unlock = make_home(group.folder, "Elm")
    text = group.client(AVON).post("invite", count=1)["invitations"][0]
    Client(group.address, home.identity(unlock), group.consortium).join(urlsplit(text).fragment)
    Place(home.path).remember(Settings(group.address, group.consortium, 500))
    group.homes.append((home, unlock))
    group.start(ELM)
    before = ours(group, AVON).manifest()
    terms = amend.propose(before.terms, removed=[4], added=[(home.card(), 500)])
    with pytest.raises(InputError, match="another member"):
        call(group, terms=terms)
    about = call(group, terms=terms, new_shares=True).digest()
    facts = dict(wait(group, ELM, about, "waiting").facts)
    assert facts["manifest in force"] == before.digest().hex()
    assert "by phone" in facts["you are new"]
    shown = dict(wait(group, BIRCH, about, "waiting").facts)
    assert shown["terms.roster.4.ed25519"].endswith(f"→ {home.card().ed25519}")
    assert shown["terms.roster.4.x25519"].endswith(f"→ {home.card().x25519}")
    everybody(group, about, AVON, BIRCH, CEDAR, ELM)
    assert matter(group, DELTA, about) is None
    manifest = ours(group, ELM).manifest()
    assert manifest.digest() == ours(group, AVON).manifest().digest()
    assert [member.name for member in manifest.terms.roster] == ["Avon", "Birch", "Cedar", "Elm"]
    ours(group, ELM).verify_share(unlock)
    assert (ours(group, ELM).path / "anchor.safetensors").exists()
    scene.keep("reshared")
    former = group.client(DELTA)
    until(lambda: refused(former) == "room.not-a-member", "Delta's place is gone")
    for what in ("ticket", "entry"):
        with pytest.raises(RoomError) as caught:
            former.post(what, **({} if what == "ticket" else {"name": "note/1", "sha256": "ab" * 32}))
        assert caught.value.code == "room.not-a-member"
    assert scene.certified(12, AVON, BIRCH, ELM) == "PASSED"
    # started anew, an agent takes part in nothing that is over, and knows the verdicts of before
    birch = group.agent(BIRCH)
    before_it = sorted(scene.host.names("call/"))
    birch.stop()
    group.agents.remove(birch)
    group.start(BIRCH)
    desk = group.agent(BIRCH).desk
    until(lambda: sum(m.state == "done" for m in desk.matters() if m.kind == "call") == 3, "its calls are over")
    until(lambda: [m.verdict for m in desk.matters() if m.kind == "query"] == ["PASSED", "PASSED"], "both verdicts")
    assert sorted(scene.host.names("call/")) == before_it
    assert not ours(group, BIRCH).under_way()


def refused(client: Client) -> str:
    try:
        client.log(0)
    except RoomError as error:
        return error.code
    return ""


def test_nothing_secret_of_any_ceremony_is_in_the_room(scene: Scene) -> None:
    """Shares and salts of every epoch, the seeds of all ceremonies, keys and the signs that they are for, in the room's
    database, files and log; with controls."""
    content = b"".join(p.read_bytes() + bytes(16) for p in sorted(scene.room.folder.rglob("*")) if p.is_file())
    assert len(scene.shares) >= 12
    seeds = {home.path.name: scene.seeds.of(home.path.name, unlock) for home, unlock in scene.group.homes}
    assert {name: len(found) for name, found in seeds.items()} == {
        "Avon": 3,
        "Birch": 3,
        "Cedar": 3,
        "Delta": 2,  # it left
        "Elm": 1,  # it came
    }
    vectors = {point: scene.shares[f"{name} first"][0] for point, name in ((1, "Avon"), (2, "Birch"))}
    signs = signs_of(vectors, 2, ours(scene.group, AVON).chain()[0])
    suspect = np.frombuffer((scene.group.folder / "12.safetensors").read_bytes(), np.uint8)
    passed = {
        "a suspect": windows(suspect[-4096:]),
        "a public key": texts(bytes.fromhex(scene.group.homes[ELM][0].card().ed25519)),
    }
    wanted = scene.secrets | signs
    found = search(content, wanted | passed)
    assert found["a suspect"] > 0.99
    assert found["a public key"] > 0.1
    assert {name: part for name, part in found.items() if part and name not in passed} == {}
    share, salt = scene.shares["Elm reshared"]
    put = {
        "Elm reshared's share": share[500:600].tobytes(),
        "Elm reshared's share, written otherwise": base64.b64encode(share[:400].tobytes()),
        "Elm reshared's salts": salt.tobytes(),
        "Elm reshared's seed of the ceremony": next(iter(seeds["Elm"])).encode(),
    }
    planted = search(b"-----".join([content, *put.values()]), wanted)
    assert {name for name, part in planted.items() if part} == put.keys()


# --- a room that lies -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def founded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Group, Host]]:
    """Three members with a key; their agents are not running."""
    folder = tmp_path_factory.mktemp("lies")
    with room_on(folder / "room") as room:
        group = Group.join(folder / "members", room.address, members=3, threshold=2)
        group.start()
        group.found()
        group.stop()
        yield group, Host(room, group)
        group.stop()


@pytest.fixture(autouse=True)
def _still(founded: tuple[Group, Host]) -> Iterator[None]:
    yield
    founded[0].stop()


Lie = Callable[[Group, Host, Call, Terms], None]


def _other_terms(group: Group, host: Host, called: Call, terms: Terms) -> None:
    """The terms of the call with another threshold."""
    other = replace(terms, threshold=3)
    host.put(identity(group, AVON).ed25519, f"call/{called.digest()}/terms.json", other.to_bytes())


def _other_call(group: Group, host: Host, called: Call, _: Terms) -> None:
    other = replace(called, purpose="something else")
    message = identity(group, AVON).write(call_header(other, 1), other.to_bytes())
    host.put(identity(group, AVON).ed25519, f"call/{called.digest()}/call.msg", message)


def _not_signed(group: Group, host: Host, called: Call, _: Terms) -> None:
    message = identity(group, BIRCH).write(call_header(called, 1), called.to_bytes())
    host.put(identity(group, AVON).ed25519, f"call/{called.digest()}/call.msg", message)


def _a_stranger(group: Group, host: Host, called: Call, terms: Terms) -> None:
    stranger, start = Identity.generate("Mallory"), f"call/{called.digest()}"
    host.put(stranger.ed25519, f"{start}/terms.json", terms.to_bytes())
    host.put(stranger.ed25519, f"{start}/call.msg", stranger.write(call_header(called, 1), called.to_bytes()))
    host.withhold(identity(group, AVON).ed25519, f"{start}/call.msg")


def _words_of_another(group: Group, host: Host, called: Call, _: Terms) -> None:
    header = Header(called.manifest, called.digest(), "room/ask", 1)
    message = identity(group, AVON).write(header, called.to_bytes())
    host.put(identity(group, AVON).ed25519, f"call/{called.digest()}/call.msg", message)


@pytest.mark.parametrize("lie", [_other_terms, _other_call, _not_signed, _a_stranger, _words_of_another])
def test_a_call_that_was_swapped_is_not_put_before_the_member(founded: tuple[Group, Host], lie: Lie) -> None:
    group, host = founded
    terms = amend.propose(ours(group, AVON).manifest().terms, examples={2: 777})
    called = call(group, terms=terms)
    lie(group, host, called, terms)
    group.start(CEDAR)
    one = wait(group, CEDAR, called.digest(), "refused")
    assert one.code == "room.other-call"
    with pytest.raises(RoomError):
        group.agent(CEDAR).desk.decide(called.digest(), one.shown, "yes", "person")
    sent = [name for author, name in host.names("call/") if author == identity(group, CEDAR).ed25519]
    assert not sent


def test_a_request_of_another_member_is_not_helped_with(founded: tuple[Group, Host]) -> None:
    """Avon calls for a recovery with Birch's request in its place, or with helpers that it did not ask."""
    group, host = founded
    path, kept = ours(group, BIRCH).share_path(), group.folder / "kept"
    path.rename(kept)
    try:
        right = call(group, BIRCH, helpers=(1, 3))
        asked = host.read(identity(group, BIRCH).ed25519, f"call/{right.digest()}/request.msg")
        avon = identity(group, AVON)
        lies = [replace(right, caller=avon.ed25519), replace(right, caller=avon.ed25519, helpers=(2, 3))]
        for lie in lies:
            host.put(avon.ed25519, f"call/{lie.digest()}/request.msg", asked)
            host.put(avon.ed25519, f"call/{lie.digest()}/call.msg", avon.write(call_header(lie, 1), lie.to_bytes()))
        group.start(CEDAR)
        for lie in lies:
            assert wait(group, CEDAR, lie.digest(), "refused").code == "room.other-call"
        wait(group, CEDAR, right.digest(), "waiting")
    finally:
        group.stop()
        kept.rename(path)
        (ours(group, BIRCH).path / "recovery.sealed").unlink()


def test_terms_with_another_key_for_a_member_are_refused_by_that_member(founded: tuple[Group, Host]) -> None:
    """A caller who would put its own sealing key in Cedar's place."""
    group, _ = founded
    before = ours(group, AVON).manifest().terms
    stolen = replace(before.roster[2], x25519=Identity.generate("x").x25519)
    terms = replace(before, roster=(*before.roster[:2], stolen), created="2026-03-01T12:00:00Z")
    called = call(group, terms=terms)
    group.start(CEDAR)
    assert wait(group, CEDAR, called.digest(), "refused").code == "room.other-call"


def test_a_policy_agrees_to_named_calls_only_and_declining_sends_nothing(founded: tuple[Group, Host]) -> None:
    group, host = founded
    one, two, three = call(group), call(group), call(group)
    policy = Policy(agree=(one.digest(), one.manifest), askers=("Avon",), most_equations=99, most_a_day=99)
    group.start(CEDAR, policy=policy)
    wait(group, CEDAR, one.digest(), "working")
    wait(group, CEDAR, two.digest(), "waiting")
    agree(group, CEDAR, three.digest(), "no")
    wait(group, CEDAR, three.digest(), "declined")
    group.stop()
    cedar = identity(group, CEDAR).ed25519
    assert {name.split("/")[1] for author, name in host.names("call/") if author == cedar} == {one.digest()}
    ours(group, CEDAR).ceremony_path.unlink()  # as quorumark setup discard does


def test_a_home_that_was_set_back_in_a_refresh_sends_nothing(founded: tuple[Group, Host]) -> None:
    group, host = founded
    called, home = call(group), group.homes[CEDAR][0].path
    shutil.copytree(home, group.folder / "yesterday")
    group.start(CEDAR)
    agree(group, CEDAR, called.digest())
    until(lambda: host.names(f"call/{called.digest()}/1-commit/3"), "Cedar's commitment")
    group.stop()
    before = host.names("call/")
    shutil.rmtree(home)
    shutil.copytree(group.folder / "yesterday", home)
    group.start(CEDAR)
    agree(group, CEDAR, called.digest())
    assert wait(group, CEDAR, called.digest(), "refused").code == "room.set-back"
    assert host.names("call/") == before
    assert not ours(group, CEDAR).under_way()


def test_a_refresh_waits_names_a_damaged_message_and_goes_on(founded: tuple[Group, Host]) -> None:
    group, host = founded
    about, birch = call(group).digest(), identity(group, BIRCH).ed25519
    group.start(AVON, BIRCH)
    for index in (AVON, BIRCH):
        agree(group, index, about)
    name = f"call/{about}/1-commit/2.msg"
    until(lambda: len(host.names(f"call/{about}/1-commit/")) == 2, "both commitments")
    right = host.read(birch, name)
    host.withhold(birch, name)
    group.start(CEDAR)
    agree(group, CEDAR, about)
    until(lambda: "waiting for Birch (commit)" in wait(group, CEDAR, about, "working").status, "Cedar waits")
    for data, code in ((right[:-1] + bytes([right[-1] ^ 1]), "message.altered"), (b"", "message.malformed")):
        host.put(birch, name, data)
        until(lambda code=code: wait(group, CEDAR, about, "working").code == code, code)  # type: ignore[misc]
    host.put(birch, name, bytes(1 << 20))
    until(lambda: any("of Birch is refused" in text for text in group.agent(CEDAR).desk.troubles.values()), "its size")
    cedar = identity(group, CEDAR).ed25519
    assert (cedar, f"call/{about}/2-reveal/3.msg") not in host.names("call/")
    host.put(birch, name, right)
    until(lambda: not wait(group, CEDAR, about, "working").code, "the right one")
    group.stop()
    host.reverse()
    group.start()
    for index in range(3):
        wait(group, index, about, "done")
        ours(group, index).verify_share(group.homes[index][1])
    # replayed: the same call again is over, and does nothing
    before = {ours(group, index).manifest().digest() for index in range(3)}
    avon, word = identity(group, AVON).ed25519, f"call/{about}/call.msg"
    host.put(avon, word, host.read(avon, word))
    group.stop()
    group.start()
    wait(group, CEDAR, about, "done")
    assert {ours(group, index).manifest().digest() for index in range(3)} == before


def test_a_room_cannot_invent_the_consortium_that_a_new_member_joins(founded: tuple[Group, Host]) -> None:
    """The call names the manifest, the person compares its digest; the room gives another, none, or one unsigned."""
    group, host = founded
    home, unlock = make_home(group.folder, "Delta")
    text = group.client(AVON).post("invite", count=1)["invitations"][0]
    Client(group.address, home.identity(unlock), group.consortium).join(urlsplit(text).fragment)
    Place(home.path).remember(Settings(group.address, group.consortium, 400))
    group.homes.append((home, unlock))
    manifest = ours(group, AVON).manifest()
    terms = amend.propose(manifest.terms, added=[(home.card(), 400)])
    called, name = call(group, terms=terms), f"manifest/{manifest.digest().hex()}.json"
    authors = [author for author, found in host.names("manifest/") if found == name]
    right = host.read(authors[0], name)
    unsigned = replace(manifest, signatures={}).to_bytes()
    fewer = replace(manifest, signatures={**manifest.signatures, 1: "00" * 64}).to_bytes()
    first = ours(group, AVON).chain()[0].to_bytes()
    codes = []
    try:
        for data in (unsigned, fewer, first):
            for author in authors:
                host.put(author, name, data)
            group.start(DELTA)
            codes.append(wait(group, DELTA, called.digest(), "refused").code)
            group.stop()
        for author in authors:
            host.put(author, name, right)
        group.start(DELTA)
        wait(group, DELTA, called.digest(), "waiting")
    finally:
        group.stop()
        group.homes.pop()
    assert set(codes) <= {"room.not-found", "room.other-call"}
    assert Manifest.from_bytes(right).digest() == manifest.digest()
