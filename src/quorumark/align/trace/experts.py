"""Candidates for experts: modules of the same kind in a list, which a gate chooses from.

Whether they can be exchanged is not decided here: `derive` keeps those that leave the output as it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from quorumark.align.groups import Group, Slot

__all__ = ["find_experts"]


def find_experts(shapes: Mapping[str, tuple[int, ...]]) -> list[Group]:
    """For every list of modules with the same tensors: a group of them with the gates beside it, if there are any.

    A gate is a tensor of the module that has the list, with one row for each expert.
    """
    lists: dict[str, dict[int, dict[str, tuple[int, ...]]]] = defaultdict(lambda: defaultdict(dict))
    for name, shape in shapes.items():
        words = name.split(".")
        for at, word in enumerate(words[:-1]):
            if word.isdigit():
                lists[".".join(words[:at])][int(word)][".".join(words[at + 1 :])] = shape
    found = []
    for prefix, members in sorted(lists.items()):
        count = len(members)
        alike = all(members[k] == members[0] for k in range(count)) if sorted(members) == list(range(count)) else False
        parent = prefix.rpartition(".")[0]
        beside = f"{parent}." if parent else ""
        gates = [
            Slot(name, 0, 0, 1, 1, 1)
            for name, shape in sorted(shapes.items())
            if name.startswith(beside) and not name.startswith(f"{prefix}.") and shape[:1] == (count,)
        ]
        if count > 1 and alike and gates:
            swaps = tuple(tuple(f"{prefix}.{k}.{rest}" for k in range(count)) for rest in sorted(members[0]))
            found.append(Group(count, tuple(gates), swaps=swaps))
    return found
