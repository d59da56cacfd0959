"""Where the parts of a packed round end, to the last unit, in whole rounds with checked sums and the mark: what a
member may send, and what one changes that sends more (docs/secagg.md, "Packed sums")."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quorumark import codec, field, packing
from quorumark.packing import BITS
from quorumark.round.amplitudes import MarkState
from quorumark.round.mark import weights
from quorumark.simulation import Federation
from tests.kit.federation import Model, World, initial, train

PACKED = ("2", "3", "4")
STRENGTH = {"rho": "0.05", "c_max": "0.03", "dither": "0"}
TENSOR, INSIDE = "b.weight", 7  # a carrier, and a place in it
ROUND = 3  # the first one with a mark


def world(count: str) -> World:
    """Models of float64: a sum is in them to the last unit."""
    model: Model = {name: v.astype(np.float64) if v.dtype.kind == "f" else v for name, v in initial().items()}
    return World(policy={"packing": count, "sums": "checked"}, strength=STRENGTH, model_of=model)


def opened(run: Federation) -> list[NDArray[np.int64]]:
    """Fills with the sums that open, unpacked, in 2^-40."""
    found: list[NDArray[np.int64]] = []
    honest = run.server.finish

    def spy() -> Any:
        history, made = run.history, honest()
        count, size = history.packing.count, run.layout.size
        vector = run.server.opened[: packing.elements(size, count)]
        found.append(packing.unpack(vector, size, history.mark.spans(run.server.level), count)[0])
        return made

    run.server.finish = spy  # type: ignore[method-assign]
    return found


def place_of(run: Federation, name: str) -> slice:
    return next(place for spec, place in run.layout.spans() if spec.name == name)


@functools.cache
def before(count: str) -> MarkState:
    """The state that the round starts from."""
    run = world(count).federation()
    for _ in range(ROUND - 1):
        run.round()
    return run.history.mark


# --- what a member may send -------------------------------------------------------------------------------


class Reaching:
    """In one round one weight of some members moves by exactly so many units of a level, and so many more."""

    def __init__(self, points: set[int], level: int, more: dict[int, int]) -> None:
        self.points, self.level, self.more = points, level, more
        self.trained = 0
        self.results: dict[int, NDArray[np.int64]] = {}  # E of what was trained in that round
        self.run: Federation | None = None

    def __call__(self, model: Model, data: float, seed: int, round_no: int) -> Model:
        self.trained += 1
        made, x = train(model, data, seed), round(data / 0.01)
        if round_no != ROUND:
            return made
        run = self.run
        assert run is not None
        if x in self.points:
            mark, tensor = run.history.mark, place_of(run, TENSOR)
            spans = mark.spans(bytes([self.level] * run.history.tensors) if self.level else b"")
            (shift,) = (shift for place, shift in spans if place == tensor)
            own = run.history.packing.own_limit + self.more.get(x, 0)
            start = int(field.to_signed(mark.model[tensor])[INSIDE])
            made[TENSOR].reshape(-1)[INSIDE] = (start + (own << shift)) * 2.0**-40
        self.results[x] = field.to_signed(run.layout.encode(made))
        return made


def reached(count: str, training: Reaching) -> tuple[Federation, NDArray[np.int64], NDArray[np.float64]]:
    """After that round: its run, what it summed, and what plain FedAvg makes of the same results with S·τ on top."""
    made = world(count)
    run = training.run = made.federation(members=made.members(training))
    sums = opened(run)
    for _ in range(ROUND - 1):
        assert not run.round().given_up
    start = field.to_signed(run.history.mark.model)
    embedded: list[Any] = []
    accept = run.server.accept

    def accepted(model: Any) -> None:
        embedded.append(run.server.settled.embedded)
        accept(model)

    run.server.accept = accepted  # type: ignore[method-assign]
    report = run.round()
    assert (report.given_up, report.attempts, report.held) == ("", 1, ())
    assert training.trained == 5 * ROUND, "nobody trains again"
    shares = weights(made.manifest, report.members)
    wanted = np.zeros(start.size)
    for x, share in shares.items():
        wanted += float(share) * (training.results[x] - start)
    assert embedded[0] is not None
    d = made.layout.coordinates
    signs = np.where(made.manifest.genesis.whitening(0, d), -made.key(), made.key())
    wanted[:d] += embedded[0].vector.astype(np.float64) * signs
    return run, sums[-1], wanted


@pytest.mark.parametrize("count", PACKED)
@pytest.mark.parametrize("more", [0, 1])
def test_an_update_at_its_limit_fits_and_with_one_unit_more_the_units_widen(count: str, more: int) -> None:
    """For its tensor alone, in the round in which it was trained: the sum is FedAvg's, and the mark is in it."""
    run, found, wanted = reached(count, Reaching({2}, 0, {2: more}))
    level = bytes(more if spec.name == TENSOR else 0 for spec, _ in run.layout.spans()) if more else b""
    assert run.server.level == level
    assert run.reports[-1].members == (1, 2, 3, 4, 5)
    assert run.reports[-1].widened == ({2: 1} if more else {})
    usual, used = before(count).spans(), before(count).spans(level)
    assert [place for place, shift in used if (place, shift) not in usual] == ([place_of(run, TENSOR)] if more else [])
    for place, shift in used:  # K/2 units, and what float64 rounds
        assert np.abs(found[place] - wanted[place]).max() <= 5 * 2.0 ** (shift - 1) + 64


@pytest.mark.parametrize("count", PACKED)
@pytest.mark.parametrize("more", [0, 1])
def test_an_update_at_the_limit_of_the_widest_units_fits_and_one_unit_more_is_not_uploaded(
    count: str, more: int
) -> None:
    """All members reach it, since one alone would be left out for it; the second one sends nothing with a unit more,
    and the round goes on without it."""
    run, found, wanted = reached(count, Reaching({1, 2, 3, 4, 5}, 7, {2: more}))
    report = run.reports[-1]
    assert report.excluded_codes == ({2: "round.does-not-fit"} if more else {})
    assert report.members == ((1, 3, 4, 5) if more else (1, 2, 3, 4, 5))
    widest = before(count).spans(bytes([7] * run.history.tensors))[1]
    assert before(count).spans(run.server.level)[1] == widest, "whatever level has these units first"
    assert widest[0] == place_of(run, TENSOR)
    place = place_of(run, TENSOR)
    assert abs(found[place.start + INSIDE]) > 1 << 40
    assert np.abs(found - wanted).max() < abs(found[place.start + INSIDE]) * 1e-3
    assert np.abs(field.to_signed(run.history.mark.model)).max() < int(codec.LIMIT) << 40


# --- what a member changes that sends more ----------------------------------------------------------------

INSIDES = {2: 700, 3: 400, 4: 360}  # an element whose parts are of that many tensors


def forged(count: str, part: int, up: bool, beyond: int) -> tuple[Federation, Federation, NDArray[np.int64], list[int]]:
    """Two runs of the same rounds; in the last one of the second, member 2 brings a part of the sum so many units
    beyond its range. Then also how the sums differ in units, by place, and the places of the element."""
    made, at = world(count), INSIDES[int(count)]
    runs = made.federation(), made.federation()
    sums = [opened(run) for run in runs]
    for run in runs:
        for _ in range(ROUND - 1):
            assert not run.round().given_up
    honest, liar = runs
    shifts = np.zeros(made.layout.size, np.int64)
    for place, shift in honest.history.mark.spans():
        shifts[place] = shift
    assert not honest.round().given_up
    assert honest.reports[-1].marked
    bits, length = BITS[int(count)], packing.elements(made.layout.size, int(count))
    places = [j * length + at for j in range(int(count))]
    now = int(sums[0][-1][places[part]] >> shifts[places[part]])
    target = (1 << (bits - 1)) - 1 + beyond
    more = (target if up else -target) - now
    true_fill = liar.members[2]._fill

    def fill(y: Any, *others: Any) -> None:
        true_fill(y, *others)
        y[at] = (int(y[at]) + (more << (part * bits))) % field.P

    liar.members[2]._fill = fill  # type: ignore[method-assign,assignment]
    report = liar.round()
    assert (report.given_up, report.members) == ("", (1, 2, 3, 4, 5)), "its tag is of what it sent, and fits"
    differs = (sums[1][-1] - sums[0][-1]) >> shifts
    return honest, liar, differs, places


@pytest.mark.parametrize("up", [True, False])
@pytest.mark.parametrize(("count", "part"), [(q, j) for q in PACKED for j in range(int(q))])
def test_a_part_that_is_one_unit_out_of_range_holds_the_tensors_of_its_element(count: str, part: int, up: bool) -> None:
    """These keep their weights. All other tensors are as they would have been."""
    honest, liar, _, places = forged(count, part, up, 1)
    held = {spec.name for spec, place in liar.layout.spans() for i in places if place.start <= i < place.stop}
    assert set(liar.reports[-1].held) == held
    assert len(held) == int(count)
    for spec, place in liar.layout.spans():
        like = before(count) if spec.name in held else honest.history.mark
        assert (liar.history.mark.model[place] == like.model[place]).all(), spec.name


@pytest.mark.parametrize("up", [True, False])
@pytest.mark.parametrize(("count", "part"), [(q, j) for q in PACKED for j in range(int(q) - 1)])
@pytest.mark.parametrize("beyond", [2, 5])
def test_a_part_that_wraps_changes_itself_and_the_part_above_it_by_one_unit(
    count: str, part: int, up: bool, beyond: int
) -> None:
    """Nothing else in the sum, nor in the model, changes by a bit. (One unit out of range is where nothing wraps
    upwards and everything is held; from two on it is read as a number of the other sign.)"""
    honest, liar, differs, places = forged(count, part, up, beyond)
    bits, sign = BITS[int(count)], 1 if up else -1
    own = int(differs[places[part]])
    assert {int(i): int(differs[i]) for i in np.flatnonzero(differs)} == {places[part]: own, places[part + 1]: sign}
    assert abs(own) < 1 << bits
    assert liar.reports[-1].held == ()
    moved = field.to_signed(field.sub(liar.history.mark.model, honest.history.mark.model))
    shifts = dict.fromkeys(places, 0)
    for place, shift in before(count).spans():
        shifts |= {i: shift for i in places if place.start <= i < place.stop}
    expected = {places[part]: own << shifts[places[part]], places[part + 1]: sign << shifts[places[part + 1]]}
    assert {int(i): int(moved[i]) for i in np.flatnonzero(moved)} == expected
