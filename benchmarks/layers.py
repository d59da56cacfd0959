"""Small models attacked by those who know the test by layers: docs/layers.md, "Blocks" and "What escapes".

    OMP_NUM_THREADS=1 python -m benchmarks.layers [mlp cnn gpt2] [--demo FOLDER --of DEMO] [--out FILE]
    python -m benchmarks.layers --tables     # writes the tables of docs/layers.md from the file

`mlp`, `cnn` and `gpt2` are those of `tests.kit.block_sizes`, with seeds: the same machine gives the same rows. The file
is written after every row, and what it has is not run again. `--demo` takes the rows that
`quorumark attack suite DEMO --plan layers --out FOLDER` left, and tries what an examiner can do about added channels.
Each demo draws a key of its own, so these rows are of one run.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

from quorumark.research.rows import LEAST_LOG10

PAGE = Path("docs/layers.md")
OUT = Path("benchmarks/results/layers-small.json")
NAMES = ("mlp", "cnn", "gpt2")


ADDED: tuple[tuple[tuple[str, dict[str, Any]], ...], ...] = (
    (("padding", {"ratio": 0.25}),),
    (("splitting", {"ratio": 0.25}),),
    (("decoys", {}),),
    (("decoys", {}), ("noise", {"strength": 0.01})),
)


def demo(folder: Path, of: Path) -> dict[str, Any]:
    """The rows of a suite on the demo's model, and what is left where idle channels are taken out of added ones."""
    from quorumark.research.attacks import chain
    from quorumark.research.attacks.compact import compacted
    from quorumark.research.attacks.demo import subject
    from quorumark.research.attacks.plan import Job
    from quorumark.research.attacks.suite import read_results

    _, _, found = read_results(folder)
    ours = subject(of)
    for steps in ADDED:
        hidden = chain(ours.target, steps, seed=1).weights
        found.append(ours.row(Job(steps, 1), hidden))
        weights, gone = compacted(ours.target.with_weights(hidden))
        found.append(ours.row(Job((*steps, ("compacted", {"gone": gone})), 1), weights))
    kept = ("attack", "settings", "accuracy", "z", "z_aligned", "surplus", "q", "log10_q", "left")
    rows = [{name: _short(getattr(row, name)) for name in kept} for row in {row.key: row for row in found}.values()]
    return {"plan": "layers", "rows": [{k: v for k, v in row.items() if v is not None} for row in rows]}


def _short(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def attacked(name: str, body: dict[str, Any], out: Path) -> None:
    """All attacks on one small model that are not in the file yet."""
    from tests.kit import block_sizes

    mine = body.setdefault(name, {"rows": []})
    done = {(row["attack"], json.dumps(row["settings"])) for row in mine["rows"]}
    marked = block_sizes.trained(name)
    mine |= block_sizes.about(marked)
    begun = time.process_time()
    for row in block_sizes.rows(marked, done):
        mine["rows"].append(row)
        mine["cpu_seconds"] = round(mine.get("cpu_seconds", 0.0) + time.process_time() - begun, 1)
        begun = time.process_time()
        write(body, out)
        print(name, row["attack"], row["settings"], row["worth"], row["z"], row["log10_q"], flush=True)  # noqa: T201


def write(body: dict[str, Any], out: Path) -> None:
    order = ("machine", "torch", *NAMES, "demo")
    lines = []
    for name in sorted(body, key=order.index):
        about = {k: v for k, v in body[name].items() if k != "rows"} if name in (*NAMES, "demo") else body[name]
        text = json.dumps(about, ensure_ascii=False)
        if name in (*NAMES, "demo"):
            rows = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in body[name]["rows"])
            text = text[:-1] + (", " if about else "") + f'"rows": [\n  {rows}\n ]}}'
        lines.append(f' "{name}": {text}')
    out.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


# --- the tables of docs/layers.md --------------------------------------------------------------------------

Wanted = dict[str, Any]
WHO = {False: "", True: ", two members"}
TITLES = {"mlp": "MLP", "cnn": "CNN", "gpt2": "GPT-2"}


def _row(rows: list[dict[str, Any]], attack: str, **wanted: Any) -> dict[str, Any] | None:
    """The row of an attack with just these settings, apart from some that are always the same."""
    for row in rows:
        given = {k: v for k, v in row["settings"].items() if k not in ("from_anchor", "rho", "fraction")}
        if row["attack"] == attack and given == wanted:
            return row
    return None


def _number(value: float, digits: int = 1) -> str:
    text = f"{value:.{digits}f}"
    return ("0" if float(text) == 0 else text).replace("-", "−")


def _log10(value: float) -> str:
    return _number(value, 0 if value <= -10 else 1)


def escapes(row: dict[str, Any]) -> bool:
    """Neither z nor Q passes."""
    best = max((row[name] for name in ("z", "z_aligned") if name in row), default=0.0)
    return bool(best < 6 and row["log10_q"] > LEAST_LOG10)


def _bold(row: dict[str, Any]) -> str:
    text = _log10(row["log10_q"])
    return f"**{text}**" if escapes(row) else text


def _table(heads: list[str], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [heads, ["---"] * len(heads), *lines]).replace(
        "| --- ", "|---"
    )


def sizes(body: dict[str, Any]) -> str:
    lines = []
    for name, title in TITLES.items():
        rows, parts = body[name]["rows"], body[name]["parts"]
        first = _row(rows, "none")
        about = (
            f"{title} (d = {body[name]['coordinates']:,}; {', '.join(str(count) for count in parts.values())} blocks)"
        )
        found = [(f"{about}, as released", first)]
        for how, coalition, alpha in (
            ("regression", False, 0.5), ("gls", False, 0.5), ("gls", True, 0.7), ("sum", False, 0.5),
            ("sum", False, 0.7),
        ):  # fmt: skip
            row = _row(rows, "adaptive-fine-tuning", estimate=how, coalition=coalition, alpha=alpha)
            found.append((f"{how}{WHO[coalition]}, α = {alpha}", row))
        for what, row in found:
            if row is not None:
                cells = [_log10(value) for value in row["by_size"].values()]
                cells[3] = f"**{cells[3]}**"
                lines.append([what, _number(row["z"]), *cells])
    return _table(["model, estimate", "z", "1,024", "2,048", "4,096", "**8,192**", "16,384", "tensors"], lines)


SMALL: list[tuple[str, str, Wanted]] = [
    ("as released", "none", {}),
    ("fine-tuning", "fine-tuning", {}),
    *((f"adaptive, {how}, α = 0.5", "adaptive-fine-tuning", {"estimate": how, "coalition": False, "alpha": 0.5})
      for how in ("sum", "regression", "gls")),
    *((f"by {by}, {how}, α = {alpha}", "adaptive-by-part",
       {"estimate": how, "coalition": False, "by": by, "alpha": alpha})
      for by, how, alpha in (("block", "gls", 0.5), ("block", "sum", 0.9), ("row", "gls", 0.5))),
    *((f"by block, {weights} weights, gls, α = 0.9", "adaptive-by-part",
       {"estimate": "gls", "coalition": False, "by": "block", "weights": weights, "alpha": 0.9})
      for weights in ("random", "alternating")),
    ("by row, gls, two members, α = 0.5", "adaptive-by-part",
     {"estimate": "gls", "coalition": True, "by": "row", "alpha": 0.5}),
    *((f"removal, gls{WHO[coalition]}, expected amounts", "removal",
       {"estimate": "gls", "coalition": coalition, "amounts": "expected"}) for coalition in (False, True)),
    *((f"removal, {how}{WHO[coalition]}, an oracle's amounts", "removal",
       {"estimate": how, "coalition": coalition, "amounts": "oracle"})
      for how, coalition in (("regression", False), ("gls", False), ("gls", True))),
    *((f"the same, {how}, not repaired", "removal",
       {"estimate": how, "coalition": False, "amounts": "oracle", "epochs": 0}) for how in ("regression", "gls")),
]  # fmt: skip


def _worth(name: str, row: dict[str, Any]) -> str:
    return f"{row['worth']:.2f}" if name == "gpt2" else f"{100 * row['worth']:.1f} %"


def small(body: dict[str, Any]) -> str:
    lines = []
    for what, attack, wanted in SMALL:
        cells = []
        for name in TITLES:
            row = _row(body[name]["rows"], attack, **wanted)
            cells.append("not run" if row is None else f"{_worth(name, row)}, {_number(row['z'])}, {_bold(row)}")
        lines.append([what, *cells])
    for what in ("tried", "escape both tests", "the best of these"):
        cells = []
        for name in TITLES:
            rows = [row for row in body[name]["rows"] if row["attack"] != "none"]
            out = sorted((row for row in rows if escapes(row)), key=lambda row: row["worth"], reverse=name != "gpt2")
            cells.append(
                str(len(rows)) if what == "tried" else str(len(out)) if "both" in what else _worth(name, out[0])
            )
        lines.append([what, *cells])
    return _table(["attack", *TITLES.values()], lines)


def _named(row: dict[str, Any]) -> str:
    given, steps = row["settings"], row["attack"].split(" + ")
    if "by" in given:
        kind = {"even": ""}.get(given.get("weights", "even"), f", {given.get('weights')} weights")
        return f"by {given['by']}{kind}, {given['estimate']}, α = {given['alpha']}"
    if row["attack"] == "adaptive-fine-tuning":
        return f"adaptive, {given['estimate']}, α = {given['alpha']}"
    if row["attack"] == "removal":
        whose = "an oracle's" if given["amounts"] == "oracle" else "expected"
        lost = f" (left: {row['left']:.1f})" if row.get("left", 0) > 1 else ""
        return f"removal, {given['estimate']}, {whose} amounts{lost}" + ("" if given["epochs"] else ", not repaired")
    sizes = {name.rpartition(".")[2]: str(value) for name, value in given.items()}
    size = next((f" {sizes[name]}" for name in ("ratio", "share", "strength") if name in sizes), "")
    if steps[-1] == "compacted":
        return f"{' + '.join(steps[:-1])}{size}, idle channels taken out"
    return "as released" if row["attack"] == "none" else f"{row['attack']}{size}"


def of_demo(body: dict[str, Any]) -> str:
    lines = []
    for row in body["demo"]["rows"]:
        if row["settings"].get("amounts") == "expected" and not row["settings"]["epochs"]:
            continue
        zs = [_number(row[name]) if name in row else "not testable" for name in ("z", "z_aligned")]
        surplus = f", {row['surplus']} channels left over" if row["surplus"] else ""
        lines.append([_named(row), f"{100 * row['accuracy']:.1f} %", *zs, f"{row['q']:.0f}", _bold(row) + surplus])
    return _table(["attack", "accuracy", "z", "aligned", "Q", "log10 of the bound"], lines)


def page(text: str, body: dict[str, Any]) -> str:
    """The page with the tables as they should be."""
    for name, make in (("sizes", sizes), ("small", small), ("demo", of_demo)):
        begin, end = f"<!-- benchmarks/layers.py: {name} -->\n", "\n<!-- end -->"
        before, between, after = text.partition(begin)
        if not between or end not in after:
            raise SystemExit(f"{PAGE} has no place for {name!r}")
        text = before + begin + make(body) + after[after.index(end) :]
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="MODEL", help=f"some of {', '.join(NAMES)}; all if neither is given"
    )
    parser.add_argument("--demo", type=Path, help="the folder of a suite on the demo's model")
    parser.add_argument("--of", type=Path, help="the folder of that demo")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--tables", action="store_true", help=f"write the tables of {PAGE}, and run nothing")
    given = parser.parse_args()
    if given.tables:
        body = json.loads(given.out.read_text(encoding="utf-8"))
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), body), encoding="utf-8")
        return
    import torch

    torch.set_num_threads(1)
    body = json.loads(given.out.read_text(encoding="utf-8")) if given.out.exists() else {}
    body |= {"machine": platform.machine(), "torch": torch.__version__}
    if (given.demo is None) != (given.of is None):
        parser.error("--demo and --of go together")
    if given.demo is not None:
        body["demo"] = demo(given.demo, given.of)
        write(body, given.out)
    for name in given.names or (() if given.demo else NAMES):
        attacked(name, body, given.out)


if __name__ == "__main__":
    main()
