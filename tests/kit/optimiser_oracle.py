"""The server optimisers in Python's integers and fractions, from docs/optimisers.md alone."""

from __future__ import annotations

from fractions import Fraction
from math import isqrt
from typing import Any

MOST = 2**60 - 1


def toward_zero(above: int, below: int) -> int:
    return min(abs(above) // below, MOST) * (-1 if above < 0 else 1)


class Oracle:
    """One weight at a time: `state[j]` is (m, r)."""

    def __init__(self, name: str, settings: dict[str, str], size: int) -> None:
        self.name, self.settings = name, {k: Fraction(v) for k, v in settings.items()}
        self.state = [(0, 0)] * size
        self.steps = 0

    def whole(self, name: str, bits: int) -> int:
        value = self.settings.get(name, Fraction(0)) * 2**bits
        return int(value.numerator // value.denominator)

    def rate(self) -> int:
        if self.name == "fedavgm":
            return self.whole("server_learning_rate", 40)
        eta = self.whole("eta", 40)
        if self.name != "fedadam":
            return eta
        left = []
        for beta in (self.whole("beta_1", 32), self.whole("beta_2", 32)):
            product = 2**62
            for digit in f"{self.steps + 2:b}":
                product = product * product // 2**62
                if digit == "1":
                    product = product * (beta * 2**30) // 2**62
            left.append(2**62 - product)
        return eta * isqrt(left[1] * 2**62) // left[0]

    def take(self, raw: list[int]) -> list[int]:
        """The moves of all weights; the state goes on."""
        rate = self.rate()
        moves = []
        for j, g in enumerate(raw):
            m, r = self.state[j]
            if self.name == "fedavgm":
                m = toward_zero(m * self.whole("server_momentum", 32), 2**32) + g
                m = max(-MOST, min(MOST, m))
                moves.append(toward_zero(m * rate, 2**40))
            else:
                b1, b2 = self.whole("beta_1", 32), self.whole("beta_2", 32)
                m = toward_zero(m * b1, 2**32) + toward_zero(g * (2**32 - b1), 2**32)
                v, square = r * r, (16 * g) ** 2
                part = square * (2**32 - b2) // 2**32
                if self.name == "fedadagrad":
                    v += square
                elif self.name == "fedadam":
                    v = v * b2 // 2**32 + part
                elif v != square:
                    v += part if v < square else -part
                r = isqrt(min(v, 2**128 - 1))
                below = min(r + self.whole("tau", 44), 2**64 - 1)
                moves.append(toward_zero(16 * m * rate, below))
            self.state[j] = m, r
        self.steps += 1
        return moves


def flower_step(name: str, settings: dict[str, str], memory: dict[str, Any], raw: Any, server_round: int) -> Any:
    """Flower's own formulas in float64: the step for an update, with what it remembers in `memory`."""
    import numpy as np

    s = {k: float(v) for k, v in settings.items()}
    if name == "fedavgm":
        memory["m"] = s["server_momentum"] * memory.get("m", 0.0) + raw
        return s["server_learning_rate"] * memory["m"]
    b1, b2 = s.get("beta_1", 0.0), s.get("beta_2", 0.0)
    m = memory["m"] = b1 * memory.get("m", 0.0) + (1 - b1) * raw
    v = memory.get("v", np.zeros_like(raw))
    if name == "fedadagrad":
        v = v + raw**2
    elif name == "fedadam":
        v = b2 * v + (1 - b2) * raw**2
    else:
        v = v - (1 - b2) * raw**2 * np.sign(v - raw**2)
    memory["v"] = v
    eta = s["eta"]
    if name == "fedadam":
        eta *= np.sqrt(1 - b2 ** (server_round + 1.0)) / (1 - b1 ** (server_round + 1.0))
    return eta * m / (np.sqrt(v) + s["tau"])
