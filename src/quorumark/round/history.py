"""What is public about a run: the models that were accepted, and the state that the next round starts from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark import codec, field
from quorumark.canonical import canonical, digest
from quorumark.consortium.records import Manifest, anchor_digest
from quorumark.errors import InputError
from quorumark.field import Vector
from quorumark.model.layout import ModelLayout
from quorumark.round.amplitudes import Amplitudes, MarkState
from quorumark.round.group import word
from quorumark.round.movement import norm_places

__all__ = ["History", "Settled", "checks_sums", "research_seed"]


def checks_sums(manifest: Manifest) -> bool:
    """Whether the members check what a server announces as a sum (policy `sums`; docs/secagg.md, "Checked sums")."""
    return manifest.terms.policy.checks_sums


def research_seed(seed: int, round_no: int, point: int) -> int:
    """What a member's training is seeded with in a run that can be repeated."""
    return int.from_bytes(digest("research seed", *map(word, (seed, round_no, point)))[:8], "big")


@dataclass(frozen=True, eq=False)
class Settled:
    """What a round's sum makes of a model: its successor, what was embedded in it, and the members' norms.

    `held` names tensors that keep their weights, because the sum has a number there that no model may have.
    """

    weights: dict[str, Any]
    encoded: Vector
    embedded: Amplitudes | None
    norms: Vector | None
    held: tuple[str, ...]


class History:
    """The global models that were accepted, as far as a member needs them: what the mark of a round must be.

    `state` names what the next round starts from: the genesis, and the models and marks so far. Neither the manifest in
    force nor a run nor a round's number is in it, so that members know a state again under others; nor the integers
    that no sum holds, which a server may be free to choose. `earlier` are the manifests before this one, the first one
    first.
    """

    def __init__(
        self, manifest: Manifest, layout: ModelLayout, encoded: Vector, earlier: Sequence[Manifest] = ()
    ) -> None:
        """From E of the public initial model, which must be the anchor that the manifest names."""
        terms = manifest.terms
        if layout.digest() != terms.layout:
            raise InputError("layout", "must be the one that the manifest names", layout.digest()[:16])
        self.strength = terms.strength
        # until an amendment names the model after the warm-up rounds as the anchor nothing is marked: signs will change
        self.warming = bool(self.strength.warmup_rounds) and manifest.genesis.terms == terms.digest().hex()
        if anchor_digest(layout.digest(), encoded) != terms.anchor:
            raise InputError("model", "must be the initial model that the manifest names as its anchor")
        self.manifest, self.layout, self.earlier = manifest, layout, tuple(earlier)
        start = 0 if self.warming else self.strength.warmup_rounds
        self.mark = MarkState(self.strength, layout, terms.key, encoded, start)
        self.buffers = (
            b""  # a digest of what models have besides E(θ), where sums are checked (`ModelLayout.buffers_digest`)
        )
        self._known: Amplitudes | None = None
        self._halvings = 0

    @property
    def state(self) -> bytes:
        genesis = digest("genesis", canonical(self.manifest.genesis.as_dict()))
        return digest("round state", genesis, self.mark.chain, self.mark.model_digest)

    @property
    def round(self) -> int:
        """The number of the next round, as training sees it: one more than were accepted."""
        return self.mark.round + 1

    def amplitudes(self, halvings: int = 0) -> Amplitudes:
        """The mark of the next round."""
        if self._known is None or (self._known.round, self._halvings) != (self.round, halvings):
            self._known, self._halvings = self.mark.amplitudes(self.round, halvings), halvings
        return self._known

    def amplitudes_under(self, manifest: Manifest, halvings: int) -> Amplitudes:
        """The same under another manifest of this consortium, whose strength may be another."""
        if manifest.digest() == self.manifest.digest():
            return self.amplitudes(halvings)
        with self._under(manifest):
            return self.mark.amplitudes(self.round, halvings)

    @contextlib.contextmanager
    def _under(self, manifest: Manifest) -> Iterator[None]:
        """The strength of another manifest."""
        own, self.mark.strength = self.mark.strength, manifest.terms.strength
        try:
            yield
        finally:
            self.mark.strength = own

    def accept(
        self,
        round_no: int,
        encoded: Vector,
        embedded: Amplitudes | None,
        norms: Vector | None = None,
        under: str | None = None,
    ) -> None:
        """A round's model is the global one now; `embedded` is what was added in it, `norms` the opened sum of the
        members' norms where they are summed, `under` the manifest if it is an earlier one. Told twice, it is the
        same."""
        if round_no != self.mark.round:
            summed = self.manifest.digest().hex() if under is None else under
            then = next((link for link in self.earlier if link.digest().hex() == summed), self.manifest)
            with self._under(then):  # whose rate and decay the members trained with
                self.mark.advance(round_no, encoded, embedded, norms, under=summed)
            self._known = None

    def binding(self, round_no: int, amplitudes: Amplitudes | None, repeats: int = 0) -> bytes:
        """What all members of a round must agree on besides the set U and its keys, which secure aggregation adds.

        The mark's digest holds the global model, the chain of all before it, and the strength. The weights follow
        from U and the manifest. `repeats` is the round that is made again: nobody trains anew for what others repeat.
        """
        marks = b"" if amplitudes is None else amplitudes.digest()
        parts = [self.manifest.digest(), word(round_no), word(repeats), self.mark.digest(), marks]
        return digest("round", *parts, *([self.buffers] if self.buffers else []))

    def unclosed(self) -> tuple[Manifest, ...]:
        """Earlier manifests under which a sum from this state could still be opened: those from the one that its model
        was summed under (the first one, for the anchor) to the last before this one."""
        digests = [manifest.digest().hex() for manifest in self.earlier]
        if self.mark.under == self.manifest.digest().hex():
            return ()
        return self.earlier[digests.index(self.mark.under) if self.mark.under in digests else 0 :]

    def settle(self, opened: Vector, like: Mapping[str, Any], amplitudes: Amplitudes | None, *, norms: bool) -> Settled:
        """What follows from an opened sum (without its tag), whatever is in it: an opened sum always has a successor.

        A tensor with a weight or a norm that no model may have keeps its weights, and nothing counts as embedded in it:
        one member can do that by sending a wrong vector, and a sum that was thrown away could not be repeated without
        showing more than one sum. `like` is the model before, in its own types.
        """
        size, layout = self.layout.size, self.layout
        vector = codec.decode(opened[:size], layout.dtype)
        with np.errstate(over="ignore"):
            rounded = layout.flatten(layout.unflatten(vector, like))
        summed_norms = opened[size:].copy() if norms else None
        places = {spec.name: place for spec, place in layout.spans()}
        held = set()
        if not _fits(rounded):
            held |= {name for name, place in places.items() if not _fits(rounded[place])}
        if summed_norms is not None and not _norms_fit(summed_norms):
            held |= {name for name, part in norm_places(layout) if not _norms_fit(summed_norms[part])}
        embedded = amplitudes if amplitudes is not None and amplitudes.marks else None
        if held:
            before = layout.flatten(like)
            for name in held:
                rounded[places[name]] = before[places[name]]
            if summed_norms is not None:
                for name, part in norm_places(layout):
                    if name in held:
                        summed_norms[part] = 0
            embedded = None if embedded is None else embedded.without(held)
            embedded = embedded if embedded is not None and embedded.marks else None
        weights = layout.unflatten(rounded, like)
        encoded = codec.encode(rounded, name="the opened sum")
        for name in held:  # as it was accepted before, to the last bit
            encoded[places[name]] = self.mark.model[places[name]]
        return Settled(weights, encoded, embedded, summed_norms, tuple(sorted(held)))

    def restored(self, mark: MarkState, buffers: bytes = b"") -> History:
        """The same consortium's history at another state."""
        self.mark, self.buffers, self._known = mark, buffers, None
        return self


def _fits(values: NDArray[Any]) -> bool:
    return bool(np.all(np.abs(values) < codec.LIMIT)) if values.size else True


def _norms_fit(norms: Vector) -> bool:
    signed = field.to_signed(norms)
    return bool(np.all((signed >= 0) & (signed < int(codec.LIMIT) << codec.FRACTION_BITS))) if norms.size else True
