"""The server's side of rounds and ceremonies, whatever carries the messages (docs/engines.md).

    server = RoundServer(manifest, layout, run="17")
    each round:
        config, arrays = server.offer(round_no, model)            # to everybody, with the model
        server.take_ready(point, ready, boxes, vouch)             # from everybody who trained
        server.announce()                                         # server.asked(point) goes to each of server.members
        server.take_upload(point, head, vector)
        while server.missing: server.retry()                      # server.asked(point) to server.members again
        server.take_answer(point, message)                        # server.request(point) asks for it
        weights = server.finish()                                 # Σ a_k·θ_k + S ⊙ τ: what the strategy works with

The next `offer` is told the model that the strategy made of it. A RoundError gives a round up: the last model stands.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark import codec, field, sums
from quorumark.checks import DAMAGED
from quorumark.embed import Amplitudes, MarkState, norm_count
from quorumark.engine.member import MESSAGE, Config, introduction
from quorumark.errors import CeremonyError, MessageError, RecordError, RoundError
from quorumark.federation import History, checks_sums, group_of
from quorumark.field import Vector
from quorumark.home import read_array, read_file
from quorumark.identity import Header, open_message
from quorumark.keystore import replacing, write_private
from quorumark.layout import ModelLayout, read_safetensors, write_safetensors
from quorumark.records import Manifest, Terms, canonical, parse
from quorumark.secagg import SecAggServer, Upload, pack

__all__ = ["CeremonyServer", "RoundServer", "introduced"]

Weights = Mapping[str, NDArray[Any]]
_RUN, _ASKED = "quorumark-engine-run/v1", "quorumark-engine-asked/v1"


def introduced(about: bytes, roster: Terms, run: str, point: int, node: str, message: bytes) -> None:
    """A node says which member it is, in a message that only that member can have written, for this node and run."""
    if open_message(message, roster, Header(*introduction(about, run), point)) != node.encode():
        raise MessageError(f"node {node} shows the introduction of another node")


class RoundServer:
    """One run. With a `folder`, a run whose server died goes on from its last whole round.

    `after`: the last round that these members may have taken part in, under whatever run; rounds never repeat.
    """

    def __init__(
        self,
        manifest: Manifest,
        layout: ModelLayout,
        model: Weights,
        *,
        run: str,
        after: int = 0,
        seed: int | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self.manifest, self.layout, self.group = manifest, layout, group_of(manifest)
        self._run, self._seed = run, seed
        self.like = dict(model)
        self._folder = None if folder is None else Path(folder)
        self._before = 0
        self._pending: tuple[int, Amplitudes | None, Vector | None] | None = None
        self._norms: Vector | None = None
        self.checks = checks_sums(manifest)
        self._opened: Vector | None = None  # the sum that the round before left, with its tag, where sums are checked
        self._rest: NDArray[Any] | None = None  # of the last accepted one: what rounding took off, and the tag
        self._tag = 0
        self._said: dict[int, tuple[bytes, bytes]] = {}  # boxes and vouchers of those who are ready
        self._as_of = 0  # the round from the present model that members were first asked to unmask, if any
        self._accepted_as_of = 0  # the same of the round that was accepted
        self._announcement = b""
        self._sum: SecAggServer | None = None
        self._amplitudes: Amplitudes | None = None
        self.round_no = after
        self.resumed: dict[str, NDArray[Any]] | None = None
        if self._folder is not None and (self._folder / "run.json").exists():
            self._resume()
        else:
            self._anchor = layout.encode(model)
            self.history = History(manifest, layout, self._anchor)
        if self.history.strength.rule == "paper":
            raise RecordError(
                "the strength rule 'paper' needs a sum of its own before each round, and is for research in one "
                "process (quorumark.federation): let the members agree on the rule 'rho'"
            )

    # --- a round ---

    def offer(self, model: Weights) -> tuple[Config, dict[str, NDArray[Any]]]:
        """Begins the next round from a model: what every member must be told besides it."""
        encoded = self.layout.encode(model)
        if self._pending is not None:
            self._accept(encoded)
        self.round_no += 1
        self._save(model)
        history = self.history
        if history.warming and self.round_no > history.strength.warmup_rounds:
            raise RoundError("the warm-up rounds are over: all members must sign the amendment that names the anchor")
        as_of = self._as_of or self.round_no
        self._amplitudes = history.amplitudes(self.round_no, as_of)
        length = self.layout.size + (norm_count(self.layout) if history.strength.needs_norms else 0)
        if self.checks:
            length, history.beside = length + 1, self.layout.beside(model)
        binding = history.binding(self.round_no, self._amplitudes)
        self._sum = SecAggServer(self.group, self.round_no, binding, length)
        config: Config = {
            "manifest": self.manifest.digest().hex(),
            "run": self._run,
            "round": self.round_no,
            "accepted": history.mark.round,
            "before": self._before,
        }
        if self._seed is not None:
            config["seed"] = self._seed
        arrays: dict[str, NDArray[Any]] = {
            "state": np.frombuffer(history.mark.to_bytes(), np.uint8),
            "layout": np.frombuffer(self.layout.to_bytes(), np.uint8),
        }
        if self._norms is not None:
            arrays["norms"] = self._norms
        if self.checks:
            config["as-of"], config["accepted-as-of"] = as_of, self._accepted_as_of
        if self._rest is not None:
            arrays["rest"], config["tag"] = self._rest, self._tag
        self._said.clear()
        return config, arrays

    def _accept(self, encoded: Vector) -> None:
        """The model that the strategy made of the last sum is the global one now."""
        if self._pending is None:
            return
        if self._opened is not None:
            rest, fits = self._rounded(encoded, self._opened)
            if not fits:
                raise RoundError(
                    "the model is not the sum of the last round, and the members check that: use a strategy that takes "
                    "the sum as it is, such as FedAvg, or let all members sign that they do not check sums (quorumark "
                    "consortium amend --policy sums=unchecked)"
                )
            self._rest, self._tag, self._opened = rest, int(self._opened[-1]), None
            self._accepted_as_of, self._as_of = self._as_of, 0
        before = self.history.mark.round
        accepted, embedded, norms = self._pending
        self.history.accept(accepted, encoded, embedded, norms)
        self._before, self._norms, self._pending = before, norms, None

    def _rounded(self, encoded: Vector, opened: Vector) -> tuple[NDArray[Any], bool]:
        """What the model lacks of the sum, in the smallest whole numbers, and whether that is rounding and no more."""
        total = opened[: self.layout.size]
        rest = field.to_signed(field.sub(total, encoded))
        sizes = (kind for kind in (np.int16, np.int32) if np.abs(rest).max(initial=0) <= np.iinfo(kind).max)
        model = self.layout.unflatten(codec.decode(total, self.layout.dtype), self.like)
        fits = bool((self.layout.encode(model) == encoded).all())
        return rest.astype(next(sizes, np.int64)), fits

    @property
    def anchor(self) -> Vector:
        """For members who join a run that is under way and never saw it."""
        return self._anchor

    def take_ready(self, point: int, message: bytes, boxes: bytes = b"", vouch: bytes = b"") -> None:
        """What a member said when it was ready; `boxes` and `vouch` where sums are checked."""
        if self.checks:
            binding = self.history.binding(self.round_no, self._amplitudes)
            sums.check_said(self.group, self.round_no, binding, point, boxes, vouch)
        self._running().take_ready(point, message)
        self._said[point] = bytes(boxes), bytes(vouch)

    def announce(self) -> bytes:
        self._announcement = self._running().announce()
        return self._announcement

    def asked(self, point: int) -> Config:
        """For the stage *upload* of a member of the announced set."""
        config: Config = {"round": self.round_no, "announcement": self._announcement}
        if self.checks:
            said = [self._said[x] for x in self.members]
            config["boxes"] = pack(sums.box_for(boxes, point) for boxes, _ in said)
            config["vouches"] = pack(message for _, message in said)
        return config

    def take_upload(self, point: int, head: bytes, vector: Vector) -> int:
        """How many bytes it was."""
        self._running().take_upload(point, Upload(head, vector))
        return len(head) + vector.nbytes

    def retry(self) -> bytes:
        self._announcement = self._running().retry()
        return self._announcement

    def request(self, point: int) -> bytes:
        """What to ask a member of U. Where sums are checked, this model is marked as in this round from now on."""
        made = self._running().request(point)
        if self.checks and not self._as_of:
            self._as_of = self.round_no
            if self._folder is not None:
                write_private(self._folder / "asked.json", canonical(self._asked_state()))
        return made

    def _asked_state(self) -> dict[str, Any]:
        return {"format": _ASKED, "state": self.history.mark.digest().hex(), "as_of": self._as_of}

    def take_answer(self, point: int, message: bytes) -> None:
        self._running().take_answer(point, message)

    @property
    def members(self) -> tuple[int, ...]:
        return self._running().plan.members

    @property
    def missing(self) -> tuple[int, ...]:
        return self._running().missing

    @property
    def attempt(self) -> int:
        return self._running().plan.attempt

    @property
    def disputed(self) -> dict[int, tuple[int, ...]]:
        return self._running().disputed

    def finish(self) -> dict[str, NDArray[Any]]:
        """The opened sum as tensors. If it is no model (a member lied), an EncodingError: the last one stands."""
        opened = self._running().finish()
        history, size = self.history, self.layout.size
        norms = opened[size : len(opened) - self.checks].copy() if history.strength.needs_norms else None
        vector = codec.decode(opened[:size], self.layout.dtype)
        weights: dict[str, NDArray[Any]] = self.layout.unflatten(vector, self.like)
        codec.encode(self.layout.flatten(weights), name="the opened sum")
        amplitudes = self._amplitudes
        embedded = amplitudes if amplitudes is not None and amplitudes.marks else None
        history.mark._checked_norms(norms, embedded)
        self._pending = self.round_no, embedded, norms
        self._opened = opened if self.checks else None
        return weights

    @property
    def marked(self) -> bool:
        return self._pending is not None and self._pending[1] is not None

    @property
    def c(self) -> float:
        return self._amplitudes.c / (1 << 32) if self.marked and self._amplitudes is not None else 0.0

    @property
    def rho(self) -> float:
        """ρ up to the last model that was offered."""
        return self.history.mark.rho / (1 << 32)

    def _running(self) -> SecAggServer:
        if self._sum is None:
            raise RoundError("no round is under way")
        return self._sum

    # --- a run that goes on ---

    def close(self, model: Weights) -> None:
        """The run is over, with this model: a later run may go on from it."""
        if self._pending is not None:
            self._accept(self.layout.encode(model))
            self._save(model)

    def _save(self, model: Weights) -> None:
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        anchor = self._folder / "anchor.npy"
        if not anchor.exists():
            with replacing(anchor) as file:
                np.save(file, self._anchor)
        name = f"model-{self.round_no}.safetensors"
        write_safetensors(model, self._folder / name)
        if self._rest is not None:
            with replacing(self._folder / f"sum-{self.round_no}.npz") as file:
                norms = np.empty(0, np.uint64) if self._norms is None else self._norms
                about = np.array([self._tag, self._before, self._accepted_as_of], np.uint64)
                np.savez(file, rest=self._rest, norms=norms, about=about)
        body = {
            "format": _RUN,
            "manifest": self.manifest.digest().hex(),
            "round": self.round_no,
            "model": name,
            "mark": self.history.mark.to_bytes().decode(),
        }
        write_private(self._folder / "run.json", canonical(body))
        for old in (*self._folder.glob("model-*.safetensors"), *self._folder.glob("sum-*.npz")):
            if old.name not in (name, f"sum-{self.round_no}.npz"):
                old.unlink()

    def _resume(self) -> None:
        assert self._folder is not None  # noqa: S101
        body = parse(read_file(self._folder / "run.json", "a run's state"), _RUN, "a run's state")
        if body.get("manifest") != self.manifest.digest().hex():
            raise RecordError(f"{str(self._folder)!r} holds a run under another manifest: use a new folder")
        try:
            kept = read_safetensors(self._folder / body["model"])
            self.resumed = {name: np.array(kept[name]) for name in self.like}
            self._anchor = read_array(self._folder / "anchor.npy", "an anchor")
            self.history = History(self.manifest, self.layout, self._anchor)
            model = self.layout.encode(self.resumed)
            start = model if self.history.warming else self._anchor
            key = self.manifest.terms.key
            state = body["mark"].encode()
            strength = self.history.strength
            self.history.mark = MarkState.from_bytes(state, strength, self.layout, key, model, start)
            if self.checks and self.history.mark.round:
                path = self._folder / f"sum-{int(body['round'])}.npz"
                if not path.is_file():  # a pipe would be waited for
                    raise RecordError(f"{str(self._folder)!r} lacks the sum of its last round")
                with path.open("rb") as file, np.load(file) as kept_sum:  # numpy does not close what it cannot read
                    self._rest, norms = kept_sum["rest"], kept_sum["norms"]
                    self._tag, self._before, self._accepted_as_of = map(int, kept_sum["about"])
                self._norms = norms if norms.size else None
            if (self._folder / "asked.json").exists():
                what = "what a run's members were asked"
                asked = parse(read_file(self._folder / "asked.json", what), _ASKED, what)
                if asked["state"] == self.history.mark.digest().hex():
                    self._as_of = int(asked["as_of"])
            # a round that was under way when the server died is lost: members may have joined it
            self.round_no = max(self.round_no, int(body["round"]))
        except (KeyError, AttributeError, *DAMAGED) as error:
            raise RecordError(f"{str(self._folder)!r} holds a damaged run ({type(error).__name__})") from None


class CeremonyServer:
    """Relays the sealed messages of a dealer-free setup. It reads none of them that is sealed to a member."""

    def __init__(self, terms: Terms, run: str) -> None:
        self.terms, self.run = terms, run
        self.session = os.urandom(16).hex()
        self.manifest: Manifest | None = None
        self._messages: dict[int, dict[str, bytes]] = {member.point: {} for member in terms.roster}
        self._delivered: dict[int, set[str]] = {member.point: set() for member in terms.roster}
        self._sent: dict[int, set[str]] = {}
        self._finished: set[int] = set()

    def turn(self, point: int | None) -> tuple[Config, dict[str, NDArray[Any]]]:
        """What to send to a member now; `None` for a node that has not said yet which member it is."""
        arrays: dict[str, NDArray[Any]] = {"terms": np.frombuffer(self.terms.to_bytes(), np.uint8)}
        config: Config = {"session": self.session, "run": self.run}
        if point is not None:
            config["have"] = json.dumps(sorted(self._messages[point]))
            self._sent[point] = set()
            for name, message in self._for(point).items():
                arrays[MESSAGE + name] = np.frombuffer(message, np.uint8)
                self._sent[point].add(name)
        return config, arrays

    def _for(self, point: int) -> dict[str, bytes]:
        """Everybody's open messages, and those to this member, that it was not sent yet."""
        found = {}
        for sender, messages in self._messages.items():
            for name, message in messages.items():
                recipient = name.partition("-to-")[2].removesuffix(".msg")
                wanted = sender != point and recipient in ("", str(point))
                if wanted and name not in self._delivered[point]:
                    found[name] = message
        return found

    def take(self, point: int, node: str, config: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """A member's reply to its turn."""
        introduced(self.terms.digest(), self.terms, self.run, point, node, config["introduction"])
        self._delivered[point] |= self._sent.pop(point, set())
        for name, message in arrays.items():
            text = name.removeprefix(MESSAGE)
            if int(text.partition("/")[2].partition("-to-")[0].removesuffix(".msg")) != point:
                raise MessageError(f"{self.terms.member(point).name!r} sends a message of another member")
            self._messages[point][text] = bytes(message.tobytes())
        if "manifest" in config:
            manifest = Manifest.from_bytes(config["manifest"])
            if self.manifest is not None and manifest.digest() != self.manifest.digest():
                raise CeremonyError("two members ended with different manifests: discard this ceremony and start anew")
            self.manifest = manifest
            self._finished.add(point)

    @property
    def progress(self) -> tuple[int, int]:
        """How many messages there are, and how many members have the manifest."""
        return sum(len(messages) for messages in self._messages.values()), len(self._finished)

    @property
    def finished(self) -> bool:
        return self.manifest is not None and len(self._finished) == self.terms.members
