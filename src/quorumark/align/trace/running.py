"""Runs a torch module on an example while a trace follows every operation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from quorumark.align.trace.handlers import REMEDY, Handlers, flat
from quorumark.errors import InputError, LayoutError, MissingDependencyError

__all__ = ["run_model", "trace_model"]


def trace_model(model: Any, example: Any) -> Handlers:
    """What one run of a model shows about its channels."""
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.utils._python_dispatch import TorchDispatchMode
    except ImportError:
        raise MissingDependencyError("quorumark[torch]", "finding a model's groups") from None
    if not isinstance(model, torch.nn.Module):
        raise InputError("model", "must be a torch module", type(model).__name__)
    trace = Handlers(model)
    training = [(part, part.training) for part in model.modules()]
    model.eval()

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            trace.see(func._schema.name.removeprefix("aten::"), args, kwargs or {}, out, func)
            return out

    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), Watch():  # type: ignore[no-untyped-call]
            out = run_model(model, example)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for part, mode in training:
            part.training = mode
    for comp in trace.of(out):
        trace.pin(comp)
    return trace


def run_model(model: Any, example: Any) -> Any:
    """The tensor that a model returns for an example: of several outputs the logits, or the first."""
    import torch

    with _without_cache(model):
        if isinstance(example, Mapping):
            out = model(**example)
        else:
            out = model(*example) if isinstance(example, (list, tuple)) else model(example)
    for name in ("logits", "last_hidden_state"):
        if hasattr(out, name):
            return getattr(out, name)
    found = [x for x in flat(out) if isinstance(x, torch.Tensor)]
    if not found:
        raise LayoutError(
            f"the model returns no tensor for the example, so that it has no groups: give another example, or {REMEDY}"
        )
    return found[0]


@contextmanager
def _without_cache(model: Any) -> Iterator[None]:
    """Switches off the cache of keys and values that models of transformers keep: its tensors cannot be traced."""
    configs = {id(config): config for part in model.modules() if (config := getattr(part, "config", None)) is not None}
    using = [config for config in configs.values() if getattr(config, "use_cache", False)]
    try:
        for config in using:
            config.use_cache = False
        yield
    finally:
        for config in using:
            config.use_cache = True
