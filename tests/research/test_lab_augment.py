"""The lab's augmentation against PIL and torchvision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quorumark.errors import InputError

torch = pytest.importorskip("torch")
from quorumark.research.lab import augment  # noqa: E402

pytestmark = [pytest.mark.research, pytest.mark.usefixtures("one_thread")]


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
