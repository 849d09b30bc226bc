"""Vertical rows of an audit: a party's embedding is what is sent, seen and attacked."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import pytest
import torch

from gradveil.audit.cell import run_cell
from gradveil.audit.scene import build_learner, build_subject, load_cell_data
from gradveil.client.embedding import vertical_fault
from gradveil.defenses import DEFENSES, build_defense
from gradveil.errors import UsageError
from gradveil.learning import EmbeddingLearner, Learner
from gradveil.models import build_model, split_model
from gradveil.randomness import Seed
from gradveil.records import ThreatModel
from gradveil.report import write_report
from gradveil.run.estimate import estimate_plan
from gradveil.run.grid import cells_of, check_inputs
from gradveil.run.pool import run_audit
from gradveil.study.cell import Cell
from gradveil.study.codec import decode, encode
from gradveil.study.federation import UtilitySettings
from gradveil.study.kept import KeptCell
from gradveil.study.measures import Share, Summary
from gradveil.study.plan import Plan
from gradveil.study.results import CellResult
from gradveil.verdict.words import setting_words
from tests.unit.audit.small import digits

LENET = "lenet(activation='relu')"
ATTACK = "inverting_gradients(steps=60, objective='l2')"
CELL = Cell(data="digits", model=LENET, records=2, lists="32", ensemble=ATTACK, cut="cut1")


def test_the_party_has_its_part_and_its_embedding_is_seen() -> None:
    subject = build_subject(CELL.replace(cut="cut2", parts="left_right", party=1), digits(), 1)
    width = digits().input_shape[-1] // 2
    assert subject.own.input_shape == (1, digits().input_shape[1], digits().input_shape[2] - width)
    target = subject.targets[0]
    assert torch.equal(target.batch.inputs[0], digits().inputs[subject.indices[0]][..., width:])
    learner, seen = target.observation.learner, target.observation
    assert isinstance(learner, EmbeddingLearner)
    assert torch.equal(seen.update.weights["embedding"], learner.embed(target.batch.inputs))
    assert seen.threat.sees == "embedding" and seen.classes == digits().classes and seen.labels is None
    assert subject.candidates.shape[1:] == target.batch.inputs.shape[1:]
    assert subject.rehearsals[0].batch.inputs.shape[1:] == target.batch.inputs.shape[1:]


def test_whole_parts_have_the_bottom_of_the_very_model_of_horizontal_rows() -> None:
    party = build_learner(CELL, digits(), build_defense("none"))
    model = build_model(LENET, input_shape=digits().input_shape, classes=digits().classes, seed=Seed(0).child("model"))
    bottom = split_model(model, "cut1")[0]
    assert all(torch.equal(party.weights[name], value) for name, value in bottom.named_parameters())


def test_a_trained_party_is_the_bottom_of_the_trained_model() -> None:
    state = "trained(steps=5)"
    party = build_learner(CELL.replace(state=state), digits(), build_defense("none"))
    whole = build_learner(CELL.replace(state=state, cut=""), digits(), build_defense("none"))
    assert type(whole) is Learner
    fresh = build_learner(CELL, digits(), build_defense("none"))
    for name, value in party.weights.items():
        assert torch.allclose(value, whole.weights[name], atol=1e-6), name
        assert not torch.equal(value, fresh.weights[name]), name


def test_a_cell_is_measured_like_any_other() -> None:
    record = encode(run_cell(CELL, digits()).result)
    assert record["threat"]["sees"] == "embedding" and "a party of vertical learning" in record["threat"]["sentences"][0]
    assert record["cell"]["cut"] == "cut1" and record["cell"]["shares"] == "embedding"
    assert record["selected"]["psnr"]["median"] > record["bar"]["psnr"]["value"] + 5
    assert "label_accuracy" not in record["selected"], "an embedding tells no labels"
    assert record["records"][0]["label_correct"] is None
    assert {check["name"]: check["sentence"] for check in record["checks"]}["oracle_labels"].startswith("Labels play no part")
    assert record["certificate"]["identified"] is None
    size = 12 * 4 * 4 * 4  # channels, height, width, bytes
    assert record["bytes"]["up"] == size
    assert (
        record["risk"]["reason"] == ""
        and record["levels"]["list"]["lists"]["random"]["size"] == 32
        and 0 < record["risk"]["defended"]["mean"] < 1
    )


def test_with_the_gradient_labels_are_read() -> None:
    cell = CELL.replace(sees="embedding_gradient", batch_size=2, records=4)
    record = encode(run_cell(cell, digits()).result)
    assert record["selected"]["label_accuracy"]["value"] == 1.0
    assert "gradient" in record["threat"]["sentences"][0]


def test_a_defense_of_data_reaches_the_embedding() -> None:
    plain, noisy = (build_subject(CELL.replace(defense=name), digits(), 0) for name in ("none", "data_noise(std=0.2)"))
    sent = [subject.targets[0].observation.update.weights["embedding"] for subject in (plain, noisy)]
    assert not torch.allclose(sent[0], sent[1])
    simulate = noisy.context(5).simulate
    assert simulate is not None
    again = simulate(noisy.targets[0].batch.inputs, noisy.targets[0].batch.targets, 0)
    assert again[0]["embedding"].shape == sent[0].shape


def test_a_plan_spans_vertical_and_horizontal_rows() -> None:
    plan = Plan.default(
        data=["digits"],
        model=[LENET],
        cut=["none", "cut1", "cut2"],
        parts="left_right",
        defense=["none", "data_noise(std=0.1)", "pruning(rate=0.9)"],
        local_steps=[1, 2],
    )
    cells = cells_of(plan)
    rows = {(cell.cut, cell.defense, cell.local_steps) for cell in cells}
    assert {(cut, "none", 1) for cut in ("", "cut1", "cut2")} <= rows
    assert ("", "pruning(rate=0.9)", 2) in rows, "an update can be pruned"
    assert not any(defense.startswith("pruning") for cut, defense, _ in rows if cut), "an embedding is not an update"
    assert all(steps == 1 for cut, _, steps in rows if cut)
    assert {cell.parts for cell in cells if cell.cut} == {"left_right"} and {cell.parts for cell in cells if not cell.cut} == {
        "whole"
    }
    assert Plan.from_dict(plan.as_dict()) == plan


def test_a_plan_without_cuts_says_nothing_of_vertical_learning() -> None:
    assert "vertical" not in Plan.default().as_dict()
    assert all(not cell.cut for cell in cells_of(Plan.default()))


def test_default_defenses_that_do_not_fit_are_left_out() -> None:
    found = {cell.defense for cell in cells_of(Plan.default(cut=["cut1"]))}
    assert found == {"none", "data_noise(std=0.1)"}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"cut": ["cut9"]}, "no cut 'cut9'"),
        ({"cut": ["cut1"], "parts": "left_rigt"}, "did you mean 'left_right'"),
        ({"cut": ["cut1"], "parts": "columns"}, "divides tables"),
        ({"cut": ["cut1"], "party": 1}, "no party 1"),
        ({"cut": ["cut1"], "parts": "left_right", "sees": "embedding_gradient"}, "parts = 'whole'"),
        ({"cut": ["cut1"], "sees": "gradients"}, "sees"),
        ({"cut": ["cut1"], "defense": ["pruning(rate=0.9)"]}, "only embeddings leave a party"),
        ({"cut": ["cut1"], "local_steps": [2]}, "one embedding per record"),
        ({"cut": ["cut1"], "parts": "columns", "utility": UtilitySettings()}, "divides tables"),
        ({"cut": ["cut1"], "model": ["resnet20"], "batch_norm": "train"}, ""),
    ],
)
def test_what_does_not_fit_is_told_in_one_sentence_before_any_work(changes: dict[str, object], sentence: str) -> None:
    def check() -> None:
        check_inputs(Plan.default(**{"data": ["digits"], "model": [LENET], **changes}))

    if not sentence:
        check()  # BatchNorm on batch statistics couples embeddings, as it does updates; that is allowed and told elsewhere
        return
    with pytest.raises(UsageError, match=sentence):
        check()


def test_estimates_know_vertical_rows() -> None:
    plan = Plan.default(data=["digits"], model=[LENET], cut=["cut1"], defense=["none"], records=2)
    (row,) = estimate_plan(plan, 1).rows
    assert row.steps > 0 and row.cell.cut == "cut1"


def test_the_report_names_the_cut_and_what_is_seen() -> None:
    nobody = Summary(n=1, identified=Share(value=0.0, low=0.0, high=0.8, count=0, n=1))

    def words(*names: str, **changes: Any) -> str:
        settings = decode(KeptCell, CELL.replace(**changes).as_dict())
        return setting_words(CellResult(settings=settings, selected=nobody), names)

    vertical = words(parts="left_right")
    assert "vertical, cut1 · left_right · party 0" in vertical and "an embedding is seen" in vertical
    assert "vertical" not in words(cut="") and "round" not in words(cut="")
    assert words("cut", cut="") == "horizontal"
    assert "2\xa0rounds" in words(cut="", rounds=2)


def test_a_captured_update_is_no_embedding(tmp_path: Path) -> None:
    from gradveil.audit.captured import audit_captured

    with pytest.raises(UsageError, match="not an embedding"):
        audit_captured(tmp_path / "u.safetensors", CELL, tmp_path)


def test_data_is_loaded_whole() -> None:
    assert load_cell_data(CELL).input_shape == digits().input_shape


def test_the_report_of_a_mixed_run_shows_both_kinds_of_row(tmp_path: Path) -> None:
    plan = Plan.default(
        data=["digits"],
        model=[LENET],
        cut=["none", "cut1"],
        defense=["none"],
        records=2,
        lists="32",
        ensemble=["inverting_gradients(steps=5, objective='l2')"],
    )
    result = run_audit(plan, tmp_path, workers=1)
    assert [cell.settings.cut for cell in result.cells] == ["", "cut1"]
    page = html.unescape(write_report(result.out).read_text(encoding="utf-8"))
    assert "vertical, cut1" in page and "sharing an embedding" in page
    assert "Settings of this run differ in what the attacker sees" in page
    assert all(ThreatModel(sees=sees).describe()[0] in page for sees in ("update", "embedding"))


@pytest.mark.parametrize("name", [name for name in DEFENSES.names() if vertical_fault(DEFENSES.build(name)) is None])
def test_every_defense_that_fits_is_measured_with_every_attacker(name: str) -> None:
    record = encode(run_cell(CELL.replace(records=1, steps=2, ensemble="quick", defense=name), digits()).result)
    assert record["cell"]["ensemble"] == "embedding-quick-1"
    stances = {row["stance"] for row in record["attackers"]}
    assert "plain" in stances and (name == "none" or "informed" in stances)
    assert {row["recipe"] for row in record["attackers"]} >= {"embedding_sharp", "embedding_smooth", "piste_like"}
    assert not [check for check in record["checks"] if check["level"] == "fail"]
    assert record["risk"]["reason"] == "" and record["levels"]["list"]["lists"]["random"]["size"] == 32
