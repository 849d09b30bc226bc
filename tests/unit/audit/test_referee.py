"""The referee picks what an attacker without the truth would keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from gradveil.adversary import OpenAdversary
from gradveil.attacks import referee as module
from gradveil.attacks.referee import Referee, recipe_key
from gradveil.learning.learner import Learner
from gradveil.recording import Recorded
from gradveil.records import Batch, Observation, Reconstruction, Update
from gradveil.tensors import Named, scale
from tests.unit.attacks.scenes import CLASSES, make_batch, make_learner, observe
from tests.unit.fake_cuda import FakeCuda


def candidate(inputs: Tensor, labels: Tensor, recipe: str = "some", **fields: object) -> Reconstruction:
    return Reconstruction(inputs, labels, recipe, **fields)  # type: ignore[arg-type]


def decoys(truth: Batch) -> list[Reconstruction]:
    """Return wrong answers: other inputs, grey, the truth with another label, and the truth with a little noise."""
    noise = 0.02 * torch.sin(5 * torch.arange(truth.inputs.numel(), dtype=torch.float64)).reshape(truth.inputs.shape)
    others = [make_batch(len(truth), seed=50 + s).inputs for s in range(3)] + [
        torch.full_like(truth.inputs, 0.5),
        truth.inputs + noise,
    ]
    found = [candidate(inputs, truth.targets) for inputs in others]
    return [*found, candidate(truth.inputs, (truth.targets + 1) % CLASSES)]


@pytest.mark.parametrize("defense", ["none", "clipping(bound=0.01)", "pruning(rate=0.8)", "gaussian_noise(std=0.0001)"])
@pytest.mark.parametrize("count", [1, 3])
def test_the_truth_is_picked_among_decoys(defense: str, count: int) -> None:
    truth = make_batch(count)
    seen = observe(make_learner(), truth, defense)
    many = [*decoys(truth), candidate(truth.inputs, truth.targets)]
    verdict = Referee().select(seen, many)
    assert verdict.chosen == len(many) - 1
    assert verdict.scores[-1] == min(verdict.scores) and len(verdict.scores) == len(many)
    # The order in which candidates come, and their precision, change nothing.
    rounded = [c.replace(inputs=c.inputs.float()) for c in reversed(many)]
    assert Referee().select(seen, rounded).chosen == 0


def test_local_steps_and_aggregates_are_replayed() -> None:
    for training in ({"shares": "weights", "local_steps": 3, "learning_rate": 0.1}, {"clients": 2}):
        truth = make_batch(2)
        seen = observe(make_learner(**training), truth)
        many = [*decoys(truth), candidate(truth.inputs, truth.targets)]
        assert Referee().select(seen, many).chosen == len(many) - 1


def test_known_noise_makes_the_score_a_likelihood() -> None:
    truth = make_batch()
    seen = observe(make_learner(), truth, "gaussian_noise(std=0.05)")
    at_truth, elsewhere = Referee().scores(seen, [candidate(truth.inputs, truth.targets), decoys(truth)[0]])
    # At the truth the residual is the noise itself: half a unit per compared entry, whatever its size.
    assert at_truth == pytest.approx(0.5, rel=0.1)
    assert elsewhere > at_truth


def test_a_defense_on_the_data_is_judged_by_what_was_trained_on() -> None:
    truth = make_batch()
    trained = (truth.inputs + 0.2 * torch.sin(9 * torch.arange(128.0, dtype=torch.float64)).reshape(truth.inputs.shape)).clamp(
        0, 1
    )
    learner = make_learner()
    seen = observe(learner, truth, "data_noise(std=0.2)").replace(
        updates=(Update(learner.update(trained, truth.targets), examples=1),)
    )
    finished = candidate(truth.inputs, truth.targets, stance="informed", unfinished=trained)
    raw = candidate(truth.inputs, truth.targets)
    scores = Referee().scores(seen, [finished, raw])
    assert scores[0] < 1e-20 < scores[1], "the finishing touch is scored instead of what was matched"


@dataclass(frozen=True)
class HiddenRate(OpenAdversary):
    """Knows that the client scaled its update, but not by how much."""

    def variables(self, observation: Observation, generator: torch.Generator) -> Named:
        return {"factor": torch.ones(())}

    def on_update(self, update: Named, learner: Learner, variables: Named) -> Named:
        return scale(update, variables["factor"])


def test_unknowns_are_refitted_for_every_candidate() -> None:
    truth, learner = make_batch(), make_learner()
    sent = scale(learner.update(truth.inputs, truth.targets), 1.8)
    seen = observe(learner, truth).replace(updates=(Update(sent, examples=1),), adversary=HiddenRate())
    many = [*decoys(truth), candidate(truth.inputs, truth.targets)]
    scores = Referee().scores(seen, many)
    assert scores[-1] == min(scores) and scores[-1] < 1e-4
    blind = Referee().scores(seen.replace(adversary=OpenAdversary()), many)
    assert blind[-1] > 0.1


class Rehearsal:
    """Three public images, and what a sharp and a smooth recipe made of them."""

    def __init__(self, sharp: float, smooth: float, defense: str = "none") -> None:
        self.truths = [make_batch(seed=70 + s) for s in range(3)]
        self.observations = [observe(make_learner(), truth, defense, seed=s) for s, truth in enumerate(self.truths)]
        self.candidates: list[Sequence[Reconstruction]] = [
            [candidate(shaken(t.inputs, sharp), t.targets, "sharp"), candidate(shaken(t.inputs, smooth), t.targets, "smooth")]
            for t in self.truths
        ]

    def referee(self) -> Referee:
        truths = [(t.inputs, t.targets) for t in self.truths]
        return Referee.rehearsed(self.observations, truths, [t.inputs for t in self.truths], self.candidates)


def shaken(inputs: Tensor, size: float) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return inputs + size * torch.randn(inputs.shape, generator=generator).to(inputs)


def test_a_rehearsal_learns_how_tensors_arrive_and_who_does_best() -> None:
    exact, noisy = Rehearsal(0.1, 0.01).referee(), Rehearsal(0.1, 0.01, "laplace_noise(scale=0.05)").referee()
    assert max(exact.arrival.values()) < 1e-9 < 0.1 < min(noisy.arrival.values())
    assert exact.truth_score < 1e-15 < noisy.truth_score
    assert exact.rehearsal["smooth/plain"] == pytest.approx(exact.rehearsal["sharp/plain"] + 20, abs=0.5)
    assert exact.rehearsal_score["smooth/plain"] < exact.rehearsal_score["sharp/plain"]


def test_ties_go_to_the_recipe_that_did_best_in_rehearsal() -> None:
    truth = make_batch()
    seen = observe(make_learner(), truth)
    pair = [
        candidate(shaken(truth.inputs, 0.05), truth.targets, "sharp"),
        candidate(shaken(truth.inputs, 0.07), truth.targets, "smooth"),
    ]
    for rehearsal, expected in ((Rehearsal(0.06, 0.08), "sharp"), (Rehearsal(0.08, 0.079), "smooth")):
        verdict = rehearsal.referee().select(seen, pair)
        assert verdict.tied == [0, 1], "both went as rehearsed"
        assert pair[verdict.chosen].recipe == expected


def test_a_recipe_that_went_worse_than_rehearsed_is_out() -> None:
    truth = make_batch()
    seen = observe(make_learner(), truth)
    favourite_failed = [
        candidate(make_batch(seed=8).inputs, truth.targets, "smooth"),
        candidate(shaken(truth.inputs, 0.1), truth.targets, "sharp"),
    ]
    verdict = Rehearsal(0.1, 0.01).referee().select(seen, favourite_failed)
    assert verdict.tied == [1] and verdict.chosen == 1


def test_a_favourite_that_slipped_still_beats_a_poor_recipe_that_explains_less() -> None:
    truth = make_batch()
    seen = observe(make_learner(), truth)
    slipped, poor = (
        candidate(shaken(truth.inputs, 0.05), truth.targets, "smooth"),
        candidate(shaken(truth.inputs, 0.1), truth.targets, "sharp"),
    )
    verdict = Rehearsal(0.1, 0.01).referee().select(seen, [slipped, poor])
    assert verdict.tied == [1] and verdict.scores[0] < verdict.scores[1], "only the poor recipe went as rehearsed"
    assert verdict.chosen == 0
    # The same scores with rehearsals the other way round: what explains better does not win by that alone.
    assert Rehearsal(0.01, 0.1).referee().select(seen, [slipped, poor.replace(inputs=shaken(truth.inputs, 0.009))]).chosen == 1


def test_noise_excuses_no_failure() -> None:
    truth, defense = make_batch(), "gaussian_noise(std=0.00012)"
    seen = observe(make_learner(), truth, defense)
    failed, fine = (
        candidate(make_batch(seed=8).inputs, truth.targets, "smooth"),
        candidate(shaken(truth.inputs, 0.02), truth.targets, "sharp"),
    )
    referee = Rehearsal(0.02, 0.01, defense).referee()
    scores = referee.scores(seen, [failed, fine])
    # Both lie between the half unit of a truth and twice that, but one explains the update and the other does not.
    assert 0.45 < scores[1] < scores[0] < 1.0
    assert referee.select(seen, [failed, fine]).chosen == 1


def test_where_nobody_went_as_rehearsed_the_lowest_score_wins() -> None:
    truth = make_batch()
    seen = observe(make_learner(), truth)
    bad = [
        candidate(make_batch(seed=8).inputs, truth.targets, "smooth"),
        candidate(shaken(truth.inputs, 0.3), truth.targets, "sharp"),
    ]
    verdict = Rehearsal(0.001, 0.001).referee().select(seen, bad)
    assert verdict.chosen == 1 and verdict.scores[1] < verdict.scores[0]


def test_without_rehearsals_the_referee_still_works() -> None:
    assert Referee.rehearsed([], [], [], []) == Referee()


def test_what_cannot_be_scored_is_never_chosen() -> None:
    truth = make_batch()
    broken = candidate(torch.full_like(truth.inputs, float("nan")), truth.targets)
    verdict = Referee().select(observe(make_learner(), truth), [broken, decoys(truth)[0]])
    assert verdict.scores[0] == float("inf") and verdict.chosen == 1


def test_recipes_are_told_apart_by_stance() -> None:
    truth = make_batch()
    assert recipe_key(candidate(truth.inputs, truth.targets, "a", stance="informed")) == "a/informed"


def test_one_recording_gives_the_slopes_of_all_updates_of_a_client(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Recorded", lambda function: Recorded(cuda.watched(function)))
    learner, judge = make_learner(), Referee(arrival={"0|head.weight": 0.5})
    for seed in range(2):
        truth = make_batch(seed=seed)
        seen, guess = observe(learner, truth, "pruning(rate=0.5)"), candidate(make_batch(seed=9).inputs, truth.targets)
        evaluate = judge.misfit(seen, guess)
        value, slope = evaluate(guess.inputs)
        assert float(value) == pytest.approx(judge.scores(seen, [guess])[0])
        step = 1e-4 * slope / slope.norm()
        rise = float(evaluate(guess.inputs + step)[0] - evaluate(guess.inputs - step)[0])
        assert rise == pytest.approx(2e-4 * float(slope.norm()), rel=1e-3)
    assert len(cuda.graphs) == 1
    judge.misfit(observe(make_learner(seed=1), make_batch(), "pruning(rate=0.5)"), guess)(guess.inputs)
    assert len(cuda.graphs) == 2
