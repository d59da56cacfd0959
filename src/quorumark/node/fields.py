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

__all__ = [
    "Fields",
    "read_by_point",
    "read_content",
    "read_count",
    "read_digest",
    "read_elements",
    "read_held",
    "read_level",
    "read_names",
    "read_text",
    "with_prefix",
]

Config = dict[str, Any]
_TYPES: dict[type, set[str]] = {  # of the fields of a config; integers are read by `read_count`
    bytes: {"announcement", "boxes", "vouches", "request", "query", "certificate", "turn", "approval", "asked"},
    str: {"manifest", "run", "node", "joined", "session", "have", "requests", "state", "of-manifest"}
    | {"before", "after", "whole", "link"}
    | {"of-state", "sum-under", "sum-held", "sum-level", "settings", "nonces", "history", "names", "record"},
    bool: {"with-model", "with-share", "check-only", "measure", "noise-elsewhere"},
}


class Fields(dict[str, Any]):
    """The fields of a server's message: a missing one is the server's fault, not a KeyError of ours."""

    def __init__(self, stage: str, content: Mapping[str, Any]) -> None:
        super().__init__(content)
        self._stage = stage

    def __missing__(self, name: str) -> Any:
        raise MessageError(
            f"the server's message for the stage {self._stage!r} lacks {name!r}", code="message.incomplete"
        )

    def check_types(self) -> None:
        for kind, names in _TYPES.items():
            for name in names & self.keys():
                if not isinstance(self[name], kind):
                    raise MessageError(
                        f"the server's message for the stage {self._stage!r} must give {name!r} as {kind.__name__}, "
                        f"not {type(self[name]).__name__}",
                        code="message.malformed",
                    )
                if kind is str and any("\ud800" <= letter <= "\udfff" for letter in self[name]):
                    raise MessageError(
                        f"the server's message for the stage {self._stage!r} must give {name!r} as a string in UTF-8",
                        code="message.malformed",
                    )


def with_prefix(arrays: Mapping[str, NDArray[Any]], prefix: str) -> dict[str, NDArray[Any]]:
    """The arrays whose names begin with a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


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


def read_by_point(config: Config, name: str) -> dict[int, bytes]:
    """Bytes for members, in JSON: {point: hex}."""
    try:
        return {int(x): bytes.fromhex(text) for x, text in json.loads(config[name]).items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise MessageError(
            f"the server's message must give {name!r} as bytes by point, in JSON", code="message.malformed"
        ) from None


def read_names(config: Config, name: str) -> list[str]:
    """A list of names in JSON; empty if there is none."""
    try:
        found = json.loads(config.get(name, "[]"))
    except (ValueError, TypeError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(isinstance(entry, str) for entry in found):
        raise MessageError(
            f"the server's message must give {name!r} as a list of names in JSON", code="message.malformed"
        )
    return found
