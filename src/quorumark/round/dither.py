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

from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark import field
from quorumark.consortium.identity import Identity
from quorumark.consortium.strength import KEY_BITS, ONE
from quorumark.field import Stream, Vector, parallel, parts
from quorumark.packing import Noise
from quorumark.round.amplitudes import Amplitudes

__all__ = ["add_dither", "dither_at", "dither_noise", "dither_stream"]

_FINE = 34  # bits of u_1
_PIECE = 1 << 15  # coordinates at a time: what is computed of them stays in the cache
_SMALLEST = 1 << 17  # coordinates for a thread: AES takes about 1 ns for each


def dither_stream(identity: Identity, state: bytes) -> Stream:
    """What a member's noise is made from: nobody else can compute it, and a state always gives the same."""
    return Stream(identity.to_secret_bytes(), "dither", state)


def add_dither(y: Vector, amplitudes: Amplitudes, kappa: int, weight: Fraction, stream: Stream) -> None:
    """Adds a member's noise to its encoded, weighted model, in place. κ is in 2^-32, `weight` is its a_k."""
    field.check_output(y, (amplitudes.layout.size,))
    carrying, make = amplitudes.layout.carrying(), _maker(amplitudes, kappa, weight, stream)

    def part(begin: int, end: int) -> None:
        noise = np.empty(min(_PIECE, end - begin), np.int64)
        for start in range(begin, end, _PIECE):
            stop = min(start + _PIECE, end)
            made = noise[: stop - start]
            if make(start, made):
                where: Any = slice(start, stop) if isinstance(carrying, slice) else carrying[start:stop]
                here = y[where]  # of a slice this is y itself
                parts.move(here, made, here)
                if not isinstance(carrying, slice):
                    y[where] = here

    parallel.spread(part, amplitudes.vector.size, smallest=_SMALLEST)


def dither_noise(amplitudes: Amplitudes, kappa: int, weight: Fraction, stream: Stream) -> Noise:
    """The same for a weighted update, before it is rounded to units and packed."""
    carrying, make = amplitudes.layout.carrying(), _maker(amplitudes, kappa, weight, stream)

    def write(place: int, out: NDArray[np.int64]) -> bool:
        if isinstance(carrying, slice):
            here = out[: max(0, carrying.stop - place)]
            if not here.size or not make(place, here):
                return False
            out[here.size :] = 0
            return True
        start, stop = np.searchsorted(carrying, (place, place + out.size))
        made = np.empty(stop - start, np.int64)
        if not made.size or not make(int(start), made):
            return False
        out[:] = 0
        out[carrying[start:stop] - place] = made
        return True

    return write


def dither_at(
    spans: Iterable[slice], amplitudes: Amplitudes, kappa: int, noise: Iterable[tuple[Fraction, Stream]]
) -> Iterator[NDArray[np.float64]]:
    """The noise that members added at some of their coordinates, over κ·S: Σ √a_k·g_k, and 0 where there was no mark.
    `noise` has the weight and the stream of each."""
    bits, makers = KEY_BITS[amplitudes.key], [_maker(amplitudes, kappa, *one) for one in noise]
    for span in spans:
        out, made = np.zeros(span.stop - span.start), np.empty(span.stop - span.start, np.int64)
        total = np.zeros_like(made)
        for make in makers:
            if make(span.start, made):
                total += made
        if total.any():
            scale = (amplitudes.vector[span] << np.uint64(bits)).astype(np.float64) * (kappa / ONE)
            np.divide(total, scale, out=out, where=scale > 0)
        yield out


def _maker(
    amplitudes: Amplitudes, kappa: int, weight: Fraction, stream: Stream
) -> Callable[[int, NDArray[np.int64]], bool]:
    """A function that writes the noise of the coordinates from one on; where there is no mark it writes nothing, and
    says so."""
    scales = amplitudes.vector
    # σ of g in units of 2^-34 is 2^33. Products of float64 are the same everywhere
    factor = kappa / ONE * sqrt(weight) * 2.0 ** (KEY_BITS[amplitudes.key] - _FINE + 1)

    def make(start: int, out: NDArray[np.int64]) -> bool:
        scale = scales[start : start + out.size]
        if not scale.any():
            return False
        words = out.view(np.uint64)
        stream.words(words, start)
        parts.dither(words, scale, factor, out)
        return True

    return make
