"""Tasks beyond many classes: two classes from a MedMNIST file with hospitals of given sizes, and masks with a U-Net."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradveil.cli import main
from gradveil.errors import UsageError
from gradveil.federation.engine import run_training
from gradveil.federation.setup import build_federation
from gradveil.learning.task import dice
from gradveil.report import write_report
from gradveil.study.codec import encode
from tests.unit.federation.small import settings


def medmnist(folder: Path, count: int = 60) -> str:
    """A file as MedMNIST has them: grey 28×28 bytes, labels in a column, three splits; class 1 has a bright middle."""
    random = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for split, n in (("train", count), ("val", 8), ("test", 24)):
        labels = (np.arange(n) % 3 > 0).astype(np.uint8)
        images = random.integers(0, 120, (n, 28, 28), dtype=np.uint8)
        images[:, 8:20, 8:20] += (labels * 120)[:, None, None]
        arrays |= {f"{split}_images": images, f"{split}_labels": labels[:, None]}
    path = folder / "pneumonia.npz"
    np.savez(path, **arrays)
    return str(path)


def test_chest_x_rays_of_hospitals_with_given_sizes(tmp_path: Path) -> None:
    """One channel, two classes, labels in a column, clients of given sizes down to a single record; F1 beside accuracy."""
    asked = settings(
        data=medmnist(tmp_path),
        model="lenet(activation='relu')",
        clients=4,
        clients_per_round=4,
        partition="sizes(sizes=[1, 4, 15, 40])",
        rounds=20,
        learning_rate=0.05,  # at 0.2 most seeds fall back to one class, and which do depends on the processor
    )
    result = run_training(asked, out=tmp_path / "out")
    assert result.data["client_sizes"] == [1, 4, 15, 40] and result.data["test"] == 24
    last = result.rounds[-1]
    assert last.f1 is not None and last.f1 > 0.9 and last.accuracy is not None and last.accuracy > 0.85
    saved = json.loads((tmp_path / "out" / "training.json").read_text())
    assert saved["final_f1"] == last.f1 and saved["rounds"][-1]["f1"] == last.f1 and saved["data"]["score"] == "accuracy"
    page = write_report(tmp_path / "out").read_text()
    assert "<th>F1</th>" in page


def test_f1_is_not_fooled_by_the_commoner_class(tmp_path: Path) -> None:
    federation = build_federation(settings(data=medmnist(tmp_path), model="mlp(hidden=4)"))
    weights = {name: torch.zeros_like(value) for name, value in federation.learner.weights.items()}
    bias = [name for name in weights if name.endswith("bias")][-1]
    for said, expected in ((0, 0.0), (1, 0.8)):
        weights[bias] = torch.tensor([0.0, 0.0]).index_fill(0, torch.tensor([said]), 1.0)
        found = federation.scores(weights, federation.evaluator.buffers)
        assert found.f1 == pytest.approx(expected) and found.accuracy == pytest.approx((1 / 3, 2 / 3)[said])


def test_other_data_has_no_f1() -> None:
    result = run_training(settings(data="digits", rounds=1))
    assert result.rounds[0].f1 is None and "f1" not in encode(result.rounds[0])


@pytest.mark.parametrize("loss", ["dice", "binary_cross_entropy"])
def test_a_unet_learns_masks(tmp_path: Path, loss: str) -> None:
    """Masks of what is bright; the accuracy is the mean Dice, and the printed word says so."""
    random = np.random.default_rng(1)
    coarse = random.permuted(np.tile([0.1, 0.2, 0.8, 0.9], (40, 1)), axis=1).reshape(40, 2, 2).repeat(4, 1).repeat(4, 2)
    np.savez(tmp_path / "cells.npz", images=np.float32(0.8 * coarse + 0.2 * random.random((40, 8, 8))), masks=coarse > 0.5)
    asked = settings(
        data=str(tmp_path / "cells.npz"),
        model="unet(width=4, levels=1)",
        loss=loss,
        rounds=8,
        clients_per_round=4,
        learning_rate=1.0,
    )
    result = run_training(asked, out=tmp_path / "out")
    last = result.rounds[-1].accuracy
    assert last is not None and last > 0.85, "calling everything foreground scores 0.67"
    assert result.score == "dice" and encode(result.rounds[-1])["score"] == "dice"
    federation = build_federation(asked)
    logits = federation.evaluator.forward(result.weights, federation.test.inputs)
    assert last == pytest.approx(float(dice(logits > 0, federation.test.targets).mean()), abs=1e-6)
    page = write_report(tmp_path / "out").read_text()
    assert "Dice by round" in page and "Accuracy by round" not in page


def test_the_command_says_dice_and_refuses_what_cannot_learn_masks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "--data", "segments", "--model", "unet(width=2)", "--rounds", "1", "--clients", "2", "--quiet"]
    folder = ["--out", str(tmp_path / "out"), "--no-latency"]
    assert main([*command, "--loss", "dice", "--minibatch", "64", *folder]) == 0
    assert capsys.readouterr().out.startswith("Dice ")
    with pytest.raises(UsageError, match="binary_cross_entropy"):
        run_training(settings(data="segments", model="unet(width=2)", rounds=1))
    with pytest.raises(UsageError, match="the data has masks"):
        run_training(settings(data="segments", model="lenet", rounds=1))
