"""Sampled members with checked sums, round after round: what is lost, z beside its forecast, and a server that makes a
state up. The attacks stage by stage are in test_links.py, the sizes of the measured runs in benchmarks/sampled.py."""

from __future__ import annotations

import numpy as np
import pytest

from quorumark.round import links
from tests.kit.sampled import ALL, Sampled, measured


def test_five_of_twelve() -> None:
    """t = 3, 10 % lost while training and when they are asked: every round that can be finished is, z is as forecast,
    and whoever is drawn from a state that no sum led to refuses it."""
    found = measured((12, 3, 5), {"train": 0.1, "unmask": 0.1}, 16, 120)
    assert found.wasted == []
    assert abs(found.z - found.forecast) < 3  # one key: the chance of its own is a deviation of 1
    assert found.z > 5
    assert found.refusals == {"round.not-linked": 10}


def test_without_links_they_would_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_walk", lambda *_: None)
    sampled = Sampled((12, 3, 5), {}, 20)
    for _ in range(3):
        sampled.round()
    assert sampled.refusals() == {}


@pytest.mark.slow
@pytest.mark.parametrize("size", [(50, 5, 10), (128, 8, 16)], ids=str)
@pytest.mark.parametrize("stages", [("train",), ALL], ids=["training", "all stages"])
def test_sampled_members(size: tuple[int, int, int], stages: tuple[str, ...]) -> None:
    """30 rounds, 10 % lost while training; and 10 % at every stage, each time anew. z is as forecast in the mean over
    three seeds: within max(10 %, 2)."""
    found = [measured(size, dict.fromkeys(stages, 0.1), 30, 300, seed) for seed in (1, 2, 3)]
    assert [one.wasted for one in found] == [[]] * 3
    assert [one.refusals for one in found] == [{"round.not-linked": 2 * size[2]}] * 3
    z, forecast = (float(np.mean([getattr(one, name) for one in found])) for name in ("z", "forecast"))
    assert abs(z - forecast) <= max(0.1 * forecast, 2)
    assert z > 6
