"""The mark under a server optimiser: what is in the sums, and what the optimiser makes of it (docs/optimisers.md).

Both are public, the sum of a round and the step that follows from it, and both must hide the mark. So a mark S is
limited for each weight j, beside c·rms of the raw updates of its row, column and tap:

    (β1·M_j + (1−β1)·S_j)·η/(r_j + τ) ≤ c·rms(steps)    M: what earlier marks left in the momentum
    S_j ≤ c·rms(steps)                                  where steps are smaller than sums, later sums tell the same
    S_j = 0 where r_j is below a sixteenth of its tensor's rms: such weights stand still, but for the mark

FedAvgM has M ← β·M + S and the rate itself instead of η/(r + τ). What a mark does to the model is followed to first
order, through the momentum and through r: `embedded` is what a verification finds.

Those limits are made before the sum is known. Where the sum turns round, little may be left of the momentum but the
mark's part of it: weights whose step would show more than c of the key begin with a momentum of 0 (`Applied.take`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark import field
from quorumark.canonical import digest
from quorumark.checks import DAMAGED, is_count
from quorumark.consortium.optimiser import Optimiser
from quorumark.consortium.strength import ONE
from quorumark.errors import RecordError
from quorumark.field import Vector, parallel
from quorumark.files import replacing
from quorumark.model.layout import ModelLayout
from quorumark.round import steps
from quorumark.round.movement import (
    Axes,
    Carrier,
    Sums,
    axis_sums,
    carriers_of,
    least_by_weight,
    moved_axes,
    signed_norm,
)
from quorumark.round.optimiser import KINDS, LARGEST, Followed, OptimiserState, Taken

__all__ = ["OPTIMISER", "VECTORS", "Applied", "Room", "optimiser_vectors", "read_vectors", "write_vectors"]

OPTIMISER = "optimiser:"
"""What the names of the vectors begin with where others are beside them."""

VECTORS = ("momentum", "root", "mark", "drag", "embedded", "travelled")
"""What is kept for each weight, and handed to members who missed rounds, as `optimiser:momentum` and so on."""

_FLOOR = 16  # no mark where r is below a 16th of its tensor's rms
_COUNTS = ("leak", "path", "step", "spent")


@dataclass(frozen=True, eq=False)
class Room:
    """How large the mark of a round may be: `most` for each coordinate, at c_max; what that would come to in the model
    (`gained`); what is still to come of earlier marks (`pending`); and which part of a mark is in the first step."""

    most: Vector
    gained: NDArray[np.int64]
    pending: NDArray[np.int64]
    first: int


@dataclass(frozen=True, eq=False)
class Applied:
    """The optimiser's state, and the mark's under it.

    `moved` and `ema` are of the steps, as the mark's state has them of the raw updates. By coordinate: `mark` is M,
    `drag` what the mark does to r, `embedded` what it has done to the model; `travelled` is the sum of all raw updates
    of the carriers. `leak` is L² of the raw updates in 2^-64, `path` and `step` are Σ‖D‖² and the last ‖D‖² of them,
    `spent` is Σ‖S‖.
    """

    state: OptimiserState
    moved: tuple[Axes, ...]
    ema: tuple[Axes, ...]
    mark: NDArray[np.int64]
    drag: NDArray[np.int64]
    embedded: NDArray[np.int64]
    travelled: NDArray[np.int64]
    leak: int = 0
    path: int = 0
    step: int = 0
    spent: int = 0

    @classmethod
    def start(cls, optimiser: Optimiser, layout: ModelLayout, nothing: tuple[Axes, ...]) -> Applied:
        state = OptimiserState.start(optimiser, layout.size)
        mark, drag, embedded = (np.zeros(layout.coordinates, np.int64) for _ in range(3))
        return cls(state, nothing, nothing, mark, drag, embedded, np.zeros(layout.carrier_size, np.int64))

    # --- a round ---

    def take(
        self,
        layout: ModelLayout,
        raw: NDArray[np.int64],
        marks: Vector | None,
        kept: int,
        c: int,
        *,
        averaged: set[str],
    ) -> Taken:
        """The optimiser's step for the update of a sum, with what it makes of the mark. `marks` are S in 2^-40, None if
        there was none; `kept` is what the members' weight decay leaves of the weights. Tensors that are `averaged`
        take the sum as it is.

        Where the step would show more of the key than it may (`_loud`), the momentum m, and the mark's part M of it,
        are 0 before it.
        """
        taken = self.state.take(raw)
        taken = taken.averaged([place for spec, place in layout.spans("plain") if spec.name in averaged])
        added = np.zeros(layout.coordinates, np.int64) if marks is None else marks.astype(np.int64)
        if not any(v.any() for v in (added, self.mark, self.drag, self.embedded)):
            return replace(taken, followed=Followed(*(np.zeros_like(added) for _ in range(3))))
        added -= _times(self.embedded, ONE - kept)
        followed = self._followed(layout, taken, added)
        loud = self._loud(layout, taken, followed, c)
        if loud.any():
            taken = taken.begun_anew(loud)
            followed = self._followed(layout, taken, added)
        return replace(taken, followed=followed)

    def _loud(self, layout: ModelLayout, taken: Taken, followed: Followed, c: int) -> NDArray[np.bool_]:
        """The weights whose momentum makes a step that shows more of the key than it may: of a tensor with
        ‖shown‖ > c·‖step‖ all, else those of each row, column and tap with ‖shown‖ > 2·c·‖step‖. So no step shows more
        than c altogether, where the sum does not."""
        loud, carrying = np.zeros(layout.size, bool), layout.carrying()
        if not self.state.beta(1):
            return loud
        shown, moves = (np.zeros(layout.carrier_size, np.int64) for _ in range(2))  # of what carries
        shown[carrying], moves[carrying] = followed.shown, taken.moves[carrying]
        for carrier in carriers_of(layout):
            if not self.mark[_coordinates(carrying, carrier.place, layout.carrier_size)].any():
                continue
            alone = replace(carrier, place=slice(0, carrier.size))
            parts = (field.from_signed(v[carrier.place]) for v in (shown, moves))
            sums = axis_sums(alone, *parts)
            whole = [sum(one) for one in zip(*sums[0], strict=True)]
            here = loud[carrier.place].reshape(carrier.rows, carrier.columns, carrier.taps)
            here |= _is_loud(whole, c)
            for number, axis in enumerate(sums):
                found = np.array([_is_loud(one, 2 * c) for one in axis])
                here |= found.reshape([-1 if number == n else 1 for n in range(3)])
        return loud

    def after(
        self, layout: ModelLayout, carriers: Sequence[Carrier], sums: Sequence[Sums], taken: Taken, marks: Vector | None
    ) -> tuple[Applied, int]:
        """With an accepted round, and Σ of the squares of what its step shows of the mark.

        `sums` are of the step, `marks` are S in 2^-40, None if there was none.
        """
        quiet = [[[0] * count for count in carrier.axes] for carrier in carriers]
        moved = tuple(map(moved_axes, carriers, sums, quiet))
        first = not any(any(map(any, axes)) for axes in self.ema)
        ema = _both(lambda e, m: m if first else (9 * e + m) // 10, self.ema, moved)
        raw = taken.raw[: layout.carrier_size]
        step = signed_norm(raw) ** 2
        size = 0 if marks is None else signed_norm(marks.astype(np.int64))
        followed = self._without(layout, taken)
        made = replace(
            self,
            state=taken.after,
            moved=_both(min, moved, ema),
            ema=ema,
            mark=followed.mark,
            drag=followed.drag,
            embedded=np.clip(self.embedded + followed.shown, -LARGEST, LARGEST),
            travelled=np.clip(self.travelled + raw, -LARGEST, LARGEST),
            leak=self.leak + -(-(size**2 << 64) // max(1, step)),
            path=self.path + step,
            step=step,
            spent=self.spent + size,
        )
        return made, signed_norm(followed.shown) ** 2

    def _followed(self, layout: ModelLayout, taken: Taken, added: NDArray[np.int64]) -> Followed:
        """What a step makes of the mark, with so much `added` in its sum."""
        carrying, state = layout.carrying(), taken.before
        mark, drag, shown = self.mark.copy(), self.drag.copy(), np.zeros_like(self.mark)
        if taken.anew is not None:
            mark[taken.anew[carrying]] = 0
        rate, betas = np.uint64(state.rate()), [np.uint64(state.beta(which)) for which in (1, 2)]
        if state.optimiser.adapts:
            raw, moves, before, root = (
                np.ascontiguousarray(v[carrying]) for v in (taken.raw, taken.moves, state.root, taken.after.root)
            )
            kind, tau = KINDS[state.optimiser.name], np.uint64(state.tau)

        def part(b: int, e: int) -> None:
            if not state.optimiser.adapts:
                steps.momentum_mark(added[b:e], rate, betas[0], mark[b:e], shown[b:e])
                return
            about = raw[b:e], moves[b:e], before[b:e], root[b:e], rate, *betas, tau
            steps.adaptive_mark(kind, added[b:e], *about, mark[b:e], drag[b:e], shown[b:e])

        parallel.spread(part, added.size)
        return Followed(mark, drag, shown)

    def _without(self, layout: ModelLayout, taken: Taken) -> Followed:
        """What an accepted step made of the mark: tensors that were held keep theirs."""
        assert taken.followed is not None  # noqa: S101
        if not taken.held:
            return taken.followed
        mark, drag, shown = (v.copy() for v in (taken.followed.mark, taken.followed.drag, taken.followed.shown))
        for place in taken.held:
            here = _coordinates(layout.carrying(), place, layout.carrier_size)
            mark[here], drag[here], shown[here] = self.mark[here], self.drag[here], 0
        return Followed(mark, drag, shown)

    def from_anchor(self) -> Applied:
        """The same where the present model is the anchor: nothing was marked before it."""
        zero = np.zeros_like(self.travelled)
        return replace(self, travelled=zero, leak=0, path=0, step=0, spent=0)

    # --- the next round ---

    def slower(self, scale: tuple[int, int]) -> tuple[int, int]:
        """By how much smaller than the last step the next one may be, as a fraction: `scale`, which is the members'
        learning rates' ratio, times the server's rates' one; both are at most 1."""
        now, then = self.state.rate(), max(1, self.state.rate(0))
        return (scale[0] * now, scale[1] * then) if self.state.steps and now < then else scale

    def room(self, layout: ModelLayout, base: Sequence[Axes], scale: tuple[int, int], c_max: int) -> Room:
        """How large the next mark may be. `base` are the raw updates' moves for that round, `scale` is by how much
        smaller than the last one its update may be: a fraction."""
        state, carrying = self.state, layout.carrying()
        above, below = self.slower(scale)
        shown = tuple(tuple(tuple(n * above * c_max // (below * ONE) for n in v) for v in axes) for axes in self.moved)
        most = least_by_weight(layout, shown)
        raw = tuple(tuple(tuple(n * c_max // ONE for n in values) for values in axes) for axes in base)
        caps = np.minimum(most, least_by_weight(layout, raw))
        room, gained = np.empty_like(most), np.empty_like(most)
        pending = np.empty(most.size, np.int64)
        rate, beta = np.uint64(state.rate()), np.uint64(state.beta(1))
        if state.optimiser.adapts:
            root, floor = np.ascontiguousarray(state.root[carrying]), self._floor(layout)
            shrink = ONE if state.optimiser.name == "fedadagrad" else isqrt(state.beta(2) << 32)
            about = rate, beta, np.uint64(shrink), np.uint64(state.tau)

        def part(b: int, e: int) -> None:
            out = room[b:e], gained[b:e], pending[b:e]
            if state.optimiser.adapts:
                own = most[b:e], caps[b:e], floor[b:e], self.mark[b:e], root[b:e]
                steps.adaptive_room(*own, *about, *out)
            else:
                steps.momentum_room(most[b:e], caps[b:e], self.mark[b:e], rate, beta, *out)

        parallel.spread(part, most.size)
        return Room(room, gained.astype(np.int64), pending, ONE - int(beta))

    def _floor(self, layout: ModelLayout) -> Vector:
        """For each coordinate: a 16th of the rms of r over its tensor."""
        carrying = layout.carrying()
        out = np.zeros(layout.coordinates, np.uint64)
        for spec, place in layout.spans("carrier"):
            if spec.size:
                root = np.minimum(self.state.root[place], np.uint64(LARGEST)).astype(np.int64)
                out[_coordinates(carrying, place, layout.carrier_size)] = (
                    isqrt(signed_norm(root) ** 2 // spec.size) // _FLOOR
                )
        return out

    @property
    def straight(self) -> int:
        """‖Σ D‖ of the raw updates."""
        return signed_norm(self.travelled)

    # --- moving it ---

    def vectors(self) -> dict[str, NDArray[Any]]:
        """All that is kept by weight; what is zero everywhere is left out."""
        found = {"momentum": self.state.momentum, "root": self.state.root}
        found |= {name: getattr(self, name) for name in VECTORS if name not in found}
        return {name: vector for name, vector in found.items() if vector.any()}

    def as_dict(self) -> dict[str, Any]:
        """For the mark's record: the vectors as digests."""
        counts = {name: getattr(self, name) for name in _COUNTS}
        about = {
            "optimiser": str(self.state.optimiser),
            "steps": self.state.steps,
            "moved": self.moved,
            "ema": self.ema,
        }
        return about | counts | {"vectors": {name: _named(vector) for name, vector in self.vectors().items()}}

    def restored(self, body: Mapping[str, Any], vectors: Mapping[str, NDArray[Any]]) -> Applied:
        """Reads `as_dict` and `vectors` back, from a state that has just started: the same optimiser."""
        whole = {name: np.zeros_like(own) for name, own in _all(self).items()}
        try:
            if body["optimiser"] != str(self.state.optimiser):
                raise RecordError(f"this state is of {body['optimiser']}, and the terms name {self.state.optimiser}")
            named = dict(body["vectors"])
            for name in named:
                found = vectors[name]
                if found.dtype != whole[name].dtype or found.shape != whole[name].shape or _named(found) != named[name]:
                    raise RecordError(f"this is not the optimiser's {name} that the state names")
                whole[name] = np.ascontiguousarray(found)
            axes = {name: tuple(tuple(map(tuple, tensor)) for tensor in body[name]) for name in ("moved", "ema")}
            counts = {name: body[name] for name in (*_COUNTS, "steps")}
        except (KeyError, TypeError, ValueError, AttributeError):
            raise RecordError("this is not an optimiser's state: a field is missing or of another kind") from None
        shape = [tuple(map(len, tensor)) for tensor in self.moved]
        numbers = [*counts.values(), *(n for kind in axes.values() for tensor in kind for v in tensor for n in v)]
        if any([tuple(map(len, t)) for t in kind] != shape for kind in axes.values()) or not all(
            map(is_count, numbers)
        ):
            raise RecordError("this is not an optimiser's state of this layout")
        state = OptimiserState(self.state.optimiser, counts.pop("steps"), whole.pop("momentum"), whole.pop("root"))
        given: dict[str, Any] = {**axes, **counts, **whole}
        return replace(self, state=state, **given)


def optimiser_vectors(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The vectors among the arrays of a message."""
    return {name.removeprefix(OPTIMISER): array for name, array in arrays.items() if name.startswith(OPTIMISER)}


def write_vectors(path: Path, vectors: Mapping[str, NDArray[Any]]) -> None:
    with replacing(path) as file:
        given: dict[str, Any] = dict(vectors)
        np.savez(file, **given)


def read_vectors(path: Path) -> dict[str, NDArray[Any]]:
    """None of them if there is no file: the state that names them is refused then."""
    if not path.is_file():  # a pipe would be waited for
        return {}
    try:
        with path.open("rb") as file, np.load(file) as found:
            return {name: found[name] for name in VECTORS if name in found}
    except DAMAGED as error:
        raise RecordError(f"{str(path)!r} is damaged ({type(error).__name__})") from None


def _all(applied: Applied) -> dict[str, NDArray[Any]]:
    own = {f.name: getattr(applied, f.name) for f in fields(applied) if f.name in VECTORS}
    return {"momentum": applied.state.momentum, "root": applied.state.root} | own


def _named(vector: NDArray[Any]) -> str:
    return digest(
        "optimiser",
        np.ascontiguousarray(vector).astype("<i8" if vector.dtype == np.int64 else "<u8", copy=False).data.cast("B"),
    ).hex()


def _is_loud(squares: Sequence[int], c: int) -> bool:
    """Of ‖shown‖² and ‖step‖², and another one: ‖shown‖ > c·‖step‖."""
    return squares[0] * ONE**2 > c**2 * squares[1]


def _both(function: Any, x: tuple[Axes, ...], y: tuple[Axes, ...]) -> tuple[Axes, ...]:
    pairs = zip(x, y, strict=True)
    return tuple(tuple(tuple(map(function, a, b)) for a, b in zip(one, two, strict=True)) for one, two in pairs)


def _times(x: NDArray[np.int64], ratio: int) -> NDArray[np.int64]:
    """x·ratio/2^32 towards 0."""
    if not ratio:
        return np.zeros_like(x)
    size, factor = np.abs(x).astype(np.uint64), np.uint64(ratio)
    low = (size & np.uint64(ONE - 1)) * factor >> np.uint64(32)
    return np.sign(x) * ((size >> np.uint64(32)) * factor + low).astype(np.int64)


def _coordinates(carrying: Any, place: slice, end: int) -> slice:
    """A place in the vector as coordinates."""
    place = slice(min(place.start, end), min(place.stop, end))
    if isinstance(carrying, slice):
        return place
    return slice(*(int(i) for i in np.searchsorted(carrying, (place.start, place.stop))))
