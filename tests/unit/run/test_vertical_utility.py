"""Utility of vertical rows: one plan gives privacy, accuracy, bytes and time of embeddings, and recommend answers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from gradveil.errors import UsageError
from gradveil.report import write_report
from gradveil.run.estimate import estimate_plan
from gradveil.run.grid import cells_of, defenses_of
from gradveil.run.pool import run_audit
from gradveil.run.trainings import all_trainings, trainings_of
from gradveil.storage.run_folder import Store
from gradveil.study.codec import encode
from gradveil.study.federation import UtilitySettings
from gradveil.study.load import load_run
from gradveil.study.plan import Plan
from gradveil.verdict.recommend import Requirements, recommend

UTILITY = UtilitySettings(rounds=4, minibatch=96, learning_rate=0.5, seeds=2)
PLAN = Plan.default(
    data=["digits"],
    model=["mlp(hidden=64)"],
    cut=["cut1"],
    records=6,
    ensemble=["inverting_gradients(steps=20, objective='l2', signed=False)"],
    defense=["none", "embedding_noise(delta=4.0)", "embedding_pruning(rate=0.5)"],
    utility=UTILITY,
    risk="off",
    lists="off",
    device="cpu",
)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("vertical") / "run"
    run_audit(PLAN, out, workers=1)
    return out


def utility_of(out: Path) -> dict[str, dict[str, Any]]:
    store = Store(out)
    found = [store.read_cell(key) for key in load_run(out).keys]
    return {cell.defense.spelling: encode(cell.utility) for cell in found if cell is not None}


def test_every_row_has_accuracy_bytes_and_time_paired_by_seed(done: Path) -> None:
    found = utility_of(done)
    assert set(found) == set(defenses_of(PLAN))
    plain = found["none"]
    assert plain["accuracy"]["value"] > 0.6 and plain["difference"]["value"] == 0
    for defense, utility in found.items():
        assert utility["seeds"] == [0, 1] and utility["undefended"] == plain["accuracy"], defense
        # 1,438 records of 64 float32 values, up and down, in four rounds.
        assert utility["bytes"]["up"] == utility["bytes"]["down"] == 4 * 1438 * 64 * 4, defense
    assert found["embedding_noise(delta=4.0)"]["difference"]["value"] < -0.02, "noise this strong costs accuracy"
    assert plain["settings"]["cut"] == "cut1" and "clients" not in plain["settings"]
    cells = {cell.defense.spelling: cell for cell in load_run(done).cells}
    assert all(cell.utility is not None and cell.utility.time_ratio for cell in cells.values())


def test_the_report_shows_the_decision_table_of_parties(done: Path) -> None:
    page = write_report(done).read_text(encoding="utf-8")
    assert 'id="decision-table"' in page
    assert "the parties (whole, model cut at cut1) step together in 4 rounds of 1 pass over the records" in page


def test_recommend_answers_for_vertical_rows(done: Path) -> None:
    results = load_run(done)
    found = recommend(results, Requirements(max_accuracy_drop=100))
    assert found.chosen is not None and found.chosen.spelling == "embedding_noise(delta=4.0)"
    assert recommend(results, Requirements(max_accuracy_drop=100, cut="cut1")).as_dict() == found.as_dict()
    with pytest.raises(UsageError, match="no row with cut 'cut2'"):
        recommend(results, Requirements(max_accuracy_drop=100, cut="cut2"))


def test_a_run_without_its_last_trainings_goes_on_to_the_same_utility(done: Path, tmp_path: Path) -> None:
    half = tmp_path / "half"
    run_audit(PLAN.override(utility=UTILITY.replace(seeds=1)), half, workers=1)
    run_audit(PLAN, half, workers=1)
    assert utility_of(half) == utility_of(done)


def test_party_and_sight_do_not_decide_a_training_and_the_cut_does() -> None:
    cell = cells_of(PLAN)[0]
    own = trainings_of(cell, UTILITY)
    assert own == trainings_of(cell.replace(sees="embedding_gradient", party=0, batch_size=2), UTILITY)
    assert own != trainings_of(cell.replace(parts="left_right"), UTILITY) != trainings_of(cell.replace(cut=""), UTILITY)
    both = all_trainings([cell, cell.replace(cut="")], UTILITY)
    assert len({training.key() for training in both}) == 4, "horizontal and vertical, two seeds each"
    assert "cut" not in dataclasses.replace(own[0], cut="").as_dict()


def test_a_dry_run_counts_vertical_trainings() -> None:
    found = estimate_plan(PLAN)
    assert [each.training.cut for each in found.trainings] == ["cut1"] * 3
    assert all(each.seconds > 0 for each in found.trainings)
