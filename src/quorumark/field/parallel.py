"""Spreads a kernel over all cores: the kernels release the GIL, so plain threads are enough.

One pool per process, made when first needed, forgotten in a forked child (a fork copies no threads).
The thread count changes speed only, never a result.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from quorumark.errors import InputError

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

# Handing a part to another thread costs about 60 µs. These are the parts below which it does not pay:
SMALLEST_PART = 1 << 18  # elements that are only moved or added, at about 0.5 ns each
SMALLEST_WORK = 1 << 19  # multiplications, at about 0.4 ns each


def _available_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_pool_size = 0
_threads = _available_cores()
_inside = threading.local()


def _forget_pool() -> None:
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def threads() -> int:
    """How many threads the field's functions use: at first, the cores of this process."""
    return _threads


def set_threads(count: int) -> None:
    """Use `count` threads from now on, in this process."""
    global _threads
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise InputError("count", "must be an integer, at least 1", repr(count))
    _threads = count


def _shared_pool() -> ThreadPoolExecutor:
    """A pool of at least as many threads as are in use; a smaller one is let go, and ends when nobody uses it."""
    global _pool, _pool_size
    with _lock:
        if _pool is None or _pool_size < _threads:
            _pool, _pool_size = ThreadPoolExecutor(_threads, thread_name_prefix="quorumark-field"), _threads
        return _pool


def _run_part(work: Callable[[int, int], object], start: int, stop: int) -> object:
    _inside.worker = True  # a kernel called from a part runs in that part's thread: no deadlock on a full pool
    try:
        return work(start, stop)
    finally:
        _inside.worker = False


def spread(
    work: Callable[[int, int], object], length: int, *, smallest: int = SMALLEST_PART, step: int = 8
) -> list[object]:
    """Calls work(start, stop) for parts that cover [0, length), at multiples of `step`; returns what they return."""
    parts = min(_threads, max(1, length // smallest))
    if parts == 1 or getattr(_inside, "worker", False):
        return [work(0, length)]
    size = -(-length // parts)
    size += -size % step
    bounds = [(start, min(start + size, length)) for start in range(0, length, size)]
    pool, futures = _shared_pool(), []
    try:
        for start, stop in bounds[1:]:
            futures.append(pool.submit(_run_part, work, start, stop))
        first = work(*bounds[0])
    finally:
        # also after an error: no part may still be writing when the caller sees it
        wait(futures)
    return [first, *(future.result() for future in futures)]


def each(work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """work(item) for every item, several at a time."""
    done = spread(lambda start, stop: [work(item) for item in items[start:stop]], len(items), smallest=1, step=1)
    return [result for part in done for result in part]  # type: ignore[attr-defined]


def ahead(items: Iterable[_Item]) -> Iterator[_Item]:
    """The items, each of them made in another thread while the one before is worked on."""
    if _threads == 1 or getattr(_inside, "worker", False):
        yield from items
        return
    end = object()
    source = iter(items)
    with ThreadPoolExecutor(1, thread_name_prefix="quorumark-ahead") as maker:
        following = maker.submit(next, source, end)
        while (item := following.result()) is not end:
            following = maker.submit(next, source, end)
            yield item  # type: ignore[misc]
