"""`quorumark bench dkg`: one member's computation and traffic in the dealer-free setup, against the paper's protocol.

One member's stages are timed at full size, with real messages of all others to it. Only the relay's sum is a stand-in
(squares of random numbers): making the true one would take all members' full vectors in one memory, and no step's time
depends on values. The paper's member shares its own vector with torch's Horner rule and adds up K vectors; it runs on
fewer elements, and the ratio is per element.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

from quorumark import field
from quorumark.consortium.identity import Identity
from quorumark.consortium.records import Terms, roster_of
from quorumark.errors import MissingDependencyError
from quorumark.research.bench import SetupRow, setup_row
from quorumark.research.bench.peers import BEST_BYTES, LAYER_BYTES, PAPER_MODULUS, paper_elements, paper_sharing
from quorumark.setup.dkg import DkgMember, openers

FULL_SIZE = 11_200_000
CASES = (4, 8, 16, 32, 64, 128)  # K, with t = K/2


def rows(quick: bool = False) -> Iterator[SetupRow]:
    """One row per K, as they are made; one thread on both sides."""
    before = field.threads()
    try:
        field.set_threads(1)
        for members in CASES[:4] if quick else CASES:
            yield _case(
                members, members // 2, 500_000 if quick else FULL_SIZE, LAYER_BYTES // 8 if quick else LAYER_BYTES
            )
    finally:
        field.set_threads(before)


def _case(count: int, threshold: int, size: int, layer: int) -> SetupRow:
    people = [Identity.generate(f"member {x}") for x in range(1, count + 1)]
    roster = roster_of((person.card(), 1) for person in people)
    terms = Terms("bench", threshold, roster, "00" * 32, size, "00" * 32, created="2026-01-31T12:00:00Z")
    seeds = [os.urandom(32) for _ in people]
    members = [DkgMember(person, terms, seed) for person, seed in zip(people, seeds, strict=True)]
    commits = {m.point: m.commit() for m in members}
    reveals = {m.point: m.reveal(commits) for m in members}
    incoming = {m.point: m.deal(reveals)[1] for m in members[1:]}
    squares = field.random(size)
    total = field.mul(squares, squares, out=squares, checked=False).astype("<u8").tobytes()
    confirms = {m.point: m._say("confirm", m.squares_digest(total)) for m in members[1:]}
    roots = {m.point: m._say("root", os.urandom(32)) for m in members[1:]}
    few, few_best = paper_elements(count, layer), paper_elements(count, BEST_BYTES)
    peer, best = _paper_member(few, threshold, count), _paper_member(few_best, threshold, count)
    times, their_times, their_best = [], [], []
    for _ in range(5):
        mine = DkgMember(people[0], terms, seeds[0])
        mine.commit()
        mine.reveal(commits)
        start = time.perf_counter()
        dealt = mine.deal(reveals)
        mine.receive(incoming)
        opened = mine.open(openers(terms))
        mine.confirm(total)
        mine.root(confirms)
        mine.echo(roots)
        times.append(time.perf_counter() - start)
        their_times.append(peer())
        their_best.append(best())
    return setup_row(
        f"dealer-free setup ({count},{threshold})",
        "the paper's torch code",
        size=size,
        few=few,
        role="member",
        members=count,
        threshold=threshold,
        times=times,
        their_times=their_times,
        their_best=their_best,
        few_best=few_best,
        moved=sum(map(len, [*incoming.values(), *dealt.values(), opened, total])),
        paper_elements=2 * (count - 1),  # a vector to each other member, and one from each
    )


def _paper_member(few: int, threshold: int, count: int) -> Callable[[], float]:
    """What one member computes in the paper's protocol: its own sharing, and the sum of K received vectors."""
    share = paper_sharing([int(v) for v in field.random(few)], threshold, count)
    if share is None:
        raise MissingDependencyError("torch", "the comparison with the paper's protocol")
    import torch

    received = torch.randint(0, PAPER_MODULUS, (count, few), dtype=torch.int64)

    def call() -> float:
        start = time.perf_counter()
        share()
        total = torch.zeros(few, dtype=torch.int64)
        for row in received:
            total = (total + row) % PAPER_MODULUS
        return time.perf_counter() - start

    return call
