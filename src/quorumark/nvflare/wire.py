"""Between FLARE's shareables and what the stages take, and the server's connection to the sites.

A message is a DXO of the kind APP_DEFINED: filters that work on weights leave it alone. With a task of training it
lies beside the model, under a key of its own. Each has a digest of what is in it: what a filter changed on the way is
noticed, and the site is named.

Every site gets a task of its own. Within one broadcast FLARE hands the same data to all, so what differs between
members would be overwritten.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Container, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvflare.apis.controller_spec import Task
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable

from quorumark.node.member import MODEL, Config
from quorumark.node.wire import Deadline, Reply, Sent

__all__ = ["KEY", "TASK", "SiteWire", "digest_of", "numbers_of", "packed", "to_shareable", "unpacked"]

TASK = "quorumark"
"""The name of the task in which a server asks for any stage but training."""

KEY = "quorumark"
"""Where a message lies in the shareable of a task of training."""

_PAUSE = 0.05
_MOST_METRICS, _LONGEST_NAME = 64, 64
_BARE = (
    "it sent its result as it is, and it was not used: its job lacks the filters that quorumark.nvflare.watermarked "
    "puts around the task of training"
)
_ALTERED = (
    "what it sent was changed on the way: a filter of the site or of the server works on it; take it out of "
    "privacy.json for these jobs, in a scope of their own"
)
Arrays = Mapping[str, NDArray[Any]]


def digest_of(config: Mapping[str, Any], arrays: Arrays) -> str:
    """Of all that a message holds."""
    state = hashlib.sha256()
    for name in sorted(config):
        value = config[name]
        data = value if isinstance(value, bytes) else repr(value).encode("utf-8", "surrogatepass")
        state.update(f"{name}\0{type(value).__name__}\0{len(data)}\0".encode() + data)
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        state.update(f"{name}\0{array.dtype.str}\0{arrays[name].shape}\0".encode())
        state.update(array.reshape(-1).view(np.uint8).data)
    return state.hexdigest()


def packed(config: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
    """A message as FLARE carries it."""
    return {"config": dict(config), "arrays": dict(arrays), "digest": digest_of(config, arrays)}


def to_shareable(config: Mapping[str, Any], arrays: Arrays, metrics: Mapping[str, float] | None = None) -> Shareable:
    content = packed(config, arrays) | ({"metrics": dict(metrics)} if metrics else {})
    return DXO(DataKind.APP_DEFINED, data={KEY: content}).to_shareable()


def unpacked(shareable: Any) -> dict[str, Any] | None:
    """The message in a shareable: `config`, `arrays`, `digest`, perhaps `metrics`. None if there is none."""
    content = shareable.get(KEY) if isinstance(shareable, dict) else None
    if content is None:
        try:
            dxo = from_shareable(shareable)
        except (ValueError, AttributeError):
            return None
        content = dxo.data.get(KEY) if dxo.data_kind == DataKind.APP_DEFINED and isinstance(dxo.data, dict) else None
    if not isinstance(content, dict) or not all(_is_named(content.get(part)) for part in ("config", "arrays")):
        return None
    return dict(content) if all(map(_is_array, content["arrays"].values())) else None


def _is_named(part: Any) -> bool:
    return isinstance(part, dict) and all(isinstance(name, str) for name in part)


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in "biuf"


def numbers_of(found: Any) -> dict[str, float]:
    """A script's metrics, if they are few and are numbers."""
    if not isinstance(found, Mapping) or len(found) > _MOST_METRICS:
        return {}
    named = {name: value for name, value in found.items() if isinstance(name, str) and len(name) <= _LONGEST_NAME}
    scalars = {name: value for name, value in named.items() if np.ndim(value) == 0}
    return {name: float(value) for name, value in scalars.items() if isinstance(value, int | float | np.number)}


class SiteWire:
    """The server's connection to the sites of a job. `train` is the name of the job's task of training."""

    def __init__(self, controller: Any, fl_ctx: Any, abort: Any, train: str) -> None:
        self._controller, self._fl_ctx, self._abort, self._train = controller, fl_ctx, abort, train
        self.run = f"{fl_ctx.get_job_id()}/{secrets.token_hex(8)}"
        self.down = self.up = 0
        self._sites: list[str] = []  # a node is its place here, from 1 on
        self._silent: set[int] = set()  # nodes that did not reply when they were last asked

    @property
    def aborted(self) -> bool:
        """Whether FLARE stops the job."""
        return bool(self._abort.triggered)

    def label(self, node: int) -> str:
        return self._sites[node - 1]

    def node_of(self, site: str) -> int:
        if site not in self._sites:
            self._sites.append(site)
        return self._sites.index(site) + 1

    def present(self, count: int, timeout: float) -> list[int]:
        engine, end = self._fl_ctx.get_engine(), time.monotonic() + timeout
        while len(found := sorted(client.name for client in engine.get_clients())) < count:
            if time.monotonic() > end or self._abort.triggered:
                break
            time.sleep(0.2)
        return [self.node_of(site) for site in found]

    def exchange(
        self,
        sent: Mapping[int, Sent],
        timeout: float,
        doubtful: Container[int] = (),
        patience: float | None = None,
    ) -> dict[int, Reply]:
        doubted = self._silent | {node for node in sent if node in doubtful}
        results = self._collect(sent, timeout, doubted, patience)
        self._silent = (self._silent | sent.keys()) - results.keys()
        replies = {node: self._read(result) for node, result in results.items()}
        stopped = [n for n in results if results[n].get_return_code() == ReturnCode.TASK_DATA_FILTER_ERROR]
        if stopped:  # before it trained: what its filter said of the reason, its executor knows
            why = {node: Sent({"stage": "why"}) for node in stopped}
            for node, result in self._collect(why, timeout, doubted, patience).items():
                replies[node] = self._read(result)
        return replies

    def _collect(
        self, sent: Mapping[int, Sent], timeout: float, doubtful: Container[int], patience: float | None
    ) -> dict[int, Shareable]:
        """Sends each site its own task, and waits for the results."""
        results: dict[int, Shareable] = {}
        tasks, lock = {}, threading.Lock()
        for node, message in sent.items():
            name, data = self._made(message)
            task = Task(name, data, result_received_cb=_keeping(results, node, lock))
            self._controller.send(task, self._fl_ctx, targets=[self.label(node)])
            tasks[node] = task
            model = from_shareable(data).data if message.beside is not None else {}
            self.down += _size(message.config, {**message.arrays, **{MODEL + n: t for n, t in model.items()}})
        deadline = Deadline(sent, timeout, doubtful, patience)
        while not self._abort.triggered:
            with lock:
                replied = list(results)
            if deadline.has_passed(replied):
                break
            time.sleep(_PAUSE)
        for node, task in tasks.items():
            if node not in replied:
                self._controller.cancel_task(task, fl_ctx=self._fl_ctx)
        with lock:
            return dict(results)

    def _made(self, message: Sent) -> tuple[str, Shareable]:
        if message.beside is None:
            return TASK, to_shareable(message.config, message.arrays)
        shareable = message.beside()
        shareable[KEY] = packed(message.config, message.arrays)
        return self._train, shareable

    def _read(self, result: Shareable) -> Reply:
        code = result.get_return_code()
        if code != ReturnCode.OK:
            return Reply(error=f"its node failed: FLARE says {code} of its task; the site's log has the rest")
        content = unpacked(result)
        if content is None:
            return Reply(error=_BARE, code="node.no-mod")
        config, arrays = content["config"], content["arrays"]
        self.up += _size(config, arrays)
        if digest_of(config, arrays) != content.get("digest"):
            return Reply(error=_ALTERED, code="message.altered")
        return Reply(config, arrays, numbers_of(content.get("metrics")))


def _keeping(results: dict[int, Shareable], node: int, lock: threading.Lock) -> Any:
    def keep(client_task: Any, fl_ctx: Any) -> None:  # noqa: ARG001 - FLARE calls it so
        with lock:
            results.setdefault(node, client_task.result)
        client_task.result = None

    return keep


def _size(config: Config, arrays: Arrays) -> int:
    """Bytes in a message, without what encodes them."""
    held = sum(len(value) if isinstance(value, bytes | str) else 8 for value in config.values())
    return held + sum(array.nbytes for array in arrays.values())
