"""Augmentation of whole batches of bytes on the device: tensor operations only, the same for the same generator.

Batches are uint8 in NHWC. Each image draws its own operations and magnitudes; images with the same operation are
worked on together. The operations are PIL's, as AutoAugment (Cubuk et al., 2019) uses them, in the variant that
torchvision has: magnitudes in ten steps, nearest-neighbour warping, black where nothing is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor

from quorumark.errors import InputError

__all__ = ["STEPS", "apply", "normalise"]

# AutoAugment's policy for CIFAR-10: 25 pairs of (operation, probability, step of the magnitude)
_POLICY = """
Invert 0.1 0, Contrast 0.2 6 | Rotate 0.7 2, TranslateX 0.3 9 | Sharpness 0.8 1, Sharpness 0.9 3
ShearY 0.5 8, TranslateY 0.7 9 | AutoContrast 0.5 0, Equalize 0.9 0 | ShearY 0.2 7, Posterize 0.3 7
Color 0.4 3, Brightness 0.6 7 | Sharpness 0.3 9, Brightness 0.7 9 | Equalize 0.6 0, Equalize 0.5 0
Contrast 0.6 7, Sharpness 0.6 5 | Color 0.7 7, TranslateX 0.5 8 | Equalize 0.3 0, AutoContrast 0.4 0
TranslateY 0.4 3, Sharpness 0.2 6 | Brightness 0.9 6, Color 0.2 8 | Solarize 0.5 2, Invert 0.0 0
Equalize 0.2 0, AutoContrast 0.6 0 | Equalize 0.2 0, Equalize 0.6 0 | Color 0.9 9, Equalize 0.6 0
AutoContrast 0.8 0, Solarize 0.2 8 | Brightness 0.1 3, Color 0.7 0 | Solarize 0.4 5, AutoContrast 0.9 0
TranslateY 0.9 9, TranslateY 0.7 9 | AutoContrast 0.9 0, Solarize 0.8 3 | Equalize 0.8 0, Invert 0.1 0
TranslateY 0.7 9, AutoContrast 0.9 0
"""
POLICY = [
    [(name, float(p), int(step)) for name, p, step in (entry.split() for entry in pair.split(","))]
    for pair in _POLICY.replace("\n", "|").strip("|").split("|")
]


# --- operations: (images as float32 in 0 … 255, magnitude per image) → images -----------------------------


def _warp(x: Tensor, matrix: Tensor) -> Tensor:
    """Each image through its own 2×3 matrix from output to input places, in pixels from the centre; nearest."""
    n, h, w, c = x.shape
    ys = torch.arange(h, device=x.device, dtype=torch.float32) - (h - 1) / 2
    xs = torch.arange(w, device=x.device, dtype=torch.float32) - (w - 1) / 2
    grid = torch.stack([xs.expand(h, w), ys[:, None].expand(h, w), torch.ones(h, w, device=x.device)], -1)
    source = torch.einsum("nij,hwj->nhwi", matrix, grid)
    column, row = (torch.floor(source[..., i] + size / 2).long() for i, size in ((0, w), (1, h)))
    inside = (column >= 0) & (column < w) & (row >= 0) & (row < h)
    place = (row.clamp(0, h - 1) * w + column.clamp(0, w - 1)).view(n, h * w, 1)
    found = torch.gather(x.reshape(n, h * w, c), 1, place.expand(n, h * w, c)).view(n, h, w, c)
    return found * inside[..., None]


def _matrix(x: Tensor, entries: dict[tuple[int, int], Tensor | float]) -> Tensor:
    matrix = torch.eye(2, 3, device=x.device).repeat(len(x), 1, 1)
    for (i, j), value in entries.items():
        matrix[:, i, j] = value
    return matrix


def _rotate(x: Tensor, degrees: Tensor) -> Tensor:
    angle = torch.deg2rad(degrees)
    cos, sin = torch.cos(angle), torch.sin(angle)
    return _warp(x, _matrix(x, {(0, 0): cos, (0, 1): -sin, (1, 0): sin, (1, 1): cos}))


def _shear(x: Tensor, slope: Tensor, axis: int) -> Tensor:
    """Along one axis, about the upper left corner."""
    return _warp(x, _matrix(x, {(axis, 1 - axis): slope, (axis, 2): slope * x.shape[1 + axis] / 2}))


def _grey(x: Tensor) -> Tensor:
    """Luma, as PIL's mode L."""
    if x.shape[-1] == 1:
        return x
    weights = torch.tensor([0.299, 0.587, 0.114], device=x.device)
    return torch.round((x * weights).sum(-1, keepdim=True))


def _blend(x: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    """other + factor·(x − other): 1 leaves the image as it is."""
    return (other + factor.view(-1, 1, 1, 1) * (x - other)).clamp(0, 255).floor()


def _contrast(x: Tensor, factor: Tensor) -> Tensor:
    mean = torch.floor(_grey(x).mean((1, 2, 3), keepdim=True) + 0.5)
    return _blend(x, mean, factor)


def _smooth(x: Tensor) -> Tensor:
    """PIL's SMOOTH filter: 5 in the middle, 1 around, over 13; the border stays.

    By shifts: as a convolution, cuDNN would look for its fastest kernel again at every new number of images, which
    takes longer than a round of training.
    """
    h, w = x.shape[1:3]
    inner = 4 * x[:, 1:-1, 1:-1]
    for dy in range(3):
        for dx in range(3):
            inner = inner + x[:, dy : h - 2 + dy, dx : w - 2 + dx]
    out = x.clone()
    out[:, 1:-1, 1:-1] = torch.round(inner / 13)
    return out


def _sharpness(x: Tensor, factor: Tensor) -> Tensor:
    return _blend(x, _smooth(x), factor)


def _posterize(x: Tensor, bits: Tensor) -> Tensor:
    size = torch.exp2(8 - bits).view(-1, 1, 1, 1)
    return torch.floor(x / size) * size


def _solarize(x: Tensor, threshold: Tensor) -> Tensor:
    return torch.where(x < threshold.view(-1, 1, 1, 1), x, 255 - x)


def _autocontrast(x: Tensor, _: Tensor) -> Tensor:
    low, high = x.amin((1, 2), keepdim=True), x.amax((1, 2), keepdim=True)
    wide = high > low
    return torch.where(wide, ((x - low) * (255 / torch.where(wide, high - low, 1))).floor().clamp(0, 255), x)


def _equalize(x: Tensor, _: Tensor) -> Tensor:
    """PIL's equalisation: through (cumulated count + step/2)//step with step = (all but the last value's count)/255."""
    n, h, w, c = x.shape
    values = x.permute(0, 3, 1, 2).reshape(n * c, h * w).long()
    counts = torch.zeros(n * c, 256, dtype=torch.int64, device=x.device)
    counts.scatter_add_(1, values, torch.ones_like(values))
    last = counts.gather(1, values.amax(1, keepdim=True))
    step = torch.div(h * w - last, 255, rounding_mode="floor")
    before = counts.cumsum(1) - counts
    table = torch.div(before + torch.div(step, 2, rounding_mode="floor"), step.clamp(min=1), rounding_mode="floor")
    table = torch.where(step > 0, table.clamp(0, 255), torch.arange(256, device=x.device))
    return table.gather(1, values).view(n, c, h, w).permute(0, 2, 3, 1).float()


_Operation = Callable[[Tensor, Tensor], Tensor]
# operation: (function, magnitude of step s in 0 … 9 for images of a width, whether its sign is drawn)
_OPERATIONS: dict[str, tuple[_Operation, Callable[[float, int], float], bool]] = {
    "ShearX": (lambda x, m: _shear(x, m, 0), lambda s, _w: 0.3 * s / 9, True),
    "ShearY": (lambda x, m: _shear(x, m, 1), lambda s, _w: 0.3 * s / 9, True),
    "TranslateX": (lambda x, m: _warp(x, _matrix(x, {(0, 2): -m})), lambda s, w: int(150 / 331 * w * s / 9), True),
    "TranslateY": (lambda x, m: _warp(x, _matrix(x, {(1, 2): -m})), lambda s, w: int(150 / 331 * w * s / 9), True),
    "Rotate": (_rotate, lambda s, _w: 30 * s / 9, True),
    "Brightness": (lambda x, m: _blend(x, torch.zeros_like(x), 1 + m), lambda s, _w: 0.9 * s / 9, True),
    "Color": (lambda x, m: _blend(x, _grey(x), 1 + m), lambda s, _w: 0.9 * s / 9, True),
    "Contrast": (lambda x, m: _contrast(x, 1 + m), lambda s, _w: 0.9 * s / 9, True),
    "Sharpness": (lambda x, m: _sharpness(x, 1 + m), lambda s, _w: 0.9 * s / 9, True),
    "Posterize": (_posterize, lambda s, _w: 8 - round(s / (9 / 4)), False),
    "Solarize": (_solarize, lambda s, _w: 255 - 255 * s / 9, False),
    "AutoContrast": (_autocontrast, lambda _s, _w: 0.0, False),
    "Equalize": (_equalize, lambda _s, _w: 0.0, False),
    "Invert": (lambda x, _: 255 - x, lambda _s, _w: 0.0, False),
}


# --- steps: uint8 batches → uint8 batches ------------------------------------------------------------------


def autoaugment(x: Tensor, generator: Generator) -> Tensor:
    """One of the 25 pairs for each image."""
    n, names = len(x), list(_OPERATIONS)
    choice = torch.randint(len(POLICY), (n,), generator=generator, device=x.device)
    draws = torch.rand(n, 2, generator=generator, device=x.device)
    signs = 2.0 * torch.randint(2, (n, 2), generator=generator, device=x.device) - 1
    out = x.clone()
    for turn in range(2):
        entries = [pair[turn] for pair in POLICY]
        chance = torch.tensor([p for _, p, _ in entries], device=x.device)
        which = torch.tensor([names.index(name) for name, _, _ in entries], device=x.device)
        sizes = [_OPERATIONS[name][1](step, x.shape[2]) for name, _, step in entries]
        size = torch.tensor([float(s) for s in sizes], device=x.device)
        operation = torch.where(draws[:, turn] < chance[choice], which[choice], -1)
        for number in sorted({names.index(name) for name, _, _ in entries}):
            function, _, signed = _OPERATIONS[names[number]]
            where = torch.nonzero(operation == number).view(-1)
            if len(where):
                magnitude = size[choice[where]] * (signs[where, turn] if signed else 1)
                out[where] = function(out[where].float(), magnitude).to(torch.uint8)
    return out


def crop(x: Tensor, generator: Generator, margin: int = 4) -> Tensor:
    """A window of the image's size, somewhere in the image with a black margin around it."""
    n, h, w, c = x.shape
    shifts = torch.randint(2 * margin + 1, (2, n), generator=generator, device=x.device) - margin
    rows, columns = (
        torch.arange(size, device=x.device) + shift[:, None] for size, shift in zip((h, w), shifts, strict=True)
    )
    inside = ((rows >= 0) & (rows < h))[:, :, None] & ((columns >= 0) & (columns < w))[:, None, :]
    place = rows.clamp(0, h - 1)[:, :, None] * w + columns.clamp(0, w - 1)[:, None, :]
    found = torch.gather(x.reshape(n, h * w, c), 1, place.view(n, h * w, 1).expand(n, h * w, c)).view(n, h, w, c)
    return torch.where(inside[..., None], found, 0)


def flip(x: Tensor, generator: Generator) -> Tensor:
    """Every other image, left to right."""
    mirrored = torch.rand(len(x), generator=generator, device=x.device) < 0.5
    return torch.where(mirrored.view(-1, 1, 1, 1), x.flip(2), x)


def rotate15(x: Tensor, generator: Generator) -> Tensor:
    """By up to 15 degrees either way."""
    degrees = 30 * torch.rand(len(x), generator=generator, device=x.device) - 15
    return _rotate(x.float(), degrees).to(torch.uint8)


def jitter(x: Tensor, generator: Generator) -> Tensor:
    """Brightness, contrast and saturation by up to 0.4, hue by up to 0.1 of a turn, in this order."""
    draws = 2 * torch.rand(4, len(x), generator=generator, device=x.device) - 1
    out = _blend(x.float(), torch.zeros((), device=x.device), 1 + 0.4 * draws[0])
    out = _contrast(out, 1 + 0.4 * draws[1])
    out = _blend(out, _grey(out), 1 + 0.4 * draws[2])
    return _turn_hue(out, 0.1 * draws[3]).to(torch.uint8)


def _turn_hue(x: Tensor, turn: Tensor) -> Tensor:
    """Rotates the colours about the grey axis in YIQ by a fraction of a turn."""
    if x.shape[-1] != 3:
        return x
    to_yiq = torch.tensor([[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]], device=x.device)
    angle = 2 * torch.pi * turn
    middle = torch.eye(3, device=x.device).repeat(len(x), 1, 1)
    middle[:, 1, 1] = middle[:, 2, 2] = torch.cos(angle)
    middle[:, 1, 2], middle[:, 2, 1] = -torch.sin(angle), torch.sin(angle)
    matrix = torch.linalg.inv(to_yiq) @ middle @ to_yiq
    return torch.einsum("nij,nhwj->nhwi", matrix, x).clamp(0, 255).floor()


STEPS: dict[str, Callable[[Tensor, Generator], Tensor]] = {
    "autoaugment": autoaugment,
    "crop": crop,
    "flip": flip,
    "rotate": rotate15,
    "jitter": jitter,
}


def apply(steps: Sequence[str], x: Tensor, generator: Generator, chunk: int = 16384) -> Tensor:
    """The named steps in their order; so many images at a time that the memory stays small."""
    for name in steps:
        if name not in STEPS:
            raise InputError("augment", f"must be of {', '.join(STEPS)}", repr(name))
    parts = []
    for part in x.split(chunk):
        for name in steps:
            part = STEPS[name](part, generator)
        parts.append(part)
    return torch.cat(parts)


def normalise(x: Tensor, mean: Sequence[float], deviation: Sequence[float], kind: torch.dtype) -> Tensor:
    """Bytes to numbers of mean 0 and deviation 1 by channel."""
    scale = torch.tensor([1 / (255 * d) for d in deviation], device=x.device)
    shift = torch.tensor([m / d for m, d in zip(mean, deviation, strict=True)], device=x.device)
    parts = [(part.float() * scale - shift).to(kind) for part in x.split(1 << 14)]
    return torch.cat(parts)
