"""What the tests of rounds share."""

from __future__ import annotations

import pytest

from tests.kit.federation import World


@pytest.fixture(scope="module")
def world() -> World:
    return World()
