"""`quorumark bench secagg`: one member's and the server's computation, against Flower's SecAgg+ functions.

Both sides start from the same float32 model and do what their protocol does between training and the sum, with sums
checked on ours. The other side's functions are called as its client and its server call them, in the same order,
without serialisation. CPU time counts all threads; rows that say so are wall time. With `--packed`: several weights in
an element against one, without the mark and with all that belongs to it, which needs no Flower.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark import field
from quorumark.errors import MissingDependencyError
from quorumark.field import Stream
from quorumark.research.bench import Row, compare
from quorumark.research.bench.member import OneRound, resnet18
from quorumark.round import checked_sums

__all__ = ["MANY", "MEMBERS", "PACKINGS", "SecAggPlus", "packed_rows", "rows"]

MEMBERS, MANY, DROPS = 8, 32, 3
PACKINGS = (1, 2, 3, 4)
QUICK = {"a.weight": (500, 1000), "b.weight": (500, 1000), "b.bias": (500,)}
_TURNS = {MEMBERS: 15, MANY: 7}  # of rows that compare us with ourselves, where a tenth matters
_CLOCKS = {"CPU time": time.process_time, "wall time": time.perf_counter}


def rows(quick: bool = False) -> Iterator[Row]:
    """All comparisons, as they are made."""
    shapes = QUICK if quick else resnet18()
    size = sum(int(np.prod(shape)) for shape in shapes.values())
    yield _one_mask(size)
    yield _one_tag(size)
    theirs = SecAggPlus(np.random.default_rng(1).normal(0, 0.05, size).astype(np.float32))
    for packing in PACKINGS:
        for mark in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                yield from _beside_theirs(OneRound(shapes, packing, MEMBERS, mark, Path(folder)), theirs, size)
        with tempfile.TemporaryDirectory() as folder:
            ours = OneRound(shapes, packing, MEMBERS, False, Path(folder), drops=DROPS)
            name = f"a client, {DROPS} of {MEMBERS} drop, retry included, {about(packing, MEMBERS, False)}"
            yield from _timed(name, ours.uploaded_again, theirs.client, size)


def _beside_theirs(ours: OneRound, theirs: SecAggPlus, size: int) -> Iterator[Row]:
    what = about(ours.packing, MEMBERS, ours.mark)
    yield from _timed(f"a client masks, {what}", ours.uploaded, theirs.client, size)
    if not ours.mark:
        yield from _timed(f"the server unmasks, {what}", ours.unmasked_once, theirs.server, size)


def _timed(name: str, mine: Callable[[], object], other: Callable[[], object], size: int) -> Iterator[Row]:
    for label, clock in _CLOCKS.items():
        against, threads = "SecAgg+ of flwr", field.threads()
        yield compare(
            mine,
            other,
            name=f"{name}, {label}",
            against=against,
            size=size,
            threads=threads,
            repeats=5,
            clock=clock,
        )


def packed_rows(quick: bool = False) -> Iterator[Row]:
    """Several weights in an element against one, with few members and with many."""
    shapes = QUICK if quick else resnet18()
    size = sum(int(np.prod(shape)) for shape in shapes.values())
    for members in (MEMBERS,) if quick else (MEMBERS, MANY):
        for mark in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                alone = OneRound(shapes, 1, members, mark, Path(folder))
                for packing in PACKINGS[1:]:
                    yield from _beside(OneRound(shapes, packing, members, mark, Path(folder)), alone, size)


def about(packing: int, members: int, mark: bool) -> str:
    """What a row is about, in its name."""
    return f"{packing} in an element, K={members}, {'with' if mark else 'without'} the mark"


def _beside(packed: OneRound, one: OneRound, size: int) -> Iterator[Row]:
    """Several weights in an element against one."""

    def masked_again() -> None:
        for side in (packed, one):
            side.mask_again()

    count = len(one.members)
    what = about(packed.packing, count, packed.mark)
    told: dict[str, Any] = {"against": "one weight in an element", "size": size, "threads": field.threads()}
    told |= {"repeats": _TURNS[count], "clock": time.process_time}
    yield compare(packed.uploaded, one.uploaded, name=f"a member masks, {what}, CPU time", **told)
    if not packed.mark:
        name = f"the server unmasks, {what}, CPU time"
        yield compare(packed.unmasked, one.unmasked, name=name, between=masked_again, **told)


def _one_mask(size: int) -> Row:
    vector = field.random(size)
    source, target = vector.copy(), vector.copy()
    stream = Stream(os.urandom(32), "bench")
    return compare(
        lambda: stream.add_to(vector, checked=False),
        lambda: np.copyto(target, source),
        name="one pairwise mask",
        against="memcpy",
        size=size,
        threads=field.threads(),
    )


def _one_tag(size: int) -> Row:
    """What checking sums adds to an upload, and to each round's start."""
    vector, key = field.random(size), os.urandom(32)
    mask = Stream(key, "bench")
    return compare(
        lambda: checked_sums.tag(key, vector, first=True),
        lambda: mask.add_to(vector, checked=False),
        name="the tag of a checked sum",
        against="one pairwise mask",
        size=size,
        threads=field.threads(),
    )


class SecAggPlus:
    """The same work by Flower's own functions, with its default ranges: 22 bits a weight, 32 bits a masked word."""

    CLIP, TARGET, MODULUS = 8.0, 1 << 22, 1 << 32

    def __init__(self, model: NDArray[np.float32]) -> None:
        try:
            from flwr.common.secure_aggregation import ndarrays_arithmetic, quantization, secaggplus_utils
            from flwr.common.secure_aggregation.crypto import shamir, symmetric_encryption
            from flwr.supercore.primitives import asymmetric
        except ImportError:
            raise MissingDependencyError("flwr", "the comparison with Flower's secure aggregation") from None
        self.arithmetic: Any = ndarrays_arithmetic
        self.quantization: Any = quantization
        self.random: Any = secaggplus_utils.pseudo_rand_gen
        self.exchange: Any = symmetric_encryption.generate_shared_key
        self.combine: Any = shamir.combine_shares
        self.model = model
        pairs: list[Any] = [asymmetric.generate_key_pairs() for _ in range(MEMBERS)]
        self.private, self.publics = pairs[0][0], [public for _, public in pairs[1:]]
        self.seed = os.urandom(32)
        self.shares = [shamir.create_shares(os.urandom(32), 5, MEMBERS)[:5] for _ in range(MEMBERS)]
        self.masked = self.client()

    def client(self) -> list[Any]:
        """Stage 2 of its client: weigh, quantise, add a private mask and one for each neighbour, reduce."""
        arithmetic = self.arithmetic
        parameters = arithmetic.parameters_multiply([self.model], 1 / MEMBERS)
        vector = self.quantization.quantize(parameters, self.CLIP, self.TARGET)
        vector = arithmetic.factor_combine(1, vector)
        shapes = [part.shape for part in vector]
        vector = arithmetic.parameters_addition(vector, self.random(self.seed, self.MODULUS, shapes))
        for public in self.publics:
            mask = self.random(self.exchange(self.private, public), self.MODULUS, shapes)
            vector = arithmetic.parameters_addition(vector, mask)
        masked: list[Any] = arithmetic.parameters_mod(vector, self.MODULUS)
        return masked

    def server(self) -> object:
        """Its unmask stage when nobody dropped."""
        arithmetic, vector = self.arithmetic, self.masked
        shapes = arithmetic.get_parameters_shape(vector)
        for shares in self.shares:
            mask = self.random(self.combine(shares), self.MODULUS, shapes)
            vector = arithmetic.parameters_subtraction(vector, mask)
        vector = arithmetic.parameters_mod(vector, self.MODULUS)
        _, vector = arithmetic.factor_extract(vector)
        return self.quantization.dequantize(vector, self.CLIP, self.TARGET)
