"""Flower's simulation: the stages of a sum are served in the server's own process.

Training is what Flower's backend runs, in Ray's actors, as it always does. Afterwards nothing of the app is run any
more: a member masks its vector, and answers. In a simulation all homes are on this machine and everybody is one user,
so that carrying these vectors through Ray, and the masks that two members share, hides nothing from anybody. Where all
members of a sum have homes that were made for a simulation, and their nodes say where those are, this process asks the
members itself. The models are the same to the bit; a node on a machine of its own never says where its home is.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from quorumark.consortium.home import HomeFolder
from quorumark.consortium.keystore import Unlock
from quorumark.consortium.records import Manifest
from quorumark.errors import QuorumarkError
from quorumark.field import Stream
from quorumark.flower.wire import FlowerWire
from quorumark.node.member import MemberNode, refused
from quorumark.node.wire import Reply, Sent

__all__ = ["CONSORTIUM", "HOME", "SimulationWire", "is_simulation"]

HOME, CONSORTIUM = "simulated-home", "simulated-consortium"
"""The fields of a reply to training in which a node says where its member's home is, and which consortium it serves."""

_SUMMING = {"upload", "unmask"}


def is_simulation(grid: Any) -> bool:
    """Whether a Grid is that of Flower's simulation, whose messages are in this process."""
    return hasattr(grid, "state")


class SimulationWire(FlowerWire):
    """The messages of a simulation."""

    def __init__(self, grid: Any, kind: str) -> None:
        super().__init__(grid, kind)
        self._here: dict[int, MemberNode] = {}
        self._elsewhere = set[int]()  # nodes whose members were ready, and are not served here

    def exchange(
        self,
        sent: Mapping[int, Sent],
        timeout: float,
        doubtful: Container[int] = (),
        patience: float | None = None,
    ) -> dict[int, Reply]:
        stages = {str(message.config.get("stage")) for message in sent.values()}
        if sent and stages <= _SUMMING and sent.keys() <= self._here.keys():
            return {node: self._serve(node, message) for node, message in sent.items()}
        replies = super().exchange(sent, timeout, doubtful, patience)
        if stages == {"train"}:
            for node, reply in replies.items():
                self._remember(node, str(reply.config.get(HOME, "")), str(reply.config.get(CONSORTIUM, "")))
                if "ready" in reply.config:
                    (self._elsewhere.discard if node in self._here else self._elsewhere.add)(node)
        return replies

    @property
    def serves_all(self) -> bool:
        return not self._elsewhere

    def noise(
        self, nodes: Iterable[int], manifest: Manifest, state: bytes, members: tuple[int, ...]
    ) -> list[tuple[Fraction, Stream]]:
        return [self._here[node].noise(manifest, state, members) for node in nodes if node in self._here]

    def _remember(self, node: int, home: str, consortium: str) -> None:
        """Every time anew: what a node said in an earlier round may not hold any more."""
        known, key = self._here.pop(node, None), Path(f"{home}.key")
        if home and key.is_file():
            made = MemberNode(HomeFolder(home), Unlock.key_file(key), consortium=consortium or None, together=True)
            self._here[node] = known if known is not None and known.simulated_home() == (home, consortium) else made

    def _serve(self, node: int, message: Sent) -> Reply:
        self.down += _size(message.config, message.arrays)
        try:
            config, arrays = self._here[node].handle(
                str(message.config["stage"]), {**message.config, "node": self.label(node)}, message.arrays
            )
        except QuorumarkError as error:
            config, arrays = refused(error), {}
        except Exception as error:  # noqa: BLE001 - a full disk, say: one member is out, as if its node had failed
            return Reply(error=f"its node failed: {type(error).__name__}: {error}")
        self.up += _size(config, arrays)
        return Reply(config, arrays)


def _size(config: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> int:
    """Bytes in a message, as if it had been sent."""
    told = sum(len(value) if isinstance(value, bytes | str) else 8 for value in config.values())
    return told + sum(array.nbytes for array in arrays.values())
