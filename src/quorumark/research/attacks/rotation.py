"""Attacks that turn the channels of a transformer into mixtures of each other and leave the function as it is.

A head compares queries with keys and hands values on to the output: the scores q·k and the product o·v stay for

    queries and keys     q → A·q, k → A⁻ᵀ·k     any invertible A; with rotary positions, for each pair of channels that
                                                they turn together, a rotation (and a scale), which commutes with them
    values and outputs   v → A·v, o → o·A⁻¹     any invertible A

and between norms without gains (RMSNorm, its gains folded into what reads them) the whole residual stream may be turned
by one orthogonal matrix. Alignment undoes all three (docs/alignment.md, "Mixings" and "The residual stream").

Layers are found by the names that transformers uses: c_attn and c_proj (GPT-2), q_proj, k_proj, v_proj and o_proj with
rotary positions (Llama, Mistral, Qwen2, SmolLM).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from quorumark.errors import InputError
from quorumark.research.attacks.base import Attack, Target, Weights, _torch, aliases

PARTS = ("all", "queries-keys", "values-outputs")
_REMEDY = "must have attention or norms as GPT-2 or Llama of transformers have them, for a rotation"


@dataclass(frozen=True)
class _Layer:
    """An attention layer: the path of its module, and where its heads lie.

    `fused` is GPT-2's one matrix for queries, keys and values, stored with the outputs in columns.
    """

    path: str
    heads: int
    shared: int  # query heads for each head of keys and values
    size: int
    fused: bool
    rotary: bool
    normed: bool  # queries and keys are normed within a head, which no rotation passes

    def rows(self, what: str, head: int) -> tuple[str, int, int, slice]:
        """The layer, its axis of outputs (of weights), that of inputs, and the places of a head there."""
        place = slice(head * self.size, (head + 1) * self.size)
        if not self.fused:
            return f"{self.path}.{what}_proj", 0, 1, place
        if what == "o":
            return f"{self.path}.c_proj", 1, 0, place
        start = "qkv".index(what) * self.heads * self.size
        return f"{self.path}.c_attn", 1, 0, slice(start + place.start, start + place.stop)


def _layers(module: Any) -> list[_Layer]:
    rotary = any(name.endswith("rotary_emb") for name, _ in module.named_modules())
    partial = float(getattr(getattr(module, "config", None), "partial_rotary_factor", None) or 1.0) != 1.0
    found = []
    for path, layer in module.named_modules():
        if hasattr(layer, "c_attn") and hasattr(layer, "num_heads") and not getattr(layer, "is_cross_attention", False):
            found.append(_Layer(path, layer.num_heads, 1, layer.head_dim, True, False, False))
        elif all(hasattr(layer, f"{x}_proj") for x in "qkvo") and hasattr(layer, "head_dim") and rotary:
            queries, keys = (getattr(layer, f"{x}_proj").weight.shape[0] // layer.head_dim for x in "qk")
            normed = partial or hasattr(layer, "q_norm") or hasattr(layer, "k_norm")
            found.append(_Layer(path, keys, queries // keys, layer.head_dim, False, True, normed))
    if not found:
        raise InputError("target", _REMEDY)
    return found


# --- within heads -----------------------------------------------------------------------------------------


def orthogonal(size: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """A uniformly random orthogonal matrix."""
    q, r = np.linalg.qr(rng.standard_normal((size, size)))
    found: np.ndarray[Any, Any] = q * np.sign(np.diag(r))
    return found


def _map(size: int, octaves: float, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """An orthogonal matrix, or with octaves U·diag(2^u)·V for u uniform in ±octaves."""
    turned = orthogonal(size, rng)
    return turned if not octaves else (turned * np.exp2(rng.uniform(-octaves, octaves, size))) @ orthogonal(size, rng)


def _pairs(size: int, octaves: float, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """For each pair (i, i + size/2), which rotary positions turn together, an angle and a scale of its own."""
    half = size // 2
    angle, scale = rng.uniform(0, 2 * np.pi, half), np.exp2(rng.uniform(-octaves, octaves, half))
    cos, sin = np.diag(scale * np.cos(angle)), np.diag(scale * np.sin(angle))
    return np.block([[cos, -sin], [sin, cos]])


def _apply(weights: Weights, where: tuple[str, int, int, slice], matrix: np.ndarray[Any, Any], *, reads: bool) -> None:
    """Channels c → matrix·c at a place: of what a layer gives (weights and biases), or of what it reads."""
    name, rows, columns, place = where
    torch = _torch()
    for leaf in ("weight",) if reads else ("weight", "bias"):
        w = weights.get(f"{name}.{leaf}")
        if w is None:
            continue
        axis = (columns if reads else rows) if w.dim() > 1 else 0
        moved = w.movedim(axis, 0)  # a view: written in place
        by = torch.from_numpy(matrix).to(w.device)
        moved[place] = (by @ moved[place].double().reshape(len(matrix), -1)).view(moved[place].shape).to(w.dtype)


def rotate(target: Target, seed: int, *, part: str = "all", octaves: float = 0.0) -> tuple[Weights, dict[str, Any]]:
    """In every head, queries against keys and values against outputs by a random orthogonal matrix.

    With `octaves` by any invertible one, whose singular values are up to 2^±octaves.
    """
    if part not in PARTS:
        raise InputError("part", f"must be one of {', '.join(PARTS)}", repr(part))
    if not 0 <= octaves <= 8:
        raise InputError("octaves", "must be from 0 to 8", octaves)
    rng = np.random.default_rng(seed)
    weights, count = target.copied(), 0
    for layer in _layers(target.module()):
        for head in range(layer.heads):
            queries = range(head * layer.shared, (head + 1) * layer.shared)
            if part != "values-outputs" and not layer.normed:
                by = (_pairs if layer.rotary else _map)(layer.size, octaves, rng)
                for query in queries:
                    _apply(weights, layer.rows("q", query), by, reads=False)
                _apply(weights, layer.rows("k", head), np.linalg.inv(by).T, reads=False)
                count += 1
            if part != "queries-keys":
                by = _map(layer.size, octaves, rng)
                _apply(weights, layer.rows("v", head), by, reads=False)
                for query in queries:
                    _apply(weights, layer.rows("o", query), np.linalg.inv(by).T, reads=True)
                count += 1
    return weights, {"matrices": count}


# --- the residual stream ----------------------------------------------------------------------------------


def _blocks(module: Any) -> Iterator[tuple[str, list[str], list[str]]]:
    """Each norm of a Llama-type model, the layers that read it, and those that write to the stream after it."""
    inner = next((p for p, m in module.named_modules() if hasattr(m, "layers") and hasattr(m, "embed_tokens")), None)
    if inner is None:
        raise InputError("target", _REMEDY)
    prefix = f"{inner}." if inner else ""
    for number in range(len(module.get_submodule(inner).layers)):
        block = f"{prefix}layers.{number}"
        yield f"{block}.input_layernorm", [f"{block}.self_attn.{x}_proj" for x in "qkv"], [f"{block}.self_attn.o_proj"]
        yield (
            f"{block}.post_attention_layernorm",
            [f"{block}.mlp.gate_proj", f"{block}.mlp.up_proj"],
            [f"{block}.mlp.down_proj"],
        )
    yield f"{prefix}norm", ["lm_head"], [f"{prefix}embed_tokens"]


def _check_norms(module: Any, names: list[str]) -> None:
    """Norms must be x/‖x‖·gain: what a gain of 0 does not make 0 cannot be folded."""
    torch = _torch()
    for name in names:
        try:
            norm = module.get_submodule(name)
        except AttributeError:
            raise InputError("target", _REMEDY, f"no {name}") from None
        with torch.no_grad():
            gain = norm.weight.clone()
            norm.weight.zero_()
            zero = not norm(torch.ones_like(gain)).any()
            norm.weight.copy_(gain)
        if getattr(norm, "bias", None) is not None or "RMSNorm" not in type(norm).__name__ or not zero:
            raise InputError("target", _REMEDY, f"{name}: {type(norm).__name__}")


def rotate_stream(target: Target, seed: int) -> tuple[Weights, dict[str, Any]]:
    """Folds the gains of RMSNorms into what reads them, then turns the residual stream by one orthogonal matrix.

    Embeddings and output weights that were tied are not any more (the gain of the last norm is in one of them only):
    both are in the result, under both names, and `Target.module` gives an untied module.
    """
    torch = _torch()
    module, weights = target.module(), target.copied()
    for second, first in aliases(module).items():
        weights[second] = weights[first].clone()
    blocks = list(_blocks(module))
    _check_norms(module, [norm for norm, _, _ in blocks])
    width = len(weights[f"{blocks[0][0]}.weight"])
    turn = torch.from_numpy(orthogonal(width, np.random.default_rng(seed)))
    for norm, readers, writers in blocks:
        gain = weights[f"{norm}.weight"]
        by = turn.to(gain.device)
        for name in (f"{reader}.weight" for reader in readers):
            w = weights[name]
            weights[name] = ((w.double() * gain.double()) @ by.T).to(w.dtype)
        for writer in writers:
            for name in (f"{writer}.weight", f"{writer}.bias"):
                w = weights.get(name)
                if w is not None and writer.endswith("embed_tokens"):
                    weights[name] = (w.double() @ by.T).to(w.dtype)
                elif w is not None:
                    weights[name] = (by @ w.double()).to(w.dtype)
        weights[f"{norm}.weight"] = torch.ones_like(gain)
    return weights, {"width": width}


ATTACKS = (
    Attack("rotation", rotate, (*({"part": p} for p in PARTS), {"octaves": 1.0}), keeps=True),
    Attack("residual-rotation", rotate_stream, keeps=True),
)
