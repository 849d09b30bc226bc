"""No author can switch the regression off: it runs against every defense there is, on batches and local steps too."""

from __future__ import annotations

import pytest
import torch

from gradveil.attacks import launch
from gradveil.attacks.kernel_regression import KernelRegression
from gradveil.audit.scene import build_subject
from gradveil.defenses import DEFENSES
from gradveil.study.cell import Cell
from tests.unit.audit.small import digits

HORIZONTAL = [name for name in DEFENSES.names() if "embedding" not in DEFENSES.card(name).acts_on]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"batch_size": 2, "local_steps": 2}], ids=["one", "steps of a batch"])
@pytest.mark.parametrize("defense", HORIZONTAL)
def test_it_runs_against_every_defense(defense: str, settings: dict[str, int]) -> None:
    cell = Cell(data="digits", model="lenet", records=2, defense=defense, lists="off", known_labels=True, **settings)  # type: ignore[arg-type]
    subject = build_subject(cell, digits(), 0)
    context = subject.context(10)
    stance = "plain" if context.simulate is None else "simulated"
    attack = KernelRegression(records=16, draws=1, stance=stance, seconds=1.0)
    assert attack.lacks(subject.targets[0].observation, context) is None
    found = launch(attack, [target.observation for target in subject.targets], context)
    assert len(found) == len(subject.targets)
    assert all(bool(torch.isfinite(each.inputs).all()) and each.best_loss >= 0 for each in found)
