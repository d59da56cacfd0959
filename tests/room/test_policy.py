"""What an agent decides by a policy: no more than that, and no longer than it is given."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from quorumark.room.asking import ask
from quorumark.room.desk import Matter
from quorumark.room.place import Decisions, Policy
from quorumark.verify.ledger import Ledger
from tests.kit.rooms import Group, room_on, until

pytest.importorskip("starlette")
pytestmark = pytest.mark.room
CEDAR = 2


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    folder = tmp_path_factory.mktemp("policy")
    with room_on(folder / "room") as room:
        made = Group.join(folder / "members", room.address, members=3, threshold=2)
        made.start()
        made.found()
        made.stop()
        yield made
        made.stop()


def put_question(group: Group, seed: int) -> str:
    home, unlock = group.homes[0]
    suspect = group.marked(f"{seed}.safetensors", seed=seed)
    return ask(group.client(0), home, home.identity(unlock), suspect, "a reseller", answers=2).digest()


def matter(group: Group, query: str) -> Matter | None:
    every = group.agent(CEDAR).desk.matters()
    return next((m for m in every if m.state != "checking" and dict(m.facts).get("query") == query), None)


def settled(group: Group, query: str) -> tuple[str, str]:
    """State and decider of a query, once the agent has gone past it: the status says how many answers there are."""
    found = until(lambda: (m := matter(group, query)) is not None and m.status and m, "the query at Cedar")
    return found.state, group.agent(CEDAR).desk.said(found.digest)[1]


def answers(group: Group) -> list[str]:
    ours = group.homes[CEDAR][0].only_consortium()
    return [e["approved_by"] for e in Ledger.open(ours, ours.manifest()).entries if e["kind"] == "answered"]


def test_a_policy_answers_up_to_its_limit_and_what_is_beyond_waits_for_a_person(group: Group) -> None:
    policy = Policy(askers=("Avon",), most_a_day=1)
    one, two = put_question(group, 1), put_question(group, 2)
    group.start(CEDAR, policy=policy)
    assert settled(group, one) == ("working", "policy")
    assert settled(group, two) == ("waiting", "")
    assert answers(group) == ["rules"]
    group.stop()
    # without the policy nothing that it said holds, and nothing more is answered
    group.start(CEDAR)
    assert settled(group, one) == ("waiting", "")
    assert settled(group, two) == ("waiting", "")
    assert answers(group) == ["rules"]
    waits = matter(group, two)
    assert waits is not None
    group.agent(CEDAR).desk.decide(waits.digest, waits.shown, "yes", "person")
    until(lambda: answers(group) == ["rules", "person"], "Cedar's own answer")
    group.stop()


@pytest.mark.parametrize(
    "rules", [{"approve": "ask"}, {"approve": "always", "max_queries_per_day": 0}], ids=["ask", "none a day"]
)
def test_the_members_own_rules_hold_beside_a_policy(group: Group, rules: dict[str, object]) -> None:
    path: Path = group.homes[CEDAR][0].rules_path
    query = put_question(group, 3 + len(rules))
    before = answers(group)
    path.write_text(json.dumps({"format": "quorumark-answer-rules/v1", **rules}))
    try:
        group.start(CEDAR, policy=Policy(askers=("Avon",), most_a_day=100))
        assert settled(group, query) == ("waiting", "")
        assert answers(group) == before
    finally:
        group.stop()
        path.unlink()


def test_terms_that_a_policy_agreed_to_wait_for_a_person_without_it(group: Group, tmp_path: Path) -> None:
    other = Group.join(tmp_path, group.address, members=3, threshold=2)
    other.terms()
    digest = other.propose()
    other.start(CEDAR, policy=Policy(agree=(digest,)))
    desk = other.agent(CEDAR).desk
    until(lambda: other.matter(CEDAR, "terms", "working"), "the ceremony begins")
    assert desk.said(digest) == ("yes", "policy")
    other.stop()
    other.start(CEDAR)
    other.matter(CEDAR, "terms", "waiting")
    until(lambda: other.agent(CEDAR).desk.said(digest) == ("", ""), "the policy's word is withdrawn")
    other.decide(CEDAR, "terms")
    other.matter(CEDAR, "terms", "working")
    other.stop()


def test_only_a_policys_decision_can_be_withdrawn(tmp_path: Path) -> None:
    made = Decisions(tmp_path / "decisions.json")
    made.make("aa", "yes", "person")
    made.make("bb", "yes", "policy")
    made.withdraw("aa")
    made.withdraw("bb")
    again = Decisions(tmp_path / "decisions.json")
    assert (again.of("aa"), again.by("aa"), again.of("bb")) == ("yes", "person", "")
    again.make("bb", "no", "person")
    assert again.of("bb") == "no"
