"""The links of a run, as its server gathers and keeps them (docs/secagg.md, "Links").

After a sum was opened the server asks the cohort that was drawn for it what came after its state: those who answered
check the sum and sign; if they are fewer than T, the others of the cohort are asked to second what those say. With T
statements the link is whole, and is written down; until then the next round waits. Nothing here is secret, and the
server is not believed: every member checks every link that it follows.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quorumark.canonical import canonical
from quorumark.consortium.records import Manifest
from quorumark.errors import MessageError, RoundError
from quorumark.files import append_private
from quorumark.round.group import Group, group_of
from quorumark.round.links import Link, read_links, write_links
from quorumark.round.statements import Said
from quorumark.round.survey import Ask

__all__ = ["Chain"]


class Chain:
    """One run's links, by the states that they begin from; `waiting` is the one that is not whole yet."""

    def __init__(self, manifests: Sequence[Manifest], folder: Path | None) -> None:
        self._manifests = {manifest.digest().hex(): manifest for manifest in manifests}
        self._path = None if folder is None else folder / "links.jsonl"
        self._links: dict[bytes, Link] = {}
        self._unfinished: list[Link] = []  # as members told them
        self.waiting: Link | None = None
        if self._path is not None and self._path.is_file():
            for line in self._path.read_text().splitlines():
                self._read_line(line)

    def since(self, state: bytes, present: bytes) -> list[Link]:
        """The links from a state to the present one; as many as there are, if that state is not on the way."""
        after, found = {link.after: link for link in self._links.values()}, list[Link]()
        while present != state and present in after and len(found) < len(after):
            found.append(after[present])
            present = found[-1].before
        return found[::-1]

    def into(self, state: bytes) -> list[Link]:
        """The one link that leads to a state, if there is one."""
        return [link for link in self._links.values() if link.after == state]

    def begin(self, link: Link) -> None:
        """A state has a successor: who signs that is gathered before the next round."""
        if link.before not in self._links:
            self.waiting = link

    def gather(self, ask: Ask, config: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Asks for what is lacking; `config` and `arrays` are what members check the sum by. A RoundError says who is
        waited for."""
        link = self.waiting
        if link is None:
            return
        group = self._group(link)
        if len(link.checked_by(group)) < group.threshold or len(link.signed_by(group)) < group.quorum:
            said = ask("vouch", {**config, **link.asked}, arrays=arrays, only=self._asked(group, link))
            link = self._with(link.right(group), group, said, "summed")
        if not link.is_whole(group) and len(link.checked_by(group)) >= group.threshold:
            shown = {"link": write_links([link]).decode()}
            said = ask("second", shown, only=self._asked(group, link))
            link = self._with(link, group, said, "seconded")
        self.waiting = link
        if not link.is_whole(group):
            raise RoundError(
                f"the sum of the last round is opened, and {len(link.signed_by(group))} members say so of the "
                f"{group.quorum} that must, {len(link.checked_by(group))} of whom have checked it of the "
                f"{group.threshold} that must: the next round waits for more of "
                f"{group.names(self._lacking(group, link))}",
                code="round.link-waits",
            )
        self._keep(link)

    def take(self, told: Iterable[object]) -> None:
        """From members, for a server that lost its folder: what they followed and signed, each as a chain in JSON.
        Copies of one link are put together; what is not signed by enough in the end is left out."""
        parts: dict[tuple[bytes, str, bytes], Link] = {}
        for content in told:
            try:
                found = read_links(content)
            except MessageError:
                continue
            for link in found[-_MOST:]:
                if link.under in self._manifests and link.before not in self._links:
                    known = parts.setdefault(link.named, replace(link, summed={}, seconded={}))
                    parts[link.named] = known.with_right(link, self._group(link))
        for link in parts.values():
            if link.is_whole(self._group(link)):
                self._keep(link)
            elif link.signed_by(self._group(link)):
                self._unfinished.append(link)

    def wait_for(self, state: bytes, whole: bytes) -> None:
        """The run goes on from a state that members named: the link to it, if it was not whole yet. Of several the one
        that most have signed, or that goes on from the last whole one."""
        ends = {link.after for link in self._links.values()}
        found = [link for link in self._unfinished if (link.after, link.whole) == (state, whole)]
        if found and state not in ends:
            self.waiting = max(found, key=lambda link: self._standing(link, ends))

    def _standing(self, link: Link, ends: Collection[bytes]) -> tuple[bool, int, bool]:
        group = self._group(link)
        enough = len(link.checked_by(group)) >= group.threshold
        return enough, len(link.signed_by(group)), link.before in ends

    @staticmethod
    def _with(link: Link, group: Group, said: Mapping[int, Mapping[str, Any]], kind: str) -> Link:
        """With what members signed, by their points under the manifest of the link. What one says must be right to be
        kept: it could name another's point."""
        for point, reply in said.items():
            there, message = reply.get("point-there", point), reply.get(kind)
            if type(there) is int and isinstance(message, bytes):
                made: Said = {there: message}
                summed, seconded = (made, _NOTHING) if kind == "summed" else (_NOTHING, made)
                link = link.with_right(replace(link, summed=summed, seconded=seconded), group)
        return link

    def _lacking(self, group: Group, link: Link) -> tuple[int, ...]:
        signed = link.signed_by(group)
        return tuple(x for x in group.cohort(link.before, link.draw) if x not in signed)

    def _asked(self, group: Group, link: Link) -> tuple[int, ...] | None:
        """Whom to ask, by the points of the manifest in force; under an earlier one the points may be others'."""
        return self._lacking(group, link) if link.under == list(self._manifests)[-1] else None

    def _group(self, link: Link) -> Group:
        return group_of(self._manifests[link.under])

    def _keep(self, link: Link) -> None:
        """On disk first: a link that could not be written is waited for again."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            append_private(self._path, canonical(link.as_dict()))
        self._links[link.before] = link
        if self.waiting is not None and self.waiting.before == link.before:
            self.waiting = None

    def _read_line(self, line: str) -> None:
        """A crash may have left half a line: that link is gathered again."""
        try:
            link = Link.of(json.loads(line))
        except (ValueError, MessageError):
            return
        self._links[link.before] = link


_NOTHING: Said = {}
_MOST = 1 << 8  # links that are taken from one member, the last ones: it keeps 64
