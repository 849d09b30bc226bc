"""Rounds restored one by one and put together."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from gradveil.adversary import OpenAdversary
from gradveil.attacks.base import AttackContext, launch
from gradveil.attacks.ensembles import informed_twins
from gradveil.attacks.generic.rounds import ByRound, by_round
from gradveil.attacks.inverting_gradients import InvertingGradients
from gradveil.attacks.linear_layer import LinearLayer
from gradveil.learning import Learner
from gradveil.records import ORDINARY, Batch, Knowledge, Observation, Reconstruction, ThreatModel, Update, WhatArrives
from tests.unit.attacks.scenes import make_batch, make_context, make_learner, observe

STD = 0.25


class Denoiser(OpenAdversary):
    """Searches as the plain attacker and takes half of the distance to grey off."""

    def finish(self, reconstruction: Reconstruction, observation: Observation) -> Reconstruction:
        assert len(observation.updates) == len(observation.learners)
        return reconstruction.replace(inputs=0.5 + 0.5 * (reconstruction.inputs - 0.5))


def rounds_of(batch: Batch, rounds: int, learner: Learner) -> tuple[Observation, list[Tensor]]:
    """Return what is seen of a client that adds other noise to its data in every round, and what it trained on."""
    generator = torch.Generator().manual_seed(4)
    noise = [STD * torch.randn(batch.inputs.shape, generator=generator, dtype=batch.inputs.dtype) for _ in range(rounds)]
    trained = [(batch.inputs + each).clamp(0, 1) for each in noise]
    updates = tuple(
        Update(dict(learner.update(inputs, batch.targets)), examples=len(batch), round=index)
        for index, inputs in enumerate(trained)
    )
    seen = observe(learner, batch).replace(
        learners=(learner,) * rounds,
        updates=updates,
        adversary=Denoiser(),
        labels=batch.targets,
        threat=ThreatModel(rounds=rounds, knows=ORDINARY | {Knowledge.LABELS}),
    )
    return seen, trained


SEARCH = InvertingGradients(steps=120, signed=False, schedule="cosine", tv=1e-6, start="grey", title="search")


def test_rounds_are_searched_alone_restored_and_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch()
    seen, trained = rounds_of(batch, 3, make_learner())
    seeds = []

    def exactly(self: object, observations: list[Observation], context: AttackContext) -> list[Reconstruction]:
        (alone,) = observations
        assert alone.threat.rounds == 1 and len(alone.learners) == len(alone.updates) == 1
        seeds.append(context.seed)
        own = trained[alone.update.round]
        return [Reconstruction(own, batch.targets, "search", first_loss=1.0, best_loss=0.1, steps=120)]

    monkeypatch.setattr(InvertingGradients, "run", exactly)
    attack = by_round(SEARCH, seen, fresh=True)
    assert attack is not None and attack.rounds == 3
    found = launch(attack, [seen], make_context(500))
    assert len(set(map(repr, seeds))) == 3, "every round has starts of its own"
    assert [f"{c.recipe}/{c.stance}" for c in found] == [
        "search_rounds/plain",
        "search_rounds_restored/informed",
        "search_rounds_median/informed",
    ]
    plain, mean, median = found
    assert torch.allclose(plain.inputs, torch.stack(trained).mean(0))
    errors = [float((each - batch.inputs).square().mean()) for each in trained]
    assert float((plain.inputs - batch.inputs).square().mean()) < 0.5 * min(errors), "noise of three rounds averages out"
    assert torch.allclose(mean.inputs, 0.5 + 0.5 * (plain.inputs - 0.5), atol=1e-6), "finished once, and only once"
    assert mean.unfinished is not None and torch.equal(mean.unfinished, plain.inputs)
    assert not torch.equal(median.inputs, mean.inputs)
    assert plain.steps == 3 * 120 and plain.best_loss == pytest.approx(0.3) and plain.first_loss == 3
    (twin,) = informed_twins([plain], [seen])
    assert twin.recipe == "search_rounds" and twin.stance == "informed"


def test_who_does_not_know_the_defense_restores_nothing() -> None:
    batch, learner = make_batch(), make_learner()
    seen, _ = rounds_of(batch, 2, learner)
    ignorant = seen.replace(threat=ThreatModel(rounds=2, knows=ORDINARY - {Knowledge.DEFENSE}), labels=None)
    attack = by_round(dataclasses.replace(SEARCH, steps=2), ignorant, fresh=True)
    assert attack is not None
    (found,) = attack.run([ignorant], make_context())
    assert (found.recipe, found.stance) == ("search_rounds", "plain")


def test_two_rounds_have_no_median_and_an_informed_search_has_no_plain_find() -> None:
    seen, _ = rounds_of(make_batch(), 2, make_learner())
    attack = by_round(dataclasses.replace(SEARCH, steps=2, stance="informed"), seen, fresh=True)
    assert attack is not None
    (found,) = attack.run([seen], make_context())
    assert (found.recipe, found.stance) == ("search_rounds_restored", "informed")


def test_examples_of_a_batch_are_aligned_before_they_are_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(3)
    seen, _ = rounds_of(batch, 2, make_learner())

    def shuffled(self: object, observations: list[Observation], context: object) -> list[Reconstruction]:
        order = [0, 1, 2] if observations[0].updates[0].round == 0 else [2, 0, 1]
        return [Reconstruction(batch.inputs[order], batch.targets[order], "search", best_loss=0.0, first_loss=1.0, steps=1)]

    monkeypatch.setattr(InvertingGradients, "run", shuffled)
    attack = by_round(SEARCH, seen, fresh=True)
    assert attack is not None
    plain, restored = attack.run([seen], make_context())
    assert torch.allclose(plain.inputs, batch.inputs)
    assert torch.allclose(restored.inputs, 0.5 + 0.5 * (batch.inputs - 0.5))


def test_the_start_that_fits_best_is_kept_of_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, _ = rounds_of(make_batch(), 2, make_learner())

    def several(self: object, observations: list[Observation], context: object) -> list[Reconstruction]:
        base = Reconstruction(torch.zeros(1, 2, 8, 8), torch.tensor([0]), "search", first_loss=1.0, steps=1)
        losses = (0.5, 0.1, float("nan"))
        return [
            base.replace(inputs=torch.full((1, 2, 8, 8), level), best_loss=loss)
            for level, loss in zip((0.1, 0.7, 0.9), losses, strict=True)
        ]

    monkeypatch.setattr(InvertingGradients, "run", several)
    attack = by_round(SEARCH, seen, fresh=True)
    assert attack is not None
    assert torch.allclose(attack.run([seen], make_context())[0].inputs, torch.full((1, 2, 8, 8), 0.7))


class Noisy(OpenAdversary):
    def arrives(self, observation: Observation) -> WhatArrives:
        return super().arrives(observation).replace(noise_std=0.1)


def test_rounds_are_taken_one_by_one_only_where_that_can_help() -> None:
    seen, _ = rounds_of(make_batch(), 2, make_learner())
    assert by_round(SEARCH, seen, fresh=False) is None
    assert by_round(SEARCH, seen.replace(learners=seen.learners[:1], updates=seen.updates[:1]), fresh=True) is None
    assert by_round(SEARCH, seen.replace(adversary=Noisy()), fresh=True) is None
    assert by_round(dataclasses.replace(SEARCH, stance="averaged"), seen, fresh=True) is None
    assert by_round(LinearLayer(), seen, fresh=True) is None
    assert by_round(ByRound(steps=1), seen, fresh=True) is None


def test_its_cost_counts_every_round() -> None:
    alone = dataclasses.replace(SEARCH, restarts=2)
    assert ByRound(steps=alone.steps, restarts=2, rounds=3).cost().restarts == 6
    assert ByRound(steps=120, rounds=3).cost().steps == 120


def test_it_runs_as_any_attack_does() -> None:
    seen, _ = rounds_of(make_batch(dtype=torch.float32), 2, make_learner(dtype=torch.float32))
    attack = by_round(dataclasses.replace(SEARCH, steps=3), seen, fresh=True)
    assert attack is not None
    steps: list[int] = []
    found = launch(attack, [seen, seen], make_context(500, progress=steps.append))
    assert [c.target for c in found] == [0, 0, 1, 1]
    assert sum(steps) == attack.cost().steps * attack.cost().restarts * 2
