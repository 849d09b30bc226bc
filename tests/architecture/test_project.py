"""The project as a newcomer and as a package index see it: first commands, versions, names, files."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import gradveil
from tests.architecture.test_rooms import ROOMS

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LONGEST = 400
OF_MANY_METHODS = {"defenses", "attacks"}
DRAWERS = {"common", "helper", "helpers", "misc", "util", "utils"}

# Spelt in pieces, so that this file does not name what it forbids.
MACHINE_PATH = re.compile(r"(?<![\w./-])/(?:" + "|".join(["wo" + "rk", "fa" + "rm", "ro" + "ot"]) + r")/\w")
REGISTRY = re.compile("|".join([r"pypi\." + "org", "python" + "hosted", r"pytorch\.org/" + "whl", "--(extra-)?index" + "-url"]))


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def test_readme_leads_with_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\w*\n(.*?)^```", readme, flags=re.MULTILINE | re.DOTALL)
    assert blocks, "README shows no command"
    assert re.search(r"^make audit\b", blocks[0], flags=re.MULTILINE)
    assert re.search(r"^make test\b", blocks[0], flags=re.MULTILINE)
    assert readme[: readme.index(blocks[0])].count("\n") < 40, "the commands are not on the first screen"


@pytest.mark.parametrize("text", [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]])
def test_every_dependency_is_pinned_within_its_range(text: str) -> None:
    wanted = Requirement(text)
    assert wanted.specifier.contains(pins()[canonicalize_name(wanted.name)])


def test_pins_are_exact_and_name_no_special_build() -> None:
    assert "torch" in pins()
    wrong = {name: version for name, version in pins().items() if not re.fullmatch(r"\d+(\.\d+)*", version)}
    assert wrong == {}


def test_every_dependency_is_explained() -> None:
    text = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    declared = [*PROJECT["dependencies"], *(each for extra in PROJECT["optional-dependencies"].values() for each in extra)]
    missing = [name for name in (Requirement(each).name for each in declared) if f"`{name}`" not in text]
    assert missing == []


def tracked_files() -> list[Path]:
    """List what is, or would be, committed."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_the_tree_stays_light_enough_to_clone_by_the_way() -> None:
    heaviest = sorted(((path.stat().st_size, path.name) for path in tracked_files()), reverse=True)
    total = sum(size for size, _ in heaviest)
    assert total <= 24 * 2**20, f"tracked files are {total / 2**20:.1f} MiB, more than 24; the heaviest are {heaviest[:5]}"


def foreign_names(text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), start=1):
        if MACHINE_PATH.search(line) or REGISTRY.search(line):
            yield f"{number}: {line.strip()[:120]}"


def test_no_machine_path_or_registry_is_named() -> None:
    files = tracked_files()
    assert ROOT / "pyproject.toml" in files
    found = [
        f"{path.relative_to(ROOT)}:{hit}"
        for path in files
        for hit in foreign_names(path.read_bytes().decode("utf-8", errors="ignore"))
    ]
    assert found == []


@pytest.mark.parametrize(
    "line", ["see /wo" + "rk/main/x", "'/ro" + "ot/x'", "https://pypi." + "org/simple", "--index" + "-url x"]
)
def test_foreign_names_are_noticed(line: str) -> None:
    assert list(foreign_names(line))


@pytest.mark.parametrize("line", ["src/gradveil/work/x", "../shared/data", "https://example.org/homes/", "/usr/bin/chromium"])
def test_ordinary_paths_are_left_alone(line: str) -> None:
    assert not list(foreign_names(line))


def crowded_files(root: Path) -> list[str]:
    files = [path for folder in ("src", "tests") for path in sorted((root / folder).rglob("*.py"))]
    lengths = {path.relative_to(root): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    return [f"{path} has {length} lines" for path, length in lengths.items() if length > LONGEST]


def misplaced_files(root: Path) -> list[str]:
    """Folders of the design, and no drawers; only a room of many methods has a folder for one of several files."""
    complaints = []
    for path in sorted((root / "src" / "gradveil").rglob("*.py")):
        *folders, name = path.relative_to(root / "src" / "gradveil").with_suffix("").parts
        if len(folders) > (2 if folders and folders[0] in OF_MANY_METHODS else 1):
            complaints.append(f"{path} is too deep")
        if folders and folders[0] not in ROOMS:
            complaints.append(f"{path} is in a folder that the design does not have")
        if any(DRAWERS & set(part.split("_")) for part in (*folders, name)):
            complaints.append(f"{path} is a drawer; name it by what it holds")
    return complaints


def test_files_are_short_and_in_their_place() -> None:
    assert crowded_files(ROOT) == []
    assert misplaced_files(ROOT) == []


@pytest.mark.parametrize("name", ["plumbing/pipes.py", "data/sources/photos.py", "data/image_utils.py", "helpers.py"])
def test_a_misplaced_file_is_noticed(name: str, tmp_path: Path) -> None:
    path = tmp_path / "src" / "gradveil" / name
    path.parent.mkdir(parents=True)
    path.write_text("x = 1\n" * (LONGEST + 1), encoding="utf-8")
    assert misplaced_files(tmp_path)
    assert crowded_files(tmp_path)


def typed_names() -> dict[str, str]:
    """Read the block that type checkers see."""
    tree = ast.parse(Path(gradveil.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


def test_public_names_are_the_same_for_people_and_type_checkers() -> None:
    assert typed_names() == gradveil._PUBLIC


@pytest.mark.parametrize("name", sorted(gradveil._PUBLIC))
def test_public_names_are_where_the_table_says(name: str) -> None:
    value = getattr(gradveil, name)
    assert value.__module__.startswith(gradveil._PUBLIC[name])  # a room's front door, or the module itself
    assert name in dir(gradveil)


def test_public_names_are_few_and_none_hides_a_folder() -> None:
    assert len(gradveil._PUBLIC) <= 35
    assert set(ROOMS).isdisjoint(gradveil._PUBLIC)


def test_a_misspelt_public_name_is_answered_with_the_right_one() -> None:
    with pytest.raises(AttributeError, match="did you mean 'Observation'"):
        _ = gradveil.Obsevation


def test_ci_runs_the_readme_command() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text(encoding="utf-8")


def run_make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(ROOT / "Makefile", folder)
    for name in ("pyproject.toml", "constraints.txt"):
        (folder / name).touch()
    # Under `make test` the words of that command would be handed on, and with another BIN this one would install into it.
    own = {name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL"}}
    return subprocess.run(["make", *words], cwd=folder, env=own, capture_output=True, text=True, check=False, timeout=60)


def test_an_old_python_gets_one_clear_sentence(tmp_path: Path) -> None:
    old = tmp_path / "old-python"
    old.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    old.chmod(0o755)
    done = run_make(tmp_path, "--silent", "test", f"PYTHON={old}")
    assert done.returncode == 2
    assert done.stderr.startswith("Gradveil needs Python 3.11 or newer")
    assert not (tmp_path / ".venv").exists()


def test_help_lists_every_target(tmp_path: Path) -> None:
    listed = set(re.findall(r"make ([a-z-]+)", run_make(tmp_path, "help").stdout))
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert phony
    assert listed == set(phony[1].split())
