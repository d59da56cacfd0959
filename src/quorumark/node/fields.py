"""What a server sends to a member, read by type: it may send anything (docs/engines.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark import field
from quorumark.checks import is_hex
from quorumark.errors import MessageError
from quorumark.field import Vector
from quorumark.model.layout import ModelLayout
from quorumark.round.units import is_level

__all__ = ["read_content", "read_count", "read_digest", "read_elements", "read_held", "read_level", "read_text"]

Config = dict[str, Any]


def read_count(config: Mapping[str, Any], name: str) -> int:
    value = config[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise MessageError(
            f"the server's message must give {name!r} as an integer of at least 0", code="message.malformed"
        )
    return value


def read_text(config: Mapping[str, Any], name: str, kind: Any) -> Any:
    value = config[name]
    if not isinstance(value, kind):
        raise MessageError(f"the server's message must give {name!r} as {kind.__name__}", code="message.malformed")
    return value


def read_held(config: Mapping[str, Any]) -> list[str]:
    try:
        held = json.loads(config["sum-held"])
    except (ValueError, TypeError, RecursionError):
        held = None
    if not isinstance(held, list) or not all(isinstance(name, str) for name in held):
        raise MessageError(
            "the server's message must give 'sum-held' as names of tensors in JSON", code="message.malformed"
        )
    return held


def read_content(array: NDArray[Any]) -> bytes:
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.ndim != 1:
        raise MessageError("the server's message must hold its files as bytes", code="message.malformed")
    return array.tobytes()


def read_elements(array: NDArray[Any], size: int, what: str) -> Vector:
    if not isinstance(array, np.ndarray) or array.dtype != np.uint64 or array.shape != (size,):
        raise MessageError(f"the server's message must hold {what} as {size} field elements", code="message.malformed")
    field.check(array, what)
    return np.ascontiguousarray(array)


def read_digest(config: Mapping[str, Any], name: str) -> bytes:
    if not is_hex(config[name], 32):
        raise MessageError(f"the server's message must give {name!r} as 32 bytes in hex", code="message.malformed")
    return bytes.fromhex(config[name])


def read_level(config: Mapping[str, Any], layout: ModelLayout) -> bytes:
    """Of the units of a sum: a byte for each tensor, in hex, or none."""
    try:
        level = bytes.fromhex(read_text(config, "sum-level", str))
    except ValueError:
        level = b"?"
    if not is_level(level) or len(level) not in (0, sum(1 for _ in layout.spans())):
        raise MessageError("the server's message must give 'sum-level' as a level of units", code="message.malformed")
    return level
