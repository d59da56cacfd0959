"""Where training turns round: what the momentum still has of the mark does not stay behind in the step
(docs/optimisers.md, "The mark"); and what no limit that is made before the sum can help, with its figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from math import sqrt
from typing import Any

import numpy as np
import pytest

from quorumark.consortium.optimiser import Optimiser
from quorumark.consortium.strength import ONE
from quorumark.model.layout import ModelLayout
from quorumark.round.amplitudes import HALVINGS, Amplitudes, MarkState
from quorumark.round.applied import Applied
from quorumark.round.history import History, Settled
from quorumark.round.movement import axis_sums, carriers_of
from quorumark.round.optimiser import Taken
from tests.kit.optimised import SHAPES, Ran, run, slowing, turning, walk
from tests.kit.optimiser_oracle import MarkOracle

MOMENTUM = ["fedavgm:server_momentum=0.9", "fedadam:eta=0.01", "fedyogi:eta=0.01"]
ADAGRAD = "fedadagrad:eta=0.02"
NOISY, QUIET = (0.005, 0.002), (0.0005, 0.002)  # of a member's update: noise, and what all have in common
WAYS = pytest.mark.parametrize("way", [NOISY, QUIET], ids=["noisy", "quiet"])
CHANCE = 4 / sqrt(18_432)  # what a cosine with a key of 18,432 signs may be off by; keys are seeded


def turned(text: str | None, way: tuple[float, float], c_max: str = "0.1", rows: float = 1.0, **more: Any) -> Ran:
    return run(text, 24, 1, {"rho": "0.1", "c_max": c_max}, world=turning(12, *way, rows), **more)


def without_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """No momentum begins anew."""
    monkeypatch.setattr(Applied, "_loud", lambda _, layout, *__: np.zeros(layout.size, bool))


CASES = [("0.1", way, text) for text in MOMENTUM for way in (NOISY, QUIET)] + [("0.03", QUIET, MOMENTUM[0])]
SHARP = "fedadam:eta=0.01,tau=0.000000001"


@pytest.mark.parametrize(("c_max", "way", "text"), [*CASES, ("0.1", QUIET, SHARP)])
def test_no_step_shows_more_than_c(text: str, c_max: str, way: tuple[float, float]) -> None:
    """All updates change sign after round 12. Of no tensor's step more than c is the mark, as members compute it; and
    the forecast follows."""
    ran = turned(text, way, c_max)
    assert ran.share <= float(c_max)
    assert ran.applied.loudest <= float(c_max) + CHANCE
    assert ran.anew == 18_432
    assert abs(ran.expected - ran.z) <= 2 + 1  # one key: the chance of its own is a deviation of 1


@pytest.mark.parametrize(("c_max", "way", "text"), CASES)
def test_without_the_rule_a_step_shows_more(
    text: str, c_max: str, way: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_the_rule(monkeypatch)
    ran, c = turned(text, way, c_max), float(c_max)
    assert ran.share > (1.05 * c if way == NOISY else 4 * c)
    if way == QUIET:
        assert ran.applied.loudest > (0.4 if c == 0.1 else 0.2)


@WAYS
def test_an_optimiser_without_momentum_has_nothing_to_begin_anew(way: tuple[float, float]) -> None:
    """FedAdagrad's step is the sum's, weight by weight over r: where those with a small r are quiet, it shows a little
    more than the sum."""
    ran = turned(ADAGRAD, way, "0.03")
    assert ran.anew == 0
    assert 0.03 < 1.01 * ran.share <= 1.2 * 0.03
    assert ran.applied.loudest <= 0.03 + CHANCE


def loudest_row(found: list[float]) -> Callable[[History, Settled], None]:
    """The largest part of the mark in the step of one row of one tensor."""

    def look(history: History, settled: Settled) -> None:
        taken = settled.taken
        assert taken is not None
        assert taken.followed is not None
        for spec, place in history.layout.spans("carrier"):
            shown, moves = (v[place].reshape(spec.shape).astype(float) for v in (taken.followed.shown, taken.moves))
            sizes = np.linalg.norm(shown, axis=1), np.linalg.norm(moves, axis=1)
            found.append(float((sizes[0] / np.maximum(sizes[1], 1)).max()))

    return look


@pytest.mark.parametrize("text", MOMENTUM)
def test_rows_that_turn_alone_do_not_show_theirs(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the rows turns round, the others do not: of the whole step the mark is a small part all the same."""
    kept: list[float] = []
    ran = turned(text, QUIET, rows=0.25, look=loudest_row(kept))
    assert max(kept) <= 2 * 0.1
    assert 0.2 * 18_432 < ran.anew < 0.3 * 18_432
    without_the_rule(monkeypatch)
    bare: list[float] = []
    assert turned(text, QUIET, rows=0.25, look=loudest_row(bare)).share < 0.1
    assert max(bare) > 0.3


@pytest.mark.parametrize("text", [*MOMENTUM, ADAGRAD])
def test_where_training_does_not_turn_nothing_begins_anew(text: str) -> None:
    assert run(text, 24, 1, {"rho": "0.1", "c_max": "0.1"}, world=walk).anew == 0


SMALL = {"a": (12, 16), "b": (8, 12), "bias": (8,)}
ORACLE = [
    "fedavgm:server_learning_rate=0.7,server_momentum=0.9",
    "fedadam:eta=0.01,tau=0.000001",
    "fedyogi:eta=0.01",
    "fedyogi:eta=0.02,beta_1=0.5,beta_2=0.9",
    "fedadagrad:eta=0.02",
]


@pytest.mark.parametrize(("rows", "decay"), [(1.0, {}), (0.5, {"decay": "0.01"})], ids=["all", "rows, with decay"])
@pytest.mark.parametrize("text", ORACLE)
def test_every_bit_is_the_oracle_s(text: str, rows: float, decay: dict[str, str]) -> None:
    """Steps, the mark in the momentum, what it does to r and what of it is in the model, through two turns: against
    Python's integers."""
    oracles: list[MarkOracle] = []

    def look(history: History, settled: Settled) -> None:
        mark, taken = history.mark, settled.taken
        assert mark.applied is not None
        assert taken is not None
        assert taken.followed is not None
        if not oracles:
            chosen = mark.applied.state.optimiser
            shapes = [(12, 16), (8, 12), (8, 1)]  # the bias carries no mark: its marks are 0
            oracles.append(MarkOracle(chosen.name, dict(chosen.settings), shapes, Fraction(mark.strength.c_max, ONE)))
        marks = np.zeros(history.layout.size, np.int64)
        if settled.embedded is not None:
            marks[: history.layout.carrier_size] = settled.embedded.sizes
        moves = oracles[0].take(taken.raw.tolist(), marks.tolist(), mark.strength.kept(history.round))
        assert taken.moves.tolist() == moves
        end = history.layout.carrier_size
        assert taken.followed.mark.tolist() == oracles[0].mark[:end]
        assert taken.followed.drag.tolist() == oracles[0].drag[:end]
        assert (mark.applied.embedded + taken.followed.shown).tolist() == oracles[0].embedded[:end]
        assert taken.after.momentum.tolist() == [m for m, _ in oracles[0].optimiser.state]

    strength = {"rho": "0.3", "c_max": "0.1", "dither": "1", **decay}
    ran = run(text, 14, 2, strength, world=turning(9, 0.0004, 0.002, rows, SMALL), look=look)
    assert ran.anew == oracles[0].anew
    assert (ran.anew > 0) != text.startswith("fedadagrad")


def test_a_tensor_that_is_held_keeps_what_would_have_begun_anew() -> None:
    """Its weights stay, and so do m and M: nothing was stepped there."""
    place, found = slice(0, 96 * 128), list[tuple[Applied, Taken]]()

    def look(history: History, settled: Settled) -> None:
        if settled.taken is not None and settled.taken.anew is not None:
            assert history.mark.applied is not None
            found.append((history.mark.applied, settled.taken))

    turned(MOMENTUM[0], QUIET, look=look)
    (before, taken), *_ = found
    assert taken.anew is not None
    assert taken.anew[place].all()
    kept = taken.without([place])
    assert before.mark[place].any()
    assert np.array_equal(kept.after.momentum[place], taken.before.momentum[place])
    layout = ModelLayout.of({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})
    carriers = carriers_of(layout)
    still = [axis_sums(c, *(np.zeros(layout.carrier_size, np.uint64),) * 2) for c in carriers]
    after, _ = before.after(layout, carriers, still, kept, None)
    for name in ("mark", "drag", "embedded"):
        assert np.array_equal(getattr(after, name)[place], getattr(before, name)[place])
    assert not np.array_equal(after.mark, before.mark)


@pytest.mark.parametrize("stands", [False, True])
def test_of_sampled_carriers_those_weights_count_that_carry(stands: bool) -> None:
    """The momentum is half mark, half something else. Where its own part of the sum stands still, or takes the other
    half out, it is loud; what the other weights do is no matter."""
    rng = np.random.default_rng(4)
    layout = ModelLayout.of({"w": np.zeros((64, 64), np.float32)}, max_coordinates=800)
    spot = layout.carrying()
    nothing = tuple(tuple((0,) * count for count in carrier.axes) for carrier in carriers_of(layout))
    applied = Applied.start(Optimiser.of(MOMENTUM[0]), layout, nothing)
    momentum = np.zeros(layout.size, np.int64)
    momentum[spot] = rng.choice([-20, 20], layout.coordinates) << 25
    mark = np.full(layout.coordinates, 1 << 25, np.int64)
    applied = replace(applied, mark=mark, state=replace(applied.state, momentum=momentum))
    raw = rng.integers(-(1 << 34), 1 << 34, layout.size)
    raw[spot] = 0 if stands else -(momentum[spot] * 17) // 20
    taken = applied.take(layout, raw, None, ONE, ONE // 10, averaged=set())
    assert (taken.anew is None) == stands
    if taken.anew is not None:
        assert taken.anew.all()
        assert np.array_equal(taken.moves, taken.raw)


# --- what no rule about a step can help: the figures in docs/strength.md ----------------------------------


@WAYS
def test_sums_from_before_a_turn_and_after_it_show_the_marks_of_both(
    way: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an optimiser, too. Updates that go the same way hide each other's mark; with some that go the other way,
    a weighted sum of all is left without the way. Each sum alone is within c. To mark nothing after the turn does not
    help: it is the marks before it that show."""
    turned_round = turned(None, way)
    before = run(None, 12, 1, {"rho": "0.1", "c_max": "0.1"}, world=turning(12, *way))
    monkeypatch.setattr(MarkState, "amplitudes", unmarked_from(14))
    ceased = turned(None, way)
    assert not any(ceased.cs[13:])
    assert turned_round.raw.loudest <= 0.1 + CHANCE
    found = [ran.raw.best for ran in (before, turned_round, ceased)]
    assert found == pytest.approx([0.17, 0.27, 0.27] if way == NOISY else [0.47, 0.64, 0.58], abs=0.03)


def unmarked_from(number: int) -> Callable[..., Amplitudes]:
    marked = MarkState.amplitudes
    return lambda self, round_no, halvings=0: marked(self, round_no, HALVINGS if round_no >= number else halvings)


@pytest.mark.parametrize(
    ("factor", "shows", "halved"), [(0.5, 0.16, 0), (0.2, 0.26, 0), (0.1, 0.26, 1)], ids=["half", "a 5th", "a 10th"]
)
def test_a_sum_that_is_suddenly_small_shows_more_than_c(factor: float, shows: float, halved: int) -> None:
    """S is made before the update that shall hide it. Members whose update became so small refuse at 4·c_max times
    their own, and their own is √5 times the sum's: here they do at a tenth. Dither keeps it below 1/√(1 + κ²)."""
    ran = run(None, 14, 1, {"rho": "0.5", "c_max": "0.1"}, world=slowing(10, factor))
    assert ran.raw.loudest == pytest.approx(shows, abs=CHANCE)
    assert ran.halved == halved
    assert ran.refused == 5 * halved
