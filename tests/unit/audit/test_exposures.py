"""Exposure of an audited cell: the attackers' own public records, what cells share, what stands beside it, and what it costs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from gradveil.audit import exposures as module
from gradveil.audit.cell import run_cell
from gradveil.audit.exposures import Exposures, exposure_of_cell
from gradveil.randomness import Seed
from gradveil.records import Batch
from gradveil.risk.oracle import expose
from gradveil.risk.prior import public_prior
from gradveil.study.codec import decode, encode
from gradveil.study.exposures import Exposure
from gradveil.study.results import CellResult
from tests.unit.audit.small import CELL, digits, make_subject


@pytest.fixture(autouse=True)
def few_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RANK", 12)
    monkeypatch.setattr(module, "_priors", {})
    monkeypatch.setattr(module, "_known", type(module._known)(dict))


def found(**changes: Any) -> Exposure:
    told = exposure_of_cell(make_subject(model="lenet", **changes))
    assert told is not None and told.found is not None, told
    return told.found


def timeless(each: Exposure) -> list[Any]:
    return [dataclasses.replace(record, seconds=0.0) for record in each.records]


def test_a_cell_has_what_the_function_says_of_the_attackers_public_records() -> None:
    subject = make_subject(model="lenet", defense="gaussian_noise(std=0.003)")
    own = digits().batch(list(subject.indices))
    told = exposure_of_cell(subject)
    assert told is not None and told.found is not None
    others = Batch(subject.candidates[4:36], subject.candidate_labels[4:36])
    prior = public_prior(subject.prior.inputs, like=own.inputs, rank=12, seed=Seed(0).child("public"))
    direct = expose(subject.learner, own, subject.defense, prior=prior, others=others, rows=subject.indices, seed=Seed(0))
    assert timeless(told.found) == timeless(direct)
    assert told.found.public.source == "digits, not attacked" and told.found.public.records == len(subject.prior.inputs)
    assert 0.5 < (told.found.mean or 0) < 20 and 0.1 < (told.found.mean_listed or 0) <= 1


def test_what_an_update_does_along_the_prior_is_found_once_and_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = found(defense="gaussian_noise(std=0.01)")
    monkeypatch.setattr(module, "_known", type(module._known)(dict))
    found()
    monkeypatch.setattr("gradveil.risk.oracle.grams_along", lambda *_, **__: pytest.fail("made twice"))
    monkeypatch.setattr(module, "public_prior", lambda *_, **__: pytest.fail("made twice"))
    assert timeless(found(defense="gaussian_noise(std=0.01)")) == timeless(alone)


@pytest.mark.parametrize("changes", [{"seed": 1}, {"state": "trained(steps=1)"}, {"local_steps": 2}, {"prior": "none"}])
def test_what_changes_the_update_or_the_prior_is_found_anew(changes: dict[str, Any]) -> None:
    assert [each.linear for each in found(**changes).records] != [each.linear for each in found().records]


def test_others_of_an_update_count_as_noise_and_a_note_says_so() -> None:
    noise = "gaussian_noise(std=0.0003)"
    alone, batch = (exposure_of_cell(make_subject(model="lenet", defense=noise, batch_size=size)) for size in (1, 4))
    assert alone is not None and batch is not None and alone.found is not None and batch.found is not None
    assert (batch.found.mean or 0) < (alone.found.mean or 0) - 1
    assert "3 other records of the update count as noise" in batch.notes[0] and not alone.notes
    pruned = exposure_of_cell(make_subject(model="lenet", defense="pruning(rate=0.5)", batch_size=2))
    assert pruned is not None and pruned.found is not None and "mean of a batch" in pruned.found.reason
    seen = exposure_of_cell(make_subject(model="lenet", rounds=2, batch_size=2, local_steps=2))
    assert seen is not None and "do not quite" in seen.notes[1] and "2 rounds are seen" in seen.notes[2]


def test_an_embedding_is_scored_at_its_cut() -> None:
    parts: dict[str, Any] = {"cut": "cut1", "parts": "left_right", "defense": "embedding_noise(delta=0.01)"}
    half = exposure_of_cell(make_subject(model="lenet", **parts))
    assert half is not None and half.found is not None and half.found.mean is not None and half.found.mean > 1
    both = exposure_of_cell(make_subject(model="lenet", batch_size=2, **parts))
    assert both is not None and both.found is not None and both.found.mean == half.found.mean and not both.notes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"defense": "quantisation(mode='qsgd')"}, "unknown law"),
        ({"defense": "invl_gnp"}, "directions of its own"),
    ],
)
def test_a_defense_without_a_known_law_says_why(changes: dict[str, Any], words: str) -> None:
    own = exposure_of_cell(make_subject(model="lenet", **changes))
    assert own is not None
    told = own.beside(list("abcd"), [None] * 4, [0.01] * 4, "informed")
    assert words in told.reason and told.mean is None and told.correlation.n == 0
    assert all(record.gain == pytest.approx(10 * np.log10(record.null / 0.01)) for record in told.records)


def test_what_cannot_be_scored_gets_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exposure_of_cell(make_subject(risk="off")) is None
    subject = make_subject(model="lenet")

    def reason(**changes: Any) -> str:
        public = dataclasses.replace(subject.prior, **changes)
        own = dataclasses.replace(subject)
        own.__dict__["prior"] = public
        told = exposure_of_cell(own)
        assert told is not None and told.found is None
        assert encode(told.beside([], [], [], "plain"))["reason"] == told.reason
        return told.reason

    assert "at least 16 public records, and there are 9" in reason(inputs=subject.prior.inputs[:9])
    assert "all public records are alike" in reason(inputs=torch.full((40, 1, 8, 8), 0.5))
    assert "have shape (1, 4, 4)" in reason(inputs=subject.prior.inputs[:40, :, :4, :4])
    monkeypatch.setattr(module, "MOST_WORK", 10**6)
    told = exposure_of_cell(subject)
    assert told is not None and told.found is not None and told.found.mean is None
    assert "times what an audit spends on exposure" in told.found.reason and told.found.records[0].null > 0


def test_the_result_has_it_beside_the_gain_and_old_files_are_read() -> None:
    result = run_cell(CELL.replace(defense="gaussian_noise(std=0.001)"), digits()).result
    own = result.exposure
    assert own is not None and own.worst == max(record.exposure or 0 for record in own.records)
    assert [record.pseudonym for record in own.records] == [record.pseudonym for record in result.records]
    for record, attacked in zip(own.records, result.records, strict=True):
        assert attacked.mse is not None and record.gain == pytest.approx(10 * np.log10(record.null / attacked.mse))
    assert own.mean_gain == pytest.approx(np.mean([record.gain or 0.0 for record in own.records]))
    assert own.correlation.n == 4 and own.correlation.attack in ("informed", "plain")
    written = encode(result)
    assert decode(CellResult, written).exposure == own
    del written["exposure"]
    assert decode(CellResult, written).exposure is None
    assert "exposure" not in encode(run_cell(CELL.replace(risk="off"), digits()).result)


def test_a_perfect_picture_gains_no_more_than_a_perfect_score() -> None:
    whole = Exposures(found())
    names = list("abcd")
    told = whole.beside(names, names, [0.0, 1e-9, None, 0.05], "plain")
    for record in told.records[:2]:
        assert record.gain == pytest.approx(10 * np.log10(record.null / 1e-6)), "60 dB are the most that is told apart"
    assert told.records[2].gain is None and told.records[3].owner == "d" and told.correlation.n == 3


def test_owners_stand_beside_records() -> None:
    data = dataclasses.replace(digits(), owners=tuple(f"writer {row % 7}" for row in range(1797)))
    result = run_cell(CELL, data).result
    assert result.exposure is not None
    assert [each.owner for each in result.exposure.records] == [each.owner for each in result.records]
