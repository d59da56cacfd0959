"""Lies of the server and of members in every way in which a round may go: of all members or of some who are drawn,
with a server optimiser or without one (docs/secagg.md, "Checked sums")."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quorumark.consortium.home import HomeFolder
from quorumark.field import P
from quorumark.node.journal import MODEL
from quorumark.round import checked_sums
from quorumark.simulation import NOTHING
from tests.kit.drawn import Drawn
from tests.kit.flowers import Consortium
from tests.kit.refusals import stopped
from tests.kit.ways import cached, ways

FEW = pytest.mark.parametrize("way", ways("cohort, fedadam"))
Every = Callable[[str, Path], Consortium]


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Every:
    return cached(tmp_path_factory.mktemp("ways"))


class Lying(Drawn):
    """A server that tells members another sum than the last one, when they join or say what it led to; and members who
    answer with wrong shares."""

    what = ""
    liars = 0  # so many of its members

    def ask(
        self,
        stage: str,
        config: dict[str, Any],
        /,
        *,
        arrays: Mapping[str, Any] = NOTHING,
        only: Collection[int] | None = None,
    ) -> dict[int, dict[str, Any]]:
        told, about = dict(arrays), dict(config)
        if stage == "vouch":
            self.lie(about, told)
        return super().ask(stage, about, arrays=told, only=only)

    def offer(self, lie: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:  # noqa: ARG002 - its own
        return super().offer(self.lie)

    def lie(self, config: dict[str, Any], told: dict[str, Any]) -> None:
        places = {"weight": 3, "norm": self.server.history.packing.length(self.server.layout) + 3, "tag": -1}
        if self.what in places and "sum" in told:
            told["sum"] = told["sum"].copy()
            told["sum"][places[self.what]] = (int(told["sum"][places[self.what]]) + 1) % P
        if self.what == "history":
            config["history"] = bytes(32).hex()
        if self.what == "model":  # beside the true sum
            told |= self.told_model() | {MODEL + "a.weight": self.model["a.weight"] * np.float32(0.5)}

    def unmask(self, silent: Iterable[int] = ()) -> None:
        for x in self.server.members:
            request = self.server.request(x)
            if x in set(silent):
                continue
            answer = self.node(x).handle("unmask", {"request": request}, {})[0]["answer"]
            self.server.take_answer(x, self._wrong(x, answer) if x in self.server.members[: self.liars] else answer)

    def _wrong(self, x: int, answer: bytes) -> bytes:
        """Signed by this member, with a wrong share about each mask."""
        members = self.server.members
        shares = np.frombuffer(answer[-40 * len(members) :], "<u8").astype(np.uint64)
        shares[2::5] ^= np.uint64(1)
        home, unlock = self.world.home(x)
        group, plan = self.server.group, self.server._running().plan
        header = group.header("unmask", plan.ctx, x, plan.attempt)
        return HomeFolder(home.path).identity(unlock).write(header, shares.astype("<u8").tobytes())


@pytest.mark.parametrize("what", ["weight", "norm", "tag", "history", "model"])
@FEW
def test_a_server_that_tells_another_sum_finds_nobody(every: Every, tmp_path: Path, way: str, what: str) -> None:
    """Each who is asked refuses, when it is to say what the sum led to or when it joins: no vector is uploaded."""
    run = Lying(every(way, tmp_path / "world"))
    run.round()
    run.round()
    run.what, summed = what, set(run.server.members)
    with stopped("round.too-few", "round.link-waits"):
        run.round()
    if what == "model":  # who was not there in the last round has a history that it does not belong to
        assert set(run.refused) == set(run.server.cohort)
        assert "round.not-the-sum" in run.refused.values()
    else:
        assert run.refused == dict.fromkeys(summed, "round.other-history" if what == "history" else "round.wrong-tag")


@FEW
def test_without_the_check_another_tag_is_taken(
    every: Every, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked_sums, "check", lambda *_, **__: True)
    run = Lying(every(way, tmp_path / "world"))
    run.round()
    run.round()
    run.what = "tag"
    run.round()
    assert run.refused == {}


@pytest.mark.parametrize("liars", [1, 2])
@FEW
def test_wrong_shares_open_nothing(every: Every, tmp_path: Path, way: str, liars: int) -> None:
    """T = 4 of five answers make the seeds, the fifth shows that one is wrong, and so do the commitments to the seeds.
    Nor does the server get another sum from that model: the same one stays open."""
    run = Lying(every(way, tmp_path / "world"))
    run.round()
    run.liars = liars
    with stopped("round.wrong-answers"):
        run.round()
    state = run.server.history.state
    with stopped("round.wrong-answers", "round.sum-open"):
        run.round()
    assert run.server.history.state == state
