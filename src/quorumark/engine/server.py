"""The server's side of rounds and ceremonies, whatever carries the messages (docs/engines.md).

    server = RoundServer(manifest, layout, run="17")
    each round:
        config, arrays = server.offer(round_no, model)            # to everybody, with the model
        server.take_ready(point, message)                         # from everybody who trained
        announcement = server.announce()                          # to server.members
        server.take_upload(point, head, vector)
        while server.missing: announcement = server.retry()       # to server.members again
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

from quorumark import codec
from quorumark.embed import Amplitudes, MarkState, norm_count
from quorumark.engine.member import MESSAGE, Config, introduction
from quorumark.errors import CeremonyError, MessageError, RecordError, RoundError
from quorumark.federation import History, group_of
from quorumark.field import Vector
from quorumark.identity import Header, open_message
from quorumark.keystore import replacing, write_private
from quorumark.layout import ModelLayout, read_safetensors, write_safetensors
from quorumark.records import Manifest, Terms, canonical, parse
from quorumark.secagg import SecAggServer, Upload

__all__ = ["CeremonyServer", "RoundServer", "introduced"]

Weights = Mapping[str, NDArray[Any]]
_RUN = "quorumark-engine-run/v1"


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
            before = self.history.mark.round
            accepted, embedded, norms = self._pending
            self.history.accept(accepted, encoded, embedded, norms)
            self._before, self._norms, self._pending = before, norms, None
        self.round_no += 1
        self._save(model)
        history = self.history
        if history.warming and self.round_no > history.strength.warmup_rounds:
            raise RoundError("the warm-up rounds are over: all members must sign the amendment that names the anchor")
        self._amplitudes = history.amplitudes(self.round_no)
        length = self.layout.size + (norm_count(self.layout) if history.strength.needs_norms else 0)
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
        return config, arrays

    @property
    def anchor(self) -> Vector:
        """For members who join a run that is under way and never saw it."""
        return self._anchor

    def take_ready(self, point: int, message: bytes) -> None:
        self._running().take_ready(point, message)

    def announce(self) -> bytes:
        return self._running().announce()

    def take_upload(self, point: int, head: bytes, vector: Vector) -> int:
        """How many bytes it was."""
        self._running().take_upload(point, Upload(head, vector))
        return len(head) + vector.nbytes

    def retry(self) -> bytes:
        return self._running().retry()

    def request(self, point: int) -> bytes:
        return self._running().request(point)

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
        norms = opened[size:].copy() if history.strength.needs_norms else None
        vector = codec.decode(opened[:size], self.layout.dtype)
        weights: dict[str, NDArray[Any]] = self.layout.unflatten(vector, self.like)
        codec.encode(self.layout.flatten(weights), name="the opened sum")
        amplitudes = self._amplitudes
        embedded = amplitudes if amplitudes is not None and amplitudes.marks else None
        history.mark._checked_norms(norms, embedded)
        self._pending = self.round_no, embedded, norms
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
            accepted, embedded, norms = self._pending
            self._before, self._norms, self._pending = self.history.mark.round, norms, None
            self.history.accept(accepted, self.layout.encode(model), embedded, norms)
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
        body = {
            "format": _RUN,
            "manifest": self.manifest.digest().hex(),
            "round": self.round_no,
            "model": name,
            "mark": self.history.mark.to_bytes().decode(),
        }
        write_private(self._folder / "run.json", canonical(body))
        for old in self._folder.glob("model-*.safetensors"):
            if old.name != name:
                old.unlink()

    def _resume(self) -> None:
        assert self._folder is not None  # noqa: S101
        body = parse((self._folder / "run.json").read_bytes(), _RUN, "a run's state")
        if body.get("manifest") != self.manifest.digest().hex():
            raise RecordError(f"{str(self._folder)!r} holds a run under another manifest: use a new folder")
        try:
            kept = read_safetensors(self._folder / body["model"])
            self.resumed = {name: np.array(kept[name]) for name in self.like}
            self._anchor = np.load(self._folder / "anchor.npy")
            self.history = History(self.manifest, self.layout, self._anchor)
            model = self.layout.encode(self.resumed)
            start = model if self.history.warming else self._anchor
            key = self.manifest.terms.key
            state = body["mark"].encode()
            strength = self.history.strength
            self.history.mark = MarkState.from_bytes(state, strength, self.layout, key, model, start)
            # a round that was under way when the server died is lost: members may have joined it
            self.round_no = max(self.round_no, int(body["round"]))
        except (KeyError, TypeError, ValueError, OSError) as error:
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
