"""Attackers who know the defense without trusting its author."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from gradveil.adversary import OpenAdversary
from gradveil.attacks.adaptive import DRAWS, OFFSET, STANCES, StraightThrough, ZeroMask, adversary_for, stances_for
from gradveil.attacks.base import AttackContext
from gradveil.attacks.engine.label_belief import FIRST_DRAW
from gradveil.attacks.engine.objectives import OBJECTIVES
from gradveil.attacks.inverting_gradients import InvertingGradients
from gradveil.errors import UsageError
from gradveil.learning import Learner
from gradveil.records import ORDINARY, AdversaryModel, Batch, Comparison, Knowledge, Observation, ThreatModel
from gradveil.tensors import Named
from tests.unit.attacks.scenes import make_batch, make_context, make_learner, observe, simulator


def residual(seen: Observation, adversary: AdversaryModel, batch: Batch, offsets: Named | None = None) -> float:
    """Return ‖simulated - observed‖ / ‖observed‖ for one guess."""
    evidence = adversary.evidence(seen, 0) | {OFFSET + n: v for n, v in (offsets or {}).items()}
    replayed = adversary.replay(seen.learner, batch.inputs, batch.targets, {})
    comparison = adversary.compare(evidence, replayed, {})
    gap = sum(float(v.square().sum()) for v in comparison.residuals().values())
    return float((gap / sum(float(v.square().sum()) for v in comparison.observed.values())) ** 0.5)


@pytest.mark.parametrize("defense", ["pruning(rate=0.9)", "top_k(keep=0.05)", "entry_dropout(rate=0.5)"])
def test_a_zero_mask_undoes_pruning(defense: str) -> None:
    truth = make_batch()
    seen = observe(make_learner(), truth, defense)
    assert residual(seen, OpenAdversary(), truth) > 0.05
    assert residual(seen, ZeroMask(), truth) < 1e-12
    assert residual(seen, ZeroMask(), make_batch(seed=9)) > 1e-3


@pytest.mark.parametrize("defense", ["clipping(bound=0.01)", "pruning(rate=0.9)", "example_clipping(bound=0.02)"])
def test_straight_through_is_exact_at_the_truth_of_a_deterministic_defense(defense: str) -> None:
    truth, learner = make_batch(2), make_learner()
    seen = observe(learner, truth, defense)
    context = make_context(simulate=simulator((learner,), defense))
    through = StraightThrough()
    offsets = offsets_of(through, learner, truth.inputs, truth.targets, context, 0)
    assert residual(seen, OpenAdversary(), truth) > 0.05
    assert residual(seen, through, truth, offsets) < 1e-12
    other = make_batch(2, seed=9)
    elsewhere = offsets_of(through, learner, other.inputs, other.targets, context, 0)
    assert residual(seen, through, other, elsewhere) > 1e-3


def offsets_of(
    through: StraightThrough, learner: Learner, inputs: Tensor, targets: Tensor, context: AttackContext, step: int
) -> Named:
    """Return the offsets of one round and one candidate."""
    (found,) = through.offsets((learner,), inputs[None], targets[None], context, step)
    return {name: value[0] for name, value in found.items()}


def spread(draws: int, context: AttackContext) -> float:
    learner, guess = make_learner(), make_batch()
    through = StraightThrough(draws=draws)
    many = [offsets_of(through, learner, guess.inputs, guess.targets, context, step) for step in range(12)]
    return float(torch.stack([torch.cat([v.reshape(-1) for v in one.values()]) for one in many]).std(0).mean())


def test_averaging_over_draws_takes_the_chance_out() -> None:
    context = make_context(simulate=simulator((make_learner(),), "gaussian_noise(std=0.01)"))
    one, four = spread(1, context), spread(4, context)
    assert one == pytest.approx(0.01, rel=0.15)
    assert four == pytest.approx(one / 2, rel=0.15)


def test_without_the_clients_code_there_is_no_offset() -> None:
    learner, guess = make_learner(), make_batch()
    assert StraightThrough().offsets((learner,), guess.inputs[None], guess.targets[None], make_context(), 0) == [{}]


@pytest.mark.parametrize(("steps", "expected"), [(30, [0, 25, 29]), (51, [0, 25, 50]), (1, [0])])
def test_offsets_are_fresh_wherever_iterates_compete(steps: int, expected: list[int]) -> None:
    learner = make_learner(dtype=torch.float32)
    seen = observe(learner, make_batch(dtype=torch.float32), "clipping(bound=0.01)")
    inner, renewed = simulator((learner,), "clipping(bound=0.01)"), []

    def simulate(inputs: Tensor, targets: Tensor, draw: int) -> tuple[Named, ...]:
        renewed.extend([draw] if draw < FIRST_DRAW else [])  # those beyond teach which label it is
        return inner(inputs, targets, draw)

    attack = InvertingGradients(steps=steps, stance="straight_through", signed=False)
    (candidate,) = attack.run([seen], make_context(steps, simulate=simulate))
    assert sorted(set(renewed)) == expected
    fresh = offsets_of(StraightThrough(), learner, candidate.inputs, candidate.targets, make_context(simulate=inner), 0)
    raw = learner.update(candidate.inputs, candidate.targets)
    defended = {name: value + fresh[name] for name, value in raw.items()}
    found = float(OBJECTIVES.get("cosine")(Comparison(defended, seen.update.weights)))
    assert candidate.best_loss == pytest.approx(found, rel=1e-3)


def test_a_relative_prior_is_measured_against_what_straight_through_starts_from() -> None:
    learner, defense = make_learner(), "pruning(rate=0.9)"
    seen = observe(learner, make_batch(), defense)
    prior = InvertingGradients(steps=60, signed=False, schedule="cosine", tv=0.5, tv_end=0.02, relative=True, start="grey")
    attack = dataclasses.replace(prior, stance="straight_through")
    (candidate,) = attack.run([seen], make_context(60, simulate=simulator((learner,), defense)))
    # With its offset the loss starts thousands of times smaller than without; in the wrong unit the prior alone would rule.
    assert candidate.best_loss < 0.2 * candidate.first_loss


def test_stances_follow_what_was_seen_and_what_is_known() -> None:
    learner, batch = make_learner(), make_batch()
    with_code = make_context(simulate=simulator((learner,), "none"))
    random = make_context(simulate=simulator((learner,), "none"), random_defense=True)
    assert stances_for(observe(learner, batch), make_context()) == ("plain",)
    pruned = observe(learner, batch, "pruning(rate=0.9)")
    assert stances_for(pruned, with_code) == ("plain", "informed", "straight_through", "zero_mask")
    noisy = observe(learner, batch, "gaussian_noise(std=0.1)")
    assert stances_for(noisy, random) == ("plain", "informed", "averaged")
    ignorant = pruned.replace(threat=ThreatModel(knows=ORDINARY - {Knowledge.DEFENSE}))
    assert stances_for(ignorant, with_code) == ("plain", "zero_mask")


def test_every_stance_has_an_adversary_and_others_are_refused() -> None:
    seen = observe(make_learner(), make_batch(), "clipping(bound=0.01)")
    kinds = {stance: adversary_for(stance, seen) for stance in STANCES}
    assert kinds["informed"] is seen.adversary
    assert type(kinds["plain"]) is OpenAdversary and isinstance(kinds["zero_mask"], ZeroMask)
    assert kinds["straight_through"] == StraightThrough(draws=1) and kinds["averaged"] == StraightThrough(draws=DRAWS)
    with pytest.raises(UsageError, match="did you mean 'informed'"):
        adversary_for("informd", seen)
