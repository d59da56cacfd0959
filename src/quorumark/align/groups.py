"""Which channels of a model can be permuted, mixed or rotated together (docs/alignment.md, "Groups").

The channels of a layer can be permuted, with everything that reads them, and the model computes the same function. So
can the heads of an attention layer, the channels within a head and the neurons of a block. `Groups` records which
indices move together. It is derived once from the model (`quorumark.align.trace`); a verifier needs this record, not
the model's code. docs/format.md has the file format.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from quorumark.canonical import canonical, digest, parse
from quorumark.checks import is_count, require, take
from quorumark.errors import LayoutError, RecordError
from quorumark.model.layout import ModelLayout

__all__ = ["Axis", "Group", "Groups", "Indices", "Mixing", "Signs", "Slot", "Stream"]

Axis = tuple[str, int]
"""A tensor and one of its axes."""
Indices = NDArray[np.int64]
Signs = NDArray[np.int8]

_DERIVE = "derive the groups from this model again: quorumark groups"


@dataclass(frozen=True, order=True)
class Slot:
    """The indices that the elements of a group have on one axis of a tensor.

    Element i has the indices offset + i·stride + j·step for 0 ≤ j < count. The rows of a layer are (offset 0, stride 1,
    count 1). After an image of 16 pixels was flattened, each channel has 16 columns (stride 16, count 16, step 1).
    """

    tensor: str
    axis: int
    offset: int
    stride: int
    count: int
    step: int

    def indices(self, size: int) -> Indices:
        """size × count."""
        return self.offset + np.arange(size)[:, None] * self.stride + np.arange(self.count) * self.step


@dataclass(frozen=True)
class Group:
    """`size` elements that can be permuted. If they are parts of an element of another group, `within` names both.

    Each of `signs` has indices of an element that can get the other sign together, whatever the other elements have;
    each of `turns` has such as can get it only with those of all other elements. Each of `swaps` has one tensor for
    every element, which are exchanged when elements are: the weights of experts.
    """

    size: int
    slots: tuple[Slot, ...]
    within: tuple[int, int] | None = None
    signs: tuple[tuple[Slot, ...], ...] = ()
    turns: tuple[tuple[Slot, ...], ...] = ()
    swaps: tuple[tuple[str, ...], ...] = ()

    def axes(self) -> dict[Axis, Indices]:
        """For each axis, the indices of every element: one row per element."""
        found: dict[Axis, list[Indices]] = {}
        for slot in self.slots:
            found.setdefault((slot.tensor, slot.axis), []).append(slot.indices(self.size))
        return {axis: np.concatenate(parts, axis=1) for axis, parts in found.items()}

    def segments(self, axis: Axis) -> list[tuple[int, int, int]] | None:
        """Runs in which elements follow each other on an axis: (start, first column in `axes`, width of an element).

        None if the elements interleave in another way; then the axis cannot grow or shrink.
        """
        column = 0
        found: list[tuple[int, int, int]] = []
        for slot in self.slots:
            if (slot.tensor, slot.axis) != axis:
                continue
            if slot.stride == slot.count and (slot.step == 1 or slot.count == 1):  # one element after the other
                found.append((slot.offset, column, slot.count))
            elif slot.stride == 1 and slot.step >= self.size:  # the first index of all elements, then the second, …
                found += [(slot.offset + j * slot.step, column + j, 1) for j in range(slot.count)]
            else:
                return None
            column += slot.count
        return sorted(found)


@dataclass(frozen=True)
class Mixing:
    """`size` channels that can be mixed: by a matrix A at the indices of `slots`, by A⁻ᵀ at those of `against`.

    If slots have one index per element, A is any invertible matrix. If they have two, each element is a pair of
    channels, and A rotates each pair by its own angle, the same one at all slots.
    """

    size: int
    slots: tuple[Slot, ...]
    against: tuple[Slot, ...] = ()

    @property
    def rotates(self) -> bool:
        """Whether pairs are rotated."""
        return self.slots[0].count == 2

    def blocks(self) -> Iterator[tuple[Axis, Indices]]:
        """For each side and axis, copies × indices in the order of channels; the two of a pair are neighbours."""
        for side in (self.slots, self.against):
            yield from self.of_side(side)

    def of_side(self, side: Sequence[Slot]) -> Iterator[tuple[Axis, Indices]]:
        """The same for one side."""
        found: dict[Axis, list[Indices]] = {}
        for slot in side:
            found.setdefault((slot.tensor, slot.axis), []).append(slot.indices(self.size).reshape(-1))
        for axis, copies in found.items():
            yield axis, np.stack(copies)


@dataclass(frozen=True)
class Stream:
    """A residual stream of `size` channels that one orthogonal matrix can rotate once gains are folded.

    `writers` are the tensors that write to it (embeddings, the last layers of blocks, their biases), each with the axis
    that is the stream. `norms` has for each RMSNorm the tensor of its gains, and what reads the stream through it.
    """

    size: int
    writers: tuple[Axis, ...]
    norms: tuple[tuple[str, tuple[Axis, ...]], ...]

    def axes(self) -> dict[str, tuple[int, str | None]]:
        """For each tensor, the axis that is the stream, and the gains of the norm that it reads, or None."""
        found: dict[str, tuple[int, str | None]] = {tensor: (axis, None) for tensor, axis in self.writers}
        return found | {tensor: (axis, gain) for gain, readers in self.norms for tensor, axis in readers}

    def gains(self) -> list[str]:
        return [gain for gain, _ in self.norms]

    def _named(self) -> list[Axis]:
        return [*self.writers, *(axis for _, readers in self.norms for axis in readers)]

    def check(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raises a LayoutError unless this can be the stream of a model with these shapes."""
        axes = self._named()
        for tensor, axis in [*axes, *((gain, 0) for gain in self.gains())]:
            shape = shapes.get(tensor)
            if shape is None or axis >= len(shape):
                raise _not_in_layout("stream", tensor, axis)
            if shape[axis] != self.size:
                raise LayoutError(
                    f"the stream has {self.size} channels, but axis {axis} of tensor {tensor!r} has {shape[axis]}; "
                    f"{_DERIVE}"
                )
        for gain in self.gains():
            if len(shapes[gain]) != 1:
                raise LayoutError(f"the gains {gain!r} of the stream must have one dimension; {_DERIVE}")
        names = [*self.gains(), *(tensor for tensor, _ in axes)]
        if len(set(names)) != len(names):
            raise LayoutError(f"the stream names a tensor twice; {_DERIVE}")

    def as_dict(self) -> dict[str, Any]:
        return {
            "size": self.size,
            "writers": [list(axis) for axis in self.writers],
            "norms": [{"gain": gain, "readers": [list(axis) for axis in readers]} for gain, readers in self.norms],
        }

    @classmethod
    def from_dict(cls, entry: Any) -> Self:
        what = "a stream"
        taken = take(entry, ["size", "writers", "norms"], what)
        norms = [take(norm, ["gain", "readers"], "a norm of a stream") for norm in _listed(taken["norms"], what)]
        writers, readers = _axes(taken["writers"]), [_axes(norm["readers"]) for norm in norms]
        gains = [norm["gain"] for norm in norms]
        return cls(taken["size"], writers, tuple(zip(gains, readers, strict=True)))

    def __post_init__(self) -> None:
        what = "a stream"
        require(
            is_count(self.size, 2) and self.size < 1 << 16, what, f"must have 2 to 65535 channels, not {self.size!r}"
        )
        require(bool(self.writers) and bool(self.norms), what, "must have writers and norms")
        require(all(isinstance(gain, str) for gain in self.gains()), what, "must name the gains of its norms")
        for tensor, axis in self._named():
            sound = isinstance(tensor, str) and is_count(axis) and axis < 1 << 8
            require(sound, what, f"has an invalid axis: {[tensor, axis]!r}")


@dataclass(frozen=True)
class Groups:
    """The coupled groups of a model, its mixings and its stream. A group comes before the groups within it.

    `open` are axes on which channels may be permuted in ways that no group covers: something that touches them was not
    understood.
    """

    FORMAT: ClassVar[str] = "quorumark-groups/v1"

    groups: tuple[Group, ...]
    mixings: tuple[Mixing, ...] = ()
    stream: Stream | None = None
    open: tuple[Axis, ...] = ()

    def __len__(self) -> int:
        return len(self.groups)

    def __post_init__(self) -> None:
        for tensor, axis in self.open:
            sound = isinstance(tensor, str) and is_count(axis) and axis < 1 << 8
            require(sound, "a model's groups", f"have an invalid open axis: {[tensor, axis]!r}")
        for number, mixed in enumerate(self.mixings):
            what = f"mixing {number}"
            require(is_count(mixed.size, 1) and mixed.size < 1 << 16 and bool(mixed.slots), what, "must have channels")
            counts = {slot.count for slot in (*mixed.slots, *mixed.against)}
            require(counts <= {1} or counts <= {2}, what, "must have one index per channel, or pairs of them")
            _check_slots((*mixed.slots, *mixed.against), what)
        for number, group in enumerate(self.groups):
            what = f"group {number}"
            require(is_count(group.size, 2) and group.size < 1 << 31, what, "must have two elements or more")
            require(bool(group.slots), what, "must have a slot")
            _check_slots(group.slots, what)
            sound = all(len(set(names)) == len(names) == group.size for names in group.swaps)
            require(
                sound and not (group.swaps and group.within), what, "must have a tensor of its own for each element"
            )
            for slots in (*group.signs, *group.turns):
                require(bool(slots), what, "must have an index for each of its signs")
                _check_slots(slots, what)
            if group.within is not None:
                sound = isinstance(group.within, tuple) and len(group.within) == 2 and all(map(is_count, group.within))
                sound = sound and group.within[0] < number and group.within[1] < self.groups[group.within[0]].size
                sound = sound and self.groups[group.within[0]].within is None
                require(sound, what, "must be within an element of an earlier group that is not within another one")

    def check(self, layout: ModelLayout) -> None:
        """Raises a LayoutError unless these can be the groups of a model with this layout.

        Every index must exist, and belong to one outer group and one mixing at most.
        """
        shapes = {spec.name: spec.shape for spec in layout.tensors}
        taken: set[tuple[str, int, int]] = set()
        for group in self.groups:
            own: set[tuple[str, int, int]] = set()
            for slot in group.slots:
                _check_slot(slot, group.size, shapes)
                own |= {(slot.tensor, slot.axis, index) for index in slot.indices(group.size).reshape(-1).tolist()}
            if len(own) != sum(group.size * slot.count for slot in group.slots):
                raise LayoutError(f"a group has the same index twice; {_DERIVE}")
            self._check_signs(group)
            if group.within is None:
                if own & taken:
                    raise LayoutError(f"two groups have the same index; {_DERIVE}")
                taken |= own
        self._check_swaps(shapes)
        for mixed in self.mixings:
            for slot in (*mixed.slots, *mixed.against):
                _check_slot(slot, mixed.size, shapes)
        blocks = self.blocks()
        if self.stream is not None:
            self.stream.check(shapes)
            if any((tensor, axis) in blocks for tensor, (axis, _) in self.stream.axes().items()):
                raise LayoutError(f"a mixing has channels of the stream; {_DERIVE}")
        on_axis: dict[Axis, list[Indices]] = {axis: [] for axis in blocks}
        for group in self.groups if blocks else ():
            for axis, at in group.axes().items():
                if axis in on_axis:
                    on_axis[axis].append(at)
        for axis, of_axis in blocks.items():
            every = np.concatenate([indices.reshape(-1) for _, indices in of_axis])
            if np.unique(every).size != every.size:
                raise LayoutError(f"two mixings have the same index; {_DERIVE}")
            for elements in on_axis[axis]:
                if not all(_nested(indices, elements) for _, copies in of_axis for indices in copies):
                    raise LayoutError(f"a mixing cuts across the elements of a group; {_DERIVE}")

    def _check_swaps(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raises a LayoutError unless tensors that are exchanged have the same shape, and one place each."""
        every = [name for group in self.groups for names in group.swaps for name in names]
        if len(set(every)) != len(every) or not shapes.keys() >= set(every):
            raise LayoutError(f"a group exchanges a tensor twice, or one that is not in the layout; {_DERIVE}")
        for names in (names for group in self.groups for names in group.swaps):
            if len({tuple(shapes[name]) for name in names}) > 1:
                raise LayoutError(f"a group exchanges tensors of several shapes: {names[0]!r}; {_DERIVE}")

    def swapped(self, orders: Sequence[NDArray[Any]]) -> dict[str, str]:
        """Which tensor each name has after a permutation of every group, where it is another one."""
        return {
            names[i]: names[int(order[i])]
            for group, order in zip(self.groups, orders, strict=True)
            for names in group.swaps
            for i in range(group.size)
            if order[i] not in (i, -1)
        }

    def _check_signs(self, group: Group) -> None:
        """Raises a LayoutError unless the signs of a group are those of its elements."""
        axes = group.axes()
        for slot in (slot for slots in (*group.signs, *group.turns) for slot in slots):
            of, mine = axes.get((slot.tensor, slot.axis)), slot.indices(group.size)
            element = np.full(1 + int(max(mine.max(), 0 if of is None else of.max())), -1, np.int64)
            if of is not None:
                element[of] = np.arange(group.size)[:, None]
            if (element[mine] != np.arange(group.size)[:, None]).any():
                raise LayoutError(f"a sign of a group is not at indices of its elements; {_DERIVE}")

    def only(self, numbers: Sequence[int]) -> Groups:
        """Some of the groups. One that was within another that is left out stands alone."""
        places = {number: at for at, number in enumerate(sorted(numbers))}
        kept = []
        for number in places:
            group = self.groups[number]
            outer = None if group.within is None or group.within[0] not in places else group.within
            within = None if outer is None else (places[outer[0]], outer[1])
            kept.append(dataclasses.replace(group, within=within))
        return dataclasses.replace(self, groups=tuple(kept))

    def blocks(self) -> dict[Axis, list[tuple[bool, Indices]]]:
        """The blocks of every axis that mixings touch: whether pairs are rotated, and copies × indices."""
        found: dict[Axis, list[tuple[bool, Indices]]] = {}
        for mixed in self.mixings:
            for axis, indices in mixed.blocks():
                found.setdefault(axis, []).append((mixed.rotates, indices))
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

    def axis_orders(self, shapes: Mapping[str, Sequence[int]], orders: Sequence[NDArray[Any]]) -> dict[Axis, Indices]:
        """What a permutation of every group does to each axis: the old index of what is at each new index.

        orders[g][i] is the element of group g that moves to i. An outer group moves first, with all that is within it.
        """
        found: dict[Axis, Indices] = {}
        for group, order in zip(self.groups, orders, strict=True):
            for (tensor, axis), index in group.axes().items():
                if tensor in shapes:
                    now = found.setdefault((tensor, axis), np.arange(shapes[tensor][axis]))
                    now[index] = now[index[order]]
        return found

    def to_bytes(self) -> bytes:
        """Canonical JSON; `from_bytes` reads it back."""
        groups = [
            {
                "size": g.size,
                "slots": _slot_lists(g.slots),
                "within": None if g.within is None else list(g.within),
                "signs": [_slot_lists(slots) for slots in g.signs],
                "turns": [_slot_lists(slots) for slots in g.turns],
                "swaps": [list(names) for names in g.swaps],
            }
            for g in self.groups
        ]
        mixings = [
            {"size": m.size, "slots": _slot_lists(m.slots), "against": _slot_lists(m.against)} for m in self.mixings
        ]
        stream = None if self.stream is None else self.stream.as_dict()
        known = {"groups": groups, "mixings": mixings, "stream": stream, "open": [list(axis) for axis in self.open]}
        return canonical({"format": self.FORMAT, **known})

    def digest(self) -> str:
        return digest("groups", self.to_bytes()).hex()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        what = "a model's groups"
        fields = take(parse(data, cls.FORMAT, what), ["groups", "mixings", "stream", "open"], what)
        groups = [_read_group(entry) for entry in _listed(fields["groups"], what)]
        mixings = [_read_mixing(entry) for entry in _listed(fields["mixings"], "a model's mixings")]
        stream = None if fields["stream"] is None else Stream.from_dict(fields["stream"])
        return cls(tuple(groups), tuple(mixings), stream, _axes(fields["open"], "a model's open axes"))


# --- reading ----------------------------------------------------------------------------------------------


def _listed(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise RecordError(f"{what} must be a list")
    return value


def _axes(value: Any, what: str = "the axes of a stream") -> tuple[Axis, ...]:
    listed = _listed(value, what)
    sound = all(isinstance(axis, list) and len(axis) == 2 for axis in listed)
    require(sound, what, "must be listed as [tensor, axis]")
    return tuple((tensor, axis) for tensor, axis in listed)


def _slot_lists(slots: Sequence[Slot]) -> list[list[Any]]:
    return [[s.tensor, s.axis, s.offset, s.stride, s.count, s.step] for s in slots]


def _read_slots(value: Any, what: str) -> tuple[Slot, ...]:
    listed = _listed(value, f"the slots of {what}")
    sound = all(isinstance(slot, list) and len(slot) == 6 for slot in listed)
    require(sound, what, "must list each slot as [tensor, axis, offset, stride, count, step]")
    return tuple(Slot(*slot) for slot in listed)


def _read_group(entry: Any) -> Group:
    taken = take(entry, ["size", "slots", "within", "signs", "turns", "swaps"], "a group")
    within = taken["within"]
    require(within is None or isinstance(within, list), "a group", "must have null or [group, element] for `within`")
    signs, turns = (
        tuple(_read_slots(slots, f"a group's {kind}") for slots in _listed(taken[kind], f"a group's {kind}"))
        for kind in ("signs", "turns")
    )
    slots = _read_slots(taken["slots"], "a group")
    swaps = _listed(taken["swaps"], "a group's swaps")
    sound = all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in swaps)
    require(sound, "a group", "must list tensors for each of its swaps")
    exchanged = tuple(tuple(names) for names in swaps)
    return Group(taken["size"], slots, None if within is None else tuple(within), signs, turns, exchanged)


def _read_mixing(entry: Any) -> Mixing:
    taken = take(entry, ["size", "slots", "against"], "a mixing")
    return Mixing(taken["size"], *(_read_slots(taken[side], "a mixing") for side in ("slots", "against")))


# --- checks -----------------------------------------------------------------------------------------------


def _not_in_layout(what: str, tensor: str, axis: int) -> LayoutError:
    return LayoutError(f"the {what} names axis {axis} of {tensor!r}, which is not in the layout; {_DERIVE}")


def _check_slots(slots: Sequence[Slot], what: str) -> None:
    for slot in slots:
        numbers = (slot.axis, slot.offset, slot.stride, slot.count, slot.step)
        sound = isinstance(slot.tensor, str) and all(is_count(n) and n < 1 << 31 for n in numbers)
        sound = sound and slot.count > 0 and slot.stride > 0 and slot.step > 0
        require(sound, what, f"has an invalid slot: {_slot_lists([slot])[0]!r}")


def _check_slot(slot: Slot, size: int, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raises a LayoutError unless the indices of a slot exist."""
    shape = shapes.get(slot.tensor)
    if shape is None or slot.axis >= len(shape):
        raise _not_in_layout("group", slot.tensor, slot.axis)
    last = slot.offset + (size - 1) * slot.stride + (slot.count - 1) * slot.step
    if last >= shape[slot.axis] or size * slot.count > shape[slot.axis]:
        raise LayoutError(f"a group goes beyond the end of tensor {slot.tensor!r} of shape {tuple(shape)}; {_DERIVE}")


def _nested(block: Indices, elements: Indices) -> bool:
    """Whether a block is inside one element of a group, or has an index of all of them, or has none of them."""
    inside = np.isin(elements, block)
    every = bool((inside == inside[0]).all()) and int(inside.sum()) == block.size
    return not inside.any() or every or int(inside.sum(axis=1).max()) == block.size
