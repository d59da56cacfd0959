"""What takes one pass over a vector instead of many, for CUDA (Triton): AdamW, and sums of models in integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl


# no annotations but constexpr: Triton would look their names up when it compiles
@triton.jit
def _adamw(  # type: ignore[no-untyped-def]
    P, M, V, G, LOW, C, n, lr, decay, b1, b2, eps,
    HAS_LOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = i < n
    g = tl.load(G + i, here).to(tl.float32)
    p, m, v = tl.load(P + i, here), tl.load(M + i, here), tl.load(V + i, here)
    first, second = tl.load(C), tl.load(C + 1)  # 1/(1 − β1^t), 1/(1 − β2^t)
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g * g
    p = p * (1 - lr * decay) - lr * first * m / (tl.sqrt(v * second) + eps)
    tl.store(P + i, p, here)
    tl.store(M + i, m, here)
    tl.store(V + i, v, here)
    if HAS_LOW:
        tl.store(LOW + i, p.to(tl.bfloat16), here)


def adamw(
    p: Any, m: Any, v: Any, g: Any, low: Any, corrections: Any, lr: float, decay: float, betas: Any, eps: float
) -> None:
    """One step, in place; `low`, if given, becomes p in bfloat16."""
    n, block = p.numel(), 2048
    has_low = low is not None
    target = low if has_low else p
    grid = (triton.cdiv(n, block),)
    _adamw[grid](
        p, m, v, g, target, corrections, n, lr, decay, *betas, eps, HAS_LOW=has_low, BLOCK=block, num_warps=8
    )  # fmt: skip


# --- integer multiples of 2^-40 -------------------------------------------------------------------------------


@triton.jit
def _nearest(x):  # type: ignore[no-untyped-def]
    """Rounded once, ties to even: one instruction, so that no multiplication before it is fused into something else."""
    return tl.inline_asm_elementwise("cvt.rni.s64.f64 $0, $1;", "=l,d", [x], dtype=tl.int64, is_pure=True, pack=1)


@triton.jit
def _weighted_sum(MODELS, stride, WEIGHTS, OUT, n, members, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = i < n
    total = tl.zeros([BLOCK], tl.int64)
    place = MODELS + i
    for k in range(members):
        total += _nearest(tl.load(place, here, other=0.0).to(tl.float64) * tl.load(WEIGHTS + k))
        place += stride
    tl.store(OUT + i, total, here)


def weighted_sum(models: Any, weights: Sequence[float]) -> Any:
    """Σ round(w_k·θ_k) over the rows of float32 models, as int64."""
    members, n = models.shape
    assert models.stride(1) == 1  # noqa: S101
    out = torch.empty(n, dtype=torch.int64, device=models.device)
    factors = _pinned(weights, torch.float64).to(models.device, non_blocking=True)
    block = 1024
    _weighted_sum[(triton.cdiv(n, block),)](models, models.stride(0), factors, out, n, members, BLOCK=block)
    return out


@triton.jit
def _difference(MODEL, BEFORE, i, here):  # type: ignore[no-untyped-def]
    """|E(θ) − E(θ_before)| with E(w) = round(2^40·w)."""
    scale = 1099511627776.0
    now = _nearest(tl.load(MODEL + i, here, other=0.0).to(tl.float64) * scale)
    before = _nearest(tl.load(BEFORE + i, here, other=0.0).to(tl.float64) * scale)
    return tl.abs(now - before)


@triton.jit
def _axis_sums(  # type: ignore[no-untyped-def]
    MODELS, stride, BEFORE, OUT, first, rows, columns, taps, tap_step, column_step, at, part, length,
    TOGETHER: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of one tensor: a program has TOGETHER rows of one member's update D.

    For |D| = low + 2^22·high, OUT[part, member, place] gets Σ low², Σ low·high and Σ high² by rows, then columns, then
    taps from place `at` on; OUT[0, member, length − 1] the largest high.
    """
    k = tl.program_id(1).to(tl.int64)
    model, before = MODELS + k * stride + first, BEFORE + first
    own = OUT + k * length
    j = tl.arange(0, COLUMNS)
    inside = j < columns
    low2, both, high2 = tl.zeros([COLUMNS], tl.int64), tl.zeros([COLUMNS], tl.int64), tl.zeros([COLUMNS], tl.int64)
    largest = tl.zeros([COLUMNS], tl.int64)
    for r in range(TOGETHER):
        row = tl.program_id(0).to(tl.int64) * TOGETHER + r
        here = j < tl.where(row < rows, columns, 0)
        row_low2, row_both, row_high2 = tl.zeros_like(low2), tl.zeros_like(low2), tl.zeros_like(low2)
        for t in range(taps):
            d = _difference(model, before, row * taps * columns + t * tap_step + j * column_step, here)
            low, high = d & 0x3FFFFF, d >> 22
            largest = tl.maximum(largest, high)
            a, b, c = low * low, low * high, high * high
            row_low2 += a
            row_both += b
            row_high2 += c
            if taps > 1:
                place = own + at + rows + columns + t
                tl.atomic_add(place, tl.sum(a))
                tl.atomic_add(place + part, tl.sum(b))
                tl.atomic_add(place + 2 * part, tl.sum(c))
        if row < rows:
            tl.store(own + at + row, tl.sum(row_low2))
            tl.store(own + at + row + part, tl.sum(row_both))
            tl.store(own + at + row + 2 * part, tl.sum(row_high2))
        low2 += row_low2
        both += row_both
        high2 += row_high2
    place = own + at + rows + j
    tl.atomic_add(place, low2, inside)
    tl.atomic_add(place + part, both, inside)
    tl.atomic_add(place + 2 * part, high2, inside)
    tl.atomic_max(own + length - 1, tl.max(largest))


def axis_sums(models: Any, before: Any, cubes: Sequence[tuple[int, int, int, int, int, int]]) -> Any:
    """`mark.axis_sums` of the rows of models against the model before, [3, K, n + 1], without their differences.

    A cube is a tensor: its first element's place, rows, columns, taps, and the steps from a tap or column to the next;
    a row has columns·taps elements.
    """
    members = len(models)
    counts = [rows + columns + (taps if taps > 1 else 0) for _, rows, columns, taps, _, _ in cubes]
    out = torch.zeros(3, members, sum(counts) + 1, dtype=torch.int64, device=models.device)
    at, together = 0, 8
    for (first, rows, columns, taps, tap_step, column_step), count in zip(cubes, counts, strict=True):
        _axis_sums[(triton.cdiv(rows, together), members)](
            models, models.stride(0), before, out, first, rows, columns, taps, tap_step, column_step, at, out.stride(0),
            out.shape[2], TOGETHER=together, COLUMNS=triton.next_power_of_2(columns), num_warps=4,
        )  # fmt: skip
        at += count
    return out


def _pinned(values: Sequence[float], kind: torch.dtype) -> Any:
    """For a copy to the device that nothing waits for."""
    made = torch.tensor(values, dtype=kind)
    return made.pin_memory() if torch.cuda.is_available() else made
