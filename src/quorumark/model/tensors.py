"""Named tensors where they lie, in files that nobody vouches for: headers now, rows when asked for.

`open_source` reads what `quorumark.model.suspect` describes. Every reader gives tensors as `Stored`: their type and
shape, and a function that reads some of their rows. What is damaged, contradicts itself or would run code is a
LayoutError.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quorumark.checks import DAMAGED
from quorumark.errors import InputError, LayoutError, MissingDependencyError
from quorumark.model.layout import (
    _DTYPES,
    _SHORT_NAMES,
    BFLOAT16,
    _as_numpy,
    _is_torch,
    _safetensors_header,
    _some,
    _to_float,
    check_count,
)

FLOAT8 = ("F8_E4M3", "F8_E5M2")
STORED = _DTYPES | dict.fromkeys(FLOAT8, np.dtype("u1"))
_NAMES = _SHORT_NAMES | {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
_RELEASE = 1 << 27  # bytes read from a map before it is made anew: its pages count as resident memory
_BLOCK = 1 << 20
_LARGEST_INDEX = 1 << 26  # bytes of an index of shards
_LARGEST_DIRECTORY = 1 << 24  # bytes of a zip file's list of files: about 150,000 of them
_LARGEST_PICKLE = 1 << 23  # bytes of a checkpoint's pickle, without its tensors: about 40,000 of them


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's type, as safetensors spells it (or as its library does, if safetensors has no word), and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        """How many slices along the first dimension; a single number is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row(self) -> int:
        """Numbers in a row."""
        return math.prod(self.shape[1:])


_Rows: TypeAlias = Callable[[int, int], NDArray[Any]]


@dataclass(frozen=True)
class Stored:
    """A tensor where it lies: `read(begin, end)` gives these rows as they are stored, in memory of their own."""

    info: TensorInfo
    read: _Rows


def spans(info: TensorInfo, limit: int) -> Iterator[tuple[int, int]]:
    """A tensor's rows in blocks of about `limit` numbers, at least one row each: (begin, end)."""
    if limit < 1:
        raise InputError("limit", "must be at least 1", limit)
    step = max(1, limit // max(1, info.row))
    for begin in range(0, info.rows, step):
        yield begin, min(begin + step, info.rows)


def _e4m3() -> NDArray[np.float32]:
    """Every float8 of 4 exponent bits (bias 7) and 3 mantissa bits: no infinity, and all ones is NaN."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    size[code & 127 == 127] = np.nan
    return np.where(code < 128, size, -size).astype(np.float32)


_E4M3 = _e4m3()


def decode(raw: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Stored floats as float32, or float64 for F64: exact."""
    if dtype == "F8_E4M3":
        return np.take(_E4M3, raw)
    if dtype == "F8_E5M2":  # the upper half of a float16
        return (raw.astype("<u2") << np.uint16(8)).view("<f2").astype(np.float32)
    return _to_float(raw, dtype)


# --- files and folders ------------------------------------------------------------------------------------


def open_source(path: Path) -> tuple[dict[str, Stored], list[Path]]:
    """The tensors of a file, a folder or the index of one, and the files that hold them, the index included."""
    if path.is_dir():
        return _read_folder(path)
    if path.name.endswith(".index.json"):
        return _read_shards(path)
    return _read_file(path), [path]


def _require_file(path: Path) -> None:
    """A regular file, or a link to one: a pipe would be waited for, and a device may have no end."""
    try:
        problem = "" if path.is_file() else "it is no regular file" if path.exists() else "there is no such file"
    except OSError as error:  # a name that is too long, say
        problem = str(error.strerror)
    if problem:
        raise LayoutError(f"cannot read {str(path)!r}: {problem}")


def _read_file(path: Path) -> dict[str, Stored]:
    """The tensors of one file."""
    _require_file(path)
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise LayoutError(f"cannot read {str(path)!r}: {_KINDS}")
    return reader(path)


_KINDS = (
    "a suspect is a .safetensors, .npz, .pt, .pth or .bin file, or a folder with .safetensors files, an index of "
    "shards, pytorch_model.bin or .npy files; save the model as safetensors"
)


def _read_folder(folder: Path) -> tuple[dict[str, Stored], list[Path]]:
    """What Transformers would load, in its order of preference; where that is open to doubt, the folder is refused."""
    for kind in (".safetensors", ".bin"):
        indices = sorted(folder.glob(f"*{kind}.index.json"))
        if len(indices) > 1:
            raise LayoutError(_several(folder, indices))
        if indices:
            tensors, files = _read_shards(indices[0])
            whole = folder / indices[0].name.removesuffix(".index.json")
            if whole.exists() and whole not in files:
                raise LayoutError(_several(folder, [indices[0], whole]))
            return tensors, files
        files = sorted(folder.glob("*.safetensors" if kind == ".safetensors" else "pytorch_model.bin"))
        if files:
            return _read_together(files)[0], files
    files = sorted(folder.glob("*.npy"))
    if not files:
        raise LayoutError(f"the folder {str(folder)!r} holds no model: {_KINDS}")
    check_count(len(files), folder)
    return {path.stem: _read_npy(path) for path in files}, files


def _several(folder: Path, files: list[Path]) -> str:
    found = _some({path.name for path in files})
    return f"the folder {str(folder)!r} holds more than one model: {found}; name the file that is meant"


def _read_together(files: list[Path]) -> tuple[dict[str, Stored], dict[str, str]]:
    """The tensors of several files, and the name of each one's file; none may be in two of them."""
    tensors: dict[str, Stored] = {}
    where: dict[str, str] = {}
    for path in files:
        for name, tensor in _read_file(path).items():
            if name in tensors:
                raise LayoutError(
                    f"tensor {name!r} is in both {where[name]!r} and {path.name!r}; name the file that is meant"
                )
            tensors[name], where[name] = tensor, path.name
        check_count(len(tensors), path.parent)
    return tensors, where


def _read_shards(index: Path) -> tuple[dict[str, Stored], list[Path]]:
    """A model in shards. Its index is only a claim: it must hold, and it names files in its own folder only."""
    _require_file(index)
    try:
        if index.stat().st_size > _LARGEST_INDEX:
            raise LayoutError(f"{str(index)!r} is too large to be an index of shards")
        claims = json.loads(index.read_bytes(), object_pairs_hook=_once)["weight_map"]
        shards = sorted(set(claims.values()))
        kind = index.name.split(".")[-3]  # NAME.kind.index.json
        for shard in shards:
            if "/" in shard or "\\" in shard or "\0" in shard or not shard.endswith(f".{kind}"):
                raise LayoutError(f"the index {index.name!r} names the shard {shard!r}: not a .{kind} file beside it")
    except OSError as error:
        raise LayoutError(f"cannot read {str(index)!r}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LayoutError(f"{index.name!r} is not an index of shards ({type(error).__name__})") from None
    files = [index.parent / shard for shard in shards]
    for path in files:
        try:
            _require_file(path)
        except LayoutError as error:
            text = f"the shard {path.name!r}, which {index.name!r} names, is not there; fetch it ({error})"
            raise LayoutError(text) from None
    tensors, where = _read_together(files)
    for name, shard in claims.items():
        if where.get(name) != shard:
            raise LayoutError(f"tensor {name!r} is not in {shard!r}, although the index {index.name!r} says so")
    return tensors, [index, *files]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) != len(pairs):
        raise LayoutError("the index of shards names a tensor twice")
    return body


def _read_safetensors(path: Path) -> dict[str, Stored]:
    header, start = _safetensors_header(path)
    tensors = {}
    for name, entry in header.items():
        info = TensorInfo(entry["dtype"], tuple(entry["shape"]))
        offset = start + entry["data_offsets"][0]
        tensors[name] = Stored(info, partial(_from_file, path, offset, STORED.get(info.dtype, np.dtype("u1")), info))
    return tensors


def _from_file(path: Path, offset: int, dtype: np.dtype[Any], info: TensorInfo, begin: int, end: int) -> NDArray[Any]:
    """Rows by plain reading: the pages of a map would count as resident memory until the map is gone."""
    count = (end - begin) * info.row
    found: NDArray[Any] = np.fromfile(path, dtype, count, offset=offset + begin * info.row * dtype.itemsize)
    if found.size != count:
        raise EOFError("it ends too early")
    return found.reshape((end - begin, *info.shape[1:]))


def _read_npy(path: Path) -> Stored:
    _require_file(path)
    try:
        with path.open("rb") as file:
            shape, columns, dtype, offset = _npy_header(file)
            size = os.fstat(file.fileno()).st_size
        return _array(shape, columns, dtype, size - offset, partial(partial, _from_file, path, offset))
    except DAMAGED as error:
        raise LayoutError(f"{str(path)!r} is not a sound .npy file ({error})") from None


def _read_npz(path: Path) -> dict[str, Stored]:
    tensors = {}
    try:
        _check_directory(path)
        archive = _Archive(path)
        for member in archive.zip.infolist():
            name = member.filename.removesuffix(".npy")
            if name in tensors:
                raise ValueError(f"{name!r} is in it twice")
            with archive.zip.open(member) as file:
                shape, columns, dtype, offset = _npy_header(file)
            read = partial(partial, archive.rows, member.filename, offset)
            tensors[name] = _array(shape, columns, dtype, member.file_size - offset, read)
    except DAMAGED as error:
        raise LayoutError(f"{str(path)!r} is not a sound .npz file ({error})") from None
    return tensors


def _check_directory(path: Path) -> None:
    """The list of files in a zip file is read whole: it must have a sensible length, which its end says."""
    with path.open("rb") as file:
        end = zipfile._EndRecData(file)  # type: ignore[attr-defined]
    if end is not None and end[zipfile._ECD_SIZE] > _LARGEST_DIRECTORY:  # type: ignore[attr-defined]
        raise ValueError("it names too many files")


class _Archive:
    """A .npz file, with the member open that was read last: going on in a compressed one must not begin anew."""

    def __init__(self, path: Path) -> None:
        self.zip = zipfile.ZipFile(path)
        self.member = ""
        self.lock = threading.Lock()  # several threads may read, but there is one place in the file
        self.file: IO[bytes]

    def rows(
        self, member: str, offset: int, dtype: np.dtype[Any], info: TensorInfo, begin: int, end: int
    ) -> NDArray[Any]:
        with self.lock:
            if self.member != member:
                self.member, self.file = member, self.zip.open(member)
            self.file.seek(offset + begin * info.row * dtype.itemsize)
            content = self.file.read((end - begin) * info.row * dtype.itemsize)
        return np.frombuffer(bytearray(content), dtype).reshape((end - begin, *info.shape[1:]))


def _npy_header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Shape, whether column by column, type, and where the numbers begin."""
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"version {version} is not known")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, columns, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("it holds pickled objects, which are not loaded")
    return shape, columns, dtype, file.tell()


def _array(
    shape: tuple[int, ...], columns: bool, dtype: np.dtype[Any], size: int, reader: Callable[..., _Rows]
) -> Stored:
    """A tensor in numpy's format; `reader(dtype, info)` reads rows of what lies there as if it were row by row."""
    info = TensorInfo(_spelling(np.empty(0, dtype)), shape)
    if min(shape, default=0) < 0 or size != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{size} bytes are not an array of shape {shape}")
    if not columns or len(shape) < 2:
        return Stored(info, reader(dtype, info))
    flat = TensorInfo(info.dtype, (info.row, info.rows))  # what lies there: the transpose

    def rows(begin: int, end: int) -> NDArray[Any]:
        out = np.empty((flat.rows, end - begin), dtype)
        for first, last in spans(flat, _BLOCK):
            out[first:last] = reader(dtype, flat)(first, last)[:, begin:end]
        return out.reshape((*shape[:0:-1], end - begin)).T

    return Stored(info, rows)


def _spelling(tensor: Any) -> str:
    """A tensor's type as safetensors spells it; where it has no word, as the library does."""
    if _is_torch(tensor) and (str(tensor.layout) != "torch.strided" or tensor.device.type == "meta"):
        return f"{tensor.layout} {tensor.device.type}".removeprefix("torch.")
    if tensor.dtype == BFLOAT16:
        return "BF16"
    text = str(tensor.dtype).removeprefix("torch.") if _is_torch(tensor) else tensor.dtype.name
    return _NAMES.get(text, text)


def in_memory(tensor: Any) -> Stored:
    """A numpy array or a torch tensor."""
    info = TensorInfo(_spelling(tensor), tuple(int(n) for n in tensor.shape))
    return Stored(info, partial(_from_memory, tensor, info))


def _from_memory(tensor: Any, info: TensorInfo, begin: int, end: int) -> NDArray[Any]:
    part = tensor[begin:end] if info.shape else tensor.reshape((1,))
    if info.dtype in FLOAT8:
        part = part.detach().cpu().contiguous().view(_torch().uint8) if _is_torch(part) else part.view(np.uint8)
    return np.array(_as_numpy(part), order="C")  # a copy: the suspect's own numbers are not for writing


# --- torch ------------------------------------------------------------------------------------------------


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise MissingDependencyError("torch", "reading a suspect from a .pt, .pth or .bin file") from None
    return torch


def _read_torch(path: Path) -> dict[str, Stored]:
    checkpoint = _Checkpoint(path)
    return {
        name: Stored(in_memory(tensor).info, partial(checkpoint.rows, name))
        for name, tensor in checkpoint.tensors.items()
    }


class _Checkpoint:
    """A file that torch wrote, mapped; a file in the format before torch 1.6 can only be loaded whole."""

    def __init__(self, path: Path) -> None:
        try:
            self.path, self.mapped, self.seen = path, zipfile.is_zipfile(path), 0
        except DAMAGED as error:  # a zip file in several parts
            raise LayoutError(f"{str(path)!r} is damaged ({error}); save the model as safetensors") from None
        self.lock = threading.Lock()
        self.tensors = self._load()

    def rows(self, name: str, begin: int, end: int) -> NDArray[Any]:
        with self.lock:
            if self.mapped and self.seen > _RELEASE:
                self.tensors, self.seen = self._load(), 0
            found = in_memory(self.tensors[name]).read(begin, end)
            self.seen += found.nbytes
        return found

    def _load(self) -> dict[str, Any]:
        torch = _torch()
        self._check_pickle()
        try:
            # weights_only: an unpickler that knows tensors and plain containers, and calls nothing that it is told to
            content = torch.load(self.path, map_location="cpu", weights_only=True, mmap=self.mapped)
        except Exception as error:
            raise LayoutError(
                f"{str(self.path)!r} is damaged or holds more than tensors, which is not loaded, for it could run any "
                "code; where you trust it, save its state_dict() as safetensors"
            ) from error
        if isinstance(content, Mapping) and all(isinstance(n, str) and _is_torch(t) for n, t in content.items()):
            return dict(content)  # also a shard with nothing but biases
        found = dict(_state_dicts(content, ""))
        if len(found) != 1:
            which = f"more than one model: {_some(set(found))}" if found else "no mapping of names to weights"
            raise LayoutError(f"{str(self.path)!r} holds {which}; save the state_dict() that is meant as safetensors")
        return next(iter(found.values()))

    def _check_pickle(self) -> None:
        """What torch would unpickle: not so much that it takes minutes, and nothing that allocates what it is told to.

        weights_only calls bytearray, and bytearray(10^11) takes 100 GB. Names of functions stand in a pickle as they
        are, between line breaks.
        """
        more = f"{str(self.path)!r} holds more than tensors; save its state_dict() as safetensors"
        try:
            if not self.mapped:
                with self.path.open("rb") as file:
                    content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                    if content.find(b"\nbytearray\n") >= 0:
                        raise LayoutError(more)
                    return
            _check_directory(self.path)
            with zipfile.ZipFile(self.path) as archive:
                for member in archive.infolist():
                    if member.filename.endswith(".pkl"):
                        if member.file_size > _LARGEST_PICKLE:
                            raise LayoutError(more)
                        with archive.open(member) as pickle:
                            if b"\nbytearray\n" in pickle.read(_LARGEST_PICKLE + 1):
                                raise LayoutError(more)
        except (*DAMAGED, NotImplementedError) as error:
            raise LayoutError(f"{str(self.path)!r} is damaged ({error}); save the model as safetensors") from None


def _state_dicts(content: Any, where: str, depth: int = 3) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every mapping of names to tensors, one of them with two dimensions; an optimizer has numbers, no names."""
    if not isinstance(content, Mapping) or not all(isinstance(key, str) for key in content):
        return
    tensors = {name: value for name, value in content.items() if _is_torch(value)}
    if any(value.dim() > 1 for value in tensors.values()):
        yield where, tensors
    if depth:
        for key, value in content.items():
            yield from _state_dicts(value, f"{where}.{key}" if where else key, depth - 1)


KINDS = {".pth": ".pt", ".bin": ".pt"}
"""Suffixes that mean the same."""

_READERS: dict[str, Callable[[Path], dict[str, Stored]]] = {
    ".safetensors": _read_safetensors, ".npz": _read_npz,
    ".pt": _read_torch, ".pth": _read_torch, ".bin": _read_torch,
}  # fmt: skip
