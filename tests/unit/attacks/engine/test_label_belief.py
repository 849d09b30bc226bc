"""Where an update leaves labels in doubt, all plausible ones are searched; a plain attacker uses nothing of the defense."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from gradveil.adversary import OpenAdversary
from gradveil.attacks import AttackContext
from gradveil.attacks.engine import matching
from gradveil.attacks.engine.label_belief import LOOKED_AT, MOST_HYPOTHESES, informed_belief, label_hypotheses
from gradveil.attacks.engine.label_counts import plausible_counts
from gradveil.attacks.engine.label_rows import fit_rows, places_of
from gradveil.attacks.engine.labels import plainly_certain, recover_labels
from gradveil.attacks.engine.matching import Recipe, run_recipe
from gradveil.attacks.engine.optimisers import Adam
from gradveil.attacks.inverting_gradients import InvertingGradients
from gradveil.attacks.referee import Referee
from gradveil.defenses.base import ClientView, Defense, DefenseCard, State
from gradveil.learning import Learner, loss_by_name
from gradveil.models import build_model
from gradveil.randomness import Seed
from gradveil.records import ORDINARY, Batch, Knowledge, Observation, ThreatModel, Update, WhatArrives
from gradveil.tensors import Named
from tests.unit.attacks.scenes import make_batch, make_context, make_learner, observe, simulator

SHAPE = (1, 8, 8)
MANY = 24
"""Classes so many that the row of one is less than the share of largest entries which DGP withholds."""
DGP = "dgp(largest=0.05, smallest=0.75)"
NOISE = "gaussian_noise(std=30.0)"


def many_classes(classes: int = MANY, model: str = "lenet") -> Learner:
    built = build_model(model, input_shape=SHAPE, classes=classes, seed=Seed(0))
    return Learner.of(built, loss_by_name("cross_entropy"))


def public(count: int = 8) -> Tensor:
    return torch.rand((count, *SHAPE), generator=torch.Generator().manual_seed(77))


def scene(learner: Learner, batch: Batch, defense: str, **changes: Any) -> tuple[Observation, AttackContext]:
    seen = observe(learner, batch, defense, classes=int(learner.classes(batch.inputs[:1])), public=public(), **changes)
    return seen, make_context(simulate=simulator(seen.learners, defense))


@functools.cache
def many_under(defense: str) -> tuple[Learner, AttackContext]:
    """The client of many classes and an attacker who has learned from it, so that tests need not learn again."""
    learner = many_classes()
    return learner, make_context(simulate=simulator((learner,), defense))


def one(label: int, seed: int) -> Batch:
    return Batch(torch.rand((1, *SHAPE), generator=torch.Generator().manual_seed(seed)), torch.tensor([label]))


def several(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch(torch.rand((4, *SHAPE), generator=generator), torch.randint(10, (4,), generator=generator))


@dataclass(frozen=True)
class Silent(OpenAdversary):
    """Fails whoever asks it."""

    def arrives(self, observation: Observation) -> WhatArrives:
        raise AssertionError("somebody asked the defense's attacker")


@dataclass(frozen=True)
class Telling(OpenAdversary):
    """Knows the label, as no attacker could."""

    label: int = 0

    def arrives(self, observation: Observation) -> WhatArrives:
        def read(bias: Tensor, prediction: Callable[[], Tensor]) -> Tensor:
            return 1 - torch.nn.functional.one_hot(torch.tensor(self.label), len(bias)).to(bias)

        return super().arrives(observation).replace(label_evidence=read)


@pytest.mark.parametrize("defense", ["none", "censor(trials=2)", DGP, "gaussian_noise(std=0.5)", "soteria", "pruning(rate=0.9)"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_plain_label_never_depends_on_the_adversary(defense: str, count: int) -> None:
    seen = observe(make_learner(), make_batch(count), defense)
    expected = recover_labels(seen)
    blind = seen.replace(adversary=Silent())
    assert torch.equal(recover_labels(blind), expected)
    assert torch.equal(label_hypotheses(blind, "plain", make_context()), expected[None])
    plain = run_recipe(Recipe(name="test", steps=1), [blind], make_context())
    assert all(torch.equal(candidate.targets, expected) for candidate in plain)


def test_a_plain_label_of_several_rounds_never_depends_on_the_adversary() -> None:
    first = make_learner()
    second = first.replace(weights={n: w * 1.1 for n, w in first.weights.items()})
    seen = observe(first, make_batch(), "censor(trials=2)", rounds=(second,))
    raw = Update(second.update(make_batch().inputs, make_batch().targets), examples=1, round=1)
    seen = seen.replace(updates=(seen.update, raw))
    # The second round is not defended, and its bias shows it to anybody.
    assert recover_labels(seen.replace(adversary=Silent())).tolist() == make_batch().targets.tolist()


def test_a_label_known_only_through_the_adversary_is_out_of_reach_for_plain_attackers() -> None:
    seen = observe(make_learner(), make_batch(), "censor(trials=2)")
    plain = int(recover_labels(seen))
    told = seen.replace(adversary=Telling((plain + 1) % seen.classes))
    found = {stance: label_hypotheses(told, stance, make_context()).tolist() for stance in ("plain", "informed", "zero_mask")}
    assert found == {"plain": [[plain]], "informed": [[(plain + 1) % 5]], "zero_mask": [[(plain + 1) % 5]]}
    # Nor does anybody reach it who does not know the defense, whatever stance is claimed.
    ignorant = told.replace(threat=ThreatModel(knows=ORDINARY - {Knowledge.DEFENSE}))
    assert label_hypotheses(ignorant, "informed", make_context()).tolist() == [[plain]]


def test_under_censor_plain_and_informed_search_with_different_labels() -> None:
    hits = {"plain": 0, "informed": 0}
    learner = make_learner()
    for seed in range(8):
        batch = make_batch(seed=seed)
        seen = observe(learner, batch, "censor(trials=2)", seed=seed)
        for stance in hits:
            (found, *_) = run_recipe(Recipe(name="test", steps=1, stance=stance), [seen], make_context())
            hits[stance] += found.targets.tolist() == batch.targets.tolist()
    assert hits["informed"] == 8 and hits["plain"] < 6


def test_an_untouched_bias_costs_a_few_looks_and_gives_the_label_it_always_gave() -> None:
    defense, calls = "soteria(rate=0.5)", []
    seen = observe(make_learner(), make_batch(), defense)
    simulate = simulator(seen.learners, defense)

    def counted(inputs: Tensor, targets: Tensor, draw: int) -> tuple[Named, ...]:
        calls.append(draw)
        return simulate(inputs, targets, draw)

    context = make_context(simulate=counted)
    assert plainly_certain(seen)
    assert torch.equal(label_hypotheses(seen, "informed", context), recover_labels(seen)[None])
    recipe = Recipe(name="test", steps=3, stance="informed")
    (found,) = run_recipe(recipe, [seen], context)
    known = seen.replace(labels=make_batch().targets, threat=ThreatModel(knows=ORDINARY | {Knowledge.LABELS}))
    (given,) = run_recipe(recipe, [known], context)
    assert torch.equal(found.inputs, given.inputs) and found.best_loss == given.best_loss and found.hypothesis == 0
    assert len(calls) == LOOKED_AT, "asked once for all updates of a client"


@dataclass(frozen=True, kw_only=True)
class Moves(Defense):
    """Moves the entries of the last bias, and with them its rows, to other classes; its author says nothing."""

    card = DefenseCard(
        name="moves", summary="Moves.", cost="none", weakness="releases", acts_on=("update",), ladder=({},), random=True
    )
    how: str = "next"

    def protect_update(self, update: Update, view: ClientView, state: State) -> tuple[Update, State]:
        names = list(update.weights)[-2:]
        count = len(update.weights[names[1]])
        order = torch.randperm(count, generator=view.generator("places")) if self.how == "bias" else torch.arange(count).roll(1)
        moved = {name: update.weights[name][order] for name in (names[1:] if self.how == "bias" else names)}
        return update.replace(weights={**update.weights, **moved}), state


@pytest.mark.parametrize("how", ["next", "bias"])
def test_a_bias_that_looks_untouched_and_names_another_class_fools_nobody_who_runs_the_client(how: str) -> None:
    """One negative entry and a sum of zero, in the wrong place: every search ran with a wrong label and was sure of it."""
    defense = f"tests.unit.attacks.engine.test_label_belief:Moves(how={how!r})"
    learner, context, plain, right, covered = many_classes(10), None, 0, 0, 0
    for index in range(10):
        batch = one(label=index, seed=index)
        seen, fresh = scene(learner, batch, defense, seed=index)
        context = context or fresh
        assert plainly_certain(seen)
        belief = informed_belief(seen, context, ask_author=False)
        plain += recover_labels(seen).tolist() == batch.targets.tolist()
        right += belief.best.tolist() == batch.targets.tolist()
        covered += bool((belief.hypotheses == batch.targets).any())
    assert plain <= 3 and right >= 8 and covered >= 9, (plain, right, covered)


def test_a_batch_whose_rows_were_all_moved_is_counted_all_the_same() -> None:
    defense = "tests.unit.attacks.engine.test_label_belief:Moves(how='next')"
    learner, context, plain, right = many_classes(10), None, 0, 0
    for index in range(6):
        batch = several(index)
        seen, fresh = scene(learner, batch, defense, seed=index)
        context = context or fresh
        wanted = batch.targets.bincount(minlength=10)
        found = [labels.bincount(minlength=10) for labels in (recover_labels(seen), informed_belief(seen, context).best)]
        plain, right = (hits + int(torch.minimum(each, wanted).sum()) for hits, each in zip((plain, right), found, strict=True))
    assert plain <= 12 and right >= 20, (plain, right)


def test_rows_that_tell_of_no_class_are_left_where_they_are() -> None:
    generator = torch.Generator().manual_seed(1)
    counts = torch.randint(3, (64, 30), generator=generator).double()
    noise = torch.randn((64, 30), generator=generator, dtype=torch.float64)
    assert places_of(noise, counts).tolist() == list(range(30))
    order = torch.randperm(30, generator=generator)
    assert places_of(counts[:, order.argsort()] + noise, counts).tolist() == order.tolist()
    assert places_of(torch.zeros_like(counts), counts).tolist() == list(range(30))


def test_among_many_classes_dgp_hides_the_label_from_the_last_layer_but_not_from_releases_of_ones_own() -> None:
    (learner, context), plain, right, covered = many_under(DGP), 0, 0, 0
    for index in range(12):
        batch = one(label=(7 * index) % MANY, seed=index)
        seen, _ = scene(learner, batch, DGP)
        belief = informed_belief(seen, context)
        plain += recover_labels(seen).tolist() == batch.targets.tolist()
        right += belief.best.tolist() == batch.targets.tolist()
        covered += bool((belief.hypotheses == batch.targets).any())
    assert plain <= 3 and right >= 10 and covered >= 11


def test_what_is_believed_does_not_depend_on_the_company() -> None:
    learner = many_classes()
    batches = [one(label=3, seed=1), one(label=20, seed=2)]
    seen, context = zip(*(scene(learner, batch, DGP) for batch in batches), strict=True)
    _, shared = many_under(DGP)
    together = [informed_belief(each, shared).hypotheses for each in reversed(seen)]
    alone = informed_belief(seen[0], context[0]).hypotheses
    assert torch.equal(alone, together[1]) and not torch.equal(alone[0], together[0][0])


def test_in_doubt_there_are_several_labels_and_never_more_than_the_cap() -> None:
    learner, context = many_under(NOISE)
    seen, _ = scene(learner, one(5, 0), NOISE)
    belief = informed_belief(seen, context)
    assert 1 < len(belief.hypotheses) <= MOST_HYPOTHESES
    assert len(belief.hypotheses.unique()) == len(belief.hypotheses)
    assert bool((belief.probabilities.diff() <= 0).all()) and float(belief.probabilities.sum()) <= 1 + 1e-9


def test_a_search_runs_with_every_plausible_label_from_the_same_starts_and_is_planned_so() -> None:
    learner, context = many_under(NOISE)
    seen, _ = scene(learner, one(5, 0), NOISE)
    choices = informed_belief(seen, context).hypotheses
    attack = InvertingGradients(steps=1, restarts=2, stance="informed")
    found = attack.run([seen], context)
    places = [(each.hypothesis, each.restart) for each in found]
    assert places == [(hypothesis, restart) for hypothesis in range(len(choices)) for restart in range(2)]
    assert all(torch.equal(each.targets, choices[each.hypothesis]) for each in found)
    assert attack.hypotheses(seen, context) == len(choices) > 1
    assert InvertingGradients(steps=1).hypotheses(seen, context) == 1  # the plain one
    frozen = Recipe(name="test", steps=1, stance="informed", optimiser=Adam(learning_rate=0.0))
    still = run_recipe(frozen, [seen], context)
    assert all(torch.equal(each.inputs, still[0].inputs) for each in still)


def test_the_referee_picks_the_label_that_explains_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(seed=3)
    seen = observe(make_learner(), batch)
    right = int(batch.targets)
    choices = torch.tensor([[(right + 1) % 5], [right], [(right + 2) % 5]])
    monkeypatch.setattr(matching, "label_hypotheses", lambda *_: choices)
    found = run_recipe(Recipe(name="test", steps=60, stance="informed"), [seen], make_context(60))
    assert [each.hypothesis for each in found] == [0, 1, 2]
    assert found[Referee().select(seen, found).chosen].targets.tolist() == [right]


def test_thousands_of_classes_stay_cheap() -> None:
    learner, calls = many_classes(3000, "mlp(hidden=8)"), []
    seen, _ = scene(learner, one(2345, 0), "gaussian_noise(std=0.15)")
    simulate = simulator((learner,), "gaussian_noise(std=0.15)")

    def counted(inputs: Tensor, targets: Tensor, draw: int) -> tuple[Named, ...]:
        calls.append(draw)
        return simulate(inputs, targets, draw)

    belief = informed_belief(seen, make_context(simulate=counted))
    assert 16 <= len(calls) <= 64 and len(belief.hypotheses) <= MOST_HYPOTHESES
    assert 2345 in belief.hypotheses.flatten().tolist()


def test_releases_of_ones_own_tell_the_counts_of_a_noisy_batch_better_than_a_plain_reading() -> None:
    learner, context, plain, informed = many_classes(6), None, 0, 0
    for seed in range(6):
        labels = torch.randint(6, (6,), generator=torch.Generator().manual_seed(seed))
        inputs = torch.rand((6, *SHAPE), generator=torch.Generator().manual_seed(50 + seed))
        seen, fresh = scene(learner, Batch(inputs, labels), "gaussian_noise(std=0.1)", seed=seed)
        context = context or fresh
        truth = torch.bincount(labels, minlength=6)
        found = [recover_labels(seen), informed_belief(seen, context).best]
        overlaps = [int(torch.minimum(truth, torch.bincount(each, minlength=6)).sum()) for each in found]
        plain, informed = plain + overlaps[0], informed + overlaps[1]
    assert informed >= 32 and informed > plain


def test_plausible_counts_are_the_rounded_ones_and_swaps_of_the_least_sure() -> None:
    expected = torch.tensor([2.0, 1.45, 0.55, 0.0])
    counts, probabilities = plausible_counts(expected, 0.2, 4, 0.99, 8)
    assert counts[0].tolist() == [2, 1, 1, 0] and counts[1].tolist() == [2, 2, 0, 0]
    assert bool((counts.sum(1) == 4).all()) and float(probabilities[0]) > float(probabilities[1]) > 0.05
    sure, _ = plausible_counts(expected, 0.01, 4, 0.99, 8)
    assert len(sure) == 1


def test_probabilities_of_rows_are_calibrated() -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(10, (count,), generator=generator)
        features = torch.randn((count, 10, 3), generator=generator, dtype=torch.float64)
        features[torch.arange(count), labels, 0] += 1.5
        return features, labels

    model = fit_rows(*drawn(200), range(200))
    features, labels = drawn(1000)
    posterior = torch.stack([model.log_posterior(each) for each in features]).exp()
    right = (posterior.argmax(1) == labels).double()
    assert abs(float(right.mean() - posterior.amax(1).mean())) < 0.06
    # The exact posterior of this law is softmax(1.5 f): nothing can be more often right.
    best = (features[..., 0].argmax(1) == labels).double().mean()
    assert float(right.mean()) > float(best) - 0.05


def test_filters_for_classes_are_learned_like_rows() -> None:
    body = (torch.nn.Conv2d(1, 6, 3), torch.nn.Sigmoid(), torch.nn.Conv2d(6, 10, 1))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = torch.nn.Sequential(*body, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
        for layer in body[::2]:
            torch.nn.init.normal_(layer.weight, std=0.5)
    learner, context, right = Learner.of(network, loss_by_name("cross_entropy")), None, 0
    for index in range(5):
        seen, fresh = scene(learner, one(label=2 * index, seed=index), "gaussian_noise(std=0.05)", seed=index)
        context = context or fresh
        right += 2 * index in informed_belief(seen, context).hypotheses.flatten().tolist()
    assert right >= 4


def test_without_public_pictures_grey_noise_is_sent() -> None:
    seen, context = scene(many_classes(), one(5, 0), DGP)
    belief = informed_belief(seen.replace(public=None), context)
    assert 5 in belief.hypotheses.flatten().tolist()


def test_an_update_without_a_classifier_layer_leaves_no_choice() -> None:
    seen, context = scene(many_classes(), one(5, 0), DGP)
    bare = {n: v for n, v in seen.update.weights.items() if not n.startswith("linear")}
    blind = seen.replace(updates=(Update(bare, examples=1),))
    assert informed_belief(blind, context).hypotheses.tolist() == [[0]]
