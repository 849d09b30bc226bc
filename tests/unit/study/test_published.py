"""A study file: a plan, how its results are shown, and one sentence for whatever is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradveil.errors import UsageError
from gradveil.study.published import Layout, Study

TEXT = """
[study]
title = "two defenses"
table = "attacks"
page = "docs/page.md"
notes = "on a busy core"

[study.rows]
"pruning(rate=0.9)" = "Prune"
"none" = "none"

[audit]
records = 2

[data]
source = "cifar.npz"

[grid]
defense = ["none", "pruning(rate=0.9)"]
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_study_is_a_plan_and_how_it_is_shown(tmp_path: Path) -> None:
    study = Study.from_toml(write(tmp_path, TEXT))
    assert study.name == "mine"
    assert study.plans == (study.plan,)
    assert study.plan.data == (str(tmp_path / "cifar.npz"),)
    assert study.plan.title == study.layout.title == "two defenses"
    assert study.layout.rows == (("pruning(rate=0.9)", "Prune"), ("none", "none"))
    assert study.layout.notes == ("on a busy core",)
    assert study.layout.as_dict()["rows"] == [["pruning(rate=0.9)", "Prune"], ["none", "none"]]
    assert study.attacks


def test_grids_change_the_plan_and_take_its_place(tmp_path: Path) -> None:
    grids = '[[study.grids]]\nbatch_size = [1, 2]\n\n[[study.grids]]\nsource = "photos"\nseed = 4\nmodel = "convnet"\n'
    study = Study.from_toml(write(tmp_path, TEXT + grids))
    first, second = study.plans
    assert (first.batch_size, first.data, first.seed) == ((1, 2), study.plan.data, 0)
    assert (second.batch_size, second.data, second.seed, second.model) == ((1,), ("photos",), 4, ("convnet",))


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ({"audit": {}}, r"no section \[study\]"),
        ({"study": {"titel": "x"}}, "no key 'titel'; did you mean 'title'"),
        ({"study": {"table": "acuracy"}}, "did you mean 'accuracy'"),
        ({"study": {"rows": "none"}}, r"\[study.rows\]"),
        ({"study": {"grids": {"steps": 3}}}, r"\[\[study.grids\]\]"),
        ({"study": {"grids": [{"step": 3}]}}, "grid 1 has no key 'step'; did you mean 'steps'"),
        ({"study": {"grids": [{"steps": -3}]}}, "grid 1: steps is -3"),
        ({"study": {"table": "accuracy"}}, r"add a section \[utility\]"),
        ({"study": {}, "audit": {"recods": 3}}, "did you mean 'records'"),
    ],
)
def test_what_is_wrong_gets_one_sentence(document: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        Study.from_dict(document, name="mine")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the study"):
        Study.from_toml(tmp_path / "missing.toml")
    with pytest.raises(UsageError, match="cannot be read as TOML"):
        Study.from_toml(write(tmp_path, "[study"))


def test_accuracies_need_no_attack() -> None:
    study = Study.from_dict({"study": {"table": "accuracy"}, "utility": {"rounds": 2}}, name="mine")
    assert not study.attacks
    assert Layout().table == "attacks"
