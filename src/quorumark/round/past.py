"""What a server knows of earlier rounds from one state, and what it gathers from members to go on from there
(docs/secagg.md, "One state, one opened sum")."""

from __future__ import annotations

from quorumark.consortium.records import Manifest
from quorumark.errors import RoundError
from quorumark.round import statements
from quorumark.round.group import Group, group_of, word
from quorumark.round.survey import Ask, ask_where

__all__ = ["Past"]


class Past:
    """Earlier rounds from one state. Statements are kept by what they are about, then by point."""

    def __init__(self, manifest: Manifest, group: Group, state: bytes) -> None:
        self.manifest, self.group, self.state = manifest, group, state
        self.halvings = 0
        self.draw = 0
        self.short = False  # the last round of this draw could not be completed
        self.answered: dict[int, tuple[int, ...]] = {}
        self.halved: dict[int, int] = {}  # of those rounds
        self.drawn: dict[int, int] = {}  # the same: their draws
        self.never: dict[int, dict[int, bytes]] = {}
        self.strong: dict[int, dict[int, bytes]] = {}
        self.closed: dict[str, dict[int, bytes]] = {}
        self.newer: dict[int, dict[int, bytes]] = {}

    @property
    def cohort(self) -> tuple[int, ...]:
        """Who is drawn."""
        return self.group.cohort(self.state, self.draw)

    def settle(self, ask: Ask, earlier: tuple[Manifest, ...]) -> None:
        """Before another round from this state: gives up what can be given up, closes earlier manifests, and draws the
        cohort anew if too few of it came."""
        for round_no in sorted(self.standing()):
            self.gather(ask, round_no)
        for manifest in earlier:
            self.close_all(ask, manifest)
        standing = self.standing()
        last = max((self.drawn[r] for r in standing), default=0)
        while self.draw < last and self._redraw(ask):
            pass
        if self.short and not standing:
            self._redraw(ask)

    # --- sums that can never be opened ---

    def standing(self) -> list[int]:
        """Rounds in which members have answered, and whose sums could still be opened."""
        return [r for r in self.answered if not self.is_given_up(r)]

    def is_given_up(self, round_no: int) -> bool:
        draw, said = self.drawn.get(round_no, 0), self.never.get(round_no, {})
        found = statements.signers(self.group, "never", self.state, word(round_no), said, draw)
        return draw < self.draw or len(found) >= self.group.closing

    def gather(self, ask: Ask, round_no: int) -> None:
        """Statements that give a round up, if there can be enough: a member that signs one can no longer help to open
        that sum, nor to make it again."""
        drawn = self.group.cohort(self.state, self.drawn.get(round_no, 0))
        free = [x for x, where in ask_where(ask, self.state).items() if x in drawn and not where.answered]
        if len(free) < self.group.closing:
            return
        request = {"state": self.state.hex(), "of-round": round_no, "of-manifest": self.manifest.digest().hex()}
        for point, said in ask("never", request).items():
            if "never" in said:
                self.never.setdefault(round_no, {})[point] = said["never"]

    def close_all(self, ask: Ask, manifest: Manifest) -> bool:
        """Whether an earlier manifest is closed, with the statements of its members: for all its draws."""
        group = group_of(manifest)
        return all(self._close(ask, group, manifest, draw) for draw in range(group.draws))

    def _close(self, ask: Ask, group: Group, manifest: Manifest, draw: int) -> bool:
        """Whether a draw is closed, once everybody was asked; by their points under that manifest. What a member says
        must be right to be kept: it could name another's point."""
        known = self.closed.setdefault(statements.place_of(group, draw), {})
        if not statements.is_closed(group, self.state, draw, known):
            request = {
                "state": self.state.hex(),
                "of-round": 0,
                "of-draw": draw,
                "of-manifest": manifest.digest().hex(),
            }
            for point, said in ask("never", request).items():
                made = {int(said.get("point-there", point)): said.get("never", b"")}
                if statements.signers(group, "never", self.state, statements.in_draw(draw), made, draw):
                    known |= made
        return statements.is_closed(group, self.state, draw, known)

    # --- cohorts ---

    def _redraw(self, ask: Ask) -> bool:
        """Draws the cohort anew, if enough of it can say that they answer nothing more under this draw. Who has said so
        takes no part in it any more, so nobody is asked in vain."""
        group, drawn = self.group, self.cohort
        if group.draws == 1:
            return False
        there = {x: where for x, where in ask_where(ask, self.state).items() if x in drawn}
        free = [x for x, where in there.items() if not where.answered or where.draw != self.draw]
        last = self.draw + 1 == group.draws
        if not last and len(free) >= group.closing and self._close(ask, group, self.manifest, self.draw):
            self.draw, self.short = self.draw + 1, False
            self.halvings = self.asked_halvings
            return True
        if len(there) >= group.least:
            return False  # they may try once more
        away = group.names(x for x in drawn if x not in there)
        raise RoundError(
            f"draw {self.draw} of the cohort from this model waits for {away}: {len(there)} of its {group.size} "
            f"members can be reached, and {group.least} must take part"
            + ("; no other is drawn after this one" if last else f", or {group.closing} sign that another is drawn"),
            code="round.cohort-waits",
        )

    # --- strength ---

    def complaints(self, level: int) -> tuple[int, ...]:
        """Who of the cohort has found the mark too strong, halved so many times."""
        said = self.strong.get(level, {})
        return statements.signers(self.group, "strong", self.state, word(level), said, self.draw)

    @property
    def asked_halvings(self) -> int:
        """How often the mark is to be halved, by all complaints."""
        level = 0
        while level < statements.HALVINGS and len(self.complaints(level)) >= self.group.blocking:
            level += 1
        return level
