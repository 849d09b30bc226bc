"""The page about attacks: its code runs, and its table says what the cards say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gradveil.attacks import ATTACKS

PAGE = (Path(__file__).parents[3] / "docs" / "attacks.md").read_text(encoding="utf-8")
GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "attacks.json").read_text())


def run_blocks(count: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 3
    name = f"shown_attack_{count}"
    (folder / f"{name}.py").write_text("\n".join(blocks[:count]), encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    __import__(name)


@pytest.mark.usefixtures("untouched_global_rng")
def test_the_code_on_the_page_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_blocks(2, tmp_path, monkeypatch)
    assert ATTACKS.build("layered_matching(steps=3)").recipe().objective == "layer_cosine"


@pytest.mark.slow
@pytest.mark.usefixtures("untouched_global_rng")
def test_the_attack_on_the_page_keeps_the_contract(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_blocks(3, tmp_path, monkeypatch)


def test_floors_on_the_page_and_on_the_cards_are_those_measured() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| ([\d.]+) \|", PAGE, re.MULTILINE)
    shown = {name: {"floor": float(floor), "measured": float(measured)} for name, floor, measured in rows}
    assert shown == GOLDEN["floors"]["value"]
    assert {card.name: card.floor_psnr for card in ATTACKS.cards()} == {name: row["floor"] for name, row in shown.items()}
    assert all(row["floor"] < row["measured"] for row in shown.values())
