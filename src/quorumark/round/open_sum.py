"""A sum whose members were asked to answer, as its server keeps it: what it takes to ask them again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quorumark.canonical import canonical
from quorumark.consortium.records import Manifest
from quorumark.errors import RecordError
from quorumark.files import replacing
from quorumark.round.amplitudes import Amplitudes
from quorumark.round.group import group_of
from quorumark.round.history import History
from quorumark.round.secagg.server import SecAggServer

__all__ = ["OpenSum", "octets"]


@dataclass(frozen=True, eq=False)
class OpenSum:
    server: SecAggServer
    halvings: int
    manifest: Manifest
    amplitudes: Amplitudes | None

    def save(self, path: Path, state: bytes) -> None:
        """Before the first request. `state` is what the round started from."""
        head, vector = self.server.kept()
        under = self.manifest.digest().hex()
        about = canonical({"state": state.hex(), "halvings": self.halvings, "under": under})
        with replacing(path) as file:
            np.savez(file, about=octets(about), head=octets(head), vector=vector)

    @classmethod
    def read(cls, path: Path, history: History, manifests: Sequence[Manifest], *, marks: bool) -> OpenSum | None:
        """The sum that was left open from the present state, if it is of that one."""
        if not path.exists():
            return None
        if not path.is_file():
            raise RecordError(f"{str(path)!r} is no file")
        with path.open("rb") as file, np.load(file) as found:
            about = json.loads(found["about"].tobytes())
            under = next(m for m in manifests if m.digest().hex() == about["under"])
            if about["state"] != history.state.hex():
                return None
            server = SecAggServer.reopened(group_of(under), found["head"].tobytes(), found["vector"])
        amplitudes = history.amplitudes_under(under, int(about["halvings"])) if marks else None
        return cls(server, int(about["halvings"]), under, amplitudes)


def octets(content: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(content, np.uint8)
