"""Verification end to end: who can, who cannot, who lies, and what a stranger can check years later."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from quorumark import shamir
from quorumark.errors import (
    EvidenceError,
)
from quorumark.field import P
from quorumark.verify.coalition import combine
from quorumark.verify.evidence import Partial, Query
from tests.consortium import World, anchor_model, make_world, trained_from


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def asked(world: World) -> tuple[Query, list[Partial]]:
    return world.answers(world.suspect, (1, 2, 3, 4, 5))


# --- who can, and who cannot ------------------------------------------------------------------------------


def test_any_three_of_five_pass_and_two_cannot(world: World, asked: tuple[Query, list[Partial]]) -> None:
    query, partials = asked
    expected = world.known.z(world.reference.anchor.__class__ and world.marked)
    for some in itertools.permutations(partials, 3):
        finding = combine(world.manifest, query, some)
        assert (finding.verdict, finding.corroboration) == ("PASSED", "uncorroborated")
        assert float(finding.z) == pytest.approx(expected, abs=1e-5)
        assert any("one lying member" in reason for reason in finding.reasons)
    assert expected > 20
    for count, corroboration in ((4, "corroborated"), (5, "corroborated")):
        assert combine(world.manifest, query, partials[:count]).corroboration == corroboration
    for some in itertools.combinations(partials, 2):
        with pytest.raises(EvidenceError, match="2 partials are too few: 'hospitals' needs 3"):
            combine(world.manifest, query, some)


def test_two_partials_say_nothing_about_z(world: World, asked: tuple[Query, list[Partial]]) -> None:
    """With two of three needed, every value of Y is possible: there is a third partial for each."""
    query, partials = asked
    for wanted in (0, 1, P - 1, 12345):
        third = shamir.reconstruct(
            {point: np.array([value], np.uint64) for point, value in ((1, partials[0].value), (2, partials[1].value))}
            | {6: np.zeros(1, np.uint64)},
            3,
            at=3,
        )
        # the polynomial through (1, y1), (2, y2), (0, wanted), at 3
        weights = shamir.lagrange_matrix([1, 2, P - 1], [3])  # three points, the last one stands for none of them
        assert weights.shape == (1, 3)
        assert third.shape == (1,)
        y = _through({0: wanted, 1: partials[0].value, 2: partials[1].value}, 3)
        assert shamir.decode({1: partials[0].value, 2: partials[1].value, 3: y}, 3).value == wanted
    assert query.coordinates == world.manifest.terms.coordinates


def _through(points: dict[int, int], at: int) -> int:
    """Lagrange by plain integers."""
    total = 0
    for x, y in points.items():
        top, bottom = 1, 1
        for other in points:
            if other != x:
                top, bottom = top * (at - other) % P, bottom * (x - other) % P
        total += y * top * pow(bottom, -1, P)
    return total % P


def test_other_models_fail(world: World) -> None:
    for seed in (11, 12):
        query, partials = world.answers(trained_from(anchor_model(), seed), (1, 3, 4))
        finding = combine(world.manifest, query, partials)
        assert finding.verdict == "FAILED"
        assert abs(float(finding.z)) < 5
    query, partials = world.answers(trained_from(anchor_model(99), 5), (2, 3, 5))
    assert combine(world.manifest, query, partials).verdict == "FAILED"
