"""`quorumark demo`"""

from __future__ import annotations


def demo() -> None:
    """Deal a key to five hospitals, lose two shares, get it back with three, fail with two."""
    from quorumark.cli.console import make_console
    from quorumark.demo import run

    run(make_console())
