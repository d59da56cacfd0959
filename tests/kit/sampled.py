"""Federations of which some members are drawn for each round, with checked sums: what is lost, z beside its forecast,
and what a server finds that makes a state up."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quorumark.consortium.identity import Identity
from quorumark.consortium.records import anchor_of, roster_of
from quorumark.errors import RoundError
from quorumark.model.layout import ModelLayout
from quorumark.research.known import KnownKey, TensorsInMemory
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
        self.wasted: list[str] = []  # rounds that were given up and could live

    def round(self) -> RoundReport:
        report = self.run.round()
        if report.given_up and self.could_live(report):
            self.wasted.append(f"{report.given_up} {report.lost}")
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


@dataclass
class Measured:
    """What came of a run: rounds that were finished, why others were given up, and which of those could live; how often
    another cohort was drawn; z and the forecast of the last model; what members said of a state that was made up."""

    done: int = 0
    given_up: dict[str, int] = field(default_factory=dict)
    wasted: list[str] = field(default_factory=list)
    redrawn: int = 0
    z: float = 0.0
    forecast: float = 0.0
    refusals: dict[str, int] = field(default_factory=dict)


def measured(size: tuple[int, int, int], rates: dict[str, float], rounds: int, side: int, seed: int = 1) -> Measured:
    """A run, and at its end a server that makes a state up. `size`: members, threshold, cohort."""
    sampled = Sampled(size, rates, side, seed)
    reports = [sampled.round() for _ in range(rounds)]
    done = [report for report in reports if not report.given_up]
    return Measured(
        len(done),
        dict(Counter(report.given_up_code for report in reports if report.given_up)),
        sampled.wasted,
        sampled.draws,
        sampled.known.z(sampled.run.model),
        done[-1].expected_z,
        dict(sampled.refusals()),
    )
