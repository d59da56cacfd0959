"""How long the mark stays halved once members found it too strong (docs/secagg.md, "Strength").

Members whose update hides less than the mark shows sign that, and the mark of that state is halved. That costs a try,
and all that was trained in it. Where one member's updates are far larger than the others', each state would cost such
tries, since the mark follows the public update. So later states keep the halvings: the mark of a state is halved
`halvings` times before anybody asks. After `wait` accepted rounds without another complaint one of them is taken back,
and with each complaint the wait is twice as long.
"""

from __future__ import annotations

from dataclasses import dataclass

from quorumark.checks import is_count

__all__ = ["Caution"]

_MOST = 6  # halvings: a 64th of the mark
_FIRST, _LONGEST = 2, 32  # accepted rounds to wait


@dataclass(frozen=True)
class Caution:
    """`left` is what is left of the wait."""

    halvings: int = 0
    wait: int = 0
    left: int = 0

    def after(self, halved: int) -> Caution:
        """After an accepted round whose mark members had halved so many times, beyond this."""
        if halved:
            wait = min(_LONGEST, 2 * self.wait or _FIRST)
            return Caution(min(_MOST, self.halvings + halved), wait, wait)
        if self.left > 1:
            return Caution(self.halvings, self.wait, self.left - 1)
        return Caution(self.halvings - 1, self.wait, self.wait) if self.halvings > 1 else Caution()

    def as_list(self) -> list[int]:
        return [self.halvings, self.wait, self.left]

    @property
    def is_possible(self) -> bool:
        """Whether a state may hold this."""
        if not all(map(is_count, self.as_list())):
            return False
        none = self.halvings == 0
        return self == Caution() if none else self.halvings <= _MOST and 0 < self.left <= self.wait <= _LONGEST
