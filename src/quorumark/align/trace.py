"""Which channels of a model belong together, found from the operations that it runs (docs/alignment.md, "Groups").

A model is run once on an example, and every operation is followed with labels instead of numbers: each index of each
axis of each parameter is an atom, and every element of an activation carries the atom of the channel that it belongs
to. What moves data about (views, transposes, slices, concatenations) is done to the labels as it is done to the data.
A sum joins the atoms that it adds; a product with a matrix joins the atoms that it runs over and hands on those of the
matrix' other axis; where it runs over a part of the channels for each head, the head becomes a label of its own. What
depends on an index for another reason (the input, the output, a constant) pins the atoms there.

Atoms that were joined must move together; those that then look alike, and are not pinned, may be permuted among each
other: a group. The same walk follows which channels may be scaled, against which others, without a change of the
function. A group that nothing but sums and products with matrices happened to, and whose channels may be scaled, may be
mixed by any invertible matrix; the queries and keys of a head that constants tell apart may be turned in pairs, if they
are turned by positions. A group whose gains may be scaled against what reads them is a residual stream that may be
turned, if the norms are RMSNorms. All is checked in the end: on a copy with random weights, permuted, mixed, turned and
rescaled, the output must stay.

Needs the extra `torch`; a verifier never comes here.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from quorumark.align.groups import Group, Groups, Mixing, Slot, Stream
from quorumark.errors import InputError, LayoutError, MissingDependencyError

__all__ = ["Knob", "Scaling", "derive_groups", "derive_scalings", "derive_signs"]

Labels = Any  # a torch tensor of whole numbers, of the shape of what it labels
_REMEDY = "verification works without groups, unaligned"
_EXACT = 1e-6  # of the output: what a change may do that leaves the function as it is


@dataclass(frozen=True, order=True)
class Knob:
    """A place that is multiplied by s^exponent: one index of one axis of a tensor."""

    tensor: str
    axis: int
    index: int
    exponent: int


Scaling = tuple[Knob, ...]
"""Places that may be scaled together, by any s > 0, without a change of the function."""


def derive_groups(model: Any, example: Any) -> Groups:
    """The coupled groups of a torch module, run on an example: a tensor, a tuple of them, or keyword arguments.

    A model whose operations are not understood, or whose output does not survive a permutation of what was found, is a
    LayoutError. Of what may be mixed or turned only that is kept which the output survives.
    """
    trace = _traced(model, example)
    groups = _grouped(trace)
    _check(model, example, lambda state, rng: _shuffled(state, groups, rng), "permuted")
    mixings = _sound_mixings(model, example, _mixings(trace, groups))
    pairs: list[Mixing] = []
    for halves in (True, False):
        pairs = pairs or _sound_mixings(model, example, _turning(trace, halves=halves))
    every = tuple(sorted([*mixings, *pairs], key=lambda m: (m.slots, m.against)))
    return Groups(groups.groups, every, _stream(model, example, trace, groups))


def derive_scalings(model: Any, example: Any) -> tuple[Scaling, ...]:
    """What may be rescaled: across ReLU, BatchNorm, the gains of norms, queries and keys, values and outputs."""
    scalings = _traced(model, example).scales.found()
    _check(model, example, lambda state, rng: _rescaled(state, scalings, rng), "rescaled")
    return scalings


def derive_signs(model: Any, example: Any) -> tuple[Scaling, ...]:
    """What may get the other sign: scalings by s = −1 that are tried and leave the output as it is.

    A BatchNorm gives its channel's sign back, so there its gain goes along.
    """
    kinds: dict[tuple[tuple[str, int, int], ...], list[Scaling]] = {}
    for scaling in derive_scalings(model, example):
        kinds.setdefault(tuple((k.tensor, k.axis, k.exponent) for k in scaling), []).append(scaling)
    found: list[Scaling] = []
    stirred = _each_tensor(example, _noise)  # of zeros, signs would change nothing
    for alike in kinds.values():
        for tried in (alike, [(*scaling, *_gains(scaling)) for scaling in alike]):
            odd = [tuple(k for k in scaling if k.exponent % 2) for scaling in tried]
            if _error(model, stirred, lambda state, rng, odd=odd: _other_signs(state, odd, rng)) < _EXACT:
                found += odd
                break
    return tuple(found)


def _gains(scaling: Scaling) -> Iterator[Knob]:
    """Of the BatchNorms whose variances are in it."""
    for knob in scaling:
        layer, _, name = knob.tensor.rpartition(".")
        if name == "running_var":
            yield Knob(f"{layer}.weight" if layer else "weight", 0, knob.index, 1)


def _other_signs(state: dict[str, Any], signs: Sequence[Scaling], rng: np.random.Generator) -> dict[str, Any]:
    """Half of them, at least one."""
    for number, scaling in enumerate(signs):
        if number == 0 or rng.integers(2):
            for knob in scaling:
                if knob.tensor in state:
                    state[knob.tensor].select(knob.axis, knob.index).neg_()
    return state


# --- atoms ------------------------------------------------------------------------------------------------


class _Joined:
    """Disjoint sets of whole numbers."""

    def __init__(self) -> None:
        self.above: list[int] = [0]

    def more(self, count: int) -> int:
        """New numbers; returns the first."""
        first = len(self.above)
        self.above.extend(range(first, first + count))
        return first

    def root(self, x: int) -> int:
        above = self.above
        while above[x] != x:
            above[x] = above[above[x]]
            x = above[x]
        return x

    def join(self, x: int, y: int) -> tuple[int, int]:
        """The root that stays and the one that goes (the same if they were one)."""
        x, y = self.root(x), self.root(y)
        x, y = min(x, y), max(x, y)
        self.above[y] = x
        return x, y


class _Scales:
    """Numbers that stand for scales: joined as equal or inverse, fixed to 1, with the places that they multiply."""

    def __init__(self) -> None:
        self.above, self.sign = [0], [1]
        self.fixed: set[int] = {0}
        self.knobs: dict[int, list[Knob]] = defaultdict(list)

    def more(self, count: int) -> int:
        first = len(self.above)
        self.above.extend(range(first, first + count))
        self.sign.extend([1] * count)
        return first

    def root(self, x: int) -> tuple[int, int]:
        sign = 1
        while self.above[x] != x:
            sign, x = sign * self.sign[x], self.above[x]
        return x, sign

    def fix(self, labels: Iterable[int]) -> None:
        self.fixed.update(self.root(x)[0] for x in labels)

    def join(self, pairs: Iterable[tuple[int, int]], sign: int) -> None:
        """s_x = s_y^sign."""
        for one, two in pairs:
            (x, a), (y, b) = self.root(one), self.root(two)
            if x == y:
                if a * b != sign:
                    self.fixed.add(x)  # s = 1/s
                continue
            x, y = min(x, y), max(x, y)
            self.above[y], self.sign[y] = x, a * b * sign
            if y in self.fixed:
                self.fixed.add(x)

    def found(self) -> tuple[Scaling, ...]:
        together: dict[int, list[Knob]] = defaultdict(list)
        for label, knobs in self.knobs.items():
            root, sign = self.root(label)
            if root not in self.fixed:
                together[root] += [Knob(k.tensor, k.axis, k.index, sign * k.exponent) for k in knobs]
        return tuple(tuple(sorted(knobs)) for _, knobs in sorted(together.items()) if len(knobs) > 1)


@dataclass
class _Comp:
    """One way in which a tensor's elements belong to channels: their atoms, and their scales (0 for none)."""

    label: Labels
    scale: Labels

    def map(self, function: Callable[[Labels], Labels]) -> _Comp:
        return _Comp(function(self.label), function(self.scale))

    def axes(self) -> frozenset[int]:
        """The axes along which the atoms differ."""
        label = self.label
        return frozenset(
            a
            for a in range(label.dim())
            if label.shape[a] > 1 and label.stride(a) != 0 and bool((label != label.narrow(a, 0, 1)).any())
        )


def _small(*labels: Labels) -> list[Labels]:
    """The same labels without the axes along which all of them are only repeated."""
    for axis in range(labels[0].dim()):
        if all(x.stride(axis) == 0 for x in labels):
            labels = tuple(x.narrow(axis, 0, min(1, x.shape[axis])) for x in labels)
    return list(labels)


def _pairs(one: Labels, two: Labels) -> list[tuple[int, int]]:
    """Which numbers meet which, without those that meet nothing (0)."""
    one, two = _small(one, two)
    one, two = one.reshape(-1).numpy(), two.reshape(-1).numpy()
    both = np.unique((one.astype(np.int64) << 32) | two.astype(np.int64))
    return [(int(p >> 32), int(p & 0xFFFFFFFF)) for p in both if p >> 32 and p & 0xFFFFFFFF]


def _along(axis: int, shape: tuple[int, ...]) -> Callable[[Labels], Labels]:
    """Labels of an axis for all elements."""
    return lambda x: x.view([-1 if a == axis else 1 for a in range(len(shape))]).expand(shape)


def _line(axis: int) -> Callable[[Labels], Labels]:
    """The labels along an axis, where they differ along no other."""
    return lambda x: x.movedim(axis, 0).flatten(1)[:, 0] if x.dim() > 1 else x


def _narrowed(axis: int) -> Callable[[Labels], Labels]:
    return lambda x: x.narrow(axis, 0, 1)


def _selected(axis: int) -> Callable[[Labels], Labels]:
    return lambda x: x.select(axis, 0)


def _without(axis: int, shape: tuple[int, ...]) -> Callable[[Labels], Labels]:
    """The first labels along an axis, for all of a new shape."""
    return lambda x: x.narrow(axis, 0, 1).expand(shape)


def _values(labels: Labels) -> list[int]:
    return [int(x) for x in np.unique(_small(labels)[0].numpy()) if x]


# --- the walk ---------------------------------------------------------------------------------------------


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MOVES = _names(
    "permute transpose t expand squeeze unsqueeze slice select split split_with_sizes unbind index index_select flip "
    "roll constant_pad_nd repeat unfold diagonal pixel_shuffle channel_shuffle movedim narrow tensor_split"
)
_VIEWS = _names("view _unsafe_view reshape _reshape_alias")
_SAME = _names("clone detach alias contiguous _to_copy lift_fresh dropout native_dropout to")
_HOMOGENEOUS = _names("relu relu_ leaky_relu leaky_relu_ neg abs")  # f(s·x) = s·f(x) for s > 0
_UNARY = _names(
    "gelu gelu_ silu silu_ sigmoid sigmoid_ tanh tanh_ exp log sqrt rsqrt reciprocal clamp clamp_min clamp_max "
    "hardtanh hardtanh_ hardswish hardswish_ hardsigmoid elu elu_ softplus mish mish_ pow square sin cos erf _softmax "
    "_safe_softmax _log_softmax"
)
_SUMS = _names("add add_ sub sub_ rsub")
_PRODUCTS = _names("mul mul_ div div_")
_LINEAR = _SUMS | _names("mm bmm addmm baddbmm convolution neg")
_MIXES = _names(
    "where masked_fill masked_fill_ maximum minimum eq ne lt le gt ge logical_and logical_or logical_not bitwise_and "
    "bitwise_or bitwise_not addcmul lerp"
)
_REDUCTIONS = _names("mean sum amax amin var std var_mean linalg_vector_norm any all logsumexp")
_POOLS = _names(
    "max_pool2d_with_indices max_pool2d avg_pool2d _adaptive_avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d "
    "max_pool1d_with_indices avg_pool1d upsample_nearest2d upsample_bilinear2d"
)
_NORMS = _names("native_batch_norm _native_batch_norm_legit_no_training _native_batch_norm_legit")
_SIZES = _names("_local_scalar_dense is_same_size equal sym_size empty_like zeros_like")  # no data comes out


class _Trace:
    """What the walk knows: the labels of every tensor that was seen, and what was joined and pinned."""

    def __init__(self, model: Any) -> None:
        import torch

        self.torch: Any = torch
        self.atoms = _Joined()
        self.scales = _Scales()
        self.places: dict[int, tuple[str, int, int]] = {}  # atom → tensor, axis, index
        self.inside: dict[int, int] = {}  # root of an atom → the head that it belongs to
        self.heads: dict[bytes, int] = {}
        self.pinned: set[int] = set()  # for all moves
        self.held: set[int] = set()  # within its head only
        self.used: dict[int, set[int]] = defaultdict(set)  # atom → the operations that it went through, by number
        self.bent: set[int] = set()  # atoms that something other than a linear map happened to
        self.operations = 0
        self.shared: set[tuple[str, int]] = set()  # axes that several heads read (grouped queries)
        self.comps: dict[int, list[_Comp]] = {}
        self.alive: list[Any] = []  # while an object lives, its id is its own
        self.aliases: dict[str, list[str]] = {}  # tied weights: all names of a tensor, by the first
        names: dict[int, str] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) in names:
                self.aliases[names[id(tensor)]].append(name)
            elif tensor.is_floating_point():
                names[id(tensor)] = name
                self.aliases[name] = [name]
                self.comps[id(tensor)] = self._parameter(name, tensor.shape)
                self.alive.append(tensor)

    def _parameter(self, name: str, shape: Sequence[int]) -> list[_Comp]:
        found = []
        for axis, size in enumerate(shape):
            if size < 2:
                continue
            first, scale = self.atoms.more(size), self.scales.more(size)
            for i in range(size):
                self.places[first + i] = (name, axis, i)
                self.scales.knobs[scale + i].append(Knob(name, axis, i, 1))
            line = _Comp(*(self.torch.arange(start, start + size) for start in (first, scale)))
            found.append(line.map(_along(axis, tuple(shape))))
        return found

    def of(self, tensor: Any) -> list[_Comp]:
        return self.comps.get(id(tensor), [])

    def give(self, tensor: Any, comps: list[_Comp]) -> None:
        self.comps[id(tensor)] = comps
        self.alive.append(tensor)

    # --- what can happen to atoms ---

    def join(self, one: int, two: int) -> None:
        stays, goes = self.atoms.join(one, two)
        if stays != goes and goes in self.inside:
            self.put(stays, self.inside.pop(goes))

    def put(self, atom: int, head: int) -> None:
        """An atom belongs to a head; if it has one already, both are one."""
        atom = self.atoms.root(atom)
        if atom == self.atoms.root(head):
            return
        if atom in self.inside:
            self.join(self.inside[atom], head)
        else:
            self.inside[atom] = head

    def pin(self, comp: _Comp, *, within: bool = False, scales: bool = True) -> None:
        (self.held if within else self.pinned).update(_values(comp.label))
        if scales:
            self.scales.fix(_values(comp.scale))

    def fix(self, comps: Iterable[_Comp]) -> None:
        """No scale passes here."""
        for comp in comps:
            self.scales.fix(_values(comp.scale))

    def _is_fixed(self, comp: _Comp) -> bool:
        return all(self.scales.root(x)[0] in self.scales.fixed for x in _values(comp.scale))

    def unscaled(self, comps: Iterable[_Comp]) -> list[_Comp]:
        return [_Comp(c.label, self.torch.zeros((), dtype=self.torch.int64).expand(c.label.shape)) for c in comps]

    # --- operations ---

    def see(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, function: Any) -> None:
        tensors = [x for x in _flat((args, kwargs)) if isinstance(x, self.torch.Tensor)]
        if not any(self.of(x) for x in tensors):
            return
        first: Any = args[0] if args else None
        if name not in _MOVES | _VIEWS | _SAME | _SIZES | {"cat"}:
            self.operations += 1
            by_number = name in _PRODUCTS and all(isinstance(x, (int, float)) or not x.dim() for x in args[1:2])
            linear = name in _LINEAR or by_number
            for comp in (c for x in tensors for c in self.of(x)):
                for atom in _values(comp.label):
                    self.used[atom].add(self.operations)
                    if not linear:
                        self.bent.add(atom)
        if name in _SUMS and any(isinstance(x, (int, float)) and x for x in args[1:2]):
            self.fix(self.of(first))  # x + 1
        if name in _SAME:
            self.give(_one(out), self.of(first))
        elif name in _VIEWS:
            self.give(out, [c.map(lambda x: x.reshape(out.shape)) for c in self.of(first)])
        elif name in _MOVES:
            self._move(args, kwargs, out, function)
        elif name == "cat":
            self._cat(first, args[1] if len(args) > 1 else kwargs.get("dim", 0), out)
        elif name in _HOMOGENEOUS:
            self.give(out, self.of(first))
        elif name in _UNARY:
            self.fix(self.of(first))
            self.give(out, self.unscaled(self.of(first)))
        elif name in _SUMS or name in _PRODUCTS or name in _MIXES:
            self.give(out, self._elementwise(tensors, tuple(out.shape), name))
        elif name in ("mm", "bmm"):
            self.give(out, self._matmul(args[0], args[1], out))
        elif name in ("addmm", "baddbmm"):
            product = out.detach().clone()
            self.give(product, self._matmul(args[1], args[2], out))
            self.give(out, self._elementwise([args[0], product], tuple(out.shape), "add"))
        elif name == "convolution":
            self._convolution(args, out)
        elif name in _NORMS:
            self._batch_norm(name, args, out[0])
        elif name == "native_layer_norm":
            self.fix(self.of(first))
            self._affine(self.unscaled(self.of(first)), args[2], args[3], out[0], (-1,))
        elif name == "native_group_norm":
            comps = self.of(first)
            if int(args[6]) != 1:
                for comp in comps:
                    self.pin(comp)
            self.fix(comps)
            shape = (-1,) + (1,) * (out[0].dim() - 2)
            self._affine(self.unscaled(comps), args[1], args[2], out[0], shape)
        elif name == "embedding":
            for comp in self.of(first):
                if 0 in comp.axes():
                    self.pin(comp)
            columns = [c for c in self.of(first) if 1 in c.axes()]
            self.give(out, [c.map(lambda x: x[0].expand(out.shape)) for c in columns])
        elif name in _REDUCTIONS:
            self._reduce(name, args, kwargs, out)
        elif name in _POOLS:
            self._pool(self.of(first), _one(out), name)
        elif name in _SIZES:
            return
        else:
            raise LayoutError(f"the operation {name!r} of this model is not understood: no groups; {_REMEDY}")

    def _move(self, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, function: Any) -> None:
        outs: list[Any] = list(out) if isinstance(out, (list, tuple)) else [out]
        given: list[list[_Comp]] = [[] for _ in outs]
        for comp in self.of(args[0]):
            moved = []
            for labels in (comp.label, comp.scale):
                result: Any
                if "constant_pad_nd" in str(function):
                    result = self.torch.nn.functional.pad(labels, args[1])
                else:
                    result = function(labels, *args[1:], **kwargs)
                moved.append(list(result) if isinstance(result, (list, tuple)) else [result])
            for place, label, scale in zip(given, *moved, strict=True):
                place.append(_Comp(label, scale))
        for tensor, comps in zip(outs, given, strict=True):
            self.give(tensor, comps)

    def _cat(self, tensors: Sequence[Any], dim: int, out: Any) -> None:
        """Ways that run along the same axes are put together; where a part has none, its places have no atom."""
        dim = dim % out.dim()
        rows: list[list[_Comp | None]] = []
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
            if None in row and key - {dim}:  # what is put beside it is rigid along the same axis
                for part in row:
                    if part is not None:
                        self.pin(part)
            labels = [z if c is None else c.label for c, z in zip(row, zeros, strict=True)]
            scales = [z if c is None else c.scale for c, z in zip(row, zeros, strict=True)]
            found.append(_Comp(self.torch.cat(labels, dim), self.torch.cat(scales, dim)))
        for comp in found:  # two parts that run along another axis are one there
            others = comp.axes() - {dim}
            if others and dim in comp.axes() and any(set(c.axes()) & others for t in tensors for c in self.of(t)):
                base = comp.label.narrow(dim, 0, 1).expand(comp.label.shape)
                for one, two in _pairs(base, comp.label):
                    self.join(one, two)
                scale = comp.scale.narrow(dim, 0, 1).expand(comp.scale.shape)
                self._same_scale(scale, comp.scale)
                comp.label, comp.scale = base, scale
        self.give(out, found)

    def _same_scale(self, one: Labels, two: Labels) -> None:
        """Joins scales that meet; one that meets nothing is 1."""
        self.scales.join(_pairs(one, two), 1)
        self.scales.fix(_values(one[two == 0]) + _values(two[one == 0]))

    def _elementwise(self, tensors: Sequence[Any], shape: tuple[int, ...], name: str) -> list[_Comp]:
        """Atoms that meet are joined; a rigid operand that differs along an axis of atoms pins them."""
        placed = [
            [c.map(lambda x: x.expand(shape) if x.dim() else x) for c in self.of(t)] if t.dim() else [] for t in tensors
        ]
        if name in _MIXES:
            self.fix(c for comps in placed for c in comps)
        found: list[tuple[_Comp, frozenset[int]]] = []
        met: list[set[int]] = [set() for _ in tensors]  # axes of each operand that carry atoms
        for operand, comps in enumerate(placed):
            for comp in comps:
                axes = comp.axes()
                met[operand] |= axes
                for k, (other, others) in enumerate(found):
                    if axes & others:
                        found[k] = self._meet(other, others, comp, axes, name)
                        break
                else:
                    found.append((comp, axes))
        for operand, tensor in enumerate(tensors):
            own = (1,) * (len(shape) - tensor.dim()) + tuple(tensor.shape)
            for comp, axes in found:
                clash = {a for a in axes if own[a] > 1 and a not in met[operand]}
                if clash:
                    self.pin(comp, within=clash != axes, scales=name not in _PRODUCTS)
            if name in _SUMS:  # a sum with something that has no atoms there is a sum with something not scaled
                for comp, axes in found:
                    if not axes & met[operand] and any(tensor is not t for t in tensors):
                        self.fix([comp])
        if name in _MIXES:
            return self.unscaled(c for c, _ in found)
        return [c for c, _ in found]

    def _meet(
        self, one: _Comp, one_axes: frozenset[int], two: _Comp, two_axes: frozenset[int], name: str
    ) -> tuple[_Comp, frozenset[int]]:
        pairs = _pairs(one.label, two.label)
        left, right = len({p[0] for p in pairs}), len({p[1] for p in pairs})
        # a head meets its channels: the coarser labels are heads, each with the same number of finer ones
        if left != right and max(left, right) == len(pairs):
            flipped = left < right
            if all((p[0] if flipped else p[1]) not in self.places for p in pairs):
                for p in pairs:
                    self.put(*(p[::-1] if flipped else p))
                self.fix([one if flipped else two])
                return (one, one_axes) if not flipped else (two, two_axes)
        heads = [p for p in pairs if (p[0] in self.places) != (p[1] in self.places)]
        if heads:  # channels that several heads read
            for p in heads:
                atom, head = p if p[0] in self.places else p[::-1]
                self.put(atom, head)
                self.shared.add(self.places[atom][:2])
            return (one, one_axes) if heads[0][0] in self.places else (two, two_axes)
        for p in pairs:
            self.join(*p)
        if name in _SUMS:
            self._same_scale(one.scale, two.scale)
            return one, one_axes
        # a product: one operand's scale goes on, the other one's is fixed; the one that goes on is not fixed already
        keep, drop = (two, one) if self._is_fixed(one) and "div" not in name else (one, two)
        self.fix([drop])
        return keep, one_axes | two_axes

    def _matmul(self, a: Any, b: Any, out: Any) -> list[_Comp]:
        """out[…, i, j] = Σ_k a[…, i, k]·b[…, k, j]."""
        dim = out.dim()
        over_a: list[_Comp] = []
        over_b: list[_Comp] = []
        rest: list[_Comp] = []
        for tensor, over, k, other in ((a, over_a, dim - 1, dim - 2), (b, over_b, dim - 2, dim - 1)):
            for comp in self.of(tensor):
                axes = comp.axes()
                if k not in axes:
                    rest.append(comp.map(_without(k, tuple(out.shape))))
                elif other in axes:
                    self.pin(comp)
                else:
                    over.append(comp.map(_selected(other)))  # […, k]
        for one in over_a:
            for two in over_b:
                for p in _pairs(one.label, two.label):
                    self.join(*p)
                pairs = _pairs(one.scale, two.scale)
                self.scales.join(pairs, -1)
                self.scales.fix(_values(one.scale[two.scale == 0]) + _values(two.scale[one.scale == 0]))
                self._rigid(one, two)
        if not (over_a and over_b):
            for comp in [*over_a, *over_b]:
                self.pin(comp)
        heads = [c for c in (over_a or over_b) if dim == 3 and 0 in c.axes()]
        if heads:
            rest.append(self._heads(heads[0].label, out, over_b if over_a else []))
        found: list[tuple[_Comp, frozenset[int]]] = []
        for comp in rest:
            axes = comp.axes()
            for k, (other, others) in enumerate(found):
                if axes & others:
                    found[k] = self._meet(other, others, comp, axes, "mul")
                    break
            else:
                found.append((comp, axes))
        return [c for c, _ in found]

    def _rigid(self, one: _Comp, two: _Comp) -> None:
        """An atom that meets no atom is pinned."""
        self.pinned.update(_values(one.label[two.label == 0]) + _values(two.label[one.label == 0]))

    def _heads(self, label: Labels, out: Any, other: list[_Comp]) -> _Comp:
        """label[b, k]: the atoms that are summed over for each b; each such row is a head."""
        ids = self.torch.zeros(label.shape[0], dtype=self.torch.int64)
        for b, row in enumerate(label.numpy()):
            key = row.astype(np.int64).tobytes()
            if key not in self.heads:
                self.heads[key] = self.atoms.more(1)
            ids[b] = self.heads[key]
            for atom in set(row.tolist()) - {0}:
                self.put(atom, self.heads[key])
        distinct = len(set(ids.tolist()))
        for comp in other:
            rows = np.unique(comp.label.numpy(), axis=0)
            if rows.shape[0] < distinct:
                self.shared.update(self.places[x][:2] for x in _values(comp.label) if x in self.places)
        spread = ids.view(-1, 1, 1).expand(out.shape)
        return _Comp(spread, self.torch.zeros((), dtype=self.torch.int64).expand(out.shape))

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
            inputs.append(comp.map(_line(1)))
        given: list[_Comp] = []
        produced = [c.map(_line(outof)) for c in rows]
        if groups == 1:
            taken = [c.map(_line(into)) for c in columns]
            for one in inputs:
                for two in taken:
                    for p in _pairs(one.label, two.label):
                        self.join(*p)
                    self.scales.join(_pairs(one.scale, two.scale), -1)
                    self.scales.fix(_values(one.scale[two.scale == 0]) + _values(two.scale[one.scale == 0]))
                    self._rigid(one, two)
            if not inputs or not taken:
                for comp in [*inputs, *taken]:
                    self.pin(comp)
            given = produced
        elif groups == x.shape[1] == out.shape[1] and not transposed:  # depthwise: the channels stay what they are
            for one in inputs:
                for two in produced:
                    for p in _pairs(one.label, two.label):
                        self.join(*p)
            self.fix(inputs)
            given = produced
            if not inputs:
                for comp in produced:
                    self.pin(comp)
        else:
            for comp in [*inputs, *self.of(weight)]:
                self.pin(comp)
        if bias is not None:
            for one in given:
                for two in self.of(bias):
                    for p in _pairs(one.label, two.label):
                        self.join(*p)
                    self._same_scale(one.scale, two.scale)
        self.give(out, [c.map(_along(1, tuple(out.shape))) for c in given])

    def _batch_norm(self, name: str, args: Sequence[Any], out: Any) -> None:
        x, weight, bias, mean, variance = args[:5]
        shape = (-1,) + (1,) * (out.dim() - 2)
        for comp in self.of(x):
            if comp.axes() - {1}:
                self.pin(comp)
            line = comp.map(_line(1))
            for statistic, exponent in ((mean, 1), (variance, 2)):
                for other in self.of(statistic):
                    for p in _pairs(line.label, other.label):
                        self.join(*p)
                    for channel, scale in zip(line.scale.tolist(), other.label.tolist(), strict=True):
                        tensor, axis, index = self.places[scale]
                        if channel:
                            self.scales.knobs[channel].append(Knob(tensor, axis, index, exponent))
        for statistic in (mean, variance):
            if statistic is not None:
                for other in self.of(statistic):
                    self.scales.fix(_values(other.scale))  # their own knobs do nothing: the channel's turn them
        if "no_training" not in name and args[5]:
            raise LayoutError("the model normalises by its batch: call model.eval() first")
        self._affine(self.unscaled(self.of(x)), weight, bias, out, shape)

    def _affine(self, comps: list[_Comp], weight: Any, bias: Any, out: Any, shape: tuple[int, ...]) -> None:
        """out = normalised·weight + bias, with weight and bias seen in `shape`."""
        current = out.detach().clone()
        self.give(current, comps)
        for tensor, name in ((weight, "mul"), (bias, "add")):
            if tensor is None:
                continue
            seen = tensor.detach().reshape(shape) if len(shape) > 1 else tensor.detach()
            self.give(seen, [c.map(lambda y: y.reshape(shape) if len(shape) > 1 else y) for c in self.of(tensor)])
            after = out.detach().clone()
            self.give(after, self._elementwise([current, seen], tuple(out.shape), name))
            current = after
        self.give(out, self.of(current))

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
                    reduced = reduced.map(_narrowed(d) if kept else _selected(d))
                found.append(reduced)
                continue
            self.fix([comp])
            if axes - set(dims):
                rest = [a for a in range(x.dim()) if a not in dims]
                rows = comp.label.permute(*rest, *dims).reshape(-1, int(np.prod([x.shape[d] for d in dims])))
                shape = [1 if d in dims else x.shape[d] for d in range(x.dim())] if kept else [x.shape[d] for d in rest]
                heads = self._heads(rows, self.torch.empty(rows.shape[0], 1, 1), [])
                found.append(_Comp(heads.label[:, 0, 0].reshape(shape), heads.scale[:, 0, 0].reshape(shape)))
        for o in outs:
            self.give(o, found)

    def _pool(self, comps: list[_Comp], out: Any, name: str) -> None:
        places = {"1d": 1}.get(name[-2:], 1 if "1d" in name else 2)
        found = []
        for comp in comps:
            if any(a >= out.dim() - places for a in comp.axes()):
                self.pin(comp)
            corner = comp
            for axis in range(out.dim() - places, out.dim()):
                corner = corner.map(_narrowed(axis))
            found.append(corner.map(lambda y: y.expand(out.shape)))
        self.give(out, found)


def _one(out: Any) -> Any:
    return out[0] if isinstance(out, (list, tuple)) else out


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [y for x in value for y in _flat(x)]
    if isinstance(value, Mapping):
        return [y for x in value.values() for y in _flat(x)]
    return [value]


def _run(model: Any, example: Any) -> Any:
    """The tensor that a model gives for an example: of several outputs the logits, or the first."""
    import torch

    with _without_cache(model):
        if isinstance(example, Mapping):
            out = model(**example)
        else:
            out = model(*example) if isinstance(example, (list, tuple)) else model(example)
    for name in ("logits", "last_hidden_state"):
        if hasattr(out, name):
            return getattr(out, name)
    found = [x for x in _flat(out) if isinstance(x, torch.Tensor)]
    if not found:
        raise LayoutError(f"the model gives no tensor for the example: no groups; {_REMEDY}")
    return found[0]


@contextmanager
def _without_cache(model: Any) -> Iterator[None]:
    """Models of transformers keep keys and values for the next word, in tensors of which nothing is known."""
    configs = {id(config): config for part in model.modules() if (config := getattr(part, "config", None)) is not None}
    using = [config for config in configs.values() if getattr(config, "use_cache", False)]
    try:
        for config in using:
            config.use_cache = False
        yield
    finally:
        for config in using:
            config.use_cache = True


def _traced(model: Any, example: Any) -> _Trace:
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.utils._python_dispatch import TorchDispatchMode
    except ImportError:
        raise MissingDependencyError("quorumark[torch]", "finding a model's groups") from None
    if not isinstance(model, torch.nn.Module):
        raise InputError("model", "must be a torch module", type(model).__name__)
    trace = _Trace(model)
    training = [(part, part.training) for part in model.modules()]
    model.eval()

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            trace.see(func._schema.name.removeprefix("aten::"), args, kwargs or {}, out, func)
            return out

    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), Watch():  # type: ignore[no-untyped-call]
            out = _run(model, example)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for part, mode in training:
            part.training = mode
    for comp in trace.of(out):
        trace.pin(comp)
    return trace


# --- from atoms to groups ---------------------------------------------------------------------------------

Axis = tuple[str, int]


def _grouped(trace: _Trace) -> Groups:
    classes: dict[int, dict[Axis, list[int]]] = defaultdict(lambda: defaultdict(list))
    for atom, (tensor, axis, index) in trace.places.items():
        for name in trace.aliases[tensor]:
            classes[trace.atoms.root(atom)][name, axis].append(index)
    pinned = {trace.atoms.root(x) for x in trace.pinned}
    held = {trace.atoms.root(x) for x in trace.held}
    inside = {trace.atoms.root(x): trace.atoms.root(head) for x, head in trace.inside.items()}
    children: dict[int, list[int]] = defaultdict(list)
    for atom, head in inside.items():
        if atom in classes:
            children[head].append(atom)
            if atom in pinned:
                pinned.add(head)

    used: dict[int, set[int]] = defaultdict(set)
    for atom, operations in trace.used.items():
        used[trace.atoms.root(atom)] |= operations

    def kind(root: int) -> tuple[Any, ...]:
        """Channels are alike if they have as many places on the same axes and went through the same operations."""
        sizes = sorted((axis, len(indices)) for axis, indices in classes[root].items())
        return tuple(sizes), frozenset(used[root])

    def together(head: int) -> dict[Axis, list[int]]:
        """All places of a head, its channels in the order of their first places."""
        merged: dict[Axis, list[int]] = defaultdict(list)
        for child in sorted(children[head], key=lambda c: sorted((a, sorted(i)) for a, i in classes[c].items())):
            for axis, indices in classes[child].items():
                merged[axis] += indices
        return {axis: sorted(indices) for axis, indices in merged.items()}

    alike: dict[Any, list[dict[Axis, list[int]]]] = defaultdict(list)
    for root, members in classes.items():
        if root not in inside and root not in pinned and root not in held:
            alike[kind(root)].append({a: sorted(i) for a, i in members.items()})
    tops = [members for members in alike.values() if len(members) > 1]
    merged_heads: dict[Any, list[int]] = defaultdict(list)
    for head in children:
        alone = head in pinned
        kinds = Counter(kind(child) for child in children[head])
        merged_heads[head if alone else frozenset(kinds.items())].append(head)
    groups = _in_order(_group(members, None) for members in tops)
    for heads in sorted(merged_heads.values(), key=lambda hs: sorted(together(hs[0]).items())):
        heads = sorted(heads, key=lambda h: sorted(together(h).items()))
        outer = _group([together(h) for h in heads], None) if len(heads) > 1 else None
        if outer is not None:
            groups.append(outer)
        place = len(groups) - 1
        for element, head in enumerate(heads):
            inner: dict[Any, list[dict[Axis, list[int]]]] = defaultdict(list)
            for child in children[head]:
                if child not in pinned and child not in held:
                    inner[kind(child)].append({a: sorted(i) for a, i in classes[child].items()})
            within = None if outer is None else (place, element)
            found = [_group(members, within) for members in inner.values() if len(members) > 1]
            repeats = _repeats(trace, head, [classes[c] for c in children[head]], within)
            groups += _in_order([*found, repeats])
    return Groups(tuple(groups))


def _in_order(groups: Iterable[Group | None]) -> list[Group]:
    return sorted((group for group in groups if group is not None), key=lambda group: group.slots)


def _repeats(
    trace: _Trace, head: int, members: Sequence[Mapping[Axis, Sequence[int]]], within: tuple[int, int] | None
) -> Group | None:
    """The query heads that share a head of keys and values may be permuted among each other."""
    count = sum(trace.atoms.root(h) == head for h in trace.heads.values())
    if count < 2:
        return None
    parts: list[dict[Axis, list[int]]] = [defaultdict(list) for _ in range(count)]
    for places in members:
        # what is shared has as many places under all its names: the bias of a key moves with its row
        shared = {len(indices) for axis, indices in places.items() if axis in trace.shared}
        for axis, indices in places.items():
            if len(indices) in shared or len(indices) % count:
                continue
            size = len(indices) // count
            for r in range(count):
                parts[r][axis] += sorted(indices)[r * size : (r + 1) * size]
    return _group([{a: sorted(i) for a, i in part.items()} for part in parts], within) if parts[0] else None


def _group(members: list[dict[Axis, list[int]]], within: tuple[int, int] | None) -> Group | None:
    """The places of n elements as slots: offset + i·stride + j·step. None if they do not lie so regularly."""
    members = sorted(members, key=lambda m: sorted(m.items()))
    slots = []
    for tensor, axis in sorted(members[0]):
        places = np.array([m[tensor, axis] for m in members], np.int64)
        start = 0
        while start < places.shape[1]:
            stop = start + 1
            while stop < places.shape[1] and (
                stop == start + 1 or places[0, stop] - places[0, stop - 1] == places[0, start + 1] - places[0, start]
            ):
                stop += 1
            part = places[:, start:stop]
            offset, stride = int(part[0, 0]), int(part[1, 0] - part[0, 0])
            step = int(part[0, 1] - part[0, 0]) if stop - start > 1 else 1
            slot = Slot(tensor, axis, offset, stride, stop - start, step)
            if not np.array_equal(slot.indices(len(members)), part):
                return None
            slots.append(slot)
            start = stop
    return Group(len(members), tuple(slots), within)


# --- what may be mixed ------------------------------------------------------------------------------------


def _mixings(trace: _Trace, groups: Groups) -> list[Mixing]:
    """Groups of channels that are only summed and multiplied with matrices, and may be scaled.

    On which side a place is, is told by the exponent of its scale.
    """
    bent = {trace.places[atom] for atom in trace.bent if atom in trace.places}
    exponents = {
        (name, k.axis, k.index): (number, k.exponent)
        for number, scaling in enumerate(trace.scales.found())
        for k in scaling
        for name in trace.aliases[k.tensor]
    }
    found = []
    for group in groups.groups:
        if any((slot.tensor, slot.axis, slot.offset) in bent for slot in group.slots):
            continue
        sides: dict[int, list[Slot]] = {1: [], -1: []}
        scalings = set()
        for slot in group.slots:
            for j in range(slot.count):
                place = (slot.tensor, slot.axis, slot.offset + j * slot.step)
                scaling, exponent = exponents.get(place, (-1, 0))
                scalings.add(scaling)
                if abs(exponent) == 1:
                    sides[exponent].append(Slot(slot.tensor, slot.axis, place[2], slot.stride, 1, 1))
        if len(scalings) == 1 and -1 not in scalings and sides[1] and sides[-1]:
            first, second = sorted(tuple(sorted(side)) for side in sides.values())
            found.append(Mixing(group.size, first, second))
    return found


def _turning(trace: _Trace, *, halves: bool) -> list[Mixing]:
    """Heads of queries and keys that constants hold in place: if those are angles, pairs may be turned.

    Channel i with i + h/2, or (not halves) channel 2i with 2i + 1.
    """
    classes: dict[int, dict[Axis, list[int]]] = defaultdict(lambda: defaultdict(list))
    for atom, (tensor, axis, index) in trace.places.items():
        for name in trace.aliases[tensor]:
            classes[trace.atoms.root(atom)][name, axis].append(index)
    held, pinned = ({trace.atoms.root(x) for x in some} for some in (trace.held, trace.pinned))
    inside = {trace.atoms.root(x) for x in trace.inside}
    found = []
    for root in sorted((held & inside & classes.keys()) - pinned):
        size = min(len(places) for places in classes[root].values())
        runs = [
            (tensor, axis, run)
            for (tensor, axis), places in sorted(classes[root].items())
            for run in np.array_split(np.sort(places), max(1, len(places) // size))
        ]
        regular = all(np.array_equal(run, np.arange(run[0], run[0] + size)) for _, _, run in runs)
        if size >= 2 and size % 2 == 0 and regular and len(runs) > 1:
            stride, step = (1, size // 2) if halves else (2, 1)
            slots = [Slot(tensor, axis, int(run[0]), stride, 2, step) for tensor, axis, run in runs]
            found.append(Mixing(size // 2, tuple(sorted(slots))))
    return found


def _mixed(state: dict[str, Any], mixings: Sequence[Mixing], rng: np.random.Generator) -> dict[str, Any]:
    """A random mixing of each."""
    import torch

    for mixing in mixings:
        if mixing.rotates:
            angles = rng.uniform(0, 2 * np.pi, mixing.size)
            by = np.zeros((mixing.size, 2, mixing.size, 2))
            each = np.arange(mixing.size)
            by[each, 0, each, 0] = by[each, 1, each, 1] = np.cos(angles)
            by[each, 1, each, 0] = np.sin(angles)
            by[each, 0, each, 1] = -np.sin(angles)
            forward = by.reshape(2 * mixing.size, 2 * mixing.size)
        else:
            forward = np.linalg.qr(rng.standard_normal((mixing.size, mixing.size)))[0]
            forward = forward * rng.uniform(0.5, 2.0, mixing.size)
        for slots, matrix in ((mixing.slots, forward), (mixing.against, np.linalg.inv(forward).T)):
            for slot in slots:
                values = state[slot.tensor].movedim(slot.axis, 0)  # a view: written in place
                places = torch.from_numpy(slot.indices(mixing.size).reshape(-1))
                rows = values[places]
                mixed = torch.from_numpy(matrix).to(rows) @ rows.reshape(len(matrix), -1)
                values[places] = mixed.view(rows.shape)
    return state


def _sound_mixings(model: Any, example: Any, mixings: list[Mixing]) -> list[Mixing]:
    """Those that leave the output as it is, found by halving."""
    if not mixings:
        return []
    try:
        _check(model, example, lambda state, rng: _mixed(state, mixings, rng), "mixed")
    except LayoutError:
        half = len(mixings) // 2
        parts = (mixings[:half], mixings[half:]) if half else ()
        return [mixing for part in parts for mixing in _sound_mixings(model, example, part)]
    return mixings


# --- what may be turned -----------------------------------------------------------------------------------


def _stream(model: Any, example: Any, trace: _Trace, groups: Groups) -> Stream | None:
    """The largest group that may be turned as a whole once gains are folded into what reads them, if there is one.

    Output weights that are tied to the embeddings read the stream through the last norm, embeddings do not: a copy in
    which they are two tensors is looked at.
    """
    if any(len(names) > 1 for names in trace.aliases.values()):
        model = _untied(model)
        trace = _traced(model, example)
        groups = _grouped(trace)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    first = [tuple(knob for knob in scaling if knob.index == 0) for scaling in trace.scales.found()]
    found = [flow for group in groups.groups if (flow := _flow(group, first, shapes)) is not None]
    for flow in sorted(found, key=lambda flow: -flow.size):
        try:
            _check(model, example, lambda state, rng, flow=flow: _turned(state, flow, rng), "turned")
        except LayoutError:
            continue
        return flow
    return None


def _untied(model: Any) -> Any:
    """A copy without tied weights."""
    import torch

    model = copy.deepcopy(model)
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, torch.nn.Parameter(tensor.detach().clone()))
        seen.add(id(tensor))
    return model


def _flow(group: Group, scalings: Sequence[Scaling], shapes: Mapping[str, tuple[int, ...]]) -> Stream | None:
    """A group as a stream: gains, what reads through them (it is scaled against them), and all else writes.

    `scalings` are those of first channels. A norm with a bias, which is scaled along with the gain, cannot be turned.
    """
    whole = all(
        (s.offset, s.stride, s.count) == (0, 1, 1) and shapes[s.tensor][s.axis] == group.size for s in group.slots
    )
    if group.within is not None or not whole:
        return None
    axes = {(slot.tensor, slot.axis) for slot in group.slots}
    norms: dict[str, tuple[Axis, ...]] = {}
    for scaling in scalings:
        first = [k for k in scaling if (k.tensor, k.axis) in axes]
        gains = [k for k in first if len(shapes[k.tensor]) == 1]
        readers = [k for k in first if len(shapes[k.tensor]) > 1]
        if len(gains) == 1 and readers and all(k.exponent == -gains[0].exponent for k in readers):
            norms[gains[0].tensor] = tuple(sorted((k.tensor, k.axis) for k in readers))
    read = {axis for readers in norms.values() for axis in readers} | {(gain, 0) for gain in norms}
    writers = tuple(sorted(axes - read))
    if not norms or not any(len(shapes[tensor]) > 1 for tensor, _ in writers):
        return None
    return Stream(group.size, writers, tuple(sorted(norms.items())))


def _turned(state: dict[str, Any], flow: Stream, rng: np.random.Generator) -> dict[str, Any]:
    """Gains folded, and a random orthogonal matrix."""
    import torch

    by = torch.from_numpy(np.linalg.qr(rng.standard_normal((flow.size, flow.size)))[0])
    for name, (axis, gain) in flow.axes().items():
        values = state[name].movedim(axis, -1)
        values = values if gain is None else values * state[gain]
        state[name] = (values @ by.T.to(values)).movedim(-1, axis).contiguous()
    for gain in flow.gains():
        state[gain] = torch.ones_like(state[gain])
    return state


# --- what was found is tried ------------------------------------------------------------------------------


def _shuffled(state: dict[str, Any], groups: Groups, rng: np.random.Generator) -> dict[str, Any]:
    import torch

    orders = [rng.permutation(group.size) for group in groups.groups]
    moved = groups.axis_orders({name: tuple(t.shape) for name, t in state.items()}, orders)
    for (name, axis), order in moved.items():
        state[name] = state[name].index_select(axis, torch.from_numpy(order))
    return state


def _rescaled(state: dict[str, Any], scalings: Sequence[Scaling], rng: np.random.Generator) -> dict[str, Any]:
    for scaling in scalings:
        factor = float(np.exp2(rng.uniform(-2, 2)))
        for knob in scaling:
            state[knob.tensor].select(knob.axis, knob.index).mul_(factor**knob.exponent)
    return state


def _check(model: Any, example: Any, change: Callable[..., dict[str, Any]], what: str) -> None:
    """On a copy with random weights in double precision, the output must stay."""
    error = _error(model, example, change)
    if not error < _EXACT:
        raise LayoutError(
            f"the channels that were found cannot be {what} without a change of the output ({error:.1e}): no groups; "
            f"{_REMEDY}"
        )


def _error(model: Any, example: Any, change: Callable[..., dict[str, Any]]) -> float:
    """How much a change of the weights changes the output, of a copy with random weights in double precision."""
    import torch

    rng = np.random.default_rng(0)
    module = copy.deepcopy(model).double().eval()
    for part in module.modules():
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
            part.eps = 1e-300  # what is scaled is the variance without it; some versions of PyTorch refuse 0
    with torch.no_grad(), _in_doubles():
        for tensor in [*module.parameters(), *[b for b in module.buffers() if b.is_floating_point()]]:
            noise = torch.from_numpy(rng.uniform(0.5, 1.5, tuple(tensor.shape)))
            if tensor.dim() < 2:  # gains, biases, running statistics: positive, and all different
                tensor.copy_(noise)
        before = _run(module, _double(example))
        state = {name: t.clone() for name, t in module.state_dict().items()}
        module.load_state_dict(change(state, rng))
        after = _run(module, _double(example))
    return float((after - before).abs().max() / before.abs().max().clamp_min(1e-30))


def _in_doubles() -> Any:
    """Leaves double precision alone where a model casts it to float32, as Llama's norms do whatever their weights are.

    The output must stay to 10⁻⁶: thirty layers of norms in float32 do not, and a large model would have no groups.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    class Doubles(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            named = dict(kwargs or {})
            if args and isinstance(args[0], torch.Tensor):
                if func is torch.Tensor.float:
                    return args[0].double()  # whole numbers as well: positions meet frequencies that are doubles
                args = tuple(torch.float64 if a is torch.float32 else a for a in args)
                named = {k: torch.float64 if v is torch.float32 else v for k, v in named.items()}
            return func(*args, **named)

    return Doubles()


def _double(example: Any) -> Any:
    return _each_tensor(example, lambda x: x.double())


def _noise(x: Any) -> Any:
    import torch

    return torch.randn(x.shape, generator=torch.Generator().manual_seed(0))


def _each_tensor(example: Any, change: Callable[[Any], Any]) -> Any:
    """An example with its tensors of real numbers changed."""
    import torch

    if isinstance(example, Mapping):
        return {name: _each_tensor(x, change) for name, x in example.items()}
    if isinstance(example, (list, tuple)):
        return type(example)(_each_tensor(x, change) for x in example)
    return change(example) if isinstance(example, torch.Tensor) and example.is_floating_point() else example
