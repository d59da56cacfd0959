"""`quorumark bench dealer`: the setup with a dealer, for the dealer and for one member, against the paper's.

The dealer deals into real files in a temporary folder (`TMPDIR` says where) and a member accepts its share from there;
both times include sealing, hashing and syncing the files, which the paper's code does not do. The paper's dealer shares
a vector with torch's Horner rule, its member multiplies what it got by its Lagrange coefficient; both run on fewer
elements, and the ratio is per element.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from quorumark import field
from quorumark.consortium.home import HomeFolder
from quorumark.consortium.identity import Identity
from quorumark.consortium.keystore import Unlock
from quorumark.consortium.records import Card, Terms, roster_of
from quorumark.errors import MissingDependencyError
from quorumark.research.bench import SetupRow, setup_row
from quorumark.research.bench.peers import BEST_BYTES, LAYER_BYTES, PAPER_MODULUS, paper_elements, paper_sharing
from quorumark.setup.dealer import accept, deal

FULL_SIZE = 11_200_000
CASES = (4, 8, 16, 32, 64, 128)  # K, with t = K/2
RUNS = 5
LONG_RUNS = 3  # from K = 128 on, where one dealing takes minutes
_MEMBER_ELEMENTS = 1_000_000  # for the paper's member: one multiplication each


def rows(quick: bool = False) -> Iterator[SetupRow]:
    """Two rows per K, the dealer's and a member's, as they are made; one thread on both sides."""
    before = field.threads()
    try:
        field.set_threads(1)
        list(_case(4, 2, 20_000, 1 << 20, 1))  # compiles
        for members in CASES[:4] if quick else CASES:
            size, layer = (200_000, LAYER_BYTES // 8) if quick else (FULL_SIZE, LAYER_BYTES)
            yield from _case(members, members // 2, size, layer, RUNS if members < 128 else LONG_RUNS)
    finally:
        field.set_threads(before)


def _case(count: int, threshold: int, wanted: int, layer: int, runs: int) -> Iterator[SetupRow]:
    few, few_best = paper_elements(count, layer), paper_elements(count, BEST_BYTES)
    paper_dealer, paper_member = _paper_dealer(few, threshold, count), _paper_member()
    best = _paper_dealer(few_best, threshold, count)
    dealing, accepting, their_dealing, their_best, their_accepting = [], [], [], [], []
    with tempfile.TemporaryDirectory(prefix="quorumark-bench-") as name:
        base = Path(name)
        size = _fitting(wanted, count, threshold, shutil.disk_usage(base).free)
        Unlock.new_key_file(base / "key")
        unlock = Unlock.key_file(base / "key")
        home = HomeFolder.create(base / "home", "member 1", unlock)
        terms = _terms(home.card(), count, threshold, size)
        folder = base / "exchange"
        for _ in range(runs):
            dealing.append(_seconds(lambda: deal(terms, folder)))
            their_dealing.append(_seconds(paper_dealer))
            their_best.append(_seconds(best))
            record = (folder / "dealing.json").stat().st_size
            sealed = [(folder / f"share-{x}.sealed").stat().st_size for x in range(1, count + 1)]
            accepting.append(_seconds(lambda: accept(home, unlock, folder, terms)))
            their_accepting.append(_seconds(paper_member))
            signature = (folder / "signature-1.hex").stat().st_size
            shutil.rmtree(folder)
            shutil.rmtree(home.path / "consortia")
    # a smaller vector than was asked for says so: what does not grow with d weighs more in it
    case = f"({count},{threshold})" + ("" if size == wanted else ", scaled to fit the disk")
    yield setup_row(
        f"dealer {case}",
        "the paper's torch sharing",
        size=size,
        few=few,
        role="dealer",
        members=count,
        threshold=threshold,
        times=dealing,
        their_times=their_dealing,
        their_best=their_best,
        few_best=few_best,
        moved=sum(sealed) + count * record,
        paper_elements=count,  # a vector to each member
    )
    yield setup_row(
        f"member of a dealer {case}",
        "the paper's torch multiplication",
        size=size,
        few=_MEMBER_ELEMENTS,
        role="member",
        members=count,
        threshold=threshold,
        times=accepting,
        their_times=their_accepting,
        moved=sealed[0] + record + count * signature,
        paper_elements=1,
    )


def _fitting(wanted: int, count: int, threshold: int, free: int) -> int:
    """As many elements as fill at most half the free disk: K−t+1 of K values are stored, and one share twice."""
    most = free // 2 // (8 * (count - threshold + 2))
    return min(wanted, max(1, most))


def _terms(first: Card, count: int, threshold: int, size: int) -> Terms:
    cards = [first, *(Identity.generate(f"member {x}").card() for x in range(2, count + 1))]
    roster = roster_of((card, 1) for card in cards)
    created = "2026-01-31T12:00:00Z"
    return Terms("bench", threshold, roster, "00" * 32, size, "00" * 32, created=created, setup="dealer")


def _paper_dealer(few: int, threshold: int, count: int) -> Callable[[], object]:
    share = paper_sharing([int(v) for v in field.random(few)], threshold, count)
    if share is None:
        raise MissingDependencyError("torch", "the comparison with the paper's protocol")
    share()  # untimed, as the compiling case is for ours
    return share


def _paper_member() -> Callable[[], object]:
    import torch

    received = torch.randint(0, PAPER_MODULUS, (_MEMBER_ELEMENTS,), dtype=torch.int64)
    product = torch.empty_like(received)  # made once: fresh memory costs more than the multiplication

    def call() -> object:
        return torch.mul(received, 12345, out=product).remainder_(PAPER_MODULUS)

    call()
    return call


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
