"""A suspect model: reading it from whatever it came in, and matching it to the consortium's layout.

A suspect is never trusted: no pickle runs, an index is checked against its shards, and a file that changes while it is
read is refused. Nothing here knows the key. Opening reads headers only; the numbers come in blocks of rows, so that a
model larger than memory can be walked.

    suspect = read_suspect("model/")                    # a file, a folder, or a mapping of tensors
    match = match_layout(suspect, layout)               # which tensor of it is which carrier, and what does not fit
    for carrier, name in match.names.items():
        for begin, values in suspect.blocks(name): ...  # rows begin … of the tensor, as float32 (float64 for F64)

Sources: `.safetensors`; `.pt`, `.pth` and `.bin` (the only ones that need torch); `.npz`; a folder of `.npy` files; a
folder as Hugging Face writes it, in one file or in shards with an index; tensors in memory. float16, bfloat16 and
float8 are read from their bits; int8, uint8 and float8 with a scale beside them are dequantised:

    w = (q − zero_point)·scale        NAME_scale or NAME.scale, NAME_zero_point or NAME.zero_point
    w = q·SCB/127                     bitsandbytes: NAME.SCB, or LAYER.SCB for LAYER.weight

with one scale for the tensor or one for each row. A square matrix that was transposed looks like the original here:
only its numbers can tell.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quorumark.canonical import canonical, digest
from quorumark.checks import DAMAGED, is_count, is_hex, is_text, require
from quorumark.errors import InputError, LayoutError
from quorumark.field import parallel
from quorumark.model.layout import _DTYPES, FLOATS, ModelLayout, TensorSpec, _open, _some
from quorumark.model.names import exported, renamed, rules
from quorumark.model.tensors import FLOAT8, KINDS, STORED, Stored, TensorInfo, decode, in_memory, open_source, spans
from quorumark.reasons import Reason, Value, printable

__all__ = ["Cast", "Match", "Suspect", "SuspectFile", "TensorInfo", "match_layout", "non_finite", "read_suspect"]


@dataclass(frozen=True)
class SuspectFile:
    """A file that holds the suspect's weights, or the index of those files; `name` is relative to the folder."""

    name: str
    sha256: str
    size: int

    def __post_init__(self) -> None:
        require(is_text(self.name) and bool(self.name), "a suspect's file name", "must be printable text")
        require(is_hex(self.sha256, 32), "a suspect's file digest", "must be 32 bytes in hex")
        require(is_count(self.size), "a suspect's file size", "must be an integer")

    def as_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class _Scale:
    """How a tensor was quantised: w = (q − zero)·scale/divisor."""

    scale: str
    zero: str | None
    divisor: int
    per: str


class Suspect:
    """A suspect model. Make one with `read_suspect`."""

    def __init__(self, tensors: Mapping[str, Stored], paths: Iterable[Path]) -> None:
        if not tensors:
            raise LayoutError("the suspect has no tensors")
        self._stored = dict(sorted(tensors.items()))
        self.paths = tuple(sorted(paths))
        self._stamps = self._stamp()
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType({n: t.info for n, t in self._stored.items()})

    # --- what it is ---

    @cached_property
    def files(self) -> tuple[SuspectFile, ...]:
        """Every file that holds weights, and the index, by name; none for a model in memory. Reads them whole.

        A single file is called suspect.KIND, whatever it is called here: these names are signed.
        """
        self._check_unchanged()
        found = parallel.each(_hashed, self.paths)
        self._check_unchanged()
        if len(found) == 1:  # its name is the asker's choice, and nothing that a member could vouch for
            found = [replace(found[0], name=f"suspect{KINDS.get(self.paths[0].suffix, self.paths[0].suffix)}")]
        return tuple(found)

    @cached_property
    def memory(self) -> str | None:
        """For a model in memory, SHA-256 over every tensor's name, type, shape and little-endian bytes, by name."""
        if self.paths:
            return None
        hashed = hashlib.sha256(b"quorumark-suspect-memory/v1")
        for name, info in self.tensors.items():
            head = canonical([name, info.dtype, list(info.shape)])
            hashed.update(len(head).to_bytes(8, "big") + head)
            for begin, end in spans(info, 1 << 22):
                hashed.update(np.ascontiguousarray(self._raw(name, begin, end)).tobytes())
        return hashed.hexdigest()

    def digest(self) -> str:
        """One digest for all of it, in hex: of the files' names, sizes and hashes, or of the tensors in memory.

        The name of a single file says nothing and does not count.
        """
        if self.memory is not None:
            return digest("suspect in memory", bytes.fromhex(self.memory)).hex()
        return digest(
            "suspect files", canonical([[f.name if len(self.files) > 1 else "", f.size, f.sha256] for f in self.files])
        ).hex()

    # --- its numbers ---

    def rows(self, name: str, begin: int, end: int) -> NDArray[Any]:
        """Rows [begin, end) of a tensor as float32 (float64 for F64), NaN and infinity as they are; a new array.

        Rows are slices along the first dimension; a tensor of no dimension is one row of one number.
        """
        how = self._scale(name)
        info = self.tensors[name]
        if not 0 <= begin <= end <= info.rows:
            raise InputError("rows", f"must be within [0, {info.rows}) of tensor {name!r}", f"[{begin}, {end})")
        raw = self._raw(name, begin, end)
        if how is None:
            values = decode(raw, info.dtype)
        else:
            values = decode(raw, info.dtype) if info.dtype in FLOAT8 else raw.astype(np.float32)
            across = (-1,) + (1,) * (values.ndim - 1)
            with np.errstate(all="ignore"):  # what is not finite is counted, not warned of
                if how.zero is not None:
                    values -= self._quantiser(how.zero, begin, end).astype(np.float32).reshape(across)
                scale = decode(self._quantiser(how.scale, begin, end), self.tensors[how.scale].dtype)
                values *= (scale.astype(np.float64) / how.divisor).astype(np.float32).reshape(across)
        return np.ascontiguousarray(values)

    def blocks(self, name: str, limit: int = 1 << 22) -> Iterator[tuple[int, NDArray[Any]]]:
        """The tensor in order, about `limit` numbers at a time, at least one row: (first row, rows)."""
        self._scale(name)
        for begin, end in spans(self.tensors[name], limit):
            yield begin, self.rows(name, begin, end)

    def reading(self, name: str) -> str:
        """How a tensor becomes floats: "" if it is one, or dequantised by a scale per "row" or per "tensor".

        A LayoutError says why it cannot be read; its `reason` says so in a code.
        """
        how = self._scale(name)
        return "" if how is None else how.per

    def _quantiser(self, name: str, begin: int, end: int) -> NDArray[Any]:
        """The scales or zero points of these rows; the one for all of them if there is only one."""
        return self._raw(name, begin, end) if self.tensors[name].rows > 1 else self._raw(name, 0, 1)

    def _raw(self, name: str, begin: int, end: int) -> NDArray[Any]:
        self._check_unchanged()
        if self.tensors[name].dtype not in STORED:
            kind = self.tensors[name].dtype
            reason = _reason("read.type-unknown", name, type=kind)
            raise LayoutError(f"tensor {name!r} has the type {kind}, which is not supported", reason=reason)
        try:
            return self._stored[name].read(begin, end)
        except DAMAGED as error:
            text = f"tensor {name!r} cannot be read ({error}): its file is damaged; get another copy"
            raise LayoutError(text, reason=_reason("read.damaged", name)) from None

    def _scale(self, name: str) -> _Scale | None:
        """How the tensor was quantised, None if it was not; a LayoutError if it cannot be read as floats."""
        info = self.tensors.get(name)
        if info is None:
            raise LayoutError(f"the suspect has no tensor {name!r}")
        layer = name.removesuffix("weight") if f".{name}".endswith(".weight") else f"{name}."
        packed = dict.fromkeys((f"{name}.SCB", f"{layer}SCB"))
        scales = [s for s in (f"{name}_scale", f"{name}.scale", *packed) if s in self.tensors]
        if info.dtype not in ("I8", "U8", *FLOAT8) or not scales:
            if info.dtype in (*FLOATS, *FLOAT8):
                return None
            raise LayoutError(
                f"tensor {name!r} has the type {info.dtype} and no scale beside it, but must be floats",
                reason=_reason("read.no-scale", name, type=info.dtype),
            )
        zeros = [z for z in (f"{name}_zero_point", f"{name}.zero_point") if z in self.tensors]
        if len(scales) > 1 or len(zeros) > 1:
            raise LayoutError(
                f"tensor {name!r} has more than one scale or zero point: {_some({*scales, *zeros})}",
                reason=_reason("read.several-scales", name, some=_few({*scales, *zeros})),
            )
        for helper in (*scales, *zeros):
            shape = self.tensors[helper].shape
            if math.prod(shape) != 1 and shape != (info.rows,) + (1,) * (len(shape) - 1):
                raise LayoutError(
                    f"tensor {name!r} of shape {info.shape} is quantised in a way that is not supported: {helper!r} of "
                    f"shape {shape} is neither one number nor one for each row; save the model dequantised",
                    reason=_reason("read.scale-shape", name, helper=helper, shape=shape, wanted=(info.rows,)),
                )
        kept = f"{layer}weight_format"
        if scales[0] in packed and kept in self.tensors and self._raw(kept, 0, 1).any():
            raise LayoutError(
                f"tensor {name!r} is not in row order ({kept!r} is not 0); save the model in row order",
                reason=_reason("read.row-order", name, helper=kept),
            )
        kind = self.tensors[scales[0]].dtype
        if kind not in (*FLOATS, *FLOAT8):
            raise LayoutError(
                f"the scale {scales[0]!r} must be floating-point, not {kind}",
                reason=_reason("read.scale-type", name, helper=scales[0], type=kind),
            )
        if zeros and (kind := self.tensors[zeros[0]].dtype) not in _DTYPES.keys() - {"BF16"}:
            raise LayoutError(
                f"the zero point {zeros[0]!r} has the type {kind}",
                reason=_reason("read.zero-point-type", name, helper=zeros[0], type=kind),
            )
        per = "row" if self.tensors[scales[0]].rows > 1 else "tensor"
        return _Scale(scales[0], zeros[0] if zeros else None, 127 if scales[0] in packed else 1, per)

    def _stamp(self) -> list[tuple[int, ...]]:
        """Which files they are, and when they were changed: st_mtime can be set back by anybody, st_ctime cannot."""
        try:
            found = map(os.stat, self.paths)
            return [(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in found]
        except OSError as error:
            raise LayoutError(f"cannot read {str(error.filename)!r}: {error.strerror}") from None

    def _check_unchanged(self) -> None:
        """Its digest and its numbers must be of the same bytes."""
        if self._stamp() != self._stamps:
            raise LayoutError("the suspect's files changed while they were read; read a copy that nobody writes to")


def _reason(code: str, tensor: str, **values: Value) -> Reason:
    """About one tensor; all strings come from the suspect's own file."""
    named = {name: printable(value) if isinstance(value, str) else value for name, value in values.items()}
    return Reason.of(code, tensor=printable(tensor), **named)


def _few(names: Collection[str]) -> tuple[str, ...]:
    """The first three, for a reason."""
    return tuple(printable(name) for name in sorted(names)[:3])


def _hashed(path: Path) -> SuspectFile:
    with path.open("rb") as file:
        hashed = hashlib.file_digest(file, "sha256").hexdigest()
        name = os.fsencode(path.name).decode("utf-8", "backslashreplace")
        return SuspectFile(name, hashed, file.tell())


class Counted:
    """A suspect whose numbers are looked at as they are read: how many of a tensor are not finite.

    So that a suspect need not be read once more for that. `counts` knows the tensors that were read to their ends.
    """

    def __init__(self, suspect: Suspect) -> None:
        self._suspect = suspect
        self.counts: dict[str, int] = {}

    def blocks(self, name: str, limit: int = 1 << 22) -> Iterator[tuple[int, NDArray[Any]]]:
        """The suspect's own, in the same blocks."""
        if name in self.counts:
            yield from self._suspect.blocks(name, limit)
            return
        count = 0
        for begin, values in self._suspect.blocks(name, limit):
            count += values.size - int(np.count_nonzero(np.isfinite(values)))
            yield begin, values
        self.counts[name] = count


def read_suspect(source: str | os.PathLike[str] | Mapping[str, Any]) -> Suspect:
    """Opens a suspect: a file, a folder or the index of one, or named tensors in memory (numpy or torch)."""
    if not isinstance(source, (str, os.PathLike)):
        tensors, _ = _open(source)
        return Suspect({name: in_memory(tensor) for name, tensor in tensors.items()}, ())
    return Suspect(*open_source(Path(source)))


# --- matching ---------------------------------------------------------------------------------------------


class Cast(NamedTuple):
    """A tensor's type in the layout and in the suspect; `per`: "" or what has a scale, "row" or "tensor"."""

    layout: str
    suspect: str
    per: str


@dataclass(frozen=True)
class Match:
    """How a suspect's tensors fit a layout's carriers. Nothing else must fit.

    Attributes:
        names: carrier → the suspect's tensor, for every carrier that is there with its exact shape as floats.
        plain: the same for what does not carry (embeddings, the gains of norms): it helps to align.
        resized: the carriers in `names` that have more or fewer channels, where that was allowed.
        stripped, added: a suspect's name without the first and behind the second is the layout's name.
        missing: carriers that are not there at all.
        absent: other tensors of the layout that are not there (biases, buffers): no problem.
        extra: the suspect's tensors that the layout does not know: no problem.
        casts: carrier → its type in the layout and in the suspect, where they differ, and how it is dequantised.
        coverage: carrying coordinates in `names`, of all that carriers have.
        problems: why it does not fit, one reason each.
    """

    names: Mapping[str, str]
    plain: Mapping[str, str]
    resized: tuple[str, ...]
    stripped: str
    added: str
    missing: tuple[str, ...]
    absent: tuple[str, ...]
    extra: tuple[str, ...]
    casts: Mapping[str, Cast]
    coverage: tuple[int, int]
    problems: tuple[Reason, ...]

    @property
    def fits(self) -> bool:
        """Whether every carrier is there, once, with its exact shape, as floats."""
        return not self.problems


def match_layout(
    suspect: Suspect, layout: ModelLayout, resizable: Mapping[str, Collection[int]] | None = None
) -> Match:
    """Finds the layout's carriers in a suspect by name: one prefix rule for all names, found by majority.

    `resizable` names the axes of tensors that may be longer or shorter, for a suspect that will be aligned.
    """
    aliases: dict[str, list[str]] = {}
    for spec in layout.tensors:
        if spec.of is not None:
            aliases.setdefault(spec.of, []).append(spec.name)
    ours = exported([spec.name for spec in layout.tensors])
    theirs = {plain: name for name, plain in exported(suspect.tensors).items()}
    rule, *rivals = rules(theirs, ours.values())
    known = {s.name: theirs[found] for s in layout.tensors if (found := renamed(ours[s.name], rule)) in theirs}
    known |= {s.name: found for s in layout.tensors if (found := renamed(s.name, rule)) in suspect.tensors}
    names: dict[str, str] = {}
    plain: dict[str, str] = {}
    resized: list[str] = []
    casts: dict[str, Cast] = {}
    missing: list[str] = []
    problems: list[Reason] = []
    covered = 0
    for spec in layout.tensors:
        if spec.role == "plain":
            there = [known[name] for name in (spec.name, *aliases.get(spec.name, ())) if name in known]
            if there and _fits(suspect, there[0], spec, resizable):
                plain[spec.name] = there[0]
        if spec.role != "carrier":
            continue
        stand_ins = (spec.name,) if spec.name in known else aliases.get(spec.name, ())
        choice = {known[name] for name in stand_ins if name in known}
        if not choice:
            missing.append(spec.name)
            continue
        choice |= {theirs[other] for rival in rivals if (other := renamed(ours[spec.name], rival)) in theirs}
        if len(choice) > 1:
            problems.append(_reason("read.carrier-ambiguous", spec.name, candidates=len(choice), some=_few(choice)))
            continue
        name = choice.pop()
        info = suspect.tensors[name]
        if info.shape != spec.shape and not _resized(info.shape, spec, resizable):
            kind = "transposed" if info.shape == spec.shape[::-1] else "shape"
            problems.append(_reason(f"read.carrier-{kind}", name, shape=info.shape, wanted=spec.shape))
            continue
        try:
            how = suspect.reading(name)
        except LayoutError as error:
            if error.reason is None:  # the files changed while they were read: that is nothing to go on with
                raise
            problems.append(error.reason)
            continue
        names[spec.name] = name
        covered += spec.size
        if info.shape != spec.shape:
            resized.append(spec.name)
        if info.dtype != spec.dtype:
            casts[spec.name] = Cast(spec.dtype, info.dtype, how)
    if missing:
        carriers = len(names) + len(missing) + len(problems)
        lacking = Reason.of("read.carriers-missing", missing=len(missing), carriers=carriers, some=_few(missing))
        problems.insert(0, lacking)
    return Match(
        names=MappingProxyType(names),
        plain=MappingProxyType(plain),
        resized=tuple(resized),
        stripped=rule[0],
        added=rule[1],
        missing=tuple(missing),
        absent=tuple(s.name for s in layout.tensors if s.role in ("plain", "buffer") and s.name not in known),
        extra=tuple(sorted(suspect.tensors.keys() - set(known.values()))),
        casts=MappingProxyType(casts),
        coverage=(covered, layout.carrier_size),
        problems=tuple(problems),
    )


def _resized(shape: tuple[int, ...], spec: TensorSpec, resizable: Mapping[str, Collection[int]] | None) -> bool:
    """Whether a shape is the tensor's but for axes that may have another length."""
    axes = (resizable or {}).get(spec.name, ())
    return len(shape) == len(spec.shape) and all(
        theirs == ours or axis in axes for axis, (theirs, ours) in enumerate(zip(shape, spec.shape, strict=True))
    )


def _fits(suspect: Suspect, name: str, spec: TensorSpec, resizable: Mapping[str, Collection[int]] | None) -> bool:
    """Whether a tensor is there as floats, in a shape that can be used."""
    try:
        suspect.reading(name)
    except LayoutError:
        return False
    return _resized(suspect.tensors[name].shape, spec, resizable)


def non_finite(suspect: Suspect | Counted, match: Match) -> dict[str, int]:
    """How many NaN and infinities each carrier has, for those that have any; only what is not counted is read."""
    counted = suspect if isinstance(suspect, Counted) else Counted(suspect)
    for name in match.names.values():
        if name not in counted.counts:
            for _ in counted.blocks(name, 1 << 20):
                pass
    return {carrier: counted.counts[name] for carrier, name in match.names.items() if counted.counts[name]}
