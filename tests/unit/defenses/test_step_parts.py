"""What defenses and their attackers hand on at each step, to each example and to each trial."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gradveil.defenses import build_defense, dgp, percentile_noise, soteria
from gradveil.defenses.base import ClientView
from gradveil.defenses.graddefense import compensation
from gradveil.defenses.refiner import defense as refiner
from gradveil.defenses.refiner import refinement, restorer
from gradveil.defenses.refiner.adversary import NOISE, MixtureAdversary
from gradveil.defenses.refiner.refinement import RULE, Refinement
from gradveil.defenses.shadow import defense as shadow
from gradveil.defenses.shadow.memory import Memory, record_keys
from gradveil.randomness import Seed
from gradveil.records import Batch
from gradveil.testing.defenses_scene import Scene
from tests.unit.stand_ins import fake, noted

COMPARED = (
    *("censor", "dgp", "embedding_dropout", "embedding_noise", "embedding_pruning", "entry_dropout", "graddefense", "invl_enp"),
    *("invl_gnp", "mq", "outpost", "pruning", "quantisation", "soteria", "svdefense", "top_k"),
)
"""Defenses whose attackers have a comparison of their own."""


@pytest.mark.parametrize("name", COMPARED)
def test_a_search_moves_the_side_that_its_guess_makes(name: str) -> None:
    defense = build_defense(name)
    scene = Scene.of(defense)
    observation = scene.observe(defense, 1, scene.batch)
    adversary = observation.adversary
    evidence = adversary.evidence(observation, 0)
    drawn = adversary.variables(observation, torch.Generator().manual_seed(0))
    guess = {n: v.detach().clone().requires_grad_() for n, v in observation.update.weights.items()}
    both = adversary.compare(evidence, guess, drawn)
    assert both.simulated.keys() == both.observed.keys()
    moved = [n for n, v in both.simulated.items() if v.requires_grad]
    assert len(moved) * 2 > len(both.simulated), "what was seen stands still"
    total = torch.stack([both.simulated[n].square().sum() for n in moved]).sum()
    slopes = torch.autograd.grad(total, list(guess.values()), allow_unused=True, materialize_grads=True)
    assert any(bool(slope.any()) for slope in slopes)
    still = [n for n, v in both.observed.items() if not v.requires_grad]
    assert still or "quantisation" in name or name == "mq"


@pytest.mark.parametrize("rows", [None, [2, 0]])
def test_the_robust_gradient_of_a_step_is_that_of_its_rows_and_noise(rows: list[int] | None) -> None:
    asked: list[Any] = []
    learner: Any = fake(
        rows_at=lambda step, count: noted(asked, ("rows", step, count)) or rows,
        noise_at=lambda step, chosen: ("noise", step, chosen),
        gradient=lambda *given: noted(asked, given) or {"w": torch.zeros(1)},
    )
    adversary = MixtureAdversary(blend=0.25, epsilon=0.5, scope="global", relative=False)
    noise = torch.tensor([[0.0], [4.0], [8.0]])
    hook = adversary.on_gradient(learner, {NOISE: noise})
    count = 3 if rows is None else 2
    inputs, targets = torch.ones(count, 1), torch.arange(count)
    found = hook(5, {"w": torch.ones(1)}, {"w": torch.full((1,), 2.0)}, inputs, targets)
    assert asked[0] == ("rows", 5, 3)
    weights, robust, labels, told = asked[1]
    own = noise if rows is None else noise[rows]
    assert torch.equal(robust, 0.75 * inputs + 0.25 * own) and labels is targets and told == ("noise", 5, rows)
    assert weights["w"].tolist() == [1.0] and found["w"].tolist() == [1.5], "half a unit from the raw gradient"


def test_groups_are_refined_with_the_first_step_s_noise_of_their_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    defense = build_defense("refiner(blend=0.5, steps=1, balance=0, epsilon=0.5)")
    refine = fake(jointly=lambda *given: noted(asked, given) or (given[1], {"w": given[2].sum().double()}))
    monkeypatch.setattr(refiner.Refiner, "_refinement", lambda self, view, inputs: refine)
    monkeypatch.setattr(refiner.Refiner, "_groups", lambda self, view, used: [range(0, 2), range(2, 3)])
    monkeypatch.setattr(refiner, "_rows_used", lambda settings, count: 3)
    view: Any = fake(
        generator=Seed(4).generator,
        learner=fake(noise_at=lambda step, rows: (step, rows), settings=fake(steps=lambda count: 1)),
    )
    batch = Batch(torch.arange(4.0)[:, None] / 4, torch.tensor([6, 3, 9, 5]))
    found, state = defense.protect_batch(batch, view, {})
    start = 0.5 * batch.inputs + 0.5 * torch.rand((4, 1), generator=Seed(4).generator("refiner"))
    assert [(each[3], each[2].tolist()) for each in asked] == [((0, [0, 1]), [6, 3]), ((0, [2]), [9])]
    assert torch.equal(torch.cat([each[0] for each in asked]), batch.inputs[:3]) and torch.equal(found.inputs, start)
    (centre,) = [value for key, value in state.items() if key.startswith(refiner.CENTRE)]
    assert float(centre) == pytest.approx(9 * 2 / 3 + 9 / 3)


@pytest.mark.parametrize("optimiser", ["adam", "gradient"])
def test_a_descent_takes_its_steps_by_its_own_rule(optimiser: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def step(found: Tensor, mean: Tensor, square: Tensor, number: int, **more: Any) -> Any:
        asked.append((mean.tolist(), square.tolist(), number, more))
        return 2 * found, mean + 1, square + 2

    monkeypatch.setattr(refinement, "adam_step", step)
    made = Refinement(fake(), None, 0.0, 3, 1.0, 0.125, "raw", optimiser)
    units: list[float] = []

    def slope(inputs: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
        units.append(float(unit))
        return torch.tensor([1.0, math.nan, -9.0]), unit + 1

    found = made._descend(torch.full((3,), 0.75), slope, torch.tensor(5.0))
    assert units == [5.0, 6.0, 7.0]
    if optimiser == "adam":
        assert asked == [([float(n)] * 3, [2.0 * n] * 3, n, {"rule": RULE}) for n in range(3)]
    assert found.tolist() == [0.0 if optimiser == "adam" else 0.375, 0.75, 1.0]


def test_public_pictures_are_protected_as_a_client_s_batches_are() -> None:
    asked: list[Any] = []

    def protect(batch: Batch, view: ClientView, state: Any) -> Any:
        asked.append((batch, view, state))
        return batch.replace(inputs=batch.inputs + 1), state

    own = fake(weights={"w": torch.zeros(1)}, settings=fake(steps=lambda count: 1))
    learner: Any = fake(
        noise={"n": torch.ones(2, 5, 3)},
        settings=fake(replace=lambda clients: ("settings", clients)),
        replace=lambda settings, noise: noted(asked, (settings, noise)) or own,
    )
    public = torch.rand(5, 1, 2, 2)
    targets = torch.zeros(7, dtype=torch.int32)
    for draw in (0, 3):
        asked.clear()
        made = restorer.public_pairs(fake(protect_batch=protect), public, learner, 2, 3, targets, draw)
        assert torch.equal(made, public + 1)
        settings, noise = asked[0]
        assert settings == ("settings", 1) and noise["n"].shape == (2, 2, 3) and not bool(noise["n"].any())
        seed = Seed(0).child("refiner's restorer", *([3] if draw else []))
        for index, (batch, view, state) in enumerate(asked[1:]):
            assert torch.equal(batch.inputs, public[2 * index : 2 * index + 2]) and state == {}
            assert batch.targets.tolist() == [0, 1, 2, 0, 1][2 * index : 2 * index + 2] and batch.targets.dtype == torch.int32
            assert view.seed == seed.child(index) and view.learner is own and view.weights is own.weights
            assert view.batch is batch and view.raw_batch is batch
        assert len(asked) == 4


@pytest.mark.parametrize("noise", [{}, {"n": torch.zeros(1)}])
@pytest.mark.parametrize("weights", [None, {"w": torch.ones(1)}])
def test_features_are_weighed_at_the_step_s_weights_and_noise(
    noise: dict[str, Tensor], weights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(Exception):
        pass

    def stop(*given: Any) -> None:
        raise Asked(given)

    monkeypatch.setattr(soteria, "feature_sensitivities", stop)
    monkeypatch.setattr(soteria, "last_linear_layer", lambda model: f"{model}.weight")
    learner: Any = fake(
        model="head",
        noise=noise,
        weights={"w": torch.zeros(1)},
        rows_at=lambda step, count: ("rows", step, count),
        noise_at=lambda step, rows: ("noise", step, rows),
        replace=lambda weights: ("at", weights),
        settings=fake(),
    )
    batch, raw = Batch(torch.zeros(2, 1), torch.zeros(2)), Batch(torch.zeros(6, 1), torch.zeros(6))
    for whole in (raw, None):
        view: Any = fake(learner=learner, step=4, weights=weights, batch=batch, raw_batch=whole)
        with pytest.raises(Asked) as stopped:
            soteria.Soteria().protect_gradient({"head.weight": torch.ones(2, 3)}, view, {})
        at, inputs, told = stopped.value.args[0]
        assert at == ("at", weights or learner.weights) and inputs is batch.inputs
        rows = None if whole is None else ("rows", 4, 6)
        assert told == (("noise", 4, rows) if noise else None)


@pytest.mark.parametrize(
    ("largest", "smallest", "count", "keeps"),
    [(0.1, 0.5, 2, False), (0.5, 0.1, 2, True), (0.1, 0.5, 3, True), (0.34, 0.33, 3, True)],
)
def test_errors_are_kept_only_of_tensors_of_which_something_is_sent(
    largest: float, smallest: float, count: int, keeps: bool
) -> None:
    assert dgp._keeps_some(torch.ones(count), largest, smallest) == keeps
    defense = dgp.DGP(largest=largest, smallest=smallest)
    value = torch.arange(1.0, count + 1)
    sent, kept = defense.protect_gradient({"w": value}, fake(), {})
    assert bool(kept) == keeps and (not keeps or torch.equal(kept[dgp.ERROR + "w"], value - sent["w"]))


def test_edges_of_pure_noise_are_those_of_the_matrix_s_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compensation.noise_edges(0.5, 16, 4) == pytest.approx((0.25 * 0.25, 0.25 * 2.25))
    asked: list[Any] = []
    monkeypatch.setattr(compensation, "noise_edges", lambda *given: noted(asked, given) or (1.0, 4.0))
    matrix = torch.diag(torch.tensor([1.0, 2.0, 3.0])).repeat(2, 1) * math.sqrt(3.0)
    found = compensation.denoise_matrix(matrix, 0.25)
    assert asked == [(0.25, 6, 3)]
    assert torch.allclose(found, matrix * torch.tensor([1.0, 1.0, 1.0]), atol=1e-5), "both edges are no noise"
    monkeypatch.setattr(compensation, "noise_edges", lambda *given: (0.5, 5.0))
    assert torch.allclose(compensation.denoise_matrix(matrix, 0.25), matrix * torch.tensor([0.0, 0.0, 1.0]), atol=1e-5)


def test_a_tensor_s_noise_is_halved_down_to_so_many_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    seen = torch.tensor([3.0, -4.0, 0.0])
    monkeypatch.setattr(percentile_noise, "_clean_percentile", lambda counts, edges, std, percentile: noted(asked, std) or 1.0)
    found = percentile_noise.estimate_scale(seen, 0.5, 30.0)
    low, high = 0.0, math.sqrt(25 / 3)
    for number in range(percentile_noise.TRIALS):
        trial = (low + high) / 2
        assert asked[number] == pytest.approx(trial)
        low, high = (trial, high) if trial < 0.5 else (low, trial)
    assert len(asked) == percentile_noise.TRIALS and found == pytest.approx((low + high) / 2, rel=1e-12)
    assert found == pytest.approx(0.5, abs=high / 2**percentile_noise.TRIALS * 4)


@pytest.mark.parametrize(("at", "strangers"), [(0, [0, 2]), (4, [1, 2])])
def test_strangers_are_those_without_a_code_and_later_without_a_map(
    at: int, strangers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    defense = shadow.Shadow(until=2, foreground=0.0)
    batch = Batch(torch.rand(3, 1, 2, 2), torch.tensor([1, 2, 3]), ("a", "b", "c"))
    keys = record_keys(batch)
    memory = Memory({keys[0]: torch.zeros(1)}, {keys[1]: torch.zeros(1)}, {})
    monkeypatch.setattr(shadow, "_network", lambda name, images: "network")
    monkeypatch.setattr(Memory, "read", lambda state: memory)
    monkeypatch.setattr(Memory, "write", lambda self, finished: ("written", finished))
    monkeypatch.setattr(shadow.Shadow, "_fitted", lambda self, *given: noted(asked, given) or torch.zeros(2, 1))
    monkeypatch.setattr(shadow.Shadow, "_minibatches", lambda self, count, learner: [[0, 1], [2]])
    steps: list[Any] = []
    monkeypatch.setattr(shadow.Shadow, "_step", lambda self, *given: noted(steps, given) or (given[1].inputs, given[5]))
    view: Any = fake(round=at, learner="learner")
    found, state = defense.noise(batch, view, {})
    network, told, images, client = asked[0]
    assert (network, client) == ("network", view) and told is memory and torch.equal(images, batch.inputs[strangers])
    assert torch.equal(found, batch.inputs) and state == ("written", at >= 2)  # type: ignore[comparison-overlap]
    assert [each[2:4] for each in steps] == [([keys[0], keys[1]], [0, 1]), ([keys[2]], [2])]
    assert {*steps[0][5].codes} == {keys[1], *(keys[row] for row in strangers)}
    assert [each[1].targets.tolist() for each in steps] == [[1, 2], [3]]


def test_quick_twins_keep_everything_but_effort() -> None:
    full: Any = build_defense("invl_enp(delta=0.5, share=0.9, spared=0.3, rule='count', most=999)")
    twin = full.quick()
    assert (twin.spared, twin.mode, twin.delta, twin.share, twin.rule) == (0.0, "leading", 0.5, 0.9, "count")
    assert twin.most < 999 and build_defense("invl_enp(most=2)").quick().most == 2  # type: ignore[attr-defined]
