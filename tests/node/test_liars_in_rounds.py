"""One node that replies nonsense: it is left out, and the round of the others goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from quorumark.errors import QuorumarkError
from quorumark.node.member import MODEL, RESULT, MemberNode, refused, with_prefix
from quorumark.node.rounds import Rounds
from quorumark.node.wire import Reply
from quorumark.round.server import RoundServer
from tests.kit.flowers import Consortium, train

LIAR = 2
Config = dict[str, Any]


class Loopback:
    """A connection to nodes in this process, one of which lies when it is ready."""

    run, down, up = "1", 0, 0

    def __init__(self, world: Consortium, lie: Callable[[Config], None]) -> None:
        self._world, self._lie = world, lie

    def label(self, node: int) -> str:
        return str(node)

    def present(self, count: int, timeout: float) -> list[int]:  # noqa: ARG002 - as every connection has it
        return list(range(1, self._world.count + 1))

    def exchange(self, sent: Mapping[int, Any], *_: Any, **__: Any) -> dict[int, Reply]:
        return {node: self._reply(node, message) for node, message in sent.items()}

    def _reply(self, number: int, message: Any) -> Reply:
        node, config = MemberNode(*self._world.home(number), seeds=True), {**message.config, "node": str(number)}
        stage = config.pop("stage")
        try:
            if stage != "train":
                return Reply(*node.handle(stage, config, dict(message.arrays)))
            joined, arrays = node.handle("join", config, {**message.arrays, **(message.beside or {})})
            if "joined" not in joined:
                return Reply(joined, arrays)
            made = train(with_prefix(arrays, MODEL), 0.01, joined["seed"], joined["rate"])
            told = {**config, "examples": joined["examples"], "joined": joined["joined"]}
            said, more = node.handle("ready", told, {RESULT + name: tensor for name, tensor in made.items()})
            said = dict(said)
            if number == LIAR:
                self._lie(said)
            return Reply(said, more)
        except QuorumarkError as error:
            return Reply(refused(error))


@pytest.mark.parametrize(
    "lie",
    [
        pytest.param({"newer": "?"}, id="no JSON"),
        pytest.param({"newer": "[]"}, id="a list"),
        pytest.param({"newer": '{"1": 5}'}, id="a number"),
        pytest.param({"boxes": None}, id="boxes that are text"),
    ],
)
def test_a_node_that_replies_nonsense_is_left_out(lie: Config, tmp_path: Path) -> None:
    world = Consortium.make(tmp_path, 5, 3, policy={"sums": "checked"})

    def told(said: Config) -> None:
        said.update({name: "x" * len(said[name]) if value is None else value for name, value in lie.items()})

    assert world.manifest is not None
    server = RoundServer(world.manifest, world.layout, world.model, run="1", seed=3)
    rounds = Rounds(Loopback(world, told), server, timeout=5, log=lambda *_: None)
    models = {node: {MODEL + name: tensor for name, tensor in world.model.items()} for node in range(1, 6)}
    report, weights = rounds.round(world.model, models, 5)
    assert not report.given_up
    assert report.members == (1, 3, 4, 5)
    assert weights


def test_a_member_s_false_word_on_halvings_is_bounded(tmp_path: Path) -> None:
    world = Consortium.make(tmp_path, 5, 3, policy={"sums": "checked"})
    assert world.manifest is not None
    server = RoundServer(world.manifest, world.layout, world.model, run="1", seed=3)
    server.offer(world.model)
    server.take_answered(LIAR, 1, (1, 2, 3), -1, -1)
    assert server.offer(world.model)
