"""Small layouts, models that walk at random, and manifests for them, to test the mark's strength with."""

from __future__ import annotations

from typing import Any

import numpy as np

from quorumark import codec
from quorumark.consortium.records import Genesis, Manifest
from quorumark.model.layout import ModelLayout
from tests.kit.ceremony import identities, make_terms

PEOPLE = identities(5)
SHAPES = {"conv": (5, 3, 2, 2), "line": (4, 7), "one": (3, 1), "out": (1, 6)}
RHO = {"rule": "rho", "rho": "0.05", "alike": "mark", "dither": "0"}  # from models alone
SKIP = {**RHO, "alike": "skip"}


def make_layout(shapes: dict[str, tuple[int, ...]] = SHAPES, **options: Any) -> ModelLayout:
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    return ModelLayout.of({**tensors, "bias": np.zeros(3, np.float32)}, **options)


def random_walk(layout: ModelLayout, count: int, seed: int = 0, step: float = 2.0**-6) -> list[Any]:
    """A random walk as E(θ_0), E(θ_1), …"""
    rng = np.random.default_rng(seed)
    walk = np.cumsum(rng.normal(0, step, (count, layout.size)), axis=0) + rng.normal(0, 0.1, layout.size)
    return [codec.encode(model) for model in walk]


def make_manifest(layout: ModelLayout, threshold: int = 3, **changes: Any) -> Manifest:
    values = {"layout": layout.digest(), **changes}
    terms = make_terms(PEOPLE, threshold, layout.coordinates, **values)
    roots = tuple(f"{i:02d}" * 32 for i in range(1, 6))
    genesis = Genesis(terms.digest().hex(), terms.layout, terms.anchor, terms.statistic, "ab" * 32, roots)
    return Manifest(terms, genesis, roots)
