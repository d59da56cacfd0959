"""Attacks: what somebody who has a released model would do to get rid of its mark (docs/attacks.md).

Each attack is a function from what the attacker has (`Target`) to weights; `ATTACKS` lists them by name, with what they
need and the settings that the paper and this project try. `run` runs one, and records what it cost:

    target = Target(make, released, data=(inputs, labels))
    result = run("fine-tuning", target, seed=1, fraction=0.1)
    result.weights, result.examples, result.steps, result.seconds

Those that change shapes (removed, padded or split channels) return tensors of other sizes; `Target.module` gives a
module that holds them. Needs the extra `torch`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from quorumark.errors import InputError
from quorumark.research.attacks import by_layers, learning, rotation, symmetry, weights
from quorumark.research.attacks.base import Attack, Result, Target, _torch, fitted
from quorumark.research.attacks.learning import estimate_key, public_scales, transfer_rate

__all__ = [
    "ATTACKS",
    "Attack",
    "Result",
    "Target",
    "chain",
    "estimate_key",
    "fitted",
    "public_scales",
    "run",
    "transfer_rate",
]

ATTACKS: Mapping[str, Attack] = {
    a.name: a for a in (*learning.ATTACKS, *by_layers.ATTACKS, *weights.ATTACKS, *symmetry.ATTACKS, *rotation.ATTACKS)
}


def run(name: str, target: Target, *, seed: int = 0, **settings: Any) -> Result:
    """Runs an attack by its name."""
    if name not in ATTACKS:
        raise InputError("attack", f"must be one of {', '.join(sorted(ATTACKS))}", repr(name))
    attack = ATTACKS[name]
    for need in attack.needs:
        if not _is_there(getattr(target, need)):
            raise InputError("target", f"must have {need} for the attack {name!r}")
    torch = _torch()
    started = time.perf_counter()
    devices = sorted({tensor.get_device() for tensor in target.weights.values() if tensor.is_cuda})
    with torch.random.fork_rng(devices=devices):  # the caller's random numbers are left alone
        torch.manual_seed(seed)
        changed, cost = attack.function(target, seed, **settings)
    seconds = time.perf_counter() - started
    return Result(
        name, settings, seed, changed, cost.pop("examples", 0), cost.pop("steps", 0), seconds=seconds, notes=cost
    )


def _is_there(value: Any) -> bool:
    return value is not None and not (isinstance(value, (list, tuple)) and len(value) == 0)


def chain(target: Target, steps: Sequence[tuple[str, Mapping[str, Any]]], *, seed: int = 0) -> Result:
    """One attack after the other; the costs add up."""
    results: list[Result] = []
    for number, (name, settings) in enumerate(steps):
        results.append(run(name, target, seed=seed + number, **settings))
        target = target.with_weights(results[-1].weights)
    if not results:
        raise InputError("steps", "must name at least one attack")
    return Result(
        " + ".join(result.attack for result in results),
        {f"{k}.{name}": v for k, result in enumerate(results) for name, v in result.settings.items()},
        seed,
        results[-1].weights,
        max(result.examples for result in results),
        sum(result.steps for result in results),
        sum(result.seconds for result in results),
        {f"{k}.{name}": v for k, result in enumerate(results) for name, v in result.notes.items()},
    )
