"""The tables and figures of packed sums in docs and README, from the results that were measured.

    python benchmarks/tables.py            what differs
    python benchmarks/tables.py --write    write it

A table stands between `<!-- benchmarks/tables.py: NAME -->` and `<!-- end -->`, and is written whole; a figure in a
sentence is found by the words around it.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKINGS = (1, 2, 3, 4)
CASES = {
    "digits": "the demo's network, 283,786 weights",
    "skewed": "the same, skewed data",
    "text": "a language model in miniature, 115,552 weights",
}
Row = Mapping[str, Any]


def read(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))
    return found


def ratios(name: str) -> dict[str, float]:
    return {row["name"]: row["ratio"] for row in read(name) if row["against"] != "memcpy"}


def about(packing: int, members: int = 8, mark: bool = False) -> str:
    """As `research.bench.secagg` names rows."""
    return f"{packing} in an element, K={members}, {'with' if mark else 'without'} the mark"


def paired(rows: Sequence[Row], case: str, packing: int, what: str) -> tuple[float, float]:
    """The mean difference to one weight in an element over the seeds, and its standard error."""
    found = {(row["packing"], row["seed"]): row[what] for row in rows if row["case"] == case and row["packing"]}
    off = [value - found[1, seed] for (q, seed), value in sorted(found.items()) if q == packing]
    return statistics.mean(off), statistics.stdev(off) / len(off) ** 0.5


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join("|" + "|".join(f" {cell} " if cell != "---" else cell for cell in row) + "|" for row in rows)


# --- performance.md ---------------------------------------------------------------------------------------


def compared() -> str:
    """What each costs beside plain FedAvg and SecAgg+."""
    sizes = {(row["packing"] or row["name"]): row for row in read("bytes") if row["name"] in _PLAIN}
    cpu, accuracy = ratios("secagg"), _accuracies()
    lines = []
    for kind in ("plain FedAvg", "SecAgg+ of flwr", *PACKINGS):
        if kind not in sizes:  # SecAgg+ where flwr was not installed
            continue
        row, weights = sizes[kind], "weight" if kind == 1 else "weights"
        name = kind if isinstance(kind, str) else f"{kind} {weights} in an element" + (", the default" * (kind == 2))
        times = ["", "", ""] if kind == "plain FedAvg" else ["1", "", "1"]
        if isinstance(kind, int):
            old = {"a client masks": "a client masks, K=8", "the server unmasks": "the server unmasks, K=8"}
            times = []
            for who, mark in (("a client masks", False), ("a client masks", True), ("the server unmasks", False)):
                found = cpu.get(f"{who}, {about(kind, mark=mark)}, CPU time")
                if found is None and kind == 1 and not mark:
                    found = cpu.get(f"{old[who]}, CPU time")
                times.append("not measured" if found is None else f"{found:.2f}")
        lines.append([name, f"{row['up']:.2f}", f"{row['down']:.2f}", *times, accuracy.get(kind, "not measured")])
    heads = ["", "bytes a weight up", "down", "CPU time of a member", "with the mark", "of the server"]
    return table([*heads, f"accuracy, mean of {_seeds('digits')}"], lines)


_PLAIN = ("plain FedAvg", "SecAgg+ of flwr", "later round")


def _accuracies() -> dict[int | str, str]:
    found: dict[int | str, list[float]] = {}
    for row in read("packing"):
        if row["case"] == "digits":
            found.setdefault(row.get("kind", row["packing"]), []).append(100 * row["accuracy"])
    return {kind: f"{statistics.mean(values):.2f} %" for kind, values in found.items()}


def _seeds(case: str) -> str:
    """How many seeds a case was run with, the fewest of its rows and the most."""
    counts = Counter(row.get("kind", row["packing"]) for row in read("packing") if row["case"] == case).values()
    few, many = min(counts), max(counts)
    return f"{many} seeds" if few == many else f"{few} to {many} seeds"


def bytes_by_round() -> str:
    """Two weights in an element: what other rounds cost."""
    names = {
        "first round": "the first round: the model goes down as it is",
        "later round": "every later round",
        "who missed a round": "for a member that missed one: the model as well, and its record",
        "who comes later": "for a member that never took part: the initial model, too, with 8 bytes a weight",
        "sums not checked": "`sums=unchecked`: the model goes down, not the sum",
        "cohorts of eight": "a cohort of 8, for one that was not in the last one: the model as well",
    }
    found = {row["name"]: row for row in read("bytes") if row["packing"] == 2}
    lines = [[text, f"{found[name]['up']:.2f}", f"{found[name]['down']:.2f}"] for name, text in names.items()]
    links = found["cohorts of eight"]
    text = "the links of a cohort, beside its round, for each of the last one"
    lines.append([text, f"{links['links_up']:.2f}", f"{links['links_down']:.2f}"])
    return table(["", "bytes a weight up", "down"], lines)


def packing() -> str:
    rows, lines = read("packing"), []
    for case, text in CASES.items():
        for q in PACKINGS:
            some = [row for row in rows if (row["case"], row["packing"]) == (case, q)]
            up = statistics.mean(row["bytes_up"] for row in some)
            cells = [text, str(q), f"{up:.2f}"]
            for what, scale, unit, digits in (("accuracy", 100, " %", 2), ("z", 1, "", 2)):
                values = [scale * row[what] for row in some]
                cells.append(f"{statistics.mean(values):.2f}{unit} ({', '.join(f'{v:.1f}' for v in values)})")
                mean, error = paired(rows, case, q, what) if q > 1 else (0.0, 0.0)
                cells.append(f"{scale * mean:+.{digits}f} ± {scale * error:.{digits}f}" if q > 1 else "")
            lines.append(cells)
    heads = ["", "weights in an element", "bytes a weight up", "accuracy", "difference to 1", "z", "difference to 1"]
    return table(heads, lines)


def member() -> str:
    """CPU time beside one weight in an element."""
    found, lines = ratios("secagg-packed"), []
    new = f"a member masks, {about(2)}, CPU time" in found
    for q in PACKINGS[1:]:
        if new:
            kinds = [("a member masks", False), ("a member masks", True), ("the server unmasks", False)]
            cells = [found[f"{who}, {about(q, k, mark)}, CPU time"] for who, mark in kinds for k in (8, 32)]
        else:
            kinds = [("a client masks", False), ("the server unmasks", False)]
            cells = [found[f"{who}, {q} weights in an element, K={k}, CPU time"] for who, _ in kinds for k in (8, 32)]
        lines.append([str(q), *(f"{cell:.2f}" for cell in cells)])
    both = ["a member, K = 8", "K = 32"]
    heads = ["weights in an element", *both, *(["with the mark, K = 8", "K = 32"] if new else [])]
    made = table([*heads, "the server, K = 8", "K = 32"], lines)
    if new:
        return made
    return (
        f"{made}\n\nThese are older figures, without what a packed member computes before it is ready (the level of "
        "its units), and without the mark."
    )


def rounds() -> str:
    found = {(row["packing"], row["marked"]): row for row in read("round")}
    lines = []
    for q in PACKINGS:
        without, marked = found[q, False], found[q, True]
        up, down = (f"{marked[way] / marked['size']:.2f}" for way in ("bytes_up", "bytes_down"))
        lines.append([str(q), up, down, f"{without['cpu']:.1f} s", f"{marked['cpu']:.1f} s"])
    lines.append(["plain FedAvg", "4", "4", f"{found[1, False]['plain_cpu']:.1f} s", ""])
    heads = ["weights in an element", "bytes a weight up", "down, the announced sum and the layout"]
    return table([*heads, "CPU time without the mark", "with"], lines)


# --- flower.md --------------------------------------------------------------------------------------------


def flower() -> str:
    lines = []
    for row in read("flower"):
        deployed = "deployment" in row["name"]
        digits = 1 if deployed else 2
        if row["size"] not in (283_000, 283_424):
            continue
        size = "283,786" if deployed else f"{row['size']:,}"
        nodes = {5: "five", 50: "50"}[row["nodes"]]
        name = f"{'deployed on loopback' if deployed else 'simulation on Ray'}, {nodes} nodes, plain FedAvg"
        times = f"{row['cpu']:.2f} (× {row['cpu'] / row['plain_cpu']:.1f})" if row["plain_cpu"] else ""
        cpu = [f"{row['plain_cpu']:.2f}" if times else "", times]
        plain = [f"{row[f'plain_{way}']:,.0f}" for way in ("messages", "bytes_down", "bytes_up")]
        marked = [f"{row[way]:,.0f}" for way in ("messages", "bytes_down", "bytes_up")]
        seconds = f"{row['seconds']:.{digits}f} (× {row['ratio']:.1f})"
        lines.append([name, size, *plain, f"{row['plain_seconds']:.{digits}f}", cpu[0]])
        lines.append(["with the mark", "", *marked, seconds, cpu[1]])
    heads = ["", "weights", "messages", "bytes to the node", "bytes from it", "seconds a round"]
    made = table([*heads, "CPU seconds a round, all nodes"], lines)
    return f"{made}\n\n{_terms(read('flower'))} ([packed sums](secagg.md#packed-sums))."


def _terms(rows: Sequence[Row]) -> str:
    """What the terms of a deployment and of a simulation said, as their rows have it."""
    found = []
    for who, there in (("deployed", True), ("simulated", False)):
        row = next((row for row in rows if ("deployment" in row["name"]) == there), {})
        if "packing" in row and "sums" in row:
            count = {1: "one weight", 2: "two weights", 3: "three weights", 4: "four weights"}[row["packing"]]
            sums = "checked" if row["sums"] == "checked" else "not checked"
            found.append(f"{who}, {count} in an element, sums {sums}")
        else:
            found.append(f"{who}, not recorded")
    return f"The terms of these rounds: {'; '.join(found)}"


def flower_packed() -> str:
    lines = [
        [str(row["packing"]), f"{row['bytes_down']:,.0f}", f"{row['bytes_up']:,.0f}", f"{row['cpu']:.1f}"]
        for row in read("flower-packed")
    ]
    row = read("flower-packed")[0]
    plain = [f"{row[f'plain_{way}']:,.0f}" for way in ("bytes_down", "bytes_up")]
    lines.append(["plain FedAvg", *plain, f"{row['plain_cpu']:.1f}"])
    heads = ["weights in an element", "bytes to the node", "bytes from it", "CPU seconds a round, all nodes"]
    return table(heads, lines)


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("docs/performance.md", "compared"): compared,
    ("docs/performance.md", "bytes"): bytes_by_round,
    ("docs/performance.md", "packing"): packing,
    ("docs/performance.md", "member"): member,
    ("docs/performance.md", "rounds"): rounds,
    ("docs/flower.md", "flower"): flower,
    ("docs/flower.md", "flower-packed"): flower_packed,
}


# --- figures in sentences ---------------------------------------------------------------------------------


def client() -> str:
    """Of the default packing; before it was measured, of one weight in an element."""
    found, now = ratios("secagg"), f"a client masks, {about(2)}, CPU time"
    ratio, packed = (
        (found[now], "two weights") if now in found else (found["a client masks, K=8, CPU time"], "one weight")
    )
    return f"{ratio:.2f} of the CPU time of Flower's SecAgg+ at a client (K = 8, {packed} in an element)"


def retried() -> str:
    found, name = ratios("secagg"), "a client, 3 of 8 drop, retry included"
    return f"{found.get(f'{name}, {about(2)}, CPU time', found.get(f'{name}, CPU time')):.2f}"


def tag() -> str:
    return f"{ratios('secagg')['the tag of a checked sum']:.1f}"


def deployed() -> str:
    """With the bytes of the same run, which say how many weights were in an element."""
    row = read("flower")[0]
    larger = row["bytes_up"] / row["plain_bytes_up"]
    return f"{row['ratio']:.1f} times as long as a plain one, with {larger:.1f} times the bytes up"


FIGURES: list[tuple[str, str, Callable[[], str]]] = [
    ("README.md", r"(secure aggregation takes )[^;\n]+(;\n)", client),
    ("README.md", r"(a Flower round of five nodes on loopback took )[^;\n]+(;\n)", deployed),
    ("docs/performance.md", r"(with three\s+drops of eight and the retry )[\d.]+( of SecAgg\+'s)", retried),
    ("docs/secagg.md", r"(a tag takes )[\d.]+(\s+times as long as a mask of the same length)", tag),
]


def pages() -> dict[str, str]:
    """The pages as they should be."""
    names = {page for page, _ in TABLES} | {page for page, *_ in FIGURES}
    found = {name: (ROOT / name).read_text(encoding="utf-8") for name in names}
    for (page, name), make in TABLES.items():
        begin, end = f"<!-- benchmarks/tables.py: {name} -->\n", "\n<!-- end -->"
        before, between, after = found[page].partition(begin)
        if not between or end not in after:
            raise SystemExit(f"{page} has no place for {name!r}")
        found[page] = before + begin + make() + after[after.index(end) :]
    for page, pattern, make in FIGURES:
        found[page], count = re.subn(pattern, lambda m, make=make: m[1] + make() + m[2], found[page])  # type: ignore[misc]
        if count != 1:
            raise SystemExit(f"{page} must say once: {pattern}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    write, off = parser.parse_args().write, []
    for page, text in pages().items():
        if (ROOT / page).read_text(encoding="utf-8") != text:
            off.append(page)
            if write:
                (ROOT / page).write_text(text, encoding="utf-8")
    for page in off:
        sys.stdout.write(f"{page}: {'written' if write else 'other figures were measured (--write writes them)'}\n")
    return 0 if write or not off else 1


if __name__ == "__main__":
    sys.exit(main())
