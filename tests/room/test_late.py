"""Answers that come after the certificate: it is made anew with them, and a liar among them takes nothing back."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from quorumark.consortium.policy import Policy
from quorumark.errors import RoomError
from quorumark.field import P
from quorumark.room import answering, combining
from quorumark.room.desk import Matter
from quorumark.verify.answer import answer
from quorumark.verify.certificate import Certificate
from quorumark.verify.evidence import Partial, Query
from quorumark.verify.ledger import Ledger
from quorumark.verify.reference import Reference
from tests.kit.consortium import NAMES
from tests.kit.rooms import Group, about, identity, put_question, room_on, until, visit

pytest.importorskip("starlette")
pytestmark = pytest.mark.room

from quorumark.room.agent_page import AgentPage  # noqa: E402 - after the check that its packages are there

Result = tuple[str, int, tuple[int, ...]]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    folder = tmp_path_factory.mktemp("late")
    with room_on(folder / "room") as room:
        made = Group.join(folder / "members", room.address, members=5, threshold=3)
        made.start()
        made.found(policy=Policy(budget=200))
        yield made
        made.stop()


class Asked:
    """A query that three of five have answered, and its certificate."""

    def __init__(self, group: Group, name: str, seed: int) -> None:
        self.group = group
        self.suspect = group.marked(f"{name}.safetensors", rho=0.1, seed=seed)
        self.query: Query = put_question(group, self.suspect, name, answers=3)
        for index in range(3):
            self.say(index)
        self.wait(("PASSED", 3, ()))

    def matter(self, index: int) -> Matter:
        found: Matter = until(about(self.group, index, self.query.digest()), "the query")
        return found

    def say(self, index: int) -> None:
        until(lambda: (m := self.matter(index)).state == "waiting" or m.late, f"it waits at {NAMES[index]}")
        matter = self.matter(index)
        self.group.agent(index).desk.decide(matter.digest, matter.shown, "yes", "person")

    def result(self, index: int) -> Result | None:
        """By the certificate that this member's agent hands out."""
        papers = self.group.agent(index).report(self.matter(index).digest)
        if papers is None:
            return None
        finding = Certificate.from_bytes(papers.certificate.read_bytes()).finding
        return finding.verdict, len(finding.partials), finding.wrong

    def wait(self, wanted: Result, indices: tuple[int, ...] = (0, 1, 2)) -> None:
        until(lambda: all(self.result(i) == wanted for i in indices), f"{wanted}: {[self.result(i) for i in indices]}")

    def names(self) -> list[str]:
        start = f"query/{self.query.digest()}/"
        return [one.name.removeprefix(start) for one in self.group.client(0).whole_log() if one.name.startswith(start)]

    def lie(self, index: int, **changes: Any) -> None:
        """This member's own answer, changed, and signed by it; its agent is not running."""
        home, unlock = self.group.homes[index]
        reference = Reference.read(home.only_consortium().manifest_path)
        made = answer(home, unlock, reference, self.suspect, self.query, approved=True)
        about = {f.name: getattr(made, f.name) for f in fields(made) if f.name not in ("signature", *changes)}
        lied = Partial.sign(identity(self.group, index), **about, **changes)
        self.group.client(index).upload(lied.to_bytes(), f"query/{self.query.digest()}/partial.json")


@pytest.fixture
def only_four(group: Group) -> Iterator[None]:
    """Delta's agent is away; Delta itself is not."""
    group.stop()
    group.start(0, 1, 2, 4)
    yield
    group.stop()
    group.start()


def test_late_answers_are_added_one_after_the_other(group: Group) -> None:
    asked = Asked(group, "first", 1)
    page = AgentPage(group.agent(3))
    page.start()
    try:
        until(lambda: asked.matter(3).late, "Delta can still answer")
        matter = asked.matter(3)
        assert (matter.state, matter.verdict) == ("done", "PASSED")
        place = f"{page.address}q/{matter.digest}"
        assert "Approve, and add your answer" in visit(place)[2]
        with pytest.raises(RoomError):  # who says nothing declines
            group.agent(3).desk.decide(matter.digest, matter.shown, "no", "person")
        assert "1 waiting" not in visit(page.address)[2]
        asked.say(3)
        asked.wait(("PASSED", 4, ()), (0, 1, 2, 3, 4))
        until(lambda: "add your answer" not in visit(place)[2], "Delta has answered")
        until(lambda: '<td>Delta</td><td><span class="done">answered and signed' in visit(place)[2], "and signed")
        assert "Delta" in visit(f"{place}/report.html")[2]
    finally:
        page.stop()
    asked.say(4)
    asked.wait(("PASSED", 5, ()), (0, 1, 2, 3, 4))
    for wanted in ("certificate", "report"):
        ends = ["", "-4", "-5"]
        end = "json" if wanted == "certificate" else "html"
        assert sorted(n for n in asked.names() if n.startswith(wanted)) == sorted(f"{wanted}{e}.{end}" for e in ends)
    before = sorted(asked.names())
    group.stop()
    group.start()
    asked.wait(("PASSED", 5, ()), (0, 1, 2, 3, 4))
    assert sorted(asked.names()) == before  # nothing is done twice
    for home, _ in group.homes:
        ours = home.only_consortium()
        entries = Ledger.open(ours, ours.manifest()).entries
        assert sum(one["kind"] == "answered" and one["x"] == asked.query.x for one in entries) == 1


def names_a_misfit(group: Group, index: int) -> bool:
    return any("does not fit" in text for text in group.agent(index).desk.troubles.values())


@pytest.mark.usefixtures("only_four")
def test_a_late_liar_is_not_followed_and_later_named(group: Group) -> None:
    asked = Asked(group, "liar", 2)
    asked.lie(3, answer=str(12345 % P))
    until(lambda: names_a_misfit(group, 0), "it is named")
    assert "Delta" in next(text for text in group.agent(0).desk.troubles.values() if "does not fit" in text)
    for index in (1, 2, 4):  # not only by the asker, who could be silent about it
        until(lambda index=index: names_a_misfit(group, index), NAMES[index])  # type: ignore[misc]
    assert [asked.result(index) for index in (0, 1, 2, 4)] == [("PASSED", 3, ())] * 4
    assert [asked.matter(index).state for index in (0, 1, 2, 4)] == ["done"] * 4
    asked.say(4)  # a fifth answer tells who is wrong
    asked.wait(("PASSED", 5, (4,)), (0, 1, 2, 4))
    for index in (0, 1, 2, 4):
        until(lambda index=index: not names_a_misfit(group, index), "it is over")  # type: ignore[misc]


INVENTED = {hashlib.sha256(bytes([n])).hexdigest(): "failed" for n in range(150)}
"""Queries that never were, which raise the threshold above what this suspect has."""


@pytest.mark.usefixtures("only_four")
def test_a_late_answer_takes_no_proof_back(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(group, "inventor", 3)
    asked.lie(3, history=INVENTED)
    until(lambda: any("it would say FAILED" in text for text in group.agent(0).desk.troubles.values()), "it is named")
    assert [asked.result(index) for index in (0, 1, 2, 4)] == [("PASSED", 3, ())] * 4
    # an asker that lies as well combines it all the same: the others do not sign
    with monkeypatch.context() as patch:
        patch.setattr(combining, "follows", lambda *_: True)
        patch.setattr(answering, "follows", lambda later, _: len(later.finding.partials) == 3)
        group.stop()
        group.start(0, 1, 2, 4)
        until(lambda: "combined-4.msg" in asked.names(), "the asker lies")
        assert [asked.result(index) for index in (1, 2, 4)] == [("PASSED", 3, ())] * 3
        assert "signed-4.json" not in asked.names()
        patch.setattr(answering, "follows", lambda *_: True)  # without the check they would
        group.stop()
        group.start(0, 1, 2, 4)
        until(lambda: asked.names().count("signed-4.json") == 3, "they sign")
