"""Sampled members with checked sums, round after round: what is lost, z beside its forecast, and a server that makes a
state up. The attacks stage by stage are in test_links.py."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from quorumark.consortium.identity import Identity
from quorumark.consortium.records import anchor_of, roster_of
from quorumark.errors import RoundError
from quorumark.model.layout import ModelLayout
from quorumark.research.known import KnownKey, TensorsInMemory
from quorumark.round import links
from quorumark.round.group import group_of
from quorumark.round.statements import Turn
from quorumark.setup.inprocess import deal_key
from quorumark.simulation import Federation, FederationMember, Losses, RoundReport
from tests.kit.ceremony import make_terms
from tests.kit.federation import Model

ALL = ("train", "upload", "unmask")
STRENGTH = {"rho": "0.1", "c_max": "0.05", "dither": "3"}


def train(model: Model, point: int, seed: int) -> Model:
    """Members pull in one direction, with noise of their own."""
    rng, common = np.random.default_rng([seed, point]), np.random.default_rng(5)
    return {
        name: tensor
        + 0.004 * common.standard_normal(tensor.shape).astype(np.float32)
        + 0.02 * rng.standard_normal(tensor.shape).astype(np.float32)
        for name, tensor in model.items()
    }


class Sampled:
    """A federation of which some members are drawn for each round, in one process."""

    def __init__(self, size: tuple[int, int, int], rates: dict[str, float], side: int, seed: int = 1) -> None:
        count, threshold, cohort = size
        people = [Identity.generate(f"member {x}") for x in range(1, count + 1)]
        model: Model = {"w": np.random.default_rng(0).standard_normal((side, side)).astype(np.float32)}
        self.layout = ModelLayout.of(model)
        about: dict[str, Any] = {
            "layout": self.layout.digest(),
            "anchor": anchor_of(self.layout, model),
            "strength": STRENGTH,
        }
        about["roster"] = roster_of((person.card(), 100) for person in people)
        policy = {"cohort": str(cohort), "sums": "checked"}
        terms = make_terms(people, threshold, self.layout.coordinates, setup="dealer", policy=policy, **about)
        self.manifest, shares = deal_key(people, terms)
        members = {
            x: FederationMember(person, self.manifest, self.layout, train, x, shares[x])
            for x, person in enumerate(people, 1)
        }
        self.losses = Losses(rates=rates, seed=seed)
        self.run = Federation(self.manifest, self.layout, model, members, seed=seed, losses=self.losses)
        self.known = KnownKey.from_shares(self.manifest, shares, self.layout, TensorsInMemory(model))
        self.draws = 0

    def round(self) -> RoundReport:
        report = self.run.round()
        if report.given_up:
            assert not self.could_live(report), (report.given_up, report.lost)
        self.draws += self.run.server.turn.draw > 0
        return report

    def could_live(self, report: RoundReport) -> bool:
        """Whether enough members were left at the stage at which a round was given up."""
        server, group = self.run.server, group_of(self.manifest)
        if report.given_up_code == "round.too-few":
            gone = {*report.lost.get("train", ()), *report.lost.get("upload", ())}
            return len(set(server.cohort) - gone) >= group.least
        lost = self.losses.at(report.round, "unmask", 1, self.run.members)
        if report.given_up_code in ("round.too-few-answers", "round.sum-open"):
            return len(set(server.members) - lost) >= group.quorum
        if report.given_up_code == "round.cohort-waits":
            return len(set(server.cohort) - lost) >= group.closing
        assert report.given_up_code == "round.link-waits", report.given_up
        assert server.chain is not None
        assert server.chain.waiting is not None
        waiting = server.chain.waiting
        return len(set(group.cohort(waiting.before, waiting.draw)) - lost) >= group.quorum

    def refusals(self) -> Counter[str]:
        """What the members say who are drawn from a state that the server made up."""
        server, found = self.run.server, Counter[str]()
        made_up = server.history.copy()
        model = {"w": np.random.default_rng(9).standard_normal(self.run.model["w"].shape).astype(np.float32)}
        made_up.accept(made_up.round, self.layout.encode(model), None, np.zeros(server.history.norms, np.uint64) + 1)
        for x in self.run.group.cohort(made_up.state):
            member, true = self.run.members[x], self.run.members[x].history
            member.history = made_up.copy()
            shown = server.links(member.reached.hex())
            for step in (lambda m=member, s=shown: m.follow(s), lambda m=member: m.begin(Turn(server.round_no + 1))):
                try:
                    step()
                except RoundError as error:
                    found[error.code] += 1
            member.history = true
        return found


def measured(size: tuple[int, int, int], rates: dict[str, float], rounds: int, side: int) -> tuple[Sampled, str]:
    sampled = Sampled(size, rates, side)
    reports = [sampled.round() for _ in range(rounds)]
    codes = Counter(report.given_up_code for report in reports if report.given_up)
    done = [report for report in reports if not report.given_up]
    z, expected = sampled.known.z(sampled.run.model), done[-1].expected_z
    text = f"{size}, losses {rates}: {len(done)} of {rounds} rounds, given up {dict(codes)}, redrawn {sampled.draws}; "
    text += f"z = {z:.1f}, forecast {expected:.1f}; {sum(sum(r.seconds.values()) for r in reports):.1f} s"
    print(text)  # noqa: T201
    assert abs(z - expected) < max(3.0, 0.15 * expected), text
    return sampled, text


def test_five_of_twelve() -> None:
    """t = 3, 10 % lost while training and when they are asked: every round that can be finished is, z is as forecast,
    and whoever is drawn from a state that no sum led to refuses it."""
    sampled, text = measured((12, 3, 5), {"train": 0.1, "unmask": 0.1}, 16, 120)
    assert sampled.known.z(sampled.run.model) > 5, text
    assert sampled.refusals() == {"round.not-linked": 10}


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
    """30 rounds, 10 % lost while training; and 10 % at every stage, each time anew."""
    sampled, text = measured(size, dict.fromkeys(stages, 0.1), 30, 300)
    assert sampled.known.z(sampled.run.model) > 6, text
    assert sampled.refusals() == {"round.not-linked": 2 * size[2]}
