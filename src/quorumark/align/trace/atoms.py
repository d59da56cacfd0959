"""What a trace knows: the labels of every tensor, and which atoms were joined, pinned or put into heads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from quorumark.align.trace.labels import (
    Component,
    DisjointSets,
    Knob,
    Labels,
    Scales,
    along,
    pairs_of,
    values_of,
)
from quorumark.align.trace.operations import MIXES, PRODUCTS, SUMS
from quorumark.align.trace.zeros import KnownZeros

__all__ = ["Trace"]


class Trace(KnownZeros):
    """The labels of every tensor that was seen, and what was joined and pinned."""

    def __init__(self, model: Any) -> None:
        import torch

        super().__init__()
        self.torch: Any = torch
        self.atoms = DisjointSets()
        self.scales = Scales()
        self.indices: dict[int, tuple[str, int, int]] = {}  # atom → tensor, axis, index
        self.head_of: dict[int, int] = {}  # root of an atom → the head that it belongs to
        self.heads: dict[bytes, int] = {}  # the atoms of a head → its label
        self.pinned: set[int] = set()  # atoms that cannot move
        self.held: set[int] = set()  # those of them that inputs, outputs or constants hold in place
        self.lost: set[int] = set()  # tensors without labels that come from something that was not understood
        self.apart: set[str] = set()  # tensors whose rows are read in parts, each of which could be permuted on its own
        self.held_in_head: set[int] = set()  # atoms that can move only with their head
        self.operations_of: dict[int, set[int]] = defaultdict(set)  # atom → numbers of its operations
        self.nonlinear: set[int] = set()  # atoms that went through something other than a linear map
        self.operation_count = 0
        self.shared_axes: set[tuple[str, int]] = set()  # axes that several heads read (grouped queries)
        self.components: dict[int, list[Component]] = {}
        self.used: set[int] = set()  # tensors that an operation has read
        self.stacked: dict[int, int] = {}  # tensors put together from others, and the axis along which
        self.unknown: set[str] = set()  # operations that are not understood
        self.aliases: dict[str, list[str]] = {}  # tied weights: all names of a tensor, by the first
        self.parameters: list[Any] = []
        self.names = names = dict[int, str]()
        for name, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) in names:
                self.aliases[names[id(tensor)]].append(name)
            elif tensor.is_floating_point():
                names[id(tensor)] = name
                self.aliases[name] = [name]
                self.components[id(tensor)] = self._parameter(name, tensor.shape)
                self.parameters.append(tensor)

    def _parameter(self, name: str, shape: Sequence[int]) -> list[Component]:
        found = []
        for axis, size in enumerate(shape):
            if size < 2:
                continue
            first, scale = self.atoms.new(size), self.scales.new(size)
            for i in range(size):
                self.indices[first + i] = (name, axis, i)
                self.scales.knobs[scale + i].append(Knob(name, axis, i, 1))
            line = Component(*(self.torch.arange(start, start + size) for start in (first, scale)))
            found.append(line.map(along(axis, tuple(shape))))
        return found

    def of(self, tensor: Any) -> list[Component]:
        return self.components.get(id(tensor), [])

    def pin_unused(self) -> None:
        """Weights that no operation reads for this example: nothing is known about them."""
        for tensor in self.parameters:
            if id(tensor) not in self.used:
                for comp in self.of(tensor):
                    self.pin(comp, held=False)

    def label(self, tensor: Any, comps: list[Component]) -> None:
        self.components[id(tensor)] = comps
        self.kept_alive.append(tensor)

    # --- what can happen to atoms ---

    def join(self, one: int, two: int) -> None:
        """Two atoms move together."""
        stays, goes = self.atoms.join(one, two)
        if stays != goes and goes in self.head_of:
            self.put_into_head(stays, self.head_of.pop(goes))

    def put_into_head(self, atom: int, head: int) -> None:
        """An atom belongs to a head. If it has one already, both heads become one."""
        atom = self.atoms.root(atom)
        if atom == self.atoms.root(head):
            return
        if atom in self.head_of:
            self.join(self.head_of[atom], head)
        else:
            self.head_of[atom] = head

    def pin(self, comp: Component, *, within: bool = False, scales: bool = True, held: bool = True) -> None:
        """Atoms cannot move, or (`within`) only with their head. Those that are not `held` could, if more was known."""
        (self.held_in_head if within else self.pinned).update(values_of(comp.label))
        if held and not within:
            self.held.update(values_of(comp.label))
        if scales:
            self.scales.fix(values_of(comp.scale))

    def fix(self, comps: Iterable[Component]) -> None:
        """Scales become 1."""
        for comp in comps:
            self.scales.fix(values_of(comp.scale))

    def is_fixed(self, comp: Component) -> bool:
        return all(self.scales.root(x)[0] in self.scales.fixed for x in values_of(comp.scale))

    def unscaled(self, comps: Iterable[Component]) -> list[Component]:
        """The same atoms without scales."""
        return [Component(c.label, self.torch.zeros((), dtype=self.torch.int64).expand(c.label.shape)) for c in comps]

    def same_scale(self, one: Labels, two: Labels) -> None:
        """Joins scales that meet; a scale that meets nothing becomes 1."""
        self.scales.join(pairs_of(one, two), 1)
        self.scales.fix(values_of(one[two == 0]) + values_of(two[one == 0]))

    def pin_unmatched(self, one: Component, two: Component) -> None:
        """Pins atoms that meet no atom."""
        alone = values_of(one.label[two.label == 0]) + values_of(two.label[one.label == 0])
        self.pinned.update(alone)
        self.held.update(alone)

    def elementwise(self, tensors: Sequence[Any], shape: tuple[int, ...], name: str) -> list[Component]:
        """Joins atoms that meet; an operand without atoms that differs along an axis pins the atoms there."""
        if name in SUMS:
            tensors = [t for t in tensors if not self.is_zero(t)]
        elif name in PRODUCTS and any(map(self.is_zero, tensors)):
            return []
        placed = [
            [c.map(lambda x: x.expand(shape) if x.dim() else x) for c in self.of(t)] if t.dim() else [] for t in tensors
        ]
        if name in MIXES:
            self.fix(c for comps in placed for c in comps)
        found: list[tuple[Component, frozenset[int]]] = []
        met: list[set[int]] = [set() for _ in tensors]  # axes of each operand that carry atoms
        for operand, comps in enumerate(placed):
            for comp in comps:
                axes = comp.axes()
                met[operand] |= axes
                for k, (other, others) in enumerate(found):
                    if axes & others:
                        found[k] = self.meet(other, others, comp, axes, name)
                        break
                else:
                    found.append((comp, axes))
        for operand, tensor in enumerate(tensors):
            own = (1,) * (len(shape) - tensor.dim()) + tuple(tensor.shape)
            for comp, axes in found:
                clash = {a for a in axes if own[a] > 1 and a not in met[operand]}
                if clash:
                    self.pin(comp, within=clash != axes, scales=name not in PRODUCTS)
            if name in SUMS:  # what has no atoms there is not scaled, so that the sum cannot be
                for comp, axes in found:
                    if not axes & met[operand] and any(tensor is not t for t in tensors):
                        self.fix([comp])
        if name in MIXES:
            return self.unscaled(c for c, _ in found)
        return [c for c, _ in found]

    def meet(
        self, one: Component, one_axes: frozenset[int], two: Component, two_axes: frozenset[int], name: str
    ) -> tuple[Component, frozenset[int]]:
        """Two operands that run along the same axes: what the result carries."""
        pairs = pairs_of(one.label, two.label)
        left, right = len({p[0] for p in pairs}), len({p[1] for p in pairs})
        # a head meets its channels: the coarser labels are heads, each with the same number of finer ones
        if left != right and max(left, right) == len(pairs):
            flipped = left < right
            if all((p[0] if flipped else p[1]) not in self.indices for p in pairs):
                for p in pairs:
                    self.put_into_head(*(p[::-1] if flipped else p))
                self.fix([one if flipped else two])
                return (one, one_axes) if not flipped else (two, two_axes)
        heads = [p for p in pairs if (p[0] in self.indices) != (p[1] in self.indices)]
        if heads:  # channels that several heads read
            for p in heads:
                atom, head = p if p[0] in self.indices else p[::-1]
                self.put_into_head(atom, head)
                self.shared_axes.add(self.indices[atom][:2])
            return (one, one_axes) if heads[0][0] in self.indices else (two, two_axes)
        for p in pairs:
            self.join(*p)
        if name in SUMS:
            self.same_scale(one.scale, two.scale)
            return one, one_axes
        # a product: one operand's scale is passed on, the other one's is fixed; a fixed one is not passed on
        keep, drop = (two, one) if self.is_fixed(one) and "div" not in name else (one, two)
        self.fix([drop])
        return keep, one_axes | two_axes

    def heads_of(self, label: Labels, out: Any, other: list[Component]) -> Component:
        """Labels for heads: label[b, k] are the atoms that are summed over for each b, and each such row is a head."""
        ids = self.torch.zeros(label.shape[0], dtype=self.torch.int64)
        for b, row in enumerate(label.numpy()):
            key = row.astype(np.int64).tobytes()
            if key not in self.heads:
                self.heads[key] = self.atoms.new(1)
            ids[b] = self.heads[key]
            for atom in set(row.tolist()) - {0}:
                self.put_into_head(atom, self.heads[key])
        distinct = len(set(ids.tolist()))
        for comp in other:
            rows = np.unique(comp.label.numpy(), axis=0)
            if rows.shape[0] < distinct:
                self.shared_axes.update(self.indices[x][:2] for x in values_of(comp.label) if x in self.indices)
        spread = ids.view(-1, 1, 1).expand(out.shape)
        return Component(spread, self.torch.zeros((), dtype=self.torch.int64).expand(out.shape))
