"""Canonical bytes and digests (docs/format.md): every record is JSON with one spelling, and is read strictly."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from quorumark.errors import InputError, RecordError

__all__ = ["canonical", "digest", "parse", "read_json", "started"]


def canonical(value: Any) -> bytes:
    """JSON with keys in code-point order, no spaces, UTF-8. Floats are refused: they have no one spelling."""
    _refuse_floats(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


_PLAIN = frozenset({str, int, bool, type(None)})


def _refuse_floats(value: Any) -> None:
    if type(value) in _PLAIN:
        return
    if type(value) is dict and _PLAIN.issuperset(map(type, value.values())) and {str}.issuperset(map(type, value)):
        return  # the usual case at the speed of C: records hold long lists of numbers
    if type(value) in (list, tuple) and _PLAIN.issuperset(map(type, value)):
        return
    if isinstance(value, float):
        raise InputError("value", "must not be a float: write it as a text", repr(value))
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise InputError("key", "must be a text", repr(key))
            _refuse_floats(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _refuse_floats(inner)


def digest(domain: str, *parts: bytes | memoryview) -> bytes:
    """SHA-256 over a domain and length-prefixed parts: no two lists of parts collide."""
    return started(domain, *parts).digest()


def started(domain: str, *parts: bytes | memoryview) -> hashlib._Hash:
    hashed = hashlib.sha256(b"quorumark/v1")
    for part in (domain.encode(), *parts):
        hashed.update(len(part).to_bytes(8, "big"))
        hashed.update(part)
    return hashed


def read_json(data: bytes, what: str) -> Any:
    """JSON in UTF-8 with no field twice, no fractions and no lone surrogates; anything else is a RecordError.

    Spaces, the order of fields and escapes are free here: `parse` is for what has one spelling.
    """
    return _read(data, what)[0]


def parse(data: bytes, expected: str, what: str, *, by_hand: bool = False) -> dict[str, Any]:
    """The fields of a record in canonical bytes, without `format`; anything else is a RecordError.

    `by_hand`: a file that a person writes, where spaces and the order of fields are free.
    """
    body, spelling = _read(data, what)
    if not isinstance(body, dict) or not isinstance(body.get("format"), str):
        raise RecordError(f"this is not {what}: it names no format")
    named = body.pop("format")
    if named != expected:
        raise RecordError(f"this is not {what} that this release reads: format {named!r}, not {expected!r}")
    if not by_hand and spelling != data:
        raise RecordError(
            f"this is not {what} in canonical bytes: its fields are out of order, or it has spaces, line breaks or "
            "another spelling of a string or number; take the file as it was written"
        )
    return body


def _read(data: bytes, what: str) -> tuple[Any, bytes]:
    """The JSON value, and its canonical bytes."""
    try:
        # decoded here: json.loads takes bytes for UTF-16 or UTF-32 where they look like it, and passes over a BOM
        text = str(data, "utf-8")
        body = json.loads(text, object_pairs_hook=_no_duplicates, parse_float=_no_float, parse_constant=_no_float)
        return body, canonical(body)  # a lone surrogate has no bytes
    except (ValueError, RecursionError) as error:
        raise RecordError(f"this is not {what}: not JSON that can be read ({type(error).__name__})") from None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) != len(pairs):
        raise ValueError("a field twice")
    return body


def _no_float(text: str) -> None:
    raise ValueError(f"a fraction: {text}")
