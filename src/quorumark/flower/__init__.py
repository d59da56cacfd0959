"""Flower: two changed lines in an existing app (docs/flower.md; needs the extra `flower`).

    app = ClientApp(mods=[quorumark_mod])                                          # client_app.py
    strategy = watermarked(FedAvg(…), consortium="consortium/consortium.json")     # server_app.py

and for the key ceremony and verification over Flower

    serve_queries(app)                                                             # client_app.py
    manifest = make_key(grid, terms)                                               # server_app.py
    certificate = verify_model(grid, reference, "suspect.safetensors")

The stages themselves are `quorumark.node`'s; here they become Flower's messages.
"""

from quorumark.flower.client import quorumark_mod, serve_queries, watermark_mod
from quorumark.flower.queries import make_key, verify_model
from quorumark.flower.server import Watermarked, watermarked

__all__ = [
    "Watermarked",
    "make_key",
    "quorumark_mod",
    "serve_queries",
    "verify_model",
    "watermark_mod",
    "watermarked",
]
