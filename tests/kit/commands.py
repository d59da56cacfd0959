"""The command line, run as users run it."""

from __future__ import annotations

import subprocess
import sys


def run(environment: dict[str, str], *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from quorumark.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout, check=False)
