"""The rooms of the package stand in one order, and no import goes up: not at the top of a file, and not inside a function.

Foundations are single files that any room may use; among themselves they must not form a circle. Imports that only type checkers
read do not run and do not count. The registry's look-up of a method's home by name is the one way up.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.architecture.test_import_rules import (
    IMPORT_EVERYTHING,
    INNOCENT,
    ROOT,
    Source,
    heavy_modules,
    imported,
    inside,
    plant,
    sources,
)

FOUNDATIONS = ("errors", "records", "adversary", "tensors", "recording", "randomness", "significance", "registry", "provenance")
ROOMS = (
    *("study", "storage", "data", "models", "networks", "learning", "spectra", "proofs", "wire"),
    *("defenses", "client", "federation", "attacks", "metrics", "risk", "audit", "run", "verdict", "report"),
    *("flower", "nvflare", "testing", "cli"),
)
ORDER = {room: place for place, room in enumerate(ROOMS)}
WITHOUT_TORCH = ("study", "storage", "verdict", "report", "cli")
MOST_BEHIND_THE_DOOR = 60


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def targets(source: Source, package: Mapping[str, Source]) -> list[tuple[str, int]]:
    """Return every module of the package that a file imports, with the line."""
    found = []
    for name, node in imported(source):
        if inside(name, "gradveil"):
            module = name if name in package else name.rpartition(".")[0]
            found.append((module if module in package else "", getattr(node, "lineno", 0)))
    return found


def imports_go_down(root: Path) -> list[str]:
    """A room imports only from rooms above it in the list, lazily or not; the front door is for visitors."""
    package = sources(root)
    complaints = []
    for source in package.values():
        room = room_of(source.module)
        if source.module in ("gradveil", "gradveil.__main__"):
            continue
        if room not in ORDER and room not in FOUNDATIONS:
            complaints.append(f"{source.module} stands in no declared room")
            continue
        for module, line in targets(source, package):
            other = room_of(module)
            if other in ORDER and (room in FOUNDATIONS or ORDER[other] > ORDER[room]):
                complaints.append(f"{source.module}:{line} imports {module}, which stands below it")
    return complaints


def foundations_form_no_circle(root: Path) -> list[str]:
    """Among the foundations imports have an order too, whatever it is."""
    package = sources(root)
    left = {name: set[str]() for name in FOUNDATIONS if f"gradveil.{name}" in package}
    for name in left:
        found = {room_of(module) for module, _ in targets(package[f"gradveil.{name}"], package)}
        left[name] = {other for other in found if other in left and other != name}
    while free := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in free:
            del left[name]
    return [f"{name} is part of a circle" for name in left]


RULES = (imports_go_down, foundations_form_no_circle)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_holds_here_and_on_what_is_allowed(rule: type, tmp_path: Path) -> None:
    assert rule(ROOT) == []
    plant(tmp_path, INNOCENT)
    assert rule(tmp_path) == []


@pytest.mark.parametrize(
    ("rule", "file", "text"),
    [
        (imports_go_down, "data/files.py", "from gradveil.defenses import base"),
        (imports_go_down, "data/files.py", "def f():\n    from gradveil.audit.cell import run_cell"),
        (imports_go_down, "data/files.py", "def f():\n    import gradveil.cli"),
        (imports_go_down, "study/plan.py", "import importlib\nimportlib.import_module('gradveil.data')"),
        (imports_go_down, "attacks/dlg.py", "class A:\n    def f(self):\n        from ..metrics import psnr"),
        (imports_go_down, "tensors.py", "from gradveil.learning import learner"),
        (imports_go_down, "helpers/misc.py", "x = 1"),
        (foundations_form_no_circle, "tensors.py", "from gradveil import errors\nfrom gradveil.records import Batch"),
    ],
)
def test_the_rule_finds_a_planted_fault(rule: type, file: str, text: str, tmp_path: Path) -> None:
    rooms = ("defenses", "audit", "cli", "data", "metrics", "learning", "study")
    names = {"defenses": "base", "audit": "cell", "metrics": "psnr", "learning": "learner"}
    files = {f"src/gradveil/{room}/__init__.py": "" for room in rooms}
    files |= {f"src/gradveil/{room}/{name}.py": "" for room, name in names.items()}
    files |= {"src/gradveil/errors.py": "", "src/gradveil/records.py": "def f():\n    import gradveil.tensors\n"}
    plant(tmp_path, {**INNOCENT, **files})
    assert rule(tmp_path) == []
    plant(tmp_path, {f"src/gradveil/{file}": text})
    assert rule(tmp_path)


def test_no_file_is_named_after_a_drawer_and_every_room_is_declared() -> None:
    there = {path.parent.name for path in (ROOT / "src" / "gradveil").glob("*/__init__.py")}
    assert there <= set(ROOMS)
    assert there | {"flower", "nvflare"} == set(ROOMS), "a room that is declared and not built"


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_rooms_for_people_open_without_torch(room: str) -> None:
    assert heavy_modules(IMPORT_EVERYTHING.format(room=f"gradveil.{room}"), "torch") == ""


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


DOOR = """
import sys
import gradveil.client
gradveil.client.build_defense("svdefense")
print(len([name for name in sys.modules if name.split(".")[0] == "gradveil"]))
print(*sorted({"scipy", "sklearn", "skimage", "jinja2", "typer", "rich", "PIL"} & set(sys.modules)))
"""


def test_the_door_for_clients_is_light() -> None:
    count, heavy = run_python(DOOR).split("\n")[:2]
    assert heavy == ""
    assert int(count) <= MOST_BEHIND_THE_DOOR


CATALOGUE = """
import sys
from gradveil.cli import main
for words in (["list", "defenses"], ["list", "networks"], ["show", "svdefense"], ["show", "evaluation-32"]):
    assert main(words) == 0
sys.exit("torch was loaded" if "torch" in sys.modules else 0)
"""


def test_the_catalogue_answers_without_torch() -> None:
    assert "svdefense" in run_python(CATALOGUE)
