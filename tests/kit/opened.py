"""What a server reads from the sum that it opened, however many weights an element has."""

from __future__ import annotations

from quorumark import packing
from quorumark.field import Vector
from quorumark.round.server import RoundServer


def summed(server: RoundServer) -> Vector:
    """E of the sum of the members' models, before the server has accepted it."""
    mark, size = server.history.mark, server.layout.size
    opened = server.opened[: mark.packing.length(server.layout)]
    if not mark.packing.packs:
        return opened.copy()
    moves, _ = packing.unpack(opened, size, mark.spans(server.level), mark.packing.count)
    return packing.move(mark.model, moves)


def summed_norms(server: RoundServer) -> Vector:
    """The norms beside it."""
    start = server.history.mark.packing.length(server.layout)
    return server.opened[start : server.opened.size - server.checks].copy()
