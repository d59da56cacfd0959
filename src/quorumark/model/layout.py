"""Named tensors to one flat vector and back, and which coordinates carry the mark (docs/protocol.md, "Layout").

A `ModelLayout` is made once from a model, agreed on by its digest, and from then on says for every tensor where it
lies. Its order is fixed: carriers first, then the other floating-point tensors, each sorted by name; so the
carrying coordinates are a prefix of the vector, whatever order a framework lists its tensors in.

- carrier: floating-point, at least two dimensions, not an embedding (or as `include`/`exclude` say): carries the mark.
- plain: every other floating-point tensor (biases, norms, running statistics): aggregated, carries nothing.
- alias: shares its memory with another tensor (tied weights): follows it.
- buffer: integers and booleans: not aggregated, kept as they are.

Tensors come as a mapping from names to numpy arrays or torch tensors, as a torch module, or as a `.safetensors` file.
bfloat16 needs neither torch nor another package: it is read from its bits.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quorumark import codec
from quorumark.errors import EncodingError, InputError, KeystoreError, LayoutError
from quorumark.field import Vector
from quorumark.files import replacing

__all__ = ["DEFAULT_EXCLUDE", "ModelLayout", "TensorSpec", "read_safetensors", "write_safetensors"]

FORMAT = "quorumark-layout/v1"
DEFAULT_EXCLUDE = ("*emb*", "*Emb*", "*EMB*", "*wte*", "*wpe*")
"""Embeddings: rows that a training set never touches would show the bare mark."""

BFLOAT16 = np.dtype([("bfloat16", "<u2")])
"""How bfloat16 looks in a numpy array here: its 16 bits, under a name that says what they are."""

Role: TypeAlias = Literal["carrier", "plain", "alias", "buffer"]
Source: TypeAlias = Mapping[str, Any] | Any

# the names that safetensors uses, and how numpy holds them
_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": BFLOAT16,
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"), "U32": np.dtype("<u4"), "U16": np.dtype("<u2"), "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16")
_MOST_TENSORS = 1 << 18  # of one model; the largest that we know of have about 200,000
_LARGEST_HEADER = 1 << 26  # bytes of a safetensors file's header


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: its name, its type as safetensors spells it, its shape, its role; `of` is an alias's original."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: Role
    of: str | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ModelLayout:
    """Where every tensor of a model lies in one flat vector. Make one with `ModelLayout.of(model)`."""

    tensors: tuple[TensorSpec, ...]
    max_coordinates: int | None = None

    # --- making one ---

    @classmethod
    def of(
        cls,
        model: Source,
        *,
        include: Sequence[str] = ("*",),
        exclude: Sequence[str] = DEFAULT_EXCLUDE,
        max_coordinates: int | None = None,
    ) -> ModelLayout:
        """The layout of a model: a mapping of tensors, a torch module or a `.safetensors` file.

        `include` and `exclude` are globs over tensor names (case counts): a carrier must match one of the first and
        none of the second, and is floating-point with two dimensions or more. In a torch module only parameters can
        be carriers, and what `torch.nn.Embedding` holds is none, whatever its name. `max_coordinates` limits the
        carrying coordinates to a public pseudorandom sample of that size.
        """
        for argument, globs in (("include", include), ("exclude", exclude)):
            if isinstance(globs, str) or not all(isinstance(glob, str) for glob in globs):
                raise InputError(argument, "must be a sequence of globs", repr(globs))
        tensors, barred = _open(model)
        include, exclude = tuple(include), tuple(exclude)
        originals = _tied({n: t for n, t in tensors.items() if _dtype_name(n, t) in FLOATS})
        chosen = {
            name
            for name, tensor in tensors.items()
            if _dtype_name(name, tensor) in FLOATS
            and len(tensor.shape) >= 2
            and any(fnmatchcase(name, glob) for glob in include)
            and not any(fnmatchcase(name, glob) for glob in exclude)
            and name not in barred
        }
        # a tensor that goes by two names carries only if it may under both: a tied output layer is an embedding
        chosen -= {original for alias, original in originals.items() if alias not in chosen}
        specs = []
        for name, tensor in tensors.items():
            dtype = _dtype_name(name, tensor)
            role: Role = "carrier" if name in chosen else "plain"
            if dtype not in FLOATS:
                role = "buffer"
            if name in originals:
                role = "alias"
            specs.append(TensorSpec(name, dtype, tuple(int(n) for n in tensor.shape), role, originals.get(name)))
        return cls(in_order(specs), max_coordinates)

    def __post_init__(self) -> None:
        _check_specs(self.tensors)
        if not any(spec.role == "carrier" and spec.size for spec in self.tensors):
            raise LayoutError(
                "no tensor can carry the mark: none is floating-point, has two dimensions or more, and is named by "
                "include but not by exclude"
            )
        if self.tensors != in_order(self.tensors):
            raise LayoutError("the tensors of a layout must be in its fixed order, each name once")
        limit = self.max_coordinates
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= 1 << 31):
            raise InputError("max_coordinates", "must be an integer from 1 to 2^31, or None", repr(limit))

    # --- what it says ---

    @cached_property
    def _floats(self) -> tuple[tuple[TensorSpec, int], ...]:
        """The tensors in the vector, with the offset of each."""
        placed, offset = [], 0
        for spec in self.tensors:
            if spec.role in ("carrier", "plain"):
                placed.append((spec, offset))
                offset += spec.size
        return tuple(placed)

    @property
    def size(self) -> int:
        """The flat vector's length: every floating-point number of the model, once."""
        last, offset = self._floats[-1]
        return offset + last.size

    @property
    def carrier_size(self) -> int:
        """How many coordinates could carry; they are the vector's first ones."""
        return sum(spec.size for spec in self.tensors if spec.role == "carrier")

    @property
    def coordinates(self) -> int:
        """d, how many coordinates do carry: the length of a key and of a share."""
        return min(self.carrier_size, self.max_coordinates or self.carrier_size)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The flat vector's type: float32, which holds the half-precision types too, or float64 if the model does."""
        return np.dtype(np.float64 if any(spec.dtype == "F64" for spec in self.tensors) else np.float32)

    def spans(self, role: Role | None = None) -> Iterator[tuple[TensorSpec, slice]]:
        """The tensors in the vector with their places, in order; only those of one role if named."""
        for spec, offset in self._floats:
            if role is None or spec.role == role:
                yield spec, slice(offset, offset + spec.size)

    def carrying(self) -> NDArray[np.int64] | slice:
        """Where the d carrying coordinates lie in the vector, ascending: a slice if all carriers carry.

        With `max_coordinates` below the carriers' size N, one is drawn from each of d equal strata of [0, N):
        stratum i is [⌊i·N/d⌋, ⌊(i+1)·N/d⌋), and word i of a SHAKE-128 stream keyed by the tensors picks one
        of its places, mod its length. Public, and the same everywhere.
        """
        total, count = self.carrier_size, self.coordinates
        if count == total:
            return slice(0, total)
        seed = hashlib.sha256(b"quorumark-layout-sample/v1" + self._canonical(None)).digest()
        out = np.empty(count, np.int64)
        whole, rest = divmod(total, count)
        for block, start in enumerate(range(0, count, _SAMPLE_BLOCK)):
            index = np.arange(start, min(start + _SAMPLE_BLOCK, count), dtype=np.int64)
            stream = hashlib.shake_128(seed + block.to_bytes(8, "big")).digest(8 * index.size)
            # ⌊i·N/d⌋ = i·⌊N/d⌋ + ⌊i·(N mod d)/d⌋, which stays within 64 bits
            low = index * whole + index * rest // count
            high = (index + 1) * whole + (index + 1) * rest // count
            words = np.frombuffer(stream, "<u8")
            out[index] = low + (words % (high - low).astype(np.uint64)).astype(np.int64)
        return out

    def digest(self) -> str:
        """SHA-256 of the canonical bytes, in hex: what members agree on."""
        return self._digest

    def to_bytes(self) -> bytes:
        """Canonical JSON; `from_bytes` reads it back."""
        return self._bytes

    @cached_property
    def _bytes(self) -> bytes:
        return self._canonical(self.max_coordinates)

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256(self._bytes).hexdigest()

    def _canonical(self, max_coordinates: int | None) -> bytes:
        tensors = [
            {"name": s.name, "dtype": s.dtype, "shape": list(s.shape), "role": s.role}
            | ({} if s.of is None else {"of": s.of})
            for s in self.tensors
        ]
        body = {"format": FORMAT, "max_coordinates": max_coordinates, "tensors": tensors}
        return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> ModelLayout:
        """Reads `to_bytes` back. Anything else, an unknown version or an unknown field included, is a LayoutError."""
        try:
            body = json.loads(data)
            if body["format"] != FORMAT:
                raise LayoutError(f"unknown layout format {body['format']!r}; this release reads {FORMAT!r}")
            specs = tuple(
                TensorSpec(t["name"], t["dtype"], tuple(t["shape"]), t["role"], t.get("of")) for t in body["tensors"]
            )
            layout = cls(specs, body["max_coordinates"])
            canonical = layout.to_bytes()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise LayoutError(f"not a layout: {type(error).__name__}") from None
        if canonical != data:
            raise LayoutError("not a layout in canonical form: it has unknown fields or other spelling")
        return layout

    # --- moving models in and out ---

    def flatten(self, model: Source, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """The model's floating-point numbers as one vector. Names, shapes and types must be the layout's."""
        tensors = self._matched(model)
        if out is None:
            out = np.empty(self.size, self.dtype)
        elif not isinstance(out, np.ndarray) or out.dtype != self.dtype or out.shape != (self.size,):
            received = f"{out.dtype} of shape {out.shape}" if isinstance(out, np.ndarray) else type(out).__name__
            raise InputError("out", f"must be a {self.dtype} vector of length {self.size}", received)
        for spec, place in self.spans():
            out[place] = _to_float(tensors[spec.name], spec.dtype).reshape(-1)
        return out

    def encode(self, model: Source, weight: float = 1.0, out: Vector | None = None) -> Vector:
        """E(weight·model) as field elements. NaN, infinity and overflow are refused by the tensor's name."""
        vector = self.flatten(model)
        with self._naming(vector):
            return codec.encode(vector, weight, out, name="model")

    def checked(self, model: Source) -> NDArray[Any]:
        """The model as one vector, all of which can be encoded; refused as `encode` does it."""
        vector = self.flatten(model)
        with self._naming(vector):
            return codec.check(vector, name="model")

    @contextlib.contextmanager
    def _naming(self, vector: NDArray[Any]) -> Iterator[None]:
        """A number that cannot be encoded is told by its tensor."""
        try:
            yield
        except EncodingError as error:
            name, index = self.locate(error.index)
            received = f"{float(vector[error.index])} at index {index}"
            raise EncodingError(f"tensor {name!r}", error.rule, received, index) from None

    def locate(self, coordinate: int) -> tuple[str, int]:
        """The tensor that a coordinate of the vector belongs to, and the flat index within it."""
        for spec, place in self.spans():
            if place.start <= coordinate < place.stop:
                return spec.name, coordinate - place.start
        raise InputError("coordinate", f"must be in [0, {self.size})", coordinate)

    def unflatten(self, vector: NDArray[Any], like: Source) -> dict[str, Any]:
        """The vector as named tensors, in the order, types and library (numpy or torch) of `like`.

        `like` is a model of this layout; it also lends its integer buffers. Floating-point numbers are rounded to each
        tensor's type, ties to even.
        """
        if not isinstance(vector, np.ndarray) or vector.dtype.kind != "f" or vector.shape != (self.size,):
            received = (
                f"{vector.dtype} of shape {vector.shape}" if isinstance(vector, np.ndarray) else type(vector).__name__
            )
            raise InputError("vector", f"must be a floating-point vector of length {self.size}", received)
        tensors = self._matched(like)
        places = {spec.name: place for spec, place in self.spans()}
        specs = {spec.name: spec for spec in self.tensors}
        out: dict[str, Any] = {}
        for name, tensor in tensors.items():
            spec = specs[name]
            if spec.role == "buffer":
                out[name] = tensor.clone() if _is_torch(tensor) else np.array(tensor)
                continue
            original = name if spec.of is None else spec.of
            values = _from_float(vector[places[original]], spec.dtype).reshape(spec.shape)
            out[name] = _to_torch(values, tensor) if _is_torch(tensor) else values.astype(tensor.dtype, copy=False)
        return out

    def rounded(self, vector: NDArray[Any]) -> NDArray[Any]:
        """The vector, its numbers rounded in place to their tensors' types, ties to even; beyond these, infinity."""
        with np.errstate(over="ignore"):
            for spec, place in self.spans():
                if _DTYPES[spec.dtype] != vector.dtype:
                    vector[place] = _to_float(_from_float(vector[place], spec.dtype), spec.dtype)
        return vector

    def buffers_digest(self, model: Source) -> bytes:
        """A digest of what a model has and its vector leaves out: integers and booleans, which decide as much.

        A tensor that is tied to another must be the same: anyone who loads a model may load either.
        """
        tensors, hashed = self._matched(model), hashlib.sha256(b"quorumark-beside/v1")
        for spec in self.tensors:
            if spec.of is not None and _as_numpy(tensors[spec.name]).tobytes() != _as_numpy(tensors[spec.of]).tobytes():
                raise LayoutError(f"tensor {spec.name!r} is tied to {spec.of!r}, and must be the same")
            if spec.role == "buffer":  # names, types and shapes are the layout's
                hashed.update(_as_numpy(tensors[spec.name]).tobytes())
        return hashed.digest()

    def _matched(self, model: Source) -> Mapping[str, Any]:
        """The model's tensors, once they are exactly the layout's."""
        tensors, _ = _open(model)
        expected = {spec.name: spec for spec in self.tensors}
        missing, extra = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
        if missing or extra:
            texts = [f"{word} {_some(names)}" for word, names in (("lacks", missing), ("also has", extra)) if names]
            raise LayoutError(f"the model does not fit the layout: it {' and '.join(texts)}")
        for name, spec in expected.items():
            found = tuple(int(n) for n in tensors[name].shape), _dtype_name(name, tensors[name])
            if found != (spec.shape, spec.dtype):
                raise LayoutError(
                    f"tensor {name!r} must be {spec.dtype} of shape {spec.shape}, but is {found[1]} of shape {found[0]}"
                )
        return tensors


_SAMPLE_BLOCK = 1 << 16


# --- files ------------------------------------------------------------------------------------------------


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, NDArray[Any]]:
    """The tensors of a `.safetensors` file as read-only views of the file: nothing is loaded until it is used."""
    header, start = _safetensors_header(path)
    # one map for the whole file: a map each would need a file descriptor each
    whole = np.memmap(path, np.uint8, "r")
    tensors: dict[str, NDArray[Any]] = {}
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise LayoutError(f"tensor {name!r} has the type {entry['dtype']}, which is not supported")
        begin, end = entry["data_offsets"]
        dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
        content = whole[start + begin : start + end]
        tensors[name] = np.ndarray(shape, dtype, content) if content.size else np.empty(shape, dtype)
    return tensors


def check_count(tensors: int, path: str | os.PathLike[str]) -> None:
    """Every tensor costs time, also one without numbers: a file must not name millions of them."""
    if tensors > _MOST_TENSORS:
        raise LayoutError(f"{os.fspath(path)!r} holds more than {_MOST_TENSORS:,} tensors, which are not read")


def _safetensors_header(path: str | os.PathLike[str]) -> tuple[dict[str, Any], int]:
    """The checked entries (dtype, shape, data_offsets) of a `.safetensors` file, and where its data begin."""
    from safetensors import safe_open

    if not Path(path).is_file():
        problem = "it is no regular file" if Path(path).exists() else "there is no such file"
        raise LayoutError(f"cannot read {os.fspath(path)!r}: {problem}")
    try:
        with Path(path).open("rb") as raw:
            length = int.from_bytes(raw.read(8), "little")
            text = raw.read(min(length, _LARGEST_HEADER))
        if length > _LARGEST_HEADER:
            raise LayoutError(f"{os.fspath(path)!r} is not a sound safetensors file: its header is too long")
        check_count(text.count(b"{"), path)  # each tensor has one: cheaper than reading them
        with safe_open(path, framework="numpy") as file:  # the library checks the header: offsets, sizes, overlaps
            names = list(file.keys())
        header = json.loads(text)
    except (OSError, ValueError, MemoryError) as error:  # the library maps the whole file
        raise LayoutError(f"cannot read {os.fspath(path)!r}: {error}") from None
    except Exception as error:
        if type(error).__name__ != "SafetensorError":
            raise
        raise LayoutError(
            f"{os.fspath(path)!r} is not a sound safetensors file ({error}); save the model as one"
        ) from None
    return {name: header[name] for name in names}, 8 + length


def write_safetensors(tensors: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes named tensors (numpy or torch) to a `.safetensors` file: the whole file, or the old one stays.

    The safetensors package writes no bfloat16 without torch, so the few lines of the format stand here: 8 bytes of
    header length, the header as JSON, the tensors' bytes, the widest types first so that all of them are aligned.
    """
    for name in tensors:
        if not isinstance(name, str) or name == "__metadata__":
            raise LayoutError(f"a safetensors file cannot hold a tensor named {name!r}")
    arrays = {name: np.ascontiguousarray(_as_numpy(tensor)) for name, tensor in tensors.items()}
    order = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
    header: dict[str, Any] = {}
    offset = 0
    for name in order:
        array, shape = arrays[name], [int(n) for n in tensors[name].shape]
        span = [offset, offset + array.nbytes]
        header[name] = {"dtype": _dtype_name(name, tensors[name]), "shape": shape, "data_offsets": span}
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    try:
        with replacing(Path(path), 0o644) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                file.write(arrays[name].view(np.uint8).data if arrays[name].ndim else arrays[name].tobytes())
    except KeystoreError as error:
        raise LayoutError(str(error)) from None


# --- tensors of any kind ----------------------------------------------------------------------------------


def _open(model: Source) -> tuple[Mapping[str, Any], frozenset[str]]:
    """The model's tensors by name, and the names that must not carry although they look like weights."""
    if isinstance(model, (str, os.PathLike)):
        return read_safetensors(model), frozenset()
    if isinstance(model, Mapping):
        tensors: Mapping[str, Any] = model
        barred: frozenset[str] = frozenset()
    elif hasattr(model, "named_parameters") and hasattr(model, "state_dict"):
        tensors = model.state_dict(keep_vars=False)
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        embeddings = {
            f"{prefix}.{name}" if prefix else name
            for prefix, module in model.named_modules(remove_duplicate=False)
            if "Embedding" in type(module).__name__
            for name, _ in module.named_parameters(recurse=False)
        }
        barred = frozenset((tensors.keys() - parameters) | embeddings)
    else:
        raise InputError(
            "model", "must be a mapping of tensors, a torch module or a .safetensors file", type(model).__name__
        )
    if not tensors:
        raise LayoutError("the model has no tensors")
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise InputError("model", "must name its tensors by text", repr(name))
        if not isinstance(tensor, np.ndarray) and not _is_torch(tensor):
            raise InputError(f"tensor {name!r}", "must be a numpy array or a torch tensor", type(tensor).__name__)
    return tensors, barred


def _is_torch(tensor: Any) -> bool:
    """Whether it is a torch tensor (or parameter), without importing torch."""
    return hasattr(tensor, "untyped_storage") and hasattr(tensor, "detach")


_SHORT_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


def _dtype_name(name: str, tensor: Any) -> str:
    """The tensor's type as safetensors spells it."""
    if _is_torch(tensor):
        found = _SHORT_NAMES.get(str(tensor.dtype).removeprefix("torch."))
    elif tensor.dtype == BFLOAT16:
        found = "BF16"
    else:
        found = _SHORT_NAMES.get(tensor.dtype.name)  # also the bfloat16 of the ml_dtypes package
    if found is None:
        raise LayoutError(f"tensor {name!r} has the type {tensor.dtype}, which is not supported")
    return found


def _tied(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Aliases: names of tensors that are the same memory as an earlier name (in sorted order), with that name.

    Tensors that share memory in any other way (a transposed view, a part) cannot be aggregated under two names.
    """
    seen: dict[object, str] = {}
    spans: list[tuple[object, int, int, str]] = []
    aliases = {}
    for name in sorted(tensors):
        tensor = tensors[name]
        if math.prod(tensor.shape) == 0:
            continue
        if _is_torch(tensor):
            device, start, steps, item = tensor.device, tensor.data_ptr(), tensor.stride(), tensor.element_size()
            steps = tuple(step * item for step in steps)
        else:
            device, start, steps, item = "cpu", tensor.__array_interface__["data"][0], tensor.strides, tensor.itemsize
        place = (device, start, tuple(tensor.shape), steps, str(tensor.dtype))
        if place in seen:
            aliases[name] = seen[place]
            continue
        seen[place] = name
        reach = [(n - 1) * step for n, step in zip(tensor.shape, steps, strict=True)]
        low, high = start + sum(r for r in reach if r < 0), start + sum(r for r in reach if r > 0) + item
        spans.append((str(device), low, high, name))
    spans.sort()
    for (device, _, end, one), (other, begin, _, two) in itertools.pairwise(spans):
        if device == other and begin < end:
            raise LayoutError(f"the tensors {one!r} and {two!r} share memory, but are not the same tensor")
    return aliases


def _as_numpy(tensor: Any) -> NDArray[Any]:
    """The tensor's numbers in numpy, bfloat16 as its bits."""
    if not _is_torch(tensor):
        array: NDArray[Any] = tensor.view(BFLOAT16) if tensor.dtype.name == "bfloat16" else tensor
        return array.astype(array.dtype.newbyteorder("<"), copy=False)
    plain = tensor.detach().cpu()
    if str(plain.dtype) == "torch.bfloat16":
        import torch

        return plain.contiguous().view(torch.int16).numpy().view(BFLOAT16)  # type: ignore[no-any-return]
    return plain.numpy()  # type: ignore[no-any-return]


def _to_float(tensor: Any, dtype: str) -> NDArray[Any]:
    """As float32, or float64 for F64: exact."""
    array = _as_numpy(tensor)
    if dtype == "BF16":
        return (np.ascontiguousarray(array).view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array if dtype == "F64" else array.astype(np.float32, copy=False)


def _from_float(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Rounded to a type, ties to even; a new array."""
    if dtype != "BF16":
        return values.astype(_DTYPES[dtype])
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # the carry must not turn a NaN into infinity: keep its sign and set a quiet bit instead
    rounded = np.where(np.isnan(values), (bits >> np.uint32(16)) | np.uint32(0x40), rounded)
    return rounded.astype("<u2").view(BFLOAT16)


def _to_torch(values: NDArray[Any], like: Any) -> Any:
    import torch

    if values.dtype == BFLOAT16:
        tensor = torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(values)
    return tensor.to(like.device)


def in_order(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The fixed order: by role, then by name."""
    roles = ("carrier", "plain", "alias", "buffer")
    return tuple(sorted({spec.name: spec for spec in specs}.values(), key=lambda s: (roles.index(s.role), s.name)))


def _check_specs(specs: Sequence[TensorSpec]) -> None:
    """What a file may claim and a model could not be."""
    originals = {spec.name: spec for spec in specs if spec.role in ("carrier", "plain")}
    for spec in specs:
        sound = (
            isinstance(spec.name, str)
            and isinstance(spec.dtype, str)
            and spec.dtype in _DTYPES
            and spec.role in ("carrier", "plain", "alias", "buffer")
            and isinstance(spec.of, str | None)
            and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in spec.shape)
            and (spec.role == "buffer") == (spec.dtype not in FLOATS)
            and (spec.role != "carrier" or len(spec.shape) >= 2)
            and (spec.role == "alias") == (spec.of is not None)
        )
        if sound and spec.of is not None:
            original = originals.get(spec.of)
            sound = original is not None and (original.dtype, original.shape) == (spec.dtype, spec.shape)
        if not sound:
            raise LayoutError(f"the layout's entry for tensor {spec.name!r} contradicts itself")


def _some(names: set[str]) -> str:
    """A few names for an error text."""
    shown = ", ".join(repr(name) for name in sorted(names)[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
