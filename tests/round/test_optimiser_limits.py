"""The mark's limits under server optimisers, each where it binds, and each computed here once more."""

from __future__ import annotations

import numpy as np

from tests.kit.optimised import shown

COORDINATES = 18_432


def test_the_harness_sees_rounds_without_a_mark_of_their_own() -> None:
    """Momentum shows earlier marks in them."""
    rng = np.random.default_rng(1)
    key = rng.choice(np.array([-1, 1]), 1000)
    moves = [rng.standard_normal(1000), key + 0.1 * rng.standard_normal(1000)]
    assert shown(moves, [1.0, 0.0], key).loudest > 0.9
