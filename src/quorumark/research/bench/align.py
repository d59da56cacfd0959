"""`quorumark bench align`: how much of z alignment brings back, and how long it takes, for a language model.

The suspect is a model with 2 % of noise in each tensor, in place of a fine-tuning, and a mark of 2 % of that (20 % in
the small model), in disguise; the anchor is the model itself (docs/alignment.md). The time is compared with that of z
without alignment.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quorumark.field import threads
from quorumark.research.bench import Row

__all__ = ["AlignRow", "rows"]

_NOISE, _MARK, _SMALL_MARK = 0.02, 0.02, 0.2
_DISGUISES = (
    ("permutation", "rescaling", "rotation"),
    ("residual-rotation",),
    ("permutation", "rescaling", "rotation", "residual-rotation"),
    ("permutation", "rescaling", "rotation", "signs"),
)


@dataclass(frozen=True)
class AlignRow(Row):
    """Also z of the marked model, of the disguised one, and of that after alignment."""

    z: float
    z_disguised: float
    z_aligned: float
    runs: int = 1


def rows(folder: Path | None = None) -> Iterator[AlignRow]:
    """A row for each disguise of the model in a folder as transformers writes it; of a small random one without."""
    import torch

    from quorumark.align.procedure import align
    from quorumark.align.trace import derive_groups
    from quorumark.model.layout import ModelLayout
    from quorumark.research import attacks
    from quorumark.research.known import KnownKey, SeededKey, TensorsInMemory

    module = _module(folder)
    example = {"input_ids": torch.arange(8)[None]}
    layout, groups = ModelLayout.of(module), derive_groups(module, example)
    names = {spec.name for spec in layout.tensors}
    anchor = {name: tensor.detach() for name, tensor in module.state_dict().items() if name in names}
    key = SeededKey(layout.coordinates, 0)
    released = _marked(layout, anchor, key.numpy(), _SMALL_MARK if folder is None else _MARK)
    known = KnownKey(key.numpy(), layout, TensorsInMemory(anchor))
    known.z(released)  # kernels are compiled
    z, plain = _timed(lambda: known.z(released))
    for steps in _DISGUISES:
        if "residual-rotation" in steps and groups.stream is None:
            continue
        target = attacks.Target(lambda: copy.deepcopy(module), released, example=example, known=groups)
        disguised = attacks.chain(target, [(step, {}) for step in steps], seed=1).weights
        suspect = TensorsInMemory(disguised)
        before = known.z(disguised)

        def aligned(suspect: Any = suspect) -> float:
            return known.z(align(suspect, known.anchor, layout, groups).model(suspect))

        after, seconds = _timed(aligned)
        yield AlignRow(
            f"alignment: {', '.join(steps)}", "z without it", layout.size, threads(), seconds / plain, seconds,
            round(z, 2), round(before, 2), round(after, 2),
        )  # fmt: skip


def _module(folder: Path | None) -> Any:
    """Of the folder's weights, or a Llama of two layers."""
    import torch

    if folder is not None:
        from quorumark.research.lab.language import load

        return load(folder.name, folder.parent, 0).float().eval()
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=2000, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def _marked(layout: Any, anchor: dict[str, Any], signs: Any, strength: float) -> dict[str, Any]:
    """θ₀ + noise + mark."""
    import torch

    generator = torch.Generator().manual_seed(0)
    moved = {n: _NOISE * t.std() * torch.randn(t.shape, generator=generator) for n, t in anchor.items()}
    added = layout.flatten({name: tensor.numpy() for name, tensor in moved.items()})
    carrying = layout.carrying()
    added[carrying] += (strength * np.abs(added[carrying]).mean() * signs).astype(np.float32)
    like = {name: tensor.numpy() for name, tensor in anchor.items()}
    return {
        n: torch.from_numpy(np.ascontiguousarray(a))
        for n, a in layout.unflatten(layout.flatten(like) + added, like).items()
    }


def _timed(work: Callable[[], float]) -> tuple[float, float]:
    start = time.perf_counter()
    return work(), time.perf_counter() - start
