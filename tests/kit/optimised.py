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

from quorumark import field as prime
from quorumark.consortium.records import anchor_of
from quorumark.consortium.strength import ONE
from quorumark.model.layout import ModelLayout
from quorumark.packing import pack_update
from quorumark.research.known import KnownKey, TensorsInMemory
from quorumark.round.amplitudes import HALVINGS, Amplitudes
from quorumark.round.applied import Applied, Room
from quorumark.round.forecast import expected_z
from quorumark.round.history import History, Settled
from quorumark.round.mark import TooStrongError, check_size, ideal_mark
from quorumark.round.movement import least_by_weight, upload_norms
from quorumark.round.optimiser import Taken
from quorumark.round.units import widest
from quorumark.round.update import Update
from tests.kit.marks import make_manifest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "flower-hospitals"))
BALANCED = "balanced-anchor/v1"
STRENGTH = {"rule": "rho", "rho": "0.1", "c_max": "0.1"}
Model = dict[str, Any]
BLOCKING = 2  # n − T + 1 of the five members, where t is 3 and T is 4: so many halve the mark of a state
SHAPES = {"a": (96, 128), "b": (64, 96), "bias": (64,)}
LIMITED = Applied.room
Shapes = Mapping[str, tuple[int, ...]]
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
    """`accuracies` and `cs` are by rounds. `refused` are members who found a mark too strong, `halved` is how often
    enough of them did, `anew` are the weights whose momentum began anew, in all
    rounds, `held` tensors that kept theirs.
    `share` is the largest part of the mark in a tensor's step, ‖shown‖/‖step‖, as members compute it."""

    z: float = 0.0
    expected: float = 0.0
    accuracy: float = 0.0
    marked: int = 0
    refused: int = 0
    halved: int = 0
    anew: int = 0
    held: int = 0
    share: float = 0.0
    rho: float = 0.0
    raw: Shown = field(default_factory=Shown)
    applied: Shown = field(default_factory=Shown)
    cs: list[float] = field(default_factory=list)
    forecasts: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
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


def decayed(seed: int, still: float = 0.0) -> World:  # noqa: ARG001
    """The same for an MLP of 84,480 carriers and SGD with momentum, whose weight decay takes 2.59 % off in a round."""
    import torch

    from tests.kit import planned, planned_runs

    recipe = planned_runs.DECAYED
    data, test = planned.digits(seed=seed)
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    start = {name: tensor.detach().clone() for name, tensor in recipe.make().state_dict().items()}

    def train(model: Model, member: int, draw: int) -> Model:
        return dict(planned.train(recipe, model, data[member], draw))

    return start, train, lambda model: planned.accuracy(recipe, model, test), (288, 288, 287, 287, 287)


def aimless(seed: int, still: float = 0.0) -> World:
    """The same with noise alone."""
    return walk(seed, still, 0.0)


def walk(seed: int, still: float = 0.0, drift: float = 0.002, noise: float = 0.005, shapes: Shapes = SHAPES) -> World:
    """The same for members whose updates are noise around a common direction: 18,432 weights carry, and no training."""
    return turning(sys.maxsize, noise, drift, shapes=shapes)(seed, still)


def turning(
    at: int, noise: float = 0.005, drift: float = 0.002, rows: float = 1.0, shapes: Shapes = SHAPES
) -> Callable[[int, float], World]:
    """The same, and after round `at` the common direction of this share of all rows is the opposite one."""

    def world(seed: int, still: float = 0.0) -> World:
        rng = np.random.default_rng([seed, 11])
        start: Model = {name: rng.standard_normal(shape).astype(np.float32) * 0.1 for name, shape in shapes.items()}
        way = {name: rng.standard_normal(shape) * drift for name, shape in shapes.items()}
        fixed = {name: rng.random(shape) < still for name, shape in shapes.items()}
        back = {n: np.concatenate([-w[: (m := round(rows * len(w)))], w[m:]]) for n, w in way.items()}

        def train(model: Model, member: int, draw: int) -> Model:  # noqa: ARG001
            own, common = np.random.default_rng(draw), way if (draw - 10_000 * seed) // 100 <= at else back
            moves = {name: common[name] + noise * own.standard_normal(shape) for name, shape in shapes.items()}
            return {n: np.where(fixed[n], v, v + moves[n]).astype(np.float32) for n, v in model.items()}

        return start, train, lambda _: 0.0, (100, 100, 100, 100, 100)

    return world


def slowing(at: int, factor: float) -> Callable[[int, float], World]:
    """Noise alone, `factor` times as large from round `at` on."""

    def world(seed: int, still: float = 0.0) -> World:
        start, _, accuracy, examples = walk(seed, still)

        def train(model: Model, member: int, draw: int) -> Model:  # noqa: ARG001
            own, size = np.random.default_rng(draw), 0.005
            if (draw - 10_000 * seed) // 100 >= at:
                size *= factor
            return {n: (v + size * own.standard_normal(v.shape)).astype(np.float32) for n, v in model.items()}

        return start, train, accuracy, examples

    return world


def run(
    optimiser: str | None,
    rounds: int,
    seed: int,
    strength: Mapping[str, str] | None = STRENGTH,
    still: float = 0.0,
    packing: str = "2",
    room: Callable[..., Room] = Applied.room,
    world: Callable[[int, float], World] = hospitals,
    key: str = "rademacher",
    look: Callable[[History, Settled], Any] = lambda *_: None,
) -> Ran:
    """Rounds with five members; without a strength there is no mark. `look` sees each sum before it is accepted."""
    start, train, accuracy, examples = world(seed, still)
    layout = ModelLayout.of(start)
    policy = {"packing": packing, **({} if optimiser is None else {"optimiser": optimiser})}
    agreed: dict[str, Any] = {"anchor": anchor_of(layout, start), "strength": strength or {}, "policy": policy}
    agreed["key"] = key
    history = History(make_manifest(layout, **agreed), layout, layout.encode(start))
    limited, Applied.room = Applied.room, room  # type: ignore[method-assign]
    try:
        return _run(history, rounds, seed, strength is not None, start, train, accuracy, examples, look)
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


def sum_of_one(history: History, result: Model) -> Any:
    """What a server would open if there were one member, with this result, and no mark."""
    if not history.packing.packs:
        return history.layout.encode(result)
    packed = history.packed(b"")
    return pack_update(history.layout.flatten(result), history.mark.model, 1.0, packed.spans, packed.count)


def _run(
    history: History,
    rounds: int,
    seed: int,
    marks: bool,
    start: Model,
    train: Train,
    accuracy: Any,
    examples: Any,
    look: Any,
) -> Ran:
    layout = history.layout
    now, ran = start, Ran(history=history)
    weights = {k: Fraction(n, sum(examples)) for k, n in enumerate(examples)}
    rng = np.random.default_rng([seed, 7])
    key = rng.choice(np.array([-1, 1]), layout.coordinates)
    paths: dict[str, list[Any]] = {"raw": [], "applied": []}
    sizes: list[float] = []
    spot = layout.carrying()
    for number in range(1, rounds + 1):
        results = {k: train(now, k, 10_000 * seed + 100 * number + k) for k in weights}
        before, kept = history.mark.model, history.strength.kept(number) / ONE
        encoded = {k: layout.encode(result) for k, result in results.items()}
        amplitudes = _unrefused(history, encoded, ran) if marks else None
        level = widest(history.level(Update(layout, before, layout.flatten(result))) for result in results.values())
        if amplitudes is not None:
            amplitudes = history.widened(amplitudes, level, history.manifest)
        opened = _summed(history, results, encoded, weights, amplitudes, level, key, rng)
        settled = history.settle(opened, now, amplitudes, norms=bool(history.norms), level=level)
        look(history, settled)
        raw = settled.taken.raw if settled.taken is not None else prime.to_signed(prime.sub(settled.encoded, before))
        summed = settled.encoded, settled.embedded, settled.norms
        history.accept(number, *summed, level=level, stood=settled.stood, taken=settled.taken)
        now = settled.weights
        # who sees the models undoes a decay that is public: what an observer has of a sum is without it
        undone = (1 - kept) * prime.to_signed(before)[spot] * 2.0**-40
        paths["raw"].append((raw[spot] * 2.0**-40 + undone).astype(np.float32))
        paths["applied"].append(
            (prime.to_signed(prime.sub(settled.encoded, before))[spot] * 2.0**-40).astype(np.float32)
        )
        marked = amplitudes is not None and amplitudes.marks
        sizes.append(float(np.linalg.norm(amplitudes.sizes * 2.0**-40)) if amplitudes is not None and marked else 0.0)
        ran.marked += settled.embedded is not None
        if settled.taken is not None and settled.taken.anew is not None:
            ran.anew += int(settled.taken.anew.sum())
        ran.share = max(ran.share, _share(layout, settled.taken))
        ran.held += len(settled.held)
        ran.cs.append(0.0 if amplitudes is None else amplitudes.c / ONE)
        ran.accuracies.append(accuracy(now))
        if marks:
            ran.forecasts.append(expected_z(history.mark, BALANCED))
    ran.accuracy, ran.rho, ran.model = ran.accuracies[-1], history.mark.rho / ONE, now
    if marks:
        ran.raw, ran.applied = (shown(moves, sizes, key) for moves in paths.values())
        ran.z = KnownKey(key.astype(np.int8), layout, TensorsInMemory(start)).z(now)
        ran.expected = ran.forecasts[-1]
    return ran


def _share(layout: ModelLayout, taken: Taken | None) -> float:
    """The largest part of the mark in a tensor's step; all weights carry."""
    found = [0.0]
    for spec, place in layout.spans("carrier"):
        if taken is not None and taken.followed is not None and spec.size:
            sizes = [float(np.linalg.norm(v[place].astype(float))) for v in (taken.followed.shown, taken.moves)]
            found.append(sizes[0] / (sizes[1] or 1.0))
    return max(found)


def _unrefused(history: History, encoded: Mapping[int, Any], ran: Ran) -> Amplitudes:
    """The mark of the next round, halved as often as enough members find it too strong for their updates."""
    for halvings in range(HALVINGS + 1):
        amplitudes, refused = history.amplitudes(halvings), 0
        for after in encoded.values() if amplitudes.marks else ():
            try:
                check_size(history.strength, amplitudes, history.mark.model, after)
            except TooStrongError:
                refused += 1
        ran.refused += refused
        if refused < BLOCKING:
            break
        ran.halved += 1
    return amplitudes


def _summed(
    history: History,
    results: Mapping[int, Model],
    encoded: Mapping[int, Any],
    weights: Mapping[int, Fraction],
    amplitudes: Amplitudes | None,
    level: bytes,
    key: Any,
    rng: np.random.Generator,
) -> Any:
    """What a server opens: the sum of the members' models or packed updates, with mark and dither, and their norms."""
    layout, before = history.layout, history.mark.model
    packed = history.packed(level) if history.packing.packs else None
    marks = amplitudes is not None and amplitudes.marks
    total = np.zeros(history.packing.length(layout), np.uint64)
    norms = np.zeros(history.norms, np.uint64)
    for k, result in results.items():
        noise = np.zeros(layout.size, np.int64)
        if amplitudes is not None and marks:
            factor = history.strength.dither / ONE * math.sqrt(weights[k])
            noise[layout.carrying()] = np.rint(factor * amplitudes.sizes * rng.normal(size=key.size)).astype(np.int64)
        if packed is None:
            vector = prime.add(layout.encode(result, float(weights[k])), prime.from_signed(noise))
        else:
            after = layout.flatten(result)
            vector = pack_update(after, before, float(weights[k]), packed.spans, packed.count, noise=noise)
        total = prime.add(total, vector)
        if history.norms:
            norms += upload_norms(layout, before, encoded[k], weights[k], () if packed is None else packed.spans)
    if amplitudes is not None and marks:
        ideal_mark(total, amplitudes, key, packed=packed)
    return np.concatenate([total, norms])


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
