"""The server's side of a key ceremony, whatever carries the messages (docs/engines.md)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark.consortium.identity import Header, open_message
from quorumark.consortium.records import Manifest, Terms
from quorumark.errors import CeremonyError, MessageError
from quorumark.node.outside import MESSAGE, Config
from quorumark.node.wire import introduction

__all__ = ["CeremonyServer", "check_introduction"]


def check_introduction(about: bytes, roster: Terms, run: str, point: int, node: str, message: bytes) -> None:
    """Whether a node is the member that it says it is: only that member can have signed this node and run."""
    if open_message(message, roster, Header(*introduction(about, run), point)) != node.encode():
        raise MessageError(
            f"node {node} shows the introduction of another node: start each member's node once",
            code="message.not-from-member",
        )


class CeremonyServer:
    """Relays the messages of a dealer-free setup. It cannot read those that are sealed to a member."""

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
        """The others' messages to everybody and to this member that it was not sent yet."""
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
        check_introduction(self.terms.digest(), self.terms, self.run, point, node, config["introduction"])
        self._delivered[point] |= self._sent.pop(point, set())
        for name, message in arrays.items():
            text = name.removeprefix(MESSAGE)
            if int(text.partition("/")[2].partition("-to-")[0].removesuffix(".msg")) != point:
                raise MessageError(
                    f"{self.terms.member(point).name!r} sends a message in another member's name: it is refused",
                    code="message.not-from-member",
                )
            self._messages[point][text] = bytes(message.tobytes())
        if "manifest" in config:
            manifest = Manifest.from_bytes(config["manifest"])
            if self.manifest is not None and manifest.digest() != self.manifest.digest():
                raise CeremonyError(
                    "two members ended with different manifests: discard this ceremony and start a new one",
                    code="ceremony.members-differ",
                )
            self.manifest = manifest
            self._finished.add(point)

    @property
    def progress(self) -> tuple[int, int]:
        """How many messages there are, and how many members have the manifest."""
        return sum(len(messages) for messages in self._messages.values()), len(self._finished)

    @property
    def finished(self) -> bool:
        return self.manifest is not None and len(self._finished) == self.terms.members
