"""LoRA: a suspect's low-rank factors in the anchor's gauge (docs/lora.md).

Members train the factors A (r × n) and B (m × r) of W = W₀ + s·B·A, and the factors carry the mark. The same model has
other factors, R·A and B·R⁻¹ for every invertible R, and none at all once they were added to W₀. What does not change
is Δ = W − W₀, up to the strength s. So a verifier computes the factors from Δ, by one public rule that depends on the
anchor's A₀ alone (`anchor-gauge/v1`):

    B = Δ·A₀ᵀ·(A₀·A₀ᵀ)⁻¹                         the one with (A − A₀)·A₀ᵀ = 0, where Δ has rank r
    A = A₀ + (BᵀB + λ·1)⁻¹·Bᵀ·(Δ − B·A₀)         λ = trace(BᵀB)/(r·2^12)

Everything is computed in fixed point (`quorumark.align.fixed`), so that every machine finds the same factors. What
the suspect's files say about ranks and strengths (r, α) is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from quorumark.align.alignment import Alignment
from quorumark.align.fixed import Fixed, SingularError, inverse, minus, plus, stack, times, transposed
from quorumark.align.groups import Groups
from quorumark.align.procedure import align
from quorumark.canonical import canonical, digest, parse
from quorumark.checks import is_hex, is_text, require, take
from quorumark.errors import InconclusiveError, LayoutError, RecordError
from quorumark.model import kernels
from quorumark.model.layout import FLOATS, ModelLayout, TensorSpec, in_order
from quorumark.model.names import peeled
from quorumark.model.statistic import KEPT, Model, bits_of, median_exponent, scales_of
from quorumark.model.suspect import Match, Suspect, match_layout
from quorumark.model.tensors import TensorInfo, spans
from quorumark.reasons import Reason, printable

__all__ = [
    "PROCEDURE",
    "Base",
    "Factors",
    "Gauged",
    "Lora",
    "base_layout",
    "find_factors",
    "gauge",
    "gauge_suspect",
    "is_whole",
]

PROCEDURE = "anchor-gauge/v1"
_RIDGE = 12  # λ is 2^-12 of the mean eigenvalue of BᵀB: directions that Δ does not have get nothing
_CUT = 6  # octaves above the middle at which Δ is clipped, so that a few huge weights move little
_UNIT = 26  # bits of Δ below the clipping
_BLOCK = 1 << 20  # weights of Δ whose products are rounded together: part of the procedure, not to be tuned
_CACHED = 1 << 15  # weights of a product that are summed at a time: they fit into a cache
_FAR = 64  # octaves from 1 that the middle of a product may be
_LEAST = 2.0**-40  # the precision with which the digest of the base sees it
_USUAL = 4  # octaves above the middle below which weights count while scales are fitted
_ITERATIONS = 4  # over rows and columns, to fit their scales

Blocks = Callable[[], Iterator[tuple[int, NDArray[Any]]]]
Progress = Callable[[str], None]


# --- the agreed factors ------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Factors:
    """The two factors of one layer, and the weight of the base that their product is added to.

    `down` is A, `up` is B. `transposed`: the base stores its weight as inputs × outputs (GPT-2's Conv1D).
    """

    down: str
    up: str
    weight: str
    transposed: bool = False


@dataclass(frozen=True)
class Lora:
    """Which tensors of a layout are the factors of which weight, and the digest of the public base model."""

    FORMAT: ClassVar[str] = "quorumark-lora/v1"

    base: str
    layers: tuple[Factors, ...]

    def __post_init__(self) -> None:
        what = "an adapter's description"
        require(is_hex(self.base, 32), f"the base's digest in {what}", "must be 32 bytes in hex")
        for layer in self.layers:
            sound = all(is_text(name) and name for name in (layer.down, layer.up, layer.weight))
            require(sound and isinstance(layer.transposed, bool), what, "must name tensors")
        names = [name for layer in self.layers for name in (layer.down, layer.up)]
        once = len(set(names)) == len(names) and len({layer.weight for layer in self.layers}) == len(self.layers)
        require(bool(names) and once and list(self.layers) == sorted(self.layers), what, "must name each tensor once")

    def check(self, layout: ModelLayout) -> None:
        """Raises a LayoutError unless the factors are all carriers of a layout, in shapes that can be multiplied."""
        shapes = {spec.name: spec.shape for spec in layout.tensors if spec.role == "carrier"}
        for layer in self.layers:
            a, b = shapes.pop(layer.down, ()), shapes.pop(layer.up, ())
            if len(a) != 2 or len(b) != 2 or a[0] != b[1] or not 0 < a[0] <= a[1]:
                raise LayoutError(
                    f"{layer.down!r} and {layer.up!r} must be carriers of the shapes r × n and m × r, but have the "
                    f"shapes {a} and {b}"
                )
        if shapes:
            raise LayoutError(f"the carrier {min(shapes)!r} is not a factor: exclude it from the layout")

    def check_base(self, layout: ModelLayout, base: ModelLayout) -> None:
        """Raises a LayoutError unless a base has the weights that the factors of a layout are added to."""
        shapes = {spec.name: spec.shape for spec in base.tensors}
        for spec in _whole_layout(layout, self).tensors:
            if shapes.get(spec.name) != spec.shape:
                raise LayoutError(
                    f"the base has no weight {spec.name!r} of the shape {spec.shape}, to which the factors belong: "
                    "give the base model that the adapter was made for"
                )

    def check_anchor(self, anchor: Model) -> None:
        """Raises a LayoutError unless the anchor's factors fix a gauge. Once an anchor is agreed on, it is too late."""
        for layer in self.layers:
            start = Fixed.of(_whole(anchor, layer.down))
            try:
                inverse(times(start, transposed(start)))
            except SingularError:
                raise _no_gauge(layer) from None

    def to_bytes(self) -> bytes:
        """Canonical JSON; `from_bytes` reads it back."""
        layers = [[layer.down, layer.up, layer.weight, layer.transposed] for layer in self.layers]
        return canonical({"format": self.FORMAT, "base": self.base, "layers": layers})

    def digest(self) -> str:
        return digest("lora", self.to_bytes()).hex()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        what = "an adapter's description"
        taken = take(parse(data, cls.FORMAT, what), ["base", "layers"], what)
        sound = isinstance(taken["layers"], list) and all(isinstance(s, list) and len(s) == 4 for s in taken["layers"])
        require(sound, what, "must list each layer as [A, B, weight, transposed]")
        return cls(taken["base"], tuple(Factors(*entry) for entry in taken["layers"]))


def _no_gauge(layer: Factors) -> LayoutError:
    return LayoutError(
        f"the anchor's factor {layer.down!r} has dependent rows and fixes no gauge: start from a random A, as PEFT does"
    )


def find_factors(layout: ModelLayout, base: ModelLayout) -> tuple[Factors, ...]:
    """The factors in an adapter's layout, by PEFT's names.

    PATH.lora_A.weight and PATH.lora_B.weight belong to PATH.weight of the base. `.weight` may be missing, `.default`
    may come before it, and wrappers around PATH (`base_model.model.`) are ignored.
    """
    weights: dict[str, list[TensorSpec]] = {}
    for spec in base.tensors:
        if len(spec.shape) == 2 and spec.dtype in FLOATS:
            weights.setdefault(_bare(spec.name), []).append(spec)
    shapes = {spec.name: spec.shape for spec in layout.tensors if spec.role == "carrier"}
    found: list[tuple[str, str, TensorSpec]] = []
    for down, shape in shapes.items():
        path, mark, rest = down.partition(".lora_A")
        up = f"{path}.lora_B{rest}"
        if not mark or rest not in ("", ".weight", ".default", ".default.weight") or up not in shapes:
            continue
        fitting = [w for w in weights.get(_bare(f"{path}.weight"), ()) if {*w.shape} == {shapes[up][0], shape[1]}]
        if len(fitting) != 1:
            raise LayoutError(
                f"the base must have one weight {path}.weight for {down!r} and {up!r}, but has {len(fitting)}: give "
                "the base model that the adapter was made for"
            )
        found.append((down, up, fitting[0]))
    if not found:
        raise LayoutError(
            "the layout has no factors: name them ….lora_A.weight and ….lora_B.weight, as PEFT does, and make them "
            "carriers"
        )
    swapped = {down: w.shape != (shapes[up][0], shapes[down][1]) for down, up, w in found if w.shape[0] != w.shape[1]}
    # a square weight does not show how it is stored: it is assumed to be stored as the others are
    others = bool(swapped) and all(swapped.values())
    return tuple(sorted(Factors(down, up, w.name, swapped.get(down, others)) for down, up, w in found))


def _bare(name: str) -> str:
    """A tensor's name without the wrappers in front."""
    *_, (_, rest) = peeled(name)
    return rest


def base_layout(base: Suspect, layers: tuple[Factors, ...] = ()) -> ModelLayout:
    """The layout of a base model: its carriers are the weights that factors are added to, or all matrices."""
    chosen = {layer.weight for layer in layers}
    specs = []
    for name, info in base.tensors.items():
        carrier = name in chosen if chosen else len(info.shape) >= 2
        if info.dtype in FLOATS:
            specs.append(TensorSpec(name, info.dtype, info.shape, "carrier" if carrier else "plain"))
    return ModelLayout(in_order(specs))


# --- the gauge --------------------------------------------------------------------------------------------


def gauge(delta: Blocks, anchor: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The factors (A, B) of Δ in the gauge of the anchor's A₀.

    Each call of `delta` yields Δ in blocks of rows, as float64.
    """
    start, pieces = Fixed.of(anchor), _pieces(delta)
    up = times(
        stack([times(piece, transposed(start)) for _, piece in pieces()]), inverse(times(start, transposed(start)))
    )
    energy = times(transposed(up), up)
    if not energy.values.any():  # nothing was added to the base, or nothing that A₀ sees
        return anchor.astype(np.float32), np.zeros(up.values.shape, np.float32)
    # Bᵀ·(Δ − B·A₀) = Bᵀ·Δ − (BᵀB)·A₀
    across = reduce(plus, (times(_rows_of(up, begin, piece), piece) for begin, piece in pieces()))
    moved = times(inverse(energy, _RIDGE), minus(across, times(energy, start)))
    with np.errstate(over="ignore", under="ignore"):  # what is beyond float32 counts as 0 later
        return (anchor.astype(np.float64) + moved.floats()).astype(np.float32), up.floats().astype(np.float32)


def _rows_of(up: Fixed, begin: int, piece: Fixed) -> Fixed:
    """The rows of B that belong to a piece of Δ, transposed."""
    return transposed(Fixed(up.values[begin : begin + len(piece.values)], up.exponent))


def _pieces(delta: Blocks) -> Callable[[], Iterator[tuple[int, Fixed]]]:
    """Δ in fixed point, clipped some octaves above the middle of the weights that are not 0; kept if not too large."""
    histogram = np.zeros(256, np.int64)
    kept, size = [], 0
    for begin, block in delta():
        kernels.exponents(bits_of(block), histogram)
        size += block.size
        kept.append((begin, block))
        if size > KEPT:
            kept.clear()
    top = median_exponent(histogram) + 1 + _CUT
    if size > KEPT:
        return lambda: ((begin, _encoded(block, top)) for begin, block in delta())
    encoded = [(begin, _encoded(block, top)) for begin, block in kept]
    return lambda: iter(encoded)


def _encoded(block: NDArray[np.float64], top: int) -> Fixed:
    """Δ in units of 2^(top − 26), clipped at ±2^top; what is not finite counts as 0."""
    cut = np.clip(np.where(np.isfinite(block), block, 0.0), -(2.0**top), 2.0**top)
    return Fixed(np.rint(np.ldexp(cut, _UNIT - top)).astype(np.int64), top - _UNIT)


# --- Δ of a suspect ---------------------------------------------------------------------------------------


def _product(up: NDArray[Any], down: NDArray[Any]) -> Blocks:
    """Rows of B·A, each weight by itself in float64: Σ_k B_ik·A_kj in the order of k, every step rounded correctly.

    That gives the same bits on every machine as well. Fixed point would not do, in units of the largest number of a
    factor: a huge number that nothing reads, or a pair of ranks that cancel, would leave nothing of the others.
    """
    columns, rows = (np.ascontiguousarray(_finite(x)) for x in (up.T, down))
    middles = _middle(columns), _middle(rows)
    if abs(sum(middles)) > _FAR:  # needs a strength to match, otherwise products would count as 0
        with np.errstate(over="ignore", under="ignore"):
            columns, rows = (np.ldexp(x, -middle) for x, middle in zip((columns, rows), middles, strict=True))
    info = TensorInfo("F64", (up.shape[0], down.shape[1]))

    def blocks() -> Iterator[tuple[int, NDArray[Any]]]:
        for begin, end in spans(info, _BLOCK):
            total = np.zeros((end - begin, info.shape[1]))
            for part, stop in spans(TensorInfo("F64", total.shape), _CACHED):
                here = total[part:stop]
                with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # what is not finite counts as 0
                    for column, row in zip(columns[:, begin + part : begin + stop], rows, strict=True):
                        here += column[:, None] * row
            yield begin, total

    return blocks


def _middle(values: NDArray[np.float64]) -> int:
    """The median exponent of the numbers that are not 0."""
    _, exponents = np.frexp(values[values != 0])
    return int(np.median(exponents)) if exponents.size else 0


def _difference(suspect: Model, name: str, base: Model, layer: Factors) -> Blocks:
    """Rows of W − W₀; 0 where W is 0: a weight that was pruned, or rounded to 0, says nothing."""

    def blocks() -> Iterator[tuple[int, NDArray[Any]]]:
        for (begin, ours), (_, theirs) in zip(
            _matrix(suspect, name, layer.transposed), _matrix(base, layer.weight, layer.transposed), strict=True
        ):
            with np.errstate(over="ignore", invalid="ignore"):  # what is not finite counts as 0 later
                left = ours.astype(np.float64) - theirs.astype(np.float64)
            left[(np.abs(left) < _LEAST) | (ours == 0)] = 0
            yield begin, left

    return blocks


def _rescaled_difference(suspect: Model, name: str, base: Model, layer: Factors) -> Blocks:
    """Rows of W/(d·cᵀ) − W₀, where d·cᵀ scales the rows and columns of W₀ to be nearest to W.

    Rows and columns without a scale above 0 (channels that an alignment did not find) count as unchanged.
    """
    found: list[NDArray[np.float64]] = []  # computed on first use

    def blocks() -> Iterator[tuple[int, NDArray[Any]]]:
        if not found:
            ours = _finite(np.concatenate([rows for _, rows in _matrix(suspect, name, layer.transposed)]))
            theirs = _finite(np.concatenate([rows for _, rows in _matrix(base, layer.weight, layer.transposed)]))
            with np.errstate(all="ignore"):  # what is not finite counts as 0 later
                by_row, by_column = _scalings(ours, theirs)
                scale = by_row[:, None] * by_column[None, :]
                there = (scale > 0) & (ours != 0)
                found.append(np.where(there, ours / np.where(there, scale, 1.0) - theirs, 0.0))
        for begin, end in spans(TensorInfo("F64", found[0].shape), _BLOCK):
            yield begin, found[0][begin:end]

    return blocks


def _scalings(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
    """d and c that make Σ (W_ij − d_i·c_j·W₀_ij)² small: least squares over rows and columns, alternating.

    Both matrices are first brought to a size of about 1 everywhere. Weights that are large in either do not count: one
    that is huge because nothing reads it, or a channel of such weights, would otherwise dominate least squares.
    Clipping them would not do: one that is clipped in only one of the two moves its row by more than Δ does.
    """
    (own, *mine), (public, *bases) = (_evened(x) for x in (ours, theirs))
    usual = np.maximum(np.abs(own), np.abs(public)) < 2.0**_USUAL
    both, square = (Fixed.of(np.where(usual, x * public, 0.0)) for x in (own, public))
    sides = [(both, square), (transposed(both), transposed(square))]
    scales = [np.zeros(ours.shape[0]), np.ones(ours.shape[1])]
    for turn in range(2 * _ITERATIONS):
        products, squares = sides[turn % 2]
        other = scales[1 - turn % 2][:, None]
        along = times(products, Fixed.of(other)).floats()[:, 0]
        length = times(squares, Fixed.of(other * other)).floats()[:, 0]
        scales[turn % 2] = np.where((along > 0) & (length > 0), along / np.where(length > 0, length, 1.0), 0.0)
    return np.ldexp(scales[0], mine[0] - bases[0]), np.ldexp(scales[1], mine[1] - bases[1])


def _evened(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int32], NDArray[np.int32]]:
    """A matrix without the scales of its rows and columns; and these scales, in whole octaves."""
    bits = bits_of(values)
    rows, columns = (((x + 128) >> 8).astype(np.int32) for x in scales_of(lambda: iter([(0, bits)]), values.shape))
    return np.ldexp(values, -(rows[:, None] + columns[None, :])), rows, columns


def _finite(values: NDArray[Any]) -> NDArray[np.float64]:
    return np.where(np.isfinite(values), values, 0).astype(np.float64)


def _matrix(model: Model, name: str, swapped: bool) -> Iterator[tuple[int, NDArray[Any]]]:
    """Blocks of a weight's rows, as outputs × inputs."""
    if not swapped:
        yield from model.blocks(name, _BLOCK)
        return
    whole = _whole(model, name).T
    for begin, end in spans(TensorInfo("F64", whole.shape), _BLOCK):
        yield begin, whole[begin:end]


def _whole(model: Model, name: str) -> NDArray[Any]:
    return np.concatenate([block for _, block in model.blocks(name, _BLOCK)])


# --- a suspect --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Base:
    """The public base model: as it is stored, and rounded as its digest sees it."""

    stored: Suspect
    rounded: Model


@dataclass(eq=False)
class Gauged:
    """A suspect's factors in the anchor's gauge: a model of the adapter's layout, computed layer by layer.

    Attributes:
        layers: Δ of every layer that was found.
        anchor: the model with A₀.
        match: how the suspect's tensors were found.
        merged: whether the suspect has whole weights instead of factors.
        ranks: the ranks of the suspect's factors that differ from the layout's.
        alignment: how a whole model was aligned before, or None.
    """

    layers: Mapping[Factors, Blocks]
    anchor: Model
    match: Match
    merged: bool
    ranks: tuple[int, ...] = ()
    alignment: Alignment | None = None

    def __post_init__(self) -> None:
        self._done: tuple[Factors, dict[str, NDArray[np.float32]]] | None = None
        self._of = {name: layer for layer in self.layers for name in (layer.down, layer.up)}

    @property
    def kind(self) -> Reason:
        """What the suspect is."""
        if self.merged:
            return Reason.of("read.whole-model")
        return Reason.of("read.adapter-of-rank", ranks=self.ranks) if self.ranks else Reason.of("read.adapter")

    @property
    def names(self) -> dict[str, str]:
        """The carriers that the suspect has, each under its own name."""
        return {name: name for name in self._of}

    def covered(self, layout: ModelLayout) -> int:
        """How many carrying weights come from the suspect: all but those of channels that an alignment did not find."""
        total = 0
        for spec, _ in layout.spans("carrier"):
            if spec.name in self._of:
                layer = self._of[spec.name]
                axis = int(spec.name == layer.down)  # A has the weight's inputs, B its outputs
                indices = {} if self.alignment is None else self.alignment.indices
                found = indices.get((layer.weight, axis ^ layer.transposed))
                total += spec.size if found is None else spec.size // spec.shape[axis] * int((found >= 0).sum())
        return total

    def blocks(self, name: str, limit: int = _BLOCK) -> Iterator[tuple[int, NDArray[Any]]]:
        layer = self._of[name]
        if self._done is None or self._done[0] != layer:
            try:
                down, up = gauge(self.layers[layer], _whole(self.anchor, layer.down))
            except SingularError:
                raise _no_gauge(layer) from None
            self._done = layer, {layer.down: down, layer.up: up}
        whole = self._done[1][name]
        for begin, end in spans(TensorInfo("F32", whole.shape), limit):
            yield begin, whole[begin:end]


def gauge_suspect(
    suspect: Suspect,
    layout: ModelLayout,
    anchor: Model,
    lora: Lora,
    base: Callable[[], Base | None] = lambda: None,
    groups: Groups | None = None,
    *,
    progress: Progress | None = None,
) -> Gauged:
    """Reads a suspect as factors in the anchor's gauge.

    A suspect that has half of the layers' weights is a whole model, even if its files have factors as well; only then
    `base` is called. With `groups`, those of the base model, its channels are first aligned to the base, and their
    scales removed. Any other suspect is an adapter.
    """
    if groups is None and not is_whole(suspect, layout, lora):
        return _from_factors(suspect, layout, anchor, lora)
    public = base()
    if public is None:
        raise RecordError(
            "the suspect is a whole model: put the base model next to the manifest, or name it with --base"
        )
    if groups is None:
        match = match_layout(suspect, _whole_layout(layout, lora))
        layers = {
            layer: _difference(suspect, match.names[layer.weight], public.rounded, layer)
            for layer in lora.layers
            if layer.weight in match.names
        }
        return Gauged(layers, anchor, replace(match, casts={}), merged=True)
    whole = base_layout(public.stored, lora.layers)
    match = match_layout(suspect, whole, groups.resizable())
    if not match.names:
        raise InconclusiveError(
            "the suspect has none of the base model's weights, so that it cannot be aligned: try without --align"
        )
    every = {**match.plain, **match.names}
    found = align(suspect, public.rounded, whole, groups, every, progress=progress)
    aligned = found.model(suspect, every)
    layers = {
        layer: _rescaled_difference(aligned, layer.weight, public.rounded, layer)
        for layer in lora.layers
        if layer.weight in match.names
    }
    return Gauged(layers, anchor, match, merged=True, alignment=found)


def is_whole(suspect: Suspect, layout: ModelLayout, lora: Lora) -> bool:
    """Whether a suspect has at least half of the layers' weights, by count."""
    there, all_of_them = match_layout(suspect, _whole_layout(layout, lora)).coverage
    return 2 * there >= all_of_them


def _whole_layout(layout: ModelLayout, lora: Lora) -> ModelLayout:
    """The layout of the weights that the factors belong to, without reading the base."""
    shapes = {spec.name: spec.shape for spec in layout.tensors}
    specs = []
    for layer in lora.layers:
        shape = (shapes[layer.up][0], shapes[layer.down][1])
        specs.append(TensorSpec(layer.weight, "F32", shape[::-1] if layer.transposed else shape, "carrier"))
    return ModelLayout(in_order(specs))


def _from_factors(suspect: Suspect, layout: ModelLayout, anchor: Model, lora: Lora) -> Gauged:
    axes = {name: {axis} for layer in lora.layers for name, axis in ((layer.down, 0), (layer.up, 1))}
    match = match_layout(suspect, layout, axes)
    shapes = {spec.name: spec.shape for spec in layout.tensors}
    layers, problems, ranks = {}, list(match.problems), set()
    for layer in lora.layers:
        if layer.down not in match.names or layer.up not in match.names:
            continue
        down, up = match.names[layer.down], match.names[layer.up]
        rank = suspect.tensors[down].shape[0]
        if rank != suspect.tensors[up].shape[1] or not rank:
            problems.append(Reason.of("read.factors-do-not-fit", down=printable(down), up=printable(up)))
            continue
        if rank != shapes[layer.down][0]:
            ranks.add(rank)
        layers[layer] = _product(_whole(suspect, up), _whole(suspect, down))
    return Gauged(layers, anchor, replace(match, problems=tuple(problems)), False, tuple(sorted(ranks)))
