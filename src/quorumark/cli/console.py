"""Where commands print."""

from __future__ import annotations

import os
import sys

from rich.console import Console


def make_console(*, stderr: bool = False) -> Console:
    """The terminal's width; 120 columns for a file or a pipe, which have none, unless COLUMNS says otherwise.

    Names of files and tensors are printed as they are: nothing in them is markup or an emoji.
    """
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS") else 120
    return Console(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)
