"""From candidates to numbers: what every attacker's own referee selects, and the best by truth."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from gradveil.adversary import OpenAdversary
from gradveil.attacks import Referee, launch, resolve
from gradveil.audit.judge import Referees, best_by_truth, per_recipe, score, select, select_plain, undefended
from gradveil.audit.scene import Subject
from gradveil.learning.learner import Learner
from gradveil.metrics.base import Unavailable
from gradveil.randomness import Seed
from gradveil.records import Reconstruction, Update
from gradveil.tensors import Named
from tests.unit.audit.small import make_subject


@functools.cache
def subject() -> Subject:
    return make_subject(records=6, batch_size=2)


def guess(target: int, error: float, recipe: str, *, flipped: bool = False, stance: str = "plain") -> Reconstruction:
    batch = subject().targets[target].batch
    wave = torch.sin(3 * torch.arange(batch.inputs.numel(), dtype=torch.float32)).reshape(batch.inputs.shape)
    inputs = (batch.inputs + error * wave).clamp(0, 1)
    inputs, labels = (inputs.flip(0), batch.targets.flip(0)) if flipped else (inputs, batch.targets)
    return Reconstruction(inputs, labels, recipe, target=target, stance=stance)


def candidates() -> list[list[Reconstruction]]:
    """Return a coarse plain and a fine informed candidate per target."""
    return [[guess(t, 0.4, "coarse"), guess(t, 0.05, "fine", stance="informed", flipped=t == 1)] for t in range(3)]


def both(**changes: Any) -> Referees:
    return Referees(Referee(**changes), Referee(**changes))


def psnr(of: Tensor | Unavailable) -> Tensor:
    assert isinstance(of, Tensor)
    return of


def test_batches_come_back_in_any_order() -> None:
    straight = score(subject(), [guess(t, 0.1, "x") for t in range(3)])
    flipped = score(subject(), [guess(t, 0.1, "x", flipped=True) for t in range(3)])
    assert straight.labels is not None and flipped.labels is not None
    assert float(straight.labels.mean()) == 1.0 == float(flipped.labels.mean())
    assert psnr(flipped.values["psnr"]).tolist() == pytest.approx(psnr(straight.values["psnr"]).tolist())
    assert straight.rank.tolist() == [1] * 6
    assert all(value is None or value > 15 for value in straight.column("psnr"))


def test_select_keeps_what_the_referee_would() -> None:
    kept, verdicts = select(subject(), candidates(), Referee())
    assert [c.recipe for c in kept] == ["fine"] * 3 and len(verdicts) == 3
    plain = select_plain(subject(), candidates(), both())
    assert plain is not None and [c.recipe for c in plain] == ["coarse"] * 3
    assert select_plain(subject(), [many[1:] for many in candidates()], both()) is None


@dataclasses.dataclass(frozen=True)
class Doubled(OpenAdversary):
    """Knows that clients send twice their update."""

    def on_update(self, update: Named, learner: Learner, variables: Named) -> Named:
        return {name: 2 * value for name, value in update.items()}


def test_who_ignores_the_defense_compares_as_if_there_were_none() -> None:
    """Under twice the update, the truth explains it for who knows; for who does not, something else does."""
    target = subject().targets[0]
    twice = {name: 2 * value for name, value in target.observation.update.weights.items()}
    seen = target.observation.replace(
        updates=(Update(twice, target.observation.update.examples, 0),), adversary=Doubled(), labels=target.batch.targets
    )
    truth, wrong = guess(0, 0.0, "truth"), guess(0, 0.9, "wrong")
    referees = both()
    at_truth, elsewhere = referees.informed.scores(seen, [truth, wrong])
    assert at_truth < 1e-9 < elsewhere
    plainly = referees.plain.scores(undefended(seen), [truth])[0]
    assert plainly > 0.1 and referees.choose(seen, [truth, wrong]).scores[0] == plainly
    informed = referees.choose(seen, [truth, wrong.replace(stance="informed")])
    assert informed.scores[0] == at_truth, "who also has an informed candidate knows the defense"


def test_the_best_by_truth_is_the_nearest_whatever_the_referee_says() -> None:
    assert [c.recipe for c in best_by_truth(subject(), candidates())] == ["fine"] * 3


def test_every_recipe_has_its_own_row() -> None:
    chosen = best_by_truth(subject(), candidates())
    found = per_recipe(subject(), candidates(), both(rehearsal={"fine/informed": 30.0}), chosen, Seed(0))
    rows = [row for row, _ in found]
    assert [(r.recipe, r.stance, r.tries, r.chosen) for r in rows] == [
        ("coarse", "plain", 1, 0),
        ("fine", "informed", 1, 3),
    ]
    assert [r.rehearsal_psnr for r in rows] == [None, 30.0]
    medians = [r.summary.psnr.median for r in rows if r.summary is not None and r.summary.psnr is not None]
    assert len(medians) == 2 and medians[1] > medians[0]


def test_a_real_attack_identifies_everyone() -> None:
    single = make_subject()
    found = launch(resolve("linear_layer").members[0].attack, [t.observation for t in single.targets], single.context(1))
    scored = score(single, found)
    assert scored.rank.tolist() == [1] * 4
    summary = scored.summary(Seed(0))
    assert summary.identified.value == 1.0
