"""One node that replies nonsense: it is left out, and the round of the others goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.kit.flowers import Consortium
from tests.kit.loopback import Course, Loopback

LIAR = 2
Config = dict[str, Any]


@pytest.mark.parametrize(
    "lie",
    [
        pytest.param({"newer": "?"}, id="no JSON"),
        pytest.param({"newer": "[]"}, id="a list"),
        pytest.param({"newer": '{"1": 5}'}, id="a number"),
        pytest.param({"boxes": None}, id="boxes that are text"),
    ],
)
def test_a_node_that_replies_nonsense_is_left_out(lie: Config, tmp_path: Path) -> None:
    world = Consortium.make(tmp_path, 5, 3, policy={"sums": "checked"})

    def told(number: int, said: Config) -> None:
        if number == LIAR:
            said.update({name: "x" * len(said[name]) if value is None else value for name, value in lie.items()})

    course = Course(world, Loopback(world, change=told), 1)
    report = course.go(1)[0]
    assert report.members == (1, 3, 4, 5)
