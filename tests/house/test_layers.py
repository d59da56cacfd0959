"""The house: a room imports only from rooms before it, and heavy packages only where they are needed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

# From the ground up. A module may import only modules on earlier lines (and its own package).
ORDER = [
    "quorumark.refusals",
    "quorumark.errors",
    "quorumark.field",
    "quorumark.shamir",
    "quorumark.codec",
    "quorumark.packing",
    "quorumark.checks",
    "quorumark.canonical",
    "quorumark.files",
    "quorumark.reasons",
    "quorumark.stamps",
    "quorumark.model",
    "quorumark.consortium",
    "quorumark.setup",
    "quorumark.round",
    "quorumark.simulation",
    "quorumark.align",
    "quorumark.verify",
    "quorumark.report",
    "quorumark.node",
    "quorumark.api",
    "quorumark.flower",
    "quorumark.nvflare",
    "quorumark.demo",
    "quorumark.room",
    "quorumark.doctor",
    "quorumark.research",
    "quorumark.trial",
    "quorumark.cli",
    "quorumark.__main__",
]
CORE = {
    "cryptography",
    "jinja2",
    "llvmlite",
    "numba",
    "numpy",
    "rfc3161_client",
    "rich",
    "safetensors",
    "securesystemslib",
    "typer",
}
WHOLE = {  # modules that are about such a package, and import it at the top: others import them inside functions only
    "quorumark.field._triton",
    "quorumark.field.parts_on_device",
    "quorumark.nvflare",
    "quorumark.nvflare.controller",
    "quorumark.nvflare.job",
    "quorumark.nvflare.site",
    "quorumark.nvflare.wire",
    "quorumark.research.lab._kernels",
    "quorumark.research.lab._norms",
    "quorumark.research.lab.attack",
    "quorumark.research.lab.augment",
    "quorumark.research.lab.fleet",
    "quorumark.research.lab.language",
    "quorumark.research.lab.dither",
    "quorumark.research.lab.federated_run",
    "quorumark.research.lab.image_run",
    "quorumark.research.lab.mark",
    "quorumark.research.lab.packed",
    "quorumark.research.lab.papercode",
    "quorumark.research.lab.parted",
    "quorumark.research.lab.masked",
    "quorumark.research.lab.models",
    "quorumark.research.lab.null",
    "quorumark.research.lab.removal",
    "quorumark.research.lab.observer",
    "quorumark.research.lab.retrain",
    "quorumark.research.lab.rivals.gains",
    "quorumark.research.lab.rivals.harness",
    "quorumark.research.lab.rivals.methods",
    "quorumark.research.lab.rivals.triggers",
    "quorumark.research.lab.series",
    "quorumark.research.lab.timing",
    "quorumark.research.lab.language_run",
    "quorumark.research.lab.workbench",
    "quorumark.room.agent_page",
    "quorumark.room.forms",
    "quorumark.room.pages",
    "quorumark.room.server",
    "quorumark.trial.templates.images",
    "quorumark.trial.templates.tables",
    "quorumark.trial.templates.text",
}
OPTIONAL = {  # outside the core, each allowed in these places only, and inside a function there
    "torch": {
        "quorumark.doctor",
        "quorumark.field._triton",
        "quorumark.field.parts_on_device",
        "quorumark.field._random",
        "quorumark.model.layout",
        "quorumark.simulation",
        "quorumark.model.usercode",
        "quorumark.model.tensors",
        "quorumark.align.trace.atoms",
        "quorumark.align.trace.check",
        "quorumark.align.trace.running",
        "quorumark.align.trace.sign_trace",
        "quorumark.align.trace.symmetries",
        "quorumark.research.attacks.base",
        "quorumark.demo",
        "quorumark.research.attacks.demo",
        "quorumark.research.bench.align",
        "quorumark.research.bench.dealer",
        "quorumark.research.bench.dkg",
        "quorumark.research.bench.field",
        "quorumark.research.bench.peers",
        "quorumark.research.lab._kernels",
        "quorumark.research.lab._norms",
        "quorumark.research.lab.attack",
        "quorumark.research.lab.augment",
        "quorumark.research.lab.data",
        "quorumark.research.lab.fleet",
        "quorumark.research.lab.language",
        "quorumark.research.lab.null",
        "quorumark.research.lab.removal",
        "quorumark.research.lab.scores",
        "quorumark.research.lab.language_run",
        "quorumark.research.known",
        "quorumark.research.lab.dither",
        "quorumark.research.lab.federated_run",
        "quorumark.research.lab.image_run",
        "quorumark.research.lab.mark",
        "quorumark.research.lab.packed",
        "quorumark.research.lab.papercode",
        "quorumark.research.lab.parted",
        "quorumark.research.lab.masked",
        "quorumark.research.lab.models",
        "quorumark.research.lab.observer",
        "quorumark.research.lab.retrain",
        "quorumark.research.lab.rivals.gains",
        "quorumark.research.lab.rivals.harness",
        "quorumark.research.lab.rivals.methods",
        "quorumark.research.lab.rivals.triggers",
        "quorumark.research.lab.series",
        "quorumark.research.lab.results",
        "quorumark.research.lab.timing",
        "quorumark.trial.templates.images",
        "quorumark.trial.templates.tables",
        "quorumark.trial.templates.text",
        "quorumark.trial.userfile",
        "quorumark.cli.lab",
    },
    "transformers": {"quorumark.research.bench.align", "quorumark.research.lab.language"},
    "tokenizers": {"quorumark.research.lab.text"},
    "triton": {"quorumark.field._triton", "quorumark.research.lab._kernels", "quorumark.research.lab._norms"},
    "PIL": {"quorumark.research.lab.data"},
    "torchvision": {"quorumark.research.lab.data"},
    "sklearn": {
        "quorumark.demo",
        "quorumark.research.lab.data",
        "quorumark.trial.templates.images",
        "quorumark.trial.templates.tables",
    },
    "galois": {"quorumark.research.bench.peers"},
    "matplotlib": {
        "quorumark.research.bench.plot",
        "quorumark.research.lab.plot",
        "quorumark.research.lab.rivals.picture",
        "quorumark.research.page",
        "quorumark.report.calibration",
    },
    "flwr": {
        "quorumark.research.bench.flower",
        "quorumark.research.bench.secagg",
        "quorumark.flower.client",
        "quorumark.flower.optimisers",
        "quorumark.flower.server",
        "quorumark.flower.wire",
    },
    "nvflare": {
        "quorumark.nvflare",
        "quorumark.nvflare.controller",
        "quorumark.nvflare.job",
        "quorumark.nvflare.site",
        "quorumark.nvflare.wire",
    },
    "ray": {"quorumark.research.bench.flower"},
    "python_multipart": {"quorumark.room.forms"},
    "starlette": {"quorumark.room.agent_page", "quorumark.room.forms", "quorumark.room.pages", "quorumark.room.server"},
    "uvicorn": {"quorumark.room.agent_page", "quorumark.room.server"},
}


def _room(module: str) -> str | None:
    return next((room for room in ORDER if module == room or module.startswith(room + ".")), None)


def _modules(root: Path) -> dict[str, Path]:
    source = root / "src"
    return {
        ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted((source / "quorumark").rglob("*.py"))
    }


def _imports(path: Path) -> list[tuple[str, bool]]:
    """(module, whether at the top level) for every import statement; what is for type checkers only is not."""
    tree = ast.parse(path.read_text())
    nested = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) not in nested) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: write imports in full"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [(name, id(node) not in nested) for name in names]
    return found


def test_every_module_has_its_room(root: Path) -> None:
    homeless = [m for m in _modules(root) if m != "quorumark" and _room(m) is None]
    assert not homeless, f"add these to ORDER: {homeless}"


def test_imports_point_one_way(root: Path) -> None:
    wrong = []
    for module, path in _modules(root).items():
        here = _room(module)
        for name, _ in _imports(path):
            there = _room(name)
            if here and there and ORDER.index(there) > ORDER.index(here):
                wrong.append(f"{module} imports {name}")
    assert not wrong


def test_no_module_imports_itself_in_a_circle(root: Path) -> None:
    """Imports inside functions count: what can only be imported late belongs somewhere else."""
    modules = _modules(root)
    graph = {
        module: {found for name, _ in _imports(path) if (found := _module_of(name, modules)) not in (None, module)}
        for module, path in modules.items()
    }
    while True:  # take away what imports nothing that is left, or is imported by nothing that is left
        needed = {name for needs in graph.values() for name in needs}
        rest = {m: needs & graph.keys() for m, needs in graph.items() if needs & graph.keys() and m in needed}
        if rest == graph:
            break
        graph = rest
    assert not graph, f"these modules import each other: {sorted(graph)}"


def test_no_private_name_crosses_a_package(root: Path) -> None:
    modules = _modules(root)
    wrong = []
    for module, path in modules.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for name, _ in _imports(path):
            parts = name.split(".")
            private = next((i for i, part in enumerate(parts) if part.startswith("_") and not part.startswith("__")), 0)
            if parts[0] == "quorumark" and private and not package.startswith(_package_of(parts[:private], modules)):
                wrong.append(f"{module} imports {name}")
    assert not wrong


def _module_of(name: str, modules: Mapping[str, Path]) -> str | None:
    """The module that an imported name is, or is in."""
    return next((n for n in (name, name.rpartition(".")[0]) if n in modules), None)


def _package_of(parts: list[str], modules: Mapping[str, Path]) -> str:
    name = ".".join(parts)
    return name if modules[name].name == "__init__.py" else name.rpartition(".")[0]


def test_packages_outside_the_core_are_where_they_belong(root: Path) -> None:
    standard = sys.stdlib_module_names
    wrong = []
    for module, path in _modules(root).items():
        for name, at_top in _imports(path):
            package = name.partition(".")[0]
            if package in standard or package in CORE or package == "quorumark":
                continue
            if module not in OPTIONAL.get(package, set()) or (at_top and module not in WHOLE):
                wrong.append(f"{module} imports {name}")
    assert not wrong


def test_nothing_imports_a_whole_package_by_the_way(root: Path) -> None:
    """Torch stays away until a command of the lab runs: only these modules import each other at the top."""
    wrong = []
    for module, path in _modules(root).items():
        for name, at_top in _imports(path):
            if at_top and module not in WHOLE and any(name == w or name.startswith(w + ".") for w in WHOLE):
                wrong.append(f"{module} imports {name}")
    assert not wrong


def _python(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "module", ["field", "shamir", "codec", "model.layout", "consortium.strength", "round.amplitudes"]
)
def test_the_mathematics_imports_without_cryptography_torch_or_flower(module: str) -> None:
    _python(
        "import sys\n"
        "for name in ('cryptography', 'torch', 'triton', 'flwr', 'safetensors', 'rich', 'typer'):\n"
        "    sys.modules[name] = None\n"
        f"import quorumark.{module}\n"
        "import numpy as np\n"
        "from quorumark import field, errors\n"
        "x = np.arange(1, 20, dtype=np.uint64)\n"
        "assert field.dot(x, field.inv(x)) == 19\n"
        "try: field.random(3)\n"
        "except errors.MissingDependencyError as error: assert 'cryptography' in str(error)\n"
        "else: raise SystemExit('random numbers from nowhere')\n"
    )


def test_the_lab_runs_without_cryptography(tmp_path: Path) -> None:
    """The GPU path needs numpy, numba, torch and typer only."""
    config = tmp_path / "mini.toml"
    config.write_text(
        'title = "mini"\n[run]\ndataset = "shapes"\nmodel = "mlp"\nstrength = "rho:0.05"\n'
        "members = 2\nrounds = 3\nglobal_batch = 240\n"
    )
    _python(
        "import sys\n"
        "for name in ('cryptography', 'flwr', 'safetensors', 'PIL', 'sklearn', 'matplotlib'):\n"
        "    sys.modules[name] = None\n"
        "import torch\n"
        "torch.set_num_threads(1)\n"
        "from typer.testing import CliRunner\n"
        "from quorumark.cli import app\n"
        f"words = ['lab', 'run', {str(config)!r}, '--results', {str(tmp_path)!r}, '--runs', {str(tmp_path)!r}]\n"
        "done = CliRunner().invoke(app, words, catch_exceptions=False)\n"
        "assert '3 rounds' in done.output, done.output\n"
    )


def test_help_is_quick() -> None:
    """No numpy, numba or cryptography for a help text."""
    loaded = _python(
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from quorumark.cli import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "heavy = {'numpy', 'numba', 'torch', 'cryptography'}\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & heavy))\n"
    )
    assert loaded.strip() == "[]"


def test_a_room_passes_on_and_computes_nothing() -> None:
    """The server's side needs neither arithmetic nor what trains models: a small machine will do."""
    for extra in (
        "starlette",
        "jinja2",
        "multipart",
        "uvicorn",
    ):  # of `room`; anything else that is missing is an error
        pytest.importorskip(extra)
    loaded = _python(
        "import sys, tempfile\n"
        "from pathlib import Path\n"
        "from quorumark.room.server import make_app\n"
        "make_app(Path(tempfile.mkdtemp()), 'http://127.0.0.1:1')\n"
        "heavy = {'numpy', 'numba', 'torch', 'safetensors'}\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & heavy))\n"
    )
    assert loaded.strip() == "[]"


def test_what_members_use_in_earnest_does_not_reach_the_research_door(root: Path) -> None:
    """Not even inside functions: z with a known key needs no ledger, and must never be a step away."""
    modules = _modules(root)
    start = [
        m
        for m in modules
        if m.startswith(
            ("quorumark.verify", "quorumark.flower", "quorumark.nvflare", "quorumark.node", "quorumark.room.")
        )
    ]
    seen: set[str] = set()
    waiting = [*start, "quorumark.cli.verify", "quorumark.cli.audit", "quorumark.cli.member", "quorumark.cli.share"]
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        for name, _ in _imports(modules[module]):
            found = name if name in modules else name.rpartition(".")[0]  # a module, or a name in one
            waiting += [found] if found in modules and found != "quorumark" else []
    assert "quorumark.verify.check" in seen
    assert "quorumark.consortium.records" in seen
    assert not {m for m in seen if m.startswith("quorumark.research")}


def test_test_files_do_not_import_each_other_and_stay_short(root: Path) -> None:
    """What two of them need is in tests/kit."""
    wrong = []
    for path in sorted((root / "tests").rglob("*.py")):
        wrong += [f"{path.name} imports {name}" for name, _ in _imports(path) if ".test_" in name]
        if len(path.read_text(encoding="utf-8").splitlines()) > 1000:
            wrong.append(f"{path.name} has more than 1000 lines")
    assert not wrong


def test_the_walks_of_contributing_go_one_way(root: Path) -> None:
    """Each file of a walk is there, is imported by an earlier one, and imports only from later ones."""
    modules, text = _modules(root), (root / "CONTRIBUTING.md").read_text(encoding="utf-8")
    walks = [re.findall(r"^\| `([\w/]+\.py)` \|", part, re.MULTILINE) for part in text.split("### A walk: ")[1:]]
    assert [len(walk) for walk in walks] == [17, 17]
    for walk in walks:
        names = ["quorumark." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in walk]
        for place, name in enumerate(names):
            found = {_module_of(imported, modules) for imported, _ in _imports(modules[name])}
            assert not found & set(names[:place]), f"{name} goes back"
            assert place == 0 or any(
                name == _module_of(imported, modules)
                for before in names[:place]
                for imported, _ in _imports(modules[before])
            ), f"nothing before it leads to {name}"


def test_source_files_stay_short(root: Path) -> None:
    """A file above 700 lines usually holds two things. Kernels are one file: numba's cache watches no other."""
    lengths = {m: len(path.read_text(encoding="utf-8").splitlines()) for m, path in _modules(root).items()}
    assert not {m for m, length in lengths.items() if length > 700 and m != "quorumark.field.kernels"}
