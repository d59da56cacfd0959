"""Accuracy and z with one to four weights in an element, for the same keys, seeds and data.

    python benchmarks/packing.py [--cases digits,skewed,text] [--rounds 20] [--out benchmarks/results/packing.json]

`digits` is the demo's network on its members' data, which the Flower example has, too; `skewed` the same network where
each digit is split among the members by a Dirichlet distribution of 0.3; `text` a language model in miniature, the one
that `quorumark try --template text` starts with, whose accuracy is the share of letters that it guesses. A key is
dealt, so that z can be computed from it without a ceremony: one for each seed, since z differs from key to key by about
1. The four runs of a seed are under amendments of one manifest, so their differences are those of packing. Beside
`digits` plain FedAvg, and the same with the arithmetic of Flower's SecAgg+, if flwr is there: neither has a mark. The
file keeps the rows of cases that were not run again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark import demo
from quorumark.consortium.identity import Identity
from quorumark.consortium.policy import Policy
from quorumark.consortium.records import Manifest, Terms, anchor_of, roster_of
from quorumark.consortium.strength import Strength
from quorumark.field import Vector
from quorumark.model.layout import ModelLayout
from quorumark.research.known import KnownKey, TensorsInMemory
from quorumark.round.history import research_seed
from quorumark.setup.inprocess import deal_key
from quorumark.simulation import Federation, FederationMember

SEEDS = {"digits": (1, 2, 3, 4, 5), "skewed": (1, 2, 3), "text": (1, 2, 3)}
PACKINGS = (1, 2, 3, 4)
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


@dataclass(frozen=True)
class Founded:
    """A case's members with a key of theirs, and the model that they begin with."""

    case: Case
    initial: Mapping[str, Any]
    layout: ModelLayout
    people: Sequence[Identity]
    manifest: Manifest
    shares: Mapping[int, Vector]

    @classmethod
    def of(cls, name: str, seed: int) -> Founded:
        case = CASES[name]()
        initial = case.initial(seed)
        layout = ModelLayout.of(initial)
        people = [Identity.generate(f"member {x}") for x in range(1, MEMBERS + 1)]
        counts = [len(mine[1]) if isinstance(mine, tuple) else len(mine) for mine in case.data]
        roster = roster_of((person.card(), count) for person, count in zip(people, counts, strict=True))
        terms = Terms(
            "packing", demo.THRESHOLD, roster, layout.digest(), layout.coordinates, anchor_of(layout, initial),
            created="2026-01-31T12:00:00Z", setup="dealer", policy=Policy(packing=1),
            strength=Strength.of(demo.STRENGTH, layout.coordinates),
        )  # fmt: skip
        return cls(case, initial, layout, people, *deal_key(people, terms))

    def under(self, packing: int) -> Manifest:
        """The manifest, or an amendment of it: the key stays what it is."""
        first = self.manifest
        if packing == first.terms.policy.packing:
            return first
        terms = replace(first.terms, policy=Policy(packing=packing))
        made = replace(first, terms=terms, predecessor=first.digest().hex(), signatures={})
        for person in self.people:
            made = made.with_signature(terms.point_of(person.ed25519), person.sign("manifest", made.sign_bytes()))
        return made

    def train(self, model: Mapping[str, Any], mine: Any, seed: int, rate: float) -> Mapping[str, Any]:
        return self.case.train(model, mine, seed, rate)


def run(name: str, packing: int, seed: int, rounds: int, commit: str, founded: Founded | None = None) -> dict[str, Any]:
    """One run to its end."""
    of, begun = founded or Founded.of(name, seed), time.perf_counter()
    manifest, layout = of.under(packing), of.layout
    members = {
        x: FederationMember(person, manifest, layout, of.train, of.case.data[x - 1], of.shares[x])
        for x, person in enumerate(of.people, 1)
    }
    federation = Federation(manifest, layout, of.initial, members, seed=seed)
    reports = list(federation.rounds(rounds))
    if any(report.given_up for report in reports):
        raise AssertionError([report.given_up for report in reports])
    key = KnownKey.from_shares(manifest, of.shares, layout, TensorsInMemory(of.initial))
    return {
        "case": name,
        "packing": packing,
        "seed": seed,
        "rounds": rounds,
        "weights": layout.size,
        "accuracy": of.case.accuracy(federation.model),
        "z": key.z(federation.model),
        "expected_z": reports[-1].expected_z,
        "survival": reports[-1].survival,
        "survival_error": reports[-1].survival_error,
        "rho": reports[-1].rho,
        "bytes_up": reports[-1].uploaded_bytes / MEMBERS / layout.size,
        "bytes_down": federation.server.length() * 8 / layout.size,
        "widened": sum(1 for report in reports if report.widened),
        "commit": commit,
        "seconds": round(time.perf_counter() - begun, 1),
    }


Average = Callable[[Sequence[NDArray[np.float32]], Sequence[int]], NDArray[Any]]


def fedavg(results: Sequence[NDArray[np.float32]], counts: Sequence[int]) -> NDArray[Any]:
    total = sum(counts)
    found = np.zeros(results[0].size)
    for result, count in zip(results, counts, strict=True):
        found += count / total * result.astype(np.float64)
    return found


def secagg_plus(results: Sequence[NDArray[np.float32]], counts: Sequence[int]) -> NDArray[Any]:
    """What Flower's SecAgg+ makes of it with its default settings: its own functions, without the masks, which go."""
    from flwr.common.secure_aggregation import ndarrays_arithmetic as arithmetic
    from flwr.common.secure_aggregation import quantization

    clip, target, most = 8.0, 1 << 22, 1000.0
    total: list[NDArray[Any]] | None = None
    for result, count in zip(results, counts, strict=True):
        ratio = round(count / most * target)
        weighted = arithmetic.parameters_multiply([result], ratio / target)
        vector = arithmetic.factor_combine(ratio, quantization.quantize(weighted, clip, target))
        vector = [part.astype(np.int64) for part in vector]
        total = vector if total is None else arithmetic.parameters_addition(total, vector)
    factor, vector = arithmetic.factor_extract(arithmetic.parameters_mod(total, 1 << 32))
    (found,) = quantization.dequantize(vector, clip, target)
    average: NDArray[Any] = (found - (len(counts) - 1) * clip) * (target / factor)
    return average


def plain(of: Founded, kind: str, average: Average, seed: int, rounds: int, commit: str) -> dict[str, Any]:
    """The same training, with another average of what members made."""
    begun, layout, model = time.perf_counter(), of.layout, dict(of.initial)
    np.random.seed(seed)  # SecAgg+ rounds by it  # noqa: NPY002
    terms = of.manifest.terms
    for number in range(1, rounds + 1):
        rate = float(terms.strength.rate(number))
        made = [
            layout.flatten(of.train(model, of.case.data[x - 1], research_seed(seed, number, x), rate))
            for x in range(1, MEMBERS + 1)
        ]
        counts = [terms.member(x).examples for x in range(1, MEMBERS + 1)]
        model = layout.unflatten(average(made, counts).astype(np.float32), model)
    about = {"case": "digits", "packing": 0, "kind": kind, "seed": seed, "rounds": rounds, "weights": layout.size}
    seconds = round(time.perf_counter() - begun, 1)
    return about | {"accuracy": of.case.accuracy(model), "commit": commit, "seconds": seconds}


def runs_of(name: str, rounds: int, commit: str) -> Iterator[dict[str, Any]]:
    for seed in SEEDS[name]:
        of = Founded.of(name, seed)
        yield from (run(name, packing, seed, rounds, commit, of) for packing in PACKINGS)
        if name == "digits":
            yield plain(of, "plain FedAvg", fedavg, seed, rounds, commit)
            try:
                import flwr  # noqa: F401
            except ImportError:
                continue
            yield plain(of, "SecAgg+ of flwr", secagg_plus, seed, rounds, commit)


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
        for row in runs_of(name, chosen.rounds, commit):
            rows.append(row)
            told = (f"{what} {row[what]:.4f}" for what in ("accuracy", "z", "bytes_up", "seconds") if what in row)
            print(name, row.get("kind", row["packing"]), row["seed"], *told, flush=True)  # noqa: T201
    rows.sort(key=lambda row: (list(CASES).index(row["case"]), row["packing"], row.get("kind", ""), row["seed"]))
    chosen.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
