"""How each operation of a model handles labels.

What moves data (views, transposes, slices, concatenations) is done to the labels as it is done to the data. A sum joins
the atoms that it adds. A product with a matrix joins the atoms that it sums over and passes on those of the matrix'
other axis; where it sums over a part of the channels for each head, the head becomes a label. What depends on an index
for another reason (the input, the output, a constant) pins the atoms there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quorumark.align.trace import operations
from quorumark.align.trace.atoms import Trace
from quorumark.align.trace.labels import (
    Component,
    Knob,
    along,
    first_along,
    line_of,
    narrowed,
    pairs_of,
    selected,
    values_of,
)
from quorumark.errors import LayoutError

__all__ = ["REMEDY", "Handlers", "flat"]

REMEDY = "do without groups: verification then works unaligned"


class Handlers(Trace):
    """A trace that is shown operations one by one."""

    def see(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, function: Any) -> None:
        """Labels the output of an operation, and notes what it does to the atoms of its operands."""
        tensors = [x for x in flat((args, kwargs)) if isinstance(x, self.torch.Tensor)]
        zero = self.stays_zero(name, tensors)
        if any(self.of(x) for x in tensors):
            self._see(name, args, kwargs, out, function, tensors)
        self.follow_zeros(name, tensors, out, were=zero)
        if any(id(x) in self.lost for x in tensors):
            self._lose(out)

    def _see(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, function: Any, tensors: Sequence[Any]
    ) -> None:
        self.used.update(map(id, tensors))
        self._unstack(name, args, kwargs, out, tensors)
        self._note_parts(name, args)
        first: Any = args[0] if args else None
        if name not in operations.MOVES | operations.VIEWS | operations.SAME | operations.SIZES | {"cat", "stack"}:
            self._count(name, args, tensors)
        if name in operations.SUMS and any(isinstance(x, (int, float)) and x for x in args[1:2]):
            self.fix(self.of(first))  # x + 1
        if name in operations.SAME:
            self.label(_first_of(out), self.of(first))
        elif name in operations.VIEWS:
            self.label(out, [c.map(lambda x: x.reshape(out.shape)) for c in self.of(first)])
        elif name in operations.MOVES:
            self._move(args, kwargs, out, function)
        elif name == "cat":
            self._cat(first, args[1] if len(args) > 1 else kwargs.get("dim", 0), out)
        elif name == "stack":
            self._stack(first, args[1] if len(args) > 1 else kwargs.get("dim", 0), out)
        elif name in operations.HOMOGENEOUS:
            self.label(out, self.of(first))
        elif name in operations.UNARY:
            self.fix(self.of(first))
            self.label(out, self.unscaled(self.of(first)))
        elif name in operations.SUMS or name in operations.PRODUCTS or name in operations.MIXES:
            self.label(out, self.elementwise(tensors, tuple(out.shape), name))
        elif name in ("mm", "bmm"):
            self.label(out, self._matmul(args[0], args[1], out))
        elif name in ("mv", "dot"):
            self._vector_product(name, args[0], args[1], out)
        elif name == "_prelu_kernel":
            self.fix(self.of(args[1]))
            self.label(out, self.elementwise([first, args[1]], tuple(out.shape), "mul"))
        elif name == "glu":
            self._gated(first, args[1] if len(args) > 1 else -1, out)
        elif name == "_weight_norm_interface":
            self.fix(self.of(first))
            self.label(out[0], self.elementwise([first, args[1]], tuple(out[0].shape), "mul"))
        elif name in ("addmm", "baddbmm"):
            product = out.detach().clone()
            self.label(product, self._matmul(args[1], args[2], out))
            if self.is_zero(args[1]) or self.is_zero(args[2]):
                self.are_zero(product)
            self.label(out, self.elementwise([args[0], product], tuple(out.shape), "add"))
        elif name == "convolution":
            self._convolution(args, out)
        elif name in operations.NORMS:
            self._batch_norm(name, args, out[0])
        elif name == "native_layer_norm":
            self.fix(self.of(first))
            self._affine(self.unscaled(self.of(first)), args[2], args[3], out[0], (-1,))
        elif name == "native_group_norm":
            comps = self.of(first)
            self._norm_groups(comps, int(args[6]))
            self.fix(comps)
            shape = (-1,) + (1,) * (out[0].dim() - 2)
            self._affine(self.unscaled(comps), args[1], args[2], out[0], shape)
        elif name == "embedding":
            for comp in self.of(first):
                if 0 in comp.axes():
                    self.pin(comp)
            columns = [c for c in self.of(first) if 1 in c.axes()]
            self.label(out, [c.map(lambda x: x[0].expand(out.shape)) for c in columns])
        elif name in operations.REDUCTIONS:
            self._reduce(name, args, kwargs, out)
        elif name in operations.POOLS:
            self._pool(self.of(first), _first_of(out), name)
        elif name in operations.SIZES | operations.ZEROS:
            return
        elif name in operations.ORDERS:
            self._order(name, args, kwargs, out)
        elif name in operations.ADDS_AT:
            self._add_at(name, args, out)
        elif name == "copy_" and first._base is None:
            self.label(out, self.elementwise([args[1]], tuple(out.shape), "add"))
        else:
            self._unknown(name, tensors, out, function)

    def _note_parts(self, name: str, args: Sequence[Any]) -> None:
        """Weights that are read in parts along their first axis, or as a stack of matrices."""
        if name in operations.PARTS and (len(args) < 3 or args[2] == 0):
            self.apart.update(self.names[id(x)] for x in args[:1] if id(x) in self.names and x.dim() > 1)
        if name in ("bmm", "baddbmm"):
            self.apart.update(self.names[id(x)] for x in args if id(x) in self.names)

    def _unknown(self, name: str, tensors: Sequence[Any], out: Any, function: Any) -> None:
        """An operation that is not understood: what touches it cannot move."""
        self.unknown.add(name)
        written = [a for a in function._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        touched = list(tensors)
        if written:  # what shares the memory changes as well
            memory = {x.untyped_storage().data_ptr() for x in tensors}
            touched += [x for x in self.kept_alive if x.untyped_storage().data_ptr() in memory]
        for comp in (c for x in touched for c in self.of(x)):
            self.pin(comp, held=False)
        for x in flat(out):
            if isinstance(x, self.torch.Tensor):
                self.label(x, [])
        self._lose(out)

    def _lose(self, out: Any) -> None:
        """What has no labels, but not because it comes from the inputs."""
        for x in flat(out):
            if isinstance(x, self.torch.Tensor) and not self.of(x):
                self.lost.add(id(x))
                self.kept_alive.append(x)

    def _vector_product(self, name: str, one: Any, two: Any, out: Any) -> None:
        """A matrix times a vector, or two vectors."""
        matrix, column = self._reshaped(one, one.reshape(-1, one.shape[-1])), self._reshaped(two, two.reshape(-1, 1))
        product = out.detach().reshape(-1, 1).clone()
        found = self._matmul(matrix, column, product)
        self.label(out, [c.map(lambda x: x.reshape(out.shape)) for c in found] if name == "mv" else [])

    def _reshaped(self, tensor: Any, seen: Any) -> Any:
        """The same numbers in another shape, with the same labels."""
        view = seen.detach().clone()
        self.label(view, [c.map(lambda x: x.reshape(view.shape)) for c in self.of(tensor)])
        return view

    def _gated(self, x: Any, dim: int, out: Any) -> None:
        """a·σ(b), a and b the halves of x along an axis."""
        halves = [half.detach().clone() for half in x.chunk(2, dim)]
        for number, half in enumerate(halves):
            self.label(half, [c.map(lambda y, n=number: y.chunk(2, dim)[n]) for c in self.of(x)])  # type: ignore[misc]
        self.fix(self.of(halves[1]))
        self.label(halves[1], self.unscaled(self.of(halves[1])))
        self.label(out, self.elementwise(halves, tuple(out.shape), "mul"))

    def _norm_groups(self, comps: list[Component], count: int) -> None:
        """Channels are normalised together with those of their norm group, which moves as a whole."""
        for comp in comps:
            if comp.axes() - {1}:
                self.pin(comp)
            line = line_of(1)(comp.label)
            if count == 1 or count == len(line):
                continue
            rows = line.reshape(count, -1)
            self.heads_of(rows, self.torch.empty(count, 1, 1), [])

    def _order(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """What depends on the order along one axis: atoms there cannot move, others are passed on."""
        x, place = args[0], 2 if name in ("topk", "kthvalue") else 1
        dim = kwargs.get("dim", args[place] if len(args) > place else -1)
        outs = list(out) if isinstance(out, (list, tuple)) else [out]
        found = []
        for comp in self.of(x):
            if dim % x.dim() in comp.axes():
                self.pin(comp, held=False)
            else:
                self.fix([comp])
                (passed,) = self.unscaled([comp])
                found.append(passed.map(first_along(dim % x.dim(), tuple(outs[0].shape))))
        for o in outs:
            self.label(o, found)

    def _add_at(self, name: str, args: Sequence[Any], out: Any) -> None:
        """Values are added to, or put at, some indices of a tensor: what runs along other axes is joined."""
        base = args[0]
        if "put" in name:
            indices, values = args[1], args[2]
            ahead = [index is not None for index in indices]
            used = sum(i.dim() if i.dtype == self.torch.bool else 1 for i in indices if i is not None)
            axes = set(range(used)) if all(ahead) else set(range(out.dim()))
        else:
            axes, values = {args[1] % out.dim()} if "index" in name else set(range(out.dim())), args[3]
        placed = []
        for comp in self.of(values):
            shifted = {a + out.dim() - values.dim() for a in comp.axes()}
            if shifted & axes:
                self.pin(comp, held=False)
                continue
            line = comp.label, comp.scale
            for a in range(values.dim()):
                if a + out.dim() - values.dim() in axes:
                    line = tuple(y.narrow(a, 0, min(1, y.shape[a])) for y in line)
            if all(y.numel() for y in line):
                extra = max(0, values.dim() - out.dim())
                placed.append(Component(*(y.reshape(y.shape[extra:]).expand(out.shape) for y in line)))
        for comp in self.of(base):
            if comp.axes() & axes:
                self.pin(comp, held=False)
        added = out.detach().clone()
        self.label(added, placed)
        found = placed if self.is_zero(base) else self.elementwise([base, added], tuple(out.shape), "add")
        self.label(out, found)

    def _count(self, name: str, args: Sequence[Any], tensors: Sequence[Any]) -> None:
        """Notes which atoms go through an operation that computes something, and whether it is linear."""
        self.operation_count += 1
        by_number = name in operations.PRODUCTS and all(isinstance(x, (int, float)) or not x.dim() for x in args[1:2])
        linear = name in operations.LINEAR or by_number
        for comp in (c for x in tensors for c in self.of(x)):
            for atom in values_of(comp.label):
                self.operations_of[atom].add(self.operation_count)
                if not linear:
                    self.nonlinear.add(atom)

    def _move(self, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, function: Any) -> None:
        outs: list[Any] = list(out) if isinstance(out, (list, tuple)) else [out]
        given: list[list[Component]] = [[] for _ in outs]
        in_place = function._schema.name.endswith("_")
        for comp in self.of(args[0]):
            moved = []
            for labels in (comp.label, comp.scale):
                result: Any
                if "constant_pad_nd" in str(function):
                    result = self.torch.nn.functional.pad(labels, args[1])
                else:  # an operation in place must not move the labels of others
                    result = function(labels.clone() if in_place else labels, *args[1:], **kwargs)
                moved.append(list(result) if isinstance(result, (list, tuple)) else [result])
            for components, label, scale in zip(given, *moved, strict=True):
                components.append(Component(label, scale))
        for tensor, comps in zip(outs, given, strict=True):
            self.label(tensor, comps)

    def _cat(self, tensors: Sequence[Any], dim: int, out: Any) -> None:
        """Joins components that run along the same axes; a part without one has no atoms there."""
        dim = dim % out.dim()
        rows: list[list[Component | None]] = []
        keys: list[frozenset[int]] = []
        for at, tensor in enumerate(tensors):
            for comp in self.of(tensor):
                axes = comp.axes()
                free = [i for i, k in enumerate(keys) if (k & axes or not (k | axes) - {dim}) and rows[i][at] is None]
                if not free:
                    keys.append(axes)
                    rows.append([None] * len(tensors))
                    free = [len(keys) - 1]
                keys[free[0]] |= axes
                rows[free[0]][at] = comp
        zeros = [self.torch.zeros((), dtype=self.torch.int64).expand(t.shape) for t in tensors]
        found = []
        for key, row in zip(keys, rows, strict=True):
            if dim not in key:
                self._fill_zeros(tensors, row, dim)
            if None in row and key - {dim}:  # another part has no atoms along the same axis
                for part in row:
                    if part is not None:
                        self.pin(part)
            labels = [z if c is None else c.label for c, z in zip(row, zeros, strict=True)]
            scales = [z if c is None else c.scale for c, z in zip(row, zeros, strict=True)]
            found.append(Component(self.torch.cat(labels, dim), self.torch.cat(scales, dim)))
        if any(set(c.axes()) - {dim} for t in tensors for c in self.of(t)):
            self.stacked[id(out)] = dim
        self.label(out, found)

    def _join_stacked(self, tensor: Any, dim: int) -> None:
        """Parts that were put one after the other share the atoms that run along another axis, once all are read."""
        for comp in self.of(tensor):
            axes = comp.axes()
            if dim in axes and axes - {dim}:
                base = comp.label.narrow(dim, 0, 1).expand(comp.label.shape)
                for one, two in pairs_of(base, comp.label):
                    self.join(one, two)
                scale = comp.scale.narrow(dim, 0, 1).expand(comp.scale.shape)
                self.same_scale(scale, comp.scale)
                comp.label, comp.scale = base, scale

    def _unstack(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, tensors: Sequence[Any]
    ) -> None:
        """Before parts that were put together are read: all at once they share atoms, one by one they do not."""
        for tensor in tensors:
            dim = self.stacked.get(id(tensor))
            if dim is None:
                continue
            along = kwargs.get("dim", next((a for a in args[1:2] if isinstance(a, int)), 0))
            if name in operations.APART and along % tensor.dim() == dim:
                if name in ("slice", "split", "narrow"):
                    self.stacked.update({id(x): dim for x in flat(out)})
            else:
                self._join_stacked(tensor, self.stacked.pop(id(tensor)))

    def _fill_zeros(self, tensors: Sequence[Any], row: list[Component | None], dim: int) -> None:
        """Parts that are 0 can have the atoms of the others."""
        there = next(part for part in row if part is not None)
        for at, tensor in enumerate(tensors):
            if row[at] is None and self.is_zero(tensor):
                row[at] = there.map(first_along(dim, tuple(tensor.shape)))

    def _stack(self, tensors: Sequence[Any], dim: int, out: Any) -> None:
        dim = dim % out.dim()
        parts = []
        for tensor in tensors:
            part = tensor.detach().unsqueeze(dim)
            self.label(part, [c.map(lambda x: x.unsqueeze(dim)) for c in self.of(tensor)])
            if self.is_zero(tensor):
                self.are_zero(part)
            parts.append(part)
        self._cat(parts, dim, out)

    def _matmul(self, a: Any, b: Any, out: Any) -> list[Component]:
        """out[…, i, j] = Σ_k a[…, i, k]·b[…, k, j]."""
        dim = out.dim()
        if self.is_zero(a) or self.is_zero(b):  # 0 whatever the other is, so that nothing is learnt about it
            return []
        over_a: list[Component] = []
        over_b: list[Component] = []
        rest: list[Component] = []
        for tensor, over, k, other in ((a, over_a, dim - 1, dim - 2), (b, over_b, dim - 2, dim - 1)):
            for comp in self.of(tensor):
                axes = comp.axes()
                if k not in axes:
                    rest.append(comp.map(first_along(k, tuple(out.shape))))
                elif other in axes:
                    self.pin(comp)
                else:
                    over.append(comp.map(selected(other)))  # […, k]
        for one in over_a:
            for two in over_b:
                for p in pairs_of(one.label, two.label):
                    self.join(*p)
                pairs = pairs_of(one.scale, two.scale)
                self.scales.join(pairs, -1)
                self.scales.fix(values_of(one.scale[two.scale == 0]) + values_of(two.scale[one.scale == 0]))
                self.pin_unmatched(one, two)
        if not (over_a and over_b):
            for comp in [*over_a, *over_b]:
                self.pin(comp, held=id(a) not in self.lost and id(b) not in self.lost)
        heads = [c for c in (over_a or over_b) if dim == 3 and 0 in c.axes()]
        if heads:
            rest.append(self.heads_of(heads[0].label, out, over_b if over_a else []))
        found: list[tuple[Component, frozenset[int]]] = []
        for comp in rest:
            axes = comp.axes()
            for k, (other, others) in enumerate(found):
                if axes & others:
                    found[k] = self.meet(other, others, comp, axes, "mul")
                    break
            else:
                found.append((comp, axes))
        return [c for c, _ in found]

    def _convolution(self, args: Sequence[Any], out: Any) -> None:
        x, weight, bias, transposed, groups = args[0], args[1], args[2], args[6], args[8]
        into, outof = (0, 1) if transposed else (1, 0)
        spatial = list(range(2, out.dim()))
        columns = [c for c in self.of(weight) if into in c.axes()]
        rows = [c for c in self.of(weight) if outof in c.axes()]
        for comp in self.of(weight):
            if comp.axes() & set(spatial):
                self.pin(comp)
        inputs = []
        for comp in self.of(x):
            if comp.axes() - {1}:
                self.pin(comp)
            inputs.append(comp.map(line_of(1)))
        given: list[Component] = []
        produced = [c.map(line_of(outof)) for c in rows]
        if groups == 1:
            taken = [c.map(line_of(into)) for c in columns]
            for one in inputs:
                for two in taken:
                    for p in pairs_of(one.label, two.label):
                        self.join(*p)
                    self.scales.join(pairs_of(one.scale, two.scale), -1)
                    self.scales.fix(values_of(one.scale[two.scale == 0]) + values_of(two.scale[one.scale == 0]))
                    self.pin_unmatched(one, two)
            if not inputs or not taken:
                for comp in [*inputs, *taken]:
                    self.pin(comp, held=id(x) not in self.lost)
            given = produced
        elif groups == x.shape[1] == out.shape[1] and not transposed:  # depthwise: the channels stay what they are
            for one in inputs:
                for two in produced:
                    for p in pairs_of(one.label, two.label):
                        self.join(*p)
            self.fix(inputs)
            given = produced
            if not inputs:
                for comp in produced:
                    self.pin(comp)
        else:
            for comp in [*inputs, *self.of(weight)]:
                self.pin(comp, held=False)
        if bias is not None:
            for one in given:
                for two in self.of(bias):
                    for p in pairs_of(one.label, two.label):
                        self.join(*p)
                    self.same_scale(one.scale, two.scale)
        self.label(out, [c.map(along(1, tuple(out.shape))) for c in given])
        if not given:
            self._lose(out)

    def _batch_norm(self, name: str, args: Sequence[Any], out: Any) -> None:
        x, weight, bias, mean, variance = args[:5]
        shape = (-1,) + (1,) * (out.dim() - 2)
        for comp in self.of(x):
            if comp.axes() - {1}:
                self.pin(comp)
            line = comp.map(line_of(1))
            for statistic, exponent in ((mean, 1), (variance, 2)):
                for other in self.of(statistic):
                    for p in pairs_of(line.label, other.label):
                        self.join(*p)
                    for channel, scale in zip(line.scale.tolist(), other.label.tolist(), strict=True):
                        tensor, axis, index = self.indices[scale]
                        if channel:
                            self.scales.knobs[channel].append(Knob(tensor, axis, index, exponent))
        for statistic in (mean, variance):
            for other in self.of(statistic) if statistic is not None else ():
                self.scales.fix(values_of(other.scale))  # they are scaled with the channel, not alone
                if not any(1 in comp.axes() for comp in self.of(x)):
                    self.pin(other)
        if "no_training" not in name and args[5] and mean is not None:
            raise LayoutError("the model normalises by its batch, so that it cannot be traced: call model.eval() first")
        self._affine(self.unscaled(self.of(x)), weight, bias, out, shape)

    def _affine(self, comps: list[Component], weight: Any, bias: Any, out: Any, shape: tuple[int, ...]) -> None:
        """out = normalised·weight + bias, with weight and bias reshaped to `shape`."""
        current = out.detach().clone()
        self.label(current, comps)
        for tensor, name in ((weight, "mul"), (bias, "add")):
            if tensor is None:
                continue
            seen = tensor.detach().reshape(shape) if len(shape) > 1 else tensor.detach()
            self.label(seen, [c.map(lambda y: y.reshape(shape) if len(shape) > 1 else y) for c in self.of(tensor)])
            after = out.detach().clone()
            self.label(after, self.elementwise([current, seen], tuple(out.shape), name))
            current = after
        self.label(out, self.of(current))

    def _reduce(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        x = args[0]
        dims = kwargs.get("dim", args[1] if len(args) > 1 and isinstance(args[1], (list, tuple, int)) else None)
        if name == "linalg_vector_norm":
            dims = kwargs.get("dim", args[2] if len(args) > 2 else None)
        dims = [dims] if isinstance(dims, int) else list(dims or range(x.dim()))
        dims = sorted(d % x.dim() for d in dims)
        outs = list(out) if isinstance(out, (list, tuple)) else [out]
        kept = outs[0].dim() == x.dim()
        found = []
        for comp in self.of(x):
            axes = comp.axes()
            reduced = comp
            if name not in ("mean", "sum"):
                self.fix([comp])
                reduced = self.unscaled([comp])[0]
            if not axes & set(dims):
                for d in reversed(dims):
                    reduced = reduced.map(narrowed(d) if kept else selected(d))
                found.append(reduced)
                continue
            self.fix([comp])
            if axes - set(dims):
                rest = [a for a in range(x.dim()) if a not in dims]
                rows = comp.label.permute(*rest, *dims).reshape(-1, int(np.prod([x.shape[d] for d in dims])))
                shape = [1 if d in dims else x.shape[d] for d in range(x.dim())] if kept else [x.shape[d] for d in rest]
                heads = self.heads_of(rows, self.torch.empty(rows.shape[0], 1, 1), [])
                found.append(Component(heads.label[:, 0, 0].reshape(shape), heads.scale[:, 0, 0].reshape(shape)))
        for o in outs:
            self.label(o, found)

    def _pool(self, comps: list[Component], out: Any, name: str) -> None:
        spatial = next(n for n in (1, 2, 3) if f"{n}d" in name)
        found = []
        for comp in comps:
            if any(a >= out.dim() - spatial for a in comp.axes()):
                self.pin(comp)
            corner = comp
            for axis in range(out.dim() - spatial, out.dim()):
                corner = corner.map(narrowed(axis))
            found.append(corner.map(lambda y: y.expand(out.shape)))
        self.label(out, found)


def _first_of(out: Any) -> Any:
    return out[0] if isinstance(out, (list, tuple)) else out


def flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [y for x in value for y in flat(x)]
    if isinstance(value, Mapping):
        return [y for x in value.values() for y in flat(x)]
    return [value]
