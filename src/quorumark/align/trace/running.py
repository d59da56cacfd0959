"""Runs a torch module on an example while a trace follows every operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from quorumark.align.groups import Groups
from quorumark.align.trace.handlers import REMEDY, Handlers, flat
from quorumark.align.trace.sign_trace import SignTrace
from quorumark.errors import InputError, LayoutError, MissingDependencyError

__all__ = ["run_model", "trace_model", "trace_signs"]

_SHOWN = ("encoder_", "decoder_", "hidden_states", "attentions", "cross_attentions", "past_key_values")


def trace_model(model: Any, example: Any) -> Handlers:
    """What one run of a model shows about its channels."""
    try:
        import torch
    except ImportError:
        raise MissingDependencyError("quorumark[torch]", "finding a model's groups") from None
    if not isinstance(model, torch.nn.Module):
        raise InputError("model", "must be a torch module", type(model).__name__)
    trace = Handlers(model)
    for out in _watch(model, example, trace.see):
        for comp in trace.of(out):
            trace.pin(comp)
    trace.pin_unused()
    return trace


def trace_signs(model: Any, example: Any, groups: Groups, aliases: Mapping[str, Sequence[str]]) -> SignTrace:
    """What one run of a model shows about the signs of its channels, whose groups are known."""
    trace = SignTrace(model, groups, aliases)
    trace.finish(_watch(model, example, trace.see))
    return trace


def _watch(model: Any, example: Any, see: Callable[..., None]) -> list[Any]:
    """Runs a model and shows every operation to `see`; returns the outputs."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            see(func._schema.name.removeprefix("aten::"), args, kwargs or {}, out, func)
            return out

    training = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), _plain_kernels(), sdpa_kernel(SDPBackend.MATH), Watch():  # type: ignore[no-untyped-call]
            return run_model(model, example)
    finally:
        for part, mode in training:
            part.training = mode


@contextmanager
def _plain_kernels() -> Iterator[None]:
    """Switches off kernels that compute a whole layer at once: its operations could not be followed."""
    import torch

    private: Any = torch._C
    fast, fused = torch.backends.mha.get_fastpath_enabled(), private._get_mkldnn_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        private._set_mkldnn_enabled(False)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        private._set_mkldnn_enabled(fused)


def run_model(model: Any, example: Any) -> list[Any]:
    """The tensors of floats that a model returns for an example: all that it computes, without what it only shows."""
    import torch

    with _without_cache(model):
        if isinstance(example, Mapping):
            out = model(**example)
        else:
            out = model(*example) if isinstance(example, (list, tuple)) else model(example)
    if isinstance(out, Mapping):  # as in transformers
        out = {name: value for name, value in out.items() if not name.startswith(_SHOWN)}
    found = [x for x in flat(out) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    if not found:
        raise LayoutError(
            f"the model returns no tensor for the example, so that it has no groups: give another example, or {REMEDY}"
        )
    return found


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
