"""All members lose power at the same moment, between any two writes of a message: once it is back the run goes on, and
nobody is accused. Nobody lost anything that was on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from quorumark.errors import RoundError
from quorumark.node import remembered
from quorumark.node.member import MemberNode
from tests.kit.drawn import EIGHT, Drawn
from tests.kit.flowers import Consortium
from tests.kit.rounds import Run
from tests.kit.states import small, with_cohorts


class NoPowerError(BaseException):
    """Nothing that runs on the machine can catch it."""


@dataclass
class Power:
    """Counts what the disk sees of a stage: files that take their place and lines that are appended, before and after.
    At the moment that is set it is gone, for each member alike."""

    gone_at: tuple[str, int] = ("", 0)
    stage: str = ""
    count: int = 0
    most: dict[str, int] = field(default_factory=dict)

    def passes(self) -> None:
        if self.stage:
            self.count += 1
            self.most[self.stage] = max(self.most.get(self.stage, 0), self.count)
            if (self.stage, self.count) == self.gone_at:
                raise NoPowerError

    def around(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            self.passes()
            found = real(*arguments, **options)
            self.passes()
            return found

        return watched

    @contextmanager
    def on(self, stage: str) -> Iterator[None]:
        self.stage, self.count = stage, 0
        try:
            yield
        except NoPowerError:
            remembered._KNOWN.clear()  # a new process knows nothing
            raise RoundError("the power went out", code="node.failed") from None
        finally:
            self.stage = ""


@pytest.fixture
def power(monkeypatch: pytest.MonkeyPatch) -> Power:
    found = Power()
    monkeypatch.setattr(os, "replace", found.around(os.replace))
    monkeypatch.setattr(os, "write", found.around(os.write))
    return found


class Node:
    """A member's node on a machine whose power may go."""

    def __init__(self, node: MemberNode, power: Power) -> None:
        self._node, self._power = node, power

    def handle(self, stage: str, config: Mapping[str, Any], arrays: Any) -> Any:
        with self._power.on(stage):
            return self._node.handle(stage, config, arrays)


def powered(kind: type[Run], power: Power) -> type[Run]:
    class Powered(kind):  # type: ignore[misc, valid-type]
        def node(self, x: int) -> Any:
            return Node(super().node(x), power)

        def unmask(self, silent: Any = ()) -> None:  # noqa: ARG002
            for x in self.server.members:
                request = self.server.request(x)
                try:
                    said, _ = self.node(x).handle("unmask", {"request": request}, {})
                except RoundError as error:
                    self.refused[x] = error.code
                    continue
                self.server.take_answer(x, said["answer"])

    return Powered


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Consortium]:
    folder = tmp_path_factory.mktemp("outages")
    return {
        "all": small(folder / "all", 5, 3),
        "drawn": with_cohorts(folder / "drawn", *EIGHT, sums="checked"),
        "drawn, FedAdam": with_cohorts(folder / "adam", *EIGHT, sums="checked", optimiser="fedadam:eta=0.01"),
    }


QUICK = [("all", "join", n) for n in range(1, 7)] + [("drawn", "vouch", n) for n in range(1, 9)]
SLOW = [("drawn", "join", n) for n in range(1, 13)] + [("drawn, FedAdam", "vouch", n) for n in range(1, 11)]
SLOW += [(way, "ready", n) for way in ("all", "drawn") for n in range(1, 9)]
SLOW += [(way, "upload", n) for way in ("all", "drawn") for n in range(1, 7)]
SLOW += [("drawn", "unmask", n) for n in (1, 2)]


def two_rounds(run: Run) -> None:
    run.round()
    run.round()


@pytest.mark.parametrize(
    ("way", "stage", "at"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_a_run_goes_on_after_an_outage(
    worlds: dict[str, Consortium], tmp_path: Path, power: Power, way: str, stage: str, at: int
) -> None:
    """In the third round, or before the fourth: then all do again what they were asked, and nobody must consent."""
    world = worlds[way].copy(tmp_path / "world")
    run = powered(Run if way == "all" else Drawn, power)(world, folder=tmp_path / "run")
    for _ in range(2):
        run.round()
    power.gone_at = (stage, at)
    with pytest.raises(RoundError):  # or the stage has no such moment: see `power.most`
        two_rounds(run)
    assert set(run.refused.values()) == {"node.failed"}
    power.gone_at = ("", 0)
    for number in range(3):
        run.round()
        assert number == 0 or run.refused == {}, run.refused
    accused = {"round.wrong-tag", "round.other-successor", "round.not-linked", "round.not-the-sum"}
    assert not accused & set(run.refused.values())
