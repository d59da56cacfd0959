"""`quorumark bench secagg`: one member's and the server's computation, against Flower's SecAgg+ functions.

Both sides start from the same float32 model and do what their protocol does between training and the sum. The other
side's functions are called as its client and its server call them, in the same order, without serialisation. CPU time
counts all threads; rows that say so are wall time. With `--packed`: several weights in an element against one, which
needs no Flower.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark import codec, field, packing
from quorumark.consortium.identity import Identity
from quorumark.errors import MissingDependencyError
from quorumark.field import Stream, Vector
from quorumark.research.bench import Row, compare
from quorumark.round import checked_sums
from quorumark.round.group import Group
from quorumark.round.memory import MemoryState
from quorumark.round.secagg.masks import BOX
from quorumark.round.secagg.member import SecAggMember
from quorumark.round.secagg.messages import Upload, hear, say
from quorumark.round.secagg.server import SecAggServer

FULL_SIZE, QUICK_SIZE = 11_200_000, 1_000_000
MEMBERS, THRESHOLD, DROPS = 8, 2, 3
MANY = 32
_TURNS = {MEMBERS: 15, MANY: 7}  # of rows that compare us with ourselves, where a tenth matters
_BINDING = bytes(32)
_CLOCKS = {"CPU time": time.process_time, "wall time": time.perf_counter}


def rows(quick: bool = False) -> Iterator[Row]:
    """All comparisons, as they are made."""
    size = QUICK_SIZE if quick else FULL_SIZE
    model = np.random.default_rng(1).normal(0, 0.05, size).astype(np.float32)
    yield _one_mask(size)
    yield _one_tag(size)
    theirs, ours = SecAggPlus(model), _Ours(model)
    cases: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
        (f"a client masks, K={MEMBERS}", ours.client, theirs.client),
        (f"a client, {DROPS} of {MEMBERS} drop, retry included", ours.client_with_retry, theirs.client),
        (f"the server unmasks, K={MEMBERS}", ours.server, theirs.server),
    ]
    for count in (2, 3, 4):
        packed = _Packed(model, count)
        cases += [
            (f"a client masks, {count} weights in an element, K={MEMBERS}", packed.client, theirs.client),
            (f"the server unmasks, {count} weights in an element, K={MEMBERS}", packed.unmasked_once, theirs.server),
        ]
    for name, mine, other in cases:
        for label, clock in _CLOCKS.items():
            yield compare(
                mine,
                other,
                name=f"{name}, {label}",
                against="SecAgg+ of flwr",
                size=size,
                threads=field.threads(),
                repeats=5,
                clock=clock,
            )


def packed_rows(quick: bool = False) -> Iterator[Row]:
    """Several weights in an element against one, with few members and with many."""
    size = QUICK_SIZE if quick else FULL_SIZE
    model = np.random.default_rng(1).normal(0, 0.05, size).astype(np.float32)
    for members in (MEMBERS,) if quick else (MEMBERS, MANY):
        alone = _Ours(model, members)
        for count in (2, 3, 4):
            yield from _beside(_Packed(model, count, members), alone, size)


def _beside(packed: _Packed, ours: _Ours, size: int) -> Iterator[Row]:
    """Several weights in an element against one."""

    def masked_again() -> None:
        for side in (packed, ours):
            side.mask_again()

    for name, mine, other in (
        ("a client masks", packed.client, ours.client),
        ("the server unmasks", packed.server, ours.server),
    ):
        yield compare(
            mine,
            other,
            name=f"{name}, {packed.count} weights in an element, K={ours.count_of_members}, CPU time",
            against="one weight in an element",
            size=size,
            threads=field.threads(),
            repeats=_TURNS[ours.count_of_members],
            clock=time.process_time,
            between=masked_again,
        )


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


class _Ours:
    """A group whose first member is timed, at full size; before each call its memory is set back."""

    def __init__(self, model: NDArray[np.float32], members: int = MEMBERS) -> None:
        self.model, self.count_of_members = model, members
        people = [Identity.generate(f"member {x}") for x in range(1, members + 1)]
        self.group = Group.of_cards([person.card() for person in people], THRESHOLD)
        states = [MemoryState(self.group) for _ in people]
        made = [SecAggMember(person, self.group, state) for person, state in zip(people, states, strict=True)]
        self.members = {member.point: member for member in made}
        self.me, self.state = self.members[1], states[[m.point for m in made].index(1)]
        # an attempt that fails, and one that succeeds without those who dropped
        server = self._ready(1)
        self.first = server.announce()
        stayed = range(1, members - DROPS + 1) if members == MEMBERS else ()
        self.before = self.state._load()
        if stayed:
            for x in stayed:
                server.take_upload(x, self._upload(x, self.first))
            self.second = server.retry()
            for x in stayed:
                server.take_upload(x, self._upload(x, self.second))
            self.asked = server.request(1)
        # a round in which all stay, for the server; the masks of pairs, which cancel, are left out
        self.full = self._ready(2)
        for member in self.members.values():
            member.together = frozenset(self.members)
        announced = self.full.announce()
        for x in self.members:
            self.full.take_upload(x, self._upload(x, announced))
        for x, member in self.members.items():
            self.full.take_answer(x, member.unmask(self.full.request(x)))
        self.me.together = frozenset()
        self.masked = self.full._sum.copy()
        self.vector = np.empty(self.length, np.uint64)

    def _ready(self, number: int) -> SecAggServer:
        server = SecAggServer(self.group, number, _BINDING, self.length)
        for x, member in self.members.items():
            server.take_ready(x, member.ready(number, _BINDING, self.length))
        return server

    def _upload(self, point: int, announced: bytes) -> Upload:
        member = self.members[point]
        return member.upload(member.plan(announced), self.encoded(self.count_of_members))

    @property
    def length(self) -> int:
        return self.model.size

    def encoded(self, members: int, out: Vector | None = None) -> Vector:
        return codec.encode(self.model, 1 / members, out)

    def client(self) -> Upload:
        self.state._save(self.before)
        plan = self.me.plan(self.first)
        return self.me.upload(plan, self.encoded(self.count_of_members, self.vector))

    def client_with_retry(self) -> bytes:
        self.client()
        plan = self.me.plan(self.second)
        upload = self.me.upload(plan, self.encoded(len(plan.members), self.vector))
        return self.me.unmask(self._request(upload))

    def _request(self, upload: Upload) -> bytes:
        """The server's request, with this upload in place of an earlier one."""
        head, parts = hear("request", self.asked)
        stop = 4 + int.from_bytes(upload.head[:4], "big")
        parts[:2] = upload.head[4:stop], upload.head[stop : stop + BOX]
        return say("request", {name: head[name] for name in ("round", "purpose", "attempt")}, parts)

    def mask_again(self) -> None:
        """The server's sum as it was before it was unmasked."""
        self.full._sum[:] = self.masked

    def server(self) -> object:
        self.full._stage = "unmask"
        return codec.decode(self.full.finish())  # with its check of the range, as in a round (`History.settle`)

    def unmasked_once(self) -> object:
        self.mask_again()
        return self.server()


class _Packed(_Ours):
    """The same with several weights in an element: an update in units of 2^-24, from the float32 model."""

    def __init__(self, model: NDArray[np.float32], count: int, members: int = MEMBERS) -> None:
        self.count, self.start = count, codec.encode(model * np.float32(0.99))
        shift = {2: 16, 3: 22, 4: 27}[count]
        self.spans: list[packing.Span] = [(slice(0, model.size), shift)]
        super().__init__(model, members)

    @property
    def length(self) -> int:
        return packing.elements(self.model.size, self.count)

    def encoded(self, members: int, out: Vector | None = None) -> Vector:
        return packing.pack_update(self.model, self.start, 1 / members, self.spans, self.count, out)

    def server(self) -> object:
        self.full._stage = "unmask"
        return packing.unpack_onto(self.start, self.full.finish(), self.spans, self.count)


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
