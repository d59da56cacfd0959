"""`quorumark doctor`: is this machine fit for it, and is the member's home as it should be?

Each check is one line: what was looked at, whether it is well, what was found, and what to do. Nothing that is sealed
is opened, and nothing is changed (but for an empty file that is written and removed to compare clocks).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quorumark import __version__
from quorumark.errors import QuorumarkError

__all__ = ["EXTRAS", "Check", "examine_machine"]

EXTRAS = {
    "torch": ("torch", "training in this package, groups of a model, GPU"),
    "demo": ("sklearn", "quorumark demo"),
    "flower": ("flwr", "rounds and queries over Flower"),
    "nvflare": ("nvflare", "rounds and queries over NVIDIA FLARE"),
    "room": ("starlette", "a room, and the page of a member's agent"),
    "report": ("matplotlib", "plots"),
    "lab": ("transformers", "experiments at the paper's scale"),
}
_DEPENDENCIES = ("numpy", "numba", "cryptography", "safetensors", "typer")
_OLDEST = datetime(2026, 1, 1, tzinfo=UTC)  # no clock that goes right is before this release
_SKEW = 5.0  # seconds between this machine's clock and that of the disk, which may be another machine's
_LEAST_SPACE = 1 << 28


@dataclass(frozen=True)
class Check:
    """`well`: yes, no, or None for what may be missing."""

    name: str
    well: bool | None
    found: str
    remedy: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def examine_machine(home: Path) -> list[Check]:
    """All checks, in the order in which they are shown."""
    checks: list[Callable[[], Iterator[Check]]] = [
        _versions,
        _extras,
        _processors,
        _kernels,
        _gpu,
        lambda: _clock(home),
        lambda: _space(home),
        lambda: _home(home),
        lambda: _key_file(home),
    ]
    return [check for examine in checks for check in examine()]


def _versions() -> Iterator[Check]:
    recent = sys.version_info >= (3, 11)
    yield Check("python", recent, platform.python_version(), "" if recent else "install Python 3.11 or newer")
    for package in _DEPENDENCIES:
        try:
            yield Check(package, True, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield Check(package, False, "not installed", "pip install quorumark")
    yield Check("quorumark", True, __version__)


def _extras() -> Iterator[Check]:
    for extra, (module, purpose) in EXTRAS.items():
        there = importlib.util.find_spec(module) is not None
        found = f"{module} is installed" if there else f"not installed: {purpose}"
        yield Check(
            f"extra {extra}", True if there else None, found, "" if there else f"pip install quorumark[{extra}]"
        )


def _processors() -> Iterator[Check]:
    usable, every = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    yield Check("processors", True, f"{usable} of {every} cores, {platform.machine()}")


def _kernels() -> Iterator[Check]:
    """A product in the field, against Python's integers; and whether compiled code is kept for the next process."""
    import numpy as np

    from quorumark import field
    from quorumark.field import kernels

    a, x, y = (1 << 60) + 3, 987654321987654321, 1234567890123456789
    got = int(field.axpy(a, np.array([x], np.uint64), np.array([y], np.uint64))[0])
    right = got == (a * x + y) % field.P
    yield Check("arithmetic", right, "exact" if right else "wrong", "" if right else "reinstall numba and numpy")
    folder = kernels.axpy.stats.cache_path  # None where numba found no place that can be written
    found = "not kept: every command compiles anew, for seconds" if folder is None else f"kept in {folder}"
    remedy = "set NUMBA_CACHE_DIR to a folder that you may write to"
    yield Check("kernels' cache", folder is not None, f"compiled code is {found}", remedy if folder is None else "")


def _gpu() -> Iterator[Check]:
    if importlib.util.find_spec("torch") is None:
        yield Check("GPU", None, "torch is not installed; none is needed")
        return
    import torch

    if torch.cuda.is_available():
        yield Check("GPU", True, torch.cuda.get_device_name(0))
    else:
        yield Check("GPU", None, "none; none is needed")


def _clock(home: Path) -> Iterator[Check]:
    """Queries, certificates and stamps say when they were made."""
    now = datetime.now(UTC)
    newest = max((made for _, made in _records(home)), default=_OLDEST)
    shown, remedy = now.strftime("%Y-%m-%d %H:%M:%S UTC"), "set this machine's clock (NTP)"
    if now < newest:
        since = "this release" if newest == _OLDEST else "a record in the home"
        yield Check("clock", False, f"{shown}, before {since} was made", remedy)
        return
    with tempfile.NamedTemporaryFile(dir=_existing(home) if os.access(_existing(home), os.W_OK) else None) as file:
        skew = abs(os.stat(file.name).st_mtime - time.time())
    well = skew < _SKEW
    yield Check(
        "clock", well, shown if well else f"{shown}, {skew:.0f} s from the disk's clock", "" if well else remedy
    )


def _space(home: Path) -> Iterator[Check]:
    """As much as the largest share again, since a new one is written before the old one is erased."""
    shares = [path.stat().st_size for path in home.glob("consortia/*/share-*.sealed")]
    least = max([_LEAST_SPACE, *(2 * size for size in shares)])
    for name, place in (("disk", _existing(home)), ("temporary files", Path(tempfile.gettempdir()))):
        free = shutil.disk_usage(place).free
        well = free >= least
        found = f"{free / 1e9:.1f} GB free at {place}"
        yield Check(name, well, found, "" if well else f"make room: {least / 1e9:.1f} GB are needed")


def _home(home: Path) -> Iterator[Check]:
    if not (home / "identity.sealed").exists():
        yield Check("home", None, f"{home} is no member's home yet", "quorumark member init --name …")
        return
    others = stat.S_IMODE(home.stat().st_mode) & 0o077
    yield Check("home", not others, f"{home}, mode {_mode(home)}", f"chmod 700 {home}" if others else "")
    foreign = home.stat().st_uid != os.getuid()
    if foreign:
        yield Check("home's owner", False, f"{home} is another user's", f"run as that user, or chown -R {home}")
    open_files = [path for path in home.rglob("*.sealed") if stat.S_IMODE(path.stat().st_mode) & 0o077]
    found = f"{len(open_files)} open to others, the first {open_files[0]}" if open_files else "closed to others"
    yield Check("sealed files", not open_files, found, f"chmod 600 {open_files[0]}" if open_files else "")
    for place in sorted(home.glob("consortia/*")):
        yield _consortium(place)


def _consortium(path: Path) -> Check:
    from quorumark.consortium.home import ConsortiumFolder

    place, name = ConsortiumFolder(path), f"consortium {path.name}"
    try:
        title = place.terms().name
        if under_way := place.under_way():
            return Check(
                name, None, f"{title}: {under_way} is under way", "run its command again, until it is finished"
            )
        if not place.manifest_path.exists():
            return Check(name, None, f"{title}: there is no key yet", "quorumark setup dkg, or consortium forget")
        share = place.share_path().exists()
        remedy = "" if share else "quorumark share recover, or member restore from a backup"
        return Check(name, share, f"{title}, epoch {place.manifest().epoch}" + ("" if share else ": no share"), remedy)
    except QuorumarkError as error:
        return Check(name, False, str(error), "bring the file back from a backup")


def _key_file(home: Path) -> Iterator[Check]:
    from quorumark.consortium.home import HomeFolder

    path = HomeFolder(home).key_file()
    if path is None:
        return
    if not path.is_file():
        yield Check("key file", False, f"{path} is not there", "bring it back: without it nothing can be opened")
        return
    others = stat.S_IMODE(path.stat().st_mode) & 0o077
    yield Check("key file", not others, f"{path}, mode {_mode(path)}", f"chmod 600 {path}" if others else "")
    if path.resolve().is_relative_to(home.resolve()):
        yield Check("key file's place", False, "it is in the home: who copies one has both", "keep it elsewhere")


def _records(home: Path) -> Iterator[tuple[Path, datetime]]:
    """When terms in the home were made."""
    from quorumark.consortium.home import ConsortiumFolder

    for path in home.glob("consortia/*"):
        try:
            made = ConsortiumFolder(path).terms().created
        except QuorumarkError:  # said by another check
            continue
        yield path, datetime.fromisoformat(made)


def _existing(path: Path) -> Path:
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())


def _mode(path: Path) -> str:
    return f"{stat.S_IMODE(path.stat().st_mode):04o}"
