"""`quorumark demo`"""

from __future__ import annotations


def demo() -> None:
    """Five hospitals make a key that nobody knows, lose two shares, get it back with three, fail with two."""
    from quorumark.cli.console import make_console
    from quorumark.demo import run

    run(make_console())
