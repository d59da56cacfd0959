"""What training leaves of the mark, measured by the members' own noise (docs/strength.md, "Survival").

To training a mark is an error like any other, and it may take some of it back. The public state does not show that, but
the members' dither does: it goes into the same sums, at the same weights, with the same amplitudes S, and its members
know it. In round q they added κ·S⊙g_q, where g_q = Σ_k √a_k·g_qk has mean 0 and variance 1, and whatever else moved the
model since is independent of it. With θ_q the model after round q,

    V_j = Σ_q g_qj·(θ − θ_{q−1})_j          E[V_j] = κ·A_j

where A_j is what is left in weight j of all that was embedded, whatever became of it: decay, momentum, training. So V/κ
takes the place of the amplitudes in the forecast (`forecast.rises`), and

    survival = Σ_j (∂x_j/∂θ_j)·V_j/κ  /  Σ_j (∂x_j/∂θ_j)·B_j

where B is what the forecast counts in the same rounds. Weight by weight V is mostly noise. The sum over all of them is
not: its variance is Σ_j (∂x_j/∂θ_j)²·V_j²/(κ·‖x‖)² in z, less than Q/κ² after Q marked rounds.

V is kept as a running sum: in each round G ← G + g_q, then V ← V + (θ_q − θ_{q−1})⊙G. Where weight decay leaves a part
f of what there was, old noise is mostly chance, and counts less: G ← f·G + g_q, V ← f·V + (θ_q − θ_{q−1})⊙G, and
B ← f²·B + S, of which one f is the decay itself. One member alone counts √a_k·g_qk and a_k·S: the same ratio, with an
error 1/√a_k times as large.

G and V show the noise, which hides the mark: they stay with those whose noise it is. The ratio may be told.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from io import BytesIO
from math import sqrt
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quorumark import codec
from quorumark.checks import DAMAGED
from quorumark.consortium.strength import KEY_BITS, ONE
from quorumark.field import Stream, Vector
from quorumark.files import write_private
from quorumark.round.amplitudes import Amplitudes, MarkState
from quorumark.round.dither import dither_at
from quorumark.round.forecast import rises

__all__ = ["Step", "Survival", "Tracer", "traced_spans"]

MOST = 1 << 20  # coordinates that are traced
_BLOCK = 1 << 12  # which are whole blocks of so many
ENOUGH = 0.25  # survival is told once its standard error is below this


def traced_spans(coordinates: int) -> list[slice]:
    """Of up to 2^20 coordinates all; of more every n-th block of 4096, the same for everybody. With a part p of them
    the error is 1/√p times as large."""
    step = -(-coordinates // MOST) * _BLOCK
    return [slice(start, min(start + _BLOCK, coordinates)) for start in range(0, coordinates, step)]


@dataclass(frozen=True)
class Survival:
    """The part of the mark that training left, and its standard error."""

    part: float
    error: float

    @property
    def is_loss(self) -> bool:
        """Whether chance does not explain that it is below 1: two standard errors."""
        return self.part + 2 * self.error < 1


class Step:
    """What `Tracer.follow` must know of the state before a round: taken before it is accepted."""

    def __init__(self, state: MarkState) -> None:
        self.model = state.model
        self.embedded = state.embedded() if state.applied is not None else None


class Tracer:
    """The noise of one member, or of several, in a model, as far as it was followed. Secret: it shows the noise."""

    def __init__(self, coordinates: int, kappa: int) -> None:
        self._coordinates, self._kappa = coordinates, kappa
        self._spans = traced_spans(coordinates)
        size = sum(span.stop - span.start for span in self._spans)
        self._noise, self._along, self._mark = (np.zeros(size, np.float32) for _ in range(3))  # G, V, B
        self._share = 0.0  # Σ a_k of the last marked round

    def __repr__(self) -> str:
        return f"Tracer({self._noise.size} of {self._coordinates} coordinates, secrets hidden)"

    def follow(
        self, step: Step, state: MarkState, noise: Iterable[tuple[Fraction, Stream]], embedded: Amplitudes | None
    ) -> None:
        """A round that is accepted: the state before and after it, its amplitudes, and the weights and streams of those
        whose noise is in its sum, as far as it is theirs to follow."""
        spot, kept = state.layout.carrying(), state.strength.kept(state.round) / ONE
        self._noise *= kept
        if embedded is not None:
            self._share = 0.0
            for weight, stream in noise:
                self._share += float(weight)
                self._noise += np.concatenate(list(dither_at(self._spans, embedded, self._kappa, weight, stream)))
        self._along *= kept
        self._along += (self._here(_decoded(state.model[spot])) - self._here(_decoded(step.model[spot]))) * self._noise
        self._mark *= kept**2
        if step.embedded is not None:  # under a server optimiser marks of earlier rounds may still arrive
            self._mark += self._here(state.embedded() - kept * step.embedded) * self._share
        elif embedded is not None:
            scale = 2.0 ** (KEY_BITS[embedded.key] - codec.FRACTION_BITS)
            self._mark += self._here(embedded.vector.astype(np.float64)) * (scale * self._share)

    def save(self, path: Path, state: MarkState) -> None:
        """With what it has followed the run to; mode 0600."""
        body = BytesIO()
        chain = np.frombuffer(state.chain, np.uint8)
        np.savez(body, noise=self._noise, along=self._along, mark=self._mark, share=self._share, chain=chain)
        write_private(path, body.getvalue())

    def restore(self, path: Path, state: MarkState) -> None:
        """Goes on from such a file, if there is one that has followed the run to this state; otherwise from nothing:
        then it is about what is embedded from now on."""
        try:
            with np.load(BytesIO(path.read_bytes()), allow_pickle=False) as file:
                read = {name: file[name] for name in ("noise", "along", "mark", "share", "chain")}
        except (OSError, KeyError, *DAMAGED):
            return
        vectors = [read[name] for name in ("noise", "along", "mark")]
        fits = all(v.shape == self._noise.shape and v.dtype == np.float32 and np.isfinite(v).all() for v in vectors)
        if fits and read["share"].shape == () and read["chain"].tobytes() == state.chain:
            self._noise, self._along, self._mark = vectors
            self._share = float(read["share"])

    def survival(self, state: MarkState, statistic: str) -> Survival | None:
        """In the present model; None as long as it could be anything. Two digits: nobody needs more."""
        spot = state.layout.carrying()
        moved = self._here(_decoded(state.model[spot]) - _decoded(state.anchor[spot]))
        # as far as a mark of ρ = 0.1 goes: x is rounded, and depends on the step where it is cut
        size = float(np.linalg.norm(moved)) / 10
        (expected, _), (found, squares) = (self._risen(state, statistic, v, size) for v in (self._mark, self._along))
        if expected <= 0:
            return None
        kappa = self._kappa / ONE
        part, error = found / kappa / expected, sqrt(squares) / kappa / expected
        return Survival(round(part, 2) + 0.0, max(0.01, round(error, 2))) if error <= ENOUGH else None

    def _risen(self, state: MarkState, statistic: str, values: NDArray[np.float32], size: float) -> tuple[float, float]:
        """Σ_j (∂x_j/∂θ_j)·values_j, and the sum of the squares, by steps whose norm is `size`."""
        whole, at, norm = np.zeros(self._coordinates), 0, float(np.linalg.norm(values))
        if not norm or not size:
            return 0.0, 0.0
        for span in self._spans:
            length = span.stop - span.start
            whole[span] = values[at : at + length].astype(np.float64) * (size / norm)
            at += length
        risen = self._here(rises(state, statistic, whole)) * (norm / size)
        return float(risen.sum()), float(risen @ risen)

    def _here(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.concatenate([values[span] for span in self._spans])


def _decoded(vector: Vector) -> NDArray[np.float64]:
    return np.asarray(codec.decode(vector, np.float64), np.float64)
