"""Who asks for wider units than it needs: nobody can see that, so what a few ask for is limited."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorumark.round import units
from quorumark.round.units import Packing
from quorumark.simulation import Federation, Losses
from tests.kit.federation import Model, World, vector

PACKED = ("2", "3", "4")
LIAR, TENSORS = 2, 4  # of the model in tests/kit/federation.py


# --- the rule ---------------------------------------------------------------------------------------------


@given(
    st.sampled_from([2, 3, 4]),
    st.lists(st.one_of(st.none(), st.lists(st.integers(0, 7), min_size=3, max_size=3)), min_size=1, max_size=9),
    st.lists(st.integers(0, 10), min_size=3, max_size=3),
    st.integers(1, 4),
)
def test_what_a_few_need_is_limited_and_what_many_need_is_not(
    count: int, claims: list[list[int] | None], lift: list[int], backing: int
) -> None:
    packs = Packing(count, 9)
    levels = {x: bytes(claim) if claim and any(claim) else b"" for x, claim in enumerate(claims, 1)}
    out = packs.unbacked(levels, lift if any(lift) else (), backing)
    left = {x: level or bytes(3) for x, level in levels.items() if x not in out}
    alone = [max(0, units._ALONE[count] - n // 2) // units._STEP[count] for n in lift]

    def allowed(among: Mapping[int, bytes], i: int) -> int:
        ranked = sorted((level[i] for level in among.values()), reverse=True)
        return max(alone[i], (ranked[backing - 1] if len(ranked) >= backing else 0) + 1)

    assert all(level[i] <= allowed(left, i) for level in left.values() for i in range(3))
    assert packs.unbacked(levels, lift, 1) == set(), "one that could stop the round alone may ask for anything"
    for x in out:  # no larger set that holds one of these is right: each is above what all together back
        assert any(levels[x][i] > allowed({**left, x: levels[x]}, i) for i in range(3)) or len(out) > 1
    assert not any(level and max(level) <= min(alone) for x, level in levels.items() if x in out)
    assert Packing(1, 9).unbacked(levels, lift, backing) == set()


def test_units_stay_below_a_quarter_of_the_reach_for_one_that_lies() -> None:
    """Whatever the lift is, and whatever it asks for: of the sizes that weights move by."""
    from quorumark.model.layout import ModelLayout

    layout, reach = ModelLayout.of({"w": np.zeros((2, 2), np.float32)}), 1 << 34
    for count, most in ((2, 1 << 9), (3, 1 << 4), (4, 1 << 2)):
        packs = Packing(count, 32)
        for lift in range(11):
            for level in range(8):
                if packs.unbacked({1: bytes([level])} if level else {}, (lift,), 2):
                    continue
                ((_, shift),) = packs.spans(layout, [reach], (lift,), bytes([level]) if level else b"")
                assert 1 << shift <= reach // most


# --- a member that lies in every round --------------------------------------------------------------------


def pulled(model: Model, data: float, seed: int) -> Model:
    """A step towards a point, the same for all, with noise of each member's own that shrinks with the way."""
    rng, made = np.random.default_rng(seed), dict(model)
    for name, tensor in model.items():
        if name != "steps":
            way = np.float32(1) - tensor
            noise = rng.standard_normal(tensor.shape).astype(np.float32) * np.sqrt((way**2).mean())
            made[name] = tensor + np.float32(0.3) * way + np.float32(0.1 + data) * noise
    return made


def trained(count: str, claims: Callable[[Federation], bytes] | None, rounds: int = 40) -> tuple[Federation, float]:
    """The part of the way to that point that is left, and how the liar was treated."""
    made = World(policy={"packing": count}, strength={"dither": "0"})
    run = made.federation(members=made.members(pulled))
    start = np.sqrt(((1 - vector(run)) ** 2).mean())
    honest = run.history.level
    if claims is not None:
        liar = run.members[LIAR]
        run.history.level = lambda update: (  # type: ignore[method-assign]
            claims(run) if update.after is liar._result else honest(update)
        )
    for _ in range(rounds):
        report = run.round()
        assert not report.given_up, report.given_up
        assert np.isfinite(vector(run)).all()
    return run, float(np.sqrt(((1 - vector(run)) ** 2).mean()) / start)


def largest_allowed(run: Federation) -> bytes:
    mark = run.history.mark
    for level in range(7, 0, -1):
        if not mark.unbacked({LIAR: bytes([level] * TENSORS)}, 2):
            return bytes([level] * TENSORS)
    return b""


@pytest.mark.parametrize("count", PACKED)
def test_a_member_that_always_asks_for_the_widest_units_it_may_does_not_stop_training(count: str) -> None:
    """It is there in each round, by name, and all get on. With two weights in an element, the default, the mark is in
    as well."""
    run, left = trained(count, largest_allowed)
    plain, honest = trained(count, None)
    assert all(report.members == (1, 2, 3, 4, 5) for report in run.reports)
    assert all(set(report.widened) >= {LIAR} for report in run.reports[1:])
    assert max(left, honest) < 0.05
    if count == "2":
        assert run.reports[-1].rho > 0.9 * plain.reports[-1].rho > 0.01


@pytest.mark.parametrize("count", PACKED)
def test_a_member_that_asks_for_more_is_left_out(count: str) -> None:
    run, left = trained(count, lambda _: bytes([7] * TENSORS))
    assert all(report.members == (1, 3, 4, 5) for report in run.reports)
    assert all(report.excluded_codes == {LIAR: "round.level-alone"} for report in run.reports)
    assert left < 0.05


def test_without_the_rule_it_stops_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Packing, "unbacked", lambda *_: set())
    for count in ("3", "4"):
        _, left = trained(count, lambda _: bytes([7] * TENSORS))
        assert left > 0.4


@pytest.mark.parametrize("count", PACKED)
def test_a_level_for_another_model_excludes_its_sender(count: str) -> None:
    run, _ = trained(count, lambda _: b"\1", rounds=2)
    assert all(report.members == (1, 3, 4, 5) for report in run.reports)


def test_members_do_not_believe_a_server_that_lets_one_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = World(policy={"packing": "4"})
    run = made.federation()
    honest, liar = run.history.level, run.members[LIAR]
    run.history.level = lambda update: (  # type: ignore[method-assign]
        bytes([7] * TENSORS) if update.after is liar._result else honest(update)
    )
    begun = type(run.server).begin

    def begin(server: Any, *about: Any) -> None:
        begun(server, *about)
        server._sum._unbacked = lambda _: set()

    monkeypatch.setattr(type(run.server), "begin", begin)
    report = run.round()
    assert report.given_up
    assert set(report.excluded_codes.values()) == {"round.level-alone"}


def test_what_loses_its_backing_with_an_upload_is_left_out_of_the_next_attempt() -> None:
    """Members 2 and 4 need what neither may ask for alone; 4 is lost before it uploads."""
    wide = {x: bytes([6] * TENSORS) for x in (2, 4)}
    for lost, members in (((), tuple(range(1, 9))), ((4,), (1, 3, 5, 6, 7, 8))):
        made = World(8, 2, policy={"packing": "4"})
        run = made.federation(losses=Losses({(1, "upload"): lost}))
        assert (run.group.blocking, run.group.least) == (2, 5)
        honest = run.history.level

        def level(update: Any, run: Federation = run, honest: Any = honest) -> bytes:
            mine = [x for x in wide if update.after is run.members[x]._result]
            return wide[mine[0]] if mine else honest(update)

        run.history.level = level  # type: ignore[method-assign]
        report = run.round()
        assert (report.given_up, report.members, report.attempts) == ("", members, 1 + len(lost))
        assert report.excluded_codes == ({2: "round.level-alone"} if lost else {})
