"""Which member a node is: by what its operator says, or in a simulation by its place among the homes in one folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from quorumark.consortium.home import HomeFolder
from quorumark.consortium.keystore import Unlock
from quorumark.consortium.records import Member
from quorumark.errors import InputError
from quorumark.node import remembered
from quorumark.node.member import Config, MemberNode
from quorumark.node.signer import SignerClient

__all__ = ["Stages", "Words", "find_home", "named_member", "pins_of", "simulated_member"]

_OF_A_SIGNER = ("home", "key-file", "terms", "manifest", "consortium", "seeds")
"""What a node's operator says to the signer instead, where there is one."""


class Stages(Protocol):
    """A member, in this process or behind a socket."""

    def handle(
        self, stage: str, config: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]
    ) -> tuple[Config, dict[str, NDArray[Any]]]: ...


@dataclass(frozen=True)
class Words:
    """How an engine's users say it: where an operator's settings are (`place`) and what their names begin with; the
    argument that names the `homes` of a simulation, and how it is set; the argument that says how many nodes there
    are, and how that is set, with {count} in it."""

    place: str
    prefix: str
    homes: str
    set_homes: str
    nodes: str
    set_nodes: str


def pins_of(settings: Mapping[str, Any], words: Words) -> dict[str, str]:
    """What an operator pinned."""
    names = ("terms", "manifest", "consortium")
    return {name: str(settings[words.prefix + name]) for name in names if words.prefix + name in settings}


def named_member(settings: Mapping[str, Any], words: Words) -> Stages | None:
    """The member that an operator's settings name: a socket, or a home and its key file. None if they name none."""
    prefix = words.prefix
    if prefix + "socket" in settings:
        ignored = sorted(prefix + name for name in _OF_A_SIGNER if prefix + name in settings)
        if ignored:  # a pin that nobody checks is worse than none
            raise InputError(
                words.place,
                "must leave home, key file, pins and seeds to the signer (quorumark member serve has options for them)",
                ", ".join(ignored),
            )
        return SignerClient(str(settings[prefix + "socket"]))
    if prefix + "home" not in settings:
        return None
    if prefix + "key-file" not in settings:
        raise InputError(words.place, f"must name the key file as well as the home ({prefix}key-file)")
    unlock = Unlock.key_file(Path(str(settings[prefix + "key-file"])))
    seeds, named = settings.get(prefix + "seeds") is True, dict[str, Any](pins_of(settings, words))
    return MemberNode(HomeFolder(str(settings[prefix + "home"])), unlock, seeds=seeds, **named)


def simulated_member(
    folder: Path, point: int, pins: Mapping[str, str], words: Words, *, setup: bool = False
) -> MemberNode:
    """The member at a point in a simulation. While the key is made (`setup`) some members have the manifest and others
    do not: a node must stay the same member.

    One whose home was made for a simulation is kept for the messages that follow, as long as its files and the folder
    are those that were looked at.
    """
    name = folder, point, tuple(sorted(pins.items()))
    known, files, about = (None, (), ()) if setup else _SERVED.get(name, (None, (), ()))
    if known is not None and remembered.as_seen(files) == about:
        return known
    home = find_home(folder, point, words, pins.get("consortium"), setup=setup)
    key_file = home.path.with_name(f"{home.path.name}.key")
    if not key_file.is_file():
        raise InputError(
            words.homes,
            f"must hold the key file of each home beside it: there is {home.path.name!r}, and no {key_file.name!r}; "
            "put it there under this name",
        )
    named: dict[str, Any] = dict(pins)
    made = MemberNode(home, Unlock.key_file(key_file), **named)
    places = [place for place in home.consortia() if place.manifest_path.exists()]
    if not setup and places and any(made.simulated_home()):
        files = (folder, home.path / "member.json", home.path / "identity.sealed", key_file)
        files += tuple(path for place in places for path in (place.path.parent, place.manifest_path))
        if len(_SERVED) >= _MOST_SERVED:
            _SERVED.clear()
        _SERVED[name] = made, files, remembered.as_seen(files)
    return made


_Name = tuple[Path, int, tuple[tuple[str, str], ...]]
_SERVED: dict[_Name, tuple[MemberNode, tuple[Path, ...], tuple[object, ...]]] = {}
_MOST_SERVED = 1 << 12


def find_home(
    folder: Path, point: int, words: Words, consortium: str | None = None, *, setup: bool = False
) -> HomeFolder:
    """The home of the member at a point, among those in a folder, by the keys in its card: folders may have any names.

    While the key is made (`setup`) no roster says who is where; then the homes are taken in the order of their names.
    """
    if not folder.is_dir():
        relative = "" if folder.is_absolute() else "; it is relative, and nodes run elsewhere: name the whole path"
        rule = f"must be set {words.set_homes}"
        raise InputError(words.homes, rule, f"{str(folder)!r}, which is no folder{relative}")
    homes = {path.parent.name: HomeFolder(path.parent) for path in sorted(folder.glob("*/member.json"))}
    if not homes:
        raise InputError(
            words.homes,
            f"must be set {words.set_homes}",
            f"{str(folder)!r}, in which no folder holds a member.json: homes are made by quorumark member init, or by "
            "qm.Home.create",
        )
    rosters = (_roster(home, consortium) for home in homes.values())
    roster = None if setup else next((found for found in rosters if found), None)
    count = len(homes) if roster is None else len(roster)
    if point > count:
        rule = f"must be the number of members, {count}: {words.set_nodes.format(count=count)}"
        raise InputError(words.nodes, rule, f"at least {point}")
    if roster is None:
        return homes[sorted(homes, key=_by_number)[point - 1]]
    member = roster[point - 1]
    found = [home for home in homes.values() if home.card().ed25519 == member.ed25519]
    names = ", ".join(homes)
    if len(found) > 1:
        same = " and ".join(home.path.name for home in found)
        raise InputError(words.homes, f"must hold each member's home once: {same} are {member.name!r}; move one")
    if not found:
        raise InputError(
            words.homes,
            f"must be the folder with the homes of all {count} members",
            f"one without the home of {member.name!r}, member {point}; there: {names}",
        )
    return found[0]


def _roster(home: HomeFolder, consortium: str | None) -> tuple[Member, ...]:
    """The members of a home's consortium, once its key is made."""
    made = [place for place in home.consortia() if place.manifest_path.exists()]
    chosen = [place for place in made if consortium is None or place.path.name.startswith(consortium)]
    return chosen[0].manifest().terms.roster if chosen else ()


def _by_number(name: str) -> list[tuple[bool, int, str]]:
    """member-10 after member-9."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]
