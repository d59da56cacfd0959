"""Makes v1/statistic.json, the vectors of the canonical form x (docs/format.md), like make_vectors.py beside it.

It uses none of quorumark's code: Python's integers and fractions, weight by weight. The only floating-point steps are
those of the specification: a number is rounded to float32 by struct.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from typing import Any

P = 2**61 - 1
BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "I8": 8, "U8": 8, "I32": 32}
Stored = dict[str, Any]  # dtype, shape, and the numbers' bits in hex
Model = dict[str, Stored]

# --- numbers ----------------------------------------------------------------------------------------------


def float32_bits(value: float) -> int:
    """The nearest float32, ties to even; what is too large becomes an infinity."""
    try:
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    except OverflowError:
        return 0xFF800000 if value < 0 else 0x7F800000


def float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<I", float32_bits(value)))[0])


def bits_of(value: float, dtype: str) -> int:
    """A number in one of the types that these cases are written in; it must fit the type."""
    if dtype in ("I8", "U8", "I32"):
        return int(value) % (1 << BITS[dtype])
    if dtype == "F64":
        return int(struct.unpack("<Q", struct.pack("<d", value))[0])
    if dtype == "F16":
        return int(struct.unpack("<H", struct.pack("<e", value))[0])
    return float32_bits(value) >> 16 if dtype == "BF16" else float32_bits(value)


def number(bits: int, dtype: str) -> float:
    """What stored bits stand for, exactly."""
    if dtype in ("I8", "I32"):
        half = 2 ** (BITS[dtype] - 1)
        return float(bits - 2 * half if bits >= half else bits)
    if dtype == "U8":
        return float(bits)
    if dtype == "F64":
        return float(struct.unpack("<d", struct.pack("<Q", bits))[0])
    if dtype in ("F32", "BF16"):
        return float(struct.unpack("<f", struct.pack("<I", bits << 16 if dtype == "BF16" else bits))[0])
    if dtype in ("F16", "F8_E5M2"):
        return float(struct.unpack("<e", struct.pack("<H", bits << 8 if dtype == "F8_E5M2" else bits))[0])
    sign, exponent, mantissa = bits >> 7, bits >> 3 & 15, bits & 7  # F8_E4M3
    if bits & 127 == 127:
        return math.nan
    size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -size if sign else size


def stored(dtype: str, shape: Sequence[int], values: Sequence[float], *, raw: bool = False) -> Stored:
    """A tensor as it stands in the vectors; `raw`: the values are the bits themselves."""
    assert len(values) == math.prod(shape)
    bits = [int(v) if raw else bits_of(v, dtype) for v in values]
    return {"dtype": dtype, "shape": list(shape), "bits": runs([f"{b:0{BITS[dtype] // 4}x}" for b in bits])}


def runs(words: Sequence[str]) -> str:
    """The words with a space between, one that comes n times in a row as word*n."""
    found = [(word, len(list(run))) for word, run in groupby(words)]
    return " ".join(word if count == 1 else f"{word}*{count}" for word, count in found)


def words(text: str) -> list[str]:
    return [word for word, _, count in (w.partition("*") for w in text.split()) for _ in range(int(count or 1))]


def numbers_of(tensor: Stored) -> list[float]:
    return [number(int(bits, 16), tensor["dtype"]) for bits in words(tensor["bits"])]


def plain_weights(model: Model, name: str) -> list[float]:
    """A tensor's numbers; those of a quantised one by its scale, every step rounded to float32."""
    values, tensor = numbers_of(model[name]), model[name]
    layer = name.removesuffix("weight") if f".{name}".endswith(".weight") else f"{name}."
    packed = (f"{name}.SCB", f"{layer}SCB")
    scale = next((s for s in (f"{name}_scale", f"{name}.scale", *packed) if s in model), None)
    if scale is None or tensor["dtype"] in ("F64", "F32", "F16", "BF16"):
        return values
    zero = next((z for z in (f"{name}_zero_point", f"{name}.zero_point") if z in model), None)
    rows = tensor["shape"][0]

    def of_row(helper: str, row: int) -> float:
        found = numbers_of(model[helper])
        return found[row] if len(found) > 1 else found[0]

    out = []
    for k, value in enumerate(values):
        row = k // (len(values) // rows)
        if zero is not None:
            value = float32(value - float32(of_row(zero, row)))
        out.append(float32(value * float32(of_row(scale, row) / (127 if scale in packed else 1))))
    return out


def anchor_weights(model: Model, name: str, double: bool) -> list[float]:
    """The anchor in the layout's type, then to the nearest multiple of 2^-40, ties to even."""
    values = [v if double else float32(v) for v in numbers_of(model[name])]
    return [float(Fraction(round(Fraction(v) * 2**40), 2**40)) for v in values]


# --- logarithms and powers --------------------------------------------------------------------------------


def log_table() -> list[int]:
    """L[i] is the largest k with 2^(k/256) ≤ 1 + i/256: bit length of (256 + i)^256 / 256^256, less one."""
    return [((256 + i) ** 256).bit_length() - 1 - 2048 for i in range(256)]


def power_table() -> list[int]:
    """W[i] is the largest w with w ≤ 2^(30 − i/256), that is w^256 ≤ 2^(7680 − i)."""
    table = []
    for i in range(256):
        low, high = 2**29, 2**30 + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if middle**256 <= 2 ** (7680 - i) else (low, middle)
        table.append(low)
    return table


LOGS, POWERS = log_table(), power_table()


def parts(bits: int) -> tuple[int, int, int] | None:
    """Sign, exponent and mantissa of a float32 that counts: w = sign·m·2^(e − 23), 2^23 ≤ m < 2^24."""
    exponent = bits >> 23 & 255
    if exponent in (0, 255):
        return None
    return (-1 if bits >> 31 else 1), exponent - 127, (bits & 0x7FFFFF) | 0x800000


def logarithm(bits: int) -> int | None:
    found = parts(bits)
    return None if found is None else 256 * found[1] + LOGS[(found[2] >> 15) - 256]


# --- balanced-anchor/v1 -----------------------------------------------------------------------------------


def cut(value: int, limit: int | None) -> int:
    return value if limit is None else max(-limit, min(limit, value))


def scales(weights: Sequence[int], shape: Sequence[int]) -> tuple[list[int], list[int]]:
    rows, columns, taps = shape[0], shape[1], math.prod(shape[2:])
    logs = [logarithm(bits) for bits in weights]
    r, c = [0] * rows, [0] * columns

    def left(i: int, j: int, limit: int | None) -> list[int]:
        """What is left of the logarithms of row i and column j without their scales."""
        first = (i * columns + j) * taps
        return [cut(v - r[i] - c[j], limit) for v in logs[first : first + taps] if v is not None]

    for turn in range(3):
        for i in range(rows):
            some = [v for j in range(columns) for v in left(i, j, None if turn == 0 else 2048)]
            r[i] += sum(some) // len(some) if some else 0
        means = []
        for j in range(columns):
            some = [v for i in range(rows) for v in left(i, j, 2048)]
            means.append(sum(some) // len(some) if some else 0)
        c = [old + new for old, new in zip(c, means, strict=True)]
    return r, c


def balanced(weights: Sequence[int], shape: Sequence[int]) -> list[int]:
    r, c = scales(weights, shape)
    columns, taps = shape[1], math.prod(shape[2:])
    out = []
    for k, bits in enumerate(weights):
        found = parts(bits)
        if found is None:
            out.append(0)
            continue
        sign, e, m = found
        q, f = divmod(r[k // (columns * taps)] + c[k // taps % columns], 256)
        exact = Fraction(m * POWERS[f]) * Fraction(2) ** (e - q - 41)
        out.append(sign * min(2**17, math.floor(exact + Fraction(1, 2))))
    return out


def coefficient(along: int, squared: int) -> int:
    shift = max(0, max(abs(along), squared).bit_length() - 46)
    a, s = abs(along) >> shift, squared >> shift
    if s == 0:
        return 0
    size = min(2**20, (a * 2**16 + s // 2) // s)
    return -size if along < 0 else size


def balanced_anchor(suspect: Sequence[int], anchor: Sequence[int], shape: Sequence[int]) -> list[int]:
    """Of all weights of the tensor."""
    v, b = balanced(suspect, shape), balanced(anchor, shape)
    width, n = len(v) // shape[0], len(v)
    left = []
    for start in range(0, n, width):
        row, other = v[start : start + width], b[start : start + width]
        k = coefficient(sum(x * y for x, y in zip(row, other, strict=True)), sum(y * y for y in other))
        left += [x - (k * y + 2**15) // 2**16 for x, y in zip(row, other, strict=True)]
    below = max(sum(abs(x) for x in left), 4 * n)
    sizes = [min(127, math.floor(Fraction(25 * n * abs(x), below) + Fraction(1, 2))) for x in left]
    return [-size if x < 0 else size for size, x in zip(sizes, left, strict=True)]


# --- the other two ----------------------------------------------------------------------------------------


def middle_exponent(weights: Sequence[int]) -> int:
    """The lower median of the exponents of the weights that count; 0 if none does."""
    found = sorted(counted[1] for counted in map(parts, weights) if counted is not None)
    return found[(len(found) - 1) // 2] if found else 0


def fixed(bits: int, middle: int) -> int:
    found = parts(bits)
    if found is None:
        return 0
    sign, e, m = found
    if e - middle >= 13:
        return sign * 2**24
    return sign * math.floor(Fraction(m) * Fraction(2) ** (e - middle - 13) + Fraction(1, 2))


def mean_tensor(carrying: Sequence[int]) -> list[int]:
    norm = math.isqrt(sum(v * v for v in carrying) * len(carrying))
    if norm == 0:
        return list(carrying)
    return [max(1 - 2**31, min(2**31 - 1, (2 * 2**32 * v + norm) // (2 * norm))) for v in carrying]


# --- x ----------------------------------------------------------------------------------------------------


def canonical_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def digest(domain: str, *pieces: bytes) -> bytes:
    whole = [domain.encode(), *pieces]
    return hashlib.sha256(b"quorumark/v1" + b"".join(len(p).to_bytes(8, "big") + p for p in whole)).digest()


def layout_bytes(anchor: Model, limit: int | None) -> bytes:
    """Carriers: two dimensions or more. They come first, by name."""
    tensors = [
        {"name": name, "dtype": t["dtype"], "shape": t["shape"], "role": "carrier" if len(t["shape"]) > 1 else "plain"}
        for name, t in anchor.items()
    ]
    tensors.sort(key=lambda t: (t["role"], t["name"]))
    return canonical_json({"format": "quorumark-layout/v1", "max_coordinates": limit, "tensors": tensors})


def carrying(anchor: Model, total: int, limit: int | None) -> list[int]:
    if limit is None or limit >= total:
        return list(range(total))
    seed = hashlib.sha256(b"quorumark-layout-sample/v1" + layout_bytes(anchor, None)).digest()
    data = hashlib.shake_128(seed + (0).to_bytes(8, "big")).digest(8 * limit)
    out = []
    for i in range(limit):
        low, high = i * total // limit, (i + 1) * total // limit
        out.append(low + int.from_bytes(data[8 * i : 8 * i + 8], "little") % (high - low))
    return out


def form(
    statistic: str, anchor: Model, suspect: Model, names: dict[str, str], limit: int | None, burnt: list[int], leaf: int
) -> dict[str, Any]:
    """x of one case, with what a query says about it."""
    carriers = sorted(name for name, t in anchor.items() if len(t["shape"]) > 1)
    sizes = [math.prod(anchor[name]["shape"]) for name in carriers]
    places = carrying(anchor, sum(sizes), limit)
    double = any(t["dtype"] == "F64" for t in anchor.values())
    bits = {name: [float32_bits(v) for v in plain_weights(suspect, names[name])] for name in carriers if name in names}
    common = middle_exponent([b for name in bits for b in bits[name]])
    x: list[int] = []
    start = 0
    for name, size in zip(carriers, sizes, strict=True):
        mine = [place - start for place in places if start <= place < start + size]
        start += size
        if name not in bits:
            x += [0] * len(mine)
        elif statistic == "balanced-anchor/v1":
            theirs = [float32_bits(v) for v in anchor_weights(anchor, name, double)]
            whole = balanced_anchor(bits[name], theirs, anchor[name]["shape"])
            x += [whole[k] for k in mine]
        else:
            alone = statistic == "mean-tensor-cosine/v1"
            middle = middle_exponent(bits[name]) if alone else common
            some = [fixed(bits[name][k], middle) for k in mine]
            x += mean_tensor(some) if alone else some
    gone = [i for i in range(len(x)) if i // leaf in burnt]
    burnt_norm2 = sum(x[i] ** 2 for i in gone)
    for i in gone:
        x[i] = 0
    kind, size = ("int8", 1) if statistic == "balanced-anchor/v1" else ("int32", 4)
    entries = b"".join(v.to_bytes(size, "little", signed=True) for v in x)
    return {
        "x": runs([str(v) for v in x]),
        "type": kind,
        "digest": digest("canonical form", kind.encode(), entries).hex(),
        "norm1": sum(abs(v) for v in x),
        "norm2": sum(v**2 for v in x),
        "norm4": sum(v**4 for v in x),
        "burnt_norm2": burnt_norm2,
    }


STATISTICS = ("balanced-anchor/v1", "global-cosine/v1", "mean-tensor-cosine/v1")


def case(
    why: str,
    anchor: Model,
    suspect: Model,
    *,
    names: dict[str, str] | None = None,
    limit: int | None = None,
    burnt: Sequence[int] = (),
    leaf: int = 4,
) -> dict[str, Any]:
    """`names`: which tensor of the suspect is which carrier, where the names differ or some are missing."""
    named = {n: n for n, t in anchor.items() if len(t["shape"]) > 1} if names is None else names
    settings = (named, limit, list(burnt), leaf)
    return {
        "why": why,
        "layout": layout_bytes(anchor, limit).decode(),
        "anchor": anchor,
        "suspect": suspect,
        "names": named,
        "burnt": list(burnt),
        "leaf": leaf,
        "forms": {statistic: form(statistic, anchor, suspect, *settings) for statistic in STATISTICS},
    }


# --- the cases --------------------------------------------------------------------------------------------


def some(label: str, count: int, spread: float = 1.0) -> list[float]:
    """Numbers in (−spread, spread) from a hash, with all of float32's bits in use."""
    found = []
    for i in range(count):
        word = int.from_bytes(hashlib.sha256(f"{label}/{i}".encode()).digest()[:8], "big")
        found.append(float32((word / 2**63 - 1) * spread))
    return found


def f32(shape: Sequence[int], values: Sequence[float]) -> Stored:
    return stored("F32", shape, values)


def moved(label: str, weights: Sequence[float], by: float) -> list[float]:
    return [float32(w + by * n) for w, n in zip(weights, some(label, len(weights)), strict=True)]


def trained() -> dict[str, Any]:
    conv, dense = some("conv", 4 * 3 * 2 * 2, 0.1), some("dense", 5 * 6)
    anchor = {"conv": f32((4, 3, 2, 2), conv), "dense": f32((5, 6), dense), "bias": f32((5,), some("bias", 5))}
    suspect = {
        "conv": f32((4, 3, 2, 2), moved("a", conv, 0.03)),
        "dense": f32((5, 6), moved("b", dense, 0.3)),
        "bias": f32((5,), some("bias", 5)),
    }
    return case("a model that was trained a little, with taps and without", anchor, suspect)


def odd() -> dict[str, Any]:
    shape, start = (5, 6), some("odd", 30)
    weights = moved("odd move", start, 0.2)
    special = [0.0, -0.0, 2.0**-126, -(2.0**-127), 1e-45, math.inf, -math.inf, math.nan, 3.4e38, -3.4e38, 1.2e-38, -1.0]
    for k, value in enumerate(special):
        weights[2 * k] = float32(value)
    return case("zeros, the smallest normal number, subnormals, infinities, NaN, the largest numbers, a power of two",
                {"w": f32(shape, start)}, {"w": f32(shape, weights)})  # fmt: skip


def dead() -> dict[str, Any]:
    start, shape = some("dead", 24), (4, 6)
    weights = [0.0 if k // 6 == 1 or k % 6 == 2 else v for k, v in enumerate(moved("dead move", start, 0.1))]
    anchor = [0.0 if k // 6 == 2 or k % 6 == 4 else v for k, v in enumerate(start)]
    return case("dead rows and columns, in the suspect and in the anchor", {"w": f32(shape, anchor)},
                {"w": f32(shape, weights)})  # fmt: skip


def octaves() -> dict[str, Any]:
    start = some("octaves", 36)
    weights = list(start)
    weights[7], weights[20], weights[28] = 2.0**40, -(2.0**-30), 2.0**9
    weights[30:36] = [float32(v * 2.0**50) for v in weights[30:36]]
    return case("weights far from the others: the first turn does not cut a row's mean, all else is cut to 8 octaves",
                {"w": f32((6, 6), start)}, {"w": f32((6, 6), weights)})  # fmt: skip


def same() -> dict[str, Any]:
    start = some("same", 12)
    scaled = [float32(v * 2.0 ** (k // 4) * (-1 if k % 4 == 3 else 1)) for k, v in enumerate(start)]
    anchor = {"a": f32((3, 4), start), "b": f32((3, 4), start), "c": f32((3, 4), start)}
    suspect = {"a": f32((3, 4), start), "b": f32((3, 4), scaled), "c": f32((3, 4), [2 * v for v in start])}
    return case(
        "the anchor itself, with rows of other sizes and a column of another sign, and doubled", anchor, suspect
    )


def anchor_grid() -> dict[str, Any]:
    step = 2.0**-40
    anchor = [0.5 * step, 1.5 * step, 2.5 * step, -0.5 * step, -1.5 * step, 0.75 * step, 3 * step, 0.25 * step]
    anchor += [0.1, -0.2, float32(0.3), 524287.96875]
    return case("the anchor is rounded to multiples of 2^-40, ties to even, and the suspect is not",
                {"w": f32((3, 4), anchor)}, {"w": f32((3, 4), [v * 1.25 for v in reversed(anchor)])})  # fmt: skip


def halves_of_balanced() -> dict[str, Any]:
    """Every scale is 0, since logarithms cancel: 2^-13 is half a unit, and 2^13 and 2^14 are both cut to 2^17.

    Without the anchor only the halves are left, so that x shows them.
    """
    anchor = [2.0**-14, -(2.0**-14), 2.0**13, -(2.0**13), 4.0] + [1.0] * 1019
    weights = [2.0**-13, -(2.0**-13), 2.0**14, -(2.0**13), 4.0] + [1.0] * 1019
    return case("balanced weights of half a unit, and those that are cut at 2^17",
                {"w": f32((1, 1, 1024), anchor)}, {"w": f32((1, 1, 1024), weights)})  # fmt: skip


def halves_of_parts() -> dict[str, Any]:
    """A coefficient of 65,537 and anchors of ±2^15 units: parts of ±32,768.5, of which 32,769 and −32,768 are taken.

    So nothing at all is left of the suspect; any other rounding leaves a unit, and x shows it.
    """
    anchor, weights = [8.0, -8.0, 0.125, -0.125], [8 + 2.0**-12, -8.0, 0.125, -0.125]
    return case("half a unit of the anchor's part is rounded up",
                {"w": f32((1, 1, 4), anchor)}, {"w": f32((1, 1, 4), weights)})  # fmt: skip


def halves_of_x() -> dict[str, Any]:
    """What is left is ±2 of 4,096 units in two places: below the floor of 4·n, x = 25·2/4 = 12.5."""
    anchor = [1 + 2.0**-10] * 64
    weights = list(anchor)
    weights[5] += 2.0**-11
    weights[6] -= 2.0**-11
    return case("x ends in .5 and is rounded away from 0; the denominator is 4·n for what is almost the anchor",
                {"w": f32((1, 1, 64), anchor)}, {"w": f32((1, 1, 64), weights)})  # fmt: skip


def largest_coefficient() -> dict[str, Any]:
    """Along the anchor's only weight the suspect has 32 times as much: the coefficient is cut to 16."""
    weights = [2.0**8, 2.0**-8, 2.0**-8, 2.0**8, -(2.0**8), 2.0**-8, 2.0**-8, 2.0**8]
    anchor = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    return case("the coefficient is cut to 16", {"w": f32((2, 1, 4), anchor)}, {"w": f32((2, 1, 4), weights)})


def long_row() -> dict[str, Any]:
    """⟨v, b⟩ and ‖b‖² above 2^46: both lose their lowest two bits, and the coefficient is 65,536, not 65,535."""
    big, small = 2.0**14, 2.0**-14
    anchor = [big] * 8192 + [small] * 8191 + [2.0**-12]
    weights = [big] * 8191 + [30.0] + [small] * 8191 + [0.0]
    return case("sums of more than 46 bits are shifted to 46 before they are divided",
                {"w": f32((1, 1, 16384), anchor)}, {"w": f32((1, 1, 16384), weights)})  # fmt: skip


def types() -> dict[str, Any]:
    shape, near = (2, 4), 1 + 2.0**-24
    anchor = {f"{n}.weight": f32(shape, some(f"types {n}", 8)) for n in ("a", "b", "c", "d", "e")}
    doubles = [near, 1 + 3 * 2.0**-24, near + 2.0**-50, 1e39, -1e39, 1e-40, 0.1, 3.4028235677973366e38]
    codes = [0x00, 0x01, 0x07, 0x08, 0x77, 0x7E, 0x7F, 0xC5]
    suspect = {
        "a.weight": stored("F64", shape, doubles),
        "b.weight": stored("F16", shape, [1.5, -0.333251953125, 2.0**-24, 65504.0, math.inf, math.nan, 0.0, -1.0]),
        "c.weight": stored("BF16", shape, [1.5, -0.33203125, 2.0**-120, 3.0e38, math.inf, math.nan, 0.0, -(2.0**-14)]),
        "d.weight": stored("F8_E4M3", shape, codes, raw=True),
        "e.weight": stored("F8_E5M2", shape, [0x00, 0x01, 0x03, 0x04, 0x7B, 0x7C, 0x7D, 0xC5], raw=True),
    }  # fmt: skip
    return case("float64 is rounded to float32, ties to even; narrower types are exact", anchor, suspect)


def quantised() -> dict[str, Any]:
    shape = (2, 4)
    anchor = {f"{n}.weight": f32(shape, some(f"quantised {n}", 8)) for n in "abcd"}
    codes = [-128, -127, -1, 0, 1, 2, 100, 127]
    suspect = {
        "a.weight": stored("I8", shape, codes),
        "a.weight_scale": stored("F32", (2,), [float32(0.1), float32(0.003)]),
        "b.weight": stored("U8", shape, [0, 1, 2, 100, 127, 128, 200, 255]),
        "b.weight.scale": stored("F16", (1,), [0.0999755859375]),
        "b.weight.zero_point": stored("I32", (1,), [128]),
        "c.weight": stored("I8", shape, codes),
        "c.SCB": stored("F32", (2, 1), [float32(3.7), float32(0.29)]),
        "d.weight": stored("F8_E4M3", shape, [0x00, 0x01, 0x07, 0x08, 0x77, 0x7E, 0x7F, 0xC5], raw=True),
        "d.weight_scale": stored("F64", (1,), [0.1]),
    }
    return case(
        "int8, uint8 and float8 with scales: for a row or for all, with a zero point, bitsandbytes", anchor, suspect
    )


def parts_only() -> dict[str, Any]:
    one, two, three = some("first", 12), some("second", 20), some("third", 12)
    anchor = {"fc1": f32((3, 4), one), "fc2": f32((4, 5), two), "fc3": f32((4, 3), three), "b": f32((4,), some("b", 4))}
    suspect = {
        "module.fc1": f32((3, 4), moved("x", one, 0.2)),
        "module.fc2": f32((5, 4), moved("y", two, 0.2)),  # another shape: not found
        "module.fc3": f32((4, 3), moved("z", three, 0.2)),
        "module.more": f32((2, 2), [1e30] * 4),
    }
    names = {"fc1": "module.fc1", "fc3": "module.fc3"}
    why = "a prefix, a carrier of another shape, a tensor too many; 17 of 44 coordinates carry, leaves 1 and 4 are out"
    return case(why, anchor, suspect, names=names, limit=17, burnt=[1, 4])


def fixed_point() -> dict[str, Any]:
    """Six exponents, the lower of the two in the middle is 0; halves of a unit (2^-11); 2^12 to 2^13 and above."""
    weights = [2.0**-11, -(2.0**-11), 3 * 2.0**-11, -3 * 2.0**-11, 2.0**-12, 1.0, 1.5, -1.75, 1.25, 1.0]
    weights += [4096.0, 8191.5, 8192.0, -8192.0, 12288.0, 1e20, -1e20, 2.0**-60]
    return case("global-cosine: halves away from 0; from 2^13 times the middle's power of two on all become 2^24",
                {"w": f32((3, 6), some("fixed", 18))}, {"w": f32((3, 6), weights)})  # fmt: skip


def tensor_norms() -> dict[str, Any]:
    """One weight alone has 2^32 (n = 1) or 2^31 (n = 4), which int32 does not hold; a tensor of zeros; ties.

    In d the norm is 2^33, so that fixed-point weights of ±1 become ±1/2: of these 1 and 0 are taken.
    """
    shapes = {"a": (1, 1), "b": (2, 2), "c": (2, 2), "d": (32, 32), "e": (2, 3)}
    anchor = {name: f32(shape, some(name, math.prod(shape))) for name, shape in shapes.items()}
    ties = [2.0**14] * 256 + [1.0, 2.0**-10, -(2.0**-10)] + [2.0**-40] * 254 + [0.0] * 511
    suspect = {
        "a": f32((1, 1), [0.37]),
        "b": f32((2, 2), [0.0, 0.0, -5.0, 0.0]),
        "c": f32((2, 2), [0.0, math.nan, 1e-40, -0.0]),
        "d": f32((32, 32), ties),
        "e": f32((2, 3), [1.0, -1.0, 0.5, -0.5, 0.25, 2.0**-9]),
    }
    return case("mean-tensor-cosine: cut to ±(2^31 − 1), halves rounded up, a tensor of zeros", anchor, suspect)


CASES: tuple[Callable[[], dict[str, Any]], ...] = (
    trained, odd, dead, octaves, same, anchor_grid, halves_of_balanced, halves_of_parts, halves_of_x,
    largest_coefficient, long_row, types, quantised, parts_only, fixed_point, tensor_norms,
)  # fmt: skip


# --- from x to z ------------------------------------------------------------------------------------------


def opened(label: str, x: Sequence[int]) -> dict[str, Any]:
    """Shares of a key of ±1 for three members of whom two suffice, their answers, and the number that they open."""
    drawn = [hashlib.sha256(f"{label}/{i}".encode()).digest() for i in range(len(x))]
    key = [1 if data[0] & 1 else -1 for data in drawn]
    slopes = [int.from_bytes(data[1:17], "big") % P for data in drawn]
    shares = {m: [(t + m * slope) % P for t, slope in zip(key, slopes, strict=True)] for m in (1, 2, 3)}
    answers = {m: sum(v * s for v, s in zip(x, share, strict=True)) % P for m, share in shares.items()}
    value = (2 * answers[1] - answers[2]) % P
    value = value - P if value > P // 2 else value
    assert value == sum(v * t for v, t in zip(x, key, strict=True))
    return {
        "shares": {str(m): runs([str(v) for v in share]) for m, share in shares.items()},
        "answers": {str(m): str(answer) for m, answer in answers.items()},
        "value": str(value),
        "z": six_decimals(value, sum(v * v for v in x)),
    }


def six_decimals(value: int, squared: int) -> str:
    """value/√squared to the nearest multiple of 10^-6, halves away from 0, by bisection on exact squares."""
    low, high = 0, 2 * 10**6 * abs(value) + 2  # the largest k with (k − 1/2)² ≤ value²·10^12/squared
    while high - low > 1:
        middle = (low + high) // 2
        if (2 * middle - 1) ** 2 * squared <= 4 * value * value * 10**12:
            low = middle
        else:
            high = middle
    text = f"{low // 10**6}.{low % 10**6:06d}"
    return f"-{text}" if value < 0 and low else text


def statistic() -> dict[str, Any]:
    cases = {make.__name__: make() for make in CASES}
    for name in ("trained", "parts_only"):
        for found in cases[name]["forms"].values():
            found["opened"] = opened(name, [int(v) for v in words(found["x"])])
    tables = {"logarithms": runs([str(v) for v in LOGS]), "powers": runs([str(v) for v in POWERS])}
    return {**tables, "cases": cases}


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "v1"
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(statistic(), ensure_ascii=False, indent=1)
    (folder / "statistic.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
