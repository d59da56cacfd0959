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

from quorumark.errors import MissingDependencyError, RoundError
from quorumark.refusals import listed

__all__ = [
    "RECORD",
    "accepted_config",
    "arrays_of",
    "config_of",
    "content_of",
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

_LEAST_PAUSE, _LONGEST_PAUSE, _GRACE = 0.05, 0.5, 2.0
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


def content_of(reply: Any) -> Any:
    """A reply's content, unless its node failed."""
    if reply.has_error():
        raise RoundError(f"its node failed: {reply.error.reason[:500]}", code="node.failed")
    return reply.content


def config_of(reply: Any) -> dict[str, Any]:
    """This project's config in a reply; empty if there is none."""
    return {} if reply is None or reply.has_error() else split(reply.content)[0] or {}


def accepted_config(reply: Any) -> dict[str, Any]:
    """This project's config in a reply, unless the node failed or refuses."""
    config = split(content_of(reply))[0]
    if config is None:
        raise RoundError(
            "it sent its model as it is, and it was not used: put quorumark_mod into its ClientApp's mods",
            code="node.no-mod",
        )
    if "failed" in config:
        raise RoundError(f"its node failed: {config['failed']}", code="node.failed")
    if "refused" in config:
        raise RoundError(str(config["refused"]), code=listed(config.get("code"), "node.refused"))
    return config


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
    own `send_and_receive` does, which waits three seconds each time.
    """
    sent = list(messages)
    if not sent:
        return {}
    names = list(grid.push_messages(sent))
    waiting = {name: m.metadata.dst_node_id for name, m in zip(names, sent, strict=True) if name}
    nodes = set(waiting.values())
    began, pause = time.monotonic(), _LEAST_PAUSE
    end, hurried = began + timeout, all(node in doubtful for node in nodes)
    half = 0.0  # when more than half had replied
    replies: dict[int, Any] = {}
    # one question for each reply: of a node that died while it sent one, Flower waits minutes for the rest of it
    pool = ThreadPoolExecutor(min(_THREADS, len(waiting) or 1))
    asked: dict[str, Future[Any]] = {}
    while waiting:
        asked |= {name: pool.submit(grid.pull_messages, [name]) for name in waiting if name not in asked}
        wait(asked.values(), timeout=pause)
        for name in [name for name, future in asked.items() if future.done()]:
            for reply in asked.pop(name).result():
                waiting.pop(name, None)
                if reply.metadata.src_node_id in nodes:
                    replies[reply.metadata.src_node_id] = reply
        now = time.monotonic()
        if patience is not None and not half and 2 * len(replies) > len(nodes):
            half = now
            end = min(end, began + max(patience * (now - began), now - began + _GRACE))
        if not hurried and all(node in doubtful for node in waiting.values()):
            hurried, end = True, min(end, now + _GRACE + (now - began) / 2)
        if not waiting or now > end:
            break
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    pool.shutdown(wait=False, cancel_futures=True)
    return replies
