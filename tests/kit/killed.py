"""Run as a program: members' processes are killed (SIGKILL) before and after the files that they write.

    python -m tests.kit.killed setup|refresh FOLDER     one ceremony in which every command dies again and again: at its
                                                        first write, at its second, and so on, until it comes through
    python -m tests.kit.killed setup|refresh FOLDER each a ceremony of its own for every write of one member

It forks for every command, before any thread exists; the last line printed is a JSON object with what happened.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from quorumark import field, files
from quorumark.consortium import archive, keystore
from quorumark.consortium.home import HomeFolder
from tests.kit.ceremony_folder import Consortium


def in_a_process(group: Consortium, command: list[str], kill_at: int = 1 << 30, late: bool = False) -> tuple[str, int]:
    """The command's output, "" if the process was killed; and how many files it wrote."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        written = _arm(kill_at, late)
        try:
            text = group.run(*command)
        except BaseException as error:  # noqa: BLE001 - told to the parent
            text = f"error: {error}"
        os.write(write, f"{len(written)}\n{text}".encode()[:60_000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return "", 0
    count, _, output = text.partition("\n")
    assert not output.startswith("error:"), output
    return output, int(count)


def _arm(kill_at: int, late: bool) -> list[Path]:
    """From now on the process dies at one of its writes; the files that were written whole."""
    real = files.replacing
    written: list[Path] = []

    @contextlib.contextmanager
    def dying(path: Path, *mode: int) -> Iterator[BinaryIO]:
        hit = len(written) == kill_at
        with real(path, *mode) as file:
            if hit and not late:
                os.kill(os.getpid(), signal.SIGKILL)
            yield file
        if hit:
            os.kill(os.getpid(), signal.SIGKILL)
        written.append(path)

    files.replacing = keystore.replacing = archive.replacing = dying  # type: ignore[assignment, attr-defined]
    return written


def _step(what: str, group: Consortium, index: int) -> list[str]:
    secrets = group.secrets(group.homes[index])
    if what == "setup":
        return ["setup", "dkg", "--terms", str(group.terms), "--folder", str(group.folder), *secrets]
    return ["share", "refresh", "--folder", str(group.base / "refresh"), *secrets]


def again_and_again(group: Consortium, what: str) -> int:
    """All members' commands die in turn, in one ceremony; how often."""
    killed = 0
    for _ in range(14):
        outputs = []
        for index in range(3):
            text = ""
            for moment, late in itertools.product(range(200), (False, True)):
                text, _ = in_a_process(group, _step(what, group, index), moment, late)
                if text:  # it has fewer writes left than that
                    break
                killed += 1
            outputs.append(text)
        if all("finished" in text for text in outputs):
            _check(group)
            return killed
    raise AssertionError("it does not end")


def each(start: Consortium, what: str, base: Path) -> int:
    """For every write of the first member, before and after: it dies there, and all ends as it should; how many."""
    killed = 0
    for late in (False, True):
        for moment in range(200):
            shutil.rmtree(base / "run", ignore_errors=True)
            shutil.copytree(base / "base", base / "run")
            run = object.__new__(Consortium)
            run.base, run.folder, run.terms = base / "run", base / "run" / "exchange", base / "run/agreed/terms.json"
            run.homes = [base / "run" / home.name for home in start.homes]
            if not _dies_once(run, what, moment, late):
                break
            killed += 1
            _check(run)
    return killed


def _dies_once(run: Consortium, what: str, moment: int, late: bool) -> bool:
    """Whether there is a write of that number to die at."""
    killed, left = False, moment
    for _ in range(14):
        text, written = in_a_process(run, _step(what, run, 0), 1 << 30 if killed else left, late)
        killed, left = killed or not text, left - written
        others = [in_a_process(run, _step(what, run, i))[0] for i in (1, 2)]
        if all("finished" in t for t in [text, *others]):
            return killed
    raise AssertionError(f"killed {'after' if late else 'before'} write {moment}, it does not end")


def _check(group: Consortium) -> None:
    """All hold the same manifest and whole shares of it, and nothing of the ceremony is left."""
    digests = {HomeFolder(home).only_consortium().manifest().digest() for home in group.homes}
    assert len(digests) == 1
    for home in group.homes:
        group.run("share", "verify", *group.secrets(home))
        names = [p.name for p in HomeFolder(home).only_consortium().path.iterdir() if "partial" not in p.name]
        assert "ceremony.sealed" not in names
        assert sum(name.startswith("share-") for name in names) == 1
    assert set(np.unique(group.key((0, 2)))) == {-1, 1}


def main(what: str, base: Path, how: str = "") -> dict[str, Any]:
    field.set_threads(1)  # no threads: a fork would not have them
    Consortium(base / "warm", count=3, threshold=2).finish()  # compiled code is loaded once, here, not in every child
    group = Consortium(base / "base", count=3, threshold=2)
    if what == "refresh":
        group.finish()
    return {"killed": each(group, what, base) if how == "each" else again_and_again(group, what)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])))  # noqa: T201
