"""Runs whose messages are counted, byte by byte, as a member gets and sends them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark.model.layout import ModelLayout
from quorumark.node.member import MemberNode
from tests.kit.drawn import Drawn
from tests.kit.flowers import Consortium, Model

_HEADER = 128  # of an array in numpy's format, which says its type and shape
_HERE = {"join": "up", "ready": "down"}  # training is between them, and this stays on the member's machine
_STAGES = ("join", "ready", "upload", "unmask")


def size_of(config: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> int:
    """Names and values of a message; engines add what tells them apart."""
    told = sum(len(name) + (len(v) if isinstance(v, bytes | str) else 8) for name, v in config.items())
    return told + sum(len(name) + _HEADER + array.nbytes for name, array in arrays.items())


class Counting:
    """A node that notes how many bytes of which stage went to it (`down`) and came from it (`up`)."""

    def __init__(self, node: MemberNode, count: dict[tuple[str, str], int]) -> None:
        self._node, self._count = node, count

    def handle(self, stage: str, config: Mapping[str, Any], arrays: Mapping[str, Any]) -> Any:
        reply, made = self._node.handle(stage, config, arrays)
        for way, size in (("down", size_of(config, arrays)), ("up", size_of(reply, made))):
            if _HERE.get(stage) != way:
                self._count[stage, way] += size
        return reply, made


class CountedRun(Drawn):
    """`counts[round][member][stage, way]`. Members move every weight a little, each by noise of its own. `together`:
    without the masks that two of them share, which change no byte's number; their homes must be a simulation's."""

    def __init__(self, world: Consortium, *, together: bool = False, **options: Any) -> None:
        super().__init__(world, **options)
        self._together = together
        self.counts: list[dict[int, dict[tuple[str, str], int]]] = []
        size = world.layout.size
        self._noise = np.random.default_rng(5).standard_normal(size + 4096, np.float32) * np.float32(1e-3)

    def node(self, x: int) -> Any:
        node = MemberNode(*self.world.home(x), seeds=True, together=self._together)
        return Counting(node, self.counts[-1][x])

    def counted(self, absent: Iterable[int] = ()) -> dict[int, dict[tuple[str, str], int]]:
        """A round that nothing may go wrong in, and what it cost."""
        self.counts.append(defaultdict(lambda: defaultdict(int)))
        self.round(absent=absent)
        refused = {x: why for x, why in self.refused.items() if x not in set(absent)}
        assert not refused, refused
        return self.counts[-1]

    def trained(self, x: int, model: Model, reply: dict[str, Any]) -> Model:
        made, at = dict(model), 31 * x + 7 * reply["round"]
        for name, tensor in model.items():
            if tensor.dtype.kind == "f":
                made[name] = tensor + self._noise[at : at + tensor.size].reshape(tensor.shape)
                at += tensor.size
        return made


def typical(count: Mapping[int, Mapping[tuple[str, str], int]], among: Iterable[int], way: str) -> float:
    """The median over members of what went one way in the stages of a round."""
    return median(sum(count[x][stage, way] for stage in _STAGES) for x in among)


def links(count: Mapping[int, Mapping[tuple[str, str], int]], way: str) -> float:
    """The median of what the stage of links cost those who were asked, beside their round."""
    found = [sum(c[stage, way] for stage in ("vouch", "second")) for c in count.values()]
    return median([size for size in found if size] or [0])


def layout_of(shapes: Mapping[str, tuple[int, ...]]) -> ModelLayout:
    """Without its weights."""
    return ModelLayout.of({name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes.items()})
