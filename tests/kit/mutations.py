"""Ways to damage a file or a message, each drawn from a seeded generator: bytes, JSON, archives, what lies at a path.

A mutator gives the damaged bytes, or None where it does not apply. JSON is often inside something else: `Wrap` says how
to take it out and how to put it back with lengths that are right, so that what is inside is reached.
"""

from __future__ import annotations

import base64
import copy
import gzip
import io
import json
import lzma
import os
import pickle
import random
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quorumark.checks import DAMAGED

Mutator = Callable[[random.Random, bytes], bytes | None]


# --- bytes ------------------------------------------------------------------------------------------------


def flip(rng: random.Random, data: bytes) -> bytes | None:
    if not data:
        return None
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def extend(rng: random.Random, data: bytes) -> bytes:
    more = rng.choice((b"\0", b"\n", b" ", rng.randbytes(rng.choice((1, 7, 64, 5000))), data))
    return data + more if rng.random() < 0.7 else more + data


def move(rng: random.Random, data: bytes) -> bytes | None:
    """A piece is repeated, dropped, cleared or put elsewhere."""
    if len(data) < 2:
        return None
    start = rng.randrange(len(data))
    stop = min(len(data), start + rng.choice((1, 2, 4, 8, 32, 512, len(data))))
    piece, rest = data[start:stop], data[:start] + data[stop:]
    place = rng.randrange(len(rest) + 1)
    return rng.choice(
        (
            data[:stop] + piece + data[stop:],
            rest,
            data[:start] + bytes(len(piece)) + data[stop:],
            rest[:place] + piece + rest[place:],
        )
    )


def lengths(rng: random.Random, data: bytes) -> bytes | None:
    """A word of 4 or 8 bytes, which may be a length, gets another value; most lengths are at the beginning."""
    size = rng.choice((4, 8))
    if len(data) < size:
        return None
    place = rng.choice((0, 0, 4, 8, rng.randrange(len(data) - size + 1)))
    if place + size > len(data):
        place = 0
    value = rng.choice((0, 1, 0x7F, 0xFFFF, 1 << 20, 1 << 28, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, (1 << 64) - 1))
    word = (value & ((1 << 8 * size) - 1)).to_bytes(size, rng.choice(("big", "little")))
    return data[:place] + word + data[place + size :]


BYTES: tuple[Mutator, ...] = (flip, flip, cut, extend, move, lengths)


# --- JSON -------------------------------------------------------------------------------------------------

_RAW = "@@raw@@"  # stands for text that json cannot write


def _odd(rng: random.Random) -> Any:
    """A value that is not what was there."""
    return rng.choice(
        (
            None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, -(2**63), 10**30, 10**400, 0.5, 1e308, float("nan"),
            float("inf"), "", " ", "0", "-1", "1e9", "00" * 32, "ab" * 64, "../../../outside", "/etc/passwd", "a\0b",
            "\n", "\ud800", "٣", "x" * 70_000, "é" * 200, [], {}, [[]], [None], [0] * 1000, [True], {"": None},
            {"x-y": 1}, {"format": "quorumark-terms/v1"}, _RAW + "9" * 5000, _RAW + "[" * 2000 + "]" * 2000,
            _RAW + "[" * 100_000 + "]" * 100_000, _RAW + '{"a":' * 3000 + "1" + "}" * 3000, _RAW + '{"a":1,"a":2}',
            _RAW + "1.0", _RAW + "1E2", _RAW + '"\\u0041"', _RAW + "-0", [rng.randrange(100) for _ in range(5)],
        )
    )  # fmt: skip


def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every place of a JSON value: (what holds it, key or index)."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in inner:
        found.append((value, key))
        _places(child, found)
    return found


def _near(rng: random.Random, value: Any) -> Any:
    """Something of the same type that is not the same."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + rng.choice((-1, 1, 2**32))
    if isinstance(value, str) and value:
        place = rng.randrange(len(value))
        return value[:place] + rng.choice("0123456789abcdef.-/ xZ") + value[place + 1 :]
    if isinstance(value, list) and value:
        chosen = list(value)
        rng.choice((chosen.pop, chosen.reverse, lambda: chosen.append(chosen[0]), lambda: rng.shuffle(chosen)))()
        return chosen
    return _odd(rng)


def _written(rng: random.Random, body: Any, plain: bool) -> bytes:
    if plain:
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    else:
        text = json.dumps(body, indent=rng.choice((None, 1)), ensure_ascii=rng.random() < 0.5)
    start = text.find(f'"{_RAW}')
    if start >= 0:
        stop = text.index('"', start + 1)
        while text[stop - 1] == "\\":
            stop = text.index('"', stop + 1)
        text = text[:start] + json.loads(text[start : stop + 1]).removeprefix(_RAW) + text[stop + 1 :]
    return text.encode("utf-8", "surrogatepass")


def in_json(rng: random.Random, data: bytes) -> bytes | None:
    """One or two changes to a JSON value: other types, near values, missing, added, renamed and moved fields."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return None
    for _ in range(rng.choice((1, 1, 1, 2))):
        places = _places(body, [])
        what = rng.randrange(9)
        if not places or what == 0:
            return _written(rng, _odd(rng), True)
        holder, key = rng.choice(places)
        if what <= 3:
            holder[key] = _odd(rng)
        elif what <= 5:
            holder[key] = _near(rng, holder[key])
        elif what == 6:
            del holder[key]
        elif what == 7 and isinstance(holder, dict):
            name = rng.choice((f"{key}x", "x-new", "new", "__class__", "", "x-\ud800"))
            holder[name] = holder.pop(key) if rng.random() < 0.5 else 1
        else:
            other, place = rng.choice(places)
            try:
                holder[key], other[place] = copy.deepcopy(other[place]), copy.deepcopy(holder[key])
            except (KeyError, IndexError, RecursionError):
                holder[key] = None
    try:
        return _written(rng, body, rng.random() < 0.8)
    except RecursionError:
        return None


@dataclass(frozen=True)
class Wrap:
    """JSON inside of other bytes: `out` takes it out, `back` puts it back."""

    out: Callable[[bytes], bytes]
    back: Callable[[bytes, bytes], bytes]

    def __call__(self, rng: random.Random, data: bytes) -> bytes | None:
        try:
            inner = in_json(rng, self.out(data))
            return None if inner is None else self.back(data, inner)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):  # an earlier mutation nested it deeply
            return None


def _headed(size: int, order: str) -> Wrap:
    """A length of so many bytes, JSON of that length, and the rest."""

    def out(data: bytes) -> bytes:
        return data[size : size + int.from_bytes(data[:size], order)]  # type: ignore[arg-type]

    def back(data: bytes, inner: bytes) -> bytes:
        rest = data[size + int.from_bytes(data[:size], order) :]  # type: ignore[arg-type]
        return len(inner).to_bytes(size, order) + inner + rest  # type: ignore[arg-type]

    return Wrap(out, back)


HEADED, FRAMED, SAFETENSORS = _headed(4, "big"), _headed(8, "big"), _headed(8, "little")
PAYLOAD = Wrap(
    lambda data: base64.b64decode(json.loads(data)["payload"]),
    lambda data, inner: json.dumps({**json.loads(data), "payload": base64.b64encode(inner).decode()}).encode(),
)


def in_lines(rng: random.Random, data: bytes) -> bytes | None:
    """JSON lines: one is changed, dropped, repeated, or put elsewhere."""
    lines = data.split(b"\n")
    if len(lines) < 2:
        return None
    place = rng.randrange(len(lines) - 1)
    what = rng.randrange(4)
    if what == 0:
        return b"\n".join(lines[:place] + lines[place + 1 :])
    if what == 1:
        return b"\n".join([*lines[:place], lines[place], *lines[place:]])
    if what == 2:
        rng.shuffle(lines)
        return b"\n".join(lines)
    changed = in_json(rng, lines[place])
    return None if changed is None else b"\n".join([*lines[:place], changed, *lines[place + 1 :]])


def in_text(rng: random.Random, data: bytes) -> bytes | None:
    """TOML: the value of a line is another one, or the line is gone or there twice."""
    lines = data.split(b"\n")
    places = [i for i, line in enumerate(lines) if b"=" in line]
    if not places:
        return None
    place = rng.choice(places)
    name = lines[place].split(b"=")[0]
    values = [b"1", b"-1", b"[]", b"{}", b'""', b"true", b"1e400", b"nan", b"[[1]]", b'"x"', b"9" * 400, b"1979-05-27"]
    values += [b"[" * 3000 + b"]" * 3000, b"[1, 'a', {}]", b'"../../outside"', b"[0.5, 1.5]", b"10" * 10]
    lines[place] = rng.choice((name + b"= " + rng.choice(values), name + b"= " + rng.choice(values), b"", b"zz = 1"))
    return b"\n".join(lines)


# --- archives and pickles ---------------------------------------------------------------------------------


class Calls:
    """Pickles to a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def evil_pickle(rng: random.Random, marker: Path) -> bytes:
    """A pickle that makes the folder `marker` if it is ever loaded, or takes gigabytes."""
    call = rng.choice(
        (
            Calls(os.mkdir, str(marker)), Calls(eval, f"__import__('os').mkdir({str(marker)!r})"),
            Calls(os.system, f"mkdir '{marker}'"), Calls(bytearray, 1 << 33), [Calls(os.mkdir, str(marker))],
        )
    )  # fmt: skip
    return pickle.dumps({"w": call}, protocol=rng.choice((0, 2, 4)))


def in_tar(rng: random.Random, data: bytes) -> bytes | None:
    """Another entry, of any kind and name; or the whole of it compressed."""
    what = rng.randrange(8)
    if what == 0:
        return gzip.compress(data, 1)
    if what == 1:
        return lzma.compress(data, preset=0)
    buffer = io.BytesIO(data)
    names = (
        "rules.json",
        "/nowhere/outside",
        "../outside",
        "consortia/../../outside",
        "member.json",
        "x" * 300,
        "a/b",
    )
    entry = tarfile.TarInfo(rng.choice(names))
    entry.type = rng.choice(
        (tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE)
    )
    entry.linkname = rng.choice(("/etc/passwd", "../outside", "identity.sealed"))
    form = rng.choice((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT))
    if what == 2:
        entry.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(1 << 35), "path": "rules.json"}
        form = tarfile.PAX_FORMAT
    content = b"{}" if entry.isreg() else b""
    entry.size = len(content)
    try:
        with tarfile.open(fileobj=buffer, mode="a", format=form) as archive:
            archive.addfile(entry, io.BytesIO(content))
    except (tarfile.TarError, ValueError):
        return None
    made = bytearray(buffer.getvalue())
    if what == 3:  # an entry that says that it is sparse, with a checksum that is right
        made[156:157] = tarfile.GNUTYPE_SPARSE
        made[483:495] = b"77777777777\0"
        made[148:156] = b"%06o\0 " % (256 + sum(made[:148]) + sum(made[156:512]))
    if what == 4:
        made[124:136] = rng.choice((b"77777777777\0", b"\x80" + b"\xff" * 11, b"-0000000001\0", b"\xff" * 12))
        made[148:156] = b"%06o\0 " % (256 + sum(made[:148]) + sum(made[156:512]))
    return bytes(made)


def in_zip(marker: Path) -> Mutator:
    """A member of a zip file is another one: longer than memory, pickled, repeated, elsewhere, or damaged itself."""

    def mutate(rng: random.Random, data: bytes) -> bytes | None:
        buffer = io.BytesIO()
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as old:
                entries = [(info.filename, old.read(info)) for info in old.infolist()]
        except DAMAGED:
            return None
        place = rng.randrange(len(entries))
        name, content = entries[place]
        pack = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA))
        what = rng.randrange(7)
        if what == 0:
            content += bytes(1 << 24)
        elif what == 1:
            content = evil_pickle(rng, marker)
        elif what == 2:
            name = rng.choice(("../outside", "/nowhere/outside", "x" * 300, "a\0b", entries[0][0]))
        elif what == 3:
            text = b"{'descr': '<f4', 'fortran_order': False, 'shape': (%s,), }" % rng.choice(
                (b"1" + b"0" * 12, b"-1", b"2, " * 200, b"1" + b"0" * 30, b"(", b"__import__('os')")
            )
            content = b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text + content
        elif what == 4:
            content = b"\x93NUMPY\1\0" + b"\x46\0{'descr': '|O', 'fortran_order': False, 'shape': (1,), }" + b" " * 14
            content += evil_pickle(rng, marker)
        else:
            content = (rng.choice(BYTES)(rng, content) or b"") if content else b"x"
        entries[place] = name, content
        if what == 5:
            entries.append(entries[0])
        with zipfile.ZipFile(buffer, "w", pack) as new:
            for each, body in entries:
                new.writestr(zipfile.ZipInfo(each), body, pack)
        return buffer.getvalue()

    return mutate


def as_pickle(marker: Path) -> Mutator:
    return lambda rng, _: evil_pickle(rng, marker)


# --- what lies at a path ----------------------------------------------------------------------------------


def replaced(rng: random.Random, path: Path) -> None:
    """Something else lies there: a pipe, a device, a folder, a link that leads nowhere or to itself, a hole."""
    path.unlink(missing_ok=True)
    what = rng.randrange(7)
    if what == 0:
        os.mkfifo(path)
    elif what == 1:
        path.symlink_to(rng.choice(("/dev/zero", "/dev/random", "/dev/null", "/dev/full")))
    elif what == 2:
        path.mkdir()
    elif what == 3:
        path.symlink_to(path.name)
    elif what == 4:
        path.symlink_to("/nowhere/at/all")
    elif what == 5:
        with path.open("wb") as file:
            file.truncate(1 << rng.choice((20, 27, 34, 40)))
