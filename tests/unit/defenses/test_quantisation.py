"""Quantisation and MQ: which values come out, how few bytes they take, and what their intervals tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gradveil.adversary import OpenAdversary
from gradveil.defenses import Defense, build_defense
from gradveil.defenses.mixed_quantisation import HiddenRangesAdversary, MixedQuantisation, MixedRoundedAdversary, mixed_grids
from gradveil.defenses.quantisation import HIGH, LOW, Quantisation, RoundedAdversary, quantise
from gradveil.errors import DefenseOrder, UsageError
from gradveil.records import Update
from gradveil.tensors import Named
from gradveil.testing.defenses import check_defense
from gradveil.testing.defenses_adversary import relative_residual
from gradveil.testing.defenses_scene import Scene, distance, draw_batch
from gradveil.wire import Grid, encode_dense, tensor_bytes

GOLDEN: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[2] / "golden" / "defenses_transforms.json").read_text())
ALL: list[Defense] = [
    *(Quantisation(bits=bits) for bits in (2, 4, 16)),
    Quantisation(mode="qsgd", bits=5),
    Quantisation(mode="sign"),
    MixedQuantisation(bits=(4, 3, 2)),
]


def protect(defense: Defense, weights: Named, seed: int = 1) -> Named:
    return defense.protect_update(Update(weights, examples=1), Scene.of(defense).view(seed), {})[0].weights


@pytest.mark.parametrize(
    ("defense", "golden"),
    [(Quantisation(bits=3), "uniform_three_bits"), (Quantisation(mode="sign"), "signs"), (None, "affine_two_bits")],
)
def test_values_by_hand(defense: Defense | None, golden: str) -> None:
    case, tolerance = GOLDEN[golden]["value"], GOLDEN[golden]["tolerance"]
    given = torch.tensor(case["update"], dtype=torch.float64)
    sent = quantise(given, Grid(4, symmetric=False)) if defense is None else protect(defense, {"a": given})["a"]
    assert sent.tolist() == pytest.approx(case["sent"], abs=tolerance)


@pytest.mark.parametrize("mode", ["qsgd", "sign"])
def test_other_modes_keep_the_contract(mode: Any) -> None:
    assert [result for result in check_defense(Quantisation(mode=mode)) if not result.passed] == []


def test_the_outside_observer_keeps_the_contract() -> None:
    assert [result for result in check_defense(MixedQuantisation(observer="outside")) if not result.passed] == []


def test_rounding_at_random_is_right_on_average_and_stays_within_a_step() -> None:
    value = torch.tensor([1.0, *[0.3] * 40_000])
    sent = protect(Quantisation(mode="qsgd", bits=3), {"a": value})["a"]
    assert float(sent[0]) == 1.0
    assert sent[1:].unique().tolist() == pytest.approx([0.0, 1 / 3], abs=1e-6)
    assert float(sent[1:].mean()) == pytest.approx(0.3, abs=0.003)
    assert Quantisation(mode="qsgd").random and not Quantisation().random


@pytest.mark.parametrize("defense", ALL, ids=str)
def test_nothing_changes_on_the_wire_and_bytes_are_few(defense: Defense) -> None:
    generator = torch.Generator().manual_seed(2)
    scene = Scene.of(defense)
    weights = {"one.weight": torch.randn(40, 100, generator=generator), "one.bias": torch.randn(100, generator=generator)}
    update = Update(protect(defense, weights), examples=1)
    payload = defense.encode(update, scene.view())
    assert not payload.streams["weights"]
    bits = 1 if defense == Quantisation(mode="sign") else defense.bits  # type: ignore[attr-defined]
    first = bits[0] if isinstance(bits, tuple) else bits
    assert tensor_bytes(payload) <= tensor_bytes(encode_dense(update)) * first / 32 + 2 * 8 + 2
    assert distance(scene.release(defense, weights).weights, update.weights) == 0


def test_noise_after_rounding_is_sent_whole() -> None:
    chained = build_defense("quantisation(bits=4) + gaussian_noise(std=0.01)")
    scene = Scene.of(chained)
    sent = scene.release(chained, scene.gradient()).weights
    alone = scene.release(Quantisation(bits=4), scene.gradient()).weights
    gap = torch.cat([(sent[name] - value).reshape(-1) for name, value in alone.items()])
    assert float(gap.std()) == pytest.approx(0.01, rel=0.15)
    with pytest.raises(DefenseOrder, match="wire format"):
        build_defense("pruning(rate=0.5) + quantisation(bits=4)")


@pytest.mark.parametrize("defense", ALL, ids=str)
def test_the_truth_lies_in_every_interval(defense: Defense) -> None:
    scene, truth = Scene.of(defense), draw_batch(3)
    observation = scene.observe(defense, 3, truth)
    raw = scene.learner.update(truth.inputs, truth.targets)
    evidence = observation.adversary.evidence(observation, 0)
    for name, value in raw.items():
        slack = 1e-5 * value.abs().max() if value.numel() else 0.0
        assert bool((value >= evidence[LOW + name] - slack).all()) and bool((value <= evidence[HIGH + name] + slack).all())
    informed, plain = (
        float(relative_residual(each, scene.learner, evidence, truth.inputs, truth.targets, {}))
        for each in (observation.adversary, OpenAdversary())
    )
    assert informed < 1e-8 and (plain > 100 * informed)


def test_a_mean_of_clients_has_no_intervals() -> None:
    scene = Scene.of(Quantisation())
    observation = scene.observe(Quantisation(), 1, draw_batch(1))
    crowd = observation.replace(threat=type(observation.threat)(clients=2))
    evidence = RoundedAdversary(Grid(15)).evidence(crowd, 0)
    assert all(torch.equal(evidence[LOW + name], value) for name, value in observation.update.weights.items())


def test_layers_take_turns() -> None:
    grids = mixed_grids(["a.weight", "a.bias", "b.weight", "c", "d.weight"], (8, 4))
    assert grids == {
        "a.weight": Grid(256, symmetric=False),
        "a.bias": Grid(256, symmetric=False),
        "b.weight": Grid(15),
        "c": Grid(256, symmetric=False),
        "d.weight": Grid(15),
    }
    assert [grid.bits for grid in grids.values()] == [8, 8, 4, 8, 4]


def test_who_knows_the_ranges_is_a_setting() -> None:
    assert isinstance(MixedQuantisation().adversary(), MixedRoundedAdversary)
    outside = MixedQuantisation(observer="outside").adversary()
    assert isinstance(outside, HiddenRangesAdversary)
    scene = Scene.of(MixedQuantisation())
    observation = scene.observe(MixedQuantisation(), 1, draw_batch(1))
    moved = {name: 7 * value + 3 for name, value in observation.update.weights.items()}
    other = observation.replace(updates=(observation.update.replace(weights=moved),))
    before, after = outside.evidence(observation, 0), outside.evidence(other, 0)
    assert all(torch.allclose(before[name], after[name], atol=1e-5) for name in before)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Quantisation(bits=1), "from 2 to 16"),
        (lambda: Quantisation(bits=2.5), "from 2 to 16"),  # type: ignore[arg-type]
        (lambda: Quantisation(mode="signs"), "did you mean 'sign'"),  # type: ignore[arg-type]
        (lambda: MixedQuantisation(bits=()), "one number or more"),
        (lambda: MixedQuantisation(bits=8), "one number or more"),  # type: ignore[arg-type]
        (lambda: MixedQuantisation(bits=(8, 17)), "from 2 to 16"),
        (lambda: MixedQuantisation(observer="servers"), "did you mean 'server'"),  # type: ignore[arg-type]
    ],
)
def test_nonsense_is_refused(make: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()
