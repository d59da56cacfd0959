"""Cohorts and "one state, one opened sum" (docs/secagg.md): servers that skip numbers, lie about draws, or show
statements that do not close one, each with a control in which a rule is taken out; and runs whose cohorts cannot be
completed, which go on or say why not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quorumark.canonical import digest
from quorumark.consortium.identity import open_message
from quorumark.errors import QuorumarkError, RoundError
from quorumark.node.journal import Journal
from quorumark.round import statements
from quorumark.round.group import DRAWS, Group, group_of, word
from quorumark.simulation import Losses
from tests.kit.flowers import Consortium, Model
from tests.kit.refusals import stopped
from tests.kit.rounds import Run
from tests.kit.states import Tuned, amend, begun, carriers, forget, key_of, opened_at, share_of_signs, with_cohorts

EIGHT = (8, 3, 5)  # K, t, n: T = 4, and n − T + t = 4
SIXTEEN = (16, 5, 9)  # T = 7, and n − T + t = 7


@pytest.fixture(scope="module", params=["unchecked", pytest.param("checked", marks=pytest.mark.slow)])
def made(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Consortium:
    return with_cohorts(tmp_path_factory.mktemp("cohorts"), *EIGHT, sums=request.param)


@pytest.fixture
def world(made: Consortium, tmp_path: Path) -> Consortium:
    return made.copy(tmp_path / "world")


KINDS: dict[str, Any] = {
    "unchecked": {},
    "checked": {"sums": "checked"},
    "fedadam": {"sums": "checked", "optimiser": "fedadam:eta=0.01"},
}


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Consortium]:
    known: dict[str, Consortium] = {}

    def find(name: str) -> Consortium:
        if name not in known:
            known[name] = with_cohorts(tmp_path_factory.mktemp(name), *EIGHT, **KINDS[name])
        return known[name]

    return find


@pytest.fixture(params=KINDS)
def attacked(kinds: Callable[[str], Consortium], request: pytest.FixtureRequest, tmp_path: Path) -> Consortium:
    """What a server attacks: where members check sums and follow links, and with an optimiser, all of it holds, too."""
    return kinds(request.param).copy(tmp_path / "world")


def of_size(made: Consortium, folder: Path, size: tuple[int, int, int]) -> Consortium:
    return made.copy(folder) if size == EIGHT else with_cohorts(folder, *size, sums=made.terms.policy.sums)


def everybody(world: Consortium) -> range:
    return range(1, world.count + 1)


def others(world: Consortium, members: Iterable[int]) -> list[int]:
    return [x for x in everybody(world) if x not in set(members)]


def never(run: Run, points: Iterable[int], state: bytes, round_no: int, draw: int = 0) -> dict[int, bytes]:
    """What members sign when they are asked, of those who do."""
    assert run.world.manifest is not None
    about: dict[str, Any] = {"state": state.hex(), "of-round": round_no, "of-draw": draw}
    about |= {"of-manifest": run.world.manifest.digest().hex(), "run": "1", "node": "1"}
    said = {}
    for x in points:
        with suppress(QuorumarkError):
            said[x] = run.node(x).handle("never", about, {})[0]["never"]
    return said


def lying(run: Run, points: Iterable[int], state: bytes, about: bytes) -> dict[int, bytes]:
    """Statements of members who sign anything."""
    said = {}
    for x in points:
        home, unlock = run.world.home(x)
        said[x] = statements.sign(home.identity(unlock), run.server.group, "never", state, about)
    return said


def forgetful(world: Consortium, points: Iterable[int]) -> None:
    """Helpers of the server forget what they answered and signed: they answer whatever they are asked."""
    for x in points:
        home, unlock = world.home(x)
        with Journal(home.only_consortium(), home.identity(unlock)).memory().edit() as memory:
            memory["answered"].clear()
            memory["closed"].clear()


# --- attacks ----------------------------------------------------------------------------------------------


def overlapping(run: Tuned) -> tuple[Model, int, int]:
    """A state from which a later draw, but not the last one, has all but one of the first cohort in it: its model, that
    draw, and that one member, which helps the server."""
    model = begun(run)
    for _ in range(40):
        run.server.close(model)
        group, state = run.server.group, run.server.history.state
        first = set(group.cohort(state))
        for draw in range(1, DRAWS - 1):  # members close the last one in `_another_draw`
            left = first - set(group.cohort(state, draw))
            if len(left) == 1:
                return model, draw, left.pop()
        model = run.round()
    raise AssertionError("no such state in 40 rounds")


def signs_from(run: Tuned, start: Model, first: Any, second: Any, helper: int) -> Any:
    """Two sums, the second without a helper: n_s·(θ_s + S ⊙ τ) is between them, and it knows θ_s."""
    assert run.world.manifest is not None
    counts = {x: run.world.manifest.terms.member(x).examples for x in everybody(run.world)}
    members = run.server.group.cohort(run.server.history.state)
    whole = first * sum(counts[x] for x in members)
    part = second * sum(counts[x] for x in members if x != helper)
    own = carriers(run.world, run.trained(helper, dict(start), {"rate": 1.0}))
    return (whole - part) / counts[helper] - own


def all_signs(world: Consortium, estimate: Any) -> bool:
    """Whether every sign of the mark is right. With an optimiser some weights have no mark: two sums differ by rounding
    there."""
    size = np.abs(estimate)
    marked = size > size.max() / 1000
    most = 0.4 if world.terms.policy.optimiser is not None else 1.0
    return bool(marked.mean() >= most and share_of_signs(world, np.where(marked, estimate, key_of(world))) == 1.0)


def second_sum(run: Tuned, start: Model, members: Iterable[int]) -> Any:
    """Another opened sum from the same state; None if there is none."""
    try:
        return opened_at(run, start, absent=others(run.world, members))
    except RoundError:
        return None


Lie = Callable[[Tuned, bytes, int, int, int], dict[int, bytes]]
"""What a server shows to close a draw: run, state, that draw, and the two members who help it."""


def _nothing(*_: Any) -> dict[int, bytes]:
    return {}


def _made_up(run: Tuned, state: bytes, before: int, helper: int, other: int) -> dict[int, bytes]:
    copied = lying(run, [helper], state, statements.in_draw(before))[helper]
    return {**dict.fromkeys(run.server.group.cohort(state, before), copied), other: b"never"}


def _helpers(run: Tuned, state: bytes, before: int, helper: int, other: int) -> dict[int, bytes]:
    """t − 1 members who sign and answer anyway, and all who have not answered."""
    said = never(run, everybody(run.world), state, 0, before)
    return {**said, **lying(run, [helper, other], state, statements.in_draw(before))}


def _another_state(run: Tuned, state: bytes, before: int, helper: int, other: int) -> dict[int, bytes]:
    told = digest("another state", state)
    return {**never(run, everybody(run.world), told, 0, before), **_helpers(run, state, before, helper, other)}


def _another_draw(run: Tuned, state: bytes, before: int, helper: int, other: int) -> dict[int, bytes]:
    """All members close the last draw, in which nobody has answered."""
    said = never(run, everybody(run.world), state, 0, DRAWS - 1)
    return {**said, **lying(run, [helper, other], state, statements.in_draw(before))}


def _another_round(run: Tuned, state: bytes, before: int, helper: int, other: int) -> dict[int, bytes]:
    """They have not answered in round 1 from this state, and say so."""
    said = never(run, everybody(run.world), state, 1)
    assert len(said) == run.world.count
    return {**said, **lying(run, [helper, other], state, statements.in_draw(before))}


LIES: dict[str, Lie] = {
    "nothing": _nothing,
    "made up": _made_up,
    "helpers": _helpers,
    "another state": _another_state,
    "another draw": _another_draw,
    "another round": _another_round,
}


def redrawn_by(run: Tuned, lie: Lie, silent: Iterable[int] = ()) -> tuple[Model, Any, Any, int]:
    """A sum is opened under the first draw. Then the server says that the cohort was drawn anew."""
    start, draw, helper = overlapping(run)
    past, group = run.server._current_past(), run.server.group
    first_cohort = group.cohort(past.state)
    quiet = [x for x in first_cohort if x != helper][-1:] if silent else []
    first = opened_at(run, start, silent=quiet)
    other = next(x for x in first_cohort if x != helper and x not in quiet)
    past = run.server._current_past()
    for before in range(draw):
        past.closed[statements.place_of(group, before)] = lie(run, past.state, before, helper, other)
    past.draw = draw
    forgetful(run.world, [helper, other])
    both = set(first_cohort) & set(group.cohort(past.state, draw))
    return start, first, second_sum(run, start, both), helper


@pytest.mark.parametrize("way", LIES)
def test_a_false_redraw_opens_no_second_sum(attacked: Consortium, way: str) -> None:
    run = Tuned(attacked)
    _, _, second, _ = redrawn_by(run, LIES[way], silent=[1] if way == "helpers" else [])
    assert second is None
    assert list(run.refused.values()).count("round.not-closed") >= 3, run.refused


def test_without_the_closings_a_redraw_gives_the_key(attacked: Consortium, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statements, "check_redrawn", lambda *_: None)
    run = Tuned(attacked)
    start, first, second, helper = redrawn_by(run, _nothing)
    assert all_signs(attacked, signs_from(run, start, first, second, helper))


def test_one_statement_fewer_would_give_the_key(attacked: Consortium, monkeypatch: pytest.MonkeyPatch) -> None:
    """T of five have answered, among them two who lie. Those two and the fifth close the draw, if three are enough."""
    honest = Group.closing.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Group, "closing", property(lambda self: honest(self) - 1))
    run = Tuned(attacked)
    start, first, second, helper = redrawn_by(run, _helpers, silent=[1])
    assert all_signs(attacked, signs_from(run, start, first, second, helper))


def resting_members_give_it_up(run: Tuned) -> tuple[Model, Any, Any, int]:
    """A sum was opened. Members who rested, and one of the cohort that helps, say that they never answer in it."""
    start = begun(run)
    run.server.close(start)
    past, cohort = run.server._current_past(), run.server.cohort
    first, helper = opened_at(run, start), cohort[0]
    last = run.server.round_no
    said = never(run, others(run.world, cohort), past.state, last)
    assert len(said) == 3
    past.never[last] = {**said, **lying(run, [helper], past.state, word(last))}
    assert len(past.never[last]) == run.server.group.closing
    return start, first, second_sum(run, start, cohort[1:]), helper


def test_who_rests_cannot_give_up_a_sum(attacked: Consortium) -> None:
    run = Tuned(attacked)
    _, _, second, _ = resting_members_give_it_up(run)
    assert second is None
    assert list(run.refused.values()).count("round.not-given-up") == 4


def test_if_they_could_the_key_would_show(attacked: Consortium, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_signers(
        group: Group, what: str, state: bytes, about: bytes, said: statements.Said, _: int = 0
    ) -> list[int]:
        session, found = statements._session(what, state, about), []
        for point, message in said.items():
            with suppress(QuorumarkError):
                open_message(message, group, group.header(what, session, point))
                found.append(point)
        return found

    monkeypatch.setattr(statements, "signers", all_signers)
    run = Tuned(attacked)
    start, first, second, helper = resting_members_give_it_up(run)
    assert all_signs(attacked, signs_from(run, start, first, second, helper))


class Numbered(Tuned):
    """A run in which the attacker knows who is drawn at a number."""

    def drawn_at(self, number: int) -> tuple[int, ...]:  # noqa: ARG002
        return self.server.cohort


def skipped_numbers(run: Numbered, tries: int) -> tuple[tuple[int, ...], Any]:
    """Four of the cohort are summed. The server takes other numbers until one gives it the four others."""
    start = begun(run)
    run.server.close(start)
    run.server.round_no += 1
    first = run.server.cohort[:4]
    run.server.round_no -= 1
    opened_at(run, start, absent=others(run.world, first))
    rest = others(run.world, first)
    for _ in range(tries):
        if set(rest) <= set(run.drawn_at(run.server.round_no + 1)):
            return first, second_sum(run, start, rest)
        run.server.round_no += 1
    return first, second_sum(run, start, rest)


def test_numbers_that_are_skipped_change_no_cohort(attacked: Consortium) -> None:
    run = Numbered(attacked)
    first, second = skipped_numbers(run, 20)
    assert second is None
    cohort = run.server.cohort
    assert set(first) < set(cohort)
    rested = others(attacked, cohort)
    assert all(run.refused[x] == "round.not-drawn" for x in rested)


def test_cohorts_by_number_give_a_second_sum(
    kinds: Callable[[str], Consortium], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule before: the sum of members who were to rest is opened from the same model, four others' updates."""
    world = kinds("unchecked").copy(tmp_path / "world")  # there was no other kind
    honest = Group.cohort
    run = Numbered(world)

    def by_number(self: Group, state: bytes, draw: int = 0) -> tuple[int, ...]:  # noqa: ARG001
        return honest(self, word(run.server.round_no), draw)

    monkeypatch.setattr(Group, "cohort", by_number)
    monkeypatch.setattr(run, "drawn_at", lambda number: honest(run.server.group, word(number)))
    first, second = skipped_numbers(run, 400)
    start, rest = dict(run.model), others(world, first)
    assert world.manifest is not None
    counts = {x: world.manifest.terms.member(x).examples for x in rest}
    moves = sum(n * carriers(world, run.trained(x, start, {"rate": 1.0})) for x, n in counts.items())
    mark = second - moves / sum(counts.values())
    assert 0 < np.abs(mark).max() < 0.2 * np.abs(second - carriers(world, start)).max()


# --- cohorts that cannot be completed ---------------------------------------------------------------------

SIZES = [EIGHT, pytest.param(SIXTEEN, marks=pytest.mark.slow)]
REASONS = (
    "round.too-few", "round.too-few-answers", "round.no-more-attempts", "round.cohort-waits", "round.sum-open",
)  # fmt: skip


def spare(run: Run) -> int:
    """How many of a cohort may stay away."""
    return run.server.group.size - run.server.group.least


def away(run: Run) -> tuple[int, ...]:
    """One more of the present cohort than may stay away, from its end."""
    return run.server.cohort[-spare(run) - 1 :]


def goes_on(run: Run, tries: int = 4) -> list[str]:
    """The reasons for which rounds were given up before one succeeded, and another one after it."""
    reasons: list[str] = []
    for _ in range(tries):
        try:
            run.round()
        except RoundError as error:
            reasons.append(error.code)
            assert reasons[-1] in REASONS, reasons
            continue
        run.round()
        return reasons
    raise AssertionError(reasons)


def broken(run: Run, when: str) -> None:
    """A round whose cohort cannot be completed."""
    run.server.close(run.model)
    out = away(run)
    ways: dict[str, dict[str, Any]] = {
        "before ready": {"absent": out},
        "after ready": {"lost": out},
        "between": {"absent": out[:1], "lost": out[1:]},
    }
    with stopped("round.too-few"):
        run.round(**ways[when])


@pytest.mark.parametrize("killed", ["", "files kept", "files lost"])
@pytest.mark.parametrize("when", ["before ready", "after ready", "between"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_cohort_that_is_not_complete_is_drawn_anew(
    made: Consortium, tmp_path: Path, size: tuple[int, int, int], when: str, killed: str
) -> None:
    """Members who can be reached and do not train, or whose uploads do not come."""
    world = of_size(made, tmp_path / "c", size)
    options: dict[str, Any] = {"folder": tmp_path / "run"} if killed == "files kept" else {}
    run = Run(world, **options)
    begun(run, 1)
    broken(run, when)
    state = run.server.history.state
    if killed:
        run = Run(world, run="again", after=run.server.round_no, **options)
        if not options:
            run.server.survey(run.ask, go_on=True)
            run.model = dict(run.server.resumed or {})
        assert run.server.history.state == state
        with suppress(RoundError):
            run.round(absent=away(run))
    if run.server.history.state == state and run.server._settled is None:
        run.round()
    assert run.server.turn.draw == 1
    assert set(run.server.members) == set(run.server.group.cohort(state, 1))
    assert set(run.refused.values()) <= {"round.not-drawn"}
    assert goes_on(run) == []


def test_who_closed_a_draw_takes_part_in_it_no_more(world: Consortium) -> None:
    """It has uploaded, and signs before it is asked to answer; then it neither answers nor joins another round."""
    run = Run(world)
    begun(run, 1)
    run.server.prepare(run.ask, run.model)
    offer, told = run.offer()
    run.join(offer, told)
    run.server.announce()
    run.upload()
    state, cohort = run.server.history.state, run.server.cohort
    requests = {x: run.server.request(x) for x in cohort}
    assert set(never(run, cohort[1:], state, 0)) == set(cohort[1:])
    run.node(cohort[0]).handle("unmask", {"request": requests[cohort[0]]}, {})
    assert never(run, cohort, state, 0).keys() == set(cohort[1:])  # who has answered cannot sign; the others may again
    for x in cohort[1:]:
        with stopped("round.over"):
            run.node(x).handle("unmask", {"request": requests[x]}, {})
    forget(run, dict(run.model))
    with stopped("round.too-few"):
        run.round()
    assert {run.refused[x] for x in cohort[1:]} == {"round.said-never"}


def test_a_server_that_is_killed_knows_its_draw(world: Consortium, tmp_path: Path) -> None:
    run = Run(world, folder=tmp_path / "run")
    begun(run, 1)
    broken(run, "before ready")
    with stopped("round.too-few"):
        run.round(absent=everybody(world))
    assert run.server.turn.draw == 1
    run = Run(world, run="again", after=run.server.round_no, folder=tmp_path / "run")
    assert run.server.cohort == run.server.group.cohort(run.server.history.state, 1)
    run.round()
    assert run.server.members == run.server.cohort
    assert goes_on(run) == []


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_draw_after_some_have_answered(made: Consortium, tmp_path: Path, size: tuple[int, int, int]) -> None:
    """So few that the sum can be given up; then the cohort is not complete, and the next draw frees them. A server that
    is killed after that, with its files or without, goes on as well."""
    world = of_size(made, tmp_path / "c", size)
    run = Run(world, folder=tmp_path / "run")
    begun(run, 1)
    run.server.close(run.model)
    state, cohort, group = run.server.history.state, run.server.cohort, run.server.group
    few = group.quorum - group.threshold
    with stopped("round.too-few-answers"):
        run.round(silent=cohort[few:])
    run.server._ask_again = lambda *_: False  # type: ignore[method-assign]  # they are silent once more
    with stopped("round.too-few"):
        run.round(absent=cohort[few : few + spare(run) + 1])
    assert run.server.turn.draw == 0
    with stopped("round.too-few-answers"):  # again, under the second draw
        run.round(silent=group.cohort(state, 1)[few:])
    assert run.server.turn.draw == 1
    freed = set(cohort[:few]) & set(group.cohort(state, 1))
    assert freed <= set(run.server.members)
    run = Run(world, run="killed", after=run.server.round_no, folder=tmp_path / "run")
    assert run.server.history.state == state
    run.round()  # the open sum of the second draw
    assert run.server.turn.draw == 1
    run.server.close(run.model)
    assert run.server.history.state != state
    assert goes_on(run) == []


@pytest.mark.parametrize("answers", ["few", "all but one"])
def test_a_server_without_files_finds_the_draw_that_was_answered(world: Consortium, answers: str) -> None:
    """Members say under which draw they have answered. The sum is given up, or made again under that draw."""
    run = Run(world)
    begun(run, 1)
    broken(run, "before ready")
    state, group = run.server.history.state, run.server.group
    second = group.cohort(state, 1)
    count = group.quorum - group.threshold if answers == "few" else group.quorum - 1
    with stopped("round.too-few-answers"):
        run.round(silent=second[count:])
    run = Run(world, run="again", after=run.server.round_no)
    run.server.survey(run.ask, go_on=True)
    run.model = dict(run.server.resumed or {})
    assert run.server.history.state == state
    reasons = goes_on(run)
    assert len(reasons) <= 2, reasons


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_cohort_that_nobody_reaches_is_waited_for(
    made: Consortium, tmp_path: Path, size: tuple[int, int, int]
) -> None:
    """Too few can sign that another is drawn: they could have answered, for all that the others know."""
    world = of_size(made, tmp_path / "c", size)
    run = Run(world)
    begun(run, 1)
    run.server.prepare(run.ask, run.model)
    run.gone = away(run)
    with stopped("round.too-few"):
        run.round()
    for _ in range(2):
        with stopped("round.cohort-waits", names="'Hospital "):
            run.round()
    run.gone = []
    assert goes_on(run) == []


def test_the_last_draw_is_waited_for(world: Consortium) -> None:
    run = Run(world)
    begun(run, 1)
    run.server.close(run.model)
    for draw in range(DRAWS):
        out = run.server.group.cohort(run.server.history.state, draw)[-spare(run) - 1 :]
        with stopped("round.too-few"):
            run.round(absent=out)
        assert run.server.turn.draw == draw
    run.gone = out
    with stopped("round.cohort-waits"):
        run.round()
    run.gone = []
    run.round()
    assert run.server.turn.draw == DRAWS - 1
    # nobody goes to another one, whatever is shown
    run.server.close(run.model)
    past, group = run.server._current_past(), run.server.group
    for draw in range(DRAWS):
        said = never(run, everybody(world), past.state, 0, draw)
        past.closed[statements.place_of(group, draw)] = said
    past.draw = DRAWS
    with stopped("round.too-few"):
        run.round()
    assert list(run.refused.values()).count("round.no-more-draws") == group.size


def test_a_simulation_draws_anew(world: Consortium) -> None:
    """Everybody is away from training in the second round, and can be reached."""
    run = world.in_process(1, 3, Losses({(2, "train"): everybody(world)}))
    state, group = run.history.state, run.group
    reports = [run.round() for _ in range(3)]
    assert reports[0].given_up_code == "round.too-few"
    assert reports[1].members == group.cohort(state, 1)
    assert not reports[2].given_up


def test_one_liar_cannot_close_a_draw(world: Consortium) -> None:
    """It says that it has answered under a later draw, and hands out statements at the others' points."""
    run = Run(world)
    begun(run, 1)
    broken(run, "before ready")
    liar, ask = run.server.cohort[0], run.ask

    def answers(stage: str, config: dict[str, Any], /, **more: Any) -> dict[int, dict[str, Any]]:
        said = ask(stage, config, **more)
        if stage == "never":
            said[liar] |= {"point-there": run.server.cohort[1], "never": b"nonsense"}
        return said

    run.ask = answers  # type: ignore[method-assign]
    assert goes_on(run) == []
    run.server.close(run.model)
    run.server.take_answered(liar, run.server.round_no, (1, 2, 3, 4), draw=-5)
    run.server.take_answered(liar, run.server.round_no - 1, (1, 2, 3, 4), draw=99)
    reasons = goes_on(run, 8)
    assert len(reasons) <= DRAWS, reasons


def test_halvings_are_those_that_the_cohort_asked_for(world: Consortium) -> None:
    """Of two cohorts each says for itself that a mark is too strong."""
    run = Tuned(world)
    begun(run)
    run.server.close(run.model)
    run.rate = 0.0
    with stopped("round.too-strong"):
        run.round()
    past, group = run.server._current_past(), run.server.group
    said = past.strong[0]
    assert set(said) == set(run.server.cohort)
    statements.check_halved(group, past.state, 1, {0: said})
    inside = set(said) & set(group.cohort(past.state, 1))
    shown = {x: said[x] for x in list(inside)[: group.blocking - 1] + [x for x in said if x not in inside]}
    with stopped("round.not-halved"):
        statements.check_halved(group, past.state, 1, {0: shown}, 1)


# --- amendments -------------------------------------------------------------------------------------------


def under(later: Consortium, before: Consortium, run: Run, kind: type[Run] = Run) -> Run:
    """The next run, under the amended manifest, of a server without files."""
    assert before.manifest is not None
    again = kind(later, run="amended", after=run.server.round_no, earlier=(before.manifest,))
    again.server.survey(again.ask, go_on=True)
    again.model = dict(again.server.resumed or {})
    return again


@pytest.mark.parametrize("draw", [0, 1])
def test_an_amendment_closes_every_draw(tmp_path: Path, made: Consortium, draw: int) -> None:
    """At a state whose cohort was drawn so often: all draws that could have been made are closed."""
    world = made.copy(tmp_path / "world")
    run = Run(world)
    begun(run, 1)
    broken(run, "before ready")
    if draw:
        run.server.prepare(run.ask, run.model)
        assert run.server._current_past().draw == 1
    later = amend(world, tmp_path / "amendment", examples={2: 150})
    again = under(later, world, run)
    again.round()
    assert world.manifest is not None
    old = group_of(world.manifest)
    assert {statements.place_of(old, j) for j in range(DRAWS)} <= set(again.server._current_past().closed)
    assert set(again.server.members) == set(group_of(again.server.manifest).cohort(again.server.history.state))
    assert goes_on(again) == []


def amended_after_a_redraw(world: Consortium, folder: Path) -> tuple[Any, Run]:
    """A sum is opened under the second draw. Then the manifest changes, and the server shows that the first draw is
    closed, which is true, and nothing of the second."""
    run = Tuned(world)
    model = begun(run)
    broken(run, "before ready")
    assert run.server.history.state
    opened_at(run, model)
    assert run.server.turn.draw == 1
    later = amend(world, folder, examples={2: 150})
    again = under(later, world, run, Tuned)
    assert isinstance(again, Tuned)
    again.server._past.answered.clear()
    try:
        return opened_at(again, again.model), again  # type: ignore[arg-type]
    except RoundError:
        return None, again


def test_a_closed_draw_does_not_close_a_manifest(world: Consortium, tmp_path: Path) -> None:
    second, again = amended_after_a_redraw(world, tmp_path / "amendment")
    assert second is None
    assert "round.not-closed" in again.refused.values(), again.refused


def test_if_it_did_there_would_be_a_second_sum(
    world: Consortium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = statements.check_closed

    def only_the_first(group: Group, state: bytes, said: Any) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(Group, "draws", 1)
            honest(group, state, said)

    monkeypatch.setattr(statements, "check_closed", only_the_first)
    second, again = amended_after_a_redraw(world, tmp_path / "amendment")
    assert second is not None
    start = carriers(world, dict(again.model))
    assert np.abs(second - start).max() > 0  # what members learnt from one model, a second time
