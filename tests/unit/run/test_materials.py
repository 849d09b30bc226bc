"""A run reads its data once and builds each defense once, and hands them on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gradveil.audit.materials import Materials
from gradveil.cli import main
from gradveil.data import DATASETS
from gradveil.defenses import DEFENSES
from gradveil.randomness import Seed
from gradveil.run.grid import cells_of
from gradveil.study.plan import Plan
from gradveil.study.settings import DataSource

AUDIT = [
    *("audit", "--data", "digits", "--model", "mlp(hidden=4)", "--records", "1", "--workers", "1", "--quiet"),
    *("--lists", "off", "--risk", "off", "--ensemble", "linear_layer"),
]


def test_an_audit_of_two_cells_reads_data_once_and_builds_each_defense_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: Counter[str] = Counter()
    built: Counter[str] = Counter()
    find, build = DATASETS.get, DEFENSES.build

    def counted_find(name: str) -> Any:
        read[name] += 1
        return find(name)

    def counted_build(spelling: Any) -> Any:
        built[str(spelling["name"] if isinstance(spelling, dict) else spelling).partition("(")[0]] += 1
        return build(spelling)

    monkeypatch.setattr(DATASETS, "get", counted_find)
    monkeypatch.setattr(DEFENSES, "build", counted_build)
    assert main([*AUDIT, "--defense", "none", "--defense", "pruning", "--out", str(tmp_path)]) == 0
    assert read == {"digits": 1}
    assert built == {"none": 1, "pruning": 1}


def test_what_is_handed_on_is_the_same_and_a_model_is_a_copy() -> None:
    materials = Materials()
    digits = DataSource(data="digits")
    assert materials.dataset(digits) is materials.dataset(digits)
    assert materials.digest(digits) == materials.dataset(digits).digest()
    assert materials.defense("pruning(rate=0.5)") is materials.defense("pruning(rate=0.5)")
    settings: dict[str, Any] = {"input_shape": (1, 4, 4), "classes": 2, "seed": Seed(0)}
    first, second = (materials.model("mlp(hidden=4)", **settings) for _ in range(2))
    assert first is not second
    assert all(a.equal(b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_defenses_of_a_grid_are_built_on_the_way() -> None:
    materials = Materials()
    (cell, *_) = cells_of(Plan.default(defense="pruning:ladder"), materials)
    assert materials.defense(cell.defense) == DEFENSES.build(cell.defense)
