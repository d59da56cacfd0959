"""Batch normalisation of channels-last tensors with what follows it, max(0, ·) and a shortcut, for CUDA (Triton).

    x̂ = (x − mean)/√(var + ε),   z = γ·x̂ + β + shortcut,   y = max(0, z)

Two passes forwards (sums, then y) and two back (sums, then dx), each over nothing but what it needs; sums are in
float32. A compiler's kernels for the same take twice as long (docs/lab.md).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quorumark.errors import InputError

_ROWS = 64  # pixels of a tile
_COLUMNS = 64  # channels of a tile
_PROGRAMS = 256  # that a kernel has, if there are tiles enough
_WARPS = 4


# no annotations but constexpr: Triton would look their names up when it compiles
@triton.jit
def _places(j, rows, channels, tiles, t, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the program's tile t lies, and which of it is there. Less than 2^31 elements: see `norm`."""
    i = (tl.program_id(0) * tiles + t) * ROWS + tl.arange(0, ROWS)
    return i[:, None] * channels + j[None, :], (i < rows)[:, None] & (j < channels)[None, :]


@triton.jit
def _spread(SUMS, j, inside, rows, channels, eps):  # type: ignore[no-untyped-def]
    """Each channel's mean, variance and 1/√(variance + ε), from Σ x and Σ x²."""
    mean = tl.load(SUMS + j, inside, other=0.0) / rows
    variance = tl.maximum(tl.load(SUMS + channels + j, inside, other=0.0) / rows - mean * mean, 0.0)
    return mean, variance, 1 / tl.sqrt(variance + eps)


@triton.jit
def _sums(X, SUMS, rows, channels, tiles, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """SUMS[0] += Σ x, SUMS[1] += Σ x², by channels."""
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    one, two = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    for t in range(tiles):
        place, here = _places(j, rows, channels, tiles, t, ROWS)
        x = tl.load(X + place, here, other=0.0).to(tl.float32)
        one += x
        two += x * x
    tl.atomic_add(SUMS + j, tl.sum(one, 0), j < channels, sem="relaxed")
    tl.atomic_add(SUMS + channels + j, tl.sum(two, 0), j < channels, sem="relaxed")


@triton.jit
def _forwards(  # type: ignore[no-untyped-def]
    X, SHORTCUT, Y, SUMS, GAIN, SHIFT, MEAN, VARIANCE, rows, channels, tiles, eps, momentum,
    ADDED: tl.constexpr, CUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Y, and the running statistics, by the first program of each channel."""
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = j < channels
    mean, variance, scale = _spread(SUMS, j, inside, rows, channels, eps)
    if tl.program_id(0) == 0:
        old_mean, old_variance = tl.load(MEAN + j, inside), tl.load(VARIANCE + j, inside)
        unbiased = variance * (rows / (rows - 1.0))
        tl.store(MEAN + j, old_mean + momentum * (mean - old_mean), inside)
        tl.store(VARIANCE + j, old_variance + momentum * (unbiased - old_variance), inside)
    gain = scale * tl.load(GAIN + j, inside)
    shift = tl.load(SHIFT + j, inside) - mean * gain
    for t in range(tiles):
        place, here = _places(j, rows, channels, tiles, t, ROWS)
        z = tl.load(X + place, here).to(tl.float32) * gain[None, :] + shift[None, :]
        if ADDED:
            z += tl.load(SHORTCUT + place, here).to(tl.float32)
        if CUT:
            z = tl.maximum(z, 0.0)
        tl.store(Y + place, z.to(Y.dtype.element_ty), here)


@triton.jit
def _back_sums(  # type: ignore[no-untyped-def]
    DY, X, Y, DZ, SUMS, GAIN, SHIFT, rows, channels, tiles, eps,
    ADDED: tl.constexpr, CUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """SUMS[2] += Σ dz, SUMS[3] += Σ dz·x̂; with a shortcut, dz is written: it is the shortcut's gradient."""
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = j < channels
    mean, _, scale = _spread(SUMS, j, inside, rows, channels, eps)
    gain, shift = tl.load(GAIN + j, inside, other=0.0), tl.load(SHIFT + j, inside, other=0.0)
    one, two = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    for t in range(tiles):
        place, here = _places(j, rows, channels, tiles, t, ROWS)
        dz = tl.load(DY + place, here, other=0.0).to(tl.float32)
        x = (tl.load(X + place, here, other=0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
        if ADDED:
            if CUT:
                dz = tl.where(tl.load(Y + place, here, other=0.0).to(tl.float32) > 0, dz, 0.0)
            tl.store(DZ + place, dz.to(DZ.dtype.element_ty), here)
        elif CUT:
            dz = tl.where(x * gain[None, :] + shift[None, :] > 0, dz, 0.0)
        one += dz
        two += dz * x
    tl.atomic_add(SUMS + 2 * channels + j, tl.sum(one, 0), inside, sem="relaxed")
    tl.atomic_add(SUMS + 3 * channels + j, tl.sum(two, 0), inside, sem="relaxed")


@triton.jit
def _back(  # type: ignore[no-untyped-def]
    DZ, X, DX, SUMS, GAIN, SHIFT, rows, channels, tiles, eps,
    CUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dx = γ/√(var + ε)·(dz − Σ dz/n − x̂·Σ(dz·x̂)/n)."""
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = j < channels
    mean, _, scale = _spread(SUMS, j, inside, rows, channels, eps)
    gain, shift = tl.load(GAIN + j, inside, other=0.0), tl.load(SHIFT + j, inside, other=0.0)
    one = tl.load(SUMS + 2 * channels + j, inside, other=0.0) / rows
    two = tl.load(SUMS + 3 * channels + j, inside, other=0.0) / rows
    for t in range(tiles):
        place, here = _places(j, rows, channels, tiles, t, ROWS)
        dz = tl.load(DZ + place, here, other=0.0).to(tl.float32)
        x = (tl.load(X + place, here, other=0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
        if CUT:
            dz = tl.where(x * gain[None, :] + shift[None, :] > 0, dz, 0.0)
        dx = (gain * scale)[None, :] * (dz - one[None, :] - x * two[None, :])
        tl.store(DX + place, dx.to(DX.dtype.element_ty), here)


class _Norm(torch.autograd.Function):
    """y of x, a shortcut or None, γ and β; the running mean and variance move along."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shortcut: Tensor | None, gain: Tensor, shift: Tensor, running: Any, cut: bool, eps: float,
        momentum: float,
    ) -> Tensor:  # fmt: skip
        x = _last(x)
        shortcut = None if shortcut is None else _last(shortcut)
        channels = x.shape[1]
        rows = x.numel() // channels
        y, sums = torch.empty_like(x), torch.zeros(4, channels, dtype=torch.float32, device=x.device)
        grid, shape = _grid(rows, channels)
        _sums[grid](x, sums, rows, channels, **shape)
        _forwards[grid](
            x, x if shortcut is None else shortcut, y, sums, gain, shift, *running, rows, channels, eps=eps,
            momentum=momentum, ADDED=shortcut is not None, CUT=cut, **shape,
        )  # fmt: skip
        ctx.added, ctx.cut, ctx.eps = shortcut is not None, cut, eps
        ctx.save_for_backward(x, y if ctx.added and cut else x, sums, gain, shift)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, y, sums, gain, shift = ctx.saved_tensors
        dy = _last(dy)
        channels = x.shape[1]
        rows = x.numel() // channels
        dx, dz = torch.empty_like(x), torch.empty_like(x) if ctx.added else dy
        grid, shape = _grid(rows, channels)
        _back_sums[grid](
            dy, x, y, dz, sums, gain, shift, rows, channels, eps=ctx.eps, ADDED=ctx.added, CUT=ctx.cut, **shape
        )  # fmt: skip
        cut = ctx.cut and not ctx.added  # dz has been cut already
        _back[grid](dz, x, dx, sums, gain, shift, rows, channels, eps=ctx.eps, CUT=cut, **shape)
        return dx, dz if ctx.added else None, sums[3], sums[2], None, None, None, None


def norm(
    x: Tensor, shortcut: Tensor | None, gain: Tensor, shift: Tensor, running: tuple[Tensor, Tensor], *, cut: bool,
    eps: float, momentum: float = 0.1,
) -> Tensor:  # fmt: skip
    """Batch normalisation in training, plus a shortcut if given, and max(0, ·) of it if `cut`."""
    if x.numel() >= 2**31:
        raise InputError("a batch", "must have less than 2^31 values in each layer", f"{x.numel()}")
    return _Norm.apply(x, shortcut, gain, shift, running, cut, eps, momentum)


def _last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _grid(rows: int, channels: int) -> tuple[tuple[int, int], dict[str, int]]:
    across, down = triton.cdiv(channels, _COLUMNS), triton.cdiv(rows, _ROWS)
    tiles = max(1, down * across // _PROGRAMS)
    return (triton.cdiv(down, tiles), across), {"tiles": tiles, "ROWS": _ROWS, "COLUMNS": _COLUMNS, "num_warps": _WARPS}
