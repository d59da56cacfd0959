"""The demo: five hospitals make a key that nobody knows, lose two shares, and still have it.

It runs the real thing, the dealer-free key ceremony with its real messages, at the size of a small real model. As the
project grows, so does the demo.
"""

from __future__ import annotations

import os
import time

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from quorumark import field, shamir
from quorumark.identity import Identity
from quorumark.layout import ModelLayout
from quorumark.records import Member, Terms, digest
from quorumark.setup.dkg import DkgMember, openers, relay_sum

HOSPITALS = ("Avon", "Birch", "Cedar", "Delta", "Elm")
THRESHOLD = 3


def run(console: Console | None = None) -> None:
    """Makes, loses and reconstructs a key, and prints what happened."""
    console = console or Console()
    started = time.perf_counter()
    members = len(HOSPITALS)
    points = {name: point for point, name in enumerate(HOSPITALS, start=1)}

    model = _small_cnn()
    layout = ModelLayout.of(model)
    d = layout.coordinates
    console.print(
        f"quorumark demo: {members} hospitals, any {THRESHOLD} of them can act together.\n"
        f"Their model has {layout.size:,} weights; {d:,} of them can carry a mark.\n"
    )

    before = time.perf_counter()
    ceremony = _ceremony(layout)
    held = dict(zip(HOSPITALS, ceremony, strict=True))
    shares = np.stack(ceremony)
    table = Table("what was done", "result", "what it means", title_justify="left")
    table.add_row(
        f"a secret key of {d:,} signs is made, without a dealer",
        f"{time.perf_counter() - before:.1f} s for all five",
        f"a share of {shares[0].nbytes / 2**20:.1f} MiB each; nobody saw the key",
    )

    # Only to judge what follows: with all five at hand, the demo looks at the key that nobody should.
    key = field.to_signed(shamir.reconstruct(_at(held, points), THRESHOLD))
    strongest = max(abs(_z(_centred(held[name]), key)) for name in HOSPITALS)
    table.add_row(
        "each share alone is compared with the key", f"|z| ≤ {strongest:.1f}", "noise: one share says nothing"
    )

    for lost in ("Birch", "Elm"):
        del held[lost]
    found = field.to_signed(shamir.reconstruct(_at(held, points), THRESHOLD))
    agree = int((found == key).sum())
    table.add_row("Birch and Elm lose theirs; three are left", f"{agree:,} of {d:,} signs", _verdict(agree == d))

    del held["Delta"]
    guess = shamir.reconstruct(_at(held, points), len(held))  # the best that two can do: a line through two points
    agree = int((np.sign(_centred(guess)) == key).sum())
    table.add_row(
        "Avon and Cedar try it alone", f"{100 * agree / d:.1f} % of the signs", "as good as tossing coins: two cannot"
    )

    # ⟨weights, key⟩ without anybody seeing the key: each member answers with one number, one of them with a lie.
    weights = np.round(layout.flatten(model)[layout.carrying()] * 100).astype(np.int64)
    suspect = field.from_signed(weights)
    answers = {points[name]: field.dot(suspect, shares[points[name] - 1]) for name in HOSPITALS}
    answers[points["Delta"]] = (answers[points["Delta"]] + 1) % field.P
    opened = shamir.decode(answers, THRESHOLD)
    value = int(field.to_signed(np.array([opened.value], np.uint64))[0])
    liars = ", ".join(HOSPITALS[point - 1] for point in opened.wrong)
    table.add_row(
        "all five add up weights × key; Delta lies by 1",
        f"{value:+,}, liar: {liars}",
        _verdict(value == int(weights @ key)) + ", from shares alone",
    )
    console.print(table)
    console.print(f"\nDone in {time.perf_counter() - started:.1f} s.")


def _small_cnn() -> dict[str, NDArray[np.float32]]:
    """The weights of a small convolutional network at random initialisation (public: nothing about it is secret)."""
    shapes = {
        "conv1.weight": (32, 1, 3, 3), "conv1.bias": (32,),
        "conv2.weight": (64, 32, 3, 3), "conv2.bias": (64,),
        "dense.weight": (128, 64 * 5 * 5), "dense.bias": (128,),
        "output.weight": (10, 128), "output.bias": (10,),
    }  # fmt: skip
    generator = np.random.default_rng(2026)
    scale = {name: 1 / np.sqrt(np.prod(shape[1:])) for name, shape in shapes.items()}
    return {name: (generator.standard_normal(s) * scale[name]).astype(np.float32) for name, s in shapes.items()}


def _ceremony(layout: ModelLayout) -> list[field.Vector]:
    """The dealer-free setup of five members in one process, message by message; their shares."""
    people = [Identity.generate(name) for name in HOSPITALS]
    roster = tuple(Member(x, p.name, p.ed25519, p.x25519, 100) for x, p in enumerate(people, 1))
    anchor = digest("anchor", bytes.fromhex(layout.digest())).hex()
    terms = Terms(
        "demo", THRESHOLD, roster, layout.digest(), layout.coordinates, anchor, created="2026-01-31T12:00:00Z"
    )
    members = [DkgMember(person, terms, os.urandom(32)) for person in people]
    commits = {m.point: m.commit() for m in members}
    reveals = {m.point: m.reveal(commits) for m in members}
    deals = {m.point: m.deal(reveals) for m in members}
    for m in members:
        m.receive({dealer: messages[m.point] for dealer, messages in deals.items() if dealer != m.point})
    openings = {m.point: m.open() for m in members if m.point in openers(terms)}
    total = relay_sum(terms, members[0].session, openings)
    confirms = {m.point: m.confirm(total) for m in members}
    roots = {m.point: m.root(confirms) for m in members}
    echoes = {m.point: m.echo(roots) for m in members}
    health = {m.point: m.health(echoes) for m in members}
    for m in members:
        m.finish(health)  # raises if anything is wrong
    return [m.share for m in members if m.share is not None]


def _centred(x: field.Vector) -> NDArray[np.float64]:
    """Field elements as real numbers in (−1, 1)."""
    return field.to_signed(x) / (field.P / 2)


def _z(values: NDArray[np.float64], key: NDArray[np.int64]) -> float:
    """How many standard deviations the correlation with the key is away from chance."""
    return float(values @ key / np.linalg.norm(values))


def _at(held: dict[str, field.Vector], points: dict[str, int]) -> dict[int, field.Vector]:
    return {points[name]: vector for name, vector in held.items()}


def _verdict(right: bool) -> str:
    return "exactly right" if right else "WRONG"
