"""A spot audit in a room: a public coin, openings that people agreed to, and what everybody's ledger knows then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from quorumark.errors import RoomError
from quorumark.room.auditing import bring_audit
from quorumark.room.desk import Matter
from quorumark.room.place import Policy
from quorumark.verify.audit import check_audit
from quorumark.verify.certificate import Certificate
from quorumark.verify.challenge import Challenge
from quorumark.verify.ledger import Ledger
from quorumark.verify.proof import Audit, explain
from quorumark.verify.query import prepare_again
from quorumark.verify.reference import Reference
from tests.kit.rooms import Group, Host, about, identity, put_question, room_on, until

pytest.importorskip("starlette")
pytestmark = pytest.mark.room
AVON, BIRCH, CEDAR, DELTA = range(4)


class Scene:
    """Four members; three answered about a suspect, and two of them must open."""

    def __init__(self, group: Group, host: Host) -> None:
        self.group, self.host = group, host
        self.suspect = group.marked()
        query = put_question(group, self.suspect, answers=3)
        self.query = query.digest()
        for index in (AVON, BIRCH, CEDAR):
            one: Matter = until(lambda index=index: self._query(index, "waiting"), "the query")  # type: ignore[misc]
            group.agent(index).desk.decide(one.digest, one.shown, "yes", "person")
        for index in range(4):
            until(lambda index=index: self._query(index, "done"), "the verdict")  # type: ignore[misc]
        path = group.homes[AVON][0].path / "room" / group.consortium / "certificates" / self.query / "certificate.json"
        self.certificate = Certificate.from_bytes(path.read_bytes())

    def _query(self, index: int, state: str) -> Matter | None:
        found = about(self.group, index, self.query)()
        return found if found is not None and found.state == state else None

    def bring(self, seed: int) -> Challenge:
        group = self.group
        coin = bytes([seed]) * 32
        home, avon = group.homes[AVON][0], identity(group, AVON)
        return bring_audit(group.client(AVON), home, avon, self.certificate, "the court", coin, "a beacon's pulse 1")

    def matter(self, index: int, asked: Challenge, state: str) -> Matter:
        def look() -> Matter | None:
            every = self.group.agent(index).desk.matters()
            name = asked.digest()
            found = (m for m in every if name[:12] in m.title or dict(m.facts).get("audit") == name)
            return next((one for one in found if one.state == state), None)

        found: Matter = until(look, f"{state} at {index}")
        return found

    def ledger(self, index: int) -> Ledger:
        ours = self.group.homes[index][0].only_consortium()
        return Ledger.open(ours, ours.manifest())


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("audit")
    with room_on(folder / "room") as room:
        group = Group.join(folder / "members", room.address, members=4, threshold=2)
        group.start()
        group.found()
        yield Scene(group, Host(room, group))
        group.stop()


Lie = Callable[[Scene, Challenge], None]


def _other_leaves(scene: Scene, asked: Challenge) -> None:
    """More leaves than the coin draws."""
    other = replace(asked, leaves=tuple(sorted({*asked.leaves, 0, 1, 2, 3, 4, 5, 6, 7})))
    scene.host.put(identity(scene.group, AVON).ed25519, f"audit/{asked.digest()}/challenge.json", other.to_bytes())


def _other_certificate(scene: Scene, asked: Challenge) -> None:
    data = scene.certificate.to_bytes()
    changed = data.replace(b'"keyid"', b'"keyiD"') if b'"keyid"' in data else data[:-10]
    scene.host.put(identity(scene.group, AVON).ed25519, f"audit/{asked.digest()}/certificate.json", changed)


def _other_words(scene: Scene, asked: Challenge) -> None:
    name, avon = f"audit/{asked.digest()}/word.msg", identity(scene.group, AVON).ed25519
    scene.host.put(avon, name, scene.host.read(avon, name).replace(b"the court", b"a friend."))


@pytest.mark.parametrize("lie", [_other_leaves, _other_certificate, _other_words])
def test_an_audit_that_was_swapped_is_not_put_before_the_member(scene: Scene, lie: Lie) -> None:
    scene.group.stop()
    asked = scene.bring(10 + len(lie.__name__))
    lie(scene, asked)
    scene.group.start()
    matter = scene.matter(BIRCH, asked, "refused")
    assert matter.code == "room.other-audit"
    with pytest.raises(RoomError):
        scene.group.agent(BIRCH).desk.decide(matter.digest, matter.shown, "yes", "person")
    assert not [name for _, name in scene.host.names(f"audit/{asked.digest()}/") if name.endswith("opening.json")]


def test_no_policy_opens_anything(scene: Scene) -> None:
    group, asked = scene.group, scene.bring(2)
    agent = group.agent(CEDAR)
    agent.stop()
    group.agents.remove(agent)
    group.start(CEDAR, policy=Policy(agree=(asked.digest(),), askers=("Avon",), most_equations=99, most_a_day=99))
    until(lambda: "0 of 2 openings" in scene.matter(CEDAR, asked, "waiting").status, "Cedar was asked")
    assert group.agent(CEDAR).desk.said(scene.matter(CEDAR, asked, "waiting").digest) == ("", "")
    assert not scene.ledger(CEDAR).burnt()


def test_two_open_by_a_public_coin_and_all_ledgers_know_it(scene: Scene) -> None:
    group, asked = scene.group, scene.bring(1)
    facts = dict(scene.matter(BIRCH, asked, "waiting").facts)
    assert facts["who brings it"] == "Avon"
    assert facts["the coin"] == f"{asked.seed}, drawn by a beacon's pulse 1"
    assert facts["what you open"].startswith(f"{len(asked.leaves)} of ")
    assert facts["audit"] == asked.digest()
    scene.matter(DELTA, asked, "working")  # it did not answer: it has nothing to open
    before = [scene.ledger(index).burnt() for index in range(4)]
    assert before == [()] * 4
    # Cedar declines, Avon opens; a false opening in Delta's name is passed over; then Birch opens
    for index, said in ((CEDAR, "no"), (AVON, "yes")):
        matter = scene.matter(index, asked, "waiting")
        group.agent(index).desk.decide(matter.digest, matter.shown, said, "person")
    start = f"audit/{asked.digest()}"
    until(lambda: (identity(group, AVON).ed25519, f"{start}/opening.json") in scene.host.names(start), "Avon's opening")
    opening = scene.host.read(identity(group, AVON).ed25519, f"{start}/opening.json")
    scene.host.put(identity(group, DELTA).ed25519, f"{start}/opening.json", opening)
    until(lambda: any("opening of Delta" in text for text in group.agent(BIRCH).desk.troubles.values()), "refused")
    assert not scene.ledger(CEDAR).burnt()
    matter = scene.matter(BIRCH, asked, "waiting")
    group.agent(BIRCH).desk.decide(matter.digest, matter.shown, "yes", "person")
    for index in range(4):
        scene.matter(index, asked, "done")
        assert scene.ledger(index).burnt() == asked.leaves
    # the proof that is in the room holds for anybody, and the audit shows the mark
    avon = identity(group, AVON).ed25519
    until(lambda: (avon, f"{start}/proof.json") in scene.host.names(start), "the proof")
    proof = Audit.from_bytes(scene.host.read(avon, f"{start}/proof.json"))
    reference = Reference.read(group.homes[DELTA][0].only_consortium().manifest_path)
    assert explain(reference.chain, [proof]) == {asked.digest(): asked.leaves}
    prepared = prepare_again(reference, scene.suspect, scene.certificate.finding.query)
    result = check_audit(asked, prepared.query, prepared.form.x, reference.chain, list(proof.openings))
    assert result.verdict == "PASSED"
    assert result.proof
    # the next query leaves it out, and members answer that
    query = put_question(group, group.marked("later.safetensors", seed=7), answers=2)
    assert query.burnt == asked.leaves
    later: Matter = until(about(group, DELTA, query.digest()), "the next query")
    assert later.state == "waiting"
