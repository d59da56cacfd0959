"""`quorumark bench field`: the field's kernels against memcpy, against one thread, galois and Python ints."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from quorumark import codec, field
from quorumark.errors import InputError, MissingDependencyError
from quorumark.field import P
from quorumark.research.bench import Row, compare
from quorumark.research.bench.peers import galois_field

FULL_SIZE = 11_200_000  # ResNet-18's parameters, the size that the paper works at
QUICK_SIZE = 4_000_000  # still larger than the caches


def rows(quick: bool = False) -> Iterator[Row]:
    """All comparisons, as they are made."""
    size = QUICK_SIZE if quick else FULL_SIZE
    repeats = 5 if quick else 11
    before = field.threads()
    try:
        field.set_threads(1)
        yield from _against_memcpy(size, repeats)
        yield from _against_others(size // 10, repeats)
        if before > 1:
            yield from _against_one_thread(size // 4, before, repeats)
    finally:
        field.set_threads(before)


def _against_memcpy(size: int, repeats: int) -> Iterator[Row]:
    """One thread, on words in memory. The kernels run as the protocol's loops call them: in place where they can be,
    on vectors that were checked when they came in; "checked" rows include the check."""
    x, y, z = field.random(size), field.random(size), field.random(size)
    copy, out = np.zeros(size, np.uint64), np.zeros(size, np.uint64)
    weights = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    decoded = np.zeros(size, np.float32)
    stream = field.Stream(bytes(32), "benchmark")
    a = P // 3
    kernels: dict[str, Callable[[], object]] = {
        "add": lambda: field.add(x, y, out=y, checked=False),
        "sub": lambda: field.sub(x, y, out=y, checked=False),
        "mul": lambda: field.mul(x, y, out=y, checked=False),
        "mul, new output": lambda: field.mul(x, y, out=out, checked=False),
        "axpy": lambda: field.axpy(a, x, y, out=y, checked=False),
        "axpy, checked": lambda: field.axpy(a, x, y, out=y),
        "axpy, new output": lambda: field.axpy(a, x, y, out=out, checked=False),
        "axpy with a vector": lambda: field.axpy(z, x, y, out=y, checked=False),
        "dot": lambda: field.dot(x, y, checked=False),
        "check": lambda: field.check(x),
        "encode": lambda: codec.encode(weights, 0.2, out=out),
        "encode+axpy": lambda: codec.encode_axpy(weights, 0.2, a, x, out=out, checked=False),
        "decode": lambda: codec.decode(x, out=decoded, checked=False),
        "decode, new output": lambda: codec.decode(x, checked=False),
        "random elements": lambda: stream.elements(size, out=out),
        "mask (random elements, added)": lambda: stream.add_to(out, checked=False),
    }
    for name, kernel in kernels.items():
        yield compare(kernel, lambda: np.copyto(copy, x), name=name, against="memcpy", size=size, repeats=repeats)


def _against_others(size: int, repeats: int) -> Iterator[Row]:
    """Multiplication against a library that does the same, and against Python's own integers."""
    x, y, out = field.random(size), field.random(size), np.zeros(size, np.uint64)
    few = 20_000
    left, right = [random.randrange(P) for _ in range(few)], [random.randrange(P) for _ in range(few)]  # noqa: S311
    peers: list[tuple[str, Callable[[], object]]] = [
        ("Python ints", lambda: [a * b % P for a, b in zip(left, right, strict=True)])
    ]
    galois = galois_field()
    if galois is not None:
        gx, gy = galois(left), galois(right)
        peers.append(("galois", lambda: gx * gy))
    for peer, call in peers:
        yield compare(
            lambda: field.mul(x, y, out=out, checked=False),
            call,
            name="mul",
            against=f"{peer}, {few} elements",
            size=size,
            work=size,
            their_work=few,
            repeats=repeats,
        )


def _against_one_thread(size: int, threads: int, repeats: int) -> Iterator[Row]:
    """What all cores bring: the kernels that compute rather than wait for memory first."""
    x = field.random(size)
    squares, out = field.mul(x, x), np.zeros(size, np.uint64)
    small, wide = field.random(17 * 16).reshape(17, 16), field.random(size // 16 * 16).reshape(16, -1)
    product = np.zeros((17, wide.shape[1]), np.uint64)
    stream = field.Stream(bytes(32), "benchmark")
    kernels: dict[str, Callable[[], object]] = {
        "inverse": lambda: field.inv(x, out=out, checked=False),
        "inverse square root": lambda: field.inv_sqrt(squares, out=out, checked=False),
        "matmul 17×16×n": lambda: field.matmul(small, wide, out=product, checked=False),
        "random elements": lambda: stream.elements(size, out=out),
        "mul (waits for memory)": lambda: field.mul(x, squares, out=out, checked=False),
    }
    for name, kernel in kernels.items():
        yield compare(
            _with_threads(threads, kernel),
            _with_threads(1, kernel),
            name=name,
            against="one thread",
            size=size,
            threads=threads,
            repeats=repeats,
        )


def cuda_rows() -> Iterator[Row]:
    """The same kernels on a CUDA device, against a copy within its memory. `threads` is 1: the host's."""
    try:
        import torch
    except ImportError:
        raise MissingDependencyError("torch", "the benchmark on a GPU") from None
    if not torch.cuda.is_available():
        raise InputError("--cuda", "needs a CUDA device")
    size = 10 * FULL_SIZE  # several times the GPU's cache
    generator = torch.Generator("cuda").manual_seed(1)
    x, y = (torch.randint(1, P, (size,), dtype=torch.int64, device="cuda", generator=generator) for _ in range(2))
    copy = torch.empty_like(x)
    squares = field.mul(x, x)
    small, wide = x[: 17 * 16].reshape(17, 16), y[: FULL_SIZE // 16 * 16].reshape(16, -1)
    product = torch.empty((17, wide.shape[1]), dtype=torch.int64, device="cuda")
    kernels: dict[str, tuple[int, Callable[[], object]]] = {
        "add": (size, lambda: field.add(x, y, out=y, checked=False)),
        "mul": (size, lambda: field.mul(x, y, out=y, checked=False)),
        "axpy": (size, lambda: field.axpy(P // 3, x, y, out=y, checked=False)),
        "axpy, checked": (size, lambda: field.axpy(P // 3, x, y, out=y)),
        "dot": (size, lambda: field.dot(x, y, checked=False)),
        "inverse": (size, lambda: field.inv(x, out=y, checked=False)),
        "inverse square root": (size, lambda: field.inv_sqrt(squares, out=y, checked=False)),
        "matmul 17×16×n": (wide.shape[1], lambda: field.matmul(small, wide, out=product, checked=False)),
    }
    for name, (count, kernel) in kernels.items():
        row = compare(
            _synchronised(torch, kernel),
            _synchronised(torch, lambda: copy.copy_(x)),
            name=name,
            against="device memcpy",
            size=count,
            work=count,
            their_work=size,
            repeats=11,
        )
        yield replace(row, seconds=row.seconds / _LAUNCHES)


_LAUNCHES = 10  # per timing, and then a wait: what the device takes, not what the launch takes


def _synchronised(torch: Any, kernel: Callable[[], object]) -> Callable[[], object]:
    def call() -> None:
        for _ in range(_LAUNCHES):
            kernel()
        torch.cuda.synchronize()

    return call


def _with_threads(count: int, kernel: Callable[[], object]) -> Callable[[], object]:
    def call() -> object:
        field.set_threads(count)
        return kernel()

    return call
