"""Blocks of coordinates: the same for everybody, from the layout alone."""

from __future__ import annotations

import numpy as np
import pytest

from quorumark.errors import InputError
from quorumark.model.blocks import MOST, Blocks, blocks_of
from quorumark.model.layout import ModelLayout


def _layout(shapes: dict[str, tuple[int, ...]], most: int | None = None) -> ModelLayout:
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    return ModelLayout.of(tensors, max_coordinates=most)


def _resnet() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"conv1.weight": (64, 3, 3, 3), "fc.weight": (100, 512)}
    for stage in range(1, 5):
        width = 64 << (stage - 1)
        for block in range(2):
            for conv in (1, 2):
                narrow = stage > 1 and block == 0 and conv == 1
                shapes[f"layer{stage}.{block}.conv{conv}.weight"] = (width, width // 2 if narrow else width, 3, 3)
        if stage > 1:
            shapes[f"layer{stage}.0.downsample.0.weight"] = (width, width // 2, 1, 1)
    return shapes


def _check(layout: ModelLayout, blocks: Blocks) -> list[int]:
    sizes = [span.stop - span.start for span in blocks.spans]
    assert (blocks.edges[0], blocks.edges[-1]) == (0, layout.coordinates)
    assert min(sizes) > 0
    assert len(sizes) == len(set(blocks.names)) == blocks.count <= MOST
    return sizes


def test_the_layers_of_a_resnet_are_blocks_and_large_ones_are_cut() -> None:
    layout = _layout(_resnet())
    blocks = blocks_of(layout)
    sizes = _check(layout, blocks)
    assert blocks.count == 51
    assert (min(sizes), max(sizes)) == (8192, 294_912)
    assert blocks.names[:3] == ("conv1.weight to fc.weight", "layer1.0.conv1.weight", "layer1.0.conv2.weight")
    assert blocks.names[-1] == "layer4.1.conv2.weight, rows 455–511"


def test_a_sample_of_coordinates_is_cut_along_the_same_rows() -> None:
    layout = _layout(_resnet(), 200_000)
    blocks = blocks_of(layout)
    sizes = _check(layout, blocks)
    assert 16 <= blocks.count <= 28
    assert min(sizes) >= 4096


@pytest.mark.parametrize(
    ("shapes", "count"),
    [
        ({"a": (64, 64)}, 1),  # 4,096: too small for more
        ({"a": (2, 100_000)}, 2),  # rows are not cut
        ({"a": (300, 300), "b": (3, 3), "c": (10, 10)}, 11),  # what is left goes to the last block
        ({f"t{i:03}": (128, 128) for i in range(200)}, 50),  # joined, four by four
        ({f"t{i}": (10, 10) for i in range(5)}, 1),
        ({"a": (10, 10), "b": (4096, 1000)}, 63),  # a small one goes with the first rows of a large one
    ],
)
def test_small_carriers_are_joined_and_large_ones_cut(shapes: dict[str, tuple[int, ...]], count: int) -> None:
    layout = _layout(shapes)
    blocks = blocks_of(layout)
    _check(layout, blocks)
    assert blocks.count == count


def test_pieces_fall_into_blocks() -> None:
    blocks = Blocks((0, 10, 25, 40), ("a", "b", "c"))
    assert blocks.of(0, 40) == [(0, 0, 10), (1, 10, 25), (2, 25, 40)]
    assert blocks.of(10, 25) == [(1, 10, 25)]
    assert blocks.of(9, 26) == [(0, 9, 10), (1, 10, 25), (2, 25, 26)]
    assert blocks.of(30, 31) == [(2, 30, 31)]


def test_a_rule_that_is_not_known_is_refused() -> None:
    with pytest.raises(InputError, match="rule for blocks"):
        blocks_of(_layout({"a": (64, 64)}), "rows/v0")
