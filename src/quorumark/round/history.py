"""What is public about a run: the models that were accepted, and the state that the next round starts from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark import codec, field
from quorumark.canonical import canonical, digest
from quorumark.consortium.records import Manifest, anchor_digest
from quorumark.errors import InputError
from quorumark.field import Vector
from quorumark.model.layout import ModelLayout
from quorumark.packing import unpack, unpack_onto
from quorumark.round.amplitudes import Amplitudes, MarkState, model_digest
from quorumark.round.group import word
from quorumark.round.mark import Packed
from quorumark.round.movement import norm_count, norm_places
from quorumark.round.optimiser import Taken
from quorumark.round.units import Packing
from quorumark.round.update import Update

__all__ = ["History", "Settled", "checks_sums", "packing_of", "research_seed"]


_RUNNING = ("running_mean", "running_var")  # statistics, not weights: an optimiser may make a variance negative


def checks_sums(manifest: Manifest) -> bool:
    """Whether the members check what a server announces as a sum (policy `sums`; docs/secagg.md, "Checked sums")."""
    return manifest.terms.policy.checks_sums


def packing_of(manifest: Manifest) -> Packing:
    """How many numbers an element of an upload holds (policy `packing`), and for how many members."""
    return Packing(manifest.terms.policy.packing, manifest.terms.members)


def research_seed(seed: int, round_no: int, point: int) -> int:
    """What a member's training is seeded with in a run that can be repeated."""
    return int.from_bytes(digest("research seed", *map(word, (seed, round_no, point)))[:8], "big")


@dataclass(frozen=True, eq=False)
class Settled:
    """What a round's sum makes of a model: its successor, what was embedded in it, and the members' norms.

    `vector` is the successor, flat. `held` names tensors that keep their weights, because the sum has a number there
    that no model may have, and `kept` has E of these as it was accepted before, to the last bit. `stood`: the mark was
    in one of them, so that another sum from the same weights could show it. `taken`: the step of the server optimiser,
    where the terms name one.
    """

    weights: dict[str, Any]
    vector: NDArray[Any]
    embedded: Amplitudes | None
    norms: Vector | None
    held: tuple[str, ...]
    stood: bool
    taken: Taken | None = None
    kept: Mapping[str, tuple[slice, Vector]] = dataclass_field(default_factory=dict)

    @cached_property
    def encoded(self) -> Vector:
        """E of the weights, made when it is asked for."""
        encoded = codec.encode(self.vector, name="the opened sum")
        for place, before in self.kept.values():
            encoded[place] = before
        return encoded

    def encode(self, layout: ModelLayout, model: Mapping[str, Any]) -> Vector:
        """E of the model that a strategy made of it: this `encoded` itself where that kept every weight."""
        return self.encoded if np.array_equal(layout.flatten(model), self.vector) else layout.encode(model)


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
        self.optimiser = terms.policy.optimiser
        self.mark = MarkState(
            self.strength, layout, terms.key, encoded, start, packing_of(manifest), optimiser=self.optimiser
        )
        self.buffers = (
            b""  # a digest of what models have besides E(θ), where sums are checked (`ModelLayout.buffers_digest`)
        )
        self._known: dict[int, Amplitudes] = {}  # by halvings, from the present state; copies share it
        self._rounded: dict[tuple[Amplitudes, bytes], Amplitudes] = {}  # in units of a level, likewise
        self._genesis = digest("genesis", canonical(manifest.genesis.as_dict()))
        self.begun = self.state  # what a run begins from, and all that is known there
        self._begun_mark = self.mark.digest() if terms.policy.has_links else b""

    @property
    def is_begun(self) -> bool:
        """Whether no round was accepted yet (asked only where members follow links)."""
        return self.state == self.begun and self.mark.digest() == self._begun_mark

    @property
    def whole(self) -> bytes:
        """A digest of all that the next round depends on: the state names models and marks, this also what follows from
        them, a server optimiser's numbers and the integers that no sum holds."""
        return digest("whole state", self.state, self.mark.digest(), self.buffers)

    @property
    def state(self) -> bytes:
        return digest("round state", self._genesis, self.mark.chain, self.mark.model_digest)

    @property
    def norms(self) -> int:
        """How many norms members sum beside a model that is marked."""
        return norm_count(self.layout) if self.strength.needs_norms and self.manifest.terms.has_key else 0

    @property
    def round(self) -> int:
        """The number of the next round, as training sees it: one more than were accepted."""
        return self.mark.round + 1

    def amplitudes(self, halvings: int = 0) -> Amplitudes:
        """The mark of the next round."""
        if halvings not in self._known or self._known[halvings].round != self.round:
            self._known[halvings] = self.mark.amplitudes(self.round, halvings)
        return self._known[halvings]

    def amplitudes_under(self, manifest: Manifest, halvings: int) -> Amplitudes:
        """The same under another manifest of this consortium, whose strength may be another."""
        if manifest.digest() == self.manifest.digest():
            return self.amplitudes(halvings)
        with self._under(manifest):
            return self.mark.amplitudes(self.round, halvings)

    def in_units(self, amplitudes: Amplitudes, level: bytes) -> Amplitudes:
        """The mark of the next round as it fits into units of this level."""
        if (amplitudes, level) not in self._rounded:
            self._rounded[amplitudes, level] = self.mark.in_units(amplitudes, level)
        return self._rounded[amplitudes, level]

    def widened(self, amplitudes: Amplitudes, level: bytes, under: Manifest) -> Amplitudes:
        """The mark of a round whose units are of this level."""
        with self._under(under):
            return self.mark.in_units(amplitudes, level)

    @contextlib.contextmanager
    def _under(self, manifest: Manifest) -> Iterator[None]:
        """The strength and the packing of another manifest."""
        own = self.mark.strength, self.mark.packing
        self.mark.strength, self.mark.packing = manifest.terms.strength, packing_of(manifest)
        try:
            yield
        finally:  # `accept` puts another one in its place
            self.mark.strength, self.mark.packing = own

    def summed_under(self, digest: str) -> Manifest:
        """The manifest with this digest, of those that this history knows; else the one in force."""
        return next((link for link in self.earlier if link.digest().hex() == digest), self.manifest)

    @property
    def packing(self) -> Packing:
        """Of the next round, under the manifest in force."""
        return packing_of(self.manifest)

    @property
    def tensors(self) -> int:
        """For how many tensors a member of the next round may need wider units."""
        return sum(1 for _ in self.layout.spans()) if self.packing.packs else 0

    def level(self, update: Update) -> bytes:
        """The level of units that a member's own update needs in the next round."""
        mark = self.mark
        return mark.packing.level(update.largest, mark.spans) if mark.packing.packs else b""

    def packed(self, level: bytes) -> Packed:
        """Where the weights of an update are in the next round's vectors, and in which units of this level."""
        return Packed(self.mark.packing.count, self.mark.spans(level))

    def accept(
        self,
        round_no: int,
        encoded: Vector,
        embedded: Amplitudes | None,
        norms: Vector | None = None,
        under: str | None = None,
        level: bytes = b"",
        *,
        stood: bool = False,
        taken: Taken | None = None,
        halvings: int = 0,
    ) -> None:
        """A round's model is the global one now; `embedded` is what was added in it, `norms` the opened sum of the
        members' norms where they are summed, `under` the manifest if it is an earlier one, `level` that of the units,
        `stood` and `taken` as in `Settled`, `halvings` how often members had the mark halved. Told twice, it is the
        same."""
        if round_no != self.mark.round:
            summed = self.manifest.digest().hex() if under is None else under
            with self._under(self.summed_under(summed)):  # whose rate and decay the members trained with
                told = encoded, embedded, norms, summed, level, stood, taken, halvings
                self.mark = _advanced(self.mark, round_no, *told)
            self._known, self._rounded = {}, {}

    def copy(self) -> History:
        """For another member: what one of them accepts is not accepted by the other."""
        made = copy(self)
        made.mark = copy(self.mark)
        return made

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

    def settle(
        self,
        opened: Vector,
        like: Mapping[str, Any],
        amplitudes: Amplitudes | None,
        *,
        norms: bool,
        level: bytes = b"",
        under: Manifest | None = None,
    ) -> Settled:
        """What follows from an opened sum (without its tag), whatever is in it: an opened sum always has a successor.
        It is a function of the sum and of the state, the same for server and members: the sum of the members' models
        or, where it is packed, of their updates, in units of this `level`, `under` an earlier manifest or this one.

        A tensor with a weight or a norm that no model may have keeps its weights, and nothing counts as embedded in it:
        one member can do that by sending a wrong vector, and a sum that was thrown away could not be repeated without
        showing more than one sum. `like` is the model before, in its own types.
        """
        layout = self.layout
        with self._under(under or self.manifest):
            size = self.mark.packing.length(layout)
            amplitudes = None if amplitudes is None else self.mark.in_units(amplitudes, level)
            if self.mark.applied is None:
                vector, held, taken = self._unpacked(opened[:size], level)
            else:
                vector, held, taken = self._stepped(opened[:size], level, amplitudes)
        rounded = layout.rounded(vector)
        summed_norms = opened[size:].copy() if norms else None
        places = {spec.name: place for spec, place in layout.spans()}
        if not codec.fits(rounded):
            held |= {name for name, place in places.items() if not codec.fits(rounded[place])}
        if summed_norms is not None and not _norms_fit(summed_norms):
            held |= {name for name, part in norm_places(layout) if not _norms_fit(summed_norms[part])}
        embedded = amplitudes if amplitudes is not None and amplitudes.marks else None
        stood = embedded is not None and embedded.without(held).scales != embedded.scales
        taken = None if taken is None else taken.without([places[name] for name in sorted(held)])
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
        names = tuple(sorted(held))
        kept = {name: (places[name], self.mark.model[places[name]]) for name in names}
        return Settled(layout.unflatten(rounded, like), rounded, embedded, summed_norms, names, stood, taken, kept)

    def _unpacked(self, opened: Vector, level: bytes) -> tuple[NDArray[Any], set[str], Taken | None]:
        """The sum of the models, and the tensors whose parts no members could have sent."""
        mark, dtype = self.mark, self.layout.dtype
        if not mark.packing.packs:
            return codec.decode(opened, dtype), set(), None
        vector, fits = unpack_onto(mark.model, opened, mark.spans(level), mark.packing.count, dtype)
        return vector, self._unfit(fits), None

    def _unfit(self, fits: Sequence[bool]) -> set[str]:
        return {spec.name for (spec, _), fit in zip(self.layout.spans(), fits, strict=True) if not fit}

    def _stepped(
        self, opened: Vector, level: bytes, amplitudes: Amplitudes | None
    ) -> tuple[NDArray[Any], set[str], Taken | None]:
        """What the server optimiser makes of the sum of the models, marked by these `amplitudes`; also the tensors
        whose sum or step no model may have; and the step."""
        mark, held = self.mark, set[str]()
        assert mark.applied is not None  # noqa: S101
        before = field.to_signed(mark.model)
        if mark.packing.packs:
            raw, fits = unpack(opened, self.layout.size, mark.spans(level), mark.packing.count)
            held = self._unfit(fits)
        else:
            raw = field.to_signed(opened) - before
        running = {spec.name for spec, _ in self.layout.spans("plain") if spec.name.endswith(_RUNNING)}
        kept = mark.strength.kept(self.round)
        marks = None if amplitudes is None else amplitudes.sizes
        taken = mark.applied.take(self.layout, raw, marks, kept, mark.strength.c_max, averaged=running)
        after = before + taken.moves
        most = (int(codec.LIMIT) << codec.FRACTION_BITS) - 1
        for spec, place in self.layout.spans():
            here = (before[place] + taken.raw[place], after[place])
            if place.stop > place.start and max(np.abs(v).max() for v in here) > most:
                held.add(spec.name)
                after[place] = before[place]
        return codec.decode(field.from_signed(after), self.layout.dtype), held, taken

    def read_mark(
        self, data: bytes, model: Vector, anchor: Vector, vectors: Mapping[str, NDArray[Any]] | None = None
    ) -> MarkState:
        """A state of this consortium from its record (`MarkState.from_bytes`), under the manifest in force. `anchor` is
        the model that the run began with; in warm-up rounds every model is the next anchor."""
        key, start = self.manifest.terms.key, model if self.warming else anchor
        return MarkState.from_bytes(
            data, self.strength, self.layout, key, model, start, self.packing, self.optimiser, vectors
        )

    def restored(self, mark: MarkState, buffers: bytes = b"") -> History:
        """The same consortium's history at another state."""
        self.mark, self.buffers, self._known, self._rounded = mark, buffers, {}, {}
        return self


_ADVANCED: dict[tuple[object, ...], MarkState] = {}
_MOST_ADVANCED, _LARGEST_ADVANCED = 2, 1 << 23  # states, and weights of a model that is kept for them


def _advanced(
    mark: MarkState,
    round_no: int,
    encoded: Vector,
    embedded: Amplitudes | None,
    norms: Vector | None,
    under: str,
    level: bytes,
    stood: bool,
    taken: Taken | None,
    halvings: int,
) -> MarkState:
    """What follows from a state and a round's sum is a function of both: members of a simulation, who share a process,
    compute it once. The state that is given may change."""
    small = encoded.dtype == np.uint64 and encoded.size <= _LARGEST_ADVANCED
    named = model_digest(encoded) if small else b""
    marks = b"" if embedded is None else embedded.digest()
    summed = None if norms is None else np.asarray(norms).tobytes()
    raw = None if taken is None else model_digest(taken.raw.view(np.uint64))
    told = under, level, stood, halvings
    key = mark.digest(), mark.strength, mark.packing, round_no, named, marks, summed, raw, *told
    if not named or key not in _ADVANCED:
        about = {"under": under, "level": level, "stood": stood, "taken": taken, "halvings": halvings}
        mark.advance(round_no, encoded, embedded, norms, **about)  # type: ignore[arg-type]
        if not named:
            return mark
        while len(_ADVANCED) >= _MOST_ADVANCED:
            _ADVANCED.pop(next(iter(_ADVANCED)))
        _ADVANCED[key] = copy(mark)
        return mark
    return copy(_ADVANCED[key])


def _norms_fit(norms: Vector) -> bool:
    signed = field.to_signed(norms)
    return bool(np.all((signed >= 0) & (signed < int(codec.LIMIT) << codec.FRACTION_BITS))) if norms.size else True
