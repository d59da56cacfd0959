"""Image sets as arrays of bytes, their splits, and partitions among members (docs/lab.md, "Data").

Nothing is downloaded. `load(name, folder)` looks in the folder for a set's ordinary distribution, or for a packed file:

    cifar10         cifar-10-batches-py/    cifar10.npz
    cifar100        cifar-100-python/       cifar100.npz
    tiny-imagenet   tiny-imagenet-200/      tiny_imagenet_50.npz (every fourth class)
    fashion-mnist   *-ubyte or *-ubyte.gz in the folder, or Debian's dataset-fashion-mnist
    digits          comes with scikit-learn
    shapes          drawn from a seed: for tests

Packed files hold JPEG and need Pillow or torchvision, as does Tiny ImageNet.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import pickle
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark.errors import InputError, MissingDependencyError

__all__ = ["SETS", "ImageSet", "dirichlet_partition", "iid_partition", "load", "split"]

Bytes = NDArray[np.uint8]
Labels = NDArray[np.int64]
DEBIAN = Path("/usr/share/dataset/fashion-mnist")


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images in NHWC as bytes, and what they show."""

    name: str
    train_x: Bytes
    train_y: Labels
    test_x: Bytes
    test_y: Labels
    note: str = ""

    @property
    def classes(self) -> int:
        return int(max(self.train_y.max(), self.test_y.max())) + 1

    @property
    def image(self) -> tuple[int, int, int]:
        height, width, channels = self.train_x.shape[1:]
        return int(height), int(width), int(channels)

    def spread(self) -> tuple[list[float], list[float]]:
        """Mean and deviation of each channel of the training images, in 0 … 1."""
        flat = self.train_x.reshape(-1, self.train_x.shape[-1])
        counts = [np.bincount(flat[:, c], minlength=256) for c in range(flat.shape[1])]
        values = np.arange(256) / 255
        means = [float(n @ values / n.sum()) for n in counts]
        spreads = [float(np.sqrt(n @ (values - m) ** 2 / n.sum())) for n, m in zip(counts, means, strict=True)]
        return means, [s or 1.0 for s in spreads]


def load(name: str, folder: str | os.PathLike[str] = "data") -> ImageSet:
    """An image set by its name."""
    if name not in SETS:
        raise InputError("dataset", f"must be one of {', '.join(SETS)}", repr(name))
    return SETS[name](Path(folder))


def _missing(name: str, folder: Path, wanted: str) -> InputError:
    return InputError("data folder", f"must hold {wanted} for {name}", f"{str(folder)!r} without it")


# --- CIFAR ------------------------------------------------------------------------------------------------


def _cifar(name: str, folder: Path) -> ImageSet:
    ten = name == "cifar10"
    plain, packed = folder / ("cifar-10-batches-py" if ten else "cifar-100-python"), folder / f"{name}.npz"
    if plain.is_dir():
        train = [f"data_batch_{i}" for i in range(1, 6)] if ten else ["train"]
        parts = [
            _cifar_batches([plain / file for file in files]) for files in (train, ["test_batch" if ten else "test"])
        ]
        return ImageSet(name, *parts[0], *parts[1])
    if packed.exists():
        return _unpacked(name, packed)
    raise _missing(name, folder, f"{plain.name}/ or {packed.name}")


def _cifar_batches(paths: Iterable[Path]) -> tuple[Bytes, Labels]:
    images, labels = [], []
    for path in paths:
        with path.open("rb") as file:
            batch = pickle.load(file, encoding="bytes")  # noqa: S301 - the set's own format, from the user's folder
        images.append(np.asarray(batch[b"data"], np.uint8).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        labels.append(np.asarray(batch[b"labels"] if b"labels" in batch else batch[b"fine_labels"], np.int64))
    return np.ascontiguousarray(np.concatenate(images)), np.concatenate(labels)


def _unpacked(name: str, path: Path) -> ImageSet:
    """Mosaics of 64 images a row, as JPEG, in one .npz: `meta` says how many images of what size."""
    found: dict[str, Any] = {}
    with np.load(path) as file:
        for kind, (count, size) in json.loads(str(file["meta"])).items():
            keys = sorted(key for key in file.files if key.startswith(f"{kind}_m"))
            mosaics = _decoded([file[key].tobytes() for key in keys])
            tiles = [m.reshape(m.shape[0] // size, size, 64, size, 3).transpose(0, 2, 1, 3, 4) for m in mosaics]
            found[kind] = np.concatenate([t.reshape(-1, size, size, 3) for t in tiles])[:count]
            found[kind + "_y"] = file[kind + "_y"].astype(np.int64)
    note = "stored as JPEG of quality 95"
    return ImageSet(name, found["train"], found["train_y"], found["test"], found["test_y"], note)


def _decoded(files: list[bytes]) -> list[Bytes]:
    """JPEG files to RGB bytes."""
    one = _with_pillow() or _with_torchvision()
    if one is None:
        raise MissingDependencyError("pillow", "reading JPEG images")
    with ThreadPoolExecutor() as pool:
        return list(pool.map(one, files))


def _with_pillow() -> Callable[[bytes], Bytes] | None:
    try:
        from PIL import Image
    except ImportError:
        return None
    Image.MAX_IMAGE_PIXELS = None  # a mosaic is larger than what Pillow takes for an attack

    def one(data: bytes) -> Bytes:
        with Image.open(io.BytesIO(data)) as image:
            return np.asarray(image.convert("RGB"))

    return one


def _with_torchvision() -> Callable[[bytes], Bytes] | None:
    try:
        import torch
        from torchvision.io import ImageReadMode, decode_jpeg
    except ImportError:
        return None

    def one(data: bytes) -> Bytes:
        bits = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        pixels: Bytes = decode_jpeg(bits, ImageReadMode.RGB).permute(1, 2, 0).numpy()
        return pixels

    return one


# --- Tiny ImageNet ----------------------------------------------------------------------------------------


def _tiny_imagenet(folder: Path) -> ImageSet:
    plain, packed = folder / "tiny-imagenet-200", folder / "tiny_imagenet_50.npz"
    if plain.is_dir():
        names = (plain / "wnids.txt").read_text().split()
        numbers = {name: i for i, name in enumerate(sorted(names))}
        train = [(p, numbers[p.parts[-3]]) for p in sorted((plain / "train").glob("*/images/*.JPEG"))]
        lines = [line.split("\t") for line in (plain / "val" / "val_annotations.txt").read_text().splitlines()]
        held_out = [(plain / "val" / "images" / line[0], numbers[line[1]]) for line in lines]
        return ImageSet("tiny-imagenet", *_labelled(train), *_labelled(held_out))
    if packed.exists():
        note = "50 of the 200 classes: not comparable with figures for all"
        with np.load(packed) as file:
            return ImageSet("tiny-imagenet", *_concatenated(file, "train"), *_concatenated(file, "val"), note=note)
    raise _missing("tiny-imagenet", folder, f"{plain.name}/ or {packed.name}")


def _labelled(files: list[tuple[Path, int]]) -> tuple[Bytes, Labels]:
    images = np.stack(_decoded([path.read_bytes() for path, _ in files]))
    return images, np.array([number for _, number in files], np.int64)


def _concatenated(file: Any, kind: str) -> tuple[Bytes, Labels]:
    """JPEG files one after another, where each begins, and their labels, which are counted from 0 on here."""
    data, offsets = file[f"{kind}_jpeg"].tobytes(), file[f"{kind}_off"].tolist()
    images = np.stack(_decoded([data[a:b] for a, b in itertools.pairwise(offsets)]))
    return images, np.unique(file[f"{kind}_y"], return_inverse=True)[1].astype(np.int64)


# --- small sets -------------------------------------------------------------------------------------------


def _fashion_mnist(folder: Path) -> ImageSet:
    for place in (folder, folder / "fashion-mnist", DEBIAN):
        if any(place.glob("train-images-idx3-ubyte*")):
            parts: list[Any] = []
            for kind in ("train", "t10k"):
                parts.append(_idx(place, f"{kind}-images-idx3-ubyte", 16).reshape(-1, 28, 28, 1))
                parts.append(_idx(place, f"{kind}-labels-idx1-ubyte", 8).astype(np.int64))
            return ImageSet("fashion-mnist", *parts)
    raise _missing("fashion-mnist", folder, "train-images-idx3-ubyte and its companions")


def _idx(folder: Path, name: str, header: int) -> Bytes:
    path = folder / name
    data = path.read_bytes() if path.exists() else gzip.decompress((folder / f"{name}.gz").read_bytes())
    return np.frombuffer(data, np.uint8, offset=header)


def _digits(_: Path) -> ImageSet:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingDependencyError("scikit-learn", "the digits") from None
    pixels, labels = load_digits(return_X_y=True)
    images = np.round(pixels * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    order = np.random.default_rng(0).permutation(len(labels))
    rest, held_out = order[:1437], order[1437:]
    labels = labels.astype(np.int64)
    return ImageSet("digits", images[rest], labels[rest], images[held_out], labels[held_out])


def _shapes(_: Path) -> ImageSet:
    """Noise with one of four bright bars: small colour images that a network can learn in a few rounds."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, 800)
    images = rng.integers(0, 160, (800, 16, 16, 3), dtype=np.uint8)
    for image, label in zip(images, labels, strict=True):
        at = rng.integers(2, 12)
        bar = (slice(at, at + 3), slice(None)) if label % 2 else (slice(None), slice(at, at + 3))
        image[(*bar, int(label) // 2)] = 255
    return ImageSet("shapes", images[:600], labels[:600], images[600:], labels[600:])


SETS: dict[str, Callable[[Path], ImageSet]] = {
    "cifar10": lambda folder: _cifar("cifar10", folder),
    "cifar100": lambda folder: _cifar("cifar100", folder),
    "tiny-imagenet": _tiny_imagenet,
    "fashion-mnist": _fashion_mnist,
    "digits": _digits,
    "shapes": _shapes,
}


# --- splits and partitions --------------------------------------------------------------------------------


def split(labels: Labels, held_out: float, seed: int) -> tuple[Labels, Labels]:
    """Places of the images to train with and of those to validate with: a random share of the set."""
    if not 0 < held_out < 1:
        raise InputError("validation", "must be a share between 0 and 1", held_out)
    order = np.random.default_rng([0x73706C, seed]).permutation(len(labels))
    count = round(held_out * len(labels))
    return np.sort(order[count:]), np.sort(order[:count])


def iid_partition(labels: Labels, members: int, seed: int) -> list[Labels]:
    """Places for each member, at random; sizes differ by one at most."""
    _check_members(labels, members)
    order = np.random.default_rng([0x696964, seed]).permutation(len(labels))
    return [np.sort(part) for part in np.array_split(order, members)]


def dirichlet_partition(labels: Labels, members: int, gamma: float, seed: int) -> list[Labels]:
    """Places for each member with class proportions from Dirichlet(γ), sizes that differ by one at most.

    Member by member draws its images, class by class in its proportions, from what is left; where a class runs out,
    the rest comes from the classes that are left, in the member's proportions among them. Members draw in turns of a
    tenth of their share, so that the last ones do not get leftovers only. Every image goes to exactly one member.
    """
    _check_members(labels, members)
    if not gamma > 0:
        raise InputError("gamma", "must be above 0", gamma)
    rng = np.random.default_rng([0x646972, seed])
    classes = int(labels.max()) + 1
    pools = [rng.permutation(np.flatnonzero(labels == c)).tolist() for c in range(classes)]
    proportions = rng.dirichlet([gamma] * classes, members)
    sizes = [len(part) for part in np.array_split(np.arange(len(labels)), members)]
    mine: list[list[int]] = [[] for _ in range(members)]
    while any(len(taken) < size for taken, size in zip(mine, sizes, strict=True)):
        for k in rng.permutation(members):
            want = min(max(1, sizes[k] // 10), sizes[k] - len(mine[k]))
            while want > 0:
                left = np.array([len(pool) for pool in pools])
                p = np.where(left > 0, proportions[k], 0.0)
                p = p / p.sum() if p.sum() > 1e-12 else left / left.sum()
                counts = np.minimum(rng.multinomial(want, p), left)
                for pool, count in zip(pools, counts.tolist(), strict=True):
                    mine[k] += [pool.pop() for _ in range(count)]
                want -= int(counts.sum())
    return [np.sort(np.array(taken, np.int64)) for taken in mine]


def _check_members(labels: Labels, members: int) -> None:
    if not 1 <= members <= len(labels):
        raise InputError("members", f"must be from 1 to the number of images, {len(labels)}", members)
