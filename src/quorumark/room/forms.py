"""Forms as browsers send them to an agent's page: small ones, and one with files, which go to disk as they come."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO
from urllib.parse import parse_qs

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from quorumark.errors import RoomError
from quorumark.room.drafts import MOST_FILES, free_bytes, plain_name

__all__ = ["receive_files", "small_form"]

LARGEST_SUSPECT = 64 << 30
"""Bytes of all files that one question may have; the disk's free space counts as well."""
_LARGEST_FORM = 4096
_LARGEST_FIELD = 4096
_LARGEST_HEADER = 4096
_MOST_PARTS = MOST_FILES + 16


def _not_ours(code: str = "room.malformed") -> RoomError:
    return RoomError("this is no form of this page", code=code)


async def small_form(request: Request) -> dict[str, str]:
    """A small form as browsers send it by default."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/x-www-form-urlencoded":
        raise _not_ours()
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > _LARGEST_FORM:
            raise _not_ours("room.too-large")
        pieces.append(piece)
    found = parse_qs(b"".join(pieces).decode("ascii", "replace"))
    return {name: values[0] for name, values in found.items() if len(values) == 1}


async def receive_files(request: Request, field: str, folder: Path) -> dict[str, str]:
    """A form with files: those of `field` are written to `folder` while they arrive, the other fields returned."""
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 1 <= len(boundary) <= 200:
        raise _not_ours()
    most = min(LARGEST_SUSPECT, free_bytes(folder))
    said = request.headers.get("content-length", "0")
    if not said.isdecimal() or len(said) > 16 or int(said) > most:  # before the browser sends it all
        raise _too_large(most)
    form = _Form(field, folder, most)
    try:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": form.begin,
                "on_header_field": form.header_name,
                "on_header_value": form.header_value,
                "on_header_end": form.header_end,
                "on_headers_finished": form.headers_end,
                "on_part_data": form.data,
                "on_part_end": form.end,
                "on_end": form.finish,
            },
        )
        async for piece in request.stream():
            parser.write(piece)
        parser.finalize()
    except (FormParserError, ClientDisconnect):
        raise _not_ours() from None
    except OSError as error:
        raise RoomError(f"the file cannot be kept here: {error.strerror}", code="room.quota") from None
    finally:
        form.close()
    if not form.whole:
        raise _not_ours()
    return form.fields


def _too_large(most: int) -> RoomError:
    return RoomError(f"there is place for {most:,} bytes here: the model has more", code="room.too-large")


class _Form:
    """What a parser has found so far."""

    def __init__(self, field: str, folder: Path, most: int) -> None:
        self._field, self._folder, self._left = field, folder, most
        self.fields: dict[str, str] = {}
        self.whole = False
        self._parts = 0
        self._header: list[bytes] = [b"", b""]
        self._headers: dict[bytes, bytes] = {}
        self._name, self._text = "", b""
        self._file: BinaryIO | None = None

    def begin(self) -> None:
        self._parts += 1
        self._headers, self._header, self._text = {}, [b"", b""], b""
        if self._parts > _MOST_PARTS:
            raise _not_ours("room.too-large")

    def _grow(self, index: int, data: bytes) -> None:
        self._header[index] += data
        if len(self._header[index]) > _LARGEST_HEADER or len(self._headers) > 8:
            raise _not_ours("room.too-large")

    def header_name(self, data: bytes, start: int, end: int) -> None:
        self._grow(0, data[start:end])

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._grow(1, data[start:end])

    def header_end(self) -> None:
        self._headers[self._header[0].lower()] = self._header[1]
        self._header = [b"", b""]

    def headers_end(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        given = options.get(b"filename")
        if (given is not None) != (self._name == self._field):
            raise _not_ours()
        if given:
            path = self._folder / plain_name(given.decode("utf-8", "replace"))
            if path.exists():
                raise RoomError("two files have the same name: rename one", code="room.malformed")
            self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")

    def data(self, data: bytes, start: int, end: int) -> None:
        self._left -= end - start
        if self._left < 0:
            raise _too_large(0)
        if self._file is not None:
            self._file.write(data[start:end])
        elif self._name != self._field:
            self._text += data[start:end]
            if len(self._text) > _LARGEST_FIELD:
                raise _not_ours("room.too-large")

    def end(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self.close()
        elif self._name != self._field:
            if self._name in self.fields:
                raise _not_ours()
            self.fields[self._name] = self._text.decode("utf-8", "replace")

    def finish(self) -> None:
        self.whole = True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
