"""What a member refuses, by its code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from quorumark.errors import GuardError


@contextmanager
def refused(*codes: str, **values: Any) -> Iterator[None]:
    """The guard refuses for one of these reasons (`guard.` is understood), with these values."""
    with pytest.raises(GuardError) as caught:
        yield
    assert caught.value.code in [f"guard.{code}" for code in codes], str(caught.value)
    assert {name: caught.value.reason.values[name] for name in values} == values
    assert "\n" not in str(caught.value)
