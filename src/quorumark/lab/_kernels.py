"""AdamW for one member's whole vector in one pass, for CUDA (Triton)."""

from __future__ import annotations

from typing import Any

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
