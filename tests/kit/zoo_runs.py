"""The models of `zoo`, trained in seconds and marked by somebody who holds the key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quorumark.align.alignment import Alignment
from quorumark.align.groups import Groups
from quorumark.align.procedure import align
from quorumark.align.trace import derive_groups
from quorumark.codec import decode
from quorumark.consortium.strength import Strength
from quorumark.model.layout import ModelLayout
from quorumark.research.known import KnownKey, TensorsInMemory
from quorumark.round.amplitudes import MarkState
from quorumark.round.forecast import expected_z
from quorumark.round.mark import ideal_mark
from tests.kit import lab, zoo

State = dict[str, torch.Tensor]
ROUNDS, SAMPLES = 8, 480


@dataclass(frozen=True, eq=False)
class Marked:
    """A marked model of the zoo, with what it began from and the key."""

    name: str
    anchor: State
    released: State
    layout: ModelLayout
    key: NDArray[np.int64]
    groups: Groups
    state: MarkState

    @property
    def expected_z(self) -> float:
        """What the amplitudes forecast (docs/strength.md, "Forecast")."""
        return expected_z(self.state, "balanced-anchor/v1")

    def left(self) -> NDArray[np.float64]:
        """What is left of the mark at each weight that carries, times the key: A_j if training took nothing back."""
        now, start = (
            self.layout.flatten({n: w.numpy() for n, w in each.items()}) for each in (self.released, self.anchor)
        )
        found: NDArray[np.float64] = (now - start)[self.layout.carrying()].astype(np.float64) * self.key
        return found

    @property
    def known(self) -> KnownKey:
        return KnownKey(self.key.astype(np.int8), self.layout, TensorsInMemory(self.anchor))

    def z(self, weights: Mapping[str, Any]) -> float:
        """z of a model as it is."""
        return self.known.z(weights)

    def align(self, weights: Mapping[str, Any]) -> Alignment:
        return align(TensorsInMemory(weights), TensorsInMemory(self.anchor), self.layout, self.groups)

    def z_aligned(self, weights: Mapping[str, Any]) -> float:
        return self.known.z(self.align(weights).model(TensorsInMemory(weights)))

    def output(self, weights: Mapping[str, Any]) -> torch.Tensor:
        """What a model computes for a few inputs, in double precision."""
        module = zoo.MODELS[self.name]()
        module.load_state_dict(dict(weights))
        inputs = zoo.data_of(self.name, 32)[0]
        with torch.no_grad():
            return lab.logits(module.double().eval(), inputs.double() if inputs.is_floating_point() else inputs)


def trained(
    name: str,
    start: Mapping[str, torch.Tensor],
    seed: int,
    epochs: int = 1,
    rate: float = 2e-3,
    optimiser: str = "adamw",
) -> State:
    """A model after some epochs."""
    module = zoo.MODELS[name]()
    module.load_state_dict(dict(start))
    module.train()
    inputs, labels = zoo.data_of(name, SAMPLES)
    steps: torch.optim.Optimizer = torch.optim.AdamW(module.parameters(), lr=rate, weight_decay=0.0)
    if optimiser == "sgd":
        steps = torch.optim.SGD(module.parameters(), lr=50 * rate, momentum=0.9)
    order = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    for _ in range(epochs):
        for part in torch.randperm(len(labels), generator=order).split(32):
            steps.zero_grad()
            zoo.loss(name, module, inputs[part], labels[part]).backward()
            steps.step()
    return {n: tensor.detach().clone() for n, tensor in module.state_dict().items()}


@cache
def groups_of(name: str) -> Groups:
    torch.manual_seed(0)
    inputs = zoo.data_of(name, 16)[0]
    return derive_groups(zoo.MODELS[name](), {"input_ids": inputs} if name in ("gpt2", "llama") else inputs)


@cache
def innocent(name: str, seed: int, epochs: int = ROUNDS) -> State:
    """A model that was trained from the same start without a mark, on other batches."""
    return trained(name, lab.initial(zoo.MODELS[name], 1), 5000 + seed, epochs, 1e-3)


@cache
def marked(
    name: str, seed: int = 1, optimiser: str = "adamw", rounds: int = ROUNDS, rho: str = "0.15", c_max: str = "0.25"
) -> Marked:
    """A model trained in so many rounds by one who knows the key, with a mark of at most ρ.

    The usual run is short, so that the limit of the leak stops the mark below ρ.
    """
    make = zoo.MODELS[name]
    now = start = lab.initial(make, seed)
    layout = ModelLayout.of(make())
    key = np.random.default_rng(seed + 100).choice(np.array([-1, 1]), layout.coordinates)
    strength = {
        "rule": "rho",
        "rho": rho,
        "c_max": c_max,
        "lr": f"cosine:{rounds + 4}",
        "alike": "mark",
        "dither": "0",
    }
    rule = Strength.of(strength, layout.coordinates)
    state = MarkState(rule, layout, "rademacher", layout.encode(start))
    for number in range(1, rounds + 1):
        after = trained(name, now, 1000 * seed + number, 1, 2e-3 * float(rule.rate(number)), optimiser)
        amplitudes, total = state.amplitudes(number), layout.encode(after)
        ideal_mark(total, amplitudes, key)
        state.advance(number, total, amplitudes)
        now = layout.unflatten(decode(total).astype(layout.dtype), after)
    return Marked(name, start, now, layout, key, groups_of(name), state)
