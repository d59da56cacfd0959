"""The strength of the mark in each round, against plain integers; the state that it comes from, and how that moves."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from quorumark import codec, field
from quorumark.consortium.strength import ONE, Strength
from quorumark.errors import EncodingError, RecordError
from quorumark.model.layout import ModelLayout
from quorumark.round.amplitudes import MarkState, _scaled, model_digest
from quorumark.round.mark import check_round, ideal_mark
from quorumark.round.movement import ideal_norms, norm_count
from quorumark.round.paper import PaperScale, paper_amplitudes
from tests.kit.marks import RHO, SHAPES, SKIP, make_layout, make_manifest, random_walk
from tests.kit.oracle import P, lift
from tests.kit.refusals import stopped, wrong_argument

# --- amplitudes against an oracle -------------------------------------------------------------------------


class Oracle:
    """The procedure of docs/strength.md in Python's numbers, loop by loop."""

    def __init__(self, strength: Strength, layout: ModelLayout, start: Any) -> None:
        self.strength, self.layout = strength, layout
        self.anchor = self.model = [lift(int(v)) for v in start]
        self.ema: dict[Any, int] = {}
        self.moved: dict[Any, int] = {}
        self.total: dict[Any, int] = {}
        self.sums: dict[str, int] = {}
        self.round, self.seen = 0, 0
        self.leak, self.path, self.step = Fraction(0), 0, 0

    def kept(self, round_no: int) -> Fraction:
        """f, of 2^-32."""
        decay = Fraction(self.strength.as_dict().get("decay", "0")) * min(Fraction(1), self.strength.rate(round_no))
        return 1 - Fraction(math.floor(decay * 2**32), 2**32)

    def weights(self) -> Iterator[tuple[int, list[Any]]]:
        """Every carrying weight: its place and the names of its axes."""
        for spec, place in self.layout.spans("carrier"):
            for offset, index in enumerate(itertools.product(*(range(n) for n in spec.shape))):
                names = [(spec.name, "row", index[0]), (spec.name, "column", index[1])]
                yield (
                    place.start + offset,
                    names + ([(spec.name, "tap", index[2:])] if math.prod(spec.shape[2:]) > 1 else []),
                )

    def norms(self, members: dict[Fraction, Any]) -> dict[Any, int]:
        """⌊a_k·‖D_k‖⌋ added up, by the members' weights."""
        found: dict[Any, int] = {}
        for weight, after in members.items():
            squares: dict[Any, int] = {}
            for place, names in self.weights():
                for name in names:
                    squares[name] = squares.get(name, 0) + (lift(int(after[place])) - self.model[place]) ** 2
            for name, square in squares.items():
                found[name] = found.get(name, 0) + math.isqrt(math.floor(weight**2 * square))
        return found

    def advance(self, round_no: int, model: Any, scales: dict[Any, int], norms: dict[Any, int] | None = None) -> None:
        now = [lift(int(v)) for v in model]
        groups: dict[Any, list[tuple[int, int]]] = {}
        for place, names in self.weights():
            for name in names:
                groups.setdefault(name, []).append((now[place] - self.model[place], self.model[place]))
        for name, pairs in groups.items():
            dd, dt, tt = (sum(a * b for a, b in which) for which in (
                [(d, d) for d, _ in pairs], pairs, [(t, t) for _, t in pairs]))  # fmt: skip
            along = Fraction(dt, tt) if tt else Fraction(0)
            left = sum(((d - along * t) ** 2 for d, t in pairs), Fraction(0))
            assert left == dd - (Fraction(dt * dt, tt) if tt else 0)
            rms = math.isqrt(math.floor(left / len(pairs))) if not tt or left * 2**36 > tt else 0
            self.ema[name] = (9 * self.ema[name] + rms) // 10 if name in self.ema else rms
            self.moved[name] = min(rms, self.ema[name])
            if norms is not None and (1 - Fraction(1, 64)) * norms[name] ** 2 <= dd:
                self.moved[name] = 0
            self.total[name] = math.floor(self.kept(round_no) * self.total.get(name, 0)) + scales.get(name, 0)
        self.sums = {name: math.floor(self.kept(round_no) * total) for name, total in self.sums.items()}
        for _, names in self.weights():
            self.sums[names[0][0]] = self.sums.get(names[0][0], 0) + min(scales.get(name, 0) for name in names)
        self.step = sum((now[place] - self.model[place]) ** 2 for place, _ in self.weights())
        self.path += self.step
        self.leak += Fraction(math.ceil(Fraction(2**64 * self.norm(scales) ** 2, max(1, self.step))), 2**64)
        self.model, self.round, self.seen = now, round_no, self.seen + 1
        if round_no <= self.strength.warmup_rounds:
            self.anchor, self.seen, self.path = now, 0, 0

    def norm(self, numbers: dict[Any, int]) -> int:
        return math.isqrt(sum(min(numbers.get(name, 0) for name in names) ** 2 for _, names in self.weights()))

    def reached(self) -> int:
        """‖M‖·ΣA/ΣM, tensor by tensor."""
        least: dict[str, list[int]] = {}
        for _, names in self.weights():
            least.setdefault(names[0][0], []).append(min(self.total.get(name, 0) for name in names))
        squared = 0
        for name, values in least.items():
            squared += sum(v * v for v in values) * self.sums[name] ** 2 // (sum(values) ** 2 or 1)
        return math.isqrt(squared)

    def scales(self, round_no: int, halvings: int = 0) -> dict[Any, int]:
        if self.seen < 2:
            return {}
        before = self.strength.rate(self.round)
        ratio = min(Fraction(1), self.strength.rate(round_no) / before) if before else Fraction(0)
        ratio = ratio / 2**halvings if halvings <= 2 else Fraction(0)
        base = {name: math.floor(v * ratio) for name, v in self.moved.items()}
        c = self.strength.c_max
        if self.strength.rule != "relative":
            places = [place for place, _ in self.weights()]
            distance = math.isqrt(sum((self.model[i] - self.anchor[i]) ** 2 for i in places))
            missing = self.strength.rho * distance - 2**32 * self.kept(round_no) * self.reached()
            full = self.norm(base) or 1
            straight = Fraction(max(self.path, distance**2), self.path or 1)
            allowed = Fraction(math.floor(Fraction(9, 4) * self.strength.rho**2 * straight), 2**64)
            change = min(Fraction(1), self.strength.rate(round_no) / before) if before else Fraction(0)
            loud = max(Fraction(0), allowed - self.leak) * self.step * change**2 / full**2
            c = max(0, min(c, math.floor(missing / full), math.isqrt(math.floor(2**64 * loud))))
        return {name: v * c // 2**32 for name, v in base.items()}

    def vector(self, scales: dict[Any, int], bits: int) -> list[int]:
        found = {place: min(scales.get(name, 0) for name in names) >> bits for place, names in self.weights()}
        carrying = self.layout.carrying()
        places = range(self.layout.carrier_size) if isinstance(carrying, slice) else carrying
        return [found[int(place)] for place in places]


@pytest.mark.parametrize(
    ("rule", "key", "options"),
    [
        ({**RHO, "lr": "step:4=0.3,6=0"}, "rademacher", {}),
        (
            {"rule": "relative", "c": "0.02", "lr": "list:0.5,1,0.1,0.7,0.2", "alike": "mark", "dither": "0"},
            "rademacher",
            {},
        ),
        (
            {"rule": "target", "z": "0.4", "c_max": "0.2", "lr": "cosine:9", "alike": "mark", "dither": "0"},
            "gaussian",
            {},
        ),
        ({**RHO, "warmup_rounds": "2", "c_max": "0.01"}, "rademacher", {"max_coordinates": 41}),
        ({**RHO, "c_max": "0.25", "decay": "0.4", "lr": "step:6=0.5"}, "rademacher", {}),  # the leak's limit is met
    ],
)
@pytest.mark.parametrize("step", [2.0**-6, 2.0**-30, 2.0**17])
def test_amplitudes_equal_the_oracle(rule: dict[str, str], key: str, options: dict[str, Any], step: float) -> None:
    layout = make_layout(**options)
    strength = Strength.of(rule, layout.coordinates)
    models = random_walk(layout, 9, seed=3, step=step if step < 1 else 1.0)
    if step > 1:  # as large as numbers may be
        rng = np.random.default_rng(5)
        models = [codec.encode(rng.choice([-524287.9, 524287.9, 1e5, -3.0], layout.size)) for _ in models]
    state, oracle = MarkState(strength, layout, key, models[0]), Oracle(strength, layout, models[0])
    marked = 0
    for round_no, model in enumerate(models[1:], 1):
        halvings = {4: 1, 7: 2, 8: 3}.get(round_no, 0)
        amplitudes, expected = state.amplitudes(round_no, halvings), oracle.scales(round_no, halvings)
        assert amplitudes.vector.tolist() == oracle.vector(expected, 8 if key == "gaussian" else 0)
        assert amplitudes.marks == any(amplitudes.vector) or key == "gaussian" or "max_coordinates" in options
        assert halvings != 3 or not amplitudes.marks
        skipped = round_no == 5
        state.advance(round_no, model, None if skipped else amplitudes)
        oracle.advance(round_no, model, {} if skipped else expected)
        marked += amplitudes.marks
    assert marked >= 1 or step == 2.0**-30
    if state._distance:
        assert state.rho == oracle.reached() * 2**32 // state._distance


@pytest.mark.parametrize("rule", [SKIP, {"rule": "relative", "c": "0.01", "lr": "cosine:9", "dither": "0"}])
@pytest.mark.parametrize("options", [{}, {"max_coordinates": 41}])
def test_amplitudes_where_members_moved_alike_equal_the_oracle(rule: dict[str, str], options: dict[str, Any]) -> None:
    """Three members; a row, a column and a tap move the same way at all of them, though not equally far."""
    layout = make_layout({"conv": (5, 3, 2, 2), "line": (4, 7)}, **options)
    strength, rng = Strength.of(rule, layout.coordinates), np.random.default_rng(6)
    shares = {x: Fraction(x, 6) for x in (1, 2, 3)}
    now = rng.normal(0, 0.1, layout.size)
    state = MarkState(strength, layout, "rademacher", codec.encode(now))
    oracle = Oracle(strength, layout, state.model)
    tau = rng.choice([-1, 1], layout.coordinates)
    places = dict(layout.spans("carrier"))
    conv, line = (np.arange(place.start, place.stop).reshape(spec.shape) for spec, place in places.items())
    alike = {("conv", "column", 1): conv[:, 1], ("conv", "tap", (0, 1)): conv[:, :, 0, 1], ("line", "row", 2): line[2]}
    silent = 0
    for round_no in range(1, 7):
        amplitudes, expected = state.amplitudes(round_no), oracle.scales(round_no)
        assert amplitudes.vector.tolist() == oracle.vector(expected, 0)
        assert amplitudes.marks == (round_no > 2)
        common, total, results = rng.normal(0, 2.0**-6, layout.size), np.zeros(layout.size, np.uint64), {}
        for x, share in shares.items():
            step = rng.normal(0, 2.0**-6, layout.size)
            for group in alike.values():
                step[group] = common[group] * (1 + x / 10)
            results[x] = codec.encode(now + step)
            total = field.add(total, codec.encode(now + step, float(share)))
        ideal_mark(total, amplitudes, tau)
        norms = ideal_norms(layout, state.model, results, shares)
        wanted = oracle.norms({shares[x]: after for x, after in results.items()})
        assert sorted(norms.tolist()) == sorted(wanted.values())
        state.advance(round_no, total, amplitudes, norms)
        oracle.advance(round_no, total, expected, wanted)
        silent += sum(oracle.moved[name] == 0 for name in alike)
        # where these cross other rows and columns, a part of those is alike too; none of them is silent for it
        assert all(moved for name, moved in oracle.moved.items() if name not in alike)
        now = codec.decode(total, np.float64)
    assert silent == 18


def test_amplitudes_are_the_same_on_every_machine() -> None:
    """From models in integers, which no library rounds: these digests were made once and never change."""
    layout = make_layout({"conv": (40, 30, 3, 3), "line": (64, 50)})
    places = np.arange(layout.size, dtype=np.int64)
    strength = Strength.of({**RHO, "lr": "cosine:9"}, layout.coordinates)
    signed = (places * 2654435761 % (1 << 36)) - (1 << 35)
    state = MarkState(strength, layout, "rademacher", field.from_signed(signed))
    found = []
    for round_no in range(1, 6):
        amplitudes = state.amplitudes(round_no)
        found.append(amplitudes.digest().hex()[:16])
        signed = signed + ((places + round_no) * 40503 % (1 << 31)) - (1 << 30)
        state.advance(round_no, field.from_signed(signed), amplitudes)
    assert amplitudes.marks
    assert found == GOLDEN
    assert state.digest().hex()[:16] == GOLDEN_STATE


GOLDEN = ["785885612835aa4e", "6903b60fa6cac4aa", "3ce0b32a5267e4e8", "a1b1f8aedb05f053", "330f750ac9ede5f7"]

GOLDEN_STATE = "b6c3147bf350f9a9"  # and of the state's format


def test_amplitudes_from_norms_are_the_same_on_every_machine() -> None:
    """As above, with two members, whose first eight rows move alike."""
    layout = make_layout({"conv": (40, 30, 3, 3), "line": (64, 50)})
    places = np.arange(layout.size, dtype=np.int64)
    strength = Strength.of({**SKIP, "lr": "cosine:9"}, layout.coordinates)
    shares = {1: Fraction(1, 3), 2: Fraction(2, 3)}
    signed = (places * 2654435761 % (1 << 36)) - (1 << 35)
    state = MarkState(strength, layout, "rademacher", field.from_signed(signed))
    found = []
    for round_no in range(1, 6):
        amplitudes = state.amplitudes(round_no)
        found.append(amplitudes.digest().hex()[:16])
        steps = {x: ((places + round_no) * (40503, 1103515245)[x - 1] % (1 << 31)) - (1 << 30) for x in shares}
        steps[2][: 8 * 270] = steps[1][: 8 * 270]
        results = {x: field.from_signed(signed + step) for x, step in steps.items()}
        norms = ideal_norms(layout, state.model, results, shares)
        signed = signed + (steps[1] + 2 * steps[2]) // 3
        state.advance(round_no, field.from_signed(signed), amplitudes, norms)
    shown = amplitudes.vector[: 40 * 270].reshape(40, 270)
    assert not shown[:8].any()
    assert (shown[8:] > 0).all()
    assert found == GOLDEN_SKIP
    assert state.digest().hex()[:16] == GOLDEN_SKIP_STATE


GOLDEN_SKIP = ["785885612835aa4e", "6903b60fa6cac4aa", "feb8ce713b85992f", "ae32fdc2eca60def", "b839201ffa62505a"]

GOLDEN_SKIP_STATE = "247f56ef6ac4ddaa"


def test_marking_begins_in_round_three() -> None:
    layout = make_layout()
    for warm in (0, 3):
        strength = Strength.of({**RHO, "warmup_rounds": str(warm)}, layout.coordinates)
        models = random_walk(layout, 9)
        state = MarkState(strength, layout, "rademacher", models[0])
        begun = []
        for round_no, model in enumerate(models[1:], 1):
            amplitudes = state.amplitudes(round_no)
            begun.append(amplitudes.marks)
            state.advance(round_no, model, amplitudes)
        assert begun == [False] * (2 + warm) + [True] * (6 - warm)
        assert state.anchor_digest == model_digest(models[warm])
        for call in (state.amplitudes, lambda r, s=state, m=models: s.advance(r, m[0], None)):
            for wrong in (8, 10):
                with stopped("round.wrong-number", names=f"round {wrong}"):
                    call(wrong)
    with stopped("round.wrong-number"):
        state.advance(9, models[0], replace(state.amplitudes(9), round=8))


def test_nothing_depends_on_threads_or_memory_or_library() -> None:
    rng = np.random.default_rng(1)
    shapes = {"conv": (70, 300, 3, 3), "line": (300, 2500)}  # more than one part, and more than one block of columns
    layout = make_layout(shapes)
    runs = []
    walk = [
        {n: rng.normal(0, 0.1, s).astype(np.float32) for n, s in [*shapes.items(), ("bias", (3,))]} for _ in range(5)
    ]
    wide = np.empty(2 * layout.size, np.uint64)

    def strided(model: Any) -> Any:
        wide[::2] = layout.encode(model)
        return wide.copy()[::2]

    ways: list[tuple[int, Callable[[Any], Any]]] = [
        (1, layout.encode),
        (2, layout.encode),
        (3, strided),
        (2, lambda m: layout.encode({n: torch.from_numpy(t) for n, t in m.items()})),
        (2, lambda m: layout.encode({n: np.asfortranarray(t) for n, t in reversed(m.items())})),
    ]
    before = field.threads()
    try:
        for threads, encode in ways:
            field.set_threads(threads)
            state = MarkState(Strength.of(RHO, layout.coordinates), layout, "rademacher", encode(walk[0]))
            for round_no, model in enumerate(walk[1:], 1):
                amplitudes = state.amplitudes(round_no)
                state.advance(round_no, encode(model), amplitudes)
            runs.append((state.digest(), amplitudes.digest(), amplitudes.vector.tobytes()))
    finally:
        field.set_threads(before)
    assert amplitudes.marks
    assert len(set(runs)) == 1


# --- what moved alike gets nothing --------------------------------------------------------------------------


def test_norms_are_checked_and_belong_to_the_history() -> None:
    layout = make_layout()
    models, count = random_walk(layout, 5), norm_count(layout)

    def state_after(norms: Any, embedded: bool = True) -> MarkState:
        state = MarkState(Strength.of(SKIP, 9), layout, "rademacher", models[0])
        for round_no in (1, 2):
            state.advance(round_no, models[round_no], state.amplitudes(round_no) if embedded else None, norms)
        return state

    large = np.full(count, 1 << 45, np.uint64)
    more = large.copy()
    more[0] += np.uint64(1)
    assert state_after(large).amplitudes(3).marks
    assert state_after(large).amplitudes(3).digest() == state_after(more).amplitudes(3).digest()
    assert state_after(large).digest() != state_after(more).digest(), "the digest has the numbers, not what follows"
    assert not state_after(np.zeros(count, np.uint64)).amplitudes(3).marks
    assert not state_after(None, embedded=False).amplitudes(3).marks, "a run without the mark sums no norms"
    carried = MarkState.from_bytes(
        state_after(large).to_bytes(), Strength.of(SKIP, 9), layout, "rademacher", models[2], models[0]
    )
    assert carried.amplitudes(3).digest() == state_after(large).amplitudes(3).digest()
    for bad in (None, large[1:], large.tolist()):
        with wrong_argument("norms"):
            state_after(bad)
    for value in (P - 1, 1 << 59):
        wrong = large.copy()
        wrong[7] = value
        with pytest.raises(EncodingError, match="the opened sum of norms must be from 0 to"):
            state_after(wrong)
    state = MarkState(Strength.of(RHO, 9), layout, "rademacher", models[0])
    with wrong_argument("norms"):
        state.advance(1, models[1], None, large)


def test_nothing_moves_where_the_rate_is_zero() -> None:
    layout = make_layout()
    models = random_walk(layout, 8)
    state = MarkState(Strength.of({**RHO, "lr": "list:1,1,1,0,1"}, 9), layout, "rademacher", models[0])
    marks = []
    for round_no, model in enumerate(models[1:], 1):
        amplitudes = state.amplitudes(round_no)
        marks.append(amplitudes.marks)
        state.advance(round_no, model, amplitudes)
    assert marks == [False, False, True, False, False, True, True]


# --- moving the state -------------------------------------------------------------------------------------


def test_a_member_that_missed_rounds_is_given_the_state() -> None:
    layout = make_layout()
    strength, models = Strength.of(RHO, layout.coordinates), random_walk(layout, 8)
    state = MarkState(strength, layout, "rademacher", models[0])
    for round_no in range(1, 6):
        state.advance(round_no, models[round_no], state.amplitudes(round_no))
    data = state.to_bytes()
    other = MarkState.from_bytes(data, strength, layout, "rademacher", models[5], models[0])
    for one in (state, other):
        one.advance(6, models[6], one.amplitudes(6, 1))
    assert state.digest() == other.digest()
    assert state.amplitudes(7).digest() == other.amplitudes(7).digest()
    assert state.rho == other.rho > 0
    # its strength may be another, by an amendment: the mark is then that one's
    amended = Strength.of({**RHO, "lr": "cosine:9"}, 9)
    slower = MarkState.from_bytes(state.to_bytes(), amended, layout, "rademacher", models[6], models[0])
    assert slower.digest() == state.digest()
    assert slower.amplitudes(7).digest() != state.amplitudes(7).digest()

    wrong: list[tuple[Any, ...]] = [
        (data, strength, layout, "rademacher", models[4], models[0]),
        (data, strength, layout, "rademacher", models[5], models[1]),
        (data, strength, layout, "gaussian", models[5], models[0]),
        (data, strength, make_layout(max_coordinates=9), "rademacher", models[5], models[0]),
    ]
    for arguments in wrong:
        with pytest.raises(RecordError, match="of another model, anchor, layout or key"):
            MarkState.from_bytes(*arguments)
    for field_, value in {"ema": [[[1]]], "moved": 3, "round": -1, "chain": "xyz", "updates": "2", "x": 1}.items():
        body = json.dumps({**json.loads(data), field_: value}, sort_keys=True, separators=(",", ":")).encode()
        with pytest.raises(RecordError):
            MarkState.from_bytes(body, strength, layout, "rademacher", models[5], models[0])


def test_the_digest_covers_the_whole_history() -> None:
    layout = make_layout()
    models = random_walk(layout, 6)
    digests = set()
    for change in range(7):
        walk = list(models)
        if change < 4:
            walk[change] = walk[change].copy()
            walk[change][-1] ^= np.uint64(1)  # of a bias, which moves no amplitude
        state = MarkState(Strength.of(RHO, 9), layout, "rademacher", walk[0])
        for round_no, model in enumerate(walk[1:5], 1):
            embedded = state.amplitudes(round_no)
            under = "aa" * 32 if change == 4 and round_no == 4 else "bb" * 32
            state.advance(round_no, model, None if change == 5 and round_no == 3 else embedded, under=under)
        digests.add(state.digest())
    assert len(digests) == 7

    def embedding(*scales: int) -> bytes:
        """In rounds 3 and 4: so many times the amplitudes of round 3."""
        state = MarkState(Strength.of(RHO, 9), layout, "rademacher", models[0])
        for round_no in (1, 2):
            state.advance(round_no, models[round_no], state.amplitudes(round_no) if scales else None)
        first = state.amplitudes(3)
        for round_no, times in enumerate(scales or (1, 2), 3):
            embedded = replace(first, round=round_no, scales=_scaled(first.scales, times, 1))
            state.advance(round_no, models[round_no], embedded)
        return state.digest()

    assert embedding(1, 2) != embedding(2, 1), "what was embedded when, not only how much"
    assert embedding(1, 2) == embedding(), "nothing embedded is the same as an embedding of nothing"


@pytest.mark.parametrize("bad", [np.zeros(3, np.uint64), None])
def test_models_are_checked(bad: Any) -> None:
    layout = make_layout()
    with wrong_argument("model"):
        MarkState(Strength.of(RHO, 9), layout, "rademacher", bad)
    with wrong_argument("model"):
        MarkState(Strength.of(RHO, 9), layout, "rademacher", np.full(layout.size, P, np.uint64))
    with wrong_argument("key", received="sawtooth"):
        MarkState(Strength.of(RHO, 9), layout, "sawtooth", random_walk(layout, 1)[0])


# --- the paper's rule -------------------------------------------------------------------------------------


@pytest.mark.parametrize("per", ["model", "tensor"])
def test_the_papers_strength(per: str) -> None:
    layout = make_layout()
    settings_ = {"rule": "paper", "c": "0.02", "per": per, "c_max": "0.25"}
    strength = Strength.of(settings_, layout.coordinates)
    models = random_walk(layout, 4)
    state = MarkState(strength, layout, "rademacher", models[0])
    members, total, expected = 3, None, 0.0
    for k in range(members):
        own, ema, walk = PaperScale(strength, layout), 0.0, random_walk(layout, 4, seed=10 + k)
        for i, (before, after) in enumerate(itertools.pairwise(walk)):
            scale = own.scale(before, after)
            end = layout.carrier_size if per == "model" else math.prod(SHAPES["conv"])
            norm = float(np.linalg.norm(field.to_signed(field.sub(after, before))[:end] / 2**40))
            ema = 0.9 * ema + 0.1 * norm if i else norm
        expected += 0.02 * norm * ema
        total = scale if total is None else field.add(total, scale)
    assert total is not None
    amplitudes = paper_amplitudes(strength, layout, "rademacher", 1, total, members)
    size = layout.coordinates if per == "model" else math.prod(SHAPES["conv"])
    assert amplitudes.vector[0] / 2**40 == pytest.approx(expected / members / math.sqrt(size), rel=1e-6)
    assert (len(set(amplitudes.vector.tolist())) == 1) == (per == "model")
    assert not state.amplitudes(1).marks
    state.advance(1, models[1], amplitudes)
    assert state.rho / ONE == pytest.approx(np.linalg.norm(amplitudes.vector.astype(float)) / state._distance, rel=1e-6)
    manifest = make_manifest(layout, strength=settings_)
    late = replace(amplitudes, round=2)
    assert check_round(strength, manifest, late, (1, 2, 3, 4), models[1], models[2])
    loud = replace(late, scales=_scaled(late.scales, 10**4, 1))
    with stopped("round.too-strong", names="'the model'"):
        check_round(strength, manifest, loud, (1, 2, 3, 4), models[1], models[2])
    with stopped("round.update-too-large"):
        PaperScale(strength, layout).scale(models[0], codec.encode(np.full(layout.size, 1e4)))
    with wrong_argument("strength", received="rho"):
        PaperScale(Strength.of(RHO, 9), layout)
    with wrong_argument("total"):
        paper_amplitudes(strength, layout, "rademacher", 1, field.random(9), members)
