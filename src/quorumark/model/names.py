"""What a tensor is called: wrappers around a model, and weights that a parametrisation keeps under another name.

A layer with weight_norm or spectral_norm keeps other tensors than the layer that is exported from it:

    weight_norm        weight = g·v/‖v‖          X.weight_v, or X.parametrizations.weight.original1    with g beside it
    spectral_norm      weight = w/σ              X.weight_orig, or X.parametrizations.weight.original

Rows of v and of the weight differ by a factor, as do w and the weight, which the canonical form does not see. So either
can stand for the other.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from typing import TypeAlias

__all__ = ["Rule", "exported", "peeled", "renamed", "rules"]

_WRAPPERS = frozenset(("module", "model", "_orig_mod", "base_model", "transformer"))
_DEEPEST = 8  # wrappers around a name, and no more: names are the suspect's own
_PARAMETRISED = re.compile(r"(?:(.*)\.)?parametrizations\.(\w+)\.original1?")
_HOOKED = {"_v": "_g", "_orig": "_u"}  # by its end: what must be beside it

Rule: TypeAlias = tuple[str, str]
"""(strip, add): the suspect's name strip + rest is the layout's name add + rest."""


def exported(names: Collection[str]) -> dict[str, str]:
    """For each tensor, the name of the weight that it stands for; most stand for themselves.

    Where the weight is there as well, or two tensors would stand for it, they keep their own names.
    """
    found = {name: _exported(name, names) for name in names}
    count = Counter(found.values())
    return {name: plain if count[plain] == 1 else name for name, plain in found.items()}


def _exported(name: str, names: Collection[str]) -> str:
    match = _PARAMETRISED.fullmatch(name)
    if match is not None:
        return f"{match[1]}.{match[2]}" if match[1] else match[2]
    for end, beside in _HOOKED.items():
        if name.endswith(end) and name.removesuffix(end) + beside in names:
            return name.removesuffix(end)
    return name


def rules(suspect: Collection[str], layout: Collection[str]) -> list[Rule]:
    """The rules that join the most names, the plainest first. More than one: the names alone cannot decide.

    Every pair of names that are the same behind their wrappers is a vote for the rule that turns the first into the
    second. A rule said longer ("a.m." to "b.m." for "a." to "b.") does the same to names and never has more votes.
    """
    behind: dict[str, list[str]] = {}
    ours, theirs = _common(layout), _common(suspect)
    for name in layout:
        for prefix, rest in peeled(name, ours):
            behind.setdefault(rest, []).append(prefix)
    votes: Counter[Rule] = Counter()
    for name in suspect:
        for strip, rest in peeled(name, theirs):
            votes.update((strip, add) for add in behind.get(rest, ()))
    most = max(votes.values(), default=0)
    best = [rule for rule, count in votes.items() if count == most]
    return sorted(best, key=lambda rule: (len(rule[0]) + len(rule[1]), rule)) or [("", "")]


def _common(names: Collection[str]) -> frozenset[str]:
    """The prefixes that more than half of all names have: they may be wrappers, whatever they are called."""
    counts: Counter[str] = Counter()
    for name in names:
        words = name.split(".", _DEEPEST)
        counts.update(".".join(words[:count]) for count in range(1, len(words)))
    return frozenset(prefix for prefix, count in counts.items() if 2 * count > len(names))


def peeled(name: str, common: Collection[str] = ()) -> Iterator[tuple[str, str]]:
    """The name with 0, 1, 2 … wrappers taken off its front: (wrappers, rest)."""
    words = name.split(".", _DEEPEST)
    for count in range(len(words)):
        yield "".join(f"{word}." for word in words[:count]), ".".join(words[count:])
        if words[count] not in _WRAPPERS and ".".join(words[: count + 1]) not in common:
            return


def renamed(name: str, rule: Rule) -> str:
    """The suspect's name of a tensor of the layout; "" if the rule gives it none."""
    strip, add = rule
    return strip + name.removeprefix(add) if name.startswith(add) else ""
