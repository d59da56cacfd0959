"""A query, answered and combined by some members of a world."""

from __future__ import annotations

from quorumark.field import P


def through(points: dict[int, int], at: int) -> int:
    """Lagrange by plain integers."""
    total = 0
    for x, y in points.items():
        top, bottom = 1, 1
        for other in points:
            if other != x:
                top, bottom = top * (at - other) % P, bottom * (x - other) % P
        total += y * top * pow(bottom, -1, P)
    return total % P
