"""SVDefense: its formulas against an ordinary SVD, its rules at the edges, its attacker's relations, and the hardened variant."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from gradveil.attacks.engine.objectives import OBJECTIVES
from gradveil.attacks.linear_layer import layer_inputs
from gradveil.defenses import Chain, build_defense
from gradveil.defenses.gaussian_noise import GaussianNoise
from gradveil.defenses.svdefense.adversary import TruncationAdversary
from gradveil.defenses.svdefense.defense import SVDefense, layer_weights_by_entropy
from gradveil.defenses.svdefense.tilt import LEFT_SHARE, tilted
from gradveil.defenses.svdefense.truncation import ChannelWeights, rank_above, spectral_entropy, truncate, what_is_read
from gradveil.errors import BadUpdate, DefenseOrder, UsageError
from gradveil.records import Batch, Payload, Update
from gradveil.tensors import Named
from gradveil.testing.defenses_scene import Scene, distance, draw_batch, spec_of
from gradveil.wire import tensor_bytes
from gradveil.wire.factors import Factors

GOLDEN: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[2] / "golden" / "defenses_svdefense.json").read_text())
KINDS: tuple[ChannelWeights, ...] = ("squared", "absolute", "none")
ONE = Batch(draw_batch(0).inputs[:1], draw_batch(0).targets[:1])


def waves() -> Tensor:
    matrix = torch.tensor([[math.sin(1 + 3 * i + 2 * j * j + (i + 1) * j) for j in range(6)] for i in range(4)]).double()
    matrix[2] *= 0.1
    return matrix


def draw(rows: int, columns: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return a matrix with a falling spectrum and channels of very different size."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    left, sigma, right = torch.linalg.svd(matrix, full_matrices=False)
    spectrum = sigma * torch.logspace(0, -2, len(sigma), dtype=torch.float64)
    rows_of = torch.logspace(0, -3, rows, dtype=torch.float64)[:, None]
    whole: Tensor = rows_of * (left * spectrum) @ right
    return whole.to(dtype)


def through(defense: SVDefense, weights: Named, seed: int = 1) -> Named:
    return Scene.of(defense).release(defense, weights, seed).weights


@pytest.mark.parametrize("case", GOLDEN["truncation_of_waves"]["value"], ids=lambda case: f"{case['weights']}-{case['beta']}")
def test_the_formulas_of_the_paper(case: dict[str, Any]) -> None:
    found = truncate(waves(), weights=case["weights"], beta=case["beta"], threshold=case["threshold"])
    whole = found.whole
    ours = {"entropy": found.entropy, "norm": float(whole.norm()), "corner": float(whole[0, 0]), "residual": found.residual}
    assert len(found.sigma) == case["rank"]
    assert ours == pytest.approx({name: case[name] for name in ours}, abs=GOLDEN["truncation_of_waves"]["tolerance"])


@pytest.mark.parametrize("weights", KINDS)
@pytest.mark.parametrize("shape", [(12, 75), (75, 12), (64, 576), (10, 10), (1, 9)])
@pytest.mark.parametrize("threshold", [0.3, 0.9, 0.9999])
def test_the_gram_matrix_gives_what_an_svd_gives(weights: ChannelWeights, shape: tuple[int, int], threshold: float) -> None:
    matrix = draw(*shape, dtype=torch.float32)
    found = truncate(matrix, weights=weights, beta=0.3, threshold=threshold)
    wide = matrix.double()
    rows = {"squared": wide.norm(dim=1), "absolute": wide.abs().sum(1).sqrt(), "none": wide.new_ones(len(wide))}[weights]
    left, sigma, right = torch.linalg.svd(rows[:, None] * wide, full_matrices=False)
    k = len(found.sigma)
    expected = (left[:, :k] * sigma[:k]) @ right[:k] / rows[:, None]
    assert float((found.whole - expected).norm() / expected.norm()) <= 1e-5
    shares = sigma.square() / sigma.square().sum()
    assert float(shares[:k].sum()) > threshold >= float(shares[: k - 1].sum())
    assert found.residual == pytest.approx(float((wide - expected).square().sum() / wide.square().sum()), abs=1e-10)


@pytest.mark.parametrize("weights", KINDS)
@pytest.mark.parametrize("shape", [(12, 75), (75, 12), (10, 10), (1, 9)])
@pytest.mark.parametrize("threshold", [None, 0.0, 0.9, 0.9999])
def test_many_matrices_at_once_are_read_as_each_alone(
    weights: ChannelWeights, shape: tuple[int, int], threshold: float | None
) -> None:
    few = [draw(*shape, dtype=torch.float32, seed=seed) for seed in range(3)]
    few[1][-1] = 1e-12 * few[1][0]  # a dead channel
    many = torch.stack([*few, torch.zeros(shape), torch.ones(shape)])
    together = vmap(lambda matrix: what_is_read(matrix, weights, 0.3, threshold))(many)
    for matrix, read in zip(many, together, strict=True):
        found = truncate(matrix, weights=weights, beta=0.3, threshold=threshold)
        sent = Factors(found.scale, found.left, found.sigma, found.right).whole()
        assert float((read - sent).norm()) <= 1e-6 * max(1.0, float(matrix.norm()))


def test_rank_is_clamped_and_the_threshold_is_strict() -> None:
    energies = torch.tensor([3.0, 1.0, 0.0])
    assert [rank_above(energies, threshold) for threshold in (0.0, 0.74, 0.75, 0.99, 1.0)] == [1, 1, 2, 2, 2]
    assert rank_above(torch.zeros(3), 0.5) == 1
    assert spectral_entropy(torch.zeros(3)) == 0.0
    assert spectral_entropy(torch.ones(4)) == pytest.approx(math.log(4))


def test_a_larger_beta_never_keeps_less() -> None:
    matrix = draw(20, 50)
    ranks = [
        len(truncate(matrix, weights="squared", beta=beta, threshold=None).sigma) for beta in (0.05, 0.1, 0.3, 0.6, 2.0, 50.0)
    ]
    assert ranks == sorted(ranks)
    assert ranks[-1] > ranks[0]


@pytest.mark.parametrize("weights", KINDS)
def test_rank_one_passes_and_dead_channels_are_zero(weights: ChannelWeights) -> None:
    generator = torch.Generator().manual_seed(1)
    matrix = torch.outer(torch.randn(10, generator=generator), torch.rand(40, generator=generator))
    matrix[4] = 0
    sent = through(SVDefense(weights=weights), {"w": matrix})["w"]
    assert distance({"w": sent}, {"w": matrix}) < 1e-6
    assert not bool(sent[4].any())
    damaged = draw(10, 40, dtype=torch.float32)
    damaged[3] = 0
    assert not bool(through(SVDefense(weights=weights), {"w": damaged})["w"][3].any())


def test_a_channel_far_below_the_others_does_not_blow_up() -> None:
    matrix = draw(6, 30, dtype=torch.float32)
    matrix[2] *= 1e-20
    found = truncate(matrix, weights="squared", beta=0.3, threshold=0.999)
    assert found.scale is not None and float(found.scale[2]) == 0
    assert float(found.whole[2].abs().max()) < 1e-15


def test_vectors_scalars_and_zero_layers_follow_their_rules() -> None:
    weights = {
        "bn.weight": torch.linspace(-1, 1, 7),
        "gain": torch.tensor(3.0),
        "none": torch.empty(0),
        "column": torch.ones(4, 1),
    }
    zero = {"zero": torch.zeros(5, 9)}
    for defense in (SVDefense(), SVDefense(hardened=True)):
        sent = through(defense, weights | zero)
        assert all(torch.equal(sent[name], value) for name, value in (weights | zero).items())


@pytest.mark.parametrize("weights", ["squared", "none"])
def test_theorem_1_bounds_the_error(weights: ChannelWeights) -> None:
    for seed in range(30):
        matrix = draw(5 + seed % 7, 8 + seed, seed)
        for threshold in (None, 0.3, 0.8):
            found = truncate(matrix, weights=weights, beta=0.3, threshold=threshold)
            kept = threshold if threshold is not None else 1 - math.exp(-0.3 * found.entropy)
            ratio = 1.0 if found.scale is None else float(found.scale.max() / found.scale.min())
            error = float((matrix - found.whole).norm() / matrix.norm())
            assert error <= ratio * math.sqrt(1 - kept) + 1e-9


def test_bytes_come_from_the_factors() -> None:
    case = GOLDEN["factor_bytes"]["value"]
    generator = torch.Generator().manual_seed(2)
    matrix = torch.outer(torch.randn(case["rows"], generator=generator), torch.randn(case["columns"], generator=generator))
    scene, defense = Scene.of(SVDefense()), SVDefense()
    payload = defense.encode(Update({"w": matrix}, 1), scene.view())
    assert payload.streams["sigma"]["w"].numel() == case["rank"]
    assert (tensor_bytes(payload), matrix.numel() * 4) == (case["factors"], case["dense"])


@pytest.mark.parametrize("shape", [(16, 200), (200, 16)])
@pytest.mark.parametrize("quiet", [1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quiet_channels_arrive_as_exactly_as_loud_ones(shape: tuple[int, int], quiet: float, dtype: torch.dtype) -> None:
    matrix = draw(*shape)
    matrix[3] *= quiet
    matrix = matrix.to(dtype)
    expected = truncate(matrix, weights="squared", beta=0.3, threshold=None).whole[3]
    arrived = through(SVDefense(), {"a.weight": matrix})["a.weight"][3].double()
    assert float((arrived - expected).norm() / expected.norm()) < (1e-5 if dtype == torch.float32 else 1e-9)


def _payload(entropies: dict[str, float], examples: int) -> Payload:
    weights = {"a.weight": torch.ones(2, 3), "a.bias": torch.ones(2), "bn.weight": torch.ones(2)}
    streams: dict[str, Named] = {"weights": weights, "entropy": {n: torch.tensor(e).double() for n, e in entropies.items()}}
    return Payload("factors-1", streams, examples)


def test_layers_are_weighed_by_entropy_and_examples() -> None:
    case = GOLDEN["aggregation_by_entropy"]["value"]
    pairs = list(zip(case["entropies"], case["examples"], strict=True))
    found = layer_weights_by_entropy([_payload({"a.weight": e}, n) for e, n in pairs])
    for name, key in (("a.weight", "shares"), ("a.bias", "shares"), ("bn.weight", "by_examples")):
        assert [own[name] for own in found] == pytest.approx(case[key], abs=1e-7)
    vanished = layer_weights_by_entropy([_payload({"a.weight": 0.0}, n) for _, n in pairs])
    assert [own["a.weight"] for own in vanished] == pytest.approx(case["by_examples"])
    # What rounding leaves of a vanished entropy must not choose either.
    rounding = layer_weights_by_entropy([_payload({"a.weight": i * 1e-9}, n) for i, (_, n) in enumerate(pairs)])
    assert [own["a.weight"] for own in rounding] == pytest.approx(case["by_examples"])
    assert SVDefense(layer_wise=False).layer_weights([_payload({"a.weight": 1.0}, 3)]) is None


@pytest.mark.parametrize(
    ("payloads", "words"),
    [
        ([], "no payloads"),
        ([_payload({"a.weight": -1.0}, 2)], "no weight"),
        ([_payload({"a.weight": math.inf}, 2)], "no weight"),
        ([_payload({"a.weight": 1.0}, 0)], "at least one"),
        ([_payload({"a.weight": 1.0}, 1), _payload({}, 1)], "different"),
    ],
)
def test_weights_that_cannot_be_formed_are_refused(payloads: list[Payload], words: str) -> None:
    with pytest.raises(BadUpdate, match=words):
        layer_weights_by_entropy(payloads)


@pytest.mark.parametrize(
    "spelling",
    [
        "svdefense",
        "svdefense(weights='absolute')",
        "svdefense(weights='none')",
        "svdefense(adaptive=False)",
        "svdefense(adaptive=False, threshold=0.999)",
    ],
)
@pytest.mark.parametrize("batch", [ONE, draw_batch(3)], ids=["one", "three"])
def test_the_attackers_relations_hold_at_the_truth(spelling: str, batch: Batch) -> None:
    defense = build_defense(spelling)
    scene = Scene.of(defense)
    observation = scene.observe(defense, 1, batch)
    adversary = observation.adversary
    replayed = adversary.replay(scene.learner, batch.inputs, batch.targets, {})
    comparison = adversary.compare(adversary.evidence(observation, 0), replayed, {})
    assert {name.partition(" ")[2] for name in comparison.simulated} == {"", "across"} | (
        set() if "none" in spelling else {"norms"}
    )
    for name, residual in comparison.residuals().items():
        assert float(residual.norm()) <= 2e-5 * float(comparison.observed[name].norm()) + 1e-7, name


@pytest.mark.parametrize("batch", [ONE, draw_batch(3)], ids=["one", "three"])
def test_hardened_only_what_biases_tell_arrives_exactly(batch: Batch) -> None:
    defense = SVDefense(hardened=True)
    scene = Scene.of(defense)
    off: dict[str, list[float]] = {}
    for seed in range(12):
        observation = scene.observe(defense, seed, batch)
        adversary = observation.adversary
        evidence = adversary.evidence(observation, 0)
        replayed = adversary.replay(scene.learner, batch.inputs, batch.targets, {})
        comparison = adversary.compare(evidence, replayed, {})
        for name, residual in comparison.residuals().items():
            off.setdefault(name, []).append(float(residual.norm() / comparison.observed[name].norm().clamp_min(1e-30)))
    assert max(off["head.bias"]) < 1e-5
    one = len(batch.inputs) == 1
    assert (max(off["head.weight squared"]) < 1e-4) is one  # its left vectors are told by the bias anyway
    assert min(off["conv.weight squared"]) > 0.02  # nothing of a convolution arrives exactly
    assert min(off["conv.weight across"]) > 0.1
    assert min(off["head.weight across"]) > 0.1


@pytest.mark.parametrize("objective", ["cosine", "layer_cosine", "relative_l2"])
def test_the_truth_is_the_minimum_of_what_recipes_minimise(objective: str) -> None:
    # Where it is not, no search finds the record, however long; where it is, a weak result is the search's own.
    scene, defense = Scene.of(SVDefense()), SVDefense()
    observation = scene.observe(defense, 1, ONE)
    adversary = observation.adversary
    evidence = adversary.evidence(observation, 0)

    def misfit(inputs: Tensor) -> float:
        replayed = adversary.replay(scene.learner, inputs, ONE.targets, {})
        return float(OBJECTIVES.get(objective)(adversary.compare(evidence, replayed, {})))

    near = (ONE.inputs + 0.01 * torch.randn(ONE.inputs.shape, generator=torch.Generator().manual_seed(3))).clamp(0, 1)
    assert misfit(ONE.inputs) < 1e-10
    assert misfit(near) > 1e4 * misfit(ONE.inputs)
    assert misfit(draw_batch(2).inputs[1:2]) > misfit(near)


def test_one_example_leaks_its_features_unless_hardened() -> None:
    for defense, exact in ((SVDefense(), True), (SVDefense(hardened=True), False)):
        scene = Scene.of(defense)
        observation = scene.observe(defense, 1, ONE)
        names = observation.adversary.arrives(observation).exact()
        assert ("head.weight" in names) is exact
        assert {"head.bias", "conv.bias", "gain"} <= names
        features = layer_inputs(observation.update.weights, "head.weight", 1)
        true = layer_inputs(scene.learner.gradient(scene.learner.weights, ONE.inputs, ONE.targets), "head.weight", 1)
        assert features is not None and true is not None
        assert (distance({"x": features}, {"x": true}) < 1e-4) is exact


def test_under_secure_aggregation_the_attacker_says_it_is_incomplete() -> None:
    observation = Scene.of(SVDefense()).observe(SVDefense(), 1, draw_batch(1))
    hidden = observation.replace(payloads=())
    adversary = TruncationAdversary()
    assert adversary.arrives(hidden).incomplete and not adversary.arrives(observation).incomplete
    assert set(adversary.evidence(hidden, 0)) == {f"observed/{name}" for name in observation.update.weights}
    assert adversary.arrives(hidden).exact() == {"conv.bias", "head.bias", "gain", "unused"}


@pytest.mark.parametrize("least_error", [1e-4, 0.1, 0.5, 2.0])
@pytest.mark.parametrize("kind", ["rank one", "falling"])
def test_hardened_layers_arrive_with_the_error_asked_for(least_error: float, kind: str) -> None:
    generator = torch.Generator().manual_seed(4)
    matrix = torch.outer(torch.randn(10, generator=generator), torch.rand(300, generator=generator)).double()
    matrix = matrix if kind == "rank one" else draw(12, 300)
    plain = SVDefense().truncated(matrix).residual
    defense = SVDefense(hardened=True, least_error=least_error)
    errors = [distance(through(defense, {"w": matrix}, seed), {"w": matrix}) ** 2 for seed in range(20)]
    assert sum(errors) / len(errors) == pytest.approx(max(plain, least_error), rel=0.1)


def test_the_tilt_is_unbiased_and_across_the_vector() -> None:
    found = truncate(draw(6, 40), weights="squared", beta=0.3, threshold=0.9)
    generator = torch.Generator().manual_seed(5)
    added = (1.5 - found.residual) / (1 - found.residual)
    for left_is_known in (False, True):
        both = [tilted(found, 1.5, generator, left_is_known=left_is_known) for _ in range(4000)]
        left, right = (torch.stack(each) for each in zip(*both, strict=True))
        sizes = found.projected.norm(dim=0)
        squared = []
        for draws, kept in (
            (right - found.right, found.right),
            (((left - found.projected) / sizes).mT, (found.projected / sizes).mT),
        ):
            lengths = draws.norm(dim=2)
            assert float(lengths.max() - lengths.min()) < 1e-9
            assert float((draws * kept).sum(2).abs().max()) < 1e-9
            assert float(draws.mean(0).norm(dim=1).max()) < 0.05
            squared.append(float(lengths.mean()) ** 2)
        assert (1 + squared[0]) * (1 + squared[1]) == pytest.approx(1 + added)
        assert squared[1] == pytest.approx(0.0 if left_is_known else LEFT_SHARE * squared[0])


def test_hardened_payloads_do_not_carry_row_norms() -> None:
    defense = SVDefense(hardened=True)
    payload = defense.encode(Update({"w": draw(10, 60, dtype=torch.float32)}, 1), Scene.of(defense).view())
    assert not payload.streams["scale"]
    assert defense.decode(payload, spec_of({"w": torch.zeros(10, 60)})).weights["w"].shape == (10, 60)


def test_it_must_come_last_in_a_chain() -> None:
    with pytest.raises(DefenseOrder, match=r"gaussian_noise\(std=0.1\) \+ svdefense"):
        build_defense("svdefense + gaussian_noise(std=0.1)")
    assert Chain(parts=(GaussianNoise(std=0.1), SVDefense())).scheme == "factors-1"


@pytest.mark.parametrize("wrong", ["beta=0", "weights='square'", "threshold=1", "least_error=0", "hardened=1"])
def test_settings_that_mean_nothing_are_refused(wrong: str) -> None:
    with pytest.raises(UsageError, match="svdefense"):
        build_defense(f"svdefense({wrong})")
