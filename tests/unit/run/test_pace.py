"""What attackers will take: per update where each is searched, per label where all updates of a label share what is learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest

from gradveil.attacks import Attack, AttackCard, AttackContext
from gradveil.attacks.base import Cost
from gradveil.attacks.kernel_regression import KernelRegression
from gradveil.records import Observation, Reconstruction
from gradveil.run import pace
from tests.unit.attacks.scenes import make_batch, make_context, make_learner, observe


@dataclass(frozen=True, kw_only=True)
class OneLook(Attack):
    card: ClassVar[AttackCard] = AttackCard(name="one look", summary="Looks once.")
    per_label: bool = True

    def cost(self) -> Cost:
        return Cost(per_label=self.per_label)

    def run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        return []


@pytest.mark.parametrize(
    ("per_label", "size", "updates", "expected"),
    [
        (False, 1, 40, 2.0),  # measured with forty copies together
        (True, 1, 1, 2.0),
        (True, 1, 40, 2.0 * 5 * (1 - 0.8**40)),  # nearly every one of five classes
        (True, 2, 40, 80.0),  # batches rarely share their labels
    ],
)
def test_what_updates_of_a_label_share_is_paid_once(
    per_label: bool, size: int, updates: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "_timed", lambda *_: (2.0, ()))
    seen = observe(make_learner(), make_batch(size))
    found = pace.attack_seconds(OneLook(per_label=per_label), seen, make_context(), updates, 0.1)
    assert found.seconds == pytest.approx(expected)


def test_the_regression_pays_by_label() -> None:
    assert KernelRegression().cost() == Cost(steps=1, restarts=1, per_label=True)
