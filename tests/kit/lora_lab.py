"""A small Llama whose LoRA adapter a federation trains with a mark, for somebody who holds the key (kit/lab.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from quorumark.codec import decode
from quorumark.consortium.strength import Strength
from quorumark.model.layout import ModelLayout
from quorumark.research.attacks.lora import merge
from quorumark.research.known import KnownKey, TensorsInMemory
from quorumark.round.amplitudes import MarkState
from quorumark.round.mark import ideal_mark
from quorumark.round.movement import ideal_norms

torch.set_num_threads(1)
State = dict[str, torch.Tensor]
RANK, ALPHA = 8, 16.0
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PEFT = "base_model.model."


class LoraLinear(nn.Module):
    """W₀·x + (α/r)·B·A·x, with W₀ frozen."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + ALPHA / self.lora_A.out_features * self.lora_B(self.lora_A(x))
        return out


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    model: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61, hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=8,
            num_key_value_heads=4, max_position_embeddings=32, use_cache=False, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    return model


@cache
def sentences(seed: int, count: int = 1024) -> torch.Tensor:
    """A made-up language: after each word one of three, by a table of its own."""
    rng = np.random.default_rng(seed)
    table = rng.integers(0, 61, (61, 3))
    words = np.empty((count, 12), np.int64)
    words[:, 0] = rng.integers(0, 61, count)
    for t in range(1, 12):
        words[:, t] = table[words[:, t - 1], rng.integers(0, 3, count)]
    return torch.from_numpy(words)


def train(module: nn.Module, words: torch.Tensor, rate: float, seed: int, epochs: int = 1) -> None:
    """AdamW over whatever wants gradients."""
    optimiser = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=rate, weight_decay=0.0)
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for part in torch.randperm(len(words), generator=order).split(32):
            optimiser.zero_grad()
            loss(module, words[part]).backward()
            optimiser.step()


def loss(module: nn.Module, words: torch.Tensor) -> torch.Tensor:
    logits = module(words).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())


@cache
def base() -> State:
    """The public base model, trained on one language."""
    torch.manual_seed(0)
    module = llama()
    train(module, sentences(0)[:512], 3e-3, 0)
    return copied(module.state_dict())


def copied(state: Mapping[str, torch.Tensor]) -> State:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def adapted(adapter: Mapping[str, torch.Tensor] | None = None, rank: int = RANK, seed: int = 0) -> nn.Module:
    """The base with an adapter: this one, or a fresh one from a seed."""
    module = llama()
    module.load_state_dict(base())
    torch.manual_seed(seed)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    for layer in list(module.modules()):
        for name in LINEAR:
            if isinstance(getattr(layer, name, None), nn.Linear):
                setattr(layer, name, LoraLinear(getattr(layer, name), rank))
    if adapter is not None:
        module.load_state_dict({n.removeprefix(PEFT): t for n, t in adapter.items()}, strict=False)
    return module


def adapter_of(module: nn.Module) -> State:
    """An adapter as PEFT names its tensors."""
    return {PEFT + name: tensor.detach().clone() for name, tensor in module.state_dict().items() if ".lora_" in name}


def fresh(seed: int, rank: int = RANK) -> State:
    return adapter_of(adapted(rank=rank, seed=seed))


def tuned(adapter: Mapping[str, torch.Tensor], words: torch.Tensor, rate: float, seed: int, epochs: int = 1) -> State:
    module = adapted(adapter, rank=next(iter(adapter.values())).shape[0])
    train(module, words, rate, seed, epochs)
    return adapter_of(module)


def merged(adapter: Mapping[str, torch.Tensor], strength: float = 1.0) -> State:
    """The base with the adapter added to its weights."""
    return merge(adapter, base(), strength * ALPHA / RANK)


def perplexity(state: Mapping[str, torch.Tensor], words: torch.Tensor) -> float:
    """Of a whole model, or of an adapter on the base."""
    module = llama()
    if any(".lora_" in name for name in state):
        module = adapted(state, rank=next(iter(state.values())).shape[0])
    else:
        module.load_state_dict(dict(state))
    with torch.no_grad():
        return float(loss(module, words).exp())


@dataclass(frozen=True)
class Run:
    layout: ModelLayout
    key: NDArray[np.int64]
    anchor: State
    released: State
    state: MarkState
    reached: list[float]

    @property
    def known(self) -> KnownKey:
        return KnownKey(self.key.astype(np.int8), self.layout, TensorsInMemory(self.anchor))


@cache
def marked(rounds: int = 10, rho: str = "0.15", members: int = 4, seed: int = 1, rate: float = 5e-3) -> Run:
    """Federated averaging of A and B with a mark of strength ρ."""
    start = fresh(seed)
    layout = ModelLayout.of(start)
    key = np.random.default_rng(seed + 100).choice(np.array([-1, 1]), layout.coordinates)
    words = sentences(7)[:512]
    parts = [words[k::members] for k in range(members)]
    strength = {"rule": "rho", "rho": rho, "c_max": "0.2", "lr": f"cosine:{rounds + 4}", "dither": "0"}
    rule = Strength.of(strength, layout.coordinates)
    state = MarkState(rule, layout, "rademacher", layout.encode(start))
    now, reached = start, []
    for number in range(1, rounds + 1):
        step = rate * float(rule.rate(number))
        updates = [tuned(now, part, step, 1000 * seed + number) for part in parts]
        mean = {name: torch.stack([update[name] for update in updates]).mean(0) for name in start}
        amplitudes = state.amplitudes(number)
        total = layout.encode(mean)
        ideal_mark(total, amplitudes, key)
        results = {x: layout.encode(update) for x, update in enumerate(updates, 1)}
        norms = ideal_norms(layout, layout.encode(now), results, dict.fromkeys(results, Fraction(1, members)))
        state.advance(number, total, amplitudes, norms)
        reached.append(state.rho / 2**32)
        now = layout.unflatten(decode(total).astype(layout.dtype), mean)
    return Run(layout, key, start, now, state, reached)
