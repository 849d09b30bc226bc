"""Recipes: the matching loss vanishes at the truth, whatever was replayed, and points towards it from elsewhere."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.func import grad

from gradveil.adversary import OpenAdversary, with_prefix
from gradveil.attacks import launch
from gradveil.attacks.engine.matching import LIKELIHOOD, Recipe, _Matching, run_recipe
from gradveil.attacks.engine.objectives import OBJECTIVES
from gradveil.attacks.engine.optimisers import LBFGS, Adam
from gradveil.attacks.inverting_gradients import InvertingGradients
from gradveil.errors import MissingKnowledge, UsageError
from gradveil.records import ORDINARY, Batch, Comparison, Knowledge, Observation, ThreatModel, Update
from gradveil.tensors import Named
from tests.unit.attacks.scenes import CLASSES, SHAPE, make_batch, make_context, make_learner, observe, simulator

TRAININGS = [
    {},
    {"shares": "weights", "local_steps": 3, "learning_rate": 0.1},
    {"shares": "weights", "local_steps": 2, "learning_rate": 0.1, "momentum": 0.9},
    {"shares": "weights", "local_steps": 2, "optimizer": "adam"},
    {"shares": "weights", "epochs": 2, "minibatch": 2, "learning_rate": 0.1},
    {"clients": 2},
    {"shares": "weights", "local_steps": 2, "clients": 4, "learning_rate": 0.1},
]


def loss_of(seen: Observation, objective: str = "cosine", **recipe: object) -> _Matching:
    made = Recipe(name="test", objective=objective, **recipe)  # type: ignore[arg-type]
    return _Matching(made, seen.learners, OpenAdversary(), None, smooth=False)


def evidence_of(seen: Observation, labels: Tensor) -> Named:
    found: Named = {"labels": labels}
    for index in range(len(seen.updates)):
        found |= with_prefix(OpenAdversary().evidence(seen, index), f"{index}|")
    return found


@pytest.mark.parametrize("objective", OBJECTIVES.names())
@pytest.mark.parametrize("training", TRAININGS, ids=str)
def test_the_truth_matches_and_elsewhere_there_is_a_slope(training: dict[str, object], objective: str) -> None:
    truth = make_batch(4)
    seen = observe(make_learner(**training), truth)  # type: ignore[arg-type]
    matching, constants = loss_of(seen, objective), evidence_of(seen, truth.targets)

    def misfit(inputs: Tensor) -> Tensor:
        return matching.misfit({"inputs": inputs}, constants)

    at_truth, near = float(misfit(truth.inputs)), truth.inputs + 0.1 * torch.sin(7 * torch.arange(128.0).reshape(SHAPE))
    slope = grad(misfit)(near)
    assert at_truth < 1e-20 < float(misfit(near))
    assert bool(torch.isfinite(slope).all()) and float(slope.norm()) > 0
    # Downhill from a small perturbation leads back: the slope is that of the replayed steps, not of something else.
    assert float((slope * (near - truth.inputs)).sum()) > 0


def test_rounds_are_matched_together() -> None:
    truth, first = make_batch(), make_learner()
    second = first.replace(weights={n: w * 1.1 for n, w in first.weights.items()})
    seen = observe(first, truth, rounds=(second,))
    matching, constants = loss_of(seen), evidence_of(seen, truth.targets)
    assert float(matching.misfit({"inputs": truth.inputs}, constants)) < 1e-20
    strange = make_batch(seed=9)
    broken = seen.replace(updates=(seen.updates[0], Update(second.update(strange.inputs, strange.targets), examples=1, round=1)))
    constants = evidence_of(broken, truth.targets)
    halves = [float(matching.misfit({"inputs": x}, constants)) for x in (truth.inputs, strange.inputs)]
    assert min(halves) > 1e-8, "only one of the rounds is looked at"
    (candidate,) = launch(InvertingGradients(steps=20), [seen], make_context())
    assert candidate.best_loss < candidate.first_loss


def test_joint_labels_are_found_with_the_inputs() -> None:
    seen = observe(make_learner(), make_batch(seed=3))
    (candidate,) = launch(InvertingGradients(steps=80, labels="joint", signed=False), [seen], make_context(80))
    assert candidate.targets.tolist() == make_batch(seed=3).targets.tolist() and not candidate.oracle_labels


def test_given_labels_are_used_where_granted_and_asked_for_where_not() -> None:
    truth = make_batch(seed=2)
    wrong = (truth.targets + 1) % CLASSES
    granted = ThreatModel(knows=ORDINARY | {Knowledge.LABELS})
    oracle = observe(make_learner(), truth, threat=granted, labels=wrong)
    (candidate,) = launch(InvertingGradients(steps=3, labels="given"), [oracle], make_context())
    assert candidate.targets.tolist() == wrong.tolist() and candidate.oracle_labels
    (unasked,) = launch(InvertingGradients(steps=3), [observe(make_learner(), truth, labels=wrong)], make_context())
    assert unasked.targets.tolist() == truth.targets.tolist() and not unasked.oracle_labels
    with pytest.raises(MissingKnowledge, match="the true labels"):
        launch(InvertingGradients(labels="given"), [observe(make_learner(), truth)], make_context())


@pytest.mark.parametrize(
    "recipe", [{}, {"smooth_relu": True, "tv_end": 1e-5, "relative": True}, {"stance": "straight_through"}], ids=str
)
def test_batched_and_looped_agree(recipe: dict[str, object]) -> None:
    learner = make_learner("lenet(activation='relu')")
    seen = [observe(learner, make_batch(seed=s), "clipping(bound=0.05)") for s in range(3)]
    attack = dataclasses.replace(InvertingGradients(steps=8, restarts=2, signed=False), **recipe)  # type: ignore[arg-type]
    desks = [
        make_context(execution=mode, simulate=simulator((learner,), "clipping(bound=0.05)")) for mode in ("batched", "looped")
    ]
    batched, looped = (launch(attack, seen, context) for context in desks)
    for left, right in zip(batched, looped, strict=True):
        assert (left.target, left.restart, left.steps) == (right.target, right.restart, right.steps)
        assert torch.allclose(left.inputs, right.inputs, atol=1e-5)
        assert left.best_loss == pytest.approx(right.best_loss, rel=1e-5, abs=1e-12)
        assert left.gradient_norm == pytest.approx(right.gradient_norm, rel=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_agrees() -> None:
    seen = [observe(make_learner(), make_batch(seed=s)) for s in range(4)]
    attack = InvertingGradients(steps=20, signed=False)
    batched, compiled = (launch(attack, seen, make_context(execution=mode)) for mode in ("batched", "compiled"))
    for left, right in zip(batched, compiled, strict=True):
        assert torch.allclose(left.inputs, right.inputs, atol=1e-5)


def test_losses_and_slope_are_those_of_the_matching_alone() -> None:
    seen = observe(make_learner(), make_batch())
    (heavy,) = run_recipe(Recipe(name="r", steps=10, tv=100.0), [seen], make_context())
    simulated = seen.learner.update(heavy.inputs, heavy.targets)
    assert heavy.best_loss == pytest.approx(float(OBJECTIVES.get("cosine")(Comparison(simulated, seen.update.weights))), rel=1e-6)
    (light,) = run_recipe(Recipe(name="r", steps=10), [seen], make_context())
    assert heavy.first_loss == pytest.approx(light.first_loss) and heavy.gradient_norm == pytest.approx(light.gradient_norm)


def test_a_detached_client_is_seen_in_the_slope_whatever_the_prior() -> None:
    seen = observe(make_learner(), make_batch())
    cut = seen.learner.replace(loss=lambda outputs, targets: seen.learner.loss(outputs.detach(), targets) + 0 * outputs.sum())
    (candidate,) = run_recipe(Recipe(name="r", steps=10, tv=0.1), [seen.replace(learners=(cut,))], make_context())
    assert candidate.gradient_norm == 0


def test_prior_alone_ignores_the_update() -> None:
    first, second = observe(make_learner(), make_batch(seed=0)), observe(make_learner(), make_batch(seed=1))
    bare = Recipe(name="r", steps=20, tv=0.1, matching=0.0)
    left, right = (run_recipe(bare, [seen], make_context())[0] for seen in (first, second))
    assert torch.equal(left.inputs, right.inputs)
    assert left.inputs.std() < 0.25


def test_relative_recipes_do_not_care_about_the_size_of_the_loss() -> None:
    seen = observe(make_learner(), make_batch())
    steep = seen.learner.replace(loss=lambda outputs, targets: 1000 * seen.learner.loss(outputs, targets))
    louder = observe(steep, make_batch())
    recipe = Recipe(name="r", objective="l2", relative=True, tv=0.25, tv_end=0.01, start="grey", steps=15)
    left, right = (run_recipe(recipe, [each], make_context())[0] for each in (seen, louder))
    assert torch.allclose(left.inputs, right.inputs, atol=1e-4)


def test_restarts_differ_and_are_numbered() -> None:
    seen = [observe(make_learner(), make_batch(seed=s)) for s in range(2)]
    found = launch(InvertingGradients(steps=3, restarts=3), seen, make_context())
    assert [(c.target, c.restart) for c in found] == [(t, r) for t in range(2) for r in range(3)]
    assert not torch.equal(found[0].inputs, found[1].inputs)


def test_known_noise_is_weighed_in_the_likelihood() -> None:
    seen = observe(make_learner(), make_batch(), "gaussian_noise(std=0.01)")
    attack = InvertingGradients(steps=5, objective=LIKELIHOOD, stance="informed")
    (candidate,) = launch(attack, [seen], make_context())
    simulated = seen.learner.update(candidate.inputs, candidate.targets)
    misfit = sum(float((v - seen.update.weights[n]).square().sum()) for n, v in simulated.items())
    assert candidate.best_loss == pytest.approx(misfit / (2 * 0.01**2 * candidate.inputs.numel()), rel=1e-6)
    assert "no Gaussian noise" in str(attack.applies(observe(make_learner(), make_batch())))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"objective": "cosin"}, "did you mean 'cosine'"),
        ({"stance": "informd"}, "did you mean 'informed'"),
        ({"start": "gray"}, "did you mean 'grey'"),
        ({"labels": "recoverd"}, "did you mean 'recovered'"),
        ({"tv": 0.0, "tv_end": 0.1}, "starts above 0"),
    ],
)
def test_a_typo_is_no_other_attack(settings: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        InvertingGradients(**settings)  # type: ignore[arg-type]


def test_optimisers_and_starts_are_parts() -> None:
    seen = observe(make_learner(), make_batch())
    for start in ("noise", "uniform", "grey"):
        recipe = Recipe(name="r", start=start, optimiser=LBFGS(), objective="l2", box=False, steps=10)
        (candidate,) = run_recipe(recipe, [seen], make_context())
        assert candidate.best_loss < candidate.first_loss
    pulled = run_recipe(Recipe(name="r", energy=1e3, optimiser=Adam(), steps=60), [seen], make_context(60))[0]
    assert float((pulled.inputs - 0.5).abs().max()) < 0.05


def test_batches_are_matched_as_a_whole() -> None:
    truth = Batch(make_batch(2).inputs, torch.tensor([0, 3]))
    (candidate,) = launch(InvertingGradients(steps=30), [observe(make_learner(), truth)], make_context(30))
    assert candidate.inputs.shape == truth.inputs.shape and candidate.targets.tolist() == [0, 3]
    assert candidate.best_loss < 0.5 * candidate.first_loss
