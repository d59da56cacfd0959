"""The lab: data, augmentation, networks, the loop and its mark, results. Miniatures on the CPU."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import time
from dataclasses import replace
from fractions import Fraction
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from quorumark import codec, field
from quorumark.cli import app
from quorumark.consortium.strength import Strength
from quorumark.errors import InputError, RecordError, RoundError
from quorumark.model.layout import ModelLayout, read_safetensors
from quorumark.research.known import KnownKey, SeededKey, TensorsInMemory
from quorumark.research.lab import data
from quorumark.research.lab.config import Settings, configurations, read
from quorumark.round.amplitudes import MarkState, PaperScale, paper_amplitudes
from quorumark.round.mark import ideal_mark
from quorumark.round.movement import ideal_norms

torch = pytest.importorskip("torch")
from quorumark.research.lab import augment, models  # noqa: E402
from quorumark.research.lab.fleet import Fleet, Order  # noqa: E402
from quorumark.research.lab.loop import Run  # noqa: E402
from quorumark.research.lab.mark import Mark, axis_norms, axis_sums, encoded, square_sum, weighted_sum  # noqa: E402
from quorumark.research.lab.scores import null_scores, z_scores  # noqa: E402

pytestmark = [pytest.mark.research, pytest.mark.usefixtures("one_thread")]


MINI = Settings("shapes", members=4, rounds=4, model="cnn", global_batch=128, augment=("flip",))


# --- data -------------------------------------------------------------------------------------------------


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


# --- augmentation -----------------------------------------------------------------------------------------


def _pictures(count: int = 12) -> Any:
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    small = [image.fromarray(rng.integers(0, 256, (5, 5, 3), dtype=np.uint8)) for _ in range(count)]
    return np.stack([np.asarray(one.resize((32, 32), image.Resampling.BILINEAR)) for one in small])


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("Invert", 0.0),
        ("Equalize", 0.0),
        ("AutoContrast", 0.0),
        ("Posterize", 5.0),
        ("Solarize", 128.0),
        ("Brightness", 0.5),
        ("Color", -0.7),
        ("Contrast", 0.6),
        ("Sharpness", 0.9),
        ("TranslateX", 5.0),
        ("TranslateY", -3.0),
        ("ShearX", 0.23),
        ("ShearY", -0.23),
        ("Rotate", 20.0),
    ],
)
def test_operations_are_pils(name: str, size: float) -> None:
    """Within one grey level, but for a few edge pixels of the warps."""
    image, ops = pytest.importorskip("PIL.Image"), pytest.importorskip("PIL.ImageOps")
    enhance = pytest.importorskip("PIL.ImageEnhance")

    def affine(*matrix: float) -> Any:
        return lambda one: one.transform(one.size, image.Transform.AFFINE, matrix)

    theirs = {
        "Invert": ops.invert,
        "Equalize": ops.equalize,
        "AutoContrast": ops.autocontrast,
        "Posterize": lambda one: ops.posterize(one, 5),
        "Solarize": lambda one: ops.solarize(one, 128),
        "TranslateX": affine(1, 0, -size, 0, 1, 0),
        "TranslateY": affine(1, 0, 0, 0, 1, -size),
        "ShearX": affine(1, size, 0, 0, 1, 0),
        "ShearY": affine(1, 0, 0, size, 1, 0),
        "Rotate": lambda one: one.rotate(size),
    }.get(name) or (lambda one: getattr(enhance, name)(one).enhance(1 + size))
    pictures = _pictures()
    ours = augment._OPERATIONS[name][0](torch.from_numpy(pictures).float(), torch.full((len(pictures),), size))
    expected = np.stack([np.asarray(theirs(image.fromarray(one))) for one in pictures]).astype(int)
    off = np.abs(ours.to(torch.uint8).numpy().astype(int) - expected)
    assert (off > 1).mean() < 0.002
    assert np.abs(expected - pictures.astype(int)).mean() > 0.5  # it does something


def test_autoaugment_has_the_paper_s_25_policies_and_repeats_itself() -> None:
    assert len(augment.POLICY) == 25
    assert {name for pair in augment.POLICY for name, _, _ in pair} <= set(augment._OPERATIONS)
    x = torch.from_numpy(_pictures(40))

    def once(seed: int) -> Any:
        return augment.apply(("crop", "flip", "autoaugment"), x, torch.Generator().manual_seed(seed))

    one = once(1)
    assert (one.dtype, one.shape) == (torch.uint8, x.shape)
    assert torch.equal(one, once(1))
    assert not torch.equal(one, once(2))
    changed = (one != x).flatten(1).any(1).float().mean()
    assert changed > 0.9
    with pytest.raises(InputError, match="augment"):
        augment.apply(("cutout",), x, torch.Generator())


# operation, probability, step of the magnitude, twice: AutoAugment's policy for CIFAR-10 as torchvision has it
PAIRS = """
Invert .1 - Contrast .2 6; Rotate .7 2 TranslateX .3 9; Sharpness .8 1 Sharpness .9 3; ShearY .5 8 TranslateY .7 9;
AutoContrast .5 - Equalize .9 -; ShearY .2 7 Posterize .3 7; Color .4 3 Brightness .6 7; Sharpness .3 9 Brightness .7 9;
Equalize .6 - Equalize .5 -; Contrast .6 7 Sharpness .6 5; Color .7 7 TranslateX .5 8; Equalize .3 - AutoContrast .4 -;
TranslateY .4 3 Sharpness .2 6; Brightness .9 6 Color .2 8; Solarize .5 2 Invert .0 -; Equalize .2 - AutoContrast .6 -;
Equalize .2 - Equalize .6 -; Color .9 9 Equalize .6 -; AutoContrast .8 - Solarize .2 8; Brightness .1 3 Color .7 0;
Solarize .4 5 AutoContrast .9 -; TranslateY .9 9 TranslateY .7 9; AutoContrast .9 - Solarize .8 3;
Equalize .8 - Invert .1 -; TranslateY .7 9 AutoContrast .9 -
"""


def _as_torchvision_has_them() -> list[list[tuple[str, float, float, bool]]]:
    """(operation, probability, magnitude for images of 32 × 32, whether its sign is drawn) by torchvision's tables."""
    turned = np.linspace(0.0, 0.9, 10)
    moved = np.linspace(0.0, 150.0 / 331.0 * 32, 10).astype(int)
    tables: dict[str, tuple[Any, bool]] = {
        "ShearX": (np.linspace(0.0, 0.3, 10), True), "ShearY": (np.linspace(0.0, 0.3, 10), True),
        "TranslateX": (moved, True), "TranslateY": (moved, True), "Rotate": (np.linspace(0.0, 30.0, 10), True),
        "Brightness": (turned, True), "Color": (turned, True), "Contrast": (turned, True), "Sharpness": (turned, True),
        "Posterize": (8 - (np.arange(10) / (9 / 4)).round(), False), "Solarize": (np.linspace(255.0, 0.0, 10), False),
    }  # fmt: skip
    found = []
    for pair in PAIRS.split(";"):
        words, entries = pair.split(), []
        for name, chance, step in (words[:3], words[3:]):
            table, signed = tables.get(name, (np.zeros(10), False))
            entries.append((name, float(chance), float(table[0 if step == "-" else int(step)]), signed))
        found.append(entries)
    return found


def test_autoaugment_s_operations_have_torchvision_s_probabilities_and_magnitudes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """100,000 draws: each operation with each magnitude comes as often as the policy says, to five deviations."""
    expected: dict[tuple[str, float], float] = {}
    for pair in _as_torchvision_has_them():
        for name, chance, size, signed in pair:
            for magnitude, part in ((size, 0.5), (-size, 0.5)) if signed else ((size, 1.0),):
                at = name, round(magnitude, 4) + 0.0
                expected[at] = expected.get(at, 0.0) + chance * part / 25
    seen: dict[tuple[str, float], int] = {}

    def counting(name: str) -> Any:
        def function(x: Any, magnitude: Any) -> Any:
            for value, count in zip(*(part.tolist() for part in magnitude.unique(return_counts=True)), strict=True):
                at = name, round(value, 4) + 0.0
                seen[at] = seen.get(at, 0) + count
            return x + 1

        return function

    known = {name: (counting(name), *rest) for name, (_, *rest) in augment._OPERATIONS.items()}
    monkeypatch.setattr(augment, "_OPERATIONS", known)
    x = torch.zeros(100_000, 1, 32, 1, dtype=torch.uint8)
    done = augment.autoaugment(x, torch.Generator().manual_seed(0))[:, 0, 0, 0]
    both = np.mean([first[1] * second[1] for first, second in _as_torchvision_has_them()])
    assert abs(float((done == 2).double().mean()) - both) < 5 * np.sqrt(both / len(x))  # each is drawn by itself
    assert seen.keys() <= {at for at, chance in expected.items() if chance}
    for at, chance in expected.items():
        assert abs(seen.get(at, 0) / len(x) - chance) <= 5 * np.sqrt(chance / len(x)), at


def test_crop_and_flip_only_move_pixels() -> None:
    x = torch.arange(1, 65, dtype=torch.uint8).view(1, 8, 8, 1).expand(200, 8, 8, 1)
    generator = torch.Generator().manual_seed(0)
    mirrored = (augment.flip(x, generator) == x.flip(2)).flatten(1).all(1)
    assert 70 < int(mirrored.sum()) < 130  # of 200, half: 4.2 deviations either way
    cut = augment.crop(x, generator)
    row, column = divmod(int(cut[0].max()) - 1, 8)  # the last pixel that is still there
    there = cut[0][cut[0] > 0].numel()
    assert there >= 16
    assert row >= 3
    assert column >= 3


def test_a_crop_is_any_window_of_the_image_with_its_margin() -> None:
    """All 81 shifts, each about as often as the others (40,500 draws: 500 of each, to six deviations)."""
    x = torch.arange(256, dtype=torch.uint8).view(1, 16, 16, 1).expand(40_500, 16, 16, 1)
    middle = augment.crop(x, torch.Generator().manual_seed(0))[:, 8, 8, 0].long()
    counts = torch.bincount(16 * (middle // 16 - 4) + middle % 16 - 4, minlength=256).view(16, 16)
    assert int(counts[:9, :9].sum()) == 40_500
    assert int((counts[:9, :9] - 500).abs().max()) < 6 * 500**0.5


def test_tiny_imagenet_s_augmentation_keeps_images_alike() -> None:
    x = torch.from_numpy(_pictures(40))
    out = augment.apply(("flip", "rotate", "jitter"), x, torch.Generator().manual_seed(0))
    assert (out.dtype, out.shape) == (torch.uint8, x.shape)
    off = (out.float() - x.float()).abs().mean()
    assert 5 < off < 60
    still = augment._turn_hue(x.float(), torch.zeros(len(x)))
    assert (still - x.float()).abs().max() <= 1


# --- networks and members ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet18-tiny", "vgg11", "cnn", "mlp"])
def test_members_train_like_pytorch(name: str) -> None:
    """Three steps of two members, against torch's own modules and AdamW."""
    size = 32 if name == "vgg11" else 16
    module = models.make(name, 10, 3, size, 0)
    layout = ModelLayout.of(module)
    start = torch.from_numpy(layout.flatten(module))
    fleet = Fleet(models.make(name, 10, 3, size, 0), layout, 2, 8, (size, size, 3), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 8, size, size, 3, generator=generator)
    y = torch.randint(0, 10, (3, 2, 8), generator=generator)
    for _ in range(2):  # the second round begins anew
        fleet.load(start)
        assert torch.equal(fleet.model(1), start)
        fleet.train(x, y)
    module.train()
    optimiser = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=1e-4)
    for images, labels in zip(x[:, 1], y[:, 1], strict=True):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(module(images.permute(0, 3, 1, 2)), labels).backward()
        optimiser.step()
    expected = torch.from_numpy(layout.flatten(module))
    moved = (expected - start).abs().max()
    assert (fleet.model(1) - expected).abs().max() < 1e-3 * moved
    module.eval()
    with torch.no_grad():
        logits = module(x[0, 0].permute(0, 3, 1, 2))
    assert torch.allclose(fleet.logits(expected, x[0, 0]), logits, atol=1e-5)


def test_resnet18_is_the_paper_s() -> None:
    layout = ModelLayout.of(models.make("resnet18", 10, 3, 32, 0))
    assert layout.coordinates == 11_164_352
    assert layout.size == 11_164_352 + 10 + 4 * 4800  # a bias; BatchNorm's scales, shifts, means and variances
    with pytest.raises(InputError, match="model"):
        models.make("resnet50", 10, 3, 32, 0)


# --- the mark ---------------------------------------------------------------------------------------------


def test_sums_of_squares_are_exact() -> None:
    numbers = torch.randint(-(2**44) + 1, 2**44, (300_000,), generator=torch.Generator().manual_seed(0))
    assert square_sum(numbers) == sum(n * n for n in numbers.tolist())
    with pytest.raises(InputError, match="below 16"):
        square_sum(torch.tensor([1 << 44]))


def test_norms_by_rows_columns_and_taps_are_exact() -> None:
    layout = ModelLayout.of({"a": np.zeros((3, 4, 5), np.float32), "b": np.zeros((6, 7), np.float32)})
    generator = torch.Generator().manual_seed(0)
    for size, weight in ((2**30, Fraction(1, 3)), (2**44, Fraction(5, 7)), (3, Fraction(1, 2))):
        d = torch.randint(-size + 1, size, (layout.size,), generator=generator)
        exact = []
        for cube in (d[:60].view(3, 4, 5), d[60:].view(6, 7)):
            for axis in range(cube.dim()):
                for part in cube.unbind(axis):
                    square = sum(n * n for n in part.reshape(-1).tolist())
                    exact.append(isqrt(weight.numerator**2 * square // weight.denominator**2))
        sums = axis_sums(torch.stack([torch.ones_like(d), d]), layout).numpy()  # of two members
        assert axis_norms(sums[:, 1], weight).tolist() == exact


SETTINGS = (
    {"rule": "rho", "rho": "0.05", "c_max": "0.2"},
    {"rule": "target", "z": "20"},
    {"rule": "relative", "c": "0.02"},
    {"rule": "paper", "c": "0.025"},
)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: s["rule"])
def test_the_ideal_mark_is_embed_s_bit_for_bit(settings: dict[str, str]) -> None:
    """Amplitudes, mark, sum and rounding on the device against `embed` and `codec` on the same local results."""
    module = models.make("resnet18-tiny", 10, 3, 16, 0)
    layout, rng = ModelLayout.of(module), np.random.default_rng(0)
    model = layout.flatten(module)
    key, shares = SeededKey(layout.coordinates, 0), [Fraction(3, 7), Fraction(4, 7)]
    mark = Mark(settings, layout, torch.from_numpy(model.copy()), [key], "cpu")
    strength = Strength.of(settings, layout.coordinates)
    state = MarkState(strength, layout, "rademacher", codec.encode(model))
    scales = [PaperScale(strength, layout) for _ in shares] if settings["rule"] == "paper" else []
    marked = 0
    for number in range(1, 6):
        local = [model + np.float32(0.01) * rng.standard_normal(model.size, np.float32) for _ in shares]
        rows = torch.from_numpy(np.stack(local))
        total = weighted_sum(rows, shares)
        ours, _ = mark.apply(number, torch.from_numpy(model), total, shares, rows.__getitem__)
        y = field.add(*(codec.encode(one, float(a)) for one, a in zip(local, shares, strict=True)))
        if scales:
            each = [s.scale(codec.encode(model), codec.encode(one)) for s, one in zip(scales, local, strict=True)]
            amplitudes = paper_amplitudes(strength, layout, "rademacher", number, field.add(*each), 2)
        else:
            amplitudes = state.amplitudes(number)
        if amplitudes.marks:
            ideal_mark(y, amplitudes, key.numpy().astype(np.int64))
            assert np.array_equal(mark.amplitude_vector(amplitudes).numpy(), amplitudes.vector.astype(np.int64))
            marked += 1
        theirs = codec.decode(y)
        assert np.array_equal(ours.numpy(), theirs)
        _advanced(state, number, theirs, model, local, shares, amplitudes)
        assert mark.rho == state.rho / (1 << 32)
        model = theirs
    assert marked >= 3
    mark.close()


def _advanced(
    state: Any, number: int, after: Any, before: Any, local: list[Any], shares: list[Fraction], amplitudes: Any
) -> None:
    embedded, extra = amplitudes if amplitudes.marks else None, ()
    if getattr(state.strength, "needs_norms", False):
        results = {x: codec.encode(one) for x, one in enumerate(local)}
        extra = (ideal_norms(state.layout, codec.encode(before), results, dict(enumerate(shares))),)  # type: ignore[attr-defined, unused-ignore, assignment]
    state.advance(number, codec.encode(after), embedded, *extra)


@pytest.mark.parametrize("rule", ["rho", "paper"])
def test_a_round_waits_for_the_state_of_the_round_before(rule: str) -> None:
    """What arrives for the worker lies where the last round's did: a slow worker must not find the next round there."""
    settings = {"rule": "rho", "rho": "0.05"} if rule == "rho" else {"rule": "paper", "c": "0.025"}
    settings["warmup_rounds"] = "1"  # the anchor is the first round's model
    module = models.make("cnn", 10, 3, 16, 0)
    layout, shares = ModelLayout.of(module), [Fraction(1, 2), Fraction(1, 2)]
    start = torch.from_numpy(layout.flatten(module))
    ends = []
    for slow in (False, True):
        mark = Mark(settings, layout, start, [SeededKey(layout.coordinates, 0)], "cpu")
        generator, model = torch.Generator().manual_seed(0), start
        for number in range(1, 6):
            rows = model + 0.01 * torch.randn(2, start.numel(), generator=generator)
            if slow:
                mark._worker.submit(time.sleep, 0.2)
            model, _ = mark.apply(number, model, weighted_sum(rows, shares), shares, rows.__getitem__)
        ends.append((mark.saved(), mark.rho, model))
        mark.close()
    assert ends[0][1] == ends[1][1] > 0
    assert ends[0][0]["state"] == ends[1][0]["state"]
    assert np.array_equal(ends[0][0]["anchor"], ends[1][0]["anchor"])
    assert torch.equal(ends[0][2], ends[1][2])


def test_an_update_that_is_too_large_is_told_by_the_next_who_ask(tmp_path: Path) -> None:
    """It is found in a thread, later: no checkpoint, no round and no end after it that looks as if all was well."""
    run = Run(replace(MINI, strength="rho:0.05"), data.load("shapes"))
    run.round()
    run.save(tmp_path / "c.pt")
    before = (tmp_path / "c.pt").read_bytes()
    assert isinstance(run.mark, Mark)
    local = run.model.expand(4, -1).clone()
    local[2, 0] += 17.0
    run.mark.apply(2, run.model, weighted_sum(local, run.weights), run.weights, local.__getitem__)
    for ask in (lambda: run.save(tmp_path / "c.pt"), run.round, run.close):
        with pytest.raises(InputError, match="below 16"):
            ask()
    assert (tmp_path / "c.pt").read_bytes() == before
    with pytest.raises(RuntimeError, match="shutdown"):
        run.mark._worker.submit(time.sleep, 0)  # its thread has ended all the same


def test_members_are_looked_at_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All together, in parts, one by one: the same state."""
    module = models.make("cnn", 10, 3, 16, 0)
    layout, shares = ModelLayout.of(module), [Fraction(n, 15) for n in range(1, 6)]
    start = torch.from_numpy(layout.flatten(module))
    rows = start + 0.01 * torch.randn(5, start.numel(), generator=torch.Generator().manual_seed(0))
    states = []
    for together in (5, 2, 0):
        monkeypatch.setattr("quorumark.research.lab.mark._TOGETHER", together * layout.carrier_size)
        mark = Mark({"rule": "rho", "rho": "0.05"}, layout, start, [SeededKey(layout.coordinates, 0)], "cpu")
        mark.apply(1, start, weighted_sum(rows, shares), shares, rows.__getitem__)
        states.append(mark.saved()["state"])
        mark.close()
    assert states[0] == states[1] == states[2]


@pytest.mark.parametrize("large", [1, 100, 1 << 30])
def test_sums_on_a_device_find_the_rows_columns_and_taps(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel looks for a row's, column's and tap's weight is where the device has it, in any order."""
    monkeypatch.setattr("quorumark.research.lab.fleet._LARGE", large)
    nn = torch.nn
    odd = nn.Sequential(nn.Linear(7, 5), nn.Conv1d(5, 3, 4), nn.Conv2d(6, 6, (2, 3), groups=6), nn.Linear(5, 1))
    for module in (odd, models.make("resnet18-tiny", 10, 3, 16, 0)):
        layout = ModelLayout.of(module)
        order = Order(module, layout, torch.device("cpu"))
        places = [(s, place) for s, place in layout.spans("carrier") if sorted(s.shape)[-1] < s.size]
        cubes = order.cubes(layout)
        assert len(cubes) == len(places) > 2
        for (first, rows, columns, taps, tap_step, column_step), (spec, place) in zip(cubes, places, strict=True):
            assert (rows, columns, taps) == (*spec.shape[:2], spec.size // (spec.shape[0] * spec.shape[1]))
            row, column, tap = torch.meshgrid(*map(torch.arange, (rows, columns, taps)), indexing="ij")
            found = order.to_device[first + row * taps * columns + tap * tap_step + column * column_step]
            assert torch.equal(found.reshape(-1), torch.arange(place.start, place.stop))


def test_a_known_key_is_the_same_everywhere_and_hidden() -> None:
    key = SeededKey(1001, 7)
    assert np.array_equal(key.numpy(), key.signs("cpu").numpy())
    assert abs(int(key.numpy().astype(int).sum())) < 160  # five deviations
    assert not np.array_equal(key.numpy(), SeededKey(1001, 7, 1).numpy())
    assert np.array_equal(SeededKey.of_signs(key.numpy()).numpy(), key.numpy())
    assert "hidden" in repr(key)


def test_z_finds_the_key_that_was_embedded_and_no_other() -> None:
    module = models.make("resnet18-tiny", 10, 3, 16, 0)
    layout = ModelLayout.of(module)
    start = layout.flatten(module)
    key = SeededKey(layout.coordinates, 0)
    end = start + np.float32(0.01) * np.random.default_rng(0).standard_normal(start.size, np.float32)
    end[: layout.coordinates] += np.float32(0.001) * key.numpy()
    found = z_scores(layout, end, start, {"right": key, "wrong": SeededKey(layout.coordinates, 1)})
    balanced = found["balanced-anchor/v1"]
    assert balanced["right"] > 20  # about 0.1·√d = 42
    for each in found.values():
        assert abs(each["wrong"]) < 5
    anchor = TensorsInMemory.of(layout, start)
    for name, seeded in (("right", key), ("wrong", SeededKey(layout.coordinates, 1))):
        exact = KnownKey(seeded.numpy(), layout, anchor).all_z(TensorsInMemory.of(layout, end))
        assert {statistic: each[name] for statistic, each in found.items()} == pytest.approx(exact, rel=1e-9)
    null = null_scores(layout, end, start, 200)
    known = KnownKey(SeededKey(layout.coordinates, 1 << 32, 199).numpy(), layout, anchor)
    assert null[199] == pytest.approx(known.z(TensorsInMemory.of(layout, end)), rel=1e-9)
    assert abs(float(np.mean(null))) < 5 / 200**0.5
    assert 0.75 < float(np.std(null)) < 1.25  # five deviations of a standard deviation from 200


# --- runs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strength",
    [
        "none",
        "rho:0.05",
        "paper:0.025",
        "per-client:0.1",
        "per-client-rho:0.05",
        "paper-code:0.1",
        "per-client-paper-code:0.1",
    ],
)
def test_a_run_made_in_pieces_is_the_same_run(strength: str, tmp_path: Path) -> None:
    settings, images = replace(MINI, strength=strength), data.load("shapes")
    whole = Run(settings, images)
    assert whole.train()
    first = Run(settings, images)
    assert not first.train(seconds=-1.0, checkpoint=tmp_path / "c.pt")  # no time at all: saved before the first round
    first.round()
    first.round()
    first.round()
    first.save(tmp_path / "c.pt")
    second = Run(settings, images)
    second.restore(tmp_path / "c.pt")
    assert second.train(checkpoint=tmp_path / "c.pt")
    assert torch.equal(second.model, whole.model)
    assert [(e.loss, e.accuracy, e.c) for e in second.log] == [(e.loss, e.accuracy, e.c) for e in whole.log]
    assert second.best.round == whole.best.round
    with pytest.raises(RecordError, match="other settings"):
        Run(replace(settings, seed=1), images).restore(tmp_path / "c.pt")
    for run in (whole, first, second):
        run.close()


def test_a_run_goes_back_to_a_checkpoint_while_its_state_is_on_the_move(tmp_path: Path) -> None:
    settings, images = replace(MINI, strength="rho:0.05"), data.load("shapes")
    whole, run = Run(settings, images), Run(settings, images)
    assert whole.train()
    run.round()
    run.round()
    run.save(tmp_path / "c.pt")
    assert isinstance(run.mark, Mark)
    run.mark._worker.submit(time.sleep, 0.2)
    run.round()  # its part of the state comes late
    run.restore(tmp_path / "c.pt")
    assert run.train()
    assert torch.equal(run.model, whole.model)
    assert run.mark.rho == (whole.mark and whole.mark.rho)
    for one in (whole, run):
        one.close()


def test_rounds_that_nobody_waits_for_have_their_losses_in_the_end(tmp_path: Path) -> None:
    """As on CUDA: known after the first round, after one that is validated, in a checkpoint, and at the end."""
    settings, images = replace(MINI, rounds=8, evaluate_every=3), data.load("shapes")
    eager, lazy = Run(settings, images), Run(settings, images)
    lazy._lazy = True
    told: list[float] = []
    eager.train()
    lazy.train(checkpoint=tmp_path / "c.pt", every=4, tell=lambda entry: told.append(entry.loss))
    known = [not np.isnan(loss) for loss in told]
    assert known == [True, False, True, False, False, True, False, True]
    assert [(e.loss, e.accuracy) for e in lazy.log] == [(e.loss, e.accuracy) for e in eager.log]
    assert len({entry.seconds for entry in lazy.log}) == 5  # rounds 2 and 3, 5 and 6, 7 and 8 share the time
    assert min(entry.seconds for entry in lazy.log) > 0
    stopped = Run(settings, images)
    stopped._lazy = True
    for _ in range(4):
        stopped.round()
    assert np.isnan(stopped.log[-1].loss)
    stopped.save(tmp_path / "d.pt")
    stopped.round()
    stopped.restore(tmp_path / "d.pt")
    assert stopped._open == []  # what is forgotten takes no time of the rounds to come
    assert [entry.loss for entry in stopped.log] == [entry.loss for entry in eager.log[:4]]
    stopped.round()
    assert not stopped.train(seconds=-1.0)  # the time is up
    assert [entry.loss for entry in stopped.log] == [entry.loss for entry in eager.log[:5]]
    stopped.train()
    assert [entry.loss for entry in stopped.log] == [entry.loss for entry in eager.log]
    for run in (eager, lazy, stopped):
        run.close()


def test_the_test_images_decide_nothing() -> None:
    """What is released hangs on the validation images alone; those are never trained on."""
    images, settings = data.load("shapes"), replace(MINI, rounds=6, lr=3e-3)
    wrong = replace(images, test_x=images.test_x[::-1].copy(), test_y=(images.test_y + 1) % 4)
    one, two = Run(settings, images), Run(settings, wrong)
    for run in (one, two):
        run.train()
    assert [entry.accuracy for entry in one.log] == [entry.accuracy for entry in two.log]
    assert torch.equal(one.best.model, two.best.model)
    assert one.fleet.accuracy(one.best.model, *one.test) != two.fleet.accuracy(two.best.model, *two.test)
    assert one.best.accuracy == one.fleet.accuracy(one.best.model, *one.validation)
    assert one.best.accuracy == max(entry.accuracy or 0.0 for entry in one.log)
    held_out = {x.tobytes() for x in images.train_x[data.split(images.train_y, 0.2, 0)[1]]}
    assert len(held_out) == len(one.validation[1]) == 120
    assert not held_out & {x.numpy().tobytes() for x in one._x}


def test_members_learn_and_the_mark_shows() -> None:
    run = Run(replace(MINI, strength="relative:0.1", rounds=12, lr=3e-3), data.load("shapes"))
    run.train()
    assert run.best.accuracy > 0.6  # of four kinds
    found = z_scores(run.layout, run.model.numpy(), run.initial.numpy(), {"key": run.keys[0]})
    assert found["balanced-anchor/v1"]["key"] > 5
    run.close()


@pytest.mark.parametrize("strength", ["none", "rho:0.05", "paper:0.025", "per-client:0.1", "per-client-rho:0.05"])
def test_the_real_protocol_gives_the_same_bits(strength: str) -> None:
    pytest.importorskip("cryptography")
    from quorumark.research.lab.masked import compare

    found = compare(replace(MINI, strength=strength), data.load("shapes"), 4)
    assert [r.different for r in found] == [0] * 4
    assert found[-1].marked == (strength != "none")
    assert (found[-1].largest > 0) == (strength != "none")


def test_batches_are_an_epoch_of_each_member_s_own_images() -> None:
    run = Run(replace(MINI, members=3, global_batch=90, augment=()), data.load("shapes"))
    x, y = run.batches(1)
    assert (run.steps, run.batch) == (6, 30)  # 160 images each: the last batch is filled up
    assert x.shape == (6, 3, 30, 16, 16, 3)
    for k in range(3):
        own = {run._x[i].numpy().tobytes() for i in run._own[k].tolist()}
        mean, spread = run._spread
        back = torch.round((x[:, k] * torch.tensor(spread) + torch.tensor(mean)) * 255).to(torch.uint8)
        assert {one.numpy().tobytes() for one in back.reshape(-1, 16, 16, 3)} == own
    assert not torch.equal(run.batches(2)[1], y)
    assert torch.equal(run.batches(1)[0], x)


def test_gradients_that_are_not_copied_together_train_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """All carriers large, some of them, none: the same models bit for bit."""
    ends = []
    for large in (1, 300, 1000, 1 << 30):
        monkeypatch.setattr("quorumark.research.lab.fleet._LARGE", large)
        run = Run(replace(MINI, rounds=2, strength="rho:0.05"), data.load("shapes"))
        ends.append((len(run.fleet.order.large), run.train() and run.model))
        run.close()
    counts, found = zip(*ends, strict=True)
    assert counts == (4, 3, 2, 0)
    assert all(torch.equal(model, found[-1]) for model in found)


@pytest.mark.parametrize("channels", [1, 3])
def test_black_channels_change_nothing(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images are widened for a GPU's sake: the same losses, the same models, up to the order of sums."""
    module = models.make("cnn", 10, channels, 16, 0)
    layout = ModelLayout.of(module)
    start = torch.from_numpy(layout.flatten(module))
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(3, 2, 8, 16, 16, channels, generator=generator), torch.randint(0, 10, (3, 2, 8))
    ends = []
    for stem in (None, "conv1.weight"):
        monkeypatch.setattr(Fleet, "_widened", lambda _fleet, _channels, stem=stem: stem)
        fleet = Fleet(models.make("cnn", 10, channels, 16, 1), layout, 2, 8, (16, 16, channels), torch.device("cpu"))
        assert fleet._x.shape[-1] == (channels if stem is None else 8)
        fleet.load(start)
        loss = fleet.train(x, y)
        ends.append((loss, fleet.model(1), fleet.logits(fleet.model(0), x[0, 0])))
    assert not torch.equal(ends[0][1], start)
    for ours, theirs in zip(*ends, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4)


def test_a_fleet_trains_rounds_of_any_length() -> None:
    """A fleet serves several runs; each round begins Adam anew, however long the one before was."""
    module = models.make("cnn", 10, 3, 16, 0)
    layout = ModelLayout.of(module)
    start = torch.from_numpy(layout.flatten(module))
    x, y = torch.randn(3, 2, 8, 16, 16, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(3, 2, 8).long()
    ends = []
    for lengths in ((3,), (1, 3), (3, 2, 3)):
        fleet = Fleet(models.make("cnn", 10, 3, 16, 1), layout, 2, 8, (16, 16, 3), torch.device("cpu"))
        for steps in lengths:
            fleet.load(start)
            fleet.train(x[:steps], y[:steps])
        ends.append(fleet.model(1))
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


# --- on a GPU ---------------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
def test_members_on_a_gpu_train_as_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to bfloat16: the same losses, and updates in the same direction; each member on its own images."""
    monkeypatch.setattr("quorumark.research.lab.fleet._LARGE", 1000)
    module = models.make("cnn", 10, 3, 16, 0)
    layout = ModelLayout.of(module)
    start = torch.from_numpy(layout.flatten(module))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 64, 16, 16, 3, generator=generator)
    y = torch.randint(0, 10, (5, 3, 64), generator=generator)
    x[..., 0] += 0.3 * y[..., None, None]
    updates, losses = {}, {}
    for device in ("cpu", "cuda"):
        own = models.make("cnn", 10, 3, 16, 0)
        fleet = Fleet(own, layout, 3, 64, (16, 16, 3), torch.device(device), streams=2)
        for _ in range(2):  # the second time from the graph alone
            fleet.load(start.to(device))
            losses[device] = float(fleet.train(x.to(device, fleet.kind), y.to(device)))
        updates[device] = torch.stack([fleet.model(k).cpu() - start for k in range(3)])[:, : layout.carrier_size]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=0.02)
    for k in range(3):
        assert torch.cosine_similarity(updates["cpu"][k], updates["cuda"][k], dim=0) > 0.8
    assert not torch.allclose(updates["cuda"][0], updates["cuda"][1])


@needs_gpu
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 8, 5, 3), (3, 70, 4, 4), (64, 64, 32, 32), (64, 512, 4, 4)])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("cut", [False, True])
def test_batch_norm_on_a_gpu_is_what_it_says(kind: Any, shape: tuple[int, ...], added: bool, cut: bool) -> None:
    """Outputs, gradients and running statistics as PyTorch's in float64, means far from 0 among them."""
    from quorumark.research.lab._norms import norm

    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(*sizes: int, kind: Any = torch.float32) -> Any:
        return torch.randn(sizes, generator=generator, device="cuda").to(kind)

    channels = shape[1]
    x = (2 * drawn(*shape) + 5 * drawn(channels)[:, None, None]).to(kind).to(memory_format=torch.channels_last)
    inputs = [x, drawn(channels), drawn(channels)] + ([drawn(*shape, kind=kind)] if added else [])
    wanted_inputs = [t.double().requires_grad_() for t in inputs]
    inputs = [t.requires_grad_() for t in inputs]
    running = drawn(channels), drawn(channels) ** 2
    wanted_running = [t.double() for t in running]
    dy = drawn(*shape, kind=kind)
    shortcut = inputs[3] if added else None
    y = norm(inputs[0], shortcut, inputs[1], inputs[2], running, cut=cut, eps=1e-5)
    z = torch.nn.functional.batch_norm(wanted_inputs[0], *wanted_running, *wanted_inputs[1:3], True, 0.1, 1e-5)
    z = z + wanted_inputs[3] if added else z
    z = z.relu() if cut else z
    found = [y, *torch.autograd.grad(y, inputs, dy), *running]
    wanted = [z, *torch.autograd.grad(z, wanted_inputs, dy.double()), *wanted_running]
    exact, near = (2e-5, 5e-3 if cut else 2e-5) if kind == torch.float32 else (1e-2, 2e-2)  # a few are cut at 0
    for i, (one, two) in enumerate(zip(found, wanted, strict=True)):
        assert float((one - two).norm() / two.norm()) < (near if 0 < i < 1 + len(inputs) else exact)


@needs_gpu
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: s["rule"])
def test_the_mark_on_a_gpu_is_the_same_bits(settings: dict[str, str]) -> None:
    module = models.make("resnet18-tiny", 10, 3, 16, 0)
    layout, shares = ModelLayout.of(module), [Fraction(3, 7), Fraction(4, 7)]
    model = torch.from_numpy(layout.flatten(module))
    key = SeededKey(layout.coordinates, 0)
    marks = {device: Mark(settings, layout, model.to(device), [key], device) for device in ("cpu", "cuda")}
    generator = torch.Generator().manual_seed(0)
    for number in range(1, 6):
        local = model + 0.01 * torch.randn(2, model.numel(), generator=generator)
        found = {}
        for device, mark in marks.items():
            rows = local.to(device)
            total = weighted_sum(rows, shares)
            found[device] = mark.apply(number, model.to(device), total, shares, rows.__getitem__)[0].cpu()
        assert torch.equal(found["cpu"], found["cuda"])
        model = found["cpu"]
    assert marks["cuda"].rho > 0


@needs_gpu
def test_sums_on_a_gpu_are_the_same_whole_numbers() -> None:
    """In one pass, from the device's own order; with ties, which go to the even number, and differences up to 16."""
    module = models.make("resnet18-tiny", 10, 3, 16, 0)
    layout, shares = ModelLayout.of(module), [Fraction(3, 7), Fraction(3, 7), Fraction(1, 7)]
    start = torch.from_numpy(layout.flatten(module))
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([1e-3, 0.1, 3.0])[:, None]
    local = start + sizes * torch.randn(3, start.numel(), generator=generator).clamp(-5, 5)
    assert torch.equal(weighted_sum(local.cuda(), shares).cpu(), weighted_sum(local, shares))
    ties = (torch.arange(-500, 500) + 0.5).float()[None] * 2.0**-40
    assert torch.equal(weighted_sum(ties.cuda(), [Fraction(1)]).cpu(), weighted_sum(ties, [Fraction(1)]))
    end, origin = layout.carrier_size, encoded(start)
    wanted = axis_sums(torch.stack([(encoded(row) - origin)[:end] for row in local]), layout)
    fleet = Fleet(module, layout, 3, 8, (16, 16, 3), torch.device("cuda"))
    fleet.load(start.cuda())
    fleet.theta.copy_(local.cuda()[:, fleet.order.to_device])
    found = fleet.update_sums().cpu()
    assert torch.equal(found[:, :, :-1], wanted[:, :, :-1])
    assert found[0, :, -1].max() == wanted[0, :, -1].max()


@needs_gpu
def test_rounds_on_a_gpu_that_nobody_waits_for_are_the_same() -> None:
    """Validated at every round or at the end only: the same models up to the order of sums; all losses are known."""
    ends, settings = [], replace(MINI, rounds=6, strength="rho:0.05")
    for every in (1, 6):
        run = Run(replace(settings, evaluate_every=every), data.load("shapes"), "cuda")
        assert run.train()
        assert all(0 < entry.loss < 10 and entry.seconds > 0 for entry in run.log)
        assert run.log[-1].c > 0
        ends.append(run.model - run.initial)
        run.close()
    assert torch.cosine_similarity(*ends, dim=0) > 0.9


@needs_gpu
def test_a_run_on_a_gpu_learns() -> None:
    steps = ("crop", "flip", "autoaugment")
    run = Run(replace(MINI, strength="relative:0.1", rounds=12, lr=3e-3, augment=steps), data.load("shapes"), "cuda")
    run.train()
    assert run.log[-1].loss < 0.8 * run.log[0].loss
    found = z_scores(run.layout, run.model.cpu().numpy(), run.initial.cpu().numpy(), {"key": run.keys[0]}, "cuda")
    assert found["balanced-anchor/v1"]["key"] > 5


# --- configurations and results ---------------------------------------------------------------------------


def test_settings_are_checked() -> None:
    for wrong in ({"strength": "rho"}, {"strength": "loud:1"}, {"partition": "dirichlet:x"}, {"rounds": 0}):
        with pytest.raises(InputError):
            replace(MINI, **wrong)
    assert replace(MINI, partition="dirichlet:0.5").gamma == 0.5
    with pytest.raises(InputError, match="one of"):
        read("table9")


def test_the_paper_s_cells_have_their_configurations() -> None:
    runs = {name: {run.id for run in read(name).runs} for name in configurations()}
    assert set(runs) == {"clients", "dither", "language", "null", "robustness", "strength", "table1", "table2"}
    for strength in ("none", "rho0.05", "paper-code0.025", "paper-code0.05", "paper-code0.075", "paper-code0.1"):
        for dataset in ("cifar10", "cifar100", "tiny-imagenet"):
            assert {f"{dataset}-resnet18-k32-iid-{strength}-s{seed}" for seed in (0, 1, 2)} <= runs["table1"]
    assert {f"cifar100-resnet18-k32-dirichlet{g}-none-s0" for g in ("0.25", "0.5", "0.75", "1.0")} <= runs["table2"]
    for strength in ("per-client0.1", "per-client-paper-code0.1", "paper-code0.025"):
        assert {f"cifar10-resnet18-k{k}-iid-{strength}-s0" for k in (4, 8, 16, 32, 64, 128)} <= runs["clients"]
    first = read("table1").runs[0]
    assert (first.rounds, first.global_batch, first.lr, first.decay) == (300, 2048, 1e-3, 1e-4)
    assert read("table1").figure("accuracy", first) == "88.08 ± 0.53"


def _miniature(name: str, path: Path) -> int:
    """A configuration with every kind of run that it has, small: one seed, few members, images of noise with bars."""
    lines, seen = ['title = "miniature"', f'plot = "{read(name).plot}"'], set()
    for run in read(name).runs:
        members = 4 if run.members <= 32 else 6
        chosen = (run.strength, run.partition, members, run.augment, bool(run.null_keys), run.dither)
        if run.seed or chosen in seen:
            continue
        seen.add(chosen)
        model = "cnn" if "autoaugment" in run.augment else "mlp"  # told apart by their ids
        lines += [
            "[[grid]]", 'dataset = "shapes"', f'model = "{model}"', "rounds = 3", "global_batch = 192",
            f'strength = "{run.strength}"', f'partition = "{run.partition}"', f"members = {chosen[2]}",
            f"augment = {json.dumps(run.augment)}", f"null_keys = {20 if run.null_keys else 0}",
            f"dither = {run.dither}", f"continuity = {str(run.continuity).lower()}",
        ]  # fmt: skip
    path.write_text("\n".join(lines))
    return len(seen)


@pytest.mark.parametrize("name", [name for name in configurations() if read(name).task == "vision"])
def test_a_miniature_of_every_configuration(name: str, tmp_path: Path) -> None:
    count = _miniature(name, tmp_path / "mini.toml")
    folders = ["--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs")]
    words = ["lab", "run", str(tmp_path / "mini.toml"), *folders, "--device", "cpu"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    files = sorted((tmp_path / "results").glob("*.json"))
    assert len(files) == count
    for file in files:
        body = json.loads(file.read_text())
        assert body["rounds"] == 3
        assert set(body["z"]["released"]) >= {"balanced-anchor/v1", "global-cosine/v1", "mean-tensor-cosine/v1"}
        assert (body["rho"] is None) == (body["settings"]["strength"] == "none")
        released = tmp_path / "runs" / body["id"] / "released.safetensors"
        assert sum(t.size for n, t in read_safetensors(released).items() if "tracked" not in n) == body["parameters"]
    again = CliRunner().invoke(app, words, catch_exceptions=False)
    assert again.output.count("done (3 rounds)") == count


def test_runs_abreast_are_the_same_runs(tmp_path: Path) -> None:
    """Bit for bit: nothing that threads share decides anything, not even the numbers that first weights come from."""
    config = tmp_path / "mini.toml"
    config.write_text(
        'title = "mini"\n[run]\ndataset = "shapes"\nmodel = "cnn"\nmembers = 2\nrounds = 3\nglobal_batch = 480\n'
        '[[grid]]\nstrength = ["none", "relative:0.1"]\nseed = [0, 1, 2]\n'
    )
    made = {}
    for abreast in ("1", "3"):
        folder = tmp_path / abreast
        words = ["lab", "run", str(config), "--results", str(folder / "results"), "--runs", str(folder / "runs")]
        done = CliRunner().invoke(app, [*words, "--device", "cpu", "--abreast", abreast], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        assert done.output.count("3 rounds, test") == 6
        made[abreast] = {
            path.parent.name: path.read_bytes() for path in (folder / "runs").glob("*/released.safetensors")
        }
        told = [json.loads(file.read_text()).get("abreast") for file in (folder / "results").glob("*.json")]
        assert told == 6 * [None if abreast == "1" else 3]  # what its seconds are worth
    assert len(made["1"]) == 6
    assert len(set(made["1"].values())) >= 3  # seeds; before the first marked round the mark changes nothing
    assert made["1"] == made["3"]


def test_a_run_that_fails_leaves_the_others_alone(tmp_path: Path) -> None:
    config = tmp_path / "mini.toml"
    config.write_text(
        'title = "mini"\n[run]\ndataset = "shapes"\nmodel = "mlp"\nmembers = 2\nrounds = 2\nglobal_batch = 480\n'
        '[[grid]]\nstrength = "none"\nseed = [0, 1, 2, 3]\n'
    )
    checkpoint = tmp_path / "runs" / "shapes-mlp-k2-iid-none-s0" / "checkpoint.pt"
    checkpoint.parent.mkdir(parents=True)
    torch.save({"settings": {}}, checkpoint)
    words = ["lab", "run", str(config), "--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs")]
    failed = CliRunner().invoke(app, [*words, "--device", "cpu", "--abreast", "2"])
    assert isinstance(failed.exception, RecordError)
    assert {file.stem[-2:] for file in (tmp_path / "results").glob("*.json")} == {"s1", "s2", "s3"}


def test_results_become_a_page_and_a_changed_page_is_noticed(tmp_path: Path) -> None:
    from quorumark.research.lab.page import page as make_page

    results, page = tmp_path / "results", tmp_path / "page.md"
    config = tmp_path / "mini.toml"
    config.write_text(
        'title = "mini"\n[run]\ndataset = "shapes"\nmodel = "mlp"\nmembers = 2\nrounds = 2\nglobal_batch = 480\n'
        '[[grid]]\nstrength = ["none", "relative:0.1"]\n'
    )
    runs = ["--results", str(results), "--runs", str(tmp_path / "runs")]
    CliRunner().invoke(app, ["lab", "run", str(config), *runs, "--rounds", "1"], catch_exceptions=False)
    CliRunner().invoke(app, ["lab", "run", str(config), *runs], catch_exceptions=False)  # goes on to the second round
    bodies = [json.loads(file.read_text()) for file in sorted(results.glob("*.json"))]
    assert [body["rounds"] for body in bodies] == [2, 2]
    for body in bodies:  # as if they were of table 1
        strength = {"none": "none", "relative:0.1": "rho:0.05"}[body["settings"]["strength"]]
        run = replace(read("table1").runs[0], strength=strength)
        body["id"], body["settings"] = run.id, {**run.asdict(), "rounds": 2}
        (results / f"{body['id']}.json").write_text(json.dumps(body))
    for file in results.glob("shapes*.json"):
        file.unlink()
    words = ["lab", "table", "--results", str(results), "--out", str(page)]
    astray = CliRunner().invoke(app, [*words[:3], str(tmp_path / "nowhere"), *words[4:]])
    assert isinstance(astray.exception, InputError)
    assert not page.exists()
    assert CliRunner().invoke(app, words).exit_code == 0
    text = page.read_text()
    row = next(line for line in text.splitlines() if line.startswith("| cifar10 | 32 | iid | none | 88.08"))
    assert f"{100 * bodies[0]['accuracy']['released']:.2f}" in row
    assert "shorter (2 rounds, 1 of 3 seeds)" in row
    assert "| cifar10 | 32 | iid | paper-code:0.1 | 86.89 ± 0.32 |  |" in text
    assert CliRunner().invoke(app, [*words, "--check"]).exit_code == 0
    page.write_text(text.replace("88.08", "88.09"))
    assert isinstance(CliRunner().invoke(app, [*words, "--check"]).exception, RecordError)
    # differences are of the runs that are shown: a pair of short runs says nothing about a long one
    every = {body["id"]: body for body in map(json.loads, (file.read_text() for file in results.glob("*.json")))}
    long = {name: {**body, "rounds": 300, "accuracy": {"released": 0.5}} for name, body in every.items()}
    for name, body in every.items():
        other = name.replace("-s0", "-s1")
        short = {"released": 0.5 if "none" in name else 0.1}
        long[other] = {**body, "id": other, "settings": {**body["settings"], "seed": 1}, "accuracy": short}
    row = next(line for line in make_page([read("table1")], long).splitlines() if "| 32 | iid | rho:0.05 |" in line)
    assert "full (300 rounds, 1 of 3 seeds); seed 1: 2 rounds, 10.00, z " in row
    assert "| +0.00 |" in row
    # a result stands for the run that it is of, and for no other
    file = results / f"{bodies[0]['id']}.json"
    for change, match in (
        ({"lr": 0.5}, "was run with lr 0.5"),
        ({"dataset": "shapes"}, "named after"),
        (None, "named"),
    ):
        settings = None if change is None else {**bodies[0]["settings"], **change}
        file.write_text(json.dumps({**bodies[0], "settings": settings}))
        with pytest.raises(RecordError, match=match):
            CliRunner().invoke(app, words, catch_exceptions=False)
    file.write_text(json.dumps(bodies[0]))
    (results / "forged.json").write_text("{}")
    with pytest.raises(RecordError, match="named after"):
        CliRunner().invoke(app, words, catch_exceptions=False)


def test_only_chooses_runs_and_their_order(tmp_path: Path) -> None:
    config = tmp_path / "mini.toml"
    config.write_text(
        'title = "mini"\n[run]\ndataset = "shapes"\nmodel = "mlp"\nmembers = 2\nrounds = 1\nglobal_batch = 480\n'
        '[[grid]]\nstrength = ["none", "rho:0.02", "rho:0.05"]\nseed = [0, 1]\n'
    )
    words = ["lab", "run", str(config), "--results", str(tmp_path), "--runs", str(tmp_path)]
    late = CliRunner().invoke(app, [*words, "--seconds", "1"], catch_exceptions=False)
    assert late.output.count("no time left") == 6
    done = CliRunner().invoke(app, [*words, "--only", "*rho0.05*,*none*", "--seed", "1"], catch_exceptions=False)
    ends = [line.split(":")[0] for line in done.output.splitlines() if "1 rounds, test" in line]
    assert ends == ["shapes-mlp-k2-iid-rho0.05-s1", "shapes-mlp-k2-iid-none-s1"]
    with pytest.raises(InputError, match="must leave some"):
        CliRunner().invoke(app, [*words, "--only", "cifar*"], catch_exceptions=False)


def test_a_run_that_diverges_ends_and_the_others_go_on(tmp_path: Path) -> None:
    """Its round is named, nothing is recorded of it, and the command fails in the end."""
    text = """
        title = "one of two diverges"
        [run]
        dataset = "shapes"
        model = "mlp"
        global_batch = 64
        members = 2
        rounds = 3
        [[grid]]
        strength = "none"
        lr = 1e30
        [[grid]]
        strength = "rho:0.05"
    """
    (tmp_path / "two.toml").write_text(text)
    words = ["lab", "run", str(tmp_path / "two.toml"), "--results", str(tmp_path / "r"), "--runs", str(tmp_path / "c")]
    done = CliRunner().invoke(app, [*words, "--device", "cpu"])
    assert isinstance(done.exception, RoundError)
    assert str(done.exception) == "diverged, and not recorded: shapes-mlp-k2-iid-none-s0"
    assert "shapes-mlp-k2-iid-none-s0: round " in done.output
    assert ", the run has diverged; try a smaller learning rate" in done.output
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["shapes-mlp-k2-iid-rho0.05-s0.json"]


def test_a_shorter_run_does_not_take_a_longer_one_s_place(tmp_path: Path) -> None:
    from quorumark.research.lab.results import write

    body = {"id": "a", "rounds": 3}
    assert write(body, tmp_path) is not None
    assert write({"id": "a", "rounds": 2}, tmp_path) is None
    assert json.loads((tmp_path / "a.json").read_text())["rounds"] == 3


def _error(values: list[float]) -> float:
    """The standard error of their mean."""
    return float(np.std(values, ddof=1) / len(values) ** 0.5)


def test_readme_says_what_the_runs_found() -> None:
    from quorumark.research.lab.results import BALANCED, best_evidence, groups, read_all

    root = Path(__file__).parents[2]
    readme, results = (
        " ".join((root / "README.md").read_text().replace("\n>", "\n").split()),
        read_all(root / "results"),
    )
    found = {
        (runs[0].dataset, runs[0].members, runs[0].strength): best_evidence(runs, results)
        for runs in (*groups(read("clients")), *groups(read("table1")))
    }

    def shown(dataset: str) -> tuple[str, str]:
        marked, plain = found[dataset, 32, "rho:0.05"], found[dataset, 32, "none"]
        assert [body["rounds"] for body in (*marked, *plain)] == [300] * (3 + 3)
        z = np.mean([body["z"]["released"][BALANCED] for body in marked])
        return f"z = {z:.0f} at {accuracy(marked)} %", f"{accuracy(plain)} % without"

    def accuracy(bodies: list[dict[str, Any]]) -> str:
        found = [100 * body["accuracy"]["released"] for body in bodies]
        return f"{np.mean(found):.1f}" + (f" ± {np.std(found, ddof=1):.1f}" if len(found) > 1 else "")

    assert "on CIFAR-10 {} accuracy, {} the mark;".format(*shown("cifar10")) in readme
    assert "on CIFAR-100 {}, {}.".format(*shown("cifar100")) in readme
    with_it, without = (
        [100 * body["accuracy"]["released"] for body in found["cifar100", 32, strength]]
        for strength in ("rho:0.05", "none")
    )
    lost, noise = np.mean(without) - np.mean(with_it), 2 * np.hypot(_error(with_it), _error(without))
    assert f"That is {lost:.2f} points less on CIFAR-100, just beyond our aim of 0.1" in readme
    assert 0.1 < lost < noise  # "cannot tell it from none", by the seeds of both sides
    counts = (4, 8, 16, 32, 64, 128)
    shared, own = (
        [np.mean([body["z"]["released"][BALANCED] for body in found["cifar10", k, strength]]) for k in counts]
        for strength in ("rho:0.05", "per-client-rho:0.05")
    )
    assert f"z stays between {min(shared):.0f} and {max(shared):.0f} from 4 members to 128" in readme
    assert f"fall from {own[0]:.0f} to {own[-1]:.0f}." in readme


def test_the_page_says_whether_the_mark_costs_accuracy() -> None:
    """Losses beyond the noise of seeds, and a z that is too small by either statistic, are not called a success."""
    from quorumark.research.lab.page import page
    from quorumark.research.lab.results import BALANCED, GLOBAL, read_all

    results = read_all(Path(__file__).parents[2] / "results")
    name = "cifar10-resnet18-k32-iid-{}-s{}".format
    plain = results[name("none", 0)]["accuracy"]["released"]
    more = {name(strength, seed) for strength in ("none", "rho0.1") for seed in (1, 2)}
    results = {key: body for key, body in results.items() if key not in more}
    for seed, change in enumerate((-0.001, 0.0, 0.001)):  # σ = 0.1 points; one run against one: 2·0.1·√2 = 0.28
        results[name("rho0.05", seed)]["accuracy"]["released"] = plain + change

    def row(loss: float, **zs: float) -> list[str]:
        body = results[name("rho0.1", 0)]
        changed = {"released": {**body["z"]["released"], BALANCED: zs.get("z", 400), GLOBAL: zs.get("cosine", 400)}}
        marked = {**body, "accuracy": {"released": plain - loss / 100}, "z": changed}
        text = page([read("table1")], {**results, body["id"]: marked})
        (line,) = (line for line in text.splitlines() if line.startswith("| cifar10 | rho:0.1 | 1 and 1 |"))
        return line.strip("| ").split(" | ")[3:]

    assert row(0.05) == ["-0.05", "± 0.28", "true", "400.0", "400.0", "true (≥ 320)"]
    assert row(0.25)[:3] == ["-0.25", "± 0.28", "not told from noise"]
    assert row(0.30)[:3] == ["-0.30", "± 0.28", "false"]
    assert row(0.0, z=319.0)[-1] == row(0.0, cosine=319.0)[-1] == "false (≥ 320)"
    assert f"| {name('rho0.05', 0)} |" in page([read("table1")], results)
    alone = {key: body for key, body in results.items() if key not in (name("rho0.05", 1), name("rho0.05", 2))}
    assert "| cifar10 | rho:0.1 | 1 and 1 |" not in page([read("table1")], alone)  # of one seed there is no deviation


def test_rho_of_a_key_for_each_member_is_that_of_all_marks_together() -> None:
    """K marks of S/K with independent signs have a norm of ‖S‖/√K; the state, which knows of one key, says ‖S‖."""
    from quorumark.research.lab.page import page
    from quorumark.research.lab.results import read_all

    results = read_all(Path(__file__).parents[2] / "results")
    shown = page([read("clients")], results).splitlines()
    for run in read("clients").runs:
        if run.per_client and run.id in results:
            row = next(line for line in shown if line.startswith(f"| cifar10 | {run.members} | iid | {run.strength} |"))
            assert f"| {results[run.id]['rho'] / run.members**0.5:.4f} |" in row
    signs = np.random.default_rng(0).choice([-1, 1], (16, 100_000)).sum(axis=0) / 16
    assert np.linalg.norm(signs) / 100_000**0.5 == pytest.approx(16**-0.5, rel=0.02)


@pytest.mark.parametrize("name", ["clients", "strength"])
def test_the_lab_s_figures_are_of_these_results(name: str) -> None:
    """`quorumark lab plot` was run since results changed: what a figure shows is named in it."""
    from quorumark.research.lab.plot import digest, points
    from quorumark.research.lab.results import read_all

    root = Path(__file__).parents[2]
    found = points(read(name), read_all(root / "results"))
    assert digest(found) in (root / "docs" / "figures" / f"lab-{name}.svg").read_text()
    assert digest(found[1:]) != digest(found)


def test_a_figure_s_line_joins_runs_of_one_length() -> None:
    from quorumark.research.lab.plot import Point, joined, points
    from quorumark.research.lab.results import read_all

    drawn = [Point("a", at, 1.0, None, rounds == 300, rounds) for at, rounds in ((4, 30), (8, 30), (32, 300), (64, 30))]
    assert [point.at for point in joined(drawn)] == [4, 8, 64]
    assert [point.at for point in joined(drawn[1:3])] == [32]
    assert joined([]) == []
    found = points(read("clients"), read_all(Path(__file__).parents[2] / "results"))
    code = [point for point in found if point.line == "paper-code:0.025"]
    assert {point.at for point in code} - {point.at for point in joined(code)} == {32}  # 300 rounds among 30
    zs = {point.at: point.papers or 0.0 for point in joined(code)}
    assert (f"{zs[4]:.1f}", f"{zs[8]:.1f}", f"{zs[128]:.1f}") == ("3.7", "4.1", "8.1")  # as the notes say
    assert min(z for at, z in zs.items() if at > 8) > zs[8]
    assert max(zs.values()) == zs[128]


def test_figures_and_timings(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "figures" / "f.svg"
    words = ["lab", "plot", "clients", "--out", str(out), "--results"]
    with pytest.raises(InputError, match="with results of clients"):  # from another folder, say: no empty figure
        CliRunner().invoke(app, [*words, str(tmp_path)], catch_exceptions=False)
    assert not out.exists()
    done = CliRunner().invoke(app, [*words, str(Path(__file__).parents[2] / "results")], catch_exceptions=False)
    assert f"drawn: {out}, " in done.output
    assert out.read_text().startswith("<?xml")
    words = ["lab", "time", "--members", "2", "--model", "cnn", "--rounds", "1", "--device", "cpu"]
    shown = CliRunner().invoke(app, [*words, "--profile"], catch_exceptions=False).output
    assert "s a round" in shown
    assert "µs in all" in shown
