"""Configurations: what a run is, and the paper's tables and figures as lists of runs.

A configuration is a TOML file: a title, settings for all of its runs under `[run]`, and the values that vary under
`[[grid]]`, every combination of which is a run. Two configurations may have the same run: a run is known by its `id`,
and done once. `[[paper]]` holds the paper's figures: settings that they are about, and `accuracy` (`perplexity`) and
`z` by strength; `[aims]` what z should be, by strength; `[[reproduce]]` which of the paper's claims the page holds
against its rule's runs. With `task = "language"` its runs fine-tune language models,
and have their settings.
"""

from __future__ import annotations

import itertools
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from quorumark.errors import InputError

__all__ = ["Configuration", "LanguageSettings", "Settings", "configurations", "read", "strength_settings"]


# how a data set's images are augmented unless a run says otherwise (docs/lab.md, "A run")
_USUAL = {
    "cifar10": ("crop", "flip", "autoaugment"),
    "cifar100": ("crop", "flip", "autoaugment"),
    "tiny-imagenet": ("flip", "rotate", "jitter"),
}


@dataclass(frozen=True)
class Settings:
    """One run. What is not given is as in the paper, where the paper says it."""

    dataset: str
    strength: str = "none"
    members: int = 32
    rounds: int = 300
    seed: int = 0
    model: str = "resnet18"
    partition: str = "iid"  # or dirichlet:γ
    global_batch: int = 2048
    lr: float = 1e-3
    decay: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.999
    validation: float = 0.2
    evaluate_every: int = 1
    augment: tuple[str, ...] = ()
    null_keys: int = 0  # other keys that the released model is tested with
    dither: float = 0.0  # κ of the members' noise beside the mark (`quorumark.research.lab.dither`); 0: none
    continuity: bool = False  # count the rows that the continuity rule would silence
    kept: bool = False  # members keep AdamW's state from round to round, as the paper's public code does
    packing: int = 1  # so many weights in an element of an upload (docs/secagg.md, "Packed sums")
    label: str = ""  # a part of the run's name, where it would be taken for another one of another length

    def __post_init__(self) -> None:
        strength_settings(self.strength)
        if self.gamma is not None and not self.gamma > 0:
            raise InputError("partition", "must be iid or dirichlet:GAMMA", repr(self.partition))
        if not 0 <= self.dither <= 100:
            raise InputError("dither", "must be from 0 to 100", self.dither)
        if self.dither and (self.strength == "none" or self.papers_code):
            raise InputError("dither", "must be 0 without a mark and under the rule paper-code", self.dither)
        if self.packing not in (1, 2, 3, 4):
            raise InputError("packing", "must be 1, 2, 3 or 4", self.packing)
        if self.packing > 1 and (self.strength == "none" or self.papers_code or self.per_client or self.dither):
            rule = "must be 1 without a mark, under the rule paper-code, with a key for each member and with dither"
            raise InputError("packing", rule, self.packing)
        if not re.fullmatch(r"[a-z0-9]{0,20}", self.label):
            raise InputError("label", "must be up to 20 small letters and digits", repr(self.label))
        for name in ("members", "rounds", "global_batch", "evaluate_every"):
            if getattr(self, name) < 1:
                raise InputError(name, "must be 1 or more", getattr(self, name))

    @property
    def gamma(self) -> float | None:
        """The concentration of a Dirichlet partition; None if it is IID."""
        kind, _, number = self.partition.partition(":")
        if self.partition == "iid":
            return None
        try:
            return float(number) if kind == "dirichlet" else 0.0
        except ValueError:
            return 0.0

    @property
    def per_client(self) -> bool:
        """Whether this is the baseline in which each member has a key of its own."""
        return self.strength.startswith("per-client")

    @property
    def papers_code(self) -> bool:
        """Whether the rule is that of the paper's public code (`quorumark.research.lab.papercode`)."""
        return self.strength.startswith(("paper-code:", "per-client-paper-code:"))

    @property
    def augmented(self) -> str:
        """How images are augmented, where it is not the data set's usual way; nothing where it is."""
        usual = self.augment == _USUAL.get(self.dataset, ())
        return "" if usual else "+".join(self.augment) or "plain"

    @property
    def id(self) -> str:
        """The run's name, without its length: a longer run of the same settings takes a shorter one's place."""
        parts = [self.dataset, self.model, f"k{self.members}", self.partition, self.strength, f"s{self.seed}"]
        parts += [f"dither{self.dither:g}"] * bool(self.dither) + ["continuity"] * self.continuity
        parts += [self.augmented] * bool(self.augmented)
        parts += ["kept"] * self.kept + [f"decay{self.decay:g}"] * (self.decay != type(self).decay)
        parts += [f"packing{self.packing}"] * (self.packing > 1) + [self.label] * bool(self.label)
        return "-".join(parts).replace(":", "")

    @property
    def unmarked(self) -> Settings:
        """The same run without a mark, and without what goes with one."""
        return replace(self, strength="none", dither=0.0, continuity=False, packing=1)

    def asdict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class LanguageSettings(Settings):
    """One run of fine-tuning a language model. What is not given is as in the paper, where the paper says it.

    The text has its own validation split; the members' blocks are drawn at random.
    """

    dataset: str = "wikitext2"
    members: int = 4
    rounds: int = 20
    model: str = "smollm2-135m"
    global_batch: int = 32  # blocks, over all members
    lr: float = 1e-4
    decay: float = 0.01  # the paper says AdamW and no more: this is PyTorch's
    sequence: int = 1024  # tokens of a block
    patience: int = 0  # stop when validation has not improved for so many rounds; 0: never
    max_coordinates: int = 0  # carry in a sample of so many; 0: in all

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.partition != "iid":
            raise InputError("partition", "must be iid for text", repr(self.partition))
        if self.papers_code or self.dither or self.continuity or self.kept or self.packing > 1:
            rule = "must not be paper-code for text, nor have dither, continuity, kept or packing"
            raise InputError("strength", rule, self.strength)
        if self.sequence < 2 or self.patience < 0 or self.max_coordinates < 0:
            rule = "must be 2 or more, patience and max_coordinates 0 or more"
            raise InputError("sequence", rule, (self.sequence, self.patience, self.max_coordinates))

    @property
    def id(self) -> str:
        return super().id + (f"-d{self.max_coordinates}" if self.max_coordinates else "")

    def asdict(self) -> dict[str, Any]:
        """Without what is for images only."""
        for_images = ("augment", "validation", "dither", "continuity", "kept", "packing")
        return {k: v for k, v in super().asdict().items() if k not in for_images}


def strength_settings(text: str) -> dict[str, str] | None:
    """A strength as docs/strength.md has it, from its short form: none, rho:0.05, paper:0.025, per-client:0.1, …

    `paper` is the rule of the paper's text, `paper-code` that of its public code, which only the lab has. `per-client`
    is the text's rule with a key for each member, `per-client-paper-code` the code's, `per-client-rho` this project's.
    """
    rule, _, number = text.partition(":")
    names = {"rho": "rho", "target": "z", "relative": "c", "paper": "c", "paper-code": "c", "per-client": "c",
             "per-client-paper-code": "c", "per-client-rho": "rho"}  # fmt: skip
    if text == "none":
        return None
    if rule not in names or not number:
        raise InputError("strength", f"must be none or one of {', '.join(names)} with a number", repr(text))
    same = {"per-client": "paper", "per-client-paper-code": "paper-code", "per-client-rho": "rho"}
    try:
        if not 0 < float(number) < 1e6:
            raise ValueError
    except ValueError:
        raise InputError("strength", f"must have a number above 0 after {rule}:", repr(text)) from None
    found = {"rule": same.get(rule, rule), names[rule]: number}
    # noise is a setting of its own here (`Settings.dither`), which the lab adds itself
    return found if names[rule] == "c" and rule != "relative" else {**found, "dither": "0"}


TASKS: dict[str, type[Settings]] = {"vision": Settings, "language": LanguageSettings}


@dataclass(frozen=True)
class Configuration:
    """A table or a figure: its runs, and how `lab table` shows them."""

    name: str
    title: str
    runs: tuple[Settings, ...]
    notes: tuple[str, ...]
    paper: tuple[dict[str, Any], ...]
    plot: str  # what its figure is drawn against: members, strength or nothing
    task: str = "vision"  # or language
    aims: Mapping[str, float] = field(default_factory=dict)  # by strength: what z should be, without costing accuracy
    reproduce: tuple[dict[str, Any], ...] = ()  # dataset, strength, members, and the paper's z ± within and loss

    def figure(self, what: str, run: Settings) -> str:
        """The paper's accuracy or z for a run's settings, as it prints it; nothing if it has none."""
        for entry in self.paper:
            if all(getattr(run, key) == value for key, value in entry.items() if key not in ("accuracy", "z")):
                return str(entry.get(what, {}).get(run.strength, ""))
        return ""


def configurations() -> list[str]:
    """The names of the configurations that come with the lab."""
    folder = resources.files("quorumark.research.lab") / "configs"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


_LARGEST = 1 << 24  # bytes of a configuration


def read(name: str | os.PathLike[str]) -> Configuration:
    """A configuration by its name, or from a TOML file."""
    path = Path(name)
    if path.suffix == ".toml":
        if not path.is_file() or path.stat().st_size > _LARGEST:
            raise InputError("configuration", "must be a file that exists, of a sensible size", str(path))
        try:
            return _parsed(path.stem, path.read_text())
        except InputError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError("configuration", "must be TOML with the settings of runs", f"{path}: {error}") from None
    if str(name) not in configurations():
        raise InputError("configuration", f"must be a TOML file or one of {', '.join(configurations())}", repr(name))
    file = resources.files("quorumark.research.lab") / "configs" / f"{name}.toml"
    return _parsed(str(name), file.read_text())


def _parsed(name: str, text: str) -> Configuration:
    body = tomllib.loads(text)
    task = body.get("task", "vision")
    if task not in TASKS:
        raise InputError("configuration", f"must have a task of {', '.join(TASKS)}", repr(task))
    kind = TASKS[task]
    known = {f.name for f in fields(kind)}
    base = body.get("run", {})
    unknown = (set(base) | {key for grid in body.get("grid", []) for key in grid}) - known
    if unknown:
        raise InputError("configuration", f"must have settings of {', '.join(sorted(known))}", repr(min(unknown)))
    runs: dict[str, Settings] = {}
    for grid in body.get("grid", [{}]):
        for run in _combinations(kind, base, grid):
            runs[run.id] = run
    notes, paper = tuple(body.get("notes", [])), tuple(body.get("paper", []))
    aims, reproduce = body.get("aims", {}), tuple(body.get("reproduce", []))
    return Configuration(
        name, body["title"], tuple(runs.values()), notes, paper, body.get("plot", ""), task, aims, reproduce
    )


def _combinations(kind: type[Settings], base: dict[str, Any], grid: dict[str, Any]) -> Iterator[Settings]:
    """Every combination of the grid's lists; what is no list is for all."""
    lists = {key: value if isinstance(value, list) and key != "augment" else [value] for key, value in grid.items()}
    for values in itertools.product(*lists.values()):
        chosen = {**base, **dict(zip(lists, values, strict=True))}
        chosen["augment"] = tuple(chosen.get("augment", ()))
        yield kind(**chosen)
