"""What a member adds for the mark, and what it refuses (docs/strength.md)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark import field, shamir
from quorumark.consortium.hiding import exposed
from quorumark.consortium.records import Genesis, Manifest
from quorumark.consortium.strength import ONE, Strength
from quorumark.errors import InputError, RoundError
from quorumark.field import P, Vector
from quorumark.packing import BITS, Span, elements
from quorumark.round.amplitudes import Amplitudes
from quorumark.round.movement import checked_model, distance

__all__ = [
    "Packed",
    "TooStrongError",
    "check_round",
    "check_size",
    "check_weights",
    "ideal_mark",
    "marked_vector",
    "may_mark",
    "weight_of",
    "weights",
]

_PIECE = 1 << 15  # elements of a share that are worked on at once: what a chunk of its file holds


def weights(manifest: Manifest, members: Iterable[int]) -> dict[int, Fraction]:
    """a_k = n_k/Σ_U n, by the manifest's numbers of examples. `float` of it, rounded once, is what the codec takes."""
    counts = {x: manifest.terms.member(x).examples for x in sorted(members)}
    total = sum(counts.values())
    return {x: Fraction(n, total) for x, n in counts.items()}


def weight_of(manifest: Manifest, members: Iterable[int], point: int) -> Fraction:
    """The same for one member."""
    return Fraction(manifest.terms.member(point).examples, sum(manifest.terms.member(x).examples for x in members))


def marked_vector(
    y: Vector,
    amplitudes: Amplitudes,
    manifest: Manifest,
    members: Sequence[int],
    point: int,
    share: Iterable[Vector],
    packed: Packed | None = None,
) -> None:
    """Adds S ⊙ σ ⊙ λ_k·s_k to a member's encoded, weighted model, in place; over all of U that is S ⊙ σ ⊙ τ_raw.

    With `packed`, y is a packed update, and S must be in its units (`MarkState.in_units`). `share` gives the member's
    share piece by piece (`ShareFile.pieces()`); what follows the key in it is not read.
    Nobody may see y before it is masked; after an error, throw it away.
    """
    terms = manifest.terms
    if point not in members or len(members) < terms.threshold:
        raise RoundError(
            f"a share of member {point} may enter only among {terms.threshold} members or more, with it",
            code="round.too-few",
        )
    factor = shamir.lagrange(sorted(members))[sorted(members).index(point)]
    _add_mark(y, amplitudes, manifest.genesis, factor, _joined(share), packed)


def _joined(pieces: Iterable[Vector]) -> Iterator[Vector]:
    """The same elements in larger pieces: a share comes in blocks of a thousand, each of which costs as much again."""
    held: list[Vector] = []
    for piece in pieces:
        held.append(piece)
        if sum(map(len, held)) >= _PIECE:
            yield held[0] if len(held) == 1 else np.concatenate(held)
            held = []
    if held:
        yield np.concatenate(held)


def ideal_mark(
    y: Vector,
    amplitudes: Amplitudes,
    key: NDArray[np.int64],
    genesis: Genesis | None = None,
    packed: Packed | None = None,
) -> None:
    """What all members' parts add up to, for those who may hold a key: adds S ⊙ σ ⊙ key (S ⊙ key without a genesis)."""
    parts = (field.from_signed(key[part]) for part in field.chunks(key.size, 1 << 18))
    _add_mark(y, amplitudes, genesis, 1, parts, packed)


@dataclass(frozen=True)
class Packed:
    """Where the weights of a packed update are: how many are in an element, and each tensor's place and shift."""

    count: int
    spans: Sequence[Span]

    def pieces(self, size: int) -> Iterator[tuple[int, int, int, int]]:
        """For the places start … stop−1 of a vector of this size: the first one's element, and what one of 2^-40 there
        is in that element, 2^(i·h)/2^shift. What is marked is in whole units, so this is exact."""
        length, bits = elements(size, self.count), BITS[self.count]
        for place, shift in self.spans:
            start = place.start
            while start < place.stop:
                row = start // length
                stop = min(place.stop, (row + 1) * length)
                yield start, stop, start - row * length, pow(2, (row * bits - shift) % 61, P)  # 2^61 = 1 mod p
                start = stop


def _add_mark(
    y: Vector,
    amplitudes: Amplitudes,
    genesis: Genesis | None,
    factor: int,
    values: Iterable[Vector],
    packed: Packed | None = None,
) -> None:
    """y += factor·S ⊙ σ ⊙ values on the carrying coordinates; σ is all ones without a genesis."""
    layout, scales = amplitudes.layout, amplitudes.vector
    packed = packed or Packed(1, [(slice(0, layout.size), 0)])
    field.check_output(y, (elements(layout.size, packed.count),))
    field.check(y, "y")
    carrying, total, start = layout.carrying(), layout.coordinates, 0
    pieces = [piece for piece in packed.pieces(layout.size) if piece[0] < layout.carrier_size]
    signs = np.zeros(0, np.bool_)
    for piece in values:
        if start == total:
            break
        stop = min(start + piece.size, total)
        if genesis is not None:
            signs = genesis.whitening(start, stop - start)
        for first, last, at, times in pieces:  # as coordinates: those of them that carry
            a, b = (first, last) if isinstance(carrying, slice) else np.searchsorted(carrying, (first, last))
            a, b = max(int(a), start), min(int(b), stop)
            if a >= b:
                continue
            told = scales[a:b], piece[a - start : b - start], signs[a - start : b - start]
            if isinstance(carrying, slice):
                field.add_products(factor * times % P, *told, y[a - first + at : b - first + at])
            else:
                where = carrying[a:b] - first + at
                here = y[where]
                field.add_products(factor * times % P, *told, here)
                y[where] = here
        start = stop
    if start != total:
        raise InputError("share", f"must have {total} elements or more", start)


def check_round(
    strength: Strength,
    manifest: Manifest,
    amplitudes: Amplitudes,
    members: Sequence[int],
    before: Vector,
    after: Vector,
    *,
    told_weights: Mapping[int, Fraction] | None = None,
    told_rate: Fraction | None = None,
) -> bool:
    """Whether a member embeds in this round; a RoundError if it must not take part in it at all.

    `before` and `after` are E of the global model and of the member's own result; `told_weights` and `told_rate` what
    the server said, if it did.
    """
    told = {"told_weights": told_weights, "told_rate": told_rate}
    if not may_mark(strength, manifest, amplitudes, members, **told):  # type: ignore[arg-type]
        return False
    layout = amplitudes.layout
    check_size(strength, amplitudes, checked_model("before", before, layout), checked_model("after", after, layout))
    return True


def may_mark(
    strength: Strength,
    manifest: Manifest,
    amplitudes: Amplitudes,
    members: Sequence[int],
    *,
    told_weights: Mapping[int, Fraction] | None = None,
    told_rate: Fraction | None = None,
) -> bool:
    """The same, but for the size of the mark beside the member's own update."""
    terms, layout, round_no = manifest.terms, amplitudes.layout, amplitudes.round
    if (layout.digest(), layout.coordinates, amplitudes.key) != (terms.layout, terms.coordinates, terms.key):
        raise RoundError("the model's layout or kind of key is not the manifest's", code="round.not-agreed")
    if strength != terms.strength:
        raise RoundError("the strength is not the manifest's", code="round.not-agreed")
    if len(set(members)) != len(members) or not all(x in range(1, terms.members + 1) for x in members):
        raise RoundError(
            f"the members of a round must be of the roster, each once, but are {list(members)}",
            code="round.wrong-members",
        )
    if told_weights is not None and dict(told_weights) != weights(manifest, members):
        raise RoundError(
            f"the weights of round {round_no} are not those of the manifest's numbers of examples",
            code="round.not-agreed",
        )
    if told_rate is not None and told_rate != strength.rate(round_no):
        raise RoundError(
            f"the learning rate of round {round_no} is not the manifest's: {told_rate} of the first one's",
            code="round.not-agreed",
        )
    check_weights(manifest, members)
    if len(members) < terms.threshold:
        if strength.below_threshold == "refuse":
            raise RoundError(
                f"round {round_no} has {len(members)} members, and the mark needs {terms.threshold}",
                code="round.too-few",
            )
        return False
    return amplitudes.marks


def check_weights(manifest: Manifest, members: Sequence[int]) -> None:
    """Whether the weights hide a member among the others, with or without a mark (`quorumark.consortium.hiding`)."""
    problem = exposed(manifest.terms, members)
    if problem:
        raise RoundError(f"the members' weights hide too little: {problem}", code="round.hides-too-little")


class TooStrongError(RoundError):
    """The mark of a round is more than a member's own update hides."""


def check_size(
    strength: Strength,
    amplitudes: Amplitudes,
    before: Vector,
    after: NDArray[Any],
    updates: Mapping[str, int] | None = None,
) -> None:
    """The mark of a carrier is at most 4·c_max times the member's own update of it; `paper`: of all of them. `updates`
    are ‖after − before‖² of the carriers, where they are known (`movement.distances`)."""
    places = {spec.name: place for spec, place in amplitudes.layout.spans("carrier")}
    marks, own = {}, {}
    for (name, part), squares in zip(amplitudes.tensors(), amplitudes.squares, strict=True):
        place = places[name]
        # of a tensor of which n weights in N are sampled, the mark stands for one that is N/n as large
        marks[name] = squares * (place.stop - place.start) // max(1, part.stop - part.start)
        own[name] = distance(after[place], before[place]) if updates is None else updates[name]
    if strength.rule == "paper":
        marks, own = {"the model": sum(marks.values())}, {"the model": sum(own.values())}
    for name, mark_squared in marks.items():
        if mark_squared * ONE**2 > (4 * strength.c_max) ** 2 * own[name]:
            raise TooStrongError(
                f"the mark of round {amplitudes.round} in {name!r} is more than {4 * strength.c_max / ONE:.3g} times "
                "this member's own update of it: it would show",
                code="round.too-strong",
            )
