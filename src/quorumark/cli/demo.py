"""`quorumark demo`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[
        Path | None, typer.Option(help="A new folder to keep the models, the certificate, its report and all else in.")
    ] = None,
) -> None:
    """Five hospitals train one model under a mark; three of them prove that it is theirs, two cannot."""
    from quorumark.cli.console import make_console
    from quorumark.demo import run
    from quorumark.errors import InputError

    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError("--out", "must be a new or empty folder", str(out))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    run(make_console(), out)
