"""A small consortium with homes on disk, a key that tests may put together, and a model that carries it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark.consortium.home import HomeFolder
from quorumark.consortium.keystore import Unlock
from quorumark.consortium.records import Manifest, Member, Terms, anchor_of
from quorumark.files import write_shared
from quorumark.model.layout import ModelLayout, write_safetensors
from quorumark.research.known import KnownKey
from quorumark.setup.inprocess import set_up_all
from quorumark.verify.answer import answer
from quorumark.verify.certificate import Certificate
from quorumark.verify.check import sign
from quorumark.verify.combine import combine
from quorumark.verify.evidence import Partial, Query
from quorumark.verify.query import prepare
from quorumark.verify.reference import Reference

NAMES = ("Avon", "Birch", "Cedar", "Delta", "Elm", "Fir", "Gorse")
Tensors = dict[str, NDArray[Any]]


def anchor_model(seed: int = 0) -> Tensors:
    rng = np.random.default_rng(seed)
    return {
        "conv.weight": (0.05 * rng.standard_normal((60, 20, 3, 3))).astype(np.float32),
        "fc.weight": (0.1 * rng.standard_normal((80, 120))).astype(np.float32),
        "fc.bias": rng.standard_normal(80).astype(np.float32),
    }


def trained_from(anchor: Mapping[str, NDArray[Any]], seed: int) -> Tensors:
    """Somebody's training: the anchor, moved."""
    rng = np.random.default_rng(seed)
    return {
        name: (w + 0.4 * np.float32(w.std()) * rng.standard_normal(w.shape)).astype(np.float32)
        for name, w in anchor.items()
    }


@dataclass
class World:
    """What a test of verification needs."""

    folder: Path
    homes: list[tuple[HomeFolder, Unlock]]
    reference: Reference
    known: KnownKey
    suspect: Path
    marked: Tensors

    @property
    def manifest(self) -> Manifest:
        return self.reference.manifest

    def answers(self, suspect: Any, points: Sequence[int], query: Query | None = None) -> tuple[Query, list[Partial]]:
        query = query or prepare(self.reference, suspect).query
        made = [
            answer(*self.homes[point - 1], self.reference, suspect, query, approved=True)  # each from its own home
            for point in points
        ]
        return query, made

    def certified(self, query: Query, partials: Sequence[Partial]) -> Certificate:
        certificate = Certificate.of(combine(self.manifest, query, partials))
        for partial in partials:
            certificate = sign(*self.homes[partial.point - 1], certificate)
        return certificate

    def save(self, model: Mapping[str, NDArray[Any]], name: str) -> Path:
        path = self.folder / name
        write_safetensors(model, path)
        return path


def make_world(
    folder: Path,
    members: int = 5,
    threshold: int = 3,
    rho: float = 0.25,
    models: tuple[Tensors, Tensors] | None = None,
    **terms: Any,
) -> World:
    """A consortium over files, and a model whose movement from the anchor has the cosine ρ with its key.

    `models`: another anchor, and what it was trained to.
    """
    anchor = anchor_model() if models is None else models[0]
    layout = ModelLayout.of(anchor)
    homes = []
    for name in NAMES[:members]:
        Unlock.new_key_file(folder / f"{name}.key")
        unlock = Unlock.key_file(folder / f"{name}.key")
        homes.append((HomeFolder.create(folder / name, name, unlock), unlock))
    roster = tuple(
        Member(x, card.name, card.ed25519, card.x25519, 100 * x)
        for x, card in enumerate((home.card() for home, _ in homes), 1)
    )
    values: dict[str, Any] = {"created": "2026-01-31T12:00:00Z", "leaf": 64, **terms}
    agreed = Terms(
        "hospitals", threshold, roster, layout.digest(), layout.coordinates,
        anchor_of(layout, anchor), **values,
    )  # fmt: skip
    manifest = set_up_all(homes, agreed, folder / "ceremony")
    write_shared(folder / "consortium.json", manifest.to_bytes())
    write_shared(folder / "layout.json", layout.to_bytes())
    write_safetensors(anchor, folder / "anchor.safetensors")
    reference = Reference.read(folder / "consortium.json")
    shares = {x: home.only_consortium().share(unlock).vector() for x, (home, unlock) in enumerate(homes, 1)}
    known = KnownKey.from_shares(manifest, shares, layout, reference.anchor)
    model = trained_from(anchor, seed=1) if models is None else dict(models[1])
    for spec, place in layout.spans("carrier"):
        moved = float((model[spec.name] - anchor[spec.name]).std())
        mark = (rho * moved * known.key[place]).reshape(spec.shape)
        model[spec.name] = (model[spec.name] + mark).astype(np.float32)
    suspect = folder / "suspect.safetensors"
    write_safetensors(model, suspect)
    return World(folder, homes, reference, known, suspect, model)
