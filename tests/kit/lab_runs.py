"""Settings of the lab's smallest runs."""

from __future__ import annotations

from quorumark.research.lab.config import Settings

MINI = Settings("shapes", members=4, rounds=4, model="cnn", global_batch=128, augment=("flip",))
STRENGTHS = (
    {"rule": "rho", "rho": "0.05", "c_max": "0.2", "dither": "0"},
    {"rule": "target", "z": "20", "dither": "0"},
    {"rule": "relative", "c": "0.02", "dither": "0"},
    {"rule": "paper", "c": "0.025"},
)
