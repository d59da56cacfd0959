"""Alignment: a suspect's channels put back where the anchor has them (docs/alignment.md).

The channels of a layer can be permuted, with everything that reads them, and the model computes the same: so can the
heads of an attention layer, the channels within a head, the neurons of a block. `Groups` says which places move
together; it is found once from the model's graph (`quorumark.align.trace`), and a verifier needs it, not the model's
code. `align` then matches the suspect to the anchor, group by group, until nothing changes.

It is matched to the anchor only. The released model contains the key: a match to it picks, among the permutations of an
innocent model, one that correlates with the key, and the null does not hold any more (up to z = 9 was seen).

The procedure is one, fixed and in whole numbers, so that every machine finds the same assignment: balanced weights
(the scales of rows and columns are taken out, as in the canonical form) are rounded to 8 bits; the similarity of two
channels is the inner product of all their weights, summed exactly; the assignment of the largest total is found by
shortest augmenting paths on 64-bit integers in a fixed order, ties included. A suspect with fewer channels leaves
places of the anchor empty (zeros), one with more has some that nobody takes.

Where many of the similarities are below 0, signs were changed: of a norm's gain and what it reads or is read by, or of
what a gated neuron computes and what reads it. These are put back, too.

Channels that can be mixed with each other (`Mixing`: values and outputs of a head, queries and keys) are compared by
what mixing leaves of them, and put back at the end (`quorumark.align.mixing`). A residual stream that may be turned as
a whole (`Stream`) is turned back before anything else is matched (`quorumark.align.stream`).

Not undone: a suspect that was made wider can hold decoys (docs/alignment.md, "Limits").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from quorumark.align import mixing, stream
from quorumark.align.stream import Agreement, Cut, Likeness, Turn, in_blocks, read
from quorumark.canonical import canonical, digest, parse, read_json
from quorumark.checks import is_count, require, take
from quorumark.errors import InconclusiveError, LayoutError, RecordError
from quorumark.model import kernels, statistic
from quorumark.model.layout import ModelLayout, TensorSpec
from quorumark.model.statistic import BLOCK, Model

__all__ = ["PROCEDURE", "AlignedModel", "Alignment", "Group", "Groups", "Mixing", "Slot", "Stream", "align", "assign"]

PROCEDURE = "anchor-assignment/v1"
MIXING_PROCEDURE = "anchor-assignment/v2"  # of groups with mixings; those without any are aligned as before
STREAM_PROCEDURE = "anchor-assignment/v3"  # of groups with a stream, with or without mixings
PROCEDURES = (PROCEDURE, MIXING_PROCEDURE, STREAM_PROCEDURE)
_SWEEPS = 20  # a suspect that is the model in disguise needs 2 or 3
_GROWTH = 8  # a suspect with more than so many times the channels is not matched: the work grows with them
_FEATURES = 1024  # 127²·1024 < 2^24: a product of so many 8-bit numbers is exact in float32, in any order
_EVEN = 6  # octaves above the middle at which weights are cut while mixtures are looked at
_FAR = 3  # octaves by which a column's size must be wrong to be put right before
_OTHER_SIGNS = 16  # signs count as changed where they make more than one part in so many of the squared distance
_NO_SIGNS, _GAINS, _ALL_SIGNS = range(3)  # which other signs are thought of
_PLAIN = 1.5  # deviations of noise that similarities must have on average: otherwise signs are not known
_CERTAIN = 3.0  # deviations that a single row must have to count among those
_SHIFT = 8  # balanced weights have 12 fractional bits and a deviation of about 2: 8 bits keep four deviations

Places = NDArray[np.int64]
Signs = NDArray[np.int8]
Axis = tuple[str, int]


# --- groups -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Slot:
    """Where a group's elements lie on an axis of a tensor.

    Element i has the places offset + i·stride + j·step for j < count.
    A layer's rows are (offset 0, stride 1, count 1); a flattened image of 16 places gives each channel 16 columns
    (stride 16, count 16, step 1).
    """

    tensor: str
    axis: int
    offset: int
    stride: int
    count: int
    step: int

    def places(self, size: int) -> Places:
        """size × count places."""
        return self.offset + np.arange(size)[:, None] * self.stride + np.arange(self.count) * self.step


@dataclass(frozen=True)
class Group:
    """`size` elements that may be permuted; `within` names a group and the element of it that these are parts of."""

    size: int
    slots: tuple[Slot, ...]
    within: tuple[int, int] | None = None

    def axes(self) -> dict[Axis, Places]:
        """The places of every element on each axis: size × as many as each element has there."""
        found: dict[Axis, list[Places]] = {}
        for slot in self.slots:
            found.setdefault((slot.tensor, slot.axis), []).append(slot.places(self.size))
        return {axis: np.concatenate(parts, axis=1) for axis, parts in found.items()}

    def segments(self, axis: Axis) -> list[tuple[int, int, int]] | None:
        """Runs in which all elements follow each other on an axis: (start, first column in `axes`, places of each).

        None if the elements interlace in another way; then the axis cannot get longer or shorter.
        """
        column = 0
        found: list[tuple[int, int, int]] = []
        for slot in self.slots:
            if (slot.tensor, slot.axis) != axis:
                continue
            if slot.stride == slot.count and (slot.step == 1 or slot.count == 1):  # one element after the other
                found.append((slot.offset, column, slot.count))
            elif slot.stride == 1 and slot.step >= self.size:  # all first places, then all second ones
                found += [(slot.offset + j * slot.step, column + j, 1) for j in range(slot.count)]
            else:
                return None
            column += slot.count
        return sorted(found)


@dataclass(frozen=True)
class Mixing:
    """`size` channels that may be mixed: by A at the places of `slots`, by A⁻ᵀ at those of `against`.

    Slots with one place for each element: A is any invertible matrix. With two places: each element is a pair of
    channels, and A turns each pair by an angle of its own, which is the same at all slots.
    """

    size: int
    slots: tuple[Slot, ...]
    against: tuple[Slot, ...] = ()

    @property
    def turns(self) -> bool:
        """Whether pairs are turned."""
        return self.slots[0].count == 2

    def blocks(self) -> Iterator[tuple[Axis, Places]]:
        """For each side and axis, copies × places: in the order of channels, both of a pair one after the other."""
        for side in (self.slots, self.against):
            found: dict[Axis, list[Places]] = {}
            for slot in side:
                found.setdefault((slot.tensor, slot.axis), []).append(slot.places(self.size).reshape(-1))
            for axis, copies in found.items():
                yield axis, np.stack(copies)


@dataclass(frozen=True)
class Stream:
    """A residual stream of `size` channels that may be turned by one orthogonal matrix, once gains are folded.

    `writers` are the tensors that write to it (embeddings, the last layers of blocks, their biases), each with the axis
    that is the stream; `norms` has for each RMSNorm the tensor of its gains, and what reads the stream through it.
    """

    size: int
    writers: tuple[Axis, ...]
    norms: tuple[tuple[str, tuple[Axis, ...]], ...]

    def axes(self) -> dict[str, tuple[int, str | None]]:
        """For each tensor, the axis that is the stream, and the gains of the norm that it reads, if it reads one."""
        found: dict[str, tuple[int, str | None]] = {tensor: (axis, None) for tensor, axis in self.writers}
        return found | {tensor: (axis, gain) for gain, readers in self.norms for tensor, axis in readers}

    def gains(self) -> list[str]:
        return [gain for gain, _ in self.norms]

    def check(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Whether it is a stream of a layout with these shapes."""
        axes = [*self.writers, *(axis for _, readers in self.norms for axis in readers)]
        for tensor, axis in [*axes, *((gain, 0) for gain in self.gains())]:
            shape = shapes.get(tensor)
            if shape is None or axis >= len(shape):
                raise LayoutError(f"the stream names {tensor!r}, axis {axis}, which the layout has not")
            if shape[axis] != self.size:
                raise LayoutError(f"the stream has {self.size} channels, tensor {tensor!r} {shape[axis]}")
        if any(len(shapes[gain]) != 1 for gain in self.gains()):
            raise LayoutError("the gains of a stream's norms must have one dimension")
        names = [*self.gains(), *(tensor for tensor, _ in axes)]
        if len(set(names)) != len(names):
            raise LayoutError("a stream has the same tensor twice")

    def as_dict(self) -> dict[str, Any]:
        return {
            "size": self.size,
            "writers": [list(axis) for axis in self.writers],
            "norms": [{"gain": gain, "readers": [list(axis) for axis in readers]} for gain, readers in self.norms],
        }

    @classmethod
    def read(cls, entry: Any) -> Self:
        what = "a stream"
        taken = take(entry, ["size", "writers", "norms"], what)
        norms = [take(norm, ["gain", "readers"], "a norm of a stream") for norm in _listed(taken["norms"], what)]
        writers, readers = _axes(taken["writers"]), [_axes(norm["readers"]) for norm in norms]
        gains = [norm["gain"] for norm in norms]
        return cls(taken["size"], writers, tuple(zip(gains, readers, strict=True)))

    def __post_init__(self) -> None:
        what = "a stream"
        require(is_count(self.size, 2) and self.size < 1 << 16, what, "must have two channels or more")
        require(bool(self.writers) and bool(self.norms), what, "must have writers and norms")
        require(all(isinstance(gain, str) for gain in self.gains()), what, "must name its norms' gains")
        for tensor, axis in [*self.writers, *(axis for _, readers in self.norms for axis in readers)]:
            require(isinstance(tensor, str) and is_count(axis) and axis < 1 << 8, what, "has an axis that is none")


def _axes(value: Any) -> tuple[Axis, ...]:
    listed = _listed(value, "the axes of a stream")
    require(all(isinstance(axis, list) and len(axis) == 2 for axis in listed), "a stream", "has the wrong shape")
    return tuple((tensor, axis) for tensor, axis in listed)


@dataclass(frozen=True)
class Groups:
    """All coupled groups of a model; a group comes before the groups within it. And what may be mixed or turned.

    Without a stream and without mixings it is written as before there were any, and has the same digest.
    """

    FORMAT: ClassVar[str] = "quorumark-groups/v1"
    MIXED_FORMAT: ClassVar[str] = "quorumark-groups/v2"
    STREAM_FORMAT: ClassVar[str] = "quorumark-groups/v3"

    groups: tuple[Group, ...]
    mixings: tuple[Mixing, ...] = ()
    stream: Stream | None = None

    def __post_init__(self) -> None:
        for number, mixed in enumerate(self.mixings):
            what = f"mixing {number}"
            require(is_count(mixed.size, 1) and mixed.size < 1 << 16 and bool(mixed.slots), what, "must have channels")
            counts = {slot.count for slot in (*mixed.slots, *mixed.against)}
            require(counts <= {1} or counts <= {2}, what, "must have one place for each channel, or pairs of them")
            for slot in (*mixed.slots, *mixed.against):
                require(_is_slot(slot), what, "has a slot that is none")
        for number, group in enumerate(self.groups):
            what = f"group {number}"
            require(is_count(group.size, 2) and group.size < 1 << 31, what, "must have two elements or more")
            require(bool(group.slots), what, "must have a slot")
            for slot in group.slots:
                require(_is_slot(slot), what, "has a slot that is none")
            if group.within is not None:
                sound = isinstance(group.within, tuple) and len(group.within) == 2 and all(map(is_count, group.within))
                sound = sound and group.within[0] < number and group.within[1] < self.groups[group.within[0]].size
                sound = sound and self.groups[group.within[0]].within is None
                require(sound, what, "must lie within an element of an earlier group that lies within none")

    def check(self, layout: ModelLayout) -> None:
        """Whether the groups are a model's of this layout: every place is there, and in one group of each level."""
        shapes = {spec.name: spec.shape for spec in layout.tensors}
        taken: set[tuple[str, int, int, bool]] = set()
        for group in self.groups:
            own: set[tuple[str, int, int, bool]] = set()
            for slot in group.slots:
                _check_slot(slot, group.size, shapes)
                for place in slot.places(group.size).reshape(-1).tolist():
                    own.add((slot.tensor, slot.axis, place, group.within is None))
            if len(own) != sum(group.size * slot.count for slot in group.slots):
                raise LayoutError("a group has the same place twice")
            if group.within is None and own & taken:
                raise LayoutError("two groups have the same place")
            taken |= own
        for mixed in self.mixings:
            for slot in (*mixed.slots, *mixed.against):
                _check_slot(slot, mixed.size, shapes)
        blocks = self.blocks()
        if self.stream is not None:
            self.stream.check(shapes)
            if any((tensor, axis) in blocks for tensor, (axis, _) in self.stream.axes().items()):
                raise LayoutError("a mixing has channels of the stream")
        for axis, of_axis in blocks.items():
            every = np.concatenate([places.reshape(-1) for _, places in of_axis])
            if np.unique(every).size != every.size:
                raise LayoutError("two mixings have the same place")
            for elements in (at for group in self.groups for name, at in group.axes().items() if name == axis):
                if not all(_nested(places, elements) for _, copies in of_axis for places in copies):
                    raise LayoutError("a mixing goes across the elements of a group")

    def blocks(self) -> dict[Axis, list[tuple[bool, Places]]]:
        """The blocks of every axis that mixings touch: whether pairs turn, and copies × places."""
        found: dict[Axis, list[tuple[bool, Places]]] = {}
        for mixed in self.mixings:
            for axis, places in mixed.blocks():
                found.setdefault(axis, []).append((mixed.turns, places))
        return found

    def words(self) -> dict[str, int]:
        """The matrices of the stream whose other axis nothing moves (embeddings, output weights), with that axis."""
        moved = {(slot.tensor, slot.axis) for group in self.groups for slot in group.slots} | self.blocks().keys()
        axes = {} if self.stream is None else self.stream.axes()
        return {name: 1 - axis for name, (axis, _) in axes.items() if axis < 2 and (name, 1 - axis) not in moved}

    def resizable(self) -> dict[str, set[int]]:
        """The axes along which a suspect may have more or fewer channels, or words."""
        axes: dict[str, set[int]] = {}
        for group in self.groups:
            for slot in group.slots:
                axes.setdefault(slot.tensor, set()).add(slot.axis)
        for name, axis in self.words().items():
            axes.setdefault(name, set()).add(axis)
        return axes

    def places(self, shapes: Mapping[str, Sequence[int]], orders: Sequence[NDArray[Any]]) -> dict[Axis, Places]:
        """What a permutation of every group does: for each axis, which old place comes where.

        orders[g][i] is the element of group g that comes to i; an outer group moves first, with all that is within.
        """
        found: dict[Axis, Places] = {}
        for group, order in zip(self.groups, orders, strict=True):
            for (tensor, axis), index in group.axes().items():
                if tensor in shapes:
                    now = found.setdefault((tensor, axis), np.arange(shapes[tensor][axis]))
                    now[index] = now[index[order]]
        return found

    def to_bytes(self) -> bytes:
        """Canonical JSON; `from_bytes` reads it back."""
        body = [
            {
                "size": g.size,
                "slots": [[s.tensor, s.axis, s.offset, s.stride, s.count, s.step] for s in g.slots],
                "within": None if g.within is None else list(g.within),
            }
            for g in self.groups
        ]
        if not self.mixings and self.stream is None:
            return canonical({"format": self.FORMAT, "groups": body})
        mixed = [
            {
                "size": m.size,
                "slots": [[s.tensor, s.axis, s.offset, s.stride, s.count, s.step] for s in m.slots],
                "against": [[s.tensor, s.axis, s.offset, s.stride, s.count, s.step] for s in m.against],
            }
            for m in self.mixings
        ]
        if self.stream is None:
            return canonical({"format": self.MIXED_FORMAT, "groups": body, "mixings": mixed})
        told = {"format": self.STREAM_FORMAT, "groups": body, "mixings": mixed, "stream": self.stream.as_dict()}
        return canonical(told)

    def digest(self) -> str:
        return digest("groups", self.to_bytes()).hex()

    @property
    def procedure(self) -> str:
        """How a suspect is aligned with these groups."""
        if self.stream is not None:
            return STREAM_PROCEDURE
        return MIXING_PROCEDURE if self.mixings else PROCEDURE

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        what = "a model's groups"
        more = {cls.MIXED_FORMAT: ["mixings"], cls.STREAM_FORMAT: ["mixings", "stream"]}
        kind = _format(data, what)
        kind = kind if kind is not None and kind in more else cls.FORMAT
        fields = take(parse(data, kind, what), ["groups", *more.get(kind, [])], what)
        listed = fields["groups"]
        require(isinstance(listed, list), what, "must be a list")
        mixings = [_read_mixing(entry) for entry in _listed(fields.get("mixings", []), "a model's mixings")]
        require(bool(mixings) or kind != cls.MIXED_FORMAT, what, "must have mixings in format v2")
        turning = Stream.read(fields["stream"]) if kind == cls.STREAM_FORMAT else None
        groups = []
        for entry in listed:
            taken = take(entry, ["size", "slots", "within"], "a group")
            slots, within = taken["slots"], taken["within"]
            sound = isinstance(slots, list) and all(isinstance(s, list) and len(s) == 6 for s in slots)
            require(sound and (within is None or isinstance(within, list)), "a group", "has the wrong shape")
            groups.append(
                Group(taken["size"], tuple(Slot(*s) for s in slots), None if within is None else tuple(within))
            )
        return cls(tuple(groups), tuple(mixings), turning)


def _format(data: bytes, what: str) -> str | None:
    body = read_json(data, what)
    found = body.get("format") if isinstance(body, dict) else None
    return found if isinstance(found, str) else None


def _listed(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise RecordError(f"{what} must be a list")
    return value


def _read_mixing(entry: Any) -> Mixing:
    taken = take(entry, ["size", "slots", "against"], "a mixing")
    sides = [_listed(taken[name], "the slots of a mixing") for name in ("slots", "against")]
    sound = all(isinstance(slot, list) and len(slot) == 6 for side in sides for slot in side)
    require(sound, "a mixing", "has the wrong shape")
    slots, against = (tuple(Slot(*slot) for slot in side) for side in sides)
    return Mixing(taken["size"], slots, against)


def _is_slot(slot: Slot) -> bool:
    numbers = (slot.axis, slot.offset, slot.stride, slot.count, slot.step)
    sound = isinstance(slot.tensor, str) and all(is_count(n) and n < 1 << 31 for n in numbers)
    return sound and slot.count > 0 and slot.stride > 0 and slot.step > 0


def _check_slot(slot: Slot, size: int, shapes: Mapping[str, Sequence[int]]) -> None:
    """Whether the places of a slot are there."""
    shape = shapes.get(slot.tensor)
    if shape is None or slot.axis >= len(shape):
        raise LayoutError(f"the groups name {slot.tensor!r}, axis {slot.axis}, which the layout has not")
    last = slot.offset + (size - 1) * slot.stride + (slot.count - 1) * slot.step
    if last >= shape[slot.axis] or size * slot.count > shape[slot.axis]:
        raise LayoutError(f"the groups go beyond tensor {slot.tensor!r} of shape {shape}")


def _nested(block: Places, elements: Places) -> bool:
    """Whether a block lies in one element of a group, or has a place of all of them, or nothing to do with them."""
    inside = np.isin(elements, block)
    every = bool((inside == inside[0]).all()) and int(inside.sum()) == block.size
    return not inside.any() or every or int(inside.sum(axis=1).max()) == block.size


# --- the assignment ---------------------------------------------------------------------------------------


def assign(value: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows to different columns so that Σ value[i, column i] is largest: the columns, −1 for rows that get none.

    Whole numbers below 2^50, so that nothing is rounded; among equal totals the result is still always the same, since
    the steps are. O(n²·m) for n rows and m columns at worst.
    """
    rows, columns = value.shape
    if rows <= columns:
        found = np.empty(rows, np.int64)
        kernels.assign(np.ascontiguousarray(-value), found)
        return found
    mirrored = np.empty(columns, np.int64)
    kernels.assign(np.ascontiguousarray(-value.T), mirrored)
    found = np.full(rows, -1, np.int64)
    found[mirrored] = np.arange(columns)
    return found


def _taken(value: NDArray[np.int64], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """What an assignment takes, for each row that gets a column."""
    rows = np.flatnonzero(order >= 0)
    found: NDArray[np.int64] = value[rows, order[rows]]
    return found


def _most(value: NDArray[np.int64]) -> int:
    """What no assignment can take more of: each row's or column's largest."""
    return int(value.max(axis=int(value.shape[0] <= value.shape[1])).sum())


def _inner(one: NDArray[np.int8], two: NDArray[np.int8]) -> NDArray[np.int64]:
    """⟨row i of one, row j of two⟩, exactly."""
    total = np.zeros((one.shape[0], two.shape[0]), np.int64)
    for begin in range(0, one.shape[1], _FEATURES):
        part = slice(begin, begin + _FEATURES)
        total += (one[:, part].astype(np.float32) @ two[:, part].astype(np.float32).T).astype(np.int64)
    return total


def _products(rows: NDArray[np.int8]) -> NDArray[np.int64]:
    """⟨row i, row j⟩, exactly, then in so few bits that products of two of them add up."""
    total = _inner(rows, rows)
    return total >> max(0, int(np.abs(total).max()).bit_length() - 18)


def _common(one: str, two: str, *, behind: bool = True) -> int:
    """How many characters the names of two tensors begin (and end) with alike, but for the last part ("weight")."""
    first, second = (name.rpartition(".")[0] for name in (one, two))
    pairs = [(first, second), (first[::-1], second[::-1])][: 1 + behind]
    return sum(sum(takewhile(bool, (a == b for a, b in zip(*pair, strict=False)))) for pair in pairs)


def _closer(energy: int, before: int, after: int) -> bool:
    """Whether a similarity that rises from one number to another takes a sixteenth of the squared distance away.

    ‖a − s‖²/2 = (‖a‖² + ‖s‖²)/2 − ⟨a, s⟩, and the energy is the first of these. A row of the other sign is twice its
    size away from the anchor's: few of them outweigh all that training did.
    """
    return _OTHER_SIGNS * (after - before) > energy - before


# --- the result -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Alignment:
    """How a suspect was aligned.

    Attributes:
        groups: the digest of the groups.
        sizes: for each group, its elements in the anchor, in the suspect, and how many of them were matched.
        moved: for each group, how many matched elements did not lie where the anchor has them.
        sweeps: how often all groups were gone through; `stable` says whether the last one changed nothing.
        places: for each axis, which of the suspect's places comes where; −1 for none.
        unmixed: tensors with channels that were mixed, as float32, with these put back.
        blocks: how many blocks of channels were put back so.
        turn: how the residual stream was turned, if it was; it is turned back before anything else.
        words: how many words matrices of the stream have, on which axis: a suspect's others are cut off.
        widest: how many channels a word of the suspect may have.
        signs: for axes on which the suspect has weights of the other sign, ±1 for each place.
    """

    procedure: str
    groups: str
    sizes: tuple[tuple[int, int, int], ...]
    moved: tuple[int, ...]
    sweeps: int
    stable: bool
    places: Mapping[Axis, Places]
    unmixed: Mapping[str, NDArray[np.float32]] = dataclasses.field(default_factory=dict)
    blocks: int = 0
    turn: Turn | None = None
    words: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    widest: int = 0
    signs: Mapping[Axis, Signs] = dataclasses.field(default_factory=dict)

    @property
    def surplus(self) -> int:
        """How many of the suspect's elements nobody took. If there are any, a small z does not clear the suspect."""
        turned = 0 if self.turn is None else self.turn.surplus
        return turned + sum(theirs - matched for _, theirs, matched in self.sizes)

    def digest(self) -> str:
        """Of every place, of tensors with channels put back from mixtures, of changed signs and of a turned stream."""
        parts = [
            canonical([tensor, axis]) + self.places[tensor, axis].astype("<i8").tobytes()
            for tensor, axis in sorted(self.places)
        ]
        parts += [canonical([name]) + self.unmixed[name].astype("<f4").tobytes() for name in sorted(self.unmixed)]
        parts += [canonical(["signs", *axis]) + self.signs[axis].tobytes() for axis in sorted(self.signs)]
        parts += [] if self.turn is None else [canonical(["stream"]) + self.turn.to_bytes()]
        return digest("alignment", *parts).hex()

    def as_dict(self) -> dict[str, Any]:
        """What a certificate says about it."""
        more: dict[str, Any] = {} if self.procedure == PROCEDURE else {"blocks": self.blocks}
        if self.procedure == STREAM_PROCEDURE:
            more["turned"] = None if self.turn is None else len(self.turn.matrix)
        return {
            "procedure": self.procedure,
            "groups": self.groups,
            "sizes": [list(sizes) for sizes in self.sizes],
            "moved": list(self.moved),
            "surplus": self.surplus,
            "sweeps": self.sweeps,
            "stable": self.stable,
            "places": self.digest(),
            **more,
        }

    def model(self, suspect: Model, names: Mapping[str, str] | None = None) -> AlignedModel:
        """The suspect as the anchor has it, under the layout's names."""
        return AlignedModel(suspect, self, names)


class AlignedModel:
    """A suspect that is read in the anchor's order: what `canonical_form` takes, under the layout's names."""

    def __init__(self, suspect: Model, alignment: Alignment, names: Mapping[str, str] | None = None) -> None:
        self._alignment, self._names = alignment, names
        self._suspect: Model = Cut(suspect, alignment.words, names, alignment.widest) if alignment.words else suspect
        if alignment.turn is not None:
            self._suspect, self._names = alignment.turn.model(self._suspect, names), None

    def tensor(self, name: str) -> NDArray[Any]:
        """A tensor whole, with zeros where the suspect has nothing."""
        if name in self._alignment.unmixed:
            return self._alignment.unmixed[name]
        values = read(self._suspect, name if self._names is None else self._names[name])
        for axis in range(values.ndim):
            places = self._alignment.places.get((name, axis))
            if places is not None:
                values = _gathered(values, axis, places)
        return _signed(values, name, self._alignment.signs)

    def blocks(self, name: str, limit: int = BLOCK) -> Iterator[tuple[int, NDArray[Any]]]:
        """Some rows of a tensor at a time."""
        return in_blocks(self.tensor(name), limit)


def _gathered(values: NDArray[Any], axis: int, places: Places) -> NDArray[Any]:
    """Places along an axis in a new order, zeros for −1."""
    taken = np.take(values, np.maximum(places, 0), axis=axis)
    if (places < 0).any():
        shape = [1] * values.ndim
        shape[axis] = places.size
        taken = np.where((places >= 0).reshape(shape), taken, taken.dtype.type(0))
    return taken


def _signed(values: NDArray[Any], name: str, signs: Mapping[Axis, Signs]) -> NDArray[Any]:
    """A tensor in the anchor's order with the anchor's signs."""
    for axis in range(values.ndim):
        if (name, axis) in signs:
            shape = [1] * values.ndim
            shape[axis] = -1
            values = values * signs[name, axis].reshape(shape).astype(values.dtype)
    return values


# --- matching ---------------------------------------------------------------------------------------------


def align(
    suspect: Model,
    anchor: Model,
    layout: ModelLayout,
    groups: Groups,
    names: Mapping[str, str] | None = None,
    *,
    progress: Callable[[str], None] | None = None,
) -> Alignment:
    """Matches a suspect's channels to the anchor's.

    `names` maps tensors of the layout to the suspect's names for them: those that are not named are not there. All
    tensors of two dimensions or more are looked at, embeddings included. A suspect whose sizes do not fit any number
    of channels is an InconclusiveError.
    """
    groups.check(layout)
    specs = {s.name: s for s in layout.tensors if s.role in ("carrier", "plain") and len(s.shape) >= 2 and s.size}
    if names is not None:
        specs = {name: spec for name, spec in specs.items() if name in names}
    shapes = {spec.name: spec.shape for spec in layout.tensors}
    turn, words, widest = None, {}, 0
    if groups.stream is not None:
        widest = _GROWTH * groups.stream.size
        words = {n: (axis, shapes[n][axis]) for n, axis in groups.words().items() if n in specs}
        suspect = Cut(suspect, words, names, widest)
        turn = _turn(suspect, anchor, groups, groups.stream, shapes, specs, names, progress)
    if turn is not None:
        suspect, names = turn.model(suspect, names), None
    mixed = {axis[0] for axis in groups.blocks()} & specs.keys()
    used = sorted(({slot.tensor for group in groups.groups for slot in group.slots} | mixed) & specs.keys())
    if not used:
        raise InconclusiveError("none of the tensors that could be aligned is in the suspect")
    ours, theirs = _compared(suspect, anchor, {name: specs[name] for name in used}, names, progress)
    found = _Matching(groups, shapes, ours, theirs, progress, _gains(suspect, anchor, groups, shapes, names)).run()
    matched = found.model(suspect, names)
    blocks = groups.blocks()
    unmixed, count = {}, 0
    for name in sorted(mixed):
        if progress is not None:
            progress(name)
        of_tensor = {axis: listed for (tensor, axis), listed in blocks.items() if tensor == name}
        values, put_back = _unmixed(matched.tensor(name), read(anchor, name), of_tensor)
        if put_back:
            unmixed[name] = values
            count += put_back
    return dataclasses.replace(found, unmixed=unmixed, blocks=count, turn=turn, words=words, widest=widest)


def _compared(
    suspect: Model,
    anchor: Model,
    specs: Mapping[str, TensorSpec],
    names: Mapping[str, str] | None,
    progress: Callable[[str], None] | None,
) -> tuple[dict[str, NDArray[np.int8]], dict[str, NDArray[np.int8]]]:
    """What is compared of some tensors: the anchor's and the suspect's."""
    ours, theirs = {}, {}
    for name, spec in specs.items():
        if progress is not None:
            progress(f"aligning: {name}")
        ours[name] = _features(anchor, name, spec)
        theirs[name] = _features(suspect, name if names is None else names[name], None)
        if theirs[name].ndim != ours[name].ndim:
            raise InconclusiveError(f"tensor {name!r} of the suspect has another kind of shape than the anchor's")
    return ours, theirs


def _gains(
    suspect: Model,
    anchor: Model,
    groups: Groups,
    shapes: Mapping[str, tuple[int, ...]],
    names: Mapping[str, str] | None,
) -> dict[str, tuple[NDArray[np.bool_], NDArray[np.bool_]]]:
    """Where gains of norms are below 0, the anchor's and the suspect's: vectors named weight, in the anchor never 0."""
    found = {}
    for name in sorted({slot.tensor for group in groups.groups for slot in group.slots}):
        if len(shapes[name]) == 1 and name.split(".")[-1] == "weight" and (names is None or name in names):
            ours, theirs = read(anchor, name), read(suspect, name if names is None else names[name])
            if ours.shape == shapes[name] and theirs.ndim == 1 and (ours != 0).all():
                found[name] = (ours < 0, theirs < 0)
    return found


# --- the stream -------------------------------------------------------------------------------------------


def _turn(
    suspect: Model,
    anchor: Model,
    groups: Groups,
    flow: Stream,
    shapes: Mapping[str, tuple[int, ...]],
    specs: Mapping[str, TensorSpec],
    names: Mapping[str, str] | None,
    progress: Callable[[str], None] | None,
) -> Turn | None:
    """How the suspect's stream was turned; None if it was not.

    First by what nothing else can move (words); then the channels of all that cannot be mixed (neurons) are put in
    order, and the matrix is fitted to these as well.
    """
    axes = {name: at for name, at in flow.axes().items() if name in specs}
    kept, clear, rigid = _in_order_but_for(groups, axes)
    gains = {name: mixing.finite(read(anchor, name)) for name in flow.gains()}

    def pairs(
        tensors: Sequence[str], places: Mapping[Axis, Places], signs: Mapping[Axis, Signs]
    ) -> Iterator[tuple[mixing.Rows, mixing.Rows] | None]:
        """The vectors of some tensors, their other axes in the anchor's order; None if their sizes do not fit."""
        width = None
        for name in tensors:
            if progress is not None:
                progress(f"the stream: {name}")
            axis, gain = axes[name]
            values, ours = read(suspect, name if names is None else names[name]), read(anchor, name)
            for other in range(ours.ndim):
                if (name, other) in places:
                    values = _gathered(values, other, places[name, other])
            values = _signed(values, name, signs)
            size = values.shape[axis] if values.ndim == ours.ndim else 0
            width = width or size
            fits = values.shape == (*ours.shape[:axis], width, *ours.shape[axis + 1 :])
            if not fits or not 2 <= size <= _GROWTH * flow.size:
                yield None
                return
            theirs = stream.vectors(values, axis, stream.gain_of(suspect, gain, names, size))
            yield theirs, stream.vectors(ours, axis, None if gain is None else gains[gain])

    def fitted(*of: Any) -> Agreement | None:
        """C of these vectors."""
        found = None
        for pair in pairs(*of):
            if pair is None:
                return None
            found = found or Agreement(pair[0].shape[1], flow.size)
            found.add(*pair)
        return found

    used_for: tuple[list[str], Mapping[Axis, Places], Mapping[Axis, Signs]] = (rigid, {}, {})
    agreement = fitted(*used_for)
    if agreement is None or not agreement.count:
        return None
    turn = Turn(stream.polar(agreement.matrix), flow.axes(), gains)
    if kept.groups:
        used = sorted({slot.tensor for group in kept.groups for slot in group.slots} & specs.keys())
        back = turn.model(suspect, names)
        ours, theirs = _compared(back, anchor, {name: specs[name] for name in used}, None, progress)
        matched = _Matching(kept, shapes, ours, theirs, progress).run()
        used_for = (clear, matched.places, matched.signs)
        agreement = fitted(*used_for)
        if agreement is None:
            return None
        turn = dataclasses.replace(turn, matrix=stream.polar(agreement.matrix))
    moved = stream.permutation(assign(turn.matrix.astype(np.int64)), flow.size)
    if agreement.is_turned(turn.matrix, moved):
        return turn
    likeness = Likeness(turn.matrix, moved)
    for pair in pairs(*used_for):
        if pair is not None:
            likeness.add(*pair)
    if likeness.is_turned():
        return turn
    # gains of the other sign, with all that reads them, are folded in the same way, though nothing was turned
    signs = [(stream.gain_of(suspect, name, names, len(moved)), ours) for name, ours in gains.items()]
    if any(theirs is not None and (np.sign(theirs) @ moved * ours < 0).any() for theirs, ours in signs):
        return dataclasses.replace(turn, matrix=moved)
    return None


def _in_order_but_for(
    groups: Groups, axes: Mapping[str, tuple[int, str | None]]
) -> tuple[Groups, list[str], list[str]]:
    """Groups that move only what nothing mixes; tensors of the stream that these alone move; those that none does."""
    mixed = {tensor for tensor, _ in groups.blocks()}
    numbers: dict[int, int] = {}  # of the groups that are kept, in the old count: the new one
    kept: list[Group] = []
    moving: dict[Axis, set[int]] = {}
    for number, group in enumerate(groups.groups):
        for slot in group.slots:
            moving.setdefault((slot.tensor, slot.axis), set()).add(number)
        apart = all(slot.tensor not in mixed and axes.get(slot.tensor, (-1,))[0] != slot.axis for slot in group.slots)
        if apart and (group.within is None or group.within[0] in numbers):
            within = None if group.within is None else (numbers[group.within[0]], group.within[1])
            numbers[number] = len(kept)
            kept.append(dataclasses.replace(group, within=within))
    clear, rigid = [], []
    for name, (axis, _) in sorted(axes.items()):
        movers = set().union(*(which for (tensor, other), which in moving.items() if tensor == name and other != axis))
        if name not in mixed and movers <= numbers.keys():
            clear.append(name)
            if not movers:
                rigid.append(name)
    return Groups(tuple(kept)), clear, rigid


def _unmixed(
    suspect: NDArray[Any], anchor: NDArray[Any], blocks: Mapping[int, list[tuple[bool, Places]]]
) -> tuple[NDArray[np.float32], int]:
    """A tensor in the anchor's order, the channels of each block put back from their mixtures; and how many blocks."""
    found, reference, count = mixing.finite(suspect), mixing.finite(anchor), 0
    for axis, of_axis in blocks.items():
        shape = np.moveaxis(found, axis, 0).shape
        rows, wanted = (np.moveaxis(x, axis, 0).reshape(shape[0], -1).copy() for x in (found, reference))
        by_size: dict[tuple[bool, tuple[int, ...]], list[Places]] = {}
        for turns, places in of_axis:
            by_size.setdefault((turns, places.shape), []).append(places)
        even, rows = _evened(rows, wanted)
        scales = mixing.column_scales(even, wanted)
        done: list[tuple[Places, NDArray[np.float64]]] = []
        for (turns, _), every in by_size.items():
            index = np.stack(every)
            index = index[rows[index].any(axis=(1, 2, 3))]  # a head that the suspect has not stays empty
            if not len(index):
                continue
            if turns:
                rows[index] = mixing.turned(rows[index], even[index] * scales, wanted[index])
                count += len(index)
            else:
                values, mixed, scales = mixing.unmixed(even[index], wanted[index], scales)
                done.append((index[mixed], values[mixed]))
        if any(len(index) for index, _ in done):
            rows *= scales  # as the blocks that are put back have it
        for index, values in done:
            rows[index] = values
            count += len(index)
        found = np.moveaxis(rows.reshape(shape), 0, axis)
    with np.errstate(over="ignore", under="ignore"):  # what is beyond float32 counts as 0 later
        return np.ascontiguousarray(found, np.float32), count


def _evened(rows: mixing.Rows, wanted: mixing.Rows) -> tuple[mixing.Rows, mixing.Rows]:
    """Rows without columns that are far from the anchor's in size: cut some octaves above the middle, and uncut.

    A weight that is huge because what it reads is always 0, or a column of such weights, would otherwise be all that
    is seen of its row. What is less far off, least squares find better.
    """
    (_, by_row, by_column), (_, _, theirs) = (_sized(x) for x in (rows, wanted))
    octaves = (by_column - theirs + 128) >> 8
    octaves = np.where(np.abs(octaves) >= _FAR, octaves, 0)
    uncut = np.ldexp(rows, (-octaves).astype(np.int32))
    middle = ((by_row[:, None] + by_column + 128) >> 8) - octaves
    most = np.ldexp(1.0, (middle + _EVEN).astype(np.int32))
    return np.clip(uncut, -most, most), uncut


def _sized(values: NDArray[Any]) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.int32]]:
    """A tensor's bits, and the sizes of its rows and columns, in 1/256 octave."""
    bits = statistic.bits_of(values)
    return bits, *statistic.scales_of(lambda: iter([(0, bits)]), values.shape)


def _features(model: Model, name: str, spec: TensorSpec | None) -> NDArray[np.int8]:
    """A tensor's balanced weights in 8 bits."""
    values = np.ascontiguousarray(read(model, name))
    if spec is not None and values.shape != spec.shape:
        raise LayoutError(f"tensor {name!r} of the anchor must have the shape {spec.shape}")
    if values.ndim < 2:
        raise InconclusiveError(f"tensor {name!r} of the suspect has another kind of shape than the anchor's")
    if not values.size:
        raise InconclusiveError(f"tensor {name!r} of the suspect is empty")
    shape = values.shape
    bits, by_row, by_column = _sized(values)
    balanced = np.empty(bits.size, np.int32)
    kernels.balance(bits, by_row, by_column, balanced, kernels.POWERS)
    rounded: NDArray[np.int8] = np.clip((balanced + (1 << (_SHIFT - 1))) >> _SHIFT, -127, 127).astype(np.int8)
    return rounded.reshape(shape)


class _Matching:
    """The state of a matching: which place of the suspect comes where, on every axis that groups touch.

    `shapes` are the anchor's, of every tensor; `ours` and `theirs` are the weights that are compared.
    """

    def __init__(
        self,
        groups: Groups,
        shapes: Mapping[str, tuple[int, ...]],
        ours: Mapping[str, NDArray[np.int8]],
        theirs: Mapping[str, NDArray[np.int8]],
        progress: Callable[[str], None] | None,
        gains: Mapping[str, tuple[NDArray[np.bool_], NDArray[np.bool_]]] | None = None,
    ) -> None:
        self.gains = gains or {}
        self.all, self.ours, self.theirs, self.progress = groups, ours, theirs, progress
        self.shapes = shapes
        self.index = [g.axes() for g in groups.groups]
        self.blocks = groups.blocks()
        self.inner: dict[int, list[list[int]]] = {}
        self.touching: dict[Axis, set[int]] = {}
        for number, group in enumerate(groups.groups):
            if group.within is not None:
                outer, element = group.within
                self.inner.setdefault(outer, [[] for _ in range(groups.groups[outer].size)])[element].append(number)
            for axis in self.index[number]:
                self.touching.setdefault(axis, set()).add(number)
        self.sizes = self._suspect_sizes()
        self.theirs_at = [self._suspect_places(number) for number in range(len(groups.groups))]
        self.in_blocks = {number for number in range(len(groups.groups)) if self._is_in_blocks(number)}
        self.places: dict[Axis, Places] = {}
        self.signs: dict[Axis, Signs] = {}
        self.with_signs = _NO_SIGNS
        self.read_by: dict[Axis, str] = {}  # gains that show the signs of what reads channels
        self.energies: dict[str, int] = {}
        self.doubtful: set[int] = set()  # groups of which more would be like the anchor if signs were others
        self.found: list[NDArray[np.int64]] = []
        self._begin()

    def _compared(self, number: int) -> list[Axis]:
        """The axes of a group whose weights are there to be compared."""
        return [axis for axis in self.index[number] if axis[0] in self.ours]

    def _clear(self, number: int) -> list[Axis]:
        """Those whose tensors are not mixed along another axis, if there are any."""
        axes = self._compared(number)
        return [a for a in axes if not any(n == a[0] and b != a[1] for n, b in self.blocks)] or axes

    def _is_in_blocks(self, number: int) -> bool:
        """Whether a group's elements are channels of blocks, which are compared whatever their order is."""
        axes = self._compared(number)
        return bool(axes) and all(
            any(np.isin(pair, places).all() for _, copies in self.blocks.get(axis, []) for places in copies)
            for axis in axes
            for pair in self.index[number][axis][:2].T
        )  # fmt: skip

    def _blocks_of(self, number: int, axis: Axis) -> list[tuple[bool, Places]]:
        """The blocks that lie in a group's element, as columns of its places: the same for all elements."""
        row = self.index[number][axis][0]
        order = np.argsort(row, kind="stable")
        found = []
        for turns, places in ((t, p) for t, copies in self.blocks.get(axis, []) for p in copies):
            if np.isin(places, row).all():
                found.append((turns, order[np.searchsorted(row[order], places)]))
        return found

    def _outer(self, axis: Axis) -> list[int]:
        return sorted(g for g in self.touching[axis] if self.all.groups[g].within is None)

    # --- sizes ---

    def _suspect_sizes(self) -> list[int]:
        """How many elements of each outer group the suspect has, from the axes that only it makes up."""
        sizes: list[int] = []
        for number, group in enumerate(self.all.groups):
            size = group.size
            for axis in self._compared(number) if group.within is None else ():
                if self._outer(axis) == [number]:
                    index, length = self.index[number][axis], self.ours[axis[0]].shape[axis[1]]
                    size = (self.theirs[axis[0]].shape[axis[1]] - (length - index.size)) // index.shape[1]
                    break
            sizes.append(size)
            if size > _GROWTH * group.size:
                name = self._compared(number)[0][0]
                raise InconclusiveError(
                    f"tensor {name!r} of the suspect has more than {_GROWTH} times as many channels"
                )
        for name, tensor in self.ours.items():
            for a in range(tensor.ndim):
                touched = (name, a) in self.touching
                length = self._length((name, a), sizes) if touched else tensor.shape[a]
                if length != self.theirs[name].shape[a] or (
                    touched and min(sizes[g] for g in self.touching[name, a]) < 1
                ):
                    raise InconclusiveError(f"the suspect's sizes around tensor {name!r} fit no number of channels")
        return sizes

    def _length(self, axis: Axis, sizes: Sequence[int]) -> int:
        """How long an axis of the suspect is."""
        grown = ((sizes[g] - self.all.groups[g].size) * self.index[g][axis].shape[1] for g in self._outer(axis))
        return int(self.shapes[axis[0]][axis[1]] + sum(grown))

    def _suspect_places(self, number: int) -> dict[Axis, Places]:
        """Where the suspect's elements lie: as the anchor's do, after what lies before them has grown or shrunk."""
        found = {}
        for axis, index in self.index[number].items() if self.all.groups[number].within is None else ():
            outer = self._outer(axis)
            if all(self.sizes[g] == self.all.groups[g].size for g in outer):
                found[axis] = index
                continue
            columns: dict[int, Places] = {}
            shift = 0
            segments = sorted(piece for g in outer for piece in self._segments(g, axis))
            for start, g, column, width in segments:
                if g == number:
                    for j in range(width):
                        columns[column + j] = start + shift + j + np.arange(self.sizes[g]) * width
                shift += (self.sizes[g] - self.all.groups[g].size) * width
            found[axis] = np.stack([columns[j] for j in range(index.shape[1])], axis=1)
        return found

    def _segments(self, number: int, axis: Axis) -> list[tuple[int, int, int, int]]:
        """Runs of a group's elements on an axis: (start, group, first column, places of each element)."""
        found = self.all.groups[number].segments(axis)
        if found is None:
            raise InconclusiveError(f"the suspect's tensor {axis[0]!r} has another size, and its channels interlace")
        return [(start, number, column, width) for start, column, width in found]

    def _begin(self) -> None:
        """As if every channel lay where the anchor has it, as far as there are so many."""
        for axis, touching in self.touching.items():
            rigid = np.ones(self.shapes[axis[0]][axis[1]], np.bool_)
            taken = np.zeros(self._length(axis, self.sizes), np.bool_)
            for g in touching:
                rigid[self.index[g][axis]] = False
            # what is in no outer group keeps its order between the parts of those that are
            for g in self._outer(axis):
                taken[self.theirs_at[g][axis]] = True
            if not self._outer(axis):
                rigid[:] = True
            self.places[axis] = np.full(rigid.size, -1, np.int64)
            self.places[axis][rigid] = np.flatnonzero(~taken)
        self.found = [np.arange(group.size) for group in self.all.groups]
        for number, group in enumerate(self.all.groups):
            if group.within is None:
                self._put(number, np.where(self.found[number] < self.sizes[number], self.found[number], -1))

    def _put(self, number: int, order: NDArray[np.int64]) -> None:
        """Element i of the anchor is the suspect's element order[i], with what is within it as it lies there."""
        for axis, index in self.index[number].items():
            at = self.theirs_at[number][axis]
            self.places[axis][index] = np.where((order >= 0)[:, None], at[np.maximum(order, 0)], -1)
        self.found[number] = order
        for parts in self.inner.get(number, []):
            for part in parts:
                self.found[part] = np.arange(self.all.groups[part].size)

    # --- similarities ---

    def _rows(self, tensor: str, axis: int, places: Places, *, anchor: bool) -> NDArray[np.int8]:
        """Elements × features: the weights at the places of each element, other axes in the anchor's order."""
        taken = _gathered((self.ours if anchor else self.theirs)[tensor], axis, places.reshape(-1))
        for other in range(taken.ndim) if not anchor else ():
            if other != axis and (tensor, other) in self.places:
                taken = _gathered(taken, other, self.places[tensor, other])
                if (tensor, other) in self.signs:
                    taken = _signed(taken, tensor, {(tensor, other): self.signs[tensor, other]})
        return np.ascontiguousarray(np.moveaxis(taken, axis, 0)).reshape(places.shape[0], -1)

    def _similarity(self, axis: Axis, ours: Places, theirs: Places) -> NDArray[np.int64]:
        """⟨element i of the anchor, element j of the suspect⟩ over the weights of one tensor."""
        return _inner(self._rows(*axis, ours, anchor=True), self._rows(*axis, theirs, anchor=False))

    def _value(self, number: int, axes: Sequence[Axis]) -> NDArray[np.int64]:
        """The similarity of a group's elements to the suspect's, over some axes."""
        group, index = self.all.groups[number], self.index[number]
        total = np.zeros((group.size, self.sizes[number]), np.int64)
        if group.within is not None:
            for axis in axes:
                theirs = self.places[axis][index[axis]]
                free = np.ones(theirs.shape[1], np.bool_)
                for turns, columns in self._blocks_of(number, axis):
                    free[columns] = False
                    total += self._likeness(axis, turns, index[axis][:, columns], theirs[:, columns])
                if free.any():
                    total += self._similarity(axis, index[axis][:, free], theirs[:, free])
            return total
        parts = self.inner.get(number)
        for axis in axes:
            free = self._free_columns(number, axis)
            if free.any():
                total += self._similarity(axis, index[axis][:, free], self.theirs_at[number][axis][:, free])
            for turns, columns in self._blocks_of(number, axis):
                total += self._likeness(axis, turns, index[axis][:, columns], self.theirs_at[number][axis][:, columns])
        for k, part in enumerate(parts[0] if parts else []):
            if part not in self.in_blocks:
                total += self._best_inner(number, k, axes)
        return total

    def _likeness(self, axis: Axis, turns: bool, ours: Places, theirs: Places) -> NDArray[np.int64]:
        """The similarity of blocks, whatever was mixed within them, in the units of the others.

        A block of n weights that is the anchor's has about 2^10·n there: balanced weights have a deviation of 2^5.
        """
        sizes = ours.shape[1], theirs.shape[1]
        one, two = (
            self._rows(*axis, places.reshape(-1, 1), anchor=anchor).astype(np.float64).reshape(len(places), size, -1)
            for places, size, anchor in ((ours, sizes[0], True), (theirs, sizes[1], False))
        )
        if turns:
            return (mixing.alike(one, two) * (2 * one.shape[-1])) >> 20
        return (mixing.common(mixing.orthonormal(one), mixing.orthonormal(two)) * one.shape[-1]) >> 20

    def _columns(self, number: int, axis: Axis, element: int, part: int) -> Places:
        """Which columns of an element's places a group within it has."""
        row = self.index[number][axis][element]
        order = np.argsort(row, kind="stable")
        return order[np.searchsorted(row[order], self.index[part][axis])]

    def _free_columns(self, number: int, axis: Axis) -> NDArray[np.bool_]:
        """Places of an element that no group within it permutes."""
        free = np.ones(self.index[number][axis].shape[1], np.bool_)
        parts = self.inner.get(number)
        for part in parts[0] if parts else []:
            if axis in self.index[part]:
                free[self._columns(number, axis, 0, part)] = False
        for _, columns in self._blocks_of(number, axis):
            free[columns] = False
        return free

    def _best_inner(self, number: int, k: int, axes: Sequence[Axis]) -> NDArray[np.int64]:
        """For heads whose channels may be permuted: the best total over such permutations, for each pair of heads.

        Axes where a second group within the head permutes the same places are left out if there are others.
        """
        group, parts, count = self.all.groups[number], self.inner[number], self.sizes[number]
        part, size = parts[0][k], self.all.groups[parts[0][k]].size
        mine = [axis for axis in axes if axis in self.index[part]]
        alone = [a for a in mine if not any(self._meet(a, part, other) for other in parts[0] if other != part)]
        value = np.zeros((group.size * size, count * size), np.int64)
        for axis in alone or mine:
            ours = np.concatenate([self.index[parts[i][k]][axis] for i in range(group.size)])
            columns = self._columns(number, axis, 0, part)
            theirs = np.concatenate([self.theirs_at[number][axis][j][columns] for j in range(count)])
            value += self._similarity(axis, ours, theirs)
        total = np.empty((group.size, count), np.int64)
        for i in range(group.size):
            for j in range(count):
                block = value[i * size : (i + 1) * size, j * size : (j + 1) * size]
                total[i, j] = block[np.arange(size), assign(block)].sum()
        return total

    def _meet(self, axis: Axis, one: int, two: int) -> bool:
        return axis in self.index[two] and bool(np.intersect1d(self.index[one][axis], self.index[two][axis]).size)

    # --- the loop ---

    def _match(self, number: int, axes: Sequence[Axis]) -> None:
        if self.all.groups[number].within is None:
            free = [a for a in axes if number not in self.inner and a not in self.blocks]
            if free:
                self._match_signed(number, axes, free)
            else:
                self._put(number, assign(self._value(number, axes)))
            return
        outer, element = self.all.groups[number].within or (0, 0)
        if self.found[outer][element] < 0:  # the suspect has no such head
            return
        order = assign(self._value(number, axes))
        self.found[number] = self.found[number][order]
        for axis, index in self.index[number].items():
            self.places[axis][index] = self.places[axis][index[order]]

    def _match_signed(self, number: int, axes: Sequence[Axis], free: Sequence[Axis]) -> None:
        """Matches elements whose weights may have the other sign on some of their axes.

        Then similarities, or their sum, are below 0. A norm's gains show where: an axis is taken with the signs of the
        gains that make most of it alike. If an assignment by the sizes of similarities on each axis still gets far
        more of these than the one by their sums does, it is taken. After that, axes with many similarities below 0
        get signs. First all is matched without any of that, and it is only noted which groups are in doubt; then by
        gains alone, which leave nothing to chance.
        """
        each = {axis: self._value(number, [axis]) for axis in free}
        rest = self._value(number, [axis for axis in axes if axis not in free])
        shown: dict[Axis, Signs] = {}
        for axis in free if self.with_signs != _NO_SIGNS else ():
            shown[axis] = self._shown_signs(number, axis, each[axis])
            each[axis] = each[axis] * shown[axis]
        total: NDArray[np.int64] = sum(each.values(), rest)
        sizes: NDArray[np.int64] = sum((np.abs(value) for value in each.values()), rest)
        order = assign(total)
        most = _most(sizes)
        energy = sum(self._energy(name) for name, _ in axes)
        in_doubt = _closer(energy, int(_taken(total, order).sum()), most)
        searching = self.with_signs == _ALL_SIGNS
        if not searching:
            (self.doubtful.add if in_doubt else self.doubtful.discard)(number)
        if self.with_signs == _NO_SIGNS:
            self._put(number, order)
            return
        if in_doubt and searching:
            by_size = assign(sizes)
            if _closer(energy, int(_taken(sizes, order).sum()), int(_taken(sizes, by_size).sum())):
                order = by_size
        self._put(number, order)
        for axis, known in self._written_signs(number).items():
            if axis not in each:  # it is not in order itself yet, but its signs are known now
                shown[axis], each[axis] = known, np.zeros_like(total)
        for axis, value in each.items():
            signs = self.signs.setdefault(axis, np.ones(self.shapes[axis[0]][axis[1]], np.int8))
            index = self.index[number][axis]
            signs[index] = 1
            there = index[order >= 0]
            signs[there] = _taken(np.broadcast_to(shown[axis], value.shape), order)[:, None]
            if searching and self._has_signs(number, axis, value, order):
                signs[there] *= np.where(_taken(value, order) < 0, -1, 1).astype(np.int8)[:, None]
        self._sign_readers(number)

    def _sign_readers(self, number: int) -> None:
        """Signs of what reads a group's channels behind a LayerNorm or RMSNorm, by the norm's gain.

        It is the gain that makes the reader most alike, of those whose names begin most like the reader's.
        """
        gains = {name: of for name, of in self._gain_signs(number).items() if not self._of_batch(name)}
        order = self.found[number]
        there = np.flatnonzero(order >= 0)
        for axis in self._compared(number) if gains and there.size else ():
            index = self.index[number][axis]
            if axis in self.blocks or index.shape[1] != 1:
                continue
            near = {name: _common(axis[0], name, behind=False) for name in gains}
            tried = {name: gains[name][there, order[there]] for name in gains if near[name] == max(near.values())}
            across = [(name, a) for name, a in self.blocks if name == axis[0] and a != axis[1]]
            before, told = self.signs.pop(axis, None), self.read_by.pop(axis, None)
            if across:
                found = self._by_heads(axis, across[0], index[there], tried)
            else:
                found = self._by_products(number, axis, there, tried)
            if found is not None:
                self.read_by[axis] = found
                self.signs[axis] = self._spread(axis, index[there], tried[found])
            elif before is not None and told is None:
                self.signs[axis] = before  # what was found without gains stays

    def _spread(self, axis: Axis, places: Places, signs: Signs) -> Signs:
        every = np.ones(self.shapes[axis[0]][axis[1]], np.int8)
        every[places] = signs[:, None]
        return every

    def _by_products(self, number: int, axis: Axis, there: Places, tried: Mapping[str, Signs]) -> str | None:
        """By the products of rows, if any.

        For the rows W of a reader, one for each channel, W·Wᵀ is the same whatever the order of its other axis is, and
        signs d make it d·dᵀ ∘ W·Wᵀ. So Σ d·dᵀ ∘ (A·Aᵀ) ∘ (W·Wᵀ) with the anchor's A tells which gain it is: without its
        diagonal that is noise for the wrong signs, of deviation √2·‖(A·Aᵀ)∘(W·Wᵀ)‖, of which it must have two.
        """
        ours = self._rows(*axis, self.index[number][axis][there], anchor=True)
        theirs = self._rows(*axis, self.theirs_at[number][axis][self.found[number][there]], anchor=False)
        both = (_products(ours) * _products(theirs)) >> 21
        np.fill_diagonal(both, 0)
        noise = int((both * both).sum())
        best, most = None, int(both.sum())
        for name, signs in tried.items():
            alike = int(signs.astype(np.int64) @ both @ signs.astype(np.int64))
            if alike > most and alike**2 > 8 * noise:
                best, most = name, alike
        return best

    def _by_heads(self, axis: Axis, across: Axis, places: Places, tried: Mapping[str, Signs]) -> str | None:
        """By what heads span, whatever was mixed within them, if that comes an eighth closer by any."""
        heads = self._outer(across)
        if not heads:
            return None
        best, most = None, 9 * _most(self._value(heads[0], [across])) // 8
        for name, signs in tried.items():
            self.signs[axis] = self._spread(axis, places, signs)
            alike = _most(self._value(heads[0], [across]))
            if alike > most:
                best, most = name, alike
        self.signs.pop(axis)
        return best

    def _shown_signs(self, number: int, axis: Axis, value: NDArray[np.int64]) -> Signs:
        """The signs, element by element of the suspect, that a gain of the group shows for an axis, or none.

        BatchNorm's are for what writes their channels; where it is not known which is whose, those that make most
        alike. What other norms' gains show is known from `_sign_readers`.
        """
        written, gains = self._written_signs(number), self._gain_signs(number)
        if axis in written:
            return written[axis]
        if axis in self.read_by:
            return gains[self.read_by[axis]]
        best, most = np.ones((1, 1), np.int8), _most(value)
        for signs in [of for name, of in gains.items() if self._of_batch(name) and axis[1] == 0]:
            if (alike := _most(value * signs)) > most:
                best, most = signs, alike
        return best

    def _gain_signs(self, number: int) -> dict[str, Signs]:
        """For each gain of a group ±1 for the anchor's elements by the suspect's."""
        found = {}
        for (name, _), index in self.index[number].items():
            at = self.theirs_at[number].get((name, 0))
            if name in self.gains and index.shape[1] == 1 and at is not None and at.max() < len(self.gains[name][1]):
                ours, theirs = self.gains[name]
                found[name] = np.where(ours[index] != theirs[at].T, np.int8(-1), np.int8(1))
        return found

    def _of_batch(self, gain: str) -> bool:
        """Whether it is BatchNorm's."""
        return f"{gain.removesuffix('weight')}running_var" in self.shapes

    def _written_signs(self, number: int) -> dict[Axis, Signs]:
        """Signs of what writes a group's channels (on its first axis), if as many BatchNorms are behind that.

        Which is behind which is told by the layout's names, of which a layer and its norm share most: layer2.0.conv2
        and layer2.0.bn2. It cannot be told by likeness before the layer itself is in order.
        """
        signs = {name: of for name, of in self._gain_signs(number).items() if self._of_batch(name)}
        writers = [axis for axis in self._compared(number) if axis[1] == 0]
        if not signs or len(signs) != len(writers):
            return {}
        gains = list(signs)
        pairs = assign(np.array([[_common(name, gain) for gain in gains] for name, _ in writers], np.int64))
        return {axis: signs[gains[pair]] for axis, pair in zip(writers, pairs, strict=True)}

    def _has_signs(self, number: int, axis: Axis, value: NDArray[np.int64], order: NDArray[np.int64]) -> bool:
        """Whether signs were changed on an axis: similarities below 0 add much to the distance, and most are no noise.

        Of n weights, the noise of ⟨a, s⟩ has a deviation of ‖a‖·‖s‖/√n.
        """
        found, rows = _taken(value, order), np.flatnonzero(order >= 0)
        size = int(np.abs(found).sum())
        if not _closer(self._energy(axis[0]), int(found.sum()), size):
            return False
        one = self._rows(*axis, self.index[number][axis][rows], anchor=True).astype(np.int64)
        two = self._rows(*axis, self.theirs_at[number][axis][order[rows]], anchor=False).astype(np.int64)
        ours, theirs = ((x * x).sum(axis=1).astype(np.float64) for x in (one, two))
        noise = np.rint(np.sqrt(ours * theirs / one.shape[1]))
        plain = found < -_CERTAIN * noise  # a row that is noise alone does not tell of signs
        gained = int(np.abs(found[plain]).sum())
        before = int(found.sum())
        return size > _PLAIN * float(noise.sum()) and _closer(self._energy(axis[0]), before, before + 2 * gained)

    def _usable(self, number: int, known: set[int]) -> list[Axis]:
        """The axes of a group whose tensors are in order everywhere else."""
        return [
            (tensor, axis)
            for tensor, axis in self._clear(number)
            if all(
                self.touching.get((tensor, other), set()) - {number} <= known
                for other in range(self.ours[tensor].ndim)
                if other != axis
            )
        ]

    def _first_sweep(self) -> list[int]:
        """From what is in order by itself (inputs, outputs, words) inwards: always the group that most is known of."""
        known: set[int] = set()
        order: list[int] = []
        waiting = [n for n in range(len(self.index)) if self._compared(n)]
        while waiting:
            best, most = waiting[0], -1
            for n in waiting:
                within = self.all.groups[n].within
                if within is not None and within[0] not in known:
                    continue
                weights = (self.ours[t].size // self.ours[t].shape[a] * self.index[n][t, a].shape[1]
                           for t, a in self._usable(n, known))  # fmt: skip
                if (weight := sum(weights)) > most:
                    best, most = n, weight
            self._match(best, self._usable(best, known) or self._clear(best))
            known.add(best)
            waiting.remove(best)
            order.append(best)
        # from now on heads are followed by their channels, which moving the heads has put back as they were
        tops = [n for n in order if self.all.groups[n].within is None]
        return [m for n in tops for m in [n, *(m for m in order if (self.all.groups[m].within or (-1,))[0] == n)]]

    def _energy(self, name: str) -> int:
        """(‖a‖² + ‖s‖²)/2 of a tensor."""
        if name not in self.energies:
            both = (self.ours[name], self.theirs[name])
            self.energies[name] = sum(int((row.astype(np.int64) ** 2).sum()) for values in both for row in values) // 2
        return self.energies[name]

    def _alike(self) -> int:
        """⟨anchor, suspect⟩ over all weights that are compared, as they are matched now."""
        total = 0
        for name, ours in self.ours.items():
            theirs: NDArray[Any] = self.theirs[name]
            for axis in range(ours.ndim):
                if (name, axis) in self.places:
                    theirs = _gathered(theirs, axis, self.places[name, axis])
            theirs = _signed(theirs, name, self.signs)
            total += sum(int((a.astype(np.int64) * b).sum()) for a, b in zip(ours, theirs, strict=True))
        return total

    def _settled(self) -> tuple[int, bool]:
        """Matches until nothing changes; how many sweeps that took, and whether it came to that."""
        order = self._first_sweep()
        sweeps, stable = 1, False
        while not stable and sweeps < _SWEEPS:
            if self.progress is not None:
                self.progress(f"aligning: sweep {sweeps + 1}")
            before = {axis: places.copy() for axis, places in self.places.items()}
            were = {axis: signs.copy() for axis, signs in self.signs.items()}
            for number in order:
                self._match(number, self._clear(number))
            sweeps += 1
            stable = all(np.array_equal(before[axis], places) for axis, places in self.places.items())
            stable = stable and all(np.array_equal(were.get(axis, 1), signs) for axis, signs in self.signs.items())
        return sweeps, stable

    def _told_by_gains(self) -> bool:
        """Whether some gain is below 0, which may be the trace of changed signs."""
        return any(ours.any() or theirs.any() for ours, theirs in self.gains.values())

    def run(self) -> Alignment:
        sweeps, stable = self._settled()
        for self.with_signs in (_GAINS, _ALL_SIGNS):  # once more, with signs: taken where more is then like the anchor
            if not (self._told_by_gains() if self.with_signs == _GAINS else self.doubtful):
                continue
            plain, places, found, signs, now = self._alike(), self.places, self.found, self.signs, (sweeps, stable)
            doubtful = set(self.doubtful)
            self.places, self.found, self.signs, self.read_by = {}, [], {}, {}
            self._begin()
            sweeps, stable = self._settled()
            if not _closer(sum(map(self._energy, self.ours)), plain, self._alike()):
                self.places, self.found, self.signs, (sweeps, stable) = places, found, signs, now
                self.doubtful = doubtful
        sizes = tuple(
            (group.size, size, int((found >= 0).sum()))
            for group, size, found in zip(self.all.groups, self.sizes, self.found, strict=True)
        )
        moved = tuple(int(((f >= 0) & (f != np.arange(f.size))).sum()) for f in self.found)
        signs = {axis: signs for axis, signs in self.signs.items() if (signs < 0).any()}
        digest = self.all.digest()
        return Alignment(self.all.procedure, digest, sizes, moved, sweeps, stable, self.places, signs=signs)
