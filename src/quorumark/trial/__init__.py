"""Does the mark work for my model? `quorumark try FILE.py` (docs/try.md): one file, one command, one answer."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from quorumark.errors import InputError
from quorumark.trial.results import Trial
from quorumark.trial.run import Options, conduct, prepare
from quorumark.trial.show import Screen
from quorumark.trial.userfile import open_file

__all__ = ["TEMPLATES", "Options", "template", "try_file"]

TEMPLATES = ("images", "tables", "text")


def template(name: str) -> str:
    """A file to begin with."""
    if name not in TEMPLATES:
        raise InputError("--template", f"must be one of {', '.join(TEMPLATES)}", repr(name))
    return (Path(__file__).parent / "templates" / f"{name}.py").read_text(encoding="utf-8")


def try_file(file: Path, options: Options, console: Console, out: Path | None = None) -> Trial:
    """Tries a user's file, shows how it goes, and gives what was found; with `out`, everything is kept there."""
    from quorumark.trial.outputs import write_outputs

    screen = Screen(console)
    with open_file(file) as user:
        with screen.busy("looking at the file"):
            prepared = prepare(user, options)
        screen.prepared(prepared)
        with _folder(out) as folder:
            trial = conduct(prepared, folder, screen)
            screen.result(trial)
            screen.verdict(trial)
            write_outputs(prepared, trial, folder, console, kept=out is not None)
    return trial


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """Where the files go. Without `out` nothing stays; with it nothing that is half done."""
    if out is None:
        with tempfile.TemporaryDirectory(prefix="quorumark-try-") as folder:
            yield Path(folder)
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError("--out", "must be a new or empty folder", str(out))
    out.mkdir(parents=True, exist_ok=True)
    try:
        yield out
    except BaseException:  # Ctrl-C too: a half-made consortium is useless, and has keys in it
        shutil.rmtree(out, ignore_errors=True)
        raise
