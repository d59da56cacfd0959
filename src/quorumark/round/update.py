"""A member's own update: what it trained beside the model that it started from, measured once for all that asks."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from numpy.typing import NDArray

from quorumark.field import Vector
from quorumark.model.layout import ModelLayout
from quorumark.packing import largest_moves
from quorumark.round.movement import Squares, distances, update_squares

__all__ = ["Update"]


class Update:
    """From E of the global model, `before`, to the floats `after`, which fit into fixed point.

    E of them is not kept: what must be known of it is found on the way. What is found is kept, since a member needs it
    before the round's set is fixed and again when it uploads.
    """

    def __init__(self, layout: ModelLayout, before: Vector, after: NDArray[Any]) -> None:
        self.layout, self.before, self.after = layout, before, after

    @cached_property
    def largest(self) -> list[int]:
        """The largest move of each tensor, in 2^-40: what the level of its units follows from."""
        return largest_moves(self.after, self.before, [place for _, place in self.layout.spans()])

    @cached_property
    def squares(self) -> Squares:
        """‖D‖² of the carriers' rows, columns and taps."""
        return update_squares(self.layout, self.before, self.after)

    @property
    def distances(self) -> dict[str, int]:
        """‖D‖² of each carrier by name: what the mark is compared with."""
        return distances(self.layout, self.squares)
