"""What is refused, by codes and names rather than by wording."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from quorumark.errors import CeremonyError, GuardError, InputError, MessageError, RefusalError, RoundError
from quorumark.refusals import REFUSALS

FAMILIES: dict[str, type[RefusalError]] = {
    "round": RoundError, "node": RoundError, "message": MessageError, "ceremony": CeremonyError,
}  # fmt: skip


@contextmanager
def refused(*codes: str, **values: Any) -> Iterator[None]:
    """The guard refuses for one of these reasons (`guard.` is understood), with these values."""
    with pytest.raises(GuardError) as caught:
        yield
    assert caught.value.code in [f"guard.{code}" for code in codes], str(caught.value)
    assert {name: caught.value.reason.values[name] for name in values} == values
    assert "\n" not in str(caught.value)


@contextmanager
def wrong_argument(*arguments: str, received: str = "") -> Iterator[None]:
    """One of these arguments breaks a rule; `received` is in what the error shows of its value."""
    with pytest.raises(InputError) as caught:
        yield
    assert caught.value.argument in arguments, str(caught.value)
    assert received in (caught.value.received or ""), str(caught.value)


@contextmanager
def stopped(
    *codes: str, names: str = "", kind: type[RefusalError] | None = None
) -> Iterator[pytest.ExceptionInfo[RefusalError]]:
    """A round, a message or a ceremony is refused with one of these codes; the sentence names this value.

    The error is of the code's family, unless it is of another `kind`.
    """
    assert codes
    assert set(codes) <= REFUSALS, codes
    kinds = {kind or FAMILIES[code.partition(".")[0]] for code in codes}
    with pytest.raises(tuple(kinds)) as caught:
        yield caught
    assert caught.value.code in codes, f"{caught.value.code}: {caught.value}"
    assert names in str(caught.value)
