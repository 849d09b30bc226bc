"""docs/vertical.md: its code runs, its plan is a plan, and its names are names."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from gradveil.data import DIVISIONS
from gradveil.run.grid import cells_of
from gradveil.study.plan import Plan

PAGE = (Path(__file__).parents[3] / "docs" / "vertical.md").read_text(encoding="utf-8")


def test_the_code_on_the_page_runs_and_learns(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(block, "docs/vertical.md", "exec"), {"__name__": "shown"})
    accuracy = float(re.findall(r"accuracy ([\d.]+)", capsys.readouterr().out)[0])
    assert accuracy > 0.5, "ten classes, a tenth each"


def test_the_plan_on_the_page_has_the_rows_it_says() -> None:
    block, trained = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    cells = cells_of(Plan.from_dict(tomllib.loads(block)))
    pruned = {cell.cut for cell in cells if cell.defense.startswith("pruning")}
    noisy = {cell.cut for cell in cells if cell.defense.startswith("embedding_noise")}
    assert pruned == {""} and noisy == {"cut1", "cut2"}
    plan = Plan.from_dict(tomllib.loads(trained))
    assert plan.utility is not None and {cell.cut for cell in cells_of(plan)} == {"cut1"}


def test_the_parts_on_the_page_can_be_built() -> None:
    spelled = re.findall(r"`((?:whole|left_right|top_bottom|columns)(?:\(.*?\))?)`", PAGE)
    assert len({text.partition("(")[0] for text in spelled}) == len(DIVISIONS.names())
    for text in spelled:
        DIVISIONS.build(text)
