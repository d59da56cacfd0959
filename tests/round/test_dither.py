"""The members' noise beside the mark, and no mark after a jump: what they are, and what happens without their parts."""

from __future__ import annotations

import itertools
from fractions import Fraction
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quorumark import codec, field
from quorumark.consortium.identity import Identity
from quorumark.consortium.strength import ONE, Strength
from quorumark.errors import InputError, RecordError
from quorumark.model.layout import ModelLayout
from quorumark.round import continuity
from quorumark.round.amplitudes import Amplitudes, MarkState
from quorumark.round.continuity import Pace
from quorumark.round.dither import add_dither, dither_noise, dither_stream
from quorumark.round.mark import ideal_mark, weights
from quorumark.round.movement import ideal_norms
from tests.kit.flowers import Consortium
from tests.kit.helpers import key_of
from tests.kit.opened import summed
from tests.kit.rounds import Run

PEOPLE = [Identity.from_secret_bytes(f"Member {i}", bytes([i] * 32 + [i + 50] * 32)) for i in range(1, 6)]
SHARES = [Fraction(n, 1000) for n in (50, 100, 200, 250, 400)]
RULE = {"rule": "relative", "c": "0.03", "dither": "0"}
SHAPE = (60, 500)


def _layout(**options: Any) -> ModelLayout:
    return ModelLayout.of({"w": np.zeros(SHAPE, np.float32), "b": np.zeros(60, np.float32)}, **options)


def _amplitudes(layout: ModelLayout, key: str = "rademacher") -> Amplitudes:
    scales = tuple(1_000_000 + 10_000 * i for i in range(SHAPE[0])), (1 << 40,) * SHAPE[1]
    return Amplitudes(layout, key, 3, 0, 0, (scales,))


def _noise(x: int, state: bytes, amplitudes: Amplitudes, kappa: int = 3, weight: Fraction | None = None) -> Any:
    """Member x's noise in units of S, and what it adds to the weights that carry nothing."""
    y = np.zeros(amplitudes.layout.size, np.uint64)
    share = SHARES[x] if weight is None else weight
    add_dither(y, amplitudes, kappa * ONE, share, dither_stream(PEOPLE[x], state))
    signed, carrying = field.to_signed(y).astype(float), amplitudes.layout.carrying()
    rest = np.delete(signed, np.r_[carrying])
    return signed[carrying] / amplitudes.vector, rest


# --- the noise --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kappa", [1, 3, 10])
def test_the_noise_of_all_members_is_as_large_as_it_should_be(kappa: int) -> None:
    amplitudes = _amplitudes(_layout())
    parts = [_noise(x, b"a state", amplitudes, kappa)[0] for x in range(5)]
    count = parts[0].size
    for part, share in zip(parts, SHARES, strict=True):
        spread = kappa * sqrt(share)
        assert np.std(part) == pytest.approx(spread, rel=4 / sqrt(2 * count))
        assert abs(np.mean(part)) < 4 * spread / sqrt(count)
        assert np.abs(part).max() <= 3 * spread * 1.001
    total = np.sum(parts, axis=0)
    assert np.std(total) == pytest.approx(kappa, rel=4 / sqrt(2 * count))
    kurtosis = np.mean(total**4) / np.var(total) ** 2
    assert 2.7 < kurtosis < 3.05  # a normal distribution has 3, a uniform one 1.8


def test_equal_states_give_equal_noise_and_others_unrelated_one() -> None:
    amplitudes = _amplitudes(_layout())
    first, again, later = (_noise(0, state, amplitudes)[0] for state in (b"one", b"one", b"two"))
    other = _noise(1, b"one", amplitudes, weight=SHARES[0])[0]
    assert (first == again).all()
    for unrelated in (later, other):
        assert abs(np.corrcoef(first, unrelated)[0, 1]) < 4 / sqrt(first.size)
    halves = first.reshape(2, -1)
    assert abs(np.corrcoef(*halves)[0, 1]) < 4 / sqrt(halves.shape[1])


def test_the_noise_has_no_steps_that_would_show_the_sign() -> None:
    """With steps larger than a unit, one member's noise plus S and minus S would have different remainders."""
    amplitudes = _amplitudes(_layout())
    y = np.zeros(amplitudes.layout.size, np.uint64)
    add_dither(y, amplitudes, 3 * ONE, Fraction(1), dither_stream(PEOPLE[0], b"x"))
    row = np.sort(field.to_signed(y)[:500])  # one row has one amplitude
    for step in range(2, 50):
        assert np.bincount(row % step, minlength=step).max() < 500 / step + 6 * sqrt(500 / step) + 3
    assert len(set(row.tolist())) >= 499


@pytest.mark.parametrize("key", ["rademacher", "gaussian"])
def test_the_noise_is_what_the_words_of_the_stream_say(key: str) -> None:
    """Written down once more, number by number: three uniform numbers from each word, and two products of floats."""
    amplitudes, stream = _amplitudes(_layout(), key), dither_stream(PEOPLE[1], b"x")
    y = np.zeros(amplitudes.layout.size, np.uint64)
    add_dither(y, amplitudes, 3 * ONE, SHARES[1], stream)
    words = np.empty(amplitudes.vector.size, np.uint64)
    stream.words(words)
    factor = 3 * sqrt(SHARES[1]) * 2.0 ** ((8 if key == "gaussian" else 0) - 33)
    wanted = []
    for w, scale in zip(words.tolist(), amplitudes.vector.tolist(), strict=True):
        g = (w >> 30) + ((w >> 15 & 0x7FFF) << 19) + ((w & 0x7FFF) << 19) - (3 << 33)
        wanted.append(round(float(g) * (float(scale) * factor)))
    assert field.to_signed(y)[: len(wanted)].tolist() == wanted


def test_gaussian_keys_and_samples() -> None:
    layout = _layout(max_coordinates=10_000)
    amplitudes = _amplitudes(layout, "gaussian")
    noise, rest = _noise(0, b"x", amplitudes, weight=Fraction(1))
    assert np.std(noise) == pytest.approx(3 * 256, rel=4 / sqrt(20_000))  # S has 8 bits less
    assert rest.size == layout.size - 10_000
    assert not rest.any()


@pytest.mark.parametrize("options", [{}, {"max_coordinates": 10_000}])
def test_packed_updates_have_the_same_noise(options: dict[str, Any]) -> None:
    """Place by place, in whatever pieces it is asked for, and none where nothing carries."""
    layout = _layout(**options)
    amplitudes, stream = _amplitudes(layout), dither_stream(PEOPLE[0], b"x")
    y = np.zeros(layout.size, np.uint64)
    add_dither(y, amplitudes, 3 * ONE, SHARES[2], stream)
    write = dither_noise(amplitudes, 3 * ONE, SHARES[2], stream)
    cuts = np.sort(np.random.default_rng(1).integers(0, layout.size, 40))
    found = np.full(layout.size, -1, np.int64)
    for start, stop in itertools.pairwise([0, *cuts.tolist(), layout.size]):
        if not write(start, found[start:stop]):
            found[start:stop] = 0
    assert found.tolist() == field.to_signed(y).tolist()
    assert not write(layout.carrier_size, np.full(layout.size - layout.carrier_size, 7, np.int64))


def test_nothing_secret_is_shown() -> None:
    stream = dither_stream(PEOPLE[0], b"x")
    assert "hidden" in repr(stream)
    assert PEOPLE[0].to_secret_bytes().hex() not in repr((stream, PEOPLE[0]))


class _Recorded(Run):
    def trained(self, x: int, model: Any, reply: dict[str, Any]) -> Any:
        self.results: dict[int, Any] = getattr(self, "results", {})
        self.results[x] = super().trained(x, model, reply)
        return self.results[x]


@pytest.mark.parametrize("packing", ["1", "2", "3", "4"])
def test_the_opened_sum_is_the_average_the_mark_and_the_noise_exactly(tmp_path: Path, packing: str) -> None:
    """To the last bit with one weight in an element, within half a unit for each member with more."""
    strength = {"rule": "rho", "rho": "0.2", "c_max": "0.1", "dither": "3", "continuity": "4"}
    world = Consortium.deal(tmp_path, 5, 3, strength=strength, policy={"sums": "checked", "packing": packing})
    run, key, layout = _Recorded(world), key_of(world), world.layout
    for number in range(1, 5):
        run.server.advance(run.model)
        history = run.server.history
        state, amplitudes = history.state, history.amplitudes()
        run.round(lost=[2] if number == 4 else [])
        expected = np.zeros(layout.size, np.uint64)
        shares = weights(run.server.manifest, run.server.members)
        for x, share in shares.items():
            y = codec.encode(layout.flatten(run.results[x]), float(share))
            if number > 2:
                home, unlock = world.home(x)
                add_dither(y, amplitudes, 3 * ONE, share, dither_stream(home.identity(unlock), state))
            expected = field.add(expected, y)
        plain = expected.copy()
        ideal_mark(expected, amplitudes, key)
        off = np.abs(field.to_signed(field.sub(summed(run.server), expected)))
        for place, shift in history.mark.spans():
            assert (off[place] <= (0 if packing == "1" else len(shares) << shift >> 1)).all()
        assert (expected != plain).any() == (number > 2), "the mark begins in the third round"
    assert 2 not in run.server.members


# --- what the noise must not do ---------------------------------------------------------------------------


def _alike(monkeypatch: pytest.MonkeyPatch | None, kappa: int = 10) -> float:
    """Five members who move nearly alike; the share of rows with a mark after a round with dither."""
    rng, layout = np.random.default_rng(3), _layout()
    strength = Strength.of({**RULE, "dither": str(kappa)}, layout.coordinates)
    model = rng.normal(0, 0.1, layout.size)
    state = MarkState(strength, layout, "rademacher", codec.encode(model))
    if monkeypatch is not None:
        none = [[[0] * 60, [0] * 500]]
        monkeypatch.setattr(MarkState, "_noise", lambda *_: (none, none))
    for number in range(1, 6):
        amplitudes = state.amplitudes(number)
        common = rng.normal(0, 0.01, layout.size)
        results = [model + common + rng.normal(0, 0.0027, layout.size) for _ in PEOPLE]
        made = {x: codec.encode(result) for x, result in enumerate(results)}
        norms = ideal_norms(layout, state.model, made, dict.fromkeys(made, Fraction(1, 5)))
        after = codec.encode(np.mean(results, axis=0))
        ideal_mark(after, amplitudes, rng.choice(np.array([-1, 1]), layout.coordinates))
        if amplitudes.marks:
            for x in range(5):
                stream = dither_stream(PEOPLE[x], state.chain)
                add_dither(after, amplitudes, kappa * ONE, Fraction(1, 5), stream)
        state.advance(number, after, amplitudes if amplitudes.marks else None, norms)
        model = codec.decode(after)
    return float(np.mean([row > 0 for row in state.amplitudes(6).scales[0][0]]))


def test_noise_does_not_count_as_motion_that_members_have_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _alike(None) > 0.95
    assert _alike(monkeypatch) < 0.5, "without the correction"


def _dead(monkeypatch: pytest.MonkeyPatch | None) -> list[float]:
    """The rms amplitude of rows that die after round 4, in rounds 5, 6 and 7."""
    rng, layout = np.random.default_rng(4), _layout()
    strength = Strength.of({**RULE, "dither": "3", "alike": "mark"}, layout.coordinates)
    model = rng.normal(0, 0.1, layout.size)
    state = MarkState(strength, layout, "rademacher", codec.encode(model))
    if monkeypatch is not None:
        none = [[[0] * 60, [0] * 500]]
        monkeypatch.setattr(MarkState, "_noise", lambda *_: (none, none))
    found = []
    for number in range(1, 8):
        amplitudes = state.amplitudes(number)
        move = rng.normal(0, 0.01, layout.size)
        if number > 4:
            move[: 20 * 500] = 0
            found.append(float(np.sqrt(np.mean(amplitudes.vector[: 20 * 500].astype(float) ** 2))))
        after = field.add(state.model, codec.encode(move))
        if amplitudes.marks:
            ideal_mark(after, amplitudes, rng.choice(np.array([-1, 1]), layout.coordinates))
            add_dither(after, amplitudes, 3 * ONE, Fraction(1), dither_stream(PEOPLE[0], state.chain))
        state.advance(number, after, amplitudes if amplitudes.marks else None)
    return found


def test_the_mark_of_dead_rows_does_not_follow_its_own_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *later = _dead(None)
    assert first > 0
    assert later == [0, 0]
    first, *later = _dead(monkeypatch)
    assert min(later) > 0, "without the rule: three rounds show the same signs, and their noise averages out"


# --- continuity -------------------------------------------------------------------------------------------


def _pace(moves: list[list[int]], plain: list[int], rounds: int = 5) -> Pace:
    pace = Pace()
    for _ in range(rounds):
        pace, jumped, rests = pace.after(moves, plain, 4 * ONE)
        assert not rests
        assert not any(map(any, jumped))
    return pace


M = 1 << 30


def test_what_jumps() -> None:
    rows = [[M] * 1500, [M] * 1000]
    pace = _pace(rows, [M, 2 * M])
    assert pace.plain == (M, 2 * M)
    near, far = [4 * M, *[M] * 1499], [4 * M + 8, *[M] * 1499]
    assert pace.after([near, rows[1]], [4 * M, 8 * M], 4 * ONE)[1:] == ([[False] * 1500, [False] * 1000], False)
    _, jumped, rests = pace.after([far, rows[1]], [M, M], 4 * ONE)
    assert (jumped[0][:2], sum(map(sum, jumped)), rests) == ([True, False], 1, False)
    _, jumped, rests = pace.after([[5 * M] * 3 + [M] * 1497, rows[1]], [M, M], 4 * ONE)
    assert (sum(map(sum, jumped)), rests) == (3, True), "more than one in 1024"
    assert pace.after(rows, [M, 8 * M + 9], 4 * ONE)[2], "a bias"


def test_rows_that_stood_still_may_move_as_their_neighbours() -> None:
    pace = _pace([[0, *[M] * 99], [M] * 50], [0])
    _, jumped, rests = pace.after([[M] * 100, [M] * 50], [0], 4 * ONE)
    assert not rests
    assert not any(map(any, jumped))
    assert pace.after([[0, *[M] * 99], [M] * 50], [M], 4 * ONE)[2], "a plain tensor has no neighbours"


def test_one_jump_does_not_hide_the_next() -> None:
    rows = [[M] * 100, [M] * 50]
    pace = _pace(rows, [M])
    for number in range(1, 6):
        far = [[1000 * M, *[M] * 99], [M] * 50]
        pace, jumped, rests = pace.after(far, [1000 * M], 4 * ONE)
        assert jumped[0][0], number
        assert rests
    assert pace.plain[0] < M * 1.3**5 * 1.001, "a jump counts as its limit"


def _walk(strength: Strength, jump: Any = None, rounds: int = 6) -> tuple[MarkState, list[NDArray[Any]]]:
    """Rounds of a walk; in the last one `jump` changes the step."""
    rng, layout = np.random.default_rng(5), _layout()
    walk = [codec.encode(rng.normal(0, 0.1, layout.size))]
    state = MarkState(strength, layout, "rademacher", walk[0])
    for number in range(1, rounds + 1):
        step = rng.normal(0, 0.01, layout.size)
        if jump is not None and number == rounds:
            jump(step, codec.decode(walk[-1]))
        walk.append(field.add(walk[-1], codec.encode(step)))
        state.advance(number, walk[-1], None)
    return state, walk


def _far(step: NDArray[Any], _: NDArray[Any]) -> None:
    step[:500] *= 6


def _along(step: NDArray[Any], before: NDArray[Any]) -> None:
    step[:500] -= before[:500]


def _bias(step: NDArray[Any], _: NDArray[Any]) -> None:
    step[-1] = 1


@pytest.mark.parametrize("jump", [_far, _along, _bias])
def test_after_a_jump_there_is_no_mark(jump: Any) -> None:
    """Along its own weights as well, where the mark's own measure of motion sees nothing."""
    rule = {**RULE, "alike": "mark"}
    on, off = (Strength.of({**rule, "continuity": value}, SHAPE[0] * SHAPE[1]) for value in ("4", "off"))
    assert not _walk(on, jump)[0].amplitudes(7).marks
    assert _walk(on, jump)[0].silenced == 1
    assert _walk(off, jump)[0].amplitudes(7).marks
    state, _ = _walk(on)
    assert (state.silenced, state.amplitudes(7).digest()) == (0, _walk(off)[0].amplitudes(7).digest())


def test_few_jumps_silence_only_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuity, "_FEW", 500)
    state, _ = _walk(Strength.of({**RULE, "alike": "mark", "continuity": "4"}, SHAPE[0] * SHAPE[1]), _far)
    marks = state.amplitudes(7).vector.reshape(SHAPE)
    assert not marks[0].any()
    assert (marks[1:] > 0).all()
    assert state.silenced == pytest.approx(1 / 60)


def test_the_state_carries_the_pace() -> None:
    strength = Strength.of({**RULE, "alike": "mark", "continuity": "4"}, SHAPE[0] * SHAPE[1])
    state, walk = _walk(strength, _bias)
    data, layout = state.to_bytes(), state.layout
    carried = MarkState.from_bytes(data, strength, layout, "rademacher", walk[-1], walk[0])
    assert (carried.digest(), carried.silenced) == (state.digest(), 1)
    longer = data.replace(b'"plain":[', b'"plain":[5,')
    assert longer != data
    with pytest.raises(RecordError, match="not a mark's state of this layout"):
        MarkState.from_bytes(longer, strength, layout, "rademacher", walk[-1], walk[0])


# --- settings ---------------------------------------------------------------------------------------------


def test_settings() -> None:
    rule = {"rule": "rho", "rho": "0.05", "dither": "0"}
    none = Strength.of(rule, 1000)
    assert (none.dither, none.continuity) == (0, 0)
    assert Strength.of({**rule, "dither": "0", "continuity": "off"}, 1000) == none
    both = Strength.of({**rule, "dither": "2.5", "continuity": "4"}, 1000)
    assert (both.dither, both.continuity) == (5 * ONE // 2, 4 * ONE)
    assert both.digest() != none.digest()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dither": "-1"}, "'dither' must be a decimal number"),
        ({"dither": "20"}, "'dither' times c_max must be at most 1/2"),
        ({"continuity": "1.5"}, "'continuity' must be off, or a factor from 2"),
        ({"continuity": "0"}, "'continuity' must be off, or a factor from 2"),
        ({"continuity": "on"}, "'continuity' must be a decimal number"),
        ({"rule": "paper", "dither": "3", "c": "0.01"}, "one with 'dither'"),
    ],
)
def test_bad_settings_are_refused(change: dict[str, str], text: str) -> None:
    rule = {"rule": "rho", "rho": "0.05", "dither": "0"} if "rule" not in change else {}
    with pytest.raises(InputError, match=text):
        Strength.of({**rule, **change}, 1000)
