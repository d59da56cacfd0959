"""What the mark is in a round: how strong it is, what a member adds for it, and what it refuses (docs/strength.md).

The mark of a round is S ⊙ τ. The amplitudes S come from what is public only (global models, and sums of the members'
norms), in whole numbers only, so that every member derives the same ones; weights that did not move, or that moved
alike at all members, get nothing. A member adds S ⊙ σ ⊙ λ_k·s_k to its weighted model, and over the members U who take
part this is S ⊙ τ, exactly.

    strength = Strength.of(terms.strength, terms.coordinates)
    state = MarkState(strength, layout, terms.key, E(θ_0))
    each round:
        amplitudes = state.amplitudes(round)
        if check_round(…): marked_vector(y, amplitudes, …)     # a member; y = E(a_k·θ_k)
        norms = update_norms(layout, E(θ), E(θ_k), a_k)         # a member; summed like y
        state.advance(round, E(θ_round), amplitudes, Σ norms)   # everybody, once the round's model is accepted
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from math import isqrt, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark import codec, field, shamir
from quorumark.continuity import Pace, plain_moves
from quorumark.errors import EncodingError, InputError, RecordError, RoundError
from quorumark.field import P, Vector, _cpu, _parallel
from quorumark.hiding import exposed
from quorumark.layout import ModelLayout
from quorumark.records import KEY_KINDS, Genesis, Manifest, canonical, digest, parse

__all__ = [
    "Amplitudes",
    "MarkState",
    "PaperScale",
    "Strength",
    "TooStrongError",
    "check_round",
    "check_size",
    "check_weights",
    "ideal_mark",
    "ideal_norms",
    "marked_vector",
    "model_digest",
    "norm_count",
    "norm_places",
    "paper_amplitudes",
    "update_norms",
    "weights",
]

ONE = 1 << 32
"""Ratios (ρ, c, learning rates) are whole numbers of 2^-32."""

KEY_BITS = {"rademacher": 0, "gaussian": 8}
"""Fractional bits of a key's values; the amplitudes have the other ones of the 40."""

_RULES = {  # the settings that each rule needs, and those that it may have with what they are otherwise
    "rho": ({"rho"}, {"c_max": "0.03", "alike": "skip", "dither": "0", "continuity": "off"}),
    "target": ({"z"}, {"c_max": "0.03", "alike": "skip", "dither": "0", "continuity": "off"}),
    "relative": ({"c"}, {"alike": "skip", "dither": "0", "continuity": "off"}),
    "paper": ({"c"}, {"c_max": "0.1", "per": "model"}),
}
_COMMON = {"warmup_rounds": "0", "lr": "constant", "below_threshold": "refuse"}
_WARM = 2  # accepted rounds after the anchor before the mark begins: without losses it begins in round 3
_HALVINGS = 3  # so often members may find the mark of a state too strong: the last time there is none
_STILL = 36  # what moved by less than 2^-18 of its size (squared: 2^-36) did not move
_ALIKE = 64  # members moved alike where ‖Σ a_k·D_k‖² is all but a 64th of (Σ a_k·‖D_k‖)²
_LARGEST = 1 << 31  # elements of a tensor whose squares the kernels add up exactly


# --- settings ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Strength:
    """The consortium's strength rule, from its terms. Ratios are whole numbers of 2^-32, rounded down.

    `dither` is κ, `continuity` the factor of a jump, both in 2^-32 as well; 0 is none.
    """

    rule: str
    rho: int
    c_max: int
    warmup_rounds: int
    lr: str
    below_threshold: str
    per: str
    alike: str
    dither: int
    continuity: int
    settings: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, settings: Mapping[str, str], coordinates: int) -> Strength:
        """Reads `terms.strength`. Anything unknown is refused: a rule that is half understood marks half right."""
        if not isinstance(settings, Mapping) or settings.get("rule") not in _RULES:
            received = settings.get("rule") if isinstance(settings, Mapping) else type(settings).__name__
            raise InputError("strength", f"must name a rule: {', '.join(_RULES)}", repr(received))
        rule = settings["rule"]
        needed, defaults = _RULES[rule]
        known = {**defaults, **_COMMON, **settings}
        missing, unknown = needed - known.keys(), known.keys() - needed - defaults.keys() - _COMMON.keys() - {"rule"}
        if missing or unknown:
            wanted = ", ".join(sorted(needed | defaults.keys() | _COMMON.keys()))
            received = f"without {min(missing)!r}" if missing else f"with {min(unknown)!r}"
            raise InputError("strength", f"under the rule {rule!r} has the settings {wanted}", f"one {received}")
        rho = _ratio("strength 'rho'", known["rho"], Fraction(1, 2)) if rule == "rho" else 0
        if rule == "target":
            z = _fraction("strength 'z'", known["z"])
            rho = isqrt(z.numerator**2 * ONE**2 // (z.denominator**2 * coordinates))  # ρ = z/√d
            if not 0 < rho <= ONE // 2:
                rule_text = f"must be above 0 and at most √d/2 for d = {coordinates} coordinates"
                raise InputError("strength 'z'", rule_text, known["z"])
        limit = _ratio("strength 'c'", known["c"], Fraction(1, 4)) if "c" in known else 0
        c_max = _ratio("strength 'c_max'", known["c_max"], Fraction(1, 4)) if "c_max" in known else limit
        if not re.fullmatch("0|[1-9][0-9]{0,5}", known["warmup_rounds"]):
            raise InputError("strength 'warmup_rounds'", "must be a whole number", repr(known["warmup_rounds"]))
        choices = {"below_threshold": ("refuse", "skip"), "per": ("model", "tensor"), "alike": ("skip", "mark")}
        for name, allowed in choices.items():
            if known.get(name, allowed[0]) not in allowed:
                raise InputError(f"strength {name!r}", f"must be {' or '.join(allowed)}", repr(known[name]))
        _rates(known["lr"])
        dither, continuity = _nets(known, c_max)
        return cls(
            rule,
            rho,
            c_max,
            int(known["warmup_rounds"]),
            known["lr"],
            known["below_threshold"],
            known.get("per", "model"),
            known.get("alike", "mark"),
            dither,
            continuity,
            tuple(sorted(known.items())),
        )

    @property
    def needs_norms(self) -> bool:
        """Whether members upload norms, so that what moved alike at all of them gets no mark."""
        return self.alike == "skip"

    @property
    def c(self) -> int:
        """The fixed c of the rules that have one."""
        return _ratio("strength 'c'", dict(self.settings)["c"], Fraction(1, 4))

    def digest(self) -> bytes:
        """Of all settings, those that were left out included."""
        return digest("strength", canonical(dict(self.settings)))

    def rate(self, round_no: int) -> Fraction:
        """The learning rate of a round, in units of the first one's: what members must train with."""
        kind, numbers = _rates(self.lr)
        if kind == "constant":
            return Fraction(1)
        if kind == "cosine":
            return Fraction(_cosine(round_no - 1, int(numbers[0][0])), ONE)
        return next((rate for start, rate in reversed(numbers) if round_no >= start), Fraction(1))


def _rates(text: str) -> tuple[str, list[tuple[int, Fraction]]]:
    """A table of learning rates: its kind, and (first round, rate) pairs in order."""
    kind, _, rest = text.partition(":")
    rule = "must be constant, cosine:ROUNDS, step:ROUND=RATE,… or list:RATE,…"
    name = "strength 'lr'"
    if text == "constant":
        return kind, []
    if kind == "cosine" and re.fullmatch("[1-9][0-9]{0,5}", rest):
        return kind, [(int(rest), Fraction(0))]
    if kind == "step" and re.fullmatch(r"[1-9][0-9]{0,5}=[0-9.]+(,[1-9][0-9]{0,5}=[0-9.]+)*", rest):
        pairs = [entry.split("=") for entry in rest.split(",")]
        steps = [(int(start), _fraction(name, rate)) for start, rate in pairs]
        if all(a < b for (a, _), (b, _) in pairwise(steps)):
            return kind, steps
    if kind == "list" and re.fullmatch(r"[0-9.]+(,[0-9.]+)*", rest):
        return kind, [(start, _fraction(name, rate)) for start, rate in enumerate(rest.split(","), 1)]
    raise InputError(name, rule, repr(text))


_PI = 0x3243F6A8885A308D313198A2E03707344  # ⌊π·2^128⌋


def _cosine(done: int, rounds: int) -> int:
    """2^32·(1 + cos(π·done/rounds))/2 to the nearest, by Taylor's series in whole numbers of 2^-128; then 0."""
    if done >= rounds:
        return 0
    angle, term, total, k = _PI * done // rounds, 1 << 128, 1 << 128, 0
    while term:
        total += -term if k % 4 else term
        k += 2
        term = (term * angle * angle >> 256) // (k * (k - 1))
    return (total + (1 << 96)) >> 97


def _fraction(name: str, text: str) -> Fraction:
    """A decimal text, exactly."""
    if not isinstance(text, str) or not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,18})?", text):
        raise InputError(name, "must be a decimal number such as 0.05", repr(text))
    return Fraction(text)


def _ratio(name: str, text: str, most: Fraction) -> int:
    value = _fraction(name, text)
    ratio = value.numerator * ONE // value.denominator
    if not ratio or value > most:
        raise InputError(name, f"must be above 2^-32 and at most {float(most)}", repr(text))
    return ratio


def _nets(known: Mapping[str, str], c_max: int) -> tuple[int, int]:
    """κ and the factor of a jump, in 2^-32; 0 where there is none."""
    kappa = _fraction("strength 'dither'", known.get("dither", "0"))
    if kappa * c_max * 2 > ONE:
        rule = "times c_max must be at most 1/2: the noise must stay small beside what members learn"
        raise InputError("strength 'dither'", rule, f"{known['dither']} times {c_max / ONE:.3g}")
    text = known.get("continuity", "off")
    factor = Fraction(0) if text == "off" else _fraction("strength 'continuity'", text)
    if text != "off" and not 2 <= factor <= 1000:
        raise InputError("strength 'continuity'", "must be off, or a factor from 2 to 1000", repr(text))
    return kappa.numerator * ONE // kappa.denominator, factor.numerator * ONE // factor.denominator


# --- exact sums -------------------------------------------------------------------------------------------

_Axes = tuple[tuple[int, ...], ...]  # for one tensor: a number per row, per column and, if it has them, per tap
_Sums = list[list[tuple[int, int, int]]]  # the same with three sums each


@dataclass(frozen=True)
class _Carrier:
    """A carrier as rows × columns × taps: output channels, input channels, and the places of the kernel flattened."""

    place: slice
    rows: int
    columns: int
    taps: int

    @property
    def axes(self) -> tuple[int, ...]:
        """How many numbers each axis has; a single tap is no axis."""
        return (self.rows, self.columns, self.taps)[: 3 if self.taps > 1 else 2]

    @property
    def size(self) -> int:
        return self.rows * self.columns * self.taps

    @property
    def has_norms(self) -> bool:
        """Not if a row, column or tap is a single weight: it carries no mark, and nobody's single weights are shown."""
        return self.size > max(self.axes)


def _carriers(layout: ModelLayout) -> list[_Carrier]:
    found = []
    for spec, place in layout.spans("carrier"):
        if spec.size >= _LARGEST:
            raise InputError(f"tensor {spec.name!r}", f"must have fewer than {_LARGEST} elements", spec.size)
        if spec.size:
            found.append(_Carrier(place, spec.shape[0], spec.shape[1], prod(spec.shape[2:])))
    return found


def _whole(parts: Any) -> list[int]:
    """Sums from their parts: parts[4, n] → n Python ints."""
    low, second, third, high = (part.tolist() for part in parts)
    return [a + (b << 32) + (c << 64) + (d << 96) for a, b, c, d in zip(low, second, third, high, strict=True)]


def _sum_squares(x: Vector) -> int:
    """Σ v² of the signed numbers that x stands for, exactly."""

    def part(begin: int, end: int) -> int:
        sums = np.zeros(32, np.uint64)
        _cpu.squares(x[begin:end], sums)
        return sum(_whole(sums.reshape(4, 8)))

    return sum(int(s) for s in _parallel.spread(part, x.size))  # type: ignore[call-overload]


def _distance(x: Vector, y: Vector) -> int:
    """Σ (v − w)², exactly, chunk by chunk."""
    if not x.size:
        return 0
    return sum(_sum_squares(field.sub(x[part], y[part], checked=False)) for part in field.chunks(x.size))


def _axis_sums(carrier: _Carrier, now: Vector, before: Vector) -> _Sums:
    """‖θ+D‖², ‖θ‖² and ‖D‖² of each row, column and tap, for an update D of θ."""
    width = carrier.columns * carrier.taps
    stride = width + -width % 8
    a, b = now[carrier.place], before[carrier.place]
    by_row = np.zeros((carrier.rows, 12), np.uint64)

    def part(begin: int, end: int) -> NDArray[np.uint64]:
        by_column = np.zeros(12 * stride, np.uint64)
        rows = slice(begin * width, end * width)
        _cpu.moments(a[rows], b[rows], width, by_row[begin:end].reshape(-1), by_column)
        return by_column.reshape(12, stride)[:, :width]

    smallest = max(1, _parallel.SMALLEST_PART // width)
    # wrapping is impossible: all parts below 2^33, fewer than 2^31 of them
    columns = sum(_parallel.spread(part, carrier.rows, smallest=smallest, step=1))  # type: ignore[arg-type]
    cube = np.asarray(columns).reshape(12, carrier.columns, carrier.taps)
    sums = (np.ascontiguousarray(by_row.T), cube.sum(axis=2, dtype=np.uint64), cube.sum(axis=1, dtype=np.uint64))
    return [
        list(zip(_whole(parts[0:4]), _whole(parts[4:8]), _whole(parts[8:12]), strict=True))
        for parts, _ in zip(sums, carrier.axes, strict=False)
    ]


def _moved(carrier: _Carrier, sums: _Sums, quiet: list[list[int]]) -> _Axes:
    """How far each row, column and tap moved: the rms of its update without the part along its own weights.

    `quiet` are squares of moves that do not count, by row, column and tap (`MarkState._quiet`).
    """
    counted = zip(sums, quiet, carrier.axes, strict=True)
    return tuple(
        tuple(_residual_rms(*three, carrier.size // count, none) for three, none in zip(axis, least, strict=True))
        for axis, least, count in counted
    )


def _residual_rms(now: int, before: int, update: int, count: int, quiet: int) -> int:
    """⌊√(‖D − (⟨D,θ⟩/‖θ‖²)·θ‖²/count)⌋ from ‖θ+D‖², ‖θ‖², ‖D‖²; 0 if it is below 2^-18 of ‖θ‖.

    Weight decay moves dead weights along themselves: what it did is taken out. The floor is what the rounding of
    float32 in thousands of steps leaves of such a move. What is left is 0 as well if its square is at most `quiet`.
    """
    if not before:
        return isqrt(update // count) if update > quiet else 0
    along = now - before - update  # 2·⟨D, θ⟩
    left = 4 * update * before - along * along  # 4·‖θ‖² times the square of what is left; never below 0
    if left << _STILL <= 4 * before * before or left <= 4 * before * quiet:
        return 0
    return isqrt(left // (4 * before * count))


def _least(tensor: _Axes) -> tuple[int, int]:
    """Σ and Σ of squares, over all weights of a tensor, of the least of the weight's axes' numbers.

    Σ min = Σ over the values v_1 < v_2 < … of (v_i − v_{i−1}) · (how many weights have all of their numbers ≥ v_i).
    """
    ladders = [sorted(values, reverse=True) for values in tensor]
    counts = [len(values) for values in ladders]
    total = squares = last = 0
    for value in sorted({v for values in ladders for v in values if v > 0}):
        for i, values in enumerate(ladders):
            while counts[i] and values[counts[i] - 1] < value:
                counts[i] -= 1
        total += (value - last) * prod(counts)
        squares += (value * value - last * last) * prod(counts)
        last = value
    return total, squares


def _norm(axes: Sequence[_Axes]) -> int:
    return isqrt(sum(_least(tensor)[1] for tensor in axes))


# --- how members moved ------------------------------------------------------------------------------------


def norm_count(layout: ModelLayout) -> int:
    """How many norms a member uploads: one for each row, column and tap of the carriers that can carry."""
    return sum(sum(carrier.axes) for carrier in _carriers(layout) if carrier.has_norms)


def norm_places(layout: ModelLayout) -> Iterator[tuple[str, slice]]:
    """The carriers that have norms, by name, and where those are among all of them."""
    start = 0
    named = [spec.name for spec, _ in layout.spans("carrier") if spec.size]
    for name, carrier in zip(named, _carriers(layout), strict=True):
        if carrier.has_norms:
            yield name, slice(start, start + sum(carrier.axes))
            start += sum(carrier.axes)


def update_norms(layout: ModelLayout, before: Vector, after: Vector, weight: Fraction) -> Vector:
    """⌊a_k·‖D_k‖⌋ in 2^-40 for each row, column and tap: what a member adds to its upload about its own update D_k.

    `before` and `after` are E of the global model and of the member's own result. Rounded down, so that what is too
    small to tell counts as not learnt.
    """
    before, after = _checked("before", before, layout), _checked("after", after, layout)
    norms: list[int] = []
    for carrier in _carriers(layout):
        if carrier.has_norms:
            squares = [square for axis in _axis_sums(carrier, after, before) for _, _, square in axis]
            largest = isqrt(max(squares)) / 2**codec.FRACTION_BITS
            if largest >= codec.LIMIT:
                rule = f"must have norms below {codec.LIMIT:g} in each row, column and tap to fit into fixed point"
                raise EncodingError("this member's update", rule, f"{largest:g}", carrier.place.start)
            norms += (isqrt(weight.numerator**2 * square // weight.denominator**2) for square in squares)
    return np.array(norms, np.uint64)


def ideal_norms(
    layout: ModelLayout, before: Vector, results: Mapping[int, Vector], shares: Mapping[int, Fraction]
) -> Vector:
    """What all members' norms add up to, for those who may see E of all results; `shares` are the `weights`."""
    total = np.zeros(norm_count(layout), np.uint64)
    for x, after in results.items():
        total += update_norms(layout, before, after, shares[x])  # far below p
    return total


def _learnt(carrier: _Carrier, sums: _Sums, norms: Iterator[int], noise: list[list[int]]) -> _Axes:
    """1 for each row, column and tap where members moved apart, 0 where they moved alike.

    ‖Σ a_k·D_k‖ ≤ Σ a_k·‖D_k‖ = N, and they are equal only if all D_k point the same way, however far each went. What
    nobody learns from data goes the same way at all members, whatever moves it. ‖D‖ of the public update stands for the
    left side: it has the mark in it as well, which is small beside it, and the dither, whose expected square (`noise`)
    is taken off.
    """
    if not carrier.has_norms:
        return tuple((0,) * count for count in carrier.axes)
    return tuple(
        tuple(
            int((_ALIKE - 1) * next(norms) ** 2 > _ALIKE * (square - extra))
            for (_, _, square), extra in zip(axis, extras, strict=True)
        )
        for axis, extras in zip(sums, noise, strict=True)
    )


def _mark_squares(amplitudes: Amplitudes | None, carriers: list[_Carrier]) -> list[list[list[int]]]:
    """Σ S² over each row, column and tap, in 2^-80: exact, and only where the mark is, if the carriers are sampled."""
    if amplitudes is None:
        return [[[0] * count for count in carrier.axes] for carrier in carriers]
    carrying, scales = amplitudes.layout.carrying(), amplitudes.vector << np.uint64(KEY_BITS[amplitudes.key])
    found = []
    for carrier in carriers:
        if isinstance(carrying, slice):
            here = np.ascontiguousarray(scales[carrier.place])
        else:
            part = slice(*np.searchsorted(carrying, (carrier.place.start, carrier.place.stop)))
            here = np.zeros(carrier.size, np.uint64)
            here[carrying[part] - carrier.place.start] = scales[part]
        alone = replace(carrier, place=slice(0, carrier.size))
        found.append([[square for _, _, square in axis] for axis in _axis_sums(alone, here, np.zeros_like(here))])
    return found


# --- amplitudes -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Amplitudes:
    """How strong the mark of one round is, weight by weight: public, and the same for everybody.

    A weight's amplitude is the least of its axes' `scales` (in 2^-40). `c` and `rho`, in 2^-32, say how it came about:
    the factor of this round, and ρ before it.
    """

    layout: ModelLayout
    key: str
    round: int
    c: int
    rho: int
    scales: tuple[_Axes, ...]

    @property
    def marks(self) -> bool:
        """Whether there is anything to add."""
        return any(all(map(any, axes)) for axes in self.scales)

    @cached_property
    def vector(self) -> Vector:
        """S for each of the d carrying coordinates: S·τ has 40 fractional bits for the key's own τ."""
        layout, bits = self.layout, np.uint64(KEY_BITS[self.key])
        carrying = layout.carrying()
        out = np.zeros(layout.coordinates, np.uint64)
        for carrier, axes in zip(_carriers(layout), self.scales, strict=True):
            rows, *others = (np.array(values, np.uint64) for values in axes)
            across = others[0] if len(others) == 1 else np.minimum.outer(*others).reshape(-1)
            if isinstance(carrying, slice):
                target = out[carrier.place].reshape(carrier.rows, -1)
                np.minimum(rows[:, None], across[None, :], out=target)
            else:
                part = slice(*np.searchsorted(carrying, (carrier.place.start, carrier.place.stop)))
                row, column = np.divmod(carrying[part] - carrier.place.start, across.size)
                out[part] = np.minimum(rows[row], across[column])
        return out >> bits if bits else out

    def tensors(self) -> Iterator[tuple[str, slice]]:
        """The carriers' names, and their places in `vector`."""
        carrying = self.layout.carrying()
        for spec, place in self.layout.spans("carrier"):
            if not spec.size:
                continue
            if isinstance(carrying, slice):
                yield spec.name, place
            else:
                yield spec.name, slice(*(int(i) for i in np.searchsorted(carrying, (place.start, place.stop))))

    def without(self, names: Collection[str]) -> Amplitudes:
        """The same, with nothing in the carriers of these names."""
        carriers = [spec.name for spec, _ in self.layout.spans("carrier") if spec.size]
        kept = zip(carriers, self.scales, strict=True)
        none = tuple(tuple((0,) * len(v) for v in axes) if name in names else axes for name, axes in kept)
        return replace(self, scales=none)

    def digest(self) -> bytes:
        """What all members of a round must agree on."""
        about = {"key": self.key, "round": self.round, "scales": self.scales}
        return digest("amplitudes", bytes.fromhex(self.layout.digest()), canonical(about))


def _checked(name: str, model: Vector, layout: ModelLayout) -> Vector:
    """E of a model of this layout, contiguous."""
    if not isinstance(model, np.ndarray) or model.shape != (layout.size,):
        raise InputError(
            name, f"must be a vector of length {layout.size}", getattr(model, "shape", type(model).__name__)
        )
    field.check(model, name)
    return np.ascontiguousarray(model)


def model_digest(model: Vector) -> bytes:
    """Of a global model, as E(θ)."""
    return digest("global model", np.ascontiguousarray(model).astype("<u8", copy=False).data.cast("B"))


class MarkState:
    """The history of a run, as far as the mark needs it: three whole numbers per row, column and tap, one per tensor.

    `round` counts the accepted rounds, `rho` (in 2^-32) is what the mark has reached: ‖ΣA‖/‖θ − θ_a‖ over the carriers.
    `under` is the manifest under which the last one was summed. Two states with the same `digest` and strength give the
    same amplitudes for ever.
    """

    FORMAT = "quorumark-mark-state/v2"

    def __init__(self, strength: Strength, layout: ModelLayout, key: str, model: Vector, start: int = 0) -> None:
        """Before the first round, from the initial model E(θ_0): the anchor, unless there are warm-up rounds; after
        those, `start` is how many there were.

        Models are kept, not copied: do not change them afterwards.
        """
        if key not in KEY_KINDS:
            raise InputError("key", f"must be one of {', '.join(KEY_KINDS)}", repr(key))
        self.strength, self.layout, self.key = strength, layout, key
        self._carriers = _carriers(layout)
        self.model = self.anchor = _checked("model", model, layout)
        self.model_digest = self.anchor_digest = model_digest(self.model)
        self.round, self.under = start, ""
        self._updates = self._distance = 0
        nothing = tuple(tuple((0,) * count for count in carrier.axes) for carrier in self._carriers)
        self._moved = self._ema = self._total = nothing
        self._sums = (0,) * len(self._carriers)
        self._pace, self._silenced = Pace(), 0
        self._chain = digest("mark history", bytes.fromhex(layout.digest()), key.encode(), self.model_digest)

    # --- what it says ---

    @property
    def rho(self) -> int:
        return self._reached() * ONE // self._distance if self._distance else 0

    def _reached(self) -> int:
        """‖ΣA‖. Of ΣA the state has each tensor's sum, exactly, and a shape M ≥ ΣA: the least of the axes' totals.

        So it is √Σ_tensors ‖M‖²·(Σ A)²/(Σ M)².
        """
        shapes = [_least(tensor) for tensor in self._total]
        return isqrt(sum(q * a * a // (m * m) for a, (m, q) in zip(self._sums, shapes, strict=True) if m))

    @property
    def silenced(self) -> float:
        """The share of the carriers that gets no mark in the next round, because something jumped in the last one."""
        return self._silenced / self.layout.carrier_size if self._updates >= _WARM else 0.0

    @property
    def chain(self) -> bytes:
        """A digest of all models, marks and norms so far, in their order."""
        return self._chain

    def amplitudes(self, round_no: int, halvings: int = 0) -> Amplitudes:
        """For the next round: A = c · (learning rates' ratio) · min over the axes of min(rms, EMA).

        A function of the state and of `halvings`, which members ask for while nobody has answered: where the mark was
        too strong for their updates it halves, and the third time there is none.
        """
        self._check_next(round_no)
        rule = self.strength.rule
        c, base = 0, self._moved
        if self._updates >= _WARM and rule != "paper":
            ratio = self._rate_ratio(round_no) if halvings < _HALVINGS else Fraction(0)
            base = _scaled(base, ratio.numerator, ratio.denominator << min(halvings, _HALVINGS))
            c = self.strength.c_max
            if rule != "relative":
                # towards ‖ΣA‖ + c·‖base‖ = ρ·‖θ − θ_a‖
                full = _norm(base)
                missing = self.strength.rho * self._distance - ONE * self._reached()
                c = min(c, max(0, missing) // full) if full else 0
        return Amplitudes(self.layout, self.key, round_no, c, self.rho, _scaled(base, c, ONE))

    def _check_next(self, round_no: int) -> None:
        if round_no != self.round + 1:
            raise RoundError(f"round {self.round + 1} is next after {self.round} accepted ones, not round {round_no}")

    def _rate_ratio(self, round_no: int) -> Fraction:
        """The learning rate over the last update's; at most 1, since a mark never runs ahead of the updates."""
        now, then = self.strength.rate(round_no), self.strength.rate(self.round)
        return min(now / then, Fraction(1)) if then else Fraction(0)

    def advance(
        self,
        round_no: int,
        model: Vector,
        embedded: Amplitudes | None,
        norms: Vector | None = None,
        *,
        under: str = "",
    ) -> None:
        """A round's global model was accepted; `embedded` is what was added in it, None if nothing; `under` is the
        digest of the manifest that it was summed under.

        `norms` is the opened sum of the members' norms, if the strength needs them; a run without the mark may leave
        them out, and then nothing counts as learnt. A round that is given up is not told: the last model stands.
        """
        self._check_next(round_no)
        if embedded is not None and (embedded.round, embedded.layout, embedded.key) != (
            round_no,
            self.layout,
            self.key,
        ):
            raise RoundError(f"round {round_no} cannot have embedded the amplitudes of round {embedded.round}")
        told = self._checked_norms(norms, embedded)
        before, self.model = self.model, _checked("model", model, self.layout)
        self.model_digest = model_digest(self.model)
        sums = [_axis_sums(carrier, self.model, before) for carrier in self._carriers]
        noise, quiet = self._noise(embedded)
        self._moved = tuple(map(_moved, self._carriers, sums, quiet))
        first = not self._updates and not any(any(map(any, axes)) for axes in self._ema)
        self._ema = _map(lambda e, m: m if first else (9 * e + m) // 10, self._ema, self._moved)
        self._moved = _map(min, self._moved, self._ema)
        if self.strength.needs_norms:
            each = iter(told)
            apart = zip(self._carriers, sums, noise, strict=True)
            learnt = tuple(_learnt(carrier, axes, each, extra) for carrier, axes, extra in apart)
            self._moved = _map(lambda m, moves: m * moves, self._moved, learnt)
        self._silence_jumps(sums, before)
        if embedded is not None:
            self._total = _map(lambda a, b: a + b, self._total, embedded.scales)
            self._sums = tuple(a + _least(axes)[0] for a, axes in zip(self._sums, embedded.scales, strict=True))
        self.round, self.under, self._updates = round_no, under, self._updates + 1
        if round_no <= self.strength.warmup_rounds:
            self.anchor, self.anchor_digest, self._updates = self.model, self.model_digest, 0
        end = self.layout.carrier_size
        self._distance = isqrt(_distance(self.model[:end], self.anchor[:end]))
        mark = embedded.digest() if embedded is not None and embedded.marks else b""  # nothing is nothing
        parts = round_no.to_bytes(8, "big"), self.model_digest, mark, canonical({"norms": told})
        self._chain = digest("mark history", self._chain, *parts)

    def _noise(self, embedded: Amplitudes | None) -> tuple[list[list[list[int]]], list[list[list[int]]]]:
        """Of each row, column and tap: the expected square of the dither, κ²·ΣS²; and 2·(κ² + 1)·ΣS².

        The second is twice what dither and mark make of a dead row: what moved no further counts as still, or the mark
        would follow its own noise there. Both are 0 without dither.
        """
        kappa = self.strength.dither
        squares = _mark_squares(embedded if kappa else None, self._carriers)
        noise, quiet = (
            [[[factor * q >> 64 for q in axis] for axis in axes] for axes in squares]
            for factor in (kappa**2, 2 * (kappa**2 + ONE**2) if kappa else 0)
        )
        return noise, quiet

    def _silence_jumps(self, sums: list[_Sums], before: Vector) -> None:
        """Takes the next round's mark from what jumped, or from everything (`quorumark.continuity`)."""
        self._silenced = 0
        if not self.strength.continuity:
            self._pace = Pace()
            return
        moves = [
            [isqrt(square // (carrier.size // count)) for _, _, square in axis]
            for carrier, axes in zip(self._carriers, sums, strict=True)
            for axis, count in zip(axes, carrier.axes, strict=True)
        ]
        plain = plain_moves(self.layout, self.model, before)
        self._pace, jumped, rests = self._pace.after(moves, plain, self.strength.continuity)
        each = iter(jumped)
        kept = tuple(tuple(tuple(int(not (rests or j)) for j in next(each)) for _ in axes) for axes in self._moved)
        self._moved = _map(lambda m, keeps: m * keeps, self._moved, kept)
        self._silenced = self.layout.carrier_size - sum(prod(map(sum, axes)) for axes in kept)

    def _checked_norms(self, norms: Vector | None, embedded: Amplitudes | None) -> list[int]:
        """The sum of the members' norms as whole numbers of 2^-40; nothing where the strength needs none."""
        if not self.strength.needs_norms:
            if norms is not None:
                raise InputError("norms", "must be left out under the strength setting alike=mark", "some")
            return []
        count = norm_count(self.layout)
        if norms is None and embedded is None:
            return [0] * count
        if not isinstance(norms, np.ndarray) or norms.shape != (count,):
            rule = f"must be the members' sum of {count} norms, unless the strength setting is alike=mark"
            raise InputError("norms", rule, getattr(norms, "shape", type(norms).__name__))
        signed: list[int] = field.to_signed(norms).tolist() if count else []
        for i, n in enumerate(signed):
            if not 0 <= n < int(codec.LIMIT) << codec.FRACTION_BITS:
                raise EncodingError("the opened sum of norms", f"must be from 0 to {codec.LIMIT:g}", f"{n} / 2^40", i)
        return signed

    # --- moving it ---

    def digest(self) -> bytes:
        """Of all of it, and of all that came before: what all members of a round must agree on."""
        return digest("mark state", self.to_bytes())

    def to_bytes(self) -> bytes:
        """For a member that missed rounds. It has no secrets; `digest` settles whether it is the right one."""
        body = {
            "format": self.FORMAT,
            "layout": self.layout.digest(),
            "key": self.key,
            "round": self.round,
            "under": self.under,
            "updates": self._updates,
            "distance": self._distance,
            "model": self.model_digest.hex(),
            "anchor": self.anchor_digest.hex(),
            "chain": self._chain.hex(),
            "moved": self._moved,
            "ema": self._ema,
            "total": self._total,
            "sums": self._sums,
            "pace": self._pace.axes,
            "plain": self._pace.plain,
            "silenced": self._silenced,
        }
        return canonical(body)

    @classmethod
    def from_bytes(
        cls, data: bytes, strength: Strength, layout: ModelLayout, key: str, model: Vector, anchor: Vector
    ) -> MarkState:
        """Reads `to_bytes` back, beside the last global model and the anchor, which must be those that it names."""
        state = cls(strength, layout, key, model)
        state.anchor = _checked("anchor", anchor, layout)
        state.anchor_digest = model_digest(state.anchor)
        body = parse(data, cls.FORMAT, "a mark's state")
        try:
            state.round, state._updates, state._distance = (body[name] for name in ("round", "updates", "distance"))
            state.under = str(body["under"])
            state._moved, state._ema, state._total = (_axes(body[n]) for n in ("moved", "ema", "total"))
            state._sums = tuple(body["sums"])
            state._pace, state._silenced = Pace(tuple(map(tuple, body["pace"])), tuple(body["plain"])), body["silenced"]
            state._chain = bytes.fromhex(body["chain"])
        except (KeyError, TypeError, ValueError):
            raise RecordError("this is not a mark's state: a field is missing or of another kind") from None
        shape = [carrier.axes for carrier in state._carriers]
        lists = (state._moved, state._ema, state._total)
        pace = state._pace
        numbers = [state.round, state._updates, state._distance, *state._sums, *pace.plain, state._silenced]
        numbers += [n for axis in pace.axes for n in axis]
        numbers += [n for axes in lists for tensor in axes for values in tensor for n in values]
        fits = all([tuple(map(len, tensor)) for tensor in axes] == shape for axes in lists)
        paced = [count for axes in shape for count in axes], sum(1 for _ in layout.spans("plain"))
        fits = fits and (list(map(len, pace.axes)), len(pace.plain)) in (([], 0), paced)
        if not fits or len(state._sums) != len(shape) or not all(type(n) is int and n >= 0 for n in numbers):
            raise RecordError("this is not a mark's state of this layout")
        if state.to_bytes() != data:
            raise RecordError("this mark's state is of another model, anchor, layout or key")
        return state


def _axes(value: Any) -> tuple[_Axes, ...]:
    return tuple(tuple(tuple(values) for values in tensor) for tensor in value)


def _map(function: Any, x: tuple[_Axes, ...], y: tuple[_Axes, ...]) -> tuple[_Axes, ...]:
    """Number by number."""
    return tuple(
        tuple(tuple(map(function, a, b)) for a, b in zip(first, second, strict=True))
        for first, second in zip(x, y, strict=True)
    )


def _scaled(axes: tuple[_Axes, ...], above: int, below: int) -> tuple[_Axes, ...]:
    """Each number times above/below, rounded down."""
    return tuple(tuple(tuple(n * above // below for n in values) for values in tensor) for tensor in axes)


# --- the paper's rule -------------------------------------------------------------------------------------


class PaperScale:
    """A member's own strength under the rule `paper`: scale_k = c·‖Δ_k‖·EMA_k, for the model or for each carrier."""

    def __init__(self, strength: Strength, layout: ModelLayout) -> None:
        _need_paper(strength)
        self._strength, self._layout = strength, layout
        self._ema: list[int] | None = None

    def scale(self, before: Vector, after: Vector) -> Vector:
        """What the member gives to secure aggregation (purpose "scale"), in 2^-40; E of the model before and after."""
        before, after = _checked("before", before, self._layout), _checked("after", after, self._layout)
        norms = [_distance(after[c.place], before[c.place]) for c in _carriers(self._layout)]
        norms = [isqrt(n) for n in (norms if self._strength.per == "tensor" else [sum(norms)])]
        self._ema = norms if self._ema is None else [(9 * e + n) // 10 for e, n in zip(self._ema, norms, strict=True)]
        scales = [self._strength.c * n * e >> 72 for n, e in zip(norms, self._ema, strict=True)]
        if max(scales) > P >> 11:  # so that a thousand of them add up
            raise RoundError("this member's update is too large for the rule 'paper': its scale is above 1024")
        return field.from_signed(np.array(scales, np.int64))


def paper_amplitudes(
    strength: Strength, layout: ModelLayout, key: str, round_no: int, total: Vector, members: int
) -> Amplitudes:
    """From the opened sum of the members' scales: scale/√d per coordinate, for the sum divided by their number."""
    _need_paper(strength)
    carriers, sizes = _carriers(layout), {name: part.stop - part.start for name, part in _parts(layout)}
    counts = list(sizes.values()) if strength.per == "tensor" else [layout.coordinates]
    if total.shape != (len(counts),):
        raise InputError("total", f"must be {len(counts)} numbers", total.shape)
    each = [isqrt(int(v) ** 2 // (members**2 * max(1, n))) for v, n in zip(field.to_signed(total), counts, strict=True)]
    each = each if strength.per == "tensor" else each * len(carriers)
    scales = tuple(tuple((a,) * n for n in carrier.axes) for a, carrier in zip(each, carriers, strict=True))
    return Amplitudes(layout, key, round_no, strength.c, 0, scales)


def _parts(layout: ModelLayout) -> Iterable[tuple[str, slice]]:
    return Amplitudes(layout, "rademacher", 0, 0, 0, ()).tensors()


def _need_paper(strength: Strength) -> None:
    if strength.rule != "paper":
        raise InputError("strength", "must have the rule 'paper'", repr(strength.rule))


# --- what a member adds -----------------------------------------------------------------------------------


def weights(manifest: Manifest, members: Iterable[int]) -> dict[int, Fraction]:
    """a_k = n_k/Σ_U n, by the manifest's numbers of examples. `float` of it, rounded once, is what the codec takes."""
    counts = {x: manifest.terms.member(x).examples for x in sorted(members)}
    total = sum(counts.values())
    return {x: Fraction(n, total) for x, n in counts.items()}


def marked_vector(
    y: Vector, amplitudes: Amplitudes, manifest: Manifest, members: Sequence[int], point: int, share: Iterable[Vector]
) -> None:
    """Adds S ⊙ σ ⊙ λ_k·s_k to a member's encoded, weighted model, in place; over all of U that is S ⊙ σ ⊙ τ_raw.

    `share` gives the member's share piece by piece (`ShareFile.pieces()`); what follows the key in it is not read.
    Nobody may see y before it is masked; after an error, throw it away.
    """
    terms = manifest.terms
    if point not in members or len(members) < terms.threshold:
        raise RoundError(f"a share of member {point} may enter only among {terms.threshold} members or more, with it")
    factor = shamir.lagrange(sorted(members))[sorted(members).index(point)]
    _add_mark(y, amplitudes, _signed_scales(amplitudes, manifest.genesis, factor), share)


def ideal_mark(y: Vector, amplitudes: Amplitudes, key: NDArray[np.int64], genesis: Genesis | None = None) -> None:
    """What all members' parts add up to, for those who may hold a key: adds S ⊙ σ ⊙ key (S ⊙ key without a genesis)."""
    parts = (field.from_signed(key[part]) for part in field.chunks(key.size, 1 << 18))
    _add_mark(y, amplitudes, _signed_scales(amplitudes, genesis, 1), parts)


def _signed_scales(amplitudes: Amplitudes, genesis: Genesis | None, factor: int) -> Any:
    """A function: factor·σ·S for coordinates start … stop−1."""

    def piece(start: int, stop: int) -> Vector:
        part: Vector = field.scale(factor, amplitudes.vector[start:stop], checked=False)
        if genesis is None:
            return part
        return np.where(genesis.whitening(start, stop - start), field.neg(part, checked=False), part)

    return piece


def _add_mark(y: Vector, amplitudes: Amplitudes, scales: Any, values: Iterable[Vector]) -> None:
    """y += scales ⊙ values on the carrying coordinates."""
    layout = amplitudes.layout
    field.check_output(y, (layout.size,))
    field.check(y, "y")
    carrying, total, start = layout.carrying(), layout.coordinates, 0
    for piece in values:
        if start == total:
            break
        stop = min(start + piece.size, total)
        where: Any = slice(start, stop) if isinstance(carrying, slice) else carrying[start:stop]
        y[where] = field.axpy(scales(start, stop), piece[: stop - start], y[where], checked=False)
        start = stop
    if start != total:
        raise InputError("share", f"must have {total} elements or more", start)


# --- what a member refuses --------------------------------------------------------------------------------


def check_round(
    strength: Strength,
    manifest: Manifest,
    amplitudes: Amplitudes,
    members: Sequence[int],
    before: Vector,
    after: Vector,
    *,
    told_weights: Mapping[int, Fraction] | None = None,
    told_rate: Fraction | None = None,
) -> bool:
    """Whether a member embeds in this round; a RoundError if it must not take part in it at all.

    `before` and `after` are E of the global model and of the member's own result; `told_weights` and `told_rate` what
    the server said, if it did.
    """
    terms, layout, round_no = manifest.terms, amplitudes.layout, amplitudes.round
    if (layout.digest(), layout.coordinates, amplitudes.key) != (terms.layout, terms.coordinates, terms.key):
        raise RoundError("the model's layout or kind of key is not the manifest's")
    if strength != Strength.of(terms.strength, terms.coordinates):
        raise RoundError("the strength is not the manifest's")
    if len(set(members)) != len(members) or not all(x in range(1, terms.members + 1) for x in members):
        raise RoundError(f"the members of a round must be of the roster, each once, but are {list(members)}")
    shares = weights(manifest, members)
    if told_weights is not None and dict(told_weights) != shares:
        raise RoundError(f"the weights of round {round_no} are not those of the manifest's numbers of examples")
    if told_rate is not None and told_rate != strength.rate(round_no):
        raise RoundError(f"the learning rate of round {round_no} is not the manifest's: {told_rate} of the first one's")
    check_weights(manifest, members)
    if len(members) < terms.threshold:
        if strength.below_threshold == "refuse":
            raise RoundError(f"round {round_no} has {len(members)} members, and the mark needs {terms.threshold}")
        return False
    if not amplitudes.marks:
        return False
    check_size(strength, amplitudes, _checked("before", before, layout), _checked("after", after, layout))
    return True


def check_weights(manifest: Manifest, members: Sequence[int]) -> None:
    """Whether the weights hide a member among the others, with or without a mark (`quorumark.hiding`)."""
    problem = exposed(manifest.terms, members)
    if problem:
        raise RoundError(f"the members' weights hide too little: {problem}")


class TooStrongError(RoundError):
    """The mark of a round is more than a member's own update hides."""


def check_size(strength: Strength, amplitudes: Amplitudes, before: Vector, after: Vector) -> None:
    """The mark of a carrier is at most 4·c_max times the member's own update of it; `paper`: of all of them."""
    places = {spec.name: place for spec, place in amplitudes.layout.spans("carrier")}
    marks, updates = {}, {}
    for name, part in amplitudes.tensors():
        place, mark = places[name], amplitudes.vector[part]
        # of a tensor of which n weights in N are sampled, the mark stands for one that is N/n as large
        squares = _sum_squares(mark) << 2 * KEY_BITS[amplitudes.key] if mark.size else 0
        marks[name] = squares * (place.stop - place.start) // max(1, mark.size)
        updates[name] = _distance(after[place], before[place])
    if strength.rule == "paper":
        marks, updates = {"the model": sum(marks.values())}, {"the model": sum(updates.values())}
    for name, mark_squared in marks.items():
        if mark_squared * ONE**2 > (4 * strength.c_max) ** 2 * updates[name]:
            raise TooStrongError(
                f"the mark of round {amplitudes.round} in {name!r} is more than {4 * strength.c_max / ONE:.3g} times "
                "this member's own update of it: it would show"
            )
