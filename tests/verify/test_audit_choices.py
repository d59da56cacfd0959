"""What choices cost in an audit: liars who leave out what speaks against them pay for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from quorumark.errors import RecordError
from quorumark.verify.audit import check_audit
from quorumark.verify.challenge import Challenge, challenge
from tests.kit.liars import SEED, D, Liars, query_of, score, shared, signs, vector, without


def test_leaves_called_burnt_to_get_rid_of_them() -> None:
    """Members who know the key leave out the leaves that speak against an innocent model. With many small leaves that
    makes a large z; the charge for the choice makes nothing of it."""
    rng = np.random.default_rng(21)
    raw = rng.choice([-1, 1], D).astype(np.int64)
    liars = Liars(shared(raw), leaf=16)
    tau = raw * signs(liars.manifest.genesis, D)
    x = vector(rng)
    gains = np.add.reduceat(x.astype(np.int64) * tau, np.arange(0, D, 16))
    burnt = tuple(sorted(int(i) for i in np.argsort(gains)[: 3 * gains.size // 4]))
    x = without(x, burnt, 16)
    z = score(x, tau)
    assert float(z) > 30
    query = query_of(x, liars.manifest, burnt)
    asked = challenge(query, liars.manifest, z, SEED)
    result = check_audit(asked, query, x, [liars.manifest], liars.openings(asked))
    assert float(result.z) > 12  # so much would have been a proof
    assert (result.verdict, result.log10_bound) == ("INCONCLUSIVE", "0.00")


def _made_up(like: Challenge, leaves: int, wanted: Sequence[int]) -> list[Challenge]:
    """Challenges that nobody was ever asked, and that draw almost exactly these leaves: each leaves out all others."""
    left, made = set(wanted), []
    while len(left) >= 4:
        others = tuple(sorted(set(range(leaves)) - left))
        forged = replace(like, query="00" * 32, z="999999999999", burnt=others, leaves=(0,))
        forged = replace(forged, leaves=forged.drawn(leaves))
        left -= set(forged.leaves)
        made.append(forged)
    return made


def _until_they_fit(like: Challenge, leaves: int, wanted: Sequence[int], tries: int) -> list[Challenge]:
    """Challenges that leave out nothing, of two leaves each, whose seeds were drawn until both were wanted."""
    made, missing = [], set(wanted)
    for seed in range(tries):
        forged = replace(like, query="00" * 32, z="999999999999", seed=f"{seed:064x}", burnt=(), leaves=(0,))
        forged = replace(forged, leaves=forged.drawn(leaves))
        if set(forged.leaves) <= set(wanted) and set(forged.leaves) & missing:
            missing -= set(forged.leaves)
            made.append(forged)
    return made


@pytest.mark.parametrize("how", ["made up", "until they fit"])
def test_earlier_challenges_that_explain_what_liars_leave_out(how: str) -> None:
    """Members who know the key leave out the leaves that speak against an innocent model, and show challenges that
    explain it. z on what is opened would be a proof, if those challenges were believed."""
    rng = np.random.default_rng(22)
    raw = rng.choice([-1, 1], D).astype(np.int64)
    liars = Liars(shared(raw), leaf=16)
    tau = raw * signs(liars.manifest.genesis, D)
    x = vector(rng)
    gains = np.add.reduceat(x.astype(np.int64) * tau, np.arange(0, D, 16))
    worst = [int(i) for i in np.argsort(gains)[: 3 * gains.size // 4]]
    like = challenge(query_of(x, liars.manifest), liars.manifest, "100", SEED)
    if how == "made up":
        earlier = _made_up(like, gains.size, worst)
        assert len(earlier) > 100
    else:
        earlier = _until_they_fit(like, gains.size, worst, 8000)
    burnt = tuple(sorted({leaf for one in earlier for leaf in one.leaves}))
    assert set(burnt) <= set(worst)
    x = without(x, burnt, 16)
    z = score(x, tau)
    assert float(z) > 30
    query = query_of(x, liars.manifest, burnt)
    asked = challenge(query, liars.manifest, z, SEED)
    openings = liars.openings(asked)
    if how == "made up":
        text = "leaves out .* leaves that no challenge before it opened: show those challenges too"
        with pytest.raises(RecordError, match=text):
            check_audit(asked, query, x, [liars.manifest], openings, earlier=earlier)
        with pytest.raises(RecordError, match=text):
            check_audit(asked, query, x, [liars.manifest], openings, vouched=earlier)
        return
    result = check_audit(asked, query, x, [liars.manifest], openings, earlier=earlier)
    assert float(result.z) > 12  # so much would have been a proof
    assert (result.verdict, result.log10_bound) == ("INCONCLUSIVE", "0.00")
