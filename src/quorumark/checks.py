"""What records check of themselves: small rules that several formats share."""

from __future__ import annotations

import lzma
import re
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from tokenize import TokenError
from typing import Any

from quorumark.errors import RecordError

__all__ = [
    "DAMAGED",
    "field_names",
    "is_count",
    "is_decimal",
    "is_hex",
    "is_name",
    "is_text",
    "is_time",
    "require",
    "take",
]

DAMAGED = (
    OSError, ValueError, TypeError, RuntimeError, EOFError, SyntaxError, MemoryError, OverflowError, TokenError,
    zipfile.BadZipFile, lzma.LZMAError, zlib.error,
)  # fmt: skip
"""What reading a damaged file of numpy's may raise: its header is read as Python text, and says how much there is."""


def require(good: bool, what: str, rule: str) -> None:
    """Raises a RecordError that says what breaks which rule."""
    if not good:
        raise RecordError(f"{what} {rule}")


def is_hex(value: object, size: int) -> bool:
    return isinstance(value, str) and re.fullmatch(f"[0-9a-f]{{{2 * size}}}", value) is not None


def is_count(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 100 and value.isprintable() and value == value.strip()


def is_text(value: object, most: int = 1000) -> bool:
    return isinstance(value, str) and len(value) <= most and (not value or value.isprintable())


def is_time(value: object) -> bool:
    """In UTC, like 2026-01-31T12:00:00Z."""
    return isinstance(value, str) and re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", value) is not None


def is_decimal(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,20}(\.[0-9]{1,18})?", value) is not None


def field_names(record: type[Any]) -> list[str]:
    """The fields of a dataclass, in order."""
    return [f.name for f in fields(record)]


def take(body: object, names: Sequence[str], what: str) -> dict[str, Any]:
    """Exactly these fields of a JSON object; others only if their name starts with x-."""
    if not isinstance(body, Mapping):
        raise RecordError(f"{what} must be a JSON object")
    missing = [name for name in names if name not in body]
    unknown = [name for name in body if name not in names and name != "format" and not name.startswith("x-")]
    if missing or unknown:
        problem = f"it lacks {missing[0]!r}" if missing else f"it has the unknown critical field {unknown[0]!r}"
        raise RecordError(f"this is not {what} that can be used: {problem}")
    return {name: body[name] for name in names}
