"""Which weights of a channel can get the other sign together, derived from a second run of the model.

The first element of each group has an unknown sign for every index that it has on an axis. Every number that the model
computes is then multiplied by a product of such signs: a *form*, the set of the signs in the product. A sum needs terms
of the same form, tanh passes a form on, ReLU needs the form 1, and so do the outputs. These are linear equations over
GF(2); their solutions are the signs that can be changed.

LayerNorm and GroupNorm pass on the sign of all channels that they normalise together, not that of each. So the
equations are solved twice: with the form 1 for all that they normalise, for signs that every element has for itself,
and without that, for signs that only all elements of a group can change at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quorumark.align.groups import Axis, Groups, Slot
from quorumark.align.trace import operations
from quorumark.align.trace.handlers import flat
from quorumark.align.trace.zeros import KnownZeros

__all__ = ["SignTrace"]

Forms = Any  # a torch tensor of numbers of forms, of the shape of what they multiply
_Variable = tuple[int, Axis, int]  # group, axis, column


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ODD = _names("neg tanh tanh_ erf sin sign round softshrink hardshrink asinh atan sinh tan asin")
_EVEN = _names("abs square cos cosh")
_LINEAR_POOLS = ("avg_pool", "upsample")


class SignTrace(KnownZeros):
    """The forms of every tensor that was seen, and those that must be 1."""

    def __init__(self, model: Any, groups: Groups, aliases: Mapping[str, Sequence[str]]) -> None:
        import torch

        super().__init__()
        self._torch: Any = torch
        self._groups = groups
        self._table: list[int] = [0]  # forms as sets of bits, by number
        self._numbers: dict[int, int] = {0: 0}
        self._variables: list[_Variable] = []
        self._must_be_one: set[int] = set()
        self._normalised: set[int] = set()  # forms of channels that are normalised together
        self._forms: dict[int, Forms] = {}
        original = {name: first for first, names in aliases.items() for name in names}
        bits = self._bits(original)
        seen: set[int] = set()
        for name, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen and tensor.is_floating_point():
                seen.add(id(tensor))
                self._set(tensor, self._of_parameter(name, tuple(tensor.shape), bits))

    def _bits(self, original: Mapping[str, str]) -> dict[Axis, dict[int, int]]:
        """For each axis, the bit of the unknown sign at an index. Channels that are rotated in pairs have none."""
        mixed = {
            axis: {int(i) for rotates, copies in of for i in copies.reshape(-1) if rotates}
            for axis, of in self._groups.blocks().items()
        }
        found: dict[Axis, dict[int, int]] = {}
        owners: dict[Axis, dict[int, int]] = {}
        for number, group in enumerate(self._groups.groups):  # a group within an element comes after the element's
            for axis, indices in group.axes().items():
                if original.get(axis[0], axis[0]) == axis[0]:
                    for i in indices.reshape(-1).tolist():
                        owners.setdefault(axis, {})[i] = number
        for number, group in enumerate(self._groups.groups):
            for axis, indices in group.axes().items():
                if axis not in owners:
                    continue
                for column in range(indices.shape[1]):
                    line = indices[:, column].tolist()
                    if owners[axis][line[0]] == number and line[0] not in mixed.get(axis, ()):
                        bit = 1 << len(self._variables)
                        self._variables.append((number, axis, column))
                        found.setdefault(axis, {})[line[0]] = bit
        return found

    def _of_parameter(self, name: str, shape: tuple[int, ...], bits: Mapping[Axis, Mapping[int, int]]) -> Forms:
        total = self._torch.zeros((1,) * len(shape), dtype=self._torch.int64)
        for axis, size in enumerate(shape):
            of = bits.get((name, axis))
            if of is not None:
                line = self._torch.tensor([self._number(of.get(i, 0)) for i in range(size)])
                total = self._product(total, line.view([-1 if a == axis else 1 for a in range(len(shape))]))
        return total.expand(shape)

    # --- forms ---

    def _number(self, form: int) -> int:
        if form not in self._numbers:
            self._numbers[form] = len(self._table)
            self._table.append(form)
        return self._numbers[form]

    def _set(self, tensor: Any, forms: Forms) -> None:
        self._forms[id(tensor)] = forms
        self.kept_alive.append(tensor)

    def _of(self, tensor: Any) -> Forms:
        found = self._forms.get(id(tensor))
        if found is None:
            found = self._torch.zeros((1,) * tensor.dim(), dtype=self._torch.int64).expand(tensor.shape)
        return found

    def _shrunk(self, forms: Forms) -> Forms:
        """Without the axes along which nothing differs: they have the length 1."""
        for axis in range(forms.dim()):
            if forms.shape[axis] > 1:
                first = forms.narrow(axis, 0, 1)
                if forms.stride(axis) == 0 or bool((forms == first).all()):
                    forms = first
        return forms

    def _product(self, one: Forms, two: Forms) -> Forms:
        """The forms of products of numbers with these forms."""
        shape = self._torch.broadcast_shapes(one.shape, two.shape)
        one, two = self._torch.broadcast_tensors(self._shrunk(one), self._shrunk(two))
        pairs, places = self._torch.unique((one << 32) | two, return_inverse=True)
        numbers = [self._number(self._table[p >> 32] ^ self._table[p & 0xFFFFFFFF]) for p in pairs.tolist()]
        return self._torch.tensor(numbers, dtype=self._torch.int64)[places].reshape(one.shape).expand(shape)

    def _require(self, forms: Forms) -> None:
        """These must be 1."""
        self._must_be_one |= self._kinds(forms)

    def _kinds(self, forms: Forms) -> set[int]:
        return {self._table[n] for n in self._torch.unique(self._shrunk(forms)).tolist()}

    def _same(self, one: Forms, two: Forms) -> None:
        self._require(self._product(one, two))

    def _same_along(self, forms: Forms, dims: Sequence[int]) -> Forms:
        """Numbers that are summed along some axes must have the same form, which is returned, with length 1 there."""
        first = forms
        for dim in dims:
            first = first.narrow(dim, 0, 1)
        self._same(forms, first)
        return first

    def _solutions(self, forms: set[int]) -> list[int]:
        """A basis of the signs that can be changed if these forms are 1, as sets of bits."""
        rows: dict[int, int] = {}  # by their highest bit, which no other row has
        for form in sorted(forms):
            for pivot, row in rows.items():
                if form >> pivot & 1:
                    form ^= row
            if form:
                pivot = form.bit_length() - 1
                for other, row in rows.items():
                    if row >> pivot & 1:
                        rows[other] = row ^ form
                rows[pivot] = form
        free = [bit for bit in range(len(self._variables)) if bit not in rows]
        return [1 << bit | sum(1 << pivot for pivot, row in rows.items() if row >> bit & 1) for bit in free]

    def generators(self) -> list[tuple[int, tuple[Slot, ...], bool]]:
        """The signs of one group: its number, the indices that get the other sign, and whether of all elements only."""
        each = self._solutions(self._must_be_one | self._normalised)
        span: dict[int, int] = {}
        for solution in each:
            _insert(span, solution)
        every = [solution for solution in self._solutions(self._must_be_one) if _insert(span, solution)]
        found = []
        for solution, whole in [*((s, False) for s in each), *((s, True) for s in every)]:
            variables = [v for bit, v in enumerate(self._variables) if solution >> bit & 1]
            if len({number for number, _, _ in variables}) == 1:
                columns: dict[Axis, set[int]] = {}
                for _, axis, column in variables:
                    columns.setdefault(axis, set()).add(column)
                number = variables[0][0]
                found.append((number, self._slots(number, columns), whole))
        return found

    def _slots(self, number: int, columns: Mapping[Axis, set[int]]) -> tuple[Slot, ...]:
        found = []
        taken: dict[Axis, int] = {}
        for slot in self._groups.groups[number].slots:
            axis = slot.tensor, slot.axis
            first = taken.get(axis, 0)
            taken[axis] = first + slot.count
            mine = [j for j in range(slot.count) if first + j in columns.get(axis, ())]
            if len(mine) == slot.count:
                found.append(slot)
            else:
                found += [Slot(*axis, slot.offset + j * slot.step, slot.stride, 1, 1) for j in mine]
        return tuple(sorted(found))

    # --- operations ---

    def see(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, function: Any) -> None:
        """Finds the forms of what an operation computes, and what it requires of its operands."""
        tensors = [x for x in flat((args, kwargs)) if isinstance(x, self._torch.Tensor)]
        zero = self.stays_zero(name, tensors)
        if any(id(x) in self._forms for x in tensors) and not zero:
            found = self._result(name, args, kwargs, out, function, tensors)
            outs = [x for x in flat(out) if isinstance(x, self._torch.Tensor)]
            listed = found if isinstance(found, list) else [found] + [None] * (len(outs) - 1)
            for tensor, forms in zip(outs, listed, strict=False):
                if forms is not None and tensor.is_floating_point():
                    self._set(tensor, forms.expand(tensor.shape))
        self.follow_zeros(name, tensors, out, were=zero)

    def finish(self, outs: Sequence[Any]) -> None:
        """The outputs of the model keep their signs."""
        for out in outs:
            self._require(self._of(out))

    def _result(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, function: Any, tensors: Sequence[Any]
    ) -> Any:
        x: Any = args[0] if args else None
        if name in operations.SAME or name in _ODD or (name in ("hardtanh", "hardtanh_") and _is_odd(args, kwargs)):
            return self._of(x)
        if name in operations.VIEWS:
            return self._of(x).reshape(out.shape)
        if name in operations.MOVES:
            return self._moved(name, args, kwargs, out, function)
        if name in ("cat", "stack"):
            return self._joined(x, args, kwargs, out, stacked=name == "stack")
        if name in _EVEN or (name == "pow" and args[1] == 2):
            return None
        if name in operations.SUMS:
            return self._sum(args, tensors)
        if name in operations.PRODUCTS:
            found = self._of(x)
            return self._product(found, self._of(args[1])) if isinstance(args[1], self._torch.Tensor) else found
        if name in ("mm", "bmm"):
            return self._matmul(self._of(x), self._of(args[1]))
        if name in ("addmm", "baddbmm"):
            if self.is_zero(args[1]) or self.is_zero(args[2]):
                return self._of(x).expand(out.shape)
            found = self._matmul(self._of(args[1]), self._of(args[2]))
            self._same(found, self._of(x))
            return found
        if name == "mv":
            return self._matmul(self._of(x), self._of(args[1])[:, None])[:, 0]
        if name == "convolution":
            return self._convolution(args, out)
        if name in operations.NORMS:
            if args[3] is not None:  # otherwise it normalises by what it is given
                self._same(self._line(self._of(x), 1), self._of(args[3]))
                self._require(self._of(args[4]))
            return self._affine(self._of(x), args[1], args[2], 1)
        if name in ("native_layer_norm", "native_group_norm"):
            layer = name == "native_layer_norm"
            weight, bias = args[2:4] if layer else args[1:3]
            self._normalised |= self._kinds(self._of(x))
            return self._affine(self._of(x), weight, bias, x.dim() - 1 if layer else 1)
        if name == "embedding":
            forms = self._shrunk(self._of(x))
            return forms[0] if forms.shape[0] == 1 else forms[args[1]]
        if name in operations.REDUCTIONS:
            return self._reduced(name, args, kwargs, out)
        if name in operations.POOLS and any(kind in name for kind in _LINEAR_POOLS):
            spatial = next(n for n in (1, 2, 3) if f"{n}d" in name)
            return self._same_along(self._of(x), range(x.dim() - spatial, x.dim()))
        if name == "glu":
            one, two = self._of(x).chunk(2, args[1] if len(args) > 1 else -1)
            self._require(two)
            return one
        if name == "_weight_norm_interface":
            return self._product(self._of(x), self._of(args[1]))
        if name == "cumsum":
            return self._same_along(self._of(x), [args[1] % x.dim()])
        if name in ("index_add", "index_add_"):
            forms = self._same_along(self._of(args[3]), [args[1] % out.dim()])
            if not self.is_zero(x):
                self._same(forms, self._of(x))
            return forms
        if name not in operations.SIZES | operations.ZEROS:
            for tensor in tensors:  # ReLU, softmax, comparisons, and all that is not understood
                self._require(self._of(tensor))
        return None

    def _line(self, forms: Forms, axis: int) -> Forms:
        """The forms along one axis; they must not differ along others."""
        others = [a for a in range(forms.dim()) if a != axis]
        return self._same_along(forms, others).reshape(-1)

    def _affine(self, forms: Forms, weight: Any, bias: Any, axis: int) -> Forms:
        """forms·weight + bias, which run along one axis."""
        shape = [-1 if a == axis else 1 for a in range(forms.dim())]
        found = forms if weight is None else self._product(forms, self._of(weight).reshape(shape))
        if bias is not None:
            self._same(found, self._of(bias).reshape(shape))
        return found

    def _moved(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, function: Any) -> Any:
        forms = self._of(args[0])
        if "pad" in name:
            small = self._shrunk(forms)
            padded = [a for a in range(forms.dim()) if forms.shape[a] != out.shape[a]]
            if all(small.shape[a] == 1 for a in padded):
                for a in padded:
                    forms = forms.narrow(a, 0, 1)
                return forms.expand(out.shape)
            self._require(forms)
            return None
        moved = function(forms.clone() if name.endswith("_") else forms, *args[1:], **kwargs)
        return list(moved) if isinstance(moved, (list, tuple)) else moved

    def _joined(
        self, parts: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, *, stacked: bool
    ) -> Any:
        dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.dim()
        forms = [self._of(part).unsqueeze(dim) if stacked else self._of(part) for part in parts]
        there = next(f for f, part in zip(forms, parts, strict=True) if not self.is_zero(part))
        forms = [
            there.narrow(dim, 0, 1).expand(f.shape) if self.is_zero(part) else f
            for f, part in zip(forms, parts, strict=True)
        ]
        return self._torch.cat(forms, dim)

    def _sum(self, args: Sequence[Any], tensors: Sequence[Any]) -> Forms:
        added = [t for t in tensors if not self.is_zero(t)]
        found = self._of(added[0])
        if any(isinstance(x, (int, float)) and x for x in args[:2]):
            self._require(found)
        for other in added[1:]:
            self._same(found, self._of(other))
        shape = self._torch.broadcast_shapes(*(t.shape for t in tensors))
        return found.expand(shape)

    def _matmul(self, one: Forms, two: Forms) -> Forms:
        """Σ_k a[…, i, k]·b[…, k, j]: the same form for all k."""
        shape = (*self._torch.broadcast_shapes(one.shape[:-2], two.shape[:-2]), one.shape[-2], two.shape[-1])
        each = self._product(self._shrunk(one).unsqueeze(-1), self._shrunk(two).unsqueeze(-3))
        return self._same_along(each, [each.dim() - 2]).squeeze(-2).expand(shape)

    def _convolution(self, args: Sequence[Any], out: Any) -> Forms:
        x, weight, bias, transposed, count = args[0], args[1], args[2], args[6], args[8]
        given = self._line(self._of(x), 1)
        kernel = self._same_along(self._of(weight), range(2, weight.dim())).reshape(weight.shape[:2])
        if transposed:
            kernel = kernel.reshape(count, weight.shape[0] // count, -1)
        else:
            kernel = kernel.reshape(count, -1, weight.shape[1]).transpose(1, 2)
        given = given.reshape(count, 1, -1) if given.numel() > 1 else given.reshape(1, 1, 1)
        given = given.expand(count, 1, kernel.shape[1])
        found = self._matmul(given, kernel).reshape(-1)
        if bias is not None:
            self._same(found, self._of(bias))
        return found.view(1, -1, *[1] * (out.dim() - 2))

    def _reduced(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Any:
        x = args[0]
        if name == "linalg_vector_norm":
            return None
        if name not in ("mean", "sum", "var", "std", "var_mean"):
            self._require(self._of(x))
            return None
        dims = kwargs.get("dim", args[1] if len(args) > 1 and isinstance(args[1], (list, tuple, int)) else None)
        dims = [dims] if isinstance(dims, int) else list(dims or range(x.dim()))
        dims = sorted(d % x.dim() for d in dims)
        forms = self._same_along(self._of(x), dims)
        if _first(out).dim() != x.dim():
            for d in reversed(dims):
                forms = forms.squeeze(d)
        if name == "var_mean":
            return [None, forms]
        return forms if name in ("mean", "sum") else None


def _insert(span: dict[int, int], vector: int) -> bool:
    """Adds a vector to a space over GF(2), kept by highest bits; whether it was not in it already."""
    while vector:
        pivot = vector.bit_length() - 1
        if pivot not in span:
            span[pivot] = vector
            return True
        vector ^= span[pivot]
    return False


def _first(out: Any) -> Any:
    return out[0] if isinstance(out, (list, tuple)) else out


def _is_odd(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    low = kwargs.get("min_val", args[1] if len(args) > 1 else -1.0)
    high = kwargs.get("max_val", args[2] if len(args) > 2 else 1.0)
    return bool(low == -high)
