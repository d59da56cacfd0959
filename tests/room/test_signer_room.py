"""An agent without a share: another process holds it, makes it with the others, and answers what a person approved."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quorumark.consortium.home import HomeFolder
from quorumark.consortium.identity import Identity
from quorumark.consortium.keystore import Unlock
from quorumark.errors import QuorumarkError, RoundError
from quorumark.model.suspect import read_suspect
from quorumark.node.member import MemberNode
from quorumark.node.queries import pack_query
from quorumark.node.signer import SignerClient, SignerServer
from quorumark.room.agent import Agent
from quorumark.room.desk import Matter
from quorumark.room.place import Place
from quorumark.verify import approval as approval_module
from quorumark.verify.approval import approve, ask_for_ledger
from quorumark.verify.certificate import Certificate
from quorumark.verify.evidence import Query
from quorumark.verify.ledger import Ledger
from quorumark.verify.reference import Reference
from tests.kit.rooms import Group, about, identity, put_question, room_on, until

pytest.importorskip("starlette")
pytestmark = pytest.mark.room


class Signer:
    """`quorumark member serve` of Avon, in a thread."""

    def __init__(self, home: HomeFolder, unlock: Unlock, socket: Path) -> None:
        self.home, self.unlock, self.socket = home, unlock, socket
        self._server: SignerServer | None = None
        self._thread: threading.Thread | None = None

    def start(self, **pins: str) -> None:
        self._server = SignerServer(MemberNode(self.home, self.unlock, **pins), self.socket)  # type: ignore[arg-type]
        self._thread = threading.Thread(target=self._server.serve, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.stop()
            self._thread.join()
            self._server = None


class Scene:
    def __init__(self, group: Group, folder: Path) -> None:
        self.group = group
        home, unlock = group.homes[0]
        self.signer = Signer(home, unlock, folder / "signer.sock")
        # the agent's home: identity and card, nothing of a key
        home.backup(folder / "identity.tar", shares=False)
        self.home = HomeFolder.restore(folder / "identity.tar", folder / "agent")
        Place(self.home.path).remember(Place(home.path).settings())
        self.agent = self.start()
        group.start(1, 2)

    def start(self) -> Agent:
        agent = Agent(self.home, self.signer.unlock, signer=self.signer.socket)
        agent.start()
        return agent

    def matter(self, kind: str) -> Matter:
        return until(lambda: next((m for m in self.agent.desk.matters() if m.kind == kind), None), kind)  # type: ignore[no-any-return]

    def decide(self, matter: Matter) -> None:
        self.agent.desk.decide(matter.digest, matter.shown, "yes", "person")

    def query(self, query: Query) -> Matter:
        def look() -> Matter | None:
            matters = self.agent.desk.matters()
            return next((m for m in matters if dict(m.facts).get("query") == query.digest()), None)

        return until(look, "the query")  # type: ignore[no-any-return]

    def ledgers(self) -> tuple[bytes, bytes]:
        places = (self.home.only_consortium(), self.signer.home.only_consortium())
        return tuple(p.ledger_path.read_bytes() if p.ledger_path.exists() else b"" for p in places)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("signer")
    with room_on(folder / "room") as room:
        group = Group.join(folder / "members", room.address, members=3, threshold=2)
        made = Scene(group, folder)
        yield made
        made.agent.stop()
        made.signer.stop()
        group.stop()


def test_the_signer_makes_its_share_with_the_others_once_its_operator_pinned_the_terms(scene: Scene) -> None:
    scene.signer.start()
    digest = scene.group.terms().digest().hex()
    scene.group.propose(1)
    until(lambda: scene.matter("terms").state == "waiting", "the terms")
    scene.decide(scene.matter("terms"))
    for index in (1, 2):
        scene.group.decide(index, "terms")
    until(lambda: scene.matter("terms").code == "room.signer", "the signer has pinned nothing")
    assert digest in scene.matter("terms").status
    assert not (scene.home.path / "consortia").exists() or not list(scene.home.path.glob("consortia/*/share*"))
    scene.signer.stop()
    scene.signer.start(terms=digest)
    until(lambda: scene.matter("terms").state == "done", "the key")
    for index in (1, 2):
        scene.group.matter(index, "terms", "done")
    assert not list(scene.home.path.rglob("share-*"))  # the agent's home never had it
    assert not list(scene.home.path.rglob("ceremony.sealed"))
    scene.signer.home.only_consortium().verify_share(scene.signer.unlock)
    assert scene.home.only_consortium().manifest() == scene.signer.home.only_consortium().manifest()
    with pytest.raises(QuorumarkError):
        scene.home.only_consortium().verify_share(scene.signer.unlock)
    for name in ("layout.json", "anchor.safetensors"):  # a signer gets them with each query; the test's kit wants them
        shutil.copy(scene.group.folder / "agreed" / name, scene.signer.home.only_consortium().path)


def test_what_a_person_approves_is_answered_and_signed_there(scene: Scene) -> None:
    query = put_question(scene.group, scene.group.marked(), index=1)
    until(lambda: scene.query(query).state == "waiting", "it waits")
    assert scene.ledgers() == (b"", b"")
    scene.decide(scene.query(query))
    matter: Matter = until(about(scene.group, 2, query.digest()), "the query at Cedar")
    scene.group.agent(2).desk.decide(matter.digest, matter.shown, "yes", "person")
    until(lambda: scene.query(query).verdict == "PASSED", "the verdict")
    papers = scene.agent.report(scene.query(query).digest)
    assert papers is not None
    certificate = Certificate.from_bytes(papers.certificate.read_bytes())
    manifest = scene.home.only_consortium().manifest()
    assert [member.name for member in certificate.signers(manifest)] == ["Avon", "Cedar"]
    until(lambda: scene.ledgers()[0] == scene.ledgers()[1] != b"", "the copy of the ledger")
    ledger = Ledger.open(scene.home.only_consortium(), manifest)
    kinds = [(entry["kind"], entry.get("approved_by")) for entry in ledger.entries]
    assert kinds == [("answered", "person")]  # two answers cannot tell a liar: the outcome stays open
    standing = scene.agent.client()
    words = [one.name for one in standing.whole_log() if one.author == scene.agent.identity.ed25519]
    assert any(name.startswith("standing/") for name in words)
    assert not [text for where, text in scene.agent.desk.troubles.items() if where == "agent"]


def packed(scene: Scene, suspect: Path, query: Query) -> tuple[dict[str, Any], dict[str, Any]]:
    reference = Reference.read(scene.group.homes[1][0].only_consortium().manifest_path)
    return pack_query(reference, read_suspect(suspect), query)


def test_who_reaches_the_socket_gets_no_answer_without_this_members_word(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine's code, which may reach the socket too, with all that it can see or make."""
    group = scene.group
    suspect = group.marked("again.safetensors", seed=3)
    query = put_question(group, suspect, index=1)
    other = put_question(group, group.marked("other.safetensors", seed=4), index=1)
    manifest, avon = scene.home.only_consortium().manifest(), identity(group, 0)
    config, arrays = packed(scene, suspect, query)
    engine = SignerClient(scene.signer.socket)
    stranger = Identity.generate("Avon")
    bad = {
        "nothing": {},
        "another query's": {"approval": approve(avon, manifest, other)},
        "another member's": {"approval": approve(identity(group, 1), manifest, query)},
        "junk": {"approval": b"yes"},
        "the word for the ledger": {"approval": ask_for_ledger(avon, manifest)},
    }
    before = [entry for entry in lines(scene) if entry["kind"] == "answered"]
    for approval in bad.values():
        with pytest.raises(RoundError):
            engine.handle("answer", {**config, **approval}, arrays)
    with pytest.raises(QuorumarkError):
        approve(stranger, manifest, query)  # no member has this key
    assert [entry for entry in lines(scene) if entry["kind"] == "answered"] == before
    for asked in (b"", ask_for_ledger(identity(group, 1), manifest), approve(avon, manifest, query)):
        with pytest.raises(RoundError):
            engine.handle("ledger", {"asked": asked, "have-bytes": 0}, {})
    with monkeypatch.context() as patch:  # without the check, an answer for anybody
        patch.setattr(approval_module, "check_approval", lambda *_: None)
        assert b"answer" in engine.handle("answer", {**config, "approval": b"yes"}, arrays)[0]["partial"]
        patch.setattr(approval_module, "check_asked", lambda *_: None)
        assert engine.handle("ledger", {"asked": b"", "have-bytes": 0}, {})[1]["ledger"].size
    # with the member's own word it is answered
    reply, _ = engine.handle("answer", {**config, "approval": approve(avon, manifest, query)}, arrays)
    assert b"answer" in reply["partial"]


def lines(scene: Scene) -> list[dict[str, Any]]:
    return [json.loads(line) for line in scene.ledgers()[1].splitlines()]


def test_the_agent_goes_on_when_its_signer_was_away(scene: Scene) -> None:
    scene.signer.stop()
    query = put_question(scene.group, scene.group.marked("away.safetensors", seed=5), index=1)
    until(lambda: "does not answer" in scene.agent.desk.troubles.get("agent", ""), "it says so")
    scene.signer.start()
    until(lambda: scene.query(query).state == "waiting", "it waits")
    until(lambda: not scene.agent.desk.troubles.get("agent"), "it is over")
    scene.agent.stop()
    scene.agent = scene.start()
    until(lambda: scene.query(query).state == "waiting", "after a restart as well")
    until(lambda: scene.ledgers()[0] == scene.ledgers()[1], "one ledger")


def test_a_signer_that_was_set_back_is_noticed(scene: Scene) -> None:
    ours = scene.signer.home.only_consortium()
    kept = {path: path.read_bytes() for path in (ours.ledger_path, ours.ledger_head_path)}
    assert kept[ours.ledger_path]
    for path in kept:
        path.unlink()
    try:
        until(lambda: "does not continue the copy" in scene.agent.desk.troubles.get("agent", ""), "it is noticed")
    finally:
        for path, content in kept.items():
            path.write_bytes(content)
    until(lambda: not scene.agent.desk.troubles.get("agent"), "it is over")
