"""The lab's datasets: splits, partitions and files."""

from __future__ import annotations

import gzip
import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quorumark.errors import InputError
from quorumark.research.lab import data

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.research, pytest.mark.usefixtures("one_thread")]


def test_a_split_is_a_fifth_and_hangs_on_the_seed() -> None:
    labels = np.arange(1000) % 10
    train, held_out = data.split(labels, 0.2, 0)
    assert (len(train), len(held_out)) == (800, 200)
    assert sorted([*train, *held_out]) == list(range(1000))
    assert np.array_equal(train, data.split(labels, 0.2, 0)[0])
    assert not np.array_equal(train, data.split(labels, 0.2, 1)[0])


@pytest.mark.parametrize("members", [1, 3, 32])
@pytest.mark.parametrize("gamma", [None, 0.25, 1.0])
def test_partitions_give_every_image_to_one_member_in_equal_shares(members: int, gamma: float | None) -> None:
    labels = np.repeat(np.arange(10), 97)
    parts = (
        data.iid_partition(labels, members, 0) if gamma is None else data.dirichlet_partition(labels, members, gamma, 0)
    )
    assert sorted(np.concatenate(parts)) == list(range(970))
    sizes = {len(part) for part in parts}
    assert len(parts) == members
    assert max(sizes) - min(sizes) <= 1


def _effective_classes(labels: Any, parts: list[Any]) -> float:
    """exp of the mean entropy of the members' classes: 100 if all are alike, 1 if each has one class."""
    entropies = []
    for part in parts:
        p = np.bincount(labels[part], minlength=100) / len(part)
        entropies.append(float(-(p[p > 0] * np.log(p[p > 0])).sum()))
    return float(np.exp(np.mean(entropies)))


def test_label_skew_is_as_strong_as_the_dirichlet_distribution_says() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(100), 400))
    found = {gamma: _effective_classes(labels, data.dirichlet_partition(labels, 32, gamma, 0)) for gamma in (0.25, 1.0)}
    for gamma, classes in found.items():
        drawn = np.random.default_rng(1).dirichlet([gamma] * 100, 2000)
        expected = np.exp(-(drawn * np.log(np.maximum(drawn, 1e-300))).sum(1).mean())
        assert classes == pytest.approx(expected, rel=0.1)
    assert _effective_classes(labels, data.iid_partition(labels, 32, 0)) > 90


def test_partitions_refuse_nonsense() -> None:
    with pytest.raises(InputError, match="members"):
        data.iid_partition(np.zeros(3, np.int64), 4, 0)
    with pytest.raises(InputError, match="gamma"):
        data.dirichlet_partition(np.zeros(3, np.int64), 2, 0.0, 0)


def test_cifar_in_its_ordinary_form(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        batch = {b"data": rng.integers(0, 256, (4, 3072), dtype=np.uint8), b"labels": rng.integers(0, 10, 4).tolist()}
        (folder / name).write_bytes(pickle.dumps(batch))
    last = batch
    found = data.load("cifar10", tmp_path)
    assert found.train_x.shape == (20, 32, 32, 3)
    assert found.test_y.tolist() == last[b"labels"]
    assert np.array_equal(found.test_x[1, :, :, 2].reshape(-1), last[b"data"][1, 2048:])  # blue is the third plane
    hundred = tmp_path / "cifar-100-python"
    hundred.mkdir()
    for name in ("train", "test"):
        batch = {b"data": last[b"data"], b"fine_labels": [3, 99, 0, 7], b"coarse_labels": [0, 1, 2, 3]}
        (hundred / name).write_bytes(pickle.dumps(batch))
    assert data.load("cifar100", tmp_path).classes == 100


def _jpeg(pixels: Any) -> Any:
    image = pytest.importorskip("PIL.Image")
    buffer = io.BytesIO()
    image.fromarray(pixels).save(buffer, "JPEG", quality=95, subsampling=0)
    return np.frombuffer(buffer.getvalue(), np.uint8)


def test_packed_mosaics(tmp_path: Path) -> None:
    """70 flat images in two mosaic rows come back in their order."""
    colours = np.random.default_rng(0).integers(0, 256, (70, 3), dtype=np.uint8)
    tiles = np.zeros((128, 32, 32, 3), np.uint8)
    tiles[:70] = colours[:, None, None, :]
    mosaic = tiles.reshape(2, 64, 32, 32, 3).transpose(0, 2, 1, 3, 4).reshape(64, 2048, 3)
    packed, labels = _jpeg(mosaic), np.arange(70) % 10
    meta = np.array(json.dumps({"train": [70, 32], "test": [70, 32]}))
    np.savez(
        tmp_path / "cifar10.npz", meta=meta, train_m000=packed, test_m000=packed, train_y=labels, test_y=labels
    )  # fmt: skip
    found = data.load("cifar10", tmp_path)
    assert found.train_x.shape == (70, 32, 32, 3)
    assert np.abs(found.train_x[:, 16, 16].astype(int) - colours).max() <= 4


def test_tiny_imagenet_both_ways(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (64, 64, 3), dtype=np.uint8), rng.integers(0, 256, (64, 64), dtype=np.uint8)]
    files = [_jpeg(pixels).tobytes() for pixels in images]  # the second is grey
    offsets = np.cumsum([0, *map(len, files)])
    both: dict[str, Any] = {f"{kind}_jpeg": np.frombuffer(b"".join(files), np.uint8) for kind in ("train", "val")}
    both |= {f"{kind}_off": offsets for kind in ("train", "val")}
    np.savez(tmp_path / "tiny_imagenet_50.npz", **both, train_y=np.array([8, 4]), val_y=np.array([4, 8]))
    packed = data.load("tiny-imagenet", tmp_path)
    assert (packed.train_y.tolist(), packed.test_y.tolist()) == ([1, 0], [0, 1])
    assert "not comparable" in packed.note
    plain = tmp_path / "tiny-imagenet-200"
    for name, file in zip(("n02", "n01"), files, strict=True):
        (plain / "train" / name / "images").mkdir(parents=True)
        (plain / "train" / name / "images" / f"{name}_0.JPEG").write_bytes(file)
    (plain / "val" / "images").mkdir(parents=True)
    (plain / "val" / "images" / "val_0.JPEG").write_bytes(files[0])
    (plain / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t0\t62\t62\n")
    (plain / "wnids.txt").write_text("n02\nn01\n")
    ordinary = data.load("tiny-imagenet", tmp_path)
    assert (ordinary.train_y.tolist(), ordinary.test_y.tolist(), ordinary.note) == ([0, 1], [1], "")
    assert np.array_equal(ordinary.test_x[0], packed.train_x[0])


def test_fashion_mnist_from_idx_files(tmp_path: Path) -> None:
    pixels = np.arange(3 * 784).astype(np.uint8)
    for kind in ("train", "t10k"):
        (tmp_path / f"{kind}-images-idx3-ubyte").write_bytes(bytes(16) + pixels.tobytes())
        (tmp_path / f"{kind}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(bytes(8) + bytes([1, 2, 0])))
    found = data.load("fashion-mnist", tmp_path)
    assert found.train_x.shape == (3, 28, 28, 1)
    assert found.test_y.tolist() == [1, 2, 0]
    assert found.train_x[1, 0, 0, 0] == 784 % 256


def test_digits_and_what_is_not_there(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    found = data.load("digits")
    assert found.train_x.shape == (1437, 8, 8, 1)
    assert found.train_x.max() == 255
    means, spreads = found.spread()
    assert means[0] == pytest.approx(found.train_x.mean() / 255)
    assert spreads[0] == pytest.approx(found.train_x.std() / 255)
    with pytest.raises(InputError, match="cifar-10-batches-py"):
        data.load("cifar10", tmp_path)
    with pytest.raises(InputError, match="must be one of"):
        data.load("mnist", tmp_path)
