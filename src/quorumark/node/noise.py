"""This member's own noise in the models, as its machine keeps it (docs/strength.md, "Survival").

From it the member computes how much of the mark training left, one number, and tells the server that. The noise itself
hides the mark: it is in a file that only this member can open. In a simulation whose server's process serves all
members it is followed there, that of all of them at once (`SharedNoise`), as in `Federation`.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

from quorumark.consortium.identity import Identity
from quorumark.consortium.keystore import SealedReader, SealedWriter, Unlock
from quorumark.consortium.records import Manifest
from quorumark.errors import KeystoreError
from quorumark.field import Stream
from quorumark.round.amplitudes import Amplitudes, MarkState
from quorumark.round.dither import dither_stream
from quorumark.round.mark import weight_of
from quorumark.round.survival import Step, Survival, Tracer

__all__ = ["OwnNoise", "SharedNoise"]

_KIND = "a member's noise"


class OwnNoise:
    """In a file of each state. It follows a run in memory, and `save` writes it beside the files of the state that it
    went to: a state that turns out to be wrong leaves the one before as it was."""

    def __init__(self, path: Path, identity: Identity, manifest: Manifest) -> None:
        self._path, self._identity, self._manifest = path, identity, manifest
        self._kappa = _kappa_of(manifest)
        self._followed: Tracer | None = None
        self.elsewhere = False  # another process follows it

    def __repr__(self) -> str:
        return f"OwnNoise({self._path.name!r}, secrets hidden)"

    def follow(
        self,
        state: bytes,
        step: Step,
        after: MarkState,
        embedded: Amplitudes | None,
        under: Manifest,
        members: tuple[int, ...],
    ) -> None:
        """One round from a state, summed under a manifest over these members: none if this one's vector is not in the
        sum, or it cannot say."""
        tracer = self._at(after, step.chain)
        if tracer is None:
            return
        noise: list[tuple[Fraction, Stream]] = []
        if members and under.terms.strength.dither == self._kappa:
            point = under.terms.point_of(self._identity.ed25519)
            noise.append((weight_of(under, members, point), dither_stream(self._identity, state)))
        tracer.follow(step, after, noise, embedded)
        self._followed = tracer

    def skip(self, step: Step, after: MarkState) -> None:
        """Rounds in which this member had no part, and of which it knows only what they led to."""
        tracer = self._at(after, step.chain)
        if tracer is not None and after.round > step.round:
            tracer.follow(step, after, (), None)
            self._followed = tracer

    def save(self, state: MarkState, path: Path) -> None:
        """What was followed to this state, if anything was; from now on this is its file."""
        self._path = path
        if self._followed is not None:
            with SealedWriter(self._path, Unlock.by_identity(self._identity), _KIND) as file:
                file.write(self._followed.to_bytes(state))
            self._followed = None

    def survival(self, state: MarkState, statistic: str) -> Survival | None:
        """What it says of the state's model."""
        tracer = self._at(state, state.chain)
        return None if tracer is None or not tracer.has_begun else tracer.survival(state, statistic)

    def _at(self, state: MarkState, chain: bytes) -> Tracer | None:
        """As it was followed to a state with this chain; from nothing if there is no such file; None without noise."""
        if not self._kappa or self.elsewhere:
            return None
        tracer = Tracer(state.layout.coordinates, self._kappa)
        try:
            reader = SealedReader(self._path, Unlock.by_identity(self._identity), _KIND)
            tracer.restore(b"".join(reader.chunks()), chain)
        except KeystoreError:  # not there yet, or damaged: from here on
            pass
        return tracer


class SharedNoise:
    """That of all members whom the server's process of a simulation serves, in memory. It is followed from one model of
    the run to the next, and begins anew with the process."""

    def __init__(self, manifest: Manifest, coordinates: int) -> None:
        self._kappa, self._statistic = _kappa_of(manifest), manifest.terms.statistic
        self._tracer = Tracer(coordinates, self._kappa)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(secrets hidden)"

    def follow(
        self, step: Step, after: MarkState, noise: Iterable[tuple[Fraction, Stream]], embedded: Amplitudes | None
    ) -> None:
        """One round, by what the members of its sum added."""
        if self._kappa:
            self._tracer.follow(step, after, noise, embedded)

    def survival(self, state: MarkState) -> Survival | None:
        return self._tracer.survival(state, self._statistic) if self._tracer.has_begun else None


def _kappa_of(manifest: Manifest) -> int:
    """The dither of its terms, which is followed only where the mark's amplitudes are known to all."""
    strength = manifest.terms.strength
    return strength.dither if manifest.terms.has_key and strength.rule != "paper" else 0
