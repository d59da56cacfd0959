"""Small models that five members train on handwritten digits, marked by somebody who holds the key: z, forecast, leak.

The rounds are what a federation computes (FedAvg, amplitudes from the public models and norms, dither), without its
messages, so that a run takes seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from quorumark import codec
from quorumark import field as prime
from quorumark.consortium.strength import ONE, Strength
from quorumark.field import Stream
from quorumark.model.layout import ModelLayout
from quorumark.research.known import KnownKey, TensorsInMemory
from quorumark.round.amplitudes import MarkState
from quorumark.round.dither import add_dither
from quorumark.round.forecast import expected_z
from quorumark.round.mark import TooStrongError, check_size, ideal_mark
from quorumark.round.movement import ideal_norms
from quorumark.round.survival import Step, Survival, Tracer, middle

BALANCED = "balanced-anchor/v1"
MEMBERS, TEST = 5, 360


def cnn() -> nn.Module:
    """The README's: 151,072 weights carry."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128), nn.ReLU(),
        nn.Linear(128, 10),
    )  # fmt: skip


def mlp(hidden: int = 256) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10)
    )


def normed() -> nn.Module:
    """With BatchNorm: no running statistics are averaged, the batch's are used."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32, track_running_stats=False), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64, track_running_stats=False), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def strided() -> nn.Module:
    """With BatchNorm, whose running statistics are averaged like weights: 89,376 weights carry."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Conv2d(64, 96, 3, padding=1, bias=False), nn.BatchNorm2d(96), nn.ReLU(),
        nn.Flatten(), nn.Linear(96 * 16, 10),
    )  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """How members train. `split`: "iid", or "classes": each has two classes most of all. `pull` is FedProx's μ."""

    make: Callable[[], Any] = cnn
    optimiser: str = "adam"
    learning_rate: float = 1e-3
    decay: float = 0.0
    epochs: int = 1
    batch: int = 32
    pull: float = 0.0
    split: str = "iid"


def quickstart_net() -> nn.Module:
    """Flower's quickstart: 137,104 weights carry."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def quickstart(rate: float, epochs: int) -> Recipe:
    return Recipe(make=quickstart_net, optimiser="sgd", learning_rate=rate, epochs=epochs)


def digits(split: str = "iid", seed: int = 0) -> tuple[list[tuple[Any, Any]], tuple[Any, Any]]:
    """Each member's part, and the test set."""
    pixels, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(pixels / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    targets = torch.tensor(labels)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed))
    test, rest = order[:TEST], order[TEST:]
    if split == "classes":  # four fifths of each part are of two classes
        rest = rest[torch.argsort(targets[rest], stable=True)]
        mixed = torch.rand(len(rest), generator=torch.Generator().manual_seed(seed)) < 0.2
        parts = [p[~m] for p, m in zip(rest.chunk(MEMBERS), mixed.chunk(MEMBERS), strict=True)]
        loose = rest[mixed][torch.randperm(int(mixed.sum()), generator=torch.Generator().manual_seed(seed + 1))]
        parts = [torch.cat(pair) for pair in zip(parts, loose.chunk(MEMBERS), strict=True)]
    else:
        parts = list(rest.chunk(MEMBERS))
    return [(inputs[p], targets[p]) for p in parts], (inputs[test], targets[test])


def train(recipe: Recipe, weights: Mapping[str, Any], data: tuple[Any, Any], seed: int, rate: float = 1.0) -> Any:
    module = recipe.make()
    module.load_state_dict(dict(weights))
    module.train()
    inputs, labels = data
    settings: dict[str, Any] = {"lr": recipe.learning_rate * rate, "weight_decay": recipe.decay}
    makers: dict[str, Any] = {"adam": torch.optim.AdamW, "sgd": torch.optim.SGD}
    if recipe.optimiser == "sgd":
        settings["momentum"] = 0.9
    optimiser = makers[recipe.optimiser](module.parameters(), **settings)
    start = [p.detach().clone() for p in module.parameters()]
    order = torch.Generator().manual_seed(seed & (1 << 63) - 1)
    for _ in range(recipe.epochs):
        for part in torch.randperm(len(labels), generator=order).split(recipe.batch):
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(module(inputs[part]), labels[part])
            if recipe.pull:
                away = sum(((p - s) ** 2).sum() for p, s in zip(module.parameters(), start, strict=True))
                loss = loss + recipe.pull / 2 * away
            loss.backward()
            optimiser.step()
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def accuracy(recipe: Recipe, weights: Mapping[str, Any], test: tuple[Any, Any]) -> float:
    module = recipe.make()
    module.load_state_dict(dict(weights))
    module.eval()
    with torch.no_grad():
        return float((module(test[0]).argmax(1) == test[1]).float().mean())


@dataclass
class Ran:
    """What came of a run: z by the key, the forecast, accuracy, and what an observer has."""

    z: float = 0.0
    expected: float = 0.0
    accuracy: float = 0.0
    rho: float = 0.0
    leak: float = 0.0  # √Σ(‖S‖/‖D‖)²
    seen: float = 0.0  # the cosine with the key of the best weighted sum of all moves, by their Gram matrix
    loudest: float = 0.0  # the largest cosine of one update with the key
    straight: float = 0.0  # ‖Σ D‖ / √Σ ‖D‖²
    refused: int = 0
    survival: Survival | None = None  # by the noise of all members together
    told: Survival | None = None  # the median of what each tells by itself
    forecasts: list[float] = field(default_factory=list)
    rhos: list[float] = field(default_factory=list)


def marked_run(
    recipe: Recipe, rounds: int, strength: Mapping[str, str] | None, seed: int, look: Callable[[MarkState], Any] = id
) -> Ran:
    """Rounds with five members; without a strength there is no mark."""
    parts, test = digits(recipe.split, seed)
    torch.manual_seed(seed)
    start = now = {n: t.detach().clone() for n, t in recipe.make().state_dict().items()}
    layout = ModelLayout.of(start)
    rule = Strength.of(strength or {}, layout.coordinates)
    state = MarkState(rule, layout, "rademacher", layout.encode(start))
    rng = np.random.default_rng([seed, 7])
    key = rng.choice(np.array([-1, 1]), layout.coordinates)
    weight, ran = Fraction(1, MEMBERS), Ran()
    tracers = [Tracer(layout.coordinates, rule.dither) for _ in range(1 + MEMBERS)]
    paths: list[Any] = []
    sizes: list[float] = []
    leak = 0.0
    for number in range(1, rounds + 1):
        results = {
            k: train(recipe, now, part, 10_000 * seed + 100 * number + k, float(rule.rate(number)))
            for k, part in enumerate(parts)
        }
        before = layout.encode(now)
        encoded = {k: layout.encode(result) for k, result in results.items()}
        amplitudes = state.amplitudes(number)
        total = np.zeros(layout.size, np.uint64)
        for result in results.values():
            total = prime.add(total, layout.encode(result, float(weight)))
        scales = amplitudes.vector.astype(np.float64) * 2.0**-40
        noise = [(weight, Stream(bytes([k]) * 32, "noise", bytes([seed, number]))) for k in range(MEMBERS)]
        if strength is not None and amplitudes.marks:
            try:
                for after in encoded.values():
                    check_size(rule, amplitudes, before, after)
            except TooStrongError:
                ran.refused += 1
            ideal_mark(total, amplitudes, key)
            for part, stream in noise:
                add_dither(total, amplitudes, rule.dither, part, stream)
        vector = codec.decode(total, layout.dtype)
        now = layout.unflatten(vector, now)
        after = layout.encode(now)
        marks = strength is not None and amplitudes.marks
        norms = ideal_norms(layout, before, encoded, dict.fromkeys(encoded, weight)) if rule.needs_norms else None
        step = Step(state)
        state.advance(number, after, amplitudes if marks else None, norms)
        for follower, theirs in zip(tracers, [noise, *([each] for each in noise)], strict=True):
            follower.follow(step, state, theirs, amplitudes if marks else None)
        move = prime.to_signed(prime.sub(after, before))[layout.carrying()].astype(np.float64) * 2.0**-40
        size = float(move @ move)
        paths.append(move.astype(np.float32))
        sizes.append(float(np.sqrt(scales @ scales)) if marks else 0.0)
        if marks:
            leak += float(scales @ scales) / size
            ran.loudest = max(ran.loudest, abs(float(move @ key)) / math.sqrt(size * key.size))
        ran.rhos.append(state.rho / ONE)
        ran.forecasts.append(expected_z(state, BALANCED) if strength is not None else 0.0)
        look(state)
    whole = prime.to_signed(prime.sub(layout.encode(now), layout.encode(start)))[layout.carrying()] * 2.0**-40
    each = np.array(paths)
    gram = (each @ each.T).astype(np.float64)
    ran.straight = float(np.linalg.norm(whole)) / math.sqrt(float(np.trace(gram)))
    ran.accuracy, ran.rho, ran.leak = accuracy(recipe, now, test), state.rho / ONE, math.sqrt(leak)
    if strength is not None:
        best = np.linalg.solve(gram + 1e-6 * np.trace(gram) / rounds * np.eye(rounds), np.array(sizes)) @ each
        ran.seen = float(best @ key) / (float(np.linalg.norm(best)) or 1.0) / math.sqrt(key.size)
        ran.z = KnownKey(key.astype(np.int8), layout, TensorsInMemory(start)).z(now)
        ran.expected = ran.forecasts[-1]
        ran.survival, *told = (follower.survival(state, BALANCED) for follower in tracers)
        ran.told = middle([found for found in told if found is not None])
    return ran
