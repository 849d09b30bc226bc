"""Signs as one more number of who holds a list: asked where nothing else tells, and nowhere else."""

from __future__ import annotations

import dataclasses

import torch

from gradveil.attacks.listing import Evidence
from gradveil.audit.list_level import measure_lists
from gradveil.defenses.base import ClientView, Defense, DefenseCard, State
from gradveil.records import Update
from tests.unit.audit.small import make_subject


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stretches(Defense):
    """Multiplies every entry by a factor of its own, a thousand or a thousandth at times; signs arrive."""

    card = DefenseCard(name="stretches", summary="Stretches.", cost="none", weakness="signs", acts_on=("update",), random=True)

    def protect_update(self, update: Update, view: ClientView, state: State) -> tuple[Update, State]:
        generator = view.generator("factors")
        stretched = {n: v * (3 * torch.randn(v.shape, generator=generator)).exp() for n, v in update.weights.items()}
        return update.replace(weights=stretched), state


def test_factors_that_differ_wildly_from_entry_to_entry_leave_the_signs() -> None:
    """Whitened distances, lengths and angles named 3 of 16, and nothing said that the information is there."""
    found = measure_lists(make_subject(records=16, defense="tests.unit.audit.test_list_signs:Stretches"), 24).headline
    assert found is not None
    (generic,) = (reach for reach in found.reached if reach.attacker == "generic")
    assert generic.share.count >= 14 and generic.rehearsed is not None and generic.rehearsed > 0.8


def test_signs_count_only_where_they_clearly_help() -> None:
    """So what was measured without them stays, and they add no chance to be wrong."""
    rows = torch.arange(12)
    good = torch.eye(12, dtype=torch.float64)[..., None]
    noise = torch.rand((12, 12, 1), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    everyone = torch.ones(12, 12, dtype=torch.bool)
    listed = Evidence(name="x", informed=False, features=good, own=good, truth=rows, apart=everyone).ranking(everyone, everyone)
    for features, signs, helps in ((good, noise, False), (noise, good, True)):
        both = (signs[..., 0], signs[..., 0])
        made = Evidence(name="x", informed=False, features=features, own=features, truth=rows, apart=everyone, signs=both)
        found, without = (each.ranking(everyone, everyone) for each in (made, dataclasses.replace(made, signs=None)))
        assert torch.equal(found.scores, without.scores) != helps
        assert found.rehearsed == listed.rehearsed == 1.0
        half = made.of(rows[:5])
        assert half.ranking(everyone[:5], everyone).scores.shape == (5, 12)
