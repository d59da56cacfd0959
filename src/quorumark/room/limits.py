"""How often somebody may ask: a bucket for each caller, which fills at a steady rate."""

from __future__ import annotations

import time

from quorumark.errors import RoomError

__all__ = ["Buckets"]

_MOST = 100_000  # callers that are remembered


class Buckets:
    """`rate` requests a second, and `burst` at once, for each caller."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, caller: str, now: float | None = None) -> None:
        """One request; a RoomError if the caller's bucket is empty."""
        now = time.monotonic() if now is None else now
        left, before = self._left.get(caller, (self._burst, now))
        left = min(self._burst, left + (now - before) * self._rate)
        if left < 1:
            raise RoomError("too many requests: wait a little, and try again", code="room.too-many")
        if len(self._left) >= _MOST:
            self._left.clear()  # everybody begins with a full bucket: that is bounded by the number of callers
        self._left[caller] = left - 1, now
