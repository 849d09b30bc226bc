"""What decides a result is part of its key: the package's code, shipped networks, and the user's own files."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import save_file

import gradveil
from gradveil.networks.cards import SHIPPED
from gradveil.networks.store import load_network
from gradveil.provenance import code_version, own_files_digest, provenance
from gradveil.run.jobs import cell_key
from gradveil.study.cell import Cell


@pytest.fixture(params=[".safetensors", ".safetensors.xz"])
def network(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    shutil.copy(SHIPPED / "evaluation-32.json", tmp_path / "own.json")
    if request.param == ".safetensors":
        save_file(load_network("evaluation-32").state_dict(), tmp_path / "own.safetensors")
    else:
        shutil.copy(SHIPPED / "evaluation-32.safetensors.xz", tmp_path / "own.safetensors.xz")
    return tmp_path / f"own{request.param}"


def test_weights_a_defense_names_are_part_of_the_key(network: Path) -> None:
    spelling = f"clipping + refiner(network={str(network)!r})"
    before, key = own_files_digest([spelling]), cell_key(Cell(defense=spelling))
    network.write_bytes(network.read_bytes() + b" ")
    assert own_files_digest([spelling]) != before
    assert cell_key(Cell(defense=spelling)) != key


def test_a_card_stands_for_its_weights_too(network: Path) -> None:
    spelling = f"refiner(network={str(network.with_name('own.json'))!r})"
    before = own_files_digest([spelling])
    network.write_bytes(network.read_bytes() + b" ")
    assert own_files_digest([spelling]) != before


def test_names_that_are_no_files_play_no_part() -> None:
    assert own_files_digest(["refiner(network='evaluation-32')", "lenet"]) == own_files_digest([])


@pytest.mark.parametrize("attacks", [True, False])
def test_generators_their_weights_and_spectra_are_part_of_the_code(
    attacks: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = Path(gradveil.__path__[0])
    copy = tmp_path / "gradveil"
    shutil.copytree(root, copy, ignore=shutil.ignore_patterns("*.safetensors.xz", "__pycache__"))
    monkeypatch.setattr(gradveil, "__file__", str(copy / "__init__.py"))
    found = set()
    for changed in (
        "",
        "networks/style.py",
        "networks/weights/style-32.json",
        "spectra/spectrum.py",
        "defenses/svdefense/tilt.py",
    ):
        if changed:
            (copy / changed).write_text((copy / changed).read_text(encoding="utf-8") + "\n", encoding="utf-8")
        code_version.cache_clear()
        found.add(code_version(attacks=attacks))
    code_version.cache_clear()
    assert len(found) == 5


def test_code_that_was_copied_without_its_history_tells_the_commit_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_git(*_: object, **__: object) -> None:
        raise OSError

    monkeypatch.setattr(subprocess, "run", no_git)
    monkeypatch.delenv("GRADVEIL_COMMIT", raising=False)
    assert provenance(0, "cpu")["commit"] == "unknown"
    monkeypatch.setenv("GRADVEIL_COMMIT", "abc1234")
    assert provenance(0, "cpu")["commit"] == "abc1234"


def test_a_copy_that_lies_in_another_history_tells_the_commit_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess((), 0, stdout="0ther00\n"))
    monkeypatch.delenv("GRADVEIL_COMMIT", raising=False)
    assert provenance(0, "cpu")["commit"] == "0ther00"
    monkeypatch.setenv("GRADVEIL_COMMIT", "abc1234")
    assert provenance(0, "cpu")["commit"] == "abc1234"
