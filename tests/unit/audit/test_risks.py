"""The risk column of a cell: scores with and without the defense, record by record, and how well they foretold the error."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from gradveil.audit import risks
from gradveil.audit.cell import run_cell
from gradveil.audit.risks import correlate, quick_mode, risk_of_cell
from gradveil.errors import UsageError
from gradveil.randomness import Seed
from gradveil.risk.calibration import read_alpha
from gradveil.risk.exposure import Assessment, assess
from gradveil.run.grid import cells_of, check_plan
from gradveil.spectra.jacobians import jacobian_of
from gradveil.study.codec import encode
from gradveil.study.plan import Plan
from tests.unit.audit.small import CELL, digits, make_subject


def scored(**changes: Any) -> risks.Scores:
    found = risk_of_cell(make_subject(**changes))
    assert found is not None and found.defended is not None and found.undefended is not None
    return found


def values(found: Assessment | None) -> list[float]:
    assert found is not None
    return [record.invre for record in found.records]


def test_a_cell_scores_what_the_command_would() -> None:
    subject = make_subject(defense="clipping(bound=0.1) + gaussian_noise(std=0.1)")
    found = risk_of_cell(subject)
    assert found is not None and found.defended is not None
    direct = assess(
        subject.learner,
        digits().batch(list(subject.indices)),
        subject.defense,
        alpha=read_alpha(None),
        seed=Seed(0),
        rows=subject.indices,
    )
    timeless = [[replace(record, seconds=0.0) for record in each.records] for each in (found.defended, direct)]
    assert timeless[0] == timeless[1]


def test_undefended_scores_stand_beside_defended_ones() -> None:
    noisy, bare = scored(defense="data_noise(std=3.0)"), scored()
    assert values(noisy.undefended) == values(bare.defended)
    assert sum(values(noisy.defended)) < sum(values(bare.defended)) - 0.04


def test_what_was_decomposed_before_is_not_decomposed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(risks, "_known", type(risks._known)(dict))
    first = scored()
    monkeypatch.setattr("gradveil.risk.exposure.spectra_of", lambda *_, **__: pytest.fail("a spectrum was made twice"))
    again = scored(defense="gaussian_noise(std=0.1)", ensemble="quick")
    assert values(again.undefended) == values(first.defended)


@pytest.mark.parametrize("changes", [{"seed": 1}, {"model": "mlp(hidden=8)"}, {"state": "trained(steps=1)"}, {"local_steps": 2}])
def test_what_changes_the_shared_function_is_decomposed_anew(changes: dict[str, Any]) -> None:
    assert values(scored(**changes).defended) != values(scored().defended)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({}, ""), ({"batch_size": 2}, "holds 2"), ({"clients": 2}, "holds 2"), ({"rounds": 2}, "2 rounds are seen")],
)
def test_records_are_scored_by_themselves_and_a_note_says_so(changes: dict[str, Any], words: str) -> None:
    found = scored(defense="precode", **changes) if changes else scored()
    assert len(values(found.defended)) == 4
    assert words in found.note and bool(words) == bool(found.note)


def test_a_model_without_risk_of_its_own_gets_a_reason() -> None:
    subject = make_subject()
    coupled = torch.nn.Sequential(
        torch.nn.Flatten(1), torch.nn.BatchNorm1d(64, track_running_stats=False), torch.nn.Linear(64, 10)
    )
    learner = subject.learner.replace(model=coupled, weights=dict(coupled.named_parameters()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(risks, "build_learner", lambda *_: learner)
        found = risk_of_cell(subject)
    assert found is not None and "BatchNorm" in found.reason
    assert set(encode(found.beside([], [], "plain"))) == {"reason", "meaning"}


def test_a_cell_may_ask_for_no_scores() -> None:
    assert risk_of_cell(make_subject(risk="off")) is None
    result = run_cell(CELL.replace(risk="off"), digits()).result
    assert result.risk is None and result.timing.risk_seconds == 0


def test_the_way_follows_the_cost() -> None:
    def mode(inputs: int, outputs: int) -> str:
        weights = torch.zeros(outputs, inputs)
        return quick_mode(jacobian_of(lambda x: weights @ x, torch.ones(inputs), dtype=torch.float32))

    assert [mode(64, 640), mode(1024, 4000), mode(1100, 4000)] == ["dense", "gram", "leading"]


def p_of(scores: Sequence[float], errors: Sequence[float]) -> float | None:
    found = correlate(scores, errors).spearman
    assert found is not None
    return found.p


def test_correlation_is_that_of_the_statistics_books() -> None:
    scores, errors = [0.1, 0.5, 0.3, 0.9], [0.4, 0.2, 0.25, 0.1]
    found = encode(correlate([*scores, 0.2], [*errors, None]))
    assert found["n"] == 4
    assert found["pearson"]["value"] == pytest.approx(float(np.corrcoef(scores, errors)[0, 1]))
    assert found["spearman"]["value"] == pytest.approx(-1.0)
    assert found["spearman"]["p"] == pytest.approx(2 / 24), "two of the 24 orders of four records are in line"
    t = found["pearson"]["value"] * (2 / (1 - found["pearson"]["value"] ** 2)) ** 0.5
    assert found["pearson"]["p"] == pytest.approx(2 * stats.t.sf(abs(t), 2))
    for few, constant in (([0.1, 0.2], [1.0, 2.0]), ([0.5, 0.5, 0.5], [1.0, 2.0, 3.0]), ([0.1, 0.2, 0.3], [1.0, 1.0, 1.0])):
        assert correlate(few, constant).pearson is None
    assert p_of([0.1, 0.2, 0.3, 0.4], [3.0, 1.0, 2.0, 4.0]) == pytest.approx(0.75)  # rho 0.4, in tables
    many = list(range(8))
    assert p_of(many, [*many[1:], 0]) == pytest.approx(stats.spearmanr(many, [*many[1:], 0]).pvalue)
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(("mode", "error", "told"), [("leading", 1.0, 1), ("leading", 1e-9, 0), ("gram", 1.0, 0)])
def test_scores_closer_than_their_error_are_said_not_to_rank(
    mode: str, error: float, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(risks, "LEADING_ERROR", error)
    found = scored(risk=mode).beside(list("abcd"), [0.1] * 4, "plain")
    assert sum("differ by less" in note for note in found.notes) == told


def test_contrast_is_the_distance_from_the_mean_of_the_others() -> None:
    subject = make_subject()
    found = risk_of_cell(subject)
    assert found is not None
    inputs = digits().inputs.flatten(1).double()
    others = [row for row in range(len(inputs)) if row not in subject.indices]
    expected = (inputs[list(subject.indices)] - inputs[others].mean(0)).square().mean(1)
    assert list(found.contrasts) == pytest.approx(expected.tolist())
    assert [each.contrast for each in found.beside(list("abcd"), [0.1] * 4, "plain").records] == list(found.contrasts)


def test_a_score_that_only_knows_the_contrast_adds_nothing_to_it() -> None:
    generator = np.random.default_rng(0)
    contrast = generator.random(200)
    error = contrast + 0.1 * generator.random(200)
    found = correlate((-contrast + 0.01 * generator.random(200)).tolist(), error.tolist(), "plain", contrast.tolist())
    assert found.spearman is not None and found.contrast is not None and found.partial is not None
    assert found.spearman.value < -0.9 and found.contrast.value > 0.9
    assert abs(found.partial.value) < 0.2 and (found.partial.p or 0) > 0.01
    # What a score knows beyond contrast shows; ranks of three by hand: (r_xy - r_xz r_yz) / sqrt((1 - r_xz²)(1 - r_yz²)).
    other = correlate((-error).tolist(), error.tolist(), "plain", contrast.tolist())
    assert other.partial is not None and other.partial.value == pytest.approx(-1.0)
    x, y, z = [1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 1.0, 4.0, 3.0, 5.0], [1.0, 3.0, 2.0, 5.0, 4.0]
    xy, xz, yz = (stats.spearmanr(a, b).statistic for a, b in ((x, y), (x, z), (y, z)))
    by_hand = correlate(x, y, "plain", z).partial
    assert by_hand is not None and by_hand.p is not None
    assert by_hand.value == pytest.approx((xy - xz * yz) / np.sqrt((1 - xz**2) * (1 - yz**2)))
    t = by_hand.value * np.sqrt(2 / (1 - by_hand.value**2))
    assert by_hand.p == pytest.approx(2 * stats.t.sf(abs(t), 2))
    assert correlate(x, y, "plain").partial is None and correlate(x, y, "plain", [1.0] * 5).contrast is None


def test_the_record_names_mode_and_errors() -> None:
    record = encode(run_cell(CELL.replace(defense="gaussian_noise(std=0.01)"), digits()).result)
    risk = record["risk"]
    json.dumps(risk, allow_nan=False)
    assert risk["defended"]["mode"] == "dense"
    assert [row["pseudonym"] for row in risk["records"]] == [row["pseudonym"] for row in record["records"]]
    assert risk["defended"]["worst"] == max(row["invre"] for row in risk["records"])
    assert "does not acquit" in risk["meaning"]
    assert risk["correlation"]["n"] == 4 and risk["correlation"]["attack"] in ("informed", "plain")


def test_a_plan_says_how_and_a_limit_needs_scores() -> None:
    assert Plan.default(risk=False).risk == "off" and Plan.default(risk=True).risk == "auto"
    assert [cell.risk for cell in cells_of(Plan.default(risk="leading", defense=["none"]))] == ["leading"]
    with pytest.raises(UsageError, match="did you mean 'gram'"):
        Plan.default(risk="grm")
    with pytest.raises(UsageError, match="risk is off"):
        check_plan(Plan.default(risk="off", fail_if=["invre>0.45"]))
    check_plan(Plan.default(fail_if=["invre>0.45"]))
    with pytest.raises(UsageError, match="risk is off"):
        check_plan(Plan.default(risk="off", fail_if=["exposure>3"]))
    check_plan(Plan.default(fail_if=["exposure>3", "exposure[none]>3"]))
