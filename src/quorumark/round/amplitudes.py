"""How strong the mark of a round is, weight by weight (docs/strength.md).

The mark of a round is S ⊙ τ. The amplitudes S come from what is public only (global models, and sums of the members'
norms), in integers only, so that every member derives the same ones; weights that did not move, or that moved alike at
all members, get nothing. A member adds S ⊙ σ ⊙ λ_k·s_k to its weighted model (`round.mark`), and over the members U who
take part this is S ⊙ τ, exactly.

    strength = terms.strength
    state = MarkState(strength, layout, terms.key, E(θ_0))
    each round:
        amplitudes = state.amplitudes(round)
        if check_round(…): marked_vector(y, amplitudes, …)     # a member; y = E(a_k·θ_k)
        norms = upload_norms(layout, E(θ), E(θ_k), a_k, spans)  # a member; summed like y
        state.advance(round, E(θ_round), amplitudes, Σ norms)   # everybody, once the round's model is accepted
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import inf, isqrt, prod, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark import codec, field
from quorumark.canonical import canonical, digest, parse
from quorumark.consortium.optimiser import Optimiser
from quorumark.consortium.records import KEY_KINDS
from quorumark.consortium.strength import KEY_BITS, ONE, Strength
from quorumark.errors import EncodingError, InputError, RecordError, RoundError
from quorumark.field import Vector
from quorumark.model.layout import ModelLayout
from quorumark.packing import Span, move
from quorumark.round.applied import Applied
from quorumark.round.caution import Caution
from quorumark.round.continuity import Pace, plain_moves
from quorumark.round.movement import (
    Axes,
    Carrier,
    Sums,
    axis_sums,
    carriers_of,
    checked_model,
    distance,
    learnt_axes,
    least,
    least_by_weight,
    moved_axes,
    norm_count,
    norm_of,
    signed_norm,
    sum_squares,
)
from quorumark.round.optimiser import Taken
from quorumark.round.units import Packing, are_possible, first_reach, follow_lift, follow_reach

__all__ = ["HALVINGS", "Amplitudes", "MarkState", "model_digest"]
NOT_PACKED = Packing()
WARM = 2  # accepted rounds after the anchor before the mark begins: without losses it begins in round 3
HALVINGS = 3  # so often members may find the mark of a state too strong: the last time there is none


def _mark_squares(amplitudes: Amplitudes | None, carriers: list[Carrier]) -> list[list[list[int]]]:
    """Σ S² over each row, column and tap, in 2^-80: exact, and only where the mark is, if the carriers are sampled."""
    if amplitudes is None:
        return [[[0] * count for count in carrier.axes] for carrier in carriers]
    carrying, scales = amplitudes.layout.carrying(), amplitudes.sizes
    found = []
    for carrier in carriers:
        if isinstance(carrying, slice):
            here = np.ascontiguousarray(scales[carrier.place])
        else:
            part = slice(*np.searchsorted(carrying, (carrier.place.start, carrier.place.stop)))
            here = np.zeros(carrier.size, np.uint64)
            here[carrying[part] - carrier.place.start] = scales[part]
        alone = replace(carrier, place=slice(0, carrier.size))
        found.append([[square for _, _, square in axis] for axis in axis_sums(alone, here, np.zeros_like(here))])
    return found


@dataclass(frozen=True, eq=False)
class Amplitudes:
    """How strong the mark of one round is, weight by weight: public, and the same for everybody.

    A weight's amplitude is the least of its axes' `scales` (in 2^-40) and, under a server optimiser, of its own limit
    in `most`. `c` and `rho`, in 2^-32, say how it came about: the factor of this round, and ρ before it.
    """

    layout: ModelLayout
    key: str
    round: int
    c: int
    rho: int
    scales: tuple[Axes, ...]
    most: Vector | None = None

    @property
    def marks(self) -> bool:
        """Whether there is anything to add."""
        if self.most is not None:
            return bool(self.vector.any())
        return any(all(map(any, axes)) for axes in self.scales)

    @cached_property
    def vector(self) -> Vector:
        """S for each of the d carrying coordinates: S·τ has 40 fractional bits for the key's own τ."""
        bits, out = np.uint64(KEY_BITS[self.key]), least_by_weight(self.layout, self.scales)
        if self.most is not None:
            np.minimum(out, self.most, out=out)
        return out >> bits if bits else out

    @cached_property
    def squares(self) -> list[int]:
        """Σ (S·τ)² of each carrier's coordinates, for a key of variance 1, in 2^-80."""
        bits = 2 * KEY_BITS[self.key]
        found = (self.vector[part] for _, part in self.tensors())
        return [sum_squares(here) << bits if here.size else 0 for here in found]

    @property
    def sizes(self) -> Vector:
        """S·|τ| in 2^-40, where |τ| is 1."""
        return self.vector << np.uint64(KEY_BITS[self.key])

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
        return self._digest

    @cached_property
    def _digest(self) -> bytes:
        about = {"key": self.key, "round": self.round, "scales": self.scales}
        limits = [] if self.most is None else [self.most.astype("<u8", copy=False).tobytes()]
        return digest("amplitudes", bytes.fromhex(self.layout.digest()), canonical(about), *limits)


def model_digest(model: Vector) -> bytes:
    """Of a global model, as E(θ)."""
    return digest("global model", np.ascontiguousarray(model).astype("<u8", copy=False).data.cast("B"))


class MarkState:
    """The history of a run, as far as the mark needs it: three integers per row, column and tap, one per tensor.

    `round` counts the accepted rounds, `rho` (in 2^-32) is what the mark has reached: ‖A‖/‖θ − θ_a‖ over the carriers,
    where A is what is left of all amplitudes: A ← f·A + S, f by the strength's weight decay. `leak` is
    L = √Σ(‖S‖/‖D‖)² over all rounds, which no decay takes back: who sees the models can undo a decay that is public.
    `under` is the manifest under which the last one was summed. Two states with the same `digest` and strength give the
    same amplitudes for ever.

    Under a server optimiser (`applied`) a model is not the sum: rows, columns and taps move as the sums do, ρ and L are
    those of the models, and `applied` has the others.
    """

    FORMAT = "quorumark-mark-state/v3"

    def __init__(
        self,
        strength: Strength,
        layout: ModelLayout,
        key: str,
        model: Vector,
        start: int = 0,
        packing: Packing = NOT_PACKED,
        optimiser: Optimiser | None = None,
    ) -> None:
        """Before the first round, from the initial model E(θ_0): the anchor, unless there are warm-up rounds; after
        those, `start` is how many there were. `packing` is in force for the next round.

        Models are kept, not copied: do not change them afterwards.
        """
        if key not in KEY_KINDS:
            raise InputError("key", f"must be one of {', '.join(KEY_KINDS)}", repr(key))
        self.strength, self.layout, self.key = strength, layout, key
        self._carriers = carriers_of(layout)
        self.model = self.anchor = checked_model("model", model, layout)
        self.model_digest = self.anchor_digest = model_digest(self.model)
        self.round, self.under = start, ""
        self._updates = self._distance = 0
        nothing = tuple(tuple((0,) * count for count in carrier.axes) for carrier in self._carriers)
        self._moved = self._ema = self._total = nothing
        self._sums = (0,) * len(self._carriers)
        self._rate = Fraction(1)  # the last update's, by the table that was in force then
        self._leak = self._path = self._step = 0  # L² in 2^-64; Σ‖D‖² and the last ‖D‖², in 2^-80
        self._pace, self._silenced = Pace(), 0
        self.packing = packing
        self.applied = None if optimiser is None else Applied.start(optimiser, layout, nothing)
        self.stood = False  # whether another sum from this model could show the mark of the last one
        self._reach: tuple[int, ...] = ()  # what units follow from (`round.units`), once a packed round was accepted
        self._lift: tuple[int, ...] = ()
        self._first_reach: tuple[int, ...] | None = None
        self.caution = Caution()  # what is left of earlier states' halvings
        self._written = b""  # what `to_bytes` gave, until the next round is accepted
        self._rounded: tuple[tuple[object, ...], Amplitudes] | None = None  # what `in_units` gave last, of this state
        agreed = [] if optimiser is None else [str(optimiser).encode()]
        self._chain = digest("mark history", bytes.fromhex(layout.digest()), key.encode(), self.model_digest, *agreed)

    # --- what it says ---

    @property
    def rho(self) -> int:
        return self._reached() * ONE // self._distance if self._distance else 0

    @property
    def leak(self) -> float:
        return sqrt(self._leak / 2.0**64)

    @property
    def leak_limit(self) -> float:
        """What L may come to: 1.5·ρ*·max(1, ‖θ − θ_a‖/√Σ‖D‖²); infinite for the rules without ρ*."""
        allowed = self._allowed()
        return inf if allowed is None else sqrt(allowed / 2.0**64)

    def _allowed(self) -> int | None:
        """The limit of L², in 2^-64.

        Where updates go separate ways, L is the cosine with the key of the best that an observer makes of them, and
        1.5·ρ* is the limit. Where they go the same way, ‖θ − θ_a‖ is more than √Σ‖D‖², and the updates hide each
        other's mark: nobody gets L then, and the limit grows by that factor.
        """
        if self.strength.rule not in ("rho", "target"):
            return None
        return self._limit(self._path, self._distance)

    def _limit(self, path: int, straight: int) -> int:
        return 9 * self.strength.rho**2 * max(path, straight**2) // (4 * path) if path else 0

    def _reached(self) -> int:
        """‖A‖. Of A the state has each tensor's sum, exactly, and a shape M ≥ A: the least of the axes' totals.

        So it is √Σ_tensors ‖M‖²·(Σ A)²/(Σ M)².
        """
        if self.applied is not None:
            return signed_norm(self.applied.embedded)
        shapes = [least(tensor) for tensor in self._total]
        return isqrt(sum(q * a * a // (m * m) for a, (m, q) in zip(self._sums, shapes, strict=True) if m))

    def embedded(self) -> NDArray[np.float64]:
        """What is left in each carrying weight of all that was added, over its sign in the key: A as far as the state
        knows it, of each tensor the shape M, scaled to its sum."""
        if self.applied is not None:
            return self.applied.embedded / 2.0**codec.FRACTION_BITS
        scaled = []
        for tensor, total in zip(self._total, self._sums, strict=True):
            shape, _ = least(tensor)
            scaled.append(total / shape / 2.0**40 if shape else 0.0)
        whole = Amplitudes(self.layout, "rademacher", self.round, 0, 0, self._total)
        out = whole.vector.astype(np.float64)
        for (_, place), factor in zip(whole.tensors(), scaled, strict=True):
            out[place] *= factor
        return out

    @property
    def silenced(self) -> float:
        """The share of the carriers that gets no mark in the next round, because something jumped in the last one."""
        return self._silenced / self.layout.carrier_size if self._updates >= WARM else 0.0

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
        if self._updates >= WARM and rule != "paper":
            ratio = self._rate_ratio(round_no) if halvings < HALVINGS else Fraction(0)
            if self.applied is not None:
                return self._amplitudes_for(self.applied, round_no, ratio, halvings)
            base = _scaled(base, ratio.numerator, ratio.denominator << min(halvings, HALVINGS) + self.caution.halvings)
            c = self.strength.c_max
            if rule != "relative":
                # towards f·‖A‖ + c·‖base‖ = ρ·‖θ − θ_a‖
                full = norm_of(base)
                missing = self.strength.rho * self._distance - self.strength.kept(round_no) * self._reached()
                c = min(c, max(0, missing) // full, self._quiet_c(full, round_no)) if full else 0
        return self.in_units(Amplitudes(self.layout, self.key, round_no, c, self.rho, _scaled(base, c, ONE)))

    def _amplitudes_for(self, applied: Applied, round_no: int, ratio: Fraction, halvings: int) -> Amplitudes:
        """The same under a server optimiser: both the sum and the step that follows from it hide the mark, in the next
        round (`Applied.room`) and in all rounds together.

        With `share` of the largest mark: what is embedded and still to come stays within ρ of the model's way, Σ‖S‖
        within ρ of the sums' way, and both leaks within their limits. What all that allows is halved.
        """
        most, key = self.strength.c_max, KEY_BITS[self.key]
        base = _scaled(self._moved, ratio.numerator, ratio.denominator)
        room = applied.room(self.layout, base, ratio.as_integer_ratio(), most)
        share, full, raw = ONE, signed_norm(room.gained), signed_norm(room.most.astype(np.int64))
        if self.strength.rule != "relative" and raw:
            kept = self.strength.kept(round_no)
            coming = ONE * signed_norm(room.pending)
            missing = self.strength.rho * self._distance - kept * self._reached() - coming
            # the next step and the next sum's update may be as much smaller than the last ones as the rates are
            above, below = applied.slower(ratio.as_integer_ratio())
            step, update = isqrt(self._step) * above // below, int(isqrt(applied.step) * ratio)
            shown = isqrt(max(0, self._limit(self._path, self._distance) - self._leak)) * step
            summed = isqrt(max(0, self._limit(applied.path, applied.straight) - applied.leak)) * update
            limits = [
                missing // max(1, full),
                (self.strength.rho * applied.straight - ONE * applied.spent) // raw,
                (shown - coming * room.first // ONE) * ONE // max(1, full * room.first),
                summed // raw,
            ]
            share = max(0, min(share, *limits))
        share >>= halvings + self.caution.halvings
        scales, part = _scaled(base, most, ONE), np.uint64(share)
        low = (room.most & np.uint64(ONE - 1)) * part >> np.uint64(32)
        vector = (room.most >> np.uint64(32)) * part + low
        if key:
            vector = vector >> np.uint64(key) << np.uint64(key)
        return self.in_units(Amplitudes(self.layout, self.key, round_no, most * share // ONE, self.rho, scales, vector))

    def spans(self, level: bytes = b"") -> list[Span]:
        """Each tensor's place in the model, and the shift of the units of the next round, of this level."""
        if not self.packing.packs:
            return [(slice(0, self.layout.size), 0)]
        if not self._reach and self._first_reach is None:
            self._first_reach = first_reach(self.layout, self.model)
        return self.packing.spans(self.layout, self._reach or self._first_reach or (), self._lift, level)

    def unbacked(self, levels: Mapping[int, bytes], backing: int) -> set[int]:
        """Members who need wider units than so few of them may ask for (`Packing.unbacked`)."""
        return self.packing.unbacked(levels, self._lift, backing)

    def in_units(self, amplitudes: Amplitudes, level: bytes = b"") -> Amplitudes:
        """The mark as it fits into the units of the next round: rounded down to them, and not above what leaves room
        for the updates. What is below one unit is no mark."""
        if not self.packing.packs:
            return amplitudes
        about = amplitudes, level, self.packing, self.strength
        if self._rounded is None or self._rounded[0] != about:  # members of one process ask for the same
            self._rounded = about, self._in_units(amplitudes, level)
        return self._rounded[1]

    def _in_units(self, amplitudes: Amplitudes, level: bytes) -> Amplitudes:
        most = self.packing.largest_mark(self.strength, self.key)
        shifts = {place.start: shift for place, shift in self.spans(level)}
        units = [1 << (shifts[carrier.place.start] + KEY_BITS[self.key]) for carrier in self._carriers]
        rounded = tuple(
            tuple(tuple(min(n // unit, most) * unit for n in values) for values in axes)
            for axes, unit in zip(amplitudes.scales, units, strict=True)
        )
        limits = amplitudes.most
        if limits is None and rounded == amplitudes.scales:
            return amplitudes  # it knows its vector
        if limits is not None:
            limits = limits.copy()
            for (_, part), unit in zip(amplitudes.tensors(), units, strict=True):
                limits[part] = np.minimum(limits[part] // np.uint64(unit), np.uint64(most)) * np.uint64(unit)
        return replace(amplitudes, scales=rounded, most=limits)

    def _quiet_c(self, full: int, round_no: int) -> int:
        """The largest c with L² + (c·‖base‖/‖D‖)² within the limit, if the next update is as large as the last one."""
        ratio = self._rate_ratio(round_no)
        left = max(0, (self._allowed() or 0) - self._leak) * self._step * ratio.numerator**2
        return isqrt(left // (full * full * ratio.denominator**2))

    def _check_next(self, round_no: int) -> None:
        if round_no != self.round + 1:
            raise RoundError(
                f"round {self.round + 1} is next after {self.round} accepted ones, not round {round_no}",
                code="round.wrong-number",
            )

    def _rate_ratio(self, round_no: int) -> Fraction:
        """The learning rate over the last update's; at most 1, since a mark never runs ahead of the updates."""
        now, then = self.strength.rate(round_no), self._rate
        return min(now / then, Fraction(1)) if then else Fraction(0)

    def advance(
        self,
        round_no: int,
        model: Vector,
        embedded: Amplitudes | None,
        norms: Vector | None = None,
        *,
        under: str = "",
        level: bytes = b"",
        stood: bool = False,
        taken: Taken | None = None,
        halvings: int = 0,
    ) -> None:
        """A round's global model was accepted; `embedded` is what was added in it, None if nothing; `under` is the
        digest of the manifest that it was summed under, `level` that of its units, `halvings` how often members had the
        mark halved. `stood`: a tensor kept its weights
        though its opened sum was marked. `taken` is the server optimiser's step, if there is one.

        `norms` is the opened sum of the members' norms, if the strength needs them; a run without the mark may leave
        them out, and then nothing counts as learnt. A round that is given up is not told: the last model stands.
        """
        self._check_next(round_no)
        if embedded is not None and (embedded.round, embedded.layout, embedded.key) != (
            round_no,
            self.layout,
            self.key,
        ):
            raise RoundError(
                f"round {round_no} cannot have embedded the amplitudes of round {embedded.round}",
                code="round.wrong-number",
            )
        if (taken is None) != (self.applied is None):
            raise InputError("taken", "must be the optimiser's step where the terms name one, and only there")
        checked = self._checked_norms(norms, embedded)
        used = self.spans(level)
        self._written, self._rounded = b"", None
        before, self.model = self.model, checked_model("model", model, self.layout)
        self.model_digest = model_digest(self.model)
        summed = self.model if taken is None else move(before, taken.raw)
        sums = [axis_sums(carrier, summed, before) for carrier in self._carriers]
        noise, quiet = self._noise(embedded)
        quiet = self._with_rounding(quiet, used)
        self._moved = tuple(map(moved_axes, self._carriers, sums, quiet))
        first = not self._updates and not any(any(map(any, axes)) for axes in self._ema)
        self._ema = _map(lambda e, m: m if first else (9 * e + m) // 10, self._ema, self._moved)
        self._moved = _map(min, self._moved, self._ema)
        if self.strength.needs_norms:
            each = iter(checked)
            apart = zip(self._carriers, sums, noise, strict=True)
            learnt = tuple(learnt_axes(carrier, axes, each, extra) for carrier, axes, extra in apart)
            self._moved = _map(lambda m, moves: m * moves, self._moved, learnt)
        self._silence_jumps(sums, summed, before)
        kept = self.strength.kept(round_no)
        if taken is not None and self.applied is not None:
            sums = [axis_sums(carrier, self.model, before) for carrier in self._carriers]
            marks = None if embedded is None else embedded.sizes
            self.applied, shown = self.applied.after(self.layout, self._carriers, sums, taken, marks)
        elif kept < ONE:
            self._total = _scaled(self._total, kept, ONE)
            self._sums = tuple(a * kept // ONE for a in self._sums)
        self._step = sum(square for axes in sums for _, _, square in axes[0])
        self._path += self._step
        if taken is not None:
            self._leak += -(-(shown << 64) // max(1, self._step))
        elif embedded is not None:
            self._total = _map(lambda a, b: a + b, self._total, embedded.scales)
            self._sums = tuple(a + least(axes)[0] for a, axes in zip(self._sums, embedded.scales, strict=True))
            self._leak += -(-(norm_of(embedded.scales) ** 2 << 64) // max(1, self._step))
        self.round, self.under, self._updates, self.stood = round_no, under, self._updates + 1, stood
        self._rate = self.strength.rate(round_no)
        if round_no <= self.strength.warmup_rounds:
            self.anchor, self.anchor_digest, self._updates = self.model, self.model_digest, 0
            self._path = self._step = 0
            self.applied = None if self.applied is None else self.applied.from_anchor()
        if self.packing.packs:
            self._reach = follow_reach(self.layout, self._reach, summed, before)
            self._lift = follow_lift(self.packing.count, self._lift, level, used, self._reach)
        else:
            self._reach, self._lift = (), ()
        self._first_reach, self.caution = None, self.caution.after(halvings)
        end = self.layout.carrier_size
        self._distance = isqrt(distance(self.model[:end], self.anchor[:end]))
        mark = embedded.digest() if embedded is not None and embedded.marks else b""  # nothing is nothing
        parts = [round_no.to_bytes(8, "big"), self.model_digest, mark, canonical({"norms": checked})]
        if self.applied is not None:
            parts.append(canonical(self.applied.as_dict()))
        if self.caution.halvings:
            parts.append(canonical(self.caution.as_list()))
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

    def _with_rounding(self, quiet: list[list[list[int]]], used: list[Span]) -> list[list[list[int]]]:
        """The same, and an rms below K units counts as still: rounding at K members makes K/2 on a dead row."""
        if not self.packing.packs:
            return quiet
        shifts = {place.start: shift for place, shift in used}
        least = [
            [
                carrier.size // count * (self.packing.members << shifts[carrier.place.start]) ** 2
                for count in carrier.axes
            ]
            for carrier in self._carriers
        ]
        return [
            [[max(q, most) for q in axis] for axis, most in zip(axes, mosts, strict=True)]
            for axes, mosts in zip(quiet, least, strict=True)
        ]

    def _silence_jumps(self, sums: list[Sums], now: Vector, before: Vector) -> None:
        """Takes the next round's mark from what jumped, or from everything (`quorumark.round.continuity`)."""
        self._silenced = 0
        if not self.strength.continuity:
            self._pace = Pace()
            return
        moves = [
            [isqrt(square // (carrier.size // count)) for _, _, square in axis]
            for carrier, axes in zip(self._carriers, sums, strict=True)
            for axis, count in zip(axes, carrier.axes, strict=True)
        ]
        plain = plain_moves(self.layout, now, before)
        self._pace, jumped, rests = self._pace.after(moves, plain, self.strength.continuity)
        each = iter(jumped)
        kept = tuple(tuple(tuple(int(not (rests or j)) for j in next(each)) for _ in axes) for axes in self._moved)
        self._moved = _map(lambda m, keeps: m * keeps, self._moved, kept)
        self._silenced = self.layout.carrier_size - sum(prod(map(sum, axes)) for axes in kept)

    def _checked_norms(self, norms: Vector | None, embedded: Amplitudes | None) -> list[int]:
        """The sum of the members' norms as integer multiples of 2^-40; nothing where the strength needs none."""
        if not self.strength.needs_norms:
            if norms is not None:
                raise InputError("norms", "must be left out under the strength setting alike=mark")
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
        if not self._written:
            self._written = self._write()
        return self._written

    def _write(self) -> bytes:
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
            "leak": self._leak,
            "path": self._path,
            "step": self._step,
            "rate": [self._rate.numerator, self._rate.denominator],
        }
        packed = {"reach": self._reach, "lift": self._lift} if self._reach else {}
        more: dict[str, Any] = {"optimiser": self.applied.as_dict()} if self.applied is not None else {}
        more |= {"caution": self.caution.as_list()} if self.caution.halvings else {}
        return canonical(body | packed | more | ({"stood": True} if self.stood else {}))

    def vectors(self) -> dict[str, NDArray[Any]]:
        """What goes beside `to_bytes`: a server optimiser's numbers for each weight."""
        return {} if self.applied is None else self.applied.vectors()

    @classmethod
    def from_bytes(
        cls,
        data: bytes,
        strength: Strength,
        layout: ModelLayout,
        key: str,
        model: Vector,
        anchor: Vector,
        packing: Packing = NOT_PACKED,
        optimiser: Optimiser | None = None,
        vectors: Mapping[str, NDArray[Any]] | None = None,
    ) -> MarkState:
        """Reads `to_bytes` back, beside the last global model and the anchor, and the optimiser's `vectors`, which must
        be those that it names."""
        state = cls(strength, layout, key, model, packing=packing, optimiser=optimiser)
        state.anchor = checked_model("anchor", anchor, layout)
        state.anchor_digest = model_digest(state.anchor)
        body = parse(data, cls.FORMAT, "a mark's state")
        try:
            state.round, state._updates, state._distance = (body[name] for name in ("round", "updates", "distance"))
            state.under = str(body["under"])
            state._moved, state._ema, state._total = (_axes(body[n]) for n in ("moved", "ema", "total"))
            state._sums = tuple(body["sums"])
            state._leak, state._path, state._step = (body[name] for name in ("leak", "path", "step"))
            state._rate = Fraction(*body["rate"])
            state._pace, state._silenced = Pace(tuple(map(tuple, body["pace"])), tuple(body["plain"])), body["silenced"]
            state._reach = tuple(body.get("reach", ()))
            state._lift = tuple(body.get("lift", ()))
            state.caution = Caution(*body.get("caution", ()))
            state._chain, state.stood = bytes.fromhex(body["chain"]), body.get("stood") is True
            if state.applied is not None:
                state.applied = state.applied.restored(body["optimiser"], vectors or {})
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            raise RecordError("this is not a mark's state: a field is missing or of another kind") from None
        shape = [carrier.axes for carrier in state._carriers]
        lists = (state._moved, state._ema, state._total)
        pace = state._pace
        numbers = [state.round, state._updates, state._distance, *state._sums, *pace.plain, state._silenced]
        numbers += [*state._reach, *state._lift]
        numbers += [state._leak, state._path, state._step, state._rate.numerator]
        numbers += [n for axis in pace.axes for n in axis]
        numbers += [n for axes in lists for tensor in axes for values in tensor for n in values]
        fits = all([tuple(map(len, tensor)) for tensor in axes] == shape for axes in lists)
        paced = [count for axes in shape for count in axes], sum(1 for _ in layout.spans("plain"))
        tensors = sum(1 for _ in layout.spans())
        fits = fits and len(state._reach) in (0, tensors) and len(state._lift) in (0, len(state._reach))
        fits = fits and (list(map(len, pace.axes)), len(pace.plain)) in (([], 0), paced)
        if not fits or len(state._sums) != len(shape) or not all(type(n) is int and n >= 0 for n in numbers):
            raise RecordError("this is not a mark's state of this layout")
        if not are_possible(state._reach, state._lift) or not state.caution.is_possible:
            raise RecordError("this is not a mark's state: its units are out of range, or its caution")
        if state.to_bytes() != data:
            raise RecordError("this mark's state is of another model, anchor, layout or key")
        return state


def _axes(value: Any) -> tuple[Axes, ...]:
    return tuple(tuple(tuple(values) for values in tensor) for tensor in value)


def _map(function: Any, x: tuple[Axes, ...], y: tuple[Axes, ...]) -> tuple[Axes, ...]:
    """Number by number."""
    return tuple(
        tuple(tuple(map(function, a, b)) for a, b in zip(first, second, strict=True))
        for first, second in zip(x, y, strict=True)
    )


def _scaled(axes: tuple[Axes, ...], above: int, below: int) -> tuple[Axes, ...]:
    """Each number times above/below, rounded down."""
    return tuple(tuple(tuple(n * above // below for n in values) for values in tensor) for tensor in axes)
