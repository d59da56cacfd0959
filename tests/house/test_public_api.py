"""The public surface: a change here is a change for users, and is written down in CHANGELOG.md."""

from __future__ import annotations

import quorumark
from quorumark import codec, errors, field


def test_every_error_is_ours() -> None:
    found = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)]
    assert all(issubclass(e, errors.QuorumarkError) for e in found)
    assert all(e.__name__ in (errors.__doc__ or "") for e in found), "the tree at the top of errors.py is complete"


def test_constants() -> None:
    assert field.P == 2305843009213693951
    assert (codec.FRACTION_BITS, codec.LIMIT) == (40, 524288.0)
    assert quorumark.__version__
