"""What an engine's server must offer, so that ceremonies, rounds and queries can run over it (docs/engines.md).

A `Wire` sends a config and arrays to nodes and collects what they reply. Nodes are numbers here; what the engine calls
them, and what members sign when they introduce themselves, is their `label`.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Protocol

from numpy.typing import NDArray

from quorumark.canonical import digest
from quorumark.consortium.records import Manifest
from quorumark.errors import RoundError
from quorumark.field import Stream
from quorumark.refusals import Refusal, listed

__all__ = ["Deadline", "Reply", "Sent", "Together", "Wire", "introduction"]

Config = dict[str, Any]
_GRACE = 2.0  # seconds


@dataclass(frozen=True, eq=False)
class Sent:
    """A message to a node. `beside` is what an engine's own training sends with it."""

    config: Config
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    beside: Any = None


@dataclass(frozen=True, eq=False)
class Reply:
    """What a node replied: this project's config (empty if it sent none) and arrays, and what the engine's own training
    sends back beside it. `error` and `code` where the engine says that the node failed, or that it replied something
    else."""

    config: Config = field(default_factory=dict)
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    beside: Any = None
    error: str = ""
    code: Refusal = "node.failed"

    @property
    def has_failed(self) -> bool:
        """A process that died, a full disk: it may work when it is asked again."""
        return "failed" in self.config or (bool(self.error) and self.code == "node.failed")

    def accepted(self) -> Config:
        """The config, unless the node failed or refuses."""
        if self.error:
            raise RoundError(self.error, code=self.code)
        if "failed" in self.config:
            raise RoundError(f"its node failed: {self.config['failed']}", code="node.failed")
        if "refused" in self.config:
            raise RoundError(str(self.config["refused"]), code=listed(self.config.get("code"), "node.refused"))
        return self.config


class Wire(Protocol):
    """An engine's connection to its nodes. `run` names the engine's run or job; `down` and `up` count bytes."""

    run: str
    down: int
    up: int

    def label(self, node: int) -> str:
        """What the engine calls a node."""

    def present(self, count: int, timeout: float) -> list[int]:
        """The nodes that are connected, once there are so many or the time is over."""

    def exchange(
        self,
        sent: Mapping[int, Sent],
        timeout: float,
        doubtful: Container[int] = (),
        patience: float | None = None,
    ) -> dict[int, Reply]:
        """Sends to nodes and collects the replies, until all came or the time is over. For `doubtful` nodes, which were
        silent before, nobody waits much longer than for the others. With `patience`, once more than half have replied,
        the others get that many times as long as those took."""


class Together(Protocol):
    """A wire in whose process the members of a simulation are served."""

    @property
    def serves_all(self) -> bool:
        """Whether each node that took part in a round so far has a member who is served here."""

    def noise(
        self, nodes: Iterable[int], manifest: Manifest, state: bytes, members: tuple[int, ...]
    ) -> list[tuple[Fraction, Stream]]:
        """What members added to the sum over `members` from a state, as `round.member.RoundMember.noise` says it: of
        those nodes that are served here. Secret."""


def introduction(about: bytes, run: str) -> tuple[str, str, str]:
    """Consortium, session and step of the message in which a member says which node of a run is its own."""
    return about.hex(), digest("engine run", run.encode()).hex(), "engine/node"


class Deadline:
    """When a server stops waiting for nodes, by the rules of `Wire.exchange`."""

    def __init__(
        self, nodes: Iterable[int], timeout: float, doubtful: Container[int] = (), patience: float | None = None
    ) -> None:
        self._nodes, self._doubtful, self._patience = set(nodes), doubtful, patience
        self._began = time.monotonic()
        self._end, self._half = self._began + timeout, False
        self._hurried = all(node in doubtful for node in self._nodes)

    def has_passed(self, replied: Collection[int]) -> bool:
        """Whether nobody waits any longer, now that these nodes have replied."""
        now = time.monotonic()
        taken, waiting = now - self._began, self._nodes.difference(replied)
        if self._patience is not None and not self._half and 2 * len(replied) > len(self._nodes):
            self._half = True
            self._end = min(self._end, self._began + max(self._patience * taken, taken + _GRACE))
        if not self._hurried and all(node in self._doubtful for node in waiting):
            self._hurried, self._end = True, min(self._end, now + _GRACE + taken / 2)
        return not waiting or now > self._end
