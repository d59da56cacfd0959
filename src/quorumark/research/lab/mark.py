"""The mark as the ideal functionality, in integers on the device: bit for bit what the real protocol opens.

    θ_new = decode(Σ E(a_k·θ_k) + S ⊙ τ)          E(w) = round(2^40·w), as in `quorumark.codec`

The amplitudes S are those of a real round: `MarkState` follows the run on the CPU, in a thread, while the next round
trains. What it needs of the members' updates (the paper's ‖Δ_k‖; norms by rows, columns and taps) is summed here
in integers as well, in parts that 64 bits hold.

Where updates are packed, the sum is that of their integer parts (`quorumark.research.lab.packed`).

The key is known here. That is for research: anyone who runs the lab could remove the mark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from fractions import Fraction
from itertools import islice
from math import isqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quorumark import field
from quorumark.consortium.strength import Strength
from quorumark.errors import InputError
from quorumark.model.layout import ModelLayout
from quorumark.research.known import SeededKey
from quorumark.research.lab.dither import Dither, raised
from quorumark.research.lab.packed import PackedSum, Units, backing, largest_moves, shares_of
from quorumark.round.amplitudes import NOT_PACKED, Amplitudes, MarkState
from quorumark.round.forecast import expected_z
from quorumark.round.paper import PaperScale, paper_amplitudes
from quorumark.round.units import Packing, widest

__all__ = ["Mark", "decoded", "encoded", "square_sum", "weighted_sum"]

_SCALE = float(1 << 40)
_ONE = 1 << 32
_STATISTIC = "balanced-anchor/v1"  # the default


# --- fixed point on the device ----------------------------------------------------------------------------


def encoded(vector: Tensor, weight: float = 1.0) -> Tensor:
    """E(weight·vector) as int64: rounded once, to the nearest, ties to even."""
    return torch.round(vector.double() * (weight * _SCALE)).to(torch.int64)


def decoded(total: Tensor) -> Tensor:
    """The float32 numbers that 2^-40·total stands for, rounded once."""
    return total.to(torch.float32) * (1 / _SCALE)


def weighted_sum(models: Tensor, weights: Sequence[Fraction]) -> Tensor:
    """Σ E(a_k·θ_k) over the rows of models."""
    if models.is_cuda:
        from quorumark.research.lab import _kernels

        return _kernels.weighted_sum(models, [float(weight) * _SCALE for weight in weights])  # type: ignore[no-any-return]
    total = torch.zeros(models.shape[1], dtype=torch.int64, device=models.device)
    for row, weight in zip(models, weights, strict=True):
        total += encoded(row, float(weight))
    return total


def _products(difference: Tensor) -> tuple[list[Tensor], Tensor]:
    """For |D| = low + 2^22·high: low², low·high and high², below 2^44 each; and the largest high, to be checked."""
    size = difference.abs()
    low, high = size & 0x3FFFFF, size >> 22
    return [low * low, low * high, high * high], high.max()


def _check_high(largest: int) -> None:
    if largest >> 22:
        raise InputError("a member's update", "must be below 16 in each weight")


_TOGETHER = 1 << 27  # differences of members that are looked at together, in weights: fewer, larger steps on a GPU
_BLOCK = 1 << 18  # so many products of 44 bits, added up, stay within 63


def square_sum(difference: Tensor) -> int:
    """Σ D², exactly."""
    products, largest = _products(difference)
    rest = -difference.numel() % _BLOCK
    sums = [torch.nn.functional.pad(p, (0, rest)).view(-1, _BLOCK).sum(1) for p in products]
    *parts, top = torch.stack([*sums, largest.expand_as(sums[0])]).cpu().tolist()
    _check_high(top[0])
    low, middle, high = map(sum, parts)
    return int(low + (middle << 23) + (high << 44))


# --- what each member's update looks like -----------------------------------------------------------------


def _axes_of(layout: ModelLayout) -> list[tuple[slice, tuple[int, int, int]]]:
    """The carriers' places, as rows × columns × taps."""
    found = []
    for spec, place in layout.spans("carrier"):
        if spec.size:
            rows, columns = spec.shape[:2]
            found.append((place, (rows, columns, spec.size // (rows * columns))))
    return found


def carrying_axes(layout: ModelLayout) -> list[tuple[slice, tuple[int, int, int]]]:
    """Those of the carriers whose rows, columns and taps have more than one weight: the others carry nothing."""
    found = []
    for place, shape in _axes_of(layout):
        size = shape[0] * shape[1] * shape[2]
        if size <= max(shape):
            continue
        if size // min(n for n in shape if n > 1) > 2 * _BLOCK:
            raise InputError("a tensor", f"must have up to {2 * _BLOCK} weights in each row, column and tap", size)
        found.append((place, shape))
    return found


def axis_sums(differences: Tensor, layout: ModelLayout) -> Tensor:
    """Each member's ΣD² by rows, columns and taps of the carriers that can carry, in three parts: [3, K, n + 1].

    The last column is what must be small enough (`_check_high`). Everything stays on the device.
    """
    products, largest = _products(differences)
    members, found = len(differences), []
    for place, shape in carrying_axes(layout):
        cubes = torch.stack([p[:, place].reshape(members, *shape) for p in products])
        planes = cubes.sum(4)
        found += [planes.sum(3), planes.sum(2)]
        if shape[2] > 1:
            found.append(cubes.sum((2, 3)))
    return torch.cat([*found, largest.expand(3, members, 1)], dim=2)


def axis_norms(sums: NDArray[np.int64], weight: Fraction) -> NDArray[np.int64]:
    """⌊a_k·‖D_k‖⌋ in 2^-40 for each row, column and tap, from a member's `axis_sums`."""
    _check_high(int(sums[0, -1]))
    return _weighted_roots(sums[:, :-1], weight)


def _weighted_roots(sums: NDArray[np.int64], weight: Fraction) -> NDArray[np.int64]:
    """⌊√(a²·Σ)⌋ for Σ = sums[0] + 2^23·sums[1] + 2^44·sums[2]: in float64 where that is certain, else exactly."""
    about = np.sqrt(sums[0] + sums[1] * 2.0**23 + sums[2] * 2.0**44) * float(weight)
    whole: NDArray[np.int64] = np.floor(about).astype(np.int64)
    gap = np.abs(about - np.round(about))
    for i in np.flatnonzero((gap < 1e-3) | (about > 2.0**40)):  # float64 is right to 2^-51: 2^-11 at 2^40
        square = int(sums[0, i]) + (int(sums[1, i]) << 23) + (int(sums[2, i]) << 44)
        whole[i] = isqrt(weight.numerator**2 * square // weight.denominator**2)
    return whole


# --- the mark of a run ------------------------------------------------------------------------------------


class Mark:
    """What is added in each round of a run, and the state that decides it.

    `settings` are the strength's (docs/strength.md). With several keys this is the baseline in which every member has
    its own: each adds a_k·S ⊙ τ_k. `dither` is noise that members add beside it (`quorumark.research.lab.dither`).
    """

    def __init__(
        self,
        settings: dict[str, str],
        layout: ModelLayout,
        initial: Tensor,
        keys: Sequence[SeededKey],
        device: Any,
        dither: Dither | None = None,
        packing: Packing = NOT_PACKED,
    ) -> None:
        """`initial` is θ_0 in the layout's order."""
        self.layout, self.device, self.keys, self.dither = layout, device, list(keys), dither
        self.packing = packing
        if packing.packs and (dither is not None or len(keys) != 1):
            raise InputError("packing", "must be 1 with dither or a key for each member", packing.count)
        carrying = layout.carrying()  # all of the carriers, or a sample of them
        self._carrying: Any = carrying if isinstance(carrying, slice) else torch.from_numpy(carrying).to(device)
        self.strength = Strength.of(settings, layout.coordinates)
        self.state = MarkState(self.strength, layout, "rademacher", _field(encoded(initial)), packing=packing)
        self.widened: list[tuple[int, int]] = []  # rounds in which some update needed wider units, and how many tensors
        self._signs = keys[0].signs(device) if len(keys) == 1 else None
        self._averages: list[list[int] | None] = []
        self._worker = ThreadPoolExecutor(1)
        self._next: Future[Amplitudes] | None = None
        self._host: dict[str, Tensor] = {}  # where models and sums arrive for the worker
        self.added: Tensor | None = None  # the last round's S in 2^-40, if it was marked

    @property
    def _needs_norms(self) -> bool:
        return bool(getattr(self.strength, "needs_norms", False))

    @property
    def rho(self) -> float:
        """What the mark has reached: ‖ΣA‖/‖θ − θ_a‖ over the carriers."""
        self._wait()
        return self.state.rho / _ONE

    @property
    def expected_z(self) -> float | None:
        """What a verification of the last model should find; None where each member has a key of its own."""
        self._wait()
        return expected_z(self.state, _STATISTIC) if self._signs is not None else None

    def packed_sum(self, before: Tensor, weights: Sequence[Fraction], model: Callable[[int], Tensor]) -> PackedSum:
        """What a packed round opens to, without its mark. Its units follow from the state, and are wider where an
        update does not fit: nobody trains again. Whose update needs wider ones than so few may ask for is left out.
        This waits for the device.
        """
        self._wait()
        moved = largest_moves(self.layout, before, model, len(weights))
        level, alone = self.packing.level(list(map(max, zip(*moved, strict=True))), self.state.spans), set[int]()
        if level:  # the widest of the levels that members need
            levels = {k: self.packing.level(own, self.state.spans) for k, own in enumerate(moved)}
            alone = self.state.unbacked(levels, backing(len(weights)))
            level = widest(level for k, level in levels.items() if k not in alone)
        taking = tuple(k for k in range(len(weights)) if k not in alone)
        shares, model = shares_of(weights, taking), _of(taking, model)
        units, squares = Units(self.layout, self.state.spans(level), before), None
        if self._needs_norms:
            squares = self._axis_sums(lambda i: units.rounded(model(i), shares[i]), len(taking))
        return PackedSum(units.total(model, shares), level, squares, taking)

    def apply(
        self,
        round_no: int,
        before: Tensor,
        total: Tensor,
        weights: Sequence[Fraction],
        model: Callable[[int], Tensor],
        sums: Callable[[], Tensor] | None = None,
        packed: PackedSum | None = None,
    ) -> tuple[Tensor, float]:
        """The round's global model, and its c. `total` is Σ E(a_k·θ_k), which gets the mark; `model(k)` is θ_k.

        All in the layout's order; `before` is the global model that the members started from. `sums` is a faster way to
        the `axis_sums` of all members, if there is one; `packed` is where `total` comes from if it was packed. Nothing
        here waits for the device (but under the rule `paper`).
        """
        scales, squares, members = [], None, len(weights)
        if self.strength.rule == "paper":
            scales = self._scales(before, weights, model)  # of everybody: they are summed first
        if packed is not None and len(packed.members) < members:
            weights, model = shares_of(weights, packed.members), _of(packed.members, model)
            sums = None if sums is None else _columns(packed.members, sums)
        if self._needs_norms and self.strength.rule != "paper":
            difference = self._difference(before, model)
            squares = sums() if sums is not None else self._axis_sums(difference, len(weights))
        self._wait()
        if self.strength.rule == "paper":
            opened = field.from_signed(np.array([sum(scales)], np.int64))
            amplitudes = paper_amplitudes(self.strength, self.layout, "rademacher", round_no, opened, members)
        else:
            amplitudes = self._next.result() if self._next is not None else self.state.amplitudes(round_no)
        level = b"" if packed is None else packed.level
        amplitudes = self.state.in_units(amplitudes, level)
        if level:
            self.widened.append((round_no, sum(map(bool, level))))
        embedded = amplitudes if amplitudes.marks else None
        self.added = energies = None
        if embedded is not None:
            vector = self._add(total, embedded, weights)
            if self.dither is not None:
                self.dither.add(total, self._carrying, vector, round_no, len(weights))
                energies = self.dither.energies(vector, carrying_axes(self.layout))
        after = decoded(total)
        self._advance(round_no, encoded(after), embedded, squares, weights, energies, packed)
        return after, 0.0 if embedded is None else embedded.c / _ONE

    def _difference(self, before: Tensor, model: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
        """D_k over the carriers."""
        end = self.layout.carrier_size
        origin = encoded(before[:end])
        return lambda k: encoded(model(k)[:end]) - origin

    def _scales(self, before: Tensor, weights: Sequence[Fraction], model: Callable[[int], Tensor]) -> list[int]:
        """The paper's scale of each member."""
        difference = self._difference(before, model)
        return [self._scale(k, difference(k)) for k in range(len(weights))]

    def _axis_sums(self, difference: Callable[[int], Tensor], members: int) -> Tensor:
        """`axis_sums` of all members, a few at a time."""
        together = max(1, _TOGETHER // self.layout.carrier_size)
        parts = [range(members)[at : at + together] for at in range(0, members, together)]
        return torch.cat([axis_sums(torch.stack([difference(k) for k in part]), self.layout) for part in parts], dim=1)

    def _advance(
        self,
        round_no: int,
        model: Tensor,
        embedded: Amplitudes | None,
        squares: Tensor | None,
        weights: Sequence[Fraction],
        energies: Tensor | None = None,
        packed: PackedSum | None = None,
    ) -> None:
        """The only place where the state moves on: in the worker, which also makes the next round's amplitudes.

        `model` is E(θ) on the device; it and the members' `squares` are on their way to the host when it starts, and so
        are the dither's `energies`, which must not count as motion that members have in common.
        """
        arriving = self._arriving("model", model)
        sums = None if squares is None else self._arriving("squares", squares)
        noise = None if energies is None else self._arriving("energies", energies)
        level = b"" if packed is None else packed.level
        rounded = None if packed is None or packed.squares is None else self._arriving("rounded", packed.squares)
        arrived = torch.cuda.Event() if model.is_cuda else None
        if arrived is not None:
            arrived.record()

        def work() -> Amplitudes:
            if arrived is not None:
                arrived.synchronize()
            told: tuple[Any, ...] = ()
            if sums is not None:
                norms = [axis_norms(sums[:, k].numpy(), weight) for k, weight in enumerate(weights)]
                if rounded is not None:  # of the weighted update in units: members upload the smaller ones
                    own = [axis_norms(rounded[:, k].numpy(), Fraction(1)) for k in range(len(weights))]
                    norms = list(map(np.minimum, norms, own))
                all_norms: Any = np.sum(norms, axis=0, dtype=np.int64).astype(np.uint64)
                told = (all_norms if noise is None else raised(all_norms, noise.numpy()),)
            self.state.advance(round_no, field.from_signed(arriving.numpy()), embedded, *told, level=level)
            return self.state.amplitudes(round_no + 1)

        self._next = self._worker.submit(work)

    def _arriving(self, what: str, tensor: Tensor) -> Tensor:
        """A copy on the host, which is there when the device has come so far. Its place is used again and again."""
        host = self._host.get(what)
        if host is None or host.shape != tensor.shape:
            host = self._host[what] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        host.copy_(tensor, non_blocking=True)
        return host

    def _wait(self) -> None:
        if self._next is not None:
            self._next.result()

    def amplitude_vector(self, amplitudes: Amplitudes) -> Tensor:
        """`Amplitudes.vector` on the device: for each weight the least of its row's, column's and tap's."""
        out = torch.empty(self.layout.carrier_size, dtype=torch.int64, device=self.device)
        parts = [np.asarray(values, np.int64) for axes in amplitudes.scales for values in axes]
        host = torch.from_numpy(np.concatenate(parts))
        sent = (host.pin_memory() if out.is_cuda else host).to(self.device, non_blocking=True)
        values = iter(sent.split([len(part) for part in parts]))
        for (place, shape), axes in zip(_axes_of(self.layout), amplitudes.scales, strict=True):
            rows, columns, *taps = islice(values, len(axes))
            least = torch.minimum(rows[:, None], columns[None, :])[:, :, None]
            if taps:
                least = torch.minimum(least, taps[0])
            out[place].view(shape).copy_(least.expand(shape))
        return out[self._carrying]

    def _add(self, total: Tensor, amplitudes: Amplitudes, weights: Sequence[Fraction]) -> Tensor:
        """total += S ⊙ τ, or the members' own marks, as a real round rounds them; S."""
        vector = self.added = self.amplitude_vector(amplitudes)
        if self._signs is not None:
            total[self._carrying] += vector * self._signs
            return vector
        for key, weight in zip(self.keys, weights, strict=True):
            part = torch.round(vector.double() * float(weight)).to(torch.int64)
            total[self._carrying] += part * key.signs(self.device)
        return vector

    def _scale(self, k: int, difference: Tensor) -> int:
        """The paper's scale of member k, as `embed.PaperScale` has it: c·‖Δ_k‖·EMA_k."""
        while len(self._averages) <= k:
            self._averages.append(None)
        scale = PaperScale(self.strength, self.layout)
        scale._ema = self._averages[k]
        found = _paper_scale(scale, isqrt(square_sum(difference)))
        self._averages[k] = scale._ema
        return found

    # --- keeping it ---

    def saved(self) -> dict[str, Any]:
        """For a checkpoint."""
        self._wait()
        anchor = field.to_signed(self.state.anchor) if self.strength.warmup_rounds else None
        saved = {"state": self.state.to_bytes(), "averages": self._averages, "anchor": anchor}
        return saved | {"widened": list(self.widened)}

    def restore(self, saved: dict[str, Any], model: Tensor) -> None:
        """Goes on from a checkpoint; `model` is the last global one."""
        if self._next is not None:
            wait([self._next])  # it moves the state that is replaced here; whether it fails does not matter any more
        anchor = self.state.anchor if saved["anchor"] is None else field.from_signed(saved["anchor"])
        self.state = MarkState.from_bytes(
            saved["state"], self.strength, self.layout, "rademacher", _field(encoded(model)), anchor, self.packing
        )
        self._averages, self._next = saved["averages"], None
        self.widened = list(saved.get("widened", []))

    def close(self) -> None:
        self._worker.shutdown()
        self._wait()


def _of(members: Sequence[int], model: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
    """The models of some members, by their place among these."""
    return lambda i: model(members[i])


def _columns(members: Sequence[int], sums: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The `axis_sums` of some members."""
    return lambda: sums()[:, list(members)]


def _paper_scale(scale: PaperScale, norm: int) -> int:
    """`PaperScale.scale` from a norm that is known: the average moves on, and c·‖Δ‖·EMA comes back, in 2^-40."""
    ema = norm if scale._ema is None else (9 * scale._ema[0] + norm) // 10
    scale._ema = [ema]
    return scale._strength.c * norm * ema >> 72


def _field(signed: Tensor) -> Any:
    """Field elements on the CPU."""
    return field.from_signed(signed.cpu().numpy())
