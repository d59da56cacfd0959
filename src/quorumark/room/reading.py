"""What a room reads of small files that it cannot check: nothing of another kind than their names say comes through."""

from __future__ import annotations

from typing import Any

from quorumark.canonical import read_json
from quorumark.errors import QuorumarkError

__all__ = ["integer_of", "message_body", "object_of", "roster_of", "text_of"]


def object_of(data: bytes) -> dict[str, Any]:
    try:
        body = read_json(data, "a notice")
    except QuorumarkError:
        return {}
    return body if isinstance(body, dict) else {}


def roster_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The members in a manifest's terms."""
    terms = body.get("terms")
    roster = terms.get("roster") if isinstance(terms, dict) else None
    return [one if isinstance(one, dict) else {} for one in (roster if isinstance(roster, list) else [])]


def text_of(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    return value[:500] if isinstance(value, str) else ""


def integer_of(body: dict[str, Any], name: str) -> int:
    value = body.get(name)
    return value if isinstance(value, int) else 0


def message_body(data: bytes) -> bytes:
    """What an open message says: length, header, signature of 64 bytes, body."""
    return data[4 + int.from_bytes(data[:4], "big") + 64 :]
