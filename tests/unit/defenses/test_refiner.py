"""Refiner: the two metrics, the descent, the ball and its λ, what it refuses, and faults that the same checks must notice."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gradveil.client.update import run_client
from gradveil.defenses import ClientView, State, adapt, build_defense
from gradveil.defenses.none import NoDefense
from gradveil.defenses.refiner.defense import CENTRE, INPUTS, LAMBDA, Refiner, evaluation_network
from gradveil.defenses.refiner.refinement import Refinement, importance, layer_numbers, project_on_ball, weighted_gap
from gradveil.errors import DefenseOrder, ReplaceLayer, UsageError
from gradveil.federation.engine import run_training
from gradveil.learning import Learner, loss_by_name
from gradveil.models import build_model
from gradveil.randomness import Seed
from gradveil.records import Batch
from gradveil.study.federation import FederationSettings
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named, norm, sub
from gradveil.testing.defenses_scene import distance

GOLDEN: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[2] / "golden" / "defenses_refiner.json").read_text())


class Roughness(nn.Module):
    """Stands in for the evaluation network: how much neighbours differ, from 0 to 1."""

    def __init__(self) -> None:
        super().__init__()
        self.sharpness = nn.Parameter(torch.tensor(3.0))

    def forward(self, images: Tensor) -> Tensor:
        steps = (images[..., 1:, :] - images[..., :-1, :]).square().flatten(1).mean(1)
        return 1 - torch.exp(-self.sharpness * steps)


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch) -> Roughness:
    """Put a network that needs no training in the place of the trained one."""
    judge = Roughness().eval().requires_grad_(False)
    monkeypatch.setattr("gradveil.defenses.refiner.defense.evaluation_network", lambda name, like: judge.to(like))
    return judge


def make_learner(spelling: str = "lenet", shape: tuple[int, ...] = (3, 16, 16), **settings: Any) -> Learner:
    model = build_model(spelling, input_shape=shape, classes=4, seed=Seed(0))
    return Learner.of(model, loss_by_name("cross_entropy"), TrainingSettings(**settings))


def smooth_batch(count: int = 3, shape: tuple[int, ...] = (3, 16, 16)) -> Batch:
    generator = torch.Generator().manual_seed(5)
    ramp = torch.linspace(0.1, 0.9, shape[-1]).expand(count, *shape)
    inputs = (ramp + 0.2 * torch.rand((count, shape[0], 1, 1), generator=generator) - 0.1).clamp(0, 1)
    return Batch(inputs, torch.randint(4, (count,), generator=generator))


def refined(defense: Refiner, learner: Learner | None = None, batch: Batch | None = None, seed: int = 0) -> Tensor:
    return run_client(learner or make_learner(), batch or smooth_batch(), defense, Seed(seed)).trained_batch.inputs


def named(values: dict[str, list[float]]) -> Named:
    return {name: torch.tensor(value) for name, value in values.items()}


def test_the_utility_metric_by_hand() -> None:
    golden = GOLDEN["utility_metric"]["value"]
    gradient, weights, robust, expected = (
        named(dict(zip(golden["names"], golden[key], strict=True))) for key in ("gradient", "weights", "robust", "importance")
    )
    assert list(layer_numbers(golden["names"]).values()) == golden["layers"]
    weight = importance(gradient, weights, golden["decay"])
    for name, value in expected.items():
        assert torch.allclose(weight[name], value)
    tolerance = GOLDEN["utility_metric"]["tolerance"]
    assert float(weighted_gap(robust, gradient, weight)) == pytest.approx(golden["metric"], abs=tolerance)
    assert not any(
        value.requires_grad for value in importance({n: v.requires_grad_() for n, v in gradient.items()}, weights, 1).values()
    )


@pytest.mark.parametrize("row", GOLDEN["ball"]["value"]["rows"], ids=lambda row: f"{row['epsilon']} {row['scope']}")
def test_the_ball_by_hand(row: dict[str, Any]) -> None:
    golden = GOLDEN["ball"]["value"]
    sent, shares = project_on_ball(
        named(golden["gradient"]), named(golden["centre"]), row["epsilon"], row["scope"], row["relative"]
    )
    assert shares.tolist() == pytest.approx(row["shares"], abs=GOLDEN["ball"]["tolerance"])
    for name, value in named(row["sent"]).items():
        assert torch.allclose(sent[name], value, atol=GOLDEN["ball"]["tolerance"])


@given(
    seed=st.integers(0, 1000),
    epsilon=st.sampled_from([0.0, 1e-4, 0.01, 0.1, 1.0, 30.0]),
    size=st.sampled_from([1e-3, 1.0, 1e3]),
    double=st.booleans(),
)
def test_nothing_leaves_the_ball_and_nothing_inside_moves(seed: int, epsilon: float, size: float, double: bool) -> None:
    generator, kind = torch.Generator().manual_seed(seed), torch.float64 if double else torch.float32
    centre, gradient = (
        {n: size * torch.randn(s, generator=generator).to(kind) for n, s in (("a.weight", (20, 7)), ("a.bias", (20,)), ("b", ()))}
        for _ in range(2)
    )
    sent, shares = project_on_ball(gradient, centre, epsilon, "global", False)
    gap = float(norm({n: v.double() - centre[n].double() for n, v in sent.items()}))
    # Rounding of the sum to the precision of what is sent is not the ball's.
    rounding = float(norm({n: v.double() for n, v in sent.items()})) * torch.finfo(kind).eps
    assert gap <= epsilon * (1 + 1e-6) + rounding
    if float(norm(sub(gradient, centre))) < epsilon:
        assert shares.tolist() == [1.0] and all(torch.equal(sent[n], v) for n, v in gradient.items())


@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("epsilon", [0.0, 1e-3, 0.02, 10.0])
def test_what_a_client_sends_stays_in_the_ball_and_lambda_says_where(scope: str, epsilon: float) -> None:
    learner, batch = make_learner(), smooth_batch()
    raw = learner.gradient(learner.weights, batch.inputs, batch.targets)
    result = run_client(learner, batch, Refiner(epsilon=epsilon, scope=scope), Seed(0))  # type: ignore[arg-type]
    sent = result.payload.streams["weights"]
    robust = learner.gradient(learner.weights, result.trained_batch.inputs, batch.targets)
    numbers = layer_numbers(raw) if scope == "layer" else dict.fromkeys(raw, 1)
    shares = []
    for number in set(numbers.values()):
        own = [name for name in raw if numbers[name] == number]
        delta, gap = (float(norm({n: side[n].double() - raw[n].double() for n in own})) for side in (robust, sent))
        assert gap <= epsilon * (1 + 1e-6) + 1e-9
        shares.append(min(1.0, epsilon / delta))
    assert float(result.state[LAMBDA]) == pytest.approx(sum(shares) / len(shares), rel=1e-4)
    assert set(result.state) == {LAMBDA}, "the raw gradient outlives the round"


def tells_the_leak(defense: Refiner) -> bool:
    """Whether a client that sends the raw gradient says so."""
    learner, batch = make_learner(), smooth_batch()
    result = run_client(learner, batch, defense, Seed(0))
    raw = run_client(learner, batch, NoDefense(), Seed(0)).payload.streams["weights"]
    is_raw = all(torch.equal(value, raw[name]) for name, value in result.payload.streams["weights"].items())
    assert is_raw, "with no radius the raw gradient is sent, to the bit"
    return float(result.state[LAMBDA]) == 0.0


@dataclass(frozen=True, kw_only=True)
class HidesTheLeak(Refiner):
    """Projects, and keeps the λ of a gradient that was not."""

    def protect_gradient(self, gradient: Named, view: ClientView, state: State) -> tuple[Named, State]:
        projected, after = super().protect_gradient(gradient, view, state)
        return projected, {**after, LAMBDA: state[LAMBDA]}


def test_epsilon_zero_sends_the_raw_gradient_and_says_so() -> None:
    assert tells_the_leak(Refiner(epsilon=0.0))
    assert not tells_the_leak(HidesTheLeak(epsilon=0.0))


def raises_noise(defense: Refiner, judge: nn.Module) -> bool:
    """Whether the descent raises what the evaluation network sees, over the start."""
    start = refined(type(defense)(balance=100.0, steps=0))
    return bool(judge(refined(defense)).mean() > judge(start).mean() + 0.01)


@dataclass(frozen=True, kw_only=True)
class WrongSign(Refiner):
    """Adds the privacy metric instead of subtracting it."""

    def _refinement(self, view: ClientView, inputs: Tensor) -> Refinement:
        right = super()._refinement(view, inputs)
        return Refinement(**{**vars(right), "balance": -right.balance})


def test_privacy_is_raised_and_not_lowered(network: Roughness) -> None:
    assert raises_noise(Refiner(balance=100.0), network)
    assert not raises_noise(WrongSign(balance=100.0), network)


def leaves_the_network_alone(defense: Refiner, judge: Roughness) -> bool:
    """Whether the evaluation network is the same afterwards, without gradients on it."""
    before = float(judge.sharpness)
    refined(defense)
    return judge.sharpness.grad is None and float(judge.sharpness) == before and not judge.sharpness.requires_grad


@dataclass(frozen=True, kw_only=True)
class TrainsTheNetwork(Refiner):
    """Lets the network learn to please: a step of its own weights for every refinement."""

    def _refinement(self, view: ClientView, inputs: Tensor) -> Refinement:
        right = super()._refinement(view, inputs)
        assert right.network is not None
        (-right.network.requires_grad_(True)(inputs).mean()).backward()
        return right


def test_the_network_is_frozen(network: Roughness) -> None:
    assert leaves_the_network_alone(Refiner(), network)
    assert not leaves_the_network_alone(TrainsTheNetwork(), network)


def test_the_descent_keeps_the_gradient_better_than_noise_alone() -> None:
    learner, batch = make_learner(), smooth_batch()
    raw = learner.gradient(learner.weights, batch.inputs, batch.targets)
    weight = importance(raw, learner.weights, 0.95)

    def metric(defense: Refiner) -> float:
        robust = learner.gradient(learner.weights, refined(defense, learner, batch), batch.targets)
        return float(weighted_gap(robust, raw, weight))

    assert metric(Refiner(balance=0.0)) < 0.3 * metric(Refiner(steps=0))
    assert metric(Refiner(balance=0.01)) < metric(Refiner(balance=100.0))


def test_the_slope_is_that_of_the_objective() -> None:
    learner, batch = make_learner().to(torch.float64), smooth_batch()
    raw = batch.inputs.double()
    judge = Roughness().double().requires_grad_(False)
    common: dict[str, Any] = {"balance": 0.7, "steps": 1, "decay": 0.9, "rate": 1e-3, "optimiser": "gradient"}
    start = (0.5 * raw + 0.25 + 0.05 * torch.sin(torch.arange(raw.numel(), dtype=torch.float64)).reshape(raw.shape)).clamp(0, 1)
    wanted = learner.gradient(learner.weights, raw, batch.targets)
    weight = importance(wanted, learner.weights, 0.9)
    unit = float(weighted_gap(learner.gradient(learner.weights, start, batch.targets), wanted, weight))

    def objective(inputs: Tensor) -> float:
        gap = weighted_gap(learner.gradient(learner.weights, inputs, batch.targets), wanted, weight)
        return float(gap) / unit - 0.7 * float(judge(inputs).mean())

    moved, centre = Refinement(learner=learner, network=judge, terms="relative", **common).jointly(raw, start, batch.targets, {})
    slope = (start - moved) / 1e-3 / len(batch)  # one step of plain descent, in which nothing reached the edge of [0, 1]
    assert all(torch.allclose(value, wanted[name]) for name, value in centre.items())
    for position in ((0, 0, 3, 4), (1, 2, 8, 8), (2, 1, 15, 0)):
        nudge = torch.zeros_like(start)
        nudge[position] = 1e-5
        expected = (objective(start + nudge) - objective(start - nudge)) / 2e-5
        assert float(slope[position]) == pytest.approx(expected, rel=1e-3, abs=1e-8)


@pytest.mark.parametrize("terms", ["relative", "log", "raw"])
def test_examples_refined_together_are_those_refined_alone(terms: Any) -> None:
    learner, batch = make_learner().to(torch.float64), smooth_batch(4)
    batch = batch.replace(inputs=batch.inputs.double())
    judge = Roughness().double().requires_grad_(False)
    start = 0.5 * batch.inputs + 0.5 * torch.rand(batch.inputs.shape, generator=torch.Generator().manual_seed(0)).double()
    work = Refinement(learner, judge, balance=1.0, steps=4, decay=0.95, rate=0.5, terms=terms, optimiser="gradient")
    together, mean = work.singly(batch.inputs, start, batch.targets, {})
    for index in range(len(batch)):
        row = slice(index, index + 1)
        alone, _ = work.jointly(batch.inputs[row], start[row], batch.targets[row], {})
        assert torch.allclose(together[row], alone, atol=1e-9)
    assert distance(mean, learner.gradient(learner.weights, batch.inputs, batch.targets)) < 1e-12


def test_the_balance_does_not_depend_on_the_units_of_the_loss() -> None:
    batch = smooth_batch()
    ordinary = make_learner()
    steep = ordinary.replace(loss=lambda outputs, targets: 1000 * loss_by_name("cross_entropy")(outputs, targets))
    relative = [refined(Refiner(balance=1.0), learner, batch) for learner in (ordinary, steep)]
    assert torch.allclose(relative[0], relative[1], atol=1e-2)
    raw = [refined(Refiner(balance=1.0, terms="raw"), learner, batch) for learner in (ordinary, steep)]
    assert float((raw[0] - raw[1]).abs().max()) > 0.1


def test_without_steps_the_data_is_blended_with_uniform_noise() -> None:
    learner, batch = make_learner(), smooth_batch()
    view = ClientView(learner=learner, seed=Seed(3), weights=learner.weights, raw_batch=batch, batch=batch)
    blended, _ = Refiner(blend=0.3, steps=0).protect_batch(batch, view, {})
    drawn = (blended.inputs - 0.7 * batch.inputs) / 0.3
    assert float(drawn.min()) >= -1e-5 and float(drawn.max()) <= 1 + 1e-5
    assert float(drawn.mean()) == pytest.approx(0.5, abs=0.03) and float(drawn.std()) == pytest.approx(12**-0.5, abs=0.03)


@pytest.mark.parametrize("minibatch", [0, 2])
def test_local_steps_have_a_ball_each(minibatch: int) -> None:
    learner = make_learner(shares="weights", local_steps=3, minibatch=minibatch, learning_rate=0.5)
    batch = smooth_batch(5)
    raw = run_client(learner, batch, NoDefense(), Seed(0)).payload.streams["weights"]
    closed = run_client(learner, batch, Refiner(epsilon=0.0), Seed(0))
    assert distance(dict(closed.payload.streams["weights"]), dict(raw)) < 1e-6
    assert set(closed.state) == {LAMBDA} and float(closed.state[LAMBDA]) == 0
    free, wide = (run_client(learner, batch, Refiner(epsilon=e), Seed(0)) for e in (None, 1e6))
    assert distance(dict(wide.payload.streams["weights"]), dict(free.payload.streams["weights"])) == 0
    half = run_client(learner, batch, Refiner(epsilon=0.3, relative=True, blend=0.9, balance=100.0), Seed(0))
    assert 0 < float(half.state[LAMBDA]) <= 1
    again = run_client(learner, batch, Refiner(epsilon=0.0), Seed(0), state=closed.state, round_index=1)
    assert not [name for name in again.state if name == INPUTS or name.startswith(CENTRE)]


def test_only_records_that_are_trained_on_are_refined() -> None:
    learner = make_learner(shares="weights", local_steps=1, minibatch=2, learning_rate=1.0)
    batch = smooth_batch(5)
    result = run_client(learner, batch, Refiner(epsilon=0.0), Seed(0))
    blended = run_client(learner, batch, Refiner(steps=0), Seed(0)).trained_batch.inputs
    assert torch.equal(result.trained_batch.inputs[2:], blended[2:])
    assert not torch.equal(result.trained_batch.inputs[:2], blended[:2])
    raw = run_client(learner, batch, NoDefense(), Seed(0)).payload.streams["weights"]
    assert distance(dict(result.payload.streams["weights"]), dict(raw)) < 1e-6


def test_a_ball_after_another_gradient_defense_is_refused() -> None:
    learner, batch = make_learner(), smooth_batch()
    with pytest.raises(DefenseOrder, match="put refiner first"):
        run_client(learner, batch, build_defense("dp_sgd + refiner(epsilon=0.1)"), Seed(0))
    run_client(learner, batch, build_defense("dp_sgd + refiner"), Seed(0))
    chained = run_client(learner, batch, build_defense("data_noise(std=0.1) + refiner(epsilon=0) + pruning(rate=0.5)"), Seed(0))
    noisy = run_client(learner, batch, build_defense("data_noise(std=0.1) + pruning(rate=0.5)"), Seed(0))
    # The ball is around the gradient of what refiner was given, not around that of the client's own data.
    for name, value in noisy.payload.streams["values"].items():
        assert torch.allclose(value, chained.payload.streams["values"][name])


def test_a_bottleneck_sees_the_same_noise_in_both_gradients() -> None:
    defense = build_defense("precode(latent=8) + refiner(epsilon=0)")
    adapted = adapt(defense, build_model("lenet", input_shape=(3, 16, 16), classes=4, seed=Seed(0)))
    assert adapted.adapt_loss is not None
    noise = {name: torch.zeros((1, 3, *shape)) for name, shape in adapted.noise_shapes.items()}
    learner = Learner.of(adapted.model, adapted.adapt_loss(loss_by_name("cross_entropy"))).replace(noise=noise)
    both = [run_client(learner, smooth_batch(), each, Seed(0)).payload for each in (defense, NoDefense())]
    assert distance(dict(both[0].streams["weights"]), dict(both[1].streams["weights"])) < 1e-6


@pytest.mark.parametrize("shape", [(3, 16, 16), (1, 5, 7), (3, 1, 2)])
@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_single_constant_and_tiny_pictures_come_out_finite(shape: tuple[int, ...], value: float) -> None:
    learner = make_learner("mlp(hidden=6)", shape)
    batch = Batch(torch.full((1, *shape), value), torch.tensor([1]))
    for match in ("batch", "example"):
        for terms in ("relative", "log", "raw"):
            defense = Refiner(match=match, terms=terms, epsilon=0.05, steps=3)
            result = run_client(learner, batch, defense, Seed(0))
            assert bool(torch.isfinite(result.trained_batch.inputs).all())
            assert all(bool(torch.isfinite(each).all()) for each in result.payload.streams["weights"].values())


def test_what_cannot_be_judged_is_refused_in_one_sentence() -> None:
    table = Batch(torch.rand((2, 6), generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1]))
    learner = make_learner("mlp(hidden=6)", (6,))
    with pytest.raises(UsageError, match=r"pictures with 1 or 3 channels.*balance = 0"):
        run_client(learner, table, Refiner(), Seed(0))
    assert refined(Refiner(balance=0.0), learner, table).shape == (2, 6)
    batch_norm = make_learner("resnet20", batch_norm="train")
    with pytest.raises(ReplaceLayer, match="match = 'batch'"):
        run_client(batch_norm, smooth_batch(), Refiner(match="example"), Seed(0))
    assert bool(torch.isfinite(refined(Refiner(steps=2), batch_norm)).all())


@pytest.mark.parametrize(
    "setting",
    [
        "blend=1",
        "blend=-0.1",
        "balance=-1",
        "steps=1.5",
        "decay=1.1",
        "epsilon=-1",
        "scope='layers'",
        "terms='logs'",
        "match='all'",
    ],
)
def test_settings_without_a_meaning_are_refused(setting: str) -> None:
    with pytest.raises(UsageError, match=setting.partition("=")[0]):
        build_defense(f"refiner({setting})")


def test_missing_and_wrong_networks_are_named() -> None:
    with pytest.raises(UsageError, match="nowhere"):
        evaluation_network("nowhere-32", torch.zeros(1))


def test_trainings_show_lambda_and_resume_with_it(tmp_path: Path) -> None:
    settings = FederationSettings(
        data="digits", model="mlp(hidden=8)", clients=4, clients_per_round=2, rounds=2, defense="refiner(epsilon=0.5, steps=2)"
    )
    whole = run_training(settings)
    shares = [record.counters[LAMBDA] for record in whole.rounds]
    assert all(0 < share <= 1 for share in shares)
    run_training(settings, out=tmp_path, stop_after=1)
    resumed = run_training(settings, out=tmp_path)
    assert all(torch.equal(value, whole.weights[name]) for name, value in resumed.weights.items())
    assert [record.counters[LAMBDA] for record in resumed.rounds] == shares
