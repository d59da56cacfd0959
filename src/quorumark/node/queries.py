"""A query as an engine carries it: the question, and every file that a member needs to compute x itself.

    config, arrays = pack_query(reference, suspect, query, audits)        # the asker
    with unpack_query(folder, arrays) as question: …                     # a member

    array              what it is
    suspect:NAME       the files of the suspect: one, or an index and its shards
    layout             layout.json
    anchor:NAME        the files of the anchor
    groups             groups.json, if the query is aligned
    lora               lora.json, if the query is about an adapter
    base:NAME          the files of the adapter's public base model, if the suspect is a whole model
    audit.0, audit.1…  proofs of the audits whose leaves the query leaves out
    after              the certificate of the plain query, if this one is by layers

A member takes nobody's word for any of them: the suspect must be the query's, and layout, anchor, groups, lora and base
must have the digests that the signed manifest names. Files that are not sent are read from the member's own folder,
beside its manifest, as `quorumark verify partial` does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark.align.lora import is_whole
from quorumark.consortium.home import ConsortiumFolder
from quorumark.errors import InputError, MessageError
from quorumark.model.layout import Source
from quorumark.model.suspect import Suspect, read_suspect
from quorumark.verify.certificate import Certificate
from quorumark.verify.evidence import Query
from quorumark.verify.proof import Audit
from quorumark.verify.query import how_aligned
from quorumark.verify.reference import GROUPS, LAYOUT, LORA, Reference

__all__ = ["Question", "pack_query", "unpack_query"]

Config = dict[str, Any]
Arrays = Mapping[str, NDArray[Any]]

SUSPECT, ANCHOR, BASE, AUDIT = "suspect:", "anchor:", "base:", "audit."
_RECORDS = {"layout": LAYOUT, "groups": GROUPS, "lora": LORA}
_MOST_FILES = 10_000


# --- the asker --------------------------------------------------------------------------------------------


def pack_query(
    reference: Reference,
    suspect: Suspect,
    query: Query,
    audits: Sequence[Audit] = (),
    *,
    with_base: bool = True,
    after: Certificate | None = None,
) -> tuple[Config, dict[str, NDArray[Any]]]:
    """What to send for the stage `answer`: only what this query needs. `with_base=False` where the members have an
    adapter's base model in their own folders: it may be large."""
    how = how_aligned(reference.manifest.terms, query.alignment)
    arrays = _packed(SUSPECT, suspect, "suspect") | _packed(ANCHOR, reference.anchor.model, "reference.anchor")
    arrays["layout"] = _octets(reference.layout.to_bytes())
    if how["align"] and reference.groups is not None:
        arrays["groups"] = _octets(reference.groups.to_bytes())
    if how["lora"] and reference.lora is not None:
        arrays["lora"] = _octets(reference.lora.to_bytes())
        whole = how["align"] or is_whole(suspect, reference.layout, reference.lora)
        if with_base and whole and reference.base_source is not None:
            arrays |= _packed(BASE, _opened(reference.base_source), "reference.base_source")
    arrays |= {f"{AUDIT}{number}": _octets(audit.to_bytes()) for number, audit in enumerate(audits)}
    if after is not None:
        arrays["after"] = _octets(after.to_bytes())
    return {"query": query.to_bytes()}, arrays


def _opened(source: Source | Suspect) -> Suspect:
    return source if isinstance(source, Suspect) else read_suspect(source)


def _packed(prefix: str, model: Suspect, argument: str) -> dict[str, NDArray[Any]]:
    if not model.paths:
        raise InputError(argument, "must be in files to be sent to members: save it first")
    return {prefix + path.name: _octets(path.read_bytes()) for path in model.paths}


def _octets(content: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(content, np.uint8)


# --- a member ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Question:
    """What a member was sent, as files that are there until the block of `unpack_query` ends."""

    reference: Reference
    suspect: Path
    audits: tuple[Audit, ...]
    after: Certificate | None = None


@contextmanager
def unpack_query(folder: ConsortiumFolder, arrays: Arrays) -> Iterator[Question]:
    """Writes what was sent into a folder of its own, and checks it against the manifest in force."""
    with tempfile.TemporaryDirectory(prefix="query-", dir=folder.path) as kept:
        temporary = Path(kept)
        suspect = _unpacked(temporary / "suspect", SUSPECT, arrays)
        if suspect is None:
            raise MessageError(
                "the server's message for the stage 'answer' lacks the suspect's files ('suspect:NAME')",
                code="message.incomplete",
            )
        records: dict[str, Path | None] = {}
        for name, file in _RECORDS.items():
            records[name] = _write(temporary / file, arrays[name], name) if name in arrays else None
        reference = Reference.read(
            folder.manifest_path,
            records["layout"],
            _unpacked(temporary / "anchor", ANCHOR, arrays),
            records["groups"],
            records["lora"],
            _unpacked(temporary / "base", BASE, arrays),
        )
        proofs = sorted(name for name in arrays if name.startswith(AUDIT))
        audits = tuple(Audit.from_bytes(_checked(arrays[name], name).tobytes()) for name in proofs)
        after = Certificate.from_bytes(_checked(arrays["after"], "after").tobytes()) if "after" in arrays else None
        yield Question(reference, suspect, audits, after)


def _unpacked(folder: Path, prefix: str, arrays: Arrays) -> Path | None:
    """The files of one model: the file itself where there is one, their folder where there are several."""
    names = [name.removeprefix(prefix) for name in arrays if name.startswith(prefix)]
    if not names:
        return None
    _check_names(prefix, names)
    folder.mkdir()
    paths = [_write(folder / name, arrays[prefix + name], prefix + name) for name in names]
    # a folder may hold a single .npy file; every other single file is a model by itself
    return paths[0] if len(paths) == 1 and paths[0].suffix != ".npy" else folder


def _check_names(prefix: str, names: Iterable[str]) -> None:
    """Plain file names: a server must not choose where on this disk they are written, nor how many there are."""
    found = list(names)
    if len(found) > _MOST_FILES:
        raise MessageError(
            f"the server sends {len(found)} files as {prefix!r}: at most {_MOST_FILES} are taken",
            code="message.too-large",
        )
    for name in found:
        plain = name.isprintable() and "/" not in name and name not in ("", ".", "..")
        if not plain or len(name.encode("utf-8", "surrogatepass")) > 255:
            raise MessageError(
                f"the server sends {prefix + name[:60]!r}, which is not a plain file name", code="message.malformed"
            )


def _write(path: Path, array: NDArray[Any], name: str) -> Path:
    path.write_bytes(np.ascontiguousarray(_checked(array, name)).data)
    return path


def _checked(array: NDArray[Any], name: str) -> NDArray[np.uint8]:
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.ndim != 1:
        raise MessageError(f"the server's message must give {name[:60]!r} as bytes", code="message.malformed")
    return array
