"""The server's side of one secure sum: who takes part, who has uploaded, and the sum once all seeds are known."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from quorumark import field, shamir
from quorumark.canonical import digest
from quorumark.consortium.identity import exchange, open_message
from quorumark.errors import (
    DecodingError,
    MessageError,
    QuorumarkError,
    RoundError,
)
from quorumark.field import Vector
from quorumark.refusals import Refusal, listed
from quorumark.round.group import Group, check_round_number
from quorumark.round.secagg.masks import (
    BOX,
    PIECE,
    PROBE,
    SEED,
    VectorDigest,
    add_masks,
    commitment_of,
    elements_of,
    self_mask,
)
from quorumark.round.secagg.messages import (
    Plan,
    Upload,
    check_arguments,
    hear,
    own_origin,
    read_ready,
    read_upload,
    say,
)
from quorumark.round.units import is_level, widest

__all__ = ["SecAggServer"]


class SecAggServer:
    """The server's side of one sum.

    `take_ready` → `announce` → `take_upload` → (`retry` → `take_upload`) → `request` → `take_answer` → `finish`.

    A message that cannot be used raises a MessageError; its sender is then out of this round, `excluded` says why, and
    the round goes on without it. Who sent a message is what the transport says. A RoundError ends the round: the last
    model stands. The server keeps one running sum, and looks at one upload at a time.
    """

    def __init__(
        self,
        group: Group,
        round_no: int,
        binding: bytes,
        length: int,
        purpose: str = "model",
        *,
        origin: bytes | None = None,
        draw: int = 0,
        tensors: int = 0,
        unbacked: Callable[[Mapping[int, bytes]], set[int]] = lambda _: set(),
    ) -> None:
        """`origin` is the state that the round starts from, and `draw` how often its cohort was drawn anew. `tensors`:
        for how many of them a member may say that it needs wider units; `unbacked` tells from a set's levels who is to
        be left out of it for what it needs (`Packing.unbacked`)."""
        check_arguments(binding, length, purpose)
        self.group, self.draw, self._tensors, self._unbacked = group, draw, tensors, unbacked
        self.excluded: dict[int, str] = {}
        self.alone: set[int] = set()  # left out for what they need
        self.disputed: dict[int, tuple[int, ...]] = {}
        self._stage = "ready"
        self._plan = Plan(group.id, group.quorum, check_round_number(round_no), purpose, 0, length, binding, (), ())
        self._origin = origin or own_origin(group, round_no)
        self._cohort = group.cohort(self._origin, draw)
        self._readies: dict[int, tuple[bytes, str]] = {}  # message, key
        self._levels: dict[int, bytes] = {}  # of units that members need, if any
        self._uploads: dict[int, tuple[bytes, bytes, bytes]] = {}  # message, boxes, commitment
        self._answers: dict[int, Vector] = {}
        self._sum: Vector = np.zeros(length, np.uint64)

    # --- ready ---

    def take_ready(self, point: int, data: bytes) -> None:
        """A member's wish to take part; before the set is fixed."""
        with self._taking("ready", point, self._cohort, self._readies):
            name = self.group.name(point)
            key, binding, length, level = read_ready(
                self.group, self._plan.round, self._plan.purpose, point, data, self.draw
            )
            if (binding, length) != (self._plan.binding, self._plan.length):
                raise MessageError(
                    f"{name} starts from another model, other weights or another length", code="message.other-model"
                )
            if len(level) not in (0, self._tensors):
                raise MessageError(
                    f"{name} needs wider units for {len(level)} tensors, and the model has {self._tensors}",
                    code="message.malformed",
                )
            exchange(PROBE, key)  # one key that no secret can be shared with would stop all members
            self._readies[point] = data, key
            self._levels |= {point: level} if level else {}

    def announce(self) -> bytes:
        """Fixes the set U: all who are ready. For all of them."""
        if self._stage != "ready":
            raise RoundError(
                f"the set of round {self._plan.round} is fixed; `retry` makes it smaller", code="round.set-fixed"
            )
        return self._announce(self._readies)

    def _announce(self, members: Collection[int]) -> bytes:
        self.alone |= self._unbacked({x: self._levels.get(x, b"") for x in members})
        chosen = tuple(sorted(set(members) - self.alone))
        if len(chosen) < self.group.least:
            raise self._give_up(
                f"{len(chosen)} members are left, and at least {self.group.least} must take part", "round.too-few"
            )
        keys = tuple(self._readies[x][1] for x in chosen)
        level = widest(self._levels.get(x, b"") for x in chosen)
        self._plan = replace(self._plan, attempt=self._plan.attempt + 1, members=chosen, keys=keys, level=level)
        self._stage = "upload"
        self._uploads.clear()
        self._sum.fill(0)
        return say("announcement", self._about() | {"members": list(chosen)}, (self._readies[x][0] for x in chosen))

    # --- upload ---

    @property
    def plan(self) -> Plan:
        """The attempt as it stands."""
        return self._plan

    @property
    def missing(self) -> tuple[int, ...]:
        """Members of U whose upload or, once they were asked, whose answer has not come."""
        came: Mapping[int, object] = self._uploads if self._stage == "upload" else self._answers
        return tuple(x for x in self._plan.members if x not in came)

    @property
    def levels(self) -> dict[int, bytes]:
        """Who needs wider units, and how wide (`round.units`)."""
        return dict(self._levels)

    @property
    def ready(self) -> tuple[int, ...]:
        """Who may be in U, before it is fixed."""
        return tuple(sorted(self._readies))

    def leave_out(self, points: Iterable[int]) -> None:
        """Members who are ready and must not be in U."""
        for point in points:
            del self._readies[point]

    @property
    def answers(self) -> int:
        """How many answers have come."""
        return len(self._answers)

    def take_upload(self, point: int, upload: Upload | bytes) -> None:
        """Adds a vector to the sum, if everything about it is right."""
        plan = self._plan
        with self._taking("upload", point, plan.members, self._uploads):
            if isinstance(upload, bytes):
                upload = Upload.from_bytes(upload)
            if not isinstance(upload, Upload) or not isinstance(upload.head, bytes):
                raise MessageError("what came is not an upload", code="message.malformed")
            name, head, vector = self.group.name(point), upload.head, upload.vector
            stop = 4 + int.from_bytes(head[:4], "big")
            message, boxes = head[4:stop], head[stop:]
            vector_digest, boxes_digest, commitment = read_upload(self.group, plan, point, message)
            if len(boxes) != BOX * len(plan.members) or digest("secagg boxes", boxes) != boxes_digest:
                raise MessageError(f"the boxes in the upload of {name} are cut or altered", code="message.altered")
            if not isinstance(vector, np.ndarray) or vector.dtype != np.uint64 or vector.shape != (plan.length,):
                raise MessageError(
                    f"the upload of {name} must hold a uint64 vector of {plan.length} elements",
                    code="message.malformed",
                )
            field.check(vector, f"the upload of {name}")
            hashed = VectorDigest()
            for part in field.chunks(plan.length, PIECE):
                hashed.update(vector[part])
            if hashed.digest() != vector_digest:
                raise MessageError(
                    f"the vector in the upload of {name} is not the one that it signed", code="message.altered"
                )
            field.add(self._sum, vector, out=self._sum, checked=False)
            self._uploads[point] = message, boxes, commitment

    def retry(self) -> bytes:
        """The next attempt, among those whose uploads came. Nothing of the last one will be opened."""
        if self._stage != "upload" or not self.missing:
            raise RoundError(
                f"round {self._plan.round} is not missing an upload: there is no reason to try again",
                code="round.nothing-missing",
            )
        if self._plan.attempt == self.group.attempts:
            lost = self.group.names(self.missing)
            raise self._give_up(
                f"{self._plan.attempt} attempts failed, the last one without {lost}", "round.no-more-attempts"
            )
        return self._announce(self._uploads)

    # --- unmask ---

    def request(self, point: int) -> bytes:
        """What a member of U must see before it answers. From here there is no way back to `retry`."""
        if self._stage == "upload" and not self.missing:
            self._stage = "unmask"
        if self._stage != "unmask":
            raise RoundError(
                f"nobody answers before all have uploaded; missing: {self.group.names(self.missing)}",
                code="round.uploads-missing",
            )
        if point not in self._plan.members:
            raise RoundError(
                f"{self.group.name(point)} does not take part in this attempt, and is not asked",
                code="round.not-in-set",
            )
        place = self._plan.members.index(point) * BOX
        parts: list[bytes] = []
        for dealer in self._plan.members:
            message, boxes, _ = self._uploads[dealer]
            parts += message, boxes[place : place + BOX]
        return say("request", self._about(), parts)

    def take_answer(self, point: int, data: bytes) -> None:
        """A member's shares of all self-masks."""
        plan = self._plan
        with self._taking("unmask", point, plan.members, self._answers):
            body = open_message(data, self.group, self.group.header("unmask", plan.ctx, point, plan.attempt))
            try:
                self._answers[point] = elements_of(body, SEED * len(plan.members))
            except ValueError:
                raise MessageError(
                    f"the answer of {self.group.name(point)} does not hold field elements", code="message.malformed"
                ) from None

    def finish(self) -> Vector:
        """The sum, from T answers or more.

        Up to ⌊(answers − T)/2⌋ wrong ones are corrected. `disputed` then says whose answers were wrong, and about whose
        masks: if about all, that member lied; if about a few, it did, or those dealt it wrong shares.
        """
        if self._stage != "unmask":
            raise RoundError(f"round {self._plan.round} has no answers to finish with", code="round.no-answers")
        if len(self._answers) < self.group.quorum:
            lost = self.group.names(self.missing)
            raise self._waiting(
                f"{len(self._answers)} members answered, and {self.group.quorum} must; missing: {lost}",
                "round.too-few-answers",
            )
        plan, masks = self._plan, []
        for dealer, seed in self._seeds().items():
            if commitment_of(plan.ctx, dealer, seed) != self._uploads[dealer][2]:
                raise self._waiting(
                    f"the mask of {self.group.name(dealer)} does not open: it dealt wrong shares, or an answer is "
                    "wrong",
                    "round.wrong-answers",
                )
            masks.append((self_mask(plan.ctx, dealer, seed), True))
        for part in field.chunks(plan.length, PIECE):
            add_masks(self._sum, part, masks)
        self._stage = "over"
        return self._sum

    def _seeds(self) -> dict[int, Vector]:
        """Every member's seed, from the answers that fit together.

        One random combination of all that each member answers, decoded as a Reed–Solomon code, finds the wrong answers.
        """
        points = sorted(self._answers)
        answers = np.stack([self._answers[x] for x in points])
        rho = field.random(answers.shape[1]).reshape(-1, 1)
        columns = {dealer: slice(SEED * i, SEED * (i + 1)) for i, dealer in enumerate(self._plan.members)}

        def wrong(part: slice) -> tuple[int, ...] | None:
            combined = field.matmul(np.ascontiguousarray(answers[:, part]), rho[part], checked=False).reshape(-1)
            try:
                return shamir.decode(dict(zip(points, map(int, combined), strict=True)), self.group.quorum).wrong
            except DecodingError:
                return None

        liars = wrong(slice(None))
        if liars is None:
            about = self.group.names(dealer for dealer, part in columns.items() if wrong(part) is None)
            spare = len(points) - self.group.quorum
            raise self._waiting(
                f"the shares of the masks of {about} do not fit together: dealt wrong, or more than {spare // 2} "
                f"of the {len(points)} answers are wrong",
                "round.wrong-answers",
            )
        good = [i for i, x in enumerate(points) if x not in liars][: self.group.quorum]
        basis, xs = np.ascontiguousarray(answers[good]), [points[i] for i in good]
        for liar in liars:
            truth = field.matmul(shamir.lagrange_matrix(xs, [liar]), basis, checked=False)[0]
            differs = truth != answers[points.index(liar)]
            self.disputed[liar] = tuple(dealer for dealer, part in columns.items() if differs[part].any())
        opened = field.matmul(shamir.lagrange_matrix(xs, [0]), basis, checked=False)[0]
        return {dealer: np.ascontiguousarray(opened[part]) for dealer, part in columns.items()}

    # --- what all stages share ---

    def _about(self) -> dict[str, Any]:
        return {"round": self._plan.round, "purpose": self._plan.purpose, "attempt": self._plan.attempt}

    # --- a sum that is asked for again ---

    def kept(self) -> tuple[bytes, Vector]:
        """What it takes to ask for the answers again, in another process: nothing secret."""
        plan = self._plan
        about = {**self._about(), "length": plan.length, "binding": plan.binding.hex(), "members": list(plan.members)}
        about |= {"origin": self._origin.hex(), "draw": self.draw, "level": plan.level.hex()}
        readies = [part for x in plan.members for part in (self._readies[x][0], self._readies[x][1].encode())]
        uploads = [part for x in plan.members for part in self._uploads[x]]
        return say("kept-sum", about, [*readies, *uploads]), self._sum

    @classmethod
    def reopened(cls, group: Group, head: bytes, vector: Vector) -> SecAggServer:
        """What `kept` gave, in the stage in which answers are asked for."""
        about, parts = hear("kept-sum", head)
        what = about["round"], bytes.fromhex(about["binding"]), about["length"], about["purpose"]
        server = cls(group, *what, origin=bytes.fromhex(about["origin"]), draw=about["draw"])
        members = about["members"]
        level = bytes.fromhex(about["level"])
        sound = is_level(level) and vector.shape == (about["length"],)
        if len(parts) != 5 * len(members) or not sound:
            raise MessageError("a kept sum is damaged", code="message.malformed")
        readies, uploads = parts[: 2 * len(members)], parts[2 * len(members) :]
        for i, x in enumerate(members):
            server._readies[x] = readies[2 * i], readies[2 * i + 1].decode()
            message, boxes, commitment = uploads[3 * i : 3 * i + 3]
            server._uploads[x] = message, boxes, commitment
        keys = tuple(server._readies[x][1] for x in members)
        server._plan = replace(server._plan, attempt=about["attempt"], members=tuple(members), keys=keys)
        server._plan = replace(server._plan, level=level)
        server._sum, server._stage = np.ascontiguousarray(vector, np.uint64), "unmask"
        return server

    def _waiting(self, reason: str, code: Refusal) -> RoundError:
        """The sum may still be opened: the same members can be asked again."""
        text = f"round {self._plan.round} ({self._plan.purpose!r}) cannot be opened yet: {reason}"
        return RoundError(text, code=code)

    def _give_up(self, reason: str, code: Refusal) -> RoundError:
        self._stage = "over"
        return RoundError(f"round {self._plan.round} ({self._plan.purpose!r}) is given up: {reason}", code=code)

    @contextmanager
    def _taking(self, stage: str, point: int, allowed: Container[int], taken: Container[int]) -> Iterator[None]:
        """One message of a stage from each member; an error in it excludes its sender, and says so."""
        name, where = self.group.name(point), f"round {self._plan.round}"
        if stage != self._stage or point not in allowed or point in taken:
            raise MessageError(
                f"no message is expected of {name} for step 'secagg/{stage}' of {where} now", code="message.unexpected"
            )
        if point in self.excluded:
            raise MessageError(f"{name} is excluded from {where}: {self.excluded[point]}", code="message.excluded")
        try:
            yield
        except QuorumarkError as error:
            self.excluded[point] = str(error)
            code = listed(error.code, "message.malformed")
            raise MessageError(f"{name} is excluded from {where}: {error}", code=code) from None
