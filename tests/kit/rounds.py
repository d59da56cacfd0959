"""Runs stage by stage, as an engine carries them: a server, and members who are a new process for every message."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from quorumark.errors import QuorumarkError, RoundError, code_of
from quorumark.node.journal import MODEL
from quorumark.node.member import RESULT, MemberNode, with_prefix
from quorumark.round.secagg.messages import unpack
from quorumark.round.server import RoundServer
from quorumark.simulation import NOTHING
from tests.kit.flowers import Consortium, Model, train

SEED = 11


class Run:
    """A run of a consortium. `gone` are members that nobody reaches, `seeded` whether training follows the seeds."""

    gone: Iterable[int] = ()

    def __init__(self, world: Consortium, **options: Any) -> None:
        self.world = world
        assert world.manifest is not None
        self.server = RoundServer(world.manifest, world.layout, world.model, **{"run": "1", "seed": SEED, **options})
        self.model: Mapping[str, Any] = dict(self.server.resumed or world.model)
        self.refused: dict[int, str] = {}
        self.asked: dict[int, dict[str, Any]] = {}

    def node(self, x: int) -> MemberNode:
        return MemberNode(*self.world.home(x), seeds=True)  # a new process each time

    def ask(
        self,
        stage: str,
        config: dict[str, Any],
        /,
        *,
        arrays: Mapping[str, Any] = NOTHING,
        only: Collection[int] | None = None,
    ) -> dict[int, dict[str, Any]]:
        """What members say when the server settles an earlier round."""
        said = {}
        for x in range(1, self.world.count + 1):
            if x in set(self.gone) or (only is not None and x not in only):
                continue
            try:
                told, found = self.node(x).handle(stage, {**config, "run": "1", "node": "1"}, arrays)
            except QuorumarkError as error:
                self.refused[x] = code_of(error)
                continue
            said[x] = {**told, "arrays": found}
        return said

    def round(
        self,
        absent: Iterable[int] = (),
        lost: Iterable[int] = (),
        silent: Iterable[int] = (),
        lie: Callable[[dict[str, Any], dict[str, Any]], None] = lambda *_: None,
        change: Callable[[dict[str, Any]], None] = lambda *_: None,
    ) -> Model:
        """One round without those who are `absent`, with those who are `lost` before they upload, and with those who
        are `silent` when they are asked to answer.

        `lie` changes what members are told when they join, `change` what they are told before they upload.
        """
        server, self.refused = self.server, {}
        weights = server.prepare(self.ask, self.model)
        if weights is None:
            offer, told = self.offer(lie)
            self.join(offer, told, absent)
            server.announce()
            self.upload(lost, change)
            self.unmask(silent)
            weights = server.finish()
        self.model = weights
        return dict(self.model)

    def offer(
        self, lie: Callable[[dict[str, Any], dict[str, Any]], None] = lambda *_: None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        offer, arrays = self.server.offer(self.model)
        told = dict(arrays)
        if not self.server.announces_sum:
            told |= self.told_model()
        offer |= {"node": "1"}
        lie(offer, told)
        return offer, told

    def told_model(self) -> dict[str, Any]:
        return {MODEL + name: tensor for name, tensor in self.model.items()}

    def join(self, offer: dict[str, Any], told: dict[str, Any], absent: Iterable[int] = ()) -> None:
        for x in range(1, self.world.count + 1):
            if x not in {*absent, *self.gone}:
                self.join_one(x, offer, told)
        for x, more in self.server.late().items():
            if x not in {*absent, *self.gone}:
                self.refused.pop(x, None)
                self.join_one(x, {**offer, **more}, told)

    def join_one(self, x: int, offer: dict[str, Any], told: dict[str, Any]) -> None:
        try:
            reply, computed = self.node(x).handle("join", offer, told)
            if "needs" in reply:  # it missed rounds
                more = self.told_model() | self.server.catch_up(reply["needs"], reply.get("since", ""))
                reply, computed = self.node(x).handle("join", offer, {**more, **told, **_links(more)})
            model = with_prefix(computed, MODEL)
            if "refused" in reply:
                self._take_refusal(x, reply)
            made = {} if reply["repeats"] else self.trained(x, model, reply)
            about = {**offer, "examples": self.server.manifest.terms.member(x).examples, "joined": reply["joined"]}
            ready, _ = self.node(x).handle("ready", about, {RESULT + name: t for name, t in made.items()})
        except QuorumarkError as error:
            self.refused[x] = code_of(error)
            return
        self.asked[x] = ready
        if "strong" in ready:
            self.server.take_strong(x, unpack(ready["strong"], "list of statements"))
            self.refused[x] = "round.too-strong"
            return
        self.server.take_ready(x, ready["ready"], ready.get("boxes", b""), ready.get("vouch", b""))
        newer = {int(k): bytes.fromhex(message) for k, message in json.loads(ready["newer"]).items()}
        self.server.take_newer(x, newer)

    def _take_refusal(self, x: int, reply: dict[str, Any]) -> None:
        if reply["nonce"]:
            self.server.take_nonce(x, reply["nonce"])
        if "answered" in reply:
            over = tuple(json.loads(reply["over"]))
            self.server.take_answered(x, reply["answered"], over, reply["halvings"], reply["of-draw"])
        raise RoundError(reply["refused"], code=reply["code"])

    def trained(self, x: int, model: Model, reply: dict[str, Any]) -> Model:  # noqa: ARG002
        return train(model, 0.01, reply["seed"], reply["rate"])

    def upload(self, lost: Iterable[int] = (), change: Callable[[dict[str, Any]], None] = lambda *_: None) -> None:
        self._upload(set(lost), change)
        while self.server.missing:
            self.server.retry()
            self._upload(set(), change)

    def _upload(self, lost: set[int], change: Callable[[dict[str, Any]], None]) -> None:
        for x in self.server.members:
            if x in lost:
                continue
            asked = self.server.asked(x)
            change(asked)
            try:
                head, vector = self.node(x).handle("upload", asked, {})
            except QuorumarkError as error:
                self.refused[x] = code_of(error)
                continue
            self.server.take_upload(x, head["head"], vector["vector"])

    def unmask(self, silent: Iterable[int] = ()) -> None:
        for x in self.server.members:
            request = self.server.request(x)
            if x not in {*silent, *self.gone}:
                self.server.take_answer(x, self.node(x).handle("unmask", {"request": request}, {})[0]["answer"])


def _links(more: Mapping[str, Any]) -> dict[str, Any]:
    """Those that it asked for, in place of the last one."""
    return {name: array for name, array in more.items() if name == "links"}


class Repeating(Run):
    """Members whose training repeats itself: of one model they always make the same."""

    def trained(self, x: int, model: Model, reply: dict[str, Any]) -> Model:
        return train(model, 0.01, zlib.crc32(model["a.weight"].tobytes()) + x, reply["rate"])
