"""What is done to a LoRA adapter to get rid of its mark: other factors of the same product, other ranks, merging.

Adapters are mappings of tensors named as PEFT names them, PATH.lora_A.weight (r × n) and PATH.lora_B.weight (m × r).
docs/lora.md says what is left of the mark after each. Needs torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quorumark.errors import InputError
from quorumark.research.attacks.base import Weights, _torch

__all__ = ["change_rank", "factor_names", "merge", "refactor"]

_PEFT = "base_model.model."


def factor_names(adapter: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(A, B, the weight of the base that they belong to) for each layer of an adapter."""
    found = 0
    for name in adapter:
        if ".lora_A" in name and name.replace(".lora_A", ".lora_B") in adapter:
            found += 1
            weight = f"{name[: name.index('.lora_A')].removeprefix(_PEFT)}.weight"
            yield name, name.replace(".lora_A", ".lora_B"), weight
    if not found:
        raise InputError("adapter", "must have tensors named ….lora_A.weight and ….lora_B.weight")


def refactor(adapter: Mapping[str, Any], seed: int = 0, condition: float = 10.0) -> Weights:
    """R·A and B·R⁻¹ for a random R in each layer, of the given condition number: the same function."""
    torch = _torch()
    random = torch.Generator().manual_seed(seed)
    out = dict(adapter)
    for down, up, _ in factor_names(adapter):
        rank = adapter[down].shape[0]
        turns = [torch.linalg.qr(torch.randn(rank, rank, generator=random, dtype=torch.float64))[0] for _ in range(2)]
        sizes = condition ** torch.linspace(-0.5, 0.5, rank, dtype=torch.float64)
        out[down] = (turns[0] @ torch.diag(sizes) @ turns[1] @ adapter[down].double()).to(adapter[down].dtype)
        back = turns[1].T @ torch.diag(1 / sizes) @ turns[0].T
        out[up] = (adapter[up].double() @ back).to(adapter[up].dtype)
    return out


def change_rank(adapter: Mapping[str, Any], rank: int) -> Weights:
    """The product of the factors, factored anew by singular values: the nearest one of that rank.

    With the adapter's own rank or a larger one it is the same function.
    """
    torch = _torch()
    out = dict(adapter)
    for down, up, _ in factor_names(adapter):
        left, sizes, right = torch.linalg.svd(adapter[up].double() @ adapter[down].double(), full_matrices=False)
        root = sizes[:rank].clamp(min=0).sqrt()
        new_down, new_up = root[:, None] * right[:rank], left[:, :rank] * root
        short = rank - len(root)
        if short > 0:  # more than the weight has: zeros
            new_down = torch.nn.functional.pad(new_down, (0, 0, 0, short))
            new_up = torch.nn.functional.pad(new_up, (0, short))
        out[down], out[up] = new_down.to(adapter[down].dtype), new_up.to(adapter[up].dtype)
    return out


def merge(adapter: Mapping[str, Any], base: Mapping[str, Any], scaling: float) -> Weights:
    """The base with scaling·B·A added to its weights, `scaling` α/r for the adapter's own strength, in its types."""
    out = {name: tensor.detach().clone() for name, tensor in base.items()}
    for down, up, weight in factor_names(adapter):
        if weight not in out:
            raise InputError("base", "must have the weights that the adapter belongs to", f"without {weight!r}")
        added = scaling * adapter[up].double() @ adapter[down].double()
        out[weight] = (out[weight].double() + added).to(out[weight].dtype)
    return out
