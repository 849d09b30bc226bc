"""GradDefense: slices, noise, clipping within slices, the server's compensation, and the attacker who finds the exact half."""

from __future__ import annotations

import gc
import json
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import jacrev

from gradveil.adversary import OpenAdversary
from gradveil.data import public_images
from gradveil.defenses import build_defense, chain, granularity_of
from gradveil.defenses.clipping import Clipping
from gradveil.defenses.graddefense.compensation import denoise_matrix, denoise_update, noise_edges
from gradveil.defenses.graddefense.defense import TRUST, GradDefense, noise_cannot_explain
from gradveil.defenses.graddefense.sensitivity import cut_slices, layer_sensitivity, root_inputs, slice_of_entries
from gradveil.errors import UsageError
from gradveil.federation.server import Server, receive
from gradveil.learning import Learner, loss_by_name
from gradveil.models import build_model
from gradveil.randomness import Seed
from gradveil.records import ModelSpec, Observation, Role, TensorSpec, ThreatModel, Update
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named, flatten, sub
from gradveil.testing.defenses import check_defense
from gradveil.testing.defenses_scene import SHAPE, Scene, draw_batch
from gradveil.wire import encode_dense

GOLDEN: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[2] / "golden" / "defenses_privacy.json").read_text())


def lenet() -> Learner:
    return Learner.of(
        build_model("lenet", input_shape=(3, 32, 32), classes=10, seed=Seed(0)), loss_by_name("cross_entropy"), TrainingSettings()
    )


@pytest.mark.parametrize("row", GOLDEN["slice_cuts"]["value"], ids=str)
def test_hand_cut_slices(row: dict[str, Any]) -> None:
    assert cut_slices(row["sizes"], row["sensitivity"], row["slices"]) == row["cuts"]
    assert slice_of_entries(row["cuts"]).bincount(minlength=row["slices"]).tolist() == [
        right - left for left, right in zip(row["cuts"], row["cuts"][1:], strict=False)
    ]


def test_slices_of_a_real_model_are_equally_sensitive() -> None:
    learner = lenet()
    found = layer_sensitivity(learner, root_inputs((3, 32, 32)))
    sizes = {name: value.numel() for name, value in learner.weights.items()}
    density = torch.cat([torch.full((size,), found[name] / size, dtype=torch.float64) for name, size in sizes.items()])
    shares = [
        float(part.sum() / density.sum()) for part in density.split(torch.tensor(cut_slices(sizes, found, 10)).diff().tolist())
    ]
    assert shares == pytest.approx([0.1] * 10, abs=0.005)


def test_sensitivity_is_the_norm_of_the_derivative_of_the_gradients_sum() -> None:
    scene = Scene.of(GradDefense(), dtype=torch.float64)
    root = root_inputs(SHAPE)[:3].double()
    found = layer_sensitivity(scene.learner, root)
    for name in ("conv.weight", "gain"):

        def total(inputs: Tensor, name: str = name) -> Tensor:
            one = scene.learner.per_example_gradients(scene.learner.weights, inputs, torch.arange(3))
            return one[name].reshape(3, -1).sum(1)  # (examples,)

        slopes = torch.stack([jacrev(total)(root)[i, i] for i in range(3)])
        assert found[name] == pytest.approx(float(slopes.flatten(1).norm(dim=1).mean()), rel=1e-6)
    assert found["unused"] == 0.0
    assert found["head.weight"] < 1e-9 * found["conv.weight"], (
        "softmax errors sum to zero, so the last layer counts as insensitive"
    )


def test_a_client_s_model_is_not_kept_alive() -> None:
    defense = GradDefense()
    scene = Scene.of(defense)
    view = scene.view().replace(learner=scene.learner.replace())
    model = weakref.ref(view.learner)
    defense.prepare(scene.batch, view)
    del view
    gc.collect()
    assert model() is None


def test_public_data_decide_the_cuts_where_there_are_some() -> None:
    defense = GradDefense()
    scene = Scene.of(defense)
    usual = defense.prepare(scene.batch, scene.view())["cuts"]
    other = defense.prepare(scene.batch, scene.view().replace(public=torch.zeros(4, *SHAPE)))["cuts"]
    assert not torch.equal(usual, other)
    assert torch.equal(root_inputs(SHAPE, torch.zeros(4, 1, 2, 2)), root_inputs(SHAPE)), "of another shape they are no root set"
    assert torch.equal(root_inputs(SHAPE, draw_batch(1).inputs), draw_batch(1).inputs)


def noise_by_slice(defense: GradDefense, seed: int, entries: int = 50_000) -> list[float]:
    update = Update({"w": torch.zeros(entries)}, examples=1)
    sent, _ = defense.protect_update(update, Scene.of(defense).view(seed), {})
    return [float(part.std()) for part in sent.weights["w"].chunk(defense.slices)]


def test_half_of_the_slices_get_the_noise_and_others_in_the_next_round() -> None:
    defense = GradDefense(std=0.3)
    halves = []
    for seed in (1, 2, 3):
        found = noise_by_slice(defense, seed)
        noisy = {index for index, std in enumerate(found) if std > 0}
        assert len(noisy) == 5
        assert [found[index] for index in sorted(noisy)] == pytest.approx([0.3] * 5, rel=0.05)
        halves.append(noisy)
    assert halves[0] != halves[1] or halves[1] != halves[2]


def test_clipping_acts_within_noisy_slices_only() -> None:
    defense = GradDefense(std=1e-9, clip=0.1, slices=4, noisy=2)
    view = Scene.of(defense).view()
    gradient = {"a": torch.ones(3, 50), "b": torch.ones(3, 50)}
    sent, _ = defense.protect_gradient(gradient, view, {})
    norms = torch.cat([sent["a"], sent["b"]], dim=1).reshape(3, 4, 25).norm(dim=2)
    assert sorted(norms[0].tolist()) == pytest.approx([0.1, 0.1, 5.0, 5.0], rel=1e-5)
    assert torch.equal(norms[0], norms[1])
    noise = GradDefense(std=1.0, slices=4, noisy=2)
    update, _ = noise.protect_update(Update({"w": torch.zeros(100)}, examples=1), view, {})
    touched = update.weights["w"].reshape(4, 25).abs().sum(1) > 0
    assert torch.equal(touched, norms[0] < 1), "noise and clipping must meet in the same slices, whatever the step"
    again, _ = defense.protect_gradient(gradient, view.replace(step=5), {})
    assert torch.equal(again["a"], sent["a"])


def test_only_clipping_needs_single_examples() -> None:
    assert granularity_of(GradDefense()) == "batch"
    assert granularity_of(GradDefense(clip=0.1)) == "example"
    assert granularity_of(chain(GradDefense(clip=0.1), Clipping())) == "example"


@pytest.mark.parametrize("spelling", ["graddefense(clip=0.01)", "graddefense(std=0.001, slices=4, noisy=1)"])
def test_other_settings_keep_the_contract(spelling: str) -> None:
    assert [result for result in check_defense(build_defense(spelling)) if not result.passed] == []


def test_marchenko_pastur_edges_hold_for_noise() -> None:
    case = GOLDEN["marchenko_pastur_edges"]["value"]
    low, high = noise_edges(case["std"], case["rows"], case["columns"])
    assert (low, high) == pytest.approx((case["low"], case["high"]), rel=GOLDEN["marchenko_pastur_edges"]["tolerance"])
    noise = 0.1 * torch.randn(600, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = torch.linalg.eigvalsh(noise.T @ noise / 600)
    assert low * 0.9 < float(values[0]) < float(values[-1]) < high * 1.1


def test_compensation_finds_a_signal_of_low_rank() -> None:
    generator = torch.Generator().manual_seed(3)
    signal = torch.randn(600, 2, generator=generator, dtype=torch.float64) @ torch.randn(2, 100, generator=generator).double()
    noisy = signal + 0.5 * torch.randn(600, 100, generator=generator, dtype=torch.float64)
    before, after = (noisy - signal).norm(), (denoise_matrix(noisy, 0.5) - signal).norm()
    assert float(after) < 0.3 * float(before)


def mean_of_clients(learner: Learner, defense: GradDefense, clients: int) -> tuple[Named, Named]:
    view = Scene.of(defense).view().replace(learner=learner)
    clean, noisy = [], []
    state = None
    for client in range(clients):
        inputs = public_images((3, 32, 32), 8, Seed(10 + client))
        targets = torch.randint(10, (8,), generator=torch.Generator().manual_seed(client))
        own = view.replace(seed=Seed(client))
        state = state or defense.prepare(draw_batch(0).replace(inputs=inputs, targets=targets), own)
        update = Update(learner.gradient(learner.weights, inputs, targets), examples=8)
        clean.append(update.weights)
        noisy.append(defense.protect_update(update, own, state)[0].weights)
    return tuple({n: torch.stack([each[n] for each in many]).mean(0) for n in many[0]} for many in (clean, noisy))  # type: ignore[return-value]


def test_compensation_lowers_the_error_of_a_noisy_mean() -> None:
    defense = GradDefense(std=0.01)
    clean, noisy = mean_of_clients(lenet(), defense, 10)
    repaired = defense.correct_aggregate(Update(noisy, examples=80), [8] * 10).weights
    before, after = (float(flatten(sub(each, clean)).norm()) for each in (noisy, repaired))
    assert after < 0.9 * before
    # The released code multiplies the variance by the number of clients instead of dividing by it.
    released = denoise_update(noisy, 0.01 * math.sqrt(0.5 * 10), 6.0)
    assert float(flatten(sub(released, clean)).norm()) > before


def test_compensation_can_be_switched_off_and_leaves_small_updates_alone() -> None:
    total = Update({"w": torch.ones(3), "s": torch.tensor(1.0)}, examples=4)
    assert GradDefense(compensate=False).correct_aggregate(total, [4]) is total
    assert GradDefense(std=0).correct_aggregate(total, [4]) is total
    kept = GradDefense(std=1e-6).correct_aggregate(total, [4])
    assert torch.allclose(kept.weights["w"], total.weights["w"])
    part = chain(GradDefense(), Clipping())
    assert part.correct_aggregate(total, [4]).weights.keys() == total.weights.keys()


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 10.0])
def test_a_noisy_slice_is_hardly_ever_taken_for_an_exact_one(spread: float) -> None:
    generator = torch.Generator().manual_seed(11)
    for _ in range(200):
        signal = spread * torch.randn(60, generator=generator) ** 3
        assert not noise_cannot_explain(signal + torch.randn(60, generator=generator), 1.0)


@pytest.mark.parametrize(
    ("spread", "clip", "found"), [(0.3, None, True), (30.0, None, False), (30.0, 0.5, True), (0.3, 0.5, True)]
)
def test_exact_slices_are_recognised(spread: float, clip: float | None, found: bool) -> None:
    signal = spread * torch.randn(200, generator=torch.Generator().manual_seed(12))
    assert noise_cannot_explain(signal, 1.0, clip) is found
    assert not noise_cannot_explain(torch.empty(0), 1.0, clip)


def test_a_clipped_and_noisy_slice_is_not_taken_for_an_exact_one() -> None:
    generator = torch.Generator().manual_seed(13)
    for _ in range(200):
        signal = torch.randn(100, generator=generator)
        assert not noise_cannot_explain(signal / signal.norm() + torch.randn(100, generator=generator), 1.0, 1.0)


def seen_by_lenet(defense: GradDefense, seed: int) -> tuple[Observation, Named]:
    learner = lenet()
    inputs = torch.rand((1, 3, 32, 32), generator=torch.Generator().manual_seed(2))
    raw = Update(learner.gradient(learner.weights, inputs, torch.tensor([3])), examples=1)
    view = Scene.of(defense).view(seed).replace(learner=learner)
    sent, _ = defense.protect_update(raw, view, defense.prepare(draw_batch(0).replace(inputs=inputs), view))
    observation = Observation((learner,), (sent,), (), (3, 32, 32), 10, 1, ThreatModel(), defense.adversary())
    return observation, raw.weights


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_the_attacker_trusts_what_arrived_exactly(seed: int) -> None:
    observation, raw = seen_by_lenet(GradDefense(std=0.1), seed)
    evidence = observation.adversary.evidence(observation, 0)
    same = {name: observation.update.weights[name] == value for name, value in raw.items()}
    trust = torch.cat([evidence[TRUST + name].reshape(-1) for name in raw])
    exact = torch.cat([value.reshape(-1) for value in same.values()])
    assert float((trust[exact] == 1).float().mean()) > 0.95
    assert float(trust[~exact].max()) < 0.75, "what is noisy counts by its signal; only the last layer has much"
    named = observation.adversary.arrives(observation).exact()
    assert all(bool(same[name].all()) for name in named)


def test_the_last_layer_arrives_exactly_every_other_time() -> None:
    whole = [
        {"linear.weight", "linear.bias"} <= seen.adversary.arrives(seen).exact()
        for seen, _ in (seen_by_lenet(GradDefense(std=1.0), s) for s in range(12))
    ]
    assert 3 <= sum(whole) <= 9


def test_of_an_aggregate_everything_is_noisy() -> None:
    observation, _ = seen_by_lenet(GradDefense(std=0.1), 1)
    aggregate = observation.replace(threat=ThreatModel(clients=4))
    assert observation.adversary.arrives(observation).noise_std is None
    assert observation.adversary.arrives(aggregate).noise_std == pytest.approx(0.1 * math.sqrt(0.5 / 4))
    assert observation.adversary.arrives(aggregate).exact() == frozenset()
    evidence = observation.adversary.evidence(aggregate, 0)
    assert all(bool((value == 1).all()) for name, value in evidence.items() if name.startswith(TRUST))


def test_switched_off_the_attacker_is_the_open_one() -> None:
    assert GradDefense(std=0).adversary() == OpenAdversary()
    assert GradDefense(noisy=0).adversary() == OpenAdversary()
    observation, _ = seen_by_lenet(GradDefense(), 1)
    assert GradDefense(clip=0.1).adversary().arrives(observation).incomplete
    assert not GradDefense().adversary().arrives(observation).incomplete


@pytest.mark.parametrize(
    "wrong",
    [{"std": -1}, {"slices": 0}, {"slices": 2.5}, {"noisy": 11}, {"noisy": -1}, {"noisy": True}, {"clip": 0}],
    ids=str,
)
def test_nonsense_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        GradDefense(**wrong)


def test_the_server_corrects_its_mean() -> None:
    defense = GradDefense(std=0.01)
    learner = lenet()
    clean, noisy = mean_of_clients(learner, defense, 2)
    spec = ModelSpec({name: TensorSpec(tuple(v.shape), v.dtype, Role.WEIGHT) for name, v in clean.items()})
    payload = encode_dense(Update(noisy, examples=8))
    moved = (
        Server(learner.weights)
        .step(receive({0: payload, 1: payload}, defense, spec, round_index=0), defense, spec)
        .server.weights
    )
    expected = defense.correct_aggregate(Update(noisy, examples=16), [8, 8]).weights
    assert not torch.equal(flatten(expected), flatten(noisy))
    assert torch.allclose(flatten(sub(learner.weights, moved)), flatten(expected), atol=1e-6)
