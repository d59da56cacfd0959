"""The command line: in this process, or in one of its own."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from quorumark.cli import main


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command in this process: the same `main`, without a second in which Python and its packages load."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    code: object = 0
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ.keys() - environment.keys():
            patch.delenv(name)
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", ["quorumark", *arguments])
        patch.setattr(sys, "stdin", io.StringIO())
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
    assert isinstance(code, int), code
    said = (stream.buffer.getvalue().decode() for stream in (out, err))
    return subprocess.CompletedProcess(list(arguments), code, *said)


def process(environment: dict[str, str], *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """A command as users run it, for what is about processes: terminals, pipes, what stays in memory."""
    command = [sys.executable, "-c", "from quorumark.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout, check=False)
