"""Tensors that are 0 whatever the weights are, like the state in which a recurrent network begins.

Nothing follows for the weights that such a tensor meets: what is multiplied by it may be permuted in any way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quorumark.align.trace import operations

__all__ = ["KnownZeros"]

_KEEP = operations.MOVES | operations.VIEWS | operations.SAME | operations.PRODUCTS | {"mm", "bmm"}


class KnownZeros:
    """Follows tensors that are 0. They are kept alive, so that no other object gets the same id."""

    def __init__(self) -> None:
        self._zeros: set[int] = set()
        self.kept_alive: list[Any] = []

    def is_zero(self, tensor: Any) -> bool:
        return id(tensor) in self._zeros

    def are_zero(self, out: Any) -> None:
        for tensor in out if isinstance(out, (list, tuple)) else [out]:
            self._zeros.add(id(tensor))
            self.kept_alive.append(tensor)

    def follow_zeros(self, name: str, tensors: Sequence[Any], out: Any, *, were: bool) -> None:
        """After an operation: whether its result is 0, or what was 0 has been written to."""
        if were or name in operations.ZEROS:
            self.are_zero(out)
        elif name.endswith("_") and tensors and self._zeros:
            memory = tensors[0].untyped_storage().data_ptr()
            self._zeros -= {id(x) for x in self.kept_alive if x.untyped_storage().data_ptr() == memory}

    def stays_zero(self, name: str, tensors: Sequence[Any]) -> bool:
        """Whether the result of an operation is 0 because operands are."""
        if name in _KEEP:
            operands = tensors[:1] if name in operations.MOVES or "div" in name else tensors[:2]
            return any(map(self.is_zero, operands))
        return bool(tensors) and name in {"cat", "stack"} | operations.SUMS and all(map(self.is_zero, tensors))
