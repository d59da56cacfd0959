"""Between Flower's records and what the stages take: small things in a ConfigRecord, files and vectors as arrays.

Vectors must be in an ArrayRecord: Flower cuts those into pieces; a ConfigRecord of the same bytes costs many times the
processor time.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark.errors import MissingDependencyError
from quorumark.node.wire import Deadline, Reply, Sent

__all__ = [
    "RECORD",
    "FlowerWire",
    "arrays_of",
    "exchange",
    "flwr_app",
    "records",
    "size_of",
    "split",
    "tensors",
    "to_record",
    "wait_for",
]

RECORD, VECTORS = "quorumark", "quorumark.arrays"
"""The names of the two records that this project adds to a message."""

_LEAST_PAUSE, _LONGEST_PAUSE = 0.05, 0.5
_SHORT_PAUSE, _ALL_ASKED = 0.01, 0.2
_THREADS = 16


def flwr_app() -> Any:
    """Flower's records and messages."""
    try:
        import flwr.app
    except ImportError:
        raise MissingDependencyError("quorumark[flower]", "the Flower integration") from None
    return flwr.app


def to_record(arrays: Mapping[str, NDArray[Any]]) -> Any:
    """Named arrays as an ArrayRecord."""
    flwr = flwr_app()
    return flwr.ArrayRecord({name: flwr.Array(np.asarray(array, order="C")) for name, array in arrays.items()})


def tensors(record: Any) -> dict[str, NDArray[Any]]:
    """An ArrayRecord's arrays by name; an array without dimensions keeps its shape."""
    return {name: np.asarray(array.numpy()).reshape(tuple(array.shape)) for name, array in record.items()}


def records(config: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """The records that carry a stage's message."""
    made: dict[str, Any] = {RECORD: flwr_app().ConfigRecord(dict(config))}
    if arrays:
        made[VECTORS] = to_record(arrays)
    return made


def split(content: Any) -> tuple[dict[str, Any] | None, dict[str, NDArray[Any]], dict[str, Any]]:
    """A message's content: this project's config (None if there is none) and arrays, and all the other records."""
    others = {name: record for name, record in content.items() if name not in (RECORD, VECTORS)}
    if RECORD not in content.config_records:
        return None, {}, others
    return dict(content.config_records[RECORD]), arrays_of(content), others


def arrays_of(content: Any) -> dict[str, NDArray[Any]]:
    return tensors(content.array_records[VECTORS]) if VECTORS in content.array_records else {}


def size_of(content: Any) -> int:
    """Bytes in a message, without what encodes them."""
    size = sum(len(array.data) for record in content.array_records.values() for array in record.values())
    for record in content.config_records.values():
        size += sum(len(v) if isinstance(v, bytes | str) else 8 for v in record.values())
    return size + sum(8 * len(record) for record in content.metric_records.values())


_BARE = "it sent its model as it is, and it was not used: put quorumark_mod into its ClientApp's mods"


class FlowerWire:
    """A Grid's messages of one type, as `quorumark.node` sends and reads them."""

    def __init__(self, grid: Any, kind: str) -> None:
        self._grid, self.kind = grid, kind
        self.run = str(grid.run.run_id)
        self.down = self.up = 0

    def label(self, node: int) -> str:
        return str(node)

    def present(self, count: int, timeout: float) -> list[int]:
        return wait_for(self._grid, count, timeout)

    def exchange(
        self,
        sent: Mapping[int, Sent],
        timeout: float,
        doubtful: Container[int] = (),
        patience: float | None = None,
    ) -> dict[int, Reply]:
        flwr, made = flwr_app(), []
        same: dict[tuple[int, int], dict[str, Any]] = {}  # what all nodes are told is encoded once
        for node, message in sent.items():
            name = id(message.config), id(message.arrays)
            if name not in same:
                same[name] = records(message.config, message.arrays)
            made.append(flwr.Message(flwr.RecordDict({**(message.beside or {}), **same[name]}), node, self.kind))
        replies = exchange(self._grid, made, timeout, doubtful, patience)
        self.down += sum(size_of(message.content) for message in made)
        self.up += sum(size_of(reply.content) for reply in replies.values() if reply.has_content())
        return {node: _read(reply) for node, reply in replies.items()}


def _read(reply: Any) -> Reply:
    if reply.has_error():
        return Reply(error=f"its node failed: {reply.error.reason[:500]}")
    config, arrays, _ = split(reply.content)
    if config is None:
        return Reply(error=_BARE, code="node.no-mod")
    return Reply(config, arrays, flwr_app().RecordDict(dict(reply.content.metric_records)))


def wait_for(grid: Any, count: int, timeout: float) -> list[int]:
    """The nodes that are connected, once there are enough of them or the time is over."""
    end = time.monotonic() + timeout
    while len(nodes := sorted(grid.get_node_ids())) < count and time.monotonic() < end:
        time.sleep(0.5)
    return nodes


def exchange(
    grid: Any,
    messages: Iterable[Any],
    timeout: float,
    doubtful: Container[int] = (),
    patience: float | None = None,
) -> dict[int, Any]:
    """Sends messages and collects the replies by node, until all came or the time is over.

    A node that died is reported late and under another number, so who is missing is who did not reply. For `doubtful`
    nodes, which were silent before, nobody waits much longer than for the others. With `patience`, once more than half
    have replied, the others get that many times as long as those took. Replies are asked for more often than Flower's
    own `send_and_receive` does, which waits three seconds each time: again after a quarter of the time that has passed.
    In a simulation one question is enough for all replies. Its price grows with their number: mostly a single one is
    asked for, and all of them when that one has come, or some time has passed.
    """
    sent = list(messages)
    if not sent:
        return {}
    names = list(grid.push_messages(sent))
    waiting = {name: m.metadata.dst_node_id for name, m in zip(names, sent, strict=True) if name}
    nodes = set(waiting.values())
    began, here = time.monotonic(), hasattr(grid, "state")  # Flower's simulation, whose messages are in this process
    deadline = Deadline(nodes, timeout, doubtful, patience)
    replies: dict[int, Any] = {}
    # one question for each reply: of a node that died while it sent one, Flower waits minutes for the rest of it
    pool = ThreadPoolExecutor(min(_THREADS, len(waiting) or 1))
    asked: dict[str, Future[Any]] = {}
    pause, all_asked = _SHORT_PAUSE if here else _LEAST_PAUSE, began
    while waiting:
        if here:
            came = list(grid.pull_messages([next(iter(waiting))]))
            if came or time.monotonic() - all_asked > _ALL_ASKED:
                came += grid.pull_messages([name for name in waiting if name != next(iter(waiting))])
                all_asked = time.monotonic()
        else:
            asked |= {name: pool.submit(grid.pull_messages, [name]) for name in waiting if name not in asked}
            wait(asked.values(), timeout=pause)
            done = [name for name, future in asked.items() if future.done()]
            came = [reply for name in done for reply in asked.pop(name).result()]
        for reply in came:
            waiting.pop(reply.metadata.reply_to_message_id, None)
            if reply.metadata.src_node_id in nodes:
                replies[reply.metadata.src_node_id] = reply
        if not waiting or deadline.has_passed(replies):
            break
        if not here:
            pause = min(max(_LEAST_PAUSE, (time.monotonic() - began) / 4), _LONGEST_PAUSE)
        time.sleep(pause)
    pool.shutdown(wait=False, cancel_futures=True)
    return replies
