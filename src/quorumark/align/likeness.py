"""Whether a match is more than a random model would give (docs/alignment.md, "Doubt").

Alignment finds an order for any suspect, and a random model is then more like the anchor than before: the best of many
orders was chosen. Of N weights in M orders, the best has a similarity of at most about √(2·ln M) deviations of one, and
one has the deviation ‖a‖·‖s‖/√N. So a group of channels is *like the anchor's* if what its tensors have in common with
the anchor's is above that, with all orders and signs counted that groups on these tensors can have. Where all groups of
a tensor are, its order is known, and it is like the anchor's above six deviations; or, if it can be permuted in ways
that no group covers, if its cosine with the anchor's is above one half, as a part of it may be in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import factorial

from quorumark.align.groups import Axis
from quorumark.align.placement import Placement

__all__ = ["NOT_JUDGED", "Common", "Likeness", "likeness"]

_KNOWN_ORDER = 36  # the square of six deviations
_BITS_TO_SQUARE = 1387  # 2·ln 2, in thousandths: M = 2^bits orders reach √(2·ln 2·bits) deviations


@dataclass(frozen=True)
class Common:
    """What a tensor of the suspect has in common with the anchor's: ⟨a, s⟩, ‖a‖², ‖s‖², and N weights."""

    product: int
    ours: int
    theirs: int
    weights: int


@dataclass(frozen=True)
class Likeness:
    """How many groups are like the anchor's, of those that can be judged; how many weights, of those compared."""

    groups: int
    judged: int
    weights: int
    compared: int


NOT_JUDGED = Likeness(0, 0, 0, 0)


def likeness(
    at: Placement,
    common: Mapping[str, Common],
    mixed: Iterable[str],
    turned: Mapping[str, int],
    open_axes: Sequence[Axis],
) -> Likeness:
    """Judges all groups but by `mixed` tensors, whose weights are compared in another way.

    `turned` has the bits of freedom that a rotation of the stream had, for each of its tensors; `open_axes` can be
    permuted in ways that no group covers.
    """
    left_out = set(mixed)
    on: dict[str, set[int]] = {}
    for (tensor, _), numbers in at.touching.items():
        on.setdefault(tensor, set()).update(numbers)
    parts = {tensor for tensor, _ in open_axes}
    judged: dict[int, bool] = {}
    for number in range(len(at.groups)):
        tensors = sorted({tensor for tensor, _ in at.compared(number)} - left_out)
        if tensors:
            moving = set().union(*(on[tensor] for tensor in tensors))
            bits = sum(_bits(at, n) for n in moving) + max(turned.get(tensor, 0) for tensor in tensors)
            product = sum(common[tensor].product for tensor in tensors)
            noise = sum(c.ours * c.theirs // c.weights for c in (common[tensor] for tensor in tensors))
            judged[number] = product > 0 and 1000 * product**2 > _BITS_TO_SQUARE * bits * noise
    compared = [tensor for tensor in common if tensor not in left_out and on.get(tensor, set()) & judged.keys()]
    like = [t for t in compared if all(judged.get(n, True) for n in on[t]) and _is_above_noise(common[t], t in parts)]
    sizes = (sum(common[tensor].weights for tensor in some) for some in (like, compared))
    return Likeness(sum(judged.values()), len(judged), *sizes)


def _is_above_noise(common: Common, in_parts: bool) -> bool:
    """Whether a tensor whose order is known is like the anchor's; or known only in parts."""
    square, both = common.product**2, common.ours * common.theirs
    return common.product > 0 and (4 * square > both if in_parts else square * common.weights > _KNOWN_ORDER * both)


def _bits(at: Placement, number: int) -> int:
    """log₂ of how many orders and signs the elements of a group can have, rounded up."""
    group = at.groups[number]
    return factorial(max(group.size, at.sizes[number])).bit_length() + len(group.signs) * group.size + len(group.turns)
