"""Flower: two changed lines in an existing app (docs/flower.md; needs the extra `flower`).

    app = ClientApp(mods=[quorumark_mod])                                          # client_app.py
    strategy = watermarked(FedAvg(…), consortium="consortium/consortium.json")     # server_app.py

or, for members who agreed on sums alone, without a key

    strategy = secure(FedAvg(…), consortium="consortium/consortium.json")          # server_app.py

and for the key ceremony and verification over Flower

    serve_queries(app)                                                             # client_app.py
    manifest = make_key(grid, terms)                                               # server_app.py
    certificate = verify_model(grid, reference, "suspect.safetensors")

The stages themselves are `quorumark.node`'s; here they become Flower's messages.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quorumark.flower.client import quorumark_mod, serve_queries, watermark_mod
    from quorumark.flower.queries import make_key, verify_model
    from quorumark.flower.server import Watermarked, secure, watermarked

__all__ = [
    "Watermarked",
    "make_key",
    "quorumark_mod",
    "secure",
    "serve_queries",
    "verify_model",
    "watermark_mod",
    "watermarked",
]

_IN = {
    "client": ("quorumark_mod", "serve_queries", "watermark_mod"),
    "queries": ("make_key", "verify_model"),
    "server": ("Watermarked", "secure", "watermarked"),
}


def __getattr__(name: str) -> Any:
    """Each is loaded when it is first used: a node, which may be a new process for every message, needs no server."""
    for module, names in _IN.items():
        if name in names:
            return getattr(import_module(f"quorumark.flower.{module}"), name)
    raise AttributeError(f"module 'quorumark.flower' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
