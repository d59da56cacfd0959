"""The server optimisers, and the mark under them, in Python's integers and fractions, from docs/optimisers.md alone."""

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
        raw, rate = [max(-MOST, min(MOST, g)) for g in raw], self.rate()
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


class MarkOracle:
    """The same with what is known of the mark: M, R and A of each weight, all of which carry. `c` is a fraction."""

    def __init__(self, name: str, settings: dict[str, str], shapes: list[tuple[int, int]], c: Fraction) -> None:
        size = sum(rows * columns for rows, columns in shapes)
        self.optimiser, self.shapes, self.c = Oracle(name, settings, size), shapes, c
        self.mark, self.drag, self.embedded = [0] * size, [0] * size, [0] * size
        self.anew = 0

    def take(self, raw: list[int], marks: list[int], kept: int = 2**32) -> list[int]:
        """The moves; `marks` is S, `kept` what weight decay leaves, in 2^-32."""
        added = [s - toward_zero(a * (2**32 - kept), 2**32) for s, a in zip(marks, self.embedded, strict=True)]
        before, steps = list(self.optimiser.state), self.optimiser.steps
        rate = self.optimiser.rate()
        moves = self.optimiser.take(raw)
        found = self.followed(raw, moves, before, added, rate, self.mark)
        loud = self.loud(moves, [shown for _, _, shown in found])
        self.anew += len(loud)
        if loud:
            start = [0 if j in loud else m for j, m in enumerate(self.mark)]
            self.optimiser.state = [(0 if j in loud else m, r) for j, (m, r) in enumerate(before)]
            self.optimiser.steps = steps
            moves = self.optimiser.take(raw)
            found = self.followed(raw, moves, before, added, rate, start)
        for j, (mark, drag, shown) in enumerate(found):
            self.mark[j], self.drag[j] = mark, drag
            self.embedded[j] = max(-MOST, min(MOST, self.embedded[j] + shown))
        return moves

    def loud(self, moves: list[int], shown: list[int]) -> set[int]:
        found, start = set[int](), 0
        has_momentum = any(self.optimiser.whole(name, 32) for name in ("beta_1", "server_momentum"))
        for rows, columns in self.shapes if has_momentum else []:
            here = list(range(start, start + rows * columns))
            start += rows * columns
            lines = [here[r * columns : (r + 1) * columns] for r in range(rows)]
            lines += [here[k::columns] for k in range(columns)]
            for limit, places in [(self.c, here), *((2 * self.c, line) for line in lines)]:
                sizes = [sum(v[j] ** 2 for j in places) for v in (shown, moves)]
                if sizes[0] > limit**2 * sizes[1] and any(self.mark[j] for j in here):
                    found |= set(places)
        return found

    def followed(
        self,
        raw: list[int],
        moves: list[int],
        before: list[tuple[int, int]],
        added: list[int],
        rate: int,
        mark: list[int],
    ) -> list[tuple[int, int, int]]:
        """M, R and what the step has of the mark, weight by weight."""
        own = self.optimiser
        found = []
        for j, s in enumerate(added):
            old, now = before[j][1], own.state[j][1]
            if own.name == "fedavgm":
                m = toward_zero(mark[j] * own.whole("server_momentum", 32), 2**32) + s
                m = max(-MOST, min(MOST, m))
                found.append((m, 0, toward_zero(m * rate, 2**40)))
                continue
            b1, b2 = own.whole("beta_1", 32), own.whole("beta_2", 32)
            m = toward_zero(mark[j] * b1, 2**32) + toward_zero(s * (2**32 - b1), 2**32)
            g, drag = max(-MOST, min(MOST, raw[j])), 0
            if now:
                left = toward_zero(self.drag[j] * b2, 2**32) if own.name == "fedadam" else self.drag[j]
                part = s if own.name == "fedadagrad" else toward_zero(s * (2**32 - b2), 2**32)
                if own.name == "fedyogi":
                    part *= (16 * abs(g) > old) - (16 * abs(g) < old)
                drag = toward_zero(left * old, now) + toward_zero(16 * g * part, now)
                drag = max(-MOST, min(MOST, drag))
            below = min(now + own.whole("tau", 44), 2**64 - 1)
            shown = toward_zero(16 * m * rate, below) - toward_zero(16 * moves[j] * drag, below)
            found.append((m, drag, max(-MOST, min(MOST, shown))))
        return found


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
