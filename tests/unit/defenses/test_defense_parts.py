"""What single functions of defenses hand on, with hand-made clients and observations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gradveil.defenses import build_defense, censor, dp_sgd, percentile_noise, quantisation
from gradveil.defenses.chain import ChainAdversary
from gradveil.defenses.dp_sgd import DPSGDAdversary
from gradveil.defenses.invl import gnp_adversary, singular_noise
from gradveil.defenses.outpost import SURELY_KEPT, OutpostAdversary
from gradveil.defenses.refiner import refinement
from gradveil.defenses.refiner.adversary import NOISE, MixtureAdversary
from gradveil.defenses.svdefense.adversary import _Kept
from gradveil.defenses.svdefense.defense import layer_weights_by_entropy
from gradveil.randomness import Seed
from gradveil.records import Batch, Payload
from gradveil.spectra.jacobians import Jacobian
from gradveil.tensors import Named
from tests.unit.stand_ins import fake, noted


class Client:
    """A learner whose loss is the distance of its weight from the mean input, with or without double precision."""

    def __init__(self, shares: str, double: bool, dtype: torch.dtype = torch.float32) -> None:
        self.settings, self.double, self.dtype = fake(shares=shares, learning_rate=0.5), double, dtype
        self.weights = {"w": torch.tensor([4.0, 0.0], dtype=dtype)}
        self.asked: list[tuple[Tensor, Tensor]] = []

    def to(self, dtype: torch.dtype) -> Client:
        if not self.double:
            raise RuntimeError("no double precision here")
        self.exact = Client(self.settings.shares, True, dtype)
        return self.exact

    def objective(self, weights: Named, inputs: Tensor, targets: Tensor) -> Tensor:
        self.asked.append((inputs, targets))
        assert inputs.dtype == self.dtype and not targets.is_floating_point()
        return (weights["w"].sum() - inputs.mean()).abs()


def chunks() -> Iterator[Named]:
    """Offer steps of 0, 6, infinity and 2, then of 3 and 6, then of 9; the inputs have mean 1."""
    for steps in ([0.0, 6.0, math.inf, 2.0], [3.0, 6.0], [9.0]):
        yield {"w": torch.stack([torch.tensor([step, 0.0]) for step in steps])}


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize(("shares", "step", "loss"), [("gradient", 6.0, 0.0), ("weights", 3.0, 0.0)])
def test_the_candidate_after_whose_real_step_the_loss_is_lowest_is_kept(
    shares: str, step: float, loss: float, double: bool
) -> None:
    client = Client(shares, double)
    batch = Batch(torch.tensor([[0.5], [1.5]]), torch.tensor([1, 0]))
    view: Any = fake(batch=batch, learner=client)
    found = censor.select_candidate(chunks(), view, client.weights)
    assert found.weights["w"].tolist() == [step, 0.0] and (found.loss, found.start) == (loss, 3.0) and not found.fell_back
    own = client.exact if double else client
    assert all(torch.equal(inputs.float(), batch.inputs) and torch.equal(labels, batch.targets) for inputs, labels in own.asked)
    none = censor.select_candidate(iter([{"w": torch.tensor([[0.0, 0.0]])}]), view, client.weights)
    assert none.fell_back and none.loss == 3.0
    for other in (fake(batch=None, learner=client), view):
        like = client.weights if other.batch is None else {"w": torch.zeros(3)}
        first = censor.select_candidate(chunks(), other, like)
        assert first.weights["w"].tolist() == [0.0, 0.0] and math.isnan(first.loss) and math.isnan(first.start)


def test_soft_labels_are_counted_in_the_precision_of_the_model() -> None:
    hard = censor._as_double(Batch(torch.zeros(1, 1), torch.tensor([3])))
    soft = censor._as_double(Batch(torch.zeros(1, 1), torch.tensor([[0.5, 0.5]])))
    assert [each.dtype for each in (*hard, *soft)] == [torch.float64, torch.int64, torch.float64, torch.float64]


def seen(*, examples: int = 6, clients: int = 1, **settings: Any) -> Any:
    told = {"shares": "gradient", "optimizer": "sgd", "learning_rate": 0.5, "momentum": 0.0, **settings}
    learner = fake(weights={"a.weight": 0, "a.bias": 0, "b.weight": 0}, settings=fake(sizes=lambda size: [size], **told))
    return fake(examples=examples, threat=fake(clients=clients), learner=learner)


@pytest.mark.parametrize(
    ("bound", "multiplier", "scope", "expected", "std"),
    [
        (2.0, 0.25, "global", 0, 0.5 / 6),
        (2.0, 3.0, "global", 4, 6.0 / 4),
        (3.0, 0.25, "layer", 0, 0.75 * math.sqrt(2) / 6),
    ],
)
def test_the_attacker_of_noisy_sgd_knows_the_noise_of_its_settings(
    bound: float, multiplier: float, scope: Any, expected: int, std: float
) -> None:
    adversary = DPSGDAdversary(bound=bound, scope=scope, noise_multiplier=multiplier, expected_batch=expected)
    told = adversary.arrives(seen())
    assert told.noise_std == pytest.approx(std) and told.exact() == frozenset() and not told.incomplete
    assert told.label_evidence is not None
    assert adversary.arrives(seen(clients=4, examples=24)).noise_std == pytest.approx(std / 2)


@pytest.mark.parametrize(
    ("settings", "sizes", "std", "bent"),
    [
        ({"shares": "gradient"}, [4], 0.25, False),
        ({"shares": "weights"}, [4], 0.125, False),
        ({"shares": "weights"}, [4, 2], 0.5 * math.hypot(0.25, 0.5), True),
        ({"shares": "weights", "momentum": 0.5}, [4, 2], 0.5 * math.hypot(1.5 * 0.25, 0.5), True),
        ({"shares": "weights", "optimizer": "adam"}, [4], None, True),
    ],
)
def test_noise_adds_up_over_local_steps(settings: dict[str, Any], sizes: list[int], std: float | None, bent: bool) -> None:
    observation = seen(**settings)
    observation.learner.settings.sizes = lambda size: sizes
    found = dp_sgd.accumulated_noise(observation, lambda size: 1 / size)
    assert found == (None if std is None else pytest.approx(std))
    told = DPSGDAdversary(bound=1.0, scope="global", noise_multiplier=1.0, expected_batch=0).arrives(observation)
    assert told.incomplete == bent and told.noise_std == found


@pytest.mark.parametrize("public", [None, torch.rand(3, 1, 2, 2)])
def test_the_span_of_the_noise_is_looked_for_with_the_defense_s_settings(
    public: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    adversary = build_defense("invl_gnp(share=0.8, spared=0.1, rule='count', mode='leading', most=7)").adversary()
    assert isinstance(adversary, gnp_adversary.SubspaceUpdateAdversary)
    monkeypatch.setattr(gnp_adversary, "public_centres", lambda learner, images: noted(asked, images) or ("x", "y"))
    monkeypatch.setattr(gnp_adversary, "average_jacobian", lambda *given: ("jacobian", *given))
    monkeypatch.setattr(gnp_adversary, "noise_range", lambda *given, **more: noted(asked, (given, more)) or fake(scaled="scaled"))
    monkeypatch.setattr(gnp_adversary, "left_basis", lambda *given: given)
    monkeypatch.setattr(gnp_adversary, "_BASES", fake(get=lambda key, make: (key, make())))
    monkeypatch.setattr(gnp_adversary, "content_of", lambda images: "content")
    learner: Any = fake(content="model")
    key, made = adversary._basis(learner, public, (1, 2, 2))
    assert torch.equal(asked[0], torch.full((1, 1, 2, 2), 0.5) if public is None else public)
    jacobian = ("jacobian", learner, "x", "y")
    assert asked[1] == ((jacobian,), {"low": 0.1, "high": 0.8, "rule": "count", "mode": "leading", "most": 7})
    assert made == (jacobian, "scaled") and key == ("model", "content", (1, 2, 2), adversary)


@pytest.mark.parametrize(("mode", "chosen"), [("gram", "gram"), ("auto", "dense"), ("leading", "leading")])
@pytest.mark.parametrize("most", [2, 50])
def test_leading_directions_are_asked_for_in_the_mode_that_was_chosen(
    mode: str, chosen: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    jacobian = Jacobian(lambda point: point * torch.arange(1.0, 5.0), torch.zeros(4))
    right = torch.arange(16.0, dtype=torch.float64).reshape(4, 4)
    monkeypatch.setattr("gradveil.spectra.spectrum.choose_mode", lambda given: "dense" if given is jacobian else "")
    monkeypatch.setattr(
        "gradveil.spectra.spectrum.spectrum", lambda *given, **more: noted(asked, (given, more)) or fake(right=right)
    )
    monkeypatch.setattr(singular_noise, "noisy_ranks", lambda found, **more: noted(asked, more) or (0, 3))
    found = singular_noise.right_basis(jacobian, share=0.7, rule="count", mode=mode, most=most)
    assert asked[0] == ((jacobian,), {"mode": chosen, "leading": min(most, 4), "right": True, "seed": Seed(0)})
    assert asked[1] == {"low": 0.0, "high": 0.7, "rule": "count", "most": most}
    assert torch.equal(found, right[:, :3].T.float())
    monkeypatch.setattr(singular_noise, "noisy_ranks", lambda found, **more: (0, 0))
    assert singular_noise.right_basis(jacobian, share=0.7, rule="count", mode=mode, most=most).shape == (0, 4)


def test_ranks_of_noise_count_values_that_are_tied() -> None:
    def ranks(values: list[float], low: float, high: float, most: int = 9, rule: str = "count") -> tuple[int, int]:
        found: Any = fake(values=torch.tensor(values), dead=False, whole=True, inputs=len(values), outputs=99)
        return singular_noise.noisy_ranks(found, low=low, high=high, rule=rule, most=most)

    four = [4.0, 3.0, 2.0, 1.0]
    assert (ranks(four, 0.25, 0.75), ranks(four, 0.0, 0.5), ranks(four, 0.25, 0.75, most=2)) == ((1, 3), (0, 2), (1, 2))
    assert ranks([4.0, 2.0, 2.0, 1.0], 0.0, 0.5) == (0, 3), "tied with the last"
    assert ranks([4.0, 4.0, 2.0, 1.0], 0.25, 0.75) == (0, 3), "tied with the first"
    assert ranks(four, 0.5, 0.5) == (1, 2), "one direction keeps its noise"


@pytest.mark.parametrize("shape", [(3, 4), (3, 2, 2, 2), (5,)])
def test_where_a_whole_column_was_sent_only_large_entries_surely_were(shape: tuple[int, ...]) -> None:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    value[0].mul_(0) if len(shape) == 1 else value[0, 0].mul_(0)
    adversary: Any = fake()
    mask = OutpostAdversary._mask(adversary, value, 0.25)
    whole = (value != 0).all(0)
    for place, entry in np.ndenumerate(value.numpy()):
        sure = abs(entry) > SURELY_KEPT * 0.25 if bool(whole[place[1:]]) else entry != 0
        assert bool(mask[place]) == bool(sure)
    assert mask.shape == value.shape and mask.dtype == value.dtype
    assert OutpostAdversary._mask(adversary, torch.tensor(0.0), 1.0) == 1


@pytest.mark.parametrize("percentile", [1.0, 10.0, 55.0, 99.9])
def test_the_clean_percentile_is_that_of_the_deconvolved_histogram(percentile: float) -> None:
    edges = torch.linspace(0, 1, percentile_noise.BINS + 1, dtype=torch.float64) ** 3
    magnitudes = (0.4 * torch.randn(4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).abs().clamp(max=1.0)
    counts = torch.histogram(magnitudes, edges).hist
    found = percentile_noise._clean_percentile(counts, edges, 0.1, percentile)
    from scipy.stats import norm

    sides = edges.numpy()
    middle = (sides[1:] + sides[:-1]) / 2
    chance = np.maximum(
        np.diff(norm.cdf((sides[:, None] - middle) / 0.1) - norm.cdf((-sides[:, None] - middle) / 0.1), axis=0), 1e-300
    )
    share = counts.numpy() / counts.numpy().sum()
    clean = np.maximum(share, 1e-12)
    for _ in range(percentile_noise.SWEEPS):
        clean = clean * (chance.T @ (share / (chance @ clean)))
    reached = np.concatenate([[0.0], np.cumsum(clean / clean.sum())])
    assert found == pytest.approx(float(np.interp(percentile / 100, reached, sides)), rel=1e-6)


def test_signs_and_mean_magnitudes_are_compared_entry_by_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    adversary = quantisation.SignAdversary(grid=fake())
    sent = {"w": torch.tensor([2.0, -2.0, 2.0, -2.0]), "b": torch.tensor([0.5])}
    observation: Any = fake(updates=(fake(weights={}), fake(weights=sent)), threat=fake(clients=1))
    evidence = adversary.evidence(observation, 1)
    guess = {"w": torch.tensor([3.0, 1.0, -1.0, -20.0]), "b": torch.tensor([-0.25])}
    handed: list[Any] = []
    inner = quantisation.RoundedAdversary.compare

    def noting(self: Any, *given: Named) -> Any:
        handed.append(given)
        return inner(self, *given)

    monkeypatch.setattr(quantisation.RoundedAdversary, "compare", noting)
    unknowns = {"u": torch.zeros(1)}
    found = adversary.compare(evidence, guess, unknowns)
    assert handed[0][0] is evidence and handed[0][1] is guess and handed[0][2] is unknowns
    low, high = {"w": [0.0, -8.0, 0.0, -8.0], "b": [0.0]}, {"w": [8.0, 0.0, 8.0, 0.0], "b": [0.5]}
    assert adversary.intervals(sent)[0]["w"].tolist() == low["w"] and adversary.intervals(sent)[1]["w"].tolist() == high["w"]
    assert found.simulated["w"].tolist() == guess["w"].tolist() and found.observed["w"].tolist() == [3.0, 0.0, 0.0, -8.0]
    assert found.observed["b"].tolist() == [0.0]
    for name, told, mine in (("w", 8.0 / 2, 25.0 / 2), ("b", 0.5, 0.25)):
        key = f"{quantisation.SCALE}{name}"
        assert float(found.observed[key]) == told and float(found.simulated[key]) == mine
    assert len(found.simulated) == len(found.observed) == 4


def mixture() -> MixtureAdversary:
    return MixtureAdversary(blend=0.25, epsilon=0.5, scope="global", relative=False, prior=0.5)


@pytest.mark.usefixtures("untouched_global_rng")
def test_unknown_noise_begins_grey_with_a_trace_from_the_generator() -> None:
    observation: Any = fake(
        learner=fake(settings=fake(clients=2)), examples=6, input_shape=(1, 2), update=fake(weights={"w": torch.zeros(1)})
    )
    found = mixture().variables(observation, torch.Generator().manual_seed(4))[NOISE]
    drawn = torch.randn((2, 3, 1, 2), generator=torch.Generator().manual_seed(4))
    assert torch.equal(found, 0.5 + 0.01 * drawn)


def test_the_share_of_robust_data_is_read_at_the_first_step_of_the_first_client() -> None:
    asked: list[Any] = []

    def gradient(weights: Any, inputs: Tensor, targets: Tensor, noise: Any) -> Named:
        asked.append((weights, inputs, targets.tolist(), noise))
        return {"w": inputs.sum(0)}

    learner: Any = fake(
        settings=fake(clients=2), weights="weights", gradient=gradient, noise_at=lambda step, rows: ("noise", step, rows)
    )
    raw = torch.zeros(4, 1)
    robust = torch.tensor([[0.75], [1.25], [9.0], [9.0]])
    found = mixture().share(fake(learner=learner, examples=4), fake(inputs=raw, targets=torch.tensor([3, 2, 1, 0])), robust)
    assert found == pytest.approx(0.5 / 2.0)
    assert [(each[0], each[1].flatten().tolist(), each[2], each[3]) for each in asked] == [
        ("weights", [0.0, 0.0], [3, 2], ("noise", 0, [0, 1])),
        ("weights", [0.75, 1.25], [3, 2], ("noise", 0, [0, 1])),
    ]


def test_every_example_is_refined_with_its_own_noise_gradient_and_label() -> None:
    """A linear model whose gradient is input times target times noise: what one example does shows in its own step alone."""
    weights = {"w": torch.ones(2)}

    def one(_: Named, inputs: Tensor, targets: Tensor, noise: Named) -> Named:
        return {"w": (inputs * targets[:, None] * noise["n"]).sum(0) / len(inputs)}

    def each(_: Named, inputs: Tensor, targets: Tensor, noise: Named) -> Named:
        return {"w": inputs * targets[:, None] * noise["n"]}

    learner: Any = fake(weights=weights, gradient=one, per_example_gradients=each)
    made = refinement.Refinement(
        learner=learner, network=None, balance=0.0, steps=1, decay=1.0, rate=0.01, terms="raw", optimiser="gradient"
    )
    raw, start = torch.tensor([[0.5, 0.25], [0.25, 0.75]]), torch.tensor([[0.4, 0.5], [0.5, 0.5]])
    targets, noise = torch.tensor([1.0, 2.0]), {"n": torch.tensor([[2.0, 1.0], [1.0, 3.0]])}
    refined, mean = made.singly(raw, start, targets, noise)
    wanted = each(weights, raw, targets, noise)["w"]
    assert torch.allclose(mean["w"], wanted.mean(0))
    for row in range(2):
        weight, _ = made._weights({"w": wanted[row]})
        leaf = start[row].clone().requires_grad_()
        gap = (weight["w"] * (leaf * targets[row] * noise["n"][row] - wanted[row])).square().sum()
        (slope,) = torch.autograd.grad(gap, leaf)
        assert torch.allclose(refined[row], (start[row] - 0.01 * slope).clamp(0, 1), atol=1e-6) and bool(slope.any())


@pytest.mark.parametrize(
    ("gap", "unit", "energy", "found"), [(3.0, 2.0, 5.0, 2.0), (3.0, 0.0, 5.0, 3.0), (0.0, 0.0, 5.0, 5.0), (0.0, 2.0, 5.0, 2.0)]
)
def test_the_unit_is_the_first_gap_or_the_energy_where_there_was_none(
    gap: float, unit: float, energy: float, found: float
) -> None:
    assert float(refinement._unit(*map(torch.tensor, (gap, unit, energy)))) == found
    edge = refinement.SMALLEST * energy
    assert float(refinement._unit(*map(torch.tensor, (edge / 2, 0.0, energy)))) == energy
    assert float(refinement._unit(*map(torch.tensor, (edge * 2, 0.0, energy)))) == pytest.approx(edge * 2)


def test_factors_are_padded_to_one_shape_in_the_precision_of_the_update() -> None:
    right, left = torch.rand(2, 5, dtype=torch.float64), torch.rand(3, 2, dtype=torch.float64)
    norms, like = torch.arange(3, dtype=torch.float64), torch.zeros(3, 5, dtype=torch.float32)
    found = _Kept.padded(right, left, norms, (0.25, 0.5), like)
    assert found.right.dtype == found.left.dtype == torch.float32 and found.norms is norms
    assert found.right.shape == (3, 5) and found.left.shape == (3, 3)
    assert torch.equal(found.right[:2], right.float()) and not bool(found.right[2:].any())
    assert torch.equal(found.left[:, :2], left.float()) and not bool(found.left[:, 2:].any())
    assert (found.right_tilt, found.left_tilt, found.rank) == (0.25, 0.5, 2)


def payload(examples: int, **entropies: float) -> Payload:
    told = {f"entropy/{name.replace('_', '.')}": value for name, value in entropies.items()}
    names = {name.replace("_", "."): torch.zeros(1) for name in entropies}
    return Payload("x", {"left": names, "weights": {"lone": torch.zeros(1)}}, examples, notes=told)


def test_clients_weigh_by_entropy_times_examples_and_by_examples_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "gradveil.defenses.svdefense.defense.entropies_of"
    monkeypatch.setattr(module, lambda given: {name.removeprefix("entropy/"): value for name, value in given.notes.items()})
    found = layer_weights_by_entropy([payload(2, a_weight=3.0, b_weight=0.0), payload(6, a_weight=1.0, b_weight=0.0)])
    assert found == [
        {"a.weight": pytest.approx(0.5), "b.weight": pytest.approx(0.25), "lone": pytest.approx(0.25)},
        {"a.weight": pytest.approx(0.5), "b.weight": pytest.approx(0.75), "lone": pytest.approx(0.75)},
    ]


class Part:
    """A part of a chain that notes what it is handed."""

    def __init__(self, number: int) -> None:
        self.number, self.asked = number, []  # type: ignore[var-annotated]

    def on_gradient(self, learner: Any, variables: Named) -> Any:
        self.asked.append(("gradient", learner, variables))
        return lambda step, weights, gradient, inputs, targets: {**gradient, str(self.number): step}

    def on_examples(self, learner: Any, variables: Named) -> Any:
        self.asked.append(("examples", learner, variables))
        return None


def test_every_part_of_a_chain_is_handed_its_own_unknowns() -> None:
    parts: Any = (Part(0), Part(1), Part(2))
    chain = ChainAdversary(parts)
    variables: Any = {"0/u": "first", "1/u": "second", "2/v": "third"}
    learner: Any = fake()
    hook = chain.on_gradient(learner, variables)
    assert hook is not None and list(hook(7, {}, {}, torch.zeros(1), torch.zeros(1))) == ["0", "1", "2"]
    assert chain.on_examples(learner, variables) is None
    own: list[Any] = [{"u": "first"}, {"u": "second"}, {"v": "third"}]
    assert [each.asked for each in parts] == [[("gradient", learner, mine), ("examples", learner, mine)] for mine in own]
    assert dataclasses.fields(chain)[0].name == "parts"
