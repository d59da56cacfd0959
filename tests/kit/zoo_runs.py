"""The models of `zoo`, trained in seconds and marked by somebody who holds the key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
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
from quorumark.field import Stream
from quorumark.model.layout import ModelLayout
from quorumark.research.known import KnownKey, TensorsInMemory
from quorumark.round.amplitudes import Amplitudes, MarkState
from quorumark.round.dither import add_dither
from quorumark.round.forecast import expected_z
from quorumark.round.mark import ideal_mark
from quorumark.round.survival import ENOUGH, Step, Survival, Tracer, middle
from tests.kit import lab, zoo

State = dict[str, torch.Tensor]
Noise = tuple[Fraction, Stream]
ROUNDS, SAMPLES, MEMBERS = 8, 480, 5
BALANCED = "balanced-anchor/v1"


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
    survival: Survival | None = None  # by the noise of all members together, as in a run in one process
    stranger: Survival | None = None  # what noise that is not in the model would say
    told: Survival | None = None  # the median of what each would tell by itself, as in a deployment

    @property
    def expected_z(self) -> float:
        """What the amplitudes forecast (docs/strength.md, "Forecast")."""
        return expected_z(self.state, BALANCED)

    @property
    def corrected_z(self) -> float:
        """What a run in one process reports."""
        return self.expected_z * likely(self.survival)

    @property
    def told_z(self) -> float:
        """What a server reports whose members are on machines of their own."""
        return self.expected_z * likely(self.told)

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
    name: str,
    seed: int = 1,
    optimiser: str = "adamw",
    rounds: int = ROUNDS,
    rho: str = "0.15",
    c_max: str = "0.25",
    dither: str = "0",
    watch: Callable[[Step, MarkState, Amplitudes], None] | None = None,
) -> Marked:
    """A model trained in so many rounds by one who knows the key, with a mark of at most ρ, and with the noise of five
    members if there is `dither`. `watch` sees each round.

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
        "dither": dither,
    }
    rule = Strength.of(strength, layout.coordinates)
    state = MarkState(rule, layout, "rademacher", layout.encode(start))
    tracers = [Tracer(layout.coordinates, rule.dither) for _ in range(2 + MEMBERS if rule.dither else 0)]
    for number in range(1, rounds + 1):
        after = trained(name, now, 1000 * seed + number, 1, 2e-3 * float(rule.rate(number)), optimiser)
        amplitudes, total = state.amplitudes(number), layout.encode(after)
        ideal_mark(total, amplitudes, key)
        noise = [member_noise(name, seed, number, member) for member in range(2 * MEMBERS if tracers else 0)]
        for weight, stream in noise[:MEMBERS]:
            add_dither(total, amplitudes, rule.dither, weight, stream)
        step = Step(state)
        state.advance(number, total, amplitudes)
        if watch is not None:
            watch(step, state, amplitudes)
        for tracer, theirs in zip(tracers, shared(noise, MEMBERS), strict=False):
            tracer.follow(step, state, theirs, amplitudes)
        now = layout.unflatten(decode(total).astype(layout.dtype), after)
    together, strangers, *each = [tracer.survival(state, BALANCED) for tracer in tracers] or [None, None]
    told = middle([found for found in each if found is not None])
    return Marked(name, start, now, layout, key, groups_of(name), state, together, strangers, told)


def likely(found: Survival | None) -> float:
    """What a forecast is multiplied by (`round.outlook`)."""
    return found.likely if found is not None and found.error <= ENOUGH else 1.0


def shared(noise: list[Noise], members: int) -> list[list[Noise]]:
    """Whose noise is followed: all members', strangers', and each member's by itself."""
    return [noise[:members], noise[members:], *([each] for each in noise[:members])]


def member_noise(name: str, seed: int, number: int, member: int) -> tuple[Fraction, Stream]:
    """Of one of five members with equal weights; those from the sixth on are strangers."""
    return Fraction(1, MEMBERS), Stream(bytes([member]) * 32, "noise", f"{name} {seed} {number}".encode())
