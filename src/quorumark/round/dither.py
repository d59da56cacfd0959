"""Noise that each member adds beside its part of the mark (docs/strength.md, "Dither").

Member k adds to its weighted model, on each carrying coordinate, noise of standard deviation κ·S·√a_k, where a_k is its
weight in the round: over all members that is κ·S beside the mark ±S. A server that knows what the members' training
did to a weight, because it did nothing, then sees the mark through this noise instead of bare.

The noise comes from a stream that only the member can compute, and that depends on the state of the run alone: a sum
that is made again has the same noise.

    e_k = round(κ·√a_k·S·g)     g = u_1 + u_2 + u_3 − 3/2, times 2; each u uniform on [0, 1), from one word of 64 bits

g has mean 0 and variance 1, and is never beyond ±3. u_1 has 34 bits, the others 15: the steps of e_k are below one unit
of fixed point for amplitudes up to 2^-8. (With coarser steps the value of a single member modulo the step would show
the sign of the mark.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from quorumark import field
from quorumark.consortium.identity import Identity
from quorumark.consortium.strength import KEY_BITS, ONE
from quorumark.field import Stream, Vector
from quorumark.field.noise import FINE, shape_noise
from quorumark.round.amplitudes import Amplitudes

__all__ = ["add_dither", "dither_at", "dither_moves", "dither_stream"]

_PIECE = 1 << 16  # coordinates at a time: what is computed of them stays in the cache


def dither_stream(identity: Identity, state: bytes) -> Stream:
    """What a member's noise is made from: nobody else can compute it, and a state always gives the same."""
    return Stream(identity.to_secret_bytes(), "dither", state)


def add_dither(y: Vector, amplitudes: Amplitudes, kappa: int, weight: Fraction, stream: Stream) -> None:
    """Adds a member's noise to its encoded, weighted model, in place. κ is in 2^-32, `weight` is its a_k."""
    field.check_output(y, (amplitudes.layout.size,))
    carrying = amplitudes.layout.carrying()
    for start, stop, noise in _pieces(amplitudes, kappa, weight, stream):
        made = field.from_signed(noise)
        if isinstance(carrying, slice):
            field.add(y[start:stop], made, out=y[start:stop], checked=False)
        else:
            where = carrying[start:stop]
            y[where] = field.add(y[where], made, checked=False)


def dither_moves(
    moves: NDArray[np.int64], amplitudes: Amplitudes, kappa: int, weight: Fraction, stream: Stream
) -> None:
    """The same for a weighted update in integers of 2^-40, before it is rounded to units and packed."""
    carrying = amplitudes.layout.carrying()
    for start, stop, noise in _pieces(amplitudes, kappa, weight, stream):
        moves[slice(start, stop) if isinstance(carrying, slice) else carrying[start:stop]] += noise


def dither_at(
    spans: Iterable[slice], amplitudes: Amplitudes, kappa: int, weight: Fraction, stream: Stream
) -> Iterator[NDArray[np.float64]]:
    """The noise that a member added at some of its coordinates, over κ·S: √a_k·g, and 0 where there was no mark."""
    bits, whole = KEY_BITS[amplitudes.key], [(span.start, span.stop) for span in spans]
    made = {start: noise for start, _, noise in _pieces(amplitudes, kappa, weight, stream, whole)}
    for start, stop in whole:
        out = np.zeros(stop - start)
        if start in made:
            scale = (amplitudes.vector[start:stop] << np.uint64(bits)).astype(np.float64) * (kappa / ONE)
            np.divide(made[start], scale, out=out, where=scale > 0)
        yield out


def _pieces(
    amplitudes: Amplitudes,
    kappa: int,
    weight: Fraction,
    stream: Stream,
    spans: Iterable[tuple[int, int]] | None = None,
) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
    """The noise of coordinates start … stop−1, where there is a mark: of all of them, or in spans of up to 2^16."""
    scales = amplitudes.vector
    # σ of g in units of 2^-34 is 2^33. Products of float64 are the same everywhere
    factor = kappa / ONE * sqrt(weight) * 2.0 ** (KEY_BITS[amplitudes.key] - FINE + 1)
    words = np.empty(min(_PIECE, scales.size), np.uint64)
    if spans is None:
        spans = ((start, min(start + _PIECE, scales.size)) for start in range(0, scales.size, _PIECE))
    for start, stop in spans:
        scale = scales[start:stop]
        if not scale.any():
            continue
        part, noise = words[: scale.size], np.empty(scale.size, np.int64)
        stream.words(part, start)
        shape_noise(part, scale, factor, noise)
        yield start, stop, noise
