"""The hospitals' network under server optimisers, marked by somebody who holds the key: z, forecast, what shows.

    python -m tests.kit.optimised fedadam:eta=0.01 --rounds 20 --seeds 3      # a row of docs/optimisers.md

The rounds are what a federation computes (sums, the optimiser's steps, amplitudes, dither), without its messages.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from quorumark import codec
from quorumark import field as prime
from quorumark.consortium.records import anchor_of
from quorumark.consortium.strength import ONE
from quorumark.model.layout import ModelLayout
from quorumark.research.known import KnownKey, TensorsInMemory
from quorumark.round.applied import Applied, Room
from quorumark.round.forecast import expected_z
from quorumark.round.history import History
from quorumark.round.mark import TooStrongError, check_size, ideal_mark
from quorumark.round.movement import ideal_norms, least_by_weight
from tests.kit.marks import make_manifest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "flower-hospitals"))
BALANCED = "balanced-anchor/v1"
STRENGTH = {"rule": "rho", "rho": "0.1", "c_max": "0.1"}
Model = dict[str, Any]
LIMITED = Applied.room
Train = Callable[[Model, int, int], Model]
World = tuple[Model, Train, Callable[[Model], float], tuple[int, ...]]


@dataclass
class Shown:
    """What a trajectory shows of the key: the largest cosine of one move with it, that of the whole way, and that of
    the best weighted sum of all moves, by their Gram matrix."""

    loudest: float = 0.0
    whole: float = 0.0
    best: float = 0.0


@dataclass
class Ran:
    z: float = 0.0
    expected: float = 0.0
    accuracy: float = 0.0
    marked: int = 0
    refused: int = 0
    rho: float = 0.0
    raw: Shown = field(default_factory=Shown)
    applied: Shown = field(default_factory=Shown)
    cs: list[float] = field(default_factory=list)
    forecasts: list[float] = field(default_factory=list)
    model: Model = field(default_factory=dict)
    history: History | None = None


def shown(moves: list[Any], sizes: list[float], key: Any) -> Shown:
    each, length = np.array(moves), math.sqrt(key.size)
    gram = (each @ each.T).astype(np.float64)
    # of all rounds: momentum shows earlier marks in rounds without one
    loud = [abs(float(m @ key)) / math.sqrt(g) / length for m, g in zip(each, np.diag(gram), strict=True) if g]
    whole = each.sum(axis=0)
    ridge = 1e-6 * np.trace(gram) / len(each) * np.eye(len(each))
    best = np.linalg.solve(gram + ridge, np.array(sizes)) @ each
    cosines = [float(v @ key) / (float(np.linalg.norm(v)) or 1.0) / length for v in (whole, best)]
    return Shown(max(loud, default=0.0), *cosines)


def hospitals(seed: int, still: float = 0.0) -> World:
    """The initial model, training of a member, accuracy, numbers of examples. `still`: this share of the weights of the
    large layers never moves, whichever row it is in, as in sparse training."""
    import torch

    from hospitals import task

    torch.set_num_threads(1)
    data, test = [task.load_data(i) for i in range(5)], task.load_data(None)
    torch.manual_seed(seed)
    start = {name: tensor.detach().clone() for name, tensor in task.Net().state_dict().items()}
    fixed = {n: torch.rand(t.shape, generator=torch.Generator().manual_seed(9)) < still for n, t in start.items()}

    def train(model: Model, member: int, draw: int) -> Model:
        torch.manual_seed(draw)
        net = task.Net()
        net.load_state_dict(model)
        task.train(net, data[member], 1, 0.001)
        after = {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}
        if still:
            return {n: torch.where(fixed[n], model[n], t) if t.ndim > 1 else t for n, t in after.items()}
        return after

    def accuracy(model: Model) -> float:
        net = task.Net()
        net.load_state_dict(model)
        return float(task.test(net, test)[1])

    return start, train, accuracy, task.EXAMPLES


def aimless(seed: int, still: float = 0.0) -> World:
    """The same with noise alone."""
    return walk(seed, still, 0.0)


def walk(seed: int, still: float = 0.0, drift: float = 0.002) -> World:
    """The same for members whose updates are noise around a common direction: 18,432 weights carry, and no training."""
    rng = np.random.default_rng([seed, 11])
    shapes = {"a": (96, 128), "b": (64, 96), "bias": (64,)}
    start: Model = {name: rng.standard_normal(shape).astype(np.float32) * 0.1 for name, shape in shapes.items()}
    way = {name: rng.standard_normal(shape) * drift for name, shape in shapes.items()}
    fixed = {name: rng.random(shape) < still for name, shape in shapes.items()}

    def train(model: Model, member: int, draw: int) -> Model:  # noqa: ARG001
        own = np.random.default_rng(draw)
        moves = {name: way[name] + 0.005 * own.standard_normal(shape) for name, shape in shapes.items()}
        return {n: np.where(fixed[n], v, v + moves[n]).astype(np.float32) for n, v in model.items()}

    return start, train, lambda _: 0.0, (100, 100, 100, 100, 100)


def run(
    optimiser: str | None,
    rounds: int,
    seed: int,
    strength: Mapping[str, str] | None = STRENGTH,
    still: float = 0.0,
    packing: str = "1",
    room: Callable[..., Room] = Applied.room,
    world: Callable[[int, float], World] = hospitals,
    key: str = "rademacher",
) -> Ran:
    """Rounds with five members; without a strength there is no mark."""
    start, train, accuracy, examples = world(seed, still)
    layout = ModelLayout.of(start)
    policy = {"packing": packing, **({} if optimiser is None else {"optimiser": optimiser})}
    agreed: dict[str, Any] = {"anchor": anchor_of(layout, start), "strength": strength or {}, "policy": policy}
    agreed["key"] = key
    history = History(make_manifest(layout, **agreed), layout, layout.encode(start))
    limited, Applied.room = Applied.room, room  # type: ignore[method-assign]
    try:
        return _run(history, rounds, seed, strength is not None, start, train, accuracy, examples)
    finally:
        Applied.room = limited  # type: ignore[method-assign]


def raw_alone(applied: Applied, layout: ModelLayout, base: Any, scale: tuple[int, int], c_max: int) -> Room:
    """As if only the sums had to hide the mark: c·rms of the raw updates, whatever the steps make of it."""
    found = LIMITED(applied, layout, base, scale, c_max)
    most = least_by_weight(layout, [tuple(tuple(n * c_max // ONE for n in v) for v in axes) for axes in base])
    return replace(found, most=most, gained=np.zeros_like(found.gained), pending=np.zeros_like(found.pending))


def without_momentum(applied: Applied, layout: ModelLayout, base: Any, scale: tuple[int, int], c_max: int) -> Room:
    """As if earlier marks left nothing in the momentum."""
    return LIMITED(replace(applied, mark=np.zeros_like(applied.mark)), layout, base, scale, c_max)


def _run(
    history: History, rounds: int, seed: int, marks: bool, start: Model, train: Train, accuracy: Any, examples: Any
) -> Ran:
    layout = history.layout
    rule, now, ran = history.strength, start, Ran()
    weights = {k: Fraction(n, sum(examples)) for k, n in enumerate(examples)}
    rng = np.random.default_rng([seed, 7])
    key = rng.choice(np.array([-1, 1]), layout.coordinates)
    paths: dict[str, list[Any]] = {"raw": [], "applied": []}
    sizes: list[float] = []
    spot = layout.carrying()
    for number in range(1, rounds + 1):
        results = {k: train(now, k, 10_000 * seed + 100 * number + k) for k in weights}
        before = history.mark.model
        encoded = {k: layout.encode(result) for k, result in results.items()}
        amplitudes = history.amplitudes() if marks else None
        total = np.zeros(layout.size, np.uint64)
        for k, result in results.items():
            total = prime.add(total, layout.encode(result, float(weights[k])))
        scales = np.zeros(key.size)
        if amplitudes is not None and amplitudes.marks:
            scales = amplitudes.vector.astype(np.float64) * 2.0**-40
            try:
                for after in encoded.values():
                    check_size(rule, amplitudes, before, after)
            except TooStrongError:
                ran.refused += 1
            ideal_mark(total, amplitudes, key)
            noise = rng.normal(size=scales.size) * scales * (rule.dither / ONE)
            total[spot] = prime.add(total[spot], codec.encode(noise))
        norms = ideal_norms(layout, before, encoded, weights)
        summed = total if not history.norms else np.concatenate([total, norms])
        settled = history.settle(summed, now, amplitudes, norms=bool(history.norms))
        raw = prime.to_signed(prime.sub(total, before))[spot] * 2.0**-40
        history.accept(number, settled.encoded, settled.embedded, settled.norms, taken=settled.taken)
        applied = prime.to_signed(prime.sub(settled.encoded, before))[spot] * 2.0**-40
        now = settled.weights
        paths["raw"].append(raw.astype(np.float32))
        paths["applied"].append(applied.astype(np.float32))
        sizes.append(float(np.linalg.norm(scales)))
        ran.marked += settled.embedded is not None
        ran.cs.append(0.0 if amplitudes is None else amplitudes.c / ONE)
        if marks:
            ran.forecasts.append(expected_z(history.mark, BALANCED))
    ran.history = history
    ran.accuracy, ran.rho, ran.model = accuracy(now), history.mark.rho / ONE, now
    if marks:
        ran.raw, ran.applied = (shown(moves, sizes, key) for moves in paths.values())
        ran.z = KnownKey(key.astype(np.int8), layout, TensorsInMemory(start)).z(now)
        ran.expected = ran.forecasts[-1]
    return ran


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("optimiser")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--still", type=float, default=0.0)
    parser.add_argument("--strength", action="append", default=[])
    parser.add_argument("--raw-alone", action="store_true", help="with the limit for the steps taken out")
    parser.add_argument("--plain", action="store_true", help="without the mark as well")
    told = parser.parse_args()
    strength = {**STRENGTH, **dict(entry.split("=") for entry in told.strength)}
    name = None if told.optimiser == "fedavg" else told.optimiser
    for seed in range(told.seeds):
        ran = run(name, told.rounds, seed, strength, told.still, room=raw_alone if told.raw_alone else Applied.room)
        plain = f" plain {100 * run(name, told.rounds, seed, None, told.still).accuracy:.2f}" if told.plain else ""
        print(  # noqa: T201
            f"{told.optimiser} r{told.rounds} s{seed}: z {ran.z:.1f} forecast {ran.expected:.1f} accuracy "
            f"{100 * ran.accuracy:.2f}{plain} marked {ran.marked} refused {ran.refused} rho {ran.rho:.3f} "
            f"c {' '.join(f'{c:.3f}' for c in ran.cs)} raw {ran.raw} applied {ran.applied}",
            flush=True,
        )


if __name__ == "__main__":
    main()
