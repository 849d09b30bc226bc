"""Every row and number of a cell's result is that of its record: counted again from what stands beside it."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gradveil.audit import cell as cell_module
from gradveil.audit import judge, list_others
from gradveil.audit.cell import MeasuredCell, run_cell
from gradveil.audit.gap import Explained
from gradveil.audit.label_level import label_level, label_null
from gradveil.audit.list_others import others_known
from gradveil.audit.lists import Pool, list_seed
from gradveil.audit.threat import threat_of, training_sentences
from gradveil.records import ORDINARY, Knowledge, Reconstruction
from gradveil.study.cell import Cell
from gradveil.study.measures import Quality, Share, Spread
from gradveil.study.results import CellResult
from tests.unit.audit.small import CELL, digits, make_subject

SEARCH = "inverting_gradients(steps=30, signed=False, learning_rate=0.05)"
NOISY: dict[str, Any] = {
    "defense": "clipping(bound=1.0) + gaussian_noise(std=0.1)",
    "records": 8,
    "risk": "auto",
    "ensemble": SEARCH,
}


@pytest.fixture(scope="module")
def noisy() -> MeasuredCell:
    """A cell where some records are identified and some are not, and some searches know the defense."""
    return run_cell(CELL.replace(**NOISY), digits(), key="0123456789abcdef")


def psnr(left: Tensor, right: Tensor) -> Tensor:
    return -10 * (left - right).square().flatten(1).mean(1).clamp_min(1e-6).log10()


def test_rows_and_counts_say_the_same(noisy: MeasuredCell) -> None:
    found = noisy.result
    rows = found.records
    assert len({row.identified for row in rows}) == 2 and len({row.rank for row in rows}) > 3
    assert found.selected.identified.count == sum(row.identified for row in rows) and found.n == len(rows) == 8
    assert found.selected.label_accuracy is not None
    assert found.selected.label_accuracy.value == pytest.approx(sum(bool(row.label_correct) for row in rows) / 8)
    for k, share in ((1, found.selected.iip_1), (3, found.selected.iip_3), (5, found.selected.iip_5)):
        assert share is not None and share.count == sum((row.rank or 999) <= k for row in rows)
    assert all(row.identified == (row.rank == 1) for row in rows)
    for name in ("psnr", "ssim", "mse"):
        spread, own = getattr(found.selected, name), [getattr(row, name) for row in rows]
        assert len(set(own)) == 8 and spread.median == pytest.approx(statistics.median(own)), name
    shown, truth = (torch.from_numpy(noisy.pictures[name]) for name in ("selected", "original"))
    assert [row.psnr for row in rows] == pytest.approx(psnr(shown, truth).tolist(), abs=1e-3)
    assert [row.mse for row in rows] == pytest.approx((shown - truth).square().flatten(1).mean(1).tolist(), rel=1e-4)


def test_a_row_holds_its_own_label_gap_and_regret(noisy: MeasuredCell) -> None:
    found, subject = noisy.result, make_subject(**NOISY)
    assert [row.label for row in found.records] == [int(target.batch.targets) for target in subject.targets]
    assert len({row.gap for row in found.records}) == 8 and all(row.gap is not None for row in found.records)
    best, own = (torch.from_numpy(noisy.pictures[name]) for name in ("best_by_truth", "selected"))
    truth = torch.from_numpy(noisy.pictures["original"])
    regret = (psnr(best, truth) - psnr(own, truth)).clamp_min(0).tolist()
    assert [row.regret_db for row in found.records] == pytest.approx(regret, abs=1e-3)
    assert found.regret.worst == pytest.approx(max(regret), abs=1e-3)
    assert found.regret.median == pytest.approx(statistics.median(regret), abs=1e-3)
    for row in found.records:
        assert row.recipe == "inverting_gradients" and row.stance in ("plain", "informed") and row.owner is None


def test_whether_a_label_is_right_is_told_record_by_record() -> None:
    subject = make_subject(records=4)
    target = subject.targets[0]
    scored = judge.scored_images(subject, judge.originals(subject) * 0.5, torch.tensor([1.0, 0.0, 0.0, 1.0]))
    kept = [Reconstruction(target.batch.inputs, target.batch.targets, f"recipe {i}", stance=f"stance {i}") for i in range(4)]
    explained = [Explained(found=float(i), truth=0.0, tolerance=0.0) for i in range(4)]
    rows = cell_module._records(subject, scored, scored, kept, explained)
    assert [row.label_correct for row in rows] == [True, False, False, True]
    assert len({row.pseudonym for row in rows}) == 4 and all(row.pseudonym.startswith("r-") for row in rows)
    assert [(row.recipe, row.stance) for row in rows] == [(f"recipe {i}", f"stance {i}") for i in range(4)]
    assert [row.gap for row in rows] == [each.gap for each in explained] == [0.0, 1.0, 2.0, 3.0]
    assert [row.rank for row in rows] == scored.rank.tolist() and [row.regret_db for row in rows] == [0.0] * 4


def test_scores_of_risk_stand_beside_the_records_they_are_of(noisy: MeasuredCell) -> None:
    risk, rows = noisy.result.risk, noisy.result.records
    assert risk is not None and [each.pseudonym for each in risk.records] == [row.pseudonym for row in rows]
    assert [each.error for each in risk.records] == pytest.approx([row.mse for row in rows])
    assert len({each.invre for each in risk.records}) == 8


def test_time_and_memory_are_measured(noisy: MeasuredCell) -> None:
    timing, found = noisy.result.timing, noisy.result
    assert found.key == timing.key == "0123456789abcdef"
    assert timing.seconds and timing.attack_steps and timing.risk_seconds and timing.defense_ms and timing.undefended_ms
    assert timing.peak_memory_mb is not None and 50 < timing.peak_memory_mb < 100_000
    assert timing.steps_per_second == pytest.approx(timing.attack_steps / timing.seconds, rel=0.2)
    assert timing.risk_seconds < timing.seconds and found.asked_steps == 30


LEFT_OUT = {"settings", "power", "region", "utility", "unavailable", "pictures", "duplicates", "certificate", "timing"}
"""Of another run, of pictures larger than these, or looked at elsewhere."""


def test_nothing_of_a_result_is_left_at_its_default(noisy: MeasuredCell) -> None:
    found = noisy.result
    for field in dataclasses.fields(CellResult):
        if field.name in LEFT_OUT or not field.init:
            continue
        value = getattr(found, field.name)
        default = field.default if field.default is not dataclasses.MISSING else None
        assert value != default and value not in (None, (), {}, ""), field.name
    assert found.levels is not None and found.levels.label is not None and found.levels.listed is None
    assert found.chance == pytest.approx(1 / 256) and found.candidates == 256 and found.duplicates == 0
    assert found.settings.ensemble == SEARCH and found.settings.threads == torch.get_num_threads()


def test_nulls_are_measured_as_attackers_are(noisy: MeasuredCell) -> None:
    found = noisy.result
    assert {"grey", "data_mean", "derangement"} <= set(found.nulls)
    for name in ("grey", "data_mean"):
        shown, truth = torch.from_numpy(noisy.pictures[f"null_{name}"]), torch.from_numpy(noisy.pictures["original"])
        spread = found.nulls[name].psnr
        assert spread is not None and spread.median == pytest.approx(statistics.median(psnr(shown, truth).tolist()), abs=1e-3)
    for row in found.attackers:
        assert row.recipe == "inverting_gradients" and row.tries and row.chosen is not None
        assert row.summary is not None and row.summary.identified.n == 8 and row.rehearsal_psnr is not None
    assert sum(row.chosen or 0 for row in found.attackers) == 8 and {row.stance for row in found.attackers} >= {
        "plain",
        "informed",
    }
    best = max(each.psnr.median for each in found.nulls.values() if each.psnr is not None)
    assert found.bar.psnr is not None and found.bar.psnr.value == pytest.approx(best, abs=1e-3)
    assert found.bar.identified is not None and found.bar.identified.draws >= 1


def test_the_same_seed_gives_the_same_and_another_gives_another() -> None:
    small = CELL.replace(records=2, defense="gaussian_noise(std=0.01)")
    one, again, other = (run_cell(small.replace(seed=seed), digits()).result for seed in (3, 3, 4))
    assert again.records == one.records and again.nulls == one.nulls and again.levels == one.levels
    assert other.records != again.records and other.nulls != again.nulls


def intervals(quality: Quality) -> list[tuple[str, Any]]:
    return [(field.name, getattr(quality, field.name)) for field in dataclasses.fields(quality)]


def test_every_interval_holds_its_value(noisy: MeasuredCell) -> None:
    for name, value in intervals(noisy.result.selected):
        if isinstance(value, Spread) and value.low is not None and value.high is not None:
            assert value.low <= value.median <= value.high, name
        if isinstance(value, Share):
            assert value.low <= value.value <= value.high, name


@pytest.mark.parametrize(("batch_size", "records"), [(1, 6), (2, 8)])
def test_labels_are_counted_beside_the_null_of_as_many(batch_size: int, records: int) -> None:
    subject = make_subject(records=records, batch_size=batch_size, defense="gaussian_noise(std=0.01)")
    level = label_level(subject, subject.context(20))
    null = label_null(subject.candidate_labels, subject.dataset.classes, batch_size, records)
    assert level.null == null != label_null(subject.candidate_labels, subject.dataset.classes, batch_size, 1)
    assert {(each.attacker, each.informed) for each in level.reached} == {("plain", False), ("own", True), ("generic", True)}
    assert all(each.share.n == records for each in level.reached)


def test_every_update_has_a_list_of_its_own_where_others_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    build: Any = vars(list_others)["Hypotheses"]

    def noting(**given: Any) -> Any:
        made.append(given)
        return build(**given)

    monkeypatch.setattr(list_others, "Hypotheses", noting)
    subject = make_subject(records=8, batch_size=2)
    pool = Pool.of(subject, 30)
    others_known(subject, subject.context(10), pool)
    assert [given["seed"] for given in made] == [list_seed(subject).child("others known", index) for index in range(4)]
    lists = [np.round(given["inputs"].flatten(1).sum(1).numpy(), 4).tolist() for given in made]
    for index, (given, shown) in enumerate(zip(made, lists, strict=True)):
        own, *others = pool.batches[index]
        assert given["size"] == 2 and torch.equal(given["others"][0], pool.inputs[others])
        assert sum(torch.equal(each, pool.inputs[own]) for each in given["inputs"]) == 1
        assert not any(torch.equal(each, pool.inputs[other]) for each in given["inputs"] for other in others)
        assert all(sorted(shown) != sorted(rest) for rest in lists[index + 1 :])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, []),
        ({"local_epochs": 1}, ["Clients train with 1 local epoch, which the attacker replays."]),
        ({"local_epochs": 2}, ["Clients train with 2 local epochs, which the attacker replays."]),
        (
            {"local_epochs": 1, "minibatch": 2, "batch_size": 4, "momentum": 0.5},
            ["Clients train with 1 local epoch, minibatches of 2, momentum 0.5, which the attacker replays."],
        ),
        ({"local_epochs": 1, "minibatch": 1}, ["Clients train with 1 local epoch, which the attacker replays."]),
        ({"minibatch": 4, "batch_size": 4, "local_epochs": 2, "shuffle": True}, ["Clients train with 2 local epochs, which"]),
        ({"minibatch": 2, "batch_size": 4, "local_epochs": 1, "shuffle": True}, ["Clients train with 1 local epoch, mini"]),
        ({"minibatch": 2, "batch_size": 4, "local_epochs": 2, "shuffle": True}, ["Clients train with 2", "Every epoch after"]),
        ({"dropout": True}, ["Clients train with dropout on"]),
        ({"dropout": True, "local_epochs": 3}, ["Clients train with 3 local epochs", "Clients train with dropout on"]),
        ({"cut": "cut1", "local_epochs": 3}, []),
    ],
)
def test_what_clients_do_is_told_in_as_many_sentences_as_it_takes(changes: dict[str, Any], told: list[str]) -> None:
    found = training_sentences(Cell(**changes))
    assert len(found) == len(told) and all(one.startswith(other) for one, other in zip(found, told, strict=True))


@pytest.mark.parametrize("known", [True, False])
def test_an_attacker_sees_and_knows_what_the_cell_says(known: bool) -> None:
    found = threat_of(Cell(clients=3, rounds=2, known_labels=known))
    assert (found.clients, found.rounds, found.sees) == (3, 2, "update")
    assert found.knows == (ORDINARY | {Knowledge.LABELS} if known else ORDINARY)
    assert threat_of(Cell(cut="cut1", sees="embedding_gradient")).sees == "embedding_gradient"
