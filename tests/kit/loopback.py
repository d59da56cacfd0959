"""A connection to members in this process: each message is served by a node that is made anew, as in a deployment."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from quorumark.errors import QuorumarkError
from quorumark.node.member import MODEL, RESULT, MemberNode, refused, with_prefix
from quorumark.node.rounds import Rounds
from quorumark.node.wire import Reply
from quorumark.round.server import RoundServer
from quorumark.simulation import RoundReport
from tests.kit.flowers import Consortium, Model, train

SEED = 3
Config = dict[str, Any]
Plan = Mapping[tuple[int, str], Iterable[int]]


class Loopback:
    """`lost`: {(round, stage): members} who do not reply then; `change` sees what a member says when it is ready."""

    run, down, up = "1", 0, 0

    def __init__(
        self,
        world: Consortium,
        *,
        training: Callable[..., Model] = train,
        lost: Plan | None = None,
        change: Callable[[int, Config], None] = lambda *_: None,
    ) -> None:
        self._world, self._training, self._lost, self._change = world, training, dict(lost or {}), change
        self.ready: list[dict[int, Config]] = []  # of each round, what members said when they were ready
        self._round = 0

    def label(self, node: int) -> str:
        return str(node)

    def present(self, count: int, timeout: float) -> list[int]:  # noqa: ARG002 - as every connection has it
        return list(range(1, self._world.count + 1))

    def exchange(self, sent: Mapping[int, Any], *_: Any, **__: Any) -> dict[int, Reply]:
        replies = {}
        for number, message in sent.items():
            stage = message.config["stage"]
            if stage == "train" and message.config["round"] != self._round:
                self._round = message.config["round"]
                self.ready.append({})
            if number not in self._lost.get((self._round, stage), ()):
                replies[number] = self._reply(number, message)
        return replies

    def node(self, number: int) -> MemberNode:
        return MemberNode(*self._world.home(number), seeds=True)

    def _reply(self, number: int, message: Any) -> Reply:
        node, config = self.node(number), {**message.config, "node": str(number)}
        stage = config.pop("stage")
        try:
            if stage != "train":
                return Reply(*node.handle(stage, config, dict(message.arrays)))
            given = {MODEL + name: tensor for name, tensor in (message.beside or {}).items()}
            joined, arrays = node.handle("join", config, {**message.arrays, **given})
            if "joined" not in joined:
                return Reply(joined, arrays)
            model = with_prefix(arrays, MODEL)
            made = {} if joined["repeats"] else self._training(model, 0.01, joined["seed"], joined["rate"])
            told = {**config, "examples": joined["examples"], "joined": joined["joined"]}
            said, more = node.handle("ready", told, {RESULT + name: tensor for name, tensor in made.items()})
            said = dict(said)
            self._change(number, said)
            self.ready[-1][number] = said
            return Reply(said, more)
        except QuorumarkError as error:
            return Reply(refused(error))


class Course:
    """A run over such a connection."""

    def __init__(self, world: Consortium, wire: Loopback, planned: int, **options: Any) -> None:
        assert world.manifest is not None
        self.wire = wire
        self.server = RoundServer(world.manifest, world.layout, world.model, **{"run": "1", "seed": SEED, **options})
        self.server.planned = planned
        self.rounds = Rounds(wire, self.server, timeout=5, log=lambda *_: None)
        self.model: Mapping[str, Any] = dict(self.server.resumed or world.model)

    def go(self, count: int, absent: Callable[[int], Collection[int]] = lambda _: ()) -> list[RoundReport]:
        """So many rounds more; `absent` says which nodes are not there in a round."""
        for _ in range(count):
            here = set(self.wire.present(0, 0)) - set(absent(self.server.round_no + 1))
            report, weights = self.rounds.round(self.model, dict.fromkeys(here, self.model), 5)
            assert not report.given_up, report.given_up
            assert weights is not None
            self.model = weights
        return self.rounds.reports
