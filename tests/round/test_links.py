"""Cohorts with checked sums: links from state to state (docs/secagg.md, "Links"). What members follow, sign and refuse,
with a control for each defence in which it is taken out, and the attack goes through."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quorumark.errors import MessageError, RoundError
from quorumark.node.consent import give_consent
from quorumark.node.journal import allow_repeats
from quorumark.round import links, statements
from quorumark.round.applied import OPTIMISER
from quorumark.round.group import group_of
from quorumark.round.history import History
from quorumark.round.links import Link
from quorumark.round.memory import FolderState
from quorumark.round.secagg.member import SecAggMember
from quorumark.simulation import Losses
from tests.kit.drawn import EIGHT, Drawn, Forked, fork, identity, journal, memory_of, others, signed_by, whole_links
from tests.kit.flowers import Consortium, Model, same
from tests.kit.refusals import stopped
from tests.kit.rounds import Run
from tests.kit.states import amend, lose_memory, with_cohorts


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Consortium:
    return with_cohorts(tmp_path_factory.mktemp("links"), *EIGHT, sums="checked")


@pytest.fixture
def world(made: Consortium, tmp_path: Path) -> Consortium:
    return made.copy(tmp_path / "world")


# --- runs that go on --------------------------------------------------------------------------------------


def test_a_run_of_cohorts_is_the_one_in_one_process(world: Consortium) -> None:
    """Members who come back after several rounds follow the links of all that they missed, and no more; nobody
    refuses, and the models are those of a federation in one process."""
    run, shown = Drawn(world, folder=world.folder / "run"), list[int]()
    for _ in range(9):
        before = {x: links.reached(memory_of(world, x)) for x in range(1, 9)}
        run.round()
        assert run.refused == {}
        for x in run.server.members:
            since = run.server.links(before[x].hex())
            assert len(since) == 0 or since[0].before == (before[x] or run.server.history.begun)
            shown.append(len(since))
    assert max(shown) > 1
    assert same(run.model, world.in_process(9, 11).model)  # type: ignore[arg-type]


def test_members_who_are_lost_are_seconded(world: Consortium) -> None:
    """T members are summed, and one of them is lost for ever once the sum is open: a member of the cohort that had no
    part in it seconds what the others say. With two lost the run waits, and says for whom."""
    run = Drawn(world)
    run.round()
    run.server.prepare(run.ask, run.model)
    first, lost, *rest = run.server.cohort
    run.round(absent=[first])
    assert run.server.members == (lost, *rest)
    run.gone = [lost, rest[0]]
    with stopped("round.link-waits", names=f"Hospital {lost}"):
        run.server.prepare(run.ask, run.model)
    run.gone = [lost]
    run.server.prepare(run.ask, run.model)
    last = whole_links(run)[-1]
    assert (set(last.summed), set(last.seconded)) == (set(rest), {first})
    run.gone = ()
    run.round()
    assert run.refused == {}


def test_a_server_that_dies_gathers_again(world: Consortium) -> None:
    """With its folder, in which links are kept; or without, from what members hand out."""
    folder = world.folder / "run"
    run = Drawn(world, folder=folder)
    for _ in range(5):
        run.round()
    run.gone = run.server.members[:2]
    with stopped("round.link-waits"):
        run.round()
    again = Drawn(world, folder=folder, run="2")
    assert len((folder / "links.jsonl").read_text().split()) == 4
    again.round()
    assert again.refused == {}
    again.round()
    lost = Drawn(world, run="3")
    lost.server.survey(lost.ask, go_on=True)
    lost.model = dict(lost.server.resumed or {})
    assert lost.server.history.mark.round == 6  # nobody was told the last sum: it is made again
    lost.round()
    assert same(dict(lost.model), dict(again.model))
    for _ in range(4):
        lost.round()
        assert lost.refused == {}


@pytest.mark.parametrize("allowed", ["a simulation", "consent"])
def test_a_second_run_begins_anew(world: Consortium, allowed: str) -> None:
    """Homes that were made for a simulation may begin again, and others with their operators' consent: what they signed
    and reached in the first run binds them no more."""
    first = Run(world)
    if allowed == "a simulation":
        for x in range(1, 9):
            home, unlock = world.home(x)
            allow_repeats(home.only_consortium(), home.identity(unlock))
    for _ in range(4):
        first.round()
    if allowed == "consent":
        with stopped("round.too-few"):
            Drawn(world, run="2", after=first.server.round_no).round()
        for x in range(1, 9):
            give_consent(journal(world, x))
        first.server.round_no += 1
    second = Drawn(world, run="2", after=first.server.round_no, seed=12)
    for _ in range(5):
        second.round()
        assert second.refused == {}
        second.server.prepare(second.ask, second.model)
    assert len(whole_links(second)) == 5
    assert not same(dict(first.model), dict(second.model))


# --- servers that lie -------------------------------------------------------------------------------------


def test_two_sums_from_one_state_are_not_both_followed(world: Consortium, tmp_path: Path) -> None:
    """The server has the key of a sum from a helper, and tells two halves of those who summed two sums. Each half signs
    its own and seconds no other, so neither is a link."""
    honest = Forked(world.copy(tmp_path / "honest"))
    run = Forked(world)
    one, two = fork(run)
    assert one.after != two.after
    assert (len(one.summed), len(two.summed)) == (3, 3)
    group = run.server.group
    assert not one.is_whole(group)
    assert not two.is_whole(group)
    assert set(run.refused.values()) == {"round.other-successor"}
    # with one sum alone there is a link: the other half seconds it
    start = honest.opened_at()
    assert honest.seconded(honest.vouched(start, 0, honest.cohort[1:3], honest.cohort[0])).is_whole(group)


@pytest.mark.parametrize("rule", ["one successor", "T signatures"])
def test_without_the_rule_there_are_two_chains(world: Consortium, monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    if rule == "one successor":
        monkeypatch.setattr(links, "_check_once", lambda *_: None)
    else:
        monkeypatch.setattr(Link, "is_whole", lambda self, group: len(self.checked_by(group)) >= group.threshold)
    run = Forked(world)
    assert all(link.is_whole(run.server.group) for link in fork(run))


def invented(run: Forked, helpers: int) -> tuple[Link, Model]:
    """A state that no sum led to, which `helpers` of those who summed say there was."""
    start = run.opened_at()
    link, config, arrays, model = run.told(start, 1 << 30)
    link = signed_by(run.world, link, run.cohort[:helpers])
    shown = {"link": links.write_links([link]).decode()}
    for x, reply in run.ask("second", shown, only=run.cohort[helpers:]).items():
        link = link.joined(replace(link, seconded={x: reply["seconded"]}))
    run.go_on_from(start, link, config, arrays, model)
    return link, model


def refusals(run: Run) -> set[str]:
    """Of those who are drawn from where the server says it is."""
    with stopped("round.too-few"):
        run.round()
    assert set(run.refused) == set(run.server.cohort)
    return set(run.refused.values())


@pytest.mark.parametrize("helpers", [0, 2])
def test_a_server_that_makes_a_state_up_finds_nobody(world: Consortium, helpers: int) -> None:
    """Nor with the two helpers that a threshold of three allows: nobody seconds what fewer than t have checked."""
    run = Forked(world)
    link, _ = invented(run, helpers)
    assert link.seconded == {}
    assert refusals(run) <= {"round.not-linked", "round.wrong-tag"}


@pytest.mark.parametrize("rule", ["links", "t have checked"])
def test_without_the_rule_members_train_for_it(world: Consortium, monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    if rule == "links":
        monkeypatch.setattr(links, "_walk", lambda *_: None)
    else:
        monkeypatch.setattr(Link, "checked_by", lambda *_: tuple(range(1, 9)))
    run = Forked(world)
    invented(run, 2)
    for x in range(1, 9):  # they missed the round, so that nobody's own key contradicts
        with memory_of(world, x).edit() as memory:
            memory["sum"] = {}
    run.round()
    assert len(run.server.members) >= run.server.group.quorum


# --- what a member knows, and where it starts from --------------------------------------------------------


def caught_up(run: Run, x: int, lie: Callable[[dict[str, Any], dict[str, Any]], None]) -> tuple[Any, Any]:
    """A member that lost its files, but not its memory, is sent model, state and links."""
    offer, told = run.offer()
    told |= run.told_model() | run.server.catch_up("anchor", links.reached(memory_of(run.world, x)).hex())
    lie(offer, told)
    return run.node(x).handle("join", offer, told)


def drawn_twice(run: Run) -> int:
    """Up to a round that starts from a state which a member has reached and is drawn from."""
    run.round()
    run.server.prepare(run.ask, run.model)
    x = run.server.cohort[0]
    offer, told = run.offer()
    told |= run.told_model() | run.server.catch_up("anchor", links.reached(memory_of(run.world, x)).hex())
    assert "needs" not in run.node(x).handle("join", offer, told)[0]
    path = journal(run.world, x)._notes_path
    path.unlink()
    return x


def other_leak(offer: dict[str, Any], told: dict[str, Any], run: Run) -> None:
    """The same models and marks, and another count of what the mark has shown so far: the state's name is the same."""
    history = run.server.history.copy()
    assert history.mark.digest() == run.server.history.mark.digest()
    history.mark._leak, history.mark._written = history.mark._leak + 1, b""
    assert history.state == run.server.history.state
    offer["history"] = history.mark.digest().hex()
    told["state"] = np.frombuffer(history.mark.to_bytes(), np.uint8)


def test_a_state_that_is_known_by_name_alone_is_not_known(world: Consortium) -> None:
    run = Drawn(world)
    x = drawn_twice(run)
    for shown in (b"[]", links.write_links(whole_links(run))):  # nor after a link that names the state alone

        def lie(offer: dict[str, Any], told: dict[str, Any], shown: bytes = shown) -> None:
            other_leak(offer, told, run)
            told["links"] = np.frombuffer(shown, np.uint8)

        assert caught_up(run, x, lie)[0]["needs"] == "links"
    assert "needs" not in caught_up(run, x, lambda *_: None)[0]  # the true one


def newcomer(run: Run) -> int:
    """A member that was not drawn for the present round, nor ever before: it is shown all links."""
    drawn_twice(run)
    reached = {x: links.reached(memory_of(run.world, x)) for x in range(1, 9)}
    return next(x for x, state in reached.items() if state != run.server.history.state)


def test_the_last_link_names_all_that_is_known_there(world: Consortium) -> None:
    run = Drawn(world)
    x = newcomer(run)
    with stopped("round.not-linked", names="another state"):
        caught_up(run, x, lambda offer, told: other_leak(offer, told, run))
    assert "needs" not in caught_up(run, x, lambda *_: None)[0]


def test_if_links_named_states_alone_it_would_be_believed(world: Consortium, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(History, "whole", property(lambda self: self.state))
    run = Drawn(world)
    x = newcomer(run)
    assert "needs" not in caught_up(run, x, lambda offer, told: other_leak(offer, told, run))[0]


def test_if_the_name_were_enough_it_would_be_believed(world: Consortium, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        links, "_is_here", lambda memory, history: memory["reached"].get("state") == history.state.hex()
    )
    run = Drawn(world)
    x = drawn_twice(run)
    reply, _ = caught_up(run, x, lambda offer, told: other_leak(offer, told, run))
    assert "needs" not in reply
    assert "refused" not in reply


def test_an_optimiser_s_state_is_part_of_what_is_signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that comes back is given the optimiser's numbers of an earlier round, with the true models: the next
    step would be another one, which a server chose."""
    world = with_cohorts(tmp_path, *EIGHT, sums="checked", optimiser="fedadam:eta=0.01")
    run = Drawn(world)
    run.round()
    run.server.prepare(run.ask, run.model)
    earlier = run.server.history.copy()
    run.round()
    x = drawn_twice(run)

    def lie(offer: dict[str, Any], told: dict[str, Any]) -> None:
        history = run.server.history.copy()
        history.mark.applied, history.mark._written = earlier.mark.applied, b""
        assert history.state == run.server.history.state
        offer["history"] = history.mark.digest().hex()
        told["state"] = np.frombuffer(history.mark.to_bytes(), np.uint8)
        told |= {OPTIMISER + name: vector for name, vector in history.mark.vectors().items()}

    assert caught_up(run, x, lie)[0]["needs"] == "links"
    with monkeypatch.context() as name_alone:
        name_alone.setattr(links, "_is_here", lambda memory, now: memory["reached"].get("state") == now.state.hex())
        assert "needs" not in caught_up(run, x, lie)[0]


def led_back(world: Consortium) -> tuple[FolderState, History, list[Link], History]:
    """A member that lost its memory knows its last state again, and is led from the initial model to an early one."""
    run = Run(world)
    early, states = None, []
    for number in range(5):
        run.round()
        run.server.prepare(run.ask, run.model)
        states.append(run.server.history.copy())
        if number == 1:
            early = whole_links(run)
    assert early is not None
    lose_memory(world, 1)
    memory, last = memory_of(world, 1), states[-1]
    links.reach(memory, last, whole_links(run))
    with memory.edit() as content:
        content["known"].append(last.state.hex())  # as after n − T + t statements (`check_newer`)
        content["nonces"]["2"] = {"nonce": "ab" * 32, "last": last.state.hex(), "newer": False}
        content["consents"][last.begun.hex()] = True
    return memory, states[1], early, last


def test_a_chain_from_the_initial_model_makes_no_state_newer(world: Consortium) -> None:
    """A member that knows only what came after its last state must not take an earlier one for such, nor say so of
    another member's nonce: it may have answered there before it lost its memory."""
    memory, early, chain, last = led_back(world)
    links.reach(memory, early, chain)
    with memory.edit() as content:
        assert content["reached"]["state"] == early.state.hex()
        assert early.state.hex() not in content["known"]
        assert content["nonces"]["2"]["last"] == last.state.hex()


def test_if_it_did_the_early_state_would_be_used_again(world: Consortium, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, early, chain, last = led_back(world)
    honest = links._walk

    def from_anywhere(memory: Any, starts: Any, history: History, shown: list[Link]) -> None:
        honest(memory, starts, history, shown)
        shown[0] = replace(shown[0], before=last.state)  # as if it had started there

    monkeypatch.setattr(links, "_walk", from_anywhere)
    links.reach(memory, early, chain)
    with memory.edit() as content:
        assert early.state.hex() in content["known"]


def test_links_are_under_manifests_in_their_order(world: Consortium, tmp_path: Path) -> None:
    """Members of an earlier roster sign what they like once they are out: after a link under a later manifest none
    under an earlier one is followed."""
    run = Drawn(world)
    run.round()
    run.server.prepare(run.ask, run.model)
    first = whole_links(run)[0]
    assert world.manifest is not None
    later = amend(world, tmp_path, strength={**world.terms.strength.as_dict(), "rho": "0.1"})
    history = History(later.manifest, world.layout, world.layout.encode(world.model), (world.manifest,))  # type: ignore[arg-type]
    history.restored(run.server.history.mark, run.server.history.buffers)
    assert history.state == first.after
    middle, new, old = bytes(range(32)), later.manifest.digest().hex(), world.manifest.digest().hex()  # type: ignore[union-attr]

    def chain(under: str, then: str) -> list[Link]:
        parts = Link(history.begun, under, 0, middle, bytes(32)), Link(middle, then, 0, history.state, history.whole)
        return [signed_by(later, link, range(1, 9)) for link in parts]

    for x, ways in ((2, [(old, old)]), (3, [(old, new)]), (4, [(new, new)])):
        for way in ways:
            with memory_of(later, x).edit() as memory:
                memory["reached"] = {}
            links.reach(memory_of(later, x), history, chain(*way))
    with memory_of(later, 5).edit() as memory:
        memory["reached"] = {}
    with stopped("round.not-linked", names="link 2 of 2"):
        links.reach(memory_of(later, 5), history, chain(new, old))
    one, two = chain(old, new)
    elsewhere = signed_by(later, replace(two, before=bytes(32), summed={}), range(1, 9))
    assert elsewhere.is_whole(group_of(later.manifest))  # type: ignore[arg-type]
    with stopped("round.not-linked", names="link 2 of 2"):
        links.reach(memory_of(later, 5), history, [one, elsewhere])
    for start in ([two], [elsewhere]):  # nor from a state that this member never reached
        with stopped("round.not-linked", names="link 1 of 1"):
            links.reach(memory_of(later, 5), history, start)
    with stopped("round.not-linked", names="link 1 of 2"):
        links.reach(memory_of(later, 5), history, [replace(one, draw=9), two])


@pytest.fixture
def shown_in_parts(world: Consortium, tmp_path: Path) -> tuple[FolderState, History, Link, Link]:
    """A member that has followed a link under a later manifest; the history that a server leads it to with one under an
    earlier manifest, that link, and the same under the later one."""
    run = Drawn(world)
    run.round()
    run.server.prepare(run.ask, run.model)
    assert world.manifest is not None
    later = amend(world, tmp_path, strength={**world.terms.strength.as_dict(), "rho": "0.1"})
    assert later.manifest is not None
    history = History(later.manifest, world.layout, world.layout.encode(world.model), (world.manifest,))
    at_first, middle = history.copy(), history.copy()
    middle.restored(run.server.history.mark, run.server.history.buffers)
    new, old = later.manifest.digest().hex(), world.manifest.digest().hex()
    first = signed_by(later, Link(at_first.begun, new, 0, middle.state, middle.whole), range(1, 9))
    state = memory_of(later, 5)
    with state.edit() as memory:
        memory["reached"] = {}
    links.reach(state, middle, [first])
    history.restored(run.server.history.mark, b"elsewhere")
    ways = (Link(middle.state, under, 0, history.state, history.whole) for under in (old, new))
    earlier, right = (signed_by(later, way, range(1, 9)) for way in ways)
    assert earlier.is_whole(group_of(world.manifest))
    return state, history, earlier, right


def test_a_chain_that_is_shown_in_parts_is_in_order_too(
    shown_in_parts: tuple[FolderState, History, Link, Link],
) -> None:
    state, history, earlier, right = shown_in_parts
    with stopped("round.not-linked", names="under a manifest that is unknown here, or earlier"):
        links.reach(state, history, [earlier])
    links.reach(state, history, [right])


def test_without_the_manifest_in_memory_it_would_be_followed(
    shown_in_parts: tuple[FolderState, History, Link, Link],
) -> None:
    state, history, earlier, _ = shown_in_parts
    with state.edit() as memory:
        del memory["reached"]["under"]
    links.reach(state, history, [earlier])


@pytest.mark.parametrize("followed", ["a link", "a round"])
def test_nothing_is_seconded_under_a_manifest_that_is_over(world: Consortium, tmp_path: Path, followed: str) -> None:
    """Who left with an amendment and those who help it are too few to make a link under the earlier manifest, unless
    members who stayed second it: they do until they know that the run has gone on under the later one."""
    folder = world.folder / "run"
    run = Drawn(world, folder=folder)
    for _ in range(2):
        run.round()
    run.server.prepare(run.ask, run.model)
    run.server.save(run.model)
    later = amend(world, tmp_path / "amendment", strength={**world.terms.strength.as_dict(), "rho": "0.1"})
    assert world.manifest is not None
    again = Drawn(later, folder=folder, run="2", earlier=(world.manifest,))
    for _ in range(2 if followed == "a round" else 3):
        again.round()
    if followed == "a link":
        again.server.prepare(again.ask, again.model)
    group, old = group_of(world.manifest), world.manifest.digest().hex()
    asked = again.server.members
    x = next(x for x in asked if x in group.cohort(bytes(32)))
    link = Link(bytes(32), old, 0, b"1" * 32, b"2" * 32)
    link = signed_by(later, link, [y for y in group.cohort(bytes(32)) if y != x][:3])
    shown = {"link": links.write_links([link]).decode()}
    assert again.ask("second", shown, only=[x]) == {}
    assert again.refused[x] == "round.manifest-left"
    with memory_of(later, x).edit() as memory:  # the rule taken out
        del memory["reached"]["under"]
    assert again.ask("second", shown, only=[x]) != {}


# --- what a member signs ----------------------------------------------------------------------------------


def test_who_has_not_answered_says_nothing_of_the_sum(world: Consortium) -> None:
    """It uploaded, and has the key; what it did not answer for it only seconds. Who signed either never says that it
    answers nothing there."""
    run = Drawn(world)
    run.round()
    run.server.prepare(run.ask, run.model)
    first = run.server.cohort[0]
    run.round(silent=[first])
    run.server.prepare(run.ask, run.model)
    last = whole_links(run)[-1]
    assert first not in last.summed
    assert run.refused[first] == "round.not-uploaded"
    run.ask("second", {"link": links.write_links([last]).decode()}, only=[first])
    about = {"state": last.before.hex(), "of-round": 0, "of-draw": 0, "of-manifest": last.under}
    for x in (first, run.server.group.cohort(last.before)[1]):
        assert run.ask("never", about, only=[x]) == {}
        assert run.refused[x] == "round.answered-already"
    # and who said that it answers nothing signs nothing of it
    state = bytes(range(32))
    x = run.server.group.cohort(state)[0]
    assert run.ask("never", {**about, "state": state.hex()}, only=[x])[x]["never"]
    made_up = signed_by(world, Link(state, last.under, 0, bytes(32), bytes(32)), run.server.group.cohort(state)[1:4])
    assert run.ask("second", {"link": links.write_links([made_up]).decode()}, only=[x]) == {}
    assert run.refused[x] == "round.said-never"


def test_a_link_takes_t_checks_and_t_signatures_of_the_cohort(world: Consortium) -> None:
    run = Drawn(world)
    run.round()
    run.server.prepare(run.ask, run.model)
    (whole,), group = whole_links(run), run.server.group
    summed, manifest = dict(whole.summed), journal(world, 1).manifest
    assert sorted(summed) == list(group.cohort(whole.before))
    assert whole.is_whole(group_of(manifest))
    bare = replace(whole, summed={}, seconded={})
    seconds = {x: statements.sign(identity(world, x), group, "seconded", bare.before, bare.about) for x in range(1, 9)}
    points = list(summed)
    for checks, more, enough in ((3, 1, True), (3, 0, False), (2, 3, False), (0, 5, False), (4, 0, True)):
        first = {x: summed[x] for x in points[:checks]}
        link = replace(bare, summed=first, seconded={x: seconds[x] for x in points[checks : checks + more]})
        assert link.is_whole(group) == enough, (checks, more)
    resting = {x: seconds[x] for x in others(world, points)}  # who was not drawn counts for nothing
    assert not replace(bare, summed={x: summed[x] for x in points[:3]}, seconded=resting).is_whole(group)
    for other in (replace(whole, after=bytes(32)), replace(whole, whole=bytes(32)), replace(whole, draw=1)):
        assert other.signed_by(group) == ()


def test_a_member_whose_memory_is_new_seconds_nothing(world: Consortium) -> None:
    """It may have signed another successor before."""
    run = Drawn(world)
    run.round()
    run.server.prepare(run.ask, run.model)
    first = run.server.cohort[0]
    run.round(absent=[first])
    lose_memory(world, first)
    run.gone = [run.server.members[0]]
    with stopped("round.link-waits"):
        run.server.prepare(run.ask, run.model)
    assert run.refused[first] == "round.memory-anew"


def test_the_model_is_written_down_before_it_is_vouched_for(world: Consortium, monkeypatch: pytest.MonkeyPatch) -> None:
    """If so many sign that the others follow, at least those can hand the model out. Who dies in between seconds it."""
    run = Drawn(world)
    run.round()
    x = run.server.members[0]

    def dies(member: SecAggMember, _: Link) -> bytes:
        if member.point != x:
            return honest(member, _)
        raise RoundError("the power went out", code="node.failed")

    honest = links.sign_summed
    with monkeypatch.context() as power:
        power.setattr(links, "sign_summed", dies)
        run.server.prepare(run.ask, run.model)
    state = run.server.history.state
    assert journal(world, x).history(world.layout).state == state
    with memory_of(world, x).edit() as memory:
        assert memory["signed"] == {}
    link = whole_links(run)[0]
    assert x not in link.summed
    assert run.ask("second", {"link": links.write_links([link]).decode()}, only=[x])[x]["seconded"]
    run.round()
    assert run.refused == {}


# --- messages that are none -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["before", "after", "whole", "under", "draw", "summed", "seconded", "more"])
@pytest.mark.parametrize("value", [None, True, -1, 1.5, "1", "zz", [], {"1": 5}, {"x": "ab"}, {"1": "zz"}, {"1": {}}])
def test_links_are_read_by_type(name: str, value: Any) -> None:
    """A message of an empty map of statements is one; all else is refused by name."""
    good = Link(bytes(32), "ab" * 32, 0, bytes(32), bytes(32), {1: b"x"}).as_dict()
    assert Link.of(good).as_dict() == good
    with stopped("message.malformed"):
        Link.of({**good, name: value})
    with pytest.raises(MessageError):
        links.read_links(json.dumps([good, {**good, name: value}]).encode())


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"[[]]", b'"x"', b"\xff", b"[" * 100_000])
def test_a_chain_that_is_none_is_refused(content: bytes) -> None:
    with stopped("message.malformed"):
        links.read_links(content)


@pytest.mark.parametrize(
    "lie",
    [
        *({"summed": value} for value in ("text", 5, b"nonsense")),
        *({"point-there": value} for value in ("1", True, 1.0, 99)),
    ],
)
def test_a_member_that_replies_nonsense_is_left_out(world: Consortium, lie: dict[str, Any]) -> None:
    run = Drawn(world)
    run.round()
    liar, ask = run.server.members[-1], run.ask

    def lying(stage: str, config: dict[str, Any], /, **more: Any) -> dict[int, dict[str, Any]]:
        said = ask(stage, config, **more)
        return {x: reply | lie if x == liar and stage == "vouch" else reply for x, reply in said.items()}

    run.server.prepare(lying, run.model)
    link = whole_links(run)[0]
    assert len(link.summed) == 4
    assert liar not in link.summed


def test_a_chain_grows_by_what_was_missed_alone(world: Consortium) -> None:
    """In one process: each member is shown the links since its last one, and a report names nobody who refuses."""
    run = world.in_process(12, 5, Losses(rates={"train": 0.1}, seed=4))
    for x, member in run.members.items():
        since = run.server.links(member.reached.hex())
        assert since == [] or since[0].before == member.reached, x
    assert not any(report.excluded for report in run.reports)


# --- bad luck ---------------------------------------------------------------------------------------------


class Stormy(Drawn):
    """A run in which anybody may be away whenever something is asked, and the server may die between two messages."""

    rng: np.random.Generator
    calm = False

    def _happens(self, share: float) -> bool:
        return not self.calm and bool(self.rng.random() < share)

    def ask(self, stage: str, config: dict[str, Any], /, **more: Any) -> dict[int, dict[str, Any]]:
        if self._happens(0.03):
            raise DiedError
        return {x: said for x, said in super().ask(stage, config, **more).items() if not self._happens(0.15)}

    def join(self, offer: dict[str, Any], told: dict[str, Any], absent: Iterable[int] = ()) -> None:
        super().join(offer, told, {*absent, *(x for x in range(1, 9) if self._happens(0.08))})

    def unmask(self, silent: Iterable[int] = ()) -> None:
        super().unmask({*silent, *(x for x in range(1, 9) if self._happens(0.1))})
        if self._happens(0.05):
            raise DiedError


class DiedError(Exception):
    """The server, in the middle of something."""


@pytest.mark.parametrize(
    ("seed", "rounds"), [(0, 12), *(pytest.param(seed, 30, marks=pytest.mark.slow) for seed in range(1, 6))]
)
def test_runs_with_every_kind_of_bad_luck_go_on(world: Consortium, seed: int, rounds: int) -> None:
    """Messages are lost, the server dies with its folder or without: from each state one sum is opened, with one
    successor; nobody is accused, and once it is calm nobody refuses."""
    rng, runs, whole, codes = np.random.default_rng([11, seed]), 0, 0, set[str]()
    successors, folder = dict[bytes, bytes](), world.folder / "run-0"
    run = Stormy(world, folder=folder)
    run.rng = rng
    for number in range(rounds + 10):
        run.calm, settled = number >= rounds, number >= rounds + 5
        stood, died = dict(run.model), number in (rounds // 3, 2 * rounds // 3)
        try:
            run.round()
            whole += 1
        except DiedError:
            died = True
        except RoundError as error:
            codes.add(error.code if not settled else f"in calm: {error}")
            run.model = stood
        assert not settled or run.refused == {}, (number, run.refused)
        accused = {"round.wrong-tag", "round.other-successor", "round.not-linked", "round.not-the-sum"}
        assert not accused & set(run.refused.values()), run.refused
        for link in whole_links(run):
            assert successors.setdefault(link.before, link.after) == link.after
        if died:
            runs += 1
            lost = number == 2 * rounds // 3 or bool(rng.random() < 0.2)
            folder = world.folder / f"run-{runs}" if lost else folder
            run = Stormy(world, folder=folder, run=f"again {runs}", after=run.server.round_no)
            run.rng, run.calm = rng, True
            if lost or run.server.resumed is None:  # it may have died again before it wrote anything down
                run.server.survey(run.ask, go_on=True)
            run.model = dict(run.server.resumed or world.model)
    assert len(successors) >= 5
    assert whole >= 5
    expected = {"too-few", "too-few-answers", "sum-open", "link-waits", "cohort-waits", "repeat-waits"}
    assert codes <= {f"round.{name}" for name in (*expected, "no-more-attempts")}, codes
