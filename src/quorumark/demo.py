"""The demo: five hospitals train one model, and any three of them can prove afterwards that it is theirs.

It runs the real thing, small: the dealer-free key ceremony, federated training under secure aggregation with members
who drop out, and inner products with the key that nobody holds. Handwritten digits, which scikit-learn brings along,
stand for the hospitals' data.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from quorumark import field, shamir
from quorumark.errors import MissingDependencyError, RoundError
from quorumark.federation import Federation, FederationMember, Losses, watch
from quorumark.field import Vector
from quorumark.identity import Identity
from quorumark.keystore import write_shared
from quorumark.layout import ModelLayout, write_safetensors
from quorumark.records import Manifest, Member, Terms, anchor_digest
from quorumark.setup.local import make_key
from quorumark.training import torch_evaluate, torch_train

HOSPITALS = ("Avon", "Birch", "Cedar", "Delta", "Elm")
EXAMPLES = (437, 350, 280, 220, 150)
THRESHOLD = 3
ROUNDS = 20
TEST = 360
# a short run of a small model needs a larger step a round to reach ρ = 0.05 (docs/strength.md)
STRENGTH = {"rule": "rho", "rho": "0.05", "c_max": "0.1", "lr": "cosine:24"}
LOSSES = Losses({(4, "train"): [5], (7, "upload"): [2], (10, "unmask"): [1]})
ALARM = 6.0  # z*: an innocent model gets there once in 10^9


@dataclass(frozen=True)
class _World:
    """The data, and how to make the network."""

    make: Callable[[], Any]
    data: tuple[tuple[Any, Any], ...]
    test: tuple[Any, Any]


def run(console: Console | None = None, out: Path | None = None) -> dict[str, Any]:
    """Runs the demo, prints what happened, and gives the figures; with `out`, everything is kept there."""
    console = console or Console()
    started = time.perf_counter()
    world = _world()
    initial = _initial(world, seed=2026)
    layout = ModelLayout.of(world.make())
    console.print(
        f"quorumark demo: {len(HOSPITALS)} hospitals train one model; any {THRESHOLD} of them can prove that it is "
        f"theirs.\nThe model has {layout.size:,} weights; {layout.coordinates:,} of them carry the mark.\n"
    )
    table = Table("what was done", "result", "what it means", title_justify="left")

    before = time.perf_counter()
    found = _found(layout, initial)
    table.add_row(
        f"a secret key of {layout.coordinates:,} signs is made, without a dealer",
        f"{time.perf_counter() - before:.1f} s for all five",
        f"a share of {found.shares[1].nbytes / 2**20:.1f} MiB each; nobody saw the key",
    )

    marked = _train(console, world, found, layout, initial, out, mark=True)
    # the control has a consortium of its own: no two sums of one round are ever opened in one
    unmarked = _train(console, world, _found(layout, initial), layout, initial, out, mark=False)
    given_up = [report for run_ in (marked, unmarked) for report in run_.reports if report.given_up]
    if given_up:
        raise RoundError(f"a round of the demo was given up: {given_up[0].given_up}")
    lost = sum(len(points) for report in marked.reports for points in report.lost.values())
    retried = sum(report.attempts > 1 for report in marked.reports)
    accuracies = [run_.reports[-1].metrics["accuracy"] for run_ in (marked, unmarked)]
    table.add_row(
        f"they train it for {ROUNDS} rounds; Elm, Birch and Avon drop out once each",
        f"accuracy {100 * accuracies[0]:.1f} %",
        f"without a mark {100 * accuracies[1]:.1f} %; only sums were opened",
    )

    def z_of(model: Mapping[str, Any], points: tuple[int, ...]) -> float | None:
        return _verify(found.manifest, layout, initial, model, {x: found.shares[x] for x in points})

    unrelated = torch_train(world.make, epochs=8)(_initial(world, seed=7), world.data[0], seed=7)
    z_marked, z_unmarked, z_unrelated = (z_of(m, (1, 3, 4)) for m in (marked.model, unmarked.model, unrelated))
    table.add_row("Avon, Cedar and Delta test the model", *_verdict(z_marked))
    table.add_row(
        "Birch, Delta and Elm do", _verdict(z_of(marked.model, (2, 4, 5)))[0], "any three get the same number"
    )
    table.add_row("Avon and Cedar try it alone", *_verdict(z_of(marked.model, (1, 3))))
    table.add_row("three test the same model, trained without the mark", *_verdict(z_unmarked))
    table.add_row("three test an unrelated model", *_verdict(z_unrelated))
    console.print(table)
    console.print(
        f"z counts standard deviations from chance; from z = {ALARM:g} on a model counts as marked. {lost} losses, "
        f"{retried} of them cost a second attempt.\nDone in {time.perf_counter() - started:.1f} s."
    )
    summary = {
        "z_marked": z_marked,
        "z_unmarked": z_unmarked,
        "z_unrelated": z_unrelated,
        "accuracy_marked": accuracies[0],
        "accuracy_unmarked": accuracies[1],
        "members": len(HOSPITALS),
        "threshold": THRESHOLD,
        "dropped": lost,
        "rho": marked.reports[-1].rho,
        "coordinates": layout.coordinates,
        "rounds": ROUNDS,
    }
    if out is not None:
        _keep(out, summary, found, layout, initial)
        console.print(f"In {out}: summary.json, the manifest, the models, and what happened each round (no secrets).")
    return summary


def _world() -> _World:
    try:
        import torch
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingDependencyError("quorumark[demo]", f"the demo ({error.name} is not installed)") from None
    torch.set_num_threads(1)  # small steps: a second thread costs more than it brings
    pixels, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(pixels / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    targets = torch.tensor(labels)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    parts = torch.split(order, [TEST, *EXAMPLES])
    sets = tuple((inputs[part], targets[part]) for part in parts)

    def make() -> Any:
        nn = torch.nn
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(64 * 4 * 4, 256), nn.ReLU(),
            nn.Linear(256, 10),
        )  # fmt: skip

    return _World(make, sets[1:], sets[0])


def _initial(world: _World, seed: int) -> dict[str, Any]:
    """A public initial model: nothing about it is secret."""
    import torch

    torch.manual_seed(seed)
    return {name: tensor.clone() for name, tensor in world.make().state_dict().items()}


@dataclass(frozen=True)
class _Consortium:
    people: tuple[Identity, ...]
    manifest: Manifest
    shares: dict[int, Vector]


def _found(layout: ModelLayout, initial: Mapping[str, Any]) -> _Consortium:
    """The hospitals agree on terms and make a key, message by message."""
    people = tuple(Identity.generate(name) for name in HOSPITALS)
    cards = enumerate(zip(people, EXAMPLES, strict=True), 1)
    roster = tuple(Member(x, person.name, person.ed25519, person.x25519, count) for x, (person, count) in cards)
    anchor = anchor_digest(layout.digest(), layout.encode(initial))
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    size = layout.coordinates
    terms = Terms("demo", THRESHOLD, roster, layout.digest(), size, anchor, created=now, strength=STRENGTH)
    return _Consortium(people, *make_key(people, terms))


def _train(
    console: Console,
    world: _World,
    found: _Consortium,
    layout: ModelLayout,
    initial: Mapping[str, Any],
    out: Path | None,
    *,
    mark: bool,
) -> Federation:
    """Federated training under secure aggregation, with a table that says how far it is."""
    manifest, train = found.manifest, torch_train(world.make)
    members = {}
    for x, (person, data) in enumerate(zip(found.people, world.data, strict=True), 1):
        members[x] = FederationMember(person, manifest, layout, train, data, found.shares[x], mark=mark)
    name = "marked" if mark else "unmarked"
    folder = None if out is None else out / name
    evaluate = torch_evaluate(world.make, world.test)
    run = Federation(manifest, layout, initial, members, evaluate=evaluate, losses=LOSSES, folder=folder)
    watch(run, ROUNDS, console, f"training, {name}")
    return run


def _verify(
    manifest: Manifest,
    layout: ModelLayout,
    initial: Mapping[str, Any],
    model: Mapping[str, Any],
    shares: Mapping[int, Vector],
) -> float | None:
    """z of a model, from one number of each member: nobody puts the key together. None if no key gives such a number.

    x is the model minus the public initial one, each tensor scaled to whole numbers; member i says ⟨x, s_i⟩ mod p, and
    interpolated at 0 that is ⟨x, τ⟩. For a model that knows nothing of the key z = ⟨x, τ⟩/‖x‖ is standard normal. Signs
    give at most Σ|x|; too few members get a random number mod p, which is far outside.
    """
    difference = layout.flatten(model).astype(np.float64) - layout.flatten(initial)
    x = np.zeros(layout.size, np.int64)
    for _, place in layout.spans("carrier"):
        spread = float(np.sqrt(np.mean(difference[place] ** 2))) or 1.0
        x[place] = np.clip(np.round(difference[place] / spread * 16), -127, 127)
    carried: NDArray[np.int64] = x[layout.carrying()]
    signs = np.where(manifest.genesis.whitening(0, carried.size), -1, 1)  # the key in use is σ ⊙ τ_raw
    query = field.from_signed(carried * signs)
    answers = {point: field.dot(query, share) for point, share in shares.items()}
    weights = shamir.lagrange(sorted(answers))
    total = sum(weight * answers[point] for weight, point in zip(weights, sorted(answers), strict=True)) % field.P
    value = int(field.to_signed(np.array([total], np.uint64))[0])
    if abs(value) > int(np.abs(carried).sum()):
        return None
    return float(value / np.sqrt(float(carried @ carried)))


def _verdict(z: float | None) -> tuple[str, str]:
    if z is None:
        return "no z at all", "a random number that no key can give: two cannot"
    return f"z = {z:.1f}", "it is theirs, beyond doubt" if z >= ALARM else "noise: not accused"


def _keep(
    out: Path,
    summary: dict[str, Any],
    found: _Consortium,
    layout: ModelLayout,
    initial: Mapping[str, Any],
) -> None:
    write_shared(out / "manifest.json", found.manifest.to_bytes())
    write_shared(out / "layout.json", layout.to_bytes())
    write_safetensors({name: tensor.numpy() for name, tensor in initial.items()}, out / "initial.safetensors")
    write_shared(out / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())
