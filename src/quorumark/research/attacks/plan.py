"""A plan: which attacks are tried on a model, with which settings and seeds.

It is a TOML file: `[[attack]]` entries with a `name` and its settings, where a list means one run for each value (every
combination of lists), or with a `chain` of attacks one after the other; without settings, those that docs/attacks.md
lists. `seeds` for all of them, or for one. `quick`, `paper`, `language` and `layers` come along.
"""

from __future__ import annotations

import inspect
import itertools
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from quorumark.errors import InputError
from quorumark.research.attacks import ATTACKS

__all__ = ["BUILT_IN", "Job", "Plan", "Step", "known_only", "read_plan"]

BUILT_IN = ("quick", "paper", "language", "layers")
_LARGEST = 1 << 24  # bytes of a plan

Step = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Job:
    """One attack, or several one after the other, with one seed."""

    steps: tuple[Step, ...]
    seed: int

    @property
    def name(self) -> str:
        return " + ".join(name for name, _ in self.steps)

    @property
    def settings(self) -> dict[str, Any]:
        if len(self.steps) == 1:
            return dict(self.steps[0][1])
        return {f"{k}.{name}": value for k, (_, more) in enumerate(self.steps) for name, value in more.items()}

    @property
    def key(self) -> tuple[str, str, int]:
        """As a row of the results has it."""
        return self.name, json.dumps(self.settings, sort_keys=True), self.seed


@dataclass(frozen=True)
class Plan:
    """What to try, in order; `target` is the plan's own description of what is attacked, if it has one."""

    title: str
    jobs: tuple[Job, ...]
    target: Mapping[str, Any] = field(default_factory=dict)
    folder: Path = Path()


def read_plan(source: str | Path, *, texts: bool = False) -> Plan:
    """A plan from a file, or one of those that come along. With `texts`, attacks that train may name a `text`."""
    if str(source) in BUILT_IN:
        data = resources.files("quorumark.research.attacks").joinpath("configs", f"{source}.toml").read_bytes()
    else:
        path = Path(source)
        try:
            if path.exists() and (
                not path.is_file() or path.stat().st_size > _LARGEST
            ):  # pipes and devices have no end
                raise OSError(0, "it is no regular file, or too large")
            data = path.read_bytes()
        except OSError as error:
            rule = f"must be a file that can be read, or one of {', '.join(BUILT_IN)}"
            raise InputError("the plan", rule, f"{str(source)!r} ({error.strerror})") from None
    try:
        body = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError("the plan", "must be TOML", str(error)) from None
    known_only("the plan", body, {"title", "seeds", "attack", "target"})
    entries, target = body.get("attack", []), body.get("target", {})
    if not isinstance(entries, list) or not entries or not isinstance(target, dict):
        raise InputError("the plan", "must have [[attack]] entries", str(source))
    everywhere = _seeds(body.get("seeds", [1]))
    jobs = [job for entry in entries for job in _jobs(entry, everywhere, texts)]
    title = str(body.get("title", Path(source).stem))
    try:
        once = {job.key: job for job in jobs}
    except TypeError:  # TOML has dates and times, which no attack takes
        raise InputError(
            "a setting of the plan", "must be a number, a string or a boolean", "a date or a time"
        ) from None
    return Plan(title, tuple(once.values()), target, Path(source).parent)


def known_only(what: str, body: Mapping[str, Any], names: set[str]) -> None:
    """Refuses a table with other entries than these."""
    unknown = sorted(body.keys() - names)
    if unknown:
        raise InputError(what, f"must have only {', '.join(sorted(names))}", unknown[0])


def _seeds(value: Any) -> list[int]:
    if not isinstance(value, list) or not value or not all(isinstance(v, int) and v >= 0 for v in value):
        raise InputError("seeds", "must be a list of integers", value)
    return value


def _jobs(entry: Mapping[str, Any], everywhere: list[int], texts: bool) -> list[Job]:
    if not isinstance(entry, Mapping) or ("name" in entry) == ("chain" in entry):
        raise InputError("an attack of the plan", "must have a name or a chain", entry)
    seeds = _seeds(entry.get("seeds", everywhere))
    if "chain" in entry:
        known_only("a chain of the plan", entry, {"chain", "seeds"})
        links = entry["chain"] if isinstance(entry["chain"], list) else []
        if not links:
            raise InputError("a chain of the plan", "must be a list of attacks", entry["chain"])
        entries = [link if isinstance(link, Mapping) else {"name": link} for link in links]
        steps = tuple(_steps(each, texts, single=True)[0] for each in entries)
        return [Job(steps, seed) for seed in seeds]
    found = _steps({k: v for k, v in entry.items() if k != "seeds"}, texts)
    return [Job((step,), seed) for step in found for seed in seeds]


def _steps(entry: Mapping[str, Any], texts: bool, *, single: bool = False) -> list[Step]:
    """One attack with every combination of its settings; the settings that are always tried if it has none."""
    name = str(entry.get("name"))
    if name not in ATTACKS:
        raise InputError("an attack of the plan", f"must be one of {', '.join(sorted(ATTACKS))}", repr(name))
    attack = ATTACKS[name]
    settings = {k: v for k, v in entry.items() if k != "name"}
    known = [p.name for p in inspect.signature(attack.function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    known += ["text"] if texts and "data" in attack.needs else []
    for key in settings:
        if key not in known:
            raise InputError(f"a setting of {name!r}", f"must be one of {', '.join(known) or 'none'}", repr(key))
    if single:
        return [(name, settings)]
    if not settings:
        return [(name, dict(one)) for one in attack.settings]
    lists = [value if isinstance(value, list) else [value] for value in settings.values()]
    return [(name, dict(zip(settings, values, strict=True))) for values in itertools.product(*lists)]
