"""A review of links (docs/secagg.md, "Links"): attacks by a server, by single members, and bad luck."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quorumark import field
from quorumark.consortium.identity import Identity
from quorumark.errors import KeystoreError, RoundError
from quorumark.field import P
from quorumark.node.consent import give_consent
from quorumark.packing import pack
from quorumark.round import chain as chain_module
from quorumark.round import links, statements
from quorumark.round.group import Group, word
from quorumark.round.links import Link
from quorumark.round.memory import MemoryState
from quorumark.round.secagg.member import SecAggMember
from tests.kit.drawn import EIGHT, Drawn, Forked, journal, memory_of, others, signed_by, whole_links
from tests.kit.flowers import STRENGTH, Consortium, Model, train
from tests.kit.refusals import stopped
from tests.kit.rounds import Run
from tests.kit.states import amend, carriers, key_of, lose_memory, share_of_signs, small_model, with_cohorts


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Consortium:
    return with_cohorts(tmp_path_factory.mktemp("review"), *EIGHT, sums="checked")


@pytest.fixture
def world(made: Consortium, tmp_path: Path) -> Consortium:
    return made.copy(tmp_path / "world")


class Lied(Drawn):
    """A run in which one member says other things than it should, of all that the server asks between two rounds."""

    liar = 0
    lies: Mapping[str, dict[str, Any]] = {}

    def ask(self, stage: str, config: dict[str, Any], /, **more: Any) -> dict[int, dict[str, Any]]:
        said = super().ask(stage, config, **more)
        return {x: reply | self.lies.get(stage, {}) if x == self.liar else reply for x, reply in said.items()}

    def resume(self) -> None:
        self.server.survey(self.ask, go_on=True)
        self.model = dict(self.server.resumed or {})


# --- one member alone -------------------------------------------------------------------------------------


@pytest.mark.parametrize("liar", [-1, 0])  # its reply comes after the other's, or before
def test_one_member_that_names_another_s_point_cannot_stop_the_run(world: Consortium, liar: int) -> None:
    run = Lied(world)
    run.round()
    cohort = run.server.members
    assert len(cohort) == 5  # T = 4: all but the liar are enough
    wrong = {"summed": b"x", "seconded": b"x", "point-there": cohort[1]}
    run.liar, run.lies = cohort[liar], {"vouch": wrong, "second": wrong}
    run.server.prepare(run.ask, run.model)
    assert set(whole_links(run)[0].summed) == set(cohort) - {cohort[liar]}


def honest(true: list[Link]) -> str:
    return links.write_links(true).decode()


def with_junk(true: list[Link]) -> str:
    junk = {str(x): "00" for x in range(1, 9)}
    return json.dumps([{**link.as_dict(), "summed": junk, "seconded": junk} for link in true])


def a_large_draw(true: list[Link]) -> str:
    return json.dumps([{**true[0].as_dict(), "draw": 1 << 64}])


def half_a_letter(_: list[Link]) -> str:
    return "\ud800"


@pytest.mark.parametrize("lie", [honest, with_junk, a_large_draw, half_a_letter])
def test_a_server_that_lost_its_folder_gets_its_links_from_honest_members(
    world: Consortium, lie: Callable[[list[Link]], str]
) -> None:
    run = Drawn(world)
    for _ in range(5):
        run.round()
    run.server.prepare(run.ask, run.model)
    again = Lied(world, run="2")
    again.liar, again.lies = 1, {"state": {"links": lie(whole_links(run))}}
    again.resume()
    assert again.server.history.state == run.server.history.state
    for number in range(4):
        again.round()
        assert number == 0 or again.refused == {}


@pytest.mark.parametrize("lie", ["none", "unsigned", "signed"])
def test_a_link_that_waits_is_found_again_whatever_one_member_says(world: Consortium, lie: str) -> None:
    """t members vouched before the server lost its folder; one member has another link to that very state."""
    run, elsewhere = Drawn(world), bytes(range(32))
    run.round()
    run.server.prepare(run.ask, run.model)
    run.round()
    liar = run.server.group.cohort(elsewhere)[0]
    run.gone = [x for x in run.server.members if x != liar][-2:]
    with stopped("round.link-waits"):
        run.server.prepare(run.ask, run.model)
    assert run.server.chain is not None
    waiting = run.server.chain.waiting
    assert waiting is not None
    junk = replace(waiting, before=elsewhere, summed={}, seconded={})
    junk = signed_by(world, junk, [liar]) if lie == "signed" else junk
    again = Lied(world, run="2")
    again.liar, again.lies = liar, {} if lie == "none" else {"state": {"links": links.write_links([junk]).decode()}}
    again.resume()
    assert again.server.history.state == waiting.after
    again.round()
    assert waiting.before in [link.before for link in whole_links(again)]


@pytest.mark.parametrize("shown", [a_large_draw, half_a_letter])
def test_a_member_refuses_by_name_what_is_no_link(world: Consortium, shown: Callable[[list[Link]], str]) -> None:
    run = Drawn(world)
    run.round()
    run.server.prepare(run.ask, run.model)
    assert run.ask("second", {"link": shown(whole_links(run))}, only=[1]) == {}
    assert run.refused == {1: "message.malformed"}


# --- a server with one helper -----------------------------------------------------------------------------


class Still(Forked):
    """Training that repeats itself: from whatever model a member makes the same step."""

    def trained(self, x: int, model: Model, reply: dict[str, Any]) -> Model:  # noqa: ARG002
        return train(model, 0.01, 1000 + x, 1.0)


@pytest.mark.parametrize("packing", ["1", "2", "4"])
@pytest.mark.parametrize(("dither", "moved"), [("0", 0), ("0", 1), ("3", 1)])
def test_what_one_helper_s_key_gives_on_one_chain(tmp_path: Path, dither: str, moved: int, packing: str) -> None:
    """No defence, but what is left without one: with a right tag the server says that the sum moved nothing, or each
    weight by as much as the mark. All sign that, and the next sum, without a mark, is of nearly the weights that it has
    a marked one from. Training that repeats itself cancels in the difference, dither does not."""
    about: dict[str, Any] = {"policy": {"cohort": "5", "sums": "checked", "packing": packing}}
    about["strength"] = {**STRENGTH, "dither": dither}
    world = Consortium.deal(tmp_path, 8, 3, model=small_model(), **about)
    run = Still(world)
    for _ in range(2):
        run.round()
        run.server.prepare(run.ask, run.model)
    start = run.opened_at()
    marked, mark, server, cohort = run.model, run.server.settled.embedded, run.server, run.cohort
    assert mark is not None
    size, opened, rng = world.layout.carrier_size, np.zeros_like(run.opened), np.random.default_rng(5)
    moves = moved * mark.sizes.astype(np.int64) * rng.choice([-1, 1], size)
    if packing == "1":
        opened[:size] = field.add(run.before.mark.model, field.from_signed(moves))
    else:
        whole, spans = np.zeros(world.layout.size, np.int64), run.before.mark.spans()
        whole[:size] = moves
        packed = pack(whole, spans, int(packing))
        opened[: packed.size] = packed
    for change in range(4000):  # 1 of 56 such states has the cohort again, over which the same training is summed
        link, config, arrays, model = run.told(start, change << 20, opened)
        if server.group.cohort(link.after) == cohort:
            break
    said = run.ask("vouch", config, arrays=arrays, only=cohort)
    link = link.joined(replace(link, summed={x: reply["summed"] for x, reply in said.items()}))
    assert link.is_whole(server.group)  # by honest members, one of whom gave its key away
    run.go_on_from(start, link, config, arrays, model)
    run.round()
    assert server.members == cohort
    assert not server.marked
    one, two = ([carriers(world, m) for m in pair] for pair in ((marked, start), (run.model, model)))
    seen, key = one[0] - one[1] - (two[0] - two[1]), key_of(world)
    cosine = float(seen @ key / np.linalg.norm(seen) / np.linalg.norm(key))
    if dither == "0":
        assert share_of_signs(world, seen) == 1
    else:  # 1/√(1 + κ²) = 0.32, give or take 0.14 with 48 carriers
        assert abs(cosine) < 0.9


# --- second runs ------------------------------------------------------------------------------------------


def test_who_only_seconded_in_the_first_run_signs_in_the_second(world: Consortium) -> None:
    """All operators consent to a second run. In it one member is away once the sum is open: n − T = 1 may be."""
    run = Drawn(world)
    run.server.advance(run.model)
    cohort = run.server.cohort
    run = Drawn(world, after=1)
    run.round(silent=[cohort[0]])
    run.gone = [cohort[1]]
    run.server.prepare(run.ask, run.model)
    assert set(whole_links(run)[0].seconded) == {cohort[0]}
    for x in cohort:
        give_consent(journal(world, x))
    second = Drawn(world, run="2", after=run.server.round_no + 1, seed=12)
    second.round()
    assert second.refused == {}
    assert second.server.members == cohort
    second.gone = [cohort[2]]
    second.server.prepare(second.ask, second.model)
    assert set(whole_links(second)[0].summed) == set(cohort) - {cohort[2]}


def test_who_is_not_drawn_in_a_second_run_stays_where_it_is(world: Consortium) -> None:
    """Its operator consents to a second run, and it has no part in the first round of that: the first run may go on."""
    run = Run(world)
    for _ in range(2):
        run.round()
    resting = others(world, run.server.group.cohort(run.server.history.begun))
    at = {x: links.reached(memory_of(world, x)) for x in resting}
    for x in resting:
        give_consent(journal(world, x))
    second = Run(world, run="2", after=run.server.round_no)
    offer, told = second.offer()
    second.join(offer, told, others(world, resting))
    assert second.refused == dict.fromkeys(resting, "round.not-drawn")
    assert {x: links.reached(memory_of(world, x)) for x in resting} == at != {}


def test_who_signs_under_one_draw_signs_under_no_other(world: Consortium) -> None:
    """And never says that it answers nothing under that draw."""
    run, state = Drawn(world), bytes(range(32))
    group, under = run.server.group, run.server.manifest.digest().hex()
    x = next(x for x in group.cohort(state) if x in group.cohort(state, 1))
    said = {}
    for draw in (0, 1):
        link = Link(state, under, draw, bytes(32), bytes(32))
        link = signed_by(world, link, [y for y in group.cohort(state, draw) if y != x][:3])
        said[draw] = run.ask("second", {"link": links.write_links([link]).decode()}, only=[x])
    assert said[0]
    assert said[1] == {}
    assert run.refused == {x: "round.other-successor"}
    about = {"state": state.hex(), "of-round": 0, "of-draw": 0, "of-manifest": under}
    assert run.ask("never", about, only=[x]) == {}
    assert run.refused == {x: "round.answered-already"}


class Redrawn:
    """Eight members by themselves, five drawn, t = 3: what a server has that holds the keys of two helpers, makes up
    sums for single members, and draws again and again."""

    def __init__(self) -> None:
        people = [Identity.generate(f"m{i}") for i in range(8)]
        group = Group.of_cards([person.card() for person in people], 3, b"redrawn", cohort_size=5)
        self.group, self.people = group, {group.point_of(person.ed25519): person for person in people}
        self.sides = {x: SecAggMember(who, group, MemoryState(group)) for x, who in self.people.items()}
        self.state, self.helpers, self.first, self.then, self.rest = next(filter(None, map(self._cast, range(10_000))))
        self.closed: dict[str, dict[int, bytes]] = {}

    def _cast(self, number: int) -> tuple[bytes, tuple[int, ...], int, int, list[int]] | None:
        """A state, two helpers in three cohorts, a member of the first two, one of the second, two of the third."""
        state = word(number) * 4
        one, two, three = (set(self.group.cohort(state, draw)) for draw in range(3))
        helpers = tuple(sorted(one & two & three))[:2]
        for first in sorted((one & two) - {*helpers}):
            for then in sorted(two - {*helpers, first}):
                rest = sorted(three - {*helpers, first, then})
                if len(helpers) == 2 and len(rest) >= 2:
                    return state, helpers, first, then, rest
        return None

    def answered(self, x: int, draw: int) -> None:
        """What a member's memory says after it answered for a sum."""
        with self.sides[x].state.edit() as memory:
            given = memory["answered"].setdefault(self.state.hex(), {}).setdefault("model", [])
            given.append([draw + 1, self.group.id.hex(), draw])

    def close(self, draw: int, but: int) -> None:
        """Everybody but one says that it answers nothing under a draw, if it does say that."""
        said, about = {}, statements.in_draw(draw)
        for x in self.group.cohort(self.state, draw):
            if x in self.helpers:
                said[x] = statements.sign(self.people[x], self.group, "never", self.state, about)
            elif x != but:
                with suppress(RoundError):
                    said[x] = self.sides[x].never(self.state, 0, draw)
        self.closed[statements.place_of(self.group, draw)] = said

    def summed(self, link: Link, *points: int) -> Link:
        """By members who answered, and the helpers."""
        said = {}
        for x in self.helpers:
            said[x] = statements.sign(self.people[x], self.group, "summed", link.before, link.about)
        for x in points:
            said[x] = links.sign_summed(self.sides[x], link)
        return replace(link, summed=said)

    def attack(self) -> tuple[Link, Link]:
        """Two links from one state: the first member vouches alone under draw 0, and seconds the same under draw 1,
        which it then helps to close."""
        one = Link(self.state, "ab" * 32, 1, b"1" * 32, b"3" * 32)
        self.answered(self.first, 0)
        links.sign_summed(self.sides[self.first], replace(one, draw=0))
        self.close(0, but=self.first)
        statements.check_redrawn(self.group, self.state, 1, self.closed)
        self.answered(self.then, 1)
        one = self.summed(one, self.then)
        one = replace(one, seconded={self.first: links.second(self.sides[self.first], one, ())})
        self.close(1, but=self.then)
        statements.check_redrawn(self.group, self.state, 2, self.closed)
        for x in self.rest:
            self.answered(x, 2)
        return one, self.summed(Link(self.state, "ab" * 32, 2, b"2" * 32, b"4" * 32), *self.rest)


def test_a_server_that_draws_again_and_again_gets_no_second_link() -> None:
    with stopped("round.other-successor"):
        Redrawn().attack()


def test_if_members_signed_under_two_draws_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    def any_draw(memory: Any, _: SecAggMember, link: Link) -> None:
        known = memory["signed"].get(link.before.hex())
        assert known is None or known[2:] == [link.after.hex(), link.whole.hex()]

    monkeypatch.setattr(links, "_check_once", any_draw)
    made = Redrawn()
    one, two = made.attack()
    assert one.is_whole(made.group)
    assert two.is_whole(made.group)
    assert one.after != two.after


class Meanwhile(MemoryState):
    """A memory that another message gets hold of as soon as an edit has ended."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.messages: list[Callable[[], object]] = []

    @contextmanager
    def edit(self) -> Iterator[dict[str, Any]]:
        with super().edit() as memory:
            yield memory
        if self.messages:
            self.messages.pop()()


@pytest.mark.parametrize("act", ["second", "sign_summed"])
def test_of_two_messages_at_the_same_moment_one_gets_a_signature(act: str) -> None:
    made, signed = Redrawn(), []
    side = made.sides[made.first]
    side.state = memory = Meanwhile(made.group)
    made.answered(made.first, 0)
    helpers = [x for x in made.group.cohort(made.state) if x != made.first][:3]

    def shown(after: bytes) -> Link:
        link = Link(made.state, "ab" * 32, 0, after, after)
        said = {x: statements.sign(made.people[x], made.group, "summed", link.before, link.about) for x in helpers}
        return replace(link, summed=said)

    def signs(link: Link) -> None:
        signed.append(links.second(side, link, ()) if act == "second" else links.sign_summed(side, link))

    memory.messages.append(lambda: signs(shown(b"2" * 32)))
    with stopped("round.other-successor"):
        signs(shown(b"1" * 32))
    assert not memory.messages
    assert len(signed) <= 1


# --- amendments -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "waits"), [("examples", True), ("strength", False), ("packing", True), ("attempts", False)]
)
def test_a_run_goes_on_after_an_amendment(world: Consortium, tmp_path: Path, change: str, waits: bool) -> None:
    folder = world.folder / "run"
    run = Drawn(world, folder=folder)
    for _ in range(3):
        run.round()
    if waits:
        run.server.close(run.model)
    else:
        run.server.prepare(run.ask, run.model)
        run.server.save(run.model)
    every: dict[str, dict[str, Any]] = {
        "examples": {"examples": {2: 150}},
        "strength": {"strength": {**world.terms.strength.as_dict(), "rho": "0.1"}},
        "packing": {"policy": {"packing": "1"}},
        "attempts": {"policy": {"attempts": "7"}},
    }
    later = amend(world, tmp_path / "amendment", **every[change])
    again = Drawn(later, folder=folder, run="2", earlier=(world.manifest,))
    for number in range(4):
        again.round()
        assert number == 0 or again.refused == {}  # in the first one all are asked who may have summed


def test_a_run_goes_on_when_no_cohorts_are_drawn_any_more(world: Consortium, tmp_path: Path) -> None:
    folder = world.folder / "run"
    run = Drawn(world, folder=folder)
    for _ in range(3):
        run.round()
    run.server.prepare(run.ask, run.model)
    run.server.save(run.model)
    later = amend(world, tmp_path / "amendment", policy={"cohort": "8"})
    again = Drawn(later, folder=folder, run="2", earlier=(world.manifest,))
    for _ in range(2):
        again.round()
        assert again.refused == {}


# --- crashes ----------------------------------------------------------------------------------------------


def test_a_full_disk_loses_no_link(world: Consortium, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server cannot write a link once, goes on, and is started again: who was away still comes back."""
    folder = world.folder / "run"
    run = Drawn(world, folder=folder)
    run.round()

    def full(*_: Any) -> None:
        raise KeystoreError("cannot write: the disk is full")

    with monkeypatch.context() as disk:
        disk.setattr(chain_module, "append_private", full)
        with pytest.raises(KeystoreError):
            run.server.prepare(run.ask, run.model)
    run.round()
    run.server.prepare(run.ask, run.model)
    run.server.save(run.model)
    again = Drawn(world, folder=folder, run="2")
    for _ in range(4):
        again.round()
        assert again.refused == {}


# --- the eight old points, tried anew ---------------------------------------------------------------------


def test_old_2_a_new_memory_is_led_to_an_old_state_and_answers_nothing(world: Consortium) -> None:
    run = Run(world)
    run.round()
    run.server.prepare(run.ask, run.model)
    x = run.server.cohort[0]
    offer, told = run.offer()
    told |= run.told_model() | run.server.catch_up("anchor")
    history, chain = run.server.history.copy(), whole_links(run)
    lose_memory(world, x)
    reply, _ = run.node(x).handle("join", offer, told)
    assert reply["code"] == "round.memory-anew"
    assert links.reached(memory_of(world, x)) == history.state
    for stage, config in (
        ("second", {"link": links.write_links([replace(chain[0], before=history.state)]).decode()}),
        ("never", {"state": history.state.hex(), "of-round": 0, "of-manifest": chain[0].under}),
    ):
        run.refused = {}
        assert run.ask(stage, config, only=[x]) == {}
        assert run.refused[x] in ("round.memory-anew", "round.not-linked", "round.not-drawn")


def test_old_1_and_4_no_chain_but_from_where_a_member_is(world: Consortium) -> None:
    """Neither a longer one that goes through there, nor one with a cycle; nor other integers beside the same state."""
    run = Drawn(world)
    for _ in range(4):
        run.round()
        run.server.prepare(run.ask, run.model)
    chain, history = whole_links(run), run.server.history
    x = next(x for x in range(1, 9) if links.reached(memory_of(world, x)) in [link.before for link in chain[1:]])
    memory = memory_of(world, x)
    at = links.reached(memory)
    right = run.server.links(at.hex())
    other = history.copy()
    other.buffers = bytes(32)
    for shown, wrong in ((chain, history), (right, other), (right[:-1], history), ([*right, *right], history)):
        with pytest.raises(RoundError) as refused:
            links.reach(memory, wrong, shown)
        assert refused.value.code == "round.not-linked"
    links.reach(memory, history, right)


def test_old_6_who_vouched_can_answer_again_and_seconds_nothing_else(world: Consortium) -> None:
    run = Forked(world)
    start = run.opened_at()
    helper, a, b, c, d = run.cohort
    one = run.vouched(start, 0, [a, b, c, d], helper)
    two = run.told(start, 1 << 20)[0]
    two = signed_by(world, two, [helper, a, b])
    run.refused = {}
    assert run.ask("second", {"link": links.write_links([two]).decode()}, only=[c, d]) == {}
    assert set(run.refused.values()) == {"round.other-successor"}
    assert one.is_whole(run.server.group)
    assert int(run.opened[0]) < P
    for x in (a, b):
        with memory_of(world, x).edit() as memory:
            assert memory["answer"]["model"]["round"] == run.server.turn.round
