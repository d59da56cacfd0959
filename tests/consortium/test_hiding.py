"""Which weights hide members among each other, also from colluders."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pytest

from quorumark.consortium import hiding
from quorumark.consortium.hiding import check_roster, exposed
from quorumark.errors import InputError
from tests.kit.ceremony import identities, make_terms


@pytest.mark.parametrize(
    ("threshold", "examples", "problem"),
    [
        (3, (1000, 1000, 1000, 1), r"if the other 2 collude, 1/Σa² = 1 < 4/3 for 'Delta', '\w+'; '\w+' is too large"),
        (2, (1000, 1000, 1000, 1), None),  # one colluder leaves two of the large ones
        (2, (1000, 1000, 1), "if the other 1 collude"),
        (2, (5200, 1800, 1100), None),
        (2, (5200, 1800, 700), r"1/Σa² = 1.93 < 2.0"),
        (2, (100, 100, 100), None),
        (3, (100, 100, 100), None),  # t = K: the last two hide each other
        (3, (1000, 1000, 1), "if the other 1 collude"),
        (3, (437, 350, 280, 220, 150), None),  # the demo and the hospitals
        (3, (437, 280, 220, 150), None),  # with one of them lost
        (9, (*range(100, 1600, 100), 6000), None),
    ],
)
def test_weights_must_hide_members_from_colluders(
    threshold: int, examples: tuple[int, ...], problem: str | None
) -> None:
    terms = make_terms(identities(len(examples)), threshold, 10)
    roster = tuple(replace(member, examples=n) for member, n in zip(terms.roster, examples, strict=True))
    terms = replace(terms, roster=roster)
    if problem is None:
        check_roster(terms)
        assert exposed(terms, range(1, len(examples) + 1)) == ""
    else:
        with pytest.raises(InputError, match=problem):
            check_roster(terms)


def test_the_worst_colluders_are_found() -> None:
    """Against all sets of colluders, tried one by one."""
    rng, seen = random.Random(7), set()
    somebody = make_terms(identities(2), 2, 10).roster[0]
    for _ in range(300):
        count = rng.randint(3, 7)
        threshold = rng.randint(2, count)
        some = [replace(somebody, examples=rng.choice((1, 9, 10, 50))) for _ in range(count)]
        left = max(2, count - threshold + 1)
        worst = min(hiding._spread(remain) for remain in combinations(some, left))
        found = hiding._spread(hiding._worst(sorted(some, key=lambda m: m.examples), left))
        assert found == worst
        seen.add(found < hiding.LEFT_TO_COLLUDERS)
    assert seen == {True, False}
