"""The rules of the design that show in imports and calls, checked by reading the package, not by running it.

A rule takes the root of a checkout and returns complaints. Each rule is run on this checkout, and on small planted faults that it
must find, so that a rule that went blind is noticed.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HIDDEN_FROM_ATTACKS = ("gradveil.data", "gradveil.defenses", "gradveil.client", "gradveil.federation")
PICKLERS = {"_pickle", "cloudpickle", "cPickle", "dill", "joblib", "marshal", "pickle", "shelve"}

# Making an own generator is the point; reading the state of a global one is harmless, and the contract suites do it.
HARMLESS = {
    "numpy.random": {"BitGenerator", "Generator", "PCG64", "Philox", "SFC64", "SeedSequence", "default_rng", "get_state"},
    "random": {"Random", "getstate"},
}
SEEDING = {"torch.manual_seed", "torch.seed", "torch.set_rng_state", "torch.random.manual_seed", "torch.random.seed"}
DRAWS = re.compile(r"torch\.(bernoulli|multinomial|normal|poisson|rand|randn|randint|randperm)(_like)?")
DRAWS_IN_PLACE = re.compile(
    r"((kaiming|xavier)_(normal|uniform)|(log_|trunc_)?normal|bernoulli|cauchy|exponential|geometric|orthogonal|random|sparse|uniform)_"
)


@dataclass(frozen=True)
class Source:
    """One parsed file of the package."""

    path: Path
    module: str
    tree: ast.Module

    @property
    def package(self) -> str:
        """The package that relative imports start from."""
        return self.module if self.path.name == "__init__.py" else self.module.rpartition(".")[0]


@cache
def parsed(text: str) -> ast.Module:
    """Parse a file once, however many rules read it; rules only look."""
    return ast.parse(text)


def sources(root: Path) -> dict[str, Source]:
    """Parse the package, by module name."""
    found = {}
    for path in sorted((root / "src" / "gradveil").rglob("*.py")):
        parts = path.relative_to(root / "src").with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[module] = Source(path, module, parsed(path.read_text(encoding="utf-8")))
    return found


def nodes(tree: ast.AST, *, lazy: bool = True) -> Iterator[ast.AST]:
    """Walk a tree without blocks for type checkers and, unless ``lazy``, without bodies of functions."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and ast.unparse(child.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            for node in child.orelse:
                yield node
                yield from nodes(node, lazy=lazy)
        elif lazy or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from nodes(child, lazy=lazy)


def imported(source: Source, *, lazy: bool = True) -> Iterator[tuple[str, ast.AST]]:
    """Yield every dotted name a file imports; ``from a import b`` gives both ``a`` and ``a.b``."""
    for node in nodes(source.tree, lazy=lazy):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = import_base(source, node)
            yield base, node
            yield from ((f"{base}.{alias.name}", node) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value, node


def import_base(source: Source, node: ast.ImportFrom) -> str:
    """Return the absolute module of a ``from ... import``."""
    if not node.level:
        return node.module or ""
    above = source.package.split(".")
    return ".".join([*above[: len(above) - node.level + 1], *([node.module] if node.module else [])])


def inside(name: str, *packages: str) -> bool:
    """Tell whether a dotted name is one of the packages or within."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def place(source: Source, node: ast.AST) -> str:
    """Return where to look: module and line."""
    return f"{source.module}:{getattr(node, 'lineno', '?')}"


def attacks_cannot_reach_the_truth(root: Path) -> list[str]:
    """`attacks` never imports data, defenses or federation: not even inside a function, nor through what it imports."""
    package = sources(root)
    queue: deque[tuple[str, tuple[str, ...]]] = deque((name, (name,)) for name in package if inside(name, "gradveil.attacks"))
    seen = {name for name, _ in queue}
    complaints = []
    while queue:
        module, chain = queue.popleft()
        for name, _ in imported(package[module], lazy=len(chain) == 1):
            if inside(name, *HIDDEN_FROM_ATTACKS):
                complaints.append(" -> ".join((*chain, name)))
                continue
            parts = name.split(".")
            for step in (".".join(parts[:length]) for length in range(1, len(parts) + 1)):  # importing a.b runs a too
                if step in package and step not in seen:
                    seen.add(step)
                    queue.append((step, (*chain, step)))
    return complaints


def the_front_door_is_for_visitors(root: Path) -> list[str]:
    """Inside the package nobody takes lazy names from the top level, which would hide what is really imported."""
    package = sources(root)
    modules = {*package, "gradveil.__version__"}
    return [
        f"{place(source, node)} imports {alias.name} from gradveil; import it from the module that defines it"
        for source in package.values()
        for node in nodes(source.tree)
        if isinstance(node, ast.ImportFrom) and import_base(source, node) == "gradveil"
        for alias in node.names
        if f"gradveil.{alias.name}" not in modules
    ]


def names_in_scope(tree: ast.Module) -> dict[str, str]:
    """Map the names a file imported to the dotted names they stand for."""
    scope = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                scope[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module:
            scope.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return scope


def dotted(node: ast.AST, scope: dict[str, str]) -> str:
    """Return the dotted name behind an expression, or nothing if it does not start at an import."""
    if isinstance(node, ast.Name):
        return scope.get(node.id, "")
    if isinstance(node, ast.Attribute):
        base = dotted(node.value, scope)
        return f"{base}.{node.attr}" if base else ""
    return ""


def keyword(call: ast.Call, name: str) -> object:
    """Return a keyword's constant value, its expression if it has none, or None where it is not given."""
    for given in call.keywords:
        if given.arg == name:
            return given.value.value if isinstance(given.value, ast.Constant) else given.value
    return None


def nothing_is_pickled(root: Path) -> list[str]:
    """No pickling module, no `torch.save`, `torch.load` only of plain tensors, no pickled arrays."""
    complaints = []
    for source in sources(root).values():
        complaints += [
            f"{place(source, node)} imports {name}"
            for name, node in imported(source)
            if name.split(".")[0] in PICKLERS
            and ast.unparse(node) != "from pickle import UnpicklingError"  # to catch torch.load's
        ]
        scope = names_in_scope(source.tree)
        for call in (node for node in ast.walk(source.tree) if isinstance(node, ast.Call)):
            name = dotted(call.func, scope)
            if name == "torch.save":
                complaints.append(f"{place(source, call)} pickles with torch.save; write safetensors")
            if name == "torch.load" and keyword(call, "weights_only") is not True:
                complaints.append(f"{place(source, call)} calls torch.load without weights_only=True")
            if keyword(call, "allow_pickle") not in (None, False):
                complaints.append(f"{place(source, call)} allows pickled arrays")
    return complaints


def randomness_is_handed_in(root: Path) -> list[str]:
    """No seeding of, and no drawing from, the global generators; a forked generator, put back afterwards, is allowed."""
    complaints = []
    for source in sources(root).values():
        scope = names_in_scope(source.tree)
        forked = {
            id(inner)
            for block in ast.walk(source.tree)
            if isinstance(block, ast.With) and any("fork_rng" in ast.unparse(item.context_expr) for item in block.items)
            for inner in ast.walk(block)
        }
        complaints += [
            f"{place(source, node)}: {fault}"
            for node in ast.walk(source.tree)
            if id(node) not in forked and (fault := global_randomness(node, scope, source.module))
        ]
    return complaints


def global_randomness(node: ast.AST, scope: dict[str, str], module: str) -> str:
    """Say how a node uses a global generator, or nothing if it does not.

    Models may fill their weights in place without one, as PyTorch's own layers do: who builds a model forks the generator first.
    """
    name = dotted(node, scope)
    origin, _, last = name.rpartition(".")
    if origin in HARMLESS and last not in HARMLESS[origin]:
        return f"{name} uses the global generator"
    if name in SEEDING or (inside(name, "torch.cuda", "torch.mps") and "seed" in last):
        return f"{name} changes the global generator"
    if inside(name, "torch.distributions"):
        return f"{name} cannot take a generator"
    if isinstance(node, ast.Call) and not any(given.arg in {"generator", None} for given in node.keywords):
        called = dotted(node.func, scope)
        method = node.func.attr if isinstance(node.func, ast.Attribute) else called.rpartition(".")[2]
        in_place = DRAWS_IN_PLACE.fullmatch(method) and not inside(module, "gradveil.models")
        if DRAWS.fullmatch(called) or in_place:
            return f"{method} draws without generator="
    return ""


def torchvision_is_not_needed(root: Path) -> list[str]:
    """Its wheel cannot be imported beside the CPU build of torch, so nothing may come to need it."""
    files = [
        path for folder in ("src", "tests", "examples", "benchmarks", "studies") for path in sorted((root / folder).rglob("*.py"))
    ]
    read = [Source(path, str(path.relative_to(root)), parsed(path.read_text(encoding="utf-8"))) for path in files]
    return [
        f"{place(source, node)} imports {name}"
        for source in read
        for name, node in imported(source)
        if inside(name, "torchvision")
    ]


Rule = Callable[[Path], list[str]]
RULES: tuple[Rule, ...] = (
    attacks_cannot_reach_the_truth,
    the_front_door_is_for_visitors,
    nothing_is_pickled,
    randomness_is_handed_in,
    torchvision_is_not_needed,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_holds_here(rule: Rule) -> None:
    assert sources(ROOT), "found no package to check"
    assert rule(ROOT) == []


INNOCENT = {
    "src/gradveil/__init__.py": "def __getattr__(name):\n    import gradveil.data\n",
    "src/gradveil/tensors.py": "import torch\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import gradveil.data\n",
    "src/gradveil/data/__init__.py": "import numpy as np\nrng = np.random.default_rng(0)\nx = rng.normal(size=3)\n",
    "src/gradveil/attacks/__init__.py": "from gradveil import tensors\n",
    "src/gradveil/models/__init__.py": (
        "import torch\nwith torch.random.fork_rng(devices=[]):\n    torch.manual_seed(1)\n"
        "g = torch.Generator()\ng.manual_seed(1)\nx = torch.rand(3, generator=g).normal_(generator=g)\n"
        "w.uniform_(-1, 1)\nfrom pickle import UnpicklingError\ntorch.load('f', weights_only=True)\n"
    ),
}


def plant(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_accepts_what_is_allowed(rule: Rule, tmp_path: Path) -> None:
    plant(tmp_path, INNOCENT)
    assert rule(tmp_path) == []


@pytest.mark.parametrize(
    ("rule", "file", "text"),
    [
        (attacks_cannot_reach_the_truth, "attacks/dlg.py", "from gradveil import data"),
        (attacks_cannot_reach_the_truth, "attacks/dlg.py", "from ..defenses.base import Defense"),
        (attacks_cannot_reach_the_truth, "attacks/dlg.py", "def run():\n    import gradveil.client.update"),
        (attacks_cannot_reach_the_truth, "attacks/dlg.py", "import importlib\nimportlib.import_module('gradveil.data')"),
        (attacks_cannot_reach_the_truth, "tensors.py", "try:\n    from gradveil.data import photos\nexcept ImportError: ..."),
        (the_front_door_is_for_visitors, "attacks/dlg.py", "from gradveil import run_audit"),
        (the_front_door_is_for_visitors, "errors.py", "from . import Batch"),
        (nothing_is_pickled, "wire/codec.py", "def load():\n    import pickle"),
        (nothing_is_pickled, "wire/codec.py", "from joblib import load"),
        (nothing_is_pickled, "wire/codec.py", "import torch\ntorch.load('f')"),
        (nothing_is_pickled, "wire/codec.py", "from torch import load\nload('f', weights_only=False)"),
        (nothing_is_pickled, "wire/codec.py", "import torch\ntorch.save({}, 'f')"),
        (nothing_is_pickled, "wire/codec.py", "import numpy as np\nnp.load('f', allow_pickle=True)"),
        (randomness_is_handed_in, "data/photos.py", "import torch\ntorch.manual_seed(0)"),
        (randomness_is_handed_in, "data/photos.py", "import torch\ntorch.cuda.manual_seed_all(0)"),
        (randomness_is_handed_in, "data/photos.py", "import torch\nx = torch.randn(3)"),
        (randomness_is_handed_in, "data/photos.py", "def f(x):\n    return x.clone().uniform_(0, 1)"),
        (randomness_is_handed_in, "data/photos.py", "from torch.nn.init import xavier_uniform_\nxavier_uniform_(w)"),
        (randomness_is_handed_in, "data/photos.py", "from torch.distributions import Laplace\nLaplace(0, 1)"),
        (randomness_is_handed_in, "data/photos.py", "import numpy as np\nnp.random.seed(0)"),
        (randomness_is_handed_in, "data/photos.py", "from numpy.random import rand\nrand(3)"),
        (randomness_is_handed_in, "data/photos.py", "import random\nrandom.random()"),
        (torchvision_is_not_needed, "models/resnet.py", "def f():\n    from torchvision.models import resnet18"),
    ],
)
def test_the_rule_finds_a_planted_fault(rule: Rule, file: str, text: str, tmp_path: Path) -> None:
    plant(tmp_path, {**INNOCENT, f"src/gradveil/{file}": text})
    assert rule(tmp_path)


IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
package = importlib.import_module({room!r})
for found in pkgutil.walk_packages(getattr(package, "__path__", []), package.__name__ + "."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
"""
ASK_FOR_HELP = """
import sys
from gradveil.cli import main
for command in ("", "audit", "risk", "train", "init", "list", "show", "report", "recommend", "study run", "study table", "check"):
    sys.argv = ["gradveil", *command.split(), "--help"]
    try:
        status = main()
    except SystemExit as end:
        status = end.code
    if status:
        sys.exit(f"{sys.argv} ended with {status}")
"""
HEAVY = ("torch", "scipy", "skimage", "sklearn")
REFUSE_HEAVY = """
heavy = sorted({names} & set(sys.modules))
sys.exit("loaded: " + ", ".join(heavy) if heavy else 0)
"""


def heavy_modules(code: str, *names: str) -> str:
    """Run code in a fresh interpreter; return its complaint, empty if it loaded nothing heavy."""
    refuse = REFUSE_HEAVY.format(names=set(names or HEAVY))
    done = subprocess.run([sys.executable, "-c", code + refuse], capture_output=True, text=True, timeout=120, check=False)
    return done.stderr.strip() or ("failed" if done.returncode else "")


def skip_unwritten(room: str) -> None:
    if not (ROOT / "src" / room.replace(".", "/") / "__init__.py").is_file():
        pytest.skip(f"{room} is not written yet")


@pytest.mark.parametrize("room", ["gradveil", "gradveil.report", "gradveil.cli"])
def test_importing_stays_light(room: str) -> None:
    skip_unwritten(room)
    code = f"import sys, {room}" if room == "gradveil" else IMPORT_EVERYTHING.format(room=room)
    assert heavy_modules(code) == ""


def test_help_stays_light() -> None:
    skip_unwritten("gradveil.cli")
    assert heavy_modules(ASK_FOR_HELP) == ""


def test_a_heavy_import_is_noticed() -> None:
    assert "torch" in heavy_modules(IMPORT_EVERYTHING.format(room="gradveil.tensors"))
