"""Rounds over any engine: what the server sends to nodes, and what it does with their replies (docs/engines.md).

    rounds = Rounds(wire, server, timeout=120, log=…)
    rounds.survey()                                   # once, before the first round of a run
    report, weights = rounds.round(model, {node: what the engine's own training sends}, timeout)

A round has three exchanges: train (join, train, ready), upload, unmask. A round that cannot be finished is given up:
`weights` is None, the report says why, and the last model stands.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from logging import INFO, WARNING
from typing import Any

from numpy.typing import NDArray

from quorumark.errors import EncodingError, QuorumarkError, RoundError, code_of
from quorumark.node.ceremony import check_introduction
from quorumark.node.noise import SharedNoise
from quorumark.node.wire import Config, Reply, Sent, Together, Wire
from quorumark.round.outlook import will_pass
from quorumark.round.secagg.messages import unpack
from quorumark.round.server import RoundServer
from quorumark.round.survival import Step, Survival, middle
from quorumark.simulation import NOTHING, RoundReport, timed, without_values

__all__ = ["Rounds"]

Log = Callable[..., None]
"""As `logging.log`: level, text, arguments."""


class Rounds:
    """One run. `reports` has a RoundReport for each round, `told` what the members of the last one sent beside their
    replies, by point: metrics, say."""

    def __init__(
        self,
        wire: Wire,
        server: RoundServer,
        *,
        timeout: float,
        log: Log,
        patience: float | None = None,
        slim: Callable[[Any], Any] | None = None,
        together: Together | None = None,
    ) -> None:
        """`slim`: what an engine sends for training, without the model. Without it the model always goes along.
        `together`: the wire, if members of a simulation are served in this process."""
        self._slim, self._together = slim, together
        self._noise = None if together is None else SharedNoise(server.manifest, server.layout.coordinates)
        self._wire, self._server, self._timeout, self._patience, self._log = wire, server, timeout, patience, log
        self._points: dict[int, int] = {}  # node → point, as members signed it
        self._silent: set[int] = set()  # nodes that did not reply when they were last asked
        self._nodes: dict[int, int] = {}
        self._measured: dict[int, Survival] = {}  # what each member told in this round
        self._mended: set[int] = set()  # nodes that refused for what the server settles before the next round
        self._first = True
        self._survival: Survival | None = None  # as members told last
        self.reports: list[RoundReport] = []
        self.told: list[tuple[int, Any]] = []

    def survey(self, *, go_on: bool = False) -> None:
        """Asks where the members are, before the first round of a run that has no files; `go_on`: the run goes on from
        the newest model that t of them name."""
        nodes = self._wire.present(self._server.names_needed if go_on else 0, self._timeout)
        self._server.survey(partial(self.ask_all, nodes), go_on=go_on)

    def round(
        self, model: Mapping[str, Any], beside: Mapping[int, Any], timeout: float, told: Config | None = None
    ) -> tuple[RoundReport, dict[str, Any] | None]:
        """All stages of a round with the nodes of `beside`, which says what else each is sent for training; `told` is
        added to the config of that message."""
        server, report = self._server, RoundReport(0)
        weights, self.told = None, []
        try:
            report.round = server.round_no + 1
            self._accept(model)
            weights = server.prepare(partial(self.ask_all, beside), model)
            if weights is None:
                offer, arrays = server.offer(model)
                offer = self._with_noise(offer)
                self._train(beside, {**offer, **(told or {}), "stage": "train"}, arrays, timeout, report)
                self._sum(report)
                weights = server.finish()
        except (RoundError, EncodingError) as error:
            report.given_up, report.given_up_code = _text(error), code_of(error)
            self._log(WARNING, "quorumark: %s; the last model stands", report.given_up)
        self.reports.append(report)
        for point, reason in report.excluded.items():
            self._log(WARNING, "quorumark: %s is out of round %s: %s", self.name(point), report.round, reason)
        if report.given_up and self._first:
            self._check_hope(report)
        self._first = False
        if report.given_up or weights is None:
            return report, None
        self._fill(report)
        return report, weights

    def _accept(self, model: Mapping[str, Any]) -> None:
        """In a simulation: goes on to the model that was made of the last sum, and follows all members' noise there."""
        server = self._server
        if self._noise is None or self._together is None or not server.has_settled:
            return
        step, state = Step(server.history.mark), server.history.state
        members, embedded = server.members, server.settled.embedded
        server.close(model)
        nodes = [node for node, point in self._points.items() if point in members]
        noise = self._together.noise(nodes, server.manifest, state, members)
        self._noise.follow(step, server.history.mark, noise, embedded)

    def _with_noise(self, offer: Config) -> Config:
        """In a simulation: what all members' noise says of the mark is found here, and no member asked."""
        told = self._about_noise()
        if told and self._noise is not None and offer.get("measure"):
            self._survival = self._noise.survival(self._server.history.mark) or self._survival
        return {name: value for name, value in offer.items() if not told or name != "measure"} | told

    def _about_noise(self) -> Config:
        """What members are told of it: in a simulation they need not follow theirs."""
        return {"noise-elsewhere": True} if self._together is not None and self._together.serves_all else {}

    def _fill(self, report: RoundReport) -> None:
        server = self._server
        report.members, report.marked, report.c = server.members, server.marked, server.c
        report.disputed, report.silenced = dict(server.disputed), server.silenced
        report.widened = server.widened
        with timed(report, "forecast"):
            report.outlook = server.outlook(self._survival)
        self._log(
            INFO,
            "quorumark: round %s of %s members, %s, attempt %s, %s bytes up; a verification should find z = %.1f",
            report.round,
            len(report.members),
            "marked" if report.marked else "not marked",
            report.attempts,
            f"{report.uploaded_bytes:,}",
            report.corrected_z,
        )
        if report.advice and not any(earlier.advice for earlier in self.reports[:-1]):
            self._log(WARNING, "quorumark: %s", report.advice)

    def last_line(self) -> str:
        """What a verification of the run's model should find; empty if there is no mark, or no round was finished."""
        done = [report for report in self.reports if not report.given_up]
        policy = self._server.manifest.terms.policy
        return will_pass(done[-1].outlook, policy.z, len(done)) if done and self._server.marks else ""

    def _check_hope(self, report: RoundReport) -> None:
        """Ends a run in whose first round every node that replied refused, and will again: somebody must act first."""
        if self._nodes or self._mended or not report.excluded:
            return
        said: dict[str, list[str]] = {}
        for point, reason in sorted(report.excluded.items(), reverse=True):
            said.setdefault(reason, []).append(self.name(point))
        silent = len(report.lost.get("train", ()))
        raise RoundError(
            f"no round of this run was finished, and there is no new model: all {len(report.excluded)} nodes that "
            "replied refuse"
            + (f", and {silent} did not reply" if silent else "")
            + "".join(f"\n  {', '.join(nodes)}: {reason}" for reason, nodes in said.items()),
            code="round.none-finished",
        )

    def ask_all(
        self,
        nodes: Iterable[int],
        stage: str,
        config: Mapping[str, Any],
        /,
        *,
        arrays: Mapping[str, Any] = NOTHING,
        only: Collection[int] | None = None,
    ) -> dict[int, dict[str, Any]]:
        """Asks every node for a stage, or those of some members, and gives what the members said, by point."""
        manifest, wire = self._server.manifest, self._wire
        sent = Sent({**config, **self._about_noise(), "stage": stage, "run": wire.run}, arrays)
        known = self._points
        asked = [node for node in nodes if only is None or node not in known or known[node] in only]
        said: dict[int, dict[str, Any]] = {}
        for node, reply in wire.exchange(dict.fromkeys(asked, sent), self._timeout, self._silent).items():
            try:
                config_back = reply.accepted()
                point, shown = int(config_back["point"]), config_back["introduction"]
                check_introduction(manifest.digest(), manifest.terms, wire.run, point, wire.label(node), shown)
                said[point] = {**config_back, "arrays": reply.arrays}
            except (QuorumarkError, KeyError, TypeError, ValueError) as error:
                self._log(INFO, "quorumark: node %s, asked for %r: %s", wire.label(node), stage, _text(error))
        return said

    def name(self, point: int) -> str:
        """A member, or (below 0) a node that has not shown that it is one."""
        return self._server.group.name(point) if point > 0 else f"node {self._wire.label(-point)}"

    # --- train ---

    def _train(
        self,
        beside: Mapping[int, Any],
        offer: Config,
        arrays: Mapping[str, NDArray[Any]],
        timeout: float,
        report: RoundReport,
    ) -> None:
        server, drawn = self._server, self._server.cohort
        # one that is known and was not drawn rests in this round
        chosen = {n: extra for n, extra in beside.items() if self._points.get(n, drawn[0]) in drawn}
        slim = self._slim if server.announces_sum else None  # members compute the model
        made = {node: Sent(offer, arrays, extra if slim is None else slim(extra)) for node, extra in chosen.items()}
        with timed(report, "train"):
            replies = self._exchange(made, timeout, report)
            said = {node: replies[node].config for node in made if node in replies}
            lacking = {node: (str(told.get("needs", "")), str(told.get("since", ""))) for node, told in said.items()}
            again = {  # members who missed rounds, or never saw the model that the run began with
                node: Sent(offer, {**arrays, **server.catch_up(needs, since)}, chosen[node])
                for node, (needs, since) in lacking.items()
                if needs in ("model", "anchor", "links")
            }
            if again:
                replies |= self._exchange(again, timeout, report)
            self._nodes, self._mended, self._measured = {}, set(), {}
            for node, reply in replies.items():
                self._take_ready(node, reply, report)
            whole = {node: Sent(offer, {**arrays, **server.catch_up("model")}, extra) for node, extra in chosen.items()}
            self._train_late(whole, timeout, report)
            self._survival = middle(list(self._measured.values())) or self._survival
        lost = [self._points.get(node, -node) for node in made.keys() - replies.keys()]
        report.lost["train"] = tuple(sorted(lost))

    def _train_late(self, made: Mapping[int, Sent], timeout: float, report: RoundReport) -> None:
        """Members whose memory was made anew, once the others have said that the model is newer."""
        late, again = self._server.late(), {}
        for node, sent in made.items():
            point = self._points.get(node, 0)
            if point in late:
                again[node] = Sent({**sent.config, **late[point]}, sent.arrays, sent.beside)
                report.readmit([point])
        for node, reply in self._exchange(again, timeout, report).items():
            self._take_ready(node, reply, report)

    def _take_ready(self, node: int, reply: Reply, report: RoundReport) -> None:
        point, wire = self._points.get(node, -node), self._wire
        try:
            said = {} if reply.error else reply.config
            if "introduction" in said:
                point = int(said["point"])
                manifest = self._server.manifest
                shown = said["introduction"]
                check_introduction(manifest.digest(), manifest.terms, wire.run, point, wire.label(node), shown)
                self._points[node] = point
                self._mended |= {node} if said.get("nonce") or "answered" in said or "strong" in said else set()
                self._take_refusal(point, said)
            said = reply.accepted()
            if self._nodes.get(point, node) != node:
                raise RoundError(f"{self.name(point)} runs two nodes: stop one", code="node.twice")
            newer = json.loads(said.get("newer", "{}")).items()
            statements = {int(x): bytes.fromhex(message) for x, message in newer}  # before the member is taken in
            self._server.take_ready(point, said["ready"], said.get("boxes", b""), said.get("vouch", b""))
            self._server.take_newer(point, statements)
        except (QuorumarkError, AttributeError, KeyError, TypeError, ValueError) as error:
            excluded = self._points.get(node, point if isinstance(error, RoundError) else -node)
            excluded = -node if self._nodes.get(excluded, node) != node else excluded  # the member itself takes part
            report.exclude(excluded, _text(error), code_of(error))
            return
        self._points[node], self._nodes[point] = point, node
        found = Survival.said(said.get("survival"), said.get("survival-error"))
        if found is not None:
            self._measured[point] = found
        self.told.append((point, reply.beside))

    def _take_refusal(self, point: int, said: Mapping[str, Any]) -> None:
        """What a member that does not take part says besides the reason, for the rounds that follow."""
        if said.get("nonce"):
            self._server.take_nonce(point, str(said["nonce"]))
        if "answered" in said:
            over = tuple(int(x) for x in json.loads(said["over"]))
            self._server.take_answered(point, int(said["answered"]), over, int(said["halvings"]), int(said["of-draw"]))
        if "strong" in said:
            self._server.take_strong(point, unpack(said["strong"], "list of statements"))
            raise RoundError("the mark of this round is too strong for its update", code="round.too-strong")

    # --- upload and unmask ---

    def _sum(self, report: RoundReport) -> None:
        server = self._server
        server.announce()
        report.leave_out(server.alone)
        while True:
            report.attempts = server.attempt
            with timed(report, "upload"):
                asked = {x: {"stage": "upload", **server.asked(x)} for x in server.members}
                for point, reply in self._ask(asked, report).items():
                    try:
                        said = reply.accepted()
                        report.uploaded_bytes += server.take_upload(point, said["head"], reply.arrays["vector"])
                    except (QuorumarkError, KeyError, TypeError) as error:
                        report.exclude(point, _text(error), code_of(error))
            if not server.missing:
                break
            silent = {x for x in server.missing if x not in report.excluded}
            report.lost["upload"] = tuple(sorted({*report.lost.get("upload", ()), *silent}))
            server.retry()
            report.leave_out(server.alone)
        with timed(report, "unmask"):
            asked = {x: {"stage": "unmask", "request": server.request(x)} for x in server.members}
            for point, reply in self._ask(asked, report).items():
                try:
                    server.take_answer(point, reply.accepted()["answer"])
                except (QuorumarkError, KeyError, TypeError) as error:
                    report.exclude(point, _text(error), code_of(error))
            report.lost["unmask"] = tuple(x for x in server.missing if x not in report.excluded)

    def _ask(self, asked: Mapping[int, Config], report: RoundReport) -> dict[int, Reply]:
        """One stage's messages to members, and their replies by point."""
        made = {self._nodes[point]: Sent(config) for point, config in asked.items()}
        replies = self._exchange(made, self._timeout, report)
        return {self._points[node]: reply for node, reply in replies.items()}

    def _exchange(self, sent: Mapping[int, Sent], timeout: float, report: RoundReport) -> dict[int, Reply]:
        wire = self._wire
        down, up = wire.down, wire.up
        replies = wire.exchange(sent, timeout, self._silent, self._patience)
        self._silent = (self._silent | sent.keys()) - replies.keys()
        for name, count in (("bytes-down", wire.down - down), ("bytes-up", wire.up - up), ("messages", len(sent))):
            report.metrics[name] = report.metrics.get(name, 0.0) + count
        return replies


def _text(error: Exception) -> str:
    if isinstance(error, QuorumarkError):
        return without_values(error)
    return f"its message cannot be read ({type(error).__name__})"
