"""The key of a consortium, put together from its shares."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quorumark import field, shamir
from tests.kit.flowers import Consortium

MEMBERS, THRESHOLD, HELPER = 5, 3, 2


def key_of(world: Consortium) -> NDArray[np.int64]:
    """What only the test knows: σ ⊙ τ_raw."""
    assert world.manifest is not None
    shares = {}
    for x in range(1, THRESHOLD + 1):
        home, unlock = world.home(x)
        shares[x] = home.only_consortium().share(unlock).vector()
    raw = field.to_signed(shamir.reconstruct(shares, THRESHOLD))[: world.layout.coordinates]
    return np.where(world.manifest.genesis.whitening(0, raw.size), -raw, raw)
