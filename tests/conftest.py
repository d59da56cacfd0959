"""What all tests share."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path

# Before anything imports torch, here and in the processes that tests start: threads that wait for each other beside
# another worker's double the work of small models. What is about threads sets their number itself.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

try:  # the GPU test runs where hypothesis is not installed
    from hypothesis import HealthCheck, settings

    # derandomize: the same examples in every run, so that a failure is a failure for everybody
    settings.register_profile(
        "quorumark", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("quorumark")
except ImportError:
    pass


@pytest.fixture(scope="session")
def root() -> Path:
    """The project's folder."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session", autouse=True)
def no_power_cuts() -> Iterator[None]:
    """Files are not synced to the disk: a process that is killed leaves what it wrote, and no test cuts the power. That
    the code does sync, and in which order, has tests of its own (`test_keystore.py`, `test_ledger.py`)."""
    before = os.fsync
    os.fsync = os.fstat  # type: ignore[assignment]
    yield
    os.fsync = before


@pytest.fixture(scope="session", autouse=True)
def commands_are_built_once() -> Iterator[None]:
    """Typer makes all commands and options anew for every call: two thirds of what a command costs here."""
    try:
        import typer.main
        import typer.testing
    except ImportError:  # as above
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        once = functools.cache(typer.main.get_command)
        patch.setattr(typer.main, "get_command", once)
        patch.setattr(typer.testing, "_get_command", once)
        yield


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """For commands: plain output of a known width."""
    return {**os.environ, "COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"}


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small models train faster so, and tests that run beside each other do not wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
