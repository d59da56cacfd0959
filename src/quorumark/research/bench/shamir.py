"""`quorumark bench shamir`: sharing, compressed sharing and reconstruction against the alternatives."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from quorumark import field, shamir
from quorumark.research.bench import Row, compare
from quorumark.research.bench.peers import galois_sharing, paper_sharing, python_sharing

FULL_SIZE = 11_200_000
CASES = ((5, 3), (32, 16), (128, 64))
PEERS: dict[str, Callable[[list[int], int, int], Callable[[], object] | None]] = {
    "the paper's torch Horner": paper_sharing,
    "galois": galois_sharing,
    "Python ints": python_sharing,
}
# element·K·t products that each side does in one timed call; the peers' would take hours on the full vector
_QUICK_WORK = 3e8
_PEER_WORK = {"the paper's torch Horner": 4e7, "galois": 1.5e6, "Python ints": 7e5}
_QUICK_PEER_WORK = {"the paper's torch Horner": 1.5e7, "galois": 6e5, "Python ints": 3e5}


def rows(quick: bool = False) -> Iterator[Row]:
    """All comparisons, as they are made."""
    before = field.threads()
    try:
        field.set_threads(1)
        for members, threshold in CASES:
            yield from _case(members, threshold, quick)
        if before > 1:
            yield from _threads_bring(before, quick)
    finally:
        field.set_threads(before)


def _streamed(secret: field.Vector, threshold: int, members: int, words: int = 1 << 18) -> Callable[[], object]:
    """Shares the whole vector in chunks into one matrix, as a dealer writes files: K·d words never exist at once.

    `words` of shares at a time: by default 2 MiB, which stay in the cache until they are sealed or written.
    """
    chunk = min(secret.size, words // members // 8 * 8)
    buffers = {width: np.zeros((members, width), np.uint64) for width in {chunk, secret.size % chunk or chunk}}

    def call() -> None:
        for part in field.chunks(secret.size, chunk):
            shamir.share(secret[part], threshold, members, out=buffers[part.stop - part.start])

    return call


def _case(members: int, threshold: int, quick: bool) -> Iterator[Row]:
    products = members * threshold
    size = min(FULL_SIZE // 4, int(_QUICK_WORK / products)) if quick else FULL_SIZE
    secret = field.random(size)
    ours = _streamed(secret, threshold, members)
    for peer, make in PEERS.items():
        few = int((_QUICK_PEER_WORK if quick else _PEER_WORK)[peer] / products)
        call = make([int(s) for s in field.random(few)], threshold, members)
        if call is None:
            continue
        yield compare(
            ours,
            call,
            name=f"share ({members},{threshold})",
            against=f"{peer}, {few} elements",
            size=size,
            work=size,
            their_work=few,
            repeats=5,
        )
    sample = field.random(100_000 if quick else 500_000)
    yield compare(
        lambda: shamir.share_compressed(sample, threshold, members),
        lambda: shamir.share(sample, threshold, members),
        name=f"share compressed ({members},{threshold})",
        against="share",
        size=sample.size,
        repeats=5,
    )
    shares = shamir.share(sample, threshold, members)
    few_shares = {k + 1: shares[k] for k in range(threshold)}
    copy = np.zeros_like(shares[:threshold])
    yield compare(
        lambda: shamir.reconstruct(few_shares, threshold),
        lambda: np.copyto(copy, shares[:threshold]),
        name=f"reconstruct ({members},{threshold})",
        against="memcpy of the t shares",
        size=sample.size,
        repeats=5,
    )


def _threads_bring(threads: int, quick: bool) -> Iterator[Row]:
    members, threshold = 32, 16
    secret = field.random(int((_QUICK_WORK if quick else 1e9) / (members * threshold)))
    call = _streamed(secret, threshold, members, words=1 << 21)  # enough for each thread to be worth starting

    def with_threads(count: int) -> Callable[[], object]:
        def run() -> object:
            field.set_threads(count)
            return call()

        return run

    yield compare(
        with_threads(threads),
        with_threads(1),
        name=f"share ({members},{threshold})",
        against="one thread",
        size=secret.size,
        threads=threads,
        repeats=5,
    )
