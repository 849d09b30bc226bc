"""Audits and scores of risk on masks and on two grey classes, attack included."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from gradveil.attacks import AttackContext, launch
from gradveil.attacks.deep_leakage import DLG
from gradveil.attacks.engine.labels import recover_labels
from gradveil.audit.cell import run_cell
from gradveil.audit.scene import Subject, build_subject, load_cell_data
from gradveil.cli import main
from gradveil.errors import MissingKnowledge, UsageError
from gradveil.randomness import Seed
from gradveil.run.grid import check_inputs
from gradveil.run.starter_plan import inspect_inputs
from gradveil.study.cell import Cell
from gradveil.study.codec import encode
from gradveil.study.plan import Plan

MODEL = "unet(width=2, levels=1, activation='tanh')"
ATTACK = "inverting_gradients(steps=120, signed=False, schedule='cosine', tv=0.001)"


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Cell:
    """Small pictures with masks of what is bright."""
    random = np.random.default_rng(2)
    images = np.float32(0.5 + 0.4 * np.sin(np.linspace(0, 6, 64).reshape(8, 8) + 6 * random.random((24, 1, 1))))
    path = tmp_path_factory.mktemp("masks") / "cells.npz"
    np.savez(path, images=images, masks=images > 0.5)
    return Cell(
        data=str(path),
        model=MODEL,
        loss="binary_cross_entropy",
        known_labels=True,
        records=2,
        ensemble=ATTACK,
        execution="batched",
        risk="off",
    )


@pytest.fixture(scope="module")
def subject(cell: Cell) -> Subject:
    return build_subject(cell, load_cell_data(cell), 1)


def test_an_update_from_masks_is_attacked_end_to_end(cell: Cell) -> None:
    """With the masks known, matching beats every null, and nothing pretends to have recovered labels."""
    record = encode(run_cell(cell).result)
    assert record["selected"]["psnr"]["median"] > record["bar"]["psnr"]["value"] + 1
    assert "label_accuracy" not in record["selected"]
    assert all(row["label"] is None and row["label_correct"] is None for row in record["records"])
    assert "labels" in record["threat"]["knows"]
    assert not [check for check in record["checks"] if check["level"] == "fail"]
    json.dumps(record, allow_nan=False)


def test_masks_are_never_recovered(cell: Cell, subject: Subject) -> None:
    with pytest.raises(UsageError, match="no attack here recovers masks"):
        build_subject(cell.replace(known_labels=False), load_cell_data(cell), 0)
    seen = subject.targets[0].observation
    assert seen.classes == 0
    with pytest.raises(MissingKnowledge, match="no classes"):
        recover_labels(seen.replace(labels=None))
    with pytest.raises(UsageError, match="cannot search for"):
        launch(DLG(steps=1), [seen], AttackContext(seed=Seed(0)))


def test_rehearsals_bring_masks_of_their_own(subject: Subject) -> None:
    masks = subject.rehearsals[0].batch.targets
    assert masks.shape == (1, 1, 8, 8) and set(masks.unique().tolist()) <= {0.0, 1.0}
    assert not torch.equal(masks, subject.targets[0].batch.targets)


def test_a_plan_says_so_before_it_starts(cell: Cell) -> None:
    plan = Plan.default(data=cell.data, model=MODEL, records=2, loss="binary_cross_entropy")
    with pytest.raises(UsageError, match="--known-labels"):
        check_inputs(plan)
    check_inputs(plan.override(known_labels=True))
    with pytest.raises(UsageError, match="the data has masks"):
        check_inputs(plan.override(known_labels=True, model=("lenet",)))
    assert any("with a mask each" in sentence for sentence in inspect_inputs(plan).sentences())


def test_risk_of_masks(cell: Cell, tmp_path: Path) -> None:
    """The score needs no labels to be classes; the table has a dash where a class would stand."""
    command = ["risk", "--data", cell.data, "--model", MODEL, "--records", "1", "--quiet", "--out", str(tmp_path)]
    assert main([*command, "--loss", "dice"]) == 0
    (found,) = json.loads((tmp_path / "risk.json").read_text())["assessments"]
    assert found["records"][0]["label"] is None and np.isfinite(found["records"][0]["invre"])


def test_two_grey_classes_with_labels_in_a_column(tmp_path: Path) -> None:
    """A MedMNIST file is audited as it is: split names, one channel, labels of shape (N, 1)."""
    random = np.random.default_rng(3)
    np.savez(
        tmp_path / "xray.npz",
        train_images=random.integers(0, 256, (20, 12, 12), dtype=np.uint8),
        train_labels=(np.arange(20) % 2).astype(np.uint8)[:, None],
        test_images=random.integers(0, 256, (4, 12, 12), dtype=np.uint8),
        test_labels=np.array([[0], [1], [0], [1]], dtype=np.uint8),
    )
    two = Cell(data=str(tmp_path / "xray.npz"), model="mlp(hidden=8)", records=3, ensemble="linear_layer", risk="off")
    record = encode(run_cell(two).result)
    assert record["selected"]["identified"]["value"] == 1.0 and record["selected"]["label_accuracy"]["value"] == 1.0
    assert {row["label"] for row in record["records"]} <= {0, 1}
