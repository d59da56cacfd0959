"""Accuracy and z with one to four weights in an element, over three seeds.

    python benchmarks/packing.py [--cases digits,skewed,text] [--rounds 20] [--out benchmarks/results/packing.json]

`digits` is the demo's network on its members' data, which the Flower example has, too; `skewed` the same network where
each digit is split among the members by a Dirichlet distribution of 0.3; `text` a language model in miniature, the one
that `quorumark try --template text` starts with, whose accuracy is the share of letters that it guesses. A key is
dealt, so that z can be computed from it without a ceremony. The file keeps the rows of cases that were not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
MEMBERS = 5


@dataclass(frozen=True)
class Case:
    """A model, its members' data, how they train, and the share that it gets right in a test."""

    initial: Callable[[int], Mapping[str, Any]]
    data: Sequence[Any]
    train: Callable[..., Mapping[str, Any]]
    accuracy: Callable[[Mapping[str, Any]], float]


def digits() -> Case:
    world = demo.digits()
    return _digits(world, world.data)


def skewed() -> Case:
    """Dirichlet 0.3: of each digit, every member gets a random share."""
    import torch

    world = demo.digits()
    inputs, labels = (torch.cat(part) for part in zip(*world.data, strict=True))
    torch.manual_seed(1)
    places: list[list[int]] = [[] for _ in range(MEMBERS)]
    for digit in range(10):
        shares = torch.distributions.Dirichlet(torch.full((MEMBERS,), 0.3)).sample()
        mine = torch.nonzero(labels == digit).flatten()
        cuts = (shares.cumsum(0)[:-1] * len(mine)).long().tolist()
        for member, part in enumerate(torch.tensor_split(mine, cuts)):
            places[member] += part.tolist()
    return _digits(world, [(inputs[part], labels[part]) for part in places])


def _digits(world: Any, data: Sequence[Any]) -> Case:
    return Case(world.initial, data, world.train, lambda model: float(world.evaluate(model)["accuracy"]))


def text() -> Case:
    import torch

    from quorumark.trial.templates import text as template

    def initial(seed: int) -> Mapping[str, Any]:
        torch.manual_seed(seed)
        weights: Mapping[str, Any] = template.make().state_dict()
        return weights

    def train(model: Mapping[str, Any], mine: Any, seed: int, rate: float) -> Mapping[str, Any]:  # noqa: ARG001
        made: Mapping[str, Any] = template.train(model, mine, seed)
        return made

    data = [template.data(member, MEMBERS) for member in range(MEMBERS)]
    return Case(initial, data, train, lambda model: float(template.evaluate(model).mean()))


CASES: dict[str, Callable[[], Case]] = {"digits": digits, "skewed": skewed, "text": text}


def run(name: str, packing: int, seed: int, rounds: int, commit: str) -> dict[str, Any]:
    """One run to its end."""
    case = CASES[name]()
    initial = case.initial(seed)
    layout = ModelLayout.of(initial)
    people = [Identity.generate(f"member {x}") for x in range(1, MEMBERS + 1)]
    counts = [len(mine[1]) if isinstance(mine, tuple) else len(mine) for mine in case.data]
    roster = roster_of((person.card(), count) for person, count in zip(people, counts, strict=True))
    terms = Terms(
        "packing", demo.THRESHOLD, roster, layout.digest(), layout.coordinates, anchor_of(layout, initial),
        created="2026-01-31T12:00:00Z", setup="dealer", policy=Policy(packing=packing),
        strength=Strength.of(demo.STRENGTH, layout.coordinates),
    )  # fmt: skip
    manifest, shares = deal_key(people, terms)

    def train(model: Mapping[str, Any], mine: Any, seed: int, rate: float) -> Mapping[str, Any]:
        return case.train(model, mine, seed, rate)

    members = {
        x: FederationMember(person, manifest, layout, train, case.data[x - 1], shares[x])
        for x, person in enumerate(people, 1)
    }
    federation = Federation(manifest, layout, initial, members, seed=seed)
    reports = list(federation.rounds(rounds))
    if any(report.given_up for report in reports):
        raise AssertionError([report.given_up for report in reports])
    key = KnownKey.from_shares(manifest, shares, layout, TensorsInMemory(initial))
    return {
        "case": name,
        "packing": packing,
        "seed": seed,
        "rounds": rounds,
        "weights": layout.size,
        "accuracy": case.accuracy(federation.model),
        "z": key.z(federation.model),
        "expected_z": reports[-1].expected_z,
        "survival": reports[-1].survival,
        "survival_error": reports[-1].survival_error,
        "rho": reports[-1].rho,
        "bytes_up": reports[-1].uploaded_bytes / len(people) / layout.size,
        "bytes_down": federation.server.length() * 8 / layout.size,
        "widened": sum(1 for report in reports if report.widened),
        "commit": commit,
    }


def _commit() -> str:
    """Of the code that runs, with a + if it has been changed since."""
    ask = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(ask, capture_output=True, check=True, text=True).stdout.strip()  # noqa: S603


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--rounds", type=int, default=demo.ROUNDS)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/packing.json"))
    chosen = parser.parse_args()
    names, commit = chosen.cases.split(","), _commit()
    known = json.loads(chosen.out.read_text(encoding="utf-8")) if chosen.out.exists() else []
    rows = [{"case": "digits"} | row for row in known if row.get("case", "digits") not in names]
    for name in names:
        for packing in (1, 2, 3, 4):
            rows += [run(name, packing, seed, chosen.rounds, commit) for seed in SEEDS]
            mine = rows[-len(SEEDS) :]
            print(  # noqa: T201
                name, packing,
                *(f"{what} {statistics.mean(r[what] for r in mine):.4f}" for what in ("accuracy", "z", "bytes_up")),
                [round(r["accuracy"], 4) for r in mine], [round(r["z"], 1) for r in mine], flush=True,
            )  # fmt: skip
    rows.sort(key=lambda row: (list(CASES).index(row["case"]), row["packing"], row["seed"]))
    chosen.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
