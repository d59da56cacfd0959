"""What training leaves of the mark, measured by the members' own noise (docs/strength.md, "Survival").

To training a mark is an error like any other, and it may take some of it back. The members' dither goes into the same
sums, at the same weights, with the same amplitudes S, and its members know it. In round q they added κ·S⊙g_q, where
g_q = Σ_k √a_k·g_qk has mean 0 and variance 1, and whatever else moved the model since is independent of it. With θ_q
the model after round q,

    V_j = Σ_q g_qj·(θ − θ_{q−1})_j          E[V_j] = κ·A_j

where A_j is what is left in weight j of all that was embedded, whatever became of it: decay, momentum, training. So V/κ
takes the place of the amplitudes in the forecast (`forecast.rises`), and

    survival = Σ_j (∂x_j/∂θ_j)·V_j/κ  /  Σ_j (∂x_j/∂θ_j)·B_j

where B is what the forecast counts in the same rounds. **It takes it that training treats mark and noise alike**, as
honest training does, which knows neither. Members who train against the mark and leave the noise alone are not seen.

Weight by weight V is mostly noise. The sum over all of them is not: its variance is Σ_j (∂x_j/∂θ_j)²·W_j/κ², where
W_j = Σ_q (θ − θ_{q−1})_j² is the variance of V_j, and public.

V is kept as a running sum: in each round G ← G + g_q, then V ← V + (θ_q − θ_{q−1})⊙G. Where weight decay leaves a part
f of what there was, old noise is mostly chance, and counts less: G ← f·G + g_q, V ← f·V + (θ_q − θ_{q−1})⊙G, and
B ← f²·B + S, of which one f is the decay itself. One member alone counts √a_k·g_qk and a_k·S: the same ratio, with an
error 1/√a_k times as large. The server takes the median of what members tell, which fewer than half of them cannot move
beyond what the others said (`middle`).

G and V show the noise, which hides the mark: they stay with those whose noise it is. The ratio may be told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from io import BytesIO
from math import isfinite, pi, prod, sqrt
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark import codec
from quorumark.checks import DAMAGED
from quorumark.consortium.strength import KEY_BITS, ONE
from quorumark.field import Stream, Vector
from quorumark.round.amplitudes import Amplitudes, MarkState
from quorumark.round.dither import dither_at
from quorumark.round.forecast import rises

__all__ = ["ENOUGH", "LARGEST", "Step", "Survival", "Tracer", "middle", "traced_spans"]

MOST = 1 << 20  # coordinates that are traced
_BLOCK = 1 << 12  # which are whole blocks of so many
ENOUGH = 0.25  # a forecast is corrected by a survival whose standard error is at most this
LARGEST = 1.0  # one member tells a survival up to this error: of many of them the median is better

_KEPT = ("noise", "along", "mark", "times", "far", "square")
_MEDIAN = sqrt(pi / 2)  # the error of a median, over that of a mean


def traced_spans(coordinates: int) -> list[slice]:
    """Of up to 2^20 coordinates all; of more every n-th block of 4096, the same for everybody. With a part p of them
    the error is 1/√p times as large."""
    if coordinates <= MOST:
        return [slice(0, coordinates)]
    step = -(-coordinates // MOST) * _BLOCK
    return [slice(start, min(start + _BLOCK, coordinates)) for start in range(0, coordinates, step)]


@dataclass(frozen=True)
class Survival:
    """The part of the mark that training left, and its standard error."""

    part: float
    error: float

    @classmethod
    def said(cls, part: object, error: object) -> Survival | None:
        """What a member tells, if it can be one: it may tell anything."""
        numbers = [float(n) for n in (part, error) if isinstance(n, int | float) and isfinite(n)]
        if len(numbers) != 2 or not 0 < numbers[1] <= LARGEST:
            return None
        return cls(*numbers)

    @property
    def likely(self) -> float:
        """What to count on: chance moves a measured part away from 1, by about its error, so that much of it is taken
        off: 1 + (part − 1)·(1 − error²/(part − 1)²), and 1 where the error explains all of it."""
        off = self.part - 1
        return max(0.0, 1 + off * (1 - (self.error / off) ** 2)) if abs(off) > self.error else 1.0


def middle(told: Sequence[Survival]) -> Survival | None:
    """The median of what members tell, with its error by the median of theirs; None if nobody tells."""
    if not told:
        return None
    part, error = median(each.part for each in told), median(each.error for each in told)
    loss = _MEDIAN if len(told) > 1 else 1.0
    return Survival(round(part, 2) + 0.0, max(0.01, round(loss * error / sqrt(len(told)), 2)))


class Step:
    """What `Tracer.follow` must know of the state before a round: taken before it is accepted."""

    def __init__(self, state: MarkState) -> None:
        self.model, self.round, self.chain = state.model, state.round, state.chain
        self.embedded = state.embedded() if state.applied is not None else None
        self.momentum = _momentum(state)


class Tracer:
    """The noise of one member, or of several, in a model, as far as it was followed. Secret: it shows the noise."""

    def __init__(self, coordinates: int, kappa: int) -> None:
        self._coordinates, self._kappa = coordinates, kappa
        self._spans = traced_spans(coordinates)
        self._size = sum(span.stop - span.start for span in self._spans)
        self.forget()

    def __repr__(self) -> str:
        return f"Tracer({self._size} of {self._coordinates} coordinates, secrets hidden)"

    def forget(self) -> None:
        """From here on it is about what is embedded later."""
        self._noise, self._along, self._mark = (np.zeros(self._size, np.float32) for _ in range(3))  # G, V, B
        # for W: Σ_q a, Σ_q a·(θ − θ_{q−1}) and W itself, with the weights of those whose noise it is
        self._times, self._far, self._square = (np.zeros(self._size, np.float32) for _ in range(3))
        self._share = 0.0  # of the mark that arrives now, how much is from those whose noise this is

    @property
    def has_begun(self) -> bool:
        return bool(self._mark.any())

    def follow(
        self, step: Step, state: MarkState, noise: Iterable[tuple[Fraction, Stream]], embedded: Amplitudes | None
    ) -> None:
        """A round that is accepted: the state before and after it, its amplitudes, and the weights and streams of those
        whose noise is in its sum, as far as it is theirs to follow.

        Several rounds at once, for somebody who was not there: then no noise is in them. Under a server optimiser
        nobody can say what earlier marks came to meanwhile, and it begins anew.
        """
        if state.round != step.round + 1 and state.applied is not None:
            self.forget()
            return
        kept = prod(state.strength.kept(number) / ONE for number in range(step.round + 1, state.round + 1))
        self._noise *= kept
        for vector in (self._mark, self._times, self._far, self._square):
            vector *= kept**2
        own, amplitudes = 0.0, np.zeros(0)
        if embedded is not None:
            known = list(noise)
            own = sum(float(weight) for weight, _ in known)
            if known:
                self._noise += np.concatenate(list(dither_at(self._spans, embedded, self._kappa, known)))
            amplitudes = self._here(embedded.vector.astype(np.float64))
            self._times += np.float32(own) * (amplitudes > 0)
        spot = state.layout.carrying()
        moved = self._here(_decoded(state.model[spot])) - self._here(_decoded(step.model[spot]))
        self._along *= kept
        self._along += moved * self._noise
        self._square += 2 * moved * self._far + moved**2 * self._times
        self._far += moved * self._times
        if step.embedded is not None:  # marks of earlier rounds may still arrive, with the shares of those rounds
            new = _momentum(state)
            earlier = min(1.0, _beta(state) * step.momentum / new) if new else 0.0
            self._share = earlier * self._share + (1 - earlier) * own
            self._mark += self._here(state.embedded() - kept * step.embedded) * self._share
        elif embedded is not None:
            self._mark += amplitudes * (2.0 ** (KEY_BITS[embedded.key] - codec.FRACTION_BITS) * own)

    def to_bytes(self, state: MarkState) -> bytes:
        """With what it has followed the run to. Secret: it is kept by its member alone, sealed or with mode 0600."""
        body = BytesIO()
        vectors: dict[str, Any] = {name: getattr(self, f"_{name}") for name in _KEPT}
        chain = np.frombuffer(state.chain, np.uint8)
        np.savez(body, share=self._share, kappa=self._kappa, chain=chain, **vectors)
        return body.getvalue()

    def restore(self, data: bytes, chain: bytes) -> bool:
        """Goes on from such bytes, if they have followed the run to the state with this chain; otherwise it stays as it
        is, and says so."""
        try:
            with np.load(BytesIO(data), allow_pickle=False) as file:
                read = {name: file[name] for name in (*_KEPT, "share", "kappa", "chain")}
        except (OSError, KeyError, *DAMAGED):
            return False
        vectors = [read[name] for name in _KEPT]
        shape = self._noise.shape
        fits = all(v.shape == shape and v.dtype == np.float32 and np.isfinite(v).all() for v in vectors)
        same = (read["kappa"].tolist(), read["chain"].tobytes()) == (self._kappa, chain)
        if not fits or not same or read["share"].shape != ():
            return False
        for name, vector in zip(_KEPT, vectors, strict=True):
            setattr(self, f"_{name}", vector)
        self._share = float(read["share"])
        return True

    def survival(self, state: MarkState, statistic: str) -> Survival | None:
        """In the present model; None as long as it could be anything. Two digits: nobody needs more."""
        spot, spread = state.layout.carrying(), np.sqrt(np.maximum(self._square, 0))
        moved = self._here(_decoded(state.model[spot]) - _decoded(state.anchor[spot]))
        size = (
            float(np.linalg.norm(moved)) / 10
        )  # as far as a mark of ρ = 0.1 goes: x is rounded, and cut where it is large
        expected = float(self._risen(state, statistic, self._mark, size).sum()) * self._kappa / ONE
        if expected <= 0:
            return None
        # tried with the size that V may have, and not with V: a step that chance made long is cut where others are not
        risen = self._risen(state, statistic, spread, size)
        found = risen @ np.divide(self._along, spread, out=np.zeros(self._size), where=spread > 0)
        part, error = float(found) / expected, float(np.linalg.norm(risen)) / expected
        return Survival(round(part, 2) + 0.0, max(0.01, round(error, 2))) if error <= LARGEST else None

    def _risen(self, state: MarkState, statistic: str, values: NDArray[np.float32], size: float) -> NDArray[np.float64]:
        """(∂x_j/∂θ_j)·values_j, by steps whose norm is `size`."""
        norm, at = float(np.linalg.norm(values)), 0
        if not norm or not size:
            return np.zeros(self._size)
        steps = np.zeros(self._coordinates)
        for span in self._spans:
            length = span.stop - span.start
            steps[span] = values[at : at + length].astype(np.float64) * (size / norm)
            at += length
        return self._here(rises(state, statistic, steps)) * (norm / size)

    def _here(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.concatenate([values[span] for span in self._spans])


def _momentum(state: MarkState) -> float:
    """‖M‖, what earlier marks left in a server optimiser's momentum."""
    return 0.0 if state.applied is None else float(np.linalg.norm(state.applied.mark.astype(np.float64)))


def _beta(state: MarkState) -> float:
    return 0.0 if state.applied is None else state.applied.state.beta(1) / ONE


def _decoded(vector: Vector) -> NDArray[np.float64]:
    return np.asarray(codec.decode(vector, np.float64), np.float64)
