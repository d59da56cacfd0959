"""Accuracy and z of the demo's model with one to four weights in an element, over three seeds.

    python benchmarks/packing.py [--rounds 20] [--out benchmarks/results/packing.json]

The members' data is the demo's; for the non-IID rows each member has most of its examples of two or three digits. A key
is dealt, so that z can be computed from it without a ceremony. One round of all members has bytes as they travel.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quorumark import demo
from quorumark.consortium.identity import Identity
from quorumark.consortium.policy import Policy
from quorumark.consortium.records import Terms, anchor_of, roster_of
from quorumark.consortium.strength import Strength
from quorumark.model.layout import ModelLayout
from quorumark.research.known import KnownKey, TensorsInMemory
from quorumark.setup.inprocess import deal_key
from quorumark.simulation import Federation, FederationMember

SEEDS = (1, 2, 3)


def run(packing: int, seed: int, rounds: int, skewed: bool) -> dict[str, Any]:
    """One run to its end."""
    world = demo.digits()
    data = _skewed(world.data) if skewed else world.data
    initial = world.initial(seed)
    layout = ModelLayout.of(initial)
    people = [Identity.generate(f"member {x}") for x in range(1, len(data) + 1)]
    counts = [len(labels) for _, labels in data]
    roster = roster_of((person.card(), count) for person, count in zip(people, counts, strict=True))
    terms = Terms(
        "packing", demo.THRESHOLD, roster, layout.digest(), layout.coordinates, anchor_of(layout, initial),
        created="2026-01-31T12:00:00Z", setup="dealer", policy=Policy(packing=packing),
        strength=Strength.of(demo.STRENGTH, layout.coordinates),
    )  # fmt: skip
    manifest, shares = deal_key(people, terms)

    def train(model: Mapping[str, Any], mine: Any, seed: int, rate: float) -> Mapping[str, Any]:
        return world.train(model, mine, seed, rate)

    members = {
        x: FederationMember(person, manifest, layout, train, data[x - 1], shares[x])
        for x, person in enumerate(people, 1)
    }
    federation = Federation(manifest, layout, initial, members, seed=seed)
    reports = list(federation.rounds(rounds))
    if any(report.given_up for report in reports):
        raise AssertionError([report.given_up for report in reports])
    key = KnownKey.from_shares(manifest, shares, layout, TensorsInMemory(initial))
    return {
        "packing": packing,
        "seed": seed,
        "skewed": skewed,
        "rounds": rounds,
        "accuracy": world.evaluate(federation.model)["accuracy"],
        "z": key.z(federation.model),
        "expected_z": reports[-1].expected_z,
        "rho": reports[-1].rho,
        "bytes_up": reports[-1].uploaded_bytes / len(people) / layout.size,
        "bytes_down": federation.server.length() * 8 / layout.size,
        "widened": sum(1 for report in reports if report.widened),
    }


def _skewed(data: Any) -> Any:
    """The same examples, sorted by digit and cut into as many pieces of the same sizes."""
    import torch

    inputs, labels = (torch.cat(part) for part in zip(*data, strict=True))
    order = torch.argsort(labels, stable=True)
    sizes = [len(mine) for _, mine in data]
    return tuple((inputs[part], labels[part]) for part in order.split(sizes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=demo.ROUNDS)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/packing.json"))
    chosen = parser.parse_args()
    rows = []
    for skewed in (False, True):
        for packing in (1, 2, 3, 4):
            rows += [run(packing, seed, chosen.rounds, skewed) for seed in SEEDS]
            mine = rows[-len(SEEDS) :]
            print(  # noqa: T201
                "skewed" if skewed else "even", packing,
                *(f"{name} {statistics.mean(r[name] for r in mine):.4f}" for name in ("accuracy", "z", "bytes_up")),
                [round(r["accuracy"], 4) for r in mine], [round(r["z"], 1) for r in mine], flush=True,
            )  # fmt: skip
            chosen.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
