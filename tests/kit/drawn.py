"""Runs of cohorts whose server asks those who are drawn; one of them has the key of a sum (docs/secagg.md, "Links")."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from quorumark.consortium.identity import Identity
from quorumark.field import P, Vector
from quorumark.node.journal import Journal
from quorumark.round import checked_sums, links, statements
from quorumark.round.group import group_of
from quorumark.round.history import History
from quorumark.round.links import Link
from quorumark.round.memory import FolderState
from tests.kit.flowers import Consortium, Model
from tests.kit.rounds import Run

EIGHT = (8, 3, 5)  # K, t, n: T = 4


class Drawn(Run):
    """A run whose server asks those who are drawn and nobody else, as an engine's does."""

    def join(self, offer: dict[str, Any], told: dict[str, Any], absent: Iterable[int] = ()) -> None:
        super().join(offer, told, {*absent, *others(self.world, self.server.cohort)})


def others(world: Consortium, members: Iterable[int]) -> list[int]:
    return [x for x in range(1, world.count + 1) if x not in set(members)]


def journal(world: Consortium, x: int) -> Journal:
    home, unlock = world.home(x)
    return Journal(home.only_consortium(), home.identity(unlock))


def memory_of(world: Consortium, x: int) -> FolderState:
    return journal(world, x).memory()


def identity(world: Consortium, x: int) -> Identity:
    home, unlock = world.home(x)
    return home.identity(unlock)


def whole_links(run: Run) -> list[Link]:
    assert run.server.chain is not None
    return run.server.chain.since(b"", run.server.history.state)


def signed_by(world: Consortium, link: Link, points: Iterable[int]) -> Link:
    """With the signatures of members who sign anything."""
    manifest = journal(world, 1).manifest_of(link.under)
    group = group_of(manifest)
    made = {x: statements.sign(identity(world, x), group, "summed", link.before, link.about) for x in points}
    return link.joined(replace(link, summed=made))


class Forked(Drawn):
    """A run whose server has the key of the last sum from a member, and makes other sums with it."""

    before: History

    def opened_at(self) -> Model:
        """A state, one opened sum from it, and all that is needed to say that it was another one."""
        self.round()
        self.server.prepare(self.ask, self.model)
        self.before, before_model = self.server.history.copy(), dict(self.model)
        self.round()
        self.cohort, self.opened = self.server.members, self.server.opened.copy()
        self.draw, self.level = self.server.turn.draw, self.server.level
        return before_model

    def told(
        self, start: Model, change: int = 0, opened: Vector | None = None
    ) -> tuple[Link, dict[str, Any], dict[str, Any], Model]:
        """Of the true sum, or of another one that is `opened`; what is changed has the right tag for that."""
        opened, turn, world = (self.opened if opened is None else opened).copy(), self.server.turn, self.world
        with memory_of(world, self.cohort[0]).edit() as memory:
            key = bytes.fromhex(memory["sum"]["key"])
        opened[0] = (int(opened[0]) + change) % P
        opened[-1] = checked_sums.tag(key, opened[:-1], first=True)
        history, under = self.before.copy(), self.server.manifest
        amplitudes = history.amplitudes(turn.halvings)
        settled = history.settle(opened[:-1], start, amplitudes, norms=True, level=self.level)
        made = settled.encoded, settled.embedded, settled.norms, under.digest().hex(), self.level
        halvings = self.server.turn.halvings
        history.accept(history.round, *made, stood=settled.stood, taken=settled.taken, halvings=halvings)
        link = Link(self.before.state, under.digest().hex(), self.draw, history.state, history.whole)
        config = {"accepted": history.mark.round, "history": history.mark.digest().hex(), **link.asked}
        config |= {"sum-round": turn.round, "sum-halvings": turn.halvings, "sum-level": self.level.hex()}
        config |= {"sum-under": under.digest().hex(), "sum-held": json.dumps(settled.held)}
        return link, config, {"sum": opened}, settled.weights

    def go_on_from(
        self, start: Model, link: Link, config: dict[str, Any], arrays: dict[str, Any], model: Model
    ) -> None:
        """What was told is the last sum now, for the server."""
        server, history, chain = self.server, self.before.copy(), self.server.chain
        assert chain is not None
        amplitudes = history.amplitudes(self.server.turn.halvings)
        settled = history.settle(arrays["sum"][:-1], start, amplitudes, norms=True, level=self.level)
        made = settled.encoded, settled.embedded, settled.norms, server.manifest.digest().hex(), self.level
        halvings = self.server.turn.halvings
        history.accept(history.round, *made, stood=settled.stood, taken=settled.taken, halvings=halvings)
        chain._links[link.before], chain.waiting = link, None
        server._settled = server._opened = server._open = None
        server.history, server.like, self.model = history, dict(model), model
        server._last = {"norms": None, "sum": arrays["sum"]}
        server._last |= {name.removeprefix("sum-"): value for name, value in config.items() if name.startswith("sum-")}

    def vouched(self, start: Model, change: int, points: Sequence[int], helper: int) -> Link:
        """What members sign who are told of a sum; the helper signs anything."""
        link, config, arrays, _ = self.told(start, change)
        said = self.ask("vouch", config, arrays=arrays, only=points)
        link = link.joined(replace(link, summed={x: reply["summed"] for x, reply in said.items()}))
        return signed_by(self.world, link, [helper])

    def seconded(self, link: Link) -> Link:
        """By all others of the cohort who do."""
        shown = {"link": links.write_links([link]).decode()}
        said = self.ask("second", shown, only=[x for x in self.cohort if x not in link.summed])
        return link.joined(replace(link, seconded={x: reply["seconded"] for x, reply in said.items()}))


def fork(run: Forked) -> tuple[Link, Link]:
    start = run.opened_at()
    helper, a, b, c, d = run.cohort
    one, two = run.vouched(start, 0, [a, b], helper), run.vouched(start, 1 << 20, [c, d], helper)
    return run.seconded(one), run.seconded(two)
