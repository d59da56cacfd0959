"""Canonical bytes and digests (docs/format.md): every record is JSON with one spelling, and is read strictly."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from quorumark.errors import InputError, RecordError

__all__ = ["canonical", "digest", "parse", "read_json", "started"]


def canonical(value: Any) -> bytes:
    """JSON with sorted keys, no spaces, UTF-8. Floats are refused: they have no one spelling."""
    _refuse_floats(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _refuse_floats(value: Any) -> None:
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
    """JSON with no field twice, no fractions and no text that has no bytes; anything else is a RecordError."""
    try:
        body = json.loads(data, object_pairs_hook=_no_duplicates, parse_float=_no_float, parse_constant=_no_float)
        canonical(body)  # every text must have bytes: no lone surrogates
    except (ValueError, RecursionError) as error:
        raise RecordError(f"this is not {what}: not JSON that can be read ({type(error).__name__})") from None
    return body


def parse(data: bytes, expected: str, what: str) -> dict[str, Any]:
    """The JSON object in canonical bytes of one format; anything else is a RecordError that says what is wrong."""
    body = read_json(data, what)
    if not isinstance(body, dict) or not isinstance(body.get("format"), str):
        raise RecordError(f"this is not {what}: it names no format")
    if body["format"] != expected:
        raise RecordError(f"this is not {what} that this release reads: format {body['format']!r}, not {expected!r}")
    return body


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) != len(pairs):
        raise ValueError("a field twice")
    return body


def _no_float(text: str) -> None:
    raise ValueError(f"a fraction: {text}")
