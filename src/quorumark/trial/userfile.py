"""The file that a user tries: its functions, called with care.

    make()                  a torch module with its initial weights
    data(member, members)   one member's data, members counted from 0; only train() looks inside
    train(weights, data)    named tensors to named tensors; may also take seed, round_no and rate
    evaluate(weights)       optional: a score for each test example (right or wrong), or one number; larger is better
    example()               optional: an input of the model; otherwise the first of the first member's data is tried

Whatever the file raises is shown as its own traceback, and whatever it returns is checked before it is used: an error
names the function, what it must give, and what it gave.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark.codec import LIMIT
from quorumark.errors import InputError, MissingDependencyError, UserCodeError

__all__ = ["Score", "UserFile", "open_file", "require_torch"]

Weights = dict[str, Any]
_NEEDED = ("make", "data", "train")
_OPTIONAL = ("evaluate", "example")
_EXTRAS = {"torch": "quorumark[torch]", "sklearn": "quorumark[demo]"}
_TEMPLATE = "quorumark try --template images shows one that runs"
_SHOWN = 3  # names in an error


def require_torch() -> Any:
    try:
        import torch
    except ImportError:
        raise MissingDependencyError("quorumark[torch]", "quorumark try") from None
    return torch


@dataclass(frozen=True)
class Score:
    """How good a model is: the mean over test examples, and each of them where evaluate() gives them."""

    value: float
    each: NDArray[np.float64] | None = None

    def less(self, other: Score) -> tuple[float, float | None]:
        """This score less the other one, and the standard error of that; None where only numbers are known.

        The examples are the same, so the error is that of the mean of paired differences, s/√n; where no example
        differs it is as if one did, 1/n.
        """
        difference = self.value - other.value
        if self.each is None or other.each is None or self.each.shape != other.each.shape or self.each.size < 2:
            return difference, None
        error = float(np.std(self.each - other.each, ddof=1) / np.sqrt(self.each.size))
        return difference, error or 1 / self.each.size


@contextmanager
def open_file(path: Path) -> Iterator[UserFile]:
    """Runs the user's file and gives its functions. While it is open, files beside it can be imported from it."""
    if not path.is_file():
        raise InputError("FILE", f"must be a Python file that is there ({_TEMPLATE})", repr(str(path)))
    require_torch()
    name, beside = f"_quorumark_try_{path.stem}", str(path.parent.resolve())
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError("FILE", "must be a Python file: its name must end with .py", repr(str(path)))
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, beside)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    try:
        with _told(path, "the file itself"):
            spec.loader.exec_module(module)
        yield UserFile(path, _functions(path, module))
    finally:
        sys.path.remove(beside)
        del sys.modules[name]


def _functions(path: Path, module: ModuleType) -> dict[str, Callable[..., Any]]:
    found = {}
    for name in (*_NEEDED, *_OPTIONAL):
        function = getattr(module, name, None)
        if function is None and name in _OPTIONAL:
            continue
        if not callable(function):
            given = "nothing of that name" if function is None else f"{name} = {type(function).__name__}"
            wanted = ", ".join(f"{needed}()" for needed in _NEEDED)
            raise InputError(str(path), f"must have a function {name}(): it needs {wanted}; {_TEMPLATE}", given)
        found[name] = function
    return found


class UserFile:
    """The functions of a user's file; each result is checked before it is given on."""

    def __init__(self, path: Path, functions: Mapping[str, Callable[..., Any]]) -> None:
        self.path, self._functions = path, functions
        taken = inspect.signature(functions["train"]).parameters.values()
        self._any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken)
        self._taken = {parameter.name for parameter in taken}

    def __contains__(self, name: str) -> bool:
        return name in self._functions

    def _call(self, name: str, *arguments: Any, **more: Any) -> Any:
        with _told(self.path, f"{name}()"):
            return self._functions[name](*arguments, **more)

    def _wrong(self, name: str, rule: str, given: object) -> InputError:
        return InputError(f"{name}() in {self.path}", rule, given)

    def make(self, seed: int) -> Any:
        """The module, with initial weights that are the same for the same seed."""
        torch = require_torch()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self._call("make")
        if not isinstance(module, torch.nn.Module):
            raise self._wrong("make", "must return a torch.nn.Module", _kind(module))
        if not module.state_dict():
            raise self._wrong("make", "must return a module with weights", "one without any")
        return module

    def weights_of(self, module: Any) -> Weights:
        """A copy of a module's tensors."""
        weights = {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}
        self._check_numbers("make", weights, "the initial weights")
        return weights

    def data(self, members: int) -> list[Any]:
        """What each member trains on."""
        return [self._call("data", member, members) for member in range(members)]

    def train(self, weights: Weights, data: Any, *, seed: int, round_no: int, rate: float) -> Weights:
        """One member's training. Random numbers of torch depend on the seed, also where train() takes none."""
        torch = require_torch()
        known = {"seed": seed & (1 << 63) - 1, "round_no": round_no, "rate": rate}
        given = {name: value for name, value in known.items() if self._any or name in self._taken}
        before = {name: tensor.clone() for name, tensor in weights.items()}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(known["seed"])
            found = self._call("train", weights, data, **given)
        return self._checked(found, before, round_no)

    def _checked(self, found: Any, before: Weights, round_no: int) -> Weights:
        """Names and shapes as they were, and numbers that a sum can hold."""
        torch = require_torch()
        if not isinstance(found, Mapping):
            raise self._wrong("train", "must return named tensors, like net.state_dict()", _kind(found))
        missing, more = sorted(before.keys() - found.keys()), sorted(map(str, found.keys() - before.keys()))
        if missing or more:
            told = [f"without {_some(missing)}"] * bool(missing) + [f"with {_some(more)}"] * bool(more)
            raise self._wrong("train", "must return tensors of the same names as it was given", " and ".join(told))
        weights = {}
        for name, old in before.items():
            new = found[name]
            if not isinstance(new, torch.Tensor):
                raise self._wrong("train", f"must return torch tensors, {name!r} too", _kind(new))
            if tuple(new.shape) != tuple(old.shape):
                shapes = f"{tuple(new.shape)} instead of {tuple(old.shape)}"
                raise self._wrong("train", f"must return {name!r} in the shape that it was given", shapes)
            weights[name] = new.detach().cpu().to(old.dtype).clone()
        self._check_numbers("train", weights, f"training diverged in round {round_no}")
        if all(torch.equal(weights[name], old) for name, old in before.items()):
            raise self._wrong("train", "must return weights that it trained", "those that it was given, unchanged")
        return weights

    def _check_numbers(self, name: str, weights: Weights, what: str) -> None:
        torch = require_torch()
        for tensor_name, tensor in weights.items():
            if not tensor.is_floating_point():
                continue
            if not bool(torch.isfinite(tensor).all()):
                bad = int((~torch.isfinite(tensor)).sum())
                rule = "must return finite weights (a smaller learning rate, or clipped gradients, may help)"
                raise self._wrong(name, rule, f"NaN or infinity in {bad:,} weights of {tensor_name!r}: {what}")
            if tensor.numel() and float(tensor.abs().max()) >= LIMIT:
                raise self._wrong(name, f"must return weights below {LIMIT:,.0f}", f"{tensor.abs().max():.3g}: {what}")

    def evaluate(self, weights: Weights) -> Score | None:
        """How good a model is; None if the file cannot say. It gets tensors of its own."""
        if "evaluate" not in self:
            return None
        found = self._call("evaluate", {name: tensor.clone() for name, tensor in weights.items()})
        if hasattr(found, "detach"):
            found = found.detach().cpu().numpy()
        try:
            numbers = np.asarray(found, dtype=np.float64)
        except (TypeError, ValueError):
            rule = "must return a number, or one for each test example"
            raise self._wrong("evaluate", rule, _kind(found)) from None
        if not numbers.size or not np.isfinite(numbers).all():
            raise self._wrong("evaluate", "must return finite numbers", "none" if not numbers.size else "NaN")
        return Score(float(numbers.mean()), numbers.reshape(-1) if numbers.size > 1 else None)

    def example(self, data: Sequence[Any]) -> Any:
        """An input of the model: the file's, or the first of the first member's data; None if there is none."""
        if "example" in self:
            return self._call("example")
        first = _first(data[0])
        return first[:1] if hasattr(first, "detach") and first.dim() else None

    def examples(self, data: Any) -> int:
        """How many examples a member has: the length of its data, or of the first part of it; 1 if it has none."""
        first = _first(data)
        return len(first) if hasattr(first, "__len__") and len(first) else 1


def _first(data: Any) -> Any:
    """The inputs of (inputs, labels) and of {"inputs": …, "labels": …}; a list, a tensor or a data set is whole."""
    parts = list(data.values()) if isinstance(data, Mapping) else data
    whole = not isinstance(data, (tuple, Mapping)) or not parts
    return data if whole else parts[0]


@contextmanager
def _told(path: Path, what: str) -> Iterator[None]:
    """An exception of the user's code, as a traceback from the user's file on, without what called it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name in _EXTRAS:
            raise MissingDependencyError(_EXTRAS[error.name], f"{path} ({error.name} is not installed)") from None
        raise UserCodeError(_traceback(error, path, what)) from error
    except Exception as error:
        raise UserCodeError(_traceback(error, path, what)) from error


def _traceback(error: Exception, path: Path, what: str) -> str:
    told = traceback.TracebackException.from_exception(error)
    inside = [place for place, frame in enumerate(told.stack) if _same(frame.filename, path)]
    lines = [told.stack[place].lineno for place in inside[-1:]]
    if isinstance(error, SyntaxError):
        inside, lines = [len(told.stack)], [error.lineno]
    told.stack = traceback.StackSummary.from_list(told.stack[inside[0] :] if inside else [])
    where = f", line {lines[0]}" if lines else ""
    return f"{what} in {path} failed{where}:\n\n{''.join(told.format(chain=False)).rstrip()}"


def _same(name: str, path: Path) -> bool:
    return Path(name).resolve() == path.resolve()


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
