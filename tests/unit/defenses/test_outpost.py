"""Outpost: where noise goes and how much, when steps are left alone, and that the released loop does nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gradveil.adversary import MASK
from gradveil.defenses import ClientView
from gradveil.defenses.base import State
from gradveil.defenses.outpost import Outpost, OutpostAdversary, fisher_mask, risk
from gradveil.defenses.pruning import prune
from gradveil.errors import UsageError
from gradveil.randomness import Seed
from gradveil.tensors import Named
from gradveil.testing.contract import run_checks
from gradveil.testing.defenses import more_strength_distorts_more
from gradveil.testing.defenses_scene import Scene, draw_batch

GOLDEN: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "golden" / "defenses_pruned_and_orthogonal.json").read_text()
)
MATRIX = torch.sin(torch.arange(60.0, dtype=torch.float64)).reshape(6, 10)
VECTOR = torch.cos(torch.arange(4.0, dtype=torch.float64))


def view_at(step: int, weights: Named, seed: int = 1) -> ClientView:
    scene = Scene.of(Outpost())
    return scene.view(seed).replace(step=step, weights=weights)


class ReleasedOutpost(Outpost):
    """The released loop: it computes everything, rebinds a local name and returns what it was given."""

    def protect_gradient(self, gradient: Named, view: ClientView, state: State) -> tuple[Named, State]:
        """Return the gradient as it was."""
        for value in gradient.values():
            value = prune(value, self.rate)
        return gradient, state


def test_fisher_mask_and_pruning_agree_with_numpy() -> None:
    golden = GOLDEN["outpost_masks"]
    masks = fisher_mask({"a": MATRIX, "b": VECTOR}, 0.4)
    assert masks["a"][0].nonzero().reshape(-1).tolist() == golden["value"]["noisy_columns"]
    assert bool((masks["a"] == masks["a"][0]).all()), "the mask is the same for all rows"
    assert bool(masks["b"].all()) is golden["value"]["vector_noisy"]
    left = prune(MATRIX, 0.8)
    assert int((left != 0).sum()) == golden["value"]["kept"]
    assert float(left.sum()) == pytest.approx(golden["value"]["sum"], abs=golden["tolerance"])


def test_noise_falls_where_information_is_high_with_the_spread_of_the_weights() -> None:
    generator = torch.Generator().manual_seed(0)
    gradient = {"a": torch.randn((400, 30), generator=generator).double() * torch.linspace(0.1, 1, 30).double()}
    weights = {"a": 0.5 * torch.randn((400, 30), generator=generator).double()}
    sent, _ = Outpost().protect_gradient(gradient, view_at(0, weights), {})
    added = sent["a"] - prune(gradient["a"], 0.8)
    noisy = fisher_mask(gradient, 0.4)["a"].bool()
    assert int(noisy[0].sum()) == 12
    assert not added[~noisy].any()
    assert float(added[noisy].std()) == pytest.approx(0.8 * float(weights["a"].var()), rel=0.03)


def test_risk_is_the_clipped_variance_and_zero_for_one_entry() -> None:
    assert float(risk(torch.tensor([1.0, 3.0]))) == 1.0
    assert float(risk(torch.tensor([0.0, 1.0]))) == pytest.approx(0.5)
    assert float(risk(torch.tensor(5.0))) == float(risk(torch.empty(0))) == 0.0


def test_the_gradient_changes_and_the_released_loop_is_noticed() -> None:
    scene = Scene.of(Outpost())
    gradient = scene.gradient()
    sent, _ = Outpost().protect_gradient(gradient, scene.view(), {})
    moved = [name for name, value in sent.items() if not torch.equal(value, gradient[name])]
    assert {"conv.weight", "conv.bias", "head.weight", "head.bias"} <= set(moved)
    assert torch.equal(sent["gain"], gradient["gain"]), "one entry has no variance and survives pruning"
    (result,) = run_checks([more_strength_distorts_more], ReleasedOutpost(), scene)
    assert result.status == "failed"
    (result,) = run_checks([more_strength_distorts_more], Outpost(), scene)
    assert result.status == "passed"


def test_the_first_step_is_always_perturbed_and_later_ones_less_and_less() -> None:
    defense = Outpost()
    scene = Scene.of(defense)
    gradient = scene.gradient()
    for step, expected in ((0, 1.0), (8, 0.5), (56, 0.125)):
        assert defense.probability(step) == pytest.approx(expected)
        acted = 0
        for seed in range(200):
            view = scene.view(seed).replace(step=step)
            sent, _ = defense.protect_gradient(gradient, view, {})
            acted += not torch.equal(sent["conv.weight"], gradient["conv.weight"])
        assert acted / 200 == pytest.approx(expected, abs=0.1)


def test_the_attacker_reads_from_the_zeros_where_nothing_was_added() -> None:
    defense = Outpost(noise=8.0, share=0.1)
    scene = Scene.of(defense)
    batch = draw_batch(3)
    observation = scene.observe(defense, 3, batch)
    adversary = observation.adversary
    raw = scene.learner.update(batch.inputs, batch.targets)
    clean = ~fisher_mask(raw, 0.1)["head.weight"].bool()
    mask = adversary.evidence(observation, 0)[MASK + "head.weight"].bool()
    sent = observation.update.weights["head.weight"]
    # A clean column of the five rows whose entries all survived looks noisy; then size decides, and it may be left out.
    assert bool((sent[clean & mask] == raw["head.weight"][clean & mask]).all())
    assert float((clean & mask).sum() / (clean & (sent != 0)).sum()) > 0.5
    told = adversary.arrives(observation)
    assert told.incomplete and told.exact() == frozenset()


def test_what_is_compared_is_clearer_than_what_was_sent() -> None:
    defense = Outpost()
    scene = Scene.of(defense)
    batch = draw_batch(3)
    observation = scene.observe(defense, 3, batch)
    assert isinstance(observation.adversary, OutpostAdversary)
    raw = scene.learner.update(batch.inputs, batch.targets)
    comparison = observation.adversary.compare(observation.adversary.evidence(observation, 0), raw, {})
    gap = sum(float(v.square().sum()) for v in comparison.residuals().values())
    plain = sum(float((raw[n] - v).square().sum()) for n, v in observation.update.weights.items())
    assert gap < 0.2 * plain


def test_tiny_gradients_have_a_fisher_mask_too() -> None:
    masks = fisher_mask({"a": MATRIX * 1e-30}, 0.4)
    assert torch.equal(masks["a"], fisher_mask({"a": MATRIX}, 0.4)["a"])
    assert not fisher_mask({"a": MATRIX}, 0.0)["a"].any()


@pytest.mark.parametrize("wrong", [{"decay": -1.0}, {"share": 1.5}, {"rate": 1.0}, {"noise": -0.1}], ids=str)
def test_settings_without_a_meaning_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="outpost"):
        Outpost(**wrong)


def test_the_same_seed_gives_the_same_noise_and_another_step_another() -> None:
    scene = Scene.of(Outpost(decay=0.0))
    gradient = scene.gradient()

    def send(seed: int, step: int) -> torch.Tensor:
        view = scene.view(seed).replace(step=step, seed=Seed(seed))
        return Outpost(decay=0.0).protect_gradient(gradient, view, {})[0]["head.weight"]

    assert torch.equal(send(1, 0), send(1, 0))
    assert not torch.equal(send(1, 0), send(1, 1)) and not torch.equal(send(1, 0), send(2, 0))
