"""Disguises for the models of `zoo` that leave the function as it is, written by hand.

Nothing here uses `quorumark.align`: what can be renumbered, rescaled, given the other sign or mixed is said for every
architecture by somebody who read its forward function. A place is "tensor@axis", with "+12" where the first channel
has the index 12, with "*16" where every channel has 16 indices in a row; "tensor[2]@0" is about one slice of a
tensor, and "tensor[0:8]@1" about some of its rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

State = dict[str, Tensor]
_PLACE = re.compile(r"(.+?)(?:\[(\d+)(?::(\d+))?\])?@(\d+)(?:\+(\d+))?(?:\*(\d+))?")
BATCH_NORM_EPS = 1e-5


@dataclass(frozen=True)
class Channels:
    """Channels that move together.

    Attributes:
        moved: the places that are renumbered.
        scaled: each has one factor for every channel, to the power that is given for a place.
        signs: each has one sign for every channel, which its places share.
        blocks: channels move within their block, and blocks as a whole; factors and signs are one for each block.
        turned: places that all get the other sign, all channels at once.
    """

    size: int
    moved: Sequence[str]
    scaled: Sequence[dict[str, int]] = ()
    signs: Sequence[Sequence[str]] = ()
    blocks: int = 0
    turned: Sequence[str] = ()


@dataclass(frozen=True)
class Mixed:
    """In each of `count` heads, `size` channels are multiplied by a matrix A at `up`, and by A⁻ᵀ at `down`.

    With `rotary`, A only rotates the channels i and i + size/2. A place names the first index of the first head;
    `stride` is from one head to the next, if it is not `size`.
    """

    count: int
    size: int
    up: Sequence[str]
    down: Sequence[str] = ()
    rotary: bool = False
    strides: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Swapped:
    """Whole tensors change their names: `names` have {} where the number is; places are renumbered along."""

    count: int
    names: Sequence[str]
    moved: Sequence[str]


Step = Channels | Mixed | Swapped


def _lines(state: State, place: str) -> tuple[Tensor, int, int]:
    """A view with the place's axis in front, its first index, and how many indices a channel has."""
    match = _PLACE.fullmatch(place)
    assert match is not None, place
    name, part, end, axis, offset, width = match.groups()
    tensor = state[name]
    if part is not None:
        tensor = tensor[int(part)] if end is None else tensor[int(part) : int(end)]
    return tensor.movedim(int(axis), 0), int(offset or 0), int(width or 1)


Change = tuple[Callable[[State], None], Callable[[State], None]]
"""A change of the weights, and what takes it back."""


def _multiply(place: str, factors: Tensor, power: int = 1) -> Change:
    def change(state: State, by: Tensor) -> None:
        lines, offset, width = _lines(state, place)
        part = lines[offset : offset + len(by) * width]
        by = by.repeat_interleave(width).view(-1, *[1] * (part.dim() - 1))
        if "running_var" in place:  # exactly, with what is added to it
            part.add_(BATCH_NORM_EPS).mul_(by).sub_(BATCH_NORM_EPS)
        else:
            part.mul_(by)

    return lambda state: change(state, factors**power), lambda state: change(state, factors**-power)


def _renumber(place: str, order: Any) -> Change:
    def change(state: State, by: Any) -> None:
        lines, offset, width = _lines(state, place)
        size = len(by) * width
        index = (torch.from_numpy(by)[:, None] * width + torch.arange(width)).reshape(-1)
        lines[offset : offset + size] = lines[offset : offset + size][index].clone()

    return lambda state: change(state, order), lambda state: change(state, np.argsort(order))


def _exchange(name: str, order: Any) -> Change:
    def change(state: State, by: Any) -> None:
        before = [state[name.format(i)] for i in range(len(by))]
        state.update({name.format(i): before[by[i]] for i in range(len(by))})

    return lambda state: change(state, order), lambda state: change(state, np.argsort(order))


def _mix(place: str, begin: int, matrix: Any) -> Change:
    def change(state: State, by: Any) -> None:
        lines, offset, _ = _lines(state, place)
        rows = lines[offset + begin : offset + begin + len(by)]
        rows.copy_((torch.from_numpy(by) @ rows.reshape(len(by), -1)).reshape(rows.shape))

    return lambda state: change(state, matrix), lambda state: change(state, np.linalg.inv(matrix))


def _signs(rng: np.random.Generator, count: int) -> Tensor:
    found = rng.choice([-1.0, 1.0], count)
    found[0] = -1.0
    return torch.from_numpy(found)


def _mixing(step: Mixed, rng: np.random.Generator) -> Iterator[Change]:
    for head in range(step.count):
        if step.rotary:
            angles = rng.uniform(0, 2 * np.pi, step.size // 2)
            cos, sin = np.diag(np.cos(angles)), np.diag(np.sin(angles))
            matrix = np.block([[cos, -sin], [sin, cos]])
        else:
            matrix = np.linalg.qr(rng.standard_normal((step.size, step.size)))[0] * rng.uniform(0.7, 1.4, step.size)
        for places, by in ((step.up, matrix), (step.down, np.linalg.inv(matrix).T)):
            for place in places:
                yield _mix(place, head * step.strides.get(place, step.size), by)


def _changes(step: Step, rng: np.random.Generator) -> Iterator[Change]:
    if isinstance(step, Mixed):
        yield from _mixing(step, rng)
        return
    if isinstance(step, Swapped):
        order = rng.permutation(step.count)
        yield from (_exchange(name, order) for name in step.names)
        yield from (_renumber(place, order) for place in step.moved)
        return
    blocks = step.blocks or step.size
    each = step.size // blocks
    for scaled in step.scaled:
        factors = torch.from_numpy(np.exp2(rng.uniform(-1, 1, blocks))).repeat_interleave(each)
        yield from (_multiply(place, factors, power) for place, power in scaled.items())
    for places in step.signs:
        signs = _signs(rng, blocks).repeat_interleave(each)
        yield from (_multiply(place, signs) for place in places)
    yield from (_multiply(place, -torch.ones(step.size, dtype=torch.float64)) for place in step.turned)
    order = rng.permutation(blocks)[:, None] * each + np.stack([rng.permutation(each) for _ in range(blocks)])
    yield from (_renumber(place, order.reshape(-1)) for place in step.moved)


def _changed(name: str, weights: State, seed: int, *, back: bool) -> State:
    rng = np.random.default_rng([71, seed])
    state = {n: t.double().clone() if t.is_floating_point() else t.clone() for n, t in weights.items()}
    changes = [change for step in STEPS[name]() for change in _changes(step, rng)]
    for do, undo in reversed(changes) if back else changes:
        (undo if back else do)(state)
    return {n: t.to(weights[n].dtype) for n, t in state.items()}


def disguised(name: str, weights: State, seed: int) -> State:
    """A model that computes the same, to 10^-5 of its output."""
    return _changed(name, weights, seed, back=False)


def revealed(name: str, weights: State, seed: int) -> State:
    """What somebody who knows the disguise makes of a disguised model."""
    return _changed(name, weights, seed, back=True)


# --- what can be done to each architecture ----------------------------------------------------------------


def _batch_norm(writer: str, norm: str, bias: bool = False) -> tuple[list[str], dict[str, int], list[str]]:
    """Of a convolution and its BatchNorm: what moves, what the input's scale is in, what its sign is in."""
    inner = [f"{writer}.weight@0", *([f"{writer}.bias@0"] if bias else []), f"{norm}.running_mean@0"]
    moved = [*inner, f"{norm}.running_var@0", f"{norm}.weight@0", f"{norm}.bias@0"]
    return moved, {**dict.fromkeys(inner, 1), f"{norm}.running_var@0": 2}, [*inner, f"{norm}.weight@0"]


def _stream(
    size: int, writers: Sequence[tuple[str, str]], readers: Sequence[str], *, scale: bool = True,
    linear: bool = False, bias: bool = False, blocks: int | None = None,
) -> Channels:  # fmt: skip
    """Channels that convolutions write through BatchNorms (or GroupNorms of `blocks`) and `readers` read.

    With `scale`, what follows is homogeneous (ReLU); if it is `linear`, a channel's own sign is free as well.
    """
    moved, scaled, signs = list(readers), [], []
    for writer, norm in writers:
        if blocks is None:
            places, inner, sign = _batch_norm(writer, norm, bias)
        else:
            inner = {f"{writer}.weight@0": 1, **({f"{writer}.bias@0": 1} if bias else {})}
            places, sign = [*inner, f"{norm}.weight@0", f"{norm}.bias@0"], [*inner, f"{norm}.weight@0"]
        moved += places
        scaled.append(inner)
        signs.append(sign)
    outer = [f"{norm}.{part}@0" for _, norm in writers for part in ("weight", "bias")]
    if linear:
        signs.append([*outer, *readers])
    if scale and blocks is None:
        scaled.append({**dict.fromkeys(outer, 1), **dict.fromkeys(readers, -1)})
    return Channels(size, moved, scaled, signs, blocks or 0)


def _mlp() -> list[Step]:
    return [
        Channels(n, [f"{i}.weight@0", f"{i}.bias@0", f"{i + 2}.weight@1"],
                 [{f"{i}.weight@0": 1, f"{i}.bias@0": 1, f"{i + 2}.weight@1": -1}])
        for i, n in ((1, 128), (3, 96))
    ]  # fmt: skip


def _vgg() -> list[Step]:
    layers = ((0, 16, "4.weight@1"), (4, 32, "7.weight@1"), (7, 32, "11.weight@1"), (11, 48, "15.weight@1*4"))
    found: list[Step] = [_stream(n, [(f"{i}", f"{i + 1}")], [reader], bias=True) for i, n, reader in layers]
    neurons = {"15.weight@0": 1, "15.bias@0": 1, "18.weight@1": -1}
    return [*found, Channels(64, list(neurons), [neurons])]


def _resnet(blocks: int | None) -> list[Step]:
    found: list[Step] = []
    for b, width in ((0, 16), (1, 32), (2, 32)):
        at = f"blocks.{b}"
        found.append(_stream(width, [(f"{at}.conv1", f"{at}.norm1")], [f"{at}.conv2.weight@1"], blocks=blocks))
    first = [("stem", "norm"), ("blocks.0.conv2", "blocks.0.norm2")]
    readers = ["blocks.0.conv1.weight@1", "blocks.1.conv1.weight@1", "blocks.1.shortcut.0.weight@1"]
    found.append(_stream(16, first, readers, blocks=blocks))
    second = [("blocks.1.conv2", "blocks.1.norm2"), ("blocks.1.shortcut.0", "blocks.1.shortcut.1"),
              ("blocks.2.conv2", "blocks.2.norm2")]  # fmt: skip
    found.append(_stream(32, second, ["blocks.2.conv1.weight@1", "fc.weight@1"], blocks=blocks))
    return found


def _mobilenet(excite: bool) -> list[Step]:
    found: list[Step] = []
    streams: dict[int, tuple[int, list[tuple[str, str]], list[str]]] = {}
    # the stem's channels go through an activation and are then added to: they cannot change their signs
    for b, (inner, outer, stream_in, stream_out) in enumerate(
        ((16, 16, 0, 0), (16, 24, 0, 1), (24, 24, 1, 1), (24, 24, 1, 1))
    ):
        at, hidden = f"blocks.{b}", 4 * inner
        middle = [f"{at}.project.weight@1"]
        if excite:
            middle += [f"{at}.squeeze.weight@1", f"{at}.excite.weight@0", f"{at}.excite.bias@0"]
        one, scale1, sign1 = _batch_norm(f"{at}.expand", f"{at}.norm1")
        two, scale2, sign2 = _batch_norm(f"{at}.depthwise", f"{at}.norm2")
        found.append(Channels(hidden, [*one, *two, *middle], [scale1, scale2], [sign1, sign2]))
        if excite:
            squeezed = [f"{at}.squeeze.weight@0", f"{at}.squeeze.bias@0", f"{at}.excite.weight@1"]
            found.append(Channels(8, squeezed))
        streams.setdefault(stream_in, (inner, [], []))[2].append(f"{at}.expand.weight@1")
        streams.setdefault(stream_out, (outer, [], []))[1].append((f"{at}.project", f"{at}.norm3"))
    size, writers, readers = streams[0]
    found.append(_stream(size, [("stem", "norm"), *writers], readers, scale=False))
    size, writers, readers = streams[1]
    found.append(_stream(size, writers, [*readers, "last.weight@1"], linear=True))
    one, scale1, sign1 = _batch_norm("last", "norm_last")
    found.append(Channels(96, [*one, "fc.weight@1"], [scale1], [sign1]))
    return found


def _densenet() -> list[Step]:
    found: list[Step] = []
    for block, first, layers, norm, reader in (
        ("one", "stem", 2, "norm1", "between.weight@1"), ("two", "between", 2, "norm2", "fc.weight@1"),
    ):  # fmt: skip
        width = 16 if block == "one" else 24
        pieces, offset = [(f"{first}.weight@0", 0, width)], width
        for k in range(layers):
            at = f"{block}.{k}"
            one, scale1, sign1 = _batch_norm(f"{at}.conv1", f"{at}.norm2")
            out = {f"{at}.norm2.weight@0": 1, f"{at}.norm2.bias@0": 1, f"{at}.conv2.weight@1": -1}
            found.append(Channels(32, [*one, f"{at}.conv2.weight@1"], [scale1, out], [sign1]))
            pieces.append((f"{at}.conv2.weight@0", offset, 16))
            offset += 16
        for number, (writer, begin, size) in enumerate(pieces):
            moved, signs, outers = [writer], [writer], []
            for k in range(max(0, number), layers + 1):
                by, read = (f"{block}.{k}.norm1", f"{block}.{k}.conv1.weight@1") if k < layers else (norm, reader)
                mean, var, gain, bias = (
                    f"{by}.{p}@0+{begin}" for p in ("running_mean", "running_var", "weight", "bias")
                )
                at_read = f"{read}+{begin}"
                moved += [mean, var, gain, bias, at_read]
                signs += [mean, gain]
                outers.append({gain: 1, bias: 1, at_read: -1})
            found.append(Channels(size, moved, outers, [signs]))
    return found


def _convnext() -> list[Step]:
    found: list[Step] = []
    blocks = {"one.0": 24, "one.1": 24, "two": 40}
    for at, width in blocks.items():
        found.append(Channels(4 * width, [f"{at}.up.weight@0", f"{at}.up.bias@0", f"{at}.down.weight@1"]))
    streams = (
        (24, ["one.0", "one.1"], "stem", "norm", "between.weight@1"),
        (40, ["two"], "between", "norm_last", "fc.weight@1"),
    )
    for size, names, first, norm, reader in streams:
        moved = [f"{first}.weight@0", f"{first}.bias@0", f"{norm}.weight@0", f"{norm}.bias@0", reader]
        scaled = [{f"{norm}.weight@0": 1, f"{norm}.bias@0": 1, reader: -1}]
        signs = [list(scaled[0])]
        turned = [f"{first}.weight@0", f"{first}.bias@0", f"{norm}.weight@0"]
        for at in names:
            deep = [f"{at}.depthwise.weight@0", f"{at}.depthwise.bias@0"]
            out, inner = [f"{at}.down.weight@0", f"{at}.down.bias@0"], [f"{at}.norm.weight@0", f"{at}.norm.bias@0"]
            moved += [*deep, *out, *inner, f"{at}.scale@0", f"{at}.up.weight@1"]
            scaled += [
                {**dict.fromkeys(inner, 1), f"{at}.up.weight@1": -1},
                {**dict.fromkeys(out, 1), f"{at}.scale@0": -1},
            ]
            signs += [[*inner, f"{at}.up.weight@1"], [*out, f"{at}.scale@0"]]
            turned += [f"{at}.scale@0", f"{at}.depthwise.weight@0"]
        found.append(Channels(size, moved, scaled, signs, turned=turned))
    return found


def _resnext() -> list[Step]:
    found: list[Step] = []
    for b, width in ((0, 32), (1, 64), (2, 64)):
        at, each = f"blocks.{b}", width // 4
        one, scale1, sign1 = _batch_norm(f"{at}.conv1", f"{at}.norm1")
        two, scale2, sign2 = _batch_norm(f"{at}.conv2", f"{at}.norm2")
        out2 = {f"{at}.norm2.weight@0": 1, f"{at}.norm2.bias@0": 1, f"{at}.conv3.weight@1": -1}
        # the four groups as wholes; then what each of them computes
        wide = [f"{place}*{each}" for place in [*one, *two, f"{at}.conv3.weight@1"]]
        found.append(Channels(width, [], [scale1, scale2, out2], [sign1, sign2]))
        found.append(Channels(4, wide))
        for g in range(4):
            outs = [f"{place}+{g * each}" for place in [*two, f"{at}.conv3.weight@1"]]
            found.append(Channels(each, outs))
    first = [("stem", "norm"), ("blocks.0.conv3", "blocks.0.norm3")]
    readers = ["blocks.0.conv1.weight@1", "blocks.1.conv1.weight@1", "blocks.1.shortcut.0.weight@1"]
    found.append(_stream(32, first, readers))
    second = [("blocks.1.conv3", "blocks.1.norm3"), ("blocks.1.shortcut.0", "blocks.1.shortcut.1"),
              ("blocks.2.conv3", "blocks.2.norm3")]  # fmt: skip
    found.append(_stream(64, second, ["blocks.2.conv1.weight@1", "fc.weight@1"]))
    return found


def _unet(up: str, volume: bool) -> list[Step]:
    a, b = (8, 16) if volume else (16, 32)
    lift = "up.weight@0" if up == "transposed" else "up.1.weight@1"

    def conv(at: str, n: int, size: int, readers: list[str]) -> Channels:
        if not volume:
            return _stream(size, [(f"{at}.conv{n}", f"{at}.norm{n}")], readers, bias=True)
        inner = {f"{at}.conv{n}.weight@0": 1, f"{at}.conv{n}.bias@0": 1}
        out = {f"{at}.norm{n}.weight@0": 1, f"{at}.norm{n}.bias@0": 1}
        moved = [*inner, *out, *readers]
        scaled = [inner, {**out, **dict.fromkeys(readers, -1)}]
        return Channels(size, moved, scaled, [[*inner, f"{at}.norm{n}.weight@0"]])

    found: list[Step] = [
        conv("down", 1, a, ["down.conv2.weight@1"]),
        conv("down", 2, a, ["bottom.conv1.weight@1", "join.conv1.weight@1"]),
        conv("bottom", 1, b, ["bottom.conv2.weight@1"]),
        conv("bottom", 2, b, [lift]),
        conv("join", 1, a, ["join.conv2.weight@1"]),
        conv("join", 2, a, ["out.weight@1"]),
    ]
    writer = ["up.weight@1", "up.bias@0"] if up == "transposed" else ["up.1.weight@0", "up.1.bias@0"]
    moved = [*writer, f"join.conv1.weight@1+{a}"]
    found.append(Channels(a, moved, [{**dict.fromkeys(writer, 1), moved[-1]: -1}], [moved]))
    return found


def _recurrent(gates: int, width: int, ways: Sequence[str], layers: int = 2) -> list[Step]:
    found: list[Step] = []
    for layer in range(layers):
        for number, way in enumerate(ways):
            at, begin = f"l{layer}{way}", number * width
            last = layer + 1 == layers
            readers = [f"fc.weight@1+{begin}"] if last else [f"rnn.weight_ih_l{layer + 1}{w}@1+{begin}" for w in ways]
            rows = [f"rnn.{p}_{q}_{at}@0" for p in ("weight", "bias") for q in ("ih", "hh")]
            moved = [f"{row}+{g * width}" for row in rows for g in range(gates)]
            read = [f"rnn.weight_hh_{at}@1", *readers]
            new = [f"{row}+{2 * width}" for row in rows]  # what is remembered: the gate with the tanh is the third
            found.append(Channels(width, [*moved, *read], [], [[*new, *read]]))
    return found


def _mixture(stacked: bool) -> list[Step]:
    found: list[Step] = []
    for e in range(4):
        if stacked:
            neurons = {f"moe.up[{e}]@1": 1, f"moe.down[{e}]@0": -1}
        else:
            neurons = {
                f"moe.experts.{e}.0.weight@0": 1,
                f"moe.experts.{e}.0.bias@0": 1,
                f"moe.experts.{e}.2.weight@1": -1,
            }
        found.append(Channels(64, list(neurons), [neurons]))
    if stacked:
        writers, readers = [f"moe.down[{e}]@1" for e in range(4)], [f"moe.up[{e}]@0" for e in range(4)]
        found.append(Channels(4, ["moe.up@0", "moe.down@0", "moe.gate.weight@0"]))
    else:
        writers = [f"moe.experts.{e}.2.{p}@0" for e in range(4) for p in ("weight", "bias")]
        readers = [f"moe.experts.{e}.0.weight@1" for e in range(4)]
        names = [f"moe.experts.{{}}.{n}.{p}" for n in (0, 2) for p in ("weight", "bias")]
        found.append(Swapped(4, names, ["moe.gate.weight@0"]))
    readers.append("moe.gate.weight@1")
    first = {"norm.weight@0": 1, "norm.bias@0": 1, **dict.fromkeys(readers, -1)}
    last = {"norm_last.weight@0": 1, "norm_last.bias@0": 1, "fc.weight@1": -1}
    moved = ["embed.weight@0", "embed.bias@0", *writers, *first, *last]
    turned = ["embed.weight@0", "embed.bias@0", *writers, "norm.weight@0", "norm_last.weight@0"]
    return [*found, Channels(48, moved, [first, last], [list(first), list(last)], turned=turned)]


def _layer_norm(norm: str, readers: Sequence[str]) -> dict[str, int]:
    return {f"{norm}.weight@0": 1, f"{norm}.bias@0": 1, **dict.fromkeys(readers, -1)}


def _vit() -> list[Step]:
    found: list[Step] = []
    writers = ["patch.weight@0", "patch.bias@0", "first@2", "position@2"]
    scaled = [_layer_norm("norm", ["head.weight@1"])]
    for i in range(2):
        at = f"layers.{i}"
        qkv = [f"{at}.qkv.{p}@0" for p in ("weight", "bias")]
        q, k, v = ([f"{place}+{48 * part}" for place in qkv] for part in range(3))
        found.append(Mixed(4, 12, q, k))
        found.append(Mixed(4, 12, v, [f"{at}.proj.weight@1"]))
        found.append(Channels(4, [f"{place}*12" for place in [*q, *k, *v, f"{at}.proj.weight@1"]]))
        found.append(Channels(96, [f"{at}.fc1.weight@0", f"{at}.fc1.bias@0", f"{at}.fc2.weight@1"]))
        writers += [f"{at}.{layer}.{p}@0" for layer in ("proj", "fc2") for p in ("weight", "bias")]
        scaled += [
            _layer_norm(f"{at}.norm1", [f"{at}.qkv.weight@1"]),
            _layer_norm(f"{at}.norm2", [f"{at}.fc1.weight@1"]),
        ]
    moved = [*writers, *(place for each in scaled for place in each)]
    turned = [*writers, *(next(iter(each)) for each in scaled)]
    return [*found, Channels(48, moved, scaled, [list(each) for each in scaled], turned=turned)]


def _gpt2() -> list[Step]:
    found: list[Step] = []
    writers = ["transformer.wte.weight@1", "lm_head.weight@1", "transformer.wpe.weight@1"]  # the first two are tied
    scaled: list[dict[str, int]] = []
    for i in range(2):
        at = f"transformer.h.{i}"
        qkv = [f"{at}.attn.c_attn.weight@1", f"{at}.attn.c_attn.bias@0"]
        q, k, v = ([f"{place}+{48 * part}" for place in qkv] for part in range(3))
        found.append(Mixed(4, 12, q, k))
        found.append(Mixed(4, 12, v, [f"{at}.attn.c_proj.weight@0"]))
        found.append(Channels(4, [f"{place}*12" for place in [*q, *k, *v, f"{at}.attn.c_proj.weight@0"]]))
        found.append(Channels(192, [f"{at}.mlp.c_fc.weight@1", f"{at}.mlp.c_fc.bias@0", f"{at}.mlp.c_proj.weight@0"]))
        writers += [f"{at}.{x}.c_proj.{p}" for x in ("attn", "mlp") for p in ("weight@1", "bias@0")]
        scaled += [
            _layer_norm(f"{at}.ln_1", [f"{at}.attn.c_attn.weight@0"]),
            _layer_norm(f"{at}.ln_2", [f"{at}.mlp.c_fc.weight@0"]),
        ]
    last = ["transformer.ln_f.weight@0", "transformer.ln_f.bias@0"]
    moved = [*writers, *last, *(place for each in scaled for place in each)]
    return [*found, Channels(48, moved, scaled, [list(each) for each in scaled])]


def _llama() -> list[Step]:
    found: list[Step] = []
    writers, norms = ["model.embed_tokens.weight@1"], [{"model.norm.weight@0": 1, "lm_head.weight@1": -1}]
    for i in range(2):
        at = f"model.layers.{i}"
        q, k, v, o = (f"{at}.self_attn.{x}_proj.weight@{a}" for x, a in (("q", 0), ("k", 0), ("v", 0), ("o", 1)))
        second = [f"{place}+8" for place in (q, o)]
        wide = dict.fromkeys([q, o, *second], 16)
        found.append(Mixed(4, 8, [q, second[0], k], rotary=True, strides=wide))
        found.append(Mixed(4, 8, [v], [o, second[1]], strides=wide))
        found += [Channels(2, [f"{place}+{16 * h}*8" for place in (q, o)]) for h in range(4)]
        found.append(Channels(4, [f"{q}*16", f"{k}*8", f"{v}*8", f"{o}*16"]))
        gate, up, down = (f"{at}.mlp.{x}_proj.weight@{a}" for x, a in (("gate", 0), ("up", 0), ("down", 1)))
        found.append(Channels(96, [gate, up, down], [{up: 1, down: -1}], [[up, down]]))
        writers += [f"{at}.self_attn.o_proj.weight@0", f"{at}.mlp.down_proj.weight@0"]
        attends = {f"{at}.self_attn.{x}_proj.weight@1": -1 for x in "qkv"}
        norms.append({f"{at}.input_layernorm.weight@0": 1, **attends})
        computes = {f"{at}.mlp.{x}_proj.weight@1": -1 for x in ("gate", "up")}
        norms.append({f"{at}.post_attention_layernorm.weight@0": 1, **computes})
    readers = [place for norm in norms for place in norm if "norm" not in place]
    moved = [*writers, *(place for norm in norms for place in norm)]
    signs = [[*writers, *readers], *(list(norm) for norm in norms)]
    return [*found, Channels(48, moved, norms, signs)]


def _translator() -> list[Step]:
    found: list[Step] = []

    def attention(at: str) -> None:
        packed = [f"{at}.in_proj_weight@0", f"{at}.in_proj_bias@0"]
        q, k, v = ([f"{place}+{32 * part}" for place in packed] for part in range(3))
        out = f"{at}.out_proj.weight@1"
        found.append(Mixed(4, 8, q, k))
        found.append(Mixed(4, 8, v, [out]))
        found.append(Channels(4, [f"{place}*8" for place in [*q, *k, *v, out]]))

    def feed(at: str) -> None:
        neurons = {f"{at}.linear1.weight@0": 1, f"{at}.linear1.bias@0": 1, f"{at}.linear2.weight@1": -1}
        found.append(Channels(64, list(neurons), [neurons]))

    enc, dec = "both.encoder.layers.0", "both.decoder.layers.0"
    for at in (f"{enc}.self_attn", f"{dec}.self_attn", f"{dec}.multihead_attn"):
        attention(at)
    feed(enc)
    feed(dec)
    both = [f"{layer}.{p}@0" for layer in ("linear2",) for p in ("weight", "bias")]
    heard = ["heard.weight@1", "places@2", f"{enc}.self_attn.in_proj_weight@1", f"{enc}.linear1.weight@1"]
    heard += [f"{enc}.self_attn.out_proj.{p}@0" for p in ("weight", "bias")]
    heard += [f"{enc}.{place}" for place in both]
    heard += [f"{enc}.norm{n}.{p}@0" for n in (1, 2) for p in ("weight", "bias")]
    heard += [f"both.encoder.norm.{p}@0" for p in ("weight", "bias")]
    said = ["said.weight@1", f"{dec}.self_attn.in_proj_weight@1", f"{dec}.linear1.weight@1", "out.weight@1"]
    said += [f"{dec}.{a}.out_proj.{p}@0" for a in ("self_attn", "multihead_attn") for p in ("weight", "bias")]
    said += [f"{dec}.{place}" for place in both]
    said += [f"{dec}.norm{n}.{p}@0" for n in (1, 2, 3) for p in ("weight", "bias")]
    said += [f"both.decoder.norm.{p}@0" for p in ("weight", "bias")]
    last = _layer_norm("both.decoder.norm", ["out.weight@1"])
    cross = f"{dec}.multihead_attn.in_proj_weight"  # queries read one stream, keys and values the other
    first = _layer_norm("both.encoder.norm", [f"{cross}[32:96]@1"])
    found.append(Channels(32, [*heard, f"{cross}[32:96]@1"], [first], [list(first)]))
    said.append(f"{cross}[0:32]@1")
    found.append(Channels(32, said, [last], [list(last)]))
    return found


def _graph() -> list[Step]:
    layers = ("first", "second", "third", "fc")
    found: list[Step] = []
    for one, two in pairwise(layers):
        places = {f"{one}.weight@0": 1, f"{one}.bias@0": 1, f"{two}.weight@1": -1}
        found.append(Channels(96, list(places), [places]))
    return found


def _weight_norm() -> list[Step]:
    found: list[Step] = []
    normed = "parametrizations.weight.original"
    for layer, size, reader in ((0, 24, f"3.{normed}1@1"), (3, 32, f"6.{normed}1@1*16"), (6, 64, "8.weight@1")):
        gain, rows = (f"{layer}.{normed}{n}@0" for n in (0, 1))
        moved = [gain, rows, f"{layer}.bias@0", reader]
        out = {gain: 1, f"{layer}.bias@0": 1, reader: -1} if layer == 6 else {}
        found.append(Channels(size, moved, [{rows: 1}, *([out] if out else [])], [[gain, rows]]))
    return found


STEPS: dict[str, Any] = {
    "mlp": _mlp,
    "vgg": _vgg,
    "resnet-bn": lambda: _resnet(None),
    "resnet-gn1": lambda: _resnet(1),
    "resnet-gn8": lambda: _resnet(8),
    "mobilenetv2": lambda: _mobilenet(excite=False),
    "efficientnet": lambda: _mobilenet(excite=True),
    "densenet": _densenet,
    "convnext": _convnext,
    "resnext": _resnext,
    "unet-transposed": lambda: _unet("transposed", volume=False),
    "unet-bilinear": lambda: _unet("bilinear", volume=False),
    "unet-3d": lambda: _unet("transposed", volume=True),
    "lstm": lambda: _recurrent(4, 48, [""]),
    "lstm-both-ways": lambda: _recurrent(4, 32, ["", "_reverse"]),
    "gru": lambda: _recurrent(3, 48, [""]),
    "experts-modules": lambda: _mixture(stacked=False),
    "experts-stacked": lambda: _mixture(stacked=True),
    "vit": _vit,
    "gpt2": _gpt2,
    "llama": _llama,
    "encoder-decoder": _translator,
    "graph": _graph,
    "weight-norm": _weight_norm,
}
