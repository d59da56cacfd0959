"""Causal language models of Hugging Face's `transformers`: loading, perplexity, and training of one member's epoch.

A model's floating-point numbers lie in one vector, in the order of its `ModelLayout`; the module's parameters are views
of it. On CUDA the network computes in bfloat16 with a copy of the weights, and AdamW moves float32 numbers; perplexity
is measured with the float32 weights themselves, so that a small mark is not lost in rounding.

Perplexity is exp of the mean negative log-likelihood of a token. A text is cut into windows of `length` tokens, the
last one shorter; in each window every token but the first is predicted once, from those before it in the window.
Nothing is padded. The output layer and its loss are computed a few thousand tokens at a time, so that logits of a large
vocabulary never exist for a whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quorumark.errors import InputError, MissingDependencyError
from quorumark.model.layout import ModelLayout
from quorumark.research.lab.fleet import Optimiser

__all__ = ["LanguageModel", "head_loss", "import_gguf", "load", "log_likelihood", "perplexity"]

_ROWS = 4096  # tokens whose logits exist at once


# --- models -----------------------------------------------------------------------------------------------


def load(name: str, folder: Path, seed: int = 0) -> nn.Module:
    """The model in folder/NAME, in float32; NAME-random has its configuration, and weights drawn by the seed.

    `gpt2-small-random` is GPT-2 small's architecture, and needs no folder.
    """
    transformers = _transformers()
    plain = name.removesuffix("-random")
    path = folder / plain
    there = (path / "config.json").is_file()
    if plain == name:
        if not there:
            raise InputError("model", "must be the name of a folder with config.json and weights", str(path))
        model = transformers.AutoModelForCausalLM.from_pretrained(path, local_files_only=True)
    else:
        if there:
            config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        elif plain == "gpt2-small":
            config = transformers.GPT2Config()
        else:
            raise InputError("model", "must be the name of a folder with config.json", str(path))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = transformers.AutoModelForCausalLM.from_config(config)
    model.config.use_cache = False
    transformers.AttentionInterface.register(_CAUSAL, _causal_attention)
    model.set_attn_implementation(_CAUSAL)
    return model.float()  # type: ignore[no-any-return]


_CAUSAL = "quorumark_causal"


def _causal_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, *, scaling: Any = None, dropout: float = 0.0,
    **_more: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Each token sees itself and those before it, all of them: texts come in whole blocks, without padding.

    Under a name of its own, transformers makes no mask for it, and so waits for nothing on the device: a step can be
    recorded as one CUDA graph.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, dropout_p=dropout if module.training else 0.0
    )
    return out.transpose(1, 2).contiguous(), None


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise MissingDependencyError("quorumark[lab]", "language models") from None
    return transformers


def import_gguf(source: Path, out: Path, *, kind: str = "bfloat16") -> int:
    """Makes a folder that `load` reads from a GGUF file: dequantised weights, configuration, tokenizer. Its size."""
    transformers = _transformers()
    for package in ("gguf", "accelerate"):
        try:
            __import__(package)
        except ImportError:
            raise MissingDependencyError("quorumark[gguf]", "reading GGUF files") from None
    import json

    from safetensors.torch import save_file

    if not source.is_file():
        raise InputError("the GGUF file", "must exist", str(source))
    where: Any = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**where)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    out.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().to(getattr(torch, kind)).contiguous() for name, tensor in _once(model).items()}
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    config = {
        k: v
        for k, v in model.config.to_dict().items()
        if k not in ("quantization_config", "_name_or_path", "_model_name_or_path")
    }
    # releases of transformers before 5 look for these under other names
    config |= {"dtype": kind, "torch_dtype": kind}
    config |= {k: v for k, v in (config.get("rope_parameters") or {}).items() if k == "rope_theta"}
    config["architectures"] = config.get("architectures") or [type(model).__name__]
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True, default=str) + "\n")
    tokenizer.save_pretrained(out)
    return sum(tensor.numel() for tensor in state.values())


def _once(model: nn.Module) -> dict[str, Tensor]:
    """The state without second names of tied weights; of two, the input embedding's stays."""
    tied = set()
    if model.get_output_embeddings().weight is model.get_input_embeddings().weight:  # type: ignore[operator]
        head = model.get_output_embeddings()  # type: ignore[operator]
        tied = {f"{name}.weight" for name, module in model.named_modules() if module is head}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


# --- the output layer and its loss ------------------------------------------------------------------------


def _part(hidden: Tensor, weight: Tensor, labels: Tensor, each: float) -> tuple[Tensor, Tensor, Tensor]:
    """Σ −log p of the labels, and its derivatives by the hidden states and by the weight, times `each`."""
    logits = (hidden @ weight.t()).float()
    whole = torch.logsumexp(logits, 1, keepdim=True)
    loss = (whole - logits.gather(1, labels[:, None])).sum()
    slope = torch.exp(logits - whole) * each
    slope = slope.scatter_add(1, labels[:, None], torch.full_like(whole, -each)).to(weight.dtype)
    return loss, slope @ weight, slope.t() @ hidden


class _HeadLoss(torch.autograd.Function):
    """The mean of −log p(label), with its derivatives made in the same pass: logits exist for _ROWS tokens only."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, part: Callable[..., Any]) -> Tensor:
        by_hidden, by_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        total = torch.zeros((), device=hidden.device)
        for begin in range(0, len(labels), _ROWS):
            rows = slice(begin, begin + _ROWS)
            loss, by_rows, by_both = part(hidden[rows], weight, labels[rows], 1 / len(labels))
            total += loss
            by_hidden[rows] = by_rows
            by_weight += by_both
        ctx.save_for_backward(by_hidden, by_weight.to(weight.dtype))
        return total / len(labels)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        by_hidden, by_weight = ctx.saved_tensors
        return by_hidden * slope.to(by_hidden.dtype), by_weight * slope.to(by_weight.dtype), None, None


def head_loss(hidden: Tensor, weight: Tensor, labels: Tensor, part: Callable[..., Any] = _part) -> Tensor:
    """The mean loss of predicting labels from hidden states [n, width] through the output layer's weight."""
    found: Tensor = _HeadLoss.apply(hidden, weight, labels, part)
    return found


@torch.no_grad()
def negative_log_likelihood(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Σ −log p of the labels, in float64."""
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    for begin in range(0, len(labels), _ROWS):
        rows = slice(begin, begin + _ROWS)
        logits = (hidden[rows] @ weight.t()).float()
        each = torch.nn.functional.cross_entropy(logits, labels[rows], reduction="none")
        total += each.double().sum()
    return total


def log_likelihood(module: nn.Module, ids: Tensor, length: int, *, batch: int = 8) -> tuple[float, int]:
    """Σ −log p over a text's windows of that length, and how many tokens were predicted."""
    model: Any = module.eval()
    weight = model.get_output_embeddings().weight
    total = torch.zeros((), dtype=torch.float64, device=ids.device)
    whole, count = ids.numel() // length * length, 0
    parts = list(ids[:whole].view(-1, length).split(batch)) if whole else []
    parts += [ids[whole:][None]] if ids.numel() - whole > 1 else []
    with torch.no_grad():
        for part in parts:
            hidden, labels = _hidden(model.base_model, part)[:, :-1], part[:, 1:].reshape(-1)
            total += negative_log_likelihood(hidden.reshape(-1, hidden.shape[-1]), weight, labels)
            count += labels.numel()
    if not count:
        raise InputError("a text", "must have two tokens or more to measure perplexity", ids.numel())
    return float(total), count


def perplexity(module: nn.Module, ids: Tensor, length: int, *, batch: int = 8, quick: bool = False) -> float:
    """exp of the mean −log p of a token; `quick` lets a GPU multiply in TF32, which is enough to compare rounds."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if quick else "highest")
    try:
        total, count = log_likelihood(module, ids, length, batch=batch)
    finally:
        torch.set_float32_matmul_precision(before)
    mean = total / count
    return exp(mean if mean < 700 else 700)  # what is no number is as bad as can be


def _hidden(body: Any, ids: Tensor) -> Tensor:
    found: Tensor = body(input_ids=ids, use_cache=False)[0]
    return found


# --- a model on a device ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    parameter: nn.Parameter
    span: slice
    shape: tuple[int, ...]

    def view(self, vector: Tensor) -> Tensor:
        return vector[self.span].view(self.shape)


class LanguageModel:
    """A module on a device whose weights come and go as vectors in the layout's order."""

    def __init__(
        self, module: nn.Module, device: str | torch.device, *, max_coordinates: int = 0, compiled: bool = False
    ) -> None:
        self.device = torch.device(device)
        self.cuda = self.device.type == "cuda"
        self.layout = ModelLayout.of(module, max_coordinates=max_coordinates or None)
        self.initial = torch.from_numpy(self.layout.flatten(module)).to(self.device)
        self.module = module.to(self.device)
        self.kind = torch.bfloat16 if self.cuda else torch.float32
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        unknown = [spec.name for spec, _ in self.layout.spans() if spec.name not in parameters]
        if unknown:
            raise InputError("model", "must have no floating-point state but its parameters", repr(unknown[0]))
        self._places = [_Place(parameters[spec.name], span, spec.shape) for spec, span in self.layout.spans()]
        self._body: Any = self.module.base_model
        self._head: Any = self.module.get_output_embeddings()  # type: ignore[operator]
        if getattr(self._head, "bias", None) is not None:
            raise InputError("model", "must have an output layer without a bias", type(module).__name__)
        self._slopes = torch.empty(self.layout.size, device=self.device)
        self._slope_views = [place.view(self._slopes) for place in self._places]
        self.known: dict[tuple[str, int], float] = {}  # the pretrained model's perplexity, by text and length
        self._recorded: tuple[Any, _Recorded] | None = None  # what the graph is for, and the graph
        self._part: Any = _part
        self._layers: list[tuple[nn.Module, Any]] = []
        if compiled and self.cuda:
            self._compile("inductor")
        self._check()

    def _check(self) -> None:
        """That the output layer alone makes logits of hidden states, as the loss has it: not so with scaled logits."""
        ids = torch.arange(4, device=self.device)[None]
        self.module.eval()
        with torch.no_grad(), self.holding(self.initial):
            ours = _hidden(self._body, ids) @ self._head.weight.t()
            theirs = self.module(input_ids=ids, use_cache=False).logits
        if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3):
            rule = "must make its logits of the hidden states by the output layer alone"
            raise InputError("model", rule, type(self.module).__name__)

    def _compile(self, backend: str) -> None:
        """Compiles the layers one by one: they are alike, so that it is done once, and the output layer's loss."""
        torch._dynamo.reset()
        lists = [module for module in self._body.modules() if isinstance(module, nn.ModuleList)]
        for layer in max(lists, key=len, default=nn.ModuleList()):
            layer.compile(backend=backend, dynamic=False)
            self._layers.append((layer, layer._compiled_call_impl))
            layer._compiled_call_impl = None  # for training only: windows of other lengths would compile again
        self._part = torch.compile(_part, backend=backend, dynamic=False)

    @property
    def compiled(self) -> bool:
        """Whether training is compiled: it was asked for, and has not failed."""
        return bool(self._layers)

    @contextmanager
    def _compiled_layers(self) -> Iterator[None]:
        try:
            for layer, call in self._layers:
                layer._compiled_call_impl = call
            yield
        finally:
            for layer, _ in self._layers:
                layer._compiled_call_impl = None

    @contextmanager
    def holding(self, vector: Tensor) -> Iterator[nn.Module]:
        """The module with these weights, float32, for as long as it lasts."""
        before = [place.parameter.data for place in self._places]
        try:
            for place in self._places:
                place.parameter.data = place.view(vector)
            yield self.module
        finally:
            for place, data in zip(self._places, before, strict=True):
                place.parameter.data = data

    def loss(self, ids: Tensor) -> Tensor:
        """The mean loss of blocks of tokens [n, length], each but the first of a block."""
        hidden = _hidden(self._body, ids)[:, :-1]
        return head_loss(hidden.reshape(-1, hidden.shape[-1]), self._head.weight, ids[:, 1:].reshape(-1), self._part)

    # --- training ---

    def train(self, theta: Tensor, batches: Tensor, optimiser: Optimiser, seed: int) -> Tensor:
        """One member's steps with a new AdamW, in place: theta float32, batches[steps, n, length]. The mean loss.

        Nothing waits for the device. On CUDA a step is one graph: to launch its kernels one by one takes longer.
        """
        self.module.train()
        with torch.random.fork_rng(devices=[self.device] if self.cuda else []):
            torch.manual_seed(seed)  # dropout
            if not self.cuda:
                return self._plain_steps(theta, batches, optimiser)
            kind = (optimiser, tuple(batches.shape[1:]))
            if self._recorded is None or self._recorded[0] != kind:
                self._recorded = kind, _Recorded(self, batches[0], optimiser, theta)
            return self._recorded[1].steps(theta, batches)

    def _plain_steps(self, theta: Tensor, batches: Tensor, o: Optimiser) -> Tensor:
        master = nn.Parameter(theta, requires_grad=True)
        master.grad = self._slopes
        adamw = torch.optim.AdamW([master], lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=o.decay)
        total = torch.zeros((), device=self.device)
        with self.holding(theta):
            for ids in batches:
                total += self.gradient(ids)[0]
                adamw.step()
        return total / len(batches)

    def gradient(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of a batch and its derivatives, as a vector; compiled, unless that fails."""
        parameters = [place.parameter for place in self._places]
        try:
            with self._compiled_layers():
                loss = self.loss(ids)
                slopes = torch.autograd.grad(loss, parameters)
        except RuntimeError as error:
            if not self.compiled or "out of memory" in str(error):
                raise
            self._layers, self._part = [], _part
            loss = self.loss(ids)
            slopes = torch.autograd.grad(loss, parameters)
        torch._foreach_copy_(self._slope_views, slopes)
        return loss.detach(), self._slopes

    # --- measuring ---

    def log_likelihood(self, vector: Tensor, ids: Tensor, length: int, *, batch: int = 8) -> tuple[float, int]:
        """Of a model of this layout; as the function below."""
        with self.holding(vector):
            return log_likelihood(self.module, ids, length, batch=batch)

    def perplexity(self, vector: Tensor, ids: Tensor, length: int, *, batch: int = 8, quick: bool = False) -> float:
        """Of a model of this layout; as the function below."""
        with self.holding(vector):
            return perplexity(self.module, ids, length, batch=batch, quick=quick)

    def tensors(self, vector: Tensor) -> dict[str, Tensor]:
        """A model's state on the CPU, as the module names it."""
        like = {name: tensor.detach() for name, tensor in self.module.state_dict().items()}
        flat: Any = vector.detach().cpu().numpy()
        places = {spec.name: span for spec, span in self.layout.spans()}
        out = {}
        for spec in self.layout.tensors:
            if spec.role == "buffer":
                out[spec.name] = like[spec.name].cpu().clone()
            else:
                out[spec.name] = torch.from_numpy(np.array(flat[places[spec.of or spec.name]])).view(spec.shape)
        return {name: out[name] for name in like}


class _Recorded:
    """A step of training on CUDA as one graph, with weights in float32 and bfloat16 and AdamW's state of its own."""

    def __init__(self, model: LanguageModel, ids: Tensor, optimiser: Optimiser, theta: Tensor) -> None:
        self._optimiser, self._tokens = optimiser, ids.clone()
        self._theta, self._m, self._v = (torch.empty_like(theta) for _ in range(3))
        self._low = torch.empty_like(theta, dtype=model.kind)
        self._corrections, self._total = torch.ones(2, device=theta.device), torch.zeros((), device=theta.device)
        self._graph = torch.cuda.CUDAGraph()
        self._start(theta)
        with model.holding(self._low):
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(3):  # compiles, and finds what each kernel needs
                    self._step(model)
            torch.cuda.current_stream().wait_stream(aside)
            torch.cuda.synchronize()
            with torch.cuda.graph(self._graph):
                self._step(model)

    def _step(self, model: LanguageModel) -> None:
        from quorumark.research.lab import _kernels

        o = self._optimiser
        loss, slopes = model.gradient(self._tokens)
        self._total.add_(loss)
        _kernels.adamw(
            self._theta, self._m, self._v, slopes, self._low, self._corrections, o.lr, o.decay, o.betas, o.eps
        )  # fmt: skip

    def _start(self, theta: Tensor) -> None:
        for vector in (self._m, self._v, self._total):
            vector.zero_()
        self._theta.copy_(theta)
        self._low.copy_(theta)

    def steps(self, theta: Tensor, batches: Tensor) -> Tensor:
        """All steps of a member with a new AdamW, in place; the mean loss."""
        self._start(theta)
        b1, b2 = self._optimiser.betas
        table = [[1 / (1 - b1**t), 1 / (1 - b2**t)] for t in range(1, len(batches) + 1)]
        for ids, corrections in zip(batches, torch.tensor(table, device=theta.device), strict=True):
            self._tokens.copy_(ids)
            self._corrections.copy_(corrections)
            self._graph.replay()
        theta.copy_(self._theta)
        return self._total / len(batches)
